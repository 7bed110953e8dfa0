"""``cpumond doctor``: the capabilities of this host, and advice about missing ones.

``list_checks`` lists all checks in order: those of ``checks``, ``engines``, ``cgroups``, ``actuators`` and ``units``,
on the facts of ``Subject`` and ``host``."""

from __future__ import annotations

import importlib.util
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING

import click
import msgspec

from cpumond.agent.config import AgentConfig
from cpumond.agent.discovery.glob import list_directories
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
from cpumond.core.errors import EXIT_CONFIG, EXIT_UNAVAILABLE, CpumondError, describe
from cpumond.core.words import count

if TYPE_CHECKING:
    from cpumond.agent.discovery import FoundJob
    from cpumond.host.cgroup.idle import IdleClass
    from cpumond.host.cgroup.mounts import Hierarchies, Mount
    from cpumond.monitor.model import MonitorSettings

Check = tuple[str, Callable[[], Finding | Iterable[Finding]]]
"""The name of a check, with which its findings begin, and the check itself."""


@click.command("doctor", epilog="Example: cpumond doctor --config /etc/cpumond/cpumond.toml")
@config_option
@output_options("Print the findings as JSON.")
def doctor_command(config_path: str, as_json: bool) -> int:
    """Report what this host supports, and how to add what is missing.

    It only reads: nothing is written, no lock is taken. Without root it reports what it could not see. The exit code is
    0 if nothing failed, 69 if a check failed, 78 if the configuration is wrong."""
    findings = examine(config_path, is_given("config_path"))
    code = choose_exit_code(findings)
    if as_json:
        print_json(msgspec.json.encode({"findings": findings, "exit_code": code}), rows="findings")
    else:
        click.echo(draw_findings(findings, terminal_width()))
    return code


def choose_exit_code(findings: Iterable[Finding]) -> int:
    """0 if nothing failed, 78 if the configuration is wrong, otherwise 69."""
    failed = {finding.check for finding in findings if finding.level == "fail"}
    if "configuration" in failed:
        return EXIT_CONFIG
    return EXIT_UNAVAILABLE if failed else 0


def draw_findings(findings: list[Finding], width: int | None) -> str:
    """Findings as text: level, check, text, and advice on its own line; with ``width`` None nothing is wrapped."""
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
        fold(f"{len(findings)} findings: {times['ok']} ok, {times['warn']} warnings, {times['fail']} failed", width)
    )
    return "\n".join(lines)


def _wrap(text: str, width: int | None, indent: str) -> str:
    """``text`` with its continuation lines indented; a path is never broken."""
    if width is None:
        return text
    if width < len(indent) + 30:
        return "\n  " + fold(text, width - 2).replace("\n", "\n  ")
    lines = textwrap.wrap(text, width - len(indent), break_long_words=False, break_on_hyphens=False)
    return f"\n{indent}".join(lines)


def examine(config_path: str, explicit: bool) -> list[Finding]:
    """All findings about this host under the configuration at ``config_path`` (``explicit``: the user named it)."""
    config, findings = checks.check_config(config_path, explicit)
    findings = [checks.describe_host(), *findings]
    for check, look in list_checks(Subject(config)):
        # A check that fails must not hide the others.
        try:
            found = look()
            findings += [found] if isinstance(found, Finding) else found
        except (CpumondError, OSError) as error:
            text = str(error) if isinstance(error, CpumondError) else f"{error.filename or ''}: {describe(error)}"
            findings.append(Finding(check, "warn", f"could not be checked: {text}", host.suggest_root()))
    return findings


