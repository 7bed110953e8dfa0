"""Ports for servers of tests: none that somebody else is given, and kept while their server is away."""

import socket
from pathlib import Path

import pytest

from cpumond.cluster.ports import held, pick_port


def test_a_port_is_none_that_the_kernel_gives_out() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split())
    if first <= 20_000:
        pytest.skip("the kernel gives out nearly all ports here")
    assert not [port for port in (pick_port() for _ in range(20)) if first <= port <= last]


def test_a_port_that_is_held_is_taken_by_its_server_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        with held(f"{host}:{port}"):
            pass  # it is taken already
    with held(f"{host}:{port}", "127.0.0.1:0"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port))
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind((host, port))
        with socket.create_server((host, port)), socket.create_connection((host, port)):
            pass
