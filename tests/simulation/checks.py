"""What must hold: at each step (safety), and once the faults have ended (liveness)."""

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import msgspec
from scheduler_world import assert_consistent
from simulation.database import Database
from simulation.events import Events
from simulation.hosts import Host, Process

from cpumond.core.wire import HeartbeatAnswer
from cpumond.fairshare.resources import CPU, add
from cpumond.host.executor.model import Ended
from cpumond.scheduler.decide.gangs import find_places, list_backfilled, may_take_back, sum_backfilled
from cpumond.scheduler.decide.placement import GANG_WAITS
from cpumond.scheduler.elements import Job, Tree
from cpumond.scheduler.model import FINISHED_OPERATION_STATES, JobRecord, OperationRecord, StartRecord
from cpumond.scheduler.model.failures import FAILED_JOBS_LIMIT_EXCEEDED
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.settings import operations
from cpumond.scheduler.settings.commands import ChangePool, ChangeTree, CreatePool
from cpumond.scheduler.settings.retries import parse_rule
from cpumond.scheduler.settings.spec_patch import MAX_FAILED
from cpumond.scheduler.state import State, gangs, lifecycle
from cpumond.scheduler.state.commands import Command
from cpumond.scheduler.store import Change
from cpumond.scheduler.store.entries import Row

GIVEN_UP = ("aborted", "lost")
FITS = 1e-6
RETRIED_MEMORY, BOUNDED_POOL, BOUND = 200_000_000, "pool0", 1_000_000_000
"""Bytes that jobs with a policy order; the pool with ``max_retry_memory``, and that."""
SECRET = "hunter2 of "  # noqa: S105
"""What the vaults of operations hold, each with its operation's title behind it; operations without one have none."""


class ViolationError(AssertionError):
    """A law does not hold; the message says when, which and where."""


