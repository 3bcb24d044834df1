# SPDX-License-Identifier: Apache-2.0
r"""Byz-Clip21-SGD2M: constants, hyperparameters and bounds of its theorems.

Source of all: Islamov et al., `Byzantine-Robust and Differentially Private Federated
Optimization under Weaker Assumptions <https://arxiv.org/abs/2603.23472>`_, 2026. The
paper weighs the *new* vector: :math:`\beta` = 1 - ``momentum``, :math:`\hat\beta` =
1 - ``server_momentum``. Throughout, G is the number of honest clients,
:math:`\sigma` the sub-Gaussian constant of a stochastic gradient
(:math:`E\,e^{\|\nabla f_i(x,\xi)-\nabla f_i(x)\|^2/\sigma^2} \le e`; errors
:math:`\mathcal N(0, s^2 I_d)` have :math:`\sigma^2 = 2s^2/(1-e^{-2/d})`),
:math:`\kappa = c\,\delta_{byz}` the coefficient of the rule, and
:math:`K(p) = \sqrt2 + 2\sqrt{3\log p}`.

Where the printed constants do not do what the proof needs, ``form="sound"`` repairs
them and ``form="printed"`` does not. The theory starts from zero memories.
"""

import math
from typing import NamedTuple

import numpy as np

from jaxfed import _validate
from jaxfed.theory._range import in_float64

__all__ = [
    "Choice",
    "Constants",
    "aggregation_bias_bound",
    "choose",
    "choose_non_private",
    "clip_error_bound",
    "clip_rounds",
    "constants",
    "gradient_bound",
    "initial_potential",
    "initial_radius",
    "potential",
    "potential_non_private",
    "rate",
]

FORMS = ("sound", "printed")


class Constants(NamedTuple):
    """The constants (67).

    Attributes:
      a: bound on the norm of the honest clients' mean sum of noise.
      a_hat: bound on the norm of any one honest client's sum of noise.
      b: bound on the norm of any one stochastic gradient's error.
      c_hat: sigma's factor in sums of such errors over clients and rounds.
      b1: factor of sums of inner products with them.
    """

    a: float
    a_hat: float
    b: float
    c_hat: float
    b1: float


class Choice(NamedTuple):
    r"""Hyperparameters a theorem allows, and what keeps them from being larger.

    Attributes:
      gamma: step size.
      beta: weight of the new gradient on the client.
      beta_hat: weight of the new message on the server.
      radius: :math:`B_{init}` (0 where the theorem has none).
      binding: the restriction met with equality, for ``"beta"`` and ``"beta_hat"``.
      limits: every restriction's largest value, ``{"beta": {...}, "beta_hat": {...}}``.
    """

    gamma: float
    beta: float
    beta_hat: float
    radius: float
    binding: dict
    limits: dict

    @property
    def momentum(self) -> float:
        """Weight the client keeps."""
        return 1 - self.beta

    @property
    def server_momentum(self) -> float:
        """Weight the server keeps."""
        return 1 - self.beta_hat


@in_float64
def constants(
    *,
    rounds,
    num_honest,
    dim=1,
    gradient_std=0.0,
    noise_std=0.0,
    failure_probability=0.05,
) -> Constants:
    r"""Return the constants (67).

    .. math::

        a &= K\big(\tfrac{8(T+1)}{\alpha}\big) \sqrt{\tfrac{dT}{G}}\,\sigma_\omega,
        \qquad \hat a = K\big(\tfrac{8G(T+1)}{\alpha}\big)\sqrt{dT}\,\sigma_\omega \\
        b^2 &= 2\sigma^2\log\tfrac{16(T+1)G}{\alpha}, \qquad
        \hat c = K\big(\tfrac{8(T+1)}{\alpha}\big)\,\sigma, \qquad
        b_1 = \sqrt{3\log\tfrac{20(T+1)}{\alpha}}

    Args:
      rounds: T >= 1.
      num_honest: G >= 1.
      dim: d >= 1.
      gradient_std: sigma >= 0.
      noise_std: sigma_omega >= 0 per coordinate of a message.
      failure_probability: alpha, ``0 < alpha < 1``.

    Returns:
      Constants.

    Raises:
      TypeError, ValueError: for values out of these ranges.

    Example:
      >>> c = constants(rounds=1000, num_honest=20, dim=100, noise_std=0.1)
      >>> round(c.a, 4), round(c.a_hat, 4)
      (94.796, 468.6977)

    References:
      `<https://arxiv.org/abs/2603.23472>`_, (67); Table A.1 differs in a_hat.
    """
    t, g = _validate.count("rounds", rounds), _validate.count("num_honest", num_honest)
    d = _validate.count("dim", dim)
    _nonnegative(gradient_std=gradient_std, noise_std=noise_std)
    p = (t + 1) / _probability(failure_probability)
    root = math.sqrt(d * t) * noise_std
    return Constants(
        a=_k(8 * p) * root / math.sqrt(g),
        a_hat=_k(8 * g * p) * root,
        b=gradient_std * math.sqrt(2 * math.log(16 * g * p)),
        c_hat=_k(8 * p) * gradient_std,
        b1=math.sqrt(3 * math.log(20 * p)),
    )


