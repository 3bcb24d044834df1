# SPDX-License-Identifier: Apache-2.0
"""What every registered algorithm promises, whatever it computes."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import jaxfed
from jaxfed import aggregators, attacks, links
from jaxfed.algorithms import Needs
from jaxfed.attacks._base import stateless
from jaxfed.naming import ALGORITHMS, make_algorithm
from jaxfed.rounds import client_key

N, F = 6, 2
NAMES = sorted(ALGORITHMS)
# What differs only in links runs through the slow tests for these.
CHAINS = [
    "byz_clip21_sgd2m",
    "byz_clip21_sgd2m_plus",
    "byz_clip_sgd",
    "byz_sgdm",
    "safe_dshb",
]
# Methods that promise nothing under attack, whatever the rule.
FRAGILE = ["fedexp", "scaffold"]


def taking(argument):
    """Names of the methods whose factory takes ``argument``."""
    return [
        name
        for name in NAMES
        if argument in inspect.signature(ALGORITHMS[name]).parameters
    ]


NOISY, RULED = taking("noise_std"), taking("rule")
OWN_RULES = ["br_drag", "cafcor", "dp_brem", "raga", "rfa"]
ROBUST = [(name, None) for name in OWN_RULES] + [
    (name, rule)
    for name in RULED
    for rule in ("nnm+median", "trimmed_mean")
    # Central noise is for rules of known sensitivity.
    if name not in FRAGILE and (name, rule) != ("byzuldp", "nnm+median")
]
DEFAULTS = dict(
    learning_rate=0.2,
    num_clients=N,
    key=3,
    clip_norm=0.5,
    noise_std=0.1,
    momentum=0.8,
    server_momentum=0.7,
)
PROBLEM = toys.Regression(N)


def needs(name):
    return getattr(ALGORITHMS[name], "needs", Needs())


def local_work(name):
    """Return the local work a method takes, on a toy problem."""
    if needs(name).local_steps:
        return jaxfed.local_sgd(PROBLEM.loss, optax.sgd(0.1), steps=2, batch_size=3)
    size = None if name == "safe_dgd" else needs(name).batch_size or 3
    inner = 1.5 if needs(name).two_clips else None
    return jaxfed.gradient(PROBLEM.loss, batch_size=size, clip_norm=inner)


def build(name, *, f=F, rule=None, **over):
    """Build an algorithm from those of the common arguments that it takes."""
    taken = inspect.signature(ALGORITHMS[name]).parameters
    common = {**DEFAULTS, "num_byzantine": f, "local_learning_rate": 0.1}
    options = {k: v for k, v in {**common, **over}.items() if k in taken}
    if "rule" in taken:
        rule = rule or needs(name).rule or "nnm+median"
        options["rule"] = jaxfed.make_aggregator(rule, num_byzantine=f)
    options.setdefault("local_work", local_work(name))
    return ALGORITHMS[name](**options)


def simulation(name, attack="ipm", actual=F, **over):
    """Return a simulation whose server has its own data, if the method wants it."""
    attack = jaxfed.make_attack(attack) if isinstance(attack, str) else attack
    algorithm = build(name, **over)
    sim = jaxfed.simulate(algorithm, N, num_byzantine=actual, attack=attack)
    if algorithm.root_work is None:
        return sim

    def step(state, shards):
        return sim.step(state, shards, jax.tree.map(lambda x: x[0], shards))

    def run(state, shards, rounds):
        root = jax.tree.map(lambda x: x[0], shards)
        return sim.run(state, shards, rounds, root)

    return sim._replace(step=step, run=run)


TWO_CHAINS = [name for name in NAMES if build(name).client_tx is not None]


def unkeyed(tree):
    """Replace typed keys by their data, so that leaves can be compared."""

    def leaf(x):
        typed = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if typed else x)

    return jax.tree.map(leaf, tree)


def assert_equal(a, b, **tolerance):
    compare = np.testing.assert_allclose if tolerance else np.testing.assert_array_equal
    jax.tree.map(lambda x, y: compare(x, y, **tolerance), unkeyed(a), unkeyed(b))


# --- The two ways to use a method ------------------------------------------------


@pytest.mark.parametrize("name", CHAINS)
def test_as_optimizer_equals_simulate(name):
    algorithm, attack = build(name), attacks.ipm()
    shards, params = PROBLEM.shards, PROBLEM.params
    optimizer = jaxfed.as_optimizer(algorithm, N, attack, examples_clipped=True)
    byzantine = jaxfed.byzantine_ids(N, F)
    sim = jaxfed.simulate(algorithm, N, num_byzantine=F, attack=attack)
    work = inspect.getclosurevars(algorithm.client.update).nonlocals["work"]

    @toys.quick_jit
    def both(state, own, own_state, shards):
        keys = jax.vmap(client_key, (None, None, 0))(
            state.key, state.round, jnp.arange(N)
        )
        grads, _ = jax.vmap(work, ({"params": None}, 0, 0))(
            {"params": own}, shards, keys
        )
        step, own_state = optimizer.update(grads, own_state, own, byzantine=byzantine)
        state, _ = sim.step(state, shards)
        return state, optax.apply_updates(own, step), own_state

    state, own, own_state = sim.init(params, 1), params, optimizer.init(params)
    for _ in range(3):
        state, own, own_state = both(state, own, own_state, shards)
        assert_equal(own, sim.model(state), rtol=1e-6, atol=1e-7)
    assert np.abs(toys.ravel(own) - toys.ravel(params)).max() > 1e-3


def test_as_optimizer_refuses_methods_that_are_not_two_chains():
    algorithm = build("byz_sgdm")._replace(client_tx=None)
    with pytest.raises(ValueError, match="run it with jaxfed.simulate"):
        jaxfed.as_optimizer(algorithm, N, examples_clipped=True)


def test_as_optimizer_composes_with_links_behind_it():
    algorithm = build("safe_dshb", rule="mean", noise_std=0.0)
    chained = optax.chain(
        jaxfed.as_optimizer(algorithm, N, examples_clipped=True), optax.scale(0.5)
    )
    alone = jaxfed.as_optimizer(algorithm, N, examples_clipped=True)
    grads = jax.tree.map(
        lambda p: jnp.stack([jnp.full(p.shape, i + 1.0) for i in range(N)]),
        PROBLEM.params,
    )
    half, _ = chained.update(grads, chained.init(PROBLEM.params), PROBLEM.params)
    full, _ = alone.update(grads, alone.init(PROBLEM.params), PROBLEM.params)
    assert_equal(half, jax.tree.map(lambda x: 0.5 * x, full))
    assert jax.tree.map(jnp.shape, half) == jax.tree.map(jnp.shape, PROBLEM.params)


# --- State -----------------------------------------------------------------------


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@pytest.mark.parametrize("name", NAMES)
def test_init_takes_abstract_params(name):
    sim, params = simulation(name), PROBLEM.params
    shapes = jax.eval_shape(lambda p: sim.init(p, 0), abstract(params))
    concrete = sim.init(params, 0)
    assert jax.tree.structure(shapes) == jax.tree.structure(concrete)
    assert abstract(concrete) == abstract(shapes)
    if name not in TWO_CHAINS:
        return
    algorithm = build(name)
    # The optimizer holds no params: it starts from shapes without tracing.
    optimizer = jaxfed.as_optimizer(algorithm, N, examples_clipped=True)
    assert_equal(optimizer.init(abstract(params)), optimizer.init(params))


@pytest.mark.parametrize("name", NAMES)
def test_state_keeps_structure_shapes_dtypes_and_weak_types(name):
    sim = simulation(name)

    def facts(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)

    first = jax.eval_shape(lambda: sim.init(PROBLEM.params, 0))
    second, _ = jax.eval_shape(sim.step, first, PROBLEM.shards)
    assert facts(first) == facts(second)


@pytest.mark.parametrize("name", CHAINS)
def test_eager_equals_jit(name):
    sim = simulation(name, rule="median")
    state = sim.init(PROBLEM.params, 0)
    eager, metrics = sim.step(state, PROBLEM.shards)
    jitted, jitted_metrics = toys.quick_jit(sim.step)(state, PROBLEM.shards)
    assert_equal(eager, jitted, rtol=1e-5, atol=1e-6)
    assert_equal(metrics, jitted_metrics, rtol=1e-5)


@pytest.mark.parametrize("name", CHAINS)
def test_donated_state_can_be_used_again_and_again(name):
    sim = simulation(name)
    params, key = PROBLEM.params, jax.random.key(0)
    step = toys.quick_jit(sim.step, donate_argnums=0)
    finals = []
    for _ in range(2):  # a second run from the same params and key
        state = sim.init(params, key)
        for _ in range(3):
            old = state
            state, _ = step(state, PROBLEM.shards)
        finals.append(sim.model(state))
    assert_equal(*finals)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.server))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert not key.is_deleted()


@pytest.mark.parametrize("traced", [False, True], ids=["numbers", "traced"])
@pytest.mark.parametrize("name", CHAINS)
def test_params_in_bfloat16_keep_their_dtype(name, traced):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PROBLEM.params)
    shards = PROBLEM.shards
    data = {
        k: v.astype(jnp.bfloat16) if v.dtype == jnp.float32 else v
        for k, v in shards.data.items()
    }
    shards = shards._replace(data=data)

    def go(lr, clip_norm, noise_std, momentum, server_momentum, shards):
        sim = simulation(
            name,
            learning_rate=lr,
            clip_norm=clip_norm,
            noise_std=noise_std,
            momentum=momentum,
            server_momentum=server_momentum,
        )
        return sim.run(sim.init(params, 0), shards, 2)[0]

    numbers = (0.2, 0.5, 0.1, 0.8, 0.7)
    if traced:
        state = toys.quick_jit(go)(*map(jnp.float32, numbers), shards)
    else:
        state = toys.quick_jit(lambda s: go(*numbers, s))(shards)
    inexact = [
        x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    assert {x.dtype for x in inexact} == {jnp.dtype(jnp.bfloat16)}
    assert all(np.all(np.isfinite(x.astype(jnp.float32))) for x in inexact)


@pytest.mark.parametrize("name", NAMES)
def test_state_in_bfloat16_stays_so_under_traced_numbers(name):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PROBLEM.params)

    def go(params, shards, numbers):
        sim = simulation(name, **numbers)
        return sim.run(sim.init(params, 0), shards, 1)[0]

    data = {
        k: v.astype(jnp.bfloat16) if v.dtype == jnp.float32 else v
        for k, v in PROBLEM.shards.data.items()
    }
    numbers = {k: jnp.float32(v) for k, v in DEFAULTS.items() if isinstance(v, float)}
    state = jax.eval_shape(go, params, PROBLEM.shards._replace(data=data), numbers)
    inexact = [
        x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    assert {x.dtype for x in inexact} == {jnp.dtype(jnp.bfloat16)}


# --- Sweeps ----------------------------------------------------------------------


def experiment(name, learning_rate, clip_norm, noise_std, momentum, f, seed):
    sim = simulation(
        name,
        actual=f,
        f=f,
        learning_rate=learning_rate,
        clip_norm=clip_norm,
        noise_std=noise_std,
        momentum=momentum,
        key=jax.random.fold_in(jax.random.key(7), seed),
    )
    state = sim.init(PROBLEM.params, jax.random.key(seed))
    return toys.ravel(sim.model(sim.run(state, PROBLEM.shards, 5)[0]))


@pytest.mark.parametrize("name", NAMES)
def test_vmap_over_numbers_and_seeds_equals_separate_runs(name):
    grid = dict(
        learning_rate=np.array([0.1, 0.3, 0.2, 0.2], np.float32),
        clip_norm=np.array([0.5, 0.2, 0.9, 0.5], np.float32),
        noise_std=np.array([0.1, 0.0, 0.3, 0.1], np.float32),
        momentum=np.array([0.8, 0.0, 0.5, 0.8], np.float32),
        f=np.array([0, 1, 2, 2], np.int32),
        seed=np.array([0, 0, 1, 2], np.int32),
    )
    rows = list(zip(*grid.values(), strict=True))
    together = toys.quick_jit(
        jax.vmap(lambda *args: experiment(name, *args)),
    )(*grid.values())
    one = toys.quick_jit(lambda *args: experiment(name, *args))
    apart = np.stack([one(*row) for row in rows])
    np.testing.assert_allclose(together, apart, rtol=1e-4, atol=1e-5)
    assert one._cache_size() == 1  # every f ran in one program
    if name not in CHAINS:
        return
    # And traced numbers mean what Python numbers mean.
    lr, clip_norm, noise_std, momentum, f, seed = (x.item() for x in rows[2])
    static = toys.quick_jit(
        lambda s: experiment(name, lr, clip_norm, noise_std, momentum, f, s)
    )(seed)
    np.testing.assert_allclose(static, apart[2], rtol=1e-4, atol=1e-5)


# --- Bad rows --------------------------------------------------------------------


def bad(value, everywhere):
    """Send ``value`` in every coordinate, or in one of an honest message."""

    def forge(seen):
        def leaf(x):
            first = jnp.zeros(x.shape, bool).reshape(N, -1).at[:, 0].set(True)
            return jnp.where(everywhere | first.reshape(x.shape), value, x)

        return jax.tree.map(leaf, seen.uploads)

    return stateless(forge)


BAD = [np.nan, np.inf, 1e30, 0.0, np.nan, -np.inf, 3e38]
EVERYWHERE = [True, True, True, True, False, False, False]


@pytest.mark.parametrize(("name", "rule"), ROBUST)
def test_bad_rows_of_f_clients_spoil_nothing(name, rule):
    @toys.quick_jit
    @jax.vmap
    def go(value, everywhere):
        sim = simulation(name, bad(value, everywhere), rule=rule)
        state = sim.init(PROBLEM.params, 0)
        state, metrics = sim.run(state, PROBLEM.shards, 50)
        memories = toys.states(state.server, links.AccumulateState)
        rows = [jax.vmap(toys.ravel)(m.total) for m in memories]
        return toys.ravel(sim.model(state)), (state.clients, metrics), rows

    model, other, memories = go(jnp.array(BAD, jnp.float32), jnp.array(EVERYWHERE))
    assert np.all(np.isfinite(model))
    assert np.abs(model).max() < 10
    for leaf in jax.tree.leaves(unkeyed(other)):
        assert np.all(np.isfinite(leaf))
    # Server memories: honest rows are finite; a row that was ever non-finite is
    # infinitely far away for good.
    for rows in memories:
        assert np.all(np.isfinite(rows[:, :-F]))
        assert not np.any(np.isnan(rows))
        assert np.all(rows[~np.isfinite(BAD), -F:] == np.inf)


# --- Randomness ------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_same_key_same_bits_other_key_other_numbers(name):
    def go(noise_key, key, shards):
        sim = simulation(name, key=noise_key)
        return sim.model(sim.run(sim.init(PROBLEM.params, key), shards, 4)[0])

    run = toys.quick_jit(go)
    keys = jax.random.split(jax.random.key(0), 2)
    first = run(keys[0], keys[0], PROBLEM.shards)
    assert_equal(first, run(keys[0], keys[0], PROBLEM.shards))
    if local_work(name).batch_size is not None:
        batches = run(keys[0], keys[1], PROBLEM.shards)
        assert np.any(toys.ravel(first) != toys.ravel(batches))
    if name in NOISY:
        noise = run(keys[1], keys[0], PROBLEM.shards)
        assert np.any(toys.ravel(first) != toys.ravel(noise))


def recording(kind):
    """A stateful wire link that keeps the uploads of the last round."""
    del kind

    def init(params):
        return jax.tree.map(lambda p: jnp.zeros((N, *p.shape), p.dtype), params)

    def update(updates, state, params=None, *, byzantine, **extra):
        del state, params, byzantine, extra
        return updates, updates

    wire = optax.GradientTransformationExtraArgs(init, update)
    return jaxfed.Attack(lambda shards, byzantine: shards, wire)


@pytest.mark.parametrize("name", [n for n in NOISY if n in CHAINS])
def test_noise_differs_over_clients_rounds_and_leaves(name):
    """Zero gradients, no clip in the way: what crosses the wire is noise alone."""

    def work(message, shard, key):
        return toys.zero_gradient(message, shard, key)

    work.clip_norm, work.batch_size = (1.0 if name.endswith("_plus") else None), 3
    params = {"a": jnp.zeros(40), "b": jnp.zeros(40)}
    over = dict(local_work=work, clip_norm=1e6, noise_std=0.5, momentum=0.0)
    sim = simulation(name, recording(name), actual=0, f=0, rule="mean", **over)
    shards = toys.centres(np.zeros((N, 1)))
    seen, _ = toys.trace(
        sim, params, shards, 4, lambda s: toys.ravel_rows(s.attack), key=3
    )
    draws = seen[1:]
    if name.endswith("_plus"):  # c = v - g; undo the memory to see the noise in v
        shift = np.cumsum(draws, axis=0) * (1 - DEFAULTS["server_momentum"])
        draws = draws + np.concatenate([0 * shift[:1], shift[:-1]])
    pieces = draws.reshape(4 * N * 2, 40)
    assert np.all(np.abs(pieces.std(axis=1) / 0.5 - 1) < 0.5)
    off_diagonal = np.corrcoef(pieces) - np.eye(len(pieces))
    assert np.abs(off_diagonal).max() < 0.75  # 4.7 standard deviations


def test_one_seed_for_noise_and_simulation_shares_no_key():
    """Local work's keys are not the keys of the noise, even from the same seed."""
    key = jax.random.key(3)
    for t in range(3):
        for i in range(3):
            noise = jax.random.fold_in(jax.random.fold_in(key, t), i)
            local = client_key(key, t, i)
            assert np.any(jax.random.key_data(noise) != jax.random.key_data(local))


