"""Starts of jobs of a running scheduler: stored before an answer has them, in shared writes, gone with their end."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from scheduler_world import ServedNode, assert_consistent, hold_next_write, in_loop, run_jobs
from watched_store import Watched, make_scheduler, start

from cpumond.scheduler.model import Config, NodeRecord, StartRecord
from cpumond.scheduler.operations import AbortOperation
from cpumond.scheduler.state.transaction import Transaction
from cpumond.scheduler.store import Change, FencedError
from cpumond.scheduler.stored import encode, encode_starts


def starts_in(store: Watched) -> set[str]:
    return {key for kind, key, _ in store.load() if kind == "start"}


@in_loop
async def test_a_start_is_stored_before_an_answer_has_it_and_goes_with_its_end(store):
    scheduler = make_scheduler(store)
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


@in_loop
async def test_the_next_run_does_not_ask_thousands_of_nodes_for_a_heartbeat_a_second_each(store):
    nodes = [NodeRecord(f"n{number}", f"run {number}", "", (), {}) for number in range(2500)]
    store.write(encode(Transaction(nodes=tuple(nodes)), Config({})))
    scheduler = make_scheduler(store)
    node = ServedNode(scheduler)
    await node.register()
    assert (await node.beat()).period_s == 2.5


@in_loop
async def test_a_start_that_the_store_refuses_is_in_no_answer_and_everything_else_is(store):
    scheduler = make_scheduler(store)
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


@in_loop
async def test_a_scheduler_that_has_lost_the_lead_answers_no_heartbeat_with_starts(store):
    scheduler = make_scheduler(store)
    node, _ = await run_jobs(scheduler, start(jobs=1), beats=0)

    def fence() -> None:
        raise FencedError("another scheduler leads")

    store.before = fence
    for _ in range(2):
        with pytest.raises(FencedError):
            await node.beat()


@in_loop
async def test_starts_of_heartbeats_that_wait_for_the_store_share_one_write(store):
    scheduler = make_scheduler(store)
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


@in_loop
async def test_ten_thousand_nodes_with_their_jobs_are_known_at_once_and_their_first_heartbeats_share_writes(store):
    scheduler = make_scheduler(store)
    reply = await scheduler.execute(start(jobs=40_000), "ann")
    nodes, each = 10_000, 3
    capacity = {"cpu": 8.0, "memory": 2.0**38, "user_slots": 1000.0, "gpu": 0.0, "network": 0.0}
    records = [NodeRecord(f"n{n}", "i1", f"n{n}", (), capacity) for n in range(nodes)]
    starts = [
        StartRecord(f"{n}-{job}", reply.id, "t", "default", f"n{n}", 1_000_000.0, n * each + job)
        for n in range(nodes)
        for job in range(each)
    ]
    store.write([Change("node", record.id, msgspec.json.encode(record)) for record in records])
    store.write(encode_starts(starts))
    again = make_scheduler(store)
    assert len(again.state.jobs) == nodes * each
    assert again.state.operations[reply.id].needed == {"t": 40_000 - nodes * each}
    assert_consistent(again.state)
    await again.update_all()
    before = len(store.seen)
    heard = [ServedNode(again, 8.0, f"n{n}") for n in range(300)]
    answers = await asyncio.gather(*(node.beat() for node in heard))
    assert all({order.job_id for order in answer.start} >= {f"{n}-0"} for n, answer in enumerate(answers))
    assert len(again.state.jobs) > nodes * each
    assert len(store.seen) - before <= 3


@in_loop
async def test_what_ends_while_its_start_is_stored_is_ordered_by_no_answer(store):
    scheduler = make_scheduler(store)
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


@in_loop
async def test_an_agent_that_was_replaced_while_its_heartbeat_waited_gets_no_orders(store):
    scheduler = make_scheduler(store)
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
