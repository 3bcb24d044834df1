# SPDX-License-Identifier: Apache-2.0
"""DRAG, and the calibration by a reference direction that BR-DRAG shares with it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxfed import _tree, _validate
from jaxfed._base import Aggregator, FedAlgorithm
from jaxfed.aggregators import _compose
from jaxfed.algorithms._build import from_chains, needs
from jaxfed.reductions import _coordinatewise

# A vector no longer than this has no direction.
ZERO = 1e-12


class CalibratedState(NamedTuple):
    """State of :func:`calibrated`.

    Attributes:
      reference: tree like ``params``, the direction r of the next round.
      round: ``int32`` scalar, updates so far.
    """

    reference: Any
    round: jax.Array


def calibrated(*, alpha=0.25, strength=0.1, divergence=None) -> Aggregator:
    """Mean of updates turned towards a moving average; the rule of :func:`drag`.

    Args:
      alpha: weight of the newest aggregate in the average, in (0, 1]; may be traced.
      strength: c in [0, 1], may be traced, or a function of the round.
      divergence: from cosines to degrees of divergence; None: ``1 - cosine``.

    Returns:
      Aggregator with :class:`CalibratedState`; honours ``weights``.

    Raises:
      ValueError: for numbers out of range.

    Cost:
      Four reads of the updates, ``O(n d)``; two vectors of the size of params.
    """
    _validate.positive("alpha", alpha)
    _validate.unit_interval("alpha", alpha, closed_right=True)

    def init(params):
        return CalibratedState(optax.tree.zeros_like(params), jnp.zeros([], jnp.int32))

    def reference(updates, shares, state, extra):
        del extra

        def mean():
            return _tree.cast_like(_tree.combine(shares, updates), state.reference)

        return lax.cond(state.round == 0, mean, lambda: state.reference)

    def remember(state, used, step):
        def leaf(r, s):
            a = jnp.asarray(alpha, r.dtype)
            return (1 - a) * r + a * s.astype(r.dtype)

        moved = jax.tree.map(leaf, used, step)
        return CalibratedState(moved, optax.safe_increment(state.round))

    return calibration(
        init, reference, remember, strength, divergence, to_reference=False
    )


def calibration(
    init: Callable,
    reference: Callable,
    remember: Callable,
    strength,
    divergence=None,
    *,
    to_reference: bool,
) -> Aggregator:
    """Build the mean of calibrated updates.

    Args:
      init: ``(params) -> state`` with a field ``round``.
      reference: ``(updates, shares, state, extra) -> tree`` like one update; shares of
        rows that count as 0 are 0.
      remember: ``(state, reference, aggregate) -> state``.
      strength: c, number or function of the round.
      divergence: None: ``1 - cosine``.
      to_reference: rescale updates to the reference's norm, else the reference to
        theirs.
    """
    if not callable(strength):
        _validate.unit_interval("strength", strength, closed_right=True)
    if divergence is None:

        def divergence(cosine):
            return 1 - cosine

    elif not callable(divergence):
        raise TypeError(
            f"divergence must be a function of cosines, got {divergence!r}."
        )

    def run(
        look,
        updates,
        state,
        params=None,
        *,
        mask=None,
        weights=None,
        byzantine=None,
        **extra,
    ):
        n = _validate.stacked(updates, params)
        shares = _coordinatewise.shares(n, mask, weights)
        norms = safe_norms(updates)
        used = reference(updates, jnp.where(norms > 0, shares, 0), state, extra)
        size = safe_norms(jax.tree.map(lambda r: jnp.asarray(r)[None], used))
        if to_reference:
            # A factor that leaves the range of floats is no factor.
            ratio = size / jnp.where(norms > 0, norms, 1)
            norms = jnp.where((ratio > 1e-30) & (ratio < 1e30), norms, 0)
        some, length = size[0] > 0, jnp.where(size[0] > 0, size[0], 1)
        unit = jax.tree.map(lambda r: jnp.where(some, r, 0) / length, used)
        cosines = _cosines(updates, norms, unit)
        c = strength(state.round) if callable(strength) else strength
        degrees = jnp.where(size > 0, c * divergence(cosines), 0).astype(norms.dtype)
        lengths = jnp.broadcast_to(size, norms.shape) if to_reference else norms
        factors = lengths / jnp.where(norms > 0, norms, 1)
        factors = jnp.where(norms > 0, shares * (1 - degrees) * factors, 0)
        along = jnp.sum(shares * degrees * lengths)
        step = _tree.combine(factors, updates, point=(along, unit))
        new = remember(state, used, step)
        if not look:
            return step, new
        details = _diagnose(norms, cosines, degrees, shares)
        plain = _tree.combine(jnp.where(norms > 0, shares, 0), updates)
        moved, mean = (
            safe_norms(jax.tree.map(lambda x: x[None], t))[0] for t in (step, plain)
        )
        details |= {
            "reference_norm": size[0],
            "step_ratio": jnp.where(mean > 0, moved / mean, jnp.nan),
        }
        if byzantine is not None:
            details |= _assumptions(norms, cosines, size, shares, byzantine)
        info = _compose.info(factors, byzantine)
        return step, new, info._replace(details=details)

    observe = functools.partial(run, True)
    return Aggregator(
        init,
        functools.partial(run, False),
        inspect=lambda updates, state, **extra: observe(updates, state, **extra)[2],
        observe=observe,
    )


def safe_norms(updates):
    """Return norms ``[n]`` that neither overflow nor underflow in between.

    0 for rows that count as zero vectors: no longer than ``ZERO``, not finite, or so
    long that a sum of a few would not be finite.
    """
    rows = _rows(updates)
    scales = [jnp.max(jnp.abs(x), axis=1) for x in rows]
    scale = lax.stop_gradient(functools.reduce(jnp.maximum, scales))
    fine = jnp.isfinite(scale) & (scale > 0)
    scale = jnp.where(fine, scale, 1)
    squares = _tree.total(_scaled_squares(x, scale) for x in rows)
    norms = scale * jnp.sqrt(jnp.where(fine, squares, 1))
    fine &= (norms > ZERO) & (norms < 1e-4 * jnp.finfo(norms.dtype).max)
    return jnp.where(fine, norms, 0)


def _rows(updates):
    """Return the leaves that are not empty as matrices, in float32 or wider."""
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(updates)]
    leaves = [x for x in leaves if x.size] or [jnp.zeros((leaves[0].shape[0], 1))]
    rows = [x.reshape(x.shape[0], -1) for x in leaves]
    return [x.astype(_tree.accumulator(x.dtype)) for x in rows]


# Selects inside of these reductions would make XLA store what it reduces.
@jax.custom_jvp
def _scaled_squares(x, scale):
    return jnp.sum(jnp.square(x / scale[:, None]), axis=1)


@_scaled_squares.defjvp
def _scaled_squares_jvp(primals, tangents):
    x, scale = primals
    products = _finite(x) / scale[:, None] * (tangents[0] / scale[:, None])
    return _scaled_squares(x, scale), 2 * jnp.sum(products, axis=1)


@jax.custom_jvp
def _dots(x, r):
    return jnp.matmul(x, r, precision="highest")


@_dots.defjvp
def _dots_jvp(primals, tangents):
    (x, r), (x_moved, r_moved) = primals, tangents
    return _dots(x, r), _dots(x_moved, r) + _dots(_finite(x), r_moved)


def _finite(x):
    return jnp.where(jnp.isfinite(x), x, 0)


def _cosines(updates, norms, unit):
    """Return ``[n]`` cosines with a tree of norm 1, in [-1, 1]; 0 for norm 0."""
    ends = [r[0] for r in _rows(jax.tree.map(lambda r: r[None], unit))]
    pairs = zip(_rows(updates), ends, strict=True)
    inner = _tree.total(_dots(x, r) for x, r in pairs)
    some = norms > 0
    cosines = jnp.where(some, inner, 0) / jnp.where(some, norms, 1)
    return jnp.clip(cosines, -1, 1)


def _range(x, among):
    """Return the least and the greatest of ``x`` where ``among``; NaN for none."""
    some, least = jnp.any(among), jnp.min(jnp.where(among, x, jnp.inf))
    most = jnp.max(jnp.where(among, x, -jnp.inf))
    return jnp.where(some, least, jnp.nan), jnp.where(some, most, jnp.nan)


def _diagnose(norms, cosines, degrees, shares):
    """Return what the server sees, by the names given in :func:`drag`."""
    present, details = shares > 0, {}
    for name, x in (("cosine", cosines), ("divergence", degrees)):
        least, most = _range(x, present)
        mean = jnp.sum(shares * x)
        details |= {f"{name}_min": least, f"{name}_mean": mean, f"{name}_max": most}
    ignored = jnp.sum(present & (norms == 0), dtype=jnp.int32)
    return details | {"ignored_rows": ignored}


def _assumptions(norms, cosines, size, shares, byzantine):
    """Return what only a simulation knows, by the names given in :func:`drag`."""
    byzantine = _validate.flags("byzantine", byzantine, norms.shape[0])
    honest = ~byzantine
    known = (norms > 0) & honest & (shares > 0)
    rho = jnp.where(known, size / jnp.where(known, norms, 1), 0)
    least, most = _range(rho, known)

    def over(who, x):
        return jnp.sum(jnp.where(who, shares * x, 0))

    return {
        "byzantine_share": over(byzantine, jnp.ones_like(norms)),
        "byzantine_cosine": over(byzantine, cosines),
        "honest_cosine": over(honest, cosines),
        "rho_min": least,
        "rho_max": most,
        "rho": over(honest, cosines * rho),
    }


@needs(local_steps=True)
def drag(
    learning_rate=1.0,
    *,
    alpha=0.25,
    strength=0.1,
    divergence=None,
    num_clients=None,
    local_work=None,
) -> FedAlgorithm:
    r"""DRAG: turn each update towards a reference direction, as far as it diverges.

    .. math::

        \lambda_i = c\,(1 - \cos(g_i, r)), \qquad
        v_i = (1 - \lambda_i)\, g_i + \lambda_i \frac{\|g_i\|}{\|r\|}\, r, \qquad
        \Delta = \frac1n \sum_i v_i, \qquad x \leftarrow x - \gamma \Delta,

    then :math:`r \leftarrow (1-\alpha) r + \alpha \Delta`; norms and cosines over the
    whole tree. In the first round r is the mean of that round's :math:`g_i`, and the
    same :math:`g_i` are calibrated. Clients send :math:`g_i`, and r never leaves the
    server. ``strength=0`` is FedAvg. Not robust: one long row moves the model anywhere.

    Edge cases: rows that hold NaN or inf, that are longer than a ten-thousandth of the
    largest float, or no longer than 1e-12, count as zero vectors; if r is no longer
    than 1e-12, :math:`v_i = g_i`.

    Metrics with ``simulate(inspect=True)``: ``cosine_min``, ``_mean`` and ``_max``, the
    same of ``divergence`` (:math:`\lambda_i`), ``reference_norm``, ``step_ratio``
    (:math:`\|\Delta\|` to the norm of the plain mean: above 1, since the reference's
    part is as long as the updates), ``ignored_rows`` (counted as zero vectors);
    and of what a server cannot know ``byzantine_share`` w, ``byzantine_cosine`` x and
    ``honest_cosine`` y (sums over those clients, divided by n), ``rho_min`` and
    ``rho_max`` (of :math:`\rho_i = \|r\|/\|g_i\|`, honest clients), and ``rho``
    (:math:`\frac1n\sum \rho_i \cos(g_i, r)`, honest clients).

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule; 1 in the paper.
      alpha: weight of the newest aggregate in r, in (0, 1]; may be traced. 0.25 there.
      strength: c in [0, 1], may be traced, or a function of the round. 0.1 there for
        moderate, 0.25 for strong heterogeneity.
      divergence: from cosines ``[n]`` to degrees before c; None: ``1 - cosine``.
      num_clients: accepted like every method does; not needed.
      local_work: e.g. ``local_sgd(loss_fn, optax.sgd(0.01), steps=5, batch_size=10)``.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges.
      TypeError: if ``divergence`` is no function.

    Cost:
      ``O(n d)``, four reads of the updates; one parameter copy on the server.

    References:
      Xiao et al., `Divergence-Based Adaptive Aggregation for Byzantine Robust Federated
      Learning <https://arxiv.org/abs/2601.06903>`_, 2026, Algorithm 1, where the
      clients calibrate and train once more in the first round.
    """
    del num_clients
    _validate.positive("learning_rate", learning_rate)
    rule = calibrated(alpha=alpha, strength=strength, divergence=divergence)
    return from_chains(
        local_work, optax.identity(), (rule, optax.sgd(learning_rate)), rule=rule
    )
