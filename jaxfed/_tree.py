# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on stacked trees, leaf by leaf; nothing is raveled."""

import jax
import jax.numpy as jnp
from jax import lax

# Rows added in one fusion: one read of the array, where XLA's CPU reduction over the
# leading axis is 60 times slower. Longer sums go by groups, to bound compile time.
UNROLL = 64
# Columns a block: a block of 20 to 100 rows stays in the cache of one core.
BLOCK = 8192


def accumulator(dtype):
    """Return the dtype to compute in: float32 for 16-bit floats, else the same."""
    return jnp.promote_types(jax.dtypes.canonicalize_dtype(dtype), jnp.float32)


def total(terms):
    """Sum a list of arrays pairwise: the rounding error grows with ``log2(n)`` only."""
    terms = list(terms)
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=False)
        terms = [a + b for a, b in pairs] + terms[len(terms) // 2 * 2 :]
    return terms[0]


def expand(vector, leaf):
    """Reshape ``[n]`` so that it broadcasts against a stacked leaf ``[n, ...]``."""
    return vector.reshape(vector.shape + (1,) * (leaf.ndim - 1))


def where_rows(keep, updates, other):
    """Take rows of ``updates`` where ``keep`` (bool ``[n]``), else of ``other``.

    ``other`` is a Python number or a tree whose leaves broadcast against the leaves.
    """
    if isinstance(other, (bool, int, float)):
        other = jax.tree.map(lambda x: jnp.asarray(other, x.dtype), updates)
    return jax.tree.map(
        lambda x, o: jnp.where(expand(keep, x), x, o.astype(x.dtype)), updates, other
    )


def finite_rows(updates):
    """Return bool ``[n]``: whether every entry of a client's tree is finite."""
    per_leaf = [
        jnp.isfinite(x).reshape(x.shape[0], -1).all(1) for x in jax.tree.leaves(updates)
    ]
    return jnp.stack(per_leaf).all(0)


def combine(weights, updates):
    """Return ``sum_i weights[i] * updates[i]``, shaped like one client's tree.

    Rows of weight exactly 0 are left out before any arithmetic, so they may hold NaN.
    Cost: one read of the updates.
    """

    def leaf(x):
        x = jnp.asarray(x)
        n, dtype = x.shape[0], accumulator(x.dtype)
        w = weights.astype(dtype)

        def group(start, size):
            terms = []
            for i in range(size):
                at = start + i
                row = lax.dynamic_index_in_dim(x, at, keepdims=False).astype(dtype)
                terms.append(w[at] * jnp.where(w[at] == 0, 0, row))
            return total(terms)

        full, rest = divmod(n, UNROLL)
        parts = [group(full * UNROLL, rest)] if rest else []
        if full:
            sums = lax.map(lambda i: group(i * UNROLL, UNROLL), jnp.arange(full))
            parts += [sums[i] for i in range(full)]
        return total(parts).astype(x.dtype)

    return jax.tree.map(leaf, updates)


def mix(matrix, updates, origin):
    """Return the stacked tree ``matrix @ updates`` for a matrix ``[m, n]``.

    Rows of the matrix sum to 1 or are 0. The products are taken relative to row
    ``origin`` of the updates, so that nearly equal rows lose no digits.
    """

    def leaf(x):
        x = jnp.asarray(x)
        shape = (matrix.shape[0], *x.shape[1:])
        if x.size == 0:
            return jnp.zeros(shape, x.dtype)
        dtype = accumulator(x.dtype)
        weights = matrix.astype(dtype)
        drawn = jnp.any(matrix != 0, axis=1, keepdims=True)
        flat = x.reshape(x.shape[0], -1)
        n, d = flat.shape
        width = min(d, BLOCK)

        def put(i, out):
            start = jnp.minimum(i * width, d - width)
            block = lax.dynamic_slice(flat, (0, start), (n, width)).astype(dtype)
            centre = lax.stop_gradient(lax.dynamic_slice_in_dim(block, origin, 1))
            mixed = jnp.dot(weights, block - centre, precision="highest") + centre
            mixed = jnp.where(drawn, mixed, 0).astype(x.dtype)
            return lax.dynamic_update_slice(out, mixed, (0, start))

        out = jnp.zeros((shape[0], d), x.dtype)
        return lax.fori_loop(0, -(-d // width), put, out).reshape(shape)

    return jax.tree.map(leaf, updates)


def norm(tree):
    """Return the L2 norm of a whole tree in float32 or wider; gradient 0 at 0."""
    total = sum(
        jnp.sum(jnp.square(x.astype(accumulator(x.dtype))))
        for x in jax.tree.leaves(tree)
    )
    return jnp.where(total > 0, jnp.sqrt(jnp.where(total > 0, total, 1)), 0)
