# SPDX-License-Identifier: Apache-2.0
"""Building blocks of attacks."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfed import _keys, _tree, _validate
from jaxfed._base import Attack

# Strengths beyond it would be infinite in float32.
LARGEST = 1e38


def no_poison(shards, byzantine):
    """Leave the Byzantine clients' data alone."""
    del byzantine
    return shards


def no_wire() -> optax.GradientTransformationExtraArgs:
    """Leave what crosses the wire alone."""
    return optax.with_extra_args_support(optax.identity())


class Seen(NamedTuple):
    """One round, as an adversary who sees the wire sees it.

    Attributes:
      uploads: stacked tree, what the honest code of every client computed.
      byzantine: bool ``[n]``.
      ids: ``[n]``, client ids of the rows.
      key: randomness of the round, None if nobody gave any.
      message: what the server broadcast, or None.
      probe: ``(uploads) -> model step``, a dry run of the server half, or None.
    """

    uploads: Any
    byzantine: jax.Array
    ids: jax.Array
    key: Any = None
    message: Any = None
    probe: Any = None

    @property
    def updates(self):
        """The uploads in float32 or wider."""
        return jax.tree.map(
            lambda x: x.astype(_tree.accumulator(x.dtype)), self.uploads
        )

    @property
    def num_honest(self):
        """Number of honest rows as a float, at least 1 so that it can divide."""
        return jnp.maximum(jnp.sum(jnp.where(self.byzantine, 0.0, 1.0)), 1)

    def attacked(self, forged):
        """Return the uploads with the Byzantine rows replaced.

        ``forged`` is a tree like one upload (all Byzantine clients send it) or a
        stacked tree (row i is sent by client i).
        """
        return _tree.where_rows(~self.byzantine, self.uploads, forged)

    def everywhere(self, one):
        """Return stacked uploads in which every row is ``one``."""
        nowhere = jnp.zeros_like(self.byzantine)
        return _tree.where_rows(nowhere, self.uploads, one)

    def mean(self):
        """Return the mean of the honest rows, 0 if there are none.

        Byzantine rows may hold anything.
        """
        honest = jnp.where(self.byzantine, 0.0, 1.0)
        return _tree.combine(honest / self.num_honest, self.updates)

    def std(self, mean, ddof):
        """Return the coordinate-wise standard deviation of the honest rows."""
        honest = jnp.where(self.byzantine, 0.0, 1.0)
        weights = honest / jnp.maximum(self.num_honest - ddof, 1)
        squares = jax.tree.map(lambda x, m: jnp.square(x - m[None]), self.updates, mean)
        return jax.tree.map(jnp.sqrt, _tree.combine(weights, squares))


def replace_rows(forge, init, **facts) -> Attack:
    """Build a wire attack from ``forge(seen, state) -> (forged, state)``."""

    def update(
        uploads,
        state,
        params=None,
        *,
        byzantine,
        probe=None,
        message=None,
        key=None,
        cohort=None,
        **extra,
    ):
        del params, extra
        n = _validate.stacked(uploads)
        byzantine = _validate.flags("byzantine", byzantine, n)
        uploads = jax.tree.map(jnp.asarray, uploads)
        # NumPy's are all clients' and known even under jit; a cohort's are JAX's.
        ids = np.arange(n) if cohort is None else jnp.asarray(cohort)
        seen = Seen(uploads, byzantine, ids, key, message, probe)
        forged, state = forge(seen, state)
        return seen.attacked(forged), state

    wire = optax.GradientTransformationExtraArgs(init, update)
    return Attack(no_poison, wire, **facts)


def stateless(forge, **facts) -> Attack:
    """Build a wire attack from ``forge(seen) -> forged``."""
    return replace_rows(
        lambda seen, state: (forge(seen), state),
        lambda params: optax.EmptyState(),
        **facts,
    )


class RandomState(NamedTuple):
    """State of a random attack: ``key`` (never advanced) and rounds so far."""

    key: jax.Array
    count: jax.Array


def random_rows(draw, key, **facts) -> Attack:
    """Build a wire attack from ``draw(key, own upload, seen) -> forged upload``.

    Rows are drawn by round and client id, so they depend neither on the cohort nor on
    the order of clients. The round's key is used where the caller gives one.
    """
    key = _keys.as_key(key)

    def init(params):
        del params
        return RandomState(jnp.copy(key), jnp.zeros([], jnp.int32))

    def forge(seen, state):
        now = _keys.fold(state.key, state.count) if seen.key is None else seen.key
        rows = jax.vmap(lambda i, own: draw(_keys.fold(now, i), own, seen))
        new = state._replace(count=optax.safe_increment(state.count))
        return rows(seen.ids, seen.updates), new

    return replace_rows(forge, init, **facts)


def normal_like(key, tree):
    """Return a tree of standard normal numbers."""
    keys = optax.tree.split_key_like(key, tree)
    return jax.tree.map(lambda x, k: jax.random.normal(k, x.shape, x.dtype), tree, keys)


def scaled(factor, tree):
    """Return ``factor * tree``."""
    return jax.tree.map(lambda x: jnp.asarray(factor, x.dtype) * x, tree)


def moved(tree, factor, direction):
    """Return ``tree + factor * direction``."""
    return jax.tree.map(
        lambda x, d: x + jnp.asarray(factor, x.dtype) * d, tree, direction
    )


def dots(updates, direction):
    """Return ``[n]``, the inner product of every row with one tree."""
    return sum(
        jnp.sum(x * d[None], range(1, x.ndim))
        for x, d in zip(
            jax.tree.leaves(updates), jax.tree.leaves(direction), strict=True
        )
    )


def update_of(upload):
    """Return the part of an upload that goes to the rule."""
    parts = isinstance(upload, dict) and set(upload) == {"update", "control"}
    return upload["update"] if parts else upload


def finite(name, x):
    """Raise unless ``x`` is finite and in float32's range; traced values pass."""
    value = _validate._number(name, x)
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {name}={x}.")
    if value is not None and abs(value) > LARGEST:
        raise ValueError(
            f"{name} must be at most {LARGEST:g} in size, the range of float32, got "
            f"{name}={x}. Lower it."
        )
    return x


def nonnegative(name, x):
    """Raise unless ``x >= 0`` and :func:`finite`; traced values pass."""
    return finite(name, _validate.nonnegative(name, x))


def positive(name, x):
    """Raise unless ``x > 0`` and :func:`finite`; traced values pass."""
    return finite(name, _validate.positive(name, x))
