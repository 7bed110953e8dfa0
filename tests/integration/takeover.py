"""Two real schedulers on PostgreSQL, three agents and their jobs, through the loss of the leader again and again."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from cpumond.cluster import Cluster
from cpumond.cluster.processes import ClusterScheduler

LEASE_S = 3.0
JOBS = 20


class Pair:
    """The cluster, and what its jobs wrote: a line with its process id each time that one is started."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster = cluster
        self.starts_path = directory / "starts"
        self.starts_path.touch()
        self.starts_path.chmod(0o666)
        self.wanted = 0
        self.operations: list[str] = []

    def start_jobs(self, count: int) -> str:
        command = ["sh", "-c", f"echo $$ >> {self.starts_path}; exec sleep 100000"]
        operation = self.cluster.start_operation("p", command, count, cpu_limit=0.02)
        self.wanted += count
        self.operations.append(operation)
        return operation

    def wait_started(self) -> list[int]:
        self.cluster.wait(lambda: len(self.starts()) >= self.wanted, f"{self.wanted} jobs are started")
        return self.starts()

    def starts(self) -> list[int]:
        return [int(word) for word in self.starts_path.read_text(encoding="ascii").split()]

    def check(self, pids: list[int]) -> None:
        """The same processes run, none was started besides, and the leader counts none as lost."""
        assert self.starts() == pids
        for pid in pids:
            os.kill(pid, 0)
        totals = [self.cluster.get(f"/api/v1/operations/{each}")["jobs"] for each in self.operations]
        counts = {name: sum(each[name] for each in totals) for name in totals[0]}
        assert counts == {**dict.fromkeys(counts, 0), "total": self.wanted, "active": self.wanted}

    def leader(self) -> ClusterScheduler:
        found = self.cluster.wait(self.cluster.find_leader, "a scheduler leads")
        assert found is not None
        return found

    def standby(self) -> ClusterScheduler:
        leader = self.leader()
        return next(each for each in self.cluster.schedulers if each is not leader)

    def wait_led_by(self, scheduler: ClusterScheduler, began_s: float) -> float:
        """Until it has a heartbeat of every node; seconds since ``began_s``, of ``time.monotonic``."""

        first_s: list[float] = []

        def has_all() -> bool:
            if self.cluster.find_leader() is not scheduler:
                return False
            first_s.append(time.monotonic())
            nodes: list[dict[str, Any]] = self.cluster.get("/api/v1/nodes")["nodes"]
            # A node was heard after the take-over where it has been silent for less long than that is ago.
            heard = [node for node in nodes if node["silent_s"] < time.monotonic() - first_s[0]]
            return len(heard) == len(self.cluster.nodes)

        self.cluster.wait(has_all, "the other scheduler leads and hears every node", 60.0)
        return time.monotonic() - began_s


@contextmanager
def two_schedulers(directory: Path, jobs: int = JOBS) -> Iterator[Pair]:
    with Cluster(directory, 3, cpu=4.0, user_slots=100, schedulers=2, lease=f"{LEASE_S:g}s") as cluster:
        cluster.create_pool("p", max_running_operation_count=1000, max_operation_count=1000)
        pair = Pair(cluster, directory)
        pair.start_jobs(jobs)
        pair.wait_started()
        yield pair


def kill_the_leader(pair: Pair) -> float:
    """SIGKILL; the killed one comes back as a standby. Seconds until each node was heard."""
    pids = pair.wait_started()
    leader, other = pair.leader(), pair.standby()
    began_s = time.monotonic()
    leader.kill()
    took_s = pair.wait_led_by(other, began_s)
    pair.check(pids)
    pair.start_jobs(1)
    pids = pair.wait_started()
    leader.start()
    pair.check(pids)
    return took_s


def stop_the_leader(pair: Pair) -> tuple[float, float]:
    """SIGSTOP until the other one leads, then SIGCONT. Seconds until each node was heard, and until the first 503."""
    pids = pair.wait_started()
    leader, other = pair.leader(), pair.standby()
    began_s = time.monotonic()
    leader.pause()
    took_s = pair.wait_led_by(other, began_s)
    pair.start_jobs(1)
    started = pair.wait_started()
    assert started[: len(pids)] == pids
    began_s = time.monotonic()
    leader.resume()
    answered_s = 0.0
    with httpx2.Client(base_url=leader.url, timeout=10.0, trust_env=False) as client:
        # Everything that it answers from now on is a standby's.
        while time.monotonic() < began_s + 1.5:
            answer = client.get("/api/v1/status")
            assert answer.status_code == 503, answer.text
            assert "x-cpumond-term" not in answer.headers
            answered_s = answered_s or time.monotonic() - began_s
    pair.check(started)
    return took_s, answered_s
