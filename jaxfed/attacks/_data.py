# SPDX-License-Identifier: Apache-2.0
"""Attacks on the data of Byzantine clients."""

import jax.numpy as jnp

from jaxfed import _validate
from jaxfed._base import Attack
from jaxfed.attacks import _base


def label_flip(num_classes=10, label="label") -> Attack:
    """Label flip: Byzantine clients train on labels ``num_classes - 1 - y``.

    They otherwise run the honest code, clipping and noise included, and know their own
    data only. Applying it twice gives the data back.

    Args:
      num_classes: labels are ``0 <= y < num_classes``.
      label: name of the label in a shard's data.

    Returns:
      Attack on the data, to be applied once before training.

    Raises:
      ValueError: at use if the shards have no such label.
    """
    num_classes = _validate.count("num_classes", num_classes, minimum=2)

    def poison(shards, byzantine):
        if not isinstance(shards.data, dict) or label not in shards.data:
            raise ValueError(
                f"label_flip needs shards whose data is a dict with {label!r}, got "
                f"{type(shards.data).__name__}; name the labels with label=."
            )
        y = shards.data[label]
        flip = jnp.reshape(byzantine, (-1,) + (1,) * (y.ndim - 1))
        flipped = jnp.where(flip, num_classes - 1 - y, y)
        return shards._replace(data=shards.data | {label: flipped})

    return Attack(poison, _base.no_wire(), needs_data=True)
