"""Sources ``static`` and ``glob``: cgroup paths by name or by pattern."""

from __future__ import annotations

import fnmatch
import os
import re

from cpumond.core.job_cgroups import list_above

MAX_DEPTH = 32


def list_static(root: str, pattern: str) -> tuple[list[str], list[str]]:
    """Return the path if it exists, and the directory to watch for it: the nearest existing one above the path."""
    path = "/".join(part for part in pattern.split("/") if part)
    parent = next((each for each in list_above(path) if os.path.isdir(os.path.join(root, each))), "")
    return ([path] if os.path.isdir(os.path.join(root, path)) else []), [parent]


def list_glob(root: str, pattern: str) -> tuple[list[str], list[str]]:
    """Return the directories that match ``pattern``, and those whose children can change the result.

    ``*``, ``?``, ``[...]`` match within one component of a path; ``**`` matches any number of components."""
    found: set[str] = set()
    watched: set[str] = set()
    _descend(root, "", [part for part in pattern.split("/") if part], found, watched, 0)
    found.discard("")
    return sorted(found), sorted(watched)


def may_match(pattern: str, path: str) -> bool:
    """Return whether a change at ``path`` can change what ``pattern`` matches: all components that both have match."""
    for part, component in zip((part for part in pattern.split("/") if part), path.split("/"), strict=False):
        if part == "**":
            return True
        if component != "." and not fnmatch.fnmatchcase(component, part):
            return False
    return True


def _descend(root: str, place: str, parts: list[str], found: set[str], watched: set[str], depth: int) -> None:
    if not parts:
        found.add(place)
        return
    if depth > MAX_DEPTH:
        return
    part, rest = parts[0], parts[1:]
    watched.add(place)
    if not any(sign in part for sign in "*?["):
        child = f"{place}/{part}" if place else part
        if os.path.isdir(os.path.join(root, child)):
            _descend(root, child, rest, found, watched, depth + 1)
        return
    children = list_directories(os.path.join(root, place))
    if part == "**":
        _descend(root, place, rest, found, watched, depth + 1)
        for name in children:
            _descend(root, f"{place}/{name}" if place else name, parts, found, watched, depth + 1)
        return
    matches = re.compile(fnmatch.translate(part)).match
    for name in children:
        if matches(name):
            _descend(root, f"{place}/{name}" if place else name, rest, found, watched, depth + 1)


def list_directories(path: str) -> list[str]:
    """Return the names of the directories in ``path``."""
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        # The directory disappeared after its parent was listed, so it has no children.
        return []
