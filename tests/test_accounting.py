# SPDX-License-Identifier: Apache-2.0
"""Noise calibration, accounting and the privacy statement (Byz-Clip21 sheet, 5.4)."""

import itertools
import json
import math
import sys
import tomllib

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfed.privacy.accounting import (
    certified_epsilon,
    certified_noise_std,
    dwork_noise_std,
    nominal_epsilon,
    nominal_noise_std,
)
from jaxfed.privacy.statement import make_statement

DELTA = 4e-4
# nominal epsilon: (certified at sensitivity tau, certified at 2 tau), at DELTA.
TRUE_EPSILON = {
    0.1: (0.068, 0.156),
    0.3: (0.251, 0.560),
    1: (1.012, 2.284),
    3: (3.721, 8.895),
    8: (13.02, 34.75),
    13: (25.63, 73.51),
    18: (41.48, 125.1),
    23: (60.54, 189.5),
}


def gaussian_delta(multiplier, epsilon):
    """Delta of one Gaussian mechanism, from the definition (Balle and Wang, eq. 6)."""

    def cdf(z):
        return math.erfc(-z / math.sqrt(2)) / 2

    mu = 1 / multiplier
    return cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu)


# --- closed formulas -----------------------------------------------------------


@pytest.mark.parametrize(
    ("clip_norm", "epsilon", "rounds", "delta", "rate", "expected"),
    [
        (1.0, 3.0, 1000, 4e-4, 1.0, 29.48455),
        (0.1, 3.0, 1000, 4e-4, 1.0, 2.948455),
        (1.0, 0.5, 1000, 1e-5, 1.0, 214.597),
        (1.0, 3.0, 5625, 4e-4, 1.0, 69.929),
        (1.0, 3.0, 4500, 4e-4, 1.0, 62.546),
        (1.0, 3.0, 2250, 4e-4, 1.0, 44.227),
        (1.0, 3.0, 2250, 4e-4, 32 / 2400, 0.58969),
        (1.0, 0.1, 2250, 4e-4, 32 / 2400, 17.69),
    ],
)
def test_row18_nominal_noise(clip_norm, epsilon, rounds, delta, rate, expected):
    noise = nominal_noise_std(clip_norm, epsilon, delta, rounds, sampling_rate=rate)
    assert noise == pytest.approx(expected, rel=1e-4)
    back = nominal_epsilon(noise, clip_norm, delta, rounds, sampling_rate=rate)
    assert back == pytest.approx(epsilon, rel=1e-12)


def test_row18_nominal_noise_to_all_digits():
    assert nominal_noise_std(1.0, 3.0, DELTA, 1000) == pytest.approx(29.48455, abs=5e-6)


def test_row18_dwork_noise():
    assert dwork_noise_std(2.0, 0.5, 1e-5, 1000) == pytest.approx(7412.77, abs=5e-3)
    assert dwork_noise_std(1.0, 0.5, 1e-5, 1000) == pytest.approx(3706.38, abs=5e-3)


@pytest.mark.parametrize("rounds", [1, 10, 1000])
@pytest.mark.parametrize("epsilon", [0.01, 0.5, 0.99])
def test_dwork_noise_is_enough(epsilon, rounds):
    # Its proof spends delta twice, hence the half.
    noise = dwork_noise_std(2.0, epsilon, 1e-5 / 2, rounds)
    assert certified_epsilon(noise, 2.0, 1e-5, rounds) <= epsilon


# --- the accountant --------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 1000, 4500])
@pytest.mark.parametrize("nominal", TRUE_EPSILON)
def test_row19_true_epsilon_table_at_any_number_of_rounds(nominal, rounds):
    clip_norm = 0.3
    noise = nominal_noise_std(clip_norm, nominal, DELTA, rounds)
    for factor, expected in zip((1, 2), TRUE_EPSILON[nominal], strict=True):
        certified = certified_epsilon(noise, factor * clip_norm, DELTA, rounds)
        assert certified == pytest.approx(expected, rel=1e-2)
        at_one = certified_epsilon(
            nominal_noise_std(1.0, nominal, DELTA, 1), factor, DELTA, 1
        )
        assert certified == pytest.approx(at_one, rel=1e-9)


