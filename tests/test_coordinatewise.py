# SPDX-License-Identifier: Apache-2.0
"""Coordinate-wise rules against float64 loops, and the order statistics under them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from toys import quick_jit

from jaxfed import aggregators, reductions
from jaxfed.reductions import _sorted

# --- the rules again, from their definitions ---------------------------------------


def average(values):
    fine = values and all(math.isfinite(v) for v in values)
    return math.fsum(values) / len(values) if fine else math.nan


def middle_of(column, middle="mean"):
    n = len(column)
    low = (n - 1) // 2
    return average(column[low : low + 1 if middle == "lower" else n // 2 + 1])


def nearest(column, centre, keep):
    """Average the ``keep`` values nearest the centre, the lower of two equally near."""
    if not math.isfinite(centre):
        return math.nan
    return average(sorted(column, key=lambda v: (abs(v - centre), v))[:keep])


def columns(x):
    return [
        sorted(v if math.isfinite(v) else math.inf for v in column)
        for column in np.asarray(x, np.float64).T.tolist()
    ]


def meamed(x, f, middle="mean"):
    return [nearest(c, middle_of(c, middle), len(c) - f) for c in columns(x)]


def phocas(x, f):
    return [nearest(c, average(c[f : len(c) - f]), len(c) - f) for c in columns(x)]


def sign_majority(x, f):
    votes = [sum((v > 0) - (v < 0) for v in c) for c in columns(x)]
    return [(v > 0) - (v < 0) for v in votes]


ORACLES = {
    "median": lambda x, f: [middle_of(c) for c in columns(x)],
    "lower_median": lambda x, f: [middle_of(c, "lower") for c in columns(x)],
    "trimmed_mean": lambda x, f: [average(c[f : len(c) - f]) for c in columns(x)],
    "meamed": meamed,
    "lower_meamed": functools.partial(meamed, middle="lower"),
    "phocas": phocas,
    "sign_majority": sign_majority,
}
RULES = {
    "median": aggregators.median,
    "lower_median": functools.partial(aggregators.median, middle="lower"),
    "trimmed_mean": aggregators.trimmed_mean,
    "meamed": aggregators.meamed,
    "lower_meamed": functools.partial(aggregators.meamed, middle="lower"),
    "phocas": aggregators.phocas,
    "sign_majority": aggregators.sign_majority,
}
# The rules whose numbers depend on f, and those that follow shifts of the rows.
BUDGETED = ["trimmed_mean", "meamed", "lower_meamed", "phocas"]
SHIFTING = ["median", "lower_median", *BUDGETED]


def aggregate(rule, updates, **extra):
    return rule.update(updates, rule.init(None), None, **extra)[0]


@functools.cache
def compiled(name, f):
    return quick_jit(functools.partial(aggregate, RULES[name](f)))


@functools.cache
def traced(name):
    return quick_jit(lambda x, f, mask=None: aggregate(RULES[name](f), x, mask=mask))


def rows(n, d, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) * (1 + np.arange(n)[:, None] / n) + rng.normal(size=d)
    return x.astype(np.float32)


def close(actual, expected, x):
    tol = oracles.tolerance(x)
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), np.asarray(expected), rtol=0, atol=tol
    )


def kinds(n, d):
    x, rng = rows(n, d), np.random.default_rng(1)
    yield x
    yield rng.integers(-3, 4, (n, d)).astype(np.float32)
    yield x[rng.integers(0, (n + 1) // 2, n)]
    yield (1e3 + 1e-2 * rng.normal(size=(n, d))).astype(np.float32)
    yield np.ones((n, d), np.float32)


# --- values ------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "f"), [(1, 0), (5, 2), (20, 4), (36, 17), (70, 20)])
@pytest.mark.parametrize("name", RULES)
def test_matches_the_oracle(name, n, f):
    """Python f, traced f, and a mask that hides rows of NaN."""
    for x in kinds(n, 11):
        expected = ORACLES[name](x, f)
        close(compiled(name, f)(x), expected, x)
        close(traced(name)(x, f), expected, x)
    hidden = np.concatenate([x[:1] * np.nan, x, x[:2] * np.nan])
    mask = np.isfinite(hidden[:, 0])
    if n <= 20:
        close(compiled(name, f)(hidden, mask=mask), expected, x)
    close(traced(name)(hidden, f, mask), expected, x)


@pytest.mark.parametrize(("n", "f"), [(64, 9), (65, 32), (1000, 250)])
@pytest.mark.parametrize("name", RULES)
def test_many_rows_and_several_blocks_of_columns(name, n, f):
    x = rows(n, 2 * 256 + 17)
    x[:f] = 1e30
    near, out = x[f:], np.asarray(compiled(name, f)(x))
    some = np.r_[:5, 250:260, 510:529]
    close(out[some], ORACLES[name](x[:, some], f), near)


@pytest.mark.parametrize("n", [6, 40])
@pytest.mark.parametrize("middle", ["mean", "lower"])
def test_the_mean_around_the_median_for_every_number_dropped(n, middle):
    x = rows(n, 7)
    run = quick_jit(
        lambda x, drop: reductions.mean_around_median(x, drop, middle=middle)
    )
    for drop in range(n):
        column = [nearest(c, middle_of(c, middle), n - drop) for c in columns(x)]
        if drop % 5 == 0:
            static = reductions.mean_around_median(x, drop, middle=middle)
            close(static, column, x)
        close(run(x, drop), column, x)
    assert np.all(np.isnan(run(x, n))) and np.all(np.isnan(run(x, -1)))


@pytest.mark.parametrize("n", [4, 68])
def test_of_two_values_equally_near_the_lower_is_taken(n):
    x = np.repeat([0.0, 1.0, 3.0, 4.0], n // 4).astype(np.float32)[:, None]
    for drop, expected in ((1, 4 / 3), (2, 2.0), (3, 1.0)):
        out = reductions.mean_around_median(x, drop * n // 4)
        np.testing.assert_allclose(out, expected, rtol=1e-6)


@pytest.mark.parametrize("n", [1, 20, 65, 100, 257, 1000])
def test_order_statistics_are_those_of_a_sort(n):
    """Bit for bit but for the sign of 0, tiny and huge values included."""
    pool = [0.0, -0.0, 1e-45, -1e-45, 1e-39, 2e-38, 1.0, -1.0, np.inf, 3.4e38, -3.4e38]
    rng = np.random.default_rng(n)
    x = np.concatenate(
        [rng.choice(np.array(pool, np.float32), (n, 290)), rows(n, 290)], axis=1
    )
    expected = np.sort(x, axis=0)

    @quick_jit
    def select(x, low, high):
        kernel = functools.partial(_sorted._select, ranks=(low, high))
        return _sorted._by_columns(kernel, [x])[0]

    for low in range(0, n, n // 9 + 1):
        high = n - 1 - low // 2
        first, last = select(x, low, high)
        np.testing.assert_array_equal(first, expected[low])
        np.testing.assert_array_equal(last, expected[high])


def test_order_statistics_of_float64():
    x = np.random.default_rng(0).normal(size=(70, 9)) * 1e-300
    with jax.enable_x64(True):
        found = _sorted._select(jnp.asarray(x), [0, 33, 69])
    np.testing.assert_array_equal(found, np.sort(x, axis=0)[[0, 33, 69]])


@pytest.mark.parametrize("name", ["median", "meamed"])
def test_other_backends_sort(name, monkeypatch):
    x = rows(70, 300)
    expected = compiled(name, 9)(x)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    close(quick_jit(functools.partial(aggregate, RULES[name](9)))(x), expected, x)


@pytest.mark.parametrize(
    ("n", "dtype"), [(7, "bfloat16"), (7, "float16"), (70, "bfloat16")]
)
@pytest.mark.parametrize("name", ["trimmed_mean", "meamed", "sign_majority"])
def test_half_precision_is_computed_in_float32(name, n, dtype):
    x = jnp.asarray(rows(n, 40), dtype)
    out = compiled(name, 2)(x)
    assert out.dtype == x.dtype
    wide = ORACLES[name](np.asarray(x, np.float64), 2)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(out, np.float64), wide, rtol=eps, atol=1e-5)


# --- bad rows ----------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0, "copies"])
@pytest.mark.parametrize(("n", "f"), [(7, 3), (36, 17), (70, 20)])
@pytest.mark.parametrize("name", RULES)
def test_f_bad_rows(name, n, f, value):
    x = rows(n, 11)
    bad = np.random.default_rng(3).choice(n, f, replace=False)
    x[bad] = x[0] if value == "copies" else value
    expected = ORACLES[name](x, f)
    assert np.all(np.isfinite(expected))
    near = x[np.isfinite(x).all(1) & (np.abs(x) < 1e9).all(1)]
    close(compiled(name, f)(x), expected, near)
    close(traced(name)(x, f), expected, near)


@pytest.mark.parametrize("n", [9, 70])
@pytest.mark.parametrize("name", BUDGETED)
def test_more_than_f_non_finite_values_give_nan(name, n):
    x = rows(n, 3)
    x[[1, 4, 5], 0] = np.nan, np.inf, -np.inf
    x[[2, 6], 1] = np.inf, np.nan
    out = np.asarray(compiled(name, 2)(x))
    assert np.isnan(out[0]) and np.all(np.isfinite(out[1:]))


def test_a_non_finite_value_votes_for_plus():
    x = np.array([[np.nan, -np.inf], [-1, 0], [0, 0]], np.float32)
    np.testing.assert_array_equal(reductions.sign_majority(x), [0, 1])


# --- invariances -------------------------------------------------------------------


@pytest.mark.parametrize("n", [8, 70])
@pytest.mark.parametrize("name", RULES)
def test_permutation_scale_and_translation(name, n):
    x, run = rows(n, 12), compiled(name, 2)
    base = np.asarray(run(x))
    close(run(x[np.random.default_rng(3).permutation(n)]), base, x)
    for scale in (2.0**-40, 2.0**20):
        factor = 1 if name == "sign_majority" else scale
        np.testing.assert_array_equal(run(x * scale), base * factor)
    if name in SHIFTING:
        shift = np.linspace(-8, 8, 12, dtype=np.float32)
        close(run(x + shift[None]), base + shift, np.concatenate([x, x + shift]))


SIX_SHAPES = [(3, 1, 1), (4, 1, 3), (5, 2, 8), (8, 2, 8), (12, 5, 2), (66, 20, 2)]


@st.composite
def problems(draw):
    """Small integers, so that distances and ties are exact, and up to f bad rows."""
    n, f, d = draw(st.sampled_from(SIX_SHAPES))
    x = draw(arrays(np.float32, (n, d), elements=st.integers(-9, 9).map(float)))
    values = st.sampled_from([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0])
    for row in draw(st.permutations(range(n)))[: draw(st.integers(0, f))]:
        x[row] = draw(values)
    return x, f


@pytest.mark.parametrize("name", RULES)
@given(problem=problems())
def test_any_values_any_bad_rows(name, problem):
    x, f = problem
    expected = ORACLES[name](x, f)
    assert np.all(np.isfinite(expected))
    np.testing.assert_allclose(compiled(name, f)(x), expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(traced(name)(x, f), expected, rtol=0, atol=1e-4)


# --- who is present, how many are Byzantine ----------------------------------------


@pytest.mark.parametrize("n", [8, 70])
@pytest.mark.parametrize("name", BUDGETED)
def test_vmapped_budget(name, n):
    x, budgets = rows(n, 5), [-1, 0, 1, 3, (n - 1) // 2, n // 2, n - 1, n]
    outs = quick_jit(jax.vmap(traced(name), (None, 0)))(x, jnp.array(budgets))
    for f, out in zip(budgets, outs, strict=True):
        if 0 <= 2 * f < n:
            close(out, ORACLES[name](x, f), x)
        else:
            assert np.all(np.isnan(out))


@pytest.mark.parametrize("n", [8, 70])
@pytest.mark.parametrize("name", ["median", "meamed", "sign_majority"])
def test_nobody_present_gives_nan(name, n):
    assert np.all(np.isnan(compiled(name, 2)(rows(n, 3), mask=np.zeros(n, bool))))


@pytest.mark.parametrize("name", BUDGETED)
def test_a_python_f_that_the_mask_makes_too_large_gives_nan(name):
    assert np.all(np.isnan(compiled(name, 3)(rows(8, 3), mask=np.arange(8) < 6)))


# --- gradients ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n"),
    [*((name, 7) for name in RULES), ("trimmed_mean", 66), ("meamed", 66)],
)
def test_gradients_agree_with_finite_differences(name, n):
    rng = np.random.default_rng(7)
    x, direction = rng.normal(size=(n, 3)), rng.normal(size=3)
    with jax.enable_x64(True):

        @quick_jit
        def value(x):
            return jnp.vdot(direction, aggregate(RULES[name](2), x))

        grad = np.asarray(quick_jit(jax.grad(value))(x))
        steps = 1e-6 * np.eye(3 * n).reshape(-1, n, 3)[:: n // 7]
        slopes = quick_jit(jax.vmap(lambda s: (value(x + s) - value(x - s)) / 2e-6))
        np.testing.assert_allclose(
            grad.reshape(-1)[:: n // 7], slopes(steps), rtol=0, atol=1e-7
        )


@pytest.mark.parametrize("n", [7, 70])
@pytest.mark.parametrize("name", RULES)
def test_gradients_are_finite_and_bad_rows_have_none(name, n):
    grad = quick_jit(jax.grad(lambda x: jnp.sum(compiled(name, 2)(x) ** 2)))
    for value in (np.nan, np.inf, -np.inf, 1e30, -1e30):
        x = rows(n, 4)
        x[[1, 5]] = value
        slopes = np.asarray(grad(x))
        assert np.all(np.isfinite(slopes)) and not np.any(slopes[[1, 5]])


@pytest.mark.parametrize("n", [4, 68])
def test_equal_values_share_their_places(n):
    """Of values equally near, all lower ones are taken before upper ones."""
    m = n // 4
    x = np.repeat([0.0, 1.0, 3.0, 4.0], m).astype(np.float32)
    weights = _sorted.nearest_weights(x, n // 2 - 1, n // 2 + 1, 3 * m)
    expected = np.repeat([1.0, 1.0, 1.0, 0.0], m) / (3 * m)
    np.testing.assert_allclose(weights, expected, atol=1e-7)
    weights = _sorted.nearest_weights(x, n // 2 - 1, n // 2 + 1, 3 * m + m // 2)
    expected[-m:] = (m // 2) / m
    expected[:-m] = 1
    np.testing.assert_allclose(weights, expected / (3 * m + m // 2), atol=1e-7)


# --- inspect -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("lower_median", [[0], [1], [2], [9]], [0, 1, 0, 0]),
        ("meamed", [[0], [1], [2], [9]], [1 / 3, 1 / 3, 1 / 3, 0]),
        ("meamed", [[0, 9], [1, 1], [2, 0], [9, 2]], [1 / 6, 1 / 3, 1 / 3, 1 / 6]),
        ("phocas", [[0], [8], [9], [np.nan]], [1 / 3, 1 / 3, 1 / 3, 0]),
        ("sign_majority", [[1], [2], [-1], [np.inf]], [1 / 3, 1 / 3, 0, 1 / 3]),
        (
            "sign_majority",
            [[1, 1], [-1, 1], [0, 0], [0, 1]],
            [2 / 7, 2 / 7, 1 / 7, 2 / 7],
        ),
    ],
)
def test_inspect_by_hand(name, x, expected):
    rule = RULES[name](1)
    byzantine = np.arange(4) == 3
    info = rule.inspect(np.array(x, np.float32), byzantine=byzantine)
    np.testing.assert_allclose(info.weights, expected, atol=1e-6)
    np.testing.assert_allclose(info.influence, expected[3], atol=1e-6)


@pytest.mark.parametrize("n", [9, 70])
@pytest.mark.parametrize("name", SHIFTING)
def test_inspect_weights_give_the_aggregate_of_one_column(name, n):
    x, mask = rows(n, 1), np.arange(n) != 3
    x[4] = np.nan
    info = quick_jit(RULES[name](2).inspect)(x, None, mask=mask)
    assert info.weights[3] == 0 and abs(float(info.weights.sum()) - 1) < 1e-6
    out = compiled(name, 2)(x, mask=mask)
    np.testing.assert_allclose(info.weights @ np.nan_to_num(x), out, atol=1e-5)


# --- memory and errors -------------------------------------------------------------


@pytest.mark.parametrize("n", [6, 70])
@pytest.mark.parametrize("name", RULES)
def test_a_tree_is_its_leaves(name, n):
    """Leaves smaller and larger than a block, empty ones, scalars, other dtypes."""
    x = rows(n, 700)
    tree = {"a": x[:, :300], "b": x[:, 300], "c": (x[:, 301:303], x[:, :0])}
    tree |= {"d": x[:, 303:].reshape(n, 397, 1), "e": jnp.asarray(x[:, :5], "bfloat16")}
    run = compiled(name, 2)
    out = run(tree)
    flat = [out["a"], out["b"][None], out["c"][0], out["d"][:, 0]]
    close(np.concatenate(flat), run(x), x)
    assert out["c"][1].shape == (0,) and out["e"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(out["e"], run(tree["e"]))
    if (name, n) != ("meamed", 6):
        return
    grad = quick_jit(jax.grad(lambda u: sum(map(jnp.sum, jax.tree.leaves(run(u))))))
    alone = grad(x)
    np.testing.assert_allclose(grad(tree)["d"][..., 0], alone[:, 303:], atol=1e-6)


@pytest.mark.parametrize("name", ["trimmed_mean", "meamed"])
def test_a_tree_compiles_to_one_loop(name):
    """A loop for each of 30 leaves would take 30 times as long to compile."""
    tree = [jnp.zeros((70, d)) for d in range(1, 600, 20)]
    jaxpr = str(jax.make_jaxpr(functools.partial(aggregate, RULES[name](5)))(tree))
    one = str(jax.make_jaxpr(functools.partial(aggregate, RULES[name](5)))(tree[:1]))
    assert jaxpr.count("while") + jaxpr.count("scan") == (
        one.count("while") + one.count("scan")
    )


@pytest.mark.parametrize("n", [20, 64, 100])
@pytest.mark.parametrize("name", ["median", "trimmed_mean", "meamed", "sign_majority"])
def test_no_copy_of_the_updates_is_stored(name, n):
    x = jax.ShapeDtypeStruct((n, 50_000), jnp.float32)
    compiled_rule = compiled(name, 4).lower(x).compile()
    assert compiled_rule.memory_analysis().temp_size_in_bytes < 0.15 * 4 * n * 50_000


def test_errors_name_the_argument():
    x = rows(4, 3)
    for reduce in (reductions.meamed, reductions.phocas):
        with pytest.raises(ValueError, match=r"0 <= f < n/2, got f=2, n=4"):
            reduce(x, 2)
        with pytest.raises(TypeError, match="mask must be bool"):
            reduce(x, 1, mask=np.ones(4))
        with pytest.raises(TypeError, match="num_byzantine must be a Python int"):
            reduce(x, 0.5)
    for build in (
        lambda m: aggregators.median(middle=m),
        lambda m: aggregators.meamed(1, middle=m),
        lambda m: reductions.median(x, middle=m),
        lambda m: reductions.meamed(x, 1, middle=m),
        lambda m: reductions.mean_around_median(x, 1, middle=m),
    ):
        with pytest.raises(ValueError, match="middle must be one of 'mean', 'lower'"):
            build("upper")
    with pytest.raises(ValueError, match="drop must be at most 3, got drop=4"):
        reductions.mean_around_median(x, 4)
    with pytest.raises(ValueError, match=r"0 <= f < n/2, got f=2, n=4"):
        aggregate(aggregators.sign_majority(2), x)
    with pytest.raises(ValueError, match="phocas has no weighted form"):
        aggregate(aggregators.phocas(1), x, weights=np.ones(4))
    with pytest.raises(TypeError, match="mask must be bool"):
        reductions.sign_majority(x, mask=np.ones(4))
