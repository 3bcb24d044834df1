# SPDX-License-Identifier: Apache-2.0
"""Data sets by name, splits over clients, and padded stacks of shards."""

from jaxfed.data.datasets import Dataset, DatasetNotFoundError, load
from jaxfed.data.partition import by_classes, dirichlet, iid, split
from jaxfed.data.root import root_indices
from jaxfed.data.stack import stack

__all__ = [
    "Dataset",
    "DatasetNotFoundError",
    "by_classes",
    "dirichlet",
    "iid",
    "load",
    "root_indices",
    "split",
    "stack",
]
