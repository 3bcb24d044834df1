# SPDX-License-Identifier: Apache-2.0
"""Sub-sampled and changing releases: against densities, each other, and the sheets."""

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jaxfed.privacy import accounting, composition, gaussian
from jaxfed.privacy.composition import ALL, Phase, poisson, without_replacement

DELTA = 1e-4
ADD = dict(relation="add_or_remove_one")
X = np.linspace(-14, 14, 140_001)


def mixture(weights, means, x=X):
    """Density of unit Gaussians about ``means``."""
    weights, means = np.ravel(weights)[:, None], np.ravel(means)[:, None]
    return np.sum(weights * np.exp(-((x - means) ** 2) / 2), 0) / math.sqrt(2 * math.pi)


def hockey_stick(p, q, epsilon, cell=X[1] - X[0]):
    """The smallest delta, from the definition, in one direction."""
    return np.sum(np.maximum(p - math.exp(epsilon) * q, 0)) * cell


def both(p, q, epsilon):
    return max(hockey_stick(p, q, epsilon), hockey_stick(q, p, epsilon))


# --- one round of the real mechanism, worst data against ours ---------------------
# Noise 1, so that the sensitivity is 1 / z.


@pytest.mark.parametrize("z", [0.6, 2.0])
@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_poisson_replaced_record(z, epsilon):
    rate, clip = 0.3, 0.5 / z  # a record that is replaced moves the sum by 2 clip
    ours = composition.delta(Phase(1, z, poisson(rate)), epsilon)
    values = clip * np.array([-1, -0.5, 0, 0.5, 1])

    def density(first, second):
        means = np.add.outer([0, first], [0, second])
        return mixture(np.outer([1 - rate, rate], [1 - rate, rate]), means)

    worst = 0.0
    for other in (-clip, 0.0, clip):
        densities = [density(value, other) for value in values]
        for p in densities:
            worst = max(worst, *(hockey_stick(p, q, epsilon) for q in densities))
    assert worst <= ours * (1 + 1e-7)
    assert worst == pytest.approx(ours, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_poisson_replaced_record_is_worst_when_turned_round(epsilon):
    z, rate = 0.8, 0.25
    x = np.linspace(-7, 7, 281)
    cell = (x[1] - x[0]) ** 2

    def density(mean):
        at = [np.outer(mixture(1, a, x), mixture(1, b, x)) for a, b in (mean, (0, 0))]
        return rate * at[0] + (1 - rate) * at[1]

    after = density((0.5 / z, 0))
    found = []
    for angle in np.linspace(0, math.pi, 7):
        before = density((0.5 / z * math.cos(angle), 0.5 / z * math.sin(angle)))
        found.append(hockey_stick(before, after, epsilon, cell))
    assert np.all(np.diff(found) > 0)
    ours = composition.delta(Phase(1, z, poisson(rate)), epsilon)
    assert found[-1] == pytest.approx(ours, rel=1e-3)


@pytest.mark.parametrize("z", [0.6, 2.0])
@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_poisson_added_or_removed_record(z, epsilon):
    rate = 0.3
    phase = Phase(1, z, poisson(rate))
    p, q = mixture([1 - rate, rate], [0, 1 / z]), mixture(1, 0)
    ours, truth = composition.delta(phase, epsilon, **ADD), both(p, q, epsilon)
    assert truth <= ours * (1 + 1e-7)
    assert truth == pytest.approx(ours, rel=1e-4, abs=1e-9)
    assert ours <= composition.delta(phase, epsilon, accountant="rdp", **ADD)


@pytest.mark.parametrize(("size", "population"), [(1, 4), (2, 5), (4, 5)])
@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_without_replacement_replaced_record(size, population, epsilon):
    z = 0.8
    phase = Phase(1, z, without_replacement(size, population))
    ours = composition.delta(phase, epsilon)
    drawn = np.arange(size + 1)
    # k records at 1 / z, the others at 0; a neighbour has one more.
    densities = [
        mixture(stats.hypergeom.pmf(drawn, population, k, size), drawn / z)
        for k in range(population + 1)
    ]
    found = [
        both(p, q, epsilon) for p, q in zip(densities, densities[1:], strict=False)
    ]
    assert max(found) <= ours * (1 + 1e-7)
    assert found[0] == pytest.approx(ours, rel=1e-4, abs=1e-9)
    assert ours <= composition.delta(phase, epsilon, accountant="rdp")


# --- two rounds -------------------------------------------------------------------


def product(first, second):
    return np.multiply.outer(first, second)


def test_two_rounds_of_poisson():
    x, rates, multipliers = np.linspace(-8, 8, 601), (0.3, 0.15), (0.7, 1.3)
    cell = (x[1] - x[0]) ** 2
    phases = [Phase(1, z, poisson(q)) for q, z in zip(rates, multipliers, strict=True)]

    def density(share):
        return product(
            *(
                mixture([1 - q, q], [0, share / z], x)
                for q, z in zip(rates, multipliers, strict=True)
            )
        )

    at = {share: density(share) for share in (-0.5, 0, 0.5, 1)}
    for first, second, options in ((-0.5, 0.5, {}), (0, 1, ADD)):
        for epsilon in (0.5,):
            truth = max(
                hockey_stick(at[first], at[second], epsilon, cell),
                hockey_stick(at[second], at[first], epsilon, cell),
            )
            ours = composition.delta(phases, epsilon, **options)
            assert truth <= ours * (1 + 1e-5)
            assert truth == pytest.approx(ours, rel=1e-3)


def test_two_rounds_without_replacement():
    # The other records, and with them the worst direction, may differ by round.
    x, rate, z = np.linspace(-8, 9, 601), 0.25, 0.8
    cell = (x[1] - x[0]) ** 2
    p, q = mixture([1 - rate, rate], [0, 1 / z], x), mixture(1, 0, x)
    pairs = [
        (product(a, b), product(c, d)) for a, b, c, d in ((p, p, q, q), (p, q, q, p))
    ]
    for epsilon in (0.2, 1.0):
        ours = composition.delta(Phase(2, z, without_replacement(1, 4)), epsilon)
        found = [
            hockey_stick(*pair[::sign], epsilon, cell)
            for pair in pairs
            for sign in (1, -1)
        ]
        assert max(found) <= ours <= 1.1 * max(found)


# --- accountants against each other -----------------------------------------------

SCHEDULE = [
    Phase(30, 2.0, poisson(0.1)),
    Phase(20, 1.5, poisson(0.05)),
    Phase(3, 9.0),
    Phase(0, 0.0),
    Phase(5, 0.0, poisson(0.0)),
]


def test_exact_is_one_gaussian():
    phases = [Phase(10, 5.0), Phase(1, 2.0), Phase(100, 30.0)]
    mu = math.sqrt(10 / 25 + 1 / 4 + 100 / 900)
    exact = composition.epsilon(phases, DELTA, accountant="exact")
    assert exact == pytest.approx(
        accounting.certified_epsilon(1 / mu, 1.0, DELTA, 1), rel=1e-12
    )
    for relation in composition.RELATIONS:
        pld, rdp = (
            composition.epsilon(phases, DELTA, accountant=a, relation=relation)
            for a in ("pld", "rdp")
        )
        assert exact <= pld <= exact * (1 + 1e-5)
        assert exact < rdp < 1.15 * exact
    for accountant in composition.ACCOUNTANTS:
        back = composition.delta(phases, exact, accountant=accountant)
        assert DELTA * (1 - 1e-6) <= back <= 5 * DELTA


def test_order_and_splitting_do_not_matter():
    found = composition.epsilon(SCHEDULE, DELTA)
    split = [
        Phase(10, 2.0, poisson(0.1)),
        *SCHEDULE[:0:-1],
        SCHEDULE[0]._replace(rounds=20),
    ]
    again = composition.epsilon(split, DELTA)
    assert again == pytest.approx(found, rel=1e-9)


def test_renyi_lies_above_and_less_noise_or_a_higher_rate_costs_more():
    pld, rdp = (
        composition.epsilon(SCHEDULE, DELTA, accountant=a, **ADD)
        for a in ("pld", "rdp")
    )
    assert pld < rdp < 1.3 * pld
    for change in (dict(noise_multiplier=1.8), dict(sampling=poisson(0.12))):
        changed = [SCHEDULE[0]._replace(**change), *SCHEDULE[1:]]
        assert composition.epsilon(changed, DELTA, **ADD) > pld
        assert composition.epsilon(changed, DELTA, accountant="rdp", **ADD) > rdp


@pytest.mark.parametrize(("size", "population"), [(1, 100), (30, 100), (99, 100)])
@pytest.mark.parametrize("z", [1.5, 5.0])
def test_without_replacement_between_nothing_and_all(size, population, z):
    phase = Phase(40, z, without_replacement(size, population))
    pld, rdp = (composition.epsilon(phase, DELTA, accountant=a) for a in ("pld", "rdp"))
    exact = composition.epsilon(Phase(40, z), DELTA, accountant="exact")
    assert 0 < pld <= rdp
    assert pld <= exact * (1 + 1e-5)
    # Poisson needs a record's absence to be half as far: it costs less.
    assert composition.epsilon(Phase(40, z, poisson(size / population)), DELTA) < pld


def test_many_rounds_approach_the_central_limit():
    # mu = rate * sqrt(T) / z; both relations have the same.
    phase = Phase(10**4, 40.0, poisson(0.2))
    limit = accounting.certified_epsilon(2.0, 1.0, DELTA, 1)
    for relation in composition.RELATIONS:
        found = composition.epsilon(phase, DELTA, relation=relation)
        assert found == pytest.approx(limit, rel=2e-3)


# --- the sheets -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accountant", "epsilon", "expected"),
    [
        ("exact", 1, 90.105),
        ("exact", 5, 22.5126),
        ("exact", 10, 12.8768),
        ("exact", 20, 7.6211),
        ("exact", 30, 5.70297),
        ("pld", 1, 90.105),
        ("pld", 10, 12.8768),
    ],
)
def test_byzuldp_row_14_exact_table(accountant, epsilon, expected):
    z = composition.noise_multiplier(epsilon, 1e-4, 800, accountant=accountant)
    assert z == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("accountant", ["exact", "rdp"])
