# SPDX-License-Identifier: Apache-2.0
"""Attacks that remember earlier rounds, and attacks formed where the server is."""

import functools
import math
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import Regression, quick_jit

import jaxfed
from jaxfed import attacks
from jaxfed.algorithms._byzuldp import byzuldp


def rounds_of(attack, inputs, byzantine, cohorts=None):
    """Run an attack over rounds ``[t, n, d]``; return what is sent and the end."""

    def run(inputs, cohorts):
        def step(state, given):
            x, cohort = given
            out, state = attack.wire.update(
                x, state, byzantine=byzantine, cohort=cohort
            )
            return state, out

        return jax.lax.scan(step, attack.wire.init(inputs[0, 0]), (inputs, cohorts))

    state, sent = quick_jit(run)(inputs, cohorts)
    return np.asarray(sent), state


def inputs_of(rounds, n, d, seed=0):
    return np.random.default_rng(seed).normal(size=(rounds, n, d)).astype(np.float32)


# --- mimic ---------------------------------------------------------------------------


def mimicked(inputs, honest, z):
    """The heuristic of the ByzULDP sheet, section 5, in float64."""
    mu, chosen = np.zeros(inputs.shape[2]), []
    for t, x in enumerate(inputs.astype(float)):
        x = x[honest]
        mu = t / (1 + t) * mu + x.mean(0) / (1 + t)
        power = sum((row - mu) * ((row - mu) @ z) for row in x)
        z = t / (1 + t) * z + power / (1 + t)
        z = z / np.linalg.norm(z)
        chosen.append(int(np.argmax(np.abs(x @ z))))
    return chosen, mu, z


def test_row_20_byzuldp_mimic_copies_one_honest_row_exactly():
    inputs, byzantine = inputs_of(12, 7, 4), np.arange(7) >= 5
    inputs[:, 5:] = np.nan  # what the attackers computed plays no part
    attack = attacks.mimic(key=3)
    sent, state = rounds_of(attack, inputs, byzantine)
    start = np.asarray(attack.wire.init(inputs[0, 0]).direction, float)
    assert np.linalg.norm(start) == pytest.approx(1, rel=1e-6)
    chosen, mu, z = mimicked(inputs, ~byzantine, start)
    for t, i in enumerate(chosen):
        np.testing.assert_array_equal(sent[t, 5:], inputs[t, [i, i]])
    np.testing.assert_allclose(state.mean, mu, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.direction, z, rtol=1e-4, atol=1e-5)
    assert len(set(chosen)) > 1 and state.count == 12


def test_mimic_keeps_to_the_client_that_stands_out():
    inputs, byzantine = 0.1 * inputs_of(15, 8, 5), np.arange(8) >= 6
    inputs[:, 2] += np.array([0, 3, 0, 0, 0], np.float32)
    for seed in range(3):
        sent, state = rounds_of(attacks.mimic(key=seed), inputs, byzantine)
        np.testing.assert_array_equal(sent[5:, 7], inputs[5:, 2])
        assert abs(state.direction[1]) > 0.99


def test_mimic_copies_among_the_honest_clients_of_the_cohort():
    inputs = inputs_of(6, 4, 3)
    rng = np.random.default_rng(1)
    cohorts = np.stack([rng.permutation(9)[:4] for _ in range(6)])

    def run(inputs, cohorts):
        attack = attacks.mimic()

        def step(state, given):
            x, cohort = given
            out, state = attack.wire.update(
                x, state, byzantine=cohort >= 6, cohort=cohort
            )
            return state, out

        return jax.lax.scan(step, attack.wire.init(inputs[0, 0]), (inputs, cohorts))[1]

    for x, out, hostile in zip(
        inputs, quick_jit(run)(inputs, cohorts), cohorts >= 6, strict=True
    ):
        honest = {row.tobytes() for row in x[~hostile]}
        assert len({row.tobytes() for row in np.asarray(out)[hostile]}) <= 1
        assert all(row.tobytes() in honest for row in np.asarray(out)[hostile])


