# SPDX-License-Identifier: Apache-2.0
"""Byz-Clip21-SGD2M inside your own Flax Linen loop, three of ten clients hostile."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxfed
from jaxfed import data


def main(rounds=200):
    n, f = 10, 3
    digits = data.load("digits")
    shards = data.stack(digits.train, data.iid(digits.train["label"], n, seed=0))
    model = nn.Dense(10)

    def loss(params, shard):
        logits = model.apply(params, shard.data["image"].reshape(-1, 64))
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, shard.data["label"]
        )
        return losses.mean(where=jnp.arange(len(losses)) < shard.count)

    algorithm = jaxfed.make_algorithm(
        "byz_clip21_sgd2m", learning_rate=0.3, clip_norm=1.0, noise_std=0.01,
        server_momentum=0.9, rule="nnm+median", num_byzantine=f, num_clients=n, key=0,
    )  # fmt: skip
    tx = jaxfed.as_optimizer(algorithm, n, attack=jaxfed.make_attack("ipm", scale=10.0))
    params = model.init(jax.random.key(1), jnp.zeros(64))
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state):
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, shards)  # [n, ...]
        updates, opt_state = tx.update(
            grads, opt_state, params, byzantine=jaxfed.byzantine_ids(n, f)
        )
        return optax.apply_updates(params, updates), opt_state

    for _ in range(rounds):
        params, opt_state = step(params, opt_state)
    logits = model.apply(params, digits.test["image"].reshape(-1, 64))
    return float((logits.argmax(-1) == digits.test["label"]).mean())


if __name__ == "__main__":
    print(f"test accuracy {main():.3f}")
