"""Find the cgroups that are jobs: look for the jobs of the configured sources in the cpu controller's hierarchy."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from cpumond.agent.config import Source
from cpumond.agent.discovery.engines import (
    Views,
    choose_id,
    find_outer,
    list_engine_jobs,
    list_named,
    may_hold_engine_jobs,
)
from cpumond.agent.discovery.glob import list_glob, list_static, may_match
from cpumond.agent.discovery.units import list_units, may_hold_units
from cpumond.core.job_cgroups import list_above
from cpumond.host.engine.model import EngineJob


class FoundJob(msgspec.Struct, frozen=True):
    """A job as a source describes it.

    ``path`` is the job's cgroup, relative. ``cpu_limit_cores`` is its request; None: the cgroup's own limit counts.
    ``layer`` holds options that apply only to this job. ``source`` is None for a job registered at run time. ``engine``
    is the job as its engine describes it, None without an engine. ``is_whole``: the cgroups below ``path`` are part of
    the job, and the agent sets no limits there. ``is_assigned``: an executor of this agent runs the job.
    ``moves_ceiling``: the job has a quota that the monitor may move."""

    job_id: str
    operation_id: str
    path: str
    cpu_limit_cores: float | None
    source: Source | None = None
    layer: dict[str, object] = {}
    engine: EngineJob | None = None
    is_whole: bool = False
    is_assigned: bool = False
    moves_ceiling: bool = True


class Scan(msgspec.Struct):
    """Results of one look at all sources. ``watched``: directories to watch for new children. ``problems``: sentences
    on why cgroups are ignored. ``unnamed``: kinds of engines that have not named all of their jobs yet."""

    jobs: list[FoundJob] = []
    watched: set[str] = set()
    problems: list[str] = []
    unnamed: set[str] = set()


SOURCES: Final[dict[str, Callable[[str, str], tuple[list[str], list[str]]]]] = {
    "static": list_static,
    "glob": list_glob,
}
"""``kind`` of a source -> function that takes the root of the hierarchy and a pattern, and returns the paths of cgroups
and the directories to watch, both relative and sorted."""


def find_cgroups(root: str, source: Source) -> tuple[list[str], list[str]]:
    """Return the cgroups of a source, and the directories in which new ones would appear; both relative and sorted."""
    if source.kind == "systemd":
        return list_units(root, source.slices, source.pattern or "*")
    return SOURCES[source.kind](root, source.pattern)


def concerns(source: Source, path: str) -> bool:
    """Return whether a change at ``path`` (relative) can change what ``find_cgroups`` returns for a source."""
    if source.is_engine:
        return may_hold_engine_jobs(source, path)
    return may_hold_units(source.slices, path) if source.kind == "systemd" else may_match(source.pattern, path)


def describe_source(source: Source) -> str:
    if source.is_engine:
        return f"{source.kind} {source.pattern}".strip()
    return f"{source.pattern or 'units'} in {', '.join(source.slices)}" if source.kind == "systemd" else source.pattern


def list_jobs(sources: list[Source], registered: list[FoundJob], root: str, views: Views | None = None) -> Scan:
    """List all jobs: first those registered at run time, then those of each source in turn. A cgroup that several
    sources find is a job of the first one. A cgroup inside an engine's job, or inside a whole job, is part of that job.

    ``views``: the last answers of the engines."""
    scan = Scan(jobs=[], watched=set(), problems=[], unnamed=set())
    taken: set[str] = set()
    ids: dict[str, str] = {}
    for job in registered:
        _take(scan, taken, ids, job)
    engines = _list_engine_jobs(scan, sources, root, views or {})
    found = [([], []) if source.is_engine else find_cgroups(root, source) for source in sources]
    whole = _find_whole(sources, [paths for paths, _ in found], engines)
    if whole:
        engines = {path: job for path, job in engines.items() if whole.isdisjoint(list_above(path))}
    for source, (paths, watched) in zip(sources, found, strict=True):
        if source.is_engine:
            _take_engine_jobs(scan, taken, ids, source, engines, views or {})
            continue
        scan.watched.update(watched)
        inside = 0
        for path in paths:
            if (engines or whole) and any(above in engines or above in whole for above in list_above(path)):
                inside += 1
                continue
            if not path.isprintable():
                scan.problems.append(f"{path!r}: its name has unprintable characters; ignored")
                continue
            named = name_job(source, path)
            if named is None:
                scan.problems.append(f"{path}: id_regex {source.id_regex!r} gives it no id; ignored")
            else:
                _take(scan, taken, ids, named)
        if inside:
            scan.problems.append(
                f"{describe_source(source)}: {inside} of its cgroups are inside jobs of engines, or of sources with "
                "whole = true, which have one limit as a whole; they are ignored"
            )
    return scan


def _find_whole(sources: list[Source], found: list[list[str]], engines: Mapping[str, EngineJob]) -> set[str]:
    """Return the cgroups whose first matching source makes them whole jobs, except those inside an engine's job."""
    taken: set[str] = set()
    whole: set[str] = set()
    for source, paths in zip(sources, found, strict=True) if any(source.whole for source in sources) else ():
        if source.whole:
            new = (path for path in paths if path not in taken and engines.keys().isdisjoint(list_above(path)))
            whole.update(path for path in new if name_job(source, path) is not None)
        taken.update(paths)
    return whole


