"""Checks of ``cpumond doctor``: the host and the agent. Each takes the facts it examines and returns findings."""

from __future__ import annotations

import math
import os
import platform
import pwd
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

from cpumond import __version__
from cpumond.agent.config import AgentConfig, load_config
from cpumond.cli.agent.client import AgentClient
from cpumond.cli.doctor.host import AgentSeen, find_user, may, read_line, suggest_root
from cpumond.cli.engines import FACTS
from cpumond.core.answers import StatusAnswer
from cpumond.core.decode import ContentError, decode_json
from cpumond.core.errors import ConfigError, CpumondError, UnavailableError
from cpumond.core.settings import parse_listen
from cpumond.core.words import count, format_time

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
"""Name of a process -> how it changes quotas."""

SLOW_CLOCKS: Final = frozenset({"hpet", "acpi_pm", "jiffies", "pit", "refined-jiffies"})

Level = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """The result of one check: its name, its level, a sentence and, unless the level is ok, advice."""

    check: str
    level: Level
    text: str
    advice: str = ""


def describe_host() -> Finding:
    text = (
        f"cpumond {__version__}, Python {platform.python_version()}, Linux {platform.release()}, "
        f"{os.cpu_count()} CPUs, as {find_user()}"
    )
    return Finding("host", "ok", text)


def check_descriptors(soft: int, hard: int, whose: str, jobs: int, max_jobs: int, per_job: int) -> list[Finding]:
    """Check RLIMIT_NOFILE against the descriptors of each job; the agent takes all that the hard limit allows."""
    from cpumond.host.service import OTHER_DESCRIPTORS, find_room  # loads structlog, too slow for `--help`

    room = find_room(hard) / per_job  # infinite if nothing limits it
    shown, enough = ("no", "any number of") if math.isinf(room) else (str(hard), str(math.floor(room)))
    text = (
        f"hard limit {shown} (soft {soft}) of {whose}: enough for {enough} jobs; now {jobs}, "
        f"discovery.max_jobs {max_jobs}"
    )
    advice = f"set LimitNOFILE={per_job * max_jobs + OTHER_DESCRIPTORS} in the agent's unit, or ulimit -Hn"
    if jobs > room:
        return [Finding("descriptors", "fail", text, advice)]
    return [Finding("descriptors", "warn" if max_jobs > room else "ok", text, advice if max_jobs > room else "")]


def check_inotify(limits: Mapping[str, int], watches: int) -> list[Finding]:
    """Check the kernel's inotify limits against ``watches``, the number of the jobs' limit files; directories of
    sources need further watches."""
    if not limits:
        advice = "without it limits are re-read at each rescan"
        return [Finding("inotify", "warn", "its limits are not visible here", advice)]
    per_user, instances = limits["max_user_watches"], limits["max_user_instances"]
    text = f"max_user_watches {per_user}, about {watches} needed now; max_user_instances {instances}, 1 needed"
    if watches > per_user * 0.9:
        advice = f"sysctl fs.inotify.max_user_watches={max(2 * watches, 65536)}"
        return [Finding("inotify", "warn", text, f"{advice}; until then writes by other programs are noticed late")]
    if instances < 16:
        return [Finding("inotify", "warn", text, "sysctl fs.inotify.max_user_instances=128; other programs share them")]
    return [Finding("inotify", "ok", text)]


def advise_source(kind: str, socket: str = "") -> str:
    """The lines of the configuration that name an engine, at ``socket`` unless that is its default."""
    where = f' socket = "{socket}"' if socket else ""
    return f'write this source, as `cpumond init` does: [[source]] kind = "{kind}"{where}'