@in_float64
def initial_radius(clip_norm, initial_gradient, b=0.0) -> float:
    r"""Return :math:`B_{init} = \max\{3\tau, \max_i\|\nabla f_i(x^0)\| + b\}`.

    Args:
      clip_norm: tau > 0.
      initial_gradient: largest norm of an honest client's gradient at the start.
      b: ``constants(...).b``.

    Returns:
      float.

    Raises:
      ValueError: for negative values.
    """
    _validate.positive("clip_norm", clip_norm)
    _nonnegative(initial_gradient=initial_gradient, b=b)
    return max(3.0 * clip_norm, initial_gradient + b)


@in_float64
def initial_potential(gap, smoothness, heterogeneity=0.0, slope=0.0) -> float:
    r"""Return :math:`\Delta`, a bound on the potential (9) of zero memories.

    :math:`(\frac43+\frac53(1+A_\zeta))F^0 + \frac{5\zeta^2}{6L}`, where
    :math:`\max_i\|\nabla f_i(x^0)-\nabla f(x^0)\|^2 \le \zeta^2 +
    A_\zeta\|\nabla f(x^0)\|^2`. Theorem 5.2 has :math:`2F^0` instead.

    Args:
      gap: :math:`F^0 = f(x^0) - f^*` >= 0.
      smoothness: L > 0.
      heterogeneity: zeta >= 0, at the start.
      slope: A_zeta >= 0.

    Returns:
      float.

    Raises:
      ValueError: for values out of these ranges.

    References:
      `<https://arxiv.org/abs/2603.23472>`_, Appendix D; B_zeta read as 1 + A_zeta.
    """
    _validate.positive("smoothness", smoothness)
    _nonnegative(gap=gap, heterogeneity=heterogeneity, slope=slope)
    first = 4 / 3 + 5 * (1 + slope) / 3
    return first * gap + 5 * heterogeneity**2 / (6 * smoothness)