class Subject:
    """This host under a configuration. ``registered`` and ``engines`` are empty until their checks have read them."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.agent = host.find_agent(config)
        self.programs = host.list_process_names()
        self.registered: list[FoundJob] = []
        self.engines: list[EngineSeen] = []

    @cached_property
    def mounts(self) -> list[Mount]:
        from cpumond.host.cgroup.mounts import read_mounts

        return read_mounts(self.config.mountinfo)

    @cached_property
    def hierarchies(self) -> Hierarchies | None:
        """The hierarchies; None without the cpu controller, which ``check_mounts`` reports."""
        from cpumond.host.cgroup.mounts import find_hierarchies

        with suppress(CpumondError, OSError):
            return find_hierarchies(self.mounts, self.config.mountinfo)
        return None

    @cached_property
    def jobs(self) -> list[FoundJob]:
        from cpumond.agent.discovery import list_jobs

        if self.hierarchies is None:
            return []
        views = collect_views(self.engines)
        return list_jobs(self.config.source, self.registered, self.hierarchies.cpu_root, views).jobs

    @property
    def paths(self) -> list[str]:
        """The cgroups of jobs; without jobs, the managed roots, which may become jobs themselves."""
        return [job.path for job in self.jobs] or [root for root in self.config.managed_roots if root]

    @cached_property
    def resolved(self) -> list[tuple[FoundJob, MonitorSettings]]:
        return [(job, self.config.resolve_settings(job.source, job.operation_id, job.layer)) for job in self.jobs]

    @property
    def settings(self) -> list[MonitorSettings]:
        """Settings of the node and of each job."""
        return [self.config.node_settings(), *(each for _, each in self.resolved)]


def list_checks(subject: Subject) -> Iterator[Check]:
    config, agent, hierarchies = subject.config, subject.agent, subject.hierarchies
    version = 1 if hierarchies is None else hierarchies.cpu_version
    yield "cgroups", lambda: cgroups.check_mounts(subject.mounts, config.mountinfo)
    if hierarchies is not None:
        yield from _list_cgroup_checks(subject, hierarchies)
        yield from _list_source_checks(subject, hierarchies)
        yield from _list_job_checks(subject, hierarchies)
    yield "descriptors", lambda: _check_descriptors(subject, version)
    yield "inotify", lambda: checks.check_inotify(host.read_inotify(), len(subject.jobs) * (2 if version == 1 else 1))
    yield "agent", lambda: checks.check_agent(agent, config)
    if agent.running:
        yield "agent", lambda: checks.check_answer(AgentClient(config.control_socket))
    yield "other writers", lambda: checks.check_writers(subject.programs, {source.kind for source in config.source})
    yield "systemd", lambda: _examine_systemd(config, hierarchies, subject.jobs, agent)
    yield "clock", lambda: checks.check_clock("/sys/devices/system/clocksource/clocksource0")
    yield "state_dir", lambda: checks.check_directory("state_dir", config.state_dir)
    yield "runtime_dir", lambda: checks.check_directory("runtime_dir", config.runtime_dir)
    yield "leftovers", lambda: _examine_leftovers(config, hierarchies, agent)
    yield "pause file", lambda: checks.check_pause(config.runtime_dir)
    yield "report", lambda: checks.check_report(config.report.kind, config.report.url, host.try_connect)
    yield "scheduler", lambda: _examine_scheduler(config.scheduler.addresses)
    booted, has_bus_library = os.path.isdir("/run/systemd/system"), importlib.util.find_spec("dbus_fast") is not None
    yield "executor", lambda: checks.check_executor(config, booted, has_bus_library)
    listen, tools = config.metrics.listen, (host.try_connect, host.read_metrics, host.find_absent)
    yield "metrics", lambda: checks.check_metrics(listen, agent.running, *tools)


def _list_cgroup_checks(subject: Subject, hierarchies: Hierarchies) -> Iterator[Check]:
    yield "cgroup version", lambda: actuators.check_version(hierarchies.cpu_version)
    sched_ext = [host.read_line(path) or "" for path in actuators.SCHED_EXT]
    yield "CPU scheduler", lambda: actuators.check_cpu_scheduler(*sched_ext)
    error = host.try_read("/proc/pressure/cpu")
    yield "pressure", lambda: cgroups.check_pressure(error, hierarchies.unified_root)
    if subject.config.executor.kind != "none":
        yield "idle class", lambda: actuators.check_idle_class(_find_idle_class(subject.config, hierarchies))


def _list_source_checks(subject: Subject, hierarchies: Hierarchies) -> Iterator[Check]:
    config, roots = subject.config, subject.config.managed_roots
    kinds = {source.kind for source in config.source}
    yield "engines", lambda: _check_engines(subject, hierarchies)
    yield "added jobs", lambda: _check_registered(subject)
    # The executor creates its own root.
    if roots or config.executor.kind == "none":
        yield "managed_roots", lambda: cgroups.check_roots(roots, hierarchies.cpu_root, kinds)
    for number, source in enumerate(config.source, 1):
        if not source.is_engine:
            yield f"source {number}", partial(cgroups.check_source, number, source, config, hierarchies)
        for seen in subject.engines:
            if seen.kind == source.kind:
                look = partial(of_engines.check_engine_source, number, source, subject.jobs, seen)
                yield f"source {number}", look
    if not (config.source or subject.registered) and config.executor.kind == "none":
        yield "sources", cgroups.check_no_sources
    yield "foreign cgroups", lambda: of_units.check_foreign_managers(roots, hierarchies.cpu_root, kinds)


def _list_job_checks(subject: Subject, hierarchies: Hierarchies) -> Iterator[Check]:
    from cpumond.host.cgroup.files import find_missing_quota
    from cpumond.host.cgroup.units import unit_of

    jobs, settings, resolved = subject.jobs, subject.settings, subject.resolved
    directories = [os.path.join(hierarchies.cpu_root, path) for path in subject.paths]
    units = {os.path.join(hierarchies.cpu_root, path) for path in subject.paths if unit_of(path)}
    wants_burst = any(each.limit_rule == "peak" and each.actuator == "quota" and each.burst_ratio for each in settings)
    if any(each.actuator == "quota" for each in settings) or not any(map(find_missing_quota, directories)):
        root = hierarchies.cpu_root
        others = [os.path.join(root, name) for name in list_directories(root)]
        yield (
            "limit files",
            lambda: cgroups.check_limit_files(hierarchies.cpu_version, directories, others, units, wants_burst),
        )
    yield "limits above", lambda: of_units.check_caps(hierarchies, {job.path: job.cpu_limit_cores for job in jobs})
    wanting = [each for each in settings if each.follows_pressure]
    yield (
        "pressure of jobs",
        lambda: of_units.check_job_pressure(hierarchies.unified_root, [job.path for job in jobs], wanting),
    )
    if not jobs or any(each.actuator != "guarantee" for _, each in resolved):
        yield "rights", lambda: cgroups.check_rights(hierarchies.cpu_version, directories)
    if jobs:
        yield "actuator", lambda: actuators.check_actuators(each for _, each in resolved)
        yield "floor", lambda: actuators.check_floors(resolved, partial(actuators.read_order, hierarchies))
    yield "counter read", lambda: cgroups.measure_read(hierarchies, jobs[0].path if jobs else "")


def _check_engines(subject: Subject, hierarchies: Hierarchies) -> list[Finding]:
    subject.engines = see_engines(subject.config, hierarchies, subject.programs)
    mounts = host.read_mounts() if any(source.is_engine for source in subject.config.source) else {}

    def find_reach(socket: str) -> of_engines.Reach:
        in_agent = of_engines.find_agent_reach(socket, subject.agent.pid)
        return (of_engines.find_unit_reach(socket, mounts) if in_agent is None else in_agent) or ""

    return [finding for seen in subject.engines for finding in of_engines.check_engine(seen, find_reach)]


def _check_registered(subject: Subject) -> Finding:
    subject.registered = host.read_registered(subject.config.state_dir)
    return Finding("added jobs", "ok", f"{count(len(subject.registered), 'job')} added by `cpumond job add`")


def _check_descriptors(subject: Subject, version: int) -> list[Finding]:
    from cpumond.host.cgroup.v1 import V1Cgroup
    from cpumond.host.cgroup.v2 import V2Cgroup

    per_job = (V1Cgroup if version == 1 else V2Cgroup).DESCRIPTORS
    per_job += any(each.follows_pressure for each in subject.settings)
    limits = host.read_descriptor_limit(subject.agent)
    return checks.check_descriptors(*limits, len(subject.jobs), subject.config.discovery.max_jobs, per_job)


def _find_idle_class(config: AgentConfig, hierarchies: Hierarchies) -> IdleClass:
    from cpumond.host.cgroup.job_tree import JobCgroupTree
    from cpumond.host.executor import find_idle_class

    tree = JobCgroupTree(hierarchies, config.executor.cgroup_root, config.mountinfo)
    return find_idle_class(config.executor.kind, tree)


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
        # No open scheduler answers: would the one configured on this host be open?
        with suppress(CpumondError):
            own = load_scheduler_config(DEFAULT_SCHEDULER_CONFIG_PATH)
            findings += [checks.describe_open(f"{own.path}: {own.api.listen}")] if own.api.is_open else []
    return findings


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
        return [Finding("leftovers", "warn", f"{path} cannot be read by {host.find_user()}", host.suggest_root())]
    try:
        content = load(path, Originals)
    except CpumondError as error:
        if not host.may(path, os.R_OK):
            return [Finding("leftovers", "warn", f"{path} cannot be read by {host.find_user()}", host.suggest_root())]
        advice = (
            "start the agent: it sets the file aside and begins with the full limits; then check the limits of the jobs"
        )
        return [Finding("leftovers", "fail", str(error), advice)]
    is_current = content is not None and is_of_this_boot(content, os.path.join(config.runtime_dir, STATE_FILE))
    return [cgroups.check_leftovers(path, content, seen.running, is_current, hierarchies)]
