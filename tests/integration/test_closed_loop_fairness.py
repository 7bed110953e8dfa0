"""Three real agents, one real scheduler, real jobs: whether pools really get the CPU that the fair share promises."""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cpumond.cgroup import open_cgroup
from cpumond.cgroup.jobs import JobCgroupTree
from cpumond.cgroup.mounts import Hierarchies
from cpumond.errors import UnavailableError
from cpumond.fairshare import FairShareUpdater, Operation, Pool, Snapshot
from cpumond.fairshare.resources import CPU
from cpumond.testing import Cluster

SEED = 20
NODES = 3
NODE_CORES = 0.5
NODE_MEMORY = 2 * 2**30
NODE_SLOTS = 40
TOTAL = (float(NODES * NODE_SLOTS), NODES * NODE_CORES, 0.0, float(NODES * NODE_MEMORY), 0.0)
MEMORY = 32 * 2**20

WEIGHTS = {"double": 2.0, "single": 1.0, "sure": 1.0}
GUARANTEED_CORES = {"sure": 0.5}

RUN_S = 40.0
SAMPLE_S = 0.2
LULL_S = (16.0, 26.0)
"""In between, little is started in the pool with the guarantee."""
TOLERANCE = 0.10

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


def make_shapes(seed: int) -> list[Shape]:
    """100 operations of about 0.75 core-seconds each: 42 and 21 in the pools without, 37 in that with a guarantee."""
    rng = random.Random(seed)

    def make(pool: str, at_s: float, jobs: tuple[int, int] = (2, 8)) -> Shape:
        cpu_limit = rng.choice([0.05, 0.05, 0.1])
        return Shape(pool, max(at_s, 0.0), rng.randint(*jobs), cpu_limit, cpu_limit * rng.uniform(1.5, 3.0))

    shapes = [make(pool, rng.uniform(-40.0, 28.0)) for pool in ["double"] * 42 + ["single"] * 21]
    shapes += [make("sure", rng.uniform(-6.0, 3.0)) for _ in range(15)]
    shapes += [make("sure", rng.uniform(*LULL_S), jobs=(1, 1)) for _ in range(4)]
    shapes += [make("sure", LULL_S[1] + rng.uniform(-1.0, 1.0)) for _ in range(18)]
    rng.shuffle(shapes)
    return sorted(shapes, key=lambda shape: shape.at_s)


@dataclass
class Sample:
    """The cluster at one moment; amounts are cores by pool."""

    at_s: float
    demand: dict[str, float]
    """What the test started and is not done yet."""
    fair_share: dict[str, float]
    """What the library computes for that demand."""
    told_demand: dict[str, float]
    told_fair_share: dict[str, float]
    told_usage: dict[str, float]
    """The scheduler's own figures."""
    cpu_seconds: dict[str, float]
    """The kernel's counters, by job that lives."""


@dataclass
class Recorder:
    """Samples of a cluster, and what its jobs used, by the kernel's counters."""

    cluster: Cluster
    hierarchies: Hierarchies
    begin_s: float = field(default_factory=time.monotonic)
    operations: dict[str, Shape] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._updater = FairShareUpdater()
        self._previous_s: float | None = None
        self._cgroups = [JobCgroupTree(self.hierarchies, node.cgroup_root) for node in self.cluster.nodes]
        self.kernel_begin_s = self.read_total()

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
        """CPU seconds of the jobs that live."""
        found = {
            job_id: cgroups.read_totals(job_id).cpu_seconds
            for cgroups in self._cgroups
            for job_id in cgroups.list_job_ids()
        }
        return {job_id: used for job_id, used in found.items() if used is not None}

    def take_sample(self) -> None:
        """One look at everything."""
        pools = {pool["name"]: pool for pool in self.cluster.get("/api/v1/trees/default/pools")["pools"]}
        running = self.cluster.get("/api/v1/operations?state=running&limit=1000")["operations"]
        used = self.read_jobs()
        now_s = self.now_s()
        entries = []
        demand = dict.fromkeys(WEIGHTS, 0.0)
        for each in running:
            shape = self.operations[each["id"]]
            jobs = each["jobs"]["active"] + each["jobs"]["pending"]
            demand[shape.pool] += jobs * shape.cpu_limit
            entries.append(
                Operation(each["id"], shape.pool, demand=_scale(shape, jobs), usage=_scale(shape, each["jobs"]["active"]))
            )
        guaranteed = {name: (None, cores, None, None, None) for name, cores in GUARANTEED_CORES.items()}
        unset = (None, None, None, None, None)
        snapshot = Snapshot(
            TOTAL,
            tuple(
                Pool(name, weight=weight, strong_guarantee_resources=guaranteed.get(name, unset))
                for name, weight in WEIGHTS.items()
            ),
            tuple(entries),
        )
        result = self._updater.update(snapshot, now_s, self._previous_s)
        assert not result.errors
        self._previous_s = now_s
        shares = {name: result.elements[name].fair_share.total[CPU] * TOTAL[CPU] for name in WEIGHTS}
        told = {key: {name: pools[name][key]["cpu"] for name in WEIGHTS} for key in ("demand", "fair_share", "usage")}
        self.samples.append(
            Sample(now_s, demand, shares, told["demand"], told["fair_share"], told["usage"], used)
        )  # fmt: skip