def test_byzuldp_row_15_noise_that_follows_another_schedule(accountant):
    profile = [Phase(1, 1 + t / 10) for t in range(50)]
    factor = composition.scale(profile, 6.0, DELTA, accountant=accountant)
    scaled = [Phase(1, factor * z) for _, z, _ in profile]
    spent = composition.epsilon(scaled, DELTA, accountant=accountant)
    assert 6 * (1 - 1e-4) <= spent <= 6
    if accountant == "exact":
        mu = math.sqrt(sum(1 / (factor * z) ** 2 for _, z, _ in profile))
        assert gaussian.exact_delta(1 / mu, 6.0, 1) == pytest.approx(DELTA, rel=1e-6)


@pytest.mark.parametrize("accountant", ["exact", "pld"])
@pytest.mark.parametrize(
    ("nominal", "certified"), [(1, 2.284), (3, 8.895), (8, 34.75), (23, 189.5)]
)
def test_byz_clip21_row_19_true_epsilon(nominal, certified, accountant):
    noise = accounting.nominal_noise_std(1.0, nominal, 4e-4, 1000)
    found = composition.epsilon(Phase(1000, noise / 2), 4e-4, accountant=accountant)
    assert found == pytest.approx(certified, rel=5e-4)


@pytest.mark.parametrize("z", [2.0, 20.0])
def test_stability_row_8_subsampled_rounds(z):
    m, rounds, delta = 200, 400, 1e-5
    found = [
        composition.epsilon(
            Phase(rounds, z, without_replacement(size, m)), delta, accountant="rdp"
        )
        for size in (1, 20, m)
    ]
    assert 0 < found[0] < found[1] < found[2]
    # Full batches: between the exact value and the classic conversion of Rényi's.
    exact = gaussian.epsilon(z, delta, rounds)
    assert exact <= found[2] <= gaussian.epsilon(z, delta, rounds, mode="rdp")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_stability_row_8_subsampled_bound_covers_one_round(accountant):
    # One example in four is at 0 or at 1 / z (replaced), the others at either end.
    z, delta, m = 0.8, 1e-3, 4
    phase = Phase(1, z, without_replacement(1, m))
    epsilon = composition.epsilon(phase, delta, accountant=accountant)
    for ones in range(m):
        p, q = (mixture([1 - k / m, k / m], [0, 1 / z]) for k in (ones, ones + 1))
        assert both(p, q, epsilon) <= delta * (1 + 1e-7)
    assert epsilon < gaussian.epsilon(z, delta, 1)


