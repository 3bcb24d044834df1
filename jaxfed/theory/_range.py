# SPDX-License-Identifier: Apache-2.0
"""One check for all formulas: of NaN, and of numbers that float64 cannot hold."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


def in_float64(formula: Callable[P, R]) -> Callable[P, R]:
    """Make a formula raise a ValueError for NaN and where float64 overflows."""
    signature = inspect.signature(formula)

    @functools.wraps(formula)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs).arguments
        for name, x in given.items():
            if np.isnan(_numbers(x)).any():
                raise ValueError(f"{name} must not be NaN, got {name}={x}.")
        error, result = None, None
        try:
            with np.errstate(over="raise", divide="raise", invalid="raise"):
                result = formula(*args, **kwargs)
        except ArithmeticError as raised:
            error = raised
        if error or (isinstance(result, float) and math.isnan(result)):
            decades, name = _furthest(given)
            raise ValueError(
                f"{formula.__name__} leaves the range of float64: {name} is too "
                f"extreme, got about {name}=1e{decades:+.0f}. Rescale the problem."
            ) from error
        return result  # pyrefly: ignore

    return call


def _numbers(x: Any) -> np.ndarray:
    """Return what can be compared of an argument, as an array."""
    try:
        return np.zeros(0) if x is None else np.asarray(x, float)
    except (TypeError, ValueError, OverflowError):
        return np.zeros(0)


def _furthest(given):
    """Return the decimal exponent furthest from 0, and whose it is."""
    owner = given.get("self")
    if dataclasses.is_dataclass(owner):
        given = given | vars(owner)
    found = [(0.0, "an argument")]
    for name, x in given.items():
        if isinstance(x, int) and x:  # of any size
            found.append((math.log10(abs(x)), name))
        else:
            size = np.abs(_numbers(x))
            size = size[np.isfinite(size) & (size > 0)]
            found += [(float(e), name) for e in np.log10(size)]
    return max(found, key=lambda entry: abs(entry[0]))
