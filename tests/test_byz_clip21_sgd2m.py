# SPDX-License-Identifier: Apache-2.0
"""Checklist of Byz-Clip21-SGD2M (arXiv 2603.23472); names carry the row numbers.

Parameters after k of our rounds are the paper's x^{k+1}: its first step, along the zero
aggregate, is left out.
"""

import byz_clip21_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import jaxfed
from jaxfed import aggregators, algorithms, attacks, reductions
from jaxfed.algorithms import _byz_clip21_sgd2m as module
from jaxfed.links import AccumulateState, EmaState
from jaxfed.privacy.mechanisms import clip_tree

KEY = 5


def robust(f):
    return jaxfed.make_aggregator("nnm+median", num_byzantine=f)


def look1(state):
    """The variables of Algorithms 1 and 5; ``m`` wherever it is kept."""
    (v,) = toys.states(state.clients, EmaState)
    (g_i,) = toys.states(state.clients, module.Clip21State)
    (m,) = toys.states((state.clients, state.server.inner), AccumulateState)
    return {
        "x": toys.ravel(state.server.params),
        "v": toys.ravel_rows(v.average),
        "g_i": toys.ravel_rows(g_i.shift),
        "m": toys.ravel_rows(m.total),
    }


def look_x(state):
    return {"x": toys.ravel(state.server.params)}


def assert_trace(seen, expected, names=("x",), rows=slice(None), **tolerance):
    """Compare our states with an oracle's rounds, one index apart for x."""
    rounds = len(expected)
    for name in names:
        want = np.array([r[name] for r in expected])
        got = seen[name][:rounds] if name == "x" else seen[name][1 : rounds + 1]
        if name != "x":
            want, got = want[:, rows], got[:, rows]
        np.testing.assert_allclose(got, want, err_msg=name, **tolerance)


# --- Row 1: golden traces --------------------------------------------------------

GOLDEN_A = np.array([[0.0], [4.0], [-10.0]])
GOLDEN_NOISE = np.array(
    [[0.1, -0.2, 0.3, 0], [0, 0.5, -0.5, 0], [-0.4, 0.2, 0, 0], [0.3, 0.3, -0.3, 0]]
)[:, :, None]
GOLDEN = dict(gamma=0.5, beta=0.5, beta_hat=0.5, tau=1.0)


def golden_algorithm(rule, n):
    return algorithms.byz_clip21_sgd2m(
        0.5,
        rule=rule,
        num_clients=n,
        key=KEY,
        clip_norm=1.0,
        noise_std=1.0 if n == 4 else 0.0,
        momentum=0.5,
        server_momentum=0.5,
        local_work=toys.quadratic,
    )


def stored_noise(std, key):
    """Stand-in for ``gaussian_noise`` that adds the golden trace's draws."""
    del std, key

    def update(updates, state, params=None, *, round, client_id, **extra):
        return updates + jnp.array(GOLDEN_NOISE, float)[round, client_id], state

    return optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)


@pytest.fixture(params=[False, True], ids=["float32", "float64"])
def tolerance(request):
    """Run a test in both precisions."""
    with jax.enable_x64(request.param):
        yield dict(rtol=0, atol=1e-12) if request.param else dict(rtol=0, atol=1e-6)


def test_row01_golden_trace_a(tolerance):
    simulation = jaxfed.simulate(golden_algorithm(aggregators.mean(), 3), 3)
    seen, _ = toys.trace(simulation, jnp.array([2.0]), toys.centres(GOLDEN_A), 5, look1)
    expected = oracle.algorithm1(
        [2.0], lambda i, t, x: x - GOLDEN_A[i], 3, 5, ragg=oracle.mean, **GOLDEN
    )
    assert_trace(seen, expected, ("x", "v", "g_i", "m"), **tolerance)
    x = [2, 1.9166667, 1.7534722, 1.5292245, 1.2600068]
    g = [0.1666667, 0.3263889, 0.4484954, 0.5384356, 0.5946462]
    np.testing.assert_allclose(seen["x"][:5, 0], x, atol=1e-6)
    np.testing.assert_allclose(seen["m"][1:, :, 0].mean(1), g, atol=1e-6)
    np.testing.assert_allclose(
        seen["v"][4, :, 0], [1.5675637, -2.1824363, 10.9425637], rtol=1e-6
    )
    np.testing.assert_allclose(
        seen["g_i"][4, :, 0], [1.4300492, -1.8147425, 2.0], atol=1e-6
    )


@pytest.mark.parametrize("trace", ["b", "c"])
def test_row01_golden_traces_b_and_c(trace, tolerance, monkeypatch):
    monkeypatch.setattr(module, "gaussian_noise", stored_noise)
    rule, ragg = {
        "b": (robust(1), oracle.nnm(1, oracle.cm)),
        "c": (aggregators.mean(), oracle.mean),
    }[trace]
    simulation = jaxfed.simulate(
        golden_algorithm(rule, 4), 4, num_byzantine=1, attack=attacks.ipm(10.0)
    )
    centres = np.concatenate([GOLDEN_A, np.zeros((1, 1))])
    seen, _ = toys.trace(simulation, jnp.array([2.0]), toys.centres(centres), 4, look1)
    expected = oracle.algorithm1(
        [2.0],
        lambda i, t, x: x - centres[i],
        4,
        5,
        ragg=ragg,
        noise=lambda i, t: GOLDEN_NOISE[min(t, 4) - 1, i],
        attack=oracle.ipm(10.0),
        byzantine={3},
        **GOLDEN,
    )
    assert_trace(seen, expected[:4], ("x", "v", "g_i", "m"), **tolerance)
    # The aggregate shows in the next step: g^{t+1} = (x^{t+1} - x^{t+2}) / gamma.
    g = (seen["x"][:4, 0] - seen["x"][1:, 0]) / 0.5
    if trace == "b":
        x, m_byz = (
            [2, 1.9, 1.7208333, 1.5003472],
            [-2, -3.5833333, -4.4097222, -5.7644676],
        )
        expected_g = [0.2, 0.3583333, 0.4409722, 0.5764468]
        np.testing.assert_allclose(
            seen["m"][4, :3, 0], [1.4115451, -1.4322048, 1.75], atol=1e-6
        )
        np.testing.assert_allclose(
            seen["g_i"][4, :3, 0], [1.4115451, -1.8322048, 2.0], atol=1e-6
        )
        np.testing.assert_allclose(seen["m"][1:, 3, 0], m_byz, atol=1e-6)
        np.testing.assert_allclose(g, seen["m"][1:, :3, 0].mean(1), atol=1e-6)
    else:
        x = [2, 2.175, 2.5085938, 3.0323975]
        expected_g = [-0.35, -0.6671875, -1.0476074, -1.7167852]
    np.testing.assert_allclose(seen["x"][:4, 0], x, atol=1e-6)
    np.testing.assert_allclose(g, expected_g, atol=1e-6)


