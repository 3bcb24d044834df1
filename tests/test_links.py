# SPDX-License-Identifier: Apache-2.0
"""Links with per-client state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxfed import links


class SeenState(NamedTuple):
    rounds: jax.Array
    last: jax.Array


def recorder():
    """A link that adds what it is told, and remembers the last update."""

    def init(params):
        return SeenState(jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None, *, client_id, round, bonus=0.0):
        out = jax.tree.map(lambda u: u + 100 * client_id + 10 * round + bonus, updates)
        return out, SeenState(state.rounds + 1, updates)

    return optax.GradientTransformationExtraArgs(init, update)


PARAMS = jnp.zeros(2)


def rows(n):
    return jnp.arange(2.0 * n).reshape(n, 2)


def test_everybody_takes_part():
    link = links.per_client(recorder(), 3)
    state = link.init(PARAMS)
    assert state.inner.last.shape == (3, 2) and state.round == 0
    out, state = jax.jit(link.update)(rows(3), state, PARAMS)
    np.testing.assert_array_equal(out, rows(3) + 100 * np.arange(3)[:, None])
    out, state = jax.jit(link.update)(rows(3), state, PARAMS, bonus=1.0)
    expected = rows(3) + 100 * np.arange(3)[:, None] + 11
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(state.inner.rounds, [2, 2, 2])
    assert state.round == 2


def test_a_cohort_is_gathered_and_scattered():
    link = links.per_client(recorder(), 5)
    state = link.init(PARAMS)
    out, state = jax.jit(link.update)(rows(2), state, PARAMS, cohort=jnp.array([4, 1]))
    np.testing.assert_array_equal(out, rows(2) + np.array([[400], [100]]))
    np.testing.assert_array_equal(state.inner.rounds, [0, 1, 0, 0, 1])
    last = np.asarray(state.inner.last)
    np.testing.assert_array_equal(last[[4, 1]], rows(2))
    assert not np.any(last[[0, 2, 3]])


def test_absent_clients_keep_their_state():
    link = links.per_client(recorder(), 4)
    mask, cohort = jnp.array([True, False]), jnp.array([3, 0])
    _, state = link.update(rows(4), link.init(PARAMS), PARAMS)
    updates = rows(2).at[1].set(jnp.nan)
    _, state = link.update(updates, state, PARAMS, cohort=cohort, mask=mask)
    np.testing.assert_array_equal(state.inner.rounds, [1, 1, 1, 2])
    np.testing.assert_array_equal(state.inner.last[0], rows(4)[0])
    _, state = link.update(rows(4) + 1, state, PARAMS, mask=jnp.arange(4) == 2)
    np.testing.assert_array_equal(state.inner.rounds, [1, 1, 2, 2])


def test_plain_optax_links_work_and_ride_in_scan():
    link = links.per_client(optax.trace(0.5), 3)
    abstract = jax.ShapeDtypeStruct((2,), jnp.float32)
    state = link.init(abstract)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b), state, link.init(PARAMS)
    )

    def step(state, updates):
        out, state = link.update(updates, state, PARAMS)
        return state, out

    state, outs = jax.lax.scan(step, state, jnp.stack([rows(3)] * 3))
    np.testing.assert_allclose(outs[2], 1.75 * rows(3))
    assert state.round == 3


def test_errors_of_per_client():
    link = links.per_client(recorder(), 3)
    with pytest.raises(ValueError, match="2 rows but num_clients=3: pass cohort="):
        link.update(rows(2), link.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="shaped like params"):
        link.update(jnp.zeros((3, 4)), link.init(PARAMS), PARAMS)
    with pytest.raises(TypeError, match="mask must be bool"):
        link.update(rows(3), link.init(PARAMS), PARAMS, mask=jnp.ones(3))
    with pytest.raises(ValueError, match="num_clients must be at least 1"):
        links.per_client(recorder(), 0)
    with pytest.raises(TypeError, match="num_clients must be a Python int"):
        links.per_client(recorder(), 3.0)


def test_accumulate_sums():
    link = links.accumulate(0.5)
    state = link.init({"a": jnp.zeros(2), "b": None})
    for k in range(1, 4):
        out, state = link.update({"a": jnp.array([1.0, k]), "b": None}, state)
    np.testing.assert_allclose(out["a"], [1.5, 3.0])
    np.testing.assert_allclose(state.total["a"], [1.5, 3.0])
    steps = jnp.array([0.0, 1.0])
    traced = jax.vmap(lambda s: links.accumulate(s).update(PARAMS + 1, state_like())[0])
    np.testing.assert_allclose(traced(steps), [[0, 0], [1, 1]])


def state_like():
    return links.AccumulateState(PARAMS)


def test_accumulate_from_a_start():
    link = links.accumulate(1.0, initial={"a": np.array([3.0, 4.0])})
    state = link.init({"a": jnp.zeros(2)})
    out, _ = link.update({"a": jnp.ones(2)}, state)
    np.testing.assert_allclose(out["a"], [4, 5])
    with pytest.raises(ValueError, match="initial must be shaped like params"):
        link.init({"a": jnp.zeros(3)})
    with pytest.raises(ValueError, match="initial must have the structure of params"):
        link.init({"b": jnp.zeros(2)})
    with pytest.raises(ValueError, match="step must be a finite number >= 0"):
        links.accumulate(-0.1)


def test_accumulate_keeps_the_type_of_its_state():
    link = links.accumulate(0.1)
    state = link.init(jnp.zeros(2, jnp.bfloat16))
    for updates in (jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float32)):
        out, new = link.update(updates, state)
        assert out.dtype == new.total.dtype == jnp.bfloat16


def test_ema_averages():
    link = links.ema(0.9)
    state = link.init(PARAMS)
    for t in range(1, 4):
        out, state = link.update(jnp.ones(2), state)
        np.testing.assert_allclose(out, 1 - 0.9**t, rtol=1e-6)
    half = link.init(jnp.zeros(2, jnp.float16))
    out, half = link.update(jnp.ones(2, jnp.float16), half)
    assert out.dtype == half.average.dtype == jnp.float16
    for kept in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="kept must satisfy 0 <= kept < 1"):
            links.ema(kept)
    swept = jax.vmap(lambda k: links.ema(k).update(jnp.ones(2), state)[0])
    assert swept(jnp.array([0.1, 0.5])).shape == (2, 2)
