# SPDX-License-Identifier: Apache-2.0
r"""Noise multipliers :math:`z = \sigma/\Delta` of T Gaussian releases, and back.

:math:`\Delta` is the L2 sensitivity of one release and :math:`\sigma` its noise per
coordinate; if both vary over the rounds, only their ratio, kept constant, counts. With
:math:`\ell = \log(1/\delta)`, four calibrations, from the least noise to the most
wherever all of them hold:

================  ==============================================  =====================
mode              noise multiplier                                holds
================  ==============================================  =====================
``"exact"``       :func:`jaxfed.privacy.certified_noise_std`      always
``"rdp"``         :math:`\sqrt{T/2}/(\sqrt{\ell+\varepsilon}      always
                  -\sqrt\ell)` [1, Eq. 21]
``"closed_form"`` :math:`2\sqrt{2T\ell}/\varepsilon`              :math:`\varepsilon
                  [1, Thm. 2]                                     \le 8\ell`
``"safe_dgd"``    :math:`\sqrt{2T\ell}/\varepsilon`               while
                  [2, Thm. 2.1]                                   :math:`\varepsilon`
                                                                  is moderate
================  ==============================================  =====================

(The last lies below ``"rdp"``: it is nominal, and fails from about
:math:`\varepsilon = 8` on at :math:`\delta = 10^{-5}`.) No mode credits sub-sampling;
:mod:`jaxfed.privacy.composition` does. All run on the host in float64.

References:
  [1] Xiang et al., `Optimal Byzantine-resilient Federated Learning with User-level
  Differential Privacy <https://arxiv.org/abs/2611.10898>`_, 2026; [2] Boudou et al.,
  Unveiling the Non-Monotonic Effect of Privacy on Generalization under Byzantine
  Robustness, 2026.
"""

import math

from jaxfed import _validate
from jaxfed.privacy import accounting

__all__ = [
    "MODES",
    "epsilon",
    "exact_delta",
    "noise_multiplier",
    "optimal_order",
    "renyi_divergence",
]

MODES = ("exact", "rdp", "closed_form", "safe_dgd")


def noise_multiplier(epsilon, delta, rounds, *, mode="exact") -> float:
    r"""Return :math:`\sigma/\Delta` for which ``rounds`` releases spend ``epsilon``.

    See the table above. For the printed Safe-DGD noise,
    :math:`2C\sqrt{2T\ell}/(m\varepsilon)`, multiply ``mode="safe_dgd"`` by the
    sensitivity :math:`2C/m`.

    Args:
      epsilon: joint budget > 0, finite.
      delta: failure probability, 0 < delta < 1.
      rounds: number T >= 0 of releases.
      mode: ``"exact"``, ``"rdp"``, ``"closed_form"`` or ``"safe_dgd"``.

    Returns:
      Noise multiplier; 0.0 if ``rounds`` is 0.

    Raises:
      TypeError: an argument is not a plain number, or ``rounds`` not an integer.
      ValueError: an argument is outside its range, or the closed form does not give
        (epsilon, delta) there.
      ImportError: dp-accounting is not installed (``mode="exact"``).

    Example:
      >>> round(noise_multiplier(10, 1e-4, 800, mode="closed_form"), 4)
      24.2788
    """
    epsilon = accounting._number("epsilon", epsilon, _validate.positive)
    log, rounds = _checked(delta, rounds, mode)
    if mode == "exact":
        return accounting.certified_noise_std(epsilon, 1.0, delta, rounds)
    if mode == "rdp":
        # The same as in the table, without its cancellation.
        total = math.sqrt(log + epsilon) + math.sqrt(log)
        return math.sqrt(rounds / 2) * total / epsilon
    multiplier = math.sqrt(2 * rounds * log) / epsilon
    if mode == "closed_form":
        _closed_form_holds(epsilon, log)
        return 2 * multiplier
    if rounds and exact_delta(multiplier, epsilon, rounds) > delta:
        raise ValueError(
            f"mode='safe_dgd' does not give epsilon={epsilon} at delta={delta}: its "
            f"noise has delta={exact_delta(multiplier, epsilon, rounds):.2g}. Use "
            "mode='exact', or lower epsilon."
        )
    return multiplier


