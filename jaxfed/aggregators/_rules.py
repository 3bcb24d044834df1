# SPDX-License-Identifier: Apache-2.0
"""Aggregators: reductions lifted to optax links."""

import optax

from jaxfed import _validate, reductions
from jaxfed._base import Aggregator
from jaxfed.aggregators import _compose
from jaxfed.reductions import _coordinatewise


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

    def row_weights(geometry, state):
        dtype = geometry.gram.dtype
        return geometry.present / geometry.count.astype(dtype), state

    return Aggregator(
        lambda params: optax.EmptyState(),
        update,
        inspect=inspect,
        row_weights=row_weights,
    )


def median(num_byzantine=None) -> Aggregator:
    """Coordinate-wise median; see :func:`jaxfed.reductions.median`.

    Args:
      num_byzantine: declared budget, ``0 <= f < n/2``; checked, not used.

    Returns:
      Aggregator.

    Raises:
      ValueError: at trace time if ``2 f >= n``.
    """
    f = _validate.budget(num_byzantine, optional=True)
    return _compose.coordinatewise("median", lambda n: ((n - 1) // 2, n // 2 + 1), f)


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
    return _compose.coordinatewise("trimmed_mean", lambda n: (f, n - f), f)
