# SPDX-License-Identifier: Apache-2.0
"""Simulation: vmap the client half, attack the wire, run the server half, scan."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfed import _keys, _tree, _validate, sharding

# Keep these keys apart from those of noise links (folded by round and client too) when
# a user gives both the same seed.
_LOCAL_WORK = 0x6C6F63
_ATTACK = 0x617474


class SimulationState(NamedTuple):
    """Everything that changes over rounds; a pytree, so it can be saved and donated.

    Attributes:
      clients: the client halves' states, ``[num_clients, ...]``.
      server: the server half's state.
      attack: the attack's state.
      key: randomness of local work and cohorts, never advanced.
      round: ``int32`` scalar, rounds done.
    """

    clients: Any
    server: Any
    attack: Any
    key: jax.Array
    round: jax.Array


class Simulation(NamedTuple):
    """Pure functions made by :func:`simulate`; none of them is jitted.

    Attributes:
      init: ``(params, key) -> state``.
      step: ``(state, shards, root=None) -> (state, metrics)``, one round. ``root`` is
        the server's own Shard, for methods with ``root_work``.
      run: ``(state, shards, rounds, root=None) -> (state, metrics)``, scanned; metrics
        are stacked ``[rounds]`` and ``rounds`` is a Python int.
      model: ``(state) -> params``.
    """

    init: Any
    step: Any
    run: Any
    model: Any


def simulate(
    algorithm,
    num_clients,
    *,
    num_byzantine=0,
    attack=None,
    byzantine_client=None,
    cohort_size=None,
    chunk_size=None,
    inspect=False,
    mesh=None,
) -> Simulation:
    """Build the simulation of an algorithm under attack.

    The Byzantine clients are the last ``num_byzantine`` ids. All clients run the
    honest code under one ``vmap``; the attack then replaces the Byzantine rows, and
    rows that are not finite become infinitely far away (+inf) before the server
    sees them. Batches and cohorts are drawn on the device, keyed by round and client.
    Everything is pure, so the result goes under ``jit`` (donate the state), ``vmap``
    over seeds and hyperparameters, or ``pmap``.

    Args:
      algorithm: FedAlgorithm.
      num_clients: n, Byzantine clients included.
      num_byzantine: actual attackers, ``0 <= f <= n - 1``; may be traced.
      attack: Attack, None for none. Poison the shards yourself, once, by
        ``attack.poison(shards, byzantine_ids(n, f))``.
      byzantine_client: client half that Byzantine clients run instead, with the same
        state; e.g. that of the method with ``clip_norm=inf, noise_std=0.0``, for label
        flippers who spare themselves the privacy. None: the honest one.
      cohort_size: clients drawn uniformly each round; None: all of them.
      chunk_size: clients whose work is in memory at a time; None: all of them.
      inspect: report the rule's ``weights`` and ``influence`` each round.
      mesh: mesh with an axis ``"clients"`` made by ``jaxfed.sharding``: client work is
        sharded over clients, aggregation over parameters.

    Returns:
      Simulation. ``metrics`` has the honest clients' mean of what local work
      reports, e.g. ``loss``.

    Raises:
      ValueError: for counts out of these ranges; at trace time if the shards are not
        ``[num_clients, ...]``.

    Cost:
      One local work and one copy of its update per client.
    """
    num_clients = _validate.count("num_clients", num_clients)
    _validate.budget(num_byzantine)
    if _validate.is_concrete(num_byzantine) and num_byzantine >= num_clients:
        raise ValueError(
            "num_byzantine must leave at least one honest client, got "
            f"num_byzantine={num_byzantine}, num_clients={num_clients}."
        )
    if cohort_size is not None:
        _validate.count("cohort_size", cohort_size)
        if cohort_size > num_clients:
            raise ValueError(
                f"cohort_size must be at most num_clients={num_clients}, got "
                f"{cohort_size}."
            )
    if chunk_size is not None:
        _validate.count("chunk_size", chunk_size)
    if mesh is not None and num_clients % mesh.size:
        raise ValueError(
            f"mesh has {mesh.size} devices, which must divide num_clients="
            f"{num_clients}: use a multiple, or fewer devices."
        )
    client, server, root_work = algorithm.client, algorithm.server, algorithm.root_work
    wire = optax.with_extra_args_support(
        optax.identity() if attack is None else attack.wire
    )

    def init(params, key):
        ids = jnp.arange(num_clients)
        return SimulationState(
            clients=jax.vmap(client.init, (None, 0))(params, ids),
            server=server.init(params),
            attack=wire.init(params),
            key=jnp.copy(_keys.as_key(key)),
            round=jnp.zeros([], jnp.int32),
        )

    def step(state, shards, root=None):
        _check_shards(shards, num_clients)
        _check_root(root, root_work)
        cohort = None
        if cohort_size is not None:
            cohort = jax.random.choice(
                client_key(state.key, state.round, num_clients),
                num_clients,
                (cohort_size,),
                replace=False,
            )
        ids = jnp.arange(num_clients) if cohort is None else cohort

        def pick(tree):
            return tree if cohort is None else jax.tree.map(lambda x: x[ids], tree)

        message = server.broadcast(state.server)

        def work(args):
            client_id, hostile, *rest = args
            rest += [client_key(state.key, state.round, client_id)]
            honest = client.update(message, *rest)
            if byzantine_client is None:
                return honest
            own = byzantine_client.update(message, *rest)
            return jax.tree.map(lambda a, b: jnp.where(hostile, a, b), own, honest)

        byzantine = byzantine_ids(num_clients, num_byzantine)[ids]
        args = (ids, byzantine, pick(state.clients), pick(shards))
        if chunk_size is None:
            uploads, clients, metrics = jax.vmap(work)(args)
        else:
            # One at a time without vmap: batched kernels are slower on a CPU.
            size = None if chunk_size == 1 else chunk_size
            uploads, clients, metrics = jax.lax.map(work, args, batch_size=size)
        if cohort is not None:
            clients = jax.tree.map(
                lambda old, new: old.at[ids].set(new), state.clients, clients
            )

        extra = {"cohort": cohort}
        if root_work is not None:
            root_key = client_key(state.key, state.round, num_clients + 1)
            extra["reference"], _ = root_work(message, root, root_key)

        def probe(uploads):
            new, _ = server.update(uploads, state.server, **extra)
            return jax.tree.map(
                jnp.subtract, server.model(new), server.model(state.server)
            )

        uploads = sharding.over_clients(uploads, mesh)
        uploads, attack_state = wire.update(
            uploads,
            state.attack,
            message["params"],
            byzantine=byzantine,
            probe=probe,
            message=message,
            cohort=cohort,
            key=_keys.fold(state.key, _ATTACK, state.round),
        )
        uploads = _tree.where_rows(_tree.finite_rows(uploads), uploads, jnp.inf)
        uploads = sharding.over_parameters(uploads, mesh)
        new_server, info = server.update(
            uploads, state.server, byzantine=byzantine if inspect else None, **extra
        )
        honest = ~byzantine
        metrics = jax.tree.map(
            lambda m: jnp.sum(jnp.where(honest, m, 0)) / jnp.sum(honest), metrics
        )
        if info is not None:
            seen = {"weights": info.weights, "influence": info.influence}
            metrics = metrics | seen | info.details
        new = SimulationState(
            clients,
            sharding.replicated(new_server, mesh),
            attack_state,
            state.key,
            optax.safe_increment(state.round),
        )
        return new, metrics

    def run(state, shards, rounds, root=None):
        _validate.count("rounds", rounds, minimum=0, maximum=_validate.LARGEST)
        return jax.lax.scan(
            lambda s, _: step(s, shards, root), state, None, length=rounds
        )

    return Simulation(init, step, run, lambda state: server.model(state.server))


def byzantine_ids(num_clients, num_byzantine):
    """Say which clients are Byzantine: the last ids.

    Args:
      num_clients: n.
      num_byzantine: f, may be traced.

    Returns:
      bool ``[n]``.
    """
    return jnp.arange(num_clients) >= num_clients - num_byzantine


def client_key(key, round, client_id):
    """Return the key of one client's local work in one round.

    A deployment whose clients use it draws the batches of the simulation with the
    same ``key``, the one given to ``Simulation.init``.
    """
    return _keys.fold(_keys.as_key(key), _LOCAL_WORK, round, client_id)


def _check_root(root, root_work):
    if root_work is not None and root is None:
        raise ValueError(
            "this method compares clients with trusted data of the server: pass root=, "
            "a Shard without client axis, to step or run."
        )
    if root_work is None and root is not None:
        raise ValueError("root= was given, but this method has no use for it.")


def _check_shards(shards, num_clients):
    for path, leaf in jax.tree_util.tree_leaves_with_path(shards):
        if not leaf.shape or leaf.shape[0] != num_clients:
            raise ValueError(
                f"shards{jax.tree_util.keystr(path)} must have num_clients="
                f"{num_clients} rows, got shape {leaf.shape}."
            )
