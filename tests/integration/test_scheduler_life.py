"""The life of ``cpumond scheduler`` as a process: start, refusals, tokens, nodes, restart, end."""

import contextlib
import hashlib
import http.client
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from scheduler_process import PlayedNode, SchedulerProcess
from waiting import wait_until

TOKEN = "3f2a-a-long-random-one"  # noqa: S105 - of a scheduler of our own
UNKNOWN_TOKEN = "nobody-has-this"  # noqa: S105


def test_a_shared_database_has_to_be_found_and_is_not_begun_anew(scheduler: SchedulerProcess):
    for conninfo, arguments, code, word in (
        ("nonsense password=hidden", (), 78, "conninfo"), ("host=127.0.0.1 port=1", ("--new-store",), 64, "shared"),
    ):  # fmt: skip
        scheduler.write_config(f'[store]\nkind = "postgresql"\nconninfo = "{conninfo}"')
        found, said = scheduler.refuse(*arguments)
        assert (found, word in said, "hidden" in said) == (code, True, False), said


def test_a_damaged_database_and_one_in_use_are_refused_and_kept(scheduler, tmp_path):
    """What else may be wrong with one is in ``tests/unit/scheduler/store/test_sqlite_store.py``."""
    scheduler.start()
    second = SchedulerProcess(tmp_path / "second")
    second.directory.mkdir()
    second.state_dir = scheduler.state_dir
    second.write_config()
    code, said = second.refuse("--new-store")
    assert (code, f"process {scheduler.pid};" in said) == (69, True), said
    scheduler.create_pool("lost")
    assert scheduler.stop(signal.SIGINT) == 0
    path = scheduler.state_dir / "scheduler.db"
    sound = path.read_bytes()
    broken = sound[:4096] + b"\xa5" * (len(sound) - 4096)
    path.write_bytes(broken)
    code, said = scheduler.refuse()
    assert code == 69
    assert f"{path}: the database is damaged" in said
    assert "--new-store" in said
    scheduler.start("--new-store")
    assert scheduler.request("GET", "trees/default/pools/lost").status_code == 404
    aside = Path(scheduler.events("store_set_aside")[0]["path"])
    assert (aside.parent, aside.read_bytes()) == (path.parent, broken)


def test_the_end_waits_for_requests_and_loses_nothing(scheduler):
    scheduler.start()
    begun = threading.Barrier(5)

    def write(thread: int) -> tuple[list[str], list[str]]:
        acknowledged, strange = [], []
        with scheduler.new_client() as client, contextlib.suppress(httpx2.TransportError):
            for name in (f"p{thread}-{number}" for number in range(10_000)):
                answer = client.post("/api/v1/trees/default/pools", json={"name": name})
                if answer.status_code == 201:
                    acknowledged.append(name)
                elif answer.status_code != 503:
                    strange.append(answer.text)
                if name.endswith("-5"):
                    begun.wait(100)
        return acknowledged, strange

    with ThreadPoolExecutor(4) as threads:
        done = [threads.submit(write, number) for number in range(4)]
        begun.wait(100)
        assert scheduler.stop() == 0
        acknowledged, strange = (set().union(*each) for each in zip(*(each.result(100) for each in done), strict=True))
    assert strange == set()
    assert "Traceback" not in scheduler.log()
    scheduler.start()
    kept = {pool["name"] for pool in scheduler.get("trees/default/pools")["pools"]}
    assert len(acknowledged) >= 24
    assert acknowledged <= kept


