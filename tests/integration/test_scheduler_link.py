"""The agent's link to the scheduler against a real ``cpumond scheduler``."""

from __future__ import annotations

import itertools
import queue
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import structlog
from scheduler_process import GIB, PlayedNode, SchedulerProcess
from waiting import wait_until

from cpumond.agent.config import SchedulerLink as LinkOptions
from cpumond.agent.report.scheduler import SchedulerLink
from cpumond.core.wire import (
    Heartbeat,
    HeartbeatAnswer,
    JobLog,
    JobReply,
    JobReport,
    JobRequest,
    LogRequest,
    NodeRegistration,
    NodeResources,
)
from cpumond.testing.ports import held

TOKEN = "3f2a-of-the-node"  # noqa: S105 - of a scheduler of our own
LONG_S = 100.0


class LinkedNode:
    """A node that has the jobs it is told to start, as long as it is told nothing else."""

    _numbers = itertools.count(1)

    def __init__(self, options: LinkOptions, node_id: str = "node-1", **resources: Any) -> None:
        self.id = node_id
        self.incarnation = f"run-{next(self._numbers)}"
        self.sequence = 0
        self.read = 0
        self.jobs: dict[str, JobReport] = {}
        self.answers: queue.Queue[tuple[HeartbeatAnswer, float]] = queue.Queue()
        self.link = SchedulerLink(
            options, self.registration(**resources), self.take, self.read_log, self.carry_out, random.Random(1)
        )

    def registration(self, cpu: float = 8.0, **more: Any) -> NodeRegistration:
        return NodeRegistration(self.id, self.incarnation, NodeResources(cpu=cpu, memory=64 * GIB), **more)

    def take(self, answer: HeartbeatAnswer, sent_at_s: float) -> None:
        for order in answer.start:
            report = JobReport(
                order.job_id, order.operation_id, order.cpu_limit, order.cpu_limit, from_scheduler=True, task=order.task
            )
            self.jobs.setdefault(order.job_id, report)
        self.answers.put((answer, sent_at_s))

    def read_log(self, request: LogRequest) -> JobLog:
        self.read += 1
        return JobLog(self.id, request.request_id, b"hello", 5)

    def carry_out(self, request: JobRequest, timeout_s: float) -> JobReply:
        return JobReply(self.id, request.request_id, {"job_id": request.job_id})

    def submit(self) -> None:
        self.sequence += 1
        jobs = list(self.jobs.values())
        self.link.submit(Heartbeat(self.id, self.incarnation, self.sequence, time.time(), 8.0, jobs))

    def beat(self) -> HeartbeatAnswer:
        self.submit()
        return self.answers.get(timeout=LONG_S)[0]

    def beat_until_it_has(self, count: int) -> None:
        def has_jobs() -> bool:
            self.beat()
            return len(self.jobs) >= count

        wait_until(has_jobs, f"{count} jobs on the node")


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


@contextmanager
def linked(scheduler: SchedulerProcess, node_id: str = "node-1", **options: Any) -> Iterator[LinkedNode]:
    options = {"url": scheduler.url, "timeout_s": LONG_S, "retry_max_s": 0.3, **options}
    node = LinkedNode(LinkOptions(**options), node_id)
    try:
        yield node
    finally:
        node.link.close(LONG_S)


def events(logs: list[Any]) -> list[str]:
    return [line["event"] for line in logs]


def test_a_node_registers_and_gets_its_orders(scheduler: SchedulerProcess, logs: list[Any]):
    scheduler.start()
    scheduler.create_pool("a")
    operation = scheduler.start_operation("a", job_count=2)
    with linked(scheduler) as node:
        node.beat_until_it_has(2)
        assert node.link.registered is not None
        assert node.link.registered.tree == "default"
        node.beat()
        assert {job["id"] for job in scheduler.get(f"operations/{operation}/jobs")["jobs"]} == set(node.jobs)
        node.link.register(node.registration(cpu=4.0))
        node.beat()
        assert scheduler.get("nodes/node-1")["capacity"]["cpu"] == 4.0
    stats = node.link.stats()
    assert (stats.failed_total, stats.dropped_total, stats.last_error) == (0, 0, "")
    assert stats.sent_total == node.sequence
    assert events(logs) == ["node_registered"] * 2


def test_a_scheduler_that_lost_its_store_gets_the_node_at_once(scheduler: SchedulerProcess, logs: list[Any]):
    scheduler.start()
    with linked(scheduler) as node:
        node.beat()
        scheduler.kill()
        for file in scheduler.state_dir.iterdir():
            file.unlink()
        with held(scheduler.address):
            scheduler.write_config(listen=scheduler.address)
            scheduler.start()
        node.beat()
        assert scheduler.get("nodes/node-1")["id"] == "node-1"
    registered = [line for line in logs if line["event"] == "node_registered"]
    assert [line["reason"] for line in registered] == ["", "node node-1 is not registered"]


def test_a_later_agent_of_the_node_is_named(scheduler: SchedulerProcess, logs: list[Any]):
    scheduler.start()
    with linked(scheduler) as node:
        node.beat()
        later = PlayedNode(scheduler, "node-1")
        later.register()
        node.submit()
        wait_until(lambda: node.link.stats().failed_total >= 2, "two failures")
        error = node.link.stats().last_error
        assert f"was replaced by the later run {later.incarnation}" in error
        assert node.link.registered is None
        assert later.send().status_code == 200
    assert events(logs) == ["node_registered", "link_failed"]
    assert logs[1]["error"] == error


def test_an_agent_that_starts_with_tags_of_two_trees_keeps_its_jobs(scheduler: SchedulerProcess, logs: list[Any]):
    scheduler.start()
    scheduler.post("trees", {"name": "gpu", "attributes": {"nodes_filter": "gpu"}})
    operation = scheduler.start_operation("p", job_count=2)
    with linked(scheduler) as node:
        node.beat_until_it_has(2)
        jobs = dict(node.jobs)
    logs.clear()
    scheduler.start_operation("p", job_count=2)
    with linked(scheduler) as node:
        node.jobs.update(jobs)
        node.link.register(node.registration(tags=["gpu"]))
        for _ in range(4):
            answer = node.beat()
            assert (answer.accepted, answer.start, answer.stop) == (True, [], [])
        assert "Node belongs to more than one pool tree" in node.link.stats().last_error
        assert node.link.registered is None
        assert [job["state"] for job in scheduler.get(f"operations/{operation}/jobs")["jobs"]] == ["running"] * 2
        assert "node_in_several_trees" in [alert["code"] for alert in scheduler.get("alerts")["alerts"]]
        node.link.register(node.registration())
        node.beat_until_it_has(4)
        assert node.link.stats().last_error == ""
    assert events(logs) == ["registration_refused", "node_registered"]
