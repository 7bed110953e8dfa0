"""``cpumond doctor``: what this host offers, what is missing, and what to do about it.

Every ``check_*`` takes what it looks at as an argument and gives findings; it writes nothing and takes no lock.
``examine`` calls them all in turn.
"""

from __future__ import annotations

import collections
import errno
import functools
import getpass
import math
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

import click
import msgspec

from cpumond import __version__
from cpumond.cli.agent import config_option
from cpumond.cli.client import AgentClient, StatusAnswer, is_given
from cpumond.config import AgentConfig, Source, load_config, parse_listen
from cpumond.errors import EXIT_CONFIG, EXIT_UNAVAILABLE, ConfigError, CpumondError, UnavailableError, describe

if TYPE_CHECKING:
    from cpumond.agent.state_file import Originals
    from cpumond.cgroup.mounts import Hierarchies, Mount
    from cpumond.discovery import FoundJob

CONNECT_S = 2.0
SAMPLE = 3
DESCRIPTORS_PER_JOB = 2
OTHER_DESCRIPTORS = 64
READS = 200
SLOW_READ_US = 100.0

Level = Literal["ok", "warn", "fail"]

WRITERS: Final = {
    "kubelet": "Kubernetes' kubelet sets the quotas of its pods",
    "koordlet": "koordlet sets quotas of best-effort pods",
    "dockerd": "dockerd sets quotas at `docker update`",
    "containerd": "containerd sets quotas of its containers",
    "crio": "CRI-O sets quotas of its containers",
    "podman": "podman sets quotas at `podman update`",
    "conmon": "podman or CRI-O containers run here; their manager sets quotas",
    "slurmd": "slurmd sets the quotas of its job steps",
}
"""Name of a process -> what it does to quotas."""

SLOW_CLOCKS: Final = frozenset({"hpet", "acpi_pm", "jiffies", "pit", "refined-jiffies"})


class Finding(msgspec.Struct, frozen=True):
    """The result of one check: what was looked at, how it is, and for all but ok what to do."""

    check: str
    level: Level
    text: str
    advice: str = ""


class AgentSeen(msgspec.Struct, frozen=True):
    """What there is of a running agent: whether one holds the lock, its pid (None: not told), its configuration."""

    running: bool
    pid: int | None = None
    since: float | None = None
    config: str = ""


@click.command("doctor", epilog="Example: cpumond doctor --config /etc/cpumond/cpumond.toml")
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor_command(config_path: str, as_json: bool) -> int:
    """Say what this host offers for cpumond and what to do about what is missing.

    It only looks: nothing is written, no lock is taken. Without root it says what it could not see. The exit code is
    0 when nothing failed, 69 when a check failed, 78 when the configuration is wrong.
    """
    findings = examine(config_path, is_given("config_path"))
    code = choose_exit_code(findings)
    if as_json:
        content = msgspec.json.encode({"findings": findings, "exit_code": code})
        click.echo(msgspec.json.format(content, indent=2).decode())
    else:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if is_terminal else None
        click.echo(draw_findings(findings, width))
    return code


def choose_exit_code(findings: Iterable[Finding]) -> int:
    """0 when nothing failed, 78 when the configuration is wrong, else 69."""
    failed = {finding.check for finding in findings if finding.level == "fail"}
    if "configuration" in failed:
        return EXIT_CONFIG
    return EXIT_UNAVAILABLE if failed else 0


def draw_findings(findings: list[Finding], width: int | None) -> str:
    """Findings as text: level, check, text, and what to do on a line of its own; ``width`` None: nothing is wrapped."""
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    column = max(len(finding.check) for finding in findings) + 2
    indent = " " * (6 + column)
    lines = []
    for finding in findings:
        level = click.style(f"{finding.level:<6}", colours[finding.level])
        text = _wrap(finding.text, width, indent)
        lines.append(f"{level}{finding.check:<{column}}{text}")
        if finding.advice:
            lines.append(f"{indent}-> {_wrap(finding.advice, width, indent + '   ')}")
    count = {level: sum(finding.level == level for finding in findings) for level in colours}
    lines.append(f"{len(findings)} findings: {count['ok']} ok, {count['warn']} to look at, {count['fail']} failed")
    return "\n".join(lines)


def _wrap(text: str, width: int | None, indent: str) -> str:
    """``text`` with its further lines indented; a path is never broken."""
    if width is None or width < len(indent) + 30:
        return text
    lines = textwrap.wrap(text, width - len(indent), break_long_words=False, break_on_hyphens=False)
    return f"\n{indent}".join(lines)


# ---- all checks


