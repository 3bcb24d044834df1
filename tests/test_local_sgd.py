# SPDX-License-Identifier: Apache-2.0
"""Several local steps: batches, corrections, padding, other optimizers, reducers.

Numbers in test names are rows of the checklist of arXiv 2601.06903.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toys

import jaxfed
from jaxfed import aggregators
from jaxfed._base import Shard
from jaxfed.algorithms._fedavg import fedavg
from jaxfed.local import LocalSGD, sample

CAPACITY, ETA = 7, 0.1
PROBLEM = toys.Regression(4, m=CAPACITY)
COUNTS = [7, 4, 1, 0]


def shard_of(i, count=CAPACITY, padding=np.nan):
    """Client i's data of which ``count`` rows are real."""
    shard = jax.tree.map(lambda x: x[i], PROBLEM.shards)
    data = {
        k: v if k == "index" else v.at[count:].set(padding)
        for k, v in shard.data.items()
    }
    return Shard(data, jnp.int32(count))


def stacked(padding=np.nan):
    shards = [shard_of(i, count, padding) for i, count in enumerate(COUNTS)]
    return jax.tree.map(lambda *x: jnp.stack(x), *shards)


def message():
    return {"params": PROBLEM.params}


@functools.cache
def compiled(work):
    """One program for one kind of work: all clients, many keys."""

    @toys.quick_jit
    @functools.partial(jax.vmap, in_axes=(0, 0, None, None))
    def call(shard, key, proximal, correction):
        update, metrics = work(
            message(), shard, key, proximal=proximal, correction=correction
        )
        first = work.gradient_at(PROBLEM.params, shard, key)
        assert set(metrics) == {"loss"}
        return toys.ravel(update), metrics["loss"], toys.ravel(first)

    return call


def run(work, shards, key=0, proximal=0.0, correction=None):
    """Updates ``[4, 8]``, losses ``[4]`` and first gradients ``[4, 8]`` of all."""
    keys = jax.random.split(jax.random.key(key), len(COUNTS))
    correction = (
        jax.tree.map(jnp.zeros_like, PROBLEM.params)
        if correction is None
        else correction
    )
    return jax.tree.map(
        np.asarray, compiled(work)(shards, keys, jnp.asarray(proximal), correction)
    )


def go_down(i, batches, eta=ETA, proximal=0.0, correction=0.0, clip_norm=np.inf):
    """The oracle: x_0 - x_U in float64."""
    start = x = PROBLEM.flat
    for batch in batches:
        if len(batch) == 0:
            continue
        rows = [oracles.clip(PROBLEM.example(i, j, x), clip_norm) for j in batch]
        slope = np.mean(rows, axis=0) + correction
        x = x - eta * (slope + proximal * (x - start))
    return start - x


def drawn(work):
    """Batches of each client in each step, lists of indices without padding."""
    return _drawn(work, jax.config.jax_enable_x64)


@functools.cache
def _drawn(work, x64):
    del x64  # random numbers depend on it
    shards, keys = stacked(), jax.random.split(jax.random.key(0), len(COUNTS))
    number = work._batches(shard_of(0), keys[0])[1]

    @toys.quick_jit
    @jax.vmap
    def batches(shard, key):
        batch, weights = jax.vmap(work._batches(shard, key)[0])(jnp.arange(number))
        return batch["index"], weights

    indices, weights = map(np.asarray, batches(shards, keys))
    return [
        [i[w > 0].tolist() for i, w in zip(own, real, strict=True)]
        for own, real in zip(indices, weights, strict=True)
    ]


def work(eta=ETA, **options):
    return jaxfed.local_sgd(PROBLEM.loss, optax.sgd(eta), **options)


KINDS = {
    "steps": work(steps=3, batch_size=2),
    "full_steps": work(steps=3),
    "epochs": work(epochs=2, batch_size=3),
    "full_epochs": work(epochs=2),
    "one_step": work(steps=1, batch_size=4),
    "big_batch": work(epochs=1, batch_size=50),
    "clipped": work(steps=3, batch_size=3, clip_norm=0.7),
    "clipped_epochs": work(epochs=2, batch_size=3, clip_norm=0.7),
}
kinds = pytest.mark.parametrize("kind", KINDS)


