# SPDX-License-Identifier: Apache-2.0
"""Attacks that try themselves out on a dry run of the server first."""

import functools

import jax
import jax.numpy as jnp
import optax

from jaxfed import _tree, _validate
from jaxfed._base import Attack
from jaxfed.attacks import _base

# Entries of the uploads that candidates may fill at a time: 128 MiB in float32.
_ENTRIES = 2**25


def ipm_search(
    low=0.0, high=10.0, grid=21, *, evals=20, delta=10.0, ratio=0.8, batch_size=None
) -> Attack:
    r"""Inner-product manipulation whose strength is searched in every round.

    Sends :math:`-\tau \bar x` for the honest clients' mean :math:`\bar x`, with the
    :math:`\tau` that moves the model furthest from where the mean alone would take it:

    .. math:: \tau = \arg\max \| \text{step}(\text{attacked}(\tau))
        - \text{step}(\bar x, \dots, \bar x) \|

    over an even grid and the end point of a sequential line search (the one of ByzFL:
    from 0, steps of ``delta`` that double while they help, then ``evals`` in all of
    ``ratio`` times the last), so never weaker than that search. ``step`` is what the
    server half would do to the model, rule, momentum and optimizer included. The
    adversary sees the honest messages of the round and knows the server's state, its
    randomness included.
    :math:`\tau = \gamma - 1` turns the form :math:`(1 - \gamma) \bar x` into this one.

    Args:
      low: least strength of the grid, finite; may be traced.
      high: greatest strength of the grid, finite; may be traced.
      grid: candidates in it, >= 1, ``low`` and ``high`` included.
      evals: dry runs of the line search, >= 1.
      delta: its first step > 0; may be traced.
      ratio: ``0 < ratio < 1``; may be traced.
      batch_size: candidates of the grid in memory at a time; None: as many as have
        2**25 entries together.

    Returns:
      Attack on the wire; Byzantine clients need no data.

    Raises:
      ValueError: for arguments outside these ranges; at use without ``probe``.

    Cost:
      ``grid + evals + 3`` dry runs of the server half, the grid's in one batch.

    References:
      Xie et al., `Fall of Empires <https://arxiv.org/abs/1903.03936>`_, 2020; searched
      as in ByzULDP, appendix H.2, and in ByzFL 0.0.11 (Optimal
      InnerProductManipulation).
    """

    def family(seen):
        mean = seen.mean()
        return lambda strength: _base.scaled(-strength, mean)

    search = _line(evals, delta, ratio)
    return _searched("ipm_search", family, low, high, grid, search, batch_size)


def alie_search(
    low=0.0, high=10.0, grid=21, *, evals=20, delta=10.0, ratio=0.8, batch_size=None
) -> Attack:
    r"""A little is enough, with a strength that is searched in every round.

    Sends :math:`\mu - z s` with mean and sample standard deviation of the honest
    messages, coordinate by coordinate; z is searched as in :func:`ipm_search`, which
    describes objective, cost and what the adversary knows.

    Args:
      low: least z of the grid, finite; may be traced. Negative ones try the other side.
      high: greatest z of the grid, finite; may be traced.
      grid: candidates in it, >= 1, ``low`` and ``high`` included.
      evals: dry runs of the line search, >= 1.
      delta: its first step > 0; may be traced.
      ratio: ``0 < ratio < 1``; may be traced.
      batch_size: candidates of the grid in memory at a time; None: as many as have
        2**25 entries together.

    Returns:
      Attack on the wire; Byzantine clients need no data.

    Raises:
      ValueError: for arguments outside these ranges; at use without ``probe``.

    References:
      Baruch et al., `A Little Is Enough <https://arxiv.org/abs/1902.06156>`_, 2019;
      searched as in ByzFL 0.0.11 (Optimal ALittleIsEnough, which adds: our z is minus
      its tau).
    """

    def family(seen):
        mean = seen.mean()
        std = seen.std(mean, ddof=1)
        return lambda strength: _base.moved(mean, -strength, std)

    search = _line(evals, delta, ratio)
    return _searched("alie_search", family, low, high, grid, search, batch_size)