def examine(config_path: str, explicit: bool) -> list[Finding]:
    """All findings about this host under the configuration at ``config_path`` (``explicit``: the user named it)."""
    config, findings = check_config(config_path, explicit)
    findings = [describe_host(), *findings]

    def look(check: str, work: Callable[[], list[Finding]]) -> None:
        # One thing that cannot be seen must not hide the others.
        try:
            findings.extend(work())
        except (CpumondError, OSError) as error:
            text = str(error) if isinstance(error, CpumondError) else f"{error.filename or ''}: {describe(error)}"
            findings.append(Finding(check, "warn", f"could not be looked at: {text}", _run_as_root()))

    seen = find_agent(config)
    hierarchies = _examine_cgroups(config, look)
    jobs: list[FoundJob] = []
    if hierarchies is not None:
        jobs = _examine_jobs(config, hierarchies, look)
    look("descriptors", lambda: check_descriptors(*_read_descriptor_limit(seen), len(jobs), config.discovery.max_jobs))
    version = 1 if hierarchies is None else hierarchies.cpu_version
    look("inotify", lambda: check_inotify(_read_inotify(), len(jobs) * (2 if version == 1 else 1)))
    look("agent", lambda: check_agent(seen, config))
    if seen.running:
        look("agent", lambda: check_answer(AgentClient(config.control_socket, CONNECT_S)))
    look("other writers", lambda: check_writers(list_process_names()))
    look("systemd", lambda: _examine_systemd(config, hierarchies, jobs))
    look("clock", lambda: check_clock("/sys/devices/system/clocksource/clocksource0"))
    look("state_dir", lambda: [check_directory("state_dir", config.state_dir)])
    look("runtime_dir", lambda: [check_directory("runtime_dir", config.runtime_dir)])
    look("leftovers", lambda: _examine_leftovers(config, hierarchies, seen))
    look("pause file", lambda: [check_pause(config.runtime_dir)])
    look("report", lambda: [check_report(config.report.kind, config.report.url, try_connect)])
    look("metrics", lambda: [check_metrics(config.metrics.listen, seen.running, try_connect, read_metrics)])
    return findings


Look = Callable[[str, Callable[[], list[Finding]]], None]


def _examine_cgroups(config: AgentConfig, look: Look) -> Hierarchies | None:
    from cpumond.cgroup.mounts import find_hierarchies

    mounts: list[Mount] = []

    def read() -> list[Finding]:
        mounts.extend(read_mounts(config.mountinfo))
        return check_mounts(mounts, config.mountinfo)

    look("cgroups", read)
    try:
        hierarchies = find_hierarchies(mounts, config.mountinfo)
    except UnavailableError:
        # Said by check_mounts; without the cpu controller there is nothing more to look at.
        return None
    look("pressure", lambda: [check_pressure(try_read("/proc/pressure/cpu"), hierarchies.unified_root)])
    return hierarchies


def _examine_jobs(config: AgentConfig, hierarchies: Hierarchies, look: Look) -> list[FoundJob]:
    from cpumond.discovery import list_jobs

    registered: list[FoundJob] = []
    look("added jobs", lambda: _take_registered(registered, config.state_dir))
    jobs = list_jobs(config.source, registered, hierarchies.cpu_root).jobs
    look("managed_roots", lambda: check_roots(config.managed_roots, hierarchies.cpu_root))
    for number, source in enumerate(config.source, 1):
        look(f"source {number}", functools.partial(check_source, number, source, config, hierarchies))
    if not config.source and not registered:
        look("sources", lambda: [check_no_sources()])
    directories = [os.path.join(hierarchies.cpu_root, job.path) for job in jobs]
    directories += [os.path.join(hierarchies.cpu_root, root) for root in config.managed_roots if root]
    look(
        "limit files",
        lambda: check_limit_files(hierarchies.cpu_version, directories, _children(hierarchies.cpu_root)),
    )
    look("rights", lambda: [check_rights(hierarchies.cpu_version, directories)])
    look("counter read", lambda: [measure_read(hierarchies, jobs[0].path if jobs else "")])
    return jobs


def _take_registered(registered: list[FoundJob], state_dir: str) -> list[Finding]:
    registered += read_registered(state_dir)
    return [Finding("added jobs", "ok", f"{_count(len(registered), 'job')} added by `cpumond job add`")]


def _examine_systemd(config: AgentConfig, hierarchies: Hierarchies | None, jobs: list[FoundJob]) -> list[Finding]:
    booted = os.path.isdir("/run/systemd/system")
    findings = [check_systemd(booted, read_systemd_version())]
    if hierarchies is not None and booted:
        paths = sorted(job.path for job in jobs) or [root for root in config.managed_roots if root]
        findings += check_delegation(paths, hierarchies.cpu_root, is_delegated)
    return findings


