# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfed import _tree, _validate, links
from jaxfed._base import ClientHalf, FedAlgorithm, ServerHalf
from jaxfed.aggregators import mean
from jaxfed.algorithms._build import ServerState, from_chains, needs
from jaxfed.algorithms._fedprox import check_steps


class ScaffoldState(NamedTuple):
    """State of the server: that of FedAvg's, and ``control``, the mean of all h_m."""

    inner: ServerState
    control: optax.Updates


@needs(local_steps=True)
def scaffold(
    learning_rate=1.0,
    *,
    num_clients,
    rule=None,
    form="gradient",
    local_learning_rate=None,
    local_work=None,
) -> FedAlgorithm:
    r"""SCAFFOLD: FedAvg whose clients correct their drift by control variates.

    Client m keeps :math:`h_m`, the server their mean h, both from zeros. A client of
    the cohort :math:`\mathcal S` starts at the model x, takes U steps and sends
    :math:`\Delta_m = x - y` and :math:`h_m^{new} - h_m`:

    .. math::

        y &\leftarrow y - \eta\,(\nabla F_m(y) - h_m + h) \\
        h_m^{new} &= \nabla F_m(x) \quad\text{or}\quad
        h_m - h + \tfrac{1}{U \eta} \Delta_m \\
        x &\leftarrow x - \gamma\, \tfrac1S \textstyle\sum_{m \in \mathcal S} \Delta_m,
        \qquad
        h \leftarrow h + \tfrac1M \textstyle\sum_{m \in \mathcal S} (h_m^{new} - h_m)

    Clients outside of the cohort keep their :math:`h_m`, so h stays the mean of all M.
    Where all clients have the same gradients it is :func:`fedavg`.

    The rule sees the :math:`\Delta_m` only. Control variates are averaged without
    weights, and those that are not finite count as unchanged: a Byzantine client can
    still move h as far as it likes.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule; paper 1.
      num_clients: M, Byzantine clients included.
      rule: aggregator of the :math:`\Delta_m`; None: the mean.
      form: ``"gradient"`` (option I), the gradient at x on the first batch of the
        round, or ``"difference"`` (option II), the mean of the gradients taken, for
        local work of plain SGD.
      local_learning_rate: eta > 0 of the local work, may be traced; for
        ``form="difference"`` only.
      local_work: made by ``local_sgd``.

    Returns:
      FedAlgorithm whose uploads are ``{"update", "control"}``.

    Raises:
      ValueError: for values out of these ranges, ``form="difference"`` without
        ``local_learning_rate``, and at trace time for more than M uploads.
      TypeError: for local work that takes no correction.

    Cost:
      One parameter copy per client, one on the server; twice the traffic. Option I
      takes one gradient more than :func:`fedavg`.

    References:
      Karimireddy et al., `SCAFFOLD <https://arxiv.org/abs/1910.06378>`_, 2020,
      Algorithm 1 (option I there on any batch); Xiao et al.,
      `<https://arxiv.org/abs/2601.06903>`_, 2026, section VI-A (option I, first batch).
    """
    _validate.positive("learning_rate", learning_rate)
    num_clients = _validate.count("num_clients", num_clients)
    _validate.choice("form", form, ("gradient", "difference"))
    if local_learning_rate is not None:
        _validate.positive("local_learning_rate", local_learning_rate)
    elif form == "difference":
        raise ValueError(
            "form='difference' divides by the local step size: pass "
            "local_learning_rate=, that of the optimizer in local_work."
        )
    check_steps("scaffold", local_work)
    rule = mean() if rule is None else rule
    built = from_chains(
        local_work, optax.identity(), (rule, optax.sgd(learning_rate)), rule=rule
    )
    inner = built.server

    def client_update(message, own, shard, key):
        if local_work is None:
            return built.client.update(message, own, shard, key)  # says what to do
        common = message["control"]
        correction = jax.tree.map(jnp.subtract, common, own)
        update, metrics = local_work(message, shard, key, correction=correction)
        if form == "gradient":
            new = local_work.gradient_at(message["params"], shard, key)
        else:
            steps = _steps(local_work, shard)
            total = jnp.maximum(steps, 1) * local_learning_rate

            def mean_gradient(u, c):
                wide = u.astype(_tree.accumulator(u.dtype))
                return (wide / total.astype(wide.dtype)).astype(u.dtype) - c

            new = jax.tree.map(mean_gradient, update, correction)
            new = jax.tree.map(lambda a, b: jnp.where(steps > 0, a, b), new, own)
        change = jax.tree.map(jnp.subtract, new, own)
        return {"update": update, "control": change}, new, metrics

    def server_init(params):
        return ScaffoldState(inner.init(params), links.start(None, params))

    def server_update(uploads, sstate, *, mask=None, **extra):
        n = _validate.stacked(uploads)
        if n > num_clients:
            raise ValueError(f"uploads has {n} rows but num_clients={num_clients}.")
        new, info = inner.update(uploads["update"], sstate.inner, mask=mask, **extra)
        present = _tree.finite_rows(uploads["control"])
        if mask is not None:
            present &= _validate.flags("mask", mask, n)
        change = _tree.combine(present / num_clients, uploads["control"])
        control = jax.tree.map(jnp.add, sstate.control, change)
        return ScaffoldState(new, control), info

    return built._replace(
        client=ClientHalf(lambda params, i: links.start(None, params), client_update),
        server=ServerHalf(
            init=server_init,
            broadcast=lambda s: inner.broadcast(s.inner) | {"control": s.control},
            model=lambda s: inner.model(s.inner),
            update=server_update,
        ),
        client_tx=None,
        server_tx=None,
    )


def _steps(work, shard):
    """Return how many steps a client takes: batches that hold one of its examples."""
    if work.steps is not None:
        return jnp.where(shard.count > 0, work.steps, 0)
    capacity = jax.tree.leaves(shard.data)[0].shape[0]
    size = capacity if work.batch_size is None else min(work.batch_size, capacity)
    return work.epochs * -(-shard.count // size)
