# SPDX-License-Identifier: Apache-2.0
"""Clipping and noise.

Rows refer to the checklist of the Byz-Clip21-SGD2M sheet, section 7.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxfed.links import per_client
from jaxfed.privacy import clip, clip_tree, gaussian_noise, normalize

# --- row 4: the clip -------------------------------------------------------------


def tree_of(v):
    return {"a": v[:1].reshape(()), "b": (v[1:4].reshape(3, 1), None), "c": v[4:]}


def flat(tree):
    leaves = [tree["a"], tree["b"][0], tree["c"]]
    return np.concatenate([np.asarray(x, np.float64).reshape(-1) for x in leaves])


CLIP = jax.jit(clip_tree)


def test_row_4_one_norm_over_the_whole_tree():
    v = np.random.default_rng(0).normal(size=12).astype(np.float32)
    norm = np.linalg.norm(v.astype(np.float64))
    for radius in (1e-6, 0.5, norm * (1 - 1e-6), norm * (1 + 1e-6), 100.0):
        out = flat(CLIP(tree_of(v), radius))
        np.testing.assert_allclose(out, oracles.clip(v, radius), rtol=2e-6)
        assert np.linalg.norm(out) <= radius * (1 + 1e-6)


def test_row_4_inside_the_ball_nothing_changes():
    v = np.random.default_rng(1).normal(size=12).astype(np.float32)
    for radius in (float(np.linalg.norm(v)) * 1.001, 1e30, np.inf):
        np.testing.assert_array_equal(flat(CLIP(tree_of(v), radius)), v)
    link = clip(math.inf)
    out, _ = link.update(tree_of(v), link.init(None))
    np.testing.assert_array_equal(flat(out), v)


@pytest.mark.parametrize("radius", [1e-6, 1.0, 10.0, np.inf])
def test_row_4_zero_stays_zero_and_has_gradients(radius):
    zero = np.zeros(12, np.float32)
    assert not np.any(flat(CLIP(tree_of(zero), radius)))
    slope = jax.grad(lambda v: jnp.sum(clip_tree(v, radius)))(zero)
    np.testing.assert_array_equal(slope, np.ones(12))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e20, -3e38])
def test_what_has_no_norm_becomes_zero(bad):
    v = np.ones(12, np.float32)
    v[5] = bad
    for radius in (1.0, np.inf):
        assert not np.any(flat(CLIP(tree_of(v), radius)))


def test_a_radius_that_is_not_a_number_is_loud():
    assert np.all(np.isnan(CLIP(np.ones(3, np.float32), np.nan)))
    assert not np.any(CLIP(np.ones(3, np.float32), 0.0))


@given(
    v=arrays(np.float32, 12, elements=st.floats(-(2.0**40), 2.0**40, width=32)),
    radius=st.floats(1e-6, 1e6),
)
def test_row_4_never_longer_than_the_radius(v, radius):
    out = flat(CLIP(tree_of(v), np.float32(radius)))
    norm = np.linalg.norm(v.astype(np.float64))
    assert np.linalg.norm(out) <= float(np.float32(radius)) * (1 + 1e-6)
    # The sheet's (14): the error is what sticks out of the ball.
    stuck_out = max(norm - radius, 0)
    assert np.linalg.norm(out - v) <= stuck_out + 1e-5 * norm + 1e-6 * radius


def test_row_4_a_million_coordinates():
    for v in (
        np.full(1_000_000, 1e-3, np.float32),
        np.random.default_rng(2).normal(size=1_000_000).astype(np.float32),
    ):
        out = np.asarray(CLIP(v, np.float32(0.01)), np.float64)
        assert np.linalg.norm(out) <= float(np.float32(0.01)) * (1 + 1e-6)


def test_half_precision_neither_overflows_nor_changes_type():
    v = jnp.full(4096, 100, jnp.float16)  # its squares overflow float16
    out = CLIP(v, 64.0)
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(out, 1.0, rtol=1e-3)
    for dtype, slack in ((jnp.bfloat16, 1 / 256), (jnp.float16, 1 / 2048)):
        v = jnp.asarray(np.random.default_rng(3).normal(size=500) * 9, dtype)
        out = CLIP(v, 0.7)
        assert out.dtype == dtype
        assert np.linalg.norm(np.asarray(out, np.float64)) <= 0.7 * (1 + slack)


def test_float64_and_numpy():
    v = np.random.default_rng(4).normal(size=12)
    np.testing.assert_allclose(clip_tree(v, 0.5), oracles.clip(v, 0.5), rtol=1e-6)
    with jax.enable_x64(True):
        out = clip_tree(jnp.asarray(v), 0.5)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, oracles.clip(v, 0.5), rtol=1e-15)


def test_the_radius_may_be_traced_and_swept():
    v = np.random.default_rng(5).normal(size=12).astype(np.float32)
    radii = jnp.array([0.1, 1.0, 100.0, jnp.inf])
    link = jax.jit(jax.vmap(lambda r: clip(r).update(v, optax.EmptyState())[0]))
    for radius, out in zip(radii, link(radii), strict=True):
        np.testing.assert_allclose(out, oracles.clip(v, float(radius)), rtol=2e-6)


@pytest.mark.parametrize("radius", [0.0, -1.0, float("nan")])
def test_bad_radii(radius):
    with pytest.raises(ValueError, match="clip_norm must be > 0"):
        clip(radius)


LAYERS = {
    "Dense_0": {"kernel": np.full((2, 2), 3.0, np.float32), "bias": np.zeros(2)},
    "Dense_1": {"kernel": np.full(2, 0.01, np.float32), "bias": np.full(1, 1e10)},
    "head": np.full(3, 0.1, np.float32),
}


def test_a_clip_of_layers_bounds_each_and_the_whole():
    out = clip(3.0, per="layer").update(LAYERS, optax.EmptyState())[0]
    each = 3.0 / math.sqrt(3)  # kernel and bias of a module, twice, and the rest
    np.testing.assert_allclose(out["Dense_0"]["kernel"], each / 2, rtol=1e-6)
    np.testing.assert_allclose(out["Dense_1"]["bias"], each, rtol=1e-6)
    np.testing.assert_array_equal(out["head"], LAYERS["head"])
    assert optax.tree.norm(out) <= 3.0
    assert optax.tree.norm(clip_tree(LAYERS, 3.0)) == pytest.approx(3.0)
    bad = LAYERS | {"head": np.full(3, np.nan)}
    out = clip_tree(bad, 3.0, per="layer")  # spoils its own layer only
    np.testing.assert_allclose(out["Dense_0"]["kernel"], each / 2, rtol=1e-6)
    assert not np.any(out["head"])
    # One array is one layer.
    v = np.arange(3.0, dtype=np.float32)
    np.testing.assert_array_equal(clip_tree(v, 1.0, "layer"), clip_tree(v, 1.0))
    with pytest.raises(ValueError, match="per must be one of 'tree', 'layer'"):
        clip(1.0, per="leaf")


def test_normalised_updates_are_shorter_than_one():
    link = normalize(0.5)
    for v in ([3.0, 4.0], [1e-3, 0.0], [1e10, 0.0], [0.0, 0.0]):
        out, _ = link.update(np.float32(v), link.init(None))
        norm = np.linalg.norm(v)
        np.testing.assert_allclose(out, np.array(v) / (0.5 + norm), rtol=1e-6)
        assert np.linalg.norm(out) <= 1
    for alpha in (0.0, 1e-16, 1e-50):
        with pytest.raises(ValueError, match="alpha must be"):
            normalize(alpha)
    for bad in (np.nan, np.inf):
        assert not np.any(link.update(np.float32([bad, 1.0]), link.init(None))[0])


# --- the noise -------------------------------------------------------------------

SHAPES = {"a": (64, 32), "b": (2048,)}
ZERO = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
CLIENTS, ROUNDS = 4, 3


def draw(link, clients=CLIENTS, cohort=None, seeds=()):
    """Return the noise of some rounds, ``{name: [rounds, clients, ...]}``.

    With ``seeds``, links like this one, whose states alone are used: the run of each.
    """
    first, link = link, per_client(link, clients)
    size = clients if cohort is None else len(cohort)
    updates = jax.tree.map(lambda x: jnp.zeros((size, *x.shape)), ZERO)

    @jax.jit
    def run(state):
        def step(state, _):
            out, state = link.update(updates, state, ZERO, cohort=cohort)
            return state, out

        return jax.lax.scan(step, state, None, length=ROUNDS)[1]

    runs = [run(per_client(one, clients).init(ZERO)) for one in (first, *seeds)]
    return runs if seeds else runs[0]


def blocks(runs):
    """Return all (run, round, client, leaf) blocks as rows ``[blocks, 2048]``."""
    return np.concatenate(
        [np.asarray(leaf).reshape(-1, 2048) for run in runs for leaf in run.values()]
    )


def check_independent(make):
    """Fail if any two blocks of noise, of any run, are equal or correlated."""
    noise = blocks(draw(make(0), seeds=[make(1)]))
    assert len(noise) == 2 * 2 * ROUNDS * CLIENTS
    for first, second in itertools.combinations(noise, 2):
        assert not np.array_equal(first, second), "the same noise twice"
    correlation = np.corrcoef(noise) - np.eye(len(noise))
    assert np.abs(correlation).max() < 6 / math.sqrt(2048), "correlated noise"
    values = np.unique(noise)
    assert len(values) > 0.99 * noise.size, "repeated values"


def test_row_17_independent_over_clients_rounds_leaves_and_runs():
    check_independent(lambda seed: gaussian_noise(1.0, jax.random.key(seed)))
    check_independent(lambda seed: gaussian_noise(1.0, seed))


def without(*forgotten):
    """A fault: the link is not told who, or when."""

    def make(seed):
        link = gaussian_noise(1.0, seed)

        def update(updates, state, params=None, *, round, client_id):
            told = {"round": round, "client_id": client_id}
            told |= {"round": 0} if "round" in forgotten else {}
            told |= {"client_id": None} if "client_id" in forgotten else {}
            return link.update(updates, state, params, **told)

        return optax.GradientTransformationExtraArgs(link.init, update)

    return make


def same_key_for_all_leaves(seed):
    link = gaussian_noise(1.0, seed)

    def update(updates, state, params=None, **told):
        out = {
            n: link.update(u, state, **told)[0].reshape(u.shape)
            for n, u in updates.items()
        }
        return out, state

    return optax.GradientTransformationExtraArgs(link.init, update)


def the_classic_fault(seed):
    """One key under vmap: every client of a round draws the same numbers."""
    return optax.add_noise(eta=1.0, gamma=0.0, key=jax.random.key(seed))


@pytest.mark.parametrize(
    "fault",
    [
        the_classic_fault,
        without("client_id"),
        without("round"),
        same_key_for_all_leaves,
        lambda seed: gaussian_noise(1.0, 0),
    ],
)
def test_row_17_the_check_catches_planted_faults(fault):
    with pytest.raises(AssertionError, match="the same noise twice"):
        check_independent(fault)


def kolmogorov(sample, scale):
    """Largest distance of the empirical from the normal distribution function."""
    x = np.sort(np.asarray(sample, np.float64).reshape(-1)) / scale
    cdf = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x])
    steps = np.arange(len(x) + 1) / len(x)
    return max(np.abs(cdf - steps[1:]).max(), np.abs(cdf - steps[:-1]).max())


@pytest.mark.parametrize("std", [0.01, 1.0, 30.0])
def test_row_17_scale_and_shape_of_the_distribution(std):
    noise = blocks([draw(gaussian_noise(std, 7))])
    sample = noise.reshape(-1)[:40_000]
    critical = 1.95 / math.sqrt(len(sample))  # one in a thousand
    assert kolmogorov(sample, std) < critical
    for wrong in (2 / 3, 3 / 2):
        assert kolmogorov(sample, std * wrong) > 4 * critical
    assert abs(noise.std() / std - 1) < 0.01
    assert abs(noise.mean() / std) < 0.02


def test_a_client_draws_the_same_whatever_the_cohort():
    link = gaussian_noise(1.0, 3)
    full = draw(link)["b"]
    part = draw(link, cohort=jnp.array([3, 1]))["b"]
    np.testing.assert_array_equal(part[:, 0], full[:, 3])
    np.testing.assert_array_equal(part[:, 1], full[:, 1])
    more = draw(link, clients=9)["b"]
    np.testing.assert_array_equal(more[:, :CLIENTS], full)


def test_one_client_alone_draws_what_it_draws_in_the_stack():
    """The same code runs in a client's own process: identity decides, not place."""
    link = gaussian_noise(1.0, 3)
    alone, _ = link.update(ZERO, link.init(ZERO), round=2, client_id=3)
    together = draw(link)
    for name, leaf in alone.items():
        np.testing.assert_array_equal(leaf, together[name][2, 3])


