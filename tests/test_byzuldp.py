# SPDX-License-Identifier: Apache-2.0
"""Checklist of ByzULDP (arXiv 2611.10898): the method; names carry the row numbers.

Sensitivities (rows 8 to 10) are in ``test_sensitivity.py``, noise calibration and
theory (rows 12 to 15, 17, 18, 23 to 27) in files of their own.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toys

import jaxfed
from jaxfed import aggregators, data, links, models
from jaxfed.aggregators import compose
from jaxfed.algorithms import byz_clip_sgd
from jaxfed.algorithms._byzuldp import AnchoredState, anchored, byzuldp
from jaxfed.preaggregators import bucketing, nnm
from jaxfed.privacy.mechanisms import clip_tree, gaussian_noise
from jaxfed.privacy.sensitivity import convex_hull

KEY = 7
RULES = {
    "mean": aggregators.mean(),
    "trimmed_mean": aggregators.trimmed_mean(2),
    "median": aggregators.median(),
    "geometric_median": aggregators.geometric_median(tolerance=0.0),
    "krum": aggregators.krum(2, neighbors="n-f-1"),
}


def anchor(state):
    (found,) = toys.states(state.server.inner, AnchoredState)
    return toys.ravel(found.anchor)


def build(rule=None, n=5, **over):
    """The method on quadratics, with the sheet's hyperparameters."""
    rule = aggregators.trimmed_mean(1) if rule is None else rule
    options = {"learning_rate": 0.5, "num_clients": n, "key": KEY} | over
    options.setdefault("local_work", toys.quadratic)
    return byzuldp(rule=rule, **options)


def model(state):
    return (toys.ravel(state.server.params),)


def rounds(
    algorithm,
    centres,
    count,
    attack=None,
    f=0,
    start=(1.0, -2.0),
    look=lambda s: (anchor(s), *model(s)),
):
    """Run on quadratics and return the anchors and models after each round."""
    sim = jaxfed.simulate(algorithm, len(centres), num_byzantine=f, attack=attack)
    shards, params = toys.centres(centres), jnp.asarray(start, float)
    seen, _ = toys.trace(sim, params, shards, count, look)
    return [part[1:] for part in seen]


# --- Row 1: trajectories ---------------------------------------------------------

CENTRES = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 0)]
GOLDEN_ANCHORS = [
    (0.014230249470757711, -0.12793997200726934),
    (0.027660082177839985, -0.24921250176257437),
    (0.039011154171629, -0.35295848906013455),
    (0.04830382926126395, -0.44020694772695074),
]
GOLDEN_MODELS = [
    (0.9928848752646211, -1.9360300139963653),
    (0.9790548341757012, -1.8114237631150782),
    (0.9595492570898867, -1.6349445185850109),
    (0.9353973424592548, -1.4148410447215356),
]


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_row_1_golden_trajectory(wide):
    with jax.enable_x64(wide):
        seen = rounds(build(), CENTRES, 4, jaxfed.make_attack("ipm", scale=1.0), 1)
    tolerance = {"rtol": 0, "atol": 1e-12 if wide else 1e-6}
    np.testing.assert_allclose(seen[0], GOLDEN_ANCHORS, **tolerance)
    np.testing.assert_allclose(seen[1], GOLDEN_MODELS, **tolerance)


def oracle(centres, start, rule, draws, eta, alpha, beta, sigma, radius):
    """Algorithm 1 in float64 for F_i = |x - c_i|^2 / 2, everything a schedule."""
    x, anchor = np.array(start, float), np.zeros(len(start))
    m, seen = np.zeros_like(centres), []
    for t, draw in enumerate(draws):
        g = x - centres
        g = g * np.minimum(1, radius / np.linalg.norm(g, axis=1))[:, None]
        m = alpha(t) * m + (1 - alpha(t)) * g
        moved = beta(t) * anchor + (1 - beta(t)) * m
        anchor = rule(moved) + sigma(t) * draw
        x = x - eta(t) * anchor
        seen.append((anchor, x))
    return [np.array(part) for part in zip(*seen, strict=True)]


