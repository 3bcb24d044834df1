# SPDX-License-Identifier: Apache-2.0
"""Means of a window of ranks of each column: the kernel of coordinate-wise rules."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxfed import _tree, _validate

# A fully unrolled network compiles fast up to these sizes; with traced ranks every
# wire stays alive, which costs compile time.
_NETWORK_STATIC = 64
_NETWORK_TRACED = 32


@functools.cache
def _comparators(n):
    """Return Batcher's odd-even merge network for n wires (Knuth, 5.2.2, M)."""
    if n < 2:
        return ()
    top = 1 << ((n - 1).bit_length() - 1)
    pairs, p = [], top
    while p > 0:
        q, r, d = top, 0, p
        while True:
            pairs += [(i, i + d) for i in range(n - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    return tuple(pairs)


def sort_rows(rows):
    """Sort a list of equally shaped arrays elementwise; no NaN allowed.

    The result must be consumed inside one fusion: returning the whole list from a
    compiled function costs far more than the sort.
    """
    rows = list(rows)
    for i, j in _comparators(len(rows)):
        rows[i], rows[j] = jnp.minimum(rows[i], rows[j]), jnp.maximum(rows[i], rows[j])
    return rows


def window_mean(leaf, low, high, mask=None):
    """Return the mean of the sorted ranks ``low <= k < high`` of every column.

    Non-finite values and absent rows (``mask`` False) count as +inf. The result is NaN
    where the window reaches one of them, is empty, or leaves ``0 <= k < n``.
    """
    leaf = jnp.asarray(leaf)
    n = leaf.shape[0]
    dtype = _tree.accumulator(leaf.dtype)

    def clean(x, present):
        x = x.astype(dtype)
        good = jnp.isfinite(x) if present is None else jnp.isfinite(x) & present
        return jnp.where(good, x, jnp.inf)

    static = _validate.is_concrete(low) and _validate.is_concrete(high)
    if n <= (_NETWORK_STATIC if static else _NETWORK_TRACED):
        ordered = sort_rows(
            clean(leaf[i], None if mask is None else mask[i]) for i in range(n)
        )
        if static:
            kept = ordered[low:high] or [jnp.full_like(ordered[0], jnp.nan)]
        else:
            kept = [
                jnp.where((low <= k) & (k < high), x, 0) for k, x in enumerate(ordered)
            ]
        mean = _tree.total(kept) / jnp.asarray(high - low, dtype)
    else:
        present = None if mask is None else _tree.expand(mask, leaf)
        ordered = jnp.sort(clean(leaf, present), axis=0)
        rank = _tree.expand(jnp.arange(n), ordered)
        inside = (low <= rank) & (rank < high)
        # Relative to the first rank inside, a long sum of near values stays exact.
        first = lax.stop_gradient(lax.dynamic_slice_in_dim(ordered, low, 1))
        total = jnp.sum(jnp.where(inside, ordered - first, 0), axis=0)
        mean = first[0] + total / jnp.asarray(high - low, dtype)
    valid = jnp.isfinite(mean) & (0 <= low) & (low < high) & (high <= n)
    return jnp.where(valid, mean, jnp.nan).astype(leaf.dtype)


def present_count(n, mask):
    """Return how many clients take part: n itself, or the traced sum of the mask."""
    return n if mask is None else jnp.sum(mask, dtype=jnp.int32)


def map_window(updates, low, high, mask=None):
    """Apply :func:`window_mean` to every leaf of a stacked tree."""
    return jax.tree.map(lambda x: window_mean(x, low, high, mask), updates)
