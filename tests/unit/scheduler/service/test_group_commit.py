"""Starts of operations that arrive together share a write, and decide what they decided one after another."""

import asyncio
import random

import pytest
from scheduler_world import hold_next_write
from watched_store import Watched, make_scheduler, start

from cpumond.scheduler.model import CommandError
from cpumond.scheduler.service import MAX_GROUP, Scheduler
from cpumond.scheduler.settings.commands import ChangeTree, CreatePool, CreateTree, Edit
from cpumond.scheduler.settings.operations import StartOperation
from cpumond.scheduler.store.sqlite import open_sqlite_store


async def _execute_together(scheduler: Scheduler, commands: list[tuple[StartOperation, str]]) -> list[str]:
    """All of them while one other write holds up the store; the text of each refusal, "" for none."""
    writing, released = hold_next_write(scheduler.store)
    blocking = asyncio.ensure_future(scheduler.execute(CreatePool("default", "blocking", "<Root>", {}), "root"))
    await writing.wait()
    waiting = [asyncio.ensure_future(scheduler.execute(*each)) for each in commands]
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)
    released.set()
    done = await asyncio.gather(*waiting, return_exceptions=True)
    await blocking
    return [str(each) if isinstance(each, Exception) else "" for each in done]


async def test_a_group_is_bounded(scheduler, store):
    await scheduler.execute(ChangeTree("default", [Edit(("max_operation_count_per_pool",), 1000)]), "root")
    before = len(store.seen)
    await _execute_together(scheduler, [(start(pool="blocking"), "ann")] * (2 * MAX_GROUP + 1))
    assert len(store.seen) == before + 1 + 3, "the write that all waited for, and theirs"
    assert make_scheduler(store).state.operations.keys() == scheduler.state.operations.keys()


async def test_a_store_that_refuses_acknowledges_and_changes_nothing_of_a_group(scheduler, store):
    writing, released = hold_next_write(store)
    waiting = [asyncio.ensure_future(scheduler.execute(start(), "ann")) for _ in range(3)]
    await writing.wait()
    store.refusing = True
    released.set()
    outcome = [str(each) for each in await asyncio.gather(*waiting, return_exceptions=True)]
    assert ["disk is full" in each for each in outcome] == [True] * 3
    assert not scheduler.state.operations
    assert not make_scheduler(store).state.operations
    store.refusing = False
    await scheduler.execute(start(), "ann")
    assert [each.record.sequence for each in scheduler.state.operations.values()] == [1]


async def test_one_that_cannot_be_stored_is_refused_alone(scheduler):
    commands = [(start(title=title), "ann") for title in ("a", "caf\udce9", "b")]
    assert ["not valid UTF-8" in each for each in await _execute_together(scheduler, commands)] == [False, True, False]
    assert [each.record.title for each in scheduler.state.operations.values()] == ["a", "b"]


async def test_one_that_makes_a_pool_counts_for_those_behind_it(scheduler):
    await scheduler.execute(ChangeTree("default", [Edit(("max_operation_count",), 2)]), "root")
    pools = ["fresh", "blocking", "blocking"]
    outcome = await _execute_together(scheduler, [(start(pool=pool), "ann") for pool in pools])
    assert ["Limit for the number" in each for each in outcome] == [False, False, True]


@pytest.mark.parametrize("seed", range(12))
async def test_together_they_decide_what_they_decide_one_after_another(tmp_path, seed):
    draw = random.Random(seed)
    commands = []
    for number in range(30):
        spec = {"pool": draw.choice(["p", "q", "p$x", "new", "q"])}
        if draw.random() < 0.15:
            spec["alias"] = f"*{draw.randrange(2)}"
        if draw.random() < 0.3:
            spec |= {"pool_trees": ["default", "second"], "schedule_in_single_tree": draw.random() < 0.5}
        if draw.random() < 0.1:
            spec["unknown_option"] = "x" * draw.choice([10, 40_000])
        if draw.random() < 0.05:
            spec["max_failed_job_count"] = "many"
        commands.append((start(title=str(number), **spec), draw.choice(["ann", "bob"])))
    limits = {"max_operation_count": 6, "max_running_operation_count": 3}
    found = []
    for is_together in (False, True):
        scheduler = await _make_scheduler(Watched(open_sqlite_store(str(tmp_path / f"{is_together}.db"))), limits)
        if is_together:
            outcome = await _execute_together(scheduler, commands)
        else:
            await scheduler.execute(CreatePool("default", "blocking", "<Root>", {}), "root")
            outcome = []
            for command, user in commands:
                try:
                    await scheduler.execute(command, user)
                    outcome.append("")
                except CommandError as error:
                    outcome.append(str(error))
        records = sorted((each.record for each in scheduler.state.operations.values()), key=lambda each: each.sequence)
        facts = [(each.title, each.sequence, each.state, each.running_in, sorted(each.trees)) for each in records]
        found.append((outcome, facts, [f"{name}" for name in scheduler.state.trees["default"].pools]))
    assert found[0] == found[1]
    assert {"", *found[0][0]} != {""}


async def _make_scheduler(store: Watched, limits: dict[str, int]) -> Scheduler:
    scheduler = make_scheduler(store)
    await scheduler.execute(CreateTree("second", {"nodes_filter": "second"}), "root")
    for tree in ("default", "second"):
        most = {"max_ephemeral_pools_per_user": 1, "max_operation_count": 14, "max_running_operation_count": 8}
        await scheduler.execute(ChangeTree(tree, [Edit((name,), value) for name, value in most.items()]), "root")
        await scheduler.execute(CreatePool(tree, "p", "<Root>", {"create_ephemeral_subpools": True}), "root")
        await scheduler.execute(CreatePool(tree, "q", "<Root>", limits), "root")
    return scheduler
