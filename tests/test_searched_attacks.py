# SPDX-License-Identifier: Apache-2.0
"""Attacks that try themselves out on a dry run of the server.

Rows refer to the checklist of the sheet named in the test.
"""

import functools

import attack_vectors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from toys import Regression, quick_jit

import jaxfed
from jaxfed import attacks
from jaxfed.attacks import _search


def step_of(spec, f):
    """The step of a server that subtracts what a rule gives."""
    rule = jaxfed.make_aggregator(spec, num_byzantine=f)

    def probe(uploads, **extra):
        one = jax.tree.map(lambda x: x[0], uploads)
        aggregate, _ = rule.update(uploads, rule.init(one), one, **extra)
        return jax.tree.map(jnp.negative, aggregate)

    return probe


def on_wire(attack, x, f, probe, **extra):
    who = jaxfed.byzantine_ids(len(x), f)
    state = attack.wire.init(x[0])
    return attack.wire.update(x, state, byzantine=who, probe=probe, **extra)[0]


def problems(count, n, d, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, n, d)) + 0.5
    return x.astype(np.float32)


# --- the line search ---------------------------------------------------------------


def reference(objective, evals=20, delta=10.0, ratio=0.8):
    """Section 4.4 of the stability sheet, word for word."""
    x, y = 0.0, objective(0.0)
    evals -= 1
    while evals > 0:
        y2 = objective(x + delta)
        evals -= 1
        if y2 > y:
            x, y, delta = x + delta, y2, delta * 2
        else:
            delta *= ratio
            break
    while evals > 0:
        y2 = objective(x + delta)
        evals -= 1
        if y2 > y:
            x, y = x + delta, y2
        delta *= ratio
    return x


def test_line_search_is_the_one_described():
    rng = np.random.default_rng(0)
    peaks = np.append(10 ** rng.uniform(-2, 5, size=40), [0.0, -3.0])
    waves = np.append(rng.uniform(0, 3, size=40), [0.0, 0.0])

    def height(x, peak, wave, xp):
        return -xp.abs(x - peak) + wave * xp.sin(x)

    def search(peak, wave, **options):
        at = functools.partial(height, peak=peak, wave=wave, xp=jnp)
        return _search.line_search(at, **options)

    for evals, delta, ratio in [(20, 10.0, 0.8), (7, 1.0, 0.5), (1, 1.0, 0.5)]:
        options = {"evals": evals, "delta": delta, "ratio": ratio}
        with jax.enable_x64(True):
            run = quick_jit(jax.vmap(functools.partial(search, **options)))
            ends = run(peaks, waves)
        for end, peak, wave in zip(ends, peaks, waves, strict=True):
            at = functools.partial(height, peak=peak, wave=wave, xp=np)
            assert end == pytest.approx(reference(at, **options), rel=1e-12)


def test_where_there_is_no_value_the_search_does_not_go():
    def value(x):
        return jnp.where(x > 25, jnp.nan, x)

    end = _search.line_search(value, evals=20, delta=10.0, ratio=0.8)
    assert 24 < end <= 25


SEARCHED = [c for c in attack_vectors.CASES if c["name"].startswith("Optimal")]
WIDTH, ROWS = 8, 14  # of the largest case


@functools.cache
def search_program(spec):
    """A line search of ByzFL through a rule, for inputs that are filled up.

    Rows beyond the attackers are absent for the rule and no honest ones for the attack.
    """

    def run(x, honest, f, sign, told):
        probe = step_of(spec, f)
        count = jnp.sum(honest)
        present = jnp.arange(ROWS) < count + f
        mean = jnp.sum(jnp.where(honest[:, None], x, 0), axis=0) / count
        away = jnp.where(honest[:, None], x - mean[None], 0)
        std = jnp.sqrt(jnp.sum(away**2, axis=0) / (count - 1))

        def vector(tau):
            return jnp.where(sign > 0, mean + tau * std, -tau * mean)

        def value(tau):  # the library compares with the mean itself
            rows = jnp.where(honest[:, None], x, vector(tau)[None])
            return jnp.linalg.norm(mean + probe(rows, mask=present))

        end = _search.line_search(value, evals=20, delta=10.0, ratio=0.8)
        return end, vector(end), value(end), value(told)

    return quick_jit(run)


@pytest.mark.parametrize("case", SEARCHED, ids=attack_vectors.label)
def test_other_libraries_are_reproduced(case):
    call = attack_vectors.translate(case)
    h, d = call.honest.shape
    x = np.zeros((ROWS, WIDTH))
    x[:h, :d] = call.honest
    with jax.enable_x64(True):
        run = search_program(call.rule)
        told = np.float64(call.strength or 0.0)
        out = run(x, np.arange(ROWS) < h, jnp.int32(call.f), call.sign, told)
        end, sent, found, theirs = map(np.asarray, out)
    expected = np.array(case["expected"], float)
    if call.tied and end != pytest.approx(call.strength, rel=1e-9):
        np.testing.assert_allclose(found, theirs, rtol=1e-14)
        sent = sent * (call.strength / end)
    elif call.strength is not None:
        np.testing.assert_allclose(end, call.strength, rtol=1e-9)
    np.testing.assert_allclose(sent[:d], expected, rtol=1e-6, atol=1e-6)


