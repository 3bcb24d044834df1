# SPDX-License-Identifier: Apache-2.0
"""BR-DRAG: numbers of test names are rows of the checklist of its specification."""

import functools

import drag_oracle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from toys import quick_jit

import jaxfed
from jaxfed import attacks, sharding
from jaxfed.aggregators import geometric_median, trimmed_mean
from jaxfed.algorithms._br_drag import (
    RoundState,
    br_drag,
    calibrated_to_reference,
    oracle_strength,
    root_work_for,
)
from jaxfed.data.root import root_indices
from jaxfed.rounds import client_key


def normal(*shape):
    """Return the same numbers for the same shape."""
    return np.random.default_rng(shape).normal(size=shape)


def close(actual, expected, tol):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tol)


def wide(*arrays):
    return [np.asarray(a, np.float64) for a in arrays]


PAIRS = normal(2, 1200, 6) * 10 ** (2 * normal(2, 1200, 1).clip(-1.5, 1.5))
UPDATES, REFERENCES = PAIRS.astype(np.float32)
UPDATES[:200] += 3 * REFERENCES[:200]
UPDATES[200:400] -= 3 * REFERENCES[200:400]
FIRST = RoundState(jnp.int32(0))


@quick_jit
def calibrate(rows, reference, strength, extra=None):
    """What one round makes of rows ``[n, d]``; with one row, its v."""
    rule = calibrated_to_reference(strength=strength)
    return rule.update(rows, FIRST, reference=reference, **(extra or {}))[0]


@quick_jit
@functools.partial(jax.vmap, in_axes=(0, 0, None))
def turned(update, reference, strength):
    return calibrate(update[None], reference, strength)


@quick_jit
def observe(rows, reference, strength, byzantine=None):
    rule = calibrated_to_reference(strength=strength)
    return rule.observe(rows, FIRST, reference=reference, byzantine=byzantine)


# --- One row ------------------------------------------------------------------------


def test_row_3_degree_of_divergence():
    r = np.float32([3, 0, 4])
    rows = np.float32([[6, 0, 8], [-1.5, 0, -2], [0, 7, 0]])
    for row, times in zip(rows, (0, 2, 1), strict=True):
        for scale in (1e-6, 1, 1e6):
            details = observe(np.float32(scale) * row[None], r, 0.35)[2].details
            close(details["divergence_mean"], 0.35 * times, 1e-6)
            assert 0 <= details["divergence_mean"] <= np.float32(0.7)


@pytest.mark.parametrize("c", [0.0, 0.1, 0.25, 0.5, 1.0])
def test_row_5_facts_of_the_calibration(c):
    v, g, r = wide(turned(UPDATES, REFERENCES, c), UPDATES, REFERENCES)
    b = np.linalg.norm(r, axis=1)
    v = v / b[:, None]
    cosine = np.sum(g * r, axis=1) / (b * np.linalg.norm(g, axis=1))
    s = 1 - cosine
    expected = [drag_oracle.br_drag_row(x, y, c) for x, y in zip(g, r, strict=True)]
    close(v, expected / b[:, None], 1e-5)
    # 2: length.
    length = np.linalg.norm(v, axis=1)
    close(length**2, 1 - 2 * c * s**2 * (1 - c * s), 1e-5)
    assert np.all(length <= max(1, abs(4 * c - 1)) + 1e-5)
    # 3: alignment.
    along = np.sum(v * r, axis=1) / b
    close(along, cosine + c * s**2, 1e-5)
    assert np.all(along >= (1 - 1 / (4 * c) if c >= 0.25 else 4 * c - 1) - 1e-5)
    if c == 0.5:
        close(along, (1 + cosine**2) / 2, 1e-5)
        assert np.all(along >= 0.5 - 1e-5) and np.all(along <= 1 + 1e-5)
    # 4: invariant in the update, equivariant in the reference.
    close(turned(UPDATES / 8, REFERENCES, c) / b[:, None], v, 1e-5)
    close(turned(UPDATES, 16 * REFERENCES, c) / (16 * b[:, None]), v, 1e-5)


def test_row_5_opposite_updates_at_a_half_and_a_quarter():
    half = turned(-5 * REFERENCES, REFERENCES, 0.5)  # lambda = 1
    size = np.linalg.norm(REFERENCES, axis=1)[:, None]
    close(half / size, REFERENCES / size, 1e-6)
    close(turned(-5 * REFERENCES, REFERENCES, 0.25) / size, 0 * half, 1e-6)


