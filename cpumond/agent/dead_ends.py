"""Find settings that are valid but hardly intended: files that are not read, limits that never move."""

from __future__ import annotations

import os
import re

from cpumond.agent.config import AgentConfig, Source
from cpumond.agent.discovery.units import slice_path
from cpumond.core.settings import find_ignored


def find_dead_ends(config: AgentConfig) -> list[str]:
    """Return a sentence about each setting that is valid but hardly intended, with the remedy."""
    folder = os.path.join(os.path.dirname(os.path.abspath(config.path)), "conf.d")
    told = [f"{name}: is not read: its name must end with .toml" for name in find_ignored(folder)]
    for number, source in enumerate(config.source, 1):
        where = f"{config.path}: source {number}"
        if source.id_regex is not None:
            groups = set(re.compile(source.id_regex).groupindex)
            if groups and not groups & {"id", "job_id", "job"}:
                told.append(
                    f"{where}.id_regex: no group is named id, so the whole match is the id; name a group (?P<id>...)"
                )
        writes = config.resolve_settings(source, "", {}).actuator != "guarantee"
        for key, name, place in _list_places(source) if writes and config.managed_roots else ():
            roots = config.find_roots(source.is_engine)
            if not any(_is_below(place, root) or _is_below(root, place) for root in roots):
                told.append(
                    f"{where}.{key}: {name!r} is outside managed_roots {config.managed_roots}: the limits of its jobs "
                    f"never move; add {place!r} there"
                )
    return told


def _list_places(source: Source) -> list[tuple[str, str, str]]:
    """Return the keys of a source that name places, each with its value and the cgroup above all its jobs. Empty for an
    engine, which reports where its jobs are."""
    if source.is_engine:
        return []
    if source.kind == "systemd":
        return [("slices", name, slice_path(name)) for name in source.slices]
    parts = [part for part in source.pattern.split("/") if part not in ("", ".")]
    fixed = next((count for count, part in enumerate(parts) if re.search(r"[*?[]", part)), len(parts))
    return [("pattern", source.pattern, "/".join(parts[:fixed]))]


def _is_below(cgroup: str, root: str) -> bool:
    return not root or f"{cgroup}/".startswith(f"{root}/")