# --- Errors ----------------------------------------------------------------------


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
@pytest.mark.parametrize(
    ("name", "argument"),
    [(n, a) for a in ("momentum", "server_momentum") for n in taking(a)],
)
def test_momentum_out_of_range(name, argument, value):
    with pytest.raises(ValueError, match=f"{argument} must satisfy .* got {argument}="):
        build(name, **{argument: value})


@pytest.mark.parametrize("value", [-0.5, float("inf"), float("nan")])
@pytest.mark.parametrize("name", NOISY)
def test_noise_out_of_range(name, value):
    with pytest.raises(ValueError, match="noise_std must be a finite number >= 0"):
        build(name, noise_std=value)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("name", taking("clip_norm"))
def test_clip_norm_out_of_range(name, value):
    with pytest.raises(ValueError, match=r"clip_norm must be > 0 \(inf switches"):
        build(name, clip_norm=value)


@pytest.mark.parametrize("value", [0.0, -0.1, float("inf"), float("nan")])
@pytest.mark.parametrize("name", NAMES)
def test_learning_rate_out_of_range(name, value):
    with pytest.raises(ValueError, match="learning_rate must be a finite number > 0"):
        build(name, learning_rate=value)


@pytest.mark.parametrize("name", NOISY)
def test_legacy_and_wrong_keys(name):
    with pytest.raises(ValueError, match="wrap_key_data"):
        build(name, key=jnp.zeros(2, jnp.uint32))
    with pytest.raises(TypeError, match="key must be"):
        build(name, key=1.5)