def test_mimic_is_decided_by_the_update_and_copies_all_of_the_upload():
    x = inputs_of(2, 5, 3)
    uploads = {"update": x[0], "control": x[1]}
    attack, who = attacks.mimic(), np.arange(5) >= 4

    def run(uploads, alone):
        state = attack.wire.init(alone[0])
        whole, _ = attack.wire.update(uploads, state, byzantine=who)
        part, _ = attack.wire.update(alone, state, byzantine=who)
        return whole, part

    whole, part = quick_jit(run)(uploads, x[0])
    np.testing.assert_array_equal(whole["update"], part)
    chosen = np.flatnonzero((x[0] == np.asarray(part)[4]).all(1)).item()
    np.testing.assert_array_equal(whole["control"][4], x[1][chosen])


# --- membership inference ------------------------------------------------------------


def beta(n, f):
    return 0.5 * math.sqrt((n - f - 1) * (n - f) / (f * (n - 2 * f)))


def test_mia_push_of_algorithm_2_by_hand():
    """Three rounds of recording 1, 2, 3 against the trigger; then plus or minus."""
    n, f, sigma = 15, 6, 0.5
    inputs = np.full((5, n, 1), 9.0, np.float32)
    inputs[:, 1, 0] = [1, 2, 3, -50, -50]  # later messages are not looked at
    for z, sign in [(6.9, 1), (7.0, -1)]:  # the mean is 2 = 6.928 sigma / sqrt(3)
        attack = attacks.mia_push(target=1, num_test=3, noise_std=sigma, z=z)
        sent, state = rounds_of(attack, inputs, np.arange(n) >= n - f)
        np.testing.assert_array_equal(sent[:3, -f:], np.zeros((3, f, 1)))
        assert beta(n, f) == pytest.approx(1.0)  # sheet, 5.5-A
        np.testing.assert_allclose(sent[3:, -f:], sign * sigma, rtol=1e-6)
        np.testing.assert_array_equal(sent[:, :-f], inputs[:, :-f])
        assert (state.round, state.recorded, state.total) == (5, 3, 6.0)


@pytest.mark.parametrize(("n", "f"), [(9, 3), (10, 2), (7, 1)])
def test_mia_push_sizes(n, f):
    """Beta of section 4.1 in one dimension, formula (20) beyond."""
    who, h = np.arange(n) >= n - f, n - f

    def size(d, **options):
        attack = attacks.mia_push(num_test=0, noise_std=2.0, z=-1.0, **options)
        sent, _ = rounds_of(attack, np.ones((1, n, d), np.float32), who)
        assert np.all(sent[0, -1, 1:] == 0)  # along the first coordinate
        return sent[0, -1, 0]

    assert size(1) == pytest.approx(2 * beta(n, f), rel=1e-6)
    assert size(1, strength=0.25) == pytest.approx(beta(n, f), rel=1e-6)
    factor = h / math.sqrt(f * (n - 2 * f))
    spectrum = math.sqrt((h - 1) / h) * (1 + math.sqrt(60 / (h - 1)))
    assert size(60) == pytest.approx(0.3 * factor * 2 * spectrum, rel=1e-6)
    told = size(60, strength=0.5, top_eigenvalue=9.0)
    assert told == pytest.approx(0.5 * factor * 3, rel=1e-6)
    # The Byzantine part of the first variance is c^2 times the top eigenvalue.
    share = f * (n - 2 * f) / h**2
    assert share * told**2 == pytest.approx(0.25 * 9, rel=1e-6)


def test_mia_push_along_any_direction_of_a_tree():
    direction = {"a": np.array([0.0, 3.0], np.float32), "b": np.float32(-4.0)}
    rng = np.random.default_rng(0)
    x = {
        "a": rng.normal(size=(6, 2)).astype(np.float32),
        "b": rng.normal(size=6).astype(np.float32),
    }
    statistic = x["a"][2, 1] * 0.6 - x["b"][2] * 0.8
    attack = attacks.mia_push(2, direction, num_test=1, top_eigenvalue=1.0)
    who = np.arange(6) >= 4

    def run(x):
        state = attack.wire.init(jax.tree.map(lambda v: v[0], x))
        _, state = attack.wire.update(x, state, byzantine=who)
        upload = {"update": x, "control": x}  # only the update is pushed
        return attack.wire.update(upload, state, byzantine=who)

    out, state = quick_jit(run)(x)
    assert state.total == pytest.approx(statistic, rel=1e-5)
    size = np.sign(statistic) * 0.3 * 4 / math.sqrt(2 * 2)
    np.testing.assert_allclose(out["update"]["a"][5], [0, 0.6 * size], rtol=1e-5)
    np.testing.assert_allclose(out["update"]["b"][5], -0.8 * size, rtol=1e-5)
    np.testing.assert_array_equal(out["control"]["a"][5], np.zeros(2))
    np.testing.assert_array_equal(out["update"]["a"][:4], x["a"][:4])


