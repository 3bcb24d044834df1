# SPDX-License-Identifier: Apache-2.0
"""What a run shows: live progress on a terminal, plain lines elsewhere, a curve."""

import io
import math
import sys


class Reporter:
    """Prints a run. On a terminal progress is live, otherwise one line an evaluation.

    Args:
      file: text stream, None for standard output.
      quiet: print nothing.
    """

    def __init__(self, file=None, *, quiet=False):
        self._file = sys.stdout if file is None else file
        self._quiet = quiet
        self._live = None
        self._task = None
        self._label = ""
        self._total = 0

    def say(self, text=""):
        """Print text as it is."""
        if not self._quiet:
            print(text, file=self._file, flush=True)

    def begin(self, label, total, done=0):
        """Start the progress of one training of ``total`` rounds, ``done`` done."""
        self._label, self._total = label, total
        if self._quiet or not self._file.isatty():
            return
        from rich import console, progress

        self._live = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=8),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[numbers]}"),
            progress.TimeRemainingColumn(),
            console=console.Console(file=self._file),
        )
        self._task = self._live.add_task(
            label, total=total, completed=done, numbers="compiling"
        )
        self._live.start()

    def evaluation(self, row):
        """Show one row of ``metrics.jsonl``."""
        speed = row["rounds_per_second"]
        numbers = (
            f"loss {_number(row['loss'], '.3f')}  accuracy "
            f"{_number(row['accuracy'], '.3f')}  "
            f"{_number(speed, '.0f' if speed >= 100 else '.3g')} rounds/s"
        )
        if self._live is not None:
            self._live.update(self._task, completed=row["round"], numbers=numbers)
            return
        left = (self._total - row["round"]) / speed
        width = len(str(self._total))
        self.say(
            f"{self._label}: round {row['round']:{width}d}/{self._total}  {numbers}  "
            f"{left:.0f} s left"
        )

    def end(self):
        """End the progress begun last; harmless if there is none."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def summary(self, summary, folder):
        """Print where the run is and how it went; the comparison comes last."""
        self.say(
            f"\nRun {summary['run_id'][:12]} in {folder}: {summary['rounds']} rounds, "
            f"{summary['wall_seconds']:.1f} s in all, compiling "
            f"{summary['compile_seconds']:.1f} s of them."
        )
        self.say(
            f"Final test accuracy {_number(summary['accuracy'], '.4f')}, loss "
            f"{_number(summary['loss'], '.4f')}; certified epsilon "
            f"{_number(summary['epsilon_certified'], '.4g')}, nominal "
            f"{_number(summary['epsilon_nominal'], '.4g')}.\n"
        )
        self.say(table(summary))


def table(summary) -> str:
    """Return the run and its comparisons as a small table."""
    rows = [("rule", "noise", "test accuracy")]
    for run in [summary["run"], *summary["comparisons"]]:
        accuracy = run["accuracy"]
        rows.append(
            (
                run["rule"] + " (plain averaging)" * (run["rule"] == "mean"),
                run["noise"],
                "not finite" if accuracy is None else f"{accuracy:.1%}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        f"{rule:<{widths[0]}}  {noise:<{widths[1]}}  {accuracy:>{widths[2]}}"
        for rule, noise, accuracy in rows
    ]
    attack = f"Under {summary['config']['num_byzantine']} of "
    attack += f"{summary['config']['num_clients']} clients running "
    attack += f"{summary['config']['attack']}:"
    return "\n".join([attack, *lines])


def _number(value, form):
    if value is None:
        return "not finite"
    value = float(value)  # the text "inf" stands for infinity
    return f"{value:{form}}"


def curve(histories) -> bytes:
    """Draw test accuracy and test loss against rounds.

    Args:
      histories: label to list of rows of ``metrics.jsonl``; the first is the run.

    Returns:
      A PNG.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axis, key in zip(figure.subplots(1, 2), ("accuracy", "loss"), strict=True):
        for label, rows in histories.items():
            # A gap where the number is not finite.
            y = [math.nan if row[key] is None else row[key] for row in rows]
            axis.plot([row["round"] for row in rows], y, marker=".", label=label)
        axis.set_xlabel("round")
        axis.set_ylabel(f"test {key}")
        axis.grid(alpha=0.3)
        if key == "accuracy":
            axis.set_ylim(0, 1)
            axis.legend()
        else:
            axis.set_yscale("log")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()
