"""A scheduler of the size that its web page has to bear, made in seconds: the store is filled before it starts, since
over HTTP each change is checked with all pools and is on the disk before the next."""

import contextlib
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from cpumond.scheduler.model import ROOT_POOL, Rules
from cpumond.scheduler.service import encode
from cpumond.scheduler.settings.operations import StartOperation
from cpumond.scheduler.settings.records import SYSTEM, RecordKey, load_config
from cpumond.scheduler.state.changes import apply, make_state
from cpumond.scheduler.state.commands import prepare
from cpumond.scheduler.store import Change
from cpumond.scheduler.store.sqlite import open_sqlite_store

POOLS = 2000
OPERATIONS = 20_000
NODES = 200
NODE_CORES = 20.0
TEAMS, PROJECTS, GROUPS = 40, 400, 1200
"""Pools from 0 are teams, from TEAMS on projects in them, from PROJECTS on groups, from GROUPS on parts of groups."""

START_S = 1_750_000_000.0

CONFIG = f"""max_operation_count = {10 * OPERATIONS}
node_heartbeat_timeout = "1d"
"""
"""Nodes that are heard of once stay."""


def pool_name(number: int) -> str:
    kind = ("team", "project", "group", "part")[sum(number >= first for first in (TEAMS, PROJECTS, GROUPS))]
    return f"{kind}-{number:04d}"


def fill_store(state_dir: Path, pools: int = POOLS, operations: int = OPERATIONS) -> None:
    """The database of a scheduler: ``pools`` nested three deep, ``operations`` in those without children."""
    many = ("max_operation_count", "max_running_operation_count")
    options = {**dict.fromkeys(many, 100_000), **{f"{name}_per_pool": 100_000 for name in many}}
    stored: dict[RecordKey, dict[str, Any]] = {
        SYSTEM: {"default_tree": "default"},
        ("tree", "tree"): {"id": "tree", "name": "default", "attributes": options},
    }
    for number in range(pools):
        name = pool_name(number)
        place = {"tree": "default", "parent": _parent(number)}
        stored["pool", name] = {"id": name, "name": name, **place, "attributes": _attributes(number)}
    changes = [Change(kind, key, msgspec.json.encode(record)) for (kind, key), record in stored.items()]
    state = make_state(Rules(max_operation_count=10 * operations), load_config(stored))
    leaves = [pool_name(number) for number in range(PROJECTS, pools)]
    for number in range(operations):
        task = {"job_count": 1 + number % 3, "cpu_limit": 1.0, "memory_limit": 2**24, "command": "true"}
        spec = {"pool": leaves[number % len(leaves)], "title": f"Batch {number:05d}", "tasks": {"main": task}}
        start = StartOperation(spec)
        change = prepare(state, start, f"user-{number % 50}", START_S + number, lambda: str(uuid.uuid4()))
        changes += encode(change, state.config)
        apply(state, change, START_S)
    with contextlib.closing(open_sqlite_store(str(state_dir / "scheduler.db"))) as store:
        store.write(changes)


def _parent(number: int) -> str:
    for first, above, count in ((GROUPS, PROJECTS, GROUPS - PROJECTS), (PROJECTS, TEAMS, PROJECTS - TEAMS)):
        if number >= first:
            return pool_name(above + number % count)
    return pool_name(number % TEAMS) if number >= TEAMS else ROOT_POOL


def _attributes(number: int) -> dict[str, Any]:
    attributes: dict[str, Any] = {"weight": 1.0 + number % 5}
    if number >= GROUPS and number % 20 == 0:
        attributes["mode"] = "fifo"
    if number < TEAMS and number % 4 == 0:
        kind = "burst" if number % 8 == 0 else "relaxed"
        guarantee: dict[str, Any] = {"guarantee_type": kind, "resource_flow": {"cpu": 10.0}}
        if kind == "burst":
            guarantee["burst_guarantee_resources"] = {"cpu": 20.0}
        attributes["integral_guarantees"] = guarantee
    elif number < TEAMS:
        attributes["strong_guarantee_resources"] = {"cpu": 20.0}
    return attributes


def play_nodes(
    client: httpx2.Client, nodes: int = NODES, tags: Callable[[int], list[str]] = lambda _: []
) -> list[dict[str, Any]]:
    """Nodes, with the tags of their numbers, that take the jobs they are given; the heartbeats that say so, to be sent
    again with a new sequence."""
    beats = []
    for number in range(nodes):
        name = f"node-{number:03d}"
        resources = {"cpu": NODE_CORES, "memory": 2**38, "user_slots": 100}
        _post(client, "nodes", {"node_id": name, "incarnation": "played", "resources": resources, "tags": tags(number)})
        beat: dict[str, Any] = {
            "node_id": name, "incarnation": "played", "sequence": 1, "sent_at": 0.0, "cpu_capacity": NODE_CORES,
            "jobs": [],
        }  # fmt: skip
        orders = _post(client, "heartbeats", beat)["start"]
        beat["jobs"] = [
            {
                "job_id": order["job_id"], "operation_id": order["operation_id"], "task": order["task"],
                "from_scheduler": True, "cpu_limit": order["cpu_limit"], "current_cpu_limit": order["cpu_limit"],
                "smoothed_cpu_usage": 0.5,
            }
            for order in orders
        ]  # fmt: skip
        beats.append(beat)
        send_beat(client, beat)
    return beats


def send_beat(client: httpx2.Client, beat: dict[str, Any]) -> None:
    beat["sequence"] += 1
    _post(client, "heartbeats", beat)


def _post(client: httpx2.Client, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(f"/api/v1/{path}", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 201), answer.text
    return answer.json()


WATCH_FIRST_ROW = """
(() => {
  const found = () => document.querySelector("main .table tbody tr:not(.spacer) th a, main .figure-number");
  const look = () => {
    if (!found()) return false;
    performance.mark("first-row");
    // A frame's callbacks run before it is painted, a message sent in them comes after.
    requestAnimationFrame(() => {
      const channel = new MessageChannel();
      channel.port1.onmessage = () => performance.mark("first-row-painted");
      channel.port2.postMessage(0);
    });
    return true;
  };
  const observer = new MutationObserver(() => { if (look()) observer.disconnect(); });
  observer.observe(document, { childList: true, subtree: true });
})();
"""
"""For ``add_init_script``: marks of the page's timeline, when the first row of a table, or number of the overview,
is there and is painted."""

FIRST_ROW = """() => performance.getEntriesByName("first-row-painted")[0]?.startTime ?? null"""
"""Milliseconds from the start of the navigation, null as long as nothing was painted."""


class Wire:
    """What a page's requests weigh, head and body as they come over the wire; given a CDP session of the page."""

    def __init__(self, session: Any) -> None:
        self.bytes: dict[str, int] = {}
        """By address, without the address of the server."""
        self._paths: dict[str, str] = {}
        session.on("Network.responseReceived", self._take_response)
        session.on("Network.loadingFinished", self._take_end)
        session.send("Network.enable")
        session.send("Network.setCacheDisabled", {"cacheDisabled": True})

    def _take_response(self, event: dict[str, Any]) -> None:
        self._paths[event["requestId"]] = "/" + event["response"]["url"].split("/", 3)[3]

    def _take_end(self, event: dict[str, Any]) -> None:
        path = self._paths.get(event["requestId"], "?")
        self.bytes[path] = self.bytes.get(path, 0) + int(event["encodedDataLength"])

    @property
    def total(self) -> int:
        return sum(self.bytes.values())
