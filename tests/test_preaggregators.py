# SPDX-License-Identifier: Apache-2.0
"""Clipping, adaptive clipping and bucketing, as links and in front of rules."""

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
from jaxfed.aggregators import compose, mean, median, trimmed_mean
from jaxfed.preaggregators import arc, bucketing, clip, nnm
from jaxfed.reductions import _affine

BAD = [np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0]

STAGES = {
    "clip": (lambda f: clip(2.0), lambda x, f: oracles.clip_rows(x, 2.0)),
    "arc": (arc, oracles.arc),
}


def apply(link, updates, **extra):
    """Run a link once; compiled, which is quicker than one operation at a time."""

    @quick_jit
    def run(updates, extra):
        params = jax.tree.map(lambda x: x[0], updates)
        return link.update(updates, link.init(params), params, **extra)[0]

    return run(updates, extra)


@functools.cache
def compiled(name, f):
    return quick_jit(functools.partial(apply, STAGES[name][0](f)))


def close(actual, expected, tol):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tol)


def spread_rows(n, d, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) * (0.1 + np.arange(n)[:, None] / n)
    return rng.permutation(x + rng.normal(size=d) / 2).astype(np.float32)


def kinds(n, d):
    x, rng = spread_rows(n, d), np.random.default_rng(1)
    yield x
    yield rng.integers(-1, 2, (n, d)).astype(np.float32)  # norms are tied
    yield x[rng.integers(0, (n + 1) // 2, n)]
    yield (1e3 + 1e-2 * rng.normal(size=(n, d))).astype(np.float32)
    yield np.linspace(-3, 5, n, dtype=np.float32)[:, None] * np.ones((1, d), np.float32)


def split(x):
    return {"a": x[:, 0], "b": (x[:, 1:3], None), "c": x[:, 3:].reshape(len(x), 1, -1)}


def join(tree):
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    return np.concatenate([x.reshape(len(x), -1) for x in leaves], axis=1)


# --- clip and arc ------------------------------------------------------------------


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize(("n", "f"), [(1, 0), (2, 0), (5, 2), (20, 5)])
def test_matches_the_oracle(name, n, f):
    for x in kinds(n, 9):
        expected, tol = STAGES[name][1](x, f), oracles.tolerance(x)
        close(compiled(name, f)(x), expected, tol)
    close(
        join(compiled(name, f)(split(spread_rows(n, 9)))),
        STAGES[name][1](spread_rows(n, 9), f),
        1e-5,
    )


@pytest.mark.parametrize("name", STAGES)
def test_bad_rows_become_zero_and_move_no_other(name):
    f = 3
    for value in BAD:
        x = spread_rows(11, 9) + 1
        x[[1, 4, 10]] = value
        x[4, 1:] = 1.0  # one bad entry is enough
        out = np.asarray(compiled(name, f)(x))
        with np.errstate(over="ignore"):
            bad = ~np.isfinite(np.square(x).sum(1))
        assert np.all(out[bad] == 0)
        honest = np.where(bad[:, None], np.inf, x)
        close(out, STAGES[name][1](honest, f), oracles.tolerance(x[~bad]))


@pytest.mark.parametrize("name", STAGES)
def test_far_rows_are_shrunk(name):
    x = spread_rows(11, 9) + 1
    x[2], x[7] = 1e10, -1e15
    expected = STAGES[name][1](x, 3)
    close(compiled(name, 3)(x), expected, 1e-5)


def test_an_infinite_norm_clips_nothing_but_removes_what_is_not_finite():
    x = spread_rows(7, 9) * 1e6
    x[3, 2] = np.inf
    out = np.asarray(apply(clip(np.inf), x))
    assert np.all(out[3] == 0)
    close(np.delete(out, 3, 0), np.delete(x, 3, 0), 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", STAGES)
def test_dtypes(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(spread_rows(7, 9) + 0.25, dtype)
        out = apply(STAGES[name][0](2), x)
        assert out.dtype == dtype
        wide = np.asarray(x, np.float64)
        eps = float(jnp.finfo(dtype).eps)
        close(out, STAGES[name][1](wide, 2), 8 * eps * np.abs(wide).max())


@pytest.mark.parametrize("content", [0.0, 1e30, np.nan])
@pytest.mark.parametrize("name", STAGES)
def test_an_absent_row_is_a_removed_row(name, content):
    x, mask = spread_rows(12, 9), np.arange(12) % 4 != 1
    x[~mask] = content
    rule = compose(STAGES[name][0](2), mean())
    out = quick_jit(functools.partial(apply, rule))(x, mask=mask)
    rows = np.asarray(compiled(name, 2)(x, mask=mask))
    expected = STAGES[name][1](x[mask], 2)
    close(rows[mask], expected, 1e-5)
    close(out, expected.mean(0), 1e-5)


@pytest.mark.parametrize("name", STAGES)
def test_permutation_and_scale(name):
    x, order = spread_rows(9, 9), np.random.default_rng(3).permutation(9)
    base = np.asarray(compiled(name, 2)(x))
    close(compiled(name, 2)(x[order]), base[order], 1e-6)
    scale = 2.0**-30
    scaled = compiled("arc", 2)(x * scale) / scale
    close(scaled, compiled("arc", 2)(x), 1e-6)


def test_f_and_clip_norm_may_be_traced():
    x = spread_rows(10, 9)
    sweep = quick_jit(jax.vmap(lambda f: apply(arc(f), x)))(np.arange(-1, 6))
    for f, out in zip(range(-1, 6), sweep, strict=True):
        if 0 <= 2 * f < 10:
            close(out, oracles.arc(x, f), 1e-5)
        else:
            assert np.all(np.isnan(out))
    radii = np.array([0.0, 0.3, 2.0, np.inf], np.float32)
    sweep = quick_jit(jax.vmap(lambda c: apply(clip(c), x)))(radii)
    assert np.all(np.isnan(sweep[0]))
    for radius, out in zip(radii[1:], sweep[1:], strict=True):
        close(out, oracles.clip_rows(x, radius), 1e-5)


@pytest.mark.parametrize("name", STAGES)
def test_gradients_agree_with_finite_differences(name):
    rng = np.random.default_rng(7)
    x, direction = rng.normal(size=(6, 4)) * 1.5, rng.normal(size=(6, 4))
    with jax.enable_x64(True):
        value = quick_jit(lambda x: jnp.vdot(direction, apply(STAGES[name][0](1), x)))
        grad = np.asarray(quick_jit(jax.grad(value))(x))
        for i, j in np.ndindex(6, 4):
            step = np.zeros_like(x)
            step[i, j] = 1e-5
            slope = float(value(x + step) - value(x - step)) / 2e-5
            assert abs(grad[i, j] - slope) < 1e-8


@pytest.mark.parametrize("name", STAGES)
def test_gradients_are_finite_with_bad_rows(name):
    run = compiled(name, 2)
    grad = quick_jit(jax.grad(lambda x: jnp.sum(jnp.square(run(x)))))
    for value in BAD:
        x = spread_rows(7, 9)
        x[[0, 5]] = value
        slopes = np.asarray(grad(x))
        assert np.all(np.isfinite(slopes)) and np.all(slopes[[0, 5]] == 0)


def test_errors():
    with pytest.raises(ValueError, match=r"clip_norm must be > 0 .*got clip_norm=0"):
        clip(0)
    with pytest.raises(TypeError, match="clip_norm must be a number"):
        clip("2")
    with pytest.raises(ValueError, match="num_byzantine must be at least 0"):
        arc(-1)
    with pytest.raises(ValueError, match="0 <= f < n/2, got f=3, n=6"):
        apply(arc(3), spread_rows(6, 3))
    with pytest.raises(ValueError, match="size must be at least 1, got size=0"):
        bucketing(0, key=1)
    with pytest.raises(TypeError, match="size must be a Python int"):
        bucketing(2.0, key=1)
    with pytest.raises(TypeError, match="key must be"):
        bucketing(2, key=None)
    with pytest.raises(ValueError, match="legacy uint32 key"):
        bucketing(2, key=np.zeros(2, np.uint32))
    for stage in (clip(), arc(1), bucketing(key=0)):
        with pytest.raises(ValueError, match="no weighted form"):
            apply(stage, spread_rows(6, 3), weights=np.ones(6))


SHAPES = [(3, 1, 1), (5, 2, 6), (8, 2, 6), (12, 5, 2)]


@st.composite
def problems(draw):
    n, f, d = draw(st.sampled_from(SHAPES))
    x = draw(arrays(np.float32, (n, d), elements=st.integers(-9, 9).map(float)))
    for row in draw(st.permutations(range(n)))[: draw(st.integers(0, f))]:
        x[row] = draw(st.sampled_from([*BAD, 1e10]))
    return x, f


@pytest.mark.parametrize("name", STAGES)
@given(problem=problems())
def test_any_values_any_bad_rows(name, problem):
    x, f = problem
    out = np.asarray(compiled(name, f)(x))
    assert np.all(np.isfinite(out))
    far = np.where(np.abs(x) > 1e20, np.inf, x)
    size = np.abs(x[np.abs(x) < 100]).max(initial=1)
    close(out, STAGES[name][1](far, f), 2e-6 * size)


# --- bucketing ---------------------------------------------------------------------


def members(n, size, state, mask=None):
    """Which rows are in which bucket: mix unit vectors."""
    out, _ = bucketing(size, key=0).update(
        np.eye(n, dtype=np.float32), state, mask=mask
    )
    return np.asarray(out)


@pytest.mark.parametrize("size", [1, 2, 3, 20])
@pytest.mark.parametrize("n", [1, 7, 12])
def test_buckets_partition_the_rows(n, size):
    link = bucketing(size, key=5)
    rows = members(n, size, link.init(None))
    sizes = [size] * (n // size) + [n % size] * (n % size > 0)
    assert [int(np.sum(r > 0)) for r in rows] == sizes
    close(rows.sum(1), np.ones(len(sizes)), 1e-6)
    assert np.all(np.sum(rows > 0, axis=0) == 1)
    x = spread_rows(n, 5)
    order = np.concatenate([np.flatnonzero(r) for r in rows])
    expected = oracles.bucketing(x, order, size)
    close(apply(link, x), expected, oracles.tolerance(x))


def test_a_given_order():
    x = spread_rows(7, 5)

    @functools.partial(quick_jit, static_argnames="size")
    def matrix(order, size, mask=None):
        geometry = reductions.geometry(x, mask=mask)
        return _affine.bucketing_matrix(geometry, order, size)

    order = np.array([3, 0, 6, 1, 2, 5, 4])
    close(matrix(order, 3) @ x, oracles.bucketing(x, order, 3), 1e-6)
    mask = np.array([True, True, False, True, True, False, True])
    order = np.array([3, 0, 6, 1, 4, 2, 5])
    rows = np.asarray(matrix(order, 2, mask))
    close(rows[:3] @ x, oracles.bucketing(x, order[:5], 2), 1e-6)
    assert not np.any(rows[3])


def test_permutations_are_uniform_and_fresh():
    n, link = 4, bucketing(2, key=3)

    @quick_jit
    def many(state):
        def step(state, _):
            out, state = link.update(jnp.eye(n), state)
            return state, out > 0

        return jax.lax.scan(step, state, None, length=3000)[1]

    first = np.asarray(many(link.init(None)))[:, 0]
    partner = np.argmax(first[first[:, 0]][:, 1:], axis=1)
    counts = np.bincount(partner, minlength=3)
    assert abs(first[:, 0].mean() - 0.5) < 5 * np.sqrt(0.25 / 3000)
    assert np.all(np.abs(counts / counts.sum() - 1 / 3) < 5 * np.sqrt(0.23 / 1500))


def test_the_state_decides_and_moves_on():
    link, x = bucketing(2, key=jax.random.key(1)), spread_rows(8, 5)
    state, run = (
        link.init(jax.ShapeDtypeStruct((5,), jnp.float32)),
        quick_jit(link.update),
    )
    one, later = run(x, state)
    again, _ = run(x, state)
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, run(x, later)[0])
    assert jax.tree.structure(later) == jax.tree.structure(state)
    np.testing.assert_array_equal(one, apply(bucketing(2, key=1), x))
    rule = compose(link, median())
    info = quick_jit(rule.inspect)(x[:, :1], rule.init(x[0, :1]))
    out = apply(rule, x[:, :1])
    close(info.weights @ x[:, 0], out[0], 1e-5)


@pytest.mark.parametrize("content", [0.0, np.nan, 1e30])
def test_absent_rows_fill_no_bucket(content):
    n, size = 9, 2
    mask = np.arange(n) % 3 != 0
    rows = members(n, size, bucketing(size, key=2).init(None), mask)
    assert not np.any(rows[:, ~mask])
    assert [int(np.sum(r > 0)) for r in rows] == [2, 2, 2, 0, 0]
    x = spread_rows(n, 5)
    x[~mask] = content
    rule = compose(bucketing(size, key=2), trimmed_mean(1))
    out = apply(rule, x, mask=mask)
    means = rows[:3] @ np.where(mask[:, None], x, 0)
    close(out, oracles.trimmed_mean(means, 1), 1e-5)


@pytest.mark.parametrize("value", BAD)
def test_bad_rows_spoil_their_bucket_only(value):
    x, f = spread_rows(12, 5), 2
    x[[0, 7]] = value
    rule = compose(bucketing(2, key=4), trimmed_mean(f))
    out = apply(rule, x)
    low, high = np.delete(x, [0, 7], 0).min(0), np.delete(x, [0, 7], 0).max(0)
    assert np.all(out >= np.minimum(low, 0)) and np.all(out <= np.maximum(high, 0))


def test_bucketing_passes_gradients_on():
    link, x = bucketing(2, key=1), spread_rows(6, 3)
    state = link.init(None)
    grad = quick_jit(jax.grad(lambda x: jnp.sum(link.update(x, state)[0][0])))(x)
    first = members(6, 2, state)[0]
    close(grad, first[:, None] * np.ones(3), 1e-6)


# --- joined with others ------------------------------------------------------------

CHAINS = {
    "clip+mean": lambda: [clip(1.0), mean()],
    "arc+median": lambda: [arc(2), median()],
    "arc+nnm+median": lambda: [arc(2), nnm(2), median()],
    "clip+arc+mean": lambda: [clip(1.0), arc(2), mean()],
    "nnm+arc+trimmed_mean": lambda: [nnm(2), arc(2), trimmed_mean(2)],
    "bucketing+clip+median": lambda: [bucketing(2, key=1), clip(1.0), median()],
    "clip+bucketing+nnm+mean": lambda: [
        clip(1.0),
        bucketing(3, key=1),
        nnm(1),
        mean(),
    ],
}


@pytest.mark.parametrize("name", CHAINS)
def test_compose_equals_chain(name):
    fused, link = compose(*CHAINS[name]()), optax.chain(*CHAINS[name]())
    x = {"a": spread_rows(9, 12), "b": spread_rows(9, 4, seed=1).reshape(9, 2, 2)}
    x["a"][4] = 1e10
    masks = [None] if "bucketing" in name else [None, np.arange(9) != 4]
    for mask in masks:

        @quick_jit
        def both(x, mask=mask):
            params = jax.tree.map(lambda leaf: leaf[0], x)
            state = fused.init(params), link.init(params)
            a = fused.update(x, state[0], params, mask=mask)[0]
            return a, link.update(x, state[1], params, mask=mask)[0]

        jax.tree.map(lambda a, b: close(a, b, 1e-5), *both(x))


def test_weights_of_clipped_rows_add_up_to_less_than_one():
    x = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [np.nan, 0.0]], np.float32)
    rule = compose(clip(1.0), mean())
    info = quick_jit(rule.inspect)(x, rule.init(x[0]), byzantine=np.arange(4) == 0)
    close(info.weights, [0.05, 0.25, 0.25, 0.0], 1e-6)
    close(info.influence, 0.05, 1e-6)