def epsilon(noise_multiplier, delta, rounds, *, mode="exact") -> float:
    r"""Return the epsilon of ``rounds`` releases, the inverse of the calibration.

    ``"rdp"`` is :math:`T/(2z^2)+\sqrt{2T\ell}/z`. ``"safe_dgd"`` is nominal: it is
    returned also where it is no guarantee, to be reported beside ``"exact"``.

    Args:
      noise_multiplier: z >= 0, finite.
      delta: failure probability, 0 < delta < 1.
      rounds: number T >= 0 of releases.
      mode: as in :func:`noise_multiplier`.

    Returns:
      Epsilon; 0.0 if ``rounds`` is 0, otherwise inf if ``noise_multiplier`` is 0.

    Raises:
      TypeError: an argument is not a plain number, or ``rounds`` not an integer.
      ValueError: an argument is outside its range, or ``mode="closed_form"`` beyond
        its theorem.
      ImportError: dp-accounting is not installed (``mode="exact"``).

    Example:
      >>> round(epsilon(24.2788, 1e-4, 800, mode="rdp"), 4)
      5.6786
    """
    z = accounting._number("noise_multiplier", noise_multiplier, _validate.nonnegative)
    log, rounds = _checked(delta, rounds, mode)
    if mode == "exact":
        return accounting.certified_epsilon(z, 1.0, delta, rounds)
    if rounds == 0:
        return 0.0
    if z == 0:
        return math.inf
    slope = math.sqrt(2 * rounds * log) / z
    if mode == "rdp":
        return rounds / (2 * z) / z + slope
    if mode == "closed_form":
        _closed_form_holds(2 * slope, log)
        return 2 * slope
    return slope


def exact_delta(noise_multiplier, epsilon, rounds) -> float:
    r"""Return the smallest delta at which ``rounds`` releases are epsilon-private.

    With :math:`\mu = \sqrt T/z`, exactly :math:`\Phi(\mu/2-\varepsilon/\mu) -
    e^\varepsilon\,\Phi(-\mu/2-\varepsilon/\mu)`.

    Args:
      noise_multiplier: z >= 0, finite.
      epsilon: budget >= 0, finite.
      rounds: number T >= 0 of releases.

    Returns:
      Delta in [0, 1]; 0.0 if ``rounds`` is 0, otherwise 1.0 if z is 0.

    Raises:
      TypeError: an argument is not a plain number, or ``rounds`` not an integer.
      ValueError: an argument is outside its range.

    References:
      Balle and Wang, `<https://arxiv.org/abs/1805.06530>`_, 2018, theorem 8.
    """
    z = accounting._number("noise_multiplier", noise_multiplier, _validate.nonnegative)
    epsilon = accounting._number("epsilon", epsilon, _validate.nonnegative)
    from scipy.special import log_ndtr, ndtr  # slow to import

    if _validate.count("rounds", rounds, minimum=0) == 0:
        return 0.0
    if z == 0:
        return 1.0
    mu = math.sqrt(rounds) / z
    # exp(epsilon) alone may overflow.
    second = math.exp(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)))
    return max(float(ndtr(mu / 2 - epsilon / mu)) - second, 0.0)


def renyi_divergence(order, noise_multiplier, rounds) -> float:
    r"""Return :math:`Ta/(2z^2)`, the Rényi-DP of order a of ``rounds`` releases.

    It gives :math:`(Ta/(2z^2) + \log(1/\delta)/(a-1),\, \delta)`-privacy, which
    ``mode="rdp"`` minimises over a.

    Args:
      order: a > 1, finite.
      noise_multiplier: z > 0, finite.
      rounds: number T >= 0 of releases.

    Returns:
      float.

    Raises:
      TypeError: an argument is not a plain number, or ``rounds`` not an integer.
      ValueError: an argument is outside its range.

    References:
      Xiang et al., `<https://arxiv.org/abs/2611.10898>`_, 2026, Lemmas F.6 to F.8.
    """
    order = accounting._number("order", order, _validate.positive)
    if order <= 1:
        raise ValueError(f"order must be > 1, got order={order}.")
    z = accounting._number("noise_multiplier", noise_multiplier, _validate.positive)
    return _validate.count("rounds", rounds, minimum=0) * order / (2 * z) / z


def optimal_order(noise_multiplier, delta, rounds) -> float:
    r"""Return :math:`1 + z\sqrt{2\ell/T}`, the order ``mode="rdp"`` ends at.

    Args:
      noise_multiplier: z > 0, finite.
      delta: failure probability, 0 < delta < 1.
      rounds: number T >= 1 of releases.

    Returns:
      float > 1.

    Raises:
      TypeError: an argument is not a plain number, or ``rounds`` not an integer.
      ValueError: an argument is outside its range.
    """
    z = accounting._number("noise_multiplier", noise_multiplier, _validate.positive)
    log = -math.log(accounting._delta(delta))
    return 1 + z * math.sqrt(2 * log / _validate.count("rounds", rounds))


def _checked(delta, rounds, mode):
    """Return log(1/delta) and the rounds, arguments checked."""
    _validate.choice("mode", mode, MODES)
    log = -math.log(accounting._delta(delta))
    return log, _validate.count("rounds", rounds, minimum=0)


def _closed_form_holds(epsilon, log):
    if epsilon > 8 * log * (1 + 1e-12):
        raise ValueError(
            "mode='closed_form' needs epsilon <= 8 log(1/delta) = "
            f"{8 * log:.6g}, got epsilon={epsilon:.6g}. Use mode='rdp' or 'exact'."
        )