def _examine_leftovers(config: AgentConfig, hierarchies: Hierarchies | None, seen: AgentSeen) -> list[Finding]:
    from cpumond.agent.state_file import STATE_FILE, Originals, load, read_boot_id

    path = os.path.join(config.state_dir, STATE_FILE)
    if not may(os.path.dirname(path), os.X_OK) and os.path.isdir(config.state_dir):
        return [Finding("leftovers", "warn", f"{path} cannot be read by {_user()}", _run_as_root())]
    try:
        content = load(path, Originals)
    except CpumondError as error:
        if not may(path, os.R_OK):
            return [Finding("leftovers", "warn", f"{path} cannot be read by {_user()}", _run_as_root())]
        advice = (
            "start the agent: it puts the file aside and begins with the full limits; look at the limits of the jobs"
        )
        return [Finding("leftovers", "fail", str(error), advice)]
    root = None if hierarchies is None else hierarchies.cpu_root
    return [check_leftovers(path, content, seen.running, read_boot_id(), root)]


# ---- the checks


def describe_host() -> Finding:
    """What this is about: version, kernel, CPUs."""
    text = (
        f"cpumond {__version__}, Python {platform.python_version()}, Linux {platform.release()}, "
        f"{os.cpu_count()} CPUs, as {_user()}"
    )
    return Finding("host", "ok", text)


def check_config(path: str, explicit: bool) -> tuple[AgentConfig, list[Finding]]:
    """The configuration to look at and what is to say about it; a wrong one is replaced by the built-in defaults."""
    if not explicit and not os.path.exists(path):
        advice = "copy config/cpumond.toml there, or name one with --config"
        text = f"there is none at {path}; the built-in defaults are looked at"
        return load_config(None), [Finding("configuration", "warn", text, advice)]
    try:
        config = load_config(path)
    except ConfigError as error:
        advice = "correct it; the other findings are about the built-in defaults"
        return load_config(None), [Finding("configuration", "fail", str(error), advice)]
    except CpumondError as error:
        text = f"{error}; the built-in defaults are looked at"
        return load_config(None), [Finding("configuration", "warn", text, _run_as_root())]
    text = f"{path} is good: node {config.node_id}, {_count(len(config.source), 'source')}"
    return config, [Finding("configuration", "ok", text)]


def read_mounts(mountinfo: str) -> list[Mount]:
    """The cgroup mounts that a process with this mountinfo sees. Raises OSError."""
    from cpumond.cgroup.mounts import parse_mountinfo

    with open(mountinfo, encoding="utf-8", errors="surrogateescape") as file:
        text = file.read()
    controllers = {}
    for mount in parse_mountinfo(text):
        if mount.version == 2:
            try:
                with open(os.path.join(mount.mount_point, "cgroup.controllers"), encoding="ascii") as file:
                    controllers[mount.mount_point] = file.read()
            except OSError:
                # A mount that is hidden from us offers nothing.
                controllers[mount.mount_point] = ""
    return parse_mountinfo(text, controllers)


def check_mounts(mounts: list[Mount], source: str) -> list[Finding]:
    """The layout, and where each controller that the agent uses is mounted."""
    from cpumond.cgroup.mounts import find_hierarchies

    try:
        hierarchies = find_hierarchies(mounts, source)
    except UnavailableError as error:
        return [
            Finding("cgroups", "fail", str(error), "mount cgroup2 or the v1 cpu controller; in a container, the host's")
        ]
    findings = [
        Finding(
            "cgroups", "ok", f"layout {hierarchies.layout}, limits are written in version {hierarchies.cpu_version}"
        )
    ]
    for controller, needed in (("cpu", True), ("cpuacct", hierarchies.cpu_version == 1), ("cpuset", True)):
        places = [f"{m.mount_point} (v{m.version})" for m in mounts if controller in m.controllers]
        if places:
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
        findings.append(Finding("cgroup2", "ok", f"{unified.mount_point}, controllers: {offered}"))
    return findings


