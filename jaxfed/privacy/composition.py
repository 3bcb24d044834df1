# SPDX-License-Identifier: Apache-2.0
r"""Privacy of many Gaussian releases whose noise or sampling changes over the rounds.

A round draws a batch of records (examples, or clients), and publishes a vector plus
Gaussian noise of standard deviation :math:`\sigma` per coordinate; what it computes may
depend on all that was published before. The batches must be drawn anew each round and
stay secret, or else count as ``ALL``. Whatever the sampling,

.. math:: z = \mathtt{noise\_multiplier} = \sigma / \Delta,

with :math:`\Delta` the L2 sensitivity of a round's release *if all records are used*;
sampling is credited on top. In full:

===================  ====================================  ===========================
sampling             ``relation="replace_one"``            ``"add_or_remove_one"``
===================  ====================================  ===========================
``ALL``              one record changes: the vector moves  one joins or leaves: the
                     by at most :math:`\Delta`             same
``poisson``          one record joins the batch or leaves  one record joins the batch
                     it: at most :math:`\Delta/2`; so a    or leaves it: at most
                     change moves it by :math:`\Delta`     :math:`\Delta`
``without_           one record of the batch changes: at   not defined: the number of
replacement``        most :math:`\Delta`                   records is public
===================  ====================================  ===========================

For a sum of vectors clipped to norm C, :math:`\Delta` is 2C under ``"replace_one"``
and C under ``"add_or_remove_one"``, which, but for the last row, also covers a record
set to zero. With Poisson sampling, divide by a fixed number, never by the batch's
actual size, and publish the noise of an empty batch too; with a fixed size m, a mean
has :math:`\Delta = 2C/m`. Libraries that count in clip norms under ``"replace_one"``
have twice our z.

==========  ==========================================================================
accountant  what it knows
==========  ==========================================================================
``"pld"``   everything above. Privacy loss distributions, rounded up: at most 1e-4
            relative plus 1e-4 above the true epsilon of the pairs below; more where z
            < 0.1 or the rate < 1e-3. Delta must be at least 1e-11: float64 blurs the
            convolutions below.
``"rdp"``   all but Poisson under ``"replace_one"``. Rényi divergences at orders up to
            1024: typically 5 to 25 % above "pld", and twice as much without
            replacement; an epsilon below log(1/delta) / 1000 is not resolved.
``"exact"`` ``ALL`` only, to 1e-8.
==========  ==========================================================================

The dominating pairs of "pld", with :math:`q` the rate, and :math:`N(x)` a Gaussian of
standard deviation z about x:

- Poisson, add or remove: :math:`(1-q)N(0)+qN(1)` against :math:`N(0)` [1].
- Poisson, replace: :math:`(1-q)N(0)+qN(-\frac12)` against :math:`(1-q)N(0)+
  qN(\frac12)`. Given the rest of the batch, the release is :math:`(1-q)N(0)+qN(a)` or
  :math:`(1-q)N(0)+qN(b)` with :math:`|a|,|b|\le\frac12`. Their hockey-stick divergence
  of order :math:`\ge1` is q times the mean of :math:`(1-c_1X-c_2Y)_+`, with
  :math:`c_i\ge0` and two log-normal likelihood ratios X, Y of mean one (those of
  :math:`N(0)` and :math:`N(b)` to :math:`N(a)`). As all second derivatives are
  :math:`\ge0`, it grows with each entry of the covariance of the logarithms:
  :math:`|a|^2, |a-b|^2` and :math:`|a|^2-a\cdot b` over :math:`z^2`. All three are
  largest at :math:`a=-b`.
- Without replacement: for orders :math:`\ge1` the profile of :math:`(1-q)N(0)+qN(1)`
  against :math:`N(0)` [1, 2]; for orders below 1, which composition needs too,
  :math:`H_a = 1 - a + a\,H_{1/a}`, as neighbours may be swapped. Exact for one round,
  an upper bound for more.

References:
  [1] Zhu, Dong and Wang, `Optimal Accounting of Differential Privacy via Characteristic
  Function <https://arxiv.org/abs/2106.08567>`_, 2022; [2] Balle, Barthe and Gaboardi,
  `Privacy Amplification by Subsampling <https://arxiv.org/abs/1807.01647>`_, 2018. RDP:
  Mironov et al., `<https://arxiv.org/abs/1908.10530>`_, 2019 (Poisson); Wang et al.,
  `<https://arxiv.org/abs/1808.00087>`_, 2019, theorem 27 (without replacement).
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxfed import _validate
from jaxfed.privacy import accounting, gaussian

__all__ = [
    "ACCOUNTANTS",
    "ALL",
    "RELATIONS",
    "Phase",
    "Sampling",
    "accountant_for",
    "delta",
    "epsilon",
    "noise_multiplier",
    "poisson",
    "scale",
    "without_replacement",
]

ACCOUNTANTS = ("pld", "rdp", "exact")
RELATIONS = ("replace_one", "add_or_remove_one")

_KINDS = ("all", "poisson", "without_replacement")
# Below it the rounding of the Fourier transforms of "pld" is no longer small.
_SMALLEST_DELTA = 1e-11
# With less noise in one release, the losses (about 1 / (2 z^2)) leave float64's range
# or the grid's; "infinite" is on the safe side.
_SMALLEST = {"pld": 1e-4, "rdp": 1e-4, "exact": accounting._SMALLEST_MULTIPLIER}
# What the library's Rényi divergence of one round may lack by rounding; without it a
# tiny one may come out negative, which the library takes for an epsilon of 0.
_RENYI_ROUNDING = 1e-14


class Sampling(NamedTuple):
    """How a round draws its batch: :data:`ALL`, or made by a function below.

    Attributes:
      kind: ``"all"``, ``"poisson"`` or ``"without_replacement"``.
      rate: probability that a given record is in the batch.
      size: batch size, if it is fixed.
      population: number of records, if the batch size is fixed.
    """

    kind: str
    rate: float
    size: int | None = None
    population: int | None = None

    def describe(self) -> str:
        """Return the sampling in words.

        Example:
          >>> poisson(0.1).describe()
          'each with probability 0.1 (Poisson)'
        """
        if self.kind == "poisson":
            return f"each with probability {self.rate:g} (Poisson)"
        if self.kind == "without_replacement":
            return f"{self.size} of {self.population} without replacement"
        return "all"


#: Nobody is left out.
ALL = Sampling("all", 1.0)


def poisson(rate: float) -> Sampling:
    """Draw each record independently.

    Args:
      rate: probability in [0, 1].

    Returns:
      The sampling.

    Raises:
      TypeError: ``rate`` is not a plain number.
      ValueError: it is outside [0, 1].
    """
    return Sampling("poisson", accounting._number("rate", rate, _probability))


def without_replacement(size: int, population: int) -> Sampling:
    """Draw a batch of fixed size, every subset alike.

    Args:
      size: records in a batch, 1 to ``population``.
      population: number of records, >= 1.

    Returns:
      The sampling.

    Raises:
      TypeError: an argument is not an integer.
      ValueError: an argument is outside its range.
    """
    population = _validate.count("population", population)
    size = _validate.count("size", size, maximum=population)
    return Sampling("without_replacement", size / population, size, population)


def accountant_for(sampling: Sampling, rounds: int, delta: float) -> str:
    """Return the tightest accountant that is quick and valid for equal rounds.

    Args:
      sampling: how each round draws its batch.
      rounds: number of releases, >= 0.
      delta: failure probability, 0 < delta < 1.

    Returns:
      ``"exact"`` where nobody is left out; ``"pld"``, or beyond 100,000 rounds, where
      that takes minutes, and for tiny deltas ``"rdp"``.
    """
    if sampling.rate == 1:
        return "exact"
    return "pld" if rounds <= 100_000 and delta >= _SMALLEST_DELTA else "rdp"


class Phase(NamedTuple):
    """Rounds in a row with equal noise and sampling.

    Attributes:
      rounds: number of releases, >= 0.
      noise_multiplier: z >= 0, finite: noise over sensitivity, see the module's text.
      sampling: how each round draws its batch.
    """

    rounds: int
    noise_multiplier: float
    sampling: Sampling = ALL


def epsilon(
    phases: Phase | Sequence[Phase],
    delta: float,
    *,
    accountant: str = "pld",
    relation: str = "replace_one",
) -> float:
    """Return an epsilon that all phases together spend at most.

    Args:
      phases: one :class:`Phase` or a sequence; their order does not matter.
      delta: failure probability, 0 < delta < 1.
      accountant: ``"pld"``, ``"rdp"`` or ``"exact"``, see the module's text.
      relation: what neighbouring data sets differ in: ``"replace_one"`` record, or
        ``"add_or_remove_one"``.

    Returns:
      Epsilon; 0.0 if nothing is released, otherwise inf if some noise is 0 (or less
      than 1e-4 of the sensitivity, with ``"exact"`` 1e-6).

    Raises:
      TypeError: an argument is of a wrong kind.
      ValueError: an argument is outside its range, or the accountant has no answer for
        a sampling under the relation.
      ImportError: dp-accounting is not installed.

    Cost:
      ``"pld"``: up to seconds for each different pair of noise and sampling, whatever
      the number of rounds; ``"rdp"``: about 0.1 s; on the host, in float64.

    Example:
      >>> round(epsilon(Phase(1000, 14.742), 4e-4, accountant="exact"), 2)
      8.9
    """
    delta = accounting._delta(delta)
    releases = _releases(phases, accountant, relation)
    if not releases:
        return 0.0
    if _too_little(releases, accountant):
        return math.inf
    if accountant == "exact":
        return accounting.certified_epsilon(releases[0].noise_multiplier, 1, delta, 1)
    if accountant == "rdp":
        orders, divergences, library = _renyi(releases)
        return float(library.compute_epsilon(orders, divergences, delta)[0])
    if delta < _SMALLEST_DELTA:
        raise ValueError(
            f"accountant='pld' does not resolve delta={delta}. Use 'rdp' or 'exact', "
            f"or a delta of at least {_SMALLEST_DELTA:g}."
        )
    return float(_loss_distribution(releases, relation).get_epsilon_for_delta(delta))


def delta(
    phases: Phase | Sequence[Phase],
    epsilon: float,
    *,
    accountant: str = "pld",
    relation: str = "replace_one",
) -> float:
    """Return a delta at which all phases together are epsilon-private.

    Args:
      phases: as in :func:`epsilon`.
      epsilon: budget >= 0, finite.
      accountant: as in :func:`epsilon`.
      relation: as in :func:`epsilon`.

    Returns:
      Delta in [0, 1]; 0.0 if nothing is released, otherwise 1.0 if some noise is 0.

    Raises:
      TypeError: an argument is of a wrong kind.
      ValueError: as in :func:`epsilon`.
      ImportError: dp-accounting is not installed.

    Cost:
      As :func:`epsilon`.
    """
    epsilon = accounting._number("epsilon", epsilon, _validate.nonnegative)
    releases = _releases(phases, accountant, relation)
    if not releases:
        return 0.0
    if _too_little(releases, accountant):
        return 1.0
    if accountant == "exact":
        return gaussian.exact_delta(releases[0].noise_multiplier, epsilon, 1)
    if accountant == "rdp":
        orders, divergences, library = _renyi(releases)
        return float(library.compute_delta(orders, divergences, epsilon)[0])
    return float(_loss_distribution(releases, relation).get_delta_for_epsilon(epsilon))


def noise_multiplier(
    epsilon: float,
    delta: float,
    rounds: int,
    *,
    sampling: Sampling = ALL,
    accountant: str = "pld",
    relation: str = "replace_one",
) -> float:
    """Return the least noise multiplier for which equal rounds spend ``epsilon``.

    Args:
      epsilon: joint budget > 0, finite.
      delta: failure probability, 0 < delta < 1.
      rounds: number of releases, >= 0.
      sampling: how each round draws its batch.
      accountant: as in :func:`epsilon`.
      relation: as in :func:`epsilon`.

    Returns:
      Noise multiplier, at most 1e-5 relative above the least; 0.0 if nothing is
      released. ``epsilon(Phase(rounds, result, sampling), ...)`` is at most ``epsilon``
      as computed, without a tolerance.

    Raises:
      TypeError: an argument is of a wrong kind.
      ValueError: as in :func:`epsilon`, or the accountant does not resolve so small a
        budget.
      ImportError: dp-accounting is not installed.

    Cost:
      About ten times that of :func:`epsilon`.
    """
    phase = Phase(rounds, 1.0, sampling)
    return scale(phase, epsilon, delta, accountant=accountant, relation=relation)


def scale(
    phases: Phase | Sequence[Phase],
    epsilon: float,
    delta: float,
    *,
    accountant: str = "pld",
    relation: str = "replace_one",
) -> float:
    """Return the least factor on all noise for which the phases spend ``epsilon``.

    Args:
      phases: as in :func:`epsilon`, with noise multipliers > 0: the profile.
      epsilon: joint budget > 0, finite.
      delta: failure probability, 0 < delta < 1.
      accountant: as in :func:`epsilon`.
      relation: as in :func:`epsilon`.

    Returns:
      The factor by which to multiply each noise multiplier; as exact and as safe as
      :func:`noise_multiplier`. 0.0 if nothing is released.

    Raises:
      TypeError: an argument is of a wrong kind.
      ValueError: as in :func:`noise_multiplier`, or some noise is 0.
      ImportError: dp-accounting is not installed.

    Cost:
      About ten times that of :func:`epsilon`.
    """
    target = accounting._number("epsilon", epsilon, _validate.positive)
    delta = accounting._delta(delta)
    phases = [phases] if isinstance(phases, Phase) else list(phases)
    releases = _releases(phases, accountant, relation)
    if not releases:
        return 0.0
    least = min(z for _, z, _ in releases)
    if least < 1e-100:  # its square would underflow
        raise ValueError(
            "noise_multiplier must be > 0 in every phase to be scaled, got "
            f"noise_multiplier={least}. Give the profile in any unit, say 1."
        )

    @functools.cache
    def spent(factor):
        scaled = [Phase(t, z * factor, s) for t, z, s in phases]
        return _epsilon(scaled, delta, accountant=accountant, relation=relation)

    # Enough without sampling, up to what the accountant gives away.
    mu = math.sqrt(sum(rounds / z / z for rounds, z, _ in releases))
    guess = high = accounting.certified_noise_std(target, mu, delta, 1)
    low, step = high / 2, 1e-14 if accountant == "exact" else 1e-2
    while spent(high) > target:
        low, high, step = high, high * (1 + step), 2 * step
        if high > 1e4 * guess:
            raise ValueError(
                f"accountant={accountant!r} does not resolve epsilon={target} at "
                f"delta={delta}. Use another accountant, or larger values."
            )
    if accountant == "exact":
        return high
    while spent(low) <= target:
        low, high = low / 2, low
        if low * least < _SMALLEST[accountant]:
            return high

    def gap(log):
        ratio = spent(math.exp(log)) / target
        return math.log(min(max(ratio, 1e-9), 1e9)) + 3e-7  # aim a little below

    # The Illinois method: regula falsi that halves the value of an end that stays.
    over, within = math.log(low), math.log(high)
    at_over, at_within, last = gap(over), gap(within), None
    while within - over > 1e-5 and spent(math.exp(within)) < target * (1 - 1e-6):
        log = within - at_within * (within - over) / (at_within - at_over)
        side = spent(math.exp(log)) <= target
        if side:
            within, at_within = log, gap(log)
            at_over *= 0.5 if last == side else 1
        else:
            over, at_over = log, gap(log)
            at_within *= 0.5 if last == side else 1
        last = side
    return math.exp(within)


_epsilon = epsilon  # the function, where an argument has its name


def _releases(phases, accountant, relation):
    """Return checked phases that cost something, equal ones together."""
    _validate.choice("accountant", accountant, ACCOUNTANTS)
    _validate.choice("relation", relation, RELATIONS)
    counts, precision = {}, 0.0
    for phase in [phases] if isinstance(phases, Phase) else phases:
        if not isinstance(phase, Phase) or not isinstance(phase.sampling, Sampling):
            raise TypeError(
                f"phases must be Phase(rounds, noise_multiplier, sampling), got "
                f"{phase!r}. Make the sampling with poisson or without_replacement."
            )
        rounds = _validate.count("rounds", phase.rounds, minimum=0)
        z = accounting._number(
            "noise_multiplier", phase.noise_multiplier, _validate.nonnegative
        )
        sampling = phase.sampling
        _validate.choice("sampling.kind", sampling.kind, _KINDS)
        _probability("sampling.rate", sampling.rate)
        if sampling.rate == 1:
            sampling = ALL
        _answerable(sampling, accountant, relation)
        if rounds == 0 or sampling.rate == 0:
            continue
        if sampling == ALL and z > 0:  # all of these are one Gaussian release
            precision += rounds / z / z
        else:
            counts[z, sampling] = counts.get((z, sampling), 0) + rounds
    if precision:
        counts[1 / math.sqrt(precision), ALL] = 1
    return [Phase(rounds, *rest) for rest, rounds in counts.items()]


def _answerable(sampling, accountant, relation):
    """Raise unless the accountant knows the sampling under the relation."""
    if accountant == "exact" and sampling != ALL:
        raise ValueError(
            "accountant='exact' needs rounds that leave nobody out, got "
            f"sampling={sampling.describe()!r}. Use accountant='pld'."
        )
    if sampling.kind == "without_replacement" and relation != "replace_one":
        raise ValueError(
            "sampling without replacement fixes the number of records, so relation "
            f"must be 'replace_one', got relation={relation!r}. Use that, or poisson."
        )
    if (sampling.kind, accountant, relation) == ("poisson", "rdp", "replace_one"):
        raise ValueError(
            "accountant='rdp' has no bound for Poisson sampling with "
            "relation='replace_one'. Use accountant='pld'."
        )


def _too_little(releases, accountant):
    return min(z for _, z, _ in releases) < _SMALLEST[accountant]


def _renyi(releases):
    """Return orders, the Rényi divergence at each, and the library's conversions."""
    library = accounting._dp_accounting()
    from absl import logging

    relations = library.NeighboringRelation
    # Under REPLACE_ONE its sampling without replacement divides the noise by the
    # sensitivity, as we do. (Its "pld" and its text divide by a clip norm.)
    fixed = library.rdp.RdpAccountant(neighboring_relation=relations.REPLACE_ONE)
    other = library.rdp.RdpAccountant(neighboring_relation=relations.ADD_OR_REMOVE_ONE)
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # it warns of every order it leaves out
    try:
        with np.errstate(all="ignore"):
            for rounds, z, (kind, rate, size, population) in releases:
                event = library.GaussianDpEvent(z)
                if kind == "poisson":
                    event = library.PoissonSampledDpEvent(rate, event)
                if kind == "without_replacement":
                    event = library.SampledWithoutReplacementDpEvent(
                        population, size, event
                    )
                (fixed if size else other).compose(event, rounds)
    finally:
        logging.set_verbosity(verbosity)
    rounding = _RENYI_ROUNDING * sum(rounds for rounds, _, _ in releases)
    divergences = np.maximum(fixed.rdp + other.rdp, 0) + rounding
    return fixed.orders, divergences, library.rdp.rdp_privacy_accountant


