# SPDX-License-Identifier: Apache-2.0
"""The rules again, in float64 loops written from their definitions.

Everything works on ``[n, d]`` arrays. Absent clients are rows that are not there.
"""

import itertools
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


def _middle(column, middle="mean"):
    """Median of a sorted column; for an even number the mean or the lower of two."""
    n = len(column)
    low, high = (n - 1) // 2, n // 2
    return _average(column[low : high + 1]) if middle == "mean" else column[low]


def _nearest(column, centre, k, tie):
    """Mean of the k values of a sorted column nearest to centre; ties: the lower."""
    if not math.isfinite(centre):
        return math.nan
    chosen = smallest([abs(v - centre) for v in column], k, tie)
    return _average([column[i] for i in chosen])


def median(x, middle="mean"):
    return np.array([_average([_middle(c, middle)]) for c in _columns(x)])


def trimmed_mean(x, f):
    return np.array([_average(c[f : len(c) - f]) for c in _columns(x)])


def meamed(x, f, middle="mean", tie=1e-5):
    """Per coordinate the mean of the ``n - f`` values nearest to the median."""
    k = len(x) - f
    return np.array([_nearest(c, _middle(c, middle), k, tie) for c in _columns(x)])


def phocas(x, f, tie=1e-5):
    """Per coordinate the mean of the ``n - f`` values nearest to the trimmed mean."""
    centre, k = trimmed_mean(x, f), len(x) - f
    columns = zip(_columns(x), centre, strict=True)
    return np.array([_nearest(c, float(t), k, tie) for c, t in columns])


def sign_majority(x):
    """Sign of the sum of signs; 0 for a draw. What is not finite counts as +inf."""
    out = []
    for column in _columns(x):
        votes = sum((v > 0) - (v < 0) for v in column)
        out.append((votes > 0) - (votes < 0))
    return np.array(out, np.float64)


def smallest(scores, k, tie=1e-5):
    """Return the indices of the k smallest; near ties with the last: lowest index."""
    if k <= 0:
        return []
    last = sorted(scores)[k - 1]
    if math.isinf(last):
        tied = [j for j, s in enumerate(scores) if math.isinf(s)]
    else:
        tied = [j for j, s in enumerate(scores) if abs(s - last) <= tie * last]
    below = [j for j, s in enumerate(scores) if j not in tied and s < last]
    return sorted(below + tied[: k - len(below)])


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
    return smallest(score, n - f, tie)


def nnm(x, f, tie=1e-5):
    """Every row becomes the mean of its ``n - f`` nearest; inf if one is not finite."""
    x = np.asarray(x, np.float64)
    rows = []
    for i in range(len(x)):
        near = x[neighbours(x, i, f, tie)]
        fine = np.isfinite(near).all()
        rows.append(near.mean(0) if fine else np.full(x.shape[1], np.inf))
    return np.stack(rows)


def _rows_mean(x, chosen):
    """Mean of some rows; NaN if one of them is not finite."""
    rows = np.asarray(x, np.float64)[list(chosen)]
    return rows.mean(0) if np.isfinite(rows).all() else np.full(x.shape[1], np.nan)


# --- rules by distance -----------------------------------------------------------

POWER = {"plain": 0.5, "squared": 1.0, "fourth_power": 2.0}
FEWER = {"n-f-2": 2, "n-f-1": 1}


def krum_scores(x, f, score="squared", neighbors="n-f-2"):
    """Sum of the distances of each row to its nearest others.

    ``neighbors`` may also be a number. At least one neighbour is counted, which only
    matters inside Bulyan, where few rows are left.
    """
    n = len(x)
    k = n - f - FEWER[neighbors] if isinstance(neighbors, str) else neighbors
    scores = []
    for i in range(n):
        others = [sq_distance(x[i], x[j]) ** POWER[score] for j in range(n) if j != i]
        scores.append(math.fsum(sorted(others)[: max(k, 1)]))
    return scores


def krum(x, f, score="squared", neighbors="n-f-2", tie=1e-5):
    return multi_krum(x, f, 1, score, neighbors, tie)


def multi_krum(x, f, select=None, score="squared", neighbors="n-f-2", tie=1e-5):
    """Mean of the ``select`` rows (``n - f``) of least score."""
    x = np.asarray(x, np.float64)
    scores = krum_scores(x, f, score, neighbors)
    return _rows_mean(x, smallest(scores, select or len(x) - f, tie))


