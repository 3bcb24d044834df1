# SPDX-License-Identifier: Apache-2.0
"""FedProx."""

import optax

from jaxfed import _validate
from jaxfed._base import FedAlgorithm
from jaxfed.aggregators import mean
from jaxfed.algorithms._build import from_chains, needs
from jaxfed.local import LocalSGD


@needs(local_steps=True)
def fedprox(
    learning_rate=1.0,
    *,
    rule=None,
    num_clients=None,
    proximal=0.2,
    local_work=None,
) -> FedAlgorithm:
    r"""FedProx: FedAvg whose clients are pulled back to the model they received.

    Client i starts at the model x, follows the gradients of

    .. math:: f_i(y) + \tfrac{\mu}{2} \|y - x\|^2

    for the steps of its local work, and the server averages as :func:`fedavg`, which
    ``proximal=0`` is bit for bit. The number of steps stands for the paper's
    :math:`\gamma`-inexact solution.

    Args:
      learning_rate: server step > 0, number, traced scalar or schedule.
      rule: aggregator in place of the mean; None: the mean.
      num_clients: accepted like every method does; not needed.
      proximal: mu >= 0; may be traced.
      local_work: made by ``local_sgd``.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges.
      TypeError: for local work that takes no proximal term.

    Cost:
      No memory per client.

    References:
      Li et al., `Federated Optimization in Heterogeneous Networks
      <https://arxiv.org/abs/1812.06127>`_, 2020, Algorithm 2; Xiao et al.,
      `<https://arxiv.org/abs/2601.06903>`_, 2026, section VI-A.
    """
    del num_clients
    _validate.positive("learning_rate", learning_rate)
    rule = mean() if rule is None else rule
    return from_chains(
        pulled("fedprox", local_work, proximal),
        optax.identity(),
        (rule, optax.sgd(learning_rate)),
        rule=rule,
    )


def pulled(name, local_work, proximal):
    """Return local work whose steps are pulled back to where they start."""
    _validate.nonnegative("proximal", proximal)
    if check_steps(name, local_work) is None:
        return None
    return lambda message, shard, key: local_work(
        message, shard, key, proximal=proximal
    )


def check_steps(name, local_work):
    """Return ``local_work``; raise if it is none of ``local_sgd``."""
    if local_work is not None and not isinstance(local_work, LocalSGD):
        raise TypeError(
            f"{name} changes each local step: build local_work with "
            f"local_sgd(loss_fn, optax.sgd(0.01), steps=5), got {local_work!r}."
        )
    return local_work