def check_limit_files(version: int, directories: list[str], others: list[str]) -> list[Finding]:
    """Whether jobs and managed roots (``directories``) have the files of a CPU limit, and the kernel that of a burst.

    Without any of them ``others`` may show what the kernel offers.
    """
    needed = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    burst = "cpu.max.burst" if version == 2 else "cpu.cfs_burst_us"

    def has(directory: str) -> bool:
        return all(os.path.exists(os.path.join(directory, name)) for name in needed)

    existing = [directory for directory in directories if os.path.isdir(directory)]
    if not existing:
        existing = [directory for directory in others if has(directory)]
    if not existing:
        text = f"neither a job nor a managed root is there, and no other cgroup shows whether there is {needed[0]}"
        return [Finding("limit files", "warn", text, "look again when a job runs")]
    without = [directory for directory in existing if not has(directory)]
    if without:
        advice = (
            "the cpu controller is off there: `echo +cpu > cgroup.subtree_control` in its parent; for a systemd unit, "
            "set CPUWeight= on its slice"
            if version == 2
            else "the kernel needs CONFIG_CFS_BANDWIDTH"
        )
        shown = ", ".join(without[:SAMPLE])
        text = f"{len(without)} of {_count(len(existing), 'cgroup')} without {needed[0]}: {shown}"
        return [Finding("limit files", "fail", text, advice)]
    findings = [Finding("limit files", "ok", f"{' and '.join(needed)} in all of {_count(len(existing), 'cgroup')}")]
    if any(os.path.exists(os.path.join(directory, burst)) for directory in existing):
        findings.append(Finding("burst", "ok", f"the kernel has {burst}"))
    else:
        advice = "nothing to do unless burst_ratio is set: that needs Linux 5.14"
        findings.append(Finding("burst", "warn", f"the kernel has no {burst}", advice))
    return findings


def check_pressure(error: OSError | None, unified_root: str | None) -> Finding:
    """PSI: whether the kernel has it and it is on (``error`` of reading the host's file), whether cgroups have it."""
    if error is not None:
        off = error.errno == errno.EOPNOTSUPP
        text = "the kernel has it, but it is turned off" if off else f"not here ({error.filename}: {describe(error)})"
        advice = "optional: limits are moved without it; " + ("boot with psi=1" if off else "it needs CONFIG_PSI")
        return Finding("pressure", "warn", text, advice)
    if unified_root is None:
        advice = "optional; mount cgroup2 beside v1 to see the pressure of single jobs"
        return Finding("pressure", "warn", "on, but only for the whole host: cgroup2 is not mounted", advice)
    return Finding("pressure", "ok", f"on; cgroups below {unified_root} have their own")


def check_roots(roots: list[str], cpu_root: str) -> list[Finding]:
    """Whether each of ``managed_roots`` exists."""
    if not roots:
        advice = 'name the cgroups below which jobs run, such as managed_roots = ["jobs"]'
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
            advice = f"make it, or correct the name; it is relative to {cpu_root}"
            findings.append(Finding("managed_roots", "warn", f"{directory} does not exist", advice))
    return findings


def check_no_sources() -> Finding:
    """A configuration that names no jobs."""
    advice = "add a [[source]] to the configuration, or add jobs with `cpumond job add`"
    return Finding("sources", "warn", "the configuration has none", advice)


def check_source(number: int, source: Source, config: AgentConfig, hierarchies: Hierarchies) -> list[Finding]:
    """What a source finds now: how many cgroups, a sample of the jobs they become, and what is wrong with them."""
    from cpumond.agent.jobs import find_refusal
    from cpumond.discovery import SOURCES, name_job

    check = f"source {number}"
    root = hierarchies.cpu_root
    paths, _ = SOURCES[source.kind](root, source.pattern)
    if not paths:
        text = f"{source.kind} {source.pattern!r} matches no cgroup in {root}"
        return [Finding(check, "warn", text, "start a job, or correct the pattern; `find` shows the cgroups there")]
    named = {path: job for path in paths if (job := name_job(source, path)) is not None}
    if not named:
        text = f"{_count(len(paths), 'cgroup')} match {source.pattern!r}, but id_regex {source.id_regex!r} none of them"
        return [Finding(check, "warn", text, f"correct id_regex; it is searched in paths such as {paths[0]!r}")]
    findings = []
    sample = [
        f"{path} -> job {job.job_id!r}" + (f" of operation {job.operation_id!r}" if job.operation_id else "")
        for path, job in list(named.items())[:SAMPLE]
    ]
    more = f", and {len(named) - SAMPLE} more" if len(named) > SAMPLE else ""
    text = f"{source.kind} {source.pattern!r} matches {_count(len(paths), 'cgroup')}: {'; '.join(sample)}{more}"
    findings.append(Finding(check, "ok", text))
    if len(named) < len(paths):
        missed = next(path for path in paths if path not in named)
        text = f"id_regex {source.id_regex!r} does not match {len(paths) - len(named)} of them, such as {missed!r}"
        findings.append(Finding(check, "warn", text, "they are left out; correct id_regex or narrow the pattern"))
    ids = collections.Counter(job.job_id for job in named.values())
    doubled = sorted(job_id for job_id, times in ids.items() if times > 1)
    if doubled:
        text = f"several cgroups become the job {doubled[0]!r}" + (" (and others)" if len(doubled) > 1 else "")
        findings.append(
            Finding(check, "warn", text, "all but the first are left out; give an id_regex that tells them apart")
        )
    refused: dict[str, list[str]] = {}
    for path in named:
        why = find_refusal(config, path, os.path.join(root, path))
        if why:
            refused.setdefault(why, []).append(path)
    for why, where in refused.items():
        advice = (
            "add what is above them to managed_roots" if "managed_roots" in why else "match their leaf cgroups instead"
        )
        text = f"{len(where)} of them will never be written, such as {where[0]!r}: {why}"
        findings.append(Finding(check, "warn", text, advice))
    return findings


