# SPDX-License-Identifier: Apache-2.0
"""Alpha-NormEC: smoothed normalisation with error compensation."""

import jax
import jax.numpy as jnp
import optax

from jaxfed import _tree, _validate, compressors, links
from jaxfed._base import FedAlgorithm, Mechanism
from jaxfed.aggregators import mean
from jaxfed.algorithms._build import from_chains
from jaxfed.privacy.mechanisms import gaussian_noise, normalize


def _direction():
    """Divide by the norm; zero stays zero, NaN stays NaN."""

    def update(updates, params):
        del params
        norm = _tree.norm(updates)
        safe = jnp.where(norm == 0, 1, norm)
        return jax.tree.map(
            lambda x: (x.astype(norm.dtype) / safe).astype(x.dtype), updates
        )

    return optax.stateless(update)


def alpha_norm(
    learning_rate,
    *,
    rule=None,
    num_clients,
    key,
    alpha=0.1,
    memory_step=0.1,
    noise_std=0.0,
    server_step="normalized",
    initial=None,
    local_work=None,
) -> FedAlgorithm:
    r"""Alpha-NormEC: smoothed normalisation in place of a clip, error compensation.

    .. math::

        q_i &= \frac{\hat g_i - g_i}{\alpha + \|\hat g_i - g_i\|}, \qquad
        c_i = q_i + \mathcal N(0, \sigma^2 I), \qquad g_i \leftarrow g_i + \beta q_i \\
        m_i &\leftarrow m_i + \beta c_i, \qquad g = \tfrac1n \sum_i m_i, \qquad
        x \leftarrow x - \gamma\, g / \|g\|

    Privacy is local: messages are shorter than 1 before the noise, so one replaced
    example, or client, moves a message by at most 2. With ``server_step="plain"`` the
    last step is along g itself. For :math:`\beta = \alpha \to \infty` messages become
    whole differences, and the plain step distributed SGD.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule; the length of a step
        where that is normalised.
      rule: aggregator of the memories :math:`m_i`. None: ``mean()``, the paper's.
      num_clients: n, Byzantine clients included.
      key: typed key or int seed of the noise.
      alpha: smoothing > 0; may be traced. This default and the next are ours.
      memory_step: beta > 0; may be traced.
      noise_std: sigma >= 0 per coordinate of a message.
      server_step: ``"normalized"`` or ``"plain"``.
      initial: tree like params, common first :math:`g_i = m_i`. None: zeros.
      local_work: e.g. ``gradient(loss_fn)``; the theory has full gradients.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges.

    Cost:
      One parameter copy per client and one per client on the server.

    References:
      Shulgin, Khirirat and Richtarik, `Smoothed Normalization for Efficient Distributed
      Private Optimization <https://arxiv.org/abs/2502.13482>`_, 2025. Which experiments
      there normalise the last step we could not establish: both are offered.
    """
    _validate.positive("learning_rate", learning_rate)
    _validate.positive("memory_step", memory_step)
    _validate.choice("server_step", server_step, ("normalized", "plain"))
    rule = mean() if rule is None else rule
    memories = links.per_client(links.accumulate(memory_step, initial), num_clients)
    direction = [_direction()] if server_step == "normalized" else []
    return from_chains(
        local_work,
        optax.chain(
            compressors.error_feedback(normalize(alpha), memory_step, initial=initial),
            gaussian_noise(noise_std, key),
        ),
        (memories, rule, *direction, optax.sgd(learning_rate)),
        rule=rule,
        mechanism=Mechanism("client", 1.0, noise_std),
    )
