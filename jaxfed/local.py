# SPDX-License-Identifier: Apache-2.0
"""Local work: what one client computes from its shard before clipping and noise."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxfed import _keys, _tree, _validate
from jaxfed._base import Aggregator, Message, Shard
from jaxfed.privacy.mechanisms import PER, clip_tree


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
      reducer: aggregator of the examples' gradients, None for their mean.
      clip_per: what has a norm of its own in that clip, ``"tree"`` or ``"layer"``.
      norms: ``(params, batch) -> [b]``, norms of the examples' gradients, or None.
    """

    loss_fn: Callable[..., jax.Array]
    batch_size: int | None
    clip_norm: Any = None
    microbatch: int | None = None
    reducer: Aggregator | None = None
    clip_per: str = "tree"
    norms: Callable[..., jax.Array] | None = None

    def __call__(self, message: Message, shard: Shard, key):
        """Return the (clipped) mean gradient and ``{"loss": mean loss}``."""
        batch, weights = sample(key, shard, self.batch_size)
        loss, update = self.at(message["params"], batch, weights)
        return update, {"loss": loss}

    def at(self, params, batch, weights):
        """Return mean loss and gradient at ``params``, zeros if no weight is positive.

        Args:
          params: where.
          batch: leaves ``[b, ...]``.
          weights: ``[b]``, 1 for an example and 0 for padding.
        """
        total = jnp.maximum(jnp.sum(weights), 1)
        if self.clip_norm is None and self.reducer is None:

            def mean_loss(p):
                losses = self._losses(p, batch, weights.shape)
                return jnp.sum(jnp.where(weights > 0, losses, 0)) / total

            loss, update = jax.value_and_grad(mean_loss)(params)
            # A client without examples has nothing but padding to differentiate.
            empty = jnp.sum(weights) == 0
            return loss, jax.tree.map(lambda g: jnp.where(empty, 0, g), update)
        if self.norms is not None:
            return self._weighted(params, batch, weights)

        def one(example, weight):
            def single_loss(p):
                batch = jax.tree.map(lambda x: x[None], example)
                return self._losses(p, batch, (1,))[0]

            loss, grad = jax.value_and_grad(single_loss)(params)
            if self.clip_norm is not None:
                radius = jnp.where(weight > 0, self.clip_norm, 0)
                grad = clip_tree(grad, radius, self.clip_per)
            wide = jax.tree.map(lambda g: g.astype(_tree.accumulator(g.dtype)), grad)
            return wide, jnp.where(weight > 0, loss, 0)

        if self.reducer is not None:
            grads, losses = jax.vmap(one)(batch, weights)
            rule = self.reducer
            update, _ = rule.update(grads, rule.init(params), mask=weights > 0)
            f = 0 if rule.num_byzantine is None else rule.num_byzantine
            few = jnp.sum(weights) <= 2 * f
            update = jax.tree.map(lambda g: jnp.where(few, 0, g), update)
            return jnp.sum(losses) / total, _tree.cast_like(update, params)
        grads, losses = self._sum(one, batch, weights)
        mean = jax.tree.map(lambda g: g / total, grads)
        return losses / total, _tree.cast_like(mean, params)

    def _weighted(self, params, batch, weights):
        """Clip by weighing the losses: nothing of size b * d is held."""
        norms = self.norms(params, batch)
        fine = jnp.isfinite(norms) & (weights > 0)
        # A zero weight does not undo a NaN, so bad examples make room for a good one.
        rows = jnp.where(fine, jnp.arange(fine.size), jnp.argmax(fine))
        batch = jax.tree.map(lambda x: x[rows], batch)
        over = fine & ~(norms <= self.clip_norm)
        scale = jnp.where(over, self.clip_norm / jnp.where(over, norms, 1), 1)
        total = jnp.maximum(jnp.sum(weights), 1)

        def clipped(p):
            losses = self._losses(p, batch, weights.shape)
            return jnp.sum(jnp.where(fine, scale * losses, 0)) / total, losses

        update, losses = jax.grad(clipped, has_aux=True)(params)
        update = jax.tree.map(lambda g: jnp.where(jnp.any(fine), g, 0), update)
        losses = jnp.where(fine, losses, jnp.where(weights > 0, jnp.nan, 0))
        return jnp.sum(losses) / total, update

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


