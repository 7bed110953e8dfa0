"""Simulation: the state runs in virtual time with its own updates, heartbeats, commands and obedient nodes. Pure.

The state itself is run and changed, so the caller gives a copy. The ``Load`` decides what jobs and users do. As in the
service, events are handled one by one in the order of their times."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, Literal, NamedTuple, Protocol

from cpumond.core.wire import FinishedJob, HeartbeatAnswer, JobOrder, JobReport, NodeHeartbeat
from cpumond.fairshare.resources import CPU, Vector, dominates
from cpumond.fairshare.update import FairShareUpdater
from cpumond.scheduler.elements import Job, Node, Tree
from cpumond.scheduler.model import OperationRecord, PreemptionRecord, Task
from cpumond.scheduler.state import State, changes, dispatch, heartbeats, settling, updates
from cpumond.scheduler.state.commands import Command, prepare
from cpumond.scheduler.state.starts import list_unstored, note_stored
from cpumond.scheduler.state.transaction import NOTHING, Transaction

EXACT_SIZE: Final = 400
"""Up to this number of operations and nodes, each update and heartbeat of the first SMALL_EXACT_S is made."""
SMALL_EXACT_S: Final = 600.0
LARGE_EXACT_S: Final = 6.0
"""With more, each update and heartbeat is made for this time after commands: they may concern running jobs."""
LEAST_DETAIL: Final = 0.06
SMALL_DETAIL: Final = 0.01
"""After that period, intervals grow up to this fraction of the time since its end; SMALL_DETAIL: small clusters."""
REACTION_S: Final = 0.05
"""Delay from the start or end of a job on a node to the heartbeat that reports it: agents send it early."""
PROGRESS_EVENTS: Final = 1000
LOOK_EVENTS: Final = 20
MOST_BARREN: Final = 8


class Load(Protocol):
    """Input of a simulation that the scheduler does not decide: what jobs and users do."""

    def left_s(self, record: OperationRecord, task: Task, ran_s: float) -> float:
        """Return the remaining run time, in seconds, of a job that has run for ``ran_s``; infinity if it is unknown."""

    def limit_of(self, record: OperationRecord, task: Task) -> tuple[float, float]:
        """Return the fraction of its request at which a job's limit settles, and the seconds until then."""

    def next_arrival(self, after: float) -> tuple[float, OperationRecord] | None:
        """The next operation that a user starts: a known one, with its id and sequence; None if none is expected."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Timing: seconds between heartbeats of a node and between updates, when the next update is due, and for each tree
    when the last update was made."""

    heartbeat_s: float
    update_s: float
    update_due: float
    updated_at: Mapping[str, float]


