# SPDX-License-Identifier: Apache-2.0
"""The proof of the cut: six processes and a wire compute the simulation's run."""

import contextlib
import os
import pathlib
import subprocess
import sys

import cut_worker
import jax
import numpy as np
import toys
from cut_worker import NUM_BYZANTINE, NUM_CLIENTS, ROUNDS, SCALE, read, write

import jaxfed


@contextlib.contextmanager
def process(*arguments):
    """Start a worker; yields functions to send to it and to receive from it."""
    here = pathlib.Path(__file__).parent
    root = pathlib.Path(jaxfed.__file__).parents[1]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    worker = subprocess.Popen(
        [sys.executable, str(here / "cut_worker.py"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
    )

    def receive():
        frame = read(worker.stdout)
        assert frame is not None, f"worker {arguments} ended: {worker.poll()}"
        return frame

    try:
        yield lambda arrays: write(worker.stdin, arrays), receive
        worker.stdin.close()
        assert worker.wait(timeout=60) == 0
    finally:
        worker.kill()
        worker.wait()
        worker.stdin.close()
        worker.stdout.close()


def attack(uploads):
    """Inner-product manipulation by the last clients, in NumPy."""
    for leaf in uploads:
        honest = leaf[: NUM_CLIENTS - NUM_BYZANTINE]
        leaf[NUM_CLIENTS - NUM_BYZANTINE :] = -SCALE * honest.mean(axis=0)


def deployed():
    """Return the broadcast parameters of every round, leaf by leaf."""
    with contextlib.ExitStack() as stack:
        to_server, from_server = stack.enter_context(process("server"))
        clients = [
            stack.enter_context(process("client", str(i))) for i in range(NUM_CLIENTS)
        ]
        messages = [from_server()]
        for _ in range(ROUNDS):
            for send, _ in clients:
                send(messages[-1])
            rows = [receive() for _, receive in clients]
            uploads = [np.stack(leaves) for leaves in zip(*rows, strict=True)]
            attack(uploads)
            to_server(uploads)
            messages.append(from_server())
    return messages


def test_processes_follow_the_simulation():
    simulation = jaxfed.simulate(
        cut_worker.algorithm(),
        NUM_CLIENTS,
        num_byzantine=NUM_BYZANTINE,
        attack=jaxfed.make_attack("ipm", scale=SCALE),
    )
    problem = cut_worker.PROBLEM
    seen, _ = toys.trace(
        simulation,
        problem.params,
        problem.shards,
        ROUNDS,
        simulation.model,
        key=cut_worker.DATA_SEED,
    )
    simulated = jax.tree.leaves(seen)
    for t, (*leaves, count) in enumerate(deployed()):
        assert count == t
        for ours, leaf in zip(simulated, leaves, strict=True):
            np.testing.assert_allclose(leaf, ours[t], rtol=0, atol=1e-6)
    assert all(np.abs(leaf[-1] - leaf[0]).max() > 0.05 for leaf in simulated)
