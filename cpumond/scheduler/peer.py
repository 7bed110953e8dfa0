"""Which user is at the other end of a TCP connection over loopback, as SO_PEERCRED tells for unix sockets."""

from __future__ import annotations

import errno
import os
import pwd
import socket
import struct
from typing import Final

from cpumond.scheduler.tokens import User

OVERFLOW_UID: Final = 65534
"""Shown for every uid that our user namespace does not map; also the account "nobody", which many programs share."""

_ESTABLISHED: Final = 1
_SOCK_DIAG_BY_FAMILY: Final = 20
_NETLINK_SOCK_DIAG: Final = 4
_NLM_F_REQUEST: Final = 1
_ANY_COOKIE: Final = b"\xff" * 8

LOCAL_USERS: Final = "root and the account that it runs as"


def find_local_user(connection: socket.socket | None) -> User | str:
    """The user that connected, if one of ``LOCAL_USERS``, who may do everything; else a text that says who it is."""
    uid = None if connection is None else find_peer_uid(connection)
    if uid is None:
        return "it cannot be told who this is"
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    if uid in (0, os.geteuid()) and uid != OVERFLOW_UID:
        return User(name, admin=True)
    return f"this is {name} (uid {uid})"


def find_peer_uid(connection: socket.socket) -> int | None:
    """The uid that opened the other end of a TCP connection over IPv4 on this machine; None if not known.

    A closed end has no owner any more: a uid counts only if the connection is established before and after the lookup,
    so that a later socket of another user is not taken for the closed one.
    """
    try:
        if connection.family != socket.AF_INET or not _is_established(connection):
            return None
        ends = (*connection.getpeername(), *connection.getsockname())
        try:
            uid = _ask_kernel(*ends)
        except OSError:
            # No netlink, or a kernel without sock_diag.
            uid = _search_table(*ends)
        return uid if _is_established(connection) else None
    except OSError:
        return None


def _is_established(connection: socket.socket) -> bool:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


def _ask_kernel(host: str, port: int, our_host: str, our_port: int) -> int | None:
    """Ask by sock_diag(7) for this one socket. Raises OSError."""
    request = struct.pack("=BBBxI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
    request += struct.pack("!HH", port, our_port)
    request += socket.inet_aton(host).ljust(16, b"\0") + socket.inet_aton(our_host).ljust(16, b"\0")
    request += struct.pack("=I", 0) + _ANY_COOKIE
    header = struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(1.0)
        netlink.sendto(header + request, (0, 0))
        answer = netlink.recv(65_536)
    _, kind, *_ = struct.unpack_from("=IHHII", answer)
    if kind != _SOCK_DIAG_BY_FAMILY or len(answer) < 88:
        raise OSError(errno.ENOENT, "no such socket")
    state = answer[17]
    uid, inode = struct.unpack_from("=II", answer, 80)
    # A closed socket has no inode, and a uid of 0 that means nothing.
    return int(uid) if inode and state == _ESTABLISHED else None


def _search_table(host: str, port: int, our_host: str, our_port: int) -> int | None:
    """Search the kernel's table of all connections, which takes milliseconds. Raises OSError."""
    remote_end, local_end = (
        f"{struct.unpack('=I', socket.inet_aton(name))[0]:08X}:{number:04X}"
        for name, number in ((host, port), (our_host, our_port))
    )
    with open("/proc/self/net/tcp", encoding="ascii") as table:
        for line in table:
            _, local, remote, state, _, _, _, uid, _, inode, *_ = line.split()
            if (local, remote) == (remote_end, local_end):
                return int(uid) if inode != "0" and state == "01" else None
    return None
