# SPDX-License-Identifier: Apache-2.0
"""The rules again, in float64 loops written from their definitions.

Everything works on ``[n, d]`` arrays. Absent clients are rows that are not there.
"""

import math

import numpy as np


def _columns(x):
    """Return the columns as sorted lists; what is not finite counts as +inf."""
    return [
        sorted(v if math.isfinite(v) else math.inf for v in column)
        for column in np.asarray(x, np.float64).T.tolist()
    ]


def _average(values):
    if not values or not all(math.isfinite(v) for v in values):
        return math.nan
    return math.fsum(values) / len(values)


def mean(x, weights=None):
    x = np.asarray(x, np.float64)
    weights = [1.0] * len(x) if weights is None else weights
    out = []
    for column in x.T.tolist():
        terms = [w * v for w, v in zip(weights, column, strict=True) if w != 0]
        bad = not all(math.isfinite(t) for t in terms)
        out.append(math.nan if bad else math.fsum(terms) / math.fsum(weights))
    return np.array(out)


def median(x):
    n = len(x)
    return np.array([_average(c[(n - 1) // 2 : n // 2 + 1]) for c in _columns(x)])


def trimmed_mean(x, f):
    return np.array([_average(c[f : len(c) - f]) for c in _columns(x)])


def sq_distance(a, b):
    """Squared distance in float64; a row with a non-finite entry is infinitely far."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf
    return float(((a - b) ** 2).sum())


def neighbours(x, i, f, tie=1e-5):
    """Return the ``n - f`` rows nearest to row i, near ties to the lowest index."""
    n = len(x)
    score = [0.0 if j == i else sq_distance(x[i], x[j]) for j in range(n)]
    last = sorted(score)[n - f - 1]
    if math.isinf(last):
        tied = [j for j in range(n) if math.isinf(score[j])]
    else:
        tied = [j for j in range(n) if abs(score[j] - last) <= tie * last]
    below = [j for j in range(n) if j not in tied and score[j] < last]
    return sorted(below + tied[: n - f - len(below)])


def nnm(x, f, tie=1e-5):
    """Every row becomes the mean of its ``n - f`` nearest; inf if one is not finite."""
    x = np.asarray(x, np.float64)
    rows = []
    for i in range(len(x)):
        near = x[neighbours(x, i, f, tie)]
        fine = np.isfinite(near).all()
        rows.append(near.mean(0) if fine else np.full(x.shape[1], np.inf))
    return np.stack(rows)


def ipm(x, byzantine, scale):
    """Byzantine rows become ``-scale`` times the mean of the honest rows."""
    x = np.array(x, np.float64)
    x[byzantine] = -scale * x[~byzantine].mean(0)
    return x


def clip(v, radius):
    norm = math.sqrt(math.fsum(float(a) ** 2 for a in v))
    return np.array([float(a) * min(1.0, radius / norm) if norm else 0.0 for a in v])


def kappa_median(n, f):
    return 4 * (1 + f / (n - 2 * f)) ** 2


def kappa_mixed(n, f, kappa):
    """Coefficient of a rule behind nearest-neighbour mixing."""
    return 8 * f / (n - f) * (kappa + 1)


def tolerance(honest, dtype=np.float32):
    """4 ulp of the largest honest entry and 1e-5 of the honest spread."""
    honest = np.asarray(honest, np.float64)
    ulp = float(np.spacing(np.max(np.abs(honest)).astype(dtype)))
    return 4 * ulp + 1e-5 * float(np.max(np.ptp(honest, axis=0)))
