# SPDX-License-Identifier: Apache-2.0
r"""What is proven of DRAG and BR-DRAG, as numbers, on the host in float64.

Notation: :math:`\eta` local step size, U local steps, L smoothness, c strength of the
degree of divergence, :math:`\sigma_L^2` variance of a client's stochastic gradient,
:math:`\sigma_G^2` largest squared distance of a client's gradient from the mean one.
For BR-DRAG, of S clients in the round: w is the share of Byzantine ones; x and y are
the cosines of the Byzantine and of the benign updates with the reference, each summed
and divided by S; every benign client has :math:`p \le \|r\|/\|g_m\| \le q`.

A bound is ``inf``, and a largest step size 0, where the theorem guarantees nothing.
That is so for DRAG at every c >= 1/21, the published settings 0.1 and 0.25 among them.

References:
  Xiao et al., `Divergence-Based Adaptive Aggregation for Byzantine Robust Federated
  Learning <https://arxiv.org/abs/2601.06903>`_, 2026. Equation numbers are its own;
  where its statements and proofs differ, the functions say which they follow.
"""

import dataclasses
import functools
import math

import numpy as np

from jaxfed import _validate
from jaxfed.theory._range import in_float64

__all__ = [
    "BRDragTheory",
    "DragTheory",
    "cond51",
    "cond51_interval",
    "descent_constants",
    "gamma_max",
    "h_constant",
    "largest_drag_step",
    "oracle_strength",
    "root_drift",
    "worst_alignment",
    "worst_length",
]


def _alignment(name, x):
    if not -1 <= x <= 1:
        raise ValueError(
            f"{name} must be in [-1, 1], got {name}={x}: it is a sum of cosines "
            "divided by the number of all clients."
        )
    return x


_share = functools.partial(_validate.unit_interval, closed_right=True)
_CHECKS = {
    "benign_alignment": _alignment,
    "byzantine_alignment": _alignment,
    "byzantine_share": _share,
    "extra": functools.partial(_validate.nonnegative, finite=False),
    "gradient_squared": _validate.nonnegative,
    "heterogeneity": _validate.nonnegative,
    "initial_gap": _validate.nonnegative,
    "learning_rate": _validate.positive,
    "local_steps": _validate.count,
    "local_variance": _validate.nonnegative,
    "ratio_max": _validate.positive,
    "ratio_min": _validate.positive,
    "rho": _validate.nonnegative,
    "rounds": _validate.count,
    "smoothness": _validate.positive,
    "step": _validate.nonnegative,
    "strength": _share,
}


def _check(**values):
    """Return the values as floats, each checked by its name."""
    checked = [float(_CHECKS[name](name, value)) for name, value in values.items()]
    if "ratio_min" in values and values["ratio_min"] > values["ratio_max"]:
        raise ValueError(
            "ratio_min must be at most ratio_max, got "
            f"ratio_min={values['ratio_min']}, ratio_max={values['ratio_max']}."
        )
    share, x = values.get("byzantine_share", 1), values.get("byzantine_alignment", 0)
    if abs(x) > share + 1e-9:
        raise ValueError(
            f"byzantine_alignment must be at most byzantine_share={share} in size, got "
            f"byzantine_alignment={x}. Divide the sum of cosines by all S clients."
        )
    return checked


# --- geometry of one round -------------------------------------------------------


@in_float64
def worst_alignment(strength) -> float:
    r"""Return the least of :math:`\langle v, r\rangle/\|r\|^2` over all uploads.

    BR-DRAG has :math:`\langle v,r\rangle/\|r\|^2 = y + c(1-y)^2` at cosine y (DRAG the
    same over :math:`\|g\|\|r\|`): at least :math:`1 - 1/(4c)` for c >= 1/4, else
    :math:`4c-1`. The mean of any rows inherits it, so at c = 1/2 the model moves by at
    least half of r along r, whatever any share of the clients uploads.

    Args:
      strength: c in [0, 1].

    Returns:
      float in [-1, 3/4].

    Raises:
      TypeError, ValueError: for another strength.
    """
    (c,) = _check(strength=strength)
    return 1 - 1 / (4 * c) if c >= 0.25 else 4 * c - 1