def gradient_search(
    steps=10, learning_rate=0.1, *, objective=None, optimizer=None, scale=10.0, z=1.5
) -> Attack:
    r"""Climb an objective through the rule and the server half by its gradient.

    All Byzantine clients send one vector. It starts as the better one of
    ``ipm(scale)`` and ``alie(z)`` and takes ``steps`` optimizer steps up

    .. math:: \| \text{step}(\text{attacked}(v)) - \text{step}(\bar x, \dots, \bar x) \|

    or up an objective of your own; the best iterate, the start included, is sent. What
    the optimizer moves is measured in root mean squares of the start. Where a gradient
    is not finite its entries count as 0. The adversary sees the honest messages of the
    round and knows the server's state, its randomness included. A rule of your own that
    JAX cannot differentiate in reverse raises JAX's error.

    Args:
      steps: >= 0.
      learning_rate: > 0, of Adam; may be traced.
      objective: ``(model step, message) -> scalar`` to climb, e.g. the loss at
        ``message["params"]`` plus the step; None: the distance above.
      optimizer: optax transformation that descends, instead of Adam.
      scale: strength of :func:`ipm` at the start, >= 0; may be traced.
      z: strength of :func:`alie` at the start, finite; may be traced.

    Returns:
      Attack on the wire; Byzantine clients need no data.

    Raises:
      TypeError: if ``optimizer`` or ``objective`` is of another kind.
      ValueError: for arguments outside these ranges; at use without ``probe``.

    Cost:
      ``steps + 4`` dry runs of the server half, ``steps + 1`` with gradients.
    """
    _validate.count("steps", steps, minimum=0)
    _base.positive("learning_rate", learning_rate)
    _base.nonnegative("scale", scale)
    _base.finite("z", z)
    tx = optax.adam(learning_rate) if optimizer is None else optimizer
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            "optimizer must be an optax transformation such as optax.adam(0.01), got "
            f"{optimizer!r}."
        )
    if not (objective is None or callable(objective)):
        raise TypeError(
            "objective must be a function (model step, message) -> scalar, or None for "
            f"the distance, got {objective!r}."
        )

    def forge(seen):
        value = _objective("gradient_search", seen, objective)
        mean = seen.mean()
        ipm = _base.scaled(-scale, mean)
        alie = _base.moved(mean, -z, seen.std(mean, ddof=1))
        starts = jax.tree.map(lambda a, b: jnp.stack([a, b]), ipm, alie)
        better = jnp.argmax(jax.vmap(value)(starts))
        start = jax.tree.map(lambda s: s[better], starts)
        size = sum(x.size for x in jax.tree.leaves(start))
        unit = _tree.norm(start) / jnp.sqrt(size)
        unit = jnp.where((unit > 0) & jnp.isfinite(unit), unit, 1)

        def at(shift):
            return _base.moved(start, unit, shift)

        def step(carry, _):
            shift, state, best, best_shift = carry
            loss, grad = jax.value_and_grad(lambda s: -value(at(s)))(shift)
            best_shift = jax.tree.map(
                lambda new, old: jnp.where(-loss > best, new, old), shift, best_shift
            )
            grad = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, 0), grad)
            move, state = tx.update(grad, state, shift)
            new = optax.apply_updates(shift, move)
            return (new, state, jnp.maximum(-loss, best), best_shift), None

        shift = jax.tree.map(jnp.zeros_like, start)
        carry = (shift, tx.init(shift), _least(value, start), shift)
        carry, _ = jax.lax.scan(step, carry, None, length=steps + 1)
        return at(carry[-1])

    return _base.stateless(forge)


def line_search(objective, *, evals, delta, ratio, start=0.0):
    """Return where ByzFL's expanding, then contracting line search ends."""

    def step(carry, i):
        x, best, delta, growing = carry
        y = objective(x + jnp.where(i == 0, 0, delta))
        better = y > best
        x = jnp.where(better & (i > 0), x + delta, x)
        growing &= better | (i == 0)
        scale = jnp.where(i == 0, 1, jnp.where(growing, 2, ratio))
        return (x, jnp.where(better, y, best), scale * delta, growing), None

    x, delta = jnp.asarray(start, float), jnp.asarray(delta, float)
    carry = (x, _least(objective, x), delta, jnp.asarray(True))
    return jax.lax.scan(step, carry, jnp.arange(evals))[0][0]


def _line(evals, delta, ratio):
    _validate.count("evals", evals)
    _base.positive("delta", delta)
    _validate.positive("ratio", _validate.unit_interval("ratio", ratio))
    return functools.partial(line_search, evals=evals, delta=delta, ratio=ratio)


def _searched(name, family, low, high, grid, search, batch_size):
    _base.finite("low", low)
    _base.finite("high", high)
    _validate.count("grid", grid)
    if batch_size is not None:
        _validate.count("batch_size", batch_size)

    def forge(seen):
        vector = family(seen)
        distance = _objective(name, seen)

        def value(strength):
            return distance(vector(strength))

        strengths = jnp.append(
            jnp.linspace(low, high, grid, dtype=float), search(value)
        )
        entries = sum(x.size for x in jax.tree.leaves(seen.uploads))
        chunk = batch_size or max(1, _ENTRIES // entries)
        chunk = min(chunk, grid + 1)
        values = jax.lax.map(value, strengths, batch_size=chunk)
        return vector(strengths[jnp.argmax(values)])

    return _base.stateless(forge)


def _least(function, argument):
    """Return -inf, typed like the value of a function."""
    return jnp.full_like(jax.eval_shape(function, argument), -jnp.inf)


def _objective(name, seen, objective=None):
    """Return ``forged -> value``, -inf where there is no value."""
    if seen.probe is None:
        raise ValueError(
            f"{name} tries its messages on a dry run of the server, got probe=None: "
            "run it with jaxfed.simulate, or pass probe=, uploads -> model step."
        )
    if objective is None:
        aim = seen.probe(seen.everywhere(seen.mean()))

        def objective(step, message):
            del message
            return _tree.norm(jax.tree.map(jnp.subtract, step, aim))

    def value(forged):
        found = objective(seen.probe(seen.attacked(forged)), seen.message)
        return jnp.where(jnp.isnan(found), -jnp.inf, found)

    return value
