"""A scheduler without sockets, store and clock: a pure ``State``, nodes that act as agents do, and time as a number.
``World`` does what the service's loop does between its locks: a command is prepared, its records are kept (``restart``
makes a new ``State`` of these), then it is applied and settled. Nothing here waits or is random."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast

import msgspec
import pytest

from cpumond.core import wire
from cpumond.core.difference import Differences
from cpumond.fairshare.resources import CPU, Vector, sum_vectors
from cpumond.fairshare.result import UpdateResult
from cpumond.fairshare.tree import Snapshot
from cpumond.fairshare.update import FairShareUpdater
from cpumond.scheduler.access import Rights
from cpumond.scheduler.elements import Element, Job, Operation, OperationElement, PoolElement, Tree
from cpumond.scheduler.model import ROOT_POOL, UNSTORED_STARTS, CommandError, Config, JobCounts, OperationRecord, Rules
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.service.stored import encode, encode_starts, load_state
from cpumond.scheduler.settings import operations
from cpumond.scheduler.settings.commands import ChangePool, ChangeTree, CreatePool, CreateTree, Edit, SetDefaultTree
from cpumond.scheduler.settings.nodes_filter import parse_tag_filter
from cpumond.scheduler.state import State, budgets, changes, dispatch, heartbeats, settling, updates
from cpumond.scheduler.state.commands import Command, prepare
from cpumond.scheduler.state.nodes import SeveralTreesError, note_refused_node, register_node
from cpumond.scheduler.state.starts import list_settled, list_stops_of, list_unstored, note_stored
from cpumond.scheduler.state.transaction import NOTHING, Transaction
from cpumond.scheduler.store import Change, Store

TREE = "default"
GIB = 2**30
EASY = Rules(spare=(0.0, 0.0, 0.0, 0.0, 0.0))
"""Rules under which small numbers are easy: a node is filled to the last core."""

EAGER = {
    "max_unpreemptible_running_job_count": 0,
    "fair_share_starvation_timeout": 0,
    "preemptive_scheduling_backoff": 0,
}
"""Options of a tree in which one that starves preempts at once, also of small operations."""

JobEnd = Literal["completed", "failed", "aborted", "lost"]


@dataclass
class PlayedJob:
    """A job on a played node."""

    order: wire.JobOrder
    current_cpu_limit: float
    started_at: float
    cpu_seconds: float | None = None
    reclaimed_cpu_seconds: float | None = None
    ordered_cpu_seconds: float | None = None
    throttled_cpu_seconds: float | None = None
    late_cpu_seconds: float | None = None
    smoothed_cpu_usage: float | None = None
    checkpoint_at: float | None = None
    mode: str = "reclaim"


@dataclass
class PlayedNode:
    """A node that starts and stops what it is told to, and repeats what has ended. ``keeps_stopping`` leaves a job that
    is told to stop alive until ``let_go``; ``deaf`` obeys no order at all. While it ``has_no_room``, jobs wait here
    until ``begin``, and it says nothing of them."""

    world: World
    id: str
    cpu: float
    memory: int = 0
    user_slots: int = 1000
    tags: tuple[str, ...] = ()
    address: str = ""
    incarnation: str = "i1"
    sequence: int = 0
    keeps_stopping: bool = False
    deaf: bool = False
    has_no_room: bool = False
    waiting: dict[str, wire.JobOrder] = field(default_factory=dict)
    jobs: dict[str, PlayedJob] = field(default_factory=dict)
    stopping: dict[str, wire.StopOrder] = field(default_factory=dict)
    finished: dict[str, wire.FinishedJob] = field(default_factory=dict)
    foreign: list[wire.JobReport] = field(default_factory=list)
    differences: Differences = field(default_factory=Differences)
    answer: wire.HeartbeatAnswer | None = None
    """The last one."""

    @property
    def heard(self) -> wire.HeartbeatAnswer:
        assert self.answer is not None
        return self.answer

    def registration(self) -> wire.NodeRegistration:
        resources = wire.NodeResources(cpu=self.cpu, memory=self.memory, user_slots=self.user_slots)
        return wire.NodeRegistration(self.id, self.incarnation, resources, self.address, list(self.tags))

    def register(self) -> None:
        """Raises CommandError."""
        try:
            change = register_node(self.world.state, self.registration())
        except SeveralTreesError as refused:
            note_refused_node(self.world.state, refused, self.world.now)
            self.world.carry_out(refused.change)
            raise
        self.world.carry_out(change)

    def restart_agent(self) -> None:
        """A new run of the agent; its jobs go on."""
        self.incarnation = f"i{int(self.incarnation[1:]) + 1}"
        self.sequence = 0
        self.register()

    def heartbeat(self) -> wire.Heartbeat:
        """What it would say now; the number grows with each one made."""
        self.sequence += 1
        reports = [
            wire.JobReport(
                job_id=job_id,
                operation_id=job.order.operation_id,
                cpu_limit=job.order.cpu_limit,
                current_cpu_limit=job.current_cpu_limit,
                from_scheduler=True,
                stopping=job_id in self.stopping,
                task=job.order.task,
                start_time=job.started_at,
                cgroup=f"jobs/{job_id}",
                smoothed_cpu_usage=job.smoothed_cpu_usage,
                checkpoint_at=job.checkpoint_at,
                mode=job.mode,
                **{name: getattr(job, name) for name in wire.CPU_COUNTERS},
            )
            for job_id, job in self.jobs.items()
        ]
        return wire.Heartbeat(
            node_id=self.id,
            incarnation=self.incarnation,
            sequence=self.sequence,
            sent_at=0.0,
            cpu_capacity=self.cpu,
            jobs=reports + self.foreign,
            finished_jobs=list(self.finished.values()),
        )

    def beat(self) -> wire.HeartbeatAnswer:
        """One heartbeat and what follows from its answer; a difference where the last one was taken."""
        heartbeat = self.heartbeat()
        answer = self.world.hear(self.differences.make(heartbeat))
        if answer.full:
            answer = self.world.hear(self.differences.make(heartbeat))
            assert not answer.full
        if answer.accepted:
            self.differences.taken(heartbeat, answer)
        self.answer = answer
        if answer.accepted and not self.deaf:
            self.obey(answer)
        return answer

    def obey(self, answer: wire.HeartbeatAnswer) -> None:
        for job_id in answer.acknowledged:
            self.finished.pop(job_id, None)
        for stop in answer.stop:
            if stop.job_id in self.waiting:
                self._end(self.waiting.pop(stop.job_id), "aborted", stop.why)
            elif stop.job_id in self.jobs:
                self.stopping.setdefault(stop.job_id, stop)
                if not self.keeps_stopping:
                    self.let_go(stop.job_id)
        for order in answer.start:
            if order.job_id in self.jobs or order.job_id in self.finished or order.job_id in self.waiting:
                continue
            if self.has_no_room:
                self.waiting[order.job_id] = order
            else:
                self.jobs[order.job_id] = PlayedJob(order, order.cpu_limit, self.world.now)

    def begin(self, job_id: str) -> None:
        order = self.waiting.pop(job_id)
        self.jobs[job_id] = PlayedJob(order, order.cpu_limit, self.world.now)

    def let_go(self, job_id: str, state: JobEnd = "aborted", steps: int = 0, **facts: Any) -> None:
        """A job that was told to stop ends, for the reason that was given; so many periods follow."""
        why = self.stopping.pop(job_id).why
        self.finish(job_id, state, steps, **{"reason": "" if state == "completed" else why, **facts})

    def finish(self, job_id: str, state: JobEnd = "completed", steps: int = 0, **facts: Any) -> None:
        """A job ends; told with the next heartbeat, with ``facts`` of FinishedJob; so many periods follow."""
        job = self.jobs.pop(job_id)
        self.stopping.pop(job_id, None)
        known = {"cpu_seconds": job.cpu_seconds, "reclaimed_cpu_seconds": job.reclaimed_cpu_seconds}
        known["ordered_cpu_seconds"] = job.ordered_cpu_seconds
        self._end(job.order, state, "" if state == "completed" else state, **{**known, **facts})
        if steps:
            self.world.settle_down(steps)

    def _end(self, order: wire.JobOrder, state: JobEnd, why: str, **facts: Any) -> None:
        told = {
            "task": order.task,
            "exit_code": {"completed": 0, "failed": 1}.get(state),
            "reason": why,
            "finish_time": self.world.now,
            **facts,
        }
        self.finished[order.job_id] = wire.FinishedJob(order.job_id, order.operation_id, state, **told)

    def limit(self, job_id: str, cores: float) -> None:
        """The monitor sets another limit; told with the next heartbeat."""
        self.jobs[job_id].current_cpu_limit = cores

    def has(self, cores: float, name: str = "foreign") -> None:
        """It runs a job that the scheduler knows nothing of."""
        self.foreign.append(wire.JobReport(name, "", cpu_limit=cores, current_cpu_limit=cores))


def make_task(jobs: int = 1, **more: Any) -> dict[str, Any]:
    """A task of jobs of one core, as a specification has it."""
    return {"command": "true", "job_count": jobs, "cpu_limit": 1.0, "memory_limit": 0, **more}


def entry(subject: str, *permissions: str, action: str = "allow", **more: str) -> dict[str, Any]:
    """An entry of an access list."""
    return {"action": action, "subjects": [subject], "permissions": list(permissions), **more}


def burst(flow: float, most: float) -> dict[str, Any]:
    """A burst guarantee, in cores."""
    return {"guarantee_type": "burst", "resource_flow": {"cpu": flow}, "burst_guarantee_resources": {"cpu": most}}


def refused_with(code: int, words: str | None = None) -> pytest.RaisesExc[CommandError]:
    return pytest.raises(CommandError, match=words, check=lambda error: error.code == code)


def hold_next_write(store: Any) -> tuple[asyncio.Event, asyncio.Event]:
    """Let the next write of a Watched store wait: it has begun when the first is set, and ends once the second is."""
    loop, begun, released = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def wait() -> None:
        store.before = lambda: None
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(released.wait(), loop).result(30)

    store.before = wait
    return begun, released


class StillClock(Clock):
    def __init__(self, at: float = 1_000_000.0) -> None:
        super().__init__()
        self.at = at

    def now(self) -> float:
        return self.at


class ServedNode(PlayedNode):
    """A node of a running scheduler, which is called without a network."""

    def __init__(self, scheduler: Scheduler, cpu: float = 4.0, name: str = "n1", **more: Any) -> None:
        super().__init__(self, name, cpu, **{"memory": 2**34, **more})
        self.scheduler = scheduler

    @property
    def now(self) -> float:
        """What is asked of a world here."""
        return self.scheduler.clock.now()

    async def register(self) -> None:
        await self.scheduler.register(self.registration())

    async def beat(self) -> wire.HeartbeatAnswer:
        answer = await self.scheduler.heartbeat(self.heartbeat())
        self.obey(answer)
        return answer


async def run_jobs(
    scheduler: Scheduler, command: operations.StartOperation, user: str | User = "ann", cpu: float = 4.0, beats: int = 2
) -> tuple[ServedNode, Transaction]:
    """Start an operation with a new node, which hears of its jobs with one beat and reports them with the next."""
    node = ServedNode(scheduler, cpu)
    await node.register()
    reply = await scheduler.execute(command, user)
    await scheduler.update_all()
    for _ in range(beats):
        await node.beat()
    return node, reply


class World:
    """A scheduler with a default tree, with these pools and nodes (and their cores), at second 1000."""

    def __init__(
        self,
        rules: Rules = EASY,
        now: float = 1000.0,
        pools: Iterable[str] = (),
        nodes: Mapping[str, float] | None = None,
        **tree: Any,
    ) -> None:
        self.rules = rules
        self.now = now
        self.stored: dict[tuple[str, str], bytes] = {}
        """(kind, key) -> record, as a store would hold it."""
        self.nodes: dict[str, PlayedNode] = {}
        self._ids = itertools.count(1)
        self._updaters: dict[str, FairShareUpdater] = {}
        self.updated_at: dict[str, float] = {}
        self.updates: dict[str, tuple[Snapshot, UpdateResult]] = {}
        """The last update of each tree."""
        self.state = changes.make_state(rules, Config({}))
        self.do(CreateTree(TREE, tree))
        self.do(SetDefaultTree(TREE))
        self.create_pools(*pools)
        for name, cpu in (nodes or {}).items():
            self.node(name, cpu)

    def new_id(self) -> str:
        return f"{next(self._ids):06d}"

    # --- changes

    def do(self, command: Command, user: str = "u") -> Transaction:
        """Carry out a command. Raises CommandError."""
        change = prepare(self.state, command, user, self.now, self.new_id)
        self.carry_out(change)
        return change

    def carry_out(self, change: Transaction) -> None:
        """Keep, apply and settle."""
        self.commit(change)
        for _ in range(100):
            follow_up = settling.settle(self.state, self.now)
            if follow_up.is_empty:
                return
            self.commit(follow_up)
        raise AssertionError("the state does not settle")

    def commit(self, change: Transaction) -> None:
        """Keep the records as bytes, as a store does, then apply."""
        change = budgets.settle(self.state, change)
        stops = [] if change.stops is None else list_stops_of(self.state, change.stops)
        starts = encode_starts(list_settled(self.state, change.settled, stops))
        self.write([*encode(change, self.state.config), *starts])
        self.written()
        changes.apply(self.state, change, self.now)
        self._forget()

    def written(self) -> None:
        """What is done between a write and its effect; one that raises is a kill."""

    def write(self, records: Iterable[Change]) -> None:
        for each in records:
            if each.value is None:
                self.stored.pop((each.kind, each.key), None)
            else:
                self.stored[each.kind, each.key] = each.value

    def _forget(self) -> None:
        for key in self.state.take_expired():
            self.stored.pop(key, None)

    def restart(self, steps: int = 0, registers: bool = False) -> None:
        """A new scheduler from what is stored, at which all nodes register anew if so; so many periods follow."""
        self._updaters.clear()
        self.updated_at.clear()
        self.state, _ = load_state(cast(Store, self), self.rules, self.now, self.new_id)
        for node in self.nodes.values() if registers else ():
            node.register()
        self.settle_down(steps)

    def forget_starts(self) -> None:
        """Let the store be one of a version that stored no starts."""
        for place in [place for place in self.stored if place[0] == "start"]:
            del self.stored[place]
        self.stored[UNSTORED_STARTS] = b"{}"

    def load(self) -> Iterator[tuple[str, str, bytes]]:
        """The records, for ``load_state``."""
        return ((*key, value) for key, value in self.stored.items())

    # --- trees and pools

    @property
    def rights(self) -> Rights:
        """An administrator's."""
        return Rights(self.state, User("root", admin=True))

    def tree(self, name: str = TREE) -> Tree:
        return self.state.trees[name]

    def create_tree(self, name: str, **options: Any) -> None:
        self.do(CreateTree(name, options))

    def set_tree(self, tree: str = TREE, **options: Any) -> None:
        self.do(ChangeTree(tree, tuple(Edit((name,), value) for name, value in options.items())))

    def create_pool(self, name: str, parent: str = ROOT_POOL, tree: str = TREE, **attributes: Any) -> None:
        self.do(CreatePool(tree, name, parent, attributes))

    def create_pools(self, *names: str, **attributes: Any) -> None:
        """Alike but for their names."""
        for name in names:
            self.create_pool(name, **attributes)

    def set_pool(self, pool: str, /, tree: str = TREE, **attributes: Any) -> None:
        """Set attributes; None removes one. ``a__b`` is ``a/b``."""
        edits = tuple(Edit(tuple(key.split("__")), value) for key, value in attributes.items())
        self.do(ChangePool(tree, pool, edits))

    def pool(self, name: str, tree: str = TREE) -> PoolElement:
        return self.tree(tree).root if name == ROOT_POOL else self.tree(tree).pools[name]

    def counts(self, name: str, tree: str = TREE) -> tuple[int, int]:
        """Running operations and all operations of a pool's subtree."""
        pool = self.pool(name, tree)
        return pool.running_operation_count, pool.operation_count

    # --- operations

    def start(self, pool: str = "", user: str = "u", jobs: int = 1, cpu: float = 1.0, **spec: Any) -> str:
        """Start an operation with one task "t", with ``memory`` as its memory_limit and the options in ``task``, and
        give its id. Raises CommandError."""
        given = make_task(jobs, **{"cpu_limit": cpu, "memory_limit": spec.pop("memory", 0), **spec.pop("task", {})})
        table = {"tasks": {"t": given}, **({"pool": pool} if pool else {}), **spec}
        return self.do(operations.StartOperation(table), user).id

    def run(self, *args: Any, steps: int = 3, **spec: Any) -> str:
        """Start an operation, let its jobs start, as far as there is room, and be told, and give its id."""
        operation = self.start(*args, **spec)
        self.settle_down(steps)
        return operation

    def abort(self, *operation_ids: str) -> None:
        for each in operation_ids:
            self.do(operations.AbortOperation(each))

    def complete(self, *operation_ids: str) -> None:
        for each in operation_ids:
            self.do(operations.CompleteOperation(each))

    def suspend(self, operation_id: str, abort_running_jobs: bool = False) -> None:
        self.do(operations.SuspendOperation(operation_id, abort_running_jobs))

    def resume(self, operation_id: str) -> None:
        self.do(operations.ResumeOperation(operation_id))

    def set_operation(self, operation_id: str, **parameters: Any) -> None:
        self.do(operations.UpdateOperation(operation_id, parameters))

    def operation(self, operation_id: str) -> Operation:
        return self.state.operations[operation_id]

    def record(self, operation_id: str) -> OperationRecord:
        return self.state.find_record(operation_id)

    def job_counts(self, operation_id: str) -> JobCounts:
        """How the jobs of its task ended."""
        return self.record(operation_id).counts.get("t", JobCounts())

    def element(self, operation_id: str, tree: str = TREE) -> OperationElement:
        return self.state.operations[operation_id].elements[tree]

    def states(self, operation_ids: Iterable[str]) -> str:
        """The first letters of the operations' states: r, p, c, f, a."""
        return "".join(self.record(each).state[0] for each in operation_ids)

    # --- nodes

    def node(
        self,
        name: str,
        cpu: float = 10.0,
        memory: int = 0,
        tags: tuple[str, ...] = (),
        user_slots: int = 1000,
        address: str = "",
    ) -> PlayedNode:
        """A new node, registered. Raises CommandError."""
        node = PlayedNode(self, name, cpu, memory, user_slots, tags, address)
        node.register()
        self.nodes[name] = node
        return node

    def add_nodes(self, count: int, *size: Any, first: int = 0, **more: Any) -> list[PlayedNode]:
        """Nodes n0, n1, ..., alike."""
        return [self.node(f"n{number}", *size, **more) for number in range(first, first + count)]

    def hear(self, heartbeat: wire.Heartbeat) -> wire.HeartbeatAnswer:
        """What the service does with a heartbeat."""
        heard = heartbeats.receive(self.state, heartbeat, self.now)
        self._forget()
        if not heard.accepted:
            return wire.HeartbeatAnswer(accepted=False, reason=heard.reason, register=heard.register, full=heard.full)
        if not heard.transaction.is_empty:
            self.carry_out(settling.recount(self.state, heard.transaction, self.now))
        before = {node.id: set(node.jobs) for node in self.state.nodes.values()}
        dispatch.schedule(self.state, heartbeat.node_id, self.now, self.new_id)
        assert_classes(self.state, before)
        self.store_starts()
        return dispatch.answer(self.state, heartbeat.node_id, heard, self.now)

    def store_starts(self) -> None:
        starts = list_unstored(self.state)
        self.write(encode_starts(starts))
        note_stored(self.state, starts)

    def beat(self, *nodes: PlayedNode) -> None:
        """A heartbeat of each of these nodes, or of all."""
        for node in nodes or self.nodes.values():
            if node.beat().register:
                node.register()

    def expire(self) -> None:
        change = settling.expire(self.state, self.now)
        if not change.is_empty:
            self.carry_out(settling.recount(self.state, change, self.now))
        if settling.is_unsettled(self.state, self.now):
            self.carry_out(NOTHING)

    # --- time

    def after(self, seconds: float) -> Self:
        """This world so much later, before anything is done."""
        self.now += seconds
        return self

    def update(self) -> None:
        """A look at budgets and a fair-share update of every tree; what must survive of them is kept."""
        change = budgets.look(self.state, self.now)
        if not change.is_empty:
            self.commit(change)
        for name, tree in self.state.trees.items():
            updater = self._updaters.setdefault(name, FairShareUpdater())
            snapshot = updates.make_snapshot(self.state, tree)
            result = updater.update(snapshot, self.now, self.updated_at.get(name))
            self.updated_at[name] = self.now
            self.updates[name] = snapshot, result
            updates.accept_update(self.state, tree, result, self.now)
            self.stored["progress", name] = msgspec.json.encode(updates.progress_of(tree))

    def step(self, seconds: float = 1.0, *nodes: PlayedNode) -> None:
        """Time passes; then silent nodes, an update, and heartbeats, as in one period of the service."""
        self.now += seconds
        self.expire()
        self.update()
        self.beat(*nodes)

    def settle_down(self, steps: int = 3, seconds: float = 1.0) -> None:
        """Enough periods for orders to be obeyed and told."""
        for _ in range(steps):
            self.step(seconds)

    # --- looking at it

    def jobs_of(self, operation_id: str) -> list[Job]:
        """Active ones."""
        operation = self.state.operations.get(operation_id)
        elements = operation.elements.values() if operation is not None else ()
        return [job for element in elements for job in element.jobs.values()]

    def cores(self, name: str, tree: str = TREE) -> float:
        return self.pool(name, tree).usage[CPU]

    def cores_of(self, operation_id: str) -> float:
        return sum(element.usage[CPU] for element in self.operation(operation_id).elements.values())

    def share(self, name: str, tree: str = TREE) -> float:
        """The CPU component of a pool's fair share."""
        return self.pool(name, tree).fair_share[CPU]


