# SPDX-License-Identifier: Apache-2.0
"""Local work: batches, padding, per-example clipping."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest

import jaxfed
from jaxfed._base import Shard
from jaxfed.local import sample

CAPACITY = 8


def shard_of(count, padding=0.0, capacity=CAPACITY, seed=0):
    """A linear regression with ``count`` examples; the rest holds ``padding``."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(capacity, 3)).astype(np.float32)
    y = rng.normal(size=capacity).astype(np.float32)
    x[count:], y[count:] = padding, padding
    data = {"x": x, "y": y, "id": np.arange(capacity, dtype=np.int32)}
    return Shard(jax.tree.map(jnp.asarray, data), jnp.int32(count))


PARAMS = {"w": jnp.array([0.5, -1.0, 2.0]), "b": jnp.array(0.25)}


def loss_fn(params, batch):
    return 0.5 * (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2


def fragile_loss(params, batch):
    """Its derivative is NaN at an all-zero example."""
    x = batch["x"] / jnp.linalg.norm(batch["x"], axis=-1, keepdims=True)
    return 0.5 * (x @ params["w"] + params["b"] - batch["y"]) ** 2


def example_gradients(shard):
    """float64 gradients ``[capacity, 4]`` (w, then b), and losses."""
    x = np.asarray(shard.data["x"], np.float64)
    residual = x @ [0.5, -1.0, 2.0] + 0.25 - np.asarray(shard.data["y"], np.float64)
    rows = np.concatenate([x, np.ones((len(x), 1))], axis=1) * residual[:, None]
    return rows, 0.5 * residual**2


@functools.cache
def compiled(work):
    return jax.jit(work)


def run(work, shard, seed=0):
    update, metrics = compiled(work)({"params": PARAMS}, shard, jax.random.key(seed))
    assert set(metrics) == {"loss"}
    return np.append(update["w"], update["b"]), float(metrics["loss"])


# --- batches ---------------------------------------------------------------------


@pytest.mark.parametrize("count", [8, 5])
@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_sampling_is_uniform_without_replacement(count, batch_size):
    shard, trials = shard_of(count, np.nan), 4000
    keys = jax.random.split(jax.random.key(1), trials)
    batch, weights = jax.jit(jax.vmap(lambda k: sample(k, shard, batch_size)))(keys)
    ids = np.asarray(batch["id"])
    assert ids.shape == (trials, batch_size) and np.all(weights == 1)
    assert np.all(ids < count)
    assert all(len(set(row)) == batch_size for row in ids.tolist())
    # Chi-square of how often each example is drawn; 0.999 quantile at most 24.3.
    seen = np.bincount(ids.reshape(-1), minlength=count)[:count]
    expected = trials * batch_size / count
    inflation = 1 - batch_size / count if batch_size < count else 1
    assert ((seen - expected) ** 2 / expected).sum() <= 24.3 * inflation
    # And of which example comes first.
    first = np.bincount(ids[:, 0], minlength=count)[:count]
    assert ((first - trials / count) ** 2 / (trials / count)).sum() <= 24.3


@pytest.mark.parametrize("batch_size", [6, 8, 100, None])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_short_shards_use_every_example_once(count, batch_size):
    shard = shard_of(count, np.nan)
    batch, weights = jax.jit(lambda k: sample(k, shard, batch_size))(jax.random.key(0))
    rows = CAPACITY if batch_size is None else min(batch_size, CAPACITY)
    assert weights.shape == (rows,) and weights.dtype == jnp.float32
    used = np.asarray(batch["id"])[np.asarray(weights) > 0]
    assert sorted(used) == list(range(count))
    if batch_size is None:
        np.testing.assert_array_equal(used, np.arange(count))
    assert np.all(np.isfinite(batch["x"]))


def test_batches_depend_on_the_key_only():
    shard = shard_of(8)
    a, b, c = (sample(jax.random.key(k), shard, 4)[0]["id"].tolist() for k in (0, 0, 1))
    assert a == b != c


# --- what is computed ------------------------------------------------------------


@pytest.mark.parametrize("microbatch", [None, 1, 3, 8, 50])
@pytest.mark.parametrize("clip_norm", [None, 0.1, 1.5, np.inf])
@pytest.mark.parametrize("count", [8, 5])
def test_gradient_of_the_whole_shard(count, clip_norm, microbatch):
    shard = shard_of(count, np.nan)
    work = jaxfed.gradient(loss_fn, clip_norm=clip_norm, microbatch=microbatch)
    update, loss = run(work, shard)
    rows, losses = example_gradients(shard)
    radius = np.inf if clip_norm is None else clip_norm
    expected = np.mean([oracles.clip(r, radius) for r in rows[:count]], axis=0)
    np.testing.assert_allclose(update, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss, losses[:count].mean(), rtol=1e-5)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_gradient_of_a_batch(clip_norm):
    shard = shard_of(7, np.nan)
    work = jaxfed.gradient(loss_fn, batch_size=4, clip_norm=clip_norm)
    rows, losses = example_gradients(shard)
    for seed in range(4):
        chosen = np.asarray(sample(jax.random.key(seed), shard, 4)[0]["id"])
        update, loss = run(work, shard, seed)
        radius = np.inf if clip_norm is None else clip_norm
        expected = np.mean([oracles.clip(r, radius) for r in rows[chosen]], axis=0)
        np.testing.assert_allclose(update, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(loss, losses[chosen].mean(), rtol=1e-5)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("padding", [0.0, np.nan, np.inf, 1e30])
@pytest.mark.parametrize("loss", [loss_fn, fragile_loss])
@pytest.mark.parametrize("batch_size", [None, 6])
def test_padding_is_never_used(clip_norm, padding, loss, batch_size):
    """Not even as 0 * nan in the backward pass."""
    work = jaxfed.gradient(loss, batch_size=batch_size, clip_norm=clip_norm)
    padded, loss_padded = run(work, shard_of(4, padding))
    short = jax.tree.map(lambda x: x[:4], shard_of(4).data)
    exact, loss_exact = run(work, Shard(short, jnp.int32(4)))
    assert np.all(np.isfinite(exact))
    np.testing.assert_allclose(padded, exact, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(loss_padded, loss_exact, rtol=1e-6)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("padding", [0.0, np.nan])
@pytest.mark.parametrize("loss", [loss_fn, fragile_loss])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_client_without_examples_sends_zeros(clip_norm, padding, loss, batch_size):
    work = jaxfed.gradient(loss, batch_size=batch_size, clip_norm=clip_norm)
    update, value = run(work, shard_of(0, padding))
    assert not np.any(update) and value == 0


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_ragged_shards_under_vmap(clip_norm):
    counts = [8, 0, 3, 5]
    shards = [shard_of(c, np.nan, seed=i) for i, c in enumerate(counts)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *shards)
    work = jaxfed.gradient(loss_fn, clip_norm=clip_norm, microbatch=clip_norm and 4)
    keys = jax.random.split(jax.random.key(0), 4)
    batched = jax.vmap(functools.partial(work, {"params": PARAMS}))
    update, metrics = jax.jit(batched)(stacked, keys)
    for i, shard in enumerate(shards):
        alone, loss = run(work, shard)
        together = np.append(update["w"][i], update["b"][i])
        np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(metrics["loss"][i], loss, rtol=1e-5)


def test_a_bad_example_cannot_break_the_bound():
    """One replaced example, of any content, moves the mean by at most 2 C / m."""
    work = jaxfed.gradient(loss_fn, clip_norm=0.5)
    base, _ = run(work, shard_of(8))
    for content in (np.nan, np.inf, 1e30, -1e15, 0.0, 7.0):
        shard = shard_of(8)
        x = shard.data["x"].at[3].set(content)
        moved, _ = run(work, shard._replace(data=shard.data | {"x": x}))
        assert np.linalg.norm(moved - base) <= 2 * 0.5 / 8 * (1 + 1e-5)


def test_sums_over_examples_are_taken_in_float32():
    """256 + 1 is 256 in bfloat16, so a sum in bfloat16 would stop growing."""
    capacity = 2048
    data = {"x": jnp.ones((capacity, 1), jnp.bfloat16)}
    shard = Shard(data, jnp.int32(capacity))
    params = {"w": jnp.zeros(1, jnp.bfloat16)}

    def linear(params, batch):
        return (batch["x"] @ params["w"]).astype(jnp.float32)

    for microbatch in (None, 1, 64):
        work = jaxfed.gradient(linear, clip_norm=10.0, microbatch=microbatch)
        update, _ = jax.jit(work)({"params": params}, shard, jax.random.key(0))
        assert update["w"].dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(update["w"], np.float32), 1.0)


def test_clip_norm_may_be_traced():
    def of(radius):
        work = jaxfed.gradient(loss_fn, clip_norm=radius)
        return work({"params": PARAMS}, shard_of(8), jax.random.key(0))[0]["w"]

    radii = jnp.array([0.1, 1.0, jnp.inf])
    swept = jax.jit(jax.vmap(of))(radii)
    for radius, out in zip([0.1, 1.0, np.inf], swept, strict=True):
        expected = run(jaxfed.gradient(loss_fn, clip_norm=radius), shard_of(8))[0]
        np.testing.assert_allclose(out, expected[:3], rtol=1e-5)


def test_the_update_is_a_descent_direction_for_optax():
    work, shard = jaxfed.gradient(loss_fn), shard_of(8)
    tx, params = optax.sgd(0.1), PARAMS
    state, losses = tx.init(params), []
    for _ in range(20):
        update, metrics = work({"params": params}, shard, jax.random.key(0))
        step, state = tx.update(update, state)
        params = optax.apply_updates(params, step)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.6 * losses[0]


# --- errors ----------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda params, batch: jnp.mean(loss_fn(params, batch)),
        lambda params, batch: loss_fn(params, batch)[:, None],
    ],
)
def test_the_loss_must_be_one_number_an_example(clip_norm, wrong):
    work = jaxfed.gradient(wrong, clip_norm=clip_norm)
    with pytest.raises(ValueError, match="one loss per example, shape .* got"):
        work({"params": PARAMS}, shard_of(8), jax.random.key(0))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be a Python int"),
        ({"microbatch": 0}, ValueError, "microbatch must be at least 1"),
        ({"clip_norm": 0.0}, ValueError, "clip_norm must be > 0"),
        ({"clip_norm": -1.0}, ValueError, "clip_norm must be > 0"),
        ({"clip_norm": float("nan")}, ValueError, "clip_norm must be > 0"),
        ({"clip_norm": "1"}, TypeError, "clip_norm must be a number"),
    ],
)
def test_bad_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        jaxfed.gradient(loss_fn, **arguments)


def test_the_facts_accounting_needs_are_attributes():
    work = jaxfed.gradient(loss_fn, batch_size=4, clip_norm=0.5, microbatch=2)
    assert (work.batch_size, work.clip_norm, work.microbatch) == (4, 0.5, 2)
