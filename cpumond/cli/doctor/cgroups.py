"""Checks of ``cpumond doctor``: cgroups and jobs. Each takes the facts it examines and returns findings."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from cpumond.agent.config import ENGINE_KINDS, AgentConfig, Source
from cpumond.cli.doctor.checks import Finding
from cpumond.cli.doctor.host import find_user, may, read_line
from cpumond.core.errors import UnavailableError, UnknownLimitsError, describe
from cpumond.core.words import count
from cpumond.host.cgroup.files import NO_BANDWIDTH, find_missing_quota

if TYPE_CHECKING:
    from cpumond.agent.state_file import Originals
    from cpumond.host.cgroup.mounts import Hierarchies, Mount

SAMPLE = 3
READS = 200
SLOW_READ_US = 100.0


def check_mounts(mounts: list[Mount], source: str) -> list[Finding]:
    """Check the layout, and where each controller that the agent uses is mounted."""
    from cpumond.host.cgroup.mounts import find_hierarchies

    try:
        hierarchies = find_hierarchies(mounts, source)
    except UnavailableError as error:
        advice = "mount cgroup2 or the v1 cpu controller; in a container, the host's"
        return [Finding("cgroups", "fail", str(error), advice)]
    text = f"layout {hierarchies.layout}, limits are written in version {hierarchies.cpu_version}"
    findings = [Finding("cgroups", "ok", text)]
    for controller, needed in (("cpu", True), ("cpuacct", hierarchies.cpu_version == 1), ("cpuset", True)):
        if places := [f"{m.mount_point} (v{m.version})" for m in mounts if controller in m.controllers]:
            findings.append(Finding(f"controller {controller}", "ok", ", ".join(places)))
        elif controller == "cpuset":
            text = "not mounted: CPUs of a job without quota are taken from the agent's own affinity"
            findings.append(Finding("controller cpuset", "warn", text, "mount it, or give each source a cpu_limit"))
        elif needed:
            text = f"not mounted: CPU time is read from cpu.stat of {hierarchies.cpuacct_root}"
            findings.append(Finding(f"controller {controller}", "ok", text))
    unified = next((mount for mount in mounts if mount.version == 2), None)
    if unified is not None:
        offered = " ".join(sorted(unified.controllers)) or "none"
        text = f"{unified.mount_point}, controllers: {offered}"
        passed = read_line(os.path.join(unified.mount_point, "cgroup.subtree_control"))
        if passed is not None and hierarchies.cpu_version == 2:
            text += f"; enabled for the cgroups in it: {passed or 'none'}"
        findings.append(Finding("cgroup2", "ok", text))
    return findings


def check_pressure(error: OSError | None, unified_root: str | None) -> Finding:
    """Check that the kernel has PSI, that it is on, and that cgroups have it. ``error``: in reading the host's file."""
    if error is not None:
        off = error.errno == errno.EOPNOTSUPP
        text = (
            "the kernel has it, but it is turned off" if off else f"not available ({error.filename}: {describe(error)})"
        )
        advice = "optional: limits move without it; " + ("boot with psi=1" if off else "it needs CONFIG_PSI")
        return Finding("pressure", "warn", text, advice)
    if unified_root is None:
        advice = "optional; mount cgroup2 beside v1 to see the pressure of single jobs"
        return Finding("pressure", "warn", "on, but only for the whole host: cgroup2 is not mounted", advice)
    return Finding("pressure", "ok", f"on; cgroups below {unified_root} have their own")


def measure_read(hierarchies: Hierarchies, path: str) -> Finding:
    """Measure one read of a cgroup's counters, as the agent does it. Raises CgroupReadError."""
    from cpumond.host.cgroup import open_cgroup

    cgroup = open_cgroup(hierarchies, path)
    if cgroup is None and os.path.isdir(os.path.join(hierarchies.cpu_root, path)):
        text = f"cgroup {path!r} is missing below {hierarchies.cpuacct_root}: its CPU use cannot be measured"
        return Finding("counter read", "warn", text, "create it in the hierarchy of cpuacct, too")
    if cgroup is None:
        return Finding("counter read", "warn", f"cgroup {path!r} disappeared in the meantime", "run doctor again")
    with contextlib.closing(cgroup):
        start_s = time.perf_counter()
        for _ in range(READS):
            cgroup.read(start_s)
        each_us = (time.perf_counter() - start_s) / READS * 1e6
    text = f"{each_us:.1f} us for {path or 'the root cgroup'}: 1000 jobs per second take {each_us / 10:.1f} % of a core"
    if each_us > SLOW_READ_US:
        return Finding("counter read", "warn", text, "raise check_period, or see what slows this machine down")
    return Finding("counter read", "ok", text)