def test_without_a_round_the_link_counts_for_itself():
    link = gaussian_noise(1.0, 0)
    first, state = link.update(ZERO, link.init(ZERO))
    second, state = link.update(ZERO, state)
    assert state.count == 2
    assert not np.array_equal(first["b"], second["b"])
    again, _ = link.update(ZERO, link.init(ZERO))
    np.testing.assert_array_equal(first["b"], again["b"])


def test_keys_are_used_once():
    with jax.debug_key_reuse(True):
        draw(gaussian_noise(1.0, 0))


def test_state_survives_donation():
    link = per_client(gaussian_noise(1.0, jax.random.key(0)), CLIENTS)
    updates = jax.tree.map(lambda x: jnp.zeros((CLIENTS, *x.shape)), ZERO)
    step = jax.jit(lambda s: link.update(updates, s, ZERO), donate_argnums=0)
    first, _ = step(link.init(ZERO))
    second, _ = step(link.init(ZERO))
    np.testing.assert_array_equal(first["a"], second["a"])


def test_no_noise_is_the_identity():
    v = {"a": np.random.default_rng(0).normal(size=5).astype(np.float32)}
    link = gaussian_noise(0.0, 0)
    out, state = link.update(v, link.init(v))
    assert out is v and state.count == 1
    swept = jax.vmap(lambda s: gaussian_noise(s, 0).update(v, link.init(v))[0]["a"])
    quiet, loud = swept(jnp.array([0.0, 1.0]))
    np.testing.assert_array_equal(quiet, v["a"])
    assert np.abs(loud - v["a"]).max() > 0.1