# --- what must always hold -----------------------------------------------------------------------------------------


def assert_near(found: Vector, expected: Vector, what: str) -> None:
    """Equal but for what sums of floats lose."""
    for a, b in zip(found, expected, strict=True):
        assert abs(a - b) <= 1e-6 * max(1.0, abs(b) * 1e-3), f"{what}: {found} is not {expected}"


def assert_consistent(state: State) -> None:
    """All counters are what a count from scratch gives (semantics.md 8); no job is where it cannot be."""
    for tree in state.trees.values():
        for pool in (tree.root, *tree.pools.values()):
            below = list(_operations_below(pool))
            jobs = [job for element in below for job in element.jobs.values()]
            assert_near(pool.usage, sum_vectors([job.usage for job in jobs]), f"usage of pool {pool.name}")
            assert pool.operation_count == len(below), pool.name
            assert pool.running_operation_count == sum(element.is_running for element in below), pool.name
            assert pool.is_root or pool.parent is not None
            _assert_fitting(pool)
            assert all(child.parent is pool for child in pool.children.values()), pool.name
            assert all(element.parent is pool for element in pool.operations.values()), pool.name
            assert not pool.is_ephemeral or below, f"ephemeral pool {pool.name} is empty"
        for name, element in tree.operations.items():
            assert element.name == name
            assert element.parent in (tree.root, *tree.pools.values())
            assert element.options.pool == element.parent.name
            assert state.operations[name].elements[tree.name] is element
            assert element.is_running == (tree.name in element.operation.record.running_in)
            assert element.is_running == (name not in tree.queue)
            usages = [job.usage for job in element.jobs.values()]
            assert_near(element.usage, sum_vectors(usages), f"usage of operation {name}")
            _assert_fitting(element)
        assert set(tree.queue) <= set(tree.operations)
        assert [*tree.queue] == sorted(tree.queue, key=lambda name: state.operations[name].record.sequence)
        # Where no job may start what jobs ordered counts, which is looked at with each update.
        if not any(node.cordoned or node.matched_trees for node in tree.nodes.values()):
            assert_near(tree.total, sum_vectors([node.capacity for node in tree.nodes.values()]), "total")
    for operation in state.operations.values():
        _assert_operation(operation, state)
    for node in state.nodes.values():
        assert_near(node.used, sum_vectors([job.usage for job in node.jobs.values()]), f"used of node {node.id}")
        assert node.ordered_cores == pytest.approx(sum(job.limits[CPU] for job in node.jobs.values()), abs=1e-6)
        ordinary = [job.limits[CPU] for job in node.jobs.values() if not job.reclaimed]
        assert node.ordinary_cores == pytest.approx(sum(ordinary), abs=1e-6)
        assert node.foreign_ordered_cores == sum(each.cpu_limit for each in node.strangers.values())
        assert not set(node.jobs) & set(node.stopping)
        assert node.tree is None or state.trees[node.tree].nodes[node.id] is node
        for job in (*node.jobs.values(), *node.stopping.values()):
            assert job.node is node
            assert state.jobs[job.id] is job
    active = {
        job_id: job
        for operation in state.operations.values()
        for element in operation.elements.values()
        for job_id, job in element.jobs.items()
    }
    assert active == {job.id: job for job in state.jobs.values() if job.is_active}
    for job in state.jobs.values():
        assert state.nodes.get(job.node.id) is job.node, f"job {job.id} is on a node that is not known"
        assert job.id in (job.node.jobs if job.is_active else job.node.stopping)
        assert job.is_active == (job.id in job.element.jobs)
        assert not job.is_active or state.operations[job.element.name].elements[job.element.tree.name] is job.element


