# SPDX-License-Identifier: Apache-2.0
"""What is proven of DRAG and BR-DRAG (rows 12, 21 and 22 of the paper's checklist)."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfed.theory import drag

# eta, U, L, c, variance, heterogeneity -> gamma, V of the proof, V as printed.
GOLDEN = {
    (0.01, 5, 1.0, 0.01, 1.0, 1.0): (0.2705, 0.83235, 1.74917),
    (0.002, 5, 1.0, 0.02, 1.0, 1.0): (0.272945, 0.755183, 0.462084),
    (0.05, 1, 1.0, 0.02, 1.0, 1.0): (None, 2.42066, 2.42066),
}
LARGEST = {0.0: 0.12367, 0.01: 0.10378, 0.02: 0.08323, 0.03: 0.06079, 0.04: 0.03343}
# w, x at rho = 0 -> strengths admitted by (51).
ADMITTED = {
    (0.3, -0.3): (0.3216, 0.6784),
    (0.6, -0.6): (0.4, 0.6),
    (0.9, -0.9): (0.4585, 0.5415),
    (0.3, 0.0): (0.7742, 1.0),
    (0.6, 0.0): (0.9231, 1.0),
    (0.3, 0.15): None,
    (0.6, 0.3): None,
    (0.9, 0.45): None,
}
THEORY = drag.BRDragTheory(5, 1.0, 0.5, 2.0, 0.3, 0.5)  # U, L, p, q, w, c
unit = st.floats(0, 1)


def near(value):
    return pytest.approx(value, rel=1e-4)


# --- row 21: constants -----------------------------------------------------------


def test_row_21_drag_constants_have_the_sheets_values():
    for case, (gamma, proof, printed) in GOLDEN.items():
        constants = drag.DragTheory(*case)
        assert constants.v_proof == near(proof)
        assert constants.v_printed == near(printed)
        assert gamma is None or constants.gamma == near(gamma)
    first = drag.DragTheory(*next(iter(GOLDEN)))
    assert (first.c1, first.c2, first.c3) == near((80.625, 80.8125, 0.0112575))


@given(
    st.floats(1e-4, 1e-2),
    st.integers(1, 5),
    st.floats(0.1, 3),
    st.floats(0, 0.04),
    st.floats(0, 5),
    st.floats(0, 5),
)
def test_row_21_the_corrected_v_is_the_proofs(eta, U, L, c, local, between):
    constants = drag.DragTheory(eta, U, L, c, local, between)
    assert constants.v_fixed == pytest.approx(constants.v_proof, rel=1e-9)
    # (34) as the paper writes it.
    gamma = (1 - 3 * c) / 2 - (3 * c / U**2 + eta * L / (2 * U)) * constants.c1
    gamma -= 15 * (1 - c) * (L * U * eta) ** 2
    assert constants.gamma == pytest.approx(gamma, rel=1e-9, abs=1e-12)


def test_row_21_nothing_is_guaranteed_from_one_21st_on():
    for c, step in LARGEST.items():
        assert drag.largest_drag_step(c) == pytest.approx(step, abs=5e-6)
        assert drag.gamma_max(step - 1e-5, c) > 0 > drag.gamma_max(step + 1e-5, c)
    assert drag.gamma_max(1 / 8, 0) == pytest.approx(-0.00977, abs=1e-5)
    assert drag.gamma_max(0, 0.01) == pytest.approx(0.5 - 10.5 * 0.01)
    for c in (1 / 21, 0.1, 0.25, 1):
        assert drag.largest_drag_step(c) == 0
        constants = drag.DragTheory(1e-6, 5, 1.0, c, 1.0, 1.0)
        assert constants.gamma <= 1e-15
        if c > 1 / 21:
            v = {constants.v_proof, constants.v_printed, constants.v_fixed}
            assert v == {math.inf} and constants.bound(1.0, 100) == math.inf
    # Also without a guarantee: too long a step at a small c.
    assert drag.DragTheory(0.03, 5, 1.0, 0.01, 1.0, 1.0).bound(1.0, 100) == math.inf


def test_row_21_br_drag_constants_have_the_sheets_values():
    eta = THEORY.eta_case1
    assert eta == near(7.142857e-4)
    assert THEORY.chi(eta) == near(0.0580791)
    assert THEORY.neighbourhood(eta, 1.0) == near(0.0253283)
    assert THEORY.eta_case2(0.2) == near(9.655172e-4)
    assert THEORY.eta_case2(0.7) == 0
    assert THEORY.bound(2.0, 1000, 0.01, 1.0) == math.inf
    bound = THEORY.bound(2.0, 1000, eta, 1.0)
    assert bound == near(2 / (0.0580791 * eta * 5 * 1000) + 0.0253283)


def test_row_21_h_in_both_forms():
    # |.3 * .5 - .5 * .1| / (2 * .5 * .01 * 5 * .4) = .1 / .02.
    assert drag.h_constant(0.01, 5, 0.3, 0.5, -0.1) == pytest.approx(5)
    assert drag.h_constant(0.01, 5, 0.3, 0.5, -0.1, squared=True) == pytest.approx(0.5)
    assert drag.h_constant(0.01, 5, 0.3, 0.5, -0.3) == 0  # the oracle's strength
    assert drag.h_constant(0.01, 5, 0.3, 0.0, -0.3) == math.inf
    assert drag.h_constant(0.01, 5, 0.0, 0.5, 0.0) == 0  # nobody Byzantine
    eta = THEORY.eta_case1
    plain = THEORY.neighbourhood(eta, 1.0)
    more = THEORY.neighbourhood(eta, 1.0, extra=5.0)
    assert more - plain == near(2 * eta / 0.0580791 * 5)


@given(
    st.integers(1, 20),
    st.floats(0.1, 5),
    st.floats(0.1, 2),
    st.floats(1, 10),
    st.floats(0, 0.95),
    st.floats(0, 0.95),
)
def test_row_21_chi_is_positive_at_the_largest_step(U, L, p, factor, w, c):
    theory = drag.BRDragTheory(U, L, p, p * factor, w, c)
    chi = theory.chi(theory.eta_case1)
    assert chi >= (1 - w) * (1 - c) * p / 4 * (1 - 1e-9)
    assert drag.BRDragTheory(U, L, p, p, w, 1.0).chi(1e-9) == -math.inf


def test_row_21_condition_51_admits_the_sheets_strengths():
    for (w, x), expected in ADMITTED.items():
        interval = drag.cond51_interval(w, x)
        if expected is None:
            assert interval is None and not drag.cond51(0.5, w, x)
        else:
            assert interval == near(expected)
    for w in np.linspace(0, 1, 21):
        assert drag.cond51(0.5, w, -w)
    # Unlike a Byzantine client's, a benign round has no lower end.
    assert drag.cond51_interval(0, 0) == (0, 1)


@given(unit, st.floats(-1, 1), st.floats(0, 5), unit)
def test_row_21_condition_51_is_its_inequality(w, cosine, rho, c):
    x = w * cosine
    if w > 1e-6 and w - x > 1e-6:
        left = (rho**2 - 7 * w + 8 * x - 1) * c**2 + (15 * w + 1) * c
        gap = left - 8 * w**2 / (w - x)
        if abs(gap) > 1e-6:
            assert drag.cond51(c, w, x, rho) == (gap > 0)


def unit_cosines(size, low):
    return st.lists(st.floats(low, 1), min_size=size, max_size=size)


@given(
    unit_cosines(3, -1),
    unit_cosines(7, 0),
    unit_cosines(7, 0),
    st.floats(0.1, 1),
    st.floats(1e-5, 1e-2),
)
def test_row_21_d1_and_d2_lie_on_the_good_side_of_chi_and_w(
    byzantine, benign, spread, p, eta
):
    """(48) and W come from D1 and D2 at the oracle's strength: here per worker."""
    U, L, q = 5, 1.5, 2 * p
    w, x = 0.3, min(sum(byzantine) / 10, 0.0)
    byzantine = np.asarray(byzantine) - max(sum(byzantine) / 3, 0.0)  # x at most 0
    if np.any(byzantine < -1):
        return
    x = byzantine.sum() / 10
    c = drag.oracle_strength(w, x)
    if c > 0.95:
        return
    ratios = p + (q - p) * np.asarray(spread)
    d1, d2 = drag.descent_constants(
        byzantine,
        benign,
        ratios,
        learning_rate=eta,
        local_steps=U,
        smoothness=L,
        strength=c,
        local_variance=1.3,
    )
    theory = drag.BRDragTheory(U, L, p, q, w, c)
    chi = theory.chi(eta)
    assert d1 >= chi - 1e-12
    if chi > 0:
        rest = theory.neighbourhood(eta, 1.3)
        assert d2 / (eta * U * chi) <= rest * (1 + 1e-9)


