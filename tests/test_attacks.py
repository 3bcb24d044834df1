# SPDX-License-Identifier: Apache-2.0
"""Attacks: what each sends, and that honest rows pass untouched.

Rows refer to the checklists of the sheets: of Byz-Clip21-SGD2M where nothing is said.
Searched attacks and attacks with a memory have files of their own.
"""

import functools
import math
from statistics import NormalDist

import attack_vectors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from toys import Regression, quick_jit

import jaxfed
from jaxfed import attacks, reductions
from jaxfed._base import Shard

BYZANTINE = np.array([False, True, False, False, True])
HONEST = ~BYZANTINE


def rows(n=5, d=6, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def median(uploads):
    """The step of a server that subtracts a median."""
    aggregate = reductions.median(uploads)
    return jax.tree.map(jnp.negative, aggregate)


def on_wire(attack, updates, byzantine=BYZANTINE, **extra):
    def run(updates, byzantine):
        params = jax.tree.map(lambda x: x[0], updates)
        state = attack.wire.init(params)
        out, new = attack.wire.update(
            updates, state, params, byzantine=byzantine, **({"probe": median} | extra)
        )
        assert jax.tree.structure(new) == jax.tree.structure(state)
        return out

    return quick_jit(run)(updates, byzantine)


def send(vector):
    """All Byzantine rows hold the vector."""
    return lambda x: np.where(BYZANTINE[:, None], vector(x[HONEST].astype(float)), x)


def furthest(deviation, fits):
    """Search for the largest length that fits, by bisection."""

    def vector(honest):
        mean = honest.mean(0)
        direction = {
            "std": -honest.std(0, ddof=1),
            "unit": -mean / np.linalg.norm(mean),
            "sign": -np.sign(mean),
        }[deviation]
        between = np.linalg.norm(honest[:, None] - honest[None], axis=2) ** 2
        low, high = 0.0, 1e3
        for _ in range(60):
            middle = (low + high) / 2
            away = np.linalg.norm(mean + middle * direction - honest, axis=1) ** 2
            low, high = (middle, high) if fits(away, between) else (low, middle)
        return mean + low * direction

    return vector


def max_fits(away, between):
    return away.max() <= between.max()


def sum_fits(away, between):
    return away.sum() <= between.sum(1).max()


# What is sent, where a formula says it.
FORMULAS = {
    # One of 3 honest ones must support 2 of 5: z is the quantile of 2/3.
    "alie": send(lambda h: h.mean(0) - NormalDist().inv_cdf(2 / 3) * h.std(0, ddof=1)),
    "bit_flip": send(lambda h: -h.mean(0)),
    "copies": send(lambda h: h[0]),
    "inf": send(lambda h: np.inf),
    "ipm": lambda x: oracles.ipm(x, BYZANTINE, 10.0),
    "label_flip": lambda x: x,
    "label_flip_half": lambda x: x,
    "mia_push": send(lambda h: 0.0),  # still recording
    "min_max": send(furthest("std", max_fits)),
    "min_sum": send(furthest("std", sum_fits)),
    "nan": send(lambda h: np.nan),
    "none": lambda x: x,
    "sign_flip": lambda x: np.where(BYZANTINE[:, None], -x, x),
    "zero": send(lambda h: 0.0),
}
RANDOM = ["gaussian_noise", "random", "scalar_noise"]
SEARCHED = ["alie_search", "gradient_search", "ipm_search"]
ALL = [*FORMULAS, *RANDOM, *SEARCHED, "mimic"]
OWN_WORK = ["label_flip", "label_flip_half", "none", "scalar_noise", "sign_flip"]


def test_the_registry_is_complete():
    assert set(ALL) == set(attacks.__all__)


@pytest.mark.parametrize("name", FORMULAS)
def test_definition(name):
    x = rows()
    attack = getattr(attacks, name)()
    assert isinstance(attack, jaxfed.Attack)
    tree = {"a": x[:, 0], "b": (x[:, 1:].reshape(5, 1, 5), None)}
    out = on_wire(attack, tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    flat = np.concatenate([out["a"][:, None], out["b"][0][:, 0]], axis=1)
    np.testing.assert_allclose(flat, FORMULAS[name](x), rtol=5e-6, atol=1e-6)
    # Honest messages cross the wire bit for bit.
    np.testing.assert_array_equal(flat[HONEST], x[HONEST])


def wide_uploads(seed=0):
    """Uploads of two parts, of which rules see one."""
    x = rows(5, 9, seed)
    update = {"a": x[:, 0], "b": x[:, 1:5].reshape(5, 2, 2)}
    return {"update": update, "control": {"a": x[:, 5], "b": x[:, 5:].reshape(5, 2, 2)}}


@functools.cache
def program(name):
    """Three rounds of an attack on uploads of two parts, jitted."""
    attack = getattr(attacks, name)()
    params = jax.tree.map(lambda x: jnp.asarray(x[0]), wide_uploads()["update"])

    def run(uploads, byzantine):
        def step(state, key):
            out, state = attack.wire.update(
                uploads,
                state,
                params,
                byzantine=byzantine,
                probe=lambda u: median(u["update"]),
                message={"params": params, "round": 0},
                key=key,
            )
            return state, out

        keys = jax.random.split(jax.random.key(3), 3)
        return jax.lax.scan(step, attack.wire.init(params), keys)[1]

    return quick_jit(run)


def rows_of(tree, who):
    return [np.asarray(x)[:, who] for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", ALL)
def test_honest_messages_pass_and_so_do_all_if_there_is_no_attacker(name):
    x = wide_uploads()
    thrice = jax.tree.map(lambda v: np.stack([v] * 3), x)
    nobody, everybody = np.zeros(5, bool), np.ones(5, bool)
    for byzantine in (BYZANTINE, np.arange(5) > 0, nobody):
        out = program(name)(x, byzantine)
        assert jax.tree.structure(out) == jax.tree.structure(x)
        honest = rows_of(out, ~byzantine), rows_of(thrice, ~byzantine)
        jax.tree.map(np.testing.assert_array_equal, *honest)
        if name not in ("nan", "inf"):
            assert all(np.all(np.isfinite(v)) for v in rows_of(out, byzantine))
    if name not in ("nan", "inf"):  # a cohort may have no honest client
        out = program(name)(x, everybody)
        assert all(np.all(np.isfinite(v)) for v in rows_of(out, everybody))


@pytest.mark.parametrize("name", sorted(set(ALL) - set(OWN_WORK)))
def test_what_byzantine_clients_computed_does_not_matter(name):
    x, y = wide_uploads(), wide_uploads()
    for leaf in jax.tree.leaves(y):
        leaf[1], leaf[4] = np.nan, np.inf
    out = program(name)(x, BYZANTINE), program(name)(y, BYZANTINE)
    jax.tree.map(np.testing.assert_array_equal, *out)
    assert not getattr(attacks, name)().needs_data


@pytest.mark.parametrize("name", sorted(set(ALL) - {"mia_push"}))
def test_whether_the_adversary_sees_honest_messages_is_declared(name):
    x, y = wide_uploads(), wide_uploads()
    for leaf in jax.tree.leaves(y):
        leaf[HONEST] *= -3
    sent = [rows_of(program(name)(u, BYZANTINE), BYZANTINE) for u in (x, y)]
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*sent, strict=True))
    assert getattr(attacks, name)().sees_messages == (not same)
    assert attacks.mia_push().sees_messages  # in its first rounds it only looks


@pytest.mark.parametrize("name", OWN_WORK)
def test_attacks_that_start_from_honest_work_need_data(name):
    assert getattr(attacks, name)().needs_data


@pytest.mark.parametrize("name", FORMULAS)
def test_short_floats_are_computed_in_float32(name):
    x = jnp.asarray(rows(), "bfloat16")
    out = on_wire(getattr(attacks, name)(), x)
    assert out.dtype == x.dtype
    wide = np.asarray(x, np.float32)
    np.testing.assert_allclose(
        np.asarray(out, np.float32), FORMULAS[name](wide), rtol=1 / 128
    )


@pytest.mark.parametrize("name", ALL)
def test_shapes_and_dtypes_are_kept(name):
    attack = getattr(attacks, name)()

    def run(x):
        state = attack.wire.init(x[0])
        key = jax.random.key(0)
        out, new = attack.wire.update(
            x, state, x[0], byzantine=BYZANTINE, probe=median, key=key
        )
        return out, state, new

    with jax.enable_x64(True):
        for dtype in ("bfloat16", "float32", "float64"):
            x = jax.ShapeDtypeStruct((5, 6), dtype)
            out, state, new = jax.eval_shape(run, x)
            assert (out.shape, out.dtype) == (x.shape, x.dtype)
            for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype)
                assert a.weak_type == b.weak_type
            abstract = jax.ShapeDtypeStruct((6,), dtype)
            jax.tree.map(np.shape, attack.wire.init(abstract))


