# SPDX-License-Identifier: Apache-2.0
"""FedACG."""

import jax
import jax.numpy as jnp
import optax

from jaxfed import _tree, _validate
from jaxfed._base import FedAlgorithm
from jaxfed.aggregators import mean
from jaxfed.algorithms._build import from_chains, needs
from jaxfed.algorithms._fedavg import steady
from jaxfed.algorithms._fedprox import pulled


@needs(local_steps=True)
def fedacg(
    learning_rate=1.0,
    *,
    rule=None,
    num_clients=None,
    server_momentum=0.85,
    proximal=0.2,
    local_work=None,
) -> FedAlgorithm:
    r"""FedACG: clients start where the server's momentum will carry the model.

    With m the server's last move of the model x, client i starts at the broadcast y,
    follows the gradients of :math:`f_i(z) + \tfrac{\beta}{2} \|z - y\|^2`, and sends
    :math:`\Delta_i = y - z_i`:

    .. math::

        y = x + \lambda m, \qquad
        m \leftarrow \lambda m - \gamma\, \tfrac1S \textstyle\sum_i \Delta_i, \qquad
        x \leftarrow x + m

    The model that is evaluated is x, not y. ``server_momentum=proximal=0`` is
    :func:`fedavg`.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule; paper 1.
      rule: aggregator in place of the mean; None: the mean.
      num_clients: accepted like every method does; not needed.
      server_momentum: lambda, weight kept, ``0 <= server_momentum < 1``; may be
        traced.
      proximal: beta >= 0, pull towards y; may be traced.
      local_work: made by ``local_sgd``.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges.
      TypeError: for local work that takes no proximal term.

    Cost:
      One parameter copy on the server.

    References:
      Kim et al., `Communication-Efficient Federated Learning with Accelerated Client
      Gradient <https://arxiv.org/abs/2201.03172>`_, 2024, Algorithm 1. Xiao et al.,
      `<https://arxiv.org/abs/2601.06903>`_, 2026, section VI-A, print the norm in place
      of the vector :math:`z - y` and do not say where clients start.
    """
    del num_clients
    _validate.positive("learning_rate", learning_rate)
    _validate.unit_interval("server_momentum", server_momentum)
    rule = mean() if rule is None else rule
    move = steady(optax.trace(server_momentum))
    built = from_chains(
        pulled("fedacg", local_work, proximal),
        optax.identity(),
        (rule, optax.sgd(learning_rate), move),
        rule=rule,
    )

    def ahead(x, m):
        dtype = _tree.accumulator(x.dtype)
        kept = jnp.asarray(server_momentum, dtype)
        return (x.astype(dtype) + kept * m.astype(dtype)).astype(x.dtype)

    def broadcast(sstate):
        last = sstate.inner[-1][-1].trace
        start = jax.tree.map(ahead, sstate.params, last)
        return {"params": start, "round": sstate.round}

    server = built.server._replace(broadcast=broadcast)
    # As a chain it would start the clients at x.
    return built._replace(server=server, client_tx=None, server_tx=None)
