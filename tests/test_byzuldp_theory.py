# SPDX-License-Identifier: Apache-2.0
"""Theory of ByzULDP: rows 17, 18 and 23 to 27 of its checklist."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import jaxfed
from jaxfed import robustness
from jaxfed.algorithms._byzuldp import byzuldp
from jaxfed.privacy import gaussian
from jaxfed.theory import byzuldp as theory

# --- Row 17: schedules ------------------------------------------------------------


@pytest.mark.parametrize(
    ("t", "eta", "alpha", "beta"),
    [
        (0, 2.040816e-4, 0.0, 0.9887755),
        (10**6, 9.532888e-6, 0.9532888, 0.9994757),
    ],
)
def test_row_17_strongly_convex_golden(t, eta, alpha, beta):
    schedules = theory.strongly_convex(1.0, 1.0, a=49_000)
    expected = pytest.approx((eta, alpha, beta), rel=5e-7)
    assert tuple(schedule(t) for schedule in schedules) == expected
    # Also under jit, where rounds are int32 and numbers float32.
    traced = toys.quick_jit(lambda t: tuple(schedule(t) for schedule in schedules))
    np.testing.assert_allclose(traced(t), (eta, alpha, beta), rtol=1e-6)


@pytest.mark.parametrize(("smooth", "mu"), [(1.0, 1.0), (3.0, 1.0), (2e-3, 1e-5)])
@pytest.mark.parametrize("a", [49_000, 1e6])
def test_row_17_strongly_convex_guards(smooth, mu, a):
    schedules = theory.strongly_convex(smooth, mu, a=a)
    for t in (0, 1, 10**4, 2**31 - 1):
        eta, alpha, beta = (schedule(t) for schedule in schedules)
        assert eta == pytest.approx(10 / (mu * (t + a * smooth / mu)), rel=1e-12)
        assert 1 - alpha == pytest.approx(4900 * eta * smooth, rel=1e-6)
        assert 1 - beta == pytest.approx(55 * eta * smooth, rel=1e-4)
        assert 0 <= alpha <= beta < 1
    assert schedules.momentum(0) == 0 or a > 49_000


def test_row_17_non_convex():
    schedules = theory.non_convex(2.0, 5e-5)
    for t in (0, 77):
        values = tuple(schedule(t) for schedule in schedules)
        assert values == pytest.approx((5e-5, 1 - 0.51, 1 - 0.005))
    limit = theory.non_convex(3.0, 1 / (5100 * 3.0))
    assert limit.momentum(0) == 0 <= limit.server_momentum(0) < 1


def test_row_17_schedules_drive_the_algorithm():
    schedules = theory.strongly_convex(2.0, 1.0, a=60_000)
    algorithm = byzuldp(
        schedules.learning_rate,
        rule=jaxfed.aggregators.mean(),
        num_clients=3,
        key=0,
        clip_norm=100.0,
        momentum=schedules.momentum,
        server_momentum=schedules.server_momentum,
        local_work=toys.quadratic,
    )
    centres = np.array([[1.0], [2.0], [6.0]])
    with jax.enable_x64(True):
        seen, _ = toys.trace(
            jaxfed.simulate(algorithm, 3),
            jnp.array([5.0]),
            toys.centres(centres),
            4,
            lambda state: state.server.params,
        )
    x, m, published, expected = 5.0, 0.0, 0.0, [5.0]
    for t in range(4):
        eta, alpha, beta = (schedule(t) for schedule in schedules)
        m = alpha * m + (1 - alpha) * (x - 3.0)
        published = beta * published + (1 - beta) * m
        x = x - eta * published
        expected.append(x)
    np.testing.assert_allclose(seen[:, 0], expected, rtol=0, atol=1e-12)
    assert 5 - x > 1e-5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.strongly_convex(1.0, 1.0, a=48_999), "a=48999.*Raise a"),
        (lambda: theory.strongly_convex(1.0, 2.0), "strong_convexity=2.0"),
        (lambda: theory.strongly_convex(1.0, 0.0), "strong_convexity=0.0"),
        (lambda: theory.strongly_convex(0.0, 1.0), "smoothness=0.0"),
        (lambda: theory.non_convex(1.0, 1.97e-4), "learning_rate=0.000197.*Lower"),
        (lambda: theory.non_convex(1.0, -1.0), "learning_rate=-1.0"),
    ],
)
def test_row_17_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_row_17_limits_of_the_slope():
    # Sheet 10.2: the trimmed mean at n = 1000, f = 250.
    kappa = theory.kappa_cwtm(1000, 250)
    assert kappa == pytest.approx(4.5)
    convex = theory.slope_limit(kappa, objective="strongly_convex")
    assert convex == pytest.approx(1 / 2700)
    other = theory.slope_limit(kappa, objective="non_convex")
    assert other == pytest.approx(9.406e-6, rel=1e-4)
    proof = theory.slope_limit(kappa, objective="strongly_convex_proof")
    assert proof == pytest.approx(1 / (196_000 * 4.5))
    assert theory.slope_limit(0, objective="non_convex") == math.inf
    with pytest.raises(ValueError, match="'convex'"):
        theory.slope_limit(1.0, objective="convex")


# --- Row 18: the coefficient of the trimmed mean ----------------------------------


def trimmed_mean(m, f):
    """Trimmed mean over the next to last axis."""
    return np.sort(m, axis=-2)[..., f : m.shape[-2] - f, :].mean(-2)


def test_row_18_formulas():
    assert theory.kappa_cwtm(10, 3) == pytest.approx(7.875)
    assert theory.kappa_cwtm(10, 0) == 0
    for n, f in ((5, 1), (7, 2), (9, 4), (1000, 250)):
        expected = 6 * f * (n - f) / (n - 2 * f) ** 2
        assert theory.kappa_cwtm(n, f) == pytest.approx(expected)
        best = robustness.best_kappa(n, f)
        assert best <= theory.kappa_cwtm(n, f)
        low, middle, high = theory.kappa_sandwich(n, f)
        assert low <= middle and middle == pytest.approx(high)
        assert 6 * middle == pytest.approx(expected)
        for nu in (0.1, 0.5, 0.9):
            high = theory.kappa_sandwich(n, f, nu * (n / f - 2))[2]
            assert low <= middle <= high
    with pytest.raises(ValueError, match="nu must be at most.*nu=4"):
        theory.kappa_sandwich(10, 2, 4)


@pytest.mark.parametrize(("n", "f"), [(5, 1), (7, 2), (9, 3), (9, 4)])
def test_row_18_no_input_exceeds_the_coefficient(n, f):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, n, 2))
    # Some with few distinct values, some with far rows.
    x[:200] = np.round(x[:200])
    x[100:300, :f] *= 10.0 ** rng.uniform(0, 3, size=(200, 1, 1))
    x[0], x[0, :f] = 0, 1  # no rule is better than best_kappa here
    out = trimmed_mean(x, f)
    worst = 0.0
    for subset in itertools.combinations(range(n), n - f):
        rows = x[:, subset]
        error = np.sum((out - rows.mean(1)) ** 2, axis=-1)
        spread = np.sum((rows - rows.mean(1, keepdims=True)) ** 2, axis=(1, 2))
        assert np.all(error <= theory.kappa_cwtm(n, f) * spread / (n - f) + 1e-9)
        worst = max(worst, np.max(error / np.maximum(spread / (n - f), 1e-12)))
    assert worst >= robustness.best_kappa(n, f) * (1 - 1e-12)


# --- Row 23: Lemma 5, Eq. (22) and Lemma G.10 by Monte Carlo ----------------------

HONEST, BYZANTINE, DIM, DRAWS = 7, 2, 3, 1500


class Quadratics:
    """Random F_i = 0.5 (x - c_i)' H_i (x - c_i) with their L, B and G."""

    def __init__(self, seed, spread):
        rng = np.random.default_rng(seed)
        roots = rng.normal(size=(HONEST, DIM, 2 * DIM))
        hessians = np.eye(DIM) + spread * roots @ roots.swapaxes(1, 2) / DIM
        self.smoothness = np.linalg.eigvalsh(hessians).max()
        self.hessians = hessians
        self.centres = rng.normal(size=(HONEST, DIM))
        self.mean = hessians.mean(0)
        right = np.einsum("gij,gj->i", hessians, self.centres) / HONEST
        self.optimum = np.linalg.solve(self.mean, right)
        # With y = x - optimum the deviation is (H_i - H) y plus that at the optimum.
        off = hessians - self.mean
        inverse = np.linalg.inv(self.mean)
        squares = inverse @ (off @ off).mean(0) @ inverse
        self.slope = math.sqrt(2 * np.linalg.eigvalsh(squares).max())
        at = self.gradients(self.optimum[None])[0]
        self.heterogeneity = math.sqrt(2 * np.mean(np.sum(at**2, axis=1)))

    def gradients(self, x):
        """``[R, d]`` to ``[R, G, d]``."""
        return np.einsum("gij,rgj->rgi", self.hessians, x[:, None] - self.centres)

    def value(self, x):
        y = x - self.optimum
        return np.einsum("ri,ij,rj->r", y, self.mean, y) / 2