# --- Row 1: random trajectories of all five algorithms ---------------------------

ROUNDS, BATCH = 12, 3
LAYOUTS = [
    # spec, oracle rule, attack, oracle attack
    ("mean", lambda f: oracle.mean, "none", oracle.honest),
    ("nnm+median", lambda f: oracle.nnm(f, oracle.cm), "ipm", oracle.ipm(10.0)),
    (
        "nnm+trimmed_mean",
        lambda f: oracle.nnm(f, oracle.cwtm(f)),
        "sign_flip(scale=3.0)",
        oracle.sign_flip(3.0),
    ),
    ("trimmed_mean", oracle.cwtm, "nan", oracle.constant(np.nan)),
]
BUILD = {
    # name: (factory, constants of ours, constants of the oracle, variables seen)
    "1": (
        algorithms.byz_clip21_sgd2m,
        dict(clip_norm=0.7, noise_std=0.3, momentum=0.6, server_momentum=0.7),
        dict(tau=0.7, beta=0.4, beta_hat=0.3),
        ("x", "v", "g_i", "m"),
    ),
    "2": (algorithms.byz_sgdm, dict(momentum=0.6), dict(beta=0.4), ("x",)),
    "3": (
        algorithms.byz_clip_sgd,
        dict(clip_norm=0.7, noise_std=0.3),
        dict(tau=0.7),
        ("x",),
    ),
    "4": (
        algorithms.safe_dshb,
        dict(clip_norm=0.7, noise_std=0.3, momentum=0.6),
        dict(tau=0.7, beta=0.4),
        ("x",),
    ),
    "5": (
        algorithms.byz_clip21_sgd2m_plus,
        dict(clip_norm=0.5, noise_std=0.3, momentum=0.6, server_momentum=0.7),
        dict(tau_o=0.5, beta=0.4, beta_hat=0.3, tau_i=1.1),
        ("x", "v", "g_i", "m"),
    ),
}
ORACLE = {
    "1": oracle.algorithm1,
    "2": oracle.algorithm2,
    "3": oracle.algorithm3,
    "4": oracle.algorithm4,
    "5": oracle.algorithm5,
}


@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: f"{layout[0]}-{layout[2]}"
)
@pytest.mark.parametrize("name", BUILD)
def test_row01_trajectories_follow_the_pseudocode(name, layout):
    spec, make_ragg, attack, oracle_attack = layout
    factory, ours, theirs, variables = BUILD[name]
    n, f = (7, 2) if attack != "none" else (4, 0)
    problem = toys.Regression(n)
    with jax.enable_x64(True):
        options = dict(ours) if name == "2" else {"key": KEY, **ours}
        algorithm = factory(
            0.3,
            rule=jaxfed.make_aggregator(spec, num_byzantine=f),
            num_clients=n,
            local_work=jaxfed.gradient(
                problem.loss, batch_size=BATCH, clip_norm=theirs.get("tau_i")
            ),
            **options,
        )
        simulation = jaxfed.simulate(
            algorithm, n, num_byzantine=f, attack=jaxfed.make_attack(attack)
        )
        look = look1 if "m" in variables else look_x
        seen, last = toys.trace(
            simulation, problem.params, problem.shards, ROUNDS, look
        )
        drawn = np.asarray(toys.record_batches(last.key, problem.shards, ROUNDS, BATCH))
        noise = np.asarray(
            toys.record_noise(
                ours.get("noise_std", 0.0),
                jax.random.key(KEY),
                problem.params,
                n,
                ROUNDS,
            )
        )
    assert seen["x"].dtype == np.float64

    def gradient(i, t, x):
        return problem.gradient(i, drawn[t - 1, i], x)

    def examples(i, t, x):
        return [problem.example(i, j, x) for j in drawn[t - 1, i]]

    more = {} if name == "2" else dict(noise=lambda i, t: noise[t - 1, i])
    expected = ORACLE[name](
        problem.flat,
        examples if name == "5" else gradient,
        n,
        ROUNDS,
        gamma=0.3,
        ragg=make_ragg(f),
        attack=oracle_attack,
        byzantine=set(range(n - f, n)),
        **theirs,
        **more,
    )
    assert np.ptp(drawn) == problem.m - 1
    assert_trace(seen, expected, variables, slice(0, n - f), rtol=1e-9, atol=1e-11)
    moved = np.abs(expected[-1]["x"] - expected[0]["x"]).max()
    assert moved > 0.05


# --- Row 2: update order ---------------------------------------------------------


def test_row02_first_gradient_is_taken_at_the_initial_point():
    start = jnp.array([0.1, -0.7])

    def work(message, shard, key):
        gradient, _ = toys.quadratic(message, shard, key)
        return gradient, {"at": message["params"][0]}

    algorithm = algorithms.byz_clip21_sgd2m(
        0.3,
        rule=aggregators.mean(),
        num_clients=2,
        key=KEY,
        clip_norm=1.0,
        noise_std=0.5,
        server_momentum=0.5,
        local_work=work,
    )
    simulation = jaxfed.simulate(algorithm, 2)
    shards = toys.centres([[1.0, 2.0], [0.0, -1.0]])
    step = jax.jit(simulation.step)
    state = simulation.init(start, 1)
    for _ in range(4):
        before = simulation.model(state)[0]
        state, metrics = step(state, shards)
        assert metrics["at"] == before  # the gradient is taken at the newest point
        assert simulation.model(state)[0] != before
    seen = simulation.model(simulation.init(start, 1))
    np.testing.assert_array_equal(seen, start)


