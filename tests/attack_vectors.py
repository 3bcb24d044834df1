# SPDX-License-Identifier: Apache-2.0
"""Outputs of other libraries' attacks, and which attack of ours should give them.

``data/attack_vectors.json`` holds numbers only: inputs, parameters and results of
named libraries at named commits. Their inputs are the honest messages alone.
"""

import json
import pathlib
from typing import NamedTuple

import numpy as np

DATA = json.loads(
    (pathlib.Path(__file__).parent / "data/attack_vectors.json").read_text()
)
CASES = DATA["cases"]

# Cases nobody should expect from us, by name, and why.
DIFFER = {
    "LabelFlipping": "the library averages gradients of flipped labels on the wire; "
    "ours changes the attackers' data, which then run the honest code",
}
_RULES = {
    "TrMean": "trimmed_mean",
    "Median": "median",
    "Krum": "krum(neighbors=n-f-1)",
    "GeometricMedian": "geometric_median(iterations=3,smoothing=0.1,tolerance=0.0,"
    "start=origin)",
    "NNM": "nnm",
    "Clipping": "clip(clip_norm=2.0)",
    "ARC": "arc",
}


class Call(NamedTuple):
    """A case in our words.

    Attributes:
      honest: ``[h, d]``.
      attack: text for ``make_attack``; None for a searched one.
      sign: a searched attack sends ``anchor + sign * strength * direction``: -1 for
        inner products (from 0 along the mean), 1 for ALIE (from the mean along the
        standard deviation).
      rule: text for ``make_aggregator``, what a search runs through.
      f: attackers, and budget of the rule.
      strength: where the search ends, None where it is not told.
      tied: whether all large strengths do the same (the message is clipped), so that
        rounding decides at which of them the search ends.
    """

    honest: np.ndarray
    attack: str | None
    sign: int = 0
    rule: str = ""
    f: int = 1
    strength: float | None = None
    tied: bool = False


def honest(case):
    given = case["input"]
    return np.array(DATA["inputs"][given] if isinstance(given, str) else given, float)


def translate(case) -> Call:
    """Return a case in our words; KeyError for a name without a translation."""
    p, name = case["params"], case["name"]
    x = honest(case)
    match name:
        case "SignFlipping":
            return Call(x, "bit_flip")
        case "InnerProductManipulation":
            return Call(x, f"ipm(scale={p['tau']})")
        case "ALittleIsEnough":  # it adds, we subtract
            return Call(x, f"alie(z={-p['tau']})")
        case "Mimic":  # it copies a row by index, `copies` the first
            return Call(np.roll(x, -p["epsilon"], axis=0), "copies")
        case "Inf":
            return Call(x, "inf")
        case "Optimal_InnerProductManipulation" | "Optimal_ALittleIsEnough":
            assert (p["evals"], p["start"], p["delta"], p["ratio"]) == (20, 0, 10, 0.8)
            stages = [_RULES[s] for s, _ in p["pre_agg_list"]] + [_RULES[p["agg"][0]]]
            sign = 1 if name.endswith("Enough") else -1
            tau = case.get("recovered_tau")
            tied = sign < 0 and stages[0].startswith("clip") and tau is not None
            return Call(x, None, sign, "+".join(stages), p["f"], tau, tied)
    raise KeyError(name)


def label(case):
    given = case["input"] if isinstance(case.get("input"), str) else "rows"
    params = ",".join(f"{k}={v}" for k, v in case["params"].items() if k != "evals")
    return f"{case['name']}({params})-{given}"[:90]
