"""Following the jobs of an operation: however many there are, none is passed over, and long lines do not pile up."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from scheduler_process import PlayedNode
from test_json_api import LiveScheduler
from waiting import wait_until

from cpumond.cli.scheduler.follow import MAX_JOBS, MAX_LINE_BYTES, Follower
from cpumond.cli.scheduler.http_client import SchedulerClient
from cpumond.core.wire import LogStream


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveScheduler]:
    with LiveScheduler(tmp_path, max_body=2**20) as server:
        yield server


def test_more_jobs_than_are_listed_at_once_are_followed_the_first_too(server):
    count = MAX_JOBS + 100
    node = PlayedNode(server, "n1", 100.0, memory=2**40, user_slots=2 * count)
    node.register()
    server.wait_for_update()
    operation = server.start("p", job_count=count, cpu_limit=0.01)
    wait_until(lambda: node.beat() and len(node.jobs) == count, "all jobs run")
    node.beat()
    every = Follower(SchedulerClient(server.url), operation, ("stdout",), lambda _, __: None, lambda _: None)
    every.step()
    assert {job.id for job in every.listed} == set(node.jobs)

    first = every.listed[-1].id
    node.logs[first, "stdout"] = b"of the first\n"
    node.end(first)
    written: list[tuple[LogStream, bytes]] = []
    one = Follower(
        SchedulerClient(server.url), operation, ("stdout",),
        lambda stream, content: written.append((stream, content)), lambda _: None, (first,),
    )  # fmt: skip
    wait_until(lambda: node.beat() and one.step(), "the first job is followed to its end")
    assert written == [("stdout", b"of the first\n")]


def test_a_line_without_an_end_is_written_in_parts(server):
    node = PlayedNode(server, "n1", 100.0, memory=2**40, user_slots=10)
    node.register()
    server.wait_for_update()
    operation = server.start("p", job_count=2, cpu_limit=0.01)
    wait_until(lambda: node.beat() and len(node.jobs) == 2, "both jobs run")
    long, other = node.jobs
    node.logs[long, "stdout"] = b"x" * (3 * MAX_LINE_BYTES)
    node.logs[other, "stdout"] = b""
    written: list[bytes] = []
    follower = Follower(
        SchedulerClient(server.url), operation, ("stdout",), lambda _, content: written.append(content), lambda _: None
    )
    wait_until(lambda: node.beat() and not follower.step() and written, "a part of the line")
    node.logs[long, "stdout"] += b"end"
    node.end(long)
    node.end(other)
    wait_until(lambda: node.beat() and follower.step(), "all is read")
    prefix = written[0].partition(b"| ")[0] + b"| "
    lines = b"".join(written).split(b"\n")
    assert b"".join(line.removeprefix(prefix) for line in lines) == b"x" * (3 * MAX_LINE_BYTES) + b"end"
