# SPDX-License-Identifier: Apache-2.0
"""Byz-Clip-SGD and Safe-DSHB: clip, noise, and for the latter momentum on top."""

import optax

from jaxfed import _validate, links
from jaxfed._base import FedAlgorithm, Mechanism
from jaxfed.algorithms._build import example_clip, from_chains
from jaxfed.privacy.mechanisms import clip, gaussian_noise


def byz_clip_sgd(
    learning_rate,
    *,
    rule,
    num_clients=None,
    key,
    clip_norm=None,
    noise_std=0.0,
    local_work=None,
) -> FedAlgorithm:
    r"""Byz-Clip-SGD: robust aggregation of clipped, noised gradients.

    .. math::

        m_i = \mathrm{clip}_\tau(\hat g_i) + \mathcal N(0, \sigma_\omega^2 I), \qquad
        x \leftarrow x - \gamma\, \mathrm{RAgg}(m_1, \dots, m_n)

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule.
      rule: aggregator.
      num_clients: accepted like every method does; not needed.
      key: typed key or int seed of the noise.
      clip_norm: tau > 0, clips the whole message (client-level privacy too). Exactly
        one of this and the local work's own ``clip_norm``, which clips each example.
      noise_std: sigma_omega >= 0 per coordinate of a message.
      local_work: e.g. ``gradient(loss_fn, batch_size=64)``.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges, or no or two clips.

    Cost:
      No memory per client.

    References:
      Islamov et al., `<https://arxiv.org/abs/2603.23472>`_, 2026, Algorithm 3.
    """
    _validate.positive("learning_rate", learning_rate)
    clip_link, mechanism = _clipping("byz_clip_sgd", clip_norm, noise_std, local_work)
    return from_chains(
        local_work,
        optax.chain(clip_link, gaussian_noise(noise_std, key)),
        (rule, optax.sgd(learning_rate)),
        rule=rule,
        mechanism=mechanism,
    )


def safe_dshb(
    learning_rate,
    *,
    rule,
    num_clients=None,
    key,
    clip_norm=None,
    noise_std=0.0,
    momentum=0.9,
    local_work=None,
) -> FedAlgorithm:
    r"""Safe-DSHB: clip, noise, then momentum on the client.

    .. math::

        m_i \leftarrow (1-\beta) m_i + \beta\big(\mathrm{clip}_\tau(\hat g_i) +
        \mathcal N(0, \sigma_\omega^2 I)\big), \qquad
        x \leftarrow x - \gamma\, \mathrm{RAgg}(m_1, \dots, m_n)

    with :math:`\beta` = 1 - ``momentum``; momentum 0 is :func:`byz_clip_sgd`. The
    original method clips each example, i.e. ``gradient(loss_fn, clip_norm=C)`` as local
    work and no ``clip_norm`` here.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule.
      rule: aggregator.
      num_clients: accepted like every method does; not needed.
      key: typed key or int seed of the noise.
      clip_norm: tau > 0, clips the whole message; see :func:`byz_clip_sgd`.
      noise_std: sigma_omega >= 0 per coordinate, before the momentum.
      momentum: weight kept, ``0 <= momentum < 1``.
      local_work: e.g. ``gradient(loss_fn, clip_norm=1.0)``.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges, or no or two clips.

    Cost:
      One parameter copy per client.

    References:
      Allouah et al., `On the Privacy-Robustness-Utility Trilemma
      <https://arxiv.org/abs/2302.04787>`_, 2023; Islamov et al.,
      `<https://arxiv.org/abs/2603.23472>`_, 2026, Algorithm 4.
    """
    _validate.unit_interval("momentum", momentum)
    _validate.positive("learning_rate", learning_rate)
    clip_link, mechanism = _clipping("safe_dshb", clip_norm, noise_std, local_work)
    return from_chains(
        local_work,
        optax.chain(
            clip_link,
            gaussian_noise(noise_std, key),
            links.ema(momentum),
        ),
        (rule, optax.sgd(learning_rate)),
        rule=rule,
        mechanism=mechanism,
    )


def _clipping(name, clip_norm, noise_std, local_work):
    """Return the clip link and the mechanism, from exactly one of the two clips."""
    inner = example_clip(local_work)
    if (clip_norm is None) == (inner is None):
        raise ValueError(
            f"{name} needs exactly one clip: clip_norm= for the whole message, or "
            "local_work=gradient(loss_fn, clip_norm=...), without reducer, for each "
            f"example; got clip_norm={clip_norm} and a clip of examples of {inner}."
        )
    if inner is None:
        mechanism = Mechanism("client", clip_norm, noise_std, memoryless=True)
        return clip(clip_norm), mechanism
    mechanism = Mechanism("example", inner, noise_std, memoryless=True)
    return optax.identity(), mechanism
