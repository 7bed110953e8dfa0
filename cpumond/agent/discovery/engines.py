"""Sources ``docker``, ``podman``, ``slurm``, ``kubernetes``: jobs of engines, with the names that the engines give.

A job runs if it has a cgroup. A separate thread asks the engines for names and requests (``host/engine``); the
functions here get the last answers as ``views``."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from typing import Final

from cpumond.agent.config import Source
from cpumond.agent.discovery.glob import list_glob, may_match
from cpumond.agent.discovery.workloads import classify
from cpumond.core.job_cgroups import list_above
from cpumond.host.engine.model import SHORT_ID, SLUID, EngineJob, EngineView, Key
from cpumond.host.engine.processes import CRUN_CHILD

SOCKETS: Final[dict[str, str]] = {
    "docker": "/run/docker.sock",
    "podman": "/run/podman/podman.sock",
    "slurm": "",
    "kubernetes": "https://127.0.0.1:10250",
}
"""Kind of an engine -> address that is used if ``socket`` is not set."""
USER_SOCKETS: Final = "/run/user/*/podman/podman.sock"
RANKS: Final[dict[str, int]] = {"kubernetes": 0, "slurm": 1, "docker": 2, "podman": 3}
"""Rank of each kind. Of several engines that show one container, that of lowest rank names it: it uses the others."""
PLACES: Final[dict[str, tuple[str, ...]]] = {
    "docker": ("docker/*", "system.slice/docker-*.scope"),
    "podman": (
        "libpod_parent/libpod-*",
        "machine.slice/libpod-*.scope",
        "user.slice/user-*.slice/user@*.service/user.slice/libpod-*.scope",
    ),
    "slurm": ("slurm*/uid_*/job_*", "*.slice/*slurmstepd.scope/job_*", f"*.slice/*slurmstepd.scope/{SLUID}"),
    "kubernetes": (
        "kubepods*/pod*/*",
        "kubepods*/*/pod*/*",
        "kubepods.slice/kubepods-pod*.slice/*.scope",
        "kubepods.slice/kubepods-*.slice/kubepods-*-pod*.slice/*.scope",
    ),
}
"""Patterns of the cgroups where jobs of each kind of engine are by default; these places are watched for new jobs."""
_KINDS: Final[dict[str, tuple[str, ...]]] = {"docker": ("docker", "container")}
"""Kind of a source -> kinds of ``workloads.classify``, if these are not only the one of the same name."""

Views = Mapping[Key, EngineView]


def list_engines(source: Source) -> list[Key]:
    """Return the engines of a source. Podman may have a service for each user, besides the service of root."""
    if source.kind != "podman" or source.socket:
        return [(source.kind, source.socket or SOCKETS[source.kind])]
    users = sorted(glob.glob(USER_SOCKETS))
    own = SOCKETS["podman"]
    return [("podman", each) for each in ([own] if os.path.exists(own) or not users else []) + users]


def may_hold_engine_jobs(source: Source, path: str) -> bool:
    """Return whether a change at ``path`` (relative) may concern a job of the source's engine."""
    return any(may_match(place, path) for place in PLACES[source.kind])


def list_named(source: Source, views: Views) -> dict[str, EngineJob]:
    """Return by path the jobs that the engines of a source named. If two engines name one cgroup, the first counts."""
    found: dict[str, EngineJob] = {}
    for view in map(views.get, list_engines(source)):
        found = {**view.jobs, **found} if view is not None else found
    return found


def list_engine_jobs(root: str, source: Source, views: Views) -> tuple[list[EngineJob], list[str]]:
    """Return the jobs of a source's engine that have a cgroup, sorted by path, and the directories in which new jobs
    would appear. The engine may not have named all of these jobs yet."""
    named = list_named(source, views)
    found = {path: job for path, job in named.items() if os.path.isdir(os.path.join(root, path))}
    watched = {path.rpartition("/")[0] for path in found}
    above = {each for path in found for each in list_above(path)}
    for place in PLACES[source.kind]:
        paths, beside = list_glob(root, place)
        watched.update(beside)
        for path in paths:
            unnamed = None if path in found or path in above else find_unnamed(root, source.kind, path)
            if unnamed is not None:
                found[unnamed.path] = unnamed
    return [found[path] for path in sorted(found)], sorted(watched)


def list_places(root: str, kind: str) -> list[str]:
    """Return the relative paths of cgroups that may be jobs of an engine of this kind. If crun created a child in such
    a cgroup, return the child instead."""
    found = [path for place in PLACES[kind] for path in list_glob(root, place)[0]]
    return [find_own(root, path) for path in found]


def find_own(root: str, path: str) -> str:
    """Return the cgroup that has the limit of the job at ``path``: the child that crun creates, else ``path``."""
    child = f"{path}/{CRUN_CHILD}"
    return child if os.path.isdir(os.path.join(root, child)) else path


def find_unnamed(root: str, kind: str, path: str) -> EngineJob | None:
    """Return the job at ``path``, described by the path alone; None if that is no job of this kind of engine."""
    described = classify(path)
    if described is None or described[0].kind not in _KINDS.get(kind, (kind,)):
        return None
    last = path.rpartition("/")[2]
    name = last if kind == "slurm" else described[0].name.rpartition("/")[2]
    return EngineJob(kind, last, name, find_own(root, path), is_named=False)


def find_outer(jobs: list[EngineJob]) -> dict[str, EngineJob]:
    """Return by path those of ``jobs`` that are not inside another job. If several describe one cgroup, the job of the
    outermost engine counts; of two jobs of one kind, the named one, since the other's engine may not know the name."""
    taken: dict[str, EngineJob] = {}
    for job in sorted(jobs, key=lambda each: (RANKS[each.kind], not each.is_named)):
        taken.setdefault(job.path, job)
    return {path: job for path, job in taken.items() if taken.keys().isdisjoint(list_above(path))}


def choose_id(job: EngineJob, taken: Mapping[str, str]) -> str:
    """Return the job's name; if that is taken by another job, append a part of the engine's id for the job."""
    return job.name if job.name not in taken else f"{job.name}-{job.job_id[:SHORT_ID]}"
