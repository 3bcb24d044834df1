# SPDX-License-Identifier: Apache-2.0
"""Rules that pick rows by their distances: the Krum family and MoNNA."""

from jaxfed import _validate
from jaxfed._base import Aggregator
from jaxfed.aggregators import _compose
from jaxfed.aggregators._coordinatewise import around_median
from jaxfed.privacy import sensitivity
from jaxfed.reductions import _selection


def _condition(f, factor, extra, name, always=False):
    """Return a check of ``n >= factor f + extra`` for a Python f > 0, or any f."""

    def check(n):
        _validate.majority(f, n)
        static = _validate.is_concrete(f) and (always or f > 0)
        if static and n < factor * f + extra:
            raise ValueError(
                f"{name} needs n >= {factor} num_byzantine + {extra} clients, got "
                f"n={n}, num_byzantine={f}. Lower num_byzantine, add clients, or pass "
                "check=False to have the formula without its guarantee."
            )

    return check


def _krum_options(f, score, neighbors, name, check):
    _validate.choice("score", score, _selection.SCORES)
    _validate.choice("neighbors", neighbors, _selection.NEIGHBORS)
    narrow = check and neighbors == "n-f-2"
    return _condition(f, 2, 3 if narrow else 1, name)


def krum(
    num_byzantine, *, score="squared", neighbors="n-f-2", check=True
) -> Aggregator:
    r"""Krum: the row whose nearest other rows are nearest.

    The score of a row is the sum of its squared distances to the ``n - f - 2`` others
    nearest to it; scores within 1e-5 relative are ties and go to the lowest index.
    Guarantee: with ``neighbors="n-f-1"``, :math:`\kappa = 6(1+\frac{f}{n-2f})`.
    Breakdown point: the original analysis needs :math:`n \ge 2f+3`.

    Edge cases: rows with NaN, inf or an overflowing norm are infinitely far away and
    never returned while at most f; more give NaN.

    Args:
      num_byzantine: f; may be traced, and then a violated ``0 <= 2f < n`` gives NaN.
      score: ``"squared"`` (the paper), ``"plain"`` distances, or ``"fourth_power"``.
      neighbors: ``"n-f-2"`` (the paper) or ``"n-f-1"`` others (at least one).
      check: raise unless ``n >= 2f+3`` for ``"n-f-2"`` and f > 0.

    Returns:
      Aggregator.

    Raises:
      ValueError: for unknown options; at trace time if the condition on n fails.

    Cost:
      ``O(n^2 d)`` for the Gram matrix, ``O(n^2 log n)`` for the scores.

    References:
      Blanchard et al., `Machine Learning with Adversaries
      <https://arxiv.org/abs/1703.02757>`_, 2017.
    """
    f = _validate.budget(num_byzantine)
    condition = _krum_options(f, score, neighbors, "krum", check)

    def weigh(geometry, state, weights):
        del weights
        w = _selection.krum(geometry, f, score=score, neighbors=neighbors)
        return w, state

    bound = sensitivity.convex_hull()
    return _compose.geometric("krum", weigh, f, check=condition, sensitivity=bound)


def multi_krum(
    num_byzantine, *, select=None, score="squared", neighbors="n-f-2", check=True
) -> Aggregator:
    """Multi-Krum: the mean of the rows of smallest Krum score.

    Options, edge cases, errors and cost as :func:`krum`. With ``select`` above
    ``n - f`` Byzantine rows are averaged in; ``select = n`` is the mean.

    Args:
      num_byzantine: f, as for :func:`krum`.
      select: how many rows, ``1 <= select <= n``; None: ``n - f``.
      score: as for :func:`krum`.
      neighbors: as for :func:`krum`.
      check: as for :func:`krum`.

    Returns:
      Aggregator.

    Raises:
      ValueError: for unknown options; at trace time if the condition on n fails or
        ``select > n``.

    References:
      Blanchard et al., `Machine Learning with Adversaries
      <https://arxiv.org/abs/1703.02757>`_, 2017.
    """
    f = _validate.budget(num_byzantine)
    condition = _krum_options(f, score, neighbors, "multi_krum", check)
    if select is not None:
        _validate.count("select", select)

    def conditions(n):
        condition(n)
        if select is not None:
            _validate.count("select", select, maximum=n)

    def weigh(geometry, state, weights):
        del weights
        m = geometry.count - f if select is None else select
        options = dict(score=score, neighbors=neighbors)
        return _selection.krum(geometry, f, select=m, **options), state

    return _compose.geometric("multi_krum", weigh, f, check=conditions)