def _assert_fitting(element: PoolElement | OperationElement) -> None:
    """The nodes that it may use, and what they have, are those of the filters on its way (2.13)."""
    filters = [
        (each.settings if isinstance(each, PoolElement) else each.options).scheduling_tag_filter
        for each in (element, *element.ancestors())
    ]
    nodes = [
        node
        for node in element.tree.nodes.values()
        if all(parse_tag_filter(text).matches(node.tags) for text in filters)
    ]
    has_vault = not isinstance(element, PoolElement) and element.operation.record.vault_bytes
    may_use = {node.id for node in nodes if node.takes_secrets or not has_vault}
    assert {node.id for node in element.tree.nodes.values() if element.may_use(node)} == may_use
    if element.fitting is not None:
        assert element.fitting.sizes.counts == Counter(node.capacity for node in nodes)
        free = sum_vectors([node.counted_capacity for node in nodes if not node.cordoned and not node.matched_trees])
        assert all(x >= y - 1e-9 for x, y in zip(element.fitting.total, free, strict=True))
    else:
        assert not "".join(filters).strip()


def assert_classes(state: State, before: Mapping[str, set[str]]) -> None:
    """The class of each job that one ``schedule`` started follows from orders and capacity (1.10). ``before``: the
    active jobs of each node until then; where one of them was stopped meanwhile, only that no ordinary job ordered too
    much is known."""
    for node in state.nodes.values():
        old = [job for job in node.jobs.values() if job.id in before[node.id]]
        room = node.capacity[CPU] - sum(job.limits[CPU] for job in old if not job.reclaimed)
        room -= sum(each.cpu_limit for each in node.strangers.values())
        new = (job for job in node.jobs.values() if job.id not in before[node.id])
        for job in sorted(new, key=lambda job: job.sequence):
            cores, record = job.limits[CPU], job.element.operation.record
            fits = cores <= room + 1e-9 * max(cores, 1.0) + 1e-12
            left, room = room - cores, room - (0.0 if job.reclaimed else cores)
            assert job.element.may_use(node)
            assert record.allow_reclaimed or (fits and not job.reclaimed)
            assert not record.require_reclaimed or job.reclaimed
            assert fits or job.reclaimed, f"job {job.id} is ordinary and orders more than node {node.id} has"
            if len(old) == len(before[node.id]) and not record.require_reclaimed and abs(left) > 1e-6:
                assert job.reclaimed is not fits


