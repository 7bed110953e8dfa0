"""The life of the agent's process: lock, configuration, signals, servers, loop, and ``restore`` when it is dead."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
import psutil
import structlog

from cpumond import __version__
from cpumond.agent.assigned import AssignedJobs
from cpumond.agent.launch import check_own_account
from cpumond.agent.listen import AgentSockets, open_sockets
from cpumond.agent.loop import Agent
from cpumond.agent.notify import Notifier
from cpumond.agent.state_file import (
    STATE_FILE,
    Originals,
    count_service_end,
    load_first,
    make_directory,
    read_boot_id,
    save,
)
from cpumond.agent.writer import RestoreReport, restore_all
from cpumond.cgroup.jobs import JobCgroupTree
from cpumond.cgroup.mounts import Hierarchies, open_hierarchies
from cpumond.config import AgentConfig, finish_config, load_config
from cpumond.errors import EXIT_UNAVAILABLE, CpumondError, StateFileError, UnavailableError, from_os_error
from cpumond.executor import EXECUTORS
from cpumond.log import configure_logging
from cpumond.process import raise_descriptor_limit
from cpumond.reporters import REPORTERS
from cpumond.wire import JobLog, LogRequest, NodeRegistration, NodeResources

if TYPE_CHECKING:
    from cpumond.agent.api import ApiServer

log = structlog.get_logger("cpumond.agent")

LOCK_FILE = "agent.lock"
DEFAULT_USER_SLOTS = 1000


class LockHolder(msgspec.Struct):
    """Who holds the lock: written into the lock file for the message of the second agent."""

    pid: int
    since: float
    config: str


@contextlib.contextmanager
def hold_lock(runtime_dir: str, config_path: str) -> Iterator[None]:
    """The one agent of a runtime directory. Raises UnavailableError that names the first agent."""
    make_directory(runtime_dir, 0o755, "runtime_dir")
    path = os.path.join(runtime_dir, LOCK_FILE)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise from_os_error(error, f"open the lock {path}", "fix runtime_dir or run as root") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UnavailableError(f"{path}: {_describe_holder(os.read(fd, 4096))}; stop it first") from None
        try:
            os.ftruncate(fd, 0)
            os.write(fd, msgspec.json.encode(LockHolder(os.getpid(), time.time(), config_path)))
        except OSError as error:
            raise from_os_error(error, f"write the lock {path}", "free space in runtime_dir") from error
        yield
    finally:
        os.close(fd)


def _describe_holder(content: bytes) -> str:
    try:
        holder = msgspec.json.decode(content, type=LockHolder)
    except msgspec.DecodeError:
        return "another agent is running (it did not say its pid)"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
    return f"another agent is running: pid {holder.pid}, since {since}, with {holder.config or 'built-in defaults'}"


def run_agent(config_path: str | None) -> int:
    """``cpumond agent``: runs until SIGTERM or SIGINT; the exit code. Raises CpumondError for what a user can mend."""
    config = load_config(config_path)
    configure_logging(config.log.level, config.log.format)
    with hold_lock(config.runtime_dir, config.path):
        make_directory(config.state_dir, 0o700, "state_dir")
        hierarchies = open_hierarchies(config.mountinfo)
        raise_descriptor_limit()
        notifier = Notifier(os.environ)
        config = resolve_resources(config)
        assigned = _make_assigned(config, hierarchies)
        agent = Agent(config, hierarchies, REPORTERS[config.report.kind](config.report), notifier, assigned=assigned)
        _connect(agent)
        agent.reload = lambda: _reload(config_path)
        _handle_signals(agent)
        sockets = open_sockets(config)
        server: ApiServer | None = None
        try:
            agent.start()
            log.info(
                "started",
                version=__version__,
                node_id=config.node_id,
                config=config.path or None,
                layout=hierarchies.layout,
                cpu_root=hierarchies.cpu_root,
                metrics=sockets.metrics_address or None,
                web=sockets.web_address or None,
                state=agent.writer.path,
                jobs=len(agent.table),
            )
            server = _serve(agent, sockets)
            notifier.ready(agent)
            agent.run()
        finally:
            failures = agent.close()
            if server is not None:
                server.stop()
            sockets.close()
            with contextlib.suppress(OSError):
                os.unlink(config.control_socket)
    return EXIT_UNAVAILABLE if failures else 0


def resolve_resources(config: AgentConfig) -> AgentConfig:
    """The configuration with what this host offers: what is not said is what it has; no slots without an executor."""
    resources = config.resources
    slots = 0 if config.executor.kind == "none" else DEFAULT_USER_SLOTS
    resources = msgspec.structs.replace(
        resources,
        cpu=float(os.cpu_count() or 1) if resources.cpu is None else resources.cpu,
        memory=psutil.virtual_memory().total if resources.memory is None else resources.memory,
        user_slots=slots if resources.user_slots is None else resources.user_slots,
    )
    return msgspec.structs.replace(config, resources=resources)


def _make_assigned(config: AgentConfig, hierarchies: Hierarchies) -> AssignedJobs | None:
    """What runs the scheduler's jobs here, if anything. Raises ConfigError."""
    kind = config.executor.kind
    if kind == "none":
        return None
    check_own_account(config)
    cgroups = JobCgroupTree(hierarchies, config.executor.cgroup_root, config.mountinfo)
    return AssignedJobs(config, EXECUTORS[kind](config.runtime_dir, cgroups), read_memory=cgroups.read_memory)


