# SPDX-License-Identifier: Apache-2.0
"""Nearest-neighbour mixing."""

from jaxfed import _validate, reductions
from jaxfed._base import PreAggregator
from jaxfed.aggregators import _compose


def nnm(num_byzantine) -> PreAggregator:
    r"""Nearest-neighbour mixing: replace each row by the mean of its n-f nearest rows.

    Distances are global L2 norms over the whole tree and a row is its own nearest;
    distances within 1e-5 relative are ties and go to the lowest index. Before a rule
    with coefficient :math:`\kappa` it gives
    :math:`\kappa' \le \frac{8f}{n-f}(\kappa+1)`. With f = 0 every row becomes the mean.

    Edge cases: rows with NaN, inf or an overflowing norm are infinitely far from all
    others and stay so (inf) after mixing; absent rows are not drawn on.

    Args:
      num_byzantine: f, ``0 <= f < n/2``; may be traced, and then a violated bound
        gives NaN.

    Returns:
      PreAggregator. Join it with a rule by :func:`jaxfed.aggregators.compose`, which
      then needs no extra pass over the updates for rules that return weights.

    Raises:
      ValueError: for f < 0, and at trace time if ``2 f >= n``.

    Cost:
      ``O(n^2 d)``: one Gram matrix and one ``[n, n] @ [n, d]`` product.

    References:
      Allouah et al., `Fixing by Mixing <https://arxiv.org/abs/2302.01772>`_, 2023.
    """
    f = _validate.budget(num_byzantine)

    def matrix(geometry, state):
        _validate.majority(f, geometry.n)
        return reductions.nnm_matrix(geometry, f), state

    return _compose.mixing(matrix, f)
