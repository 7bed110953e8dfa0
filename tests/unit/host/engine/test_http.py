"""Questions over HTTP to a server that answers byte by byte what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import httpx2
import pytest

from cpumond.host.engine import http
from cpumond.host.engine.http import StatusError, get_json
from cpumond.host.engine.model import EngineError


def ask(answer: bytes, hangs: bool = False) -> object:
    """What ``get_json`` makes of an answer; the server then ends the connection, or ``hangs`` until the client does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                while not connection.recv(65536).endswith(b"\r\n\r\n"):
                    pass
                connection.sendall(answer)
                while hangs and connection.recv(65536):
                    pass

        async def run() -> object:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx2.AsyncClient(base_url=url, verify=False, trust_env=False) as client:
                return await get_json(client, "docker: X", "/list", list[int])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            return asyncio.run(run())
        finally:
            thread.join()


def reply(body: bytes, status: str = "200 OK", head: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


def test_an_answer_of_the_expected_shape():
    assert ask(reply(b"[1, 2]")) == [1, 2]


@pytest.mark.parametrize(
    ("body", "head"),
    [
        (b"", ""),
        (b"{}", ""),
        (b'["a"]', ""),
        (b"\xff", ""),
        (b"[" * 100_000, ""),
        (b"\x1f\x8b", "Content-Encoding: gzip\r\n"),
    ],
    ids=["nothing", "an object", "of texts", "no text", "too deep", "packed"],
)
def test_an_answer_of_another_shape_is_not_understood(body, head):
    with pytest.raises(EngineError, match="docker: X: /list is invalid"):
        ask(reply(body, head=head))


@pytest.mark.parametrize("status", ["403 Forbidden", "301 Moved", "204 No Content"])
def test_any_other_status_is_told(status):
    with pytest.raises(StatusError, match=f"docker: X: /list was answered with status {status[:3]}") as caught:
        ask(reply(b"", status, "Location: http://elsewhere/\r\n"))
    assert caught.value.status == int(status[:3])


def test_a_large_answer_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 1 << 20)
    with pytest.raises(EngineError, match="larger than 1 MiB"):
        ask(b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (2 << 20), hangs=True)


def test_an_answer_that_does_not_end_is_given_up(monkeypatch):
    monkeypatch.setattr(http, "ANSWER_TIMEOUT_S", 0.2)
    with pytest.raises(TimeoutError):
        ask(b"HTTP/1.1 200 OK\r\n\r\n[", hangs=True)