@pytest.mark.parametrize("name", RULED)
def test_rule_must_be_an_aggregator(name):
    options = {
        k: v
        for k, v in DEFAULTS.items()
        if k in inspect.signature(ALGORITHMS[name]).parameters
    }
    with pytest.raises(TypeError, match="rule must be an aggregator"):
        ALGORITHMS[name](rule=optax.identity(), **options)


@pytest.mark.parametrize("name", TWO_CHAINS)
def test_without_local_work_only_the_optimizer_runs(name):
    algorithm = build(name, local_work=None)
    jaxfed.as_optimizer(algorithm, N, examples_clipped=True)
    sim = jaxfed.simulate(algorithm, N)
    with pytest.raises(ValueError, match="built without local work"):
        sim.step(sim.init(PROBLEM.params, 0), PROBLEM.shards)


@pytest.mark.parametrize("name", RULED)
def test_budget_the_rule_cannot_carry(name):
    with pytest.raises(ValueError, match=r"0 <= f < n/2, got f=3, n=6"):
        sim = simulation(name, f=3, actual=0)
        sim.step(sim.init(PROBLEM.params, 0), PROBLEM.shards)


@pytest.mark.parametrize("name", ["byz_clip_sgd", "safe_dshb"])
def test_baselines_need_exactly_one_clip(name):
    two = jaxfed.gradient(PROBLEM.loss, clip_norm=1.0)
    with pytest.raises(ValueError, match=f"{name} needs exactly one clip"):
        build(name, local_work=two)
    with pytest.raises(ValueError, match=f"{name} needs exactly one clip"):
        build(name, clip_norm=None)


