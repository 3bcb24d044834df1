# SPDX-License-Identifier: Apache-2.0
"""Theory of Byz-Clip21-SGD2M: rows 20, 21, 22 and 25 of its checklist."""

import math

import byz_clip21_oracle as oracle
import numpy as np
import pytest

from jaxfed import robustness
from jaxfed.theory import byz_clip21_sgd2m as theory

# --- Row 20: constants and the choosers -------------------------------------------


def test_row_20_golden_constants():
    found = theory.constants(
        rounds=1000, num_honest=20, dim=100, gradient_std=2.0, noise_std=0.1
    )
    assert found.a == pytest.approx(94.7960, abs=5e-5)
    assert found.a_hat == pytest.approx(468.6977, abs=5e-5)
    assert found.b**2 == pytest.approx(125.3825, abs=5e-5)
    assert found.c_hat**2 == pytest.approx(718.9021, abs=5e-5)
    assert found.b1 == pytest.approx(math.sqrt(3 * math.log(20 * 1001 / 0.05)))


BASE = dict(
    smoothness=2.0,
    potential=3.0,
    clip_norm=0.5,
    initial_gradient=4.0,
    rounds=500,
    num_honest=12,
    dim=30,
)
CASES = {
    "deterministic": {},
    "gradients": dict(gradient_std=1.5),
    "private": dict(gradient_std=1.5, noise_std=0.3),
    "byzantine": dict(gradient_std=0.2, kappa=0.4),
    "both": dict(gradient_std=1.5, noise_std=0.3, kappa=2.7),
    "little noise": dict(gradient_std=1e-3, noise_std=1e-5, kappa=1e-4),
    "large clip": dict(gradient_std=0.7, noise_std=0.1, kappa=3.0, clip_norm=40.0),
    "long": dict(gradient_std=1.0, noise_std=5.0, kappa=0.2, rounds=10**6),
}


def assert_restrictions(s, choice, form):
    """Check (68)-(80), each as the inequality it solves, powers on the left."""
    T, G, tau = s["rounds"], s["num_honest"], s["clip_norm"]
    sigma, kappa = s.get("gradient_std", 0.0), s.get("kappa", 0.0)
    noise = s.get("noise_std", 0.0)
    p = (T + 1) / 0.05

    def k(q):
        return 2**0.5 + 2 * (3 * math.log(q)) ** 0.5

    a = k(8 * p) * s["dim"] ** 0.5 * noise * (T / G) ** 0.5
    ah = k(8 * G * p) * s["dim"] ** 0.5 * noise * T**0.5
    b = (2 * sigma**2 * math.log(16 * p * G)) ** 0.5
    ch = k(8 * p) * sigma
    b1 = (3 * math.log(20 * p)) ** 0.5
    B = max(3 * tau, s["initial_gradient"] + b)
    D, eta, lam = B - tau, tau / B, (s["smoothness"] * s["potential"]) ** 0.5
    be, h, g = choice.beta, choice.beta_hat, choice.gamma
    n = (1 + b1) * sigma * T**0.5 / G**0.5
    r2, rk, L = 2**0.5, kappa**0.5, s["smoothness"]
    assert choice.radius == pytest.approx(B)
    assert g == pytest.approx(be / (12 * L)) and g <= 1 / (24 * L)
    ones = [
        h,
        (32 * be**2 + 96) * L**2 * g**2 / (h * eta) ** 2 * 6 / 5,  # (68)
        be * 54 * lam / (h * tau),
        be * 39 * D / (2 * h * tau),
        be * 69 * b / (2 * h * tau),
        be * 41 * (2 * kappa) ** 0.5 * T / 2,
        h * a / lam,
        h * 4 * (2 * kappa) ** 0.5 * ah / lam,
        be**3 * 12 * T * b**2 / (lam**2 * h * eta),  # (71)
        be**4 * 48 * T * b**2 / (lam * h * eta) ** 2,
        be**2 * 12 * T * ch**2 / (lam**2 * G),
        be**2 * 8 * r2 * B * n / (3 * lam**2 * h * eta),  # (72)
        be**3 * 16 * r2 * n * (4 * lam + 1.5 * (D + b)) / (3 * lam**2 * h * eta),
        be**3 * 16 * n * rk * tau * T / (lam**2 * eta),
        be**4 * 16 * r2 * n * (12 * lam + 3 * (D + b)) / (9 * lam**2 * h * eta),
        be**4 * 80 * n * rk * tau * T / (9 * lam**2 * eta),
        be**3 * 64 * r2 * n * (4 * lam + 1.5 * (D + b)) / (3 * (lam * h * eta) ** 2),
        be**3 * 32 * n * rk * tau * T / (3 * lam**2 * h * eta**2),
        be**4 * 16 * r2 * n * (12 * lam + 3 * (D + b)) / (9 * (lam * h * eta) ** 2),
        be**4 * 128 * n * rk * tau * T / (9 * lam**2 * h * eta**2),
        be * 16 * r2 * n * (4 * lam + 1.5 * (D + b)) / (3 * lam**2),  # (77)
        be**2 * 4 * r2 * n * (12 * lam + 3 * (D + b)) / (9 * lam**2),  # (78)
        h**3 * 2 * a**2 * T * tau / (27 * lam**3),  # (79)
        h**3 * 96 * kappa * ah**2 * tau * T / (81 * lam**3),  # (80)
        h**3 * 96 * kappa * (tau * T) ** 3 / (81 * lam**3),
    ]
    if kappa and form == "printed":
        ones.append(h * 64 * n / (29 * lam**2))
        ones.append(h**2 * n * T * tau**3 / (462 * lam**4))
    elif kappa:
        # What (77) and (78) are for: the terms in beta beta_hat and beta^2 beta_hat.
        ones.append(be * h * rk * tau * T * n * 32 / lam**2)
        ones.append(be**2 * h * rk * tau * T * n * 2916 / 462 / lam**2)
    if form == "sound" and (noise or kappa):
        ones.append(24 * h)
    assert max(ones) <= 1 + 1e-9
    return ones


