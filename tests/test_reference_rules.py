# SPDX-License-Identifier: Apache-2.0
"""Centred clipping, FLTrust and comparative gradient elimination."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from toys import quick_jit

from jaxfed.aggregators import centered_clipping, cge, compose, fltrust
from jaxfed.preaggregators import bucketing, clip, nnm

BAD = [np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0]

RULES = {
    "centered_clipping": (
        lambda f: centered_clipping(f, clip_norm=1.5, iterations=3),
        lambda x, f, r: oracles.centered_clipping(x, r, 1.5, 3),
    ),
    "fltrust": (lambda f: fltrust(), lambda x, f, r: oracles.fltrust(x, r)),
    "projected": (
        lambda f: fltrust(form="projected"),
        lambda x, f, r: oracles.fltrust(x, r, "projected"),
    ),
    "cge": (cge, lambda x, f, r: oracles.cge(x, f)),
}
TRUSTING = ["fltrust", "projected"]


def aggregate(rule, updates, reference=None, **extra):
    """Run a rule once; compiled, which is quicker than one operation at a time."""

    @quick_jit
    def run(updates, extra):
        params = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), updates)
        return rule.update(updates, rule.init(params), params, **extra)[0]

    return run(updates, {"reference": reference, **extra})


@functools.cache
def compiled(name, f):
    return quick_jit(functools.partial(aggregate, RULES[name][0](f)))


def close(actual, expected, tol):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tol)


def spread_rows(n, d, seed=0):
    """Rows around a common direction, and a reference near it."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) * (0.5 + np.arange(n)[:, None] / n)
    x = rng.permutation(x + rng.normal(size=d))
    r = x.mean(0) + 0.3 * rng.normal(size=d)
    return x.astype(np.float32), r.astype(np.float32)