def squares(x):
    return np.sum(x**2, axis=-1)


def at_most(values, bound):
    """Check mean(values) <= bound up to three standard errors."""
    slack = 3 * np.std(values) / math.sqrt(len(values))
    assert np.mean(values) <= bound + slack + 1e-12, (np.mean(values), bound)


@pytest.mark.parametrize(
    ("seed", "spread", "alpha", "beta", "s"),
    [(0, 0.0, 0.1, 0.85, 1.0), (1, 0.3, 0.6, 0.5, 0.3), (2, 0.05, 0.9, 0.95, 3.0)],
)
def test_row_23_inequalities_on_random_quadratics(seed, spread, alpha, beta, s):
    problem = Quadratics(seed, spread)
    rng = np.random.default_rng(seed)
    kappa = theory.kappa_cwtm(HONEST + BYZANTINE, BYZANTINE)
    eta, noise_std = 0.4 / problem.smoothness, 0.2
    shape = (DRAWS, HONEST, DIM)
    x = np.full((DRAWS, DIM), 2.0)
    m, published = np.zeros(shape), np.zeros((DRAWS, DIM))
    history = []
    for _ in range(8):
        gradients = problem.gradients(x)
        full = gradients.mean(1)
        history.append(squares(full).mean())
        m = alpha * m + (1 - alpha) * (gradients + s * rng.normal(size=shape))
        spread_m = squares(m - m.mean(1, keepdims=True)).mean(1)
        bound = theory.dispersion_bound(
            alpha,
            num_honest=HONEST,
            gradient_std=s * math.sqrt(DIM),
            heterogeneity=problem.heterogeneity,
            slope=problem.slope,
            squared_gradients=history,
        )
        at_most(spread_m, bound)  # Lemma 5
        forged = np.repeat(-3 * m.mean(1, keepdims=True), BYZANTINE, axis=1)
        anchored = beta * published[:, None] + (1 - beta) * np.concatenate(
            [m, forged], axis=1
        )
        honest = anchored[:, :HONEST]
        aggregate, mean = trimmed_mean(anchored, BYZANTINE), honest.mean(1)
        limits = [theory.aggregation_error_bound(beta, kappa, one) for one in m[:200]]
        error = squares(aggregate - mean)
        assert np.all(error[:200] <= np.array(limits) * (1 + 1e-9))  # Eq. (22)
        published = aggregate + noise_std * rng.normal(size=(DRAWS, DIM))
        new = x - eta * published
        bounds = [
            theory.descent_bound(
                eta,
                smoothness=problem.smoothness,
                squared_gradient=g2,
                tracking=track,
                dispersion=disperse,
                kappa=kappa,
                dim=DIM,
                noise_std=noise_std,
            )
            for g2, track, disperse in zip(
                squares(full),
                squares(full - mean),
                squares(honest - mean[:, None]).mean(1),
                strict=True,
            )
        ]
        at_most(problem.value(new) - problem.value(x) - bounds, 0.0)  # Lemma G.10
        x = new


