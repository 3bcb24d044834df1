# SPDX-License-Identifier: Apache-2.0
"""Compressors of one client's update, and error feedback around them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxfed import _keys, _tree, _validate, links


def top_k(fraction) -> optax.GradientTransformation:
    r"""Keep the k largest entries by magnitude, over the whole tree; zero the rest.

    k = ``fraction * d`` rounded, at least 1. Contractive:
    :math:`\|C(x) - x\|^2 \le (1 - k/d) \|x\|^2`. Of equal magnitudes the first are
    kept; NaN counts as the largest, so that it stays visible.

    Args:
      fraction: k/d, ``0 < fraction <= 1``; may be traced.

    Returns:
      Link, like params to like params.

    Raises:
      ValueError: if ``fraction`` is out of range.

    Cost:
      About 32 reads of d entries.
    """
    _fraction(fraction)

    def update(updates, params):
        del params
        flat, unravel = ravel_pytree(updates)
        size = jnp.where(jnp.isnan(flat), jnp.inf, jnp.abs(flat))
        keep = _largest(size, fraction)
        return unravel(jnp.where(keep, flat, 0))

    return optax.stateless(update)


class RandKState(NamedTuple):
    """State of :func:`rand_k`: ``key`` (never advanced) and ``count``."""

    key: jax.Array
    count: jax.Array


def rand_k(fraction, key, *, unbiased=True) -> optax.GradientTransformationExtraArgs:
    r"""Keep k entries drawn uniformly without replacement, over the whole tree.

    Unbiased with the kept entries times d/k (variance at most
    :math:`(d/k - 1) \|x\|^2`), contractive by 1 - k/d in expectation without. Draws are
    keyed by round and client, as those of ``jaxfed.privacy.gaussian_noise``.

    Args:
      fraction: k/d, ``0 < fraction <= 1``, k rounded, at least 1; may be traced.
      key: typed key or int seed.
      unbiased: whether to scale by d/k.

    Returns:
      Link, like params to like params.

    Raises:
      ValueError: if ``fraction`` is out of range.

    Cost:
      As many random numbers, and about 32 reads of them.
    """
    _fraction(fraction)
    key = _keys.as_key(key)

    def init(params):
        del params
        return RandKState(jnp.copy(key), jnp.zeros([], jnp.int32))

    def update(updates, state, params=None, *, round=None, client_id=None, **extra):
        del params, extra
        ids = [state.count if round is None else round]
        ids += [] if client_id is None else [client_id]
        flat, unravel = ravel_pytree(updates)
        now = _keys.fold(state.key, *ids)
        score = jax.random.uniform(now, flat.shape, jnp.float32)
        keep = _largest(score, fraction)
        if unbiased:
            scale = flat.size / _count(fraction, flat.size)
            flat = flat * jnp.asarray(scale, flat.dtype)
        new = state._replace(count=optax.safe_increment(state.count))
        return unravel(jnp.where(keep, flat, 0)), new

    return optax.GradientTransformationExtraArgs(init, update)


class ErrorFeedbackState(NamedTuple):
    """State of :func:`error_feedback`.

    Attributes:
      shift: like params, what the server knows of this client (without noise).
      started: bool scalar, whether anything has been sent.
      inner: state of the compressor.
    """

    shift: optax.Updates
    started: jax.Array
    inner: optax.OptState


def error_feedback(
    compressor, step=1.0, *, initial=None, exact_start=False
) -> optax.GradientTransformationExtraArgs:
    r"""Compress the difference to what was sent before (EF21).

    Sends :math:`c = C(v - g)` and keeps :math:`g \leftarrow g + \beta c`; the receiver
    keeps the same g by ``jaxfed.links.accumulate(step, initial)``.

    Args:
      compressor: link like params to like params.
      step: beta > 0; may be traced.
      initial: tree like params, the first g. None: zeros.
      exact_start: whether the first message is the whole difference.

    Returns:
      Link, like params to like params.

    Raises:
      ValueError: if ``step`` is not positive; at ``init`` if ``initial`` is not shaped
        like params.
    """
    _validate.positive("step", step)
    compressor = optax.with_extra_args_support(compressor)

    def init(params):
        return ErrorFeedbackState(
            links.start(initial, params), jnp.zeros([], bool), compressor.init(params)
        )

    def update(updates, state, params=None, **extra):
        difference = jax.tree.map(jnp.subtract, updates, state.shift)
        sent, inner = compressor.update(difference, state.inner, params, **extra)
        if exact_start:
            sent = optax.tree.where(state.started, sent, difference)
        shift = jax.tree.map(
            lambda g, c: g + jnp.asarray(step, g.dtype) * c, state.shift, sent
        )
        return sent, ErrorFeedbackState(shift, jnp.ones([], bool), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _fraction(fraction):
    _validate.positive("fraction", fraction)
    _validate.unit_interval("fraction", fraction, closed_right=True)


def _count(fraction, d):
    return jnp.clip(jnp.round(fraction * d), 1, d)


def _largest(score, fraction):
    """Mark the k largest scores, which are >= 0, the first ones among equals."""
    score = score.astype(_tree.accumulator(score.dtype))
    k = _count(fraction, score.size)
    # Floats >= 0 are ordered as their bits: the k-th largest is found bit by bit, from
    # the highest down, thirty times as fast as by a sort.
    integer = jnp.dtype(f"int{jnp.finfo(score.dtype).bits}")
    ordered = lax.bitcast_convert_type(score, integer)
    highest = 8 * integer.itemsize - 2

    def set_bit(i, found):
        tried = found + (jnp.ones([], integer) << (highest - i))
        return jnp.where(jnp.sum(ordered >= tried, dtype=jnp.int32) >= k, tried, found)

    kth = lax.fori_loop(0, highest + 1, set_bit, jnp.zeros([], integer))
    above, equal = ordered > kth, ordered == kth
    room = k - jnp.sum(above, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal, dtype=jnp.int32) <= room))


__all__ = ["error_feedback", "rand_k", "top_k"]
