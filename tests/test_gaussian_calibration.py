# SPDX-License-Identifier: Apache-2.0
"""Noise multipliers: rows of the ByzULDP and stability checklists, by number."""

import math

import numpy as np
import pytest

from jaxfed import aggregators
from jaxfed.privacy import gaussian
from jaxfed.theory import byzuldp

T, DELTA = 800, 1e-4
LOG = math.log(1 / DELTA)

# Sheet 10.1: epsilon, z (closed form, RDP, exact), RDP epsilon and order at the closed
# form's z.
TABLE = [
    (1, 242.788, 124.604, 90.105, 0.50679, 37.841),
    (5, 48.5577, 27.2181, 22.5126, 2.66965, 8.3683),
    (10, 24.2788, 14.8356, 12.8768, 5.67859, 4.6841),
    (20, 12.1394, 8.43951, 7.6211, 12.7143, 2.8421),
    (30, 8.09294, 6.19778, 5.70297, 21.1073, 2.2280),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"epsilon{row[0]}")
def test_byzuldp_row_12_closed_form_table(row):
    epsilon, closed, _, _, spent, order = row
    z = gaussian.noise_multiplier(epsilon, DELTA, T, mode="closed_form")
    assert z == pytest.approx(closed, rel=5e-6)
    assert z**2 == pytest.approx(8 * T * LOG / epsilon**2, rel=1e-14)
    assert gaussian.epsilon(z, DELTA, T, mode="rdp") == pytest.approx(spent, rel=2.5e-5)
    assert gaussian.optimal_order(z, DELTA, T) == pytest.approx(order, rel=2.5e-5)
    back = gaussian.epsilon(z, DELTA, T, mode="closed_form")
    assert back == pytest.approx(epsilon, rel=1e-14)


@pytest.mark.parametrize(
    ("epsilon", "expected"),
    [
        (1, 0.162867),
        (5, 0.0325735),
        (10, 0.0162867),
        (20, 0.00814337),
        (30, 0.00542891),
    ],
)
def test_byzuldp_row_12_noise_of_the_paper_s_experiment(epsilon, expected):
    # Sheet 10.2: n = 1000, f = 250 (nu = 2), server momentum 0.85, C = 1.
    n, f, nu, beta = 1000, 250, 2, 0.85
    factor = 1 + 4 * (2 + nu) ** 2 * f / (nu**2 * n)
    sensitivity = 2 * (1 - beta) / n * math.sqrt(factor)
    assert sensitivity == pytest.approx(6.70820e-4, rel=1e-5)
    rule = aggregators.trimmed_mean(f).sensitivity
    paper, tight = (rule.bound(n, 1.0, mode=mode) for mode in ("paper", "tight"))
    assert (1 - beta) * paper == pytest.approx(sensitivity, rel=1e-12)
    assert paper / tight == pytest.approx(1.118034)
    std = sensitivity * gaussian.noise_multiplier(epsilon, DELTA, T, mode="closed_form")
    assert std == pytest.approx(expected, rel=5e-6)
    printed = 32 * (1 - beta) ** 2 * T * LOG / (n * epsilon) ** 2 * factor
    assert std**2 == pytest.approx(printed, rel=1e-12)
    if epsilon == 10:
        assert std / (1 - beta) == pytest.approx(0.108578, rel=5e-6)


def test_byzuldp_row_12_closed_form_has_a_limit():
    limit = 8 * LOG
    assert limit == pytest.approx(73.683, rel=1e-5)
    z = gaussian.noise_multiplier(limit, DELTA, T, mode="closed_form")
    # At its limit the theorem is tight up to the constant: 8 = 4 + sqrt(16).
    assert gaussian.epsilon(z, DELTA, T, mode="rdp") == pytest.approx(limit, rel=1e-12)
    with pytest.raises(ValueError, match="8 log.*epsilon=73.7.*mode='rdp'"):
        gaussian.noise_multiplier(73.7, DELTA, T, mode="closed_form")
    with pytest.raises(ValueError, match="8 log"):
        gaussian.epsilon(z * 0.99, DELTA, T, mode="closed_form")