def kinds(n, d):
    (x, r), rng = spread_rows(n, d), np.random.default_rng(1)
    yield x, r
    yield rng.integers(-1, 2, (n, d)).astype(np.float32), r
    yield x[rng.integers(0, (n + 1) // 2, n)], r
    far = (1e3 + 1e-2 * rng.normal(size=(n + 1, d))).astype(np.float32)
    yield far[1:], far[0]
    yield np.linspace(-3, 5, n, dtype=np.float32)[:, None] * r, 2 * r


def split(x):
    lead = x.shape[:-1]
    return {
        "a": x[..., 0],
        "b": (x[..., 1:3], None),
        "c": x[..., 3:].reshape(*lead, 1, -1),
    }


def join(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


@pytest.mark.parametrize(("n", "f"), [(1, 0), (4, 1), (20, 5)])
@pytest.mark.parametrize("name", RULES)
def test_matches_the_oracle(name, n, f):
    for x, r in kinds(n, 9):
        expected = RULES[name][1](x, f, r)
        # Where these rules look from, an anchor, is one of the points.
        tol = oracles.tolerance(x if name == "cge" else np.vstack([x, r, 0 * r]))
        close(compiled(name, f)(x, r), expected, tol)
    x, r = spread_rows(n, 9)
    out = compiled(name, f)(split(x), split(r))
    close(join(out), RULES[name][1](x, f, r), 1e-5)


@pytest.mark.parametrize("name", RULES)
def test_bad_rows(name):
    f = 3
    for value in BAD:
        x, r = spread_rows(11, 9)
        x[[1, 4, 10]] = value
        x[4, 1:] = 1.0  # one bad entry is enough
        out = np.asarray(compiled(name, f)(x, r))
        assert np.all(np.isfinite(out))
        known = np.where(np.abs(x) > 1e20, np.inf, x)
        close(out, RULES[name][1](known, f, r), 2e-5)


def test_cge_refuses_more_than_f_bad_rows():
    x, _ = spread_rows(8, 9)
    x[[0, 3, 4]] = np.nan
    assert np.all(np.isnan(compiled("cge", 2)(x, None)))


@pytest.mark.parametrize("content", [0.0, 1e30, np.nan])
@pytest.mark.parametrize("name", RULES)
def test_an_absent_row_is_a_removed_row(name, content):
    x, r = spread_rows(12, 9)
    mask = np.arange(12) % 4 != 1
    x[~mask] = content
    out = compiled(name, 2)(x, r, mask=mask)
    close(out, RULES[name][1](x[mask], 2, r), 1e-5)
    nobody = compiled(name, 2)(x, r, mask=np.zeros(12, bool))
    assert np.all(np.isnan(nobody))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", RULES)
def test_dtypes(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        x, r = (jnp.asarray(a, dtype) for a in spread_rows(7, 9))
        out = aggregate(RULES[name][0](2), x, r)
        assert out.dtype == dtype
        wide = [np.asarray(a, np.float64) for a in (x, r)]
        eps = float(jnp.finfo(dtype).eps)
        close(out, RULES[name][1](wide[0], 2, wide[1]), 8 * eps * np.abs(wide[0]).max())


@pytest.mark.parametrize("name", RULES)
def test_permutation_sign_and_scale(name):
    x, r = spread_rows(9, 9)
    run, order = compiled(name, 2), np.random.default_rng(3).permutation(9)
    base = np.asarray(run(x, r))
    close(run(x[order], r), base, 2e-6)
    close(run(-x, -r), -base, 2e-6)
    if name != "centered_clipping":  # whose radius is a length
        for scale in (2.0**-40, 2.0**20):
            close(run(x * scale, r * scale) / scale, base, 2e-6)


def test_centred_clipping_is_translation_equivariant():
    x, r = spread_rows(9, 9)
    shift = np.linspace(-8, 8, 9, dtype=np.float32)
    run = compiled("centered_clipping", 2)
    close(run(x + shift[None], r + shift), run(x, r) + shift, 2e-5)


@pytest.mark.parametrize("name", RULES)
def test_gradients_agree_with_finite_differences(name):
    rng = np.random.default_rng(7)
    x, r, direction = rng.normal(size=(6, 4)), rng.normal(size=4), rng.normal(size=4)
    with jax.enable_x64(True):

        @quick_jit
        def value(x, r):
            return jnp.vdot(direction, aggregate(RULES[name][0](1), x, r))

        grads = quick_jit(jax.grad(value, (0, 1)))(x, r)
        for which, at in enumerate((x, r)):
            for index in np.ndindex(at.shape):
                step = np.zeros_like(at)
                step[index] = 1e-5
                up = [x, r][:which] + [at + step] + [x, r][which + 1 :]
                down = [x, r][:which] + [at - step] + [x, r][which + 1 :]
                slope = float(value(*up) - value(*down)) / 2e-5
                assert abs(float(grads[which][index]) - slope) < 1e-8


@pytest.mark.parametrize("name", RULES)
def test_gradients_are_finite_with_bad_rows(name):
    run = compiled(name, 2)
    grad = quick_jit(jax.grad(lambda x, r: jnp.sum(jnp.square(run(x, r))), (0, 1)))
    for value in BAD:
        x, r = spread_rows(7, 9)
        x[[0, 5]] = value
        assert all(np.all(np.isfinite(g)) for g in grad(x, r))
        x[:] = r  # distances of 0
        assert all(np.all(np.isfinite(g)) for g in grad(x, 0 * r))
        assert all(np.all(np.isfinite(g)) for g in grad(x, r))


def test_f_and_clip_norm_may_be_traced():
    x, r = spread_rows(8, 9)
    sweep = quick_jit(jax.vmap(lambda f: aggregate(cge(f), x)))(np.arange(-1, 5))
    for f, out in zip(range(-1, 5), sweep, strict=True):
        if 0 <= 2 * f < 8:
            close(out, oracles.cge(x, f), 1e-5)
        else:
            assert np.all(np.isnan(out))

    def clipped(radius, f):
        return aggregate(centered_clipping(f, clip_norm=radius), x, r)

    radii, budgets = np.array([0.0, 0.5, 3.0, np.inf, 1.0]), np.array([1, 1, 3, 0, 4])
    sweep = quick_jit(jax.vmap(clipped))(radii, budgets)
    assert np.all(np.isnan(sweep[0])) and np.all(np.isnan(sweep[4]))
    for i in (1, 2, 3):
        close(sweep[i], oracles.centered_clipping(x, r, radii[i]), 1e-5)


# --- centred clipping ----------------------------------------------------------------


def test_the_centre_is_the_previous_aggregate():
    rule = centered_clipping(2, clip_norm=0.7, iterations=2)
    batches = np.stack([spread_rows(9, 9, seed)[0] for seed in range(4)])

    def step(state, x):
        out, state = rule.update(x, state)
        return state, out

    start = rule.init(jax.ShapeDtypeStruct((9,), jnp.float32))
    state, outs = quick_jit(lambda s, xs: jax.lax.scan(step, s, xs))(start, batches)
    centre = np.zeros(9)
    for x, out in zip(batches, outs, strict=True):
        centre = oracles.centered_clipping(x, centre, 0.7, 2)
        close(out, centre, 1e-5)
    close(state.centre, centre, 1e-5)


def test_a_reference_replaces_the_state_once():
    rule, (x, r) = centered_clipping(clip_norm=1.0), spread_rows(9, 9)
    state, run = rule.init(r), quick_jit(rule.update)
    given, later = run(x, state, reference=r)
    close(given, oracles.centered_clipping(x, r, 1.0), 1e-5)
    close(later.centre, given, 0)
    own, _ = run(x, later, reference=None)
    close(own, oracles.centered_clipping(x, np.asarray(given), 1.0), 1e-5)
    close(run(x, later)[0], own, 0)


def test_the_state_keeps_the_dtypes_of_params():
    rule, (x, _) = centered_clipping(), spread_rows(6, 9)
    params = {"a": jnp.zeros(9, jnp.float32), "b": jnp.zeros(9, jnp.bfloat16)}
    updates = {"a": jnp.asarray(x, jnp.bfloat16), "b": jnp.asarray(x)}
    state = rule.init(params)
    _, later = quick_jit(rule.update)(updates, state, params)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype.name, later.centre)
    assert dtypes == {"a": "float32", "b": "bfloat16"}


@pytest.mark.parametrize("far", [1e6, 1e15, np.inf])
def test_each_row_moves_the_centre_by_a_clipped_step(far):
    x, r = spread_rows(8, 9)
    moved = x.copy()
    moved[:2] = far
    run = compiled("centered_clipping", 2)
    honest, attacked = np.asarray(run(x, r)), np.asarray(run(moved, r))
    # Three iterations, each changed by at most 2 C in each of two rows of eight,
    # and by what the centre had moved before.
    assert np.linalg.norm(attacked - honest) <= 3 * 2 * 2 * 1.5 / 8 + 1e-4
    assert np.linalg.norm(attacked - r) <= 3 * 1.5 + 1e-4


def test_an_infinite_radius_gives_the_mean():
    x, r = spread_rows(8, 9)
    rule = centered_clipping(clip_norm=np.inf)
    close(aggregate(rule, x, r), x.mean(0), 1e-5)


# --- FLTrust -------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1e15, 1e15, 1e30, np.nan, 0.0, -1.0])
def test_fltrust_survives_a_majority(bad):
    rng = np.random.default_rng(2)
    r = (1 + rng.random(9)).astype(np.float32)
    x = r + 0.1 * rng.normal(size=(10, 9)).astype(np.float32)
    x[:7] = np.where(np.arange(9) % 2 == 0, bad, -bad)
    out = np.asarray(compiled("fltrust", 0)(x, r))
    known = np.where(np.abs(x) > 1e20, np.nan, x)
    close(out, oracles.fltrust(known, r), 1e-5)
    assert np.linalg.norm(out) <= np.linalg.norm(r) * (1 + 1e-6)


def test_fltrust_by_hand():
    r = np.array([2.0, 0.0], np.float32)
    x = np.array([[3.0, 3.0], [5.0, 0.0], [-1.0, 0.0], [0.0, 0.0]], np.float32)
    root = np.sqrt(0.5)
    original = np.array([root * 2 * root + 2, root * 2 * root]) / (root + 1)
    close(compiled("fltrust", 0)(x, r), original, 1e-6)
    close(compiled("projected", 0)(x, r), [(3 + 5) / 4, 0], 1e-6)
    info = quick_jit(fltrust().inspect)(x, optax.EmptyState(), reference=r)
    weights = np.array([root * 2 / np.sqrt(18), 2 / 5, 0, 0]) / (root + 1)
    close(info.weights, weights, 1e-6)


@pytest.mark.parametrize("name", TRUSTING)
def test_nobody_trusted_gives_zero(name):
    x, r = spread_rows(6, 9)
    away = x - np.outer(x @ r / (r @ r) + 1, r).astype(np.float32)
    for rows, reference in ((away, r), (x, 0 * r), (0 * x, r)):
        np.testing.assert_array_equal(compiled(name, 0)(rows, reference), 0 * r)
    assert np.all(np.isnan(compiled(name, 0)(x, r * np.nan)))


# --- joined with others --------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    "stages",
    [lambda: [nnm(2)], lambda: [clip(1.5)], lambda: [bucketing(2, key=1), clip(2.0)]],
)
def test_compose_equals_chain(name, stages):
    rule = RULES[name][0](2)
    fused, link = compose(*stages(), rule), optax.chain(*stages(), rule)
    x, r = spread_rows(10, 9)

    @quick_jit
    def both(x, r):
        a = fused.update(x, fused.init(r), r, reference=r)[0]
        return a, link.update(x, link.init(r), r, reference=r)[0]

    a, b = both(x, r)
    close(a, b, 1e-5)


# --- errors --------------------------------------------------------------------------


def test_errors():
    x, r = spread_rows(6, 3)
    with pytest.raises(ValueError, match="form must be one of 'original', 'projected'"):
        fltrust(form="other")
    for call in (fltrust().update, fltrust().inspect):
        with pytest.raises(ValueError, match="fltrust needs reference="):
            call(x, optax.EmptyState())
    for rule in (fltrust(), centered_clipping()):
        with pytest.raises(ValueError, match="reference must be shaped like params"):
            rule.update(x, rule.init(r), r, reference=r[:2])
        with pytest.raises(ValueError, match="reference must have the structure of"):
            rule.update(x, rule.init(r), r, reference={"a": r})
        with pytest.raises(ValueError, match="has no weighted form"):
            rule.update(x, rule.init(r), r, reference=r, weights=np.ones(6))
    with pytest.raises(ValueError, match=r"clip_norm must be > 0 .*got clip_norm=-1"):
        centered_clipping(clip_norm=-1)
    with pytest.raises(ValueError, match="iterations must be at least 1"):
        centered_clipping(iterations=0)
    with pytest.raises(ValueError, match="num_byzantine must be at least 0"):
        cge(-1)
    for rule in (cge(3), centered_clipping(3)):
        with pytest.raises(ValueError, match="0 <= f < n/2, got f=3, n=6"):
            aggregate(rule, x)


# --- property tests ------------------------------------------------------------------

SHAPES = [(3, 1, 1), (5, 2, 6), (8, 2, 6), (12, 5, 2)]


@st.composite
def problems(draw):
    n, f, d = draw(st.sampled_from(SHAPES))
    x = draw(arrays(np.float32, (n, d), elements=st.integers(-9, 9).map(float)))
    r = draw(arrays(np.float32, (d,), elements=st.integers(-9, 9).map(float)))
    for row in draw(st.permutations(range(n)))[: draw(st.integers(0, f))]:
        x[row] = draw(st.sampled_from([*BAD, 1e10]))
    return x, f, r


@pytest.mark.parametrize("name", ["centered_clipping", "fltrust", "cge"])
@given(problem=problems())
def test_any_values_any_bad_rows(name, problem):
    x, f, r = problem
    out = np.asarray(compiled(name, f)(x, r))
    assert np.all(np.isfinite(out))
    known = np.where(np.abs(x) > 1e20, np.inf, x)
    close(out, RULES[name][1](known, f, r), 2e-4)
