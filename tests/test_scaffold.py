# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD, against loops in NumPy and by hand.

Numbers in test names are rows of the checklist of arXiv 2601.06903.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from test_fedavg_family import (
    COHORT,
    ETA,
    PROBLEM,
    ROUNDS,
    STEPS,
    N,
    go_down,
    local_work,
    record,
    square,
    watching,
)

import jaxfed
from jaxfed import aggregators
from jaxfed.algorithms._fedavg import fedavg
from jaxfed.algorithms._scaffold import scaffold

FORMS = ["gradient", "difference"]
forms = pytest.mark.parametrize("form", FORMS)


def build(form="gradient", **options):
    common = dict(num_clients=N, local_learning_rate=ETA, local_work=local_work())
    return scaffold(form=form, **{**common, **options})


def look(state):
    """Model, the server's h, the clients' h_m, and the wire's state."""
    return (
        toys.ravel(state.server.inner.params),
        toys.ravel(state.server.control),
        toys.ravel_rows(state.clients),
        state.attack,
    )


@functools.cache
def watched(form, x64):
    """Run with 3 of 5 clients a round; return what was seen, and the batches."""
    with jax.enable_x64(x64):
        sim = jaxfed.simulate(
            build(form, learning_rate=0.8), N, cohort_size=COHORT, attack=watching()
        )
        seen, _ = toys.trace(sim, PROBLEM.params, PROBLEM.shards, ROUNDS, look)
        return seen, np.asarray(record(PROBLEM.shards))


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@forms
def test_row_17_golden_trajectory(form, x64):
    (models, common, own, cohorts), batches = watched(form, x64)
    x, h, h_m = PROBLEM.flat, np.zeros(8), np.zeros((N, 8))
    close = dict(rtol=0, atol=1e-12 if x64 else 1e-6)
    for t in range(ROUNDS):
        sent, new = [], h_m.copy()
        for i in cohorts[t + 1]:
            sent.append(go_down(i, batches[t, i], x, correction=h - h_m[i]))
            if form == "gradient":
                new[i] = PROBLEM.gradient(i, batches[t, i, 0], x)
            else:
                new[i] = h_m[i] - h + sent[-1] / (STEPS * ETA)
        h = h + (new - h_m).sum(0) / N
        h_m, x = new, x - 0.8 * np.mean(sent, axis=0)
        np.testing.assert_allclose(models[t + 1], x, **close)
        np.testing.assert_allclose(common[t + 1], h, **close)
        np.testing.assert_allclose(own[t + 1], h_m, **close)


@forms
def test_row_17_control_is_the_mean_over_all_clients(form):
    """Whoever is sampled; those who are not keep theirs."""
    (_, common, own, cohorts), _ = watched(form, True)
    np.testing.assert_allclose(common, own.mean(1), rtol=0, atol=1e-14)
    assert np.all(np.abs(common[1:]).max(1) > 0.1)
    for t in range(ROUNDS):
        away = np.setdiff1d(np.arange(N), cohorts[t + 1])
        np.testing.assert_array_equal(own[t + 1, away], own[t, away])
        assert np.all(np.any(own[t + 1] != own[t], axis=1)[cohorts[t + 1]])


