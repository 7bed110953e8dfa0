"""The running scheduler: one fair-share update per period, with commands and heartbeats between the updates.

Only the event loop's thread reads and changes the state. Two kinds of work are done in other threads: the computation
of an update, which reads a frozen snapshot, and writes to the store. Changes are made one after the other; each is
stored before it is applied. Heartbeats that change nothing lasting do not wait for changes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import msgspec
import structlog

from cpumond import __version__
from cpumond.core import wire
from cpumond.core.errors import CpumondError
from cpumond.core.words import count
from cpumond.fairshare.result import UpdateResult
from cpumond.fairshare.tree import Snapshot
from cpumond.fairshare.update import FairShareUpdater
from cpumond.scheduler.access.required import check
from cpumond.scheduler.answers.forecasts import Forecasts
from cpumond.scheduler.decide.admission import Ahead
from cpumond.scheduler.elements import Node, Tree
from cpumond.scheduler.event_log import EventLog, is_denied, log_event
from cpumond.scheduler.event_log.commands import Asked, make_command_event, make_pin_event, make_refusal_event
from cpumond.scheduler.event_log.happenings import make_change_events, make_refused_node_event, make_start_event
from cpumond.scheduler.events import IndexedEvent
from cpumond.scheduler.history.recorder import HistoryRecorder
from cpumond.scheduler.model import NO_SUCH_JOB, NODE_OFFLINE, TIMEOUT, CommandError, Rules
from cpumond.scheduler.model.node_failures import GUARD
from cpumond.scheduler.rights.tokens import NOBODY, User, hash_token
from cpumond.scheduler.service.garbage import manual_garbage_collection
from cpumond.scheduler.service.idle_watch import IdleWatch
from cpumond.scheduler.service.pace import first_period_s, look_s, next_period_s
from cpumond.scheduler.service.questions import Answer, NodeQuestions, Question
from cpumond.scheduler.service.rollout_watch import RolloutWatch
from cpumond.scheduler.service.stored import MUTATION, encode, encode_starts, load_state
from cpumond.scheduler.service.waste_notices import WasteNotices
from cpumond.scheduler.settings.operations import StartOperation
from cpumond.scheduler.settings.tree_file import ApplyTree
from cpumond.scheduler.settings.undo import ChangedSinceError, Undo, UndoChange
from cpumond.scheduler.state import State, blame, budgets, dispatch, heartbeats, settling, updates
from cpumond.scheduler.state.changes import apply
from cpumond.scheduler.state.commands import Command, note_refused, prepare
from cpumond.scheduler.state.nodes import SeveralTreesError, note_refused_node, register_node
from cpumond.scheduler.state.starts import list_settled, list_stops_of, list_unstored, note_stored, waits_for_store
from cpumond.scheduler.state.token_commands import TokenCommand, decide_token, prepare_token
from cpumond.scheduler.state.transaction import NOTHING, Transaction
from cpumond.scheduler.store import Change, Entry, FencedError, Store, StoreError
from cpumond.scheduler.store.lead import LeadView
from cpumond.scheduler.store.retention import LogRetention
from cpumond.scheduler.store.timings import Timings, name_write

T = TypeVar("T")
log = structlog.get_logger("cpumond.scheduler")

COLLECT_PERIOD_S = 60.0
FULL_COLLECTION = 5
"""One of this many collections is full: it covers all objects and delays heartbeats by a tenth of a second. The others
cover only objects created since the previous collection."""
MUTATION_AGE_S = 900.0
"""Seconds for which repeated commands are recognised. Clients repeat commands for a shorter time (yt_protocol.md 8)."""
MAX_MUTATIONS = 20_000
MAX_GROUP = 64
"""Maximum number of starts of operations in one write. Preparing them delays heartbeats by a few milliseconds."""
MAX_HELD_NAMED = 20
"""Maximum number of operations that are named in an error about secrets that cannot be read."""
_NUMBERS = chain.from_iterable(map(partial(struct.iter_unpack, "4I"), iter(partial(os.urandom, 4096), b"")))
"""Random numbers, read in advance: with each system call a different thread could take the interpreter for a while."""


class Clock:
    """Seconds since 1970 that never go back or jump: the wall clock at the start, plus the time that has passed since.

    ``scale``: how much faster than real time this clock runs; differs from 1 only in tests."""

    def __init__(self, scale: float = 1.0) -> None:
        self._wall_s = time.time()
        self._start_s = time.monotonic()
        self.scale = scale

    def now(self) -> float:
        return self._wall_s + (time.monotonic() - self._start_s) * self.scale

    def real_s(self, scheduler_s: float) -> float:
        return scheduler_s / self.scale


def make_id() -> str:
    """Return a random id of four hexadecimal numbers, as `yt` prints them."""
    a, b, c, d = next(_NUMBERS)
    return f"{a or 1:x}-{b or 1:x}-{c or 1:x}-{d or 1:x}"


@dataclass(frozen=True, slots=True)
class Reply:
    """Result of an executed command."""

    id: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(eq=False, slots=True)
class _WaitingStart:
    """Start of an operation that waits for the store. ``done``: gets the result of the start."""

    command: StartOperation
    asked: Asked
    remember: Callable[[Reply], Change] | None
    done: asyncio.Future[Reply]


@dataclass(slots=True)
class TreeUpdates:
    """State of one tree that is kept between its updates."""

    tree: Tree
    updater: FairShareUpdater = field(default_factory=FairShareUpdater)
    previous_time: float | None = None
    snapshot: Snapshot | None = None
    result: UpdateResult | None = None
    """The last update, with its input."""
    stored: bytes = b""


class Scheduler:
    """The scheduler's service without sockets. The API, the exporter and tests call it.

    ``state`` may be read in the event loop's thread at any time. ``ready`` is set after the first update."""

    def __init__(
        self, rules: Rules, store: Store, clock: Clock, update_period_s: float = 1.0,
        new_id: Callable[[], str] = make_id,
    ) -> None:  # fmt: skip
        self.store = store
        self.clock = clock
        self.new_id = new_id
        self.update_period_s = update_period_s
        self.timings = Timings()
        self.started_at = clock.now()
        self.store_problem = ""
        """Why the next process would not find the store in place; "" if it would. While set, commands are refused."""
        self.ready = asyncio.Event()
        self.updates: dict[str, TreeUpdates] = {}
        self.logs: NodeQuestions[wire.LogRequest, wire.JobLog] = NodeQuestions(make_id, "log")
        self.requests: NodeQuestions[wire.JobRequest, wire.JobReply] = NodeQuestions(make_id, "answer")
        self._changing = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._starts: deque[_WaitingStart] = deque()
        self._submitting: asyncio.Future[None] | None = None
        self._ended: list[Transaction] = []
        self._ending: asyncio.Future[None] | None = None
        self._starting: asyncio.Future[None] | None = None
        self.state, self.remembered = load_state(store, rules, self.started_at, new_id)
        """``remembered``: records that ``remember`` of ``execute`` made in an earlier run, by key, oldest first."""
        _log_unreadable(self.state)
        self.state.period_s = first_period_s(
            len(self.state.nodes), rules.heartbeat_period_s, rules.node_heartbeat_timeout_s
        )
        self._mutations = deque((float(entry.get("at_s", 0.0)), key) for key, entry in self.remembered.items())
        self.idle = IdleWatch(self.state, clock.now)
        self.rollout = RolloutWatch(self.state, clock.now, self.execute)
        self.history: HistoryRecorder | None = None
        """Recorder of the history; None if no history is kept."""
        self.forecasts: Forecasts | None = None
        """Forecasts of operations; None if they are off."""
        self.trace: Callable[[], None] | None = None
        """Function that sends traces of operations that have ended; None if no traces are sent."""
        self.waste: WasteNotices | None = None
        """Sends notices of waste; None if no notices are sent."""
        self.retention: LogRetention | None = None
        """Truncates the store's log; None if the log is never truncated."""
        self.lead: Callable[[], LeadView] | None = None
        """Function that shows the leader election; None if only this scheduler uses the store."""
        self.event_log = EventLog(self.state, store, clock.now, partial(self._write, []))

    async def execute(
        self, command: Command | TokenCommand | UndoChange, user: User | str,
        remember: Callable[[Reply], Change] | None = None, plan: str = "",
    ) -> Reply:  # fmt: skip
        """Check a command as a whole, then store and apply it. Raises CommandError or StoreError.

        ``user``: a user given as text has all rights. Rights are checked before anything else.

        ``remember``: makes a record, of kind MUTATION, for the case that the client repeats the command. The record is
        stored in the same write as the command, and kept for MUTATION_AGE_S. ``plan``: plan that the user saw before.
        The entry of the audit log, another part of this write, contains it."""
        actor = user if isinstance(user, User) else User(user, admin=True)
        return await _to_the_end(self._execute(command, Asked(actor, plan, term=self.term), remember))

    async def _execute(
        self, asked_for: Command | TokenCommand | UndoChange, asked: Asked, remember: Callable[[Reply], Change] | None
    ) -> Reply:
        try:
            command = await self.event_log.resolve(asked_for) if isinstance(asked_for, UndoChange) else asked_for
            if isinstance(command, StartOperation):
                return await self._start(command, asked, remember)
            async with self._changing:
                return await self._carry_out(command, asked, remember)
        except CpumondError as error:
            self.timings.refused_commands += not isinstance(error, StoreError)
            note_refused(self.state, asked_for, error, self.clock.now())
            if isinstance(error, CommandError) and is_denied(error):
                told = make_refusal_event(self.state.trees, asked_for, asked, error, self.clock.now())
                error.is_recorded = True
                await self.event_log.record_refusal(told)
            if isinstance(error, ChangedSinceError) and isinstance(command, Undo):
                raise await self.event_log.explain(command, error) from None
            raise

    async def _carry_out(
        self, command: Command | TokenCommand, asked: Asked, remember: Callable[[Reply], Change] | None
    ) -> Reply:
        now = self.clock.now()
        if isinstance(command, TokenCommand):
            allowed_by = decide_token(self.state.tokens, command, asked.user).because
            change = prepare_token(self.state.tokens, command, asked.user, now)
        else:
            allowed_by = check(self.state, command, asked.user)
            change = prepare(self.state, command, asked.user.name, now, self.new_id)
        reply = Reply(change.id, change.warnings)
        if isinstance(command, ApplyTree) and change.is_empty:
            return reply  # applying the same file again is not recorded
        told = make_command_event(self.state, command, replace(asked, allowed_by=allowed_by), change, now)
        await self._commit(change, [] if remember is None else self._remember(remember(reply)), [told])
        self.timings.commands += 1
        log_event(told.event, id=change.id or None, warnings=change.warnings or None)
        await self._settle()
        return reply

    async def _start(self, command: StartOperation, asked: Asked, remember: Callable[[Reply], Change] | None) -> Reply:
        """Start an operation. All starts that arrive while the store is busy share the next write."""
        waiting = _WaitingStart(command, asked, remember, asyncio.get_running_loop().create_future())
        self._starts.append(waiting)
        if len(self._starts) == 1:
            self._submitting = asyncio.ensure_future(self._carry_out_starts())
        return await waiting.done

    async def _carry_out_starts(self) -> None:
        async with self._changing:
            waiting, self._starts = self._starts, deque()
            most = MAX_GROUP
            while waiting:
                group: list[_WaitingStart] = []
                try:
                    await self._carry_out_group(waiting, group, most)
                    most = MAX_GROUP
                except CommandError as error:
                    # Records of the group cannot be stored; therefore each start is tried alone.
                    most = 1
                    if len(group) > 1:
                        waiting.extendleft(reversed(group))
                    else:
                        group[0].done.set_exception(error)
                except Exception as error:
                    for each in group or [waiting.popleft()]:
                        each.done.set_exception(error)

    async def _carry_out_group(self, waiting: deque[_WaitingStart], group: list[_WaitingStart], most: int) -> None:
        """Execute the first starts of ``waiting`` (up to ``most``) in one write, and move them to ``group``. The group
        ends before a start whose refusal may be caused by earlier ones; that start is tried again after the write."""
        now, ahead, made = self.clock.now(), Ahead(), list[Transaction]()
        told, kept, is_open = list[IndexedEvent](), list[Change](), True
        while waiting and is_open and len(group) < most:
            each = waiting[0]
            try:
                allowed_by = check(self.state, each.command, each.asked.user)
                change = prepare(self.state, each.command, each.asked.user.name, now, self.new_id, ahead)
            except CommandError as error:
                if group:
                    break
                waiting.popleft().done.set_exception(error)
                continue
            group.append(waiting.popleft())
            made.append(change)
            is_open = ahead.add(change.operations[0], self.state.trees)
            asked = replace(each.asked, allowed_by=allowed_by)
            told.append(make_command_event(self.state, each.command, asked, change, now))
            if each.remember is not None:
                kept += self._remember(each.remember(Reply(change.id, change.warnings)))
        if not group:
            return
        operations = tuple(record for change in made for record in change.operations)
        vaults = tuple(vault for change in made for vault in change.vaults)
        await self._commit(Transaction(operations=operations, vaults=vaults), kept, told)
        self.timings.commands += len(group)
        for change, event in zip(made, told, strict=True):
            log_event(event.event, id=change.id, warnings=change.warnings or None)
        await self._settle()
        for each, change in zip(group, made, strict=True):
            each.done.set_result(Reply(change.id, change.warnings))

    @property
    def term(self) -> int:
        """Term in which this scheduler leads; 0 if no other scheduler uses the store."""
        return 0 if self.lead is None else self.lead().term

    def _remember(self, mutation: Change) -> list[Change]:
        """Return the changes that store ``mutation`` and delete mutations that are too old or too many."""
        now = self.clock.now()
        changes = [mutation]
        while self._mutations and (
            self._mutations[0][0] < now - MUTATION_AGE_S or len(self._mutations) >= MAX_MUTATIONS
        ):
            # If the write is refused, the old mutations stay in the store until the next start, which checks their age.
            changes.append(Change(MUTATION, self._mutations.popleft()[1], None))
        self._mutations.append((now, mutation.key))
        return changes

    async def _commit(
        self, change: Transaction, also: Iterable[Change] = (), told: Iterable[IndexedEvent] = ()
    ) -> None:
        """Store a change with its events, then apply it. If the store refuses the write, nothing changes."""
        change = budgets.settle(self.state, change)
        changes = [*encode(change, self.state.config), *also]
        told = (*told, *make_change_events(self.state, change, self.clock.now()))
        entries = [self.event_log.encode(each) for each in told]
        if changes or entries:
            await self._write(changes, entries, change)
        apply(self.state, change, self.clock.now())
        for name in [name for name in self.updates if self.updates[name].tree is not self.state.trees.get(name)]:
            del self.updates[name]
        expired = self.state.take_expired()
        if expired:
            with contextlib.suppress(StoreError):  # the next start of the scheduler deletes the rest
                await self._write([Change(kind, key, None) for kind, key in expired])

    async def write(self, changes: Sequence[Change]) -> None:
        """Store records that are no part of the state. Raises StoreError."""
        await self._write(changes)

    async def _write(
        self, changes: Sequence[Change], entries: Sequence[Entry] = (), change: Transaction = NOTHING
    ) -> None:
        # Only one thread may use a store at a time. Volumes are written in between and delay changes only briefly.
        async with self._writing:
            if change.stops is not None or change.settled:
                # After a take-over the scheduler must find the stops with their reasons. No start is being stored now.
                stops = [] if change.stops is None else list_stops_of(self.state, change.stops)
                changes = [*changes, *encode_starts(list_settled(self.state, change.settled, stops))]
            await self._write_now(changes, entries)

    async def _write_now(self, changes: Sequence[Change], entries: Sequence[Entry] = ()) -> None:
        begun = time.perf_counter()
        try:
            await asyncio.to_thread(self.store.write, changes, entries)
        except StoreError as error:
            self.timings.store_errors += 1
            self.timings.store_error_at = self.clock.now()
            # Each refused write is logged. A failed check, which is an empty write, is logged once for each problem.
            if changes or str(error) != self.store_problem:
                log.error("store_write_failed", error=str(error))
            if not changes:
                self.store_problem = str(error)
            raise
        if self.store.lost_total != self.timings.store_losses:
            self.timings.store_losses, self.timings.store_lost_at = self.store.lost_total, self.clock.now()
        if not changes:
            self.store_problem = ""
        if changes or entries:
            about = name_write(changes)
            self.timings.store_write.observe(time.perf_counter() - begun, about)
            self.timings.store_commit.observe(self.store.commit_s, about)

    async def _settle(self) -> None:
        try:
            while not (change := settling.settle(self.state, self.clock.now())).is_empty:
                await self._commit(change)
        except StoreError:
            # The command itself is stored and stays valid. Its consequences are stored at the next change or update.
            settling.mark_unsettled(self.state)

    async def register(self, registration: wire.NodeRegistration, may_replace: bool = True) -> wire.RegistrationAnswer:
        """Register a node (``register_node``). Raises CommandError or StoreError."""
        if registration.key:
            registration = msgspec.structs.replace(registration, key=hash_token(registration.key))
        try:
            await _to_the_end(self._register(registration, may_replace))
        except CommandError as error:
            await self.event_log.record_refusal(make_refused_node_event(registration, error, self.clock.now()))
            raise
        node = self.state.nodes[registration.node_id]
        log.info("node_registered", node_id=node.id, tree=node.tree, incarnation=node.run)
        return wire.RegistrationAnswer(
            node_id=node.id,
            tree=node.tree,
            heartbeat_period_s=self.state.period_s,
            warning="" if node.tree else "no tree's nodes_filter fits the node's tags; it gets no work",
        )

    async def _register(self, registration: wire.NodeRegistration, may_replace: bool) -> None:
        async with self._changing:
            try:
                change = register_node(self.state, registration, may_replace)
            except SeveralTreesError as refused:
                note_refused_node(self.state, refused, self.clock.now())
                await self._commit(refused.change)
                raise
            await self._commit(change)

    async def heartbeat(self, heartbeat: wire.Heartbeat) -> wire.HeartbeatAnswer:
        """Process a heartbeat, and return the jobs that the node must start and stop. Raises StoreError if ends of jobs
        cannot be stored. The response omits starts that cannot be stored."""
        begun = time.perf_counter()
        state = self.state
        receipt = heartbeats.receive(state, heartbeat, self.clock.now())
        if not receipt.accepted:
            self.timings.dropped_heartbeats += 1
            return wire.HeartbeatAnswer(
                accepted=False, reason=receipt.reason, register=receipt.register, full=receipt.full
            )
        if not receipt.transaction.is_empty:
            await self._end_jobs(receipt.transaction)
        if heartbeat.node_id not in state.nodes:
            return wire.HeartbeatAnswer(accepted=False, reason="the node was removed", register=True)
        dispatch.schedule(state, heartbeat.node_id, self.clock.now(), self.new_id)
        if waits_for_store(state, heartbeat.node_id):
            await self._store_starts()
        node = state.nodes.get(heartbeat.node_id)
        if node is None or node.incarnation != heartbeat.incarnation:
            return wire.HeartbeatAnswer(accepted=False, reason="the node was removed or replaced", register=True)
        answer = dispatch.answer(state, heartbeat.node_id, receipt, self.clock.now())
        logs, requests = (each.questions_for(heartbeat.node_id) for each in (self.logs, self.requests))
        if logs or requests:
            answer = msgspec.structs.replace(answer, logs=logs, requests=requests)
        self.timings.heartbeat.observe(time.perf_counter() - begun, heartbeat.node_id)
        return answer

    async def read_log(
        self, operation_id: str, job_id: str, stream: wire.LogStream, tail_bytes: int, offset: int | None = None
    ) -> wire.JobLog:
        """Return the last bytes of a job's output, or the bytes from ``offset`` on, at most ``MAX_LOG_BYTES``. The node
        of the job reads them.

        Raises CommandError if the operation or job is unknown, the job not started, or its node is away or silent."""
        node_id = self.state.find_job_node(operation_id, job_id)
        node = self.state.nodes.get(node_id)
        if node is None:
            raise CommandError(
                f"job {job_id} ran on node {node_id}, which is no longer known; the node's agent still "
                "has its log for a while",
                NODE_OFFLINE,
            )
        record = self.state.find_record(operation_id)
        job = self.state.jobs.get(job_id) or self.state.finished_jobs[record.id][job_id]
        bound = next((task.max_stderr_size for task in record.tasks if task.name == job.task_name), None)
        if bound is not None and stream == "stderr" and offset is None:
            tail_bytes = min(tail_bytes, bound)  # a journal may contain more bytes of the job
        wanted = wire.LogRequest("", job_id, stream, tail_bytes, offset)
        read = await self._ask(self.logs, node, wanted, "its log can be read")
        if read.error:
            raise CommandError(f"job {job_id}: {read.error}", NO_SUCH_JOB)
        return read

    async def ask_job(
        self, operation_id: str, job_id: str, kind: wire.RequestKind, cpu_limit: float | None = None,
        ttl_s: float | None = None, user: User = NOBODY,
    ) -> dict[str, Any]:  # fmt: skip
        """Ask the agent of a live job's node to explain or change its limit (``JobRequest``). Returns the answer.

        When this returns, a pin is on the node's disk. Raises CommandError if the operation or job is unknown, if the
        job has not started or has ended, or if its node is away, does not answer, refuses or fails."""
        node_id = self.state.find_job_node(operation_id, job_id)
        job = self.state.jobs.get(job_id)
        if job is None:
            raise CommandError(
                f"job {job_id} has ended; only its log and counters remain, it can no longer be explained or changed",
                NO_SUCH_JOB,
            )
        is_change = kind != "explain"
        question = wire.JobRequest("", kind, job_id, cpu_limit, ttl_s)
        # Changes are not shared, even if two are equal: they are made in the order of their requests.
        try:
            reply = await self._ask(self.requests, job.node, question, f"{kind} it again", share=not is_change)
        except CommandError as error:
            if is_change and error.code == TIMEOUT:
                text = f"{error}. It is not known whether the {kind} was carried out; explain the job to find out"
                raise CommandError(text, TIMEOUT) from None
            raise
        if reply.error or reply.value is None:
            text = f"node {node_id}: {reply.error or 'it gave no answer'}"
            raise CommandError(text) if reply.is_refused else CommandError(text, NODE_OFFLINE)
        if is_change:
            await self.event_log.record(
                make_pin_event(self.state.trees, job, question, Asked(user, term=self.term), self.clock.now())
            )
        return reply.value

    async def _ask(
        self, asked: NodeQuestions[Question, Answer], node: Node, question: Question, later: str, share: bool = True
    ) -> Answer:
        """Ask a node about a job. ``later``: advice what to do once the node is back. Raises CommandError."""
        if not node.is_online:
            silent_s = self.clock.now() - node.last_seen
            raise CommandError(
                f"job {question.job_id} is on node {node.id}, which sent its last heartbeat {silent_s:.0f} s ago; "
                f"{later} when the node's agent is back",
                NODE_OFFLINE,
            )
        try:
            return await asked.ask(node.id, question, share)
        except CommandError as error:
            if error.code != TIMEOUT:
                raise
            silent_s = self.clock.now() - node.last_seen
            text = f"{error}: is its agent running? Its last heartbeat was {silent_s:.0f} s ago"
            raise CommandError(text, TIMEOUT) from None

    async def _end_jobs(self, change: Transaction) -> None:
        """Store and count ended jobs. All ends that arrive while the store is busy share the next write."""
        self._ended.append(change)
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._commit_ended())
        await asyncio.shield(self._ending)

    async def _commit_ended(self) -> None:
        async with self._changing:
            waiting, self._ended, self._ending = self._ended, [], None
            # The newest reports of a node are kept: only the loss of jobs that came back with their node is dropped.
            state, now = self.state, self.clock.now()
            ended = [settling.recount(state, change, now) if change.removed_nodes else change for change in waiting]
            jobs = tuple(job for change in ended for job in change.jobs)
            gone = tuple(node_id for change in ended for node_id in change.removed_nodes)
            # Other changes may have changed the operations of these jobs meanwhile.
            await self._commit(settling.recount(state, Transaction(jobs=jobs, removed_nodes=gone), self.clock.now()))
            await self._settle()

    async def _store_starts(self) -> None:
        """Store the starts of all jobs. Heartbeats that wait while the store is busy share one write.

        Raises only FencedError. After any other error the jobs wait for the next heartbeat of their node."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._write_starts())
        await asyncio.shield(self._starting)

    async def _write_starts(self) -> None:
        async with self._writing:
            self._starting = None
            # Ends that were stored have been applied; therefore no start is stored after the end of its job.
            starts = list_unstored(self.state)
            try:
                if starts:
                    await self._write_now(encode_starts(starts))
            except FencedError:
                raise
            except StoreError:
                return  # logged
            note_stored(self.state, starts)

    async def run(self, stopping: asyncio.Event) -> None:
        """Update all trees once per period until ``stopping``."""
        period_s = self.clock.real_s(self.update_period_s)
        loop = asyncio.get_running_loop()
        due = loop.time()
        collected, collections = due, 0
        looked, worked_s = due, time.thread_time()
        self.event_log.note(make_start_event(self.started_at, __version__, self.term))
        with manual_garbage_collection():
            while not stopping.is_set():
                await self.update_all()
                self.ready.set()
                self.idle.take_if_due()
                await self.rollout.look()
                await self._cordon_failing()
                if self.forecasts is not None:
                    self.forecasts.take_if_due()
                if self.history is not None:
                    self.history.take_if_due(self.clock.now())
                if self.trace is not None:
                    self.trace()
                if self.waste is not None:
                    self.waste.take_if_due()
                if self.retention is not None:
                    await self.retention.cut_if_due(self.store, self._writing, self.clock.now())
                now = loop.time()
                if now - looked > look_s(self.state.period_s):
                    load, worked_s = (time.thread_time() - worked_s) / (now - looked), time.thread_time()
                    looked, rules = now, self.state.rules
                    self.state.period_s = next_period_s(
                        self.state.period_s, load, rules.heartbeat_period_s, rules.node_heartbeat_timeout_s
                    )
                if now - collected > COLLECT_PERIOD_S:
                    collected, collections = now, collections + 1
                    _collect(collections)
                due += period_s
                self.timings.count_update(self.clock.now() if due < now else None)
                due = max(due, now)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), max(due - loop.time(), 0.0))
        for each in (self.idle, self.forecasts, self.waste):
            if each is not None:
                await each.close()
        if self.trace is not None:
            self.trace()
        if self.history is not None:
            await self.history.close(self.clock.now())

    async def _cordon_failing(self) -> None:
        for command in list(blame.list_cordons(self.state)):
            try:
                await self.execute(command, User(GUARD, admin=True))
            except CpumondError as error:  # the next update tries again
                log.warning("node_not_cordoned", node_id=command.node, error=str(error))

    async def close(self) -> None:
        """Close the store after the current write. Later writes are refused."""
        async with self._writing:
            await asyncio.to_thread(self.store.close)

    async def update_all(self) -> None:
        """Check the store's location, expire silent nodes, and update each tree. A failed update of one tree does not
        stop the updates of other trees."""
        begun = time.perf_counter()
        entries = self.event_log.take()
        try:
            await self._write([], entries)
        except StoreError:
            self.event_log.give_back(entries)
        try:
            now = self.clock.now()
            expired = settling.expire(self.state, now)
            if expired.removed_nodes:
                log.warning("nodes_lost", nodes=expired.removed_nodes, jobs=len(expired.jobs))
            if not expired.is_empty or settling.is_unsettled(self.state, now):
                await self._end_jobs(expired)
        except StoreError:
            pass  # logged; the next update tries again
        if self.state.budgets:
            await self._look_at_budgets()
        names, broken, slowest = list(self.state.trees), 0, (0.0, "")
        for name in names:
            begun_tree = time.perf_counter()
            try:
                await self._update(name)
            except StoreError:
                self.timings.failed_updates += 1
                self.timings.failed_at = self.clock.now()
            except Exception:
                self.timings.failed_updates += 1
                self.timings.failed_at = self.clock.now()
                broken += 1
                log.exception("update_failed", tree=name)
            slowest = max(slowest, (time.perf_counter() - begun_tree, name))
        self.timings.good_updates += broken < max(len(names), 1)
        self.timings.update_s = time.perf_counter() - begun
        self.timings.update.observe(self.timings.update_s, slowest[1])

    async def _look_at_budgets(self) -> None:
        async with self._changing:
            change = budgets.look(self.state, self.clock.now())
            if not change.is_empty:
                with contextlib.suppress(StoreError):  # logged; the next update tries again
                    await self._commit(change)

    async def _update(self, name: str) -> None:
        tree = self.state.trees.get(name)
        if tree is None:
            return  # the tree was removed during the update of a different tree
        kept = self.updates.setdefault(name, TreeUpdates(tree))
        now = self.clock.now()
        snapshot = updates.make_snapshot(self.state, tree)
        result = await asyncio.to_thread(kept.updater.update, snapshot, now, kept.previous_time)
        if self.state.trees.get(name) is not tree:
            return
        kept.previous_time, kept.snapshot, kept.result = now, snapshot, result
        updates.accept_update(self.state, tree, result, now)
        progress = msgspec.json.encode(updates.progress_of(tree))
        if progress != kept.stored:
            await self._write([Change("progress", name, progress)])
            kept.stored = progress


def _log_unreadable(state: State) -> None:
    held = [each.id for each in state.operations.values() if each.lacks_secrets]
    if held:
        log.error(
            "secrets_not_readable",
            error=f"secrets of {count(len(held), 'operation')} need keys that this scheduler does not have",
            operations=held[:MAX_HELD_NAMED],
            keys=sorted({state.vaults[each].key for each in held if each in state.vaults}),
            advice="their jobs are not started; put the keys back into secrets_key_file and start it again",
        )


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` in its own task. If a request is cancelled, a change that is stored must still be applied."""
    return await asyncio.shield(asyncio.ensure_future(work))


def _collect(number: int) -> None:
    gc.collect(1 if number % FULL_COLLECTION else 2)
