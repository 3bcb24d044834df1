# SPDX-License-Identifier: Apache-2.0
"""One half of a federated run in a process of its own: ``client ID`` or ``server``.

Frames go over stdin and stdout: a count and that many arrays in ``.npy`` format, each
with its length in front. Nothing is pickled.
"""

import io
import struct
import sys

import jax
import numpy as np
import toys

import jaxfed
from jaxfed.rounds import client_key

NUM_CLIENTS, NUM_BYZANTINE, ROUNDS = 5, 1, 20
NOISE_SEED, DATA_SEED, SCALE = 11, 12, 10.0
PROBLEM = toys.Regression(NUM_CLIENTS, m=6)


def algorithm():
    return jaxfed.make_algorithm(
        "byz_clip21_sgd2m",
        learning_rate=0.1,
        rule="nnm+median",
        num_byzantine=NUM_BYZANTINE,
        num_clients=NUM_CLIENTS,
        key=NOISE_SEED,
        clip_norm=0.5,
        noise_std=0.1,
        momentum=0.8,
        server_momentum=0.7,
        local_work=jaxfed.gradient(PROBLEM.loss, batch_size=3),
    )


def write(stream, arrays):
    """Send arrays and flush."""
    stream.write(struct.pack("<I", len(arrays)))
    for array in arrays:
        buffer = io.BytesIO()
        np.save(buffer, np.asarray(array), allow_pickle=False)
        stream.write(struct.pack("<Q", buffer.tell()))
        stream.write(buffer.getvalue())
    stream.flush()


def read(stream):
    """Receive arrays; None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    arrays = []
    for _ in range(struct.unpack("<I", head)[0]):
        (size,) = struct.unpack("<Q", stream.read(8))
        arrays.append(np.load(io.BytesIO(stream.read(size)), allow_pickle=False))
    return arrays


def client(client_id, receive, send):
    """Answer each broadcast with an upload; knows its own shard only."""
    half, params = algorithm().client, PROBLEM.params
    shard = jax.tree.map(lambda x: x[client_id], PROBLEM.shards)
    structure = jax.tree.structure({"params": params, "round": 0})

    @jax.jit
    def work(message, state):
        key = client_key(DATA_SEED, message["round"], client_id)
        upload, state, _ = half.update(message, state, shard, key)
        return upload, state

    state = half.init(params, client_id)
    while (frame := read(receive)) is not None:
        upload, state = work(jax.tree.unflatten(structure, frame), state)
        write(send, jax.tree.leaves(upload))


def server(receive, send):
    """Broadcast, then answer each stack of uploads with the next broadcast."""
    half, params = algorithm().server, PROBLEM.params
    structure = jax.tree.structure(params)
    update = jax.jit(lambda uploads, state: half.update(uploads, state)[0])
    state = half.init(params)
    write(send, jax.tree.leaves(half.broadcast(state)))
    while (frame := read(receive)) is not None:
        state = update(jax.tree.unflatten(structure, frame), state)
        write(send, jax.tree.leaves(half.broadcast(state)))


if __name__ == "__main__":
    pipes = sys.stdin.buffer, sys.stdout.buffer
    if sys.argv[1] == "client":
        client(int(sys.argv[2]), *pipes)
    else:
        server(*pipes)
