"""The events of ``cpumond demo``, observed from outside: facts of the scheduler, the agent and the kernel, in words.

Quotas and CPU time come from the cgroups' files, guarantees and usage from the agent's control socket, starts from its
log; ends and their reasons, pools, the node and heartbeats from the scheduler."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import msgspec

from cpumond.cli.demo.jobs import WEIGHTS, WORDS, DemoPlan, Lever, Load
from cpumond.cluster import Cluster, ClusterNode
from cpumond.core.errors import CpumondError, UnavailableError
from cpumond.core.measures import count_cores, format_cores
from cpumond.host.cgroup import Cgroup, open_cgroup
from cpumond.host.cgroup.mounts import Hierarchies

TELL_RATIO = 0.7
"""A falling limit is shown again once it is below this fraction of the limit that was shown last."""
NEAR = 0.01
ASK_S = 0.1
"""Seconds between two requests to the agent about guarantees."""
USE_S, FULL = 0.2, 0.85
"""The simulation counts as using its whole request once it has used the fraction ``FULL`` of it for ``USE_S`` seconds,
because its threads sleep now and then."""
QUIET = ("frames",)
"""Loads whose normal ends are not shown, because there are many."""


class JobFacts(msgspec.Struct):
    """One job: cores, core-seconds, times since 1970; ``state`` as the scheduler reports it."""

    id: str
    name: str
    load: Load
    pool: str
    cgroup: str
    ordered: float
    started_at: float
    since_heartbeat_s: float
    limit: float
    usage: float | None = None
    used_cpu_s: float = 0.0
    reclaimed_cpu_s: float = 0.0
    state: str = "running"
    reason: str = ""
    kind: str = ""
    ended_at: float | None = None
    on_freed_cpu: bool = False

    @property
    def lives(self) -> bool:
        return self.ended_at is None


class Wakeup(msgspec.Struct):
    """When the simulation woke up, when its full limit was in force, and when it began to use its whole request (None:
    not yet); seconds since the start."""

    began_s: float
    back_s: float | None = None
    ran_s: float | None = None


class PoolFacts(msgspec.Struct):
    """A pool: its fair share now in cores, and over time in core-seconds."""

    weight: float
    fair_share: float = 0.0
    fair_share_cpu_s: float = 0.0


Report = Callable[[float, str], None]


class Story:
    """Polls the state of everything; ``tell`` gets each event: seconds since the start, and a text."""

    def __init__(
        self, cluster: Cluster, hierarchies: Hierarchies, plan: DemoPlan, report: Report, actuator: Lever = "quota"
    ) -> None:
        self.cluster = cluster
        self.actuator = actuator
        self.words = WORDS[actuator]
        self.node: ClusterNode = cluster.nodes[0]
        self.plan = plan
        self.jobs: dict[str, JobFacts] = {}
        self.wakeups: list[Wakeup] = []
        self.pools = {name: PoolFacts(weight) for name, weight in WEIGHTS.items()}
        self.heartbeats = 0
        self.overcommits = 0
        self._hierarchies = hierarchies
        self.operations: dict[str, Load] = {}
        self._report = report
        self._log_offset = 0
        self._counts: dict[str, int] = {}
        self._told_limit = plan.operations["simulation"].cpu_limit
        self._is_over = False
        self._counted_s: float | None = None
        self._told_ends: set[str] = set()
        self._asked_s = -ASK_S
        self._ran: deque[tuple[float, float]] = deque()
        """Recent CPU time of the simulation: seconds since the start, core-seconds."""

    def look_closely(self, now_s: float) -> None:
        """Read starts of jobs, and the simulation's limit; this is cheap enough for a call every few milliseconds."""
        self._read_starts(now_s)
        job = self.living("simulation")
        if job is not None:
            if self.actuator == "quota":
                self._read_quota(job)
            elif now_s - self._asked_s >= ASK_S:
                self._asked_s = now_s
                self._read_guarantees()
            self._follow_limit(job, now_s)
            self._follow_use(job, now_s)

    def look_around(self, now_s: float) -> None:
        """Read what ``look_closely`` omits, a few times a second. Raises UnavailableError if a process has ended."""
        self.cluster.check()
        for operation_id in self.operations:
            self._take_ends(operation_id, now_s)
        self._read_usage()
        self._read_limits()
        for job in self.jobs.values():
            if job.lives:
                self._read_counters(job)
        self._take_node(now_s)
        self._take_pools(now_s)

    def read_quotas(self) -> None:
        for job in self.jobs.values():
            if job.lives:
                self._read_quota(job)

    def _read_limits(self) -> None:
        if self.actuator == "quota":
            self.read_quotas()
        else:
            self._read_guarantees()

    def _read_guarantees(self) -> None:
        for job, seen in self._list_seen():
            job.limit = seen["current_cpu_limit"]

    def _list_seen(self) -> list[tuple[JobFacts, dict[str, Any]]]:
        """The live jobs, each with the agent's figures; none if the agent does not answer."""
        try:
            seen = self.node.get("/v1/status")["jobs"]
        except UnavailableError:
            return []
        known = ((self.jobs.get(each["job_id"]), each) for each in seen)
        return [(job, each) for job, each in known if job is not None and job.lives]

    def living(self, load: Load) -> JobFacts | None:
        """The first job of a load that still has its cgroup."""
        return next((job for job in self.jobs.values() if job.load == load and job.lives), None)

    @property
    def limits(self) -> float:
        """The sum of the limits of the node's jobs, cores."""
        return sum(job.limit for job in self.jobs.values() if job.lives)

    def wake(self, now_s: float) -> None:
        self.wakeups.append(Wakeup(now_s))
        self._report(now_s, "simulation wakes up and wants its whole request")

    def sleep(self, now_s: float) -> None:
        self._report(now_s, "simulation goes to sleep")

    def _read_starts(self, now_s: float) -> None:
        with open(self.node.log_path, "rb") as file:
            file.seek(self._log_offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._log_offset += len(whole)
        for line in whole.splitlines():
            if b'"job_started"' in line:
                self._take_start(json.loads(line), now_s)

    def _take_start(self, record: dict[str, Any], now_s: float) -> None:
        load = self.operations.get(record["operation_id"])
        if load is None or record["job_id"] in self.jobs:
            return
        number = self._counts[load] = self._counts.get(load, 0) + 1
        name = load if load == "simulation" and number == 1 else f"{load}-{number}"
        self._read_limits()
        before = self.limits
        job = self.jobs[record["job_id"]] = JobFacts(
            record["job_id"], name, load, record["pool"], record["cgroup"], record["cpu_limit_cores"],
            datetime.fromisoformat(record["timestamp"]).timestamp(), record["since_heartbeat_s"],
            record["cpu_limit_cores"],
        )  # fmt: skip
        if self.actuator == "quota":
            self._read_quota(job)
        simulation = self.living("simulation")
        lowered = simulation is not None and simulation is not job and simulation.limit < simulation.ordered - NEAR
        job.on_freed_cpu = lowered and before + job.ordered <= self.plan.capacity + NEAR
        freed = " on the freed CPU" if job.on_freed_cpu else ""
        self._report(now_s, f"{name} started{freed}, {job.since_heartbeat_s * 1e3:.0f} ms after the heartbeat")

    def _read_quota(self, job: JobFacts) -> None:
        """Read the quota of a job, 0 once the cgroup is gone. A failed read is repeated, unless the scheduler reports
        the end of the job."""
        with contextlib.suppress(CpumondError), self._open(job) as cgroup:
            settings = None if cgroup is None else cgroup.read_settings()
            job.limit = 0.0 if settings is None else min(settings.cores, job.ordered)

    def _read_counters(self, job: JobFacts) -> None:
        with contextlib.suppress(CpumondError), self._open(job) as cgroup:
            reading = None if cgroup is None else cgroup.read(0.0)
            job.used_cpu_s = job.used_cpu_s if reading is None else reading.total_cpu_s

    @contextlib.contextmanager
    def _open(self, job: JobFacts) -> Iterator[Cgroup | None]:
        """The job's cgroup; None where there is none. Raises CgroupReadError."""
        cgroup = open_cgroup(self._hierarchies, job.cgroup)
        with contextlib.nullcontext() if cgroup is None else contextlib.closing(cgroup):
            yield cgroup

    def _follow_limit(self, job: JobFacts, now_s: float) -> None:
        is_full = job.limit >= job.ordered * (1.0 - NEAR)
        is_lower = job.limit <= self._told_limit * TELL_RATIO + NEAR
        if is_full or is_lower:
            self._told_limit = job.limit
        wakeup = self.wakeups[-1] if self.wakeups else None
        if wakeup is not None and wakeup.back_s is None and is_full:
            wakeup.back_s = now_s
            took_s = now_s - wakeup.began_s
            self._report(now_s, f"simulation has {self.words.whole} back, {took_s:.1f} s after it woke up")
        elif is_lower and not is_full:
            free = self.plan.capacity - self.limits
            are_free = f"{_format(free)} are free" if free > NEAR else "none are free"
            limit = f"{_format(job.limit)} of {count_rounded(job.ordered)}"
            self._report(now_s, f"simulation's {self.words.noun} was lowered to {limit}, {are_free}")

    def _follow_use(self, job: JobFacts, now_s: float) -> None:
        """Note when the woken simulation began to use its whole request."""
        wakeup = self.wakeups[-1] if self.wakeups else None
        if wakeup is None or wakeup.ran_s is not None:
            self._ran.clear()
            return
        self._read_counters(job)
        self._ran.append((now_s, job.used_cpu_s))
        while now_s - self._ran[0][0] > USE_S:
            began_s, before_cpu_s = self._ran.popleft()
            if began_s >= wakeup.began_s and job.used_cpu_s - before_cpu_s >= FULL * job.ordered * (now_s - began_s):
                wakeup.ran_s = began_s
                took_s = began_s - wakeup.began_s
                self._report(now_s, f"simulation uses its whole request, {took_s:.2f} s after it woke up")
                return

    def _read_usage(self) -> None:
        for job, seen in self._list_seen():
            job.usage = seen["usage"]
            # The job may have ended since then.
            with contextlib.suppress(UnavailableError):
                job.reclaimed_cpu_s = self.node.get(f"/v1/jobs/{job.id}/explain")["aggregated"]["preempted_cpu_s"]

    def _take_ends(self, operation_id: str, now_s: float) -> None:
        for seen in self.cluster.get(f"/api/v1/operations/{operation_id}/jobs?limit=20")["jobs"]:
            job = self.jobs.get(seen["id"])
            if job is None or not job.lives or seen["state"] == job.state:
                continue
            job.state, job.reason = seen["state"], seen["reason"]
            if seen["preemption"] is not None:
                job.kind, job.reason = seen["preemption"]["kind"], seen["preemption"]["why"]
            if seen["finish_time"] is not None:
                job.ended_at, job.limit, job.usage = seen["finish_time"], 0.0, None
                job.used_cpu_s = job.used_cpu_s if seen["cpu_seconds"] is None else seen["cpu_seconds"]
            if job.state not in ("starting", "running") and job.id not in self._told_ends:
                self._told_ends.add(job.id)
                self._report_end(job, now_s)

    def _report_end(self, job: JobFacts, now_s: float) -> None:
        if job.kind:
            self._report(now_s, f"{job.name} stopped: {job.reason}")
        elif job.load not in QUIET or job.state not in ("stopping", "completed"):
            self._report(now_s, f"{job.name} {job.state}{f': {job.reason}' if job.reason else ''}")

    def _take_node(self, now_s: float) -> None:
        node = self.cluster.get(f"/api/v1/nodes/{self.node.node_id}")
        capacity, free = node["capacity"]["cpu"], node["free"]["cpu"]
        is_over = free < -NEAR
        if is_over != self._is_over:
            self._is_over = is_over
            self.overcommits += is_over
            state = "is overcommitted" if is_over else "fits again"
            self._report(now_s, f"the node {state}: {_format(capacity - free)} of {count_rounded(capacity)}")

    def _take_pools(self, now_s: float) -> None:
        passed_s = 0.0 if self._counted_s is None else now_s - self._counted_s
        self._counted_s = now_s
        for seen in self.cluster.get("/api/v1/trees/default/pools")["pools"]:
            pool = self.pools.get(seen["name"])
            if pool is not None:
                pool.fair_share_cpu_s += pool.fair_share * passed_s
                pool.fair_share = seen["fair_share"]["cpu"]
        self.heartbeats = self.cluster.get("/api/v1/status")["requests"].get("heartbeat", {}).get("count", 0)


def count_rounded(cores: float) -> str:
    return count_cores(round(cores, 2))


def _format(cores: float) -> str:
    return format_cores(round(cores, 2))