def test_noise_is_added_and_dtypes_are_kept():
    link, big = gaussian_noise(1.0, 5), 1000.0
    plain, _ = link.update(jnp.zeros(100), link.init(None))
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        v = jnp.full(100, big, dtype)
        out, _ = link.update(v, link.init(v))
        assert out.dtype == dtype
        expected = (plain + big).astype(dtype)
        np.testing.assert_array_equal(out, expected)
    with jax.enable_x64(True):
        out, _ = link.update(jnp.zeros(100, jnp.float64), link.init(None))
        assert out.dtype == jnp.float64
        # Drawn in float64, not rounded to float32 on the way.
        assert np.any(np.asarray(out, np.float32).astype(np.float64) != out)


def test_init_takes_abstract_params():
    link = gaussian_noise(1.0, 0)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), ZERO)
    out, _ = link.update(ZERO, link.init(abstract), round=0, client_id=0)
    expected, _ = link.update(ZERO, link.init(ZERO), round=0, client_id=0)
    np.testing.assert_array_equal(out["b"], expected["b"])


@pytest.mark.parametrize("std", [-1.0, float("nan"), float("inf")])
def test_bad_noise(std):
    with pytest.raises(ValueError, match="noise_std must be a finite number >= 0"):
        gaussian_noise(std, 0)


@pytest.mark.parametrize(
    ("key", "error", "match"),
    [
        (np.zeros(2, np.uint32), ValueError, "wrap_key_data"),
        (jnp.zeros(2, jnp.uint32), ValueError, "legacy uint32 key"),
        (jax.random.split(jax.random.key(0), 3), ValueError, r"keys of shape \(3,\)"),
        (None, TypeError, "or an int seed, got None"),
        (0.5, TypeError, "or an int seed"),
        (True, TypeError, "or an int seed"),
        ("0", TypeError, "or an int seed"),
    ],
)
def test_bad_keys(key, error, match):
    with pytest.raises(error, match=match):
        gaussian_noise(1.0, key)


def test_a_seed_is_its_key():
    expected = jax.random.key_data(jax.random.key(7))
    for seed in (7, np.int64(7), np.uint32(7), jax.random.key(7)):
        key = gaussian_noise(1.0, seed).init(ZERO).key
        np.testing.assert_array_equal(jax.random.key_data(key), expected)
