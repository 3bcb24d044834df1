# SPDX-License-Identifier: Apache-2.0
"""The command line: ``jaxfed train``, ``jaxfed account`` and ``jaxfed list``."""

import importlib.util
import inspect
import json
import os
import re
import sys

import jaxfed
from jaxfed import _registry

_HELP = """\
usage: jaxfed [-h] [--version] COMMAND ...

Byzantine-robust, differentially private federated optimization in JAX.

commands:
  train    train a model with Byzantine clients and privacy noise
  account  what a method's noise is worth, or how much an epsilon needs
  list     name every rule, attack, algorithm, data set and model; describe one

options:
  -h, --help  show this message and exit
  --version   show the version and exit

Try "jaxfed train" without arguments, and "jaxfed train --help" for what it can do.
"""


# Those without which no run gets anywhere; data sets and accounting ask for theirs.
_PACKAGES = ("tyro", "tomli_w", "flax", "orbax", "matplotlib", "rich")


def main(argv=None) -> int:
    """Run a command.

    Args:
      argv: arguments without the program's name; None: those of the process.

    Returns:
      Exit code: 0, 2 for what the user got wrong (explained on standard error in one
      paragraph), 130 if interrupted.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    commands = {"train": _train, "account": _account, "list": _list}
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    if argv[0] == "--version":
        print(f"jaxfed {jaxfed.__version__}")
        return 0
    try:
        command = _registry.lookup(commands, argv[0], "command")
        return command(argv[1:])
    except SystemExit as error:  # from the parser of flags, which has explained itself
        return int(error.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone; leave nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, TypeError, OverflowError, OSError, ImportError) as error:
        if os.environ.get("JAXFED_TRACEBACK"):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"jaxfed: error: {text}", file=sys.stderr)
        return 2


def _train(argv):
    _need("train", _PACKAGES)
    import tyro

    from jaxfed.experiments import config as configs

    files = _given(argv, ("--config", "--resume"))
    if len(files) == 2:
        raise ValueError(
            "--config and --resume were both given: a run folder has its own "
            "configuration. Leave --config out."
        )
    default = configs.TrainCommand()
    if "--config" in files:
        default = configs.from_toml(files["--config"], configs.TrainCommand)
    elif "--resume" in files:
        from jaxfed.experiments.folder import read_config

        default = configs.as_command(read_config(files["--resume"]))
    command = tyro.cli(
        configs.TrainCommand, args=argv, prog="jaxfed train", default=default
    )
    from jaxfed.experiments import runner

    options = {
        "devices": command.devices,
        "checkpoint_every": command.checkpoint_every,
    }
    config = command.train_config()
    if command.resume is not None:
        for name, unset in (("out", None), ("overwrite", False)):
            if getattr(command, name) != unset:
                raise ValueError(
                    f"--resume continues in its own folder, got --{name} as well. "
                    "Leave one of the two out."
                )
        runner.resume(command.resume, config, **options)
    else:
        runner.train(config, out=command.out, overwrite=command.overwrite, **options)
    return 0


def _account(argv):
    _need("account", (*_PACKAGES, "dp_accounting"))
    import tyro

    from jaxfed.experiments import account

    command = tyro.cli(account.AccountCommand, args=argv, prog="jaxfed account")
    found = account.account(command)
    print(json.dumps(found.as_dict(), indent=2) if command.json else found.text())
    return 0


def _need(command, packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"jaxfed {command} needs {', '.join(missing)}, not installed here: "
            'pip install "jaxfed[train]".'
        )


def _given(argv, names):
    """Return the values of some flags without parsing the others."""
    found = {}
    for i, text in enumerate(argv):
        name, equals, value = text.partition("=")
        if name in names and equals:
            found[name] = value
        elif name in names and i + 1 < len(argv):
            found[name] = argv[i + 1]
    return found


def _list(argv):
    if len(argv) > 1 or argv[:1] in (["-h"], ["--help"]):
        print(
            "usage: jaxfed list [NAME]\n\nName everything that a configuration can "
            "name, or show the options and\nthe description of one of them."
        )
        return 0 if len(argv) == 1 else 2
    from jaxfed import naming

    tables = {
        "rules": naming.RULES,
        "pre-aggregators (before a rule, joined by +)": naming.PREAGGREGATORS,
        "attacks": naming.ATTACKS,
        "algorithms": naming.ALGORITHMS,
    }
    try:
        from jaxfed import models

        tables["models"] = models.MODELS
    except ImportError:
        print('(models need more packages: pip install "jaxfed[train]")\n')
    if argv:
        known = {
            name: thing for table in tables.values() for name, thing in table.items()
        }
        thing = _registry.lookup(known, argv[0], "name")
        print(f"{argv[0]}{inspect.signature(thing)}\n\n{inspect.getdoc(thing)}")
        return 0
    for title, table in tables.items():
        _print_table(title, {name: _first_line(table[name]) for name in table})
    _print_table(
        "data sets",
        {
            "digits": "1,797 images of 8x8 pixels; comes with scikit-learn.",
            "NAME": "Any image-classification set prepared by TensorFlow Datasets, "
            "e.g. mnist.",
        },
    )
    return 0


def _first_line(thing):
    line = (inspect.getdoc(thing) or "").partition("\n")[0]
    return re.sub(r":\w+:`~?([^`]*)`|``", r"\1", line)


def _print_table(title, rows):
    width = max(map(len, rows))
    print(f"{title}:")
    for name, line in rows.items():
        print(f"  {name:<{width}}  {line}")
    print()
