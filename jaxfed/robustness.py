# SPDX-License-Identifier: Apache-2.0
r"""How robust a rule is: proven coefficients, and a search for the worst inputs.

A rule F has coefficient :math:`\kappa` at (n, f) when for all inputs and **every**
subset S of n-f clients, whatever the other f send,

.. math:: \|F(x_1..x_n) - \bar x_S\|^2 \le \kappa\, V(S),

where :math:`V(S)` is the trace (``form="trace"``) or the largest eigenvalue
(``form="spectral"``) of the covariance :math:`\Sigma_S`, divided by n-f. The smaller,
the better; no rule is below :math:`f/(n-2f)` (:func:`best_kappa`).
"""

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxfed import _keys, _registry, _validate, naming
from jaxfed._base import Aggregator

__all__ = ["EmpiricalKappa", "best_kappa", "empirical_kappa", "kappa"]

# More subsets of clients than this are not searched; n <= 12 stays below.
MAX_SUBSETS = 1000

# A V(S) below this share of the mean squared norm of the rows counts as this share.
_FLOOR = 1e-6


def best_kappa(n, f) -> float:
    r"""Return :math:`f/(n-2f)`: no rule has a smaller coefficient, in either form.

    With n-f rows at 0 and f at 1, the honest rows may be all those at 0, so the output
    must be 0; or n-2f of them and those at 1.

    Args:
      n: number of clients.
      f: number of Byzantine clients, ``0 <= f < n/2``.

    Returns:
      float.

    Raises:
      TypeError, ValueError: for other n or f.
    """
    _check(n, f)
    return f / (n - 2 * f)


class _Constants(NamedTuple):
    """Coefficients of one rule.

    Attributes:
      published: the constant of the paper, None if there is none.
      sharp: the smallest constant proven in :func:`kappa`'s docstring, or None.
      spectral: they hold in the spectral form (then also in the trace form).
    """

    published: float | None
    sharp: float | None
    spectral: bool = False


def _mean(n, f):
    exact = 0.0 if f == 0 else math.inf
    return _Constants(exact, None, spectral=True)


def _trimmed_mean(n, f):
    best = f / (n - 2 * f)
    return _Constants(6 * best * (1 + best), best)


def _median(n, f, middle="mean"):
    del middle
    # Seen from the honest mean, k honest rows or more are beyond the median.
    k = (n + 1) // 2 - f
    return _Constants(_geometric_median(n, f).published, (n - f - k) / k)


def _geometric_median(n, f):
    return _Constants(4 * (1 + f / (n - 2 * f)) ** 2, None)


def _krum(n, f, neighbors="n-f-2", score="squared"):
    others = {"n-f-1": n - f - 1, "n-f-2": n - f - 2}.get(neighbors)
    if score != "squared" or others is None:
        raise ValueError(
            "of krum something is proven for score=squared and neighbors=n-f-1 or "
            f"n-f-2, got score={score}, neighbors={neighbors}."
        )
    h, kept = n - f, others + 1 - f
    if neighbors == "n-f-2" and n < 2 * f + 3:
        raise ValueError(f"krum needs n >= 2 f + 3, got n={n}, f={f}. Lower f.")
    near = 2 * h * others / (max(h - 1, 1) * kept)
    sharp = (math.sqrt(near) + math.sqrt((h - kept) / kept)) ** 2
    published = 6 * (1 + f / (n - 2 * f)) if neighbors == "n-f-1" else None
    return _Constants(published, sharp)


def _around(centre, n, f):
    """Constant of the mean of the n-f values nearest to a centre."""
    return f / (n - 2 * f) * (1 + math.sqrt(1 + centre)) ** 2


def _meamed(n, f, middle="mean"):
    return _Constants(None, _around(_median(n, f, middle).sharp, n, f))


def _phocas(n, f):
    return _Constants(None, _around(_trimmed_mean(n, f).sharp, n, f))


def _mda(n, f):
    root = math.sqrt(f / (n - 2 * f)) + f * math.sqrt(2 / (n - f))
    return _Constants(None, root**2)


def _mva(n, f):
    return _Constants(None, 4 * f / (n - 2 * f))


def _smea(n, f):
    return _Constants(4 * f / (n - 2 * f), None, spectral=True)


_PROVEN = {
    "geometric_median": _geometric_median,
    "krum": _krum,
    "mda": _mda,
    "mean": _mean,
    "meamed": _meamed,
    "median": _median,
    "mva": _mva,
    "phocas": _phocas,
    "smea": _smea,
    "trimmed_mean": _trimmed_mean,
}


