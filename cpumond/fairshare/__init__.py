"""Hierarchical dominant-resource fair share with guarantees: pure functions of a frozen tree. See ARCHITECTURE.md.

Section numbers in docstrings refer to fair_share_update.md (docs/specification)."""

from cpumond.fairshare.resources import RESOURCES, Vector
from cpumond.fairshare.result import ElementShares, FairShare, UpdateError, UpdateResult
from cpumond.fairshare.tree import ROOT, SCHEDULER_OPTIONS, IntegralGuarantees, Operation, Options, Pool, Snapshot
from cpumond.fairshare.update import FairShareUpdater, fair_share_update

__all__ = [
    "fair_share_update", "FairShareUpdater",
    "Snapshot", "Options", "Pool", "Operation", "IntegralGuarantees", "ROOT", "RESOURCES", "SCHEDULER_OPTIONS",
    "Vector",
    "UpdateResult", "ElementShares", "FairShare", "UpdateError",
]  # fmt: skip
