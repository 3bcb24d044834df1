# SPDX-License-Identifier: Apache-2.0
"""Typed PRNG keys, derived by identity (round, client) and never by position."""

import numbers

import jax
import jax.numpy as jnp


def as_key(key) -> jax.Array:
    """Return a typed key from a typed key or an integer seed.

    Raises:
      ValueError: for a legacy ``uint32[2]`` key.
      TypeError: for anything else.
    """
    if isinstance(key, numbers.Integral) and not isinstance(key, bool):
        return jax.random.key(int(key))
    dtype = getattr(key, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if key.shape != ():
            raise ValueError(f"key must be one key, got keys of shape {key.shape}.")
        return key
    if dtype == jnp.uint32:
        raise ValueError(
            "key must be a typed key, got a legacy uint32 key. Use jax.random.key(seed)"
            " or wrap it with jax.random.wrap_key_data(key)."
        )
    raise TypeError(f"key must be jax.random.key(...) or an int seed, got {key!r}.")


def fold(key, *data):
    """Fold integers into a key one after the other."""
    for item in data:
        key = jax.random.fold_in(key, item)
    return key
