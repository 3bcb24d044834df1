# SPDX-License-Identifier: Apache-2.0
"""FedExP."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfed import _tree, _validate, reductions
from jaxfed._base import Aggregator, FedAlgorithm, Info, ServerHalf
from jaxfed.aggregators import mean
from jaxfed.algorithms._build import ServerState, from_chains, needs
from jaxfed.reductions._coordinatewise import shares


class FedExPState(NamedTuple):
    """State of a server that averages iterates: the chain's, and the model before."""

    inner: ServerState
    previous: optax.Params


@needs(local_steps=True)
def fedexp(
    learning_rate=1.0,
    *,
    num_clients=None,
    epsilon=1e-3,
    form="paper",
    average_iterates=False,
    local_work=None,
) -> FedAlgorithm:
    r"""FedExP: FedAvg whose server goes further when the clients disagree.

    .. math::

        \bar\Delta = \tfrac1S \sum_i \Delta_i, \qquad
        \eta_g = \max\Big(1, \frac{\sum_i \|\Delta_i\|^2}
        {2 S (\|\bar\Delta\|^2 + \varepsilon)}\Big), \qquad
        x \leftarrow x - \gamma \eta_g \bar\Delta

    Orthogonal :math:`\Delta_i` of equal norm give about S/2, equal ones 1. The rule is
    its own, and one Byzantine client moves it anywhere. Rounds report
    ``extrapolation``, :math:`\eta_g`.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule; paper 1.
      num_clients: accepted like every method does; not needed.
      epsilon: > 0; may be traced.
      form: ``"paper"``, or ``"code"``, the authors' program, which has
        :math:`S \varepsilon` in place of :math:`\varepsilon`.
      average_iterates: whether the model is the average of the last two iterates,
        what the authors evaluate; clients start at the last one in any case.
      local_work: as for :func:`fedavg`.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges.

    Cost:
      One read of what was sent more than :func:`fedavg`; ``average_iterates`` takes a
      parameter copy on the server.

    References:
      Jhunjhunwala et al., `FedExP <https://arxiv.org/abs/2301.09604>`_, 2023,
      Algorithm 1.
    """
    del num_clients
    _validate.positive("learning_rate", learning_rate)
    rule = extrapolated_mean(epsilon, form)
    built = from_chains(
        local_work, optax.identity(), (rule, optax.sgd(learning_rate)), rule=rule
    )
    if not average_iterates:
        return built
    inner = built.server

    def init(params):
        # Not the same buffers twice: the state may be donated.
        return FedExPState(inner.init(params), jax.tree.map(jnp.array, params))

    def update(uploads, sstate, **extra):
        new, info = inner.update(uploads, sstate.inner, **extra)
        return FedExPState(new, sstate.inner.params), info

    def model(sstate):
        return jax.tree.map(
            lambda a, b: (a + b) / 2, sstate.inner.params, sstate.previous
        )

    server = ServerHalf(init, lambda s: inner.broadcast(s.inner), model, update)
    return built._replace(server=server, client_tx=None, server_tx=None)


def extrapolated_mean(epsilon=1e-3, form="paper") -> Aggregator:
    """Scale the mean up by FedExP's server step; see :func:`fedexp`.

    ``weights`` p, normalised, give ``max(1, sum(p * norms**2) / (2 (.. + epsilon)))``.

    Args:
      epsilon: > 0; may be traced.
      form: ``"paper"`` or ``"code"``.

    Returns:
      Aggregator; ``inspect`` reports the factor as ``extrapolation``.

    Raises:
      ValueError: for values out of these ranges.
    """
    _validate.positive("epsilon", epsilon)
    _validate.choice("form", form, ("paper", "code"))
    average = mean()

    def extrapolate(updates, mask, weights):
        n = _validate.stacked(updates)
        centre = reductions.mean(updates, mask=mask, weights=weights)
        share = shares(n, mask, weights)
        squares = jnp.square(_tree.row_norms(updates))
        spread = jnp.sum(jnp.where(share > 0, share * squares, 0))
        number = 1 if form == "paper" else n if mask is None else jnp.sum(mask)
        damped = jnp.square(_tree.norm(centre)) + number * epsilon
        return jnp.maximum(1, spread / (2 * damped)), centre

    def update(updates, state, params=None, *, mask=None, weights=None, **extra):
        del extra
        _validate.stacked(updates, params)
        factor, centre = extrapolate(updates, mask, weights)
        step = jax.tree.map(
            lambda x: (factor.astype(_tree.accumulator(x.dtype)) * x).astype(x.dtype),
            centre,
        )
        return step, state

    def inspect(updates, state=None, *, mask=None, weights=None, **extra):
        seen = average.inspect(updates, state, mask=mask, weights=weights, **extra)
        factor, _ = extrapolate(updates, mask, weights)
        return Info(*seen[:2], {"extrapolation": factor})

    return Aggregator(lambda params: optax.EmptyState(), update, inspect=inspect)
