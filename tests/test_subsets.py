# SPDX-License-Identifier: Apache-2.0
"""MDA, MVA and SMEA against the enumeration of all subsets in float64.

Rows refer to the checklist of the sheet on privacy and generalization, section 6.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from toys import quick_jit

from jaxfed import reductions
from jaxfed.reductions import _subsets

RULES = {"mda": _subsets.mda, "mva": _subsets.mva, "smea": _subsets.smea}
SIZES = [(n, f) for n in range(1, 10) for f in range((n + 1) // 2)]


def score(name, rows):
    """Return the score of one subset ``[k, d]``, written from the definition."""
    if not np.isfinite(rows).all():
        return math.inf
    centred = rows - rows.mean(0)
    if name == "mda":
        return ((rows[:, None] - rows[None]) ** 2).sum(-1).max()
    if name == "mva":
        return (centred**2).sum() / len(rows)
    # Eigenvalues of the d x d covariance itself, not of its Gram matrix.
    return np.linalg.eigvalsh(centred.T @ centred / len(rows))[-1]


def enumerate_subsets(name, x, f, present=None):
    """Return all subsets in lexicographic order and their scores."""
    x = np.asarray(x, np.float64)
    ids = range(len(x)) if present is None else np.flatnonzero(present)
    subsets = list(itertools.combinations(ids, len(ids) - f))
    return subsets, np.array([score(name, x[list(s)]) for s in subsets])


def expected(name, x, f, present=None, tie=1e-9):
    """Return the weights ``[n]`` of the first subset of least score; NaN if inf."""
    subsets, scores = enumerate_subsets(name, x, f, present)
    if not math.isfinite(scores.min()):
        return np.full(len(x), np.nan)
    # An absolute share of the data: the least score may be 0.
    floor = 1e-12 * np.nanmax(np.where(np.isfinite(x), x, 0) ** 2)
    best = subsets[int(np.argmax(scores <= scores.min() * (1 + tie) + floor))]
    return np.isin(np.arange(len(x)), best) / len(best)


@functools.partial(quick_jit, static_argnums=(0, 2))
def weights(name, x, f, mask=None):
    return RULES[name](reductions.geometry(x, f, mask=mask), f)


@functools.partial(quick_jit, static_argnums=0)
def traced(name, x, f, mask):
    """Solve many problems, each with its own f and mask, in one program."""

    def one(x, f, mask):
        return RULES[name](reductions.geometry(x, None, mask=mask), f)

    return jax.vmap(one)(x, f, mask)


def rows_of(kind, n, f, d, rng):
    x = rng.normal(size=(n, d))
    if kind == "tied":
        return rng.integers(-2, 3, (n, d)).astype(float)
    if kind == "duplicated":
        return x[rng.integers(0, n // 2 + 1, n)]
    if kind == "collinear":
        return rng.integers(-9, 10, (n, 1)) * np.ones((1, d))
    if kind == "far":
        x[rng.choice(n, f, replace=False)] *= 1e6
    if kind == "unusable":
        # Up to one row more than the rule can leave out.
        bad = rng.choice(n, min(n, rng.integers(0, f + 2)), replace=False)
        x[bad] = rng.choice([np.nan, np.inf, -np.inf], (len(bad), d))
    return x


KINDS = ["random", "tied", "duplicated", "collinear", "far", "unusable"]


def problems(d, kinds, seed=0):
    """Return every size and kind, padded to 9 clients by absent ones."""
    rng, out = np.random.default_rng(seed), []
    for (n, f), kind in itertools.product(SIZES, kinds):
        x, present = np.full((9, d), 7.0), np.zeros(9, bool)
        present[np.sort(rng.choice(9, n, replace=False))] = True
        x[present] = rows_of(kind, n, f, d, rng)
        out.append((x, np.int32(f), present))
    return [np.stack(part) for part in zip(*out, strict=True)]


@pytest.mark.parametrize("d", [1, 2, 3, 8])
@pytest.mark.parametrize("name", RULES)
def test_row_2_and_3_every_subset_in_float64(name, d):
    x, f, mask = problems(d, KINDS)
    with jax.enable_x64(True):
        got = np.asarray(traced(name, jnp.asarray(x), jnp.asarray(f), mask))
    want = [expected(name, *p) for p in zip(x, f, mask, strict=True)]
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_row_2_every_subset_in_float32(name):
    x, f, mask = problems(3, ["random", "far", "unusable"], seed=1)
    x = x.astype(np.float32)
    got = np.asarray(traced(name, x, jnp.asarray(f), mask))
    want = [expected(name, *p) for p in zip(x, f, mask, strict=True)]
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_huge_offset(name):
    x = 1e3 + 1e-2 * np.random.default_rng(2).normal(size=(9, 50))
    x = x.astype(np.float32)
    np.testing.assert_allclose(weights(name, x, 4), expected(name, x, 4), rtol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_static_budget_equals_traced(name):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(4, 9, 5)).astype(np.float32)
    mask = np.ones((4, 9), bool)
    together = traced(name, x, jnp.arange(4, dtype=jnp.int32), mask)
    for f in range(4):
        np.testing.assert_array_equal(weights(name, x[f], f), together[f])


@pytest.mark.parametrize("name", RULES)
def test_one_client_and_equal_rows(name):
    np.testing.assert_array_equal(weights(name, np.ones((1, 3), np.float32), 0), [1])
    equal = np.full((7, 3), 0.1, np.float32)
    chosen = weights(name, equal, 3)
    np.testing.assert_allclose(chosen, np.arange(7) < 4, atol=0.76)
    np.testing.assert_allclose(jnp.sum(chosen), 1, rtol=1e-6)


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_a_violated_traced_condition_gives_nan(name, d):
    x = np.random.default_rng(4).normal(size=(4, 9, d)).astype(np.float32)
    mask = np.ones((4, 9), bool)
    mask[2, 4:], mask[3] = False, False
    got = traced(name, x, jnp.array([5, -1, 2, 0], jnp.int32), mask)
    assert np.isnan(got).all()


@pytest.mark.parametrize("name", RULES)
def test_several_chunks_and_far_rows(name, monkeypatch):
    # 220 subsets, 64 at a time, the best in the last chunk.
    monkeypatch.setattr(_subsets, "_CHUNK", 64)
    monkeypatch.setattr(_subsets, "_BATCH", 4)
    x = np.random.default_rng(5).normal(size=(12, 4)).astype(np.float32)
    x[:3] += np.float32(1e15)
    got = quick_jit(lambda x: RULES[name](reductions.geometry(x, 3), 3))(x)
    np.testing.assert_allclose(got, np.r_[[0] * 3, [1 / 9] * 9], rtol=1e-6)
    x[:3] -= np.float32(1e15)
    x = x + np.random.default_rng(6).normal(size=x.shape).astype(np.float32)
    got = quick_jit(lambda x: RULES[name](reductions.geometry(x, 3), 3))(x)
    np.testing.assert_allclose(got, expected(name, x, 3), rtol=1e-6)


@pytest.mark.parametrize("d", [6, 10**4])
def test_smea_among_nearly_equal_subsets(d):
    # In high dimension all 3003 subsets are within a few percent.
    x = np.random.default_rng(7).normal(size=(14, d)).astype(np.float32)
    got = np.asarray(weights("smea", x, 6))
    gram = np.asarray(x, np.float64) @ np.asarray(x, np.float64).T
    subsets = list(itertools.combinations(range(14), 8))
    blocks = np.stack([gram[np.ix_(s, s)] for s in subsets])
    centre = np.eye(8) - 1 / 8
    top = np.linalg.eigvalsh(centre @ blocks @ centre)[:, -1]
    chosen = subsets.index(tuple(np.flatnonzero(got)))
    assert top[chosen] <= top.min() * (1 + 2e-5)


@pytest.mark.parametrize("name", RULES)
def test_row_3_windows_of_301_values(name):
    rng = np.random.default_rng(8)
    x = rng.normal(size=(301, 1)).astype(np.float32)
    x[rng.choice(301, 120, replace=False)] += 4
    x[5], x[77] = 1e15, np.inf
    with jax.enable_x64(True):
        got = np.asarray(weights(name, jnp.asarray(x, jnp.float64), 140))
    order = np.argsort(x[:, 0])
    windows = [order[j : j + 161] for j in range(141)]
    scores = [score(name, x[w].astype(np.float64)) for w in windows]
    best = windows[int(np.argmin(scores))]
    np.testing.assert_array_equal(np.flatnonzero(got), np.sort(best))


def test_too_many_subsets_name_the_way_out():
    x = jax.ShapeDtypeStruct((30, 3), jnp.float32)

    def rule(name, f):
        return lambda x: RULES[name](reductions.geometry(x, None), f)

    with pytest.raises(ValueError, match=r"n=30 and f=9 give 14307150.*CAF \(caf\)"):
        jax.eval_shape(rule("smea", 9), x)
    with pytest.raises(ValueError, match=r"14307150 subsets.*krum"):
        jax.eval_shape(rule("mda", 9), x)
    with pytest.raises(ValueError, match=r"a traced f \(up to 14\).*Python int"):
        jax.eval_shape(lambda x, f: rule("mva", f)(x), x, jnp.int32(1))
    with pytest.raises(ValueError, match="0 <= f < n/2"):
        jax.eval_shape(rule("smea", 15), x)


def test_no_gradient_enters_the_search():
    x = np.random.default_rng(9).normal(size=(7, 3)).astype(np.float32)

    def total(x, name):
        chosen = weights(name, x, 2)
        return jnp.sum(jnp.square(chosen @ x)) / 2

    for name in RULES:
        chosen = np.asarray(weights(name, x, 2))
        slope = jax.grad(total)(x, name)
        np.testing.assert_allclose(slope, np.outer(chosen, chosen @ x), rtol=1e-5)


finite = st.floats(-100, 100, width=32).map(lambda v: v if abs(v) > 1e-3 else 0.0)


@given(hnp.arrays(np.float64, (7, 2), elements=finite), st.integers(0, 3))
def test_no_subset_scores_lower(x, f):
    mask = np.ones((1, 7), bool)
    for name in RULES:
        with jax.enable_x64(True):
            one = traced(name, jnp.asarray(x[None]), jnp.array([f], jnp.int32), mask)
        chosen = np.flatnonzero(np.asarray(one[0]))
        assert len(chosen) == 7 - f
        scores = enumerate_subsets(name, x, f)[1]
        slack = 1e-9 * scores.min() + 1e-12 * np.max(x**2)
        assert score(name, x[chosen]) <= scores.min() + slack


# --- row 4: power iterations from a random start ---------------------------------


@functools.partial(quick_jit, static_argnums=(1, 2))
def power_weights(x, f, power_iters, key):
    geometry = reductions.geometry(x, f)

    def one(key):
        return _subsets.smea(geometry, f, power_iters=power_iters, key=key)

    return jax.vmap(one)(key)


def test_row_4_many_iterations_are_exact_and_one_is_random():
    x = np.random.default_rng(10).normal(size=(7, 4)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 50)
    exact = weights("smea", x, 2)
    np.testing.assert_allclose(power_weights(x, 2, 100, keys)[:9], [exact] * 9)
    once = np.asarray(power_weights(x, 2, 1, keys))
    assert len(np.unique(once, axis=0)) > 1
    np.testing.assert_allclose(once.sum(1), 1, rtol=1e-6)
    np.testing.assert_array_equal(once, power_weights(x, 2, 1, keys))


@pytest.mark.parametrize("d", [2, 40])
def test_row_4_one_iteration_has_the_law_of_the_definition(d):
    # Fewer and more parameters than clients: the length of v matters for few.
    n, f, draws = 5, 2, 4000
    rng = np.random.default_rng(11)
    x = rng.normal(size=(n, d)).astype(np.float32)
    keys = jax.random.split(jax.random.key(1), draws)
    got = np.asarray(power_weights(x, f, 1, keys)) > 0
    subsets = list(itertools.combinations(range(n), n - f))
    scores = []
    for s in subsets:
        centred = x[list(s)].astype(np.float64) - x[list(s)].mean(0)
        v = rng.normal(size=(d, draws))
        v /= np.linalg.norm(v, axis=0)
        scores.append(np.linalg.norm(centred.T @ (centred @ v), axis=0))
    want = np.bincount(np.argmin(scores, axis=0), minlength=len(subsets)) / draws
    rate = [np.all(got == np.isin(np.arange(n), s), axis=1).mean() for s in subsets]
    np.testing.assert_allclose(rate, want, atol=4 * math.sqrt(0.5 / draws))


def test_row_4_far_rows_leave_the_near_their_digits():
    x = np.random.default_rng(12).normal(size=(7, 40)).astype(np.float32)
    x[[1, 4]] *= np.float32(1e12)
    keys = jax.random.split(jax.random.key(2), 20)
    got = np.asarray(power_weights(x, 2, 1, keys))
    np.testing.assert_allclose(got, [[0.2, 0, 0.2, 0.2, 0, 0.2, 0.2]] * 20, rtol=1e-6)


def test_row_4_unknown_dimension_and_arguments():
    x = np.random.default_rng(13).normal(size=(7, 4)).astype(np.float32)
    geometry = dataclasses.replace(reductions.geometry(x, 2), dim=None)
    chosen = _subsets.smea(geometry, 2, power_iters=100, key=0)
    np.testing.assert_array_equal(chosen, weights("smea", x, 2))
    with pytest.raises(ValueError, match="key must be"):
        _subsets.smea(geometry, 2, power_iters=1)
    with pytest.raises(ValueError, match="power_iters must be at least 1"):
        _subsets.smea(geometry, 2, power_iters=0, key=0)
