# SPDX-License-Identifier: Apache-2.0
"""What every aggregator must do, over a registry of rules with their traits."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfed
from jaxfed import sharding
from jaxfed.aggregators import compose, mean, median, trimmed_mean
from jaxfed.preaggregators import nnm


class Rule(NamedTuple):
    """One entry of the registry.

    Attributes:
      build: ``(f) -> Aggregator``.
      oracle: ``(x, f) -> [d]`` in float64.
      robust: whether f bad rows of any kind leave it near the honest rows.
      declares: whether it takes f at all.
      mixes: whether it mixes rows first (then it stays in the hull of whole rows
        close to each other, not in the honest range of every coordinate).
      weighted: whether it honours ``weights``.
    """

    build: Callable
    oracle: Callable
    robust: bool = True
    declares: bool = True
    mixes: bool = False
    weighted: bool = False


def mixed(oracle):
    return lambda x, f: oracle(oracles.nnm(x, f), f)


def plain(oracle):
    return lambda x, f: oracle(x)


RULES = {
    "mean": Rule(
        lambda f: mean(), plain(oracles.mean), robust=False, declares=False, weighted=1
    ),
    "median": Rule(median, plain(oracles.median)),
    "trimmed_mean": Rule(trimmed_mean, oracles.trimmed_mean),
    "nnm+mean": Rule(
        lambda f: compose(nnm(f), mean()),
        mixed(plain(oracles.mean)),
        robust=False,
        mixes=True,
    ),
    "nnm+median": Rule(
        lambda f: compose(nnm(f), median()), mixed(plain(oracles.median)), mixes=True
    ),
    "nnm+trimmed_mean": Rule(
        lambda f: compose(nnm(f), trimmed_mean(f)),
        mixed(oracles.trimmed_mean),
        mixes=True,
    ),
    "nnm+nnm+median": Rule(
        lambda f: compose(nnm(f), nnm(f), median()),
        mixed(mixed(plain(oracles.median))),
        mixes=True,
    ),
}
ROBUST = [name for name, rule in RULES.items() if rule.robust]
# The median's result does not depend on the f it is given.
BY_BUDGET = [n for n, r in RULES.items() if r.declares and n != "median"]


def params_of(updates):
    return jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), updates)


def aggregate(aggregator, updates, **extra):
    params = params_of(updates)
    return aggregator.update(updates, aggregator.init(params), params, **extra)[0]


@functools.cache
def compiled(name, f):
    """One jitted function for each rule and budget; JAX caches its shapes."""
    return jax.jit(functools.partial(aggregate, RULES[name].build(f)))


def spread_rows(n, d, seed=0):
    """Rows that differ in size and place, so that no distances are tied."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) * (1 + np.arange(n)[:, None] / n)
    return (x + rng.normal(size=d)).astype(np.float32)


def split(x):
    """Spread columns over a tree: scalars, a tuple, None, a matrix, an empty leaf."""
    lead = x.shape[:-1]
    return {
        "bias": x[..., 0],
        "pair": (x[..., 1:3], None),
        "weight": x[..., 3:9].reshape(*lead, 2, 3),
        "rest": x[..., 9:],
        "empty": x[..., :0],
    }


def join(tree):
    leaves = [tree["bias"], *tree["pair"][:1], tree["weight"], tree["rest"]]
    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in leaves])


def close(actual, expected, tol):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tol)


# --- values --------------------------------------------------------------------


