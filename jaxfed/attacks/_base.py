# SPDX-License-Identifier: Apache-2.0
"""Building blocks of attacks."""

import jax
import jax.numpy as jnp
import optax

from jaxfed import _tree, _validate
from jaxfed._base import Attack


def no_poison(shards, byzantine):
    """Leave the Byzantine clients' data alone."""
    del byzantine
    return shards


def no_wire() -> optax.GradientTransformationExtraArgs:
    """Leave what crosses the wire alone."""
    return optax.with_extra_args_support(optax.identity())


def honest_mean(updates, byzantine):
    """Return the mean of the honest rows; Byzantine rows may hold anything."""
    w = jnp.where(byzantine, 0.0, 1.0)
    return _tree.combine(w / jnp.sum(w), updates)


def replace_rows(forge) -> Attack:
    """Build a stateless wire attack from ``forge(updates, byzantine)``.

    ``forge`` returns a tree like one update (all Byzantine clients send it) or a
    stacked tree (row i is sent by client i).
    """

    def update(updates, state, params=None, *, byzantine, **extra):
        del params, extra
        n = _validate.stacked(updates)
        byzantine = _validate.flags("byzantine", byzantine, n)
        updates = jax.tree.map(jnp.asarray, updates)
        forged = forge(updates, byzantine)
        return _tree.where_rows(~byzantine, updates, forged), state

    wire = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    return Attack(no_poison, wire)
