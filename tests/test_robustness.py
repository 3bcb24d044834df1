# SPDX-License-Identifier: Apache-2.0
"""Robustness coefficients: published numbers, proofs tried, and the search."""

import itertools
import math

import jax
import numpy as np
import oracles
import pytest

import jaxfed
from jaxfed import robustness
from jaxfed.robustness import best_kappa, empirical_kappa, kappa

SIZES = [(n, f) for n in range(1, 31) for f in range((n + 1) // 2)]
PROVEN = [
    *("median", "trimmed_mean", "geometric_median", "meamed", "phocas", "mda"),
    *("mva", "smea", "krum(neighbors=n-f-1)"),
]


# --- coefficients ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "f", "expected"),
    [(21, 1, 2.17), (25, 5, 16.2), (28, 8, 38.8), (30, 10, 68.0), (25, 10, 197.3)],
)
def test_published_numbers_of_mixing_and_median(n, f, expected):
    value = kappa("nnm+median", n, f)
    np.testing.assert_allclose(value, expected, rtol=3e-3)
    np.testing.assert_allclose(
        value, oracles.kappa_mixed(n, f, oracles.kappa_median(n, f))
    )


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("trimmed_mean", 6 * 2 / 3 * 5 / 3),
        ("median", 4 * 25 / 9),
        ("geometric_median", 4 * 25 / 9),
        ("krum(neighbors=n-f-1)", 10),
        ("smea", 8 / 3),
        ("mva", 8 / 3),
        ("nnm+mva", 16 / 5 * 11 / 3),
        ("nnm+nnm+mva", 16 / 5 * (16 / 5 * 11 / 3 + 1)),
        ("mean", math.inf),
    ],
)
def test_published_numbers_at_seven_and_two(rule, expected):
    np.testing.assert_allclose(kappa(rule, 7, 2), expected)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("trimmed_mean", 2 / 3),
        ("median", 3 / 2),
        ("krum(neighbors=n-f-1)", (math.sqrt(10 / 3) + math.sqrt(2 / 3)) ** 2),
        ("krum", (math.sqrt(15 / 4) + math.sqrt(3 / 2)) ** 2),
        ("meamed", 2 / 3 * (1 + math.sqrt(5 / 2)) ** 2),
        ("phocas", 2 / 3 * (1 + math.sqrt(5 / 3)) ** 2),
        ("mda", (math.sqrt(2 / 3) + 2 * math.sqrt(2 / 5)) ** 2),
    ],
)
def test_sharp_numbers_at_seven_and_two(rule, expected):
    np.testing.assert_allclose(kappa(rule, 7, 2, sharp=True), expected)


def test_forms():
    assert kappa("smea", 7, 2, "spectral") == kappa("smea", 7, 2)
    assert kappa("median", 7, 2, "spectral") == 4 * kappa("median", 7, 2)
    assert kappa("median", 7, 2, "spectral", dim=3) == 3 * kappa("median", 7, 2)
    assert kappa("median", 7, 2, "spectral", dim=9) == 4 * kappa("median", 7, 2)
    assert kappa("nnm+smea", 7, 2, "spectral", dim=1) == kappa("nnm+smea", 7, 2)


@pytest.mark.parametrize("rule", [*PROVEN, "krum"])
def test_no_coefficient_is_below_the_best(rule):
    for n, f in SIZES:
        if rule == "krum" and n < 2 * f + 3:
            continue
        best, sharp = best_kappa(n, f), kappa(rule, n, f, sharp=True)
        assert best <= sharp * (1 + 1e-12) <= kappa(rule, n, f) * (1 + 1e-11)
        assert sharp <= kappa(rule, n, f, "spectral", sharp=True)


@pytest.mark.parametrize("rule", ["mean", "trimmed_mean", "smea", "mva", "nnm+median"])
def test_nothing_is_lost_without_byzantine_clients(rule):
    assert kappa(rule, 5, 0, sharp=True) == best_kappa(5, 0) == 0