@pytest.mark.parametrize("form", theory.FORMS)
@pytest.mark.parametrize("case", CASES)
def test_row_20_restrictions_hold_and_bind(case, form):
    setting = {**BASE, **CASES[case]}
    choice = theory.choose(**setting, form=form)
    assert_restrictions(setting, choice, form)
    for name in ("beta", "beta_hat"):
        limits = choice.limits[name]
        assert limits[choice.binding[name]] == getattr(choice, name)
        assert min(limits.values()) == getattr(choice, name) > 0
        # Not one step more: a tenth above, the binding restriction is violated.
        larger = choice._replace(**{name: 1.1 * getattr(choice, name)})
        larger = larger._replace(gamma=larger.beta / 24)
        if choice.binding[name] not in ("(77)", "(78)"):
            with pytest.raises(AssertionError):
                assert_restrictions(setting, larger, form)
    assert choice.momentum == 1 - choice.beta
    assert choice.server_momentum == 1 - choice.beta_hat


def test_row_20_special_cases_of_the_corollaries():
    # Corollary 5.2: no noise, no Byzantine clients; then no restriction on beta_hat.
    for case in ("deterministic", "gradients"):
        choice = theory.choose(**{**BASE, **CASES[case]})
        assert choice.beta_hat == 1
    deterministic = theory.choose(**BASE)
    radius, lam = 4.0, math.sqrt(6.0)
    expected = min(0.5 / (54 * lam), 2 * 0.5 / (39 * (radius - 0.5)))
    assert deterministic.beta == pytest.approx(expected)
    # Corollary 5.3: beta_hat is Lambda / a or (79), once that is small.
    private = {**BASE, "gradient_std": 1.5, "noise_std": 50.0}
    choice = theory.choose(**private)
    a = theory.constants(rounds=500, num_honest=12, dim=30, noise_std=50.0).a
    cube = (27 * lam**3 / (2 * a**2 * 500 * 0.5)) ** (1 / 3)
    assert choice.beta_hat == pytest.approx(min(lam / a, cube))
    assert set(choice.limits["beta_hat"]) & {"(77)", "(78)", "(80) clip"} == set()


