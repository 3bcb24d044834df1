# SPDX-License-Identifier: Apache-2.0
r"""Lower bounds on epsilon by experiment: play the distinguishing game many times.

A method that is :math:`(\varepsilon,\delta)`-private satisfies
:math:`P(O) \le e^\varepsilon P'(O) + \delta` for every set O of what its adversary may
see, with two neighbouring data sets. An audit picks the data sets and O so that this is
tight, counts how often O happens, and reports an :math:`\varepsilon` that exceeds the
true one with probability at most 1 - ``confidence``. A bound above the claim shows, at
that confidence, that the code leaks more than it says; one below it shows nothing.

- :func:`transcripts` runs the simulation for many keys in one vmapped program and
  records what the adversary sees.
- :func:`distinguish` plays two worlds, e.g. of :func:`client_canary` or
  :func:`example_canary`, and learns by itself how to tell them apart.
- :func:`one_run` plays many canaries at once, in as little as a single run.

The program of :func:`transcripts` is plain JAX and the rest runs on the host in
float64. Needs SciPy.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from jaxfed import _keys, _tree, _validate
from jaxfed._base import Attack, Shard
from jaxfed.rounds import simulate

__all__ = [
    "VIEWS",
    "Audit",
    "client_canary",
    "client_canaries",
    "distinguish",
    "example_canaries",
    "example_canary",
    "linear_loss",
    "lower_bound",
    "one_run",
    "one_run_bound",
    "published_only",
    "transcripts",
]

VIEWS = ("local", "central")

# Smallest variance the discriminant believes in, beside a variance of 1: noise a
# thousand times smaller than what varies counts as none, float32's rounding as noise.
_RIDGE = 1e-6
# What float64 can square, for transcripts that are not finite.
_LARGEST = 1e30
# Keeps the game's own keys apart from those of the noise.
_GAME = 0x67616D65


class Audit(NamedTuple):
    """The outcome of an audit.

    Attributes:
      epsilon_lower: the method is not (epsilon, delta)-private for any smaller
        epsilon; wrong with probability at most 1 - ``confidence``.
      epsilon_claimed: what the method says it spends.
      delta: of both.
      confidence: of ``epsilon_lower``.
      trials: runs in each world, or canaries of :func:`one_run`.
    """

    epsilon_lower: float
    epsilon_claimed: float
    delta: float
    confidence: float
    trials: int

    @property
    def flagged(self) -> bool:
        """Whether the claim is refuted."""
        return self.epsilon_lower > self.epsilon_claimed

    def text(self) -> str:
        """Return the outcome as one line."""
        verdict = "REFUTED" if self.flagged else "not refuted"
        return (
            f"epsilon >= {self.epsilon_lower:.3g} at delta {self.delta:.3g} "
            f"({100 * self.confidence:.6g} % confidence, {self.trials} trials); "
            f"claimed {self.epsilon_claimed:.4g}: {verdict}"
        )


# --- The program ---------------------------------------------------------------------


def transcripts(
    make,
    world,
    secrets,
    *,
    params,
    rounds,
    key,
    view="local",
    num_byzantine=0,
    attack=None,
    cohort_size=None,
    root=None,
    statistic=None,
    chunk=None,
):
    """Run a method once for each row of ``secrets`` and record what is seen.

    Trial k has keys of its own for the noise, the batches, the cohorts and the attack.

    Args:
      make: ``(key) -> FedAlgorithm``; the key, one for each trial, is traced.
      world: ``(round, secret) -> Shard`` stacked over clients; round and secret are
        traced.
      secrets: bool ``[trials, m]``, what the transcript is to give away.
      params: the first model.
      rounds: number of rounds, >= 1.
      key: typed key or int seed of the audit.
      view: ``"local"``: what honest clients send, in rows by client id, 0 where a
        client was not asked; ``"central"``: what the server broadcasts after each
        round, and its model. Of the broadcast, integers (the round) are left out.
      num_byzantine: actual attackers, the last ids.
      attack: Attack of those. In the central view it must not see honest clients'
        messages (``sees_messages``), see :func:`published_only`. Poison the world
        yourself.
      cohort_size: clients drawn each round; None: all.
      root: the server's own Shard for methods that have a use for it.
      statistic: ``(transcript) -> [features]`` computed on the device; ``transcript``
        has leaves ``[rounds, ...]`` (local: ``[rounds, honest clients, ...]``). None:
        all of them.
      chunk: trials in memory at a time, a divisor of their number; None: all.

    Returns:
      ``[trials, features]`` array.

    Raises:
      ValueError: for an unknown view, counts out of range, an attack that sees more
        than the view's adversary, or a chunk that does not divide the trials.

    Cost:
      ``trials * rounds`` rounds of the method, one compilation; memory for
      ``chunk`` simulations and all transcripts.
    """
    _validate.choice("view", view, VIEWS)
    rounds = _validate.count("rounds", rounds)
    trials = secrets.shape[0]
    chunk = trials if chunk is None else _validate.count("chunk", chunk)
    if trials % chunk:
        raise ValueError(f"chunk={chunk} must divide the number of trials, {trials}.")
    if view == "central" and attack is not None and attack.sees_messages:
        raise ValueError(
            "attack uses honest clients' messages, which the adversary of central "
            "privacy does not see: use published_only(...), or say that it does not by "
            "attack._replace(sees_messages=False)."
        )
    shape = jax.eval_shape(world, jnp.int32(0), secrets[0])
    num_clients = shape.count.shape[0]
    honest = num_clients - _validate.count("num_byzantine", num_byzantine, minimum=0)
    key = _keys.as_key(key)
    ravel = (lambda tree: ravel_pytree(tree)[0]) if statistic is None else statistic

    def run(args):
        trial, secret = args
        algorithm = make(_keys.fold(key, trial))
        server = algorithm.server
        simulation = simulate(
            algorithm,
            num_clients,
            num_byzantine=num_byzantine,
            attack=_recorder(attack),
            cohort_size=cohort_size,
        )

        def step(state, round):
            state, _ = simulation.step(state, world(round, secret), root)
            # The uploads leave the state here, so that it keeps its shape.
            attack_state, uploads, cohort = state.attack
            state = state._replace(attack=attack_state)
            if view == "central":
                message = server.broadcast(state.server)
                seen = (message, server.model(state.server))
                return state, [x for x in jax.tree.leaves(seen) if _inexact(x)]
            if cohort is not None:
                uploads = jax.tree.map(
                    lambda x: (
                        jnp.zeros((num_clients, *x.shape[1:]), x.dtype)
                        .at[cohort]
                        .set(x)
                    ),
                    uploads,
                )
            return state, jax.tree.map(lambda x: x[:honest], uploads)

        state = simulation.init(params, _keys.fold(key, _GAME, trial))
        _, seen = jax.lax.scan(step, state, jnp.arange(rounds))
        return ravel(seen)

    return jax.lax.map(run, (jnp.arange(trials), secrets), batch_size=chunk)


def _no_poison(shards, byzantine):
    del byzantine
    return shards


def _inexact(x):
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _recorder(attack):
    """Pass on what is sent to the attack and leave a copy in the attack's state."""
    poison = _no_poison if attack is None else attack.poison
    inner = optax.with_extra_args_support(
        optax.identity() if attack is None else attack.wire
    )

    def update(uploads, state, params=None, *, cohort=None, **extra):
        out, state = inner.update(uploads, state, params, cohort=cohort, **extra)
        return out, (state, uploads, cohort)

    wire = optax.GradientTransformationExtraArgs(inner.init, update)
    return Attack(poison, wire)


