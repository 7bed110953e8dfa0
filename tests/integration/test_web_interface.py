"""What the web page is served and asks for, from a real scheduler: files, tables, specifications, history, refusals."""

import gzip
import json
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from commands import run_command
from scheduler_process import PlayedNode, SchedulerProcess, clean_environment
from waiting import wait_until


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerProcess]:
    """One in which there is something of everything."""
    with SchedulerProcess(tmp_path_factory.mktemp("web")) as process:
        # Its node says no more than what is said here.
        process.write_config('node_heartbeat_timeout = "1h"\npool_name_regex = ".+"\n[history]\nperiod = "100ms"\n')
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


def test_history_of_everything_that_is_known(scheduler):
    operation = scheduler.get("operations/*main")["id"]
    job = scheduler.get(f"operations/{operation}/jobs")["jobs"][0]["id"]
    for kind, name in (("pool", "b"), ("pool", "<Root>"), ("operation", "*main"), ("node", "n1"), ("job", job)):
        path = f"history?kind={kind}&name={quote(name)}"
        wait_until(lambda path=path: scheduler.get(path)["times"], f"points of {kind} {name}")
        assert scheduler.get(path)["name"] == (operation if kind == "operation" else name)


def test_the_pool_table_is_sent_once_for_each_state(scheduler):
    path = "/api/v1/trees/default/pool_table"

    def is_unchanged() -> bool:
        # An update may come in between.
        tag = raw(scheduler, path)[1]["etag"]
        status, again, body = raw(scheduler, path, **{"If-None-Match": tag})
        assert status == 200 or (again["etag"] == tag and body == b"")
        return status == 304

    wait_until(is_unchanged, "two requests between two updates")
    assert raw(scheduler, path, **{"If-None-Match": 'W/"0.0-0"'})[0] == 200


def test_long_answers_are_compressed_and_the_command_line_reads_them(scheduler):
    for number in range(60):
        scheduler.create_pool(f"pool-{number}")
    path = "/api/v1/trees/default/pools"
    _, headers, plain = raw(scheduler, path)
    assert "content-encoding" not in headers
    assert headers["vary"] == "Accept-Encoding"
    _, headers, packed = raw(scheduler, path, **{"Accept-Encoding": "gzip"})
    assert headers["content-encoding"] == "gzip"
    assert len(packed) < len(plain) / 4
    assert len(json.loads(gzip.decompress(packed))["pools"]) > 60
    assert "content-encoding" not in raw(scheduler, "/api/v1/me", **{"Accept-Encoding": "gzip"})[1]
    done = run_command(["pool", "list", "--scheduler", scheduler.url, "--json"], clean_environment())
    assert done.returncode == 0, done.stderr
    assert "pool-59" in done.stdout


def test_a_name_with_a_slash_or_a_percent_sign_has_an_address(scheduler):
    """In the path a name's slash is written %2F, a percent sign %25: both are parts of the name, no borders."""
    for name in ("rack/1", "rack%2F1", "a?b#c"):
        PlayedNode(scheduler, name).register()
    scheduler.create_pool("x/y")
    for quoted, name in (("rack%2F1", "rack/1"), ("rack%252F1", "rack%2F1"), ("a%3Fb%23c", "a?b#c")):
        assert json.loads(raw(scheduler, f"{scheduler.url}/api/v1/nodes/{quoted}")[2])["id"] == name
    assert json.loads(raw(scheduler, f"{scheduler.url}/api/v1/trees/default/pools/x%2fy")[2])["name"] == "x/y"
    assert raw(scheduler, f"{scheduler.url}/api/v1/nodes/rack/1")[0] == 404
    assert raw(scheduler, f"{scheduler.url}/api/v1/nodes/rack%2F1%00")[0] == 404