def _scale(shape: Shape, jobs: int) -> tuple[float, float, float, float, float]:
    return (float(jobs), jobs * shape.cpu_limit, 0.0, float(jobs * MEMORY), 0.0)


def integrate(samples: Sequence[Sample], what: str, pool: str) -> float:
    """Core-seconds: each value holds from its sample to the next one."""
    return sum(
        (after.at_s - before.at_s) * getattr(before, what)[pool]
        for before, after in zip(samples, samples[1:], strict=False)
    )


class Measured:
    """What each pool really used between two samples: counters of living jobs, final figures of ended ones."""

    def __init__(self, recorder: Recorder) -> None:
        events = [event for node in recorder.cluster.nodes for event in node.log_events("job_ended")]
        self.finals = {event["job_id"]: float(event.get("cpu_seconds") or 0.0) for event in events}
        """As reported at the end of a job."""
        self.pools = {event["job_id"]: recorder.operations[event["operation_id"]].pool for event in events}
        self._samples = recorder.samples
        self._jobs = [
            job for operation_id in recorder.operations for job in recorder.cluster.jobs(operation_id, "completed")
        ]

    def given(self) -> float:
        """How much of their limits the jobs, which burn all they get, could really use, at most 1.

        Something less than 1 is what the machine did with its CPUs meanwhile.
        """
        ordered = sum(job["cpu_limit"] * (job["finish_time"] - job["start_time"]) for job in self._jobs)
        return min(sum(job["cpu_seconds"] for job in self._jobs) / ordered, 1.0)

    def used(self, number: int) -> dict[str, float]:
        """Core-seconds of each pool up to that sample."""
        used = dict.fromkeys(WEIGHTS, 0.0)
        living = self._samples[number].cpu_seconds
        seen = {job_id for sample in self._samples[: number + 1] for job_id in sample.cpu_seconds}
        for job_id in seen:
            used[self.pools[job_id]] += living.get(job_id, self.finals[job_id])
        return used

    def between(self, first: int, last: int) -> dict[str, float]:
        """Core-seconds of each pool between two samples."""
        before, after = self.used(first), self.used(last)
        return {name: after[name] - before[name] for name in WEIGHTS}


@pytest.fixture
def cluster(tmp_path: Path, hierarchies: Hierarchies) -> Iterator[Cluster]:
    """Three nodes of half a core each, which check their jobs often."""
    with Cluster(
        tmp_path, NODES, cpu=NODE_CORES, memory=NODE_MEMORY, user_slots=NODE_SLOTS, check_period="250ms",
    ) as running:  # fmt: skip
        # Else the jobs together would weigh as much as any one process beside them on this machine.
        weigh_up(hierarchies, running.cgroup_prefix)
        for name, weight in WEIGHTS.items():
            more = {"strong_guarantee_resources": {"cpu": GUARANTEED_CORES[name]}} if name in GUARANTEED_CORES else {}
            running.create_pool(
                name, weight=weight, max_running_operation_count=100, max_operation_count=200, **more
            )  # fmt: skip
        yield running
    assert running.leftover_cgroups() == []


