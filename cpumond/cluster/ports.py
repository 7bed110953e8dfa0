"""TCP ports of 127.0.0.1 for servers that are started and restarted on a host with other work."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator, Sequence

FIRST, LAST = 10_000, 30_000
"""Range in which ports are chosen; it ends where the kernel's ephemeral ports begin, if these begin earlier."""


def find_range() -> tuple[int, int]:
    """Return the first and last port of the range to choose from. It avoids ports that the kernel assigns by itself.

    If the port were ephemeral, another program's connection could get it before our server listens on it."""
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        first_given_out = int(file.read().split()[0])
    return FIRST, first_given_out - 1 if first_given_out > 2 * FIRST else LAST  # if nearly all are ephemeral: any


def is_free(port: int) -> bool:
    with socket.socket() as sock, contextlib.suppress(OSError):
        sock.bind(("127.0.0.1", port))
        return True
    return False


def pick_port() -> int:
    first, last = find_range()
    while True:
        port = first + secrets.randbelow(last - first + 1)
        if is_free(port):
            return port


def hold(addresses: Sequence[str]) -> list[socket.socket]:
    """Return sockets that reserve the ports of ``addresses``, "host:port", for servers that are down at the moment.

    The kernel assigns a reserved port to no program, and refuses connections to it; only a server that sets
    SO_REUSEADDR can listen on it. A port that is in use already is left out."""
    held = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, int(port)))
        except OSError:
            sock.close()
        else:
            held.append(sock)
    return held


@contextlib.contextmanager
def held(*addresses: str) -> Iterator[None]:
    sockets = hold(addresses)
    try:
        yield
    finally:
        for each in sockets:
            each.close()