def bulyan(
    x,
    f,
    selection="rescored",
    select=None,
    score="squared",
    neighbors="n-f-2",
    middle="mean",
    tie=1e-5,
):
    """Krum picks rows, then per coordinate the values nearest the median are averaged.

    ``rescored`` (El Mhamdi et al. 2018): ``theta = n - 2f`` times, Krum picks one of
    the rows left, scored among the rows left. ``frozen`` (the ``krum`` library, with
    plain distances and the lower median): scores are computed once, over the ``select``
    (``n - f - 2``) nearest; row i of ``theta = n - 2f - 2`` is the mean of the
    ``min(select, n - f - 2 - i)`` best after the i best. Of the theta values of a
    coordinate ``theta - 2f`` are kept.
    """
    x = np.asarray(x, np.float64)
    n, rows = len(x), []
    if selection == "rescored":
        left = list(range(n))
        for _ in range(n - 2 * f):
            scores = krum_scores(x[left], f, score, neighbors)
            rows.append(x[left.pop(smallest(scores, 1, tie)[0])])
    else:
        near = neighbors if select is None else select
        scores = krum_scores(x, f, score, near)
        select, best = select or n - f - 2, []
        for k in range(1, n + 1):  # ranks, near ties to the lowest index
            best += [i for i in smallest(scores, k, tie) if i not in best]
        for i in range(n - 2 * f - 2):
            m = min(select, n - f - 2 - i)
            rows.append(_rows_mean(x, best[i : i + m]))
    return meamed(np.stack(rows), 2 * f, middle, tie)


def monna(x, f, trusted=0, tie=1e-5):
    """Mean of the ``n - f`` rows nearest to a trusted row, itself included."""
    return _rows_mean(x, neighbours(x, trusted, f, tie))


def cge(x, f, tie=1e-5):
    """Mean of the ``n - f`` rows of least norm."""
    norms = [sq_distance(row, np.zeros(len(row))) ** 0.5 for row in np.asarray(x)]
    return _rows_mean(x, smallest(norms, len(x) - f, tie))


# --- rules by subsets, all of them -------------------------------------------------


def _first_best(x, f, score, tie):
    """Mean of the subset of ``n - f`` rows of least score.

    Scores within ``tie`` relative of the least (or within rounding of 0) are tied with
    it; the first in lexicographic order wins.
    """
    x = np.asarray(x, np.float64)
    n = len(x)
    subsets = list(itertools.combinations(range(n), n - f))
    finite = np.isfinite(x).all(1)
    scores = [score(x[list(s)]) if finite[list(s)].all() else math.inf for s in subsets]
    least = min(scores)
    chosen = subsets[scores.index(least)]
    if math.isfinite(least):
        dust = 1e-28 * float((x[list(chosen)] ** 2).sum())
        chosen = next(
            s
            for s, v in zip(subsets, scores, strict=True)
            if v <= least * (1 + tie) + dust
        )
    return _rows_mean(x, chosen)


def diameter(rows):
    """Largest squared distance between two rows."""
    pairs = itertools.combinations(rows, 2)
    return max((sq_distance(a, b) for a, b in pairs), default=0.0)


def variance(rows):
    """Trace of the covariance of the rows, divided by their number."""
    return float(((rows - rows.mean(0)) ** 2).sum()) / len(rows)


def top_eigenvalue(rows):
    """Largest eigenvalue of the covariance of the rows, divided by their number."""
    centred = rows - rows.mean(0)
    gram = centred @ centred.T if len(rows) < rows.shape[1] else centred.T @ centred
    return max(float(np.linalg.eigvalsh(gram)[-1]), 0.0) / len(rows)


def mda(x, f, tie=1e-5):
    return _first_best(x, f, diameter, tie)


def mva(x, f, tie=1e-5):
    return _first_best(x, f, variance, tie)


def smea(x, f, tie=1e-12):
    return _first_best(x, f, top_eigenvalue, tie)


# --- filters -----------------------------------------------------------------------


def _weighted(x, c):
    """Weighted mean, and the top eigenpair of the weighted covariance."""
    mean = c @ x / c.sum()
    centred = x - mean
    # The right singular vectors of the weighted rows are the covariance's.
    scaled = centred * np.sqrt(c / c.sum())[:, None]
    _, values, vectors = np.linalg.svd(scaled, full_matrices=False)
    return mean, float(values[0] ** 2), (centred @ vectors[0]) ** 2


def _downweight(c, tau, tie):
    """Weights times ``1 - tau / max tau``; the largest of positive weight go to 0."""
    top = tau[c > 0].max()
    factor = 1 - np.minimum(tau / top, 1)
    return np.where(tau >= top * (1 - tie), 0.0, c * factor)


def caf(x, f, tie=1e-12):
    """Covariance filter: the mean of least top eigenvalue among reweightings."""
    return caf_with_passes(x, f, tie)[0]