def bulyan(
    num_byzantine,
    *,
    selection="rescored",
    select=None,
    score="squared",
    neighbors="n-f-2",
    middle="mean",
    check=True,
) -> Aggregator:
    r"""Bulyan: Krum selects ``n - 2f`` rows, then each coordinate is trimmed.

    Each coordinate of the result is the mean of the ``n - 4f`` selected values nearest
    to their median.
    Guarantee: every coordinate is near the honest majority's,
    :math:`O(\sqrt{d})` better than Krum alone. Breakdown point: :math:`n \ge 4f+3`.
    Edge cases as :func:`krum`.

    Args:
      num_byzantine: f; may be traced, and then a violated ``0 <= 4f < n`` gives NaN.
      selection: ``"rescored"`` (the paper: one row at a time, scores among those left)
        or ``"frozen"`` (as the library of the rule's authors does: scores computed
        once, over the ``select`` nearest; ``n - 2f - 2`` rows, each the mean of up to
        ``select`` best rows among those after the one before).
      select: number of rows and neighbours for ``"frozen"``, default ``n - f - 2``.
      score: as for :func:`krum`.
      neighbors: as for :func:`krum`.
      middle: ``"mean"`` of the two middle values or the ``"lower"`` one.
      check: raise unless ``n >= 4f+3`` for f > 0.

    Returns:
      Aggregator.

    Raises:
      ValueError: for unknown options; at trace time if the condition on n fails.

    Cost:
      ``O(n^2 d)``, ``O(n^3)`` for the scores, one stacked copy of the selected
      updates.

    References:
      El Mhamdi et al., `The Hidden Vulnerability of Distributed Learning in Byzantium
      <https://arxiv.org/abs/1802.07927>`_, 2018.
    """
    f = _validate.budget(num_byzantine)
    _validate.choice("selection", selection, ("rescored", "frozen"))
    _krum_options(f, score, neighbors, "bulyan", check)
    frozen = selection == "frozen"
    condition = _condition(f, 4, 3 if check or frozen else 1, "bulyan", frozen)
    if select is not None:
        _validate.count("select", select)
        if not frozen:
            raise ValueError(
                f"select is for selection='frozen' only, got select={select} with "
                f"selection={selection!r}. Leave it out."
            )
    static = _validate.is_concrete(f)

    def matrix(geometry, state):
        condition(geometry.n)
        size = geometry.n - 2 * f if static else geometry.n
        size -= 2 if static and frozen else 0
        options = dict(select=select, score=score, neighbors=neighbors)
        m = _selection.bulyan_matrix(
            geometry, f, size=size, selection=selection, **options
        )
        return m, state

    pick = _compose.mixing(matrix, f, drops=not static)
    return _compose.compose(pick, around_median("bulyan", 2 * f, middle, f))


def monna(num_byzantine, *, trusted=0) -> Aggregator:
    r"""MoNNA's rule: the mean of the ``n - f`` rows nearest to a trusted row.

    Guarantee: no honest row is further from the result than in proportion to the
    diameter of the honest rows, as long as the trusted row is honest. No breakdown
    point of its own without that. Edge cases as :func:`krum`; NaN if the trusted row
    is absent or not finite.

    Args:
      num_byzantine: f, ``0 <= f < n/2``; may be traced, and then a violated bound gives
        NaN.
      trusted: index of the trusted client (a pivot that the server knows is honest),
        ``0 <= trusted < n``.

    Returns:
      Aggregator.

    Raises:
      ValueError: at trace time if ``2 f >= n`` or ``trusted >= n``.

    Cost:
      ``O(n^2 d)`` for the Gram matrix.

    References:
      Farhadkhani et al., `Robust Collaborative Learning with Linear Gradient Overhead
      <https://arxiv.org/abs/2209.10931>`_, 2023.
    """
    f = _validate.budget(num_byzantine)
    _validate.count("trusted", trusted, minimum=0)

    def check(n):
        _validate.majority(f, n)
        _validate.count("trusted", trusted, minimum=0, maximum=n - 1)

    def weigh(geometry, state, weights):
        del weights
        return _selection.monna(geometry, f, trusted=trusted), state

    return _compose.geometric("monna", weigh, f, check=check)
