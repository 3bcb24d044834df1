# SPDX-License-Identifier: Apache-2.0
"""Outputs of other libraries, and which rule with which options should give them.

``data/vectors.json`` holds numbers only: inputs, parameters and results of named
libraries at named commits. :func:`translate` is the whole mapping to our names.
"""

import json
import pathlib
import re
from typing import NamedTuple

import numpy as np

DATA = json.loads((pathlib.Path(__file__).parent / "data/vectors.json").read_text())
CASES = DATA["cases"]
KRUM, BYZFL, RCL = (
    "calicarpa/krum",
    "LPD-EPFL/byzfl",
    "LPD-EPFL/robust-collaborative-learning",
)

# Cases nobody should expect from us, by name (or repository and name), and why.
DIFFER = {
    "DnC": "not a rule of ours; a random sub-space, and its own test doubts the value",
    "ClippedClustering": "not a rule of ours",
    "CVA_pivot_median": "not a rule of ours: MoNNA about a median instead of a row",
    "IterCVA_pivot_median": "not a rule of ours: the same, repeated",
    "Aksel_n-f": "not a rule of ours: nearest to the lower median, by squared distance",
    "krum_upper_bound": "a bound on deviation / norm, not a robustness coefficient",
    "median_upper_bound": "a bound on deviation / norm, not a robustness coefficient",
    "brute_upper_bound": "a bound on deviation / norm, not a robustness coefficient",
    "bulyan_upper_bound": "a bound on deviation / norm, not a robustness coefficient",
}


class Call(NamedTuple):
    """A case in our words.

    Attributes:
      stages: ``((name, options), ...)``, pre-aggregators first.
      f: declared budget; None for rules without one.
      inputs: the inputs ``[n, d]`` of consecutive calls.
      expected: what each call gives.
      extra: ``weights`` or ``reference`` of the call.
      refused: the condition of its paper that fails, so that the rule refuses the case
        unless it is told ``check=False``; or None.
      tol: absolute tolerance the case itself asks for, or 0.
    """

    stages: tuple
    f: int | None
    inputs: list
    expected: list
    extra: dict
    refused: str | None
    tol: float


def numbers(values):
    return np.array(values, np.float64)  # "inf" and "nan" are read as numbers


def rows(case):
    """Return the input of a case as ``[n, d]``; plain numbers become one column."""
    given = case["input"]
    if isinstance(given, str) and given in DATA["inputs"]:
        given = DATA["inputs"][given]
    elif isinstance(given, str):
        pattern = r"first (\d+) rows of (\w+) plus one row of ([+-]?inf|nan)"
        count, name, value = re.fullmatch(pattern, given).groups()
        x = numbers(DATA["inputs"][name])[: int(count)]
        return np.vstack([x, np.full((1, x.shape[1]), float(value))])
    x = numbers(given)
    return x.reshape(len(x), -1)