def test_row_23_right_hand_sides_by_hand():
    bound = theory.dispersion_bound(
        0.5,
        num_honest=4,
        gradient_std=2.0,
        heterogeneity=3.0,
        slope=0.5,
        squared_gradients=[8.0, 4.0],
    )
    by_hand = 3 * 1.25 * 0.75 * 4 + 27 + 3 * 0.25 * 0.5 * (0.5 * 8 + 4)
    assert bound == pytest.approx(by_hand)
    # 0.25 * 2 * mean of |m_i - mean|^2 = 1.
    rows = [[0.0, 1.0], [0.0, -1.0]]
    assert theory.aggregation_error_bound(0.5, 2.0, rows) == pytest.approx(0.5)
    bound = theory.descent_bound(
        0.1,
        smoothness=2.0,
        squared_gradient=5.0,
        tracking=3.0,
        dispersion=4.0,
        kappa=0.5,
        dim=6,
        noise_std=0.7,
    )
    by_hand = -0.1 * 0.35 * 5 + 0.01 * 2 * 6 / 2 * 0.49 + 2 * 0.1 * 1.2 * (3 + 2)
    assert bound == pytest.approx(by_hand)


# --- Row 24: the bound of Theorem G.6 ---------------------------------------------


@pytest.mark.parametrize("f", [0, 2])
def test_row_24_measured_gradients_are_below_the_bound(f):
    rng = np.random.default_rng(f)
    # Runs differ in their noise; all start where the gap is 2.
    runs, n, d, rounds, eta = 12, 5, 2, 4000, 1 / 5200
    noise_std = np.repeat([0.0, 1e-4, 1e-3], 4)[:, None]
    gradient_std = 0.3
    alpha, beta = (s(0) for s in theory.non_convex(1.0, eta)[1:])
    centres = 0.2 * rng.normal(size=(n, d))
    x = np.tile(centres.mean(0) + [2.0, 0.0], (runs, 1))
    m, published = np.zeros((runs, n, d)), np.zeros((runs, d))
    total = np.zeros(runs)
    for _ in range(rounds):
        total += squares(x - centres.mean(0))
        noise = gradient_std * rng.normal(size=(runs, n, d))
        m = alpha * m + (1 - alpha) * (x[:, None] - centres + noise)
        sent = np.concatenate([m, np.repeat(-m.mean(1, keepdims=True), f, 1)], axis=1)
        anchored = beta * published[:, None] + (1 - beta) * sent
        published = trimmed_mean(anchored, f)
        published = published + noise_std * rng.normal(size=(runs, d))
        x = x - eta * published
    for k, std in enumerate((0.0, 1e-4, 1e-3)):
        setting = dict(
            smoothness=1.0,
            gap=2.0,
            num_honest=n,
            dim=d,
            noise_std=std,
            gradient_std=gradient_std * math.sqrt(d),
            heterogeneity=math.sqrt(np.mean(squares(centres - centres.mean(0)))),
            kappa=theory.kappa_cwtm(n + f, f),
        )
        measured = total[4 * k : 4 * k + 4].mean() / rounds
        assert 0.1 < measured <= theory.gradient_bound(eta, rounds, **setting)
        printed = theory.gradient_bound(eta, rounds, **setting, form="printed")
        sound = theory.gradient_bound(eta, rounds, **setting)
        assert sound - printed == pytest.approx(1.25 * 2 / (eta * rounds), rel=1e-6)


