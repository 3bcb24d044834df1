# SPDX-License-Identifier: Apache-2.0
"""How fast the rules are: against memory, against NumPy's GEMM and against ByzFL.

Everybody gets the same float32 arrays in one process with two threads; repeats are
interleaved, so that noise hits all alike. Columns of the table:

- ours: median and quartiles of a compiled call; compile: tracing and XLA, once;
  temp: peak temporary memory of that program;
- x read: against reading the array once (``ones @ x``), the physical limit;
- x Gram: against NumPy ``x @ x.T`` and one read (rules), or ``x @ x.T`` and ``W @ x``
  (pre-aggregators), for rules of pairwise inner products;
- x base: against the program named in "against" (the rule without NNM in front, the
  forward pass, float32 input, one array);
- speed-up: each peer's median over ours, the first one counts; agrees: largest
  difference over the largest entry of its output.

    python benchmarks/aggregators.py --compare byzfl --json aggregators.jsonl
    python benchmarks/aggregators.py --compare byzfl --cases "krum.*n=20 "

ByzFL: ``pip install --no-deps byzfl==0.0.11``, beside the extra ``bench``.
"""

import argparse
import functools
import json
import os
import platform
import re
import subprocess
import sys
import time
import types
from typing import NamedTuple

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

import jaxfed
from jaxfed import naming

THREADS = int(os.environ["OMP_NUM_THREADS"])
SLOW = 5.0  # seconds; a first run longer than this counts, there is no warm-up
PAUSE = 0.03  # seconds; idle worker threads of the last library stop spinning
TOLERANCE = 1e-4  # of the largest entry

COORDINATEWISE = ("trimmed_mean", "median", "meamed", "phocas", "sign_majority", "mean")
KRUM, MULTI_KRUM = (f"{r}(neighbors=n-f-1)" for r in ("krum", "multi_krum"))
CLIPPING = "centered_clipping(clip_norm=100.0)"
WEISZFELD_3 = "geometric_median(iterations=3,smoothing=0.1,start=origin)"
PEERS = {  # our spec: ByzFL's class with the same settings
    "trimmed_mean": lambda b, f: b.TrMean(f),
    "median": lambda b, f: b.Median(),
    "meamed": lambda b, f: b.Meamed(f),
    KRUM: lambda b, f: b.Krum(f),
    MULTI_KRUM: lambda b, f: b.MultiKrum(f),
    "mda": lambda b, f: b.MDA(f),
    "smea": lambda b, f: b.SMEA(f),
    "monna": lambda b, f: b.MoNNA(f),
    "caf": lambda b, f: b.CAF(f),
    "geometric_median": lambda b, f: b.GeometricMedian(nu=0.1, T=3),
    WEISZFELD_3: lambda b, f: b.GeometricMedian(nu=0.1, T=3),
    CLIPPING: lambda b, f: b.CenteredClipping(L=1, tau=100.0),
    "nnm": lambda b, f: b.NNM(f),
    "arc": lambda b, f: b.ARC(f),
}
WRITES = ("arc",)  # ByzFL's writes into its argument
DIFFERS = {  # by definition
    "smea": "its eigenvalues are one random power step",
    "caf": "its eigenvectors are one random power step",
    "geometric_median": "it stops after 3 steps from the origin",
    "meamed": "it has no rule for values equally near the median up to rounding",
}
GRAM = (KRUM, MULTI_KRUM, "monna", "nnm", WEISZFELD_3, "geometric_median", "caf")
GRAM += (CLIPPING, "arc")
COLUMNS = (
    "case | ours ms (quartiles) | compile s | temp MB | x read | x Gram | x base | "
    "peer ms (runs) | speed-up | agrees | targets"
)
EVERY = """mean median trimmed_mean meamed phocas sign_majority krum multi_krum bulyan
monna caf geometric_median centered_clipping fltrust cge filter_l2(sigma=1.0) nnm
bucketing clip arc nnm+median""".split()


class Case(NamedTuple):
    """What is timed, and the issue's targets: at least for speed-up, else at most.

    ``variant``: "traced" (f), "gradient", "bfloat16", "tree" (30 leaves); ``against``:
    the spec whose plain form it is divided by.
    """

    spec: str
    n: int
    f: int
    d: int
    targets: dict[str, float] = {}
    variant: str = ""
    against: str = ""

    def __str__(self):
        """Return the text that ``--cases`` searches."""
        against = f" against {self.against}" if self.against else ""
        what = f"{self.spec} {self.variant}".strip() + against
        return f"{what}, n={self.n} f={self.f} d={self.d}"


