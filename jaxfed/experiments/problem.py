# SPDX-License-Identifier: Apache-2.0
"""From a configuration to data, pure functions and a privacy statement."""

import dataclasses
import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfed import naming, privacy, rounds
from jaxfed._base import Shard
from jaxfed.experiments import budget
from jaxfed.experiments import config as configs


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
            budget.build(config, hparams, rule, key, self.model),
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


def _privacy(config, sizes, model, test):
    """Return the hyperparameters and the statement, for the client with fewest data."""
    smallest = max(1, int(sizes[sizes > 0].min(initial=sizes.max())))
    return budget.budget(config, smallest, _size(model, test))


def _digest(*trees):
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(trees):
        digest.update(f"{leaf.dtype}{leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf))
    return digest.hexdigest()
