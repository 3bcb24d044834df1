# SPDX-License-Identifier: Apache-2.0
r"""Uniform stability of Safe-D(S)GD: bounds, regimes and the constants behind them.

Notation: n clients, f of them Byzantine, h = n-f honest ones with m examples each, d
parameters; C Lipschitz constant, gamma step size, T steps, sigma the noise a client
adds per coordinate and step, kappa the rule's coefficient in the *spectral* sense
(:func:`jaxfed.robustness.kappa`). Two data sets are neighbours if one example of one
honest client differs. On the host, in float64.

References:
  Boudou, Le Bars, Gupta and Bellet, `Unveiling the Non-Monotonic Effect of Privacy on
  Generalization under Byzantine Robustness`. Equation numbers are its own.
"""

import dataclasses
import functools
import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from jaxfed import _validate
from jaxfed.theory._range import in_float64

__all__ = [
    "MonteCarlo",
    "StabilityTheory",
    "TechnicalConstants",
    "byzantine_magnitude",
    "dp_stability",
    "expansivity",
    "gaussian_stability",
    "mia_success",
    "monte_carlo",
    "spectral_magnitude",
    "technical_constants",
]

_nonnegative = functools.partial(_validate.nonnegative, finite=False)
_positive = functools.partial(_validate.positive, finite=False)
_CHECKS = {
    "d": _validate.count,
    "delta": _validate.unit_interval,
    "epsilon": _nonnegative,
    "f": functools.partial(_validate.count, minimum=0),
    "heterogeneity": _validate.nonnegative,
    "kappa": _nonnegative,
    "learning_rate": _validate.positive,
    "level": _validate.nonnegative,
    "lipschitz": _validate.positive,
    "local_variance": _validate.nonnegative,
    "loss_bound": _positive,
    "m": _validate.count,
    "magnitude": _validate.nonnegative,
    "mu": _nonnegative,
    "n": _validate.count,
    "noise_std": _validate.nonnegative,
    "radius": _positive,
    "separation": _nonnegative,
    "smoothness": _validate.positive,
    "steps": _validate.count,
    "strength": _validate.nonnegative,
    "strong_convexity": _validate.nonnegative,
    "test_steps": _validate.count,
}


def _check(**values):
    """Return the values, each checked by its name; None stays."""
    for name, value in values.items():
        if value is not None:
            _CHECKS[name](name, value)
    if "f" in values:
        _validate.majority(values["f"], values["n"])
    return [*values.values()]


