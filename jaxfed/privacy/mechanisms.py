# SPDX-License-Identifier: Apache-2.0
"""Clip and noise: the two links every private method is made of."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfed import _keys, _tree, _validate


def clip_tree(tree, max_norm):
    r"""Scale a tree into the L2 ball, :math:`\min(1, C/\|x\|)\, x`.

    One norm over the whole tree, in float32 or wider. The result's norm is at most
    ``C (1 + 1e-6)``; 16-bit leaves add the rounding of their entries, at most 1/256
    relative in bfloat16 and 1/2048 in float16. Edge cases:

    ===================================  =========================
    norm <= C                            unchanged, bit for bit
    zero tree                            zero
    ``max_norm = inf``                   unchanged
    NaN, inf, or a norm that overflows   zero (so the bound holds)
    a traced ``max_norm`` that is NaN    NaN
    ===================================  =========================

    Args:
      tree: one client's (or one example's) update.
      max_norm: C >= 0; may be traced.

    Returns:
      Tree of the same shapes and dtypes.
    """
    tree = jax.tree.map(jnp.asarray, tree)
    norm = _tree.norm(tree)
    ok = jnp.isfinite(norm)
    over = ok & ~(norm <= max_norm)
    # Inside the ball nothing is divided, so that gradients stay finite at zero.
    ratio = jnp.asarray(max_norm, norm.dtype) / jnp.where(over, norm, 1)
    scale = jnp.where(over, ratio, 1)

    def leaf(x):
        scaled = (x.astype(norm.dtype) * scale).astype(x.dtype)
        return jnp.where(ok, scaled, 0)

    return jax.tree.map(leaf, tree)


def clip(max_norm) -> optax.GradientTransformation:
    """Clip one client's whole update; see :func:`clip_tree`.

    Args:
      max_norm: C > 0, inf switches it off (non-finite updates still become zero).

    Returns:
      Link, like params to like params.

    Raises:
      ValueError: if ``max_norm`` is not positive.
    """
    _validate.positive("clip_norm", max_norm, finite=False)
    return optax.stateless(lambda updates, params: clip_tree(updates, max_norm))


class GaussianNoiseState(NamedTuple):
    """State of :func:`gaussian_noise`: ``key`` (never advanced) and ``count``."""

    key: jax.Array
    count: jax.Array


def gaussian_noise(noise_std, key) -> optax.GradientTransformationExtraArgs:
    r"""Add :math:`\mathcal N(0, \sigma^2)` to every coordinate.

    The draw is keyed by ``fold_in(fold_in(key, round), client_id)`` and then by leaf:
    independent over clients, rounds and leaves, and the same whatever the cohort,
    the order of clients or the devices. ``jaxfed.per_client`` and the client halves
    pass ``round`` and ``client_id``; without them the link counts its own rounds.

    Noise is drawn in float32 (float64 for float64 leaves) by an inverse-CDF
    sampler; it is not hardened against attacks on floating-point rounding.

    Args:
      noise_std: sigma >= 0, standard deviation per coordinate; may be traced.
      key: typed key or int seed.

    Returns:
      Link, like params to like params.

    Raises:
      ValueError: if ``noise_std`` is negative or not finite, or the key is legacy.
    """
    _validate.nonnegative("noise_std", noise_std)
    key = _keys.as_key(key)
    silent = _validate.is_concrete(noise_std) and noise_std == 0

    def init(params):
        del params
        return GaussianNoiseState(jnp.copy(key), jnp.zeros([], jnp.int32))

    def update(updates, state, params=None, *, round=None, client_id=None, **extra):
        del params, extra
        new = state._replace(count=optax.safe_increment(state.count))
        if silent:
            return updates, new
        ids = [state.count if round is None else round]
        ids += [] if client_id is None else [client_id]
        keys = optax.tree.split_key_like(_keys.fold(state.key, *ids), updates)

        def leaf(x, k):
            x = jnp.asarray(x)
            dtype = _tree.accumulator(x.dtype)
            noise = jax.random.normal(k, x.shape, dtype)
            return (x.astype(dtype) + jnp.asarray(noise_std, dtype) * noise).astype(
                x.dtype
            )

        return jax.tree.map(leaf, updates, keys), new

    return optax.GradientTransformationExtraArgs(init, update)
