"""The jobs that the scheduler starts on this node, from the scheduler's order to the acknowledged end.

::

    waiting -> starting -> running -> ended -> acknowledged
                  a stop order: interrupt, then kill at ``kill_at_s``

Each job has a directory in ``jobs_dir``. It contains the job's logs, the file ``job.json``, which is written before
each step that it records, and the job's working directory, which is removed when the job ends. The files survive the
agent, and the next agent continues from them. All methods but ``read_log`` are for the tick's thread."""

from __future__ import annotations

import collections
import concurrent.futures
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import structlog

from cpumond.agent.clock import HostClock
from cpumond.agent.config import AgentConfig
from cpumond.agent.discovery import FoundJob
from cpumond.agent.jobs import files
from cpumond.agent.jobs.job import NO_SECRETS, OVERDRAFT, AssignedJob, EndState, Usage, find_signal
from cpumond.agent.jobs.launch import find_account, make_argv, make_environment
from cpumond.agent.jobs.memory import MemoryFiles, find_room
from cpumond.agent.jobs.overdraft import Share, Timer, find_missing, find_over_reserve, find_victims
from cpumond.agent.state_file import make_directory, read_boot_id
from cpumond.core import wire
from cpumond.core.answers import AssignedView
from cpumond.core.errors import ConfigError, CpumondError, UnavailableError, from_os_error
from cpumond.host.executor.model import Ended, Event, Executor, Launch, NotStarted, Started

log = structlog.get_logger("cpumond.agent")

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Pattern of a job id, which becomes the name of a directory, a cgroup and a unit."""

OVERDRAFT_KILL_S = 10.0
"""Seconds between the interruption and the kill of a job that the node aborts by its own decision."""
REPEAT_KILL_S = 1.0
RECOVERY_S = 12.0
LOG_READ_S = 3.0
"""Maximum time in seconds to read a log, because the heartbeats wait meanwhile."""
BROKEN_STARTS = 3
"""If this many starts in a row fail by the node's fault, the node offers no slots for BROKEN_S."""
BROKEN_S = 60.0
MAX_SEEN = 10_000
ROOM_S = 1.0
"""Seconds for which the computed amount of memory for jobs on reclaimed CPU is valid."""
LEAST_MEMORY = 64 * 2**20
"""Minimum of the bytes that all jobs on reclaimed CPU may use together before the kernel slows them down."""
FITS = 1e-6
START_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

CountCores = Callable[[], tuple[Mapping[str, Usage], float]]
"""Returns the monitor's figures of the scheduler's jobs by cgroup, and the cores that the node's other jobs may use."""


