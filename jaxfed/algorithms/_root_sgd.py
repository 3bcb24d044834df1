# SPDX-License-Identifier: Apache-2.0
"""Root-only SGD: the control for methods with trusted data at the server."""

import jax.numpy as jnp
import optax

from jaxfed import _validate
from jaxfed._base import Aggregator, FedAlgorithm
from jaxfed.aggregators import _compose
from jaxfed.algorithms._build import from_chains, needs


def _reference_alone() -> Aggregator:
    """Take ``reference=`` and no client."""

    def update(updates, state, params=None, *, reference=None, **extra):
        del params, extra
        _validate.stacked(updates)
        if reference is None:
            raise ValueError(
                "root_sgd needs reference=, the server's own update: in simulations "
                "pass root= (a Shard without client axis) to step or run."
            )
        return reference, state

    def inspect(updates, state, *, byzantine=None, **extra):
        del state, extra
        return _compose.info(jnp.zeros(_validate.stacked(updates)), byzantine)

    return Aggregator(lambda params: optax.EmptyState(), update, inspect=inspect)


@needs(local_steps=True, root_data=True)
def root_sgd(
    learning_rate=1.0, *, num_clients=None, local_work=None, root_work=None
) -> FedAlgorithm:
    r"""Root-only SGD: train on the server's own data and ignore the clients.

    :math:`x \leftarrow x - \gamma r` with the server's own update r. What BR-DRAG and
    FLTrust gain over it is what the clients contribute.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule; 1 is plain SGD.
      num_clients: accepted like every method does; not needed.
      local_work: e.g. ``local_sgd(loss_fn, optax.sgd(0.01), steps=5, batch_size=10)``;
        clients do it too, for nothing.
      root_work: the server's work on the root data; None: ``local_work``.

    Returns:
      FedAlgorithm with ``root_work``: give ``root=`` to a simulation's step and run.

    Raises:
      ValueError: for a ``learning_rate`` out of range; at trace time without
        ``reference``.

    Cost:
      As FedAvg, plus one local work a round.

    References:
      A control; Xiao et al., `<https://arxiv.org/abs/2601.06903>`_, 2026, run none.
    """
    del num_clients
    _validate.positive("learning_rate", learning_rate)
    rule = _reference_alone()
    algorithm = from_chains(
        local_work, optax.identity(), (rule, optax.sgd(learning_rate)), rule=rule
    )
    return algorithm._replace(root_work=root_work or local_work)