def check_rights(version: int, directories: list[str]) -> Finding:
    """Whether this user may write the limits; nothing is written to find out."""
    name = "cpu.max" if version == 2 else "cpu.cfs_quota_us"
    files = [path for directory in directories if os.path.exists(path := os.path.join(directory, name))]
    if not files:
        return Finding("rights", "warn", "no job's limit is there to look at", "look again when a job runs")
    closed = [path for path in files if not may(path, os.W_OK)]
    if not closed:
        return Finding("rights", "ok", f"{_user()} may write the limits of {_count(len(files), 'cgroup')}")
    text = f"{_user()} may not write {len(closed)} of {len(files)} limits, such as {closed[0]}"
    if os.geteuid() == 0:
        advice = "the mount is read-only or the container lacks rights: give the agent a writable cgroup mount"
        return Finding("rights", "fail", text, advice)
    advice = "run doctor as the agent's user or as root; the shipped cpumond.service has the right (CAP_DAC_OVERRIDE)"
    return Finding("rights", "warn", text, advice)


def check_descriptors(soft: int, hard: int, whose: str, jobs: int, max_jobs: int) -> list[Finding]:
    """RLIMIT_NOFILE against two descriptors for each job; the agent takes all that the hard limit allows."""
    room = math.inf if hard == resource.RLIM_INFINITY else (hard - OTHER_DESCRIPTORS) // DESCRIPTORS_PER_JOB
    shown = "no" if hard == resource.RLIM_INFINITY else str(hard)
    text = (
        f"hard limit {shown} (soft {soft}) of {whose}: enough for {room:g} jobs; now {jobs}, "
        f"discovery.max_jobs {max_jobs}"
    )
    advice = f"set LimitNOFILE={DESCRIPTORS_PER_JOB * max_jobs + OTHER_DESCRIPTORS} in the agent's unit, or ulimit -Hn"
    if jobs > room:
        return [Finding("descriptors", "fail", text, advice)]
    return [Finding("descriptors", "warn" if max_jobs > room else "ok", text, advice if max_jobs > room else "")]


def check_inotify(limits: Mapping[str, int], watches: int) -> list[Finding]:
    """The kernel's inotify limits against what the agent watches: each limit file and each directory of sources."""
    if not limits:
        return [
            Finding("inotify", "warn", "its limits are not shown here", "limits are re-read at each rescan without it")
        ]
    per_user, instances = limits["max_user_watches"], limits["max_user_instances"]
    text = f"max_user_watches {per_user}, about {watches} needed now; max_user_instances {instances}, 1 needed"
    if watches > per_user * 0.9:
        advice = (
            f"sysctl fs.inotify.max_user_watches={max(2 * watches, 65536)}; until then foreign writes are seen late"
        )
        return [Finding("inotify", "warn", text, advice)]
    if instances < 16:
        return [Finding("inotify", "warn", text, "sysctl fs.inotify.max_user_instances=128; others share them")]
    return [Finding("inotify", "ok", text)]


def check_agent(seen: AgentSeen, config: AgentConfig) -> list[Finding]:
    """Whether an agent runs for this runtime_dir, and with which configuration."""
    lock = os.path.join(config.runtime_dir, "agent.lock")
    if not seen.running:
        advice = "start it with `systemctl start cpumond` or `cpumond agent --config FILE`"
        return [Finding("agent", "warn", f"none runs: nobody holds {lock}", advice)]
    who = "an agent runs" if seen.pid is None else f"an agent runs, pid {seen.pid}"
    if seen.since is not None:
        who += time.strftime(", since %Y-%m-%d %H:%M:%S", time.localtime(seen.since))
    findings = [Finding("agent", "ok", f"{who}, with {seen.config or 'built-in defaults'}")]
    if seen.config and config.path and os.path.abspath(seen.config) != os.path.abspath(config.path):
        text = f"it runs with {seen.config}, but {config.path} is looked at"
        findings.append(Finding("agent", "warn", text, f"cpumond doctor --config {seen.config}"))
    return findings