def test_row02_clip_uses_the_new_momentum_and_the_old_shift():
    algorithm = algorithms.byz_clip21_sgd2m(
        0.3,
        rule=aggregators.mean(),
        num_clients=1,
        key=KEY,
        clip_norm=1.0,
        momentum=0.75,
        server_momentum=0.5,
        local_work=toys.quadratic,
    )
    x = jnp.array([3.0, 5.0])
    state = algorithm.client.init(x, 0)
    ema, shift, noise = state.inner
    state = state._replace(
        inner=(
            ema._replace(average=jnp.array([1.0, 2.0])),
            shift._replace(shift=jnp.array([-1.0, 0.5])),
            noise,
        )
    )
    shard = jaxfed.Shard({"a": jnp.array([-1.0, 1.0])}, jnp.int32(1))
    message = algorithm.server.broadcast(algorithm.server.init(x))
    c, new, _ = algorithm.client.update(message, state, shard, jax.random.key(0))
    v = 0.75 * np.array([1.0, 2.0]) + 0.25 * np.array([4.0, 4.0])
    gap = v - np.array([-1.0, 0.5])
    q = gap / np.linalg.norm(gap)
    np.testing.assert_allclose(c, q, rtol=1e-6)
    np.testing.assert_allclose(new.inner[0].average, v, rtol=1e-6)
    np.testing.assert_allclose(new.inner[1].shift, [-1, 0.5] + 0.5 * q, rtol=1e-6)


# --- Row 3: the shift is free of noise -------------------------------------------


@pytest.mark.parametrize("initial", [None, 1.5])
def test_row03_memory_minus_shift_is_the_sum_of_the_noise(initial):
    problem, n, f, rounds = toys.Regression(6), 6, 1, 60
    first = None
    if initial is not None:
        first = jax.tree.map(lambda p: initial + 0 * p, problem.params)
    algorithm = algorithms.byz_clip21_sgd2m(
        0.05,
        rule=robust(f),
        num_clients=n,
        key=KEY,
        clip_norm=0.5,
        noise_std=0.8,
        momentum=0.8,
        server_momentum=0.9,
        initial=first,
        local_work=jaxfed.gradient(problem.loss, batch_size=2),
    )
    simulation = jaxfed.simulate(
        algorithm, n, num_byzantine=f, attack=attacks.ipm(10.0)
    )
    seen, _ = toys.trace(simulation, problem.params, problem.shards, rounds, look1)
    noise = toys.record_noise(0.8, jax.random.key(KEY), problem.params, n, rounds)
    summed = 0.1 * np.cumsum(np.asarray(noise, np.float64), axis=0)
    gap = (seen["m"] - seen["g_i"])[1:]
    error = np.linalg.norm((gap - summed)[:, :-f], axis=2)
    scale = np.linalg.norm(seen["m"][1:, :-f], axis=2) + np.linalg.norm(
        summed[:, :-f], axis=2
    )
    assert np.all(error <= 1e-5 * scale)
    # A noisy shift (g_i fed with c_i) would follow the memory instead.
    assert np.all(np.linalg.norm(gap[-1, :-f], axis=1) > 0.1)
    bound = 0.1 * 0.5 * np.arange(rounds + 1)  # Remark 5.1
    moved = np.linalg.norm(seen["g_i"] - seen["g_i"][0], axis=2)
    assert np.all(moved <= bound[:, None] * (1 + 1e-5) + 1e-6)


def test_row03_common_initial_value_follows_the_pseudocode():
    problem, n = toys.Regression(4), 4
    first = np.linspace(-1, 1, problem.d)
    options = dict(gamma=0.2, beta=0.3, beta_hat=0.4, tau=0.6, ragg=oracle.mean)
    # The paper's first step goes along g^0 = first, ours is left out.
    expected = oracle.algorithm1(
        problem.flat + 0.2 * first,
        lambda i, t, x: problem.gradient(i, range(problem.m), x),
        n,
        10,
        init=first,
        **options,
    )
    with jax.enable_x64(True):
        algorithm = algorithms.byz_clip21_sgd2m(
            0.2,
            rule=aggregators.mean(),
            num_clients=n,
            key=KEY,
            clip_norm=0.6,
            momentum=0.7,
            server_momentum=0.6,
            initial={"bias": jnp.array(first[:2]), "weight": first[2:].reshape(3, 2)},
            local_work=jaxfed.gradient(problem.loss),
        )
        simulation = jaxfed.simulate(algorithm, n)
        seen, _ = toys.trace(simulation, problem.params, problem.shards, 10, look1)
    np.testing.assert_array_equal(seen["m"][0], np.tile(first, (n, 1)))
    assert_trace(seen, expected, ("x", "v", "g_i", "m"), rtol=1e-10, atol=1e-12)


# --- Row 4: clip -----------------------------------------------------------------


def test_row04_clip():
    rng = np.random.default_rng(0)
    for scale in (1e-12, 1e-3, 1.0, 1e6, 1e15):
        z = {"a": rng.normal(size=(3, 2)) * scale, "b": rng.normal(size=4) * scale}
        tree = jax.tree.map(lambda x: jnp.array(x, jnp.float32), z)
        flat = np.asarray(toys.ravel(tree), np.float64)
        norm = np.linalg.norm(flat)
        for tau in (1e-6, 0.5, 2.0 * norm, np.inf):
            out = clip_tree(tree, tau)
            got = np.asarray(toys.ravel(out), np.float64)
            assert np.linalg.norm(got) <= tau * (1 + 1e-6)
            assert (
                np.linalg.norm(got - flat) <= max(norm - tau, 0) + 1e-6 * norm
            )  # (14)
            if norm <= tau:
                np.testing.assert_array_equal(got, flat)
            else:  # one norm over both leaves
                np.testing.assert_allclose(got, flat * tau / norm, rtol=1e-5)
    zero = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(4)}
    for tau in (1e-6, 1.0, np.inf):
        np.testing.assert_array_equal(toys.ravel(clip_tree(zero, tau)), 0)


# --- Rows 5, 6, 7: special cases of section 1.5 ----------------------------------


def run64(algorithm, problem, rounds=15, f=0, attack=None, look=look_x):
    simulation = jaxfed.simulate(algorithm, problem.n, num_byzantine=f, attack=attack)
    return toys.trace(simulation, problem.params, problem.shards, rounds, look)[0]


def no_noise(problem, rule, momentum=0.6, server_momentum=0.0, **options):
    options = {"clip_norm": float("inf"), "key": KEY} | options
    return algorithms.byz_clip21_sgd2m(
        0.1,
        rule=rule,
        num_clients=problem.n,
        momentum=momentum,
        server_momentum=server_momentum,
        local_work=jaxfed.gradient(problem.loss, batch_size=2),
        **options,
    )