def test_row_20_sound_form_is_never_larger_where_it_should_be_smaller():
    for case in CASES.values():
        setting = {**BASE, **case}
        sound, printed = (theory.choose(**setting, form=f) for f in theory.FORMS)
        if not (case.get("noise_std") or case.get("kappa")):
            assert sound == printed
    # Where clip_norm > 1 the printed (77) is tau times too large for its inequality.
    setting = {**BASE, **CASES["large clip"]}
    sound, printed = (theory.choose(**setting, form=f) for f in theory.FORMS)
    ratio = printed.limits["beta_hat"]["(77)"] / sound.limits["beta_hat"]["(77)"]
    assert ratio == pytest.approx(40.0)


def test_row_20_beta_hat_falls_like_one_over_rounds():
    # As noise_std ~ sqrt(T) for a fixed budget; and beta like T^(-5/6) or faster.
    def at(rounds):
        setting = {**BASE, "rounds": rounds, "gradient_std": 1.0, "kappa": 0.5}
        return theory.choose(**setting, noise_std=0.1 * math.sqrt(rounds))

    few, many = at(10**6), at(10**8)
    slope = math.log(many.beta_hat / few.beta_hat) / math.log(100)
    assert slope == pytest.approx(-1, abs=0.05)
    assert math.log(many.beta / few.beta) / math.log(100) <= -5 / 6 + 0.05


@pytest.mark.parametrize(
    "case",
    [
        {},
        dict(gradient_std=2.0),
        dict(heterogeneity=1.3, kappa=0.8),
        dict(gradient_std=0.5, heterogeneity=1.3, kappa=0.8),
        dict(gradient_std=1e-4, heterogeneity=1e-3, kappa=5.0),
    ],
)
def test_row_20_non_private_restrictions_hold_and_bind(case):
    L, gap, T, G = 2.0, 1.7, 400, 9
    choice = theory.choose_non_private(
        smoothness=L, gap=gap, rounds=T, num_honest=G, **case
    )
    sigma, zeta, kappa = (
        case.get(name, 0.0) for name in ("gradient_std", "heterogeneity", "kappa")
    )
    p, ld = 401 / 0.05, L * 2 * gap
    c2 = (2**0.5 + 2 * (3 * math.log(8 * p)) ** 0.5) ** 2 * sigma**2
    z2 = (2**0.5 + 2 * (3 * math.log(8 * G * p)) ** 0.5) ** 2 * sigma**2
    b1, be = (3 * math.log(6 * p)) ** 0.5, choice.beta
    root = 8 * ld**0.5 + 3 * (c2 / G) ** 0.5
    root += 3 * (2 * kappa) ** 0.5 * (zeta + z2**0.5)
    ones = [
        6 * L * choice.gamma,
        be**2 * 3 * T * c2 / (4 * ld * G),  # (112)
        be * 3 * kappa * zeta**2 * T / ld,  # (113)
        be**2 * 3 * kappa * T * z2 / ld,
        be * 3 * 2**0.5 * (1 + b1) * sigma * T**0.5 * root / (2 * ld * G**0.5),  # (114)
    ]
    assert max(ones) == pytest.approx(1)
    assert choice.beta_hat == 1 and be == pytest.approx(4 * L * choice.gamma)


def test_row_20_rate():
    setting = dict(BASE, gradient_std=1.5, noise_std=0.3, kappa=2.7)
    big = theory.constants(rounds=500, num_honest=12, gradient_std=1.5)
    radius = 4 + big.b
    lam = 6**0.5
    r = 30**0.5 * 0.3 / (12 * 500) ** 0.5 / 0.5
    r += (2.7 * 30) ** 0.5 * 0.3 / 500**0.5 / 0.5 + 2.7**0.5
    expected = lam * (lam + radius + 1.5) * (r + r ** (2 / 3))
    assert theory.rate(**setting) == pytest.approx(expected)
    assert theory.rate(**dict(setting, noise_std=0, kappa=0)) == 0


