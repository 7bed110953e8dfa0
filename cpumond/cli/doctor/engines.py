"""Checks of ``cpumond doctor``: engines. Each takes the facts it examines and returns findings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal

from cpumond.agent.config import Source
from cpumond.agent.discovery import FoundJob, describe_source
from cpumond.cli.doctor.checks import Finding, advise_source
from cpumond.cli.engines import EngineSeen, describe_fates, explain_silence, format_some, list_troubles
from cpumond.core.job_cgroups import INSTALLED_DROP_INS
from cpumond.core.words import count

DROP_IN_ADVICE: Final = (
    f"`cpumond init` writes a drop-in that opens it (also {INSTALLED_DROP_INS}/cpumond.service.d/{{kind}}.conf); then "
    "systemctl daemon-reload && systemctl restart cpumond"
)
RESTART_ADVICE: Final = "systemctl restart cpumond: the service still has the socket from its start"

Reach = Literal["", "hidden", "stale"]


def check_engine(seen: EngineSeen, find_reach: Callable[[str], Reach]) -> list[Finding]:
    """Check that an engine answers, that a source names it, and that the service can reach it. ``find_reach``: finds
    whether the service can reach a socket."""
    check = f"engine {seen.kind}"
    if not (seen.is_here or seen.is_configured):
        return []
    if not seen.is_here:
        socket, view = next(iter(seen.views.items()))
        why, advice = explain_silence(seen, socket, view)
        text = f"a source names {seen.kind}, but it is not on this host now: {why}"
        return [Finding(check, "warn", text, f"remove the source from this host's configuration, or: {advice}")]
    up = [socket for socket, view in seen.views.items() if view.is_up]
    findings = []
    if not seen.is_configured:
        what = seen.describe() if up or seen.found else seen.facts.daemon
        text = f"{what}: on this host, and no source names it"
        advice = advise_source(seen.kind, seen.own_socket) if seen.can_be_followed else "see why it gives no answer"
        findings.append(Finding(check, "warn", text, advice))
    elif up:
        findings.append(Finding(check, "ok", f"{seen.headline}: it answers"))
    for socket in up if seen.is_configured else ():
        reach = find_reach(socket) if socket.startswith("/") else ""
        if reach == "stale":
            text = f"{socket} was recreated after the service started, so the service cannot reach it"
            findings.append(Finding(check, "warn", text, RESTART_ADVICE))
        elif reach:
            text = f"{socket} is hidden from the service by its unit"
            findings.append(Finding(check, "fail", text, DROP_IN_ADVICE.format(kind=seen.kind)))
    return findings + [Finding(check, "warn", text, advice) for text, advice in list_troubles(seen)]


def check_engine_source(number: int, source: Source, jobs: Iterable[FoundJob], seen: EngineSeen) -> list[Finding]:
    """Report the jobs among ``jobs`` that an engine's source finds, and whether their limits will move."""
    check = f"source {number}"
    own = [job for job in jobs if job.source is source]
    shown = f"{describe_source(source)!r}"
    if not own:
        if seen.found:
            text = (
                f"{shown} names none of {count(len(seen.found), seen.facts.noun)}: other sources come first, or "
                "`pattern` excludes them"
            )
            return [Finding(check, "warn", text, "correct its pattern, or remove it")]
        return [Finding(check, "ok", f"{shown}: no {seen.facts.noun} runs now")]
    text = f"{shown} finds {count(len(own), seen.facts.noun)}{format_some(job.job_id for job in own)}"
    text += _describe_slurm([job.path for job in own]) if seen.kind == "slurm" else ""
    fates = "; ".join(describe_fates(seen.kind, seen.jobs, is_shadow=False))
    findings = [Finding(check, "ok", f"{text}; of all it has: {fates}" if fates else text)]
    outside = next((names for why, names in seen.jobs.refused.items() if "managed_roots" in why), ())
    if outside:
        outsiders = count(len(outside), seen.facts.noun)
        text = f"{outsiders} will never be written{format_some(outside)}: outside managed_roots"
        advice = "add a cgroup above them to managed_roots, or remove managed_roots if all sources are engines"
        findings.append(Finding(check, "warn", text, advice))
    return findings


def _describe_slurm(paths: list[str]) -> str:
    """The place and the names of the cgroups of Slurm's jobs: its CgroupSlice, its CgroupJobIdPaths."""
    places = sorted({os.path.dirname(path) for path in paths})
    by_number = sum(os.path.basename(path).startswith("job_") for path in paths)
    names = "job_N" if by_number == len(paths) else "job_N and SLUID" if by_number else "SLUID"
    return f", below {places[0]}{f' and {len(places) - 1} more' if places[1:] else ''}, named by {names}"


def find_agent_reach(socket: str, pid: int | None) -> Reach | None:
    """Whether a running agent sees the same socket as this process; None if that may not be examined."""
    if pid is None:
        return None
    root = f"/proc/{pid}/root"
    try:
        os.stat(f"{root}/")
    except OSError:
        return None
    try:
        there = os.stat(f"{root}{os.path.realpath(socket)}")
    except OSError:
        return "hidden"
    here = os.stat(socket)
    return "" if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino) else "stale"


def find_unit_reach(socket: str, properties: Mapping[str, str]) -> Reach | None:
    """Whether a unit with these mounts (properties of ``systemctl show``) hides a socket; None without properties."""
    if not any(properties.values()):
        return None
    place = os.path.realpath(socket)
    hidden = [name for name in _list_paths(properties.get("TemporaryFileSystem", "")) if _is_below(place, name)]
    if properties.get("ProtectHome", "no") in ("yes", "tmpfs"):
        hidden += [name for name in ("/home", "/root", "/run/user") if _is_below(place, name)]
    opened = [
        name
        for key in ("BindPaths", "BindReadOnlyPaths")
        for name in _list_paths(properties.get(key, ""))
        if _is_below(place, name) and not any(_is_below(other, name) for other in hidden)
    ]
    return "hidden" if hidden and not opened else ""


def _list_paths(text: str) -> list[str]:
    """The paths of a property: "-/run/dbus:/run/dbus:rbind /run/x" has two."""
    return [word.lstrip("-+").partition(":")[0] for word in text.split()]


def _is_below(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place.rstrip('/')}/")
