"""Memory of rule ``peak`` about each job (limit_rules.md 2), which is kept when the agent ends or is killed.

It is in a file in ``state_dir``. A separate thread writes this file, at most every STORE_S and at the end, so that a
slow or full disk delays no limit. The file is not synced, since cgroups do not outlive a crash of the machine either.
If the file is missing or damaged, jobs start like new ones."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
import structlog

from cpumond.agent.clock import HostClock
from cpumond.agent.state_file import Identity, identify, load, read_boot_id, save
from cpumond.agent.tracked import Tracked
from cpumond.core.errors import CpumondError
from cpumond.core.measures import finite_or_none
from cpumond.host.cgroup.mounts import read_identity
from cpumond.monitor.model import HeldBack, JobState, MonitorSettings
from cpumond.monitor.peak import MAX_CAUTION, find_half_life_s

log = structlog.get_logger("cpumond.agent")

PEAKS_FILE: Final = "peaks.state"
STORE_S: Final = 10.0
"""Seconds between two writes of the file: what is learned after the last write is lost if the agent is killed."""
SLOW_S: Final = 10.0
"""If the disk takes longer than this many seconds to write the file, this is logged."""
MAX_CAUTIONS: Final = 1000
"""Maximum number of names for which the caution of ended jobs is kept; the oldest are forgotten first."""
LAST_WRITE_S: Final = 2.0
"""Maximum seconds at the agent's end to wait for a write in progress, and again for the last write."""

NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]
Caution = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_CAUTION)]