@pytest.mark.parametrize("name", FORMULAS)
def test_float64(name):
    x = np.random.default_rng(0).normal(size=(5, 6))
    with jax.enable_x64(True):
        out = on_wire(getattr(attacks, name)(), x)
        assert out.dtype == np.float64
    np.testing.assert_allclose(out, FORMULAS[name](x), rtol=1e-12, atol=1e-13)


NUMBERS = {
    "ipm": {"scale": [0.0, 0.5, 10.0]},
    "sign_flip": {"scale": [0.0, 0.5, 10.0]},
    "alie": {"z": [-1.5, 0.0, 3.0]},
    "gaussian_noise": {"std": [0.0, 0.5, 10.0]},
    "scalar_noise": {"std": [0.0, 0.5, 10.0]},
    "random": {"scale": [0.0, 0.5, 10.0]},
    "mia_push": {
        "num_test": [0, 0, 5],
        "noise_std": [1.0, 2.0, 1.0],
        "z": [-1.0, 5.0, 1.0],
        "strength": [0.3, 0.5, 1.0],
        "top_eigenvalue": [1.0, 4.0, 1.0],
    },
    "ipm_search": {"low": [-1.0, 0.0, 0.5], "high": [2.0, 3.0, 4.0]},
    "alie_search": {"low": [0.0, -0.1, -0.2], "high": [0.1, 0.2, 0.3]},
    "gradient_search": {
        "learning_rate": [0.1, 0.2, 0.3],
        "scale": [1.0, 2.0, 0.0],
        "z": [0.0, 1.0, 9.0],
    },
}
FIXED = {"gradient_search": {"steps": 1}, "alie_search": {"grid": 3, "evals": 1}}