def check_roots(roots: list[str], cpu_root: str, kinds: Collection[str] = ()) -> list[Finding]:
    """Check that the cgroups below which limits may be written exist; ``kinds``: those of all sources."""
    engines = [kind for kind in ENGINE_KINDS if kind in kinds]
    if not roots and engines:
        text = f"empty: jobs of {' and '.join(engines)} are managed wherever their engine has them"
        if set(kinds) <= set(engines):
            return [Finding("managed_roots", "ok", text)]
        advice = 'name the cgroups of the others, for example managed_roots = ["jobs"], and those of engines, too'
        return [Finding("managed_roots", "warn", f"{text}; no others will ever be written", advice)]
    if not roots:
        advice = 'name the cgroups below which jobs run, for example managed_roots = ["jobs"]'
        return [Finding("managed_roots", "warn", "empty: no cgroup will ever be written", advice)]
    findings = []
    for root in roots:
        directory = os.path.join(cpu_root, root)
        if not root:
            advice = "name the cgroups below which jobs run, so that nothing else is ever written"
            findings.append(Finding("managed_roots", "warn", f"'/' is all of {cpu_root}", advice))
        elif os.path.isdir(directory):
            findings.append(Finding("managed_roots", "ok", directory))
        else:
            advice = f"create it, or correct the name; it is relative to {cpu_root}"
            findings.append(Finding("managed_roots", "warn", f"{directory} does not exist", advice))
    return findings


def check_no_sources() -> Finding:
    advice = "add a [[source]] to the configuration, or add jobs with `cpumond job add`"
    return Finding("sources", "warn", "the configuration has none", advice)


def check_source(number: int, source: Source, config: AgentConfig, hierarchies: Hierarchies) -> list[Finding]:
    """The cgroups that a source finds now: their number, a sample of the resulting jobs, and mistakes."""
    from cpumond.agent.discovery import describe_source, find_cgroups, name_job
    from cpumond.agent.tracked import find_refusal

    check = f"source {number}"
    root = hierarchies.cpu_root
    paths, _ = find_cgroups(root, source)
    shown = f"{source.kind} {describe_source(source)!r}"
    if not paths:
        text = f"{shown} matches no cgroup in {root}"
        return [Finding(check, "warn", text, "start a job, or correct the pattern; `find` shows the cgroups there")]
    named = {path: job for path in paths if (job := name_job(source, path)) is not None}
    if not named:
        text = (
            f"{count(len(paths), 'cgroup')} match {describe_source(source)!r}, "
            f"but id_regex {source.id_regex!r} matches none of them"
        )
        return [Finding(check, "warn", text, f"correct id_regex; it is matched against paths like {paths[0]!r}")]
    findings = []
    sample = [
        f"{path} -> job {job.job_id!r}" + (f" of operation {job.operation_id!r}" if job.operation_id else "")
        for path, job in list(named.items())[:SAMPLE]
    ]
    more = f", and {len(named) - SAMPLE} more" if len(named) > SAMPLE else ""
    text = f"{shown} matches {count(len(paths), 'cgroup')}: {'; '.join(sample)}{more}"
    findings.append(Finding(check, "ok", text))
    if len(named) < len(paths):
        missed = next(path for path in paths if path not in named)
        text = f"id_regex {source.id_regex!r} does not match {len(paths) - len(named)} of them, for example {missed!r}"
        findings.append(Finding(check, "warn", text, "they are left out; correct id_regex or narrow the pattern"))
    ids = collections.Counter(job.job_id for job in named.values())
    if doubled := sorted(job_id for job_id, times in ids.items() if times > 1):
        text = f"several cgroups become the job {doubled[0]!r}" + (" (and others)" if len(doubled) > 1 else "")
        advice = "all but the first are left out; give an id_regex that distinguishes them"
        findings.append(Finding(check, "warn", text, advice))
    refused: dict[str, list[str]] = {}
    for path in named:
        settings = config.resolve_settings(source, named[path].operation_id, named[path].layer)
        if why := find_refusal(config, named[path], settings, os.path.join(root, path)):
            refused.setdefault(why, []).append(path)
    for why, where in refused.items():
        advice = "leave them out of the source"
        if "managed_roots" in why:
            advice = "add a cgroup above them to managed_roots"
        elif "child cgroups" in why:
            advice = "match their leaf cgroups instead"
        text = f"{len(where)} of them will never be written, for example {where[0]!r}: {why}"
        findings.append(Finding(check, "warn", text, advice))
    return findings


