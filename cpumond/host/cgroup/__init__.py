"""Control groups: the only folder that knows v1 from v2.

``open_hierarchies`` finds the mounts, ``open_cgroup`` opens one cgroup of them; both versions are a
``Cgroup``. A cgroup that is gone is None, not an error.
"""

from __future__ import annotations

from cpumond.host.cgroup.files import Cgroup as Cgroup
from cpumond.host.cgroup.mounts import Hierarchies
from cpumond.host.cgroup.v1 import V1Cgroup
from cpumond.host.cgroup.v2 import V2Cgroup


def open_cgroup(hierarchies: Hierarchies, path: str) -> Cgroup | None:
    """The cgroup at ``path`` (relative), or None when there is none. Raises CgroupReadError."""
    return (V1Cgroup if hierarchies.cpu_version == 1 else V2Cgroup).open(hierarchies, path)
