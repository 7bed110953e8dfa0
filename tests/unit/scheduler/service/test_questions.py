"""What nodes are asked: questions in the answers to heartbeats, answers that come back, and what can keep them away."""

import asyncio
import itertools
from collections.abc import Awaitable
from typing import Any

import pytest
from scheduler_world import ServedNode, refused_with, run_jobs
from watched_store import Watched, make_scheduler, pass_time, start

from cpumond.core.wire import JobLog, JobReply, LogRequest, LogStream
from cpumond.scheduler.model import GENERIC, NO_SUCH_JOB, NODE_OFFLINE, TIMEOUT, TOO_MANY_REQUESTS, CommandError
from cpumond.scheduler.rights.tokens import User
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.service.questions import MAX_PER_ANSWER, MAX_PER_NODE, MAX_WAITING, NodeQuestions


@pytest.fixture
def questions():
    numbers = itertools.count(1)
    return NodeQuestions(lambda: f"r{next(numbers)}", "log", timeout_s=20.0)


def wanted(job_id: str, stream: LogStream = "stdout", tail_bytes: int = 100) -> LogRequest:
    return LogRequest("", job_id, stream, tail_bytes)


async def begin(work: Any) -> asyncio.Task[Any]:
    """A task that has run as far as it can."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    return task


async def test_a_request_is_repeated_until_the_log_is_there(questions):
    reading = await begin(questions.ask("n1", wanted("j1", "stderr", 100)))
    (request,) = questions.questions_for("n1")
    assert (request.job_id, request.stream, request.tail_bytes) == ("j1", "stderr", 100)
    assert questions.questions_for("n1") == [request]
    assert questions.questions_for("n2") == []
    assert questions.take(JobLog("n1", request.request_id, b"\xff", 7))
    log = await reading
    assert (log.content, log.total_bytes) == (b"\xff", 7)
    assert len(questions) == 0
    assert questions.questions_for("n1") == []


async def test_equal_requests_share_one_and_others_do_not(questions):
    first = await begin(questions.ask("n1", wanted("j1")))
    second = await begin(questions.ask("n1", wanted("j1")))
    other = await begin(questions.ask("n1", wanted("j1", "stdout", 101)))
    shared, single = questions.questions_for("n1")
    questions.take(JobLog("n1", shared.request_id, b"a"))
    assert (await first).content == (await second).content == b"a"
    assert not other.done()
    questions.take(JobLog("n1", single.request_id, b"b"))
    assert (await other).content == b"b"


async def test_one_reader_that_leaves_does_not_take_the_log_from_the_other(questions):
    first = await begin(questions.ask("n1", wanted("j1")))
    second = await begin(questions.ask("n1", wanted("j1")))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    (request,) = questions.questions_for("n1")
    questions.take(JobLog("n1", request.request_id, b"a"))
    assert (await second).content == b"a"


async def test_nothing_is_asked_for_when_all_readers_have_left(questions):
    reading = await begin(questions.ask("n1", wanted("j1")))
    (request,) = questions.questions_for("n1")
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert questions.questions_for("n1") == []
    assert len(questions) == 0
    assert not questions.take(JobLog("n1", request.request_id, b"late"))


async def test_a_question_that_is_not_shared_is_asked_each_time_in_order(questions):
    askings = [await begin(questions.ask("n1", wanted("j1"), share=False)) for _ in range(2)]
    shared = await begin(questions.ask("n1", wanted("j1")))
    asked = questions.questions_for("n1")
    assert [question.request_id for question in asked] == ["r1", "r2", "r3"]
    for number, question in enumerate(asked):
        questions.take(JobLog("n1", question.request_id, b"%d" % number))
    assert [(await each).content for each in (*askings, shared)] == [b"0", b"1", b"2"]
    assert len(questions) == 0


async def test_a_log_of_another_node_is_refused_and_the_right_one_still_counts(questions):
    reading = await begin(questions.ask("n1", wanted("j1")))
    (request,) = questions.questions_for("n1")
    with pytest.raises(CommandError, match="node n2 was not asked"):
        questions.take(JobLog("n2", request.request_id, b"forged"))
    questions.take(JobLog("n1", request.request_id, b"true"))
    assert (await reading).content == b"true"
    assert not questions.take(JobLog("n1", request.request_id, b"again"))


@pytest.mark.parametrize(
    ("most", "asked", "text"),
    [(MAX_PER_NODE, "n0", "16 logs from node n0 are"), (MAX_WAITING, "another", f"{MAX_WAITING} logs are")],
)
async def test_requests_are_bounded_per_answer_and_node_and_in_all(questions, most, asked, text):
    """So a silent node keeps nobody from the others."""
    readings = [await begin(questions.ask(f"n{i // MAX_PER_NODE}", wanted(f"j{i}"))) for i in range(most)]
    assert [each.job_id for each in questions.questions_for("n0")] == [f"j{i}" for i in range(MAX_PER_ANSWER)]
    with refused_with(TOO_MANY_REQUESTS, f"{text} already waiting"):
        await questions.ask(asked, wanted("one too many"))
    readings.append(await begin(questions.ask("n0", wanted("j0"))))  # shares one that is there
    if asked == "n0":
        readings.append(await begin(questions.ask("another", wanted("j0"))))
        assert len(questions.questions_for("another")) == 1
    for reading in readings:
        reading.cancel()
    await asyncio.gather(*readings, return_exceptions=True)
    assert len(questions) == 0


async def with_a_job(store: Watched, told: bool = True) -> tuple[Scheduler, ServedNode, str, str]:
    """A scheduler and a node with one job, which was ordered and, if ``told``, reported; operation and job."""
    scheduler = make_scheduler(store)
    node, reply = await run_jobs(scheduler, start(jobs=1), beats=1 + told)
    (job,) = node.jobs
    return scheduler, node, reply.id, job


async def refusal_of(work: Awaitable[Any]) -> CommandError:
    with pytest.raises(CommandError) as caught:
        await work
    return caught.value


async def test_the_log_of_a_job_that_has_ended_is_read_too(store):
    scheduler, node, operation, job = await with_a_job(store)
    node.finish(job)
    await node.beat()
    reading = await begin(scheduler.read_log(operation, job, "stderr", 10))
    (request,) = (await node.beat()).logs
    scheduler.logs.take(JobLog("n1", request.request_id, error="node n1 has no log of it: it was removed"))
    error = await refusal_of(reading)
    assert (str(error), error.code) == (f"job {job}: node n1 has no log of it: it was removed", NO_SUCH_JOB)


def ask(scheduler: Scheduler, what: str, operation: str, job: str) -> Awaitable[Any]:
    if what == "log":
        return scheduler.read_log(operation, job, "stdout", 10)
    return scheduler.ask_job(operation, job, what)


@pytest.mark.parametrize("what", ["log", "pin"])
async def test_what_cannot_be_asked_is_said_at_once(store, what):
    scheduler, node, operation, job = await with_a_job(store, told=False)
    error = await refusal_of(ask(scheduler, what, operation, job))
    assert "has not started yet on node n1" in str(error)
    error = await refusal_of(ask(scheduler, what, operation, "1-2-3-4"))
    assert (str(error), error.code) == (f"No such job 1-2-3-4 in operation {operation}", NO_SUCH_JOB)
    other = (await scheduler.execute(start(jobs=1, pool="q"), "bob")).id
    assert "No such job" in str(await refusal_of(ask(scheduler, what, other, job)))
    await node.beat()
    scheduler.state.nodes["n1"].is_online = False
    scheduler.state.nodes["n1"].last_seen -= 70
    error = await refusal_of(ask(scheduler, what, operation, job))
    assert error.code == NODE_OFFLINE
    again = "" if what == "log" else "; pin it again when the node's agent is back"
    assert f"sent its last heartbeat 70 s ago{again}" in str(error)
    node.finish(job)
    await node.beat()
    if what == "pin":
        error = await refusal_of(ask(scheduler, "explain", operation, job))
        assert error.code == NO_SUCH_JOB
        assert str(error).startswith(f"job {job} has ended; ")
        return
    await pass_time(scheduler, 1000)
    await scheduler.update_all()
    assert not scheduler.state.nodes
    error = await refusal_of(ask(scheduler, what, operation, job))
    assert error.code == NODE_OFFLINE
    assert "which is no longer known" in str(error)


@pytest.mark.parametrize(
    ("what", "more"),
    [
        ("log", ""),
        ("explain", ""),
        ("unpin", ". It is not known whether the unpin was carried out; explain the job to find out"),
    ],
)
async def test_a_node_that_does_not_answer_is_named_with_its_silence(store, what, more):
    scheduler, node, operation, job = await with_a_job(store)
    scheduler.clock.at += 8
    scheduler.logs.timeout_s = scheduler.requests.timeout_s = 0.0
    error = await refusal_of(ask(scheduler, what, operation, job))
    thing = "log" if what == "log" else "answer"
    told = f"node n1 did not send the {thing} within 0 s: is its agent running? Its last heartbeat was 8 s ago"
    assert (str(error), error.code) == (told + more, TIMEOUT)
    assert (await node.beat()).requests == []


async def test_who_explains_a_job_at_the_same_time_gets_the_same_answer(store):
    scheduler, node, operation, job = await with_a_job(store)
    askings = [await begin(scheduler.ask_job(operation, job, "explain")) for _ in range(3)]
    answer = await node.beat()
    (request,) = answer.requests
    assert (request.kind, request.job_id, request.cpu_limit, request.ttl_s) == ("explain", job, None, None)
    assert answer.logs == []
    assert (await node.beat()).requests == [request]
    scheduler.requests.take(JobReply("n1", request.request_id, {"job_id": job}))
    assert [await each for each in askings] == [{"job_id": job}] * 3
    assert (await node.beat()).requests == []


async def test_changes_of_a_job_are_asked_for_one_by_one_in_order(store):
    scheduler, node, operation, job = await with_a_job(store)
    changes = [("pin", 0.5, 60.0), ("unpin", None, None), ("pin", 0.5, 60.0), ("pin", 0.7, None)]
    askings = [await begin(scheduler.ask_job(operation, job, *change, user=User("ann"))) for change in changes]
    requests = (await node.beat()).requests
    assert [(request.kind, request.cpu_limit, request.ttl_s) for request in requests] == changes
    for number, request in enumerate(requests):
        scheduler.requests.take(JobReply("n1", request.request_id, {"number": number}))
    assert [await each for each in askings] == [{"number": number} for number in range(4)]


@pytest.mark.parametrize(
    ("reply", "told", "code"),
    [
        ({"error": "a pinned limit must be less", "is_refused": True}, "a pinned limit must be less", GENERIC),
        ({"error": "its disk is full"}, "its disk is full", NODE_OFFLINE),
        ({}, "it gave no answer", NODE_OFFLINE),
    ],
)
async def test_the_nodes_refusal_is_told_in_its_words(store, reply, told, code):
    scheduler, node, operation, job = await with_a_job(store)
    asking = await begin(scheduler.ask_job(operation, job, "pin", 9.0))
    (request,) = (await node.beat()).requests
    scheduler.requests.take(JobReply("n1", request.request_id, **reply))
    error = await refusal_of(asking)
    assert (str(error), error.code) == (f"node n1: {told}", code)
