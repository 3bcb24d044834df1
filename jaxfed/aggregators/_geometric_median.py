# SPDX-License-Identifier: Apache-2.0
"""The geometric median."""

import jax.numpy as jnp

from jaxfed import _validate
from jaxfed._base import Aggregator
from jaxfed.aggregators import _compose
from jaxfed.privacy import sensitivity
from jaxfed.reductions import _geometric_median


def geometric_median(
    num_byzantine=None,
    *,
    iterations=100,
    smoothing=1e-6,
    tolerance=1e-6,
    start="medoid",
) -> Aggregator:
    r"""Geometric median: the point of least (weighted) sum of distances to the rows.

    Smoothed Weiszfeld: each iterate is the mean of the rows with weights
    :math:`\alpha_i / \max(\nu, \|z - x_i\|)`, norms over the whole tree.
    Guarantee: :math:`\kappa = 4(1+\frac{f}{n-2f})^2` for the exact minimiser.
    Breakdown point 1/2. ``weights`` are the :math:`\alpha_i` (e.g. numbers of examples)
    and then count instead of heads.

    Edge cases: rows with NaN, inf or an overflowing norm have weight 0.

    Args:
      num_byzantine: declared budget, ``0 <= f < n/2``; checked, and used to find a
        centre for the arithmetic.
      iterations: Weiszfeld steps, >= 1.
      smoothing: :math:`\nu > 0`, in units of the updates; may be traced.
      tolerance: stop moving when no weight changes by more, >= 0; may be traced.
      start: ``"medoid"``, the mean with far rows scaled down to the medoid's median
        distance; ``"mean"``, from which one huge row takes many iterations to leave;
        ``"origin"`` (three iterations from there with ``smoothing=0.1`` are a widely
        used default, not translation equivariant).

    Returns:
      Aggregator; honours ``weights``.

    Raises:
      ValueError: for values out of range; at trace time if ``2 f >= n``.

    Cost:
      ``O(n^2 d)`` for the Gram matrix, ``O(n^2)`` an iteration.

    References:
      Pillutla et al., `Robust Aggregation for Federated Learning
      <https://arxiv.org/abs/1912.13445>`_, 2022.
    """
    f = _validate.budget(num_byzantine, optional=True)
    _validate.count("iterations", iterations)
    _validate.positive("smoothing", smoothing)
    _validate.nonnegative("tolerance", tolerance)
    _validate.choice("start", start, ("medoid", "mean", "origin"))

    def weigh(geometry, state, weights):
        if weights is not None:
            weights = _validate.weights(weights, geometry.n)
        w = _geometric_median.geometric_median(
            geometry,
            weights,
            iterations=iterations,
            smoothing=smoothing,
            tolerance=tolerance,
            start=start,
        )
        valid = True if f is None else geometry.outvotes(f)
        return jnp.where(valid, w, jnp.nan), state

    return _compose.geometric(
        "geometric_median",
        weigh,
        f,
        anchors=("origin",) if start == "origin" else (),
        check=lambda n: _validate.majority(f, n),
        weighted=True,
        # From the origin, a large tolerance may stop it outside of the rows' hull.
        sensitivity=None if start == "origin" else sensitivity.convex_hull(),
    )
