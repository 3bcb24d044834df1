# SPDX-License-Identifier: Apache-2.0
"""Audits: correct methods keep their claims, mutants do not; rows of ByzULDP."""

import inspect
import math

import audit_cases
import jax.numpy as jnp
import mutants
import numpy as np
import pytest
import scipy.stats
import toys

import jaxfed
from jaxfed import aggregators, naming
from jaxfed.algorithms._byzuldp import byzuldp
from jaxfed.algorithms._dp_fedavg import dp_fedavg
from jaxfed.privacy import (
    audit,
    certified_epsilon,
    certified_noise_std,
    composition,
)

# --- The table -----------------------------------------------------------------------


def test_every_private_method_is_audited():
    private = {
        name
        for name, factory in naming.ALGORITHMS.items()
        if "noise_std" in inspect.signature(factory).parameters
    }
    audited = {case.split(",")[0] for case in audit_cases.CORRECT}
    # Clip21 is byz_clip21_sgd2m with other defaults.
    assert private == audited | {"clip21_sgd", "clip21_sgd2m"}


@pytest.mark.parametrize("name", sorted(audit_cases.CORRECT))
def test_a_correct_method_is_not_flagged(name):
    case = audit_cases.CORRECT[name]
    seed = sorted(audit_cases.CORRECT).index(name)
    found = audit_cases.run(case, seed=seed)
    assert not found.flagged, found.text()
    np.testing.assert_allclose(found.epsilon_claimed, audit_cases.EPSILON, rtol=1e-6)
    # Nor is the audit blind: the claims are tight but for draws.
    drawn = case.cohort is not None or case.drawn != composition.ALL
    least = 0.2 if drawn else 0.45
    assert found.epsilon_lower > least * found.epsilon_claimed, found.text()


@pytest.mark.parametrize("name", sorted(mutants.MUTANTS))
def test_a_mutant_is_flagged(name):
    found = mutants.run(mutants.MUTANTS[name])
    assert found.flagged, found.text()


def test_the_mutants_without_their_faults_are_not_flagged():
    def build(key, noise_std, clip_norm):
        return mutants.residual_added_after_the_clip(key, noise_std, clip_norm, 0.0)

    case = audit_cases.CORRECT["byz_clip_sgd"]
    assert not audit_cases.run(case, build=build).flagged


@pytest.mark.parametrize("name", sorted(audit_cases.ONE_RUN))
def test_one_run(name):
    case = audit_cases.ONE_RUN[name]
    fair = audit_cases.one_run(case)
    assert not fair.flagged
    assert fair.epsilon_lower > 0.1
    assert audit_cases.one_run(case, noise=0.0).flagged


# --- ByzULDP -------------------------------------------------------------------------


def test_byzuldp_row_21_byzantine_clients_see_published_values_only():
    attack = audit.published_only(audit_cases.byzantine_upload)
    assert not attack.sees_messages
    byzantine = jnp.array([False, False, False, True, True])
    theta = jnp.array([0.3, -0.2])
    state = attack.wire.init(theta)
    honest = np.random.default_rng(0).normal(size=(2, 5, 2)).astype(np.float32)

    @toys.quick_jit
    def send(x, theta, byzantine, cohort):
        extra = dict(byzantine=byzantine, cohort=cohort)
        return attack.wire.update(x, state, theta, **extra)[0]

    everybody = jnp.arange(5)
    sent = [send(x, theta, byzantine, everybody) for x in honest]
    np.testing.assert_array_equal(sent[0][3:], sent[1][3:])
    for x, y in zip(honest, sent, strict=True):
        np.testing.assert_array_equal(y[:3], x[:3])
    want = [audit_cases.byzantine_upload(theta, i) for i in (3, 4)]
    np.testing.assert_array_equal(sent[0][3:], want)
    other = send(honest[0], -theta, byzantine, everybody)
    assert not np.array_equal(other[3:], sent[0][3:])
    # In a cohort a Byzantine client is known by its id.
    turned = send(honest[0], theta, byzantine[::-1], everybody[::-1])
    np.testing.assert_array_equal(turned[:2], sent[0][:2:-1])


