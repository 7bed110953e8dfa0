"""The agent's sockets, bound before the first tick so that a busy address is said at once."""

from __future__ import annotations

import contextlib
import grp
import os
import socket

from cpumond.config import AgentConfig, parse_listen
from cpumond.errors import ConfigError, CpumondError, from_os_error


def open_metrics_socket(listen: str) -> socket.socket | None:
    """The TCP socket of ``[metrics] listen``, None when it is turned off. Raises CreateError or AccessError."""
    if not listen:
        return None
    host, port = parse_listen(listen, "metrics.listen")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        tcp = socket.socket(family, socket.SOCK_STREAM)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tcp.bind((host, port))
        tcp.listen(64)
    except OSError as error:
        raise from_os_error(error, f"listen on {listen}", "set [metrics] listen to a free address") from error
    return tcp


def open_control_socket(config: AgentConfig) -> socket.socket:
    """The unix socket, for root and its group only. Raises CreateError or AccessError.

    A socket file left by a dead agent is replaced; the lock says that no other agent lives.
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
            os.chown(path, -1, grp.getgrnam(config.control.group).gr_gid)
        os.chmod(path, 0o660)
        unix.listen(64)
    except KeyError:
        unix.close()
        raise ConfigError(f"control.group: there is no group {config.control.group!r} on this machine") from None
    except OSError as error:
        unix.close()
        raise from_os_error(error, f"make the socket {path}", "fix runtime_dir or run as root") from error
    return unix


def open_sockets(config: AgentConfig) -> list[socket.socket]:
    """Both sockets, the unix one first. Raises CreateError, AccessError or ConfigError."""
    unix = open_control_socket(config)
    try:
        tcp = open_metrics_socket(config.metrics.listen)
    except CpumondError:
        unix.close()
        raise
    return [unix] if tcp is None else [unix, tcp]
