# SPDX-License-Identifier: Apache-2.0
"""How fast the clients' gradients are: one pass of all clients, against PyTorch.

Same parameters, same images, float32, two threads, one process; repeats are
interleaved and medians reported. PyTorch runs the clients in a loop, which is what
federated simulators built on it do. Gradients are compared first.

    python benchmarks/clients.py --json clients.jsonl
    python benchmarks/clients.py --clip

The second clips every example's gradient: ours by norms alone, ours with the gradients
in memory, and PyTorch's ``vmap(grad)``, which is how its libraries get them.

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


class MLP(nn.Module):
    """The twin of ``jaxfed.models.MLP``."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([])
        self.denses = nn.ModuleList([nn.Linear(784, 256), nn.Linear(256, 10)])

    def forward(self, x):
        """Map ``[B, 1, 28, 28]`` to logits."""
        return self.denses[1](torch.tanh(self.denses[0](x.flatten(1))))


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


def problem(name, twin):
    """Return model, parameters, shards, and the twin's layers, inputs and targets."""
    rng = np.random.default_rng(0)
    images = rng.random((CLIENTS, BATCH, 28, 28, 1), np.float32)
    labels = rng.integers(0, 10, (CLIENTS, BATCH))
    model = models.make_model(name, 10)
    params = jax.jit(model.init)(jax.random.key(0), images[0])["params"]
    data = {"image": jnp.asarray(images), "label": jnp.asarray(labels)}
    shards = jaxfed.Shard(data, jnp.full(CLIENTS, BATCH))
    layers = copy(params, twin)
    inputs = torch.from_numpy(images).permute(0, 1, 4, 2, 3).contiguous()
    return model, params, shards, layers, inputs, torch.from_numpy(labels)


def contestants(name, twin):
    """Return ``{label: function}``; each gives all clients' gradients, ``[n, ...]``."""
    model, params, shards, layers, inputs, targets = problem(name, twin)
    work = jaxfed.gradient(models.example_losses(model))

    def one(shard):
        return work({"params": params}, shard, None)[0]

    vmapped, looped = jax.jit(jax.vmap(one)), jax.jit(lambda s: jax.lax.map(one, s))

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


def clipped(name, twin):
    """The same with every example's gradient clipped to 1."""
    model, params, shards, layers, inputs, targets = problem(name, twin)
    loss_fn = models.example_losses(model)
    norms = models.gradient_norms(model)
    runs = {}
    for label, options in (("norms", {"norms": norms}), ("gradients", {})):
        work = jaxfed.gradient(loss_fn, clip_norm=1.0, **options)
        one = jax.jit(
            lambda s, work=work: jax.lax.map(
                lambda shard: work({"params": params}, shard, None)[0], s
            )
        )
        runs[label] = lambda one=one: jax.block_until_ready(one(shards))
    weights = {n: p.detach() for n, p in twin.named_parameters()}

    def loss(weights, x, y):
        logits = torch.func.functional_call(twin, weights, (x[None],))
        return nn.functional.cross_entropy(logits, y[None])

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))

    def pytorch():
        out = []
        for x, y in zip(inputs, targets, strict=True):
            rows = [g.flatten(1) for g in each(weights, x, y).values()]
            norm = torch.stack([g.norm(dim=1) for g in rows]).norm(dim=0)
            scale = (1 / norm).clamp(max=1) / BATCH
            shapes = [p.shape for p in twin.parameters()]
            sums = [scale @ g for g in rows]
            out.append([g.view(s) for g, s in zip(sums, shapes, strict=True)])
        return out

    check(runs["norms"](), pytorch()[3], layers, twin)
    return runs | {"PyTorch vmap(grad)": pytorch}


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
    parser.add_argument("--clip", action="store_true", help="clip every example")
    parser.add_argument("--json", help="one JSON line a model")
    args = parser.parse_args()
    torch.set_num_threads(2)
    print(f"{CLIENTS} clients x {BATCH} images; load {os.getloadavg()[0]:.1f}")
    twins = {"small_cnn": SmallCNN, "cnn": CNN}
    build = contestants
    if args.clip:
        twins, build = {"mlp": MLP, "small_cnn": SmallCNN, "cnn": CNN}, clipped
    records = []
    for name, twin in twins.items():
        runs = build(name, twin())
        times = {label: [] for label in runs}
        for run in runs.values():
            run()
        for _ in range(args.repeats):
            for label, run in runs.items():
                start = time.perf_counter()
                run()
                times[label].append(1000 * (time.perf_counter() - start))
        medians = {label: statistics.median(t) for label, t in times.items()}
        first, *_, peer = medians
        ratio = medians[peer] / medians[first]
        if not records:
            head = " | ".join(f"{label} ms" for label in medians)
            print(f"| model | {head} | {first} is faster than {peer} by |")
            print("|---" * (len(medians) + 2) + "|")
        numbers = " | ".join(f"{t:.3g}" for t in medians.values())
        met = f" (target {TARGET})" if (name, args.clip) == ("small_cnn", False) else ""
        print(f"| {name} | {numbers} | {ratio:.2f}{met} |", flush=True)
        records.append({"model": name, "ms": times, "ratio": ratio})
    if args.json:
        with open(args.json, "w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