def _operations_below(pool: PoolElement) -> Iterable[OperationElement]:
    yield from pool.operations.values()
    for child in pool.children.values():
        yield from _operations_below(child)


def _assert_operation(operation: Operation, state: State) -> None:
    record = operation.record
    assert not record.is_finished
    assert record.state == ("running" if record.running_in else "pending")
    active: dict[str, int] = {}
    for element in operation.elements.values():
        for job in element.jobs.values():
            active[job.task.name] = active.get(job.task.name, 0) + 1
    for job in state.jobs.values():
        if job.keeps_place and job.element.operation is operation:
            active[job.task.name] = active.get(job.task.name, 0) + 1
    assert operation.active_job_count == sum(active.values())
    run = operation.retries
    waits = Counter(name for name, _ in run.later) if run is not None else Counter()
    for task in record.tasks:
        completed = record.counts[task.name].completed if task.name in record.counts else 0
        left = max(task.job_count - completed - active.get(task.name, 0) - waits[task.name], 0)
        if waits and (record.is_gang or record.incarnations):
            left = 0
        if task.gang_options is not None and completed - record.reserved_done.get(task.name, 0) >= task.gang_size:
            left = 0
        assert operation.needed.get(task.name, 0) == left, f"needed jobs of operation {record.id}"
    _assert_numbers(operation, state)
    _assert_retries(operation, state)


