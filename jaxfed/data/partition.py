# SPDX-License-Identifier: Apache-2.0
"""Splitting one data set over clients (host NumPy).

Every split returns one ``int64`` index array per client. The arrays are disjoint, cover
the data, come in random order, and depend on the arguments and the seed only.
"""

import numpy as np

from jaxfed._registry import call, lookup, parse
from jaxfed._validate import count, positive


def _setup(labels, num_clients, seed):
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.size == 0:
        raise ValueError(
            f"labels must be a non-empty vector, one label per example, got shape "
            f"{labels.shape}."
        )
    if not np.issubdtype(labels.dtype, np.integer):
        raise TypeError(f"labels must be integers, got {labels.dtype}.")
    num_clients = count("num_clients", num_clients)
    if num_clients > labels.size:
        raise ValueError(
            f"num_clients must be at most the number of examples, got "
            f"num_clients={num_clients} for {labels.size} examples."
        )
    rng = np.random.default_rng(count("seed", seed, minimum=0))
    return labels, num_clients, rng


def _finish(parts, rng):
    return [rng.permutation(np.asarray(p, np.int64)) for p in parts]


def iid(labels, num_clients, *, seed):
    """Split equally at random: sizes differ by one at most.

    Args:
      labels: integers ``[N]``; only their number matters.
      num_clients: number of clients, ``1 <= num_clients <= N``.
      seed: integer >= 0.

    Returns:
      A list of ``num_clients`` arrays ``int64``, disjoint and covering ``range(N)``.

    Raises:
      ValueError: for no labels, or more clients than examples.
      TypeError: for labels, a number of clients or a seed that are not integers.

    Cost:
      Time and memory O(N).
    """
    labels, num_clients, rng = _setup(labels, num_clients, seed)
    return np.array_split(rng.permutation(labels.size).astype(np.int64), num_clients)


def dirichlet(labels, num_clients, *, beta, seed, min_size=1, max_tries=100):
    r"""Split every class in random proportions.

    For each class draw :math:`p \sim \mathrm{Dir}_n(\beta, \dots, \beta)` and give
    client j the fraction :math:`p_j` of it. Small ``beta`` means different clients (0.1
    is strong heterogeneity, 0.5 moderate); sizes are unequal. The whole split is drawn
    again until every client has ``min_size`` examples.

    Args:
      labels: integers ``[N]``, any values.
      num_clients: number of clients, ``1 <= num_clients <= N``.
      beta: concentration, > 0.
      seed: integer >= 0.
      min_size: fewest examples a client may have, >= 0.
      max_tries: how often to draw before giving up.

    Returns:
      A list of ``num_clients`` arrays ``int64``, disjoint and covering ``range(N)``.

    Raises:
      ValueError: for wrong values, or if no draw gave every client ``min_size``.
      TypeError: for labels, counts or a seed that are not integers.

    Cost:
      Time O(N + classes * num_clients) a draw, memory O(N).

    References:
      Hsu, Qi and Brown, `Measuring the Effects of Non-Identical Data Distribution for
      Federated Visual Classification <https://arxiv.org/abs/1909.06335>`_, 2019, draws
      proportions per client; here they are drawn per class, as is usual by now.
    """
    labels, num_clients, rng = _setup(labels, num_clients, seed)
    beta = float(positive("beta", beta))
    min_size = count("min_size", min_size, minimum=0)
    max_tries = count("max_tries", max_tries)
    if min_size * num_clients > labels.size:
        raise ValueError(
            f"min_size={min_size} for {num_clients} clients needs "
            f"{min_size * num_clients} examples, there are {labels.size}."
        )
    classes = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    most = 0
    for _ in range(max_tries):
        shares = rng.dirichlet(np.full(num_clients, beta), size=len(classes))
        if not np.all(np.isfinite(shares)):  # the draw underflows for a tiny beta
            continue
        cuts = [
            (np.cumsum(p)[:-1] * len(index)).astype(np.int64)
            for p, index in zip(shares, classes, strict=True)
        ]
        sizes = sum(
            np.diff(cut, prepend=0, append=len(index))
            for cut, index in zip(cuts, classes, strict=True)
        )
        most = max(most, sizes.min())
        if sizes.min() >= min_size:
            pieces = [
                np.split(rng.permutation(index), cut)
                for cut, index in zip(cuts, classes, strict=True)
            ]
            return _finish([np.concatenate(p) for p in zip(*pieces, strict=True)], rng)
    raise ValueError(
        f"no Dirichlet split with beta={beta} gave each of {num_clients} clients "
        f"min_size={min_size} examples in {max_tries} draws (the best smallest client "
        f"had {most}). Raise beta or max_tries, or lower num_clients or min_size."
    )


