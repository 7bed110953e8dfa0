"""Whether a job has a ceiling, and what moves: ``set_container_cpu_limit``, by ``yt`` (semantics.md 1.6, 1.10)."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from closed_loop import WAIT_S, WORKER, Loop
from configs import QUICK
from executor_contract import read_settings
from yt import yson

from cpumond.host.cgroup import open_cgroup
from cpumond.host.cgroup.mounts import Hierarchies
from cpumond.monitor.model import CpuReading

pytestmark = pytest.mark.cgroup

KEPT = "{enable_cpu_reclaim=%false}"
WINDOW_S = 0.5
SPIN = ("-S", "-c", "while True: pass")
PINNED = ("-S", "-c", f"import os\nos.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}])\nwhile True: pass")


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory, hierarchies: Hierarchies) -> Iterator[Loop]:
    """A node that offers more than its jobs order, so that all are ordinary; what is lowered grows by votes alone."""
    monitor = {name: float(text) if "." in text else int(text) for name, text in QUICK.items()}
    with Loop(
        tmp_path_factory.mktemp("loop"), hierarchies, cpu=9.0, memory=4 * 2**30,
        monitor={**monitor, "actuator": "quota", "use_restore_ratio": 0.0},
    ) as cluster:  # fmt: skip
        cluster.create_pool("p")
        cluster.create_pool("capped")
        assert cluster.yt("get", "//sys/pool_trees/default/@cpu_monitor_moves") == '"quota"', "what is not set"
        assert cluster.yt("exists", "//sys/pool_trees/default/@set_container_cpu_limit") == "false", "it has no default"
        cluster.yt("set", "//sys/pool_trees/default/capped/@set_container_cpu_limit", "%true")
        yield cluster
    assert cluster.leftovers() == []


def start(
    loop: Loop, started: list[str], pool: str, monitor: str, **tasks: tuple[float, tuple[str, ...], bool | None]
) -> dict[str, Any]:
    """A job of each task (ordered cores, Python's arguments, ``set_container_cpu_limit``), as ``list-jobs`` has it."""
    made: dict[str, Any] = {}
    for name, (cpu, words, ceiling) in tasks.items():
        made[name] = {"job_count": 1, "cpu_limit": cpu, "command": [sys.executable, *words]}
        made[name] |= {} if ceiling is None else {"set_container_cpu_limit": ceiling}
    spec = f"{{pool={pool};job_cpu_monitor={monitor}}}"
    operation = loop.yt("vanilla", "--async", "--tasks", yson.dumps(made).decode(), "--spec", spec)
    started.append(operation)
    loop.await_running(operation, len(tasks))
    jobs = json.loads(loop.yt("list-jobs", operation, "--format", "json"))["jobs"]
    return {job["task_name"]: job for job in jobs}


class Kernel:
    def __init__(self, loop: Loop, job: dict[str, Any]) -> None:
        self.loop, self.job = loop, job
        self._first = self._before = (time.monotonic(), self.used_s())

    def read(self) -> CpuReading:
        cgroup = open_cgroup(self.loop.hierarchies, self.job["cgroup"])
        assert cgroup is not None
        with contextlib.closing(cgroup):
            reading = cgroup.read(0.0)
        assert reading is not None
        return reading

    def used_s(self) -> float:
        return self.read().total_cpu_s

    def throttled(self) -> int:
        return self.read().nr_throttled

    def quota_cores(self) -> float:
        return self.loop.quota_cores(self.job["cgroup"])

    def weight_cores(self) -> float:
        is_v2 = self.loop.hierarchies.cpu_version == 2
        return read_settings(self.loop.hierarchies, self.job["cgroup"]).weight / (100 if is_v2 else 1024)

    def average_cores(self) -> float:
        """What it has used since this was made."""
        at, used_s = self._first
        return (self.used_s() - used_s) / (time.monotonic() - at)

    def has_used(self, cores: float) -> bool:
        """Whether it used so much on an average of the last half second that is over."""
        at, used_s = self._before
        now = time.monotonic()
        if now - at < WINDOW_S:
            return False
        self._before = (now, self.used_s())
        return (self._before[1] - used_s) / (now - at) > cores


def in_cores(cores: float) -> Any:
    """As a weight says it, in steps of a thousandth or a hundredth of a core."""
    return pytest.approx(cores, abs=0.006)


@contextlib.contextmanager
def first_in_line(loop: Loop) -> Iterator[None]:
    """The jobs get what they ask for meanwhile, whatever else runs on this machine."""
    loop.set_weight(100)
    yield
    loop.set_weight(8)


@pytest.fixture
def started(loop: Loop) -> Iterator[list[str]]:
    """The operations of a test, which are aborted at its end."""
    operations: list[str] = []
    yield operations
    for operation in operations:
        loop.abort(operation)
    loop.await_no_jobs()


def test_cpu_1_5_who_has_a_ceiling_is_held_back_and_who_has_none_is_not(loop, started):
    loop.yt("set", "//sys/pool_trees/default/@set_container_cpu_limit", "%false")
    jobs = start(loop, started, "p", KEPT, free=(0.1, SPIN, None), held=(0.1, SPIN, True))
    jobs |= start(loop, started, "capped", KEPT, of_pool=(0.1, SPIN, None), of_task=(0.1, SPIN, False))
    kernel = {name: Kernel(loop, job) for name, job in jobs.items()}
    ceilings = {"held", "of_pool"}
    held = json.loads(loop.yt("get-job", jobs["held"]["id"], jobs["held"]["operation_id"], "--format", "json"))
    assert [held[name] for name in ("cpu_limit", "current_cpu_limit", "set_container_cpu_limit")] == [0.1, 0.1, True]
    for name, job in jobs.items():
        assert job["set_container_cpu_limit"] is (name in ceilings), name
        assert kernel[name].quota_cores() == (0.1 if name in ceilings else math.inf), name
        assert kernel[name].weight_cores() == in_cores(0.1), name
    with first_in_line(loop):
        for name in jobs.keys() - ceilings:
            loop.wait(lambda name=name: kernel[name].has_used(0.2), f"{name} uses more than it ordered", WAIT_S)
            assert kernel[name].throttled() == 0
        for name in ceilings:
            loop.wait(lambda name=name: kernel[name].throttled() > 20, f"{name} is held back", WAIT_S)
            assert kernel[name].average_cores() < 0.12


def test_cpu_2_6_jobs_share_a_core_by_their_requests(loop, started):
    loop.yt("set", "//sys/pool_trees/default/@set_container_cpu_limit", "%false")
    jobs = start(loop, started, "p", KEPT, small=(0.2, PINNED, None), large=(0.6, PINNED, None))
    kernel = {name: Kernel(loop, job) for name, job in jobs.items()}
    with first_in_line(loop):
        first = {name: each.used_s() for name, each in kernel.items()}
        loop.wait(lambda: kernel["large"].used_s() > first["large"] + 1.0, "the two have shared a core", WAIT_S)
        small, large = (kernel[name].used_s() - first[name] for name in ("small", "large"))
    assert 2.5 < large / small < 3.5, "3 to 1, whatever else runs on that core"
    for name, job in jobs.items():
        assert (kernel[name].weight_cores(), kernel[name].quota_cores()) == (in_cores(job["cpu_limit"]), math.inf)


@pytest.mark.parametrize("ceiling", [False, True])
def test_cpu_3_4_a_weight_moves_and_who_wakes_up_runs_at_once(loop, started, tmp_path, ceiling):
    """False: there is no ceiling. True, in a tree whose ``cpu_monitor_moves`` is "weight": it stays as ordered."""
    loop.yt("set", "//sys/pool_trees/default/@set_container_cpu_limit", "%true" if ceiling else "%false")
    loop.yt("set", "//sys/pool_trees/default/@cpu_monitor_moves", "weight")
    wake = tmp_path / "wake"
    job = start(loop, started, "p", "{enable_cpu_reclaim=%true}", t=(1.0, ("-S", "-c", WORKER, str(wake)), None))["t"]
    kernel = Kernel(loop, job)
    quota = 1.0 if ceiling else math.inf
    assert (job["set_container_cpu_limit"], kernel.quota_cores()) == (ceiling, quota)
    loop.wait(lambda: kernel.weight_cores() < 0.3, "its weight is down", WAIT_S)
    assert kernel.quota_cores() == quota
    [shown] = json.loads(loop.yt("list-jobs", job["operation_id"], "--format", "json"))["jobs"]
    assert (shown["cpu_limit"], shown["current_cpu_limit"]) == (1.0, pytest.approx(kernel.weight_cores(), abs=0.2))
    wake.touch()
    with first_in_line(loop):
        loop.wait(lambda: kernel.has_used(0.3), "it uses more than its lowered limit", WAIT_S)
        loop.wait(lambda: kernel.weight_cores() == in_cores(1.0), "votes have given all of it back", WAIT_S)
    told = loop.nodes[0].log_events("limit_changed")
    grown = [each["reason"] for each in told if each["job_id"] == job["id"] and each["new_cores"] > each["old_cores"]]
    assert set(grown) == {"grow"}
    assert kernel.quota_cores() == quota
