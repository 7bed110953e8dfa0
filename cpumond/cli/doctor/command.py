"""``cpumond doctor``: what this host offers, what is missing, and what to do about it.

``examine`` calls all checks in turn: those of ``checks``, ``engines``, ``cgroups``, ``actuators`` and ``units``, over
what ``host`` sees.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click
import msgspec

from cpumond.agent.config import AgentConfig
from cpumond.cli.agent.client import AgentClient, is_given
from cpumond.cli.doctor import actuators, cgroups, checks, host
from cpumond.cli.doctor import engines as of_engines
from cpumond.cli.doctor import units as of_units
from cpumond.cli.doctor.checks import Finding
from cpumond.cli.doctor.host import AgentSeen
from cpumond.cli.engines import EngineSeen, collect_views, see_engines
from cpumond.cli.options import config_option
from cpumond.cli.output import output_options, print_json, terminal_width, use_colour
from cpumond.cli.render.grid import fold, paint
from cpumond.core.errors import EXIT_CONFIG, EXIT_UNAVAILABLE, CpumondError, UnavailableError, describe
from cpumond.core.words import count

if TYPE_CHECKING:
    from cpumond.agent.discovery import FoundJob
    from cpumond.host.cgroup.idle import IdleClass
    from cpumond.host.cgroup.mounts import Hierarchies, Mount
    from cpumond.monitor.model import MonitorSettings

Look = Callable[[str, Callable[[], list[Finding]]], None]


@click.command("doctor", epilog="Example: cpumond doctor --config /etc/cpumond/cpumond.toml")
@config_option
@output_options("Print the findings as JSON.")
def doctor_command(config_path: str, as_json: bool) -> int:
    """Say what this host offers for cpumond and what to do about what is missing.

    It only looks: nothing is written, no lock is taken. Without root it says what it could not see. The exit code is
    0 when nothing failed, 69 when a check failed, 78 when the configuration is wrong.
    """
    findings = examine(config_path, is_given("config_path"))
    code = choose_exit_code(findings)
    if as_json:
        print_json(msgspec.json.encode({"findings": findings, "exit_code": code}), rows="findings")
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
        level = paint(f"{finding.level:<6}", colours[finding.level], use_colour())
        text = _wrap(finding.text, width, indent)
        lines.append(f"{level}{finding.check:<{column}}{text}")
        if finding.advice:
            lines.append(f"{indent}-> {_wrap(finding.advice, width, indent + '   ')}")
    times = {level: sum(finding.level == level for finding in findings) for level in colours}
    lines.append(
        fold(f"{len(findings)} findings: {times['ok']} ok, {times['warn']} to look at, {times['fail']} failed", width)
    )
    return "\n".join(lines)


def _wrap(text: str, width: int | None, indent: str) -> str:
    """``text`` with its further lines indented; a path is never broken."""
    if width is None:
        return text
    if width < len(indent) + 30:
        return "\n  " + fold(text, width - 2).replace("\n", "\n  ")
    lines = textwrap.wrap(text, width - len(indent), break_long_words=False, break_on_hyphens=False)
    return f"\n{indent}".join(lines)


def examine(config_path: str, explicit: bool) -> list[Finding]:
    """All findings about this host under the configuration at ``config_path`` (``explicit``: the user named it)."""
    from cpumond.host.cgroup.v1 import V1Cgroup
    from cpumond.host.cgroup.v2 import V2Cgroup

    config, findings = checks.check_config(config_path, explicit)
    findings = [checks.describe_host(), *findings]

    def look(check: str, work: Callable[[], list[Finding]]) -> None:
        # A check that fails must not hide the others.
        try:
            findings.extend(work())
        except (CpumondError, OSError) as error:
            text = str(error) if isinstance(error, CpumondError) else f"{error.filename or ''}: {describe(error)}"
            findings.append(Finding(check, "warn", f"could not be looked at: {text}", host.suggest_root()))

    seen = host.find_agent(config)
    hierarchies = _examine_cgroups(config, look)
    jobs: list[FoundJob] = []
    programs = host.list_process_names()
    if hierarchies is not None:
        engines = _examine_engines(config, hierarchies, programs, seen, look)
        jobs = _examine_jobs(config, hierarchies, engines, look)
    version = 1 if hierarchies is None else hierarchies.cpu_version
    follows_pressure = any(each.follows_pressure for each in _list_settings(config, jobs))
    per_job = (V1Cgroup if version == 1 else V2Cgroup).DESCRIPTORS + follows_pressure
    look(
        "descriptors",
        lambda: checks.check_descriptors(
            *host.read_descriptor_limit(seen), len(jobs), config.discovery.max_jobs, per_job
        ),
    )
    look("inotify", lambda: checks.check_inotify(host.read_inotify(), len(jobs) * (2 if version == 1 else 1)))
    look("agent", lambda: checks.check_agent(seen, config))
    if seen.running:
        look("agent", lambda: checks.check_answer(AgentClient(config.control_socket)))
    kinds = {source.kind for source in config.source}
    look("other writers", lambda: checks.check_writers(programs, kinds))
    look("systemd", lambda: _examine_systemd(config, hierarchies, jobs, seen))
    look("clock", lambda: checks.check_clock("/sys/devices/system/clocksource/clocksource0"))
    look("state_dir", lambda: [checks.check_directory("state_dir", config.state_dir)])
    look("runtime_dir", lambda: [checks.check_directory("runtime_dir", config.runtime_dir)])
    look("leftovers", lambda: _examine_leftovers(config, hierarchies, seen))
    look("pause file", lambda: [checks.check_pause(config.runtime_dir)])
    look("report", lambda: [checks.check_report(config.report.kind, config.report.url, host.try_connect)])
    look("scheduler", lambda: _examine_scheduler(config.scheduler.addresses))
    booted = os.path.isdir("/run/systemd/system")
    look("executor", lambda: checks.check_executor(config, booted, importlib.util.find_spec("dbus_fast") is not None))
    listen = config.metrics.listen
    look(
        "metrics",
        lambda: [checks.check_metrics(listen, seen.running, host.try_connect, host.read_metrics, host.find_absent)],
    )
    return findings


def _examine_scheduler(urls: Sequence[str]) -> list[Finding]:
    from cpumond.scheduler.program.config import DEFAULT_LISTEN, DEFAULT_SCHEDULER_CONFIG_PATH, load_scheduler_config

    findings = checks.check_schedulers(urls, host.try_connect, host.read_metrics)
    is_open = [
        finding
        for url in urls or [f"http://{DEFAULT_LISTEN}"]
        for finding in checks.check_scheduler_access(url, host.read_metrics)
    ]
    findings += is_open
    if not is_open:
        # No open scheduler answers: would the one that is configured on this host be open?
        with suppress(CpumondError):
            own = load_scheduler_config(DEFAULT_SCHEDULER_CONFIG_PATH)
            findings += [checks.describe_open(f"{own.path}: {own.api.listen}")] if own.api.is_open else []
    return findings


def _examine_cgroups(config: AgentConfig, look: Look) -> Hierarchies | None:
    from cpumond.host.cgroup.mounts import find_hierarchies, read_mounts

    mounts: list[Mount] = []

    def read() -> list[Finding]:
        mounts.extend(read_mounts(config.mountinfo))
        return cgroups.check_mounts(mounts, config.mountinfo)

    look("cgroups", read)
    try:
        hierarchies = find_hierarchies(mounts, config.mountinfo)
    except UnavailableError:
        # check_mounts has said so; without the cpu controller there is nothing more to examine.
        return None
    look("cgroup version", lambda: [actuators.check_version(hierarchies.cpu_version)])
    look(
        "CPU scheduler",
        lambda: [actuators.check_cpu_scheduler(*(host.read_line(path) or "" for path in actuators.SCHED_EXT))],
    )
    look("pressure", lambda: [cgroups.check_pressure(host.try_read("/proc/pressure/cpu"), hierarchies.unified_root)])
    if config.executor.kind != "none":
        look("idle class", lambda: [actuators.check_idle_class(_find_idle_class(config, hierarchies))])
    return hierarchies


def _examine_engines(
    config: AgentConfig, hierarchies: Hierarchies, programs: list[str], seen: AgentSeen, look: Look
) -> list[EngineSeen]:
    engines: list[EngineSeen] = []
    mounts = host.show_mounts() if any(source.is_engine for source in config.source) else {}

    def find_reach(socket: str) -> of_engines.Reach:
        in_agent = of_engines.find_agent_reach(socket, seen.pid)
        return (of_engines.find_unit_reach(socket, mounts) if in_agent is None else in_agent) or ""

    def see() -> list[Finding]:
        engines.extend(see_engines(config, hierarchies, programs))
        return [finding for each in engines for finding in of_engines.check_engine(each, find_reach)]

    look("engines", see)
    return engines


def _examine_jobs(
    config: AgentConfig, hierarchies: Hierarchies, engines: list[EngineSeen], look: Look
) -> list[FoundJob]:
    from cpumond.agent.discovery import list_jobs
    from cpumond.host.cgroup.files import find_missing_quota
    from cpumond.host.cgroup.units import unit_of

    registered: list[FoundJob] = []
    look("added jobs", lambda: _take_registered(registered, config.state_dir))
    jobs = list_jobs(config.source, registered, hierarchies.cpu_root, collect_views(engines)).jobs
    by_kind = {each.kind: each for each in engines}
    # The executor makes its own root.
    roots = config.managed_roots
    kinds = {source.kind for source in config.source}
    if roots or config.executor.kind == "none":
        look("managed_roots", lambda: cgroups.check_roots(roots, hierarchies.cpu_root, kinds))
    for number, source in enumerate(config.source, 1):
        if source.is_engine:
            engine = by_kind.get(source.kind)
            if engine is not None:
                findings = functools.partial(of_engines.check_engine_source, number, source, jobs, engine)
                look(f"source {number}", findings)
            continue
        look(f"source {number}", functools.partial(cgroups.check_source, number, source, config, hierarchies))
    if not config.source and not registered and config.executor.kind == "none":
        look("sources", lambda: [cgroups.check_no_sources()])
    look("foreign cgroups", lambda: of_units.check_foreign_managers(roots, hierarchies.cpu_root, kinds))
    # A managed root is written only where it is a job itself.
    paths = [job.path for job in jobs] or [root for root in config.managed_roots if root]
    directories = [os.path.join(hierarchies.cpu_root, path) for path in paths]
    units = {os.path.join(hierarchies.cpu_root, path) for path in paths if unit_of(path)}
    settings = _list_settings(config, jobs)
    wants_burst = any(each.limit_rule == "peak" and each.actuator == "quota" and each.burst_ratio for each in settings)
    others = host.list_children(hierarchies.cpu_root)
    if any(each.actuator == "quota" for each in settings) or not any(map(find_missing_quota, directories)):
        look(
            "limit files",
            lambda: cgroups.check_limit_files(hierarchies.cpu_version, directories, others, units, wants_burst),
        )
    look("limits above", lambda: of_units.check_caps(hierarchies, {job.path: job.cpu_limit_cores for job in jobs}))
    wanting = [each for each in _list_settings(config, jobs) if each.follows_pressure]
    look(
        "pressure of jobs",
        lambda: of_units.check_job_pressure(hierarchies.unified_root, [job.path for job in jobs], wanting),
    )
    resolved = [(job, config.resolve_settings(job.source, job.operation_id, job.layer)) for job in jobs]
    is_written = not jobs or any(each.actuator != "guarantee" for _, each in resolved)
    if is_written:
        look("rights", lambda: [cgroups.check_rights(hierarchies.cpu_version, directories)])
    if jobs:
        look("actuator", lambda: [actuators.check_actuators(each for _, each in resolved)])
        order = functools.partial(actuators.read_order, hierarchies)
        look("floor", lambda: [actuators.check_floors(resolved, order)])
    look("counter read", lambda: [cgroups.measure_read(hierarchies, jobs[0].path if jobs else "")])
    return jobs


def _find_idle_class(config: AgentConfig, hierarchies: Hierarchies) -> IdleClass:
    from cpumond.host.cgroup.job_tree import JobCgroupTree
    from cpumond.host.executor import find_idle_class

    cgroups = JobCgroupTree(hierarchies, config.executor.cgroup_root, config.mountinfo)
    return find_idle_class(config.executor.kind, cgroups)


def _list_settings(config: AgentConfig, jobs: list[FoundJob]) -> list[MonitorSettings]:
    """The resulting settings of the node and of each job."""
    return [config.node_settings()] + [config.resolve_settings(job.source, job.operation_id, job.layer) for job in jobs]


def _take_registered(registered: list[FoundJob], state_dir: str) -> list[Finding]:
    registered += host.read_registered(state_dir)
    return [Finding("added jobs", "ok", f"{count(len(registered), 'job')} added by `cpumond job add`")]


def _examine_systemd(
    config: AgentConfig, hierarchies: Hierarchies | None, jobs: list[FoundJob], seen: AgentSeen
) -> list[Finding]:
    booted = os.path.isdir("/run/systemd/system")
    findings = [checks.check_systemd(booted, host.read_systemd_version())]
    if hierarchies is not None and booted:
        paths = sorted(job.path for job in jobs) or [root for root in config.managed_roots if root]
        root = hierarchies.cpu_root
        own = config.executor.cgroup_roots
        expected = any(source.kind == "systemd" for source in config.source)
        findings.append(of_units.check_unit_rights(paths, host.see_bus(seen), expected))
        findings += of_units.check_owners(
            paths, hierarchies.cpu_version, lambda path: host.is_delegated(os.path.join(root, path)), own
        )
    return findings


def _examine_leftovers(config: AgentConfig, hierarchies: Hierarchies | None, seen: AgentSeen) -> list[Finding]:
    from cpumond.agent.state_file import STATE_FILE, Originals, is_of_this_boot, load

    path = os.path.join(config.state_dir, STATE_FILE)
    if not host.may(os.path.dirname(path), os.X_OK) and os.path.isdir(config.state_dir):
        return [Finding("leftovers", "warn", f"{path} cannot be read by {host.show_user()}", host.suggest_root())]
    try:
        content = load(path, Originals)
    except CpumondError as error:
        if not host.may(path, os.R_OK):
            return [Finding("leftovers", "warn", f"{path} cannot be read by {host.show_user()}", host.suggest_root())]
        advice = (
            "start the agent: it puts the file aside and begins with the full limits; look at the limits of the jobs"
        )
        return [Finding("leftovers", "fail", str(error), advice)]
    copy = os.path.join(config.runtime_dir, STATE_FILE)
    is_current = content is not None and is_of_this_boot(content, copy)
    return [cgroups.check_leftovers(path, content, seen.running, is_current, hierarchies)]