def check_writers(names: Iterable[str], kinds: Collection[str] = ()) -> list[Finding]:
    """Find programs that change quotas, except those whose requests are followed by a source of one of ``kinds``."""
    running = set(names)
    engines = {name: [kind for kind, facts in FACTS.items() if name in facts.writes] for name in running & set(WRITERS)}
    found = sorted(name for name, of_kinds in engines.items() if set(of_kinds).isdisjoint(kinds))
    if not found:
        followed = f"{' and '.join(sorted(engines))}: a source follows its requests"
        return [Finding("other writers", "ok", followed if engines else "no program known to change quotas runs here")]
    otherwise = "keep its cgroups out of managed_roots, or let it set no CPU limits for the jobs that cpumond manages"
    findings = []
    for name in found:
        # The source of an engine with a running service comes first.
        of_kinds = sorted(engines[name], key=lambda kind: running.isdisjoint(FACTS[kind].programs))
        advice = advise_source(of_kinds[0]) if of_kinds else otherwise
        findings.append(Finding("other writers", "warn", f"{name} runs: {WRITERS[name]}", advice))
    return findings


def check_systemd(booted: bool, version: str) -> Finding:
    """Whether systemd runs this machine, so that it can restart the agent and restore limits."""
    if not booted:
        advice = "the program that starts the agent must run `cpumond restore` after it died, as ExecStopPost= does"
        installed = f" ({version} is installed)" if version else ""
        return Finding("systemd", "warn", f"does not run this machine{installed}", advice)
    number = re.search(r"\d+", version)
    if number is not None and int(number[0]) < 240:
        return Finding("systemd", "warn", version, "cpumond.service was tested with systemd 252 and later")
    return Finding("systemd", "ok", version or "runs, its version is unknown")


def check_clock(directory: str) -> list[Finding]:
    """Check the kernel's clock source, which the agent reads for each job at each of its checks."""
    current = read_line(os.path.join(directory, "current_clocksource"))
    if current is None:
        return [Finding("clock", "ok", "the clock source is not visible here")]
    if current in SLOW_CLOCKS:
        advice = "a slow one: each reading accesses hardware; see the kernel's log on why tsc was marked unstable"
        return [Finding("clock", "warn", f"clock source {current}", advice)]
    text = f"clock source {current}; rates use the monotonic clock, wall clock steps do no harm"
    return [Finding("clock", "ok", text)]


def check_config(path: str, explicit: bool) -> tuple[AgentConfig, list[Finding]]:
    """The configuration to examine, and findings about it; built-in defaults replace a wrong one."""
    if not explicit and not os.path.exists(path):
        advice = "create it, it may be empty (its keys: cpumond.toml(5)), or name another one with --config"
        text = f"there is none at {path}; the built-in defaults are examined"
        return load_config(None), [Finding("configuration", "warn", text, advice)]
    try:
        config = load_config(path)
    except ConfigError as error:
        advice = "correct it; the other findings are about the built-in defaults"
        more = f" ({len(error.others)} more: `cpumond check-config`)" if error.others else ""
        return load_config(None), [Finding("configuration", "fail", f"{error}{more}", advice)]
    except CpumondError as error:
        text = f"{error}; the built-in defaults are examined"
        return load_config(None), [Finding("configuration", "warn", text, suggest_root())]
    text = f"{path} is valid: node {config.node_id}, {count(len(config.source), 'source')}"
    return config, [Finding("configuration", "ok", text)]


def check_agent(seen: AgentSeen, config: AgentConfig) -> list[Finding]:
    """Check that an agent runs for this runtime_dir, and report its configuration."""
    lock = os.path.join(config.runtime_dir, "agent.lock")
    if not seen.running:
        advice = "start it with `systemctl start cpumond` or `cpumond agent --config FILE`"
        return [Finding("agent", "warn", f"none runs: no process holds {lock}", advice)]
    who = "an agent runs" + ("" if seen.pid is None else f", pid {seen.pid}")
    who += "" if seen.since is None else f", since {format_time(seen.since)}"
    findings = [Finding("agent", "ok", f"{who}, with {seen.config or 'built-in defaults'}")]
    if seen.config and config.path and os.path.abspath(seen.config) != os.path.abspath(config.path):
        text = f"it runs with {seen.config}, but {config.path} is examined"
        findings.append(Finding("agent", "warn", text, f"cpumond doctor --config {seen.config}"))
    return findings


