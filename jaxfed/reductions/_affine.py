# SPDX-License-Identifier: Apache-2.0
"""Rules that weigh rows by norms, angles and spectra of the clients' geometry.

Matrices are ``[m, n + anchors]`` and weights ``[n + anchors]``; both are affine (rows
sum to 1, anchors included), NaN where a traced condition fails. Rows of a matrix for
absent clients are 0.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxfed import _validate
from jaxfed.reductions._gram import Geometry, product, smallest
from jaxfed.reductions._selection import average

FORMS = ("original", "projected")
# FilterL2 is content with a top eigenvalue below this many sigma.
EXPANSION = math.sqrt(20)


def _root(sq):
    """Square root with gradient 0 at 0."""
    zero = sq <= 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, sq)))


def _norms(geometry: Geometry):
    """Return ``[n]`` norms of the rows; inf for rows that are not usable."""
    return _root(geometry.sq_distances_to(geometry.one_hot("origin")))


def _shrink(norm, radius):
    """Return ``min(1, radius / norm)``, 0 for a norm of inf."""
    far = norm > radius
    factor = jnp.where(far, radius / jnp.where(far, norm, 1), 1)
    return jnp.where(jnp.isfinite(norm), factor, 0)


def _towards_origin(geometry: Geometry, factors):
    """Return the matrix that multiplies row i by ``factors[i]``."""
    present = geometry.present[:, None]
    rest = (1 - factors)[:, None] * geometry.one_hot("origin")[None, :]
    matrix = geometry.pad(jnp.diag(factors)) + rest
    return jnp.where(present, matrix, 0).astype(geometry.gram.dtype)


def scaling_matrix(geometry: Geometry, factors):
    """Return the matrix of ``factors(norms, present)``; see :func:`clip_factors`."""
    return _towards_origin(geometry, factors(_norms(geometry), geometry.present))


def clip_factors(norms, present, clip_norm):
    """Return ``[n]`` factors that scale rows of these norms down to ``clip_norm``.

    See :func:`jaxfed.preaggregators.clip`.
    """
    del present
    return jnp.where(clip_norm > 0, _shrink(norms, clip_norm), jnp.nan)


def arc_factors(norms, present, f):
    """Return ``[n]`` factors of adaptive robust clipping, from the norms of the rows.

    See :func:`jaxfed.preaggregators.arc`.
    """
    n = jnp.sum(present, dtype=jnp.int32)
    clipped = 2 * f * (n - f) // jnp.maximum(n, 1)
    largest = -jnp.sort(jnp.where(present, -norms, jnp.inf))
    radius = jnp.take(largest, clipped, mode="clip")
    return jnp.where((f >= 0) & (f < n - f), _shrink(norms, radius), jnp.nan)


def bucketing_matrix(geometry: Geometry, order, size):
    """Return the matrix of the means of consecutive rows.

    Args:
      geometry: the clients' :class:`Geometry`.
      order: ``[n]`` permutation of the rows, absent rows last.
      size: rows a bucket, Python int >= 1; the last bucket holds what is left.

    Returns:
      Matrix ``[ceil(n / size), n + anchors]``; empty buckets are rows of 0.

    Cost:
      ``O(n^2 / size)``.
    """
    bucket = jnp.argsort(order) // size
    buckets = jnp.arange(-(-geometry.n // size))
    members = (bucket[None, :] == buckets[:, None]) & geometry.present[None, :]
    members = members.astype(geometry.gram.dtype)
    count = jnp.sum(members, axis=1, keepdims=True)
    return geometry.pad(members / jnp.maximum(count, 1))


def centered_clipping(geometry: Geometry, *, clip_norm=10.0, iterations=1):
    """Return weights of rows and of the anchor ``"reference"``, where it starts.

    Cost: ``O(n^2)`` an iteration. See :func:`jaxfed.aggregators.centered_clipping`.
    """
    count = geometry.count.astype(geometry.gram.dtype)
    weights = geometry.one_hot("reference")
    for _ in range(iterations):
        distance = _root(geometry.sq_distances_to(weights))
        pull = _shrink(distance, clip_norm) / count
        weights = weights * (1 - jnp.sum(pull)) + geometry.pad(pull)
    return jnp.where(clip_norm > 0, weights, jnp.nan)


def fltrust(geometry: Geometry, *, form="original"):
    """Return weights of rows and of the anchors ``"origin"`` and ``"reference"``.

    Cost: ``O(n)``. See :func:`jaxfed.aggregators.fltrust`.
    """
    gram, o, r = geometry.gram, geometry.index("origin"), geometry.index("reference")
    inner = gram[:, r] - gram[:, o] - gram[o, r] + gram[o, o]
    norm, size = _norms(geometry), _root(gram[r, r] - 2 * gram[o, r] + gram[o, o])
    known = (norm > 0) & jnp.isfinite(norm) & (size != 0)
    cosine = inner[: geometry.n] / jnp.where(known, norm, 1)
    cosine = cosine / jnp.where(size == 0, 1, size)
    trust = jnp.where(known, jnp.clip(cosine, 0, 1), 0)
    if form == "original":
        total = jnp.sum(trust)
        scaled = trust * (size / jnp.where(known, norm, 1))
        weights = geometry.pad(scaled / jnp.where(total == 0, 1, total))
    else:
        along = trust * jnp.where(known, norm, 0) / jnp.where(size == 0, 1, size)
        share = jnp.sum(along) / geometry.count.astype(gram.dtype)
        weights = share * geometry.one_hot("reference")
    weights = weights + (1 - jnp.sum(weights)) * geometry.one_hot("origin")
    return jnp.where(geometry.count > 0, weights, jnp.nan)


def cge(geometry: Geometry, f):
    """Return weights of the mean of the ``n - f`` rows of least norm.

    Cost: ``O(n log n)``. See :func:`jaxfed.aggregators.cge`.
    """
    norms = jnp.where(geometry.present, _norms(geometry), jnp.inf)
    chosen = smallest(norms, geometry.count - f)
    return average(geometry, chosen, geometry.outvotes(f))


def _top_eigenpair(a):
    """Return the largest eigenvalue of a symmetric matrix and its eigenvector.

    ``eigh`` divides by every gap between eigenvalues when it is differentiated. Here
    the derivative is that of first-order perturbation theory, without the directions
    whose eigenvalue equals the largest up to rounding: finite for every matrix.
    """
    fixed = lax.stop_gradient(a)
    values, vectors = jnp.linalg.eigh(fixed)
    top, u = values[-1], vectors[:, -1]
    gap = top - values
    apart = gap > 8 * jnp.finfo(a.dtype).eps * top
    inverse = jnp.where(apart, 1 / jnp.where(apart, gap, 1), 0)
    moved = product(a - fixed, u)
    turned = product(vectors, inverse * product(vectors.T, moved))
    return top + product(u, moved), u + turned


def _normalized(c):
    total = jnp.sum(c)
    return c / jnp.where(total > 0, total, 1)


def _filter_pass(geometry: Geometry, c):
    """Return the top eigenvalue of the covariance under weights c, and new weights.

    Row i is multiplied by ``1 - tau_i / max tau``, tau_i being its squared deviation
    along the top eigenvector and the maximum one over rows of positive weight; rows
    near the maximum get exactly 0.
    """
    alive = c > 0
    p = _normalized(c)
    gram = jnp.where(alive[:, None] & alive[None, :], geometry.rows, 0)
    # Squares of the largest rows would overflow; the factor cancels.
    scale = lax.stop_gradient(jnp.max(jnp.diagonal(gram)))
    gram = gram / jnp.where(scale > 0, scale, 1)
    moved = product(gram, p)
    gram = gram - moved[:, None] - moved[None, :] + product(p, moved)
    root = jnp.where(alive, jnp.sqrt(jnp.where(alive, p, 1)), 0)
    value, u = _top_eigenpair(root[:, None] * gram * root[None, :])
    tau = jnp.where(alive, jnp.square(product(gram, root * u)), 0)
    top = jnp.max(tau)
    near = 1e-12 if tau.dtype == jnp.float64 else 1e-5
    factor = 1 - tau / jnp.where(top > 0, top, 1)
    kept = jnp.where(tau >= top * (1 - near), 0, c * factor)
    return scale * jnp.maximum(value, 0), kept


def _passes(geometry: Geometry, f):
    """Most passes that may be needed: each removes at least one row."""
    return 2 * f if _validate.is_concrete(f) else max(geometry.n - 1, 0)


def _filtered(geometry: Geometry, f, weights):
    """Return weights; NaN unless ``2f < n`` and at most f rows are not usable."""
    bad = geometry.count - jnp.sum(geometry.usable, dtype=jnp.int32)
    return geometry.pad(jnp.where(geometry.outvotes(f) & (bad <= f), weights, jnp.nan))


def caf(geometry: Geometry, f):
    """Return weights of the covariance-bound agnostic filter.

    Cost: at most 2f eigendecompositions, ``O(f n^3)``; ``n - 1`` are the bound for a
    traced f, but no more than 2f are computed. See :func:`jaxfed.aggregators.caf`.
    """
    c = geometry.usable.astype(geometry.gram.dtype)
    # Rounding of the sum must not cost another pass.
    enough = geometry.count - 2 * f + 8 * geometry.n * jnp.finfo(c.dtype).eps

    def one(carry):
        c, best, least = carry
        value, kept = _filter_pass(geometry, c)
        better = value < least
        return (
            kept,
            jnp.where(better, _normalized(c), best),
            lax.stop_gradient(jnp.where(better, value, least)),
        )

    def step(carry, _):
        c, _, least = carry
        active = (jnp.sum(c) > enough) & (least > 0)
        return lax.cond(active, one, lambda carry: carry, carry), None

    start = c, _normalized(c), jnp.asarray(jnp.inf, c.dtype)
    (_, best, _), _ = jax.lax.scan(step, start, None, length=_passes(geometry, f))
    return _filtered(geometry, f, best)


def filter_l2(geometry: Geometry, f, *, sigma=0.0):
    """Return weights of the filter that stops below a known covariance bound.

    Cost: as :func:`caf`. See :func:`jaxfed.aggregators.filter_l2`.
    """
    c = geometry.usable.astype(geometry.gram.dtype)
    bad = geometry.count - jnp.sum(geometry.usable, dtype=jnp.int32)

    def one(c):
        value, kept = _filter_pass(geometry, c)
        # If all rows deviate equally there is nobody to blame.
        stop = (value <= EXPANSION * sigma) | (jnp.sum(kept) <= 0)
        return jnp.where(stop, c, kept), ~stop

    def step(carry, i):
        c, going = carry
        active = going & (i < 2 * f - bad)
        return lax.cond(active, one, lambda c: (c, active), c), None

    start = c, jnp.asarray(True)
    (c, _), _ = jax.lax.scan(step, start, jnp.arange(_passes(geometry, f)))
    return _filtered(geometry, f, _normalized(c))
