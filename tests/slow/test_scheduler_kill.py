"""``cpumond scheduler`` under SIGKILL at any moment, with clients that write all the time.

Each client keeps to pools and operations of its own and knows what it was told: after each kill everything that was
acknowledged must be there, and of the command without an answer all or nothing. A client of the ``yt`` protocol then
sends it again with its mutation id, as the real one does; it must be carried out once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from scheduler_process import PlayedNode, SchedulerProcess, clean_environment

from cpumond.api.yt.yson import read_yson, write_yson

KILLS = 110
YT_CLIENTS = 2
MAX_RUN_S = 0.15
KEPT_OPERATIONS = 150
"""Finished operations that the scheduler remembers; older ones are not asked for."""

LIVE_STATES = ("pending", "running")

LAUNCHER = """
import os, sys
from cpumond.cli import main
from cpumond.api.server import make_app
from cpumond.scheduler.program.main import run_scheduler

for line in sys.stdin:
    pid = os.fork()
    if not pid:
        log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0), os.dup2(null, 1), os.dup2(log, 2)
        code = 99
        try:
            code = run_scheduler(sys.argv[1], make_app)
        finally:
            os._exit(code)
    os.write(1, b"%d\\n" % pid)
    status = os.waitpid(pid, 0)[1]
    os.write(1, b"%d\\n" % os.waitstatus_to_exitcode(status))
"""
"""Starts a scheduler for each line of its input, by fork: everything is imported already."""


class Forked(SchedulerProcess):
    """A scheduler that starts in a few milliseconds."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._launcher: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def _read(self) -> int:
        assert self._launcher is not None
        assert self._launcher.stdout is not None
        assert select.select([self._launcher.stdout], [], [], 30.0)[0], "the launcher is silent"
        return int(self._launcher.stdout.readline())

    def fork(self) -> None:
        """Start it, and do not wait until it is ready."""
        if self._launcher is None:
            self._launcher = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, str(self.config_path), str(self.log_path)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=clean_environment(),
            )  # fmt: skip
        assert self._launcher.stdin is not None
        self._log_offset = self.log_path.stat().st_size if self.log_path.exists() else 0
        self._launcher.stdin.write(b"start\n")
        self._pid = self._read()

    def wait_ready(self) -> None:
        """Wait until it listens."""
        pause, deadline_s = threading.Event(), time.monotonic() + 100.0
        while not (started := self.events("started", since=self._log_offset)):
            assert time.monotonic() < deadline_s, f"it does not start: {self.log()[-2000:]}"
            os.kill(self._pid, 0)
            pause.wait(0.002)
        self.address = started[0]["listen"]

    def kill_now(self) -> None:
        """SIGKILL, and wait for the end."""
        os.kill(self._pid, signal.SIGKILL)
        self._forget_run(-signal.SIGKILL)

    def end(self) -> None:
        """SIGTERM, and wait for the end."""
        os.kill(self._pid, signal.SIGTERM)
        self._forget_run(0)

    def _forget_run(self, expected: int) -> None:
        assert self._read() == expected, self.log()[-2000:]
        self._pid = 0
        self._close_client()

    def close(self) -> None:
        if self._launcher is not None:
            if self._pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
            assert self._launcher.stdin is not None
            assert self._launcher.stdout is not None
            self._launcher.stdin.close()
            self._launcher.wait(30)
            self._launcher.stdout.close()
        super().close()


# --- what a client believes ------------------------------------------------------------------------------------------


Pools = dict[str, tuple[str, float | None]]
"""Name -> parent and weight."""


class Step:
    """One command: its request, and what it makes of pools and operations (title -> whether it lives)."""

    def __init__(self, name: str, request: dict[str, Any], change: Callable[[Pools, dict[str, bool]], None]) -> None:
        self.name = name
        self.request = request
        self.change = change
        self.mutation_id = "-".join(f"{random.getrandbits(32) or 1:x}" for _ in range(4))
        self.reply: bytes = b""