def kappa(rule, n, f, form="trace", *, dim=None, sharp=False) -> float:
    r"""Return a proven robustness coefficient of a rule, by name.

    With :math:`\beta = f/(n-2f)` and :math:`h = n-f`:

    ==================  ==========================================  ==================
    rule                coefficient                                 ``sharp=True``
    ==================  ==========================================  ==================
    mean                0 if f = 0, else inf
    trimmed_mean        :math:`6\beta(1+\beta)` [1]                 :math:`\beta` (b)
    median              :math:`4(1+\beta)^2` [1]                    :math:`h/k-1` (c)
    geometric_median    :math:`4(1+\beta)^2` [1]
    krum (n-f-1)        :math:`6(1+\beta)` [1]                      (d)
    krum (n-f-2)        (d)
    meamed, phocas      :math:`\beta(1+\sqrt{1+\kappa_c})^2` (e)
    mva                 :math:`4\beta` (f)
    mda                 :math:`(\sqrt\beta+f\sqrt{2/h})^2` (g)
    smea                :math:`4\beta`, spectral (f)
    ``"nnm+"`` a rule   :math:`\frac{8f}{h}(\kappa+1)` [1]
    ==================  ==========================================  ==================

    All but smea and mean are of the trace form. Trace is at most
    :math:`\min(d, h-1)` times the largest eigenvalue, and at least once, which turns
    one form into the other. The geometric median is the exact one. Chains are covered
    with ``nnm`` only. For smea [2] proves the order :math:`\frac{f}{h}(1+\beta)^2`.

    Proofs. Let :math:`\mu` and :math:`\sigma^2` be the mean and V of S.

    - (a) A part A of S has :math:`\|\bar x_A-\mu\|^2 \le \frac{h-|A|}{|A|}\sigma^2` in
      both forms: split :math:`\sigma^2` between A and the rest, use Jensen on each.
    - (b) In each coordinate the j-th kept value is at least the j-th smallest of S, so
      the result is at least the mean of the n-2f smallest of S, and at most that of the
      n-2f largest; (a).
    - (c) In each coordinate at least :math:`k = \lceil n/2\rceil - f` values of S lie
      on the far side of the median as seen from :math:`\mu`, hence their mean; (a).
    - (d) With q neighbours, some i in S has score at most the average over S of q/(h-1)
      of its squared distances in S, :math:`2hq\sigma^2/(h-1)`. The chosen row has no
      larger one: its squared distance to the mean of the :math:`a \ge q+1-f` rows of S
      among itself and its neighbours is at most :math:`2hq\sigma^2/((h-1)a)`; (a).
    - (e) The kept set K is nearest to a centre c of coefficient :math:`\kappa_c` (the
      sharp one of median or trimmed mean), so :math:`\sum_K (x-c)^2 \le \sum_S (x-c)^2`
      and K's variance is at most :math:`(1+\kappa_c)\sigma^2`; (a) with
      :math:`A = K\cap S` as a part of S and of K.
    - (f) The chosen set K has V at most :math:`\sigma^2`; (a) with :math:`A=K\cap S` as
      a part of S and of K gives :math:`\sqrt\beta\sigma` twice.
    - (g) S has squared diameter at most :math:`2h\sigma^2`, so K has, and the means of
      K and :math:`A=K\cap S` are within :math:`\frac{f}{h}\sqrt{2h}\sigma`; (a).

    Args:
      rule: text as for :func:`jaxfed.make_aggregator`: ``"median"``,
        ``"krum(neighbors=n-f-1)"``, ``"nnm+trimmed_mean"``.
      n: number of clients.
      f: number of Byzantine clients, ``0 <= f < n/2``.
      form: ``"trace"`` or ``"spectral"``.
      dim: number of coordinates d if known; sharpens the change of form.
      sharp: return the smallest constant above instead of the published one.

    Returns:
      float; inf for a mean of n rows of which some are Byzantine.

    Raises:
      TypeError, ValueError: for n, f, form or dim out of range.
      ValueError: for rules, options or chains of which nothing is proven here, listing
        those of which something is.

    References:
      [1] Allouah et al., `Fixing by Mixing <https://arxiv.org/abs/2302.01772>`_, 2023.
      [2] Allouah et al., `On the privacy-robustness-utility trilemma
      <https://arxiv.org/abs/2302.04787>`_, 2023.
    """
    _check(n, f, form)
    *pres, (name, options) = _registry.parse(rule)
    for pre, own in pres:
        if pre != "nnm" or own:
            _registry.lookup(naming.PREAGGREGATORS, pre, "pre-aggregator")
            raise ValueError(f"chains are covered with nnm only, got {rule!r}.")
    if name not in _PROVEN:
        _registry.lookup(naming.RULES, name, "rule")
        raise ValueError(
            f"nothing is proven of {name!r} here. There are proofs for "
            f"{', '.join(_PROVEN)}, and for these behind nnm."
        )
    unknown = options.keys() - (_registry.accepted(_PROVEN[name]) - {"n", "f"})
    if unknown:
        raise ValueError(
            f"nothing is proven of {name!r} with the option(s) "
            f"{', '.join(sorted(unknown))}. Leave them at their defaults."
        )
    constants = _PROVEN[name](n, f, **options)
    known = [c for c in constants[:2] if c is not None]
    value = min(known) if sharp else known[0]
    for _ in pres:
        value = 8 * f / (n - f) * (value + 1) if f else 0.0
    if form == "spectral" and not (constants.spectral and not pres):
        rank = max(n - f - 1, 1)
        value *= rank if dim is None else min(_validate.count("dim", dim), rank)
    return value


