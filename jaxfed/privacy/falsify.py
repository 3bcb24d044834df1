# SPDX-License-Identifier: Apache-2.0
"""Search for a pair of inputs that moves a rule further than its claimed sensitivity.

What it finds is a proof that a claim is wrong; that it finds nothing is none that the
claim is right.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfed import _keys, _tree, _validate
from jaxfed._base import Aggregator
from jaxfed.privacy.sensitivity import RELATIONS

STARTS = ("random", "extremal")

# Byzantine rows that need not be in the ball are at most about this many radii away.
_FAR = 100.0
# Relative gains below this are none.
_ROUNDING = 1e-5


class Falsification(NamedTuple):
    """The worst pair of inputs found for a claimed sensitivity.

    Attributes:
      ratio: ``moved / bound``; above 1, by more than rounding, the claim is wrong.
      moved: L2 distance between the two aggregates; inf if it is NaN.
      bound: what was claimed.
      inputs: ``[n, dim]``.
      neighbour: ``[n, dim]``, differs from ``inputs`` in one row.
      reference: ``[dim]``, the point that the rule was given with both.
      start: index into :data:`STARTS` of the kind of start it was found from.
      climbed: whether gradient steps made it worse than it was at the start.
    """

    ratio: Any
    moved: Any
    bound: Any
    inputs: jax.Array
    neighbour: jax.Array
    reference: jax.Array
    start: Any
    climbed: Any

    @property
    def how(self) -> str:
        """In words, how it was found (not under ``jit``)."""
        steps = ", then gradient steps" if self.climbed else ""
        return f"{STARTS[int(self.start)]} start{steps}"


def falsify(
    rule,
    num_clients,
    radius,
    *,
    dim,
    bound,
    num_byzantine=0,
    bounded_inputs=None,
    relation="replace",
    key,
    reference=None,
    trials=256,
    steps=30,
    learning_rate=0.3,
) -> Falsification:
    r"""Search for neighbouring inputs that falsify a claimed sensitivity.

    Maximises :math:`\|F(x) - F(x')\|_2` over n rows of which one, of norm at most C, is
    replaced. Half of the trials are random: rows about a random point, of lengths from
    C/1000 to C. Half are extremal: all rows on a line through the origin (an axis, the
    diagonal, or any), one or zero or minus one times C away from it, split in two, or f
    and f at the ends with the others at zero, or drawn; with exact ties or almost; the
    replaced row goes from an end to the other one (or to zero). Byzantine rows that
    need not be in the ball are up to 100 times as long in half of all trials. All are
    improved by gradient ascent through the rule (normalised steps, cosine decay), rows
    being projected on the ball after each; the worst inputs seen anywhere win.

    Distances carry the rule's own rounding, about 1e-5 relative in float32 where rows
    far away take part: under ``jax.enable_x64`` the search is in float64. It may be
    jitted (``dim``, counts and texts are static), which saves most of its time; radius
    and bound may then be traced.

    Args:
      rule: Aggregator, judged from its first state; or any function ``[n, dim] ->``
        array or tree, such as many rounds of a rule, or the mean of n examples'
        gradients, as long as JAX can trace it.
      num_clients: n >= 1.
      radius: C > 0 of the ball.
      dim: number of coordinates.
      bound: claimed L2 sensitivity, > 0.
      num_byzantine: how many of the other rows are Byzantine, ``0 <= f < n``.
      bounded_inputs: whether Byzantine rows must be in the ball too. None: what
        ``rule.sensitivity`` says, True if it is not known.
      relation: ``"replace"``: one row by another; ``"zero"``: one row by zeros.
      key: typed key or int seed.
      reference: ``[dim]``, passed to an aggregator as ``reference=`` with both inputs.
        None: one in the ball is searched for, too (only some rules look at it).
      trials: number of starts, >= 2.
      steps: ascent steps of each, >= 0.
      learning_rate: of the first step, in units of the radius.

    Returns:
      Falsification. An aggregate that is NaN counts as moved infinitely far.

    Raises:
      TypeError, ValueError: for arguments out of range.

    Cost:
      ``2 * trials * (steps + 1)`` evaluations of the rule with gradients, all trials at
      a time; one compilation.

    Example:
      >>> from jaxfed import aggregators
      >>> rule = aggregators.trimmed_mean(2)  # the mean's bound 2 C / n is not its own
      >>> found = falsify(rule, 9, 1.0, dim=2, bound=2 / 9, num_byzantine=2, key=0)
      >>> round(float(found.ratio), 2)
      1.8
    """
    n = _validate.count("num_clients", num_clients)
    dim = _validate.count("dim", dim)
    f = _validate.count("num_byzantine", num_byzantine, minimum=0, maximum=n - 1)
    trials = _validate.count("trials", trials, minimum=2)
    steps = _validate.count("steps", steps, minimum=0)
    for name, value in [
        ("radius", radius),
        ("bound", bound),
        ("learning_rate", learning_rate),
    ]:
        _validate.positive(name, value)
    _validate.choice("relation", relation, RELATIONS)
    if not callable(rule) and not isinstance(rule, Aggregator):
        raise TypeError(f"rule must be an aggregator or a function, got {rule!r}.")
    if bounded_inputs is None:
        known = getattr(rule, "sensitivity", None)
        bounded_inputs = known is None or known.bounded_inputs
    free = 0 if bounded_inputs else f
    if reference is not None:
        reference = jnp.asarray(reference, float)
        if reference.shape != (dim,):
            raise ValueError(
                f"reference must have dim={dim} entries, got shape {reference.shape}."
            )

    def feasible(point):
        """Project on what is allowed; all in units of the radius."""
        rows, other, centre = point
        balled = _into_ball(rows)
        rows = jnp.where(jnp.arange(n)[:, None] < n - free, balled, rows)
        other = _into_ball(other) * (relation == "replace")
        return rows, other, _into_ball(centre)

    def inputs(point, order):
        """Return inputs, neighbour and reference; row 0 is the one that is replaced."""
        rows, other, centre = point
        x, y = radius * rows, radius * rows.at[0].set(other)
        return x[order], y[order], radius * centre if reference is None else reference

    def distance(point, order):
        x, y, centre = inputs(point, order)

        def aggregate(x):
            if not isinstance(rule, Aggregator):
                return rule(x)
            return rule.update(x, rule.init(centre), reference=centre)[0]

        outs = jax.vmap(aggregate)(jnp.stack([x, y]))
        moved = _tree.norm(jax.tree.map(lambda out: out[0] - out[1], outs))
        return jnp.where(jnp.isnan(moved), jnp.inf, moved)

    def climb(point, order):
        def step(carry, t):
            point, best = carry
            value, grad = jax.value_and_grad(distance)(point, order)
            better = value > best[0]
            best = jax.tree.map(
                lambda new, old: jnp.where(better, new, old), (value, point), best
            )
            # The steepest entry moves by the rate, which ends at 0.
            rate = learning_rate * (1 + jnp.cos(jnp.pi * t / max(steps, 1))) / 2
            grad = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, 0), grad)
            steepest = jnp.max(jnp.stack([jnp.max(jnp.abs(g)) for g in grad]))
            rate /= jnp.where(steepest > 0, steepest, 1)
            moved = jax.tree.map(lambda p, g: p + rate * g, point, grad)
            return (feasible(moved), best), value

        lowest = jnp.full([], -jnp.inf, point[0].dtype), point
        (_, best), values = lax.scan(step, (point, lowest), jnp.arange(steps + 1))
        return *best, values[0]

    points, order = _starts(_keys.as_key(key), trials, n, dim, f, free)
    points = jax.vmap(feasible)(points)
    moved, ends, first = jax.vmap(climb)(points, order)
    i = jnp.argmax(moved)
    point = jax.tree.map(lambda p: p[i], ends)
    return Falsification(
        moved[i] / bound,
        moved[i],
        bound,
        *inputs(point, order[i]),
        start=jnp.where(i < trials - trials // 2, 0, 1),
        climbed=moved[i] > first[i] * (1 + _ROUNDING),
    )


def _into_ball(x):
    """Scale vectors ``[..., dim]`` down to norm 1."""
    squares = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x / jnp.sqrt(jnp.maximum(squares, 1))


def _unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def _starts(key, trials, n, dim, f, free):
    """Return ``(rows [trials, n, dim], other rows, centres)`` and the rows' orders.

    For radius 1, some of it outside of the ball. Row 0 will be replaced, the last
    ``free`` rows may be far away, and the second half of the trials are extremal.
    """
    half = trials // 2
    # Two draws: to compile many takes longer than the search.
    keys = jax.random.split(key)
    gauss = jax.random.normal(keys[0], (trials, n + 3, dim))
    drawn = jax.random.uniform(keys[1], (trials, 2 * n + 7))
    order = jnp.argsort(drawn[:, :n], axis=1)
    levels, odds = drawn[:, n : 2 * n], drawn[:, 2 * n :]
    points = jax.tree.map(
        lambda *kinds: jnp.concatenate(kinds),
        _random(gauss[:-half], odds[:-half]),
        _extremal(gauss[-half:], odds[-half:], levels[-half:], f),
    )
    by = jnp.where(odds[:, 5] < 0.5, _FAR ** odds[:, 6], 1)
    last = jnp.arange(n) >= n - free
    rows = points[0] * jnp.where(last[None], by[:, None], 1)[..., None]
    return (rows, *points[1:]), order


def _random(gauss, odds):
    """Return rows about a point, another row and a centre, of all lengths."""
    ends = _unit(gauss[:, -3:-1])
    about = jnp.where(odds[:, :1] < 0.5, 0, gauss[:, -1])
    width = 1000 ** -odds[:, 1, None, None]
    rows = about[:, None] + width * _unit(gauss[:, :-3])
    other = jnp.where(odds[:, 2:3] < 0.5, -ends[:, 0], ends[:, 1])
    return rows.at[:, 0].set(ends[:, 0]), other, about


def _extremal(gauss, odds, levels, f):
    """Return rows on a line, the replaced one going from end to end, and a centre."""
    trials, n, dim = gauss.shape[0], gauss.shape[1] - 3, gauss.shape[2]
    kind, place = jnp.arange(trials)[:, None], jnp.arange(n)[None]
    line = jnp.select(
        [kind % 3 == 0, kind % 3 == 1],
        [jnp.eye(dim)[jnp.int32(dim * odds[:, 0])], jnp.full((1, dim), dim**-0.5)],
        _unit(gauss[:, -1]),
    )
    # The others in two parts, often nearly equal; f at each end; or anywhere.
    part = jnp.where(kind % 2, n / 2 - 1 + 2 * odds[:, 1:2], n * odds[:, 1:2])
    ends = 1.0 * (place >= n - f) - 1.0 * ((place >= n - 2 * f) & (place < n - f))
    levels = jnp.select(
        [kind // 3 % 3 == 0, kind // 3 % 3 == 1],
        [jnp.where(place <= part, 1.0, -1.0), ends],
        jnp.round(3 * levels - 1.5),
    )
    levels *= jnp.where(kind // 9 % 2, -1, 1)
    levels = levels.at[:, 0].set(1)
    # Ties are exact in half of the trials.
    width = jnp.where(kind // 18 % 2, 10 ** (-1 - 6 * odds[:, 2:3]), 0)
    rows = levels[..., None] * line[:, None] + width[..., None] * gauss[:, :n]
    return rows, -line, jnp.round(4 * odds[:, 3:4] - 2) / 2 * line
