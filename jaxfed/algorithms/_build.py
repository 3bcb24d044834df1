# SPDX-License-Identifier: Apache-2.0
"""Build a method from two optax chains, and use it as one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfed import _validate
from jaxfed._base import Aggregator, ClientHalf, FedAlgorithm, ServerHalf
from jaxfed.links import per_client


class ClientState(NamedTuple):
    """State of a chain-built client: who it is and its chain's state."""

    client_id: jax.Array
    inner: optax.OptState


class ServerState(NamedTuple):
    """State of a chain-built server.

    Attributes:
      params: the model.
      round: ``int32`` scalar, updates so far.
      inner: states of the links before the rule, the rule, and those after it.
    """

    params: optax.Params
    round: jax.Array
    inner: tuple[optax.OptState, optax.OptState, optax.OptState]


class Needs(NamedTuple):
    """What a method asks of whoever builds it from a configuration.

    Attributes:
      local_steps: whether clients take several steps (``local_sgd``), not one gradient.
      root_data: whether the server has trusted data of its own.
      two_clips: whether it clips each example's gradient and the message as well.
      batch_size: examples of one gradient where no number is named; None: all, or 10
        for local steps.
      rule: text of the rule to take where none is named; None: ``"mean"`` for methods
        that average by default, else the configuration's.
    """

    local_steps: bool = False
    root_data: bool = False
    two_clips: bool = False
    batch_size: int | None = None
    rule: str | None = None


def needs(**facts):
    """Mark a factory with what its method needs of a configuration.

    Args:
      **facts: fields of :class:`Needs`.

    Returns:
      Decorator that sets the attribute ``needs`` of a factory.
    """

    def mark(factory):
        factory.needs = Needs(**facts)
        return factory

    return mark


def example_clip(local_work):
    """Return C if what is sent is a mean of gradients each clipped to C, else None."""
    if getattr(local_work, "reducer", None) is not None:
        return None  # another rule over the examples is moved further by one of them
    return getattr(local_work, "clip_norm", None)


def _no_local_work(message, shard, key):
    raise ValueError(
        "this algorithm was built without local work: pass local_work=, for instance "
        "jaxfed.gradient(loss_fn), or feed it gradients through as_optimizer."
    )


def _join(links):
    # optax.chain() of nothing raises.
    return (
        optax.chain(*links)
        if links
        else optax.with_extra_args_support(optax.identity())
    )


