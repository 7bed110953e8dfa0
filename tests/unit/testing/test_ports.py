"""Ports for servers of tests: none that somebody else is given, and kept while their server is away."""

from __future__ import annotations

import socket

import pytest

from cpumond.testing.ports import find_range, held, pick_port


def test_a_port_is_none_that_the_kernel_gives_out() -> None:
    first, last = find_range()
    with socket.create_server(("127.0.0.1", 0)) as given:
        if first <= given.getsockname()[1] <= last:
            pytest.skip("the kernel gives out nearly all ports here")
    assert all(first <= pick_port() <= last for _ in range(20))


def test_a_port_that_is_held_is_taken_by_its_server_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
    with held(f"{host}:{port}", "127.0.0.1:0"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port))
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind((host, port))
        with socket.create_server((host, port)), socket.create_connection((host, port)):
            pass


def test_what_is_taken_already_is_not_held() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, held(f"127.0.0.1:{server.getsockname()[1]}"):
        pass
