# SPDX-License-Identifier: Apache-2.0
"""Nearest-neighbour mixing: golden values, its guarantee, its numerics.

Rows refer to the checklist of the Byz-Clip21-SGD2M sheet, section 7.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import quick_jit

from jaxfed import attacks, naming, reductions
from jaxfed.aggregators import compose, mean, median
from jaxfed.preaggregators import nnm

# (n, f) of the sheet, section 3.
SHEET = [(21, 1), (25, 5), (28, 8), (30, 10), (25, 10)]


@functools.partial(quick_jit, static_argnums=1)
def mixed(x, f, **extra):
    link = nnm(f)
    return link.update(x, link.init(x[0]), x[0], **extra)[0]


@functools.partial(quick_jit, static_argnums=1)
def nnm_median(x, f, **extra):
    rule = compose(nnm(f), median())
    return rule.update(x, rule.init(None), **extra)[0]


@functools.partial(quick_jit, static_argnums=1)
def neighbour_sets(x, f):
    return reductions.nnm_matrix(reductions.geometry(x, f), f) > 0


# --- row 13: golden values, invariances, the guarantee ---------------------------


def test_row_13_golden_two_dimensions():
    x = np.array([[0, 0], [1, 0], [0, 1], [1, 1], [10, 10], [10, -10]], np.float32)
    expected = [[0.5, 0.5]] * 4 + [[3, 3], [3, -2.25]]
    np.testing.assert_allclose(mixed(x, 2), expected, atol=1e-6)
    np.testing.assert_allclose(nnm_median(x, 2), [0.5, 0.5], atol=1e-6)
    np.testing.assert_allclose(reductions.median(x), [1, 0.5], atol=1e-6)


def test_row_13_golden_one_dimension():
    x = np.array([[0], [1], [2], [3], [100]], np.float32)
    np.testing.assert_allclose(mixed(x, 1)[:, 0], [1.5] * 4 + [26.5], atol=1e-6)
    np.testing.assert_allclose(nnm_median(x, 1), [1.5], atol=1e-6)


def test_row_13_without_byzantine_clients_it_is_the_mean():
    x = np.random.default_rng(0).normal(size=(12, 7)).astype(np.float32)
    for row in mixed(x, 0):
        np.testing.assert_allclose(row, oracles.mean(x), atol=1e-6)
    np.testing.assert_allclose(nnm_median(x, 0), oracles.mean(x), atol=1e-6)


def test_row_13_permutation_and_translation():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(11, 6)).astype(np.float32)
    order, shift = rng.permutation(11), np.float32(rng.normal(size=6) * 50)
    base = np.asarray(mixed(x, 4))
    np.testing.assert_allclose(mixed(x[order], 4), base[order], atol=1e-6)
    np.testing.assert_allclose(np.asarray(mixed(x + shift, 4)) - shift, base, atol=4e-5)


def batch_of_problems(per_kind, d):
    """Inputs ``[problems, 30, d]`` with masks, budgets and honest sets.

    Budgets other than the sheet's largest n are padded with absent clients.
    """
    rng = np.random.default_rng(13)
    xs, masks, fs, honest_sets = [], [], [], []
    for n, f in SHEET:
        for kind in range(8 * per_kind):
            x = rng.normal(size=(n, d)) * rng.choice([1e-2, 1, 10], size=d)
            honest = np.arange(n) < n - f
            middle, std = x[honest].mean(0), x[honest].std(0)
            match kind % 8:
                case 0:  # anything
                    x[~honest] = rng.normal(size=(f, d)) * 10 ** rng.uniform(-1, 4)
                case 1:  # inner-product manipulation
                    x[~honest] = -rng.choice([0.1, 0.5, 1, 10]) * (middle + 1)
                case 2:  # a little is enough
                    x[~honest] = middle - rng.uniform(0.1, 3) * std
                case 3:  # mimic one honest client
                    x[~honest] = x[rng.integers(n - f)]
                case 4:  # two clusters of honest clients, the bad ones join one
                    x[: (n - f) // 2] += 4 * std
                    x[~honest] = x[0] + rng.normal(size=(f, d)) * 1e-3
                case 5:  # honest clients are any n - f rows of heavy-tailed data
                    x = rng.standard_t(1.5, size=(n, d))
                    honest = np.isin(np.arange(n), rng.permutation(n)[: n - f])
                case 6:  # equal honest rows
                    x[honest] = x[0]
                    x[~honest] = x[0] + rng.normal(size=(f, d))
                case 7:  # far away
                    x[~honest] = 10.0 ** rng.uniform(3, 12)
            pad = 30 - n
            xs.append(np.pad(x, ((0, pad), (0, 0)), constant_values=np.nan))
            masks.append(np.arange(30) < n)
            honest_sets.append(np.pad(honest, (0, pad)))
            fs.append(f)
    return (
        np.array(xs, np.float32),
        np.array(masks),
        np.array(fs),
        np.array(honest_sets),
    )


def test_row_13_guarantee_of_nnm_and_median():
    """|out - honest mean|^2 <= kappa'/(n-f) sum |x_i - honest mean|^2."""
    x, masks, fs, honest = batch_of_problems(per_kind=30, d=6)
    assert len(x) >= 1000
    rule = jax.vmap(lambda x, f, m: nnm_median.__wrapped__(x, f, mask=m))
    program = quick_jit(rule)
    out = np.asarray(program(x, fs, masks), np.float64)
    rows = np.where(honest[..., None], x, 0).astype(np.float64)
    size = honest.sum(1)
    middle = rows.sum(1) / size[:, None]
    spread = (honest[..., None] * (rows - middle[:, None]) ** 2).sum((1, 2)) / size
    error = ((out - middle) ** 2).sum(1)
    n = masks.sum(1)
    kappa = oracles.kappa_mixed(n, fs, oracles.kappa_median(n, fs))
    np.testing.assert_allclose(
        kappa[:: 8 * 30], [2.17, 16.2, 38.8, 68.0, 197.3], rtol=2e-3
    )
    rounding = (8 * np.spacing(np.abs(rows).max((1, 2)).astype(np.float32))) ** 2
    assert np.all(error <= kappa * spread + 6 * rounding)
    # The problems are hard enough to mean something.
    assert (error / np.maximum(kappa * spread, 1e-12)).max() > 1e-3