# --- Against a loop --------------------------------------------------------------


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@kinds
def test_steps_equal_a_loop(kind, x64):
    """Clients with 7, 4, 1 and no examples; NaN in the padding is never read.

    ``gradient_at`` is the gradient of the first of these steps.
    """
    local_work = KINDS[kind]
    inner = local_work.gradient.clip_norm
    clip_norm = np.inf if inner is None else inner
    with jax.enable_x64(x64):
        updates, losses, gradients = run(local_work, stacked())
        batches = drawn(local_work)
    close = dict(rtol=0, atol=1e-12 if x64 else 1e-6)
    for i in range(3):
        expected = go_down(i, batches[i], clip_norm=clip_norm)
        np.testing.assert_allclose(updates[i], expected, **close)
        assert np.abs(expected).max() > 1e-3
        first = batches[i][:1]
        slope = go_down(i, first, eta=1.0, clip_norm=clip_norm)
        np.testing.assert_allclose(gradients[i], slope, **close)
        residuals = [PROBLEM.example(i, j, PROBLEM.flat)[:2] for j in first[0]]
        loss = 0.5 * np.sum(np.square(residuals)) / len(first[0])
        np.testing.assert_allclose(losses[i], loss, rtol=1e-12 if x64 else 1e-6)
    for nothing in (updates[3], losses[3], gradients[3]):
        assert not np.any(nothing)


@pytest.mark.parametrize("kind", ["steps", "epochs"])
def test_pull_and_correction_enter_every_step(kind):
    local_work, shards = KINDS[kind], stacked()
    batches = drawn(local_work)
    correction = np.random.default_rng(0).normal(size=8)
    tree = {
        "bias": jnp.asarray(correction[:2], float),
        "weight": jnp.asarray(correction[2:].reshape(3, 2), float),
    }
    for proximal in (0.0, 0.5, 3.0):
        updates, *_ = run(local_work, shards, proximal=proximal, correction=tree)
        for i in range(3):
            expected = go_down(i, batches[i], proximal=proximal, correction=correction)
            np.testing.assert_allclose(updates[i], expected, rtol=0, atol=2e-6)
    # A client without examples takes no steps, so that nothing corrects it.
    assert not np.any(updates[3])
    far, *_ = run(local_work, shards, proximal=0.0)
    near, *_ = run(local_work, shards, proximal=3.0)
    assert np.all(np.linalg.norm(near[:2], axis=1) < np.linalg.norm(far[:2], axis=1))


def test_no_pull_is_bit_for_bit_no_term():
    shard = shard_of(0)

    @toys.quick_jit
    def both(key):
        plain, _ = KINDS["steps"](message(), shard, key)
        zero, _ = KINDS["steps"](message(), shard, key, proximal=0)
        return toys.ravel(plain), toys.ravel(zero)

    np.testing.assert_array_equal(*both(jax.random.key(0)))


@pytest.mark.parametrize("steps", [1, 4, 9])
def test_row_1_quadratic_closed_form(steps):
    """g = theta_U - theta = -(I - (I - eta H)^U) (theta - theta*)."""
    rng = np.random.default_rng(steps)
    root = rng.normal(size=(5, 5))
    hessian, best = root @ root.T / 5 + 0.1 * np.eye(5), rng.normal(size=5)
    theta, eta = rng.normal(size=5), 0.2

    def loss(params, batch):
        apart = params - jnp.asarray(best, params.dtype)
        curved = jnp.asarray(hessian, params.dtype) @ apart
        return 0.5 * jnp.dot(apart, curved) * jnp.ones(batch.shape[:1])

    shard = Shard(jnp.zeros((3, 1)), jnp.int32(3))
    local_work = jaxfed.local_sgd(loss, optax.sgd(eta), steps=steps, batch_size=2)
    update, _ = toys.quick_jit(local_work)(
        {"params": jnp.asarray(theta, jnp.float32)}, shard, jax.random.key(0)
    )
    left = np.linalg.matrix_power(np.eye(5) - eta * hessian, steps)
    g = -(np.eye(5) - left) @ (theta - best)
    np.testing.assert_allclose(-update, g, rtol=1e-5, atol=1e-6)
    if steps == 1:
        np.testing.assert_allclose(g, -eta * hessian @ (theta - best))


