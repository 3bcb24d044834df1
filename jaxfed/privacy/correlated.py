# SPDX-License-Identifier: Apache-2.0
"""Noise that is correlated between clients, so that it cancels in their sum."""

import math

import jax
import jax.numpy as jnp
import optax

from jaxfed import _keys, _tree, _validate
from jaxfed.privacy.mechanisms import GaussianNoiseState

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
    silent = _validate.is_zero(noise_std)

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
            pair_sum = pair_sums(state.key, n, round, updates)

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


def pair_sums(key, num_clients, round, like):
    """Return the sum of all clients' draws."""

    def add(j, total):
        return jax.tree.map(jnp.add, total, _draw(key, round, j, like))

    return jax.lax.fori_loop(1, num_clients, add, _draw(key, round, 0, like))


def secret_noise_std(noise_std, correlated_noise_std, honest) -> float:
    r"""Independent noise as good as pairwise noise whose secrets are kept.

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
