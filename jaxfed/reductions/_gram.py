# SPDX-License-Identifier: Apache-2.0
"""Pairwise geometry of the clients, from one pass over their updates."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfed import _tree, _validate
from jaxfed.reductions import _sorted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Geometry:
    """Inner products of the clients' updates, and of anchors, about a common centre.

    The centre lies inside the honest range of every coordinate, so that distances
    keep their digits whatever Byzantine rows hold. Rules built on it must not depend
    on where it is: they use differences, or affine combinations of rows and anchors.

    Attributes:
      gram: ``[n + a, n + a]`` inner products, clients first, then ``a`` anchors; rows
        and columns of clients that are not ``usable`` are 0.
      usable: bool ``[n]``, present and finite (sums of squares included: in float32
        norms up to about ``2e18 / n``).
      present: bool ``[n]``, takes part.
      anchors: names of the anchors, static.
      dim: number of parameters of one client's update, static; None if unknown.
    """

    gram: jax.Array
    usable: jax.Array
    present: jax.Array
    anchors: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    dim: Any = dataclasses.field(default=None, metadata={"static": True})

    @property
    def n(self):
        """Number of clients, absent ones included."""
        return self.usable.shape[0]

    @property
    def rows(self):
        """The clients' block ``[n, n]`` of ``gram``."""
        return self.gram[: self.n, : self.n]

    @property
    def count(self):
        """Number of clients that take part, non-finite ones included."""
        return jnp.sum(self.present, dtype=jnp.int32)

    def outvotes(self, f):
        """Whether ``0 <= 2 f < count``, for any f an integer can hold."""
        return (f >= 0) & (f < self.count - f)

    def index(self, anchor):
        """Return where an anchor stands in ``gram``."""
        return self.n + self.anchors.index(anchor)

    def sq_distances(self):
        """Return ``[n, n]`` squared distances; inf to rows that are not usable.

        A row is at distance 0 from itself, whatever it holds.
        """
        sq = jnp.diagonal(self.rows)
        d = jnp.maximum(sq[:, None] + sq[None, :] - 2 * self.rows, 0)
        d = jnp.where(self.usable[:, None] & self.usable[None, :], d, jnp.inf)
        return jnp.where(jnp.eye(self.n, dtype=bool), 0, d)

    def sq_distances_to(self, weights):
        """Return ``[n]`` squared distances to the point ``weights @ (rows, anchors)``.

        ``weights`` (``[n + a]``) sum to 1. inf for rows that are not usable.
        """
        moved = product(self.gram, weights)
        d = jnp.diagonal(self.gram) - 2 * moved + product(weights, moved)
        return jnp.where(self.usable, jnp.maximum(d[: self.n], 0), jnp.inf)

    def one_hot(self, index):
        """Return weights ``[n + a]`` that pick a row or, by name, an anchor."""
        index = self.index(index) if isinstance(index, str) else index
        size = self.gram.shape[0]
        return (jnp.arange(size) == index).astype(self.gram.dtype)

    def pad(self, weights):
        """Extend weights ``[..., n]`` by zeros for the anchors."""
        none = jnp.zeros((*weights.shape[:-1], len(self.anchors)), weights.dtype)
        return jnp.concatenate([weights, none], axis=-1)

    def medoid(self):
        """Return the index of the row with the smallest median distance to the rest.

        With fewer than half Byzantine rows it is no further from some honest row than
        honest rows are from each other, whatever the Byzantine rows hold.
        """
        d = jnp.where(self.present[None, :], self.sq_distances(), jnp.inf)
        median = jnp.take(jnp.sort(d, axis=1), self.count // 2, axis=1, mode="clip")
        return jnp.argmin(jnp.where(self.usable, median, jnp.inf))

    def mixed(self, matrix):
        """Return the geometry of ``matrix @ (rows, anchors)`` with the same anchors.

        ``matrix`` is ``[m, n + a]`` with rows that sum to 1, or are 0 for absent rows.
        A mixed row is usable when every row it draws on is.
        """
        clients = matrix[:, : self.n]
        present = jnp.any(matrix != 0, axis=1)
        usable = present & ~jnp.any((clients != 0) & ~self.usable[None], axis=1)
        kept = jnp.where(usable[:, None], matrix, 0)
        size = len(self.anchors), self.gram.shape[0]
        full = jnp.concatenate([kept, jnp.eye(*size, self.n, dtype=matrix.dtype)])
        about_old = self._transformed(full, usable, present)
        # About one of the mixed rows, nearly equal rows keep the digits in which
        # they differ.
        middle = lax.dynamic_slice_in_dim(full, about_old.medoid(), 1)
        return self._transformed(full - middle, usable, present)

    def _transformed(self, full, usable, present):
        gram = product(product(full, self.gram), full.T)
        real = jnp.concatenate([usable, jnp.ones(len(self.anchors), bool)])
        gram = jnp.where(real[:, None] & real[None, :], gram, 0)
        return Geometry(gram, usable, present, self.anchors, self.dim)


def product(a, b):
    """Return ``a @ b`` in full precision on every backend."""
    return jnp.matmul(a, b, precision="highest")


def _centre(updates, n, num_byzantine, mask):
    """Return a tree like one update, inside the honest range of every coordinate."""
    if mask is not None:
        n = _sorted.present_count(n, mask)
    elif _validate.is_concrete(num_byzantine):
        n = min(n, 2 * num_byzantine + 1)
        updates = jax.tree.map(lambda x: x[:n], updates)
    return _sorted.window_mean(updates, (n - 1) // 2, n // 2 + 1, mask)


@jax.custom_jvp
def _leaf_gram(x, points, centre):
    """Return the Gram matrix of ``[n, d]`` and points ``[d]`` about ``centre``.

    A row that is not finite spoils its own row and column only.
    """
    n, d = x.shape
    width = _tree.block_width(n, d)
    whole, rest = divmod(d, width)

    def block(start, size):
        rows = lax.dynamic_slice(x, (0, start), (n, size)).astype(centre.dtype)
        ends = [lax.dynamic_slice(p, (start,), (size,))[None] for p in points]
        middle = lax.dynamic_slice(centre, (start,), (size,))[None]
        moved = jnp.concatenate([rows, *ends]) - middle
        return product(moved, moved.T)

    gram = block(whole * width, rest)
    return lax.fori_loop(0, whole, lambda i, g: g + block(i * width, width), gram)


@_leaf_gram.defjvp
def _leaf_gram_jvp(primals, tangents):
    # Not by blocks: the transpose of a loop of slices would fill whole arrays.
    x, points, centre = primals
    shifts = [tangents[0], *(t[None] for t in tangents[1])]
    rows = jnp.concatenate([x, *(p[None].astype(x.dtype) for p in points)])
    moved = rows.astype(centre.dtype) - centre[None]
    moved = jnp.where(jnp.isfinite(moved), moved, 0)
    half = product(jnp.concatenate([s.astype(moved.dtype) for s in shifts]), moved.T)
    return _leaf_gram(*primals), half + half.T


def geometry(
    updates, num_byzantine=None, *, mask=None, anchors=None, about_origin=False
) -> Geometry:
    """Compute the clients' :class:`Geometry` in one pass, leaf by leaf.

    The centre of each column is the median of the first 2f+1 rows (of all present
    rows if f is traced, None, or there is a mask): with at most f Byzantine rows it
    lies between two honest values.

    Args:
      updates: stacked tree, leaves ``[n, ...]`` floating point.
      num_byzantine: f, only used to choose the rows of the centre.
      mask: bool ``[n]``, True = present.
      anchors: dict from name to a tree shaped like one update, or None for the origin.
      about_origin: take the origin for the centre, for rules that must survive a
        majority of Byzantine rows.

    Returns:
      Geometry in float32, or float64 for float64 leaves.

    Cost:
      ``O(n^2 d)`` multiplications, one read of the updates and one of the 2f+1 rows;
      ``O(d)`` extra memory for the centre.
    """
    n = _validate.stacked(updates)
    f = _validate.budget(num_byzantine, optional=True)
    mask = _validate.flags("mask", mask, n)
    anchors = anchors or {}
    size = n + len(anchors)
    gram = jnp.zeros((size, size), jnp.float32)
    leaves, structure = jax.tree.flatten(updates)
    places = [
        [None] * len(leaves) if a is None else structure.flatten_up_to(a)
        for a in anchors.values()
    ]
    # Nothing depends on the centre but rounding.
    centres = [None] * len(leaves)
    if not about_origin:
        still = lax.stop_gradient(updates)
        centres = jax.tree.leaves(_centre(still, n, f, mask))
    dim = 0
    for leaf, centre, *ends in zip(leaves, centres, *places, strict=True):
        if leaf.size == 0:
            continue
        x = jnp.asarray(leaf).reshape(n, -1)
        dim += x.shape[1]
        dtype = _tree.accumulator(leaf.dtype)
        zero = jnp.zeros(x.shape[1], dtype)
        if centre is None:
            centre = zero
        else:  # where a majority is not finite, there is no middle
            centre = centre.reshape(-1).astype(dtype)
            centre = jnp.where(jnp.isfinite(centre), centre, 0)
        points = [
            zero if end is None else jnp.asarray(end, dtype).reshape(-1) for end in ends
        ]
        gram += _leaf_gram(x, points, centre)
    present = jnp.ones(n, bool) if mask is None else mask
    # Sums and products of squared distances must not overflow either.
    limit = jnp.finfo(gram.dtype).max / (64 * (n + 1) ** 2)
    usable = present & (jnp.diagonal(gram)[:n] <= limit)
    real = jnp.concatenate([usable, jnp.ones(size - n, bool)])
    gram = jnp.where(real[:, None] & real[None, :], gram, 0)
    return Geometry(gram, usable, present, tuple(anchors), dim)


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
    """Return the mixing matrix of nearest-neighbour mixing.

    Row i averages the ``n - f`` present rows nearest to row i, itself included. Rows of
    absent clients are 0.

    Args:
      geometry: the clients' :class:`Geometry`.
      num_byzantine: f, may be traced.

    Returns:
      Matrix ``[n, n + anchors]``; NaN if ``2 f >= n``.

    Cost:
      ``O(n^2 log n)``, independent of d.
    """
    d = geometry.sq_distances()
    d = jnp.where(geometry.present[None, :], d, jnp.inf)
    k = geometry.count - num_byzantine
    near = jax.vmap(smallest, (0, None))(d, k) & geometry.present[:, None]
    valid = geometry.outvotes(num_byzantine)
    near = jnp.where(valid, near / k.astype(geometry.gram.dtype), jnp.nan)
    return geometry.pad(near)
