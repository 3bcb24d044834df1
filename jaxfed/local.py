# SPDX-License-Identifier: Apache-2.0
"""Local work: what one client computes from its shard before clipping and noise."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxfed import _tree, _validate
from jaxfed._base import Message, Shard
from jaxfed.privacy.mechanisms import clip_tree


def sample(key, shard: Shard, batch_size):
    """Draw a batch uniformly without replacement, with a weight for every row.

    Args:
      key: typed key.
      shard: one client's padded data.
      batch_size: S, or None for the whole shard in order.

    Returns:
      ``(batch, weights)``: leaves ``[b, ...]`` and float32 ``[b]``, 1 for a real
      example and 0 for padding; ``b = min(S, capacity)``. A client with fewer than S
      examples uses all of them. Padding rows repeat the first row of the batch, so
      what the padding holds is read only where a client has no example at all.

    Cost:
      One random word for each row of the shard and a partial sort.
    """
    capacity = jax.tree.leaves(shard.data)[0].shape[0]
    real = jnp.arange(capacity) < shard.count
    if batch_size is None:
        batch = jax.tree.map(
            lambda x: jnp.where(_tree.expand(real, x), x, x[:1]), shard.data
        )
        return batch, real.astype(jnp.float32)
    score = jnp.where(real, jax.random.uniform(key, (capacity,)), -1)
    _, index = jax.lax.top_k(score, min(batch_size, capacity))
    real = index < shard.count
    index = jnp.where(real, index, index[0])
    batch = jax.tree.map(lambda x: x[index], shard.data)
    return batch, real.astype(jnp.float32)


@dataclass(frozen=True)
class Gradient:
    """Local work made by :func:`gradient`; a callable with its facts as attributes.

    Attributes:
      loss_fn: ``(params, batch) -> [b]`` losses.
      batch_size: examples a round, None for the whole shard.
      clip_norm: radius of the clip of each example's gradient, None if there is none.
      microbatch: examples whose gradients are in memory at a time, None for all.
    """

    loss_fn: Callable[..., jax.Array]
    batch_size: int | None
    clip_norm: Any
    microbatch: int | None

    def __call__(self, message: Message, shard: Shard, key):
        """Return the (clipped) mean gradient and ``{"loss": mean loss}``."""
        batch, weights = sample(key, shard, self.batch_size)
        total = jnp.maximum(jnp.sum(weights), 1)
        empty = shard.count == 0
        params = message["params"]
        if self.clip_norm is None:

            def mean_loss(p):
                losses = self._losses(p, batch, weights.shape)
                return jnp.sum(jnp.where(weights > 0, losses, 0)) / total

            loss, update = jax.value_and_grad(mean_loss)(params)
            # A client without examples has nothing but padding to differentiate.
            update = jax.tree.map(lambda g: jnp.where(empty, 0, g), update)
            return update, {"loss": loss}

        def one(example, weight):
            def single_loss(p):
                batch = jax.tree.map(lambda x: x[None], example)
                return self._losses(p, batch, (1,))[0]

            loss, grad = jax.value_and_grad(single_loss)(params)
            grad = clip_tree(grad, jnp.where(weight > 0, self.clip_norm, 0))
            wide = jax.tree.map(lambda g: g.astype(_tree.accumulator(g.dtype)), grad)
            return wide, jnp.where(weight > 0, loss, 0)

        grads, losses = self._sum(one, batch, weights)
        update = jax.tree.map(lambda g, p: (g / total).astype(p.dtype), grads, params)
        return update, {"loss": losses / total}

    def _losses(self, params, batch, shape):
        losses = self.loss_fn(params, batch)
        if losses.shape != shape:
            raise ValueError(
                f"loss_fn must return one loss per example, shape {shape}, got "
                f"{losses.shape}: leave the mean to us."
            )
        return losses

    def _sum(self, one, batch, weights):
        """Sum ``one`` over examples, ``microbatch`` of them in memory at a time."""
        b = weights.shape[0]
        size = b if self.microbatch is None else min(self.microbatch, b)

        def chunk(batch, weights):
            return jax.tree.map(lambda x: x.sum(0), jax.vmap(one)(batch, weights))

        pad = -b % size
        cut = jax.tree.map(
            lambda x: jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)).reshape(
                -1, size, *x.shape[1:]
            ),
            (batch, weights),
        )
        first = chunk(*jax.tree.map(lambda x: x[0], cut))
        if (b + pad) // size == 1:
            return first

        def add(carry, part):
            return jax.tree.map(jnp.add, carry, chunk(*part)), None

        return jax.lax.scan(add, first, jax.tree.map(lambda x: x[1:], cut))[0]


def gradient(loss_fn, *, batch_size=None, clip_norm=None, microbatch=None) -> Gradient:
    r"""One gradient at the broadcast parameters.

    Without ``clip_norm`` the gradient of the batch's mean loss; with it the mean of the
    examples' gradients, each clipped to ``clip_norm`` (one norm over the whole
    tree). Replacing one example then moves the mean by at most
    ``2 clip_norm / examples``.

    Args:
      loss_fn: ``(params, batch) -> [b]`` losses, one per example; leaves of ``batch``
        are ``[b, ...]``. Examples must not influence each other (no batch norm).
      batch_size: S >= 1 examples a round, drawn uniformly without replacement; None:
        the whole shard.
      clip_norm: C > 0 for per-example clipping, may be traced; None: no clipping.
      microbatch: with ``clip_norm``, examples whose gradients are in memory at a time;
        None: all. Memory is ``microbatch * d`` floats a client.

    Returns:
      Local work ``(message, shard, key) -> (update, {"loss"})``. A client without
      examples returns zeros.

    Raises:
      ValueError: for a non-positive ``clip_norm``, ``batch_size`` or ``microbatch``,
        and at trace time if ``loss_fn`` does not return one loss per example.
    """
    if batch_size is not None:
        _validate.count("batch_size", batch_size)
    if microbatch is not None:
        _validate.count("microbatch", microbatch)
    if clip_norm is not None:
        _validate.positive("clip_norm", clip_norm, finite=False)
    return Gradient(loss_fn, batch_size, clip_norm, microbatch)


__all__ = ["Gradient", "gradient", "sample"]
