# SPDX-License-Identifier: Apache-2.0
"""Projected steps: a link behind the optimizer that keeps the model in a ball."""

import math

import jax
import jax.numpy as jnp
import optax

from jaxfed import _tree, _validate


def project(radius, *, per_leaf=False) -> optax.GradientTransformation:
    r"""Shorten a step so that it ends in a ball: :math:`\Pi(x + s) - x` for a step s.

    Comes last in the chain. ``params`` then satisfy :math:`\|x\| \le R(1 + 10^{-6})`
    after ``optax.apply_updates`` (16-bit leaves add their rounding). Steps that end
    inside stay as they are, bit for bit.

    Args:
      radius: R > 0, inf for no projection; may be traced.
      per_leaf: a ball of radius R for each leaf, instead of one for the whole tree.

    Returns:
      Link, like params to like params; its ``update`` needs ``params``, unless R = inf.

    Raises:
      ValueError: if ``radius`` is not positive; at trace time without ``params``.
    """
    _validate.positive("radius", radius, finite=False)
    if _validate.is_concrete(radius) and radius == math.inf:
        return optax.identity()

    def ball(step, params):
        wide, long = (
            jax.tree.map(lambda x: x.astype(_tree.accumulator(x.dtype)), tree)
            for tree in (params, step)
        )
        end = jax.tree.map(jnp.add, wide, long)
        inside = _tree.norm(end) <= radius
        near = optax.projections.projection_l2_ball(end, radius)
        return jax.tree.map(
            lambda s, y, p: jnp.where(inside, s, (y - p).astype(s.dtype)),
            step,
            near,
            params,
        )

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("project needs params: pass them to update.")
        if per_leaf:
            return jax.tree.map(ball, updates, params), state
        return ball(updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
