# SPDX-License-Identifier: Apache-2.0
r"""Noise levels and privacy budgets, on the host in float64.

Two kinds of numbers live here, and they must not be confused. *Nominal* ones are a
paper's closed formula, reproduced as printed. *Certified* ones hold for the mechanism
that is run: ``rounds`` Gaussian releases, composed exactly. All take plain numbers;
call them outside ``jit``.

Sensitivity is the largest L2 distance between the un-noised messages of one round for
two neighbouring data sets:

- one client's message clipped to norm ``C``, neighbours differ in that client's whole
  data: ``2 * C``, since two clipped vectors may point in opposite directions;
- mean over ``m`` examples, each clipped to norm ``C``, neighbours differ in one
  example: ``2 * C / m``.
"""

import functools
import math

import jax
import numpy as np

from jaxfed import _validate

__all__ = [
    "certified_epsilon",
    "certified_noise_std",
    "dwork_noise_std",
    "nominal_epsilon",
    "nominal_noise_std",
]

# Noise multipliers below this have epsilon > 1e11, where float64 no longer resolves
# the search for epsilon; "infinite" is then both true enough and on the safe side.
_SMALLEST_MULTIPLIER = 1e-6

_positive_or_inf = functools.partial(_validate.positive, finite=False)


def nominal_noise_std(
    clip_norm: float,
    epsilon: float,
    delta: float,
    rounds: int,
    *,
    sampling_rate: float = 1.0,
) -> float:
    r"""Return the noise level of the Byz-Clip21-SGD2M experiments.

    :math:`\sigma = q\,(\tau/\varepsilon)\sqrt{T \log(1/\delta)}`. The formula has no
    constant, no :math:`\log(T/\delta)` and takes ``clip_norm`` for the sensitivity, so
    the epsilon put in is *not* a guarantee: 3 is really 8.9 at ``delta=4e-4``. Report
    it beside :func:`certified_epsilon`.

    Args:
      clip_norm: clip radius tau > 0, finite, in the units of the noised vector.
      epsilon: nominal budget > 0, finite.
      delta: failure probability, 0 < delta < 1.
      rounds: number T >= 0 of noised releases.
      sampling_rate: q = batch size / local examples, 0 < q <= 1. The paper's heuristic
        for sub-sampling; leave at 1 for full participation.

    Returns:
      Standard deviation per coordinate; 0.0 if ``rounds`` is 0.

    Raises:
      TypeError: an argument is not a plain number, or ``rounds`` not an integer.
      ValueError: an argument is outside its range.

    Example:
      >>> round(nominal_noise_std(1.0, 3.0, 4e-4, 1000), 5)
      29.48455

    References:
      Islamov et al., `Byzantine-Robust and Differentially Private Federated
      Optimization under Weaker Assumptions <https://arxiv.org/abs/2603.23472>`_, 2026,
      section 6 and appendix F.3. Its literal reading adds this noise to the *mean* of
      a batch; noise on the *sum* is this value divided by the batch size, on the mean.
    """
    epsilon = _number("epsilon", epsilon, _validate.positive)
    return _nominal_product(clip_norm, delta, rounds, sampling_rate) / epsilon


def nominal_epsilon(
    noise_std: float,
    clip_norm: float,
    delta: float,
    rounds: int,
    *,
    sampling_rate: float = 1.0,
) -> float:
    r"""Return the epsilon the paper's formula gives a noise level.

    Inverse of :func:`nominal_noise_std`; not a guarantee.

    Args:
      noise_std: standard deviation per coordinate, >= 0, finite.
      clip_norm: clip radius tau > 0, finite.
      delta: failure probability, 0 < delta < 1.
      rounds: number T >= 0 of noised releases.
      sampling_rate: q = batch size / local examples, 0 < q <= 1.

    Returns:
      Nominal epsilon; 0.0 if ``rounds`` is 0, otherwise inf if ``noise_std`` is 0.

    Raises:
      TypeError: an argument is not a plain number, or ``rounds`` not an integer.
      ValueError: an argument is outside its range.

    Example:
      >>> round(nominal_epsilon(29.48455, 1.0, 4e-4, 1000), 6)
      3.0
    """
    noise_std = _number("noise_std", noise_std, _validate.nonnegative)
    product = _nominal_product(clip_norm, delta, rounds, sampling_rate)
    if product == 0:
        return 0.0
    return product / noise_std if noise_std > 0 else math.inf