@in_float64
def worst_length(strength) -> float:
    r"""Return the largest :math:`\|v\|/\|r\|` of BR-DRAG over all uploads.

    :math:`\|v\|^2/\|r\|^2 = 1 - 2cs^2(1-cs)` at s = 1 - cosine (DRAG: relative to
    :math:`\|g\|`), so at most :math:`\max(1, (4c-1)^2)`. Appendix B's "at most 1" holds
    for c <= 1/2 only.

    Args:
      strength: c in [0, 1].

    Returns:
      float in [1, 3].

    Raises:
      TypeError, ValueError: for another strength.
    """
    (c,) = _check(strength=strength)
    return max(1.0, 4 * c - 1)


@in_float64
def oracle_strength(
    byzantine_share, byzantine_alignment, *, default=0.5, clip=True
) -> float:
    r"""Return the strength :math:`c = w/(w-x)` of theorem 2, case 1.

    The Byzantine rows' factors then cancel: :math:`\sum_{\mathcal A}(1-h_m) = 0`. It
    needs to know who is Byzantine: for tests only. In [1/2, 1] iff x <= 0.

    Args:
      byzantine_share: w in [0, 1].
      byzantine_alignment: x in [-w, w].
      default: returned if w = 0.
      clip: limit the result to 1; needed for x > 0.

    Returns:
      float; 1 (``clip``) or inf at x = w.

    Raises:
      TypeError, ValueError: for arguments out of range.
    """
    w, x = _check(
        byzantine_share=byzantine_share, byzantine_alignment=byzantine_alignment
    )
    if w == 0:
        return float(_validate.unit_interval("default", default, closed_right=True))
    c = w / (w - x) if x < w else math.inf
    return min(c, 1.0) if clip else c


# --- theorem 1: DRAG -------------------------------------------------------------


@in_float64
def gamma_max(step, strength) -> float:
    r"""Return the right side of (34), which gamma must stay below.

    With :math:`a = \eta LU`:
    :math:`(1-3c)/2 - (3c + a/2)(90a^2+3) - 15(1-c)a^2`. Theorem 1 needs it positive,
    hence c < 1/21; its condition a <= 1/8 is not enough, even at c = 0.

    Args:
      step: a >= 0.
      strength: c in [0, 1].

    Returns:
      float; nothing is guaranteed unless it is positive.

    Raises:
      TypeError, ValueError: for arguments out of range.
    """
    a, c = _check(step=step, strength=strength)
    return (1 - 3 * c) / 2 - (3 * c + a / 2) * (90 * a**2 + 3) - 15 * (1 - c) * a**2


@in_float64
def largest_drag_step(strength) -> float:
    r"""Return the supremum of the :math:`\eta LU` for which theorem 1 says anything.

    Args:
      strength: c in [0, 1].

    Returns:
      The zero of :func:`gamma_max`, at most 0.12367; 0.0 if c >= 1/21.

    Raises:
      TypeError, ValueError: for another strength.
    """
    low, high = 0.0, 0.125
    if gamma_max(low, strength) <= 1e-15:  # 0 at c = 1/21 but for rounding
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        if gamma_max(middle, strength) > 0:
            low = middle
        else:
            high = middle
    return low


