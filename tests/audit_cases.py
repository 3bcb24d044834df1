# SPDX-License-Identifier: Apache-2.0
"""Private methods as they should be, each with its claim, and programs to audit them.

Gradients are those of linear losses and far longer than the clip radius; step sizes and
momenta are chosen so that what is sent or published keeps what the noise does not hide.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import toys

import jaxfed
from jaxfed import aggregators as agg
from jaxfed.algorithms._alpha_norm import alpha_norm
from jaxfed.algorithms._byz_clip21_sgd2m import (
    byz_clip21_sgd2m,
    byz_clip21_sgd2m_plus,
)
from jaxfed.algorithms._byzuldp import byzuldp
from jaxfed.algorithms._cafcor import cafcor
from jaxfed.algorithms._dp_brem import dp_brem
from jaxfed.algorithms._dp_fedavg import dp_fedavg
from jaxfed.algorithms._safe_dgd import safe_dgd, safe_dsgd
from jaxfed.algorithms._safe_dshb import byz_clip_sgd, safe_dshb
from jaxfed.privacy import audit, certified_noise_std, composition
from jaxfed.privacy.correlated import secret_noise_std

DELTA, ROUNDS, DIM, CLIP, EPSILON = 1e-2, 6, 2, 0.8, 2.0
TAU = 0.2  # of centred clipping
TRIALS = 12_000


class Case(NamedTuple):
    """One method, its neighbouring worlds and its adversary.

    Attributes:
      build: ``(key, noise_std, clip_norm) -> FedAlgorithm``.
      n: clients.
      f: Byzantine clients.
      view: what the adversary sees.
      unit: whether one client's data or one example changes.
      examples: of each client.
      cohort: clients of a round, None for all.
      effective: noise by which the claim is made, from ``noise_std``.
      clip_norm: radius of the clip.
      drawn: the draw of examples or clients that the claim credits.
    """

    build: Callable
    n: int = 5
    f: int = 0
    view: str = "local"
    unit: str = "client"
    examples: int = 1
    cohort: int | None = None
    effective: Callable = float
    clip_norm: float = CLIP
    drawn: composition.Sampling = composition.ALL

    @property
    def noise_std(self):
        """Noise that the method needs for EPSILON, by its own mechanism."""
        multiplier = composition.noise_multiplier(
            EPSILON, DELTA, ROUNDS, sampling=self.drawn, accountant=self._accountant
        )
        return multiplier * self._sensitivity(1.0) / self.effective(1.0)

    @property
    def claim(self):
        """The certified epsilon of the method with that noise."""
        noise_std = self.noise_std
        multiplier = self.effective(noise_std) / self._sensitivity(noise_std)
        phase = composition.Phase(ROUNDS, multiplier, self.drawn)
        return composition.epsilon(phase, DELTA, accountant=self._accountant)

    @property
    def _accountant(self):
        return "exact" if self.drawn == composition.ALL else "pld"

    def _sensitivity(self, noise_std):
        mechanism = self.build(0, noise_std, self.clip_norm).mechanism
        assert (mechanism.model, mechanism.unit) == (self.view, self.unit)
        assert self.drawn == composition.ALL or mechanism.memoryless
        batch = self.drawn.size if self.unit == "example" else None
        return mechanism.sensitivity(batch or self.examples)

    def worlds(self, **options):
        if self.unit == "client":
            return audit.client_canary(
                self.n, DIM, ROUNDS, num_byzantine=self.f, **options
            )
        return audit.example_canary(self.n, self.examples, DIM, ROUNDS, **options)


def confidence():
    """Confidence of one audit for 0.99 of all correct cases together."""
    return 1 - 0.01 / (len(CORRECT) + len(ONE_RUN))


def byzantine_upload(params, client_id):
    """Push along the model and, in turn, to both ends of the first axis."""
    sign = jnp.where(client_id % 2, 1.0, -1.0)
    return jnp.sin(params) + (100 * sign * jnp.eye(1, DIM))[0]


@functools.cache
def _program(build, n, f, view, unit, examples, cohort):
    case = Case(build, n, f, view, unit, examples, cohort)
    worlds = audit.two_worlds(*case.worlds())

    def program(key, noise_std, clip_norm):
        return audit.transcripts(
            lambda k: build(k, noise_std, clip_norm),
            worlds,
            audit.sides(TRIALS),
            params=jnp.zeros(DIM),
            rounds=ROUNDS,
            key=key,
            view=view,
            num_byzantine=f,
            attack=audit.published_only(byzantine_upload) if f else None,
            cohort_size=cohort,
        )

    return toys.quick_jit(program)


def run(case, *, build=None, noise=1.0, clip=1.0, seed=0):
    """Audit a case, or what a fault has made of it, against the claim of the case."""
    program = _program(build or case.build, *case[1:7])
    seen = program(jax.random.key(seed), noise * case.noise_std, clip * case.clip_norm)
    return audit.judge(seen, delta=DELTA, epsilon=case.claim, confidence=confidence())


work = jaxfed.gradient(audit.linear_loss)
several_steps = jaxfed.local_sgd(audit.linear_loss, optax.sgd(0.5), steps=2)


def clipped(clip_norm, batch_size=None):
    return jaxfed.gradient(
        audit.linear_loss, clip_norm=clip_norm, batch_size=batch_size
    )


def _byz_clip21(rule, n):
    def build(key, noise_std, clip_norm):
        return byz_clip21_sgd2m(
            0.1,
            rule=rule,
            num_clients=n,
            key=key,
            clip_norm=clip_norm,
            noise_std=noise_std,
            momentum=0.5,
            server_momentum=0.5,
            local_work=work,
        )

    return build


def _byz_clip21_plus(key, noise_std, clip_norm):
    return byz_clip21_sgd2m_plus(
        0.1,
        rule=agg.median(),
        num_clients=3,
        key=key,
        clip_norm=100.0,
        noise_std=noise_std,
        momentum=0.5,
        server_momentum=0.5,
        local_work=clipped(clip_norm),
    )


def _safe_dshb(batch_size=None):
    def build(key, noise_std, clip_norm):
        return safe_dshb(
            0.1,
            rule=agg.mean(),
            key=key,
            noise_std=noise_std,
            momentum=0.5,
            local_work=clipped(clip_norm, batch_size),
        )

    return build


def _safe_dgd(key, noise_std, clip_norm):
    return safe_dgd(
        0.1,
        rule=agg.smea(1),
        key=key,
        noise_std=noise_std,
        radius=1.0,
        local_work=clipped(clip_norm),
    )


def _safe_dsgd(key, noise_std, clip_norm):
    return safe_dsgd(
        0.1,
        rule=agg.mean(),
        key=key,
        noise_std=noise_std,
        local_work=clipped(clip_norm, batch_size=1),
    )


def _byz_clip_sgd(key, noise_std, clip_norm):
    return byz_clip_sgd(
        0.1,
        rule=agg.mean(),
        key=key,
        clip_norm=clip_norm,
        noise_std=noise_std,
        local_work=work,
    )


def _byzuldp(rule, n, server_momentum=0.5):
    def build(key, noise_std, clip_norm):
        return byzuldp(
            0.1,
            rule=rule,
            num_clients=n,
            key=key,
            clip_norm=clip_norm,
            noise_std=noise_std,
            momentum=0.0,
            server_momentum=server_momentum,
            local_work=work,
        )

    return build


def dp_fedavg_of(n, cohort=None, work=several_steps):
    def build(key, noise_std, clip_norm):
        return dp_fedavg(
            num_clients=n,
            key=key,
            clip_norm=clip_norm,
            noise_std=noise_std,
            cohort_size=cohort,
            local_work=work,
        )

    return build


def _dp_brem(key, noise_std, clip_norm):
    return dp_brem(
        0.1,
        key=key,
        clip_norm=100.0,
        noise_std=noise_std,
        momentum=0.1,
        local_work=clipped(clip_norm),
    )


def _cafcor(key, noise_std, clip_norm):
    return cafcor(
        0.1,
        num_byzantine=1,
        num_clients=5,
        key=key,
        clip_norm=clip_norm,
        noise_std=noise_std,
        momentum=0.5,
        local_work=work,
    )


def _alpha_norm(key, noise_std, clip_norm):
    del clip_norm
    return alpha_norm(
        0.1,
        num_clients=3,
        key=key,
        noise_std=noise_std,
        server_step="plain",
        local_work=work,
    )


_central = functools.partial(Case, view="central")

CORRECT = {
    "byz_clip21_sgd2m, trimmed mean": Case(
        _byz_clip21(agg.trimmed_mean(1), 5), n=5, f=1
    ),
    "byz_clip21_sgd2m_plus": Case(_byz_clip21_plus, n=3, unit="example", examples=4),
    "safe_dshb": Case(_safe_dshb(), n=3, unit="example", examples=4),
    "safe_dshb, draw of 2 of 4 credited": Case(
        _safe_dshb(batch_size=2),
        n=3,
        unit="example",
        examples=4,
        drawn=composition.without_replacement(2, 4),
    ),
    "safe_dgd, smea": Case(_safe_dgd, n=5, f=1, unit="example", examples=4),
    "safe_dsgd": Case(_safe_dsgd, n=3, unit="example"),
    "byz_clip_sgd": Case(_byz_clip_sgd, n=3),
    "cafcor, secrets kept": Case(
        _cafcor, n=5, effective=lambda std: secret_noise_std(std, std, 5)
    ),
    "alpha_norm": Case(_alpha_norm, n=3),
    "byzuldp, trimmed mean": _central(_byzuldp(agg.trimmed_mean(2), 9), n=9, f=2),
    "byzuldp, median": _central(_byzuldp(agg.median(), 5)),
    "byzuldp, krum": _central(_byzuldp(agg.krum(1, neighbors="n-f-1"), 6), n=6, f=1),
    "byzuldp, geometric median": _central(
        _byzuldp(agg.geometric_median(iterations=8), 5)
    ),
    "byzuldp, centred clipping": _central(
        _byzuldp(agg.centered_clipping(clip_norm=TAU), 5, server_momentum=0.0),
        clip_norm=8.0,  # so that messages stay far from a centre that walks
    ),
    "dp_fedavg": _central(dp_fedavg_of(5)),
    "dp_fedavg, cohort 3 of 5": _central(dp_fedavg_of(5, 3), cohort=3),
    "dp_fedavg, draw of 3 of 5 credited": _central(
        dp_fedavg_of(5, 3), cohort=3, drawn=composition.without_replacement(3, 5)
    ),
    "dp_brem": _central(_dp_brem, n=3, unit="example", examples=4),
}


class OneRun(NamedTuple):
    """A method with many canaries in each run.

    Attributes:
      build: ``(key, noise_std, clip_norm) -> FedAlgorithm``.
      world: ``(round, secret) -> Shard``.
      score: ``(transcript) -> [canaries]``.
      view: what the adversary sees.
      unit: whether a canary is a client or an example.
      examples: of each client.
    """

    build: Callable
    world: Callable
    score: Callable
    view: str
    unit: str
    examples: int


CANARIES, GUESSES, ONE_ROUNDS, ONE_EPSILON, ONE_DELTA = 1000, 300, 4, 2.0, 1e-6


def _one_safe_dgd(key, noise_std, clip_norm):
    return safe_dgd(
        0.1,
        rule=agg.mean(),
        key=key,
        noise_std=noise_std,
        local_work=clipped(clip_norm),
    )


ONE_RUN = {
    "one run, dp_fedavg, 1000 clients": OneRun(
        dp_fedavg_of(CANARIES, work=work),
        audit.client_canaries(CANARIES),
        lambda seen: -seen[-1][-1],  # the last model: descent from the origin
        "central",
        "client",
        1,
    ),
    "one run, safe_dgd, 1000 examples": OneRun(
        _one_safe_dgd,
        audit.example_canaries(2, CANARIES),
        lambda seen: jnp.sum(seen[:, 0], axis=0),
        "local",
        "example",
        CANARIES,
    ),
}


@functools.cache
def _one_run_program(case):
    def program(key, secrets, noise_std):
        return audit.transcripts(
            lambda k: case.build(k, noise_std, CLIP),
            case.world,
            secrets,
            params=jnp.zeros(CANARIES),
            rounds=ONE_ROUNDS,
            key=key,
            view=case.view,
            statistic=case.score,
        )

    return toys.quick_jit(program)


def one_run(case, *, noise=1.0, seed=0):
    """Audit a case of ONE_RUN with its noise, or a part of it."""
    sensitivity = case.build(0, 1.0, CLIP).mechanism.sensitivity(case.examples)
    noise_std = certified_noise_std(ONE_EPSILON, sensitivity, ONE_DELTA, ONE_ROUNDS)
    secrets = audit.coins(seed, 1, CANARIES)
    scores = _one_run_program(case)(jax.random.key(seed), secrets, noise * noise_std)
    return audit.judge_one_run(
        scores,
        secrets,
        delta=ONE_DELTA,
        epsilon=ONE_EPSILON,
        guesses=GUESSES,
        confidence=confidence(),
    )