def server_noise(count, d, key=KEY):
    link = gaussian_noise(1.0, key)
    zeros = jnp.zeros(d)
    draw = jax.vmap(lambda t: link.update(zeros, link.init(zeros), round=t)[0])
    return np.asarray(toys.quick_jit(draw)(jnp.arange(count)), np.float64)


def test_row_1_schedules_and_noise():
    centres = np.random.default_rng(0).normal(size=(5, 3)) * 2
    schedules = {
        "eta": lambda t: 0.5 / (1 + t),
        "alpha": lambda t: t / (t + 2),
        "beta": lambda t: 0.9 - 0.4 / (1 + t),
        "sigma": lambda t: 0.1 + 0.1 * t,
    }
    with jax.enable_x64(True):
        algorithm = build(
            learning_rate=schedules["eta"],
            momentum=schedules["alpha"],
            server_momentum=schedules["beta"],
            noise_std=schedules["sigma"],
            clip_norm=1.5,
        )
        seen = rounds(algorithm, centres, 5, start=(1.0, -2.0, 0.5))
        draws = server_noise(5, 3)
    rule = functools.partial(oracles.trimmed_mean, f=1)
    expected = oracle(centres, (1, -2, 0.5), rule, draws, radius=1.5, **schedules)
    np.testing.assert_allclose(seen[0], expected[0], atol=1e-12)
    np.testing.assert_allclose(seen[1], expected[1], atol=1e-12)


def test_noise_follows_the_sensitivity_of_a_scheduled_momentum():
    """A number is the noise of round 0: Delta_t / sigma_t stays what it was."""
    centres = np.random.default_rng(1).normal(size=(5, 2))

    def beta(t):
        return 0.9 - 0.4 / (1 + t)

    algorithm = build(server_momentum=beta, noise_std=0.3)
    np.testing.assert_allclose(algorithm.mechanism.bound, 2 * (1 - 0.5) / 3)
    assert algorithm.mechanism.noise_std == 0.3
    seen = rounds(algorithm, centres, 4)
    with jax.enable_x64(False):
        draws = server_noise(4, 2)
    expected = oracle(
        centres,
        (1, -2),
        functools.partial(oracles.trimmed_mean, f=1),
        draws,
        eta=lambda t: 0.5,
        alpha=lambda t: 0.1,
        beta=beta,
        sigma=lambda t: 0.3 * (1 - beta(t)) / 0.5,
        radius=1.0,
    )
    np.testing.assert_allclose(seen[0], expected[0], atol=1e-6)


def test_numbers_may_be_traced_and_mean_the_same():
    centres = np.random.default_rng(2).normal(size=(5, 2))

    def run(eta, clip_norm, std, alpha, beta, f):
        algorithm = build(
            aggregators.trimmed_mean(f),
            learning_rate=eta,
            clip_norm=clip_norm,
            noise_std=std,
            momentum=alpha,
            server_momentum=beta,
        )
        sim = jaxfed.simulate(algorithm, 5, num_byzantine=f)
        shards = toys.centres(centres)
        last, _ = sim.run(sim.init(jnp.ones(2), 0), shards, 3)
        return sim.model(last), jnp.asarray(algorithm.mechanism.bound)

    numbers = [(0.5, 1.0, 0.1, 0.1, 0.85, 1), (0.2, 0.3, 0.0, 0.0, 0.0, 2)]
    traced = [jnp.asarray(column) for column in zip(*numbers, strict=True)]
    swept, bounds = toys.quick_jit(jax.vmap(run))(*traced)
    plain = functools.partial(run, *numbers[0])
    np.testing.assert_allclose(swept[0], toys.quick_jit(plain)()[0], atol=1e-6)
    np.testing.assert_allclose(bounds, [2 * 0.15 / 3, 2 * 0.3], rtol=1e-6)


# --- Rows 2 and 3: the client ----------------------------------------------------