@pytest.mark.parametrize("name", NUMBERS)
def test_strengths_may_be_traced_and_swept(name):
    x, key = rows(), jax.random.key(5)
    build = functools.partial(getattr(attacks, name), **FIXED.get(name, {}))
    grid = {k: jnp.array(v) for k, v in NUMBERS[name].items()}
    out = quick_jit(jax.vmap(lambda n: on_wire(build(**n), x, key=key)))(grid)
    fixed = build(**{k: v[1] for k, v in NUMBERS[name].items()})
    expected = on_wire(fixed, x, key=key)
    np.testing.assert_allclose(out[1], expected, rtol=2e-5, atol=1e-6)
    assert len({np.asarray(sent)[1].tobytes() for sent in out}) == 3


@pytest.mark.parametrize("name", ["ipm", "sign_flip", "random"])
def test_bad_scales(name):
    with pytest.raises(ValueError, match="the range of float32, got scale=1e[+]39"):
        getattr(attacks, name)(scale=1e39)
    for scale in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="scale must be a finite number >= 0"):
            getattr(attacks, name)(scale=scale)
    with pytest.raises(TypeError, match="scale must be a number"):
        getattr(attacks, name)(scale="10")


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: attacks.alie(z=float("nan")), "z must be a finite number, got z=nan"),
        (lambda: attacks.alie(z=-2e38), "range of float32, got z=-2e[+]38"),
        (lambda: attacks.alie(ddof=2), "ddof must be at most 1"),
        (lambda: attacks.gaussian_noise(std=-1.0), "std must be a finite number >= 0"),
        (lambda: attacks.scalar_noise(std=-1.0), "std must be a finite number >= 0"),
        (lambda: attacks.random(key=jnp.zeros(2, jnp.uint32)), "legacy uint32 key"),
        (lambda: attacks.min_max("max"), "deviation must be one of 'std', 'unit', 's"),
        (lambda: attacks.min_sum("max"), "deviation must be one of 'std', 'unit', 's"),
        (lambda: attacks.label_flip_half(fraction=1.5), "fraction must satisfy 0 <="),
        (lambda: attacks.label_flip_half(num_classes=1), "num_classes must be at lea"),
    ],
)
def test_bad_arguments(build, match):
    with pytest.raises(ValueError, match=match):
        build()


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