def test_row_21_d1_and_d2_by_hand_in_both_forms():
    # S=2, c=.5, x_1=-.5: h=.75; y_2=.5: l=.25, rho=2: b_2=1.5, b=.75; eta U=.1,
    # delta=.5*.75*.1=.0375, kappa=.5*.25*.1=.0125, A=(.25/2)^2=.015625, L=3.
    inputs = ([-0.5], [0.5], [2.0])
    setting = dict(learning_rate=0.05, local_steps=2, smoothness=3.0, strength=0.5)
    attack = 0.015625 / 0.0375
    d1 = 0.0125 / 0.2 + 0.375 - 0.4 * 0.45 - 0.36 * 2.25 / 1.5 - 0.4 * attack
    d2 = 0.225 + attack / 2 + 0.45 * 2.25 / 1.5
    for form, step, last in (("printed", 0.8, 1.0), ("corrected", 1.2, 1.5)):
        got = drag.descent_constants(*inputs, **setting, local_variance=3.0, form=form)
        assert got[0] == pytest.approx(d1 - step, rel=1e-12)
        assert got[1] == pytest.approx(2 * 0.0025 * 2 * 3 * (d2 + last), rel=1e-12)
    # No weight on any update against an attack: nothing is guaranteed.
    setting["strength"] = 0.0
    nothing = drag.descent_constants(*inputs, **setting, local_variance=3.0)
    assert nothing == (-math.inf, math.inf)