@dataclass(slots=True)
class Course:
    """Result of a simulation. Times are the scheduler's."""

    began: float
    until: float
    starts: list[tuple[float, str, str]] = field(default_factory=list)
    """Time, operation and node of the start of each job."""
    first_starts: dict[str, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    arrived: dict[str, OperationRecord] = field(default_factory=dict)
    """Operations that users would start during the simulation."""
    stops: list[PreemptionRecord] = field(default_factory=list)
    core_seconds: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    """(Tree, pool) -> core-seconds of fair share and usage."""
    ids: list[str] = field(default_factory=list)
    """Ids of the operations that the commands created."""


class _Event(NamedTuple):
    at: float
    rank: int
    number: int
    kind: Literal["update", "beat", "end", "arrival", "settles"]
    node_id: str = ""
    job_id: str = ""


@dataclass(slots=True)
class _Process:
    """A job on its node."""

    order: JobOrder
    began: float
    is_stopping: bool = False


@dataclass(slots=True)
class _Host:
    """The agent's side of one ``Node``: what the host knows."""

    processes: dict[str, _Process] = field(default_factory=dict)
    finished: dict[str, FinishedJob] = field(default_factory=dict)
    news: dict[str, JobReport] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    beat_at: float = 0.0
    """Time of its next heartbeat; a heartbeat event with a different time is ignored."""


class Forward:
    """One simulation of ``state`` from ``now`` on. ``on_progress``: called at times with the progress, 0 to 1."""

    def __init__(
        self, state: State, now: float, pace: Pace, load: Load, on_progress: Callable[[float], None] = lambda _: None
    ) -> None:
        self.state = state
        self.now = now
        self.pace = pace
        self.load = load
        self.on_progress = on_progress
        self._ids = itertools.count(1)
        self._numbers = itertools.count()
        self._events: list[_Event] = []
        self._hosts: dict[str, _Host] = {}
        self._updaters = {name: FairShareUpdater() for name in state.trees}
        self._updated_at = dict(pace.updated_at)
        size = len(state.operations) + len(state.nodes)
        is_small = size <= EXACT_SIZE
        self._detail = SMALL_DETAIL if is_small else min(size / 100_000, LEAST_DETAIL)
        self._exact_s = SMALL_EXACT_S if is_small else 0.0
        self.course = Course(now, now)
        self._barren: dict[Hashable, list[tuple[Vector, float]]] = {}
        """Node kind -> free resources and ``unordered_cores`` where nothing fitted since the last update or change."""

    def run(
        self, until: float, commands: tuple[Command, ...] = (), user: str = "",
        enough: Callable[[], bool] = lambda: False,
    ) -> Course:  # fmt: skip
        """Return what happens before ``until`` if the only input is ``commands`` and what the ``Load`` decides. Raises
        CommandError if a command is refused. ``enough`` is called now and then; if it returns true, this stops."""
        course = self.course
        course.until = until
        for command in commands:
            self._apply(change := prepare(self.state, command, user, self.now, self._new_id))
            self._exact_s = max(self._exact_s, LARGE_EXACT_S)
            course.ids.append(change.id)
        self._barren.clear()
        self._begin()
        seen = 0
        while self._events and (event := heappop(self._events)).at <= until:
            seen += 1
            if not seen % LOOK_EVENTS and enough():
                course.until = event.at
                break
            if not seen % PROGRESS_EVENTS:
                self.on_progress((event.at - course.began) / max(until - course.began, 1e-9))
            self.now = max(event.at, self.now)
            self._handle(event)
        return course

    # --- events

    def _at(
        self, at: float, kind: Literal["update", "beat", "end", "arrival", "settles"], node_id: str = "",
        job_id: str = "",
    ) -> None:  # fmt: skip
        rank = 0 if kind in ("end", "settles", "arrival") else 1 if kind == "update" else 2
        heappush(self._events, _Event(at, rank, next(self._numbers), kind, node_id, job_id))

    def _begin(self) -> None:
        now, pace = self.now, self.pace
        self._at(max(pace.update_due, now), "update")
        for node in self.state.nodes.values():
            host = self._hosts[node.id] = _Host()
            if not node.is_online:
                continue
            for job in (*node.jobs.values(), *node.stopping.values()):
                if job.was_reported:
                    began = now if job.began_at is None else job.began_at
                    host.processes[job.id] = _Process(_order_of(job), began, job.stop is not None)
                    if job.stop is None:
                        self._at(now + max(self._left_s(job, now - began), 0.0), "end", node.id, job.id)
            host.beat_at = max(node.last_seen + pace.heartbeat_s, now)
            self._at(host.beat_at, "beat", node.id)
        self._expect_arrival(now)

    def _expect_arrival(self, after: float) -> None:
        arrival = self.load.next_arrival(after)
        if arrival is not None:
            self._next_arrival = arrival[1]
            self._at(arrival[0], "arrival")

    def _handle(self, event: _Event) -> None:
        if event.kind == "update":
            self._update()
        elif event.kind == "beat":
            if self._hosts[event.node_id].beat_at == event.at:
                self._beat(event.node_id)
        elif event.kind == "arrival":
            self._arrive(self._next_arrival)
            self._expect_arrival(self.now)
        elif event.job_id in self._hosts[event.node_id].processes:
            if event.kind == "end":
                self._end(event.node_id, event.job_id, "completed")
            else:
                self._settle_limit(event.node_id, event.job_id)

    @property
    def round_s(self) -> float:
        """Seconds in which there is an update and, after it, a heartbeat of each node."""
        return 2.0 * self._step_s(self.pace.update_s) + self._step_s(self.pace.heartbeat_s)

    def _step_s(self, least_s: float) -> float:
        return max(least_s, self._detail * (self.now - self.course.began - self._exact_s))

    # --- the scheduler's side

    def _new_id(self) -> str:
        return f"foretold-{next(self._ids)}"

    def _apply(self, change: Transaction) -> None:
        state, ends = self.state, self.course.ends
        while True:
            changes.apply(state, change, self.now)
            ends.update({record.id: self.now for record in change.operations if record.is_finished})
            change = settling.settle(state, self.now)
            if change.is_empty:
                break
        state.take_expired()
        self._barren.clear()

    def _update(self) -> None:
        state, now = self.state, self.now
        for node_id, host in self._hosts.items():
            if host.beat_at and (node := state.nodes.get(node_id)) is not None:
                node.last_seen = now
        expired = settling.expire(state, now)
        if not expired.is_empty or settling.is_unsettled(state, now):
            self._apply(settling.recount(state, expired, now) if expired.removed_nodes else expired)
        step_s = self._step_s(self.pace.update_s)
        for name, tree in list(state.trees.items()):
            updater = self._updaters.setdefault(name, FairShareUpdater())
            result = updater.update(updates.make_snapshot(state, tree), now, self._updated_at.get(name))
            self._updated_at[name] = now
            updates.accept_update(state, tree, result, now)
            self._sum_up(tree, step_s)
        self._barren.clear()
        self._at(now + step_s, "update")

    def _sum_up(self, tree: Tree, step_s: float) -> None:
        sums = self.course.core_seconds
        for pool in (tree.root, *tree.pools.values()):
            share, used = sums.get((tree.name, pool.name), (0.0, 0.0))
            share += pool.fair_share[CPU] * tree.total[CPU] * step_s
            sums[tree.name, pool.name] = share, used + pool.usage[CPU] * step_s

    def _arrive(self, like: OperationRecord) -> None:
        state = self.state
        record = like.__class__(
            **{name: getattr(like, name) for name in like.__struct_fields__ if name not in _OF_A_RUN},
            id=self._new_id(), sequence=state.sequence + 1, start_time=self.now,
        )  # fmt: skip
        if any(name not in state.trees for name in record.trees):
            return
        self.course.arrived[record.id] = record
        self._apply(Transaction(operations=(record,)))

    # --- the nodes' side

    def _left_s(self, job: Job, ran_s: float) -> float:
        left_s = self.load.left_s(job.element.operation.record, job.task, ran_s)
        limit_ms = job.task.job_time_limit
        return left_s if limit_ms is None else min(left_s, max(limit_ms / 1e3 - ran_s, 0.0))

    def _end(self, node_id: str, job_id: str, end: Literal["completed", "aborted"]) -> None:
        host = self._hosts[node_id]
        process = host.processes.pop(job_id)
        order = process.order
        host.news.pop(job_id, None)
        host.gone.append(job_id)
        host.finished[job_id] = FinishedJob(
            job_id, order.operation_id, end, order.task, 0 if end == "completed" else None,
            start_time=process.began, finish_time=self.now,
        )  # fmt: skip
        self._react(node_id)

    def _react(self, node_id: str) -> None:
        host = self._hosts[node_id]
        if self.now + REACTION_S < host.beat_at:
            host.beat_at = self.now + REACTION_S
            self._at(host.beat_at, "beat", node_id)

    def _settle_limit(self, node_id: str, job_id: str) -> None:
        """Lower the job's limit to its usage, as the monitor does."""
        host, job = self._hosts[node_id], self.state.jobs.get(job_id)
        if job is not None and job.is_active:
            ratio, _ = self.load.limit_of(job.element.operation.record, job.task)
            process = host.processes[job_id]
            host.news[job_id] = _report(process, process.order.cpu_limit * ratio)

    def _beat(self, node_id: str) -> None:
        state, now, host = self.state, self.now, self._hosts[node_id]
        node = state.nodes.get(node_id)
        if node is None:
            return
        host.beat_at = now + self._step_s(self.pace.heartbeat_s)
        self._at(host.beat_at, "beat", node_id)
        is_exact = now - self.course.began < self._exact_s
        if not is_exact and not host.news and not host.finished and self._is_at_rest(node):
            return
        receipt = heartbeats.receive(state, self._heartbeat(node, host), now)
        host.news, host.gone = {}, []
        if not receipt.accepted:
            return
        if not receipt.transaction.is_empty:
            self._apply(settling.recount(state, receipt.transaction, now))
        elif settling.is_unsettled(state, now):
            self._apply(NOTHING)
        before = len(self.course.starts)
        room = node.free, node.unordered_cores
        dispatch.schedule(state, node_id, now, self._new_id)
        changed = list_unstored(state)
        note_stored(state, changed)
        for record in changed:
            # If a gang starts on other nodes, or jobs there stop for it, the next heartbeats of these nodes report that
            # to them.
            other = self._hosts.get(record.node_id)
            if other is not None and record.node_id != node_id and other.beat_at > now + self.pace.heartbeat_s:
                other.beat_at = now + self.pace.heartbeat_s
                self._at(other.beat_at, "beat", record.node_id)
        self._obey(node, host, dispatch.answer(state, node_id, receipt, now))
        if (
            len(self.course.starts) == before
            and len(barren := self._barren.setdefault(self._kind_of(node), [])) < MOST_BARREN
        ):
            barren.append(room)

    def _kind_of(self, node: Node) -> Hashable:
        """Return the kind of a node: nodes of one kind are open to the same operations."""
        tree = self.state.trees.get(node.tree or "")
        fitting = tree.fittings.of(node) if tree is not None and tree.fittings else frozenset()
        return (node.tree, fitting, node.takes_secrets)

    def _is_at_rest(self, node: Node) -> bool:
        """Whether a heartbeat without news would change nothing, as far as the state shows."""
        rooms = self._barren.get(self._kind_of(node), ())
        free, cores = node.free, node.unordered_cores
        is_barren = any(dominates(room, free) and unordered >= cores for room, unordered in rooms)
        return dispatch.is_at_rest(self.state, node, is_barren)

    def _heartbeat(self, node: Node, host: _Host) -> NodeHeartbeat:
        is_first = node.sequence < 0
        news = (
            [_report(each, each.order.cpu_limit) for each in host.processes.values()]
            if is_first
            else host.news.values()
        )
        return NodeHeartbeat(
            node.id, node.incarnation, max(node.sequence, 0) + 1, self.now, node.capacity[CPU], list(news),
            finished_jobs=list(host.finished.values()), base=None if is_first else node.sequence, gone=host.gone,
            job_count=len(host.processes) + sum(job_id not in host.processes for job_id in node.strangers),
        )  # fmt: skip

    def _obey(self, node: Node, host: _Host, answer: HeartbeatAnswer) -> None:
        for job_id in answer.acknowledged:
            host.finished.pop(job_id, None)
        course, started = self.course, False
        for stop in answer.stop:
            if (process := host.processes.get(stop.job_id)) is not None:
                job = self.state.jobs.get(stop.job_id)
                if job is not None and job.stop is not None and not process.is_stopping:
                    course.stops.append(job.stop.record)
                self._end(node.id, stop.job_id, "aborted")
        for order in answer.start:
            if order.job_id in host.processes or order.job_id in host.finished:
                continue
            job = self.state.jobs.get(order.job_id)
            if job is None:
                continue
            process = host.processes[order.job_id] = _Process(order, self.now)
            host.news[order.job_id] = _report(process, order.cpu_limit)
            course.starts.append((self.now, order.operation_id, node.id))
            course.first_starts.setdefault(order.operation_id, self.now)
            self._at(self.now + self._left_s(job, 0.0), "end", node.id, order.job_id)
            ratio, after_s = self.load.limit_of(job.element.operation.record, job.task)
            if ratio < 1.0:
                self._at(self.now + after_s, "settles", node.id, order.job_id)
            started = True
        if started:
            self._react(node.id)


_OF_A_RUN: Final = frozenset({
    "id", "sequence", "start_time", "state", "running_in", "suspended", "finish_time", "counts", "error", "parents",
    "alias", "failure", "suspended_for",
})  # fmt: skip
"""Fields of a start that are different in the start of a similar operation."""


def _order_of(job: Job) -> JobOrder:
    """Return the part of a job's start that is reported back by the job's node."""
    return JobOrder(
        job.id, job.element.operation.id, job.task.name, "", job.task.cpu_limit, job.task.memory_limit,
        job.task.user_slots, "", {}, "", {}, 0.0,
    )  # fmt: skip


def _report(process: _Process, limit_cores: float) -> JobReport:
    order = process.order
    return JobReport(
        order.job_id, order.operation_id, order.cpu_limit, limit_cores, from_scheduler=True,
        stopping=process.is_stopping, task=order.task, start_time=process.began,
    )  # fmt: skip