# --- searched attacks --------------------------------------------------------------


RULES = {
    "mean": lambda x, f: oracles.mean(x),
    "trimmed_mean": oracles.trimmed_mean,
    "nnm+median": lambda x, f: oracles.median(oracles.nnm(x, f)),
    "nnm+krum": lambda x, f: oracles.krum(oracles.nnm(x, f), f),
    "smea": oracles.smea,
}


def family(name, honest):
    if name == "ipm":
        return lambda s: -s * honest.mean(0)
    return lambda s: honest.mean(0) - s * honest.std(0, ddof=1)


def distance(spec, x, f, sent):
    """How far a vector moves the aggregate from the honest mean, in float64."""
    honest = x[: len(x) - f].astype(float)
    rows = np.vstack([honest, [np.asarray(sent, float)] * f])
    return np.linalg.norm(RULES[spec](rows, f) - honest.mean(0))


@pytest.mark.parametrize("name", ["ipm", "alie"])
@pytest.mark.parametrize("spec", ["trimmed_mean", "nnm+krum"])
def test_never_weaker_than_grid_or_line_search(name, spec):
    n, f = 9, 2
    attack, probe = getattr(attacks, name + "_search")(grid=9), step_of(spec, f)
    inputs = problems(6, n, 5)
    run = quick_jit(jax.vmap(lambda x: on_wire(attack, x, f, probe)[-1]))
    for x, sent in zip(inputs, run(inputs), strict=True):
        vector = family(name, x[: n - f].astype(float))

        def value(s, x=x, vector=vector):
            return distance(spec, x, f, vector(s))

        strengths = [*np.linspace(0, 10, 9), reference(value)]
        best = max(map(value, strengths))
        assert distance(spec, x, f, sent) >= best * (1 - 1e-4) > 0


@pytest.mark.parametrize("name", ["ipm_search", "alie_search"])
def test_candidates_may_go_by_chunks(name):
    x, probe = problems(1, 7, 4)[0], step_of("trimmed_mean", 2)

    def sent(batch_size):
        attack = getattr(attacks, name)(grid=7, evals=4, batch_size=batch_size)
        return quick_jit(lambda x: on_wire(attack, x, 2, probe))(x)

    for batch_size in (1, 3):
        np.testing.assert_allclose(sent(batch_size), sent(None), rtol=1e-6)


def test_large_uploads_go_one_candidate_at_a_time(monkeypatch):
    x, seen = problems(1, 7, 4)[0], []

    def probe(uploads):
        seen.append(jnp.shape(uploads))
        return step_of("trimmed_mean", 2)(uploads)

    monkeypatch.setattr(_search, "_ENTRIES", 28 * 3)
    chunks = []
    real = jax.lax.map
    monkeypatch.setattr(
        jax.lax,
        "map",
        lambda g, xs, batch_size=None: (
            chunks.append(batch_size),
            real(g, xs, batch_size=batch_size),
        )[1],
    )
    jax.eval_shape(lambda x: on_wire(attacks.ipm_search(), x, 2, probe), x)
    monkeypatch.setattr(_search, "_ENTRIES", 1)
    jax.eval_shape(lambda x: on_wire(attacks.ipm_search(), x, 2, probe), x)
    assert 3 in chunks and 1 in chunks and set(seen) == {(7, 4)}


@pytest.mark.parametrize("name", ["ipm_search", "alie_search", "gradient_search"])
def test_without_a_dry_run_there_is_no_search(name):
    attack = getattr(attacks, name)()
    with pytest.raises(ValueError, match=f"{name} tries.*jaxfed.simulate, or pass pro"):
        on_wire(attack, problems(1, 5, 3)[0], 1, None)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"low": float("nan")}, "low must be a finite number"),
        ({"high": float("inf")}, "high must be a finite number"),
        ({"high": 1e39}, "high must be at most 1e[+]38 in size"),
        ({"delta": 1e39}, "delta must be at most 1e[+]38 in size"),
        ({"grid": 0}, "grid must be at least 1"),
        ({"evals": 0}, "evals must be at least 1"),
        ({"delta": 0.0}, "delta must be a finite number > 0"),
        ({"ratio": 1.0}, "ratio must satisfy 0 <= ratio < 1"),
        ({"ratio": 0.0}, "ratio must be a finite number > 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_bad_arguments(options, match):
    for factory in (attacks.ipm_search, attacks.alie_search):
        with pytest.raises(ValueError, match=match):
            factory(**options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"steps": -1}, "steps must be at least 0"),
        ({"learning_rate": 0.0}, "learning_rate must be a finite number > 0"),
        ({"scale": -1.0}, "scale must be a finite number >= 0"),
        ({"z": float("inf")}, "z must be a finite number"),
    ],
)
def test_bad_arguments_of_the_climb(options, match):
    with pytest.raises(ValueError, match=match):
        attacks.gradient_search(**options)


