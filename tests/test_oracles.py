# SPDX-License-Identifier: Apache-2.0
"""The oracles themselves, against other libraries and numbers found by hand."""

import inspect

import numpy as np
import oracles
import peer_vectors
import pytest

REPRODUCED = [c for c in peer_vectors.CASES if not peer_vectors.differs(c)]


def stage(name, options, x, f, extra):
    """Apply the oracle of one stage."""
    oracle = {"clip": oracles.clip_rows}.get(name) or getattr(oracles, name)
    takes = inspect.signature(oracle).parameters
    return oracle(x, *([f] if "f" in takes else []), **options, **extra)


def near_zero(x, y):
    """Sum of the unit vectors from y to the rows: 0 at the geometric median."""
    away = x - y
    return (away / np.linalg.norm(away, axis=1, keepdims=True)).sum(0)


@pytest.mark.parametrize("case", REPRODUCED, ids=peer_vectors.label)
def test_oracles_agree_with_other_libraries(case):
    call = peer_vectors.translate(case)
    extra = dict(call.extra)
    if case["name"] == "Bucketing":
        extra["order"] = case["params"]["row_order_used"]
    if call.stages[-1][0] == "centered_clipping":
        extra["centre"] = extra.pop("reference", np.zeros(call.inputs[0].shape[1]))
    for x, expected in zip(call.inputs, call.expected, strict=True):
        out = x
        for name, options in call.stages:
            out = stage(name, options, out, call.f, extra)
        if "centre" in extra:
            extra["centre"] = out
        if isinstance(expected, str):  # a property instead of numbers
            out, expected = near_zero(x, out), np.zeros(x.shape[1])
        tol = max(1e-8, call.tol)
        np.testing.assert_allclose(out, expected, rtol=1e-8, atol=tol)


COLUMN = np.array([[0.0], [1.0], [2.0], [4.0], [100.0]])


@pytest.mark.parametrize(
    ("oracle", "x", "options", "expected"),
    [
        # The median is 2; 0 and 4 tie for the last place and the lower wins.
        (oracles.meamed, COLUMN, {"f": 2}, 1.0),
        # Of 0, 1, 2, 4 the middle is 1.5 or 1; two and three values are kept.
        (oracles.meamed, COLUMN[:4], {"f": 2}, 1.5),
        (oracles.meamed, COLUMN[:4], {"f": 1, "middle": "lower"}, 1.0),
        # The trimmed means are 7 / 3 and 5 / 2.
        (oracles.phocas, COLUMN, {"f": 1}, 7 / 4),
        (oracles.phocas, np.array([[0.0], [2.0], [3.0], [5.4]]), {"f": 1}, 5 / 3),
        (oracles.sign_majority, COLUMN - 2, {}, 0.0),
        (oracles.sign_majority, COLUMN - 3, {}, -1.0),
        # Two neighbours count: squared scores 5, 2, 5, 13, ...
        (oracles.krum, COLUMN, {"f": 1}, 1.0),
        (oracles.multi_krum, COLUMN, {"f": 1, "select": 3}, 1.0),
        (oracles.multi_krum, COLUMN, {"f": 1}, 7 / 4),
        (oracles.monna, COLUMN, {"f": 2, "trusted": 4}, 106 / 3),
        (oracles.cge, COLUMN - 3, {"f": 2}, -2 / 3),
        # {0, 1, 2} has the least diameter, variance and eigenvalue.
        (oracles.mda, COLUMN, {"f": 2}, 1.0),
        (oracles.mva, COLUMN, {"f": 2}, 1.0),
        (oracles.smea, COLUMN, {"f": 2}, 1.0),
        # Rows {0, 1} and {1, 2} tie and the first wins.
        (oracles.mda, COLUMN[:3], {"f": 1}, 0.5),
        (oracles.smea, COLUMN[:3], {"f": 1}, 0.5),
        # The whole row of equal values is the minimiser.
        (oracles.geometric_median, np.repeat(COLUMN, [1, 1, 9, 1, 1], 0), {}, 2.0),
        (oracles.geometric_median, COLUMN, {"weights": [0, 0, 0, 1, 0]}, 4.0),
        (oracles.centered_clipping, COLUMN, {"centre": [1.0], "clip_norm": 3.0}, 2.2),
    ],
)
def test_by_hand(oracle, x, options, expected):
    np.testing.assert_allclose(oracle(x, **options), [expected], atol=1e-5)


def test_bulyan_by_hand():
    # Five of seven rows are picked, a central one first and never the far one; of them
    # the three nearest to their median are averaged.
    x = np.array([[0.0], [1.0], [2.1], [3.3], [4.6], [6.0], [99.0]])
    picked, left = [], list(range(7))
    for _ in range(5):
        scores = oracles.krum_scores(x[left], 1)
        picked.append(left.pop(scores.index(min(scores))))
    assert picked[0] in (2, 3) and 6 not in picked
    middle = np.median(x[picked, 0])
    kept = sorted(x[picked, 0], key=lambda v: abs(v - middle))[:3]
    np.testing.assert_allclose(oracles.bulyan(x, 1), [np.mean(kept)])


