"""Reports of idle CPU while the configuration changes: how many are made, and of which one."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from scheduler_world import World

from cpumond.scheduler.service import idle_watch
from cpumond.scheduler.service.idle_watch import IdleWatch
from cpumond.scheduler.trial.fork import ask


@pytest.fixture
def taken(world: World, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The limit of the pool p, in cores, in the configuration of each report; one more core while each is made."""
    limits: list[float] = []
    world.set_pool("p", resource_limits={"cpu": 1.0})

    async def ask_and_change(compute: Callable[[], Any], answer: object) -> tuple[Any, float]:
        limits.append(world.pool("p").settings.resource_limits["cpu"])
        world.set_pool("p", resource_limits={"cpu": limits[-1] + 1.0})
        return await ask(compute, answer)

    monkeypatch.setattr(idle_watch, "ask", ask_and_change)
    return limits


async def test_a_configuration_that_changes_all_the_time_is_looked_at_once(world: World, taken: list[float]) -> None:
    await IdleWatch(world.state, lambda: world.now).read(world.tree())
    assert taken == [1.0]


async def test_a_report_that_was_begun_before_a_change_is_made_anew(world: World, taken: list[float]) -> None:
    watch = IdleWatch(world.state, lambda: world.now)
    first = asyncio.ensure_future(watch.read(world.tree()))
    while not taken:
        await asyncio.sleep(0)
    await asyncio.gather(watch.read(world.tree()), watch.read(world.tree()))
    assert first.done()
    assert taken == [1.0, 2.0], "both who asked after the change share the next one"
