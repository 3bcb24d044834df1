# SPDX-License-Identifier: Apache-2.0
"""What every aggregator must do, over a registry of rules with their traits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rules import RULES, aggregate, budget, compiled, params_of
from toys import quick_jit

import jaxfed
from jaxfed import sharding
from jaxfed.aggregators import (
    compose,
    geometric_median,
    krum,
    mean,
    median,
    trimmed_mean,
)
from jaxfed.preaggregators import arc, clip, nnm

ROBUST = [name for name, rule in RULES.items() if rule.robust]
BY_BUDGET = [name for name, rule in RULES.items() if rule.declares]
COORDINATES = [name for name in ROBUST if RULES[name].inside == "coordinates"]
# Chains and lone rules of every kind, where all of them would only cost time.
FEW = ["mean", "median", "meamed", "krum", "bulyan", "smea", "caf", "nnm+trimmed_mean"]


def with_sizes(names, sizes):
    """Pair rules with sizes ``(n, ...)``.

    Oracles of searches would take minutes above 12 clients; ``test_subsets.py`` and
    the benchmark go further.
    """
    return [
        (name, *size)
        for name in names
        for size in sizes
        if size[0] <= 12 or not RULES[name].search
    ]


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
    yield "far", (1e3 + 1e-2 * rng.normal(size=(n, d))).astype(np.float32)
    yield "collinear", np.outer(spread_rows(n, 1), np.linspace(1, 2, d)).astype("f")
    yield "tied", rng.integers(-1, 2, (n, d)).astype(np.float32)
    yield "duplicated", x[rng.integers(0, (n + 1) // 2, n)]


SHAPES = [
    (1, 0, 3),
    (2, 0, 12),
    (5, 1, 12),
    (9, 2, 2 * 8192 + 37),
    (11, 2, 12),
    (20, 5, 12),
    (70, 9, 12),
]


@pytest.mark.parametrize(("name", "n", "f", "d"), with_sizes(RULES, SHAPES))
def test_matches_the_oracle(name, n, f, d):
    rule, f = RULES[name], budget(name, n, f)
    run = compiled(name, f)
    for kind, x in kinds(n, d):
        if kind in ("tied", "duplicated") and not rule.clear:
            continue  # rounding decides
        actual = join(run(split(x))) if n < 10 and d == 12 else run(x)
        close(actual, rule.oracle(x, f), oracles.tolerance(x))


EXACT = [name for name, rule in RULES.items() if rule.exact]


@pytest.mark.parametrize(("name", "n"), with_sizes(EXACT, [(9,), (64,), (130,)]))
def test_equal_rows_are_returned(name, n):
    row = np.random.default_rng(2).normal(size=64).astype(np.float32)
    out = compiled(name, budget(name, n, (n - 1) // 3))(np.tile(row, (n, 1)))
    assert np.all(np.abs(out - row) <= 4 * np.spacing(np.abs(row)))


@pytest.mark.parametrize("name", RULES)
def test_eager_jit_and_vmap_agree(name):
    x = np.stack([spread_rows(11, 12, seed) for seed in range(3)])
    rule = RULES[name].build(2)
    problems = quick_jit(jax.vmap(functools.partial(aggregate, rule)))(x)
    assert problems.dtype == jnp.float32
    jitted = [compiled(name, 2)(one) for one in x]
    close(problems, jitted, oracles.tolerance(x[0]))
    close(aggregate(rule, x[0]), jitted[0], oracles.tolerance(x[0]))
    # NumPy's own float64 arrays are taken in whatever precision JAX runs.
    wide, _ = rule.update(x[0].astype(np.float64), rule.init(x[0, 0]), x[0, 0])
    close(wide, jitted[0], oracles.tolerance(x[0]))


@pytest.mark.parametrize("name", RULES)
def test_equivariance(name):
    x, rule = spread_rows(11, 12), RULES[name]
    run = compiled(name, 2)
    base, tol = run(x), oracles.tolerance(x)
    if rule.permutes:
        order = np.random.default_rng(3).permutation(11)
        close(run(x[order]), base, tol)
    if rule.translates:
        shift = np.linspace(-8, 8, 12, dtype=np.float32)
        moved = run(x + shift[None])
        close(moved, base + shift, oracles.tolerance(x + shift) + tol)
    close(run(-x), -base, tol)
    for scale in (2.0**-40, 2.0**20):
        if rule.scales:
            np.testing.assert_array_equal(run(x * scale), base * scale)


# --- dtypes --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", RULES)
def test_keeps_the_dtype_and_computes_in_float32(name, dtype):
    x = jnp.asarray(spread_rows(11, 12), dtype)
    out = compiled(name, 2)(split(x))
    assert {leaf.dtype for leaf in jax.tree.leaves(out)} == {jnp.dtype(dtype)}
    wide = RULES[name].oracle(np.asarray(x, np.float64), 2)
    if "+" in name or name == "bulyan":
        # The mixed rows are stored in the leaf's dtype once.
        close(join(out), wide, 2 * float(jnp.finfo(dtype).eps) * np.abs(x).max())
    else:
        close(join(out), wide, float(jnp.finfo(dtype).eps) * np.abs(wide).max())


@pytest.mark.parametrize("name", RULES)
def test_float64_stays_float64(name):
    x = np.random.default_rng(4).normal(size=(11, 12))
    x += 1e5 if RULES[name].translates else 0
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
    """Return rows with f bad ones at random places (not 0: MoNNA trusts it)."""
    x = spread_rows(n, 12, seed) + 3
    bad = np.zeros(n, bool)
    bad[1 + np.random.default_rng(seed).choice(n - 1, f, replace=False)] = True
    x[bad] = value
    return x, bad


def allowed(name, honest, zeros=False):
    """Return the rows whose range no coordinate of the result may leave."""
    zeros |= RULES[name].inside == "origin"
    return np.concatenate([honest, np.zeros((1, honest.shape[1]))]) if zeros else honest


@pytest.mark.parametrize(("name", "n", "f"), with_sizes(ROBUST, [(11, 5), (70, 9)]))
def test_f_bad_rows_are_survived(name, n, f):
    f = budget(name, n, f)
    run = compiled(name, f)
    for kind, value in BAD.items():
        x, bad = poisoned(n, f, value)
        out, honest = run(x), x[~bad]
        # A rule that picks rows may take a near row of zeros for an honest one.
        near_zeros = kind == "0" and RULES[name].inside != "coordinates"
        span = allowed(name, honest, near_zeros)
        tol = oracles.tolerance(honest)
        if name in ("geometric_median", "clip+geometric_median"):
            tol = np.ptp(honest)  # bounded, not inside: every row pulls
        assert np.all(out >= span.min(0) - tol), (kind, out)
        assert np.all(out <= span.max(0) + tol), (kind, out)
    for copied in range(2):
        x, bad = poisoned(n, f, 0.0)
        x[bad] = x[~bad][copied]
        out, span = run(x), allowed(name, x)
        assert np.all(out >= span.min(0) - 1e-5) and np.all(out <= span.max(0) + 1e-5)


@pytest.mark.parametrize(
    ("name", "d"),
    [(name, 12) for name in ROBUST] + [(n, 1) for n in ("caf", "mda", "mva", "smea")],
)
def test_squares_that_hardly_overflow_are_survived(name, d):
    rule = RULES[name]
    if "geometric_median" in name:  # from its default start, far rows cost no steps
        rule = rule._replace(build=geometric_median)
    run = quick_jit(functools.partial(aggregate, rule.build(2)))
    grad = quick_jit(jax.grad(lambda x: jnp.sum(aggregate(rule.build(2), x))))
    for value in (1e16, 1e17, 1e18, 8e18, 1e19, -1.3e19, 1.6e19, 1e38):
        x, bad = poisoned(11, 2, value)
        out, span = run(x[:, :d]), allowed(name, x[~bad, :d])
        tol = 1e-4 + np.ptp(span) * ("geometric_median" in name)
        assert np.all(out >= span.min(0) - tol) and np.all(out <= span.max(0) + tol)
    for value in (1e18, 1e19):
        x, _ = poisoned(11, 2, value)
        assert np.all(np.isfinite(grad(x[:, :d])))


@pytest.mark.parametrize("name", BY_BUDGET)
def test_a_traced_budget_may_be_any_integer(name):
    x = spread_rows(11, 3)
    run = quick_jit(lambda f: aggregate(RULES[name].build(f), x))
    for f in (-(2**31), -1, 6, 2**30, 2**30 + 1, 2**31 - 1):
        assert np.all(np.isnan(run(jnp.int32(f))))


@pytest.mark.parametrize("name", ROBUST)
def test_bad_entries_need_not_fill_a_row(name):
    x = spread_rows(11, 12)
    x[1, 4], x[5, 0] = np.nan, -np.inf
    out = np.asarray(compiled(name, 2)(x))
    close(out, RULES[name].oracle(x, 2), oracles.tolerance(np.delete(x, [1, 5], 0)))
    assert np.all(np.isfinite(out))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [name for name in ROBUST if RULES[name].gives_up])
def test_more_than_f_non_finite_rows_give_nan(name, value):
    # The median's own breakdown is at half of the rows.
    f = 5 if name == "median" else 2
    x, _ = poisoned(11, f + 1, value)
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
@pytest.mark.parametrize(
    ("name", "n"), with_sizes(RULES, [(12,)]) + with_sizes(FEW, [(40,)])
)
def test_a_masked_row_is_a_removed_row(name, n, content):
    x = spread_rows(n, 12)
    mask = np.random.default_rng(6).random(n) < 0.7
    x[~mask] = content
    f = budget(name, int(mask.sum()), 2)
    run = compiled(name, f)
    out = join(run(split(x), mask=mask)) if n == 12 else run(x, mask=mask)
    close(out, RULES[name].oracle(x[mask], f), oracles.tolerance(x[mask]))


@pytest.mark.parametrize("name", RULES)
def test_nobody_present_gives_nan(name):
    f = budget(name, 8, 2)
    out = compiled(name, f)(split(spread_rows(12, 12)), mask=np.zeros(12, bool))
    assert np.all(np.isnan(join(out)))


@pytest.mark.parametrize("name", BY_BUDGET)
def test_traced_f_equals_python_f(name):
    x, rule = spread_rows(11, 12), RULES[name]
    run = quick_jit(jax.vmap(lambda f: aggregate(rule.build(f), x)))
    outs = run(jnp.arange(-1, 13))
    # A traced f is held to what the formula needs; Krum's n >= 2f + 3 is a check.
    limit = 4 if name == "bulyan" else 2
    for f, out in zip(range(-1, 13), outs, strict=True):
        if 0 <= f and rule.least(f) <= 11:
            close(out, rule.oracle(x, f), oracles.tolerance(x))
        elif f < 0 or limit * f >= 11:
            assert np.all(np.isnan(out))
    close(outs[3], compiled(name, 2)(x), oracles.tolerance(x))


@pytest.mark.parametrize("name", BY_BUDGET)
def test_traced_f_and_mask(name):
    x, mask = spread_rows(12, 12), np.arange(12) != 3
    mask[7] = mask[1] = False
    x[~mask] = np.nan
    run = quick_jit(lambda x, f, mask: aggregate(RULES[name].build(f), x, mask=mask))
    for f in range(budget(name, 9, 4) + 1):
        expected = RULES[name].oracle(x[mask], f)
        close(run(x, f, mask), expected, oracles.tolerance(x[mask]))
    assert np.all(np.isnan(run(x, 5, mask)))
    # A Python f that only the mask makes too large cannot raise either.
    most, few = budget(name, 12, 9), np.arange(12) < 2
    assert np.all(np.isnan(compiled(name, most)(x, mask=few)))


# --- the optax contract ----------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_state_rides_in_scan_and_compiles_once(name):
    x = split(jnp.asarray(spread_rows(7, 12)))
    aggregator, traces = RULES[name].build(1), []

    @quick_jit
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
    if not jax.tree.leaves(state):  # else it starts from where it was
        close(join(jax.tree.map(lambda u: u[0], outs)), join(first), 1e-6)


@pytest.mark.parametrize("name", RULES)
def test_stands_in_a_chain_with_adam(name):
    x = split(jnp.asarray(spread_rows(8, 12)))
    params, aggregator = params_of(x), RULES[name].build(1)
    assert isinstance(aggregator, jaxfed.Aggregator)
    tx, adam = optax.chain(aggregator, optax.adam(0.1)), optax.adam(0.1)
    mask = jnp.arange(8) < 7

    @quick_jit
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
    x, weights = spread_rows(7, 12), np.array([3, 0, 1, 1, 2, 1, 1], np.float32)
    rule = RULES[name].build(1)
    if RULES[name].weighted:
        x[1] = np.nan
        out = aggregate(rule, split(x), weights=weights)
        repeated = np.repeat(x, weights.astype(int), axis=0)
        expected = RULES[name].oracle(repeated, 1)
        close(join(out), expected, oracles.tolerance(repeated))
        mask = np.array([1, 0, 1, 0, 1, 1, 1], bool)
        out = aggregate(rule, x, weights=np.ones(7), mask=mask)
        close(out, RULES[name].oracle(x[mask], 1), oracles.tolerance(x[mask]))
        assert np.all(np.isnan(aggregate(rule, x, weights=np.zeros(7))))
        with pytest.raises(ValueError, match="weights must have one entry for each"):
            aggregate(rule, x, weights=np.ones(8))
    else:
        with pytest.raises(ValueError, match="no weighted form"):
            aggregate(rule, x, weights=weights)


@pytest.mark.parametrize("name", ["trimmed_mean", "nnm+trimmed_mean"])
def test_works_under_inject_hyperparams(name):
    x = spread_rows(7, 12)
    factory = optax.inject_hyperparams(
        lambda num_byzantine: RULES[name].build(num_byzantine)
    )
    tx = factory(num_byzantine=2)
    out, _ = quick_jit(tx.update)(x, tx.init(x[0]))
    close(out, compiled(name, 2)(x), oracles.tolerance(x))


# --- errors ----------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_errors_name_the_argument(name):
    build = RULES[name].build
    x = spread_rows(6, 12)
    if name != "mean":
        with pytest.raises(ValueError, match="num_byzantine must be at least 0"):
            build(-1)
        with pytest.raises(TypeError, match="num_byzantine must be a Python int"):
            build(1.5)
        with pytest.raises(ValueError, match=r"0 <= f < n/2, got f=3, n=6"):
            jax.eval_shape(functools.partial(aggregate, build(3)), x)
    f = 2
    while RULES[name].least(f) > 6:
        with pytest.raises(ValueError, match=f"needs n >= . num_byzantine.*n=6.*={f}"):
            jax.eval_shape(functools.partial(aggregate, build(f)), x)
        f -= 1
    rule = build(f)
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


# --- devices ---------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_sharded_over_four_devices(name):
    x, mesh = spread_rows(12, 16), sharding.client_mesh()
    assert mesh.size == 4
    tree = {"a": x, "b": x[:, :8].reshape(12, 4, 2) + 1}
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
    x, direction = rng.normal(size=(7, 4)), rng.normal(size=4)
    with jax.enable_x64(True):
        rule = RULES[name].build(1)

        @quick_jit
        def value(x):
            return jnp.vdot(direction, aggregate(rule, x))

        grad = np.asarray(quick_jit(jax.grad(value))(x))
        for i, j in np.ndindex(7, 4):
            step = np.zeros_like(x)
            step[i, j] = 1e-5
            slope = float(value(x + step) - value(x - step)) / 2e-5
            assert abs(grad[i, j] - slope) < 1e-8


@pytest.mark.parametrize(
    ("name", "n"), with_sizes(RULES, [(11,)]) + with_sizes(FEW, [(70,)])
)
def test_gradients_are_finite_with_bad_rows(name, n):
    run = compiled(name, 2)
    grad = quick_jit(jax.grad(lambda x: jnp.sum(jnp.square(run(x)))))
    far = RULES[name].inside == "coordinates" or name in ("krum", "bulyan", "caf")
    for value in BAD.values():
        x, bad = poisoned(n, 2, value)
        if RULES[name].robust:
            slopes = grad(x)
            assert np.all(np.isfinite(slopes))
            if abs(value) > 0 and far:
                assert not np.any(slopes[bad])
        else:
            assert np.all(np.isfinite(jax.jacobian(run)(x)))


# --- inspect ---------------------------------------------------------------------


def inspected(name, x, **extra):
    rule = RULES[name].build(2)
    return quick_jit(rule.inspect)(x, rule.init(x[0]), **extra)


@pytest.mark.parametrize("name", RULES)
def test_inspect_weights_sum_to_one(name):
    rule, x = RULES[name].build(2), spread_rows(12, 12)
    mask, byzantine = np.arange(12) != 3, np.arange(12) >= 10
    extra = {"mask": mask, "byzantine": byzantine}
    info = inspected(name, x, **extra)
    assert info.weights.shape == (12,) and np.all(info.weights >= 0)
    assert info.weights[3] == 0
    total = float(info.weights.sum())
    if RULES[name].inside == "origin" and name != "cge":
        assert 0 < total <= 1 + 1e-6  # the rest came from the origin or the centre
    else:
        assert abs(total - 1) < 12 * np.finfo(np.float32).eps  # one for each client
    assert abs(float(info.influence) - float(info.weights[10:].sum())) < 1e-6
    out, _, same = quick_jit(rule.observe)(x, rule.init(x[0]), x[0], **extra)
    close(same.weights, info.weights, 1e-6)
    close(out, compiled(name, 2)(x, mask=mask), 1e-6)


@pytest.mark.parametrize("name", [n for n in RULES if n != "sign_majority"])
def test_inspect_weights_give_the_aggregate_of_one_column(name):
    x = spread_rows(12, 1, seed=8)
    x[2], x[5] = -np.inf, np.nan
    x = x if RULES[name].robust else np.abs(np.nan_to_num(x, posinf=0, neginf=0))
    info = inspected(name, x)
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
        # The median is 2: 0 and 100 are furthest, and only 100 goes.
        ("meamed", COLUMN, [0.25, 0.25, 0.25, 0.25, 0]),
        # Half of the signs agree with the majority's, 0 does not.
        ("sign_majority", COLUMN, [0, 0.25, 0.25, 0.25, 0.25]),
        # Two nearest others: 1 + 4, 1 + 1, 1 + 1, 1 + 4; row 1 comes first.
        ("krum", COLUMN, [0, 1, 0, 0, 0]),
        ("multi_krum", COLUMN, [0.25, 0.25, 0.25, 0.25, 0]),
        ("cge", COLUMN, [0.25, 0.25, 0.25, 0.25, 0]),
        ("smea", COLUMN, [0.25, 0.25, 0.25, 0.25, 0]),
    ],
)
def test_inspect_by_hand(name, x, expected):
    rule = RULES[name].build(1)
    byzantine = np.arange(len(x)) == len(x) - 1
    info = quick_jit(rule.inspect)(x, rule.init(x[0]), byzantine=byzantine)
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


STAGES = {"nnm": lambda: nnm(2), "clip": lambda: clip(4.0), "arc": lambda: arc(2)}


@pytest.mark.parametrize(
    "rule", [mean, median, lambda: trimmed_mean(2), lambda: krum(2)]
)
@pytest.mark.parametrize("stages", ["nnm", "nnm+nnm", "clip+nnm", "arc+clip+nnm"])
def test_compose_equals_chain(rule, stages):
    x, mask = spread_rows(9, 12), np.arange(9) != 4
    pres = [STAGES[name]() for name in stages.split("+")]
    fused, link = compose(*pres, rule()), optax.chain(*pres, rule())

    @quick_jit
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
    run = jax.jit(functools.partial(aggregate, RULES[name].build(4)))
    analysis = run.lower(x).compile().memory_analysis()
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("name", ["mean", "median", "trimmed_mean", "meamed", "krum"])
@pytest.mark.parametrize("n", [20, 64, 100])
def test_rules_store_no_copy_of_the_updates(name, n):
    x = jax.ShapeDtypeStruct((n, 200_000), jnp.float32)
    assert temporary_bytes(name, x) < 0.15 * 4 * n * 200_000


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
    nested = compose(nnm(2), compose(clip(1.0), rule))
    assert len(nested.stages) == 3 and nested.stages[-1] is rule


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
    rule, f = RULES[name], budget(name, len(x), f)
    bad = bad[:f]
    x[problem[2][f:]] = 1.0
    assume(name != "monna" or 0 not in bad)  # it trusts row 0
    out = compiled(name, f)(x)
    honest = np.delete(x, bad, axis=0)
    if rule.robust:
        assert np.all(np.isfinite(out))
        near = x[np.isfinite(x).all(1) & (np.abs(x) < 1e5).all(1)]
        span, tol = allowed(name, near), oracles.tolerance(near)
        if "geometric_median" in name or "arc" in name:
            tol += np.linalg.norm(near, axis=1).max()  # a clipped row is in that ball
        if "clip" in name:
            tol += 6.0  # 3 iterations of norm 2, or a row of norm 3
        assert np.all(out >= span.min(0) - tol) and np.all(out <= span.max(0) + tol)
    if name in COORDINATES:
        tol = oracles.tolerance(honest)
        assert np.all(out >= honest.min(0) - tol)
        assert np.all(out <= honest.max(0) + tol)
    if rule.clear and len(bad) == 0:
        close(out, rule.oracle(x, f), oracles.tolerance(x))
    elif name in ("nnm+median", "krum", "mda"):
        # Squares of 1e30 overflow: such a row is not finite to a rule of distances.
        seen = np.where(np.abs(x) < 1e15, x, np.nan)
        close(out, rule.oracle(seen, f), oracles.tolerance(near))
    elif name in ("meamed", "phocas"):
        close(out, rule.oracle(x, f), oracles.tolerance(near))
