# SPDX-License-Identifier: Apache-2.0
"""Run one configuration: train in chunks, checkpoint, compare, report, resume."""

import dataclasses
import importlib.metadata
import math
import platform
import shlex
import time
from pathlib import Path

import jax
import numpy as np

import jaxfed
from jaxfed import _validate
from jaxfed.experiments import config as configs
from jaxfed.experiments import report
from jaxfed.experiments.checkpoint import Checkpoints, digest
from jaxfed.experiments.folder import (
    RunFolder,
    finite,
    read_config,
    write_atomically,
)
from jaxfed.experiments.problem import Problem, make_problem
from jaxfed.experiments.programs import Programs

_PACKAGES = ("jax", "jaxlib", "optax", "numpy", "flax", "orbax-checkpoint")


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run in progress."""

    problem: Problem
    programs: Programs
    folder: RunFolder
    reporter: report.Reporter
    checkpoint_every: int
    began: float


def train(
    config,
    *,
    out=None,
    devices=1,
    overwrite=False,
    checkpoint_every=1,
    reporter=None,
) -> dict:
    """Train, and keep everything in a new run folder.

    The folder has ``config.toml``, ``metrics.jsonl`` (one object per evaluation),
    ``curve.png``, ``summary.json`` and ``checkpoints/``. The same configuration gives
    the same parameters bit for bit on the same machine and number of devices.

    Args:
      config: TrainConfig.
      out: folder to create; None: ``runs/<dataset>-<algorithm>-<run id>``.
      devices: devices to spread clients over, or ``"all"``.
      overwrite: replace the run in an existing run folder.
      checkpoint_every: evaluations between checkpoints, >= 1.
      reporter: Reporter, None for one that prints.

    Returns:
      The summary, as in ``summary.json``.

    Raises:
      ValueError: for a wrong configuration, missing data, or a folder that is not
        empty; before anything is compiled or written.
      OSError: if the folder cannot be written.
      ImportError: if a package of the extra ``train`` is missing.

    Cost:
      State of one checkpoint: what the method keeps for each client and on the server.
    """
    began = time.perf_counter()
    _validate.count("checkpoint_every", checkpoint_every)
    reporter = report.Reporter() if reporter is None else reporter
    path = Path(out) if out is not None else default_folder(config)
    RunFolder.check_free(path, overwrite=overwrite)
    problem, programs = _prepare(config, devices)
    with RunFolder.create(path, config, overwrite=overwrite) as folder:
        run = _Run(problem, programs, folder, reporter, checkpoint_every, began)
        return _resumable(run)


def resume(
    folder, config=None, *, devices=1, checkpoint_every=1, reporter=None
) -> dict:
    """Continue a run that was killed, to the bit-identical result.

    Args:
      folder: its run folder.
      config: TrainConfig that must mean the same run, None to take the stored one;
        its ``data_dir`` may differ.
      devices: as in :func:`train`; bits agree for the same number only.
      checkpoint_every: as in :func:`train`.
      reporter: Reporter, None for one that prints.

    Returns:
      The summary; that of a finished run is read and shown.

    Raises:
      ValueError: if there is no run, it is of another configuration or other data, or
        its newest checkpoint is damaged.
      OSError: if the folder cannot be read or written.
    """
    began = time.perf_counter()
    _validate.count("checkpoint_every", checkpoint_every)
    reporter = report.Reporter() if reporter is None else reporter
    stored = read_config(folder)
    config = stored if config is None else config
    changed = configs.differences(stored, config)
    if changed:
        raise ValueError(
            f"{folder} holds a run of another configuration: {'; '.join(changed)}. "
            "Leave these settings out to continue it, or start a new run with --out."
        )
    with RunFolder(folder) as opened:
        summary = opened.summary()
        if summary is not None:
            _same(summary, "run_id", configs.run_id(config), folder)
            reporter.summary(summary, folder)
            return summary
        problem, programs = _prepare(config, devices)
        run = _Run(problem, programs, opened, reporter, checkpoint_every, began)
        return _resumable(run)


def default_folder(config) -> Path:
    """Return where a run goes if nobody says: ``runs/<dataset>-<algorithm>-<id>``."""
    dataset = config.dataset.replace("/", "-").replace(":", "-")
    method = configs.parse_algorithm(config.algorithm)[0]
    name = f"{dataset}-{method}-{configs.run_id(config)[:12]}"
    return Path("runs") / name


def _prepare(config, devices):
    problem = make_problem(config)
    programs = Programs(problem, devices)
    config = problem.config
    programs.check(config.rule, min(config.eval_every, config.rounds))
    return problem, programs


def _resumable(run):
    try:
        return _execute(run)
    except KeyboardInterrupt:
        run.reporter.end()
        path = shlex.quote(str(run.folder.path))
        run.reporter.say(f"\nInterrupted. Continue with: jaxfed train --resume {path}")
        raise
    finally:
        run.reporter.end()


def _execute(run):
    problem, programs, folder = run.problem, run.programs, run.folder
    config, run_id = problem.config, configs.run_id(problem.config)
    say = run.reporter.say
    say(f"jaxfed {jaxfed.__version__}, run {run_id[:12]} in {folder.path}\n")
    say(configs.to_toml(config))
    say(problem.statement.text())
    say(problem.noise_text() + "\n")
    checkpoints = Checkpoints(folder.path / "checkpoints")
    try:
        done, spent = checkpoints.latest() or 0, {"wall": 0.0, "compile": 0.0}
        if done:
            meta = checkpoints.meta(done)
            _same(meta, "run_id", run_id, folder.path)
            _same(meta, "data_sha256", problem.data_sha256, folder.path)
            spent = meta["seconds"]
            state = checkpoints.load(done, programs.state(config.rule))
            say(f"Continuing after round {done}.")
        else:
            state = programs.init(config.rule)
        rows = folder.cut_metrics(done)
        clock = _Clock(run.began, programs, spent)
        label = config.rule or config.algorithm
        chunks = _chunks(run, label, state, problem.hparams, done, clock)
        for state, row in chunks:
            folder.append_metrics(row)
            rows.append(row)
            evaluations = math.ceil(row["round"] / config.eval_every)
            last = row["round"] == config.rounds
            if last or evaluations % run.checkpoint_every == 0:
                checkpoints.save(
                    row["round"],
                    state,
                    problem.params(state),
                    {
                        "run_id": run_id,
                        "data_sha256": problem.data_sha256,
                        "seconds": clock.read(),
                        "versions": versions(),
                    },
                )
    finally:
        checkpoints.close()
    params = problem.params(state)
    comparisons, histories = _compare(run, clock)
    curve = report.curve({_label(config): rows} | histories)
    write_atomically(folder.path / "curve.png", curve)
    summary = _summary(run, rows, params, comparisons, clock.read())
    folder.write_json("summary.json", summary)
    # Read back, so that a first and a resumed run return and print the same thing.
    summary = folder.summary()
    run.reporter.summary(summary, folder.path)
    return summary


def _chunks(run, label, state, hparams, done, clock, rule=None):
    """Train to the end, yielding ``(state, row)`` after each evaluation."""
    config, programs = run.problem.config, run.programs
    rule = config.rule if rule is None else rule
    run.reporter.begin(label, config.rounds, done)
    while done < config.rounds:
        # Boundaries are multiples of eval_every, wherever a run was resumed.
        size = min(config.eval_every, config.rounds - done)
        programs.prepare(rule, size)
        start = time.perf_counter()
        state, metrics = programs.train(rule, size, state, hparams)
        seconds = time.perf_counter() - start
        done += size
        row = {
            "round": done,
            **metrics,
            "rounds_per_second": size / seconds,
            "seconds": clock.read()["wall"],
        }
        row = finite(row)
        run.reporter.evaluation(row)
        yield state, row
    run.reporter.end()


def _compare(run, clock):
    """Run the comparisons; return their results and their rows by label."""
    config, hparams = run.problem.config, run.problem.hparams
    wanted = []
    if config.compare and config.rule not in (None, "mean"):
        other = dataclasses.replace(config, rule="mean")
        try:
            wanted.append((other, run.problem.numbers("mean")))
        except ValueError as error:  # e.g. a sensitivity asserted for another rule
            run.reporter.say(f"No comparison with the mean: {error}")
    if config.compare and "noise_std" in hparams:
        silent = hparams | {"noise_std": np.float32(0)}
        wanted.append((dataclasses.replace(config, epsilon=math.inf), silent))
    results, histories = [], {}
    for other, values in wanted:
        rule, short = other.rule, "no noise" if other.rule == config.rule else "mean"
        state = run.programs.init(rule)
        rows = [row for _, row in _chunks(run, short, state, values, 0, clock, rule)]
        histories[_label(other)] = rows
        results.append(_result(other, rows))
    return results, histories


def _label(config):
    return f"{config.rule or config.algorithm}, noise: {_noise(config)}"


def _noise(config):
    if config.epsilon == math.inf:
        return "none"
    return f"{config.noise_calibration} epsilon {config.epsilon:g}"


def _result(config, rows):
    numbers = {name: rows[-1][name] for name in ("accuracy", "loss", "train_loss")}
    return {"rule": config.rule or config.algorithm, "noise": _noise(config), **numbers}


def _summary(run, rows, params, comparisons, seconds):
    problem = run.problem
    config, privacy = problem.config, problem.statement.as_dict()
    scored = [row for row in rows if row["accuracy"] is not None]
    best = max(scored, key=lambda row: row["accuracy"], default=rows[-1])
    device = jax.devices()[0]
    result = _result(config, rows)
    return {
        "run_id": configs.run_id(config),
        "accuracy": result["accuracy"],
        "loss": result["loss"],
        "train_loss": result["train_loss"],
        "best": {"accuracy": best["accuracy"], "round": best["round"]},
        "rounds": config.rounds,
        "run": result,
        "comparisons": comparisons,
        "epsilon_certified": privacy["epsilon_certified"],
        "epsilon_nominal": privacy["epsilon_nominal"],
        "privacy": privacy,
        "config": dataclasses.asdict(config) | {"epsilon": _text(config.epsilon)},
        "seed": config.seed,
        "num_parameters": sum(x.size for x in jax.tree.leaves(params)),
        "params_sha256": digest(params),
        "data_sha256": problem.data_sha256,
        "wall_seconds": seconds["wall"],
        "compile_seconds": seconds["compile"],
        "device": f"{device.platform} ({device.device_kind})",
        "versions": versions(),
    }


def _text(number):
    return "inf" if number == math.inf else number


def versions() -> dict[str, str]:
    """Return the versions a result depends on."""
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {
        "jaxfed": jaxfed.__version__,
        "python": platform.python_version(),
        **found,
    }


def _same(saved, name, wanted, folder):
    if saved.get(name) != wanted:
        what = {"run_id": "another configuration", "data_sha256": "other data"}[name]
        raise ValueError(
            f"what {folder} holds was computed from {what} than given now ({name} is "
            f"{str(saved.get(name))[:12]} there, {wanted[:12]} here). Restore what was "
            "used then, or start a new run with --out."
        )


class _Clock:
    """Seconds of a run over all the processes that worked on it."""

    def __init__(self, began, programs, spent):
        self._began, self._programs, self._spent = began, programs, spent

    def read(self):
        wall = time.perf_counter() - self._began
        return {
            "wall": round(self._spent["wall"] + wall, 3),
            "compile": round(self._spent["compile"] + self._programs.seconds, 3),
        }