@dataclasses.dataclass(frozen=True)
class StabilityTheory:
    r"""Stability of Safe-DGD in one setting, as a function of the noise.

    The upper bounds assume C-Lipschitz, L-smooth, convex losses and gamma <= 1/L;
    projections onto a convex set keep them. Generalisation error is at most stability.

    Attributes:
      n: number of clients.
      f: number of Byzantine clients, ``0 <= f < n/2``.
      m: examples per honest client.
      d: number of parameters.
      lipschitz: C > 0.
      learning_rate: gamma > 0.
      steps: T >= 1.
      kappa: of the rule, spectral; None for that of ``smea``, 4f/(n-2f).
      strong_convexity: 0 for convex losses, (2) and (13), else (3) and (14).
      heterogeneity: :math:`G^2`, mean squared distance of the honest gradients from
        their mean; None if only bounded by the Lipschitz constant.
      local_variance: :math:`s^2` of a client's gradient, 0 for full batches; counts
        only with ``heterogeneity``.
      loss_bound: losses are in ``[0, loss_bound]``; inf if unbounded.

    Raises:
      TypeError, ValueError: for arguments out of range.

    Example:
      >>> theory = StabilityTheory(15, 6, 20, 1, 1.0, 0.1, 100, kappa=24.0)
      >>> round(theory.upper(0.1), 2)
      257.45
    """

    n: int
    f: int
    m: int
    d: int
    lipschitz: float
    learning_rate: float
    steps: int
    kappa: float | None = None
    strong_convexity: float = 0.0
    heterogeneity: float | None = None
    local_variance: float = 0.0
    loss_bound: float = math.inf

    def __post_init__(self):
        _check(**vars(self))

    @in_float64
    def covariance(self, noise_std) -> float:
        r"""Bound the top eigenvalue of the honest vectors' covariance (Lemma C.1).

        :math:`2s^2 + G^2 + 72\sigma^2(1 + d/h)`, with :math:`3C^2` for the first two
        if no heterogeneity is given; in expectation, per step.
        """
        (sigma,) = _check(noise_std=noise_std)
        return self._spread + 72 * sigma**2 * (1 + self.d / self._honest)

    @in_float64
    def upper(self, noise_std, *, order=False) -> float:
        r"""Return the upper bound of theorem 3.1 on stability.

        :math:`2\gamma C^2TB` (13) or, if strongly convex, :math:`(2C^2/\mu)B` (14),
        :math:`B = 1/(hm) + \sqrt{3\kappa} + 2\sqrt{18\kappa}(\sigma/C)\sqrt{1+d/h}`;
        :math:`\sqrt{3\kappa}` shrinks with a known heterogeneity, see
        :meth:`covariance`. ``order=True``: (2), (3), all numerical constants being 1.
        """
        (sigma,) = _check(noise_std=noise_std)
        C, root = self.lipschitz, math.sqrt(self._kappa)
        noise = sigma / C * math.sqrt(1 + self.d / self._honest)
        if order:
            terms, factor = (1.0, noise), 1
        else:
            terms, factor = (math.sqrt(self._spread) / C, math.sqrt(72) * noise), 2
        robust = root * sum(terms) if root else 0.0
        per_step = 1 / (self._honest * self.m) + robust
        mu = self.strong_convexity
        steps = 1 / mu if mu else self.learning_rate * self.steps
        return factor * C**2 * steps * per_step

    @in_float64
    def lower(self, noise_std) -> float:
        r"""Return the order of the lower bound of theorem 3.2, for ``smea``, convex.

        :math:`\gamma C^2T[1/(hm) + f/(n-2f) + \sqrt{f/(n-2f)}(\sigma/C)(1+\sqrt{d/h})]`
        (4), with the root of f/(n-2f) in the middle (5) if f >= n/3, and without
        :math:`1+\sqrt{d/h}` (15), (16) if d = 1; up to a constant, for weak privacy.
        """
        (sigma,) = _check(noise_std=noise_std)
        share = self.f / (self.n - 2 * self.f)
        middle = math.sqrt(share) if 3 * self.f >= self.n else share
        size = 1.0 if self.d == 1 else 1 + math.sqrt(self.d / self._honest)
        noise = math.sqrt(share) * sigma / self.lipschitz * size
        total = 1 / (self._honest * self.m) + middle + noise
        return self.learning_rate * self.lipschitz**2 * self.steps * total

    @in_float64
    def gdp(self, noise_std) -> float:
        r"""Return the :math:`\mu = 2C\sqrt T/(m\sigma)` for which T steps are GDP."""
        (sigma,) = _check(noise_std=noise_std)
        top = 2 * self.lipschitz * math.sqrt(self.steps) / self.m
        return top / sigma if sigma else math.inf

    @in_float64
    def nominal_epsilon(self, noise_std, delta) -> float:
        r"""Return epsilon by theorem 2.1, :math:`2C\sqrt{2T\ln(1/\delta)}/(m\sigma)`.

        For large epsilon not a guarantee (at delta = 1e-5 from 8 on): use
        :func:`jaxfed.privacy.accounting.certified_epsilon` with sensitivity 2C/m.
        """
        return self.gdp(noise_std) * self._tail(delta)

    @in_float64
    def nominal_noise_std(self, epsilon, delta) -> float:
        """Return the noise by theorem 2.1, the inverse of :meth:`nominal_epsilon`."""
        (epsilon,) = _check(epsilon=epsilon)
        if not 0 < epsilon < math.inf:
            raise ValueError(f"epsilon must be finite and > 0, got epsilon={epsilon}.")
        return self.gdp(1.0) * self._tail(delta) / epsilon

    @in_float64
    def privacy(self, noise_std, delta=None) -> float:
        """Return the bound on stability that privacy alone implies.

        Without ``delta``, :func:`gaussian_stability`, exact and the least; with it, the
        paper's: lemma 2.2 at :meth:`nominal_epsilon`.
        """
        if delta is None:
            return gaussian_stability(self.gdp(noise_std), self.loss_bound)
        return dp_stability(
            self.nominal_epsilon(noise_std, delta), delta, self.loss_bound
        )

    @in_float64
    def best(self, noise_std, delta=None) -> float:
        """Return the least of the loss bound, :meth:`privacy` and :meth:`upper`."""
        implied = self.privacy(noise_std, delta)
        return min(self.loss_bound, implied, self.upper(noise_std))

    @in_float64
    def weak_regime(self, noise_std) -> float:
        r"""Return the rising order (8).

        :math:`\sigma\gamma CT\sqrt{f/(n-2f)}(1+\sqrt{d/h})`, for sigma up to about
        :math:`C\sqrt T/m`.
        """
        (sigma,) = _check(noise_std=noise_std)
        slope = math.sqrt(self.f / (self.n - 2 * self.f))
        slope *= 1 + math.sqrt(self.d / self._honest)
        return sigma * self.learning_rate * self.lipschitz * self.steps * slope

    @in_float64
    def strong_regime(self, noise_std, delta) -> float:
        r"""Return the falling order (9).

        :math:`\ell_\infty C\sqrt{T\ln(1/\delta)}/(m\sigma)`.
        """
        half = self.nominal_epsilon(noise_std, delta) / math.sqrt(8)
        return self.loss_bound * half

    @in_float64
    def crossing(self, delta) -> float:
        """Return the noise at which (8) and (9) are equal; inf if f = 0."""
        rising = self.weak_regime(1.0)
        return (
            math.sqrt(self.strong_regime(1.0, delta) / rising) if rising else math.inf
        )

    @in_float64
    def predicted(
        self, noise_std, *, test_steps, radius=math.inf, magnitude=None
    ) -> float:
        r"""Predict the stability of the lower bounds' instance.

        :math:`C\,P(\Delta)\min\{2\gamma(T-T_0)\frac fh b, 2R\}`: with probability P
        (:func:`mia_success`) the attacker tells the data sets apart by its first
        :math:`T_0` = ``test_steps`` rounds, :math:`\Delta = C\sqrt{T_0}/(m\sigma)`, and
        pushes by b = ``magnitude`` * sigma in the others. ``radius`` R is that of the
        ball of projection; without one the curve does not fall. ``magnitude=None``:
        :func:`byzantine_magnitude`.
        """
        sigma, *_ = _check(
            noise_std=noise_std,
            radius=radius,
            test_steps=test_steps,
            magnitude=magnitude,
        )
        if test_steps > self.steps:
            raise ValueError(
                f"test_steps must be at most steps={self.steps}, got "
                f"test_steps={test_steps}."
            )
        if magnitude is None:
            magnitude = byzantine_magnitude(self.n, self.f)
        C, push = self.lipschitz, magnitude * sigma * self.f / self._honest
        signal = C * math.sqrt(test_steps) / self.m
        success = mia_success(signal / sigma if sigma else math.inf)
        travel = 2 * self.learning_rate * (self.steps - test_steps) * push
        return C * success * min(travel, 2 * radius)

    @property
    def _honest(self):
        return self.n - self.f

    @property
    def _kappa(self):
        return 4 * self.f / (self.n - 2 * self.f) if self.kappa is None else self.kappa

    @property
    def _spread(self):
        if self.heterogeneity is None:
            return 3 * self.lipschitz**2
        return 2 * self.local_variance + self.heterogeneity

    @staticmethod
    def _tail(delta):
        _check(delta=delta)
        if delta == 0:
            raise ValueError("delta must be > 0, got delta=0: the noise is Gaussian.")
        return math.sqrt(2 * math.log(1 / delta))


