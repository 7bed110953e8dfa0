"""Logs of jobs: requests in the answers to heartbeats, logs that come back, and everything that can keep them away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import pytest
from test_loop import PlayedNode, Watched, make_scheduler, start

from cpumond.scheduler.logs import MAX_PER_ANSWER, MAX_WAITING, LogDesk
from cpumond.scheduler.loop import Scheduler
from cpumond.scheduler.model import NO_SUCH_JOB, NODE_OFFLINE, TIMEOUT, TOO_MANY_REQUESTS, CommandError
from cpumond.scheduler.store.sqlite import open_sqlite_store
from cpumond.wire import JobLog


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in an event loop."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 30))  # type: ignore[arg-type]

    return run


@pytest.fixture
def desk():
    numbers = iter(range(1, 1000))
    return LogDesk(lambda: f"r{next(numbers)}", timeout_s=20.0)


async def begin(work: Any) -> asyncio.Task[Any]:
    """A task that has run as far as it can."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    return task


# --- the desk


@in_loop
async def test_a_request_is_repeated_until_the_log_is_there(desk):
    reading = await begin(desk.read("n1", "j1", "stderr", 100))
    (request,) = desk.requests_of("n1")
    assert (request.job_id, request.stream, request.tail_bytes) == ("j1", "stderr", 100)
    assert desk.requests_of("n1") == [request]
    assert desk.requests_of("n2") == []
    assert desk.take(JobLog("n1", request.request_id, b"\xff", 7))
    log = await reading
    assert (log.content, log.total_bytes) == (b"\xff", 7)
    assert len(desk) == 0
    assert desk.requests_of("n1") == []


@in_loop
async def test_equal_requests_share_one_and_others_do_not(desk):
    first = await begin(desk.read("n1", "j1", "stdout", 100))
    second = await begin(desk.read("n1", "j1", "stdout", 100))
    other = await begin(desk.read("n1", "j1", "stdout", 101))
    shared, single = desk.requests_of("n1")
    desk.take(JobLog("n1", shared.request_id, b"a"))
    assert (await first).content == (await second).content == b"a"
    assert not other.done()
    desk.take(JobLog("n1", single.request_id, b"b"))
    assert (await other).content == b"b"


@in_loop
async def test_one_reader_that_leaves_does_not_take_the_log_from_the_other(desk):
    first = await begin(desk.read("n1", "j1", "stdout", 100))
    second = await begin(desk.read("n1", "j1", "stdout", 100))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    (request,) = desk.requests_of("n1")
    desk.take(JobLog("n1", request.request_id, b"a"))
    assert (await second).content == b"a"


@in_loop
async def test_nothing_is_asked_for_when_all_readers_have_left(desk):
    reading = await begin(desk.read("n1", "j1", "stdout", 100))
    (request,) = desk.requests_of("n1")
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert desk.requests_of("n1") == []
    assert len(desk) == 0
    assert not desk.take(JobLog("n1", request.request_id, b"late"))


@in_loop
async def test_a_log_of_another_node_is_refused_and_the_right_one_still_counts(desk):
    reading = await begin(desk.read("n1", "j1", "stdout", 100))
    (request,) = desk.requests_of("n1")
    with pytest.raises(CommandError, match="node n2 was not asked"):
        desk.take(JobLog("n2", request.request_id, b"forged"))
    desk.take(JobLog("n1", request.request_id, b"true"))
    assert (await reading).content == b"true"
    assert not desk.take(JobLog("n1", request.request_id, b"again"))


@in_loop
async def test_a_node_that_does_not_send_it_in_time_is_an_error(desk):
    desk.timeout_s = 0.0
    with pytest.raises(CommandError, match="node n1 did not send the log within 0 s") as caught:
        await desk.read("n1", "j1", "stdout", 100)
    assert caught.value.code == TIMEOUT
    assert len(desk) == 0


