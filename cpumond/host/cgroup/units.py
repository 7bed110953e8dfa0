"""Systemd units as owners of cgroups: which cgroup is a unit's own."""

from __future__ import annotations

from typing import Final

UNIT_SUFFIXES: Final = (".service", ".scope", ".slice", ".socket", ".mount", ".swap")
"""Suffixes of the names of units that have a cgroup."""


def unit_of(path: str) -> str:
    """Return the unit whose own cgroup is at ``path`` (relative); "" if there is no such unit.

    Cgroups below a service or a scope are delegated, and systemd does not know them: podman's ``container``, slurmd's
    ``job_N``, the units of a user manager."""
    *above, name = path.split("/")
    # systemd writes "_" before a name that looks like a kernel file ("cpu.service") or begins with "_".
    name = name.removeprefix("_")
    if name.startswith(".") or not name.endswith(UNIT_SUFFIXES) or not all(each.endswith(".slice") for each in above):
        return ""
    return name
