# SPDX-License-Identifier: Apache-2.0
"""Coupled runs on neighbouring data sets: rows 12 to 19 of the stability checklist.

Fewer runs than its tables; ``benchmarks/stability.py`` does all of them. Seeds are
fixed, and what is compared with a table is compared within standard errors of both.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import toys
from toys import quick_jit

import jaxfed
from jaxfed import aggregators, robustness, stability
from jaxfed.theory import stability as theory

# Table 5.5-A, n=15, f=6: noise -> P(E1), then stability and its standard error without
# projection and on [-5, 5] (half a unit of the last digit where none is printed).
TABLE_A = {
    0.025: (1.000, 0.230, 0.0005, 0.230, 0.0005),
    0.05: (1.000, 0.461, 0.0005, 0.461, 0.0005),
    0.1: (0.923, 0.848, 0.004, 0.848, 0.004),
    0.2: (0.623, 1.135, 0.014, 1.135, 0.014),
    0.354: (0.383, 1.247, 0.025, 1.247, 0.025),
    0.707: (0.197, 1.339, 0.041, 1.339, 0.041),
    1.0: (0.140, 1.329, 0.051, 1.329, 0.051),
    2.0: (0.070, 1.226, 0.072, 0.663, 0.039),
    4.0: (0.035, 1.23, 0.10, 0.330, 0.028),
    8.0: (0.018, 1.20, 0.14, 0.160, 0.020),
    16.0: (0.009, 1.35, 0.22, 0.090, 0.015),
}
NOISE = np.array([*TABLE_A])
RADIUS = 5.0
RUNS_A, RUNS_C = 600, 20
INSTANCE = dict(n=15, f=6, m=20, rounds=100)
THEORY = theory.StabilityTheory(
    n=15, f=6, m=20, d=1, lipschitz=1.0, learning_rate=0.1, steps=100, kappa=24.0
)
# Table 5.5-B: (n, f, d) -> share of rounds with all pushes selected, c = 0.3 and 1.
TABLE_B = {
    (9, 2, 70): (1.00, 0.01),
    (9, 3, 60): (1.00, 0.02),
    (9, 4, 50): (0.95, 0.04),
    (12, 4, 80): (1.00, 0.02),
    (12, 4, 800): (1.00, 0.00),
    (7, 1, 50): (1.00, 0.15),
    (7, 2, 50): (1.00, 0.02),
    (7, 3, 50): (0.90, 0.02),
}
# 5.5-C, n=9, f=3, d=60, projected on a ball of radius 3: noise -> stability, its error.
TABLE_C = {
    0.05: (0.282, 0.002),
    0.2: (0.481, 0.027),
    0.8: (0.608, 0.075),
    3.2: (0.191, 0.050),
    12.8: (0.057, 0.025),
}


def flat(stability):
    """Return a :class:`Stability` as NumPy arrays."""
    return jax.tree.map(np.asarray, stability)


# --- row 12: coupled runs and estimators ----------------------------------------------

PROBLEM = toys.Regression(7)


def method(name, **options):
    """Return a builder of a private method on the regression problem."""

    def build(key):
        algorithm = jaxfed.make_algorithm(
            name,
            learning_rate=0.1,
            noise_std=0.3,
            rule="smea",
            num_byzantine=2,
            num_clients=7,
            key=key,
            **options,
        )
        attack = jaxfed.make_attack("sign_flip")
        return jaxfed.simulate(algorithm, 7, num_byzantine=2, attack=attack)

    return build


METHODS = {
    "safe_dgd": method(
        "safe_dgd", local_work=jaxfed.gradient(PROBLEM.loss, clip_norm=1.0)
    ),
    "byz_clip21_sgd2m": method(
        "byz_clip21_sgd2m",
        clip_norm=1.0,
        local_work=jaxfed.gradient(PROBLEM.loss, batch_size=2),
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_stability_row_12_equal_data_gives_exactly_zero(name):
    changed = {"x": np.zeros(3), "y": np.ones(2), "index": 0}
    other = stability.neighbour(PROBLEM.shards, 0, 1, changed)

    @quick_jit
    def run(key, other):
        def one(key):
            args = METHODS[name], PROBLEM.shards, other, PROBLEM.params, 5, key
            return stability.coupled(*args)

        models = jax.vmap(one)(jax.random.split(key, 3))
        points = jax.tree.map(lambda x: x[0], PROBLEM.shards.data)
        return models, stability.estimate(PROBLEM.loss, *models, points)

    key = jax.random.key(0)
    (first, second), same = run(key, PROBLEM.shards)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert [float(x) for x in same] == [0, 0, 0, 0]
    (again, third), apart = run(key, other)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert 0 < apart.signed <= apart.absolute
    # Different keys, different noise.
    assert len(np.unique(np.asarray(third["bias"])[:, 0])) == 3


@pytest.mark.parametrize("d", [1, 3])
def test_stability_row_12_linear_loss_without_attackers(d):
    """The example moves from 0 to C, the model by gamma C / (n m) in every step."""
    instance = stability.lower_bound(
        4, 0, 5, d, rounds=7, lipschitz=2.0, learning_rate=0.3
    )
    run = quick_jit(lambda s: stability.measure(instance, s, 1, runs=3))
    for noise in (0.0, 0.5):
        got = flat(run(noise).stability)
        expected = 0.3 * 2.0**2 * 7 / (4 * 5)
        assert got.signed == pytest.approx(expected, rel=2e-6)
        assert got.absolute == pytest.approx(expected, rel=2e-6)
        assert max(got.signed_error, got.absolute_error) < 1e-6


def test_stability_row_12_estimators_by_hand():
    rng = np.random.default_rng(0)
    models, others, points = (rng.normal(size=(k, 3)) for k in (40, 40, 6))
    gap = (models - others) @ points.T
    wanted = []
    for values in (gap, abs(gap)):
        at = values.mean(0).argmax()
        wanted += [values.mean(0)[at], values[:, at].std(ddof=1) / math.sqrt(40)]
    models, others, points = (
        jnp.array(x, jnp.float32) for x in (models, others, points)
    )
    got = stability.estimate(stability.linear_loss, models, others, {"z": points})
    np.testing.assert_allclose(flat(got), wanted, rtol=1e-5)
    # The other order of the data sets, and one run.
    back = stability.estimate(stability.linear_loss, others, models, {"z": points})
    assert float(back.signed) == pytest.approx(-gap.mean(0).min(), rel=1e-5)
    one = stability.estimate(
        stability.linear_loss, models[:1], others[:1], {"z": points}
    )
    assert np.isnan(one.signed_error) and one.signed <= one.absolute


def test_neighbour_changes_one_example():
    shards = stability.lower_bound(4, 1, 5, 2, rounds=1).shards
    other = stability.neighbour(shards, 2, 3, {"z": np.ones(2)})
    where = np.argwhere(np.any(np.asarray(other.data["z"]) != 0, axis=2))
    assert where.tolist() == [[2, 3]]
    with pytest.raises(ValueError, match="client must be at most 3, got client=4"):
        stability.neighbour(shards, 4, 0, {"z": np.ones(2)})
    with pytest.raises(ValueError, match="index must be at most 4, got index=5"):
        stability.neighbour(shards, 0, 5, {"z": np.ones(2)})
    with pytest.raises(
        ValueError, match=r"example must be a tree of shapes .*\(2,\).*got .*\(3,\)"
    ):
        stability.neighbour(shards, 0, 0, {"z": np.ones(3)})


# --- rows 13 and 16 to 19: one parameter ----------------------------------------------


def by_hand(instance, noise, strength, eigenvalue, sigma, m, radius):
    """Algorithms 2 and 3 in float64 on given noise ``[T, n, d]``: both last models."""
    rounds, n, d = noise.shape
    f, test, h = instance.num_byzantine, instance.num_test, n - instance.num_byzantine
    push = strength * h / math.sqrt(f * (n - 2 * f)) * math.sqrt(eigenvalue) * sigma
    side, ends, decisions = (1 if d == 1 else -1), [], []
    for special in (0, 1):
        x, heard = np.zeros(d), []
        for t in range(rounds):
            rows = noise[t].copy()
            rows[0, 0] += side * special / m
            rows[h:] = 0
            if t < test:
                heard.append(side * rows[0, 0])
            else:
                yes = np.mean(heard) > 1 / (2 * m)
                rows[h:, 0] = side * (push if yes else -push)
            x = x - 0.1 * oracles.smea(rows, f)
            x = x * min(1, radius / max(np.linalg.norm(x), 1e-30))
        ends.append(x)
        decisions.append(np.mean(heard) > 1 / (2 * m))
    return ends, decisions == [False, True]


@pytest.mark.parametrize(("d", "radius"), [(1, math.inf), (1, 0.3), (3, 0.3)])
def test_stability_row_13_runs_by_hand(d, radius):
    n, f, m, rounds, sigma = 7, 3, 2, 12, 0.5
    options = dict(strength=0.4, eigenvalue=2.0, num_test=5)
    instance = stability.lower_bound(n, f, m, d, rounds=rounds, **options)
    keys = jax.random.split(jax.random.key(3), 4)

    @quick_jit
    def run(key):
        args = instance.shards, instance.other, instance.params, rounds, key
        return stability.coupled(lambda key: instance.build(key, sigma, radius), *args)

    for key in keys:
        noise = toys.record_noise(sigma, key, instance.params, n, rounds)
        noise = np.asarray(noise, np.float64)
        ends, _ = by_hand(instance, noise, 0.4, 2.0, sigma, m, radius)
        np.testing.assert_allclose(run(key), ends, atol=2e-6)


def test_stability_row_13_measurement_by_hand():
    n, f, m, rounds, sigma = 7, 3, 2, 12, 0.5
    options = dict(strength=0.4, eigenvalue=2.0, num_test=5)
    instance = stability.lower_bound(n, f, m, rounds=rounds, **options)
    got = quick_jit(
        lambda key: stability.measure(instance, sigma, key, runs=6, batch_size=4)
    )(jax.random.key(3))
    gaps, right = [], []
    for key in jax.random.split(jax.random.key(3), 6):
        noise = toys.record_noise(sigma, key, instance.params, n, rounds)
        noise = np.asarray(noise, np.float64)
        ends, success = by_hand(instance, noise, 0.4, 2.0, sigma, m, math.inf)
        gaps.append((ends[1] - ends[0]).item())
        right.append(success)
    gaps = np.array(gaps)
    assert 0 < np.mean(right) < 1
    assert float(got.success) == pytest.approx(np.mean(right))
    assert float(got.instability) == pytest.approx(abs(gaps[right]).mean(), rel=1e-5)
    wanted = [abs(gaps.mean()), gaps.std(ddof=1) / math.sqrt(6)]
    wanted += [abs(gaps).mean(), abs(gaps).std(ddof=1) / math.sqrt(6)]
    np.testing.assert_allclose(flat(got.stability), wanted, rtol=1e-4)


@pytest.fixture(scope="module")
def curve():
    """Table 5.5-A in one program: [noise, (no projection, radius 5)]."""
    instance = stability.lower_bound(**INSTANCE)

    @jax.jit
    def run(noise, radii, key):
        def one(noise, radius):
            return stability.measure(
                instance, noise, key, runs=RUNS_A, radius=radius, batch_size=100
            )

        return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(noise, radii)

    out = run(jnp.array(NOISE), jnp.array([jnp.inf, RADIUS]), jax.random.key(0))
    return jax.tree.map(np.asarray, out)


def test_stability_row_13_table(curve):
    table = np.array([*TABLE_A.values()])
    chance, got = table[:, 0], curve.stability
    for column, (want, error) in enumerate([table.T[1:3], table.T[3:5]]):
        # Few runs succeed where P is small: the error comes from P, not from the runs.
        rare = want * np.sqrt((1 - chance) / (RUNS_A * chance))
        allowed = 3 * np.hypot(error, np.maximum(rare, got.absolute_error[:, column]))
        assert np.all(abs(got.absolute[:, column] - want) <= allowed)
    # On this instance the definition and the absolute form agree; beyond the ball the
    # rule's own jumps, of either sign, grow with the noise.
    apart = got.absolute - got.signed
    assert np.all(apart[:, 1] <= 0.02) and np.all(apart[NOISE <= 2, 0] <= 0.02)
    assert np.all(apart[:, 0] <= 0.04)
    error = np.sqrt(chance * (1 - chance) / RUNS_A)
    assert np.all(abs(curve.success[:, 0] - chance) <= 3 * error + 5e-4)
    np.testing.assert_array_equal(curve.success[:, 0], curve.success[:, 1])
    assert np.all(curve.selected >= 0.98)


def test_stability_row_13_is_above_the_papers_bound(curve):
    n, f, gamma, steps = 15, 6, 0.1, 100
    root = math.sqrt(f / (n - f) * (1 + (f - 1) / (n - 2 * f)))
    one_run = 0.5 * 0.5 * gamma * steps * NOISE * root
    assert np.all(curve.instability[:, 0] >= one_run)
    assert np.all(curve.stability.absolute[:, 0] >= one_run * curve.success[:, 0])
    slope = curve.stability.absolute[0, 0] / NOISE[0]
    assert slope == pytest.approx(9.2, abs=0.05)


def test_stability_row_13_chance_that_the_attacker_is_right():
    """The attacker hears client 0 alone: a federation of three is enough."""
    instance = stability.lower_bound(3, 1, 20, rounds=100)
    noise = np.array([0.05, 0.1, 0.2, 0.707])

    @quick_jit
    def run(noise, key):
        def one(noise):
            return stability.statistics(instance, noise, key, runs=4000, batch_size=200)

        return jax.vmap(one)(noise)

    out, inside = run(jnp.array(noise), jax.random.key(0))
    trigger = instance.trigger(1.0)
    got = np.mean((out <= trigger) & (inside > trigger), 1)
    wanted = [TABLE_A[s][0] for s in noise]
    np.testing.assert_allclose(got, wanted, atol=0.02)
    np.testing.assert_allclose(out.std(1), noise / math.sqrt(50), rtol=0.03)
    np.testing.assert_allclose(inside - out, 1 / 20, atol=1e-6)


def product(curve, column):
    """Return I * P by noise: far from noise even where few runs succeed."""
    separation = math.sqrt(50) / 20 / NOISE
    chance = np.array([theory.mia_success(x) for x in separation])
    # (6): what the attacker's success alone is responsible for.
    parts = curve.instability[:, column] * curve.success[:, column]
    assert np.all(parts <= curve.stability.absolute[:, column] * (1 + 1e-6))
    return dict(zip(TABLE_A, curve.instability[:, column] * chance, strict=True))


def test_stability_row_16_rises_then_falls_with_projection(curve):
    at = product(curve, 1)
    most = max(at.values())
    assert 0.3 <= max(at, key=at.get) <= 1.1
    assert at[0.05] < 0.4 * most and at[8.0] < 0.2 * most
    falling = [s for s in at if s >= 2]
    slope = np.polyfit(np.log(falling), np.log([at[s] for s in falling]), 1)[0]
    assert -1.2 <= slope <= -0.8
    raw = curve.stability
    assert 0.15 < NOISE[raw.absolute[:, 1].argmax()] < 1.1
    assert np.all(raw.absolute[-3:, 1] + 3 * raw.absolute_error[-3:, 1] < most)


def test_stability_row_16_does_not_fall_without_projection(curve):
    free = product(curve, 0)
    assert free[8.0] > 0.7 * max(free.values())
    assert min(free[s] for s in free if s >= 0.2) > 0.7 * max(free.values())


def test_stability_row_18_privacy_caps_it(curve):
    """One example moves a message of this instance by C / m, not 2 C / m."""
    for i, noise in enumerate(NOISE):
        cap = theory.gaussian_stability(math.sqrt(100) / (20 * noise), 2 * RADIUS)
        got = curve.stability.signed[i, 1] - 3 * curve.stability.signed_error[i, 1]
        assert got <= cap
    # Somewhere the cap says more than the ball does.
    assert cap < 0.1 * 2 * RADIUS


def test_stability_row_19_the_upper_bound_is_above(curve):
    # The least coefficient known for the rule, then the one of the reference values.
    kappa = robustness.kappa("smea", 15, 6, "spectral", sharp=True)
    least = dataclasses.replace(THEORY, kappa=kappa)
    measured = curve.stability.absolute
    assert np.all(measured <= np.array([[least.upper(s)] for s in NOISE]))
    ratio = THEORY.upper(0.1) / measured[2, 0]
    assert ratio == pytest.approx(300, rel=0.1)


# --- row 17: no noise -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "f", "minus", "plus"),
    [
        (9, 3, -1.999, 1.999),
        (10, 4, -2.413, 2.413),
        (15, 7, -3.643, 3.643),
        (21, 10, -4.012, 4.012),
        (10, 1, -1 / 9, 1 / 9),
        (10, 2, -0.2495, 0.2495),
        (15, 3, -0.2495, 0.2495),
        (30, 5, -0.2, 0.2),
        (10, 3, -3 / 7, 6 / 7),
    ],
)
def test_stability_row_17_noise_free_instances(n, f, minus, plus):
    C, gamma, rounds = 2.0, 0.1, 6
    instance = stability.noise_free(n, f, 200, rounds=rounds, lipschitz=C)
    sim = instance.build(jax.random.key(0), 0.0)

    def run(shards):
        def step(state, _):
            state, metrics = sim.step(state, shards)
            return state, (sim.model(state), metrics["influence"])

        return jax.lax.scan(step, sim.init(instance.params, 0), None, length=rounds)[1]

    models, influence = quick_jit(jax.vmap(run))(
        jax.tree.map(lambda *x: jnp.stack(x), instance.shards, instance.other)
    )
    returned = -np.diff(np.asarray(models)[..., 0], axis=1) / gamma / C
    np.testing.assert_allclose(returned[0], minus, atol=1e-2)
    np.testing.assert_allclose(returned[1], plus, atol=1e-2)
    np.testing.assert_allclose(np.asarray(influence)[:, 1:], f / (n - f), rtol=1e-5)


def test_stability_row_17_is_linear_in_the_rounds():
    instance = stability.noise_free(9, 3, 200, rounds=11)
    got = []
    for rounds in (6, 11):
        horizon = instance._replace(rounds=rounds)
        out = quick_jit(
            lambda key, horizon=horizon: stability.measure(horizon, 0.0, key, runs=2)
        )(jax.random.key(0))
        assert out.success == 1 and out.stability.signed == out.stability.absolute
        got.append(float(out.stability.absolute))
    # The attacker listens in the first round, and pushes in the others.
    step = 0.1 * 2 * 1.999
    np.testing.assert_allclose(got, [5 * step, 10 * step], rtol=5e-3)
    setting = dict(n=9, f=3, m=200, d=1, lipschitz=1.0, learning_rate=0.1)
    for rounds, value in zip((6, 11), got, strict=True):
        bound = theory.StabilityTheory(**setting, steps=rounds)
        assert bound.lower(0.0) * 0.5 <= value <= bound.upper(0.0)


# --- row 14: more parameters ----------------------------------------------------------


def test_stability_row_14_pushes_are_selected():
    """Table 5.5-B in one program: absent clients and zero columns change nothing."""
    trials, wide, most = 120, 800, 12
    rng = np.random.default_rng(0)
    rows, masks, budgets = [], [], []
    for n, f, d in TABLE_B:
        h = n - f
        x = np.zeros((trials, most, wide), np.float32)
        x[:, :h, :d] = rng.normal(size=(trials, h, d))
        masks.append(np.arange(most) < n)
        budgets.append(f)
        lam = theory.monte_carlo(n, f, d).eigenvalue
        for c in (0.3, 1.0):
            x[:, h:n, 0] = theory.spectral_magnitude(n, f, c, lam)
            rows.append(np.einsum("tia,tja->tij", x, x))
    # The rule sees inner products only: give it rows that have these.
    values, vectors = np.linalg.eigh(np.array(rows, np.float64))
    roots = vectors * np.sqrt(np.maximum(values, 0))[..., None, :]
    roots = roots.reshape(len(TABLE_B), 2, trials, most, most).astype(np.float32)

    @quick_jit
    def kept(roots, masks, budgets):
        def setting(args):
            roots, mask, f = args
            rule = aggregators.smea(f)
            h = jnp.sum(mask) - f
            forged = mask & (jnp.arange(most) >= h)

            def one(x):
                weights = rule.inspect(x, rule.init(x[0]), mask=mask).weights
                return jnp.sum(jnp.where(forged, weights, 0)) > (f - 0.5) / h

            return jnp.mean(jax.vmap(lambda x: jax.lax.map(one, x))(roots), 1)

        return jax.lax.map(setting, (roots, masks, budgets))

    got = kept(roots, np.array(masks), np.array(budgets))
    np.testing.assert_allclose(got, [*TABLE_B.values()], atol=0.05)


def test_stability_row_14_dimension_law():
    ratios = []
    for d in (6, 48, 384):
        instance = stability.lower_bound(9, 3, 20, d, rounds=20)
        run = quick_jit(
            lambda key, i=instance: stability.measure(
                i, 0.02, key, runs=16, batch_size=4
            )
        )
        got = run(jax.random.key(0))
        assert got.success == 1 and got.selected > 0.95
        ratios.append(float(got.stability.absolute) / (1 + math.sqrt(d / 6)))
    np.testing.assert_allclose(ratios, np.mean(ratios), rtol=0.1)
    np.testing.assert_allclose(ratios, [0.0130, 0.0127, 0.0124], rtol=0.05)


def test_stability_row_14_end_to_end():
    instance = stability.lower_bound(9, 3, 20, 60, rounds=40, strength=0.35)

    @quick_jit
    def run(noise, key):
        def one(noise):
            return stability.measure(
                instance, noise, key, runs=RUNS_C, radius=3.0, batch_size=4
            )

        return jax.vmap(one)(noise)

    got = jax.tree.map(np.asarray, run(jnp.array([*TABLE_C]), jax.random.key(0)))
    want, error = np.array([*TABLE_C.values()]).T
    chance = [theory.mia_success(math.sqrt(20) / (20 * s)) for s in TABLE_C]
    # Few runs succeed or fail where the chance is near 0 or 1: its error, not theirs.
    spread = np.sqrt(np.multiply(chance, np.subtract(1, chance)) / RUNS_C)
    spread *= got.stability.absolute / np.maximum(got.success, 1 / RUNS_C)
    allowed = 3 * np.sqrt(error**2 + got.stability.absolute_error**2 + spread**2)
    assert np.all(abs(got.stability.absolute - want) <= allowed)
    assert np.all(abs(got.success - chance) <= 0.02 + 3 * np.sqrt(0.25 / RUNS_C))
    assert np.all(got.selected > 0.98)
    setting = theory.StabilityTheory(9, 3, 20, 60, 1.0, 0.1, 40)
    assert np.all(got.stability.absolute <= [setting.upper(s) for s in TABLE_C])


# --- row 15: membership inference -----------------------------------------------------


@pytest.fixture(scope="module")
def heard():
    """Statistics at Delta = 0.05, 0.1, 0.2, 1 and 2, from one round: [5, runs]."""
    instance = stability.lower_bound(3, 1, 1, rounds=1)

    @quick_jit
    def run(noise, key):
        return jax.vmap(lambda s: stability.statistics(instance, s, key, runs=100_000))(
            noise
        )

    return run(1 / jnp.array([0.05, 0.1, 0.2, 1.0, 2.0]), jax.random.key(0))


def test_stability_row_15_advantage_follows_the_formula(heard):
    levels = np.linspace(-1, 3, 41)
    for delta, out, inside in zip([0.05, 0.1, 0.2, 1, 2], *heard, strict=True):
        got = np.asarray(stability.advantage(out, inside, levels / delta))
        wanted = [
            theory.mia_success(delta, z)
            if z >= 0
            # P is symmetric about Delta / 2.
            else theory.mia_success(delta, delta - z)
            for z in levels
        ]
        np.testing.assert_allclose(got, wanted, atol=0.02)
        if delta >= 1:  # below, the maximum is too flat for this many runs
            assert levels[got.argmax()] == pytest.approx(delta / 2, abs=0.2)
        best = stability.advantage(out, inside, 0.5)
        assert best == pytest.approx(theory.mia_success(delta), abs=0.02)
        assert np.all(got <= best + 0.01)


def test_stability_row_15_advantage_is_proportional_to_a_small_separation(heard):
    deltas = np.array([0.05, 0.1, 0.2])
    got = [stability.advantage(a, b, 0.5) for a, b in zip(*heard, strict=True)]
    ratio = np.array(got[:3]) / deltas
    np.testing.assert_allclose(ratio / math.sqrt(2 * math.pi) ** -1, 1, atol=0.05)


# --- arguments ------------------------------------------------------------------------


def test_arguments_out_of_range_say_so():
    def lower(*args, **options):
        return stability.lower_bound(*args, **({"rounds": 4} | options))

    for call, text in {
        "majority": (lambda: lower(4, 2, 1), "f < n/2, got f=2, n=4"),
        "examples": (lambda: lower(4, 1, 0), "m must be at least 1, got m=0"),
        "listening": (lambda: lower(4, 1, 1, num_test=5), "num_test must be at most 4"),
        "level": (lambda: lower(4, 1, 1, level=-1.0), "level must be"),
        "clip": (lambda: lower(4, 1, 1, lipschitz=0.0), "lipschitz must be"),
        "eigenvalue": (lambda: lower(4, 1, 1, eigenvalue=-1.0), "eigenvalue must be"),
        "attackers": (lambda: stability.noise_free(4, 0, 1, rounds=2), "f must be at"),
        "margin": (
            lambda: stability.noise_free(4, 1, 1, rounds=2, margin=1.0),
            "margin must",
        ),
        "noise": (
            lambda: stability.measure(lower(4, 1, 1), -1.0, 0, runs=1),
            "noise_std must be",
        ),
        "runs": (
            lambda: stability.measure(lower(4, 1, 1), 1.0, 0, runs=0),
            "runs must be at least 1",
        ),
    }.values():
        with pytest.raises(ValueError, match=text):
            call()
    shards = lower(4, 1, 2).shards
    with pytest.raises(ValueError, match="other must be a tree of shapes"):
        stability.coupled(None, shards, lower(4, 1, 3).shards, None, 1, 0)
