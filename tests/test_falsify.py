# SPDX-License-Identifier: Apache-2.0
"""Claimed sensitivities against a search for inputs that exceed them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toys

import jaxfed
from jaxfed import aggregators, local
from jaxfed.privacy.falsify import falsify

F, D, C = 1, 3, 0.8
GM = aggregators.geometric_median(iterations=40)
RULES = {  # rule, n, share of the bound that is attained: replaced, set to zero
    "mean": (aggregators.mean(), 5, 1, 1),
    "trimmed_mean": (aggregators.trimmed_mean(F), 5, 1, 1),
    "median": (aggregators.median(), 5, 1, 1),
    "median_even": (aggregators.median(), 4, 1, 1),
    "geometric_median": (GM, 5, 1, 0.5),
    "krum": (aggregators.krum(F), 5, 1, 1),
    "centered_clipping": (aggregators.centered_clipping(clip_norm=0.3), 5, 1, 1),
}


def search(rule, n, radius, key=0, *, bound, dim=D, **options):
    """Run :func:`falsify` in one program and float64."""

    def go(key, bound):
        return falsify(rule, n, radius, dim=dim, bound=bound, key=key, **options)

    with jax.enable_x64(True):
        result = toys.quick_jit(go)(jax.random.key(key), bound)
    return jax.tree.map(np.asarray, result)


@functools.cache
def found(name, relation):
    rule, n, *_ = RULES[name]
    budget = {"trials": 36, "steps": 3} if name == "geometric_median" else {}
    bound = rule.sensitivity.bound(n, C, relation=relation)
    options = dict(bound=bound, relation=relation, num_byzantine=F, **budget)
    return search(rule, n, C, **options)


@pytest.mark.parametrize("relation", ["replace", "zero"])
@pytest.mark.parametrize("name", RULES)
def test_byzuldp_row_10_no_input_exceeds_the_bound_and_some_attain_it(name, relation):
    worst = found(name, relation)
    share = RULES[name][2 if relation == "replace" else 3]
    tolerance = 1e-3 if name == "geometric_median" else 1e-5
    assert worst.ratio <= 1 + tolerance
    np.testing.assert_allclose(worst.ratio, share, rtol=1e-3)
    # The pair is what it says: one row differs, and is in the ball.
    x, y = np.asarray(worst.inputs), np.asarray(worst.neighbour)
    (row,) = np.flatnonzero(np.any(x != y, axis=1))
    assert np.linalg.norm([x[row], y[row]], axis=1).max() <= C * (1 + 1e-12)
    assert np.all(y[row] == 0) == (relation == "zero")
    outside = np.linalg.norm(x, axis=1) > C * (1 + 1e-12)
    bounded = RULES[name][0].sensitivity.bounded_inputs
    assert outside.sum() <= (0 if bounded else F)
    np.testing.assert_allclose(worst.ratio, worst.moved / worst.bound)


@pytest.mark.parametrize("name", ["mean", "trimmed_mean", "median"])
def test_the_pair_found_moves_an_independent_rule_as_far(name):
    worst = found(name, "replace")
    rule = {
        "mean": oracles.mean,
        "trimmed_mean": lambda x: oracles.trimmed_mean(x, F),
        "median": oracles.median,
    }[name]
    a, b = (rule(np.asarray(x)) for x in (worst.inputs, worst.neighbour))
    np.testing.assert_allclose(np.linalg.norm(a - b), worst.moved, rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "wrong", "ratio"),
    [
        ("mean", C / 5, 2),  # of a row set to zero
        ("trimmed_mean", 2 * C / 5, 5 / 3),  # of the mean
        ("median", C, 2),  # of an even number of clients
        ("krum", 2 * C / 5, 5),
        ("centered_clipping", 0.3 / 5, 2),
    ],
)
def test_wrong_bounds_are_falsified(name, wrong, ratio):
    np.testing.assert_allclose(found(name, "replace").moved / wrong, ratio, rtol=1e-6)


def test_a_row_set_to_zero_moves_the_geometric_median_by_more_than_itself():
    # Two equal crowds leave the place between them to two more rows, whose pulls along
    # the line balance nearer to the one that is nearer to the line.
    w, s, q = np.sqrt(1 - 0.4**2), 0.3, 0.1
    x = np.array([[-w, s]] * 20 + [[w, s]] * 20 + [[-w, s + q], [w, s]])
    y = np.where(np.arange(42)[:, None] < 41, x, 0)
    rule = aggregators.geometric_median(iterations=10_000, tolerance=0.0)
    with jax.enable_x64(True):
        run = toys.quick_jit(jax.vmap(lambda x: rule.update(x, rule.init(x[0]))[0]))
        a, b = np.asarray(run(np.stack([x, y])))
    assert 1.2 < np.linalg.norm(a - b) < rule.sensitivity.bound(42, 1, relation="zero")


def test_printed_bounds_are_not_exceeded():
    for name, (rule, n, *_) in RULES.items():
        printed = rule.sensitivity.bound(n, C, dim=D, mode="paper")
        assert found(name, "replace").moved <= printed * (1 + 1e-5)


def test_noise_for_a_mean_under_a_sum():
    worst = search(lambda x: x.sum(0), 9, C, bound=2 * C / 9)
    np.testing.assert_allclose(worst.ratio, 9, rtol=1e-6)


def test_a_rule_does_not_keep_its_bound_behind_a_preaggregator():
    rule = jaxfed.make_aggregator("nnm+median", num_byzantine=F)
    bound = aggregators.median().sensitivity.bound(4, C)
    options = dict(bound=bound, num_byzantine=F, bounded_inputs=False)
    assert search(rule, 4, C, **options).ratio > 1.3


def test_a_centre_without_noise_adds_up_over_the_rounds():
    """Decision 4: 0.033 declared, 0.264 after ten rounds."""
    rule = aggregators.centered_clipping(clip_norm=1.0)

    def ten_rounds(x):
        def step(state, _):
            return rule.update(x, state)[::-1]

        return jax.lax.scan(step, rule.init(x[0]), length=10)[1][-1]

    bound = rule.sensitivity.bound(20, 0.33)
    np.testing.assert_allclose(bound, 0.033)
    options = dict(bound=bound, num_byzantine=19, bounded_inputs=False, steps=1)
    worst = search(ten_rounds, 20, 0.33, **options)
    np.testing.assert_allclose(worst.moved, 2 * 0.33 * (1 - 0.95**10), rtol=0.01)
    assert worst.ratio > 7.9


# --- Examples of one client ----------------------------------------------------------


def linear(params, batch):
    return batch @ params


@pytest.mark.parametrize(
    ("work", "relation", "ratio"),
    [
        (local.gradient(linear, clip_norm=C), "replace", 1),
        (local.gradient(linear, clip_norm=C), "zero", 1 / 2),
        (
            local.gradient(linear, clip_norm=C, reducer=aggregators.krum(1)),
            "replace",
            5,
        ),
        (local.local_sgd(linear, optax.sgd(1.0), steps=4, clip_norm=C), "replace", 4),
    ],
    ids=["mean", "mean_zero", "reducer", "local_sgd"],
)
def test_how_far_one_example_moves_a_message(work, relation, ratio):
    def message(examples):
        shard = jaxfed.Shard(examples, jnp.int32(5))
        return work({"params": jnp.zeros(D)}, shard, jax.random.key(0))[0]

    options = dict(bound=2 * C / 5, relation=relation, trials=64, steps=10)
    worst = search(message, 5, 10 * C, **options)
    np.testing.assert_allclose(worst.ratio, ratio, rtol=1e-6)


# --- The search itself ---------------------------------------------------------------


def test_gradient_steps_go_beyond_the_starts():
    direction = jnp.array([0.3, -0.7, 0.2, 0.5, -0.1, 0.35])
    direction /= jnp.linalg.norm(direction)

    def rule(x):
        return jnp.tanh(x @ direction) @ jnp.arange(1.0, 5)

    results = [
        search(rule, 4, 1.0, dim=6, bound=8 * np.tanh(1), trials=8, steps=steps)
        for steps in (0, 60)
    ]
    start, end = (float(r.ratio) for r in results)
    assert start < 0.9 and 0.999 < end <= 1 + 1e-6
    assert [r.how.endswith("then gradient steps") for r in results] == [False, True]


def test_a_given_reference_is_the_only_one():
    rule = aggregators.centered_clipping(clip_norm=0.3)
    bound = rule.sensitivity.bound(4, C, relation="zero")
    options = dict(bound=bound, relation="zero", trials=64)
    worst = search(rule, 4, C, reference=[0.0, 0, 0], **options)
    # From half way to the row it would move by 2 tau, from 0 by tau.
    np.testing.assert_allclose(worst.moved, 0.3 / 4, rtol=1e-6)
    np.testing.assert_array_equal(worst.reference, 0)


def test_trees_and_keys():
    def rule(x):
        return {"a": x[0], "b": jnp.where(x[1, :1] > 0, 2.0, 0)}

    find = toys.quick_jit(lambda key: falsify(rule, 2, 1.0, dim=2, bound=1.0, key=key))
    one, same, other = (find(jax.random.key(k)) for k in (0, 0, 1))
    np.testing.assert_allclose([one.ratio, other.ratio], 2, rtol=1e-6)
    np.testing.assert_array_equal(one.inputs, same.inputs)
    assert np.any(one.inputs != other.inputs)


def test_what_is_no_number_has_moved_infinitely_far():
    worst = search(lambda x: x.sum(0) / 0 * 0, 2, 1.0, bound=1.0, trials=2, steps=0)
    assert worst.ratio == np.inf
    assert worst.how in ("random start", "extremal start")


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"relation": "remove"}, "relation must be one of 'replace', 'zero'"),
        ({"bound": 0.0}, "bound must be a finite number > 0"),
        ({"radius": -1.0}, "radius must be"),
        ({"learning_rate": 0.0}, "learning_rate must be"),
        ({"num_byzantine": 3}, "num_byzantine must be at most 2"),
        ({"trials": 1}, "trials must be at least 2"),
        ({"steps": -1}, "steps must be at least 0"),
        ({"dim": 0}, "dim must be at least 1"),
        ({"reference": [1.0]}, "reference must have dim=2 entries"),
    ],
)
def test_errors(over, message):
    options = dict(radius=1.0, dim=2, bound=1.0, key=0) | over
    with pytest.raises(ValueError, match=message):
        falsify(aggregators.mean(), 3, **options)


def test_wrong_kinds():
    with pytest.raises(TypeError, match="rule must be an aggregator or a function"):
        falsify("mean", 3, 1.0, dim=2, bound=1.0, key=0)
    with pytest.raises(TypeError, match="num_clients must be a Python int"):
        falsify(aggregators.mean(), 3.0, 1.0, dim=2, bound=1.0, key=0)
