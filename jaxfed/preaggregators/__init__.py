# SPDX-License-Identifier: Apache-2.0
"""Pre-aggregators as optax links: stacked updates in, stacked updates out."""

from jaxfed.preaggregators._bucketing import bucketing as bucketing
from jaxfed.preaggregators._clip import arc as arc
from jaxfed.preaggregators._clip import clip as clip
from jaxfed.preaggregators._nnm import nnm as nnm

__all__ = ["arc", "bucketing", "clip", "nnm"]