def test_mia_push_records_the_target_when_it_is_there():
    inputs = np.arange(12, dtype=np.float32).reshape(4, 3, 1)
    cohorts = np.array([[4, 0, 1], [0, 2, 4], [1, 2, 3], [2, 1, 0]])
    attack = attacks.mia_push(target=2, num_test=3)
    _, state = rounds_of(attack, inputs, np.zeros(3, bool), cohorts)
    assert (state.recorded, state.total) == (2, 4.0 + 7.0)
    _, state = rounds_of(attack, inputs, np.array([False, True, False]), cohorts)
    assert (state.recorded, state.total) == (0, 0.0)  # a Byzantine row is no target


def test_mia_push_needs_an_honest_target():
    x, byzantine = inputs_of(1, 5, 2)[0], np.arange(5) >= 3

    def send(target, byzantine=byzantine, **extra):
        attack = attacks.mia_push(target=target)
        state = attack.wire.init(x[0])
        return attack.wire.update(x, state, byzantine=byzantine, **extra)[1]

    with pytest.raises(ValueError, match="honest, got target=4, which is Byzantine"):
        send(4)
    with pytest.raises(ValueError, match="one of the 5 clients, got target=99"):
        quick_jit(lambda who: send(99, who))(byzantine)
    cohort = np.array([99, 7, 3, 1, 0])
    assert send(99, cohort=cohort).recorded == 1
    assert send(4, cohort=cohort).recorded == 0  # absent
    # Who attacks is not known here: the target is never recorded.
    assert quick_jit(lambda who: send(4, who))(byzantine).recorded == 0


def test_mia_push_pushes_the_first_coordinate_that_there_is():
    x = {"a": np.ones((4, 0, 2), np.float32), "b": np.ones((4, 3), np.float32)}
    attack = attacks.mia_push(num_test=0)
    state = attack.wire.init(jax.tree.map(lambda leaf: leaf[0], x))
    out, _ = attack.wire.update(x, state, byzantine=np.arange(4) == 3)
    assert out["a"].shape == (4, 0, 2)
    np.testing.assert_array_equal(out["b"][3] != 0, [True, False, False])


def test_mia_push_succeeds_as_often_as_the_theory_says():
    """Sheet, 5.5-A: sigma 0.2, half of T=100 for the test, z = Delta/2: P = 0.623."""
    sigma, tests, m, runs = 0.2, 50, 20, 3000
    delta = math.sqrt(tests) / (m * sigma)
    attack = attacks.mia_push(num_test=tests, noise_std=sigma, z=delta / 2)
    byzantine = np.arange(4) >= 3

    def decision(noise, gradient):
        def step(state, xi):
            x = jnp.zeros((4, 1)).at[0, 0].set(gradient + xi)
            out, state = attack.wire.update(x, state, byzantine=byzantine)
            return state, out[-1, 0]

        return jax.lax.scan(step, attack.wire.init(jnp.zeros(1)), noise)[1][-1] > 0

    run = quick_jit(jax.vmap(decision, (0, None)))
    noise = sigma * np.random.default_rng(0).normal(size=(runs, tests + 1))
    noise = noise.astype(np.float32)
    success = ~np.asarray(run(noise, 0.0)) & np.asarray(run(noise, 1 / m))
    normal = NormalDist()
    theory = normal.cdf(delta / 2) - normal.cdf(-delta / 2)
    assert theory == pytest.approx(0.623, abs=5e-4)
    assert abs(success.mean() - theory) < 4 * math.sqrt(0.25 / runs)


