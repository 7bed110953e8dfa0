"""Parts for tests and for trying things out: fake trees and clocks, real cgroups, real load, a cluster of processes.

Used by this project's tests, by ``cpumond demo`` and ``cpumond cluster``, and by authors of new parts.
"""

from cpumond.testing.cluster import (
    CLUSTER_PREFIX,
    LAUNCH_PROGRAM,
    RUN_PREFIX,
    SHORT_DIR,
    Cluster,
    ClusterNode,
    ClusterProcess,
    remove_cgroups,
)
from cpumond.testing.tree import (
    CgroupTree,
    FakeClock,
    LoadProcess,
    make_tree,
    make_v2_host,
    v2_cgroup,
    write_mountinfo,
)

__all__ = [
    "CLUSTER_PREFIX", "LAUNCH_PROGRAM", "RUN_PREFIX", "SHORT_DIR", "CgroupTree", "Cluster", "ClusterNode",
    "ClusterProcess", "FakeClock", "LoadProcess", "make_tree", "make_v2_host", "remove_cgroups",
    "v2_cgroup", "write_mountinfo",
]  # fmt: skip