def cases():
    """Yield every line of the table."""
    for spec in COORDINATEWISE[:3]:
        reads = 4.0 if spec == "trimmed_mean" else 3.0
        yield Case(spec, 20, 4, 10**6, {"speed-up": 40, "read": reads})
        yield Case(spec, 50, 10, 4 * 10**5, {"speed-up": 15})
        yield Case(spec, 1000, 250, 26010, {"speed-up": 4})
    for spec in (*GRAM, "mda"):
        yield Case(spec, 20, 4, 10**6, {"speed-up": 3, "Gram": 1.5})
    for spec in (*GRAM, *COORDINATEWISE[:3]):
        yield Case(spec, 100, 20, 10**5, {"speed-up": 1})
    rules = "krum multi_krum monna geometric_median caf centered_clipping mda smea"
    for spec in rules.split():
        d = 10**5 if spec == "smea" else 10**6
        yield Case(f"nnm+{spec}", 20, 4, d, {"base": 1.2}, against=spec)
    yield Case("smea", 20, 4, 10**5, {"speed-up": 80})
    yield Case("smea", 15, 4, 10**4, {"speed-up": 12})
    yield Case("smea", 25, 5, 10**4, {"seconds": 3})
    yield Case("smea", 30, 7, 10**4, {"seconds": 60})
    for spec in ("trimmed_mean", "median", "krum", "nnm+median", "geometric_median"):
        targets = {"gradient": {}, "bfloat16": {}, "tree": {"base": 1.2}}
        for variant, target in targets.items():
            yield Case(spec, 20, 4, 10**6, target, variant, against=spec)
    for spec in EVERY:
        yield Case(spec, 1000, 200, 2048, {"compile": 3})
        yield Case(spec, 1000, 200, 2048, {"compile": 3}, "traced")


@functools.lru_cache(1)
def stacked(n, f, d):
    """Return ``[n, d]``: honest Gaussian rows off the origin, f rows of IPM x10."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, d), np.float32) + rng.standard_normal(d, np.float32)
    x[n - f :] = -10 * x[: n - f].mean(0)
    return x


def leaves(x):
    """Cut ``[n, d]`` into 15 weight matrices and 15 biases."""
    width, rows = 100, np.array_split(np.arange(x.shape[1] // 100 - 15), 15)
    ends = np.cumsum([width * size for r in rows for size in (len(r), 1)])[:-1]
    parts = np.split(x, ends, axis=1)
    return [p if i % 2 else p.reshape(len(x), -1, width) for i, p in enumerate(parts)]


def build(spec, f):
    """Return the rule, or the pre-aggregator on its own, that ``spec`` names."""
    if spec.split("(")[0] in naming.PREAGGREGATORS:
        return jaxfed.make_aggregator(f"{spec}+mean", f, key=0).stages[0]
    return jaxfed.make_aggregator(spec, f, key=0)


def program(spec, f, x, variant=""):
    """Compile one call; return it and what compiling it took."""
    x = leaves(x) if variant == "tree" else x
    x = jax.tree.map(jnp.asarray, x)
    x = x.astype(jnp.bfloat16) if variant == "bfloat16" else x
    one = jax.tree.map(lambda leaf: leaf[0], x)
    rule = build(spec, f)

    def call(x, state, budget, one):
        chosen = build(spec, budget) if variant == "traced" else rule
        extra = {"reference": one} if spec == "fltrust" else {}
        return chosen.update(x, state, **extra)[0]

    def gradient(x, state, budget, one):
        return jax.grad(lambda x: jnp.vdot(call(x, state, budget, one), one))(x)

    args = x, rule.init(one), jnp.int32(f), one
    start = time.perf_counter()
    lowered = jax.jit(gradient if variant == "gradient" else call).lower(*args)
    traced = time.perf_counter()
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    costs = {
        "trace_s": traced - start,
        "compile_s": time.perf_counter() - start,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
    }
    return lambda: compiled(*args), costs


def measure(contestants, repeats, budget):
    """Time contestants ``{name: (prepare, call)}`` in turn.

    Returns:
      Seconds of every run and the first output of each; one whose runs so far took
      longer than ``budget`` seconds gets no more of them, but always one.
    """
    seconds = {name: [] for name in contestants}
    outputs = {}

    def once(name):
        prepare, call = contestants[name]
        given = prepare()
        time.sleep(PAUSE)
        start = time.perf_counter()
        out = jax.block_until_ready(call(*given))
        return time.perf_counter() - start, out

    for name in contestants:
        first, outputs[name] = once(name)
        if first > SLOW:
            seconds[name].append(first)
    for _ in range(repeats):
        for name, runs in seconds.items():
            if not runs or sum(runs) + max(runs) <= budget:
                runs.append(once(name)[0])
    return seconds, outputs


def rival(case, x, byzfl, convert):
    """Return how ByzFL's input is prepared, untimed, and what is timed."""
    writes = case.spec in WRITES
    return (
        lambda: (convert(x.copy() if writes else x),),
        lambda given: PEERS[case.spec](byzfl, case.f)(given),
    )