class AssignedJobs:
    """All jobs of the scheduler on this host, their executor, and whether the host offers slots.

    ``on_offer`` is called when the host starts or stops offering slots. ``problem`` says why it offers no slots."""

    def __init__(
        self,
        config: AgentConfig,
        executor: Executor,
        clock: type[HostClock] = HostClock,
        memory: MemoryFiles = MemoryFiles(),  # noqa: B008 - it does not change
    ) -> None:
        self.config = config
        self.executor = executor
        self.clock = clock
        self.on_offer: Callable[[], None] = lambda: None
        self._memory = memory
        self.list_owners: Callable[[], Iterable[str]] = lambda: ()
        """Returns the cgroups of all jobs on this node that the scheduler did not start."""
        self.jobs: dict[str, AssignedJob] = {}
        """Job id -> job, until the scheduler has acknowledged the job's end."""
        self.problem = ""
        self.idle_class = ""
        """How jobs on reclaimed CPU yield to the others: see ``AgentAbout``."""
        self.counters = {"started": 0, "completed": 0, "failed": 0, "aborted": 0, "lost": 0, "overdraft": 0}
        self.start_buckets = [0] * (len(START_BUCKETS_S) + 1)
        self.start_seconds = 0.0
        self._boot_id = read_boot_id()
        self._jobs_dir = files.JobsDir(config.executor.jobs_dir)
        self._seen: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._directories: dict[str, str] = {}
        """Job id -> directory. Other threads read this map, so an entry never changes in place."""
        self._broken_starts = 0
        self._retry_at_s = -math.inf
        self.is_ready = False
        """Whether the executor has started up; until then, the executor's ``fileno`` is invalid."""
        self._events: collections.deque[Event] = collections.deque()
        self._changed = True
        self._adjust_at_s = -math.inf
        self._said_memory = ""
        self._room, self._room_until_s = 0.0, -math.inf
        resources = config.resources
        self._cpu_timer = Timer(resources.cpu_overdraft_timeout_s, resources.allowed_cpu_overdraft_ratio)
        self._memory_timer = Timer(resources.memory_overdraft_timeout_s)
        self._readers = ThreadPoolExecutor(2, "logs")
        self._recovery: Future[dict[str, Started]] | None = None

    def load(self, now_s: float) -> None:
        """Read the files of an earlier run and adopt the jobs of that run. If this fails, ``problem`` says why."""
        if self._open(now_s):
            self._take_recovered(lambda: self.executor.recover(self._list_mine()), now_s)

    def _open(self, now_s: float) -> bool:
        """Open ``jobs_dir`` with the files of an earlier run; return False if that is impossible now.

        A missing disk must not keep the agent from raising limits: the agent continues without the scheduler's jobs."""
        try:
            self._jobs_dir.open()
            self._read_files(now_s)
        except (CpumondError, OSError) as error:
            self._jobs_dir.close()
            self.jobs.clear()
            self._retry_at_s = now_s + BROKEN_S
            self._set_problem(f"no job can be run: {error}")
            return False
        return True

    @property
    def knows_jobs(self) -> bool:
        """Whether this node's jobs are known. Until they are, no heartbeat may report that the node has no jobs."""
        return self._jobs_dir.is_open

    def _read_files(self, now_s: float) -> None:
        jobs_dir, kept = self._jobs_dir.path, {}
        sums = files.read_sums(jobs_dir)
        for name in sorted(os.listdir(jobs_dir)):
            directory = os.path.join(jobs_dir, name)
            file = files.read_job_file(directory)
            if file is None or file.order.job_id != name:
                continue  # not a job's directory: only those that an agent created are removed here
            if file.state == "waiting" and file.finished is None:
                self._jobs_dir.remove(files.set_aside(directory))  # it never started: its order may come again
                continue
            self._remember(name, directory)
            if file.acknowledged:
                assert file.finished is not None
                kept[name] = (file.finished.finish_time or 0.0, directory)
                continue
            job = self.jobs[name] = AssignedJob(file, directory, now_s, now_s)
            for each, noted in sums.get(name, {}).items():
                # Of the job's own file and SUMS_FILE, the newer one has the larger sum.
                job.earlier[each] = max(job.earlier.get(each, 0.0), noted)
            if file.finished is None and file.boot_id != self._boot_id:
                self._finish(job, "lost", "the host was rebooted while it ran")
            elif file.finished is None and file.stop is not None:
                job.kill_at_s = now_s + file.stop.timeout_s
            if job.file.finished is not None:
                self._jobs_dir.remove(os.path.join(directory, files.SANDBOX))
        self._jobs_dir.kept = dict(sorted(kept.items(), key=lambda item: item[1][0]))
        for directory in files.list_set_aside(jobs_dir):
            self._jobs_dir.remove(directory)

    def look_after_files(self) -> list[str]:
        """If ``jobs_dir`` was removed, recreate it, because the next agent finds the jobs there, and return its path.

        Files that jobs had written there are lost. Raises the errors of ``JobsDir.open``."""
        if not self._jobs_dir.is_removed():
            return []
        self._jobs_dir.open()
        for job in self.jobs.values():
            if job.file.state != "waiting" and not os.path.isdir(job.directory):
                make_directory(job.directory, 0o711, "executor.jobs_dir")
                self._update_file(job)
        return [self._jobs_dir.path]

    def _list_mine(self) -> list[str]:
        return [job.order.job_id for job in self.jobs.values() if job.takes_room]

    def _try_again(self, now_s: float) -> None:
        """Start up a failed executor again, in a separate thread, because that may take seconds."""
        if self._recovery is None and now_s >= self._retry_at_s:
            if self.knows_jobs or self._open(now_s):
                self._recovery = self._jobs_dir.workers.submit(self.executor.recover, self._list_mine())
        elif self._recovery is not None and self._recovery.done():
            recovery, self._recovery = self._recovery, None
            self._take_recovered(recovery.result, now_s)

    def _take_recovered(self, recover: Callable[[], dict[str, Started]], now_s: float) -> None:
        """Adopt the running jobs that ``recover`` returns. If it fails, no slots are offered."""
        mine = self._list_mine()
        try:
            found = recover()
        except Exception as error:
            # Whatever the error is, the agent continues its main work.
            if not isinstance(error, CpumondError):
                log.exception("executor_failed")
            self._retry_at_s = now_s + BROKEN_S
            self._set_problem(f"no job can be run: {error}")
            return
        self.is_ready = True
        self._set_problem("")
        for started in found.values():
            job = self.jobs[started.job_id]
            if job.file.finished is not None:
                continue
            start_time = job.file.start_time or started.start_time
            self._update_file(job, state="running", cgroup=started.cgroup, start_time=start_time)
            job.mark_running()
        if mine:
            log.info("jobs_adopted", adopted=len(found), ended=len(mine) - len(found))

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self._changed = True
            if problem:
                log.error("executor_broken", error=problem, retry_s=BROKEN_S)
            else:
                log.info("executor_ready", kind=self.config.executor.kind)
            self.on_offer()

    def close(self) -> None:
        """Stop managing the jobs, because the agent ends; the jobs continue."""
        for job in self.jobs.values():
            if job.takes_room and job.usage is not None:
                self._update_file(job)
        if self._recovery is not None:
            concurrent.futures.wait([self._recovery], RECOVERY_S)
        # The process does not end until the removals already begun are finished. The next run does the rest.
        self._jobs_dir.workers.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self.executor.close()
        self._jobs_dir.close()

    def apply_answer(self, answer: wire.HeartbeatAnswer, sent_at_s: float, now_s: float) -> None:
        """Process a response to a heartbeat: acknowledged ends, jobs to stop, jobs to start. A repeated order changes
        nothing."""
        for job_id in answer.acknowledged:
            job = self.jobs.get(job_id)
            if job is not None and job.file.finished is not None:
                del self.jobs[job_id]
                self._update_file(job, acknowledged=True)
                self._jobs_dir.kept[job_id] = (job.file.finished.finish_time or self.clock.wall_s(), job.directory)
        for stop in answer.stop:
            job = self.jobs.get(stop.job_id)
            if job is not None and job.file.finished is None:
                self._stop(job, stop, now_s)
        for order in answer.start:
            if order.job_id not in self.jobs and order.job_id not in self._seen:
                self._accept(order, sent_at_s, now_s)

    def _stop(self, job: AssignedJob, stop: wire.StopOrder, now_s: float) -> None:
        if job.file.state == "waiting":
            self._update_file(job, stop=stop)
            self._finish(job, "aborted", stop.why)
            return
        first = job.file.stop is None
        if first:
            self._update_file(job, stop=stop, stopped_at=self.clock.wall_s())
            log.info("job_stopping", job_id=job.order.job_id, kind=stop.kind, why=stop.why, timeout_s=stop.timeout_s)
        job.kill_at_s = min(job.kill_at_s, now_s + stop.timeout_s)
        if first and stop.timeout_s > 0 and self.is_ready:
            self._interrupt(job)

    def _interrupt(self, job: AssignedJob) -> None:
        order = job.order
        self.executor.interrupt(order.job_id, find_signal(order), order.signal_root_process_only)

    def _accept(self, order: wire.JobOrder, sent_at_s: float, now_s: float) -> None:
        if not JOB_ID.fullmatch(order.job_id):
            log.error("order_refused", job_id=order.job_id, error="a job id must be letters, digits and -_.")
            return
        directory = os.path.join(self._jobs_dir.path, order.job_id)
        kept = msgspec.structs.replace(order, secrets={})
        job = AssignedJob(files.JobFile(kept, self._boot_id), directory, now_s, sent_at_s, order.secrets)
        self.jobs[order.job_id] = job
        self._remember(order.job_id, directory)

    def _remember(self, job_id: str, directory: str) -> None:
        self._seen[job_id] = None
        self._directories[job_id] = directory
        while len(self._seen) > MAX_SEEN + len(self.jobs) + len(self._jobs_dir.kept):
            self._seen.popitem(last=False)

    def advance(self, now_s: float, count_cores: CountCores) -> bool:
        """Process the executor's events, start the jobs that fit, and kill the jobs at their ``kill_at_s``. Return
        whether a heartbeat should report a change."""
        if not self.is_ready:
            self._try_again(now_s)
            if not self.is_ready:
                self._give_up_late_ones(now_s)
                return self._take_changed()
        self._events.extend(self.executor.poll())
        if any(isinstance(event, Ended) for event in self._events):
            # The sums of a short job are reported only once, at its end; they are those of the last check.
            self.note_usage(count_cores()[0])
        while self._events:
            # If processing one event fails, the other events must not be lost: the executor reports each end only once.
            event = self._events.popleft()
            try:
                self._take_event(event, now_s)
            except Exception:
                log.exception("job_event_failed", job_id=event.job_id)
                failed = self.jobs.get(event.job_id)
                if failed is not None and not isinstance(event, Started) and failed.file.finished is None:
                    self._finish(failed, "lost", "the agent failed to process its end; see its log")
        if self.problem:
            self._give_up_late_ones(now_s)
        elif self._list_waiting():
            usage, other_cores = count_cores()
            self.note_usage(usage)
            self._start_what_fits(now_s, other_cores)
        for job in self.jobs.values():
            if now_s >= job.kill_at_s and job.takes_room:
                job.kill_at_s = now_s + REPEAT_KILL_S
                self.executor.kill(job.order.job_id)
        self._jobs_dir.note_sums(now_s, self._list_sums)
        if self.problem and self._broken_starts and now_s >= self._retry_at_s:
            # The next failed start makes the node broken again.
            self._broken_starts = BROKEN_STARTS - 1
            self._set_problem("")
        return self._take_changed()

    def _take_changed(self) -> bool:
        changed, self._changed = self._changed, False
        return changed

    def next_deadline_s(self) -> float:
        """Return the time of the next kill; infinity if no kill is due, or if no job can be killed now."""
        if not self.is_ready:
            return math.inf
        return min((job.kill_at_s for job in self.jobs.values() if job.takes_room), default=math.inf)

    def _take_event(self, event: Started | NotStarted | Ended, now_s: float) -> None:
        job = self.jobs.get(event.job_id)
        if job is None or job.file.finished is not None:
            return
        if isinstance(event, Started):
            self._take_start(job, event)
        elif isinstance(event, NotStarted):
            self._finish(job, "aborted" if event.node_fault or job.file.stop else "failed", event.problem)
            if event.node_fault:
                self._count_bad_start(event.problem, now_s)
        else:
            self._finish(job, *job.classify_end(event), event)

    def _take_start(self, job: AssignedJob, event: Started) -> None:
        if self._broken_starts >= BROKEN_STARTS and self.is_ready:
            # This start was in progress when the other starts failed.
            self._set_problem("")
        self._broken_starts = 0
        self.counters["started"] += 1
        took_s = self.clock.monotonic_s() - job.sent_at_s
        self.start_seconds += took_s
        self.start_buckets[sum(took_s > bound for bound in START_BUCKETS_S)] += 1
        self._update_file(job, state="running", cgroup=event.cgroup, start_time=event.start_time)
        job.mark_running()
        if job.file.stop is not None:
            # The stop order came before the job had a process to interrupt.
            self._interrupt(job)
        order = job.order
        log.info("job_started", job_id=order.job_id, operation_id=order.operation_id, pool=order.pool,
                 cgroup=event.cgroup, cpu_limit_cores=order.cpu_limit, since_heartbeat_s=round(took_s, 4))  # fmt: skip

    def _finish(self, job: AssignedJob, state: EndState, reason: str, ended: Ended | None = None) -> None:
        order = job.order
        ended = ended or Ended(order.job_id, self.clock.wall_s())
        finished = job.make_end(state, reason, ended)
        self._update_file(job, state="ended", finished=finished, stderr_size=ended.stderr_size)
        job.kill_at_s, job.secrets = math.inf, NO_SECRETS
        self.counters[state] += 1
        log.info("job_ended", job_id=order.job_id, operation_id=order.operation_id, state=state,
                 exit_code=finished.exit_code, reason=reason or None, cpu_seconds=finished.cpu_seconds)  # fmt: skip
        self._jobs_dir.remove(os.path.join(job.directory, files.SANDBOX))

    def _count_bad_start(self, problem: str, now_s: float) -> None:
        self._broken_starts += 1
        if self._broken_starts >= BROKEN_STARTS and not self.problem:
            self._retry_at_s = now_s + BROKEN_S
            self._set_problem(f"{self._broken_starts} jobs in a row could not be started here: {problem}")

    def _start_what_fits(self, now_s: float, other_cores: float) -> None:
        """Start waiting jobs in order of arrival. A job that does not fit does not block the jobs after it."""
        resources = self.config.resources
        running = [job for job in self.jobs.values() if job.takes_room]
        cpu = (resources.cpu or 0.0) - other_cores - sum(job.current_cores for job in running)
        memory = (resources.memory or 0) - sum(job.order.reserved_memory for job in running)
        slots = (resources.user_slots or 0) - sum(job.order.user_slots for job in running)
        for job in self._list_waiting():
            order = job.order
            wanted: tuple[tuple[str, float, float], ...] = (
                ("cpu", order.cpu_limit, cpu), ("memory", order.reserved_memory, memory),
                ("user_slots", order.user_slots, slots),
            )  # fmt: skip
            if order.reclaimed and order.reserved_memory > 0:
                if now_s >= self._room_until_s:
                    # This is slow, because it reads files of all jobs on the node.
                    self._room, self._room_until_s = self._find_memory_room(running), now_s + ROOM_S
                wanted = (wanted[0], ("memory", order.reserved_memory, min(memory, self._room)), wanted[2])
            missing = [each for each in wanted if each[1] > 0 and each[1] > each[2] + FITS * max(each[1], 1.0)]
            if now_s - job.received_at_s > order.wait_s:
                # It is too late to start this job, even if it fits now: the scheduler has placed it elsewhere.
                text = ", ".join(f"{amount:g} {what} of {left:g} free" for what, amount, left in missing)
                text = text or "it fits now, but too late"
                self._finish(job, "aborted", f"{wire.NO_ROOM}{order.wait_s:g} s: {text}")
            elif not missing:
                cpu, memory, slots = cpu - order.cpu_limit, memory - order.reserved_memory, slots - order.user_slots
                self._room -= order.reserved_memory
                self._start(job, now_s)

    def _find_memory_room(self, holders: Iterable[AssignedJob]) -> float:
        """Return the bytes available on the host, less those that ``holders`` and jobs of other sources have requested
        and do not use yet; infinity if the kernel does not report the available bytes."""
        available, memory = self._memory.read_available(), self._memory
        if available is None:
            return math.inf
        owners = [(job.order.reserved_memory or None, memory.read_use(job.file.cgroup)) for job in holders]
        owners += [(memory.read_limit(path), memory.read_use(path)) for path in self.list_owners()]
        return find_room(available, owners)

    def _hold_memory(self) -> None:
        """If the kernel supports it, prevent jobs on reclaimed CPU from using memory that the other jobs have requested
        and do not use yet."""
        ours = [job for job in self.jobs.values() if job.takes_room and job.file.cgroup]
        guests = [job for job in ours if job.order.reclaimed]
        if not guests:
            return
        parent = os.path.dirname(guests[0].file.cgroup)
        used, room = self._memory.read_use(parent), self._find_memory_room(set(ours) - set(guests))
        if used is None or room == math.inf:
            return
        try:
            self._memory.hold(parent, max(used + int(room), LEAST_MEMORY))
        except OSError as error:
            if str(error) != self._said_memory:
                log.warning("memory_not_held", cgroup=parent, error=str(error))
            self._said_memory = str(error)

    def _give_up_late_ones(self, now_s: float) -> None:
        """While no job can start here, abort jobs that have waited too long: the scheduler places them elsewhere."""
        for job in self._list_waiting():
            if now_s - job.received_at_s > job.order.wait_s:
                self._finish(job, "aborted", self.problem)

    def _list_waiting(self) -> list[AssignedJob]:
        return [job for job in self.jobs.values() if job.file.state == "waiting"]

    def _start(self, job: AssignedJob, now_s: float) -> None:
        try:
            self.executor.start(self._prepare(job))
        except ConfigError as error:
            self._finish(job, "failed", str(error))
        except (CpumondError, OSError) as error:
            self._finish(job, "aborted", f"the node could not prepare it: {error}")
            self._count_bad_start(str(error), now_s)

    def _prepare(self, job: AssignedJob) -> Launch:
        """Create a job's directory, file and environment. Raises ConfigError for faults in the job's specification."""
        order = job.order
        user, account = find_account(self.config, order.user)
        argv = make_argv(order)
        try:
            os.makedirs(job.directory, 0o711, exist_ok=True)
            os.chmod(job.directory, 0o711)  # noqa: S103 - its user passes through it; its files have their own modes
            self._update_file(job, strict=True)
            where = order.working_directory or os.path.join(job.directory, files.SANDBOX)
            if not order.working_directory:
                os.mkdir(where, 0o700)
                if account.pw_uid != os.geteuid():
                    os.chown(where, account.pw_uid, account.pw_gid, follow_symlinks=False)
            if order.checkpoints:
                files.make_checkpoint_file(job.directory, account.pw_uid, account.pw_gid)
        except OSError as error:
            raise from_os_error(error, f"create {job.directory}", "free space or fix the rights of jobs_dir") from error
        self._update_file(job, strict=True, state="starting")
        secrets, job.secrets = dict(job.secrets), NO_SECRETS
        return Launch(
            job_id=order.job_id,
            argv=argv,
            environment=make_environment(order, account, os.path.join(job.directory, files.CHECKPOINT)),
            user=user,
            working_directory=where,
            cpu_limit=order.cpu_limit,
            memory_limit=order.memory_limit,
            directory=job.directory,
            max_log_bytes=self.config.executor.max_log_bytes,
            max_tasks=self.config.executor.max_tasks,
            has_ceiling=order.has_ceiling,
            reclaimed=order.reclaimed,
            max_stderr_bytes=min(order.max_stderr_bytes, self.config.executor.max_log_bytes),
            secrets=secrets,
        )

    def found_jobs(self) -> list[FoundJob]:
        return [job.found for job in self.jobs.values() if job.found is not None and job.file.state == "running"]

    def note_usage(self, usage: Mapping[str, Usage]) -> None:
        for job in self.jobs.values():
            known = usage.get(job.file.cgroup) if job.file.state == "running" else None
            if known is not None:
                job.note_usage(known)

    def reports(self) -> list[wire.JobReport]:
        """Report the jobs that are starting or running, with their figures of the last ``note_usage``."""
        for job in self.jobs.values():
            if job.order.checkpoints and job.takes_room:
                job.note_checkpoint(files.read_checkpoint(job.directory), self.clock.wall_s())
        return [job.report() for job in self.jobs.values() if job.takes_room]

    def finished_jobs(self) -> list[wire.FinishedJob]:
        return [end for job in self.jobs.values() if (end := job.file.make_end()) is not None]

    def find_by_cgroup(self, path: str) -> wire.JobOrder | None:
        """Return the order of the job in a cgroup; None if no job of the scheduler is starting or running there."""
        found = (job.order for job in self.jobs.values() if job.file.cgroup == path and job.takes_room)
        return next(found, None)

    def view(self) -> AssignedView:
        states = dict.fromkeys(("waiting", "starting", "running", "stopping", "ended"), 0)
        for job in self.jobs.values():
            states["stopping" if job.is_stopping else job.file.state] += 1
        buckets, seconds = tuple(self.start_buckets), self.start_seconds
        return AssignedView(self.config.executor.kind, states, dict(self.counters), buckets, seconds, self.problem)

    def read_log(self, request: wire.LogRequest) -> wire.JobLog:
        """Read the end of a job's output; for any thread. Never raises."""
        node_id, directory = self.config.node_id, self._directories.get(request.job_id, "")
        try:
            if not directory or not os.path.isdir(directory):
                raise UnavailableError(
                    f"node {node_id} has no log of job {request.job_id}: it was removed or never existed"
                )
            content, total, first = self._readers.submit(self._read_part, request, directory).result(LOG_READ_S)
        except TimeoutError:
            problem = f"node {node_id} could not read it within {LOG_READ_S:g} s"
        except (CpumondError, OSError, RuntimeError) as error:
            problem = str(error)
        else:
            first_byte = msgspec.UNSET if first is None else first
            return wire.JobLog(node_id, request.request_id, content, total, first_byte=first_byte)
        return wire.JobLog(node_id, request.request_id, error=problem)

    def _read_part(self, request: wire.LogRequest, directory: str) -> tuple[bytes, int, int | None]:
        """Return the requested bytes, the number of bytes that the job has written, and the offset of the first
        requested one (None if the end of the log was requested)."""
        wanted = max(request.tail_bytes, 0)

        def read(tail_bytes: int) -> tuple[bytes, int]:
            return self.executor.read_log(request.job_id, directory, request.stream, tail_bytes)

        if request.offset is None:
            return *read(wanted), None
        total = read(0)[1]
        while True:
            # The job may write meanwhile, so that the part read begins after the offset: read again from further back.
            tail_bytes = max(total - request.offset, 0) + wanted
            content, total = read(tail_bytes)
            first = total - len(content)
            if first <= request.offset or len(content) < tail_bytes:
                break
        skipped = max(request.offset - first, 0)
        return content[skipped : skipped + wanted], total, min(first + skipped, total)

    def adjust(self, now_s: float, count_cores: CountCores) -> bool:
        """Every ``resource_adjustment_period``, check the node for overcommitment (semantics.md 1.9) and drop old logs.

        Returns True if a heartbeat should report a change."""
        if now_s < self._adjust_at_s:
            return False
        resources = self.config.resources
        self._adjust_at_s = now_s + resources.resource_adjustment_period_s
        usage, other_cores = count_cores()
        self.note_usage(usage)
        jobs = [job for job in self.jobs.values() if job.takes_room and not job.is_stopping]
        cpu = [job.share(job.current_cores) for job in jobs]
        self._abort_on_overdraft(self._cpu_timer, "cpu", cpu, other_cores, resources.cpu or 0.0, now_s)
        self._hold_memory()
        memory = [job.share(float(self._memory.read_use(job.file.cgroup) or 0)) for job in jobs if job.file.cgroup]
        memory = self._abort_over_reserve(memory, float(resources.memory or 0), now_s)
        self._abort_on_overdraft(self._memory_timer, "memory", memory, 0.0, float(resources.memory or 0), now_s)
        options = self.config.executor
        for job_id in self._jobs_dir.drop_logs(self.clock.wall_s() - options.log_retention_s, options.max_kept_logs):
            self._directories.pop(job_id, None)
        return self._take_changed()

    def _abort_over_reserve(self, shares: list[Share], capacity: float, now_s: float) -> list[Share]:
        """If the node lacks memory, abort at once jobs that use more than they reserve; return all other jobs."""
        above = []
        for share in shares:
            job = self.jobs[share.job_id]
            is_over = 0 < job.order.memory_reserve < share.amount
            self._changed |= is_over is not job.over_reserve
            job.over_reserve = is_over
            if is_over:
                above.append(share)
        if not above:
            return shares
        used, available = sum(share.amount for share in shares), self._memory.read_available()
        victims = set(find_over_reserve(above, find_missing(used, capacity, available)))
        for share in above:
            if share.job_id in victims:
                reserve = self.jobs[share.job_id].order.memory_reserve
                why = f"{wire.MEMORY_OVERDRAFT}{share.amount:.0f} of {reserve} bytes: its node is short of memory"
                self.counters["overdraft"] += 1
                self._stop(self.jobs[share.job_id], wire.StopOrder(share.job_id, 0.0, OVERDRAFT, why), now_s)
        return [share for share in shares if share.job_id not in victims]

    def _abort_on_overdraft(
        self, timer: Timer, resource: str, shares: list[Share], others: float, capacity: float, now_s: float
    ) -> None:
        used = others + sum(share.amount for share in shares)
        if not timer.note(now_s, used, capacity):
            return
        why = (
            f"resource_overdraft: Resource usage overdraft adjustment: the node's jobs take {used:g} of {capacity:g} "
            f"{resource} for longer than {resource}_overdraft_timeout, {timer.timeout_s:g} s"
        )
        for job_id in find_victims(shares, others, capacity):
            self.counters["overdraft"] += 1
            self._stop(self.jobs[job_id], wire.StopOrder(job_id, OVERDRAFT_KILL_S, OVERDRAFT, why), now_s)

    def _update_file(self, job: AssignedJob, strict: bool = False, **changes: Any) -> None:
        """Change the job's file and write it. A failure is logged; if ``strict`` (before a start), it is raised."""
        job.file = msgspec.structs.replace(job.file, **job.sums(), **changes)
        # A job is "starting" only for milliseconds, so this state needs no heartbeat of its own.
        self._changed |= job.file.state != "starting"
        if not os.path.isdir(job.directory) and not strict:
            return  # the job's directory was never created
        try:
            files.write_job_file(job.directory, job.file)
        except OSError as error:
            problem = from_os_error(error, f"write {job.directory}/{files.JOB_FILE}", "free space in jobs_dir")
            if strict:
                raise problem from error
            log.error("job_file_not_written", job_id=job.order.job_id, error=str(problem))

    def _list_sums(self) -> dict[str, dict[str, float]]:
        return {job_id: job.sums() for job_id, job in self.jobs.items() if job.takes_room and job.usage is not None}