@in_float64
def choose(
    *,
    smoothness,
    potential,
    clip_norm,
    initial_gradient,
    rounds,
    num_honest,
    dim=1,
    gradient_std=0.0,
    noise_std=0.0,
    kappa=0.0,
    failure_probability=0.05,
    form="sound",
) -> Choice:
    r"""Return the largest hyperparameters Theorem 5.1 allows, restrictions (68)-(80).

    No restriction on :math:`\hat\beta` involves :math:`\beta`, so :math:`\hat\beta` is
    the least of its own, then :math:`\beta` that of its own, and
    :math:`\gamma = \beta/(12L)`. Special cases: no noise and no Byzantine clients give
    :math:`\hat\beta = 1` (Corollary 5.2), no Byzantine clients Corollary 5.3.

    Sound and printed forms differ where noise or Byzantine clients are present:
    :math:`\hat\beta \le 1/24` (lemmas 5 and 8; printed: 1), in (77) the bound on
    :math:`\hat\beta` is divided by tau, and in (78) it is a cube root with
    :math:`\sqrt{\max(1, \kappa)}` below (printed: a square root without), which are
    what the inequalities they serve need.

    Args:
      smoothness: L > 0.
      potential: Delta > 0, e.g. :func:`initial_potential`.
      clip_norm: tau > 0, finite.
      initial_gradient: largest norm of an honest client's gradient at the start.
      rounds: T >= 1.
      num_honest: G >= 1.
      dim: d >= 1.
      gradient_std: sigma >= 0, sub-Gaussian constant.
      noise_std: sigma_omega >= 0 per coordinate.
      kappa: robustness coefficient of the rule >= 0; 0 means the mean, no Byzantine
        clients.
      failure_probability: alpha, ``0 < alpha < 1``.
      form: ``"sound"`` or ``"printed"``.

    Returns:
      Choice. With it, :func:`gradient_bound` holds with probability 1 - alpha.

    Raises:
      TypeError, ValueError: for values out of these ranges.

    References:
      `<https://arxiv.org/abs/2603.23472>`_, Theorems 5.1 and D.1, Corollaries 5.2, 5.3.
    """
    _validate.choice("form", form, FORMS)
    _validate.positive("smoothness", smoothness)
    _validate.positive("potential", potential)
    _nonnegative(kappa=kappa)
    big = constants(
        rounds=rounds,
        num_honest=num_honest,
        dim=dim,
        gradient_std=gradient_std,
        noise_std=noise_std,
        failure_probability=failure_probability,
    )
    tau, radius = clip_norm, initial_radius(clip_norm, initial_gradient, big.b)
    lam, eta, excess = math.sqrt(smoothness * potential), tau / radius, radius - tau
    # What (72)-(78) have in common: sqrt(G) Lambda^2 / ((1 + b1) sigma sqrt(T)).
    noise = (1 + big.b1) * gradient_std * math.sqrt(rounds / num_honest)
    common = _over(lam**2, noise)
    kt = math.sqrt(kappa) * rounds

    server = {
        "at most 1": 1.0,
        "a": _over(lam, big.a),
        "a_hat": _over(lam, 4 * math.sqrt(2 * kappa) * big.a_hat),
        "(79)": _root(3, 27 * lam**3, 2 * big.a**2 * rounds * tau),
    }
    if form == "sound" and (noise_std > 0 or kappa > 0):
        server["lemmas 5 and 8"] = 1 / 24
    if kappa > 0:
        # Each is for a term in sqrt(kappa) of (77), (78) or (80).
        t3 = kappa * tau * rounds
        server["(77)"] = 29 / 64 * common / (tau if form == "sound" else 1)
        cubed = 462 * common * lam**2 / (rounds * tau**3)
        if form == "printed":
            server["(78)"] = math.sqrt(cubed)
        else:
            server["(78)"] = _root(3, cubed, math.sqrt(max(1.0, kappa)))
        server["(80) noise"] = _root(3, 81 * lam**3, 96 * t3 * big.a_hat**2)
        server["(80) clip"] = _root(3, 81 * lam**3, 96 * t3 * (tau * rounds) ** 2)
    beta_hat = min(server.values())

    be = beta_hat * eta
    four = 4 * lam + 1.5 * (excess + big.b)
    twelve = 12 * lam + 3 * (excess + big.b)
    r2 = math.sqrt(2)
    # (68): 2/9 x^2 + 2/3 x <= right for x = beta^2, solved without cancellation.
    right = 5 / 6 * be**2
    square = 2 * right / (2 / 3 + math.sqrt(4 / 9 + 8 / 9 * right))
    client = {
        "at most 1": 1.0,
        "(68)": math.sqrt(square),
        "Lambda": beta_hat * tau / (54 * lam),
        "radius": 2 * beta_hat * tau / (39 * excess),
        "b": _over(2 * beta_hat * tau, 69 * big.b),
        "kappa": _over(2, 41 * math.sqrt(2) * kt),
        "(71) first": _root(3, lam**2 * be, 12 * rounds * big.b**2),
        "(71) second": _root(4, lam**2 * be**2, 48 * rounds * big.b**2),
        "(71) third": _root(2, lam**2 * num_honest, 12 * rounds * big.c_hat**2),
        "(72)": _root(2, 3 * be * common, 8 * r2 * radius),
        "(73) mean": _root(3, 3 * be * common, 16 * r2 * four),
        "(73) rule": _root(3, eta * common, 16 * tau * kt),
        "(74) mean": _root(4, 9 * be * common, 16 * r2 * twelve),
        "(74) rule": _root(4, 9 * eta * common, 80 * tau * kt),
        "(75) mean": _root(3, 3 * be**2 * common, 64 * r2 * four),
        "(75) rule": _root(3, 3 * be * eta * common, 32 * tau * kt),
        "(76) mean": _root(4, 9 * be**2 * common, 16 * r2 * twelve),
        "(76) rule": _root(4, 9 * be * eta * common, 128 * tau * kt),
        "(77)": _over(3 * common, 16 * r2 * four),
        "(78)": _root(2, 9 * common, 4 * r2 * twelve),
    }
    return _choice(client, server, radius, 12 * smoothness)