def _list_engine_jobs(scan: Scan, sources: list[Source], root: str, views: Views) -> Mapping[str, EngineJob]:
    """Return the jobs of all engines by path. If several engines show one container, the outermost one names it."""
    found: list[EngineJob] = []
    asked: set[tuple[str, str]] = set()
    for source in sources:
        if source.is_engine and (source.kind, source.socket) not in asked:
            asked.add((source.kind, source.socket))
            jobs, watched = list_engine_jobs(root, source, views)
            found += jobs
            scan.watched.update(watched)
    named = find_outer(found)
    scan.unnamed = {job.kind for job in named.values() if not job.is_named}
    return named


def _take_engine_jobs(
    scan: Scan, taken: set[str], ids: dict[str, str], source: Source, engines: Mapping[str, EngineJob], views: Views
) -> None:
    given = None if source.cpu_limit == "from-cgroup" else float(source.cpu_limit)
    named = list_named(source, views)
    for path, job in engines.items():
        is_ours = job.is_job and job.kind == source.kind and fnmatch.fnmatchcase(job.name, source.pattern or "*")
        # If a different engine of this kind named the job, the job belongs to the source of that engine.
        if path in taken or not is_ours or (job.is_named and path not in named):
            continue
        ordered = given if given is not None else job.ordered_cores if job.reports_request else None
        job_id, group = choose_id(job, ids), source.operation or job.group
        _take(scan, taken, ids, FoundJob(job_id, group, path, ordered, source, engine=job, is_whole=True))


def _take(scan: Scan, taken: set[str], ids: dict[str, str], job: FoundJob) -> None:
    if job.path in taken:
        return
    taken.add(job.path)
    if job.job_id in ids:
        scan.problems.append(
            f"{job.path}: its job id {job.job_id!r} is also that of {ids[job.job_id]}; ignored, "
            "give the source an id_regex that distinguishes them"
        )
        return
    ids[job.job_id] = job.path
    scan.jobs.append(job)


def name_job(source: Source, path: str) -> FoundJob | None:
    """Return the job at ``path`` by the source's rules; None if ``id_regex`` does not match or gives an empty id.

    Job and operation are the groups ``id`` (or ``job_id``, ``job``) and ``operation`` (or ``operation_id``, ``op``) of
    ``id_regex``; without named groups, its first and second group; without groups, the job is the whole match. Without
    ``id_regex`` the job's id is the last component of the path, or the whole path if the pattern has a wildcard before
    the last component. For units ``id_regex`` is searched only in the unit's name."""
    operation_id = source.operation
    if source.id_regex is None:
        unique = source.kind == "static" or not any(sign in source.pattern.rpartition("/")[0] for sign in "*?[")
        job_id = source.id or (path.rpartition("/")[2] if unique else path)
    else:
        match = re.search(source.id_regex, path if source.kind != "systemd" else path.rpartition("/")[2])
        if match is None:
            return None
        named = match.groupdict()
        groups = [group for group in match.groups() if group is not None]
        first = groups[0] if groups and not named else match[0]
        job_id = next((named[key] for key in ("id", "job_id", "job") if named.get(key)), first)
        second = groups[1] if len(groups) > 1 and not named else operation_id
        operation_id = next((named[key] for key in ("operation", "operation_id", "op") if named.get(key)), second)
    if not job_id:
        return None
    limit = None if source.cpu_limit == "from-cgroup" else float(source.cpu_limit)
    return FoundJob(job_id, operation_id, path, limit, source, is_whole=source.whole)
