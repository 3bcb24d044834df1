# SPDX-License-Identifier: Apache-2.0
"""The covariance filters: CAF and FilterL2."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from toys import quick_jit

from jaxfed import reductions
from jaxfed.aggregators import caf, compose, filter_l2
from jaxfed.preaggregators import arc, bucketing, nnm
from jaxfed.reductions import _affine

BAD = [np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0]

RULES = {
    "caf": (caf, oracles.caf),
    "filter_l2": (
        lambda f: filter_l2(f, sigma=0.3),
        lambda x, f: oracles.filter_l2(x, f, 0.3),
    ),
    # The oracle has a smallest sigma, as the library; far from it for large rows.
    "filter_l2(sigma=0)": (
        filter_l2,
        lambda x, f: oracles.filter_l2(1e6 * np.asarray(x, np.float64), f, 0.0) / 1e6,
    ),
}


def aggregate(rule, updates, **extra):
    """Run a rule once; compiled, which is quicker than one operation at a time."""

    @quick_jit
    def run(updates, extra):
        params = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), updates)
        return rule.update(updates, rule.init(params), params, **extra)[0]

    return run(updates, extra)


@functools.cache
def compiled(name, f):
    return quick_jit(functools.partial(aggregate, RULES[name][0](f)))


def close(actual, expected, tol):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tol)


def spread_rows(n, d, seed=0):
    """Rows of different spread in each direction: the largest eigenvalue is simple."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) * 0.6 ** np.arange(d)[None, :]
    x = x @ np.linalg.qr(rng.normal(size=(d, d)))[0] + rng.normal(size=d)
    return x.astype(np.float32)