def from_chains(
    local_work, client_tx, server_tx, *, rule, mechanism=None
) -> FedAlgorithm:
    """Build a :class:`FedAlgorithm` from two optax chains, cut at the wire.

    Args:
      local_work: ``(message, shard, key) -> (update, metrics)``; None for methods that
        are only used through :func:`as_optimizer`.
      client_tx: optax transformation of one client's update; its links may take
        ``client_id``, ``round``, and whatever else the message holds.
      server_tx: sequence of links from the stacked uploads to a step shaped like
        params; ``rule`` is one of them.
      rule: the aggregator, where stacked becomes single.
      mechanism: clip and noise, for accounting.

    Returns:
      FedAlgorithm whose message is ``{"params", "round"}``.

    Raises:
      TypeError: if ``rule`` is not an aggregator.
      ValueError: if ``rule`` is not in ``server_tx``, or the mechanism has an unknown
        unit or model; at trace time if the step is not shaped like params.
    """
    if not isinstance(rule, Aggregator):
        raise TypeError(f"rule must be an aggregator, got {rule!r}.")
    at = next((i for i, link in enumerate(server_tx) if link is rule), None)
    if at is None:
        raise ValueError("rule must be one of the links of server_tx.")
    if mechanism is not None:
        _validate.choice("mechanism.unit", mechanism.unit, ("client", "example"))
        _validate.choice("mechanism.model", mechanism.model, ("local", "central"))
    client_tx = optax.with_extra_args_support(client_tx)
    before, after = _join(server_tx[:at]), _join(server_tx[at + 1 :])
    parts = (before, rule, after)
    work = _no_local_work if local_work is None else local_work

    def client_init(params, client_id):
        return ClientState(jnp.asarray(client_id, jnp.int32), client_tx.init(params))

    def client_update(message, cstate, shard, key):
        update, metrics = work(message, shard, key)
        extra = {name: x for name, x in message.items() if name != "params"}
        upload, inner = client_tx.update(
            update,
            cstate.inner,
            message["params"],
            client_id=cstate.client_id,
            **extra,
        )
        return upload, cstate._replace(inner=inner), metrics

    def server_init(params):
        # A copy, so that donating the state leaves the caller's params alive.
        params = jax.tree.map(jnp.array, params)
        return ServerState(
            params, jnp.zeros([], jnp.int32), tuple(p.init(params) for p in parts)
        )

    def server_update(
        uploads,
        sstate,
        *,
        cohort=None,
        mask=None,
        weights=None,
        reference=None,
        byzantine=None,
    ):
        extra = dict(cohort=cohort, mask=mask, weights=weights, reference=reference)
        params, states = sstate.params, sstate.inner
        messages, first = before.update(uploads, states[0], params, **extra)
        info = None
        if byzantine is None:
            step, second = rule.update(messages, states[1], params, **extra)
        else:
            step, second, info = rule.observe(
                messages, states[1], params, byzantine=byzantine, **extra
            )
        step, third = after.update(step, states[2], params, **extra)
        _validate.like(step, params, "the server's step")
        new = ServerState(
            optax.apply_updates(params, step),
            optax.safe_increment(sstate.round),
            (first, second, third),
        )
        return new, info

    return FedAlgorithm(
        client=ClientHalf(client_init, client_update),
        server=ServerHalf(
            init=server_init,
            broadcast=lambda s: {"params": s.params, "round": s.round},
            model=lambda s: s.params,
            update=server_update,
        ),
        rule=rule,
        mechanism=mechanism,
        client_tx=client_tx,
        server_tx=_join(server_tx),
    )


def as_optimizer(
    algorithm, num_clients, attack=None, *, examples_clipped=False
) -> optax.GradientTransformationExtraArgs:
    """Turn a chain-built method into one optax transformation of stacked gradients.

    For people who own their training loop: ``update(stacked_grads, state, params)``
    takes one gradient per client, ``[n, ...]``, and returns a step for
    ``optax.apply_updates``. Local work is not run, nor is its clip of every example.

    Args:
      algorithm: a method made of two chains.
      num_clients: n >= 1.
      attack: None, or an :class:`Attack` whose wire part is put between the halves;
        ``update`` then needs ``byzantine=``, bool ``[n]``.
      examples_clipped: say that the gradients will be means of examples' gradients,
        each clipped as ``algorithm.mechanism`` says.

    Returns:
      ``chain(per_client(client), attack, server)``.

    Raises:
      ValueError: for a method that is not two chains, or whose noise is for clipped
        examples without ``examples_clipped=True``.
    """
    if algorithm.client_tx is None or algorithm.server_tx is None:
        raise ValueError(
            "this method is more than two optax chains and cannot be one optimizer: "
            "run it with jaxfed.simulate."
        )
    mechanism = algorithm.mechanism
    if mechanism is not None and mechanism.unit == "example" and not examples_clipped:
        if not _validate.is_zero(mechanism.noise_std):
            raise ValueError(
                "the noise of this method is for clipped examples, and an optimizer of "
                "clients' gradients cannot clip them: pass means of clipped gradients "
                "(jaxfed.gradient(clip_norm=...)) and examples_clipped=True, or take a "
                "method with a clip of the message."
            )
    wire = [] if attack is None else [attack.wire]
    return optax.chain(
        per_client(algorithm.client_tx, num_clients), *wire, algorithm.server_tx
    )
