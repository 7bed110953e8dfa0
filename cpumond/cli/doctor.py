"""``cpumond doctor``: what this host offers, what is missing, and what to do about it.

``examine`` calls all checks in turn: those of ``doctor_checks`` and ``doctor_cgroups``, over what ``doctor_host`` sees.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import textwrap
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import click
import msgspec

from cpumond.cli.client import AgentClient, is_given
from cpumond.cli.doctor_cgroups import (
    check_leftovers,
    check_limit_files,
    check_mounts,
    check_no_sources,
    check_pressure,
    check_rights,
    check_roots,
    check_source,
    measure_read,
)
from cpumond.cli.doctor_checks import (
    Finding,
    check_agent,
    check_answer,
    check_clock,
    check_config,
    check_descriptors,
    check_directory,
    check_executor,
    check_inotify,
    check_metrics,
    check_pause,
    check_report,
    check_scheduler,
    check_scheduler_access,
    check_systemd,
    check_writers,
    describe_host,
    describe_open,
)
from cpumond.cli.doctor_host import (
    CONNECT_S,
    AgentSeen,
    find_absent,
    find_agent,
    is_delegated,
    list_children,
    list_process_names,
    may,
    read_descriptor_limit,
    read_inotify,
    read_metrics,
    read_registered,
    read_systemd_version,
    see_bus,
    show_user,
    suggest_root,
    try_connect,
    try_read,
)
from cpumond.cli.doctor_units import (
    check_caps,
    check_foreign_managers,
    check_job_pressure,
    check_owners,
    check_unit_rights,
)
from cpumond.cli.options import config_option, print_json, terminal_width
from cpumond.config import AgentConfig
from cpumond.errors import EXIT_CONFIG, EXIT_UNAVAILABLE, CpumondError, UnavailableError, describe
from cpumond.words import count

if TYPE_CHECKING:
    from cpumond.cgroup.mounts import Hierarchies, Mount
    from cpumond.discovery import FoundJob
    from cpumond.monitor.model import MonitorSettings

Look = Callable[[str, Callable[[], list[Finding]]], None]


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
        print_json(msgspec.json.encode({"findings": findings, "exit_code": code}))
    else:
        click.echo(draw_findings(findings, terminal_width()))
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
    times = {level: sum(finding.level == level for finding in findings) for level in colours}
    lines.append(f"{len(findings)} findings: {times['ok']} ok, {times['warn']} to look at, {times['fail']} failed")
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
    from cpumond.cgroup.v1 import V1Cgroup
    from cpumond.cgroup.v2 import V2Cgroup

    config, findings = check_config(config_path, explicit)
    findings = [describe_host(), *findings]

    def look(check: str, work: Callable[[], list[Finding]]) -> None:
        # One thing that cannot be seen must not hide the others.
        try:
            findings.extend(work())
        except (CpumondError, OSError) as error:
            text = str(error) if isinstance(error, CpumondError) else f"{error.filename or ''}: {describe(error)}"
            findings.append(Finding(check, "warn", f"could not be looked at: {text}", suggest_root()))

    seen = find_agent(config)
    hierarchies = _examine_cgroups(config, look)
    jobs: list[FoundJob] = []
    if hierarchies is not None:
        jobs = _examine_jobs(config, hierarchies, look)
    version = 1 if hierarchies is None else hierarchies.cpu_version
    follows_pressure = any(each.follows_pressure for each in _list_settings(config, jobs))
    per_job = (V1Cgroup if version == 1 else V2Cgroup).DESCRIPTORS + follows_pressure
    look(
        "descriptors",
        lambda: check_descriptors(*read_descriptor_limit(seen), len(jobs), config.discovery.max_jobs, per_job),
    )
    look("inotify", lambda: check_inotify(read_inotify(), len(jobs) * (2 if version == 1 else 1)))
    look("agent", lambda: check_agent(seen, config))
    if seen.running:
        look("agent", lambda: check_answer(AgentClient(config.control_socket, timeout_s=CONNECT_S)))
    look("other writers", lambda: check_writers(list_process_names()))
    look("systemd", lambda: _examine_systemd(config, hierarchies, jobs, seen))
    look("clock", lambda: check_clock("/sys/devices/system/clocksource/clocksource0"))
    look("state_dir", lambda: [check_directory("state_dir", config.state_dir)])
    look("runtime_dir", lambda: [check_directory("runtime_dir", config.runtime_dir)])
    look("leftovers", lambda: _examine_leftovers(config, hierarchies, seen))
    look("pause file", lambda: [check_pause(config.runtime_dir)])
    look("report", lambda: [check_report(config.report.kind, config.report.url, try_connect)])
    look("scheduler", lambda: _examine_scheduler(config.scheduler.url))
    booted = os.path.isdir("/run/systemd/system")
    look("executor", lambda: check_executor(config, booted, importlib.util.find_spec("dbus_fast") is not None))
    listen = config.metrics.listen
    look("metrics", lambda: [check_metrics(listen, seen.running, try_connect, read_metrics, find_absent)])
    return findings


def _examine_scheduler(url: str) -> list[Finding]:
    from cpumond.scheduler.config import DEFAULT_LISTEN, DEFAULT_SCHEDULER_CONFIG_PATH, load_scheduler_config

    findings = [
        check_scheduler(url, try_connect),
        *check_scheduler_access(url or f"http://{DEFAULT_LISTEN}", read_metrics),
    ]
    if len(findings) == 1:
        # None runs, or it is another one: what would this host's own do?
        with suppress(CpumondError):
            own = load_scheduler_config(DEFAULT_SCHEDULER_CONFIG_PATH)
            findings += [describe_open(f"{own.path}: {own.api.listen}")] if own.api.is_open else []
    return findings


def _examine_cgroups(config: AgentConfig, look: Look) -> Hierarchies | None:
    from cpumond.cgroup.mounts import find_hierarchies, read_mounts

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
    from cpumond.cgroup.systemd import unit_of
    from cpumond.discovery import list_jobs

    registered: list[FoundJob] = []
    look("added jobs", lambda: _take_registered(registered, config.state_dir))
    jobs = list_jobs(config.source, registered, hierarchies.cpu_root).jobs
    # The executor makes its own.
    roots = [root for root in config.managed_roots if root != config.executor.cgroup_root]
    if roots or config.executor.kind == "none":
        look("managed_roots", lambda: check_roots(roots, hierarchies.cpu_root))
    for number, source in enumerate(config.source, 1):
        look(f"source {number}", functools.partial(check_source, number, source, config, hierarchies))
    if not config.source and not registered and config.executor.kind == "none":
        look("sources", lambda: [check_no_sources()])
    look("foreign cgroups", lambda: check_foreign_managers(config.managed_roots, hierarchies.cpu_root))
    # A root is written only where it is a job itself.
    paths = [job.path for job in jobs] or [root for root in config.managed_roots if root]
    directories = [os.path.join(hierarchies.cpu_root, path) for path in paths]
    units = {os.path.join(hierarchies.cpu_root, path) for path in paths if unit_of(path)}
    settings = _list_settings(config, jobs)
    wants_burst = any(each.limit_rule == "peak" and each.actuator == "quota" and each.burst_ratio for each in settings)
    others = list_children(hierarchies.cpu_root)
    look(
        "limit files",
        lambda: check_limit_files(hierarchies.cpu_version, directories, others, units, wants_burst),
    )
    look("limits above", lambda: check_caps(hierarchies, {job.path: job.cpu_limit_cores for job in jobs}))
    wanting = [each for each in _list_settings(config, jobs) if each.follows_pressure]
    look("pressure of jobs", lambda: check_job_pressure(hierarchies.unified_root, [job.path for job in jobs], wanting))
    look("rights", lambda: [check_rights(hierarchies.cpu_version, directories)])
    look("counter read", lambda: [measure_read(hierarchies, jobs[0].path if jobs else "")])
    return jobs


def _list_settings(config: AgentConfig, jobs: list[FoundJob]) -> list[MonitorSettings]:
    """The resulting settings of the node and of each job."""
    return [config.node_settings()] + [config.resolve_settings(job.source, job.operation_id, job.layer) for job in jobs]


def _take_registered(registered: list[FoundJob], state_dir: str) -> list[Finding]:
    registered += read_registered(state_dir)
    return [Finding("added jobs", "ok", f"{count(len(registered), 'job')} added by `cpumond job add`")]


def _examine_systemd(
    config: AgentConfig, hierarchies: Hierarchies | None, jobs: list[FoundJob], seen: AgentSeen
) -> list[Finding]:
    booted = os.path.isdir("/run/systemd/system")
    findings = [check_systemd(booted, read_systemd_version())]
    if hierarchies is not None and booted:
        paths = sorted(job.path for job in jobs) or [root for root in config.managed_roots if root]
        root = hierarchies.cpu_root
        own = config.executor.cgroup_root if config.executor.kind != "none" else ""
        expected = any(source.kind == "systemd" for source in config.source)
        findings.append(check_unit_rights(paths, see_bus(seen), expected))
        findings += check_owners(
            paths, hierarchies.cpu_version, lambda path: is_delegated(os.path.join(root, path)), own
        )
    return findings


def _examine_leftovers(config: AgentConfig, hierarchies: Hierarchies | None, seen: AgentSeen) -> list[Finding]:
    from cpumond.agent.state_file import STATE_FILE, Originals, is_of_this_boot, load

    path = os.path.join(config.state_dir, STATE_FILE)
    if not may(os.path.dirname(path), os.X_OK) and os.path.isdir(config.state_dir):
        return [Finding("leftovers", "warn", f"{path} cannot be read by {show_user()}", suggest_root())]
    try:
        content = load(path, Originals)
    except CpumondError as error:
        if not may(path, os.R_OK):
            return [Finding("leftovers", "warn", f"{path} cannot be read by {show_user()}", suggest_root())]
        advice = (
            "start the agent: it puts the file aside and begins with the full limits; look at the limits of the jobs"
        )
        return [Finding("leftovers", "fail", str(error), advice)]
    copy = os.path.join(config.runtime_dir, STATE_FILE)
    is_current = content is not None and is_of_this_boot(content, copy)
    return [check_leftovers(path, content, seen.running, is_current, hierarchies)]
