# SPDX-License-Identifier: Apache-2.0
"""``jaxfed train`` end to end: run folders, resuming, reports, and every refusal."""

import dataclasses
import io
import json
import logging
import math
import re

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxfed import cli, naming, privacy
from jaxfed.experiments import (
    Reporter,
    TrainConfig,
    load_params,
    report,
    resume,
    runner,
    train,
)
from jaxfed.experiments import folder as folders
from jaxfed.experiments import problem as problems
from jaxfed.experiments.checkpoint import Checkpoints
from jaxfed.experiments.config import from_toml
from jaxfed.experiments.programs import Programs

QUIET = Reporter(quiet=True)
# Few clients compile fast; 5 rounds in chunks of 2 leave a remainder.
TINY = TrainConfig(num_clients=5, num_byzantine=1, rounds=5, eval_every=2)
ALONE = dataclasses.replace(TINY, compare=False)
# Without noise, whose code takes a second to compile.
PLAIN = dataclasses.replace(ALONE, algorithm="byz_sgdm", rounds=2, eval_every=1)


def rows(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def numbers(folder):
    return [
        (r["round"], r["loss"], r["accuracy"], r["train_loss"], r["influence"])
        for r in rows(folder)
    ]


@pytest.fixture(autouse=True)
def strict_shapes():
    """Take the place of the common fixture: Flax broadcasts its biases."""


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Keep compiled programs for this file: many runs here are the same program."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for values in (settings, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is settings:
            yield


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One finished run with comparisons: its folder, summary and printed text."""
    folder = tmp_path_factory.mktemp("train") / "run"
    text = io.StringIO()
    summary = train(TINY, out=folder, reporter=Reporter(text))
    return folder, summary, text.getvalue()


def test_run_folder(done):
    folder, summary, _ = done
    assert {p.name for p in folder.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "curve.png",
        "summary.json",
        "checkpoints",
    }
    assert from_toml(folder / "config.toml") == TINY
    assert [r["round"] for r in rows(folder)] == [2, 4, 5]
    known = {"loss", "accuracy", "train_loss", "influence", "rounds_per_second"}
    assert known <= rows(folder)[0].keys()
    # One number a round, of the run itself.
    assert [len(r["influence"]) for r in rows(folder)] == [2, 2, 1]
    assert all(0 <= i <= 0.25 for r in rows(folder) for i in r["influence"])
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["4", "5"]
    assert json.loads((folder / "summary.json").read_text()) == summary


def test_summary(done):
    folder, summary, _ = done
    last = rows(folder)[-1]
    assert summary["accuracy"] == last["accuracy"] and summary["loss"] == last["loss"]
    assert summary["best"]["accuracy"] == max(r["accuracy"] for r in rows(folder))
    assert summary["run_id"] in (folder / "config.toml").read_text()
    assert summary["seed"] == 0 and summary["num_parameters"] == 650
    assert 0 < summary["compile_seconds"] < summary["wall_seconds"]
    assert {"jaxfed", "python", "jax", "optax", "numpy"} <= summary["versions"].keys()
    assert [(c["rule"], c["noise"]) for c in summary["comparisons"]] == [
        ("mean", "certified epsilon 8"),
        ("nnm+median", "none"),
    ]


def test_both_epsilons_are_in_the_summary(done):
    _, summary, _ = done
    stated = summary["privacy"]
    assert summary["epsilon_certified"] == stated["epsilon_certified"]
    assert summary["epsilon_nominal"] == stated["epsilon_nominal"]
    assert 7.999 < summary["epsilon_certified"] <= 8
    # 1438 examples over 4 honest clients, the smallest has 359; C = 1.
    assert stated["sensitivity"] == pytest.approx(2 / 359)
    assert stated["unit"] == "example" and stated["model"] == "local"


def test_printed_text(done):
    folder, summary, text = done
    assert 'rule = "nnm+median"' in text
    assert "certified epsilon 8 at delta 0.001" in text and "nominal epsilon" in text
    assert re.search(r"nnm\+median: round 2/5  loss [\d.]+  accuracy 0\.\d+", text)
    assert str(folder) in text
    table = text.rstrip().splitlines()[-4:]
    assert table[0].split() == ["rule", "noise", "test", "accuracy"]
    assert table[2].startswith("mean (plain averaging)  certified epsilon 8")
    assert table[3].startswith("nnm+median              none")
    assert table[1].endswith(f"{summary['accuracy']:.1%}")


def test_saved_parameters_are_the_model(done):
    folder, summary, _ = done
    params = load_params(folder)
    assert params["Dense_0"]["kernel"].shape == (64, 10)
    assert not np.array_equal(
        params["Dense_0"]["bias"], load_params(folder, 4)["Dense_0"]["bias"]
    )
    from jaxfed import data, models

    test = data.load("digits").test
    accuracy = models.accuracy(models.make_model("softmax", 10), params, test)
    assert float(accuracy) == pytest.approx(summary["accuracy"])
    with pytest.raises(ValueError, match="no checkpoint 3"):
        load_params(folder, 3)


def test_resuming_a_finished_run_shows_it(done, capsys):
    folder, summary, text = done
    assert cli.main(["train", "--resume", str(folder)]) == 0
    assert capsys.readouterr().out in text
    assert resume(folder, reporter=QUIET) == summary


class Killed(BaseException):
    """Stands for a process that ends here."""


def die(*args, **kwargs):
    raise Killed


def die_at(call, function, before=None):
    """Return ``function`` that dies in its call number ``call``."""
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(None)
        if len(calls) == call:
            if before is not None:
                before(*args)
            raise Killed
        return function(*args, **kwargs)

    return wrapped


def half_a_line(folder, row):
    with open(folder.path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row)[:10])


MOMENTS = {
    "before the first round": (runner, "_chunks", die),
    "before the first checkpoint": (Checkpoints, "save", die),
    "while logging": (
        folders.RunFolder,
        "append_metrics",
        die_at(2, folders.RunFolder.append_metrics, half_a_line),
    ),
    "between log and checkpoint": (Checkpoints, "save", die_at(2, Checkpoints.save)),
    "during the comparisons": (runner, "_compare", die),
    "while drawing": (report, "curve", die),
    "before the summary": (folders.RunFolder, "write_json", die),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_resume_after_death(done, tmp_path, moment):
    reference, summary, _ = done
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*MOMENTS[moment])
        with pytest.raises(Killed):
            train(TINY, out=folder, reporter=QUIET)
    assert not (folder / "summary.json").exists()
    again = resume(folder, reporter=QUIET)
    for name in ("params_sha256", "accuracy", "loss", "comparisons", "best"):
        assert again[name] == summary[name]
    assert numbers(folder) == numbers(reference)


@pytest.fixture
def unfinished(tmp_path):
    """A run that died after its checkpoint of round 4."""
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", die_at(3, Checkpoints.save))
        with pytest.raises(Killed):
            train(ALONE, out=folder, reporter=QUIET)
    return folder


def test_damaged_checkpoints(unfinished, done, capsys):
    newest = unfinished / "checkpoints" / "4"
    for file in (newest / "state").rglob("*"):
        if file.is_file() and file.stat().st_size > 100:
            file.write_bytes(file.read_bytes()[:50])
    assert cli.main(["train", "--resume", str(unfinished)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert re.search(
        rf"round 4 is damaged .* Delete the folder {newest} .*from round 2", message
    )
    import shutil

    shutil.rmtree(newest)
    assert (
        resume(unfinished, reporter=QUIET)["params_sha256"]
        == (done[1]["params_sha256"])
    )


def test_a_checkpoint_with_other_bits_is_refused(unfinished):
    meta = unfinished / "checkpoints" / "4" / "meta" / "metadata"
    saved = json.loads(meta.read_text())
    meta.write_text(json.dumps(saved | {"state_sha256": "0" * 64}))
    with pytest.raises(ValueError, match="its checksum does not match.*Delete"):
        resume(unfinished, reporter=QUIET)
    meta.write_text("{")
    with pytest.raises(ValueError, match="round 4 is damaged.*Delete"):
        resume(unfinished, reporter=QUIET)


def test_a_lost_log_is_noticed(unfinished):
    (unfinished / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="does not reach round 4"):
        resume(unfinished, reporter=QUIET)


def test_other_data_are_refused(unfinished, monkeypatch):
    monkeypatch.setattr(problems, "_digest", lambda *trees: "f" * 64)
    with pytest.raises(ValueError, match="computed from other data"):
        resume(unfinished, reporter=QUIET)


def test_a_configuration_edited_afterwards_is_refused(unfinished):
    file = unfinished / "config.toml"
    file.write_text(file.read_text().replace("seed = 0", "seed = 1"))
    with pytest.raises(ValueError, match="computed from another configuration"):
        resume(unfinished, reporter=QUIET)


def test_interrupt(tmp_path, capsys, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_chunks", interrupt)
    folder = tmp_path / "a run"
    assert cli.main(["train", "--num-clients", "5", "--num-byzantine", "1", "--out",
                     str(folder)]) == 130  # fmt: skip
    assert f"jaxfed train --resume '{folder}'" in capsys.readouterr().out


def test_nothing_compiles_after_the_first_chunk(tmp_path):
    class Recorder(Reporter, logging.Handler):
        def __init__(self):
            Reporter.__init__(self, quiet=True)
            logging.Handler.__init__(self)
            self.on, self.messages = False, []

        def emit(self, record):
            if self.on:
                self.messages.append(record.getMessage())

        def evaluation(self, row):
            self.on = row["round"] < 6

    recorder = Recorder()
    logger = logging.getLogger("jax")
    logger.addHandler(recorder)
    propagate, logger.propagate = logger.propagate, False
    try:
        with jax.log_compiles():
            config = dataclasses.replace(ALONE, rounds=6)
            train(config, out=tmp_path / "run", reporter=recorder)
            assert [m for m in recorder.messages if "ompil" in m] == []
            recorder.on = True
            jax.jit(lambda x: x + 1)(1.0)
            assert any("ompil" in m for m in recorder.messages)
    finally:
        logger.propagate = propagate
        logger.removeHandler(recorder)


def test_comparison_without_noise_reuses_the_program():
    programs = Programs(problems.make_problem(TINY))
    programs.prepare("nnm+median", 2)
    spent = programs.seconds
    state = programs.init("nnm+median")
    silent = programs.hparams | {"noise_std": np.float32(0)}
    noisy, _ = programs.train("nnm+median", 2, state, programs.hparams)
    quiet, _ = programs.train("nnm+median", 2, programs.init("nnm+median"), silent)
    assert programs.seconds == spent
    difference = jax.tree.map(
        lambda a, b: float(abs(a - b).max()), noisy.server.params, quiet.server.params
    )
    assert min(jax.tree.leaves(difference)) > 0


@pytest.mark.parametrize("attack", ["nan", "inf", "ipm(scale=1e30)"])
def test_training_goes_on_under_wild_messages(tmp_path, attack):
    config = dataclasses.replace(PLAIN, attack=attack)
    summary = train(config, out=tmp_path / "run", reporter=QUIET)
    assert math.isfinite(summary["loss"])


def test_numbers_that_are_not_finite_become_null(tmp_path):
    text = io.StringIO()
    config = dataclasses.replace(PLAIN, attack="inf", rule="mean")
    summary = train(config, out=tmp_path / "run", reporter=Reporter(text))
    assert summary["loss"] is None
    assert [r["round"] for r in rows(tmp_path / "run")] == [1, 2]
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "loss not finite" in text.getvalue()


@pytest.mark.parametrize("name", sorted(naming.ALGORITHMS))
def test_every_method_is_built_and_accounted_for(name):
    problem = problems.make_problem(dataclasses.replace(TINY, algorithm=name))
    Programs(problem).check(problem.config.rule, 2)
    if "noise_std" in problem.hparams:
        assert 7.99 < problem.statement.epsilon_certified <= 8
    else:
        assert problem.statement.model == "none"


@pytest.mark.parametrize("name", sorted(naming.ALGORITHMS))
def test_every_method_trains_on_digits_with_no_other_argument(name, tmp_path, capsys):
    out = tmp_path / "run"
    argv = ["train", "--algorithm", name, "--rounds", "3", "--out", str(out)]
    assert cli.main(argv) == 0, capsys.readouterr().err
    assert f'algorithm = "{name}"' in capsys.readouterr().out
    row = rows(out)[-1]
    assert row["round"] == 3 and 0 <= row["accuracy"] <= 1
    assert math.isfinite(row["loss"]) and len(row["influence"]) == 3


CENTRAL = dataclasses.replace(TINY, num_clients=10, algorithm="byzuldp")


@pytest.mark.parametrize("rule", ["median", "centered_clipping(clip_norm=0.01)"])
def test_plain_averaging_is_compared_under_noise_of_its_own(rule):
    problem = problems.make_problem(dataclasses.replace(CENTRAL, rule=rule))
    noise = float(problem.numbers("mean")["noise_std"])
    assert noise != float(problem.hparams["noise_std"])
    mean = 2 * 0.15 / 10  # C = 1, server momentum 0.85
    assert privacy.certified_epsilon(noise, mean, 1e-3, 5) == pytest.approx(8, rel=1e-6)


def test_where_a_central_sensitivity_is_from():
    def statement(algorithm, rule):
        config = dataclasses.replace(CENTRAL, algorithm=algorithm, rule=rule)
        return problems.make_problem(config).statement

    tight = statement("byzuldp", "median")
    assert (tight.sensitivity, tight.sensitivity_mode) == (pytest.approx(0.15), "tight")
    paper = statement("byzuldp(mode=paper)", "median")
    assert paper.sensitivity == pytest.approx(2 * 0.15 * 650**0.5)
    assert paper.sensitivity_mode == "paper" and paper.nominal_formula == "byzuldp"
    asserted = statement("byzuldp(sensitivity=0.5)", "nnm+median")
    assert asserted.sensitivity_mode == "asserted"
    assert "holds only if it does" in asserted.text()
    with pytest.raises(ValueError, match="a rule that knows its own"):
        statement("byzuldp(sensitivity=1e-6)", "mean")
    with pytest.raises(ValueError, match="unknown sensitivity .*: use mean, trimmed"):
        statement("byzuldp", "nnm+median")
    assert statement("safe_dshb", "median").nominal_formula == "Byz-Clip21-SGD2M"


def test_partial_participation_of_private_methods():
    def statement(**changes):
        return problems.make_problem(
            dataclasses.replace(CENTRAL, clients_per_round=4, **changes)
        ).statement

    assert statement(algorithm="dp_fedavg").sensitivity == pytest.approx(2 / 4)
    assert "4 clients drawn" in statement(algorithm="dp_fedavg").sampling
    with pytest.raises(
        ValueError, match="every client in every round, got clients_per"
    ):
        statement()
    assert statement(epsilon=math.inf, rule="nnm+median").model == "none"


def test_noise_is_set_beside_what_it_hides():
    text = problems.make_problem(TINY).noise_text()
    assert "each message" in text and text.endswith("norm at most 1")
    assert problems.make_problem(PLAIN).noise_text() == ""


def test_rounds_without_honest_clients_leave_the_mean_loss_alone(tmp_path):
    config = dataclasses.replace(
        PLAIN, num_byzantine=3, rule="mean", attack="zero", clients_per_round=1
    )
    config = dataclasses.replace(config, rounds=8, eval_every=8)
    assert math.isfinite(train(config, out=tmp_path / "run", reporter=QUIET)["loss"])
    assert math.isfinite(rows(tmp_path / "run")[-1]["train_loss"])


def test_noise_levels():
    def statement(**changes):
        config = dataclasses.replace(TINY, num_clients=20, num_byzantine=0, **changes)
        return problems.make_problem(config).statement

    client = statement(algorithm="byz_clip21_sgd2m", clip_norm=0.5, rounds=100)
    assert client.unit == "client" and client.sensitivity == 1.0
    assert client.noise_std == pytest.approx(
        privacy.certified_noise_std(8.0, 1.0, 1e-3, 100)
    )
    nominal = statement(
        algorithm="byz_clip21_sgd2m", noise_calibration="nominal", epsilon=3.0
    )
    assert nominal.noise_std == pytest.approx(
        privacy.nominal_noise_std(1.0, 3.0, 1e-3, 5)
    )
    assert nominal.epsilon_nominal == pytest.approx(3)
    assert nominal.epsilon_certified > 3
    # Sub-sampled and per example, as in the paper: S/m with m = 71.
    sampled = statement(
        batch_size=10, noise_calibration="nominal", epsilon=3.0, algorithm="safe_dshb"
    )
    assert sampled.noise_std == pytest.approx(
        10 / 71 * privacy.nominal_noise_std(1.0 / 10, 3.0, 1e-3, 5)
    )
    assert sampled.sensitivity == pytest.approx(0.2)
    # The printed reading of Algorithm 5 puts the noise of a sum on the average.
    literal = statement(
        batch_size=10,
        noise_calibration="nominal",
        epsilon=3.0,
        algorithm="byz_clip21_sgd2m_plus",
    )
    assert literal.noise_std == pytest.approx(10 * sampled.noise_std)
    for it in (sampled, literal):
        assert it.epsilon_nominal == pytest.approx(3.0)
    none = statement(epsilon=math.inf)
    assert none.model == "none" and none.noise_std == 0


def test_who_owns_data():
    plain = problems.make_problem(TINY)
    assert plain.shards.count.tolist() == [360, 360, 359, 359, 0]
    flipped = problems.make_problem(dataclasses.replace(TINY, attack="label_flip"))
    assert flipped.shards.count.tolist() == [288, 288, 288, 287, 287]
    honest = problems.make_problem(
        dataclasses.replace(TINY, attack="none", byzantine_own_data=True)
    )
    before, after = honest.shards.data["label"], flipped.shards.data["label"]
    assert np.array_equal(before[:4], after[:4])
    assert np.array_equal(9 - before[4], after[4])


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_clients_spread_over_devices(tmp_path):
    config = dataclasses.replace(PLAIN, num_clients=8)
    one = train(config, out=tmp_path / "one", reporter=QUIET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", die_at(2, Checkpoints.save))
        with pytest.raises(Killed):
            train(config, out=tmp_path / "four", devices=4, reporter=QUIET)
    four = resume(tmp_path / "four", devices=4, reporter=QUIET)
    assert four["loss"] == pytest.approx(one["loss"], rel=1e-4)
    with pytest.raises(ValueError, match="cannot spread 5 clients"):
        train(ALONE, out=tmp_path / "five", devices=4, reporter=QUIET)


def test_overwriting(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    problem = []
    monkeypatch.setattr(runner, "_prepare", lambda *a: (problem, problem))
    monkeypatch.setattr(runner, "_execute", lambda run: {"seed": None})
    train(TINY, out=folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match="--resume.*--out.*--overwrite"):
        train(TINY, out=folder)
    other = dataclasses.replace(TINY, seed=1)
    train(other, out=folder, overwrite=True)
    assert from_toml(folder / "config.toml") == other
    assert {p.name for p in folder.iterdir()} == {"notes.txt", "config.toml"}
    with folders.RunFolder(folder), pytest.raises(ValueError, match="another process"):
        train(TINY, out=folder, overwrite=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text("a = 1")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="no run folder"):
            train(TINY, out=tmp_path / "home", overwrite=overwrite)
    with pytest.raises(ValueError, match="is a file"):
        train(TINY, out=folder / "notes.txt")


def test_half_written_files_do_not_count(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".part-config.toml-1").write_text("datas")
    with folders.RunFolder.create(folder, TINY):
        assert [p.name for p in folder.iterdir()] == ["config.toml"]


def test_live_progress_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    reporter = Reporter(terminal)
    reporter.begin("median", 4)
    row = {"round": 2, "loss": 0.5, "accuracy": 0.25, "rounds_per_second": 10.0}
    reporter.evaluation(row)
    reporter.end()
    text = terminal.getvalue()
    assert "median" in text and "2/4" in text and "accuracy 0.250" in text


# The command line, in this process.


def refused(capsys, *argv):
    """Return the one paragraph that a command is refused with."""
    assert cli.main([str(a) for a in argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("jaxfed: error: ") and err.count("\n") == 1
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ("--num-byzantine 13", r"f < n/2, got f=13, n=25\. Lower num_byzantine"),
        ("--rule-byzantine 13", r"f < n/2, got f=13, n=25"),
        ("--num-byzantine 25", "num_byzantine must be below num_clients"),
        ("--num-clients 0", "num_clients must be at least 1"),
        ("--num-clients 3000", "num_clients must be at most the number of examples"),
        (
            "--split by_classes --classes-per-client 11",
            "classes_per_client must be at most the number of classes",
        ),
        (
            "--split by_classes --classes-per-client 1 --num-clients 9",
            "hold at most 4 of 10 classes",
        ),
        ("--split by_classes", "needs classes_per_client="),
        ("--split dirichlet --beta 0", "beta must be"),
        ("--split dirichlet --beta 0.001", "no Dirichlet split"),
        ("--epsilon -1", "epsilon must be > 0"),
        ("--delta 0", "0 < delta < 1"),
        ("--clip-norm 0", "clip_norm must be > 0"),
        ("--clip-norm inf", "epsilon=8.0 needs a bound.*finite clip_norm"),
        ("--learning-rate -1", "learning_rate must be"),
        ("--momentum 1", "0 <= momentum < 1"),
        ("--rounds 0", "rounds must be at least 1"),
        ("--rounds 3000000000", "rounds must be at most 2147483647"),
        ("--batch-size 99999999999", "batch_size must be at most 2147483647"),
        ("--seed 4294967296", "seed must be at most 4294967295"),
        ("--learning-rate 1e50", "learning_rate must lie between.*=1e[+]50"),
        ("--clip-norm 1e-300", "clip_norm must lie between.*=1e-300"),
        ("--checkpoint-every 0", "checkpoint_every must be at least 1"),
        ("--dataset digit", "not found.*Did you mean 'digits'"),
        ("--model mpl", "unknown model 'mpl'.*Did you mean 'mlp'"),
        ("--model small_cnn", "too small for this model"),
        ("--algorithm safe_dhsb", "unknown algorithm.*Did you mean 'safe_dshb'"),
        ("--rule nnm+medain", "unknown rule 'medain'.*Did you mean 'median'"),
        ("--rule median+nnm", "wrong place"),
        ("--rule nnm", "wrong place"),
        ("--rule (", "cannot read"),
        ("--attack imp", "unknown attack 'imp'.*Did you mean 'ipm'"),
        ("--split idd", "unknown split 'idd'.*Did you mean 'iid'"),
        ("--algorithm byz_sgdm --epsilon 3", "byz_sgdm adds no noise"),
        ("--devices 99", "devices must be 'all' or from 1 to"),
        ("--devices 0", "devices must be 'all' or from 1 to"),
    ],
)
def test_refusals(tmp_path, capsys, flags, match):
    out = tmp_path / "run"
    err = refused(capsys, "train", *flags.split(), "--out", out)
    assert re.search(match, err)
    assert not out.exists()


def test_a_data_set_that_is_not_there(tmp_path, capsys):
    err = refused(capsys, "train", "--dataset", "mnist", "--data-dir", tmp_path)
    assert str(tmp_path) in err
    assert all(way in err for way in ("--data-dir", "TFDS_DATA_DIR", "tfds build"))


def test_files_that_cannot_be_used(tmp_path, capsys, done):
    folder = done[0]
    broken = tmp_path / "broken.toml"
    broken.write_text("rounds = = 3")
    assert "not readable TOML" in refused(capsys, "train", "--config", broken)
    broken.write_text("rouns = 3")
    err = refused(capsys, "train", f"--config={broken}")
    assert "Did you mean 'rounds'" in err
    missing = tmp_path / "no.toml"
    assert "cannot read" in refused(capsys, "train", "--config", missing)
    assert "no run to resume" in refused(capsys, "train", "--resume", tmp_path)
    err = refused(capsys, "train", "--resume", folder, "--seed", 7)
    assert "another configuration: seed is 0 there and 7 here" in err
    err = refused(
        capsys, "train", "--resume", folder, "--config", folder / "config.toml"
    )
    assert "Leave --config out" in err
    err = refused(capsys, "train", "--resume", folder, "--out", tmp_path)
    assert "Leave one of the two out" in err
    err = refused(capsys, "train", "--config", folder / "config.toml", "--out", folder)
    assert "already holds a run" in err
    assert "is a file" in refused(capsys, "train", "--out", broken)
    blocked = broken / "run"
    assert "Not a directory" in refused(capsys, "train", "--out", blocked)


@pytest.mark.parametrize("content", ["[1]", "{}", '{"run_id": "x"}', "3", "{"])
def test_a_summary_that_is_none(tmp_path, content):
    folder = folders.RunFolder.create(tmp_path / "run", TINY)
    (folder.path / "summary.json").write_text(content)
    with folder, pytest.raises(ValueError, match="summary.json cannot be read"):
        folder.summary()


def test_a_log_that_is_no_text_is_cut(tmp_path):
    with folders.RunFolder.create(tmp_path / "run", TINY) as folder:
        (folder.path / "metrics.jsonl").write_bytes(b'{"round": 1}\n\xff\xfe\n')
        assert folder.cut_metrics(1) == [{"round": 1}]


def test_flags_override_the_file(tmp_path, monkeypatch, capsys):
    file = tmp_path / "c.toml"
    file.write_text('rounds = 7\nrule = "mean"\ndevices = "all"\n')
    seen = {}
    monkeypatch.setattr(
        runner, "train", lambda config, **options: seen.update(options, config=config)
    )
    assert cli.main(["train", "--config", str(file), "--rule", "median"]) == 0
    assert seen["config"] == TrainConfig(rounds=7, rule="median")
    assert seen["devices"] == "all" and seen["out"] is None


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["train", "--rounds", "many"], "--rounds"),
        (["train", "--roudns", "3"], "--rounds"),
        (["train", "--clip-unit", "batch"], "--clip-unit"),
        (["train", "runs/x"], "runs/x"),
    ],
)
def test_flags_that_cannot_be_parsed(capsys, argv, match):
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert match in err and "Traceback" not in err


def test_help_and_version(capsys):
    assert cli.main(["--help"]) == 0 and cli.main([]) == 0
    assert "jaxfed train" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"jaxfed \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert cli.main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for flag in (
        "dataset data-dir model split beta classes-per-client num-clients "
        "num-byzantine algorithm rule attack rounds eval-every batch-size "
        "learning-rate momentum server-momentum clip-norm epsilon delta seed "
        "out resume devices"
    ).split():
        assert f"--{flag} " in text
    assert "unknown command 'trian'. Did you mean 'train'" in refused(capsys, "trian")


def test_list(capsys):
    assert cli.main(["list"]) == 0
    text = capsys.readouterr().out
    for table in (
        naming.RULES,
        naming.PREAGGREGATORS,
        naming.ATTACKS,
        naming.ALGORITHMS,
    ):
        assert all(re.search(rf"^  {name} +\w", text, re.M) for name in table)
    assert "digits" in text and "mlp" in text and "``" not in text
    assert cli.main(["list", "drag", "nnm"]) == 2
    assert cli.main(["list", "drag"]) == 0
    text = capsys.readouterr().out
    assert "strength=0.1" in text and "References" in text
    assert "unknown name 'dragg'. Did you mean 'drag'" in refused(
        capsys, "list", "dragg"
    )


def test_a_missing_extra_is_named(capsys, monkeypatch):
    find = cli.importlib.util.find_spec
    monkeypatch.setattr(
        cli.importlib.util,
        "find_spec",
        lambda name: None if name == "matplotlib" else find(name),
    )
    err = refused(capsys, "train")
    assert "needs matplotlib" in err and 'pip install "jaxfed[train]"' in err