def test_row_6_reversal():
    r = np.float32([[1, -2, 3]])
    close(turned(-r, r, 1.0), 3 * r, 1e-5)
    close(observe(-r, r[0], 1.0)[2].details["divergence_max"], 2, 1e-6)


# --- One round ----------------------------------------------------------------------


@pytest.mark.parametrize("x64", [False, True])
def test_row_9_br_drag_round_by_hand(x64):
    with jax.enable_x64(x64):
        rows, r = jnp.array([[0.0, 3], [-5, 0]]), jnp.array([2.0, 0])
        step, state, info = observe(rows, r, 0.5)
        tol = 1e-12 if x64 else 1e-6
        close(step, [1.5, 0.5], tol)
        close(info.details["divergence_min"], 0.5, tol)
        close(info.details["divergence_max"], 1, tol)
        # v1 = (1, 1), v2 = (2, 0).
        close(calibrate(rows[:1], r, 0.5), [1, 1], tol)
        close(calibrate(rows[1:], r, 0.5), [2, 0], tol)
        assert step.dtype == rows.dtype and state.round == 1


def test_row_9_whole_algorithm_by_hand():
    """The same from local work that goes to centres, and root work of its own."""
    algorithm = br_drag(0.5, local_work=toys.quadratic)
    sim = jaxfed.simulate(algorithm, 2, inspect=True)
    shards, root = toys.centres([[0, -3], [5, 0]]), toys.centres([[-2, 0]])
    root = jax.tree.map(lambda x: x[0], root)
    state, metrics = quick_jit(sim.step)(sim.init(jnp.zeros(2), 0), shards, root)
    close(sim.model(state), [-0.75, -0.25], 1e-6)
    close(metrics["reference_norm"], 2, 1e-6)
    close(metrics["weights"], [0.5 * 0.5 * 2 / 3, 0], 1e-6)


# The last client of the problem is the root data; the others take part.
PROBLEM = toys.Regression(8, m=6)
WORK = jaxfed.local_sgd(PROBLEM.loss, optax.sgd(0.05), steps=3, batch_size=2)


def shards_and_root():
    shards = PROBLEM.shards
    return (
        jax.tree.map(lambda x: x[:7], shards),
        jax.tree.map(lambda x: x[7], shards),
    )


@pytest.mark.parametrize("x64", [False, True])
def test_row_9_trajectory_of_algorithm_2(x64):
    rounds = 6
    with jax.enable_x64(x64):
        algorithm = br_drag(strength=lambda t: 0.5 / (1 + 0.1 * t), local_work=WORK)
        attack = drag_oracle.record_cohorts(attacks.sign_flip(), 4)
        sim = jaxfed.simulate(
            algorithm, 7, num_byzantine=4, attack=attack, cohort_size=4
        )
        shards, root = shards_and_root()
        models, cohorts = drag_oracle.trajectory(
            sim,
            PROBLEM.params,
            shards,
            rounds,
            lambda s, _: (toys.ravel(sim.model(s)), s.attack),
            root=root,
        )
        # The server's batches have the key of the number after that of cohorts.
        batches = drag_oracle.record_batches(
            jax.random.key(3), PROBLEM.shards, [*range(7), 8], rounds, 3, 2
        )
    expected = drag_oracle.br_drag(
        PROBLEM,
        PROBLEM.flat,
        cohorts,
        batches,
        0.05,
        lambda t: 0.5 / (1 + 0.1 * t),
        attackers=range(3, 7),
    )
    assert len({tuple(c) for c in cohorts}) > 1
    close(models, expected[1:], 1e-12 if x64 else 1e-6)


# --- Root data ----------------------------------------------------------------------


def shares(parts, indices):
    return [np.isin(p, indices).sum() for p in parts]