# --- other libraries ---------------------------------------------------------------


FIXED_CASES = [
    case
    for case in attack_vectors.CASES
    if case["kind"] == "attack" and not case["name"].startswith("Optimal")
]


@pytest.mark.parametrize(
    "case",
    [c for c in FIXED_CASES if c["name"] not in attack_vectors.DIFFER],
    ids=attack_vectors.label,
)
def test_other_libraries_are_reproduced(case):
    call = attack_vectors.translate(case)
    x = np.vstack([call.honest, np.full((2, call.honest.shape[1]), np.nan)])
    with jax.enable_x64(True):
        attack, who = jaxfed.make_attack(call.attack), np.arange(len(x))
        out = np.asarray(on_wire(attack, x, who >= len(call.honest)))
    for sent in out[-2:]:
        expected = np.array(case["expected"], float)
        np.testing.assert_allclose(sent, expected, rtol=1e-10, atol=1e-11)


def test_every_case_is_checked_or_has_a_reason_not_to_be():
    for case in attack_vectors.CASES:
        if case["name"] in attack_vectors.DIFFER:
            assert len(attack_vectors.DIFFER[case["name"]]) > 10
        elif case["kind"] == "attack":
            attack_vectors.translate(case)
        else:
            assert case["name"] == "ALIE_z_max"
    assert {c["name"] for c in attack_vectors.CASES} >= set(attack_vectors.DIFFER)


# --- a little is enough ------------------------------------------------------------


@functools.cache
def shift(n):
    """The z of the attack among n clients, for a traced number of attackers."""
    attack = attacks.alie(ddof=0)

    def z(f):
        byzantine = jaxfed.byzantine_ids(n, f)
        # Honest rows half at -1, half at 1: mean 0 and deviation 1 for even numbers.
        place = jnp.arange(n) % 2 * 2.0 - 1
        out, _ = attack.wire.update(
            place[:, None], attack.wire.init(place[:1]), byzantine=byzantine
        )
        return -out[-1, 0]

    return quick_jit(jax.vmap(z))


def test_row_20_byzuldp_alie_of_1000_clients():
    """Sheet of ByzULDP, section 5: z_max(1000, 250) = 0.42706."""
    np.testing.assert_allclose(shift(1000)(jnp.array([250])), [0.42706], atol=1e-5)


@pytest.mark.parametrize(
    "case", [c for c in attack_vectors.CASES if c["kind"] == "attack_parameter"]
)
def test_z_of_other_libraries(case):
    n, f = case["params"]["n"], case["params"]["m"]
    np.testing.assert_allclose(shift(n)(jnp.array([f])), [case["expected"]], rtol=1e-5)