# --- calibration ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "rounds", "sampling", "options"),
    [
        (0.5, 200, ALL, dict(accountant="pld")),
        (2.0, 200, ALL, dict(accountant="rdp")),
        (1.0, 50, poisson(0.2), dict(accountant="rdp", **ADD)),
        (2.0, 100, poisson(0.1), dict(accountant="pld")),
        (1.0, 100, without_replacement(1, 20), dict(accountant="pld")),
    ],
)
def test_noise_search_never_overshoots_and_is_tight(epsilon, rounds, sampling, options):
    z = composition.noise_multiplier(
        epsilon, DELTA, rounds, sampling=sampling, **options
    )

    def spent(z):
        return composition.epsilon(Phase(rounds, z, sampling), DELTA, **options)

    assert epsilon * (1 - 1e-4) < spent(z) <= epsilon < spent(z * (1 - 3e-5))


@settings(max_examples=30, deadline=None)
@given(
    profile=st.lists(
        st.tuples(st.integers(1, 10**6), st.floats(1e-3, 1e3)), min_size=1, max_size=4
    ),
    log_epsilon=st.floats(-4, 3),
    log_delta=st.floats(-12, -0.01),
)
def test_exact_scale_never_overshoots(profile, log_epsilon, log_delta):
    epsilon, delta = 10**log_epsilon, 10**log_delta
    phases = [Phase(t, z) for t, z in profile]
    factor = composition.scale(phases, epsilon, delta, accountant="exact")

    def spent(factor):
        scaled = [Phase(t, factor * z) for t, z in profile]
        return composition.epsilon(scaled, delta, accountant="exact")

    assert spent(factor) <= epsilon < spent(factor * (1 - 1e-4))