def published_only(forge) -> Attack:
    """An attack that sees what the server publishes and nothing else.

    Against central privacy the Byzantine clients are part of the adversary and may not
    see honest messages; the usual attacks of the library do.

    Args:
      forge: ``(params, client_id) -> upload``, what one Byzantine client sends;
        ``params`` is the broadcast model.

    Returns:
      Attack.
    """

    def update(uploads, state, params=None, *, byzantine, cohort=None, **extra):
        del extra
        ids = jnp.arange(byzantine.shape[0]) if cohort is None else cohort
        forged = jax.vmap(forge, (None, 0))(params, ids)
        return _tree.where_rows(~byzantine, uploads, forged), state

    wire = optax.GradientTransformationExtraArgs(optax.identity().init, update)
    return Attack(_no_poison, wire, sees_messages=False)


# --- Canaries ------------------------------------------------------------------------


def linear_loss(params, batch):
    r"""Return the losses :math:`\langle x, z_j \rangle`, whose gradients are z.

    Args:
      params: ``[d]``.
      batch: ``[b, d]``.

    Returns:
      ``[b]``.
    """
    return batch @ params


def _signs(round, rounds):
    return jnp.where(2 * round < rounds, 1.0, -1.0)


def _game(data, rounds, flip):
    """Return the worlds ``(round) -> Shard``; ``data(sign)`` is ``[n, m, d]``."""

    def world(side):
        def at(round):
            z = data(side * (_signs(round, rounds) if flip else 1.0))
            return Shard(z, jnp.full(z.shape[0], z.shape[1], jnp.int32))

        return at

    return world(1.0), world(-1.0)


