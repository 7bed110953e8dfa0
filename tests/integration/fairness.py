"""Three real agents, one real scheduler, real jobs: what pools are due and what the kernel says they used."""

import contextlib
import itertools
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cpumond.cluster import Cluster
from cpumond.host.cgroup import open_cgroup
from cpumond.host.cgroup.job_tree import JobCgroupTree
from cpumond.host.cgroup.mounts import Hierarchies

NODES = 3
NODE_CORES = 0.4
NODE_MEMORY = 2 * 2**30
NODE_SLOTS = 40
MEMORY = 32 * 2**20

WEIGHTS = {"double": 2.0, "single": 1.0, "sure": 1.0}
GUARANTEED_CORES = {"sure": 0.4}

SAMPLE_S = 0.25
QUIET = 0.95

BURN = """
import sys, time
end = float(sys.argv[1])
while time.process_time() < end:
    sum(range(2000))
"""
"""Uses so many CPU seconds, as fast as it may."""


@dataclass(frozen=True)
class Shape:
    """One operation: when it is started, and its jobs, each of ``cpu_seconds`` of work."""

    pool: str
    at_s: float
    job_count: int
    cpu_limit: float
    cpu_seconds: float


def make_shape(rng: random.Random, pool: str, at_s: float = 0.0, jobs: tuple[int, int] = (4, 10)) -> Shape:
    """About 0.9 core-seconds.

    Few jobs have twice the size, but some of each pool: a place that is freed goes to a job that fits, whoever's it is.
    """
    cpu_limit = rng.choice([0.05] * 7 + [0.1])
    return Shape(pool, max(at_s, 0.0), rng.randint(*jobs), cpu_limit, cpu_limit * rng.uniform(1.5, 3.5))


@dataclass
class Sample:
    """The cluster at one moment; amounts are cores by pool."""

    at_s: float
    fair_share: dict[str, float]
    usage: dict[str, float]
    """The scheduler's own figures; that they follow from the demand is in ``tests/property``."""
    cpu_seconds: dict[str, float]
    """The kernel's counters, by job that lives."""


@dataclass
class Recorder:
    """Samples of a cluster, and what its jobs used, by the kernel's counters."""

    cluster: Cluster
    hierarchies: Hierarchies
    client: httpx2.Client
    begin_s: float = field(default_factory=time.monotonic)
    operations: dict[str, Shape] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cgroups = [JobCgroupTree(self.hierarchies, node.cgroup_root) for node in self.cluster.nodes]
        self.kernel_begin_s = self.read_total()

    def _get(self, path: str) -> Any:
        answer = self.client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def now_s(self) -> float:
        return time.monotonic() - self.begin_s

    def read_total(self) -> float:
        """CPU seconds of all jobs that there ever were, as the kernel counts them in the cgroup above them."""
        cgroup = open_cgroup(self.hierarchies, self.cluster.cgroup_prefix)
        assert cgroup is not None
        reading = cgroup.read(0.0)
        cgroup.close()
        assert reading is not None
        return reading.total_cpu_s

    def read_jobs(self) -> dict[str, float]:
        found = {
            job_id: cgroups.read_totals(job_id).cpu_seconds
            for cgroups in self._cgroups
            for job_id in cgroups.list_job_ids()
        }
        return {job_id: used for job_id, used in found.items() if used is not None}

    def start(self, shape: Shape) -> None:
        command = [sys.executable, "-I", "-S", "-c", BURN, f"{shape.cpu_seconds:.4f}"]
        operation_id = self.cluster.start_operation(shape.pool, command, shape.job_count, shape.cpu_limit, MEMORY)
        self.operations[operation_id] = shape

    def has_shares(self) -> bool:
        """Whether each pool has its fair share in jobs, up to one job."""
        pools = {pool["name"]: pool for pool in self._get("/api/v1/trees/default/pools")["pools"]}
        return all(
            pools[name]["fair_share"]["cpu"] >= 0.1
            and abs(pools[name]["usage"]["cpu"] - pools[name]["fair_share"]["cpu"]) < 0.11
            for name in WEIGHTS
        )

    def abort_all(self, pool: str = "") -> None:
        for each in self._get("/api/v1/operations?state=running&limit=1000")["operations"]:
            if pool in ("", self.operations[each["id"]].pool):
                answer = self.client.post(f"/api/v1/operations/{each['id']}/abort")
                # Refused when it was completed just now.
                assert answer.status_code in (200, 422), answer.text

    def take_sample(self) -> None:
        pools = {pool["name"]: pool for pool in self._get("/api/v1/trees/default/pools")["pools"]}
        told = {key: {name: pools[name][key]["cpu"] for name in WEIGHTS} for key in ("fair_share", "usage")}
        self.samples.append(Sample(self.now_s(), told["fair_share"], told["usage"], self.read_jobs()))


def integrate(samples: Sequence[Sample], what: str, pool: str) -> float:
    """Core-seconds: each value holds from its sample to the next one."""
    total = 0.0
    for before, after in itertools.pairwise(samples):
        total += (after.at_s - before.at_s) * getattr(before, what)[pool]
    return total