def test_byzuldp_row_21_neighbours_differ_in_all_data_of_one_honest_client():
    world, neighbour = audit.client_canary(7, 3, rounds=4, num_byzantine=2)
    for t in range(4):
        a, b = world(t), neighbour(t)
        np.testing.assert_array_equal(a.count, b.count)
        differs = np.any(np.asarray(a.data) != np.asarray(b.data), axis=2)
        assert differs[0].all()
        assert not differs[1:].any()
        assert not np.any(a.data[5:])
        # The others leave the decision to client 0.
        assert np.sum(a.data[1:]) == 0
    assert np.sign(world(0).data[0, 0, 0]) == -np.sign(world(2).data[0, 0, 0])


def test_byzuldp_row_21_an_attack_that_sees_more_is_refused():
    with pytest.raises(ValueError, match="published_only"):
        _distinguish(attack=jaxfed.make_attack("ipm"), num_byzantine=1)


def test_byzuldp_row_22_small_membership_audit():
    n, rounds, delta, trials = 5, 10, 1e-2, 10_000
    rule = aggregators.trimmed_mean(1)
    bound = rule.sensitivity.bound(n, 1.0)
    sigma = certified_noise_std(1.0, bound, delta, rounds)

    def make(key, noise_std):
        return byzuldp(
            0.5,
            rule=rule,
            num_clients=n,
            key=key,
            noise_std=noise_std,
            momentum=0.0,
            server_momentum=0.0,
            local_work=jaxfed.gradient(audit.linear_loss),
        )

    claim = certified_epsilon(
        sigma, make(0, sigma).mechanism.sensitivity(1), delta, rounds
    )
    worlds = audit.two_worlds(*audit.client_canary(n, 1, rounds))

    @toys.quick_jit
    def program(noise_std):
        return audit.transcripts(
            lambda key: make(key, noise_std),
            worlds,
            audit.sides(trials),
            params=jnp.zeros(1),
            rounds=rounds,
            key=5,
            view="central",
        )

    fair, silent = (
        audit.judge(program(s), delta=delta, epsilon=claim, confidence=0.999)
        for s in (sigma, 0.0)
    )
    assert 0.3 * claim < fair.epsilon_lower <= claim
    assert silent.flagged
    assert silent.epsilon_lower > 5


# --- The bound of the game -----------------------------------------------------------


def clopper_pearson(k, n, alpha):
    """One-sided bounds by bisection on the binomial law itself."""

    def solve(excess):
        low, high = 0.0, 1.0
        for _ in range(60):
            p = (low + high) / 2
            low, high = (p, high) if excess(p) else (low, p)
        return low

    lower = solve(lambda p: scipy.stats.binom.sf(k - 1, n, p) < alpha) if k else 0.0
    upper = solve(lambda p: scipy.stats.binom.cdf(k, n, p) > alpha) if k < n else 1.0
    return lower, upper


def test_lower_bound_by_hand():
    rng = np.random.default_rng(0)
    delta, confidence, n, m = 0.01, 0.95, 60, 50
    into, out = rng.normal(2.0, size=2 * n), rng.normal(size=2 * m)
    got = audit.lower_bound(into, out, delta, confidence=confidence)
    # The value belongs to some threshold, on the second half.
    possible = []
    for t in np.concatenate([into[:n], out[:m]]):
        right, _ = clopper_pearson(int(np.sum(into[n:] > t)), n, 0.025)
        _, wrong = clopper_pearson(int(np.sum(out[m:] > t)), m, 0.025)
        ratios = [(right - delta) / wrong, (1 - wrong - delta) / (1 - right)]
        possible.append(math.log(max(*ratios, 1.0)))
    assert min(abs(got - p) for p in possible) < 1e-9
    assert 0.6 * max(possible) < got < max(possible) + 1e-9
    # Nothing depends on the scale, on which side scores higher, on who is called "in".
    scaled = audit.lower_bound(2 * into + 1, 2 * out + 1, delta, confidence=confidence)
    assert scaled == got
    for a, b in [(-into, -out), (out, into)]:
        assert audit.lower_bound(a, b, delta, confidence=confidence) > 0.7 * got


