"""The account at the other end of a unix socket, or of a TCP connection over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import grp
import os
import pwd
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from cpumond.scheduler.rights.users import MAX_NAME, User, find_wrong_name

OVERFLOW_UID: Final = 65534
"""Shown instead of each uid that our user namespace does not map; also the uid of "nobody", which programs share."""

_ESTABLISHED: Final = 1
_SOCK_DIAG_BY_FAMILY: Final = 20
_NETLINK_SOCK_DIAG: Final = 4
_NLM_F_REQUEST: Final = 1
_ANY_COOKIE: Final = b"\xff" * 8

LOCAL_USERS: Final = "root and the account of the scheduler"


KNOWN_S: Final = 60.0
"""Time for which a result from the account database is cached."""
LOOK_UP_S: Final = 5.0
MAX_KNOWN: Final = 10_000


class Accounts:
    """Users by uid, from the account database. It is queried in a thread, since a query may take long."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, User | str]] = {}
        self._thread: ThreadPoolExecutor | None = None

    async def find(self, uid: int | None) -> User | str:
        """Return the user with this uid, or a text that explains why there is none. ``LOCAL_USERS`` may do everything.
        Other users are in the groups of their accounts and have the rights that access lists give them."""
        if uid is None:
            return "this is an unknown account"
        if uid == OVERFLOW_UID:
            return f"this is {_name_of(uid)} (uid {uid}), which many programs share"
        known_until, user = self._known.get(uid, (0.0, ""))
        if time.monotonic() < known_until:
            return user
        if uid in (0, os.geteuid()):
            user = User(_name_of(uid), admin=True, origin=f"uid {uid}")
        else:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "accounts")
            try:
                found = asyncio.get_running_loop().run_in_executor(self._thread, _look_up, uid)
                user = await asyncio.wait_for(found, LOOK_UP_S)
            except (TimeoutError, OSError):
                return f"the account database does not answer for uid {uid}"
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[uid] = time.monotonic() + KNOWN_S, user
        return user


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _look_up(uid: int) -> User | str:
    """Return the account and its groups. Raises OSError."""
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        return f"this is uid {uid}, which has no account"
    if find_wrong_name(account.pw_name):
        return f"this is {account.pw_name[:MAX_NAME]!r} (uid {uid})"
    groups = set()
    for gid in os.getgrouplist(account.pw_name, account.pw_gid):
        with contextlib.suppress(KeyError):
            groups.add(grp.getgrgid(gid).gr_name)
    # Most accounts have a group of the same name, which adds nothing to the account's name.
    return User(account.pw_name, groups=frozenset(groups - {account.pw_name}), needs_entry=True, origin=f"uid {uid}")


def find_peer_uid(connection: socket.socket) -> int | None:
    """Return the uid that opened the other end of a unix socket, or of a TCP connection over IPv4 on this host; None if
    it is unknown. A closed end of TCP has no owner. Therefore a uid counts only if the connection is established before
    and after the lookup: otherwise a later socket of a different user could be mistaken for the closed end."""
    try:
        if connection.family == socket.AF_UNIX:
            # This is the uid at the moment of connecting.
            packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("=iII"))
            return int(struct.unpack("=iII", packed)[1])
        if connection.family != socket.AF_INET or not _is_established(connection):
            return None
        ends = (*connection.getpeername(), *connection.getsockname())
        try:
            uid = _ask_kernel(*ends)
        except OSError:
            # There is no netlink, or the kernel lacks sock_diag.
            uid = _search_table(*ends)
        return uid if _is_established(connection) else None
    except OSError:
        return None


def _is_established(connection: socket.socket) -> bool:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


def _ask_kernel(host: str, port: int, our_host: str, our_port: int) -> int | None:
    """Query this one socket with sock_diag(7). Raises OSError."""
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
    # A closed socket has no inode, and its uid of 0 means nothing.
    return int(uid) if inode and state == _ESTABLISHED else None


def _search_table(host: str, port: int, our_host: str, our_port: int) -> int | None:
    """Search the kernel's table of all connections; this takes milliseconds. Raises OSError."""
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