def test_row_2_one_clip_of_the_batch_gradient():
    radius = 0.7
    rng = np.random.default_rng(3)
    clip = toys.quick_jit(jax.vmap(lambda v: clip_tree(v, radius)))
    for scale in (1e-3, 1.0, 1e3, 1e15):
        v = (rng.normal(size=(200, 4)) * scale).astype(np.float32)
        v[0] = 0
        clipped = np.asarray(clip(v), np.float64)
        norms = np.linalg.norm(v.astype(np.float64), axis=1)
        assert np.all(np.linalg.norm(clipped, axis=1) <= radius * (1 + 1e-6))
        inside = norms <= radius * (1 - 1e-6)
        np.testing.assert_array_equal(clipped[inside], v[inside])
        assert not np.any(clipped[0])

    # Examples far outside of the ball whose mean is inside: nothing is clipped.
    def loss(params, batch):
        return batch["g"] @ params

    examples = jnp.array([[10.0, 0.25], [-9.5, 0.0]])
    shard = jaxfed.Shard({"g": examples}, jnp.int32(2))
    algorithm = build(momentum=0.0, local_work=jaxfed.gradient(loss))

    @toys.quick_jit
    def send(shard):
        params = jnp.zeros(2)
        message = algorithm.server.broadcast(algorithm.server.init(params))
        state = algorithm.client.init(params, 0)
        return algorithm.client.update(message, state, shard, jax.random.key(0))[0]

    sent = send(shard)
    np.testing.assert_allclose(sent, [0.25, 0.125], rtol=1e-6)


def test_row_3_client_momentum_from_zero_without_bias_correction():
    radius, alpha = 0.8, 0.6
    gradients = np.random.default_rng(4).normal(size=(12, 40, 3)).astype(np.float32)
    gradients[:, 0] = [5.0, 0, 0]  # always clipped, always the same way

    def run(alpha):
        tx = build(clip_norm=radius, momentum=alpha).client_tx

        def one(gradients):
            def step(state, g):
                out, state = tx.update(g, state, round=0)
                return state, out

            return jax.lax.scan(step, tx.init(gradients[0]), gradients)[1]

        return np.asarray(toys.quick_jit(jax.vmap(one, 1, 1))(gradients))

    norms = np.linalg.norm(run(alpha), axis=2)
    limits = radius * (1 - alpha ** np.arange(1, 13))
    assert np.all(norms <= limits[:, None] * (1 + 1e-5))
    np.testing.assert_allclose(norms[:, 0], limits, rtol=1e-5)
    clip = toys.quick_jit(jax.vmap(jax.vmap(lambda g: clip_tree(g, radius))))
    clipped = clip(gradients)
    np.testing.assert_allclose(run(0.0), clipped, rtol=1e-6, atol=1e-7)


# --- Row 4: the server's momentum and its noisy anchor -----------------------------


def test_row_4_anchored_rows_keep_their_shape_around_the_anchor():
    rng = np.random.default_rng(5)
    m, r, beta = rng.normal(size=(6, 4)), rng.normal(size=4), 0.85
    seen = []

    def watch(updates, state, params=None, **extra):
        seen.append(updates)
        return updates[0], state

    spy = jaxfed.Aggregator(lambda p: (), watch, inspect=None)
    for kept in (beta, 0.0):
        wrapped = anchored(spy, kept, key=KEY)
        with jax.enable_x64(True):
            state = wrapped.init(jnp.zeros(4))._replace(anchor=jnp.asarray(r))
            wrapped.update(jnp.asarray(m), state)
    moved, plain = map(np.asarray, seen)
    np.testing.assert_allclose(moved, beta * r + (1 - beta) * m, rtol=1e-14)
    np.testing.assert_array_equal(plain, m)

    def spread(x):  # Eq. (25)
        return np.sum((x - x.mean(0)) ** 2) / len(x)

    np.testing.assert_allclose(spread(moved), (1 - beta) ** 2 * spread(m), rtol=1e-12)