class Measured:
    """What each pool really used between two samples: counters of living jobs, final figures of ended ones."""

    def __init__(self, recorder: Recorder) -> None:
        ended = [event for node in recorder.cluster.nodes for event in node.log_events("job_ended")]
        events = [event for event in ended if event["operation_id"] in recorder.operations]
        self.finals = {event["job_id"]: float(event.get("cpu_seconds") or 0.0) for event in events}
        """As reported at the end of a job."""
        self.pools = {event["job_id"]: recorder.operations[event["operation_id"]].pool for event in events}
        self._samples = recorder.samples

    def used(self, number: int) -> dict[str, float]:
        used = dict.fromkeys(WEIGHTS, 0.0)
        living = self._samples[number].cpu_seconds
        seen = {job_id for sample in self._samples[: number + 1] for job_id in sample.cpu_seconds}
        for job_id in seen:
            used[self.pools[job_id]] += living.get(job_id, self.finals[job_id])
        return used

    def between(self, first: int, last: int) -> dict[str, float]:
        before, after = self.used(first), self.used(last)
        return {name: after[name] - before[name] for name in WEIGHTS}


@contextlib.contextmanager
def run_cluster(directory: Path, hierarchies: Hierarchies) -> Iterator[Cluster]:
    """Three nodes of half a core each, which check their jobs often."""
    with Cluster(
        directory, NODES, cpu=NODE_CORES, memory=NODE_MEMORY, user_slots=NODE_SLOTS, check_period="250ms",
    ) as running:  # fmt: skip
        # Else the jobs together would weigh as much as any one process beside them on this machine.
        weigh_up(hierarchies, running.cgroup_prefix)
        for name, weight in WEIGHTS.items():
            attributes: dict[str, Any] = {"weight": weight, "max_running_operation_count": 100}
            if name in GUARANTEED_CORES:
                attributes["strong_guarantee_resources"] = {"cpu": GUARANTEED_CORES[name]}
            running.create_pool(name, max_operation_count=200, **attributes)
        yield running
    assert running.leftovers() == []


def weigh_up(hierarchies: Hierarchies, prefix: str) -> None:
    file, value = ("cpu.weight", 10_000) if hierarchies.cpu_version == 2 else ("cpu.shares", 262_144)
    Path(hierarchies.cpu_root, prefix, file).write_text(str(value))


def run_all(recorder: Recorder, shapes: list[Shape], run_s: float, lull_s: float = float("inf")) -> None:
    """Start each in its time, counted from when the first have their shares, and end what is left.

    At ``lull_s`` all that the pool with the guarantee has is ended.
    """
    for shape in shapes:
        if shape.at_s == 0.0:
            recorder.start(shape)
    recorder.cluster.wait(recorder.has_shares, "each pool has its share")
    recorder.begin_s = time.monotonic()
    shapes = [shape for shape in shapes if shape.at_s > 0.0]
    pause = threading.Event()
    waiting = list(shapes)
    next_sample_s, lulled = 0.0, False
    while (now_s := recorder.now_s()) < run_s:
        if now_s >= next_sample_s:
            next_sample_s = now_s + SAMPLE_S
            recorder.take_sample()
        elif now_s >= lull_s and not lulled:
            lulled = True
            recorder.abort_all("sure")
        elif waiting and waiting[0].at_s <= now_s:
            shape = waiting.pop(0)
            recorder.start(shape)
        else:
            pause.wait(min(next_sample_s, waiting[0].at_s if waiting else run_s) - now_s)
    recorder.take_sample()
    recorder.abort_all()
    recorder.cluster.wait(lambda: not recorder.read_jobs(), "all jobs are over")


def show(title: str, samples: Sequence[Sample], used: dict[str, float]) -> tuple[dict[str, float], float]:
    """Print what each pool should have had and had; the deviations, and ``given``: how much of it jobs could use.

    Others use the machine, and jobs take time to start and to end: deviations are from the share of what was given.
    """
    sums = {name: {each: integrate(samples, each, name) for each in ("fair_share", "usage")} for name in WEIGHTS}
    given = sum(used.values()) / sum(each["usage"] for each in sums.values())
    print(f"{title}, {samples[-1].at_s - samples[0].at_s:.1f} s; jobs used {given:.1%} of what they held:")
    deviations = {}
    for name, each in sums.items():
        fair = each["fair_share"]
        deviations[name] = used[name] / (fair * given) - 1.0
        print(
            f"  {name:7} fair share {fair:6.2f} core-s, held {each['usage']:6.2f}, used {used[name]:6.2f} = "
            f"{used[name] / fair - 1.0:+.1%}, of what was given {deviations[name]:+.1%}"
        )
    return deviations, given


def check_ends(recorder: Recorder, measured: Measured) -> None:
    """What is reported at the end of each job is what the kernel counted in the cgroup above them all."""
    kernel_s, told_s = recorder.read_total() - recorder.kernel_begin_s, sum(measured.finals.values())
    print(f"\nkernel {kernel_s:.2f} core-s, {len(measured.finals)} jobs at their end {told_s:.2f}")
    assert told_s == pytest.approx(kernel_s, rel=0.01)
    assert all(
        cpu_s <= measured.finals[job_id] + 1e-6
        for each in recorder.samples
        for job_id, cpu_s in each.cpu_seconds.items()
    )


def check_whole_run(recorder: Recorder, measured: Measured, tolerance: float) -> float:
    """Each pool has used what it deserved; up to what tolerance, which is more where the machine was busy."""
    samples = recorder.samples
    deviations, given = show("the whole run", samples, measured.between(0, len(samples) - 1))
    # What keeps jobs from their CPU makes them late, too, and pools that start many of them have more of that.
    widened = tolerance + 0.5 * max(QUIET - given, 0.0)
    assert max(map(abs, deviations.values())) < widened
    if given > QUIET:
        # Nothing else took the CPUs of this machine meanwhile: then it is the fair shares themselves.
        assert all(abs((1.0 + each) * given - 1.0) < tolerance for each in deviations.values())
    return widened
