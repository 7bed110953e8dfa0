"""What a run ahead foretells is what then happens on a cluster that is played without its code, where both know the
same of the jobs: which job starts where in which order, and when."""

import heapq
import itertools
import random
from typing import Any

import msgspec
import pytest
from examples import ALL, WHOLE
from scheduler_world import EASY, PlayedNode, World

from cpumond.core.wire import JobOrder
from cpumond.scheduler.model import OperationRecord, Rules, Task
from cpumond.scheduler.settings.operations import StartOperation
from cpumond.scheduler.trial.fork import Child, Send
from cpumond.scheduler.trial.forward import Forward, Pace

HEARTBEAT_S = 1.0
UPDATE_S = 1.0
WARM_S, AHEAD_S = 20.0, 120.0
CASES = 50 if ALL else 25 if WHOLE else 10


class Known:
    """The run times of all jobs are known: a number for each operation."""

    def __init__(self, run_s: dict[str, float]) -> None:
        self.run_s = run_s

    def left_s(self, record: OperationRecord, task: Task, ran_s: float) -> float:
        return max(self.run_s[record.title] - ran_s, 0.0)

    def limit_of(self, record: OperationRecord, task: Task) -> tuple[float, float]:
        return 1.0, 0.0

    def next_arrival(self, after: float) -> tuple[float, OperationRecord] | None:
        return None


