# SPDX-License-Identifier: Apache-2.0
r"""ByzULDP: schedules, step sizes, bounds and hard instances.

Source of all: Xiang et al., `Optimal Byzantine-resilient Federated Learning with
User-level Differential Privacy <https://arxiv.org/abs/2611.10898>`_, 2026. L is the
smoothness of each :math:`F_i`, :math:`\mu` their strong convexity, and honest clients
(the set :math:`\mathcal G`) satisfy, with slope B and heterogeneity G,

.. math:: \tfrac{1}{|\mathcal G|} \sum_{\mathcal G} \|\nabla F_i - \nabla F\|^2
          \le B^2 \|\nabla F\|^2 + G^2 .

Where the paper's constants do not follow from its proof, ``form="printed"`` gives
them as printed and ``form="sound"`` as proven. The theory assumes that the clip is
never active.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxfed import _validate, robustness
from jaxfed.theory._range import in_float64

__all__ = [
    "Instance",
    "Schedules",
    "aggregation_error_bound",
    "descent_bound",
    "dispersion_bound",
    "gradient_bound",
    "kappa_cwtm",
    "kappa_sandwich",
    "lower_bound",
    "lower_bound_instance",
    "non_convex",
    "slope_limit",
    "stationary_variance",
    "step_size",
    "strongly_convex",
]

FORMS = ("sound", "printed")

# Weights of new vectors in units of eta L: client and server momentum.
_STRONGLY_CONVEX = 4900, 55
_K1, _K2 = 5100, 50


class Schedules(NamedTuple):
    """What ByzULDP is given, each a callable of the round t (int or traced).

    Attributes:
      learning_rate: eta_t.
      momentum: alpha_t, the weight a client keeps.
      server_momentum: beta_t, the weight the server keeps.
    """

    learning_rate: Callable
    momentum: Callable
    server_momentum: Callable


@in_float64
def strongly_convex(smoothness, strong_convexity, *, a=49_000.0) -> Schedules:
    r"""Return the decaying schedules of Theorem 3.

    :math:`\eta_t = 10/(\mu(t + aL/\mu))`, :math:`1-\alpha_t = 4900\,\eta_t L`,
    :math:`1-\beta_t = 55\,\eta_t L`. The noise must follow: its ratio to
    :math:`1-\beta_t` is constant.

    Args:
      smoothness: L > 0, finite.
      strong_convexity: mu, ``0 < mu <= L``.
      a: delay, at least 49000; below it the first client momentum would be negative.

    Returns:
      Schedules, of plain numbers for an int and of scalars for a traced t.

    Raises:
      ValueError: for values out of these ranges.

    Example:
      >>> schedules = strongly_convex(1.0, 1.0)
      >>> round(schedules.momentum(10**6), 7)
      0.9532888

    References:
      `<https://arxiv.org/abs/2611.10898>`_, Theorems 3 and G.5. The proof asks for
      eta_t <= 1/(49000 L) in one place, which eta_0 = 1/(4900 L) violates.
    """
    _validate.positive("smoothness", smoothness)
    _validate.positive("strong_convexity", strong_convexity)
    ratio = strong_convexity / smoothness
    if ratio > 1:
        raise ValueError(
            "strong_convexity must be at most smoothness, got strong_convexity="
            f"{strong_convexity}, smoothness={smoothness}. Swap them?"
        )
    _validate.positive("a", a)
    client, server = (10 * k for k in _STRONGLY_CONVEX)
    if a < client:
        raise ValueError(
            f"a must be at least {client}, got a={a}: client momentum would start at "
            f"{1 - client / a:.3g} < 0. Raise a."
        )
    return Schedules(
        lambda t: 10 / smoothness / (a + ratio * t),
        lambda t: 1 - client / (a + ratio * t),
        lambda t: 1 - server / (a + ratio * t),
    )


@in_float64
def non_convex(smoothness, learning_rate) -> Schedules:
    r"""Return the constant schedules of Theorem 4.

    :math:`\eta`, :math:`1-\alpha = 5100\,\eta L`, :math:`1-\beta = 50\,\eta L`.

    Args:
      smoothness: L > 0, finite.
      learning_rate: eta, ``0 < eta <= 1/(5100 L)`` (the paper: strictly; at the limit
        clients have no momentum, and the bound holds by continuity).

    Returns:
      Schedules.

    Raises:
      ValueError: for values out of these ranges.

    References:
      `<https://arxiv.org/abs/2611.10898>`_, Theorems 4 and G.6.
    """
    _validate.positive("smoothness", smoothness)
    _validate.positive("learning_rate", learning_rate)
    rate = learning_rate * smoothness
    if _K1 * rate > 1 + 1e-12:
        raise ValueError(
            f"learning_rate must be at most 1/({_K1} smoothness) = "
            f"{1 / (_K1 * smoothness):.6g}, got learning_rate={learning_rate}: client "
            "momentum would be negative. Lower it."
        )
    alpha, beta = max(1 - _K1 * rate, 0.0), 1 - _K2 * rate
    return Schedules(lambda t: learning_rate, lambda t: alpha, lambda t: beta)


@in_float64
def slope_limit(kappa, *, objective) -> float:
    r"""Return the largest :math:`B^2` the theorems allow.

    Theorem 3: :math:`1/(600\kappa)`, whose proof needs :math:`1/(196000\kappa)`
    (``"strongly_convex_proof"``); Theorem 4: :math:`1/(23625\kappa)`.

    Args:
      kappa: robustness coefficient of the rule, >= 0.
      objective: ``"strongly_convex"``, ``"strongly_convex_proof"`` or
        ``"non_convex"``.

    Returns:
      float, inf if ``kappa`` is 0.

    Raises:
      ValueError: for other arguments.
    """
    _validate.nonnegative("kappa", kappa)
    limits = {
        "strongly_convex": 600,
        "strongly_convex_proof": 196_000,
        "non_convex": 23_625,
    }
    _validate.choice("objective", objective, tuple(limits))
    return 1 / (limits[objective] * kappa) if kappa else math.inf


@in_float64
def gradient_bound(
    learning_rate,
    rounds,
    *,
    smoothness,
    gap,
    num_honest,
    dim=1,
    noise_std=0.0,
    gradient_std=0.0,
    heterogeneity=0.0,
    kappa=0.0,
    form="sound",
) -> float:
    r"""Return Theorem 4's bound on :math:`\frac1T\sum_t E\|\nabla F(\theta^t)\|^2`.

    With :math:`k_1 = 5100, k_2 = 50` and c = 31.25 (printed: 30),

    .. math::

        \frac{c\,(F(\theta^0)-F^*)}{\eta T} + \frac{25\, d\, \sigma_{dp}^2}{\eta L}
        + \Big(\frac{2k_1(k_1+k_2)}{T} + 4k_1^2\Big)
        \frac{\eta L \sigma^2}{|\mathcal G|}
        + 47250\, k_1 \eta L \kappa \Big(1+\frac{1}{|\mathcal G|}\Big) \sigma^2
        + 23625\, \kappa G^2

    It is loose: at practical T it holds, but says little.

    Args:
      learning_rate: eta, ``0 < eta <= 1/(5100 L)``.
      rounds: T >= 1.
      smoothness: L > 0.
      gap: F at the start minus its minimum, >= 0.
      num_honest: number of honest clients >= 1.
      dim: d >= 1.
      noise_std: sigma_dp >= 0 per coordinate of the published aggregate.
      gradient_std: sigma >= 0, of a stochastic gradient as a vector.
      heterogeneity: G >= 0.
      kappa: robustness coefficient of the rule >= 0.
      form: ``"sound"`` or ``"printed"``.

    Returns:
      float.

    Raises:
      TypeError, ValueError: for values out of these ranges.

    References:
      `<https://arxiv.org/abs/2611.10898>`_, Theorem G.6; 25 (1 + 1/4) = 31.25.
    """
    non_convex(smoothness, learning_rate)
    _validate.count("rounds", rounds)
    _validate.count("dim", dim)
    _validate.nonnegative("gap", gap)
    _validate.nonnegative("noise_std", noise_std)
    _validate.nonnegative("heterogeneity", heterogeneity)
    rate = learning_rate * smoothness
    noise = _gradient_noise(num_honest, gradient_std, kappa, rounds)
    return (
        _start(form) * gap / (learning_rate * rounds)
        + 25 * dim * noise_std**2 / rate
        + rate * noise
        + 23_625 * kappa * heterogeneity**2
    )


@in_float64
def step_size(
    rounds,
    *,
    smoothness,
    gap,
    clip_norm,
    dim,
    epsilon,
    delta,
    num_clients,
    num_byzantine,
    gradient_std=0.0,
    kappa=None,
    form="sound",
) -> float:
    r"""Return the constant step size of Corollary 3, which balances Theorem 4's bound.

    With Theorem 2's noise at :math:`\nu = n/f-2` the bound is
    :math:`c(F(\theta^0)-F^*)/(\eta T) + \eta(AT + S) + 23625\kappa G^2`, hence
    :math:`\eta = \sqrt{c(F(\theta^0)-F^*)/(T(AT+S))}`, where S collects the terms in
    :math:`\sigma^2` and

    .. math:: A = 800\, L\, k_2^2 \frac{\log(1/\delta)\, C^2 d}{\varepsilon^2 n^2}
              \Big(1 + \frac{4nf}{(n-2f)^2}\Big).

    ``"sound"`` takes the bound's own S and c = 31.25, and at most :math:`1/(5100L)`,
    which Theorem 4 needs. ``"printed"`` takes c = 30, a larger S and at most
    :math:`1/(132L)`.

    Args:
      rounds: T >= 1.
      smoothness: L > 0.
      gap: F at the start minus its minimum, > 0.
      clip_norm: C > 0.
      dim: d >= 1.
      epsilon: budget > 0.
      delta: failure probability, 0 < delta < 1.
      num_clients: n.
      num_byzantine: f, ``0 <= f < n/2``.
      gradient_std: sigma >= 0.
      kappa: robustness coefficient; None: that of the trimmed mean.
      form: ``"sound"`` or ``"printed"``.

    Returns:
      eta.

    Raises:
      TypeError, ValueError: for values out of these ranges.

    References:
      `<https://arxiv.org/abs/2611.10898>`_, Corollary 3.
    """
    _validate.count("rounds", rounds)
    _validate.count("dim", dim)
    for name, value in (
        ("smoothness", smoothness),
        ("gap", gap),
        ("clip_norm", clip_norm),
        ("epsilon", epsilon),
        ("delta", delta),
    ):
        _validate.positive(name, value)
    if delta >= 1:
        raise ValueError(f"delta must be < 1, got delta={delta}.")
    n, f = num_clients, num_byzantine
    kappa = kappa_cwtm(n, f) if kappa is None else kappa
    privacy = -math.log(delta) * (clip_norm / epsilon / n) ** 2 * dim
    slope = 800 * smoothness * _K2**2 * privacy * (1 + 4 * n * f / (n - 2 * f) ** 2)
    noise = _gradient_noise(n - f, gradient_std, kappa, rounds, form)
    per_step = slope * rounds + smoothness * noise
    limit = 1 / (smoothness * (_K1 if form == "sound" else 132))
    eta = min(limit, math.sqrt(_start(form) * gap / (rounds * per_step)))
    if eta == 0:
        raise OverflowError  # in_float64 says whose fault it is
    return eta


def _start(form):
    _validate.choice("form", form, FORMS)
    return 31.25 if form == "sound" else 30.0


def _gradient_noise(num_honest, gradient_std, kappa, rounds, form="sound"):
    """Return what multiplies eta L in the bound."""
    h = _validate.count("num_honest", num_honest)
    _validate.nonnegative("kappa", kappa)
    variance = _validate.nonnegative("gradient_std", gradient_std) ** 2
    first = 2 * _K1 * (_K1 + _K2) / h / (rounds if form == "sound" else 1)
    spread = 47_250 * _K1 * kappa * (1 + 1 / h if form == "sound" else 2)
    return variance * (first + 4 * _K1**2 / h + spread)


@in_float64
def kappa_cwtm(num_clients, num_byzantine) -> float:
    r"""Return the trimmed mean's :math:`\frac{6f}{n-2f}(1+\frac{f}{n-2f})`.

    The same as ``jaxfed.robustness.kappa("trimmed_mean", n, f)``, which has a sharper
    one too.

    Args:
      num_clients: n.
      num_byzantine: f, ``0 <= f < n/2``.

    Returns:
      float.

    Raises:
      TypeError, ValueError: for other n or f.

    References:
      `<https://arxiv.org/abs/2611.10898>`_, Proposition 5.
    """
    return robustness.kappa("trimmed_mean", num_clients, num_byzantine)


@in_float64
def kappa_sandwich(num_clients, num_byzantine, nu=None) -> tuple[float, float, float]:
    r"""Return Claim 2's three ascending numbers: the coefficient is of order f/n.

    :math:`\frac fn \le \frac{f}{n-2f}(1+\frac{f}{n-2f}) \le
    \frac{(\nu+2)(\nu+1)}{\nu^2} \frac fn` if :math:`n \ge (2+\nu)f`.

    Args:
      num_clients: n.
      num_byzantine: f, ``1 <= f < n/2``.
      nu: ``0 < nu <= n/f - 2``; None: the largest, where the last two are equal.

    Returns:
      The three sides.

    Raises:
      TypeError, ValueError: for values out of these ranges.

    References:
      `<https://arxiv.org/abs/2611.10898>`_, Claim 2.
    """
    n, f = num_clients, _validate.count("num_byzantine", num_byzantine)
    middle, largest = kappa_cwtm(n, f) / 6, n / f - 2
    nu = _validate.positive("nu", largest if nu is None else nu)
    if nu > largest:
        raise ValueError(f"nu must be at most n/f - 2 = {largest:.6g}, got nu={nu}.")
    return f / n, middle, (nu + 2) * (nu + 1) / nu**2 * f / n


@in_float64
def lower_bound(num_clients, num_byzantine, *, smoothness, heterogeneity) -> float:
    r"""Return :math:`\frac{f}{n-f} \frac{G^2}{8L^2}`, the error no method is below.

    It bounds the larger of :math:`E\|\hat\theta-\theta^*\|^2` over the two
    configurations of :func:`lower_bound_instance`, without any noise; times
    :math:`\mu^2`, the larger of :math:`E\|\nabla F(\hat\theta)\|^2`.

    Args:
      num_clients: n.
      num_byzantine: f, ``1 <= f < n/2``.
      smoothness: L > 0.
      heterogeneity: G >= 0.

    Returns:
      float.

    Raises:
      TypeError, ValueError: for values out of these ranges.

    References:
      `<https://arxiv.org/abs/2611.10898>`_, Lemma 2.
    """
    n, f = num_clients, _validate.count("num_byzantine", num_byzantine)
    robustness.best_kappa(n, f)  # checks n and f
    _validate.positive("smoothness", smoothness)
    _validate.nonnegative("heterogeneity", heterogeneity)
    return f / (n - f) * heterogeneity**2 / (8 * smoothness**2)


class Instance(NamedTuple):
    r"""Clients with :math:`F_i(\theta) = \frac\mu2\|\theta-c_i\|^2`, two ways.

    In the first configuration all are honest, in the second the ``byzantine`` ones
    are not, but behave as if they were: no method can tell the two apart.

    Attributes:
      centres: c, ``[n, d]`` float64.
      byzantine: ``[n]`` bool.
      optima: the honest optimum of either configuration, ``[2, d]``.
    """

    centres: np.ndarray
    byzantine: np.ndarray
    optima: np.ndarray


@in_float64
def lower_bound_instance(
    num_clients, num_byzantine, dim, *, smoothness, heterogeneity
) -> Instance:
    r"""Return Lemma 2's hard instance.

    :math:`c_i = s_i \frac{G}{\sqrt2 L} \sqrt{\frac{n-f}{f d}}\, \mathbf 1` with s = 1
    for the first f clients, -1 for the next f, else 0.

    Args:
      num_clients: n.
      num_byzantine: f, ``1 <= f < n/2``.
      dim: d >= 1.
      smoothness: L > 0.
      heterogeneity: G >= 0; both configurations satisfy it, for any ``mu <= L``.

    Returns:
      Instance.

    Raises:
      TypeError, ValueError: for values out of these ranges.

    References:
      `<https://arxiv.org/abs/2611.10898>`_, Appendix E.2.
    """
    n, f = num_clients, num_byzantine
    _validate.count("dim", dim)
    lower_bound(n, f, smoothness=smoothness, heterogeneity=heterogeneity)  # checks
    signs = np.zeros(n)
    signs[:f], signs[f : 2 * f] = 1, -1
    size = heterogeneity / smoothness * math.sqrt((n - f) / (2 * f * dim))
    centres = size * np.tile(signs[:, None], (1, dim))
    optima = np.outer([0.0, f / (n - f)], np.full(dim, size))
    return Instance(centres, signs < 0, optima)


@in_float64
def dispersion_bound(
    momentum,
    *,
    num_honest,
    gradient_std,
    heterogeneity,
    slope=0.0,
    squared_gradients=(0.0,),
) -> float:
    r"""Return Lemma 5's bound on the honest momenta's spread.

    .. math::

        \tfrac{1}{|\mathcal G|} \textstyle\sum_{\mathcal G} E\|m_i^t-\bar m^t\|^2 \le
        3\big(1+\tfrac{1}{|\mathcal G|}\big)(1-\alpha^2)\sigma^2 + 3G^2
        + 3B^2(1-\alpha) \textstyle\sum_{r\le t} \alpha^{t-r}
        E\|\nabla F(\theta^r)\|^2

    Args:
      momentum: alpha, constant, ``0 <= alpha < 1``.
      num_honest: number of honest clients >= 1.
      gradient_std: sigma >= 0.
      heterogeneity: G >= 0.
      slope: B >= 0.
      squared_gradients: expected squared norms of the gradient, rounds 0 to t.

    Returns:
      float.

    Raises:
      TypeError, ValueError: for values out of these ranges.

    References:
      `<https://arxiv.org/abs/2611.10898>`_, Lemma 5.
    """
    alpha = _validate.unit_interval("momentum", momentum)
    h = _validate.count("num_honest", num_honest)
    _validate.nonnegative("gradient_std", gradient_std)
    _validate.nonnegative("heterogeneity", heterogeneity)
    _validate.nonnegative("slope", slope)
    squares = np.asarray(squared_gradients, float)
    kept = (1 - alpha) * np.sum(alpha ** np.arange(len(squares))[::-1] * squares)
    noise = (1 + 1 / h) * (1 - alpha**2) * gradient_std**2
    return float(3 * (noise + heterogeneity**2 + slope**2 * kept))


@in_float64
def aggregation_error_bound(server_momentum, kappa, momenta) -> float:
    r"""Return Eq. (22)'s bound on :math:`\|R^t-\bar M^t\|^2`.

    :math:`(1-\beta)^2 \frac{\kappa}{|\mathcal G|} \sum_{\mathcal G}
    \|m_i-\bar m\|^2`, whatever Byzantine clients send.

    Args:
      server_momentum: beta, ``0 <= beta < 1``.
      kappa: robustness coefficient of the rule >= 0.
      momenta: honest clients' messages m, ``[n-f, d]``.

    Returns:
      float.

    Raises:
      TypeError, ValueError: for values out of these ranges.

    References:
      `<https://arxiv.org/abs/2611.10898>`_, Eqs. (22) and (25).
    """
    _validate.unit_interval("server_momentum", server_momentum)
    _validate.nonnegative("kappa", kappa)
    m = np.asarray(momenta, float)
    spread = np.sum((m - m.mean(0)) ** 2) / len(m)
    return float((1 - server_momentum) ** 2 * kappa * spread)


@in_float64
def descent_bound(
    learning_rate,
    *,
    smoothness,
    squared_gradient,
    tracking,
    dispersion,
    kappa=0.0,
    dim=1,
    noise_std=0.0,
) -> float:
    r"""Return Lemma G.10's bound on one step's change of the objective.

    .. math::

        E[F(\theta^{t+1}) - F(\theta^t)] \le
        -\eta\big(\tfrac34 - 2\eta L\big)\|\nabla F\|^2
        + \tfrac{\eta^2 L d}{2}\sigma_{dp}^2
        + 2\eta(1+\eta L)\, E\|\nabla F-\bar M\|^2
        + 2\kappa\eta(1+\eta L)
        \tfrac{1}{|\mathcal G|}\textstyle\sum_{\mathcal G} E\|M_i-\bar M\|^2

    Args:
      learning_rate: eta > 0.
      smoothness: L > 0.
      squared_gradient: squared norm of the gradient before the step.
      tracking: mean squared distance of the gradient to the honest mean of M.
      dispersion: mean squared distance of honest M to their mean.
      kappa: robustness coefficient of the rule >= 0.
      dim: d >= 1.
      noise_std: sigma_dp >= 0.

    Returns:
      float.

    Raises:
      TypeError, ValueError: for values out of these ranges.

    References:
      `<https://arxiv.org/abs/2611.10898>`_, Lemma G.10.
    """
    eta, smooth = learning_rate, smoothness
    _validate.positive("learning_rate", eta)
    _validate.positive("smoothness", smooth)
    _validate.nonnegative("squared_gradient", squared_gradient)
    _validate.nonnegative("tracking", tracking)
    _validate.nonnegative("dispersion", dispersion)
    _validate.nonnegative("kappa", kappa)
    _validate.count("dim", dim)
    _validate.nonnegative("noise_std", noise_std)
    rate = eta * smooth
    return float(
        -eta * (0.75 - 2 * rate) * squared_gradient
        + eta * rate * dim / 2 * noise_std**2
        + 2 * eta * (1 + rate) * (tracking + kappa * dispersion)
    )


@in_float64
def stationary_variance(
    learning_rate, server_momentum, curvature, noise_std=1.0
) -> float:
    r"""Return the parameter's variance after long training on a parabola.

    For :math:`F = \frac\lambda2\theta^2`, no client momentum or gradient noise, and
    noise :math:`(1-\beta)s_0` on the aggregate:
    :math:`\frac{\eta s_0^2(1+\beta)}{\lambda(2(1+\beta)-\eta(1-\beta)\lambda)}`. At
    small :math:`\eta\lambda` it hardly depends on the server momentum, which is an
    average of equally private vectors there.

    Args:
      learning_rate: eta > 0.
      server_momentum: beta, ``0 <= beta < 1``.
      curvature: lambda > 0, with :math:`\eta\lambda(1-\beta) < 2(1+\beta)`; beyond it
        training diverges.
      noise_std: s_0 >= 0, the noise at beta = 0.

    Returns:
      float.

    Raises:
      ValueError: for values out of these ranges.
    """
    eta, beta, lam = learning_rate, server_momentum, curvature
    _validate.positive("learning_rate", eta)
    _validate.unit_interval("server_momentum", beta)
    _validate.positive("curvature", lam)
    _validate.nonnegative("noise_std", noise_std)
    room = 2 * (1 + beta) - eta * (1 - beta) * lam
    if room <= 0:
        limit = 2 * (1 + beta) / ((1 - beta) * lam)
        raise ValueError(
            f"learning_rate must be below {limit:.6g}, got learning_rate={eta}: "
            "training diverges. Lower it."
        )
    return eta * noise_std**2 * (1 + beta) / (lam * room)
