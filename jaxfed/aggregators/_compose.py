# SPDX-License-Identifier: Apache-2.0
"""From reductions to optax links, and the fusion of stages that share a geometry."""

import functools

import jax
import jax.numpy as jnp
import optax

from jaxfed import _tree, _validate
from jaxfed._base import Aggregator, Geometric, Info, PreAggregator
from jaxfed.reductions import _gram


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


def mixing(
    matrix, num_byzantine=None, *, anchors=(), init=_empty, drops=False
) -> PreAggregator:
    """Lift ``(Geometry, state) -> (matrix, state)`` to a pre-aggregator."""

    def update(updates, state, params=None, *, mask=None, weights=None, **extra):
        refuse_weights(weights, "a mixing pre-aggregator")
        _validate.stacked(updates, params)
        fused = _Fusion((stage,), updates, (state,), mask, extra)
        return fused.mixed(), fused.states[0]

    stage = PreAggregator(
        init,
        update,
        mixing=matrix,
        num_byzantine=num_byzantine,
        anchors=anchors,
        drops=drops,
    )
    return stage


def geometric(
    name, weigh, num_byzantine=None, *, init=_empty, sensitivity=None, **attributes
) -> Aggregator:
    """Lift a rule of pairwise inner products to an aggregator.

    Args:
      name: for error messages.
      weigh: ``(Geometry, state, weights) -> ([n + anchors] weights, state)``.
      num_byzantine: declared budget, None if the rule has none.
      init: ``(params) -> state``.
      sensitivity: :class:`Sensitivity`, None where no bound is known.
      **attributes: the other fields of :class:`Geometric`.
    """
    spec = Geometric(weigh, **attributes)
    return _fuse((), spec, name, num_byzantine, init, sensitivity=sensitivity)


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
    stages = (*pres, *rule.stages)
    *pres, rule = stages
    budgets = [s.num_byzantine for s in stages if s.num_byzantine is not None]

    def init(params):
        return tuple(stage.init(params) for stage in stages)

    f = budgets[0] if budgets else None
    return _fuse(tuple(pres), rule, "a rule behind other stages", f, init, stages)


class _Fusion:
    """One pass over the updates for all stages: matrices, geometries, new states."""

    def __init__(self, pres, updates, states, mask, extra, rule=None, f=None):
        spec = Geometric(None) if rule is None else rule
        wanted = [a for stage in (*pres, spec) for a in stage.anchors]
        anchors = {a: None for a in ("origin", "reference") if a in wanted}
        if "reference" in anchors:
            anchors["reference"] = spec.reference(states[-1], extra)
            one = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], x.dtype), updates
            )
            _validate.like(anchors["reference"], one, "reference")
        self.updates, self.point = updates, anchors.get("reference")
        self.about_origin = spec.about_origin and not pres
        budgets = [s.num_byzantine for s in pres if s.num_byzantine is not None]
        self.first = self.last = _gram.geometry(
            updates,
            budgets[0] if f is None and budgets else f,
            mask=mask,
            anchors=anchors,
            about_origin=self.about_origin,
        )
        self.matrix, self.states = None, []
        for stage, state in zip(pres, states, strict=False):
            m, state = stage.mixing(self.last, state)
            self.matrix = m if self.matrix is None else self.through(m)
            self.last = self.first.mixed(self.matrix)
            self.states.append(state)
        drops = any(stage.drops for stage in pres)
        self.present = self.last.present if drops or mask is not None else None

    def through(self, weights):
        """Return weights on the last stage's rows as weights on the first's."""
        if self.matrix is None:
            return weights
        first = self.first
        anchors = jnp.eye(len(first.anchors), first.gram.shape[0], first.n)
        full = jnp.concatenate([self.matrix, anchors.astype(self.matrix.dtype)])
        return _gram.product(weights, full)

    def mixed(self):
        """Return the updates behind all stages, stacked."""
        first, matrix = self.first, self.matrix
        total = None
        if first.anchors:
            total = jnp.sum(matrix[:, : first.n], axis=1)
        return _tree.mix(
            matrix[:, : first.n], self.updates, first.medoid(), first.usable, total
        )

    def combined(self, weights):
        """Return the affine combination of updates and anchors."""
        first, total, point = self.first, 1, None
        if "origin" in first.anchors:
            total = 1 - weights[first.index("origin")]
        if "reference" in first.anchors:
            point = weights[first.index("reference")], self.point
        origin = None if self.about_origin else first.medoid()
        return _tree.combine(weights[: first.n], self.updates, origin, total, point)


def _fuse(pres, rule, name, f, init, stages=None, sensitivity=None) -> Aggregator:
    """Build the aggregator of stages before a :class:`Geometric` or another rule."""
    spec = rule if isinstance(rule, Geometric) else rule.geometric
    pick = (lambda state: state) if stages is None else (lambda state: state[-1])

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
        if stages is not None or spec is None or not spec.weighted:
            refuse_weights(weights, name)
        _validate.stacked(updates, params)
        states = (state,) if stages is None else state
        fused = _Fusion(pres, updates, states, mask, extra, spec, f)
        if spec is None:
            mixed, extra["mask"] = fused.mixed(), fused.present
            out, new = rule.update(mixed, pick(state), params, **extra)
            w = rule.inspect(mixed, pick(state), **extra).weights if look else None
        else:
            if spec.check is not None:
                spec.check(fused.last.n)
            w, new = spec.weigh(fused.last, pick(state), weights)
            out = fused.combined(fused.through(w))
            if spec.remember is not None:
                new = spec.remember(new, out)
        new = new if stages is None else (*fused.states, new)
        if not look:
            return out, new
        w = fused.through(w if spec else fused.last.pad(w))
        return out, new, info(w[: fused.first.n], byzantine)

    observe = functools.partial(run, True)

    def inspect(updates, state, **extra):
        return observe(updates, state, **extra)[2]

    return Aggregator(
        init,
        functools.partial(run, False),
        inspect=inspect,
        observe=observe,
        num_byzantine=f,
        geometric=spec,
        stages=stages,
        sensitivity=sensitivity,
    )