def test_z_is_finite_for_any_number_of_attackers():
    out = np.asarray(shift(10)(jnp.arange(1, 10)))
    assert np.all(np.isfinite(out))
    assert out[1] == pytest.approx(0.0, abs=1e-6)  # 4 of 8 honest ones support
    assert out[0] == 0.0 or out[0] < 0  # 5 of 9 must
    assert np.all(np.diff(out[[1, 3, 5, 7]]) != 0)


def test_alie_is_the_mean_minus_deviations():
    x = rows()
    honest = x[HONEST].astype(float)
    for ddof in (0, 1):
        out = on_wire(attacks.alie(z=2.0, ddof=ddof), x)
        expected = honest.mean(0) - 2 * honest.std(0, ddof=ddof)
        np.testing.assert_allclose(out[1], expected, rtol=1e-5, atol=1e-6)
        lonely = on_wire(attacks.alie(z=2.0, ddof=ddof), x, np.arange(5) > 0)
        np.testing.assert_allclose(lonely[1], x[0], rtol=1e-6)


# --- min-max and min-sum -----------------------------------------------------------


@pytest.mark.parametrize("deviation", ["std", "unit", "sign"])
@pytest.mark.parametrize(
    ("name", "fits"), [("min_max", max_fits), ("min_sum", sum_fits)]
)
def test_the_constraint_holds_with_equality(name, fits, deviation):
    x = np.random.default_rng(3).normal(size=(9, 4)) * [1, 3, 0.1, 1] + 0.5
    byzantine = np.arange(9) >= 7
    attack = getattr(attacks, name)(deviation)
    with jax.enable_x64(True):
        out = on_wire(attack, x, byzantine)
    honest, sent = x[:7], np.asarray(out[8])
    expected = furthest(deviation, fits)(honest)
    np.testing.assert_allclose(sent, expected, rtol=1e-9, atol=1e-10)
    away = np.linalg.norm(sent - honest, axis=1) ** 2
    between = np.linalg.norm(honest[:, None] - honest[None], axis=2) ** 2
    if name == "min_max":
        np.testing.assert_allclose(away.max(), between.max(), rtol=1e-12)
    else:
        np.testing.assert_allclose(away.sum(), between.sum(1).max(), rtol=1e-12)


@pytest.mark.parametrize("name", ["min_max", "min_sum"])
def test_equal_honest_messages_leave_no_room(name):
    for value in (0.0, 3.0):
        x = np.full((5, 6), value, np.float32)
        out = on_wire(getattr(attacks, name)("sign"), x)
        np.testing.assert_allclose(out, x, atol=1e-6)


# --- random attacks ----------------------------------------------------------------


def attacker_rows(name, key, d=4000, n=6, **options):
    x = np.ones((n, d), np.float32)
    attack = getattr(attacks, name)(**options)
    return np.asarray(on_wire(attack, x, np.arange(n) > 0, key=key))[1:]


@pytest.mark.parametrize("name", RANDOM)
def test_rows_are_drawn_by_client_and_round(name):
    x, key = rows(), jax.random.key(0)
    attack = getattr(attacks, name)()
    out = np.asarray(on_wire(attack, x, key=key))
    assert not np.any(out[1] / x[1] == out[4] / x[4])
    order = np.array([4, 2, 1, 0, 3])  # the same clients in another order
    moved = on_wire(attack, x[order], BYZANTINE[order], key=key, cohort=order)
    np.testing.assert_allclose(moved, out[order], rtol=1e-6)
    other = np.asarray(on_wire(attack, x, key=jax.random.key(1)))
    assert not np.any(other[BYZANTINE] == out[BYZANTINE])


@pytest.mark.parametrize("name", RANDOM)
def test_without_a_key_of_the_round_the_attack_has_its_own(name):
    x = rows()
    sent = {}
    for seed in (0, 7):
        attack = getattr(attacks, name)(key=seed)
        state = attack.wire.init(x[0])
        for t in range(2):
            out, state = attack.wire.update(x, state, byzantine=BYZANTINE)
            sent[seed, t] = np.asarray(out)[BYZANTINE]
    values = np.stack(list(sent.values()))
    assert len(np.unique(values.round(5))) == values.size


