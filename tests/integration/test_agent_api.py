"""The sockets of a running agent: who may do what over which, and that no client disturbs the ticks."""

import contextlib
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest
from agent_process import AgentProcess
from waiting import wait_until

from cpumond.testing import make_v2_host, v2_cgroup


class Host:
    """A fake unified hierarchy with jobs, and the agent's configuration for it."""

    def __init__(self, directory: Path, jobs: int) -> None:
        names = [f"job{number}" for number in range(jobs)]
        files = {"jobs": {**v2_cgroup(), **{name: v2_cgroup(quota="400000 100000") for name in names}}}
        self.config = (
            f'mountinfo = "{make_v2_host(directory, files)}"\nmanaged_roots = ["jobs"]\n'
            '[monitor]\nmode = "reclaim"\ncheck_period = 100\n'
            '[[source]]\nkind = "glob"\npattern = "jobs/job*"\ncpu_limit = 4.0\noperation = "night"\n'
        )


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "host", 10)


@pytest.fixture
def running(agent: AgentProcess, host: Host) -> AgentProcess:
    return agent.start(host.config)


def get(agent: AgentProcess, path: str) -> httpx2.Response:
    return httpx2.get(f"http://127.0.0.1:{agent.port}{path}", trust_env=False, verify=False, timeout=250)


def read_answer(sock: socket.socket) -> bytes:
    sock.settimeout(60.0)
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            answer += data
    return answer


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """One agent for the tests that leave it as it was."""
    directory = tmp_path_factory.mktemp("shared")
    process = AgentProcess(directory)
    yield process.start(Host(directory / "host", 10).config)
    process.close()


def test_a_large_body_is_refused_while_it_is_sent(shared: AgentProcess):
    """A gigabyte is announced; the answer comes long before that is sent."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60.0)
        client.connect(str(shared.socket_path))
        client.sendall(b"POST /v1/registered HTTP/1.1\r\nHost: agent\r\nContent-Length: 1073741824\r\n\r\n")
        sent = 0
        while sent < 2**30 and not select.select([client], [], [], 0.0)[0]:
            sent += client.send(b"x" * 65536)
        assert client.recv(65536).startswith(b"HTTP/1.1 413")
        assert sent < 2**24
    assert shared.get("/v1/registered") == {"jobs": []}


@pytest.mark.parametrize("path", ["/v1/registered", "/nothing"])
def test_a_body_that_is_no_http_is_refused_and_not_logged(path: str, shared: AgentProcess):
    logged = len(shared.log())
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60.0)
        client.connect(str(shared.socket_path))
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: agent\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n".encode())
        assert client.recv(65536).startswith(b"HTTP/1.1 400")
    assert shared.get("/v1/registered") == {"jobs": []}
    said = shared.log()[logged:]
    assert "Traceback" not in said
    assert "LocalProtocolError" not in said


@pytest.mark.parametrize("noise", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"\x00" * 1000, b"A" * 100_000])
def test_noise_on_tcp_is_answered_and_not_logged(noise: bytes, shared: AgentProcess):
    """TLS to a port without it, and port scanners."""
    with socket.create_connection(("127.0.0.1", shared.port)) as client:
        client.sendall(noise)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)
        answer = read_answer(client)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert get(shared, "/healthz").status_code == 200
    assert "Traceback" not in shared.log()
    assert "library_message" not in shared.log()


@pytest.mark.parametrize("half", [b"", b"GET /metrics HTTP/1.1\r\nHost: x\r\nX:"])
def test_the_metrics_port_survives_300_half_requests(half: bytes, shared: AgentProcess):
    """A scraper that came first from another address gets its answer after them all."""
    with contextlib.ExitStack() as stack:
        scraper = stack.enter_context(socket.create_connection(("127.0.0.1", shared.port), 60.0, ("127.0.0.2", 0)))
        for _ in range(300):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", shared.port)))
            client.sendall(half)
        scraper.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert read_answer(scraper).startswith(b"HTTP/1.1 200")
        assert shared.get("/readyz")["status"] == "ok"
        assert shared.process is not None
        wait_until(lambda: psutil.Process(shared.process.pid).num_fds() < 150, "the oldest of them are ended")


def test_a_client_that_does_not_read_stops_nobody(agent: AgentProcess, tmp_path: Path):
    """Its answers are larger than what the kernel buffers for it."""
    host = Host(tmp_path / "many", 400)
    agent.start(host.config)
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", agent.port))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
        assert get(agent, "/metrics").text.count("cpumond_job_info{") == 400
        tick = agent.get("/v1/status")["tick"]
        # On a busy machine the answers to all these may keep the tick from its own for so long that it says so.
        wait_until(lambda: agent.get("/v1/status").get("tick", 0) > tick + 3, "ticks go on")
        # It ends while they still have not read.
        assert agent.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_socket_is_gone_after_the_end(number: signal.Signals, running: AgentProcess):
    """The thread of the API does not take the signals away from the agent."""
    assert running.stop(number) == 0
    assert not running.socket_path.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", running.port))
    assert running.events("stopped") != []


def test_an_idle_api_does_not_run(running: AgentProcess):
    """The ticks go on for a second; the thread of the API is not woken once (a server that polls would be)."""
    assert running.process is not None
    tasks = Path(f"/proc/{running.process.pid}/task")

    def switches_of(tid: int) -> int:
        lines = (tasks / str(tid) / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

    main = running.process.pid
    (api,) = {int(path.name) for path in tasks.iterdir()} - {main}

    def rests() -> bool:
        """On a busy machine the last answer may not be over when the first ticks are."""
        before, ticks = switches_of(api), switches_of(main)
        wait_until(lambda: switches_of(main) >= ticks + 10, "ten ticks")
        return switches_of(api) == before

    wait_until(rests, "ten ticks in which the other thread is not woken")