@pytest.mark.parametrize(
    "rule",
    [
        aggregators.trimmed_mean(1),
        aggregators.centered_clipping(clip_norm=0.4),
        compose(bucketing(2, key=0), aggregators.centered_clipping(clip_norm=0.4)),
    ],
)
def test_row_4_no_aggregate_without_noise_is_kept(rule):
    named = {} if rule.sensitivity else {"sensitivity": 0.1}
    algorithm = build(rule, noise_std=0.5, **named)
    sim = jaxfed.simulate(algorithm, 5)
    params = jnp.ones(2)
    step = toys.quick_jit(lambda shards: sim.step(sim.init(params, 0), shards)[0])
    state = step(toys.centres(CENTRES))
    (kept,) = toys.states(state.server.inner, AnchoredState)
    floats = [
        leaf
        for leaf in jax.tree.leaves(state.server)
        if jnp.issubdtype(leaf.dtype, jnp.floating) and np.any(leaf)
    ]
    # What is not zero: the model and the noised anchor, one a function of the other.
    assert len(floats) == 2
    np.testing.assert_allclose(floats[0], params - 0.5 * kept.anchor, rtol=1e-6)
    np.testing.assert_array_equal(floats[1], kept.anchor)


def test_centred_clipping_starts_from_the_published_anchor():
    rule, tau = aggregators.centered_clipping(clip_norm=0.05), 0.05
    centres = np.random.default_rng(6).normal(size=(5, 2))
    seen, _ = rounds(build(rule, noise_std=0.2), centres, 3)
    draws = server_noise(3, 2)
    r, x, m = np.zeros(2), np.array([1.0, -2.0]), np.zeros((5, 2))
    for t in range(3):
        g = np.array([oracles.clip(x - c, 1.0) for c in centres])
        m = 0.1 * m + 0.9 * g
        moved = 0.85 * r + 0.15 * m
        r = oracles.centered_clipping(moved, r, tau) + 0.2 * draws[t]
        x = x - 0.5 * r
        np.testing.assert_allclose(seen[t], r, atol=1e-6)


# --- Rows 5 and 6: reductions ------------------------------------------------------


def test_row_5_reductions():
    centres = np.random.default_rng(7).normal(size=(5, 2)) * 2
    plain = dict(momentum=0.0, server_momentum=0.0)
    fedsgd = byz_clip_sgd(
        0.5,
        rule=aggregators.mean(),
        key=KEY,
        clip_norm=1.0,
        local_work=toys.quadratic,
    )

    def run(algorithm):
        return rounds(algorithm, centres, 6, look=model)[0]

    expected = run(fedsgd)
    untrimmed = aggregators.trimmed_mean(0)
    np.testing.assert_allclose(run(build(untrimmed, **plain)), expected, atol=1e-6)
    assert np.ptp(expected, axis=0).min() > 0.1
    np.testing.assert_allclose(
        run(build(untrimmed)), run(build(aggregators.mean())), atol=1e-6
    )


def both_forms(rule, rows, std, beta=0.85):
    """``anchored`` with momentum, and a moving average behind it without."""
    one = anchored(rule, beta, noise_std=(1 - beta) * std, key=KEY, num_clients=9)
    plain = anchored(rule, 0.0, noise_std=std, key=KEY, num_clients=9)
    other = optax.chain(plain, links.ema(beta))

    def step(states, x):
        a, first = one.update(x, states[0])
        b, second = other.update(x, states[1])
        return (first, second), (a, b)

    start = one.init(rows[0, 0]), other.init(rows[0, 0])
    return jax.lax.scan(step, start, rows)[1]


@pytest.mark.parametrize("name", RULES)
def test_row_6_momentum_is_a_moving_average_of_private_outputs(name):
    rows = np.random.default_rng(8).normal(size=(50, 9, 3)) + 1
    run = toys.quick_jit(functools.partial(both_forms, RULES[name], std=0.3))
    a, b = run(jnp.asarray(rows, jnp.float32))
    np.testing.assert_allclose(a, b, atol=1e-5)
    assert np.std(a) > 0.1