def test_row_1_one_step_is_the_gradient_times_the_step_size():
    shards, keys = stacked(), jax.random.split(jax.random.key(0), 4)
    full = jaxfed.gradient(PROBLEM.loss)
    one = work(eta=0.25, steps=1)
    gradients, _ = toys.quick_jit(jax.vmap(functools.partial(full, message())))(
        shards, keys
    )
    updates, *_ = run(one, shards)
    np.testing.assert_allclose(
        updates, 0.25 * toys.ravel_rows(gradients), rtol=1e-5, atol=1e-7
    )


# --- Batches ---------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3, 4, 7, 50, None])
def test_epochs_visit_every_example_once(batch_size):
    local_work = work(epochs=3, batch_size=batch_size)
    size = CAPACITY if batch_size is None else min(batch_size, CAPACITY)
    per_epoch = -(-CAPACITY // size)
    orders = set()
    for own, count in zip(drawn(local_work), COUNTS, strict=True):
        assert len(own) == 3 * per_epoch
        for epoch in range(3):
            batches = own[epoch * per_epoch : (epoch + 1) * per_epoch]
            assert sorted(sum(batches, [])) == list(range(count))
            # All full but the last that holds any, then none.
            lengths = [len(b) for b in batches]
            full, rest = divmod(count, size)
            expected = [size] * full + [rest] * (rest > 0)
            assert lengths == expected + [0] * (per_epoch - len(expected))
            if count == CAPACITY:
                orders.add(tuple(sum(batches, [])))
    assert len(orders) == 3  # each pass in an order of its own


def test_every_order_is_equally_likely():
    shard = Shard({"index": jnp.arange(4)}, jnp.int32(3))
    local_work = work(epochs=1, batch_size=1)

    @toys.quick_jit
    @jax.vmap
    def order(key):
        batch_of, number = local_work._batches(shard, key)
        return jax.vmap(lambda u: batch_of(u)[0]["index"][0])(jnp.arange(number))

    seen = np.asarray(order(jax.random.split(jax.random.key(0), 3000)))[:, :3]
    codes, counts = np.unique(seen @ [9, 3, 1], return_counts=True)
    assert len(codes) == 6
    # Chi-square with 5 degrees of freedom: 0.999 quantile 20.5.
    assert np.sum((counts - 500) ** 2 / 500) < 20.5


def test_steps_draw_the_batches_of_sample():
    key = jax.random.key(5)
    shard = shard_of(0, count=5)

    @toys.quick_jit
    @jax.vmap
    def both(u):
        batch_of, number = KINDS["steps"]._batches(shard, key)
        assert number == 3
        expected, _ = sample(jax.random.fold_in(key, u), shard, 2)
        got, weights = batch_of(u)
        return got["index"], expected["index"], weights

    got, expected, weights = map(np.asarray, both(jnp.arange(3)))
    np.testing.assert_array_equal(got, expected)
    assert np.all(weights == 1) and np.all(got < 5)
    assert len(set(map(tuple, got))) > 1


@pytest.mark.parametrize("kind", ["steps", "epochs", "clipped_epochs"])
def test_padding_changes_no_bit(kind):
    results = [run(KINDS[kind], stacked(p)) for p in (np.nan, 0.0, np.inf, 1e30)]
    for result in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, result, results[0])
    assert all(np.all(np.isfinite(x)) for x in results[0])