@pytest.mark.parametrize("name", ["byz_clip_sgd", "cafcor", "safe_dshb", "dp_brem"])
@pytest.mark.parametrize("kind", ["steps", "reducer"])
def test_only_means_of_clipped_gradients_bound_an_example(name, kind):
    if kind == "steps":
        options = dict(steps=2, batch_size=3, clip_norm=1.0)
        work = jaxfed.local_sgd(PROBLEM.loss, optax.sgd(0.1), **options)
    else:
        rule = aggregators.median()
        work = jaxfed.gradient(PROBLEM.loss, clip_norm=1.0, reducer=rule)
    clip_norm = 1.0 if name == "dp_brem" else None
    with pytest.raises(ValueError, match="exactly one clip|clips each example"):
        build(name, local_work=work, clip_norm=clip_norm)
    if clip_norm is None:  # the whole message can be clipped
        assert build(name, local_work=work, clip_norm=1.0).mechanism.unit == "client"


def test_per_example_variant_needs_clipped_examples_and_a_batch_size():
    name = "byz_clip21_sgd2m_plus"
    with pytest.raises(ValueError, match="clips each example"):
        build(name, local_work=jaxfed.gradient(PROBLEM.loss))
    with pytest.raises(ValueError, match="noise_on must be"):
        build(name, noise_on="nowhere")
    whole = jaxfed.gradient(PROBLEM.loss, clip_norm=1.0)
    with pytest.raises(ValueError, match="needs the batch size"):
        build(name, local_work=whole, noise_on="sum")
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        build(name, local_work=whole, noise_on="sum", batch_size=0)
    with pytest.raises(ValueError, match="contradicts local_work.batch_size=3"):
        build(name, noise_on="sum", batch_size=4)