def test_row_10_root_data_set_of_the_paper():
    rng = np.random.default_rng(0)
    sizes = rng.integers(190, 400, 40)
    parts = np.split(rng.permutation(sizes.sum()), np.cumsum(sizes)[:-1])
    for malicious in (12, 24):
        number = 40 - malicious
        benign = ~np.asarray(jaxfed.byzantine_ids(40, malicious))
        indices = root_indices(parts, 3000, seed=1, benign=benign)
        assert indices.dtype == np.int64 and indices.shape == (3000,)
        assert len(np.unique(indices)) == 3000
        got = shares(parts, indices)
        assert got[number:] == [0] * malicious
        more = 3000 % number  # the first take the remainder
        least = 3000 // number
        assert got[:number] == [least + 1] * more + [least] * (number - more)
    assert np.array_equal(indices, root_indices(parts, 3000, seed=1, benign=benign))
    assert np.any(indices != root_indices(parts, 3000, seed=2, benign=benign))


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_row_10_exact_size_and_equal_shares(sizes, seed, data):
    n = len(sizes)
    order = np.random.default_rng(seed).permutation(sum(sizes))
    parts = np.split(order, np.cumsum(sizes)[:-1])
    benign = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    total = sum(s for s, good in zip(sizes, benign, strict=True) if good)
    size = data.draw(st.integers(1, 60))
    if size > total:
        with pytest.raises(ValueError, match=f"got size={size}, and .* have {total}"):
            root_indices(parts, size, seed=seed, benign=benign)
        return
    indices = root_indices(parts, size, seed=seed, benign=benign)
    assert len(indices) == len(np.unique(indices)) == size
    got = np.array(shares(parts, indices))
    assert not np.any(got[~benign])
    least = size // benign.sum()
    # Whoever has fewer than a share gives all; else everybody gives at least one.
    assert np.all(got[benign] >= np.minimum(np.array(sizes)[benign], least))
    if np.all(np.array(sizes)[benign] > least):
        assert got[benign].max() - got[benign].min() <= 1


def test_row_10_labels_are_those_before_the_poisoning():
    parts = [np.arange(0, 6), np.arange(6, 12)]
    labels = np.arange(12) % 3
    everybody = root_indices(parts, 12, seed=0)
    assert sorted(everybody) == list(range(12))
    indices = root_indices(parts, 4, seed=0, benign=np.array([True, False]))
    root = jaxfed.data.stack({"label": labels}, [indices])
    assert np.array_equal(root.data["label"][0], labels[indices])
    assert np.all(indices < 6)


def test_row_10_errors():
    parts = [np.arange(3), np.arange(3, 5)]
    with pytest.raises(ValueError, match="size must be at least 1"):
        root_indices(parts, 0, seed=0)
    with pytest.raises(TypeError, match="benign must be bool, one flag per client"):
        root_indices(parts, 1, seed=0, benign=[0, 1])
    with pytest.raises(ValueError, match="one flag for each of the 2 clients"):
        root_indices(parts, 1, seed=0, benign=[True])
    with pytest.raises(ValueError, match="0 benign clients have 0"):
        root_indices(parts, 1, seed=0, benign=[False, False])
    with pytest.raises(TypeError, match="seed must be a Python int"):
        root_indices(parts, 1, seed=None)


# --- Root work ----------------------------------------------------------------------


def referring(algorithm):
    """The same, but the model after a step is the reference of that step."""

    def update(uploads, sstate, *, reference=None, **extra):
        del uploads, extra
        return sstate._replace(params=reference), None

    return algorithm._replace(server=algorithm.server._replace(update=update))


def test_row_11_root_update_is_that_of_iid_clients():
    rng = np.random.default_rng(2)
    features = rng.normal(size=(6, 200, 3))
    true, theta = rng.normal(size=(2, 3))
    targets = features @ true + 0.1 * rng.normal(size=(6, 200))
    data = {"x": jnp.float32(features), "y": jnp.float32(targets)}
    shards = jaxfed.Shard(data, jnp.full(6, 200))

    def loss(params, batch):
        return 0.5 * (batch["x"] @ params - batch["y"]) ** 2

    work = jaxfed.local_sgd(loss, optax.sgd(0.05), steps=5)  # full batches
    sim = jaxfed.simulate(referring(br_drag(local_work=work)), 5)
    clients = jax.tree.map(lambda x: x[:5], shards)
    root = jax.tree.map(lambda x: x[5], shards)
    state, _ = quick_jit(sim.step)(sim.init(jnp.float32(theta), 0), clients, root)
    found = wide(sim.model(state))[0]
    expected = np.zeros(3)  # FedAvg's mean update, by closed form
    for x, y in zip(features[:5], targets[:5], strict=True):
        at = theta.copy()
        for _ in range(5):
            at -= 0.05 * x.T @ (x @ at - y) / 200
        expected += (theta - at) / 5
    assert drag_oracle.cosine(found, expected) > 0.99
    close(np.linalg.norm(found), np.linalg.norm(expected), 0.2 * np.linalg.norm(found))


