"""Who may do what: tokens of users and of nodes, takeovers of nodes, and the address that needs no tokens."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from scheduler_process import PlayedNode, SchedulerProcess
from waiting import wait_until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: users and network namespaces")


def start_with_tokens(scheduler: SchedulerProcess, *roles: str, text: str = "") -> None:
    """One token for each role, which is its text, of a user of that name."""
    path = scheduler.directory / "tokens"
    path.touch(mode=0o600)
    path.write_text("".join(f"me:{hashlib.sha256(role.encode()).hexdigest()}:{role}\n" for role in roles))
    scheduler.write_config(text, api=f'tokens_file = "{path}"')
    scheduler.start()


def register(scheduler: SchedulerProcess, node_id: str, incarnation: str, **more: Any) -> tuple[int, str]:
    body = {"node_id": node_id, "incarnation": incarnation, "resources": {"cpu": 4.0}, **more}
    answer = scheduler.request("POST", "nodes", body)
    return answer.status_code, answer.text


def beat(scheduler: SchedulerProcess, node_id: str, incarnation: str, sequence: int) -> tuple[int, str]:
    body = {
        "node_id": node_id, "incarnation": incarnation, "sequence": sequence, "sent_at": 0.0, "cpu_capacity": 4.0,
        "jobs": [],
    }  # fmt: skip
    answer = scheduler.request("POST", "heartbeats", body)
    return answer.status_code, answer.text


def test_a_pattern_says_which_nodes_a_token_is_for(scheduler: SchedulerProcess) -> None:
    """Which roles may play nodes at all is in the table of ``test_access_table.py``."""
    start_with_tokens(scheduler, "node:rack1-*", "node:victim")
    scheduler.use_token("node:victim")
    assert register(scheduler, "victim", "a")[0] == 200
    scheduler.use_token("node:rack1-*")
    assert register(scheduler, "rack1-7", "b")[0] == 200
    assert beat(scheduler, "rack1-7", "b", 1)[0] == 200
    asked = {"node_id": "victim", "request_id": "1"}
    log, reply = (scheduler.request("POST", path, asked) for path in ("logs", "replies"))
    for status, text in (
        register(scheduler, "victim", "a"),
        beat(scheduler, "victim", "a", 1),
        (log.status_code, log.text),
        (reply.status_code, reply.text),
    ):
        assert status == 403
        assert "is for nodes that match 'rack1-*', and this is 'victim'" in text


RUN = "0123456789abcdef-the-rest-is-a-secret"


def test_no_other_agent_takes_over_a_node_that_is_alive(scheduler: SchedulerProcess) -> None:
    start_with_tokens(scheduler, "node", "node:*", "user")
    scheduler.use_token("node")
    assert register(scheduler, "n1", RUN, key="k1")[0] == 200
    for more in ({}, {"key": ""}, {"key": "k2"}):
        for incarnation in (RUN, "other"):
            scheduler.use_token("node:*")
            status, text = register(scheduler, "n1", incarnation, **more)
            assert status == 409
            assert "node n1 is alive, with another agent" in text
            assert "the-rest" not in text
    status, text = beat(scheduler, "n1", "other", 1)
    assert status == 409
    assert "the-rest" not in text
    assert beat(scheduler, "n1", RUN, 2)[0] == 200
    scheduler.use_token("user")
    assert "the-rest" not in scheduler.request("GET", "nodes/n1").text
    assert "the-rest" not in scheduler.log()
    scheduler.kill()
    scheduler.write_config('node_heartbeat_timeout = "1s"', api=f'tokens_file = "{scheduler.directory}/tokens"')
    scheduler.start()
    wait_until(lambda: not scheduler.get("nodes/n1")["is_online"], "the node is missed")
    scheduler.use_token("node:*")
    assert register(scheduler, "n1", "other")[0] == 200


def test_a_key_or_a_token_for_one_node_lets_its_next_run_in_at_once(scheduler: SchedulerProcess) -> None:
    start_with_tokens(scheduler, "node", "node:n2")
    scheduler.use_token("node")
    assert register(scheduler, "n1", "a", key="k1")[0] == 200
    assert register(scheduler, "n1", "b", key="k1")[0] == 200
    assert register(scheduler, "n2", "a")[0] == 200
    assert register(scheduler, "n2", "a", tags=["x"])[0] == 200, "the same run needs no key"
    assert register(scheduler, "n2", "b", key="k1")[0] == 409
    scheduler.use_token("node:n2")
    assert register(scheduler, "n2", "b")[0] == 200
    scheduler.use_token("node")
    scheduler.kill()
    scheduler.start()
    assert register(scheduler, "n1", "c", key="k2")[0] == 409
    assert register(scheduler, "n1", "c", key="k1")[0] == 200, "the key is known over a restart of the scheduler"
    assert "was replaced by the later run" in register(scheduler, "n1", "b", key="k1")[1]
    assert b"k1" not in (scheduler.state_dir / "scheduler.db").read_bytes()


ASK = """
import encodings.idna, http.client, json, os, socket, sys
address, requests = json.load(sys.stdin)
answers = []
for uid, method, path, headers, body in requests:
    connection = http.client.HTTPConnection("127.0.0.1", 9757)
    os.seteuid(uid)
    connection.sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    connection.sock.connect(address if isinstance(address, str) else tuple(address))
    os.seteuid(0)  # Python may be where only root gets
    connection.request(method, path, json.dumps(body) if method == "POST" else None, headers)
    answer = connection.getresponse()
    answers.append([answer.status, answer.read().decode()])
    connection.close()