def client_canary(num_clients, dim, rounds, *, num_byzantine=0, length=1e3, flip=True):
    """Two worlds, for :func:`linear_loss`, that differ in all data of client 0.

    Client 0 pulls along the first axis, one way in the first half of the rounds and the
    other way in the second, all the other way round in the neighbour. Of the other
    honest clients one half pulls up and one down that axis, so that client 0 decides
    for medians and selections: with an odd number of honest clients these are moved
    by as much as they can be.

    Args:
      num_clients: n.
      dim: d >= 1.
      rounds: number of rounds.
      num_byzantine: clients at the end who have no say.
      length: of every gradient; longer than the clip radius.
      flip: False: the same way in all rounds, which a momentum before the noise passes
        on better, but which hides keys that are used twice.

    Returns:
      ``(world, neighbour)``, each ``(round) -> Shard``.
    """
    honest = num_clients - num_byzantine
    others = np.where(np.arange(num_clients) % 2, 1.0, -1.0)
    others[honest:] = 0

    def data(sign):
        pull = jnp.asarray(others, jnp.float32).at[0].set(sign)
        return jnp.zeros((num_clients, 1, dim)).at[:, 0, 0].set(length * pull)

    return _game(data, rounds, flip)


def example_canary(num_clients, num_examples, dim, rounds, *, length=1e3, flip=True):
    """Two worlds, for :func:`linear_loss`, that differ in one example of client 0.

    All other examples have gradient 0; the one changes as the client does in
    :func:`client_canary`.

    Args:
      num_clients: n.
      num_examples: m of each client.
      dim: d >= 1.
      rounds: number of rounds.
      length: of the gradient; longer than the clip radius.
      flip: as for :func:`client_canary`.

    Returns:
      ``(world, neighbour)``, each ``(round) -> Shard``.
    """

    def data(sign):
        zeros = jnp.zeros((num_clients, num_examples, dim))
        return zeros.at[0, 0, 0].set(length * sign)

    return _game(data, rounds, flip)


def client_canaries(num_canaries, *, length=1e3):
    """A world of :func:`one_run` in which every client is a canary.

    Client i pulls up axis i if its secret is True and down if not.

    Args:
      num_canaries: m, the number of clients and of parameters.
      length: of every gradient; longer than the clip radius.

    Returns:
      ``(round, secret) -> Shard``.
    """

    def world(round, secret):
        del round
        z = length * jnp.diag(jnp.where(secret, 1.0, -1.0))[:, None]
        return Shard(z, jnp.ones(num_canaries, jnp.int32))

    return world


def example_canaries(num_clients, num_canaries, *, length=1e3):
    """A world of :func:`one_run` in which every example of client 0 is a canary.

    Example j pulls up axis j if its secret is True and down if not; the examples of
    other clients have gradient 0.

    Args:
      num_clients: n.
      num_canaries: m, the number of examples of a client and of parameters.
      length: of every canary's gradient; longer than the clip radius.

    Returns:
      ``(round, secret) -> Shard``.
    """

    def world(round, secret):
        del round
        z = length * jnp.diag(jnp.where(secret, 1.0, -1.0))
        zeros = jnp.zeros((num_clients, num_canaries, num_canaries))
        return Shard(zeros.at[0].set(z), jnp.full(num_clients, num_canaries, jnp.int32))

    return world


# --- The game with two worlds --------------------------------------------------------


