# SPDX-License-Identifier: Apache-2.0
"""``jaxfed account`` and the noise that a configuration really gets."""

import dataclasses
import inspect
import json
import math
import re

import pytest

from jaxfed import cli, naming, privacy
from jaxfed.experiments import account, budget
from jaxfed.experiments import config as configs
from jaxfed.privacy import composition, gaussian

PRIVATE = sorted(
    name
    for name, factory in naming.ALGORITHMS.items()
    if "noise_std" in inspect.signature(factory).parameters
)


def run(capsys, *argv):
    code = cli.main(["account", *argv])
    return code, *capsys.readouterr()


def of(algorithm="safe_dshb", **changes):
    return account.account(account.AccountCommand(algorithm=algorithm, **changes))


PAPER = ("--algorithm", "byz_clip21_sgd2m", "--epsilon", "3", "--delta", "4e-4")


def test_byz_clip21_row_19_on_the_command_line(capsys):
    code, out, err = run(capsys, *PAPER, "--rounds", "1000")
    assert (code, err) == (0, "")
    table = {line[:27].strip(): line[27:].split() for line in out.splitlines()}
    assert table["Byz-Clip21-SGD2M's formula"] == ["29.48", "3", "8.895"]
    assert table["certified for 3"][2] == "3"
    assert "twice as much, 2; with 1 epsilon would be 3.721" in out
    assert "no log(rounds / delta)" in out
    for caveat in ("run folder", "float32", "without noise", "not credited"):
        assert caveat in out


def test_byz_clip21_row_19_any_number_of_rounds(capsys):
    for rounds in (1, 77, 5625):
        code, out, _ = run(capsys, *PAPER, "--rounds", str(rounds), "--json")
        (paper, *_) = json.loads(out)["rows"]
        assert code == 0
        assert paper["certified"] == pytest.approx(8.895, abs=1e-3)


def test_byzuldp_rows_12_and_14_on_the_command_line():
    it = of(
        algorithm="byzuldp",
        epsilon=10.0,
        delta=1e-4,
        rounds=800,
        num_clients=1000,
        num_byzantine=250,
    )
    rows = {row.name: row for row in it.rows}
    for name, z in (
        ("byzuldp's formula", 24.2788),
        ("optimum over Rényi orders", 14.8356),
        ("certified for 10", 12.8768),
    ):
        assert rows[name].noise_std / 6e-4 == pytest.approx(z, rel=1e-5)
    assert rows["byzuldp's formula"].nominal == pytest.approx(10)
    assert rows["byzuldp's formula"].certified == pytest.approx(4.56522, rel=1e-4)


def test_no_argument_is_an_account_too(capsys):
    code, out, _ = run(capsys)
    assert code == 0 and "certified for 8" in out


def test_noise_given_instead_of_epsilon(capsys):
    code, out, _ = run(
        capsys, "--algorithm", "byz_clip21_sgd2m", "--noise-std", "29.48455",
        "--delta", "4e-4", "--rounds", "1000", "--json",
    )  # fmt: skip
    given = json.loads(out)
    assert code == 0 and given["epsilon"] is None
    assert [row["name"] for row in given["rows"]] == ["the noise given"]
    assert given["rows"][0]["certified"] == pytest.approx(8.895, abs=1e-3)
    assert given["rows"][0]["nominal"] == pytest.approx(3, rel=1e-6)


def test_examples_are_counted():
    it = of(num_examples=72, epsilon=2.0, batch_size=100)
    assert it.statement.sensitivity == pytest.approx(2 / 72)
    assert of(batch_size=16).statement.sensitivity == pytest.approx(2 / 16)
    assert of(clip_unit="client").statement.sensitivity == 2


