# SPDX-License-Identifier: Apache-2.0
"""CafCor: noise that cancels between clients, and a filter of the covariance."""

import math

import jax
import jax.numpy as jnp
import optax

from jaxfed import _keys, _tree, _validate, links
from jaxfed._base import FedAlgorithm
from jaxfed.aggregators import caf
from jaxfed.algorithms._build import from_chains
from jaxfed.algorithms._safe_dshb import _clipping
from jaxfed.privacy.mechanisms import GaussianNoiseState, gaussian_noise

# Keeps these keys apart from those of the clients' own noise.
_PAIRS = 0x70616972


def pairwise_noise(
    noise_std, num_clients, key
) -> optax.GradientTransformationExtraArgs:
    r"""Add :math:`\sum_{j \ne i} v_{ij}` with :math:`v_{ij} = -v_{ji}`.

    The :math:`v_{ij} \sim \mathcal N(0, \sigma^2 I)`, i < j, are independent. Drawn as
    :math:`\sigma (\sqrt n z_i - \sum_j z_j / \sqrt n)` with n independent standard
    normals, which has the same law over clients: covariance
    :math:`\sigma^2 (n I - 1 1^\top)`, sum zero (up to rounding). This simulates the
    noise, not the secrets: the one key gives everybody's away.

    Args:
      noise_std: sigma >= 0, of one pair; may be traced.
      num_clients: n, the client itself included.
      key: typed key or int seed.

    Returns:
      Link, like params to like params, whose ``update`` needs ``client_id=``;
      ``jaxfed.links.per_client`` and the client halves pass it.

    Raises:
      ValueError: if ``noise_std`` is negative or not finite.

    Cost:
      n + 1 draws of d numbers; one if ``update`` is given their sum as ``pair_sum=``.
    """
    _validate.nonnegative("noise_std", noise_std)
    n = _validate.count("num_clients", num_clients)
    key = _keys.as_key(key)
    silent = _validate.is_concrete(noise_std) and noise_std == 0

    def init(params):
        del params
        return GaussianNoiseState(jnp.copy(key), jnp.zeros([], jnp.int32))

    def update(
        updates,
        state,
        params=None,
        *,
        client_id,
        round=None,
        pair_sum=None,
        **extra,
    ):
        del params, extra
        new = state._replace(count=optax.safe_increment(state.count))
        if silent:
            return updates, new
        round = state.count if round is None else round
        if pair_sum is None:
            pair_sum = _pair_sum(state.key, n, round, updates)

        def leaf(x, z, s):
            noise = math.sqrt(n) * z - s / math.sqrt(n)
            return (x + jnp.asarray(noise_std, z.dtype) * noise).astype(x.dtype)

        own = _draw(state.key, round, client_id, updates)
        return jax.tree.map(leaf, updates, own, pair_sum), new

    return optax.GradientTransformationExtraArgs(init, update)


def _draw(key, round, client_id, like):
    """Return standard normal numbers, one client's share of a round."""
    keys = optax.tree.split_key_like(_keys.fold(key, _PAIRS, round, client_id), like)
    return jax.tree.map(
        lambda x, k: jax.random.normal(k, x.shape, _tree.accumulator(x.dtype)),
        like,
        keys,
    )


def _pair_sum(key, num_clients, round, like):
    """Return the sum of all clients' draws."""

    def add(j, total):
        return jax.tree.map(jnp.add, total, _draw(key, round, j, like))

    return jax.lax.fori_loop(1, num_clients, add, _draw(key, round, 0, like))


def secret_noise_std(noise_std, correlated_noise_std, honest) -> float:
    r"""Independent noise as good as CafCor's while honest clients keep their secrets.

    Everything the h honest clients send is Gaussian with covariance
    :math:`\Sigma = (\sigma^2 + h \sigma_c^2) I - \sigma_c^2 1 1^\top` across clients
    (the others may tell their pairs' noise), so that one client's data is hidden as by
    independent noise of variance

    .. math::

        \frac{1}{e_i^\top \Sigma^{-1} e_i} = \Big(\frac{1/h}{\sigma^2} +
        \frac{1 - 1/h}{\sigma^2 + h \sigma_c^2}\Big)^{-1} ,

    up to :math:`h \sigma^2` for large :math:`\sigma_c`: central privacy without a
    trusted server. Runs on the host.

    Args:
      noise_std: sigma >= 0, each client's own noise.
      correlated_noise_std: sigma_c >= 0.
      honest: h >= 1, clients who keep their secrets from the server and its friends.

    Returns:
      Standard deviation per coordinate.

    Raises:
      ValueError: for values out of these ranges.
    """
    _validate.nonnegative("noise_std", noise_std)
    _validate.nonnegative("correlated_noise_std", correlated_noise_std)
    h = _validate.count("honest", honest)
    if noise_std == 0:
        return 0.0  # the sum over the honest clients is sent in the clear
    common, rest = noise_std**2, noise_std**2 + h * correlated_noise_std**2
    return math.sqrt(1 / (1 / h / common + (1 - 1 / h) / rest))


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
    :func:`secret_noise_std` says what the two are worth while they do not. The noise
    cancels among clients who take part: with partial participation what they share with
    the absent stays. :math:`\sigma_c = 0` is :func:`safe_dshb` with CAF.

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
    if _validate.is_concrete(correlated) and correlated == 0:
        return algorithm
    key, server = _keys.as_key(key), algorithm.server

    def broadcast(sstate):
        # Drawn once for all clients: a matter of the simulation, not of the protocol.
        total = _pair_sum(key, num_clients, sstate.round, sstate.params)
        return server.broadcast(sstate) | {"pair_sum": total}

    return algorithm._replace(server=server._replace(broadcast=broadcast))
