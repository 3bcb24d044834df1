# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on stacked trees, leaf by leaf; nothing is raveled."""

import jax
import jax.numpy as jnp
from jax import lax

# Rows added in one fusion: one read of the array, where XLA's CPU reduction over the
# leading axis is 60 times slower. Longer sums go by groups, to bound compile time.
UNROLL = 64
# Entries a block, which then stays in the cache of one core.
_BLOCK = 40_960


def accumulator(dtype):
    """Return the dtype to compute in: float32 for 16-bit floats, else the same."""
    return jnp.promote_types(jax.dtypes.canonicalize_dtype(dtype), jnp.float32)


def block_width(n, d):
    """Return how many columns of ``[n, d]`` to work on at a time."""
    return min(d, max(256, _BLOCK // n))


def total(terms):
    """Sum a list of arrays pairwise: the rounding error grows with ``log2(n)`` only."""
    terms = list(terms)
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=False)
        terms = [a + b for a, b in pairs] + terms[len(terms) // 2 * 2 :]
    return terms[0]


def expand(vector, leaf):
    """Reshape ``[n]`` so that it broadcasts against a stacked leaf ``[n, ...]``."""
    return vector.reshape(vector.shape + (1,) * (leaf.ndim - vector.ndim))


def where_rows(keep, updates, other):
    """Take rows of ``updates`` where ``keep`` (bool ``[n]``), else of ``other``.

    ``other`` is a Python number or a tree whose leaves broadcast against the leaves.
    """
    if isinstance(other, (bool, int, float)):
        other = jax.tree.map(lambda x: jnp.asarray(other, x.dtype), updates)

    def leaf(x, o):
        o = jnp.reshape(o, (1,) * (x.ndim - o.ndim) + o.shape)
        return jnp.where(expand(keep, x), x, o.astype(x.dtype))

    return jax.tree.map(leaf, updates, other)


def finite_rows(updates):
    """Return bool ``[n]``: whether every entry of a client's tree is finite."""
    # Sums run at the speed of memory; reductions of bools are ten times slower.
    total = sum(
        jnp.sum(x * jnp.zeros([], x.dtype), range(1, x.ndim))
        for x in jax.tree.leaves(updates)
    )
    return jnp.isfinite(total)


def combine(weights, updates, origin=None, total=1, point=None):
    """Return ``sum_i weights[i] * updates[i]``, shaped like one client's tree.

    Rows of weight exactly 0 are left out before any arithmetic, so they may hold NaN.
    With ``origin``, the index of a row, the sum is taken relative to that row, so
    that nearly equal rows lose no digits to weights that were rounded; ``total`` is
    then what the weights sum to. ``point`` is one more term, ``(weight, tree)``, whose
    weight counts towards the total. Cost: one read of the updates.
    """

    def leaf(x, end=None):
        x = jnp.asarray(x)
        dtype = accumulator(x.dtype)
        centre = jnp.zeros(x.shape[1:], dtype)
        if origin is not None:
            row = lax.dynamic_index_in_dim(x, origin, keepdims=False)
            centre = lax.stop_gradient(row.astype(dtype))
        moved = _weighted_sum(weights.astype(dtype), x, centre)
        if end is not None:
            moved += jnp.asarray(point[0], dtype) * (end.astype(dtype) - centre)
        return (jnp.asarray(total, dtype) * centre + moved).astype(x.dtype)

    if point is None:
        return jax.tree.map(leaf, updates)
    return jax.tree.map(leaf, updates, point[1])


@jax.custom_jvp
def _weighted_sum(weights, x, centre):
    """Return ``sum_i weights[i] * (x[i] - centre)`` over weights that are not 0."""

    def group(start, size):
        terms = []
        for i in range(size):
            w = weights[start + i]
            row = lax.dynamic_index_in_dim(x, start + i, keepdims=False)
            row = row.astype(weights.dtype) - centre
            terms.append(w * jnp.where(w == 0, 0, row))
        return total(terms)

    full, rest = divmod(x.shape[0], UNROLL)
    parts = [group(full * UNROLL, rest)] if rest else []
    if full:
        sums = lax.map(lambda i: group(i * UNROLL, UNROLL), jnp.arange(full))
        parts += [sums[i] for i in range(full)]
    return total(parts)


@_weighted_sum.defjvp
def _weighted_sum_jvp(primals, tangents):
    # The sum is linear: transposing its many slices would only cost compile time.
    weights, x, centre = primals
    moved_weights, moved, _ = (jnp.asarray(t, weights.dtype) for t in tangents)
    used = expand(weights != 0, x)
    rows = jnp.where(used, x.astype(weights.dtype) - centre[None], 0)
    terms = expand(moved_weights, x) * rows
    terms += jnp.where(used, expand(weights, x) * moved, 0)
    return _weighted_sum(weights, x, centre), jnp.sum(terms, axis=0)


def mix(matrix, updates, origin, usable, total=None):
    """Return the stacked tree ``matrix @ updates`` for a matrix ``[m, n]``.

    A row of the matrix that draws on an update that is not ``usable`` (bool ``[n]``)
    gives inf. The products are taken relative to row ``origin`` of the updates, so
    that nearly equal rows lose no digits; ``total`` (``[m]``) is what the rows of the
    matrix sum to, None for 1, or 0 in rows of zeros.
    """
    drawn = jnp.any(matrix != 0, axis=1)
    spoiled = jnp.any((matrix != 0) & ~usable[None], axis=1)
    total = drawn.astype(matrix.dtype) if total is None else total
    extra = jnp.where(spoiled, jnp.inf, 0)

    def leaf(x):
        x = jnp.asarray(x)
        dtype = accumulator(x.dtype)
        flat = x.reshape(x.shape[0], -1)
        numbers = (y.astype(dtype) for y in (matrix, total, extra))
        mixed = _mix(flat, *numbers, origin, usable).astype(x.dtype)
        return mixed.reshape(matrix.shape[0], *x.shape[1:])

    return jax.tree.map(leaf, updates)


@jax.custom_jvp
def _mix(x, weights, total, extra, origin, usable):
    """Return ``weights @ (x - centre) + total * centre + extra``, by blocks.

    Rows that are not usable count as 0; ``centre`` is row ``origin``.
    """
    n, d = x.shape
    width = min(d, 2 * block_width(n, d))

    def block(start):
        rows = lax.dynamic_slice(x, (0, start), (n, width)).astype(weights.dtype)
        rows = jnp.where(usable[:, None], rows, 0)
        centre = lax.dynamic_slice_in_dim(rows, origin, 1)
        mixed = jnp.dot(weights, rows - centre, precision="highest")
        return mixed + total[:, None] * centre + extra[:, None]

    def put(i, out):
        start = jnp.minimum(i * width, d - width)
        return lax.dynamic_update_slice(out, block(start), (0, start))

    if d == width:
        return block(0)
    out = jnp.zeros((weights.shape[0], d), weights.dtype)
    return lax.fori_loop(0, -(-d // width), put, out)


@_mix.defjvp
def _mix_jvp(primals, tangents):
    # Not by blocks: the transpose of a loop of slices would fill whole arrays.
    x, weights, _, _, origin, usable = primals
    shift, moved_weights, moved_total, *_ = tangents
    rows = jnp.where(usable[:, None], x.astype(weights.dtype), 0)
    centre = lax.dynamic_slice_in_dim(rows, origin, 1)
    shift = jnp.where(usable[:, None], shift.astype(weights.dtype), 0)
    moved = jnp.dot(weights, shift, precision="highest")
    moved += jnp.dot(moved_weights, rows - centre, precision="highest")
    return _mix(*primals), moved + moved_total[:, None] * centre


def cast_like(tree, params):
    """Return a tree with the dtypes of ``params``."""
    return jax.tree.map(lambda x, p: x.astype(p.dtype), tree, params)


def row_norms(updates):
    """Return the norm ``[n]`` of every client's tree; inf where it is not finite."""
    total = sum(map(_row_squares, jax.tree.leaves(updates)))
    fine = jnp.isfinite(total)
    some = fine & (total > 0)
    root = jnp.where(some, jnp.sqrt(jnp.where(some, total, 1)), 0)
    return jnp.where(fine, root, jnp.inf)


@jax.custom_jvp
def _row_squares(x):
    x = x.astype(accumulator(x.dtype)).reshape(x.shape[0], -1)
    return jnp.sum(jnp.square(x), axis=1)


@_row_squares.defjvp
def _row_squares_jvp(primals, tangents):
    # Rows that are not finite have no derivative.
    (x,), (moved,) = primals, tangents
    fine = jnp.where(jnp.isfinite(x), x, 0).astype(accumulator(x.dtype))
    products = fine * moved.astype(fine.dtype)
    return _row_squares(x), 2 * jnp.sum(products.reshape(x.shape[0], -1), axis=1)


def norm(tree):
    """Return the L2 norm of a whole tree in float32 or wider; gradient 0 at 0."""
    total = sum(
        jnp.sum(jnp.square(x.astype(accumulator(x.dtype))))
        for x in jax.tree.leaves(tree)
    )
    zero = total == 0  # not `total > 0`: the norm of NaN must be NaN
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, total)))