def test_lower_bound_of_perfect_and_of_no_separation():
    n = 1000
    got = audit.lower_bound(np.ones(n), np.zeros(n), 0.0, confidence=0.9)
    edge = 0.05 ** (1 / 500)  # all of 500 right, or none wrong
    np.testing.assert_allclose(got, math.log(edge / (1 - edge)), rtol=1e-9)
    assert audit.lower_bound(np.ones(n), np.ones(n), 0.0) == 0
    # Infinite scores are scores.
    low = np.full(n, -np.inf)
    assert audit.lower_bound(np.ones(n), low, 0.0, confidence=0.9) == got


def test_lower_bound_holds_as_often_as_it_says():
    epsilon, delta, mu = 2.0, 1e-2, 0.9
    exact = scipy.stats.norm
    spent = exact.cdf(mu / 2 - epsilon / mu)
    spent -= math.exp(epsilon) * exact.cdf(-mu / 2 - epsilon / mu)
    assert abs(spent - delta) < 1e-3
    rng = np.random.default_rng(1)
    bounds = [
        audit.lower_bound(
            rng.normal(mu, size=400), rng.normal(size=400), spent, confidence=0.9
        )
        for _ in range(300)
    ]
    too_high = np.mean(np.array(bounds) > epsilon)
    assert too_high <= 0.1
    assert np.median(bounds) > 0.2


def test_fisher_finds_what_cancels():
    rng = np.random.default_rng(2)
    noise = rng.normal(size=(2000, 1)) * 100
    side = np.arange(2000)[:, None] % 2
    # Two rounds under one key, with a canary that changes sign.
    seen = np.hstack([noise + side, noise - side, rng.normal(size=(2000, 3))])
    found = audit.judge(np.float32(seen), delta=0.0, epsilon=1.0)
    assert found.epsilon_lower > 4
    seen = np.hstack([noise, rng.normal(size=(2000, 4))])
    assert audit.judge(seen, delta=0.0, epsilon=1.0).epsilon_lower < 0.5


def test_transcripts_that_are_not_finite_are_evidence():
    side = np.arange(400) % 2
    for odd in (np.nan, np.inf, -np.inf):
        seen = np.stack([np.where(side, odd, 1.0), np.full(400, odd)], axis=1)
        assert audit.judge(seen, delta=0.0, epsilon=1.0).epsilon_lower > 2


# --- The bound of one run ------------------------------------------------------------


def test_one_run_bound_without_delta_is_exact():
    # All of r guesses right has probability q^r under randomised response.
    for r in (10, 200):
        q = 0.01 ** (1 / r)
        got = audit.one_run_bound(500, r, r, 0.0, confidence=0.99)
        np.testing.assert_allclose(got, math.log(q / (1 - q)), rtol=1e-9)
    assert audit.one_run_bound(500, 100, 50, 0.0) == 0
    assert audit.one_run_bound(500, 10, 0, 1e-3) == 0


def test_one_run_bound_with_delta_by_hand():
    m, r, v, delta, epsilon = 60, 20, 18, 1e-4, 1.0
    q = 1 / (1 + math.exp(-epsilon))
    law = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    slack = max(sum(law[v - i : v]) / i for i in range(1, v + 1))
    p = sum(law[v:]) + 2 * m * delta * slack
    got = audit.one_run_bound(m, r, v, delta, confidence=1 - p)
    np.testing.assert_allclose(got, epsilon, rtol=1e-9)
    # Delta costs, more right guesses pay.
    bounds = [audit.one_run_bound(m, r, 20, x) for x in (0.0, 1e-5, 3e-5)]
    assert bounds[0] > bounds[1] > bounds[2] > 0
    bounds = [audit.one_run_bound(m, r, x, 1e-5) for x in (18, 19, 20)]
    assert 0 < bounds[0] < bounds[1] < bounds[2]


