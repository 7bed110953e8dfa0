"""Run the agent's process: take the lock, read the configuration, handle signals, start servers, run the loop."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
import psutil
import structlog

from cpumond import __version__
from cpumond.agent.config import AgentConfig, find_idle_options, load_config
from cpumond.agent.jobs.assigned import AssignedJobs
from cpumond.agent.jobs.launch import check_own_account
from cpumond.agent.jobs.memory import MemoryFiles, read_available
from cpumond.agent.limits.restore import RunLock
from cpumond.agent.listen import format_address, open_control_socket, open_sockets
from cpumond.agent.notify import Notifier, describe_status
from cpumond.agent.places import Look
from cpumond.agent.report import REPORTERS
from cpumond.agent.service import Agent
from cpumond.agent.state_file import identify, keep_node_key, make_directory, read_node_key
from cpumond.core.errors import EXIT_UNAVAILABLE
from cpumond.core.log import configure_logging
from cpumond.core.wire import JobLog, LogRequest, NodeRegistration, NodeResources
from cpumond.host.cgroup import read_host_cores
from cpumond.host.cgroup.job_tree import JobCgroupTree
from cpumond.host.cgroup.mounts import Hierarchies, hold, open_hierarchies
from cpumond.host.executor import find_idle_class, make_executor
from cpumond.host.executor.records import drop_slurm_records
from cpumond.host.service import raise_descriptor_limit

if TYPE_CHECKING:
    from cpumond.agent.api import AgentServer

log = structlog.get_logger("cpumond.agent")

DEFAULT_USER_SLOTS = 1000


def run_agent(config_path: str | None) -> int:
    """Run ``cpumond agent`` until SIGTERM or SIGINT; return the exit code. Raises CpumondError for a user's faults."""
    config = _read_config(config_path)
    with contextlib.closing(RunLock(config.runtime_dir, config.path)) as lock, contextlib.ExitStack() as stack:
        make_directory(config.state_dir, 0o700, "state_dir")
        hierarchies = stack.enter_context(hold(open_hierarchies(config.mountinfo)))
        raise_descriptor_limit()
        notifier = Notifier(os.environ)
        written, config = config, resolve_resources(config, hierarchies)
        assigned = _make_assigned(config, hierarchies)
        agent = Agent(config, hierarchies, REPORTERS[config.report.kind](config.report), notifier, assigned=assigned)
        _connect(agent)
        agent.context.places.lock = lock.look_after
        agent.reload = lambda: resolve_resources(_read_config(config_path), hierarchies)
        agent.context.read_resources = lambda: resolve_resources(written, hierarchies).resources
        _handle_signals(agent)
        sockets = open_sockets(config)
        agent.context.metrics_address = format_address(sockets.metrics) or ""
        server: AgentServer | None = None
        try:
            agent.start()
            log.info("started", version=__version__, node_id=config.node_id, config=config.path or None,
                     layout=hierarchies.layout, cpu_root=hierarchies.name(hierarchies.cpu_root),
                     metrics=format_address(sockets.metrics), web=format_address(sockets.web),
                     state=agent.writer.path, jobs=len(agent.table), status=describe_status(agent))  # fmt: skip
            # The server's libraries are imported after the first tick, because limits are more urgent than responses.
            from cpumond.agent.api import serve

            server = serve(agent, [sockets.control, *sockets.metrics], sockets.web)
            agent.context.places.looks.append(_watch_control(config, server))
            notifier.ready(agent)
            agent.run()
        finally:
            failures = agent.close()
            if server is not None:
                server.stop()
            sockets.close()
            if not agent.context.places.is_ousted:
                with contextlib.suppress(OSError):
                    os.unlink(config.control_socket)
    return EXIT_UNAVAILABLE if failures or agent.context.places.is_ousted else 0