# --- Row 21: the theorems' inequalities by Monte Carlo ----------------------------

RUNS, T, HONEST, BYZANTINE, DIM = 60, 250, 8, 2, 3
ALPHA = 0.05


def nnm_median(m, f):
    n = m.shape[1]
    squares = np.sum((m[:, :, None] - m[:, None]) ** 2, axis=-1)
    near = np.argsort(squares, axis=-1, kind="stable")[..., : n - f]
    mixed = m[np.arange(len(m))[:, None, None], near].mean(2)
    return np.median(mixed, axis=1)


def run(choice, centres, x0, s, *, tau=np.inf, noise_std=0.0, f=0, seed=0):
    """Return the mean over rounds of the squared gradient norm, for each run.

    Clients have 0.5 |x - c_i|^2 and gradients with errors N(0, s^2 I); Byzantine ones
    send the honest mean minus 1.5 standard deviations.
    """
    rng = np.random.default_rng(seed)
    shape = (RUNS, *centres.shape)
    x = np.tile(x0, (RUNS, 1))
    v, g_i, m = np.zeros(shape), np.zeros(shape), np.zeros((RUNS, HONEST + f, DIM))
    total = 0.0
    for _ in range(T):
        total = total + np.sum((x - centres.mean(0)) ** 2, axis=-1)
        aggregate = nnm_median(m, f) if f else m.mean(1)
        x = x - choice.gamma * aggregate
        gradient = x[:, None] - centres + s * rng.normal(size=shape)
        v = (1 - choice.beta) * v + choice.beta * gradient
        q = v - g_i
        norm = np.linalg.norm(q, axis=-1, keepdims=True)
        q = q * np.minimum(1, tau / np.maximum(norm, 1e-300))
        c = q + noise_std * rng.normal(size=shape)
        g_i = g_i + choice.beta_hat * q
        forged = np.repeat((c.mean(1) - 1.5 * c.std(1))[:, None], f, axis=1)
        m = m + choice.beta_hat * np.concatenate([c, forged], axis=1)
    return total / T


def toy():
    rng = np.random.default_rng(7)
    centres, x0 = 0.3 * rng.normal(size=(HONEST, DIM)), rng.normal(size=DIM)
    spread = np.linalg.norm(centres - centres.mean(0), axis=1)
    gap = np.sum((x0 - centres.mean(0)) ** 2) / 2
    largest = np.linalg.norm(x0 - centres, axis=1).max()
    return centres, x0, gap, spread, largest


def sub_gaussian(s):
    return s * math.sqrt(2 / (1 - math.exp(-2 / DIM)))


@pytest.mark.parametrize(
    ("noise_std", "byzantine"),
    [(0.0, 0), (0.02, 0), (0.02, BYZANTINE)],
    ids=["corollary_5.2", "corollary_5.3", "theorem_5.1"],
)
def test_row_21_bound_81_holds_in_nearly_all_runs(noise_std, byzantine):
    centres, x0, gap, spread, largest = toy()
    s, tau = 0.1, 1.0
    delta = theory.initial_potential(gap, 1.0, spread.max())
    n = HONEST + byzantine
    kappa = robustness.kappa("nnm+median", n, byzantine) if byzantine else 0.0
    choice = theory.choose(
        smoothness=1.0,
        potential=delta,
        clip_norm=tau,
        initial_gradient=largest,
        rounds=T,
        num_honest=HONEST,
        dim=DIM,
        gradient_std=sub_gaussian(s),
        noise_std=noise_std,
        kappa=kappa,
        failure_probability=ALPHA,
    )
    seen = run(choice, centres, x0, s, tau=tau, noise_std=noise_std, f=byzantine)
    bound = theory.gradient_bound(delta, choice.gamma, T)
    assert np.mean(seen <= bound) >= 1 - ALPHA
    assert np.all(seen > 0) and np.all(np.isfinite(seen))


