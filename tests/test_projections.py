# SPDX-License-Identifier: Apache-2.0
"""Steps that end in a ball."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from jaxfed.projections import project

PARAMS = {"a": jnp.array([0.6, 0.0]), "b": jnp.array([[0.8]])}
STEP = {"a": jnp.array([2.4, 0.0]), "b": jnp.array([[3.2]])}


def moved(link, step=STEP, params=PARAMS):
    out, _ = link.update(step, link.init(params), params)
    return optax.apply_updates(params, out)


def assert_close(got, want, **tolerance):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, **tolerance), got, want)


def test_one_ball_and_a_ball_for_each_leaf():
    # The step ends at (3, 0), (4): norm 5.
    assert_close(moved(project(2.5)), {"a": [1.5, 0], "b": [[2]]}, rtol=1e-6)
    each = moved(project(2.5, per_leaf=True))
    assert_close(each, {"a": [2.5, 0], "b": [[2.5]]}, rtol=1e-6)
    each = moved(project(3.5, per_leaf=True))
    assert_close(each, {"a": [3, 0], "b": [[3.5]]}, rtol=1e-6)


@pytest.mark.parametrize("radius", [6.0, np.inf])
def test_steps_that_end_inside_stay_bit_for_bit(radius):
    traced = jax.jit(lambda r: project(r).update(STEP, optax.EmptyState(), PARAMS)[0])
    for out in (
        project(radius).update(STEP, optax.EmptyState(), PARAMS)[0],
        project(radius, per_leaf=True).update(STEP, optax.EmptyState(), PARAMS)[0],
        traced(radius),
    ):
        jax.tree.map(np.testing.assert_array_equal, out, STEP)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_norms_are_at_most_the_radius(scale):
    rng = np.random.default_rng(0)
    params = rng.normal(size=(300, 7)).astype(np.float32)
    step = (scale * rng.normal(size=(300, 7))).astype(np.float32)
    radii = rng.uniform(0.01, 20, 300).astype(np.float32)
    params *= np.minimum(1, radii / np.linalg.norm(params, axis=1))[:, None]
    run = toys.quick_jit(jax.vmap(lambda r, s, p: moved(project(r), s, p)))
    out = np.asarray(run(radii, step, params), np.float64)
    assert np.all(np.linalg.norm(out, axis=1) <= radii * (1 + 1e-6))
    # It is the nearest point of the ball to where the step went.
    ended = params.astype(np.float64) + step
    norms = np.linalg.norm(ended, axis=1)
    want = ended * np.minimum(1, radii / norms)[:, None]
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=2e-6)


def test_half_precision_float64_and_a_step_that_is_not_finite():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (STEP, PARAMS))
    out = moved(project(2.5), *half)
    assert {x.dtype for x in jax.tree.leaves(out)} == {jnp.dtype(jnp.bfloat16)}
    assert_close(
        jax.tree.map(lambda x: x.astype(jnp.float32), out),
        {"a": [1.5, 0], "b": [[2]]},
        rtol=0.01,
    )
    with jax.enable_x64(True):
        out = moved(project(2.5), jnp.array([2.0, 2]), jnp.array([1.0, 2]))
    np.testing.assert_allclose(out, [1.5, 2], rtol=1e-15)
    # What is lost is not hidden.
    assert np.all(np.isnan(moved(project(1.0), jnp.full(2, jnp.nan), jnp.zeros(2))))


def test_errors():
    for radius in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="radius must be > 0"):
            project(radius)
    with pytest.raises(ValueError, match="project needs params"):
        project(1.0).update(STEP, optax.EmptyState())
