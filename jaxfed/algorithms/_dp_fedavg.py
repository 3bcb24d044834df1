# SPDX-License-Identifier: Apache-2.0
"""DP-FedAvg: user-level central privacy."""

import jax
import jax.numpy as jnp
import optax

from jaxfed import _validate
from jaxfed._base import FedAlgorithm, Mechanism
from jaxfed.aggregators import mean
from jaxfed.algorithms._build import from_chains, needs
from jaxfed.algorithms._fedavg import server_step, steady
from jaxfed.privacy.mechanisms import clip, clip_tree, gaussian_noise


def _fixed_denominator(num_clients, clip_norm):
    """Scale rows so that their mean is the sum of those present over num_clients.

    Clips them first: beside a row of length 2**27, rounding would hide both a client
    and the noise.
    """

    def update(updates, state, params=None, *, mask=None, weights=None, **extra):
        del extra
        n = _validate.stacked(updates, params)
        if weights is not None:
            raise ValueError(
                "dp_fedavg refuses weights: a client of large weight would move the "
                "mean by more than the noise hides. Leave weights out."
            )
        mask = _validate.flags("mask", mask, n)
        updates = jax.vmap(lambda u: clip_tree(u, clip_norm))(updates)
        present = n if mask is None else jnp.sum(mask)
        share = present / num_clients
        scaled = jax.tree.map(lambda x: x * jnp.asarray(share, x.dtype), updates)
        return scaled, state

    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )


@needs(local_steps=True)
def dp_fedavg(
    learning_rate=1.0,
    *,
    num_clients,
    key,
    clip_norm,
    noise_std=0.0,
    cohort_size=None,
    server_optimizer=None,
    local_work=None,
) -> FedAlgorithm:
    r"""DP-FedAvg: clip each client's model delta, average, add noise on the server.

    With :math:`\Delta_i` = received minus local model,

    .. math::

        \Delta = \frac1n \sum_i \mathrm{clip}_C(\Delta_i) + \mathcal N(0, \sigma^2 I),
        \qquad x \leftarrow x - \gamma \Delta

    Privacy is central, for whole clients: one replaced client moves the mean by at most
    2C/n. n is a constant: rows that a mask calls absent count as zeros (the paper's
    estimator with a fixed denominator), so that this holds whoever takes part. Clip
    inf and noise 0 give FedAvg. The server clips every row as well, so that a Byzantine
    client counts as one.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule; 1 replaces the model
        by the average.
      num_clients: all clients.
      key: typed key or int seed of the noise.
      clip_norm: C > 0; inf for no clip.
      noise_std: sigma >= 0 per coordinate of the mean.
      cohort_size: n, clients averaged in a round; None: all.
      server_optimizer: as for :func:`fedavg`.
      local_work: e.g. ``local_sgd(loss_fn, optax.sgd(0.1), epochs=1)``.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges; at trace time for ``weights``.
      TypeError: if ``server_optimizer`` is no optax transformation.

    Cost:
      No memory per client.

    References:
      McMahan et al., `Learning Differentially Private Recurrent Language Models
      <https://arxiv.org/abs/1710.06963>`_, 2018, Algorithm 1 with flat clipping.
      Clients have equal weights, and who takes part is not drawn here.
    """
    num_clients = _validate.count("num_clients", num_clients)
    if cohort_size is not None:
        num_clients = _validate.count("cohort_size", cohort_size, maximum=num_clients)
    _validate.positive("learning_rate", learning_rate)
    rule = mean()
    return from_chains(
        local_work,
        clip(clip_norm),
        (
            _fixed_denominator(num_clients, clip_norm),
            rule,
            gaussian_noise(noise_std, key),
            steady(server_step(learning_rate, server_optimizer)),
        ),
        rule=rule,
        mechanism=Mechanism(
            "client",
            clip_norm,
            noise_std,
            "central",
            2 * clip_norm / num_clients,
            memoryless=True,
        ),
    )
