"""The executor of kind "slurm"; see the package.

In ``runtime_dir``: what the keeper has there, ``slurm-jobs/<job_id>.json`` for each job that is not over, and
``slurm-guests``, the name under which steps find the keeper.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import structlog

from cpumond.host.cgroup_processes import list_processes, send_signal
from cpumond.host.executor import keeper
from cpumond.host.executor.keeper.job import is_slurmstepd
from cpumond.host.executor.keeper_executor import POLL_S, SETTLE_S, KeeperExecutor, make_ended
from cpumond.host.executor.keeper_link import KeptJob, read_result
from cpumond.host.executor.model import (
    Ended,
    Event,
    ExecutorError,
    Launch,
    NotStarted,
    Started,
)
from cpumond.host.executor.records import Records
from cpumond.host.executor.slurm.client import Account, Answer, SlurmClient
from cpumond.host.executor.slurm.commands import (
    PROGRAMS,
    Refusal,
    SlurmJob,
    make_cancels,
    make_look,
    make_script,
    make_submission,
    parse_look,
    parse_submission,
)
from cpumond.host.executor.slurm.job import LOOK_S, Job, Record, explain_loss, is_unclear
from cpumond.host.executor.slurm.place import (
    find_interpreter,
    find_mounts,
    find_package,
    list_limits,
    read_guests_name,
)

log = structlog.get_logger("cpumond.host.executor")

INDEX_NAME: Final = "slurm-jobs"
GUESTS_NAME: Final = "slurm-guests"
UNKNOWN: Final = "it is not known what became of it: the files of the agent's runtime_dir were removed"
NEVER_STARTED: Final = "the agent ended before Slurm had taken it"
FORGOTTEN: Final = "Slurm does not know it any more, and it has not run"
START_S: Final = 60.0
"""A job that Slurm lets wait for longer is given back: the scheduler finds another node for it."""

_ASK_S: Final = 3.0
_RETRY_S: Final = 2.0
_CANCEL_S: Final = 0.5
"""So long a step has to end its job by itself, which tells more than Slurm does."""
_LEAVE_S: Final = 3.0
_LEAVE_LOOK_S: Final = 0.1
_SIGKILL: Final = 9


class SlurmExecutor(KeeperExecutor[Job]):
    """At most one for each ``runtime_dir``. Jobs go to ``node_name``, which is this host, in ``partition``."""

    result_names = (*KeeperExecutor.result_names, keeper.CLAIM_NAME)

    def __init__(
        self, runtime_dir: str, partition: str, node_name: str, mountinfo: str = "/proc/self/mountinfo"
    ) -> None:
        super().__init__(runtime_dir, Records(os.path.join(runtime_dir, INDEX_NAME), Record))
        self._partition = partition
        self._node_name = node_name
        self._mountinfo = mountinfo
        self._mounts: dict[str, str] = {}
        self._interpreter = ""
        self._guests_name = ""
        self._wake_lock = threading.Lock()
        self._submitter = SlurmClient(self._wake, 3)
        self._slurm = SlurmClient(self._wake, 2)
        self._looking = False
        self._timer: threading.Timer | None = None

    def recover(self, job_ids: Iterable[str]) -> dict[str, Started]:
        wanted = self._wanted = set(job_ids)
        self._prepare()
        for job_id, record in self._records.load().items():
            job = self._jobs[job_id] = Job(record, silent=job_id not in wanted)
            job.started = record.start_time > 0.0
            job.look_at_s = 0.0
        self._await_keeper()
        for job_id in wanted - set(self._jobs):
            ended = Ended(job_id, time.time(), problem=UNKNOWN)
            self._jobs[job_id] = Job(Record(job_id, "", 0, "", 0, 0, ended=ended))
            self._wake()
        self._exchange_until(lambda: all(job.is_claimed or job.is_over for job in self._jobs.values()), SETTLE_S)
        found = {}
        for job_id, job in self._jobs.items():
            if job.silent and not job.is_over:
                log.warning("a job that the agent does not know is left alone", job_id=job_id)
            elif job_id in wanted and job.started and read_result(job.record.directory) is None:
                found[job_id] = self._describe_start(job)
        self._drop_old_starts(found)
        return found

    def start(self, launch: Launch) -> None:
        """Raises ExecutorError for a job that is here already."""
        job_id = launch.job_id
        if not self._may_start(launch):
            return
        uid, gid = os.geteuid(), os.getegid()
        if launch.user:
            try:
                account = pwd.getpwnam(launch.user)
            except (KeyError, ValueError):
                self._add_event(NotStarted(job_id, f"there is no user {launch.user!r} on this host"))
                return
            uid, gid = account.pw_uid, account.pw_gid
        token = secrets.token_hex(16)
        directory = os.path.abspath(launch.directory)
        record = Record(job_id, directory, launch.max_log_bytes, token, uid, gid, list_limits(launch))
        job = self._jobs[job_id] = Job(record)
        self._restore_index()
        # Before Slurm hears of it: should the agent end now, the next one asks whether Slurm has.
        if not self._store_new(record):
            return
        order = {
            "token": token,
            "keeper": self._guests_name,
            "keeper_uid": os.geteuid(),
            "argv": launch.argv,
            "environment": launch.environment,
            "working_directory": launch.working_directory,
        }
        script = make_script(self._interpreter, find_package(), order)
        argv = make_submission(launch, self._partition, self._node_name)
        job.submission = argv, script, Account(uid, gid, launch.user)
        self._keeper.send("expect", self._describe_expected(record))
        self._submit(job)

    def interrupt(self, job_id: str) -> None:
        job = self._jobs.get(job_id)
        if job is None or job.is_over:
            return
        if job.started:
            self._interrupt(job)
        else:
            job.interrupted = True

    def kill(self, job_id: str) -> None:
        """``poll`` goes on with it until the job is over. One that has not begun never will."""
        job = self._jobs.get(job_id)
        if job is None or job.is_over:
            return
        job.killed = True
        self._keeper.send("kill", job_id)
        if job.cancel_at_s is None:
            job.cancel_at_s = time.monotonic() + _CANCEL_S
            self._wake_in(_CANCEL_S)
        if job.lost is not None:
            self._wake()

    def poll(self) -> list[Event]:
        self._hear()
        self._submitter.take()
        self._slurm.take()
        now_s = time.monotonic()
        for job in list(self._jobs.values()):
            self._advance(job, now_s)
        self._look(now_s)
        return self._take_events()

    def close(self) -> None:
        if self._closed:
            return
        self._submitter.close()
        self._slurm.close()
        with self._wake_lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
        self._close_link()

    # ---- preparation

    def _prepare(self) -> None:
        """See that jobs can be run here at all. Raises CpumondError."""
        for program in PROGRAMS:
            if shutil.which(program) is None:
                raise ExecutorError(f"there is no {program} here: install Slurm's client commands on this host")
        self._interpreter = find_interpreter()
        self._mounts = find_mounts(self._mountinfo)
        self._records.make()
        self._guests_name = read_guests_name(os.path.join(self._runtime_dir, GUESTS_NAME))
        argv = ["sinfo", "--noheader", f"--partition={self._partition}", f"--nodes={self._node_name}", "--format=%T"]
        answer = self._slurm.ask(argv, _ASK_S)
        if answer.code == 0 and not answer.out.strip():
            raise ExecutorError(
                f"Slurm has no node {self._node_name!r} in a partition {self._partition!r}; set [executor] node_name "
                "and partition to those of this host's slurmd for jobs of the scheduler"
            )
        if answer.code != 0:
            # Jobs may run here all the same, and their ends are to be seen.
            log.warning("Slurm does not answer; jobs that are to be started wait for it", problem=answer.problem)
        self._prepared = True

    # ---- news

    def _wake(self) -> None:
        """Make ``fileno`` readable; any thread calls it."""
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._news, 1)

    def _wake_in(self, seconds: float) -> None:
        """The same, a little later."""
        if self._timer is None or not self._timer.is_alive():
            self._timer = threading.Timer(max(seconds, POLL_S), self._wake)
            self._timer.daemon = True
            self._timer.start()

    def _reconcile(self, kept: list[KeptJob]) -> None:
        for kept_job in kept:
            self._on_report(kept_job)
        known = {kept_job.id for kept_job in kept}
        for job_id, job in self._jobs.items():
            if job_id in known or job.is_over or job.lost is not None:
                continue
            result = read_result(job.record.directory)
            if result is not None:
                self._on_report(result)
            else:
                self._keeper.send("expect", self._describe_expected(job.record))
        # Last: a step that the keeper does not know then is one too many.
        self._keeper.send("guests", self._guests_name)

    def _describe_expected(self, record: Record) -> dict[str, Any]:
        return {**msgspec.to_builtins(record), "id": record.job_id, "procs": [], "mounts": self._mounts}

    def _on_report(self, kept_job: KeptJob) -> None:
        job = self._jobs.get(kept_job.id)
        if job is None or job.is_over or job.lost is not None:
            if job is None and kept_job.is_over:
                self._keeper.send("forget", kept_job.id)
            return
        record = job.record
        if kept_job.slurm_job is not None:
            job.is_claimed = True
            job.submission = None
            if record.slurm_job != kept_job.slurm_job:
                record.slurm_job, record.places = kept_job.slurm_job, kept_job.places
                self._records.store_if_possible(record.job_id, record)
        if kept_job.state in ("running", "ended") and kept_job.start_time:
            if record.start_time != kept_job.start_time:
                record.start_time, record.places = kept_job.start_time, kept_job.places
                self._records.store_if_possible(record.job_id, record)
            self._mark_started(job)
        if kept_job.state == "ended" and kept_job.problem:
            job.lost = kept_job
            job.look_at_s = 0.0
            self._wake()
        elif kept_job.is_over:
            job.result = kept_job
            self._wake()

    def _describe_start(self, job: Job) -> Started:
        return Started(job.record.job_id, self._name_cgroup(job.record.places), job.record.start_time)

    def _name_cgroup(self, places: dict[str, str]) -> str:
        """The job's cgroup relative to the cpu hierarchy; "" where Slurm made none there."""
        controller = "cpu" if "cpu" in self._mounts else ""
        place = places.get(controller)
        return "" if place is None else place[len(self._mounts[controller]) :].lstrip("/")

    # ---- Slurm

    def _submit(self, job: Job) -> None:
        """Have Slurm take a job."""
        assert job.submission is not None
        job.busy = True
        argv, script, account = job.submission
        self._submitter.run(argv, lambda answer: self._take_submission(job, answer), script, account)

    def _take_submission(self, job: Job, answer: Answer) -> None:
        job.busy = False
        now_s = time.monotonic()
        job.look_at_s = now_s + LOOK_S
        result = parse_submission(answer.code, answer.out, answer.err)
        if isinstance(result, int):
            job.submission = None
            if job.is_over or job.record.job_id not in self._jobs:
                self._cancel(job.record, result)
            elif job.record.slurm_job is None:
                job.record.slurm_job = result
                self._records.store_if_possible(job.record.job_id, job.record)
        elif job.is_over or job.is_claimed:
            pass
        elif result.is_final:
            self._refuse(job, result)
        else:
            if not job.is_told:
                log.warning(
                    "Slurm did not take a job, it is asked again", job_id=job.record.job_id, problem=result.problem
                )
            job.is_told = True
            job.look_at_s = now_s + _RETRY_S
            self._wake_in(_RETRY_S)

    def _refuse(self, job: Job, refusal: Refusal) -> None:
        """Give a job back that Slurm does not run; the keeper sees to it that it never begins."""
        job.submission = None
        job.refusal = NotStarted(job.record.job_id, refusal.problem, refusal.node_fault)
        self._keeper.send("kill", job.record.job_id)

    def _cancel(self, record: Record, slurm_job: int | None) -> None:
        """Have Slurm end a job, and forget one that waits."""
        for argv in make_cancels(record.job_id, slurm_job, self._partition):
            # What is not there, or cannot be told now, never begins: its step is sent away.
            self._slurm.run_once(argv, record.account)

    def _interrupt(self, job: Job) -> None:
        """SIGTERM to all its processes, in whatever session: from its step, which is at hand when Slurm is away.

        Slurm leaves out what is in another session, unless it tells the step, which then passes it on.
        """
        if not self._keeper.send("interrupt", job.record.job_id):
            argv = ["scancel", "--signal=TERM", "--batch", str(job.record.slurm_job)]
            self._slurm.run_once(argv, job.record.account)

    def _advance(self, job: Job, now_s: float) -> None:
        if job.lost is not None and job.killed and not job.is_over:
            job.result = msgspec.structs.replace(job.lost, signal=_SIGKILL, problem="")
        if job.is_over and (job.is_claimed or job.record.ended is not None or self._has_left(job, now_s)):
            self._finish(job)
        elif job.is_over:
            self._wake_in(_LEAVE_LOOK_S)
        elif job.cancel_at_s is not None and now_s >= job.cancel_at_s:
            job.cancel_at_s = now_s + _RETRY_S
            self._wake_in(_RETRY_S)
            self._keeper.send("kill", job.record.job_id)
            self._cancel(job.record, job.record.slurm_job)
            self._kill_here(job)

    def _has_left(self, job: Job, now_s: float) -> bool:
        """Whether Slurm has nothing any more of a job that never began; it need not be there to say so."""
        if job.leaves_at_s is None:
            job.leaves_at_s = now_s + _LEAVE_S
            job.look_at_s = now_s
            self._cancel(job.record, job.record.slurm_job)
        return now_s >= job.leaves_at_s

    def _kill_here(self, job: Job) -> None:
        """For a step that does not do it, with a Slurm that does not answer; slurmd's own processes stay."""
        places = list(dict.fromkeys(job.record.places.values()))
        pids = {pid for pid in list_processes(places) if not is_slurmstepd(pid)}
        send_signal(places, _SIGKILL, pids)

    def _look(self, now_s: float) -> None:
        """Ask Slurm about all jobs that say nothing, at once, where it is time to."""
        unclear = [job for job in self._jobs.values() if is_unclear(job)]
        if not unclear or self._looking:
            return
        due_s = min(job.look_at_s for job in unclear) - now_s
        if due_s > 0.0:
            self._wake_in(due_s)
            return
        self._looking = True
        self._slurm.run(make_look(self._partition), lambda answer: self._take_look(unclear, answer))

    def _take_look(self, asked: list[Job], answer: Answer) -> None:
        self._looking = False
        now_s = time.monotonic()
        rows: dict[tuple[str, int], list[SlurmJob]] = {}
        for row in parse_look(answer.out) if answer.code == 0 else []:
            rows.setdefault((row.job_id, row.uid), []).append(row)
        for job in asked:
            job.look_at_s = now_s + (LOOK_S if job.leaves_at_s is None else _LEAVE_LOOK_S)
            if answer.code == 0 and is_unclear(job) and job.record.job_id in self._jobs:
                self._judge(job, rows.get((job.record.job_id, job.record.uid), []), now_s)
        self._look(now_s)

    def _judge(self, job: Job, rows: list[SlurmJob], now_s: float) -> None:
        """What Slurm's word means for a job that says nothing itself."""
        record = job.record
        if job.leaves_at_s is not None:
            if not job.busy and all(row.is_over for row in rows):
                job.leaves_at_s = now_s
                self._wake()
            return
        if job.lost is not None:
            row = next((row for row in rows if row.slurm_job == record.slurm_job), None)
            if row is None or row.is_over:
                job.result = explain_loss(job.lost, row)
                self._wake()
            return
        if record.slurm_job is None:
            living = [row for row in rows if not row.is_over]
            if not living:
                self._submit_again(job)
                return
            record.slurm_job = living[0].slurm_job
            job.submission = None
            self._records.store_if_possible(record.job_id, record)
        row = next((row for row in rows if row.slurm_job == record.slurm_job), None)
        if row is None:
            self._refuse(job, Refusal(FORGOTTEN, is_final=True))
        elif row.is_over:
            text = f"Slurm ended it before it ran: {row.state} ({row.reason}), its job {row.slurm_job}"
            self._refuse(job, Refusal(text, is_final=True))
        elif not row.is_waiting:
            job.waits_since_s = None
        elif row.is_hopeless:
            text = f"Slurm does not start it: {row.reason}, its job {row.slurm_job}"
            self._refuse(job, Refusal(text, is_final=True))
        elif job.waits_since_s is None:
            job.waits_since_s = now_s
        elif now_s - job.waits_since_s > START_S:
            text = f"Slurm has not started it within {START_S:g} s: {row.reason}, its job {row.slurm_job}"
            self._refuse(job, Refusal(text, is_final=True))

    def _submit_again(self, job: Job) -> None:
        if job.submission is None:
            self._refuse(job, Refusal(NEVER_STARTED, is_final=True))
        else:
            self._submit(job)

    # ---- ends

    def _finish(self, job: Job) -> None:
        """Report a job that is over."""
        record = job.record
        job_id = record.job_id
        if job.result is not None and record.outcome is None:
            if job.result.state == "failed":
                record.not_started = job.refusal or NotStarted(job_id, job.result.problem, job.result.node_fault)
            else:
                result = job.result
                record.ended = make_ended(record, result, result.cpu_seconds, result.max_memory, result.oom_kills)
            self._records.store_if_possible(job_id, record)
        self._report(job)