@forms
def test_row_17_difference_is_the_mean_of_the_gradients_taken(form):
    """Option II by its meaning; option I is the first of these gradients."""
    (models, common, own, cohorts), batches = watched(form, True)
    for t in range(ROUNDS):
        for i in cohorts[t + 1]:
            x, taken = models[t], []
            for batch in batches[t, i]:
                taken.append(PROBLEM.gradient(i, batch, x))
                x = x - ETA * (taken[-1] - own[t, i] + common[t])
            expected = taken[0] if form == "gradient" else np.mean(taken, axis=0)
            np.testing.assert_allclose(own[t + 1, i], expected, atol=1e-12)


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
def test_row_17_two_rounds_by_hand(x64):
    """Clients at 1 and 3, from 0, two steps of 1/2."""
    by_hand = {  # model, h, h_1, h_2
        "gradient": [[1.5, -2, -1, -3], [1.875, -0.5, 0.5, -1.5]],
        "difference": [[1.5, -1.5, -0.75, -2.25], [1.875, -0.375, 0.5625, -1.3125]],
    }

    def run(shards):
        seen = {}
        for form in FORMS:
            work = jaxfed.local_sgd(square, optax.sgd(0.5), steps=2)
            options = dict(num_clients=2, local_learning_rate=0.5, local_work=work)
            sim = jaxfed.simulate(build(form, **options), 2)
            state, seen[form] = sim.init(jnp.array(0.0), 0), []
            for _ in range(2):
                state, _ = sim.step(state, shards)
                seen[form].append(jnp.hstack(look(state)[:2] + (state.clients,)))
        return seen

    with jax.enable_x64(x64):
        seen = toys.quick_jit(run)(toys.centres([[1.0], [3.0]]))
    for form, expected in by_hand.items():
        np.testing.assert_allclose(
            seen[form], expected, rtol=1e-12 if x64 else 1e-6, err_msg=form
        )


def test_row_17_with_identical_data_it_is_fedavg():
    """Full batches, everybody there: the corrections cancel."""
    equal = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), PROBLEM.shards)
    work = local_work(batch_size=None)

    def run(shards):
        algorithms = [build(form, local_work=work) for form in FORMS]
        models = []
        for algorithm in [fedavg(local_work=work), *algorithms]:
            sim = jaxfed.simulate(algorithm, N)
            state, _ = sim.run(sim.init(PROBLEM.params, 0), shards, 5)
            models.append(toys.ravel(sim.model(state)))
        return models

    average, *corrected = toys.quick_jit(run)(equal)
    assert np.abs(average - PROBLEM.flat.astype(np.float32)).max() > 0.1
    for model in corrected:
        np.testing.assert_allclose(model, average, rtol=0, atol=1e-6)


def test_it_ends_at_the_optimum_where_fedavg_drifts_away():
    """(x - 1)^2 / 2 and 9 (x + 1)^2 / 2: the mean has its minimum at -0.8."""

    def loss(params, batch):
        return 0.5 * batch["s"] * jnp.square(params - batch["a"])

    data = {"a": jnp.array([[1.0], [-1.0]]), "s": jnp.array([[1.0], [9.0]])}
    shards = jaxfed.Shard(data, jnp.ones(2, jnp.int32))
    work = jaxfed.local_sgd(loss, optax.sgd(0.05), steps=5)
    options = dict(num_clients=2, local_learning_rate=0.05, local_work=work)

    @toys.quick_jit
    def run(shards):
        models = []
        for built in (fedavg(local_work=work), *(build(f, **options) for f in FORMS)):
            sim = jaxfed.simulate(built, 2)
            state, _ = sim.run(sim.init(jnp.array(0.0), 0), shards, 60)
            models.append(sim.model(state))
        return models

    average, *corrected = run(shards)
    np.testing.assert_allclose(corrected, [-0.8, -0.8], atol=1e-4)
    assert abs(average + 0.8) > 0.05


