"""The agent's sockets, bound before the first tick so that a busy address is said at once."""

from __future__ import annotations

import contextlib
import grp
import os
import socket

from cpumond.config import AgentConfig
from cpumond.errors import AccessError, ConfigError, CpumondError, from_os_error
from cpumond.process import open_tcp_sockets

BACKLOG = 64


def open_metrics_sockets(listen: str) -> list[socket.socket]:
    """The TCP sockets of ``[metrics] listen``: one for each address of its host, none when it is turned off.

    Raises CreateError or AccessError.
    """
    return open_tcp_sockets(listen, "metrics.listen", BACKLOG) if listen else []


def open_control_socket(config: AgentConfig) -> socket.socket:
    """The unix socket, for the agent's user, ``[control] group`` and root only.

    A socket file left by a dead agent is replaced; the lock says that no other agent lives. Raises ConfigError,
    CreateError or AccessError.
    """
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
        raise from_os_error(error, f"make the socket {path}", "fix runtime_dir or run as root") from error
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
    """Close the socket and remove its file, if it has one."""
    unix.close()
    with contextlib.suppress(OSError):
        os.unlink(config.control_socket)


def open_sockets(config: AgentConfig) -> list[socket.socket]:
    """All sockets, the unix one first. Raises CreateError, AccessError or ConfigError, and leaves nothing then."""
    unix = open_control_socket(config)
    try:
        return [unix, *open_metrics_sockets(config.metrics.listen)]
    except CpumondError:
        close_control_socket(unix, config)
        raise
