# SPDX-License-Identifier: Apache-2.0
"""How fast the clients' gradients are: one pass of all clients, against PyTorch.

Same parameters, same images, float32, two threads, one process; repeats are
interleaved and medians reported. PyTorch runs the clients in a loop, which is what
federated simulators built on it do. Gradients are compared first.

    python benchmarks/clients.py --json clients.jsonl

PyTorch: ``pip install torch==2.13.0``, beside the extra ``bench``.
"""

import argparse
import json
import os
import statistics
import time

os.environ["OMP_NUM_THREADS"] = "2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import jaxfed
from jaxfed import models

CLIENTS, BATCH = 25, 32
TARGET = 1.5  # of the smaller one, as the trainer runs it


class SmallCNN(nn.Module):
    """The twin of ``jaxfed.models.SmallCNN``."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(1, 16, 5), nn.Conv2d(16, 16, 5)])
        self.denses = nn.ModuleList([nn.Linear(1024, 10)])

    def forward(self, x):
        """Map ``[B, 1, 28, 28]`` to logits."""
        x = nn.functional.max_pool2d(torch.tanh(self.convs[0](x)), 2)
        x = torch.tanh(self.convs[1](x))
        return self.denses[0](x.permute(0, 2, 3, 1).flatten(1))


class CNN(nn.Module):
    """The twin of ``jaxfed.models.CNN``."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)])
        self.denses = nn.ModuleList([nn.Linear(9216, 128), nn.Linear(128, 10)])

    def forward(self, x):
        """Map ``[B, 1, 28, 28]`` to logits."""
        x = self.convs[1](torch.relu(self.convs[0](x)))
        x = nn.functional.max_pool2d(x, 2).permute(0, 2, 3, 1).flatten(1)
        return self.denses[1](torch.relu(self.denses[0](x)))


def copy(params, twin):
    """Give the twin our parameters; return its parameters in our order."""
    layers = [*twin.convs, *twin.denses]
    names = [f"PatchConv_{i}" for i in range(len(twin.convs))]
    names += [f"Dense_{i}" for i in range(len(twin.denses))]
    with torch.no_grad():
        for layer, name in zip(layers, names, strict=True):
            kernel = np.array(params[name]["kernel"])
            turned = kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T
            layer.weight.copy_(torch.from_numpy(turned.copy()))
            layer.bias.copy_(torch.from_numpy(np.array(params[name]["bias"])))
    return {n: layer for n, layer in zip(names, layers, strict=True)}


def contestants(name, twin):
    """Return ``{label: function}``; each gives all clients' gradients, ``[n, ...]``."""
    rng = np.random.default_rng(0)
    images = rng.random((CLIENTS, BATCH, 28, 28, 1), np.float32)
    labels = rng.integers(0, 10, (CLIENTS, BATCH))
    model = models.make_model(name, 10)
    params = jax.jit(model.init)(jax.random.key(0), images[0])["params"]
    work = jaxfed.gradient(models.example_losses(model))
    data = {"image": jnp.asarray(images), "label": jnp.asarray(labels)}
    shards = jaxfed.Shard(data, jnp.full(CLIENTS, BATCH))

    def one(shard):
        return work({"params": params}, shard, None)[0]

    vmapped, looped = jax.jit(jax.vmap(one)), jax.jit(lambda s: jax.lax.map(one, s))
    layers = copy(params, twin)
    inputs = torch.from_numpy(images).permute(0, 1, 4, 2, 3).contiguous()
    targets = torch.from_numpy(labels)

    def pytorch():
        out = []
        for x, y in zip(inputs, targets, strict=True):
            loss = nn.functional.cross_entropy(twin(x), y)
            out.append(torch.autograd.grad(loss, list(twin.parameters())))
        return out

    ours = looped(shards)
    check(ours, pytorch()[3], layers, twin)
    return {
        "lax.map": lambda: jax.block_until_ready(looped(shards)),
        "vmap": lambda: jax.block_until_ready(vmapped(shards)),
        "PyTorch loop": pytorch,
    }


def check(ours, found, layers, twin):
    """Raise unless both have the same gradient of client 3."""
    place = {id(p): i for i, p in enumerate(twin.parameters())}
    for name, layer in layers.items():
        theirs = found[place[id(layer.weight)]].numpy()
        kernel = np.array(ours[name]["kernel"][3])
        turned = kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T
        np.testing.assert_allclose(turned, theirs, rtol=1e-3, atol=1e-5)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", help="one JSON line a model")
    args = parser.parse_args()
    torch.set_num_threads(2)
    print(f"{CLIENTS} clients x {BATCH} images; load {os.getloadavg()[0]:.1f}")
    print("| model | lax.map ms | vmap ms | PyTorch loop ms | lax.map is faster by |")
    print("|---|---|---|---|---|")
    records = []
    for name, twin in (("small_cnn", SmallCNN()), ("cnn", CNN())):
        runs = contestants(name, twin)
        times = {label: [] for label in runs}
        for run in runs.values():
            run()
        for _ in range(args.repeats):
            for label, run in runs.items():
                start = time.perf_counter()
                run()
                times[label].append(1000 * (time.perf_counter() - start))
        medians = {label: statistics.median(t) for label, t in times.items()}
        ratio = medians["PyTorch loop"] / medians["lax.map"]
        numbers = " | ".join(f"{t:.0f}" for t in medians.values())
        met = f" (target {TARGET})" if name == "small_cnn" else ""
        print(f"| {name} | {numbers} | {ratio:.2f}{met} |", flush=True)
        records.append({"model": name, "ms": times, "ratio": ratio})
    if args.json:
        with open(args.json, "w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
