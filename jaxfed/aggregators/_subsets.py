# SPDX-License-Identifier: Apache-2.0
"""Rules that search all subsets of n - f clients: MDA, MVA and SMEA."""

import jax
import jax.numpy as jnp

from jaxfed import _keys, _validate
from jaxfed._base import Aggregator
from jaxfed.aggregators import _compose
from jaxfed.reductions import _subsets


def _search(name, search, num_byzantine) -> Aggregator:
    f = _validate.budget(num_byzantine)

    def weigh(geometry, state, weights):
        del weights
        return geometry.pad(search(geometry, f)), state

    def check(n):
        _validate.majority(f, n)

    return _compose.geometric(name, weigh, f, check=check)


def mda(num_byzantine) -> Aggregator:
    r"""Minimum diameter averaging: the mean of the n-f rows of least diameter.

    The diameter of a subset is the largest distance between two of its rows. Subsets
    within 1e-5 relative are ties and go to the first in lexicographic order.
    Breakdown point 1/2; see :func:`jaxfed.robustness.kappa` for its coefficient.
    Edge cases: rows with NaN, inf or an overflowing norm are infinitely far away; more
    than f of them give NaN.

    Args:
      num_byzantine: f, ``0 <= f < n/2``; may be traced for n <= 26, and then a violated
        bound gives NaN.

    Returns:
      Aggregator.

    Raises:
      ValueError: at trace time if ``2 f >= n``, or there are more than 10^7 subsets.

    Cost:
      ``O(n^2 d)`` for the Gram matrix, then ``C(n, f)`` subsets in bounded memory.

    References:
      El Mhamdi et al., `The Hidden Vulnerability of Distributed Learning in Byzantium
      <https://arxiv.org/abs/1802.07927>`_, 2018 (as "Brute").
    """
    return _search("mda", _subsets.mda, num_byzantine)


def mva(num_byzantine) -> Aggregator:
    r"""Minimum variance averaging: the mean of the n-f rows of least total variance.

    The total variance is the trace of the covariance. Ties, edge cases, arguments,
    errors and cost as :func:`mda`. Guarantee: :math:`\kappa = \frac{4f}{n-2f}` (trace).

    Args:
      num_byzantine: f, as for :func:`mda`.

    Returns:
      Aggregator.

    References:
      :func:`smea` with the trace in place of the top eigenvalue.
    """
    return _search("mva", _subsets.mva, num_byzantine)


def smea(num_byzantine, *, power_iters=None, key=None) -> Aggregator:
    r"""SMEA: the mean of the n-f rows whose covariance has the least top eigenvalue.

    Exact. Guarantee: :math:`\kappa = \frac{4f}{n-2f}` in the spectral form, the best
    known. Breakdown point 1/2. Exact ties go to the first subset in lexicographic
    order; in float32 a subset within rounding of the least may be returned. Edge cases
    as :func:`mda`.

    Args:
      num_byzantine: f, as for :func:`mda`.
      power_iters: None for the rule itself. An int scores each subset by that many
        power iterations from a random direction, drawn anew at every call, which is
        what a widely used library ships as SMEA: to reproduce tables only.
      key: PRNG key, needed with ``power_iters`` and unused without.

    Returns:
      Aggregator.

    Raises:
      ValueError: as for :func:`mda` (use :func:`caf` for more subsets), or if
        ``power_iters`` comes without ``key``.

    Cost:
      ``O(n^2 d)`` for the Gram matrix, then ``C(n, f)`` subsets in bounded memory, of
      which cheap bounds leave few to an eigenvalue solver.

    References:
      Allouah et al., `On the Privacy-Robustness-Utility Trilemma in Distributed
      Learning <https://arxiv.org/abs/2302.04787>`_, 2023.
    """
    if power_iters is None:
        return _search("smea", _subsets.smea, num_byzantine)
    f = _validate.budget(num_byzantine)
    _validate.count("power_iters", power_iters)
    if key is None:
        raise ValueError(
            f"smea needs key= with power_iters={power_iters}, e.g. jax.random.key(0)."
        )
    key = _keys.as_key(key)

    def weigh(geometry, state, weights):
        del weights
        now, after = jax.random.split(state)
        w = _subsets.smea(geometry, f, power_iters=power_iters, key=now)
        return geometry.pad(w), after

    return _compose.geometric(
        "smea",
        weigh,
        f,
        init=lambda params: jnp.copy(key),
        check=lambda n: _validate.majority(f, n),
    )