def test_row_11_root_batches_have_keys_of_their_own():
    def draws(message, shard, key):
        del shard
        return message["params"] * 0 + jax.random.uniform(key, (1,)), {}

    sim = jaxfed.simulate(referring(br_drag(local_work=draws)), 3)
    shards = toys.centres(np.zeros((3, 1)))
    root = jax.tree.map(lambda x: x[0], shards)
    references = drag_oracle.trajectory(
        sim, jnp.zeros(1), shards, 3, lambda s, _: sim.model(s), root=root
    ).ravel()
    key = jax.random.key(3)
    own = [
        jax.random.uniform(client_key(key, t, i)) for t in range(3) for i in range(4)
    ]
    assert len({*references.tolist(), *map(float, own)}) == 3 + 12
    cohort = jaxfed.simulate(referring(br_drag(local_work=draws)), 3, cohort_size=2)
    again = drag_oracle.trajectory(
        cohort, jnp.zeros(1), shards, 3, lambda s, _: sim.model(s), root=root
    ).ravel()
    np.testing.assert_array_equal(references, again)  # whoever takes part


def test_row_11_root_work_of_its_own():
    more = jaxfed.local_sgd(PROBLEM.loss, optax.sgd(0.05), steps=9, batch_size=2)
    assert br_drag(local_work=WORK).root_work is WORK
    assert br_drag(local_work=WORK, root_work=more).root_work is more
    assert br_drag().root_work is None


@quick_jit
def reduced(data):
    """Updates of the root work by reducer, on one shard of 6 examples."""
    work = jaxfed.local_sgd(PROBLEM.loss, optax.sgd(0.05), steps=2, batch_size=6)
    shard, out = jaxfed.Shard(data, jnp.int32(6)), {}
    for name, reducer in {
        "mean": None,
        "trim 0": trimmed_mean(0),
        "trim 2": trimmed_mean(2),
        "geometric median": geometric_median(),
    }.items():
        server = root_work_for(work, None, reducer)
        update, _ = server({"params": PROBLEM.params}, shard, jax.random.key(0))
        out[name] = toys.ravel(update)
    return out


def test_row_11_robust_reducers():
    data = {k: v[0] for k, v in PROBLEM.shards.data.items()}
    plain = reduced(data)
    close(plain["trim 0"], plain["mean"], 1e-6)
    assert np.abs(plain["trim 2"] - plain["mean"]).max() > 1e-3
    same = {k: jnp.broadcast_to(v[:1], v.shape) for k, v in data.items()}
    fixed = reduced(same)
    for update in fixed.values():
        close(update, fixed["mean"], 1e-6)
    # One example's target, and with it its gradient, grows a million times.
    wrong = data | {"y": data["y"].at[2].mul(1e6)}
    moved = {k: np.abs(x - plain[k]).max() for k, x in reduced(wrong).items()}
    size = np.linalg.norm(plain["mean"])
    assert moved["mean"] > 1e3 * size and moved["trim 0"] > 1e3 * size
    assert moved["trim 2"] < size and moved["geometric median"] < size


def test_row_11_reducers_of_other_work():
    single = jaxfed.gradient(PROBLEM.loss, batch_size=3)
    rule = trimmed_mean(1)
    assert root_work_for(single, None, rule).reducer is rule
    assert root_work_for(None, WORK, rule).gradient.reducer is rule
    assert br_drag(local_work=WORK, root_reducer=rule).root_work.steps == 3
    with pytest.raises(TypeError, match="root_reducer must be an aggregator"):
        br_drag(local_work=WORK, root_reducer="mean")
    with pytest.raises(TypeError, match="root_reducer needs work made by"):
        br_drag(local_work=toys.quadratic, root_reducer=rule)


# --- Strength -----------------------------------------------------------------------


def test_row_12_constant_and_scheduled_strength():
    g, r = np.float32(normal(4, 5)), np.float32(normal(5))
    rule = calibrated_to_reference(strength=lambda t: 0.1 * (t + 1))
    state, update = rule.init(r), quick_jit(rule.update)
    for t in range(3):
        step, state = update(g, state, reference=r)
        expected = [drag_oracle.br_drag_row(x, r, 0.1 * (t + 1)) for x in wide(g)[0]]
        close(step, np.mean(expected, axis=0), 1e-6)
    close(calibrate(g, r, 0.3), step, 1e-6)