def dwork_noise_std(
    sensitivity: float, epsilon: float, delta: float, rounds: int
) -> float:
    r"""Return the textbook noise level for ``rounds`` releases together.

    :math:`\sigma = (4\Delta/\varepsilon)\sqrt{T \log(1/\delta) \log(1.25\,T/\delta)}`:
    the classic Gaussian mechanism for each round under advanced composition. Its proof
    asks for epsilon < 1 and spends delta twice, once for the rounds and once for the
    composition: pass half of the delta wanted. The value is very conservative (about
    seventeen times the noise :func:`certified_noise_std` asks for in the example).

    Args:
      sensitivity: L2 sensitivity of one round, > 0, finite.
      epsilon: joint budget > 0, finite; the proof covers epsilon < 1.
      delta: failure probability, 0 < delta < 1.
      rounds: number T >= 0 of releases.

    Returns:
      Standard deviation per coordinate; 0.0 if ``rounds`` is 0.

    Raises:
      TypeError: an argument is not a plain number, or ``rounds`` not an integer.
      ValueError: an argument is outside its range.

    Example:
      >>> round(dwork_noise_std(2.0, 0.5, 1e-5, 1000), 2)
      7412.77

    References:
      Dwork and Roth, `The Algorithmic Foundations of Differential Privacy
      <https://doi.org/10.1561/0400000042>`_, 2014, theorems 3.20 and 3.22.
    """
    sensitivity = _number("sensitivity", sensitivity, _validate.positive)
    epsilon = _number("epsilon", epsilon, _validate.positive)
    delta = _delta(delta)
    rounds = _validate.count("rounds", rounds, minimum=0)
    if rounds == 0:
        return 0.0
    logs = -math.log(delta) * (math.log(1.25 * rounds) - math.log(delta))
    return 4 * sensitivity / epsilon * math.sqrt(rounds * logs)


def certified_epsilon(
    noise_std: float, sensitivity: float, delta: float, rounds: int
) -> float:
    r"""Return the epsilon that ``rounds`` Gaussian releases really spend.

    Adaptive composition of T Gaussian mechanisms is exactly one with noise multiplier
    :math:`\sigma/(\Delta\sqrt{T})`, whose smallest epsilon at ``delta`` dp-accounting
    finds from the analytic formula. Sub-sampling is not credited. Accurate to 1e-8
    relative plus 1e-11 absolute.

    Args:
      noise_std: standard deviation per coordinate, >= 0, finite.
      sensitivity: L2 sensitivity of one round, > 0; inf means unbounded.
      delta: failure probability, 0 < delta < 1.
      rounds: number T >= 0 of releases.

    Returns:
      Epsilon; 0.0 if ``rounds`` is 0, otherwise inf if ``noise_std`` is 0, if
      ``sensitivity`` is inf, or if epsilon would exceed about 1e11.

    Raises:
      TypeError: an argument is not a plain number, or ``rounds`` not an integer.
      ValueError: an argument is outside its range.
      ImportError: dp-accounting is not installed.

    Example:
      >>> noise_std = nominal_noise_std(1.0, 3.0, 4e-4, 1000)
      >>> round(certified_epsilon(noise_std, 2.0, 4e-4, 1000), 3)
      8.895

    References:
      Balle and Wang, `Improving the Gaussian Mechanism for Differential Privacy
      <https://arxiv.org/abs/1805.06530>`_, 2018, theorem 8; Dong et al., `Gaussian
      Differential Privacy <https://arxiv.org/abs/1905.02383>`_, 2022, corollary 3.3.
    """
    noise_std = _number("noise_std", noise_std, _validate.nonnegative)
    sensitivity = _number("sensitivity", sensitivity, _positive_or_inf)
    delta = _delta(delta)
    rounds = _validate.count("rounds", rounds, minimum=0)
    if rounds == 0:
        return 0.0
    multiplier = noise_std / sensitivity / math.sqrt(rounds)
    if multiplier < _SMALLEST_MULTIPLIER:
        return math.inf
    library = _dp_accounting()
    with np.errstate(divide="ignore"):  # log(0) is an answer its search relies on
        return float(library.get_epsilon_gaussian(multiplier, delta))