@in_loop
async def test_requests_are_bounded_in_all_and_per_answer(desk):
    readings = [await begin(desk.read("n1", f"j{i}", "stdout", 100)) for i in range(MAX_WAITING)]
    assert [each.job_id for each in desk.requests_of("n1")] == [f"j{i}" for i in range(MAX_PER_ANSWER)]
    with pytest.raises(CommandError, match="100 logs of jobs are being waited for") as caught:
        await desk.read("n1", "one too many", "stdout", 100)
    assert caught.value.code == TOO_MANY_REQUESTS
    again = await begin(desk.read("n1", "j0", "stdout", 100))  # shares one that is there
    for reading in (*readings, again):
        reading.cancel()
    await asyncio.gather(*readings, again, return_exceptions=True)
    assert len(desk) == 0


# --- the scheduler


@pytest.fixture
def store(tmp_path):
    store = Watched(open_sqlite_store(str(tmp_path / "scheduler.db")))
    yield store
    store.close()


async def with_a_job(store: Watched) -> tuple[Scheduler, PlayedNode, str, str]:
    """A scheduler and a node with one job that was ordered; operation and job."""
    scheduler = make_scheduler(store)
    node = PlayedNode(scheduler)
    await node.register()
    operation = (await scheduler.execute(start(jobs=1), "ann")).id
    await scheduler.update_all()
    await node.beat()
    (job,) = node.jobs
    return scheduler, node, operation, job


async def refusal_of(work: Awaitable[Any]) -> CommandError:
    with pytest.raises(CommandError) as caught:
        await work
    return caught.value


@in_loop
async def test_a_log_comes_with_the_next_heartbeats(store):
    scheduler, node, operation, job = await with_a_job(store)
    await node.beat()
    reading = await begin(scheduler.read_log(operation, job, "stdout", 10))
    (request,) = (await node.beat()).logs
    assert (await node.beat()).logs == [request]
    scheduler.logs.take(JobLog("n1", request.request_id, b"hello", 5))
    assert (await reading).content == b"hello"
    assert (await node.beat()).logs == []


@in_loop
async def test_the_log_of_a_job_that_has_ended_is_read_too(store):
    scheduler, node, operation, job = await with_a_job(store)
    await node.beat()
    node.finish(job)
    await node.beat()
    reading = await begin(scheduler.read_log(operation, job, "stderr", 10))
    (request,) = (await node.beat()).logs
    scheduler.logs.take(JobLog("n1", request.request_id, error="node n1 has no log of it: it was removed"))
    error = await refusal_of(reading)
    assert (str(error), error.code) == (f"job {job}: node n1 has no log of it: it was removed", NO_SUCH_JOB)


@in_loop
async def test_what_cannot_be_read_is_said_at_once(store):
    scheduler, node, operation, job = await with_a_job(store)
    error = await refusal_of(scheduler.read_log(operation, job, "stdout", 10))
    assert "has not started yet on node n1" in str(error)
    error = await refusal_of(scheduler.read_log(operation, "1-2-3-4", "stdout", 10))
    assert (str(error), error.code) == (f"No such job 1-2-3-4 in operation {operation}", NO_SUCH_JOB)
    other = (await scheduler.execute(start(jobs=1, pool="q"), "bob")).id
    assert "No such job" in str(await refusal_of(scheduler.read_log(other, job, "stdout", 10)))
    await node.beat()
    scheduler.state.nodes["n1"].is_online = False
    scheduler.state.nodes["n1"].last_seen -= 70
    error = await refusal_of(scheduler.read_log(operation, job, "stdout", 10))
    assert error.code == NODE_OFFLINE
    assert "was last heard of 70 s ago" in str(error)
    node.finish(job)
    await node.beat()
    scheduler.clock.at += 1000
    await scheduler.update_all()
    await scheduler.update_all()
    assert not scheduler.state.nodes
    error = await refusal_of(scheduler.read_log(operation, job, "stdout", 10))
    assert error.code == NODE_OFFLINE
    assert "which is not known any more" in str(error)


@in_loop
async def test_a_node_that_does_not_answer_is_named_with_its_silence(store):
    scheduler, node, operation, job = await with_a_job(store)
    await node.beat()
    scheduler.clock.at += 8
    scheduler.logs.timeout_s = 0.0
    error = await refusal_of(scheduler.read_log(operation, job, "stdout", 10))
    assert error.code == TIMEOUT
    assert str(error) == ("node n1 did not send the log within 0 s: is its agent running? It was last heard of 8 s ago")
