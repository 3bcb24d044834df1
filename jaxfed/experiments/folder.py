# SPDX-License-Identifier: Apache-2.0
"""A run folder: what is in it, who may write it, and writing without half files."""

import json
import math
import os
import shutil
from pathlib import Path

import jaxfed
from jaxfed.experiments import config as configs

_FILES = ("config.toml", "metrics.jsonl", "curve.png", "summary.json")
_PART = ".part-"


def write_atomically(path, content):
    """Write text or bytes so that the file is the old or the new one, never half."""
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    part = path.with_name(f"{_PART}{path.name}-{os.getpid()}")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def finite(tree):
    """Replace numbers JSON cannot hold (NaN, infinities) by None."""
    if isinstance(tree, dict):
        return {k: finite(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [finite(v) for v in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


class RunFolder:
    """An open run folder; one process at a time. Close it, or use it with ``with``."""

    def __init__(self, path):
        self.path = Path(path)
        self._lock = _lock(self.path / "config.toml")

    @classmethod
    def create(cls, path, config, *, overwrite=False):
        """Make the folder and store the configuration in it.

        Raises:
          ValueError: if it has files in it, or is in use, unless it is a run folder and
            ``overwrite``; then the old run's files are removed, and nothing else.
        """
        path = Path(path)
        cls.check_free(path, overwrite=overwrite)
        if path.is_dir() and _entries(path):
            with cls(path):
                # The configuration goes last: without it this is no run folder.
                shutil.rmtree(path / "checkpoints", ignore_errors=True)
                for name in reversed(_FILES):
                    (path / name).unlink(missing_ok=True)
        path.mkdir(parents=True, exist_ok=True)
        for part in path.glob(f"{_PART}*"):
            part.unlink(missing_ok=True)
        head = f"{configs.HEADER}{jaxfed.__version__}, run {configs.run_id(config)}\n"
        write_atomically(path / "config.toml", head + configs.to_toml(config))
        return cls(path)

    @staticmethod
    def check_free(path, *, overwrite=False):
        """Raise ValueError if :meth:`create` would refuse the folder."""
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file. Give another folder by --out.")
        if not path.is_dir() or not _entries(path):
            return
        if not is_run_folder(path):
            raise ValueError(
                f"the folder {path} is not empty and no run folder, so it stays as it "
                "is. Write elsewhere with --out."
            )
        if not overwrite:
            raise ValueError(
                f"the folder {path} already holds a run. Continue it with --resume "
                f"{path}, write elsewhere with --out, or replace it with --overwrite."
            )

    def write_json(self, name, values):
        """Write a JSON file; numbers that are not finite become null."""
        text = json.dumps(finite(values), indent=2, allow_nan=False) + "\n"
        write_atomically(self.path / name, text)

    def append_metrics(self, row):
        """Add one line to ``metrics.jsonl`` and wait until it is on disk."""
        line = json.dumps(finite(row), allow_nan=False) + "\n"
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def cut_metrics(self, last_round) -> list[dict]:
        """Drop what was logged after a round, and a half-written line; return the rest.

        Raises:
          ValueError: if the log does not reach that round.
        """
        path = self.path / "metrics.jsonl"
        rows = []
        if path.exists():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    row = json.loads(line)
                    if row["round"] > last_round:
                        break
                except (ValueError, KeyError, TypeError):
                    break
                rows.append(row)
        if last_round and (not rows or rows[-1]["round"] != last_round):
            raise ValueError(
                f"{path} does not reach round {last_round}, that of the newest "
                "checkpoint. Delete the folder "
                f"{self.path / 'checkpoints' / str(last_round)} and resume again."
            )
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
        return rows

    def summary(self) -> dict | None:
        """Return the summary of a finished run, None if it has not finished."""
        path = self.path / "summary.json"
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
            if not {"run_id", "run", "comparisons"} <= set(summary):
                raise ValueError("it is no summary of a run")
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}). Delete it and resume again."
            ) from None
        return summary

    def close(self):
        """Let other processes use the folder."""
        self._lock.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def is_run_folder(path) -> bool:
    """Whether a folder holds a configuration that we wrote."""
    try:
        with open(Path(path) / "config.toml", encoding="utf-8") as file:
            return file.readline().startswith(configs.HEADER)
    except (OSError, UnicodeDecodeError):
        return False


def read_config(path):
    """Return the TrainConfig stored in a run folder.

    Raises:
      ValueError: if there is none, or it cannot be read.
    """
    path = Path(path)
    if not (path / "config.toml").is_file():
        raise ValueError(
            f"there is no run to resume in {path}: it has no config.toml. Start one "
            f"with --out {path}."
        )
    return configs.from_toml(path / "config.toml")


def _entries(path):
    # What a process killed while writing left behind does not count.
    return [p for p in path.iterdir() if not p.name.startswith(_PART)]


def _lock(path):
    """Open a file and lock it until it is closed or the process dies."""
    file = open(path, "rb")  # noqa: SIM115, closed by RunFolder.close
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # No such locks on this system; two writers are then not detected.
    except BlockingIOError:
        file.close()
        raise ValueError(
            f"another process is using the run folder {path.parent}. Wait for it, or "
            "write elsewhere with --out."
        ) from None
    return file
