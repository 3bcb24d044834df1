# SPDX-License-Identifier: Apache-2.0
"""How far one client moves a rule; rows of the checklist of ByzULDP in the names."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import jaxfed
from jaxfed import aggregators, naming
from jaxfed.algorithms._byzuldp import byzuldp
from jaxfed.privacy import sensitivity

N, F, D, C = 9, 2, 3, 0.8
RULES = {
    "mean": aggregators.mean(),
    "trimmed_mean": aggregators.trimmed_mean(F),
    "median": aggregators.median(),
    "median_lower": aggregators.median(middle="lower"),
    "geometric_median": aggregators.geometric_median(),
    "krum": aggregators.krum(F),
    "krum_paper": aggregators.krum(F, neighbors="n-f-1"),
    "centered_clipping": aggregators.centered_clipping(clip_norm=0.5),
    "centered_clipping_thrice": aggregators.centered_clipping(
        clip_norm=0.5, iterations=3
    ),
    "centered_clipping_wide": aggregators.centered_clipping(clip_norm=50.0),
}


def run(rule):
    return lambda x: rule.update(x, rule.init(x[0]))[0]


# --- Rows 8 and 9: the trimmed mean --------------------------------------------------


@pytest.mark.parametrize("mode", ["random", "extremal"])
def test_byzuldp_row_8_trimmed_mean_is_lipschitz(mode):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, N, D)) * rng.choice([0.1, 1, 10], (500, N, 1))
    y = x.copy()
    y[:, 0] = rng.normal(size=(500, D)) * rng.choice([0.1, 1, 10], (500, 1))
    if mode == "extremal":  # f others at each end, and the client from end to end
        x[:], y[:] = 0, 0
        x[:, 1 : 1 + F], x[:, 1 + F : 1 + 2 * F] = -C, C
        y[:], x[:, 0], y[:, 0] = x, -C, C
    both = toys.quick_jit(jax.vmap(run(RULES["trimmed_mean"])))
    moved = np.linalg.norm(
        np.float64(both(np.float32(x)) - both(np.float32(y))), axis=1
    )
    limit = np.linalg.norm(x[:, 0] - y[:, 0], axis=1) / (N - 2 * F)
    assert np.all(moved <= limit * (1 + 1e-5) + 1e-6)
    if mode == "extremal":  # in each of D coordinates; along one, 2 C / (n - 2f)
        bound = RULES["trimmed_mean"].sensitivity.bound(N, C)
        assert bound == 2 * C / (N - 2 * F)
        np.testing.assert_allclose(moved / math.sqrt(D), bound, rtol=1e-6)


def test_byzuldp_row_8_both_forms():
    for n, f in [(9, 2), (1000, 250), (7, 3), (5, 0)]:
        known = aggregators.trimmed_mean(f).sensitivity
        exact, printed = known.bound(n, C), known.bound(n, C, mode="paper")
        ratio = math.sqrt(1 + 4 * f**2 / n**2)
        np.testing.assert_allclose(printed / exact, ratio, rtol=1e-12)
        if f:
            nu = n / f - 2
            root = math.sqrt(1 + 4 * (2 + nu) ** 2 * f / (nu**2 * n))
            # Proposition 1 bounds the exact form, for every admissible nu.
            assert 2 * C / n * root >= exact
            np.testing.assert_allclose(
                2 * C / n * math.sqrt((n**2 + 4 * f**2) / (n - 2 * f) ** 2), printed
            )


def test_byzuldp_row_9_shape_in_one_input():
    others = np.sort(np.random.default_rng(1).normal(size=N - 1)).astype(np.float32)
    h = np.linspace(others[0] - 1, others[-1] + 1, 301).astype(np.float32)

    def trimmed(h):
        return run(RULES["trimmed_mean"])(jnp.append(others, h)[:, None])[0]

    value, slope = toys.quick_jit(jax.vmap(jax.value_and_grad(trimmed)))(h)
    low, high = others[F - 1], others[N - F - 1]  # a_f and a_(n-f), counted from 1
    inside = (low < h) & (h < high)
    assert 50 < inside.sum() < 250
    np.testing.assert_allclose(slope, np.where(inside, 1 / (N - 2 * F), 0), atol=1e-7)
    # Lemma 4: three pieces.
    pieces = [others[F - 1 : N - F - 1].sum(), others[F : N - F].sum()]
    middle = h + others[F : N - F - 1].sum()
    want = np.where(h < low, pieces[0], np.where(h > high, pieces[1], middle))
    np.testing.assert_allclose(value, want / (N - 2 * F), atol=1e-6)


# --- Row 10: all of them -------------------------------------------------------------

GOLDEN = {  # n = 1000, f = 250, beta = 0.85, C = 1, d = 26010: tight, paper
    "mean": (aggregators.mean(), 3.0e-4, 3.0e-4),
    "trimmed_mean": (aggregators.trimmed_mean(250), 6.0e-4, 6.70820e-4),
    "median": (aggregators.median(), 0.15, 48.383),
    "geometric_median": (aggregators.geometric_median(), 0.30, 0.30),
    "krum": (aggregators.krum(250), 0.30, 0.30),
    "centered_clipping": (
        aggregators.centered_clipping(clip_norm=10 / 0.9),
        3.0e-4,
        0.022222,
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_byzuldp_row_10_golden_numbers(name):
    rule, tight, paper = GOLDEN[name]

    def mechanism(mode):
        options = dict(rule=rule, num_clients=1000, key=0, clip_norm=1.0)
        return byzuldp(0.1, mode=mode, dim=26_010, **options).mechanism

    np.testing.assert_allclose(mechanism("tight").sensitivity(20), tight, rtol=1e-5)
    np.testing.assert_allclose(mechanism("paper").sensitivity(20), paper, rtol=2e-5)


@pytest.mark.parametrize(
    ("name", "n", "tight", "paper"),
    [
        ("mean", 9, 2 / 9, 2 / 9),
        ("trimmed_mean", 9, 2 / 5, 2 / 5 * math.sqrt(1 + 16 / 81)),
        ("median", 9, 2, 2 * math.sqrt(3)),
        ("median", 8, 1, 2 * math.sqrt(3)),
        ("median_lower", 8, 2, 2 * math.sqrt(3)),
        ("geometric_median", 9, 2, 2),
        ("krum", 9, 2, 2),
        ("centered_clipping", 9, 2 * 0.5 / 0.8 / 9, 2 * 0.5 / 0.8 / 9),
        ("centered_clipping_thrice", 9, 6 * 0.5 / 0.8 / 9, 6 * 0.5 / 0.8 / 9),
        ("centered_clipping_wide", 9, 2 / 9, 2 * 50 / 0.8 / 9),
    ],
)
def test_byzuldp_row_10_table_4(name, n, tight, paper):
    known = RULES[name].sensitivity
    np.testing.assert_allclose(known.bound(n, C), tight * C, rtol=1e-12)
    np.testing.assert_allclose(
        known.bound(n, C, dim=D, mode="paper"), paper * C, rtol=1e-12
    )
    needs_ball = name.startswith(("krum", "geometric"))
    assert known.bounded_inputs == needs_ball


def pairs(n, bounded, count, rng):
    """Inputs that differ in row 0, which is in the ball; hard ones among them."""
    x = rng.normal(size=(count, n, D))
    x *= (
        C
        * rng.choice([0.05, 0.5, 1.0], (count, n, 1))
        / np.linalg.norm(x, axis=2, keepdims=True)
    )
    line = rng.normal(size=(count, D))
    line *= C / np.linalg.norm(line, axis=1, keepdims=True)
    signs = rng.choice([-1, -0.02, 0, 0.02, 1], (count, n, 1))
    x = np.where(rng.random((count, 1, 1)) < 0.5, x, signs * line[:, None])
    hostile = rng.integers(0, 3, (count, 1)) > np.arange(n)[::-1]
    if not bounded:
        x = np.where(hostile[..., None], 100 * x, x)
    y = x.copy()
    x[:, 0], y[:, 0] = line, -line * rng.choice([1, 0.3], (count, 1))
    return x, y


@pytest.mark.parametrize("n", [9, 8])
@pytest.mark.parametrize("name", RULES)
def test_byzuldp_row_10_no_replacement_exceeds_the_tight_bound(name, n):
    rule = RULES[name]
    rng = np.random.default_rng(2)
    x, y = pairs(n, rule.sensitivity.bounded_inputs, 1000, rng)
    # Rows around a point, as behind an anchor: no sensitivity sees a shift.
    centre = rng.normal(size=(1000, D))
    options = [x + centre[:, None], y + centre[:, None], centre]

    def one(x, y, centre):
        state = rule.init(centre)
        outs = [rule.update(z, state, reference=centre)[0] for z in (x, y)]
        return outs[0] - outs[1]

    with jax.enable_x64(True):
        moved = np.asarray(toys.quick_jit(jax.vmap(one))(*map(jnp.asarray, options)))
    worst = np.linalg.norm(moved, axis=1).max()
    bound = rule.sensitivity.bound(n, C)
    assert worst <= bound * (1 + 1e-6)
    # Nor is the bound idle: what the search finds is not far below it.
    assert worst > 0.3 * bound


@pytest.mark.parametrize(
    ("rule", "tolerance"),
    [
        (aggregators.krum(1, neighbors="n-f-1"), 1e-6),
        (aggregators.median(), 1e-6),
        (aggregators.geometric_median(), 1e-3),
    ],
    ids=["krum", "median", "geometric_median"],
)
def test_byzuldp_row_10_examples_1_to_3(rule, tolerance):
    one = C * np.array([1, 1, 1, -1, -1])[:, None] * np.array([[1.0, 0, 0]])
    other = one.copy()
    other[0] = -one[0]
    a, b = toys.quick_jit(jax.vmap(run(rule)))(np.float32([one, other]))
    np.testing.assert_allclose(a - b, [2 * C, 0, 0], atol=tolerance * C)


# --- The interface -------------------------------------------------------------------


def test_bounds_take_traced_numbers():
    def bounds(f, radius, tau):
        rules = [
            aggregators.trimmed_mean(f),
            aggregators.centered_clipping(clip_norm=tau),
        ]
        return [r.sensitivity.bound(9, radius) for r in rules]

    f, radius = jnp.array([0, 2]), jnp.array([1.0, 0.5])
    got = jax.vmap(bounds)(f, radius, jnp.array([0.3, 3.0]))
    np.testing.assert_allclose(got[0], [2 / 9, 1 / 5], rtol=1e-6)
    np.testing.assert_allclose(got[1], [0.6 / 9, 1 / 9], rtol=1e-6)


KNOWN = {
    "mean",
    "trimmed_mean",
    "median",
    "geometric_median",
    "krum",
    "centered_clipping",
}


def test_which_rules_know():
    assert jaxfed.make_aggregator("geometric_median(start=origin)").sensitivity is None
    for name in naming.RULES:
        rule = jaxfed.make_aggregator(name, num_byzantine=1)
        assert (rule.sensitivity is not None) == (name in KNOWN), name
        for pre in naming.PREAGGREGATORS:
            chain = jaxfed.make_aggregator(f"{pre}+{name}", num_byzantine=1, key=0)
            assert chain.sensitivity is None, (pre, name)


@pytest.mark.parametrize("name", sorted(naming.RULES))
def test_central_noise_needs_a_known_sensitivity_or_one_by_name(name):
    rule = jaxfed.make_aggregator(name, num_byzantine=1)

    def mechanism(**options):
        options |= dict(rule=rule, num_clients=9, key=0, noise_std=0.1)
        return byzuldp(0.1, **options).mechanism

    if name in KNOWN:
        assert mechanism().source == "tight"
        bound = rule.sensitivity.bound(9, 0.15)
        np.testing.assert_allclose(mechanism().bound, bound)
        with pytest.raises(ValueError, match="a rule that knows its own"):
            mechanism(sensitivity=0.3)
    else:
        with pytest.raises(ValueError, match="unknown sensitivity.*pass sensitivity="):
            mechanism()
        named = mechanism(sensitivity=0.3)
        assert (named.bound, named.source) == (0.3, "asserted")


@pytest.mark.parametrize(
    ("rule", "n", "bound"),
    [
        (sensitivity.mean(), 9, C / 9),
        (sensitivity.trimmed_mean(2), 9, C / 5),
        (sensitivity.median(), 9, C),
        (sensitivity.median(), 8, C / 2),
        (sensitivity.median("lower"), 8, C),
        (sensitivity.convex_hull(), 9, 2 * C),
        (sensitivity.centered_clipping(0.3), 9, 0.6 / 9),
        (sensitivity.centered_clipping(0.5), 9, C / 9),
        (sensitivity.centered_clipping(0.5, 3), 9, 3 * C / 9),
    ],
)
def test_a_row_set_to_zero(rule, n, bound):
    np.testing.assert_allclose(rule.bound(n, C, relation="zero"), bound, rtol=1e-12)
    assert rule.bound(n, C, relation="zero") <= rule.bound(n, C, relation="replace")
    # A row to zero and zero to a row is a replacement.
    assert rule.bound(n, C) <= 2 * rule.bound(n, C, relation="zero")
    with pytest.raises(ValueError, match="relation='zero' with mode='paper'"):
        rule.bound(n, C, dim=D, mode="paper", relation="zero")


def test_errors():
    with pytest.raises(ValueError, match="mode must be one of 'tight', 'paper'"):
        sensitivity.mean().bound(3, 1.0, mode="loose")
    with pytest.raises(ValueError, match="relation must be one of 'replace', 'zero'"):
        sensitivity.mean().bound(3, 1.0, relation="remove")
    with pytest.raises(ValueError, match="pass dim=, or mode='tight'"):
        sensitivity.median().bound(3, 1.0, mode="paper")
    with pytest.raises(ValueError, match="0 <= f < n/2, got f=2, n=4"):
        sensitivity.trimmed_mean(2).bound(4, 1.0)
    with pytest.raises(TypeError, match="num_clients must be a Python int"):
        sensitivity.mean().bound(3.0, 1.0)
