# SPDX-License-Identifier: Apache-2.0
"""The typed configuration of one run: flags, TOML, and the identity of a run."""

import dataclasses
import hashlib
import inspect
import json
import os
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal

from jaxfed import _registry, _validate, algorithms, naming

# Where data lie does not change what a run computes; a digest of the data is checked.
_NOT_IDENTITY = ("data_dir",)
# Arguments of methods that follow from the settings, or are no text.
_NOT_OPTIONS = (
    *("cohort_size", "compressor", "dim", "divergence", "initial", "key", "local_work"),
    *("noise_std", "root_reducer", "root_work", "server_optimizer"),
)
HEADER = "# Written by jaxfed "


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What a run computes. Two equal configurations give bit-identical results."""

    dataset: str = "digits"
    """Data set: "digits" (comes with scikit-learn) or one prepared by TFDS, "mnist"."""
    data_dir: str | None = None
    """Folder of prepared sets; None: TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    model: str = "softmax"
    """Model: softmax, mlp, cnn, small_cnn or byzuldp_cnn."""
    split: str = "iid"
    """How data are split over clients: iid, dirichlet or by_classes."""
    beta: float | None = None
    """Concentration of the dirichlet split, > 0; 0.1 makes clients very different."""
    classes_per_client: int | None = None
    """Classes a client holds under the by_classes split."""
    num_clients: int = 25
    """All clients, Byzantine ones included."""
    num_byzantine: int = 5
    """Clients that really attack: the last ids."""
    rule_byzantine: int | None = None
    """Attackers the rule is told to expect; None: num_byzantine."""
    byzantine_own_data: bool | None = None
    """Whether attackers own a share of the data; None: if the attack needs it."""
    algorithm: str = "safe_dshb"
    """Method, with options of its own in brackets, e.g. "drag(strength=0.25)"; "jaxfed
    list" names them all."""
    rule: str | None = None
    """Rule: pre-aggregators and a rule joined by +, e.g. "nnm+trimmed_mean"; None:
    nnm+median for robust methods, mean for others, unless a method has its own."""
    attack: str = "ipm(scale=10)"
    """What attackers do, with options in brackets; "none" for honest ones."""
    rounds: int = 100
    """Rounds of training, which is also what privacy is accounted for."""
    eval_every: int = 10
    """Rounds between evaluations on the test data."""
    clients_per_round: int | None = None
    """Clients drawn at random each round; None: all of them."""
    batch_size: int | None = None
    """Examples of one gradient of a client; None: all it has, 10 for local steps."""
    local_steps: int | None = None
    """Steps a client takes each round; None: 5 if the method takes several."""
    local_epochs: int | None = None
    """Passes of a client over its data each round, instead of local_steps."""
    local_learning_rate: float | None = None
    """Step size of the client's own steps, > 0; None: 0.1 if it takes several."""
    root_size: int | None = None
    """Trusted examples at the server, drawn from honest clients; None: 100 if the
    method needs them."""
    microbatch: int | None = None
    """Per-example gradients in memory at a time and client; None: the whole batch."""
    learning_rate: float | None = None
    """Step size of the server, > 0; None: the method's default, or 2."""
    momentum: float | None = None
    """Weight kept by the client's momentum, in [0, 1); None: the method's default."""
    server_momentum: float | None = None
    """Weight kept by the server's memories, in [0, 1); None: the method's default."""
    clip_norm: float | None = None
    """Clip radius, > 0, inf for no clip; None: 1 if the method clips."""
    clip_unit: Literal["example", "client"] | None = None
    """Clip each example's gradient or a client's whole message; None: example if
    possible."""
    outer_clip_norm: float | None = None
    """Radius of the second clip of methods with two; None: the method's default."""
    epsilon: float | None = None
    """Privacy budget of all rounds, > 0, inf for no noise; None: 8 if the method has
    noise."""
    delta: float = 1e-3
    """Failure probability of the privacy guarantee, in (0, 1)."""
    noise_calibration: Literal["certified", "nominal"] = "certified"
    """Epsilon as an accountant certifies it, or as the paper's formula has it (no
    guarantee)."""
    amplification: bool = False
    """Credit that examples (or, behind a trusted server, clients) are drawn at random;
    nobody may see which. Only for methods that keep nothing un-noised."""
    seed: int = 0
    """Seed of split, initial model, batches and noise, >= 0."""
    compare: bool = True
    """Also run the same without noise, and, if the method takes a rule, with plain
    averaging under the same attack."""


