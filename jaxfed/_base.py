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
      weights: ``[n]``, what each client was multiplied by; sums to 1 unless a part of
        the aggregate came from elsewhere (the origin, for clipped rows; a reference).
        Coordinate-wise rules: the share of coordinates in which it was kept.
      influence: scalar, total weight of the Byzantine clients; NaN if who they are
        was not given.
      details: what else a rule has to say, by name; joins the metrics of a round.
    """

    weights: jax.Array
    influence: jax.Array
    details: Metrics = {}


class Sensitivity(NamedTuple):
    """How far one honest client can move an aggregate; needed under central privacy.

    Attributes:
      bound: ``(num_clients, radius, *, dim=None, mode="tight", relation="replace") ->
        float``, the L2 distance between two aggregates whose inputs differ in one
        honest row, both versions of norm at most ``radius``; under ``relation="zero"``
        one of them is 0. Mode ``"paper"`` is the printed value.
      bounded_inputs: whether every other row, Byzantine ones included, must have norm
        at most ``radius`` too.
      adds_up: whether rows are added up whatever their length, so that the rounding of
        a huge one would break the bound.
    """

    bound: Callable[..., float]
    bounded_inputs: bool = False
    adds_up: bool = False


class Geometric(NamedTuple):
    """How a rule that sees pairwise inner products only weighs the clients.

    Anchors are points beside the clients that distances are taken from: ``"origin"``
    and ``"reference"``. They come after the ``n`` clients in the Gram matrix, and an
    aggregate is an affine combination of clients and anchors.

    Attributes:
      weigh: ``(Geometry, state, weights) -> ([n + anchors], state)``; ``weights`` is
        None or ``[n]``, what ``update`` was given.
      anchors: names of the anchors it needs.
      reference: ``(state, extra) -> tree``, the point called ``"reference"``.
      remember: ``(state, aggregate) -> state``, after the aggregate is known.
      check: ``(n)``, raises if a condition on Python numbers fails.
      weighted: whether it honours ``weights``.
      about_origin: whether digits matter near the origin rather than near the rows.
    """

    weigh: Callable
    anchors: tuple[str, ...] = ()
    reference: Callable | None = None
    remember: Callable | None = None
    check: Callable | None = None
    weighted: bool = False
    about_origin: bool = False


class Aggregator(optax.GradientTransformationExtraArgs):
    """A rule: stacked updates in, one update shaped like ``params`` out.

    An optax transformation (same two fields), so it stands in ``optax.chain``:
    ``update(updates, state, params=None, *, mask=None, weights=None, **extra)``.
    ``mask`` (bool ``[n]``) says who is present; ``weights`` (``[n]``) is honoured or
    refused, never ignored.

    Attributes:
      inspect: pure ``(updates, state, *, mask=None, byzantine=None) -> Info``.
      observe: ``update`` and ``inspect`` at once, ``-> (aggregate, state, Info)``.
      num_byzantine: declared budget f, or None for a rule without one.
      geometric: :class:`Geometric` for rules of pairwise inner products, else None.
      stages: what :func:`jaxfed.aggregators.compose` joined, else ``(self,)``.
      sensitivity: :class:`Sensitivity`, None where no bound is known.
    """

    def __new__(
        cls,
        init,
        update,
        *,
        inspect,
        observe=None,
        num_byzantine=None,
        geometric=None,
        stages=None,
        sensitivity=None,
    ):
        """Attach the attributes to an ordinary optax transformation."""

        def both(updates, state, params=None, *, byzantine=None, **extra):
            seen = inspect(updates, state, byzantine=byzantine, **extra)
            return *update(updates, state, params, **extra), seen

        self = super().__new__(cls, init, update)
        self.inspect = inspect
        self.observe = observe or both
        self.num_byzantine = num_byzantine
        self.geometric = geometric
        self.stages = (self,) if stages is None else stages
        self.sensitivity = sensitivity
        return self


class PreAggregator(optax.GradientTransformationExtraArgs):
    """Stacked updates in, stacked updates out, by a mixing matrix.

    Attributes:
      mixing: ``(Geometry, state) -> ([m, n + anchors] matrix, state)``; rows sum to 1,
        or are 0 for a row that is absent.
      num_byzantine: declared budget f, None for a stage without one.
      anchors: names of the anchors it needs, see :class:`Geometric`.
      drops: whether rows of the matrix may be 0 though every client is present.
    """

    def __new__(
        cls, init, update, *, mixing, num_byzantine=None, anchors=(), drops=False
    ):
        """Attach the attributes to an ordinary optax transformation."""
        self = super().__new__(cls, init, update)
        self.mixing = mixing
        self.num_byzantine = num_byzantine
        self.anchors = anchors
        self.drops = drops
        return self


class Attack(NamedTuple):
    """What Byzantine clients do; either part may be the identity.

    Attributes:
      poison: ``(shards, byzantine) -> shards``, data poisoning before training.
      wire: optax link, stacked to stacked; its ``update`` takes ``byzantine`` (bool
        ``[n]``) and, in a simulation, ``probe(uploads) -> model step`` (a dry run of
        the server half), ``message`` (what was broadcast), ``cohort`` (ids of the rows,
        None for all) and ``key`` (randomness of the round).
      needs_data: whether the Byzantine clients must own shards.
      sees_messages: whether they use honest clients' messages of the round, which
        central privacy does not let them see.
    """

    poison: Callable[[Shard, jax.Array], Shard]
    wire: optax.GradientTransformationExtraArgs
    needs_data: bool = False
    sees_messages: bool = True


class LocalWork(Protocol):
    """One client's work in one round, before anything is clipped or noised.

    Attributes:
      clip_norm: C if the update is a mean of examples' gradients, each clipped to C;
        else None. Privacy of examples is built on it.
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
      bound: sensitivity of what the noise is added to, where it is not that of one
        message: central noise, and messages whose clip is no L2 ball.
      source: where the sensitivity is from: ``"tight"``, ``"paper"``, or ``"asserted"``
        by whoever built the method.
      nominal: c in the epsilon that the method's own paper claims, c * sensitivity *
        sqrt(rounds * log(1 / delta)) / noise_std; None: as Byz-Clip21-SGD2M's, 1/2.
      nominal_norm: what takes the place of sensitivity / 2 there, if anything.
      memoryless: whether a round's noised value depends on the private data through
        what was drawn in that round alone, earlier noised values aside. Only then may
        the draw of examples (local), or of clients (central), be credited.
    """

    unit: str
    clip_norm: Any
    noise_std: Any
    model: str = "local"
    bound: Any = None
    source: str = "tight"
    nominal: float | None = None
    nominal_norm: Any = None
    memoryless: bool = False

    def sensitivity(self, examples: int) -> float:
        """L2 distance one replaced unit can move what the noise is added to.

        ``bound`` if there is one; else ``2 C`` for a clipped message and
        ``2 C / examples`` for an average of ``examples`` clipped gradients.
        """
        if self.bound is not None:
            return self.bound
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
      root_work: local work the server does on trusted data of its own each round, whose
        update goes to ``server.update`` as ``reference``; None where there is none.
    """

    client: ClientHalf
    server: ServerHalf
    rule: Aggregator
    mechanism: Mechanism | None = None
    client_tx: optax.GradientTransformation | None = None
    server_tx: optax.GradientTransformation | None = None
    root_work: LocalWork | None = None
