# SPDX-License-Identifier: Apache-2.0
"""DRAG: numbers of test names are rows of the checklist of its specification."""

import functools

import drag_oracle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from toys import quick_jit

import jaxfed
from jaxfed import _tree, attacks
from jaxfed.aggregators import mean
from jaxfed.algorithms._drag import CalibratedState, calibrated, drag, safe_norms


def normal(*shape):
    """Return the same numbers for the same shape."""
    return np.random.default_rng(shape).normal(size=shape)


# 1200 pairs of an update and a reference, of any angle and of sizes 1e-3 to 1e3.
PAIRS = normal(2, 1200, 6) * 10 ** (2 * normal(2, 1200, 1).clip(-1.5, 1.5))
UPDATES, REFERENCES = PAIRS.astype(np.float32)
UPDATES[:200] += 3 * REFERENCES[:200]
UPDATES[200:400] -= 3 * REFERENCES[200:400]


def close(actual, expected, tol):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tol)


def later(reference):
    """The state of a rule that is past its first round."""
    return CalibratedState(jax.tree.map(jnp.asarray, reference), jnp.int32(1))


def apply(rule, rows, state, **extra):
    return quick_jit(lambda *a: rule.update(*a, **extra))(rows, state)


def observe(rule, rows, state, **extra):
    return quick_jit(lambda *a: rule.observe(*a, **extra))(rows, state)


@quick_jit
def calibrate(rows, reference, strength):
    """What one round makes of rows ``[n, d]``; with one row, its v."""
    rule = calibrated(strength=strength)
    return rule.update(rows, later(reference), reference)[0]


@quick_jit
@functools.partial(jax.vmap, in_axes=(0, 0, None))
def turned(update, reference, strength):
    return calibrate(update[None], reference, strength)


@quick_jit
@functools.partial(jax.vmap, in_axes=(0, 0, None))
def degree(update, reference, strength):
    rule = calibrated(strength=strength)
    details = rule.inspect(update[None], later(reference)).details
    return details["divergence_mean"], details["cosine_mean"]


def wide(*arrays):
    return [np.asarray(a, np.float64) for a in arrays]


def geometry(g, r):
    """Norms and cosines of rows, in float64."""
    g, r = wide(g, r)
    a, b = np.linalg.norm(g, axis=1), np.linalg.norm(r, axis=1)
    return a, b, np.sum(g * r, axis=1) / (a * b)


# --- What the library around it must do --------------------------------------------


@pytest.mark.parametrize("steps", [1, 4])
def test_row_1_local_update_on_a_quadratic(steps):
    eta, rng = 0.1, np.random.default_rng(1)
    root = rng.normal(size=(5, 5))
    hessian, centre, theta = root @ root.T / 5, *rng.normal(size=(2, 5))

    def loss(params, batch):
        moved = jnp.concatenate([params["a"], params["b"].ravel()]) - batch["c"][0]
        return (0.5 * moved @ jnp.float32(hessian) @ moved)[None]

    work = jaxfed.local_sgd(loss, optax.sgd(eta), steps=steps, batch_size=1)
    params = {"a": jnp.float32(theta[:3]), "b": jnp.float32(theta[3:].reshape(2, 1))}
    shard = jaxfed.Shard({"c": jnp.float32(centre)[None]}, jnp.int32(1))
    update, _ = quick_jit(work)({"params": params}, shard, jax.random.key(0))
    contraction = np.linalg.matrix_power(np.eye(5) - eta * hessian, steps)
    expected = (np.eye(5) - contraction) @ (theta - centre)
    if steps == 1:
        close(expected, eta * hessian @ (theta - centre), 1e-12)
    close(toys.ravel(update), expected, 1e-5 * np.linalg.norm(expected))