def test_scale_of_a_schedule():
    profile = [Phase(9, 2.0, poisson(0.1)), Phase(2, 1.0), Phase(0, 0.0)]
    factor = composition.scale(profile, 0.5, DELTA)
    scaled = [Phase(t, factor * z, s) for t, z, s in profile]
    assert 0.5 * (1 - 1e-4) < composition.epsilon(scaled, DELTA) <= 0.5


def test_budget_that_sampling_alone_meets(monkeypatch):
    # A record that is rarely drawn needs next to no noise at this delta.
    monkeypatch.setitem(composition._SMALLEST, "pld", 0.1)  # the search is slow below
    z = composition.noise_multiplier(5.0, 0.1, 1, sampling=poisson(0.01))
    assert 0.1 <= z < 0.2
    assert composition.epsilon(Phase(1, z, poisson(0.01)), 0.1) <= 5


def test_budget_below_what_renyi_resolves():
    with pytest.raises(ValueError, match=r"'rdp' does not resolve epsilon=1e-05"):
        composition.noise_multiplier(1e-5, 1e-12, 100, accountant="rdp")


# --- edges ------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", composition.ACCOUNTANTS)
def test_nothing_released_and_no_noise(accountant):
    options = dict(accountant=accountant)
    for nothing in ([], [Phase(0, 0.0)], Phase(0, 1.0)):
        assert composition.epsilon(nothing, DELTA, **options) == 0
        assert composition.delta(nothing, 1.0, **options) == 0
        assert composition.scale(nothing, 1.0, DELTA, **options) == 0
    assert composition.noise_multiplier(1.0, DELTA, 0, **options) == 0
    for z in (0.0, 1e-200, 1e-7):
        bare = [Phase(10, 5.0), Phase(1, z)]
        assert composition.epsilon(bare, DELTA, **options) == math.inf
        assert composition.delta(bare, 1.0, **options) == 1
    for z in (0.0, 1e-200):
        with pytest.raises(ValueError, match="noise_multiplier=(0.0|1e-200)"):
            composition.scale(Phase(1, z), 1.0, DELTA, **options)


@pytest.mark.parametrize("relation", composition.RELATIONS)
def test_rates_zero_and_one(relation):
    full = composition.epsilon(Phase(7, 30.0), DELTA, relation=relation)
    everyone = [poisson(1), without_replacement(9, 9)]
    for sampling in everyone:
        phase = Phase(7, 30.0, sampling)
        assert composition.epsilon(phase, DELTA, relation=relation) == full
        composition.epsilon(phase, DELTA, accountant="exact", relation=relation)
    never = Phase(7, 0.0, poisson(0))
    assert composition.epsilon(never, DELTA, relation=relation) == 0
    assert composition.noise_multiplier(1.0, DELTA, 7, sampling=poisson(0)) == 0
    nearly = composition.epsilon(Phase(7, 30.0, poisson(1 - 1e-9)), DELTA)
    assert nearly == pytest.approx(full, rel=1e-4)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(("z", "rate"), [(1e-3, 1e-9), (1e4, 1e-9), (1e4, 0.5)])
