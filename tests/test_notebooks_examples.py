# SPDX-License-Identifier: Apache-2.0
"""Notebooks and examples run as they are, with fewer rounds."""

import pathlib
import runpy

import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem
)
def test_notebook(path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("JAXFED_SMOKE", "1")
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        assert not cell.get("outputs"), "commit notebooks without outputs"
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem
)
def test_example(path):
    assert runpy.run_path(str(path))["main"](rounds=60) > 0.7


def test_readme_example():
    text = (ROOT / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    images = names["digits"].test["image"].reshape(-1, 64)
    logits = names["model"].apply(names["params"], images)
    assert (logits.argmax(-1) == names["digits"].test["label"]).mean() > 0.8


def test_readme_audit(capsys):
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
    (code,) = [b.split("```")[0] for b in blocks if "audit.distinguish" in b]
    exec(compile(code, "README.md", "exec"), {})
    kept, broken = capsys.readouterr().out.strip().splitlines()
    assert kept.endswith("not refuted") and broken.endswith("REFUTED")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("c.Phase", "3.591"),
        ("falsify(", "1.33"),
        ("my_method", "not refuted\nPrivacy: example-level local"),
    ],
)
def test_blocks_of_the_privacy_page(word, says, capsys):
    blocks = (ROOT / "docs/privacy.md").read_text().split("```python\n")[1:]
    (code,) = [b.split("```")[0] for b in blocks if word in b]
    exec(compile(code, "privacy.md", "exec"), {})
    assert says in capsys.readouterr().out