@pytest.mark.parametrize("momentum", [0.6, 0.0], ids=["momentum", "robust SGD"])
@pytest.mark.parametrize(
    ("spec", "attack"),
    [
        ("nnm+median", "ipm"),
        ("trimmed_mean", "sign_flip(scale=2.0)"),
        ("median", "inf"),
    ],
)
def test_row05_reduces_to_byz_sgdm(spec, attack, momentum):
    problem, f = toys.Regression(6), 2
    with jax.enable_x64(True):
        rule = jaxfed.make_aggregator(spec, num_byzantine=f)
        attack = jaxfed.make_attack(attack)
        ours = run64(
            no_noise(problem, rule, momentum), problem, f=f, attack=attack, look=look1
        )
        sgdm = algorithms.byz_sgdm(
            0.1,
            rule=rule,
            momentum=momentum,
            local_work=jaxfed.gradient(problem.loss, batch_size=2),
        )
        theirs = run64(
            sgdm,
            problem,
            f=f,
            attack=attack,
            look=lambda s: (
                look_x(s)
                | {"v": toys.ravel_rows(toys.states(s.clients, EmaState)[0].average)}
            ),
        )
    tight = dict(rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(ours["x"], theirs["x"], **tight)
    np.testing.assert_allclose(ours["v"], theirs["v"], **tight)
    for name in ("m", "g_i"):
        np.testing.assert_allclose(ours[name][1:, :-f], ours["v"][1:, :-f], **tight)


def test_row05_holds_for_any_common_initial_value():
    problem = toys.Regression(4)
    with jax.enable_x64(True):
        first = jax.tree.map(lambda p: 2.0 + p, problem.params)
        ours = run64(
            no_noise(problem, aggregators.median(), initial=first), problem, look=look1
        )
        zero = run64(no_noise(problem, aggregators.median()), problem, look=look1)
    for name in ("x", "v"):
        np.testing.assert_allclose(ours[name], zero[name], rtol=1e-12, atol=1e-12)
    for name in ("m", "g_i"):
        np.testing.assert_allclose(
            ours[name][1:], ours["v"][1:], rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("spec", ["mean", "nnm+median"])
def test_row06_reduces_to_clip21_sgd2m(spec):
    problem, n, rounds = toys.Regression(5), 5, 15
    with jax.enable_x64(True):
        algorithm = no_noise(
            problem,
            jaxfed.make_aggregator(spec, num_byzantine=0),
            server_momentum=0.7,
            clip_norm=0.4,
            noise_std=0.2,
        )
        simulation = jaxfed.simulate(algorithm, n)
        seen, last = toys.trace(
            simulation, problem.params, problem.shards, rounds, look1
        )
        drawn = np.asarray(toys.record_batches(last.key, problem.shards, rounds, 2))
        noise = np.asarray(
            toys.record_noise(0.2, jax.random.key(KEY), problem.params, n, rounds)
        )
    expected = oracle.clip21_sgd2m(
        problem.flat,
        lambda i, t, x: problem.gradient(i, drawn[t - 1, i], x),
        n,
        rounds,
        gamma=0.1,
        beta=0.4,
        beta_hat=0.3,
        tau=0.4,
        noise=lambda i, t: noise[t - 1, i],
    )
    assert_trace(seen, expected, ("x", "v", "g_i"), rtol=1e-10, atol=1e-12)


def full(problem):
    return lambda i, t, x: problem.gradient(i, range(problem.m), x)


def test_row06_reduces_to_clip21_sgd():
    problem = toys.Regression(4)
    with jax.enable_x64(True):
        algorithm = algorithms.byz_clip21_sgd2m(
            0.1,
            rule=aggregators.mean(),
            num_clients=4,
            key=KEY,
            clip_norm=0.3,
            momentum=0.0,
            server_momentum=0.0,
            local_work=jaxfed.gradient(problem.loss),
        )
        seen = run64(algorithm, problem)
    expected = oracle.ef21_sgdm(
        problem.flat,
        full(problem),
        4,
        15,
        gamma=0.1,
        beta=1.0,
        compressor=lambda z: oracle.clip(z, 0.3),
    )
    assert_trace(seen, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.6, 0.0], ids=["EF21-SGDM", "EF21-SGD"])
def test_row06_with_another_compressor_is_ef21(momentum, monkeypatch):
    def top3(z):
        out = np.zeros_like(z)
        keep = np.argsort(-np.abs(z))[:3]
        out[keep] = z[keep]
        return out

    def top3_tree(tree, max_norm):
        flat, unravel = jax.flatten_util.ravel_pytree(tree)
        _, keep = jax.lax.top_k(jnp.abs(flat), 3)
        return unravel(jnp.zeros_like(flat).at[keep].set(flat[keep]))

    monkeypatch.setattr(module, "clip_tree", top3_tree)
    problem = toys.Regression(4)
    with jax.enable_x64(True):
        algorithm = algorithms.byz_clip21_sgd2m(
            0.1,
            rule=aggregators.mean(),
            num_clients=4,
            key=KEY,
            clip_norm=1.0,
            momentum=momentum,
            server_momentum=0.0,
            local_work=jaxfed.gradient(problem.loss),
        )
        seen = run64(algorithm, problem)
    expected = oracle.ef21_sgdm(
        problem.flat,
        full(problem),
        4,
        15,
        gamma=0.1,
        beta=1 - momentum,
        compressor=top3,
    )
    assert_trace(seen, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.6], ids=["SGD", "SGD with momentum"])
def test_row07_reduces_to_sgd_shifted_by_one_step(momentum):
    problem = toys.Regression(4)
    with jax.enable_x64(True):
        algorithm = algorithms.byz_clip21_sgd2m(
            0.1,
            rule=aggregators.mean(),
            num_clients=4,
            key=KEY,
            clip_norm=float("inf"),
            momentum=momentum,
            server_momentum=0.0,
            local_work=jaxfed.gradient(problem.loss),
        )
        seen = run64(algorithm, problem)
    x, v, expected = problem.flat, np.zeros(problem.d), []
    for _ in range(16):
        expected.append(x)
        mean = sum(full(problem)(i, 0, x) for i in range(4)) / 4
        v = momentum * v + (1 - momentum) * mean
        x = x - 0.1 * v
    np.testing.assert_allclose(seen["x"], expected, rtol=1e-12, atol=1e-12)


# --- Row 8: who keeps the memory -------------------------------------------------