# --- privacy and membership inference ---------------------------------------------


@in_float64
def dp_stability(epsilon, delta, loss_bound, *, linear=False) -> float:
    r"""Bound stability by differential privacy (lemma 2.2).

    Args:
      epsilon: >= 0, may be inf.
      delta: 0 <= delta < 1.
      loss_bound: losses are in ``[0, loss_bound]``.
      linear: (7), :math:`(e+1)\ell_\infty\varepsilon` if delta <= epsilon, in place of
        :math:`\ell_\infty(e^\varepsilon - 1 + \delta)`.

    Returns:
      float; ``loss_bound`` where the lemma says no more, from epsilon = ln(2 - delta).

    Raises:
      TypeError, ValueError: for arguments out of range.
    """
    _check(epsilon=epsilon, delta=delta, loss_bound=loss_bound)
    if epsilon > 1 or (linear and delta > epsilon):
        return loss_bound
    share = (math.e + 1) * epsilon if linear else math.expm1(epsilon) + delta
    return loss_bound * share if share < 1 else loss_bound


@in_float64
def gaussian_stability(mu, loss_bound) -> float:
    r"""Bound stability by mu-GDP: :math:`\ell_\infty(2\Phi(\mu/2)-1)`.

    Total variation of two Gaussians at distance mu: the sharp form of lemma 2.2.

    Args:
      mu: >= 0, may be inf; see :meth:`StabilityTheory.gdp`.
      loss_bound: losses are in ``[0, loss_bound]``.

    Returns:
      float.

    Raises:
      TypeError, ValueError: for arguments out of range.
    """
    _check(mu=mu, loss_bound=loss_bound)
    share = mia_success(mu)
    return loss_bound * share if share > 0 else 0.0


