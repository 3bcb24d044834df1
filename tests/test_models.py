# SPDX-License-Identifier: Apache-2.0
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfed import models


def size(tree):
    return sum(x.size for x in jax.tree.leaves(tree))


def init(model, shape):
    images = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), images)["params"]


@pytest.mark.parametrize(
    ("name", "expected"),
    # Byz-Clip21-SGD2M sheet, section 6.3.
    [
        ("softmax", 7850),
        ("mlp", 203_530),
        ("cnn", 1_199_882),
        ("small_cnn", 17_082),
        ("byzuldp_cnn", 26_010),  # ByzULDP sheet, table 5
    ],
)
def test_number_of_parameters(name, expected):
    model = models.make_model(name, 10)
    assert size(init(model, (2, 28, 28, 1))) == expected


@pytest.mark.parametrize("name", models.MODELS)
def test_logits(name):
    model = models.make_model(name, 7)
    images = jax.random.randint(jax.random.key(1), (3, 16, 15, 2), 0, 256)
    images = images.astype(jnp.uint8)
    params = jax.jit(model.init)(jax.random.key(0), images)["params"]
    apply = jax.jit(lambda x: model.apply({"params": params}, x))
    logits = apply(images)
    assert logits.shape == (3, 7)
    assert logits.dtype == jnp.float32
    # Bytes are scaled to [0, 1]; floats are taken as they are.
    scaled = images.astype(jnp.float32) / 255
    np.testing.assert_allclose(logits, apply(scaled), rtol=1e-5, atol=1e-6)
    # Examples do not see each other.
    changed = apply(images.at[0].set(0))
    assert np.any(changed[0] != logits[0])
    np.testing.assert_allclose(changed[1:], logits[1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", models.MODELS)
def test_models_take_images_of_all_the_sets(name):
    for shape in [(1, 28, 28, 1), (1, 32, 32, 3), (1, 8, 8, 1)]:
        if name in ("small_cnn", "byzuldp_cnn") and shape[1] == 8:
            with pytest.raises(ValueError, match="kernel to a .* input.*'mlp'"):
                init(models.make_model(name, 10), shape)
        else:
            assert size(init(models.make_model(name, 10), shape)) > 0


def test_softmax_and_mlp_against_numpy():
    images = np.random.default_rng(0).uniform(size=(5, 3, 4, 1)).astype(np.float32)
    x = images.reshape(5, 12).astype(np.float64)
    for name in ("softmax", "mlp"):
        model = models.make_model(name, 6)
        params = jax.jit(model.init)(jax.random.key(3), images)["params"]
        layers = [jax.tree.map(np.float64, params[k]) for k in sorted(params)]
        y = x @ layers[0]["kernel"] + layers[0]["bias"]
        if name == "mlp":
            assert layers[0]["bias"].shape == (256,)
            y = np.tanh(y) @ layers[1]["kernel"] + layers[1]["bias"]
        np.testing.assert_allclose(
            model.apply({"params": params}, images), y, rtol=1e-5, atol=1e-5
        )


class LaxCNN(nn.Module):
    """The CNN of the sheet, in flax's own layers."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(32, (3, 3), padding="VALID", name="PatchConv_0")(x))
        x = nn.Conv(64, (3, 3), padding="VALID", name="PatchConv_1")(x)
        x = nn.max_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(128, name="Dense_0")(x))
        return nn.Dense(10, name="Dense_1")(x)


class LaxSmallCNN(nn.Module):
    """The small CNN of the sheet, in flax's own layers."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Conv(16, (5, 5), padding="VALID", name="PatchConv_0")(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.tanh(nn.Conv(16, (5, 5), padding="VALID", name="PatchConv_1")(x))
        return nn.Dense(10, name="Dense_0")(x.reshape(x.shape[0], -1))


@pytest.mark.parametrize(
    ("name", "twin"), [("cnn", LaxCNN), ("small_cnn", LaxSmallCNN)]
)
def test_cnns_equal_their_twins_with_flax_layers(name, twin):
    model = models.make_model(name, 10)
    images = jax.random.uniform(jax.random.key(1), (2, 18, 18, 1))
    params = jax.jit(model.init)(jax.random.key(0), images)["params"]

    def loss(model):
        return lambda p: jnp.sum(jnp.sin(model.apply({"params": p}, images)))

    ours, ours_grad = jax.jit(jax.value_and_grad(loss(model)))(params)
    theirs, theirs_grad = jax.jit(jax.value_and_grad(loss(twin())))(params)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5),
        ours_grad,
        theirs_grad,
    )


@pytest.mark.parametrize("kernel", [(3, 3), (5, 2)])
def test_patch_conv_equals_conv_under_vmap(kernel):
    ours = models.PatchConv(4, kernel)
    theirs = nn.Conv(4, kernel, padding="VALID")
    x = jax.random.normal(jax.random.key(0), (2, 3, 7, 6, 3))  # clients first
    params = jax.jit(ours.init)(jax.random.key(1), x[0])["params"]
    shapes = jax.eval_shape(theirs.init, jax.random.key(1), x[0])["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
    params["bias"] = jnp.arange(4.0)
    results = []
    for model in (ours, theirs):

        def loss(p, x, model=model):
            y = model.apply({"params": p}, x)
            return jnp.sum(jnp.sin(y)), y

        grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
        results.append(jax.jit(jax.vmap(grad, (None, 0)))(params, x))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *results
    )