class Client:
    """A client that writes until the scheduler is gone. Pools are below its parents ``k-left`` and ``k-right``."""

    def __init__(self, scheduler: SchedulerProcess, key: str, speaks_yt: bool) -> None:
        self.scheduler = scheduler
        self.key = key
        self.speaks_yt = speaks_yt
        self.rng = random.Random()
        self.numbers = itertools.count()
        self.parents = (f"{key}-left", f"{key}-right")
        self.pools: Pools = {}
        self.operations: dict[str, bool] = {}
        self.ids: dict[str, str] = {}
        """Of operations, by title."""
        self.pending: Step | None = None
        self.last: Step | None = None
        self.acknowledged: Counter[str] = Counter()
        self.problem = ""

    # One command.

    def choose(self) -> Step:
        """A command that is in order."""
        live = [title for title, lives in self.operations.items() if lives]
        kinds = ["create"] * 3 + ["start"] * 2 + (["set", "move", "remove", "batch"] if self.pools else [])
        kinds += ["abort"] * len(live)
        return getattr(self, "_" + self.rng.choice(kinds))()  # type: ignore[no-any-return]

    def _path(self, pool: str) -> str:
        return f"//sys/pools/{self.pools[pool][0]}/{pool}"

    def _create(self) -> Step:
        name, parent = f"{self.key}-{next(self.numbers)}", self.rng.choice(self.parents)
        attributes = {"name": name, "parent_name": parent, "weight": 2.0}

        def change(pools: Pools, _: dict[str, bool]) -> None:
            pools[name] = (parent, 2.0)

        return Step("create", {"type": "scheduler_pool", "attributes": attributes}, change)

    def _batch(self) -> Step:
        steps = [self._create(), self._create()]
        requests = [{"command": step.name, "parameters": step.request} for step in steps]

        def change(pools: Pools, operations: dict[str, bool]) -> None:
            for step in steps:
                step.change(pools, operations)

        return Step("execute_batch", {"requests": requests}, change)

    def _set(self) -> Step:
        name, weight = self.rng.choice(list(self.pools)), float(self.rng.randrange(1, 1000))

        def change(pools: Pools, _: dict[str, bool]) -> None:
            pools[name] = (pools[name][0], weight)

        return Step("set", {"path": f"{self._path(name)}/@weight", "value": weight, "pool": name}, change)

    def _move(self) -> Step:
        name = self.rng.choice(list(self.pools))
        target, parent = f"{self.key}-{next(self.numbers)}", self.rng.choice(self.parents)

        def change(pools: Pools, _: dict[str, bool]) -> None:
            pools[target] = (parent, pools.pop(name)[1])

        return Step(
            "move",
            {"source_path": self._path(name), "destination_path": f"//sys/pools/{parent}/{target}", "pool": name},
            change,
        )

    def _remove(self) -> Step:
        name = self.rng.choice(list(self.pools))

        def change(pools: Pools, _: dict[str, bool]) -> None:
            del pools[name]

        return Step("remove", {"path": self._path(name), "pool": name}, change)

    def _start(self) -> Step:
        title = f"{self.key}/{next(self.numbers)}"
        task = {"job_count": 1, "cpu_limit": 1e6, "command": "true"}  # larger than any node: it never runs
        spec = {"pool": f"{self.key}-work", "title": title, "tasks": {"t": task}}

        def change(_: Pools, operations: dict[str, bool]) -> None:
            operations[title] = True

        return Step("start_operation", {"operation_type": "vanilla", "spec": spec, "title": title}, change)

    def _abort(self) -> Step:
        title = self.rng.choice([title for title, lives in self.operations.items() if lives])

        def change(_: Pools, operations: dict[str, bool]) -> None:
            operations[title] = False

        return Step("abort_operation", {"operation_id": self.ids[title], "title": title}, change)

    # Requests.

    def send(self, http: httpx2.Client, step: Step, retry: bool = False) -> httpx2.Response:
        """One command."""
        if not self.speaks_yt:
            return self._send_json(http, step)
        known = {name: value for name, value in step.request.items() if name not in ("value", "pool", "title")}
        parameters = write_yson({**known, "mutation_id": step.mutation_id, "retry": retry})
        form = {"X-YT-Header-Format": "<format=text>yson"}
        if step.name == "set":
            headers = {**form, "X-YT-Parameters": parameters.decode("latin-1")}
            return http.put("/api/v4/set", content=write_yson(step.request["value"]), headers=headers)
        return http.post(f"/api/v4/{step.name}", content=parameters, headers=form)

    def _send_json(self, http: httpx2.Client, step: Step) -> httpx2.Response:
        request, pools = step.request, "/api/v1/trees/default/pools"
        if step.name == "create":
            given = request["attributes"]
            body = {"name": given["name"], "parent": given["parent_name"], "attributes": {"weight": given["weight"]}}
            return http.post(pools, json=body)
        if step.name == "set":
            edit = {"path": ["weight"], "value": request["value"]}
            return http.patch(f"{pools}/{request['pool']}", json={"edits": [edit]})
        if step.name == "move":
            _, _, _, _, parent, name = request["destination_path"].split("/")
            return http.post(f"{pools}/{request['pool']}/move", json={"parent": parent, "name": name})
        if step.name == "remove":
            return http.delete(f"{pools}/{request['pool']}")
        if step.name == "start_operation":
            return http.post("/api/v1/operations", json={"spec": request["spec"]})
        return http.post(f"/api/v1/operations/{request['operation_id']}/abort")

    def accept(self, step: Step, answer: httpx2.Response) -> None:
        """A command was acknowledged."""
        step.change(self.pools, self.operations)
        if step.name == "start_operation":
            found = read_yson(answer.content)["operation_id"] if self.speaks_yt else answer.json()["id"]
            self.ids[step.request["title"]] = found
        self.acknowledged[step.name] += 1
        step.reply = answer.content
        self.last, self.pending = step, None

    def write(self) -> None:
        """Commands, one after the other, until the scheduler is gone."""
        with self.scheduler.new_client() as http:
            while True:
                step = self.choose()
                if step.name == "execute_batch" and not self.speaks_yt:
                    continue
                self.pending = step
                try:
                    answer = self.send(http, step)
                except httpx2.TransportError:
                    return
                if answer.status_code not in (200, 201) or b"error" in answer.content:
                    self.problem = f"{step.name} {step.request}: {answer.status_code} {answer.text}"
                    return
                self.accept(step, answer)

    # After the kill.

    def settle(self, http: httpx2.Client) -> None:
        """Send again what has no answer; what has one is answered the same."""
        if not self.speaks_yt:
            return
        if self.last is not None:
            again = self.send(http, self.last, retry=True)
            assert (again.status_code, again.content) == (200, self.last.reply), f"{self.last.name}: {again.text}"
        if self.pending is not None:
            answer = self.send(http, self.pending, retry=True)
            assert answer.status_code == 200, f"{self.pending.name} {self.pending.request}: {answer.text}"
            assert b"error" not in answer.content, answer.text
            self.accept(self.pending, answer)

    def check(self, pools: Pools, operations: dict[str, list[tuple[str, bool]]]) -> None:
        """Compare with what the scheduler has: pools, and operations by title with id and whether each lives."""
        mine = {name: place for name, place in pools.items() if place[0] in self.parents}
        running = {title: found for title, found in operations.items() if title.startswith(f"{self.key}/")}
        assert all(len(found) == 1 for found in running.values()), "a command was carried out twice"
        seen = {title: found[0][1] for title, found in running.items()}

        def agrees() -> bool:
            known = {title: lives for title, lives in self.operations.items() if lives or title in seen}
            return mine == self.pools and seen == known

        if not agrees() and self.pending is not None:
            self.pending.change(self.pools, self.operations)
            if self.pending.name == "start_operation":
                title = self.pending.request["title"]
                self.ids[title] = running[title][0][0] if title in running else ""
        self.pending = None
        known = {title: lives for title, lives in self.operations.items() if lives or title in seen}
        assert mine == self.pools
        assert seen == known
        recent = list(self.operations)[-20:]
        assert set(recent) <= set(seen), "a finished operation was forgotten too early"