# --- row 14: exact recovery ------------------------------------------------------


@pytest.mark.parametrize(("good", "bad"), [(20, 5), (20, 8), (15, 10)])
def test_row_14_inner_product_manipulation_is_neutralised(good, bad):
    byzantine = np.arange(good + bad) >= good
    x = np.random.default_rng(2).normal(size=(good + bad, 1000)).astype(np.float32)
    wire = attacks.ipm(scale=10.0).wire
    attacked, _ = wire.update(x, wire.init(x[0]), byzantine=byzantine)
    out = nnm_median(attacked, bad)
    np.testing.assert_allclose(out, oracles.mean(x[:good]), rtol=0, atol=1e-5)


# --- row 29: the neighbours are those of float64 ---------------------------------


def clear_rows(x, f):
    """Rows whose last neighbour is clearly nearer than the next row, and the sets."""
    n, rows, sets = len(x), [], []
    for i in range(n):
        d = np.array([oracles.sq_distance(x[i], y) for y in x])
        order = np.argsort(d)
        last, following = d[order[n - f - 1]], d[order[n - f]]
        if following - last > 1e-4 * following:
            rows.append(i)
            sets.append(np.isin(np.arange(n), order[: n - f]))
    return rows, np.array(sets)


@pytest.mark.parametrize(
    ("offset", "spread"),
    [(0, 1), (1e3, 1e-2), (0, 1e-6), (5, 1e4)],
)
def test_row_29_neighbours_on_noisy_data(offset, spread):
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(4):
        x = (offset + spread * rng.normal(size=(25, 2000))).astype(np.float32)
        rows, sets = clear_rows(x, 5)
        np.testing.assert_array_equal(np.asarray(neighbour_sets(x, 5))[rows], sets)
        found += len(rows)
    assert found >= 90


@pytest.mark.parametrize("huge", [1e15, -1e15, 1e30])
@pytest.mark.parametrize("at", [0, 7, 24])
def test_row_29_one_huge_row_changes_no_other_neighbours(huge, at):
    x = 1e3 + 1e-2 * np.random.default_rng(4).normal(size=(25, 500))
    x = x.astype(np.float32)
    x[at] = huge
    rows, sets = clear_rows(x, 5)
    others = np.array(rows) != at
    assert others.sum() >= 22
    near = np.asarray(neighbour_sets(x, 5))
    np.testing.assert_array_equal(near[rows][others], sets[others])
    assert not np.any(near[np.arange(25) != at, at])