def test_row_21_bound_115_holds_in_nearly_all_runs():
    centres, x0, gap, spread, _ = toy()
    s = 0.1
    choice = theory.choose_non_private(
        smoothness=1.0,
        gap=gap,
        rounds=T,
        num_honest=HONEST,
        gradient_std=sub_gaussian(s),
        heterogeneity=math.sqrt(np.mean(spread**2)),
        kappa=robustness.kappa("nnm+median", HONEST + BYZANTINE, BYZANTINE),
        failure_probability=ALPHA,
    )
    seen = run(choice, centres, x0, s, f=BYZANTINE)
    bound = theory.gradient_bound(2 * gap, choice.gamma, T)
    assert np.mean(seen <= bound) >= 1 - ALPHA
    # It can fail: a step size that ascends breaks it.
    wrong = choice._replace(gamma=-0.2)
    assert np.mean(run(wrong, centres, x0, s, f=BYZANTINE) <= bound) < 1 - ALPHA


def test_row_21_constants_cover_the_noise():
    # a and a_hat bound the sums they are made for, in nearly all draws.
    rng = np.random.default_rng(0)
    sums = np.cumsum(0.3 * rng.normal(size=(200, 40, 6, 5)), axis=1)  # run, t, G, d
    big = theory.constants(rounds=40, num_honest=6, dim=5, noise_std=0.3)
    mean = np.linalg.norm(sums.mean(2), axis=-1).max(1)
    each = np.linalg.norm(sums, axis=-1).max((1, 2))
    assert np.mean(mean <= big.a) >= 0.95 and np.mean(each <= big.a_hat) >= 0.95
    # ... and are of their size: without K they are violated.
    assert np.mean(mean <= big.a / 8) < 0.95


# --- Row 22 and the facts it uses -------------------------------------------------


def test_row_22_clip_switches_off():
    tau, beta_hat, beta = 1.0, 0.02, 1e-4
    centres = np.array([[0.1, 0.0], [0.0, -0.1], [0.05, 0.05]])
    first = np.array([6.0, 8.0])
    trace = oracle.algorithm1(
        [0.5, -0.5],
        lambda i, t, x: x - centres[i],
        3,
        1000,
        gamma=beta / 12,
        beta=beta,
        beta_hat=beta_hat,
        tau=tau,
        ragg=oracle.mean,
        init=first,
    )
    v = np.array([r["v"] for r in trace])
    g = np.array([np.tile(first, (3, 1))] + [r["g_i"] for r in trace[:-1]])
    length = np.linalg.norm(v - g, axis=-1)  # |v^{t+1} - g^t| for t = 0, 1, ...
    np.testing.assert_allclose(length[0], 10 * tau, rtol=1e-4)
    active = length[:-1] > tau
    shorter = length[1:] <= length[:-1] - beta_hat * tau / 2
    assert np.all(shorter[active])
    allowed = theory.clip_rounds(10 * tau, tau, beta_hat)
    assert allowed == 900
    switched_off = np.argmax(length <= tau, axis=0)
    assert np.all(switched_off <= allowed + 1) and np.all(switched_off > 400)
    assert np.all(length[switched_off.max() :] <= tau)


@pytest.mark.parametrize(
    ("radius", "beta_hat", "expected"), [(3.0, 1.0, 4), (1.0, 0.5, 0), (4.0, 0.7, 9)]
)
def test_row_22_clip_rounds(radius, beta_hat, expected):
    assert theory.clip_rounds(radius, 1.0, beta_hat) == expected


def test_row_22_clip_error():
    rng = np.random.default_rng(1)
    for scale in (0.1, 1.0, 30.0):
        z = scale * rng.normal(size=4)
        error = np.linalg.norm(oracle.clip(z, 1.5) - z)
        bound = theory.clip_error_bound(np.linalg.norm(z), 1.5)
        assert error == pytest.approx(bound, abs=1e-12)
    assert theory.clip_error_bound(5.0, math.inf) == 0


