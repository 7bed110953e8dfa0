"""The arms of ``real_services.py``: who moves the servers' limits, and which batch work runs beside them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx2
import psutil
from real_figures import AGAIN, BASE, PLAIN, compute_free, compute_suppressed
from real_servers import Groups, count_lines, find_compiler, read_busy_s, read_used_s, write_unit

from cpumond.cluster import Cluster
from cpumond.core.errors import UnavailableError
from cpumond.core.job_cgroups import name_idle_parent

FLOOR_CORES: Final = 0.1
"""``min_cpu_limit`` in every arm: its default of one core would free nothing from servers that order half of one."""
SYSTEM_CORES: Final = 0.2
"""Left to load generators, agent and benchmark where a batch has a quota."""
CLUSTER: Final = "cluster"
"""The cgroup of the jobs of ``Managed``, beside those of the servers."""
COMPILE: Final = (
    'n=0; while [ "$n" -lt "$4" ]; do "$1" -quiet -O2 "$2" -o /dev/null || exit 1; echo >> "$3"; n=$((n + 1)); done'
)
"""Compile a file again and again: the compiler, the file, where each one is counted, how many."""
FILES_OF_JOB: Final = 8
SCHEDULER: Final = 'additional_reclaimed_overcommit_duration = "2m"\n[forecast]\nenabled = false\n'
"""Of the scheduler of ``Managed``: jobs on reclaimed CPU wait during a burst of the servers and go on after it. No
forecasts are made: elsewhere a scheduler is not on a host with jobs."""
ENDLESS: Final = 10**9
POOL: Final = "batch"
SOURCES: Final = 'managed_roots = ["{top}"]\n[[source]]\nkind = "glob"\npattern = "{top}/server-*"\n'
"""Of the agent, besides what ``Cluster`` writes."""


@dataclass(frozen=True)
class Batch:
    """Compilers, one for each CPU, in a cgroup of ``shares`` (v1) and, if ``is_idle``, of the idle class. ``room``: the
    cores of its quota: "" none, "free" what servers' limits leave, "suppressed" as Koordinator does."""

    shares: int = 10
    is_idle: bool = False
    room: str = ""


@dataclass(frozen=True)
class Jobs:
    """Compilers as jobs of a scheduler, started by the agent's executor on what it says is free. ``task``: further keys
    of the task. ``cores``: ordered by each."""

    cores: float = 0.25
    task: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Arm:
    """``monitor``: keys of the agent's ``[monitor]``, None: no agent. ``is_percentile``: the benchmark writes limits.
    ``is_guarantee``: what is freed is in the agent's report alone, the servers' cgroups stay as they are."""

    about: str
    monitor: Mapping[str, object] | None = None
    batch: Batch | Jobs | None = None
    is_percentile: bool = False

    @property
    def is_guarantee(self) -> bool:
        return self.monitor is not None and self.monitor["actuator"] == "guarantee"