def test_gaussian_noise_is_normal():
    sent = attacker_rows("gaussian_noise", jax.random.key(0), std=2.0)
    assert abs(sent.mean()) < 4 * 2 / math.sqrt(sent.size)
    assert abs(sent.std() / 2 - 1) < 4 / math.sqrt(2 * sent.size)
    inside = np.mean(np.abs(sent) < 2)
    assert abs(inside - 0.6827) < 4 * math.sqrt(0.25 / sent.size)


def test_random_directions_have_the_norm_of_the_honest_mean():
    for scale in (1.0, 2.5):
        x = rows()
        out = on_wire(attacks.random(scale), x, key=jax.random.key(0))
        size = scale * np.linalg.norm(x[HONEST].mean(0))
        norms = np.linalg.norm(out[BYZANTINE], axis=1)
        np.testing.assert_allclose(norms, size, rtol=1e-5)
    sent = attacker_rows("random", jax.random.key(0))
    inner = sent @ sent.T / 4000  # honest mean of ones: norm sqrt(4000)
    np.testing.assert_allclose(inner, np.eye(5), atol=5 / math.sqrt(4000))


def test_row_15_drag_scalar_noise_has_variance_three():
    """Sheet of DRAG: p times the own update, p with mean 0 and variance 3."""
    n, x = 4001, rows(4001, 3)
    attack, who = attacks.scalar_noise(), np.arange(4001) > 0
    p = np.asarray(on_wire(attack, x, who, key=jax.random.key(0)))[1:] / x[1:]
    np.testing.assert_allclose(p, np.broadcast_to(p[:, :1], p.shape), rtol=1e-5)
    p = p[:, 0]
    assert abs(p.mean()) < 4 * math.sqrt(3 / n)
    assert abs(p.var() / 3 - 1) < 4 * math.sqrt(2 / n)
    wide = attacks.scalar_noise(std=3.0)
    again = on_wire(wide, x, who, key=jax.random.key(0))
    np.testing.assert_allclose(again[1:, 0] / x[1:, 0], p * math.sqrt(3), rtol=1e-5)


def test_row_15_drag_sign_flip_and_noise_vector():
    x = rows()
    np.testing.assert_array_equal(on_wire(attacks.sign_flip(), x)[1], -x[1])
    noise = on_wire(attacks.gaussian_noise(std=0.0), x)
    np.testing.assert_array_equal(noise[1], np.zeros(6))


# --- row 16 of DRAG: attacks inside the simulation -----------------------------------


def test_row_16_drag_benign_rows_are_the_same_with_and_without_attack():
    x = rows(6, 5)
    for name in ("scalar_noise", "gaussian_noise", "sign_flip"):
        attack = getattr(attacks, name)()
        out = np.asarray(on_wire(attack, x, np.arange(6) >= 4, key=jax.random.key(2)))
        np.testing.assert_array_equal(out[:4], x[:4])
        assert not np.any(out[4:] == x[4:])


def test_row_16_drag_attackers_in_a_cohort_are_hypergeometric():
    n, f, s, rounds = 8, 3, 4, 3000
    toy = Regression(n, m=2)
    algorithm = jaxfed.make_algorithm(
        "byz_sgdm",
        learning_rate=1e-6,
        rule="mean",
        momentum=0.0,
        local_work=jaxfed.gradient(toy.loss),
        num_clients=n,
    )
    sim = jaxfed.simulate(
        algorithm,
        n,
        num_byzantine=f,
        attack=attacks.scalar_noise(),
        cohort_size=s,
        inspect=True,
    )
    state = sim.init(toy.params, 0)
    run = quick_jit(lambda state: sim.run(state, toy.shards, rounds)[1]["influence"])
    counts = np.rint(np.asarray(run(state)) * s).astype(int)
    for k in range(f + 1):
        p = math.comb(f, k) * math.comb(n - f, s - k) / math.comb(n, s)
        assert abs(np.mean(counts == k) - p) < 4 * math.sqrt(p * (1 - p) / rounds)


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