@in_float64
def choose_non_private(
    *,
    smoothness,
    gap,
    rounds,
    num_honest,
    gradient_std=0.0,
    heterogeneity=0.0,
    kappa=0.0,
    failure_probability=0.05,
) -> Choice:
    r"""Return the largest hyperparameters Theorem 5.2 allows, (112)-(114).

    For ``byz_sgdm`` (no clip, no noise, :math:`\hat\beta = 1`): :math:`\beta = 4L\gamma
    \le 2/3`. Heterogeneity must be bounded everywhere.

    Args:
      smoothness: L > 0.
      gap: :math:`F^0 = f(x^0) - f^*` > 0.
      rounds: T >= 1.
      num_honest: G >= 1.
      gradient_std: sigma >= 0, sub-Gaussian constant.
      heterogeneity: zeta >= 0, of the honest clients' mean squared deviation.
      kappa: robustness coefficient of the rule >= 0.
      failure_probability: alpha, ``0 < alpha < 1``.

    Returns:
      Choice. With it, :func:`gradient_bound` at ``2 * gap`` holds with probability
      1 - alpha.

    Raises:
      TypeError, ValueError: for values out of these ranges.

    References:
      `<https://arxiv.org/abs/2603.23472>`_, Theorems 5.2 and E.1.
    """
    _validate.positive("smoothness", smoothness)
    _validate.positive("gap", gap)
    _validate.count("rounds", rounds)
    _validate.count("num_honest", num_honest)
    _nonnegative(gradient_std=gradient_std, heterogeneity=heterogeneity, kappa=kappa)
    p = (rounds + 1) / _probability(failure_probability)
    c = _k(8 * p) * gradient_std
    z = _k(8 * num_honest * p) * gradient_std
    b1 = math.sqrt(3 * math.log(6 * p))
    square = 2 * smoothness * gap  # L times the bound on the potential
    root_g, root_k = math.sqrt(num_honest), math.sqrt(2 * kappa)
    inner = 8 * math.sqrt(square) + 3 * c / root_g + 3 * root_k * (heterogeneity + z)
    noise = 3 * math.sqrt(2 * rounds) * (1 + b1) * gradient_std
    client = {
        "step size": 2 / 3,
        "(112)": _root(2, 4 * square * num_honest, 3 * rounds * c**2),
        "(113) heterogeneity": _over(square, 3 * kappa * heterogeneity**2 * rounds),
        "(113) noise": _root(2, square, 3 * kappa * rounds * z**2),
        "(114)": _over(2 * square * root_g, noise * inner),
    }
    return _choice(client, {"no clip": 1.0}, 0.0, 4 * smoothness)


@in_float64
def gradient_bound(potential, gamma, rounds) -> float:
    r"""Return :math:`4\Delta/(\gamma T)`, (81) and (115).

    With a :class:`Choice`, :math:`\frac1T\sum_{t<T}\|\nabla f(x^t)\|^2` is at most this
    with probability 1 - alpha.

    Args:
      potential: Delta for :func:`choose`, ``2 * gap`` for :func:`choose_non_private`.
      gamma: step size > 0.
      rounds: T >= 1.

    Returns:
      float.

    Raises:
      TypeError, ValueError: for values out of these ranges.
    """
    _nonnegative(potential=potential)
    _validate.positive("gamma", gamma)
    return 4 * potential / (gamma * _validate.count("rounds", rounds))