@dataclass(frozen=True)
class LocalSGD:
    """Local work made by :func:`local_sgd`; a callable with its facts as attributes.

    Attributes:
      gradient: the :class:`Gradient` taken in each step.
      optimizer: optax transformation, started afresh each round.
      steps: steps a round, None where epochs are counted.
      epochs: passes over the shard a round, None where steps are counted.
    """

    gradient: Gradient
    optimizer: optax.GradientTransformation
    steps: int | None
    epochs: int | None

    @property
    def batch_size(self):
        """Examples a step, None for the whole shard."""
        return self.gradient.batch_size

    @property
    def clip_norm(self):
        """None: an example enters every step, so no clip bounds its share."""
        return None

    def __call__(
        self, message: Message, shard: Shard, key, *, proximal=0.0, correction=None
    ):
        r"""Return how far the parameters went down, and the first batch's loss.

        Args:
          message: its ``"params"`` are where the steps start.
          shard: one client's examples.
          key: typed key of the batches.
          proximal: mu >= 0, adds :math:`\mu (x - x_0)` to each gradient; may be traced.
          correction: tree like params that is added to each gradient; None: zeros.

        Returns:
          ``(params - final params, {"loss"})``.
        """
        _validate.nonnegative("proximal", proximal)
        start = message["params"]
        batch_of, number = self._batches(shard, key)
        optimizer = optax.with_extra_args_support(self.optimizer)

        def step(carry, u):
            x, state = carry
            batch, weights = batch_of(u)
            loss, grad = self.gradient.at(x, batch, weights)
            if correction is not None:
                grad = jax.tree.map(jnp.add, grad, correction)
            if not _validate.is_zero(proximal):
                pull = jax.tree.map(jnp.subtract, x, start)
                grad = jax.tree.map(
                    lambda g, p: g + jnp.asarray(proximal, g.dtype) * p, grad, pull
                )
            moved, new = optimizer.update(grad, state, x)
            new = optax.apply_updates(x, moved), new
            # Batches beyond a client's examples are no steps.
            real = jnp.sum(weights) > 0
            return jax.tree.map(lambda a, b: jnp.where(real, a, b), new, carry), loss

        carry = (start, optimizer.init(start))
        (end, _), losses = jax.lax.scan(step, carry, jnp.arange(number))
        return jax.tree.map(jnp.subtract, start, end), {"loss": losses[0]}

    def gradient_at(self, params, shard: Shard, key):
        """Return the gradient at ``params`` on the first batch of a call."""
        batch_of, _ = self._batches(shard, key)
        return self.gradient.at(params, *batch_of(jnp.int32(0)))[1]

    def _batches(self, shard, key):
        """Return ``u -> (batch, weights)`` and the number of batches."""
        size = self.batch_size
        if self.steps is not None:
            return lambda u: sample(_keys.fold(key, u), shard, size), self.steps
        capacity = jax.tree.leaves(shard.data)[0].shape[0]
        size = capacity if size is None else min(size, capacity)
        per_epoch = -(-capacity // size)

        def order(epoch):
            score = jax.random.uniform(_keys.fold(key, epoch), (capacity,))
            return jnp.argsort(jnp.where(jnp.arange(capacity) < shard.count, score, 2))

        orders = jax.vmap(order)(jnp.arange(self.epochs))

        def batch_of(u):
            epoch, at = jnp.divmod(u, per_epoch)
            place = at * size + jnp.arange(size)
            real = place < shard.count
            index = orders[epoch, jnp.where(real, place, 0)]
            batch = jax.tree.map(lambda x: x[index], shard.data)
            return batch, real.astype(jnp.float32)

        return batch_of, self.epochs * per_epoch


def local_sgd(
    loss_fn, optimizer, *, steps=None, epochs=None, batch_size=None, clip_norm=None
) -> LocalSGD:
    r"""Several steps of an optimizer from the broadcast parameters.

    What is sent is :math:`x_0 - x_U`, which points down like a gradient: the server
    subtracts it (with step size 1 the mean of the clients' models results). One step of
    ``optax.sgd(eta)`` sends eta times :func:`gradient`.

    Args:
      loss_fn: ``(params, batch) -> [b]`` losses, one per example.
      optimizer: any optax transformation, e.g. ``optax.sgd(0.01)``; its state starts
        afresh in each round.
      steps: U >= 1 steps, each on a fresh batch drawn uniformly without replacement
        (a client with fewer examples uses all of them). Exactly one of this and
        ``epochs``.
      epochs: passes over the client's examples, each in a fresh random order, the last
        batch of a pass being what is left over. Clients with fewer examples take fewer
        steps.
      batch_size: B >= 1 examples a step; None: the whole shard.
      clip_norm: C > 0 for clipping each example's gradient, may be traced; None: none.

    Returns:
      Local work ``(message, shard, key) -> (update, {"loss"})``, the loss being that of
      the first batch. A client without examples returns zeros.

    Raises:
      ValueError: for numbers out of range, or not exactly one of ``steps`` and
        ``epochs``.
      TypeError: if ``optimizer`` is no optax transformation.

    Cost:
      One scan over the steps: memory for one gradient and the optimizer's state.
    """
    if (steps is None) == (epochs is None):
        raise ValueError(
            f"give exactly one of steps= and epochs=, got steps={steps} and "
            f"epochs={epochs}."
        )
    _validate.count(
        "epochs" if steps is None else "steps", epochs if steps is None else steps
    )
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"optimizer must be an optax transformation such as optax.sgd(0.01), got "
            f"{optimizer!r}."
        )
    work = gradient(loss_fn, batch_size=batch_size, clip_norm=clip_norm)
    return LocalSGD(work, optimizer, steps, epochs)