def test_row_24_right_hand_side_by_hand():
    bound = theory.gradient_bound(
        1e-4,
        100,
        smoothness=1.5,
        gap=0.7,
        num_honest=4,
        dim=6,
        noise_std=0.01,
        gradient_std=0.2,
        heterogeneity=0.3,
        kappa=0.5,
        form="printed",
    )
    k1, k2 = 5100, 50
    by_hand = 30 * 0.7 / 1e-2 + 25 * 6 * 1e-4 / 1.5e-4
    by_hand += 2 * 1.5e-4 / 100 * k1 * (k1 + k2) * 0.04 / 4
    by_hand += 4 * k1**2 * 1.5e-4 * 0.04 / 4
    by_hand += 47250 * k1 * 1.5e-4 * 0.5 * 1.25 * 0.04 + 23625 * 0.5 * 0.09
    assert bound == pytest.approx(by_hand)


COROLLARY_3 = dict(
    smoothness=1.0,
    gap=1.0,
    clip_norm=1.0,
    dim=26_010,
    epsilon=10.0,
    delta=1e-4,
    num_clients=1000,
    num_byzantine=250,
)


def test_row_24_step_size_golden():
    eta = theory.step_size(800, **COROLLARY_3, form="printed")
    assert eta == pytest.approx(4.42347e-5, rel=2e-6)
    # eta^2 = 30 / (T A T), with A = 23956.1.
    assert 30 / (800 * eta) ** 2 == pytest.approx(23956.1, rel=2e-6)
    sound = theory.step_size(800, **COROLLARY_3)
    assert sound == pytest.approx(eta * math.sqrt(31.25 / 30), rel=1e-12)
    noisy = theory.step_size(800, **COROLLARY_3, gradient_std=0.1, form="printed")
    h, k = 750, 5100
    inner = 2 * k * 5150 / h + 4 * k**2 / h + 94500 * k * 4.5
    inner = 23956.1 * 800 + inner * 0.01
    assert noisy == pytest.approx(math.sqrt(30 / 800 / inner), rel=1e-5)