class EmpiricalKappa(NamedTuple):
    """The worst inputs found for a rule.

    Attributes:
      ratio: the largest ``|F(x) - mean_S|^2 / V(S)`` found; a lower bound of kappa.
      inputs: ``[n, d]``, where.
      subset: ``[n - f]`` indices of the clients of S.
      bound: the smallest proven coefficient, None if there is none.
      fraction: ``ratio / bound``, None without a positive bound.
    """

    ratio: float
    inputs: jax.Array
    subset: np.ndarray
    bound: float | None
    fraction: float | None


def empirical_kappa(
    rule,
    n,
    f,
    d,
    key,
    *,
    form="trace",
    restarts=64,
    steps=200,
    learning_rate=0.05,
) -> EmpiricalKappa:
    r"""Search for the inputs that a rule handles worst, by gradient ascent through it.

    Maximises :math:`\|F(x)-\bar x_S\|^2 / V(S)` over x and over all C(n, f) subsets S
    with Adam (cosine decay) on the logarithm, rows centred and scaled to mean square 1
    after each step: for rules that commute with translation and scaling, no loss. All
    restarts run as one vmapped scan; the best inputs seen anywhere win, since most
    rules jump. A quarter of the starts is Gaussian; the others are up to three
    clusters, in equal shares of random sizes and of sizes n-2f, f and f, where the
    worst case of most selections is: f rows that are taken for honest ones just before
    they are too far, and f honest ones left out.

    Equal rows must be returned as they are, whatever the others hold, and V(S) = 0
    then makes 0/0: a V(S) below 1e-6 of the mean squared row counts as that, which can
    only lower the ratio. The ratio returned is recomputed in float64 from the rule's
    own output, so it carries the rule's rounding: about 1e-5 relative in float32. Rules
    with a state are judged from their first one.

    Args:
      rule: text as for :func:`jaxfed.make_aggregator`, or an Aggregator.
      n: number of clients; ``C(n, f)`` at most 1000 (any ``n <= 12``).
      f: number of Byzantine clients, ``0 <= f < n/2``, given to a rule named by text.
      d: number of coordinates.
      key: typed key or int seed; also given to rules by text that need one.
      form: ``"trace"`` or ``"spectral"``, see :mod:`jaxfed.robustness`.
      restarts: number of starts.
      steps: ascent steps of each.
      learning_rate: of Adam, at the start; rows have mean square 1.

    Returns:
      EmpiricalKappa. ``bound`` is ``kappa(..., sharp=True)`` for a rule given by text.

    Raises:
      TypeError, ValueError: for arguments out of range, or too many subsets.

    Cost:
      ``restarts * steps`` gradients of the rule and ``C(n, f)`` variances each, one
      compilation.
    """
    _check(n, f, form)
    d, restarts, steps = (
        _validate.count(name, value)
        for name, value in (("d", d), ("restarts", restarts), ("steps", steps))
    )
    _validate.positive("learning_rate", learning_rate)
    if math.comb(n, f) > MAX_SUBSETS:
        raise ValueError(
            f"the search goes through all C(n, f) subsets, at most {MAX_SUBSETS}, got "
            f"n={n}, f={f}: {math.comb(n, f)} subsets. Take n <= 12."
        )
    key, own = jax.random.split(_keys.as_key(key))
    bound = None
    if not isinstance(rule, Aggregator):
        try:
            bound = kappa(rule, n, f, form, dim=d, sharp=True)
        except ValueError:
            pass  # nothing is proven; what cannot be built raises below
        rule = naming.make_aggregator(rule, num_byzantine=f, key=own)
    subsets = np.array(list(itertools.combinations(range(n), n - f)))

    def aggregate(x):
        return rule.update(x, rule.init(x[0]), x[0])[0]

    def score(x):
        out = aggregate(x)
        return jnp.max(_log_ratios(x, out, subsets, form)), out

    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, steps))

    def step(carry, _):
        x, state, best = carry
        (value, out), grad = jax.value_and_grad(score, has_aux=True)(x)
        better = value > best[0]
        best = jax.tree.map(
            lambda new, old: jnp.where(better, new, old), (value, x, out), best
        )
        grad = jnp.where(jnp.isfinite(grad), grad, 0)
        move, state = optimizer.update(-grad, state)
        return (_normal(x + move), state, best), None

    def climb(x):
        start = jnp.full([], -jnp.inf, x.dtype), x, x[0]
        carry = x, optimizer.init(x), start
        return lax.scan(step, carry, None, length=steps)[0][2]

    starts = _starts(key, restarts, n, f, d)
    values, inputs, outs = jax.vmap(climb)(starts)
    best = int(jnp.argmax(values))
    ratio, subset = _exact_ratio(inputs[best], outs[best], subsets, form)
    fraction = ratio / bound if bound else None
    return EmpiricalKappa(ratio, inputs[best], subset, bound, fraction)