@pytest.mark.parametrize("nominal", [1, 3, 8, 13, 18, 23])
def test_row19_to_all_digits_of_the_table(nominal):
    noise = nominal_noise_std(1.0, nominal, DELTA, 1000)
    certified = [certified_epsilon(noise, s, DELTA, 1000) for s in (1.0, 2.0)]
    expected = TRUE_EPSILON[nominal]
    assert [f"{x:.4g}" for x in certified] == [f"{x:.4g}" for x in expected]


@pytest.mark.parametrize("delta", [1e-8, DELTA, 0.01])
@pytest.mark.parametrize("multiplier", [0.06, 0.5, 2.0, 30.0])
def test_certified_epsilon_solves_the_definition(multiplier, delta):
    epsilon = certified_epsilon(multiplier, 1.0, delta, 1)
    assert gaussian_delta(multiplier, epsilon) == pytest.approx(delta, rel=1e-7)


@pytest.mark.parametrize(
    ("noise", "delta", "expected"),
    [(7.03182667558, 1e-5, 0.5), (0.61584635576, 1e-8, 10.0), (1.03725171849, 1e-3, 3)],
)
def test_published_analytic_gaussian(noise, delta, expected):
    assert certified_epsilon(noise, 1.0, delta, 1) == pytest.approx(expected, rel=1e-9)
    assert certified_noise_std(expected, 1.0, delta, 1) == pytest.approx(noise)


@pytest.mark.parametrize(("noise", "rounds"), [(30.0, 100), (5.0, 10)])
def test_agrees_with_the_pld_accountant(noise, rounds):
    import dp_accounting

    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(noise / 2.0), rounds)
    pld = accountant.get_epsilon(1e-5)  # a slight over-estimate by construction
    exact = certified_epsilon(noise, 2.0, 1e-5, rounds)
    assert exact <= pld + 1e-9
    assert exact == pytest.approx(pld, rel=1e-3)


def test_epsilon_falls_with_noise_and_grows_with_rounds():
    noises = [certified_epsilon(s, 2.0, DELTA, 100) for s in (1.0, 3.0, 10.0, 30.0)]
    assert noises == sorted(noises, reverse=True)
    rounds = [certified_epsilon(10.0, 2.0, DELTA, t) for t in (1, 10, 100, 1000)]
    assert rounds == sorted(rounds)


def test_limits():
    assert certified_epsilon(0.0, 2.0, DELTA, 10) == math.inf
    assert certified_epsilon(1.0, math.inf, DELTA, 10) == math.inf
    assert certified_epsilon(1e-7, 1.0, DELTA, 1) == math.inf
    assert certified_epsilon(1e-5, 1.0, DELTA, 1) == pytest.approx(5e9, rel=1e-2)
    assert certified_epsilon(1e5, 1.0, DELTA, 1) == 0.0
    assert nominal_epsilon(0.0, 1.0, DELTA, 10) == math.inf
    for function in (certified_epsilon, nominal_epsilon):
        assert function(0.0, 1.0, DELTA, 0) == 0.0
    for function in (certified_noise_std, dwork_noise_std, nominal_noise_std):
        assert function(1.0, 1.0, DELTA, 0) == 0.0
    assert math.isfinite(dwork_noise_std(1.0, 0.5, 1e-320, 10))


# --- the inverse -------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    log_epsilon=st.floats(-13, 12),
    log_delta=st.floats(-15, -0.01),
    log_sensitivity=st.floats(-8, 8),
    rounds=st.integers(1, 10**7),
)
def test_noise_search_never_overshoots(log_epsilon, log_delta, log_sensitivity, rounds):
    epsilon, delta = 10**log_epsilon, 10**log_delta
    sensitivity = 10**log_sensitivity
    noise = certified_noise_std(epsilon, sensitivity, delta, rounds)
    assert math.isfinite(noise)
    assert certified_epsilon(noise, sensitivity, delta, rounds) <= epsilon


