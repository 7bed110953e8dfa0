"""What the web page is served and asks for, from a real scheduler: files, tables, specifications, history, refusals."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scheduler_process import PlayedNode, SchedulerProcess, clean_environment
from waiting import wait_until


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerProcess]:
    """One in which there is something of everything."""
    with SchedulerProcess(tmp_path_factory.mktemp("web")) as process:
        # Its node says no more than what is said here.
        process.write_config('node_heartbeat_timeout = "1h"\n[history]\nperiod = "100ms"\n')
        process.start()
        process.create_pool("a", strong_guarantee_resources={"cpu": 4})
        process.create_pool("b", "a", strong_guarantee_resources={"cpu": 3})
        node = PlayedNode(process, "n1")
        node.register()
        process.wait_updates()
        process.start_operation("b", 2, alias="*main", title="Main", job_cpu_monitor={"check-period": "2s"})
        node.beat_until(lambda: len(node.jobs) == 2, "both jobs run")
        node.beat()
        process.wait_updates()  # from here on nothing changes by itself
        yield process


@pytest.fixture
def own(tmp_path: Path) -> Iterator[SchedulerProcess]:
    with SchedulerProcess(tmp_path) as process:
        yield process


def raw(scheduler: SchedulerProcess, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """An answer as it is on the wire, not decompressed."""
    with scheduler.client.stream("GET", path, headers={"Accept-Encoding": "identity", **headers}) as answer:
        return answer.status_code, dict(answer.headers), b"".join(answer.iter_raw())


def test_only_the_pages_own_files_are_there_under_any_name(scheduler):
    """They hold no data, so nobody asks under which name they were reached; more is in ``tests/unit/web``."""
    assert raw(scheduler, "/", Host="elsewhere.example")[0] == 200
    assert raw(scheduler, "/api/v1/me", Host="elsewhere.example")[0] == 403


def test_no_answer_with_data_is_kept_by_a_browser(scheduler):
    for path in ("/api/v1/me", "/api/v1/trees/none", "/api/v1/nowhere", "/metrics", "/healthz", "/api/v4", "/ping"):
        headers = scheduler.request("GET", path).headers
        assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff"), path


def test_the_pool_table_is_sent_once_for_each_state(scheduler):
    path = "/api/v1/trees/default/pool_table"
    status, headers, packed = raw(scheduler, path, **{"Accept-Encoding": "gzip"})
    assert (status, headers["content-encoding"]) == (200, "gzip")
    table = json.loads(gzip.decompress(packed))
    names = [row[table["columns"].index("name")] for row in table["rows"]]
    assert names == ["<Root>", "a", "b"]
    status, plain_headers, plain = raw(scheduler, path)
    assert "content-encoding" not in plain_headers
    assert json.loads(plain)["rows"] == table["rows"]

    def is_unchanged() -> bool:
        # An update may come in between.
        tag = raw(scheduler, path)[1]["etag"]
        status, again, body = raw(scheduler, path, **{"If-None-Match": tag})
        assert status == 200 or (again["etag"] == tag and body == b"")
        return status == 304

    wait_until(is_unchanged, "two requests between two updates")
    assert raw(scheduler, path, **{"If-None-Match": 'W/"0.0-0"'})[0] == 200
    assert raw(scheduler, "/api/v1/trees/none/pool_table")[0] == 404


def test_history_of_everything_that_is_known_and_of_nothing_else(scheduler):
    operation = scheduler.get("operations/*main")["id"]
    job = scheduler.get(f"operations/{operation}/jobs")["jobs"][0]["id"]
    for kind, name, column in (
        ("pool", "b", "guarantee_ratio"), ("pool", "<Root>", "total_cores"), ("operation", "*main", "jobs"),
        ("node", "n1", "capacity_cores"), ("job", job, "current_cpu_limit_cores"),
    ):  # fmt: skip

        def read(kind: str = kind, name: str = name) -> dict[str, object]:
            answer = scheduler.client.get("/api/v1/history", params={"kind": kind, "name": name})
            assert answer.status_code == 200, answer.text
            found: dict[str, object] = answer.json()
            return found

        found = wait_until(lambda read=read: (it := read()) and it["times"] and it, f"points of {kind} {name}")
        assert len(found["columns"][column]) == len(found["times"])
        assert found["name"] == (operation if kind == "operation" else name)


def test_long_answers_are_compressed_for_whoever_takes_it_and_the_command_line_reads_them(own):
    own.start()
    for number in range(60):
        own.create_pool(f"pool-{number}")
    path = "/api/v1/trees/default/pools"
    _, headers, plain = raw(own, path)
    assert "content-encoding" not in headers
    assert headers["vary"] == "Accept-Encoding"
    _, headers, packed = raw(own, path, **{"Accept-Encoding": "gzip"})
    assert headers["content-encoding"] == "gzip"
    assert len(packed) < len(plain) / 4
    assert len(json.loads(gzip.decompress(packed))["pools"]) == 61
    assert "content-encoding" not in raw(own, "/api/v1/me", **{"Accept-Encoding": "gzip"})[1]
    done = subprocess.run(
        [sys.executable, "-m", "cpumond", "pool", "list", "--scheduler", own.url, "--json"],
        env={**clean_environment(), "HOME": str(own.directory)}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "pool-59" in done.stdout


def test_a_name_with_a_slash_or_a_percent_sign_has_an_address(own):
    """In the path a name's slash is written %2F, a percent sign %25: both are parts of the name, no borders."""
    own.write_config('pool_name_regex = ".+"\n')
    own.start()
    for name in ("rack/1", "rack%2F1", "a?b#c"):
        PlayedNode(own, name).register()
    own.create_pool("x/y")
    for quoted, name in (("rack%2F1", "rack/1"), ("rack%252F1", "rack%2F1"), ("a%3Fb%23c", "a?b#c")):
        assert json.loads(raw(own, f"{own.url}/api/v1/nodes/{quoted}")[2])["id"] == name
    assert json.loads(raw(own, f"{own.url}/api/v1/trees/default/pools/x%2fy")[2])["name"] == "x/y"
    assert raw(own, f"{own.url}/api/v1/nodes/rack/1")[0] == 404
    assert raw(own, f"{own.url}/api/v1/nodes/rack%2F1%00")[0] == 404
