# SPDX-License-Identifier: Apache-2.0
"""Pre-aggregators as optax links: stacked updates in, stacked updates out."""

from jaxfed.preaggregators._nnm import nnm as nnm

__all__ = ["nnm"]
