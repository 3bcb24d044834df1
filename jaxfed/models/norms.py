# SPDX-License-Identifier: Apache-2.0
"""Norms of every example's gradient without the gradients."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxfed.models.losses import example_losses


def gradient_norms(model):
    r"""Return the norm of every example's gradient as a function of the parameters.

    A dense layer with inputs :math:`a_i` and derivatives :math:`\delta_i` of the
    loss by its outputs has the gradient :math:`a_i \delta_i^\top`, of norm
    :math:`\|a_i\| \|\delta_i\|`; nothing of the size of its kernel is held. Other
    layers, convolutions for instance, hold the examples' gradients of one layer at a
    time.

    Args:
      model: a Linen module that maps images ``[B, ...]`` to logits ``[B, classes]``,
        one example at a time; every parameter belongs to a submodule without children
        that is called once.

    Returns:
      ``norms(params, batch) -> float [B]``, of the losses of
      :func:`~jaxfed.models.example_losses`; for ``jaxfed.gradient(norms=)``.

    Raises:
      ValueError: at trace time for a layer called twice, whose gradients add up, or
        parameters outside of layers.

    Cost:
      One forward and backward pass of the batch.

    References:
      Goodfellow, `Efficient Per-Example Gradient Computations
      <https://arxiv.org/abs/1510.01799>`_, 2015.
    """
    loss_fn = example_losses(model)

    def norms(params, batch):
        layers = _layers(params)
        inside = {path[:i] for path in layers for i in range(len(path))}
        if inside & layers.keys():
            raise _refusal("it has parameters outside of its layers")

        def run(nudges):
            """Return the losses with something added to each layer's outputs."""
            calls = {}

            def watch(call, args, kwargs, context):
                path, out = context.module.path, call(*args, **kwargs)
                if context.method_name != "__call__" or path not in layers:
                    return out
                name = "/".join(path)
                if path in calls:
                    raise _refusal(f"layer {name} is called twice")
                b = batch["label"].shape[0]
                if kwargs or len(args) != 1 or not _rows(b, args[0], out):
                    raise _refusal(
                        f"layer {name} does not map one array of {b} rows to another"
                    )
                calls[path] = context.module.clone(parent=None), args[0], out
                return out if nudges is None else out + nudges[path]

            with nn.intercept_methods(watch):
                losses = loss_fn(params, batch)
            if calls.keys() != layers.keys():
                raise _refusal("it has layers that it does not call")
            return losses, calls

        modules = {}

        def outputs():
            _, calls = run(None)
            modules.update({path: call[0] for path, call in calls.items()})
            return {path: call[2] for path, call in calls.items()}

        shapes = jax.eval_shape(outputs)
        nudges = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def without_layers(params):
            def skip(call, args, kwargs, context):
                path = context.module.path
                if context.method_name == "__call__" and path in layers:
                    return nudges[path] + 0 * jnp.sum(args[0])
                return call(*args, **kwargs)

            with nn.intercept_methods(skip):
                return loss_fn(params, batch)

        rest = jax.make_jaxpr(without_layers)(params).jaxpr
        used = {id(x) for equation in rest.eqns for x in equation.invars}
        if used & {id(x) for x in rest.invars}:
            raise _refusal("it uses parameters in other ways than calling their layers")

        def total(nudges):
            losses, calls = run(nudges)
            return jnp.sum(losses), {path: call[1] for path, call in calls.items()}

        slopes, inputs = jax.grad(total, has_aux=True)(nudges)
        each = [
            _layer_norms(modules[path], own, inputs[path], slopes[path])
            for path, own in layers.items()
        ]
        return _norm(jnp.stack(each, axis=1))

    return norms


def _rows(b, *arrays):
    kinds = jax.Array, np.ndarray
    return all(isinstance(x, kinds) and x.shape[:1] == (b,) for x in arrays)


def _layers(params):
    """Return ``{path: parameters}`` of the innermost modules."""
    layers = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        *module, name = (key.key for key in path)
        layers.setdefault(tuple(module), {})[name] = leaf
    return layers


def _refusal(why):
    return ValueError(
        f"no norms for this model: {why}. Leave norms= out; each example's gradient is "
        "then computed."
    )


def _norm(x):
    """Return the norms of rows ``[B, k]``, whose squares may under- or overflow."""
    largest = jnp.max(jnp.abs(x), axis=1)
    safe = jnp.where(largest > 0, largest, 1)
    return largest * jnp.sqrt(jnp.sum(jnp.square(x / safe[:, None]), axis=1))


def _layer_norms(module, own, inputs, slopes):
    """Return ``[B]`` norms of one layer's gradients."""
    plain = type(module) is nn.Dense and module.dot_general is None
    if plain and module.dot_general_cls is None and inputs.ndim == 2:
        if module.use_bias:
            inputs = jnp.pad(inputs, ((0, 0), (0, 1)), constant_values=1)
        return _norm(inputs) * _norm(slopes)

    def one(x, slope):
        _, back = jax.vjp(lambda p: module.apply({"params": p}, x[None]), own)
        return ravel_pytree(back(slope[None]))[0]

    return _norm(jax.vmap(one)(inputs, slopes))