@dataclasses.dataclass(frozen=True)
class DragTheory:
    r"""Theorem 1 for one setting of DRAG.

    Bounds hold for every gamma below :attr:`gamma`, so also at it.

    Attributes:
      learning_rate: eta > 0 of the local steps.
      local_steps: U >= 1.
      smoothness: L > 0 of every client's loss.
      strength: c in [0, 1].
      local_variance: :math:`\sigma_L^2 \ge 0`.
      heterogeneity: :math:`\sigma_G^2 \ge 0`.

    Raises:
      TypeError, ValueError: for arguments out of range.

    Example:
      >>> round(DragTheory(0.01, 5, 1.0, 0.01, 1.0, 1.0).v_proof, 5)
      0.83235
      >>> DragTheory(0.01, 5, 1.0, 0.25, 1.0, 1.0).v_proof
      inf
    """

    learning_rate: float
    local_steps: int
    smoothness: float
    strength: float
    local_variance: float
    heterogeneity: float

    def __post_init__(self):
        _check(**vars(self))

    @property
    @in_float64
    def gamma(self) -> float:
        """:func:`gamma_max`: nothing is guaranteed unless it is positive."""
        step = self.learning_rate * self.smoothness * self.local_steps
        return gamma_max(step, self.strength)

    @property
    @in_float64
    def c1(self) -> float:
        r""":math:`90U^4L^2\eta^2 + 3U^2` (32)."""
        eta, U, L = self.learning_rate, self.local_steps, self.smoothness
        return 90 * U**4 * L**2 * eta**2 + 3 * U**2

    @property
    @in_float64
    def c2(self) -> float:
        r""":math:`15U^3L^2\eta^2(\sigma_L^2+6U\sigma_G^2) + 3U^2\sigma_G^2` (32)."""
        eta, U, L = self.learning_rate, self.local_steps, self.smoothness
        return 15 * U**3 * L**2 * eta**2 * self._drift + 3 * U**2 * self.heterogeneity

    @property
    @in_float64
    def c3(self) -> float:
        r"""The error of one round (33).

        :math:`2c\eta\sigma_L^2 + \frac{\eta^2UL}2\sigma_L^2 + (\frac{3c\eta}U +
        \frac{\eta^2L}2)C_2 + \frac{5(1-c)}2\eta^3L^2U^2(\sigma_L^2+6U\sigma_G^2)`.
        """
        eta, U, L = self.learning_rate, self.local_steps, self.smoothness
        c, local = self.strength, self.local_variance
        first = 2 * c * eta * local + eta**2 * U * L / 2 * local
        second = (3 * c * eta / U + eta**2 * L / 2) * self.c2
        return first + second + 2.5 * (1 - c) * eta**3 * L**2 * U**2 * self._drift

    @property
    @in_float64
    def v_proof(self) -> float:
        r""":math:`C_3/(\gamma\eta U)` (35), what the proof shows; inf without one."""
        return self._per_progress(self.c3)

    @property
    @in_float64
    def v_printed(self) -> float:
        """V as theorem 1 prints it; the proof's only if U = 1."""
        return self._v(9, 2)

    @property
    @in_float64
    def v_fixed(self) -> float:
        r"""V with :math:`9U\sigma_G^2` and :math:`\eta^2UL/2`: equal to the proof's."""
        return self._v(9 * self.local_steps, 1)

    @in_float64
    def bound(self, initial_gap, rounds) -> float:
        r"""Bound :math:`\frac1T\sum_t E\|\nabla f(\theta^t)\|^2` after T rounds (21).

        :math:`(f(\theta^0)-f^*)/(\gamma\eta UT) + V` with ``v_proof``; V has a part of
        order c that no step size removes. Inf where nothing is guaranteed.
        """
        gap, T = _check(initial_gap=initial_gap, rounds=rounds)
        return self._per_progress(gap / T) + self.v_proof

    @in_float64
    def drift(self, gradient_squared) -> float:
        r"""Bound :math:`E\|\theta_m^{t,u}-\theta^t\|^2`, 1 <= u <= U, of a client.

        :math:`5U\eta^2(\sigma_L^2+6U\sigma_G^2) + 30U^2\eta^2\|\nabla f(\theta^t)\|^2`,
        the lemma that appendix A imports; inf if eta > 1/(8LU).
        """
        (gradient,) = _check(gradient_squared=gradient_squared)
        eta, U = self.learning_rate, self.local_steps
        if eta * U * self.smoothness > 1 / 8 + 1e-12:
            return math.inf
        return 5 * U * eta**2 * self._drift + 30 * U**2 * eta**2 * gradient

    @property
    def _drift(self):
        return self.local_variance + 6 * self.local_steps * self.heterogeneity

    def _per_progress(self, x):
        gamma = self.gamma
        if gamma <= 0:
            return math.inf
        return x / (gamma * self.learning_rate * self.local_steps)

    def _v(self, nine, power):
        """V, given the two places where the theorem and its proof differ."""
        eta, U, L = self.learning_rate, self.local_steps, self.smoothness
        c, local, between = self.strength, self.local_variance, self.heterogeneity
        first = c * eta * (2 * local + nine * between)
        second = eta**2 * U**power * L / 2 * (local + 3 * U * between)
        third = eta**3 * U**2 * L**2 * (85 * c + 5) / 2 + 7.5 * eta**4 * U**3 * L**3
        return self._per_progress(first + second + third * self._drift)