@in_float64
def rate(
    *,
    smoothness,
    potential,
    clip_norm,
    initial_gradient,
    rounds,
    num_honest,
    dim=1,
    gradient_std=0.0,
    noise_std=0.0,
    kappa=0.0,
    failure_probability=0.05,
) -> float:
    r"""Return Theorem 5.1's rate without constants and logarithms.

    :math:`\Delta_0 (R + R^{2/3})` with :math:`\Delta_0 = \Lambda(\Lambda + B_{init} +
    \sigma)`, :math:`\Lambda = \sqrt{L\Delta}`,

    .. math:: R = \frac{\sqrt d\,\sigma_\omega}{\sqrt{GT}\,\tau}
              + \frac{\sqrt{\kappa d}\,\sigma_\omega}{\sqrt T\,\tau} + \sqrt\kappa .

    It tells how the error scales, not how large it is.

    Args:
      smoothness: L > 0.
      potential: Delta > 0.
      clip_norm: tau > 0.
      initial_gradient: as in :func:`choose`; the paper asks for more than 3 tau.
      rounds: T >= 1.
      num_honest: G >= 1.
      dim: d >= 1.
      gradient_std: sigma >= 0.
      noise_std: sigma_omega >= 0.
      kappa: robustness coefficient of the rule >= 0.
      failure_probability: alpha, enters through :math:`B_{init}` only.

    Returns:
      float.

    Raises:
      TypeError, ValueError: for values out of these ranges.

    References:
      `<https://arxiv.org/abs/2603.23472>`_, Theorem 5.1; Table 1 prints the middle term
      with another :math:`\sqrt G`, against the theorem.
    """
    big = constants(
        rounds=rounds,
        num_honest=num_honest,
        dim=dim,
        gradient_std=gradient_std,
        noise_std=noise_std,
        failure_probability=failure_probability,
    )
    _validate.positive("smoothness", smoothness)
    _validate.positive("potential", potential)
    _nonnegative(kappa=kappa)
    radius = initial_radius(clip_norm, initial_gradient, big.b)
    lam = math.sqrt(smoothness * potential)
    private = math.sqrt(dim / rounds) * noise_std / clip_norm
    r = private * (1 / math.sqrt(num_honest) + math.sqrt(kappa)) + math.sqrt(kappa)
    return lam * (lam + radius + gradient_std) * (r + r ** (2 / 3))


@in_float64
def clip_error_bound(norm, clip_norm) -> float:
    r"""Return (14)'s bound on :math:`\|\mathrm{clip}_\tau(z)-z\|`, its exact value.

    Args:
      norm: :math:`\|z\|` >= 0.
      clip_norm: tau > 0, inf for no clip.

    Returns:
      :math:`\max(\|z\|-\tau, 0)`.

    Raises:
      ValueError: for values out of these ranges.
    """
    _nonnegative(norm=norm)
    _validate.positive("clip_norm", clip_norm, finite=False)
    return max(norm - clip_norm, 0.0)


@in_float64
def aggregation_bias_bound(beta_hat, t, clip_norm, kappa, noise_sums) -> float:
    r"""Return (18)'s bound on :math:`\|\bar m^t-g^t\|^2`.

    :math:`8\kappa\hat\beta^2(t+1)^2\tau^2 + 8\kappa\hat\beta^2 \frac1G
    \sum_i\|\Omega_i^t\|^2` for zero memories, whatever Byzantine clients send.

    Args:
      beta_hat: 1 - server momentum, in (0, 1].
      t: round, ``m`` holds t messages.
      clip_norm: tau > 0.
      kappa: robustness coefficient of the rule >= 0.
      noise_sums: sum of each honest client's noise up to t, ``[G, d]``.

    Returns:
      float.

    Raises:
      TypeError, ValueError: for values out of these ranges.
    """
    _validate.count("t", t, minimum=0)
    _validate.positive("clip_norm", clip_norm)
    _nonnegative(kappa=kappa, beta_hat=beta_hat)
    noise_sums = np.asarray(noise_sums)
    if not np.issubdtype(noise_sums.dtype, np.number):
        raise TypeError(f"noise_sums must be numbers [G, d], got {noise_sums!r}.")
    noise = np.mean(np.sum(noise_sums.astype(float) ** 2, axis=-1))
    return float(8 * kappa * beta_hat**2 * (((t + 1) * clip_norm) ** 2 + noise))


