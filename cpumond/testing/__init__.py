"""Tools for tests and experiments: fake trees and clocks, real cgroups, real load.

Used by this project's tests, by ``cpumond demo`` and ``cpumond cluster``, and by authors of new parts."""

from cpumond.testing.tree import CgroupTree, FakeClock, LoadProcess, make_tree, make_v2_host, v2_cgroup, write_mountinfo

__all__ = [
    "CgroupTree", "FakeClock", "LoadProcess", "make_tree", "make_v2_host", "v2_cgroup", "write_mountinfo",
]  # fmt: skip
