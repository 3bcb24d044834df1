# SPDX-License-Identifier: Apache-2.0
"""The configuration of ``jaxfed train``: defaults, TOML, identity, refusals."""

import dataclasses
import math
import tomllib
import typing

import pytest

from jaxfed import naming
from jaxfed.experiments import config as configs
from jaxfed.experiments.config import TrainConfig, from_toml, resolve, run_id, to_toml


def test_defaults_are_the_documented_run():
    c = resolve(TrainConfig())
    assert (c.dataset, c.model, c.algorithm, c.rule) == (
        "digits",
        "softmax",
        "safe_dshb",
        "nnm+median",
    )
    assert (c.num_clients, c.num_byzantine, c.rule_byzantine) == (25, 5, 5)
    assert (c.epsilon, c.delta, c.clip_norm, c.clip_unit) == (8, 1e-3, 1, "example")
    assert (c.momentum, c.server_momentum, c.batch_size) == (0.9, None, None)
    assert (c.rounds, c.eval_every, c.byzantine_own_data) == (100, 10, False)


@pytest.mark.parametrize("name", sorted(naming.ALGORITHMS))
def test_resolving_twice_changes_nothing(name):
    once = resolve(TrainConfig(algorithm=name))
    assert resolve(once) == once
    assert run_id(once) == run_id(TrainConfig(algorithm=name))


@pytest.mark.parametrize(
    ("name", "unit", "clip", "outer", "epsilon"),
    [
        ("safe_dshb", "example", 1, None, 8),
        ("byz_clip_sgd", "example", 1, None, 8),
        ("byz_clip21_sgd2m", "client", 1, None, 8),
        ("byz_clip21_sgd2m_plus", "example", 1, 1, 8),
        ("byz_sgdm", None, None, None, math.inf),
    ],
)
def test_clip_and_budget_follow_the_method(name, unit, clip, outer, epsilon):
    c = resolve(TrainConfig(algorithm=name))
    assert (c.clip_unit, c.clip_norm, c.outer_clip_norm, c.epsilon) == (
        unit,
        clip,
        outer,
        epsilon,
    )


def test_attackers_own_data_if_the_attack_needs_it():
    assert resolve(TrainConfig(attack="label_flip")).byzantine_own_data is True
    own = TrainConfig(byzantine_own_data=True)
    assert resolve(own).byzantine_own_data is True


def test_toml_round_trip(tmp_path):
    c = TrainConfig(
        epsilon=math.inf, beta=0.1, split="dirichlet", batch_size=64, compare=False
    )
    file = tmp_path / "c.toml"
    file.write_text(to_toml(c))
    assert from_toml(file) == c
    assert "server_momentum" not in tomllib.loads(to_toml(c))


def test_whatever_may_be_left_out_is_none_by_default():
    # Otherwise a None would be lost on the way through TOML, which has no null.
    for name, hint in typing.get_type_hints(TrainConfig).items():
        if type(None) in typing.get_args(hint):
            assert getattr(TrainConfig(), name) is None, name


def test_toml_takes_integers_for_floats_and_hyphens(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("epsilon = 8\nlearning-rate = 1\n")
    c = from_toml(file)
    assert c == TrainConfig(epsilon=8.0, learning_rate=1.0)
    assert isinstance(c.learning_rate, float)


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("rounds = ", ValueError, "not readable TOML"),
        ("\x00", ValueError, "not readable TOML"),
        ("ruels = 'mean'", ValueError, "unknown setting.*'ruels'.*Did you mean 'rule'"),
        ("resume = 'x'", ValueError, "unknown setting"),
        ("rounds = 'ten'", TypeError, "rounds must be of type int, got 'ten'"),
        ("rounds = 10.5", TypeError, "rounds must be of type int"),
        ("rounds = true", TypeError, "rounds must be of type int"),
        ("compare = 1", TypeError, "compare must be true or false"),
        ("rule = 3", TypeError, "rule must be text"),
        ("clip_unit = 'batch'", TypeError, "'example' or 'client', got 'batch'"),
        ("[rule]\nname = 'mean'", TypeError, "rule must be text"),
    ],
)
def test_wrong_toml(tmp_path, text, error, match):
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(error, match=match):
        from_toml(file)


