# SPDX-License-Identifier: Apache-2.0
"""Rules in the checklist on generalization under privacy; row numbers in the names.

More of rows 2 to 4 is in ``test_subsets.py``, where every subset, windows of 301 values
and the law of one power iteration are compared; of row 5 in ``test_spectral.py``, of
row 6 in ``test_robustness.py``.
"""

import functools
import itertools

import jax
import numpy as np
import oracles
import pytest
from toys import quick_jit

from jaxfed import aggregators


def many(rule):
    """``rule`` on a stack of problems ``[problems, n, d]``."""
    return quick_jit(jax.vmap(lambda x: rule.update(x, rule.init(x[0]))[0]))


def best_subset(x, f):
    """SMEA by the eigenvalues of d x d covariances, in float64."""
    scores = {}
    for chosen in itertools.combinations(range(len(x)), len(x) - f):
        rows = x[list(chosen)]
        covariance = np.cov(rows.T, bias=True)
        scores[chosen] = np.linalg.eigvalsh(np.atleast_2d(covariance))[-1]
    return x[list(min(scores, key=scores.get))].mean(0)


def test_stability_row_2_smea_equals_brute_force():
    x = np.random.default_rng(0).normal(size=(100, 7, 4)).astype(np.float32)
    x[50:, :2] += 3
    run = many(aggregators.smea(2))
    got = run(x)
    want = [best_subset(rows.astype(np.float64), 2) for rows in x]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    order = np.random.default_rng(1).permutation(7)
    np.testing.assert_allclose(run(x[:, order]), got, atol=1e-5)
    np.testing.assert_allclose(many(aggregators.smea(0))(x), x.mean(1), atol=1e-6)


@pytest.mark.parametrize(("n", "f"), [(5, 2), (12, 4)])
def test_stability_row_3_one_dimension_is_a_window(n, f):
    x = np.random.default_rng(2).normal(size=(100, n, 1)).astype(np.float32)
    want = [oracles.smea(rows, f) for rows in x]
    np.testing.assert_allclose(many(aggregators.smea(f))(x), want, rtol=1e-5, atol=1e-6)


def test_stability_row_4_power_iterations():
    x = np.random.default_rng(3).normal(size=(7, 4)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 40)

    def power(iterations, key):
        rule = aggregators.smea(2, power_iters=iterations, key=key)
        return rule.update(x, rule.init(x[0]))[0]

    once, often = (
        np.asarray(quick_jit(jax.vmap(functools.partial(power, k)))(keys))
        for k in (1, 100)
    )
    assert len(np.unique(once.round(5), axis=0)) > 1
    np.testing.assert_allclose(often, [oracles.smea(x, 2)] * 40, rtol=1e-5, atol=1e-6)


def test_stability_row_5_filter_stays_near_the_honest_mean():
    rng = np.random.default_rng(4)
    x = rng.normal(size=(500, 10, 5))
    away = rng.normal(size=(500, 2, 5))
    away /= np.linalg.norm(away, axis=2, keepdims=True)
    x[:, 8:] += away * 10 ** rng.uniform(-1, 3, (500, 1, 1))
    got = np.asarray(many(aggregators.caf(2))(x.astype(np.float32)), np.float64)
    honest = x[:, :8]
    error = np.linalg.norm(got - honest.mean(1), axis=1)
    spread = [np.sqrt(oracles.top_eigenvalue(rows)) for rows in honest]
    assert np.all(error <= spread)
    # At most 2f passes, by the definition in NumPy that the rule agrees with.
    for rows, out in zip(x[:100], got[:100], strict=True):
        want, passes = oracles.caf_with_passes(rows, 2)
        assert passes <= 4
        np.testing.assert_allclose(out, want, atol=1e-3)


@pytest.mark.parametrize(("n", "f"), [(5, 1), (5, 2), (7, 2), (7, 3), (9, 3)])
def test_stability_row_6_coefficient_of_smea(n, f):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(1000, n, 2))
    # Three clusters of the sizes at which a rule has most to lose, and random ones.
    places = np.repeat(np.arange(3), [n - 2 * f, f, f])
    points = 3 * rng.normal(size=(1000, 3, 2))
    noise = rng.choice([0.01, 0.1, 1.0], (1000, 1, 1))
    x[::2] = (points[:, places] + noise * x)[::2]
    out = np.asarray(many(aggregators.smea(f))(x.astype(np.float32)), np.float64)
    worst = 0.0
    for chosen in itertools.combinations(range(n), n - f):
        rows = x[:, list(chosen)]
        centred = rows - rows.mean(1, keepdims=True)
        covariance = np.einsum("tni,tnj->tij", centred, centred) / (n - f)
        top = np.linalg.eigvalsh(covariance)[:, -1]
        ratio = np.sum((out - rows.mean(1)) ** 2, axis=1) / top
        worst = max(worst, ratio.max())
    assert 0.3 * f / (n - 2 * f) < worst <= 4 * f / (n - 2 * f) * (1 + 1e-4)


def test_stability_row_6_a_mean_violates_it():
    x = np.zeros((5, 2))
    x[:4] = np.random.default_rng(6).normal(size=(4, 2))
    x[4] = 1e3
    mean = np.asarray(many(aggregators.mean())(x[None].astype(np.float32)))[0]
    spread = oracles.top_eigenvalue(x[:4])
    assert np.sum((mean - x[:4].mean(0)) ** 2) / spread > 4 / 3
