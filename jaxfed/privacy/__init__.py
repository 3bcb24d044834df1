# SPDX-License-Identifier: Apache-2.0
"""Clipping, noise, accounting, and two ways to test a claim.

The modules: :mod:`~jaxfed.privacy.gaussian` (closed forms of the papers),
:mod:`~jaxfed.privacy.composition` (noise or sampling that changes, sub-sampling
credited), :mod:`~jaxfed.privacy.sensitivity` (how far one client moves a rule),
:mod:`~jaxfed.privacy.falsify` (inputs that move it further than claimed) and
:mod:`~jaxfed.privacy.audit` (the distinguishing game).
"""

from jaxfed.privacy import audit as audit
from jaxfed.privacy import composition as composition
from jaxfed.privacy import falsify as falsify
from jaxfed.privacy import gaussian as gaussian
from jaxfed.privacy import sensitivity as sensitivity
from jaxfed.privacy.accounting import certified_epsilon as certified_epsilon
from jaxfed.privacy.accounting import certified_noise_std as certified_noise_std
from jaxfed.privacy.accounting import dwork_noise_std as dwork_noise_std
from jaxfed.privacy.accounting import nominal_epsilon as nominal_epsilon
from jaxfed.privacy.accounting import nominal_noise_std as nominal_noise_std
from jaxfed.privacy.correlated import pairwise_noise as pairwise_noise
from jaxfed.privacy.correlated import secret_noise_std as secret_noise_std
from jaxfed.privacy.mechanisms import clip as clip
from jaxfed.privacy.mechanisms import clip_tree as clip_tree
from jaxfed.privacy.mechanisms import gaussian_noise as gaussian_noise
from jaxfed.privacy.mechanisms import normalize as normalize
from jaxfed.privacy.statement import PrivacyStatement as PrivacyStatement
from jaxfed.privacy.statement import make_statement as make_statement

__all__ = [
    "PrivacyStatement",
    "audit",
    "certified_epsilon",
    "certified_noise_std",
    "clip",
    "clip_tree",
    "composition",
    "dwork_noise_std",
    "falsify",
    "gaussian",
    "gaussian_noise",
    "make_statement",
    "nominal_epsilon",
    "nominal_noise_std",
    "normalize",
    "pairwise_noise",
    "secret_noise_std",
    "sensitivity",
]