def _loss_distribution(releases, relation):
    """Return the privacy loss distribution of all releases, rounded up."""
    library = accounting._dp_accounting()
    distributions, total = library.pld.privacy_loss_distribution, None
    interval = _interval(releases)
    for rounds, z, sampling in releases:
        if sampling.kind == "without_replacement":
            one = _without_replacement(library.pld, z, sampling.rate, interval)
        else:
            replaced = sampling.kind == "poisson" and relation == "replace_one"
            name = "REPLACE_ONE" if replaced else "ADD_OR_REMOVE_ONE"
            # Its sensitivity is how far one record in the batch moves the release.
            one = distributions.from_gaussian_mechanism(
                z,
                sensitivity=0.5 if replaced else 1.0,
                value_discretization_interval=interval,
                sampling_prob=sampling.rate,
                neighboring_relation=getattr(library.NeighboringRelation, name),
            )
        one = one.self_compose(rounds)
        total = one if total is None else total.compose(one)
    return total


def _without_replacement(pld, z, rate, interval):
    """Return the distribution with the profile of "remove", made symmetric."""
    loss = pld.privacy_loss_mechanism.GaussianPrivacyLoss(z, sampling_prob=rate)
    last = math.ceil(loss.connect_dots_bounds().epsilon_upper / interval)
    grid = interval * np.arange(last + 1)
    above = loss.get_delta_for_epsilon(grid)
    below = -np.expm1(-grid) + np.exp(-grid) * above
    pmf = pld.pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        interval, -last, last, np.concatenate([below[:0:-1], above])
    )
    return pld.privacy_loss_distribution.PrivacyLossDistribution(pmf)


def _interval(releases):
    """Return the grid of the losses: fine against one round's, affordable for all.

    Any grid gives an upper bound; the excess falls with its square.
    """
    deviations, widest, variance = [], 0.0, 0.0
    for rounds, z, (_, rate, _, _) in releases:
        # The largest loss with all records; log(1 + rate * e^loss) with sampling.
        top = 10.5 / z + 0.5 / z / z
        widest = max(widest, float(np.logaddexp(0, math.log(rate) + top)))
        deviation = 1 / z
        if z > 0.5:
            deviation = min(deviation, rate * math.sqrt(math.expm1(1 / z / z)))
        deviations.append(deviation)
        variance += rounds * deviation**2
    finest = max(widest, math.sqrt(variance)) / 1e5
    return max(min(1e-3, min(deviations) / 50), finest)


def _probability(name, x):
    return _validate.unit_interval(name, x, closed_right=True)