class Cluster:
    """A played cluster whose nodes send heartbeats each second at their own moments, and after what happens there."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        options: dict[str, Any] = {"preemptive_scheduling_backoff": 2000, "fair_share_starvation_timeout": 3000}
        if rng.random() < 0.3:
            options["max_running_operation_count_per_pool"] = rng.choice((1, 2, 3))
        rules = EASY if rng.random() < 0.7 else Rules(spare=(1.0, 0.5, 0.0, 0.0, 0.0))
        self.world = world = World(rules, forbid_immediate_operations_in_root=False, **options)
        world.set_tree(main_resource="cpu")
        self.run_s: dict[str, float] = {}
        self.starts: list[tuple[float, str, str]] = []
        self.titles: dict[str, str] = {}
        self.events: list[tuple[float, int, int, str, str]] = []
        self.numbers = itertools.count()
        self.beats: dict[str, float] = {}
        self.updated_at = world.now
        for number in range(rng.randint(1, 4)):
            attributes: dict[str, Any] = {"weight": rng.choice((1, 2, 5))}
            if rng.random() < 0.3:
                attributes["strong_guarantee_resources"] = {"cpu": rng.choice((1, 2, 4))}
            if rng.random() < 0.2:
                attributes["mode"] = "fifo"
            if rng.random() < 0.2:
                attributes["resource_limits"] = {"cpu": rng.choice((3, 6))}
            world.create_pool(f"p{number}", **attributes)
        for number in range(rng.randint(1, 5)):
            world.node(f"n{number}", cpu=float(rng.choice((2, 4, 8))), memory=rng.choice((4, 16)) * 2**30)
            self._beat_at(f"n{number}", world.now + rng.uniform(0.0, HEARTBEAT_S))
        self._push(world.now + 0.5, 1, "update")
        for _ in range(rng.randint(2, 8)):
            self.start()

    def spec(self) -> dict[str, Any]:
        rng = self.rng
        title = f"op{len(self.run_s)}"
        self.run_s[title] = rng.uniform(2.0, 60.0)
        tasks = {
            f"t{number}": {
                "command": "true", "job_count": rng.randint(1, 6), "cpu_limit": float(rng.choice((0.5, 1, 2, 3))),
                "memory_limit": rng.choice((0, 2**30, 3 * 2**30)),
            }
            for number in range(rng.choice((1, 1, 2)))
        }  # fmt: skip
        pool = rng.choice(list(self.world.tree().pools))
        spec: dict[str, Any] = {"tasks": tasks, "pool": pool, "title": title, "weight": float(rng.choice((1, 1, 3)))}
        if rng.random() < 0.15:
            spec["is_gang"] = True
        return spec

    def start(self, spec: dict[str, Any] | None = None) -> str:
        spec = spec or self.spec()
        change = self.world.do(StartOperation(spec), "u")
        self.titles[change.id] = spec["title"]
        return change.id

    def _push(self, at: float, rank: int, kind: str, name: str = "") -> None:
        heapq.heappush(self.events, (at, rank, next(self.numbers), kind, name))

    def _beat_at(self, node_id: str, at: float) -> None:
        self.beats[node_id] = at
        self._push(at, 2, "beat", node_id)

    def _soon(self, node_id: str) -> None:
        if self.world.now + 0.05 < self.beats[node_id]:
            self._beat_at(node_id, self.world.now + 0.05)

    def live(self, until: float) -> None:
        world = self.world
        while self.events and self.events[0][0] <= until:
            at, _, _, kind, name = heapq.heappop(self.events)
            if kind == "beat" and self.beats[name] != at:
                continue
            world.now = at
            if kind == "update":
                world.expire()
                world.update()
                self.updated_at = at
                self._push(at + UPDATE_S, 1, "update")
            elif kind == "end":
                node_id, job_id = name.split("/")
                node = world.nodes[node_id]
                if job_id in node.jobs:
                    node.finish(job_id)
                    self._soon(node_id)
            else:
                self._beat(world.nodes[name])
        world.now = until

    def _beat(self, node: PlayedNode) -> None:
        world = self.world
        self._beat_at(node.id, world.now + HEARTBEAT_S)
        before, ended = set(node.jobs), set(node.finished)
        node.beat()
        for job_id in [job_id for job_id in node.jobs if job_id not in before]:
            order: JobOrder = node.jobs[job_id].order
            title = self.titles[order.operation_id]
            self.starts.append((world.now, title, node.id))
            self._push(world.now + self.run_s[title], 0, "end", f"{node.id}/{job_id}")
        if set(node.jobs) != before or set(node.finished) - ended:
            self._soon(node.id)

    @property
    def pace(self) -> Pace:
        return Pace(HEARTBEAT_S, UPDATE_S, self.updated_at + UPDATE_S, {"default": self.updated_at})


class Told(msgspec.Struct):
    """The part of a course that is compared."""

    starts: list[tuple[float, str, str]]
    ids: list[str]


def predict(cluster: Cluster, spec: dict[str, Any]) -> tuple[Told, dict[str, str]]:
    """What is foretold of the cluster from now on with one operation more, and the titles of its operations."""
    world, known = cluster.world, Known(cluster.run_s)

    def work(send: Send) -> None:
        forward = Forward(world.state, world.now, cluster.pace, known)
        course = forward.run(world.now + AHEAD_S, (StartOperation(spec),), "u")
        send(msgspec.msgpack.encode(Told(course.starts, course.ids)))

    course = msgspec.msgpack.decode(Child(work).read_all()[0], type=Told)
    return course, {**cluster.titles, course.ids[0]: spec["title"]}


@pytest.mark.parametrize("seed", range(CASES))
def test_it_happens_as_it_was_foretold(seed: int) -> None:
    cluster = Cluster(seed)
    now = cluster.world.now
    for _ in range(cluster.rng.randint(0, 4)):
        now += cluster.rng.uniform(0.0, WARM_S / 4)
        cluster.live(now)
        cluster.start()
    cluster.live(cluster.world.now + cluster.rng.uniform(1.5, 4.0))
    spec = cluster.spec()
    course, titles = predict(cluster, spec)
    asked, before = cluster.world.now, len(cluster.starts)
    cluster.start(spec)
    cluster.live(asked + AHEAD_S)
    happened = cluster.starts[before:]
    foretold = [(at, titles[operation_id], node_id) for at, operation_id, node_id in course.starts]
    last = min(happened[-1][0] if happened else asked, foretold[-1][0] if foretold else asked)
    assert [each[1:] for each in foretold if each[0] <= last] == [each[1:] for each in happened if each[0] <= last]
    for (at, *_), (then, *_) in zip(foretold, happened, strict=False):
        assert abs(at - then) <= HEARTBEAT_S
