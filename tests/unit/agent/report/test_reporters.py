"""The contract of a reporter, run over all of REPORTERS, and the reporters that stay on the node."""

import gc
import os
import socket
import subprocess
import sys
import weakref

import msgspec
import pytest
import structlog
from played_server import ChosenRandom

from cpumond.agent.config import Report
from cpumond.agent.report import REPORTERS, Reporter
from cpumond.agent.report.http import describe_status, heartbeat_url
from cpumond.agent.report.log import LogReporter
from cpumond.agent.report.token import read_token
from cpumond.core.answers import ReporterStats
from cpumond.core.errors import AccessError, ConfigError
from cpumond.core.route import FIRST_RETRY_S, backoff_s
from cpumond.core.wire import Heartbeat, JobReport


class TracedHeartbeat(Heartbeat, frozen=True, weakref=True):
    """A heartbeat that can be seen to go away."""


def make_heartbeat(sequence: int, jobs: tuple[JobReport, ...] = ()) -> TracedHeartbeat:
    return TracedHeartbeat("node-1", "run-1", sequence, sent_at=0.0, cpu_capacity=8.0, jobs=list(jobs))


@pytest.fixture
def silent_port():
    """A port whose server takes connections into its queue and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture(params=sorted(REPORTERS))
def reporter(request, silent_port):
    report = Report(kind=request.param, url=f"http://127.0.0.1:{silent_port}", timeout_s=0.2, retry_max_s=3600.0)
    reporter = REPORTERS[request.param](report)
    with structlog.testing.capture_logs():
        yield reporter
        reporter.close(10.0)


def test_every_kind_of_the_configuration_has_a_reporter():
    field = next(field for field in msgspec.inspect.type_info(Report).fields if field.name == "kind")
    assert isinstance(field.type, msgspec.inspect.LiteralType)
    assert set(field.type.values) == set(REPORTERS)


def test_submitted_heartbeats_do_not_pile_up(reporter: Reporter):
    traces = []
    for sequence in range(500):
        heartbeat = make_heartbeat(sequence)
        traces.append(weakref.ref(heartbeat))
        reporter.submit(heartbeat)
    del heartbeat
    gc.collect()
    alive = sum(trace() is not None for trace in traces)
    # One may be on its way and one wait.
    assert alive <= 2


def test_close_accounts_for_every_heartbeat_and_drops_later_ones(reporter: Reporter):
    for sequence in range(10):
        reporter.submit(make_heartbeat(sequence))
    reporter.close(10.0)
    stats = reporter.stats()
    reporter.submit(make_heartbeat(10))
    reporter.close(0.0)
    if stats != ReporterStats():
        assert stats.sent_total + stats.dropped_total == 10
        assert reporter.stats().sent_total + reporter.stats().dropped_total == 11


def test_the_node_local_reporters_do_not_load_the_http_client():
    code = (
        "import sys\n"
        "from cpumond.agent.config import Report\n"
        "from cpumond.agent.report import REPORTERS\n"
        "REPORTERS['none'](Report()), REPORTERS['log'](Report())\n"
        "sys.exit('httpx2' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_log_reporter_writes_one_line_with_the_sums_in_cores():
    jobs = (
        JobReport("job-1", "op", cpu_limit=4.0, current_cpu_limit=1.5, smoothed_cpu_usage=1.2),
        JobReport("job-2", "op", cpu_limit=2.0, current_cpu_limit=2.0),
    )
    reporter = LogReporter()
    with structlog.testing.capture_logs() as lines:
        reporter.submit(make_heartbeat(7, jobs))
    assert lines == [
        {"event": "heartbeat", "log_level": "info", "node_id": "node-1", "sequence": 7, "jobs": 2, "ordered_cores": 6.0,
         "limit_cores": 3.5, "used_cores": 1.2}
    ]  # fmt: skip
    assert reporter.stats().sent_total == 1
    assert reporter.stats().last_success_at_s is not None


def test_log_reporter_survives_a_log_that_cannot_be_written(monkeypatch):
    class BrokenLog:
        def info(self, event: str, **fields: object) -> None:
            raise OSError("no space left")

    monkeypatch.setattr("cpumond.agent.report.log._log", BrokenLog())
    reporter = LogReporter()
    reporter.submit(make_heartbeat(1))
    assert reporter.stats() == ReporterStats(failed_total=1, last_error="the log cannot be written: no space left")


@pytest.mark.parametrize(("url", "expected"), [
    ("http://scheduler:9758", "http://scheduler:9758/v1/heartbeat"),
    ("http://scheduler:9758/", "http://scheduler:9758/v1/heartbeat"),
    ("https://scheduler", "https://scheduler/v1/heartbeat"),
    ("http://scheduler:9758/api/nodes?zone=a", "http://scheduler:9758/api/nodes?zone=a"),
    ("http://scheduler:9758/api/nodes/", "http://scheduler:9758/api/nodes/"),
    ("http://[::1]:9758", "http://[::1]:9758/v1/heartbeat"),
])  # fmt: skip
def test_heartbeat_url(url: str, expected: str):
    assert str(heartbeat_url(url)) == expected


def test_heartbeat_url_that_is_none_is_a_config_error():
    with pytest.raises(ConfigError, match=r"report\.url: is not an address: Invalid port: 'abc'"):
        heartbeat_url("http://scheduler:abc")


def test_backoff_doubles_from_the_first_bound_to_the_cap():
    waits = [backoff_s(failures, 30.0, ChosenRandom(1.0)) for failures in (0, 1, 2, 5, 6, 10_000)]
    assert waits == [0.0, FIRST_RETRY_S, 2 * FIRST_RETRY_S, 16 * FIRST_RETRY_S, 30.0, 30.0]
    assert backoff_s(3, 30.0, ChosenRandom(0.0)) == 0.0


def test_describe_status_says_what_to_do():
    assert describe_status(401) == "answered 401; check report.token_file"
    assert describe_status(308) == "answered 308; redirects are not followed, set report.url to the final address"
    assert describe_status(503) == "answered 503"


NO_HEADER = [b"", b"\n", b"two words", b"two\nlines", "schlüssel".encode(), b"a" * 5000]


@pytest.mark.parametrize(("content", "mode", "words"), [
    *((b"s3cret\n", mode, "others than its owner have rights to it.*chmod 600 ") for mode in (0o644, 0o640, 0o602)),
    *((content, 0o600, "token file") for content in NO_HEADER),
])  # fmt: skip
def test_read_token_refuses_without_showing_it(tmp_path, content: bytes, mode: int, words: str):
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=words) as caught:
        read_token(str(path))
    told = str(caught.value).replace(str(path), "")
    assert not any(part in told for part in ("s3cret", "two", "aaaa"))


def test_read_token_takes_the_copy_of_systemd_with_an_access_list(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text("  s3cret \n")
    path.chmod(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert read_token(str(path)) == "s3cret"


def test_read_token_tells_missing_rights_apart(tmp_path):
    path = tmp_path / "token"
    path.write_text("s3cret")
    path.chmod(0)
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)  # root reads every file
    try:
        with pytest.raises(AccessError, match="make it readable"):
            read_token(str(path))
    finally:
        os.seteuid(own)
