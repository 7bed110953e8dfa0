"""Starts of jobs of a running scheduler: stored before an answer has them, in shared writes, gone with their end."""

import asyncio

import msgspec
import pytest
from scheduler_world import ServedNode, hold_next_write, run_jobs
from watched_store import Watched, make_scheduler, start

from cpumond.scheduler.model import Config, NodeRecord
from cpumond.scheduler.service.stored import encode
from cpumond.scheduler.settings.operations import AbortOperation
from cpumond.scheduler.state.transaction import Transaction
from cpumond.scheduler.store import FencedError


def starts_in(store: Watched) -> set[str]:
    return {key for kind, key, _ in store.load() if kind == "start"}


async def test_a_start_is_stored_before_an_answer_has_it_and_goes_with_its_end(scheduler, store):
    node, reply = await run_jobs(scheduler, start(), beats=0)
    seen: list[set[str]] = []
    store.before = lambda: seen.append(set(node.jobs))
    answer = await node.beat()
    assert seen == [set()]
    assert starts_in(store) == {order.job_id for order in answer.start} == set(node.jobs)
    await node.beat()
    for job in list(node.jobs):
        node.finish(job)
    await node.beat()
    assert starts_in(store) == set()
    assert scheduler.state.find_record(reply.id).state == "completed"


async def test_the_next_run_does_not_ask_thousands_of_nodes_each_second(store):
    nodes = [NodeRecord(f"n{number}", f"run {number}", "", (), {}) for number in range(2500)]
    store.write(encode(Transaction(nodes=tuple(nodes)), Config({})))
    node = ServedNode(make_scheduler(store))
    await node.register()
    assert (await node.beat()).period_s == 2.5


async def test_a_start_that_the_store_refuses_is_in_no_answer(scheduler, store):
    node = ServedNode(scheduler)
    await node.register()
    first = await scheduler.execute(start(jobs=1), "ann")
    await scheduler.update_all()
    await node.beat()
    await node.beat()
    (job,) = node.jobs
    await scheduler.execute(start(jobs=1), "ann")
    await scheduler.execute(AbortOperation(first.id), "root")
    await scheduler.update_all()
    store.refusing = True
    for _ in range(3):
        answer = await scheduler.heartbeat(node.heartbeat())
        assert (answer.accepted, answer.start, [each.job_id for each in answer.stop]) == (True, [], [job])
    assert starts_in(store) == {job}
    # Killed now, the next run knows of no other job: nobody has been told to start one.
    assert set(make_scheduler(store).state.jobs) == set()
    store.refusing = False
    (order,) = (await node.beat()).start
    assert order.job_id in starts_in(store)


async def test_a_scheduler_that_lost_the_lead_answers_no_heartbeat_with_starts(scheduler, store):
    node, _ = await run_jobs(scheduler, start(jobs=1), beats=0)

    def fence() -> None:
        raise FencedError("another scheduler leads")

    store.before = fence
    for _ in range(2):
        with pytest.raises(FencedError):
            await node.beat()


async def test_starts_of_heartbeats_that_wait_for_the_store_share_one_write(scheduler, store):
    nodes = [ServedNode(scheduler, name=f"n{n}") for n in range(50)]
    for node in nodes:
        await node.register()
    await scheduler.execute(start(jobs=200), "ann")
    await scheduler.update_all()
    before = len(store.seen)
    await asyncio.gather(*(node.beat() for node in nodes))
    assert all(node.jobs for node in nodes)
    assert len(store.seen) - before <= 3
    assert starts_in(store) == {job for node in nodes for job in node.jobs}


async def test_what_ends_while_its_start_is_stored_is_ordered_by_no_answer(scheduler, store):
    node, reply = await run_jobs(scheduler, start(jobs=1), beats=0)
    writing, released = hold_next_write(store)
    beat = asyncio.ensure_future(node.beat())
    await writing.wait()
    abort = asyncio.ensure_future(scheduler.execute(AbortOperation(reply.id), "root"))
    later = asyncio.ensure_future(scheduler.heartbeat(node.heartbeat()))
    await asyncio.sleep(0)
    released.set()
    await abort
    await later
    assert (await beat).accepted
    await node.beat()
    await node.beat()
    assert (node.jobs, starts_in(store)) == ({}, set())


async def test_an_agent_replaced_while_its_heartbeat_waited_gets_no_orders(scheduler, store):
    node, _ = await run_jobs(scheduler, start(jobs=1), beats=0)
    new = msgspec.structs.replace(node.registration(), incarnation="i2")
    writing, released = hold_next_write(store)
    replaced = asyncio.ensure_future(scheduler.register(new))
    await writing.wait()
    beat = asyncio.ensure_future(scheduler.heartbeat(node.heartbeat()))
    await asyncio.sleep(0)
    released.set()
    await replaced
    answer = await beat
    assert (answer.accepted, answer.register, answer.start) == (False, True, [])
    node.incarnation = "i2"
    node.sequence = 0
    assert len((await node.beat()).start) == 1
