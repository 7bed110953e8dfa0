"""Who is at the other end of a connection over loopback: the kernel's word, and nothing when there is none."""

import asyncio
import contextlib
import grp
import os
import pwd
import socket
import struct
from collections.abc import Iterator

import pytest

from cpumond.scheduler.program import peer
from cpumond.scheduler.program.peer import OVERFLOW_UID, Accounts, find_peer_uid
from cpumond.scheduler.rights.users import User

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


@needs_root
def test_one_that_leaves_during_the_look_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(4711) as (client, connection):

        def look(*_: object) -> int:
            client.close()
            return 0

        monkeypatch.setattr(peer, "_ask_kernel", look)
        assert find_peer_uid(connection) is None


@needs_root
def test_a_unix_socket_knows_its_peer_as_it_was_when_it_connected() -> None:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        path = f"\0cpumond-test-{os.getpid()}"
        server.bind(path)
        server.listen()
        os.seteuid(4711)
        try:
            client.connect(path)
        finally:
            os.seteuid(0)
        with server.accept()[0] as connection:
            assert find_peer_uid(connection) == 4711


def test_other_sockets_have_no_such_peer() -> None:
    with socket.socket() as alone:
        assert find_peer_uid(alone) is None


def find(uid: int | None) -> User | str:
    return asyncio.run(Accounts().find(uid))


def test_root_and_the_own_account_may_do_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer.os, "geteuid", lambda: 4711)
    assert find(0) == User("root", admin=True, origin="uid 0")
    assert find(4711) == User("4711", admin=True, origin="uid 4711")


def test_an_account_that_many_share_is_not_the_own_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer.os, "geteuid", lambda: OVERFLOW_UID)
    assert "which many programs share" in str(find(OVERFLOW_UID))


def test_others_are_in_the_groups_of_their_account_and_need_an_entry() -> None:
    account = next(each for each in pwd.getpwall() if each.pw_uid not in (0, os.geteuid(), OVERFLOW_UID))
    groups = {grp.getgrgid(gid).gr_name for gid in os.getgrouplist(account.pw_name, account.pw_gid)}
    assert find(account.pw_uid) == User(
        account.pw_name, groups=frozenset(groups - {account.pw_name}), needs_entry=True, origin=f"uid {account.pw_uid}"
    )


def test_a_uid_without_an_account_is_no_user() -> None:
    assert find(4712) == "this is uid 4712, which has no account"
    assert find(None) == "this is an unknown account"


async def test_what_the_account_database_said_is_believed_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def look_up(uid: int) -> User | str:
        asked.append(uid)
        return User("alice")

    monkeypatch.setattr(peer, "_look_up", look_up)

    accounts = Accounts()
    assert [await accounts.find(uid) for uid in (4712, 4712, 4713)] == [User("alice")] * 3
    assert asked == [4712, 4713]


def test_a_database_that_fails_is_told_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(uid: int) -> User | str:
        raise OSError("not there")

    monkeypatch.setattr(peer, "_look_up", fail)
    assert find(4712) == "the account database does not answer for uid 4712"