def distinguish(
    make,
    world,
    neighbour,
    *,
    params,
    rounds,
    delta,
    epsilon,
    trials,
    key,
    confidence=0.999,
    **options,
) -> Audit:
    """Play the distinguishing game and bound epsilon from below.

    The statistic is Fisher's linear discriminant of the whole transcript, learned on
    the first half of the trials. It finds directions without noise by itself: no noise
    at all, noise that cancels between two rounds or two clients because a key was used
    twice, a state that grows. The other half of the trials is judged by
    :func:`lower_bound`.

    Args:
      make: as for :func:`transcripts`.
      world: stacked Shard, or ``(round) -> Shard``.
      neighbour: the same with one unit replaced.
      params: the first model.
      rounds: number of rounds, >= 1.
      delta: of the claim, ``0 <= delta < 1``.
      epsilon: the claim, >= 0.
      trials: runs in each world, >= 100 and even. The bound cannot exceed about
        ``log(trials / 2) - 2``.
      key: typed key or int seed of the audit.
      confidence: that the bound holds, in (0, 1). Someone who audits many methods asks
        for more: 0.999 each is 0.99 together for ten.
      **options: the other arguments of :func:`transcripts`.

    Returns:
      Audit.

    Raises:
      TypeError, ValueError: for arguments out of range.
      ImportError: SciPy is not installed.

    Cost:
      As :func:`transcripts` with ``2 * trials``; then p^2 trials + p^3 on the host for
      transcripts of p numbers.

    Example:
      >>> import jax.numpy as jnp, jaxfed
      >>> from jaxfed.privacy import audit
      >>> def make(key):
      ...     return jaxfed.algorithms.dp_fedavg(
      ...         num_clients=3, key=key, clip_norm=1.0, noise_std=0.05,
      ...         local_work=jaxfed.gradient(audit.linear_loss))
      >>> worlds = audit.client_canary(num_clients=3, dim=2, rounds=2)
      >>> result = audit.distinguish(
      ...     make, *worlds, params=jnp.zeros(2), rounds=2, view="central",
      ...     delta=0.01, epsilon=1.0, trials=1000, key=0)
      >>> result.flagged
      True

    References:
      Jagielski et al., `Auditing Differentially Private Machine Learning
      <https://arxiv.org/abs/2006.07709>`_, 2020; Nasr et al., `Adversary Instantiation
      <https://arxiv.org/abs/2101.04535>`_, 2021.
    """
    _check(delta, epsilon, confidence)
    seen = transcripts(
        make,
        two_worlds(world, neighbour),
        sides(trials),
        params=params,
        rounds=rounds,
        key=key,
        **options,
    )
    return judge(seen, delta=delta, epsilon=epsilon, confidence=confidence)


def two_worlds(world, neighbour):
    """Return ``(round, secret) -> Shard``, the neighbour where the secret is True."""

    def at(round, secret):
        pair = (w(round) if callable(w) else w for w in (world, neighbour))
        return jax.tree.map(lambda a, b: jnp.where(secret[0], b, a), *pair)

    return at


def sides(trials):
    """Return the secrets of ``trials`` runs in each of two worlds, in turn."""
    trials = _validate.count("trials", trials, minimum=100)
    if trials % 2:
        raise ValueError(f"trials must be even, got trials={trials}.")
    return jnp.arange(2 * trials)[:, None] % 2 == 1


