"""The load generator of ``tests/bench/real_services.py`` against servers that answer as real ones do."""

from __future__ import annotations

import shutil
import socketserver
import struct
import subprocess
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "bench" / "open_loop.c"
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("open_loop") / "open_loop"
    subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(path), str(SOURCE)], check=True)
    return path


@contextmanager
def serve(answers: dict[bytes, list[bytes]], pause_s: float = 0.0) -> Iterator[int]:
    """Answer each message with its parts, ``pause_s`` before each; no parts: close the connection. The port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while message := self.request.recv(4096):
                for part in answers[message]:
                    threading.Event().wait(pause_s)
                    self.request.sendall(part)
                if not answers[message]:
                    return

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def run(
    program: Path, directory: Path, port: int, protocol: str, messages: list[bytes], due_s: list[float], links: int = 1
) -> list[float]:
    """Seconds of each request, below 0 where it failed."""
    said, due, result = (directory / name for name in ("messages", "due", "result"))
    said.write_bytes(b"".join(struct.pack("=I", len(each)) + each for each in messages))
    due.write_bytes(array("d", due_s).tobytes())
    words = [protocol, str(port), str(links), str(said), str(due), repr(time.monotonic()), str(result)]
    subprocess.run([str(program), *words], check=True, timeout=60)
    found = array("f")
    found.frombytes(result.read_bytes())
    return found.tolist()


def test_waiting_for_a_connection_is_part_of_the_latency(program, tmp_path):
    with serve({b"PING": [b"+PONG\r\n"]}, pause_s=0.2) as port:
        found = run(program, tmp_path, port, "redis", [b"", b"PING"], [0.0] * 3)
    assert [took_s >= wait_s for took_s, wait_s in zip(found, (0.2, 0.4, 0.6), strict=True)] == [True] * 3


HTTP = b"HTTP/1.1 200 OK\r\n"
READY = b"Z" + struct.pack("!I", 5) + b"I"


@pytest.mark.parametrize(
    ("protocol", "parts"),
    [
        ("http", [HTTP, b"content-length: 5\r\n\r\n12", b"345"]),
        ("http", [HTTP + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", b"0\r", b"\n\r\n"]),
        ("redis", [b"*2\r\n$3\r\na\r\n\r\n*1", b"\r\n$-1\r\n"]),
        ("postgresql", [b"D" + struct.pack("!I", 6), b"ZZ", READY]),
    ],
)
def test_an_answer_in_parts_is_waited_for_to_its_end(program, tmp_path, protocol, parts):
    with serve({b"?": parts}, pause_s=0.1) as port:
        took_s = run(program, tmp_path, port, protocol, [b"", b"?"], [0.0, 0.0])
    assert [each >= 0.1 * len(parts) for each in took_s] == [True, True]


@pytest.mark.parametrize(
    ("protocol", "parts"),
    [
        ("http", [b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"]),
        ("redis", [b"*2\r\n:1\r\n-ERR no\r\n"]),
        ("postgresql", [b"E" + struct.pack("!I", 4) + READY]),
        ("http", []),
    ],
)
def test_an_error_and_a_lost_connection_are_failures_and_later_requests_go_on(program, tmp_path, protocol, parts):
    good = {"http": HTTP + b"Content-Length: 0\r\n\r\n", "redis": b":1\r\n", "postgresql": READY}[protocol]
    with serve({b"bad": parts, b"good": [good]}) as port:
        bad, after = run(program, tmp_path, port, protocol, [b"", b"bad", b"good"], [0.0, 0.0])
    assert bad < 0.0 < after
