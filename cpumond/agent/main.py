"""The life of the agent's process: lock, configuration, signals, servers, loop, and ``restore`` when it is dead."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
import structlog

from cpumond import __version__
from cpumond.agent.listen import open_sockets
from cpumond.agent.loop import Agent
from cpumond.agent.notify import Notifier
from cpumond.agent.state_file import STATE_FILE, Originals, load, make_directory, read_boot_id, save
from cpumond.agent.writer import RestoreReport, restore_all
from cpumond.cgroup.mounts import open_hierarchies
from cpumond.config import AgentConfig, finish_config, load_config
from cpumond.errors import CpumondError, UnavailableError, from_os_error
from cpumond.log import configure_logging
from cpumond.reporters import REPORTERS

if TYPE_CHECKING:
    from cpumond.agent.api import ApiServer

log = structlog.get_logger("cpumond.agent")

LOCK_FILE = "agent.lock"


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
        _raise_descriptor_limit()
        notifier = Notifier(os.environ)
        agent = Agent(config, hierarchies, REPORTERS[config.report.kind](config.report), notifier)
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
                metrics=config.metrics.listen or None,
                state=agent.writer.path,
                jobs=len(agent.table),
            )
            server = _serve(agent, sockets)
            notifier.ready(agent)
            agent.run()
        finally:
            agent.close()
            if server is not None:
                server.stop()
            for sock in sockets:
                sock.close()
            with contextlib.suppress(OSError):
                os.unlink(config.control_socket)
    return 0


def _serve(agent: Agent, sockets: list[socket.socket]) -> ApiServer:
    """The server's libraries are imported after the first tick: limits first, answers a moment later."""
    from cpumond.agent.api import serve

    return serve(agent, sockets)


def _reload(config_path: str | None) -> AgentConfig:
    config = load_config(config_path)
    configure_logging(config.log.level, config.log.format)
    return config


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


def _raise_descriptor_limit() -> None:
    """Two descriptors a job: take all that the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _load_config_for_restore(config_path: str | None) -> AgentConfig:
    """The configuration; where that is wrong just now, the directories systemd names, else the built-in ones: a bad
    file on disk must not keep the limits of a dead agent lowered."""
    try:
        return load_config(config_path)
    except CpumondError as error:
        configure_logging()
        places = {"state_dir": "STATE_DIRECTORY", "runtime_dir": "RUNTIME_DIRECTORY"}
        config = finish_config({key: os.environ[name] for key, name in places.items() if os.environ.get(name)}, "")
        log.error("config_unusable", error=str(error), state_dir=config.state_dir, runtime_dir=config.runtime_dir)
        return config


def run_restore(config_path: str | None) -> tuple[RestoreReport, str]:
    """``cpumond restore``: put back what a dead agent left; what was done, and the path of the state file.

    Raises UnavailableError while an agent runs, StateFileError when the file is damaged.
    """
    config = _load_config_for_restore(config_path)
    path = os.path.join(config.state_dir, STATE_FILE)
    with hold_lock(config.runtime_dir, f"{config.path} (restore)"):
        content = load(path, Originals)
        if content is None or not content.cgroups:
            return RestoreReport(restored=[], gone=[], errors=[]), path
        if content.boot_id != read_boot_id():
            save(path, Originals(read_boot_id(), {}))
            return RestoreReport(restored=[], gone=sorted(content.cgroups), errors=[]), path
        report = restore_all(open_hierarchies(config.mountinfo), content.cgroups)
        failed = {
            name: content.cgroups[name] for name in content.cgroups if name not in {*report.restored, *report.gone}
        }
        save(path, Originals(content.boot_id, failed))
        return report, path