QUOTA: Final = {"actuator": "quota"}
PEAK: Final = {"actuator": "quota", "limit_rule": "peak", "early_restore": "off"}
GUARANTEE: Final = {"actuator": "guarantee", "limit_rule": "peak"}
EARLY_USE: Final = {"early_restore": "use"}
EARLY_ORDER: Final = {"early_restore": "ordered"}
ARMS: Final[Mapping[str, Arm]] = {
    BASE: Arm("no agent, no batch"),
    "document": Arm("agent, rule document, quota", QUOTA),
    "peak": Arm("agent, rule peak, quota", PEAK),
    "early-restore": Arm("agent, rule peak, quota, early restore to a little above the use", PEAK | EARLY_USE),
    "early-restore-sensitive": Arm("the same, to the whole order", PEAK | EARLY_ORDER),
    "vpa": Arm("90th percentile of use and 15 % more each minute, as a quota", is_percentile=True),
    PLAIN: Arm("no agent; batch at the lowest weight, no quota", batch=Batch()),
    "overcommit-idle": Arm("no agent; batch in a cgroup of the idle class, no quota", batch=Batch(is_idle=True)),
    "koordinator": Arm("no agent; batch gets 65 % of the CPU less the use of others", batch=Batch(room="suppressed")),
    "guarantee": Arm("agent, rule peak, guarantee; jobs of a scheduler", GUARANTEE, Jobs()),
    "guarantee-ceiling": Arm(
        "the same, each job with its order as a ceiling", GUARANTEE, Jobs(task={"set_container_cpu_limit": True})
    ),
    "guarantee-document": Arm(
        "agent, rule document, guarantee; jobs of a scheduler", GUARANTEE | {"limit_rule": "document"}, Jobs()
    ),
    "peak-batch": Arm("agent, rule peak, quota; batch at usual weight on what is free", PEAK, Batch(1024, room="free")),
    "peak-jobs": Arm("agent, rule peak, quota; jobs of a scheduler", PEAK, Jobs()),
    AGAIN: Arm("no agent, no batch: the noise"),
}  # fmt: skip
"""In the order of odd rounds; even rounds run them the other way round."""


