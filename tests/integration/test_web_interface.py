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

from cpumond.monitor.model import MonitorSettings


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerProcess]:
    """One in which there is something of everything."""
    process = SchedulerProcess(tmp_path_factory.mktemp("web"))
    # Its node says no more than what is said here.
    process.write_config('node_heartbeat_timeout = "1h"\n[history]\nperiod = "100ms"\n')
    try:
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
    finally:
        process.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[SchedulerProcess]:
    process = SchedulerProcess(tmp_path)
    try:
        yield process
    finally:
        process.close()


def raw(scheduler: SchedulerProcess, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """An answer as it is on the wire, not decompressed."""
    with scheduler.client.stream("GET", path, headers={"Accept-Encoding": "identity", **headers}) as answer:
        return answer.status_code, dict(answer.headers), b"".join(answer.iter_raw())


def test_the_page_is_there_for_everybody_and_all_it_loads(scheduler):
    status, headers, page = raw(scheduler, "/", **{"Accept-Encoding": "gzip"})
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "trusted-types 'none'" in headers["content-security-policy"]
    assert b'src="/web/scheduler.js"' in gzip.decompress(page)
    assert raw(scheduler, "/", **{"If-None-Match": headers["etag"]})[0] == 304
    assert scheduler.request("HEAD", "/web/scheduler.js").status_code == 200
    # The files hold no data, so nobody asks under which name they were reached.
    assert raw(scheduler, "/", Host="elsewhere.example")[0] == 200
    assert raw(scheduler, "/api/v1/me", Host="elsewhere.example")[0] == 403


def test_no_answer_with_data_is_kept_by_a_browser(scheduler):
    for path in ("/api/v1/me", "/api/v1/trees/none", "/api/v1/nowhere", "/metrics", "/healthz", "/api/v4", "/ping"):
        headers = scheduler.request("GET", path).headers
        assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff"), path


def test_who_asks_and_the_overview(scheduler):
    me = scheduler.get("me")
    assert (me["user"], me["needs_token"], me["cluster_name"], me["history_length_s"]) == (
        "root", False, "cpumond", 34_560_000.0
    )  # fmt: skip
    assert me["started_at"] <= me["now"]
    scheduler.wait_updates()
    overview = scheduler.get("overview")
    (tree,) = overview["trees"]
    assert (tree["name"], tree["is_default"], tree["pool_count"], tree["online_node_count"]) == ("default", True, 2, 1)
    assert (tree["capacity_cores"], tree["ordered_cores"], tree["limit_cores"]) == (10.0, 2.0, 2.0)
    assert overview["health"]["status"] == "ok"

    def list_alerts(path: str) -> list[str]:
        # Their words may count on meanwhile, and a busy machine may bring one and take it back.
        return [alert["code"] for alert in scheduler.get(path)["alerts"]]

    wait_until(lambda: list_alerts("overview") == list_alerts("alerts"), "the same alerts")
    assert overview["history"]["max_bytes"] == 268_435_456


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


def test_a_new_pool_is_in_the_table_at_once(own):
    own.write_config(period="1m")
    own.start()
    before = own.get("trees/default/pool_table")
    own.create_pool("new")
    after = own.get("trees/default/pool_table")
    assert [row[0] for row in before["rows"]] == ["<Root>"]
    assert [row[0] for row in after["rows"]] == ["<Root>", "new"]
    assert after["update"] == before["update"]


def test_the_resulting_specification_has_the_merged_monitor_for_the_page_and_for_yt(scheduler):
    shown = scheduler.get("operations/*main/specification")
    monitor = shown["resulting"]["job_cpu_monitor"]
    assert (monitor["check_period"], monitor["relative_upper_bound"]) == (2000.0, 0.9)
    assert len(monitor) == len(MonitorSettings.__struct_fields__)
    assert shown["resulting"]["job_cpu_monitor_sources"]["check_period"] == "specification"
    assert shown["provided"]["job_cpu_monitor"] == {"check-period": "2s"}
    done = scheduler.yt("get-operation", shown["id"], "--format", "json", bindings=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["full_spec"]["job_cpu_monitor"]["check_period"] == 2000.0
    assert answer["spec"]["job_cpu_monitor"] == {"check-period": "2s"}


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
    for query, status in (
        ("kind=pool&name=none", 404), ("kind=pool&name=a&tree=none", 404), ("kind=operation&name=*none", 404),
        ("kind=node&name=n2", 404), ("kind=job&name=0", 404), ("kind=thing&name=a", 422), ("kind=pool", 422),
        ("kind=pool&name=a&since_s=0", 422), ("kind=pool&name=a&max_points=0", 422), ("kind=pool&name=a&x=1", 422),
    ):  # fmt: skip
        answer = scheduler.request("GET", f"history?{query}")
        assert answer.status_code == status, query
        assert answer.json()["error"]


def test_the_report_and_a_tree_that_it_does_not_know(scheduler):
    report = scheduler.get("report?since_s=60&tree=default&top=1")
    assert [tree["tree"] for tree in report["trees"]] == ["default"]
    assert scheduler.request("GET", "report?tree=none").status_code == 404


def test_a_refusal_names_the_field_and_the_plan_says_the_same(scheduler):
    for path, value, field in (
        (["weight"], -1, "weight"),
        (["strong_guarantee_resources", "cpu"], 9, "strong_guarantee_resources/cpu"),
        (["integral_guarantees", "resource_flow", "cpu"], "x", "integral_guarantees/resource_flow/cpu"),
    ):
        edits = [{"path": path, "value": value}]
        refused = scheduler.request("PATCH", "trees/default/pools/b", {"edits": edits})
        assert (refused.status_code, refused.json()["attributes"]) == (422, {"field": field})
        plan = scheduler.post("plan", {"type": "ChangePool", "tree": "default", "pool": "b", "edits": edits})
        assert (plan["accepted"], plan["refusal"]) == (False, refused.json()["error"])
        assert (plan["code"], plan["attributes"]) == (refused.json()["code"], {"field": field})
    assert scheduler.get("trees/default/pools/b")["attributes"] == {"strong_guarantee_resources": {"cpu": 3.0}}


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