def test_mia_push_is_kept_by_exact_smea():
    """Sheet, 5.5-B: for (n, f, d) = (9, 3, 60), c = 0.3 always, c = 1 hardly ever."""
    n, f, d, trials = 9, 3, 60, 60
    rule = jaxfed.make_aggregator("smea", num_byzantine=f)
    byzantine = np.arange(n) >= n - f

    def kept(x, strength):
        attack = attacks.mia_push(num_test=0, strength=strength)
        out, _ = attack.wire.update(x, attack.wire.init(x[0]), byzantine=byzantine)
        weights = rule.inspect(out, rule.init(x[0])).weights
        return jnp.all(weights[-f:] > 0)

    run = quick_jit(jax.vmap(kept, (0, None)))
    x = inputs_of(trials, n, d, seed=2)
    assert np.mean(run(x, 0.3)) >= 0.95
    assert np.mean(run(x, 1.0)) <= 0.15


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"target": -1}, "target must be at least 0"),
        ({"num_test": -1}, "num_test must be a finite number >= 0"),
        ({"noise_std": -1.0}, "noise_std must be a finite number >= 0"),
        ({"strength": -1.0}, "strength must be a finite number >= 0"),
        ({"top_eigenvalue": -1.0}, "top_eigenvalue must be a finite number >= 0"),
        ({"z": float("nan")}, "z must be a finite number"),
    ],
)
def test_bad_arguments(options, match):
    with pytest.raises(ValueError, match=match):
        attacks.mia_push(**options)


def test_a_direction_of_another_shape():
    x = inputs_of(1, 4, 3)[0]
    attack = attacks.mia_push(direction=np.ones(2, np.float32))
    with pytest.raises(ValueError, match="direction must be shaped like params"):
        attack.wire.update(x, attack.wire.init(x[0]), byzantine=np.arange(4) > 2)


# --- the space of the server's momentum ------------------------------------------


BETA = 0.85


def in_both_spaces(attack, x, **extra):
    anchor = np.linspace(-1, 1, x.shape[1]).astype(np.float32)
    byzantine = np.arange(len(x)) >= len(x) - 2
    moved = attacks.in_momentum_space(attack, BETA)

    def run(x):
        return [
            a.wire.update(
                x,
                a.wire.init(x[0]),
                byzantine=byzantine,
                message={"anchor": anchor, "round": 0},
                **extra,
            )[0]
            for a in (attack, moved)
        ]

    plain, out = map(np.asarray, quick_jit(run)(x))
    np.testing.assert_array_equal(out[:-2], x[:-2])
    return plain[-2:], out[-2:], anchor.astype(float)


@pytest.mark.parametrize("name", ["alie", "mimic", "copies"])
def test_row_20_byzuldp_affine_attacks_are_the_same_in_both_spaces(name):
    attack = getattr(attacks, name)(**({"z": 1.5} if name == "alie" else {}))
    x = inputs_of(1, 8, 3)[0]
    if name == "mimic":  # one client stands out wherever one looks
        x[3] += 30
    plain, moved, _ = in_both_spaces(attack, x)
    np.testing.assert_allclose(moved, plain, rtol=1e-5, atol=1e-5)