def test_row_22_aggregation_bias():
    rng = np.random.default_rng(2)
    tau, beta_hat, f, n = 0.5, 0.3, 2, 9
    kappa = robustness.kappa("nnm+median", n, f)
    noise = 0.4 * rng.normal(size=(12, n, 3))
    centres = rng.normal(size=(n, 3))
    byzantine = {7, 8}
    trace = oracle.algorithm1(
        np.zeros(3),
        lambda i, t, x: x - centres[i],
        n,
        12,
        gamma=0.3,
        beta=0.5,
        beta_hat=beta_hat,
        tau=tau,
        ragg=oracle.nnm(f, oracle.cm),
        noise=lambda i, t: noise[t - 1, i],
        attack=oracle.ipm(1.5),
        byzantine=byzantine,
    )
    ratios = []
    for t, r in enumerate(trace, start=1):
        sums = noise[:t, : n - f].sum(0)
        bias = np.sum((r["m"][: n - f].mean(0) - r["g"]) ** 2)
        bound = theory.aggregation_bias_bound(beta_hat, t, tau, kappa, sums)
        ratios.append(bias / bound)
        expected = 8 * kappa * beta_hat**2 * (t + 1) ** 2 * tau**2
        expected += 8 * kappa * beta_hat**2 * np.mean(np.sum(sums**2, axis=1))
        assert bound == pytest.approx(expected)
    assert 0 < max(ratios) <= 1


# --- Row 25: the potentials -------------------------------------------------------


def quadratics(seed=4):
    """Return Hessians (largest eigenvalue 1), centres, the optimum and f."""
    rng = np.random.default_rng(seed)
    roots = rng.normal(size=(5, 3, 3))
    hessians = roots @ roots.swapaxes(1, 2)
    hessians /= np.linalg.eigvalsh(hessians).max()
    centres = rng.normal(size=(5, 3))
    mean = hessians.mean(0)
    right = np.einsum("gij,gj->i", hessians, centres) / 5
    optimum = np.linalg.solve(mean, right)

    def gap(x):
        return (x - optimum) @ mean @ (x - optimum) / 2

    def gradients(x):
        return np.einsum("gij,gj->gi", hessians, x - centres)

    return gap, gradients, optimum


@pytest.mark.parametrize("noise_std", [0.0, 0.02, 5.0], ids=["E.1", "E.2", "tiny"])
@pytest.mark.parametrize("start", ["zero", "common"])
def test_row_25_potential_9_falls(noise_std, start):
    gap, gradients, optimum = quadratics()
    x, tau = optimum + np.array([1.0, -2.0, 0.5]), 0.7
    largest = np.linalg.norm(gradients(x), axis=1).max()
    deviation = gradients(x) - gradients(x).mean(0)
    zeta = np.linalg.norm(deviation, axis=1).max()
    delta = theory.initial_potential(gap(x), 1.0, zeta)
    g = np.zeros((5, 3)) if start == "zero" else np.tile([0.5, -1.0, 2.0], (5, 1))
    v = np.zeros((5, 3))
    # From other memories the first potential is larger; any larger bound will do.
    delta *= 1 if start == "zero" else 3
    radius = largest + np.linalg.norm(g[0])
    choice = theory.choose(
        smoothness=1.0,
        potential=delta,
        clip_norm=tau,
        initial_gradient=radius,
        rounds=1000,
        num_honest=5,
        dim=3,
        noise_std=noise_std,
    )
    weights = dict(
        gamma=choice.gamma,
        beta=choice.beta,
        beta_hat=choice.beta_hat,
        clip_norm=tau,
        radius=choice.radius,
    )
    old = theory.potential(gap(x), gradients(x), v, g, **weights)
    assert old <= delta
    if start == "zero":
        eta = tau / choice.radius
        squares = np.sum(gradients(x) ** 2, axis=1)
        mean = np.sum(gradients(x).mean(0) ** 2)
        formula = gap(x) + 2 * choice.gamma / choice.beta * mean
        formula += (
            8 * choice.gamma * choice.beta / (choice.beta_hat * eta) ** 2
        ) * squares.mean()
        assert old == pytest.approx(formula)
    for _ in range(1000):
        fall = choice.gamma / 2 * np.sum(gradients(x).mean(0) ** 2)
        x = x - choice.gamma * g.mean(0)
        v = (1 - choice.beta) * v + choice.beta * gradients(x)
        q = v - g
        norm = np.linalg.norm(q, axis=1, keepdims=True)
        g = g + choice.beta_hat * q * np.minimum(1, tau / np.maximum(norm, 1e-300))
        new = theory.potential(gap(x), gradients(x), v, g, **weights)
        assert new <= old - fall + 1e-12
        old = new


