"""``cpumond stub-scheduler`` as a process, and ``cpumond schema``."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import httpx2
import pytest

from cpumond.cli import run

CPUMOND = [sys.executable, "-m", "cpumond"]


class Stub:
    """A running stub scheduler: its process, its address and a client for it."""

    def __init__(self, process: subprocess.Popen[str], client: httpx2.Client) -> None:
        self.process = process
        self.client = client

    def post(self, message: object, path: str = "/v1/heartbeat") -> httpx2.Response:
        return self.client.post(path, json=message)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(100)


@contextmanager
def running_stub(*options: str, listen: str = "127.0.0.1:0") -> Iterator[Stub]:
    command = [*CPUMOND, "stub-scheduler", "--listen", listen, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on http://"), line
            with httpx2.Client(base_url=line.split()[-1], trust_env=False, verify=False, timeout=250) as client:
                yield Stub(process, client)
        finally:
            if process.poll() is None:
                process.kill()


@pytest.fixture
def start() -> Iterator[Callable[..., Stub]]:
    with ExitStack() as stack:
        yield lambda *options, **named: stack.enter_context(running_stub(*options, **named))


@pytest.fixture(scope="module")
def shared() -> Iterator[Stub]:
    """One stub for the tests that leave nothing behind that another one looks at."""
    with running_stub("--quiet") as stub:
        yield stub


def make_job(job_id: str = "job-1", **changes: object) -> dict[str, object]:
    return {"job_id": job_id, "operation_id": "op-1", "cpu_limit": 4.0, "current_cpu_limit": 1.5, **changes}


def make_message(**changes: object) -> dict[str, object]:
    return {
        "node_id": "node-1",
        "incarnation": "run-1",
        "sequence": 1,
        "sent_at": 1.7e9,
        "cpu_capacity": 8.0,
        "jobs": [make_job()],
        **changes,
    }


def test_a_heartbeat_is_accepted_on_each_path_with_whole_numbers(shared: Stub):
    for path in ("/v1/heartbeat", "/v1/heartbeats", "/"):
        answer = shared.post(make_message(node_id=f"node of {path}", cpu_capacity=8, sequence=2.0), path)
        assert (answer.status_code, answer.json()) == (200, {"accepted": True, "sequence": 2})
    assert shared.client.get("/v1/heartbeat").status_code == 405
    assert shared.client.post("/v1/other", json={}).status_code == 404


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (make_message(sequence=-1), "$.sequence: -1 is less than the minimum of 0"),
        (make_message(jobs=[make_job(), make_job("")]), "$.jobs[1].job_id: '' should be non-empty"),
        (make_message(color="red"), "$: Additional properties are not allowed ('color' was unexpected)"),
        ({}, "$: 'node_id' is a required property"),
    ],
)
def test_a_violation_of_the_schema_is_one_sentence_with_its_place(shared: Stub, message: object, sentence: str):
    answer = shared.post(message)
    assert (answer.status_code, answer.json()) == (422, {"error": sentence})
    long = shared.post({**make_message(), "sequence": "x" * 1_000_000}).json()["error"]
    assert (len(long) < 400, long[:15]) == (True, "$.sequence: 'xx")


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(make_message(sent_at=float("nan"))).encode(),
        json.dumps(make_message()).replace("8.0", "1e999").encode(),
        b"",
        b'{"node_id": "\xff"}',
        b"[" * 200_000,
    ],
    ids=["nan", "too large", "empty", "not utf-8", "nested"],
)
def test_a_body_that_is_no_finite_json_is_refused(shared: Stub, body: bytes):
    answer = shared.client.post("/v1/heartbeat", content=body)
    assert answer.status_code == 422
    assert answer.json()["error"]
    assert shared.client.get("/healthz").status_code == 200


def test_a_body_of_8_mib_is_read_and_no_byte_more(shared: Stub):
    body = json.dumps(make_message(node_id="large")).encode()
    answer = shared.client.post("/v1/heartbeat", content=body + b" " * (8 * 1024 * 1024 - len(body)))
    assert answer.json() == {"accepted": True, "sequence": 1}
    answer = shared.client.post("/v1/heartbeat", content=iter([b" " * 1_048_576] * 8 + [b" "]))
    assert (answer.status_code, answer.json()) == (413, {"error": "the body is larger than 8388608 bytes"})


def test_only_what_is_newer_counts_until_a_new_incarnation_begins(shared: Stub):
    def send(sequence: int, incarnation: str = "run-1") -> dict[str, object]:
        answer = shared.post(make_message(node_id="late", sequence=sequence, incarnation=incarnation))
        assert answer.status_code == 200
        return answer.json()

    def kept() -> list[tuple[str, int]]:
        jobs = shared.client.get("/v1/limits").json()["jobs"]
        return [(job["incarnation"], job["sequence"]) for job in jobs if job["node_id"] == "late"]

    assert send(7)["accepted"] is True
    for sequence in (7, 6, 0):
        reason = f"sequence {sequence} of node 'late' is not newer than 7"
        assert send(sequence) == {"accepted": False, "reason": reason}
    assert kept() == [("run-1", 7)]
    assert send(9) == {"accepted": True, "sequence": 9}
    assert send(0, "run-2") == {"accepted": True, "sequence": 0}
    reason = "incarnation 'run-1' of node 'late' was superseded by another one"
    assert send(10) == {"accepted": False, "reason": reason}
    assert kept() == [("run-2", 0)]


def test_limits_show_the_newest_state_of_all_nodes_in_order(start):
    stub = start("--quiet")
    empty = {"cpu_limit": 0.0, "current_cpu_limit": 0.0, "reclaimed": 0.0}
    assert stub.client.get("/v1/limits").json() == {"nodes": 0, "jobs": [], "totals": empty}
    raised = make_job("b", cpu_limit=1.0, current_cpu_limit=2.0, smoothed_cpu_usage=0.25, mode="pinned")
    stub.post(make_message(node_id="node-2", jobs=[make_job("c"), raised]))
    stub.post(make_message(node_id="node-1", jobs=[make_job("z"), make_job("gone")]))
    stub.post(make_message(node_id="node-1", jobs=[make_job("z")], sequence=2))
    limits = stub.client.get("/v1/limits").json()
    assert limits["nodes"] == 2
    assert [(job["node_id"], job["job_id"]) for job in limits["jobs"]] == [
        ("node-1", "z"),
        ("node-2", "b"),
        ("node-2", "c"),
    ]
    shown = limits["jobs"][1]
    assert shown.pop("received_at") > 1.7e9
    assert shown == raised | {"node_id": "node-2", "incarnation": "run-1", "sequence": 1}
    assert limits["totals"] == {"cpu_limit": 9.0, "current_cpu_limit": 5.0, "reclaimed": 5.0}


def test_the_token_is_asked_for_also_beyond_loopback_but_not_for_healthz(start, tmp_path):
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    file.chmod(0o600)
    stub = start("--token-file", str(file), "--quiet", listen="0.0.0.0:0")
    stub.client.base_url = f"http://127.0.0.1:{stub.client.base_url.port}"
    assert stub.client.get("/healthz").json() == {"status": "ok"}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
        for answer in (
            stub.client.post("/v1/heartbeat", json=make_message(), headers=headers),
            stub.client.get("/v1/limits", headers=headers),
        ):
            assert answer.status_code == 401
            assert answer.json() == {"error": "the bearer token is missing or wrong"}
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    stub.client.headers["Authorization"] = "Bearer s3cret"
    assert stub.post(make_message()).json()["accepted"] is True
    assert stub.client.get("/v1/limits").json()["nodes"] == 1


def test_a_signal_ends_it_with_0_after_one_line_per_accepted_heartbeat(start):
    stub = start()
    stub.post(make_message())
    stub.post(make_message())
    stub.post(make_message(sequence=2, jobs=[], node_id="node\n1"))
    assert stub.stop() == 0
    assert stub.process.stdout.read().splitlines() == [
        "node 'node-1' sequence 1: 1 jobs, 1.5 of 4 requested cores",
        "node 'node\\n1' sequence 2: 0 jobs, 0 of 0 requested cores",
    ]


def test_a_busy_address_is_exit_73(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert run(["stub-scheduler", "--listen", address]) == 73
    sentence = f"cpumond: {address} is already in use; stop the program that listens there, or give another --listen\n"
    assert capsys.readouterr() == ("", sentence)