@pytest.mark.parametrize("gradient_std", [0.0, 0.05])
def test_row_24_sound_step_size_minimises_the_bound(gradient_std):
    eta = theory.step_size(800, **COROLLARY_3, gradient_std=gradient_std)
    # Theorem 2's noise at this step size, with the sensitivity of Proposition 1.
    factor = 1 + 4 * 1000 * 250 / 500**2

    def bound(eta):
        variance = 32 * (50 * eta) ** 2 * 800 * math.log(1e4) / (1000 * 10) ** 2
        return theory.gradient_bound(
            eta,
            800,
            smoothness=1.0,
            gap=1.0,
            num_honest=750,
            dim=26_010,
            noise_std=math.sqrt(variance * factor),
            gradient_std=gradient_std,
            kappa=4.5,
        )

    assert bound(eta) < min(bound(0.98 * eta), bound(1.02 * eta))


def test_row_24_step_size_respects_the_theorem():
    easy = {**COROLLARY_3, "epsilon": 1e6, "delta": 0.5}
    assert theory.step_size(10, **easy) == 1 / 5100
    theory.non_convex(1.0, theory.step_size(10, **easy))
    assert theory.step_size(10, **easy, form="printed") == 1 / 132
    for name, value in dict(gap=0, delta=1.5, epsilon=-1, num_byzantine=500).items():
        with pytest.raises(ValueError, match=f"{name}|f={value}"):
            theory.step_size(10, **{**COROLLARY_3, name: value})


# --- Row 25: how the error of Theorem 3 scales ------------------------------------
#
# For F_i = 0.5 |x - c_i|^2 without Byzantine clients, (x, m, R) is linear in what is
# drawn, so second moments follow a recursion, here for one coordinate around the
# optimum: mean gradient noise of variance v, noise of z (1 - beta_t) on the aggregate.