@pytest.mark.parametrize(
    ("rule", "n", "f", "options", "message"),
    [
        ("median", 4, 2, {}, "0 <= f < n/2, got f=2, n=4"),
        ("median", 4, -1, {}, "num_byzantine must be at least 0"),
        ("median", 0, 0, {}, "n must be at least 1"),
        ("median", 5, 1, {"form": "norm"}, "form must be 'trace' or 'spectral'"),
        ("median", 5, 1, {"form": "spectral", "dim": 0}, "dim must be at least 1"),
        ("medium", 5, 1, {}, "unknown rule 'medium'. Did you mean 'median'"),
        ("nmn+median", 5, 1, {}, "unknown pre-aggregator 'nmn'"),
        ("cge", 5, 1, {}, "nothing is proven of 'cge' here.*geometric_median, krum"),
        ("bucketing+median", 5, 1, {}, "chains are covered with nnm only"),
        ("smea(power_iters=1)", 5, 1, {}, "nothing is proven of 'smea' with.*power"),
        ("krum(score=plain)", 5, 1, {}, "got score=plain"),
        ("krum(neighbors=n)", 5, 1, {}, "neighbors=n"),
        ("krum", 4, 1, {}, r"krum needs n >= 2 f \+ 3, got n=4, f=1"),
    ],
)
def test_errors(rule, n, f, options, message):
    with pytest.raises(ValueError, match=message):
        kappa(rule, n, f, **options)


def test_more_errors():
    with pytest.raises(TypeError, match="n must be a Python int"):
        kappa("median", 5.0, 1)
    with pytest.raises(TypeError, match="string"):
        kappa(jaxfed.aggregators.median(), 5, 1)
    with pytest.raises(ValueError, match="0 <= f < n/2"):
        best_kappa(4, 2)
    with pytest.raises(ValueError, match="at most 1000, got n=14, f=4: 1001"):
        empirical_kappa("median", 14, 4, 2, 0)
    with pytest.raises(ValueError, match="restarts must be at least 1"):
        empirical_kappa("median", 5, 1, 2, 0, restarts=0)
    with pytest.raises(ValueError, match="unknown rule"):
        empirical_kappa("medium", 5, 1, 2, 0)
    with pytest.raises(ValueError, match="learning_rate must be"):
        empirical_kappa("median", 5, 1, 2, 0, learning_rate=0.0)


# --- the proofs, tried on the oracles -----------------------------------------------


def ratios(x, out, f, form):
    """Return the ratio for every subset, in plain loops."""
    spread = {"trace": oracles.variance, "spectral": oracles.top_eigenvalue}[form]
    for s in itertools.combinations(range(len(x)), len(x) - f):
        rows = x[list(s)]
        yield ((out - rows.mean(0)) ** 2).sum() / spread(rows), s


def hard_problems(n, f, d, number):
    """Rows in two or three clusters of any size, some tight and some wide."""
    rng = np.random.default_rng(n * 100 + f * 10 + d)
    for trial in range(number):
        points = rng.normal(size=(3, d))
        sizes = np.repeat(np.arange(3), [n - 2 * f, f, f])
        place = rng.permutation(sizes) if trial % 2 else rng.integers(0, 3, n)
        yield points[place] + rng.choice([1e-3, 0.1, 1]) * rng.normal(size=(n, d))


ORACLES = {
    "median": lambda x, f: oracles.median(x),
    "trimmed_mean": oracles.trimmed_mean,
    "geometric_median": lambda x, f: oracles.geometric_median(x, smoothing=1e-12),
    "krum": oracles.krum,
    "krum(neighbors=n-f-1)": lambda x, f: oracles.krum(x, f, neighbors="n-f-1"),
    "meamed": oracles.meamed,
    "meamed(middle=lower)": lambda x, f: oracles.meamed(x, f, "lower"),
    "phocas": oracles.phocas,
    "mda": oracles.mda,
    "mva": oracles.mva,
    "smea": oracles.smea,
    "nnm+trimmed_mean": lambda x, f: oracles.trimmed_mean(oracles.nnm(x, f), f),
}


