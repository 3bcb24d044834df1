# SPDX-License-Identifier: Apache-2.0
"""Byz-VR-MARINA."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfed import _keys, _validate
from jaxfed._base import Aggregator, ClientHalf, FedAlgorithm, ServerHalf
from jaxfed.algorithms._build import ClientState, _no_local_work
from jaxfed.local import Gradient


class MarinaState(NamedTuple):
    """State of the server.

    Attributes:
      params: x, the model.
      previous: the model before the last step.
      estimate: g, the aggregate of the last round.
      round: ``int32`` scalar, updates so far.
      key: of the coin, never advanced.
      inner: states of the rule and of the step.
    """

    params: optax.Params
    previous: optax.Params
    estimate: optax.Updates
    round: jax.Array
    key: jax.Array
    inner: Any


def byz_vr_marina(
    learning_rate,
    *,
    rule,
    num_clients=None,
    key,
    probability=0.1,
    compressor=None,
    local_work=None,
) -> FedAlgorithm:
    r"""Byz-VR-MARINA: full gradients now and then, compressed differences in between.

    A coin :math:`c \sim \mathrm{Bernoulli}(p)` is tossed for all clients. With x the
    model, :math:`x^-` the one before and g the last aggregate,

    .. math::

        g_i = \begin{cases} \nabla f_i(x) & c = 1 \\
        g + Q\big(\hat\nabla f_i(x) - \hat\nabla f_i(x^-)\big) & c = 0 \end{cases}
        \qquad g \leftarrow \mathrm{RAgg}(g_1, \dots, g_n), \qquad
        x \leftarrow x - \gamma g

    with both :math:`\hat\nabla f_i` on one batch. The first round takes full gradients,
    as MARINA does. Clients send the sum :math:`g_i`, which attacks and the rule see; a
    real wire need only carry Q(...). p = 1 is robust gradient descent.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule.
      rule: aggregator.
      num_clients: accepted like every method does; not needed.
      key: typed key or int seed of the coin.
      probability: p, ``0 < p <= 1``; may be traced.
      compressor: unbiased link Q, e.g. ``jaxfed.compressors.rand_k(0.1, key)``. None:
        identity.
      local_work: ``gradient(loss_fn, batch_size=b)``; full gradients are over the whole
        shard.

    Returns:
      FedAlgorithm; it is not two chains, so run it with ``jaxfed.simulate``.

    Raises:
      TypeError: if the local work is not made by ``jaxfed.gradient``, or
        ``compressor`` is no optax transformation.
      ValueError: for values out of these ranges.

    Cost:
      Two gradients per client and round, or one over the whole shard; no memory per
      client beyond the compressor's, three parameter copies on the server.

    References:
      Gorbunov, Horvath, Richtarik and Gidel, `Variance Reduction is an Antidote to
      Byzantines <https://arxiv.org/abs/2206.00529>`_, 2023, Algorithm 1.
    """
    del num_clients
    _validate.positive("probability", probability)
    _validate.unit_interval("probability", probability, closed_right=True)
    _validate.positive("learning_rate", learning_rate)
    key = _keys.as_key(key)
    if not isinstance(rule, Aggregator):
        raise TypeError(f"rule must be an aggregator, got {rule!r}.")
    if local_work is None:
        work = whole = _no_local_work
    elif isinstance(local_work, Gradient):
        work, whole = local_work, dataclasses.replace(local_work, batch_size=None)
    else:
        raise TypeError(
            "byz_vr_marina needs gradients on batches and on whole shards: build "
            f"local_work with jaxfed.gradient(loss_fn, ...), got {local_work!r}."
        )
    compressor = optax.identity() if compressor is None else compressor
    if not isinstance(compressor, optax.GradientTransformation):
        raise TypeError(
            "compressor must be a link such as jaxfed.compressors.rand_k(0.1, key), "
            f"got {compressor!r}."
        )
    compress = optax.with_extra_args_support(compressor)
    descend = optax.sgd(learning_rate)

    def client_init(params, client_id):
        return ClientState(jnp.asarray(client_id, jnp.int32), compress.init(params))

    def client_update(message, cstate, shard, key):
        def full(inner):
            return *whole(message, shard, key), inner

        def difference(inner):
            new, metrics = work(message, shard, key)
            # The same key draws the same batch.
            before = message | {"params": message["previous"]}
            old, _ = work(before, shard, key)
            change, inner = compress.update(
                jax.tree.map(jnp.subtract, new, old),
                inner,
                message["params"],
                client_id=cstate.client_id,
                round=message["round"],
            )
            return jax.tree.map(jnp.add, message["estimate"], change), metrics, inner

        upload, metrics, inner = jax.lax.cond(
            message["full"], full, difference, cstate.inner
        )
        return upload, cstate._replace(inner=inner), metrics

    def server_init(params):
        zeros = optax.tree.zeros_like(params)
        one, two = (jax.tree.map(jnp.array, params) for _ in range(2))
        inner = (rule.init(params), descend.init(params))
        return MarinaState(
            one, two, zeros, jnp.zeros([], jnp.int32), jnp.copy(key), inner
        )

    def broadcast(sstate):
        now = _keys.fold(sstate.key, sstate.round)
        coin = jax.random.uniform(now, dtype=jnp.float32) < probability
        return {
            "params": sstate.params,
            "previous": sstate.previous,
            "estimate": sstate.estimate,
            "round": sstate.round,
            "full": coin | (sstate.round == 0),
        }

    def server_update(uploads, sstate, *, byzantine=None, **extra):
        params, (seen, stepped) = sstate.params, sstate.inner
        info = None
        if byzantine is None:
            estimate, seen = rule.update(uploads, seen, params, **extra)
        else:
            estimate, seen, info = rule.observe(
                uploads, seen, params, byzantine=byzantine, **extra
            )
        step, stepped = descend.update(estimate, stepped, params)
        new = MarinaState(
            optax.apply_updates(params, step),
            params,
            estimate,
            optax.safe_increment(sstate.round),
            sstate.key,
            (seen, stepped),
        )
        return new, info

    return FedAlgorithm(
        client=ClientHalf(client_init, client_update),
        server=ServerHalf(
            server_init, broadcast, lambda sstate: sstate.params, server_update
        ),
        rule=rule,
    )
