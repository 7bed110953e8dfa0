"""The agent's sockets: rights, addresses, and what is left when one cannot be had."""

import contextlib
import grp
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpumond.agent.config import AgentConfig, Control, Metrics, Web
from cpumond.agent.listen import (
    format_address,
    open_control_socket,
    open_metrics_sockets,
    open_sockets,
    open_web_sockets,
)
from cpumond.core.errors import AccessError, ConfigError, CreateError
from cpumond.core.settings import is_loopback, parse_listen

ABSENT_GROUP = "cpumond-no-such-group"


@pytest.fixture
def opened() -> Iterator[Callable[..., list[socket.socket]]]:
    with contextlib.ExitStack() as stack:

        def keep(*sockets: socket.socket) -> list[socket.socket]:
            return [stack.enter_context(sock) for sock in sockets]

        yield keep


def make_config(directory: Path, listen: str = "", group: str = "", web: str = "") -> AgentConfig:
    return AgentConfig(
        runtime_dir=str(directory), metrics=Metrics(listen=listen), control=Control(group=group), web=Web(listen=web)
    )


def connect(address: tuple[object, ...], family: int = socket.AF_INET) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(60.0)
        client.connect(address)


def test_the_control_socket_is_for_owner_and_group_only(tmp_path: Path, opened: Callable[..., list[socket.socket]]):
    before = os.umask(0o027)
    try:
        opened(open_control_socket(make_config(tmp_path)))
        assert os.umask(0o027) == 0o027, "the umask does not matter and stays"
    finally:
        os.umask(before)
    status = os.stat(tmp_path / "control.sock")
    assert stat.S_ISSOCK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o660
    assert (status.st_uid, status.st_gid) == (os.geteuid(), os.getegid())


def test_the_group_of_the_configuration_gets_the_socket(tmp_path: Path, opened: Callable[..., list[socket.socket]]):
    mine = {*os.getgroups(), os.getegid()}
    choice = [entry for entry in grp.getgrall() if os.geteuid() == 0 or entry.gr_gid in mine]
    group = next((entry for entry in choice if entry.gr_gid != os.getegid()), choice[0])
    opened(open_control_socket(make_config(tmp_path, group=group.gr_name)))
    status = os.stat(tmp_path / "control.sock")
    assert (status.st_gid, stat.S_IMODE(status.st_mode)) == (group.gr_gid, 0o660)


def test_an_unknown_group_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=f"control.group: there is no group '{ABSENT_GROUP}'"):
        open_control_socket(make_config(tmp_path, group=ABSENT_GROUP))
    assert os.listdir(tmp_path) == []


def test_a_group_that_may_not_be_given_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    group = grp.getgrgid(os.getegid()).gr_name
    with pytest.raises(AccessError, match=f"control.group: .* may not give .*control.sock to the group '{group}'"):
        open_control_socket(make_config(tmp_path, group=group))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("folder", "words"), [("d" * 60 + "/" + "e" * 60, ".*too long"), ("absent", "No such file or directory")]
)
def test_a_socket_that_cannot_be_made_is_one_sentence(tmp_path: Path, folder: str, words: str):
    if folder != "absent":
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(CreateError, match=rf"cannot create the socket .*control.sock: {words}; fix runtime_dir"):
        open_control_socket(make_config(tmp_path / folder))


def test_all_addresses_at_once(opened: Callable[..., list[socket.socket]]):
    """[::] takes IPv4 too."""
    (tcp,) = opened(*open_metrics_sockets("[::]:0"))
    connect(("127.0.0.1", tcp.getsockname()[1]))
    connect(("::1", tcp.getsockname()[1]), socket.AF_INET6)


def test_a_name_nobody_knows_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    def answer(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    with pytest.raises(CreateError, match=r"^cannot listen on node-7:9756: 'node-7': Name or service not known; set "):
        open_metrics_sockets("node-7:9756")
    monkeypatch.undo()
    with pytest.raises(CreateError, match=r"^cannot listen on x{70}:1: 'x{70}': not a host name; set "):
        open_metrics_sockets("x" * 70 + ":1")


def test_both_sockets_the_unix_one_first(tmp_path: Path, opened: Callable[..., list[socket.socket]]):
    bound = open_sockets(make_config(tmp_path, "127.0.0.1:0"))
    sockets = opened(bound.control, *bound.metrics, *bound.web)
    assert [sock.family for sock in sockets] == [socket.AF_UNIX, socket.AF_INET]
    assert all(not os.get_inheritable(sock.fileno()) for sock in sockets)
    assert format_address(bound.web) is None
    bound.close()
    assert all(sock.fileno() == -1 for sock in sockets)


@pytest.mark.parametrize(("metrics", "web"), [(True, False), (False, True), (True, True)])
def test_a_busy_address_leaves_nothing_behind(tmp_path: Path, metrics: bool, web: bool):
    """That of the metrics, that of the page, and the one that both are given, of which the page comes second."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        config = make_config(tmp_path, listen if metrics else "127.0.0.1:0", web=listen if web else "")
        if metrics and web:
            other.close()
        where = r"\[web\]" if web else r"\[metrics\]"
        with pytest.raises(CreateError, match=f"cannot listen on {listen}: Address already in use; set {where} listen"):
            open_sockets(config)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
def test_the_page_has_a_socket_and_says_where(tmp_path: Path, listen: str, opened: Callable[..., list[socket.socket]]):
    bound = open_sockets(make_config(tmp_path, "127.0.0.1:0", web=listen))
    opened(bound.control, *bound.metrics, *bound.web)
    host, port = parse_listen(format_address(bound.web), "x")
    assert port not in (0, bound.metrics[0].getsockname()[1])
    with socket.create_connection((host, port), 60.0):
        pass
    assert is_loopback(host)
    assert not is_loopback("")


def test_a_loopback_name_that_leads_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch):
    found = [(socket.AF_INET, 1, 6, "", ("0.0.0.0", 0))]  # noqa: S104 - refused
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    said = r"web.listen: 'localhost:0' resolves to 0\.0\.0\.0, which is not a loopback address; use"
    with pytest.raises(ConfigError, match=said):
        open_web_sockets("localhost:0")
