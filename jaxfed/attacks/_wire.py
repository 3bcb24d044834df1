# SPDX-License-Identifier: Apache-2.0
"""Attacks on what crosses the wire."""

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtri

from jaxfed import _tree, _validate
from jaxfed._base import Attack
from jaxfed.attacks import _base


def none() -> Attack:
    """No attack: Byzantine clients behave honestly.

    Returns:
      Attack that changes nothing; Byzantine clients need data.
    """
    return Attack(_base.no_poison, _base.no_wire(), True, sees_messages=False)


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

    Cost:
      One read of the uploads.

    References:
      Xie et al., `Fall of Empires <https://arxiv.org/abs/1903.03936>`_, 2020; factor
      10 as in Byz-Clip21-SGD2M, section 6.
    """
    _base.nonnegative("scale", scale)
    return _base.stateless(lambda seen: _base.scaled(-scale, seen.mean()))


def bit_flip() -> Attack:
    """Bit flip: send minus the honest clients' mean, ``ipm(scale=1)``.

    The adversary sees the honest messages of the round. Minus one's *own* message is
    :func:`sign_flip`.

    Returns:
      Attack on the wire; Byzantine clients need no data.

    Cost:
      One read of the uploads.

    References:
      ByzULDP, appendix H.2 (``B = u + gamma a`` with ``a = -u``, ``gamma = 2``).
    """
    return ipm(scale=1.0)


def sign_flip(scale=1.0) -> Attack:
    """Sign flip: each Byzantine client sends ``-scale`` times its own honest message.

    The adversary knows its own data only, so Byzantine clients need shards.

    Args:
      scale: strength >= 0; may be traced.

    Returns:
      Attack on the wire.

    Raises:
      ValueError: if ``scale`` is negative or not finite.

    References:
      DRAG, section VI-B (SF).
    """
    _base.nonnegative("scale", scale)
    return _base.stateless(
        lambda seen: _base.scaled(-scale, seen.updates),
        needs_data=True,
        sees_messages=False,
    )


def alie(z=None, *, ddof=1) -> Attack:
    r"""A little is enough: send the honest mean minus ``z`` standard deviations.

    :math:`\mu - z\,s` with the coordinate-wise standard deviation s of the honest
    messages, which the adversary sees, noise included. Without ``z`` it is the largest
    shift that enough honest clients exceed to lend the attackers a majority,

    .. math:: z = \Phi^{-1}\Big(\frac{n - f - s}{n - f}\Big), \quad
        s = \lfloor n/2 \rfloor + 1 - f,

    for the n clients and f Byzantine ones of the round (0.42706 for 250 of 1000;
    negative for few attackers among an even number of clients). Where that has no
    finite value, the fraction is kept half a client away from 0 and 1.

    Args:
      z: any finite number, or None for the value above; may be traced. Negative
        values add, as some libraries do.
      ddof: ``honest - ddof`` divides the squares: 1 is the sample's standard
        deviation, 0 the population's. One honest client has standard deviation 0.

    Returns:
      Attack on the wire; Byzantine clients need no data.

    Raises:
      ValueError: if ``z`` is not finite, or ``ddof`` is neither 0 nor 1.

    Cost:
      Two reads of the uploads and one copy of them.

    References:
      Baruch et al., `A Little Is Enough <https://arxiv.org/abs/1902.06156>`_, 2019.
    """
    if z is not None:
        _base.finite("z", z)
    _validate.count("ddof", ddof, minimum=0, maximum=1)

    def forge(seen):
        mean = seen.mean()
        strength = _z_max(seen) if z is None else z
        return _base.moved(mean, -strength, seen.std(mean, ddof))

    return _base.stateless(forge)


def _z_max(seen):
    n, honest = seen.byzantine.size, seen.num_honest
    supporters = n // 2 + 1 - (n - honest)
    margin = 0.5 / honest
    return ndtri(jnp.clip((honest - supporters) / honest, margin, 1 - margin))


def gaussian_noise(std=1.0, *, key=0) -> Attack:
    r"""Send Gaussian noise, independent for every Byzantine client and round.

    :math:`\mathcal N(0, \sigma^2 I)` in place of the message. The adversary knows
    nothing but the shapes.

    Args:
      std: sigma >= 0; may be traced.
      key: typed key or int seed, used where the caller of the link gives no key of
        the round; ``jaxfed.simulate`` does.

    Returns:
      Attack on the wire; Byzantine clients need no data.

    Raises:
      ValueError: if ``std`` is negative or not finite, or the key is legacy.

    Cost:
      One normal number for each entry of the uploads.

    References:
      DRAG, section I-A (noise injection); its experiments use :func:`scalar_noise`.
    """
    _base.nonnegative("std", std)
    return _base.random_rows(
        lambda k, own, seen: _base.scaled(std, _base.normal_like(k, own)),
        key,
        sees_messages=False,
    )


def scalar_noise(std=3**0.5, *, key=0) -> Attack:
    r"""Send the own honest message times one Gaussian number, fresh in each round.

    :math:`p\, g` with :math:`p \sim \mathcal N(0, \sigma^2)` for each client and
    round. The adversary knows its own data only. The paper writes N(0, 3): the default
    reads it as variance 3; ``std=3`` is the other reading.

    Args:
      std: sigma >= 0; may be traced.
      key: typed key or int seed, used where the caller of the link gives no key of
        the round; ``jaxfed.simulate`` does.

    Returns:
      Attack on the wire; Byzantine clients need shards.

    Raises:
      ValueError: if ``std`` is negative or not finite, or the key is legacy.

    References:
      DRAG, section VI-B (NI).
    """
    _base.nonnegative("std", std)
    return _base.random_rows(
        lambda k, own, seen: _base.scaled(std * jax.random.normal(k), own),
        key,
        needs_data=True,
        sees_messages=False,
    )


def random(scale=1.0, *, key=0) -> Attack:
    """Send random directions with ``scale`` times the norm of the honest mean.

    Every Byzantine client draws its own direction, uniform on the sphere; the norm is
    over the whole message. The adversary sees the honest messages of the round, and
    uses their mean's norm only.

    Args:
      scale: >= 0; may be traced.
      key: typed key or int seed, used where the caller of the link gives no key of
        the round; ``jaxfed.simulate`` does.

    Returns:
      Attack on the wire; Byzantine clients need no data.

    Raises:
      ValueError: if ``scale`` is negative or not finite, or the key is legacy.

    Cost:
      One read of the uploads and one normal number for each of their entries.
    """
    _base.nonnegative("scale", scale)

    def draw(k, own, seen):
        noise = _base.normal_like(k, own)
        return _base.scaled(scale * _tree.norm(seen.mean()) / _tree.norm(noise), noise)

    return _base.random_rows(draw, key)


def zero() -> Attack:
    """Send zeros, as a client that is absent might; needs no knowledge.

    Returns:
      Attack on the wire; Byzantine clients need no data.
    """
    return _constant(0.0)


def copies() -> Attack:
    """Send a copy of the first honest client's message.

    The adversary sees that message, noise included; one client's data thus counts
    ``f + 1`` times.

    Returns:
      Attack on the wire; Byzantine clients need no data.
    """

    def forge(seen):
        first = jnp.argmin(seen.byzantine)
        return jax.tree.map(lambda x: x[first], seen.uploads)

    return _base.stateless(forge)


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
    return _base.stateless(
        lambda seen: jax.tree.map(lambda x: jnp.full_like(x, value), seen.uploads),
        sees_messages=False,
    )
