"""Units of systemd as owners of cgroups: which cgroup is a unit's."""

from __future__ import annotations

from typing import Final

UNIT_SUFFIXES: Final = (".service", ".scope", ".slice", ".socket", ".mount", ".swap")
"""Kinds of units that have a cgroup."""


def unit_of(path: str) -> str:
    """The unit whose own cgroup is at ``path`` (relative), "" when it is none.

    What lies below a service or a scope was delegated: podman's ``container``, slurmd's ``job_N``, the units of a user
    manager. systemd knows nothing of it.
    """
    *above, name = path.split("/")
    # systemd writes "_" before a name that looks like a file of the kernel ("cpu.service") or begins with "_".
    name = name.removeprefix("_")
    if name.startswith(".") or not name.endswith(UNIT_SUFFIXES) or not all(each.endswith(".slice") for each in above):
        return ""
    return name