@pytest.mark.parametrize("attack", ["none", "ipm"])
def test_row08_memory_on_the_client_or_the_server(attack):
    problem, n, f = toys.Regression(6), 6, 0 if attack == "none" else 2

    def run(memory):
        algorithm = algorithms.byz_clip21_sgd2m(
            0.1,
            rule=robust(f),
            num_clients=n,
            key=KEY,
            clip_norm=0.4,
            noise_std=0.2,
            momentum=0.6,
            server_momentum=0.7,
            memory=memory,
            local_work=jaxfed.gradient(problem.loss, batch_size=2),
        )
        return run64(
            algorithm, problem, f=f, attack=jaxfed.make_attack(attack), look=look1
        )

    with jax.enable_x64(True):
        server, client = run("server"), run("client")
    for name in ("x", "v", "g_i"):
        np.testing.assert_allclose(server[name], client[name], rtol=1e-11, atol=1e-12)
    honest = slice(0, n - f)
    np.testing.assert_allclose(
        server["m"][:, honest], client["m"][:, honest], rtol=1e-11, atol=1e-12
    )


def test_row08_memory_on_the_client_leaves_none_on_the_server():
    params = toys.Regression(6).params
    for memory in ("server", "client"):
        algorithm = algorithms.byz_clip21_sgd2m(
            0.1, rule=robust(1), num_clients=6, key=KEY, clip_norm=1.0, memory=memory
        )
        kept = toys.states(algorithm.server.init(params), AccumulateState)
        assert len(kept) == (1 if memory == "server" else 0)


# --- Row 9: the baselines --------------------------------------------------------


def assert_same_messages(one, other, params, rounds=3):
    """Compare two client chains bit for bit.

    Operation by operation: a compiler may fuse, and round, two programs differently.
    """
    states = [one.client_tx.init(params), other.client_tx.init(params)]
    for t in range(rounds):
        gradient = jax.tree.map(lambda p, t=t: jnp.cos(7 * p + t), params)
        messages = []
        for k, algorithm in enumerate((one, other)):
            update = optax.with_extra_args_support(algorithm.client_tx).update
            message, states[k] = update(
                gradient, states[k], params, client_id=2, round=t
            )
            messages.append(toys.ravel(message))
        np.testing.assert_array_equal(*messages)
        assert np.abs(messages[0]).max() > 0.1


@pytest.mark.parametrize("per_example", [False, True], ids=["mini-batch", "example"])
def test_row09_safe_dshb_without_momentum_is_byz_clip_sgd(per_example):
    problem, f = toys.Regression(6), 1
    common = dict(
        rule=robust(f),
        key=KEY,
        clip_norm=None if per_example else 0.5,
        noise_std=0.3,
        local_work=jaxfed.gradient(
            problem.loss, batch_size=2, clip_norm=0.5 if per_example else None
        ),
    )
    one = algorithms.safe_dshb(0.1, momentum=0.0, **common)
    other = algorithms.byz_clip_sgd(0.1, **common)
    assert_same_messages(one, other, problem.params)
    with jax.enable_x64(True):
        runs = [run64(a, problem, f=f, attack=attacks.ipm())["x"] for a in (one, other)]
    np.testing.assert_allclose(*runs, rtol=1e-12, atol=1e-12)


def test_row09_safe_dshb_without_clip_and_noise_is_byz_sgdm():
    problem, f = toys.Regression(6), 1
    common = dict(
        rule=robust(f),
        momentum=0.6,
        local_work=jaxfed.gradient(problem.loss, batch_size=2),
    )
    one = algorithms.safe_dshb(0.1, key=KEY, clip_norm=float("inf"), **common)
    other = algorithms.byz_sgdm(0.1, **common)
    assert_same_messages(one, other, problem.params)
    with jax.enable_x64(True):
        runs = [run64(a, problem, f=f, attack=attacks.ipm())["x"] for a in (one, other)]
    np.testing.assert_allclose(*runs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["3", "4"])
def test_row09_per_example_clip(name):
    problem, n, f, tau = toys.Regression(6), 6, 1, 1.2
    factory, _, _, _ = BUILD[name]
    more = dict(momentum=0.6) if name == "4" else {}
    with jax.enable_x64(True):
        algorithm = factory(
            0.3,
            rule=robust(f),
            key=KEY,
            noise_std=0.1,
            local_work=jaxfed.gradient(problem.loss, clip_norm=tau),
            **more,
        )
        seen = run64(algorithm, problem, f=f, attack=attacks.ipm())
        noise = np.asarray(
            toys.record_noise(0.1, jax.random.key(KEY), problem.params, n, 15)
        )
    norms = []

    def clipped_mean(i, t, x):
        grads = [problem.example(i, j, x) for j in range(problem.m)]
        norms.extend(np.linalg.norm(g) for g in grads)
        return sum(oracle.clip(g, tau) for g in grads) / problem.m

    expected = ORACLE[name](
        problem.flat,
        clipped_mean,
        n,
        15,
        gamma=0.3,
        tau=np.inf,
        ragg=oracle.nnm(f, oracle.cm),
        noise=lambda i, t: noise[t - 1, i],
        attack=oracle.ipm(10.0),
        byzantine={n - 1},
        **({"beta": 0.4} if name == "4" else {}),
    )
    assert min(norms) < tau < max(norms)  # some are clipped, some are not
    assert_trace(seen, expected, rtol=1e-10, atol=1e-12)
    assert algorithm.mechanism.unit == "example"


# --- Row 10: Algorithm 5 ---------------------------------------------------------


def plus(problem, rule, tau_i, **options):
    options = (
        dict(clip_norm=0.5, momentum=0.6, server_momentum=0.7, batch_size=None)
        | options
    )
    size = options.pop("batch_size")
    return algorithms.byz_clip21_sgd2m_plus(
        0.1,
        rule=rule,
        num_clients=problem.n,
        key=KEY,
        local_work=jaxfed.gradient(problem.loss, batch_size=size, clip_norm=tau_i),
        **options,
    )


def test_row10_without_inner_clip_and_noise_is_algorithm_1():
    problem, f = toys.Regression(6), 1
    with jax.enable_x64(True):
        ours = run64(
            plus(problem, robust(f), float("inf"), batch_size=problem.m),
            problem,
            f=f,
            attack=attacks.ipm(),
            look=look1,
        )
        one = algorithms.byz_clip21_sgd2m(
            0.1,
            rule=robust(f),
            num_clients=6,
            key=KEY,
            clip_norm=0.5,
            momentum=0.6,
            server_momentum=0.7,
            local_work=jaxfed.gradient(problem.loss),
        )
        theirs = run64(one, problem, f=f, attack=attacks.ipm(), look=look1)
    for name in theirs:
        np.testing.assert_allclose(
            ours[name], theirs[name], rtol=1e-11, atol=1e-12, err_msg=name
        )


