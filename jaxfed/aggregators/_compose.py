# SPDX-License-Identifier: Apache-2.0
"""From reductions to optax links, and the fusion of stages that share a geometry."""

import jax
import jax.numpy as jnp
import optax

from jaxfed import _tree, _validate
from jaxfed._base import Aggregator, Info, PreAggregator
from jaxfed.reductions import _gram, _sorted


def _empty(params):
    del params
    return optax.EmptyState()


def info(weights, byzantine=None) -> Info:
    """Build an :class:`Info` from the weight given to each client."""
    if byzantine is None:
        return Info(weights, jnp.full([], jnp.nan, weights.dtype))
    byzantine = _validate.flags("byzantine", byzantine, weights.shape[0])
    return Info(weights, jnp.sum(jnp.where(byzantine, weights, 0)))


def refuse_weights(weights, name):
    """Raise if weights were given to a rule without a weighted form."""
    if weights is not None:
        raise ValueError(
            f"{name} has no weighted form: got weights={weights!r}. Drop weights=, or "
            "use the mean, which honours them."
        )


def coordinatewise(name, ranks, num_byzantine=None) -> Aggregator:
    """Lift the mean of a window of sorted ranks to a stateless aggregator.

    Args:
      name: for error messages.
      ranks: ``(number of present clients) -> (low, high)``, the window
        ``low <= rank < high`` of every sorted column.
      num_byzantine: declared budget, None if the rule has none.
    """

    def window(updates, params, mask):
        n = _validate.stacked(updates, params)
        _validate.majority(num_byzantine, n)
        mask = _validate.flags("mask", mask, n)
        return (*ranks(_sorted.present_count(n, mask)), mask)

    def reduce(updates, mask, params=None):
        return _sorted.map_window(updates, *window(updates, params, mask))

    def update(updates, state, params=None, *, mask=None, weights=None, **extra):
        del extra
        refuse_weights(weights, name)
        return reduce(updates, mask, params), state

    def inspect(updates, state=None, *, mask=None, byzantine=None, **extra):
        del state, extra
        low, high, mask = window(updates, None, mask)
        share = sum(
            jnp.sum(_sorted.window_weights(x, low, high, mask), range(1, x.ndim))
            for x in jax.tree.leaves(updates)
        )
        return info(share / jnp.sum(share), byzantine)

    return Aggregator(
        _empty, update, inspect=inspect, num_byzantine=num_byzantine, reduce=reduce
    )


def mixing(matrix, num_byzantine) -> PreAggregator:
    """Lift ``Geometry -> [m, n] matrix`` to a stateless pre-aggregator."""

    def mix(geometry, state):
        return matrix(geometry), state

    def update(updates, state, params=None, *, mask=None, weights=None, **extra):
        del extra
        refuse_weights(weights, "a mixing pre-aggregator")
        _validate.stacked(updates, params)
        geometry = _gram.geometry(updates, num_byzantine, mask=mask)
        m, state = mix(geometry, state)
        return _tree.mix(m, updates, geometry.medoid(), geometry.usable), state

    return PreAggregator(_empty, update, mixing=mix, num_byzantine=num_byzantine)


def compose(*stages) -> Aggregator:
    """Join pre-aggregators and a final rule into one aggregator.

    Mixing matrices are multiplied and geometries transformed on ``[n, n]`` matrices:
    the updates are read once for the Gram matrix and once to combine, however many
    stages there are. ``optax.chain`` of the same links gives the same result with one
    more pass for each stage.

    Args:
      *stages: pre-aggregators in order, then one aggregator.

    Returns:
      Aggregator whose ``num_byzantine`` is the first budget declared by a stage and
      whose state is the tuple of the stages' states. It refuses ``weights``.

    Raises:
      TypeError: if a stage is not a pre-aggregator, or the last not an aggregator.

    Cost:
      ``O(n^2 d)`` for the Gram matrix; mixing before a coordinate-wise rule
      materialises the mixed updates once.
    """
    *pres, rule = stages or (None,)
    for stage in pres:
        if not isinstance(stage, PreAggregator):
            raise TypeError(
                f"compose needs pre-aggregators before the rule, got {stage!r}. Join "
                "other links with optax.chain."
            )
    if not isinstance(rule, Aggregator):
        raise TypeError(f"the last stage must be an aggregator, got {rule!r}.")
    if not pres:
        return rule
    budgets = [s.num_byzantine for s in stages if s.num_byzantine is not None]
    f = budgets[0] if budgets else None

    def init(params):
        return tuple(stage.init(params) for stage in stages)

    def mix(updates, states, mask):
        geometry = first = _gram.geometry(updates, f, mask=mask)
        matrix, new_states = None, []
        for stage, state in zip(pres, states, strict=False):
            m, state = stage.mixing(geometry, state)
            matrix = m if matrix is None else _gram.product(m, matrix)
            geometry = first.mixed(matrix)
            new_states.append(state)
        return matrix, first, geometry, new_states

    def update(updates, state, params=None, *, mask=None, weights=None, **extra):
        refuse_weights(weights, "a composed rule")
        _validate.stacked(updates, params)
        matrix, first, geometry, new = mix(updates, state, mask)
        if rule.row_weights is not None:
            w, last = rule.row_weights(geometry, state[-1])
            w = _gram.product(w, matrix)
            return _tree.combine(w, updates, first.medoid()), (*new, last)
        mixed = _tree.mix(matrix, updates, first.medoid(), first.usable)
        mask = None if mask is None else geometry.present
        out, last = rule.update(mixed, state[-1], params, mask=mask, **extra)
        return out, (*new, last)

    def inspect(updates, state, *, mask=None, byzantine=None, **extra):
        matrix, first, geometry, _ = mix(updates, state, mask)
        if rule.row_weights is not None:
            w, _ = rule.row_weights(geometry, state[-1])
        else:
            mixed = _tree.mix(matrix, updates, first.medoid(), first.usable)
            mask = None if mask is None else geometry.present
            w = rule.inspect(mixed, state[-1], mask=mask, **extra).weights
        return info(_gram.product(w, matrix), byzantine)

    return Aggregator(init, update, inspect=inspect, num_byzantine=f)
