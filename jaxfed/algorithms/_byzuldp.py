# SPDX-License-Identifier: Apache-2.0
"""ByzULDP: two-level momentum, and noise behind the rule."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfed import _keys, _validate, links
from jaxfed._base import Aggregator, FedAlgorithm, Mechanism
from jaxfed.algorithms._build import from_chains, needs
from jaxfed.privacy.mechanisms import (
    GaussianNoiseState,
    clip,
    clip_tree,
    gaussian_noise,
)
from jaxfed.privacy.sensitivity import MODES


class AnchoredState(NamedTuple):
    """State of :func:`anchored`.

    Attributes:
      anchor: like params, the last noised aggregate; zeros at first.
      noise: key, and the number of rounds so far.
      rule: the rule's state, without anything that was not noised.
    """

    anchor: optax.Updates
    noise: GaussianNoiseState
    rule: optax.OptState


def anchored(
    rule, server_momentum, *, key, noise_std=0.0, num_clients=None, clip_norm=None
) -> Aggregator:
    r"""Put server momentum before a rule and noise behind it (lines 11-15).

    .. math::

        M_i = \beta_t \tilde R + (1-\beta_t) m_i, \qquad
        \tilde R \leftarrow \mathrm{RAgg}(M_1, \dots, M_n) + \mathcal N(0, \sigma_t^2 I)

    A rule that starts from a point (centred clipping) starts from the last
    :math:`\tilde R`, which was published, never from its own memory.

    Args:
      rule: aggregator.
      server_momentum: beta, ``0 <= beta < 1``; number, traced or schedule.
      key: typed key or int seed of the noise, which is drawn by round.
      noise_std: sigma >= 0 per coordinate; number, traced or schedule.
      num_clients: n that the noise was computed for. With noise, all of them must be
        there in every round.
      clip_norm: radius to which rows are scaled down first; None: they are not.

    Returns:
      Aggregator with :class:`AnchoredState`.

    Raises:
      ValueError: with noise: for a rule that remembers aggregates without noise, at
        ``init``; at trace time for absent or weighted clients.

    Cost:
      One stacked copy of the updates.
    """
    key = _keys.as_key(key)
    silent = _validate.is_zero(noise_std)
    from_point = rule.geometric is not None and "reference" in rule.geometric.anchors

    def link(round):
        return gaussian_noise(links.at_round(noise_std, round), key)

    def init(params):
        state = rule.init(params)
        if not silent and not from_point and any(map(_inexact, jax.tree.leaves(state))):
            raise ValueError(
                "this rule remembers aggregates without noise, so that one client's "
                "influence grows over the rounds: use one without memory, or "
                "noise_std=0.0."
            )
        return AnchoredState(links.start(None, params), link(0).init(params), state)

    def around(updates, state, extra):
        n = _validate.stacked(updates)
        if not silent:
            _everybody(n, num_clients, extra)
        if clip_norm is not None:
            updates = jax.vmap(lambda u: clip_tree(u, clip_norm))(updates)
        past = jax.tree.map(lambda r: r[None], state.anchor)
        kept = links.at_round(server_momentum, state.noise.count)
        moved = links.average_of(updates, past, kept)
        return moved, extra | {"reference": state.anchor}

    def publish(aggregate, new, state):
        if from_point:
            new = jax.tree.map(lambda a, b: b if _inexact(b) else a, new, state.rule)
        noised, noise = link(state.noise.count).update(aggregate, state.noise)
        return noised, AnchoredState(noised, noise, new)

    def update(updates, state, params=None, **extra):
        moved, extra = around(updates, state, extra)
        return publish(*rule.update(moved, state.rule, params, **extra), state)

    def observe(updates, state, params=None, *, byzantine=None, **extra):
        moved, extra = around(updates, state, extra)
        aggregate, new, info = rule.observe(
            moved, state.rule, params, byzantine=byzantine, **extra
        )
        return *publish(aggregate, new, state), info

    def inspect(updates, state, **extra):
        moved, extra = around(updates, state, extra)
        return rule.inspect(moved, state.rule, **extra)

    return Aggregator(
        init,
        update,
        inspect=inspect,
        observe=observe,
        num_byzantine=rule.num_byzantine,
    )


@needs(rule="trimmed_mean")
def byzuldp(
    learning_rate,
    *,
    rule,
    num_clients,
    key,
    clip_norm=1.0,
    noise_std=0.0,
    momentum=0.1,
    server_momentum=0.85,
    sensitivity=None,
    mode="tight",
    dim=None,
    local_work=None,
) -> FedAlgorithm:
    r"""ByzULDP: user-level privacy from noise behind the rule, in two momenta.

    .. math::

        m_i &\leftarrow \alpha_t m_i + (1-\alpha_t)\, \mathrm{clip}_C(\hat g_i), \qquad
        M_i = \beta_t \tilde R + (1-\beta_t) m_i \\
        \tilde R &\leftarrow \mathrm{RAgg}(M_1, \dots, M_n) + \mathcal N(0, \sigma_t^2
        I), \qquad x \leftarrow x - \eta_t \tilde R

    The message of a round also holds ``"anchor"``, the :math:`\tilde R` of the round
    before. The server is trusted; what it publishes hides any one honest client's whole
    data. ``mechanism.bound`` is that client's influence on the aggregate,
    :math:`\Delta_t = (1-\beta_t)` times the rule's sensitivity (for centred clipping
    see :func:`jaxfed.privacy.sensitivity.centered_clipping`), at round 0. Accounting
    for T rounds holds if :math:`\Delta_t/\sigma_t` does not grow: a number
    ``noise_std`` under a scheduled ``server_momentum`` is the noise of round 0 and
    follows :math:`\Delta_t`; a schedule is taken at its word.

    ``momentum=0`` sends clipped gradients. ``server_momentum=0`` is plain robust
    aggregation with noise; by translation and scale equivariance (not of centred
    clipping) any other value takes a moving average of its outputs. With the mean and
    both 0 it is DP-FedSGD.

    Args:
      learning_rate: eta > 0, number, traced scalar or schedule.
      rule: aggregator, e.g. ``trimmed_mean(f)``; with noise it must know its
        sensitivity: trimmed mean, median, and, with every row scaled down to C first,
        mean, geometric median and Krum; centred clipping moves from the last
        :math:`\tilde R`.
      num_clients: n; with noise all take part in every round.
      key: typed key or int seed of the noise.
      clip_norm: C > 0, clips a client's gradient; the paper does not say its own.
      noise_std: sigma >= 0 per coordinate of the aggregate, number, traced scalar or
        schedule ``round -> sigma``.
      momentum: alpha, weight kept by the client, ``0 <= alpha < 1``, or schedule.
      server_momentum: beta, weight kept by the server, ``0 <= beta < 1``, or schedule.
      sensitivity: L2 distance by which one client moves the aggregate of a round, all
        factors included, for a rule that does not know (else it raises); rows are then
        scaled down to C. The proof is yours, and the privacy statement says so.
      mode: ``"tight"`` sensitivities or the ones of the ``"paper"``.
      dim: number of parameters, for the paper's median only.
      local_work: e.g. ``gradient(loss_fn, batch_size=20)``.

    Returns:
      FedAlgorithm.

    Raises:
      TypeError: if ``rule`` is not an aggregator.
      ValueError: for values out of these ranges; for noise behind a rule whose
        sensitivity is not known; at trace time as :func:`anchored`.

    Cost:
      One parameter copy per client; a stacked copy of the messages in each round.

    References:
      Xiang et al., `Optimal Byzantine-resilient Federated Learning with User-level
      Differential Privacy <https://arxiv.org/abs/2611.10898>`_, 2026, Algorithm 1.
    """
    if not isinstance(rule, Aggregator):
        raise TypeError(f"rule must be an aggregator, got {rule!r}.")
    _validate.count("num_clients", num_clients)
    _validate.positive("learning_rate", learning_rate)
    _validate.unit_interval("momentum", links.at_round(momentum, 0))
    _validate.unit_interval("server_momentum", links.at_round(server_momentum, 0))
    _validate.nonnegative("noise_std", links.at_round(noise_std, 0))
    known = rule.sensitivity
    silent = _validate.is_zero(noise_std)
    _validate.choice("mode", mode, MODES)
    if sensitivity is not None:
        _validate.positive("sensitivity", sensitivity)
        if known is not None:
            raise ValueError(
                f"sensitivity={sensitivity} was given for a rule that knows its own "
                "(mode='tight' or 'paper'): leave it out."
            )
    elif known is None and not silent:
        raise ValueError(
            "noise behind a rule of unknown sensitivity protects nobody: use mean, "
            "trimmed_mean, median, geometric_median, krum or centered_clipping without "
            "other stages, or pass sensitivity=, how far one client can move the "
            'aggregate (--algorithm "byzuldp(sensitivity=...)" on the command line).'
        )

    def moved_by_one(round):
        if sensitivity is not None:
            return sensitivity
        if known is None:
            return math.inf
        # All rows share the anchor, and no rule's sensitivity sees a shift.
        radius = (1 - links.at_round(server_momentum, round)) * clip_norm
        return known.bound(num_clients, radius, dim=dim, mode=mode)

    bound = moved_by_one(0)

    def following(round):
        return noise_std * (moved_by_one(round) / bound)

    follows = callable(server_momentum) and not callable(noise_std) and not silent
    # Bounds need it of some rules, floats of sums: beside a row of length 2**27,
    # rounding hides both a client and the noise.
    short = sensitivity is not None or (
        known is not None and (known.bounded_inputs or (known.adds_up and not silent))
    )
    wrapped = anchored(
        rule,
        server_momentum,
        key=key,
        noise_std=following if follows else noise_std,
        num_clients=num_clients,
        clip_norm=clip_norm if short else None,
    )
    algorithm = from_chains(
        local_work,
        optax.chain(clip(clip_norm), links.ema(momentum)),  # lines 6-7
        (wrapped, optax.sgd(learning_rate)),  # lines 11-16
        rule=wrapped,
        mechanism=Mechanism(
            "client",
            clip_norm,
            links.at_round(noise_std, 0),
            model="central",
            bound=bound,
            source=mode if sensitivity is None else "asserted",
            nominal=math.sqrt(8),  # Theorem 2
        ),
    )
    server = algorithm.server

    def broadcast(sstate):
        return server.broadcast(sstate) | {"anchor": sstate.inner[1].anchor}

    return algorithm._replace(server=server._replace(broadcast=broadcast))


def _inexact(x):
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _everybody(n, num_clients, extra):
    """Raise unless all clients take part with equal weights, as the noise assumes."""
    if n != num_clients:
        raise ValueError(
            f"the noise was computed for num_clients={num_clients}, got {n} rows: "
            "private rounds need every client."
        )
    for name in ("mask", "weights"):
        if extra.get(name) is not None:
            raise ValueError(
                f"{name}= changes how far one client moves the aggregate, and the "
                "noise does not know: leave it out, or use noise_std=0.0."
            )
