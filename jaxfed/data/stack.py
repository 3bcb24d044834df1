# SPDX-License-Identifier: Apache-2.0
"""From a split to one stacked, padded shard."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxfed._base import Shard
from jaxfed._validate import count


def stack(data, parts, *, capacity=None):
    """Stack the clients' examples, padded with zeros to a common capacity.

    Nothing is dropped: a capacity below the largest client is an error. A client may
    have no examples at all (a Byzantine one that owns no data); its count is 0.

    Args:
      data: tree of arrays ``[N, ...]``, for instance ``{"image", "label"}``.
      parts: one integer array of indices into ``range(N)`` per client, as a split
        returns them.
      capacity: rows per client. Default: the size of the largest client, at least 1.

    Returns:
      A :class:`jaxfed.Shard`: ``data`` with leaves ``[n, capacity, ...]``, ``count``
      of type ``int32 [n]``.

    Raises:
      ValueError: for no clients, leaves of different lengths, indices out of range, or
        a capacity that is too small.
      TypeError: for indices that are not integers.

    Cost:
      ``n * capacity`` rows; with very unequal clients this is much more than N.

    Example:
      >>> import numpy as np
      >>> from jaxfed.data import stack
      >>> shard = stack({"x": np.arange(5.0)}, [[0, 3, 4], [1, 2]])
      >>> shard.data["x"].tolist(), shard.count.tolist()
      ([[0.0, 3.0, 4.0], [1.0, 2.0, 0.0]], [3, 2])
    """
    leaves = [np.asarray(x) for x in jax.tree.leaves(data)]
    lengths = {x.shape[0] if x.ndim else None for x in leaves}
    if len(lengths) != 1 or None in lengths:
        raise ValueError(
            "data must be a tree of arrays with the same leading axis, got shapes "
            f"{[x.shape for x in leaves]}."
        )
    (length,) = lengths
    parts = [_indices(i, part, length) for i, part in enumerate(parts)]
    if not parts:
        raise ValueError("parts must hold at least one client, got none.")
    sizes = np.array([len(p) for p in parts], np.int32)
    largest = int(sizes.max())
    if capacity is None:
        # One row even if nobody has data, so that an index into it is always valid.
        capacity = max(1, largest)
    elif count("capacity", capacity) < largest:
        raise ValueError(
            f"capacity must be at least the size of the largest client, got "
            f"capacity={capacity}, client {sizes.argmax()} has {largest} examples."
        )

    def pad(x):
        out = np.zeros((len(parts), capacity, *x.shape[1:]), x.dtype)
        for row, part in zip(out, parts, strict=True):
            row[: len(part)] = x[part]
        return jnp.asarray(out)

    stacked = jax.tree.unflatten(jax.tree.structure(data), map(pad, leaves))
    return Shard(stacked, jnp.asarray(sizes))


def _indices(client, part, length):
    part = np.asarray(part)
    if part.size == 0:
        return np.zeros(0, np.int64)
    if not np.issubdtype(part.dtype, np.integer) or part.ndim != 1:
        raise TypeError(
            f"parts[{client}] must be a vector of integer indices, got {part.dtype} "
            f"of shape {part.shape}."
        )
    if part.min() < 0 or part.max() >= length:
        raise ValueError(
            f"parts[{client}] must index {length} examples, got indices from "
            f"{part.min()} to {part.max()}."
        )
    return part