def kinds(n, d):
    x, rng = spread_rows(n, d), np.random.default_rng(1)
    yield x
    yield x[rng.integers(0, (n + 1) // 2, n)]
    yield (1e3 + 1e-2 * rng.normal(size=(n, d)) * 0.6 ** np.arange(d)).astype(
        np.float32
    )
    line = rng.normal(size=(n, 1)) * np.linspace(0.5, 1, d)
    yield line.astype(np.float32)
    x = x.copy()
    x[: (n - 1) // 3] += 20
    yield x


@pytest.mark.parametrize(("n", "f"), [(1, 0), (2, 0), (5, 2), (20, 5)])
@pytest.mark.parametrize("name", RULES)
def test_matches_the_oracle(name, n, f):
    for x in kinds(n, 9):
        close(compiled(name, f)(x), RULES[name][1](x, f), oracles.tolerance(x))
    x = spread_rows(n, 9)
    tree = {"a": x[:, 0], "b": (x[:, 1:3], None), "c": x[:, 3:].reshape(n, 3, 2)}
    out = jax.tree.leaves(compiled(name, f)(tree))
    joined = np.concatenate([np.ravel(leaf) for leaf in out])
    close(joined, RULES[name][1](x, f), oracles.tolerance(x))


@pytest.mark.parametrize("name", RULES)
def test_float64_matches_closely(name):
    with jax.enable_x64(True):
        for seed in range(5):
            x = np.random.default_rng(seed).normal(size=(15, 6)) + 1e3
            out = compiled(name, 4)(jnp.asarray(x))
            assert out.dtype == jnp.float64
            close(out, RULES[name][1](x, 4), 1e-10)


@pytest.mark.parametrize("name", RULES)
def test_no_budget_gives_the_mean_and_equal_rows_that_row(name):
    x = spread_rows(9, 9)
    close(compiled(name, 0)(x), x.mean(0), 1e-6)
    row = np.random.default_rng(2).normal(size=9).astype(np.float32)
    for n in (3, 40):
        out = compiled(name, (n - 1) // 2)(np.tile(row, (n, 1)))
        assert np.all(np.abs(out - row) <= 4 * np.spacing(np.abs(row)))


@pytest.mark.parametrize("far", [1e2, 1e6, 1e15, -1e18, *BAD])
@pytest.mark.parametrize("name", RULES)
def test_f_bad_rows_are_survived(name, far):
    x = spread_rows(11, 9) + 1
    x[[1, 4, 10]] = far
    x[4, 1:] = 1.0  # one bad entry is enough
    out = np.asarray(compiled(name, 3)(x))
    honest = np.delete(x, [1, 4, 10], 0)
    assert np.all(out >= np.minimum(honest.min(0), 0) - 1e-5)
    assert np.all(out <= honest.max(0) + 1e-5)
    # Norms above 2e18 / n count as infinite.
    known = np.where(np.abs(x) > 1e17, np.inf, x)
    close(out, RULES[name][1](known, 3), 1e-4)


@pytest.mark.parametrize("name", RULES)
def test_copies_are_survived(name):
    for place in (0.0, 3.0, 1e10):
        x = spread_rows(11, 9)
        x[[0, 2, 3, 9]] = place
        out = np.asarray(compiled(name, 4)(x))
        reach = np.abs(np.delete(x, [0, 2, 3, 9], 0)).max() + min(place, 10.0)
        assert np.all(np.abs(out) <= reach)


@pytest.mark.parametrize("name", RULES)
def test_more_than_f_bad_rows_give_nan(name):
    x = spread_rows(8, 9)
    x[[0, 3, 4]] = np.nan
    assert np.all(np.isnan(compiled(name, 2)(x)))
    nobody = compiled(name, 2)(spread_rows(8, 9), mask=np.zeros(8, bool))
    assert np.all(np.isnan(nobody))


@pytest.mark.parametrize("content", [0.0, 1e30, np.nan])
@pytest.mark.parametrize("name", RULES)
def test_an_absent_row_is_a_removed_row(name, content):
    x, mask = spread_rows(12, 9), np.arange(12) % 4 != 1
    x[~mask] = content
    out = compiled(name, 2)(x, mask=mask)
    close(out, RULES[name][1](x[mask], 2), 1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", RULES)
def test_half_precision_in_and_out(name, dtype):
    x = jnp.asarray(spread_rows(7, 9), dtype)
    out = compiled(name, 2)(x)
    assert out.dtype == dtype
    wide = np.asarray(x, np.float64)
    eps = float(jnp.finfo(dtype).eps)
    close(out, RULES[name][1](wide, 2), eps * np.abs(wide).max())


@pytest.mark.parametrize("name", RULES)
def test_f_may_be_traced(name):
    x = spread_rows(8, 9)
    x[3] = np.inf
    build = RULES[name][0]
    sweep = quick_jit(jax.vmap(lambda f: aggregate(build(f), x)))(np.arange(-1, 5))
    for f, out in zip(range(-1, 5), sweep, strict=True):
        if 1 <= f < 4:
            close(out, RULES[name][1](x, f), 1e-4)
        else:  # f = 0 has no room for the row that is not finite
            assert np.all(np.isnan(out))


def test_sigma_may_be_traced():
    x = spread_rows(9, 9)
    run = quick_jit(jax.vmap(lambda s: aggregate(filter_l2(3, sigma=s), x)))
    sigmas = np.array([0.0, 0.1, 0.3, 10.0], np.float32)
    for sigma, out in zip(sigmas, run(sigmas), strict=True):
        close(out, oracles.filter_l2(x, 3, sigma), 1e-4)


@pytest.mark.parametrize("name", RULES)
def test_equivariance(name):
    x, run = spread_rows(9, 9), compiled(name, 3)
    base, order = np.asarray(run(x)), np.random.default_rng(3).permutation(9)
    close(run(x[order]), base, 1e-5)
    shift = np.linspace(-8, 8, 9, dtype=np.float32)
    close(run(x + shift[None]), base + shift, 1e-4)
    close(run(-x), -base, 1e-5)
    turn = np.linalg.qr(np.random.default_rng(4).normal(size=(9, 9)))[0]
    close(run((x @ turn).astype(np.float32)), base @ turn, 1e-4)
    if name != "filter_l2":  # whose sigma is a square of a length
        for scale in (2.0**-40, 2.0**20):
            close(run(x * scale) / scale, base, 1e-5)


@pytest.mark.parametrize("name", RULES)
def test_gradients_agree_with_finite_differences(name):
    rng = np.random.default_rng(7)
    x, direction = rng.normal(size=(7, 4)), rng.normal(size=4)
    with jax.enable_x64(True):
        rule = RULES[name][0](2)
        value = quick_jit(lambda x: jnp.vdot(direction, aggregate(rule, x)))
        grad = np.asarray(quick_jit(jax.grad(value))(x))
        for index in np.ndindex(x.shape):
            step = np.zeros_like(x)
            step[index] = 1e-6
            slope = float(value(x + step) - value(x - step)) / 2e-6
            assert abs(grad[index] - slope) < 1e-6
    assert np.abs(grad - direction / 7).max() > 1e-2  # the weights do depend on x


@pytest.mark.parametrize("name", RULES)
def test_gradients_are_finite_whatever_is_sent(name):
    run = compiled(name, 2)
    grad = quick_jit(jax.grad(lambda x: jnp.sum(jnp.square(run(x)))))
    for value in [*BAD, 1e10, -1e18]:
        x = spread_rows(7, 9)
        x[[0, 5]] = value
        slopes = np.asarray(grad(x))
        assert np.all(np.isfinite(slopes))
        if not abs(value) < 1e20:
            assert not np.any(slopes[[0, 5]])
    # Equal rows; a cross, whose largest eigenvalue is double.
    cross = np.zeros((7, 9), np.float32)
    cross[[0, 1, 2, 3], [0, 1, 0, 1]] = 1, 1, -1, -1
    for x in (np.ones((7, 9), np.float32), cross):
        assert np.all(np.isfinite(grad(x)))


@functools.cache
def passes(f):
    """Count how often the filter of CAF removes rows, one pass at a time."""

    @quick_jit
    def run(x):
        geometry = reductions.geometry(x, f)
        c, n = geometry.usable.astype(jnp.float32), x.shape[0]

        def more(carry):
            return jnp.sum(carry[0]) > n - 2 * f

        def one(carry):
            c, count = carry
            _, kept = _affine._filter_pass(geometry, c)
            return kept, count + 1

        return jax.lax.while_loop(more, one, (c, 0))

    return run


@pytest.mark.parametrize("far", [1e1, 1e4, 1e8, 1e15])
def test_no_attacker_buys_more_than_2f_passes(far):
    x = spread_rows(12, 9)
    x[:4] += far * np.array([1, 1 + 1e-3, -1, 1.5])[:, None]
    left, count = passes(4)(x)
    assert count <= 8 and jnp.sum(left) <= 4


def test_rows_that_all_deviate_equally_are_kept():
    x = np.array([[-1.0], [1.0], [-1.0], [1.0]], np.float32)
    for name in RULES:
        close(compiled(name, 1)(x), [0.0], 1e-6)


@pytest.mark.parametrize("name", RULES)
def test_inspect(name):
    x = spread_rows(9, 1)
    x[2], x[5] = 50.0, np.nan
    rule, byzantine = RULES[name][0](3), np.isin(np.arange(9), [2, 5])
    info = quick_jit(rule.inspect)(x, optax.EmptyState(), byzantine=byzantine)
    close(jnp.sum(info.weights), 1, 1e-6)
    assert info.influence == 0 and np.all(info.weights >= 0)
    finite = np.where(np.isnan(x), 0, x)[:, 0]
    close(info.weights @ finite, compiled(name, 3)(x)[0], 1e-5)


@pytest.mark.parametrize("name", RULES)
def test_compose_equals_chain(name):
    rule, x = RULES[name][0](2), spread_rows(11, 9)
    x[3] = 1e10
    mask = np.arange(11) != 6
    pres = [arc(2), nnm(2)]
    fused, link = compose(*pres, rule), optax.chain(*pres, rule)
    few = [bucketing(2, key=1)]
    fewer, chained = compose(*few, rule), optax.chain(*few, rule)

    @quick_jit
    def run(x):
        return [
            (
                fused.update(x, fused.init(x[0]), mask=mask)[0],
                link.update(x, link.init(x[0]), mask=mask)[0],
            ),
            (
                fewer.update(x, fewer.init(x[0]))[0],
                chained.update(x, chained.init(x[0]))[0],
            ),
        ]

    for a, b in run(x):
        close(a, b, 1e-4)


def test_errors():
    with pytest.raises(ValueError, match="sigma must be a finite number >= 0, got"):
        filter_l2(1, sigma=-1.0)
    with pytest.raises(TypeError, match="sigma must be a number"):
        filter_l2(1, sigma="x")
    for build in (caf, filter_l2):
        with pytest.raises(ValueError, match="num_byzantine must be at least 0"):
            build(-1)
        with pytest.raises(ValueError, match="0 <= f < n/2, got f=3, n=6"):
            aggregate(build(3), spread_rows(6, 3))
        with pytest.raises(ValueError, match="has no weighted form"):
            aggregate(build(1), spread_rows(6, 3), weights=np.ones(6))


SHAPES = [(3, 1, 1), (5, 2, 6), (8, 2, 6), (12, 5, 2)]


@st.composite
def problems(draw):
    n, f, d = draw(st.sampled_from(SHAPES))
    x = draw(arrays(np.float32, (n, d), elements=st.integers(-9, 9).map(float)))
    bad = list(draw(st.permutations(range(n)))[: draw(st.integers(0, f))])
    for row in bad:
        x[row] = draw(st.sampled_from([*BAD, 1e10]))
    return x, f, bad


@pytest.mark.parametrize("name", ["caf", "filter_l2(sigma=0)"])
@given(problem=problems())
def test_any_values_any_bad_rows(name, problem):
    x, f, bad = problem
    out = np.asarray(compiled(name, f)(x))
    assert np.all(np.isfinite(out))
    if name == "caf":
        # No honest subset of n - f rows is further from the result than its own
        # spread allows, whatever the others hold.
        honest = np.delete(x, bad, 0).astype(np.float64)
        spread = oracles.top_eigenvalue(honest)
        error = np.sum((out - honest.mean(0)) ** 2)
        n = len(x)
        assert error <= 40 * n / (n - 2 * f) * spread + 1e-6
