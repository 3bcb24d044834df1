# SPDX-License-Identifier: Apache-2.0
"""From a configuration to data, pure functions and a privacy statement."""

import dataclasses
import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfed import _registry, local, naming, privacy, rounds
from jaxfed._base import Shard
from jaxfed.experiments import config as configs

_HYPERPARAMETERS = (
    "learning_rate",
    "local_learning_rate",
    "clip_norm",
    "outer_clip_norm",
    "momentum",
    "server_momentum",
    "noise_std",
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One configuration, ready to be compiled. Built by :func:`make_problem`.

    Attributes:
      config: resolved TrainConfig.
      shards: stacked Shard ``[n, capacity, ...]``, poisoned if the attack does so.
      root: the server's own Shard, None for methods without.
      test: ``{"image", "label"}``.
      data_sha256: digest of the training and test data, in hex.
      model: Flax module.
      hparams: numeric hyperparameters as float32 scalars; they are arguments of the
        compiled program. Without noise there is no ``noise_std`` among them.
      statement: PrivacyStatement.
      sizes: examples of each honest client.
    """

    config: configs.TrainConfig
    shards: Shard
    root: Shard | None
    test: dict[str, jax.Array]
    data_sha256: str
    model: Any
    hparams: dict[str, jax.Array]
    statement: privacy.PrivacyStatement
    sizes: np.ndarray

    def numbers(self, rule):
        """Return the hyperparameters under another rule: its noise may differ."""
        config = dataclasses.replace(self.config, rule=rule)
        return _on_device(_privacy(config, self.sizes, self.model, self.test)[0])

    def noise_text(self):
        """Say how large the noise is beside what it hides; empty without noise."""
        if self.statement.model == "none":
            return ""
        where = {"local": "each message", "central": "the aggregate"}
        norm = self.statement.noise_std * math.sqrt(_size(self.model, self.test))
        return (
            f"  size: the noise on {where[self.statement.model]} has norm about "
            f"{norm:.3g}; what it hides has norm at most {self.statement.clip_norm:.3g}"
        )

    def init(self, hparams, seed, *, rule, mesh=None):
        """Return the SimulationState of round 0; ``seed`` may be traced."""
        key = jax.random.key(seed)
        images = jax.tree.leaves(self.test["image"])[0][:1]
        params = self.model.init(jax.random.fold_in(key, 0), images)["params"]
        simulation = self._simulate(hparams, rule, jax.random.fold_in(key, 1), mesh)
        return simulation.init(params, jax.random.fold_in(key, 2))

    def chunk(self, state, hparams, shards, root, test, *, rule, rounds, mesh=None):
        """Train ``rounds`` rounds and evaluate.

        Returns:
          ``(state, {"loss", "accuracy", "train_loss", "influence", ...})``: the first
          two on ``test``, the third the mean over rounds and honest clients, the last
          ``[rounds]``, the share of each step that came from Byzantine clients, and so
          are the scalars that a rule reports of its own.
        """
        from jaxfed import models

        # The noise link carries its own key in the state; this one is never drawn from.
        simulation = self._simulate(hparams, rule, jax.random.key(0), mesh)
        state, metrics = simulation.run(state, shards, rounds, root)
        result = models.evaluate(self.model, simulation.model(state), test)
        # A cohort without honest clients has no loss.
        seen = {"train_loss": jnp.nanmean(metrics.pop("loss"))}
        scalars = {k: v for k, v in metrics.items() if v.ndim == 1}
        return state, result | seen | scalars

    def params(self, state):
        """Return the model's parameters in a state."""
        # Plain numbers: building a method from device scalars would compile something.
        numbers = {name: float(value) for name, value in self.hparams.items()}
        return self._simulate(numbers, "mean", jax.random.key(0), None).model(state)

    def _simulate(self, hparams, rule, key, mesh):
        config = self.config
        return rounds.simulate(
            _algorithm(config, hparams, rule, key, self.model),
            config.num_clients,
            num_byzantine=config.num_byzantine,
            attack=configs.make_attack(config.attack),
            cohort_size=config.clients_per_round,
            chunk_size=_clients_at_once(self.model, mesh),
            inspect=True,
            mesh=mesh,
        )


def make_problem(config) -> Problem:
    """Load the data, split it, and derive the noise; nothing is compiled.

    Args:
      config: TrainConfig, resolved or not.

    Returns:
      Problem.

    Raises:
      ValueError: for everything a configuration can get wrong, missing data included.
      ImportError: if a package of the extra ``train`` is missing.
    """
    from jaxfed import data, models

    config = configs.resolve(config)
    if config.rule is not None:
        naming.make_aggregator(config.rule, config.rule_byzantine, key=0)
    dataset = data.load(config.dataset, config.data_dir)
    model = models.make_model(config.model, dataset.num_classes)
    honest = config.num_clients - config.num_byzantine
    owners = config.num_clients if config.byzantine_own_data else honest
    parts = data.split(
        dataset.train["label"],
        owners,
        kind=config.split,
        seed=config.seed,
        beta=config.beta,
        classes_per_client=config.classes_per_client,
    )
    root = None
    if config.root_size is not None:
        chosen = data.root_indices(
            parts, config.root_size, seed=config.seed, benign=np.arange(owners) < honest
        )
        stacked = data.stack(dataset.train, [chosen])
        root = jax.tree.map(lambda x: x[0], stacked)
    parts += [np.zeros(0, np.int64)] * (config.num_clients - owners)
    shards = configs.make_attack(config.attack, dataset.num_classes).poison(
        data.stack(dataset.train, parts),
        rounds.byzantine_ids(config.num_clients, config.num_byzantine),
    )
    sizes = np.array([len(p) for p in parts[:honest]])
    hparams, statement = _privacy(config, sizes, model, dataset.test)
    return Problem(
        config=config,
        shards=shards,
        root=root,
        test=jax.tree.map(jnp.asarray, dataset.test),
        data_sha256=_digest(dataset.train, dataset.test),
        model=model,
        hparams=_on_device(hparams),
        statement=statement,
        sizes=sizes,
    )


def _on_device(hparams):
    return {k: jnp.asarray(v, jnp.float32) for k, v in hparams.items()}


def _size(model, test):
    """Return the number of parameters."""
    images = jax.ShapeDtypeStruct((1, *test["image"].shape[1:]), test["image"].dtype)
    params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    return sum(x.size for x in jax.tree.leaves(params))


def _clients_at_once(model, mesh):
    """Return how many clients work at a time: one, for convolutions on a CPU.

    There ``vmap`` over clients costs more than a loop; elsewhere, and where the clients
    are spread over devices, all work together.
    """
    slow = getattr(model, "convolutional", False) and jax.default_backend() == "cpu"
    return 1 if slow and mesh is None else None


def _algorithm(config, hparams, rule, key, model=None, dim=None):
    """Build the method from whatever arguments its factory accepts."""
    from jaxfed import models

    name, factory, own = configs.parse_algorithm(config.algorithm)
    losses = None if model is None else models.example_losses(model)
    per_example = config.clip_unit == "example"
    inner = hparams["clip_norm"] if per_example else None
    if config.local_learning_rate is None:
        work = local.gradient(
            losses,
            batch_size=config.batch_size,
            clip_norm=inner,
            microbatch=config.microbatch,
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


def _privacy(config, sizes, model, test):
    """Derive the noise from epsilon, and account for what will run.

    Args:
      config: resolved TrainConfig.
      sizes: examples of each honest client.
      model: Flax module.
      test: the test data, for the size of the model.

    Returns:
      ``(hyperparameters as floats, PrivacyStatement)``.
    """
    hparams = {
        name: _float32(getattr(config, name))
        for name in _HYPERPARAMETERS
        if getattr(config, name, None) is not None
    }
    # Built with plain numbers, so that every wrong value raises here.
    name, factory, _ = configs.parse_algorithm(config.algorithm)
    takes = _registry.accepted(factory)
    private = config.epsilon != math.inf
    # With noise in it, so that a method that cannot hide behind it says so.
    trial = hparams | ({"noise_std": 1.0} if private else {})
    dim = _size(model, test)
    mechanism = _algorithm(config, trial, config.rule, 0, dim=dim).mechanism
    smallest = max(1, int(sizes[sizes > 0].min(initial=sizes.max())))
    batch = min(config.batch_size or smallest, smallest)
    # A batch drawn at random; a client with fewer examples uses all of them.
    rate = min(1.0, config.batch_size / smallest) if config.batch_size else 1.0
    common = {"rounds": config.rounds, "delta": config.delta}
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
    per_example = mechanism.unit == "example"
    rate = rate if per_example else 1.0
    noise_std, nominal = 0.0, None
    # What the method's own paper claims, times the noise.
    spread = math.sqrt(config.rounds * -math.log(config.delta))
    claimed = (mechanism.nominal or 0.5) * sensitivity * spread
    if private:
        if sensitivity == math.inf:
            raise ValueError(
                f"epsilon={config.epsilon} needs a bound on what a client sends, got "
                f"clip_norm={config.clip_norm}. Give a finite clip_norm, or "
                "epsilon=inf for no privacy."
            )
        if config.noise_calibration == "nominal":
            nominal = config.epsilon
            if mechanism.nominal is None:
                noise_std = privacy.nominal_noise_std(
                    mechanism.clip_norm, nominal, sampling_rate=rate, **common
                )
            else:
                noise_std = claimed / nominal
        else:
            noise_std = privacy.certified_noise_std(
                config.epsilon, sensitivity, **common
            )
            if mechanism.nominal is not None:
                nominal = claimed / noise_std
        noise_std = hparams["noise_std"] = _float32(noise_std, up=True)
    statement = privacy.make_statement(
        unit=mechanism.unit,
        clip_norm=mechanism.clip_norm,
        noise_std=noise_std,
        sensitivity=sensitivity,
        sampling_rate=rate,
        sampling_text=_sampling(config, batch),
        mechanism=_mechanism(name, mechanism, clips="clip_norm" in takes),
        model=mechanism.model,
        epsilon_nominal=nominal,
        nominal_formula="Byz-Clip21-SGD2M" if mechanism.nominal is None else name,
        sensitivity_mode=mechanism.source,
        **common,
    )
    return hparams, statement


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


def _digest(*trees):
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(trees):
        digest.update(f"{leaf.dtype}{leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf))
    return digest.hexdigest()