def check_answer(client: AgentClient) -> list[Finding]:
    """Whether the running agent answers, and what it complains about. Raises AccessError."""
    try:
        answer = client.decode(client.status(), StatusAnswer)
    except UnavailableError as error:
        return [Finding("agent", "fail", str(error), "see its log (journalctl -u cpumond), then restart it")]
    findings = [Finding("agent", "warn", problem, "`cpumond status` shows it, too") for problem in answer.problems]
    if answer.is_stuck:
        text = f"its last check was {answer.last_tick_age_s:.0f} s ago, one is due every {answer.check_period_s:g} s"
        findings.append(Finding("agent", "fail", text, "see its log (journalctl -u cpumond), then restart it"))
    text = f"it answers on {client.socket_path} and follows {_count(len(answer.jobs), 'job')}"
    return [Finding("agent", "ok", text), *findings]


def check_writers(names: Iterable[str]) -> list[Finding]:
    """Programs that change quotas themselves."""
    found = sorted(set(names) & set(WRITERS))
    if not found:
        return [Finding("other writers", "ok", "no program that is known to change quotas runs here")]
    advice = "keep its cgroups out of managed_roots, or let it set no CPU limits for the jobs that cpumond manages"
    return [Finding("other writers", "warn", f"{name} runs: {WRITERS[name]}", advice) for name in found]


def check_systemd(booted: bool, version: str) -> Finding:
    """Whether systemd can look after the agent."""
    if not booted:
        advice = "whoever starts the agent must run `cpumond restore` after it died, as ExecStopPost= does"
        return Finding(
            "systemd", "warn", "does not run this machine" + (f" ({version} is installed)" if version else ""), advice
        )
    number = re.search(r"\d+", version)
    if number is not None and int(number[0]) < 240:
        return Finding("systemd", "warn", version, "cpumond.service was tried with systemd 252 and later")
    return Finding("systemd", "ok", version or "runs, its version is not shown")


def check_delegation(paths: list[str], cpu_root: str, is_delegated: Callable[[str], bool]) -> list[Finding]:
    """Cgroups that systemd manages itself: it writes their limits, too, unless they lie in a delegated unit."""
    units = [path for path in paths if re.search(r"\.(slice|scope|service)(/|$)", path)]
    owned = [path for path in units if not any(is_delegated(os.path.join(cpu_root, up)) for up in _upwards(path))]
    if owned:
        text = f"{_count(len(owned), 'path')} of systemd's own tree without delegation, such as {owned[0]!r}"
        advice = (
            "at daemon-reload systemd may write its own CPUQuota= again (counted as a foreign write); run the jobs "
            "in a unit with Delegate=yes, or set their limits with CPUQuota="
        )
        return [Finding("delegation", "warn", text, advice)]
    outside = [path for path in paths if path not in units]
    if outside and os.path.exists(os.path.join(cpu_root, "cgroup.subtree_control")):
        text = f"{outside[0]!r} is outside of systemd's units: it may take the cpu controller away there"
        return [Finding("delegation", "warn", text, "run the jobs below a unit with Delegate=yes")]
    return [Finding("delegation", "ok", "managed cgroups are not systemd's, or delegated")] if paths else []


def check_clock(directory: str) -> list[Finding]:
    """The kernel's clock source: every check reads it for each job."""
    try:
        with open(os.path.join(directory, "current_clocksource"), encoding="ascii") as file:
            current = file.read().strip()
    except OSError:
        return [Finding("clock", "ok", "the clock source is not shown here")]
    if current in SLOW_CLOCKS:
        advice = "a slow one: each reading is a trip into hardware; see the kernel's log on why tsc was marked unstable"
        return [Finding("clock", "warn", f"clock source {current}", advice)]
    return [
        Finding("clock", "ok", f"clock source {current}; rates use the monotonic clock, wall clock steps do no harm")
    ]


def check_directory(key: str, path: str) -> Finding:
    """Whether a directory of the configuration can be written, or made."""
    place = path
    while not os.path.exists(place):
        place = os.path.dirname(place)
    advice = f"set `{key}`, or fix its rights" if os.geteuid() == 0 else _run_as_root()
    if not os.path.isdir(place):
        return Finding(key, "fail", f"{place} is not a directory", f"set `{key}`")
    if not may(place, os.W_OK | os.X_OK):
        level: Level = "fail" if os.geteuid() == 0 else "warn"
        return Finding(key, level, f"{place} cannot be written by {_user()}", advice)
    return Finding(key, "ok", f"{path} can be written" if place == path else f"{path} will be made in {place}")


