"""Each cell of the table of ``packaging/access_table.py``, tried by requests: "-" must be refused, "yes" must not."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from packaging_script import load_script
from scheduler_process import GIB, PlayedNode, SchedulerProcess
from starlette.routing import Route
from waiting import wait_until

from cpumond.api.server import make_app
from cpumond.scheduler.model import ACCESS_DENIED, AUTHENTICATION, Rules
from cpumond.scheduler.program.config import Api
from cpumond.scheduler.program.identities import Identities
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.store.sqlite import open_sqlite_store

TABLE = load_script("access_table")
REFUSED = (AUTHENTICATION, ACCESS_DENIED)

MARKS = {"user": "user", "owner": "user", "manager": "user", "node": "node", "administrator": "admin"}
"""Role -> that of its token. Tokens and users are the roles' names with a 1: "owner" is a subject."""

POOL, OTHER = "team-a", "team-b"
MODE = [{"path": ["mode"], "value": "fifo"}]


class Asked(NamedTuple):
    """A request: ``body`` is JSON, ``query`` stands behind the question mark."""

    method: str
    path: str
    body: Any = None
    query: dict[str, str] | None = None


class Site:
    """A scheduler with a token for each role, and two pools inside of one that its manager administers."""

    def __init__(self, directory: Path) -> None:
        self.scheduler = SchedulerProcess(directory)
        tokens = self.scheduler.write_tokens({f"{role}-1": mark for role, mark in MARKS.items()})
        # A simulation goes through its horizon in such steps.
        config = 'node_heartbeat_timeout = "1s"\n[forecast]\nhorizon = "1m"'
        self.scheduler.write_config(config, api=tokens, period="500ms")
        self.scheduler.start()
        self.job = self.operation = ""
        self.names = (f"new-{number}" for number in itertools.count(1))
        self.clients = {
            role: httpx2.Client(
                base_url=self.scheduler.url, trust_env=False, timeout=250,
                headers={} if role == "anonymous" else {"authorization": f"Bearer {role}-1"},
            )
            for role in TABLE.ROLES
        }  # fmt: skip

    def prepare(self) -> None:
        for name, parent in (("team", "<Root>"), (POOL, "team"), (OTHER, "team")):
            self.make_pool(name, parent)
        self.operation = self.start()
        self.run_a_job()

    def run_a_job(self) -> None:
        self.scheduler.use_token("node-1")
        node = PlayedNode(self.scheduler, "n1")
        node.register()
        wait_until(lambda: node.beat() and node.jobs, "the job is started")
        node.beat()
        (self.job,) = node.jobs
        wait_until(lambda: not self.do("GET", "nodes/n1")["is_online"], "the node is missed")

    def do(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.clients["administrator"].request(method, f"/api/v1/{path}", json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def set_acl(self, *owner_may: str) -> None:
        """The manager administers ``team``; the owner of operations has what the case needs."""
        acl = [{"action": "allow", "subjects": ["manager-1"], "permissions": ["administer"]}]
        if owner_may:
            acl.append({"action": "allow", "subjects": ["owner-1"], "permissions": list(owner_may)})
        self.do("PATCH", "trees/default/pools/team", {"edits": [{"path": ["acl"], "value": acl}]})

    def make_pool(self, name: str = "", parent: str = "team") -> str:
        name = name or next(self.names)
        more = {"max_operation_count": 1000} if name in ("team", POOL) else {}
        self.do("POST", "trees/default/pools", {"name": name, "parent": parent, "attributes": more})
        return name

    def set_stage(self) -> str:
        name = next(self.names)
        self.do("POST", "rollout", {"nodes_filter": name, "level": "weight"})
        return name

    def make_tree(self) -> str:
        name = next(self.names)
        self.do("POST", "trees", {"name": name, "attributes": {"nodes_filter": name}})
        return name

    def start(self, suspended: bool = False) -> str:
        """An operation of the owner's, who may start none afterwards."""
        self.set_acl("use")
        task = {"job_count": 1, "cpu_limit": 1.0, "memory_limit": GIB, "command": "true"}
        spec = {"spec": {"pool": POOL, "tasks": {"t": task}}}
        answer = self.clients["owner"].post("/api/v1/operations", json=spec)
        assert answer.status_code == 201, answer.text
        self.set_acl()
        made = str(answer.json()["id"])
        if suspended:
            self.do("POST", f"operations/{made}/suspend")
        return made

    def change(self) -> int:
        """A change of a pool that can be taken back: its number."""
        self.do("PATCH", f"trees/default/pools/{self.make_pool()}", {"edits": MODE})
        return int(self.do("GET", "events?kind=command&limit=1")["events"][0]["number"])

    def change_file(self) -> dict[str, Any]:
        """The tree's file with another attribute of a pool."""
        tables = self.do("GET", "trees/default/file")["tables"]
        (pool,) = (each for each in tables["pools"] if each["name"] == OTHER)
        pool["attributes"] = {"label": next(self.names)}
        return {"tables": {"pools": tables["pools"]}}

    def make_token(self, role: str) -> str:
        """The id of a token of that role's user, any id where it can have none."""
        answer = self.clients[role].post("/api/v1/tokens", json={})
        return str(answer.json()["id"]) if answer.status_code == 201 else "0123456789abcdef"

    def is_refused(self, role: str, asked: Asked) -> tuple[bool, str]:
        """Whether the request is refused for want of a token or of rights, and the whole answer."""
        method, path, body, query = asked
        answer = self.clients[role].request(method, path, json=body, params=query)
        told = answer.json() if answer.headers.get("content-type", "").startswith("application/json") else None
        code = told.get("code") if isinstance(told, dict) else None
        assert answer.status_code < 500 or answer.status_code in (503, 504), answer.text
        if path == "/api/v4/execute_batch" and answer.status_code == 200:
            code = (told or [{}])[0].get("error", {}).get("code") if isinstance(told, list) else code
        return answer.status_code in (401, 403) or code in REFUSED, f"{answer.status_code} {answer.text[:300]}"

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        self.scheduler.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with contextlib.closing(Site(tmp_path_factory.mktemp("table"))) as made:
        made.prepare()
        yield made


Make = Callable[[Site, str], Asked]


def _api(method: str, path: str, body: Any = None, **query: str) -> Asked:
    return Asked(method, f"/api/v1/{path}", body, query or None)


def _yt(command: str, **parameters: Any) -> Asked:
    """A command of ``yt``; ``value`` is the body of those that take one."""
    if "value" not in parameters:
        return Asked("POST", f"/api/v4/{command}", parameters)
    value = parameters.pop("value")
    return Asked("PUT", f"/api/v4/{command}", value, {**parameters, "input_format": "json"})


def _of_operation(method: str, action: str, body: Any = None, suspended: bool = False) -> Make:
    return lambda site, _: _api(method, f"operations/{site.start(suspended)}{action}", body)


_TRANSFER = {"max_operation_count": 0}
_POOLS = "//sys/pool_trees/default/team"

CASES: dict[str, Make] = {
    "POST /api/v1/trees": lambda site, _: _api("POST", "trees", {
        "name": (name := next(site.names)), "attributes": {"nodes_filter": name},
    }),
    "PATCH /api/v1/trees/{tree}": lambda *_: _api(
        "PATCH", "trees/default", {"edits": [{"path": ["max_operation_count"], "value": 49_999}]}
    ),
    "DELETE /api/v1/trees/{tree}": lambda site, _: _api("DELETE", f"trees/{site.make_tree()}"),
    "PUT /api/v1/default_tree": lambda *_: _api("PUT", "default_tree", {"tree": "default"}),
    "POST /api/v1/simulate": lambda site, _: _api(
        "POST", "simulate", {"command": {"type": "ApplyTree", "tree": "default", **site.change_file()}}
    ),
    "POST /api/v1/trees/{tree}/apply": lambda site, _: _api("POST", "trees/default/apply", site.change_file()),
    "POST /api/v1/trees/{tree}/pools": lambda site, _: _api(
        "POST", "trees/default/pools", {"name": next(site.names), "parent": POOL}
    ),
    "PATCH /api/v1/trees/{tree}/pools/{pool}": lambda *_: _api(
        "PATCH", f"trees/default/pools/{OTHER}", {"edits": MODE}
    ),
    "DELETE /api/v1/trees/{tree}/pools/{pool}": lambda site, _: _api(
        "DELETE", f"trees/default/pools/{site.make_pool()}"
    ),
    "POST /api/v1/trees/{tree}/pools/{pool}/move": lambda site, _: _api(
        "POST", f"trees/default/pools/{site.make_pool()}/move", {"parent": OTHER}
    ),
    "POST /api/v1/trees/{tree}/pools/{pool}/transfer": lambda *_: _api(
        "POST", f"trees/default/pools/{POOL}/transfer", {"destination": OTHER, "delta": _TRANSFER}
    ),
    "POST /api/v1/plan": lambda *_: _api(
        "POST", "plan", {"type": "ChangePool", "tree": "default", "pool": OTHER, "edits": MODE}
    ),
    "POST /api/v1/operations": lambda *_: _api(
        "POST", "operations", {"spec": {"pool": POOL, "tasks": {"t": {"job_count": 1, "command": "true"}}}}
    ),
    "PATCH /api/v1/operations/{operation}": _of_operation("PATCH", "", {"parameters": {"weight": 2.0}}),
    "POST /api/v1/operations/{operation}/patch": _of_operation(
        "POST", "/patch", {"patches": [{"path": "/max_failed_job_count", "value": 7}]}
    ),
    "POST /api/v1/operations/{operation}/abort": _of_operation("POST", "/abort"),
    "POST /api/v1/operations/{operation}/suspend": _of_operation("POST", "/suspend"),
    "POST /api/v1/operations/{operation}/resume": _of_operation("POST", "/resume", suspended=True),
    "POST /api/v1/operations/{operation}/complete": _of_operation("POST", "/complete"),
    "POST /api/v1/operations/{operation}/jobs/{job}/pin": lambda site, _: _api(
        "POST", f"operations/{site.operation}/jobs/{site.job}/pin", {}
    ),
    # The one job is left to other requests: these end none.
    **{
        f"POST /api/v1/operations/{{operation}}/jobs/{{job}}/{verb}": _of_operation("POST", f"/jobs/1-2-3-4/{verb}")
        for verb in ("abort", "abandon")
    },
    "POST /api/v1/nodes/{node}/tags": lambda site, _: _api("POST", "nodes/n1/tags", {"add": [f"t-{next(site.names)}"]}),
    "POST /api/v1/rollout/plan": lambda *_: _api("POST", "rollout/plan", {"nodes_filter": "t", "level": "weight"}),
    "POST /api/v1/rollout": lambda site, _: _api(
        "POST", "rollout", {"nodes_filter": next(site.names), "level": "weight"}
    ),
    **{
        f"POST /api/v1/rollout/{verb}": lambda site, _, verb=verb: _api(
            "POST", f"rollout/{verb}", {"nodes_filter": site.set_stage()}
        )
        for verb in ("advance", "stop", "remove")
    },
    "GET /api/v1/trees/{tree}/trends": lambda *_: _api("GET", "trees/default/trends", pools=POOL),
    "GET /api/v1/node_map": lambda *_: _api("GET", "node_map"),
    "GET /api/v1/history": lambda *_: _api("GET", "history", kind="pool", name=POOL),
    "GET /api/v1/can": lambda *_: _api("GET", "can", action="use", object=POOL),
    "POST /api/v1/tokens": lambda *_: _api("POST", "tokens", {}),
    "POST /api/v1/session": lambda *_: _api("POST", "session"),
    "DELETE /api/v1/session": lambda *_: _api("DELETE", "session"),
    "DELETE /api/v1/tokens/{token}": lambda site, role: _api("DELETE", f"tokens/{site.make_token(role)}"),
    "POST /api/v1/events/{number}/undo": lambda site, _: _api("POST", f"events/{site.change()}/undo"),
    "POST /api/v1/nodes": lambda *_: _api(
        "POST", "nodes", {"node_id": "n2", "incarnation": "a", "resources": {"cpu": 1.0}}
    ),
    "POST /api/v1/heartbeats": lambda *_: _api("POST", "heartbeats", {
        "node_id": "n3", "incarnation": "a", "sequence": 1, "sent_at": 0.0, "cpu_capacity": 1.0, "jobs": [],
    }),
    "POST /api/v1/logs": lambda *_: _api("POST", "logs", {"node_id": "n3", "request_id": "1"}),
    "POST /api/v1/replies": lambda *_: _api("POST", "replies", {"node_id": "n3", "request_id": "1"}),
    "GET /web/{name:path}": lambda *_: Asked("GET", "/web/app.js"),
    "yt get": lambda *_: _yt("get", path=f"{_POOLS}/@name"),
    "yt list": lambda *_: _yt("list", path=_POOLS),
    "yt exists": lambda *_: _yt("exists", path=_POOLS),
    "yt get_operation": lambda site, _: _yt("get_operation", operation_id=site.operation),
    "yt list_jobs": lambda site, _: _yt("list_jobs", operation_id=site.operation),
    "yt get_job": lambda site, _: _yt("get_job", operation_id=site.operation, job_id=site.job),
    "yt get_job_stderr": lambda site, _: _yt("get_job_stderr", operation_id=site.operation, job_id=site.job),
    "yt check_permission": lambda _, role: _yt("check_permission", user=f"{role}-1", permission="use", path=_POOLS),
    "yt check_operation_permission": lambda site, role: _yt(
        "check_operation_permission", user=f"{role}-1", permission="manage", operation_id=site.operation
    ),
    "yt create": lambda site, _: _yt(
        "create", type="scheduler_pool", attributes={"name": next(site.names), "parent_name": POOL}
    ),
    "yt remove": lambda site, _: _yt("remove", path=f"{_POOLS}/{site.make_pool()}"),
    "yt move": lambda site, _: _yt(
        "move", source_path=f"{_POOLS}/{(name := site.make_pool())}", destination_path=f"{_POOLS}/{OTHER}/{name}"
    ),
    "yt set": lambda *_: _yt("set", path=f"{_POOLS}/{OTHER}/@mode", value="fifo"),
    "yt multiset_attributes": lambda *_: _yt(
        "multiset_attributes", path=f"{_POOLS}/{OTHER}/@", value={"mode": "fifo"}
    ),
    "yt transfer_pool_resources": lambda *_: _yt(
        "transfer_pool_resources", source_pool=POOL, destination_pool=OTHER, resource_delta=_TRANSFER
    ),
    "yt start_operation": lambda *_: _yt(
        "start_operation", operation_type="vanilla",
        spec={"pool": POOL, "tasks": {"t": {"job_count": 1, "command": "true"}}},
    ),
    "yt abort_operation": lambda site, _: _yt("abort_operation", operation_id=site.start()),
    "yt suspend_operation": lambda site, _: _yt("suspend_operation", operation_id=site.start()),
    "yt resume_operation": lambda site, _: _yt("resume_operation", operation_id=site.start(suspended=True)),
    "yt complete_operation": lambda site, _: _yt("complete_operation", operation_id=site.start()),
    "yt update_operation_parameters": lambda site, _: _yt(
        "update_operation_parameters", operation_id=site.start(), parameters={"weight": 2.0}
    ),
    "yt execute_batch": lambda *_: _yt(
        "execute_batch", requests=[{"command": "exists", "parameters": {"path": _POOLS}}]
    ),
}  # fmt: skip
"""What is asked of each request; those that are not here take nothing but what stands in their path."""


def ask(site: Site, role: str, row: Any) -> Asked:
    if row.request in CASES:
        return CASES[row.request](site, role)
    method, _, path = row.request.partition(" ")
    if method == "yt":
        return _yt(path)
    known = {"tree": "default", "pool": POOL, "operation": site.operation, "job": site.job, "node": "n1"}
    return Asked(method, path.format_map(known))


@pytest.mark.parametrize("row", list(TABLE.list_rows()), ids=lambda row: row.request)
def test_each_cell(site: Site, row: Any) -> None:
    wrong = {}
    for role in TABLE.ROLES:
        is_refused, told = site.is_refused(role, ask(site, role, row))
        if is_refused == row.allows(role):
            wrong[role] = told
    assert not wrong, f"{row.request} needs {row.needs}"


def test_nothing_is_reachable_that_is_not_in_the_table(tmp_path: Path) -> None:
    store = open_sqlite_store(str(tmp_path / "s.db"))
    try:
        scheduler = Scheduler(Rules(), store, Clock())
        app = make_app(scheduler, Api(), Identities(), lambda _: b"", "c")
    finally:
        store.close()
    served = {route.path for route in app.routes if isinstance(route, Route)}
    assert all(isinstance(route, Route) for route in app.routes)
    known = {row.request.partition(" ")[2] for row in TABLE.list_rows() if not row.request.startswith("yt ")}
    assert served == known | set(TABLE.CATCHING)


def test_the_document_has_the_table() -> None:
    text = TABLE.DOCUMENT.read_text(encoding="utf-8")
    assert text == TABLE.write_table(), "make it anew: python packaging/access_table.py"