def by_classes(labels, num_clients, *, classes_per_client, seed):
    """Give every client exactly ``classes_per_client`` classes.

    Classes are dealt out at random such that each is held by almost equally many
    clients (the numbers differ by one at most); the examples of a class are split
    equally over its holders.

    Args:
      labels: integers ``[N]``, any values.
      num_clients: number of clients, ``1 <= num_clients <= N``.
      classes_per_client: classes a client holds, at most the number of classes.
      seed: integer >= 0.

    Returns:
      A list of ``num_clients`` arrays ``int64``, disjoint and covering ``range(N)``.

    Raises:
      ValueError: if ``classes_per_client`` exceeds the number of classes, if
        ``num_clients * classes_per_client`` does not reach it (examples would be left
        out), or if a class has fewer examples than holders.
      TypeError: for labels, counts or a seed that are not integers.

    Cost:
      Time O(N + classes * num_clients), memory O(N).
    """
    labels, num_clients, rng = _setup(labels, num_clients, seed)
    k = count("classes_per_client", classes_per_client)
    values = np.unique(labels)
    if k > len(values):
        raise ValueError(
            f"classes_per_client must be at most the number of classes, got "
            f"classes_per_client={k} for {len(values)} classes."
        )
    if num_clients * k < len(values):
        raise ValueError(
            f"{num_clients} clients of classes_per_client={k} hold at most "
            f"{num_clients * k} of {len(values)} classes, so examples would be left "
            "out: raise num_clients or classes_per_client."
        )
    holders = [[] for _ in values]
    for client in range(num_clients):
        # The classes with the fewest holders, ties in random order.
        order = rng.permutation(len(values))
        fewest = sorted(order, key=lambda c: len(holders[c]))[:k]
        for c in fewest:
            holders[c].append(client)
    parts = [[] for _ in range(num_clients)]
    for value, clients in zip(values, holders, strict=True):
        index = rng.permutation(np.flatnonzero(labels == value))
        if len(index) < len(clients):
            raise ValueError(
                f"class {value} has {len(index)} examples, too few for the "
                f"{len(clients)} clients that would share it: lower num_clients or "
                f"classes_per_client (now {num_clients} and {k})."
            )
        pieces = np.array_split(index, len(clients))
        for client, piece in zip(rng.permutation(clients), pieces, strict=True):
            parts[client].append(piece)
    return _finish([np.concatenate(p) for p in parts], rng)


_KINDS = {"iid": iid, "dirichlet": dirichlet, "by_classes": by_classes}


def split(labels, num_clients, *, kind="iid", seed, **options):
    """Split by name, for configurations.

    Args:
      labels: integers ``[N]``.
      num_clients: number of clients.
      kind: ``"iid"``, ``"dirichlet"`` or ``"by_classes"``; options may be written into
        it, as in ``"dirichlet(beta=0.1)"``.
      seed: integer >= 0.
      **options: arguments of that split; those that are None count as not given.

    Returns:
      A list of ``num_clients`` arrays ``int64``, disjoint and covering ``range(N)``.

    Raises:
      ValueError: for an unknown kind or option, a missing one, or as the split does.
      TypeError: if ``kind`` is not a string, or as the split does.

    Cost:
      That of the split.

    Example:
      >>> import numpy as np
      >>> from jaxfed.data import split
      >>> [len(p) for p in split(np.arange(10) % 2, 3, kind="iid", seed=0)]
      [4, 3, 3]
    """
    stages = parse(kind)
    if len(stages) != 1:
        raise ValueError(f"kind must name one split, got {kind!r}.")
    name, written = stages[0]
    factory = lookup(_KINDS, name, "split")
    given = {k: v for k, v in options.items() if v is not None}
    for key in written.keys() & {"labels", "num_clients", "seed", *given}:
        raise ValueError(f"{key} is given twice, as an argument and in kind={kind!r}.")
    fixed = {"labels": labels, "num_clients": num_clients, "seed": seed}
    return call(factory, name, {**written, **given, **fixed})
