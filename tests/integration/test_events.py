"""Events, the audit log and undo with a real scheduler: what is stored, who sees it, the commands."""

import json
import os
import signal
from typing import Any

import httpx2
import pytest
from scheduler_process import SchedulerProcess
from test_json_api import LiveScheduler
from test_scheduler_commands import Shell, cpumond, server
from waiting import wait_until

__all__ = ["cpumond", "server"]

TOKENS = {"root": "admin", "alice": "user", "bob": "user"}


@pytest.fixture
def secured(scheduler: SchedulerProcess) -> SchedulerProcess:
    """Users whose tokens are their names; alice may administer pool a."""
    scheduler.write_config(api=scheduler.write_tokens(TOKENS))
    scheduler.start()
    scheduler.use_token("root")
    entry = {"action": "allow", "subjects": ["alice"], "permissions": ["administer"]}
    scheduler.create_pool("a", acl=[entry])
    scheduler.create_pool("b")
    return scheduler


def events(scheduler: SchedulerProcess, what: str = "audit", **query: Any) -> list[dict[str, Any]]:
    """The newest first."""
    words = "&".join(f"{name}={value}" for name, value in query.items())
    found: list[dict[str, Any]] = scheduler.get(f"{what}?{words}")["events"]
    return found


def set_weight(scheduler: SchedulerProcess, pool: str, weight: float) -> httpx2.Response:
    body = {"edits": [{"path": ["weight"], "value": weight}]}
    return scheduler.request("PATCH", f"trees/default/pools/{pool}", body)


def test_who_sees_what(secured: SchedulerProcess):
    secured.use_token("alice")
    assert set_weight(secured, "a", 2).status_code == 403, "a weight is the parent's to give"
    assert set_weight(secured, "b", 2).status_code == 403
    secured.use_token("root")
    assert set_weight(secured, "b", 3).status_code == 200
    texts = [each["text"] for each in events(secured, "events", kind="command")]
    assert texts[0] == 'root changed pool "b": weight unset -> 3.0'
    assert not {"origin", "request", "allowed_by", "refused", "plan"} & events(secured, "events")[0].keys()
    assert [each["kind"] for each in events(secured, user="alice")] == ["refused", "refused"]
    everything = events(secured)
    assert len(everything) == 5
    assert everything[0]["allowed_by"] == "root is an administrator"
    secured.use_token("alice")
    assert {each["user"] for each in events(secured)} == {"alice"}
    assert {each["user"] for each in events(secured, pool="a")} == {"alice", "root"}
    for query in ("user=root", "user=root&pool=b", "user=bob&tree=default"):
        refused = secured.request("GET", f"audit?{query}")
        assert refused.status_code == 403, query
        assert "may read the audit log of alice" in refused.json()["error"]
    assert not [each for each in events(secured, "events") if each["kind"] == "refused"]
    secured.use_token("")
    for path in ("events", "audit", "annotations"):
        assert secured.request("GET", path).status_code == 401


def test_strangers_are_audited_unless_they_only_ask_without_a_token(secured: SchedulerProcess):
    """Each act of one team against another is in ``test_rights_by_lists.py``."""
    for token, method, path in (("not-known", "GET", "trees"), ("", "POST", "trees"), ("", "GET", "trees")):
        secured.use_token(token)
        assert secured.request(method, path, {"name": "mine"} if method == "POST" else None).status_code == 401
    secured.use_token("bob")
    assert "901" in secured.request("POST", "/api/v4/remove", {"path": "//sys/pools/b"}).text
    secured.use_token("root")
    found = events(secured, kind="refused")[::-1]
    assert [each["user"] for each in found] == ["", "", "bob"]
    assert all(each["refused"] in each["text"] for each in found)
    assert "127.0.0.1" in found[0]["origin"]


def test_changes_are_told_with_the_plan_in_pages_and_as_annotations(scheduler: SchedulerProcess):
    scheduler.start()
    scheduler.create_pool("p", weight=1)
    headers = {"X-Cpumond-Plan": "2 changes, with effects on 3 pools"}
    body = {"edits": [{"path": ["weight"], "value": 2}]}
    with scheduler.new_client() as client:
        assert client.patch("/api/v1/trees/default/pools/p", json=body, headers=headers).status_code == 200
    (event, *_) = events(scheduler, pool="p")
    assert event["plan"] == headers["X-Cpumond-Plan"]
    assert event["can_undo"]
    assert event["time"].endswith("Z")
    # Older ones are asked for by number.
    numbers = [each["number"] for each in events(scheduler, "events")]
    page = scheduler.get("events?limit=2")
    older = scheduler.get(f"events?limit=2&before={page['next']}")
    assert [each["number"] for each in [*page["events"], *older["events"]]] == numbers[:4]
    assert scheduler.get("events?since_s=0.000001")["events"] == []
    annotation = scheduler.get("annotations?pool=p&limit=1")[0]
    assert annotation["tags"] == ["command", "tree:default", "pool:p", "user:root"]
    assert abs(annotation["time"] / 1e3 - events(scheduler, "events", pool="p")[0]["at"]) < 1


def test_a_start_and_a_reload_are_told(scheduler: SchedulerProcess):
    scheduler.start()
    wait_until(lambda: events(scheduler, "events", kind="started"), "the start")
    os.kill(scheduler.pid, signal.SIGHUP)
    wait_until(lambda: events(scheduler, "events", kind="reload"), "the reload")
    scheduler.config_path.write_text("nonsense = 1")
    os.kill(scheduler.pid, signal.SIGHUP)
    wait_until(lambda: len(events(scheduler, "events", kind="reload")) == 2, "the reload that was refused")
    assert "nothing was changed" in events(scheduler, "events", kind="reload")[0]["text"]
    metrics = scheduler.request("GET", "/metrics").text
    assert 'cpumond_scheduler_events_total{kind="reload"} 2.0' in metrics


def test_the_commands(server: LiveScheduler, cpumond: Shell):
    assert "no event matches" in cpumond("events", "--pool", "p")
    cpumond("pool", "create", "p", "weight=1")
    cpumond("pool", "set", "p", "weight=2")
    for word in ("events", "audit"):
        table = cpumond(word, "--pool", "p")
        assert table.startswith("number")
        assert 'tester changed pool "p": weight 1.0 -> 2.0' in table.splitlines()[1]
    assert "UTC" in cpumond("audit")
    lines = [json.loads(line) for line in cpumond("audit", "--all", "--json").splitlines()]
    assert [line["command"] for line in lines] == ["ChangePool", "CreatePool"]
    assert lines[0]["changes"] == [{"tree": "default", "pool": "p", "attribute": "weight", "old": 1.0, "new": 2.0}]
    number = str(lines[0]["number"])
    assert "weight: 2 -> 1" in cpumond("undo", number, "--plan")
    cpumond("undo", number, code=64)
    assert f"change {number} is not undone, because there is no terminal to ask at; give --yes" in cpumond.err
    assert cpumond("undo", number, "--yes") == f"change {number} is undone\n"
    assert cpumond.json("pool", "show", "p")["attributes"] == {"weight": 1.0}
    cpumond("undo", number, "--yes", code=78)
    assert "weight is 1.0 now, not 2.0 as that change left it; since then" in cpumond.err
    cpumond("undo", "4711", "--yes", code=67)
    assert "there is no change 4711" in cpumond.err
    cpumond("events", "--kind", "nonsense", code=64)
