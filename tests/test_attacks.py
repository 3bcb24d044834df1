# SPDX-License-Identifier: Apache-2.0
"""Attacks: what each sends, and that honest rows pass untouched.

Rows refer to the checklist of the Byz-Clip21-SGD2M sheet, section 7.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest

import jaxfed
from jaxfed import attacks, reductions
from jaxfed._base import Shard

BYZANTINE = np.array([False, True, False, False, True])


def rows(n=5, d=6, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def on_wire(attack, updates, byzantine=BYZANTINE, **extra):
    params = jax.tree.map(lambda x: x[0], updates)
    state = attack.wire.init(params)
    out, new = attack.wire.update(
        updates, state, params, byzantine=byzantine, probe=None, **extra
    )
    assert jax.tree.structure(new) == jax.tree.structure(state)
    return out


ALL = {
    "none": lambda x: x,
    "label_flip": lambda x: x,
    "ipm": lambda x: oracles.ipm(x, BYZANTINE, 10.0),
    "sign_flip": lambda x: np.where(BYZANTINE[:, None], -x, x),
    "nan": lambda x: np.where(BYZANTINE[:, None], np.nan, x),
    "inf": lambda x: np.where(BYZANTINE[:, None], np.inf, x),
}


def test_the_registry_is_complete():
    assert set(ALL) == set(attacks.__all__)


@pytest.mark.parametrize("name", ALL)
def test_definition(name):
    x = rows()
    attack = getattr(attacks, name)()
    assert isinstance(attack, jaxfed.Attack)
    tree = {"a": x[:, 0], "b": (x[:, 1:].reshape(5, 1, 5), None)}
    out = jax.jit(lambda u: on_wire(attack, u))(tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    flat = np.concatenate([out["a"][:, None], out["b"][0][:, 0]], axis=1)
    np.testing.assert_allclose(flat, ALL[name](x), rtol=2e-6)
    # Honest messages cross the wire bit for bit.
    np.testing.assert_array_equal(flat[~BYZANTINE], x[~BYZANTINE])


@pytest.mark.parametrize("name", ["ipm", "nan", "inf"])
def test_what_byzantine_clients_computed_does_not_matter(name):
    x, y = rows(), rows()
    y[BYZANTINE] = [[np.nan], [np.inf]]
    attack = getattr(attacks, name)()
    np.testing.assert_array_equal(on_wire(attack, x), on_wire(attack, y))
    assert not attack.needs_data


@pytest.mark.parametrize("name", ["none", "label_flip", "sign_flip"])
def test_attacks_that_start_from_honest_work_need_data(name):
    assert getattr(attacks, name)().needs_data


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ALL)
def test_dtypes_are_kept(name, dtype):
    x = jnp.asarray(rows(), dtype)
    out = on_wire(getattr(attacks, name)(), x)
    assert out.dtype == x.dtype
    wide = np.asarray(x, np.float32)
    np.testing.assert_allclose(
        np.asarray(out, np.float32), ALL[name](wide), rtol=2 * jnp.finfo(dtype).eps
    )


def test_numpy_float64_is_fine():
    x = rows().astype(np.float64)
    np.testing.assert_allclose(on_wire(attacks.ipm(), x), ALL["ipm"](x), rtol=2e-6)
    out = on_wire(attacks.sign_flip(scale=2.0), x)
    np.testing.assert_allclose(out[1], -2 * x[1], rtol=1e-6)


@pytest.mark.parametrize("name", ["ipm", "sign_flip"])
def test_the_scale_may_be_traced_and_swept(name):
    x = rows()
    run = jax.vmap(lambda scale: on_wire(getattr(attacks, name)(scale=scale), x))
    out = jax.jit(run)(jnp.array([0.0, 0.5, 10.0]))
    for i, scale in enumerate([0.0, 0.5, 10.0]):
        expected = on_wire(getattr(attacks, name)(scale=scale), x)
        np.testing.assert_allclose(out[i], expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["ipm", "sign_flip"])
def test_bad_scales(name):
    for scale in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="scale must be a finite number >= 0"):
            getattr(attacks, name)(scale=scale)
    with pytest.raises(TypeError, match="scale must be a number"):
        getattr(attacks, name)(scale="10")


def test_who_attacks_must_be_said_and_must_be_bool():
    attack = attacks.ipm()
    with pytest.raises(TypeError, match="byzantine"):
        attack.wire.update(rows(), attack.wire.init(rows()[0]))
    with pytest.raises(TypeError, match="byzantine must be bool"):
        on_wire(attack, rows(), byzantine=BYZANTINE.astype(int))
    with pytest.raises(ValueError, match="byzantine must have one entry for each"):
        on_wire(attack, rows(), byzantine=BYZANTINE[:3])


def test_an_attack_is_a_link_of_a_chain():
    x = rows()
    tx = optax.chain(attacks.ipm(1.0).wire, jaxfed.aggregators.mean(), optax.sgd(1.0))
    step, _ = tx.update(x, tx.init(x[0]), x[0], byzantine=BYZANTINE)
    expected = -oracles.mean(oracles.ipm(x, BYZANTINE, 1.0))
    np.testing.assert_allclose(step, expected, atol=1e-6)


# --- row 15: inner-product manipulation ------------------------------------------


@pytest.mark.parametrize(("byzantine", "factor"), [(1, 0.4761905), (2, 0.0), (5, -1.2)])
def test_row_15_factor_of_the_mean(byzantine, factor):
    """(G - k B) / (G + B) for k = 10, G = 20."""
    x = rows(20 + byzantine, 50, seed=1)
    who = np.arange(20 + byzantine) >= 20
    aggregate = reductions.mean(on_wire(attacks.ipm(scale=10.0), x, who))
    honest = oracles.mean(x[:20])
    np.testing.assert_allclose(aggregate, factor * honest, rtol=0, atol=1e-6)


def test_row_15_attacking_differences_or_their_sums_is_the_same():
    """The attack and the server's line 12 are linear: c-level equals m-level."""
    attack, total = attacks.ipm(scale=10.0), np.zeros((5, 6), np.float32)
    honest_total = np.zeros((5, 6), np.float32)
    for t in range(6):
        c = rows(seed=t)
        total = total + np.float32(0.3) * np.asarray(on_wire(attack, c))
        honest_total = honest_total + np.float32(0.3) * c
    np.testing.assert_allclose(
        total, on_wire(attack, honest_total), rtol=1e-5, atol=1e-6
    )


