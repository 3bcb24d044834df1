# SPDX-License-Identifier: Apache-2.0
"""Small federated problems with NumPy twins, and ways to look inside a run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import jaxfed
from jaxfed.local import sample
from jaxfed.privacy.mechanisms import gaussian_noise
from jaxfed.rounds import client_key

# Most of the time of these tests is compilation: ask XLA for code that is slower but
# five times faster to make.
_QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def quick_jit(fun, **options):
    """``jax.jit`` for short runs, where this version of XLA has the options.

    Inside of another transformation it is ``fun`` itself: a part of a program cannot
    have options of its own.
    """
    fast = jax.jit(fun, compiler_options=_compiler_options(), **options)

    @functools.wraps(fun)
    def call(*args, **kwargs):
        try:
            return fast(*args, **kwargs)
        except ValueError as error:
            if "compiler_options" not in str(error):
                raise
        return fun(*args, **kwargs)

    call.lower, call._cache_size = fast.lower, fast._cache_size
    return call


@functools.cache
def _compiler_options():
    try:
        jax.jit(lambda x: x, compiler_options=_QUICK)(0.0)
    except jax.errors.JaxRuntimeError:
        return None
    return _QUICK


class Regression:
    """Linear regression with two outputs; params ``{"bias", "weight"}``, d = 8.

    ``example(i, j, flat)`` is the float64 gradient of example j of client i.
    """

    def __init__(self, n, m=5, seed=0):
        rng = np.random.default_rng(seed)
        self.n, self.m, self.d = n, m, 8
        self.features = rng.normal(size=(n, m, 3))
        self.targets = rng.normal(size=(n, m, 2)) + rng.normal(size=(n, 1, 2))
        self.flat = rng.normal(size=self.d)

    @property
    def params(self):
        bias, weight = self.flat[:2], self.flat[2:].reshape(3, 2)
        return {"bias": jnp.array(bias, float), "weight": jnp.array(weight, float)}

    @property
    def shards(self):
        data = {
            "x": jnp.array(self.features, float),
            "y": jnp.array(self.targets, float),
            "index": jnp.tile(jnp.arange(self.m), (self.n, 1)),
        }
        return jaxfed.Shard(data, jnp.full(self.n, self.m))

    @staticmethod
    def loss(params, batch):
        residual = batch["x"] @ params["weight"] + params["bias"][None] - batch["y"]
        return 0.5 * jnp.sum(residual**2, axis=1)

    def example(self, i, j, flat):
        bias, weight = flat[:2], flat[2:].reshape(3, 2)
        residual = self.features[i, j] @ weight + bias - self.targets[i, j]
        return np.concatenate(
            [residual, np.outer(self.features[i, j], residual).ravel()]
        )

    def gradient(self, i, indices, flat):
        return sum(self.example(i, j, flat) for j in indices) / len(indices)


def quadratic(message, shard, key):
    """Local work for f_i(x) = |x - a_i|^2 / 2 with ``shard.data = {"a": a_i}``."""
    del key
    return jax.tree.map(jnp.subtract, message["params"], shard.data["a"]), {}


def zero_gradient(message, shard, key):
    del shard, key
    return jax.tree.map(jnp.zeros_like, message["params"]), {}


def centres(a):
    """Shards for :func:`quadratic` from centres ``[n, ...]``."""
    a = jnp.asarray(a, float)
    return jaxfed.Shard({"a": a}, jnp.ones(a.shape[0], jnp.int32))


def ravel(tree):
    return ravel_pytree(tree)[0]


def ravel_rows(tree):
    return jax.vmap(ravel)(tree)


def states(tree, kind):
    """Return the states of type ``kind`` inside a nested state, in order."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda s: isinstance(s, kind))
    return [s for s in leaves if isinstance(s, kind)]


def trace(simulation, params, shards, rounds, look, key=1):
    """Run and return ``(look(state) stacked [rounds + 1], last state)``."""

    def go(shards):
        state = simulation.init(params, key)

        def body(state, _):
            new, _ = simulation.step(state, shards)
            return new, look(new)

        last, seen = jax.lax.scan(body, state, None, length=rounds)
        first = look(state)
        return jax.tree.map(
            lambda a, b: jnp.concatenate([a[None], b]), first, seen
        ), last

    seen, last = quick_jit(go)(shards)
    return jax.tree.map(np.asarray, seen), last


@functools.partial(quick_jit, static_argnames=("n", "rounds"))
def record_noise(noise_std, key, params, n, rounds):
    """Return what ``gaussian_noise`` adds, ``[rounds, n, d]``."""
    link = gaussian_noise(noise_std, key)
    zeros = jax.tree.map(jnp.zeros_like, params)

    def one(t, i):
        return ravel(link.update(zeros, link.init(params), round=t, client_id=i)[0])

    return jax.vmap(lambda t: jax.vmap(lambda i: one(t, i))(jnp.arange(n)))(
        jnp.arange(rounds)
    )


@functools.partial(quick_jit, static_argnames=("rounds", "batch_size"))
def record_batches(key, shards, rounds, batch_size):
    """Return the indices each client draws in each round, ``[rounds, n, S]``."""

    def one(t, i, shard):
        return sample(client_key(key, t, i), shard, batch_size)[0]["index"]

    n = shards.count.shape[0]
    return jax.vmap(
        lambda t: jax.vmap(lambda i, s: one(t, i, s))(jnp.arange(n), shards)
    )(jnp.arange(rounds))