# --- theorem 2: BR-DRAG ----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BRDragTheory:
    r"""Theorem 2 for one setting of BR-DRAG.

    Its proof drops a factor L/2 (see :func:`descent_constants`), so it holds for
    L <= 2, equal client losses and a root set whose gradients are unbiased. Case 1 is
    the oracle's strength (:func:`oracle_strength`); case 2 any strength that
    :func:`cond51` admits, and adds :func:`h_constant`.

    Attributes:
      local_steps: U >= 1.
      smoothness: L > 0.
      ratio_min: p > 0.
      ratio_max: q >= p.
      byzantine_share: largest w of the rounds.
      strength: largest c of the rounds, in [0, 1].

    Raises:
      TypeError, ValueError: for arguments out of range.

    Example:
      >>> theory = BRDragTheory(5, 1.0, 0.5, 2.0, 0.3, 0.5)
      >>> round(theory.eta_case1, 10), round(theory.eta_case2(0.2), 10)
      (0.0007142857, 0.0009655172)
    """

    local_steps: int
    smoothness: float
    ratio_min: float
    ratio_max: float
    byzantine_share: float
    strength: float

    def __post_init__(self):
        _check(**vars(self))

    @property
    @in_float64
    def eta_case1(self) -> float:
        r"""The largest step size, :math:`(1-w)(1-c)p / (32U + 2UL^2(p+2q^2))`."""
        U, L, p, q, w, c = dataclasses.astuple(self)
        return (1 - w) * (1 - c) * p / (32 * U + 2 * U * L**2 * (p + 2 * q**2))

    @in_float64
    def eta_case2(self, benign_alignment) -> float:
        r"""Return :math:`2c(1-c)(1-w)(1-w-y)p / (32pU + cUL^2(p^2+q^2))` at y.

        0 where it is negative. The bound on the drift also needs eta <= 1/(3UL).
        """
        U, L, p, q, w, c = dataclasses.astuple(self)
        (y,) = _check(benign_alignment=benign_alignment)
        top = 2 * c * (1 - c) * (1 - w) * max(1 - w - y, 0.0) * p
        return top / (32 * p * U + c * U * L**2 * (p**2 + q**2))

    @in_float64
    def chi(self, learning_rate) -> float:
        r"""Return the right side of (48), which chi must stay below.

        :math:`(1-w)(1-c)p/2 - 8\eta U - 4\eta^2U^2L^2q^2/((1-c)p) -
        4c(1+w)L^2\eta^2U^2`, the least over the rounds (the theorem prints the
        largest); -inf at c = 1. Nothing is guaranteed unless it is positive.
        """
        U, L, p, q, w, c = dataclasses.astuple(self)
        (eta,) = _check(learning_rate=learning_rate)
        if c == 1:
            return -math.inf
        step = 4 * (eta * U * L) ** 2
        loss = 8 * eta * U + step * q**2 / ((1 - c) * p) + c * (1 + w) * step
        return (1 - w) * (1 - c) * p / 2 - loss

    @in_float64
    def neighbourhood(self, learning_rate, local_variance, *, extra=0.0) -> float:
        r"""Return W, the error that stays after any number of rounds.

        :math:`(2\eta\sigma_L^2/\chi)[(1+w)c\eta UL^2/2 + \eta UL^2q^2/(2(1-c)p) + 1 +
        H]`, H = ``extra``: 0 in case 1, :func:`h_constant` in case 2. Inf unless
        :meth:`chi` is positive.
        """
        U, L, p, q, w, c = dataclasses.astuple(self)
        chi = self.chi(learning_rate)
        eta, variance, more = _check(
            learning_rate=learning_rate, local_variance=local_variance, extra=extra
        )
        if chi <= 0:
            return math.inf
        bracket = eta * U * L**2 / 2 * ((1 + w) * c + q**2 / ((1 - c) * p)) + 1 + more
        return 2 * eta * variance / chi * bracket

    @in_float64
    def bound(
        self, initial_gap, rounds, learning_rate, local_variance, *, extra=0.0
    ) -> float:
        r"""Bound :math:`\frac1T\sum_t E\|\nabla f(\theta^t)\|^2` (24), (25).

        :math:`(f(\theta^0)-f^*)/(\chi\eta UT) + W`; inf where nothing is guaranteed.
        """
        gap, T = _check(initial_gap=initial_gap, rounds=rounds)
        rest = self.neighbourhood(learning_rate, local_variance, extra=extra)
        if rest == math.inf:
            return math.inf
        progress = self.chi(learning_rate) * learning_rate * self.local_steps
        return gap / (progress * T) + rest


