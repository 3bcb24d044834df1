# SPDX-License-Identifier: Apache-2.0
"""The compiled programs of one problem: each is compiled once, ahead of time."""

import functools
import time

import jax
import jax.numpy as jnp

from jaxfed import sharding
from jaxfed.experiments.problem import Problem


class Programs:
    """Compiles and runs a problem's functions; nothing is ever compiled twice.

    Args:
      problem: Problem.
      devices: number of devices to spread clients over, or ``"all"``.

    Attributes:
      seconds: time spent tracing and compiling so far.

    Raises:
      ValueError: for more devices than there are, or a number of clients that is no
        multiple of them.
    """

    def __init__(self, problem: Problem, devices=1):
        self._problem = problem
        self._compiled = {}
        self.seconds = 0.0
        self._mesh = _mesh(devices)
        self._shards, self._root, self._test = (
            problem.shards,
            problem.root,
            problem.test,
        )
        self.hparams = problem.hparams
        if self._mesh is not None:
            self._shards = sharding.shard_clients(problem.shards, self._mesh)
            whole = jax.jit(functools.partial(sharding.replicated, mesh=self._mesh))
            self._root, self._test, self.hparams = whole(
                (problem.root, problem.test, problem.hparams)
            )

    def check(self, rule, rounds):
        """Trace the program of a rule, so that what is wrong raises before compiling.

        Raises:
          ValueError: whatever shapes and counts can get wrong, e.g. ``2 f >= n``.
        """
        state = jax.eval_shape(self._init(rule), self.hparams, self._seed())
        args = (state, self.hparams, self._shards, self._root, self._test)
        jax.eval_shape(self._chunk(rule, rounds), *args)

    def state(self, rule):
        """Return the shapes and shardings of the state as ``ShapeDtypeStruct``."""
        init = self._get_init(rule)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            init.out_info,
            init.output_shardings,
        )

    def init(self, rule):
        """Return the state of round 0."""
        return self._get_init(rule)(self.hparams, self._seed())

    def prepare(self, rule, rounds):
        """Compile the training of a number of rounds, unless that is done."""
        self._get_chunk(rule, rounds)

    def train(self, rule, rounds, state, hparams):
        """Train and evaluate; ``state`` is used up.

        Returns:
          ``(state, metrics)``, metrics as Python numbers and lists.
        """
        chunk = self._get_chunk(rule, rounds)
        state, metrics = chunk(state, hparams, self._shards, self._root, self._test)
        return state, {k: v.tolist() for k, v in jax.device_get(metrics).items()}

    def _seed(self):
        return jnp.uint32(self._problem.config.seed)

    # One function object each, so that JAX reuses the trace made by ``check``.

    @functools.cache  # noqa: B019, lives as long as the run
    def _init(self, rule):
        def init(hparams, seed):
            state = self._problem.init(hparams, seed, rule=rule, mesh=self._mesh)
            return self._placed(state)

        return init

    @functools.cache  # noqa: B019
    def _chunk(self, rule, rounds):
        def chunk(state, hparams, *data):
            state, metrics = self._problem.chunk(
                state, hparams, *data, rule=rule, rounds=rounds, mesh=self._mesh
            )
            return self._placed(state), metrics

        return chunk

    def _placed(self, state):
        whole = sharding.replicated(state._replace(clients=()), self._mesh)
        return whole._replace(clients=sharding.over_clients(state.clients, self._mesh))

    def _get_init(self, rule):
        return self._get(
            ("init", rule), jax.jit(self._init(rule)), self.hparams, self._seed()
        )

    def _get_chunk(self, rule, rounds):
        return self._get(
            ("chunk", rule, rounds),
            jax.jit(self._chunk(rule, rounds), donate_argnums=0),
            self.state(rule),
            self.hparams,
            self._shards,
            self._root,
            self._test,
        )

    def _get(self, name, function, *args):
        if name not in self._compiled:
            start = time.perf_counter()
            self._compiled[name] = function.lower(*args).compile()
            self.seconds += time.perf_counter() - start
        return self._compiled[name]


def _mesh(devices):
    available = jax.devices()
    number = len(available) if devices == "all" else devices
    if isinstance(number, bool) or not 1 <= number <= len(available):
        raise ValueError(
            f"devices must be 'all' or from 1 to {len(available)} (the devices JAX "
            f"sees), got {devices!r}."
        )
    return None if number == 1 else sharding.client_mesh(available[:number])
