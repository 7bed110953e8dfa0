"""Open the agent's sockets. This is done before the first tick, so that a busy address is reported at once."""

from __future__ import annotations

import contextlib
import grp
import os
import socket
from typing import NamedTuple

from cpumond.agent.config import AgentConfig
from cpumond.core.errors import AccessError, ConfigError, CpumondError, from_os_error
from cpumond.core.settings import is_loopback
from cpumond.host.service import close_sockets, open_tcp_sockets

BACKLOG = 64


def open_metrics_sockets(listen: str) -> list[socket.socket]:
    """Open the TCP sockets of ``[metrics] listen``: one for each address of the host named there; none for "".

    Raises CreateError or AccessError."""
    return open_tcp_sockets(listen, "metrics.listen", BACKLOG) if listen else []


def open_control_socket(config: AgentConfig) -> socket.socket:
    """Open the unix socket, accessible to the agent's user, ``[control] group`` and root only.

    A socket file that exists is one of a dead agent, since the run lock excludes a second agent; it is replaced. Raises
    ConfigError, CreateError or AccessError."""
    path = config.control_socket
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        mask = os.umask(0o177)
        try:
            unix.bind(path)
        finally:
            os.umask(mask)
        if config.control.group:
            _give_to_group(path, config.control.group)
        os.chmod(path, 0o660)
        unix.listen(BACKLOG)
    except CpumondError:
        close_control_socket(unix, config)
        raise
    except OSError as error:
        close_control_socket(unix, config)
        raise from_os_error(error, f"create the socket {path}", "fix runtime_dir or run as root") from error
    return unix


def _give_to_group(path: str, group: str) -> None:
    try:
        os.chown(path, -1, grp.getgrnam(group).gr_gid)
    except KeyError:
        raise ConfigError(f"control.group: there is no group {group!r} on this machine") from None
    except PermissionError:
        raise AccessError(
            f"control.group: the agent's user may not give {path} to the group {group!r}; make it a member of that "
            "group or run as root"
        ) from None


def close_control_socket(unix: socket.socket, config: AgentConfig) -> None:
    """Close the socket, and remove the socket's file if there is one."""
    unix.close()
    with contextlib.suppress(OSError):
        os.unlink(config.control_socket)


def open_web_sockets(listen: str) -> list[socket.socket]:
    """Open the TCP sockets of ``[web] listen``, all of which are on the loopback device.

    Raises CreateError, AccessError, and ConfigError if the name resolves to an address that is not on the loopback."""
    if not listen:
        return []
    sockets = open_tcp_sockets(listen, "web.listen", BACKLOG)
    strange = [address for sock in sockets if not is_loopback(address := str(sock.getsockname()[0]))]
    if strange:
        close_sockets(sockets)
        raise ConfigError(
            f"web.listen: {listen!r} resolves to {strange[0]}, which is not a loopback address; use 127.0.0.1 instead"
        )
    return sockets


class AgentSockets(NamedTuple):
    """All listening sockets of the agent: the control socket, ``[metrics] listen``, ``[web] listen``."""

    control: socket.socket
    metrics: list[socket.socket]
    web: list[socket.socket]

    def close(self) -> None:
        close_sockets([self.control, *self.metrics, *self.web])


def format_address(sockets: list[socket.socket]) -> str | None:
    """Return the first address of ``sockets``, with the actual port; None if there is no socket."""
    if not sockets:
        return None
    host, port = sockets[0].getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_sockets(config: AgentConfig) -> AgentSockets:
    """Open all sockets. If it raises CreateError, AccessError or ConfigError, no socket stays open."""
    unix = open_control_socket(config)
    metrics: list[socket.socket] = []
    try:
        metrics = open_metrics_sockets(config.metrics.listen)
        return AgentSockets(unix, metrics, open_web_sockets(config.web.listen))
    except CpumondError:
        close_sockets(metrics)
        close_control_socket(unix, config)
        raise
