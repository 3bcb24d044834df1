# SPDX-License-Identifier: Apache-2.0
"""FedAvg, FedSGD, and averaging with an optimizer on the server."""

import jax
import optax

from jaxfed import _validate
from jaxfed._base import FedAlgorithm
from jaxfed.aggregators import mean
from jaxfed.algorithms._build import from_chains, needs
from jaxfed.local import LocalSGD


@needs(local_steps=True)
def fedavg(
    learning_rate=1.0,
    *,
    rule=None,
    num_clients=None,
    server_optimizer=None,
    local_work=None,
) -> FedAlgorithm:
    r"""FedAvg: average how far the clients went in several local steps.

    Client i starts at the model x, takes its steps and sends :math:`\Delta_i = x -
    x_i`:

    .. math::

        x \leftarrow x - \gamma\, \tfrac1S \textstyle\sum_i \Delta_i

    With the default :math:`\gamma = 1` the new model is the mean of those of the
    clients. One client with one step is SGD. Clients count equally, whatever data they
    have.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule.
      rule: aggregator in place of the mean; None: the mean.
      num_clients: accepted like every method does; not needed.
      server_optimizer: any optax optimizer, applied to the mean in place of SGD;
        ``learning_rate`` then multiplies its step. None: SGD.
      local_work: e.g. ``local_sgd(loss_fn, optax.sgd(0.01), steps=5, batch_size=10)``.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges.
      TypeError: if ``server_optimizer`` is no optax transformation.

    Cost:
      No memory per client.

    References:
      McMahan et al., `Communication-Efficient Learning of Deep Networks from
      Decentralized Data <https://arxiv.org/abs/1602.05629>`_, 2017, Algorithm 1, with
      equal weights as in Xiao et al., `<https://arxiv.org/abs/2601.06903>`_, 2026, (3);
      Reddi et al., `Adaptive Federated Optimization
      <https://arxiv.org/abs/2003.00295>`_, 2021, Algorithm 1 (any server optimizer).
    """
    del num_clients
    _validate.positive("learning_rate", learning_rate)
    return _average(local_work, rule, server_step(learning_rate, server_optimizer))


def fedsgd(
    learning_rate, *, rule=None, num_clients=None, local_work=None
) -> FedAlgorithm:
    r"""FedSGD: average the clients' gradients at the model.

    .. math:: x \leftarrow x - \gamma\, \tfrac1S \textstyle\sum_i \hat g_i

    :func:`byz_sgdm` without momentum is this method.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule.
      rule: aggregator in place of the mean; None: the mean.
      num_clients: accepted like every method does; not needed.
      local_work: one gradient, e.g. ``gradient(loss_fn, batch_size=64)``.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: if ``learning_rate`` is not positive.
      TypeError: for local work of several steps.

    Cost:
      No memory per client.

    References:
      McMahan et al., `<https://arxiv.org/abs/1602.05629>`_, 2017, section 2.
    """
    del num_clients
    _validate.positive("learning_rate", learning_rate)
    if isinstance(local_work, LocalSGD):
        raise TypeError(
            "fedsgd averages gradients: build local_work with gradient(loss_fn), or "
            "take several local steps with fedavg."
        )
    return _average(local_work, rule, optax.sgd(learning_rate))


@needs(local_steps=True)
def fedavgm(
    learning_rate=1.0,
    *,
    rule=None,
    num_clients=None,
    server_momentum=0.9,
    local_work=None,
) -> FedAlgorithm:
    r"""FedAvgM: FedAvg with momentum on the server.

    .. math::

        v \leftarrow \beta v + \tfrac1S \textstyle\sum_i \Delta_i, \qquad
        x \leftarrow x - \gamma v

    ``server_momentum=0`` is :func:`fedavg`. The newest mean is not damped: in the long
    run the steps are :math:`1/(1-\beta)` times those of FedAvg.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule.
      rule: aggregator in place of the mean; None: the mean.
      num_clients: accepted like every method does; not needed.
      server_momentum: beta, weight kept, ``0 <= server_momentum < 1``.
      local_work: as for :func:`fedavg`.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges.

    Cost:
      One parameter copy on the server.

    References:
      Hsu et al., `Measuring the Effects of Non-Identical Data Distribution
      <https://arxiv.org/abs/1909.06335>`_, 2019, section 4.3 (there with Nesterov's
      form as well).
    """
    del num_clients
    _validate.positive("learning_rate", learning_rate)
    _validate.unit_interval("server_momentum", server_momentum)
    return _average(local_work, rule, optax.sgd(learning_rate, server_momentum))