def check_leftovers(path: str, content: Originals | None, running: bool, boot_id: str, cpu_root: str | None) -> Finding:
    """Limits that a dead agent left lowered."""
    if content is None or not content.cgroups:
        return Finding("leftovers", "ok", f"{path} names no cgroup to put back")
    if content.boot_id != boot_id:
        return Finding("leftovers", "ok", f"{path} is of an earlier boot; its cgroups are gone")
    left = [name for name, original in content.cgroups.items() if _has_inode(cpu_root, name, original.inode)]
    if running:
        return Finding("leftovers", "ok", f"{path} holds the original limits of {_count(len(left), 'cgroup')}")
    if not left:
        return Finding("leftovers", "ok", f"the cgroups of {path} are gone")
    text = f"a dead agent left the limits of {_count(len(left), 'cgroup')}, such as {left[0]!r}"
    return Finding("leftovers", "fail", text, "put them back with `cpumond restore`, or start the agent")


def check_pause(runtime_dir: str) -> Finding:
    """The pause file."""
    path = os.path.join(runtime_dir, "pause")
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(os.stat(path).st_mtime))
    except OSError:
        return Finding("pause file", "ok", "none; writes are not paused")
    return Finding("pause file", "warn", f"{path} stops all writes since {since}", f"rm {path}")


def check_report(kind: str, url: str, connect: Callable[[str, int], str]) -> Finding:
    """Whether the receiver of reports takes a connection; nothing is sent."""
    if kind != "http":
        return Finding("report", "ok", f"kind {kind}: no receiver to reach")
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    problem = connect(host, port)
    if problem:
        advice = "start the receiver or correct report.url; the agent goes on without it and reports when it is back"
        return Finding("report", "fail", f"{host} port {port} of {url}: {problem}", advice)
    return Finding("report", "ok", f"{host} port {port} of {url} takes connections")


def check_metrics(
    listen: str, running: bool, connect: Callable[[str, int], str], read: Callable[[str], str]
) -> Finding:
    """Whether the metrics' address is free, or served by the agent."""
    if not listen:
        return Finding("metrics", "ok", "turned off (metrics.listen is empty)")
    host, port = parse_listen(listen, "metrics.listen")
    asked = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    if connect(asked, port):
        if running:
            advice = "see the agent's log; after a change of metrics.listen the agent must be restarted"
            return Finding("metrics", "warn", f"the agent runs, but nothing answers on {listen}", advice)
        return Finding("metrics", "ok", f"{listen} is free")
    shown = f"[{asked}]" if ":" in asked else asked
    is_ours = "cpumond_build_info" in read(f"http://{shown}:{port}/metrics")
    if is_ours and running:
        return Finding("metrics", "ok", f"the agent serves http://{listen}/metrics")
    by = "another agent" if is_ours else "another program"
    return Finding("metrics", "fail", f"{listen} is in use by {by}", "set [metrics] listen to a free address")


def measure_read(hierarchies: Hierarchies, path: str) -> Finding:
    """The time of one read of a cgroup's counters, as the agent does it. Raises CgroupReadError."""
    from cpumond.cgroup import open_cgroup

    cgroup = open_cgroup(hierarchies, path)
    if cgroup is None:
        return Finding("counter read", "warn", f"cgroup {path!r} went away meanwhile", "run doctor again")
    try:
        start_s = time.perf_counter()
        for _ in range(READS):
            cgroup.read(start_s)
        each_us = (time.perf_counter() - start_s) / READS * 1e6
    finally:
        cgroup.close()
    text = (
        f"{each_us:.1f} us for {path or 'the root cgroup'}: 1000 jobs each second take {each_us / 10:.1f} % of a core"
    )
    if each_us > SLOW_READ_US:
        return Finding("counter read", "warn", text, "raise check_period, or see what slows this machine down")
    return Finding("counter read", "ok", text)


# ---- looking


def may(path: str, mode: int) -> bool:
    """Whether this process has the rights ``mode`` (os.R_OK, ...) on a file; nothing is opened."""
    return os.access(path, mode, effective_ids=True)