BLOCK = 100_000


def moments_step(p, t, v, z):
    eta, a, b = (schedule(t) for schedule in theory.strongly_convex(1.0, 1.0))
    xx, xm, xr, mm, mr, rr = p
    xm, mm, mr = (
        (1 - a) * xx + a * xm,
        (1 - a) ** 2 * (xx + v) + 2 * a * (1 - a) * xm + a**2 * mm,
        (1 - a) * xr + a * mr,
    )
    xr, mr, rr = (
        b * xr + (1 - b) * xm,
        b * mr + (1 - b) * mm,
        b**2 * rr + 2 * b * (1 - b) * mr + (1 - b) ** 2 * (mm + z**2),
    )
    new = xx - 2 * eta * xr + eta**2 * rr, xm - eta * mr, xr - eta * rr, mm, mr, rr
    return new


@functools.cache
def unit_errors():
    """Return E x^2 after 1 to 4 blocks of rounds, for x^2 = 1, v = 1 or z = 1 only."""

    def block(p, t):
        return moments_step(p, t, jnp.array([0, 1, 0]), jnp.array([0, 0, 1])), None

    def blocks(p, k):
        rounds = k * BLOCK + jnp.arange(BLOCK)
        p, _ = jax.lax.scan(block, p, rounds)
        return p, p[0]

    with jax.enable_x64(True):
        start = (jnp.array([1.0, 0.0, 0.0]), *jnp.zeros((5, 3)))
        run = jax.jit(lambda p: jax.lax.scan(blocks, p, jnp.arange(4))[1])
        return np.asarray(run(start))


def slope(y, x):
    return math.log(y[1] / y[0]) / math.log(x[1] / x[0])


def test_row_25_moments_follow_the_algorithm():
    rng = np.random.default_rng(5)
    schedules, d, v, z = theory.strongly_convex(1.0, 1.0), 4, 5.0, 30.0
    x = np.full((4000, d), 0.03)
    m, published = np.zeros_like(x), np.zeros_like(x)
    p = (0.03**2, 0.0, 0.0, 0.0, 0.0, 0.0)
    for t in range(150):
        eta, a, b = (schedule(t) for schedule in schedules)
        m = a * m + (1 - a) * (x + math.sqrt(v) * rng.normal(size=x.shape))
        published = b * published + (1 - b) * m
        published += (1 - b) * z * rng.normal(size=x.shape)
        x = x - eta * published
        p = moments_step(p, t, v, z)
    for found, moment in ((x, p[0]), (m, p[3]), (published, p[5])):
        assert squares(found).mean() == pytest.approx(d * moment, rel=0.05)
    assert p[0] > 1.5 * 0.03**2  # most of it is noise


def test_row_25_slope_in_rounds_without_privacy():
    start, gradients, _ = unit_errors().T
    errors = 2.0 * start + 0.1 * gradients
    rounds = BLOCK * np.array([2, 4])
    assert slope(errors[[1, 3]], rounds) == pytest.approx(-1, abs=0.2)
    assert slope(errors[[1, 3]], rounds + 49_000) == pytest.approx(-1, abs=0.02)
    assert 2.0 * start[3] < 1e-3 * errors[3]


