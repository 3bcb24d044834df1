# SPDX-License-Identifier: Apache-2.0
"""FedAvg and its relatives, against loops in NumPy and by hand.

Numbers in test names are rows of the checklist of arXiv 2601.06903.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import jaxfed
from jaxfed import aggregators
from jaxfed.algorithms._fedacg import fedacg
from jaxfed.algorithms._fedavg import fedadam, fedavg, fedavgm, fedsgd, fedyogi
from jaxfed.algorithms._fedexp import extrapolated_mean, fedexp
from jaxfed.algorithms._fedprox import fedprox
from jaxfed.local import sample
from jaxfed.rounds import client_key

N, COHORT, STEPS, BATCH, ETA, ROUNDS = 5, 3, 3, 2, 0.1, 4
PROBLEM = toys.Regression(N, m=6)
FACTORIES = [fedavg, fedsgd, fedavgm, fedadam, fedyogi, fedprox, fedexp, fedacg]
ITERATED = [f for f in FACTORIES if f is not fedsgd]


def local_work(loss=PROBLEM.loss, eta=ETA, steps=STEPS, batch_size=BATCH):
    return jaxfed.local_sgd(loss, optax.sgd(eta), steps=steps, batch_size=batch_size)


def build(factory, **options):
    if factory is fedsgd:
        work = jaxfed.gradient(PROBLEM.loss, batch_size=BATCH)
        return fedsgd(**{"learning_rate": 0.3, "local_work": work, **options})
    return factory(**{"local_work": local_work(), **options})


def end(algorithm, n=N, rounds=ROUNDS, shards=None, params=None, **options):
    """Model after some rounds, flat."""
    sim = jaxfed.simulate(algorithm, n, **options)
    params = PROBLEM.params if params is None else params
    shards = PROBLEM.shards if shards is None else shards
    return toys.ravel(sim.model(sim.run(sim.init(params, 1), shards, rounds)[0]))


def same(*algorithms, bits=True, **options):
    """Assert that the methods end at the same model, away from the start."""
    ends = toys.quick_jit(lambda s: [end(a, shards=s, **options) for a in algorithms])(
        PROBLEM.shards
    )
    for other in ends[1:]:
        tolerance = dict(rtol=0, atol=0 if bits else 1e-6)
        np.testing.assert_allclose(other, ends[0], **tolerance)
    assert np.abs(ends[0] - PROBLEM.flat.astype(np.float32)).max() > 1e-2


# --- Trajectories ----------------------------------------------------------------
# A server is a generator: it yields where clients start and its model, and is sent
# what they upload.


def averaging(x, lr=1.0):
    while True:
        sent = yield x, x
        x = x - lr * np.mean(sent, axis=0)


def with_momentum(x, lr, beta):
    v = 0
    while True:
        sent = yield x, x
        v = beta * v + np.mean(sent, axis=0)
        x = x - lr * v


def with_moments(x, lr, b1, b2, eps, kind):
    m = v = 0.0 if kind == "adam" else 1e-6
    for t in itertools.count(1):
        sent = yield x, x
        delta = np.mean(sent, axis=0)
        m = b1 * m + (1 - b1) * delta
        if kind == "adam":
            v = b2 * v + (1 - b2) * delta**2
        else:
            v = v - (1 - b2) * delta**2 * np.sign(v - delta**2)
        x = x - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)


def accelerated(x, lam, lr=1.0):
    m = 0
    while True:
        sent = yield x + lam * m, x
        m = lam * m - lr * np.mean(sent, axis=0)
        x = x + m


def factor_of(sent, epsilon):
    sent = np.asarray(sent)
    length = np.sum(np.mean(sent, axis=0) ** 2)
    return max(1, np.sum(sent**2) / (2 * len(sent) * (length + epsilon)))


def extrapolating(x, epsilon, average=False):
    before = x
    while True:
        sent = yield x, (x + before) / 2 if average else x
        before, x = x, x - factor_of(sent, epsilon) * np.mean(sent, axis=0)


def go_down(i, batches, start, proximal=0.0, correction=0.0):
    """What client i uploads after its steps."""
    x = start
    for batch in batches:
        slope = PROBLEM.gradient(i, batch, x) + correction
        x = x - ETA * (slope + proximal * (x - start))
    return start - x


GOLDEN = {
    "fedavg": (fedavg, {"learning_rate": 0.7}, lambda x: averaging(x, 0.7), 0),
    "fedavgm": (
        fedavgm,
        {"learning_rate": 0.7, "server_momentum": 0.6},
        lambda x: with_momentum(x, 0.7, 0.6),
        0,
    ),
    "fedadam": (
        fedadam,
        {"learning_rate": 0.05, "eps": 0.01},
        lambda x: with_moments(x, 0.05, 0.9, 0.99, 0.01, "adam"),
        0,
    ),
    "fedyogi": (
        fedyogi,
        {"learning_rate": 0.05, "second_momentum": 0.8},
        lambda x: with_moments(x, 0.05, 0.9, 0.8, 1e-3, "yogi"),
        0,
    ),
    "fedprox": (fedprox, {"proximal": 0.4}, averaging, 0.4),
    "fedexp": (fedexp, {}, lambda x: extrapolating(x, 1e-3), 0),
    "fedexp_code_average": (
        fedexp,
        {"epsilon": 0.02, "form": "code", "average_iterates": True},
        lambda x: extrapolating(x, COHORT * 0.02, average=True),
        0,
    ),
    "fedacg": (
        fedacg,
        {"server_momentum": 0.8, "proximal": 0.3, "learning_rate": 0.9},
        lambda x: accelerated(x, 0.8, 0.9),
        0.3,
    ),
}


def watching():
    """A wire that remembers who took part."""

    def update(uploads, state, params=None, *, cohort, **extra):
        del state, params, extra
        return uploads, cohort.astype(jnp.int32)

    wire = optax.GradientTransformationExtraArgs(
        lambda params: jnp.zeros(COHORT, jnp.int32), update
    )
    return jaxfed.Attack(lambda shards, byzantine: shards, wire)


@toys.quick_jit
def record(shards):
    """Indices of every batch, ``[rounds, n, steps, batch]``."""

    def one(t, i, u, shard):
        key = jax.random.fold_in(client_key(jax.random.key(1), t, i), u)
        return sample(key, shard, BATCH)[0]["index"]

    each = jax.vmap(one, (None, None, 0, None))
    each = jax.vmap(each, (None, 0, None, 0))
    each = jax.vmap(each, (0, None, None, None))
    return each(jnp.arange(ROUNDS), jnp.arange(N), jnp.arange(STEPS), shards)


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("name", GOLDEN)
def test_row_17_golden_trajectory(name, x64):
    """With 3 of 5 clients a round, three steps on batches of two of six examples."""
    factory, options, server, proximal = GOLDEN[name]
    with jax.enable_x64(x64):
        sim = jaxfed.simulate(
            build(factory, **options), N, cohort_size=COHORT, attack=watching()
        )
        (models, cohorts), _ = toys.trace(
            sim,
            PROBLEM.params,
            PROBLEM.shards,
            ROUNDS,
            lambda s: (toys.ravel(sim.model(s)), s.attack),
        )
        batches = np.asarray(record(PROBLEM.shards))
    assert len({tuple(sorted(c)) for c in cohorts[1:].tolist()}) > 1
    server = server(PROBLEM.flat)
    start, model = next(server)
    for t, cohort in enumerate(cohorts[1:]):
        np.testing.assert_allclose(
            models[t], model, rtol=0, atol=1e-12 if x64 else 1e-6
        )
        sent = [go_down(i, batches[t, i], start, proximal) for i in cohort]
        start, model = server.send(sent)
    np.testing.assert_allclose(
        models[ROUNDS], model, rtol=0, atol=1e-12 if x64 else 1e-6
    )
    assert np.abs(model - PROBLEM.flat).max() > 0.05


# --- By hand ---------------------------------------------------------------------


def square(params, batch):
    return 0.5 * jnp.square(params - batch["a"])


def two_clients(*centres):
    return toys.centres(np.reshape(centres, (-1, 1)))


TWO_STEPS = jaxfed.local_sgd(square, optax.sgd(0.5), steps=2)
# From 0 the clients at 1 and 3 go to 0.75 and 2.25, or with a pull of 1 to 0.5 and 1.5.
# FedExP's second factor: they send 0.375 and -1.125, 1.40625 / 4 over 0.140625 + 0.001.
EXTRAPOLATED = 1.5 + 0.375 * 1.40625 / (4 * 0.141625)
BY_HAND = {
    "fedavg": (fedavg(local_work=TWO_STEPS), [1.5, 1.875]),
    "fedsgd": (fedsgd(0.25, local_work=jaxfed.gradient(square)), [0.5, 0.875]),
    "fedavgm": (fedavgm(server_momentum=0.5, local_work=TWO_STEPS), [1.5, 2.625]),
    "fedadam": (fedadam(1.0, local_work=TWO_STEPS), [1.5 / 1.501]),
    "fedyogi": (
        fedyogi(1.0, local_work=TWO_STEPS),
        [(1.5 - 9e-6) / (2.2501**0.5 + 1e-3)],
    ),
    "fedprox": (fedprox(proximal=1.0, local_work=TWO_STEPS), [1.0, 1.5]),
    "fedexp": (fedexp(local_work=TWO_STEPS), [1.5, EXTRAPOLATED]),
    "fedexp_average": (
        fedexp(average_iterates=True, local_work=TWO_STEPS),
        [0.75, 0.75 + EXTRAPOLATED / 2],
    ),
    "fedacg": (
        fedacg(server_momentum=0.5, proximal=1.0, local_work=TWO_STEPS),
        [1.0, 1.75],
    ),
}


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
def test_row_17_two_rounds_by_hand(x64):
    def run(shards):
        seen = {}
        for name, (algorithm, expected) in BY_HAND.items():
            sim = jaxfed.simulate(algorithm, 2)
            state, seen[name] = sim.init(jnp.array(0.0), 0), []
            for _ in expected:
                state, _ = sim.step(state, shards)
                seen[name].append(sim.model(state))
        return seen

    with jax.enable_x64(x64):
        seen = toys.quick_jit(run)(two_clients(1.0, 3.0))
    for name, (_, expected) in BY_HAND.items():
        np.testing.assert_allclose(
            seen[name], expected, rtol=1e-12 if x64 else 1e-6, err_msg=name
        )


def test_row_17_fedexp_factor_by_hand():
    sent = jnp.diag(jnp.array([3.0, 1.0, 2.0]))
    for form, factor in (("paper", 1.4), ("code", 42 / 34)):
        rule = extrapolated_mean(1 / 9, form)
        step, state, info = rule.observe(
            sent, rule.init(sent[0]), byzantine=jnp.array([False, False, True])
        )
        np.testing.assert_allclose(step, factor * np.array([1, 1 / 3, 2 / 3]), 1e-6)
        np.testing.assert_allclose(info.details["extrapolation"], factor, 1e-6)
        np.testing.assert_allclose(info.weights, np.full(3, 1 / 3), 1e-6)
        np.testing.assert_allclose(info.influence, 1 / 3, 1e-6)
        assert state == optax.EmptyState()


# --- What they become at the ends ------------------------------------------------


def test_row_17_without_pull_or_momentum_they_are_fedavg():
    average = build(fedavg)
    same(average, build(fedprox, proximal=0.0), cohort_size=COHORT)
    same(
        average,
        build(fedavgm, server_momentum=0.0),
        build(fedacg, server_momentum=0.0, proximal=0.0),
        build(fedavg, server_optimizer=optax.sgd(1.0)),
        bits=False,
        cohort_size=COHORT,
    )


def test_any_optax_optimizer_on_the_server():
    adam = optax.adam(0.1, b1=0.9, b2=0.99, eps=1e-3)
    same(
        build(fedadam, learning_rate=0.05),
        build(fedavg, learning_rate=0.5, server_optimizer=adam),
        bits=False,
    )


def test_one_gradient_is_one_step():
    one = dict(steps=1, batch_size=None)
    gradient = jaxfed.gradient(PROBLEM.loss)
    same(
        build(fedsgd, learning_rate=0.3, local_work=gradient),
        jaxfed.algorithms.byz_sgdm(
            0.3, rule=aggregators.mean(), momentum=0.0, local_work=gradient
        ),
        build(fedavg, local_work=local_work(eta=0.3, **one)),
        build(fedavg, learning_rate=3.0, local_work=local_work(eta=0.1, **one)),
        bits=False,
    )


def test_one_client_with_one_step_is_sgd():
    alone = toys.Regression(1, m=4, seed=3)
    work = jaxfed.local_sgd(alone.loss, optax.sgd(ETA), steps=1)
    for factory in (fedavg, fedprox, fedexp):
        sim = jaxfed.simulate(factory(local_work=work), 1)
        models, _ = toys.trace(
            sim, alone.params, alone.shards, 3, lambda s: toys.ravel(s.server.params)
        )
        x = alone.flat
        for model in models:
            np.testing.assert_allclose(model, x, atol=1e-6)
            x = x - ETA * alone.gradient(0, range(4), x)


def test_averages_the_models_of_the_clients():
    """Epochs to convergence at eta = 1 reach the centres in one round."""
    work = jaxfed.local_sgd(square, optax.sgd(1.0), epochs=2)
    centres = np.array([1.0, -4.0, 9.0])
    model = toys.quick_jit(
        lambda s: end(fedavg(local_work=work), 3, 1, s, params=jnp.array(7.0))
    )(two_clients(*centres))
    np.testing.assert_allclose(model, [centres.mean()], rtol=1e-6)


# --- FedExP ----------------------------------------------------------------------


@pytest.mark.parametrize("form", ["paper", "code"])
def test_row_17_fedexp_factor_is_the_formula(form):
    rng = np.random.default_rng(0)
    # From nearly equal to nearly opposite rows: the factor is 1 and beyond.
    rows = (
        rng.normal(size=(200, 4, 6))
        + rng.normal(size=(200, 1, 6)) * (np.linspace(0, 3, 200)[:, None, None])
    )
    rule = extrapolated_mean(0.05, form)

    @toys.quick_jit
    @jax.vmap
    def go(x):
        step, _, info = rule.observe(x, optax.EmptyState())
        return step, info.details["extrapolation"]

    steps, factors = go(jnp.asarray(rows))
    expected = [factor_of(x, 0.05 * (1 if form == "paper" else 4)) for x in rows]
    np.testing.assert_allclose(factors, expected, rtol=1e-5)
    np.testing.assert_allclose(
        steps, np.array(expected)[:, None] * rows.mean(1), rtol=1e-4, atol=1e-5
    )
    assert np.all(factors >= 1)
    assert np.any(factors == 1) and np.any(factors > 1.1)


def test_row_17_fedexp_orthogonal_updates_give_half_their_number():
    rows = 3.0 * np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))[0]
    inspect = toys.quick_jit(extrapolated_mean(1e-6).inspect)
    for size in (2, 5, 8):
        mask = jnp.arange(8) < size
        info = inspect(jnp.asarray(rows, jnp.float32), optax.EmptyState(), mask=mask)
        np.testing.assert_allclose(info.details["extrapolation"], size / 2, rtol=1e-4)


def test_row_17_fedexp_with_equal_clients_is_fedavg():
    equal = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), PROBLEM.shards)
    work = local_work(batch_size=None)
    plain, exp = toys.quick_jit(
        lambda s: [end(f(local_work=work), shards=s) for f in (fedavg, fedexp)]
    )(equal)
    np.testing.assert_array_equal(plain, exp)


def test_fedexp_absent_clients_and_weights():
    rng = np.random.default_rng(1)
    rows = jnp.asarray(rng.normal(size=(5, 3)), jnp.float32)
    mask = jnp.array([True, False, True, True, False])
    for form in ("paper", "code"):
        rule = extrapolated_mean(0.1, form)
        update = toys.quick_jit(rule.update)
        hidden = rows.at[1].set(jnp.nan)
        step, _ = update(hidden, optax.EmptyState(), mask=mask)
        alone, _ = update(rows[np.flatnonzero(mask)], optax.EmptyState())
        np.testing.assert_allclose(step, alone, rtol=1e-5)
    observe = toys.quick_jit(extrapolated_mean(0.1).observe)
    doubled = rows[np.array([0, 1, 1, 2, 3, 4])]
    weights = jnp.array([1.0, 2.0, 1.0, 1.0, 1.0])
    step, _, info = observe(rows, optax.EmptyState(), weights=weights)
    other, _, many = observe(doubled, optax.EmptyState())
    np.testing.assert_allclose(step, other, rtol=1e-5)
    np.testing.assert_allclose(
        info.details["extrapolation"], many.details["extrapolation"], rtol=1e-5
    )


def test_fedexp_reports_its_factor_every_round():
    sim = jaxfed.simulate(build(fedexp), N, num_byzantine=1, inspect=True)
    go = toys.quick_jit(lambda s: sim.run(sim.init(PROBLEM.params, 0), s, 3))
    _, metrics = go(PROBLEM.shards)
    assert metrics["extrapolation"].shape == (3,)
    assert np.all(metrics["extrapolation"] >= 1)
    np.testing.assert_allclose(metrics["influence"], np.full(3, 1 / N), rtol=1e-6)


# --- FedACG ----------------------------------------------------------------------


def slope(params, batch):
    return batch["a"] * params


def test_row_17_fedacg_on_constant_gradients_is_momentum():
    """m_t = -D (1 - lam^t) / (1 - lam), with D = eta U c what each round sends."""
    lam, eta, c = 0.6, 0.1, 2.0
    work = jaxfed.local_sgd(slope, optax.sgd(eta), steps=4)
    sim = jaxfed.simulate(fedacg(server_momentum=lam, proximal=0, local_work=work), 3)
    models, last = toys.trace(
        sim, jnp.array(1.0), two_clients(c, c, c), 6, lambda s: sim.model(s)
    )
    sent = eta * 4 * c
    moves = -sent * (1 - lam ** np.arange(1, 7)) / (1 - lam)
    np.testing.assert_allclose(models, 1 + np.append(0, np.cumsum(moves)), rtol=1e-6)
    start = fedacg(server_momentum=lam).server.broadcast(last.server)["params"]
    np.testing.assert_allclose(start, models[-1] + lam * moves[-1], rtol=1e-6)


# --- Sweeps, rules, attacks ------------------------------------------------------


def test_traced_numbers_mean_what_python_numbers_mean():
    def swept(a, b, c, eta):
        work = local_work(eta=eta)
        return [
            end(build(fedprox, learning_rate=a, proximal=b, local_work=work)),
            end(build(fedadam, learning_rate=a, server_momentum=c, local_work=work)),
            end(build(fedexp, epsilon=b + 0.01, local_work=work)),
            end(build(fedacg, server_momentum=c, proximal=b, local_work=work)),
        ]

    rows = np.array([[1.0, 0.0, 0.0, 0.1], [0.5, 0.7, 0.4, 0.05]])
    together = toys.quick_jit(jax.vmap(swept))(*rows.T)
    alone, plain = toys.quick_jit(
        lambda: (swept(*rows[1].tolist()), end(build(fedavg)))
    )()
    for many, one in zip(together, alone, strict=True):
        np.testing.assert_allclose(many[1], one, rtol=1e-4, atol=1e-5)
    for many in (together[0], together[3]):
        np.testing.assert_allclose(many[0], plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "factory", [fedavg, fedsgd, fedadam, fedprox, fedacg], ids=lambda f: f.__name__
)
def test_robust_rule_stands_bad_uploads_and_the_mean_does_not(factory):
    bad = dict(num_byzantine=1, attack=jaxfed.make_attack("nan"), rounds=2)

    @toys.quick_jit
    def both(shards):
        return [
            end(build(factory, rule=rule), shards=shards, **bad)
            for rule in (aggregators.median(1), None)
        ]

    robust, average = both(PROBLEM.shards)
    assert np.all(np.abs(robust) < 10)
    assert not np.any(np.isfinite(average))


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda f: f.__name__)
def test_absent_clients_and_weights_reach_the_rule(factory):
    server = build(factory).server
    rng = np.random.default_rng(0)
    sent = jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=(3, *p.shape)), p.dtype), PROBLEM.params
    )
    state = server.init(PROBLEM.params)
    mask = jnp.array([True, False, True])
    absent, info = server.update(
        sent, state, mask=mask, byzantine=jnp.array([False, True, True])
    )
    np.testing.assert_allclose(info.weights, [0.5, 0, 0.5])
    np.testing.assert_allclose(info.influence, 0.5)
    without, nothing = server.update(jax.tree.map(lambda x: x[::2], sent), state)
    assert nothing is None
    weighted, _ = server.update(sent, state, weights=jnp.array([2.0, 0.0, 2.0]))
    for other in (without, weighted):
        np.testing.assert_allclose(
            toys.ravel(server.model(absent)),
            toys.ravel(server.model(other)),
            rtol=1e-5,
        )


# --- State -----------------------------------------------------------------------


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda f: f.__name__)
def test_state_keeps_its_types_in_bfloat16_with_traced_numbers(factory):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PROBLEM.params)
    shards = PROBLEM.shards
    data = {k: v.astype(jnp.bfloat16) for k, v in shards.data.items() if k != "index"}
    shards = shards._replace(data=data)
    work = jaxfed.local_sgd(PROBLEM.loss, optax.sgd(ETA), steps=2)
    work = work.gradient if factory is fedsgd else work
    options = {
        fedavgm: ["server_momentum"],
        fedadam: ["server_momentum"],
        fedyogi: ["server_momentum"],
        fedprox: ["proximal"],
        fedacg: ["server_momentum", "proximal"],
    }.get(factory, [])
    extra = {"average_iterates": True} if factory is fedexp else {}

    def go(number):
        traced = {k: number for k in options}
        built = factory(learning_rate=number, local_work=work, **traced, **extra)
        sim = jaxfed.simulate(built, N)
        first = sim.init(params, 0)
        return first, sim.run(first, shards, 2)[0]

    first, last = jax.eval_shape(go, jnp.float32(0.5))
    facts = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), first)
    assert facts == jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), last)
    assert {
        x.dtype for x in jax.tree.leaves(last) if jnp.issubdtype(x.dtype, jnp.inexact)
    } == {jnp.dtype(jnp.bfloat16)}


def test_donated_state_of_averaged_iterates():
    sim = jaxfed.simulate(build(fedexp, average_iterates=True), N)
    step, params = toys.quick_jit(sim.step, donate_argnums=0), PROBLEM.params
    state = sim.init(params, 0)
    for _ in range(2):
        state, _ = step(state, PROBLEM.shards)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert np.all(np.isfinite(toys.ravel(sim.model(state))))


def test_as_optimizer_refuses_what_is_no_chain():
    for algorithm in (build(fedacg), build(fedexp, average_iterates=True)):
        with pytest.raises(ValueError, match="run it with jaxfed.simulate"):
            jaxfed.as_optimizer(algorithm, N)
    jaxfed.as_optimizer(build(fedexp), N)
    jaxfed.as_optimizer(fedprox(), N)


# --- Errors ----------------------------------------------------------------------


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda f: f.__name__)
def test_learning_rate_out_of_range(factory):
    for value in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="learning_rate must be a finite number"):
            factory(learning_rate=value)


@pytest.mark.parametrize(
    ("factory", "argument", "value", "message"),
    [
        (fedavgm, "server_momentum", 1.0, "server_momentum must satisfy"),
        (fedadam, "server_momentum", -0.1, "server_momentum must satisfy"),
        (fedadam, "second_momentum", 1.0, "second_momentum must satisfy"),
        (fedyogi, "second_momentum", np.nan, "second_momentum must satisfy"),
        (fedyogi, "eps", 0.0, "eps must be a finite number > 0"),
        (fedprox, "proximal", -0.1, "proximal must be a finite number >= 0"),
        (fedacg, "proximal", np.inf, "proximal must be a finite number >= 0"),
        (fedacg, "server_momentum", 1.0, "server_momentum must satisfy"),
        (fedexp, "epsilon", 0.0, "epsilon must be a finite number > 0"),
        (fedexp, "form", "printed", "form must be one of 'paper', 'code'"),
    ],
)
def test_values_out_of_range(factory, argument, value, message):
    with pytest.raises(ValueError, match=message):
        factory(**{argument: value})


def test_wrong_kinds():
    gradient = jaxfed.gradient(PROBLEM.loss)
    for factory in (fedprox, fedacg):
        with pytest.raises(TypeError, match="changes each local step: build"):
            factory(local_work=gradient)
    with pytest.raises(TypeError, match="take several local steps with fedavg"):
        fedsgd(0.1, local_work=local_work())
    with pytest.raises(TypeError, match="server_optimizer must be an optax"):
        fedavg(server_optimizer=0.1)
    for factory in (fedavg, fedavgm, fedprox, fedacg):
        with pytest.raises(TypeError, match="rule must be an aggregator"):
            factory(rule=optax.identity())


@pytest.mark.parametrize("factory", ITERATED, ids=lambda f: f.__name__)
def test_without_local_work_rounds_raise(factory):
    sim = jaxfed.simulate(factory(), N)
    with pytest.raises(ValueError, match="built without local work"):
        sim.step(sim.init(PROBLEM.params, 0), PROBLEM.shards)


def test_what_a_configuration_must_give():
    assert all(f.needs.local_steps and not f.needs.root_data for f in ITERATED)
    assert not hasattr(fedsgd, "needs")