def test_keys_decide_the_batches():
    first, again, other = (run(KINDS["steps"], stacked(), k)[0] for k in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.all(np.any(first[:2] != other[:2], axis=1))


# --- Optimizers ------------------------------------------------------------------


def test_adam_starts_afresh_each_round():
    """A second call from the same place does the same; by hand for one example."""
    adam = jaxfed.local_sgd(PROBLEM.loss, optax.adam(0.05), steps=3)
    shard = shard_of(0)
    params = PROBLEM.params
    run_twice = toys.quick_jit(
        lambda p: [adam({"params": p}, shard, jax.random.key(k))[0] for k in (0, 1)]
    )
    one, two = map(toys.ravel, run_twice(params))
    np.testing.assert_array_equal(one, two)
    start = x = PROBLEM.flat
    m = v = 0
    for t in range(1, 4):
        slope = PROBLEM.gradient(0, range(CAPACITY), x)
        m, v = 0.9 * m + 0.1 * slope, 0.999 * v + 0.001 * slope**2
        x = x - 0.05 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    np.testing.assert_allclose(one, start - x, rtol=1e-4, atol=1e-6)


def test_schedules_count_the_steps_that_are_taken():
    """Steps of 1, 1/2, 1/4, ... eta: empty batches of an epoch use none up."""
    schedule = optax.exponential_decay(ETA, 1, 0.5)
    local_work = jaxfed.local_sgd(
        PROBLEM.loss, optax.sgd(schedule), epochs=2, batch_size=3
    )
    updates, *_ = run(local_work, stacked())
    for i, batches in enumerate(drawn(local_work)):
        x, eta = PROBLEM.flat, ETA
        for batch in filter(None, batches):
            x, eta = x - eta * PROBLEM.gradient(i, batch, x), eta / 2
        np.testing.assert_allclose(updates[i], PROBLEM.flat - x, rtol=0, atol=1e-6)


def test_traced_numbers_are_taken():
    shard = shard_of(0)

    def go(eta, clip_norm, proximal):
        local_work = work(eta=eta, steps=2, clip_norm=clip_norm)
        update, _ = local_work(message(), shard, jax.random.key(0), proximal=proximal)
        return toys.ravel(update)

    grid = np.array([[0.1, 0.5, 0.0], [0.2, 2.0, 1.0]])
    together = toys.quick_jit(jax.vmap(go))(*grid.T)
    for row, (eta, clip_norm, proximal) in zip(together, grid.tolist(), strict=True):
        expected = go_down(
            0, [range(CAPACITY)] * 2, eta, proximal=proximal, clip_norm=clip_norm
        )
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-6)


# --- In rounds -------------------------------------------------------------------


def test_chunks_of_clients_change_nothing():
    @toys.quick_jit
    def go(shards):
        models = []
        for chunk_size in (None, 3):
            algorithm = fedavg(local_work=KINDS["epochs"])
            sim = jaxfed.simulate(algorithm, 4, chunk_size=chunk_size)
            state, metrics = sim.step(sim.init(PROBLEM.params, 0), shards)
            models.append((toys.ravel(sim.model(state)), metrics["loss"]))
        return models

    (together, loss), (chunked, other) = go(stacked())
    np.testing.assert_allclose(chunked, together, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(other, loss, rtol=1e-5)


def test_facts_are_attributes():
    local_work = work(steps=3, batch_size=2, clip_norm=0.5)
    assert (local_work.steps, local_work.epochs) == (3, None)
    assert (local_work.batch_size, local_work.gradient.clip_norm) == (2, 0.5)
    assert local_work.clip_norm is None  # bounds no example's share of the update
    assert work(epochs=1).batch_size is None and work(epochs=1).clip_norm is None


# --- Reducers --------------------------------------------------------------------


def reduced(rule, shard, batch_size=None):
    reducing = jaxfed.gradient(PROBLEM.loss, batch_size=batch_size, reducer=rule)
    update, metrics = toys.quick_jit(reducing)(message(), shard, jax.random.key(0))
    return np.asarray(toys.ravel(update)), float(metrics["loss"])


def test_reducer_without_trim_is_the_mean():
    for count in (CAPACITY, 4):
        shard = shard_of(0, count)
        mean, loss = reduced(None, shard)
        for rule in (aggregators.trimmed_mean(0), aggregators.mean()):
            update, other = reduced(rule, shard)
            np.testing.assert_allclose(update, mean, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(other, loss, rtol=1e-6)
        exact = PROBLEM.gradient(0, range(count), PROBLEM.flat)
        np.testing.assert_allclose(mean, exact, rtol=1e-5, atol=1e-6)


def test_reducer_is_the_rule_of_the_examples():
    shard = shard_of(0, 5)
    rows = [PROBLEM.example(0, j, PROBLEM.flat) for j in range(5)]
    update, _ = reduced(aggregators.median(2), shard)
    np.testing.assert_allclose(update, np.median(rows, axis=0), rtol=1e-5, atol=1e-6)
    trimmed = np.sort(rows, axis=0)[1:-1].mean(0)
    update, _ = reduced(aggregators.trimmed_mean(1), shard)
    np.testing.assert_allclose(update, trimmed, rtol=1e-5, atol=1e-6)


def test_reducer_takes_no_step_on_too_few_examples():
    rule = aggregators.trimmed_mean(2)
    for count in (0, 1, 4):
        update, _ = reduced(rule, shard_of(0, count))
        assert not np.any(update)
    update, _ = reduced(rule, shard_of(0, 5))
    assert np.all(np.isfinite(update)) and np.any(update)


def test_reducer_leaves_equal_gradients_as_they_are():
    shard = shard_of(0)
    data = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), shard.data)
    expected = PROBLEM.example(0, 0, PROBLEM.flat)
    for rule in (
        aggregators.trimmed_mean(2),
        aggregators.median(),
        aggregators.geometric_median(),
    ):
        update, _ = reduced(rule, shard._replace(data=data))
        np.testing.assert_allclose(update, expected, rtol=1e-5)


