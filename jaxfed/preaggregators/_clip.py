# SPDX-License-Identifier: Apache-2.0
"""Clipping of the clients' norms, static and adaptive."""

import jax
import jax.numpy as jnp
import optax

from jaxfed import _tree, _validate
from jaxfed._base import PreAggregator
from jaxfed.aggregators import _compose
from jaxfed.reductions import _affine


def _scaling(factors, f=None) -> PreAggregator:
    """Lift ``(norms [n], present [n]) -> factors [n]`` to a pre-aggregator."""

    def matrix(geometry, state):
        _validate.majority(f, geometry.n)
        return _affine.scaling_matrix(geometry, factors), state

    def update(updates, state, params=None, *, mask=None, weights=None, **extra):
        del extra
        _compose.refuse_weights(weights, "clipping before a rule")
        n = _validate.stacked(updates, params)
        _validate.majority(f, n)
        mask = _validate.flags("mask", mask, n)
        present = jnp.ones(n, bool) if mask is None else mask
        scale = jnp.where(present, factors(_tree.row_norms(updates), present), 0)

        def leaf(x):
            row = _tree.expand(scale, x).astype(_tree.accumulator(x.dtype))
            return (jnp.where(row == 0, 0, x) * row).astype(x.dtype)

        return jax.tree.map(leaf, updates), state

    # On its own it needs no inner products between rows.
    return PreAggregator(
        lambda params: optax.EmptyState(),
        update,
        mixing=matrix,
        num_byzantine=f,
        anchors=("origin",),
    )


def clip(clip_norm=2.0) -> PreAggregator:
    r"""Static clipping: scale every row down to norm ``clip_norm``.

    Row :math:`x_i` becomes :math:`\min(1, C / \|x_i\|)\, x_i`, norms over the whole
    tree. Guarantee: every row ends in the ball of radius C, up to rounding relative to
    the honest rows' norms while Byzantine rows are a minority; no coefficient
    :math:`\kappa` (honest rows outside the ball are moved too).

    Edge cases: a row with NaN, inf or an overflowing norm has no direction and becomes
    0; a row of 0 stays 0; absent rows stay absent.

    Args:
      clip_norm: C > 0, inf switches it off; may be traced (then C <= 0 gives NaN).

    Returns:
      PreAggregator.

    Raises:
      ValueError: unless ``clip_norm > 0``.

    Cost:
      One read of the updates and one copy; in a chain ``O(n^2)`` behind the Gram
      matrix that the stages share.

    References:
      Allouah et al., `Adaptive Gradient Clipping for Robust Federated Learning
      <https://arxiv.org/abs/2405.14432>`_, 2025, which compares static clipping.
    """
    _validate.positive("clip_norm", clip_norm, finite=False)
    return _scaling(lambda norms, there: _affine.clip_factors(norms, there, clip_norm))


def arc(num_byzantine) -> PreAggregator:
    r"""Adaptive robust clipping: clip the largest rows to the norm of the next one.

    With :math:`k = \lfloor 2f(n-f)/n \rfloor`, the k rows of largest norm are scaled
    down to the (k+1)-th largest norm, norms over the whole tree. Guarantee: before a
    rule with coefficient :math:`\kappa` it gives
    :math:`\kappa' \le \kappa + \frac{2f}{n-2f}`.

    Edge cases: f = 0 changes no finite row; ties in norm do not matter. Rows with NaN,
    inf or an overflowing norm are the largest and become 0.

    Args:
      num_byzantine: f, ``0 <= f < n/2``; may be traced, and then a violated bound
        gives NaN.

    Returns:
      PreAggregator.

    Raises:
      ValueError: for f < 0, and at trace time if ``2 f >= n``.

    Cost:
      One read of the updates and one copy; in a chain ``O(n^2)`` behind the Gram
      matrix that the stages share.

    References:
      Allouah et al., `Adaptive Gradient Clipping for Robust Federated Learning
      <https://arxiv.org/abs/2405.14432>`_, 2025.
    """
    f = _validate.budget(num_byzantine)
    return _scaling(lambda norms, there: _affine.arc_factors(norms, there, f), f)
