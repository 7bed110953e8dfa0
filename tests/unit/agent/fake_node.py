"""An agent over a fake tree of cgroups, driven tick by tick with a clock that moves when told to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

from cpumond.agent.config import AgentConfig, finish_config, parse_config_text
from cpumond.agent.service import Agent
from cpumond.agent.snapshot import TickSnapshot
from cpumond.agent.tracked import TrackedView
from cpumond.core.answers import ReporterStats
from cpumond.core.wire import Heartbeat
from cpumond.host.cgroup.mounts import open_hierarchies
from cpumond.testing import make_tree, make_v2_host, v2_cgroup

QUICK = """
[monitor]
mode = "reclaim"
smoothing_factor = 1.0
smoothing_seed = "first_value"
vote_window_size = 2
vote_decision_threshold = 1
decrease_coefficient = 0.5
min_cpu_limit = 0.5
"""
"""Two checks decide, each shrink halves the limit: from 4 cores to 0.5 in five checks."""


class FakeClock:
    """A clock for tests. ``advance`` moves all times, ``suspend`` boot and wall time, ``set_wall`` only wall time."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._monotonic_s = start_s
        self._asleep_s = 0.0
        self._set_s = 0.0

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def boottime_s(self) -> float:
        return self._monotonic_s + self._asleep_s

    def wall_s(self) -> float:
        return 1.7e9 + self.boottime_s() + self._set_s

    def advance(self, seconds: float) -> None:
        self._monotonic_s += seconds

    def suspend(self, seconds: float) -> None:
        self._asleep_s += seconds

    def set_wall(self, seconds: float) -> None:
        self._set_s += seconds


class CollectedReports:
    def __init__(self) -> None:
        self.heartbeats: list[Heartbeat] = []
        self.closed = 0

    def submit(self, heartbeat: Heartbeat) -> None:
        self.heartbeats.append(heartbeat)

    def close(self, timeout_s: float) -> None:
        self.closed += 1

    def stats(self) -> ReporterStats:
        return ReporterStats(len(self.heartbeats))


def source(pattern: str = "jobs/*", cpu_limit: object = 4.0, more: str = "") -> str:
    """One ``[[source]]`` of jobs by pattern."""
    limit = f'"{cpu_limit}"' if isinstance(cpu_limit, str) else cpu_limit
    return f'[[source]]\nkind = "glob"\npattern = "{pattern}"\ncpu_limit = {limit}\n{more}\n'


