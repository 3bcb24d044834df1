# SPDX-License-Identifier: Apache-2.0
"""Rules that judge the clients from a point of their own: a reference, the origin."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfed import _validate
from jaxfed._base import Aggregator
from jaxfed.aggregators import _compose
from jaxfed.privacy import sensitivity
from jaxfed.reductions import _affine


class CenteredClippingState(NamedTuple):
    """State of :func:`centered_clipping`.

    Attributes:
      centre: tree like ``params``, the previous aggregate; zeros at first.
    """

    centre: Any


def centered_clipping(
    num_byzantine=None, *, clip_norm=10.0, iterations=1
) -> Aggregator:
    r"""Centred clipping: move the centre by the mean of the clipped differences.

    ``iterations`` times,
    :math:`v \leftarrow v + \frac1n \sum_i (x_i - v) \min(1, C / \|x_i - v\|)`, norms
    over the whole tree. v starts at ``reference=`` of ``update`` if that is given and
    not None, else at the previous aggregate, which the state keeps (zeros at first).

    Guarantee: one update moves by at most ``iterations * C``, and each Byzantine row
    by ``C / n`` an iteration, whatever is sent; :math:`(\delta, c)`-robust for
    :math:`\delta \le 0.1` with the paper's C.

    Edge cases: a row with NaN, inf or an overflowing norm pulls nowhere (it still
    counts in n); C = inf gives the mean of all other rows, scaled by their share.

    Args:
      num_byzantine: declared budget, ``0 <= f < n/2``; checked, and used to find a
        centre for the arithmetic.
      clip_norm: C > 0, inf allowed; may be traced (then C <= 0 gives NaN).
      iterations: >= 1, Python int.

    Returns:
      Aggregator with :class:`CenteredClippingState`.

    Raises:
      ValueError: for values out of range; at trace time if ``2 f >= n`` or
        ``reference`` is not shaped like ``params``.

    Cost:
      ``O(n^2 d)`` for the Gram matrix, ``O(n^2)`` an iteration.

    References:
      Karimireddy et al., `Learning from History for Byzantine Robust Optimization
      <https://arxiv.org/abs/2012.10333>`_, 2021.
    """
    f = _validate.budget(num_byzantine, optional=True)
    _validate.positive("clip_norm", clip_norm, finite=False)
    iterations = _validate.count("iterations", iterations)

    def weigh(geometry, state, weights):
        del weights
        w = _affine.centered_clipping(
            geometry, clip_norm=clip_norm, iterations=iterations
        )
        valid = True if f is None else geometry.outvotes(f)
        return jnp.where(valid, w, jnp.nan), state

    def reference(state, extra):
        given = extra.get("reference")
        return state.centre if given is None else jax.tree.map(jnp.asarray, given)

    def remember(state, aggregate):
        cast = jax.tree.map(lambda s, a: a.astype(s.dtype), state.centre, aggregate)
        return CenteredClippingState(cast)

    return _compose.geometric(
        "centered_clipping",
        weigh,
        f,
        init=lambda params: CenteredClippingState(optax.tree.zeros_like(params)),
        anchors=("reference",),
        reference=reference,
        remember=remember,
        check=lambda n: _validate.majority(f, n),
        sensitivity=sensitivity.centered_clipping(clip_norm, iterations),
    )


def fltrust(*, form="original") -> Aggregator:
    r"""FLTrust: weigh each row by the positive part of its cosine with a reference.

    The reference r is the server's own update from trusted root data. With trust
    :math:`t_i = \max(0, \cos(x_i, r))`, over the whole tree, ``"original"`` gives
    :math:`\sum_i t_i \frac{\|r\|}{\|x_i\|} x_i / \sum_i t_i`, or 0 if nobody is
    trusted; ``"projected"``, as one paper prints it,
    :math:`\frac1n \sum_i t_i \|x_i\| \frac{r}{\|r\|}`.

    Guarantee: ``"original"`` is at most as long as r and within a right angle of it,
    for any number of Byzantine rows. ``"projected"`` is a multiple of r, as long as
    somebody's row wants it to be.

    Edge cases: rows of 0, and rows with NaN, inf or an overflowing norm have trust 0;
    r = 0 gives 0; a reference that is not finite gives NaN.

    Args:
      form: ``"original"`` or ``"projected"``.

    Returns:
      Aggregator whose ``update`` and ``inspect`` need ``reference=``, a tree shaped
      like ``params``. It declares no budget.

    Raises:
      ValueError: for an unknown form; at trace time for a missing or badly shaped
        ``reference``.

    Cost:
      ``O(n^2 d)`` for the Gram matrix, ``O(n)`` after it.

    References:
      Cao et al., `FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping
      <https://arxiv.org/abs/2012.13995>`_, 2021.
    """
    _validate.choice("form", form, _affine.FORMS)

    def reference(state, extra):
        del state
        if extra.get("reference") is None:
            raise ValueError(
                "fltrust needs reference=, the server's own update shaped like params, "
                "got reference=None. Pass it to update: update(updates, state, params, "
                "reference=r)."
            )
        return jax.tree.map(jnp.asarray, extra["reference"])

    return _compose.geometric(
        "fltrust",
        lambda geometry, state, weights: (_affine.fltrust(geometry, form=form), state),
        anchors=("origin", "reference"),
        reference=reference,
        about_origin=True,
    )


def cge(num_byzantine) -> Aggregator:
    r"""Comparative gradient elimination: the mean of the n-f rows of least norm.

    Norms over the whole tree; norms within 1e-5 relative are ties and go to the lowest
    index. Guarantee: the result is at most as long as the longest honest row. There is
    no :math:`\kappa`: short Byzantine rows always count (a fault tolerance needs a
    redundancy of the honest costs and f/n below a constant of the problem). Not
    translation equivariant.

    Edge cases: f = 0 gives the mean. Rows with NaN, inf or an overflowing norm are the
    longest and are never used while at most f; more give NaN.

    Args:
      num_byzantine: f, ``0 <= f < n/2``; may be traced, and then a violated bound
        gives NaN.

    Returns:
      Aggregator.

    Raises:
      ValueError: for f < 0, and at trace time if ``2 f >= n``.

    Cost:
      ``O(n^2 d)`` for the Gram matrix, ``O(n log n)`` after it.

    References:
      Gupta, Liu and Vaidya, `Byzantine Fault-Tolerant Distributed Machine Learning
      Using Stochastic Gradient Descent (SGD) and Norm-Based Comparative Gradient
      Elimination (CGE) <https://arxiv.org/abs/2008.04699>`_, 2020.
    """
    f = _validate.budget(num_byzantine)
    return _compose.geometric(
        "cge",
        lambda geometry, state, weights: (_affine.cge(geometry, f), state),
        f,
        anchors=("origin",),
        check=lambda n: _validate.majority(f, n),
    )