@in_float64
def h_constant(
    learning_rate,
    local_steps,
    byzantine_share,
    strength,
    byzantine_alignment,
    *,
    squared=False,
) -> float:
    r"""Return H, what theorem 2, case 2, adds to the bracket of W.

    :math:`|w(1-c)+cx| / (2c\eta U(w-x))` as the theorem prints it; (52) of the proof
    has the numerator squared, which is smaller. Take the largest over the rounds. It
    grows like 1/eta.

    Args:
      learning_rate: eta > 0.
      local_steps: U >= 1.
      byzantine_share: w.
      strength: c in [0, 1].
      byzantine_alignment: x in [-w, w].
      squared: the form of (52).

    Returns:
      float; 0.0 if the numerator is 0, else inf if the denominator is.

    Raises:
      TypeError, ValueError: for arguments out of range.
    """
    eta, U, w, c, x = _check(
        learning_rate=learning_rate,
        local_steps=local_steps,
        byzantine_share=byzantine_share,
        strength=strength,
        byzantine_alignment=byzantine_alignment,
    )
    top, bottom = abs(w * (1 - c) + c * x), 2 * c * eta * U * (w - x)
    if top == 0:
        return 0.0
    return top ** (2 if squared else 1) / bottom if bottom > 0 else math.inf


@in_float64
def cond51_interval(
    byzantine_share, byzantine_alignment, rho=0.0
) -> tuple[float, float] | None:
    r"""Return the strengths that condition (51) of theorem 2, case 2, admits.

    :math:`(\rho^2 - 7w + 8x - 1)c^2 + (15w+1)c \ge 8w^2/(w-x)`, an interval of [0, 1].

    Args:
      byzantine_share: w.
      byzantine_alignment: x in [-w, w].
      rho: :math:`\frac1S\sum_{\mathcal B} y_m\|r\|/\|g_m\| \ge 0`.

    Returns:
      ``(lowest, highest)``, or None if no strength is admitted.

    Raises:
      TypeError, ValueError: for arguments out of range.

    Example:
      >>> [round(c, 4) for c in cond51_interval(0.3, -0.3)]
      [0.3216, 0.6784]
    """
    w, x, rho = _check(
        byzantine_share=byzantine_share,
        byzantine_alignment=byzantine_alignment,
        rho=rho,
    )
    if w > 0 and x >= w:
        return None
    a, b = rho**2 - 7 * w + 8 * x - 1, 15 * w + 1
    right = 8 * w**2 / (w - x) if w else 0.0
    # Of the two zeros this one is written without a division by a, which may be 0.
    root = b**2 + 4 * a * right
    if root < 0:
        return None
    root = math.sqrt(root)
    lowest = 2 * right / (b + root)
    highest = (b + root) / (-2 * a) if a < 0 else math.inf
    return (lowest, min(highest, 1.0)) if lowest <= 1 else None


@in_float64
def cond51(strength, byzantine_share, byzantine_alignment, rho=0.0) -> bool:
    """Return whether condition (51) of theorem 2, case 2, admits a strength.

    Args:
      strength: c in [0, 1].
      byzantine_share: w.
      byzantine_alignment: x in [-w, w].
      rho: as for :func:`cond51_interval`.

    Returns:
      bool.

    Raises:
      TypeError, ValueError: for arguments out of range.
    """
    (c,) = _check(strength=strength)
    interval = cond51_interval(byzantine_share, byzantine_alignment, rho)
    return interval is not None and (interval[0] - 1e-12 <= c <= interval[1] + 1e-12)