@pytest.mark.parametrize("z", [2.0, 12.0, 240.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-6])
def test_byzuldp_row_13_optimum_over_orders(z, delta):
    def spent(order):
        tail = math.log(1 / delta) / (order - 1)
        return gaussian.renyi_divergence(order, z, T) + tail

    closed = gaussian.epsilon(z, delta, T, mode="rdp")
    order = gaussian.optimal_order(z, delta, T)
    assert spent(order) == pytest.approx(closed, rel=1e-12)
    around = 1 + (order - 1) * np.geomspace(0.5, 2, 20001)
    assert min(map(spent, around)) == pytest.approx(closed, rel=1e-6)
    assert min(map(spent, around)) >= closed * (1 - 1e-12)
    grid = 1 + np.geomspace(0.01, 1000, 100)
    assert closed * (1 - 1e-12) <= min(map(spent, grid)) <= 1.01 * closed


def test_byzuldp_row_13_composition_adds():
    one, many = (gaussian.renyi_divergence(3.0, 7.0, t) for t in (1, T))
    assert one == 3 / (2 * 49) and many == pytest.approx(T * one, rel=1e-14)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"epsilon{row[0]}")
def test_byzuldp_row_14_rdp_and_exact_table(row):
    epsilon, _, rdp, exact, _, _ = row
    for mode, expected in (("rdp", rdp), ("exact", exact)):
        z = gaussian.noise_multiplier(epsilon, DELTA, T, mode=mode)
        assert z == pytest.approx(expected, rel=1e-5)
        back = gaussian.epsilon(z, DELTA, T, mode=mode)
        assert back == pytest.approx(epsilon, rel=1e-6)


def test_byzuldp_row_14_exact_epsilon_at_the_closed_form():
    for row, expected in zip(
        TABLE, [0.32765, None, 4.56522, 10.7856, 18.4274], strict=True
    ):
        if expected:
            z = gaussian.noise_multiplier(row[0], DELTA, T, mode="closed_form")
            assert gaussian.epsilon(z, DELTA, T) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, 30.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize("rounds", [1, 800, 10**6])
def test_byzuldp_row_14_order_of_the_modes(epsilon, delta, rounds):
    exact, rdp, closed = (
        gaussian.noise_multiplier(epsilon, delta, rounds, mode=mode)
        for mode in ("exact", "rdp", "closed_form")
    )
    assert exact <= rdp <= closed
    assert gaussian.exact_delta(exact, epsilon, rounds) == pytest.approx(
        delta, rel=1e-5
    )


@pytest.mark.parametrize("mode", ["exact", "rdp"])
def test_byzuldp_row_15_noise_follows_the_schedule(mode):
    n, f, clip_norm, epsilon, rounds = 20, 4, 2.0, 6.0, 300
    beta = byzuldp.strongly_convex(3.0, 1.0).server_momentum
    sensitivity = np.array(
        [2 * (1 - beta(t)) * clip_norm / (n - 2 * f) for t in range(rounds)]
    )
    z = gaussian.noise_multiplier(epsilon, DELTA, rounds, mode=mode)
    noise = z * sensitivity
    assert noise[0] > noise[-1]
    np.testing.assert_allclose(sensitivity / noise, 1 / z, rtol=1e-14)
    # Composed round by round, as Gaussian privacy (exact) or Rényi divergence (rdp).
    squares = np.sum((sensitivity / noise) ** 2)
    if mode == "exact":
        spent = gaussian.epsilon(1 / math.sqrt(squares), DELTA, 1)
    else:
        order = gaussian.optimal_order(z, DELTA, rounds)
        spent = order * squares / 2 + LOG / (order - 1)
    assert spent == pytest.approx(epsilon, rel=1e-6)


# --- Safe-DGD ---------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 600])
def test_stability_row_7_printed_noise_and_its_inverse(rounds):
    clip_norm, m, epsilon, delta = 2.5, 200, 3.0, 1e-5
    z = gaussian.noise_multiplier(epsilon, delta, rounds, mode="safe_dgd")
    noise = 2 * clip_norm / m * z
    printed = 2 * clip_norm * math.sqrt(2 * rounds * math.log(1e5)) / (m * epsilon)
    assert noise == pytest.approx(printed, rel=1e-12)
    back = gaussian.epsilon(z, delta, rounds, mode="safe_dgd")
    assert back == pytest.approx(epsilon, rel=1e-12)