def test_one_run_bound_holds_for_mechanisms_that_use_delta():
    """Randomised response that gives an answer away with probability delta."""
    rng = np.random.default_rng(3)
    m, r, epsilon, delta, repeats = 200, 50, 1.0, 2e-3, 300
    q = 1 / (1 + math.exp(-epsilon))
    known = rng.random((repeats, m)) < delta
    right = (rng.random((repeats, m)) < q) | known
    # The auditor guesses the answers given away first.
    order = np.argsort(~known, axis=1, kind="stable")[:, :r]
    correct = np.take_along_axis(right, order, 1).sum(1)
    values, times = np.unique(correct, return_counts=True)
    bounds = [audit.one_run_bound(m, r, int(v), delta, confidence=0.9) for v in values]
    assert times[np.array(bounds) > epsilon].sum() <= 0.1 * repeats
    assert max(bounds) > 0.3


def test_judge_one_run_guesses_by_score():
    secrets = np.array([[True, False, True, False]])
    scores = np.array([[3.0, -2.0, -0.1, 0.2]])
    args = dict(delta=0.0, epsilon=5.0, confidence=0.6)
    two = audit.judge_one_run(scores, secrets, guesses=2, **args)
    assert two.epsilon_lower == audit.one_run_bound(4, 2, 2, 0.0, confidence=0.6)
    four = audit.judge_one_run(scores, secrets, guesses=4, **args)
    assert four.epsilon_lower == audit.one_run_bound(4, 4, 2, 0.0, confidence=0.6)
    assert two.trials == 4
    # A fifth of 40, whatever the runs.
    many = np.tile(scores, (10, 1)), np.tile(secrets, (10, 1))
    assert audit.judge_one_run(*many, **args).epsilon_lower == audit.one_run_bound(
        40, 8, 8, 0.0, confidence=0.6
    )


# --- The program ---------------------------------------------------------------------


def _make(key, noise_std=0.1):
    return dp_fedavg(
        num_clients=3,
        key=key,
        clip_norm=1.0,
        noise_std=noise_std,
        local_work=jaxfed.gradient(audit.linear_loss),
    )


def _distinguish(**changed):
    worlds = audit.client_canary(3, 2, 2)
    options = dict(
        params=jnp.zeros(2),
        rounds=2,
        view="central",
        delta=0.01,
        epsilon=100.0,
        trials=200,
        key=0,
    )
    return audit.distinguish(_make, *worlds, **(options | changed))


def test_distinguish_takes_shards_and_functions():
    world, neighbour = audit.client_canary(3, 2, rounds=1)
    found = audit.distinguish(
        lambda key: _make(key, 0.01),
        world,
        neighbour(0),
        params=jnp.zeros(2),
        rounds=1,
        view="central",
        delta=0.01,
        epsilon=2.0,
        trials=200,
        key=0,
    )
    assert found.flagged
    assert found.trials == 200
    assert "claimed 2: REFUTED" in found.text()
    fair = found._replace(epsilon_claimed=9.0)
    assert not fair.flagged
    assert "claimed 9: not refuted" in fair.text()


def test_one_run_from_end_to_end():
    found = audit.one_run(
        lambda key: _make(key, 1e-3),
        audit.client_canaries(3),
        score=lambda seen: -seen[-1][-1],
        canaries=3,
        params=jnp.zeros(3),
        rounds=1,
        view="central",
        delta=0.0,
        epsilon=1.0,
        key=1,
        guesses=60,
        repeats=40,
    )
    assert found.trials == 120
    assert found.flagged
    np.testing.assert_allclose(
        found.epsilon_lower, audit.one_run_bound(120, 60, 60, 0.0), rtol=1e-12
    )


def _transcripts(**changed):
    options = dict(
        world=audit.two_worlds(*audit.client_canary(3, 2, 2)),
        secrets=audit.sides(100)[:8],
        params=jnp.ones(2),
        rounds=2,
        key=7,
    )
    make = changed.pop("make", _make)
    return np.asarray(
        toys.quick_jit(lambda: audit.transcripts(make, **(options | changed)))()
    )


