"""A cluster of real processes on this host: schedulers, nodes and their jobs, on their own ports and PostgreSQL.

``cpumond cluster``, ``cpumond demo`` and tests start it."""

from cpumond.cluster.processes import (
    CLUSTER_PREFIX,
    LAUNCH_PROGRAM,
    RUN_PREFIX,
    SHORT_DIR,
    Cluster,
    ClusterNode,
    ClusterProcess,
    remove_cgroups,
)

__all__ = [
    "CLUSTER_PREFIX", "LAUNCH_PROGRAM", "RUN_PREFIX", "SHORT_DIR", "Cluster", "ClusterNode", "ClusterProcess",
    "remove_cgroups",
]  # fmt: skip
