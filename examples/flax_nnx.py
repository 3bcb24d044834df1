# SPDX-License-Identifier: Apache-2.0
"""A robust rule and your favourite optimizer inside a Flax NNX loop."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxfed
from jaxfed import data


def main(rounds=200):
    n, f = 10, 3
    digits = data.load("digits")
    shards = data.stack(digits.train, data.iid(digits.train["label"], n, seed=0))
    model = nnx.Linear(64, 10, rngs=nnx.Rngs(0))
    tx = optax.chain(
        jaxfed.make_attack("ipm", scale=10.0).wire,  # simulate the adversary
        jaxfed.make_aggregator("nnm+trimmed_mean", num_byzantine=f),
        optax.adam(0.05),
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss(model, shard):
        logits = model(shard.data["image"].reshape(-1, 64))
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, shard.data["label"]
        )
        return losses.mean(where=jnp.arange(len(losses)) < shard.count)

    @nnx.jit
    def step(model, optimizer, shards):
        grads = jax.vmap(nnx.grad(loss), (None, 0))(model, shards)  # [n, ...]
        optimizer.update(model, grads, byzantine=jaxfed.byzantine_ids(n, f))

    for _ in range(rounds):
        step(model, optimizer, shards)
    logits = model(digits.test["image"].reshape(-1, 64))
    return float((logits.argmax(-1) == digits.test["label"]).mean())


if __name__ == "__main__":
    print(f"test accuracy {main():.3f}")
