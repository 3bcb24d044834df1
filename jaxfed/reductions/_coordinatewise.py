# SPDX-License-Identifier: Apache-2.0
"""Coordinate-wise reductions of stacked trees."""

import jax.numpy as jnp

from jaxfed import _tree, _validate
from jaxfed.reductions import _sorted


def mean(updates, *, mask=None, weights=None):
    r"""Average over clients, :math:`\sum_i w_i x_i / \sum_i w_i`.

    No protection: one NaN or huge row of positive weight spoils the result.

    Args:
      updates: stacked tree, leaves ``[n, ...]`` floating point.
      mask: bool ``[n]``, True = present. None: everybody.
      weights: ``[n]``, finite and >= 0, e.g. numbers of examples. None: equal.

    Returns:
      Tree like one client's update, same dtypes; NaN if the weights sum to 0.

    Raises:
      TypeError, ValueError: for leaves that are not stacked floats, or a mask or
        weights that are not ``[n]``.

    Cost:
      One read of the updates, ``O(n d)``; no extra memory.
    """
    n = _validate.stacked(updates)
    return _tree.combine(shares(n, mask, weights), updates)


def shares(n, mask=None, weights=None):
    """Return the ``[n]`` shares of a weighted mean; they sum to 1."""
    w = jnp.ones(n) if weights is None else jnp.asarray(weights, float)
    if w.shape != (n,):
        raise ValueError(
            f"weights must have one entry for each of the {n} clients, got shape "
            f"{w.shape}."
        )
    mask = _validate.flags("mask", mask, n)
    w = w if mask is None else jnp.where(mask, w, 0)
    return w / jnp.sum(w)


def trimmed_mean(updates, num_byzantine, *, mask=None):
    r"""Average each coordinate after dropping its f smallest and f largest values.

    Guarantee: inside the honest range of every coordinate for any f < n/2 rows;
    :math:`\kappa = \frac{6f}{n-2f}(1+\frac{f}{n-2f})` (Allouah et al. 2023).
    Non-finite values count as +inf; with more than f of them in a column the
    result is NaN.

    Args:
      updates: stacked tree, leaves ``[n, ...]`` floating point.
      num_byzantine: f, ``0 <= f < n/2``. A Python int picks the faster slice; may be
        traced, and then a violated bound gives NaN.
      mask: bool ``[n]``, True = present; n shrinks, f stays.

    Returns:
      Tree like one client's update, same dtypes.

    Raises:
      ValueError: if ``2 f >= n``.
      TypeError, ValueError: for leaves that are not stacked floats, or a mask that
        is not ``[n]``.

    Cost:
      ``O(n log^2 n)`` comparisons a coordinate, no extra memory up to 64 clients
      (32 if f or the mask is traced); one sorted copy of the updates above.

    References:
      Yin et al., `Byzantine-Robust Distributed Learning
      <https://arxiv.org/abs/1803.01498>`_, 2018.
    """
    n = _validate.stacked(updates)
    f = _validate.budget(num_byzantine)
    _validate.majority(f, n)
    mask = _validate.flags("mask", mask, n)
    return _sorted.map_window(updates, f, _sorted.present_count(n, mask) - f, mask)


def median(updates, *, mask=None):
    r"""Coordinate-wise median; for even n the mean of the two middle values.

    Guarantee: inside the honest range of every coordinate for any f < n/2 rows;
    :math:`\kappa = 4(1+\frac{f}{n-2f})^2` (Allouah et al. 2023). Non-finite values
    count as +inf; where they hold a middle rank the result is NaN.

    Args:
      updates: stacked tree, leaves ``[n, ...]`` floating point.
      mask: bool ``[n]``, True = present.

    Returns:
      Tree like one client's update, same dtypes; NaN if nobody is present.

    Raises:
      TypeError, ValueError: for leaves that are not stacked floats, or a mask that
        is not ``[n]``.

    Cost:
      As :func:`trimmed_mean`.

    References:
      Yin et al., `Byzantine-Robust Distributed Learning
      <https://arxiv.org/abs/1803.01498>`_, 2018.
    """
    n = _validate.stacked(updates)
    mask = _validate.flags("mask", mask, n)
    n = _sorted.present_count(n, mask)
    return _sorted.map_window(updates, (n - 1) // 2, n // 2 + 1, mask)
