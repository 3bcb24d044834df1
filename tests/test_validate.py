# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments: what passes, what raises, and what the message says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfed import _keys, _validate

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (_validate.nonnegative, [0, 1.5, np.float32(2)], [-1, NAN, INF]),
        (_validate.positive, [1, 1e-9], [0, -1, NAN, INF]),
        (_validate.unit_interval, [0, 0.5], [-0.1, 1, 2, NAN]),
    ],
)
def test_numbers(check, good, bad):
    for x in good:
        assert check("rate", x) is x
        assert check("rate", jnp.asarray(x)) == x
    for x in bad:
        with pytest.raises(ValueError, match=f"rate must .* got rate={x}"):
            check("rate", x)
        with pytest.raises(ValueError, match="rate must "):
            check("rate", jnp.asarray(x))
    for x in (None, "1", b"1", True, [1.0], np.ones(2), jnp.ones(2), 1j):
        with pytest.raises(TypeError, match="rate must be a number"):
            check("rate", x)
    # Traced values and schedules cannot be checked.
    jax.jit(lambda x: check("rate", x))(bad[0])
    check("rate", lambda step: bad[0])


def test_infinity_where_it_means_off():
    assert _validate.positive("clip_norm", INF, finite=False) == INF
    assert _validate.nonnegative("epsilon", INF, finite=False) == INF
    for x in (0, -1, NAN):
        with pytest.raises(ValueError, match="inf switches it off"):
            _validate.positive("clip_norm", x, finite=False)
    assert _validate.unit_interval("share", 1, closed_right=True) == 1
    with pytest.raises(ValueError, match="0 <= share <= 1, got share=1.1"):
        _validate.unit_interval("share", 1.1, closed_right=True)


def test_counts():
    for x in (3, np.int64(3)):
        out = _validate.count("rounds", x)
        assert out == 3 and type(out) is int
    with pytest.raises(ValueError, match="rounds must be at least 1, got rounds=0"):
        _validate.count("rounds", 0)
    assert _validate.count("rounds", 0, minimum=0) == 0
    for x in (3.0, "3", None, True, jnp.int32(3)):
        with pytest.raises(TypeError, match="rounds must be a Python int, got"):
            _validate.count("rounds", x)


def test_budgets():
    for f in (2, np.int32(2), jnp.int32(2), np.array(2)):
        out = _validate.budget(f)
        assert out == 2 and type(out) is int
    assert _validate.budget(None, optional=True) is None
    jax.jit(_validate.budget)(-1)
    with pytest.raises(ValueError, match="num_byzantine must be at least 0"):
        _validate.budget(jnp.int32(-1))
    for f in (None, 2.0, True, "2"):
        with pytest.raises(TypeError, match="num_byzantine must be a Python int"):
            _validate.budget(f)
    for f in (jnp.float32(2), np.ones(2, int), np.float64(1)):
        with pytest.raises(TypeError, match="num_byzantine must be an integer scalar"):
            _validate.budget(f)


def test_majorities():
    _validate.majority(2, 5)
    _validate.majority(None, 1)
    jax.jit(lambda f: _validate.majority(f, 2) or f)(7)
    for f, n in ((1, 2), (3, 5), (0, 0)):
        with pytest.raises(ValueError, match=f"0 <= f < n/2, got f={f}, n={n}"):
            _validate.majority(f, n)


def test_flags():
    assert _validate.flags("mask", None, 3) is None
    for x in ([True, False, True], np.array([1, 0, 1], bool)):
        np.testing.assert_array_equal(_validate.flags("mask", x, 3), [1, 0, 1])
    with pytest.raises(TypeError, match="mask must be bool, got int32: compare"):
        _validate.flags("mask", [1, 0, 1], 3)
    for x in ([True], [[True] * 3], True):
        with pytest.raises(ValueError, match="each of the 3 clients, got shape"):
            _validate.flags("mask", x, 3)


def test_stacked_trees():
    tree = {"a": np.ones((3, 2), np.float32), "b": (jnp.ones(3), None)}
    params = {"a": np.ones(2, np.float32), "b": (jnp.ones(()), None)}
    assert _validate.stacked(tree) == _validate.stacked(tree, params) == 3
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert _validate.stacked(tree, abstract) == 3
    cases = [
        ({}, ValueError, "no array leaves"),
        ({"a": 1.0}, ValueError, r"updates\['a'\] must have a leading client axis"),
        ({"a": np.ones((0, 2))}, ValueError, r"size >= 1, got shape \(0, 2\)"),
        ({"a": np.ones(2, np.int32)}, TypeError, "floating point, got int32"),
        ({"a": np.ones(2, bool)}, TypeError, "floating point, got bool"),
        ({"a": np.ones(2), "b": np.ones(3)}, ValueError, "'b'.* has 3 rows.*has 2"),
    ]
    for updates, error, match in cases:
        with pytest.raises(error, match=match):
            _validate.stacked(updates)
    with pytest.raises(ValueError, match="structure of params"):
        _validate.stacked(tree, {"a": params["a"]})
    with pytest.raises(ValueError, match=r"\['a'\] has shape \(2,\), params"):
        _validate.stacked(tree, params | {"a": np.ones(3)})
    with pytest.raises(ValueError, match=r"leaf \(root\) has shape"):
        _validate.like(np.ones(2), np.ones(3), "initial")


def test_keys():
    key = jax.random.key(3)
    assert _keys.as_key(key) is key
    assert _keys.as_key(3) == key
    folded = _keys.fold(key, 1, 2)
    assert folded == jax.random.fold_in(jax.random.fold_in(key, 1), 2)
    assert folded != _keys.fold(key, 2, 1)