def test_patch_conv_against_loops():
    x = np.random.default_rng(0).normal(size=(1, 4, 5, 2))
    model = models.PatchConv(3, (2, 3))
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    kernel = np.asarray(params["kernel"], np.float64)
    expected = np.zeros((1, 3, 3, 3))
    for i in range(3):
        for j in range(3):
            for o in range(3):
                expected[0, i, j, o] = np.sum(
                    x[0, i : i + 2, j : j + 3] * kernel[..., o]
                )
    got = model.apply({"params": params}, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 4, 6, 3), (1, 5, 7, 2)])
def test_max_pool_equals_flax(shape):
    x = jax.random.normal(jax.random.key(0), shape)
    np.testing.assert_array_equal(models.max_pool(x), nn.max_pool(x, (2, 2), (2, 2)))
    ours = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(models.max_pool(x)))))(x)
    theirs = jax.grad(lambda x: jnp.sum(jnp.sin(nn.max_pool(x, (2, 2), (2, 2)))))(x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def reference(logits, labels):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(-1))
    return log_sum - shifted[np.arange(len(labels)), labels]


@pytest.fixture(scope="module")
def problem():
    model = models.make_model("softmax", 4)
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.uniform(size=(23, 3, 3, 1)).astype(np.float32),
        "label": rng.integers(0, 4, 23).astype(np.int32),
    }
    params = jax.jit(model.init)(jax.random.key(0), batch["image"])["params"]
    return model, jax.tree.map(lambda x: 5 * x, params), batch


def test_example_losses(problem):
    model, params, batch = problem
    losses = models.example_losses(model)(params, batch)
    logits = model.apply({"params": params}, batch["image"])
    assert losses.shape == (23,)
    np.testing.assert_allclose(losses, reference(logits, batch["label"]), rtol=1e-5)


def test_example_losses_are_finite_for_large_logits_and_padding(problem):
    model, params, batch = problem
    huge = jax.tree.map(lambda x: 1e6 * x, params)
    loss_fn = models.example_losses(model)
    assert np.all(np.isfinite(loss_fn(huge, batch)))
    padding = jax.tree.map(np.zeros_like, batch)
    grads = jax.grad(lambda p: loss_fn(p, padding).sum())(params)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("name", ["cnn", "small_cnn", "mlp"])
def test_padding_is_harmless(name):
    # Zero images give ties in every window; gradients must stay finite.
    model = models.make_model(name, 10)
    batch = {"image": jnp.zeros((2, 16, 16, 1), jnp.uint8), "label": jnp.zeros(2, int)}
    params = jax.jit(model.init)(jax.random.key(0), batch["image"])["params"]
    loss_fn = models.example_losses(model)
    grads = jax.jit(jax.grad(lambda p: loss_fn(p, batch).sum()))(params)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("batch_size", [1, 5, 22, 23, 24, 100])
def test_evaluate_counts_every_example_once(problem, batch_size):
    model, params, batch = problem
    logits = np.asarray(model.apply({"params": params}, batch["image"]))
    right = np.mean(logits.argmax(-1) == batch["label"])
    assert 0 < right < 1
    got = models.evaluate(model, params, batch, batch_size=batch_size)
    assert float(got["accuracy"]) == pytest.approx(right, abs=1e-7)
    expected = reference(logits, batch["label"]).mean()
    assert float(got["loss"]) == pytest.approx(expected, rel=1e-5)
    only = models.accuracy(model, params, batch, batch_size=batch_size)
    assert float(only) == float(got["accuracy"])


def test_accuracy_under_jit_and_vmap(problem):
    model, params, batch = problem

    def score(params, batch):
        return models.accuracy(model, params, batch, batch_size=10)

    several = jax.tree.map(lambda x: jnp.stack([x, -x]), params)
    got = jax.jit(jax.vmap(score, (0, None)))(several, batch)
    minus = score(jax.tree.map(jnp.negative, params), batch)
    np.testing.assert_allclose(got, [score(params, batch), minus], atol=1e-6)


def test_evaluate_errors(problem):
    model, params, batch = problem
    with pytest.raises(ValueError, match="at least one example"):
        models.accuracy(model, params, {k: v[:0] for k, v in batch.items()})
    with pytest.raises(ValueError, match="one label per image"):
        models.accuracy(model, params, batch | {"label": batch["label"][:3]})
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        models.accuracy(model, params, batch, batch_size=0)


def test_make_model_errors():
    with pytest.raises(
        ValueError, match="'smal_cnn'. Did you mean 'small_cnn'.*softmax"
    ):
        models.make_model("smal_cnn", 10)
    with pytest.raises(ValueError, match="num_classes must be at least 2"):
        models.make_model("mlp", 1)
    with pytest.raises(TypeError, match="num_classes must be a Python int"):
        models.make_model("mlp", 10.0)
    with pytest.raises(ValueError, match=r"batch \[B, H, W, C\]"):
        models.make_model("mlp", 10).init(jax.random.key(0), jnp.zeros((28, 28, 1)))
