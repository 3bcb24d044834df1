# SPDX-License-Identifier: Apache-2.0
"""Bucketing."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfed import _keys, _validate
from jaxfed._base import PreAggregator
from jaxfed.aggregators import _compose
from jaxfed.reductions import _affine


class BucketingState(NamedTuple):
    """State of :func:`bucketing`.

    Attributes:
      key: typed PRNG key of the next permutation.
    """

    key: jax.Array


def bucketing(size=2, *, key) -> PreAggregator:
    r"""Bucketing: means of random groups of ``size`` rows.

    The present rows are permuted at random, afresh at every update, and consecutive
    rows averaged; a last, shorter group is kept. ``n`` rows become
    ``ceil(n / size)``, of which at most f hold a Byzantine row: a rule behind it keeps
    its f, so that choose ``size < n / (2f)``. Heterogeneity of the rows shrinks by
    ``size``.

    Edge cases: a group with a row of NaN, inf or an overflowing norm is infinitely far
    away (inf); with absent clients the last groups may be empty, that is absent.

    Args:
      size: rows a group, Python int >= 1; 1 only permutes.
      key: typed key or int seed of the permutations, kept in the state.

    Returns:
      PreAggregator with :class:`BucketingState`; ``inspect`` of a composed rule sees
      the permutation that ``update`` with the same state uses. In ``optax.chain`` a
      ``mask`` does not fit the fewer rows behind it: use
      :func:`jaxfed.aggregators.compose`.

    Raises:
      TypeError: if ``size`` is not a Python int or ``key`` not a key.
      ValueError: if ``size < 1`` or for a legacy key.

    Cost:
      ``O(n^2 d)`` on its own for ``[n / size, n] @ [n, d]`` and the Gram matrix.

    References:
      Karimireddy et al., `Byzantine-Robust Learning on Heterogeneous Datasets via
      Bucketing <https://arxiv.org/abs/2006.09365>`_, 2022.
    """
    size = _validate.count("size", size)
    key = _keys.as_key(key)

    def matrix(geometry, state):
        later, now = jax.random.split(state.key)
        order = jax.random.permutation(now, geometry.n)
        order = order[jnp.argsort(~geometry.present[order])]  # stable: absent last
        return _affine.bucketing_matrix(geometry, order, size), BucketingState(later)

    def init(params):
        del params
        return BucketingState(jnp.copy(key))

    return _compose.mixing(matrix, init=init)
