# SPDX-License-Identifier: Apache-2.0
"""Byz-SGDM."""

import optax

from jaxfed import _validate, links
from jaxfed._base import FedAlgorithm
from jaxfed.algorithms._build import from_chains


def byz_sgdm(
    learning_rate, *, rule, num_clients=None, momentum=0.9, local_work=None
) -> FedAlgorithm:
    r"""Byz-SGDM: robust aggregation of client momenta; no clip, no noise.

    .. math::

        v_i \leftarrow (1-\beta) v_i + \beta \hat g_i, \qquad
        x \leftarrow x - \gamma\, \mathrm{RAgg}(v_1, \dots, v_n)

    with :math:`\beta` = 1 - ``momentum``. Byz-Clip21-SGD2M without clip, noise and
    server momentum is this method.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule.
      rule: aggregator.
      num_clients: accepted like every method does; not needed.
      momentum: weight kept, ``0 <= momentum < 1``.
      local_work: e.g. ``gradient(loss_fn, batch_size=64)``.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges.

    Cost:
      One parameter copy per client.

    References:
      Karimireddy et al., `Learning from History <https://arxiv.org/abs/2012.10333>`_;
      Islamov et al., `<https://arxiv.org/abs/2603.23472>`_, 2026, Algorithm 2.
    """
    del num_clients
    _validate.positive("learning_rate", learning_rate)
    _validate.unit_interval("momentum", momentum)
    return from_chains(
        local_work,
        links.ema(momentum),
        (rule, optax.sgd(learning_rate)),
        rule=rule,
    )
