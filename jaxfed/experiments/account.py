# SPDX-License-Identifier: Apache-2.0
"""``jaxfed account``: what a method's noise is worth, without training anything."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxfed import _validate, naming, privacy
from jaxfed.experiments import budget
from jaxfed.experiments import config as configs
from jaxfed.privacy import gaussian


@dataclasses.dataclass(frozen=True)
class AccountCommand:
    """Say what noise a method needs for an epsilon, by every formula and for certain.

    Epsilon and delta hold for all rounds together. Nothing is trained, and no data are
    needed.
    """

    algorithm: str = "byz_clip21_sgd2m"
    """Private method, with options in brackets; "jaxfed list" names them all."""
    epsilon: float | None = None
    """Privacy budget > 0 to find the noise for; None: 8, or what noise_std gives."""
    noise_std: float | None = None
    """Noise per coordinate > 0 to find the epsilon of, instead of epsilon."""
    delta: float = 1e-3
    """Failure probability, in (0, 1); below 1 / (units that are protected)."""
    rounds: int = 100
    """Noised releases."""
    clip_norm: float | None = None
    """Clip radius > 0; None: 1."""
    clip_unit: str | None = None
    """"example" or "client"; None: example if the method can."""
    batch_size: int | None = None
    """Examples of one gradient; None: all of them."""
    num_examples: int | None = None
    """Examples of the client with fewest; needed where examples are protected."""
    num_clients: int = 25
    """All clients, Byzantine ones included; central noise depends on it."""
    num_byzantine: int = 5
    """Byzantine clients, which the sensitivity of a rule depends on."""
    clients_per_round: int | None = None
    """Clients drawn at random each round; None: all of them."""
    rule: str | None = None
    """Rule under central noise; None: the method's own."""
    num_parameters: int | None = None
    """Size of the model; only the paper's bound for the median depends on it."""
    amplification: bool = False
    """Credit the random draw of examples or clients, where that is valid."""
    json: bool = False
    """Print JSON instead of text."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One calibration.

    Attributes:
      name: whose formula.
      noise_std: standard deviation per coordinate it asks for.
      nominal: what the method's own paper calls that noise.
      certified: epsilon of that noise for certain.
    """

    name: str
    noise_std: float
    nominal: float
    certified: float


