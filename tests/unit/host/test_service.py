"""Listening sockets on addresses that the host does not have (yet): real sockets, real answers of the kernel."""

import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from structlog.testing import capture_logs

from cpumond.core.errors import CreateError
from cpumond.host import service as process
from cpumond.host.service import open_tcp_sockets

ABSENT, ABSENT_V6 = "192.0.2.1", "2001:db8::1"
"""Both are kept for documentation, so no host has them."""

Place = tuple[int, int, int, str, tuple[object, ...]]


@pytest.fixture
def opened() -> Iterator[Callable[[str], list[socket.socket]]]:
    sockets: list[socket.socket] = []

    def open_them(listen: str) -> list[socket.socket]:
        found = open_tcp_sockets(listen, "api.listen", 5)
        sockets.extend(found)
        return found

    yield open_them
    process.close_sockets(sockets)


def v4(address: str, port: int = 0) -> Place:
    return (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))


def v6(address: str, port: int = 0) -> Place:
    return (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0))


@pytest.mark.parametrize("address", [ABSENT, ABSENT_V6])
def test_a_late_address_is_listened_on_with_warning(address: str, opened: Callable[[str], list[socket.socket]]) -> None:
    with capture_logs() as logged:
        (tcp,) = opened(f"[{address}]:0" if ":" in address else f"{address}:0")
    assert (tcp.getsockname()[0], tcp.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) == (address, 1)
    (record,) = logged
    assert (record["event"], record["log_level"]) == ("address_not_here", "warning")
    said = f"[api] listen: this host does not have the address {address} yet; connections are accepted once it does"
    assert record["error"] == said
    assert record["advice"] == "if that does not happen, compare `ip address` with [api] listen"


STRANGE: Place = (63, socket.SOCK_STREAM, 6, "", ("x", 0))
"""Of a family that the kernel does not have."""


@pytest.mark.parametrize(("places", "listened_on"), [
    ([v6(ABSENT_V6), v4(ABSENT)], [ABSENT_V6, ABSENT]),
    ([STRANGE, v4(ABSENT)], [ABSENT]),
    ([v4(ABSENT), STRANGE], [ABSENT]),
    # localhost on a machine without IPv6 is no reason for a warning.
    ([v6(ABSENT_V6), v4("127.0.0.1")], ["127.0.0.1"]),
])  # fmt: skip
def test_of_the_addresses_of_a_name_those_that_can_be_are_listened_on(
    monkeypatch: pytest.MonkeyPatch,
    opened: Callable[[str], list[socket.socket]],
    places: list[Place],
    listened_on: list[str],
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    with capture_logs() as logged:
        sockets = opened("node-7:0")
    assert [sock.getsockname()[0] for sock in sockets] == listened_on
    assert len({sock.getsockname()[1] for sock in sockets}) == 1, "at one port"
    late = [address for address in listened_on if address != "127.0.0.1"]
    assert [" and ".join(late) in record["error"] for record in logged] == ([True] if late else [])
    assert late or sockets[0].getsockopt(socket.IPPROTO_IP, process.IP_FREEBIND) == 0


@pytest.mark.parametrize("address", [ABSENT, f"[{ABSENT_V6}]"])
def test_where_the_kernel_refuses_it_an_address_is_one_sentence(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(process, "IP_FREEBIND", 9999)
    monkeypatch.setattr(process, "IPV6_FREEBIND", 9999)
    with capture_logs() as logged, pytest.raises(CreateError) as raised:
        open_tcp_sockets(f"{address}:0", "api.listen", 5)
    assert str(raised.value) == (
        f"cannot listen on {address}:0: Cannot assign requested address; set [api] listen to a free address of this "
        "machine"
    )
    assert logged == []


def test_a_port_in_use_stays_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an address that is here, and of one that another socket listens on already."""
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(CreateError, match="Address already in use"):
        open_tcp_sockets(f"127.0.0.1:{other.getsockname()[1]}", "api.listen", 5)
    with capture_logs() as logged:
        (first,) = open_tcp_sockets(f"{ABSENT}:0", "api.listen", 5)
        port = first.getsockname()[1]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [v6(ABSENT_V6, port), v4(ABSENT, port)])
        with first, pytest.raises(CreateError, match="Address already in use"):
            open_tcp_sockets(f"node-7:{port}", "api.listen", 5)
    assert len(logged) == 1
    with socket.socket(socket.AF_INET6) as free:
        free.setsockopt(socket.IPPROTO_IPV6, process.IPV6_FREEBIND, 1)
        free.bind((ABSENT_V6, port))  # the one that could be opened was closed again


FREED = """
import platform, sys
from cpumond.host.service import give_back_large_blocks

def read_kib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

give_back_large_blocks()
rest = read_kib()
# Once a block of this size was freed, glibc takes those that follow from its heap.
del (first := [b"a" * 60_000 for _ in range(3)])[:]
blocks, pins = [], []
for _ in range(1000):
    blocks.append(b"a" * 60_000)
    pins.append(bytes(1000))
most = read_kib()
blocks.clear()
print((most - rest) // 1024, (read_kib() - rest) // 1024)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_large_blocks_go_back_to_the_system():
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, timeout=250, check=True)
    most, left = map(int, done.stdout.split())
    assert most > 50
    assert left < 15