def resolve_resources(config: AgentConfig, hierarchies: Hierarchies) -> AgentConfig:
    """Fill in from the host the resources that the configuration does not set. Without an executor, there are no slots.

    Raises CgroupReadError."""
    resources = config.resources
    slots = 0 if config.executor.kind == "none" else DEFAULT_USER_SLOTS
    resources = msgspec.structs.replace(
        resources,
        cpu=read_host_cores(hierarchies) if resources.cpu is None else resources.cpu,
        memory=psutil.virtual_memory().total if resources.memory is None else resources.memory,
        user_slots=slots if resources.user_slots is None else resources.user_slots,
    )
    return msgspec.structs.replace(config, resources=resources)


def _make_assigned(config: AgentConfig, hierarchies: Hierarchies) -> AssignedJobs | None:
    """Make the object of the scheduler's jobs and its executor; None if no executor is set. Raises ConfigError."""
    kind = config.executor.kind
    if kind == "none":
        return None
    check_own_account(config)
    cgroups = JobCgroupTree(hierarchies, config.executor.cgroup_root, config.mountinfo)
    drop_slurm_records(config.runtime_dir)
    memory = MemoryFiles(cgroups.read_memory, cgroups.read_memory_limit, read_available, cgroups.hold_memory)
    assigned = AssignedJobs(config, make_executor(kind, config.runtime_dir, cgroups), memory=memory)
    assigned.idle_class = find_idle_class(kind, cgroups).name
    return assigned


def _connect(agent: Agent) -> None:
    """If a scheduler is configured, connect the agent to it. Raises ConfigError."""
    config, assigned = agent.config, agent.context.assigned
    if not config.scheduler.addresses:
        return
    from cpumond.agent.jobs.requests import JobRequests
    from cpumond.agent.report.scheduler import SchedulerLink  # the HTTP client costs several MiB

    def read_log(request: LogRequest) -> JobLog:
        if assigned is None:
            return JobLog(config.node_id, request.request_id, error=f"node {config.node_id} runs no jobs")
        return assigned.read_log(request)

    carry_out = JobRequests(agent).carry_out
    key = read_node_key(config.state_dir)
    agent.context.places.looks.append(lambda: keep_node_key(config.state_dir, key))
    link = SchedulerLink(config.scheduler, make_registration(agent, key), agent.take_answer, read_log, carry_out)
    agent.context.link = link
    agent.context.on_offer = lambda: link.register(make_registration(agent, key))
    if assigned is not None:
        assigned.on_offer = agent.context.on_offer


def make_registration(agent: Agent, key: str) -> NodeRegistration:
    config, assigned = agent.config, agent.context.assigned
    offers = assigned is not None and not assigned.problem
    return NodeRegistration(
        config.node_id,
        agent.context.incarnation,
        NodeResources(
            cpu=config.resources.cpu or 0.0,
            memory=config.resources.memory or 0,
            user_slots=(config.resources.user_slots or 0) if offers else 0,
        ),
        tags=list(config.scheduler.tags),
        key=key,
    )


def _watch_control(config: AgentConfig, server: AgentServer) -> Look:
    """Make a look that recreates the control socket if its file was removed or replaced, so that clients find it."""
    path = config.control_socket
    bound = identify(path)

    def look() -> list[str]:
        nonlocal bound
        if bound is not None and identify(path) == bound:
            return []
        server.replace_control(open_control_socket(config))
        bound = identify(path)
        return [path]

    return look


def _read_config(config_path: str | None) -> AgentConfig:
    config = load_config(config_path)
    configure_logging(config.log.level, config.log.format)
    for sentence in find_idle_options(config):
        log.warning("option_without_effect", error=sentence)
    return config


def _handle_signals(agent: Agent) -> None:
    def stop(_: int, __: FrameType | None) -> None:
        agent.context.stopping = True
        agent.wake()

    def reload(_: int, __: FrameType | None) -> None:
        agent.reloading = True
        agent.wake()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGHUP, reload)
