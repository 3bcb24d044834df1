# SPDX-License-Identifier: Apache-2.0
"""Clipping examples without their gradients: same numbers, refusals, bad examples."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import jaxfed
from jaxfed import models

NAMES = ["byzuldp_cnn", "cnn", "mlp", "small_cnn", "softmax"]
B = 5


def problem(model, size=14, channels=1):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(B, size, size, channels)).astype(np.float32)
    images *= np.array([0.01, 0.1, 1, 3, 10])[:, None, None, None]
    batch = {"image": images.astype(np.float32), "label": np.arange(B) % 4}
    return model.init(jax.random.key(1), batch["image"])["params"], batch


@pytest.mark.parametrize("name", NAMES)
def test_norms_and_clipped_gradients_are_those_of_every_example(name):
    model = models.make_model(name, 4)
    params, batch = problem(model)
    loss_fn = models.example_losses(model)

    @toys.quick_jit
    def both(params, batch):
        def norm(example):
            one = jax.tree.map(lambda x: x[None], example)
            return optax.tree.norm(jax.grad(lambda p: loss_fn(p, one)[0])(params))

        norms = models.gradient_norms(model)
        middle = jnp.median(norms(params, batch))  # some are clipped, some are not
        plain = jaxfed.gradient(loss_fn, clip_norm=middle)
        quick = jaxfed.gradient(loss_fn, clip_norm=middle, norms=norms)
        weights = jnp.ones(B).at[-2:].set(0)
        return (
            (jax.vmap(norm)(batch), plain.at(params, batch, weights)),
            (norms(params, batch), quick.at(params, batch, weights)),
        )

    for want, got in zip(*map(jax.tree.leaves, both(params, batch)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("first", [0, 2])
def test_bad_examples_count_as_zeros(bad, first):
    model = models.make_model("mlp", 4)
    params, batch = problem(model)
    spoilt = batch | {"image": batch["image"].copy()}
    spoilt["image"][first] = bad
    work = jaxfed.gradient(
        models.example_losses(model), clip_norm=1.0, norms=models.gradient_norms(model)
    )
    at = toys.quick_jit(lambda batch, weights: work.at(params, batch, weights)[1])
    got = at(spoilt, np.ones(B, np.float32))
    rest = np.ones(B, np.float32)
    rest[first] = 0
    want = jax.tree.map(lambda g: g * 4 / 5, at(batch, rest))
    if bad == 1e30:  # huge, and clipped or dropped: never longer than its share
        moved = optax.tree.norm(jax.tree.map(jnp.subtract, got, want))
        assert moved <= 1.0 / B * (1 + 1e-5)
        return
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)
    none = at(
        jax.tree.map(
            lambda x: np.full_like(x, bad, x.dtype),
            batch | {"label": np.zeros(B, np.float32)},
        )
        | {"label": batch["label"]},
        np.ones(B, np.float32),
    )
    assert not any(np.any(x) for x in jax.tree.leaves(none))


class Twice(nn.Module):
    @nn.compact
    def __call__(self, images):
        layer = nn.Dense(4)
        return layer(layer(images.reshape(images.shape[0], -1)[:, :4]))


class Loose(nn.Module):
    @nn.compact
    def __call__(self, images):
        scale = self.param("scale", nn.initializers.ones, ())
        return scale * nn.Dense(4)(images.reshape(images.shape[0], -1))


class Gain(nn.Module):
    @nn.compact
    def __call__(self, x, gain):
        return gain * x @ self.param("kernel", nn.initializers.ones, (x.shape[1], 4))


class WithGain(nn.Module):
    @nn.compact
    def __call__(self, images):
        return Gain()(images.reshape(images.shape[0], -1), 100.0)


class Borrowed(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = images.reshape(images.shape[0], -1)
        first = nn.Dense(4)
        return nn.Dense(4)(first(x) + x @ first.variables["params"]["kernel"])


class Patches(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.Dense(4)(images.reshape(-1, images.shape[2]))
        return x.reshape(images.shape[0], -1, 4).sum(1)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Twice(), "layer Dense_0 is called twice"),
        (Loose(), "outside of its layers"),
        (WithGain(), "Gain_0 does not map one array"),
        (Borrowed(), "in other ways than calling"),
        (Patches(), "Dense_0 does not map one array of 5 rows"),
    ],
)
def test_models_whose_norms_would_be_wrong_are_refused(model, why):
    params, batch = problem(model)
    with pytest.raises(ValueError, match=why):
        models.gradient_norms(model)(params, batch)


class Halved(nn.Dense):
    @nn.compact
    def __call__(self, inputs):
        kernel = self.param("kernel", self.kernel_init, (inputs.shape[1], 4))
        return jnp.sin(inputs) @ kernel


class Unusual(nn.Module):
    layer: nn.Module

    @nn.compact
    def __call__(self, images):
        return self.layer(images.reshape(images.shape[0], -1))


def double(x, y, dimensions, **options):
    return 2 * jax.lax.dot_general(x, y, dimensions, **options)


@pytest.mark.parametrize(
    "layer", [Halved(4), nn.Dense(4, dot_general=double)], ids=["subclass", "product"]
)
def test_layers_like_dense_ones_are_differentiated(layer):
    model = Unusual(layer)
    params, batch = problem(model)
    loss_fn = models.example_losses(model)
    got = models.gradient_norms(model)(params, batch)
    for i in range(B):
        one = {name: x[i : i + 1] for name, x in batch.items()}
        want = optax.tree.norm(jax.grad(lambda p, b=one: loss_fn(p, b)[0])(params))
        np.testing.assert_allclose(got[i], want, rtol=1e-5)


def test_norms_whose_parts_have_no_squares():
    """A huge input times a tiny derivative is a gradient like any other."""
    model = Unusual(nn.Dense(3))
    images = np.zeros((1, 2, 2, 1), np.float32)
    images[0, 0, :, 0] = 1e19, 44.0
    batch = {"image": images, "label": np.array([0])}
    kernel = np.zeros((4, 3), np.float32)
    kernel[1, 0] = 1.0
    params = {"layer": {"kernel": kernel, "bias": np.zeros(3, np.float32)}}
    work = jaxfed.gradient(
        models.example_losses(model), clip_norm=1e-3, norms=models.gradient_norms(model)
    )
    update = toys.quick_jit(work.at)(params, batch, np.ones(1, np.float32))[1]
    assert 0.5e-3 < optax.tree.norm(update) <= 1e-3 * (1 + 1e-5)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (dict(clip_norm=1.0, microbatch=2), "norms= does without"),
        (dict(clip_norm=1.0, reducer=jaxfed.make_aggregator("median")), "norms= does"),
        (dict(), "norms= is for a clip"),
        (dict(clip_norm=1.0, clip_per="layer"), "norms= is for a clip"),
    ],
)
def test_options_that_contradict_norms(options, why):
    model = models.make_model("softmax", 4)
    loss_fn, norms = models.example_losses(model), models.gradient_norms(model)
    with pytest.raises(ValueError, match=why):
        jaxfed.gradient(loss_fn, norms=norms, **options)


def test_examples_clipped_layer_by_layer():
    model = models.make_model("mlp", 4)
    params, batch = problem(model)
    loss_fn = models.example_losses(model)
    work = jaxfed.gradient(loss_fn, clip_norm=0.5, clip_per="layer")
    got = toys.quick_jit(work.at)(params, batch, np.ones(B, np.float32))[1]

    @toys.quick_jit
    def by_hand(params):
        def one(image, label):
            single = {"image": image[None], "label": label[None]}
            grad = jax.grad(lambda p: loss_fn(p, single)[0])(params)
            radius = 0.5 / 2**0.5
            return {k: jaxfed.privacy.clip_tree(g, radius) for k, g in grad.items()}

        rows = jax.vmap(one)(batch["image"], jnp.asarray(batch["label"]))
        return jax.tree.map(lambda g: g.mean(0), rows)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        got,
        by_hand(params),
    )
