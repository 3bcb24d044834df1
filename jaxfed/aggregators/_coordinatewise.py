# SPDX-License-Identifier: Apache-2.0
"""Rules that work on each coordinate by itself, lifted to optax links."""

import jax
import jax.numpy as jnp
import optax

from jaxfed import _validate, reductions
from jaxfed._base import Aggregator, Geometric
from jaxfed.aggregators import _compose
from jaxfed.privacy import sensitivity
from jaxfed.reductions import _coordinatewise, _sorted


def lift(name, mean, weights, numbers, num_byzantine=None, bound=None) -> Aggregator:
    """Lift a kernel on stacked trees to a stateless aggregator.

    Args:
      name: for error messages.
      mean: ``(updates, *numbers, mask=None) -> tree like one client's``.
      weights: the same arguments, a tree of ``[n, ...]``, how far each value was kept.
      numbers: ``(number of present clients) -> numbers``; they may be traced.
      num_byzantine: declared budget, None if the rule has none.
      bound: :class:`Sensitivity`, None where none is known.
    """

    def arguments(updates, params, mask):
        n = _validate.stacked(updates, params)
        _validate.majority(num_byzantine, n)
        mask = _validate.flags("mask", mask, n)
        return numbers(_sorted.present_count(n, mask)), mask

    def update(updates, state, params=None, *, mask=None, weights=None, **extra):
        del extra
        _compose.refuse_weights(weights, name)
        given, mask = arguments(updates, params, mask)
        return mean(updates, *given, mask=mask), state

    def inspect(updates, state=None, *, mask=None, byzantine=None, **extra):
        del state, extra
        given, mask = arguments(updates, None, mask)
        share = sum(
            jnp.sum(x, range(1, x.ndim))
            for x in jax.tree.leaves(weights(updates, *given, mask=mask))
        )
        return _compose.info(share / jnp.sum(share), byzantine)

    return Aggregator(
        lambda params: optax.EmptyState(),
        update,
        inspect=inspect,
        num_byzantine=num_byzantine,
        sensitivity=bound,
    )


def _window(name, ranks, f, bound):
    kernel, shares = _sorted.window_mean, _sorted.window_weights
    return lift(name, kernel, shares, ranks, f, bound)


def _nearest(name, numbers, f):
    return lift(name, _sorted.nearest_mean, _sorted.nearest_weights, numbers, f)


def mean() -> Aggregator:
    """Average the clients, weighted where ``weights`` are given.

    Breakdown point 0: one Byzantine client moves it anywhere, one NaN spoils it.
    See :func:`jaxfed.reductions.mean` for arguments of ``update``, errors and cost.

    Returns:
      Aggregator.
    """

    def update(updates, state, params=None, *, mask=None, weights=None, **extra):
        del extra
        _validate.stacked(updates, params)
        return reductions.mean(updates, mask=mask, weights=weights), state

    def inspect(
        updates, state=None, *, mask=None, weights=None, byzantine=None, **extra
    ):
        del state, extra
        n = _validate.stacked(updates)
        return _compose.info(_coordinatewise.shares(n, mask, weights), byzantine)

    def weigh(geometry, state, weights):
        del weights
        dtype = geometry.gram.dtype
        return geometry.pad(geometry.present / geometry.count.astype(dtype)), state

    return Aggregator(
        lambda params: optax.EmptyState(),
        update,
        inspect=inspect,
        geometric=Geometric(weigh),
        sensitivity=sensitivity.mean(),
    )


def median(num_byzantine=None, *, middle="mean") -> Aggregator:
    """Coordinate-wise median; see :func:`jaxfed.reductions.median`.

    Args:
      num_byzantine: declared budget, ``0 <= f < n/2``; checked, not used.
      middle: for even n, ``"mean"`` of the two middle values or the ``"lower"`` one.

    Returns:
      Aggregator.

    Raises:
      ValueError: for an unknown ``middle``, and at trace time if ``2 f >= n``.
    """
    f = _validate.budget(num_byzantine, optional=True)
    _validate.choice("middle", middle, _coordinatewise.MIDDLES)
    ranks, bound = _coordinatewise.median_window, sensitivity.median(middle)
    return _window("median", lambda n: ranks(n, middle), f, bound)


def trimmed_mean(num_byzantine) -> Aggregator:
    """Coordinate-wise trimmed mean; see :func:`jaxfed.reductions.trimmed_mean`.

    Args:
      num_byzantine: f, values dropped at each end, ``0 <= f < n/2``; may be traced.

    Returns:
      Aggregator.

    Raises:
      ValueError: for f < 0, and at trace time if ``2 f >= n``.
    """
    f = _validate.budget(num_byzantine)
    ranks, bound = _coordinatewise.trimmed_window, sensitivity.trimmed_mean(f)
    return _window("trimmed_mean", lambda n: ranks(n, f), f, bound)


def meamed(num_byzantine, *, middle="mean") -> Aggregator:
    """Mean around median; see :func:`jaxfed.reductions.meamed`.

    Args:
      num_byzantine: f, values dropped in all, ``0 <= f < n/2``; may be traced.
      middle: which median, see :func:`median`.

    Returns:
      Aggregator.

    Raises:
      ValueError: for f < 0 or an unknown ``middle``, and at trace time if ``2 f >= n``.
    """
    f = _validate.budget(num_byzantine)
    _validate.choice("middle", middle, _coordinatewise.MIDDLES)

    def numbers(n):
        window = _coordinatewise.median_window(n, middle)
        return *window, _coordinatewise.all_but(n, f)

    return _nearest("meamed", numbers, f)


def around_median(name, drop, middle="mean", num_byzantine=None) -> Aggregator:
    """Lift :func:`jaxfed.reductions.mean_around_median`, for rules built on it.

    Args:
      name: for error messages.
      drop: how many values to leave out; NaN unless ``0 <= drop < n``.
      middle: which median, see :func:`median`.
      num_byzantine: declared budget.
    """
    return _nearest(
        name,
        lambda n: (*_coordinatewise.median_window(n, middle), n - drop),
        num_byzantine,
    )


def phocas(num_byzantine) -> Aggregator:
    """Mean around the trimmed mean; see :func:`jaxfed.reductions.phocas`.

    Args:
      num_byzantine: f, values dropped in all, ``0 <= f < n/2``; may be traced.

    Returns:
      Aggregator.

    Raises:
      ValueError: for f < 0, and at trace time if ``2 f >= n``.
    """
    f = _validate.budget(num_byzantine)

    def numbers(n):
        return *_coordinatewise.trimmed_window(n, f), _coordinatewise.all_but(n, f)

    return _nearest("phocas", numbers, f)


def sign_majority(num_byzantine=None) -> Aggregator:
    """Majority vote of signs; see :func:`jaxfed.reductions.sign_majority`.

    ``inspect`` gives each client the share of coordinates in which its sign is the
    result's; where votes tie, everybody's counts.

    Args:
      num_byzantine: declared budget, ``0 <= f < n/2``; checked, not used.

    Returns:
      Aggregator.

    Raises:
      ValueError: at trace time if ``2 f >= n``.
    """
    f = _validate.budget(num_byzantine, optional=True)
    vote, agree = _coordinatewise.majority, _coordinatewise.majority_weights
    return lift("sign_majority", vote, agree, lambda n: (), f)
