# SPDX-License-Identifier: Apache-2.0
"""Safe-DGD and Safe-DSGD: noise on the client, a rule, a projected step."""

import math

import optax

from jaxfed import _validate
from jaxfed._base import FedAlgorithm
from jaxfed.algorithms._build import from_chains, needs
from jaxfed.algorithms._safe_dshb import _clipping
from jaxfed.privacy.mechanisms import gaussian_noise
from jaxfed.projections import project


def safe_dgd(
    learning_rate,
    *,
    rule,
    num_clients=None,
    key,
    clip_norm=None,
    noise_std=0.0,
    radius=math.inf,
    projection="ball",
    local_work=None,
) -> FedAlgorithm:
    r"""Safe-DGD: robust aggregation of noised full gradients, then a projection.

    .. math::

        m_i = \frac1m \sum_j \mathrm{clip}_C(\nabla \ell(x; z_{ij})) +
        \mathcal N(0, \sigma^2 I), \qquad
        x \leftarrow \Pi_R\big(x - \gamma\, \mathrm{RAgg}(m_1, \dots, m_n)\big)

    Clients have no state. Without noise, Byzantine clients and an active clip or
    projection it is gradient descent. One replaced example moves a message by 2 C / m.

    Args:
      learning_rate: gamma > 0, number, traced scalar or schedule.
      rule: aggregator, the paper's is ``smea(f)``.
      num_clients: accepted like every method does; not needed.
      key: typed key or int seed of the noise.
      clip_norm: C > 0, clips the whole message (client-level privacy too). Exactly one
        of this and the local work's own ``clip_norm``, which clips each example.
      noise_std: sigma >= 0 per coordinate of a message.
      radius: R > 0 of the ball that holds the parameters; inf for none; may be traced.
      projection: onto one ``"ball"``, or with a ball for each array (``"layers"``).
      local_work: ``gradient(loss_fn, clip_norm=C)``, on all examples.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for values out of these ranges, no or two clips, or local work on
        batches.

    Cost:
      No memory per client.

    References:
      Boudou et al., Unveiling the Non-Monotonic Effect of Privacy on Generalization
      under Byzantine Robustness, 2026, Algorithm 1 (mode DGD).
    """
    del num_clients
    size = getattr(local_work, "batch_size", None)
    if size is not None:
        raise ValueError(
            f"safe_dgd takes the gradient over all examples, got local work with "
            f"batch_size={size}: leave it out, or use safe_dsgd or safe_dshb."
        )
    algorithm = _safe(
        "safe_dgd",
        learning_rate,
        rule,
        key,
        clip_norm,
        noise_std,
        radius,
        projection,
        local_work,
    )
    claimed = algorithm.mechanism._replace(nominal=math.sqrt(2))  # Theorem 2.1
    return algorithm._replace(mechanism=claimed)


@needs(batch_size=1)
def safe_dsgd(
    learning_rate,
    *,
    rule,
    num_clients=None,
    key,
    clip_norm=None,
    noise_std=0.0,
    radius=math.inf,
    projection="ball",
    local_work=None,
) -> FedAlgorithm:
    r"""Safe-DSGD: :func:`safe_dgd` on one example a round, drawn uniformly.

    .. math::

        m_i = \mathrm{clip}_C(\nabla \ell(x; z_{iJ})) + \mathcal N(0, \sigma^2 I),
        \qquad
        x \leftarrow \Pi_R\big(x - \gamma\, \mathrm{RAgg}(m_1, \dots, m_n)\big)

    One replaced example moves a message by 2 C, if it is the one that is drawn. A
    client with one example runs :func:`safe_dgd`.

    Args:
      learning_rate: as for :func:`safe_dgd`.
      rule: as for :func:`safe_dgd`.
      num_clients: as for :func:`safe_dgd`.
      key: as for :func:`safe_dgd`.
      clip_norm: as for :func:`safe_dgd`.
      noise_std: as for :func:`safe_dgd`.
      radius: as for :func:`safe_dgd`.
      projection: as for :func:`safe_dgd`.
      local_work: ``gradient(loss_fn, batch_size=1, clip_norm=C)``.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: as :func:`safe_dgd`, or for local work on another number of examples.

    Cost:
      No memory per client.

    References:
      Boudou et al., Unveiling the Non-Monotonic Effect of Privacy on Generalization
      under Byzantine Robustness, 2026, Algorithm 1 (mode DSGD).
    """
    del num_clients
    size = getattr(local_work, "batch_size", 1)
    if size != 1:
        raise ValueError(
            f"safe_dsgd takes one example a round, got local work with batch_size="
            f"{size}: use gradient(loss_fn, batch_size=1, ...)."
        )
    return _safe(
        "safe_dsgd",
        learning_rate,
        rule,
        key,
        clip_norm,
        noise_std,
        radius,
        projection,
        local_work,
    )


def _safe(
    name,
    learning_rate,
    rule,
    key,
    clip_norm,
    noise_std,
    radius,
    projection,
    local_work,
):
    _validate.positive("learning_rate", learning_rate)
    _validate.choice("projection", projection, ("ball", "layers"))
    clip_link, mechanism = _clipping(name, clip_norm, noise_std, local_work)
    return from_chains(
        local_work,
        optax.chain(clip_link, gaussian_noise(noise_std, key)),
        (
            rule,
            optax.sgd(learning_rate),
            project(radius, per_leaf=projection == "layers"),
        ),
        rule=rule,
        mechanism=mechanism,
    )
