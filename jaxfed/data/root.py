# SPDX-License-Identifier: Apache-2.0
"""Which examples make a small trusted data set for the server (host NumPy)."""

import numpy as np

from jaxfed._validate import count


def root_indices(parts, size, *, seed, benign=None):
    """Draw root examples in equal shares from the benign clients.

    Shares differ by one at most, the first clients having the larger ones. A client
    with fewer examples gives all it has, and what is missing is drawn from what the
    other benign clients have left. Examples are copied: clients keep theirs. Take the
    labels from the data as they were before any poisoning.

    Args:
      parts: one index array per client, disjoint, as a split returns them.
      size: examples in all, >= 1.
      seed: integer >= 0.
      benign: bool ``[n]``, who may be asked; None: everybody. For instance
        ``~byzantine_ids(n, f)``.

    Returns:
      ``int64 [size]``, distinct indices in random order.

    Raises:
      ValueError: for flags that are not one per client, nobody benign, or fewer
        benign examples than ``size``.
      TypeError: for a size or seed that are not integers, or flags that are not bool.

    Cost:
      Time and memory O(examples).

    References:
      Xiao et al., `<https://arxiv.org/abs/2601.06903>`_, 2026, section VI-B.
    """
    size = count("size", size)
    rng = np.random.default_rng(count("seed", seed, minimum=0))
    benign = np.ones(len(parts), bool) if benign is None else np.asarray(benign)
    if benign.dtype != bool:
        raise TypeError(
            f"benign must be bool, one flag per client, got {benign.dtype}."
        )
    if benign.shape != (len(parts),):
        raise ValueError(
            f"benign must have one flag for each of the {len(parts)} clients, got "
            f"shape {benign.shape}."
        )
    asked = [
        rng.permutation(np.asarray(p, np.int64))
        for p, good in zip(parts, benign, strict=True)
        if good
    ]
    total = sum(map(len, asked))
    if size > total:
        raise ValueError(
            f"size must be at most the number of examples of benign clients, got "
            f"size={size}, and {len(asked)} benign clients have {total}."
        )
    share, more = divmod(size, len(asked))
    shares = [share + (i < more) for i in range(len(asked))]
    taken = [p[:s] for p, s in zip(asked, shares, strict=True)]
    left = np.concatenate([p[s:] for p, s in zip(asked, shares, strict=True)])
    missing = size - sum(map(len, taken))
    extra = rng.choice(left, missing, replace=False)
    return rng.permutation(np.concatenate([*taken, extra]))