def judge(seen, *, delta, epsilon, confidence=0.999) -> Audit:
    """Judge transcripts whose secrets were :func:`sides`."""
    _check(delta, epsilon, confidence)
    seen = np.asarray(seen, np.float64)
    seen = np.nan_to_num(seen, nan=0.0, posinf=_LARGEST, neginf=-_LARGEST)
    out, into = seen[::2], seen[1::2]
    direction = _discriminant(out[: len(out) // 2], into[: len(into) // 2])
    bound = lower_bound(into @ direction, out @ direction, delta, confidence=confidence)
    return Audit(bound, float(epsilon), float(delta), confidence, len(out))


def _discriminant(out, into):
    """Return Fisher's direction ``[p]``, which separates two samples ``[k, p]``."""
    scale = np.std(np.concatenate([out, into]), axis=0)
    scale = np.where(scale > 0, scale, 1)
    apart = (into.mean(0) - out.mean(0)) / scale
    within = [(x - x.mean(0)) / scale for x in (out, into)]
    pooled = sum(x.T @ x for x in within) / (len(out) + len(into))
    ridge = _RIDGE * np.eye(len(apart))
    return np.linalg.solve(pooled + ridge, apart) / scale


def lower_bound(scores_in, scores_out, delta, *, confidence=0.999) -> float:
    r"""Bound epsilon from below by scores of independent runs in two worlds.

    Guess "in" for scores above a threshold, or below: whichever threshold does best on
    the first half of both samples. The second half gives Clopper-Pearson bounds of the
    rates, which hold together at ``confidence``, and

    .. math::

        \varepsilon \ge \max\Big(\log\frac{TPR_- - \delta}{FPR_+},\
        \log\frac{TNR_- - \delta}{FNR_+}\Big).

    Args:
      scores_in: ``[trials]``, in the order of the runs.
      scores_out: ``[trials]``.
      delta: ``0 <= delta < 1``.
      confidence: in (0, 1).

    Returns:
      Lower bound, at least 0.

    Raises:
      ValueError: for arguments out of range, fewer than two scores, or NaN.
      ImportError: SciPy is not installed.
    """
    _check(delta, 0.0, confidence)
    scores = [np.asarray(s, np.float64) for s in (scores_in, scores_out)]
    for name, s in zip(("scores_in", "scores_out"), scores, strict=True):
        if s.ndim != 1 or len(s) < 2 or np.isnan(s).any():
            raise ValueError(
                f"{name} must be at least two numbers, none NaN, got shape {s.shape}."
            )
    risk = 1 - confidence
    halves = [np.split(s, [len(s) // 2]) for s in scores]
    (choose_in, test_in), (choose_out, test_out) = halves

    def bounds(into, out, thresholds, above, risk):
        """Return the bound for each threshold."""
        counts = []
        for s in (into, out):
            below = np.searchsorted(np.sort(s), thresholds, side="right")
            counts.append(len(s) - below if above else below)
        return _epsilon(counts[0], len(into), counts[1], len(out), delta, risk)

    pool = np.sort(np.concatenate([choose_in, choose_out]))
    # Few thresholds, dense at both ends, each at more confidence than is asked for:
    # else luck would choose one at the ends.
    ranks = np.geomspace(1, (len(pool) + 1) / 2, 20).astype(int)
    candidates = pool[np.concatenate([ranks - 1, len(pool) - ranks])]
    values = [
        bounds(choose_in, choose_out, candidates, above, risk**2)
        for above in (False, True)
    ]
    above, at = np.unravel_index(np.argmax(values), np.shape(values))
    best = candidates[at : at + 1]
    return float(bounds(test_in, test_out, best, bool(above), risk)[0])


def _epsilon(hits, num_in, false, num_out, delta, risk):
    """Return the bound for counts of "in" guesses, right ones and wrong ones."""
    beta = _stats().beta
    alpha = risk / 2
    with np.errstate(invalid="ignore"):  # counts of 0 or all: filled in below
        low = np.where(hits > 0, beta.ppf(alpha, hits, num_in - hits + 1), 0)
        high = beta.isf(alpha, false + 1, num_out - false)
    high = np.where(false < num_out, high, 1)

    def log_ratio(right, wrong):
        return np.log(np.maximum(right - delta, 1e-300)) - np.log(wrong)

    # With FPR and TPR their complements are bounded too.
    return np.maximum(
        np.maximum(log_ratio(low, high), log_ratio(1 - high, 1 - low)), 0.0
    )


# --- Many canaries in one run --------------------------------------------------------


def one_run(
    make,
    world,
    *,
    score,
    canaries,
    params,
    rounds,
    delta,
    epsilon,
    key,
    guesses=None,
    repeats=1,
    confidence=0.999,
    **options,
) -> Audit:
    """Bound epsilon from below by many canaries in a single run.

    A fair coin says what each of m canaries holds; the auditor scores them all from one
    transcript, guesses those with the largest ``|score|`` by its sign, abstains from
    the others, and :func:`one_run_bound` judges the number of right guesses. Several
    runs with canaries of their own count as one run with all of them.

    Args:
      make: as for :func:`transcripts`.
      world: ``(round, secret) -> Shard``, e.g. of :func:`client_canaries`; changing one
        entry of ``secret`` (bool ``[m]``) must replace one unit.
      score: ``(transcript) -> [m]``, positive where the secret looks True; sees what
        ``statistic`` of :func:`transcripts` does.
      canaries: m.
      params: the first model.
      rounds: number of rounds, >= 1.
      delta: of the claim, ``0 <= delta < 1``; below ``1 / m``, or the bound is weak.
      epsilon: the claim, >= 0.
      key: typed key or int seed of the audit.
      guesses: canaries of all runs that are guessed; None: a fifth. Fix it before
        looking at scores.
      repeats: runs.
      confidence: that the bound holds, in (0, 1).
      **options: the other arguments of :func:`transcripts`.

    Returns:
      Audit whose ``trials`` are all canaries.

    Raises:
      TypeError, ValueError: for arguments out of range.
      ImportError: SciPy is not installed.

    Cost:
      As :func:`transcripts` with ``repeats`` trials.

    References:
      As :func:`one_run_bound`.
    """
    _check(delta, epsilon, confidence)
    secrets = coins(key, repeats, canaries)
    scores = transcripts(
        make,
        world,
        secrets,
        params=params,
        rounds=rounds,
        key=key,
        statistic=score,
        **options,
    )
    return judge_one_run(
        scores,
        secrets,
        delta=delta,
        epsilon=epsilon,
        guesses=guesses,
        confidence=confidence,
    )


def coins(key, repeats, canaries):
    """Return the secrets ``[repeats, canaries]`` of :func:`one_run`."""
    shape = (
        _validate.count("repeats", repeats),
        _validate.count("canaries", canaries),
    )
    return jax.random.bernoulli(_keys.fold(_keys.as_key(key), _GAME), shape=shape)


def judge_one_run(
    scores, secrets, *, delta, epsilon, guesses=None, confidence=0.999
) -> Audit:
    """Judge ``[repeats, m]`` scores of canaries whose secrets were :func:`coins`."""
    _check(delta, epsilon, confidence)
    scores = np.nan_to_num(np.asarray(scores, np.float64).ravel())
    secrets = np.asarray(secrets).ravel()
    m = len(secrets)
    guesses = max(m // 5, 1) if guesses is None else guesses
    chosen = np.argsort(-np.abs(scores), kind="stable")[:guesses]
    correct = int(np.sum((scores[chosen] > 0) == secrets[chosen]))
    bound = one_run_bound(m, guesses, correct, delta, confidence=confidence)
    return Audit(bound, float(epsilon), float(delta), confidence, m)


def one_run_bound(canaries, guesses, correct, delta, *, confidence=0.999) -> float:
    r"""Bound epsilon from below by the number of right guesses.

    If the transcript is :math:`(\varepsilon,\delta)`-private in each of m independent
    fair bits, of which r are guessed from it, then for every v

    .. math::

        P(\text{right} \ge v) \le P(W \ge v) + 2 m \delta \max_{1 \le i \le v}
        \frac{P(v > W \ge v - i)}{i}, \qquad W \sim
        \mathrm{Bin}\Big(r, \frac{1}{1 + e^{-\varepsilon}}\Big),

    the main theorem of the paper (for approximate privacy; which relation the bits
    stand for does not matter). The bound is the largest epsilon for which this is at
    most 1 - ``confidence``.

    Args:
      canaries: m >= 1.
      guesses: r, ``1 <= r <= m``.
      correct: right ones among them.
      delta: ``0 <= delta < 1``.
      confidence: in (0, 1).

    Returns:
      Lower bound, at least 0.

    Raises:
      TypeError, ValueError: for arguments out of range.
      ImportError: SciPy is not installed.

    Example:
      >>> round(one_run_bound(1000, 200, 190, 1e-5), 2)
      1.91

    References:
      Steinke, Nasr and Jagielski, `Privacy Auditing with One (1) Training Run
      <https://arxiv.org/abs/2305.08846>`_, 2023.
    """
    _check(delta, 0.0, confidence)
    m = _validate.count("canaries", canaries)
    r = _validate.count("guesses", guesses, maximum=m)
    v = _validate.count("correct", correct, minimum=0, maximum=r)
    binom = _stats().binom
    steps = np.arange(1, v + 1)

    def refuted(epsilon):
        q = 1 / (1 + math.exp(-epsilon))
        tail = binom.sf(v - 1, r, q)
        near = binom.cdf(v - 1, r, q) - binom.cdf(v - steps - 1, r, q)
        slack = np.max(near / steps, initial=0.0)
        return tail + 2 * m * delta * slack <= 1 - confidence

    low, high = 0.0, 50.0
    if not refuted(low):
        return 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _check(delta, epsilon, confidence):
    """Raise unless the numbers of an audit are in range."""
    _validate.unit_interval("delta", delta)
    _validate.nonnegative("epsilon", epsilon, finite=False)
    _validate.unit_interval("confidence", confidence)
    _validate.positive("confidence", confidence)


def _stats():
    try:
        import scipy.stats
    except ImportError as error:
        raise ImportError(
            'An audit needs SciPy; install it with pip install "jaxfed[train]".'
        ) from error
    return scipy.stats