def test_row_6_fails_for_centred_clipping_with_an_active_radius():
    rows = np.random.default_rng(8).normal(size=(50, 9, 3)) + 1

    @toys.quick_jit
    @jax.vmap
    def run(tau):
        rule = aggregators.centered_clipping(clip_norm=tau)
        return both_forms(rule, jnp.asarray(rows, jnp.float32), 0.3)

    a, b = run(jnp.array([0.3, 1e6]))
    assert np.abs(a - b)[0].max() > 0.1
    np.testing.assert_allclose(a[1], b[1], atol=1e-5)


# --- Row 7, 11, 19: rules ----------------------------------------------------------


def test_row_7_trimmed_mean():
    x = np.random.default_rng(9).normal(size=(11, 5)).astype(np.float32)

    @toys.quick_jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def run(x, f):
        rule = aggregators.trimmed_mean(f)
        return rule.update(x, rule.init(x[0]))[0]

    order = np.random.default_rng(0).permutation(11)
    cases = np.stack([x, x[order], x + 3, -2.5 * x])
    plain, mixed, moved, scaled = np.asarray(run(cases, 3))
    expected = np.sort(x.astype(np.float64), axis=0)[3:-3].mean(0)
    np.testing.assert_allclose(plain, expected, atol=1e-6)
    np.testing.assert_allclose(mixed, plain, atol=1e-6)
    np.testing.assert_allclose(moved, plain + 3, atol=1e-5)
    np.testing.assert_allclose(scaled, -2.5 * plain, atol=1e-5)
    np.testing.assert_allclose(run(cases, 0)[0], x.mean(0), atol=1e-6)
    rule = aggregators.trimmed_mean(3)
    with pytest.raises(ValueError, match="0 <= f < n/2, got f=3, n=6"):
        rule.update(x[:6], rule.init(x[0]))


def test_row_11_rows_are_scaled_into_the_ball_where_the_bound_needs_it():
    radius = 2.0
    last = jaxfed.Aggregator(
        lambda p: (),
        lambda u, s, params=None, **extra: (u[-1], s),
        inspect=None,
        sensitivity=convex_hull(),
    )
    far = 1e6 * radius * np.array([0.6, -0.8], np.float32)
    x = np.array([[1.0, 0.5], [0.0, 0.0], [-1.0, 1.0], far], np.float32)

    def aggregate(rule):
        return toys.quick_jit(lambda x: rule.update(x, rule.init(x[0]))[0])

    project = aggregate(anchored(last, 0.0, key=KEY, clip_norm=radius))
    for row, expected in [(far, [1.2, -1.6]), ([np.inf, 0], [0, 0]), (x[0], x[0])]:
        x[-1] = row
        np.testing.assert_allclose(project(x), expected, rtol=1e-6)
    # The method enforces it for these rules, and leaves the trimmed mean alone.
    x[-1] = far
    balled = np.array([oracles.clip(row, radius) for row in x])
    for rule, seen in [
        (aggregators.krum(1, check=False), balled),
        (aggregators.geometric_median(1), balled),
        (aggregators.trimmed_mean(1), x),
    ]:
        wrapped = build(rule, n=4, clip_norm=radius, server_momentum=0.0).rule
        want = aggregate(rule)(jnp.asarray(seen, jnp.float32))
        np.testing.assert_allclose(aggregate(wrapped)(x), want, rtol=1e-5)


def test_row_19_krum_of_the_paper_counts_the_row_itself():
    x = np.random.default_rng(10).normal(size=(20, 9, 4))
    rule = aggregators.krum(2, neighbors="n-f-1")
    run = jax.vmap(lambda x: rule.update(x, rule.init(x[0]))[0])
    got = toys.quick_jit(run)(jnp.asarray(x, jnp.float32))
    for rows, chosen in zip(x, np.asarray(got), strict=True):
        squares = np.sum((rows[:, None] - rows) ** 2, axis=2)
        scores = np.sort(squares, axis=1)[:, : 9 - 2].sum(1)  # 0 for itself
        np.testing.assert_allclose(chosen, rows[np.argmin(scores)], rtol=1e-6)