@dataclasses.dataclass(frozen=True)
class TrainCommand(TrainConfig):
    """Train a model with Byzantine clients and privacy noise, and keep a run folder.

    Without arguments: digits, 20 honest and 5 Byzantine clients, example-level local
    differential privacy at a certified epsilon of 8.
    """

    config: str | None = None
    """TOML file with any of the settings above; flags override it."""
    out: str | None = None
    """Folder to create; None: runs/DATASET-METHOD-ID, ID hashing the configuration."""
    resume: str | None = None
    """Run folder to continue to the bit-identical result; other flags must agree."""
    overwrite: bool = False
    """Replace the run in an existing run folder; other files in it stay."""
    devices: int | Literal["all"] = 1
    """Devices to spread clients over; must divide num_clients."""
    checkpoint_every: int = 1
    """Evaluations between checkpoints; the last evaluation always has one."""

    def train_config(self) -> TrainConfig:
        """Return the part that says what is computed."""
        names = [f.name for f in dataclasses.fields(TrainConfig)]
        return TrainConfig(**{name: getattr(self, name) for name in names})


def resolve(config: TrainConfig) -> TrainConfig:
    """Replace every default that depends on the method by its value, and check names.

    A setting the method does not have stays None (``epsilon`` becomes inf). Resolving
    twice changes nothing.

    Args:
      config: TrainConfig.

    Returns:
      TrainConfig.

    Raises:
      ValueError: for unknown names, numbers out of range, and settings given to a
        method that has none.
      TypeError: for a value of the wrong kind.
    """
    config = dataclasses.replace(config, **check_types(dataclasses.asdict(config)))
    _validate.count("num_clients", config.num_clients)
    _validate.count("num_byzantine", config.num_byzantine, minimum=0)
    counts = ("rounds", "eval_every", "batch_size", "microbatch", "clients_per_round")
    for name in (*counts, "local_steps", "local_epochs", "root_size"):
        if getattr(config, name) is not None:
            _validate.count(name, getattr(config, name), maximum=_validate.LARGEST)
    _validate.count("seed", config.seed, minimum=0, maximum=2**32 - 1)
    for name in (
        "learning_rate",
        "local_learning_rate",
        "clip_norm",
        "outer_clip_norm",
    ):
        _fits_float32(name, getattr(config, name))
    for name in ("learning_rate", "local_learning_rate"):
        if getattr(config, name) is not None:
            _validate.positive(name, getattr(config, name))
    for name in ("clip_norm", "outer_clip_norm"):
        if getattr(config, name) is not None:
            _validate.positive(name, getattr(config, name), finite=False)
            _validate.squarable(name, getattr(config, name))
    if not 0 < config.delta < 1:
        raise ValueError(f"delta must satisfy 0 < delta < 1, got delta={config.delta}.")
    for name, split in (("beta", "dirichlet"), ("classes_per_client", "by_classes")):
        value = getattr(config, name)
        if value is not None and config.split != split:
            raise ValueError(
                f"{name} belongs to split={split!r}, got {name}={value} "
                f"with split={config.split!r}. Leave it out, or change the split."
            )
    if config.num_byzantine >= config.num_clients:
        raise ValueError(
            f"num_byzantine must be below num_clients, got num_byzantine="
            f"{config.num_byzantine}, num_clients={config.num_clients}: leave at least "
            "one honest client (most rules need a majority)."
        )
    if (config.clients_per_round or 0) > config.num_clients:
        raise ValueError(
            f"clients_per_round must be at most num_clients={config.num_clients}, got "
            f"clients_per_round={config.clients_per_round}."
        )
    method, factory, _ = parse_algorithm(config.algorithm)
    parameters = inspect.signature(factory).parameters
    needs = getattr(factory, "needs", algorithms.Needs())
    attack = make_attack(config.attack)
    changes: dict[str, Any] = {}

    def default(name, value, applies):
        given = getattr(config, name)
        if given is None and applies:
            changes[name] = value
        elif given is not None and not applies:
            raise ValueError(
                f"{method} has no {name}, got {name}={given}. Leave it out "
                f"(or pass --{name.replace('_', '-')} None)."
            )

    averages = "rule" in parameters and parameters["rule"].default is None
    rule = needs.rule or ("mean" if averages else "nnm+median")
    default("rule", rule, "rule" in parameters)
    step = parameters["learning_rate"].default
    default("learning_rate", 2.0 if step is inspect.Parameter.empty else step, True)
    if config.local_steps is not None and config.local_epochs is not None:
        raise ValueError(
            f"local_steps={config.local_steps} and local_epochs={config.local_epochs} "
            "were both given. Leave one of the two out."
        )
    many = needs.local_steps
    default("local_steps", 5 if config.local_epochs is None else None, many)
    default("local_epochs", None, many)
    default("local_learning_rate", 0.1, many)
    default("batch_size", needs.batch_size or (10 if many else None), True)
    default("root_size", 100, needs.root_data)
    default("rule_byzantine", config.num_byzantine, True)
    default("byzantine_own_data", attack.needs_data, True)
    for name in ("momentum", "server_momentum"):
        known = name in parameters
        default(name, parameters[name].default if known else None, known)
    clips = "clip_norm" in parameters
    two = needs.two_clips
    # A factory whose clip of the message may be left out takes per-example clipping.
    examples = two or (clips and parameters["clip_norm"].default is None)
    default("clip_norm", 1.0, clips)
    default("clip_unit", "example" if examples else "client", clips)
    default("outer_clip_norm", parameters["clip_norm"].default if two else None, two)
    unit = config.clip_unit or changes.get("clip_unit")
    if (unit == "example" and not examples) or (unit == "client" and two):
        raise ValueError(
            f"{method} clips {'each example' if two else 'whole messages'}, "
            f"got clip_unit={unit!r}. Leave it out, or use another algorithm, such as "
            "safe_dshb, which takes both."
        )
    if config.microbatch is not None and unit != "example":
        raise ValueError(
            f"microbatch is for per-example clipping, got microbatch="
            f"{config.microbatch} with clip_unit={unit!r}. Leave it out."
        )
    noisy = "noise_std" in parameters
    if config.epsilon is None:
        changes["epsilon"] = 8.0 if noisy else float("inf")
    else:
        _validate.positive("epsilon", config.epsilon, finite=False)
        if not noisy and config.epsilon != float("inf"):
            raise ValueError(
                f"{method} adds no noise, so it has no privacy budget, got "
                f"epsilon={config.epsilon}. Leave epsilon out, or use a private "
                "algorithm such as safe_dshb."
            )
    if config.byzantine_own_data is False and attack.needs_data:
        raise ValueError(
            f"attack {config.attack!r} works on the attackers' own data, got "
            "byzantine_own_data=False. Leave it out."
        )
    return dataclasses.replace(config, **changes)


