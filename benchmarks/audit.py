# SPDX-License-Identifier: Apache-2.0
"""What an audit says about private methods, and about mutants with one fault each.

Prints two tables as markdown; the methods and the faults are those of the tests, each
program compiled once, its time included.

    python benchmarks/audit.py
"""

import argparse
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

import audit_cases
import mutants


def rows(runs):
    """Run and print one line for each audit."""
    for name, view, unit, run in runs:
        start = time.perf_counter()
        found = run()
        seconds = time.perf_counter() - start
        verdict = "**flagged**" if found.flagged else "not flagged"
        print(
            f"| {name} | {view} | {unit} | {found.epsilon_claimed:.3f} | "
            f"{found.epsilon_lower:.3f} | {verdict} | {seconds:.1f} |",
            flush=True,
        )


def head(first):
    print(f"\n| {first} | view | unit | claim | lower bound | verdict | seconds |")
    print("|---|---|---|---|---|---|---|")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    begin = time.perf_counter()
    print(
        f"delta {audit_cases.DELTA:g}, {audit_cases.ROUNDS} rounds, "
        f"{audit_cases.TRIALS} trials in each world (one run: delta "
        f"{audit_cases.ONE_DELTA:g}, {audit_cases.ONE_ROUNDS} rounds, "
        f"{audit_cases.CANARIES} canaries), confidence of each "
        f"{audit_cases.confidence():.5f}"
    )
    head("method")
    # Seeds of their own, so that luck is not shared.
    rows(
        (name, case.view, case.unit, lambda c=case, s=i: audit_cases.run(c, seed=s))
        for i, (name, case) in enumerate(audit_cases.CORRECT.items(), 1000 * seed)
    )
    rows(
        (name, case.view, case.unit, lambda c=case: audit_cases.one_run(c, seed=seed))
        for name, case in audit_cases.ONE_RUN.items()
    )
    head("mutant")
    rows(
        (name, m.case.view, m.case.unit, lambda m=m: mutants.run(m, seed=seed))
        for name, m in mutants.MUTANTS.items()
    )
    rows(
        (
            f"{name}: noise off",
            case.view,
            case.unit,
            lambda c=case: audit_cases.one_run(c, noise=0.0, seed=seed),
        )
        for name, case in audit_cases.ONE_RUN.items()
    )
    print(f"\n{time.perf_counter() - begin:.0f} seconds in all")


if __name__ == "__main__":
    main()