def test_row10_honest_memory_equals_shift_and_examples_are_clipped():
    problem, f, tau_i = toys.Regression(6), 1, 0.3
    algorithm = plus(problem, robust(f), tau_i, noise_std=0.4, batch_size=2)
    seen = run64(algorithm, problem, f=f, attack=attacks.ipm(), look=look1)
    np.testing.assert_allclose(
        seen["m"][:, :-f], seen["g_i"][:, :-f], rtol=1e-5, atol=1e-6
    )
    assert np.abs(seen["m"][-1]).max() > 0
    work = jaxfed.gradient(problem.loss, batch_size=1, clip_norm=tau_i)
    shards = problem.shards
    for i in range(3):
        shard = jax.tree.map(lambda x, i=i: x[i], shards)
        message = {"params": problem.params}
        out, _ = work(message, shard, jax.random.key(i))
        assert np.linalg.norm(toys.ravel(out)) <= tau_i * (1 + 1e-6)


@pytest.mark.parametrize(("noise_on", "std"), [("average", 0.6), ("sum", 0.6 / 4)])
def test_row10_noise_placement(noise_on, std):
    d, n = 20_000, 2

    def work(message, shard, key):
        return toys.zero_gradient(message, shard, key)

    work.clip_norm, work.batch_size = 1.0, 4
    algorithm = algorithms.byz_clip21_sgd2m_plus(
        0.1,
        rule=aggregators.mean(),
        num_clients=n,
        key=KEY,
        clip_norm=float("inf"),
        noise_std=0.6,
        momentum=0.0,
        noise_on=noise_on,
        local_work=work,
    )
    simulation = jaxfed.simulate(algorithm, n)
    shards = toys.centres(np.zeros((n, 1)))
    seen, _ = toys.trace(simulation, jnp.zeros(d), shards, 2, look1)
    for t in (1, 2):
        for i in range(n):
            assert np.std(seen["v"][t, i]) == pytest.approx(std, rel=0.03)
    assert algorithm.mechanism.noise_std == pytest.approx(std)
    # One replaced example against the noise, whichever way it is written.
    assert algorithm.mechanism.sensitivity(4) == pytest.approx(2 * 1.0 / 4)


# --- Row 11: scale equivariance, row 12: degeneracy ------------------------------


def scaled_quadratic(scale):
    def work(message, shard, key):
        gradient, metrics = toys.quadratic(message, shard, key)
        return jax.tree.map(lambda g: scale * g, gradient), metrics

    return work


@pytest.mark.parametrize("spec", ["mean", "median", "nnm+median"])
@pytest.mark.parametrize("scale", [4.0, 1e-3])
def test_row11_scale_equivariance(spec, scale):
    n, f = 6, 1
    rng = np.random.default_rng(2)
    shards = toys.centres(rng.normal(size=(n, 5)))

    def run(s):
        algorithm = algorithms.byz_clip21_sgd2m(
            0.3 / s,
            rule=jaxfed.make_aggregator(spec, num_byzantine=f),
            num_clients=n,
            key=KEY,
            clip_norm=0.4 * s,
            noise_std=0.2 * s,
            momentum=0.75,
            server_momentum=0.5,
            local_work=scaled_quadratic(s),
        )
        simulation = jaxfed.simulate(
            algorithm, n, num_byzantine=f, attack=attacks.ipm()
        )
        return toys.trace(simulation, jnp.ones(5), shards, 20, look_x)[0]["x"]

    with jax.enable_x64(True):
        one, other = run(1.0), run(scale)
    assert np.ptp(one) > 0.1
    np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("spec", ["mean", "median", "nnm+median"])