def test_a_client_that_does_not_read_its_answer_does_not_hold_the_end_up(scheduler):
    scheduler.start()
    with scheduler.connect() as idle:
        idle.sendall(b"POST /api/v1/operations HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        scheduler.get("status")
        assert scheduler.stop() == 0


def test_who_has_no_token_is_told_so_by_yt_and_no_token_is_logged(scheduler):
    """Which requests need one is in the table of ``test_access_table.py``."""
    path = scheduler.directory / "tokens"
    path.touch(0o600)
    path.write_text(f"# who may come in\nanna:{hashlib.sha256(TOKEN.encode()).hexdigest()}:admin\n")
    scheduler.write_config(api=f'tokens_file = "{path}"')
    scheduler.start()
    for token, said in (("", "a token is needed"), (UNKNOWN_TOKEN, "the token is unknown")):
        scheduler.use_token(token)
        answer = scheduler.request("GET", "trees")
        assert (answer.status_code, answer.json()["code"]) == (401, 900)
        assert answer.headers["www-authenticate"] == "Bearer"
        done = scheduler.yt("list", "//sys/pools", bindings=False)
        assert done.returncode == 1
        assert "has failed to authenticate at cpumond" in done.stderr, "what the client says of a YtTokenError"
        assert f"Authentication failed: {said}" in done.stderr
        assert "Traceback" not in done.stderr

    scheduler.use_token(TOKEN)
    scheduler.create_pool("a")
    done = scheduler.yt("list", "//sys/pools", bindings=False)
    assert (done.returncode, done.stdout) == (0, "a\n"), done.stderr
    assert [record["user"] for record in scheduler.events("command")] == ["anna"]
    assert TOKEN not in scheduler.log()
    assert UNKNOWN_TOKEN not in scheduler.log()


def test_a_restart_keeps_everything_and_the_jobs_run_on(scheduler):
    scheduler.start()
    node = PlayedNode(scheduler, "node-1", tags=["old"])
    node.register()
    scheduler.create_pool("parent", strong_guarantee_resources={"cpu": 5.0})
    scheduler.create_pool("child", "parent", weight=2.5, strong_guarantee_resources={"cpu": 3.0})
    scheduler.post("trees", {"name": "second", "attributes": {"nodes_filter": "nobody"}})
    running = scheduler.start_operation("child", job_count=3, cpu=2.0, alias="*mine")
    node.beat_until(lambda: len(node.jobs_of(running)) == 3, "its jobs")
    node.beat()
    suspended = scheduler.start_operation("child", job_count=1)
    scheduler.post(f"operations/{suspended}/suspend")
    aborted = scheduler.start_operation("child")
    scheduler.post(f"operations/{aborted}/abort")
    completed = scheduler.start_operation("child")
    node.beat_until(lambda: node.jobs_of(completed), "its job")
    node.end(node.jobs_of(completed)[0])
    node.beat_until(lambda: scheduler.state_of(completed) == "completed", "an operation is completed")
    node.beat()

    def look() -> dict[str, Any]:
        listed = scheduler.get("operations")["operations"]
        pools = scheduler.get("trees/default/pools")["pools"]
        return {
            "trees": [(tree["name"], tree["attributes"]) for tree in scheduler.get("trees")["trees"]],
            "pools": [(pool["name"], pool["parent"], pool["id"], pool["attributes"]) for pool in pools],
            "operations": {
                each["id"]: (each["state"], each["suspended"], each["alias"], each["pools"], each["jobs"])
                for each in listed
            },
            "order": [each["id"] for each in listed],
            "jobs": scheduler.get(f"operations/{completed}/jobs")["jobs"],
        }

    before, jobs = look(), sorted(node.jobs)
    assert len(jobs) == 3
    assert scheduler.stop() == 0
    scheduler.start()
    answer = node.beat()
    assert answer["stop"] == []
    assert look() == before
    assert sorted(node.jobs) == jobs, "nothing was started twice"
    scheduler.wait_updates()
    live = scheduler.get(f"operations/{running}/jobs")["jobs"]
    assert sorted((job["id"], job["state"]) for job in live) == [(job_id, "running") for job_id in jobs]
    assert scheduler.get("trees/default/pools/child")["usage"]["cpu"] == 6.0

    scheduler.post(f"operations/{suspended}/resume")
    for job_id in jobs:
        node.end(job_id)
    node.beat_until(lambda: scheduler.state_of(running) == "completed", "the operation is completed")
    node.beat_until(lambda: node.jobs_of(suspended), "the other one goes on")


def test_the_head_of_a_request_has_a_limit(scheduler):
    scheduler.write_config()
    scheduler.start()
    endless = b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 100_000_000
    with scheduler.connect() as peer, pytest.raises(ConnectionError):
        peer.sendall(endless)
    # What `yt` may send in a header still gets in, again and again on one connection.
    with contextlib.closing(http.client.HTTPConnection(scheduler.address, timeout=100)) as client:
        for _ in range(3):
            client.request("GET", "/api/v4/get_supported_features", headers={"X": "x" * 500_000})
            answer = client.getresponse()
            assert (answer.status, bool(answer.read())) == (200, True)
    assert scheduler.stop() == 0


def test_a_state_directory_that_is_removed_is_noticed_and_made_anew(scheduler):
    """What else becomes of it is in ``tests/unit/scheduler/store/test_sqlite_store.py``."""
    scheduler.start()
    scheduler.create_pool("before")
    # At once: it may make its files anew while they are removed one by one.
    shutil.rmtree(scheduler.state_dir.rename(scheduler.directory / "gone"))
    wait_until(
        lambda: "store_lost" in {alert["code"] for alert in scheduler.get("alerts")["alerts"]},
        "it is noticed without a command",
    )
    wait_until((scheduler.state_dir / "scheduler.db").exists, "its file is there again")
    scheduler.kill()
    scheduler.start()
    assert scheduler.get("trees/default/pools/before")["name"] == "before"