# --- the test --------------------------------------------------------------------------------------------------------


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Forked]:
    process = Forked(tmp_path)
    process.write_config(
        f'node_heartbeat_timeout = "1h"\nfinished_operation_retention_count = {KEPT_OPERATIONS}\n',
        api="rate_limit = 0.0", period="20ms",
    )  # fmt: skip
    yield process
    process.close()


def look(scheduler: Forked) -> tuple[Pools, dict[str, list[tuple[str, bool]]]]:
    """All pools and operations."""
    pools = {pool["name"]: (pool["parent"], pool["weight"]) for pool in scheduler.get("trees/default/pools")["pools"]}
    operations: dict[str, list[tuple[str, bool]]] = {}
    for each in scheduler.get("operations?limit=1000")["operations"]:
        operations.setdefault(each["title"], []).append((each["id"], each["state"] in LIVE_STATES))
    return pools, operations


class Volumes:
    """What the volume of the pool ``saving`` was seen to be; it has no work, and only grows."""

    PATH = "/api/v1/trees/default/pools/saving"

    def __init__(self, scheduler: Forked) -> None:
        self.scheduler = scheduler
        self.seen = [0.0, 0.0]

    def watch(self) -> None:
        """Ask until the scheduler is gone. An update begins when the one before is stored: only the last is lost."""
        pause = threading.Event()
        with self.scheduler.new_client() as http, contextlib.suppress(httpx2.TransportError):
            while not pause.wait(0.004):
                volume = http.get(self.PATH).json()["volume"]["cpu"]
                if volume != self.seen[-1]:
                    self.seen = [self.seen[-1], volume]

    def check(self) -> None:
        """At most the last update is lost."""
        volume = self.scheduler.get(self.PATH)["volume"]["cpu"]
        assert volume >= self.seen[0], f"{volume} after {self.seen}"
        self.seen = [volume, volume]


