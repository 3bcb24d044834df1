# SPDX-License-Identifier: Apache-2.0
"""Private methods with one fault each, which an audit must find.

A mutant claims what the method of its case claims. Faults of the noise or of the clip
are factors, so that they run in the program of the case.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import audit_cases
import jax
import jax.numpy as jnp
import optax
from audit_cases import CORRECT, TAU, Case

from jaxfed import aggregators, links
from jaxfed.algorithms._build import from_chains
from jaxfed.algorithms._byz_clip21_sgd2m import clip21
from jaxfed.privacy.mechanisms import (
    GaussianNoiseState,
    clip,
    clip_tree,
    gaussian_noise,
)


class Mutant(NamedTuple):
    """A case and its fault.

    Attributes:
      case: what it claims to be.
      build: the faulty method; None: the case's own.
      noise: factor of the noise.
      clip: factor of the clip radius.
    """

    case: Case
    build: Callable | None = None
    noise: float = 1.0
    clip: float = 1.0


def same_key_every_round(build):
    """Clients who always believe that it is round 0 when they draw their noise."""

    def faulty(*args):
        algorithm = build(*args)
        client = algorithm.client

        def update(message, *rest):
            return client.update(message | {"round": jnp.int32(0)}, *rest)

        return algorithm._replace(client=client._replace(update=update))

    return faulty


def same_key_every_client(build):
    """Clients who all draw the noise of client 0."""

    def faulty(*args):
        algorithm = build(*args)
        client = algorithm.client
        first = client._replace(init=lambda params, client_id: client.init(params, 0))
        return algorithm._replace(client=first)

    return faulty


def server_forgets_the_round(build):
    """A server whose noise link counts no rounds."""

    def is_noise(x):
        return isinstance(x, GaussianNoiseState)

    def forget(x):
        return x._replace(count=jnp.zeros_like(x.count)) if is_noise(x) else x

    def faulty(*args):
        algorithm = build(*args)
        server = algorithm.server

        def update(uploads, state, **extra):
            state, info = server.update(uploads, state, **extra)
            inner = jax.tree.map(forget, state.inner, is_leaf=is_noise)
            return state._replace(inner=inner), info

        return algorithm._replace(server=server._replace(update=update))

    return faulty


def _faulty_client(*client_links):
    """Build a method whose clients run the links and whose server averages."""
    rule = aggregators.mean()
    return from_chains(
        audit_cases.work, optax.chain(*client_links), (rule, optax.sgd(0.1)), rule=rule
    )


def _memory_is_sent(link):
    """Send the noise-free memory of an error feedback instead of the clipped step."""

    def update(updates, state, params=None):
        _, state = link.update(updates, state, params)
        return state.shift, state

    return optax.GradientTransformation(link.init, update)


def clip21_sends_its_memory(key, noise_std, clip_norm):
    """Byz-Clip21-SGD2M that sends g, with fresh noise, instead of q."""
    return _faulty_client(
        links.ema(0.5),
        _memory_is_sent(clip21(clip_norm, 1.0)),
        gaussian_noise(noise_std, key),
    )


def _residual_after_clip(clip_norm, share):
    """Error feedback that adds what was clipped off behind the next clip."""

    def update(updates, residual, params=None):
        del params
        clipped = clip_tree(updates, clip_norm)
        sent = jax.tree.map(lambda c, r: c + share * r, clipped, residual)
        left = jax.tree.map(jnp.subtract, updates, clipped)
        return sent, left

    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )


def residual_added_after_the_clip(key, noise_std, clip_norm, share=1e-3):
    """Byz-Clip-SGD with a share of the last residual added behind the clip."""
    return _faulty_client(
        _residual_after_clip(clip_norm, share), gaussian_noise(noise_std, key)
    )


def rule_keeps_its_own_memory(key, noise_std, clip_norm):
    """Centred clipping around its own aggregate, which nobody noised."""
    rule = aggregators.centered_clipping(clip_norm=TAU)
    return from_chains(
        audit_cases.work,
        clip(clip_norm),
        (rule, gaussian_noise(noise_std, key), optax.sgd(0.1)),
        rule=rule,
    )


_CLIENT = CORRECT["byz_clip_sgd"]
_CLIP21 = CORRECT["byz_clip21_sgd2m, trimmed mean"]
_SERVER = CORRECT["dp_fedavg"]
_ULDP = CORRECT["byzuldp, trimmed mean"]
_CENTRED = CORRECT["byzuldp, centred clipping"]

MUTANTS = {
    "local: noise off": Mutant(_CLIENT, noise=0.0),
    "local: noise 1/3": Mutant(_CLIENT, noise=1 / 3),
    "local: clip skipped": Mutant(_CLIENT, clip=math.inf),
    "local: key reused over rounds": Mutant(
        _CLIENT, same_key_every_round(_CLIENT.build)
    ),
    "local: key reused over clients": Mutant(
        _CLIENT, same_key_every_client(_CLIENT.build)
    ),
    "local: noise-free memory sent": Mutant(_CLIP21, clip21_sends_its_memory),
    "local: residual added after the clip": Mutant(
        _CLIENT, residual_added_after_the_clip
    ),
    "local: removal counted, not replacement": Mutant(_CLIENT, noise=1 / 2),
    "central: noise off": Mutant(_ULDP, noise=0.0),
    "central: noise 1/3": Mutant(_ULDP, noise=1 / 3),
    "central: clip skipped": Mutant(_SERVER, clip=math.inf),
    "central: key reused over rounds": Mutant(
        _SERVER, server_forgets_the_round(_SERVER.build)
    ),
    "central: rule keeps noise-free memory": Mutant(
        _CENTRED, rule_keeps_its_own_memory
    ),
    "central: noise of the sum on the mean": Mutant(_SERVER, noise=1 / _SERVER.n),
}


def run(mutant, **options):
    return audit_cases.run(
        mutant.case,
        build=mutant.build,
        noise=mutant.noise,
        clip=mutant.clip,
        **options,
    )