# --- row 16: label flip ----------------------------------------------------------


def shards(dtype=np.int32):
    label = np.arange(15).reshape(5, 3).astype(dtype) % 10
    data = {"image": np.ones((5, 3, 2), np.float32), "label": label}
    return Shard(jax.tree.map(jnp.asarray, data), jnp.full(5, 3, jnp.int32))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_row_16_label_flip_is_an_involution(dtype):
    before = shards(dtype)
    attack = attacks.label_flip()
    once = attack.poison(before, BYZANTINE)
    labels = np.asarray(once.data["label"])
    assert labels.dtype == dtype
    np.testing.assert_array_equal(
        labels[BYZANTINE], 9 - before.data["label"][BYZANTINE]
    )
    np.testing.assert_array_equal(labels[~BYZANTINE], before.data["label"][~BYZANTINE])
    assert once.data["image"] is before.data["image"] and once.count is before.count
    twice = attack.poison(once, jnp.asarray(BYZANTINE))
    np.testing.assert_array_equal(twice.data["label"], before.data["label"])


def test_label_flip_of_other_names_and_class_counts():
    data = {"y": jnp.array([[0, 1], [2, 0]])}
    attack = attacks.label_flip(num_classes=3, label="y")
    out = attack.poison(Shard(data, jnp.array([2, 2])), np.array([True, False]))
    np.testing.assert_array_equal(out.data["y"], [[2, 1], [2, 0]])
    with pytest.raises(ValueError, match="'label'.*name the labels with label="):
        attacks.label_flip().poison(Shard(data, jnp.array([2, 2])), np.array([1, 0]))
    with pytest.raises(ValueError, match="num_classes must be at least 2"):
        attacks.label_flip(num_classes=1)


def test_other_attacks_leave_the_data_alone():
    before = shards()
    for name in set(ALL) - {"label_flip"}:
        assert getattr(attacks, name)().poison(before, BYZANTINE) is before
