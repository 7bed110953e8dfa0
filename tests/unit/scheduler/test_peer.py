"""Who is at the other end of a connection over loopback: the kernel's word, and nothing when there is none."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

import pytest

from cpumond.scheduler import peer
from cpumond.scheduler.peer import OVERFLOW_UID, find_local_user, find_peer_uid
from cpumond.scheduler.tokens import User

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")


@contextlib.contextmanager
def connected(uid: int | None = None) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client of an account, and the connection that the server has of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = os.geteuid()
        if uid is not None:
            os.seteuid(uid)
        try:
            # Not create_connection: what Python imports for it, and may not read now, is missing ever after.
            client = socket.socket()
            client.connect(server.getsockname())
        finally:
            os.seteuid(own)
        with client, server.accept()[0] as connection:
            yield client, connection


@pytest.fixture(params=["netlink", "table"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two ways on its own."""

    def refuse(*_: object) -> None:
        raise OSError("not this way")

    monkeypatch.setattr(peer, "_search_table" if request.param == "netlink" else "_ask_kernel", refuse)


@pytest.mark.usefixtures("way")
def test_who_connected_is_known() -> None:
    with connected() as (_, connection):
        assert find_peer_uid(connection) == os.geteuid()


@needs_root
@pytest.mark.usefixtures("way")
def test_another_account_is_not_taken_for_root() -> None:
    with connected(4711) as (_, connection):
        assert find_peer_uid(connection) == 4711
        assert find_local_user(connection) == "this is 4711 (uid 4711)"


@needs_root
@pytest.mark.usefixtures("way")
def test_one_that_left_is_nobody() -> None:
    """The kernel shows a socket without an owner as root's."""
    for leave in (
        lambda client: client.close(),
        lambda client: client.shutdown(socket.SHUT_WR),
        lambda client: (
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)) or client.close()
        ),
    ):
        with connected(4711) as (client, connection):
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            leave(client)
            assert find_peer_uid(connection) is None
            assert find_local_user(connection) == "it cannot be told who this is"


@needs_root
def test_one_that_leaves_during_the_look_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(4711) as (client, connection):

        def look(*_: object) -> int:
            client.close()
            return 0

        monkeypatch.setattr(peer, "_ask_kernel", look)
        assert find_peer_uid(connection) is None


def test_root_and_the_own_account_may_do_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected() as (_, connection):
        for uid, name in ((0, "root"), (4711, "4711")):
            monkeypatch.setattr(peer, "_ask_kernel", lambda *_, found=uid: found)
            monkeypatch.setattr(peer.os, "geteuid", lambda: 4711)
            assert find_local_user(connection) == User(name, admin=True)


def test_an_account_that_many_share_is_not_the_own_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected() as (_, connection):
        monkeypatch.setattr(peer, "_ask_kernel", lambda *_: OVERFLOW_UID)
        monkeypatch.setattr(peer.os, "geteuid", lambda: OVERFLOW_UID)
        assert isinstance(find_local_user(connection), str)


def test_other_sockets_have_no_such_peer() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert find_peer_uid(one) is None
    with socket.socket() as alone:
        assert find_peer_uid(alone) is None
    assert find_local_user(None) == "it cannot be told who this is"