def gradient(
    loss_fn,
    *,
    batch_size=None,
    clip_norm=None,
    microbatch=None,
    reducer=None,
    clip_per="tree",
    norms=None,
) -> Gradient:
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
      reducer: aggregator that replaces the mean over examples, against wrong labels for
        instance; takes ``batch_size * d`` floats a client. A batch of too few examples
        for it, ``2 f`` or less, gives zeros (no step). None: the mean.
      clip_per: ``"tree"``, or ``"layer"``: each layer has a clip of its own within the
        same total, see :func:`jaxfed.privacy.clip_tree`.
      norms: ``(params, batch) -> [b]``, the exact norm of every example's gradient,
        e.g. ``jaxfed.models.gradient_norms(model)``: the examples' losses are then
        weighed and differentiated together, and their gradients never held (an MLP of
        200,000 parameters: fifty times faster). The clip, and with it privacy, is as
        right as the norms are, and as the examples are independent: no layer may look
        at the whole batch.

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
        _validate.clip_norm(clip_norm)
    if reducer is not None and not isinstance(reducer, Aggregator):
        raise TypeError(f"reducer must be an aggregator, got {reducer!r}.")
    _validate.choice("clip_per", clip_per, PER)
    if norms is not None:
        others = {"microbatch": microbatch, "reducer": reducer}
        for name, value in others.items():
            if value is not None:
                raise ValueError(
                    f"norms= does without the examples' gradients, {name}= is about "
                    "them. Leave one of the two out."
                )
        if clip_norm is None or clip_per != "tree":
            raise ValueError(
                "norms= is for a clip of each example's whole gradient, got clip_norm="
                f"{clip_norm}, clip_per={clip_per!r}. Leave it out."
            )
    return Gradient(
        loss_fn, batch_size, clip_norm, microbatch, reducer, clip_per, norms
    )


__all__ = ["Gradient", "LocalSGD", "gradient", "local_sgd", "sample"]
