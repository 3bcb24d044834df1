# SPDX-License-Identifier: Apache-2.0
"""Coordinate-wise reductions of stacked trees."""

import jax
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
      Up to 64 clients (32 if f or the mask is traced): ``O(n log^2 n)`` comparisons a
      coordinate in one read. More clients: two bisections, ``64 n`` comparisons a
      coordinate in float32. Extra memory: none,
      one float32 copy for 16-bit floats.

    References:
      Yin et al., `Byzantine-Robust Distributed Learning
      <https://arxiv.org/abs/1803.01498>`_, 2018.
    """
    n, f, mask = _checked(updates, num_byzantine, mask)
    window = trimmed_window(_sorted.present_count(n, mask), f)
    return _sorted.window_mean(updates, *window, mask)


def median(updates, *, mask=None, middle="mean"):
    r"""Coordinate-wise median; for even n the mean of the two middle values.

    Guarantee: inside the honest range of every coordinate for any f < n/2 rows;
    :math:`\kappa = 4(1+\frac{f}{n-2f})^2` (Allouah et al. 2023). Non-finite values
    count as +inf; where they hold a middle rank the result is NaN.

    Args:
      updates: stacked tree, leaves ``[n, ...]`` floating point.
      mask: bool ``[n]``, True = present.
      middle: for even n, ``"mean"`` of the two middle values or the ``"lower"`` one.

    Returns:
      Tree like one client's update, same dtypes; NaN if nobody is present.

    Raises:
      ValueError: for an unknown ``middle``.
      TypeError, ValueError: for leaves that are not stacked floats, or a mask that
        is not ``[n]``.

    Cost:
      As :func:`trimmed_mean`; one bisection where one value is the middle.

    References:
      Yin et al., `Byzantine-Robust Distributed Learning
      <https://arxiv.org/abs/1803.01498>`_, 2018.
    """
    n = _validate.stacked(updates)
    _validate.choice("middle", middle, MIDDLES)
    mask = _validate.flags("mask", mask, n)
    window = median_window(_sorted.present_count(n, mask), middle)
    return _sorted.window_mean(updates, *window, mask)


def mean_around_median(updates, drop, *, mask=None, middle="mean"):
    """Average each coordinate after dropping the values farthest from its median.

    Of two values equally far, the upper is dropped. Non-finite values count as +inf:
    they are dropped first, and where they hold a middle rank, or more than ``drop``
    are present, the result is NaN.

    Args:
      updates: stacked tree, leaves ``[n, ...]`` floating point.
      drop: how many values to leave out, ``0 <= drop < n``; may be traced, and then a
        violated bound gives NaN.
      mask: bool ``[n]``, True = present; n shrinks, ``drop`` stays.
      middle: which median, see :func:`median`.

    Returns:
      Tree like one client's update, same dtypes.

    Raises:
      ValueError: if ``drop`` is out of its range, or for an unknown ``middle``.
      TypeError, ValueError: for leaves that are not stacked floats, or a mask that
        is not ``[n]``.

    Cost:
      Up to 64 clients: a median (two if ``drop`` or the mask is traced, up to 32). More
      clients: one bisection more than the median.
    """
    n = _validate.stacked(updates)
    _validate.choice("middle", middle, MIDDLES)
    if _validate.is_concrete(drop):
        _validate.count("drop", drop, minimum=0, maximum=n - 1)
    mask = _validate.flags("mask", mask, n)
    n = _sorted.present_count(n, mask)
    numbers = (*median_window(n, middle), n - drop)
    return _sorted.nearest_mean(updates, *numbers, mask)


def meamed(updates, num_byzantine, *, mask=None, middle="mean"):
    """Mean around median: average the n - f values nearest the median, coordinate-wise.

    Guarantee: for any f < n/2 rows, no farther from the median, which lies in the
    honest range of every coordinate, than the farthest honest value. Ties and
    non-finite values: as :func:`mean_around_median`.

    Args:
      updates: stacked tree, leaves ``[n, ...]`` floating point.
      num_byzantine: f, ``0 <= f < n/2``; may be traced, and then a violated bound gives
        NaN.
      mask: bool ``[n]``, True = present; n shrinks, f stays.
      middle: which median, see :func:`median`.

    Returns:
      Tree like one client's update, same dtypes.

    Raises:
      ValueError: if ``2 f >= n``, or for an unknown ``middle``.
      TypeError, ValueError: for leaves that are not stacked floats, or a mask that
        is not ``[n]``.

    Cost:
      As :func:`mean_around_median`.

    References:
      Xie, Koyejo, Gupta, `Generalized Byzantine-tolerant SGD
      <https://arxiv.org/abs/1802.10116>`_, 2018.
    """
    n, f, mask = _checked(updates, num_byzantine, mask)
    _validate.choice("middle", middle, MIDDLES)
    n = _sorted.present_count(n, mask)
    numbers = (*median_window(n, middle), all_but(n, f))
    return _sorted.nearest_mean(updates, *numbers, mask)


def phocas(updates, num_byzantine, *, mask=None):
    """Average the n - f values nearest the trimmed mean, coordinate-wise.

    Guarantee: for any f < n/2 rows, no farther from the trimmed mean, which lies in
    the honest range of every coordinate, than the farthest honest value. Ties and
    non-finite values: as :func:`mean_around_median`, with the trimmed mean.

    Args:
      updates: stacked tree, leaves ``[n, ...]`` floating point.
      num_byzantine: f, ``0 <= f < n/2``; may be traced, and then a violated bound gives
        NaN.
      mask: bool ``[n]``, True = present; n shrinks, f stays.

    Returns:
      Tree like one client's update, same dtypes.

    Raises:
      ValueError: if ``2 f >= n``.
      TypeError, ValueError: for leaves that are not stacked floats, or a mask that
        is not ``[n]``.

    Cost:
      As :func:`mean_around_median`.

    References:
      Xie, Koyejo, Gupta, `Phocas: dimensional Byzantine-resilient stochastic gradient
      descent <https://arxiv.org/abs/1805.09682>`_, 2018.
    """
    n, f, mask = _checked(updates, num_byzantine, mask)
    n = _sorted.present_count(n, mask)
    numbers = (*trimmed_window(n, f), all_but(n, f))
    return _sorted.nearest_mean(updates, *numbers, mask)


def sign_majority(updates, *, mask=None):
    """Return the sign of each coordinate that most clients have; 0 for a tie.

    The sign of the sum of signs. Zeros abstain; non-finite values count as +inf.
    Guarantee: where more than n/2 + f values that cast a vote share a sign, that sign.
    The gradient is 0.

    Args:
      updates: stacked tree, leaves ``[n, ...]`` floating point.
      mask: bool ``[n]``, True = present.

    Returns:
      Tree like one client's update, same dtypes, of -1, 0 and 1; NaN if nobody is
      present.

    Raises:
      TypeError, ValueError: for leaves that are not stacked floats, or a mask that
        is not ``[n]``.

    Cost:
      One read of the updates, ``O(n d)``; no extra memory.

    References:
      Bernstein et al., `signSGD with majority vote is communication efficient and fault
      tolerant <https://arxiv.org/abs/1810.05291>`_, 2019.
    """
    n = _validate.stacked(updates)
    return majority(updates, _validate.flags("mask", mask, n))


# --- what the aggregators share ---------------------------------------------------

MIDDLES = ("mean", "lower")


def median_window(n, middle="mean"):
    """Return the sorted ranks ``low <= k < high`` that the median averages."""
    low = (n - 1) // 2
    return low, low + 1 if middle == "lower" else n // 2 + 1


def trimmed_window(n, f):
    """Return the sorted ranks that the trimmed mean averages."""
    return f, n - f


def all_but(n, f):
    """Return ``n - f``; 0 (which gives NaN) unless ``0 <= f < n/2``."""
    if _validate.is_concrete(n) and _validate.is_concrete(f):
        return n - f
    return jnp.where((0 <= f) & (f < n - f), n - f, 0)


def majority(updates, mask=None):
    """Return the sign of the sum of signs; see :func:`sign_majority`."""
    leaves, structure = jax.tree.flatten(updates)
    leaves = [jnp.asarray(x) for x in leaves]
    votes = _sorted.sum_clean_rows(
        lambda row: jnp.sign(row).astype(jnp.int32), leaves, mask
    )
    # An absent row counts as +inf.
    absent = 0 if mask is None else jnp.sum(~mask, dtype=jnp.int32)
    present = True if mask is None else jnp.any(mask)
    return structure.unflatten(
        jnp.where(present, jnp.sign(vote - absent), jnp.nan).astype(x.dtype)
        for vote, x in zip(votes, leaves, strict=True)
    )


def majority_weights(updates, mask=None):
    """Return a tree of ``[n, ...]``, 1 for values whose sign is the majority's.

    Where votes tie, everybody who is present agrees.
    """

    def weigh(x, result):
        sign = jnp.where(jnp.isfinite(x), jnp.sign(x), 1)
        present = True if mask is None else _tree.expand(mask, x)
        agrees = ((sign == result[None]) | (result[None] == 0)) & present
        return agrees.astype(_tree.accumulator(x.dtype))

    return jax.tree.map(weigh, updates, majority(updates, mask))


def _checked(updates, num_byzantine, mask):
    n = _validate.stacked(updates)
    f = _validate.budget(num_byzantine)
    _validate.majority(f, n)
    return n, f, _validate.flags("mask", mask, n)