def test_row_21_bad_arguments_are_named():
    with pytest.raises(ValueError, match="squared must not be NaN"):
        drag.h_constant(0.1, 2, 0.3, 0.5, -0.1, squared=math.nan)
    with pytest.raises(ValueError, match="c3 leaves.*learning_rate is too extreme"):
        drag.DragTheory(1e200, 5, 1.0, 0.01, 1.0, 1.0).c3  # noqa: B018
    with pytest.raises(ValueError, match="strength=1.5"):
        drag.gamma_max(0.01, 1.5)
    with pytest.raises(ValueError, match="learning_rate=-1"):
        drag.DragTheory(-1, 5, 1.0, 0.01, 1.0, 1.0)
    with pytest.raises(TypeError, match="local_steps must be a Python int"):
        drag.BRDragTheory(2.5, 1.0, 0.5, 2.0, 0.3, 0.5)
    with pytest.raises(ValueError, match="ratio_min must be at most ratio_max"):
        drag.BRDragTheory(5, 1.0, 2.0, 0.5, 0.3, 0.5)
    with pytest.raises(ValueError, match="at most byzantine_share=0.3"):
        drag.cond51(0.5, 0.3, -0.5)
    with pytest.raises(ValueError, match="byzantine_alignment must be in"):
        drag.cond51(0.5, 0.3, -1.5)
    with pytest.raises(ValueError, match="benign_alignment must be in"):
        THEORY.eta_case2(1.2)
    setting = dict(learning_rate=0.1, local_steps=1, smoothness=1.0, strength=0.5)
    with pytest.raises(ValueError, match=r"\[A\], benign_cosines"):
        drag.descent_constants([], [0.5], [1, 2], **setting, local_variance=1.0)
    with pytest.raises(ValueError, match="form must be one of"):
        drag.descent_constants([], [0.5], [1], **setting, local_variance=1.0, form="x")


# --- rows 12 and 22: rounds in NumPy ---------------------------------------------


def divergence(updates, reference, strength):
    """DoD ``[..., S]`` and the norms of updates ``[..., S, d]`` and reference."""
    size = np.linalg.norm(updates, axis=-1)
    length = np.linalg.norm(reference, axis=-1)[..., None]
    cosine = np.sum(updates * reference[..., None, :], axis=-1) / (size * length)
    return strength * (1 - cosine), size, length


def drag_step(updates, reference, strength):
    dod, size, length = divergence(updates, reference, strength)
    pull = np.mean(dod * size / length, axis=-1, keepdims=True) * reference
    return np.mean((1 - dod)[..., None] * updates, axis=-2) + pull


