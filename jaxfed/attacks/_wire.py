# SPDX-License-Identifier: Apache-2.0
"""Attacks on what crosses the wire."""

import jax
import jax.numpy as jnp

from jaxfed import _validate
from jaxfed._base import Attack
from jaxfed.attacks import _base


def none() -> Attack:
    """No attack: Byzantine clients behave honestly.

    Returns:
      Attack that changes nothing; Byzantine clients need data.
    """
    return Attack(_base.no_poison, _base.no_wire(), needs_data=True)


def ipm(scale=10.0) -> Attack:
    r"""Inner-product manipulation: send ``-scale`` times the honest clients' mean.

    The adversary sees the honest messages of the round, noise included. Against plain
    averaging of G honest and B Byzantine clients the aggregate becomes
    :math:`\frac{G - kB}{G + B}` times the honest mean.

    Args:
      scale: k >= 0, strength; may be traced.

    Returns:
      Attack on the wire; Byzantine clients need no data.

    Raises:
      ValueError: if ``scale`` is negative or not finite.

    References:
      Xie et al., `Fall of Empires <https://arxiv.org/abs/1903.03936>`_, 2020; factor
      10 as in Byz-Clip21-SGD2M, section 6.
    """
    _validate.nonnegative("scale", scale)

    def forge(updates, byzantine):
        mean = _base.honest_mean(updates, byzantine)
        return jax.tree.map(lambda x: -jnp.asarray(scale, x.dtype) * x, mean)

    return _base.replace_rows(forge)


def sign_flip(scale=1.0) -> Attack:
    """Sign flip: each Byzantine client sends ``-scale`` times its own honest message.

    The adversary knows its own data only, so Byzantine clients need shards.

    Args:
      scale: strength >= 0; may be traced.

    Returns:
      Attack on the wire.

    Raises:
      ValueError: if ``scale`` is negative or not finite.
    """
    _validate.nonnegative("scale", scale)
    attack = _base.replace_rows(
        lambda updates, byzantine: jax.tree.map(
            lambda x: -jnp.asarray(scale, x.dtype) * x, updates
        )
    )
    return attack._replace(needs_data=True)


def nan() -> Attack:
    """Send NaN in every coordinate; needs no knowledge.

    Returns:
      Attack on the wire; Byzantine clients need no data.
    """
    return _constant(jnp.nan)


def inf() -> Attack:
    """Send +inf in every coordinate; needs no knowledge.

    Returns:
      Attack on the wire; Byzantine clients need no data.
    """
    return _constant(jnp.inf)


def _constant(value):
    return _base.replace_rows(
        lambda updates, byzantine: jax.tree.map(
            lambda x: jnp.full_like(x, value), updates
        )
    )