@in_float64
def descent_constants(
    byzantine_cosines,
    benign_cosines,
    benign_ratios,
    *,
    learning_rate,
    local_steps,
    smoothness,
    strength,
    local_variance,
    form="printed",
) -> tuple[float, float]:
    r"""Return D1 and D2 of BR-DRAG's one-round inequality (47).

    :math:`E f(\theta^{t+1}) \le f(\theta^t) - \eta U D_1\|\nabla f\|^2 + D_2`. With
    S clients, :math:`b_m=(1-c(1-y_m))\rho_m`, b their sum over the benign divided by S,
    :math:`\delta=c(w-x)\eta U`, :math:`\kappa=c(1-w-y)\eta U` and
    :math:`A=\|\frac1S\sum_{\mathcal A}(1-h_m)\|^2`, :math:`h_m=c(1-x_m)`:

    - :math:`D_1 = \kappa/(2\eta U) + b/2 - 8\eta U - 4(\delta+\kappa)\eta UL^2 -
      4\eta^2U^2L^2\sum b_m^2/(bS) - 4\eta UA/\delta`,
    - :math:`D_2 = 2\eta^2U\sigma_L^2[(\delta+\kappa)L^2/2 + A/(2\delta) +
      \eta UL^2\sum b_m^2/(2bS) + 1]`.

    Appendix B drops L/2 before :math:`E\|\Delta\|^2`, which is safe for L <= 2;
    ``form="corrected"`` has :math:`4L\eta U` for :math:`8\eta U` and L/2 for the 1.

    Args:
      byzantine_cosines: :math:`x_m` of the Byzantine clients, ``[A]``, may be empty.
      benign_cosines: :math:`y_m` of the benign clients, ``[B]``.
      benign_ratios: :math:`\rho_m = \|r\|/\|g_m\|` of the same, ``[B]``.
      learning_rate: eta > 0.
      local_steps: U >= 1.
      smoothness: L > 0.
      strength: c in [0, 1].
      local_variance: :math:`\sigma_L^2 \ge 0`.
      form: ``"printed"`` or ``"corrected"``.

    Returns:
      ``(D1, D2)``; ``(-inf, inf)`` where a denominator vanishes.

    Raises:
      TypeError, ValueError: for arguments out of range.
    """
    eta, U, L, c, variance = _check(
        learning_rate=learning_rate,
        local_steps=local_steps,
        smoothness=smoothness,
        strength=strength,
        local_variance=local_variance,
    )
    _validate.choice("form", form, ("printed", "corrected"))
    x, y, ratio = (
        np.asarray(a, np.float64)
        for a in (byzantine_cosines, benign_cosines, benign_ratios)
    )
    if x.ndim != 1 or y.ndim != 1 or y.shape != ratio.shape or not x.size + y.size:
        raise ValueError(
            "byzantine_cosines must be [A], benign_cosines and benign_ratios [B], with "
            f"A + B >= 1, got shapes {x.shape}, {y.shape} and {ratio.shape}."
        )
    S = x.size + y.size
    factors = (1 - c * (1 - y)) * ratio
    b = factors.sum() / S
    delta, kappa = c * np.sum(1 - x) / S * eta * U, c * np.sum(1 - y) / S * eta * U
    attack = (np.sum(1 - c * (1 - x)) / S) ** 2
    if b <= 0 or (attack > 0 and delta == 0):
        return -math.inf, math.inf
    attack = attack / delta if attack > 0 else 0.0
    spread = np.sum(factors**2) / (b * S)
    moved = L / 2 if form == "corrected" else 1.0
    d1 = kappa / (2 * eta * U) + b / 2 - 8 * moved * eta * U
    d1 -= 4 * (delta + kappa) * eta * U * L**2
    d1 -= 4 * (eta * U * L) ** 2 * spread + 4 * eta * U * attack
    d2 = (delta + kappa) * L**2 / 2 + attack / 2 + eta * U * L**2 / 2 * spread + moved
    return float(d1), float(2 * eta**2 * U * variance * d2)


@in_float64
def root_drift(
    learning_rate, local_steps, smoothness, gradient_squared, local_variance
) -> float:
    r"""Bound :math:`E\|\theta^{t,u}-\theta^t\|^2` of the server's root steps (46).

    :math:`8\eta^2U^2\|\nabla f(\theta^t)\|^2 + 2\eta^2U\sigma_L^2` for 1 <= u <= U.

    Args:
      learning_rate: eta > 0.
      local_steps: U >= 1.
      smoothness: L > 0.
      gradient_squared: :math:`E\|\nabla f(\theta^t)\|^2`.
      local_variance: :math:`\sigma_L^2 \ge 0`.

    Returns:
      float; inf if eta > 1/(3LU).

    Raises:
      TypeError, ValueError: for arguments out of range.
    """
    eta, U, L, gradient, variance = _check(
        learning_rate=learning_rate,
        local_steps=local_steps,
        smoothness=smoothness,
        gradient_squared=gradient_squared,
        local_variance=local_variance,
    )
    if eta * L * U > 1 / 3 * (1 + 1e-12):
        return math.inf
    return 8 * (eta * U) ** 2 * gradient + 2 * eta**2 * U * variance
