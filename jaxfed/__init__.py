# SPDX-License-Identifier: Apache-2.0
"""jaxfed: Byzantine-robust, differentially private federated optimization in JAX."""

from jaxfed import aggregators as aggregators
from jaxfed import algorithms as algorithms
from jaxfed import attacks as attacks
from jaxfed import preaggregators as preaggregators
from jaxfed import privacy as privacy
from jaxfed import reductions as reductions
from jaxfed import robustness as robustness
from jaxfed import sharding as sharding
from jaxfed import stability as stability
from jaxfed._base import Aggregator as Aggregator
from jaxfed._base import Attack as Attack
from jaxfed._base import ClientHalf as ClientHalf
from jaxfed._base import FedAlgorithm as FedAlgorithm
from jaxfed._base import Info as Info
from jaxfed._base import LocalWork as LocalWork
from jaxfed._base import Mechanism as Mechanism
from jaxfed._base import PreAggregator as PreAggregator
from jaxfed._base import Sensitivity as Sensitivity
from jaxfed._base import ServerHalf as ServerHalf
from jaxfed._base import Shard as Shard
from jaxfed.algorithms import as_optimizer as as_optimizer
from jaxfed.algorithms import from_chains as from_chains
from jaxfed.links import accumulate as accumulate
from jaxfed.links import per_client as per_client
from jaxfed.local import gradient as gradient
from jaxfed.local import local_sgd as local_sgd
from jaxfed.naming import make_aggregator as make_aggregator
from jaxfed.naming import make_algorithm as make_algorithm
from jaxfed.naming import make_attack as make_attack
from jaxfed.rounds import Simulation as Simulation
from jaxfed.rounds import SimulationState as SimulationState
from jaxfed.rounds import byzantine_ids as byzantine_ids
from jaxfed.rounds import simulate as simulate

__version__ = "0.1.0"

__all__ = [
    "Aggregator",
    "Attack",
    "ClientHalf",
    "FedAlgorithm",
    "Info",
    "LocalWork",
    "Mechanism",
    "PreAggregator",
    "Sensitivity",
    "ServerHalf",
    "Shard",
    "Simulation",
    "SimulationState",
    "accumulate",
    "aggregators",
    "algorithms",
    "as_optimizer",
    "attacks",
    "byzantine_ids",
    "from_chains",
    "gradient",
    "local_sgd",
    "make_aggregator",
    "make_algorithm",
    "make_attack",
    "per_client",
    "preaggregators",
    "privacy",
    "reductions",
    "robustness",
    "sharding",
    "simulate",
    "stability",
]