@in_float64
def mia_success(separation, level=None) -> float:
    r"""Return the probability that the threshold test is right on both data sets.

    :math:`P = \Phi(z) - \Phi(z-\Delta)`. The best level is :math:`z = \Delta/2`,
    where :math:`P = 2\Phi(\Delta/2) - 1`.

    Args:
      separation: Delta >= 0 of the statistic in units of its noise, may be inf;
        :math:`C\sqrt{T_0}/(m\sigma)` for :math:`T_0` observed rounds.
      level: z >= 0; None for the best.

    Returns:
      float in [0, 1].

    Raises:
      TypeError, ValueError: for arguments out of range.

    Example:
      >>> round(mia_success(1.0), 3)
      0.383
    """
    _check(separation=separation, level=level)
    if level is None:
        return math.erf(separation / math.sqrt(8))
    cdf = NormalDist().cdf
    return cdf(level) - cdf(level - separation)


# --- steps and attackers ------------------------------------------------------------


@in_float64
def expansivity(learning_rate, smoothness, strong_convexity=None) -> float:
    r"""Return a Lipschitz constant of the honest gradient step (lemma B.2).

    The least that applies of :math:`1 - \gamma\mu` (strongly convex, gamma <= 1/L),
    :math:`1 - \gamma L\mu/(\mu+L)` (gamma <= 2/(mu+L)), 1 (convex, gamma <= 2/L) and
    :math:`1 + \gamma L`.

    Args:
      learning_rate: gamma > 0.
      smoothness: L > 0.
      strong_convexity: mu; 0 for convex, None for non-convex losses.

    Returns:
      float.

    Raises:
      TypeError, ValueError: for arguments out of range, or mu > L.
    """
    gamma, L, mu = _check(
        learning_rate=learning_rate,
        smoothness=smoothness,
        strong_convexity=strong_convexity,
    )
    if mu is None or gamma > 2 / L:
        return 1 + gamma * L
    if mu > L:
        raise ValueError(
            "strong_convexity must be at most smoothness, got "
            f"strong_convexity={mu}, smoothness={L}."
        )
    if gamma <= 1 / L:
        return 1 - gamma * mu
    return 1 - gamma * L * mu / (mu + L) if gamma <= 2 / (mu + L) else 1.0


@in_float64
def byzantine_magnitude(n, f) -> float:
    r"""Return beta of the attack for d = 1, in units of the noise.

    :math:`\beta = \frac12\sqrt{(h-1)h/(f(n-2f))}`: SMEA keeps f clients that send
    it (proven for f >= n/3, by the paper's argument on expectations).

    Args:
      n: number of clients.
      f: number of Byzantine clients, ``1 <= f < n/2``.

    Returns:
      float.

    Raises:
      TypeError, ValueError: for other n or f.
    """
    _attackers(n, f)
    h = n - f
    return math.sqrt((h - 1) * h / (f * (n - 2 * f))) / 2


@in_float64
def spectral_magnitude(n, f, strength, eigenvalue) -> float:
    r"""Return the magnitude (20) of the attack for d > 1.

    :math:`c\,h/\sqrt{f(n-2f)}\sqrt\Lambda`; the f clients then add exactly
    :math:`c^2\Lambda` to the variance along their direction.

    Args:
      n: number of clients.
      f: number of Byzantine clients, ``1 <= f < n/2``.
      strength: c >= 0; 0.3 is kept by SMEA in nine rounds of ten or more.
      eigenvalue: :math:`\Lambda`, top eigenvalue expected of the honest covariance, as
        of :func:`monte_carlo` times the noise variance.

    Returns:
      float, in the units of the root of ``eigenvalue``.

    Raises:
      TypeError, ValueError: for arguments out of range.
    """
    _attackers(n, f)
    _check(strength=strength)
    _validate.nonnegative("eigenvalue", eigenvalue)
    return strength * (n - f) / math.sqrt(f * (n - 2 * f)) * math.sqrt(eigenvalue)


def _attackers(n, f):
    _check(n=n, f=f)
    if f == 0:
        raise ValueError("f must be at least 1, got f=0: there is no attacker.")


# --- constants of the lower bound's proof for d > 1 -----------------------------------


class TechnicalConstants(NamedTuple):
    """Constants of assumption C.3.

    Attributes:
      r_max: bound of r_L, of :class:`MonteCarlo`.
      c_max: largest strength before the condition on d.
      mu_min: d/(n-f) must exceed it.
      n_min: n-f-1 must reach it.
      c_opt: strengths below are covered; 0 if none is.
      feasible: whether the assumption holds.
    """

    r_max: float
    c_max: float
    mu_min: float
    n_min: float
    c_opt: float
    feasible: bool


