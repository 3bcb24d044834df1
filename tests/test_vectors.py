# SPDX-License-Identifier: Apache-2.0
"""Our rules against the stored outputs of other libraries.

All cases run in float32 through one program for each rule with its options: absent
clients and columns of zeros fill up the inputs, f is traced. One case of each also runs
as it is, with a Python f, in float64.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import peer_vectors
import pytest
from toys import quick_jit

import jaxfed
from jaxfed import preaggregators

REPRODUCED = [c for c in peer_vectors.CASES if not peer_vectors.differs(c)]
ROWS, COLUMNS = 12, 8  # the largest input


def text(stages):
    """Write stages as the text that ``make_aggregator`` reads."""
    return "+".join(
        name + "(" + ",".join(f"{k}={v}" for k, v in options.items()) + ")"
        for name, options in stages
    )


def build(stages, f):
    """Return the link of a case: a rule by text, or a pre-aggregator."""
    name, options = stages[-1]
    if name not in preaggregators.__all__:
        return jaxfed.make_aggregator(text(stages), num_byzantine=f)
    factory = getattr(preaggregators, name)
    takes = inspect.signature(factory).parameters
    given = {"num_byzantine": f, "key": jax.random.key(0)}
    return factory(**{k: v for k, v in given.items() if k in takes} | options)


def outputs(stages, f, inputs, mask, extra):
    """Return what a rule gives for consecutive inputs."""
    link = build(stages, f)
    state, outs = link.init(inputs[0][0]), []
    for x in inputs:
        out, state = link.update(x, state, x[0], mask=mask, **extra)
        outs.append(out)
    return outs


@functools.cache
def padded_program(spec):
    case = next(c for c in REPRODUCED if spec == text(peer_vectors.translate(c).stages))
    return quick_jit(functools.partial(outputs, peer_vectors.translate(case).stages))


def run_as_it_is(call):
    program = quick_jit(functools.partial(outputs, call.stages, call.f or 0))
    return program([jnp.asarray(x) for x in call.inputs], None, call.extra)


def run_padded(call):
    n, d = call.inputs[0].shape

    def pad(x, *shape):
        x = np.asarray(x, np.float32)
        return np.pad(x, [(0, k - m) for k, m in zip(shape, x.shape, strict=True)])

    sizes = {"weights": ROWS, "reference": COLUMNS}
    extra = {k: pad(v, sizes[k]) for k, v in call.extra.items()}
    inputs = [pad(x, ROWS, COLUMNS) for x in call.inputs]
    program = padded_program(text(call.stages))
    outs = program(jnp.int32(call.f or 0), inputs, np.arange(ROWS) < n, extra)
    return [np.asarray(out)[..., :d] for out in outs]


def compare(call, outs, tol):
    for x, expected, out in zip(call.inputs, call.expected, outs, strict=True):
        out = np.asarray(out, np.float64)
        if isinstance(expected, str):  # unit vectors to the rows add up to 0
            away = x - out
            out = (away / np.linalg.norm(away, axis=1, keepdims=True)).sum(0)
            expected = np.zeros_like(out)
        if expected.ndim == 2:
            out = out[: len(expected)]
        size = max(1.0, np.abs(x[np.isfinite(x)]).max())
        atol = max(tol * size, call.tol)
        np.testing.assert_allclose(out, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("case", REPRODUCED, ids=peer_vectors.label)
def test_other_libraries_are_reproduced(case):
    call = peer_vectors.translate(case)
    if call.refused:
        with pytest.raises(ValueError, match="num_byzantine"):
            run_as_it_is(call)
        *pres, (name, options) = call.stages
        call = call._replace(stages=(*pres, (name, options | {"check": False})))
        compare(call, run_as_it_is(call), 1e-5)
    elif case["name"] == "Bucketing":
        call = reordered(case, call)
        compare(call, run_as_it_is(call), 1e-5)
    else:
        compare(call, run_padded(call), 1e-5)


def first_of_each():
    """Return one case for each rule and set of options."""
    cases = {}
    for case in REPRODUCED:
        call = peer_vectors.translate(case)
        if not call.refused and case["name"] != "Bucketing":
            cases.setdefault(text(call.stages), case)
    return list(cases.values())


@pytest.mark.parametrize("case", first_of_each(), ids=peer_vectors.label)
def test_other_libraries_are_reproduced_in_float64(case):
    call = peer_vectors.translate(case)
    with jax.enable_x64(True):
        compare(call, run_as_it_is(call), 1e-9)


def reordered(case, call):
    """Order the rows so that our random buckets hold the rows of the case's."""
    n, order = len(call.inputs[0]), case["params"]["row_order_used"]
    ours = run_as_it_is(call._replace(inputs=[np.eye(n, dtype=np.float32)]))[0]
    x, taken = np.empty_like(call.inputs[0]), 0
    for bucket in np.asarray(ours):
        members = np.flatnonzero(bucket)
        x[members] = call.inputs[0][order[taken : taken + len(members)]]
        taken += len(members)
    return call._replace(inputs=[x])


def test_every_case_is_checked_or_has_a_reason_not_to_be():
    for case in peer_vectors.CASES:
        reason = peer_vectors.differs(case)
        if reason is None:
            peer_vectors.translate(case)
        else:
            assert len(reason) > 10
    names = {case["name"] for case in peer_vectors.CASES}
    assert names >= set(peer_vectors.DIFFER)
    assert len(REPRODUCED) > 0.9 * len(peer_vectors.CASES)