def test_extreme_values_stay_bounds(accountant, z, rate):
    phase = Phase(3, z, poisson(rate))
    spent = composition.epsilon(phase, DELTA, accountant=accountant, **ADD)
    full = composition.epsilon(Phase(3, z), DELTA, accountant="exact")
    # Rényi's bound may exceed that of all rounds together.
    assert 0 <= spent <= (full + 1e-3 if accountant == "pld" else math.inf)
    one = (phase._replace(rounds=1), 0.1)
    found = composition.delta(*one, accountant=accountant, **ADD)
    p = gaussian.exact_delta(z, math.log1p(math.expm1(0.1) / rate), 1)
    assert found >= rate * p * (1 - 1e-9)  # "remove", in closed form
    assert found <= 1


def test_a_tiny_divergence_is_not_taken_for_none():
    # Rounding makes the library's Rényi divergence negative here, read as epsilon 0.
    phase = Phase(10**6, 1.0, poisson(1e-9))
    orders, divergences, _ = composition._renyi([phase])
    assert np.all(divergences > 0)
    assert composition.epsilon(phase, 1e-12, accountant="rdp", **ADD) > 0


def test_describe():
    assert ALL.describe() == "all"
    assert poisson(0.1).describe() == "each with probability 0.1 (Poisson)"
    assert without_replacement(10, 1000).describe() == "10 of 1000 without replacement"
    assert without_replacement(10, 1000).rate == 0.01


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: poisson(1.5), ValueError, "rate=1.5"),
        (lambda: poisson("x"), TypeError, "rate must be"),
        (lambda: without_replacement(4, 3), ValueError, "size=4"),
        (lambda: without_replacement(0, 3), ValueError, "size=0"),
        (lambda: without_replacement(1, 3.0), TypeError, "population"),
        (lambda: composition.epsilon(Phase(-1, 1.0), 0.1), ValueError, "rounds=-1"),
        (lambda: composition.epsilon(Phase(1.5, 1.0), 0.1), TypeError, "rounds"),
        (
            lambda: composition.epsilon(Phase(1, -1.0), 0.1),
            ValueError,
            "noise_multiplier=-1",
        ),
        (lambda: composition.epsilon(Phase(1, 1.0), 1.0), ValueError, "delta=1.0"),
        (lambda: composition.epsilon([(1, 1.0)], 0.1), TypeError, r"Phase\(rounds"),
        (
            lambda: composition.epsilon(Phase(1, 1.0, 0.5), 0.1),
            TypeError,
            "poisson or without_replacement",
        ),
        (
            lambda: composition.epsilon(
                Phase(1, 1.0, composition.Sampling("shuffled", 0.5)), 0.1
            ),
            ValueError,
            "shuffled",
        ),
        (
            lambda: composition.epsilon(Phase(1, 1.0), 0.1, accountant="clt"),
            ValueError,
            "'clt'",
        ),
        (
            lambda: composition.epsilon(Phase(1, 1.0), 0.1, relation="remove"),
            ValueError,
            "'remove'",
        ),
        (lambda: composition.delta(Phase(1, 1.0), -1.0), ValueError, "epsilon=-1"),
        (
            lambda: composition.noise_multiplier(0, 1e-5, 1),
            ValueError,
            "epsilon=0",
        ),
        (
            lambda: composition.epsilon(
                Phase(1, 1.0, poisson(0.5)), 0.1, accountant="exact"
            ),
            ValueError,
            "probability 0.5.*accountant='pld'",
        ),
        (
            lambda: composition.epsilon(
                Phase(1, 1.0, poisson(0.5)), 0.1, accountant="rdp"
            ),
            ValueError,
            "Poisson.*accountant='pld'",
        ),
        (
            lambda: composition.epsilon(
                Phase(1, 1.0, without_replacement(1, 2)), 0.1, **ADD
            ),
            ValueError,
            "relation must be 'replace_one'",
        ),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r'pip install "jaxfed\[train\]"'):
        composition.epsilon(Phase(1, 1.0), 0.1)
