# SPDX-License-Identifier: Apache-2.0
"""Norms of every example's gradient without the gradients."""

import flax.linen as nn
import jax
import jax.numpy as jnp

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
                if path in calls:
                    raise _refusal(f"layer {'/'.join(path)} is called twice")
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
                    return nudges[path]
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
        squares = [
            _squares(modules[path], own, inputs[path], slopes[path])
            for path, own in layers.items()
        ]
        return jnp.sqrt(sum(squares))

    return norms


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


def _squares(module, own, inputs, slopes):
    """Return ``[B]`` squared norms of one layer's gradients."""
    if isinstance(module, nn.Dense) and inputs.ndim == 2:
        length = jnp.sum(inputs**2, 1) + (1 if module.use_bias else 0)
        return length * jnp.sum(slopes**2, 1)

    def one(x, slope):
        _, back = jax.vjp(lambda p: module.apply({"params": p}, x[None]), own)
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(back(slope[None])))

    return jax.vmap(one)(inputs, slopes)
