# SPDX-License-Identifier: Apache-2.0
"""DP-BREM: client momentum, centred clipping, noise behind it."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfed import _tree, _validate, links
from jaxfed._base import Aggregator, FedAlgorithm, Mechanism
from jaxfed.aggregators import centered_clipping
from jaxfed.algorithms._build import example_clip, from_chains, needs
from jaxfed.privacy.mechanisms import gaussian_noise


class DpBremState(NamedTuple):
    """State of the server.

    Attributes:
      momentum: like params, the published (noised) momentum, centre of the next clip.
      noise: state of the noise.
    """

    momentum: optax.Updates
    noise: optax.OptState


def _noisy_clipping(clip_norm, noise_std, key):
    """Centred clipping around its own noised result."""
    clipping = centered_clipping(clip_norm=clip_norm)
    noise = gaussian_noise(noise_std, key)

    def init(params):
        return DpBremState(optax.tree.zeros_like(params), noise.init(params))

    def centred(state, extra):
        # The rule's own memory is without noise: it starts afresh each round.
        return clipping.init(state.momentum), extra | {"reference": state.momentum}

    def update(updates, state, params=None, **extra):
        own, extra = centred(state, extra)
        centre, _ = clipping.update(updates, own, params, **extra)
        mask = extra.get("mask")
        n = jax.tree.leaves(updates)[0].shape[0] if mask is None else jnp.sum(mask)
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, _tree.accumulator(x.dtype)), centre
        )
        drawn, drawn_state = noise.update(zeros, state.noise)
        momentum = jax.tree.map(lambda m, z: (m + z / n).astype(m.dtype), centre, drawn)
        return momentum, DpBremState(momentum, drawn_state)

    def inspect(updates, state, **extra):
        own, extra = centred(state, extra)
        return clipping.inspect(updates, own, **extra)

    return Aggregator(init, update, inspect=inspect)


@needs(two_clips=True)
def dp_brem(
    learning_rate,
    *,
    num_clients=None,
    key,
    clip_norm=0.1,
    noise_std=0.0,
    momentum=0.9,
    local_work=None,
) -> FedAlgorithm:
    r"""DP-BREM: centred clipping of client momenta, with central noise.

    With :math:`\beta` = ``momentum`` and the gradient of each example clipped to R,

    .. math::

        m_i &\leftarrow \beta m_i + (1-\beta) \hat g_i, \qquad
        s = \sum_i \mathrm{clip}_C(m_i - m) + \mathcal N(0, \sigma^2 I) \\
        m &\leftarrow m + s / n, \qquad x \leftarrow x - \gamma m

    Privacy is central, for examples: an average of b clipped gradients moves by at most
    2R/b if one example is replaced, so does a momentum (its weights sum to less than
    1), and the clip around m, which is public, does not stretch that. The server keeps
    noised values only. Without example clipping (no ``local_work``) the unit is the
    client, which moves s by at most 2C.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule.
      num_clients: accepted like every method does; not needed.
      key: typed key or int seed of the noise.
      clip_norm: C > 0 of the centred clip; inf for none, without noise. It must be
        small beside R to hold attackers back: each of them moves m by up to C/n in a
        round.
      noise_std: sigma >= 0 per coordinate of the sum s.
      momentum: weight kept by the client, ``0 <= momentum < 1``.
      local_work: ``gradient(loss_fn, batch_size=b, clip_norm=R)``.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges, or local work without per-example
        clipping.

    Cost:
      One parameter copy per client; as :func:`jaxfed.aggregators.centered_clipping`.

    References:
      Gu, Li and Xiong, `DP-BREM <https://arxiv.org/abs/2306.12608>`_, 2023, and its
      authors' code, which start all momenta at zero. There R and C also shrink over the
      rounds and absent clients update their momentum; here they do not.
    """
    del num_clients
    _validate.positive("learning_rate", learning_rate)
    _validate.unit_interval("momentum", momentum)
    silent = _validate.is_zero(noise_std)
    if not silent and _validate.is_concrete(clip_norm) and clip_norm == math.inf:
        raise ValueError(
            f"noise_std={noise_std} hides nobody beside messages of any length, got "
            "clip_norm=inf. Give a finite clip_norm, or noise_std=0.0."
        )
    inner = example_clip(local_work)
    if local_work is not None and inner is None:
        raise ValueError(
            "dp_brem clips each example: build local_work with gradient(loss_fn, "
            "clip_norm=...) and no reducer."
        )
    rule = _noisy_clipping(clip_norm, noise_std, key)
    unit = ("client", clip_norm) if inner is None else ("example", inner)
    return from_chains(
        local_work,
        links.ema(momentum),
        (rule, optax.sgd(learning_rate)),
        rule=rule,
        mechanism=Mechanism(*unit, noise_std, "central"),
    )
