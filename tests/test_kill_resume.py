# SPDX-License-Identifier: Apache-2.0
"""Kill a training with SIGKILL at five random moments; nothing of it may be lost.

As a script: ``python tests/test_kill_resume.py [SEED]``.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from jaxfed.experiments import load_params

# State on clients and server, and random batches. Noise is resumed in test_train.py.
RUN = (
    "--algorithm byz_clip21_sgd2m --epsilon inf --batch-size 16 --num-clients 5 "
    "--num-byzantine 1 --rounds 40 --eval-every 1 --no-compare"
)


def start(*argv):
    """Start ``jaxfed train`` as a process of its own."""
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "jaxfed", "train", *map(str, argv)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )


def finish(process):
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def logged(folder):
    """Return the rounds in the log, whatever state it is in."""
    try:
        return (folder / "metrics.jsonl").read_text().count("\n")
    except FileNotFoundError:
        return 0


def kill_and_resume(folder, seed, say=lambda text: None):
    """Run, kill five times, and finish; then compare with a run left in peace."""
    generator = random.Random(seed)
    finish(start(*RUN.split(), "--out", folder / "whole"))
    whole = json.loads((folder / "whole" / "summary.json").read_text())
    killed = folder / "killed"
    for attempt in range(5):
        flags = ["--resume", killed] if (killed / "config.toml").exists() else []
        process = start(*(flags or [*RUN.split(), "--out", killed]))
        if attempt == 0:  # while it imports, loads or compiles
            time.sleep(generator.uniform(0, whole["wall_seconds"] / 2))
        else:  # anywhere between two rounds: computing, logging or saving
            wanted = logged(killed) + generator.randint(1, 7)
            while process.poll() is None and logged(killed) < wanted:
                time.sleep(0.002)
            time.sleep(generator.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
        say(f"kill {attempt + 1}: {logged(killed)} of 40 rounds logged")
    finish(start("--resume", killed))
    summary = json.loads((killed / "summary.json").read_text())
    a, b = load_params(folder / "whole"), load_params(killed)
    for layer in a:
        for name in a[layer]:
            np.testing.assert_array_equal(a[layer][name], b[layer][name])
    assert summary["params_sha256"] == whole["params_sha256"]
    assert logged(killed) == 40
    kept = {p.name for p in (killed / "checkpoints").iterdir()}
    assert kept == {"39", "40"}  # and nothing half-written
    say("final parameters agree bit for bit")


@pytest.mark.slow
def test_kill_and_resume(tmp_path):
    kill_and_resume(tmp_path, seed=0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        seed = int(sys.argv[1]) if len(sys.argv) > 1 else time.time_ns() % 2**32
        print(f"seed {seed}")
        kill_and_resume(Path(directory), seed, print)
