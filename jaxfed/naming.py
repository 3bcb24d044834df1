# SPDX-License-Identifier: Apache-2.0
"""Build aggregators, attacks and algorithms from text, for configs and command line."""

from jaxfed import _keys, _registry, aggregators, algorithms, attacks, preaggregators
from jaxfed._base import Aggregator, Attack, FedAlgorithm

RULES = {
    name: getattr(aggregators, name)
    for name in aggregators.__all__
    if name != "compose"
}
PREAGGREGATORS = {
    name: getattr(preaggregators, name) for name in preaggregators.__all__
}
ATTACKS = {name: getattr(attacks, name) for name in attacks.__all__}
# Folded into a method's key: the randomness of its rule is not that of its noise.
_RULE = 1

ALGORITHMS = {name: getattr(algorithms, name) for name in algorithms.METHODS}


def make_aggregator(spec, num_byzantine=0, **options) -> Aggregator:
    """Build a rule, or pre-aggregators and a rule, from text.

    Args:
      spec: names joined by ``+``, applied left to right, the last one reduces; options
        in brackets: ``"nnm+trimmed_mean"``, ``"rule(option=value)"``.
      num_byzantine: f, given to every stage that takes it; may be traced.
      **options: given to every stage that takes them; one that none takes raises. A
        ``key`` is folded with the number of the stage, and may be given always.

    Returns:
      Aggregator; stages share one Gram matrix, see
      :func:`jaxfed.aggregators.compose`.

    Raises:
      ValueError: for unknown names (listing the known ones), unreadable text, or
        options that no stage takes.

    Example:
      >>> import jax.numpy as jnp
      >>> rule = make_aggregator("nnm+median", num_byzantine=1)
      >>> x = jnp.array([[0.0], [1.0], [2.0], [3.0], [100.0]])
      >>> rule.update(x, rule.init(x[0]))[0].tolist()
      [1.5]
    """
    stages = _registry.parse(spec)
    built, used = [], set()
    for i, (name, own) in enumerate(stages):
        last = i == len(stages) - 1
        table, what = (RULES, "rule") if last else (PREAGGREGATORS, "pre-aggregator")
        if name in (PREAGGREGATORS if last else RULES):
            raise ValueError(
                f"{name!r} is in the wrong place in {spec!r}: pre-aggregators "
                f"({', '.join(PREAGGREGATORS)}) come first, one rule "
                f"({', '.join(RULES)}) ends the chain."
            )
        factory = _registry.lookup(table, name, what)
        given = {"num_byzantine": num_byzantine, **options}
        if "key" in given:
            given["key"] = _keys.fold(_keys.as_key(given["key"]), i)
        taken = {k: v for k, v in given.items() if k in _registry.accepted(factory)}
        used |= taken.keys()
        built.append(_registry.call(factory, name, taken | own))
    unused = options.keys() - used - {"key"}
    if unused:
        raise ValueError(
            f"no stage of {spec!r} takes the option(s) {', '.join(sorted(unused))}."
        )
    return aggregators.compose(*built)


def make_attack(spec, **options) -> Attack:
    """Build an attack from text, e.g. ``make_attack("ipm", scale=10.0)``.

    Args:
      spec: a name, with options in brackets if wanted: ``"ipm(scale=10)"``.
      **options: arguments of the attack's factory.

    Returns:
      Attack.

    Raises:
      ValueError: for unknown names (listing the known ones) or options.
    """
    stages = _registry.parse(spec)
    if len(stages) != 1:
        raise ValueError(f"an attack is one name, got {spec!r}.")
    name, own = stages[0]
    factory = _registry.lookup(ATTACKS, name, "attack")
    return _registry.call(factory, name, options | own)


def make_algorithm(name, **options) -> FedAlgorithm:
    """Build a method from its name.

    Args:
      name: e.g. ``"byz_clip21_sgd2m"``.
      **options: arguments of the method's factory. ``rule`` may be text, built by
        :func:`make_aggregator` with the options ``num_byzantine`` and ``key``.

    Returns:
      FedAlgorithm.

    Raises:
      ValueError: for unknown names (listing the known ones), unknown or missing
        options.
    """
    factory = _registry.lookup(ALGORITHMS, name, "algorithm")
    if isinstance(options.get("rule"), str):
        budget = options.pop("num_byzantine", 0)
        random = {}
        if options.get("key") is not None:
            random["key"] = _keys.fold(_keys.as_key(options["key"]), _RULE)
        if "key" not in _registry.accepted(factory):
            options.pop("key", None)
        options["rule"] = make_aggregator(options["rule"], budget, **random)
    return _registry.call(factory, name, options)
