# SPDX-License-Identifier: Apache-2.0
"""Every rule with its oracle and what may be expected of it."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from toys import quick_jit

from jaxfed import aggregators as agg
from jaxfed import preaggregators as pre
from jaxfed.aggregators import compose


class Rule(NamedTuple):
    """One entry of the registry.

    Attributes:
      build: ``(f) -> Aggregator``.
      oracle: ``(x, f) -> [d]`` in float64.
      least: ``(f) -> n``, the fewest clients f may have.
      robust: whether f bad rows of any kind leave it near the honest rows.
      declares: whether its result depends on f.
      inside: whose range no coordinate of the result leaves: ``"coordinates"`` (honest
        values), ``"rows"`` (rows near honest ones), ``"origin"`` (those and 0).
      gives_up: whether more than f rows that are not finite give NaN.
      weighted: whether it honours ``weights``.
      permutes: whether the order of the clients does not matter.
      translates: whether moving all rows moves the result.
      scales: whether scaling all rows by a power of two scales the result, to the bit.
      exact: whether equal rows are returned.
      clear: whether ties leave it one answer in float32.
      search: whether it goes through subsets (few clients only).
    """

    build: Callable
    oracle: Callable
    least: Callable = lambda f: 2 * f + 1
    robust: bool = True
    declares: bool = True
    inside: str = "coordinates"
    gives_up: bool = True
    weighted: bool = False
    permutes: bool = True
    translates: bool = True
    scales: bool = True
    exact: bool = True
    clear: bool = True
    search: bool = False


def then(*stages):
    """Chain oracles ``(x, f)``, the last one reduces."""
    return lambda x, f: functools.reduce(lambda y, stage: stage(y, f), stages, x)


def plain(oracle, **options):
    """Take an oracle without f as one with."""
    return lambda x, f: oracle(x, **options)


def about_zero(x, f):
    return oracles.centered_clipping(x, np.zeros(x.shape[1]), 2.0, 3)


def _geometric_median(f):
    return agg.geometric_median(f, iterations=60, tolerance=0.0, start="mean")


_rows = functools.partial(Rule, inside="rows")
_krum = functools.partial(_rows, least=lambda f: 2 * f + 3 if f else 1, gives_up=False)
_origin = functools.partial(
    Rule, inside="origin", translates=False, gives_up=False, exact=False
)

RULES = {
    "mean": Rule(
        lambda f: agg.mean(),
        plain(oracles.mean),
        robust=False,
        declares=False,
        weighted=True,
    ),
    "median": Rule(agg.median, plain(oracles.median), declares=False),
    "trimmed_mean": Rule(agg.trimmed_mean, oracles.trimmed_mean),
    "meamed": _rows(agg.meamed, oracles.meamed),
    "phocas": _rows(agg.phocas, oracles.phocas),
    "sign_majority": Rule(
        agg.sign_majority,
        plain(oracles.sign_majority),
        robust=False,
        declares=False,
        translates=False,
        scales=False,
        exact=False,
    ),
    "krum": _krum(agg.krum, oracles.krum),
    "multi_krum": _krum(agg.multi_krum, oracles.multi_krum, gives_up=True),
    "bulyan": _rows(
        agg.bulyan,
        oracles.bulyan,
        least=lambda f: 4 * f + 3 if f else 1,
        gives_up=False,
        permutes=False,  # two rows nearest to each other have the same score
    ),
    "monna": _rows(agg.monna, oracles.monna, permutes=False),
    "cge": _origin(agg.cge, oracles.cge, gives_up=True, exact=True),
    # Subsets that hold the same widest pair are tied.
    "mda": _rows(agg.mda, oracles.mda, search=True, permutes=False),
    "mva": _rows(agg.mva, oracles.mva, search=True),
    "smea": _rows(agg.smea, oracles.smea, search=True, clear=False),
    "caf": _rows(agg.caf, oracles.caf, clear=False),
    "geometric_median": _rows(
        _geometric_median,
        plain(oracles.geometric_median, iterations=60, tolerance=0.0),
        declares=False,
        gives_up=False,
        weighted=True,
        scales=False,
    ),
    "centered_clipping": _origin(
        lambda f: agg.centered_clipping(f, clip_norm=2.0, iterations=3),
        about_zero,
        declares=False,
        scales=False,
    ),
    "nnm+mean": _rows(
        lambda f: compose(pre.nnm(f), agg.mean()),
        then(oracles.nnm, plain(oracles.mean)),
        robust=False,
    ),
    "nnm+median": _rows(
        lambda f: compose(pre.nnm(f), agg.median()),
        then(oracles.nnm, plain(oracles.median)),
    ),
    "nnm+trimmed_mean": _rows(
        lambda f: compose(pre.nnm(f), agg.trimmed_mean(f)),
        then(oracles.nnm, oracles.trimmed_mean),
    ),
    "nnm+nnm+median": _rows(
        lambda f: compose(pre.nnm(f), pre.nnm(f), agg.median()),
        then(oracles.nnm, oracles.nnm, plain(oracles.median)),
        clear=False,
    ),
    "nnm+krum": _krum(
        lambda f: compose(pre.nnm(f), agg.krum(f)),
        then(oracles.nnm, oracles.krum),
        clear=False,
    ),
    "arc+nnm+trimmed_mean": _origin(
        lambda f: compose(pre.arc(f), pre.nnm(f), agg.trimmed_mean(f)),
        then(oracles.arc, oracles.nnm, oracles.trimmed_mean),
        clear=False,
    ),
    "clip+geometric_median": _origin(
        lambda f: compose(pre.clip(3.0), _geometric_median(f)),
        then(
            plain(oracles.clip_rows, clip_norm=3.0),
            plain(oracles.geometric_median, iterations=60, tolerance=0.0),
        ),
        declares=False,
        scales=False,
    ),
}


def budget(name, n, f):
    """Return the largest budget up to f that n clients allow the rule."""
    return max((b for b in range(f + 1) if RULES[name].least(b) <= n), default=0)


def params_of(updates):
    return jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), updates)


def aggregate(aggregator, updates, **extra):
    params = params_of(updates)
    return aggregator.update(updates, aggregator.init(params), params, **extra)[0]


@functools.cache
def compiled(name, f):
    """One jitted function for each rule and budget; JAX caches its shapes."""
    return quick_jit(functools.partial(aggregate, RULES[name].build(f)))
