# SPDX-License-Identifier: Apache-2.0
"""RFA and RAGA: the geometric median of models and of updates."""

import jax
import jax.numpy as jnp
import optax

from jaxfed import _validate, aggregators
from jaxfed._base import FedAlgorithm
from jaxfed.algorithms._build import from_chains, needs


def _from_params():
    """From an update to the model it leads to, and back: ``params - x``."""

    def update(updates, params):
        if params is None:
            raise ValueError("rfa sends models: pass params to update.")
        return jax.tree.map(jnp.subtract, params, updates)

    return optax.stateless(update)


@needs(local_steps=True)
def rfa(
    learning_rate=1.0,
    *,
    iterations=100,
    smoothing=1e-6,
    tolerance=1e-6,
    start="medoid",
    num_clients=None,
    local_work=None,
) -> FedAlgorithm:
    r"""RFA: move to the geometric median of the clients' models.

    .. math::

        x \leftarrow (1-\gamma)\, x + \gamma\, \mathrm{GeoMed}(x - g_1, \dots, x - g_n)

    What crosses the wire, and what attackers see and replace, are the models
    :math:`x - g_i`. As the geometric median moves with its points, the result is that
    of :func:`raga` up to rounding.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule; 1 in the paper.
      iterations: steps of the smoothed Weiszfeld algorithm, >= 1.
      smoothing: > 0, in units of the models; may be traced.
      tolerance: stop moving when no weight changes by more, >= 0; may be traced.
      start: see :func:`jaxfed.aggregators.geometric_median`.
      num_clients: accepted like every method does; not needed.
      local_work: e.g. ``local_sgd(loss_fn, optax.sgd(0.01), epochs=1)``.

    Returns:
      FedAlgorithm; its server honours ``weights``, e.g. numbers of examples.

    Raises:
      ValueError: for values out of these ranges.

    Cost:
      ``O(n^2 d)``.

    References:
      Pillutla et al., `Robust Aggregation for Federated Learning
      <https://arxiv.org/abs/1912.13445>`_, 2022, Algorithm 1, with full local models.
    """
    del num_clients
    _validate.positive("learning_rate", learning_rate)
    rule = _rule(iterations, smoothing, tolerance, start)
    chain = (rule, _from_params(), optax.sgd(learning_rate))
    return from_chains(local_work, _from_params(), chain, rule=rule)


@needs(local_steps=True)
def raga(
    learning_rate=1.0,
    *,
    iterations=100,
    smoothing=1e-6,
    tolerance=1e-6,
    start="medoid",
    num_clients=None,
    local_work=None,
) -> FedAlgorithm:
    r"""RAGA: subtract the geometric median of the clients' updates.

    .. math::

        x \leftarrow x - \gamma\, \mathrm{GeoMed}(g_1, \dots, g_n)

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule; 1 in the paper.
      iterations: steps of the smoothed Weiszfeld algorithm, >= 1.
      smoothing: > 0, in units of the updates; may be traced.
      tolerance: stop moving when no weight changes by more, >= 0; may be traced.
      start: see :func:`jaxfed.aggregators.geometric_median`.
      num_clients: accepted like every method does; not needed.
      local_work: e.g. ``local_sgd(loss_fn, optax.sgd(0.01), steps=5, batch_size=10)``.

    Returns:
      FedAlgorithm; its server honours ``weights``, e.g. numbers of examples.

    Raises:
      ValueError: for values out of these ranges.

    Cost:
      ``O(n^2 d)``.

    References:
      Zuo et al., `Federated Learning Resilient to Byzantine Attacks and Data
      Heterogeneity <https://arxiv.org/abs/2403.13374>`_, 2025.
    """
    del num_clients
    _validate.positive("learning_rate", learning_rate)
    rule = _rule(iterations, smoothing, tolerance, start)
    return from_chains(
        local_work, optax.identity(), (rule, optax.sgd(learning_rate)), rule=rule
    )


def _rule(iterations, smoothing, tolerance, start):
    return aggregators.geometric_median(
        iterations=iterations, smoothing=smoothing, tolerance=tolerance, start=start
    )
