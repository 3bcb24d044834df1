# SPDX-License-Identifier: Apache-2.0
"""What Byzantine clients do: replace messages on the wire, or poison their data.

Where an attack speaks of honest messages, they are those of the round's cohort; the
mean of none is 0. Honest rows pass every attack bit for bit.
"""

from jaxfed.attacks._data import label_flip as label_flip
from jaxfed.attacks._data import label_flip_half as label_flip_half
from jaxfed.attacks._distance import min_max as min_max
from jaxfed.attacks._distance import min_sum as min_sum
from jaxfed.attacks._search import alie_search as alie_search
from jaxfed.attacks._search import gradient_search as gradient_search
from jaxfed.attacks._search import ipm_search as ipm_search
from jaxfed.attacks._space import in_momentum_space as in_momentum_space
from jaxfed.attacks._stateful import mia_push as mia_push
from jaxfed.attacks._stateful import mimic as mimic
from jaxfed.attacks._wire import alie as alie
from jaxfed.attacks._wire import bit_flip as bit_flip
from jaxfed.attacks._wire import copies as copies
from jaxfed.attacks._wire import gaussian_noise as gaussian_noise
from jaxfed.attacks._wire import inf as inf
from jaxfed.attacks._wire import ipm as ipm
from jaxfed.attacks._wire import nan as nan
from jaxfed.attacks._wire import none as none
from jaxfed.attacks._wire import random as random
from jaxfed.attacks._wire import scalar_noise as scalar_noise
from jaxfed.attacks._wire import sign_flip as sign_flip
from jaxfed.attacks._wire import zero as zero

# Names for text; `in_momentum_space` wraps an attack and has none.
__all__ = [
    "alie",
    "alie_search",
    "bit_flip",
    "copies",
    "gaussian_noise",
    "gradient_search",
    "inf",
    "ipm",
    "ipm_search",
    "label_flip",
    "label_flip_half",
    "mia_push",
    "mimic",
    "min_max",
    "min_sum",
    "nan",
    "none",
    "random",
    "scalar_noise",
    "sign_flip",
    "zero",
]