def check_limit_files(
    version: int, directories: list[str], others: list[str], units: Collection[str] = (), wants_burst: bool = False
) -> list[Finding]:
    """Check that jobs and managed roots (``directories``) have the files of a CPU limit, and that the kernel supports
    bursts.

    If none of the directories exist, ``others`` show what the kernel offers. Directories in ``units`` belong to
    systemd, which creates the files when a CPU property is set. ``wants_burst``: a job is under rule ``peak``."""
    needed = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    burst = "cpu.max.burst" if version == 2 else "cpu.cfs_burst_us"

    def has(directory: str) -> bool:
        return all(os.path.exists(os.path.join(directory, name)) for name in needed)

    existing = [directory for directory in directories if os.path.isdir(directory)]
    if not existing:
        existing = [directory for directory in others if has(directory)]
    if not existing:
        text = f"no job and no managed root exists, and no other cgroup shows whether the kernel has {needed[0]}"
        return [Finding("limit files", "warn", text, "run doctor again when a job runs")]
    without = [directory for directory in existing if not has(directory)]
    findings = []
    if version == 2 and any(directory in units for directory in without):
        plain = [directory for directory in without if directory in units]
        text = f"{count(len(plain), 'unit')} without {needed[0]} so far, for example {plain[0]}"
        command = f"systemctl set-property --runtime {os.path.basename(plain[0])} CPUWeight=100"
        advice = f"where the agent may not set properties of units: {command}"
        findings.append(Finding("limit files", "warn", f"{text}: its first limit creates it", advice))
        existing = [directory for directory in existing if directory not in plain]
        without = [directory for directory in without if directory not in plain]
        if not existing:
            return findings
    if without:
        advice = (
            "the cpu controller is off there: `echo +cpu > cgroup.subtree_control` in its parent; for a systemd unit, "
            "set CPUWeight= on its slice"
            if version == 2 and not any(map(find_missing_quota, without))
            else NO_BANDWIDTH
        )
        shown = ", ".join(without[:SAMPLE])
        text = f"{len(without)} of {count(len(existing), 'cgroup')} without {needed[0]}: {shown}"
        return [*findings, Finding("limit files", "fail", text, advice)]
    text = f"{' and '.join(needed)} in {'the other' if findings else 'all of'} {count(len(existing), 'cgroup')}"
    findings.append(Finding("limit files", "ok", text))
    if any(os.path.exists(os.path.join(directory, burst)) for directory in existing):
        findings.append(Finding("burst", "ok", f"the kernel has {burst}"))
    else:
        text = f"the kernel has no {burst}"
        advice = "nothing to do unless burst_ratio is set: that needs Linux 5.14"
        if wants_burst:
            text += ', which limit_rule = "peak" relies on: bursts shorter than a check keep its limits higher'
            advice = "Linux 5.14 or later reclaims more with this rule; the rule also works without"
        findings.append(Finding("burst", "warn", text, advice))
    return findings


def check_rights(version: int, directories: list[str]) -> Finding:
    """Check that this user may write the limits; nothing is written to find out."""
    name = "cpu.max" if version == 2 else "cpu.cfs_quota_us"
    files = [path for directory in directories if os.path.exists(path := os.path.join(directory, name))]
    if not files:
        text = "there is no job whose limit could be examined"
        return Finding("rights", "warn", text, "run doctor again when a job runs")
    closed = [path for path in files if not may(path, os.W_OK)]
    if not closed:
        return Finding("rights", "ok", f"{find_user()} may write the limits of {count(len(files), 'cgroup')}")
    text = f"{find_user()} may not write {len(closed)} of {len(files)} limits, for example {closed[0]}"
    if os.geteuid() == 0:
        advice = "the mount is read-only or the container lacks rights: give the agent a writable cgroup mount"
        return Finding("rights", "fail", text, advice)
    advice = "run doctor as the agent's user or as root; the shipped cpumond.service has the right (CAP_DAC_OVERRIDE)"
    return Finding("rights", "warn", text, advice)


def check_leftovers(
    path: str, content: Originals | None, running: bool, is_current: bool, hierarchies: Hierarchies | None
) -> Finding:
    """Check for limits that a dead agent left lowered; ``is_current``: ``content`` was written since this boot."""
    if content is None or not content.cgroups:
        return Finding("leftovers", "ok", f"{path} names no cgroup to restore")
    if not is_current:
        return Finding("leftovers", "ok", f"{path} is of an earlier boot; its cgroups are gone")
    left = list(content.cgroups)
    if hierarchies is not None:
        from cpumond.host.cgroup.find import CgroupFinder

        finder = CgroupFinder(hierarchies, content.root)
        try:
            left = [name for name in left if finder.find(name, content.cgroups[name].inode) is not None]
        except UnknownLimitsError as error:
            return Finding("leftovers", "fail", str(error), "mount it where it was")
    if running:
        return Finding("leftovers", "ok", f"{path} holds the original limits of {count(len(left), 'cgroup')}")
    if not left:
        return Finding("leftovers", "ok", f"the cgroups of {path} are gone")
    text = f"a dead agent left the limits of {count(len(left), 'cgroup')}, for example {left[0]!r}"
    return Finding("leftovers", "fail", text, "restore them with `cpumond restore`, or start the agent")
