# SPDX-License-Identifier: Apache-2.0
"""Formulas of the stability paper (rows 7-11, 15, 16, 18, 19, 28 of its checklist)."""

import dataclasses
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfed import robustness
from jaxfed.privacy.accounting import certified_epsilon
from jaxfed.theory import stability

# The d = 1 instance of the sheet's table 5.5-A.
INSTANCE = stability.StabilityTheory(
    n=15, f=6, m=20, d=1, lipschitz=1.0, learning_rate=0.1, steps=100, kappa=24.0
)
# sigma -> P(E1), measured stability without projection, and on [-5, 5].
TABLE = {
    0.025: (1.000, 0.230, 0.230),
    0.05: (1.000, 0.461, 0.461),
    0.1: (0.923, 0.848, 0.848),
    0.2: (0.623, 1.135, 1.135),
    0.354: (0.383, 1.247, 1.247),
    0.707: (0.197, 1.339, 1.339),
    1.0: (0.140, 1.329, 1.329),
    2.0: (0.070, 1.226, 0.663),
    4.0: (0.035, 1.23, 0.330),
    8.0: (0.018, 1.20, 0.160),
    16.0: (0.009, 1.35, 0.090),
}
MULTIPLIERS = {
    0.125: 27.1,
    0.25: 13.6,
    0.5: 6.79,
    1: 3.39,
    2: 1.70,
    4: 0.848,
    8: 0.424,
    16: 0.212,
    32: 0.106,
}


def setting(**changes):
    return dataclasses.replace(
        stability.StabilityTheory(
            n=7, f=1, m=200, d=50, lipschitz=2.0, learning_rate=0.2, steps=50
        ),
        **changes,
    )


def slope(function, low, high):
    """Slope in the log-log plane."""
    return math.log(function(high) / function(low)) / math.log(high / low)


# --- rows 7 and 8: calibration ----------------------------------------------------


def test_row_7_calibration_and_the_table_of_multipliers():
    theory = setting()
    base = 2 * 2.0 * math.sqrt(2 * 50) / 200
    for multiplier, epsilon in MULTIPLIERS.items():
        got = theory.nominal_epsilon(multiplier * base, 1e-5)
        assert got == pytest.approx(epsilon, rel=5e-3)
        back = theory.nominal_noise_std(got, 1e-5)
        assert back == pytest.approx(multiplier * base, rel=1e-12)
    by_hand = 2 * 2.0 * math.sqrt(2 * 50 * math.log(1e5)) / (200 * 3)
    assert theory.nominal_noise_std(3, 1e-5) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize(
    ("delta", "epsilon", "true"),
    [(1e-5, 5, 1.7e-6), (1e-5, 8, 1.02e-5), (1e-5, 10, 2.9e-5), (1e-5, 27, 1.6e-2)],
)
def test_row_8_the_closed_form_fails_for_large_epsilon(delta, epsilon, true):
    theory = setting()
    noise = theory.nominal_noise_std(epsilon, delta)

    def spent(delta):
        return certified_epsilon(noise, 2 * 2.0 / 200, delta, 50)

    assert spent(true) == pytest.approx(epsilon, rel=5e-3)
    assert (spent(delta) > epsilon) == (epsilon >= 8)


# --- row 9: bounds ------------------------------------------------------------------


def test_row_9_without_attackers_the_bound_is_the_classical_one():
    for noise in (0.0, 3.0):
        convex = setting(f=0).upper(noise)
        assert convex == pytest.approx(2 * 0.2 * 4 * 50 / (7 * 200))
        strong = setting(f=0, strong_convexity=0.5).upper(noise)
        assert strong == pytest.approx(2 * 4 / (0.5 * 7 * 200))
        # From a rule, too.
        kappa = robustness.kappa("mean", 7, 0, "spectral")
        assert setting(f=0, kappa=kappa).upper(noise) == convex


