# SPDX-License-Identifier: Apache-2.0
"""Small Flax Linen classifiers, made by name, and their losses. Needs flax."""

from jaxfed._registry import lookup
from jaxfed._validate import count
from jaxfed.models.linen import (
    CNN,
    MLP,
    ByzULDPCNN,
    PatchConv,
    SmallCNN,
    Softmax,
    max_pool,
    sliding_max_pool,
)
from jaxfed.models.losses import accuracy, evaluate, example_losses
from jaxfed.models.norms import gradient_norms

__all__ = [
    "CNN",
    "MLP",
    "MODELS",
    "ByzULDPCNN",
    "PatchConv",
    "SmallCNN",
    "Softmax",
    "accuracy",
    "evaluate",
    "example_losses",
    "gradient_norms",
    "make_model",
    "max_pool",
    "sliding_max_pool",
]

MODELS = {
    "byzuldp_cnn": ByzULDPCNN,
    "cnn": CNN,
    "mlp": MLP,
    "small_cnn": SmallCNN,
    "softmax": Softmax,
}


def make_model(name, num_classes):
    """Make a model by name.

    Args:
      name: ``"softmax"``, ``"mlp"``, ``"cnn"``, ``"small_cnn"`` or
        ``"byzuldp_cnn"``.
      num_classes: number of classes, at least 2; structural.

    Returns:
      A Linen module; its parameters are ``model.init(key, images)["params"]``.

    Raises:
      ValueError: for an unknown name, naming the known ones, or too few classes.

    Example:
      >>> from jaxfed import models
      >>> models.make_model("mlp", num_classes=10).hidden
      256
    """
    model = lookup(MODELS, name, "model")
    return model(num_classes=count("num_classes", num_classes, minimum=2))
