# SPDX-License-Identifier: Apache-2.0
"""Known traps of private training: we stay out of them, and a faulty twin is caught.

The table in docs/privacy.md has a row for every trap, and names the tests elsewhere.
"""

import dataclasses
import inspect
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import jaxfed
from jaxfed import aggregators, algorithms, attacks, naming, privacy
from jaxfed.experiments import TrainConfig, budget
from jaxfed.experiments import config as configs
from jaxfed.experiments import problem as problems
from jaxfed.links import per_client
from jaxfed.privacy import composition, gaussian

C, M = 0.5, 8  # clip radius, examples
PRIVATE = sorted(
    name
    for name, factory in naming.ALGORITHMS.items()
    if "noise_std" in inspect.signature(factory).parameters
)
CENTRAL = ["byzuldp", "dp_brem", "dp_fedavg"]


# --- What one example can move ---------------------------------------------------

# Each example is its own gradient; the rows sum to zero, and are longer than C.
CONTENTS = 1e3 * np.array([[1, 1, 0], [-1, -1, 0], [1, 0, 0], [-1, 0, 0], [0, 0, 0]])
ROWS = np.tile(np.array([-1.0, 0.0, 1.0]), (len(CONTENTS), M, 1))
ROWS[:, 3] = CONTENTS
ZERO = {"a": jnp.zeros(1), "b": jnp.zeros(2)}


def inner(params, batch):
    return batch["x"][:, :1] @ params["a"] + batch["x"][:, 1:] @ params["b"]


def coupled(params, batch):
    """As batch norm does: what an example loses depends on the others."""
    return inner(params, batch) * jnp.sign(jnp.sum(batch["x"]))


def moved(update):
    """Return the largest distance of ``update(rows)`` over the data sets."""
    out = toys.quick_jit(jax.vmap(lambda x: toys.ravel(update(x))))(jnp.array(ROWS))
    out = np.asarray(out, np.float64)
    return max(np.linalg.norm(a - b) for a in out for b in out)


def ours(loss, **options):
    work = jaxfed.gradient(loss, clip_norm=C, **options)

    def update(x):
        padded = jnp.concatenate([x, jnp.full((2, 3), jnp.nan)])
        shard = jaxfed.Shard({"x": padded}, jnp.int32(M))
        return work({"params": ZERO}, shard, jax.random.key(0))[0]

    return update


@pytest.mark.parametrize("loss", [inner, coupled])
@pytest.mark.parametrize("options", [{}, {"microbatch": 1}, {"microbatch": 3}])
def test_one_example_moves_a_message_by_the_sensitivity(loss, options):
    bound = jaxfed.Mechanism("example", C, 1.0).sensitivity(M)
    assert bound == 2 * C / M
    reached = {inner: 1.0, coupled: 0.5}[loss]
    assert reached * 0.9999 < moved(ours(loss, **options)) / bound < 1.0001


def examples(x):
    one = jax.grad(lambda p, row: inner(p, {"x": row[None]})[0])
    return jax.vmap(one, (None, 0))(ZERO, x)


def clipped(tree):
    return jax.vmap(lambda g: privacy.clip_tree(g, C))(tree)


def mean(tree):
    return jax.tree.map(lambda g: g.mean(0), tree)


FAULTY = {
    "sum, not mean": lambda x: jax.tree.map(lambda g: g.sum(0), clipped(examples(x))),
    "average clipped": lambda x: privacy.clip_tree(mean(examples(x)), C),
    "microbatches clipped": lambda x: mean(
        clipped(jax.tree.map(lambda g: g.reshape(4, 2, -1).mean(1), examples(x)))
    ),
    "every array clipped": lambda x: mean(
        {name: clipped(leaf) for name, leaf in examples(x).items()}
    ),
    "examples not apart": lambda x: mean(
        clipped(jax.jacrev(lambda p: coupled(p, {"x": x}))(ZERO))
    ),
    "examples not apart, norms=": lambda x: jaxfed.gradient(
        coupled, clip_norm=C, norms=coupled_norms
    )({"params": ZERO}, jaxfed.Shard({"x": x}, jnp.int32(M)), None)[0],
    "no clip": lambda x: mean(examples(x)),
}


def coupled_norms(params, batch):
    return jax.vmap(lambda g: optax.tree.norm(g))(
        jax.jacrev(lambda p: coupled(p, batch))(params)
    )