@pytest.mark.parametrize("name", ["3", "4"])
def test_row12_always_clipped_baselines_see_the_product_only(name, spec):
    n, f = 6, 1
    shards = toys.centres(np.random.default_rng(2).normal(size=(n, 5)) + 5)
    factory, _, _, _ = BUILD[name]

    def run(tau):
        algorithm = factory(
            0.1 / tau,
            rule=jaxfed.make_aggregator(spec, num_byzantine=f),
            key=KEY,
            clip_norm=tau,
            noise_std=2 * tau,
            local_work=toys.quadratic,
        )
        simulation = jaxfed.simulate(
            algorithm, n, num_byzantine=f, attack=attacks.ipm()
        )
        return toys.trace(simulation, jnp.zeros(5), shards, 20, look_x)[0]["x"]

    with jax.enable_x64(True):
        one, small, tiny = run(1.0), run(2.0**-7), run(1e-5)
    assert np.linalg.norm(one - (5 + 3), axis=1).min() > 1.0  # always clipped
    np.testing.assert_allclose(one, small, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(one, tiny, rtol=1e-10, atol=1e-12)


# --- Row 15: IPM, row 16: label flip ---------------------------------------------


@pytest.mark.parametrize(("b", "factor"), [(1, 0.47619), (2, 0.0), (5, -1.2)])
def test_row15_mean_under_ipm(b, factor):
    honest = 20
    rows = np.random.default_rng(b).normal(size=(honest + b, 30))
    rows[honest:] = 1e6  # whatever they would have sent
    byzantine = jaxfed.byzantine_ids(honest + b, b)
    wire = attacks.ipm(10.0).wire
    with jax.enable_x64(True):
        sent, _ = wire.update(
            jnp.array(rows), wire.init(jnp.zeros(30)), byzantine=byzantine
        )
        aggregate, _ = aggregators.mean().update(sent, ())
    np.testing.assert_array_equal(sent[:honest], rows[:honest])
    np.testing.assert_array_equal(sent[honest:], np.tile(sent[honest], (b, 1)))
    exact = (honest - 10 * b) / (honest + b)
    assert exact == pytest.approx(factor, abs=1e-5)
    np.testing.assert_allclose(
        aggregate, exact * rows[:honest].mean(0), rtol=1e-10, atol=1e-14
    )


def test_row15_attacking_messages_or_memories_is_the_same_from_zero():
    problem, n, f = toys.Regression(6), 6, 2
    problem_run = {}
    with jax.enable_x64(True):
        for memory in ("server", "client"):  # attacks c, or m
            algorithm = algorithms.byz_clip21_sgd2m(
                0.1,
                rule=aggregators.mean(),
                num_clients=n,
                key=KEY,
                clip_norm=0.4,
                noise_std=0.2,
                memory=memory,
                server_momentum=0.7,
                local_work=jaxfed.gradient(problem.loss),
            )
            problem_run[memory] = run64(
                algorithm, problem, f=f, attack=attacks.ipm(10.0), look=look1
            )
    c_level, m_level = problem_run["server"], problem_run["client"]
    np.testing.assert_allclose(c_level["x"], m_level["x"], rtol=1e-11, atol=1e-12)
    forged = -10 * c_level["m"][:, :-f].mean(1)
    for b in (4, 5):
        np.testing.assert_allclose(c_level["m"][:, b], forged, rtol=1e-10, atol=1e-12)


def test_row16_label_flip_is_an_involution_on_byzantine_labels_only():
    labels = jnp.arange(20).reshape(4, 5) % 10
    shards = jaxfed.Shard({"x": jnp.ones((4, 5, 2)), "label": labels}, jnp.full(4, 5))
    attack = attacks.label_flip(10)
    byzantine = jaxfed.byzantine_ids(4, 2)
    flipped = attack.poison(shards, byzantine)
    np.testing.assert_array_equal(flipped.data["label"][:2], labels[:2])
    np.testing.assert_array_equal(flipped.data["label"][2:], 9 - labels[2:])
    again = attack.poison(flipped, byzantine)
    jax.tree.map(np.testing.assert_array_equal, again, shards)


def test_row16_flag_spares_flippers_clip_and_noise():
    """Honest rows stay as they are; flippers send what no clip and no noise sends."""
    n, f, params = 4, 1, jnp.zeros(3)
    x = jnp.array(np.random.default_rng(1).normal(size=(n, 1, 3)), jnp.float32)
    shards = jaxfed.Shard({"x": x}, jnp.full(n, 1))

    def method(**options):
        work = jaxfed.gradient(lambda p, b: 5 * (b["x"] @ p))
        return algorithms.byz_clip21_sgd2m(
            0.5, rule=robust(f), num_clients=n, key=KEY, local_work=work, **options
        )

    private = method(clip_norm=0.1, noise_std=0.3)
    bare = method(clip_norm=jnp.inf, noise_std=0.0)

    def memories(algorithm, **options):
        sim = jaxfed.simulate(algorithm, n, num_byzantine=f, **options)
        state, _ = sim.run(sim.init(params, 0), shards, 3)
        return state.server.inner[0]

    mixed = memories(private, byzantine_client=bare.client)
    for expected, rows in ((private, slice(0, n - f)), (bare, slice(n - f, n))):
        for a, b in zip(
            *map(jax.tree.leaves, (mixed, memories(expected))), strict=True
        ):
            if a.ndim:
                np.testing.assert_allclose(a[rows], b[rows], rtol=1e-5, atol=1e-7)


def test_row16_label_flippers_run_the_client_code():
    """Flipped shards with nobody Byzantine: the same run, clip and noise included."""
    n, f = 5, 2
    rng = np.random.default_rng(0)
    x = jnp.array(rng.normal(size=(n, 6, 3)), jnp.float32)
    y = jnp.array(rng.integers(0, 10, size=(n, 6)))

    def loss(params, batch):
        logits = batch["x"] @ params
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    algorithm = algorithms.byz_clip21_sgd2m(
        0.5,
        rule=robust(f),
        num_clients=n,
        key=KEY,
        clip_norm=0.1,
        noise_std=0.1,
        server_momentum=0.5,
        local_work=jaxfed.gradient(loss, batch_size=4),
    )
    attack = attacks.label_flip(10)
    assert attack.needs_data
    shards = jaxfed.Shard({"x": x, "label": y}, jnp.full(n, 6))
    poisoned = attack.poison(shards, jaxfed.byzantine_ids(n, f))
    by_hand = jaxfed.Shard({"x": x, "label": y.at[3:].set(9 - y[3:])}, shards.count)
    params = jnp.zeros((3, 10))
    attacked = jaxfed.simulate(algorithm, n, num_byzantine=f, attack=attack)
    plain = jaxfed.simulate(algorithm, n)
    one, _ = toys.trace(attacked, params, poisoned, 8, look1)
    two, _ = toys.trace(plain, params, by_hand, 8, look1)
    clean, _ = toys.trace(plain, params, shards, 8, look1)
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert np.abs(one["x"] - clean["x"]).max() > 1e-3


# --- Row 17: noise ---------------------------------------------------------------

COORDINATES, SIGMA = 20_000, 0.7


def noise_only(factory, rounds, n, look, **options):
    algorithm = factory(
        0.3,
        rule=aggregators.mean(),
        num_clients=n,
        key=KEY,
        clip_norm=1.0,
        noise_std=SIGMA,
        local_work=toys.zero_gradient,
        **options,
    )
    simulation = jaxfed.simulate(algorithm, n)
    shards = toys.centres(np.zeros((n, 1)))
    return toys.trace(simulation, jnp.zeros(COORDINATES), shards, rounds, look)[0]


def test_row17_noise_of_the_main_algorithm():
    n, rounds, beta_hat, gamma = 4, 12, 0.25, 0.3
    seen = noise_only(
        algorithms.byz_clip21_sgd2m, rounds, n, look1, server_momentum=1 - beta_hat
    )
    np.testing.assert_array_equal(seen["g_i"], 0)
    for t in (1, 5, rounds):
        expected = beta_hat**2 * SIGMA**2 * t
        for i in range(n):
            assert np.var(seen["m"][t, i]) == pytest.approx(expected, rel=0.03)
    for after in (4, rounds):
        t = after + 1  # parameters after k rounds are x^{k+1}
        expected = gamma**2 * beta_hat**2 * SIGMA**2 * (t - 1) * t * (2 * t - 1)
        assert np.var(seen["x"][after]) == pytest.approx(expected / (6 * n), rel=0.03)
    # Messages: the right scale, and independent over clients and rounds.
    sent = np.diff(seen["m"], axis=0).reshape(-1, COORDINATES) / beta_hat
    np.testing.assert_allclose(sent.std(axis=1), SIGMA, rtol=0.03)
    correlation = np.corrcoef(sent) - np.eye(len(sent))
    assert np.abs(correlation).max() < 5 / np.sqrt(COORDINATES)
    quantiles = np.quantile(sent / SIGMA, [0.025, 0.16, 0.5, 0.84, 0.975])
    np.testing.assert_allclose(quantiles, [-1.96, -0.9945, 0, 0.9945, 1.96], atol=0.01)


@pytest.mark.parametrize("momentum", [None, 0.75])
def test_row17_noise_of_the_baselines(momentum):
    n, after, gamma = 4, 12, 0.3
    t = after + 1
    if momentum is None:
        seen = noise_only(algorithms.byz_clip_sgd, after, n, look_x)
        expected = gamma**2 * SIGMA**2 * (t - 1) / n
    else:
        seen = noise_only(algorithms.safe_dshb, after, n, look_x, momentum=momentum)
        weights = sum((1 - momentum ** (t - k)) ** 2 for k in range(1, t))
        expected = gamma**2 * SIGMA**2 / n * weights
    assert np.var(seen["x"][after]) == pytest.approx(expected, rel=0.03)


# --- Rows 23 and 24: biases ------------------------------------------------------

HETEROGENEOUS = [[0.0], [0.0], [9.0]]


def last_x(make, values, rounds, shards):
    """Final parameter of one run per value, all in one program."""

    def one(value):
        simulation = jaxfed.simulate(make(value), shards.count.shape[0])
        state, _ = simulation.run(simulation.init(jnp.array([1.0]), 0), shards, rounds)
        return simulation.model(state)[0]

    return jax.jit(jax.vmap(one))(jnp.array(values))


@pytest.mark.parametrize("name", ["3", "4"])
def test_row23_clipped_baselines_stop_at_half_the_radius(name):
    factory, _, _, _ = BUILD[name]

    def make(tau):
        return factory(
            0.01,
            rule=aggregators.mean(),
            key=KEY,
            clip_norm=tau,
            local_work=toys.quadratic,
        )

    taus = [0.25, 0.5, 1.0, 2.0, 4.0]
    x = last_x(make, taus, 20_000, toys.centres(HETEROGENEOUS))
    np.testing.assert_allclose(x, np.array(taus) / 2, atol=1e-3)


def test_row23_error_feedback_reaches_the_optimum():
    def make(tau):
        return algorithms.byz_clip21_sgd2m(
            0.01,
            rule=aggregators.mean(),
            num_clients=3,
            key=KEY,
            clip_norm=tau,
            momentum=0.9,
            server_momentum=0.0,
            local_work=toys.quadratic,
        )

    x = last_x(make, [1.0], 20_000, toys.centres(HETEROGENEOUS))
    np.testing.assert_allclose(x, 3.0, atol=1e-3)


def test_row24_noise_bias_without_client_momentum():
    """f = x^2 / 2 with skewed noise: +2 with probability 1/3, else -1."""
    rounds, half = 100_000, 50_000

    def work(message, shard, key):
        noise = jnp.where(jax.random.bernoulli(key, 1 / 3), 2.0, -1.0)
        return message["params"] + noise, {}

    def one(momentum):
        algorithm = algorithms.byz_clip21_sgd2m(
            1e-4,
            rule=aggregators.mean(),
            num_clients=1,
            key=KEY,
            clip_norm=0.02,
            momentum=momentum,
            server_momentum=0.0,
            local_work=work,
        )
        simulation = jaxfed.simulate(algorithm, 1)
        shards = toys.centres([[0.0]])

        def body(carry, t):
            state, total = carry
            state, _ = simulation.step(state, shards)
            x = simulation.model(state)[0]
            return (state, total + jnp.where(t >= half, x, 0.0)), None

        first = (simulation.init(jnp.array([0.5]), 0), 0.0)
        (_, total), _ = jax.lax.scan(body, first, jnp.arange(rounds))
        return total / (rounds - half)

    with jax.enable_x64(True):
        biased, unbiased = np.asarray(jax.jit(jax.vmap(one))(jnp.array([0.0, 0.99])))
    assert biased == pytest.approx(1.0, abs=0.05)
    assert abs(unbiased) < 0.05


# --- Row 28: negative control, row 29: float32 -----------------------------------


@pytest.mark.parametrize("b", [3, 5])
def test_row28_plain_mean_ascends_under_ipm(b):
    honest, d = 20, 10
    n = honest + b
    rng = np.random.default_rng(3)
    a = rng.normal(size=(n, d))
    optimum = a[:honest].mean(0)
    start = optimum + 5.0

    def run(rule):
        algorithm = algorithms.byz_clip21_sgd2m(
            0.1,
            rule=rule,
            num_clients=n,
            key=KEY,
            clip_norm=1.0,
            noise_std=0.01,
            server_momentum=0.5,
            local_work=toys.quadratic,
        )
        simulation = jaxfed.simulate(
            algorithm, n, num_byzantine=b, attack=attacks.ipm(10.0)
        )
        seen, _ = toys.trace(simulation, jnp.array(start), toys.centres(a), 300, look_x)
        return np.linalg.norm(seen["x"] - optimum, axis=1)

    plain, guarded = run(aggregators.mean()), run(robust(b))
    first = plain[0]
    assert plain[-1] > 3 * first
    assert np.all(np.diff(plain[5:60]) > 0)
    assert guarded[-1] < 0.1 * first


def test_row29_float32_is_safe_at_tiny_radii():
    n, f, d, rounds = 8, 2, 60, 6000
    rng = np.random.default_rng(0)
    shards = toys.centres(rng.normal(size=(n, d)))

    def run(tau):
        algorithm = algorithms.byz_clip21_sgd2m(
            10.0,
            rule=robust(f),
            num_clients=n,
            key=KEY,
            clip_norm=tau,
            noise_std=50 * tau,
            momentum=0.9,
            server_momentum=0.99,
            local_work=toys.quadratic,
        )
        simulation = jaxfed.simulate(
            algorithm, n, num_byzantine=f, attack=attacks.ipm(10.0)
        )
        state = simulation.init(jnp.zeros(d), 0)

        def block(state, _):
            state, _ = simulation.run(state, shards, rounds // 20)
            return state, look1(state)

        return jax.lax.scan(block, state, None, length=20)[1]

    seen = jax.jit(jax.vmap(run))(jnp.array([1e-6, 1e-4, 1.0]))
    for name, values in seen.items():
        assert values.dtype == jnp.float32
        assert np.all(np.isfinite(values)), name

    def near(m):
        return reductions.nnm_matrix(reductions.geometry(m, f), f) > 0

    memories = seen["m"].reshape(-1, n, d)
    got = np.asarray(jax.jit(jax.vmap(near))(memories))
    exact = np.asarray(memories, np.float64)
    gaps = ((exact[:, :, None] - exact[:, None]) ** 2).sum(-1)
    order = np.argsort(gaps, axis=-1, kind="stable")[:, :, : n - f]
    want = np.zeros_like(got)
    np.put_along_axis(want, order, True, axis=-1)
    # The two Byzantine rows are equal, so their order is a tie: compare honest rows.
    np.testing.assert_array_equal(got[:, : n - f], want[:, : n - f])