def parse_algorithm(spec):
    """Return ``(name, factory, options)`` of the text that names a method.

    Raises:
      ValueError: for unknown names or options, and options that are settings.
    """
    stages = _registry.parse(spec)
    if len(stages) != 1:
        raise ValueError(f"an algorithm is one name, got {spec!r}.")
    name, options = stages[0]
    factory = _registry.lookup(naming.ALGORITHMS, name, "algorithm")
    settings = {f.name for f in dataclasses.fields(TrainConfig)}
    for option in options:
        if option in settings or option in _NOT_OPTIONS:
            raise ValueError(
                f"{option} cannot be given in brackets, got {spec!r}. Use the setting "
                "of that name if there is one, else jaxfed.make_algorithm in Python."
            )
    _registry.check(factory, name, options)
    return name, factory, options


def _fits_float32(name, value):
    """Raise if a positive number would become 0 or inf on the device."""
    if value is None or not 0 < value < float("inf"):
        return  # said elsewhere
    if not 1e-37 < value < 1e38:
        raise ValueError(
            f"{name} must lie between 1e-37 and 1e38, the range of float32, got "
            f"{name}={value}."
        )


def make_attack(spec, num_classes=10):
    """Build the attack, telling it the number of classes if it wants to know."""
    stages = _registry.parse(spec)
    factory = naming.ATTACKS.get(stages[0][0]) if len(stages) == 1 else None
    wants = factory is not None and "num_classes" in _registry.accepted(factory)
    return naming.make_attack(spec, **({"num_classes": num_classes} if wants else {}))


