# SPDX-License-Identifier: Apache-2.0
"""The geometric median by Weiszfeld's iteration on weights."""

import jax.numpy as jnp
from jax import lax

from jaxfed.reductions._gram import Geometry, product


def geometric_median(
    geometry: Geometry,
    weights=None,
    *,
    iterations=100,
    smoothing=1e-6,
    tolerance=1e-6,
    start="medoid",
):
    """Return weights ``[n + anchors]`` of the smoothed geometric median.

    Every iterate is a weighted sum of the rows, so the Gram matrix gives its distances
    to them. ``weights`` are the clients' own, ``[n]``; rows that are not usable get 0.

    Cost: ``O(n^2)`` an iteration. See :func:`jaxfed.aggregators.geometric_median`.
    """
    gram = geometry.gram
    own = jnp.ones(geometry.n) if weights is None else jnp.asarray(weights, float)
    own = jnp.where(geometry.usable, own.astype(gram.dtype), 0)
    first = geometry.pad(own / jnp.sum(own))
    if start == "origin":
        first = geometry.one_hot("origin")
    elif start == "medoid":
        # A mean in which far rows count in inverse proportion to their distance.
        far = jnp.sqrt(geometry.sq_distances()[geometry.medoid()])
        ordered = jnp.sort(jnp.where(geometry.present, far, jnp.inf))
        near = jnp.take(ordered, geometry.count // 2, mode="clip")
        share = jnp.where(far > near, near / jnp.maximum(far, near), 1)
        share = lax.stop_gradient(jnp.where(geometry.usable, share, 0)) * own
        first = geometry.pad(share / jnp.sum(share))

    def step(w, _):
        # About the heaviest row, the distance to a row that is almost reached keeps
        # its digits.
        i = jnp.argmax(w)
        moved = gram - gram[i][None, :] - gram[:, i][:, None] + gram[i, i]
        along = product(moved, w)
        sq = (jnp.diagonal(moved) - 2 * along + product(w, along))[: geometry.n]
        pull = own / jnp.sqrt(jnp.maximum(sq, jnp.square(smoothing)))
        new = geometry.pad(pull / jnp.sum(pull))
        still = jnp.max(jnp.abs(new - w)) <= tolerance
        return jnp.where(still, w, new), None

    return lax.scan(step, first, None, length=iterations)[0]
