# SPDX-License-Identifier: Apache-2.0
"""Constants, hyperparameters and bounds of the papers, on the host in float64."""

from jaxfed.theory import byz_clip21_sgd2m as byz_clip21_sgd2m
from jaxfed.theory import byzuldp as byzuldp
from jaxfed.theory import drag as drag
from jaxfed.theory import stability as stability
