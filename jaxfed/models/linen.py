# SPDX-License-Identifier: Apache-2.0
"""The small models of the papers, as Flax Linen modules.

All take a batch of images ``[B, H, W, C]`` (integers count as 0 to 255 and are scaled
to [0, 1]) and return logits ``[B, num_classes]``.
"""

import flax.linen as nn
import jax.numpy as jnp


def _pixels(images):
    if images.ndim != 4:
        raise ValueError(
            f"images must be a batch [B, H, W, C], got shape {images.shape}. Add a "
            "batch axis to a single image."
        )
    if jnp.issubdtype(images.dtype, jnp.integer):
        return images.astype(jnp.float32) / 255
    return images


def _flatten(x):
    return x.reshape(x.shape[0], -1)


class PatchConv(nn.Module):
    """Convolution as patches times a matrix.

    Computes what ``flax.linen.Conv(features, kernel_size, stride, padding)`` computes,
    from parameters of the same names and shapes. Under ``vmap`` over clients a
    convolution becomes a grouped one, which is slow on CPUs; this is a plain matrix
    product.

    Attributes:
      features: number of output channels.
      kernel_size: height and width of the kernel.
      stride: of both axes; must divide both sizes of the kernel.
      padding: zeros put around the image.

    Cost:
      Holds the patches, ``kh * kw / stride^2`` times the input.
    """

    features: int
    kernel_size: tuple[int, int]
    stride: int = 1
    padding: int = 0

    @nn.compact
    def __call__(self, x):
        """Map ``[B, H, W, C]`` to ``[B, (H + 2p - kh) // s + 1, ..., features]``."""
        (kh, kw), s, pad = self.kernel_size, self.stride, self.padding
        if kh % s or kw % s:
            raise ValueError(
                f"stride must divide the kernel's sizes, got stride={s} and "
                f"kernel_size={self.kernel_size}."
            )
        x = jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        height, width = (x.shape[1] - kh) // s + 1, (x.shape[2] - kw) // s + 1
        if height < 1 or width < 1:
            raise ValueError(
                f"{self.name or 'PatchConv'} cannot apply a {kh}x{kw} kernel to a "
                f"{x.shape[1]}x{x.shape[2]} input: the images are too small for this "
                "model. Use a model without convolutions, such as 'mlp'."
            )
        shape = (kh, kw, x.shape[3], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        # A stride is no stride among blocks of s x s pixels.
        kh, kw = kh // s, kw // s
        rows, columns = height - 1 + kh, width - 1 + kw
        x = x[:, : rows * s, : columns * s].reshape(-1, rows, s, columns, s, shape[2])
        x = x.swapaxes(2, 3).reshape(-1, rows, columns, s * s * shape[2])
        shifted = [
            x[:, i : i + height, j : j + width] for i in range(kh) for j in range(kw)
        ]
        patches = jnp.concatenate(shifted, axis=-1)
        matrix = kernel.reshape(kh, s, kw, s, -1).swapaxes(1, 2)
        matrix = matrix.reshape(-1, self.features)
        return patches @ matrix + bias[None, None, None]


def max_pool(x):
    """Take the maximum over disjoint 2x2 windows.

    An odd last row or column is left out, as in ``flax.linen.max_pool``, and equal
    maxima share the gradient. Done by reshaping, since the gradient of a windowed
    reduction is slow under ``vmap`` on CPUs.

    Args:
      x: ``[B, H, W, C]``.

    Returns:
      ``[B, H // 2, W // 2, C]``.
    """
    b, h, w, c = x.shape
    x = x[:, : h // 2 * 2, : w // 2 * 2]
    return x.reshape(b, h // 2, 2, w // 2, 2, c).max((2, 4))


def sliding_max_pool(x):
    """Take the maximum over all 2x2 windows: stride 1.

    Args:
      x: ``[B, H, W, C]``.

    Returns:
      ``[B, H - 1, W - 1, C]``. Of equal maxima, those of a pair share the gradient.
    """
    x = jnp.maximum(x[:, :-1], x[:, 1:])
    return jnp.maximum(x[:, :, :-1], x[:, :, 1:])


class Softmax(nn.Module):
    """Multinomial logistic regression; 7,850 parameters for 28x28x1 and 10 classes."""

    num_classes: int

    @nn.compact
    def __call__(self, images):
        """Return logits ``[B, num_classes]``."""
        return nn.Dense(self.num_classes)(_flatten(_pixels(images)))


class MLP(nn.Module):
    """One hidden tanh layer; 203,530 parameters for 28x28x1 and 10 classes.

    The "MLP" of Byz-Clip21-SGD2M, whose sizes the paper does not give; these are those
    of its code.
    """

    num_classes: int
    hidden: int = 256

    @nn.compact
    def __call__(self, images):
        """Return logits ``[B, num_classes]``."""
        x = nn.tanh(nn.Dense(self.hidden)(_flatten(_pixels(images))))
        return nn.Dense(self.num_classes)(x)


class CNN(nn.Module):
    """Two 3x3 convolutions (32, 64) and two dense layers (128, num_classes).

    1,199,882 parameters for 28x28x1 and 10 classes. The "CNN" of Byz-Clip21-SGD2M and
    the network of Byz-VR-MARINA; there is no activation after the second convolution.
    """

    num_classes: int
    convolutional = True
    mostly_dense = True

    @nn.compact
    def __call__(self, images):
        """Return logits ``[B, num_classes]``."""
        x = nn.relu(PatchConv(32, (3, 3))(_pixels(images)))
        x = _flatten(max_pool(PatchConv(64, (3, 3))(x)))
        x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(self.num_classes)(x)


class SmallCNN(nn.Module):
    """Two 5x5 tanh convolutions (16, 16), the first pooled, and one dense layer.

    17,082 parameters for 28x28x1 and 10 classes. Images must be at least 14x14.
    """

    num_classes: int
    convolutional = True

    @nn.compact
    def __call__(self, images):
        """Return logits ``[B, num_classes]``."""
        # tanh(max) = max(tanh), with a quarter of the work.
        x = nn.tanh(max_pool(PatchConv(16, (5, 5))(_pixels(images))))
        x = nn.tanh(PatchConv(16, (5, 5))(x))
        return nn.Dense(self.num_classes)(_flatten(x))


class ByzULDPCNN(nn.Module):
    """Two strided tanh convolutions (16, 32), each pooled, and two dense layers.

    26,010 parameters for 28x28x1 and 10 classes, with 512 features before the first
    dense layer; images must be at least 14x14. The network of ByzULDP, Table 5.
    """

    num_classes: int
    convolutional = True

    @nn.compact
    def __call__(self, images):
        """Return logits ``[B, num_classes]``."""
        x = nn.tanh(PatchConv(16, (8, 8), stride=2, padding=3)(_pixels(images)))
        x = nn.tanh(PatchConv(32, (4, 4), stride=2)(sliding_max_pool(x)))
        x = nn.tanh(nn.Dense(32)(_flatten(sliding_max_pool(x))))
        return nn.Dense(self.num_classes)(x)
