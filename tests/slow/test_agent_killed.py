"""What rule ``peak`` learned is back after each kill of an agent, and after ``cpumond restore`` no limit is low."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_process import AgentProcess
from configs import describe_agent, make

from cpumond.agent.peaks import PEAKS_FILE, Learned, Peaks
from cpumond.agent.state_file import load

pytestmark = pytest.mark.cgroup

KILLS = 100
LONGEST_LIFE_S = 0.45
KEPT_S = 0.1
"""Instead of each 10 s, so that lives may be short."""
SLACK_S = 6.0
"""For agents that start slowly where others take the CPU."""
ORDERED_CORES = 0.5
"""Less than a burst takes: any lower limit holds it back."""
JOBS = ("steady", "first", "second", "idle")

LAUNCHER = f"""
import os, sys
import cpumond.agent.api, cpumond.agent.main, cpumond.agent.peaks, cpumond.monitor.peak

# So that lives may be short: what is stored each 10 s, and lowered after 10 s.
cpumond.agent.peaks.STORE_S = {KEPT_S}
cpumond.monitor.peak.FIRST_SECONDS = 0.0
for _ in sys.stdin:
    pid = os.fork()
    if pid == 0:
        sys.exit(cpumond.agent.main.run_agent(sys.argv[1]))
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""Agents as children that have imported everything already: a hundred of them are started in a short time."""


class Launcher:
    def __init__(self, agent: AgentProcess) -> None:
        self._pid = 0
        self._log = open(agent.log_path, "ab")  # noqa: SIM115 - closed below
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(agent.config_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip

    def start(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        self._pid = self._read()
        return self._pid

    def wait(self) -> int:
        code = self._read()
        self._pid = 0
        return code

    def _read(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End it, and the agent that may run."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
        self._process.communicate(timeout=60)
        self._log.close()


@pytest.fixture
def launcher(cgroups: Any, agent: AgentProcess) -> Iterator[Launcher]:
    options = {"limit_rule": '"peak"', "peak_memory": '"100ms"', "min_cpu_limit": "0.05"}
    idle = ["smoothing_factor", "vote_window_size", "vote_decision_threshold", "decrease_coefficient"]
    text = describe_agent(cgroups, check_period="30ms", monitor=options)
    agent.write_config("".join(line for line in text.splitlines(True) if line.split(" ")[0] not in idle))
    (agent.directory / "state").mkdir(mode=0o700)
    made = Launcher(agent)
    yield made
    made.close()


def read_new(path: Path, offset: int) -> list[dict[str, Any]]:
    """The records that an agent has logged since the file was ``offset`` long; the last one may be cut."""
    return [json.loads(line) for line in path.read_bytes()[offset:].split(b"\n")[:-1] if line.startswith(b"{")]


def check_recalled(found: dict[str, Any], known: Learned | None) -> None:
    """What a job begins with is what the file said of it."""
    if known is None:
        assert "caution" not in found
        return
    assert found["caution"] == pytest.approx(known.caution, abs=1e-5)
    assert (found.get("peak_cores") is None) == (known.peak_cores is None)
    if known.peak_cores is not None:
        # It has faded meanwhile, never by more than half for each half-life.
        half_life_s = 0.1 * 2**known.caution
        least = known.peak_cores * 2 ** -((time.monotonic() - known.at_s) / half_life_s)
        assert min(least, ORDERED_CORES) - 1e-5 <= found["peak_cores"] <= min(known.peak_cores, ORDERED_CORES) + 1e-5


def test_an_agent_killed_at_any_moment_keeps_what_it_had_learned(cgroups, agent, launcher):
    make(cgroups, *JOBS, quota_us=int(ORDERED_CORES * 100_000))
    rng, pause = random.Random(), threading.Event()
    loads = {name: cgroups.start_load(name) for name in JOBS[:3]}
    loads["steady"].burn(0.1)
    file = agent.directory / "state" / PEAKS_FILE
    known: dict[str, Learned] = {}
    recalled = lowered = held = 0
    for number in range(KILLS):
        # Each has time to be lowered before it bursts, not at the same time as the other.
        loads["first"].burn(1.0 if number % 4 == 0 else 0.02)
        loads["second"].burn(1.0 if number % 4 == 2 else 0.02)
        offset = agent.log_path.stat().st_size
        pid = launcher.start()
        pause.wait(rng.uniform(0.0, LONGEST_LIFE_S))
        os.kill(pid, signal.SIGKILL)
        assert launcher.wait() == -signal.SIGKILL
        killed_at_s = time.monotonic()
        records = read_new(agent.log_path, offset)
        found = {record["cgroup"]: record for record in records if record["event"] == "job_found"}
        for path, record in found.items():
            check_recalled(record, known.get(path))
            recalled += path in known
        assert not [record for record in records if record["level"] in ("error", "critical")]
        assert not [record for record in records if record["event"] == "peaks_begin_anew"]
        before, content = known, load(str(file), Peaks) if file.exists() else None
        known = {} if content is None else content.jobs
        for path, learned in known.items():
            assert killed_at_s - learned.at_s <= KEPT_S + LONGEST_LIFE_S + SLACK_S
            if path in before:
                assert learned.watched_s >= before[path].watched_s
                assert learned.held_count >= before[path].held_count
        held = sum(learned.held_count for learned in known.values())
        lowered += any(cgroups.quota_cores(name) < 0.9 * ORDERED_CORES for name in JOBS)
    # It was about something.
    assert known.keys() == {f"{cgroups.top}/{name}" for name in JOBS}
    assert recalled > KILLS / 2
    assert lowered > KILLS / 4
    assert held > 0
    print(f"{KILLS} kills: {recalled} jobs recalled, {lowered} times a limit was low, {held} times held back")
    assert agent.run("restore").returncode == 0
    assert [cgroups.quota_cores(name) for name in JOBS] == [ORDERED_CORES] * len(JOBS)
