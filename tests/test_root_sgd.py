# SPDX-License-Identifier: Apache-2.0
"""The control that trains on the server's data alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import jaxfed
from jaxfed.local import local_sgd

PROBLEM = toys.Regression(4)
ROOT = jax.tree.map(lambda x: x[2], PROBLEM.shards)


def test_it_is_sgd_on_the_root_data_whatever_the_clients_send():
    work = local_sgd(PROBLEM.loss, optax.sgd(0.1), steps=1)  # full batches
    method = jaxfed.make_algorithm("root_sgd", local_work=work)
    attack = jaxfed.make_attack("nan")
    sim = jaxfed.simulate(method, 4, num_byzantine=3, attack=attack, inspect=True)
    run = toys.quick_jit(sim.run, static_argnums=2)
    state, metrics = run(sim.init(PROBLEM.params, 0), PROBLEM.shards, 5, ROOT)

    flat = PROBLEM.flat.copy()
    for _ in range(5):
        grads = [PROBLEM.example(2, j, flat) for j in range(PROBLEM.m)]
        flat -= 0.1 * np.mean(grads, axis=0)
    np.testing.assert_allclose(toys.ravel(sim.model(state)), flat, rtol=1e-5)
    assert not np.any(metrics["influence"])


def test_it_asks_for_its_data():
    method = jaxfed.make_algorithm("root_sgd")
    updates = jax.tree.map(lambda p: jnp.zeros((3, *p.shape)), PROBLEM.params)
    with pytest.raises(ValueError, match="root_sgd needs reference="):
        method.rule.update(updates, method.rule.init(PROBLEM.params))
    with pytest.raises(ValueError, match="learning_rate must be"):
        jaxfed.make_algorithm("root_sgd", learning_rate=0.0)