def check_answer(client: AgentClient) -> list[Finding]:
    """Check that the running agent answers, and report its problems. Raises AccessError."""
    try:
        answer = client.decode(client.status(), StatusAnswer)
    except UnavailableError as error:
        return [Finding("agent", "fail", str(error), "see its log (journalctl -u cpumond), then restart it")]
    findings = [Finding("agent", "warn", problem, "`cpumond status` shows it as well") for problem in answer.problems]
    if answer.is_stuck:
        text = f"its last check was {answer.last_tick_age_s:.0f} s ago, one is due every {answer.check_period_s:g} s"
        findings.append(Finding("agent", "fail", text, "see its log (journalctl -u cpumond), then restart it"))
    text = f"it answers on {client.socket_path} and follows {count(len(answer.jobs), 'job')}"
    return [Finding("agent", "ok", text), *findings]


def check_directory(key: str, path: str) -> Finding:
    """Check that a directory of the configuration is writable, or can be created."""
    place = path
    while not os.path.exists(place):
        place = os.path.dirname(place)
    advice = f"set `{key}`, or fix its rights" if os.geteuid() == 0 else suggest_root()
    if not os.path.isdir(place):
        return Finding(key, "fail", f"{place} is not a directory", f"set `{key}`")
    if not may(place, os.W_OK | os.X_OK):
        level: Level = "fail" if os.geteuid() == 0 else "warn"
        return Finding(key, level, f"{place} cannot be written by {find_user()}", advice)
    return Finding(key, "ok", f"{path} can be written" if place == path else f"{path} will be created in {place}")


def check_pause(runtime_dir: str) -> Finding:
    path = os.path.join(runtime_dir, "pause")
    try:
        since = format_time(os.stat(path).st_mtime)
    except OSError:
        return Finding("pause file", "ok", "none; writes are not paused")
    return Finding("pause file", "warn", f"{path} stops all writes since {since}", f"rm {path}")


def check_report(kind: str, url: str, connect: Callable[[str, int], str]) -> Finding:
    """Check that the receiver of reports accepts a connection; nothing is sent."""
    if kind != "http":
        return Finding("report", "ok", f"kind {kind}: no receiver to reach")
    advice = "start the receiver or correct report.url; the agent continues without it and reports when it is back"
    return _check_address("report", url, connect, advice)


class _Ready(msgspec.Struct):
    """Keys of the scheduler's ``/readyz`` that are used."""

    role: str = ""
    term: int | None = None


def check_schedulers(
    urls: Sequence[str], connect: Callable[[str, int], str], read: Callable[[str], str]
) -> list[Finding]:
    """Check that each scheduler accepts a connection and, if there are several, that one leads; report the leader."""
    if not urls:
        return [Finding("scheduler", "ok", "none: this host is no node of a scheduler ([scheduler] url)")]
    advice = (
        "start the scheduler or correct scheduler.url; jobs continue without it, and the node registers when it is back"
    )
    findings = [_check_address("scheduler", url, connect, advice) for url in urls]
    asked = [_add_role(finding, url, read) for finding, url in zip(findings, urls, strict=True)]
    if any(role == "leader" for _, role in asked):
        return [finding if role else msgspec.structs.replace(finding, level="warn") for finding, role in asked]
    findings = [finding for finding, _ in asked]
    if any(role for _, role in asked):
        text = f"none of {', '.join(urls)} leads: no heartbeat and no command is accepted"
        findings.append(Finding("scheduler", "fail", text, "see their logs: does their database answer?"))
    return findings


def _add_role(finding: Finding, url: str, read: Callable[[str], str]) -> tuple[Finding, str]:
    """Add the scheduler's role to the finding about its address. Return the finding, and the role, "" if no other
    scheduler shares the store."""
    if finding.level == "ok":
        with suppress(ContentError):
            ready = decode_json(read(f"{url.rstrip('/')}/readyz"), _Ready)
            if ready.role and ready.term is not None:
                text = f"{finding.text}; {ready.role} in term {ready.term}"
                return msgspec.structs.replace(finding, text=text), ready.role
            return finding, ready.role
    return finding, ""


