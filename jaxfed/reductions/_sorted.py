# SPDX-License-Identifier: Apache-2.0
"""Means of the sorted values of each column: the kernels of coordinate-wise rules.

Few rows are sorted by an unrolled network. More rows are not sorted at all: the order
statistics that bound the window are found by bisection over the bits of a float, one
count a bit, on blocks of columns that stay in the cache.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfed import _tree, _validate

# A fully unrolled network compiles fast up to these sizes; with traced ranks every
# wire stays alive, which costs compile time.
_NETWORK_STATIC = 64
_NETWORK_TRACED = 32
# Rows added in one fusion, and columns a block, of a bisection.
_GROUP = 32
_WIDTH = 256


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


# --- the two means ---------------------------------------------------------------


def window_mean(updates, low, high, mask=None):
    """Return the mean of the sorted ranks ``low <= k < high`` of every column.

    Takes a stacked tree. Non-finite values and absent rows (``mask`` False) count as
    +inf. The result is NaN where the window reaches one of them, is empty, or leaves
    ``0 <= k < n``. The gradient is :func:`window_weights`.
    """
    return _call(_window_mean, updates, (low, high), mask)


def nearest_mean(updates, low, high, keep, mask=None):
    """Return the mean of the ``keep`` values nearest the centre of every column.

    The centre is ``window_mean(updates, low, high, mask)``. Of two values equally near
    the lower is taken. Non-finite values and absent rows count as +inf. The result is
    NaN where the centre is, where a value taken is not finite, or unless
    ``1 <= keep <= n``. The gradient is :func:`nearest_weights`: the centre only
    chooses.
    """
    return _call(_nearest_mean, updates, (low, high, keep), mask)


def _call(mean, updates, numbers, mask):
    leaves, structure = jax.tree.flatten(updates)
    leaves = [jnp.asarray(x) for x in leaves]
    static = all(_validate.is_concrete(x) for x in numbers)
    numbers = (numbers, ()) if static else (None, numbers)
    return structure.unflatten(mean(numbers[0], leaves, numbers[1], mask))


# Differentiating the network itself would cost minutes of compilation at 64 rows.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _window_mean(static, leaves, traced, mask):
    low, high = static or traced
    means = _columns(
        lambda rows: _mean_of_ranks(sort_rows(rows), low, high),
        lambda x: sum(_window(x, low, high)),
        static,
        leaves,
        mask,
    )
    valid = (0 <= low) & (low < high) & (high <= len(leaves[0]))
    return _checked(means, valid, leaves)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _nearest_mean(static, leaves, traced, mask):
    low, high, keep = static or traced

    # Relative to a value of the window: distances keep the digits that differ.
    def network(rows):
        ordered = sort_rows(rows)
        base = _mean_of_ranks(ordered, low, low + 1)
        if static:
            ordered = [x - base for x in ordered]
            centre = _mean_of_ranks(ordered, low, high)
            mean = _mean_of_run(ordered, centre, keep)
        else:
            centre = _mean_of_ranks(ordered, low, high, base)
            rows = [x - base for x in rows]
            far = sort_rows(jnp.abs(x - centre) for x in rows)
            reach = _mean_of_ranks(far, keep - 1, keep)
            mean = _mean_around(rows, centre, reach, keep)
        return jnp.where(jnp.isfinite(centre), base + mean, jnp.nan)

    def kernel(x):
        base, centre, reach = _reach(x, low, high, keep)
        return base + _mean_around(x - base[None], centre, reach, keep)

    means = _columns(network, kernel, static, leaves, mask)
    return _checked(means, _fits(low, high, keep, len(leaves[0])), leaves)


def _fits(low, high, keep, n):
    return (0 <= low) & (low < high) & (high <= n) & (1 <= keep) & (keep <= n)


def _checked(means, valid, leaves):
    return [
        jnp.where(jnp.isfinite(mean) & valid, mean, jnp.nan).astype(x.dtype)
        for mean, x in zip(means, leaves, strict=True)
    ]


@_window_mean.defjvp
def _window_mean_jvp(static, primals, tangents):
    leaves, traced, mask = primals
    weights = window_weights(leaves, *(static or traced), mask)
    moved = [_weigh(w, t) for w, t in zip(weights, tangents[0], strict=True)]
    return _window_mean(static, *primals), moved


@_nearest_mean.defjvp
def _nearest_mean_jvp(static, primals, tangents):
    leaves, traced, mask = primals
    weights = nearest_weights(leaves, *(static or traced), mask)
    moved = [_weigh(w, t) for w, t in zip(weights, tangents[0], strict=True)]
    return _nearest_mean(static, *primals), moved


def _weigh(weights, moved):
    terms = jnp.where(weights == 0, 0, weights * moved.astype(weights.dtype))
    return jnp.sum(terms, axis=0).astype(moved.dtype)


# --- the weight of every value ---------------------------------------------------


def window_weights(updates, low, high, mask=None):
    """Return a tree of ``[n, ...]``, the weight of every value in :func:`window_mean`.

    Values that tie share the ranks they hold together. 0 where the mean is NaN.
    """
    leaves, structure = jax.tree.flatten(updates)
    leaves = [_clean(jnp.asarray(x), mask) for x in leaves]
    # A network would be fused with what follows, and run again for every row.
    ends = _by_columns(lambda x: _select(x, [low, high - 1]), leaves)

    def weigh(x, first, last):
        def ranks(end):
            """Return which values tie with ``end``, and the ranks they hold."""
            below, upto = sum_rows(lambda row: (_int(row < end), _int(row <= end)), x)
            return x == end[None], below[None], upto[None]

        weights = ((x > first[None]) & (x < last[None])).astype(x.dtype)
        for tied, start, stop in (ranks(first), ranks(last)):
            held = jnp.minimum(stop, high) - jnp.maximum(start, low)
            share = held.astype(x.dtype) / jnp.maximum(stop - start, 1).astype(x.dtype)
            weights = jnp.where(tied, share, weights)
        valid = (0 <= low) & (low < high) & (high <= len(x))
        valid = jnp.isfinite(first) & jnp.isfinite(last) & valid
        return jnp.where(valid[None], weights / jnp.asarray(high - low, x.dtype), 0)

    return structure.unflatten(
        weigh(x, *end) for x, end in zip(leaves, ends, strict=True)
    )


def nearest_weights(updates, low, high, keep, mask=None):
    """Return a tree of ``[n, ...]``, the weight of every value in :func:`nearest_mean`.

    Equal values share the places they hold together. 0 where the mean is NaN.
    """
    leaves, structure = jax.tree.flatten(updates)
    leaves = [_clean(jnp.asarray(x), mask) for x in leaves]
    reaches = _by_columns(lambda x: _reach(x, low, high, keep), leaves)

    def weigh(x, base, centre, reach):
        x = x - base[None]
        nearer, lower, upper = sum_rows(
            lambda row: jax.tree.map(_int, _places(row, centre, reach)), x
        )
        taken = jnp.minimum(lower, keep - nearer)
        below = taken / jnp.maximum(lower, 1).astype(x.dtype)
        above = (keep - nearer - taken) / jnp.maximum(upper, 1).astype(x.dtype)
        near, low_end, high_end = _places(x, centre[None], reach[None])
        share = jnp.where(low_end, below[None], jnp.where(high_end, above[None], near))
        valid = (jnp.isfinite(reach) & _fits(low, high, keep, len(x)))[None]
        return jnp.where(valid, share / jnp.asarray(keep, x.dtype), 0).astype(x.dtype)

    return structure.unflatten(
        weigh(x, *reach) for x, reach in zip(leaves, reaches, strict=True)
    )


# --- networks: lists of rows -----------------------------------------------------


def _columns(network, kernel, static, leaves, mask):
    """Apply to each leaf ``network`` on rows, or ``kernel`` on blocks of columns."""
    if len(leaves[0]) <= (_NETWORK_STATIC if static else _NETWORK_TRACED):
        return [network(_clean_rows(x, mask)) for x in leaves]
    return _by_columns(kernel, leaves, mask)


def _clean_rows(leaf, mask):
    """Return the list of cleaned rows."""
    present = [None] * len(leaf) if mask is None else mask
    return [_clean(leaf[i], present[i]) for i in range(len(leaf))]


def _mean_of_ranks(ordered, low, high, base=0):
    """Return the mean of ``ordered[low:high]`` less ``base``; ranks may be traced."""
    if _validate.is_concrete(low) and _validate.is_concrete(high):
        kept = ordered[low:high] or [jnp.full_like(ordered[0], jnp.nan)]
    else:
        kept = [
            jnp.where((low <= k) & (k < high), x - base, 0)
            for k, x in enumerate(ordered)
        ]
    return _tree.total(kept) / jnp.asarray(high - low, ordered[0].dtype)


def _mean_of_run(ordered, centre, keep):
    """Return the mean of the ``keep`` values nearest ``centre``, a run of ranks.

    The run moves on from rank s while the value it gains is nearer than the one it
    loses; as values are sorted, once it stays it stays.
    """
    slack = 1 - _slack(ordered[0].dtype)
    n = len(ordered)
    keep = min(max(keep, 1), n)
    moves = [
        ordered[s + keep] - centre < slack * (centre - ordered[s])
        for s in range(n - keep)
    ]

    def kept(k):
        x = ordered[k]
        x = jnp.where(moves[k], 0, x) if k < n - keep else x
        return jnp.where(moves[k - keep], x, 0) if k >= keep else x

    return _tree.total(kept(k) for k in range(n)) / keep


# --- bisection: blocks of columns ------------------------------------------------


def _by_columns(kernel, leaves, mask=None):
    """Map ``kernel``, ``[n, width] -> tree of [width]``, over blocks of columns.

    One loop serves all leaves of a dtype, so that a tree compiles like one array.
    """
    out = [None] * len(leaves)
    for dtype in {_tree.accumulator(x.dtype) for x in leaves}:
        same = [i for i, x in enumerate(leaves) if _tree.accumulator(x.dtype) == dtype]
        for i, result in zip(
            same, _blocks(kernel, [leaves[i] for i in same], mask), strict=True
        ):
            out[i] = result
    return out


def _blocks(kernel, leaves, mask):
    n = len(leaves[0])
    flat = [x.reshape(n, -1) for x in leaves]
    sizes = [x.shape[1] for x in flat]
    width = min(max(sizes), _WIDTH)
    if jax.default_backend() != "cpu":
        out = [kernel(_clean(x, mask)) for x in flat]
    elif width == 0:
        out = [jax.eval_shape(kernel, _clean(x, mask)) for x in flat]
        out = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)
    else:
        flat = [jnp.pad(x, ((0, 0), (0, max(width - x.shape[1], 0)))) for x in flat]
        ends = np.cumsum([x.shape[1] for x in flat])
        last = np.cumsum([-(-d // width) for d in sizes])
        first = last - [-(-d // width) for d in sizes]

        def block(leaf, start):
            cut = [
                lambda s, x=x: _clean(lax.dynamic_slice(x, (0, s), (n, width)), mask)
                for x in flat
            ]
            return kernel(lax.switch(leaf, cut, start))

        def put(i, out):
            leaf = jnp.sum(i >= last, dtype=jnp.int32)
            start = (i - jnp.asarray(first)[leaf]) * width
            # The last block of a leaf overlaps the one before.
            size = jnp.asarray([x.shape[1] for x in flat])[leaf]
            start = jnp.minimum(start, size - width)
            place = jnp.asarray(ends)[leaf] - size + start
            return jax.tree.map(
                lambda o, x: lax.dynamic_update_slice(o, x, (place,)),
                out,
                block(leaf, start),
            )

        shapes = jax.eval_shape(block, 0, 0)
        out = jax.tree.map(lambda x: jnp.zeros(int(ends[-1]), x.dtype), shapes)
        out = lax.fori_loop(0, int(last[-1]), put, out)
        begins = [int(e) - x.shape[1] for e, x in zip(ends, flat, strict=True)]
        out = [
            jax.tree.map(lambda o, b=b, d=d: o[b : b + d], out)
            for b, d in zip(begins, sizes, strict=True)
        ]
    return [
        jax.tree.map(lambda o, x=x: o.reshape(x.shape[1:]), o)
        for o, x in zip(out, leaves, strict=True)
    ]


def _select(x, ranks):
    """Return the values of the given sorted ranks of every column of ``[n, d]``.

    The answer is the largest t with at least ``n - rank`` values ``>= t``. Its bits
    are set from the highest down, in integers ordered as the floats are.
    """
    n = x.shape[0]
    if jax.default_backend() != "cpu":
        ordered = jnp.sort(x, axis=0)
        return [jnp.take(ordered, k, axis=0, mode="clip") for k in ranks]
    bits = jnp.finfo(x.dtype).bits
    integer = jnp.dtype(f"int{bits}")
    least, most = jnp.iinfo(integer).min, jnp.iinfo(integer).max

    def flip(key):
        return jnp.where(key < 0, key ^ most, key)

    # Integers also because a processor may take tiny floats for 0 in comparisons.
    ordered = flip(lax.bitcast_convert_type(x, integer))

    def set_bit(i, keys):
        tried = [key + (jnp.ones([], integer) << (bits - 1 - i)) for key in keys]
        for j, (rank, t) in enumerate(zip(ranks, tried, strict=True)):
            above = sum_rows(lambda row, t=t: _int(row >= t), ordered)
            tried[j] = jnp.where(above >= n - rank, t, keys[j])
        return tried

    keys = [jnp.full(x.shape[1:], least, integer) for _ in ranks]
    keys = lax.fori_loop(0, bits, set_bit, keys)
    return [lax.bitcast_convert_type(flip(key), x.dtype) for key in keys]


def _window(x, low, high):
    """Return the first value of a window of ranks, and how far above it the mean is."""
    if _validate.is_concrete(low) and _validate.is_concrete(high) and high - low == 1:
        (first,) = _select(x, [low])
        return first, jnp.zeros_like(first)
    first, last = _select(x, [low, high - 1])

    def term(row):
        inside = (first < row) & (row < last)
        return jnp.where(inside, row - first, 0), _int(row < last)

    total, below = sum_rows(term, x)
    ends = jnp.where(first < last, (high - below).astype(x.dtype) * (last - first), 0)
    return first, (total + ends) / jnp.asarray(high - low, x.dtype)


def _reach(x, low, high, keep):
    """Return a window's first value, its mean and the ``keep``-th smallest distance.

    Both are relative to the first value.
    """
    first, centre = _window(x, low, high)
    (reach,) = _select(jnp.abs(x - first[None] - centre[None]), [keep - 1])
    return first, centre, reach


# --- both ------------------------------------------------------------------------


def _slack(dtype):
    """Return how far apart, relatively, two distances still count as equal.

    Fusions round a centre differently; nothing may depend on that.
    """
    return 8 * float(jnp.finfo(dtype).eps)


def _places(x, centre, reach):
    """Return which values are nearer than ``reach``, at it and lower, at it and not."""
    far, slack = jnp.abs(x - centre), _slack(x.dtype) * reach
    near = far < reach - slack
    tied = ~near & (far <= reach + slack)
    return near, tied & (x < centre), tied & (x >= centre)


def _mean_around(rows, centre, reach, keep):
    """Return the mean of the ``keep`` values within ``reach`` of ``centre``."""

    def term(row):
        near, lower, _ = _places(row, centre, reach)
        return jnp.where(near, row - centre, 0), _int(near), _int(lower)

    total, nearer, lower = sum_rows(term, rows)
    left = keep - nearer
    ends = (left - 2 * jnp.minimum(lower, left)).astype(reach.dtype) * reach
    return centre + (total + ends) / jnp.asarray(keep, reach.dtype)


def sum_rows(term, x):
    """Return the sum over rows of ``term(row)``, a tree of arrays, in groups of rows.

    Args:
      term: ``row -> tree``.
      x: list of rows, or array ``[n, ...]``.
    """

    def group(rows):
        return jax.tree.map(lambda *parts: _tree.total(parts), *map(term, rows))

    if isinstance(x, list):
        return group(x)

    def add(g, sums):
        start = first + g * _GROUP
        rows = [
            lax.dynamic_index_in_dim(x, start + i, keepdims=False)
            for i in range(_GROUP)
        ]
        return jax.tree.map(jnp.add, sums, group(rows))

    first = len(x) % _GROUP or min(len(x), _GROUP)
    sums = group(x[i] for i in range(first))
    return lax.fori_loop(0, (len(x) - first) // _GROUP, add, sums)


def sum_clean_rows(term, leaves, mask=None):
    """Return the sum of ``term(row)`` over the cleaned rows of each leaf of a list."""
    add = functools.partial(sum_rows, term)
    return _columns(add, add, True, leaves, mask)


def _int(flags):
    return flags.astype(jnp.int32)


def _clean(x, mask=None):
    """Return ``x`` in its accumulator; what is not finite or present is +inf."""
    good = jnp.isfinite(x)
    good = good if mask is None else good & _tree.expand(mask, x)
    return jnp.where(good, x.astype(_tree.accumulator(x.dtype)), jnp.inf)


def present_count(n, mask):
    """Return how many clients take part: n itself, or the traced sum of the mask."""
    return n if mask is None else jnp.sum(mask, dtype=jnp.int32)
