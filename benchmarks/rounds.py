# SPDX-License-Identifier: Apache-2.0
"""What a whole round costs beside the clients' gradients and the rule.

Two tables, float32, two threads, medians:

- every method of the registry on the CNN of Byz-Clip21-SGD2M (1,199,882 parameters),
  20 clients with a batch of 32 (local steps: one step): the compiled round against the
  compiled local work of all clients plus the compiled rule, with and without noise
  (drawing it is most of what private methods add). Target: at most 1.10;
- ByzULDP as its paper runs it: 1000 clients, 250 of them Byzantine, 26,010 parameters,
  batch 20: seconds a round, where they go, and the peak memory of the process. Targets:
  6 s and 2 GiB.

    python benchmarks/rounds.py --json rounds.jsonl
    python benchmarks/rounds.py --methods byzuldp,drag
"""

import argparse
import inspect
import json
import os
import resource
import statistics
import time

os.environ["OMP_NUM_THREADS"] = "2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfed
from jaxfed import local, models, naming


def problem(model, n, batch):
    """Return ``(params, shards, losses)`` of random images."""
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.random((n, batch, 28, 28, 1), np.float32))
    labels = jnp.asarray(rng.integers(0, 10, (n, batch)))
    net = models.make_model(model, 10)
    params = jax.jit(net.init)(jax.random.key(0), images[0])["params"]
    shards = jaxfed.Shard({"image": images, "label": labels}, jnp.full(n, batch))
    return params, shards, models.example_losses(net)


def build(name, n, f, losses, rule, noise_std):
    """Return a method with plain settings, and its local work."""
    factory = naming.ALGORITHMS[name]
    taken = inspect.signature(factory).parameters
    needs = getattr(factory, "needs", jaxfed.algorithms.Needs())
    inner = 1.0 if needs.two_clips else None
    if needs.local_steps:
        work = local.local_sgd(losses, optax.sgd(0.1), steps=1, clip_norm=inner)
    else:
        work = local.gradient(losses, batch_size=needs.batch_size, clip_norm=inner)
    options = dict(learning_rate=0.1, num_clients=n, key=0, noise_std=noise_std)
    options |= dict(num_byzantine=f, rule=rule, local_learning_rate=0.1)
    options |= dict(clip_norm=1.0, local_work=work)
    given = {k: v for k, v in options.items() if k in taken}
    if "rule" in taken:
        given |= {"num_byzantine": f, "key": 0}
    return naming.make_algorithm(name, **given), work


def milliseconds(call, repeats):
    """Return the median time of a call after a first one."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def parts(name, model, n, f, batch, rule, noise_std, repeats):
    """Return the milliseconds of a round, of its local work and of its rule."""
    params, shards, losses = problem(model, n, batch)
    algorithm, work = build(name, n, f, losses, rule, noise_std)
    root = None
    if algorithm.root_work is not None:
        root = jax.tree.map(lambda x: x[0], shards)
    attack = jaxfed.make_attack("none")
    sim = jaxfed.simulate(algorithm, n, num_byzantine=f, attack=attack, chunk_size=1)
    state = jax.jit(sim.init)(params, jax.random.key(1))
    keys = jax.random.split(jax.random.key(2), n)
    message = {"params": params, "round": jnp.int32(0)}

    @jax.jit
    def local_work(shards, keys):
        return jax.lax.map(lambda a: work(message, *a)[0], (shards, keys))

    step = jax.jit(sim.step, donate_argnums=0)
    updates = local_work(shards, keys)
    single = jax.tree.map(lambda x: x[0], updates)
    rule_state = algorithm.rule.init(single)
    aggregate = jax.jit(
        lambda u, s, r: algorithm.rule.update(u, s, single, reference=r)[0]
    )
    box = [state]

    def round_():
        box[0], metrics = step(box[0], shards, root)
        return metrics

    return {
        "round": milliseconds(round_, repeats),
        "local work": milliseconds(lambda: local_work(shards, keys), repeats),
        "rule": milliseconds(lambda: aggregate(updates, rule_state, single), repeats),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", help="names joined by commas; default: all")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="one JSON line a method")
    args = parser.parse_args()
    names = args.methods.split(",") if args.methods else sorted(naming.ALGORITHMS)
    records = []
    print(f"load {os.getloadavg()[0]:.1f}")
    if "byzuldp" in names:  # first: the peak of memory is this one's
        got = parts("byzuldp", "byzuldp_cnn", 1000, 250, 20, "trimmed_mean", 0.01, 3)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"byzuldp, 1000 clients: {got['round'] / 1000:.2f} s a round (target 6), "
            f"local work {got['local work'] / 1000:.2f} s, rule "
            f"{got['rule'] / 1000:.2f} s; peak {peak:.2f} GiB (target 2)"
        )
        records.append({"method": "byzuldp", "clients": 1000, "GiB": peak, **got})
    print("| method | noise | round ms | local work ms | rule ms | round / (both) |")
    print("|---|---|---|---|---|---|")
    for name in names:
        rule = "trimmed_mean" if name == "byzuldp" else "nnm+median"
        takes = inspect.signature(naming.ALGORITHMS[name]).parameters
        for noise in (0.0, 0.01) if "noise_std" in takes else (0.0,):
            got = parts(name, "cnn", 20, 4, 32, rule, noise, args.repeats)
            ratio = got["round"] / (got["local work"] + got["rule"])
            numbers = " | ".join(f"{t:.0f}" for t in got.values())
            print(f"| {name} | {noise} | {numbers} | {ratio:.2f} |", flush=True)
            records.append({"method": name, "noise": noise, "ratio": ratio, **got})
    if args.json:
        with open(args.json, "w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
