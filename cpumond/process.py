"""What the long-running processes share: listening sockets, the service manager's socket, descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import resource
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from cpumond.config import parse_listen
from cpumond.errors import CreateError, from_os_error

ABSENT_ERRNOS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""What the kernel answers about an address, or a family of addresses, that this machine does not have."""

MAX_STATUS = 800
"""Characters: systemd drops a message of more than 4096 bytes, however it is made."""
EXTEND_S = 30


def open_tcp_sockets(listen: str, key: str, backlog: int) -> list[socket.socket]:
    """The TCP sockets of ``listen``, "host:port": one for each address of the host, all on one port.

    ``key`` is where it was configured ("table.key"), for messages. Raises CreateError or AccessError.
    """
    host, port = parse_listen(listen, key)
    table, _, name = key.partition(".")
    advice = f"set [{table}] {name} to a free address of this machine"
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
            sockets.append(_listen(family, address, backlog, alone=len(found) == 1))
        except OSError as error:
            problem = error
            if error.errno not in ABSENT_ERRNOS:
                break
    if problem is not None and (not sockets or problem.errno not in ABSENT_ERRNOS):
        close_sockets(sockets)
        raise from_os_error(problem, f"listen on {listen}", advice) from problem
    return sockets


def _listen(family: int, address: tuple[Any, ...], backlog: int, alone: bool) -> socket.socket:
    # With its protocol named, the event loop turns Nagle's algorithm off: an answer in two pieces would wait 40 ms.
    tcp = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not alone:
            # The host's IPv4 address has a socket of its own; "[::]" alone takes both.
            tcp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        tcp.bind(address)
        tcp.listen(backlog)
    except OSError:
        tcp.close()
        raise
    return tcp


def close_sockets(sockets: list[socket.socket]) -> None:
    """Close all of them."""
    for sock in sockets:
        sock.close()


class Deadline:
    """Ends a connection when a request and its answer take too long together, so that silent peers do not add up.

    ``restart`` at its start and after each answer, ``cancel`` at its end; ``exchange_s`` is longer than a connection
    may idle between two requests.
    """

    def __init__(self, exchange_s: float) -> None:
        self._exchange_s = exchange_s
        self._timer: asyncio.TimerHandle | None = None

    def restart(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        """A new exchange begins."""
        self.cancel()
        self._timer = loop.call_later(self._exchange_s, transport.abort)

    def cancel(self) -> None:
        """The connection is over."""
        if self._timer is not None:
            self._timer.cancel()


def connect_to_manager(environment: Mapping[str, str]) -> Callable[[str], object] | None:
    """What sends a message to the service manager (sd_notify); None when it did not start us."""
    if not environment.get("NOTIFY_SOCKET"):
        return None
    from cysystemd import daemon

    return daemon.sd_notify  # type: ignore[attr-defined, no-any-return]


class ServiceManager:
    """The service manager (sd_notify), when ``environment`` says that it started us; else nobody listens.

    ``watchdog_s``: how long it waits for WATCHDOG=1, seconds; infinity when it does not.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._send = connect_to_manager(environment)
        self.watchdog_s = math.inf if self._send is None else read_watchdog_s(environment)
        self._extended_at_s = -math.inf

    @property
    def listens(self) -> bool:
        """Whether anybody hears what is told."""
        return self._send is not None

    def tell(self, *lines: str, status: str = "") -> None:
        """Send one message. A manager that does not listen must not stop us, so this never raises.

        ``status``: what ``systemctl status`` shows of us from now on, of any length and on any number of lines.
        """
        if self._send is None:
            return
        if status:
            # A path in a sentence may be no valid Unicode, and the message must go out all the same.
            text = " ".join(status.split())[:MAX_STATUS].encode(errors="replace").decode()
            lines = (*lines, f"STATUS={text}")
        try:
            self._send("\n".join(lines))
        except (OSError, RuntimeError, ValueError):
            # Nothing to tell and nobody to tell it to: the watchdog decides.
            return

    def extend(self, status: str = "") -> None:
        """A start or an end takes long and goes on: EXTEND_S from now, whatever the manager's own patience is.

        For a loop that gets somewhere, after each step: without a ``status`` at most one message a second goes out.
        """
        now_s = time.monotonic()
        if status or now_s - self._extended_at_s >= 1.0:
            self._extended_at_s = now_s
            self.tell(f"EXTEND_TIMEOUT_USEC={EXTEND_S * 1_000_000}", status=status)


def read_watchdog_s(environment: Mapping[str, str]) -> float:
    """How long the manager waits for WATCHDOG=1 in seconds; infinity when it does not watch this process."""
    watchdog_us = environment.get("WATCHDOG_USEC", "")
    if not watchdog_us.isdigit() or int(watchdog_us) == 0:
        return math.inf
    return int(watchdog_us) / 1e6 if environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()) else math.inf


def raise_descriptor_limit() -> None:
    """Take all the file descriptors that the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