def test_transcripts_are_what_the_adversary_sees():
    sent = _transcripts().reshape(8, 2, 3, 2)
    sign = np.where(np.arange(8) % 2, -1.0, 1.0)
    # DP-FedAvg has no noise on the wire: clipped canaries, which turn in round 1.
    np.testing.assert_allclose(sent[:, 0, 0, 0], sign, rtol=1e-6)
    np.testing.assert_allclose(sent[:, 1, 0, 0], -sign, rtol=1e-6)
    np.testing.assert_allclose(sent[:, :, 1:, 0], [[[1, -1]] * 2] * 8, rtol=1e-6)
    assert not sent[..., 1].any()
    # The central adversary sees models, twice: in the broadcast and as the result.
    models = _transcripts(view="central").reshape(8, 2, 2, 2)
    np.testing.assert_array_equal(models[:, 0], models[:, 1])
    steps = -np.diff(np.insert(models[:, 0], 0, 1.0, axis=1), axis=1)
    noise = steps - sent.mean(2)
    assert len(np.unique(noise)) == 32  # of its own in each trial, round, coordinate
    assert 0.05 < noise.std() < 0.2


def test_transcripts_in_chunks():
    np.testing.assert_allclose(
        _transcripts(view="central", chunk=4), _transcripts(view="central"), rtol=1e-6
    )


def test_transcripts_hold_only_what_was_sent():
    def make(key):
        return dp_fedavg(
            num_clients=5,
            cohort_size=2,
            key=key,
            clip_norm=1.0,
            local_work=jaxfed.gradient(audit.linear_loss),
        )

    sent = _transcripts(
        make=make,
        world=audit.two_worlds(*audit.client_canary(5, 2, 2, num_byzantine=2)),
        num_byzantine=2,
        attack=audit.published_only(audit_cases.byzantine_upload),
        cohort_size=2,
    ).reshape(8, 2, 3, 2)
    asked = sent[..., 0] != 0
    assert 0 < asked.sum() < 8 * 2 * 2
    assert asked.sum(2).max() <= 2
    row = np.where(np.arange(8) % 2, -1.0, 1.0)[:, None] * [1.0, -1.0]
    np.testing.assert_allclose(sent[..., 0, 0], row * asked[..., 0], rtol=1e-6)


# --- Errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (dict(view="global"), "view must be one of 'local', 'central'"),
        (dict(trials=99), "trials must be at least 100"),
        (dict(trials=101), "trials must be even"),
        (dict(delta=1.0), "0 <= delta < 1"),
        (dict(epsilon=-1.0), "epsilon must be >= 0"),
        (dict(confidence=0.0), "confidence must be a finite number > 0"),
        (dict(confidence=1.0), "0 <= confidence < 1"),
        (dict(rounds=0), "rounds must be at least 1"),
        (dict(chunk=7), "chunk=7 must divide the number of trials, 400"),
        (dict(num_byzantine=3), "at least one honest client"),
    ],
)
def test_errors(changed, match):
    with pytest.raises(ValueError, match=match):
        _distinguish(**changed)


def test_errors_of_bounds():
    with pytest.raises(ValueError, match="scores_out must be at least two numbers"):
        audit.lower_bound([0.0, 1.0], [[0.0, 1.0]], 0.0)
    with pytest.raises(ValueError, match="scores_in must be at least two numbers"):
        audit.lower_bound([math.nan, 1.0], [0.0, 1.0], 0.0)
    with pytest.raises(ValueError, match="guesses must be at most 5"):
        audit.one_run_bound(5, 6, 1, 0.0)
    with pytest.raises(ValueError, match="correct must be at most 2"):
        audit.one_run_bound(5, 2, 3, 0.0)
    with pytest.raises(TypeError, match="canaries must be a Python int"):
        audit.one_run_bound(5.0, 2, 1, 0.0)


def test_canaries_that_do_not_flip_pass_a_momentum():
    rounds = 6
    for make in (
        lambda flip: audit.client_canary(3, 2, rounds, flip=flip),
        lambda flip: audit.example_canary(3, 4, 2, rounds, flip=flip),
    ):
        turned, constant = (
            [
                [float(world(t).data[0, 0, 0]) for t in range(rounds)]
                for world in make(f)
            ]
            for f in (True, False)
        )
        assert constant == [[1e3] * rounds, [-1e3] * rounds]
        assert turned == [[1e3] * 3 + [-1e3] * 3, [-1e3] * 3 + [1e3] * 3]