class Ledger:
    """What was promised and what happened, seen from outside of all parts."""

    def __init__(self, events: Events, database: Database) -> None:
        self.events = events
        self.database = database
        self.checks = 0
        self.counts: dict[str, int] = {}
        self.trace = 0
        """A number that is another one as soon as anything is told in another order."""
        self.stopped: dict[str, None] = {}
        """Jobs that a scheduler decided to stop: others may do their work from then on."""
        self.aborted: dict[str, None] = {}
        """Jobs whose end a user asked for, and was promised."""
        self.abandoned: dict[tuple[str, str, str], str] = {}
        """Operation, incarnation and cookie -> the job with which a user gave up that work, and was promised."""
        self.most_jobs: dict[str, int] = {}
        """Operation -> the largest job_count that it ever had, as stored."""
        self.given_up: dict[str, None] = {}
        """Operations with a job that was given up: its work may be done twice if it was not lost after all."""
        self.completed_stopped: dict[str, int] = {}
        """Operation -> jobs that completed after they were told to stop or given up, and so were replaced perhaps."""
        self.sees_terms = True
        """Whether a write of a lower term is itself a violation; off to see whether what follows from it is found."""
        self.keeps_notes = False
        self.told: list[str] = []
        self.ever_started: dict[str, str] = {}
        """Job -> host."""
        self.begun: dict[str, int] = {}
        """Operation -> how many jobs of it had a process."""
        self.incarnations: dict[str, str] = {}
        """Operation with ``gang_options`` -> the incarnation of its job that began last."""
        self.living: dict[str, tuple[Host, Process]] = {}
        self.failed: dict[str, None] = {}
        """Jobs that ended without their work done: what replaces them may be stored before their ends are."""
        self.operations: dict[str, OperationRecord] = {}
        """As stored."""
        self.acknowledged_starts: dict[str, None] = {}
        self.acknowledged_ends: dict[str, None] = {}
        self.acknowledged_mutations: dict[str, str] = {}
        """Their commands."""
        self.logged: dict[str, int] = {}
        """Mutation -> the number of its entry in the log; each command is sent in the name of a user of its own."""
        self.weights: dict[str, float] = {}
        self.acknowledged_weights: dict[str, float] = {}
        """By pool; each user's pool only gets heavier."""
        self.classes: dict[str, bool] = {}
        """Job -> whether it is on reclaimed CPU, as stored."""
        self.job_states: dict[str, str] = {}
        """As stored."""
        self.done: dict[tuple[str, str], None] = {}
        """Operation and cookie of jobs that completed, as stored."""
        self.used_terms: dict[str, int] = {}
        """Run of an agent -> the highest term of an answer that it used."""
        self.clocks: dict[int, Clock] = {}
        """Term -> its scheduler's clock."""
        self.retried: dict[tuple[str, int], None] = {}
        """Operation and cookie of jobs that were started again: others of their gang wait for that no more."""
        self.memory: dict[str, int] = {}
        """Job of an operation with a retry policy -> the memory of its order, as stored."""
        self.leases: dict[int, float] = {}
        """Term -> when its lease ends if it is not renewed, in the world's time."""
        self.find_state: Callable[[], State | None] = lambda: None
        """The present state of the scheduler that leads."""
        database.on_write = self.written
        database.on_lease = self._leased

    def note(self, what: str, *facts: Any) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
        if self.keeps_notes:
            self.told.append(f"{self.events.now:.3f} {what} {' '.join(map(str, facts))}")
        self.trace = zlib.crc32(f"{self.trace} {self.events.now:.9f} {what} {facts}".encode())

    def check(self, holds: bool, law: str) -> None:
        self.checks += 1
        if not holds and self.events.violation is None:
            # It is found in the middle of other code, which must not catch it.
            self.events.violation = ViolationError(f"after {self.events.now:.3f} s: {law}")

    # --- hosts

    def started(self, host: Host, process: Process) -> None:
        job_id = process.launch.job_id
        self.note("started", host.name, job_id)
        before = self.ever_started.get(job_id)
        self.check(before is None, f"job {job_id} was started on {host.name}, and on {before} before")
        self.ever_started[job_id] = host.name
        self.living[job_id] = host, process
        cores = sum(each.launch.cpu_limit for each in host.processes.values())
        self.check(cores <= host.cpu + FITS, f"{host.name} runs jobs of {cores} cores and has {host.cpu}")
        is_told = not process.launch.reclaimed or self.classes.get(job_id, True)
        self.check(is_told, f"job {job_id} was started on reclaimed CPU and is ordinary")
        self._check_numbers(process)
        self._check_secrets(process)
        memory = self.memory.get(job_id)
        is_told = memory in (None, process.launch.memory_limit)
        self.check(is_told, f"job {job_id} has {process.launch.memory_limit} bytes of memory, its start {memory}")
        self.begun[process.operation_id] = self.begun.get(process.operation_id, 0) + 1
        self._check_work(process.operation_id)

    def _check_numbers(self, process: Process) -> None:
        """A job begins its work only when nothing else works in its place, with its rank, or for an incarnation of
        before: not even what was told to stop, only what was given up with a node that is cut off."""
        new, told = process.launch.job_id, process.launch.environment
        incarnation, rank = told.get("YT_OPERATION_INCARNATION", ""), told.get("YT_GANG_RANK", "")
        if incarnation:
            self.note("gang job", incarnation, rank)
            if self.incarnations.setdefault(process.operation_id, incarnation) != incarnation:
                self.incarnations[process.operation_id] = incarnation
                self.note("switched", process.operation_id, incarnation)
        given_up = self.abandoned.get((process.operation_id, incarnation, told["YT_JOB_COOKIE"]))
        is_of_before = new in self.stopped or self.job_states.get(new) in GIVEN_UP
        self.check(given_up is None or is_of_before, f"job {new} begins the work abandoned with job {given_up}")
        for job_id, (host, other) in self.living.items():
            if other.operation_id != process.operation_id or job_id == new or self.job_states.get(job_id) in GIVEN_UP:
                continue
            of_other = other.launch.environment
            where = f"job {new} of operation {process.operation_id} begins while {job_id} works on {host.name}, with"
            self.check(of_other["YT_JOB_COOKIE"] != told["YT_JOB_COOKIE"], f"{where} the same cookie")
            self.check(of_other.get("YT_OPERATION_INCARNATION", "") == incarnation, f"{where} another incarnation")
            self.check(not rank or of_other.get("YT_GANG_RANK", "") != rank, f"{where} the same rank {rank}")

    def _check_secrets(self, process: Process) -> None:
        record = self.operations.get(process.operation_id)
        title = record.title if record is not None and record.title.startswith("client") else ""
        if title:
            self.note("has secrets", process.launch.job_id)
        found = {**process.launch.environment, **process.launch.secrets}.get("YT_SECURE_VAULT_word", "")
        of_it = f"job {process.launch.job_id} of operation {process.operation_id}"
        self.check(found == (SECRET + title if title else ""), f"{of_it} begins without its secrets")
        self.check(SECRET not in str(process.launch.environment), f"{of_it} has its secrets where others see them")

    def _check_work(self, operation_id: str) -> None:
        """No more jobs of an operation do its work at one time than it has: those that are told to stop, and those that
        were given up because their node was silent, do it no more."""
        record = self.operations.get(operation_id)
        self.check(record is not None, f"a job of operation {operation_id} runs, which is not stored")
        if record is None or record.state in FINISHED_OPERATION_STATES:
            return
        task, begun = record.tasks[0], self.begun[operation_id]
        is_once = not task.fail_on_job_restart or begun <= self.most_jobs[operation_id]
        self.check(is_once, f"operation {operation_id} began {begun} of {task.job_count} jobs that must not run twice")
        doing = [
            job_id
            for job_id, (host, process) in self.living.items()
            if process.operation_id == operation_id
            and not process.is_stopping
            and self.job_states.get(job_id) not in (*GIVEN_UP, "completed")  # the latter: abandoned
            and job_id not in self.stopped
        ]
        completed = record.counts[task.name].completed if task.name in record.counts else 0
        completed -= self.completed_stopped.get(operation_id, 0)
        # What is too much after a change of job_count is told to stop once that is stored.
        most = self.most_jobs[operation_id]
        self.check(
            len(doing) + completed <= most,
            f"operation {operation_id} has {most} jobs, {completed} completed and {doing} running",
        )

    def list_living(self, operation_id: str) -> list[str]:
        """The jobs of an operation that have a process."""
        return [job_id for job_id, (_, process) in self.living.items() if process.operation_id == operation_id]

    def ended(self, host: Host, process: Process, ended: Ended | None) -> None:
        self.note("ended", host.name, process.launch.job_id)
        self.living.pop(process.launch.job_id, None)
        if ended is None or ended.exit_code != 0:
            self.failed[process.launch.job_id] = None

    def answered(self, host: Host, answer: HeartbeatAnswer) -> None:
        """An agent got an answer that it will carry out."""
        self.note("heartbeats", host.name, len(answer.start))
        for job_id in answer.acknowledged:
            finished = host.agent.assigned.jobs.get(job_id) if host.agent is not None else None
            if finished is None or finished.order.operation_id not in self.operations:
                continue
            # What another job has completed meanwhile needs no second end.
            is_done = (finished.order.operation_id, finished.order.variables["YT_JOB_COOKIE"]) in self.done
            is_stored = job_id in self.job_states or is_done
            self.check(is_stored, f"the end of job {job_id} was acknowledged and is not stored")

    def took_term(self, host: Host, incarnation: str, term: int | None) -> None:
        before = self.used_terms.get(incarnation, 0)
        self.check((term or 0) >= before, f"{host.name} used an answer of term {term} after one of {before}")
        self.used_terms[incarnation] = max(term or 0, before)

    # --- clients

    def acknowledged(self, command: Command, operation_id: str, mutation_id: str) -> None:
        self.note("acknowledged", type(command).__name__, operation_id)
        self.acknowledged_mutations[mutation_id] = type(command).__name__
        number = self.logged.get(mutation_id)
        self.check(number in self.database.log.rows, f"a {type(command).__name__} was acknowledged and is not logged")
        if isinstance(command, ChangeTree):
            return
        if isinstance(command, ChangePool | CreatePool):
            name = command.pool if isinstance(command, ChangePool) else command.name
            least = float(command.edits[0].value) if isinstance(command, ChangePool) else 0.0
            stored = self.weights.get(name)
            self.check(stored is not None and stored >= least, f"a change of pool {name} was acknowledged, not stored")
            self.acknowledged_weights[name] = least
            return
        record = self.operations.get(operation_id)
        self.check(record is not None, f"{type(command).__name__} of {operation_id} is acknowledged, not stored")
        if isinstance(command, operations.StartOperation):
            self.acknowledged_starts[operation_id] = None
        elif isinstance(command, operations.SuspendOperation) and command.abort_running_jobs:
            # Of what runs now, nothing may go on.
            for job_id, (_, process) in self.living.items():
                if process.operation_id == operation_id and job_id in self.stopped:
                    self.aborted[job_id] = None
        elif isinstance(command, operations.AbortJob):
            self.aborted[command.job_id] = None
        elif isinstance(command, operations.AbandonJob):
            self._job_abandoned(command.job_id)
        elif isinstance(command, operations.PatchOperation) and record is not None:
            shown = {"/tasks/t/job_count": record.tasks[0].job_count, MAX_FAILED: record.max_failed_job_count}
            for each in command.patches:
                is_stored = shown[each["path"]] == each["value"]
                self.check(is_stored, f"a change of {each['path']} of {operation_id} was acknowledged, not stored")
        elif isinstance(command, operations.AbortOperation | operations.CompleteOperation) and record is not None:
            self.acknowledged_ends[operation_id] = None
            self.check(record.is_finished, f"the end of operation {operation_id} was acknowledged and is not stored")

    def _job_abandoned(self, job_id: str) -> None:
        self.check(self.job_states.get(job_id) == "completed", f"job {job_id} was abandoned, and is not stored so")
        if job_id in self.living:
            _, process = self.living[job_id]
            told = process.launch.environment
            work = process.operation_id, told.get("YT_OPERATION_INCARNATION", ""), told["YT_JOB_COOKIE"]
            self.abandoned[work] = job_id

    def refused(self, command: Command, body: bytes) -> None:
        self.note("refused", type(command).__name__)
        is_full = b"Limit for the number of" in body
        self.check(not isinstance(command, operations.StartOperation) or is_full, f"refused a start: {body.decode()}")

    def gave_up(self, command: Command) -> None:
        self.note("gave up", type(command).__name__)

    # --- the database

    def written(self, changes: Sequence[Change], rows: Sequence[Row], term: int) -> None:
        """Is about to be: entries of the log come with the changes that they tell of."""
        self.note("written", term, [(kind, key) for kind, key, _ in changes])
        self.check(not self.sees_terms or term == self.database.term, f"term {term} wrote, {self.database.term} led")
        stored = [row.value for row in rows] + [value for _, _, value in changes if value is not None]
        self.check(not any(SECRET.encode() in each for each in stored), "a secret is stored as it is")
        for row in rows:
            self._entry_written(row)
        for kind, key, value in changes:
            if kind == "operation":
                self._operation_written(key, value)
            elif kind == "pool" and value is not None:
                pool = msgspec.json.decode(value)
                weight = pool["attributes"].get("weight") or 0.0
                self.check(weight >= self.weights.get(pool["name"], 0.0), f"an older pool {pool['name']} was stored")
                self.weights[pool["name"]] = weight
            elif kind == "start" and value is not None:
                start = msgspec.json.decode(value, type=StartRecord)
                self._class_written(start)
                self._start_written(start, term)
            elif kind == "start" and key not in self.job_states:
                self.classes.pop(key, None)  # its operation had ended: what becomes of it is not known any more
            elif kind == "job" and value is not None:
                self._class_written(msgspec.json.decode(value, type=JobRecord))
                job = msgspec.json.decode(value)
                was_given_up = self.job_states.get(key) in GIVEN_UP
                self.job_states[key] = job["state"]
                operation_id = job["operation_id"]
                if job["state"] in GIVEN_UP:
                    self.given_up[operation_id] = None
                if job["state"] == "completed":
                    self.done[operation_id, str(job.get("cookie", -1))] = None
                if job["state"] == "completed" and (key in self.stopped or was_given_up):
                    self.given_up[operation_id] = None
                    self.completed_stopped[operation_id] = self.completed_stopped.get(operation_id, 0) + 1

    def _class_written(self, job: StartRecord | JobRecord) -> None:
        """A job has one class, which its operation may require or refuse; nobody lowers limits here."""
        record = self.operations.get(job.operation_id)
        if isinstance(job, JobRecord) and (record is None or record.is_finished):
            return  # its operation had ended: what became of it is not known any more
        known = self.classes.setdefault(job.id, job.reclaimed)
        self.check(known is job.reclaimed, f"job {job.id} was of the other class before")
        if record is not None and isinstance(job, StartRecord):
            self.check(record.allow_reclaimed or not job.reclaimed, f"job {job.id} is on refused reclaimed CPU")
            self.check(not record.require_reclaimed or job.reclaimed, f"job {job.id} is ordinary")

    def _start_written(self, start: StartRecord, term: int) -> None:
        """A job that a rule starts again does not start before its time, and has the memory that it got; no other job
        has more than its task says."""
        record = self.operations.get(start.operation_id)
        # Neither told to stop nor taken over.
        is_new = not start.stopped and start.id not in self.stopped and start.id not in self.job_states
        if record is None or not record.tasks[0].retry_policy or not is_new or start.incarnation != record.incarnation:
            return
        task, places = record.tasks[0], record.retried.places.get(start.task, {})
        memory = self.memory[start.id] = start.memory_limit or task.memory_limit
        is_gang = record.is_gang or bool(record.incarnations)
        own = [*places.values()] if is_gang else [places[start.cookie]] if start.cookie in places else []
        # A job of a gang may have started while the end of another one was being written.
        later = {note.due for note in record.retried.notes if note.at >= start.start_time}
        waits = (
            each.due for cookie, each in places.items()
            if (record.id, cookie) not in self.retried and each.due not in later
        )  # fmt: skip
        due = max(waits, default=0.0) if is_gang else own[0].due if own else 0.0
        self.retried[record.id, start.cookie] = None
        early_s = due - self.clocks[term].now() if term in self.clocks else 0.0
        self.check(early_s <= FITS, f"job {start.id} starts {early_s:.3f} s before a rule starts it again")
        grown = max((each.memory for each in own), default=0) or task.memory_limit
        # Of a gang another one may have completed meanwhile that had got more.
        is_as_told = bool(later) or memory >= grown if is_gang else memory == grown
        self.check(is_as_told, f"job {start.id} orders {memory} bytes of memory, not {grown}")
        self.check(memory <= find_bound(record), f"job {start.id} orders {memory} bytes of memory, more than allowed")
        if due:
            self.note("retried", start.id, memory)

    def _entry_written(self, row: Row) -> None:
        before = self.database.log.rows.get(row.number)
        self.check(before is None or before == row, f"entry {row.number} of the log is written, another has its number")
        for subject in row.subjects:
            kind, _, mutation_id = subject.partition(":")
            if kind == "user" and "kind:command" in row.subjects:
                known = self.logged.setdefault(mutation_id, row.number)
                self.check(known == row.number, f"a command is logged as {known} and as {row.number}")

    def check_log(self) -> None:
        """Each command that was acknowledged has its entry, and none has two."""
        logged = [
            subject.partition(":")[2]
            for row in self.database.log.rows.values() if "kind:command" in row.subjects
            for subject in row.subjects if subject.startswith("user:")
        ]  # fmt: skip
        self.check(len(logged) == len(set(logged)), "a command is logged twice")
        for mutation_id in self.acknowledged_mutations.keys() - set(logged):
            self.check(False, f"a {self.acknowledged_mutations[mutation_id]} was acknowledged and is logged no more")

    def _operation_written(self, key: str, value: bytes | None) -> None:
        before = self.operations.get(key)
        if value is None:
            self.check(False, f"operation {key} was removed")
            return
        after = self.operations[key] = msgspec.json.decode(value, type=OperationRecord)
        self.most_jobs[key] = max(self.most_jobs.get(key, 0), after.tasks[0].job_count)
        if before is None:
            return
        self.check(not before.is_finished or after.is_finished, f"operation {key} had ended and goes on")
        self._check_blame(before, after)
        if after.tasks[0].retry_policy:
            self._retries_written(before, after)
        for name, counts in before.counts.items() if before.incarnation == after.incarnation else ():
            now = after.counts.get(name)
            self.check(now is not None and now.completed >= counts.completed, f"operation {key} uncounted jobs")

    def _check_blame(self, before: OperationRecord, after: OperationRecord) -> None:
        """Failures on one node alone end no operation that could run on another one: not before three times as many as
        it may have."""
        state, limit = self.find_state(), after.max_failed_job_count
        if after.state != "failed" or before.is_finished or state is None or len(after.failed_on) != 1:
            return
        ((bad, failed),) = after.failed_on.items()
        task = after.tasks[0]
        is_by_patch = before.max_failed_job_count != limit
        is_by_failures = after.failure is not None and after.failure.code == FAILED_JOBS_LIMIT_EXCEEDED
        if not is_by_failures or is_by_patch or task.job_time_limit is not None or failed >= 3 * limit:
            return
        others = [each.id for each in state.nodes.values() if each.takes_jobs and each.capacity[CPU] >= task.cpu_limit]
        self.check(set(others) <= {bad}, f"operation {after.id} failed by {failed} failures on {bad}, not on {others}")

    def _retries_written(self, before: OperationRecord, after: OperationRecord) -> None:
        """No rule starts a job, or the jobs of the operation, again more often than it says; what it did is kept until
        the job completes; memory grows up to the bound."""
        task, places = after.tasks[0], after.retried.places.get(after.tasks[0].name, {})
        is_gang = after.is_gang or bool(after.incarnations)
        bound = find_bound(after)
        for text, count in after.retried.counts.items():
            rule = parse_rule(text)
            most = rule.times if is_gang else rule.per_operation
            self.check(count <= most, f"operation {after.id}: rule {text} started {count} jobs again")
        for text, count in before.retried.counts.items():
            self.check(after.retried.counts.get(text, 0) >= count, f"operation {after.id} forgot retries by {text}")
        for cookie, retry in places.items():
            if retry != before.retried.places.get(task.name, {}).get(cookie):
                self.retried.pop((after.id, cookie), None)
            for text, count in retry.used.items():
                is_within = count <= parse_rule(text).times
                self.check(is_within, f"operation {after.id}: {text} started job {cookie} again {count} times")
            self.check(retry.memory <= bound, f"job {cookie} of {after.id} gets {retry.memory} bytes of {bound}")
        lost = before.retried.places.get(task.name, {}).keys() - places.keys()
        completed = [each.counts[task.name].completed if task.name in each.counts else 0 for each in (before, after)]
        is_done = completed[1] - completed[0] >= len(lost) or before.incarnation != after.incarnation
        self.check(is_done, f"operation {after.id}: retries of jobs {sorted(lost)} are forgotten")

    def _leased(self, term: int, lease_s: float) -> None:
        self.leases[term] = self.events.now + lease_s

    # --- schedulers

    def replied(self, address: str, term: int | None) -> None:
        """A scheduler sends an answer; a standby's has no term."""
        if term is not None and self.sees_terms:
            is_led = self.events.now <= self.leases[term]
            self.check(is_led, f"{address} answers in term {term}, {self.events.now - self.leases[term]:.3f} s late")

    def see_stops(self) -> AbstractContextManager[Any]:
        """Note each job that a scheduler tells to stop."""
        stop = lifecycle.stop

        def note_stop(state: State, job: Job, *facts: Any, **more: Any) -> None:
            self.stopped[job.id] = None
            stop(state, job, *facts, **more)

        return mock.patch.object(lifecycle, "stop", note_stop)

    def see_kept_room(self) -> AbstractContextManager[Any]:
        """Whenever it is tried to start the gang that room is kept for, backfilled jobs are not in its way."""
        place_kept = gangs.place_kept

        def place(state: State, tree: Tree, now: float, make_job: Any) -> None:
            before = dict(state.gangs.looked)
            place_kept(state, tree, now, make_job)
            kept = state.gangs.reservations.get(tree.name)
            lent = [job for node in kept.rooms for job in list_backfilled(node)] if kept is not None else []
            for job in lent:
                self.note("lent", job.id)
                is_right = not job.element.operation.record.is_gang and not job.task.fail_on_job_restart
                self.check(is_right, f"job {job.id} is backfilled, and must not be stopped")
            if kept is None or not lent or not may_take_back(kept.element):
                return
            tried = state.gangs.looked.get(kept.element)
            if tried is not before.get(kept.element) and tried == (now, GANG_WAITS):
                rooms = {node: add(node.free, sum_backfilled(node)) for node in kept.rooms}
                is_free = find_places(kept.element, rooms, state.rules.spare) is not None
                self.check(not is_free, f"gang {kept.element.name} waits for backfilled jobs")

        return mock.patch.object(gangs, "place_kept", place)

    def loaded(self, process: Any, term: int, scheduler: Scheduler) -> None:
        """A reign begins with what is stored."""
        self.note("reigns", process.address, term)
        self.clocks[term] = scheduler.clock
        self.check_log()
        state = scheduler.state
        for operation_id in self.acknowledged_starts:
            known = operation_id in state.operations or operation_id in state.finished
            self.check(known, f"operation {operation_id} was acknowledged, and term {term} does not know it")
        pools = state.trees["default"].pools
        for name, weight in self.acknowledged_weights.items():
            known = name in pools and (pools[name].settings.weight or 0.0) >= weight
            self.check(known, f"a change of pool {name} was acknowledged, and term {term} does not know it")
        for operation_id in self.acknowledged_ends:
            self.check(operation_id not in state.operations, f"operation {operation_id} was ended, and is alive again")

    def check_state(self, scheduler: Scheduler, term: int) -> None:
        # One whose session was ended does not know yet what was asked of the next one; its answers are of no use.
        for job_id in self.aborted if term == self.database.term else ():
            job = scheduler.state.jobs.get(job_id)
            self.check(job is None or not job.is_active, f"job {job_id} was to be aborted, and goes on")
        try:
            assert_consistent(scheduler.state)
        except AssertionError as error:
            self.check(False, f"a state is not consistent: {error}")
        for operation in scheduler.state.operations.values():
            runs = any(element.jobs for element in operation.elements.values())
            in_part = operation.record.is_gang and bool(operation.needed) and runs
            self.check(not in_part, f"gang {operation.id} runs in part, it needs {operation.needed}")
            task = operation.record.tasks[0]
            completed = operation.record.counts[task.name].completed if task.name in operation.record.counts else 0
            jobs = [job for element in operation.elements.values() for job in element.jobs.values()]
            active = sum(job.is_active and job.id not in self.failed for job in jobs)
            cookies = [job.cookie for job in jobs]
            are_places = len(set(cookies)) == len(cookies) and max(cookies, default=0) < self.most_jobs[operation.id]
            self.check(are_places, f"operation {operation.id} has jobs with the cookies {sorted(cookies)}")
            self.check(
                active + completed <= task.job_count or operation.id in self.given_up,
                f"operation {operation.id} has {task.job_count} jobs, {completed} completed and {active} active",
            )


def find_bound(record: OperationRecord) -> int:
    """The most memory that a job of an operation with a retry policy may get."""
    return BOUND if record.trees["default"].pool == BOUNDED_POOL else 8 * RETRIED_MEMORY