def test_row_9_upper_bounds_by_hand():
    # h = 6, kappa = 4/5: B = 1/1200 + sqrt(2.4) + 2 sqrt(14.4) (.3/2) sqrt(56/6).
    B = 1 / 1200 + math.sqrt(2.4) + 2 * math.sqrt(14.4) * 0.15 * math.sqrt(56 / 6)
    assert setting().upper(0.3) == pytest.approx(2 * 0.2 * 4 * 50 * B)
    strong = setting(strong_convexity=0.1)
    assert strong.upper(0.3) == pytest.approx(2 * 4 / 0.1 * B)
    order = 1 / 1200 + math.sqrt(0.8) * (1 + 0.15 * math.sqrt(56 / 6))
    assert setting().upper(0.3, order=True) == pytest.approx(0.2 * 4 * 50 * order)
    assert strong.upper(0.3, order=True) == pytest.approx(40 * order)
    # Without noise the third term is gone; a known spread shrinks the second.
    noiseless = 80 * (1 / 1200 + math.sqrt(2.4))
    assert setting().upper(0.0) == pytest.approx(noiseless)
    known = setting(heterogeneity=0.5, local_variance=0.25).upper(0.0)
    assert known == pytest.approx(80 * (1 / 1200 + math.sqrt(0.8) / 2))
    assert INSTANCE.upper(0.1) == pytest.approx(257, abs=0.5)  # the sheet's
    assert setting(kappa=math.inf).upper(0.3) == math.inf


def test_row_9_smea_is_the_default_rule():
    for n, f in ((7, 1), (9, 3), (15, 6)):
        kappa = robustness.kappa("smea", n, f, "spectral", sharp=True)
        explicit = setting(n=n, f=f, kappa=kappa).upper(0.3)
        assert setting(n=n, f=f).upper(0.3) == pytest.approx(explicit)


def test_row_9_lower_orders_by_hand():
    # h = 6, f/(n-2f) = 1/5; then h = 6, f = 3 >= n/3: 3/3, with the root.
    noise = math.sqrt(0.2) * 0.15 * (1 + math.sqrt(50 / 6))
    assert setting().lower(0.3) == pytest.approx(40 * (1 / 1200 + 0.2 + noise))
    third = setting(n=8, f=3, d=20)  # h = 5, f/(n-2f) = 1.5
    noise = math.sqrt(1.5) * 0.15 * 3
    expected = 40 * (1 / 1000 + math.sqrt(1.5) + noise)
    assert third.lower(0.3) == pytest.approx(expected)
    one = setting(d=1)
    expected = 40 * (1 / 1200 + 0.2 + math.sqrt(0.2) * 0.15)
    assert one.lower(0.3) == pytest.approx(expected)