def write_keys(keys: Mapping[str, object]) -> str:
    """Lines of TOML."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())


def explain_refusal(arm: Arm, hierarchy: str) -> str:
    """Why an arm cannot run on this machine with this cpumond; "" where it can."""
    is_idle = isinstance(arm.batch, Batch) and arm.batch.is_idle
    if is_idle and not os.path.exists(os.path.join(hierarchy, "cpu.idle")):
        probe = tempfile.mkdtemp(prefix="cpumond-idle-", dir=hierarchy)
        has_idle = os.path.exists(os.path.join(probe, "cpu.idle"))
        os.rmdir(probe)
        if not has_idle:
            return "this kernel has no cpu.idle"
    if arm.monitor is None:
        return ""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "cpumond.toml")
        path.write_text("[monitor]\n" + write_keys(arm.monitor))
        words = [sys.executable, "-m", "cpumond", "check-config", "--config", str(path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    said = done.stderr.strip().removeprefix("cpumond: ").replace(f"{path}: ", "")
    # A warning says that an option has no effect: the arm would not be what its name says.
    return f"this version of cpumond does not take its settings: {said}" if done.returncode or said else ""


class Work:
    """Batch work of an arm: compilers of its own, or the words of jobs; counts the files that either compiled."""

    def __init__(self, groups: Groups, idle: Groups, directory: Path) -> None:
        self.groups, self.idle = groups, idle
        self._counter = directory / "files"
        self._unit = directory / "unit.c"
        self._compiler = find_compiler()
        write_unit(self._unit)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._busy_s = self._used_s = 0.0

    def list_words(self, files: int) -> list[str]:
        return ["sh", "-c", COMPILE, "sh", self._compiler, str(self._unit), str(self._counter), str(files)]

    def start(self, batch: Batch) -> None:
        """One compiler for each CPU of the machine."""
        place = self.idle if batch.is_idle else self.groups
        place.make("batch")
        if not batch.is_idle:
            place.write("batch", "shares", batch.shares)
        place.set_quota("batch", None)
        for _ in range(len(os.sched_getaffinity(0))):
            command = place.command("batch", self.list_words(ENDLESS))
            self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True))
        self._busy_s, self._used_s = read_busy_s(), self.groups.read_used_s("batch")

    def govern(self, room: str, capacity: float, limits: Sequence[float], passed_s: float) -> None:
        """Set the quota of the batch; ``passed_s`` since the last time."""
        if room == "free":
            self.groups.set_quota("batch", compute_free(capacity, SYSTEM_CORES, limits))
        busy_s, used_s = read_busy_s(), self.groups.read_used_s("batch")
        if room == "suppressed" and passed_s > 0.0:
            others = max(busy_s - self._busy_s - (used_s - self._used_s), 0.0) / passed_s
            self.groups.set_quota("batch", compute_suppressed(capacity, 0.65, others))
        self._busy_s, self._used_s = busy_s, used_s

    def read_used_s(self) -> float:
        """CPU seconds of compilers and of jobs beside the servers."""
        return self.groups.read_used_s("batch") + self.groups.read_used_s(CLUSTER)

    def read_idle_s(self) -> float:
        """Of those in the idle class."""
        return self.idle.read_used_s("") + read_used_s(self.groups.hierarchies, find_idle_parent(self.groups))

    def count_files(self) -> int:
        return count_lines(self._counter)

    def check(self) -> None:
        """Raises UnavailableError when a compiler has ended."""
        for process in self._processes:
            if process.poll() is not None:
                raise UnavailableError(f"a compiler of the batch ended with {process.returncode}")

    def stop(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()


def find_idle_parent(groups: Groups) -> str:
    """The cgroup of jobs on reclaimed CPU, which the executor of ``Managed`` makes in the root of the hierarchy."""
    return name_idle_parent(f"{groups.top}/{CLUSTER}/node-1")


class Managed:
    """An agent over the servers, and a scheduler; both know from round to round what they learned."""

    def __init__(self, groups: Groups, directory: Path, monitor: Mapping[str, object], capacity: float) -> None:
        self.groups = groups
        self._has_pool = directory.exists()
        self._cluster = Cluster(
            directory, 1, cpu=capacity - SYSTEM_CORES, memory=2**31, user_slots=50, heartbeat_period="500ms",
            monitor={"mode": "reclaim", "min_cpu_limit": FLOOR_CORES, **monitor},
            cgroup_prefix=f"{groups.top}/{CLUSTER}", agent_config=SOURCES.format(top=groups.top),
            scheduler_config=SCHEDULER,
        )  # fmt: skip
        self._operation = ""

    def start(self, servers: int) -> None:
        """Start both and wait until the agent has found the servers."""
        self._cluster.__enter__()
        for process in (self._cluster.scheduler, *self._cluster.nodes):
            for each in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
                self.groups.enter("agent", each.pid)
        self._cluster.wait(lambda: len(self.read_guarantees()) == servers, "the agent follows all servers")

    def run(self, jobs: Jobs, words: Sequence[str]) -> None:
        """Start an operation of more jobs than there will be room for."""
        if not self._has_pool:
            self._cluster.create_pool(POOL)
            self._has_pool = True
        task = {"job_count": 5000, "cpu_limit": jobs.cores, "memory_limit": 2**27, "command": list(words), **jobs.task}
        spec = {"pool": POOL, "tasks": {"main": task}}
        self._operation = str(self._cluster.post("/api/v1/operations", {"spec": spec})["id"])

    def read_guarantees(self) -> dict[str, float]:
        """Name of the cgroup -> cores that the agent says the server has."""
        found = self._cluster.nodes[0].get("/v1/status")["jobs"]
        names = {os.path.basename(job["cgroup"]): job["current_cpu_limit"] for job in found}
        return {name: cores for name, cores in names.items() if name.startswith("server-")}

    def check(self) -> None:
        """Raises UnavailableError when one of them has ended."""
        self._cluster.check()

    def stop(self) -> None:
        """End the jobs, then both, with a word so that the agent puts down what it learned."""
        with contextlib.suppress(UnavailableError, TimeoutError, httpx2.HTTPError):
            if self._operation:
                self._cluster.post(f"/api/v1/operations/{self._operation}/abort", {})
                self._cluster.wait(lambda: not self._count_running(), "the jobs have ended", 30.0)
        for process in (*self._cluster.nodes, self._cluster.scheduler):
            if process.is_running:
                process.stop(timeout_s=20.0)
        self._cluster.close()

    def _count_running(self) -> int:
        return len(self._cluster.jobs(self._operation, "running"))


def describe(arms: Mapping[str, Arm]) -> str:
    """A line for each, for ``--help``."""
    return "\n".join(f"  {name:24} {arm.about}" for name, arm in arms.items())
