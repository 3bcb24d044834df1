# SPDX-License-Identifier: Apache-2.0
"""Rules that search all subsets of n - f clients: MDA, MVA and SMEA.

Subsets are numbered in lexicographic order of their sorted row indices and built from
their numbers a chunk at a time, so that memory stays bounded and f may be traced.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxfed import _keys, _validate

LIMIT = 10**7  # subsets in one search
_CHUNK = 8192  # subsets scored at a time; fewer where n is large
_BATCH = 64  # eigenproblems solved at a time
_STEPS = 10  # Lanczos steps that rule subsets out


class _Search:
    """The subsets of ``count - f`` of the first ``count`` of ``n`` rows, by number.

    Attributes:
      chunk: how many are scored at a time.
      drops: f.
      size: rows in a subset.
      present, unusable: ``[n]``, 1 or 0.
      tolerance: relative, of scores that tie.
    """

    def __init__(self, n, f, count, most, usable, dtype):
        self._n, self._count, self._dtype = n, count, dtype
        self.drops = f
        self.present = (jnp.arange(n) < count).astype(dtype)
        self.unusable = (~usable).astype(dtype) * self.present
        self._table = jnp.asarray(
            [
                [min(math.comb(i, j), _validate.LARGEST) for j in range(most + 1)]
                for i in range(n + 1)
            ],
            jnp.int32,
        )
        self.chunk = min(math.comb(n, most), max(64, min(_CHUNK, 2**20 // n)))
        self.size = (count - f).astype(dtype)
        self.tolerance = _tolerance(dtype)

    def masks(self, numbers):
        """Return ``[n, len(numbers)]``, 1 where a subset holds a row, else 0."""

        def step(carry, i):
            number, drops = carry
            # The subsets that hold row i come first: one for each choice of the
            # rows to drop among those behind it.
            rest = self._count - 1 - i
            holding = self._table[jnp.maximum(rest, 0), drops]
            keep = (number < holding) & (rest >= 0)
            number = jnp.where(keep, number, number - holding)
            return (number, jnp.where(keep, drops, drops - 1)), keep

        start = numbers, jnp.broadcast_to(self.drops, numbers.shape)
        keep = lax.scan(step, start, jnp.arange(self._n, dtype=jnp.int32))[1]
        return keep.astype(self._dtype)

    def first_minimum(self, scores, floor=0.0):
        """Return the subset ``[n]`` of least score, near ties to the first.

        ``scores(masks, live, below, i)`` gives the scores of chunk i; those that are
        not ``live`` do not count, those not below ``below`` may be inf. NaN if every
        score is inf.
        """
        total = self._table[self._count, self.drops]

        def step(i, carry):
            best, first = carry
            numbers = i * self.chunk + jnp.arange(self.chunk, dtype=jnp.int32)
            masks = self.masks(jnp.minimum(numbers, total - 1))
            below = best * (1 - self.tolerance) - floor
            live = (numbers < total) & (_dot(self.unusable[None], masks)[0] == 0)
            score = scores(masks, live, below, i)
            score = jnp.where(live & ~jnp.isnan(score), score, jnp.inf)
            least = jnp.min(score)
            here = numbers[jnp.argmax(score <= least * (1 + self.tolerance) + floor)]
            better = least < below
            return jnp.where(better, least, best), jnp.where(better, here, first)

        start = jnp.asarray(jnp.inf, self._dtype), jnp.int32(0)
        best, first = lax.fori_loop(0, -(-total // self.chunk), step, start)
        return jnp.where(jnp.isfinite(best), self.masks(first[None])[:, 0], jnp.nan)


def _tolerance(dtype):
    return 1e-12 if dtype == jnp.float64 else 1e-5


def _dot(a, b):
    return jnp.matmul(a, b, precision="highest")


def _select(choose, matrix, geometry, f, remedy):
    """Return the weights ``[n]`` of the subset ``choose(search, matrix)``.

    ``matrix`` (``[n, n]``) and the search see the present rows first.
    """
    n = geometry.usable.shape[0]
    f = _validate.budget(f)
    _validate.majority(f, n)
    static = _validate.is_concrete(f)
    most = f if static else (n - 1) // 2
    subsets = math.comb(n, most)
    if subsets > LIMIT:
        which = f"f={f}" if static else f"a traced f (up to {most})"
        raise ValueError(
            f"num_byzantine and n ask for too many subsets: n={n} and {which} give "
            f"{subsets} subsets of n - f clients, the limit is {LIMIT}. Use {remedy}"
            f"{'' if static else ', or a Python int for num_byzantine'}."
        )
    count = jnp.asarray(geometry.count, jnp.int32)
    valid = (0 <= f) & (f < count - f)
    clipped = jnp.clip(jnp.asarray(f, jnp.int32), 0, jnp.maximum((count - 1) // 2, 0))
    order = jnp.argsort(~geometry.present)  # stable: lexicographic order is kept
    matrix = lax.stop_gradient(matrix)[order][:, order]
    search = _Search(n, clipped, count, most, geometry.usable[order], matrix.dtype)
    chosen = choose(search, matrix) / search.size
    weights = jnp.zeros(n, matrix.dtype).at[order].set(chosen)
    return jnp.where(valid, weights, jnp.nan)


def mda(geometry, num_byzantine):
    r"""Weigh the subset of ``n - f`` clients of least diameter (largest distance).

    Near ties (squared diameters within 1e-5 relative, 1e-12 in float64) go to the
    first subset in lexicographic order. A subset with an unusable row is infinitely
    wide.

    Args:
      geometry: the clients' :class:`Geometry`.
      num_byzantine: f, ``0 <= f < n/2``, may be traced.

    Returns:
      Weights ``[n]``, ``1 / (n - f)`` on the subset, 0 elsewhere, piecewise constant
      (gradient 0). NaN if every subset has an unusable row, or where a traced f or
      mask violates ``0 <= 2 f < n``.

    Raises:
      ValueError: if ``2 f >= n``, or if there are more than ``10**7`` subsets (with
        a traced f of the worst case, that is for n > 26) and more than one parameter.

    Cost:
      ``O(n C(n, f))`` time and ``O(n)`` times 8192 numbers of memory, once for each
      problem under vmap. With one parameter ``O(n log n)``, plus ``O(n)`` for each tie.

    References:
      Rousseeuw, Multivariate estimation with high breakdown point, 1985; El Mhamdi
      et al., `The Hidden Vulnerability <https://arxiv.org/abs/1802.07927>`_, 2018.
    """
    if geometry.dim == 1:
        return _window(geometry, num_byzantine, widest=True)

    def choose(search, d):
        n = d.shape[0]
        pairs = jnp.argsort(-jnp.where(jnp.triu(jnp.ones_like(d), 1) > 0, d, -1), None)
        first, second = jnp.divmod(pairs, n)
        ordered = d[first, second]

        def scores(masks, live, below, i):
            del live, below, i

            # From the widest pair on: a subset's diameter is the first pair it holds.
            def unsettled(carry):
                return (carry[0] < n * (n - 1) // 2) & jnp.any(carry[1] < 0)

            def settle(carry):
                p, diameter = carry
                holds = masks[first[p]] * masks[second[p]] > 0
                settled = jnp.where(holds, ordered[p], -1)
                return p + 1, jnp.where(diameter < 0, settled, diameter)

            start = jnp.int32(0), jnp.full(masks.shape[1], -1, d.dtype)
            return jnp.maximum(lax.while_loop(unsettled, settle, start)[1], 0)

        return search.first_minimum(scores)

    remedy = "a rule of polynomial time such as krum or nnm+trimmed_mean"
    return _select(choose, geometry.sq_distances(), geometry, num_byzantine, remedy)


def mva(geometry, num_byzantine):
    r"""Weigh the subset of ``n - f`` clients of least total variance.

    The variance is the trace of the covariance, :math:`\frac{1}{2k^2}
    \sum_{i,j \in S} \|x_i - x_j\|^2` with k = n - f. Ties and unusable rows as for
    :func:`mda`.

    Args:
      geometry: as for :func:`mda`.
      num_byzantine: as for :func:`mda`.

    Returns:
      Weights as of :func:`mda`.

    Raises:
      ValueError: as :func:`mda`.

    Cost:
      ``O(n^2 C(n, f))`` in matrix products, otherwise as :func:`mda`.

    References:
      Guerraoui et al., `Byzantine Machine Learning Made Easy by Resilient Averaging
      of Momentums <https://arxiv.org/abs/2205.12173>`_, 2022.
    """
    if geometry.dim == 1:
        return _window(geometry, num_byzantine)

    def choose(search, d):
        d = jnp.where(jnp.isfinite(d), d, 0)  # the search leaves unusable rows out

        def scores(masks, live, below, i):
            del live, below, i
            return _column_sums(masks * _dot(d, masks)) / (2 * search.size**2)

        return search.first_minimum(scores)

    remedy = "a rule of polynomial time such as caf or nnm+trimmed_mean"
    return _select(choose, geometry.sq_distances(), geometry, num_byzantine, remedy)


def smea(geometry, num_byzantine, *, power_iters=None, key=None):
    r"""Weigh the subset of ``n - f`` clients whose covariance has least top eigenvalue.

    Exact by default: every subset is either proven no better than the best one known
    or goes to an eigenvalue solver. Near ties (within 1e-5 relative in float32,
    1e-12 in float64, and the rounding of the Gram matrix) go to the first subset in
    lexicographic order. A subset with an unusable row is infinitely bad. With one
    parameter the rule is :func:`mva`, a window of the sorted values.

    ``power_iters`` reproduces published tables, nothing else: the score of a subset
    with centred rows :math:`D_S` is then :math:`\|D_S^\top D_S v\|` after that many
    power iterations from a random unit vector v of its own. The start is drawn through
    :math:`D_S v`, whose law the Gram matrix determines. One iteration picks a random
    subset, biased to small covariances; many pick the exact one.

    Guarantee: :math:`\kappa = \frac{4f}{n-2f}` for the exact rule, in spectral form.

    Args:
      geometry: as for :func:`mda`.
      num_byzantine: as for :func:`mda`.
      power_iters: None, or a Python int >= 1.
      key: random key or int seed; required with ``power_iters``, else not used.

    Returns:
      Weights as of :func:`mda`.

    Raises:
      ValueError: as :func:`mda`; for a ``power_iters`` below 1 or without key.

    Cost:
      ``O(n^2 C(n, f))`` in matrix products and ``O(n^3)`` for each subset that is not
      ruled out, few unless very many are nearly tied; otherwise as :func:`mda`.

    References:
      Allouah et al., `On the Privacy-Robustness-Utility Trilemma in Distributed
      Learning <https://arxiv.org/abs/2302.04787>`_, 2023.
    """
    if power_iters is not None:
        _validate.count("power_iters", power_iters)
        if key is None:
            raise ValueError(
                "power_iters starts from random vectors: key must be "
                "jax.random.key(...) or an int seed."
            )
        choose = _power_choice(power_iters, _keys.as_key(key), geometry.dim)
    elif geometry.dim == 1:
        return _window(geometry, num_byzantine)
    else:
        choose = _least_top_eigenvalue
    remedy = "CAF (caf), its stand-in of polynomial time"
    return _select(choose, geometry.rows, geometry, num_byzantine, remedy)


def _column_sums(x):
    # A product, because XLA's CPU reduction over the leading axis is slow.
    return _dot(jnp.ones((1, x.shape[0]), x.dtype), x)[0]


def _centred(y, masks, size):
    """Centre each column of ``y`` over the rows of its subset; 0 on the others."""
    y = masks * y
    return masks * (y - _column_sums(y)[None] / size)


def _inverse(x):
    return jnp.where(x > 0, 1 / jnp.where(x > 0, x, 1), 0)


def _scatter(gram, mask):
    """Return the inner products ``[n, n]`` of a subset about its mean."""
    size = jnp.maximum(jnp.sum(mask), 1)
    centre = jnp.diag(mask) - mask[:, None] * mask[None, :] / size
    return _dot(_dot(centre, gram), centre)


def _least_top_eigenvalue(search, gram):
    """Return the subset ``[n]`` whose scatter matrix has the least top eigenvalue."""
    size, info = search.size, jnp.finfo(gram.dtype)
    gram = gram / (4 * gram.shape[0])  # sums of far rows' products must not overflow

    # A good subset to start from: drop the row that sticks out most, f times.
    def drop(_, mask):
        leverage = (
            jnp.square(jnp.linalg.eigh(_scatter(gram, mask))[1][:, -1])
            + 2 * search.unusable
        )
        return mask.at[jnp.argmax(leverage * mask)].set(0)

    known = lax.fori_loop(0, search.drops, drop, search.present)
    # About its mean, rounding is small next to its own scatter, the new unit.
    noise = 4 * info.eps * jnp.max(jnp.diagonal(gram) * known)
    moved = _dot(gram, known) / size
    gram = gram - moved[:, None] - moved[None, :] + _dot(known, moved) / size
    values, vectors = jnp.linalg.eigh(_scatter(gram, known))
    unit = jnp.maximum(values[-1] + noise, info.tiny)
    # Clipping a far row changes nothing: each of its subsets holds a row of `known`
    # (2f < n), hence has an eigenvalue above 1 either way.
    most = jnp.sqrt(info.max)
    gram = jnp.clip(jnp.nan_to_num(gram / unit), -most, most)
    bound, noise = 1 + 10 * search.tolerance, noise / unit
    # Its top direction is close to that of its rivals; far rows must not drown them.
    direction = _dot(gram, vectors[:, -1])
    direction /= jnp.maximum(jnp.max(jnp.abs(direction * known)), info.tiny)
    direction = jnp.clip(direction, -1e3, 1e3)[:, None]

    def scores(masks, live, below, i):
        del i
        limit = jnp.minimum(below, bound)

        # Exactness: Lanczos builds a tridiagonal matrix T whose eigenvalues are at
        # most the top one of the scatter matrix (up to rounding, Paige 1976), and
        # T - limit has a pivot >= 0 only if one of them reaches the limit. Such a
        # subset cannot win, nor one that overflows. All others are solved.
        def lanczos(_, carry):
            v, past, beta, pivot, rival = carry
            w = _dot(gram, v)
            alpha = _column_sums(v * w)
            # The barrier keeps XLA from rounding two copies differently.
            w = lax.optimization_barrier(w - alpha[None] * v - beta[None] * past)
            w = _centred(w, masks, size)
            pivot = alpha - limit - jnp.square(beta) / pivot
            rival &= pivot < 0
            beta = jnp.sqrt(_column_sums(jnp.square(w)))
            # What is left may be little more than rounding: T is complete then.
            beta = jnp.where(beta > jnp.sqrt(info.eps), beta, 0)
            return w * _inverse(beta)[None], v, beta, pivot, rival

        v = _centred(direction * masks, masks, size)
        v = v * _inverse(jnp.sqrt(_column_sums(jnp.square(v))))[None]
        zero, one = jnp.zeros_like(v[0]), jnp.ones_like(v[0])
        start = v, jnp.zeros_like(v), zero, one, live & (below > 0)
        rivals = lax.fori_loop(0, _STEPS, lanczos, start)[-1]

        def solve(carry):
            rivals, score = carry
            size = min(_BATCH, search.chunk)
            batch = jnp.nonzero(rivals, size=size, fill_value=0)[0]
            # One by one: the batched solver shares a pool of threads in which several
            # CPU devices wait for each other forever.
            top = lax.map(
                lambda mask: jnp.linalg.eigvalsh(_scatter(gram, mask))[-1],
                masks[:, batch].T,
            )
            return rivals.at[batch].set(False), score.at[batch].set(top)

        start = rivals, jnp.full(rivals.shape, jnp.inf, gram.dtype)
        return lax.while_loop(lambda carry: jnp.any(carry[0]), solve, start)[1]

    return search.first_minimum(scores, noise)


def _power_choice(power_iters, key, dim):
    """Return the randomised choice of :func:`smea`."""

    def choose(search, gram):
        n, size = gram.shape[0], search.size
        known = n if dim is None else min(n, dim)
        # With rows Y = diag(s) U sqrt(e) Q', Q'Q = 1, a Gaussian g in R^dim enters
        # through Y g = diag(s) U sqrt(e) z, z = Q'g normal, and its length, |g|^2 =
        # |z|^2 + chi^2 with the other degrees of freedom. Scaling by the norms s
        # keeps the digits of near rows beside far ones.
        s = jnp.sqrt(jnp.diagonal(gram))[:, None]
        unit = _inverse(s)
        e, u = jnp.linalg.eigh(unit * gram * unit.T)
        root = (s * u * jnp.sqrt(jnp.maximum(e, 0))[None])[:, n - known :]

        def scores(masks, live, below, i):
            del live, below
            key_z, key_rest = jax.random.split(jax.random.fold_in(key, i))
            shape = known, search.chunk
            z = jax.random.normal(key_z, shape, gram.dtype)
            length = _column_sums(jnp.square(z))
            if dim is None:
                length = jnp.ones_like(length)
            elif dim > known:
                length += jax.random.chisquare(
                    key_rest, dim - known, shape[1:], gram.dtype
                )

            def iterate(_, carry):
                w, norm = carry
                w = w * _inverse(norm)[None]
                moved = _centred(_dot(gram, w), masks, size)
                return moved, jnp.sqrt(jnp.maximum(_column_sums(w * moved), 0))

            w = _centred(_dot(root, z), masks, size)
            start = w, jnp.sqrt(length)
            return lax.fori_loop(0, power_iters, iterate, start)[1]

        return search.first_minimum(scores)

    return choose


def _window(geometry, num_byzantine, *, widest=False):
    """Choose among rows of one number each: a window of the sorted values.

    The score is their variance, or with ``widest`` their range.
    """
    n = geometry.usable.shape[0]
    f = _validate.budget(num_byzantine)
    _validate.majority(f, n)
    rows, usable = lax.stop_gradient(geometry.rows), geometry.usable
    count = jnp.asarray(geometry.count, jnp.int32)
    k = count - f
    # The Gram matrix has rank one, and the sign does not matter.
    far = jnp.argmax(jnp.diagonal(rows))
    scale = jnp.sqrt(rows[far, far])
    x = jnp.where(usable, rows[far] * _inverse(scale), jnp.inf)
    ordered = jnp.sort(x)
    place = jnp.arange(n, dtype=jnp.int32)

    def last(values):
        """Shift values of positions to the windows that end there."""
        return jnp.take(values, place + k - 1, mode="clip")

    if widest:
        score = jnp.square(last(ordered) - ordered)
    else:
        # Sums from the middle, which is in every window: far rows spoil no other.
        middle = (count - 1) // 2
        y = ordered - jnp.take(ordered, middle, mode="clip")

        def sums(y):
            left = lax.cumsum(jnp.where(place < middle, y, 0), reverse=True)
            return left + last(lax.cumsum(jnp.where(place < middle, 0, y)))

        score = (sums(jnp.square(y)) - jnp.square(sums(y)) / k) / k
    score = jnp.where((place <= f) & ~jnp.isnan(score), jnp.maximum(score, 0), jnp.inf)
    least = jnp.min(score)
    tied = score <= least * (1 + _tolerance(rows.dtype))

    def first(rows, number):
        return rows & (jnp.cumsum(rows) <= number)

    def subset(start):
        """Return the first subset, in lexicographic order, with a window's values."""
        low, high = ordered[start], ordered[start + k - 1]
        if widest:
            return first(usable & (x >= low) & (x <= high), k)
        inside = (start <= place) & (place < start + k)
        held = [jnp.sum(inside & (ordered == end)) for end in (low, high)]
        ends = first(x == low, held[0]) | first(x == high, held[1])
        return ((x > low) & (x < high)) | ends

    def earlier(carry):
        tied, best = carry
        start = jnp.argmax(tied)
        other = subset(start)
        where = jnp.argmax(best ^ other)
        return tied.at[start].set(False), jnp.where(other[where], other, best)

    start = tied & jnp.isfinite(least), jnp.zeros(n, bool)
    chosen = lax.while_loop(lambda carry: jnp.any(carry[0]), earlier, start)[1]
    valid = (0 <= f) & (f < count - f) & jnp.isfinite(least)
    return jnp.where(valid, chosen / k.astype(rows.dtype), jnp.nan)
