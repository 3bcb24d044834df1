# SPDX-License-Identifier: Apache-2.0
"""Compressors, EF21-SGDM and Byz-VR-MARINA: by hand, and degenerate cases."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import jaxfed
from jaxfed import aggregators, attacks, compressors
from jaxfed.algorithms._byz_sgdm import byz_sgdm
from jaxfed.algorithms._byz_vr_marina import byz_vr_marina
from jaxfed.algorithms._ef21_sgdm import ef21_sgdm

N, F = 5, 1
PROBLEM = toys.Regression(N)


def models(algorithm, shards=None, params=None, rounds=4, n=N, key=1, **options):
    """Models after 0, 1, ... rounds, raveled; on the regression unless told."""
    sim = jaxfed.simulate(algorithm, n, **options)
    shards = PROBLEM.shards if shards is None else shards
    params = PROBLEM.params if params is None else params
    look = lambda state: toys.ravel(sim.model(state))  # noqa: E731
    return toys.trace(sim, params, shards, rounds, look, key=key)[0]


# --- Compressors -----------------------------------------------------------------

TREE = {"a": jnp.array([1.0, -4.0]), "b": jnp.array([[3.0], [4.0], [0.5]])}


def compress(link, tree=TREE, **extra):
    link = optax.with_extra_args_support(link)
    return link.update(tree, link.init(tree), tree, **extra)[0]


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        (1e-9, [0, -4, 0, 0, 0]),  # at least one, the first of equals
        (0.4, [0, -4, 0, 4, 0]),
        (0.5, [0, -4, 0, 4, 0]),  # 2.5 rounds to even
        (0.8, [1, -4, 3, 4, 0]),
        (1.0, [1, -4, 3, 4, 0.5]),
    ],
)
def test_top_k_keeps_the_largest_of_the_whole_tree(fraction, expected):
    static = compress(compressors.top_k(fraction))
    np.testing.assert_array_equal(toys.ravel(static), expected)
    traced = toys.quick_jit(lambda f: compress(compressors.top_k(f)))(fraction)
    jax.tree.map(np.testing.assert_array_equal, static, traced)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_top_k_equals_a_stable_sort_with_many_ties(dtype):
    rng = np.random.default_rng(0)
    x = np.round(rng.normal(size=200) * 2) / 2
    x[[3, 50]] = np.inf, -np.inf
    sent = toys.quick_jit(
        lambda f: compressors.top_k(f).update(jnp.asarray(x, dtype), optax.EmptyState())
    )
    for k in (1, 2, 17, 100, 199, 200):
        kept = np.argsort(-np.abs(x), kind="stable")[:k]
        expected = np.where(np.isin(np.arange(200), kept), x, 0)
        np.testing.assert_array_equal(np.asarray(sent(k / 200)[0], float), expected)


def test_top_k_shows_nan_and_keeps_the_dtype():
    bad = {"a": jnp.array([1.0, jnp.nan]), "b": jnp.array([2.0, jnp.inf, 0.0])}
    sent = toys.ravel(compress(compressors.top_k(0.4), bad))
    np.testing.assert_array_equal(sent, [0, np.nan, 0, np.inf, 0])
    half = jnp.array([1.0, 2.0], jnp.bfloat16)
    for link in (compressors.top_k(0.5), compressors.rand_k(0.5, 0)):
        assert compress(link, half).dtype == jnp.bfloat16


def test_rand_k_is_unbiased_with_the_stated_variance():
    x = np.asarray(toys.ravel(TREE))
    link = compressors.rand_k(0.4, 0)
    draw = toys.quick_jit(
        jax.vmap(lambda t: toys.ravel(compress(link, round=t, client_id=1)))
    )
    sent = np.asarray(draw(jnp.arange(4000)), float)
    assert np.all(np.sum(sent != 0, axis=1) == 2)
    scaled = np.where(sent != 0, sent / x, 0)
    np.testing.assert_allclose(scaled[scaled != 0], 2.5, rtol=1e-6)
    np.testing.assert_allclose(sent.mean(axis=0), x, atol=0.25)
    spread = np.mean(np.sum((sent - x) ** 2, axis=1))
    np.testing.assert_allclose(spread, 1.5 * x @ x, rtol=0.05)


def test_rand_k_draws_differ_over_rounds_and_clients():
    wide = jnp.ones(200)

    @toys.quick_jit
    def draw(fraction, round, client_id):
        link = compressors.rand_k(fraction, 0, unbiased=False)
        return compress(link, wide, round=round, client_id=client_id)

    first = draw(0.5, 0, 0)
    np.testing.assert_array_equal(first, draw(0.5, 0, 0))
    assert set(np.unique(first)) == {0.0, 1.0}
    assert first.sum() == 100
    for other in (draw(0.5, 1, 0), draw(0.5, 0, 1)):
        assert 30 < np.sum(first != other) < 170
    np.testing.assert_array_equal(draw(1.0, 0, 0), wide)


def test_compressor_errors():
    for value in (0.0, -0.5, 1.5, float("nan")):
        with pytest.raises(ValueError, match="fraction must"):
            compressors.top_k(value)
        with pytest.raises(ValueError, match="fraction must"):
            compressors.rand_k(value, 0)
    with pytest.raises(ValueError, match="step must be"):
        compressors.error_feedback(compressors.top_k(0.5), 0.0)
    link = compressors.error_feedback(compressors.top_k(0.5), initial=jnp.zeros(2))
    with pytest.raises(ValueError, match="initial must be shaped like params"):
        link.init(jnp.zeros(3))


# --- EF21-SGDM -------------------------------------------------------------------

CENTRES = [[1.0, 2.0, -4.0], [0.0, -3.0, 1.0]]


def on_quadratics(**options):
    with jax.enable_x64(True):
        algorithm = ef21_sgdm(
            0.5,
            num_clients=2,
            compressor=compressors.top_k(1 / 3),
            local_work=toys.quadratic,
            **options,
        )
        centres = toys.centres(CENTRES)
        return models(algorithm, centres, jnp.zeros(3), rounds=2, n=2)


def test_ef21_rounds_by_hand():
    # Gradients (-1, -2, 4), (0, 3, -1): sent (0, 0, 4), (0, 3, 0). Then differences
    # (-1, -2.75, -1), (0, -0.75, -2): sent (0, -2.75, 0), (0, 0, -2).
    expected = [[0, 0, 0], [0, -0.75, -1], [0, -0.8125, -1.5]]
    seen = on_quadratics(momentum=0.0, start="zero")
    np.testing.assert_allclose(seen, expected, atol=1e-12)


def test_ef21_sgdm_rounds_by_hand():
    # Both gradients are sent whole, mean (-0.5, 0.5, 1.5). Halves of the new ones,
    # (-0.75, -2.25, 3.25) and (0.25, 2.75, -1.75), move both momenta by
    # (0.125, -0.125, -0.375), of which the last entry is sent.
    expected = [[0, 0, 0], [0.25, -0.25, -0.75], [0.5, -0.5, -1.3125]]
    np.testing.assert_allclose(on_quadratics(momentum=0.5), expected, atol=1e-12)


def test_ef21_sgdm_without_compression_is_averaged_momentum():
    work = jaxfed.gradient(PROBLEM.loss, batch_size=2)
    common = dict(num_clients=N, momentum=0.7, local_work=work)
    one = ef21_sgdm(0.3, compressor=optax.identity(), start="zero", **common)
    other = byz_sgdm(0.3, rule=aggregators.mean(), **common)
    np.testing.assert_allclose(models(one), models(other), rtol=1e-5, atol=1e-6)


# --- Byz-VR-MARINA ---------------------------------------------------------------


def marina(learning_rate=0.2, *, batch_size=2, **options):
    common = dict(rule=aggregators.median(), key=0, num_clients=N)
    common["local_work"] = jaxfed.gradient(PROBLEM.loss, batch_size=batch_size)
    return byz_vr_marina(learning_rate, **(common | options))


def curved(params, batch):
    return 0.5 * batch["c"] * (params - batch["a"]) ** 2


def test_marina_rounds_by_hand():
    # f(x) = (x^2 + 3 (x - 2)^2) / 4 from x = 3: full gradient 3, then x = 1.5. On one
    # example the gradient changes by -1.5 or -4.5, on both by -3.
    data = {"c": jnp.array([[1.0, 3.0]]), "a": jnp.array([[0.0, 2.0]])}
    shards = jaxfed.Shard(data, jnp.array([2]))

    def ends(batch_size):
        algorithm = byz_vr_marina(
            0.5,
            rule=aggregators.mean(),
            key=0,
            probability=1e-9,
            local_work=jaxfed.gradient(curved, batch_size=batch_size),
        )
        sim = jaxfed.simulate(algorithm, 1)

        def end(key):
            return sim.model(sim.run(sim.init(jnp.array(3.0), key), shards, 2)[0])

        keys = jax.random.split(jax.random.key(0), 8)
        return np.unique(np.round(toys.quick_jit(jax.vmap(end))(keys), 5))

    np.testing.assert_array_equal(ends(None), [1.5])
    np.testing.assert_array_equal(ends(1), [0.75, 2.25])


def test_marina_follows_its_equations():
    p, rounds, rate = 0.4, 8, 0.2
    key = jax.random.key(0)
    draws = [
        float(jax.random.uniform(jax.random.fold_in(key, t))) for t in range(rounds)
    ]
    coins = [draw < p for draw in draws]
    assert 2 <= sum(coins[1:]) <= rounds - 3
    with jax.enable_x64(True):
        batches = toys.record_batches(jax.random.key(1), PROBLEM.shards, rounds, 2)
        seen = models(marina(rate, probability=p, key=key), rounds=rounds)
    x = before = PROBLEM.flat
    g, everything = None, range(PROBLEM.m)
    for t in range(rounds):
        np.testing.assert_allclose(seen[t], x, rtol=1e-12, atol=1e-12)
        rows = [
            PROBLEM.gradient(i, everything, x)
            if coins[t] or t == 0
            else g
            + PROBLEM.gradient(i, batches[t, i], x)
            - PROBLEM.gradient(i, batches[t, i], before)
            for i in range(N)
        ]
        g = np.median(rows, axis=0)
        x, before = x - rate * g, x
    np.testing.assert_allclose(seen[rounds], x, rtol=1e-12, atol=1e-12)


def test_marina_with_probability_one_is_robust_gradient_descent():
    work = jaxfed.gradient(PROBLEM.loss)
    attack = dict(num_byzantine=F, attack=attacks.ipm())
    descent = byz_sgdm(0.2, rule=aggregators.median(), momentum=0.0, local_work=work)
    np.testing.assert_allclose(
        models(marina(probability=1.0), **attack), models(descent, **attack), rtol=1e-6
    )


def test_marina_compresses_the_differences():
    # Two rounds with the same g: what the second adds to it is two of eight entries.
    link = compressors.rand_k(0.25, 5)
    algorithm = marina(probability=1e-9, compressor=link)
    sim = jaxfed.simulate(algorithm, N)
    step = toys.quick_jit(sim.step)
    state, _ = step(sim.init(PROBLEM.params, 1), PROBLEM.shards)
    message = algorithm.server.broadcast(state.server)
    work = jax.vmap(algorithm.client.update, (None, 0, 0, None))
    uploads, *_ = toys.quick_jit(work)(
        message, state.clients, PROBLEM.shards, jax.random.key(9)
    )
    change = toys.ravel_rows(uploads) - toys.ravel(message["estimate"])[None]
    kept = np.asarray(change != 0)
    np.testing.assert_array_equal(kept.sum(axis=1), 2)
    assert len(np.unique(kept, axis=0)) > 1  # clients draw their own


def test_marina_errors():
    for value in (0.0, -0.1, 1.1):
        with pytest.raises(ValueError, match="probability must"):
            marina(probability=value)
    with pytest.raises(ValueError, match="learning_rate must be a finite number > 0"):
        marina(0.0)
    with pytest.raises(TypeError, match="build local_work with jaxfed.gradient"):
        marina(local_work=toys.quadratic)
    with pytest.raises(TypeError, match="rule must be an aggregator"):
        marina(rule=optax.identity())
    algorithm = marina(local_work=None)
    with pytest.raises(ValueError, match="run it with jaxfed.simulate"):
        jaxfed.as_optimizer(algorithm, N)
    sim = jaxfed.simulate(algorithm, N)
    with pytest.raises(ValueError, match="built without local work"):
        sim.step(sim.init(PROBLEM.params, 0), PROBLEM.shards)
    with pytest.raises(TypeError, match="compressor must be a link.*got 'abc'"):
        marina(compressor="abc")


def test_ef21_sgdm_errors():
    with pytest.raises(TypeError, match="compressor must be a link.*got 'top_k'"):
        ef21_sgdm(0.1, num_clients=N, compressor="top_k")
    with pytest.raises(ValueError, match="start must be one of"):
        ef21_sgdm(0.1, num_clients=N, start="one")
    with pytest.raises(ValueError, match="momentum must satisfy"):
        ef21_sgdm(0.1, num_clients=N, momentum=1.0)
    with pytest.raises(ValueError, match="learning_rate must be a finite number > 0"):
        ef21_sgdm(-0.1, num_clients=N)


# --- In a simulation -------------------------------------------------------------


def attacked(name, learning_rate, share, fraction):
    """Model and losses of 12 rounds under IPM; ``share`` is momentum or probability."""
    work = jaxfed.gradient(PROBLEM.loss, batch_size=3)
    common = dict(num_clients=N, rule=aggregators.median(F), local_work=work)
    if name == "ef21_sgdm":
        link = compressors.top_k(fraction)
        algorithm = ef21_sgdm(learning_rate, momentum=share, compressor=link, **common)
    else:
        link = compressors.rand_k(fraction, 2)
        algorithm = byz_vr_marina(
            learning_rate, probability=share, key=0, compressor=link, **common
        )
    sim = jaxfed.simulate(
        algorithm, N, num_byzantine=F, attack=attacks.ipm(), inspect=True
    )
    state, metrics = sim.run(sim.init(PROBLEM.params, 1), PROBLEM.shards, 12)
    return toys.ravel(sim.model(state)), metrics["loss"], metrics["influence"]


@pytest.mark.parametrize("name", ["ef21_sgdm", "byz_vr_marina"])
def test_sweeps_under_attack_equal_single_runs(name):
    grid = np.array([[0.05, 0.2, 0.5], [0.1, 0.5, 0.8]], np.float32)
    together = toys.quick_jit(jax.vmap(lambda g: attacked(name, *g)))(grid)
    single = toys.quick_jit(lambda: attacked(name, *grid[1].tolist()))()
    for many, one in zip(together, single, strict=True):
        np.testing.assert_allclose(many[1], one, rtol=1e-4, atol=1e-5)
    ends, losses, influence = together
    assert np.abs(ends[0] - ends[1]).max() > 1e-3
    assert np.all(losses[:, -1] < losses[:, 0])
    assert np.all((influence >= 0) & (influence <= 0.5))
