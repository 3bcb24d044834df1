# SPDX-License-Identifier: Apache-2.0
"""Attacks that remember earlier rounds."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfed import _keys, _tree, _validate
from jaxfed._base import Attack
from jaxfed.attacks import _base


class MimicState(NamedTuple):
    """State of :func:`mimic`.

    Attributes:
      count: ``int32`` scalar, rounds so far.
      mean: tree like params, running mean of the honest messages.
      direction: tree like params of norm 1, along which they vary most.
    """

    count: jax.Array
    mean: optax.Updates
    direction: optax.Updates


def mimic(*, key=0) -> Attack:
    r"""Mimic: all send a copy of the honest message that stands out consistently.

    Nothing is forged, but one client's data count ``f + 1`` times. Who is copied
    follows a power iteration over the rounds t = 0, 1, ..., with the honest messages
    :math:`x_i` of the round, which the adversary sees, noise included:

    .. math::
        \mu &\leftarrow \tfrac{t}{t+1} \mu + \tfrac{1}{t+1} \bar x \\
        z &\leftarrow \text{normalise}\Big(\tfrac{t}{t+1} z + \tfrac{1}{t+1}
            \sum_i \langle x_i - \mu, z \rangle (x_i - \mu)\Big) \\
        i^* &= \arg\max_i |\langle z, x_i \rangle|

    Only the honest clients of the round can be copied; of uploads with more than one
    part, ``"update"`` decides and all of it is copied.

    Args:
      key: typed key or int seed of the first z.

    Returns:
      Attack on the wire; Byzantine clients need no data.

    Raises:
      ValueError: if the key is legacy.

    Cost:
      Four reads of the uploads; two trees like params are kept.

    References:
      Karimireddy, He, Jaggi, `Byzantine-Robust Learning on Heterogeneous Datasets via
      Bucketing <https://arxiv.org/abs/2006.09365>`_, 2022, whose heuristic fixes the
      client after some rounds of warm-up; here it is chosen anew each round, as in
      ByzULDP's experiments.
    """
    key = _keys.as_key(key)

    def init(params):
        wide = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, _tree.accumulator(p.dtype)), params
        )
        start = _base.normal_like(key, wide)
        zeros = jax.tree.map(jnp.zeros_like, start)
        return MimicState(jnp.zeros([], jnp.int32), zeros, _normalised(start, start))

    def forge(seen, state):
        rows = seen._replace(uploads=_base.update_of(seen.uploads))
        mean, z = rows.mean(), state.direction
        keep = state.count / (state.count + 1)
        step = jax.tree.map(jnp.subtract, mean, state.mean)
        mean = _base.moved(state.mean, 1 - keep, step)
        away = jax.tree.map(lambda x, m: x - m[None], rows.updates, mean)
        along = jnp.where(seen.byzantine, 0, _base.dots(away, z))
        power = _tree.combine(along, away)
        z = _base.moved(_base.scaled(keep, z), 1 - keep, power)
        z = _normalised(z, state.direction)
        score = jnp.abs(_base.dots(rows.updates, z))
        chosen = jnp.argmax(jnp.where(seen.byzantine, -1, score))
        forged = jax.tree.map(lambda x: x[chosen], seen.uploads)
        return forged, MimicState(optax.safe_increment(state.count), mean, z)

    return _base.replace_rows(forge, init)


def _normalised(tree, otherwise):
    norm = _tree.norm(tree)
    fine = (norm > 0) & jnp.isfinite(norm)
    unit = _base.scaled(1 / jnp.where(fine, norm, 1), tree)
    return jax.tree.map(lambda x, o: jnp.where(fine, x, o), unit, otherwise)


class MiaPushState(NamedTuple):
    """State of :func:`mia_push`.

    Attributes:
      round: ``int32`` scalar, rounds so far.
      recorded: ``int32`` scalar, messages of the target recorded.
      total: scalar, sum of their components along the direction.
    """

    round: jax.Array
    recorded: jax.Array
    total: jax.Array


def mia_push(
    target=0,
    direction=None,
    *,
    num_test=10,
    noise_std=1.0,
    z=0.0,
    strength=None,
    top_eigenvalue=None,
) -> Attack:
    r"""Membership inference, then a push under the honest noise (lower bounds).

    The adversary wants to know whether one example is among the target's. In the first
    ``num_test`` rounds it sends zeros and records the target's messages along a unit
    vector u, the direction in which the example's gradient points; it decides "yes" if
    their mean exceeds the trigger :math:`z \sigma / \sqrt{n_\text{test}}`. In all
    later rounds every Byzantine client sends :math:`\pm b\, u`, plus for "yes", with

    .. math:: b = c\, \frac{n - f}{\sqrt{f (n - 2 f)}} \sqrt\Lambda,

    small enough for a rule like SMEA to keep it. :math:`\Lambda` is the expected top
    eigenvalue of the honest messages' covariance when they are noise only. In one
    dimension :math:`\Lambda = \sigma^2 (n-f-1)/(n-f)` and c = 1/2 is Algorithm 2's
    :math:`b = \frac\sigma 2 \sqrt{(n-f-1)(n-f)/(f(n-2f))}`; beyond, this is formula
    (20) of Algorithm 3, where u points along minus its :math:`e_1` for its example of
    gradient :math:`-C e_1`. The adversary sees the target's messages and knows the
    noise level. Messages of absent targets are not recorded; without any (a target that
    is Byzantine or that no cohort has) the decision is "no" for z >= 0.

    Args:
      target: client id, honest.
      direction: tree like params that points along u; None: the first coordinate.
      num_test: rounds of recording, >= 0; may be traced.
      noise_std: sigma >= 0, noise of the honest messages; may be traced.
      z: trigger level :math:`z_a`, finite; may be traced. Half of
        :math:`\Delta = C \sqrt{n_\text{test}} / (m \sigma)` is best for one of m
        examples with gradients of norm C.
      strength: c >= 0; None: 1/2 in one dimension, else 0.3, which exact SMEA keeps in
        nearly all rounds; may be traced.
      top_eigenvalue: :math:`\Lambda` >= 0; None: the value above in one dimension, else
        the asymptotic :math:`\sigma^2 \frac{n-f-1}{n-f}
        (1 + \sqrt{d/(n-f-1)})^2` for d parameters; may be traced.

    Returns:
      Attack on the wire; Byzantine clients need no data.

    Raises:
      ValueError: for arguments outside these ranges; at use if the target is no client
        or, where ``byzantine`` is not traced, Byzantine.

    Cost:
      One read of the uploads; three scalars are kept.

    References:
      Boudou et al., Unveiling the Non-Monotonic Effect of Privacy on Generalization
      under Byzantine Robustness, Algorithms 2 and 3.
    """
    _validate.count("target", target, minimum=0)
    for name, value in {
        "num_test": num_test,
        "noise_std": noise_std,
        "strength": 0 if strength is None else strength,
        "top_eigenvalue": 0 if top_eigenvalue is None else top_eigenvalue,
    }.items():
        _base.nonnegative(name, value)
    _base.finite("z", z)

    def init(params):
        dtypes = [_tree.accumulator(p.dtype) for p in jax.tree.leaves(params)]
        none = jnp.zeros([], jnp.int32)
        return MiaPushState(none, none, jnp.zeros([], jnp.result_type(*dtypes)))

    def push_size(seen, d):
        n, h = seen.byzantine.size, seen.num_honest
        c = (0.5 if d == 1 else 0.3) if strength is None else strength
        if top_eigenvalue is None:
            others = jnp.maximum(h - 1, 1)
            spread = 1.0 if d == 1 else (1 + jnp.sqrt(d / others)) ** 2
            root = noise_std * jnp.sqrt((h - 1) / h * spread)
        else:
            root = jnp.sqrt(top_eigenvalue)
        return c * h / jnp.sqrt(jnp.maximum((n - h) * (2 * h - n), 1)) * root

    def forge(seen, state):
        _check_target(seen, target)
        updates = seen.updates
        update = _base.update_of(updates)
        unit = _direction(direction, update)
        present = (seen.ids == target) & ~seen.byzantine
        testing = state.round < num_test
        along = jnp.where(testing & present, _base.dots(update, unit), 0)
        total = state.total + jnp.sum(along).astype(state.total.dtype)
        recorded = state.recorded + (testing & jnp.any(present))
        tests = jnp.maximum(recorded, 1)
        yes = total / tests > z * noise_std / jnp.sqrt(tests)
        d = sum(math.prod(u.shape) for u in jax.tree.leaves(unit))
        size = jnp.where(yes, 1, -1) * push_size(seen, d)
        push = _base.scaled(jnp.where(testing, 0, size), unit)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), updates)
        forged = push if update is updates else zeros | {"update": push}
        return forged, MiaPushState(optax.safe_increment(state.round), recorded, total)

    return _base.replace_rows(forge, init)


def _check_target(seen, target):
    """Raise if the target cannot be recorded, as far as that is known."""
    n = seen.byzantine.size
    everybody = isinstance(seen.ids, np.ndarray)
    if everybody and target >= n:
        raise ValueError(
            f"target must be one of the {n} clients, got target={target}. Choose an "
            "honest one."
        )
    if any(isinstance(x, jax.core.Tracer) for x in (seen.ids, seen.byzantine)):
        return
    if np.any((np.asarray(seen.ids) == target) & np.asarray(seen.byzantine)):
        raise ValueError(
            f"target must be honest, got target={target}, which is Byzantine."
        )


def _direction(direction, update):
    """Return a unit tree like one row of ``update``."""
    one = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), update)
    if direction is None:
        leaves, structure = jax.tree.flatten(one)
        # The first leaf that has an entry.
        at = next((i for i, leaf in enumerate(leaves) if leaf.size), 0)
        first = leaves[at].ravel().at[:1].set(1)
        leaves[at] = first.reshape(leaves[at].shape)
        return jax.tree.unflatten(structure, leaves)
    _validate.like(direction, one, "direction")
    along = jax.tree.map(lambda u, x: jnp.asarray(u, x.dtype), direction, one)
    return _normalised(along, one)