class FakeNode:
    """A machine with a unified hierarchy in a directory, jobs below ``folder``, and its agent."""

    folder = "jobs"
    managed_roots = '["jobs"]'

    def __init__(self, directory: Path, jobs: dict[str, dict[str, object]], config: str = QUICK + source()) -> None:
        self.directory = directory
        self.mountinfo = make_v2_host(directory, {self.folder: {**v2_cgroup(), **jobs}})
        self.root = directory / "cgroup"
        self.clock = FakeClock()
        self.reports = CollectedReports()
        self.config_text = config
        self._usage_us: dict[str, float] = {}
        self._throttled_us: dict[str, float] = {}
        self._periods: dict[str, tuple[int, int]] = {}
        self.agent = self.make_agent()

    def read_config(self, text: str | None = None) -> AgentConfig:
        """The configuration ``text`` (else the first one) with the directories of this node."""
        place = self.directory
        head = (
            f'node_id = "node"\nstate_dir = "{place}/state"\nruntime_dir = "{place}/run"\n'
            f'mountinfo = "{self.mountinfo}"\nmanaged_roots = {self.managed_roots}\n'
        )
        return finish_config(parse_config_text(head + (text or self.config_text), "test.toml"), "test.toml")

    def make_agent(self) -> Agent:
        config = self.read_config()
        os.makedirs(config.state_dir, exist_ok=True)
        os.makedirs(config.runtime_dir, exist_ok=True)
        return Agent(config, open_hierarchies(config.mountinfo), self.reports, clock=self.clock)

    def start(self) -> FakeNode:
        """Start the agent: its first tick is the base of all jobs."""
        self.agent.start()
        return self

    def end(self) -> Self:
        self.agent.close()
        return self

    def drop_agent(self) -> None:
        self.agent.table.close()
        self.agent.context.watcher.close()

    def kill_and_restart(self) -> FakeNode:
        """The agent dies without a word, another one starts."""
        self.drop_agent()
        self.agent = self.make_agent()
        return self.start()

    def reload(self, text: str) -> None:
        self.config_text = text
        self.agent.use_config(self.read_config(text))

    def tick(self, usage: dict[str, float] | float = 0.0, throttled: dict[str, float] | None = None,
             seconds: float = 1.0, late_s: float = 0.0) -> TickSnapshot:  # fmt: skip
        """Let ``seconds`` pass in which each job uses ``usage`` cores, then tick."""
        self.clock.advance(seconds)
        for job in self.names():
            cores = usage if isinstance(usage, float) else usage.get(job, 0.0)
            self.use(job, cores * seconds, (throttled or {}).get(job, 0.0), seconds)
        self.agent.loop.tick(self.clock.monotonic_s(), late_s)
        return self.snapshot()

    def snapshot(self) -> TickSnapshot:
        snapshot = self.agent.read_snapshot()
        assert snapshot is not None
        return snapshot

    def ticks(self, number: int, usage: dict[str, float] | float = 0.0) -> TickSnapshot:
        """Several ticks of one second."""
        for _ in range(number - 1):
            self.tick(usage)
        return self.tick(usage)

    def run(self, ticks: int, usage: dict[str, float] | float = 0.0) -> FakeNode:
        """Start the agent and let it tick: eight times without use, and each job is at its floor."""
        self.start().ticks(ticks, usage)
        return self

    def names(self) -> list[str]:
        """The jobs' directories that have counters."""
        jobs = self.root / self.folder
        return sorted(place.name for place in jobs.iterdir() if (place / "cpu.stat").exists())

    def use(self, job: str, cpu_s: float, throttled_ratio: float = 0.0, seconds: float = 1.0) -> None:
        """Move a job's counters; while it is throttled it is one thread that waits."""
        self._throttled_us[job] = self._throttled_us.get(job, 0.0) + throttled_ratio * seconds * 1e6
        self._usage_us[job] = self._usage_us.get(job, 0.0) + cpu_s * 1e6
        periods, throttled = self._periods.get(job, (0, 0))
        passed = max(round(seconds * 10), 1)
        self._periods[job] = periods, throttled = periods + passed, throttled + round(passed * throttled_ratio)
        self.write(
            job,
            "cpu.stat",
            f"usage_usec {int(self._usage_us[job])}\nuser_usec 0\nsystem_usec 0\nnr_periods {periods}\n"
            f"nr_throttled {throttled}\nthrottled_usec {int(self._throttled_us[job])}\n",
        )

    def forget_counters(self, job: str) -> None:
        """The job's counters start at zero again."""
        self._usage_us.pop(job, None)
        self._throttled_us.pop(job, None)
        self._periods.pop(job, None)

    def write(self, job: str, file: str, text: str) -> None:
        """Write a file of a job's cgroup, as another program or the kernel."""
        (self.root / self.folder / job / file).write_text(text)

    def read(self, job: str, file: str = "cpu.max") -> str:
        return (self.root / self.folder / job / file).read_text().strip()

    def files(self, job: str) -> dict[str, str]:
        return {file: self.read(job, file) for file in ("cpu.max", "cpu.max.burst", "cpu.weight")}

    def cores(self, job: str) -> float:
        """The quota of a job in cores."""
        quota, period = self.read(job).split()
        return float("inf") if quota == "max" else int(quota) / int(period)

    def make(self, job: str, **files: Any) -> None:
        make_tree(self.root / self.folder / job, v2_cgroup(**files))
        self.forget_counters(job)

    def remove(self, job: str) -> None:
        """A job's cgroup goes away. Its directory is kept elsewhere, so that its inode is not given out again."""
        place = self.root / self.folder / job
        removed = self.directory / f"removed-{len(os.listdir(self.directory))}"
        os.rename(place, removed)
        for file in removed.iterdir():
            file.unlink()
        # The kernel says that a directory went, not that it was moved.
        place.mkdir()
        place.rmdir()

    def job(self, name: str) -> TrackedView:
        return {job.found.path.rpartition("/")[2]: job for job in self.snapshot().jobs}[name]
