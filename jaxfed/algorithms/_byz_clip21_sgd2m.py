# SPDX-License-Identifier: Apache-2.0
"""Byz-Clip21-SGD2M and its per-example variant."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfed import _validate, links
from jaxfed._base import FedAlgorithm, Mechanism
from jaxfed.algorithms._build import example_clip, from_chains, needs
from jaxfed.privacy.mechanisms import clip_tree, gaussian_noise


class Clip21State(NamedTuple):
    """State of :func:`clip21`: ``shift``, the noise-free memory g, like params."""

    shift: optax.Updates


def clip21(clip_norm, step, initial=None) -> optax.GradientTransformation:
    r"""Error feedback around a clip (lines 6-7).

    Sends :math:`q = \mathrm{clip}_\tau(v - g)` and keeps
    :math:`g \leftarrow g + \hat\beta q`.

    Args:
      clip_norm: tau > 0, inf for no clip; may be traced.
      step: beta-hat in (0, 1]; may be traced.
      initial: tree like params, the first g. None: zeros.

    Returns:
      Link, like params to like params.

    Raises:
      ValueError: if ``clip_norm`` is not positive.
    """
    _validate.clip_norm(clip_norm)

    def init(params):
        return Clip21State(links.start(initial, params))

    def update(updates, state, params=None):
        del params
        q = clip_tree(jax.tree.map(jnp.subtract, updates, state.shift), clip_norm)
        shift = jax.tree.map(
            lambda g, q: g + jnp.asarray(step, q.dtype) * q, state.shift, q
        )
        return q, Clip21State(shift)

    return optax.GradientTransformation(init, update)


def byz_clip21_sgd2m(
    learning_rate,
    *,
    rule,
    num_clients,
    key,
    clip_norm,
    noise_std=0.0,
    momentum=0.9,
    server_momentum=0.99,
    memory="server",
    initial=None,
    local_work=None,
) -> FedAlgorithm:
    r"""Byz-Clip21-SGD2M: two momenta around a clipped, noised difference.

    With :math:`\beta` = 1 - ``momentum`` and :math:`\hat\beta` = 1 -
    ``server_momentum``, client i sends :math:`c_i` and the server steps along g:

    .. math::

        v_i &\leftarrow (1-\beta) v_i + \beta \hat g_i, \qquad
        q_i = \mathrm{clip}_\tau(v_i - g_i) \\
        c_i &= q_i + \mathcal N(0, \sigma_\omega^2 I), \qquad
        g_i \leftarrow g_i + \hat\beta q_i \\
        m_i &\leftarrow m_i + \hat\beta c_i, \qquad
        g = \mathrm{RAgg}(m_1, \dots, m_n), \qquad x \leftarrow x - \gamma g

    Parameters after k rounds are the paper's :math:`x^{k+1}`: its first step, along
    :math:`g^0 = 0`, is left out. Privacy is local: one replaced example moves a
    message by at most 2 tau, as does the whole client.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule.
      rule: aggregator, e.g. ``compose(nnm(f), median())``.
      num_clients: n, Byzantine clients included.
      key: typed key or int seed of the noise.
      clip_norm: tau > 0; inf for no clip.
      noise_std: sigma_omega >= 0 per coordinate of a message.
      momentum: weight kept by the client, ``0 <= momentum < 1``; paper 0.9.
      server_momentum: weight kept by the memories, ``0 <= . < 1``; paper 0.99.
      memory: who runs line 12: ``"server"``, or ``"client"``, which sends :math:`m_i`
        (same trajectory, no client state on the server).
      initial: tree like params, common first :math:`g_i = m_i`. None: zeros, as
        the theory asks; other values only with a rule that maps equal rows to it.
      local_work: e.g. ``gradient(loss_fn, batch_size=64)``.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges.

    Cost:
      Two parameter copies per client and one more per client on the server.

    References:
      Islamov et al., `Byzantine-Robust and Differentially Private Federated
      Optimization under Weaker Assumptions <https://arxiv.org/abs/2603.23472>`_,
      2026, Algorithm 1.
    """
    _validate.positive("learning_rate", learning_rate)
    step = 1 - _validate.unit_interval("server_momentum", server_momentum)
    _validate.unit_interval("momentum", momentum)
    if memory not in ("server", "client"):
        raise ValueError(f"memory must be 'server' or 'client', got {memory!r}.")
    accumulate = links.accumulate(step, initial)  # line 12
    on_client = [accumulate] if memory == "client" else []
    on_server = [] if on_client else [links.per_client(accumulate, num_clients)]
    return from_chains(
        local_work,
        optax.chain(
            links.ema(momentum),  # line 4
            clip21(clip_norm, step, initial),  # lines 6-7
            gaussian_noise(noise_std, key),  # line 5
            *on_client,
        ),
        (*on_server, rule, optax.sgd(learning_rate)),  # lines 13, 2
        rule=rule,
        mechanism=Mechanism("client", clip_norm, noise_std),
    )


@needs(two_clips=True)
def byz_clip21_sgd2m_plus(
    learning_rate,
    *,
    rule,
    num_clients,
    key,
    clip_norm=1.0,
    noise_std=0.0,
    momentum=0.9,
    server_momentum=0.99,
    noise_on="average",
    batch_size=None,
    local_work=None,
) -> FedAlgorithm:
    r"""Byz-Clip21-SGD2M+: per-example clipping and noise before the momentum.

    .. math::

        v_i &\leftarrow (1-\beta) v_i + \beta \Big(\tfrac1S \sum_{j \in S_i}
        \mathrm{clip}_{\tau_i}(\nabla f_{ij}) + \omega_i\Big) \\
        c_i &= \mathrm{clip}_{\tau_o}(v_i - g_i), \qquad
        g_i \leftarrow g_i + \hat\beta c_i, \qquad m_i \leftarrow m_i + \hat\beta c_i

    The printed sum has the same noise inside for every j, hence standard deviation
    ``noise_std`` on the average (``noise_on="average"``); the usual calibration of
    DP-SGD puts it on the sum, ``noise_std / S`` on the average
    (``noise_on="sum"``). One replaced example moves the average by 2 tau_i / S.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule.
      rule: aggregator.
      num_clients: n, Byzantine clients included.
      key: typed key or int seed of the noise.
      clip_norm: tau_o > 0, radius of the outer clip; paper 1.
      noise_std: sigma_omega >= 0.
      momentum: weight kept by the client, ``0 <= momentum < 1``; paper 0.9.
      server_momentum: weight kept by the memories, ``0 <= . < 1``; paper 0.99.
      noise_on: ``"average"`` or ``"sum"``, see above.
      batch_size: S, needed by ``noise_on="sum"`` if the local work has none.
      local_work: ``gradient(loss_fn, batch_size=S, clip_norm=tau_i)``.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges, local work without per-example
        clipping, or an unknown or contradictory S.

    Cost:
      As :func:`byz_clip21_sgd2m`, plus the per-example gradients.

    References:
      Islamov et al., `<https://arxiv.org/abs/2603.23472>`_, 2026, Algorithm 5.
    """
    _validate.positive("learning_rate", learning_rate)
    step = 1 - _validate.unit_interval("server_momentum", server_momentum)
    _validate.unit_interval("momentum", momentum)
    if noise_on not in ("average", "sum"):
        raise ValueError(f"noise_on must be 'average' or 'sum', got {noise_on!r}.")
    inner = example_clip(local_work)
    if local_work is not None and inner is None:
        raise ValueError(
            "byz_clip21_sgd2m_plus clips each example: build local_work with "
            "gradient(loss_fn, clip_norm=...), without reducer."
        )
    if noise_on == "sum":
        own = getattr(local_work, "batch_size", None)
        size = own if batch_size is None else _validate.count("batch_size", batch_size)
        if size is None:
            raise ValueError("noise_on='sum' needs the batch size: pass batch_size=.")
        if own is not None and size != own:
            raise ValueError(
                f"batch_size={size} contradicts local_work.batch_size={own}: leave it "
                "out."
            )
        _validate.nonnegative("noise_std", noise_std)
        noise_std = noise_std / size
    return from_chains(
        local_work,
        optax.chain(
            gaussian_noise(noise_std, key),
            links.ema(momentum),  # line 7
            clip21(clip_norm, step),  # line 8
        ),
        (
            links.per_client(links.accumulate(step), num_clients),
            rule,
            optax.sgd(learning_rate),
        ),
        rule=rule,
        mechanism=Mechanism(
            "example",
            inner,
            noise_std,
            nominal_norm=inner if noise_on == "average" else None,
            memoryless=True,
        ),
    )
