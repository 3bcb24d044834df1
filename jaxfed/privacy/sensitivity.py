# SPDX-License-Identifier: Apache-2.0
r"""How far one honest client can move each rule's aggregate: arithmetic only.

Each function returns a :class:`jaxfed.Sensitivity` whose ``bound(num_clients, radius)``
is the L2 distance between two aggregates whose inputs differ in one row, both of norm
at most ``radius``. Shifting all rows by one vector (or a reference, too) changes none
of them. Numbers may be traced. Mode ``"tight"`` is proven here, ``"paper"`` is what
Xiang et al., `Optimal Byzantine-resilient Federated Learning with User-level
Differential Privacy <https://arxiv.org/abs/2611.10898>`_, 2026, print (Table 4;
Proposition 1 for the trimmed mean).
"""

import jax.numpy as jnp

from jaxfed import _validate
from jaxfed._base import Sensitivity

MODES = ("tight", "paper")


def _sensitivity(tight, paper=None, *, bounded_inputs=False) -> Sensitivity:
    """Make a :class:`Sensitivity` from its two formulas ``(n, radius, dim)``."""

    def bound(num_clients, radius, *, dim=None, mode="tight"):
        _validate.choice("mode", mode, MODES)
        n = _validate.count("num_clients", num_clients)
        formula = tight if paper is None or mode == "tight" else paper
        return formula(n, radius, dim)

    return Sensitivity(bound, bounded_inputs)


def mean() -> Sensitivity:
    """``2 C / n``."""
    return _sensitivity(lambda n, radius, dim: 2 * radius / n)


def trimmed_mean(num_byzantine) -> Sensitivity:
    """``2 C / (n - 2f)``, attained; the paper's is ``sqrt(1 + 4 f^2 / n^2)`` times it.

    In each coordinate the trimmed mean is a clamp of slope ``1 / (n - 2f)`` in one
    input. Proposition 1 is taken at its best, at the largest admissible
    ``nu = n / f - 2``.
    """
    f = num_byzantine

    def tight(n, radius, dim):
        _validate.majority(f, n)
        return 2 * radius / (n - 2 * f)

    def paper(n, radius, dim):
        return tight(n, radius, dim) * (1 + 4 * f**2 / n**2) ** 0.5

    return _sensitivity(tight, paper)


def median(middle="mean") -> Sensitivity:
    """``2 C``, and ``C`` for the mean of two middle values; paper ``2 C sqrt(d)``.

    A coordinate of the median has slope at most 1 in one input (1/2 where two values
    are averaged), and so has the whole in L2.
    """

    def tight(n, radius, dim):
        return (2 if n % 2 or middle == "lower" else 1) * radius

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
    """``2 C``, if every row is in the ball: rules that end in the rows' convex hull."""
    return _sensitivity(lambda n, radius, dim: 2 * radius, bounded_inputs=True)


def centered_clipping(clip_norm, iterations=1) -> Sensitivity:
    """``2 min(tau, C) / n`` an iteration, from a published centre; paper ``2 tau / n``.

    Clipping is a projection, which does not expand, and nor does the step from one
    centre to the next.
    """

    def tight(n, radius, dim):
        plain = _validate.is_concrete(clip_norm) and _validate.is_concrete(radius)
        least = min if plain else jnp.minimum
        return 2 * iterations * least(clip_norm, radius) / n

    def paper(n, radius, dim):
        return 2 * iterations * clip_norm / n

    return _sensitivity(tight, paper)
