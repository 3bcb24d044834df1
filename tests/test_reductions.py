# SPDX-License-Identifier: Apache-2.0
"""The kernels under the rules: sorting, geometry, weighted sums."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jaxfed import _tree, reductions
from jaxfed.reductions import _gram, _sorted


def rows(n, d, seed=0, offset=0.0, spread=1.0):
    x = np.random.default_rng(seed).normal(size=(n, d)) * spread + offset
    return x.astype(np.float32)


def sq_distances64(x):
    x = np.asarray(x, np.float64)
    return np.array([[oracles.sq_distance(a, b) for b in x] for a in x])


# --- sorting ---------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 65))
def test_the_network_sorts(n):
    """0-1 principle: a network that sorts all 0-1 columns sorts everything."""
    if n <= 10:
        columns = np.array(list(itertools.product([0, 1], repeat=n)))
    else:
        rng = np.random.default_rng(n)
        columns = (rng.random((4000, n)) < rng.random((4000, 1))).astype(int)
    wires = columns.T.copy()
    for i, j in _sorted._comparators(n):
        assert i < j
        low, high = np.minimum(wires[i], wires[j]), np.maximum(wires[i], wires[j])
        wires[i], wires[j] = low, high
    np.testing.assert_array_equal(wires, np.sort(columns.T, axis=0))


@pytest.mark.parametrize("n", [5, 33, 66])
def test_every_window_of_ranks(n):
    """Static and traced ranks, networks (up to 64 and 32 rows) and the sort."""
    x = rows(n, 7)
    x[0, 0], x[1, 0], x[2, 1] = np.nan, -np.inf, np.inf
    traced = jax.jit(_sorted.window_mean)
    windows = [(0, n), (1, n - 1), (n // 2, n // 2 + 1)]
    for low, high in windows:
        columns = oracles._columns(x)
        expected = [oracles._average(column[low:high]) for column in columns]
        static = _sorted.window_mean(x, low, high)
        np.testing.assert_allclose(static, expected, atol=1e-6)
        np.testing.assert_allclose(traced(x, low, high), expected, atol=1e-6)
    for low, high in [(-1, 2), (2, 2), (3, 2), (n - 1, n + 1), (n, n + 1), (-2, -1)]:
        if n < 10:
            assert np.all(np.isnan(_sorted.window_mean(x, low, high)))
        assert np.all(np.isnan(traced(x, low, high)))


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ((1, 3), [0, 1 / 3, 1 / 3, 1 / 3, 0]),
        ((0, 3), [1 / 3, 2 / 9, 2 / 9, 2 / 9, 0]),
        ((3, 5), [0, 1 / 6, 1 / 6, 1 / 6, 1 / 2]),
        ((0, 1), [1, 0, 0, 0, 0]),
        ((0, 5), [1 / 5] * 5),
        ((2, 2), [0] * 5),
    ],
)
def test_values_that_tie_share_their_ranks(window, expected):
    x = jnp.array([0.0, 1.0, 1.0, 1.0, 5.0])
    weights = _sorted.window_weights(x, *window)
    np.testing.assert_allclose(weights, expected, atol=1e-7)
    gradient = jax.grad(lambda x: _sorted.window_mean(x, *window))(x)
    np.testing.assert_allclose(gradient, expected, atol=1e-7)


def test_weights_leave_out_what_is_absent_or_not_finite():
    x = jnp.array([[1.0], [-jnp.inf], [2.0], [7.0], [jnp.nan], [1.0]])
    mask = jnp.array([True, True, True, False, True, True])
    weights = _sorted.window_weights(x, 1, 3, mask)
    np.testing.assert_allclose(weights[:, 0], [0.25, 0, 0.5, 0, 0, 0.25])
    assert not np.any(_sorted.window_weights(x, 1, 4, mask))


@pytest.mark.parametrize("n", [64, 65])
def test_differentiating_a_large_window_compiles_to_little(n):
    """Derivatives of the network itself take minutes of compilation at 64 rows."""

    def loss(x):
        return jnp.sum(reductions.trimmed_mean(x, 5) ** 2)

    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.zeros((n, 3)))
    assert str(jaxpr).count("select_and_scatter") == 0
    assert len(str(jaxpr)) < 400_000


# --- which are the smallest ------------------------------------------------------


def test_smallest_takes_the_lowest_index_of_a_tie():
    scores = jnp.array([3.0, 1.0, 2.0, 2.0 * (1 + 5e-6), 2.0, jnp.inf, 0.0])
    expected = {0: "", 1: "6", 2: "61", 3: "612", 4: "6123", 5: "61234", 6: "612340"}
    choose = jax.jit(_gram.smallest)
    for k, chosen in expected.items():
        want = np.isin(np.arange(7), [int(c) for c in chosen])
        np.testing.assert_array_equal(choose(scores, k), want)
    assert np.all(choose(scores, 7)) and not np.any(choose(scores, -1))


def test_smallest_always_takes_k():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 4, (500, 9)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.2] = np.inf
    scores *= 1 + 3e-6 * rng.normal(size=scores.shape).astype(np.float32)
    choose = jax.jit(jax.vmap(_gram.smallest, (0, None)))
    for k in range(10):
        chosen = np.asarray(choose(scores, k))
        np.testing.assert_array_equal(chosen.sum(1), k)
        worst = np.where(chosen, scores, -1).max(1)
        best = np.where(chosen, np.inf, scores).min(1)
        assert np.all((worst <= best * (1 + 2.1e-5)) | (k == 0))


# --- geometry --------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "spread"), [(0, 1), (1e3, 1e-2), (0, 1e-9)])
@pytest.mark.parametrize("d", [9, 2 * 8192 + 5])
def test_distances_agree_with_float64(offset, spread, d):
    x = rows(9, d, offset=offset, spread=spread)
    tree = {"a": x[:, :3], "b": x[:, 3:].reshape(9, -1, 2), "empty": x[:, :0]}
    exact = sq_distances64(x)
    for f, mask in ((2, None), (None, None), (2, np.ones(9, bool))):
        geometry = jax.jit(lambda u, f=f, m=mask: reductions.geometry(u, f, mask=m))(
            tree
        )
        np.testing.assert_allclose(geometry.sq_distances(), exact, rtol=1e-5)
        assert np.all(geometry.usable) and np.all(geometry.present)


@pytest.mark.parametrize("f", [2, None])
def test_a_huge_row_costs_no_digits(f):
    """Nothing a Byzantine row holds moves the centre away from the honest rows."""
    x = rows(9, 500, offset=1e3, spread=1e-2)
    exact = sq_distances64(x)
    for value in (1e15, 1e30, np.inf, np.nan):
        for bad in ([0, 1], [0, 8], [3, 5]):
            y = x.copy()
            y[bad] = value * np.array([[1], [-1]], np.float32)
            honest = np.ix_(*[np.delete(np.arange(9), bad)] * 2)
            geometry = jax.jit(lambda u: reductions.geometry(u, f))(y)
            d = np.asarray(geometry.sq_distances())
            np.testing.assert_allclose(d[honest], exact[honest], rtol=1e-5)
            np.testing.assert_array_equal(np.diagonal(d), 0)
            others = np.delete(d[bad[0]], bad)
            if value == 1e15:
                np.testing.assert_allclose(others, 500 * 1e30, rtol=1e-5)
            else:
                assert np.all(np.isinf(others)) and not geometry.usable[bad[0]]


def test_geometry_of_mixed_rows():
    x = rows(7, 40, offset=3)
    x[6] = np.nan
    matrix = np.random.default_rng(1).random((5, 7)).astype(np.float32)
    matrix[:, 6] = [0, 0, 0, 1, 0]
    matrix[4] = 0
    matrix /= np.maximum(matrix.sum(1, keepdims=True), 1e-9)
    geometry = reductions.geometry(x, 1)
    mixed = geometry.mixed(jnp.asarray(matrix))
    np.testing.assert_array_equal(mixed.usable, [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(mixed.present, [1, 1, 1, 1, 0])
    exact = sq_distances64(matrix[:3, :6].astype(np.float64) @ x[:6])
    d = np.asarray(mixed.sq_distances())
    np.testing.assert_allclose(d[:3, :3], exact, rtol=1e-4, atol=1e-5)
    assert np.all(np.isinf(d[3, :3]))


def test_the_medoid_is_near_the_honest_rows():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x = rows(9, 5, seed)
        bad = rng.choice(9, 4, replace=False)
        x[bad] = rng.choice([0.0, 1e3, 1e12, np.nan])
        x[bad[:2]] += rng.normal(size=(2, 5))
        honest = np.delete(x, bad, axis=0)
        chosen = x[int(reductions.geometry(x, 4).medoid())]
        gap = min(oracles.sq_distance(chosen, h) for h in honest)
        assert gap <= sq_distances64(honest).max() * (1 + 1e-4)


def test_geometry_refuses_a_bad_budget():
    with pytest.raises(ValueError, match="num_byzantine must be at least 0"):
        reductions.geometry(rows(3, 2), -1)
    with pytest.raises(TypeError, match="mask must be bool"):
        reductions.geometry(rows(3, 2), 1, mask=[1, 0, 1])


# --- sums ------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 7, 64, 130])
def test_combine_is_a_weighted_sum(n):
    x, w = rows(n, 33), np.random.default_rng(1).random(n).astype(np.float32)
    x[n // 2], w[n // 2] = np.nan, 0
    clean = np.where(np.isnan(x), 0, x).astype(np.float64)
    expected = w.astype(np.float64) @ clean
    combine = jax.jit(_tree.combine)
    np.testing.assert_allclose(combine(w, {"a": x})["a"], expected, rtol=0, atol=1e-5)
    if n > 2:
        share = w / w.sum()
        relative = combine(share, x + 1000, np.int32(n // 2 + 1))
        exact = share.astype(np.float64) @ (clean + 1000) / share.sum(dtype=np.float64)
        assert np.all(np.abs(relative - exact) <= 4 * np.spacing(np.float32(1000)))

    def both(w, x):
        return jnp.sum(_tree.combine(w, x) ** 2)

    for slope in jax.jit(jax.grad(both, (0, 1)))(w, x):
        assert np.all(np.isfinite(slope))


@pytest.mark.parametrize("d", [6, 2 * 8192 + 5])
def test_mix_is_a_matrix_product(d):
    x = rows(6, d, offset=10)
    x[5] = np.inf
    matrix = np.random.default_rng(1).random((4, 6)).astype(np.float32)
    matrix[:, 5] = [0, 0, 1, 0]
    matrix[3] = 0
    matrix[:3] /= matrix[:3].sum(1, keepdims=True)
    usable = np.isfinite(x).all(1)
    tree = {"a": x[:, :4].reshape(6, 2, 2), "b": x[:, 4:], "empty": x[:, :0]}
    out = jax.jit(_tree.mix)(matrix, tree, 2, usable)
    out = np.concatenate([out["a"].reshape(4, 4), out["b"], out["empty"]], axis=1)
    expected = matrix[:, :5].astype(np.float64) @ x[:5]
    np.testing.assert_allclose(out[:2], expected[:2], rtol=0, atol=1e-5)
    assert np.all(out[2] == np.inf) and np.all(out[3] == 0)


@pytest.mark.parametrize("count", range(1, 10))
def test_pairwise_total(count):
    assert _tree.total([2.0**i for i in range(count)]) == 2.0**count - 1


def test_norm_of_half_precision_does_not_overflow():
    tree = {"a": jnp.full(4096, 100, jnp.float16), "b": jnp.zeros([], jnp.float16)}
    assert _tree.norm(tree) == 6400
    slopes = jax.grad(_tree.norm)({"a": jnp.zeros(3), "b": jnp.ones(0)})
    assert not np.any(slopes["a"])


# --- the public functions --------------------------------------------------------


def test_public_reductions_take_masks_and_lists_of_flags():
    x, mask = rows(7, 5), [True] * 6 + [False]
    x[6] = np.nan
    np.testing.assert_allclose(
        reductions.median(x, mask=mask), oracles.median(x[:6]), atol=1e-6
    )
    np.testing.assert_allclose(
        reductions.trimmed_mean(x, 2, mask=mask),
        oracles.trimmed_mean(x[:6], 2),
        atol=1e-6,
    )
    np.testing.assert_allclose(
        reductions.mean(x, mask=mask, weights=range(7)),
        oracles.mean(x[:6], range(6)),
        atol=1e-6,
    )


def test_public_reductions_check_their_arguments():
    x = rows(4, 3)
    with pytest.raises(ValueError, match=r"0 <= f < n/2, got f=2, n=4"):
        reductions.trimmed_mean(x, 2)
    for reduce in (
        reductions.mean,
        reductions.median,
        lambda x, **extra: reductions.trimmed_mean(x, 1, **extra),
    ):
        with pytest.raises(TypeError, match="mask must be bool"):
            reduce(x, mask=np.ones(4))
        with pytest.raises(ValueError, match="mask must have one entry for each"):
            reduce(x, mask=np.ones(3, bool))
        with pytest.raises(TypeError, match="must be floating point"):
            reduce(np.ones((4, 3), np.int32))


def test_weights_keep_float64():
    weights = np.array([1.0, 2**24 + 1, 1.0])
    x = np.array([[0.0], [1.0], [0.0]])
    with jax.enable_x64(True):
        out = reductions.mean(jnp.asarray(x), weights=weights)
    assert abs(float(out[0]) - (2**24 + 1) / (2**24 + 3)) < 1e-15
