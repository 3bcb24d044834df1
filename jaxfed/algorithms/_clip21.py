# SPDX-License-Identifier: Apache-2.0
"""Clip21-SGD and Clip21-SGD2M: error feedback around a clip, plain averaging."""

from jaxfed._base import FedAlgorithm
from jaxfed.aggregators import mean
from jaxfed.algorithms._byz_clip21_sgd2m import byz_clip21_sgd2m


def clip21_sgd(
    learning_rate,
    *,
    rule=None,
    num_clients,
    key,
    clip_norm,
    noise_std=0.0,
    initial=None,
    local_work=None,
) -> FedAlgorithm:
    r"""Clip21-SGD: clip the change of each client's gradient.

    .. math::

        q_i = \mathrm{clip}_\tau(\hat g_i - g_i), \qquad
        g_i \leftarrow g_i + q_i, \qquad x \leftarrow x - \gamma\, \tfrac1n \sum_i g_i

    :func:`byz_clip21_sgd2m` without both momenta. Noise, if any, is added to the
    message only, as there, and the server's memories collect it for good; the paper's
    own private variant is not offered.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule.
      rule: aggregator of the memories. None: ``mean()``, the paper's.
      num_clients: n, Byzantine clients included.
      key: typed key or int seed of the noise.
      clip_norm: tau > 0; inf for no clip (distributed SGD).
      noise_std: sigma >= 0 per coordinate of a message.
      initial: tree like params, common first :math:`g_i`. None: zeros.
      local_work: e.g. ``gradient(loss_fn)``; the theory has full gradients.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges.

    Cost:
      One parameter copy per client, and one per client on the server.

    References:
      Khirirat et al., `Clip21: Error Feedback for Gradient Clipping
      <https://arxiv.org/abs/2305.18929>`_, 2023.
    """
    return byz_clip21_sgd2m(
        learning_rate,
        rule=mean() if rule is None else rule,
        num_clients=num_clients,
        key=key,
        clip_norm=clip_norm,
        noise_std=noise_std,
        momentum=0.0,
        server_momentum=0.0,
        initial=initial,
        local_work=local_work,
    )


def clip21_sgd2m(
    learning_rate,
    *,
    rule=None,
    num_clients,
    key,
    clip_norm,
    noise_std=0.0,
    momentum=0.9,
    server_momentum=0.99,
    initial=None,
    local_work=None,
) -> FedAlgorithm:
    r"""Clip21-SGD2M: :func:`byz_clip21_sgd2m` with plain averaging.

    With the mean the server's memories are one,
    :math:`g \leftarrow g + \hat\beta \tfrac1n \sum_i c_i`.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule.
      rule: aggregator of the memories. None: ``mean()``, the paper's.
      num_clients: n, Byzantine clients included.
      key: typed key or int seed of the noise.
      clip_norm: tau > 0; inf for no clip.
      noise_std: sigma_omega >= 0 per coordinate of a message.
      momentum: weight kept by the client, ``0 <= momentum < 1``.
      server_momentum: weight kept by the memories, ``0 <= . < 1``; 0 without noise.
      initial: tree like params, common first :math:`g_i`. None: zeros.
      local_work: e.g. ``gradient(loss_fn, batch_size=64)``.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges.

    Cost:
      Two parameter copies per client, and one per client on the server.

    References:
      Islamov et al., `Double Momentum and Error Feedback for Clipping with Fast Rates
      and Differential Privacy <https://arxiv.org/abs/2502.11682>`_, 2025.
    """
    return byz_clip21_sgd2m(
        learning_rate,
        rule=mean() if rule is None else rule,
        num_clients=num_clients,
        key=key,
        clip_norm=clip_norm,
        noise_std=noise_std,
        momentum=momentum,
        server_momentum=server_momentum,
        initial=initial,
        local_work=local_work,
    )