@pytest.mark.parametrize(
    ("epsilon", "delta"),
    list(itertools.product((1e-3, 0.1, 3.0, 190.0, 1e4), (1e-6, DELTA))),
)
def test_noise_search_is_tight(epsilon, delta):
    noise = certified_noise_std(epsilon, 2 / 75, delta, 100)
    spent = certified_epsilon(noise, 2 / 75, delta, 100)
    assert epsilon * (1 - 1e-7) <= spent <= epsilon
    assert certified_epsilon(noise * (1 - 1e-6), 2 / 75, delta, 100) > epsilon


# --- bad input ---------------------------------------------------------------------

GOOD = dict(
    clip_norm=1.0,
    epsilon=3.0,
    delta=DELTA,
    rounds=10,
    noise_std=5.0,
    sensitivity=2.0,
    sampling_rate=0.5,
)
ARGUMENTS = {
    nominal_noise_std: ("clip_norm", "epsilon", "delta", "rounds", "sampling_rate"),
    nominal_epsilon: ("noise_std", "clip_norm", "delta", "rounds", "sampling_rate"),
    dwork_noise_std: ("sensitivity", "epsilon", "delta", "rounds"),
    certified_epsilon: ("noise_std", "sensitivity", "delta", "rounds"),
    certified_noise_std: ("epsilon", "sensitivity", "delta", "rounds"),
}
BAD = {
    "clip_norm": (0.0, -1.0, math.inf, math.nan),
    "epsilon": (0.0, -1.0, math.inf, math.nan),
    "delta": (0.0, 1.0, -0.1, 2.0, math.nan),
    "rounds": (-1,),
    "noise_std": (-1.0, math.inf, math.nan),
    "sensitivity": (0.0, -1.0, math.inf, math.nan),
    "sampling_rate": (0.0, -0.5, 1.5, math.nan),
}


@pytest.mark.parametrize("function", ARGUMENTS, ids=lambda f: f.__name__)
def test_values_out_of_range_are_named(function):
    good = {name: GOOD[name] for name in ARGUMENTS[function]}
    assert function(**good) > 0
    for name in good:
        for value in BAD[name]:
            if (function, name, value) == (certified_epsilon, "sensitivity", math.inf):
                continue  # unbounded sensitivity has an answer: inf
            with pytest.raises(ValueError, match=rf"{name} must .*got {name}={value}"):
                function(**good | {name: value})


@pytest.mark.parametrize("function", ARGUMENTS, ids=lambda f: f.__name__)
def test_wrong_kinds_are_named(function):
    good = {name: GOOD[name] for name in ARGUMENTS[function]}
    for name, value in itertools.product(good, (None, "x", True, lambda step: 1.0)):
        with pytest.raises(TypeError, match=f"{name} must be"):
            function(**good | {name: value})
    with pytest.raises(TypeError, match="rounds must be a Python int, got 2.5"):
        function(**good | {"rounds": 2.5})
    first = ARGUMENTS[function][0]
    with pytest.raises(TypeError, match=f"{first} must be a plain number.*outside jit"):
        jax.jit(lambda x: function(**good | {first: x}))(1.0)


def test_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r'pip install "jaxfed\[train\]"'):
        certified_epsilon(1.0, 1.0, DELTA, 1)
    with pytest.raises(ImportError, match=r'pip install "jaxfed\[train\]"'):
        certified_noise_std(1.0, 1.0, DELTA, 1)
    # Runs without noise need no accountant.
    assert statement(noise_std=0.0).epsilon_certified == math.inf


# --- the statement -------------------------------------------------------------------


def statement(**changes):
    arguments = dict(
        unit="client",
        clip_norm=1.0,
        noise_std=nominal_noise_std(1.0, 3.0, DELTA, 1000),
        sensitivity=2.0,
        rounds=1000,
        delta=DELTA,
        sampling_text="all clients every round, batches of 64",
        mechanism="clipped difference plus Gaussian noise at each client",
    )
    return make_statement(**arguments | changes)


