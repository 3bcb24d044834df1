# SPDX-License-Identifier: Apache-2.0
"""Claim 1 of Byz-Clip21-SGD2M at one point: three private methods, tuned alike.

MNIST, MLP 784-256-10, 20 honest and 5 Byzantine clients, IPM x10, NNM and median, noise
by the paper's formula for a nominal epsilon. Step size and clip radius are tuned
over a grid inside one vmapped program per method; accuracy is that of the last round
on held-out training data (tuning) and on the test set (report).

    python benchmarks/claim1.py --data-dir ~/tensorflow_datasets
"""

import argparse
import itertools
import json
import time

import jax
import jax.numpy as jnp

import jaxfed
from jaxfed import data, models, privacy

HONEST, BYZANTINE, BATCH, DELTA = 20, 5, 64, 4e-4
METHODS = {
    "byz_clip21_sgd2m": dict(momentum=0.9),  # and --server-momentum
    "byz_clip_sgd": dict(),
    "safe_dshb": dict(momentum=0.9),
}


def load(data_dir, validation=5000):
    mnist = data.load("mnist", data_dir=data_dir)
    train = {k: v[validation:] for k, v in mnist.train.items()}
    held_out = {k: v[:validation] for k, v in mnist.train.items()}
    parts = data.iid(train["label"], HONEST, seed=0)
    empty = [parts[0][:0]] * BYZANTINE
    return data.stack(train, [*parts, *empty]), held_out, mnist.test


def sweep(method, rounds, epsilon, grid, shards, held_out, test, chunk, options):
    """Train every (learning rate, clip norm) of the grid, ``chunk`` runs at a time."""
    n = HONEST + BYZANTINE
    model = models.make_model("mlp", num_classes=10)
    loss_fn = models.example_losses(model)
    image = jax.tree.map(lambda x: jnp.asarray(x[:1]), held_out["image"])
    params = model.init(jax.random.key(0), image)["params"]
    ratio = privacy.nominal_noise_std(1.0, epsilon, DELTA, rounds)

    def run(learning_rate, clip_norm, shards, held_out, test):
        algorithm = jaxfed.make_algorithm(
            method,
            learning_rate=learning_rate,
            clip_norm=clip_norm,
            noise_std=ratio * clip_norm,
            rule="nnm+median",
            num_byzantine=BYZANTINE,
            num_clients=n,
            key=1,
            local_work=jaxfed.gradient(loss_fn, batch_size=BATCH),
            **options,
        )
        attack = jaxfed.make_attack("ipm", scale=10.0)
        sim = jaxfed.simulate(algorithm, n, num_byzantine=BYZANTINE, attack=attack)
        state, _ = sim.run(sim.init(params, 2), shards, rounds)
        return tuple(
            models.accuracy(model, sim.model(state), d) for d in (held_out, test)
        )

    program = jax.jit(jax.vmap(run, (0, 0, None, None, None)))
    results = []
    for i in range(0, len(grid), chunk):
        part = grid[i : i + chunk]
        part += [part[-1]] * (chunk - len(part))
        rates, clips = (jnp.array(x) for x in zip(*part, strict=True))
        scores = program(rates, clips, shards, held_out, test)
        results += list(zip(*(s.tolist() for s in scores), strict=True))
    return results[: len(grid)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--epsilon", type=float, default=18.0, help="nominal")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[10, 1, 0.1, 0.01, 0.001]
    )
    clips = [1, 0.1, 0.01, 1e-4, 1e-5, 1e-6]
    parser.add_argument("--clips", type=float, nargs="+", default=clips)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--server-momentum", type=float, default=0.99)
    parser.add_argument("--chunk", type=int, default=15, help="runs in one program")
    args = parser.parse_args()
    shards, held_out, test = jax.tree.map(jnp.asarray, load(args.data_dir))
    grid = list(itertools.product(args.rates, args.clips))
    for method in args.methods:
        start = time.perf_counter()
        options = dict(METHODS[method])
        if method == "byz_clip21_sgd2m":
            options["server_momentum"] = args.server_momentum
        scores = sweep(
            method,
            args.rounds,
            args.epsilon,
            grid,
            shards,
            held_out,
            test,
            args.chunk,
            options,
        )
        best = max(range(len(grid)), key=lambda i: scores[i][0])
        row = dict(
            method=method,
            **options,
            test_accuracy=round(scores[best][1], 4),
            learning_rate=grid[best][0],
            clip_norm=grid[best][1],
            rounds=args.rounds,
            epsilon_nominal=args.epsilon,
            epsilon_certified=round(
                privacy.certified_epsilon(
                    privacy.nominal_noise_std(1.0, args.epsilon, DELTA, args.rounds),
                    2.0,
                    DELTA,
                    args.rounds,
                ),
                1,
            ),
            seconds=round(time.perf_counter() - start, 1),
        )
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
