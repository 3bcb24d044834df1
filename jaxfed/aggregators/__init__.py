# SPDX-License-Identifier: Apache-2.0
"""Robust aggregators as optax links: stacked updates in, one update out."""

from jaxfed.aggregators._compose import compose as compose
from jaxfed.aggregators._rules import mean as mean
from jaxfed.aggregators._rules import median as median
from jaxfed.aggregators._rules import trimmed_mean as trimmed_mean

__all__ = ["compose", "mean", "median", "trimmed_mean"]