def _rule(case, n):
    """Return ``(stages, f, extra)`` of a case, from its name and parameters."""
    p, name = case["params"], case["name"]
    f = p.get("f", p.get("b"))
    krum_1 = {"neighbors": "n-f-1"}
    plain = krum_1 | {"score": "plain"}
    lower = {"middle": "lower"}

    def one(rule, extra=None, **options):
        return ((rule, options),), f, extra or {}

    def weiszfeld(iterations, smoothing, start, extra=None):
        options = {"iterations": iterations, "smoothing": smoothing, "tolerance": 0.0}
        return one("geometric_median", extra, start=start, **options)

    def pull(norm, steps, centre=None):
        extra = {} if centre is None else {"reference": numbers(centre)}
        return one("centered_clipping", extra, clip_norm=norm, iterations=steps)

    match name:
        case "Average" | "Mean":
            return one("mean")
        case "WeightedMean":
            return one("mean", {"weights": numbers(p["weights"])})
        case "Median" | "CM":
            return one("median", **(lower if case["repo"] == KRUM else {}))
        case "TrMean" | "TM":
            return one("trimmed_mean")
        case "TrimmedMean_fraction":
            f = int(p["proportiontocut"] * n)
            return one("trimmed_mean")
        case "GeometricMedian" | "RFA":
            return weiszfeld(p["T"], p["nu"], "origin")
        case "GeometricMedian_converged":
            extra = {"weights": numbers(p["weights"])} if "weights" in p else {}
            return weiszfeld(p["maxiter"], p["eps"], "mean", extra)
        case "CenteredClipping":
            return pull(p["tau"], p["L"])
        case "CenteredClipping_sequence":
            return pull(p["tau"], p["n_iter"])
        case "CenteredClip":
            return pull(p["clip_thresh"], p["L_iter"], p["g_prev"])
        case "Krum":
            return one("krum", **krum_1)
        case "Krum_paper":
            return one("krum")
        case "Krum_nonsquared":
            return one("krum", **plain)
        case "Krum_fourth_power":
            return one("multi_krum", select=p["m"], score="fourth_power")
        case "MultiKrum":
            return one("multi_krum", **krum_1)
        case "MultiKrum_paper":
            return one("multi_krum", select=p["m"])
        case "MultiKrum_nonsquared":
            return one("multi_krum", **plain)
        case "MultiKrum_krumlib":
            return one("multi_krum", select=p.get("m") or n - f - 2, **plain)
        case "Bulyan_krum":
            return one("bulyan")
        case "Bulyan_krumlib":
            options = {"selection": "frozen", "score": "plain", **lower}
            return one("bulyan", select=p.get("m"), **options)
        case "MDA" | "MDA_brute" | "Brute_krumlib":
            return one("mda")
        case "MVA":
            return one("mva")
        case "SMEA" | "SMEA_exact":
            return one("smea")
        case "CAF":
            return one("caf")
        case "MoNNA":
            return one("monna", trusted=p["idx"])
        case "CVA_p2p":
            return one("monna", trusted=p["honest_index"])
        case "Meamed":
            return one("meamed")
        case "Meamed_rcl":
            return one("meamed", **lower)
        case "Phocas":
            return one("phocas")
        case "CGE":
            return one("cge")
        case "FilterL2":
            return one("filter_l2", sigma=p["sigma_filterL2"])
        case "NNM_then_trmean" | "NNM_then_median" | "NNM_then_krum":
            second = {
                "trmean": ("trimmed_mean", {}),
                "median": ("median", {}),
                "krum": ("krum", plain),
            }
            return (("nnm", {}), second[p["gar_second"]]), f, {}
        case "NNM":
            return one("nnm")
        case "Clipping":
            return one("clip", clip_norm=p["c"])
        case "ARC":
            return one("arc")
        case "Bucketing":
            return one("bucketing", size=p["s"])
    raise KeyError(name)


def _refused(case, stages, f, n):
    """Return the condition of its paper that a case violates, if any."""
    name, options = stages[-1]
    krum = name in ("krum", "multi_krum") and options.get("neighbors") != "n-f-1"
    if krum and f and n < 2 * f + 3:
        return "n >= 2 f + 3"
    if name == "bulyan" and f and n < 4 * f + 3:
        return "n >= 4 f + 3"
    return None


def translate(case) -> Call:
    """Return a case in our words; KeyError for a name without a translation."""
    x = rows(case)
    stages, f, extra = _rule(case, len(x))
    inputs, expected = [x], [case["expected"]]
    if "sequence" in case["params"]:
        formulas = {"x": x, "0.5*x+0.25": 0.5 * x + 0.25}
        inputs = [formulas[text] for text in case["params"]["sequence"]]
        expected = case["expected"]
    if not isinstance(case["expected"], str):
        shape = (-1, x.shape[1]) if case["kind"] == "preaggregator" else x.shape[1]
        expected = [numbers(e).reshape(shape) for e in expected]
    refused = _refused(case, stages, f, len(x))
    # That library stops where its objective is flat, 1e-7 from the minimum.
    tol = 1e-6 if case["name"] == "GeometricMedian_converged" else 0.0
    return Call(stages, f, inputs, expected, extra, refused, case.get("tol", tol))


def differs(case) -> str | None:
    """Return why a case is not one of ours, None if it is to be reproduced."""
    if case["name"] == "Krum_fourth_power" and case["params"]["m"] > 1:
        return "the library returns the sum of the selected rows, not their mean"
    if case["repo"] == BYZFL and case["name"] in ("SMEA", "CAF"):
        if not re.search("independent|does not matter", case.get("note", "")):
            return "one power step from a random vector; see smea(power_iters=1)"
    if case["kind"] == "aggregator_nonfinite" and not np.all(
        np.isfinite(numbers(case["expected"]))
    ):
        return "our rules return something finite where the library does not"
    return DIFFER.get(case["name"])


def label(case):
    given = case["input"] if isinstance(case["input"], str) else "rows"
    params = ",".join(
        f"{k}={v}" for k, v in case["params"].items() if not isinstance(v, list)
    )
    return f"{case['repo'].split('/')[1]}-{case['name']}({params})-{given[:30]}"
