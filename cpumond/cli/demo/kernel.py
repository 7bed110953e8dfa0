"""A simulated kernel for hosts where no cgroup can be created: plain directories, real processes, no limits."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import psutil

from cpumond.core.measures import DEFAULT_PERIOD_US
from cpumond.testing import make_v2_host

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
PERIODS_PER_S = 1e6 / DEFAULT_PERIOD_US


class _Counters:
    """Counters of one cgroup: CPU seconds, enforcement periods, and the CPU seconds of each process by id."""

    def __init__(self) -> None:
        self.usage_s = self.throttled_s = 0.0
        self.periods = self.throttled = 0
        self.processes: dict[int, psutil.Process] = {}
        self.used_s: dict[int, float] = {}


class PlainKernel:
    """A unified hierarchy of plain directories below ``root``, with the counters of the real processes in them.

    Quotas are not enforced: a process that uses more than ``cpu.max`` is counted as throttled, and continues. Only the
    first process of a job is counted, with all its threads. Entering the context starts a thread that counts every
    ``step_s``."""

    def __init__(self, root: str, step_s: float = 0.1) -> None:
        self.top = os.path.join(root, "cgroup")
        self.mountinfo = make_v2_host(root, {})
        self._step_s = step_s
        self._counters: dict[str, _Counters] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="plain-kernel", daemon=True)

    def __enter__(self) -> PlainKernel:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        last_s = time.monotonic()
        while not self._stop.wait(self._step_s):
            now_s = time.monotonic()
            self.advance(now_s - last_s)
            last_s = now_s

    def advance(self, seconds: float) -> None:
        """Count ``seconds`` for every cgroup that has a quota."""
        found = [place for place, _, files in os.walk(self.top) if "cpu.max" in files]
        for place in found:
            # The agent may remove the cgroup at any moment.
            with contextlib.suppress(OSError):
                self._count(place, self._counters.setdefault(place, _Counters()), seconds)
        self._counters = {place: self._counters[place] for place in found}

    def _count(self, place: str, counters: _Counters, seconds: float) -> None:
        listed = _read_members(place)
        times = {pid: used_s for pid in listed if (used_s := _read_used_s(pid, counters.processes)) is not None}
        if len(times) < len(listed):
            _write_members(place, list(times))
        # All CPU time of a new process counts, because it was started for this job.
        used_s = sum(max(used - counters.used_s.get(pid, 0.0), 0.0) for pid, used in times.items())
        counters.used_s = times
        quota, _, period = _read(place, "cpu.max").strip().partition(" ")
        limit = float("inf") if quota in ("max", "") else int(quota) / int(period or DEFAULT_PERIOD_US)
        periods = max(round(seconds * PERIODS_PER_S), 1)
        counters.usage_s += used_s
        counters.periods += periods
        if used_s > limit * seconds + TICK_S:
            counters.throttled += periods
            counters.throttled_s += used_s - limit * seconds
        # Counters only grow, so the text never gets shorter; it is overwritten in place while others read it.
        text = (
            f"usage_usec {int(counters.usage_s * 1e6)}\nuser_usec 0\nsystem_usec 0\nnr_periods {counters.periods}\n"
            f"nr_throttled {counters.throttled}\nthrottled_usec {int(counters.throttled_s * 1e6)}\n"
        )
        fd = os.open(os.path.join(place, "cpu.stat"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(fd, text.encode(), 0)
        finally:
            os.close(fd)


def _read(place: str, name: str) -> str:
    with open(os.path.join(place, name), encoding="ascii") as file:
        return file.read()


def _read_members(place: str) -> list[int]:
    """Return the processes that joined the cgroup, without the processes that these started."""
    try:
        return [int(word) for word in _read(place, "cgroup.procs").split()]
    except FileNotFoundError:
        return []


def _write_members(place: str, pids: list[int]) -> None:
    path = os.path.join(place, "cgroup.procs")
    with open(f"{path}.new", "w", encoding="ascii") as file:
        file.writelines(f"{pid}\n" for pid in pids)
    os.rename(f"{path}.new", path)


def _read_used_s(pid: int, known: dict[int, psutil.Process]) -> float | None:
    """The CPU time of a process in seconds; None when it has ended, even if its id has been reused."""
    try:
        process = known[pid] if pid in known else known.setdefault(pid, psutil.Process(pid))
        if not process.is_running() or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        times = process.cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)