def test_nothing_that_was_acknowledged_is_lost(scheduler):
    scheduler.fork()
    scheduler.wait_ready()
    PlayedNode(scheduler, "node-1", cpu=100.0).register()
    scheduler.create_pool("saving", integral_guarantees={"guarantee_type": "relaxed", "resource_flow": {"cpu": 50.0}})
    clients = [Client(scheduler, f"c{number}", number < YT_CLIENTS) for number in range(YT_CLIENTS + 1)]
    for client in clients:
        for pool in (*client.parents, f"{client.key}-work"):
            scheduler.create_pool(pool, max_operation_count=1000)
    volumes, rng, pause = Volumes(scheduler), random.Random(), threading.Event()
    repeated: Counter[str] = Counter()

    for number in range(KILLS):
        if number % 8 == 7:  # while it starts
            scheduler.kill_now()
            scheduler.fork()
            pause.wait(rng.uniform(0.0, 0.04))
            scheduler.kill_now()
        else:
            threads = [threading.Thread(target=work) for work in (*(c.write for c in clients), volumes.watch)]
            for thread in threads:
                thread.start()
            pause.wait(rng.uniform(0.0, MAX_RUN_S))
            scheduler.kill_now()
            for thread in threads:
                thread.join(30.0)
                assert not thread.is_alive()
        scheduler.fork()
        scheduler.wait_ready()
        assert [client.problem for client in clients if client.problem] == []
        volumes.check()
        for client in clients:
            if client.pending is not None:
                repeated[client.pending.name] += client.speaks_yt
            client.settle(scheduler.client)
        found = look(scheduler)
        for client in clients:
            client.check(*found)

    scheduler.end()
    with contextlib.closing(sqlite3.connect(scheduler.state_dir / "scheduler.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    total = sum((client.acknowledged for client in clients), Counter[str]())
    assert set(total) == {"create", "execute_batch", "set", "move", "remove", "start_operation", "abort_operation"}
    assert sum(total.values()) > 2 * KILLS
    assert volumes.seen[-1] > 0.0
    assert "Traceback" not in scheduler.log()
    print(f"{KILLS} kills, acknowledged {json.dumps(total)}, sent again {json.dumps(repeated)}")
