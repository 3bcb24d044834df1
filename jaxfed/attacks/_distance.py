# SPDX-License-Identifier: Apache-2.0
"""Attacks that hide as far out as honest clients are from each other."""

import jax
import jax.numpy as jnp

from jaxfed import _tree, _validate, reductions
from jaxfed._base import Attack
from jaxfed.attacks import _base


def min_max(deviation="std") -> Attack:
    r"""Min-max: as far from the mean as two honest messages are from each other.

    Sends :math:`\mu + \gamma p` with the largest :math:`\gamma` such that no honest
    message is further away than the greatest distance between two honest ones,

    .. math:: \max_i \|\mu + \gamma p - x_i\| \le \max_{i,j} \|x_i - x_j\|.

    The adversary sees the honest messages of the round, noise included. Each honest
    message bounds :math:`\gamma` by a quadratic equation, whose least root is taken:
    exact, where the paper bisects.

    Args:
      deviation: p, ``"std"`` (minus the honest messages' sample standard deviation,
        coordinate by coordinate), ``"unit"`` (minus the mean's unit vector) or
        ``"sign"`` (minus the mean's signs).

    Returns:
      Attack on the wire; Byzantine clients need no data.

    Raises:
      ValueError: for another ``deviation``.

    Cost:
      ``O(n^2 d)``, the pairwise distances.

    References:
      Shejwalkar and Houmansadr, `Manipulating the Byzantine
      <https://par.nsf.gov/servlets/purl/10286354>`_, NDSS 2021.
    """

    def largest(seen, between, to_mean, slopes, square):
        room = jnp.max(between) - to_mean
        root = jnp.sqrt(jnp.maximum(slopes**2 + square * room, 0)) - slopes
        return jnp.min(jnp.where(seen.byzantine, jnp.inf, root)) / square

    return _furthest(deviation, largest)


def min_sum(deviation="std") -> Attack:
    r"""Min-sum: no further from all honest messages together than the outermost one.

    Sends :math:`\mu + \gamma p` with the largest :math:`\gamma` such that

    .. math:: \sum_i \|\mu + \gamma p - x_i\|^2 \le \max_i \sum_j \|x_i - x_j\|^2.

    The adversary sees the honest messages of the round, noise included. The sum is a
    quadratic in :math:`\gamma`, whose root is taken: exact, where the paper bisects.

    Args:
      deviation: p, as in :func:`min_max`.

    Returns:
      Attack on the wire; Byzantine clients need no data.

    Raises:
      ValueError: for another ``deviation``.

    Cost:
      ``O(n^2 d)``, the pairwise distances.

    References:
      Shejwalkar and Houmansadr, 2021, as in :func:`min_max`.
    """

    def largest(seen, between, to_mean, slopes, square):
        del slopes  # they cancel in the sum
        room = jnp.max(jnp.sum(between, axis=1)) - jnp.sum(to_mean)
        return jnp.sqrt(jnp.maximum(room, 0) / (seen.num_honest * square))

    return _furthest(deviation, largest)


def _furthest(deviation, largest):
    """Go from the honest mean along a direction, by ``largest`` of its lengths.

    ``largest`` gets the squared distances ``[n, n]`` between honest messages and
    ``[n]`` to their mean, the inner products of ``mean - x_i`` with the direction,
    all 0 for Byzantine rows, and the direction's squared norm, which is positive.
    """
    _validate.choice("deviation", deviation, ("std", "unit", "sign"))

    def forge(seen):
        mean, honest = seen.mean(), ~seen.byzantine
        if deviation == "std":
            direction = _base.scaled(-1.0, seen.std(mean, ddof=1))
        elif deviation == "sign":
            direction = jax.tree.map(lambda m: -jnp.sign(m), mean)
        else:
            length = _tree.norm(mean)
            direction = _base.scaled(-1 / jnp.where(length > 0, length, 1), mean)
        geometry = reductions.geometry(seen.updates, mask=honest)
        weights = jnp.where(honest, 1.0, 0.0) / seen.num_honest
        pairs = honest[:, None] & honest[None, :]
        between = jnp.where(pairs, geometry.sq_distances(), 0)
        to_mean = jnp.where(honest, geometry.sq_distances_to(weights), 0)
        away = jax.tree.map(lambda x, m: m[None] - x, seen.updates, mean)
        slopes = jnp.where(honest, _base.dots(away, direction), 0)
        square = _base.dots(jax.tree.map(lambda p: p[None], direction), direction)[0]
        some = (square > 0) & jnp.any(honest)
        gamma = largest(seen, between, to_mean, slopes, jnp.where(some, square, 1))
        return _base.moved(mean, jnp.where(some, gamma, 0), direction)

    return _base.stateless(forge)
