# SPDX-License-Identifier: Apache-2.0
"""Public names: they exist, say what they do, and cost little to import."""

import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import types

import optax
import pytest

import jaxfed

# Loaded by these only where they are needed.
HEAVY = [
    "array_record",
    "chex",
    "dp_accounting",
    "flax",
    "matplotlib",
    "orbax",
    "pandas",
    "rich",
    "scipy.stats",
    "sklearn",
    "tensorflow",
    "tensorflow_datasets",
    "tomli_w",
    "tyro",
]


def public_modules():
    yield jaxfed
    for info in pkgutil.walk_packages(jaxfed.__path__, "jaxfed."):
        if not info.name.rpartition(".")[2].startswith("_"):
            yield importlib.import_module(info.name)


MODULES = [module for module in public_modules() if hasattr(module, "__all__")]
NAMES = [(module, name) for module in MODULES for name in module.__all__]


def ids(value):
    return getattr(value, "__name__", value)


def sections(text):
    return set(re.findall(r"^([A-Z][a-z]+):$", inspect.cleandoc(text), re.MULTILINE))


@pytest.mark.parametrize("module", list(public_modules()), ids=ids)
def test_modules_say_what_they_are_for(module):
    if module.__file__.endswith("__init__.py") and not module.__doc__:
        assert not vars(module).get("__all__"), "a package with names needs a docstring"
    else:
        assert module.__doc__ and module.__doc__.strip().endswith((".", ":"))


@pytest.mark.parametrize("module", MODULES, ids=ids)
def test_all_is_unique_and_complete(module):
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert not name.startswith("_") and hasattr(module, name)


@pytest.mark.parametrize(("module", "name"), NAMES, ids=ids)
def test_public_names_are_documented(module, name):
    value = getattr(module, name)
    if isinstance(value, types.ModuleType):
        return  # its own test above
    if not callable(value):
        return  # a table; the module says what it holds
    text = value.__doc__
    assert text, "no docstring"
    first = text.strip().splitlines()[0]
    assert first.endswith("."), first
    found = sections(text)
    if inspect.isclass(value):
        for field in getattr(value, "_fields", ()):
            # Optax's two fields need no second description.
            optax_own = issubclass(value, optax.GradientTransformation)
            described = re.search(rf"^  {field}: ", inspect.cleandoc(text), re.M)
            assert optax_own or ("Attributes" in found and described), field
        return
    parameters = inspect.signature(value).parameters
    if parameters:
        assert "Args" in found, f"no Args: in {name}"
        for parameter in parameters:
            assert re.search(rf"\b{parameter}\b", text), f"{parameter} is not described"
    assert "Returns" in found or "Return " in first, f"no Returns: in {name}"


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", jaxfed.__version__)


SCRIPT = """
import json, sys, time
import jax, optax
start = time.perf_counter()
import jaxfed
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "modules": sorted(sys.modules)}))
"""


def test_import_is_light():
    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(out.stdout)
    loaded = [name for name in HEAVY if name in report["modules"]]
    assert not loaded, loaded
    # The target is 0.3 s; a busy machine must not fail the test.
    assert report["seconds"] < 1.0
