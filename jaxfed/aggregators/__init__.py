# SPDX-License-Identifier: Apache-2.0
"""Robust aggregators as optax links: stacked updates in, one update out."""

from jaxfed.aggregators._compose import compose as compose
from jaxfed.aggregators._coordinatewise import meamed as meamed
from jaxfed.aggregators._coordinatewise import mean as mean
from jaxfed.aggregators._coordinatewise import median as median
from jaxfed.aggregators._coordinatewise import phocas as phocas
from jaxfed.aggregators._coordinatewise import sign_majority as sign_majority
from jaxfed.aggregators._coordinatewise import trimmed_mean as trimmed_mean
from jaxfed.aggregators._geometric_median import geometric_median as geometric_median
from jaxfed.aggregators._reference import centered_clipping as centered_clipping
from jaxfed.aggregators._reference import cge as cge
from jaxfed.aggregators._reference import fltrust as fltrust
from jaxfed.aggregators._selection import bulyan as bulyan
from jaxfed.aggregators._selection import krum as krum
from jaxfed.aggregators._selection import monna as monna
from jaxfed.aggregators._selection import multi_krum as multi_krum
from jaxfed.aggregators._spectral import caf as caf
from jaxfed.aggregators._spectral import filter_l2 as filter_l2
from jaxfed.aggregators._subsets import mda as mda
from jaxfed.aggregators._subsets import mva as mva
from jaxfed.aggregators._subsets import smea as smea

__all__ = [
    "bulyan",
    "caf",
    "centered_clipping",
    "cge",
    "compose",
    "filter_l2",
    "fltrust",
    "geometric_median",
    "krum",
    "mda",
    "mean",
    "meamed",
    "median",
    "monna",
    "multi_krum",
    "mva",
    "phocas",
    "sign_majority",
    "smea",
    "trimmed_mean",
]
