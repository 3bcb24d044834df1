# SPDX-License-Identifier: Apache-2.0
"""Rules that pick rows by their distances, as weights of the clients' geometry.

Every function returns weights ``[n + anchors]``: equal on the rows it picks, 0 on the
others, NaN where a traced condition fails or a picked row is not usable.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfed.reductions._gram import Geometry, smallest

SCORES = ("squared", "plain", "fourth_power")
NEIGHBORS = {"n-f-2": 2, "n-f-1": 1}


def average(geometry: Geometry, selected, valid=True):
    """Return equal weights on the rows of ``selected`` (bool ``[n]``).

    NaN where ``valid`` is False, nobody is selected, or a selected row is not usable.
    """
    dtype = geometry.gram.dtype
    valid &= jnp.any(selected) & ~jnp.any(selected & ~geometry.usable)
    weights = selected / jnp.sum(selected).astype(dtype)
    return geometry.pad(jnp.where(valid, weights, jnp.nan))


class Neighbours(NamedTuple):
    """Every row's other rows, nearest first; the row itself comes last.

    Attributes:
      index: ``[n, n]``.
      distance: ``[n, n]``, to the power that is summed.
    """

    index: jax.Array
    distance: jax.Array


def neighbours(geometry: Geometry, score) -> Neighbours:
    """Sort the distances of each row; ``score`` is the power that is summed."""
    d = geometry.sq_distances()
    if score == "plain":
        d = jnp.sqrt(d)
    elif score == "fourth_power":
        d = jnp.square(d)
    d = jnp.where(jnp.eye(geometry.n, dtype=bool), jnp.inf, d)
    index = jnp.argsort(d, axis=1)
    return Neighbours(index, jnp.take_along_axis(d, index, axis=1))


def krum_scores(geometry: Geometry, others: Neighbours, f, neighbors, among):
    """Return ``[n]`` summed distances from each row to the nearest others.

    Args:
      geometry: the clients' :class:`Geometry`.
      others: their :func:`neighbours`.
      f: number of Byzantine clients, may be traced.
      neighbors: how many others count, n being the number of rows that take part, or
        that number itself; at least one.
      among: bool ``[n]``, rows that take part.

    Returns:
      Scores; inf for rows that do not take part or are not usable.
    """
    count = jnp.sum(among)
    if isinstance(neighbors, str):
        neighbors = count - f - NEIGHBORS[neighbors]
    near = jnp.minimum(jnp.maximum(neighbors, 1), count - 1)  # a last row has none
    counted = among[others.index] & (others.index != jnp.arange(geometry.n)[:, None])
    taken = counted & (jnp.cumsum(counted, axis=1) <= near)
    total = jnp.sum(jnp.where(taken, others.distance, 0), axis=1)
    return jnp.where(among & geometry.usable, total, jnp.inf)


def krum(geometry: Geometry, f, *, select=1, score="squared", neighbors="n-f-2"):
    """Return the weights of (Multi-)Krum: the ``select`` rows of smallest score.

    Cost: ``O(n^2 log n)``. See :func:`jaxfed.aggregators.krum`.
    """
    others = neighbours(geometry, score)
    scores = krum_scores(geometry, others, f, neighbors, geometry.present)
    return average(geometry, smallest(scores, select), geometry.outvotes(f))


def bulyan_matrix(
    geometry: Geometry,
    f,
    *,
    size,
    selection="rescored",
    select=None,
    score="squared",
    neighbors="n-f-2",
):
    """Return the matrix ``[size, n + anchors]`` of the ``n - 2f`` rows Bulyan selects.

    Args:
      geometry: the clients' :class:`Geometry`.
      f: number of Byzantine clients, may be traced.
      size: number of rows of the matrix; those after the first ``n - 2f``, or
        ``n - 2f - 2`` frozen ones, are 0.
      selection: ``"rescored"`` takes one row at a time, with Krum scores among the rows
        left; ``"frozen"`` averages up to ``select`` of the best rows left, by scores
        computed once.
      select: rows in an average, and neighbours of a score, for ``"frozen"``; None:
        ``n - f - 2``.
      score: as for :func:`neighbours`.
      neighbors: as for :func:`krum_scores`.

    Cost:
      ``O(n^3)`` rescored, ``O(n^2 log n)`` frozen.
    """
    theta, others = geometry.count - 2 * f, neighbours(geometry, score)
    if selection == "frozen":
        most = geometry.count - f - 2
        near = neighbors if select is None else select
        scores = krum_scores(geometry, others, f, near, geometry.present)
        select, theta = most if select is None else select, theta - 2

        def pick(left, i):
            rest = jnp.where(left, scores, jnp.inf)
            best = smallest(rest, jnp.maximum(jnp.minimum(select, most - i), 1))
            return left & ~smallest(rest, 1), average(geometry, best)
    else:

        def pick(left, i):
            scores = krum_scores(geometry, others, f, neighbors, left)
            chosen = smallest(scores, 1)
            return left & ~chosen, average(geometry, chosen)

    _, rows = jax.lax.scan(pick, geometry.present, jnp.arange(size))
    rows = jnp.where(jnp.arange(size)[:, None] < theta, rows, 0)
    return jnp.where(geometry.outvotes(f) & geometry.outvotes(2 * f), rows, jnp.nan)


def monna(geometry: Geometry, f, *, trusted=0):
    """Return the mean of the ``n - f`` rows nearest to the trusted row.

    Cost: ``O(n log n)``. See :func:`jaxfed.aggregators.monna`.
    """
    d = jnp.where(geometry.present, geometry.sq_distances()[trusted], jnp.inf)
    valid = geometry.outvotes(f) & geometry.usable[trusted]
    return average(geometry, smallest(d, geometry.count - f), valid)
