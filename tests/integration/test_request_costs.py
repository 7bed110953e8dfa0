"""The most expensive request to each endpoint, sent to a large cluster: how long the event loop works for it.

What is counted are calls of functions: they are the same on every machine. 10 000 of them take about a millisecond;
``tests/bench/requests.py`` has the times. ``--show-capture=no`` leaves the log out of what a failure prints.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio import events
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import httpx2
import msgspec
import pytest
from scheduler_world import ServedNode, StillClock
from starlette.applications import Starlette
from starlette.requests import Request

from cpumond.api.endpoints import ENDPOINTS
from cpumond.api.json.call import Shared
from cpumond.api.json.costs import STEPS
from cpumond.api.json.routes import make_json_routes
from cpumond.scheduler.history.recorder import HistoryRecorder
from cpumond.scheduler.history.store import HistoryStore
from cpumond.scheduler.model import PreemptionRecord, Rules
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.settings.operations import StartOperation
from cpumond.scheduler.settings.tree_file import ApplyTree, TreeTables
from cpumond.scheduler.store.sqlite import open_sqlite_store

POOLS, NODES, OPERATIONS = 1000, 3000, 10_000
ADMIN = User("root", admin=True)
T = TypeVar("T")

MAX_STEPS = 400_000
"""Of one request in one turn of the event loop: no heartbeat waits longer than 50 ms for it."""
CLIENT_STEPS = 4 * STEPS
"""Of the client, which runs in the same loop."""
MORE_STEPS = {"apply_tree": 2_000_000}
"""A file of thousands of pools is applied in one turn: its cost is bounded by the rate of its user alone."""


class Steps:
    """Calls of functions in this thread: all of them, and the most in one turn of the event loop."""

    def __init__(self) -> None:
        self.total = self.most = self._turn = 0

    def __enter__(self) -> Steps:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is events.Handle._run.__code__:
            self._turn = 0
        elif event in ("call", "c_call"):
            self.total += 1
            self._turn += 1
            self.most = max(self.most, self._turn)


class Asked(NamedTuple):
    """A request: what stands behind the question mark, and its body."""

    query: str = ""
    body: Any = None


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.clock = StillClock()
        self.store = open_sqlite_store(str(folder / "scheduler.db"))
        rules = Rules(max_operation_count=2 * OPERATIONS, spare=(0.0, 0.01, 0.0, 0.0, 0.0))
        self.scheduler = Scheduler(rules, self.store, self.clock)
        now = self.scheduler.started_at = self.clock.at
        store = HistoryStore(str(folder / "history.db"), 86_400.0, 10.0, 2**26, now)
        self.scheduler.history = HistoryRecorder(store, self.scheduler.state, now, 100_000)
        self.reader = User("spy")
        self.counted: list[float] = []
        routes = make_json_routes(
            Shared(self.scheduler), self.find_user, count=lambda _, requests: self.counted.append(requests)
        )
        self.application = Starlette(routes=routes)
        transport = httpx2.ASGITransport(self.application)
        self.client = httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=600.0)

    def find_user(self, request: Request) -> User:
        return ADMIN if request.method != "GET" else self.reader

    async def fill(self) -> None:
        """A tenth of the operations run; ``spy`` may not read those of a tenth of the pools."""
        deny = {"acl": [{"action": "deny", "subjects": ["spy"], "permissions": ["read"]}]}
        pools = [
            {"name": f"p{number}", "parent": f"p{number % 10}" if number >= 10 else "<Root>",
             "options": {"max_operation_count": OPERATIONS} if number < 10 else deny if number % 10 == 9 else {}}
            for number in range(POOLS)
        ]  # fmt: skip
        await self.scheduler.execute(ApplyTree("default", read_tables(pools)), ADMIN)
        nodes = [ServedNode(self.scheduler, 1.0, f"n{number}", tags=("rack",)) for number in range(NODES)]
        await asyncio.gather(*(node.register() for node in nodes))
        task = {"job_count": 1, "command": "true"}
        for start in range(0, OPERATIONS, 1000):
            specs = [
                {"pool": f"p{10 + number % (POOLS - 10)}", "title": f"title {number}", "tasks": {"t": task}}
                for number in range(start, start + 1000)
            ]
            await asyncio.gather(*(self.scheduler.execute(StartOperation(spec), ADMIN) for spec in specs))
        await self.scheduler.update_all()
        self.scheduler.ready.set()
        for node in nodes:
            await node.beat()
        await self.scheduler.update_all()
        state = self.scheduler.state
        ids = list(state.operations)
        state.preemptions.extend(
            PreemptionRecord(
                f"j{number}", ids[number], "default", f"p{number % 1000}", "n1", 0.0, "preempted",
                f'preempted to start job j of operation "{ids[-1]}" in pool "p1"', {"cpu": 1.0}, "j", ids[-1], "p1",
            )
            for number in range(state.preemptions.maxlen or 0)
        )  # fmt: skip
        assert self.scheduler.history is not None
        for _ in range(3):
            self.clock.at += 10.0
            self.scheduler.history.take(self.clock.at)

    async def close(self) -> None:
        await self.client.aclose()
        assert self.scheduler.history is not None
        await self.scheduler.history.close(self.clock.at)
        self.store.close()


def read_tables(pools: list[dict[str, Any]]) -> TreeTables:
    return msgspec.convert({"pools": pools}, TreeTables)


def edits_of(path: list[str], count: int) -> Asked:
    return Asked(body={"edits": [{"path": path, "value": 2.0, "recursive": True}] * count})


_MANY = {f"x{number}": 1 for number in range(9000)}
_TASK = {"job_count": 1, "command": "true"}
_LARGE_TREE = [{"name": f"q{number}", "options": {"weight": 2.0}} for number in range(2400)]
_FILTER = "|".join(["rack"] * 300)
_LONG_FILTER = {"nodes_filter": _FILTER, "level": "weight"}
_ALL = "limit=1000"

CASES: dict[str, list[Asked]] = {
    "list_operations": [
        Asked(f"{_ALL}&search=title&sort={sort}") for sort in ("usage", "fair_share", "title", "start_time")
    ],
    "group_operations": [Asked("search=title")],
    "find": [Asked(f"kind={kind}&name={name}&all_of=true&within=true&{_ALL}") for kind, name in (
        ("operation", "t"), ("node", "n"), ("pool", "p"),
    )],
    "list_preemptions": [Asked(_ALL), Asked(f"{_ALL}&group=none")],
    "can": [Asked("action=use&object=p7")],
    "list_trends": [Asked("pools=" + "%0A".join(f"p{number}" for number in range(200)) + "&count=120")],
    "read_history": [Asked("kind=pool&name=p7&max_points=20000")],
    "make_report": [Asked("top=1000")],
    "make_plan": [
        Asked("everything=true", {"type": "ChangePool", "tree": "default", "pool": "p1",
                                  "edits": [{"path": ["weight"], "value": 2.0}]}),
        Asked(body={"type": "RemovePool", "tree": "default", "pool": "p2", "recursive": True}),
        Asked(body={"type": "ApplyTree", "tree": "default", "tables": {"pools": _LARGE_TREE}, "prune": True}),
    ],
    "change_tree": [Asked(body={"edits": [{"path": ["config", name], "value": 1} for name in list(_MANY)[:1000]]})],
    "change_pool": [edits_of(["weight"], 1000), edits_of(["x" * 250] * 32, 100)],
    "create_tree": [Asked(body={"name": "t", "attributes": _MANY})],
    "create_pool": [Asked(body={"name": "made", "attributes": _MANY})],
    "patch_operation_spec": [Asked(body={"patches": [{"path": "/title", "value": None}] * 1000})],
    "change_node_tags": [Asked(body={"add": [f"t{number}" for number in range(1000)]})],
    "transfer_resources": [Asked(body={"destination": "p2", "delta": _MANY})],
    "move_pool": [Asked(body={"name": "moved"})],
    "set_default_tree": [Asked(body={"tree": "default"})],
    "start_operation": [
        Asked(body={"spec": {"pool": "p20", "tasks": {"t": _TASK}, **_MANY}}),
        Asked(body={"spec": {"pool": "p20", "tasks": {"t": {**_TASK, **_MANY}}}}),
        Asked(body={"spec": {"pool": "p20", "tasks": {f"t{number}": _TASK for number in range(1000)}}}),
        Asked(body={"spec": {"pool": "p20", "tasks": {
            f"t{number}": {**_TASK, **dict(list(_MANY.items())[:15])} for number in range(900)
        }}}),
    ],
    "update_operation": [Asked(body={"parameters": _MANY})],
    "plan_stage": [Asked(body={"nodes_filter": "!" * 1990 + "rack", "level": "weight"}), Asked(body=_LONG_FILTER)],
    "set_stage": [Asked(body=_LONG_FILTER)],
    **{f"{verb}_stage": [Asked(body={"nodes_filter": _FILTER})] for verb in ("advance", "stop", "remove")},
    "create_token": [Asked(body={"user": "u", "groups": [f"g{number}" for number in range(100)]})],
    "simulate": [Asked(body={"node": "n1"})],
    "register_node": [Asked(body={
        "node_id": "made", "incarnation": "a", "resources": {"cpu": 1.0}, "tags": [f"t{n}" for n in range(100)],
    })],
    "heartbeat": [Asked(body={
        "node_id": "n9", "incarnation": "a", "sequence": 1, "sent_at": 0.0, "cpu_capacity": 1.0, "jobs": [],
    })],
    "take_job_log": [Asked(body={"node_id": "n3", "request_id": "1", "content": "A" * 2**20})],
    "take_job_reply": [Asked(body={"node_id": "n3", "request_id": "1", "value": {"text": "x" * 2**19}})],
    **{name: [Asked("recursive=true")] for name in ("remove_pool", "remove_tree")},
    **{
        f"list_{name}": [Asked(_ALL)]
        for name in ("jobs", "nodes", "events", "audit", "annotations")
    },
    "apply_tree": [Asked(body={"tables": {"pools": _LARGE_TREE}})],
}  # fmt: skip
"""By the name of the endpoint; others take nothing but what stands in their path."""

ASK_NODES = {"get_job_log", "explain_job", "pin_job", "unpin_job"}
"""They wait for an agent."""
LAST = ("move_pool", "remove_pool", "drain_node", "apply_tree", "remove_tree")
"""What is much smaller, or larger, after them."""


async def ask_all(
    folder: Path, meter: Callable[[], AbstractContextManager[T]]
) -> AsyncIterator[tuple[str, httpx2.Response, T, float]]:
    """Of each request the endpoint, the answer, what a meter around it says, and its estimated calls."""
    cluster = Cluster(folder)
    await cluster.fill()
    job = next(iter(cluster.scheduler.state.jobs.values()))
    known = {
        "tree": "default", "pool": "p7", "operation": job.element.operation.id, "job": job.id, "node": job.node.id,
        "number": "1", "token": "x",
    }  # fmt: skip
    by_name = {each.name: each for each in ENDPOINTS}
    for name in [*(name for name in by_name if name not in (*LAST, *ASK_NODES)), *LAST]:
        endpoint = by_name[name]
        path = endpoint.path.format_map({**known, "pool": "p8"} if name == "remove_pool" else known)
        for asked in CASES.get(name, [Asked()]):
            cluster.counted.clear()
            with meter() as measured:
                request = cluster.client.request(endpoint.method, f"{path}?{asked.query}", json=asked.body)
                answer = await asyncio.create_task(request)
            yield name, answer, measured, STEPS * sum(cluster.counted)
    await cluster.close()


@pytest.mark.timeout(1800)
def test_no_request_holds_the_loop_for_long_and_its_user_pays_for_it(tmp_path: Path) -> None:
    async def measure() -> list[str]:
        return [
            f"{name}: {answer.text[:60]!r}, {steps.most} calls in one turn, {steps.total}, estimated {estimated}"
            async for name, answer, steps, estimated in ask_all(tmp_path, Steps)
            if steps.most > MORE_STEPS.get(name, MAX_STEPS) or steps.total > estimated + CLIENT_STEPS
        ]

    assert asyncio.run(measure()) == []


def test_what_is_asked_is_asked_of_endpoints() -> None:
    assert {*CASES, *ASK_NODES, *LAST} <= {endpoint.name for endpoint in ENDPOINTS}