def run(case, repeats, budget, peers):
    """Return the measured row of one case."""
    x = stacked(case.n, case.f, case.d)
    call, row = program(case.spec, case.f, x, case.variant)
    on_device = jnp.asarray(x)
    read = jax.jit(lambda x: jnp.ones(x.shape[0]) @ x).lower(on_device).compile()
    contestants = {"ours": (tuple, call), "read": (tuple, lambda: read(on_device))}
    name = case.spec.split("(")[0]
    if name not in COORDINATEWISE and "+" not in name and not case.variant:
        contestants["gemm"] = tuple, lambda: x @ x.T
        if name in naming.PREAGGREGATORS:
            mixing = np.full((case.n, case.n), 1 / case.n, np.float32)
            contestants["mix"] = tuple, lambda: mixing @ x
    if case.against:
        contestants["base"] = tuple, program(case.against, case.f, x)[0]
    rivals = list(peers) if "speed-up" in case.targets else []
    for peer in rivals:
        contestants[peer] = rival(case, x, *peers[peer])
    runs, outputs = measure(contestants, repeats, budget)
    row["runs"] = {k: len(v) for k, v in runs.items()}
    row["ms"] = {
        k: (1e3 * np.percentile(v, [50, 25, 75])).tolist() for k, v in runs.items()
    }
    times = {k: v[0] for k, v in row["ms"].items()}
    ours = times["ours"]
    reached = {"seconds": ours / 1e3, "compile": row["compile_s"]}
    reached["read"] = ours / times["read"]
    if "gemm" in times:
        reached["Gram"] = ours / (times["gemm"] + times.get("mix", times["read"]))
    if "base" in times:
        reached["base"] = ours / times["base"]
    if rivals:
        reached["speed-up"] = times[rivals[0]] / ours
        theirs = np.asarray(outputs[rivals[0]])
        error = np.abs(np.asarray(outputs["ours"]) - theirs).max()
        row["difference"] = float(error / np.abs(theirs).max())
    met = {k: bool(reached[k] <= v) for k, v in case.targets.items() if k in reached}
    if "speed-up" in met:
        met["speed-up"] = bool(reached["speed-up"] >= case.targets["speed-up"])
    return row | {"reached": reached, "met": met}


def disagrees(row):
    """Return whether the outputs differ, and not by definition."""
    close = row.get("difference", 0) <= TOLERANCE  # False for NaN
    return row["spec"] not in DIFFERS and not close


def line(row, peers):
    """Return the row as Markdown."""
    if "failed" in row:
        return f"| {row['case']} | **{row['failed']}** |" + " |" * 9
    reached, ms = row["reached"], row["ms"]
    agrees = f"{row['difference']:.0e}" if "difference" in row else ""
    if agrees and row["spec"] in DIFFERS:
        agrees = f"differs by definition ({agrees})"
    targets = []
    for target, ok in row["met"].items():
        sign = ">=" if target == "speed-up" else "<="
        met = "met" if ok else "**missed**"
        targets.append(f"{target} {sign} {row['targets'][target]:g} {met}")
    rivals = [peer for peer in peers if peer in ms]
    cells = [
        row["case"],
        "{:.3g} ({:.3g}-{:.3g})".format(*ms["ours"]),
        f"{row['compile_s']:.2f}",
        f"{row['temp_bytes'] / 1e6:.1f}",
        *(
            f"{reached[k]:.2f}" if k in reached else ""
            for k in ("read", "Gram", "base")
        ),
        ", ".join(f"{p} {ms[p][0]:.4g} ({row['runs'][p]})" for p in rivals),
        ", ".join(f"{ms[p][0] / ms['ours'][0]:.1f}" for p in rivals),
        f"**{agrees}**" if disagrees(row) else agrees,
        ", ".join(targets),
    ]
    return "| " + " | ".join(cells) + " |"