def test_row_20_byzuldp_bit_flip_depends_on_the_space():
    """B = -mean of M, sent as (B - beta R) / (1 - beta)."""
    x = inputs_of(1, 8, 3)[0]
    plain, moved, anchor = in_both_spaces(attacks.bit_flip(), x)
    mean = x[:-2].astype(float).mean(0)
    np.testing.assert_allclose(plain, [-mean, -mean], rtol=1e-5)
    big_m = BETA * anchor + (1 - BETA) * mean
    sent = (-big_m - BETA * anchor) / (1 - BETA)
    np.testing.assert_allclose(moved, [sent, sent], rtol=1e-4)
    np.testing.assert_allclose(
        BETA * anchor + (1 - BETA) * moved[0], -big_m, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("space", ["m", "M"])
def test_row_20_byzuldp_bit_flip_of_whole_rounds_in_either_space(space):
    """The clients of section 10.3 and a mean, in float64."""
    centres = np.array([(0, 0), (1, 0), (0, 1), (1, 1), (9, 9)], float)
    alpha, beta, rate, rounds = 0.1, 0.85, 0.5, 4
    theta, anchor, m = np.array([1.0, -2.0]), np.zeros(2), np.zeros((4, 2))
    for _ in range(rounds):
        gradients = theta - centres[:4]
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        m = alpha * m + (1 - alpha) * gradients * np.minimum(1, 1 / norms)
        big_m = beta * anchor + (1 - beta) * m
        forged = -big_m.mean(0)
        if space == "m":
            forged = beta * anchor - (1 - beta) * m.mean(0)
        anchor = np.vstack([big_m, forged]).mean(0)
        theta = theta - rate * anchor

    def loss(params, batch):
        return 0.5 * jnp.sum((params[None] - batch["c"]) ** 2, axis=1)

    attack = attacks.bit_flip()
    if space == "M":
        attack = attacks.in_momentum_space(attack, beta)
    algorithm = byzuldp(
        rate,
        rule=jaxfed.make_aggregator("mean"),
        num_clients=5,
        key=0,
        clip_norm=1.0,
        momentum=alpha,
        server_momentum=beta,
        local_work=jaxfed.gradient(loss),
    )
    sim = jaxfed.simulate(algorithm, 5, num_byzantine=1, attack=attack)
    with jax.enable_x64(True):
        shards = jaxfed.Shard({"c": jnp.asarray(centres[:, None])}, jnp.ones(5, int))
        run = quick_jit(lambda s: sim.model(sim.run(s, shards, rounds)[0]))
        model = np.asarray(run(sim.init(jnp.array([1.0, -2.0]), 0)))
    np.testing.assert_allclose(model, theta, rtol=1e-12)


def test_the_momentum_may_be_traced_or_a_schedule():
    x, anchor = inputs_of(1, 5, 3)[0], np.ones(3, np.float32)
    byzantine = np.arange(5) > 3

    def run(beta, t):
        attack = attacks.in_momentum_space(attacks.ipm(2.0), beta)
        state = attack.wire.init(x[0])
        message = {"anchor": anchor, "round": t}
        return attack.wire.update(x, state, byzantine=byzantine, message=message)[0]

    traced = quick_jit(jax.vmap(lambda b: run(b, 0)))(jnp.array([0.0, 0.5, 0.9]))
    mean = x[:4].astype(float).mean(0)
    for b, out in zip([0.0, 0.5, 0.9], traced, strict=True):
        expected = (-2 * (b + (1 - b) * mean) - b) / (1 - b)
        np.testing.assert_allclose(out[4], expected, rtol=1e-4, atol=1e-5)
    schedule = optax.linear_schedule(0.0, 0.9, 9)
    out = quick_jit(functools.partial(run, schedule))(jnp.int32(5))
    np.testing.assert_allclose(out, traced[1], rtol=1e-5)


def test_momentum_space_needs_an_anchor_and_a_momentum():
    x = inputs_of(1, 5, 3)[0]
    attack = attacks.in_momentum_space(attacks.sign_flip(), 0.5)
    assert attack.needs_data
    for message in (None, {"params": x[0]}):
        with pytest.raises(ValueError, match="needs the anchor .* method byzuldp"):
            attack.wire.update(
                x, attack.wire.init(x[0]), byzantine=np.arange(5) > 3, message=message
            )
    for beta in (-0.1, 1.0):
        with pytest.raises(ValueError, match="server_momentum must satisfy 0 <= ser"):
            attacks.in_momentum_space(attacks.ipm(), beta)


# --- in a simulation ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["mimic", "mia_push", "scalar_noise", "random"])
def test_simulation_of_a_cohort_under_vmap(name):
    """State, keys and ids reach the attack; seeds give different randomness."""
    toy = Regression(6)
    rule = jaxfed.make_aggregator("mean")
    server = (rule, optax.sgd(0.05))
    algorithm = jaxfed.from_chains(
        jaxfed.gradient(toy.loss), optax.identity(), server, rule=rule
    )
    options = {"num_test": 2} if name == "mia_push" else {}
    sim = jaxfed.simulate(
        algorithm,
        6,
        num_byzantine=2,
        attack=jaxfed.make_attack(name, **options),
        cohort_size=4,
    )

    def run(seed):
        state = sim.init(toy.params, jax.random.key(seed))
        return sim.run(state, toy.shards, 4)

    state, metrics = quick_jit(jax.vmap(run))(jnp.arange(3))
    assert np.all(np.isfinite(metrics["loss"]))
    assert len(np.unique(np.asarray(metrics["loss"])[:, -1])) == 3
    counters = {"mimic": "count", "mia_push": "round"}
    count = getattr(state.attack, counters.get(name, "count"))
    np.testing.assert_array_equal(count, [4, 4, 4])
