# SPDX-License-Identifier: Apache-2.0
r"""Uniform stability, measured: the same run on two neighbouring data sets.

A method is eps-stable if, for all data sets S and S' that differ in one example of one
honest client, :math:`\sup_z E[\ell(A(S); z) - \ell(A(S'); z)] \le \varepsilon`; its
generalization error is then at most eps in absolute value. :func:`coupled` runs any
method on both with the same noise, batches and cohorts, :func:`estimate` compares the
models. :func:`lower_bound` and :func:`noise_free` are the worst cases of the theory,
whose formulas are in :mod:`jaxfed.theory.stability`.

References:
  Boudou, Le Bars, Gupta and Bellet, `Unveiling the Non-Monotonic Effect of Privacy on
  Generalization under Byzantine Robustness`. Equation numbers are its own.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfed import _keys, _validate
from jaxfed._base import PyTree, Shard
from jaxfed.aggregators import smea
from jaxfed.algorithms._safe_dgd import safe_dgd
from jaxfed.attacks import mia_push
from jaxfed.local import gradient
from jaxfed.rounds import simulate
from jaxfed.theory import stability as theory

__all__ = [
    "Instance",
    "Measurement",
    "Stability",
    "advantage",
    "coupled",
    "estimate",
    "linear_loss",
    "lower_bound",
    "measure",
    "neighbour",
    "noise_free",
    "statistics",
]


# --- any method -----------------------------------------------------------------------


def neighbour(shards, client, index, example) -> Shard:
    """Return the data set in which one example of one client is another.

    Args:
      shards: stacked Shard, not traced; leaves of ``data`` are ``[n, capacity, ...]``.
      client: whose, ``0 <= client < n``; honest if it is to be a neighbour.
      index: which, below the client's count.
      example: tree like ``shards.data`` without its first two axes.

    Returns:
      Shard of the same shapes.

    Raises:
      TypeError, ValueError: for numbers out of range, or an example of another shape.
    """
    counts = np.asarray(shards.count)
    _validate.count("client", client, minimum=0, maximum=len(counts) - 1)
    _validate.count("index", index, minimum=0, maximum=int(counts[client]) - 1)
    one = jax.tree.map(lambda x: x[client, index], shards.data)
    _same_shapes("example", example, one)
    data = jax.tree.map(
        lambda x, e: jnp.asarray(x).at[client, index].set(e), shards.data, example
    )
    return shards._replace(data=data)


def coupled(build, shards, other, params, rounds, key, *, look=None):
    r"""Run a method on two data sets with the same randomness.

    Everything random is keyed by round and client, so both runs see the same noise,
    batches and cohorts; equal data gives equal models. For expectations, ``vmap`` over
    keys; noise levels and step sizes that ``build`` closes over may be traced, too.

    Args:
      build: ``(key) -> Simulation``, which makes the method and its attack; the key is
        for noise links and rules with randomness of their own.
      shards: S, stacked Shard.
      other: S', Shard of the same shapes, see :func:`neighbour`.
      params: initial model.
      rounds: T >= 0, Python int.
      key: typed key or int seed, given to ``build`` and to ``Simulation.init``.
      look: ``(simulation, state, metrics) -> tree``, what to return of a run; ``state``
        is the last, metrics are stacked ``[rounds]``. None: the model.

    Returns:
      What ``look`` returns for S, and for S'.

    Raises:
      ValueError: if the data sets differ in structure or shapes.

    Cost:
      Two runs under one ``vmap``, which draws their noise once.
    """
    _same_shapes("other", other, shards)
    key = _keys.as_key(key)
    simulation = build(key)

    def run(shards):
        state, metrics = simulation.run(simulation.init(params, key), shards, rounds)
        if look is None:
            return simulation.model(state)
        return look(simulation, state, metrics)

    both = jax.tree.map(lambda a, b: jnp.stack([a, b]), shards, other)
    seen = jax.vmap(run)(both)
    first, second = (jax.tree.map(lambda x, i=i: x[i], seen) for i in range(2))
    return first, second


def _same_shapes(name, tree, model):
    got, want = jax.tree.map(jnp.shape, (tree, model))
    if got != want:
        raise ValueError(f"{name} must be a tree of shapes {want}, got {got}.")


class Stability(NamedTuple):
    r"""What :func:`estimate` returns; scalars.

    Attributes:
      signed: :math:`\max_z E[\ell(A(S); z) - \ell(A(S'); z)]`, the definition's.
      signed_error: its standard error, NaN for one run.
      absolute: :math:`\max_z E|\ell(A(S); z) - \ell(A(S'); z)|`, of coupled runs, at
        least as large. Lower bounds are about this one.
      absolute_error: its standard error.
    """

    signed: jax.Array
    signed_error: jax.Array
    absolute: jax.Array
    absolute_error: jax.Array


def estimate(loss_fn, models, others, points) -> Stability:
    """Estimate stability from coupled runs, over a finite set of test points.

    The order of the data sets matters to ``signed``: swap the models for the other.
    Standard errors are those at the maximising point, and a maximum of noisy means is
    biased upward: take few points where there are few runs.

    Args:
      loss_fn: ``(params, batch) -> [b]`` losses.
      models: leaves ``[runs, ...]``, models of S.
      others: like ``models``, those of S'; row i has the randomness of row i there.
      points: batch of the test points, leaves ``[b, ...]``.

    Returns:
      Stability.

    Cost:
      ``2 * runs * b`` losses at once.
    """
    losses = jax.vmap(loss_fn, (0, None))
    gap = losses(models, points) - losses(others, points)

    def largest(values):
        means = jnp.mean(values, 0)
        at = jnp.argmax(means)
        runs = values.shape[0]
        variance = jnp.sum(jnp.square(values[:, at] - means[at])) / (runs - 1.0)
        return means[at], jnp.sqrt(variance / runs)

    return Stability(*largest(gap), *largest(jnp.abs(gap)))


# --- worst cases ----------------------------------------------------------------------


class Instance(NamedTuple):
    r"""Two data sets and an attacker that can tell them apart, with linear losses.

    Safe-DGD with SMEA on :math:`\ell(\theta; z) = \theta^\top z`, whose gradients do
    not depend on the model. Client 0 is the one whose example differs, the last f are
    Byzantine. ``_replace(rounds=...)`` changes the horizon.

    Attributes:
      build: ``(key, noise_std, radius) -> Simulation``; noise and radius of projection
        (inf for none) may be traced.
      trigger: ``(noise_std) -> level`` of the statistic above which the attacker
        decides that the data set is S'.
      shards: S, ``data`` is ``{"z": [n, m, d]}``.
      other: S'.
      params: initial model, zeros ``[d]``.
      points: the worst test points, ``{"z": [2, d]}``, :math:`\pm C e_1`.
      num_byzantine: f.
      num_test: rounds in which the attacker listens.
      rounds: T.
    """

    build: Callable
    trigger: Callable
    shards: Shard
    other: Shard
    params: PyTree
    points: PyTree
    num_byzantine: int
    num_test: int
    rounds: int


def linear_loss(params, batch):
    r"""Return the losses of :class:`Instance`, :math:`\theta^\top z`.

    Args:
      params: ``[d]``.
      batch: ``{"z": [b, d]}``.

    Returns:
      ``[b]``.
    """
    return batch["z"] @ params


def lower_bound(
    n,
    f,
    m,
    d=1,
    *,
    rounds,
    num_test=None,
    lipschitz=1.0,
    learning_rate=0.1,
    level=None,
    strength=None,
    eigenvalue=None,
) -> Instance:
    r"""Return the instance behind the lower bounds (theorem 3.2).

    S: every example is 0. S': one example of client 0 is C (d = 1, Algorithm 2) or
    :math:`-C e_1` (d > 1, Algorithm 3). The attacker listens to client 0 for
    ``num_test`` rounds and then pushes, under the honest noise, to the side of its
    decision (:func:`jaxfed.attacks.mia_push`).

    Args:
      n: number of clients.
      f: number of Byzantine clients, ``0 <= f < n/2``.
      m: examples per client.
      d: number of parameters.
      rounds: T >= 1.
      num_test: rounds of listening, 1 to T; None: half of them.
      lipschitz: C > 0; gradients of examples are clipped to it.
      learning_rate: gamma > 0.
      level: :math:`z_a` of the trigger :math:`z_a \sigma / \sqrt{n_\text{test}}`; None:
        the best, :math:`\Delta / 2`, which puts it at C / (2m).
      strength: c of the push; None: 1/2 for d = 1, else 0.3.
      eigenvalue: :math:`\Lambda/\sigma^2`; None: (n-f-1)/(n-f) for d = 1, else measured
        by :func:`jaxfed.theory.stability.monte_carlo`.

    Returns:
      Instance.

    Raises:
      TypeError, ValueError: for arguments out of range.

    References:
      Sections C.3.1 and C.3.2.
    """
    _sizes(n, f, m, d, rounds)
    num_test = max(rounds // 2, 1) if num_test is None else num_test
    _validate.count("num_test", num_test, maximum=rounds)
    C = _validate.positive("lipschitz", lipschitz)
    if level is not None:
        _validate.nonnegative("level", level)
    if eigenvalue is None:
        if d == 1 or f == 0:
            eigenvalue = (n - f - 1) / (n - f)
        else:
            eigenvalue = theory.monte_carlo(n, f, d).eigenvalue
    _validate.nonnegative("eigenvalue", eigenvalue)
    strength = (0.5 if d == 1 else 0.3) if strength is None else strength
    special = np.zeros(d, np.float32)
    special[0] = C if d == 1 else -C

    def trigger(noise_std):
        if level is None:
            return C / (2 * m)
        return level * noise_std / math.sqrt(num_test)

    def root(noise_std):
        return strength, eigenvalue * noise_std**2

    z = np.zeros((n, m, d), np.float32)
    return _instance(z, special, trigger, root, f, num_test, rounds, C, learning_rate)


def noise_free(
    n, f, m, *, rounds, lipschitz=1.0, learning_rate=0.1, margin=1e-3
) -> Instance:
    r"""Return the instance behind the lower bound without noise, for d = 1.

    The attacker knows the data set after one round and then sends what SMEA only just
    keeps. If f >= n/3, half of the honest clients have gradient C and half -C (client 0
    is -C, or 0 where their number is odd), and it sends
    :math:`\pm(C + (1-\eta)\frac{n-f}{\sqrt{f(n-2f)}} s)`, s the honest standard
    deviation; else n-2f have 0 and f have C, and it sends :math:`\pm(1-\eta)C`. In
    S' one example of client 0 moves its gradient by C / m.

    Args:
      n: number of clients.
      f: number of Byzantine clients, ``1 <= f < n/2``.
      m: examples per client.
      rounds: T >= 1.
      lipschitz: C > 0.
      learning_rate: gamma > 0.
      margin: eta in [0, 1).

    Returns:
      Instance; without noise, so its runs are all the same.

    Raises:
      TypeError, ValueError: for arguments out of range.

    References:
      Our form of theorem 3.2 of the work it cites for this case: a fixed attacker
      value for each side.
    """
    _sizes(n, f, m, 1, rounds)
    if f == 0:
        raise ValueError("f must be at least 1, got f=0: there is no attacker.")
    C = _validate.positive("lipschitz", lipschitz)
    _validate.unit_interval("margin", margin)
    h = n - f
    values = np.zeros(n)
    if 3 * f >= n:
        # Client 0 on the side that the attacker moves away from.
        values[h - h // 2 : h] = C
        values[: h // 2] = -C
        second = values[:h].copy()
        second[0] += C / m
        spread = min(values[:h].std(), second.std())
        push = C + (1 - margin) * h / math.sqrt(f * (n - 2 * f)) * spread
    else:
        values[h - f : h] = C
        push = (1 - margin) * C
    z = np.repeat(values, m).reshape(n, m, 1).astype(np.float32)
    trigger = values[0] + C / (2 * m)
    size = push * math.sqrt(f * (n - 2 * f)) / h
    return _instance(
        z,
        z[0, 0] + np.float32(C),
        lambda noise_std: trigger,
        lambda noise_std: (1.0, size**2),
        f,
        1,
        rounds,
        C,
        learning_rate,
    )


def _sizes(n, f, m, d, rounds):
    _validate.count("n", n)
    _validate.majority(_validate.count("f", f, minimum=0), n)
    for name, x in {"m": m, "d": d, "rounds": rounds}.items():
        _validate.count(name, x)


def _instance(z, special, trigger, root, f, num_test, rounds, C, learning_rate):
    """Return the instance in which example 0 of client 0 becomes ``special``."""
    n, m, d = z.shape
    side = -1.0 if d > 1 else 1.0
    unit = np.zeros(d, np.float32)
    unit[0] = 1
    shards = Shard({"z": jnp.asarray(z)}, jnp.full(n, m, jnp.int32))

    def build(key, noise_std, radius=math.inf):
        strength, eigenvalue = root(noise_std)
        algorithm = safe_dgd(
            learning_rate,
            rule=smea(f),
            key=key,
            noise_std=noise_std,
            radius=radius,
            local_work=gradient(linear_loss, clip_norm=C),
        )
        attack = mia_push(
            0,
            side * unit,
            num_test=num_test,
            noise_std=1.0,
            z=trigger(noise_std) * math.sqrt(num_test),
            strength=strength,
            top_eigenvalue=eigenvalue,
        )
        return simulate(algorithm, n, num_byzantine=f, attack=attack, inspect=True)

    return Instance(
        build,
        trigger,
        shards,
        neighbour(shards, 0, 0, {"z": special}),
        jnp.zeros(d),
        {"z": jnp.asarray(np.float32(C) * np.stack([unit, -unit]))},
        f,
        num_test,
        rounds,
    )


class Measurement(NamedTuple):
    r"""What :func:`measure` returns; scalars but for the first.

    Attributes:
      stability: :class:`Stability`.
      success: P, share of the runs in which the attacker is right about both data sets.
      instability: I, the mean of :math:`C|\theta_1 - \theta'_1|` over these runs, NaN
        if there are none. Absolute stability is at least I P (6); with P from
        :func:`jaxfed.theory.stability.mia_success` this needs fewer runs where success
        is rare.
      selected: share of the later rounds in which the rule averages all f pushes; NaN
        if there are none.
    """

    stability: Stability
    success: jax.Array
    instability: jax.Array
    selected: jax.Array


def measure(
    instance, noise_std, key, *, runs, radius=math.inf, batch_size=None
) -> Measurement:
    """Measure an instance by coupled runs.

    Pure: ``vmap`` it over noise levels, keys and radii, and a whole curve is one
    program. Radii with the same key share their noise.

    Args:
      instance: Instance.
      noise_std: sigma >= 0, number or traced scalar.
      key: typed key or int seed; runs take ``jax.random.split(key, runs)``.
      runs: number of coupled runs, Python int.
      radius: R > 0 of the projection, inf for none; may be traced.
      batch_size: runs in memory at a time; None: all.

    Returns:
      Measurement.

    Raises:
      TypeError, ValueError: for arguments out of range.

    Cost:
      ``2 * runs * T`` rounds, which with d = 1 take microseconds each: SMEA is then a
      window of the sorted values. Beyond, it searches C(n, f) subsets.
    """
    first, second = _runs(instance, noise_std, key, runs, radius, batch_size)
    level = instance.trigger(noise_std)
    success = (first["statistic"] <= level) & (second["statistic"] > level)
    points, f = instance.points, instance.num_byzantine
    gap = jax.vmap(linear_loss, (0, None))(first["model"] - second["model"], points)
    gap = jnp.max(jnp.abs(gap), 1)
    kept = jnp.stack([first["influence"], second["influence"]])
    kept = kept[..., instance.num_test :]
    n = instance.shards.count.shape[0]
    return Measurement(
        estimate(linear_loss, first["model"], second["model"], points),
        jnp.mean(success),
        jnp.mean(gap, where=success),
        jnp.mean(kept > (f - 0.5) / (n - f)),
    )


def statistics(instance, noise_std, key, *, runs, batch_size=None):
    """Return what the attacker decides by: the mean of what it heard from client 0.

    Args:
      instance: as of :func:`measure`.
      noise_std: as for :func:`measure`.
      key: as for :func:`measure`.
      runs: as for :func:`measure`.
      batch_size: as for :func:`measure`.

    Returns:
      ``([runs], [runs])``, its statistic on S and on S'.

    Cost:
      ``2 * runs * num_test`` rounds.
    """
    listening = instance._replace(rounds=instance.num_test)
    first, second = _runs(listening, noise_std, key, runs, math.inf, batch_size)
    return first["statistic"], second["statistic"]


def advantage(statistic, other, trigger):
    r"""Return the attacker's advantage: how often it says S' on S', less on S.

    By theory :math:`\Phi(z) - \Phi(z - \Delta)`
    (:func:`jaxfed.theory.stability.mia_success`), which for coupled runs is also how
    often it is right about both.

    Args:
      statistic: ``[runs]``, on S.
      other: ``[runs]``, on S'.
      trigger: it says S' above it; scalar or ``[k]``.

    Returns:
      Like ``trigger``.
    """
    level = jnp.asarray(trigger)[..., None]
    rank = (1,) * (level.ndim - 1)

    def said(x):
        return jnp.mean(jnp.asarray(x).reshape(*rank, -1) > level, -1)

    return said(other) - said(statistic)


def _runs(instance, noise_std, key, runs, radius, batch_size):
    """Return what is kept of the runs on S and on S', leaves ``[runs, ...]``."""
    _validate.nonnegative("noise_std", noise_std)
    _validate.count("runs", runs)
    if batch_size is not None:
        _validate.count("batch_size", batch_size)

    def look(simulation, state, metrics):
        heard = jnp.maximum(state.attack.recorded, 1)
        return {
            "model": simulation.model(state),
            "statistic": state.attack.total / heard,
            "influence": metrics["influence"],
        }

    def one(key) -> tuple[Any, Any]:
        return coupled(
            lambda key: instance.build(key, noise_std, radius),
            instance.shards,
            instance.other,
            instance.params,
            instance.rounds,
            key,
            look=look,
        )

    keys = jax.random.split(_keys.as_key(key), runs)
    return jax.lax.map(one, keys, batch_size=runs if batch_size is None else batch_size)