def br_drag_step(updates, reference, strength):
    dod, size, length = divergence(updates, reference, strength)
    pull = np.mean(dod, axis=-1, keepdims=True) * reference
    return np.mean(((1 - dod) * length / size)[..., None] * updates, axis=-2) + pull


@given(st.integers(0, 10**6), st.integers(1, 9))
def test_row_12_oracle_strength_cancels_the_byzantine_factors(seed, attackers):
    cosines = np.random.default_rng(seed).uniform(-1, 1, attackers)
    w, x = attackers / 10, cosines.sum() / 10
    c = drag.oracle_strength(w, x, clip=False)
    assert abs(np.sum(1 - c * (1 - cosines))) < 1e-9 * c * 10
    assert (0.5 <= c <= 1) == (x <= 0)
    assert drag.oracle_strength(w, x) == min(c, 1)


def test_row_12_oracle_strength_at_its_ends():
    assert drag.oracle_strength(0.4, -0.4) == 0.5
    assert drag.oracle_strength(0.4, 0.0) == 1
    assert drag.oracle_strength(0.4, 0.4) == 1
    assert drag.oracle_strength(0.4, 0.4, clip=False) == math.inf
    assert drag.oracle_strength(0.0, 0.0, default=0.25) == 0.25
    with pytest.raises(ValueError, match="default=2"):
        drag.oracle_strength(0.0, 0.0, default=2)


@pytest.mark.parametrize("strength", [0.1, 0.25, 0.5, 1.0])
def test_row_22_robust_descent_against_any_uploads(strength):
    """At c = 1/2 half of r is certain, whatever any share of the clients uploads."""
    rng = np.random.default_rng(0)
    scale = 10.0 ** rng.uniform(-6, 6, (500, 10, 1))
    updates = rng.normal(size=(500, 10, 4)) * scale
    reference = rng.normal(size=(500, 4))
    updates[:200] -= 3 * scale[:200] * reference[:200, None]  # against it
    updates[:20] = -scale[:20] * reference[:20, None]  # all of them exactly
    step = br_drag_step(updates, reference, strength)
    square = np.sum(reference**2, axis=-1)
    along = np.sum(step * reference, axis=-1) / square
    length = np.sqrt(np.sum(step**2, axis=-1) / square)
    assert along.min() >= drag.worst_alignment(strength) - 1e-9
    assert length.max() <= drag.worst_length(strength) + 1e-9


def test_row_22_worst_rows_are_reached():
    assert drag.worst_alignment(0.5) == 0.5 and drag.worst_length(0.5) == 1
    cosine = np.linspace(-1, 1, 100_001)
    for c in (0.0, 0.1, 0.25, 0.4, 0.5, 0.8, 1.0):
        s = 1 - cosine
        along, square = cosine + c * s**2, 1 - 2 * c * s**2 * (1 - c * s)
        assert drag.worst_alignment(c) == pytest.approx(along.min(), abs=1e-8)
        assert drag.worst_length(c) == pytest.approx(math.sqrt(square.max()), abs=1e-8)


HESSIAN = np.linspace(0.1, 1, 20)


def run_drag(eta, strength, rounds, seeds=5, U=5, clients=40, sampled=10):
    """Return the mean gap at the start and the mean squared gradient of DRAG."""
    rng, d = np.random.default_rng(1), HESSIAN.size
    shift = rng.normal(size=(clients, d))
    shift -= shift.mean(axis=0)
    shift /= np.linalg.norm(shift, axis=1).max()
    theta = 2 * rng.normal(size=(seeds, d))
    gap, total, reference = np.mean(theta**2 @ HESSIAN) / 2, 0.0, None
    for _ in range(rounds):
        total += np.mean(np.sum((HESSIAN * theta) ** 2, axis=-1))
        order = np.argsort(rng.random((seeds, clients)), axis=1)[:, :sampled]
        noise = rng.normal(size=(U, seeds, sampled, d)) / math.sqrt(d)
        x = np.repeat(theta[:, None], sampled, axis=1)
        for u in range(U):
            x = x - eta * (HESSIAN * x + shift[order] + noise[u])
        updates = x - theta[:, None]
        if reference is None:
            reference = updates.mean(axis=1)
        step = drag_step(updates, reference, strength)
        theta, reference = theta + step, 0.75 * reference + 0.25 * step
    return gap, total / rounds


