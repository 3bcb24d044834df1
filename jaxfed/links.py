# SPDX-License-Identifier: Apache-2.0
"""Links that know about clients: per-client state on the server or in simulation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfed import _tree, _validate


class PerClientState(NamedTuple):
    """State of :func:`per_client`.

    Attributes:
      round: ``int32`` scalar, updates so far.
      inner: the link's state with a leading client axis, ``[num_clients, ...]``.
    """

    round: jax.Array
    inner: optax.OptState


def per_client(link, num_clients) -> optax.GradientTransformationExtraArgs:
    """Run one client's link for each client of a stacked tree.

    The link gets ``client_id`` and ``round`` as extra arguments, so that randomness
    can depend on who and when, never on the position in the cohort.

    Args:
      link: optax transformation of one client's tree.
      num_clients: clients that have state, >= 1.

    Returns:
      Link, stacked to stacked. ``update`` takes ``cohort``, ``[s]`` distinct client ids
      of the rows (None: row i is client i), ``mask``, bool ``[s]``, False for rows of
      absent clients, whose state stays as it is, and ``params`` without client axis.

    Raises:
      ValueError: at trace time if the rows are not ``num_clients`` and no cohort says
        whose they are.

    Cost:
      ``num_clients`` copies of the link's state; a gather and a scatter of it with
      partial participation.
    """
    num_clients = _validate.count("num_clients", num_clients)
    link = optax.with_extra_args_support(link)

    def init(params):
        state = link.init(params)
        stack = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (num_clients, *jnp.shape(x))), state
        )
        return PerClientState(jnp.zeros([], jnp.int32), stack)

    def update(updates, state, params=None, *, cohort=None, mask=None, **extra):
        n = _validate.stacked(updates, params)
        mask = _validate.flags("mask", mask, n)
        if cohort is None and n != num_clients:
            raise ValueError(
                f"updates has {n} rows but num_clients={num_clients}: pass cohort= "
                "with the ids of the clients the rows belong to."
            )
        ids = jnp.arange(num_clients) if cohort is None else cohort
        at = (lambda x: x) if cohort is None else (lambda x: x[ids])
        extra = {"round": state.round} | extra

        def one(u, s, client_id):
            return link.update(u, s, params, client_id=client_id, **extra)

        old = jax.tree.map(at, state.inner)
        out, new = jax.vmap(one)(updates, old, ids)
        if mask is not None:
            new = jax.tree.map(
                lambda x, y: jnp.where(_tree.expand(mask, x), x, y), new, old
            )
        if cohort is not None:
            new = jax.tree.map(lambda old, x: old.at[ids].set(x), state.inner, new)
        return out, PerClientState(optax.safe_increment(state.round), new)

    return optax.GradientTransformationExtraArgs(init, update)


class AccumulateState(NamedTuple):
    """State of :func:`accumulate`: ``total``, like params."""

    total: optax.Updates


def accumulate(step, initial=None) -> optax.GradientTransformation:
    """Sum what arrives: ``total += step * update``; the total goes on.

    Args:
      step: factor, >= 0; may be traced.
      initial: tree like params, the first total. None: zeros.

    Returns:
      Link, like params to like params.

    Raises:
      ValueError: if ``step`` is negative or not finite; at ``init`` if ``initial`` is
        not shaped like params.
    """
    _validate.nonnegative("step", step)

    def init(params):
        return AccumulateState(start(initial, params))

    def update(updates, state, params=None):
        del params

        def leaf(t, u):
            dtype = _tree.accumulator(t.dtype)
            moved = jnp.asarray(step, dtype) * u.astype(dtype)
            return (t.astype(dtype) + moved).astype(t.dtype)

        total = jax.tree.map(leaf, state.total, updates)
        return total, AccumulateState(total)

    return optax.GradientTransformation(init, update)


class EmaState(NamedTuple):
    """State of :func:`ema`.

    Attributes:
      average: like params.
      count: ``int32`` scalar, updates so far, where ``kept`` is a schedule.
    """

    average: optax.Updates
    count: Any = ()


def ema(kept) -> optax.GradientTransformation:
    """Average what arrives: ``v <- kept * v + (1 - kept) * update``; v goes on.

    ``optax.ema`` without debiasing, for traced or scheduled ``kept`` as well: 16-bit
    leaves stay 16-bit, with the arithmetic in float32.

    Args:
      kept: weight of the past, ``0 <= kept < 1``; may be traced, or a schedule, a
        function of the extra argument ``round`` (else of its own count of updates).

    Returns:
      Link, like params to like params, that starts from zeros.

    Raises:
      ValueError: if ``kept``, or a schedule's first value, is outside its range.
    """
    _validate.unit_interval("kept", at_round(kept, 0))

    def init(params):
        count = jnp.zeros([], jnp.int32) if callable(kept) else ()
        return EmaState(start(None, params), count)

    def update(updates, state, params=None):
        del params
        average = average_of(updates, state.average, kept)
        return average, EmaState(average)

    def scheduled(updates, state, params=None, *, round=None, **extra):
        del params, extra
        now = kept(state.count if round is None else round)
        average = average_of(updates, state.average, now)
        return average, EmaState(average, optax.safe_increment(state.count))

    if callable(kept):
        return optax.GradientTransformationExtraArgs(init, scheduled)
    return optax.GradientTransformation(init, update)


def average_of(updates, past, kept):
    """Return ``kept * past + (1 - kept) * updates``, with the dtypes of ``past``."""

    def leaf(u, v):
        dtype = _tree.accumulator(u.dtype)
        new, old = jnp.asarray(1 - kept, dtype), jnp.asarray(kept, dtype)
        return (new * u.astype(dtype) + old * v.astype(dtype)).astype(v.dtype)

    return jax.tree.map(leaf, updates, past)


def at_round(value, round):
    """Return the value of a number or schedule in a round."""
    return value(round) if callable(value) else value


def start(initial, params):
    """Return zeros like params, or a checked copy of ``initial``."""
    if initial is None:
        return jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params)
    _validate.like(initial, params, "initial")
    return jax.tree.map(lambda x, p: jnp.array(x, p.dtype), initial, params)
