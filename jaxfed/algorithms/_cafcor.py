# SPDX-License-Identifier: Apache-2.0
"""CafCor: noise that cancels between clients, and a filter of the covariance."""

import optax

from jaxfed import _keys, _validate, links
from jaxfed._base import FedAlgorithm
from jaxfed.aggregators import caf
from jaxfed.algorithms._build import from_chains
from jaxfed.algorithms._safe_dshb import _clipping
from jaxfed.privacy.correlated import pair_sums, pairwise_noise
from jaxfed.privacy.mechanisms import gaussian_noise


def cafcor(
    learning_rate,
    *,
    num_byzantine,
    num_clients,
    key,
    clip_norm=None,
    noise_std=0.0,
    correlated_noise_std=None,
    momentum=0.9,
    local_work=None,
) -> FedAlgorithm:
    r"""CafCor: correlated noise that cancels in the mean, and the CAF rule.

    .. math::

        \tilde g_i &= \mathrm{clip}_C(\hat g_i) + \mathcal N(0, \sigma^2 I) +
        \sum_{j \ne i} v_{ij}, \qquad v_{ij} = -v_{ji} \sim
        \mathcal N(0, \sigma_c^2 I) \\
        m_i &\leftarrow \beta m_i + (1-\beta) \tilde g_i, \qquad
        x \leftarrow x - \gamma\, \mathrm{CAF}(m_1, \dots, m_n)

    with :math:`\beta` = ``momentum``; i and j draw from a seed that they share. The
    declared mechanism counts :math:`\sigma` alone, which holds if every secret leaks;
    :func:`jaxfed.privacy.secret_noise_std` says what the two are worth while they do
    not. The noise cancels among clients who take part: with partial participation what
    they share with the absent stays. :math:`\sigma_c = 0` is :func:`safe_dshb` with
    CAF.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule.
      num_byzantine: f of :func:`jaxfed.aggregators.caf`.
      num_clients: n, Byzantine clients included.
      key: typed key or int seed of all noise.
      clip_norm: C > 0, clips the whole message. Exactly one of this and the local
        work's own ``clip_norm``, which clips each example; as for :func:`safe_dshb`.
      noise_std: sigma >= 0, before the momentum.
      correlated_noise_std: sigma_c >= 0, before the momentum. None: as ``noise_std``;
        the paper gives both by a theorem, no default.
      momentum: weight kept, ``0 <= momentum < 1``; constant, where the theory has a
        schedule.
      local_work: e.g. ``gradient(loss_fn, batch_size=64, clip_norm=1.0)``.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges, or no or two clips.

    Cost:
      One parameter copy per client; three Gaussian vectors per client and round.

    References:
      Allouah, Guerraoui and Stephan, `Towards Trustworthy Federated Learning with
      Untrusted Participants <https://arxiv.org/abs/2505.01874>`_, 2025, Algorithm 1.
    """
    _validate.positive("learning_rate", learning_rate)
    _validate.unit_interval("momentum", momentum)
    clip_link, mechanism = _clipping("cafcor", clip_norm, noise_std, local_work)
    correlated = noise_std if correlated_noise_std is None else correlated_noise_std
    _validate.nonnegative("correlated_noise_std", correlated)
    rule = caf(num_byzantine)
    algorithm = from_chains(
        local_work,
        optax.chain(
            clip_link,
            gaussian_noise(noise_std, key),
            pairwise_noise(correlated, num_clients, key),
            links.ema(momentum),
        ),
        (rule, optax.sgd(learning_rate)),
        rule=rule,
        mechanism=mechanism,
    )
    if _validate.is_zero(correlated):
        return algorithm
    key, server = _keys.as_key(key), algorithm.server

    def broadcast(sstate):
        # Drawn once for all clients: a matter of the simulation, not of the protocol.
        total = pair_sums(key, num_clients, sstate.round, sstate.params)
        return server.broadcast(sstate) | {"pair_sum": total}

    return algorithm._replace(server=server._replace(broadcast=broadcast))
