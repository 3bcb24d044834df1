# SPDX-License-Identifier: Apache-2.0
"""Means of a window of ranks of each column: the kernel of coordinate-wise rules."""

import functools

import jax
import jax.numpy as jnp

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
    where the window reaches one of them, is empty, or leaves ``0 <= k < n``. The
    gradient is :func:`window_weights`.
    """
    leaf = jnp.asarray(leaf)
    if _validate.is_concrete(low) and _validate.is_concrete(high):
        return _window_mean((low, high), leaf, (), mask)
    return _window_mean(None, leaf, (low, high), mask)


# Differentiating the network itself would cost minutes of compilation at 64 rows.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _window_mean(static, leaf, traced, mask):
    n, dtype = leaf.shape[0], _tree.accumulator(leaf.dtype)
    low, high = static or traced
    ordered = _ordered(static, leaf, mask)
    if isinstance(ordered, list):
        if static:
            kept = ordered[low:high] or [jnp.full_like(ordered[0], jnp.nan)]
        else:
            kept = [
                jnp.where((low <= k) & (k < high), x, 0) for k, x in enumerate(ordered)
            ]
        mean = _tree.total(kept) / jnp.asarray(high - low, dtype)
    else:
        rank = jnp.arange(n)
        inside = ((low <= rank) & (rank < high)).astype(dtype)
        mean = _tree.combine(inside / jnp.asarray(high - low, dtype), ordered)
    valid = jnp.isfinite(mean) & (0 <= low) & (low < high) & (high <= n)
    return jnp.where(valid, mean, jnp.nan).astype(leaf.dtype)


@_window_mean.defjvp
def _window_mean_jvp(static, primals, tangents):
    leaf, traced, mask = primals
    low, high = static or traced
    weights = window_weights(leaf, low, high, mask)
    moved = jnp.where(weights == 0, 0, weights * tangents[0].astype(weights.dtype))
    tangent = jnp.sum(moved, axis=0).astype(leaf.dtype)
    return _window_mean(static, *primals), tangent


def window_weights(leaf, low, high, mask=None):
    """Return ``[n, ...]``, the weight of every value in :func:`window_mean`.

    Values that tie share the ranks they hold together. 0 where the mean is NaN.
    """
    leaf = jnp.asarray(leaf)
    first = window_mean(leaf, low, low + 1, mask)[None]
    last = window_mean(leaf, high - 1, high, mask)[None]
    present = True if mask is None else _tree.expand(mask, leaf)
    leaf = jnp.where(jnp.isfinite(leaf), leaf, jnp.inf)

    def ranks(end):
        """Return which values tie with ``end``, and the ranks they hold."""
        tied = (leaf == end) & present
        below = jnp.sum((leaf < end) & present, axis=0, keepdims=True)
        return tied, below, below + jnp.sum(tied, axis=0, keepdims=True)

    dtype = _tree.accumulator(leaf.dtype)
    inside = (leaf > first) & (leaf < last) & present
    weights = inside.astype(dtype)
    for tied, start, stop in (ranks(first), ranks(last)):
        held = jnp.minimum(stop, high) - jnp.maximum(start, low)
        share = held.astype(dtype) / jnp.maximum(stop - start, 1).astype(dtype)
        weights = jnp.where(tied, share, weights)
    valid = jnp.isfinite(first) & jnp.isfinite(last) & (low < high)
    return jnp.where(valid, weights / jnp.asarray(high - low, dtype), 0)


def _ordered(static, leaf, mask):
    """Return the sorted rows, as a list where a network sorts them."""
    n, dtype = leaf.shape[0], _tree.accumulator(leaf.dtype)

    def clean(x, present):
        x = x.astype(dtype)
        good = jnp.isfinite(x) if present is None else jnp.isfinite(x) & present
        return jnp.where(good, x, jnp.inf)

    if n <= (_NETWORK_STATIC if static else _NETWORK_TRACED):
        rows = range(n)
        return sort_rows(
            clean(leaf[i], None if mask is None else mask[i]) for i in rows
        )
    present = None if mask is None else _tree.expand(mask, leaf)
    return jnp.sort(clean(leaf, present), axis=0)


def present_count(n, mask):
    """Return how many clients take part: n itself, or the traced sum of the mask."""
    return n if mask is None else jnp.sum(mask, dtype=jnp.int32)


def map_window(updates, low, high, mask=None):
    """Apply :func:`window_mean` to every leaf of a stacked tree."""
    return jax.tree.map(lambda x: window_mean(x, low, high, mask), updates)