@given(st.integers(5, 60), st.integers(1, 29), st.integers(1, 1000), st.floats(0, 5))
def test_row_9_upper_and_lower_orders_match_from_a_third_on(n, f, d, noise):
    """(2) is (5) up to constants, with kappa = 4f/(n-2f)."""
    f = min(f, (n - 1) // 2)
    theory = setting(n=n, f=f, d=d)
    ratio = theory.upper(noise, order=True) / theory.lower(noise)
    assert ratio >= 1 / math.sqrt(2)
    if 3 * f >= n:
        assert ratio <= 2 * math.sqrt(2)


def test_row_9_privacy_implies_stability():
    got = stability.dp_stability(0.3, 0.01, 2.0)
    assert got == pytest.approx(2 * (math.exp(0.3) - 1 + 0.01))
    assert stability.dp_stability(0.1, 0.01, 2.0, linear=True) == pytest.approx(
        2 * (math.e + 1) * 0.1
    )
    assert stability.dp_stability(math.log(2 - 0.01), 0.01, 2.0) == pytest.approx(2)
    for epsilon in (0.7, 3.0, math.inf):
        assert stability.dp_stability(epsilon, 0.01, 2.0) == 2
    assert stability.dp_stability(0.001, 0.01, 2.0, linear=True) == 2  # delta > eps
    # (7) is the weaker one wherever it holds.
    for epsilon in np.linspace(0.01, 1, 30):
        exact = stability.dp_stability(epsilon, 0.01, 1.0)
        assert exact <= stability.dp_stability(epsilon, 0.01, 1.0, linear=True)
    phi = NormalDist().cdf(0.35)
    assert stability.gaussian_stability(0.7, 3.0) == pytest.approx(3 * (2 * phi - 1))
    assert stability.gaussian_stability(math.inf, 3.0) == 3
    assert stability.gaussian_stability(0.0, math.inf) == 0


def test_row_9_the_sharp_form_is_below_the_papers():
    theory = setting(loss_bound=1.0)
    for noise in np.geomspace(0.01, 100, 50):
        assert theory.privacy(noise) <= theory.privacy(noise, 1e-5) + 1e-12
        assert theory.best(noise) <= theory.best(noise, 1e-5) + 1e-12
    assert theory.privacy(0.0) == 1 and theory.privacy(0.0, 1e-5) == 1


@pytest.mark.parametrize("delta", [None, 1e-12])
def test_row_9_the_least_bound_rises_linearly_then_falls_like_one_over_sigma(delta):
    theory = stability.StabilityTheory(
        n=100,
        f=1,
        m=100,
        d=500,
        lipschitz=1.0,
        learning_rate=1e-3,
        steps=1000,
        kappa=1e-4,
        loss_bound=1.0,
    )

    def best(noise):
        return theory.best(noise, delta)

    values = np.array([best(s) for s in np.linspace(0, 0.5, 11)])
    assert np.all(np.diff(values) > 0)
    np.testing.assert_allclose(np.diff(values, 2), 0, atol=1e-14)
    far = theory.nominal_noise_std(1e-3, delta or 1e-5)
    assert slope(best, far, 10 * far) == pytest.approx(-1, abs=0.02)
    curve = [best(s) for s in np.geomspace(0.01, far, 200)]
    peak = int(np.argmax(curve))
    assert 0 < peak < 199
    assert np.all(np.diff(curve[: peak + 1]) >= 0)
    assert np.all(np.diff(curve[peak:]) <= 0)
    assert max(curve) <= 1


def test_row_9_regimes_cross():
    theory = setting(loss_bound=1.5)
    weak = 0.3 * 0.2 * 2 * 50 * math.sqrt(0.2) * (1 + math.sqrt(50 / 6))
    assert theory.weak_regime(0.3) == pytest.approx(weak)
    strong = 1.5 * 2 * math.sqrt(50 * math.log(1e5)) / (200 * 0.3)
    assert theory.strong_regime(0.3, 1e-5) == pytest.approx(strong)
    noise = theory.crossing(1e-5)
    both = theory.weak_regime(noise), theory.strong_regime(noise, 1e-5)
    assert both[0] == pytest.approx(both[1])
    top = 1.5 * math.sqrt(math.log(1e5))
    bottom = 200 * 0.2 * math.sqrt(50) * math.sqrt(0.2) * (1 + math.sqrt(50 / 6))
    assert noise == pytest.approx(math.sqrt(top / bottom))
    assert setting(f=0, loss_bound=1.0).crossing(1e-5) == math.inf


# --- row 10: covariance of noisy gradients --------------------------------------------


@pytest.mark.parametrize("d", [1, 10, 100, 1000])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_row_10_lemma_c1_holds_by_monte_carlo(d, noise):
    """Half of the honest clients at +C, half at -C: the largest spread there is."""
    n, f, C = 10, 2, 2.0
    rng, h = np.random.default_rng(d), n - f
    gradients = np.zeros((h, d))
    gradients[:, 0] = C * np.where(np.arange(h) % 2, 1, -1)
    rows = gradients + noise * rng.normal(size=(100, h, d))
    rows -= rows.mean(axis=1, keepdims=True)
    top = np.linalg.eigvalsh(rows @ rows.transpose(0, 2, 1) / h)[:, -1].mean()
    theory = setting(n=n, f=f, d=d, lipschitz=C)
    bound = theory.covariance(noise)
    assert bound == pytest.approx(3 * C**2 + 72 * noise**2 * (1 + d / h))
    known = dataclasses.replace(theory, heterogeneity=C**2).covariance(noise)
    assert top <= known * (1 + 1e-12) < bound < 100 * top
    if noise == 0:
        assert top == pytest.approx(known)


@pytest.mark.parametrize(
    ("n", "f", "d", "c_l"),
    [(9, 2, 9, 0.86), (12, 4, 8, 0.87), (12, 4, 80, 0.95), (12, 4, 800, 0.98)],
)
def test_row_10_the_constant_of_22(n, f, d, c_l):
    measured = stability.monte_carlo(n, f, d)
    assert measured.c_l == pytest.approx(c_l, abs=0.015)
    assert 0.5 <= measured.c_l <= math.sqrt(5 / 4)
    h = n - f
    root = measured.c_l * math.sqrt((h - 1) / h) * (1 + math.sqrt(d / (h - 1)))
    assert root**2 == pytest.approx(measured.eigenvalue)


# --- row 11: expansivity of the honest step -------------------------------------------


def largest_ratio(gradient, gamma, points):
    """Largest growth of a distance under a gradient step, over pairs of points."""
    moved = points - gamma * gradient(points)
    before, after = points[::2] - points[1::2], moved[::2] - moved[1::2]
    return np.max(np.linalg.norm(after, axis=1) / np.linalg.norm(before, axis=1))


RATES = [0.1, 0.5, 1.0, 1.5, 1.9, 2.5]  # in units of 1/L


@pytest.mark.parametrize("mu", [0.3, 0.0, None])
@pytest.mark.parametrize("rate", RATES)
def test_row_11_honest_step_on_quadratics(mu, rate):
    rng, L, d = np.random.default_rng(0), 2.0, 5
    low = -L if mu is None else mu
    hessians = []
    basis = np.linalg.qr(rng.normal(size=(d, d)))[0]
    for _ in range(4):
        values = rng.uniform(low, L, d)
        values[:2] = low, L  # shared by all clients, so their mean has them too
        hessians.append(basis * values @ basis.T)
    mean = np.mean(hessians, axis=0)
    points = rng.normal(size=(400, d))
    points[1] = points[0] + basis[:, 0]
    points[3] = points[2] + basis[:, 1]
    gamma = rate / L
    measured = largest_ratio(lambda x: x @ mean, gamma, points)
    bound = stability.expansivity(gamma, L, mu)
    assert measured <= bound * (1 + 1e-12)
    if rate <= 1:  # attained
        assert bound == pytest.approx({None: 1 + rate}.get(mu, 1 - gamma * (mu or 0)))
        assert measured == pytest.approx(bound)


@pytest.mark.parametrize("ridge", [0.0, 0.2])
@pytest.mark.parametrize("rate", RATES)
def test_row_11_honest_step_on_logistic_regression(ridge, rate):
    rng, d = np.random.default_rng(1), 6
    x = rng.normal(size=(4, 30, d))  # 4 clients, norm 2: L = 1 + ridge
    x *= 2 / np.linalg.norm(x, axis=-1, keepdims=True)
    y = rng.choice([-1.0, 1.0], size=(4, 30))

    def gradient(points):
        margins = y[..., None] * (x @ points.T)
        weights = -y[..., None] / (1 + np.exp(margins))
        return np.einsum("imd,imp->pd", x, weights) / y.size + ridge * points

    L = 1 + ridge
    points = rng.normal(size=(300, d)) * rng.choice([0.01, 1, 10], size=(300, 1))
    measured = largest_ratio(gradient, rate / L, points)
    assert measured <= stability.expansivity(rate / L, L, ridge) * (1 + 1e-12)


def test_row_11_expansivity_by_hand():
    assert stability.expansivity(0.5, 2.0) == 2
    assert stability.expansivity(1.0, 2.0, 0) == 1
    assert stability.expansivity(1.1, 2.0, 0) == pytest.approx(3.2)
    assert stability.expansivity(0.5, 2.0, 0.5) == 0.75
    for gamma in (0.6, 0.8):
        expected = 1 - gamma / 2.5
        assert stability.expansivity(gamma, 2.0, 0.5) == pytest.approx(expected)
    assert stability.expansivity(0.9, 2.0, 0.5) == 1


# --- rows 15, 16, 18, 19: attackers -------------------------------------------------


def test_row_15_success_of_the_membership_test():
    rng = np.random.default_rng(0)
    for noise, (success, *_) in TABLE.items():
        separation = math.sqrt(50) / (20 * noise)
        got = stability.mia_success(separation)
        assert got == pytest.approx(success, abs=6e-4)
        means = rng.normal(size=(20_000,)) * noise / math.sqrt(50)
        for z in (0.5, separation / 2, 1.5):
            trigger = z * noise / math.sqrt(50)
            right = np.mean((means <= trigger) & (means + 1 / 20 > trigger))
            assert right == pytest.approx(
                stability.mia_success(separation, z), abs=0.02
            )


@given(st.floats(0.01, 6), st.floats(0, 6))
def test_row_15_half_the_separation_is_the_best_level(separation, level):
    best = stability.mia_success(separation)
    assert stability.mia_success(separation, level) <= best + 1e-12
    half = stability.mia_success(separation, separation / 2)
    assert half == pytest.approx(best, abs=1e-12)
    density = NormalDist().pdf(level)
    if level >= separation / 2:
        assert stability.mia_success(separation, level) >= density * separation - 1e-12


def test_row_15_success_is_proportional_to_a_small_separation():
    per_unit = [stability.mia_success(x) / x for x in (1e-3, 0.05, 0.1, 0.2)]
    np.testing.assert_allclose(per_unit, NormalDist().pdf(0), rtol=0.05)


def test_row_16_predicted_curve_rises_and_falls_only_with_projection():
    def free(noise):
        return INSTANCE.predicted(noise, test_steps=50)

    def ball(noise):
        return INSTANCE.predicted(noise, test_steps=50, radius=5.0)

    for noise, (_, plain, projected) in TABLE.items():
        # SMEA favours honest vectors on the attacker's side: up to 1.45 times more.
        assert 0.85 < plain / free(noise) < 1.5
        assert 0.85 < projected / ball(noise) < 1.5
    grid = np.geomspace(0.01, 50, 400)
    curve = np.array([ball(s) for s in grid])
    peak = curve.max()
    assert 0.3 <= grid[curve >= 0.99 * peak][0] <= 1.1
    assert ball(0.05) < 0.4 * peak and ball(8.0) < 0.2 * peak < 0.7 * free(8.0)
    assert slope(ball, 2, 16) == pytest.approx(-1, abs=0.05)
    assert slope(ball, 0.01, 0.03) == pytest.approx(1, abs=0.05)
    assert ball(0.0) == 0
    # P * 2 gamma * 50 rounds * 6/9 * sigma, then P * 2 R.
    assert free(0.05) == pytest.approx(0.99959 * 10 * 2 / 3 * 0.05, rel=1e-5)
    assert ball(8.0) == pytest.approx(stability.mia_success(50**0.5 / 160) * 10)


def test_row_18_and_19_bounds_are_above_what_was_measured():
    for noise, (_, plain, projected) in TABLE.items():
        # The instance's sensitivity is C/m; losses shifted by R C are in [0, 2 R C].
        mu = math.sqrt(100) / (20 * noise)
        assert stability.gaussian_stability(mu, 10.0) >= projected
        for kappa in (None, 24.0):
            upper = dataclasses.replace(INSTANCE, kappa=kappa).upper(noise)
            assert upper >= plain


def test_row_13_and_14_magnitudes():
    assert stability.byzantine_magnitude(15, 6) == pytest.approx(1.0)
    assert stability.byzantine_magnitude(9, 3) == pytest.approx(math.sqrt(30 / 9) / 2)
    # (20): alpha (1 - alpha) b^2 = c^2 Lambda.
    b = stability.spectral_magnitude(9, 3, 0.3, 14.4)
    assert 0.5 * 0.5 * b**2 == pytest.approx(0.09 * 14.4)


# --- row 28: constants of the proof ------------------------------------------------


def test_row_28_technical_constants_by_hand():
    # n = 9, f = 2 (alpha = 2/7), d = 63: ratio 9, so the root is 3.
    q = math.sqrt(5 / 7)
    r_max = ((3 + 1 / 3 + 2 / 3 * q) / (3 + 2 / 3 + q / 3)) ** 2
    c_max2 = 1 - 5 / 7 / (3 + 1 - (1 - q) / 3) ** 2
    got = stability.technical_constants(9, 2, 63)
    assert got.r_max == pytest.approx(r_max)
    assert got.c_max == pytest.approx(math.sqrt(c_max2))
    assert got.mu_min == pytest.approx(4 / (c_max2 * (1 - r_max)))
    assert got.n_min == pytest.approx((3 * (3 + q + 1) / (1 - q)) ** 2)
    assert got.c_opt == 0 and not got.feasible
    # alpha = 8/11, ratio 3/11, universal constants 0: the other part of n_min.
    q = root = math.sqrt(3 / 11)
    r_max = ((root + 1 / 3 + 2 / 3 * q) / (root + 2 / 3 + q / 3)) ** 2
    got = stability.technical_constants(19, 8, 3, universal=0.0)
    assert got.n_min == pytest.approx(64 * root / ((1 - r_max) * math.sqrt(2)))


def test_row_28_no_experiment_is_feasible():
    for n, f, d in ((7, 1, 500), (7, 2, 500), (7, 3, 500), (9, 2, 70), (12, 4, 800)):
        got = stability.technical_constants(n, f, d)
        assert not got.feasible
        assert d / (n - f) < got.mu_min and n - f - 1 < got.n_min


def test_row_28_feasible_far_beyond_practice():
    """At alpha = 1/2, d/(n-f) must exceed about 478, and n-f then 60,000."""
    below = stability.technical_constants(300, 100, 400 * 200)
    above = stability.technical_constants(300, 100, 500 * 200)
    assert below.mu_min > 400 and below.c_opt == 0
    assert above.mu_min == pytest.approx(478, abs=1)
    gap = above.c_max**2 * (1 - above.r_max)
    c_opt = math.sqrt((gap - 4 / 500) / (2 + 1 - above.r_max))
    assert above.c_opt == pytest.approx(c_opt) and c_opt > 0
    assert above.n_min == pytest.approx(6.08e4, rel=1e-2)
    assert not above.feasible  # alpha = 1/2, and too few clients
    many = stability.technical_constants(490_000, 140_000, 350_000 * 1000)
    assert many.feasible


@pytest.mark.parametrize(
    ("n", "f", "d", "c", "root"),
    [
        (9, 2, 70, 0.35, 3.86),
        (9, 3, 60, 0.45, 3.79),
        (9, 4, 50, 0.575, 3.75),
        (12, 4, 80, 0.49, 3.89),
        (12, 4, 800, 0.32, 10.75),
        (7, 1, 50, 0.0, 3.53),
    ],
)
def test_row_28_monte_carlo_strengths(n, f, d, c, root):
    measured = stability.monte_carlo(n, f, d, draws=1000)
    assert math.sqrt(measured.eigenvalue) == pytest.approx(root, abs=0.05)
    assert measured.strength == pytest.approx(c, abs=0.04)  # two Monte Carlos
    # Just inside, lambda_max of the matrix of section 3.7 is below Lambda; then above.
    if measured.strength:
        lam, h, inner, alpha = measured.eigenvalue, n - f, n - 2 * f, f / (n - f)
        for factor in (0.999, 1.001):
            c2 = (factor * measured.strength) ** 2
            u11 = inner * (h - 1) / h**2 + c2 * lam
            u12 = (1 - alpha) * (h - 1) / h + alpha * c2 * lam
            u12 *= (1 - alpha) * (d - 1) / inner
            blocks = [[u11, math.sqrt(u12)], [math.sqrt(u12), measured.r_l * lam]]
            assert (np.linalg.eigvalsh(blocks)[-1] < lam) == (factor < 1)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="f < n/2"):
        setting(f=4)
    with pytest.raises(ValueError, match="lipschitz=-1"):
        setting(lipschitz=-1)
    with pytest.raises(TypeError, match="steps must be a Python int"):
        setting(steps=2.5)
    with pytest.raises(ValueError, match="noise_std=-1"):
        setting().upper(-1)
    with pytest.raises(ValueError, match="delta must be > 0"):
        setting().nominal_epsilon(1.0, 0)
    with pytest.raises(ValueError, match="epsilon must be finite and > 0"):
        setting().nominal_noise_std(0, 1e-5)
    with pytest.raises(ValueError, match="test_steps must be at most steps=50"):
        setting().predicted(1.0, test_steps=51)
    for value in (math.nan, -1.0):
        with pytest.raises(ValueError, match="magnitude must"):
            setting().predicted(1.0, test_steps=5, magnitude=value)
    with pytest.raises(ValueError, match="draws must be at most 1000000"):
        stability.monte_carlo(7, 1, 5, draws=10**12)
    for n, exponent in ((10**30, 30), (10**5000, 5000)):
        with pytest.raises(ValueError, match=f"n is too extreme.*1e[+]{exponent}"):
            stability.technical_constants(n, 1, 5)
    with pytest.raises(ValueError, match="lipschitz is too extreme, .*=1e[+]300"):
        setting(lipschitz=1e300).upper(1.0)
    with pytest.raises(ValueError, match="f must be at least 1"):
        stability.byzantine_magnitude(7, 0)
    with pytest.raises(ValueError, match="strong_convexity must be at most smoothness"):
        stability.expansivity(0.1, 1.0, 2.0)
    with pytest.raises(ValueError, match="seed must be at least 0"):
        stability.monte_carlo(7, 1, 5, seed=-1)
