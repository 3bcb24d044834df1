# SPDX-License-Identifier: Apache-2.0
"""Simulation: who takes part, what the wire carries, and how a round is split up."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import jaxfed
from jaxfed import aggregators, algorithms, attacks
from jaxfed.links import AccumulateState, EmaState
from jaxfed.sharding import client_mesh, shard_clients

N, F = 8, 2
PROBLEM = toys.Regression(N)


def algorithm(rule="nnm+trimmed_mean", f=F, **options):
    defaults = dict(
        rule=jaxfed.make_aggregator(rule, num_byzantine=f),
        num_clients=N,
        key=3,
        clip_norm=0.5,
        noise_std=0.1,
        momentum=0.8,
        server_momentum=0.7,
        local_work=jaxfed.gradient(PROBLEM.loss, batch_size=3),
    )
    return algorithms.byz_clip21_sgd2m(0.2, **(defaults | options))


def simulate(rule="nnm+trimmed_mean", f=F, attack=None, method=None, **options):
    """Simulate :func:`algorithm` built with the options ``method``."""
    method = algorithm(rule, f, **(method or {}))
    attack = attacks.ipm() if attack is None else attack
    return jaxfed.simulate(method, N, num_byzantine=f, attack=attack, **options)


def memories(state):
    (memory,) = toys.states(state.server.inner, AccumulateState)
    return np.asarray(toys.ravel_rows(memory.total))


def momenta_of(state):
    (average,) = toys.states(state.clients, EmaState)
    return toys.ravel_rows(average.average)


def momenta(state):
    return np.asarray(momenta_of(state))


def assert_close(a, b, rtol=1e-6, atol=1e-6):
    def leaf(x, y):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)

    jax.tree.map(leaf, a, b)


def spy(update, initial):
    """An attack on the wire from ``update(uploads, state, byzantine, probe)``."""

    def link(updates, state, params=None, *, byzantine, probe, **extra):
        del params, extra
        return update(updates, state, byzantine, probe)

    wire = optax.GradientTransformationExtraArgs(initial, link)
    return jaxfed.Attack(lambda shards, byzantine: shards, wire)


# --- Rounds ----------------------------------------------------------------------


def test_run_is_that_many_steps():
    sim = simulate()
    state = stepped = sim.init(PROBLEM.params, 0)
    run = toys.quick_jit(sim.run, static_argnums=2)
    ran, metrics = run(state, PROBLEM.shards, 5)
    step, losses = toys.quick_jit(sim.step), []
    for t in range(5):
        assert stepped.round == stepped.server.round == t
        stepped, one = step(stepped, PROBLEM.shards)
        losses.append(one["loss"])
    assert_close(ran, stepped)
    assert metrics["loss"].shape == (5,)
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-6)
    # Runs can be cut anywhere.
    again, _ = run(run(state, PROBLEM.shards, 2)[0], PROBLEM.shards, 3)
    assert_close(ran, again)


def test_simulation_from_a_seed_or_a_key():
    sim = simulate()
    one = sim.init(PROBLEM.params, 4)
    assert_close(one, sim.init(PROBLEM.params, jax.random.key(4)))
    with pytest.raises(ValueError, match="wrap_key_data"):
        sim.init(PROBLEM.params, jnp.zeros(2, jnp.uint32))


@pytest.mark.parametrize("f", range(4))
def test_the_last_ids_are_byzantine(f):
    np.testing.assert_array_equal(
        jaxfed.byzantine_ids(4, f), [i >= 4 - f for i in range(4)]
    )
    traced = jax.jit(jaxfed.byzantine_ids, static_argnums=0)(4, f)
    np.testing.assert_array_equal(traced, jaxfed.byzantine_ids(4, f))


def test_attack_sees_all_messages_and_replaces_the_byzantine_rows_only():
    def record(uploads, state, byzantine, probe):
        del state, probe
        forged, _ = attacks.ipm().wire.update(uploads, (), byzantine=byzantine)
        return forged, {"before": uploads, "after": forged, "byzantine": byzantine}

    def initial(params):
        rows = jax.tree.map(lambda p: jnp.zeros((N, *p.shape)), params)
        return {"before": rows, "after": rows, "byzantine": jnp.zeros(N, bool)}

    options = {"server_momentum": 0.0}
    sim = simulate(attack=spy(record, initial), method=options)
    state, _ = toys.quick_jit(sim.step)(sim.init(PROBLEM.params, 0), PROBLEM.shards)
    before = toys.ravel_rows(state.attack["before"])
    after = toys.ravel_rows(state.attack["after"])
    assert list(np.flatnonzero(state.attack["byzantine"])) == [6, 7]
    np.testing.assert_array_equal(before[:-F], after[:-F])
    assert np.all(np.linalg.norm(before, axis=1) > 0)  # everybody ran the client code
    np.testing.assert_allclose(after[-1], -10 * before[:-F].mean(0), rtol=1e-5)
    np.testing.assert_array_equal(memories(state), after)  # and that is what arrived


def test_metrics_are_means_over_honest_clients():
    def work(message, shard, key):
        gradient, _ = toys.quadratic(message, shard, key)
        return gradient, {"mine": jnp.sum(shard.data["a"]), "one": jnp.ones([])}

    a = np.arange(1.0, N + 1)[:, None]
    a[-1] = np.nan  # a Byzantine client may report anything
    for f, attack in ((0, attacks.none()), (F, attacks.ipm())):
        shards = toys.centres(a if f else np.nan_to_num(a))
        sim = simulate("median", f, attack, {"local_work": work})
        _, metrics = toys.quick_jit(sim.step)(sim.init(jnp.zeros(1), 0), shards)
        np.testing.assert_allclose(metrics["mine"], np.mean(shards.data["a"][: N - f]))
        assert metrics["one"] == 1


# --- Partial participation -------------------------------------------------------


def participants(old, new):
    return set(np.flatnonzero(np.any(momenta(old) != momenta(new), axis=1)))


def rows(tree, ids):
    return jax.tree.map(lambda x: x[jnp.array(ids)], tree)


def test_absent_clients_keep_their_state():
    sim = simulate("median", 1, cohort_size=3)
    step = toys.quick_jit(sim.step)
    state, counts, cohorts = sim.init(PROBLEM.params, 0), np.zeros(N), set()
    for _ in range(60):
        new, metrics = step(state, PROBLEM.shards)
        there = participants(state, new)
        absent = sorted(set(range(N)) - there)
        assert len(there) == 3
        assert_close(rows(state.clients, absent), rows(new.clients, absent), 0, 0)
        np.testing.assert_array_equal(memories(state)[absent], memories(new)[absent])
        assert np.all(np.any(memories(state) != memories(new), axis=1)[sorted(there)])
        assert np.isfinite(metrics["loss"])
        counts[sorted(there)] += 1
        cohorts.add(tuple(sorted(there)))
        state = new
    assert len(cohorts) > 30  # of 56
    assert np.all(counts > 10) and np.all(counts < 36)  # 22.5 expected, 3.7 deviation


def test_noise_and_batches_depend_on_the_client_not_on_its_place():
    full, part = (
        simulate(attack=attacks.none()),
        simulate(attack=attacks.none(), cohort_size=5),
    )
    state = full.init(PROBLEM.params, 0)
    everybody, _ = toys.quick_jit(full.step)(state, PROBLEM.shards)
    some, _ = toys.quick_jit(part.step)(state, PROBLEM.shards)
    there = sorted(participants(state, some))
    assert len(there) == 5
    np.testing.assert_allclose(
        momenta(some)[there], momenta(everybody)[there], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        memories(some)[there], memories(everybody)[there], rtol=1e-5, atol=1e-6
    )


def test_every_client_and_round_has_a_key_of_its_own():
    """Local work that returns its randomness, under a method that keeps it."""

    def work(message, shard, key):
        del shard
        return jax.tree.map(
            lambda p: jax.random.normal(key, p.shape), message["params"]
        ), {}

    method = algorithms.byz_sgdm(
        0.1, rule=aggregators.mean(), momentum=0.0, local_work=work
    )
    sim = jaxfed.simulate(method, N)
    seen, _ = toys.trace(sim, jnp.zeros(3), PROBLEM.shards, 4, momenta_of)
    draws = seen[1:].ravel()
    assert len(np.unique(draws)) == len(draws)


def test_byzantine_clients_are_the_same_ones_in_every_cohort():
    def record(uploads, state, byzantine, probe):
        del state, probe
        return uploads, jnp.sum(byzantine)

    sim = simulate(
        "mean", 2, spy(record, lambda p: jnp.zeros([], jnp.int32)), cohort_size=4
    )
    step = toys.quick_jit(sim.step)
    state, seen = sim.init(PROBLEM.params, 0), []
    for _ in range(12):
        new, _ = step(state, PROBLEM.shards)
        assert new.attack == len(participants(state, new) & {6, 7})
        seen.append(int(new.attack))
        state = new
    assert set(seen) == {0, 1, 2}


def test_cohort_of_everybody_is_full_participation():
    """Only the order of the rows differs, which no rule minds."""
    full, part = simulate(), simulate(cohort_size=N)
    state = full.init(PROBLEM.params, 0)
    one, _ = toys.quick_jit(full.run, static_argnums=2)(state, PROBLEM.shards, 4)
    other, _ = toys.quick_jit(part.run, static_argnums=2)(state, PROBLEM.shards, 4)
    assert_close(one, other, atol=1e-5)


def test_masked_row_is_an_absent_client():
    """``mask`` and ``cohort`` are two ways to say who is there."""
    server = algorithm("nnm+trimmed_mean", 1).server
    rng = np.random.default_rng(0)
    uploads = {
        "bias": jnp.array(rng.normal(size=(N, 2)), jnp.float32),
        "weight": jnp.array(rng.normal(size=(N, 3, 2)), jnp.float32),
    }
    there = jnp.array([0, 2, 3, 4, 6])
    mask = jnp.zeros(N, bool).at[there].set(True)
    garbage = jax.tree.map(
        lambda x: jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.nan), uploads
    )
    update = toys.quick_jit(lambda *args, **extra: server.update(*args, **extra)[0])
    first = update(uploads, server.init(PROBLEM.params))
    masked = update(garbage, first, mask=mask)
    removed = update(rows(uploads, there), first, cohort=there)
    assert_close(masked, removed)


# --- Memory, weights, probe ------------------------------------------------------


@pytest.fixture(scope="module")
def whole():
    sim = simulate()
    state = sim.init(PROBLEM.params, 0)
    return state, toys.quick_jit(sim.step)(state, PROBLEM.shards)


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_chunks_change_nothing(whole, chunk_size):
    state, expected = whole
    chunked = simulate(chunk_size=chunk_size)
    assert_close(toys.quick_jit(chunked.step)(state, PROBLEM.shards), expected)


def test_chunks_of_a_cohort():
    whole, chunked = simulate(cohort_size=5), simulate(cohort_size=5, chunk_size=2)
    state = whole.init(PROBLEM.params, 0)
    one, _ = toys.quick_jit(whole.step)(state, PROBLEM.shards)
    other, _ = toys.quick_jit(chunked.step)(state, PROBLEM.shards)
    assert_close(one, other)


@pytest.mark.parametrize(
    ("rule", "influence"), [("mean", F / N), ("nnm+median", 0.0), ("nnm+mean", None)]
)
def test_inspect_reports_the_weight_of_byzantine_clients(rule, influence):
    sim = simulate(rule, inspect=True)
    state = sim.init(PROBLEM.params, 0)
    new, metrics = toys.quick_jit(sim.step)(state, PROBLEM.shards)
    assert metrics["weights"].shape == (N,)
    assert metrics["weights"].sum() == pytest.approx(1)
    byzantine = float(metrics["weights"][-F:].sum())
    assert metrics["influence"] == pytest.approx(byzantine, abs=1e-6)
    if influence is not None:
        assert metrics["influence"] == pytest.approx(influence, abs=1e-6)
    quiet = simulate(rule)
    other, fewer = toys.quick_jit(quiet.step)(state, PROBLEM.shards)
    assert set(metrics) - set(fewer) == {"weights", "influence"}
    assert_close(new, other)  # looking changes nothing


@pytest.mark.parametrize("cohort_size", [None, 5])
def test_probe_is_a_dry_run_of_the_server(cohort_size):
    """Attack state: the step each of two candidate uploads would cause."""

    def record(uploads, state, byzantine, probe):
        del state, byzantine
        return uploads, {"same": probe(uploads), "other": probe(_scaled(uploads, 2.0))}

    def _scaled(tree, factor):
        return jax.tree.map(lambda x: factor * x, tree)

    def initial(params):
        return {"same": params, "other": params}

    sim = simulate("median", 1, spy(record, initial), cohort_size=cohort_size)
    step = toys.quick_jit(sim.step)
    state = sim.init(PROBLEM.params, 0)
    for _ in range(2):
        new, _ = step(state, PROBLEM.shards)
        moved = jax.tree.map(jnp.subtract, sim.model(new), sim.model(state))
        assert_close(new.attack["same"], moved)
        gap = toys.ravel(new.attack["other"]) - toys.ravel(moved)
        assert np.abs(gap).max() > 1e-4
        state = new


# --- Devices ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh():
    return client_mesh(jax.devices()[:4])


class Wide:
    """A quadratic whose first leaf can be spread over four devices."""

    rng = np.random.default_rng(1)
    params = {"a": jnp.zeros((3, 8)), "b": jnp.zeros(5)}
    shards = jaxfed.Shard(
        {
            "a": {
                "a": jnp.array(rng.normal(size=(N, 3, 8)), jnp.float32),
                "b": jnp.array(rng.normal(size=(N, 5)), jnp.float32),
            }
        },
        jnp.ones(N, jnp.int32),
    )


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("nnm+trimmed_mean", {}),
        ("median", {"cohort_size": 5}),
        ("trimmed_mean", {"chunk_size": 4}),
    ],
)
def test_round_over_four_devices_gives_the_same_numbers(mesh, rule, options):
    work = {"local_work": toys.quadratic}
    single = simulate(rule, method=work, **options)
    spread = simulate(rule, method=work, mesh=mesh, **options)
    state = single.init(Wide.params, 0)
    expected, _ = toys.quick_jit(single.run, static_argnums=2)(state, Wide.shards, 5)
    placed = state._replace(clients=shard_clients(state.clients, mesh))
    shards = shard_clients(Wide.shards, mesh)
    run = toys.quick_jit(spread.run, static_argnums=2)
    got, _ = run(placed, shards, 5)
    assert_close(expected, got)
    if not options:  # clients stay where they are, the model is everywhere
        for leaf in jax.tree.leaves(toys.states(got.clients, EmaState)):
            assert leaf.sharding.spec[0] == "clients"
        for leaf in jax.tree.leaves(spread.model(got)):
            assert leaf.sharding.is_fully_replicated


def test_clients_that_do_not_divide_over_the_devices(mesh):
    six = jax.tree.map(lambda x: x[:6], Wide.shards)
    with pytest.raises(ValueError, match=r"cannot spread 6 clients .* over 4 devices"):
        shard_clients(six, mesh)


def test_replicas_under_pmap():
    """One seed a device: two devices run two independent simulations."""
    sim = simulate("mean", 1)
    keys = jax.random.split(jax.random.key(0), 2)
    states = [sim.init(PROBLEM.params, key) for key in keys]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
    step = jax.pmap(sim.step, in_axes=(0, None), devices=jax.devices()[:2])
    together, metrics = step(stacked, PROBLEM.shards)
    assert metrics["loss"].shape == (2,)
    single = toys.quick_jit(sim.step)
    for r, state in enumerate(states):
        alone, _ = single(state, PROBLEM.shards)
        assert_close(
            jax.tree.map(lambda x, r=r: x[r], together.server.params),
            alone.server.params,
        )
    assert np.any(metrics["loss"][0] != metrics["loss"][1])


# --- Errors ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"num_clients": 0}, ValueError, "num_clients must be at least 1, got"),
        ({"num_clients": 2.0}, TypeError, "num_clients must be a Python int"),
        ({"num_byzantine": N}, ValueError, "leave at least one honest client"),
        ({"num_byzantine": -1}, ValueError, "num_byzantine must be at least 0"),
        ({"num_byzantine": 0.5}, TypeError, "num_byzantine must be a Python int"),
        ({"cohort_size": N + 1}, ValueError, "at most num_clients=8, got 9"),
        ({"cohort_size": 0}, ValueError, "cohort_size must be at least 1"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1"),
    ],
)
def test_counts_out_of_range(arguments, error, match):
    with pytest.raises(error, match=match):
        jaxfed.simulate(algorithm(), **({"num_clients": N} | arguments))


def test_shards_of_another_number_of_clients():
    sim = simulate()
    state = sim.init(PROBLEM.params, 0)
    few = jax.tree.map(lambda x: x[:5], PROBLEM.shards)
    with pytest.raises(ValueError, match=r"must have num_clients=8 rows, got shape"):
        sim.step(state, few)
    one = jax.tree.map(lambda x: x[0], PROBLEM.shards)
    with pytest.raises(ValueError, match=r"shards\.count must have num_clients=8"):
        sim.step(state, PROBLEM.shards._replace(count=one.count))
    with pytest.raises(ValueError, match=r"shards\.data\['y'\] must have"):
        data = PROBLEM.shards.data | {"y": few.data["y"]}
        sim.step(state, PROBLEM.shards._replace(data=data))


def test_non_finite_rows_reach_the_server_infinitely_far_away():
    sim = simulate("median", 1, attacks.nan(), {"server_momentum": 0.0})
    state = sim.init(PROBLEM.params, 0)
    state, _ = toys.quick_jit(sim.step)(state, PROBLEM.shards)
    assert np.all(memories(state)[-1] == np.inf)
    assert np.all(np.isfinite(memories(state)[:-1]))
    plain = simulate("mean", 1, attacks.nan())
    state = plain.init(PROBLEM.params, 0)
    spoiled, _ = toys.quick_jit(plain.step)(state, PROBLEM.shards)
    assert not np.any(np.isfinite(toys.ravel(plain.model(spoiled))))  # loud, not zero


def test_aggregator_shaped_like_nothing_is_caught():
    method = jaxfed.from_chains(
        jaxfed.gradient(PROBLEM.loss),
        optax.stateless(lambda u, p: {"bias": u["bias"]}),
        (rule := aggregators.mean(), optax.sgd(0.1)),
        rule=rule,
    )
    sim = jaxfed.simulate(method, N)
    with pytest.raises(ValueError, match="structure of params"):
        sim.step(sim.init(PROBLEM.params, 0), PROBLEM.shards)


@pytest.mark.parametrize("rounds", [1.5, -1, 2**31])
def test_number_of_rounds_out_of_range(rounds):
    sim = jaxfed.simulate(algorithms.byz_sgdm(0.1, rule=aggregators.mean()), 2)
    with pytest.raises((TypeError, ValueError), match="rounds must be"):
        sim.run(None, None, rounds)


def test_mesh_that_does_not_divide_the_clients(mesh):
    with pytest.raises(ValueError, match="must divide num_clients=6"):
        jaxfed.simulate(algorithms.byz_sgdm(0.1, rule=aggregators.mean()), 6, mesh=mesh)
