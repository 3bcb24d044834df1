# SPDX-License-Identifier: Apache-2.0
"""Experiments from configurations: what ``jaxfed train`` runs. Needs ``[train]``."""

from jaxfed.experiments.checkpoint import load_params as load_params
from jaxfed.experiments.config import TrainConfig as TrainConfig
from jaxfed.experiments.config import from_toml as from_toml
from jaxfed.experiments.config import run_id as run_id
from jaxfed.experiments.config import to_toml as to_toml
from jaxfed.experiments.report import Reporter as Reporter
from jaxfed.experiments.runner import resume as resume
from jaxfed.experiments.runner import train as train

__all__ = [
    "Reporter",
    "TrainConfig",
    "from_toml",
    "load_params",
    "resume",
    "run_id",
    "to_toml",
    "train",
]