def test_mixing_golden_numbers():
    x = np.array([[0, 0], [1, 0], [0, 1], [1, 1], [10, 10], [10, -10]], float)
    mixed = oracles.nnm(x, 2)
    np.testing.assert_allclose(mixed, [[0.5, 0.5]] * 4 + [[3, 3], [3, -2.25]])
    np.testing.assert_allclose(oracles.median(mixed), [0.5, 0.5])


def test_reference_rules_by_hand():
    x = np.array([[3.0, 4.0], [-3.0, 4.0], [0.0, 0.0], [np.nan, 1.0]])
    r = np.array([2.0, 0.0])
    # Only the first row points along r: cosine 0.6, rescaled to norm 2.
    np.testing.assert_allclose(oracles.fltrust(x, r), [1.2, 1.6])
    np.testing.assert_allclose(oracles.fltrust(x, r, "projected"), [0.75, 0])
    np.testing.assert_allclose(oracles.fltrust(-x[:1], r), [0, 0])


NO_F = (oracles.median, oracles.sign_majority, oracles.geometric_median)
F_ZERO = (
    *(oracles.meamed, oracles.phocas, oracles.multi_krum, oracles.bulyan),
    *(oracles.monna, oracles.mda, oracles.mva, oracles.smea, oracles.caf),
    *(oracles.cge, lambda x, f: oracles.filter_l2(x, f, 0.1)),
)
X = np.random.default_rng(0).normal(size=(11, 4))


@pytest.mark.parametrize("oracle", F_ZERO)
def test_without_byzantine_clients_it_is_the_mean(oracle):
    np.testing.assert_allclose(oracle(X, 0), X.mean(0), atol=1e-12)
    np.testing.assert_allclose(oracle(X[:1], 0), X[0], atol=1e-12)


@pytest.mark.parametrize("oracle", (*F_ZERO, oracles.krum))
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_bad_rows_are_far_away(oracle, value):
    x = X.copy()
    x[3], x[7, 1] = value, -value
    out = oracle(x, 2)
    honest = np.delete(x, [3, 7], 0)
    assert np.all(out >= honest.min(0)) and np.all(out <= honest.max(0))
    x[5], x[6] = value, value
    x[8], x[9], x[10], x[0] = value, value, value, value
    assert not np.all(np.abs(oracle(x, 2)) < 1e3)  # NaN or far away


def test_smea_in_one_dimension_is_a_window():
    rng = np.random.default_rng(1)
    for n, f in [(5, 2), (8, 3), (11, 2)]:
        x = np.sort(rng.normal(size=(n, 1)), axis=0)
        windows = [x[i : i + n - f] for i in range(f + 1)]
        best = min(windows, key=lambda w: w.var())
        order = rng.permutation(n)
        np.testing.assert_allclose(oracles.smea(x[order], f), best.mean(0))


def test_caf_stops_however_far_a_row_is():
    rng = np.random.default_rng(2)
    worst = 0
    for trial in range(200):
        x = rng.normal(size=(10, 5))
        x[:2] += rng.normal(size=(2, 5)) * 10.0 ** rng.integers(0, 9)
        out, passes = oracles.caf_with_passes(x, 2)
        worst = max(worst, passes)
        spread = oracles.top_eigenvalue(x[2:]) ** 0.5
        assert np.linalg.norm(out - x[2:].mean(0)) <= spread, trial
    assert 2 <= worst <= 4


def test_clipping_before_the_rule():
    x = np.array([[3.0, 4.0], [0.3, 0.4], [np.inf, 0], [6.0, 8.0], [0, 1]])
    np.testing.assert_allclose(
        oracles.clip_rows(x, 2.5), [[1.5, 2], [0.3, 0.4], [0, 0], [1.5, 2], [0, 1]]
    )
    # floor(2 * 1 * 4 / 5) = 1 row is clipped, the one that is not finite.
    np.testing.assert_allclose(oracles.arc(x, 1)[[0, 2, 3]], [[3, 4], [0, 0], [6, 8]])
    # floor(2 * 2 * 3 / 5) = 2 rows are clipped, to the norm of the third.
    np.testing.assert_allclose(oracles.arc(x, 2)[[0, 2, 3]], [[3, 4], [0, 0], [3, 4]])


def test_bucketing_keeps_the_short_last_bucket():
    out = oracles.bucketing(COLUMN, [4, 0, 3, 1, 2], 2)
    np.testing.assert_allclose(out, [[50], [2.5], [2]])