def caf_with_passes(x, f, tie=1e-12):
    """Return :func:`caf` and how many passes it took, at most 2f.

    Rows that are not finite have weight 0 from the start.
    """
    x = np.asarray(x, np.float64)
    n, finite = len(x), np.isfinite(x).all(1)
    if (~finite).sum() > f:
        return np.full(x.shape[1], np.nan), 0
    c, x = finite.astype(float), np.where(finite[:, None], x, 0)
    out, least, passes = c @ x / c.sum(), math.inf, 0
    while c.sum() > n - 2 * f + 1e-9 and least > 0:
        mean, value, tau = _weighted(x, c)
        if value < least:
            out, least = mean, value
        if value > 0:
            c = _downweight(c, tau, tie)
        passes += 1
    return out, passes


def filter_l2(x, f, sigma, tie=1e-12):
    """Steinhardt's filter: downweight along the top direction until it is calm.

    Stops when the top eigenvalue's square is at most ``20 sigma^2`` (sigma bounds the
    operator norm of the covariance), or after 2f passes. Rows that are not finite
    have weight 0 from the start; each counts as a pass.
    """
    x = np.asarray(x, np.float64)
    finite = np.isfinite(x).all(1)
    bad = int((~finite).sum())
    if bad > f:
        return np.full(x.shape[1], np.nan)
    c, x = finite.astype(float), np.where(finite[:, None], x, 0)
    for _ in range(2 * f - bad):
        _, value, tau = _weighted(x, c)
        if value**2 <= 20 * max(sigma, 1e-5) ** 2:
            break
        c = _downweight(c, tau, tie)
    return c @ x / c.sum()


# --- averages ----------------------------------------------------------------------


def geometric_median(
    x, weights=None, iterations=100, smoothing=1e-6, tolerance=1e-6, start="mean"
):
    """Smoothed Weiszfeld; rows that are not finite have weight 0.

    Stops early when a step is at most ``tolerance`` times the mean distance to the
    rows.
    """
    x = np.asarray(x, np.float64)
    finite = np.isfinite(x).all(1)
    a = np.ones(len(x)) if weights is None else np.asarray(weights, np.float64)
    x, a = x[finite], a[finite]
    if not a.sum() > 0:
        return np.full(x.shape[1], np.nan)
    z = a @ x / a.sum() if start == "mean" else np.zeros(x.shape[1])
    for _ in range(iterations):
        distance = np.sqrt(((x - z) ** 2).sum(1))
        w = a / np.maximum(distance, smoothing)
        step = w @ x / w.sum() - z
        z = z + step
        if np.sqrt((step**2).sum()) <= tolerance * (a @ distance) / a.sum():
            break
    return z


def centered_clipping(x, centre, clip_norm=10.0, iterations=1):
    """``v <- v + mean(clip(x - v))``; a row that is not finite pulls nowhere."""
    v = np.array(centre, np.float64)
    for _ in range(iterations):
        v = v + clip_rows(np.asarray(x, np.float64) - v, clip_norm).mean(0)
    return v


def fltrust(x, reference, form="original"):
    """Weigh each row by the positive part of its cosine with the reference.

    ``original``: rows rescaled to the reference's norm, weighted mean, 0 if nobody is
    trusted. ``projected``: the plain mean of what each row has along the reference.
    Rows that are 0 or not finite are not trusted.
    """
    r = np.asarray(reference, np.float64)
    size = math.sqrt(float(r @ r))
    total, trust = np.zeros(len(r)), 0.0
    for row in np.asarray(x, np.float64):
        norm = math.sqrt(sq_distance(row, np.zeros(len(r))))
        if size == 0 or norm == 0 or math.isinf(norm):
            continue
        cosine = max(0.0, float(row @ r) / (norm * size))
        trust += cosine
        if form == "original":
            total += cosine * size / norm * row
        else:
            total += cosine * norm / size * r
    if form == "projected":
        return total / len(x)
    return total / trust if trust > 0 else total


# --- before the rule ---------------------------------------------------------------


def bucketing(x, order, size=2):
    """Means of consecutive rows of ``x[order]``; inf if one is not finite."""
    x = np.asarray(x, np.float64)[np.asarray(order)]
    rows = []
    for i in range(0, len(x), size):
        bucket = x[i : i + size]
        fine = np.isfinite(bucket).all()
        rows.append(bucket.mean(0) if fine else np.full(x.shape[1], np.inf))
    return np.stack(rows)


def clip_rows(x, clip_norm=2.0):
    """Scale every row down to norm ``clip_norm``; one that is not finite becomes 0."""
    rows = []
    for row in np.asarray(x, np.float64):
        fine = np.isfinite(row).all()
        rows.append(clip(row, clip_norm) if fine else np.zeros(len(row)))
    return np.stack(rows)


def arc(x, f):
    """Clip the ``floor(2 f (n - f) / n)`` largest rows to the norm of the next one."""
    n = len(x)
    norms = [math.sqrt(sq_distance(row, np.zeros(len(row)))) for row in np.asarray(x)]
    radius = sorted(norms, reverse=True)[2 * f * (n - f) // n]
    return clip_rows(x, radius)


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