def test_stability_row_7_multiplier_table():
    # sigma_DP = sigma * 2 C sqrt(2 T) / m, so z = sigma sqrt(2 T), at delta = 1e-5.
    sigmas = [0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32]
    expected = [27.1, 13.6, 6.79, 3.39, 1.70, 0.848, 0.424, 0.212, 0.106]
    for sigma, epsilon in zip(sigmas, expected, strict=True):
        z = sigma * math.sqrt(2 * 600)
        nominal = gaussian.epsilon(z, 1e-5, 600, mode="safe_dgd")
        assert nominal == pytest.approx(epsilon, rel=4e-3)
        assert nominal == pytest.approx(math.sqrt(math.log(1e5)) / sigma, rel=1e-12)


@pytest.mark.parametrize(
    ("epsilon", "delta", "true", "tolerance"),
    [
        (5, 1e-5, 1.7e-6, 0.03),
        (8, 1e-5, 1.02e-5, 0.005),
        (10, 1e-5, 2.9e-5, 0.02),
        (27, 1e-5, 1.6e-2, 0.04),
        (8, 1e-6, None, None),
        (10, 1e-6, None, None),
    ],
)
@pytest.mark.parametrize("rounds", [1, 400])
def test_stability_row_8_true_delta(epsilon, delta, true, tolerance, rounds):
    z = math.sqrt(2 * rounds * math.log(1 / delta)) / epsilon
    found = gaussian.exact_delta(z, epsilon, rounds)
    if true:
        assert found == pytest.approx(true, rel=tolerance)
    valid = epsilon == 5 or (epsilon, delta) == (8, 1e-6)
    assert (found <= delta) == valid
    assert (gaussian.epsilon(z, delta, rounds) <= epsilon) == valid
    if valid:
        assert gaussian.noise_multiplier(
            epsilon, delta, rounds, mode="safe_dgd"
        ) == pytest.approx(z, rel=1e-14)
    else:
        with pytest.raises(ValueError, match=f"epsilon={epsilon}.*mode='exact'"):
            gaussian.noise_multiplier(epsilon, delta, rounds, mode="safe_dgd")


def test_stability_row_8_exact_delta_by_quadrature():
    # The definition: the integral of (p - e^epsilon q)_+ for N(mu, 1) against N(0, 1).
    z, epsilon, rounds = 9.0, 1.5, 100
    mu = math.sqrt(rounds) / z
    x = np.linspace(-12, 14, 400_001)
    p, q = (np.exp(-((x - m) ** 2) / 2) / math.sqrt(2 * math.pi) for m in (mu, 0))
    integral = np.sum(np.maximum(p - math.exp(epsilon) * q, 0)) * (x[1] - x[0])
    found = gaussian.exact_delta(z, epsilon, rounds)
    assert found == pytest.approx(integral, rel=1e-6)


# --- edges ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", gaussian.MODES)
def test_no_rounds_and_no_noise(mode):
    assert gaussian.noise_multiplier(1.0, 1e-5, 0, mode=mode) == 0
    assert gaussian.epsilon(0.0, 1e-5, 0, mode=mode) == 0
    assert gaussian.epsilon(0.0, 1e-5, 3, mode=mode) == math.inf


def test_exact_delta_at_its_ends():
    assert gaussian.exact_delta(1.0, 0.0, 0) == 0
    assert gaussian.exact_delta(0.0, 5.0, 1) == 1
    assert gaussian.exact_delta(1e3, 800.0, 1) == 0  # e^800 overflows
    assert gaussian.exact_delta(1e-3, 800.0, 1) == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gaussian.noise_multiplier(0, 1e-5, 1), ValueError, "epsilon=0"),
        (lambda: gaussian.noise_multiplier(1, 1.0, 1), ValueError, "delta=1.0"),
        (lambda: gaussian.noise_multiplier(1, 1e-5, 1.5), TypeError, "rounds"),
        (lambda: gaussian.noise_multiplier(1, 0.1, 1, mode="pld"), ValueError, "'pld'"),
        (lambda: gaussian.epsilon(-1, 1e-5, 1), ValueError, "noise_multiplier=-1"),
        (lambda: gaussian.exact_delta(1, -1, 1), ValueError, "epsilon=-1"),
        (lambda: gaussian.renyi_divergence(1.0, 1, 1), ValueError, "order=1.0"),
        (lambda: gaussian.optimal_order(0, 0.1, 1), ValueError, "noise_multiplier=0"),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()