def kinds(n, d):
    x = spread_rows(n, d)
    rng = np.random.default_rng(1)
    yield "random", x
    yield "tied", rng.integers(-1, 2, (n, d)).astype(np.float32)
    yield "duplicated", x[rng.integers(0, (n + 1) // 2, n)]
    yield "far", (1e3 + 1e-2 * rng.normal(size=(n, d))).astype(np.float32)


@pytest.mark.parametrize(
    ("n", "f", "d"),
    [
        (1, 0, 3),
        (2, 0, 12),
        (4, 1, 12),
        (5, 2, 12),
        (20, 5, 12),
        (9, 2, 2 * 8192 + 37),
        (70, 9, 12),
    ],
)
@pytest.mark.parametrize("name", RULES)
def test_matches_the_oracle(name, n, f, d):
    rule, run = RULES[name], compiled(name, f)
    for kind, x in kinds(n, d):
        if rule.mixes and kind == "tied" and name.count("nnm") > 1:
            continue  # whether two averages tie is decided by rounding
        actual = join(run(split(x))) if n < 10 and d == 12 else run(x)
        close(actual, rule.oracle(x, f), oracles.tolerance(x))


@pytest.mark.parametrize("n", [64, 130])
@pytest.mark.parametrize("name", RULES)
def test_equal_rows_are_returned(name, n):
    row = np.random.default_rng(2).normal(size=64).astype(np.float32)
    out = compiled(name, (n - 1) // 3)(np.tile(row, (n, 1)))
    assert np.all(np.abs(out - row) <= 4 * np.spacing(np.abs(row)))


@pytest.mark.parametrize("name", RULES)
def test_eager_jit_and_vmap_agree(name):
    x = np.stack([spread_rows(8, 12, seed) for seed in range(3)])
    rule = RULES[name].build(2)
    problems = jax.jit(jax.vmap(functools.partial(aggregate, rule)))(x)
    assert problems.dtype == jnp.float32
    jitted = [compiled(name, 2)(one) for one in x]
    close(problems, jitted, oracles.tolerance(x[0]))
    close(aggregate(rule, x[0]), jitted[0], oracles.tolerance(x[0]))
    # NumPy's own float64 arrays are taken in whatever precision JAX runs.
    wide, _ = rule.update(x[0].astype(np.float64), rule.init(x[0, 0]), x[0, 0])
    close(wide, jitted[0], oracles.tolerance(x[0]))


@pytest.mark.parametrize("name", RULES)
def test_equivariance(name):
    x, run = spread_rows(8, 12), compiled(name, 2)
    base, tol = run(x), oracles.tolerance(x)
    order = np.random.default_rng(3).permutation(8)
    close(run(x[order]), base, tol)
    shift = np.linspace(-8, 8, 12, dtype=np.float32)
    close(run(x + shift[None]), base + shift, oracles.tolerance(x + shift) + tol)
    close(run(-x), -base, tol)
    for scale in (2.0**-40, 2.0**20):
        np.testing.assert_array_equal(run(x * scale), base * scale)


# --- dtypes --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", RULES)
def test_keeps_the_dtype_and_computes_in_float32(name, dtype):
    x = jnp.asarray(spread_rows(7, 12), dtype)
    out = compiled(name, 2)(split(x))
    assert {leaf.dtype for leaf in jax.tree.leaves(out)} == {jnp.dtype(dtype)}
    wide = RULES[name].oracle(np.asarray(x, np.float64), 2)
    if RULES[name].mixes:
        # The mixed rows are stored in the leaf's dtype once.
        close(join(out), wide, 2 * float(jnp.finfo(dtype).eps) * np.abs(x).max())
    else:
        close(join(out), wide, float(jnp.finfo(dtype).eps) * np.abs(wide).max())


@pytest.mark.parametrize("name", RULES)
def test_float64_stays_float64(name):
    x = np.random.default_rng(4).normal(size=(7, 12)) + 1e5
    with jax.enable_x64(True):
        out = compiled(name, 2)(split(jnp.asarray(x)))
        assert {leaf.dtype for leaf in jax.tree.leaves(out)} == {jnp.dtype("float64")}
        close(join(out), RULES[name].oracle(x, 2), oracles.tolerance(x, np.float64))


# --- bad rows ------------------------------------------------------------------

BAD = {
    "nan": np.nan,
    "inf": np.inf,
    "-inf": -np.inf,
    "1e30": 1e30,
    "-1e30": -1e30,
    "0": 0.0,
}


def poisoned(n, f, value, seed=5):
    """Return rows with f bad ones at random places, and the honest rows."""
    x = spread_rows(n, 12, seed) + 3
    bad = np.zeros(n, bool)
    bad[np.random.default_rng(seed).choice(n, f, replace=False)] = True
    x[bad] = value
    return x, bad


@pytest.mark.parametrize(("n", "f"), [(7, 3), (70, 9)])
@pytest.mark.parametrize("name", ROBUST)
def test_f_bad_rows_are_survived(name, n, f):
    run = compiled(name, f)
    for kind, value in BAD.items():
        x, bad = poisoned(n, f, value)
        out, honest = run(x), x[~bad]
        # Mixing may take a near row of zeros for an honest one, never a far row.
        span = np.concatenate([honest, np.zeros((1, 12))]) if kind == "0" else honest
        tol = oracles.tolerance(honest)
        assert np.all(out >= span.min(0) - tol), (kind, out)
        assert np.all(out <= span.max(0) + tol), (kind, out)
    for copied in range(2):
        x, bad = poisoned(n, f, 0.0)
        x[bad] = x[~bad][copied]
        out = run(x)
        assert np.all(out >= x.min(0) - 1e-5) and np.all(out <= x.max(0) + 1e-5)


@pytest.mark.parametrize("name", ROBUST)
def test_bad_entries_need_not_fill_a_row(name):
    x = spread_rows(8, 12)
    x[1, 4], x[5, 0] = np.nan, -np.inf
    out = np.asarray(compiled(name, 2)(x))
    close(out, RULES[name].oracle(x, 2), oracles.tolerance(np.delete(x, [1, 5], 0)))
    assert np.all(np.isfinite(out))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ROBUST)
def test_more_than_f_non_finite_rows_give_nan(name, value):
    f = 3 if name == "median" else 2  # the median itself breaks at half of the rows
    x, _ = poisoned(7 if name == "median" else 8, f + 1, value)
    assert np.all(np.isnan(compiled(name, f)(x)))


def test_infinities_of_both_signs_count_as_one_kind():
    x = spread_rows(8, 12)
    x[0], x[3], x[4] = np.inf, -np.inf, np.nan
    assert np.all(np.isnan(compiled("trimmed_mean", 2)(x)))


@pytest.mark.parametrize("name", ["mean", "nnm+mean"])
def test_averages_are_not_protected(name):
    x, _ = poisoned(8, 1, np.nan)
    assert np.all(np.isnan(compiled(name, 2)(x)))


# --- who is present ------------------------------------------------------------


@pytest.mark.parametrize("content", [0.0, 1e30, np.nan, np.inf])
@pytest.mark.parametrize("n", [12, 40])
@pytest.mark.parametrize("name", RULES)
def test_a_masked_row_is_a_removed_row(name, n, content):
    x = spread_rows(n, 12)
    mask = np.random.default_rng(6).random(n) < 0.7
    x[~mask] = content
    run = compiled(name, 2)
    out = join(run(split(x), mask=mask)) if n == 12 else run(x, mask=mask)
    close(out, RULES[name].oracle(x[mask], 2), oracles.tolerance(x[mask]))


@pytest.mark.parametrize("name", RULES)
def test_nobody_present_gives_nan(name):
    out = compiled(name, 2)(split(spread_rows(12, 12)), mask=np.zeros(12, bool))
    assert np.all(np.isnan(join(out)))


@pytest.mark.parametrize("name", BY_BUDGET)
def test_traced_f_equals_python_f(name):
    x = spread_rows(8, 12)
    run = jax.jit(jax.vmap(lambda f: aggregate(RULES[name].build(f), x)))
    outs = run(jnp.arange(-1, 10))
    for f, out in zip(range(-1, 10), outs, strict=True):
        if 0 <= f < 4:
            close(out, RULES[name].oracle(x, f), oracles.tolerance(x))
        else:
            assert np.all(np.isnan(out))
    close(outs[3], compiled(name, 2)(x), oracles.tolerance(x))


@pytest.mark.parametrize("name", BY_BUDGET)
def test_traced_f_and_mask(name):
    x, mask = spread_rows(8, 12), np.array([1, 1, 0, 1, 0, 1, 1, 1], bool)
    x[~mask] = np.nan
    run = jax.jit(lambda x, f, mask: aggregate(RULES[name].build(f), x, mask=mask))
    for f in range(3):
        expected = RULES[name].oracle(x[mask], f)
        close(run(x, f, mask), expected, oracles.tolerance(x[mask]))
    assert np.all(np.isnan(run(x, 3, mask)))
    # A Python f that only the mask makes too large cannot raise either.
    assert np.all(np.isnan(compiled(name, 3)(x, mask=mask)))


# --- the optax contract ----------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_state_rides_in_scan_and_compiles_once(name):
    x = split(jnp.asarray(spread_rows(5, 12)))
    aggregator, traces = RULES[name].build(1), []

    @jax.jit
    def step(state, updates):
        traces.append(None)
        out, state = aggregator.update(updates, state, params_of(updates))
        return state, out

    abstract = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params_of(x)
    )
    state = aggregator.init(abstract)
    assert jax.tree.structure(state) == jax.tree.structure(
        aggregator.init(params_of(x))
    )
    state, first = step(state, x)
    state, second = step(state, jax.tree.map(lambda u: u + 1, x))
    assert len(traces) == 1 and step._cache_size() == 1
    several = jax.tree.map(lambda a, b: jnp.stack([a, b]), x, x)
    _, outs = jax.lax.scan(step, state, several)
    close(join(jax.tree.map(lambda u: u[0], outs)), join(first), 1e-6)


@pytest.mark.parametrize("name", RULES)
def test_stands_in_a_chain_with_adam(name):
    x = split(jnp.asarray(spread_rows(5, 12)))
    params, aggregator = params_of(x), RULES[name].build(1)
    assert isinstance(aggregator, jaxfed.Aggregator)
    tx, adam = optax.chain(aggregator, optax.adam(0.1)), optax.adam(0.1)
    mask = jnp.arange(5) < 4

    @jax.jit
    def both(x):
        step, _ = tx.update(
            x, tx.init(params), params, mask=mask, unknown=1, byzantine=None
        )
        alone = aggregate(aggregator, x, mask=mask)
        return step, adam.update(alone, adam.init(params))[0]

    step, expected = both(x)
    close(join(step), join(expected), 1e-6)


@pytest.mark.parametrize("name", RULES)
def test_weights_are_honoured_or_refused(name):
    x, weights = spread_rows(5, 12), np.array([3, 0, 1, 1, 2], np.float32)
    if RULES[name].weighted:
        x[1] = np.nan
        out = aggregate(RULES[name].build(1), split(x), weights=weights)
        close(join(out), oracles.mean(x, weights.tolist()), oracles.tolerance(x[2:]))
        mask = np.array([1, 0, 1, 0, 1], bool)
        out = aggregate(mean(), x, weights=np.ones(5), mask=mask)
        close(out, oracles.mean(x[mask]), 1e-6)
        assert np.all(np.isnan(aggregate(mean(), x, weights=np.zeros(5))))
    else:
        with pytest.raises(ValueError, match="no weighted form"):
            aggregate(RULES[name].build(1), x, weights=weights)


@pytest.mark.parametrize("name", ["trimmed_mean", "nnm+trimmed_mean"])
def test_works_under_inject_hyperparams(name):
    x = spread_rows(7, 12)
    factory = optax.inject_hyperparams(
        lambda num_byzantine: RULES[name].build(num_byzantine)
    )
    tx = factory(num_byzantine=2)
    out, _ = jax.jit(tx.update)(x, tx.init(x[0]))
    close(out, compiled(name, 2)(x), oracles.tolerance(x))


# --- errors ----------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_errors_name_the_argument(name):
    build = RULES[name].build
    x = spread_rows(6, 12)
    if RULES[name].declares:
        with pytest.raises(ValueError, match="num_byzantine must be at least 0"):
            build(-1)
        with pytest.raises(TypeError, match="num_byzantine must be a Python int"):
            build(1.5)
        with pytest.raises(ValueError, match=r"0 <= f < n/2, got f=3, n=6"):
            jax.eval_shape(functools.partial(aggregate, build(3)), x)
    rule = build(2)
    with pytest.raises(TypeError, match=r"updates\['a'\] must be floating point"):
        aggregate(rule, {"a": np.zeros((6, 2), np.int32), "b": x})
    with pytest.raises(ValueError, match=r"updates\['b'\] has 5 rows"):
        aggregate(rule, {"a": x, "b": x[:5]})
    with pytest.raises(ValueError, match="leading client axis"):
        rule.update(np.float32(1), rule.init(np.float32(1)))
    with pytest.raises(ValueError, match="leading client axis of size >= 1"):
        aggregate(rule, x[:0])
    with pytest.raises(ValueError, match="no array leaves"):
        rule.update({}, rule.init({}))
    with pytest.raises(ValueError, match="shaped like params"):
        rule.update(x, rule.init(x[0]), x[0, :3])
    with pytest.raises(ValueError, match="structure of params"):
        rule.update({"a": x}, rule.init({"a": x[0]}), {"b": x[0]})
    with pytest.raises(TypeError, match="mask must be bool, got int"):
        aggregate(rule, x, mask=np.ones(6, int))
    with pytest.raises(ValueError, match="each of the 6 clients, got shape"):
        aggregate(rule, x, mask=np.ones(5, bool))


def test_weights_of_the_wrong_length_are_refused():
    with pytest.raises(ValueError, match="weights must have one entry for each of the"):
        aggregate(mean(), spread_rows(6, 3), weights=np.ones(7))


# --- devices ---------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_sharded_over_four_devices(name):
    x, mesh = spread_rows(8, 16), sharding.client_mesh()
    assert mesh.size == 4
    tree = {"a": x, "b": x[:, :8].reshape(8, 4, 2) + 1}
    whole = compiled(name, 2)(tree)
    clients = sharding.shard_clients(tree, mesh)
    columns = jax.device_put(tree, NamedSharding(mesh, P(None, "clients")))
    for spread in (clients, columns):
        out = compiled(name, 2)(spread)
        jax.tree.map(lambda a, b: close(a, b, oracles.tolerance(x)), out, whole)


# --- gradients -------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_gradients_agree_with_finite_differences(name):
    rng = np.random.default_rng(7)
    x, direction = rng.normal(size=(6, 4)), rng.normal(size=4)
    with jax.enable_x64(True):

        @jax.jit
        def value(x):
            return jnp.vdot(direction, aggregate(RULES[name].build(1), x))

        grad = np.asarray(jax.jit(jax.grad(value))(x))
        for i, j in np.ndindex(6, 4):
            step = np.zeros_like(x)
            step[i, j] = 1e-5
            slope = float(value(x + step) - value(x - step)) / 2e-5
            assert abs(grad[i, j] - slope) < 1e-8


@pytest.mark.parametrize("n", [7, 70])
@pytest.mark.parametrize("name", RULES)
def test_gradients_are_finite_with_bad_rows(name, n):
    run = compiled(name, 2)
    grad = jax.jit(jax.grad(lambda x: jnp.sum(jnp.square(run(x)))))
    for value in BAD.values():
        x, bad = poisoned(n, 2, value)
        if RULES[name].robust:
            slopes = grad(x)
            assert np.all(np.isfinite(slopes))
            if abs(value) > 0:
                assert not np.any(slopes[bad])
        else:
            assert np.all(np.isfinite(jax.jacobian(run)(x)))


# --- inspect ---------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_inspect_weights_sum_to_one(name):
    rule, x = RULES[name].build(2), spread_rows(9, 12)
    look = jax.jit(rule.inspect)
    mask, byzantine = np.arange(9) != 3, np.arange(9) >= 7
    info = look(x, rule.init(x[0]), mask=mask, byzantine=byzantine)
    assert info.weights.shape == (9,) and np.all(info.weights >= 0)
    assert info.weights[3] == 0
    assert abs(float(info.weights.sum()) - 1) < 1e-6
    assert abs(float(info.influence) - float(info.weights[7:].sum())) < 1e-6


@pytest.mark.parametrize("name", RULES)
def test_inspect_weights_give_the_aggregate_of_one_column(name):
    x = spread_rows(9, 1, seed=8)
    x[2], x[5] = -np.inf, np.nan
    x = x if RULES[name].robust else np.abs(np.nan_to_num(x, posinf=0, neginf=0))
    rule = RULES[name].build(2)
    info = jax.jit(rule.inspect)(x, rule.init(x[0]))
    assert np.isnan(info.influence)
    weighted = info.weights @ np.where(np.isfinite(x), x, 0)
    close(weighted, compiled(name, 2)(x), 1e-5)


COLUMN = np.array([[0.0], [1.0], [2.0], [3.0], [100.0]], np.float32)


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("mean", COLUMN, [0.2] * 5),
        ("median", COLUMN, [0, 0, 1, 0, 0]),
        ("median", COLUMN[:4], [0, 0.5, 0.5, 0]),
        # Row 1 is the middle of column 0, row 0 that of column 1.
        ("median", np.array([[0, 5], [1, 6], [9, 4]], np.float32), [0.5, 0.5, 0]),
        ("trimmed_mean", COLUMN, [0, 1 / 3, 1 / 3, 1 / 3, 0]),
        # Rows 0 to 3 are the mean of rows 0 to 3; row 4 that of rows 1 to 4.
        ("nnm+mean", COLUMN, [0.2, 0.25, 0.25, 0.25, 0.05]),
        ("nnm+median", COLUMN, [0.25, 0.25, 0.25, 0.25, 0]),
        ("nnm+trimmed_mean", COLUMN, [0.25, 0.25, 0.25, 0.25, 0]),
        ("nnm+nnm+median", COLUMN, [0.25, 0.25, 0.25, 0.25, 0]),
    ],
)
def test_inspect_by_hand(name, x, expected):
    rule = RULES[name].build(1)
    byzantine = np.arange(len(x)) == len(x) - 1
    info = jax.jit(rule.inspect)(x, rule.init(x[0]), byzantine=byzantine)
    close(info.weights, expected, 1e-6)
    close(info.influence, expected[-1], 1e-6)