@in_float64
def clip_rounds(radius, clip_norm, beta_hat) -> int:
    r"""Return :math:`\lceil 2(B_{init}-\tau)/(\hat\beta\tau)\rceil`.

    While a client's clip is active, each round shortens :math:`\|v_i-g_i\|` by
    :math:`\hat\beta\tau/2` or more (52) under :func:`choose`'s restrictions, so after
    this many rounds it never is.

    Args:
      radius: :math:`B_{init}`, or any bound on the first :math:`\|v_i-g_i\|`.
      clip_norm: tau > 0.
      beta_hat: 1 - server momentum, in (0, 1].

    Returns:
      int.

    Raises:
      ValueError: for values out of these ranges.
    """
    _nonnegative(radius=radius)
    _validate.positive("clip_norm", clip_norm)
    _validate.positive("beta_hat", beta_hat)
    # A quotient that is whole but for a rounding error counts as whole.
    quotient = 2 * (radius - clip_norm) / (beta_hat * clip_norm)
    return max(math.ceil(quotient * (1 - 1e-12)), 0)


@in_float64
def potential(
    gap, gradients, v, g, *, gamma, beta, beta_hat, clip_norm, radius
) -> float:
    r"""Return the Lyapunov function (9).

    With :math:`\eta = \tau/B_{init}` and averages over honest clients,

    .. math::

        \Phi = f(x)-f^* + \frac{8\gamma\beta}{\hat\beta^2\eta^2}
        \overline{\|v_i-\nabla f_i(x)\|^2} + \frac{2\gamma}{\hat\beta\eta}
        \overline{\|g_i-v_i\|^2} + \frac{2\gamma}{\beta}\|\bar v-\nabla f(x)\|^2

    Args:
      gap: :math:`f(x)-f^*` of the honest objective f.
      gradients: honest clients' exact gradients at x, ``[G, d]``.
      v: client momenta, ``[G, d]``.
      g: shifts, ``[G, d]``.
      gamma: step size.
      beta: 1 - momentum.
      beta_hat: 1 - server momentum.
      clip_norm: tau.
      radius: :math:`B_{init}`.

    Returns:
      float. Without noise and Byzantine clients, under :func:`choose`, it falls by
      :math:`\frac\gamma2\|\nabla f(x)\|^2` or more each round.
    """
    v, be = np.asarray(v, float), beta_hat * clip_norm / radius
    error = v - gradients
    return float(
        gap
        + 8 * gamma * beta / be**2 * np.mean(np.sum(error**2, axis=-1))
        + 2 * gamma / be * np.mean(np.sum((g - v) ** 2, axis=-1))
        + 2 * gamma / beta * np.sum(error.mean(0) ** 2)
    )


@in_float64
def potential_non_private(gap, gradients, v, *, gamma, beta) -> float:
    r"""Return (95), :math:`f(x)-f^* + \frac\gamma\beta\|\bar v-\nabla f(x)\|^2`.

    Args:
      gap: :math:`f(x)-f^*` of the honest objective f.
      gradients: honest clients' exact gradients at x, ``[G, d]``.
      v: client momenta, ``[G, d]``.
      gamma: step size.
      beta: 1 - momentum.

    Returns:
      float.
    """
    error = np.mean(np.asarray(v, float) - gradients, axis=0)
    return float(gap + gamma / beta * np.sum(error**2))


def _choice(client, server, radius, divisor):
    client, server = (
        {name: float(x) for name, x in known.items()} for known in (client, server)
    )
    beta, beta_hat = min(client.values()), min(server.values())
    if min(beta, beta_hat) <= 0:
        raise ValueError(
            "the theorem allows no positive step here: the restrictions underflow. "
            "Rescale the problem."
        )
    limits = {"beta": client, "beta_hat": server}
    binding = {name: min(known, key=known.get) for name, known in limits.items()}
    return Choice(float(beta / divisor), beta, beta_hat, float(radius), binding, limits)


def _k(p):
    return math.sqrt(2) + 2 * math.sqrt(3 * math.log(p))


def _over(x, y):
    """Return x / y, inf if y is 0: the restriction is absent."""
    return x / y if y > 0 else math.inf


def _root(degree, x, y):
    return _over(x, y) ** (1 / degree)


def _probability(x):
    _validate.positive("failure_probability", x)
    if x >= 1:
        raise ValueError(
            f"failure_probability must satisfy 0 < . < 1, got failure_probability={x}."
        )
    return x


def _nonnegative(**values):
    for name, value in values.items():
        _validate.nonnegative(name, value)
