# SPDX-License-Identifier: Apache-2.0
"""FLTrust."""

import optax

from jaxfed import _validate, aggregators
from jaxfed._base import FedAlgorithm
from jaxfed.algorithms._br_drag import root_work_for
from jaxfed.algorithms._build import from_chains, needs


@needs(local_steps=True, root_data=True)
def fltrust(
    learning_rate=1.0,
    *,
    form="original",
    num_clients=None,
    local_work=None,
    root_work=None,
    root_reducer=None,
) -> FedAlgorithm:
    r"""FLTrust: trust updates by their cosine with one from trusted root data.

    Each round the server does the clients' work on its own data, which gives r, and

    .. math::

        t_i = \max(0, \cos(g_i, r)), \qquad
        x \leftarrow x - \gamma \sum_i t_i \frac{\|r\|}{\|g_i\|}\, g_i / \sum_i t_i,

    with the rule :func:`jaxfed.aggregators.fltrust`, where the other form and the edge
    cases are described.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule.
      form: ``"original"``, or ``"projected"`` as the paper of BR-DRAG prints it.
      num_clients: accepted like every method does; not needed.
      local_work: e.g. ``local_sgd(loss_fn, optax.sgd(0.01), steps=5, batch_size=10)``.
      root_work: the server's work on the root data; None: ``local_work``.
      root_reducer: as in :func:`br_drag`.

    Returns:
      FedAlgorithm with ``root_work``: give ``root=`` to a simulation's step and run.

    Raises:
      ValueError: for an unknown form, or a ``learning_rate`` out of range.
      TypeError: for a ``root_reducer`` that is no aggregator or has no place.

    Cost:
      ``O(n^2 d)``; one more local work a round.

    References:
      Cao et al., `FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping
      <https://arxiv.org/abs/2012.13995>`_, 2021, Algorithm 2.
    """
    del num_clients
    _validate.positive("learning_rate", learning_rate)
    rule = aggregators.fltrust(form=form)
    algorithm = from_chains(
        local_work, optax.identity(), (rule, optax.sgd(learning_rate)), rule=rule
    )
    return algorithm._replace(
        root_work=root_work_for(local_work, root_work, root_reducer)
    )
