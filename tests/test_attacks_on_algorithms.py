# SPDX-License-Identifier: Apache-2.0
"""Every attack on every kind of method, and every method under the hardest attacks.

Programs are traced only, with a traced number of attackers and traced strength: what is
sent is checked attack by attack, what a method does with it method by method.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
import toys
from test_algorithms_common import NAMES, PROBLEM, F, N, build, simulation

import jaxfed
from jaxfed import naming

# One method for each kind of upload, message and server state.
KINDS = [
    "byz_clip21_sgd2m",
    "byz_vr_marina",
    "byzuldp",
    "br_drag",
    "fedacg",
    "scaffold",
]
HARD = ["ipm_search", "gradient_search", "mimic"]
PAIRS = [(attack, method) for attack in naming.ATTACKS for method in KINDS]
PAIRS += [(a, m) for a in HARD for m in NAMES if m not in KINDS]
STRENGTHS = ("scale", "std", "z", "high", "learning_rate")


def make_attack(name, strength):
    """Build an attack whose strength, if it has one, is traced."""
    taken = inspect.signature(naming.ATTACKS[name]).parameters
    given = {s: strength for s in STRENGTHS if s in taken}
    few = {k: 2 for k in ("grid", "evals", "steps") if k in taken}
    return naming.make_attack(name, **given, **few)


@pytest.mark.parametrize(("attack", "method"), PAIRS)
def test_every_attack_runs_on_every_kind_of_method(attack, method):
    def go(strength, f, shards):
        made = make_attack(attack, strength)
        sim = simulation(method, made, actual=f)
        return sim.run(sim.init(PROBLEM.params, 0), shards, 1)

    data = PROBLEM.shards
    data = data._replace(data=data.data | {"label": jnp.zeros((N, PROBLEM.m), int)})
    state, metrics = jax.eval_shape(go, jnp.float32(1), jnp.int32(1), data)
    assert state.round.shape == () and metrics["loss"].shape == (1,)


@pytest.mark.parametrize("method", KINDS)
def test_an_attack_without_attackers_changes_nothing(method):
    @functools.partial(toys.quick_jit, static_argnums=0)
    def go(attack, f):
        sim = simulation(method, jaxfed.make_attack(attack), actual=f)
        state, _ = sim.run(sim.init(PROBLEM.params, 0), PROBLEM.shards, 2)
        return toys.ravel(sim.model(state))

    quiet, loud = go("none", jnp.int32(0)), go("gradient_search(steps=2)", jnp.int32(0))
    assert jnp.allclose(quiet, loud, rtol=1e-5, atol=1e-6)
    assert not jnp.allclose(quiet, go("gradient_search(steps=2)", jnp.int32(F)))


def test_kinds_are_what_they_are_for():
    states = {jax.tree.structure(build(k).server.init(PROBLEM.params)) for k in KINDS}
    assert len(states) == len(KINDS)