def test_inspect_of_a_weighted_mean():
    x = np.zeros((2, 3), np.float32)
    info = mean().inspect(
        x, None, weights=np.array([1.0, 3.0]), byzantine=[False, True]
    )
    close(info.weights, [0.25, 0.75], 1e-7)
    close(info.influence, 0.75, 1e-7)


# --- composition -----------------------------------------------------------------


@pytest.mark.parametrize("rule", [mean, median, lambda: trimmed_mean(2)])
@pytest.mark.parametrize("stages", [1, 2])
def test_compose_equals_chain(rule, stages):
    x, mask = spread_rows(9, 12), np.arange(9) != 4
    pres = [nnm(2) for _ in range(stages)]
    fused, link = compose(*pres, rule()), optax.chain(*pres, rule())

    @jax.jit
    def both(x):
        chained, _ = link.update(x, link.init(x[0]), x[0], mask=mask)
        return aggregate(fused, x, mask=mask), chained

    close(*both(x), oracles.tolerance(x))


def test_mixing_before_a_mean_stores_no_second_copy_of_the_updates():
    x = jax.ShapeDtypeStruct((20, 200_000), jnp.float32)
    updates = 4 * 20 * 200_000
    assert temporary_bytes("nnm+mean", x) < updates / 4
    assert temporary_bytes("nnm+median", x) < 1.5 * updates


