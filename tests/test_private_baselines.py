# SPDX-License-Identifier: Apache-2.0
"""Clip21, Alpha-NormEC, DP-FedAvg, DP-BREM, CafCor: by hand, and degenerate cases."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import jaxfed
from jaxfed import aggregators, attacks, links
from jaxfed.algorithms._alpha_norm import alpha_norm
from jaxfed.algorithms._byz_clip21_sgd2m import byz_clip21_sgd2m
from jaxfed.algorithms._byz_sgdm import byz_sgdm
from jaxfed.algorithms._cafcor import cafcor
from jaxfed.algorithms._clip21 import clip21_sgd, clip21_sgd2m
from jaxfed.algorithms._dp_brem import DpBremState, dp_brem
from jaxfed.algorithms._dp_fedavg import dp_fedavg
from jaxfed.algorithms._fedavg import fedavg
from jaxfed.algorithms._safe_dshb import safe_dshb
from jaxfed.privacy import (
    gaussian_noise,
    normalize,
    pairwise_noise,
    secret_noise_std,
)

# Clients of the quadratics f_i(x) = (x - a_i)^2 / 2, from x = 2.
A = [[0.0], [4.0], [-10.0]]
N, F = 6, 1
PROBLEM = toys.Regression(N)


def quadratic(message, shard, key):
    return toys.quadratic(message, shard, key)


quadratic.clip_norm, quadratic.batch_size = np.inf, None


def build(factory, learning_rate=0.5, *, n=3, **options):
    """Build a method from those common arguments that it takes, without noise."""
    work = quadratic if factory is dp_brem else toys.quadratic
    common = dict(num_clients=n, key=0, rule=aggregators.mean(), num_byzantine=0)
    common |= dict(clip_norm=1.0, local_work=work)
    takes = inspect.signature(factory).parameters
    common = {k: v for k, v in common.items() if k in takes}
    return factory(learning_rate, **(common | options))


def path(factory, *args, a=A, start=2.0, rounds=3, **options):
    """Models after 0, 1, ... rounds on the quadratics, in float64."""
    with jax.enable_x64(True):
        n = np.shape(a)[0]
        sim = jaxfed.simulate(build(factory, *args, n=n, **options), n)
        params = jnp.full(np.shape(a)[1:], start)
        return toys.trace(sim, params, toys.centres(a), rounds, sim.model)[0]


def assert_close(got, expected, tolerance=1e-12):
    expected = np.reshape(np.array(expected, float), got.shape)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


# --- Rounds by hand --------------------------------------------------------------


def test_clip21_sgd_rounds_by_hand():
    # Clipped to (1, -1, 1), then differences (5/6, -7/6, 65/6) to (5/6, -1, 1).
    assert_close(path(clip21_sgd, rounds=2), [2, 2 - 1 / 6, 2 - 1 / 6 - 11 / 36])


def test_clip21_sgd2m_golden_trace():
    halves = dict(momentum=0.5, server_momentum=0.5)
    golden = [2, 1.9166667, 1.7534722, 1.5292245, 1.2600068]
    assert_close(path(clip21_sgd2m, rounds=4, **halves), golden, 5e-8)


def test_alpha_norm_round_by_hand():
    # Gradients 2, -2, 12 over 1 + 2, 1 + 2, 1 + 12; half of their mean is 1/13 twice.
    options = dict(alpha=1.0, memory_step=0.5, rounds=1)
    assert_close(path(alpha_norm, server_step="plain", **options), [2, 2 - 1 / 13])
    assert_close(path(alpha_norm, **options), [2, 1.5])


def test_alpha_norm_takes_one_norm_over_all_coordinates():
    # The gradient (3, 4) over 5 + 5 has norm 1/2 and direction (0.6, 0.8).
    options = dict(alpha=5.0, memory_step=1.0, rounds=1, a=[[-3.0, -4.0]], start=0.0)
    assert_close(path(alpha_norm, **options), [0, 0, -0.3, -0.4])
    plain = path(alpha_norm, server_step="plain", **options)
    assert_close(plain, [0, 0, -0.15, -0.2])


def test_dp_fedavg_round_by_hand():
    # Deltas (3, 4) and (0.5, 0) are clipped to (0.6, 0.8) and (0.5, 0).
    problem = dict(a=[[-3.0, -4.0], [-0.5, 0.0]], start=0.0, rounds=1)
    assert_close(path(dp_fedavg, 1.0, **problem), [0, 0, -0.55, -0.4])
    adam = optax.adam(0.1, eps=0.0)
    moved = path(dp_fedavg, 0.5, server_optimizer=adam, **problem)
    assert_close(moved, [0, 0, -0.05, -0.05])


def test_dp_brem_rounds_by_hand():
    # Momenta (1, -1, 6) are clipped around 0, then (17, -19, 107)/12 around 1/3: each
    # time to (1, -1, 1), so that the server's momentum is 1/3 and then 2/3.
    assert_close(path(dp_brem, momentum=0.5, rounds=2), [2, 2 - 1 / 6, 1.5])


def test_cafcor_round_by_hand():
    # Gradients clipped to (1, -1, 1), halved by the momentum; CAF of f = 0 averages.
    assert_close(path(cafcor, 0.6, momentum=0.5, rounds=1), [2, 1.9])


# --- Degenerate cases ------------------------------------------------------------


def test_clip21_sgd_without_clip_is_distributed_sgd():
    one = path(clip21_sgd, clip_norm=np.inf)
    assert_close(one, path(byz_sgdm, momentum=0.0))
    assert np.abs(one - path(clip21_sgd)).max() > 0.1


def test_clip21_sgd2m_is_byz_clip21_sgd2m_with_the_mean():
    options = dict(noise_std=0.3, momentum=0.7, server_momentum=0.6)
    one = path(clip21_sgd2m, **options)
    np.testing.assert_array_equal(one, path(byz_clip21_sgd2m, **options))


def test_alpha_norm_of_large_alpha_is_distributed_sgd():
    large = dict(alpha=1e9, memory_step=1e9, server_step="plain")
    assert_close(path(alpha_norm, **large), path(byz_sgdm, momentum=0.0), 1e-6)


def test_dp_fedavg_without_clip_and_noise_is_fedavg():
    assert_close(path(dp_fedavg, clip_norm=np.inf), path(fedavg))


def test_dp_brem_without_clips_and_noise_is_averaged_momentum():
    options = dict(momentum=0.6)
    assert_close(path(dp_brem, clip_norm=np.inf, **options), path(byz_sgdm, **options))


def test_cafcor_without_correlated_noise_is_safe_dshb_with_caf():
    options = dict(noise_std=0.3, momentum=0.6)
    one = path(cafcor, num_byzantine=1, correlated_noise_std=0.0, **options)
    other = path(safe_dshb, rule=aggregators.caf(1), **options)
    np.testing.assert_array_equal(one, other)


def test_correlated_noise_cancels_in_the_mean():
    options = dict(noise_std=0.0, momentum=0.6)
    loud = path(cafcor, correlated_noise_std=50.0, **options)
    assert_close(loud, path(cafcor, **options), 1e-11)
    # A rule that drops clients cannot cancel it.
    filtered = path(cafcor, correlated_noise_std=50.0, num_byzantine=1, **options)
    assert np.abs(filtered - loud).max() > 1


# --- Correlated noise ------------------------------------------------------------


def pairwise(n, d, round=0, std=2.0):
    """What each of n clients adds, ``[n, d]``."""
    link = links.per_client(pairwise_noise(std, n, 3), n)
    zeros = jnp.zeros((n, d))
    return np.asarray(
        toys.quick_jit(
            lambda t: link.update(zeros, link.init(zeros[0]), zeros[0], round=t)[0]
        )(round)
    )


def test_pairwise_noise_has_the_covariance_of_a_complete_graph():
    with jax.enable_x64(True):
        noise = pairwise(4, 20_000)
        other = pairwise(4, 20_000, round=1)
    assert np.abs(noise.sum(axis=0)).max() < 1e-13
    expected = 4.0 * (4 * np.eye(4) - 1)  # variance 3 * 2^2, covariance -2^2
    np.testing.assert_allclose(noise @ noise.T / 20_000, expected, atol=0.4)
    assert np.abs(noise @ other.T / 20_000).max() < 0.4


def test_two_clients_draw_opposite_noise_and_one_draws_none():
    noise = pairwise(2, 50)
    np.testing.assert_allclose(noise[0], -noise[1], atol=1e-6)
    assert noise.std() > 1
    assert not np.any(pairwise(1, 50))


def test_secret_noise_std_inverts_the_covariance():
    for h, own, shared in [(1, 0.5, 3.0), (4, 0.5, 0.7), (9, 2.0, 0.1)]:
        covariance = (own**2 + h * shared**2) * np.eye(h) - shared**2
        expected = 1 / np.sqrt(np.linalg.inv(covariance)[0, 0])
        np.testing.assert_allclose(secret_noise_std(own, shared, h), expected)
    # Between local and central privacy.
    assert secret_noise_std(0.5, 0.0, 9) == pytest.approx(0.5)
    assert secret_noise_std(0.5, 1e6, 9) == pytest.approx(1.5)
    assert secret_noise_std(0.0, 1.0, 9) == 0.0
    with pytest.raises(ValueError, match="honest must be at least 1"):
        secret_noise_std(0.5, 1.0, 0)


# --- Central noise ---------------------------------------------------------------


def server_step(algorithm, uploads, params, state=None, **extra):
    state = algorithm.server.init(params) if state is None else state
    return algorithm.server.update(uploads, state, **extra)[0]


def test_dp_fedavg_noise_is_on_the_mean():
    params = jnp.zeros(4000)
    algorithm = build(dp_fedavg, 1.0, noise_std=0.3)
    once = server_step(algorithm, jnp.zeros((3, 4000)), params)
    twice = server_step(algorithm, jnp.zeros((3, 4000)), params, once)
    first, second = np.asarray(once.params), np.asarray(twice.params - once.params)
    assert abs(first.std() / 0.3 - 1) < 0.05
    assert abs(second.std() / 0.3 - 1) < 0.05
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1


def test_dp_fedavg_divides_by_all_clients_and_refuses_weights():
    algorithm, params = build(dp_fedavg, 1.0, clip_norm=9.0), jnp.zeros(2)
    rows = jnp.array([[3.0, 0.0], [0.0, 6.0], [jnp.nan, 9.0]])
    mask = jnp.array([True, True, False])
    np.testing.assert_allclose(
        server_step(algorithm, rows, params, mask=mask).params, [-1.0, -2.0]
    )
    with pytest.raises(ValueError, match="refuses weights"):
        server_step(algorithm, rows, params, weights=jnp.ones(3))


def test_dp_fedavg_bound_is_reached_and_kept():
    algorithm = build(dp_fedavg, 1.0, n=4, clip_norm=0.7)
    bound = algorithm.mechanism.sensitivity(10)
    assert bound == pytest.approx(2 * 0.7 / 4)
    assert algorithm.mechanism.model == "central"
    rng = np.random.default_rng(0)
    rows = 2 * rng.normal(size=(4, 3)).astype(np.float32)
    worst = 0.0
    for other in [*rng.normal(size=(20, 3)), -rows[0]]:
        models = []
        for row in (rows[0], np.float32(other)):
            mine, _ = algorithm.client_tx.update(
                jnp.asarray(row), algorithm.client_tx.init(jnp.zeros(3))
            )
            uploads = jnp.asarray(rows).at[0].set(mine)
            models.append(server_step(algorithm, uploads, jnp.zeros(3)).params)
        worst = max(worst, float(jnp.linalg.norm(models[0] - models[1])))
    assert bound * 0.999 < worst < bound * 1.00001


def test_dp_brem_noise_is_on_the_sum_and_the_state_is_noised():
    params, rows = jnp.zeros(4000), jnp.zeros((3, 4000))
    algorithm = build(dp_brem, 1.0, noise_std=0.6)
    go = toys.quick_jit(lambda mask: server_step(algorithm, rows, params, mask=mask))
    state = go(jnp.ones(3, bool))
    noise = gaussian_noise(0.6, 0)
    drawn, _ = noise.update(params, noise.init(params))
    np.testing.assert_allclose(state.params, -drawn / 3, rtol=1e-5)
    # All that the server keeps besides the model: the published momentum, and a key.
    (kept,) = toys.states(state.inner, DpBremState)
    leaves = jax.tree.leaves(state.inner)
    assert [x.shape for x in leaves if x.dtype == jnp.float32] == [(4000,)]
    np.testing.assert_allclose(kept.momentum, drawn / 3, rtol=1e-5)
    # An absent client is no part of the mean.
    absent = go(jnp.array([True, True, False]))
    np.testing.assert_allclose(absent.params, -drawn / 2, rtol=1e-5)


def test_dp_brem_moves_no_more_than_its_mechanism_says():
    work = jaxfed.gradient(PROBLEM.loss, batch_size=2, clip_norm=0.8)
    assert build(dp_brem, local_work=work).mechanism.sensitivity(2) == 0.8
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        rows, centre = rng.normal(size=(5, 3)), rng.normal(size=3)
        algorithm = build(dp_brem, 1.0, n=5, clip_norm=0.9)
        state = algorithm.server.init(jnp.zeros(3))
        (kept,) = toys.states(state.inner, DpBremState)
        inner = (state.inner[0], kept._replace(momentum=jnp.asarray(centre)))
        state = state._replace(inner=(*inner, state.inner[2]))
        go = toys.quick_jit(
            lambda rows: 5 * server_step(algorithm, rows, jnp.zeros(3), state).params
        )
        base = go(rows)
        for size in (0.1, 1.0, 100.0):
            for _ in range(5):
                step = rng.normal(size=3)
                step *= size / np.linalg.norm(step)
                moved = np.linalg.norm(go(rows + np.eye(5)[:, :1] * step) - base)
                assert moved <= min(size, 2 * 0.9) * (1 + 1e-9)


def test_alpha_norm_messages_are_shorter_than_one():
    link = normalize(0.1)
    for tree in ([3.0, 4.0], [1e-20, 0.0], [1e15, -1e15]):
        sent = link.update(jnp.array(tree), link.init(None))[0]
        assert np.linalg.norm(sent) <= 1
    np.testing.assert_allclose(
        link.update({"a": jnp.array([3.0]), "b": jnp.array(4.0)}, ())[0]["b"], 4 / 5.1
    )
    for value in (jnp.nan, jnp.inf, 0.0):
        sent = link.update(jnp.array([value, 1.0 * (value != 0)]), ())[0]
        np.testing.assert_array_equal(sent, [0.0, 0.0])
    assert build(alpha_norm).mechanism.sensitivity(10) == 2


# --- In a simulation -------------------------------------------------------------

ROBUST = ["clip21_sgd", "clip21_sgd2m", "alpha_norm", "dp_brem", "cafcor"]
FACTORIES = {
    f.__name__: f
    for f in (clip21_sgd, clip21_sgd2m, alpha_norm, dp_fedavg, dp_brem, cafcor)
}
TRACED = dict(
    learning_rate=[0.1, 0.2, 0.3],
    clip_norm=[0.5, 1.0, 0.7],
    noise_std=[0.01, 0.0, 0.02],
    momentum=[0.8, 0.5, 0.0],
    server_momentum=[0.7, 0.2, 0.0],
    alpha=[0.1, 0.5, 1.0],
    memory_step=[0.3, 0.1, 0.2],
    correlated_noise_std=[0.1, 0.0, 0.05],
    num_byzantine=[1, 1, 2],
)


def attacked(name, **options):
    """The model after 8 rounds with one client of six attacking by IPM."""
    factory = FACTORIES[name]
    takes = inspect.signature(factory).parameters
    inner = 2.0 if name == "dp_brem" else None
    common = dict(
        num_clients=N,
        key=3,
        rule=aggregators.trimmed_mean(F),
        local_work=jaxfed.gradient(PROBLEM.loss, batch_size=3, clip_norm=inner),
    )
    algorithm = factory(**{k: v for k, v in (common | options).items() if k in takes})
    sim = jaxfed.simulate(algorithm, N, num_byzantine=F, attack=attacks.ipm())
    state, metrics = sim.run(sim.init(PROBLEM.params, 1), PROBLEM.shards, 8)
    return toys.ravel(sim.model(state)), metrics["loss"]


@pytest.mark.parametrize("name", FACTORIES)
def test_sweeps_under_attack_equal_single_runs(name):
    takes = inspect.signature(FACTORIES[name]).parameters
    grid = {k: np.array(v) for k, v in TRACED.items() if k in takes}
    grid = {k: v.astype(v.dtype.kind + "4") for k, v in grid.items()}
    models, losses = toys.quick_jit(jax.vmap(lambda g: attacked(name, **g)))(grid)
    one = {k: v[1].item() for k, v in grid.items()}
    model, _ = toys.quick_jit(lambda: attacked(name, **one))()
    np.testing.assert_allclose(models[1], model, rtol=1e-4, atol=1e-5)
    assert np.all(np.isfinite(models))
    assert np.abs(models[0] - models[2]).max() > 1e-3
    if name in ROBUST:
        assert np.all(losses[:, -1] < losses[:, 0])


# --- Errors ----------------------------------------------------------------------


@pytest.mark.parametrize("name", FACTORIES)
def test_wrong_numbers(name):
    takes = inspect.signature(FACTORIES[name]).parameters
    wrong = dict(
        learning_rate=0.0,
        clip_norm=-1.0,
        noise_std=-0.1,
        momentum=1.0,
        server_momentum=1.5,
        alpha=0.0,
        memory_step=0.0,
        correlated_noise_std=-1.0,
        num_byzantine=-1,
    )
    for argument, value in wrong.items():
        if argument in takes:
            with pytest.raises(ValueError, match=f"{argument} must"):
                build(FACTORIES[name], **{argument: value})


def test_wrong_choices_and_works():
    with pytest.raises(ValueError, match="server_step must be one of"):
        build(alpha_norm, server_step="none")
    with pytest.raises(TypeError, match="server_optimizer must be an optax"):
        build(dp_fedavg, server_optimizer=optax.adam)
    with pytest.raises(ValueError, match="dp_brem clips each example"):
        build(dp_brem, local_work=jaxfed.gradient(PROBLEM.loss))
    with pytest.raises(ValueError, match="cafcor needs exactly one clip"):
        build(cafcor, clip_norm=None)
    assert build(dp_brem, local_work=None).mechanism.sensitivity(5) == 2.0