@quick_jit
@jax.vmap
def oracle(rows, reference, byzantine):
    c = oracle_strength(rows, reference, byzantine)
    details = observe(rows, reference, c, byzantine)[2].details
    return c, details["byzantine_share"], details["byzantine_cosine"]


def test_row_12_oracle_strength():
    rng = np.random.default_rng(3)
    rows = np.float32(rng.normal(size=(500, 6, 4)))
    reference = np.float32(rng.normal(size=(500, 4)))
    byzantine = rng.random((500, 6)) < rng.random((500, 1))
    byzantine[0] = False
    c, w, x = wide(*oracle(rows, reference, byzantine))
    degrees = np.zeros((500, 6))
    for t, i in np.ndindex(500, 6):
        degrees[t, i] = c[t] * (1 - drag_oracle.cosine(rows[t, i], reference[t]))
    left = np.sum(np.where(byzantine, 1 - degrees, 0), axis=1)
    some = byzantine.any(1)
    close(w, byzantine.mean(1), 1e-6)
    assert np.all(c >= 0.5) and np.all(c <= 1)
    assert np.all(c[~some] == 0.5) and np.sum(~some) > 5
    inside = some & (x <= 0)
    assert inside.sum() > 100
    close(left[inside], np.zeros(inside.sum()), 1e-5 * 6)
    assert np.all(c[some & (x > 0)] == 1)
    along = np.tile(reference[:1, None], (1, 6, 1))  # x = w
    assert oracle(along, reference[:1], np.ones((1, 6), bool))[0] == 1


# --- Special cases ------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, 1e36, 0.0, 1e-14])
def test_row_13_bad_rows_contribute_c_times_the_reference(value):
    g, r = np.float32(normal(4, 5)), np.float32(normal(5))
    g[2] = value
    step, _, info = observe(g, r, 0.3)
    rows = [drag_oracle.br_drag_row(x, r, 0.3) for x in np.delete(g, 2, 0)]
    close(step, (sum(rows) + 0.3 * r) / 4, 1e-6)
    assert info.weights[2] == 0 and info.details["ignored_rows"] == 1
    g[2], g[2, 1] = 1, np.nan
    if not np.isfinite(value):  # one bad entry is enough
        np.testing.assert_array_equal(calibrate(g, r, 0.3), step)


def test_row_13_no_reference_no_step():
    g = np.float32(normal(4, 5))
    for r in (0.0, 1e-13, np.nan, np.inf):
        assert not np.any(calibrate(g, np.full(5, r, np.float32), 0.3))


def test_row_13_nothing_at_all():
    zero = np.zeros((3, 2), np.float32)
    assert not np.any(calibrate(zero, zero[0], 0.3))
    close(calibrate(zero, np.float32([1, 2]), 0.3), [0.3, 0.6], 1e-6)


@pytest.mark.parametrize("size", [1e-9, 1e18, 1e29])
def test_row_13_sizes_that_squares_do_not_survive(size):
    g, r = np.float32(normal(4, 5)), np.float32(normal(5))
    base = np.asarray(calibrate(g, r, 0.3))
    close(calibrate(g * np.float32(size), r, 0.3), base, 1e-6)
    close(calibrate(g, r * np.float32(size), 0.3) / size, base, 1e-6)
    assert np.all(np.isfinite(calibrate(np.full_like(g, 1e30), r, 0.3)))
    assert np.all(np.isfinite(calibrate(np.full_like(g, -1e30), r * 1e-9, 1.0)))


@pytest.mark.parametrize(("row", "size"), [(1e30, 1e-9), (1e-11, 1e30)])
def test_row_13_factors_that_floats_cannot_hold(row, size):
    r = np.full(3, size, np.float32)
    step = calibrate(np.full((2, 3), row, np.float32), r, 0.5)
    close(step / r, np.full(3, 0.5), 1e-6)  # as from rows of zero


def test_row_13_strength_zero_is_the_mean_of_directions():
    g, r = np.float32(normal(4, 5)), np.float32(normal(5))
    directions = g / np.linalg.norm(g, axis=1, keepdims=True)
    close(calibrate(g, r, 0.0), np.linalg.norm(r) * directions.mean(0), 1e-6)