@needs(local_steps=True)
def fedadam(
    learning_rate=0.01,
    *,
    rule=None,
    num_clients=None,
    server_momentum=0.9,
    second_momentum=0.99,
    eps=1e-3,
    local_work=None,
) -> FedAlgorithm:
    r"""FedAdam: FedAvg with Adam on the server.

    With :math:`\Delta` the mean of what the clients send, coordinate by coordinate,

    .. math::

        m \leftarrow \beta_1 m + (1-\beta_1) \Delta, \qquad
        v \leftarrow \beta_2 v + (1-\beta_2) \Delta^2, \qquad
        x \leftarrow x - \gamma\, \frac{\hat m}{\sqrt{\hat v} + \tau}

    This is ``optax.adam``: both moments start at zero and are divided by
    :math:`1-\beta^t`. The paper corrects no bias and starts v at :math:`\tau^2` or
    more.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule.
      rule: aggregator in place of the mean; None: the mean.
      num_clients: accepted like every method does; not needed.
      server_momentum: beta_1, weight kept, ``0 <= server_momentum < 1``.
      second_momentum: beta_2, weight kept, ``0 <= second_momentum < 1``.
      eps: tau > 0, degree of adaptivity.
      local_work: as for :func:`fedavg`.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges.

    Cost:
      Two parameter copies on the server.

    References:
      Reddi et al., `<https://arxiv.org/abs/2003.00295>`_, 2021, Algorithm 2.
    """
    del num_clients
    options = _moments(learning_rate, server_momentum, second_momentum, eps)
    return _average(local_work, rule, optax.adam(learning_rate, **options))


@needs(local_steps=True)
def fedyogi(
    learning_rate=0.01,
    *,
    rule=None,
    num_clients=None,
    server_momentum=0.9,
    second_momentum=0.99,
    eps=1e-3,
    local_work=None,
) -> FedAlgorithm:
    r"""FedYogi: FedAvg with Yogi on the server.

    As :func:`fedadam`, but the second moment moves by at most :math:`(1-\beta_2)
    \Delta^2`:

    .. math:: v \leftarrow v - (1-\beta_2)\, \Delta^2 \operatorname{sign}(v - \Delta^2)

    This is ``optax.yogi``: both moments start at 1e-6 and are divided by
    :math:`1-\beta^t`. The paper corrects no bias, starts m at zero and v at
    :math:`\tau^2` (1e-6 too) or more.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule.
      rule: aggregator in place of the mean; None: the mean.
      num_clients: accepted like every method does; not needed.
      server_momentum: beta_1, weight kept, ``0 <= server_momentum < 1``.
      second_momentum: beta_2, weight kept, ``0 <= second_momentum < 1``.
      eps: tau > 0, degree of adaptivity.
      local_work: as for :func:`fedavg`.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges.

    Cost:
      Two parameter copies on the server.

    References:
      Reddi et al., `<https://arxiv.org/abs/2003.00295>`_, 2021, Algorithm 2.
    """
    del num_clients
    options = _moments(learning_rate, server_momentum, second_momentum, eps)
    return _average(local_work, rule, optax.yogi(learning_rate, **options))


def _moments(learning_rate, server_momentum, second_momentum, eps):
    _validate.positive("learning_rate", learning_rate)
    _validate.unit_interval("server_momentum", server_momentum)
    _validate.unit_interval("second_momentum", second_momentum)
    _validate.positive("eps", eps)
    return {"b1": server_momentum, "b2": second_momentum, "eps": eps}


def _average(local_work, rule, optimizer):
    """Build the method that puts ``optimizer`` behind the rule, by default the mean."""
    rule = mean() if rule is None else rule
    return from_chains(
        local_work, optax.identity(), (rule, steady(optimizer)), rule=rule
    )


def server_step(learning_rate, optimizer=None) -> optax.GradientTransformation:
    """Return SGD, or an optimizer whose step ``learning_rate`` multiplies."""
    if optimizer is None:
        return optax.sgd(learning_rate)
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            "server_optimizer must be an optax transformation such as optax.adam(0.01),"
            f" got {optimizer!r}."
        )
    scale = optax.scale_by_learning_rate(learning_rate, flip_sign=False)
    return optax.chain(optimizer, scale)


def steady(optimizer) -> optax.GradientTransformationExtraArgs:
    """Keep the dtypes of an optimizer's state.

    Traced float32 numbers would widen the state of 16-bit parameters.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def update(updates, state, params=None, **extra):
        step, new = optimizer.update(updates, state, params, **extra)
        new = jax.tree.map(
            lambda a, b: a if a.dtype == b.dtype else a.astype(b.dtype), new, state
        )
        return step, new

    return optax.GradientTransformationExtraArgs(optimizer.init, update)
