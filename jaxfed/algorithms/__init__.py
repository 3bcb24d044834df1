# SPDX-License-Identifier: Apache-2.0
"""Federated methods: two halves each, cut at the wire."""

from jaxfed.algorithms._build import as_optimizer as as_optimizer
from jaxfed.algorithms._build import from_chains as from_chains
from jaxfed.algorithms._byz_clip21_sgd2m import byz_clip21_sgd2m as byz_clip21_sgd2m
from jaxfed.algorithms._byz_clip21_sgd2m import (
    byz_clip21_sgd2m_plus as byz_clip21_sgd2m_plus,
)
from jaxfed.algorithms._byz_sgdm import byz_sgdm as byz_sgdm
from jaxfed.algorithms._safe_dshb import byz_clip_sgd as byz_clip_sgd
from jaxfed.algorithms._safe_dshb import safe_dshb as safe_dshb

__all__ = [
    "as_optimizer",
    "byz_clip21_sgd2m",
    "byz_clip21_sgd2m_plus",
    "byz_clip_sgd",
    "byz_sgdm",
    "from_chains",
    "safe_dshb",
]