def test_row_25_potential_95_falls():
    gap, gradients, optimum = quadratics()
    x = optimum + np.array([1.0, -2.0, 0.5])
    choice = theory.choose_non_private(
        smoothness=1.0, gap=gap(x), rounds=1000, num_honest=5
    )
    gamma, beta = choice.gamma, choice.beta
    v = np.zeros((5, 3))
    old = theory.potential_non_private(gap(x), gradients(x), v, gamma=gamma, beta=beta)
    mean = np.sum(gradients(x).mean(0) ** 2)
    assert old == pytest.approx(gap(x) + mean / 4) and old <= 2 * gap(x)
    for _ in range(1000):
        fall = gamma / 2 * np.sum(gradients(x).mean(0) ** 2)
        x = x - gamma * v.mean(0)
        v = (1 - beta) * v + beta * gradients(x)
        new = theory.potential_non_private(
            gap(x), gradients(x), v, gamma=gamma, beta=beta
        )
        assert new <= old - fall + 1e-12
        old = new


def test_row_25_initial_potential():
    assert theory.initial_potential(2.0, 4.0, 3.0) == pytest.approx(6 + 45 / 24)
    assert theory.initial_potential(2.0, 4.0, 3.0, slope=0.5) == pytest.approx(
        (4 / 3 + 2.5) * 2 + 45 / 24
    )


# --- errors -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(smoothness=0), ValueError, "smoothness=0"),
        (dict(potential=-1), ValueError, "potential=-1"),
        (dict(clip_norm=math.inf), ValueError, "clip_norm=inf"),
        (dict(initial_gradient=-1), ValueError, "initial_gradient=-1"),
        (dict(rounds=1.5), TypeError, "rounds"),
        (dict(num_honest=0), ValueError, "num_honest=0"),
        (dict(gradient_std=-1), ValueError, "gradient_std=-1"),
        (dict(noise_std=-1), ValueError, "noise_std=-1"),
        (dict(kappa=-1), ValueError, "kappa=-1"),
        (dict(failure_probability=1.0), ValueError, "failure_probability=1.0"),
        (dict(form="proven"), ValueError, "'proven'"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        theory.choose(**{**BASE, **change})


def test_bounds_are_not_silently_nan():
    for sums in (math.nan, [[1.0, math.nan]]):
        with pytest.raises(ValueError, match="noise_sums must not be NaN"):
            theory.aggregation_bias_bound(0.1, 3, 1.0, 0.1, sums)
    with pytest.raises(TypeError, match="noise_sums must be numbers"):
        theory.aggregation_bias_bound(0.1, 3, 1.0, 0.1, None)
    with pytest.raises(ValueError, match="noise_sums is too extreme.*=1e[+]200"):
        theory.aggregation_bias_bound(0.1, 3, 1.0, 0.1, [[1e200]])
    with pytest.raises(ValueError, match="clip_rounds leaves.*radius is too extreme"):
        theory.clip_rounds(1e308, 1e-300, 0.1)


def test_no_room_is_an_error():
    with pytest.raises(ValueError, match="Rescale"):
        theory.choose(**{**BASE, "potential": 1e-320, "noise_std": 1e308})