def test_no_toml_at_all(tmp_path):
    with pytest.raises(ValueError, match="cannot read the configuration"):
        from_toml(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not readable TOML"):
        from_toml(tmp_path / "bytes.toml")


def test_run_id_is_stable():
    # Stored run folders depend on this value: change it only on purpose.
    assert run_id(TrainConfig())[:12] == "f6ae9dffbe7e"


def test_run_id_is_of_what_is_computed():
    base = run_id(TrainConfig())
    assert run_id(TrainConfig(data_dir="elsewhere")) == base
    assert run_id(TrainConfig(epsilon=8, rule_byzantine=5)) == base
    seen = {base}
    changes = dict(
        model="mlp",
        split="iid()",
        num_clients=20,
        num_byzantine=4,
        rule_byzantine=4,
        byzantine_own_data=True,
        algorithm="byz_clip_sgd",
        rule="nnm+trimmed_mean",
        attack="ipm(scale=9)",
        rounds=99,
        eval_every=9,
        batch_size=8,
        microbatch=4,
        learning_rate=1.0,
        momentum=0.5,
        clip_norm=2.0,
        clip_unit="client",
        epsilon=4.0,
        delta=1e-4,
        noise_calibration="nominal",
        seed=1,
        compare=False,
    )
    for name, value in changes.items():
        seen.add(run_id(dataclasses.replace(TrainConfig(), **{name: value})))
    assert len(seen) == len(changes) + 1


def test_a_command_is_a_configuration_and_more():
    command = configs.as_command(TrainConfig(seed=3))
    assert command.train_config() == TrainConfig(seed=3)
    assert command.resume is None and command.devices == 1


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"num_clients": 0}, ValueError, "num_clients must be at least 1"),
        ({"num_byzantine": -1}, ValueError, "num_byzantine must be at least 0"),
        ({"num_byzantine": 25}, ValueError, "num_byzantine must be below num_clients"),
        ({"rounds": 0}, ValueError, "rounds must be at least 1"),
        ({"eval_every": 0}, ValueError, "eval_every must be at least 1"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"learning_rate": 0.0}, ValueError, "learning_rate must be a finite"),
        ({"learning_rate": math.nan}, ValueError, "learning_rate must be a finite"),
        ({"epsilon": 0.0}, ValueError, "epsilon must be > 0"),
        ({"delta": 1.0}, ValueError, "0 < delta < 1"),
        ({"rounds": "ten"}, TypeError, "rounds must be of type int"),
        ({"learning_rate": "fast"}, TypeError, "learning_rate must be of type float"),
        ({"algorithm": "safe_dhsb"}, ValueError, "Did you mean 'safe_dshb'"),
        ({"attack": "imp"}, ValueError, "Did you mean 'ipm'"),
        ({"attack": "ipm(scael=1)"}, ValueError, "Did you mean 'scale'"),
        ({"attack": "ipm(scale=-1)"}, ValueError, "scale must be"),
        (
            {"algorithm": "byz_sgdm", "epsilon": 3.0},
            ValueError,
            "byz_sgdm adds no noise",
        ),
        (
            {"algorithm": "byz_sgdm", "clip_norm": 3.0},
            ValueError,
            "byz_sgdm has no clip_norm.*--clip-norm None",
        ),
        (
            {"server_momentum": 0.5},
            ValueError,
            "safe_dshb has no server_momentum",
        ),
        (
            {"algorithm": "byz_clip21_sgd2m", "clip_unit": "example"},
            ValueError,
            "byz_clip21_sgd2m clips whole messages",
        ),
        (
            {"algorithm": "byz_clip21_sgd2m_plus", "clip_unit": "client"},
            ValueError,
            "clips each example",
        ),
        (
            {"clip_unit": "client", "microbatch": 8},
            ValueError,
            "microbatch is for per-example clipping",
        ),
        (
            {"attack": "label_flip", "byzantine_own_data": False},
            ValueError,
            "works on the attackers' own data",
        ),
    ],
)
def test_wrong_settings(changes, error, match):
    with pytest.raises(error, match=match):
        resolve(TrainConfig(**changes))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"algorithm": "drag(alhpa=0.5)"}, "Did you mean 'alpha'"),
        ({"algorithm": "drag(learning_rate=3)"}, "cannot be given in brackets"),
        ({"algorithm": "ef21_sgdm(compressor=top_k)"}, "make_algorithm in Python"),
        ({"algorithm": "drag+median"}, "an algorithm is one name"),
        ({"algorithm": "drag", "rule": "median"}, "drag has no rule, got rule=median"),
        ({"local_steps": 3}, "safe_dshb has no local_steps"),
        ({"root_size": 3}, "safe_dshb has no root_size"),
        ({"algorithm": "drag", "local_steps": 3, "local_epochs": 1}, "both given"),
        ({"algorithm": "drag", "local_steps": 0}, "local_steps must be at least 1"),
        ({"algorithm": "br_drag", "local_learning_rate": 0.0}, "local_learning_rate"),
        ({"clients_per_round": 26}, "at most num_clients=25"),
        ({"beta": 0.5}, "beta belongs to split='dirichlet'"),
        ({"classes_per_client": 2}, "classes_per_client belongs to split='by_classes'"),
    ],
)
def test_settings_that_contradict_the_method(changes, match):
    with pytest.raises(ValueError, match=match):
        resolve(TrainConfig(**changes))


def test_settings_of_local_steps_follow_the_method():
    c = resolve(TrainConfig(algorithm="br_drag(strength=0.25)"))
    assert (c.rule, c.learning_rate, c.local_steps, c.batch_size) == (None, 1.0, 5, 10)
    assert (c.local_learning_rate, c.root_size) == (0.1, 100)
    assert resolve(TrainConfig(algorithm="drag", local_epochs=2)).local_steps is None
    assert resolve(TrainConfig(algorithm="fedavg")).rule == "mean"
    assert resolve(TrainConfig(algorithm="byzuldp")).rule == "trimmed_mean"
    assert resolve(TrainConfig(algorithm="safe_dsgd")).batch_size == 1
    assert resolve(TrainConfig(algorithm="dp_brem")).outer_clip_norm == 0.1