def test_row_13_no_attackers_in_a_cohort():
    g, r = np.float32(normal(4, 5)), np.float32(normal(5))
    info = observe(g, r, 0.3, np.zeros(4, bool))[2]
    assert info.influence == 0 and info.details["byzantine_share"] == 0
    assert info.details["byzantine_cosine"] == 0
    everybody = observe(g, r, 0.3, np.ones(4, bool))[2].details
    assert everybody["rho"] == 0 and np.isnan(everybody["rho_min"])


@pytest.mark.parametrize("x64", [False, True])
def test_row_13_gradients(x64):
    with jax.enable_x64(x64):
        g, r = jnp.array(normal(4, 5), float), jnp.array(normal(5), float)

        @quick_jit
        def value(rows, reference):
            return jnp.sum(jnp.sin(calibrate(rows, reference, 0.3)))

        slopes = quick_jit(jax.grad(value, (0, 1)))
        if x64:
            found = slopes(g, r)
            for at in [(0, 0), (1, 3), (3, 4)]:
                move = jnp.zeros((4, 5)).at[at].set(1e-6)
                slope = (value(g + move, r) - value(g - move, r)) / 2e-6
                close(found[0][at], slope, 1e-8)
                move = jnp.zeros(5).at[at[1]].set(1e-6)
                slope = (value(g, r + move) - value(g, r - move)) / 2e-6
                close(found[1][at[1]], slope, 1e-8)
        for bad in (0.0, np.nan, np.inf, 1e30):
            for reference in (r, 0 * r, g[1]):
                both = slopes(g.at[1].set(bad), reference)
                assert all(np.all(np.isfinite(s)) for s in both)


# --- Guarantees ---------------------------------------------------------------------

ANY = st.one_of(
    st.integers(-9, 9).map(float),
    st.floats(width=32),
    st.sampled_from([np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-30, 3e38]),
)


@given(
    rows=arrays(np.float32, (6, 3), elements=ANY),
    reference=arrays(np.float32, 3, elements=st.integers(-9, 9).map(float)),
    exponent=st.integers(-8, 8),
)
def test_row_5_any_attack_by_everybody_keeps_half_of_the_reference(
    rows, reference, exponent
):
    reference = reference * np.float32(10.0**exponent)
    step, r = wide(calibrate(rows, reference, 0.5), reference)
    size = np.linalg.norm(r)
    assert np.linalg.norm(step) <= size * (1 + 1e-5)
    assert step @ r >= size**2 * (0.5 - 1e-5)


@given(
    rows=arrays(np.float32, (6, 3), elements=st.integers(-9, 9).map(float)),
    reference=arrays(np.float32, 3, elements=st.integers(1, 9).map(float)),
    who=arrays(bool, 6),
    exponent=st.integers(-6, 6),
)
def test_row_14_scale_attacks_change_nothing(rows, reference, who, exponent):
    base = np.asarray(calibrate(rows, reference, 0.5))
    scale = np.where(who, np.float32(10.0**exponent), np.float32(1))
    scaled = calibrate(rows * scale[:, None], reference, 0.5)
    close(scaled, base, 1e-5 * np.linalg.norm(reference))


# --- As a link and an algorithm -----------------------------------------------------


def test_absent_rows_and_weights():
    g, r = np.float32(normal(5, 4)), np.float32(normal(4))
    mask = np.array([1, 0, 1, 1, 0], bool)
    g[1] = np.nan
    close(calibrate(g, r, 0.3, {"mask": mask}), calibrate(g[mask], r, 0.3), 1e-6)
    weights = np.float32([2, 0, 1, 0, 3])
    weighted = calibrate(g, r, 0.3, {"weights": weights})
    repeated = np.repeat(g, weights.astype(int), axis=0)
    close(weighted, calibrate(repeated, r, 0.3), 1e-6)
    nobody = calibrate(g, r, 0.3, {"mask": np.zeros(5, bool)})
    assert np.all(np.isnan(nobody))


def test_stores_no_copy_of_the_updates():
    rows = jax.ShapeDtypeStruct((20, 200_000), jnp.float32)
    reference = jax.ShapeDtypeStruct((200_000,), jnp.float32)
    lowered = jax.jit(lambda x, r: calibrate(x, r, 0.5)).lower(rows, reference)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 800_000


