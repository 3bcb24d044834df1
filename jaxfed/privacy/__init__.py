# SPDX-License-Identifier: Apache-2.0
"""Clipping, noise and accounting."""

from jaxfed.privacy.accounting import certified_epsilon as certified_epsilon
from jaxfed.privacy.accounting import certified_noise_std as certified_noise_std
from jaxfed.privacy.accounting import dwork_noise_std as dwork_noise_std
from jaxfed.privacy.accounting import nominal_epsilon as nominal_epsilon
from jaxfed.privacy.accounting import nominal_noise_std as nominal_noise_std
from jaxfed.privacy.mechanisms import clip as clip
from jaxfed.privacy.mechanisms import clip_tree as clip_tree
from jaxfed.privacy.mechanisms import gaussian_noise as gaussian_noise
from jaxfed.privacy.statement import PrivacyStatement as PrivacyStatement
from jaxfed.privacy.statement import make_statement as make_statement

__all__ = [
    "PrivacyStatement",
    "certified_epsilon",
    "certified_noise_std",
    "clip",
    "clip_tree",
    "dwork_noise_std",
    "gaussian_noise",
    "make_statement",
    "nominal_epsilon",
    "nominal_noise_std",
]