def test_a_random_draw_is_credited_where_it_may_be():
    plain = of(batch_size=10, num_examples=200, epsilon=2.0)
    credited = of(batch_size=10, num_examples=200, epsilon=2.0, amplification=True)
    assert credited.statement.noise_std < plain.statement.noise_std / 4
    sampling = composition.without_replacement(10, 200)
    phase = composition.Phase(100, credited.statement.noise_std / 0.2, sampling)
    assert composition.epsilon(phase, 1e-3) <= 2.0
    assert "10 of 200 without replacement" in credited.statement.sampling
    assert "privacy loss distributions" in credited.statement.accountant
    clients = of(
        algorithm="dp_fedavg", clients_per_round=5, num_clients=50, amplification=True
    )
    assert "5 of 45 without replacement" in clients.statement.sampling


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(algorithm="byz_clip21_sgd2m"), "byz_clip21_sgd2m keeps"),
        (dict(algorithm="dp_brem", batch_size=2, num_examples=9), "dp_brem keeps"),
        (dict(num_examples=9), "draws none here"),
        (dict(batch_size=9, num_examples=9), "draws none here"),
        (dict(batch_size=9), "num_examples is needed"),
        (dict(algorithm="dp_fedavg"), "clients .*dp_fedavg draws none"),
        (dict(algorithm="dp_fedavg", clients_per_round=20), "dp_fedavg draws none"),
        (
            dict(clip_unit="client", clients_per_round=13),
            "clients .*safe_dshb draws none",
        ),
    ],
)
def test_a_draw_that_hides_nobody_is_not_credited(changes, why):
    with pytest.raises(ValueError, match=why):
        of(amplification=True, **changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(epsilon=1.0, noise_std=1.0), "were both given"),
        (dict(), "num_examples is needed where each example is protected"),
        (dict(algorithm="drag"), "drag adds no noise"),
        (dict(algorithm="byz_clip21_sgd2m", epsilon=-1.0), "epsilon must be"),
        (dict(algorithm="byz_clip21_sgd2m", epsilon=math.inf), "epsilon must be"),
        (dict(algorithm="byz_clip21_sgd2m", noise_std=0.0), "noise_std must be"),
        (dict(algorithm="byz_clip21_sgd2m", noise_std=1e-9), "too small to count"),
        (dict(algorithm="byz_clip21_sgd2m", delta=1.0), "delta must satisfy"),
        (dict(algorithm="byz_clip21_sgd2m", rounds=0), "rounds must be"),
        (dict(algorithm="byz_clip21_sgd2m", clip_norm=math.inf), "needs a bound"),
        (dict(algorithm="byzuldp", rule="nnm+median"), "sensitivity"),
        (dict(algorithm="no_such"), "no_such"),
        (dict(num_examples=0), "num_examples must be"),
        (dict(num_examples=10**23), "num_examples must be"),
        (dict(num_examples=9, num_parameters=-5), "num_parameters must be"),
        (dict(num_examples=9, clip_norm=1e-16), "clip_norm must be at least 1e-15"),
        (dict(num_examples=9, epsilon=1e308), "epsilon must be at most 1e13"),
        (dict(num_examples=9, epsilon=1e-300), "float32"),
        (dict(num_examples=9, noise_std=1e39), "float32"),
        (dict(algorithm="byzuldp", rule="krum", num_byzantine=12), "krum|2f"),
    ],
)
def test_bad_requests_are_explained(changes, why):
    with pytest.raises(ValueError, match=why):
        of(**changes)


@pytest.mark.parametrize(
    ("amplification", "batch_size"), [(False, None), (False, 10), (True, 10)]
)
def test_half_the_sensitivity_is_never_said_to_cost_more(amplification, batch_size):
    for epsilon in (0.1, 2.0):
        it = of(
            num_examples=60,
            batch_size=batch_size,
            epsilon=epsilon,
            amplification=amplification,
        )
        (note,) = [n for n in it.notes if "formula says" in n]
        said = re.search(r"epsilon would be ([0-9.e+]+)\.", note)
        if said is None:
            assert "a valid bound here" in note
            assert it.rows[0].certified <= it.rows[0].nominal
        else:
            assert float(said[1]) < it.rows[0].certified
        assert any("heuristic" in n for n in it.notes) == (
            said is not None and batch_size is not None
        )


def test_whose_formula_and_what_is_left_out():
    notes = " ".join(of(num_examples=60, epsilon=20.0).notes)
    assert "The nominal epsilon of safe_dshb is by Byz-Clip21-SGD2M's formula" in notes
    assert "beyond its theorem: closed form of Safe-DGD." in notes
    notes = " ".join(of("byz_clip21_sgd2m", epsilon=2.0).notes)
    assert "may differ" not in notes and "beyond its theorem" not in notes


