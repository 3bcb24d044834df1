# SPDX-License-Identifier: Apache-2.0
"""Filters along the direction in which the clients disagree most."""

from jaxfed import _validate
from jaxfed._base import Aggregator
from jaxfed.aggregators import _compose
from jaxfed.reductions import _affine


def caf(num_byzantine) -> Aggregator:
    r"""Covariance-bound agnostic filter: the calmest of a sequence of weighted means.

    Start with weights :math:`c_i = 1`. While :math:`\sum_i c_i > n - 2f`, take the
    weighted mean :math:`\mu` and the top eigenpair :math:`(\lambda, v)` of the weighted
    covariance, and multiply :math:`c_i` by :math:`1 - \tau_i / \max_j \tau_j`,
    :math:`\tau_i = \langle v, x_i - \mu\rangle^2`, the maximum over rows of positive
    weight. The result is the :math:`\mu` of least :math:`\lambda`.

    Guarantee: breakdown point 1/2, no bound on the covariance needed. Each pass removes
    a row, so that 2f passes are enough whatever is sent. Deterministic, unlike
    implementations that start a power iteration at random.

    Edge cases: f = 0 gives the mean; equal rows give that row. Rows with NaN, inf or an
    overflowing norm have weight 0 from the start (up to f of them, more give NaN).
    Where the largest eigenvalue is multiple, its direction is the solver's choice.

    Gradients are those of the weighted mean with its weights differentiated; a multiple
    largest eigenvalue contributes no turning of its direction, so they are finite.

    Args:
      num_byzantine: f, ``0 <= f < n/2``; may be traced, and then a violated bound
        gives NaN.

    Returns:
      Aggregator.

    Raises:
      ValueError: for f < 0, and at trace time if ``2 f >= n``.

    Cost:
      ``O(n^2 d)`` for the Gram matrix, at most 2f eigendecompositions ``[n, n]``.

    References:
      Allouah et al., `Towards Trustworthy Federated Learning with Untrusted
      Participants <https://arxiv.org/abs/2505.01874>`_, 2025.
    """
    f = _validate.budget(num_byzantine)
    return _compose.geometric(
        "caf",
        lambda geometry, state, weights: (_affine.caf(geometry, f), state),
        f,
        check=lambda n: _validate.majority(f, n),
    )


def filter_l2(num_byzantine, *, sigma=0.0) -> Aggregator:
    r"""FilterL2: reweigh as :func:`caf` until the covariance is known to be small.

    The weighted mean after the first pass in which the top eigenvalue is at most
    :math:`\sqrt{20}\,\sigma`, or after 2f passes (a row that is not finite counts as
    one). The threshold, :math:`\lambda^2 \le 20\sigma^2`, is that of the library whose
    results this rule reproduces.

    Guarantee: breakdown point 1/2; with a true bound sigma the error is
    :math:`O(\sqrt{\sigma f / n})` for small f/n. Ends after 2f passes whatever is sent.

    Edge cases: f = 0 gives the mean; equal rows give that row. Rows with NaN, inf or an
    overflowing norm have weight 0 (up to f of them, more give NaN). If a pass would
    remove every row, the weights before it are kept. Gradients: as :func:`caf`.

    Args:
      num_byzantine: f, ``0 <= f < n/2``; may be traced, and then a violated bound
        gives NaN.
      sigma: bound on the largest eigenvalue of the honest rows' covariance, >= 0; may
        be traced. 0: no bound is known, so that all 2f passes are made (and the rule
        is scale equivariant).

    Returns:
      Aggregator.

    Raises:
      ValueError: for f < 0 or sigma < 0, and at trace time if ``2 f >= n``.

    Cost:
      ``O(n^2 d)`` for the Gram matrix, at most 2f eigendecompositions ``[n, n]``.

    References:
      Steinhardt, `Robust Learning: Information Theory and Algorithms
      <https://www.stat.berkeley.edu/~jsteinhardt/publications/thesis/paper.pdf>`_,
      2018; the variant of the library "robust-collaborative-learning" (EPFL).
    """
    f = _validate.budget(num_byzantine)
    _validate.nonnegative("sigma", sigma)
    return _compose.geometric(
        "filter_l2",
        lambda geometry, state, weights: (
            _affine.filter_l2(geometry, f, sigma=sigma),
            state,
        ),
        f,
        check=lambda n: _validate.majority(f, n),
    )
