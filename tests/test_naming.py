# SPDX-License-Identifier: Apache-2.0
"""Everything that is built from text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed
from jaxfed import _registry, naming

COLUMN = np.array([[0.0], [1.0], [2.0], [3.0], [100.0]], np.float32)


def aggregate(rule, x=COLUMN, **extra):
    return np.asarray(rule.update(x, rule.init(x[0]), x[0], **extra)[0]).item()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("mean", 21.2),
        ("median", 2.0),
        ("trimmed_mean", 2.0),
        ("nnm+median", 1.5),
        (" nnm + trimmed_mean ", 1.5),
        ("nnm+nnm+median", 1.5),
        ("nnm+mean", 6.5),
        ("trimmed_mean(num_byzantine=2)", 2.0),
        ("nnm(num_byzantine=0)+median", 21.2),
    ],
)
def test_rules(spec, expected):
    rule = jaxfed.make_aggregator(spec, num_byzantine=1)
    assert isinstance(rule, jaxfed.Aggregator)
    np.testing.assert_allclose(aggregate(rule), expected, rtol=1e-6)


@pytest.mark.parametrize("name", naming.RULES)
def test_every_rule_is_built_from_the_budget_alone(name):
    x = np.linspace(1, 2, 7, dtype=np.float32)[:, None] ** 2
    extra = {"reference": x[0]} if name == "fltrust" else {}
    rule = jaxfed.make_aggregator(name, num_byzantine=1)
    assert np.isfinite(rule.update(x, rule.init(x[0]), x[0], **extra)[0])
    for pre in naming.PREAGGREGATORS:
        rule = jaxfed.make_aggregator(f"{pre}+{name}", num_byzantine=1, key=0)
        if pre in ("nnm", "arc"):
            assert rule.num_byzantine == 1


def test_randomness_of_a_stage_comes_from_the_key_and_its_place():
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)

    def state(spec, key):
        rule = jaxfed.make_aggregator(spec, num_byzantine=1, key=key)
        return [jax.random.key_data(s.key).tolist() for s in rule.init(x[0])[:-1]]

    with pytest.raises(ValueError, match="'bucketing' needs key="):
        jaxfed.make_aggregator("bucketing+median", num_byzantine=1)
    first, second = state("bucketing+bucketing+median", 0)
    assert first != second and state("bucketing+median", 0) == [first]
    assert state("bucketing+median", 1) != [first]


def test_the_budget_may_be_traced():
    def run(f):
        rule = jaxfed.make_aggregator("nnm+trimmed_mean", num_byzantine=f)
        return rule.update(COLUMN, rule.init(COLUMN[0]), COLUMN[0])[0]

    out = jax.jit(jax.vmap(run))(jnp.arange(4))
    np.testing.assert_allclose(out[:2, 0], [21.2, 1.5], rtol=1e-6)
    assert np.isnan(out[3, 0])


@pytest.mark.parametrize("name", naming.ATTACKS)
def test_attacks(name):
    assert isinstance(jaxfed.make_attack(name), jaxfed.Attack)


def test_options_of_attacks_in_both_forms():
    byzantine = np.arange(5) == 4
    for attack in (
        jaxfed.make_attack("ipm", scale=2.0),
        jaxfed.make_attack("ipm(scale=2)"),
        jaxfed.make_attack("ipm(scale=2.0)", scale=7.0),
    ):
        out, _ = attack.wire.update(
            COLUMN, attack.wire.init(COLUMN[0]), byzantine=byzantine
        )
        assert out[4, 0] == -3.0


def test_algorithms():
    algorithm = jaxfed.make_algorithm(
        "byz_sgdm", learning_rate=0.1, rule="nnm+median", num_byzantine=1
    )
    assert isinstance(algorithm, jaxfed.FedAlgorithm)
    assert algorithm.rule.num_byzantine == 1
    rule = jaxfed.make_aggregator("median")
    algorithm = jaxfed.make_algorithm("byz_sgdm", learning_rate=0.1, rule=rule)
    assert algorithm.rule is rule


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (
            lambda: jaxfed.make_aggregator("medain"),
            "unknown rule 'medain'. Did you mean 'median'.*Known: bulyan, caf",
        ),
        (
            lambda: jaxfed.make_aggregator("nmm+median"),
            "unknown pre-aggregator 'nmm'. Did you mean 'nnm'",
        ),
        (lambda: jaxfed.make_aggregator("qqqq"), "unknown rule 'qqqq'. Known"),
        (lambda: jaxfed.make_aggregator("nnm"), "'nnm' is in the wrong place in 'nnm'"),
        (lambda: jaxfed.make_aggregator("median+nnm"), "is in the wrong place"),
        (lambda: jaxfed.make_aggregator("median+mean"), "'median' is in the wrong pl"),
        (lambda: jaxfed.make_aggregator(""), "cannot read ''"),
        (lambda: jaxfed.make_aggregator("nnm++median"), "cannot read ''"),
        (lambda: jaxfed.make_aggregator("median("), "cannot read 'median\\('"),
        (lambda: jaxfed.make_aggregator("median(x)"), "cannot read option 'x'"),
        (lambda: jaxfed.make_aggregator("median(=1)"), "cannot read option '=1'"),
        (lambda: jaxfed.make_aggregator("median(x=)"), "cannot read option 'x='"),
        (
            lambda: jaxfed.make_aggregator("trimmed_mean(f=1)"),
            "unknown option of 'trimmed_mean': 'f'",
        ),
        (
            lambda: jaxfed.make_aggregator("median(num_byzantine=1,num_byzantine=2)"),
            "option 'num_byzantine' is given twice",
        ),
        (
            lambda: jaxfed.make_aggregator("nnm+median", 1, scale=2),
            "no stage of 'nnm\\+median' takes the option\\(s\\) scale",
        ),
        (
            lambda: jaxfed.make_attack("imp"),
            "unknown attack 'imp'. Did you mean 'ipm'.*Known: alie, alie_search",
        ),
        (lambda: jaxfed.make_attack("ipm+nan"), "an attack is one name"),
        (
            lambda: jaxfed.make_attack("ipm", sacle=1.0),
            "unknown option of 'ipm': 'sacle'. Did you mean 'scale'",
        ),
        (
            lambda: jaxfed.make_algorithm("byz_clip21_sgd2"),
            "unknown algorithm .* Did you mean 'byz_clip21_sgd2m'",
        ),
        (
            lambda: jaxfed.make_algorithm("byz_sgdm"),
            "'byz_sgdm' needs .*learning_rate=",
        ),
    ],
)
def test_errors_say_what_was_meant(build, match):
    with pytest.raises(ValueError, match=match):
        build()


def test_a_specification_is_text():
    for spec in (None, 3, ["nnm", "median"]):
        with pytest.raises(TypeError, match="spec must be a string like 'nnm"):
            jaxfed.make_aggregator(spec)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-2.5", -2.5),
        ("1e+5", 1e5),
        ("inf", float("inf")),
        ("true", True),
        ("False", False),
        ("none", None),
        ("squared", "squared"),
        ("'a b'", "a b"),
        ("n-f-2", "n-f-2"),
    ],
)
def test_values_of_options(text, value):
    ((name, options),) = _registry.parse(f"rule(x={text})")
    assert name == "rule" and options == {"x": value}
    assert type(options["x"]) is type(value)
    assert _registry.parse(f"a(x={text}, y=1)+b") == [
        ("a", {"x": value, "y": 1}),
        ("b", {}),
    ]