def test_more_rounds_than_loss_distributions_can_take():
    it = of(num_examples=60, batch_size=6, amplification=True, rounds=2**31 - 1)
    assert "Rényi divergences" in it.statement.accountant
    assert it.statement.epsilon_certified == pytest.approx(8, rel=1e-4)


def test_a_delta_that_protects_nobody_is_mentioned():
    assert (
        "one over the clients"
        in of(algorithm="byz_clip21_sgd2m", delta=0.04, num_clients=25).text()
    )
    assert "one over the examples" in of(num_examples=1000).text()
    assert "one over" not in of(num_examples=999).text()


def test_other_formulas_are_those_of_the_library():
    it = of(algorithm="byz_clip21_sgd2m", epsilon=2.0, delta=1e-5, rounds=64)
    rows = {row.name: row.noise_std for row in it.rows}
    for name, mode in (
        ("closed form of Safe-DGD", "safe_dgd"),
        ("closed form of ByzULDP", "closed_form"),
        ("optimum over Rényi orders", "rdp"),
        ("certified for 2", "exact"),
    ):
        z = gaussian.noise_multiplier(2.0, 1e-5, 64, mode=mode)
        assert rows[name] == pytest.approx(2 * z, rel=1e-6)
    dwork = privacy.dwork_noise_std(2.0, 2.0, 5e-6, 64)
    assert rows["advanced composition"] == pytest.approx(dwork, rel=1e-6)
    # Beyond its theorem a formula is left out: that of Safe-DGD first.
    it = of(algorithm="byz_clip21_sgd2m", epsilon=20.0, delta=1e-5, rounds=64)
    assert "closed form of Safe-DGD" not in [row.name for row in it.rows]


@pytest.mark.parametrize("name", [*PRIVATE, "byz_clip21_sgd2m_plus(noise_on=sum)"])
@pytest.mark.parametrize("calibration", ["certified", "nominal"])
def test_the_noise_that_is_stated_is_the_noise_that_is_added(name, calibration):
    batch = {"safe_dsgd": 1, "byz_clip21_sgd2m_plus(noise_on=sum)": 10}.get(name)
    config = configs.resolve(
        configs.TrainConfig(
            algorithm=name,
            epsilon=3.0,
            noise_calibration=calibration,
            batch_size=batch,
        )
    )
    hparams, it = budget.budget(config, 10, dim=7)
    mechanism = budget.build(config, hparams, config.rule, 0, dim=7).mechanism
    assert mechanism.noise_std == pytest.approx(it.noise_std, rel=1e-6)
    examples = 1 if name == "safe_dsgd" else 10
    assert mechanism.sensitivity(examples) == pytest.approx(it.sensitivity)
    exact = privacy.certified_epsilon(it.noise_std, it.sensitivity, 1e-3, 100)
    assert it.epsilon_certified == pytest.approx(exact)
    asked = it.epsilon_certified if calibration == "certified" else it.epsilon_nominal
    assert asked == pytest.approx(3.0, rel=1e-6)


def test_byzuldp_row_35_every_private_run_says_it_all():
    config = configs.resolve(configs.TrainConfig(algorithm="byzuldp", epsilon=5.0))
    fields = budget.budget(config, 10)[1].as_dict()
    for name in ("epsilon_certified", "epsilon_nominal", "delta", "rounds", "clip_norm",
                 "sensitivity", "noise_std", "sensitivity_mode", "adversary", "unit",
                 "adjacency", "model", "mechanism", "sampling", "accountant",
                 "tuned_on_private_data"):  # fmt: skip
        assert fields[name] not in (None, "")
    assert "more than the privacy model allows" in fields["adversary"]
    for attack, says in (("sign_flip", "own data"), ("none", "none")):
        calm = dataclasses.replace(config, attack=attack, byzantine_own_data=True)
        assert says in budget.budget(calm, 10)[1].adversary
    local = configs.resolve(configs.TrainConfig())
    assert "as the privacy model allows" in budget.budget(local, 10)[1].adversary
    nobody = configs.resolve(configs.TrainConfig(num_byzantine=0))
    assert budget.budget(nobody, 10)[1].adversary == "none"