def test_sharded_over_four_devices():
    mesh = sharding.client_mesh()
    assert mesh.size == 4
    rows, r = np.float32(normal(8, 16)), np.float32(normal(16))
    whole = calibrate(rows, r, 0.5)
    columns = jax.device_put(rows, NamedSharding(mesh, P(None, "clients")))
    for spread in (sharding.shard_clients(rows, mesh), columns):
        close(calibrate(spread, r, 0.5), whole, 1e-6)


def test_numbers_may_be_traced():
    shards, root = shards_and_root()

    def final(lr, c, f):
        sim = jaxfed.simulate(
            br_drag(lr, strength=c, local_work=WORK),
            7,
            num_byzantine=f,
            attack=attacks.sign_flip(),
        )
        state, _ = sim.run(sim.init(PROBLEM.params, 0), shards, 3, root)
        return toys.ravel(sim.model(state))

    numbers = np.float32([1, 0.5]), np.float32([0.5, 0.2]), np.int32([0, 4])
    together = quick_jit(jax.vmap(final))(*numbers)
    close(together[1], quick_jit(lambda: final(0.5, 0.2, 4))(), 1e-6)
    assert np.any(np.abs(together[0] - together[1]) > 1e-3)


def test_is_one_optimizer_too():
    optimizer = jaxfed.as_optimizer(br_drag(0.5, strength=0.3), 4)
    g, r = np.float32(normal(4, 3)), np.float32(normal(3))
    update = quick_jit(optimizer.update)
    step, _ = update(g, optimizer.init(jnp.zeros(3)), jnp.zeros(3), reference=r)
    expected = [drag_oracle.br_drag_row(x, r, 0.3) for x in wide(g)[0]]
    close(step, -0.5 * np.mean(expected, axis=0), 1e-6)


def test_row_25_diagnostics():
    g, r = normal(6, 5), normal(5)
    byzantine = np.arange(6) >= 4
    with jax.enable_x64(True):
        step, _, info = observe(g, r, 0.5, byzantine)
    cosines = np.array([drag_oracle.cosine(x, r) for x in g])
    rho = np.linalg.norm(r) / np.linalg.norm(g, axis=1)
    seen = info.details
    for name, value in {
        "cosine_mean": cosines.mean(),
        "divergence_max": 0.5 * (1 - cosines.min()),
        "reference_norm": np.linalg.norm(r),
        "step_ratio": np.linalg.norm(step) / np.linalg.norm(g.mean(0)),
        "byzantine_share": 1 / 3,  # w
        "byzantine_cosine": cosines[4:].sum() / 6,  # x
        "honest_cosine": cosines[:4].sum() / 6,  # y
        "rho_min": rho[:4].min(),  # p of A3
        "rho_max": rho[:4].max(),  # q
        "rho": (cosines * rho)[:4].sum() / 6,
    }.items():
        close(seen[name], value, 1e-12)
    close(info.weights, (1 - 0.5 * (1 - cosines)) * rho / 6, 1e-12)
    # A4, that rho is in [0, (1 - w) q], is a check on the metrics.
    rho, w, q = (float(seen[k]) for k in ("rho", "byzantine_share", "rho_max"))
    assert rho <= (1 - w) * q


# --- Errors -------------------------------------------------------------------------


def test_reference_is_required_and_shaped_like_an_update():
    rule, g = calibrated_to_reference(), np.ones((3, 2), np.float32)
    for wanting in (rule.update, rule.inspect):
        with pytest.raises(ValueError, match=r"br_drag needs reference=.*pass root="):
            wanting(g, FIRST)
    with pytest.raises(ValueError, match="reference must be shaped like params"):
        rule.update(g, FIRST, reference=np.ones(3))
    with pytest.raises(ValueError, match="reference must have the structure"):
        rule.update({"a": g}, FIRST, reference=np.ones(2))
    sim = jaxfed.simulate(br_drag(local_work=WORK), 7)
    with pytest.raises(ValueError, match="pass root=, a Shard without client axis"):
        sim.step(sim.init(PROBLEM.params, 0), shards_and_root()[0])
    assert br_drag.needs.local_steps and br_drag.needs.root_data


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": -0.1}, "strength must satisfy 0 <= strength <= 1"),
        ({"strength": 1.5}, "strength must satisfy .* got strength=1.5"),
        ({"learning_rate": -1.0}, "learning_rate must be a finite number > 0"),
    ],
)
def test_values_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        br_drag(**options)
