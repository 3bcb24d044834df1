# SPDX-License-Identifier: Apache-2.0
"""BR-DRAG, and how methods with trusted root data get their root work."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfed import _validate
from jaxfed._base import Aggregator, FedAlgorithm
from jaxfed.algorithms import _drag
from jaxfed.algorithms._build import from_chains, needs
from jaxfed.local import Gradient, LocalSGD


class RoundState(NamedTuple):
    """State of :func:`calibrated_to_reference`: ``round``, ``int32`` scalar."""

    round: jax.Array


def calibrated_to_reference(*, strength=0.5) -> Aggregator:
    """Mean of updates turned towards, and as long as, ``reference=``.

    The rule of :func:`br_drag`.

    Args:
      strength: c in [0, 1], may be traced, or a function of the round.

    Returns:
      Aggregator whose ``update`` and ``inspect`` need ``reference=``, a tree shaped
      like ``params``; honours ``weights``.

    Raises:
      ValueError: for numbers out of range; at trace time for a missing or badly shaped
        ``reference``.

    Cost:
      Four reads of the updates, ``O(n d)``; one vector of the size of params.
    """

    def reference(updates, shares, state, extra):
        del shares, state
        given = extra.get("reference")
        if given is None:
            raise ValueError(
                "br_drag needs reference=, the server's own update on its root data, "
                "got reference=None. In simulations pass root= (a Shard without client "
                "axis) to step or run; else reference= to update."
            )
        one = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x)),
            updates,
        )
        _validate.like(given, one, "reference")
        return given

    return _drag.calibration(
        lambda params: RoundState(jnp.zeros([], jnp.int32)),
        reference,
        lambda state, used, step: RoundState(optax.safe_increment(state.round)),
        strength,
        to_reference=True,
    )


def oracle_strength(updates, reference, byzantine):
    r"""Return the strength :math:`w / (w - x)` of theory, which knows the attackers.

    w is the Byzantine share of the rows and x the sum of their cosines with the
    reference, divided by n. With it :math:`\sum (1 - \lambda_i) = 0` over the Byzantine
    rows: what :func:`br_drag` leaves of them cancels if they are equal.

    Args:
      updates: stacked tree, leaves ``[n, ...]``.
      reference: tree like one client's update.
      byzantine: bool ``[n]``.

    Returns:
      Scalar in [1/2, 1]: 1 where x > 0, for which the formula is larger; 0.5 (the
      default of :func:`br_drag`) if nobody is Byzantine.

    Cost:
      Three reads of the updates.
    """
    rule = calibrated_to_reference()
    details = rule.inspect(
        updates, rule.init(reference), reference=reference, byzantine=byzantine
    ).details
    w, x = details["byzantine_share"], details["byzantine_cosine"]
    c = w / (jnp.where(w > 0, w, 1) - jnp.minimum(x, 0))
    return jnp.where(w > 0, c, 0.5)


def root_work_for(local_work, root_work=None, root_reducer=None):
    """Return the server's local work on root data: by default that of the clients.

    Args:
      local_work: what clients do.
      root_work: what the server does instead; None: the same.
      root_reducer: aggregator over the examples' gradients, in place of their mean.

    Raises:
      TypeError: if a reducer is given for work that is not ours, or is no aggregator.
    """
    work = local_work if root_work is None else root_work
    if root_reducer is None:
        return work
    if not isinstance(root_reducer, Aggregator):
        raise TypeError(f"root_reducer must be an aggregator, got {root_reducer!r}.")
    if isinstance(work, LocalSGD):
        inner = dataclasses.replace(work.gradient, reducer=root_reducer)
        return dataclasses.replace(work, gradient=inner)
    if isinstance(work, Gradient):
        return dataclasses.replace(work, reducer=root_reducer)
    raise TypeError(
        "root_reducer needs work made by jaxfed.local_sgd or jaxfed.gradient, got "
        f"{work!r}. Put the reducer into root_work= yourself."
    )


@needs(local_steps=True, root_data=True)
def br_drag(
    learning_rate=1.0,
    *,
    strength=0.5,
    num_clients=None,
    local_work=None,
    root_work=None,
    root_reducer=None,
) -> FedAlgorithm:
    r"""BR-DRAG: DRAG against Byzantine clients, by a reference from trusted root data.

    Each round the server does the clients' work on its own data, which gives r, and

    .. math::

        \lambda_i = c\,(1 - \cos(g_i, r)), \qquad
        v_i = (1 - \lambda_i) \frac{\|r\|}{\|g_i\|}\, g_i + \lambda_i r, \qquad
        x \leftarrow x - \gamma \frac1n \sum_i v_i

    with norms and cosines over the whole tree.

    Guarantee: nobody's :math:`v_i` is longer than :math:`\max(1, |4c-1|) \|r\|`; for
    :math:`c \ge 1/4` its part along r is at least :math:`(1 - 1/(4c)) \|r\|`. So at
    c = 1/2 the step is at most as long as r and keeps at least half of it, whatever any
    number of clients send. It depends on their directions only, not on their norms.

    Edge cases: rows that hold NaN or inf, that are no longer than 1e-12, or longer or
    shorter than r by a factor 1e30, count as zero vectors, :math:`v_i = c r`. If r is
    not finite or no longer than 1e-12 the model stays.

    Metrics with ``simulate(inspect=True)``: those of :func:`drag`.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule; 1 in the paper.
      strength: c in [0, 1], may be traced, or a function of the round.
      num_clients: accepted like every method does; not needed.
      local_work: e.g. ``local_sgd(loss_fn, optax.sgd(0.01), steps=5, batch_size=10)``.
      root_work: the server's work on the root data; None: ``local_work``.
      root_reducer: aggregator over the gradients of the root examples in a batch, e.g.
        ``trimmed_mean(2)``, against wrong labels among them; None: their mean.

    Returns:
      FedAlgorithm with ``root_work``: give ``root=`` to a simulation's step and run.

    Raises:
      ValueError: for values out of these ranges.
      TypeError: for a ``root_reducer`` that is no aggregator or has no place.

    Cost:
      ``O(n d)``, four reads of the updates; one more local work a round.

    References:
      Xiao et al., `Divergence-Based Adaptive Aggregation for Byzantine Robust Federated
      Learning <https://arxiv.org/abs/2601.06903>`_, 2026, Algorithm 2.
    """
    del num_clients
    _validate.positive("learning_rate", learning_rate)
    rule = calibrated_to_reference(strength=strength)
    algorithm = from_chains(
        local_work, optax.identity(), (rule, optax.sgd(learning_rate)), rule=rule
    )
    return algorithm._replace(
        root_work=root_work_for(local_work, root_work, root_reducer)
    )
