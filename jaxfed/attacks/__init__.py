# SPDX-License-Identifier: Apache-2.0
"""What Byzantine clients do: replace messages on the wire, or poison their data."""

from jaxfed.attacks._data import label_flip as label_flip
from jaxfed.attacks._wire import inf as inf
from jaxfed.attacks._wire import ipm as ipm
from jaxfed.attacks._wire import nan as nan
from jaxfed.attacks._wire import none as none
from jaxfed.attacks._wire import sign_flip as sign_flip

__all__ = ["inf", "ipm", "label_flip", "nan", "none", "sign_flip"]
