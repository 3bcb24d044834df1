# SPDX-License-Identifier: Apache-2.0
"""Attacks formed where the server aggregates, not where clients send."""

import jax
import jax.numpy as jnp
import optax

from jaxfed import _tree, _validate
from jaxfed._base import Attack


def in_momentum_space(attack, server_momentum) -> Attack:
    r"""Form an attack in the space of ByzULDP's server momentum.

    The server aggregates :math:`M_i = \beta \tilde R + (1 - \beta) m_i` with the
    anchor :math:`\tilde R` it published. The inner attack sees all :math:`M_i` and
    says what they should be for Byzantine clients, which then send
    :math:`(M_i - \beta \tilde R) / (1 - \beta)`. Attacks that are affine in the
    honest messages (ALIE, mimic) do not change; multiples of the mean (bit flip, IPM)
    do. This is the reading ``space="M"`` of the paper; the attack itself is ``"m"``.

    Args:
      attack: Attack on the wire.
      server_momentum: beta, ``0 <= beta < 1``; may be traced. A schedule is called
        with ``message["round"]``.

    Returns:
      Attack; knows what the inner one knows, and the published anchor.

    Raises:
      ValueError: if beta is outside its range; at use if the message has no
        ``"anchor"``.

    Cost:
      Two passes over the uploads besides the attack's.

    References:
      ByzULDP, appendix H.2.
    """
    _validate.unit_interval("server_momentum", server_momentum)
    inner = optax.with_extra_args_support(attack.wire)

    def update(
        uploads, state, params=None, *, byzantine, message=None, probe=None, **extra
    ):
        if message is None or "anchor" not in message:
            raise ValueError(
                "in_momentum_space needs the anchor that the server published, got no "
                'message["anchor"]: use it with the method byzuldp.'
            )
        n = _validate.stacked(uploads)
        byzantine = _validate.flags("byzantine", byzantine, n)
        uploads = jax.tree.map(jnp.asarray, uploads)
        beta, anchor = server_momentum, message["anchor"]
        beta = beta(message["round"]) if callable(beta) else beta

        def into(m, centre):
            wide = m.astype(_tree.accumulator(m.dtype))
            b = jnp.asarray(beta, wide.dtype)
            return b * centre[None].astype(wide.dtype) + (1 - b) * wide

        def back(moved, centre, like):
            b = jnp.asarray(beta, moved.dtype)
            sent = (moved - b * centre[None].astype(moved.dtype)) / (1 - b)
            return sent.astype(like.dtype)

        def sent(moved):
            return jax.tree.map(back, moved, anchor, uploads)

        moved, state = inner.update(
            jax.tree.map(into, uploads, anchor),
            state,
            params,
            byzantine=byzantine,
            message=message,
            probe=None if probe is None else lambda moved: probe(sent(moved)),
            **extra,
        )
        return _tree.where_rows(~byzantine, uploads, sent(moved)), state

    wire = optax.GradientTransformationExtraArgs(attack.wire.init, update)
    return attack._replace(wire=wire)
