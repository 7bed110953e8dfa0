"""A simulated kernel for hosts where no cgroup can be made: plain directories, real processes, no limits."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from cpumond.core.measures import DEFAULT_PERIOD_US
from cpumond.testing import make_v2_host

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
PERIODS_PER_S = 1e6 / DEFAULT_PERIOD_US


class _Counters:
    def __init__(self) -> None:
        self.usage_s = 0.0
        self.periods = 0
        self.throttled = 0
        self.throttled_s = 0.0
        self.seen: dict[int, float] = {}
        self.starts: dict[int, int] = {}

    def format(self) -> str:
        # Counters only grow, so this is never shorter than before: it is overwritten in place while others read it.
        return (
            f"usage_usec {int(self.usage_s * 1e6)}\nuser_usec 0\nsystem_usec 0\nnr_periods {self.periods}\n"
            f"nr_throttled {self.throttled}\nthrottled_usec {int(self.throttled_s * 1e6)}\n"
        )


class PlainKernel:
    """A unified hierarchy of plain directories below ``root``, whose counters are those of the real processes in them.

    Quotas are not enforced: a process that uses more than ``cpu.max`` is counted as throttled, and goes on. Only the
    first process of a job is counted, with all its threads.
    """

    def __init__(self, root: str, step_s: float = 0.1) -> None:
        self.top = os.path.join(root, "cgroup")
        self.mountinfo = make_v2_host(root, {})
        self._step_s = step_s
        self._counters: dict[str, _Counters] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="plain-kernel", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        last_s = time.monotonic()
        while not self._stop.wait(self._step_s):
            now_s = time.monotonic()
            self.advance(now_s - last_s)
            last_s = now_s

    def advance(self, seconds: float) -> None:
        """One step of ``seconds`` for every cgroup that has a quota."""
        found = [place for place, _, files in os.walk(self.top) if "cpu.max" in files]
        for place in found:
            # The agent may remove it at any moment.
            with contextlib.suppress(OSError):
                self._count(place, self._counters.setdefault(place, _Counters()), seconds)
        self._counters = {place: self._counters[place] for place in found}

    def _count(self, place: str, counters: _Counters, seconds: float) -> None:
        listed = _read_members(place)
        times: dict[int, float] = {}
        for pid in listed:
            found = _read_process(pid)
            # An id that has another start time is another process by now.
            if found is not None and counters.starts.setdefault(pid, found[0]) == found[0]:
                times[pid] = found[1]
        if len(times) < len(listed):
            _write_members(place, list(times))
        # All CPU time of a new process counts: it was started for this job.
        used_s = sum(max(used - counters.seen.get(pid, 0.0), 0.0) for pid, used in times.items())
        counters.seen = times
        limit = _read_limit(place)
        periods = max(round(seconds * PERIODS_PER_S), 1)
        is_over = used_s > limit * seconds + TICK_S
        counters.usage_s += used_s
        counters.periods += periods
        counters.throttled += periods if is_over else 0
        counters.throttled_s += max(used_s - limit * seconds, 0.0) if is_over else 0.0
        fd = os.open(os.path.join(place, "cpu.stat"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(fd, counters.format().encode(), 0)
        finally:
            os.close(fd)


def _read_members(place: str) -> list[int]:
    """The processes that joined the cgroup; those that they start are not seen."""
    try:
        with open(os.path.join(place, "cgroup.procs"), encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except FileNotFoundError:
        return []


def _write_members(place: str, pids: list[int]) -> None:
    """Take out ended processes."""
    path = os.path.join(place, "cgroup.procs")
    with open(f"{path}.new", "w", encoding="ascii") as file:
        file.writelines(f"{pid}\n" for pid in pids)
    os.rename(f"{path}.new", path)


def _read_process(pid: int) -> tuple[int, float] | None:
    """When a process was started (ticks since the boot), and its CPU time in seconds; None when it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[19]), (int(fields[11]) + int(fields[12])) * TICK_S)


def _read_limit(place: str) -> float:
    with open(os.path.join(place, "cpu.max"), encoding="ascii") as file:
        quota, _, period = file.read().partition(" ")
    return float("inf") if quota.strip() in ("max", "") else int(quota) / int(period or DEFAULT_PERIOD_US)