@pytest.mark.parametrize(
    ("strength", "eta", "rounds", "loose"),
    [
        (0.02, 0.01, 300, 8.29 / 1.02),
        (0.02, 0.002, 300, 18.96 / 4.73),
        (0.01, 0.015, 1000, 3.24 / 0.21),
        (0.04, 0.005, 2000, 28.1 / 0.30),
    ],
)
def test_row_22_theorem_1_holds_on_a_quadratic(strength, eta, rounds, loose):
    gap, measured = run_drag(eta, strength, rounds)
    bound = drag.DragTheory(eta, 5, 1.0, strength, 1.0, 1.0).bound(gap, rounds)
    assert measured <= bound
    assert 0.6 * loose < bound / measured < 1.4 * loose  # the sheet's, other seeds


@pytest.mark.parametrize("steps", [1, 2, 5, 10])
@pytest.mark.parametrize(("root", "inverse"), [(True, 3), (True, 8), (False, 8)])
def test_row_22_drift_bounds_hold_by_monte_carlo(steps, root, inverse):
    rng, d, paths = np.random.default_rng(steps), 10, 4000
    hessian, eta = np.linspace(0.1, 1, d), 1 / (inverse * steps)
    theta = rng.normal(size=d)
    shift = 0.0 if root else np.eye(d)[3]
    gradient = np.sum((hessian * theta) ** 2)
    x, worst = np.tile(theta, (paths, 1)), 0.0
    for _ in range(steps):
        noise = rng.normal(size=(paths, d)) / math.sqrt(d)
        x = x - eta * (hessian * x + shift + noise)
        worst = max(worst, np.mean(np.sum((x - theta) ** 2, axis=-1)))
    if root:
        bound = drag.root_drift(eta, steps, 1.0, gradient, 1.0)
    else:
        bound = drag.DragTheory(eta, steps, 1.0, 0.1, 1.0, 1.0).drift(gradient)
    assert worst <= bound
    assert bound < 100 * worst


def test_row_22_drift_bounds_by_hand_and_where_they_say_nothing():
    # 8 * .01^2 * 25 * 2 + 2 * .01^2 * 5 * 3 and 5 * 5 * 1e-4 * (3 + 30) + 750e-4 * 2.
    assert drag.root_drift(0.01, 5, 1.0, 2.0, 3.0) == pytest.approx(0.043)
    local = drag.DragTheory(0.01, 5, 1.0, 0.1, 3.0, 1.0).drift(2.0)
    assert local == pytest.approx(0.0825 + 0.15)
    assert drag.root_drift(0.07, 5, 1.0, 2.0, 3.0) == math.inf
    assert drag.DragTheory(0.03, 5, 1.0, 0.1, 3.0, 1.0).drift(2.0) == math.inf


@pytest.mark.parametrize("form", ["printed", "corrected"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_row_22_one_round_inequality_holds_without_noise(form, share):
    """(47) with noiseless equal clients: f falls by at least eta U D1 |grad f|^2."""
    rng, U, eta, d = np.random.default_rng(2), 5, 0.002, HESSIAN.size
    theta = rng.normal(size=d)
    reference = ((1 - eta * HESSIAN) ** U - 1) * theta
    byzantine = rng.normal(size=(round(10 * share), d)) - 3 * reference
    byzantine[: round(5 * share)] = -reference
    updates = np.concatenate([byzantine, np.tile(reference, (10 - len(byzantine), 1))])
    cosines = byzantine @ reference / np.linalg.norm(reference)
    cosines /= np.linalg.norm(byzantine, axis=1)
    strength = drag.oracle_strength(share, cosines.sum() / 10)
    after = theta + br_drag_step(updates, reference, strength)
    ones = np.ones(10 - len(byzantine))
    d1, d2 = drag.descent_constants(
        cosines,
        ones,
        ones,
        learning_rate=eta,
        local_steps=U,
        smoothness=1.0,
        strength=strength,
        local_variance=0.0,
        form=form,
    )
    before, value = (HESSIAN @ theta**2 / 2, HESSIAN @ after**2 / 2)
    square = np.sum((HESSIAN * theta) ** 2)
    assert value <= before - eta * U * d1 * square + d2
    assert d2 == 0 and 0 < before - value < before
