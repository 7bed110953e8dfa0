"""Waiting that can be given up at any moment."""

import asyncio

import pytest

from cpumond.host.engine.nudge import wait_nudged


@pytest.mark.parametrize("turns", range(4))
def test_one_that_is_given_up_just_as_it_is_nudged_ends(turns):
    async def run() -> bool:
        nudged = asyncio.Event()

        async def watch() -> None:
            while True:
                await wait_nudged(nudged, 1000.0)
                nudged.clear()

        task = asyncio.create_task(watch())
        await asyncio.sleep(0)
        nudged.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=250)
        is_over = task.done()
        task.cancel()
        return is_over

    assert asyncio.run(run())
