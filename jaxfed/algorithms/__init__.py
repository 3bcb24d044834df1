# SPDX-License-Identifier: Apache-2.0
"""Federated methods: two halves each, cut at the wire.

The import of a method's factory below is its entry in the registry.
"""

from jaxfed.algorithms._alpha_norm import alpha_norm as alpha_norm
from jaxfed.algorithms._br_drag import br_drag as br_drag
from jaxfed.algorithms._build import Needs as Needs
from jaxfed.algorithms._build import as_optimizer as as_optimizer
from jaxfed.algorithms._build import from_chains as from_chains
from jaxfed.algorithms._build import needs as needs
from jaxfed.algorithms._byz_clip21_sgd2m import byz_clip21_sgd2m as byz_clip21_sgd2m
from jaxfed.algorithms._byz_clip21_sgd2m import (
    byz_clip21_sgd2m_plus as byz_clip21_sgd2m_plus,
)
from jaxfed.algorithms._byz_sgdm import byz_sgdm as byz_sgdm
from jaxfed.algorithms._byz_vr_marina import byz_vr_marina as byz_vr_marina
from jaxfed.algorithms._byzuldp import byzuldp as byzuldp
from jaxfed.algorithms._cafcor import cafcor as cafcor
from jaxfed.algorithms._clip21 import clip21_sgd as clip21_sgd
from jaxfed.algorithms._clip21 import clip21_sgd2m as clip21_sgd2m
from jaxfed.algorithms._dp_brem import dp_brem as dp_brem
from jaxfed.algorithms._dp_fedavg import dp_fedavg as dp_fedavg
from jaxfed.algorithms._drag import drag as drag
from jaxfed.algorithms._ef21_sgdm import ef21_sgdm as ef21_sgdm
from jaxfed.algorithms._fedacg import fedacg as fedacg
from jaxfed.algorithms._fedavg import fedadam as fedadam
from jaxfed.algorithms._fedavg import fedavg as fedavg
from jaxfed.algorithms._fedavg import fedavgm as fedavgm
from jaxfed.algorithms._fedavg import fedsgd as fedsgd
from jaxfed.algorithms._fedavg import fedyogi as fedyogi
from jaxfed.algorithms._fedexp import fedexp as fedexp
from jaxfed.algorithms._fedprox import fedprox as fedprox
from jaxfed.algorithms._fltrust import fltrust as fltrust
from jaxfed.algorithms._rfa import raga as raga
from jaxfed.algorithms._rfa import rfa as rfa
from jaxfed.algorithms._root_sgd import root_sgd as root_sgd
from jaxfed.algorithms._safe_dgd import safe_dgd as safe_dgd
from jaxfed.algorithms._safe_dgd import safe_dsgd as safe_dsgd
from jaxfed.algorithms._safe_dshb import byz_clip_sgd as byz_clip_sgd
from jaxfed.algorithms._safe_dshb import safe_dshb as safe_dshb
from jaxfed.algorithms._scaffold import scaffold as scaffold

__all__ = sorted(name for name in globals() if not name.startswith("_"))
METHODS = [
    n for n in __all__ if n not in ("Needs", "as_optimizer", "from_chains", "needs")
]
