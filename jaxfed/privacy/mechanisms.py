# SPDX-License-Identifier: Apache-2.0
r"""Clip and noise: the links every private method is made of.

Where noise stands decides who need not be trusted: in the client's chain, behind the
clip, it is local; in the server's, behind the rule, central. :func:`clip` and
:func:`normalize` bound what it hides; ``jaxfed.gradient(clip_norm=)`` bounds examples.

*Floating point.* Noise is drawn in float32 from a generator that is fast and
reproducible, not cryptographic, and the sum is rounded. The low bits of a released
float32 can tell two inputs apart (Mironov, `On Significance of the Least Significant
Bits for Differential Privacy <https://doi.org/10.1145/2382196.2382264>`_, 2012), and
threefry keys are 64 bits. All epsilons here are those of real-valued noise: right for
research and simulation. Whoever deploys against an adversary that reads raw bits
should round the released values to a coarse grid, and draw the noise from a vetted
discrete sampler on the client.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfed import _keys, _tree, _validate

PER = ("tree", "layer")


def clip_tree(tree, max_norm, per="tree"):
    r"""Scale a tree into the L2 ball, :math:`\min(1, C/\|x\|)\, x`.

    One norm over the whole tree, in float32 or wider; or one for each of L layers
    (arrays with the same parent, such as kernel and bias), which get a radius of
    :math:`C/\sqrt L` each, so that the whole stays in the ball. The result's norm is
    at most ``C (1 + 1e-6)``; 16-bit leaves add the rounding of their entries, at most
    1/256 relative in bfloat16 and 1/2048 in float16. Edge cases:

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
      per: ``"tree"`` or ``"layer"``.

    Returns:
      Tree of the same shapes and dtypes.
    """
    tree = jax.tree.map(jnp.asarray, tree)
    if per == "layer":
        paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(tree), strict=True)
        parents = [path[:-1] for path in paths]
        radius = max_norm / math.sqrt(len(set(parents)))
        for parent in set(parents):
            at = [i for i, other in enumerate(parents) if other == parent]
            clipped = clip_tree([leaves[i] for i in at], radius)
            leaves = [clipped.pop(0) if i in at else x for i, x in enumerate(leaves)]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)
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


def clip(max_norm, per="tree") -> optax.GradientTransformation:
    """Clip one client's whole update; see :func:`clip_tree`.

    Args:
      max_norm: C >= 1e-15, inf switches it off (non-finite updates still become zero).
      per: ``"tree"``, or ``"layer"`` for a clip of every layer on its own.

    Returns:
      Link, like params to like params.

    Raises:
      ValueError: if ``max_norm`` is smaller, or for another ``per``.
    """
    _validate.clip_norm(max_norm)
    _validate.choice("per", per, PER)
    return optax.stateless(lambda updates, params: clip_tree(updates, max_norm, per))


def normalize(alpha) -> optax.GradientTransformation:
    r"""Smoothed normalisation, :math:`x / (\alpha + \|x\|)`.

    One norm over the whole tree, in float32 or wider. The result is shorter than 1; a
    tree with NaN, inf or an overflowing norm becomes zero, so that this holds always.

    Args:
      alpha: smoothing >= 1e-15; may be traced.

    Returns:
      Link, like params to like params.

    Raises:
      ValueError: if ``alpha`` is smaller.

    References:
      Shulgin, Khirirat and Richtarik, `<https://arxiv.org/abs/2502.13482>`_, 2025.
    """
    _validate.squarable("alpha", _validate.positive("alpha", alpha))

    def update(updates, params):
        del params
        norm = _tree.norm(updates)
        fine = jnp.isfinite(norm)
        total = jnp.asarray(alpha, norm.dtype) + norm
        return jax.tree.map(
            lambda x: jnp.where(
                fine, (x.astype(norm.dtype) / total).astype(x.dtype), 0
            ),
            updates,
        )

    return optax.stateless(update)


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
    sampler, see the stance of this module on floating point.

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
    silent = _validate.is_zero(noise_std)

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