# --- edges -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_a_row_that_is_not_finite_stays_far_and_draws_nobody(value):
    x = np.random.default_rng(5).normal(size=(7, 4)).astype(np.float32)
    x[2], x[6, 1] = value, value
    out = mixed(x, 2)
    np.testing.assert_allclose(
        np.delete(out, [2, 6], axis=0),
        np.tile(oracles.mean(np.delete(x, [2, 6], axis=0)), (5, 1)),
        atol=1e-6,
    )
    assert np.all(out[2] == np.inf) and np.all(out[6] == np.inf)


def test_duplicates_of_zero_distance_and_one_bad_row():
    """A row with NaN must not pass for its finite neighbours when these are few."""
    x = np.array([[0, 0], [1, 0], [1, -1], [np.nan, 0], [0, 0]], np.float32)
    out = np.asarray(mixed(x, 2))
    assert np.all(out[3] == np.inf) and np.all(np.isfinite(np.delete(out, 3, axis=0)))


def test_absent_rows_are_not_drawn_on_and_become_zero():
    x = np.random.default_rng(6).normal(size=(7, 4)).astype(np.float32)
    x[5:] = [[np.nan], [1e30]]
    out = mixed(x, 1, mask=np.arange(7) < 5)
    np.testing.assert_allclose(out[:5], oracles.nnm(x[:5], 1), atol=1e-6)
    assert not np.any(out[5:])


def test_matrix_of_too_many_byzantine_clients_is_nan():
    @quick_jit
    def matrix(f):
        x = np.eye(4, dtype=np.float32)
        return reductions.nnm_matrix(reductions.geometry(x, 1), f)

    assert np.all(np.isnan(matrix(2))) and np.all(np.isnan(matrix(-1)))
    np.testing.assert_allclose(matrix(1).sum(1), 1, rtol=1e-6)


def test_errors():
    with pytest.raises(ValueError, match=r"0 <= f < n/2, got f=2, n=4"):
        mixed(np.zeros((4, 2), np.float32), 2)
    with pytest.raises(ValueError, match="num_byzantine must be at least 0"):
        nnm(-1)
    with pytest.raises(ValueError, match="no weighted form"):
        mixed(np.zeros((4, 2), np.float32), 1, weights=np.ones(4))


def test_dtypes_are_kept():
    for dtype in (jnp.bfloat16, jnp.float16):
        x = jnp.asarray(np.random.default_rng(7).normal(size=(6, 5)), dtype)
        out = mixed(x, 1)
        assert out.dtype == dtype
        expected = oracles.nnm(np.asarray(x, np.float64), 1)
        np.testing.assert_allclose(out, expected, atol=float(jnp.finfo(dtype).eps) * 3)


@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_honest_rows_mix_to_their_mean_whatever_far_rows_hold(seed, scale):
    rng = np.random.default_rng(seed)
    x = (scale * rng.normal(size=(10, 6))).astype(np.float32)
    bad = rng.choice(10, 3, replace=False)
    far = scale * 10.0 ** rng.uniform(2, 9, size=(3, 1)) * rng.choice([-1, 1], (3, 6))
    x[bad] = far.astype(np.float32)
    honest = np.delete(x, bad, axis=0)
    out = mixed(x, 3)
    expected = np.tile(oracles.mean(honest), (7, 1))
    actual = np.delete(np.asarray(out), bad, axis=0)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=oracles.tolerance(honest))


def test_mean_behind_mixing_is_weighted_by_popularity():
    """One row is the neighbour of k rows: it has weight k / (n (n - f))."""
    x = np.random.default_rng(8).normal(size=(9, 5)).astype(np.float32)
    rule = compose(nnm(3), mean())
    info = quick_jit(rule.inspect)(x, rule.init(x[0]))
    near = [oracles.neighbours(x, i, 3) for i in range(9)]
    popularity = np.bincount(np.concatenate(near), minlength=9)
    np.testing.assert_allclose(info.weights, popularity / 54, atol=1e-7)


def test_a_traced_fraction_of_a_client_is_refused():
    for rule in ("trimmed_mean", "nnm+median"):
        with pytest.raises(TypeError, match="num_byzantine must be an integer"):
            quick_jit(lambda f, rule=rule: naming.make_aggregator(rule, f))(1.5)


def test_leaves_without_entries():
    rule = naming.make_aggregator("nnm+median", 1)
    assert rule.update(jnp.zeros((5, 0)), rule.init(jnp.zeros(0)))[0].shape == (0,)