def private_floor(rounds, epsilon, n, d, f=0):
    z = gaussian.noise_multiplier(epsilon, 1e-5, rounds, mode="rdp") * 2 / (n - 2 * f)
    return d * z**2 * unit_errors()[rounds // BLOCK - 1, 2]


def test_row_25_slopes_of_the_private_floor():
    T = 4 * BLOCK
    half, full = (private_floor(t, 1.0, 50, 10) for t in (T // 2, T))
    assert full == pytest.approx(half, rel=0.25)
    budgets = (0.1, 1.0)
    floors = [private_floor(T, epsilon, 50, 10) for epsilon in budgets]
    assert slope(floors, budgets) == pytest.approx(-2, abs=0.05)
    floors = [private_floor(T, 1.0, n, 10, f=n // 5) for n in (50, 200)]
    assert slope(floors, (50, 200)) == pytest.approx(-2, abs=0.05)
    # One coordinate more is as much error more; see the first test for d = 4.
    floors = [private_floor(T, 1.0, 50, d) for d in (10, 160)]
    assert slope(floors, (10, 160)) == pytest.approx(1, abs=0.05)


def test_row_25_floor_of_heterogeneity():
    rng = np.random.default_rng(6)
    shape = rng.normal(size=(7, 3))
    shape -= shape.mean(0)
    floors, sizes = [], (0.2, 1.0)
    for size in sizes:
        centres, x = 3.0 + size * shape, np.zeros(3)
        for _ in range(200):
            rows = x - centres
            forged = np.tile(rows.mean(0) - 1.5 * rows.std(0), (2, 1))
            x = x - 0.5 * trimmed_mean(np.concatenate([rows, forged]), 2)
        floors.append(squares(x - centres.mean(0)))
        spread = np.mean(squares(centres - centres.mean(0)))
        assert 0 < floors[-1] <= theory.kappa_cwtm(9, 2) * spread
    assert slope(floors, sizes) == pytest.approx(2, abs=0.05)


# --- Row 26: the instance of Lemma 2 ----------------------------------------------

N, F = 10, 3


def test_row_26_golden():
    instance = theory.lower_bound_instance(N, F, 4, smoothness=1.0, heterogeneity=1.0)
    np.testing.assert_array_equal(instance.optima[0], 0)
    assert squares(instance.optima[1]) == pytest.approx(0.2142857, abs=5e-8)
    bound = theory.lower_bound(N, F, smoothness=1.0, heterogeneity=1.0)
    assert bound == pytest.approx(0.0535714, abs=5e-8)
    assert list(np.flatnonzero(instance.byzantine)) == [3, 4, 5]


def test_row_26_instance_is_as_heterogeneous_as_allowed():
    for n, f, dim in ((10, 3, 4), (5, 2, 1), (9, 1, 7)):
        smooth, g = 2.0, 1.5
        instance = theory.lower_bound_instance(
            n, f, dim, smoothness=smooth, heterogeneity=g
        )
        for honest in (np.full(n, True), ~instance.byzantine):
            rows = smooth * instance.centres[honest]  # gradients at 0 for mu = L
            assert np.mean(squares(rows - rows.mean(0))) <= g**2 * (1 + 1e-12)
        rows = instance.centres[~instance.byzantine]
        np.testing.assert_allclose(instance.optima[1], rows.mean(0))


@pytest.mark.parametrize(
    "rule", ["mean", "trimmed_mean", "median", "geometric_median", "krum", "nnm+median"]
)
def test_row_26_no_rule_is_below_the_bound(rule):
    smooth, mu, g = 2.0, 0.5, 1.5
    instance = theory.lower_bound_instance(N, F, 4, smoothness=smooth, heterogeneity=g)
    aggregator = jaxfed.make_aggregator(rule, num_byzantine=F)
    centres = jnp.asarray(instance.centres, float)

    def step(carry, _):
        x, published, state = carry
        anchored = 0.85 * published + 0.15 * mu * (x[None] - centres)
        published, state = aggregator.update(anchored, state)
        return (x - 0.5 * published, published[None], state), None

    @toys.quick_jit
    def train(x):
        start = (x, jnp.zeros((1, 4)), aggregator.init(x))
        return jax.lax.scan(step, start, length=150)[0][0]

    # What clients send is the same in both configurations, and so is the result.
    final = np.asarray(train(jnp.full(4, 1.0)), float)
    bound = theory.lower_bound(N, F, smoothness=smooth, heterogeneity=g)
    errors = [squares(final - optimum) for optimum in instance.optima]
    gradients = [mu**2 * error for error in errors]
    assert bound <= max(errors) < 1 and max(gradients) >= mu**2 * bound


def test_row_26_no_answer_at_all_is_below_the_bound():
    instance = theory.lower_bound_instance(N, F, 2, smoothness=1.0, heterogeneity=1.0)
    bound = theory.lower_bound(N, F, smoothness=1.0, heterogeneity=1.0)
    shares = np.linspace(-1, 2, 301)[:, None] * instance.optima[1]
    worst = np.max([squares(shares - o) for o in instance.optima], axis=0)
    assert worst.min() == pytest.approx(bound, rel=1e-12)  # half way between
    with pytest.raises(ValueError, match="f=5, n=10"):
        theory.lower_bound(10, 5, smoothness=1.0, heterogeneity=1.0)


# --- Row 27: stationary variance --------------------------------------------------


@pytest.mark.parametrize(
    ("beta", "eta", "lam", "expected"),
    [
        (0, 0.1, 1, 0.0526316),
        (0.5, 0.1, 1, 0.0508475),
        (0.85, 0.1, 1, 0.0502035),
        (0.95, 0.1, 1, 0.0500642),
        (0.85, 1, 1, 0.521127),
        (0, 1, 1, 1.0),
    ],
)
def test_row_27_stationary_variance_golden(beta, eta, lam, expected):
    found = theory.stationary_variance(eta, beta, lam)
    assert found == pytest.approx(expected, rel=2e-6)
    assert theory.stationary_variance(eta, beta, lam, 3.0) == pytest.approx(9 * found)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.85, 0.95])
def test_row_27_stationary_variance_by_simulation(beta):
    eta, lam, s0 = 0.2, 1.5, 0.7
    rng = np.random.default_rng(3)
    theta, published = np.zeros(20_000), np.zeros(20_000)
    total = 0.0
    for t in range(400):
        published = beta * published + (1 - beta) * lam * theta
        published += (1 - beta) * s0 * rng.normal(size=theta.shape)
        theta = theta - eta * published
        if t >= 200:
            total += np.mean(theta**2) / 200
    expected = theory.stationary_variance(eta, beta, lam, s0)
    assert total == pytest.approx(expected, rel=0.03)


def test_row_27_diverging_step_size():
    with pytest.raises(ValueError, match="below 2,.*learning_rate=2.0"):
        theory.stationary_variance(2.0, 0.0, 1.0)


# --- numbers that float64 cannot hold ------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", ["squared_gradient", "tracking", "dispersion"])
def test_descent_bound_needs_finite_squares(name, value):
    squares = dict(squared_gradient=1.0, tracking=1.0, dispersion=1.0)
    with pytest.raises(ValueError, match=f"{name} must"):
        theory.descent_bound(0.1, smoothness=1.0, **(squares | {name: value}))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.kappa_sandwich(10, 2, 1e-308), "nu=1e-308"),
        (
            lambda: theory.lower_bound(10, 2, smoothness=1e-308, heterogeneity=1.0),
            "smoothness=1e-308",
        ),
        (
            lambda: theory.lower_bound_instance(
                10, 2, 3, smoothness=1e-308, heterogeneity=1.0
            ),
            "smoothness=1e-308",
        ),
        *[
            (
                lambda k=k, v=v: theory.step_size(10, **(COROLLARY_3 | {k: v})),
                f"{k}=1e{math.log10(v):+.0f}",
            )
            for k, v in [
                ("clip_norm", 1e-308),
                ("clip_norm", 1e308),
                ("epsilon", 1e-308),
                ("smoothness", 1e308),
                ("dim", 10**400),
            ]
        ],
    ],
)
def test_extreme_arguments_are_named(call, message):
    message = re.escape(message)
    with pytest.raises(ValueError, match=f"range of float64.*{message}.*Rescale"):
        call()
