"""Functions shared by the long-running processes: listening sockets, the service manager's socket, descriptors."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import structlog

from cpumond.core.errors import CreateError, from_os_error
from cpumond.core.settings import parse_listen

ABSENT_ERRNOS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""Errors of the kernel if this machine lacks an address, or an address family."""

IP_FREEBIND: Final = 15
IPV6_FREEBIND: Final = 78
"""These two are from <linux/in.h> and <linux/in6.h>, as ``socket`` does not define them."""

MAX_STATUS = 800
"""Maximum characters of a status: systemd drops a message of more than 4096 bytes."""
EXTEND_S = 30

log = structlog.get_logger()


def open_tcp_sockets(listen: str, key: str, backlog: int) -> list[socket.socket]:
    """Open the TCP sockets of ``listen``, "host:port": one for each address of the host, all on one port.

    An address that this machine lacks is skipped if the machine has another address of the host. If it has none of the
    addresses, these may appear later (DHCP, a VPN, a failover): the sockets listen on them already, and a warning is
    logged. ``key`` names the setting ("table.key"), for messages. Raises CreateError or AccessError."""
    host, port = parse_listen(listen, key)
    table, _, name = key.partition(".")
    setting = f"[{table}] {name}"
    doing, advice = f"listen on {listen}", f"set {setting} to a free address of this machine"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        # Not a ConfigError: after CreateError the service manager tries again, and the name may be known then.
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise CreateError(f"cannot {doing}: {host!r}: {reason}; {advice}") from None
    places = [(family, address) for family, _, _, _, address in found]
    try:
        return _listen_on_all(places, backlog)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise from_os_error(error, doing, advice) from error
    try:
        sockets = _listen_on_all(places, backlog, is_early=True)
    except OSError as error:
        raise from_os_error(error, doing, advice) from error
    addresses = " and ".join(str(sock.getsockname()[0]) for sock in sockets)
    why = f"{setting}: this host does not have the address {addresses} yet; connections are accepted once it does"
    log.warning("address_not_here", error=why, advice=f"if that does not happen, compare `ip address` with {setting}")
    return sockets


def _listen_on_all(
    places: Sequence[tuple[int, tuple[Any, ...]]], backlog: int, is_early: bool = False
) -> list[socket.socket]:
    """Open one socket for each family and address; skip missing addresses unless all are missing. Raises OSError."""
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    for family, place in places:
        # All addresses of a host share one port, even if the kernel chose it.
        port = sockets[0].getsockname()[1] if sockets else place[1]
        try:
            sockets.append(_listen(family, (place[0], port, *place[2:]), backlog, len(places) == 1, is_early))
        except OSError as error:
            if error.errno not in ABSENT_ERRNOS:
                close_sockets(sockets)
                raise
            if absent is None or error.errno == errno.EADDRNOTAVAIL:
                absent = error
    if absent is not None and not sockets:
        raise absent
    return sockets


def _listen(family: int, address: tuple[Any, ...], backlog: int, is_alone: bool, is_early: bool) -> socket.socket:
    # The event loop turns off Nagle's algorithm only for a socket whose protocol is named. The algorithm would delay a
    # response that is sent in two pieces by 40 ms.
    tcp, is_v6 = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP), family == socket.AF_INET6
    try:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_v6 and not is_alone:
            # The host's IPv4 address has its own socket. A single "[::]" accepts both versions.
            tcp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if is_early:
            option = (socket.IPPROTO_IPV6, IPV6_FREEBIND) if is_v6 else (socket.IPPROTO_IP, IP_FREEBIND)
            # If the kernel lacks this option, ``bind`` refuses the address again, and its error explains why.
            with contextlib.suppress(OSError):
                tcp.setsockopt(*option, 1)
        tcp.bind(address)
        tcp.listen(backlog)
    except OSError:
        tcp.close()
        raise
    return tcp


def close_sockets(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


class ServiceManager:
    """The service manager (sd_notify). Nothing is sent unless ``environment`` says that it started this process.

    ``watchdog_s``: seconds for which the manager waits for WATCHDOG=1; infinity if it does not watch this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._send: Callable[[str], object] | None = None
        self._unescapes = "SYSTEMD_EXEC_PID" in environment
        """systemd sets this variable from 248 on. From 246 on it removes each backslash of a message, and drops a
        message that ends with a backslash."""
        self.watchdog_s = math.inf
        if environment.get("NOTIFY_SOCKET"):
            from cysystemd import daemon

            self._send = daemon.sd_notify  # type: ignore[attr-defined]
            self.watchdog_s = read_watchdog_s(environment)
        self._extended_at_s = -math.inf

    @property
    def listens(self) -> bool:
        return self._send is not None

    def notify(self, *lines: str, status: str = "") -> None:
        """Send one message. Never raises, because a manager that does not listen must not stop the program.

        ``status``: the text of ``systemctl status`` from now on, of any length and number of lines."""
        if self._send is None:
            return
        if status:
            # A sentence may contain a path that is invalid Unicode, but the message must be sent.
            text = " ".join(status.split())[:MAX_STATUS].encode(errors="replace").decode()
            shown = text.replace("\\", "\\\\") if self._unescapes else text
            lines = (*lines, f"STATUS={shown}")
        try:
            self._send("\n".join(lines))
        except (OSError, RuntimeError, ValueError):
            # The manager is unavailable; if it waits in vain, its watchdog acts.
            return

    def extend(self, status: str = "") -> None:
        """Extend the time-out of a long start or stop to EXTEND_S from now, whatever the manager's own time-out is.

        Loops call it after each step of progress; without ``status`` it sends at most one message per second."""
        now_s = time.monotonic()
        if status or now_s - self._extended_at_s >= 1.0:
            self._extended_at_s = now_s
            self.notify(f"EXTEND_TIMEOUT_USEC={EXTEND_S * 1_000_000}", status=status)


def read_watchdog_s(environment: Mapping[str, str]) -> float:
    """Return the seconds that the manager waits for WATCHDOG=1; infinity if it does not watch this process."""
    watchdog_us = environment.get("WATCHDOG_USEC", "")
    if not watchdog_us.isdecimal() or int(watchdog_us) == 0:
        return math.inf
    return int(watchdog_us) / 1e6 if environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()) else math.inf


OTHER_DESCRIPTORS: Final = 256
"""Descriptors reserved for other things than jobs: connections, and files that are opened briefly to write limits."""


def find_room(limit: int) -> float:
    """Return how many descriptors jobs may hold if RLIMIT_NOFILE is ``limit``; at most a quarter of it is reserved."""
    return math.inf if limit == resource.RLIM_INFINITY else limit - min(OTHER_DESCRIPTORS, limit // 4)


M_MMAP_THRESHOLD: Final = -3
"""Constant of mallopt(3)."""
LARGE_BYTES: Final = 32_768


def give_back_large_blocks() -> None:
    """Return freed blocks of LARGE_BYTES and more to the system, for example after thousands of requests. By default
    glibc takes such blocks from its heap once one was freed; then smaller blocks above them keep them there."""
    import ctypes  # not every program that starts needs it

    with contextlib.suppress(OSError, AttributeError):  # a C library without mallopt
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def raise_descriptor_limit() -> None:
    """Raise the limit of file descriptors to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