# --- Row 16: where the noise is ------------------------------------------------------


def test_row_16_noise_of_the_right_size_behind_the_rule():
    sigma = 0.7
    rule, params = aggregators.trimmed_mean(1), {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    uploads = jax.tree.map(
        lambda p: jnp.arange(5.0 * p.size).reshape(5, *p.shape), params
    )

    def draw(std, key):
        wrapped = anchored(rule, 0.5, noise_std=std, key=key, num_clients=5)

        def step(state, _):
            # The anchor stays where it is, so that rounds differ by noise alone.
            out, new = wrapped.update(uploads, state)
            return new._replace(anchor=state.anchor), toys.ravel(out)

        return jax.lax.scan(step, wrapped.init(params), None, length=2)[1]

    keys = jax.random.split(jax.random.key(0), 20_000)
    noised = toys.quick_jit(jax.vmap(functools.partial(draw, sigma)))(keys)
    noise = np.asarray(noised - toys.quick_jit(draw)(0.0, keys[0])[None], np.float64)
    # Three coordinates in each of two rounds, all independent of each other.
    covariance = np.cov(noise.reshape(-1, 6).T)
    error = np.abs(covariance - sigma**2 * np.eye(6))
    assert error.max() < 0.03 * sigma**2
    assert np.abs(noise.mean(0)).max() < 4 * sigma / np.sqrt(len(keys))


def test_row_16_clients_send_no_noise():
    params, shards = jnp.ones(2), toys.centres(CENTRES)
    sent = []
    for std in (0.0, 5.0):
        client = build(noise_std=std).client
        state = jax.vmap(client.init, (None, 0))(params, jnp.arange(5))
        message = {"params": params, "round": 0}
        work = toys.quick_jit(jax.vmap(client.update, (None, 0, 0, None)))
        sent.append(work(message, state, shards, jax.random.key(0))[0])
    np.testing.assert_array_equal(*sent)


# --- Rows 28 and 29: model and data --------------------------------------------------


class TorchLikeCNN(nn.Module):
    """Table 5 in flax's own layers, on the parameters of ours."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(16, (8, 8), 2, ((3, 3), (3, 3)), name="PatchConv_0")(x)
        x = nn.max_pool(nn.tanh(x), (2, 2))
        x = nn.Conv(32, (4, 4), 2, "VALID", name="PatchConv_1")(x)
        x = nn.max_pool(nn.tanh(x), (2, 2)).reshape(x.shape[0], -1)
        x = nn.tanh(nn.Dense(32, name="Dense_0")(x))
        return nn.Dense(10, name="Dense_1")(x)


def test_row_28_network_of_table_5():
    model = models.make_model("byzuldp_cnn", 10)
    images = np.random.default_rng(0).uniform(size=(1, 28, 28, 1)).astype(np.float32)
    params = toys.quick_jit(model.init)(jax.random.key(1), images)["params"]
    assert sum(x.size for x in jax.tree.leaves(params)) == 26_010
    assert params["Dense_0"]["kernel"].shape == (512, 32)
    twin = TorchLikeCNN()

    def loss(model):
        return lambda p: jnp.sum(jnp.sin(model.apply({"params": p}, images)))

    @toys.quick_jit
    def both(params):
        return [jax.value_and_grad(loss(m))(params) for m in (model, twin)]

    (ours, ours_grad), (theirs, theirs_grad) = both(params)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5),
        ours_grad,
        theirs_grad,
    )


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(4, 2, 1), ((3, 6), 3, 0)])
def test_row_28_strided_patches_equal_flax(kernel, stride, padding):
    kernel = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    ours = models.PatchConv(3, kernel, stride, padding)
    theirs = nn.Conv(3, kernel, stride, [(padding, padding)] * 2)
    x = np.random.default_rng(0).normal(size=(2, 10, 11, 2)).astype(np.float32)

    @toys.quick_jit
    def both(x):
        params = ours.init(jax.random.key(1), x)
        return ours.apply(params, x), theirs.apply(params, x)

    np.testing.assert_allclose(*both(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="stride must divide the kernel's sizes"):
        models.PatchConv(3, (3, 3), 2).init(jax.random.key(1), x)


def test_row_29_two_classes_a_client():
    labels = np.random.default_rng(11).integers(0, 10, 3000)
    parts, again, other = (
        data.split(labels, 100, kind="by_classes", classes_per_client=2, seed=seed)
        for seed in (1, 1, 2)
    )
    assert all(len(np.unique(labels[part])) == 2 for part in parts)
    used = np.concatenate(parts)
    assert len(np.unique(used)) == len(used) == 3000
    for a, b in zip(parts, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert any(set(a) != set(b) for a, b in zip(parts, other, strict=True))


# --- Schedules of the moving average --------------------------------------------------


def test_moving_average_takes_a_schedule():
    """Weights t / (t + 1) make it the plain mean of what arrived."""
    link = links.ema(lambda t: t / (t + 1))
    state = link.init(jnp.zeros(1))
    for t, x in enumerate([2.0, 4.0, 9.0]):
        out, state = link.update(jnp.array([x]), state)  # counts by itself
        np.testing.assert_allclose(out, [[2], [3], [5]][t], rtol=1e-6)
    assert state.count == 3
    out, state = link.update(jnp.array([7.0]), state, round=1)
    np.testing.assert_allclose(out, [6], rtol=1e-6)
    # A constant keeps no count and takes no extra arguments, as ever.
    constant = links.ema(0.5)
    assert jax.tree.leaves(constant.init(jnp.zeros(1)).count) == []
    assert not isinstance(constant, optax.GradientTransformationExtraArgs)
    with pytest.raises(ValueError, match="kept must satisfy 0 <= kept < 1"):
        links.ema(lambda t: 1.0)


# --- Contracts and errors ------------------------------------------------------------


def test_the_anchor_is_broadcast():
    algorithm = build()
    state = algorithm.server.init(jnp.ones(2))
    message = algorithm.server.broadcast(state)
    assert set(message) == {"params", "round", "anchor"}
    np.testing.assert_array_equal(message["anchor"], [0, 0])
    state, _ = algorithm.server.update(jnp.full((5, 2), 0.5), state)
    np.testing.assert_allclose(
        algorithm.server.broadcast(state)["anchor"], [0.075, 0.075], rtol=1e-6
    )


def test_inspection_is_that_of_the_rule_and_changes_nothing():
    algorithm = build(noise_std=0.1)
    state = algorithm.server.init(jnp.ones(2))
    x = jnp.asarray(np.random.default_rng(12).normal(size=(5, 2)), jnp.float32)
    hostile = jnp.arange(5) == 4
    rule = aggregators.trimmed_mean(1)

    @toys.quick_jit
    def look(x):
        plain, nothing = algorithm.server.update(x, state)
        seen, info = algorithm.server.update(x, state, byzantine=hostile)
        assert nothing is None
        alone = algorithm.rule.inspect(x, state.inner[1], byzantine=hostile)
        want = rule.inspect(0.15 * x, byzantine=hostile)
        return plain.params, seen.params, info, alone, want

    plain, seen, info, alone, want = look(x)
    np.testing.assert_array_equal(plain, seen)
    np.testing.assert_allclose(info.weights, want.weights, rtol=1e-6)
    np.testing.assert_allclose(alone.influence, want.influence, rtol=1e-6)


def test_as_optimizer_equals_simulate():
    algorithm = build(noise_std=0.1)
    optimizer = jaxfed.as_optimizer(algorithm, 5)
    sim, shards = jaxfed.simulate(algorithm, 5), toys.centres(CENTRES)

    @toys.quick_jit
    def run():
        params, state = jnp.ones(2), optimizer.init(jnp.ones(2))
        for _ in range(3):
            grads = params[None] - shards.data["a"]
            step, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, step)
        return params, sim.model(sim.run(sim.init(jnp.ones(2), 0), shards, 3)[0])

    np.testing.assert_allclose(*run(), rtol=1e-6)


def test_noise_needs_a_sensitivity():
    rule = compose(nnm(1), aggregators.median())
    with pytest.raises(ValueError, match="unknown sensitivity.*pass sensitivity="):
        build(rule, noise_std=0.1)
    with pytest.raises(ValueError, match="unknown sensitivity"):
        build(rule, noise_std=lambda t: 0.1)
    assert build(rule).mechanism.bound == np.inf
    # Theorem 2 at n = 1000, f = 250, T = 800, delta = 1e-4, epsilon = 10.
    known = build(aggregators.trimmed_mean(250), n=1000, mode="paper").mechanism
    spread = np.sqrt(800 * np.log(1e4))
    claimed = known.nominal * known.sensitivity(1) * spread / 10
    np.testing.assert_allclose(claimed, 0.0162867, rtol=1e-5)
    named = build(rule, noise_std=0.1, sensitivity=0.25).mechanism
    assert named.sensitivity(20) == 0.25 and named.model == "central"
    assert (known.source, named.source) == ("paper", "asserted")
    with pytest.raises(ValueError, match="sensitivity must be a finite number > 0"):
        build(rule, sensitivity=-1.0)
    with pytest.raises(ValueError, match="a rule that knows its own"):
        build(aggregators.median(), noise_std=0.1, sensitivity=1e-6)
    with pytest.raises(ValueError, match="dim must be"):
        build(aggregators.median(), n=4, mode="paper", dim=0)


def test_private_rounds_need_everybody():
    x = jnp.full((5, 2), 0.5)
    for algorithm in (build(noise_std=0.1), build(aggregators.mean(), noise_std=0.1)):
        state = algorithm.server.init(jnp.ones(2))
        with pytest.raises(ValueError, match="num_clients=5, got 4 rows"):
            algorithm.server.update(x[:4], state)
        with pytest.raises(ValueError, match="mask= changes how far one client"):
            algorithm.server.update(x, state, mask=jnp.arange(5) > 0)
        with pytest.raises(ValueError, match="weights= changes how far one client"):
            algorithm.server.update(x, state, weights=jnp.ones(5))
    # Without noise nothing is promised, so nothing is asked for.
    algorithm = build(aggregators.mean())
    new, _ = algorithm.server.update(x[:4], algorithm.server.init(jnp.ones(2)))
    np.testing.assert_allclose(new.params, 1 - 0.5 * 0.15 * 0.5, rtol=1e-6)


def test_a_rule_with_a_memory_of_its_own_is_refused():
    def update(updates, state, params=None, **extra):
        return state + updates.mean(0), state + updates.mean(0)

    rule = jaxfed.Aggregator(jnp.zeros_like, update, inspect=None)
    private = build(rule, noise_std=0.1, sensitivity=1.0)
    with pytest.raises(ValueError, match="remembers aggregates without noise"):
        private.server.init(jnp.ones(2))
    build(rule).server.init(jnp.ones(2))


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"momentum": 1.0}, "momentum must satisfy 0 <= momentum < 1"),
        ({"momentum": lambda t: -0.1}, "momentum must satisfy"),
        ({"server_momentum": lambda t: 1.0}, "server_momentum must satisfy"),
        ({"noise_std": -1.0}, "noise_std must be"),
        ({"clip_norm": 0.0}, "clip_norm must be > 0"),
        ({"learning_rate": 0.0}, "learning_rate must be"),
        ({"num_clients": 0}, "num_clients must be at least 1"),
        ({"mode": "loose"}, "mode must be one of 'tight', 'paper'"),
        ({"rule": aggregators.trimmed_mean(3)}, "0 <= f < n/2, got f=3, n=5"),
    ],
)
def test_errors(over, message):
    with pytest.raises(ValueError, match=message):
        build(**over)


def test_wrong_kinds():
    with pytest.raises(TypeError, match="key must be"):
        build(key=1.5)
    with pytest.raises(TypeError, match="rule must be an aggregator"):
        build(optax.identity())