def _assert_retries(operation: Operation, state: State) -> None:
    """Each job that is to be started again has its place kept, and nobody else has it (3.9)."""
    run = operation.retries
    kept = {} if run is None else {**dict.fromkeys(run.ready, 0.0), **run.later}
    for (task, cookie), due in kept.items():
        assert not due or due == operation.record.retried.places[task][cookie].due
        assert not any(
            job.is_active and (job.task.name, job.cookie) == (task, cookie) and job.element.operation is operation
            for job in state.jobs.values()
        )


def _assert_numbers(operation: Operation, state: State) -> None:
    """No two active jobs of a task have the same cookie, nor one that is done; no index came twice (7.4)."""
    jobs = [job for job in state.jobs.values() if job.element.operation is operation]
    ended = list(state.finished_jobs.get(operation.id, {}).values())
    indices = [job.index for job in jobs] + [job.job_index for job in ended]
    assert len({index for index in indices if index >= 0}) == sum(index >= 0 for index in indices)
    assert operation.next_index > max(indices, default=-1)
    for task in operation.record.tasks:
        taken = [job.cookie for job in jobs if job.task.name == task.name and job.is_active]
        completed = [job for job in ended if job.task == task.name and job.state == "completed" and job.cookie >= 0]
        present = [job for job in completed if job.incarnation == operation.record.incarnation]
        done = [job.cookie for job in present if not operations.starts_again(task, job)]
        active = [job for job in jobs if job.task.name == task.name and job.is_active and job.gang_rank >= 0]
        ranks = [job.gang_rank for job in active] + [job.gang_rank for job in present if job.gang_rank >= 0]
        assert len(set(ranks)) == len(ranks), f"ranks of {task.name}: {ranks}"
        assert {job.incarnation for job in active} <= {operation.record.incarnation}
        assert len(set(taken + done)) == len(taken + done), f"cookies of {task.name}: {taken}, done {done}"
        is_patched = bool(operation.record.cumulative_spec_patch)  # of fewer jobs those that run stay
        assert all(cookie >= 0 and (is_patched or cookie < task.job_count) for cookie in taken + done)


