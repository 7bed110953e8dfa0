"""Control groups: the only folder that distinguishes v1 and v2.

``open_hierarchies`` finds the mounts, and ``open_cgroup`` opens one of their cgroups; both versions are a ``Cgroup``.
For a cgroup that is gone, functions return None and raise no error."""

from __future__ import annotations

import math

from cpumond.host.cgroup.files import Cgroup as Cgroup
from cpumond.host.cgroup.files import read_cpus
from cpumond.host.cgroup.mounts import Hierarchies
from cpumond.host.cgroup.v1 import V1Cgroup
from cpumond.host.cgroup.v2 import V2Cgroup


def open_cgroup(hierarchies: Hierarchies, path: str) -> Cgroup | None:
    """Open the cgroup at ``path`` (relative); None if it does not exist. Raises CgroupReadError."""
    return _choose_class(hierarchies).open(hierarchies, path)


def read_host_cores(hierarchies: Hierarchies) -> float:
    """Return the cores that all cgroups may use together: the CPUs online, or fewer if the hierarchies' roots
    themselves have a quota or a cpuset, as in a container. Raises CgroupReadError."""
    quota_cores = _choose_class(hierarchies).read_quota(hierarchies.cpu_root)
    return min(float(read_cpus(hierarchies, "")), math.inf if quota_cores is None else quota_cores)


def _choose_class(hierarchies: Hierarchies) -> type[V1Cgroup | V2Cgroup]:
    return V1Cgroup if hierarchies.cpu_version == 1 else V2Cgroup