json.dump(answers, sys.stdout)
"""
Request = tuple[int, str, str, dict[str, str], object]


def ask(address: object, *requests: Request, prefix: Sequence[str] = ()) -> list[tuple[int, str]]:
    """Requests of accounts (uid, method, path, headers, body) at a socket, over a connection each."""
    run = [*prefix, sys.executable, "-I", "-c", ASK]
    given = json.dumps([address, requests])
    done = subprocess.run(run, input=given, capture_output=True, text=True, timeout=250, check=True)
    return [(status, text) for status, text in json.loads(done.stdout)]


class DefaultScheduler(SchedulerProcess):
    """One at the default address, in a network of its own, as an account."""

    def __init__(self, directory: Path, pid: int, uid: int) -> None:
        super().__init__(directory)
        self.prefix = ["nsenter", "-t", str(pid), "-n"]
        self.uid = uid
        self.config_path.write_text(f'state_dir = "{self.state_dir}"\n[log]\nformat = "json"\n')

    def arguments(self, *more: str) -> list[str]:
        # Reading files is all that the capability is good for.
        caps = "--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"
        become = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", *caps] if self.uid else []
        return [*self.prefix, *become, *super().arguments(*more)]

    def ask(self, *requests: tuple[int, str, str, dict[str, str]]) -> list[tuple[int, str]]:
        return ask(("127.0.0.1", 9757), *((*each, {}) for each in requests), prefix=self.prefix)


@pytest.fixture
def network() -> Iterator[int]:
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep 1000"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        up = process.stdout.readline() == b"up\n"
        try:
            if not up:
                pytest.skip("no network namespaces here")
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every account gets through to."""
    path = Path(tempfile.mkdtemp(prefix="cpumond-access-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@needs_root
def test_without_an_address_only_root_and_the_agents_account_are_answered(place: Path, network: int) -> None:
    own, other = 4711, 4712
    (place / "state").mkdir()
    os.chown(place / "state", own, own)
    scheduler = DefaultScheduler(place, network, own)
    scheduler.start()
    try:
        places = ("/api/v1/trees", "/api/v4/get?path=//sys/pools", "/api/v1/me")
        answers = scheduler.ask(*((uid, "GET", path, {}) for uid in (0, own) for path in places))
        assert [status for status, _ in answers] == [200] * 6
        assert [json.loads(answers[number][1])["user"] for number in (2, 5)] == ["root", str(own)]
        refused = [
            (other, method, path, headers)
            for method, path in (
                ("GET", "/api/v1/trees"), ("GET", "/api/v1/me"), ("POST", "/api/v1/operations"),
                ("POST", "/api/v1/nodes"), ("POST", "/api/v1/heartbeats"), ("GET", "/api/v4/get?path=//sys/pools"),
                ("GET", "/auth/whoami"),
            )
            for headers in ({}, {"X-YT-User-Name": "root"}, {"Authorization": "OAuth x"})
        ]  # fmt: skip
        for request, (status, text) in zip(refused, scheduler.ask(*refused), strict=True):
            assert status in (400, 403), f"{request}: {status} {text}"
            assert (
                f"this is uid {other}, which has no account; send it as one of them, or have its tokens_file name you"
                in text
            )
        answers = scheduler.ask(*((uid, "GET", "/api/v1/trees", {"Host": "evil.example"}) for uid in (0, other)))
        assert [status for status, _ in answers] == [403, 403]
        free = ("/healthz", "/readyz", "/metrics", "/")
        answers = scheduler.ask(*((other, "GET", path, {}) for path in free))
        assert [status for status, _ in answers] == [200] * len(free)
        assert scheduler.events("open_to_every_local_user") == []
        for path in [place / "state", *(place / "state").iterdir()]:
            assert path.stat().st_mode & 0o077 == 0 or path == place / "state", path
    finally:
        scheduler.close()


def test_a_loopback_address_that_is_set_is_open_and_says_so(scheduler: SchedulerProcess) -> None:
    scheduler.start()
    [warning] = scheduler.events("open_to_every_local_user")
    assert "do everything" in warning["error"]
    assert "tokens_file" in warning["advice"]
    assert scheduler.get("me")["is_open"] is True
    PlayedNode(scheduler, "n1").register()
    PlayedNode(scheduler, "n1").register()
    refused = scheduler.request("POST", "tokens", {"user": "me"})
    assert refused.status_code == 403
    assert "tokens can only be created by identified users" in refused.text
