"""The agent's sockets, bound before the first tick so that a busy address is said at once."""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import socket
from typing import Any

from cpumond.config import AgentConfig, parse_listen
from cpumond.errors import AccessError, ConfigError, CpumondError, CreateError, from_os_error

BACKLOG = 64
ABSENT_ERRNOS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""What the kernel answers about an address, or a family of addresses, that this machine does not have."""


def open_metrics_sockets(listen: str) -> list[socket.socket]:
    """The TCP sockets of ``[metrics] listen``: one for each address of its host, none when it is turned off.

    Raises CreateError or AccessError.
    """
    if not listen:
        return []
    host, port = parse_listen(listen, "metrics.listen")
    advice = "set [metrics] listen to a free address of this machine"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        # Not a ConfigError: the service manager tries again after this one, and the name may be known by then.
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise CreateError(f"cannot listen on {listen}: {host!r}: {reason}; {advice}") from None
    sockets: list[socket.socket] = []
    problem: OSError | None = None
    for family, _, _, _, address in found:
        if sockets and port == 0:
            address = (address[0], sockets[0].getsockname()[1], *address[2:])  # noqa: PLW2901 - one port for a host
        try:
            sockets.append(_listen(family, address, alone=len(found) == 1))
        except OSError as error:
            problem = error
            if error.errno not in ABSENT_ERRNOS:
                break
    if problem is not None and (not sockets or problem.errno not in ABSENT_ERRNOS):
        close_sockets(sockets)
        raise from_os_error(problem, f"listen on {listen}", advice) from problem
    return sockets


def _listen(family: int, address: tuple[Any, ...], alone: bool) -> socket.socket:
    tcp = socket.socket(family, socket.SOCK_STREAM)
    try:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not alone:
            # The host's IPv4 address has a socket of its own; "[::]" alone takes both.
            tcp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        tcp.bind(address)
        tcp.listen(BACKLOG)
    except OSError:
        tcp.close()
        raise
    return tcp


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


def close_sockets(sockets: list[socket.socket]) -> None:
    """Close all of them."""
    for sock in sockets:
        sock.close()
