# SPDX-License-Identifier: Apache-2.0
"""EF21-SGDM."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfed import _validate, compressors, links
from jaxfed._base import FedAlgorithm
from jaxfed.aggregators import mean
from jaxfed.algorithms._build import from_chains


class MomentumState(NamedTuple):
    """Momentum that starts at the first gradient: ``started`` and the average."""

    started: jax.Array
    inner: links.EmaState


def _momentum(kept):
    link = links.ema(kept)

    def init(params):
        return MomentumState(jnp.zeros([], bool), link.init(params))

    def update(updates, state, params=None):
        average, _ = link.update(updates, state.inner, params)
        average = optax.tree.where(state.started, average, updates)
        return average, MomentumState(jnp.ones([], bool), links.EmaState(average))

    return optax.GradientTransformation(init, update)


def ef21_sgdm(
    learning_rate,
    *,
    rule=None,
    num_clients,
    compressor=None,
    momentum=0.9,
    start="gradient",
    local_work=None,
) -> FedAlgorithm:
    r"""EF21-SGDM: compressed messages, error feedback, client momentum.

    With :math:`\eta` = 1 - ``momentum`` and a contractive compressor C,

    .. math::

        v_i &\leftarrow (1-\eta) v_i + \eta \hat g_i, \qquad
        c_i = C(v_i - g_i), \qquad g_i \leftarrow g_i + c_i \\
        x &\leftarrow x - \gamma\, \tfrac1n \sum_i g_i

    The first round sends :math:`v_i = g_i = \hat g_i` whole, the paper's initialisation
    (with ``B_init`` the batch of the local work), or starts from zeros. Without
    compression this is distributed SGD with momentum; with momentum 0, EF21-SGD.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule.
      rule: aggregator of the memories :math:`g_i`. None: ``mean()``, the paper's.
      num_clients: n, Byzantine clients included.
      compressor: contractive link from :mod:`jaxfed.compressors`, or
        ``optax.identity()``. None: ``top_k(0.1)``, a default of ours.
      momentum: weight kept, ``0 <= momentum < 1``.
      start: ``"gradient"``, or ``"zero"``: :math:`v_i = g_i = 0` before round one.
      local_work: e.g. ``gradient(loss_fn, batch_size=1)``.

    Returns:
      FedAlgorithm.

    Raises:
      TypeError: if ``compressor`` is no optax transformation.
      ValueError: for values out of these ranges.

    Cost:
      Two parameter copies per client and one per client on the server.

    References:
      Fatkhullin, Tyurin and Richtarik, `Momentum Provably Improves Error Feedback!
      <https://arxiv.org/abs/2305.15155>`_, 2023, Algorithm 1.
    """
    _validate.positive("learning_rate", learning_rate)
    _validate.unit_interval("momentum", momentum)
    _validate.choice("start", start, ("gradient", "zero"))
    if compressor is None:
        compressor = compressors.top_k(0.1)
    elif not isinstance(compressor, optax.GradientTransformation):
        raise TypeError(
            "compressor must be a link such as jaxfed.compressors.top_k(0.1), got "
            f"{compressor!r}."
        )
    rule = mean() if rule is None else rule
    whole = start == "gradient"
    return from_chains(
        local_work,
        optax.chain(
            _momentum(momentum) if whole else links.ema(momentum),
            compressors.error_feedback(compressor, exact_start=whole),
        ),
        (
            links.per_client(links.accumulate(1.0), num_clients),
            rule,
            optax.sgd(learning_rate),
        ),
        rule=rule,
    )
