"""A cluster of real processes on this host: schedulers, nodes and their jobs, on ports and a PostgreSQL of their own.

What ``cpumond cluster`` and ``cpumond demo`` start, and what tests do.
"""

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