@pytest.mark.parametrize("steps", [{"steps": 2}, {"epochs": 2}])
def test_difference_counts_the_steps_a_client_took(steps):
    """Batches of 2 over 6, 3, 1 and 0 examples: 3, 2, 1 and 0 steps an epoch."""
    counts = jnp.array([6, 3, 1, 0])
    shards = jax.tree.map(lambda x: x[:4], PROBLEM.shards)._replace(count=counts)
    work = jaxfed.local_sgd(PROBLEM.loss, optax.sgd(ETA), batch_size=2, **steps)
    algorithm = build("difference", num_clients=4, local_work=work)
    taken = np.array([2, 2, 2, 0] if "steps" in steps else [6, 4, 2, 0])

    @toys.quick_jit
    def run(shards):
        params = PROBLEM.params
        start = jax.tree.map(jnp.ones_like, algorithm.client.init(params, 0))
        message = {"params": params, "control": jax.tree.map(lambda x: 3 * x, start)}
        keys = jax.random.split(jax.random.key(0), 4)
        return jax.vmap(algorithm.client.update, (None, None, 0, 0))(
            message, start, shards, keys
        )

    upload, own, _ = run(shards)
    sent, own = toys.ravel_rows(upload["update"]), toys.ravel_rows(own)
    # From h_m = 1 and h = 3.
    expected = 1 - 3 + np.asarray(sent)[:3] / (ETA * taken[:3, None])
    np.testing.assert_allclose(own[:3], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(own[3], np.ones(8))
    np.testing.assert_allclose(toys.ravel_rows(upload["control"]), own - 1, atol=1e-6)


# --- Server half -----------------------------------------------------------------


def upload(*rows):
    """Uploads for a scalar model from pairs ``(update, control)``."""
    update, control = np.array(rows, np.float32).T
    return {"update": jnp.asarray(update), "control": jnp.asarray(control)}


def test_control_is_summed_over_all_clients_not_over_the_cohort():
    server = scaffold(num_clients=4).server
    state = server.init(jnp.array(5.0))
    sent = upload((1, 1), (3, 7), (100, 40))
    cohort = jnp.array([3, 0, 2])
    new, info = server.update(sent, state, cohort=cohort)
    assert info is None
    np.testing.assert_allclose([new.control, new.inner.params], [12, 5 - 104 / 3], 1e-6)
    mask = jnp.array([True, True, False])
    new, info = server.update(
        sent, new, cohort=cohort, mask=mask, byzantine=jnp.array([True, False, False])
    )
    np.testing.assert_allclose(
        [new.control, server.model(new)], [14, 3 - 104 / 3], 1e-6
    )
    np.testing.assert_allclose(info.weights, [0.5, 0.5, 0])
    np.testing.assert_allclose(info.influence, 0.5)
    # Weights are for the rule: the control stays the mean over clients.
    new, _ = server.update(sent, state, weights=jnp.array([3.0, 1.0, 0.0]))
    np.testing.assert_allclose([new.control, new.inner.params], [12, 3.5], 1e-6)
    message = server.broadcast(new)
    assert set(message) == {"params", "round", "control"}
    with pytest.raises(ValueError, match="no weighted form"):
        scaffold(num_clients=4, rule=aggregators.krum(0)).server.update(
            sent, state, weights=jnp.ones(3)
        )


def test_rule_sees_updates_only_and_bad_controls_change_nothing():
    server = scaffold(num_clients=4, rule=aggregators.median()).server
    state = server.init(jnp.array(0.0))
    for bad in (np.inf, -np.inf, np.nan):
        new, _ = server.update(upload((1, 4), (2, 8), (9, bad)), state)
        np.testing.assert_allclose([new.control, new.inner.params], [3, -2])


@pytest.mark.parametrize("attack", ["nan", "sign_flip"])
def test_a_robust_rule_under_attack(attack):
    """The attack forges both parts of an upload."""
    algorithm = build("difference", rule=aggregators.median(1))
    sim = jaxfed.simulate(
        algorithm,
        N,
        num_byzantine=1,
        attack=jaxfed.make_attack(attack),
        cohort_size=4,
        inspect=True,
    )
    (models, common), _ = toys.trace(
        sim, PROBLEM.params, PROBLEM.shards, 10, lambda s: look(s)[:2]
    )
    assert np.abs(models).max() < 10 and np.abs(common).max() < 10


def test_stateful_and_probing_attacks_take_its_uploads():
    def update(uploads, state, params=None, *, byzantine, probe, message, **extra):
        del params, extra
        step = probe(uploads)
        assert jax.tree.structure(step) == jax.tree.structure(message["control"])
        flipped = jax.tree.map(lambda x: jnp.where(byzantine[0], -x, x), uploads)
        return flipped, toys.ravel(step)

    wire = optax.GradientTransformationExtraArgs(lambda p: jnp.zeros(8), update)
    attack = jaxfed.Attack(lambda shards, byzantine: shards, wire)
    sim = jaxfed.simulate(build(), N, attack=attack)
    state = sim.init(PROBLEM.params, 0)
    new, _ = toys.quick_jit(sim.step)(state, PROBLEM.shards)
    moved = toys.ravel(sim.model(new)) - toys.ravel(sim.model(state))
    np.testing.assert_allclose(new.attack, moved, atol=1e-6)


# --- Sweeps and state ------------------------------------------------------------


def test_traced_numbers_mean_what_python_numbers_mean():
    def go(learning_rate, eta):
        built = build(
            "difference",
            learning_rate=learning_rate,
            local_learning_rate=eta,
            local_work=local_work(eta=eta),
        )
        sim = jaxfed.simulate(built, N)
        state, _ = sim.run(sim.init(PROBLEM.params, 0), PROBLEM.shards, 3)
        return toys.ravel(sim.model(state))

    rates = np.array([[1.0, 0.1], [0.5, 0.05]])
    together = toys.quick_jit(jax.vmap(go))(*rates.T)
    alone = toys.quick_jit(lambda: go(*rates[1].tolist()))()
    np.testing.assert_allclose(together[1], alone, rtol=1e-4, atol=1e-5)
    assert np.abs(together[0] - together[1]).max() > 1e-2


@forms
def test_state_keeps_its_types_in_bfloat16(form):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PROBLEM.params)
    data = {k: PROBLEM.shards.data[k].astype(jnp.bfloat16) for k in "xy"}
    shards = PROBLEM.shards._replace(data=data)

    def go(eta):
        sim = jaxfed.simulate(build(form, local_learning_rate=eta), N)
        first = sim.init(params, 0)
        return first, sim.run(first, shards, 2)[0]

    first, last = jax.eval_shape(go, jnp.float32(0.1))
    facts = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), first)
    assert facts == jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), last)
    assert {
        x.dtype for x in jax.tree.leaves(last) if jnp.issubdtype(x.dtype, jnp.inexact)
    } == {jnp.dtype(jnp.bfloat16)}