@in_float64
def technical_constants(n, f, d, *, universal=1.0) -> TechnicalConstants:
    r"""Return the constants that the lower bound for d > 1 asks for (section 3.6).

    At :math:`\mu=\nu=d/h`, :math:`\alpha_{\min}=\alpha=f/h`, for a small strength, and
    :math:`r_L` at its bound. They are far too strict: no experiment is near feasible,
    though the attack works at n = 7; :func:`monte_carlo` has the condition itself.

    Args:
      n: number of clients.
      f: number of Byzantine clients, ``1 <= f < n/2``.
      d: number of parameters.
      universal: the constants :math:`C_1 = C_2`, which the paper does not state.

    Returns:
      TechnicalConstants.

    Raises:
      TypeError, ValueError: for arguments out of range.
    """
    _attackers(n, f)
    _check(d=d)
    _validate.nonnegative("universal", universal)
    alpha, ratio = f / (n - f), d / (n - f)
    q, root = math.sqrt(1 - alpha), math.sqrt(ratio)
    r_max = ((root + 1 / 3 + 2 / 3 * q) / (root + 2 / 3 + q / 3)) ** 2
    c_max2 = 1 - (1 - alpha) / (root + 1 - (1 - q) / 3) ** 2
    gap = c_max2 * (1 - r_max)
    c_opt2 = max((gap - 4 / ratio) / (3 - r_max), 0.0)
    margin = min(c_max2, 1 - r_max) / 4
    second = 16 * min(1, ratio) / (margin * root * math.sqrt(2))
    n_min = max((3 * (root + q + universal) / (1 - q)) ** 2, second)
    mu_min = 4 / gap
    feasible = alpha < 1 / 2 and ratio > mu_min and n - f - 1 >= n_min
    return TechnicalConstants(
        r_max, math.sqrt(c_max2), mu_min, n_min, math.sqrt(c_opt2), feasible
    )


class MonteCarlo(NamedTuple):
    r"""Quantities of the proof for d > 1, measured.

    Attributes:
      eigenvalue: :math:`\Lambda/\sigma^2` (21), mean top eigenvalue of the covariance
        of n-f standard Gaussian rows.
      c_l: :math:`c_L` of (22), in [1/2, 1.12].
      r_l: :math:`r_L` of (28).
      strength: the largest c for which conditions (30), (31) hold with no margin; 0 if
        for none.
    """

    eigenvalue: float
    c_l: float
    r_l: float
    strength: float


@in_float64
def monte_carlo(n, f, d, *, draws=400, seed=0) -> MonteCarlo:
    r"""Measure what :func:`technical_constants` bounds.

    Args:
      n: number of clients.
      f: number of Byzantine clients, ``1 <= f < n/2``.
      d: number of parameters.
      draws: Gaussian matrices of each kind, 1 to 10**6.
      seed: of the draws, >= 0.

    Returns:
      MonteCarlo.

    Raises:
      TypeError, ValueError: for arguments out of range.

    Cost:
      ``draws`` eigenvalues of matrices of at most n-f rows: never d x d.
    """
    _attackers(n, f)
    _check(d=d)
    rng = np.random.default_rng(_validate.count("seed", seed, minimum=0))
    draws, h, inner = _validate.count("draws", draws, maximum=10**6), n - f, n - 2 * f

    def top(x):
        gram = x @ x.T if x.shape[0] < x.shape[1] else x.T @ x
        return np.linalg.eigvalsh(gram)[-1] if gram.size else 0.0

    whole = part = 0.0
    for _ in range(draws):
        x = rng.standard_normal((h - 1, d))
        # A block of the same matrix: the ratio of the means varies less.
        whole, part = whole + top(x) / draws, part + top(x[:inner, 1:]) / draws
    lam, r_l = float(whole / h), float(part / whole)
    c_l = math.sqrt(whole / h) / (math.sqrt((h - 1) / h) * (1 + math.sqrt(d / (h - 1))))
    # lambda_max [[a + c2 lam, u], [u, r lam]] < lam with u^2 = b + e c2 (27)-(29):
    # linear in c2.
    alpha = f / h
    a = inner * (h - 1) / h**2
    b = (1 - alpha) ** 2 * (d - 1) / inner * (h - 1) / h
    e = (1 - alpha) * alpha * (d - 1) / inner * lam
    rest = lam * (1 - r_l)
    c2 = ((lam - a) * rest - b) / (lam * rest + e)
    return MonteCarlo(lam, c_l, r_l, math.sqrt(max(c2, 0.0)))
