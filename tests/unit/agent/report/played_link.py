"""The link of a node to schedulers that a test plays: what it was given, and heartbeats that wait for their answers."""

import queue
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from played_server import soon

from cpumond.agent.config import SchedulerOptions as LinkOptions
from cpumond.agent.report.scheduler import SchedulerLink
from cpumond.core import wire

NODES, HEARTBEATS = "/api/v1/nodes", "/api/v1/heartbeats"
ACCEPTED = wire.HeartbeatAnswer(True)
LONG_S = 60.0


class Node:
    """A link with what it was told; ``calls`` takes the place of its own functions."""

    def __init__(self, options: LinkOptions, rng: random.Random, **calls: Any) -> None:
        self.answers: queue.Queue[tuple[wire.HeartbeatAnswer, float]] = queue.Queue()
        self.read: list[str] = []
        self.carried_out: list[tuple[str, float]] = []
        self.busy = 0
        """So many requests find no time."""
        self.slow_s = 0.0
        given = {"on_answer": self.take, "read_log": self.read_log, "carry_out": self.carry_out, **calls}
        self.link = SchedulerLink(options, make_registration(), rng=rng, **given)

    def take(self, answer: wire.HeartbeatAnswer, sent_at_s: float) -> None:
        self.answers.put((answer, sent_at_s))

    def read_log(self, request: wire.LogRequest) -> wire.JobLog:
        self.read.append(request.request_id)
        return wire.JobLog("node-1", request.request_id, b"\xff" * request.tail_bytes, 1000)

    def carry_out(self, request: wire.JobRequest, timeout_s: float) -> wire.JobReply | None:
        self.carried_out.append((request.request_id, timeout_s))
        time.sleep(self.slow_s)
        if self.busy > 0:
            self.busy -= 1
            return None
        return wire.JobReply("node-1", request.request_id, {"kind": request.kind})

    def beat(self, *sequences: int, finished: Sequence[wire.FinishedJob] = ()) -> wire.HeartbeatAnswer:
        """Submit these heartbeats, each after the answer to the one before; the last answer."""
        for sequence in sequences:
            self.link.submit(msgspec.structs.replace(make_heartbeat(sequence), finished_jobs=list(finished)))
            answer = self.answers.get(timeout=LONG_S)[0]
        return answer


@contextmanager
def linked(
    *urls: str, rng: random.Random | None = None, calls: dict[str, Any] | None = None, **options: Any
) -> Iterator[Node]:
    """A node whose link asks these addresses, until the end of the block."""
    given = {"timeout_s": LONG_S, "heartbeat_period_s": 0.01, **options}
    node = Node(LinkOptions(url=list(urls), **given), rng or soon(), **(calls or {}))
    try:
        yield node
    finally:
        node.link.close(LONG_S)


def make_registration(cpu: float = 8.0) -> wire.NodeRegistration:
    return wire.NodeRegistration("node-1", "run-1", wire.NodeResources(cpu=cpu))


def make_heartbeat(sequence: int, job_id: str = "job-1") -> wire.Heartbeat:
    job = wire.JobReport(job_id, "op-1", cpu_limit=4.0, current_cpu_limit=1.5)
    return wire.Heartbeat("node-1", "run-1", sequence, sent_at=1.7e9, cpu_capacity=8.0, jobs=[job])


def events(logs: list[Any]) -> list[str]:
    return [line["event"] for line in logs]
