"""Trees of plain files in place of cgroups, for tests and for ``cpumond demo`` where none can be created."""

from cpumond.testing.tree import make_tree, make_v2_host, v2_cgroup, write_mountinfo

__all__ = ["make_tree", "make_v2_host", "v2_cgroup", "write_mountinfo"]
