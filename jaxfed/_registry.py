# SPDX-License-Identifier: Apache-2.0
"""Naming by text: look up, suggest, parse, call."""

import ast
import difflib
import inspect
import re

_STAGE = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\((.*)\))?\s*", re.DOTALL)


def lookup(table, name, what):
    """Return ``table[name]``, or raise naming the known names and the nearest one."""
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), table, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"unknown {what} {name!r}.{hint} Known: {', '.join(sorted(table))}."
    )


def parse(spec):
    """Parse ``"a+b(x=1,y=text)"`` into ``[("a", {}), ("b", {"x": 1, "y": "text"})]``.

    Raises:
      TypeError: if ``spec`` is not a string.
      ValueError: if it does not follow the form above.
    """
    if not isinstance(spec, str):
        raise TypeError(f"spec must be a string like 'nnm+median', got {spec!r}.")
    stages = []
    for text in re.split(r"\+(?![^(]*\))", spec):
        match = _STAGE.fullmatch(text)
        if not match:
            raise ValueError(
                f"cannot read {text!r} in {spec!r}: write stages as name or "
                "name(option=value), joined by '+', e.g. 'nnm+trimmed_mean'."
            )
        options = {}
        for item in filter(None, (match.group(2) or "").split(",")):
            key, equals, value = (part.strip() for part in item.partition("="))
            if not (equals and key.isidentifier() and value):
                raise ValueError(
                    f"cannot read option {item!r} in {spec!r}: write option=value."
                )
            if key in options:
                raise ValueError(f"option {key!r} is given twice in {spec!r}.")
            options[key] = _value(value)
        stages.append((match.group(1), options))
    return stages


def _value(text):
    constants = {"inf": float("inf"), "true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def accepted(factory):
    """Return the names of a factory's arguments."""
    return set(inspect.signature(factory).parameters)


def check(factory, name, options):
    """Raise a clear ValueError for an option that a factory does not take."""
    parameters = inspect.signature(factory).parameters
    for key in options:
        lookup(parameters, key, f"option of {name!r}:")


def call(factory, name, options):
    """Call a factory, turning unknown or missing options into a clear ValueError."""
    check(factory, name, options)
    signature = inspect.signature(factory)
    missing = [
        p.name
        for p in signature.parameters.values()
        if p.default is p.empty and p.name not in options
    ]
    if missing:
        raise ValueError(f"{name!r} needs {', '.join(f'{m}=' for m in missing)}.")
    return factory(**options)
