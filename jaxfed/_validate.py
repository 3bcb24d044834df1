# SPDX-License-Identifier: Apache-2.0
"""Checks of what users pass in: Python values now, shapes at trace time."""

import math
import numbers

import jax
import jax.numpy as jnp


def is_concrete(x) -> bool:
    """Whether ``x`` is a plain number that can be checked now."""
    return isinstance(x, numbers.Real) and not isinstance(x, jax.core.Tracer)


def is_zero(x) -> bool:
    """Whether ``x`` is known to be 0 now."""
    return is_concrete(x) and x == 0


def _number(name, x):
    """Return ``x`` as a float if it can be checked, None if it is traced."""
    if isinstance(x, jax.core.Tracer) or callable(x):
        return None
    if isinstance(x, (bool, str, bytes)) or getattr(x, "shape", ()) != ():
        raise TypeError(f"{name} must be a number, got {x!r}.")
    try:
        return float(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {x!r}.") from None


def nonnegative(name, x, *, finite=True):
    """Raise unless ``x >= 0`` (and finite); traced values pass."""
    value = _number(name, x)
    if value is not None and not (value >= 0 and (math.isfinite(value) or not finite)):
        bound = "a finite number >= 0" if finite else ">= 0"
        raise ValueError(f"{name} must be {bound}, got {name}={x}.")
    return x


def positive(name, x, *, finite=True):
    """Raise unless ``x > 0`` (and finite); traced values and schedules pass."""
    value = _number(name, x)
    if value is not None and not (value > 0 and (math.isfinite(value) or not finite)):
        bound = "a finite number > 0" if finite else "> 0 (inf switches it off)"
        raise ValueError(f"{name} must be {bound}, got {name}={x}.")
    return x


def clip_norm(x):
    """Raise unless it is a clip radius, whose square is a float32; traced ones pass."""
    return squarable("clip_norm", positive("clip_norm", x, finite=False))


def squarable(name, x):
    """Raise if a length is so short that its square vanishes; traced ones pass."""
    value = _number(name, x)
    if value is not None and value < 1e-15:
        raise ValueError(
            f"{name} must be at least 1e-15, got {name}={x}: squares of shorter "
            "updates vanish in float32. Scale the loss instead."
        )
    return x


def unit_interval(name, x, *, closed_right=False):
    """Raise unless ``0 <= x < 1`` (``<= 1`` if ``closed_right``)."""
    value = _number(name, x)
    if value is not None and not (0 <= value < 1 or (closed_right and value == 1)):
        end = "<= 1" if closed_right else "< 1"
        raise ValueError(f"{name} must satisfy 0 <= {name} {end}, got {name}={x}.")
    return x


# Counters on the device are int32.
LARGEST = 2**31 - 1


def count(name, x, *, minimum=1, maximum=None):
    """Raise unless ``x`` is a Python integer from ``minimum`` to ``maximum``."""
    if isinstance(x, bool) or not isinstance(x, numbers.Integral):
        raise TypeError(f"{name} must be a Python int, got {x!r}.")
    if x < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {name}={x}.")
    if maximum is not None and x > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {name}={x}.")
    return int(x)


def budget(f, *, optional=False):
    """Check a declared number of Byzantine clients; may be traced."""
    if f is None and optional:
        return f
    if hasattr(f, "dtype"):
        if getattr(f, "shape", ()) != () or not jnp.issubdtype(f.dtype, jnp.integer):
            raise TypeError(f"num_byzantine must be an integer scalar, got {f!r}.")
        if isinstance(f, jax.core.Tracer):
            return f
        f = int(f)
    return count("num_byzantine", f, minimum=0)


def majority(f, n):
    """Raise unless ``2 f < n``; a traced f passes (the rule then returns NaN)."""
    if is_concrete(f) and 2 * f >= n:
        raise ValueError(
            f"num_byzantine must satisfy 0 <= f < n/2, got f={f}, n={n}. Lower "
            "num_byzantine or add clients: no rule can outvote a majority."
        )


def flags(name, x, n):
    """Return ``x`` as a bool array ``[n]``, one flag for each client; None stays."""
    if x is None:
        return None
    x = jnp.asarray(x)
    if x.dtype != bool:
        raise TypeError(
            f"{name} must be bool, got {x.dtype}: compare, e.g. {name} > 0."
        )
    if x.shape != (n,):
        raise ValueError(
            f"{name} must have one entry for each of the {n} clients, got shape "
            f"{x.shape}."
        )
    return x


def stacked(updates, params=None):
    """Check a stacked tree by shapes only and return its number of clients."""
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    if not leaves:
        raise ValueError("updates has no array leaves: there is nothing to aggregate.")
    n = None
    for path, leaf in leaves:
        where = f"updates{jax.tree_util.keystr(path)}"
        shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"{where} must be floating point, got {dtype}. Cast integer leaves "
                "before aggregating, or keep them out of the parameters."
            )
        if not shape or shape[0] == 0:
            raise ValueError(
                f"{where} must have a leading client axis of size >= 1, got shape "
                f"{shape}. Stack one update per client along axis 0."
            )
        n = shape[0] if n is None else n
        if shape[0] != n:
            raise ValueError(
                f"all leaves must have the same client axis: {where} has {shape[0]} "
                f"rows, an earlier leaf has {n}."
            )
    if params is not None:
        one = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x)),
            updates,
        )
        like(one, params, "one client's update")
    return n


def like(tree, params, what):
    """Raise unless ``tree`` has the structure and leaf shapes of ``params``."""
    if jax.tree.structure(tree) != jax.tree.structure(params):
        raise ValueError(
            f"{what} must have the structure of params: got "
            f"{jax.tree.structure(tree)}, params has {jax.tree.structure(params)}."
        )
    for (path, leaf), p in zip(
        jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(params), strict=True
    ):
        if jnp.shape(leaf) != jnp.shape(p):
            raise ValueError(
                f"{what} must be shaped like params: leaf "
                f"{jax.tree_util.keystr(path) or '(root)'} has shape "
                f"{jnp.shape(leaf)}, params has {jnp.shape(p)}."
            )


def choice(name, x, known):
    """Raise unless ``x`` is one of the texts in ``known``."""
    if x not in known:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, known))}, got {x!r}."
        )


def weights(x, n):
    """Return the clients' weights as floats ``[n]``; raise for another shape."""
    x = jnp.asarray(x, float)
    if x.shape != (n,):
        raise ValueError(
            f"weights must have one entry for each of the {n} clients, got shape "
            f"{x.shape}."
        )
    return x