@pytest.fixture(scope="module")
def participation():
    """10^4 cohorts of 10 of 40 clients, 12 of them Byzantine."""
    many, clients, size, byzantine = 10_000, 40, 10, 12

    def init(params):
        del params
        return (
            jnp.zeros(clients, jnp.int32),
            jnp.zeros(size + 1, jnp.int32),
            jnp.bool_(1),
        )

    def update(updates, state, params=None, *, byzantine, cohort, **extra):
        del params, extra
        seen, hostile, distinct = state
        drawn = jnp.zeros_like(seen).at[cohort].add(1)
        hostile = hostile.at[jnp.sum(byzantine)].add(1)
        return updates, (seen + drawn, hostile, distinct & (jnp.max(drawn) == 1))

    wire = optax.GradientTransformationExtraArgs(init, update)
    attack = jaxfed.Attack(lambda shards, byzantine: shards, wire)
    algorithm = drag(local_work=toys.zero_gradient)
    sim = jaxfed.simulate(
        algorithm, clients, num_byzantine=byzantine, attack=attack, cohort_size=size
    )

    @quick_jit
    def count(seed):
        state = sim.init(jnp.zeros(1), jax.random.key(seed))
        shards = toys.centres(np.zeros((clients, 1)))
        return sim.run(state, shards, many)[0].attack

    first, again = (jax.tree.map(np.asarray, count(4)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    other = count(5)
    assert np.any(np.asarray(other[0]) != first[0])
    return first


def test_row_2_uniform_sampling_without_replacement(participation):
    seen, _, distinct = participation
    assert distinct and seen.sum() == 100_000
    deviation = np.sqrt(0.25 * 0.75 * 10_000)
    assert np.abs(seen - 2500).max() < 3 * deviation
    # As far apart as they should be: chi squared with 39 degrees, within 99.9 %.
    spread = np.sum((seen - 2500) ** 2) / deviation**2
    assert 16 < spread < 73


def test_row_16_number_of_malicious_participants_is_hypergeometric(participation):
    _, hostile, _ = participation
    share = hostile / 10_000
    assert abs(share @ np.arange(11) - 3) < 0.05
    assert abs(share[5:].sum() - 0.117) < 0.015
    assert abs(share[6:].sum() - 0.026) < 0.006


def test_row_16_attacks_leave_benign_rows_alone():
    clients, size = 8, 5

    def sent(attack):
        def update(updates, state, params=None, **extra):
            del state
            out, _ = attack.wire.update(updates, (), params, **extra)
            return out, (out, extra["byzantine"])

        first = (jnp.zeros((size, 3)), jnp.zeros(size, bool))
        wire = optax.GradientTransformationExtraArgs(lambda params: first, update)
        sim = jaxfed.simulate(
            drag(local_work=toys.quadratic),
            clients,
            num_byzantine=3,
            attack=jaxfed.Attack(attack.poison, wire),
            cohort_size=size,
        )
        shards = toys.centres(np.arange(24).reshape(8, 3))
        state = quick_jit(lambda: sim.step(sim.init(jnp.ones(3), 2), shards))()[0]
        return jax.tree.map(np.asarray, state.attack)

    (off, byzantine), (on, same) = sent(attacks.none()), sent(attacks.sign_flip())
    assert 0 < byzantine.sum() < size and np.array_equal(byzantine, same)
    np.testing.assert_array_equal(on[~byzantine], off[~byzantine])
    np.testing.assert_array_equal(on[byzantine], -off[byzantine])
    assert np.all(np.any(off != 0, axis=1))


# --- One row ------------------------------------------------------------------------


def test_row_3_degree_of_divergence():
    c = 0.3
    cases = {"parallel": 0, "opposite": 2 * c, "orthogonal": c}
    scale = np.float32(10 ** np.linspace(-6, 6, 1200)[:, None])
    rows = {
        "parallel": scale * REFERENCES,
        "opposite": -scale * REFERENCES,
        "orthogonal": REFERENCES[:, [1, 0, 3, 2, 5, 4]] * np.float32([1, -1] * 3),
        "any": UPDATES,
    }
    for name, g in rows.items():
        found, cosines = degree(g, REFERENCES, c)
        assert np.all(found >= 0) and np.all(found <= np.float32(2 * c))
        assert np.all(np.abs(cosines) <= 1)  # rounding gave 1 + 1e-7 before the clip
        expected = cases.get(name)
        if expected is None:
            expected = c * (1 - geometry(g, REFERENCES)[2])
        close(found, np.broadcast_to(expected, 1200), 1e-6)


@pytest.mark.parametrize("c", [0.0, 0.1, 0.25, 0.5, 1.0])
def test_row_4_facts_of_the_calibration(c):
    v, g, r = wide(turned(UPDATES, REFERENCES, c), UPDATES, REFERENCES)
    a, b, cosine = geometry(g, r)
    s = 1 - cosine
    expected = [
        drag_oracle.drag_row(x, y, c) / np.linalg.norm(x)
        for x, y in zip(g, r, strict=True)
    ]
    close(v / a[:, None], expected, 1e-5)
    # 1: along r nothing is lost.
    gain = np.sum((v - g) * r, axis=1) / (a * b)
    close(gain, c * s**2, 1e-5)
    # 2: length.
    ratio = np.linalg.norm(v, axis=1) / a
    close(ratio**2, 1 - 2 * c * s**2 * (1 - c * s), 1e-5)
    assert np.all(ratio <= max(1, abs(4 * c - 1)) + 1e-5)
    # 3: alignment, at least 1 - 1 / (4 c), or 4 c - 1 for small c.
    along = np.sum(v * r, axis=1) / (a * b)
    close(along, cosine + c * s**2, 1e-5)
    assert np.all(along >= (1 - 1 / (4 * c) if c >= 0.25 else 4 * c - 1) - 1e-5)
    # 4: equivariant in the update, invariant in the reference.
    longer = turned(8 * UPDATES, REFERENCES, c)
    close(longer / (8 * a[:, None]), v / a[:, None], 1e-5)
    close(turned(UPDATES, REFERENCES / 16, c) / a[:, None], v / a[:, None], 1e-5)
    # 5: reversal, factors below 0, needs c > 1/2.
    assert (np.max(c * s) > 1) == (c > 0.5)


def test_row_4_opposite_updates_vanish_at_a_quarter():
    v = turned(-3 * REFERENCES, REFERENCES, 0.25)
    close(v / np.linalg.norm(REFERENCES, axis=1)[:, None], np.zeros_like(v), 1e-6)


def test_row_6_reversal():
    r = np.float32([[1, -2, 3]])
    close(degree(-r, r, 1.0)[0], [2], 1e-6)
    close(turned(-r, r, 1.0), 3 * r, 1e-5)


def test_another_divergence():
    # arccos, of which 1 - cosine is a straight line, in quarter turns.
    rule = calibrated(strength=0.4, divergence=lambda c: jnp.arccos(c) * 2 / jnp.pi)
    r, g = np.float32([2, 0]), np.float32([[1, 1]])
    v, _ = rule.update(g, later(r), r)
    close(v, [0.8 + 0.2 * np.sqrt(2), 0.8], 1e-6)


# --- One round ----------------------------------------------------------------------


def two_rounds_by_hand(dtype):
    rule = calibrated(alpha=0.25, strength=0.25)
    rows = jnp.array([[1, 0], [0, 1]], dtype)
    state = rule.init(rows[0])
    first, state = apply(rule, rows, state)
    return first, state, observe(rule, rows, state)


@pytest.mark.parametrize("x64", [False, True])
def test_row_8_drag_round_by_hand(x64):
    with jax.enable_x64(x64):
        dtype, tol = (jnp.float64, 1e-7) if x64 else (jnp.float32, 1e-6)
        step, state, (_, _, info) = two_rounds_by_hand(dtype)
        # r = (.5, .5), cosine 1 / sqrt 2, lambda = .0732233.
        close(step, [0.5151650, 0.5151650], tol)
        close(state.reference, [0.5037913, 0.5037913], tol)
        assert step.dtype == state.reference.dtype == dtype
        close(info.details["divergence_mean"], 0.0732233, tol)
        close(info.details["cosine_max"], np.sqrt(0.5), 1e-6)


def test_row_8_whole_algorithm_by_hand():
    """The same from clients whose local work gives (-1, 0) and (0, -1)."""
    algorithm = drag(0.5, alpha=0.25, strength=0.25, local_work=toys.quadratic)
    sim = jaxfed.simulate(algorithm, 2, inspect=True)
    state = sim.init(jnp.zeros(2), 0)
    state, metrics = quick_jit(sim.step)(state, toys.centres([[1, 0], [0, 1]]))
    close(sim.model(state), [0.5 * 0.5151650] * 2, 1e-7)
    close(metrics["weights"], [(1 - 0.0732233) / 2] * 2, 1e-6)
    close(metrics["step_ratio"], 2 * 0.5151650, 1e-6)
    close(metrics["reference_norm"], np.sqrt(0.5), 1e-6)
    assert metrics["ignored_rows"] == 0


def test_row_7_reference_recursion_equals_its_closed_form():
    alpha, rounds = 0.3, 20
    rows = np.float32(normal(rounds, 4, 5) + 1)
    rule = calibrated(alpha=alpha, strength=0.4)

    def body(state, x):
        step, state = rule.update(x, state, x[0])
        return state, (step, state.reference)

    _, (steps, references) = quick_jit(
        lambda rows: jax.lax.scan(body, rule.init(rows[0, 0]), rows)
    )(rows)
    raw = rows[0].mean(0)  # r^0
    for t in range(1, rounds + 1):
        weights = alpha * (1 - alpha) ** (t - 1 - np.arange(t))
        expected = (1 - alpha) ** t * raw + weights @ np.asarray(steps[:t])
        close(references[t - 1], expected, 1e-5)


def test_row_7_alpha_one_remembers_the_last_step_only():
    rule = calibrated(alpha=1, strength=0.4)
    rows = np.float32(normal(3, 5))
    step, state = apply(rule, rows, rule.init(rows[0]))
    np.testing.assert_array_equal(state.reference, step)


def test_row_8_mean_form():
    """Fact 6: the mean of the v without any v."""
    g, r, c = normal(7, 5), normal(5), 0.35
    with jax.enable_x64(True):
        step = calibrate(jnp.asarray(g), jnp.asarray(r), c)
    a, cosine = np.linalg.norm(g, axis=1), g @ r / np.linalg.norm(r)
    cosine = cosine / a
    extra = c / 7 * np.sum(a * np.linalg.norm(r) - g @ r) / (r @ r)
    expected = (1 - c) * g.mean(0) + c / 7 * cosine @ g + extra * r
    close(step, expected, 1e-12)
    explicit = np.mean([drag_oracle.drag_row(x, r, c) for x in g], axis=0)
    close(step, explicit, 1e-12)


def test_row_8_identical_updates_at_first_are_fedavg():
    row = np.float32(normal(9))
    rule = calibrated(strength=1.0)
    step, _ = apply(rule, np.tile(row, (5, 1)), rule.init(row))
    close(step, row, 1e-6)


PROBLEM = toys.Regression(7, m=6)
WORK = jaxfed.local_sgd(PROBLEM.loss, optax.sgd(0.05), steps=3, batch_size=2)


def test_row_8_strength_zero_is_fedavg():
    fedavg = mean()
    fedavg = jaxfed.from_chains(
        WORK, optax.identity(), (fedavg, optax.sgd(1.0)), rule=fedavg
    )

    def models(algorithm):
        sim = jaxfed.simulate(algorithm, 7, cohort_size=4)
        return drag_oracle.trajectory(
            sim,
            PROBLEM.params,
            PROBLEM.shards,
            6,
            lambda s, _: toys.ravel(sim.model(s)),
        )

    close(models(drag(strength=0.0, local_work=WORK)), models(fedavg), 1e-6)


@pytest.mark.parametrize("x64", [False, True])
def test_row_8_trajectory_of_algorithm_1(x64):
    rounds, alpha, c = 6, 0.25, 0.4
    with jax.enable_x64(x64):
        algorithm = drag(alpha=alpha, strength=c, local_work=WORK)
        attack = drag_oracle.record_cohorts(attacks.none(), 4)
        sim = jaxfed.simulate(algorithm, 7, attack=attack, cohort_size=4)
        models, cohorts = drag_oracle.trajectory(
            sim,
            PROBLEM.params,
            PROBLEM.shards,
            rounds,
            lambda s, _: (toys.ravel(sim.model(s)), s.attack),
        )
        batches = drag_oracle.record_batches(
            jax.random.key(3), PROBLEM.shards, range(7), rounds, 3, 2
        )
    expected, _ = drag_oracle.drag(
        PROBLEM, PROBLEM.flat, cohorts, batches, 0.05, alpha, c
    )
    assert len({tuple(c) for c in cohorts}) > 1
    close(models, expected[1:], 1e-12 if x64 else 1e-6)


# --- Special cases ------------------------------------------------------------------


BAD = [np.nan, np.inf, -np.inf, 3e38, 1e36]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("first", [True, False], ids=["first round", "later"])
def test_row_13_bad_rows_count_as_zero(value, first):
    g = np.float32(normal(4, 5))
    r = np.float32(normal(5))
    g[2] = 0
    bad = g.copy()
    bad[2, 1:] = value  # one good entry does not save a row
    rule = calibrated(strength=0.4)
    state, seen = rule.init(r) if first else later(r), quick_jit(rule.observe)
    (a, s, info), (b, t, _) = seen(bad, state), seen(g, state)
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(s.reference, t.reference)
    assert info.details["ignored_rows"] == 1 and info.weights[2] == 0
    if first:  # a zero row counts in the mean that r starts from
        close(info.details["reference_norm"], np.linalg.norm(g.sum(0) / 4), 1e-6)
    else:
        rows = [drag_oracle.drag_row(x, r, 0.4) for x in np.delete(g, 2, 0)]
        close(a, sum(rows) / 4, 1e-6)


def test_row_13_no_reference_no_turning():
    g = np.float32(normal(4, 5))
    for r in (np.zeros(5), np.full(5, 1e-13)):
        close(calibrate(g, np.float32(r), 0.4), g.mean(0), 1e-6)
    cancel = np.float32([[1, 2], [-1, -2]])  # r^0 = 0
    rule = calibrated()
    step, state = apply(rule, cancel, rule.init(cancel[0]))
    assert not np.any(step) and not np.any(state.reference)


def test_row_13_no_updates_no_step():
    r = np.float32([1, 2])
    for tiny in (0, 1e-13):
        assert not np.any(calibrate(np.full((3, 2), tiny, np.float32), r, 0.4))


def test_row_13_single_client_at_first():
    row = np.float32([[0.3, -2, 5]])
    rule = calibrated(strength=1.0)
    step, _ = apply(rule, row, rule.init(row[0]))
    close(step, row[0], 1e-6)


@pytest.mark.parametrize("size", [1e-9, 1e-4, 1e18, 1e30])
def test_row_13_sizes_that_squares_do_not_survive(size):
    g, r = np.float32(normal(3, 5)), np.float32(normal(5))
    expected = np.mean([drag_oracle.drag_row(x, r, 0.4) for x in wide(g)[0]], axis=0)
    close(calibrate(g * np.float32(size), r, 0.4) / size, expected, 1e-5)
    close(calibrate(g, r * np.float32(size), 0.4), expected, 1e-5)
    close(safe_norms(g * np.float32(size)) / size, np.linalg.norm(g, axis=1), 1e-5)


def test_row_13_model_after_bad_uploads_has_no_nan():
    values = jnp.float32([np.nan, np.inf, 1e30, 0.0])

    @quick_jit
    @jax.vmap
    def go(value):
        def update(updates, state, params=None, *, byzantine, **extra):
            del params, extra
            bad = jax.tree.map(lambda x: jnp.full(x.shape[1:], value), updates)
            return _tree.where_rows(~byzantine, updates, bad), state

        wire = optax.GradientTransformationExtraArgs(lambda p: (), update)
        attack = jaxfed.Attack(lambda shards, byzantine: shards, wire)
        sim = jaxfed.simulate(
            drag(local_work=WORK), 7, num_byzantine=2, attack=attack, inspect=True
        )
        state, metrics = sim.run(sim.init(PROBLEM.params, 0), PROBLEM.shards, 4)
        return toys.ravel(sim.model(state)), metrics["ignored_rows"]

    models, ignored = map(np.asarray, go(values))
    assert np.all(np.isfinite(models))
    assert np.all(ignored[[0, 1, 3]] == 2)
    assert np.all(np.abs(models[[0, 1, 3]]) < 10)


@quick_jit
def gradient_of_a_round(rows, reference):
    return jax.grad(lambda x, r: jnp.sum(calibrate(x, r, 0.3) ** 2), (0, 1))(
        rows, reference
    )


def test_row_13_gradients_are_finite():
    g, r = np.float32(normal(4, 5)), np.float32(normal(5))
    for value in (0.0, np.nan, np.inf, 1.0):
        g[1] = value
        for reference in (r, 0 * r, g[0]):
            slopes = gradient_of_a_round(g, reference)
            assert all(np.all(np.isfinite(s)) for s in slopes)


def test_gradients_agree_with_finite_differences():
    with jax.enable_x64(True):
        g, r = normal(4, 5), normal(5)

        @quick_jit
        def value(x, r):
            return jnp.sum(jnp.sin(calibrate(x, r, 0.3)))

        slopes = quick_jit(jax.grad(value, (0, 1)))(g, r)
        for i, shape in ((0, (4, 5)), (1, (5,))):
            for at in list(np.ndindex(shape))[::3]:
                up, down = [g.copy(), r.copy()], [g.copy(), r.copy()]
                up[i][at] += 1e-6
                down[i][at] -= 1e-6
                slope = (value(*up) - value(*down)) / 2e-6
                close(slopes[i][at], slope, 1e-8)


# --- Properties ---------------------------------------------------------------------

ANY = st.one_of(
    st.integers(-9, 9).map(float),
    st.sampled_from([np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-30, 3e38]),
)


@given(
    rows=arrays(np.float32, (5, 3), elements=ANY),
    reference=arrays(np.float32, 3, elements=st.integers(-9, 9).map(float)),
    c=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_row_13_any_rows_give_finite_steps_as_the_definition_says(rows, reference, c):
    out = np.asarray(calibrate(rows, reference, np.float32(c)), np.float64)
    assert np.all(np.isfinite(out))
    good = np.isfinite(rows).all(1) & (np.abs(rows).max(1) < 1e33)
    good &= np.abs(rows).max(1) > 1e-13
    known, total = rows[good].astype(np.float64), np.zeros(3)
    for row in known:
        turn = np.any(reference)
        total += drag_oracle.drag_row(row, reference, c) if turn else row
    close(out, total / 5, 1e-5 * max(1, np.abs(known).max(initial=0)))


# --- As a link and an algorithm -----------------------------------------------------


def test_absent_rows_and_weights():
    g, r = np.float32(normal(5, 4)), np.float32(normal(4))
    rule, mask = calibrated(strength=0.3), np.array([1, 0, 1, 1, 0], bool)
    g[1] = np.nan
    masked, _, info = observe(rule, g, later(r), mask=mask)
    close(masked, calibrate(g[mask], r, 0.3), 1e-6)
    assert not np.any(info.weights[~mask]) and info.details["ignored_rows"] == 0
    weights = np.float32([2, 0, 1, 0, 3])
    weighted, _ = apply(rule, g, later(r), weights=weights)
    close(weighted, calibrate(np.repeat(g, [2, 0, 1, 0, 3], axis=0), r, 0.3), 1e-6)
    nobody, _ = apply(rule, g, later(r), mask=np.zeros(5, bool))
    assert np.all(np.isnan(nobody))
    with pytest.raises(ValueError, match="weights must have one entry for each of"):
        rule.update(g, later(r), r, weights=np.ones(4))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_cosine_for_a_whole_tree_of_any_dtype(dtype):
    g, r = (jnp.asarray(normal(*s), dtype) for s in ((4, 7), (7,)))

    def split(x):
        lead = x.shape[:-1]
        return {
            "scalar": x[..., 0],
            "matrix": x[..., 1:].reshape(*lead, 2, 3),
            "empty": x[..., :0],
        }

    out, state = apply(calibrated(strength=0.3), split(g), later(split(r)))
    leaves = jax.tree.leaves((out, state.reference))
    assert {x.dtype for x in leaves} == {jnp.dtype(dtype)}
    flat = np.concatenate([np.ravel(out[k]) for k in ("scalar", "matrix", "empty")])
    expected = [drag_oracle.drag_row(x, wide(r)[0], 0.3) for x in wide(g)[0]]
    close(flat, np.mean(expected, axis=0), 2 * float(jnp.finfo(dtype).eps))


def test_strength_may_change_over_rounds():
    g, r = np.float32(normal(3, 4)), np.float32(normal(4))
    rule = calibrated(strength=lambda t: 0.2 * t)
    state = CalibratedState(jnp.asarray(r), jnp.int32(3))
    close(apply(rule, g, state)[0], calibrate(g, r, 0.6), 1e-6)


def test_numbers_may_be_traced():
    def final(shards, lr, alpha, c):
        sim = jaxfed.simulate(drag(lr, alpha=alpha, strength=c, local_work=WORK), 7)
        state, _ = sim.run(sim.init(PROBLEM.params, 0), shards, 3)
        return toys.ravel(sim.model(state))

    numbers = np.float32([[1, 0.25, 0.1], [0.5, 0.9, 0.5]])
    over = quick_jit(jax.vmap(final, (None, 0, 0, 0)))
    together = over(PROBLEM.shards, *numbers.T)
    apart = quick_jit(lambda shards: final(shards, 0.5, 0.9, 0.5))(PROBLEM.shards)
    close(together[1], apart, 1e-6)
    assert np.any(np.abs(together[0] - apart) > 1e-3)


def test_is_one_optimizer_too():
    algorithm = drag(0.5, alpha=0.5, strength=0.3)
    optimizer = jaxfed.as_optimizer(algorithm, 4)
    g = np.float32(normal(2, 4, 3))
    params, state = jnp.zeros(3), optimizer.init(jnp.zeros(3))
    update = quick_jit(optimizer.update)
    for rows in g:
        step, state = update(rows, state, params)
        params = optax.apply_updates(params, step)
    r, total = g[0].mean(0), 0
    for rows in g:
        delta = np.mean([drag_oracle.drag_row(x, r, 0.3) for x in rows], axis=0)
        r, total = 0.5 * r + 0.5 * delta, total - 0.5 * delta
    close(params, total, 1e-6)


def test_row_25_diagnostics():
    g, r = normal(6, 5), normal(5)
    byzantine = np.arange(6) >= 4
    rule = calibrated(strength=0.3)
    with jax.enable_x64(True):
        step, _, info = observe(rule, g, later(r), byzantine=byzantine)
    seen = {k: float(v) for k, v in info.details.items()}
    cosines = np.array([drag_oracle.cosine(x, r) for x in g])
    degrees = 0.3 * (1 - cosines)
    rho = np.linalg.norm(r) / np.linalg.norm(g[:4], axis=1)
    expected = {
        "cosine_min": cosines.min(),
        "cosine_mean": cosines.mean(),
        "cosine_max": cosines.max(),
        "divergence_min": degrees.min(),
        "divergence_mean": degrees.mean(),
        "divergence_max": degrees.max(),
        "reference_norm": np.linalg.norm(r),
        "step_ratio": np.linalg.norm(step) / np.linalg.norm(g.mean(0)),
        "ignored_rows": 0,
        "byzantine_share": 1 / 3,
        "byzantine_cosine": cosines[4:].sum() / 6,
        "honest_cosine": cosines[:4].sum() / 6,
        "rho_min": rho.min(),
        "rho_max": rho.max(),
        "rho": (cosines[:4] * rho).sum() / 6,
    }
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        close(seen[name], value, 1e-12)
    close(info.weights, (1 - degrees) / 6, 1e-12)
    close(info.influence, (1 - degrees[4:]).sum() / 6, 1e-12)
    # Who is Byzantine is the simulator's knowledge.
    hidden = quick_jit(rule.inspect)(g, later(r))
    assert "rho" not in hidden.details and np.isnan(hidden.influence)


def test_rounds_report_the_diagnostics():
    sim = jaxfed.simulate(
        drag(local_work=WORK), 7, num_byzantine=2, cohort_size=3, inspect=True
    )
    _, metrics = quick_jit(lambda s: sim.run(sim.init(PROBLEM.params, 0), s, 3))(
        PROBLEM.shards
    )
    assert metrics["rho"].shape == metrics["step_ratio"].shape == (3,)
    # DRAG lengthens the mean, since the reference's part has the updates' length.
    assert np.all(np.asarray(metrics["step_ratio"]) > 1)


# --- Errors -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, "alpha must be a finite number > 0, got alpha=0.0"),
        ({"alpha": 1.1}, "alpha must satisfy 0 <= alpha <= 1, got alpha=1.1"),
        ({"strength": -0.1}, "strength must satisfy 0 <= strength <= 1"),
        ({"strength": 1.5}, "strength must satisfy .* got strength=1.5"),
        ({"learning_rate": 0.0}, "learning_rate must be a finite number > 0"),
    ],
)
def test_values_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        drag(**options)


def test_wrong_kinds():
    with pytest.raises(TypeError, match="divergence must be a function of cosines"):
        drag(divergence="arccos")
    with pytest.raises(TypeError, match="strength must be a number, got 'oracle'"):
        drag(strength="oracle")
    rule = calibrated()
    with pytest.raises(TypeError, match="must be floating point, got int32"):
        rule.update(np.ones((3, 2), np.int32), later(np.ones(2)), np.ones(2))
    sim = jaxfed.simulate(drag(local_work=WORK), 7)
    with pytest.raises(ValueError, match="root= was given, but this method has no use"):
        sim.step(sim.init(PROBLEM.params, 0), PROBLEM.shards, PROBLEM.shards)
    assert drag.needs.local_steps and not drag.needs.root_data
