"""The HTTP reporter against real servers on the loopback."""

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
import structlog
import uvicorn
from played_server import PlayedServer, not_before_close, reply, serve, soon
from waiting import wait_until

from cpumond.agent.config import Report
from cpumond.agent.report.http import make_http_reporter
from cpumond.agent.report.mailbox import Mailbox
from cpumond.cli.agent.receiver import make_stub_app
from cpumond.core.wire import Heartbeat, JobReport


@contextmanager
def scripted(
    *statuses: int, answer: bytes = b"{}", headers: tuple[tuple[str, str], ...] = ()
) -> Iterator[PlayedServer]:
    """Answers with ``statuses`` in turn, then 200."""
    left = list(statuses)
    with serve(lambda _: reply(answer, left.pop(0) if left else 200, *headers)) as server:
        yield server


@contextmanager
def stub_app(listener: socket.socket, token: str | None = None) -> Iterator[None]:
    """The stub scheduler's application, served on ``listener`` by a thread."""
    config = uvicorn.Config(make_stub_app(token), log_config=None, log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started, "the stub application")
        yield
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def reporting(url: str, rng: random.Random | None = None, **options: Any) -> Iterator[Mailbox]:
    options = {"timeout_s": 20.0, "retry_max_s": 30.0, **options}
    reporter = make_http_reporter(Report(kind="http", url=url, **options), rng or soon())
    try:
        yield reporter
    finally:
        reporter.close(20.0)


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    """A socket with a port of its own that refuses connections until something listens on it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield listener


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


def url_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def make_heartbeat(sequence: int, job_id: str = "job-1") -> Heartbeat:
    job = JobReport(job_id, "op-1", cpu_limit=4.0, current_cpu_limit=1.5, smoothed_cpu_usage=1.0)
    return Heartbeat("node-1", "run-1", sequence, sent_at=1.7e9, cpu_capacity=8.0, jobs=[job])


def get_limits(url: str) -> dict[str, Any]:
    return httpx2.get(f"{url}/v1/limits", trust_env=False, verify=False, timeout=250).json()


def has_sent(reporter: Mailbox, count: int) -> None:
    wait_until(lambda: reporter.stats().sent_total >= count, f"{count} heartbeats sent")


def has_failed(reporter: Mailbox, count: int) -> None:
    wait_until(lambda: reporter.stats().failed_total >= count, f"{count} failed attempts")


def test_a_scheduler_that_comes_later_gets_the_newest_state(bound: socket.socket, logs: list[Any]):
    with reporting(url_of(bound)) as reporter:
        reporter.submit(make_heartbeat(1))
        has_failed(reporter, 2)
        assert "Connection refused" in reporter.stats().last_error
        reporter.submit(make_heartbeat(2))
        reporter.submit(make_heartbeat(3))
        with stub_app(bound):
            has_sent(reporter, 1)
            assert get_limits(url_of(bound))["jobs"][0]["sequence"] == 3
        assert reporter.stats().last_error == ""
        assert reporter.stats().dropped_total == 2
    assert [line["event"] for line in logs] == ["report_failed", "report_recovered"]


def test_one_connection_is_kept(logs: list[Any]):
    with scripted() as server, reporting(server.url) as reporter:
        for sequence in range(1, 6):
            reporter.submit(make_heartbeat(sequence))
            has_sent(reporter, sequence)
        assert server.sequences == [1, 2, 3, 4, 5]
        assert len({request.connection for request in server.requests}) == 1
        assert {request.path for request in server.requests} == {"/v1/heartbeat"}
        assert server.requests[0].headers["Content-Type"] == "application/json"
        assert "Authorization" not in server.requests[0].headers
    assert logs == []


def test_a_newer_heartbeat_replaces_the_failed_one_and_keeps_the_wait():
    rng = not_before_close()
    with scripted(500) as server, reporting(server.url, rng) as reporter:
        reporter.submit(make_heartbeat(1))
        wait_until(lambda: rng.bounds, "the wait after the failure")
        for sequence in range(2, 50):
            reporter.submit(make_heartbeat(sequence))
        assert server.sequences == [1]
        reporter.close(20.0)
        assert server.sequences == [1, 49]
        stats = reporter.stats()
        assert (stats.sent_total, stats.failed_total, stats.dropped_total) == (1, 1, 48)
        assert stats.last_error == ""


def test_each_status_is_logged_once_until_a_success(logs: list[Any]):
    with scripted(404, 404, 410, 404) as server, reporting(server.url) as reporter:
        reporter.submit(make_heartbeat(1))
        has_sent(reporter, 1)
    assert [line["event"] for line in logs] == ["report_failed", "report_failed", "report_recovered"]
    assert logs[0]["error"] == f"{server.url}/v1/heartbeat: answered 404; check the path of report.url"


def test_the_token_is_read_anew_and_never_shown(bound: socket.socket, tmp_path, logs: list[Any]):
    file = tmp_path / "token"
    with stub_app(bound, "s3cret-2"), reporting(url_of(bound), token_file=str(file)) as reporter:
        reporter.submit(make_heartbeat(1))
        has_failed(reporter, 1)
        assert reporter.stats().last_error == f"token file {file}: No such file or directory"
        ready = tmp_path / "ready"
        ready.touch(mode=0o600)
        ready.write_text("s3cret-1\n")
        ready.rename(file)
        wait_until(lambda: "answered 401; check report.token_file" in reporter.stats().last_error, "a refusal")
        file.write_text("s3cret-1\nsecond line\n")
        wait_until(lambda: "one line of visible ASCII" in reporter.stats().last_error, "a refusal of the file")
        file.write_text("s3cret-2\n")
        has_sent(reporter, 1)
    assert [line["event"] for line in logs] == [*["report_failed"] * 2, "report_recovered"]
    assert "s3cret" not in repr(logs)


def test_a_password_in_the_address_is_not_shown(bound: socket.socket, logs: list[Any]):
    port = bound.getsockname()[1]
    with reporting(f"http://agent:s3cret@127.0.0.1:{port}/?key=s3cret") as reporter:
        reporter.submit(make_heartbeat(1))
        has_failed(reporter, 1)
        assert reporter.stats().last_error.startswith(f"http://127.0.0.1:{port}/v1/heartbeat: ")
    assert "s3cret" not in repr(logs)


def test_proxies_of_the_environment_are_not_used(bound: socket.socket, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, url_of(bound))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with scripted() as server, reporting(server.url) as reporter:
        reporter.submit(make_heartbeat(1))
        has_sent(reporter, 1)
        assert reporter.stats().failed_total == 0


def test_a_receiver_that_takes_a_report_slowly_is_dropped_at_the_timeout(bound: socket.socket):
    size, taken, given_up, drained = 2**25, 0, threading.Event(), threading.Event()

    def take_slowly() -> None:
        nonlocal taken
        connection, _ = bound.accept()
        with connection:
            while piece := connection.recv(2**16):
                taken += len(piece)
                given_up.wait(0.01)  # always some room, but never much
        drained.set()

    bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    bound.listen()
    thread = threading.Thread(target=take_slowly)
    thread.start()
    try:
        with reporting(url_of(bound), not_before_close(), timeout_s=1.0) as reporter:
            reporter.submit(make_heartbeat(1, job_id="x" * size))
            has_failed(reporter, 1)
            given_up.set()
            assert drained.wait(100.0)
            assert "no response within 1 s" in reporter.stats().last_error
    finally:
        given_up.set()
        thread.join()
    assert taken < size, "not all of it was sent"