def certified_noise_std(
    epsilon: float, sensitivity: float, delta: float, rounds: int
) -> float:
    r"""Return the least noise for which ``rounds`` releases spend at most ``epsilon``.

    Inverse of :func:`certified_epsilon`, to 1e-7 relative for epsilon >= 1e-5, and
    never below it: ``certified_epsilon(result, ...) <= epsilon`` holds as computed,
    without a tolerance.

    Args:
      epsilon: joint budget > 0, at most 1e13.
      sensitivity: L2 sensitivity of one round, > 0, finite.
      delta: failure probability, 0 < delta < 1.
      rounds: number T >= 0 of releases.

    Returns:
      Standard deviation per coordinate; 0.0 if ``rounds`` is 0.

    Raises:
      TypeError: an argument is not a plain number, or ``rounds`` not an integer.
      ValueError: an argument is outside its range.
      ImportError: dp-accounting is not installed.

    Example:
      >>> round(certified_noise_std(8.895, 2.0, 4e-4, 1000), 2)
      29.48
    """
    epsilon = _number("epsilon", epsilon, _validate.positive)
    sensitivity = _number("sensitivity", sensitivity, _validate.positive)
    delta = _delta(delta)
    rounds = _validate.count("rounds", rounds, minimum=0)
    if rounds == 0:
        return 0.0
    if epsilon > 1e13:
        raise ValueError(
            f"epsilon must be at most 1e13, got epsilon={epsilon}: that is no privacy. "
            "Use noise 0 (epsilon=inf in a configuration)."
        )
    library = _dp_accounting()
    with np.errstate(divide="ignore"):
        multiplier = float(library.get_sigma_gaussian(epsilon, delta))
    least = multiplier * sensitivity * math.sqrt(rounds)
    # The library's root may lie a rounding error on the wrong side.
    noise_std, step = least, 1e-14
    while certified_epsilon(noise_std, sensitivity, delta, rounds) > epsilon:
        noise_std = least * (1 + step)
        step *= 2
    return noise_std


def _nominal_product(clip_norm, delta, rounds, sampling_rate):
    """Return noise_std * epsilon of the paper's formula, arguments checked."""
    clip_norm = _number("clip_norm", clip_norm, _validate.positive)
    delta = _delta(delta)
    rounds = _validate.count("rounds", rounds, minimum=0)
    rate = _number("sampling_rate", sampling_rate, _validate.positive)
    if rate > 1:
        raise ValueError(
            "sampling_rate must satisfy 0 < sampling_rate <= 1 (batch size / local "
            f"examples), got sampling_rate={rate}."
        )
    return rate * clip_norm * math.sqrt(rounds * -math.log(delta))


def _number(name, x, check):
    """Return ``x`` as a float that passed ``check(name, x)``."""
    if callable(x) or isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name} must be a plain number, got {x!r}: accounting runs on the host, "
            "outside jit, and for a constant noise level."
        )
    return float(check(name, x))


def _delta(x):
    delta = _number("delta", x, _validate.positive)
    if delta >= 1:
        raise ValueError(
            f"delta must satisfy 0 < delta < 1, got delta={delta}. Choose it below "
            "1 / (number of protected examples or clients)."
        )
    return delta


def _dp_accounting():
    try:
        import dp_accounting
    except ImportError as error:
        raise ImportError(
            "Certified privacy needs the package dp-accounting; install it with "
            'pip install "jaxfed[train]".'
        ) from error
    return dp_accounting