def test_statement_of_the_paper():
    it = statement()
    assert (it.unit, it.model) == ("client", "local")
    assert it.adjacency == "replace one client's whole data"
    assert it.epsilon_nominal == pytest.approx(3.0)
    assert it.epsilon_certified == pytest.approx(8.895, rel=1e-4)
    assert it.sensitivity_mode == "tight"
    assert it.sampling.startswith("all clients every round, batches of 64")
    assert "not credited" in it.sampling
    assert it.accountant.startswith("dp-accounting ")
    text = it.text()
    for words in (
        "client-level local",
        "all data of any one client",
        "certified epsilon 8.895 at delta 0.0004",
        "nominal epsilon 3 ",
        "run folder",
        "float32",
        "simulated",
        *it.caveats,
    ):
        assert words in text
    assert "no privacy" not in text.lower()


def test_statement_of_example_level_noise_on_a_mean():
    m = 75
    noise = certified_noise_std(8.0, 2 / m, 1e-3, 100)
    it = statement(
        unit="example", noise_std=noise, sensitivity=2 / m, rounds=100, delta=1e-3
    )
    assert it.adjacency == "replace one example of one client"
    assert 8 * (1 - 1e-6) <= it.epsilon_certified <= 8
    # One example's share of the mean has norm at most 1 / m.
    assert it.epsilon_nominal == pytest.approx(
        nominal_epsilon(noise, 1 / m, 1e-3, 100), rel=1e-12
    )
    assert "any one example of any one client" in it.text()


def test_statement_with_sampling_touches_the_nominal_epsilon_only():
    full, sampled = statement(), statement(sampling_rate=0.1)
    assert sampled.epsilon_nominal == pytest.approx(0.1 * full.epsilon_nominal)
    assert sampled.epsilon_certified == full.epsilon_certified


def test_statement_takes_another_nominal_epsilon():
    assert statement(epsilon_nominal=5.0).epsilon_nominal == 5.0


def test_central_statement_says_who_is_trusted():
    it = statement(model="central")
    assert it.model == "central"
    assert "the server is trusted" in it.text()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(noise_std=0.0), "no noise is added"),
        (dict(noise_std=0.0, clip_norm=math.inf, sensitivity=math.inf), "no noise"),
        (dict(clip_norm=math.inf, sensitivity=math.inf), "nothing bounds"),
        (dict(noise_std=1e-9), "too small"),
        (dict(noise_std=0.0, rounds=0), "no noise is added"),
    ],
)
def test_no_privacy_is_said_plainly(changes, why):
    it = statement(**changes)
    assert it.model == "none"
    assert "no privacy" in it.text().splitlines()[0]
    assert why in it.text()
    assert "guarantee;" not in it.text()
    assert it.epsilon_certified == (math.inf if it.rounds else 0.0)


def test_no_round_spends_nothing():
    it = statement(rounds=0)
    assert it.epsilon_nominal == it.epsilon_certified == 0.0


@pytest.mark.parametrize("changes", [{}, dict(noise_std=0.0)])
def test_statement_survives_json_and_toml(changes):
    import tomli_w

    it = statement(**changes)
    fields = it.as_dict()
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields
    assert tomllib.loads(tomli_w.dumps(fields)) == fields
    assert float(fields["epsilon_certified"]) == it.epsilon_certified
    assert fields["caveats"] == list(it.caveats)


def test_statement_is_frozen():
    with pytest.raises(AttributeError):
        statement().noise_std = 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(unit="user"), "unit must be 'example' or 'client', got unit='user'"),
        (dict(model="shuffle"), "model must be 'local' or 'central'"),
        (dict(clip_norm=-1.0), "clip_norm must be .*got clip_norm=-1.0"),
        (dict(clip_norm=math.inf), "sensitivity must be inf when clip_norm is inf"),
        (dict(noise_std=-1.0), "noise_std must be"),
        (dict(sensitivity=0.0), "sensitivity must be"),
        (dict(rounds=-1), "rounds must be"),
        (dict(delta=1.0), "delta must satisfy"),
        (dict(sampling_rate=2.0), "sampling_rate must satisfy"),
        (dict(epsilon_nominal=-1.0), "epsilon_nominal must be"),
    ],
)
def test_statement_names_bad_values(changes, message):
    with pytest.raises(ValueError, match=message):
        statement(**changes)