def test_other_errors_of_the_main_algorithm():
    with pytest.raises(ValueError, match="memory must be 'server' or 'client'"):
        build("byz_clip21_sgd2m", memory="cloud")
    wrong = build("byz_clip21_sgd2m", initial={"bias": jnp.zeros(2)})
    with pytest.raises(ValueError, match="initial must have the structure of params"):
        wrong.client.init(PROBLEM.params, 0)
    few = build("byz_clip21_sgd2m", num_clients=4)
    sim = jaxfed.simulate(few, N)
    with pytest.raises(ValueError, match="6 rows but num_clients=4"):
        sim.step(sim.init(PROBLEM.params, 0), PROBLEM.shards)


def test_from_chains_checks_the_rule_and_the_step():
    rule, tx = aggregators.mean(), optax.identity()
    with pytest.raises(TypeError, match="rule must be an aggregator"):
        jaxfed.from_chains(None, tx, (tx,), rule=tx)
    with pytest.raises(ValueError, match="one of the links of server_tx"):
        jaxfed.from_chains(None, tx, (aggregators.mean(),), rule=rule)

    def first_leaf(updates, state, params=None):
        del params
        return updates["bias"], state

    cut = optax.GradientTransformation(lambda p: optax.EmptyState(), first_leaf)
    algorithm = jaxfed.from_chains(
        jaxfed.gradient(PROBLEM.loss), tx, (rule, cut), rule=rule
    )
    sim = jaxfed.simulate(algorithm, N)
    with pytest.raises(ValueError, match="the server's step must have the structure"):
        sim.step(sim.init(PROBLEM.params, 0), PROBLEM.shards)


def test_unknown_names_and_options():
    with pytest.raises(ValueError, match="Did you mean 'byz_sgdm'"):
        make_algorithm("byz_sgmd")
    with pytest.raises(ValueError, match="clip_norm"):
        make_algorithm(
            "byz_clip21_sgd2m", learning_rate=0.1, rule="mean", num_clients=3, key=0
        )
    with pytest.raises(ValueError, match="clip_radius"):
        make_algorithm("byz_sgdm", learning_rate=0.1, rule="mean", clip_radius=1.0)