@pytest.mark.parametrize("fault", sorted(FAULTY))
def test_faulty_clips_move_more_than_the_sensitivity(fault):
    assert moved(FAULTY[fault]) > 1.4 * (2 * C / M)


def test_the_client_with_fewest_examples_sets_the_sensitivity():
    """It divides by the 3 it has, not by the batch size 6."""
    work = jaxfed.gradient(inner, batch_size=6, clip_norm=C)
    few = 3

    def update(content):
        x = jnp.zeros((M, 3)).at[1].set(content)
        shard = jaxfed.Shard({"x": x}, jnp.int32(few))
        return toys.ravel(work({"params": ZERO}, shard, jax.random.key(0))[0])

    one, other = toys.quick_jit(jax.vmap(update))(jnp.array(CONTENTS[:2]))
    distance = np.linalg.norm(np.asarray(one - other, np.float64))
    stated = declared("safe_dshb", few, batch_size=6, clip_norm=C)[0].sensitivity
    assert distance == pytest.approx(2 * C / few) and stated == 2 * C / few
    assert distance > 2 * C / 6
    problem = problems.make_problem(
        TrainConfig(split="dirichlet", beta=0.05, num_clients=12, rounds=2)
    )
    least = problem.sizes[problem.sizes > 0].min()
    assert least < problem.sizes.mean() / 2
    assert problem.statement.sensitivity == pytest.approx(2 / least)


def test_a_client_without_examples_is_as_loud_as_any():
    """Neither an error nor a message without noise tells that there was nothing."""
    params = {"a": jnp.zeros(1), "b": jnp.zeros(4000)}
    work = jaxfed.gradient(lambda p, b: b["x"] @ p["b"] + p["a"], clip_norm=C)
    algorithm = method("safe_dshb", local_work=work)
    message = algorithm.server.broadcast(algorithm.server.init(params))

    @toys.quick_jit
    def send(count):
        shard = jaxfed.Shard({"x": jnp.full((2, 4000), jnp.nan)}, count)
        state = algorithm.client.init(params, 0)
        return algorithm.client.update(message, state, shard, jax.random.key(0))[0]

    assert np.std(send(jnp.int32(0))["b"]) == pytest.approx(SIGMA, rel=0.05)


