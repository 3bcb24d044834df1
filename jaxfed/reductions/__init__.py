# SPDX-License-Identifier: Apache-2.0
"""The mathematics of robust aggregation: pure functions on stacked trees."""

from jaxfed.reductions._coordinatewise import mean as mean
from jaxfed.reductions._coordinatewise import median as median
from jaxfed.reductions._coordinatewise import trimmed_mean as trimmed_mean
from jaxfed.reductions._gram import Geometry as Geometry
from jaxfed.reductions._gram import geometry as geometry
from jaxfed.reductions._gram import nnm_matrix as nnm_matrix
from jaxfed.reductions._gram import smallest as smallest

__all__ = [
    "Geometry",
    "geometry",
    "mean",
    "median",
    "nnm_matrix",
    "smallest",
    "trimmed_mean",
]