def test_what_the_climb_climbs_with_must_be_functions():
    with pytest.raises(TypeError, match="optimizer must be an optax.*got 'adam'"):
        jaxfed.make_attack("gradient_search", optimizer="adam")
    with pytest.raises(TypeError, match="objective must be a function.*got 'loss'"):
        attacks.gradient_search(objective="loss")


# --- rows of the papers --------------------------------------------------------------


def test_stability_row_20_opt_ipm_with_line_search_and_with_dense_grid():
    """Sheet: -tau mean, tau >= 0, dense grid as good on 95 % of inputs, exact SMEA."""
    n, f, probe = 7, 1, step_of("smea", 1)

    def sent(x, high, delta):
        attack = attacks.ipm_search(high=high, grid=61, delta=delta)
        return on_wire(attack, x, f, probe)[-1]

    inputs = problems(40, n, 4, seed=2)
    run = quick_jit(jax.vmap(sent, (0, None, None)))
    # A grid of zeros, then a line search that goes nowhere.
    line, grid = run(inputs, 0.0, 10.0), run(inputs, 6.0, 1e-6)
    as_good = better = 0
    for x, by_line, by_grid in zip(inputs, line, grid, strict=True):
        mean = x[: n - f].astype(float).mean(0)
        for v in (by_line, by_grid):
            tau = -(v @ mean) / (mean @ mean)
            assert tau >= 0
            np.testing.assert_allclose(v, -tau * mean, atol=2e-5)
        low, high = (distance("smea", x, f, v) for v in (by_line, by_grid))
        # Between two strengths the aggregate moves by at most this.
        as_good += high + 0.1 * f / (n - f) * np.linalg.norm(mean) >= low
        better += high > low
    assert as_good >= 0.95 * len(inputs) and better > 0.1 * len(inputs)


def train(attack, num_byzantine, rounds=60, n=6):
    toy = Regression(n, seed=3)
    rule = jaxfed.make_aggregator("trimmed_mean", num_byzantine=1)
    algorithm = jaxfed.make_algorithm(
        "byz_sgdm",
        learning_rate=0.1,
        rule=rule,
        num_clients=n,
        local_work=jaxfed.gradient(toy.loss),
    )
    sim = jaxfed.simulate(algorithm, n, num_byzantine=num_byzantine, attack=attack)

    def run(seed):
        state, _ = sim.run(
            sim.init(toy.params, jax.random.key(seed)), toy.shards, rounds
        )
        model = sim.model(state)
        honest = jax.tree.map(lambda x: x[: n - 1], toy.shards.data)
        losses = jax.vmap(lambda batch: jnp.mean(toy.loss(model, batch)))(honest)
        return jnp.mean(losses)

    return np.asarray(quick_jit(jax.vmap(run))(jnp.arange(2)))


def test_stability_row_21_zero_attack_keeps_the_accuracy():
    """Sheet: one client that sends zeros does not matter; a searched attack does."""
    best = train(None, 0)
    zero = train(attacks.zero(), 1)
    searched = train(attacks.ipm_search(grid=5, evals=5), 1)
    assert np.all(np.abs(zero - best) < 0.1 * best)
    assert np.all(searched > zero) and np.all(np.isfinite(searched))


def test_row_20_byzuldp_ipm_maximises_over_its_grid():
    """Sheet: B = (1 - gamma) mean, gamma the best of 20 from 0 to 10, where M is."""
    n, f, d, beta, rule = 8, 2, 5, 0.85, step_of("trimmed_mean", 2)
    x, anchor = problems(1, n, d)[0], np.full(d, 0.3, np.float32)
    inner = attacks.ipm_search(low=-1.0, high=9.0, grid=20, evals=1)
    attack = attacks.in_momentum_space(inner, beta)

    def probe(m):
        return rule(beta * jnp.asarray(anchor)[None] + (1 - beta) * m)

    out = np.asarray(
        quick_jit(lambda x: on_wire(attack, x, f, probe, message={"anchor": anchor}))(x)
    )
    np.testing.assert_array_equal(out[:-2], x[:-2])
    big_m = beta * anchor + (1 - beta) * x[:-2].astype(float)
    mean = big_m.mean(0)

    def value(gamma):
        rows = np.vstack([big_m, [(1 - gamma) * mean] * 2])
        return np.linalg.norm(np.sort(rows, axis=0)[2:-2].mean(0) - mean)

    gammas = np.append(np.linspace(0, 10, 20), 1.0)
    best = gammas[np.argmax([value(g) for g in gammas])]
    sent = ((1 - best) * mean - beta * anchor) / (1 - beta)
    np.testing.assert_allclose(out[-2:], [sent, sent], rtol=1e-4, atol=1e-4)