def test_means_are_not_rounded_to_16_bits_before_the_noise():
    """One example tips every coordinate of the mean by a unit in the last place."""
    number, wide = 1024, 64
    low, high = 1 / 16, 1 / 16 + 2.0**-11  # neighbours in bfloat16
    radius = 2 * high * math.sqrt(wide)  # nothing is clipped
    x = np.full((2, number, wide), low)
    x[:, : number // 2 + 1] = high  # the mean is just above their middle
    x[1, 0] = -low
    bound = np.linalg.norm((x[0] - x[1]).sum(0)) / number
    assert bound < 2 * radius / number
    work = jaxfed.gradient(lambda p, b: b["x"] @ p, clip_norm=radius)

    def send(x):
        shard = jaxfed.Shard({"x": x}, jnp.int32(number))
        return work({"params": jnp.zeros(wide)}, shard, jax.random.key(0))[0]

    sent = toys.quick_jit(jax.vmap(send))(jnp.array(x, float))
    one, other = np.asarray(sent, float)
    assert np.linalg.norm(one - other) == pytest.approx(bound, rel=1e-3)
    one, other = np.asarray(sent.astype(jnp.bfloat16), float)
    assert np.linalg.norm(one - other) > 3 * bound


def test_an_optimizer_of_messages_cannot_clip_examples():
    """It is given averages: whoever makes them clips, or the method clips messages."""
    rows = jnp.full((N, 2), 1e6)
    outer = method("byz_clip_sgd", local_work=None, clip_norm=C, noise_std=1e-9)
    examples = method("byz_clip_sgd", noise_std=1e-9)
    with pytest.raises(ValueError, match="examples_clipped=True"):
        jaxfed.as_optimizer(examples, N)

    def bounded(algorithm, **options):
        optimizer, zero = jaxfed.as_optimizer(algorithm, N, **options), jnp.zeros(2)
        go = toys.quick_jit(lambda x: optimizer.update(x, optimizer.init(zero), zero))
        return float(jnp.linalg.norm(go(rows)[0])) <= C * (1 + 1e-6)

    assert bounded(outer) and not bounded(examples, examples_clipped=True)
    assert (outer.mechanism.unit, examples.mechanism.unit) == ("client", "example")


def test_neighbours_are_replaced_and_not_removed():
    """Two clipped messages may be opposite: 2 C, where a missing one is C away."""
    mechanism = jaxfed.Mechanism("client", C, 1.0)
    one, other = (privacy.clip_tree(jnp.array([s, 0.0]), C) for s in (9.0, -9.0))
    assert float(jnp.linalg.norm(one - other)) == mechanism.sensitivity(1) == 2 * C
    replaced, removed = (
        privacy.certified_epsilon(3.0, sensitivity, 1e-5, 10)
        for sensitivity in (2 * C, C)
    )
    assert replaced > 2 * removed
    statement = declared("byz_clip21_sgd2m", M)[0]
    assert statement.adjacency.startswith("replace") and statement.sensitivity == 2


# --- Noise of the declared size, once --------------------------------------------

SIGMA, N, WIDE = 0.3, 3, 4000


def declared(algorithm, examples, **changes):
    """Return the statement, and the mechanism of the method that would run."""
    config = TrainConfig(num_clients=5, num_byzantine=1, rounds=5, algorithm=algorithm)
    config = configs.resolve(dataclasses.replace(config, **changes))
    hparams, statement = budget.budget(config, examples, 650)
    built = budget.build(config, hparams, config.rule, 0, dim=650)
    return statement, built.mechanism


@pytest.mark.parametrize("name", PRIVATE)
def test_the_noise_that_runs_is_the_noise_that_is_accounted_for(name):
    statement, mechanism = declared(name, 40)
    batch = 1 if name == "safe_dsgd" else 40
    assert mechanism.noise_std == statement.noise_std > 0
    assert mechanism.sensitivity(batch) == statement.sensitivity
    own = (statement.delta, statement.rounds)
    epsilon = privacy.certified_epsilon(
        mechanism.noise_std, statement.sensitivity, *own
    )
    assert 7.99 < epsilon <= 8
    assert statement.epsilon_certified == pytest.approx(epsilon)
    # Noise for a sum of 40, put on a mean, or the other way round.
    for wrong in (1 / 40, 40):
        noise = mechanism.noise_std * wrong
        other = privacy.certified_epsilon(noise, statement.sensitivity, *own)
        assert other != pytest.approx(statement.epsilon_certified, rel=0.5)


def test_noise_of_a_sum_is_accounted_for_as_that_of_the_mean():
    """``noise_on="sum"`` divides what it is given by the batch size."""
    algorithm = "byz_clip21_sgd2m_plus(noise_on=sum)"
    statement, mechanism = declared(algorithm, 40, batch_size=10)
    assert mechanism.noise_std == pytest.approx(statement.noise_std, rel=1e-6)
    own = (statement.sensitivity, statement.delta, statement.rounds)
    epsilon = privacy.certified_epsilon(mechanism.noise_std, *own)
    assert 7.99 < epsilon < 8 * (1 + 1e-6)
    assert privacy.certified_epsilon(mechanism.noise_std / 10, *own) > 80


def method(name, **options):
    """Build a method with noise SIGMA on messages of which nothing else is left."""

    def work(message, shard, key):
        return toys.zero_gradient(message, shard, key)

    work.clip_norm = 1.0
    work.batch_size = {"safe_dgd": None, "safe_dsgd": 1}.get(name, 3)
    takes = inspect.signature(naming.ALGORITHMS[name]).parameters
    common = dict(rule=aggregators.mean(), num_byzantine=0, num_clients=N, key=0)
    common |= dict(noise_std=SIGMA, momentum=0.0, server_momentum=0.0, local_work=work)
    if "clip_norm" in takes and takes["clip_norm"].default is not None:
        common["clip_norm"] = 1e6
    common = {k: v for k, v in (common | options).items() if k in takes}
    return naming.ALGORITHMS[name](1.0, **common)


@pytest.mark.parametrize("name", PRIVATE)
def test_measured_noise_has_the_declared_size(name):
    algorithm, params = method(name, correlated_noise_std=0.0), jnp.zeros(WIDE)
    mechanism = algorithm.mechanism

    @toys.quick_jit
    def noised():
        server = algorithm.server.init(params)
        if mechanism.model == "central":
            rows = jnp.zeros((N, WIDE))
            model = algorithm.server.update(rows, server)[0].params
            return model * (N if name == "dp_brem" else 1)  # noise of the sum
        message = algorithm.server.broadcast(server)
        state = algorithm.client.init(params, 1)
        shard = jaxfed.Shard({"x": jnp.zeros((3, 1))}, jnp.int32(3))
        return algorithm.client.update(message, state, shard, jax.random.key(0))[0]

    noise = np.asarray(noised())
    assert noise.std() == pytest.approx(mechanism.noise_std, rel=0.05)
    assert abs(noise.mean()) < 5 * SIGMA / math.sqrt(WIDE)


def test_noise_that_cancels_protects_nobody_by_itself():
    options = dict(correlated_noise_std=50.0)
    assert method("cafcor", **options).mechanism.noise_std == SIGMA
    assert method("cafcor", noise_std=0.0, **options).mechanism.noise_std == 0


def test_accumulated_gradients_are_clipped_and_noised_once():
    """``apply_every`` behind the noise adds four noises, and four clips."""
    small = 0.01
    dp = optax.chain(privacy.clip(C), privacy.gaussian_noise(small, 0))
    before = optax.MultiSteps(dp, every_k_schedule=4).gradient_transformation()
    behind = optax.chain(dp, optax.apply_every(4))
    rows = jnp.zeros((2, WIDE)).at[:, 0].set(jnp.array([100.0, -100.0]))

    def last(link):
        """Return the messages of two clients in four rounds, [4, 2, WIDE]."""
        link, zero = per_client(link, 2), jnp.zeros(WIDE)

        def round_(state, _):
            out, state = link.update(rows, state, zero)
            return state, out

        go = toys.quick_jit(lambda s: jax.lax.scan(round_, s, length=4)[1])
        return np.asarray(go(link.init(zero)))

    once, often = last(before), last(behind)
    assert not np.any(once[:3]) and np.any(once[3])
    # How far one client's data can move what is sent, and what hides it.
    for sent, bound, noise in ((once, 2 * C, small), (often, 4 * 2 * C, 2 * small)):
        np.testing.assert_allclose(sent[3, :, 1:].std(1), noise, rtol=0.05)
        gap = sent[3, 0, 0] - sent[3, 1, 0]
        assert abs(gap - bound) < 6 * math.sqrt(2) * noise


def test_the_seed_is_a_secret_and_good_for_one_run():
    """Who knows it takes the noise off; two runs of one seed share their noise."""
    params = jnp.zeros(WIDE)

    @toys.quick_jit
    def send(key, target):
        work = toys.quadratic
        algorithm = method("byz_clip21_sgd2m", clip_norm=C, key=key, local_work=work)
        message = algorithm.server.broadcast(algorithm.server.init(params))
        shard = jaxfed.Shard({"a": target}, jnp.int32(1))
        state = algorithm.client.init(params, 2)
        return algorithm.client.update(message, state, shard, key)[0]

    one, other = jax.random.key(5), jax.random.key(6)
    up, down = jnp.full(WIDE, 1.0), jnp.full(WIDE, -1.0)
    link = privacy.gaussian_noise(SIGMA, one)
    noise, _ = link.update(params, link.init(params), round=0, client_id=2)
    exact = np.full(WIDE, -C / math.sqrt(WIDE))
    np.testing.assert_allclose(send(one, up) - noise, exact, atol=1e-6)
    shared = np.asarray(send(one, up) - send(one, down))
    np.testing.assert_allclose(shared, 2 * exact, atol=1e-6)
    fresh = np.asarray(send(one, up) - send(other, down))
    assert fresh.std() == pytest.approx(math.sqrt(2) * SIGMA, rel=0.05)
    assert any("seed" in caveat for caveat in declared("safe_dshb", M)[0].caveats)


# --- Who takes part --------------------------------------------------------------


@pytest.mark.parametrize("name", CENTRAL)
def test_central_noise_refuses_weights(name):
    algorithm = method(name)
    rows, weights = jnp.eye(N), jnp.array([8.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="weight"):
        state = algorithm.server.init(jnp.zeros(N))
        algorithm.server.update(rows, state, weights=weights)
    rule, opposite = aggregators.mean(), rows.at[0].multiply(-1)
    first, second = (
        rule.update(x, rule.init(jnp.zeros(N)), weights=weights)[0]
        for x in (rows, opposite)
    )
    assert np.linalg.norm(first - second) > 2 * (2 / N)  # the noise hides 2 C / n


def test_the_denominator_is_a_constant_whoever_comes():
    """Rows beyond the cohort and rows that are absent leave 2 C / cohort as it is."""
    algorithm = method("dp_fedavg", clip_norm=C, cohort_size=2, noise_std=0.0)
    assert algorithm.mechanism.sensitivity(1) == 2 * C / 2
    rule = aggregators.mean()

    def distance(n, mask=None, step=algorithm.server):
        rows = jnp.zeros((n, 2)).at[0, 0].set(C)
        one, other = toys.quick_jit(
            jax.vmap(lambda x: step.update(x, step.init(jnp.zeros(2)), mask=mask)[0])
        )(jnp.stack([rows, -rows])).params
        return float(jnp.linalg.norm(one - other))

    alone = jnp.array([True, False])
    for number, mask in ((2, None), (3, None), (2, alone)):
        assert distance(number, mask) == pytest.approx(2 * C / 2)
    # The mean of those who came moves twice as far.
    rows = jnp.zeros((2, 2)).at[0, 0].set(C)
    own, _ = rule.update(rows, rule.init(jnp.zeros(2)), mask=alone)
    assert float(jnp.linalg.norm(own - -own)) == pytest.approx(2 * 2 * C / 2)


def test_attackers_who_see_messages_are_no_part_of_central_privacy():
    """They repeat what a client did; the statement says that it does not count them."""
    n, bound = 5, 2 * C / 5

    def distance(attack):
        algorithm = algorithms.byzuldp(
            1.0,
            rule=aggregators.mean(),
            num_clients=n,
            key=0,
            clip_norm=C,
            noise_std=SIGMA,
            momentum=0.0,
            server_momentum=0.0,
            local_work=toys.quadratic,
        )
        assert algorithm.mechanism.bound == pytest.approx(bound)
        sim = jaxfed.simulate(algorithm, n, num_byzantine=1, attack=attack)

        @toys.quick_jit
        def model(centres):
            state = sim.init(jnp.zeros(2), 0)
            return sim.model(sim.step(state, toys.centres(centres))[0])

        centres = jnp.zeros((n, 2)).at[0, 0].set(9.0)
        return float(jnp.linalg.norm(model(centres) - model(-centres)))

    assert distance(attacks.none()) == pytest.approx(bound, rel=1e-4)
    assert distance(attacks.copies()) > 1.9 * bound
    trusted = dict(rule="trimmed_mean", attack="ipm(scale=10)")
    assert "does not cover" in declared("byzuldp", M, **trusted)[0].adversary
    assert "allows" in declared("safe_dshb", M, attack="ipm(scale=10)")[0].adversary


# --- Accounting ------------------------------------------------------------------


def test_the_central_limit_theorem_is_no_accountant():
    """For sub-sampled rounds it promises less than half of what is really spent."""
    rate, z, rounds, delta = 0.01, 0.6, 100, 1e-5
    mu = rate * math.sqrt(rounds * (math.exp(1 / z**2) - 1))
    promised = privacy.certified_epsilon(1 / mu, 1.0, delta, 1)
    spent = composition.epsilon(
        composition.Phase(rounds, z, composition.poisson(rate)),
        delta,
        accountant="pld",
        relation="add_or_remove_one",
    )
    assert promised < 0.5 * spent
    fixed = composition.without_replacement(10, 1000)
    phase = composition.Phase(rounds, z, fixed)
    assert composition.epsilon(phase, delta, accountant="rdp") > spent


def test_poisson_accounting_is_not_for_batches_of_fixed_size():
    """With its own neighbours it would promise half of what such batches spend."""
    size, examples, rounds, delta, z = 10, 359, 100, 1e-5, 1.0
    spent = composition.epsilon(
        composition.Phase(rounds, z, composition.without_replacement(size, examples)),
        delta,
    )
    poisson = composition.poisson(size / examples)
    promised = composition.epsilon(
        composition.Phase(rounds, 2 * z, poisson),  # C, not 2 C, is its sensitivity
        delta,
        relation="add_or_remove_one",
    )
    assert promised < 0.6 * spent
    statement = declared("safe_dshb", examples, batch_size=size)[0]
    assert "drawn uniformly without replacement" in statement.sampling
    assert "not credited" in statement.sampling
    with pytest.raises(ValueError, match="relation must be 'replace_one'"):
        composition.epsilon(
            composition.Phase(1, z, composition.without_replacement(size, examples)),
            delta,
            relation="add_or_remove_one",
        )


def test_random_batches_are_not_credited_to_methods_that_remember():
    """What was drawn in round 0 shows in the message of round 1, when it is not."""

    def later(name):
        algorithm = method(name, local_work=work, clip_norm=clips[name])
        params = jnp.zeros(3)
        message = algorithm.server.broadcast(algorithm.server.init(params))

        @toys.quick_jit
        def second(target):
            state = algorithm.client.init(params, 0)
            for example in (target, jnp.ones(3)):
                shard = jaxfed.Shard({"a": example}, jnp.int32(1))
                key = jax.random.key(0)
                sent, state, _ = algorithm.client.update(message, state, shard, key)
            return sent

        here, there = jnp.array([9.0, 0.0, 0.0]), jnp.array([-9.0, 0.0, 0.0])
        return float(jnp.linalg.norm(second(here) - second(there)))

    def work(message, shard, key):
        update, metrics = toys.quadratic(message, shard, key)
        return privacy.clip_tree(update, C), metrics

    work.clip_norm, work.batch_size = C, 1
    clips = {"byz_clip21_sgd2m": C, "safe_dshb": None}
    assert later("safe_dshb") == 0
    assert later("byz_clip21_sgd2m") > C / 2
    for name in PRIVATE:
        if not method(name).mechanism.memoryless:
            with pytest.raises(ValueError, match="amplification=True does not hold"):
                declared(name, 40, amplification=True)


def test_epsilon_is_never_negative():
    """Also where the conversion from Rényi divergences would go below zero."""
    order, high = 2.0, 0.9
    naive = gaussian.renyi_divergence(order, 50.0, 1) + math.log(1 - 1 / order)
    naive -= math.log(high * order) / (order - 1)
    assert naive < -1
    for delta in (1e-5, 0.5, 0.9, 0.999):
        assert privacy.certified_epsilon(50.0, 1.0, delta, 1) >= 0
        assert gaussian.epsilon(50.0, delta, 1, mode="rdp") >= 0
        drawn = composition.without_replacement(1, 10)
        for accountant, sampling in (
            ("exact", composition.ALL),
            ("rdp", composition.ALL),
            ("rdp", drawn),
            ("pld", drawn),
        ):
            phase = composition.Phase(1, 50.0, sampling)
            assert composition.epsilon(phase, delta, accountant=accountant) >= 0


def test_longer_runs_are_other_runs():
    """The budget is for a number of rounds; going on is refused, stopping is safe."""
    short, long = TrainConfig(rounds=10), TrainConfig(rounds=11)
    assert configs.differences(short, long) == ["rounds is 10 there and 11 here"]
    assert configs.run_id(short) != configs.run_id(long)
    spent = [privacy.certified_epsilon(3.0, 1.0, 1e-5, t) for t in (9, 10, 11)]
    assert spent == sorted(spent) and spent[0] < spent[1]
    tuning = declared("safe_dshb", M)[0].tuned_on_private_data
    assert "tuning elsewhere is not counted" in tuning


# --- What is published beside the model ------------------------------------------


def test_logged_numbers_are_not_private_and_the_statement_says_so():
    problem = toys.Regression(3)
    work = jaxfed.gradient(problem.loss, clip_norm=C)
    algorithm = method("safe_dshb", local_work=work)
    sim = jaxfed.simulate(algorithm, 3)
    step = toys.quick_jit(lambda shards: sim.step(sim.init(problem.params, 0), shards))
    shards = problem.shards
    y = shards.data["y"].at[0, 0].add(1000.0)
    others = shards._replace(data=shards.data | {"y": y})
    (one, logged), (other, neighbour) = step(shards), step(others)
    apart = toys.ravel(jax.tree.map(jnp.subtract, sim.model(one), sim.model(other)))
    assert float(jnp.linalg.norm(apart)) <= 2 * C / 5 / 3 * 1.001  # a third of one's
    assert float(neighbour["loss"] - logged["loss"]) > 1e4
    assert any("loss" in caveat for caveat in declared("safe_dshb", M)[0].caveats)


def test_the_first_model_is_drawn_without_data():
    from jaxfed import models

    net = models.make_model("softmax", 10)
    with jax.numpy_rank_promotion("allow"):
        first, second = (
            net.init(jax.random.key(0), jnp.full((1, 8, 8, 1), pixel))["params"]
            for pixel in (0.0, 7.0)
        )
    jax.tree.map(np.testing.assert_array_equal, first, second)
    init = jaxfed.simulate(method("dp_fedavg"), N).init
    assert list(inspect.signature(init).parameters) == ["params", "key"]


@pytest.mark.parametrize("radius", [1e-19, 1e-22, 1e-30])
def test_clips_whose_squares_underflow_are_kept_or_refused(radius):
    try:
        link = privacy.clip(radius)
    except ValueError as error:
        assert "clip_norm" in str(error)
        return
    sent, _ = link.update(jnp.full(4, 1e-20), link.init(None))
    assert np.linalg.norm(np.asarray(sent, np.float64)) <= radius * (1 + 1e-6)


def test_layers_used_twice_in_any_way_have_no_cheap_norm():
    """Tied weights: a norm that misses a use would leave gradients unclipped."""
    import flax.linen as nn

    from jaxfed.models import gradient_norms

    class Tied(nn.Module):
        @nn.compact
        def __call__(self, images):
            x = images.reshape(images.shape[0], -1)
            layer = nn.Dense(10, use_bias=False)
            return 0.01 * layer(x) + 100 * (x @ layer.variables["params"]["kernel"])

    class Attend(nn.Module):
        @nn.compact
        def __call__(self, images):
            layer = nn.Embed(10, 16)
            x = images.reshape(images.shape[0], -1)
            start = layer(jnp.zeros(images.shape[0], jnp.int32))
            return 0.01 * start[:, :10] + 100 * layer.attend(x)

    for net in (Tied(), Attend()):
        batch = {"image": jnp.ones((3, 4, 4, 1)), "label": jnp.arange(3)}
        params = net.init(jax.random.key(0), batch["image"])["params"]
        with pytest.raises(ValueError, match="no norms for this model"):
            gradient_norms(net)(params, batch)


def moved_beside_huge_rows(step, n=25):
    """How far an end-to-end move of client 0 gets, whatever five others send."""
    patterns = jnp.array([[1, -1, 0, 0, 0], [1, 0, 0, 0, -1], [1, 1, 1, -1, -1.0]])
    huge = jnp.kron(2.0 ** jnp.arange(20, 36)[:, None], patterns)

    def one(sign, others, byzantine):
        rows = [jnp.full(1, sign), jnp.full(n - 6, others), byzantine]
        return step(jnp.concatenate(rows)[:, None])[0]

    def moved(others, byzantine):
        return jnp.abs(one(1.0, others, byzantine) - one(-1.0, others, byzantine))

    grid = jax.vmap(jax.vmap(moved, (None, 0)), (0, None))
    return jnp.max(toys.quick_jit(grid)(jnp.linspace(-1, 1, 21), huge))


SIX = ("centered_clipping", "geometric_median", "krum", "mean", "median")


@pytest.mark.parametrize("rule", [*SIX, "trimmed_mean", "dp_fedavg"])
def test_a_huge_row_cannot_hide_clients_and_noise_in_rounding(rule):
    """Beside 2**27 the sum of the other rows is rounded: one client tips an ulp."""
    options = dict(num_clients=25, key=0, clip_norm=1.0, noise_std=1e-30)
    if rule == "dp_fedavg":
        method = jaxfed.algorithms.dp_fedavg(1.0, **options)
    else:
        built = jaxfed.make_aggregator(rule, num_byzantine=5, key=0)
        options |= dict(rule=built, momentum=0.0, server_momentum=0.0)
        method = jaxfed.algorithms.byzuldp(1.0, **options)
    state = method.server.init(jnp.zeros(1))

    def step(rows):
        return method.server.model(method.server.update(rows, state)[0])

    assert moved_beside_huge_rows(step) <= method.mechanism.sensitivity(1) * (1 + 1e-5)


def test_a_mean_of_rows_as_they_come_hides_nobody():
    assert moved_beside_huge_rows(lambda rows: jnp.mean(rows, 0)) > 5 * 2 / 25


def test_the_table_of_traps_names_tests_that_exist():
    root = pathlib.Path(__file__).parents[1]
    files = {p.name: p.read_text() for p in (root / "tests").glob("test_*.py")}
    table = (root / "docs/privacy_traps.md").read_text()
    found = re.findall(r"`(?:(test_\w+\.py)?::)?(test_\w+)(?:\[[^`]*)?`", table)
    assert len(found) > 90
    for file, name in found:
        texts = [files[file]] if file else files.values()
        assert any(f"def {name}(" in text for text in texts), (file, name)