def describe(state: State, with_jobs: bool = True) -> dict[str, Any]:
    """What a restart must keep and a refused command must not touch; without jobs what is stored: no usage either."""
    seen: dict[str, Any] = {
        "config": state.config,
        "finished": dict(state.finished),
        "finished_jobs": {name: dict(jobs) for name, jobs in state.finished_jobs.items() if jobs},
        "operations": [operation.record for operation in state.operations.values()],
        "nodes": {
            node.id: (node.tree, node.tags, node.address, node.capacity, node.incarnation, node.cordon)
            for node in state.nodes.values()
        },
        "trees": {
            name: {
                "pools": {pool.name: _describe_pool(pool, with_jobs) for pool in tree.pools.values()},
                "root": _describe_pool(tree.root, with_jobs),
                "queue": list(tree.queue),
                "total": tree.total,
                "nodes": set(tree.nodes),
            }
            for name, tree in state.trees.items()
        },
        "sequence": state.sequence,
    }
    if with_jobs:
        seen["needed"] = {name: dict(operation.needed) for name, operation in state.operations.items()}
        seen["jobs"] = {
            job.id: (job.element.name, job.task.name, job.node.id, job.usage, job.state, job.is_active, job.reclaimed)
            for job in state.jobs.values()
        }
    return seen


def _describe_pool(pool: PoolElement, with_jobs: bool) -> Mapping[str, Any]:
    seen: dict[str, Any] = {
        "parent": pool.parent.name if pool.parent is not None else None,
        "explicit": pool.config is not None,
        "settings": pool.settings,
        "children": set(pool.children),
        "operations": set(pool.operations),
        "counts": (pool.running_operation_count, pool.operation_count),
        "limits": (pool.max_running_operation_count, pool.max_operation_count),
        "rules": _describe_rules(pool),
    }
    if with_jobs:
        seen["usage"] = tuple(round(x, 6) for x in pool.usage)
    return seen


def _describe_rules(element: Element) -> tuple[Any, ...]:
    rules = element.rules
    assert rules is not None
    return (
        rules.tolerance, rules.fair_share_timeout_s, rules.min_share_timeout_s, rules.aggressive_timeout_s,
        rules.aggressive_starvation, rules.aggressive_preemption, rules.non_preemptible_threshold,
    )  # fmt: skip
