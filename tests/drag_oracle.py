# SPDX-License-Identifier: Apache-2.0
"""DRAG and BR-DRAG as float64 loops in the paper's signs: g = local - global model."""

import jax
import jax.numpy as jnp
import numpy as np
from toys import quick_jit

import jaxfed
from jaxfed import _keys
from jaxfed.local import sample
from jaxfed.rounds import client_key


def cosine(g, r):
    g, r = np.asarray(g, float), np.asarray(r, float)
    return float(g @ r) / (np.linalg.norm(g) * np.linalg.norm(r))


def drag_row(g, r, c):
    """Equations (10) and (11)."""
    degree = c * (1 - cosine(g, r))
    return (1 - degree) * g + degree * np.linalg.norm(g) / np.linalg.norm(r) * r


def br_drag_row(g, r, c):
    """Equations (16) and (15)."""
    degree = c * (1 - cosine(g, r))
    return (1 - degree) * np.linalg.norm(r) / np.linalg.norm(g) * g + degree * r


def local_update(problem, client, theta, batches, eta):
    """Equation (2): what U steps on these batches add to theta."""
    x = theta.copy()
    for batch in batches:
        x -= eta * problem.gradient(client, batch, x)
    return x - theta


def drag(problem, theta, cohorts, batches, eta, alpha, c):
    """Algorithm 1; returns the models and the references, round by round."""
    models, references, step = [theta], [], None
    for t, cohort in enumerate(cohorts):
        g = [local_update(problem, m, theta, batches[t, m], eta) for m in cohort]
        if t == 0:
            r = sum(g) / len(cohort)
        else:
            r = (1 - alpha) * r + alpha * step
        step = sum(drag_row(x, r, c) for x in g) / len(cohort)
        theta = theta + step
        models.append(theta)
        references.append(r)
    return np.array(models), np.array(references)


def br_drag(problem, theta, cohorts, batches, eta, c, attackers=()):
    """Algorithm 2 under sign flipping; the last client of the problem is the root."""
    models, root = [theta], problem.n - 1
    for t, cohort in enumerate(cohorts):
        r = local_update(problem, root, theta, batches[t, root], eta)
        g = [local_update(problem, m, theta, batches[t, m], eta) for m in cohort]
        g = [-x if m in attackers else x for x, m in zip(g, cohort, strict=True)]
        theta = theta + sum(br_drag_row(x, r, c(t)) for x in g) / len(cohort)
        models.append(theta)
    return np.array(models)


def record_batches(key, shards, ids, rounds, steps, batch_size):
    """Return the indices that ``local_sgd`` draws, ``[rounds, n, steps, B]``.

    ``ids`` are the numbers that the keys of the shards' owners are made of.
    """

    @quick_jit
    def go(key, shards):
        def one(t, i, u, shard):
            key_of_step = _keys.fold(client_key(key, t, i), u)
            return sample(key_of_step, shard, batch_size)[0]["index"]

        over_steps = jax.vmap(one, (None, None, 0, None))
        over_clients = jax.vmap(over_steps, (None, 0, None, 0))
        over_rounds = jax.vmap(over_clients, (0, None, None, None))
        numbers = jnp.arange(rounds), jnp.array(ids), jnp.arange(steps)
        return over_rounds(*numbers, shards)

    return np.asarray(go(key, shards))


def record_cohorts(attack, cohort_size):
    """Wrap an attack: the state is the cohort of the last round."""

    def init(params):
        del params
        return jnp.zeros(cohort_size, int)

    def update(updates, state, params=None, *, cohort, **extra):
        inner = attack.wire.init(params)
        out, _ = attack.wire.update(updates, inner, params, cohort=cohort, **extra)
        return out, cohort.astype(state.dtype)

    wire = type(attack.wire)(init, update)
    return jaxfed.Attack(attack.poison, wire)


def trajectory(sim, params, shards, rounds, look, key=3, root=None):
    """Run and return the initial state and ``look(state)`` stacked over rounds."""

    @quick_jit
    def go(shards, root):
        state = sim.init(params, key)

        def body(state, _):
            state, metrics = sim.step(state, shards, root)
            return state, look(state, metrics)

        return jax.lax.scan(body, state, None, length=rounds)[1]

    return jax.tree.map(np.asarray, go(shards, root))
