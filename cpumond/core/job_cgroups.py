"""Names of the cgroups that executors put jobs into, relative to the hierarchy's root; where drop-ins of units are."""

from __future__ import annotations

import re
from typing import Final

DEFAULT_ROOT: Final = "cpumond-jobs"
"""Ordinary jobs of kind "cgroup", unless the configuration names another place."""
JOBS_SLICE: Final = "cpumond-jobs.slice"
JOBS_SLICE_CGROUP: Final = f"cpumond.slice/{JOBS_SLICE}"
"""Ordinary jobs of kind "systemd"."""
IDLE_NAME: Final = "cpumond-reclaimed"
IDLE_SLICE: Final = "cpumond_reclaimed.slice"
"""Jobs on reclaimed CPU. A dash in a slice's name would be a level, and this one no child of the root."""

INSTALLED_DROP_INS: Final = "/usr/share/cpumond/systemd"
"""Where the Debian package has executor.conf and cpumond.service.d; in a checkout that is systemd/."""


def name_idle_parent(root: str) -> str:
    """The cgroup above the jobs on reclaimed CPU of an executor of kind "cgroup" whose ordinary jobs are in ``root``: a
    child of the hierarchy's root that no other executor uses."""
    return IDLE_NAME if root in ("", DEFAULT_ROOT) else f"{IDLE_NAME}-{root.replace('/', '-')}"


def is_idle_name(path: str) -> bool:
    """Whether a relative path is a name of ``name_idle_parent``, or below one."""
    return re.match(rf"{IDLE_NAME}(-|/|$)", path) is not None