def weigh_up(hierarchies: Hierarchies, prefix: str) -> None:
    file, value = ("cpu.weight", 10_000) if hierarchies.cpu_version == 2 else ("cpu.shares", 262_144)
    Path(hierarchies.cpu_root, prefix, file).write_text(str(value))


def run_all(recorder: Recorder, shapes: list[Shape], run_s: float) -> None:
    """Start each operation in its time, look at the cluster all the while, end what is left."""
    pause = threading.Event()
    waiting = list(shapes)
    next_sample_s = 0.0
    while (now_s := recorder.now_s()) < run_s:
        if waiting and waiting[0].at_s <= now_s:
            shape = waiting.pop(0)
            command = [sys.executable, "-I", "-S", "-c", BURN, f"{shape.cpu_seconds:.4f}"]
            operation_id = recorder.cluster.start_operation(
                shape.pool, command, shape.job_count, shape.cpu_limit, MEMORY
            )
            recorder.operations[operation_id] = shape
        elif now_s >= next_sample_s:
            next_sample_s = now_s + SAMPLE_S
            recorder.take_sample()
        else:
            pause.wait(min(next_sample_s, waiting[0].at_s if waiting else run_s) - now_s)
    recorder.take_sample()
    for operation in recorder.cluster.get("/api/v1/operations?state=running&limit=1000")["operations"]:
        with contextlib.suppress(UnavailableError):  # it was completed just now
            recorder.cluster.post(f"/api/v1/operations/{operation['id']}/abort")
    recorder.cluster.wait(lambda: not recorder.read_jobs(), "all jobs are over")


def show(title: str, samples: Sequence[Sample], used: dict[str, float], given: float) -> dict[str, float]:
    """Print what each pool should have had and had; the deviations."""
    deviations = {}
    print(f"{title}, {samples[-1].at_s - samples[0].at_s:.1f} s:")
    for name in WEIGHTS:
        sums = {what: integrate(samples, what, name) for what in ("demand", "fair_share", "told_fair_share", "told_usage")}
        deviations[name] = used[name] / (sums["fair_share"] * given) - 1.0
        print(
            f"  {name:7} fair share {sums['fair_share']:6.2f} core-s (scheduler's {sums['told_fair_share']:6.2f}), "
            f"held {sums['told_usage']:6.2f}, used {used[name]:6.2f}, {deviations[name]:+.1%}; "
            f"demand {sums['demand']:6.2f}"
        )
    return deviations


def test_pools_use_what_they_deserve(cluster: Cluster, hierarchies: Hierarchies) -> None:
    """Core-seconds of each pool, as the kernel counts them, against the integral of its fair share."""
    recorder = Recorder(cluster, hierarchies)
    shapes = make_shapes(SEED)
    assert len(shapes) == 100
    run_all(recorder, shapes, RUN_S)
    measured = Measured(recorder)
    samples = recorder.samples
    last = len(samples) - 1

    kernel_s, told_s = recorder.read_total() - recorder.kernel_begin_s, sum(measured.finals.values())
    given = measured.given()
    print(f"\nkernel {kernel_s:.2f} core-s, jobs at their end {told_s:.2f}; jobs could use {given:.1%} of their limits")

    lull = [n for n, sample in enumerate(samples) if sample.fair_share["sure"] < 0.8 * GUARANTEED_CORES["sure"]]
    lull = [n for n in lull if LULL_S[0] <= samples[n].at_s <= LULL_S[1]]
    first, end = lull[0], lull[-1]
    show("before the lull", samples[: first + 1], measured.between(0, first), given)
    show("in it", samples[first : end + 1], measured.between(first, end), given)
    show("after it", samples[end:], measured.between(end, last), given)
    deviations = show("the whole run", samples, measured.between(0, last), given)

    import json
    open("/tmp/h/x/samples.json","w").write(json.dumps([dict(at=s.at_s, d=s.demand, f=s.fair_share, td=s.told_demand, tf=s.told_fair_share, u=s.told_usage, m=measured.used(i)) for i,s in enumerate(samples)]))
    shutil.copytree(cluster.directory, "/tmp/h/x/run1", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock"))
    assert max(map(abs, deviations.values())) < TOLERANCE
