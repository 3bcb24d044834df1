# SPDX-License-Identifier: Apache-2.0
"""Losses and accuracy of a Linen classifier as plain functions of its parameters."""

import jax
import jax.numpy as jnp
import optax

from jaxfed._validate import count


def _losses(logits, labels):
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)


def example_losses(model):
    """Return the cross-entropy of every example as a function of the parameters.

    Args:
      model: a Linen module that maps images ``[B, ...]`` to logits ``[B, classes]``.

    Returns:
      ``loss_fn(params, batch) -> float [B]``, where ``params`` is
      ``model.init(key, images)["params"]`` and ``batch`` is ``{"image": [B, ...],
      "label": int [B]}``. It is not averaged: padding is masked and examples are
      clipped one by one by whoever calls it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxfed import models
      >>> model = models.make_model("softmax", num_classes=4)
      >>> batch = {"image": jnp.zeros((2, 3, 3, 1)), "label": jnp.array([0, 3])}
      >>> params = model.init(jax.random.key(0), batch["image"])["params"]
      >>> [f"{x:.4f}" for x in models.example_losses(model)(params, batch)]
      ['1.3863', '1.3863']
    """

    def loss_fn(params, batch):
        return _losses(model.apply({"params": params}, batch["image"]), batch["label"])

    return loss_fn


def evaluate(model, params, data, *, batch_size=100):
    """Return mean loss and accuracy over a data set, in chunks of fixed size.

    Can be jitted with ``params`` and ``data`` as arguments and vmapped over ``params``.

    Args:
      model: a Linen module that maps images ``[B, ...]`` to logits ``[B, classes]``.
      params: its parameters.
      data: ``{"image": [N, ...], "label": int [N]}`` with N >= 1.
      batch_size: examples held at a time, structural; N need not be a multiple.

    Returns:
      ``{"loss": ..., "accuracy": ...}``, float32 scalars; accuracy is a fraction in
      [0, 1], ties go to the lowest class.

    Raises:
      ValueError: for no examples, or as many images as there are not labels.

    Cost:
      N forward passes; memory for the activations of ``batch_size`` examples.
    """
    batch_size = count("batch_size", batch_size)
    total = data["label"].shape[0]
    if total == 0 or data["image"].shape[0] != total:
        raise ValueError(
            "data must hold at least one example and one label per image, got images "
            f"{data['image'].shape} and labels {data['label'].shape}."
        )

    def sums(batch):
        logits = model.apply({"params": params}, batch["image"])
        right = jnp.argmax(logits, -1) == batch["label"]
        return {
            "loss": _losses(logits, batch["label"]).sum(dtype=jnp.float32),
            "accuracy": right.sum(dtype=jnp.float32),
        }

    whole = total // batch_size * batch_size
    result = {"loss": jnp.float32(0), "accuracy": jnp.float32(0)}
    if whole:
        chunks = {
            k: data[k][:whole].reshape(-1, batch_size, *data[k].shape[1:])
            for k in ("image", "label")
        }
        result = jax.tree.map(lambda x: x.sum(0), jax.lax.map(sums, chunks))
    if whole < total:
        rest = sums({k: data[k][whole:] for k in ("image", "label")})
        result = jax.tree.map(jnp.add, result, rest)
    return jax.tree.map(lambda x: x / total, result)


def accuracy(model, params, data, *, batch_size=100):
    """Return the fraction of examples classified rightly; see :func:`evaluate`.

    Args:
      model: a Linen module that maps images ``[B, ...]`` to logits ``[B, classes]``.
      params: its parameters.
      data: ``{"image": [N, ...], "label": int [N]}`` with N >= 1.
      batch_size: examples held at a time, structural.

    Returns:
      A float32 scalar in [0, 1].

    Raises:
      ValueError: as :func:`evaluate`.
    """
    return evaluate(model, params, data, batch_size=batch_size)["accuracy"]
