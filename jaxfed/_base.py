# SPDX-License-Identifier: Apache-2.0
"""The contracts every part of jaxfed is written against.

A *stacked tree* is a pytree shaped like ``params`` whose every leaf has the client
axis first, ``[n, *leaf_shape]``. Everything between local work and the server's
optimizer is an optax ``init/update`` pair: stacked to stacked (clip, momentum, noise,
mixing, attacks), stacked to single (aggregators), single to single (all of optax).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import optax

PyTree = Any
Message = dict[str, PyTree]
Metrics = dict[str, jax.Array]


class Shard(NamedTuple):
    """One client's examples, padded to a common capacity.

    Attributes:
      data: tree of arrays ``[capacity, ...]``; rows from ``count`` on are padding.
      count: ``int32`` scalar, number of real examples, ``0 <= count <= capacity``.

    A stacked shard has a leading client axis on both fields.
    """

    data: PyTree
    count: jax.Array


class Info(NamedTuple):
    """What an aggregator did with each client.

    Attributes:
      weights: ``[n]``, share of the aggregate that came from each client; sums to 1.
        Coordinate-wise rules: the share of coordinates in which it was kept.
      influence: scalar, total weight of the Byzantine clients; NaN if who they are
        was not given.
    """

    weights: jax.Array
    influence: jax.Array


class Aggregator(optax.GradientTransformationExtraArgs):
    """A rule: stacked updates in, one update shaped like ``params`` out.

    An optax transformation (same two fields), so it stands in ``optax.chain``:
    ``update(updates, state, params=None, *, mask=None, weights=None, **extra)``.
    ``mask`` (bool ``[n]``) says who is present; ``weights`` (``[n]``) is honoured or
    refused, never ignored.

    Attributes:
      inspect: pure ``(updates, state, *, mask=None, byzantine=None) -> Info``.
      num_byzantine: declared budget f, or None for a rule without one.
      row_weights: for rules that see the geometry only,
        ``(Geometry, state) -> ([n] weights, state)``; None for other rules.
      reduce: for rules without geometry, ``(updates, mask) -> tree``; else None.
    """

    def __new__(
        cls, init, update, *, inspect, num_byzantine=None, row_weights=None, reduce=None
    ):
        """Attach the attributes to an ordinary optax transformation."""
        self = super().__new__(cls, init, update)
        self.inspect = inspect
        self.num_byzantine = num_byzantine
        self.row_weights = row_weights
        self.reduce = reduce
        return self


class PreAggregator(optax.GradientTransformationExtraArgs):
    """Stacked updates in, stacked updates out, by a mixing matrix.

    Attributes:
      mixing: ``(Geometry, state) -> ([m, n] matrix with rows that sum to 1, state)``.
      num_byzantine: declared budget f.
    """

    def __new__(cls, init, update, *, mixing, num_byzantine=None):
        """Attach the attributes to an ordinary optax transformation."""
        self = super().__new__(cls, init, update)
        self.mixing = mixing
        self.num_byzantine = num_byzantine
        return self


class Attack(NamedTuple):
    """What Byzantine clients do; either part may be the identity.

    Attributes:
      poison: ``(shards, byzantine) -> shards``, data poisoning before training.
      wire: optax link, stacked to stacked; its ``update`` takes ``byzantine`` (bool
        ``[n]``) and ``probe(uploads) -> model step``, a dry run of the server half.
      needs_data: whether the Byzantine clients must own shards.
    """

    poison: Callable[[Shard, jax.Array], Shard]
    wire: optax.GradientTransformationExtraArgs
    needs_data: bool = False


class LocalWork(Protocol):
    """One client's work in one round, before anything is clipped or noised.

    Attributes:
      clip_norm: radius of the clip of each example's gradient, None if there is none.
      batch_size: examples a round, None for the whole shard.
    """

    clip_norm: Any
    batch_size: int | None

    def __call__(
        self, message: Message, shard: Shard, key: jax.Array
    ) -> tuple[PyTree, Metrics]:
        """Return the raw update (descent: the server subtracts it) and metrics."""
        ...


class Mechanism(NamedTuple):
    """Where a method clips and adds noise: all that accounting needs.

    Attributes:
      unit: what one clip bounds, ``"client"`` (the whole message, hence also any
        example of it) or ``"example"`` (each example's gradient, then averaged).
      clip_norm: radius of that clip.
      noise_std: standard deviation per coordinate of what is sent.
      model: ``"local"`` (noise on the client) or ``"central"`` (behind the rule).
    """

    unit: str
    clip_norm: Any
    noise_std: Any
    model: str = "local"

    def sensitivity(self, examples: int) -> float:
        """L2 distance one replaced example can move one message.

        ``2 C`` for a clipped message, ``2 C / examples`` for an average of
        ``examples`` clipped gradients.
        """
        return 2 * self.clip_norm / (examples if self.unit == "example" else 1)


class ClientHalf(NamedTuple):
    """The code that runs on one client (no client axis).

    Attributes:
      init: ``(params, client_id) -> cstate``.
      update: ``(message, cstate, shard, key) -> (upload, cstate, metrics)``.
    """

    init: Callable[..., PyTree]
    update: Callable[..., tuple[PyTree, PyTree, Metrics]]


class ServerHalf(NamedTuple):
    """The code that runs on the server.

    Attributes:
      init: ``(params) -> sstate``.
      broadcast: ``(sstate) -> message``, all that goes down to the clients.
      model: ``(sstate) -> params``, what is evaluated and saved.
      update: ``(uploads, sstate, *, cohort=None, mask=None, weights=None,
        reference=None, byzantine=None) -> (sstate, info)`` on stacked uploads.
        ``byzantine`` changes nothing but ``info``: None, or an :class:`Info`.
    """

    init: Callable[[PyTree], PyTree]
    broadcast: Callable[[PyTree], Message]
    model: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[PyTree, Info | None]]


class FedAlgorithm(NamedTuple):
    """A federated method: two halves, cut at the wire.

    Attributes:
      client: what each client runs.
      server: what the server runs.
      rule: the aggregator inside ``server``.
      mechanism: its clip and noise, or None for a method without privacy.
      client_tx: the client half's optax chain, None where it is not one.
      server_tx: the server half's optax chain, None where it is not one.
    """

    client: ClientHalf
    server: ServerHalf
    rule: Aggregator
    mechanism: Mechanism | None = None
    client_tx: optax.GradientTransformation | None = None
    server_tx: optax.GradientTransformation | None = None