def temporary_bytes(name, x):
    analysis = compiled(name, 4).lower(x).compile().memory_analysis()
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("name", ["mean", "median", "trimmed_mean"])
@pytest.mark.parametrize(("n", "copies"), [(20, 0), (64, 0), (100, 1)])
def test_coordinate_wise_rules_store_at_most_one_sorted_copy(name, n, copies):
    x = jax.ShapeDtypeStruct((n, 50_000), jnp.float32)
    copies = 0 if name == "mean" else copies
    assert temporary_bytes(name, x) < (copies + 0.1) * 4 * n * 50_000


def test_compose_refuses_other_links():
    with pytest.raises(TypeError, match="pre-aggregators before the rule"):
        compose(optax.identity(), median())
    with pytest.raises(TypeError, match="pre-aggregators before the rule"):
        compose(median(), median())
    with pytest.raises(TypeError, match="last stage must be an aggregator"):
        compose(nnm(1))
    with pytest.raises(TypeError, match="last stage must be an aggregator"):
        compose()
    rule = median()
    assert compose(rule) is rule
    assert compose(nnm(2), rule).num_byzantine == 2


# --- property tests --------------------------------------------------------------

SIX_SHAPES = [(3, 1, 1), (4, 1, 3), (5, 2, 12), (8, 2, 12), (11, 3, 5), (12, 5, 2)]