# --- gradient search ---------------------------------------------------------------


@pytest.mark.parametrize("spec", ["mean", "trimmed_mean", "nnm+median"])
def test_climbing_is_never_weaker_than_its_start(spec):
    n, f, probe = 8, 2, step_of(spec, 2)
    attack, inputs = attacks.gradient_search(steps=4), problems(4, n, 5)
    run = quick_jit(jax.vmap(lambda x: on_wire(attack, x, f, probe)[-1]))
    gains = []
    for x, sent in zip(inputs, run(inputs), strict=True):
        honest = x[: n - f].astype(float)
        starts = family("ipm", honest)(10.0), family("alie", honest)(1.5)
        start = max(distance(spec, x, f, v) for v in starts)
        gains.append(distance(spec, x, f, sent) / start - 1)
    assert min(gains) >= -1e-5
    if spec == "mean":  # the others are flat where they trim
        assert min(gains) > 0.01
    if spec == "nnm+median":
        assert max(gains) > 0.01


@pytest.mark.parametrize(
    "spec", ["nnm+smea", "mva", "caf", "nnm+geometric_median", "centered_clipping"]
)
def test_rules_that_loop_can_be_climbed_through(spec):
    def run(x, f):
        attack, probe = attacks.gradient_search(), step_of(spec, f)
        who = np.arange(9) >= 7
        return attack.wire.update(
            x, attack.wire.init(x[0]), byzantine=who, probe=probe
        )[0]

    shape = jax.ShapeDtypeStruct((9, 3), np.float32)
    assert jax.eval_shape(run, shape, jnp.int32(2)).shape == (9, 3)


def test_gradients_that_are_not_finite_leave_the_start():
    def probe(uploads):
        m = jnp.mean(uploads, axis=0)
        return m * (1 + jnp.sqrt(0 * m))  # the derivative of the root at 0 is inf

    x = problems(1, 6, 3)[0]
    out = quick_jit(lambda x: on_wire(attacks.gradient_search(), x, 1, probe))(x)
    honest = x[:5].astype(float)
    np.testing.assert_allclose(out[-1], -10 * honest.mean(0), rtol=1e-5)


def test_any_objective_and_optimizer():
    """One step up the loss 0.5 |theta + step - a|^2 through a mean, by hand."""
    x, target = problems(1, 4, 2)[0], np.array([1.0, -2.0], np.float32)
    message = {"params": np.array([0.5, 0.5], np.float32)}

    def loss(step, message):
        return 0.5 * jnp.sum((message["params"] + step - target) ** 2)

    attack = attacks.gradient_search(
        steps=1, objective=loss, optimizer=optax.sgd(0.3), scale=1.0, z=0.0
    )
    probe = step_of("mean", 0)
    out = quick_jit(lambda x: on_wire(attack, x, 1, probe, message=message))(x)
    honest = x[:3].astype(float)

    def residual(v):
        return message["params"] - (honest.sum(0) + v) / 4 - target

    starts = [-honest.mean(0), honest.mean(0)]
    v = max(starts, key=lambda v: np.sum(residual(v) ** 2))
    unit = np.linalg.norm(v) / np.sqrt(2)
    gradient = -residual(v) / 4 * unit  # of the loss, by what the optimizer moves
    np.testing.assert_allclose(out[-1], v + unit * 0.3 * gradient, rtol=1e-5)


def test_climbing_in_a_simulation_with_server_momentum():
    toy = Regression(5)
    rule = jaxfed.make_aggregator("median", num_byzantine=1)
    server = (rule, optax.sgd(0.1, momentum=0.9))
    algorithm = jaxfed.from_chains(
        jaxfed.gradient(toy.loss), optax.identity(), server, rule=rule
    )
    ends = {}
    for name in ("none", "gradient_search"):
        options = {} if name == "none" else {"steps": 2}
        attack = jaxfed.make_attack(name, **options)
        sim = jaxfed.simulate(algorithm, 5, num_byzantine=1, attack=attack)
        run = quick_jit(lambda s, sim=sim: sim.run(s, toy.shards, 5))
        state, metrics = run(sim.init(toy.params, 0))
        assert np.all(np.isfinite(metrics["loss"]))
        ends[name] = metrics["loss"][-1]
    assert ends["gradient_search"] > ends["none"]