def _check(n, f, form="trace"):
    _validate.count("n", n)
    _validate.count("num_byzantine", f, minimum=0)
    _validate.majority(f, n)
    if form not in ("trace", "spectral"):
        raise ValueError(f"form must be 'trace' or 'spectral', got form={form!r}.")


def _normal(x):
    x = x - jnp.mean(x, axis=0, keepdims=True)
    square = jnp.mean(jnp.sum(x * x, axis=1))
    return x / jnp.sqrt(jnp.maximum(square, jnp.finfo(x.dtype).tiny))


def _starts(key, restarts, n, f, d):
    """Return ``[restarts, n, d]`` starts of three kinds."""
    kinds = jax.random.split(key, 5)
    gauss = jax.random.normal(kinds[0], (restarts, n, d))
    points = jax.random.normal(kinds[1], (restarts, 3, d))
    sizes = np.repeat(np.arange(3), [n - 2 * f, f, f])
    worst = jax.vmap(lambda k: jax.random.permutation(k, sizes))(
        jax.random.split(kinds[2], restarts)
    )
    drawn = jax.random.randint(kinds[3], (restarts, n), 0, 3)
    kind = jnp.arange(restarts)[:, None] % 4
    place = jnp.where(kind < 2, worst, drawn)
    clusters = jnp.take_along_axis(points, place[..., None], axis=1)
    width = 10.0 ** jax.random.uniform(kinds[4], (restarts, 1, 1), minval=-4, maxval=-1)
    x = jnp.where(kind[..., None] == 3, gauss, clusters + width * gauss)
    return jax.vmap(_normal)(x)


def _log_ratios(x, out, subsets, form):
    """Return ``[C(n, f)]`` logarithms of the ratio, for each subset."""
    rows = x[subsets]
    mean = jnp.mean(rows, axis=1)
    centred = rows - mean[:, None]
    if form == "trace":
        spread = jnp.sum(centred**2, axis=(1, 2)) / rows.shape[1]
    else:
        cov = _gram(centred, jnp.matmul)
        # At the top eigenvector the derivative of the eigenvalue is that of v C v,
        # also where eigenvalues meet.
        v = lax.stop_gradient(jnp.linalg.eigh(cov)[1][..., -1:])
        spread = jnp.sum(v * jnp.matmul(cov, v), axis=(1, 2)) / rows.shape[1]
    error = jnp.sum((out[None] - mean) ** 2, axis=1)
    tiny = jnp.finfo(x.dtype).tiny
    floor = jnp.maximum(_FLOOR * jnp.mean(jnp.sum(x * x, axis=1)), tiny)
    return jnp.log(jnp.maximum(error, tiny)) - jnp.log(jnp.maximum(spread, floor))


def _gram(centred, matmul):
    """Return the smaller of ``X^T X`` and ``X X^T``; both have the same top value."""
    across = centred.swapaxes(1, 2)
    few = centred.shape[1] < centred.shape[2]
    return matmul(centred, across) if few else matmul(across, centred)


def _exact_ratio(x, out, subsets, form):
    """Return the largest ratio and its subset in float64, given the rule's output."""
    x, out = np.asarray(x, np.float64), np.asarray(out, np.float64)
    rows = x[subsets]
    centred = rows - rows.mean(1, keepdims=True)
    if form == "trace":
        spread = (centred**2).sum((1, 2))
    else:
        spread = np.linalg.eigvalsh(_gram(centred, np.matmul))[:, -1]
    error = ((out - rows.mean(1)) ** 2).sum(1)
    floor = max(_FLOOR * (x**2).sum(1).mean(), np.finfo(x.dtype).tiny)
    ratios = error / np.maximum(spread / subsets.shape[1], floor)
    best = int(np.argmax(ratios))
    return float(ratios[best]), subsets[best]
