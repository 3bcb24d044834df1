# SPDX-License-Identifier: Apache-2.0
"""From a configuration to a method, its noise and its privacy statement; no data."""

import math

import numpy as np
import optax

from jaxfed import _registry, local, naming, privacy
from jaxfed.experiments import config as configs
from jaxfed.privacy import composition

_HYPERPARAMETERS = (
    "learning_rate",
    "local_learning_rate",
    "clip_norm",
    "outer_clip_norm",
    "momentum",
    "server_momentum",
    "noise_std",
)


def build(config, hparams, rule, key, model=None, dim=None):
    """Build the method from whatever arguments its factory accepts.

    Args:
      config: resolved TrainConfig.
      hparams: numeric hyperparameters by name, plain or traced; see :func:`budget`.
      rule: text of the rule, None for methods with a rule of their own.
      key: typed key or int seed of the noise.
      model: Flax module; None: its local work cannot run.
      dim: number of parameters, where a sensitivity needs it.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for whatever the factory refuses.
    """
    name, factory, own = configs.parse_algorithm(config.algorithm)
    losses = norms = None
    if model is not None:
        from jaxfed import models

        losses = models.example_losses(model)
        if config.clip_unit == "example" and config.microbatch is None:
            norms = models.gradient_norms(model) if _mostly_dense(model) else None
    per_example = config.clip_unit == "example"
    inner = hparams["clip_norm"] if per_example else None
    if config.local_learning_rate is None:
        work = local.gradient(
            losses,
            batch_size=config.batch_size,
            clip_norm=inner,
            microbatch=config.microbatch,
            norms=norms,
        )
    else:
        work = local.local_sgd(
            losses,
            optax.sgd(hparams["local_learning_rate"]),
            steps=config.local_steps,
            epochs=config.local_epochs,
            batch_size=config.batch_size,
            clip_norm=inner,
        )
    message_clip = "outer_clip_norm" if per_example else "clip_norm"
    options = {
        "learning_rate": hparams["learning_rate"],
        "rule": rule,
        "num_byzantine": config.rule_byzantine,
        "num_clients": config.num_clients,
        "cohort_size": config.clients_per_round,
        "dim": dim,
        "key": key,
        "clip_norm": hparams.get(message_clip),
        "noise_std": hparams.get("noise_std"),
        "momentum": hparams.get("momentum"),
        "server_momentum": hparams.get("server_momentum"),
        "local_learning_rate": hparams.get("local_learning_rate"),
        "local_work": work,
    }
    takes = _registry.accepted(factory)
    if "rule" in takes:
        takes |= {"num_byzantine", "key"}
    given = {k: v for k, v in options.items() if k in takes and v is not None}
    return naming.make_algorithm(name, **given, **own)


def _mostly_dense(model):
    """Whether norms of gradients are cheaper than the gradients."""
    convolutional = getattr(model, "convolutional", False)
    return getattr(model, "mostly_dense", not convolutional)