def find_agent(config: AgentConfig) -> AgentSeen:
    """Who holds the lock of ``runtime_dir``, without trying to take it: that could turn an agent away that starts."""
    from cpumond.agent.main import LOCK_FILE, LockHolder

    path = os.path.join(config.runtime_dir, LOCK_FILE)
    try:
        with open(path, "rb") as file:
            status, content = os.fstat(file.fileno()), file.read(4096)
        with open("/proc/locks", encoding="ascii") as file:
            locks = file.read()
    except OSError:
        # No lock file, or a place we may not look into: the directories' own findings say so.
        return AgentSeen(False)
    try:
        holder = msgspec.json.decode(content, type=LockHolder)
    except msgspec.DecodeError:
        holder = None
    pid = find_lock_pid(locks, status.st_dev, status.st_ino, None if holder is None else holder.pid)
    if pid is None:
        return AgentSeen(False)
    return AgentSeen(True, pid) if holder is None else AgentSeen(True, holder.pid, holder.since, holder.config)


def find_lock_pid(locks: str, device: int, inode: int, told_pid: int | None) -> int | None:
    """The process that holds a flock on a file, by the text of /proc/locks; None when nobody does.

    Some file systems (btrfs, overlayfs) show another device there: then the pid that the file tells decides.
    """
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}:{inode}"
    for line in locks.splitlines():
        fields = line.split()
        if len(fields) < 6 or fields[1] != "FLOCK" or not fields[4].lstrip("-").isdigit():
            continue
        pid, place = int(fields[4]), fields[5]
        if place == wanted or (pid == told_pid and place.endswith(f":{inode}")):
            return pid
    return None


def try_read(path: str) -> OSError | None:
    """Read a file; the error of that, None when there was none."""
    try:
        with open(path, "rb") as file:
            file.read()
    except OSError as error:
        return error
    return None


def read_registered(state_dir: str) -> list[FoundJob]:
    """The jobs that were added over the control socket. Raises AccessError or StateFileError."""
    from cpumond.agent.registry import RegisteredJobs
    from cpumond.agent.state_file import Registry, load

    registered = RegisteredJobs(state_dir)
    registered.content = load(registered.path, Registry) or Registry()
    return registered.found_jobs()


def _read_descriptor_limit(seen: AgentSeen) -> tuple[int, int, str]:
    import psutil

    if seen.pid is not None:
        try:
            soft, hard = psutil.Process(seen.pid).rlimit(psutil.RLIMIT_NOFILE)
        except (psutil.Error, OSError):
            # Only root and the agent's own user may ask: this shell's limit is shown instead.
            pass
        else:
            return soft, hard, "the agent"
    return *resource.getrlimit(resource.RLIMIT_NOFILE), "this shell"


def _read_inotify() -> dict[str, int]:
    limits = {}
    for name in ("max_user_watches", "max_user_instances"):
        try:
            with open(f"/proc/sys/fs/inotify/{name}", encoding="ascii") as file:
                limits[name] = int(file.read())
        except (OSError, ValueError):
            # Not shown in this container: nothing is said about either.
            return {}
    return limits


def list_process_names() -> list[str]:
    """The names of all processes that can be seen."""
    import psutil

    return [str(process.info["name"]) for process in psutil.process_iter(["name"])]


def read_systemd_version() -> str:
    """The first line of ``systemctl --version``; "" where there is none."""
    program = shutil.which("systemctl")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=5, check=False)  # noqa: S603 - found on PATH, no input
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0]


def is_delegated(directory: str) -> bool:
    """Whether systemd marked a cgroup as delegated."""
    for name in ("user.delegate", "trusted.delegate"):
        try:
            if os.getxattr(directory, name) == b"1":
                return True
        except OSError:
            # Not marked, not supported, or not ours to see.
            continue
    return False


def try_connect(host: str, port: int) -> str:
    """Make a TCP connection and end it; "" or the reason why there is none."""
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except TimeoutError:
        return f"no answer in {CONNECT_S:g} s"
    except (OSError, UnicodeError) as error:
        return error.strerror or str(error) if isinstance(error, OSError) else "not a host name"
    return ""


def read_metrics(url: str) -> str:
    """What an address serves; "" when that is nothing readable."""
    import httpx2

    try:
        return httpx2.get(url, timeout=CONNECT_S, trust_env=False).text
    except httpx2.HTTPError:
        return ""


def _children(root: str) -> list[str]:
    with os.scandir(root) as entries:
        return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def _upwards(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _has_inode(cpu_root: str | None, name: str, inode: int) -> bool:
    if cpu_root is None:
        return True
    try:
        return os.stat(os.path.join(cpu_root, name)).st_ino == inode
    except OSError:
        return False


def _user() -> str:
    try:
        return getpass.getuser() if os.geteuid() == os.getuid() else f"uid {os.geteuid()}"
    except (KeyError, OSError):
        return f"uid {os.geteuid()}"


def _run_as_root() -> str:
    return "run it as root to see more" if os.geteuid() != 0 else "see why root cannot"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