class Learned(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Stored memory of one job. ``inode`` identifies its cgroup; most fields are from ``JobState`` and ``HeldBack``.

    ``at_s``: the time when the peak was ``peak_cores``; it fades from then on. Times are monotonic; None if unknown."""

    inode: int
    at_s: float
    peak_cores: NotNegative | None
    peak_at_s: float | None
    caution: Caution
    watched_s: NotNegative
    held_count: Annotated[int, msgspec.Meta(ge=0)]
    held_s: NotNegative
    held_at_s: float | None
    held_from_cores: NotNegative
    held_after_s: NotNegative


class Peaks(msgspec.Struct, frozen=True):
    """Content of ``peaks.state``: cgroup path -> memory of its job; valid for one boot of the machine.

    ``cautions`` are those of jobs whose cgroup is gone, by operation; for a job without an operation, by job id
    (limit_rules.md 2). ``root`` is (st_dev, inode) of the root of the hierarchy. ``clock_offset_s``, added to a stored
    time, gave seconds since 1970 when the file was written; it is used if a different time namespace wrote the file."""

    boot_id: str
    root: tuple[int, int]
    clock_offset_s: float
    jobs: dict[str, Learned] = {}
    cautions: dict[str, Caution] = {}


def learn(inode: int, state: JobState, now_s: float) -> Learned:
    """Return what to store about a job whose state at ``now_s`` is ``state``."""
    held, seen = state.held, state.base
    return Learned(
        inode,
        now_s if seen is None else seen.at_s,
        state.peak_cores,
        finite_or_none(state.peak_at_s),
        state.caution,
        state.watched_s,
        held.count,
        held.held_s,
        finite_or_none(held.at_s),
        held.from_cores,
        held.after_s,
    )


def recall(state: JobState, learned: Learned, s: MonitorSettings, now_s: float) -> JobState:
    """Return a job's ``state`` with the stored memory: the peak has faded until ``now_s``, and does not exceed the CPU
    that the job can have. Limit and baseline stay the same."""
    state = msgspec.structs.replace(
        state,
        peak_at_s=-math.inf if learned.peak_at_s is None else min(learned.peak_at_s, now_s),
        caution=learned.caution,
        watched_s=learned.watched_s,
        held=HeldBack(
            learned.held_count,
            learned.held_s,
            -math.inf if learned.held_at_s is None else min(learned.held_at_s, now_s),
            learned.held_from_cores,
            learned.held_after_s,
        ),
    )
    if learned.peak_cores is None:
        return state
    faded = learned.peak_cores * 2.0 ** (-max(now_s - learned.at_s, 0.0) / find_half_life_s(state, s))
    return msgspec.structs.replace(state, peak_cores=min(faded, state.hard_cores))


class PeakFile:
    """The file, and that part of its content that no job has claimed yet.

    ``problem`` says why the file cannot be written, "" if it can. All methods are for the tick's thread; only the
    writing is done by a separate thread."""

    def __init__(self, state_dir: str, root: str, root_id: tuple[int, int], clock: type[HostClock] = HostClock) -> None:
        self.path = os.path.join(state_dir, PEAKS_FILE)
        self.problem = ""
        self.period_s = STORE_S
        self.due_s = clock.monotonic_s() + self.period_s
        """Time of the next write of the file."""
        self._clock = clock
        self._root = root
        self._root_id = root_id
        self._boot_id = read_boot_id()
        self._is_loaded = False
        self._left: dict[int, tuple[str, Learned]] = {}
        """Inode of a cgroup whose job is not followed -> its path, and the memory of the job."""
        self._cautions: dict[str, float] = {}
        """Operation or job id -> caution of the last ended job; the newest is last."""
        self._gone: list[int] = []
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self._saved: Identity | None = None
        self._stored: int | None = None
        """Hash of the content that the file has."""

    def load(self) -> None:
        """Read the memory of an earlier run. If the file cannot be read, this is logged, and the memory is empty."""
        self._is_loaded = True
        try:
            content = load(self.path, Peaks)
        except CpumondError as error:
            log.warning("peaks_begin_anew", error=str(error), advice="nothing to do: the file will be rewritten")
            return
        if content is None:
            log.debug("peaks_begin_anew", error=f"{self.path}: does not exist")
            return
        self._saved = identify(self.path)
        # The period counts from the file's last write: otherwise an agent that is killed often would never write it.
        age_s = max(self._clock.wall_s() - _read_mtime_s(self.path), 0.0)
        self.due_s = min(self.due_s, self._clock.monotonic_s() + self.period_s - age_s)
        if content.boot_id != self._boot_id or content.root != self._root_id:
            log.info("peaks_begin_anew", error=f"{self.path}: it belongs to another boot or another hierarchy")
            return
        # Monotonic times are valid during one boot, even if the wall clock was set. Times in the future come from a
        # different time namespace.
        is_ahead = any(each.at_s > self._clock.monotonic_s() for each in content.jobs.values())
        shift_s = content.clock_offset_s - self._read_clock_offset_s() if is_ahead else 0.0
        self._left = {each.inode: (path, _shift(each, shift_s)) for path, each in content.jobs.items()}
        self._cautions = content.cautions

    def recall(self, job: Tracked, now_s: float) -> bool:
        """Give a new job the memory of its cgroup, which may have been renamed, or else the caution of the last ended
        job of the same name. Return False if there is neither."""
        found = self._left.pop(job.cgroup.inode, None)
        if found is not None:
            job.state = recall(job.state, found[1], job.settings, now_s)
            return True
        caution = self._cautions.get(_name(job))
        if caution is not None:
            job.state = msgspec.structs.replace(job.state, caution=caution)
        return caution is not None

    def keep(self, job: Tracked) -> None:
        """Keep the memory of a job no longer followed whose cgroup exists: it may return, perhaps with a new name."""
        if job.state.watched_s > 0.0:
            learned = learn(job.cgroup.inode, job.state, self._clock.monotonic_s())
            self._left[job.cgroup.inode] = job.found.path, learned

    def remember(self, job: Tracked) -> None:
        """Keep the caution of a job whose cgroup is gone: the next job of the same name starts with it."""
        if job.state.watched_s > 0.0:
            self._cautions.pop(_name(job), None)
            self._cautions[_name(job)] = job.state.caution
            if len(self._cautions) > MAX_CAUTIONS:
                del self._cautions[next(iter(self._cautions))]

    def store(self, jobs: Iterable[Tracked], now_s: float) -> None:
        """Write the memory of ``jobs`` if that is due. Never raises, and does not wait for the disk."""
        if now_s < self.due_s:
            return
        self.due_s = now_s + self.period_s
        if not self._is_writing():
            self._start(jobs, now_s)
        elif now_s >= self._began_s + SLOW_S:
            self._log_problem(f"{self.path}: writing it takes the disk more than {SLOW_S:g} s")

    def close(self, jobs: Iterable[Tracked]) -> None:
        """Write the file a last time. Waits at most LAST_WRITE_S for each write."""
        if not self._is_loaded:
            return
        if self._thread is not None:
            self._thread.join(LAST_WRITE_S)
        if not self._is_writing():
            self._start(jobs, self._clock.monotonic_s())
        if self._thread is not None:
            self._thread.join(LAST_WRITE_S)

    def look_after_file(self) -> list[str]:
        """If the file was removed or replaced, rewrite it at once and return its path."""
        if self._is_writing() or self._saved is None or identify(self.path) == self._saved:
            return []
        self._saved = self._stored = None
        self.due_s = -math.inf
        return [self.path]

    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self, jobs: Iterable[Tracked], now_s: float) -> None:
        # The thread gets only references to frozen values, and serialises them itself.
        known = [(job.found.path, job.cgroup.inode, job.state) for job in jobs if job.state.watched_s > 0.0]
        for inode in self._gone:
            self._left.pop(inode, None)
        self._gone = []
        if not (known or self._left or self._cautions or self._saved is not None):
            return
        arguments = (known, dict(self._left), dict(self._cautions), now_s, self._read_clock_offset_s())
        try:
            self._began_s = now_s
            self._thread = threading.Thread(target=self._write, args=arguments, name="peaks", daemon=True)
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            self._log_problem(f"{self.path}: no thread to write it: {error}")

    def _write(
        self,
        known: list[tuple[str, int, JobState]],
        left: dict[int, tuple[str, Learned]],
        cautions: dict[str, float],
        now_s: float,
        clock_offset_s: float,
    ) -> None:
        try:
            self._gone = [
                inode for inode, (path, _) in left.items() if read_identity(os.path.join(self._root, path))[1] != inode
            ]
            jobs = {path: learned for inode, (path, learned) in left.items() if inode not in self._gone}
            jobs.update({path: learn(inode, state, now_s) for path, inode, state in known})
            stored = hash((*jobs.items(), *cautions.items()))
            if stored != self._stored:
                content = Peaks(self._boot_id, self._root_id, clock_offset_s, jobs, cautions)
                self._saved = save(self.path, content, sync=False)
                self._stored = stored
            self.problem = ""
        except (CpumondError, OSError, ValueError) as error:
            self._log_problem(f"{error}; until then caution and peaks of the jobs would be lost with the agent")
        except Exception as error:
            # Without this, the thread would end without a log line, and no one would see the problem.
            log.exception("peaks_thread_failed")
            self._log_problem(
                f"{self.path}: {error!r}; until then caution and peaks of the jobs would be lost with the agent"
            )

    def _log_problem(self, problem: str) -> None:
        """Log a problem once, not again while it lasts."""
        if not self.problem:
            log.error("peaks_not_written", error=problem, retry_s=self.period_s)
        self.problem = problem

    def _read_clock_offset_s(self) -> float:
        return self._clock.wall_s() - self._clock.monotonic_s()


def _name(job: Tracked) -> str:
    return job.found.operation_id or job.found.job_id


def _shift(learned: Learned, by_s: float) -> Learned:
    return msgspec.structs.replace(
        learned,
        at_s=learned.at_s + by_s,
        peak_at_s=None if learned.peak_at_s is None else learned.peak_at_s + by_s,
        held_at_s=None if learned.held_at_s is None else learned.held_at_s + by_s,
    )


def _read_mtime_s(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return math.inf