def budget(config, examples, dim=None, *, noise_std=None):
    """Derive the noise from epsilon, and account for what will run.

    Args:
      config: resolved TrainConfig.
      examples: those of the honest client that has fewest, >= 1.
      dim: number of parameters, where a sensitivity needs it.
      noise_std: the noise itself, instead of what ``config.epsilon`` asks for.

    Returns:
      ``(hyperparameters as floats, PrivacyStatement)``.

    Raises:
      ValueError: for every number that the method or the accounting refuses.
    """
    hparams = {
        name: _float32(getattr(config, name))
        for name in _HYPERPARAMETERS
        if getattr(config, name, None) is not None
    }
    # Built with plain numbers, so that every wrong value raises here.
    name, factory, _ = configs.parse_algorithm(config.algorithm)
    takes = _registry.accepted(factory)
    private = config.epsilon != math.inf or noise_std is not None
    # With noise in it, so that a method that cannot hide behind it says so.
    trial = hparams | ({"noise_std": 1.0} if private else {})
    mechanism = build(config, trial, config.rule, 0, dim=dim).mechanism
    batch = min(config.batch_size or examples, examples)
    common = {"rounds": config.rounds, "delta": config.delta}
    attack = configs.make_attack(config.attack)
    if mechanism is None:
        statement = privacy.make_statement(
            unit="client",
            clip_norm=math.inf,
            noise_std=0.0,
            sensitivity=math.inf,
            sampling_text=_sampling(config, batch),
            mechanism=f"{name} neither clips nor adds noise",
            **common,
        )
        return hparams, statement
    central = private and mechanism.model == "central"
    if central and config.clients_per_round is not None and "cohort_size" not in takes:
        raise ValueError(
            f"{name} is accounted for with every client in every round, got "
            f"clients_per_round={config.clients_per_round}. Leave it out."
        )
    sensitivity = float(mechanism.sensitivity(batch))
    if private and sensitivity == math.inf:
        raise ValueError(
            f"epsilon={config.epsilon} needs a bound on what a client sends, got "
            f"clip_norm={config.clip_norm}. Give a finite clip_norm, or epsilon=inf "
            "for no privacy."
        )
    drawn = _drawn(config, mechanism, name, batch, examples)
    # Byz-Clip21's own heuristic for a batch drawn at random.
    rate = 1.0
    if mechanism.unit == "example" and config.batch_size is not None:
        rate = min(1.0, config.batch_size / examples)
    # What the paper's formula makes of the noise, times the noise.
    norm = mechanism.nominal_norm or sensitivity / 2
    spread = math.sqrt(config.rounds * -math.log(config.delta))
    claimed = 2 * (mechanism.nominal or 0.5) * norm * spread * rate
    if noise_std is None and not private:
        noise_std = 0.0
    elif noise_std is None and config.noise_calibration == "nominal":
        noise_std = claimed / config.epsilon
    elif noise_std is None:
        noise_std = sensitivity * composition.noise_multiplier(
            config.epsilon,
            config.delta,
            config.rounds,
            sampling=drawn,
            accountant=composition.accountant_for(drawn, config.rounds, config.delta),
        )
    if private:
        # Some methods spread the noise they are given, so that less arrives.
        arrives = mechanism.noise_std
        if not 1e-37 < noise_std / arrives < 1e38:
            raise ValueError(
                f"epsilon={config.epsilon} needs noise_std={noise_std:.4g}, which no "
                "float32 holds. Change epsilon, or clip_norm and with it the scale."
            )
        hparams["noise_std"] = _float32(noise_std / arrives, up=True)
        noise_std = hparams["noise_std"] * arrives
    statement = privacy.make_statement(
        unit=mechanism.unit,
        clip_norm=mechanism.clip_norm,
        noise_std=noise_std,
        sensitivity=sensitivity,
        sampling_text=_sampling(config, batch),
        credited=drawn,
        mechanism=_mechanism(name, mechanism, clips="clip_norm" in takes),
        model=mechanism.model,
        epsilon_nominal=claimed / noise_std if noise_std else None,
        nominal_formula=_formula(name, mechanism),
        sensitivity_mode=mechanism.source,
        attackers=0 if config.attack == "none" else config.num_byzantine,
        attackers_see_messages=attack.sees_messages,
        more_caveats=tuple(_more_caveats(config, mechanism.unit, examples)),
        **common,
    )
    return hparams, statement


def _more_caveats(config, unit, examples):
    if config.compare:
        yield (
            "The comparisons train on the same data again, with other noise or none, "
            "and are not covered."
        )
    units = examples if unit == "example" else config.num_clients
    if config.delta * units >= 1:
        yield (
            f"delta {config.delta:.4g} is not below 1 / {units}, one over the {unit}s: "
            "publishing one of them at random would pass as private."
        )


def _drawn(config, mechanism, name, batch, examples):
    """Return the draw of examples or clients that may be credited, or raise."""
    if not config.amplification:
        return composition.ALL
    if not mechanism.memoryless:
        raise ValueError(
            f"{name} keeps what it saw in earlier rounds without noise, so a random "
            "draw hides nobody: amplification=True does not hold for it. Leave it out."
        )
    if mechanism.unit == "example" and mechanism.model == "local" and batch < examples:
        return composition.without_replacement(batch, examples)
    size = config.clients_per_round
    # Byzantine clients know when they are drawn: only the honest ones are a crowd.
    crowd = config.num_clients - max(config.num_byzantine, config.rule_byzantine)
    hidden = mechanism.unit == "client" and mechanism.model == "central"
    if hidden and size is not None and size < crowd:
        return composition.without_replacement(size, crowd)
    what = "examples (--batch-size)"
    if mechanism.unit == "client":
        what = "clients (--clients-per-round) behind a trusted server"
    raise ValueError(
        f"amplification=True credits a random draw of {what}, and {name} draws none "
        "here. Leave it out."
    )


def _formula(name, mechanism):
    own = mechanism.nominal is not None or mechanism.nominal_norm is not None
    return name if own else "Byz-Clip21-SGD2M"


def _mechanism(name, mechanism, clips):
    where = "at each client" if mechanism.model == "local" else "behind the rule"
    if mechanism.unit == "example":
        what = "each example's gradient clipped, then averaged"
    else:
        what = f"each client's message {'clipped' if clips else 'normalised'}"
    return f"{name}: {what}, Gaussian noise added {where}"


def _sampling(config, batch):
    who = "every client in every round"
    if config.clients_per_round is not None:
        who = f"{config.clients_per_round} clients drawn at random in every round"
    if config.batch_size is None:
        return f"{who}, every one of its examples"
    size = f"{batch}" if batch == config.batch_size else f"{batch} or more"
    if config.local_learning_rate is not None:
        return f"{who}, several batches of {size} of its examples"
    return f"{who}, {size} of its examples, drawn uniformly without replacement"


def _float32(value, *, up=False):
    """Round to what the device will hold; ``up`` never rounds noise down."""
    rounded = np.float32(value)
    if up and float(rounded) < value:
        rounded = np.nextafter(rounded, np.float32(np.inf))
    return float(rounded)