def machine():
    """Return what the numbers depend on besides the code."""
    cpu = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            cpu = re.search(r"model name\s*: (.*)", file.read() + "model name: ?")[1]
    folder = os.path.dirname(os.path.abspath(__file__))
    git = ["git", "-C", folder, "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout
    modules = {
        "jaxfed": jaxfed,
        "jax": jax,
        "numpy": np,
        "torch": sys.modules.get("torch"),
    }
    return {
        "cpu": cpu,
        "cpu_count": os.cpu_count(),
        "threads": THREADS,
        "torch_threads": modules["torch"] and modules["torch"].get_num_threads(),
        "affinity": len(os.sched_getaffinity(0)),
        "devices": [str(device) for device in jax.devices()],
        "python": platform.python_version(),
        **{name: m.__version__ for name, m in modules.items() if m},
        "commit": commit.strip(),
        "load": os.getloadavg(),
    }


def load_byzfl(names):
    """Return ``{name: (byzfl, from NumPy to what it is given)}``."""
    if not names:
        return {}
    # Its benchmark package wants torchvision and seaborn; the rules do not.
    sys.modules["byzfl.benchmark"] = types.ModuleType("byzfl.benchmark")
    import byzfl
    import torch

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    convert = {"byzfl": torch.from_numpy, "byzfl-numpy": np.asarray}
    return {name: (byzfl, convert[name]) for name in names}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    compare = dict(nargs="+", choices=("byzfl", "byzfl-numpy"), default=[])
    parser.add_argument("--compare", **compare, help="on PyTorch, on NumPy")
    parser.add_argument("--cases", default="", help="regular expression")
    parser.add_argument("--quick", action="store_true", help="1/100 of d, a dry run")
    parser.add_argument(
        "--json", help="one JSON line for the machine and for each case"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--budget", type=float, default=20.0, help="seconds a contestant"
    )
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    peers = load_byzfl(args.compare)
    chosen = [case for case in cases() if re.search(args.cases, str(case))]
    if args.quick:
        chosen = [c for c in chosen if "seconds" not in c.targets]
        chosen = [c._replace(d=max(c.d // 100, 2000)) for c in chosen]
    records = [{"machine": machine() | {"arguments": vars(args)}}]
    print(*(f"{k}: {v}" for k, v in records[0]["machine"].items()), sep="; ")
    if os.getloadavg()[0] > 1:
        print("\n**Other work is running: do not trust or quote these numbers.**")
    print(f"\n| {COLUMNS} |\n{'|---' * len(COLUMNS.split('|'))}|")
    for case in chosen:
        row = {"case": str(case), **case._asdict(), "load": os.getloadavg()[0]}
        try:
            row |= run(case, args.repeats, args.budget, peers)
        except Exception as error:  # one broken rule must not hide the others
            row["failed"] = f"{type(error).__name__}: {str(error).split('. ')[0]}"
        records.append(row)
        print(line(row, peers), flush=True)
        if args.json:
            with open(args.json, "w") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
    rows = records[1:]
    missed = sum(not ok for row in rows for ok in row.get("met", {}).values())
    failed = sum("failed" in row for row in rows)
    differ = sum(disagrees(row) for row in rows)
    print(
        f"\n{len(rows)} cases: {missed} targets missed, {failed} not run, {differ} "
        f"unlike the peer; load up to {max((r['load'] for r in rows), default=0):.1f}."
    )
    for spec in DIFFERS.keys() & {row["spec"] for row in rows if "difference" in row}:
        print(f"{spec} differs by definition from the peer's: {DIFFERS[spec]}.")
    sys.exit(failed + differ > 0)


if __name__ == "__main__":
    main()
