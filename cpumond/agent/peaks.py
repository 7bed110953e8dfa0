"""Memory of rule ``peak`` about each job (limit_rules.md 2), kept when the agent ends or is killed.

It is a file in ``state_dir``, written by another thread at most every STORE_S and at the end, so that a slow or full
disk delays no limit. It is not synced to disk, since cgroups do not outlive the machine either. If it is missing or
damaged, jobs start like new ones."""

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
from cpumond.host.cgroup.mounts import read_identity
from cpumond.monitor.model import HeldBack, JobState, MonitorSettings
from cpumond.monitor.peak import MAX_CAUTION, find_half_life_s

log = structlog.get_logger("cpumond.agent")

PEAKS_FILE: Final = "peaks.state"
STORE_S: Final = 10.0
"""An agent that is killed loses at most this much time of its memory."""
SLOW_S: Final = 10.0
"""It is logged if the disk takes longer than this to write the file."""
MAX_CAUTIONS: Final = 1000
"""Number of names for which the caution of ended jobs is kept; the oldest are forgotten first."""
LAST_WRITE_S: Final = 2.0
"""Seconds at the agent's end for the write under way, and for the last one."""

NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]
Caution = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_CAUTION)]


class Learned(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Stored memory of one job; ``inode`` identifies its cgroup, others are those of ``JobState`` and ``HeldBack``.

    ``peak_cores`` has faded until ``at_s``. Times are of the monotonic clock; None if there is none."""

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

    ``cautions`` are those of jobs whose cgroup is gone, by operation, or by job id without one (limit_rules.md 2).
    ``root`` is (st_dev, inode) of the root of the hierarchy. ``clock_offset_s`` converts the stored times to seconds
    since 1970, as of the time of writing; it is used if the times are of another time namespace.
    """

    boot_id: str
    root: tuple[int, int]
    clock_offset_s: float
    jobs: dict[str, Learned] = {}
    cautions: dict[str, Caution] = {}


def learn(inode: int, state: JobState, now_s: float) -> Learned:
    """Return the memory of a job to store, from its ``state`` at ``now_s``."""
    held, seen = state.held, state.base
    return Learned(
        inode,
        now_s if seen is None else seen.at_s,
        state.peak_cores,
        _finite(state.peak_at_s),
        state.caution,
        state.watched_s,
        held.count,
        held.held_s,
        _finite(held.at_s),
        held.from_cores,
        held.after_s,
    )


def recall(state: JobState, learned: Learned, s: MonitorSettings, now_s: float) -> JobState:
    """Return a job's ``state`` with its stored memory: the peak has faded until ``now_s`` and is at most the job's
    CPU. Limit and baseline stay."""
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
    passed_s = max(now_s - learned.at_s, 0.0)
    faded = learned.peak_cores * 2.0 ** (-passed_s / find_half_life_s(state, s))
    return msgspec.structs.replace(state, peak_cores=min(faded, state.hard_cores))


class PeakFile:
    """The file, and the part of it that no job has claimed yet.

    ``problem`` says why it cannot be written, "" if it can.

    Everything but the writing is done by the tick's thread."""

    def __init__(self, state_dir: str, root: str, root_id: tuple[int, int], clock: type[HostClock] = HostClock) -> None:
        self.path = os.path.join(state_dir, PEAKS_FILE)
        self.problem = ""
        self.period_s = STORE_S
        self.due_s = clock.monotonic_s() + self.period_s
        """When the next copy is due."""
        self._clock = clock
        self._root = root
        self._root_id = root_id
        self._boot_id = read_boot_id()
        self._is_loaded = False
        self._left: dict[int, tuple[str, Learned]] = {}
        """By inode: path of a cgroup whose job is not followed, and the memory of that job."""
        self._cautions: dict[str, float] = {}
        """By operation or job id, the latest last."""
        self._gone: list[int] = []
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self._saved: Identity | None = None
        self._stored: int | None = None
        """Hash of the file's content."""

    def load(self) -> None:
        """Read the memory of an earlier agent. A file that cannot be read is logged, and the memory is empty."""
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
        # So that agents killed one after the other write it as often as a single agent.
        age_s = max(self._clock.wall_s() - _read_mtime_s(self.path), 0.0)
        self.due_s = min(self.due_s, self._clock.monotonic_s() + self.period_s - age_s)
        if content.boot_id != self._boot_id or content.root != self._root_id:
            log.info("peaks_begin_anew", error=f"{self.path}: it belongs to another boot or another hierarchy")
            return
        # Within one boot the times are valid whatever the wall clock did; times in the future are of another time
        # namespace.
        is_ahead = any(each.at_s > self._clock.monotonic_s() for each in content.jobs.values())
        shift_s = content.clock_offset_s - self._read_clock_offset_s() if is_ahead else 0.0
        self._left = {each.inode: (path, _shift(each, shift_s)) for path, each in content.jobs.items()}
        self._cautions = content.cautions

    def recall(self, job: Tracked, now_s: float) -> bool:
        """Give an opened job the memory of its cgroup, under any name, or the caution of the last ended job of its
        name; False if there is neither."""
        found = self._left.pop(job.cgroup.inode, None)
        if found is not None:
            job.state = recall(job.state, found[1], job.settings, now_s)
            return True
        caution = self._cautions.get(_name(job))
        if caution is not None:
            job.state = msgspec.structs.replace(job.state, caution=caution)
        return caution is not None

    def keep(self, job: Tracked) -> None:
        """Store the memory of a job that is no longer followed while its cgroup lives: it may return, or be found
        under another name."""
        if job.state.watched_s > 0.0:
            learned = learn(job.cgroup.inode, job.state, self._clock.monotonic_s())
            self._left[job.cgroup.inode] = job.found.path, learned

    def remember(self, job: Tracked) -> None:
        """Store the caution of a job whose cgroup is gone: a similar job starts with it."""
        if job.state.watched_s > 0.0:
            self._cautions.pop(_name(job), None)
            self._cautions[_name(job)] = job.state.caution
            if len(self._cautions) > MAX_CAUTIONS:
                del self._cautions[next(iter(self._cautions))]

    def store(self, jobs: Iterable[Tracked], now_s: float) -> None:
        """Write the memory of ``jobs`` when due; never raises, nor waits for the disk."""
        if now_s < self.due_s:
            return
        self.due_s = now_s + self.period_s
        if not self._is_writing():
            self._start(jobs, now_s)
        elif now_s >= self._began_s + SLOW_S:
            self._log_problem(f"{self.path}: writing it takes the disk more than {SLOW_S:g} s")

    def close(self, jobs: Iterable[Tracked]) -> None:
        """Write the file a last time; a disk that takes longer than LAST_WRITE_S for one write is not waited for."""
        if not self._is_loaded:
            return
        if self._thread is not None:
            self._thread.join(LAST_WRITE_S)
        if not self._is_writing():
            self._start(jobs, self._clock.monotonic_s())
        if self._thread is not None:
            self._thread.join(LAST_WRITE_S)

    def look_after_file(self) -> list[str]:
        """Rewrite the file at once if it was removed or replaced, and return its path."""
        if self._is_writing() or self._saved is None or identify(self.path) == self._saved:
            return []
        self._saved = self._stored = None
        self.due_s = -math.inf
        return [self.path]

    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self, jobs: Iterable[Tracked], now_s: float) -> None:
        # References to frozen values only: the thread serialises them.
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
            # Otherwise the thread would end without a log line, and nothing more would be stored.
            log.exception("peaks_thread_failed")
            self._log_problem(
                f"{self.path}: {error!r}; until then caution and peaks of the jobs would be lost with the agent"
            )

    def _log_problem(self, problem: str) -> None:
        """Log a problem once while it lasts."""
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


def _finite(at_s: float) -> float | None:
    return at_s if math.isfinite(at_s) else None