def test_donated_state_can_be_made_again():
    sim, params = jaxfed.simulate(build(), N), PROBLEM.params
    step = toys.quick_jit(sim.step, donate_argnums=0)
    ends = []
    for _ in range(2):
        state, _ = step(sim.init(params, 0), PROBLEM.shards)
        ends.append(toys.ravel(sim.model(state)))
    np.testing.assert_array_equal(*ends)


# --- Errors ----------------------------------------------------------------------


def test_errors():
    with pytest.raises(TypeError, match="scaffold changes each local step: build"):
        build(local_work=jaxfed.gradient(PROBLEM.loss))
    with pytest.raises(ValueError, match="form must be one of 'gradient', 'diff"):
        build("options")
    with pytest.raises(ValueError, match="divides by the local step size: pass"):
        build("difference", local_learning_rate=None)
    for value in (0.0, -0.1, np.nan):
        with pytest.raises(ValueError, match="local_learning_rate must be a finite"):
            build(local_learning_rate=value)
        with pytest.raises(ValueError, match="learning_rate must be a finite number"):
            build(learning_rate=value)
    with pytest.raises(TypeError, match="rule must be an aggregator"):
        build(rule=optax.identity())
    with pytest.raises(TypeError, match="num_clients must be a Python int"):
        build(num_clients=2.5)
    with pytest.raises(ValueError, match="run it with jaxfed.simulate"):
        jaxfed.as_optimizer(build(), N)
    few = scaffold(num_clients=2).server
    with pytest.raises(ValueError, match="3 rows but num_clients=2"):
        few.update(upload((1, 1), (1, 1), (1, 1)), few.init(jnp.array(0.0)))
    sim = jaxfed.simulate(build(local_work=None), N)
    with pytest.raises(ValueError, match="built without local work"):
        sim.step(sim.init(PROBLEM.params, 0), PROBLEM.shards)


def test_what_a_configuration_must_give():
    assert scaffold.needs.local_steps and scaffold.needs.rule is None
