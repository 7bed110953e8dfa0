"""The parent cgroups of the executors' jobs, relative to the hierarchy's root, and the folder of unit drop-ins."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

DEFAULT_ROOT: Final = "cpumond-jobs"
"""Parent of ordinary jobs of kind "cgroup", unless the configuration names another one."""
JOBS_SLICE: Final = "cpumond-jobs.slice"
JOBS_SLICE_CGROUP: Final = f"cpumond.slice/{JOBS_SLICE}"
"""Parent of ordinary jobs of kind "systemd"."""
IDLE_NAME: Final = "cpumond-reclaimed"
IDLE_SLICE: Final = "cpumond_reclaimed.slice"
"""Parent of jobs on reclaimed CPU, directly below the root. A dash in its name would put it below another slice."""

INSTALLED_DROP_INS: Final = "/usr/share/cpumond/systemd"
"""Folder of executor.conf and cpumond.service.d in the Debian package; in a checkout it is systemd/."""


def list_above(path: str) -> Iterator[str]:
    """Yield all ancestors of ``path`` except the root, the nearest first."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def name_idle_parent(root: str) -> str:
    """Return the parent cgroup of jobs on reclaimed CPU for a "cgroup" executor whose ordinary jobs are in ``root``.
    The parent is a child of the hierarchy's root, and no other executor uses it."""
    return IDLE_NAME if root in ("", DEFAULT_ROOT) else f"{IDLE_NAME}-{root.replace('/', '-')}"


def is_idle_name(path: str) -> bool:
    """Return whether a relative path is, or is below, a cgroup named by ``name_idle_parent``."""
    return re.match(rf"{IDLE_NAME}(-|/|$)", path) is not None
