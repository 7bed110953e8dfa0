"""The running scheduler without sockets: what is stored before it is applied, what a failing store leaves, restarts."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref

import msgspec
import pytest
from scheduler_world import ServedNode, hold_next_write, refused_with, run_jobs
from watched_store import make_scheduler, start

from cpumond.scheduler import service
from cpumond.scheduler.model import ACCESS_DENIED
from cpumond.scheduler.program.exporter import MetricsText
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.service import make_id
from cpumond.scheduler.settings.commands import CreatePool, CreateTree, RemoveTree
from cpumond.scheduler.settings.operations import AbortOperation
from cpumond.scheduler.state import settling
from cpumond.scheduler.store import Change, StoreError


def test_an_empty_store_gets_one_tree_that_is_the_default(scheduler, store):
    assert list(scheduler.state.trees) == ["default"]
    assert scheduler.state.config.default_tree == "default"
    assert scheduler.state.config.trees["default"].attributes == {
        "acl_required": True,
        "default_memory_limit": 536_870_912,
        "enable_memory_reserve": True,
        "guarantee_tolerance": 1.0,
        "per_pool_counts_for_leaves_only": True,
        "share_gang_remainders": True,
    }
    assert make_scheduler(store).state.config == scheduler.state.config


async def test_a_tree_that_was_removed_does_not_come_back_at_the_next_start(scheduler, store):
    await scheduler.execute(RemoveTree("default", recursive=True), "root")
    assert list(make_scheduler(store).state.trees) == []


async def test_a_command_is_stored_before_it_is_applied(scheduler, store):
    seen: list[bool] = []
    store.before = lambda: seen.append("p" in scheduler.state.config.trees["default"].pools)
    await scheduler.execute(CreatePool("default", "p", "<Root>", {}), "root")
    assert seen[0] is False
    assert "p" in scheduler.state.config.trees["default"].pools


async def test_a_command_without_the_rights_writes_nothing_and_is_refused_first(scheduler, store):
    before = len(store.seen)
    for command in (CreatePool("default", "p", "<Root>", {"weight": "x"}), CreateTree("default")):
        with refused_with(ACCESS_DENIED, "ann may not "):
            await scheduler.execute(command, User("ann"))
    assert len(store.seen) == before
    assert scheduler.timings.refused_commands == 2
    await scheduler.execute(CreatePool("default", "p", "<Root>", {}), User("root", admin=True))


async def test_a_finished_job_is_not_acknowledged_while_the_store_refuses(scheduler, store):
    node, reply = await run_jobs(scheduler, start())
    node.finish(next(iter(node.jobs)))
    store.refusing = True
    with pytest.raises(StoreError):
        await node.beat()
    assert not scheduler.state.find_record(reply.id).counts
    store.refusing = False
    assert len((await node.beat()).acknowledged) == 1
    assert scheduler.state.find_record(reply.id).counts["t"].completed == 1


async def test_effects_of_a_command_come_later_when_the_store_fails_in_between(scheduler, store):
    await scheduler.execute(CreatePool("default", "p", "<Root>", {"max_running_operation_count": 1}), "root")
    first = await scheduler.execute(start(), "ann")
    second = await scheduler.execute(start(), "ann")
    writes = itertools.count()

    def refuse_the_second() -> None:
        store.refusing = next(writes) == 1

    store.before = refuse_the_second
    await scheduler.execute(AbortOperation(first.id), "root")
    assert scheduler.state.find_record(second.id).state == "pending"
    await scheduler.update_all()
    assert scheduler.state.find_record(second.id).state == "running"
    assert make_scheduler(store).state.find_record(second.id).state == "running"


async def test_a_cancelled_request_does_not_leave_a_stored_command_unapplied(scheduler, store):
    writing, released = hold_next_write(store)
    request = asyncio.ensure_future(scheduler.execute(CreatePool("default", "p", "<Root>", {}), "root"))
    await writing.wait()
    request.cancel()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await request
    await scheduler.execute(CreatePool("default", "q", "<Root>", {}), "root")
    assert {"p", "q"} <= set(scheduler.state.trees["default"].pools)


async def test_an_end_that_comes_with_a_node_that_is_being_given_up_counts(scheduler):
    node, reply = await run_jobs(scheduler, start())
    node.finish(next(iter(node.jobs)))
    scheduler.clock.at += 1000.0
    gone = settling.expire(scheduler.state, scheduler.clock.at)
    assert gone.removed_nodes == ("n1",)
    _, answer = await asyncio.gather(scheduler._end_jobs(gone), node.beat())
    assert len(answer.acknowledged) == 1
    counts = scheduler.state.find_record(reply.id).counts["t"]
    assert (counts.completed, counts.lost) == (1, 0)


async def test_a_node_is_told_a_period_only_when_the_scheduler_is_busy(scheduler):
    node = ServedNode(scheduler)
    await node.register()
    assert (await node.beat()).period_s is None
    scheduler.state.period_s = 2.5
    assert (await node.beat()).period_s == 2.5
    assert (await scheduler.register(node.registration())).heartbeat_period_s == 2.5


async def test_volumes_and_starvation_times_survive_and_nothing_accrues_then(scheduler, store):
    await ServedNode(scheduler, 100.0).register()
    guarantees = {"guarantee_type": "relaxed", "resource_flow": {"cpu": 10}}
    await scheduler.execute(CreatePool("default", "p", "<Root>", {"integral_guarantees": guarantees}), "root")
    await scheduler.execute(start(jobs=1000), "ann")
    for _ in range(11):
        await scheduler.update_all()
        scheduler.clock.at += 1.0
    pool = scheduler.state.trees["default"].pools["p"]
    volume, since = pool.volume, pool.below_since
    assert 0.0 < volume[1] <= 100.0
    assert since is not None
    scheduler.clock.at += 3600.0
    again = make_scheduler(store, scheduler.clock)
    restored = again.state.trees["default"].pools["p"]
    assert (restored.volume, restored.below_since) == (volume, since)
    await again.update_all()
    assert restored.volume == volume


async def test_metrics_are_bounded_and_escaped(scheduler):
    for n in range(5):
        await scheduler.execute(CreatePool("default", f"p{n}", "<Root>", {}), "root")
    await scheduler.update_all()
    text = MetricsText(scheduler, 3).encode().decode()
    assert text.count("\ncpumond_pool_fair_share_ratio{") == 3
    assert "cpumond_pools_without_series 3\n" in text
    whole = MetricsText(scheduler, 100).encode().decode()
    assert 'cpumond_pool_fair_share_ratio{tree="default",pool="p4"} 0.0' in whole
    assert 'cpumond_pool_operations{tree="default",pool="<Root>"} 0.0' in whole


async def test_cpu_time_of_pools_is_counted_for_prometheus(scheduler):
    node, _ = await run_jobs(scheduler, start(jobs=1), beats=1)
    (job,) = node.jobs
    node.jobs[job].cpu_seconds, node.jobs[job].reclaimed_cpu_seconds = 7.25, 1.5
    await node.beat()
    text = MetricsText(scheduler, 100).encode().decode()
    assert "# TYPE cpumond_pool_cpu_usage_seconds_total counter\n" in text
    for pool in ("p", "<Root>"):
        label = f'{{tree="default",pool="{pool}"}}'
        assert f"\ncpumond_pool_cpu_usage_seconds_total{label} 7.25\n" in text
        assert f"\ncpumond_pool_reclaimed_cpu_seconds_total{label} 1.5\n" in text


def test_ids_have_the_form_that_yt_prints():
    parts = make_id().split("-")
    assert len(parts) == 4
    assert all(int(part, 16) > 0 for part in parts)


def test_a_stored_record_of_an_unknown_form_is_a_clear_error(store):
    store.write([Change("tree", "x", msgspec.json.encode({})), Change("operation", "1", b'{"id":"1"}')])
    with pytest.raises(Exception, match=r"store|record|tree") as raised:
        make_scheduler(store)
    assert "\n" not in str(raised.value)


def test_most_collections_look_at_what_is_new_only():
    class Thing:
        itself: Thing

    def make() -> Thing:
        made = Thing()
        made.itself = made
        return made

    gc.collect()
    gc.disable()
    try:
        old = make()
        service._collect(1)
        known_old, known_new = weakref.ref(old), weakref.ref(make())
        del old
        service._collect(2)
        assert (known_old() is None, known_new() is None) == (False, True)
        service._collect(service.FULL_COLLECTION)
        assert known_old() is None
    finally:
        gc.enable()