@st.composite
def problems(draw):
    """Small integers (so that distances and ties are exact), some rows bad."""
    n, f, d = draw(st.sampled_from(SIX_SHAPES))
    x = draw(arrays(np.float32, (n, d), elements=st.integers(-9, 9).map(float)))
    bad = draw(st.integers(0, f))
    rows = draw(st.permutations(range(n)))[:bad]
    values = st.sampled_from([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0, 1e10])
    for row in rows:
        x[row] = draw(values)
    return x, f, np.array(rows, int)


@pytest.mark.parametrize("name", RULES)
@given(problem=problems())
def test_any_values_any_bad_rows(name, problem):
    x, f, bad = problem
    rule, out = RULES[name], compiled(name, f)(x)
    honest = np.delete(x, bad, axis=0)
    if rule.robust:
        assert np.all(np.isfinite(out))
        near = x[np.isfinite(x).all(1) & (np.abs(x) < 1e5).all(1)]
        tol = oracles.tolerance(near)
        assert np.all(out >= near.min(0) - tol) and np.all(out <= near.max(0) + tol)
    if name in ("median", "trimmed_mean"):
        tol = oracles.tolerance(honest)
        assert np.all(out >= honest.min(0) - tol)
        assert np.all(out <= honest.max(0) + tol)
    if name.count("nnm") < 2 and len(bad) == 0:
        close(out, rule.oracle(x, f), oracles.tolerance(x))
    elif name == "nnm+median":
        close(out, rule.oracle(x, f), oracles.tolerance(near))
