# SPDX-License-Identifier: Apache-2.0
"""Pairwise geometry of the clients, from one pass over their updates."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfed import _tree, _validate
from jaxfed.reductions import _sorted


class Geometry(NamedTuple):
    """Inner products of the clients' updates about a common centre.

    The centre lies inside the honest range of every coordinate, so that distances
    keep their digits whatever Byzantine rows hold. Rules built on it must not depend
    on where it is: they use differences, or affine combinations of rows.

    Attributes:
      gram: ``[n, n]`` inner products; rows and columns that are not ``usable`` are 0.
      usable: bool ``[n]``, present and finite (squares included).
      present: bool ``[n]``, takes part.
    """

    gram: jax.Array
    usable: jax.Array
    present: jax.Array

    @property
    def count(self):
        """Number of clients that take part, non-finite ones included."""
        return jnp.sum(self.present, dtype=jnp.int32)

    def sq_distances(self):
        """Return ``[n, n]`` squared distances; inf to rows that are not usable.

        A row is at distance 0 from itself, whatever it holds.
        """
        sq = jnp.diagonal(self.gram)
        d = jnp.maximum(sq[:, None] + sq[None, :] - 2 * self.gram, 0)
        d = jnp.where(self.usable[:, None] & self.usable[None, :], d, jnp.inf)
        return jnp.where(jnp.eye(d.shape[0], dtype=bool), 0, d)

    def medoid(self):
        """Return the index of the row with the smallest median distance to the rest.

        With fewer than half Byzantine rows it is no further from some honest row than
        honest rows are from each other, whatever the Byzantine rows hold.
        """
        d = jnp.where(self.present[None, :], self.sq_distances(), jnp.inf)
        median = jnp.take(jnp.sort(d, axis=1), self.count // 2, axis=1, mode="clip")
        return jnp.argmin(jnp.where(self.usable, median, jnp.inf))

    def mixed(self, matrix):
        """Return the geometry of ``matrix @ updates``; rows of ``matrix`` sum to 1.

        A mixed row is usable when every row it draws on is.
        """
        usable = ~jnp.any((matrix != 0) & ~self.usable[None, :], axis=1)
        gram = product(product(matrix, self.gram), matrix.T)
        gram = jnp.where(usable[:, None] & usable[None, :], gram, 0)
        return Geometry(gram, usable, jnp.any(matrix != 0, axis=1))


def product(a, b):
    """Return ``a @ b`` in full precision on every backend."""
    return jnp.matmul(a, b, precision="highest")


def _centre(x, num_byzantine, mask):
    """Return a point ``[d]`` inside the honest range of every column of ``x``."""
    n = x.shape[0]
    if mask is not None:
        count = _sorted.present_count(n, mask)
        return _sorted.window_mean(x, (count - 1) // 2, count // 2 + 1, mask)
    if _validate.is_concrete(num_byzantine):
        n = min(n, 2 * num_byzantine + 1)
    return _sorted.window_mean(x[:n], (n - 1) // 2, n // 2 + 1)


def _leaf_gram(x, centre):
    """Return the Gram matrix about ``centre`` and the finite rows of ``[n, d]``."""
    n, d = x.shape
    width = min(d, _tree.BLOCK)

    def add(i, carry):
        gram, finite = carry
        # The last block overlaps the one before; columns seen already are left out.
        start = jnp.minimum(i * width, d - width)
        fresh = start + jnp.arange(width) >= i * width
        block = lax.dynamic_slice(x, (0, start), (n, width))
        middle = lax.dynamic_slice(centre, (start,), (width,))[None]
        fine = jnp.isfinite(block)
        moved = jnp.where(fine & fresh[None], block.astype(middle.dtype) - middle, 0)
        return gram + product(moved, moved.T), finite & fine.all(axis=1)

    start = jnp.zeros((n, n), centre.dtype), jnp.ones(n, bool)
    if d <= _tree.BLOCK:
        return add(0, start)
    return lax.fori_loop(0, -(-d // width), add, start)


def geometry(updates, num_byzantine=None, *, mask=None) -> Geometry:
    """Compute the clients' :class:`Geometry` in one pass, leaf by leaf.

    The centre of each column is the median of the first 2f+1 rows (of all present
    rows if f is traced, None, or there is a mask): with at most f Byzantine rows it
    lies between two honest values.

    Args:
      updates: stacked tree, leaves ``[n, ...]`` floating point.
      num_byzantine: f, only used to choose the rows of the centre.
      mask: bool ``[n]``, True = present.

    Returns:
      Geometry in float32, or float64 for float64 leaves.

    Cost:
      ``O(n^2 d)`` multiplications, one read of the updates and one of the 2f+1 rows;
      ``O(d)`` extra memory for the centre.
    """
    n = _validate.stacked(updates)
    f = _validate.budget(num_byzantine, optional=True)
    mask = _validate.flags("mask", mask, n)
    gram, finite = jnp.zeros((n, n), jnp.float32), jnp.ones(n, bool)
    for leaf in jax.tree.leaves(updates):
        if leaf.size == 0:
            continue
        x = jnp.asarray(leaf).reshape(n, -1)
        dtype = _tree.accumulator(leaf.dtype)
        centre = _centre(x, f, mask).astype(dtype)
        part, fine = _leaf_gram(x, centre)
        gram, finite = gram + part, finite & fine
    present = jnp.ones(n, bool) if mask is None else mask
    usable = present & finite & jnp.isfinite(jnp.diagonal(gram))
    gram = jnp.where(usable[:, None] & usable[None, :], gram, 0)
    return Geometry(gram, usable, present)


def smallest(scores, k):
    """Return bool ``[n]``: the k smallest scores, near ties to the lowest index.

    Scores within 1e-5 relative (1e-12 in float64) of the k-th smallest are tied with
    it.

    Args:
      scores: ``[n]``, no NaN; inf is the largest.
      k: how many, may be traced; ``k <= 0`` selects nothing.

    Returns:
      bool ``[n]``.

    Cost:
      Sorts ``n`` scores.
    """
    n = scores.shape[-1]
    kth = jnp.take(jnp.sort(scores), jnp.clip(k - 1, 0, n - 1))
    rel = 1e-12 if scores.dtype == jnp.float64 else 1e-5
    near = jnp.abs(scores - kth) <= rel * jnp.abs(kth)
    tied = jnp.where(jnp.isfinite(kth), near, scores == kth)
    below = ~tied & (scores < kth)
    take = jnp.cumsum(tied) <= k - jnp.sum(below)
    return (below | (tied & take)) & (k > 0)


def nnm_matrix(geometry: Geometry, num_byzantine):
    """Return the mixing matrix ``[n, n]`` of nearest-neighbour mixing.

    Row i averages the ``n - f`` present rows nearest to row i, itself included. Rows of
    absent clients are 0.

    Args:
      geometry: the clients' :class:`Geometry`.
      num_byzantine: f, may be traced.

    Returns:
      Matrix ``[n, n]``; NaN if ``2 f >= n``.

    Cost:
      ``O(n^2 log n)``, independent of d.
    """
    d = geometry.sq_distances()
    d = jnp.where(geometry.present[None, :], d, jnp.inf)
    k = geometry.count - num_byzantine
    near = jax.vmap(smallest, (0, None))(d, k) & geometry.present[:, None]
    valid = (2 * num_byzantine < geometry.count) & (num_byzantine >= 0)
    return jnp.where(valid, near / k.astype(geometry.gram.dtype), jnp.nan)