def test_reducer_bounds_what_one_example_can_do():
    """Unlike the mean: one target such that the residual grows by 10^6."""
    shard = shard_of(0)
    bad = shard._replace(data=shard.data | {"y": shard.data["y"].at[3].mul(1e6)})
    rows = np.array([PROBLEM.example(0, j, PROBLEM.flat) for j in range(CAPACITY)])
    width = np.ptp(np.delete(rows, 3, axis=0), axis=0).max()
    for rule in (
        aggregators.trimmed_mean(1),
        aggregators.median(),
        aggregators.geometric_median(),
    ):
        moved = reduced(rule, bad)[0] - reduced(rule, shard)[0]
        assert np.abs(moved).max() < 2 * width
    moved = reduced(None, bad)[0] - reduced(None, shard)[0]
    assert np.abs(moved).max() > 1e4


def test_reducer_of_a_client_without_examples_returns_zeros():
    update, loss = reduced(aggregators.median(), shard_of(0, 0))
    assert not np.any(update) and loss == 0


def test_reducer_inside_of_local_steps():
    reducing = jaxfed.gradient(PROBLEM.loss, reducer=aggregators.median())
    local_work = LocalSGD(reducing, optax.sgd(ETA), 2, None)
    update, _ = toys.quick_jit(local_work)(message(), shard_of(0), jax.random.key(0))
    x = PROBLEM.flat
    for _ in range(2):
        rows = [PROBLEM.example(0, j, x) for j in range(CAPACITY)]
        x = x - ETA * np.median(rows, axis=0)
    np.testing.assert_allclose(toys.ravel(update), PROBLEM.flat - x, atol=1e-6)


# --- Errors ----------------------------------------------------------------------


def test_exactly_one_of_steps_and_epochs():
    for options in ({}, {"steps": 2, "epochs": 2}):
        with pytest.raises(ValueError, match="exactly one of steps= and epochs="):
            work(**options)


@pytest.mark.parametrize("name", ["steps", "epochs"])
def test_counts_are_positive_integers(name):
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            work(**{name: value})
    with pytest.raises(TypeError, match=f"{name} must be a Python int"):
        work(**{name: 2.0})


def test_other_errors():
    with pytest.raises(TypeError, match="optimizer must be an optax transformation"):
        jaxfed.local_sgd(PROBLEM.loss, 0.1, steps=1)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        work(steps=1, batch_size=0)
    with pytest.raises(ValueError, match="clip_norm must be > 0"):
        work(steps=1, clip_norm=0.0)
    with pytest.raises(TypeError, match="reducer must be an aggregator"):
        jaxfed.gradient(PROBLEM.loss, reducer=optax.identity())
    key = jax.random.key(0)
    for value in (-0.1, np.nan):
        with pytest.raises(ValueError, match="proximal must be a finite number >= 0"):
            work(steps=1)(message(), shard_of(0), key, proximal=value)
    summed = jaxfed.local_sgd(
        lambda p, b: jnp.sum(PROBLEM.loss(p, b)), optax.sgd(0.1), steps=1
    )
    with pytest.raises(ValueError, match="must return one loss per example"):
        summed(message(), shard_of(0), key)
