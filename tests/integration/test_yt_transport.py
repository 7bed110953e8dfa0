"""The transport of the ``yt`` protocol on a real socket: the unmodified ``yt`` command line, and raw requests.

The command line runs without the C++ bindings here, unless the environment has them; what a client with bindings sends
and wants is sent by raw requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request

from cpumond.api.formats import Attributed, Uint, read_yson, write_yson
from cpumond.api.ypath import YPath, parse_ypath
from cpumond.api.yt import ReplyCache, YtError, YtLimits, YtRequest, make_yt_routes
from cpumond.errors import UnavailableError

YT = Path(sys.executable).with_name("yt")


@dataclass
class Node:
    children: dict[str, Node] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)


class Toy:
    """A tree of nodes with attributes, and a list of operations; just enough for every verb to mean something."""

    def __init__(self) -> None:
        self.root = Node()
        self.seen: list[YtRequest] = []
        self.operations: dict[str, dict[str, Any]] = {}
        self.gate: asyncio.Event | None = None
        self.started = threading.Event()

    async def __call__(self, request: YtRequest) -> Any:
        self.seen.append(request)
        handler = getattr(self, f"do_{request.command}", None)
        if handler is None:
            raise UnavailableError(f"the toy has no {request.command}")
        return await handler(request.parameters, request.value)

    def find(self, path: YPath) -> Node:
        node, walked = self.root, "/"
        for step in path.steps:
            if step not in node.children:
                reason = YtError(f'Node {walked} has no child with key "{step}"', 500)
                raise YtError(f"Error resolving path {path}", 500, {"path": str(path)}, [reason])
            node, walked = node.children[step], f"{walked}/{step}"
        return node

    def show(self, node: Node, names: list[str]) -> Any:
        value = {name: self.show(child, names) for name, child in node.children.items()}
        return Attributed(value, {name: node.attributes[name] for name in names if name in node.attributes})

    async def do_get(self, parameters: dict[str, Any], _: Any) -> Any:
        path = parse_ypath(parameters["path"])
        node = self.find(path)
        if path.attribute is None:
            return {"value": self.show(node, parameters.get("attributes", []))}
        value: Any = node.attributes
        for key in path.attribute:
            if key not in value:
                raise YtError(f'Attribute "{key}" is not found', 500)
            value = value[key]
        return {"value": value}

    async def do_list(self, parameters: dict[str, Any], _: Any) -> Any:
        return {"value": list(self.find(parse_ypath(parameters["path"])).children)}

    async def do_exists(self, parameters: dict[str, Any], _: Any) -> Any:
        try:
            await self.do_get(parameters, None)
        except YtError:
            return {"value": False}
        return {"value": True}

    async def do_set(self, parameters: dict[str, Any], value: Any) -> Any:
        path = parse_ypath(parameters["path"])
        assert path.attribute
        self.find(path).attributes[path.attribute[0]] = value
        return {}

    async def do_multiset_attributes(self, parameters: dict[str, Any], value: Any) -> Any:
        self.find(parse_ypath(parameters["path"])).attributes.update(value)
        return {}

    async def do_create(self, parameters: dict[str, Any], _: Any) -> Any:
        if self.gate is not None:
            self.started.set()
            await self.gate.wait()
        attributes = dict(parameters["attributes"])
        name = attributes.pop("name")
        parent = attributes.get("parent_name")
        children = self.find(parse_ypath("//sys/pools" + (f"/{parent}" if parent else ""))).children
        if name in children:
            raise YtError(f"Pool '{name}' already exists", 501)
        children[name] = Node(attributes=attributes)
        return {"object_id": f"1-2-3-{len(children)}"}

    async def do_remove(self, parameters: dict[str, Any], _: Any) -> Any:
        path = parse_ypath(parameters["path"])
        if self.find(path).children and not parameters.get("recursive"):
            raise YtError("Cannot remove non-empty composite node")
        del self.find(YPath(path.root, path.steps[:-1])).children[path.steps[-1]]
        return {}

    async def do_move(self, parameters: dict[str, Any], _: Any) -> Any:
        source, target = (parse_ypath(parameters[name]) for name in ("source_path", "destination_path"))
        node = self.find(source)
        await self.do_remove({"path": str(source), "recursive": True}, None)
        self.find(YPath(target.root, target.steps[:-1])).children[target.steps[-1]] = node
        return {"node_id": "5-6-7-8"}

    async def do_start_operation(self, parameters: dict[str, Any], _: Any) -> Any:
        name = f"a-b-c-{len(self.operations) + 1:x}"
        self.operations[name] = {"id": name, "type": parameters["operation_type"], "state": "running"}
        return {"operation_id": name}

    async def do_list_operations(self, _: dict[str, Any], __: Any) -> Any:
        return {"operations": list(self.operations.values()), "incomplete": False}

    async def do_get_operation(self, parameters: dict[str, Any], _: Any) -> Any:
        name = parameters["operation_id"]
        if name not in self.operations:
            raise YtError(f"No such operation {name}", 1915)
        return self.operations[name]

    async def do_get_version(self, _: dict[str, Any], __: Any) -> Any:
        raise ZeroDivisionError("a bug in the backend")


@dataclass
class Served:
    """A server in a thread, and what is behind it."""

    toy: Toy
    replies: ReplyCache
    port: int
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=20.0, trust_env=False, **options)

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("YT_")}
        return {
            **kept,
            "YT_PROXY": f"127.0.0.1:{self.port}",
            "YT_CONFIG_PATCHES": "{proxy={retries={enable=%false}}}",
            "NO_PROXY": "*",
            "PYTHONIOENCODING": "utf-8",
            **more,
        }

    def yt(self, *arguments: str, given: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(YT), *arguments], env=self.environment(**environment), input=given, capture_output=True, text=True,
            timeout=60, check=False, encoding="utf-8",
        )  # fmt: skip


def authenticate(request: Request) -> str:
    given = request.headers.get("authorization", "")
    if given in ("", "OAuth good"):
        return "root"
    if given == "OAuth other":
        return "other"
    raise YtError("the token is not known", 900)


LIMITS = YtLimits(max_body_bytes=64 * 1024, max_batch_requests=20, requests_per_s=1000.0, burst_requests=1000.0)


def serve(limits: YtLimits) -> Iterator[Served]:
    toy, replies = Toy(), ReplyCache(lambda: 1000.0)
    pools = toy.root.children.setdefault("sys", Node()).children.setdefault("pools", Node())
    pools.children["research"] = Node({"a": Node()}, {"weight": 2.5, "count": Uint(3), "пояснение": "для всех"})
    sock = socket.create_server(("127.0.0.1", 0))
    app = Starlette(routes=make_yt_routes(toy, authenticate, limits, replies))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="error", lifespan="off", ws="none"))
    ready: list[asyncio.AbstractEventLoop] = []
    started = threading.Event()

    async def run() -> None:
        ready.append(asyncio.get_running_loop())
        started.set()
        await server.serve([sock])

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert started.wait(10)
    yield Served(toy, replies, sock.getsockname()[1], ready[0])
    server.should_exit = True
    thread.join(10)
    sock.close()
    assert not thread.is_alive()


@pytest.fixture
def served() -> Iterator[Served]:
    yield from serve(LIMITS)


def parameters(**values: Any) -> dict[str, str]:
    """The headers of a command as a client sends them."""
    return {"X-YT-Header-Format": "<format=text>yson", "X-YT-Parameters": write_yson(values).decode()}


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line_reads(served):
    runs = {
        "get": ("get", "//sys/pools/research/@weight"),
        "pretty": ("get", "//sys/pools"),
        "attribute": ("get", "//sys/pools", "--attribute", "weight"),
        "list": ("list", "//sys/pools"),
        "list json": ("list", "//sys/pools", "--format", "json"),
        "exists": ("exists", "//sys/pools/nope"),
        "get json": ("get", "//sys/pools/research/@", "--format", "json"),
        "operations": ("list-operations",),
        "missing": ("get", "//sys/pools/nope/@weight"),
    }
    served.toy.operations["1-2-3-4"] = {"id": "1-2-3-4", "type": "vanilla", "state": "running"}
    with ThreadPoolExecutor(3) as pool:
        done = dict(zip(runs, pool.map(lambda run: served.yt(*run), runs.values()), strict=True))
    assert {name: run.returncode for name, run in done.items()} == {name: int(name == "missing") for name in runs}
    out = {name: run.stdout for name, run in done.items()}
    assert out["get"] == "2.5\n"
    assert out["pretty"] == '{\n    "research" = {\n        "a" = {};\n    };\n}\n'
    assert out["attribute"] == (
        '{\n    "research" = <\n        "weight" = 2.5;\n    > {\n        "a" = {};\n    };\n}\n'
    )
    assert out["list"] == "research\n"
    assert json.loads(out["list json"]) == ["research"]
    assert out["exists"] == "false\n"
    attributes = json.loads(out["get json"])
    assert attributes["weight"] == 2.5
    assert {key.encode("latin-1").decode(): value for key, value in attributes.items()}.keys() >= {"пояснение"}
    assert "1-2-3-4" in out["operations"]
    assert "Error resolving path //sys/pools/nope" in done["missing"].stderr
    assert 'Node //sys/pools has no child with key "nope"' in done["missing"].stderr


def test_the_command_line_changes(served):
    made = served.yt("create", "scheduler_pool", "--attributes", '{name="пул";parent_name=research;weight=2.0}')
    assert (made.returncode, made.stdout) == (0, "1-2-3-2\n"), made.stderr
    pool = served.toy.find(parse_ypath("//sys/pools/research/пул"))
    assert pool.attributes == {"parent_name": "research", "weight": 2.0}

    again = served.yt("create", "scheduler_pool", "--attributes", '{name="пул";parent_name=research}')
    assert again.returncode == 1
    assert "Pool 'пул' already exists" in again.stderr
    assert "Traceback" not in again.stderr

    runs = [
        ("set", "//sys/pools/research/пул/@weight", "3"),
        ("set", "--format", "json", "//sys/pools/research/@note", '{"a": "для всех", "b": [1.5, null, true]}'),
        ("set", "//sys/pools/research/@broken", "{broken"),
        ("remove", "//sys/pools/research"),
        ("execute", "multiset_attributes", '{path="//sys/pools/research/a/@"}'),
    ]
    given = [None, None, None, None, '{mode=fifo;"заметка"="да"}']
    with ThreadPoolExecutor(3) as workers:
        done = list(workers.map(lambda run, text: served.yt(*run, given=text), runs, given))
    assert [run.returncode for run in done] == [0, 0, 1, 1, 0], [run.stderr for run in done]
    assert pool.attributes["weight"] == 3
    research = served.toy.find(parse_ypath("//sys/pools/research"))
    assert research.attributes["note"] == {"a": "для всех", "b": [1.5, None, True]}
    assert 'Error parsing request: value: expected "=", but the text ends at offset 7' in done[2].stderr
    assert "Cannot remove non-empty composite node" in done[3].stderr
    assert research.children["a"].attributes == {"mode": "fifo", "заметка": "да"}

    moved = served.yt("move", "//sys/pools/research/пул", "//sys/pools/новый")
    assert moved.returncode == 0, moved.stderr
    listed = served.yt("list", "//sys/pools")
    assert listed.stdout.split() == ["research", "новый"]
    removed = served.yt("remove", "-r", "//sys/pools/research")
    assert removed.returncode == 0, removed.stderr
    assert list(served.toy.root.children["sys"].children["pools"].children) == ["новый"]


def test_the_command_line_speaks_json_when_told(served):
    json_format = {"YT_STRUCTURED_DATA_FORMAT": "json"}
    done = served.yt("set", "//sys/pools/research/@note", '"обед"', **json_format)
    assert done.returncode == 0, done.stderr
    assert served.toy.find(parse_ypath("//sys/pools/research")).attributes["note"] == "обед"
    done = served.yt("get", "//sys/pools/research/@weight", **json_format)
    assert (done.returncode, done.stdout) == (0, "2.5\n"), done.stderr
    done = served.yt("create", "scheduler_pool", "--attributes", '{name="два"}', **json_format)
    assert done.returncode == 0, done.stderr
    assert "два" in served.toy.root.children["sys"].children["pools"].children


def test_the_command_line_sends_a_batch_and_starts_an_operation(served):
    requests = (
        '{requests=[{command=get;parameters={path="//sys/pools/research/@weight"}};{command=get;parameters='
        '{path="//sys/none"}};{command=list;parameters={path="//sys/pools";return_only_value=%true}};{command=set;'
        'parameters={path="//sys/pools/research/@x"};input=5};{command=nonsense;parameters={}};]}'
    )
    done = served.yt("execute", "execute_batch", requests)
    assert done.returncode == 0, done.stderr
    results = read_yson(done.stdout.encode())["results"]
    assert results[0] == {"output": {"value": 2.5}}
    assert results[1]["error"]["code"] == 500
    assert results[1]["error"]["inner_errors"][0]["message"] == 'Node //sys has no child with key "none"'
    assert results[2] == {"output": ["research"]}
    assert results[3] == {"output": {}}
    assert 'unknown command "nonsense"' in results[4]["error"]["message"]
    assert served.toy.find(parse_ypath("//sys/pools/research")).attributes["x"] == 5

    started = served.yt("execute", "start_operation", "{operation_type=vanilla;spec={pool=p}}")
    assert read_yson(started.stdout.encode()) == {"operation_id": "a-b-c-1"}


def test_the_command_line_explains_a_refused_token(served):
    done = served.yt("list", "//sys/pools", YT_TOKEN="bad")
    assert done.returncode == 1
    assert "the token is not known" in done.stderr


def test_the_command_line_with_another_api_version(served):
    done = served.yt("list", "//sys/pools", YT_VERSION="v3")
    assert done.returncode == 1
    assert "there is no /api/v3 here" in done.stderr
