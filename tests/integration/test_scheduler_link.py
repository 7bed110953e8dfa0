"""The agent's link to the scheduler against a real ``cpumond scheduler``."""

from __future__ import annotations

import hashlib
import itertools
import os
import queue
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from scheduler_process import GIB, PlayedNode, SchedulerProcess
from waiting import wait_until

from cpumond.config import SchedulerLink as LinkOptions
from cpumond.reporters.scheduler import SchedulerLink
from cpumond.wire import (
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


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[SchedulerProcess]:
    """Started by the test."""
    process = SchedulerProcess(tmp_path)
    yield process
    process.close()


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


def test_a_log_gets_to_who_asked_for_it(scheduler: SchedulerProcess):
    scheduler.start()
    scheduler.create_pool("a")
    operation = scheduler.start_operation("a")
    with linked(scheduler) as node, ThreadPoolExecutor(1) as reader:
        node.beat_until_it_has(1)
        node.beat()
        path = f"operations/{operation}/jobs/{next(iter(node.jobs))}/log"
        asked = reader.submit(scheduler.request, "GET", path)

        def beat_until_read() -> bool:
            node.beat()
            return asked.done()

        wait_until(beat_until_read, "the log")
        assert asked.result().status_code == 200, asked.result().text
        assert asked.result().text == "hello"
        assert node.read == 1
    assert node.link.stats().failed_total == 0


def test_a_killed_scheduler_that_comes_back_goes_on_with_the_node(scheduler: SchedulerProcess, logs: list[Any]):
    scheduler.start()
    scheduler.create_pool("a")
    operation = scheduler.start_operation("a", job_count=2)
    with linked(scheduler) as node:
        node.beat_until_it_has(2)
        scheduler.kill()
        node.submit()
        wait_until(lambda: node.link.stats().failed_total > 0, "a failure")
        for _ in range(20):
            node.submit()
        assert node.answers.empty()
        scheduler.write_config(listen=scheduler.address)
        scheduler.start()
        answer, sent_at_s = node.answers.get(timeout=LONG_S)
        assert answer.accepted
        assert sent_at_s <= time.monotonic()
        before = set(node.jobs)
        node.beat()
        assert set(node.jobs) == before
        running = [job for job in scheduler.get(f"operations/{operation}/jobs")["jobs"] if job["state"] == "running"]
        assert {job["id"] for job in running} == before
    assert events(logs)[0] == "node_registered"
    assert "link_recovered" in events(logs)
    assert node.link.stats().last_error == ""


def test_a_scheduler_that_stood_still_goes_on_with_the_node(scheduler: SchedulerProcess, logs: list[Any]):
    scheduler.start()
    with linked(scheduler, timeout_s=3.0) as node:
        node.beat()
        os.kill(scheduler.pid, signal.SIGSTOP)
        try:
            node.submit()
            wait_until(lambda: node.link.stats().failed_total >= 2, "two failures")
            assert node.link.stats().last_error == f"{scheduler.url}/: no answer within 3 s"
        finally:
            os.kill(scheduler.pid, signal.SIGCONT)
        sent = node.link.stats().sent_total

        def is_taken() -> bool:
            node.submit()
            return node.link.stats().sent_total > sent

        wait_until(is_taken, "a heartbeat")
    assert node.link.stats().last_error == ""
    assert "link_recovered" in events(logs)
    answers = [node.answers.get_nowait() for _ in range(node.answers.qsize())]
    assert len(answers) == node.link.stats().sent_total - 1, "one was taken by the test"
    assert [sent_at_s for _, sent_at_s in answers] == sorted(sent_at_s for _, sent_at_s in answers)


def test_a_scheduler_that_lost_its_store_gets_the_node_at_once(scheduler: SchedulerProcess, logs: list[Any]):
    scheduler.start()
    with linked(scheduler) as node:
        node.beat()
        scheduler.kill()
        for file in scheduler.state_dir.iterdir():
            file.unlink()
        scheduler.write_config(listen=scheduler.address)
        scheduler.start()
        node.beat()
        assert scheduler.get("nodes/node-1")["id"] == "node-1"
    registered = [line for line in logs if line["event"] == "node_registered"]
    assert [line["reason"] for line in registered] == ["", "node node-1 is not registered"]


def test_a_later_agent_with_the_same_node_id_is_told_in_the_schedulers_words(
    scheduler: SchedulerProcess, logs: list[Any]
):
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


def test_a_wrong_token_that_is_mended(scheduler: SchedulerProcess, logs: list[Any], tmp_path: Path):
    tokens, token_file = tmp_path / "tokens", tmp_path / "token"
    tokens.write_text(f"agent:{hashlib.sha256(TOKEN.encode()).hexdigest()}:node:node-*\n")
    tokens.chmod(0o600)
    scheduler.write_config(api=f'tokens_file = "{tokens}"')
    scheduler.start()
    token_file.write_text("nobody-has-this\n")
    token_file.chmod(0o600)
    with linked(scheduler, token_file=str(token_file)) as node:
        node.submit()
        wait_until(lambda: node.link.stats().failed_total >= 2, "two failures")
        assert node.link.registered is None
        # At once: a file without a token would be one more reason.
        mended = tmp_path / "mended"
        mended.touch(mode=0o600)
        mended.write_text(TOKEN + "\n")
        mended.replace(token_file)
        assert node.answers.get(timeout=LONG_S)[0].accepted
    assert events(logs) == ["link_failed", "node_registered", "link_recovered"]
    assert logs[0]["error"] == (
        f"{scheduler.url}/api/v1/nodes: answered 401: Authentication failed: the token is not known; check "
        "scheduler.token and scheduler.token_file"
    )
    assert "nobody-has-this" not in repr(logs)
    assert TOKEN not in repr(logs)


def test_tags_that_fit_two_trees_are_told_in_the_schedulers_words(scheduler: SchedulerProcess, logs: list[Any]):
    scheduler.start()
    scheduler.post("trees", {"name": "gpu", "attributes": {"nodes_filter": "gpu"}})
    with linked(scheduler) as node:
        node.beat()
        node.link.register(node.registration(tags=["gpu"]))
        for _ in range(3):
            node.beat()
        error = node.link.stats().last_error
        assert "Node belongs to more than one pool tree" in error
        assert [line["error"] for line in logs if line["event"] == "registration_refused"] == [error]
        assert scheduler.get("nodes/node-1")["is_online"]
        node.link.register(node.registration(cpu=4.0))
        node.beat()
        assert node.link.stats().last_error == ""
        assert scheduler.get("nodes/node-1")["capacity"]["cpu"] == 4.0


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


def test_an_agent_that_is_not_known_and_fits_two_trees_is_told_and_tries_again(
    scheduler: SchedulerProcess, logs: list[Any]
):
    scheduler.start()
    scheduler.post("trees", {"name": "gpu", "attributes": {"nodes_filter": "gpu"}})
    with linked(scheduler) as node:
        node.link.register(node.registration(tags=["gpu"]))
        node.submit()
        wait_until(lambda: node.link.stats().failed_total >= 3, "three failures")
        assert "Node belongs to more than one pool tree" in node.link.stats().last_error
        scheduler.patch("trees/default", {"edits": [{"path": ["nodes_filter"], "value": "!gpu"}]})
        assert node.answers.get(timeout=LONG_S)[0].accepted
        registered = node.link.registered
        assert registered is not None
        assert registered.tree == "gpu"
    assert events(logs) == ["link_failed", "node_registered", "link_recovered"]
