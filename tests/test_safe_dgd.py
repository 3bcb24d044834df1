# SPDX-License-Identifier: Apache-2.0
"""Safe-DGD and Safe-DSGD; row 1 of the checklist on generalization under privacy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import jaxfed
from jaxfed import aggregators
from jaxfed.algorithms._safe_dgd import safe_dgd, safe_dsgd
from jaxfed.algorithms._safe_dshb import byz_clip_sgd

KEY, N = 3, 4
PROBLEM = toys.Regression(N)


def build(method=safe_dgd, rule=None, **over):
    options = {"learning_rate": 0.3, "key": KEY} | over
    size = 1 if method is safe_dsgd else None
    if "local_work" not in options:
        work = jaxfed.gradient(PROBLEM.loss, batch_size=size, clip_norm=np.inf)
        options["local_work"] = work
    return method(rule=aggregators.mean() if rule is None else rule, **options)


def iterates(algorithm, count):
    sim = jaxfed.simulate(algorithm, N)

    def look(state):
        return toys.ravel(state.server.params)

    return toys.trace(sim, PROBLEM.params, PROBLEM.shards, count, look)[0]


# --- Row 1 ---------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_stability_row_1_is_distributed_gradient_descent(wide):
    with jax.enable_x64(wide):
        seen = iterates(build(), 8)
    x = PROBLEM.flat.copy()
    for got in seen:
        np.testing.assert_allclose(got, x, atol=1e-12 if wide else 1e-6)
        grads = [PROBLEM.gradient(i, range(PROBLEM.m), x) for i in range(N)]
        x = x - 0.3 * np.mean(grads, axis=0)


def test_stability_row_1_one_example_a_round():
    drawn = toys.record_batches(jax.random.key(1), PROBLEM.shards, 6, 1)
    assert drawn.shape == (6, N, 1) and len(np.unique(drawn)) == PROBLEM.m
    seen = iterates(build(safe_dsgd, learning_rate=0.1), 6)
    x = PROBLEM.flat.copy()
    for got, batch in zip(seen, np.asarray(drawn), strict=False):
        np.testing.assert_allclose(got, x, atol=2e-6)
        grads = [PROBLEM.gradient(i, batch[i], x) for i in range(N)]
        x = x - 0.1 * np.mean(grads, axis=0)


def test_stability_row_1_iterates_stay_in_the_ball():
    def run(radius, seed, projection):
        algorithm = build(
            noise_std=2.0,
            radius=radius,
            projection=projection,
            key=jax.random.fold_in(jax.random.key(KEY), seed),
        )
        sim, key = jaxfed.simulate(algorithm, N), jax.random.key(0)

        def step(state, _):
            state, _ = sim.step(state, PROBLEM.shards)
            return state, sim.model(state)

        return jax.lax.scan(step, sim.init(PROBLEM.params, key), length=40)[1]

    radii = np.array([0.5, 1.0, 0.5], np.float32)
    seeds = np.array([0, 0, 1])

    def norms(*leaves):
        flat = [np.asarray(x, np.float64).reshape(3, 40, -1) for x in leaves]
        return np.linalg.norm(np.concatenate(flat, axis=2), axis=2)

    @toys.quick_jit
    @jax.vmap
    def both(radius, seed):
        return [run(radius, seed, projection) for projection in ("ball", "layers")]

    ball, layers = both(radii, seeds)
    limit = radii[:, None] * (1 + 1e-6)
    for seen in (norms(*ball.values()), *map(norms, layers.values())):
        assert np.all(seen <= limit)
        np.testing.assert_allclose(seen.max(1), radii, rtol=1e-5)
    # Seeds differ: each has its noise.
    assert np.abs(ball["weight"][0] - ball["weight"][2]).max() > 0.1


def test_stability_row_1_noise_is_added_before_sending():
    d, sigma = 500, 1.7
    algorithm = build(noise_std=sigma, clip_norm=1.0, local_work=toys.quadratic)
    centres = np.zeros((N, d), np.float32)
    centres[:, 0] = [-0.5, -2.0, 3.0, 0.0]

    @toys.quick_jit
    def sent(centres):
        params = jnp.zeros(d)
        state = jax.vmap(algorithm.client.init, (None, 0))(params, jnp.arange(N))

        def one(t):
            message = {"params": params, "round": t}
            work = jax.vmap(algorithm.client.update, (None, 0, 0, None))
            shards = jaxfed.Shard({"a": centres}, jnp.ones(N, jnp.int32))
            return work(message, state, shards, jax.random.key(0))[0]

        return jax.vmap(one)(jnp.arange(100))

    uploads = np.asarray(sent(centres), np.float64)
    noise = uploads.copy()
    noise[:, :, 0] -= [0.5, 1.0, -1.0, 0.0]  # clipped gradients, without noise
    assert abs(noise.var() / sigma**2 - 1) < 0.02  # 0.3 % is a standard deviation
    assert abs(noise.mean()) < 0.02 * sigma
    # Independent over clients and rounds.
    rows = noise.reshape(100 * N, d)
    correlations = np.corrcoef(rows) - np.eye(100 * N)
    assert np.abs(correlations).max() < 6 / np.sqrt(d)
    per_coordinate = noise.reshape(-1, d).var(0) / sigma**2
    assert np.all(np.abs(per_coordinate - 1) < 6 * np.sqrt(2 / (100 * N)))


# --- One round by hand, and neighbours -----------------------------------------------


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize(
    ("projection", "expected"),
    [
        ("ball", [0.56 / math.sqrt(3.05), 0, 1.28 / math.sqrt(3.05)]),
        ("layers", [0.7, 0, 0.8]),
    ],
)
def test_one_round_by_hand(projection, expected, wide):
    """From (1, 0 | 2) with gradients x - a, clipped to 1.

    They are (1, 0 | 0), (0, 0 | 1) and (0.6, 0 | 0.8); half of their median
    (0.6, 0 | 0.8) leaves (0.7, 0 | 1.6), of norm sqrt(3.05), outside of the balls.
    """
    with jax.enable_x64(wide):
        algorithm = build(
            rule=aggregators.median(),
            learning_rate=0.5,
            clip_norm=1.0,
            radius=0.8,
            projection=projection,
            local_work=toys.quadratic,
        )
        centres = {
            "a": jnp.array([[-1.0, 0], [1, 0], [0.4, 0]]),
            "b": jnp.array([[2.0], [-1], [1.2]]),
        }
        shards = jaxfed.Shard({"a": centres}, jnp.ones(3, jnp.int32))
        params = {"a": jnp.array([1.0, 0]), "b": jnp.array([2.0])}
        sim = jaxfed.simulate(algorithm, 3)
        run = toys.quick_jit(lambda p, s: sim.model(sim.step(sim.init(p, 0), s)[0]))
        got = toys.ravel(run(params, shards))
    np.testing.assert_allclose(got, expected, atol=1e-12 if wide else 1e-6)


def test_without_projection_it_is_clipped_sgd_and_one_example_makes_them_equal():
    over = dict(noise_std=0.2, clip_norm=1.0, local_work=toys.quadratic)
    shards = toys.centres(np.random.default_rng(0).normal(size=(N, 3)))

    @toys.quick_jit
    def run():
        out = []
        for method in (safe_dgd, safe_dsgd, byz_clip_sgd):
            algorithm = build(method, aggregators.median(), **over)
            sim = jaxfed.simulate(algorithm, N)
            out.append(sim.model(sim.run(sim.init(jnp.ones(3), 0), shards, 4)[0]))
        return out

    full, one, sgd = run()
    np.testing.assert_array_equal(full, one)
    np.testing.assert_array_equal(full, sgd)


def test_as_optimizer_projects_too():
    algorithm = build(radius=1.0)
    optimizer = jaxfed.as_optimizer(algorithm, N)
    params = PROBLEM.params
    grads = jax.tree.map(lambda p: jnp.ones((N, *p.shape)), params)

    @toys.quick_jit
    def moved(grads):
        step, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, step)

    norm = optax.tree.norm(moved(grads))
    np.testing.assert_allclose(norm, 1, rtol=1e-6)


def test_mechanism():
    by_example = jaxfed.gradient(PROBLEM.loss, clip_norm=1.5)
    mechanism = build(local_work=by_example, noise_std=0.4).mechanism
    assert mechanism.unit == "example" and mechanism.model == "local"
    assert mechanism.sensitivity(10) == 0.3 and mechanism.noise_std == 0.4
    # The paper's noise at epsilon = 2, delta = 1e-5, T = 100, m = 10 is 2 C / m times
    # sqrt(2 T log(1 / delta)) / epsilon.
    paper = 2 * 1.5 * math.sqrt(200 * math.log(1e5)) / (10 * 2)
    claimed = mechanism.nominal * 0.3 * math.sqrt(100 * math.log(1e5)) / 2
    np.testing.assert_allclose(claimed, paper)
    assert build(safe_dsgd).mechanism.nominal is None
    whole = build(clip_norm=0.5, local_work=toys.quadratic).mechanism
    assert whole.unit == "client" and whole.sensitivity(10) == 1.0


def test_errors():
    batches = jaxfed.gradient(PROBLEM.loss, batch_size=2, clip_norm=1.0)
    whole = jaxfed.gradient(PROBLEM.loss, clip_norm=1.0)
    with pytest.raises(ValueError, match="over all examples, got .*batch_size=2"):
        build(local_work=batches)
    for work, size in ((batches, 2), (whole, None)):
        with pytest.raises(ValueError, match=f"one example .* batch_size={size}"):
            build(safe_dsgd, local_work=work)
    for method in (safe_dgd, safe_dsgd):
        name = method.__name__
        with pytest.raises(ValueError, match=f"{name} needs exactly one clip"):
            build(method, clip_norm=1.0)
        with pytest.raises(ValueError, match=f"{name} needs exactly one clip"):
            build(method, local_work=None)
        with pytest.raises(ValueError, match="projection must be one of 'ball'"):
            build(method, projection="cube")
        with pytest.raises(ValueError, match="radius must be > 0"):
            build(method, radius=0.0)
        with pytest.raises(ValueError, match="learning_rate must be"):
            build(method, learning_rate=-1.0)
        with pytest.raises(ValueError, match="noise_std must be"):
            build(method, noise_std=-1.0)