@pytest.mark.parametrize("rule", ORACLES)
def test_proven_coefficients_hold(rule):
    form = "spectral" if rule == "smea" else "trace"
    for n, f in [(5, 1), (5, 2), (7, 2), (7, 3), (8, 2)]:
        if rule == "krum" and n < 2 * f + 3:
            continue
        bound = kappa(rule, n, f, form, sharp=True)
        for x in hard_problems(n, f, 1 + n % 3, 15):
            out = ORACLES[rule](x, f)
            worst, _ = max(ratios(x, out, f, form))
            assert worst <= bound * (1 + 1e-4)


# --- the search ---------------------------------------------------------------------


def search(rule, n, f, d, **options):
    budget = {"restarts": 8, "steps": 40} | options
    return empirical_kappa(rule, n, f, d, jax.random.key(0), **budget)


@pytest.mark.parametrize(("n", "f", "d"), [(5, 1, 1), (7, 2, 2)])
def test_the_worst_case_of_smea_is_found(n, f, d):
    found = search("smea", n, f, d, form="spectral")
    assert found.bound == 4 * f / (n - 2 * f)
    assert 0.95 * found.bound <= found.ratio <= (1 + 1e-4) * found.bound


@pytest.mark.parametrize(
    ("rule", "n", "f"), [("trimmed_mean", 11, 3), ("median", 7, 2), ("mva", 5, 1)]
)
def test_the_worst_case_of_rules_with_a_tight_bound_is_found(rule, n, f):
    found = search(rule, n, f, 2)
    assert 0.95 <= found.fraction <= 1 + 1e-4


@pytest.mark.parametrize(
    "rule",
    [
        *("geometric_median", "krum", "krum(neighbors=n-f-1)", "meamed", "phocas"),
        *("mda", "nnm+median"),
    ],
)
def test_no_search_exceeds_a_proven_coefficient(rule):
    found = search(rule, 7, 2, 2)
    assert best_kappa(7, 2) * 0.9 <= found.ratio <= found.bound * (1 + 1e-4)
    assert found.fraction == found.ratio / found.bound


def test_the_result_is_what_it_says():
    found = search("trimmed_mean", 7, 2, 3, form="spectral", steps=20)
    assert found.inputs.shape == (7, 3) and found.subset.shape == (5,)
    x = np.asarray(found.inputs, np.float64)
    worst, subset = max(ratios(x, oracles.trimmed_mean(x, 2), 2, "spectral"))
    np.testing.assert_allclose(found.ratio, worst, rtol=1e-4)
    assert tuple(found.subset) == subset


def test_a_mean_is_not_robust():
    found = search("mean", 5, 1, 2)
    assert found.ratio > 1e3 and found.bound == math.inf and found.fraction == 0


def test_rules_without_a_proof_and_aggregators_are_searched_too():
    assert search("cge", 5, 1, 2, steps=20).bound is None
    rule = jaxfed.aggregators.median()
    found = search(rule, 5, 1, 2, steps=20)
    assert found.bound is None and found.fraction is None
    assert found.ratio == search("median", 5, 1, 2, steps=20).ratio


def test_equal_rows_do_not_divide_by_zero():
    subsets = np.array([[0, 1, 2], [1, 2, 3]])
    x = np.array([[0.5], [0.5], [0.5], [-1.5]])
    value, _ = robustness._exact_ratio(x, x[0], subsets[:1], "trace")
    assert value == 0
    x = x.astype(np.float32)
    logs = robustness._log_ratios(x, x[0], subsets, "spectral")
    assert np.all(np.isfinite(logs))
    # Nothing is found where nothing can be: f = 0 and one client.
    assert search("trimmed_mean", 5, 0, 2, steps=5).ratio < 1e-6
    assert search("trimmed_mean", 1, 0, 2, steps=5).ratio == 0


def test_the_search_runs_in_float64():
    with jax.enable_x64(True):
        found = search("trimmed_mean", 5, 1, 1)
    assert found.inputs.dtype == np.float64
    assert 0.95 <= found.fraction <= 1 + 1e-12
