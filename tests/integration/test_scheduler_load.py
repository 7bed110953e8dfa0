"""What one client can cost the others: memory of the running scheduler, and how long an honest node waits meanwhile."""

import contextlib
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest
from scheduler_process import PlayedNode, SchedulerProcess
from waiting import wait_until

from cpumond.scheduler.program.connection import MAX_PIPELINED

MIB = 2**20
MAX_GROWTH = 200 * MIB
MAX_WAIT_S = 3.0
"""Of the scheduler's CPU time, from a heartbeat to its answer."""
MAX_WAIT_OF_THOUSANDS_S = 10.0
HONEST_NODE = Path(__file__).with_name("honest_node.py")
ATTACK_S = 1.5


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerProcess]:
    process = SchedulerProcess(tmp_path_factory.mktemp("load"))
    process.write_config(period="1s")
    process.start()
    yield process
    process.close()


@contextlib.contextmanager
def honest(
    scheduler: SchedulerProcess, name: str, pause_s: float = 0.02, max_wait_s: float = MAX_WAIT_S
) -> Iterator[None]:
    """Beside what is done inside: an honest node is answered, and soon; the scheduler stays small."""
    arguments = [sys.executable, str(HONEST_NODE), scheduler.address, str(scheduler.pid), name, str(pause_s)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "begun\n"
            yield
        finally:
            told, _ = process.communicate(timeout=250)
    found = json.loads(told)
    assert found["count"], found
    assert not found["failures"], found
    assert found["longest_cpu_s"] < max_wait_s, found
    assert found["growth"] < MAX_GROWTH, found


@contextlib.contextmanager
def descriptors(count: int) -> Iterator[None]:
    soft, hard = psutil.Process().rlimit(psutil.RLIMIT_NOFILE)
    if hard < count:
        pytest.skip(f"needs {count} descriptors, has {hard}")
    psutil.Process().rlimit(psutil.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        psutil.Process().rlimit(psutil.RLIMIT_NOFILE, (soft, hard))


def head(method: str, path: str, length: int = 0, more: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{more}\r\n".encode()


def send_for(connections: list[socket.socket], piece: bytes, seconds: float, reads: bool = False) -> int:
    """Send ``piece`` over and over; how many bytes were taken. ``reads``: answers are read, else they pile up."""
    end, sent = time.monotonic() + seconds, 0
    room = select.poll()
    for each in connections:
        each.setblocking(False)
        room.register(each, select.POLLOUT | (select.POLLIN if reads else 0))
    while time.monotonic() < end and connections:
        taken = 0
        for each in list(connections):
            try:
                if reads:
                    with contextlib.suppress(BlockingIOError):
                        each.recv(MIB)
                taken += each.send(piece)
            except BlockingIOError:
                continue
            except OSError:
                room.unregister(each)
                connections.remove(each)
        sent += taken
        if not taken:
            room.poll(100)
    return sent


@pytest.mark.parametrize(
    ("request_bytes", "reads"),
    [
        (head("GET", "/api/v1/openapi.json"), False),
        (head("POST", "/api/v1/trees/default/pools", 3000) + b"x" * 3000, True),
    ],
    ids=["small, unread", "with bodies, read"],
)
def test_pipelined_requests_take_no_memory(scheduler: SchedulerProcess, request_bytes: bytes, reads: bool) -> None:
    """As many as fit are sent in one go, or one after the other, without waiting for answers."""
    for pieces in (50, 1):
        with contextlib.ExitStack() as stack, honest(scheduler, f"pipe-{len(request_bytes)}-{pieces}-{reads}"):
            connections = [stack.enter_context(scheduler.connect()) for _ in range(50)]
            assert send_for(connections, request_bytes * pieces, ATTACK_S / 2, reads)


def test_too_many_pipelined_requests_are_refused_after_those_before(scheduler: SchedulerProcess) -> None:
    with scheduler.connect() as client:
        client.sendall(head("GET", "/ping") * (MAX_PIPELINED + 20))
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := client.recv(65536):
                received += data
    assert received.count(b"HTTP/1.1 200 OK") == MAX_PIPELINED + 1
    assert received.endswith(b"requests were sent before the answer to the first one")


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"X-1: " + b"a" * 8000 + b"\r\n"),
        (head("POST", "/api/v1/operations", MIB), b"a" * 65536),
        (head("POST", "/api/v1/heartbeats", 8 * MIB), b"a" * 65536),
    ],
    ids=["headers", "bodies", "heartbeats"],
)
def test_unfinished_requests_are_bounded_in_all(scheduler: SchedulerProcess, begin: bytes, piece: bytes) -> None:
    with contextlib.ExitStack() as stack, honest(scheduler, f"unfinished-{len(begin)}-{len(piece)}"):
        connections = [stack.enter_context(scheduler.connect()) for _ in range(300)]
        for each in connections:
            each.sendall(begin)
        for _ in range(15):
            send_for(connections, piece, 0.1)
    assert scheduler.get("/healthz")["status"] == "ok"


@pytest.mark.parametrize(
    "whole",
    [
        b"GET /api/v4/get HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 60_000 + b"\r\n\r\n",
        head("POST", "/api/v1/operations", 60_000) + b"a" * 60_000,
    ],
    ids=["heads", "bodies"],
)
def test_whole_requests_are_bounded_in_all(scheduler: SchedulerProcess, whole: bytes) -> None:
    """The honest node's turn is one of 3000, many more than begin at a time. It holds too little to be ended."""
    with descriptors(4000), contextlib.ExitStack() as stack:
        stack.enter_context(honest(scheduler, f"whole-{len(whole)}", 0.5, MAX_WAIT_OF_THOUSANDS_S))
        connections = [stack.enter_context(scheduler.connect()) for _ in range(3000)]
        assert send_for(connections, whole, 2 * ATTACK_S, reads=True)


def test_a_heartbeat_of_thousands_of_jobs_is_taken(scheduler: SchedulerProcess) -> None:
    node = PlayedNode(scheduler, "large")
    node.register()
    job = {"operation_id": "x" * 40, "cgroup": "y" * 100, "cpu_limit": 1.0, "current_cpu_limit": 1.0, "task": "z" * 200}
    node.jobs = {f"job-{number}": {**job, "job_id": f"job-{number}"} for number in range(5000)}
    assert len(json.dumps(list(node.jobs.values()))) > 2 * MIB
    node.beat()


def test_the_oldest_connections_go_when_there_are_too_many(scheduler: SchedulerProcess) -> None:
    """More half requests than connections are kept: an honest client is answered, its own connection stays."""
    more = honest(scheduler, "many", max_wait_s=MAX_WAIT_OF_THOUSANDS_S)
    with descriptors(12_000), contextlib.ExitStack() as stack, more:
        for _ in range(10_300):
            stack.enter_context(scheduler.connect()).sendall(b"GET /api/v1/me HTTP/1.1\r\nHost: localhost\r\nX: ")
        wait_until(lambda: psutil.Process(scheduler.pid).num_fds() < 10_100, "the oldest are ended")
        answer = httpx2.get(f"{scheduler.url}/healthz", trust_env=False, verify=False, timeout=250)
        assert answer.status_code == 200