@pytest.mark.parametrize("name", ["label_flip", "label_flip_half"])
def test_labels_must_be_integers_in_their_range(name):
    build, before = getattr(attacks, name), shards(np.int32)
    with pytest.raises(ValueError, match="num_classes=3, got 0 to 9 in data.'label'"):
        build(num_classes=3).poison(before, BYZANTINE)
    with pytest.raises(TypeError, match="flips integer labels, got float32 in data.'i"):
        build(label="image").poison(before, BYZANTINE)
    pixels = before._replace(data={"image": jnp.full((5, 3, 2), 255, jnp.uint8)})
    with pytest.raises(ValueError, match="got 255 to 255"):
        build(label="image").poison(pixels, BYZANTINE)
    # Padding may hold anything, and traced labels are not known.
    padded = Shard({"label": jnp.array([[1, -7], [2, 99]])}, jnp.array([1, 1]))
    kept = np.array([False, False])
    for poison in (build().poison, quick_jit(build(num_classes=2).poison)):
        out = poison(padded, kept).data["label"]
        np.testing.assert_array_equal(out, padded.data["label"])


@pytest.mark.parametrize("num_classes", [10, 9])
def test_row_15_drag_half_of_the_labels_are_flipped(num_classes):
    """Sheet of DRAG: floor of half, fixed for the run, the middle of an odd L stays."""
    rng = np.random.default_rng(0)
    y = jnp.asarray(rng.integers(0, num_classes, size=(4, 21)), jnp.int32)
    # Distinct labels that are not the middle show who was flipped.
    y = jnp.where(y == num_classes // 2, 0, y)
    counts = jnp.array([21, 20, 1, 7], jnp.int32)
    before, byzantine = Shard({"label": y}, counts), np.array([0, 1, 1, 1], bool)
    poison = quick_jit(attacks.label_flip_half(num_classes, key=3).poison)
    once = poison(before, byzantine)
    flipped = np.asarray(once.data["label"] != y)
    np.testing.assert_array_equal(flipped.sum(1), [0, 10, 0, 3])
    for row, count in zip(flipped, counts, strict=True):
        assert not row[count:].any()
    old, new = np.asarray(y)[flipped], np.asarray(once.data["label"])[flipped]
    np.testing.assert_array_equal(new, num_classes - 1 - old)
    np.testing.assert_array_equal(poison(once, byzantine).data["label"], y)
    other = attacks.label_flip_half(num_classes, key=4)
    other = quick_jit(other.poison)(before, byzantine)
    assert np.any(other.data["label"] != once.data["label"])
    middle = Shard({"label": jnp.full((4, 21), num_classes // 2, jnp.int32)}, counts)
    stays = poison(middle, byzantine).data["label"] == num_classes // 2
    assert bool(jnp.all(stays)) == (num_classes % 2 == 1)


def test_the_share_of_flipped_labels_may_be_traced():
    y = jnp.zeros((2, 10), jnp.int32)
    before, who = Shard({"label": y}, jnp.array([10, 10])), np.array([True, False])

    def flipped(fraction):
        attack = attacks.label_flip_half(fraction=fraction)
        return jnp.sum(attack.poison(before, who).data["label"] == 9)

    shares = jnp.array([0.0, 0.3, 0.55, 0.7, 1.0])
    np.testing.assert_array_equal(
        quick_jit(jax.vmap(flipped))(shares), [0, 3, 5, 7, 10]
    )
    with pytest.raises(ValueError, match="label_flip_half needs shards.*'y'"):
        attacks.label_flip_half(label="y").poison(before, who)


def test_other_attacks_leave_the_data_alone():
    before = shards()
    for name in set(ALL) - {"label_flip", "label_flip_half"}:
        assert getattr(attacks, name)().poison(before, BYZANTINE) is before
