"""Source ``systemd``: the services and scopes of some slices. They are found in cgroupfs, so no bus is needed."""

from __future__ import annotations

import fnmatch
import os
import re

from cpumond.agent.discovery.glob import list_directories
from cpumond.core.job_cgroups import list_above

UNITS = (".service", ".scope")
MAX_DEPTH = 32


def slice_path(name: str) -> str:
    """Return the relative cgroup of a slice: each dash in the name stands for a level. For "-.slice", return ""."""
    stem = name.removesuffix(".slice")
    if stem == "-":
        return ""
    parts = stem.split("-")
    return "/".join("-".join(parts[: count + 1]) + ".slice" for count in range(len(parts)))


def list_units(root: str, slices: list[str], pattern: str) -> tuple[list[str], list[str]]:
    """Return the services and scopes that match ``pattern`` (fnmatch) in ``slices`` and all slices below, and the
    directories in which new ones would appear. Cgroups inside a unit are part of the unit."""
    found: set[str] = set()
    watched: set[str] = set()
    matches = re.compile(fnmatch.translate(pattern)).match
    for name in slices:
        place = slice_path(name)
        # A slice disappears with its last unit and is created again with the next unit.
        watched.update(("", *list_above(place)))
        waiting = [place]
        while waiting:
            folder = waiting.pop()
            if folder.count("/") > MAX_DEPTH or not os.path.isdir(os.path.join(root, folder)):
                continue
            watched.add(folder)
            for child in list_directories(os.path.join(root, folder)):
                path = f"{folder}/{child}" if folder else child
                if child.endswith(".slice"):
                    waiting.append(path)
                elif child.endswith(UNITS) and matches(child):
                    found.add(path)
    return sorted(found), sorted(watched)


def may_hold_units(slices: list[str], path: str) -> bool:
    """Return whether ``path`` is one of ``slices``, inside one of them, or above one of them."""
    return any(
        not place or path == "." or f"{path}/".startswith(f"{place}/") or f"{place}/".startswith(f"{path}/")
        for place in map(slice_path, slices)
    )