@dataclasses.dataclass(frozen=True)
class Account:
    """What ``jaxfed account`` prints.

    Attributes:
      statement: PrivacyStatement of the noise asked for: certified for ``epsilon``, or
        the ``noise_std`` given.
      epsilon: the budget asked for, None where noise was given.
      rows: calibrations, the paper's own first.
      notes: why the numbers differ, and what they do not cover.
    """

    statement: privacy.PrivacyStatement
    epsilon: float | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return text, numbers and lists, for JSON; infinity is ``"inf"``."""
        plain = dataclasses.asdict(self)
        for row in plain["rows"]:
            for key, value in row.items():
                row[key] = "inf" if value == math.inf else value
        return plain | {
            "statement": self.statement.as_dict(),
            "notes": list(self.notes),
        }

    def text(self) -> str:
        """Return a table and the caveats as plain lines."""
        it = self.statement
        head = [
            f"{it.unit}-level {it.model} differential privacy, {it.rounds} rounds, "
            f"delta {it.delta:.4g}",
            f"  neighbours: {it.adjacency}",
            f"  mechanism: {it.mechanism}",
            f"  clip norm {it.clip_norm:.4g}, sensitivity {it.sensitivity:.4g} "
            f"({it.sensitivity_mode})",
            f"  sampling: {it.sampling}",
            f"  accountant: {it.accountant}",
            "",
        ]
        width = max(len(row.name) for row in self.rows)
        names = ("noise std", "nominal epsilon", "certified epsilon")
        table = ["  ".join([" " * width, *names])]
        for row in self.rows:
            cells = [
                f"{value:>{len(name)}.4g}"
                for name, value in zip(
                    names, (row.noise_std, row.nominal, row.certified), strict=True
                )
            ]
            table.append("  ".join([f"{row.name:<{width}}", *cells]))
        return "\n".join([*head, *table, "", *(f"note: {note}" for note in self.notes)])


def account(command: AccountCommand) -> Account:
    """Account for a method without running it.

    Args:
      command: AccountCommand.

    Returns:
      Account.

    Raises:
      ValueError: for unknown names, numbers out of range, a method without noise, or
        an unknown number of examples where they are protected.
      ImportError: if dp-accounting is missing.
    """
    if command.epsilon is not None and command.noise_std is not None:
        raise ValueError(
            f"epsilon={command.epsilon} and noise_std={command.noise_std} were both "
            "given: one follows from the other. Leave one out."
        )
    config = configs.resolve(_config(command))
    name = configs.parse_algorithm(config.algorithm)[0]
    if config.epsilon == math.inf:
        raise ValueError(
            f"there is nothing to account for: {name} adds no noise, or epsilon is "
            "inf. Use a private method such as safe_dshb, or a finite epsilon."
        )
    examples = _examples(command, config)
    if command.num_parameters is not None:
        _validate.count("num_parameters", command.num_parameters)
    _try_rule(config)

    def stated(noise_std=None):
        return budget.budget(
            config, examples, command.num_parameters, noise_std=noise_std
        )[1]

    def row(name, noise_std):
        it = stated(noise_std)
        return Row(name, it.noise_std, it.epsilon_nominal, it.epsilon_certified)

    it = stated(command.noise_std)
    if it.model == "none":
        raise ValueError(f"noise_std={command.noise_std}: {it.caveats[0]}")
    if command.noise_std is not None:
        rows = [row("the noise given", it.noise_std)]
    else:
        # Nominal epsilons are inversely proportional to the noise.
        paper = it.noise_std * it.epsilon_nominal / config.epsilon
        rows = [row(f"{it.nominal_formula}'s formula", paper)]
        others = _textbook(it, config.epsilon)
        rows += [
            row(other, noise)
            for other, noise in others.items()
            if noise is not None and not math.isclose(noise, paper, rel_tol=1e-6)
        ]
        rows.append(row(f"certified for {config.epsilon:.4g}", it.noise_std))
    less = stated(2 * rows[0].noise_std).epsilon_certified
    notes = [*_why(it, rows[0], less, _rate(config, it, examples)), *it.caveats]
    if it.nominal_formula == "Byz-Clip21-SGD2M" and "clip21" not in name:
        notes.append(
            f"The nominal epsilon of {name} is by {it.nominal_formula}'s formula; its "
            "own paper's may differ."
        )
    if command.noise_std is None and None in others.values():
        left = ", ".join(other for other, noise in others.items() if noise is None)
        notes.append(f"Left out, as epsilon is beyond its theorem: {left}.")
    epsilon = config.epsilon if command.noise_std is None else None
    return Account(it, epsilon, tuple(rows), tuple(notes))


def _textbook(it, epsilon):
    """Return the noise by every other formula, None where it does not apply."""
    noise = {}
    for name, mode in {
        "closed form of Safe-DGD": "safe_dgd",
        "closed form of ByzULDP": "closed_form",
        "optimum over Rényi orders": "rdp",
    }.items():
        try:
            multiplier = gaussian.noise_multiplier(
                epsilon, it.delta, it.rounds, mode=mode
            )
            noise[name] = multiplier * it.sensitivity
        except ValueError:
            noise[name] = None
    # It spends delta twice.
    noise["advanced composition"] = privacy.dwork_noise_std(
        it.sensitivity, epsilon, it.delta / 2, it.rounds
    )
    return noise


def _try_rule(config):
    """Raise if the rule refuses the numbers of clients and attackers."""
    if config.rule is not None:
        rule = naming.make_aggregator(config.rule, config.rule_byzantine, key=0)
        n = config.clients_per_round or config.num_clients
        rows = jax.ShapeDtypeStruct((n, 2), jnp.float32)
        jax.eval_shape(lambda x: rule.update(x, rule.init(x[0]))[0], rows)


def _rate(config, it, examples):
    """Return the share of its examples that a client uses in a round."""
    if it.unit != "example" or config.batch_size is None:
        return 1.0
    return min(1.0, config.batch_size / examples)


def _why(it, paper, less, rate):
    """Explain the two epsilons of the first row; with half the sensitivity ``less``."""
    multiplier = paper.noise_std / it.sensitivity / math.sqrt(it.rounds)
    if "not credited" in it.sampling:
        yield (
            f"{it.rounds} releases with noise {paper.noise_std:.4g} and sensitivity "
            f"{it.sensitivity:.4g} are together one Gaussian release with noise "
            f"multiplier {multiplier:.4g}: epsilon {paper.certified:.4g} at delta "
            f"{it.delta:.4g}."
        )
    said = f"{it.nominal_formula}'s formula says {paper.nominal:.4g}"
    if paper.certified <= paper.nominal:
        yield f"{said}: a valid bound here, but not a tight one."
    elif it.nominal_formula != "Byz-Clip21-SGD2M":
        yield f"{said}, which does not hold at an epsilon this large."
    else:
        half = it.sensitivity / 2
        yield (
            f"{said} because it takes {half:.4g} for the sensitivity, the norm of one "
            f"{it.unit}'s share. But a neighbour's share can point the other way and "
            f"move the message by twice as much, {it.sensitivity:.4g}; with {half:.4g} "
            f"epsilon would be {less:.4g}. The formula also has no constant and no "
            "log(rounds / delta)."
        )
        if rate < 1:
            yield (
                f"It also lowers the noise by the factor {rate:.4g}, the share of its "
                "examples that a client draws: a heuristic, not a proof."
            )


def _config(command):
    """Return the training configuration whose noise is asked for."""
    known = {f.name for f in dataclasses.fields(configs.TrainConfig)}
    given = dataclasses.asdict(command)
    _validate.positive("epsilon", 1 if command.epsilon is None else command.epsilon)
    if command.noise_std is not None:
        _validate.positive("noise_std", command.noise_std)
    # Nothing runs; the number of attackers is what the rule is told.
    return configs.TrainConfig(
        **{k: v for k, v in given.items() if k in known},
        attack="none",
        compare=False,
    )


def _examples(command, config):
    if command.num_examples is not None:
        return _validate.count(
            "num_examples", command.num_examples, maximum=_validate.LARGEST
        )
    if config.clip_unit != "example":
        return config.batch_size or 1  # changes nothing
    if config.batch_size is not None and not config.amplification:
        return config.batch_size
    raise ValueError(
        "num_examples is needed where each example is protected: pass --num-examples, "
        "those of the client with fewest, or (without amplification) --batch-size."
    )
