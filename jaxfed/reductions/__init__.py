# SPDX-License-Identifier: Apache-2.0
"""The mathematics of robust aggregation: pure functions on stacked trees."""

from jaxfed.reductions._coordinatewise import meamed as meamed
from jaxfed.reductions._coordinatewise import mean as mean
from jaxfed.reductions._coordinatewise import mean_around_median as mean_around_median
from jaxfed.reductions._coordinatewise import median as median
from jaxfed.reductions._coordinatewise import phocas as phocas
from jaxfed.reductions._coordinatewise import sign_majority as sign_majority
from jaxfed.reductions._coordinatewise import trimmed_mean as trimmed_mean
from jaxfed.reductions._gram import Geometry as Geometry
from jaxfed.reductions._gram import geometry as geometry
from jaxfed.reductions._gram import nnm_matrix as nnm_matrix
from jaxfed.reductions._gram import smallest as smallest

__all__ = [
    "Geometry",
    "geometry",
    "mean",
    "mean_around_median",
    "meamed",
    "median",
    "nnm_matrix",
    "phocas",
    "sign_majority",
    "smallest",
    "trimmed_mean",
]