def run_id(config: TrainConfig) -> str:
    """Return the identity of a run: SHA-256 of its resolved configuration, in hex.

    Where results go, where data lie, devices and progress are no part of it.

    Args:
      config: TrainConfig.

    Returns:
      64 hex digits.
    """
    fields = dataclasses.asdict(resolve(config))
    # Without what is None, so that a new setting leaves the runs there are alone.
    kept = {k: v for k, v in fields.items() if v is not None and k not in _NOT_IDENTITY}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """Say in words where two configurations mean different runs."""
    a, b = dataclasses.asdict(resolve(old)), dataclasses.asdict(resolve(new))
    return [
        f"{name} is {a[name]!r} there and {b[name]!r} here"
        for name in a
        if a[name] != b[name] and name not in _NOT_IDENTITY
    ]


# TOML has no null: every field that may be None has the default None, and is left out.


def to_toml(config: TrainConfig) -> str:
    """Return a configuration as TOML, without the fields that are None.

    Args:
      config: TrainConfig.

    Returns:
      Text that :func:`from_toml` reads back.
    """
    import tomli_w

    fields = dataclasses.asdict(config)
    return tomli_w.dumps({k: v for k, v in fields.items() if v is not None})


def from_toml(path, cls=TrainConfig):
    """Read a configuration from a TOML file; keys are the names of the flags.

    Args:
      path: the file.
      cls: TrainConfig, or TrainCommand to allow ``out``, ``devices`` and
        ``checkpoint_every`` as well.

    Returns:
      An instance of ``cls``; what the file leaves out has its default.

    Raises:
      ValueError: for a file that cannot be read or is not TOML, or unknown keys
        (naming the nearest).
      TypeError: for a value of the wrong type.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"cannot read the configuration {os.fspath(path)}: {error.strerror}. Give "
            "a TOML file, such as the config.toml of a run folder."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{os.fspath(path)} is not readable TOML: {error}. Write one 'name = "
            'value\' a line, text in double quotes, e.g. rule = "nnm+median".'
        ) from None
    values = {key.replace("-", "_"): value for key, value in values.items()}
    flags_only = {"config", "resume", "overwrite"}
    known = {f.name: f for f in dataclasses.fields(cls) if f.name not in flags_only}
    for key in values:
        _registry.lookup(known, key, f"setting in {os.fspath(path)}:")
    return cls(**check_types(values, cls, f"{os.fspath(path)}: "))


def check_types(values, cls=TrainConfig, where=""):
    """Return the values with integers made floats where floats are asked for.

    Raises:
      TypeError: for a value that is not of its field's type.
    """
    hints = typing.get_type_hints(cls)
    return {
        name: _checked(f"{where}{name}", value, hints[name])
        for name, value in values.items()
    }


def _checked(name, value, hint):
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if union else (hint,)
    words = []
    for option in options:
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
                return value
            words += [repr(v) for v in typing.get_args(option)]
        elif option is types.NoneType:
            if value is None:
                return value
        elif type(value) is option:
            return value
        elif option is float and type(value) is int:
            return float(value)
        else:
            words.append(
                {"str": "text", "bool": "true or false"}.get(option.__name__)
                or f"of type {option.__name__}"
            )
    raise TypeError(
        f"{name} must be {' or '.join(words)}, got {value!r} ({type(value).__name__})."
    )


def as_command(config: TrainConfig) -> TrainCommand:
    """Return a configuration with the default options of a command."""
    return TrainCommand(**dataclasses.asdict(config))