def _connect(agent: Agent) -> None:
    """Make the agent's host a node of its scheduler, if it has one. Raises ConfigError."""
    config, assigned = agent.config, agent.assigned
    if not config.scheduler.url:
        return
    from cpumond.agent.requests import JobRequests
    from cpumond.reporters.scheduler import SchedulerLink  # the HTTP client costs several MiB

    def read_log(request: LogRequest) -> JobLog:
        if assigned is None:
            return JobLog(config.node_id, request.request_id, error=f"node {config.node_id} runs no jobs")
        return assigned.read_log(request)

    carry_out = JobRequests(agent).carry_out
    link = SchedulerLink(config.scheduler, make_registration(agent), agent.take_answer, read_log, carry_out)
    agent.link = link
    if assigned is not None:
        assigned.on_offer = lambda: link.register(make_registration(agent))


def make_registration(agent: Agent) -> NodeRegistration:
    """What this host offers just now."""
    config, assigned = agent.config, agent.assigned
    offers = assigned is not None and assigned.offers_slots
    return NodeRegistration(
        config.node_id,
        agent.incarnation,
        NodeResources(
            cpu=config.resources.cpu or 0.0,
            memory=config.resources.memory or 0,
            user_slots=(config.resources.user_slots or 0) if offers else 0,
        ),
        tags=list(config.scheduler.tags),
    )


def _serve(agent: Agent, sockets: AgentSockets) -> ApiServer:
    """The server's libraries are imported after the first tick: limits first, answers a moment later."""
    from cpumond.agent.api import serve

    return serve(agent, [sockets.control, *sockets.metrics], sockets.web)


def _reload(config_path: str | None) -> AgentConfig:
    config = load_config(config_path)
    configure_logging(config.log.level, config.log.format)
    return resolve_resources(config)


def _handle_signals(agent: Agent) -> None:
    def stop(_: int, __: FrameType | None) -> None:
        agent.stopping = True
        agent.wake()

    def reload(_: int, __: FrameType | None) -> None:
        agent.reloading = True
        agent.wake()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGHUP, reload)


DIRECTORY_KEYS = {"state_dir": "STATE_DIRECTORY", "runtime_dir": "RUNTIME_DIRECTORY", "mountinfo": ""}
"""What ``restore`` needs of a configuration, and the environment in which systemd says the same."""


def _load_config_for_restore(config_path: str | None) -> tuple[AgentConfig, CpumondError | None]:
    """The configuration; where that is wrong just now, what can still be read of it, and its error.

    A bad file on disk must not keep the limits of a dead agent lowered: the directories it names count though another
    line of it is wrong, then those that systemd names, then the built-in ones.
    """
    try:
        return load_config(config_path), None
    except CpumondError as error:
        places = {key: os.environ[name] for key, name in DIRECTORY_KEYS.items() if os.environ.get(name)}
        return finish_config({**places, **_salvage_directories(config_path)}, ""), error


def _salvage_directories(config_path: str | None) -> dict[str, str]:
    """The directories that a file names which is no valid configuration."""
    try:
        with open(config_path or "", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except (OSError, ValueError):
        # Not even readable: what systemd or the built-in defaults say has to do.
        return {}
    lines = re.findall(r"""(?m)^[ \t]*([a-z_-]+)[ \t]*=[ \t]*["']([^"'\x00-\x1f]+)["']""", text)
    return {key.replace("-", "_"): value for key, value in lines if key.replace("-", "_") in DIRECTORY_KEYS}


class Restored(msgspec.Struct, frozen=True):
    """What ``cpumond restore`` did: the report, the file it read, and sentences about the configuration or the file."""

    report: RestoreReport
    path: str
    config_error: CpumondError | None = None
    complaint: str = ""


def run_restore(config_path: str | None) -> Restored:
    """``cpumond restore``: put back what a dead agent left, from the state file or its copy in ``runtime_dir``.

    Where systemd says how the service ended, that is counted. Raises UnavailableError while an agent runs,
    StateFileError when no copy of the file is intact.
    """
    config, config_error = _load_config_for_restore(config_path)
    try:
        return _restore(config, config_error)
    finally:
        result = os.environ.get("SERVICE_RESULT")
        if result:
            with contextlib.suppress(CpumondError):  # a number less; the limits are what matters here
                count_service_end(config.state_dir, result)


def _restore(config: AgentConfig, config_error: CpumondError | None) -> Restored:
    paths = [os.path.join(directory, STATE_FILE) for directory in (config.state_dir, config.runtime_dir)]
    with hold_lock(config.runtime_dir, f"{config.path} (restore)"):
        content, complaint = load_first(paths, Originals, keep_damaged=True)
        if content is None and complaint:
            raise StateFileError(f"{complaint}; no copy of it is intact, set the limits by hand")
        report = RestoreReport(restored=[], gone=[], errors=[])
        if content is not None and content.boot_id != read_boot_id():
            report.gone = sorted(content.cgroups)
        elif content is not None and content.cgroups:
            report = restore_all(open_hierarchies(config.mountinfo), content.cgroups)
        if content is not None:
            done = {*report.restored, *report.gone}
            left = {name: original for name, original in content.cgroups.items() if name not in done}
            for path in paths:
                if path == paths[0] or os.path.exists(path):
                    save(path, Originals(content.boot_id, left))
        return Restored(report, paths[0], config_error, complaint)
