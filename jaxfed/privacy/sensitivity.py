# SPDX-License-Identifier: Apache-2.0
r"""How far one honest client can move each rule's aggregate: arithmetic only.

Each function returns a :class:`jaxfed.Sensitivity` whose ``bound(num_clients, radius)``
is the L2 distance between two aggregates whose inputs differ in one row. Under the
relation ``"replace"`` that row is any two of norm at most ``radius``, so it moves by at
most ``2 C``; under ``"zero"`` one of the two is 0, a client without data (n stays), and
it moves by at most C. Shifting all rows by one vector (or a reference, too) changes no
bound. Numbers may be traced. Mode ``"tight"`` is proven here, ``"paper"`` is what Xiang
et al., `Optimal Byzantine-resilient Federated Learning with User-level Differential
Privacy <https://arxiv.org/abs/2611.10898>`_, 2026, print (Table 4; Proposition 1 for
the trimmed mean), for ``"replace"`` only.
"""

import math

import jax.numpy as jnp

from jaxfed import _validate
from jaxfed._base import Sensitivity

MODES = ("tight", "paper")
# How far a row of norm at most C moves, in units of C.
_REACH = {"replace": 2, "zero": 1}
RELATIONS = tuple(_REACH)


def _sensitivity(
    tight, paper=None, *, bounded_inputs=False, adds_up=False
) -> Sensitivity:
    """Make a :class:`Sensitivity` from its two formulas.

    Args:
      tight: ``(n, radius, reach)``, where ``reach`` is how far the row may move.
      paper: ``(n, radius, dim)``; None: the tight one.
      bounded_inputs: whether every row must be in the ball.
      adds_up: whether rows are added up, whatever their length.
    """

    def bound(num_clients, radius, *, dim=None, mode="tight", relation="replace"):
        _validate.choice("mode", mode, MODES)
        _validate.choice("relation", relation, RELATIONS)
        n = _validate.count("num_clients", num_clients)
        if mode == "paper" and relation != "replace":
            raise ValueError(
                f"the paper bounds a replaced row only, got relation={relation!r} with "
                "mode='paper': use mode='tight'."
            )
        if mode == "paper" and paper is not None:
            return paper(n, radius, dim)
        return tight(n, radius, _REACH[relation] * radius)

    return Sensitivity(bound, bounded_inputs, adds_up)


def mean() -> Sensitivity:
    """``2 C / n``, for a row set to zero ``C / n``: linear, both attained."""
    return _sensitivity(lambda n, radius, reach: reach / n, adds_up=True)


def trimmed_mean(num_byzantine) -> Sensitivity:
    """``2 C / (n - 2f)``, for a row set to zero ``C / (n - 2f)``; both attained.

    In each coordinate the trimmed mean is a clamp of slope ``1 / (n - 2f)`` in one
    input. The paper's is ``sqrt(1 + 4 f^2 / n^2)`` times as much: Proposition 1 at its
    best, at the largest admissible ``nu = n / f - 2``.
    """
    f = num_byzantine

    def tight(n, radius, reach):
        _validate.majority(f, n)
        return reach / (n - 2 * f)

    def paper(n, radius, dim):
        return tight(n, radius, 2 * radius) * (1 + 4 * f**2 / n**2) ** 0.5

    return _sensitivity(tight, paper)


def median(middle="mean") -> Sensitivity:
    """``2 C``, for a row set to zero C; paper ``2 C sqrt(d)``.

    A coordinate of the median is a clamp of slope 1 in one input, and so is the whole
    in L2; where two middle values are averaged the slope is 1/2, and so are the bounds.
    All are attained.
    """

    def tight(n, radius, reach):
        return reach if n % 2 or middle == "lower" else reach / 2

    def paper(n, radius, dim):
        if dim is None:
            raise ValueError(
                "the paper's bound for the median grows with the number of parameters: "
                "pass dim=, or mode='tight'."
            )
        _validate.count("dim", dim)
        return 2 * radius * dim**0.5

    return _sensitivity(tight, paper)


def convex_hull() -> Sensitivity:
    """``2 C``, if every row is in the ball: rules that end in the rows' convex hull.

    The hull is in the ball, whose diameter is ``2 C``. A row set to zero may do as
    much: Krum with n = 5, f = 1 and two other rows at each of two ends of the ball
    chooses the end where the fifth is, and either one (a tie) while that is at 0. The
    geometric median can move by more than C then, too.
    """
    return _sensitivity(lambda n, radius, reach: 2 * radius, bounded_inputs=True)


def centered_clipping(clip_norm, iterations=1) -> Sensitivity:
    """``2 min(tau, C) / n`` an iteration, from a published centre; paper ``2 tau / n``.

    Clipping is a projection on a ball of diameter ``2 tau``, which does not expand: the
    row's share moves by at most ``2 tau`` and by no more than the row, ``2 C``, or C
    for one set to zero: ``min(2 tau, C) / n``. Nor does the step from one centre to
    the next expand, ``v - mean(clip(v - x))``: its slope in v is between 0 and 1. Both
    are attained in one iteration, and in more of them where every row is clipped.
    """

    def tight(n, radius, reach):
        plain = _validate.is_concrete(clip_norm) and _validate.is_concrete(radius)
        least = min if plain else jnp.minimum
        return iterations * least(2 * clip_norm, reach) / n

    def paper(n, radius, dim):
        return 2 * iterations * clip_norm / n

    everything = _validate.is_concrete(clip_norm) and clip_norm == math.inf
    return _sensitivity(tight, paper, adds_up=everything)
