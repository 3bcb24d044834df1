# SPDX-License-Identifier: Apache-2.0
"""Attacks on the data of Byzantine clients."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxfed import _keys, _tree, _validate
from jaxfed._base import Attack
from jaxfed.attacks import _base


def label_flip(num_classes=10, label="label") -> Attack:
    """Label flip: Byzantine clients train on labels ``num_classes - 1 - y``.

    They otherwise run the honest code, clipping and noise included, and know their own
    data only. Applying it twice gives the data back; of an odd number of classes the
    middle one stays.

    Args:
      num_classes: labels are ``0 <= y < num_classes``.
      label: name of the label in a shard's data.

    Returns:
      Attack on the data, to be applied once before training.

    Raises:
      TypeError: at use if the labels are not integers.
      ValueError: at use if the shards have no such label, or one outside its range
        that is not traced; padding is not looked at.
    """
    num_classes = _validate.count("num_classes", num_classes, minimum=2)

    def poison(shards, byzantine):
        chosen = jnp.reshape(byzantine, (-1, 1))
        return _flip("label_flip", shards, chosen, num_classes, label)

    return Attack(poison, _base.no_wire(), needs_data=True, sees_messages=False)


def label_flip_half(num_classes=10, fraction=0.5, label="label", *, key=0) -> Attack:
    """Flip a random half of each Byzantine client's labels, ``num_classes - 1 - y``.

    ``floor(fraction * count)`` of a client's examples, drawn once by the client's id;
    the client otherwise runs the honest code and knows its own data only. Applying it
    twice gives the data back; of an odd number of classes the middle one stays.

    Args:
      num_classes: labels are ``0 <= y < num_classes``.
      fraction: share of the labels, ``0 <= fraction <= 1``; may be traced.
      label: name of the label in a shard's data.
      key: typed key or int seed of who is flipped.

    Returns:
      Attack on the data, to be applied once before training.

    Raises:
      TypeError: at use if the labels are not integers.
      ValueError: if ``fraction`` is outside its range; at use as :func:`label_flip`.

    References:
      DRAG, section VI-B (LF).
    """
    num_classes = _validate.count("num_classes", num_classes, minimum=2)
    _validate.unit_interval("fraction", fraction, closed_right=True)
    key = _keys.as_key(key)

    def poison(shards, byzantine):
        def choose(client_id, count, capacity):
            score = jax.random.uniform(_keys.fold(key, client_id), (capacity,))
            score = jnp.where(jnp.arange(capacity) < count, score, jnp.inf)
            # The product may be rounded to just below the whole number it is.
            quota = jnp.floor(fraction * count * (1 + 1e-6))
            return jnp.argsort(jnp.argsort(score)) < quota

        n, capacity = jax.tree.leaves(shards.data)[0].shape[:2]
        choose_all = jax.vmap(choose, (0, 0, None))
        chosen = choose_all(jnp.arange(n), shards.count, capacity)
        chosen &= jnp.reshape(byzantine, (-1, 1))
        return _flip("label_flip_half", shards, chosen, num_classes, label)

    return Attack(poison, _base.no_wire(), needs_data=True, sees_messages=False)


def _flip(name, shards, chosen, num_classes, label):
    if not isinstance(shards.data, dict) or label not in shards.data:
        raise ValueError(
            f"{name} needs shards whose data is a dict with {label!r}, got "
            f"{type(shards.data).__name__}; name the labels with label=."
        )
    y = shards.data[label]
    if not jnp.issubdtype(jnp.result_type(y), jnp.integer):
        raise TypeError(
            f"{name} flips integer labels, got {jnp.result_type(y)} in "
            f"data[{label!r}]. Name the labels with label=."
        )
    if not any(isinstance(x, jax.core.Tracer) for x in (y, shards.count)):
        found, count = np.asarray(y), np.asarray(shards.count)
        found = found[np.arange(found.shape[1]) < count.reshape(-1, 1)]
        if found.size and not 0 <= found.min() <= found.max() < num_classes:
            raise ValueError(
                f"{name} needs labels 0 <= y < num_classes={num_classes}, got "
                f"{found.min()} to {found.max()} in data[{label!r}]. Set num_classes=, "
                "or name the labels with label=."
            )
    flipped = jnp.where(_tree.expand(chosen, y), num_classes - 1 - y, y)
    return shards._replace(data=shards.data | {label: flipped})