class _Access(msgspec.Struct):
    """Keys of the scheduler's ``/me`` that are used."""

    is_open: bool = False


def check_scheduler_access(url: str, read: Callable[[str], str]) -> list[Finding]:
    """Yield a warning if the scheduler at ``url`` answers without asking for a token."""
    try:
        is_open = decode_json(read(f"{url.rstrip('/')}/api/v1/me"), _Access).is_open
    except ContentError:
        return []
    return [describe_open(url)] if is_open else []


def describe_open(where: str) -> Finding:
    text = f"{where} is open: every user of its host may run operations and change pools in the name of any user"
    return Finding("scheduler", "warn", text, "set the scheduler's [api] tokens_file, or remove its [api] listen")


def _check_address(check: str, url: str, connect: Callable[[str, int], str], advice: str) -> Finding:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        if os.path.exists(parts.path):
            return Finding(check, "ok", f"{parts.path} exists")
        return Finding(check, "fail", f"{parts.path} does not exist", advice)
    try:
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        return Finding(check, "fail", f"{url}: {error}", f"correct {check}.url")
    if problem := connect(host, port):
        return Finding(check, "fail", f"{host} port {port} of {url}: {problem}", advice)
    return Finding(check, "ok", f"{host} port {port} of {url} accepts connections")


def check_executor(config: AgentConfig, is_booted: bool, has_bus_library: bool) -> list[Finding]:
    """Check that the executor can run jobs of the scheduler as configured; nothing is created."""
    options = config.executor
    if options.kind == "none":
        runs = "this node registers without slots for jobs" if config.scheduler.url else "no jobs are run"
        return [Finding("executor", "ok", f"kind none: {runs}")]
    findings = [Finding("executor", "ok", f"kind {options.kind}: jobs in {options.cgroup_root}")]
    if not config.scheduler.url:
        advice = 'set [scheduler] url, for example "http://127.0.0.1:9757"'
        findings.append(Finding("executor", "warn", "there is no scheduler to get jobs from", advice))
    if options.kind == "systemd" and not is_booted:
        advice = 'set [executor] kind = "cgroup" on a host without it'
        findings.append(Finding("executor", "fail", "systemd does not run this machine", advice))
    if options.kind == "systemd" and not has_bus_library:
        findings.append(Finding("executor", "fail", "dbus-fast is not installed", "pip install dbus-fast"))
    if options.kind == "cgroup" and is_booted:
        advice = 'set kind = "systemd": jobs of kind cgroup end with the service, and systemd may remove their limits'
        findings.append(Finding("executor", "warn", "systemd runs this machine", advice))
    if os.geteuid() != 0 and options.user != pwd.getpwuid(os.geteuid()).pw_name:
        text = "an agent that is not root runs jobs as its own account only"
        advice = "run the agent as root, or set [executor] user to the account it runs as"
        findings.append(Finding("executor", "warn", text, advice))
    if options.user or options.allow_root:
        secrets = "each job can read environment, files and logs of the others, regardless of read_secrets"
        who = f"all jobs run as {options.user}: {secrets}" if options.user else "jobs of root run as root"
        findings.append(Finding("executor", "ok", who))
    return [*findings, check_directory("executor.jobs_dir", options.jobs_dir)]


def check_metrics(
    listen: str,
    running: bool,
    connect: Callable[[str, int], str],
    read: Callable[[str], str],
    find_absent: Callable[[str], str],
) -> Finding:
    """Check whether the metrics' address is free, served by the agent, in use, or (still) no address of this host."""
    if not listen:
        return Finding("metrics", "ok", "turned off (metrics.listen is empty)")
    host, port = parse_listen(listen, "metrics.listen")
    if absent := find_absent(host):
        text = f"this host does not have the address {absent}; {listen} answers no request until it is added"
        return Finding("metrics", "warn", text, "if this persists, compare `ip address` with [metrics] listen")
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
