"""Values that are kept: for how long by what they took, whom they are shared with, what makes them anew."""

import asyncio
import time

import pytest

from cpumond.api.json.kept import FREE_S, MAX_KEPT_S, PAUSE, Kept


class Bakery:
    """Makes values that take some of the loop's time, by a clock that the test moves."""

    def __init__(self, spends_s: float = 0.0) -> None:
        self.at = 0.0
        self.made = 0
        self.spends_s = spends_s
        self.kept = Kept[str, int](lambda: self.at)

    async def make(self) -> int:
        self.made += 1
        until = time.thread_time() + self.spends_s
        while time.thread_time() < until:
            pass
        await asyncio.sleep(0)
        return self.made

    async def get(self, *made_of: object, version: object = None) -> int:
        return await self.kept.get("key", self.make, *made_of, version=version)


async def test_a_value_that_took_long_is_kept_and_one_of_other_things_is_not() -> None:
    bakery = Bakery(spends_s=2 * FREE_S)
    assert await asyncio.gather(bakery.get("a"), bakery.get("a")) == [1, 1]
    bakery.at += PAUSE * FREE_S / 2
    assert (await bakery.get("a"), await bakery.get("b"), await bakery.get("a")) == (1, 2, 3)
    bakery.at += MAX_KEPT_S
    assert await bakery.get("a") == 4


async def test_a_value_that_took_nothing_is_made_again_unless_its_version_holds() -> None:
    bakery = Bakery()
    assert (await bakery.get(), await bakery.get()) == (1, 2)
    assert (await bakery.get(version=1), await bakery.get(version=1), await bakery.get(version=2)) == (3, 3, 4)


async def test_a_value_whose_making_failed_is_made_again() -> None:
    bakery = Bakery(spends_s=2 * FREE_S)

    async def fail() -> int:
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0.0)
        except TimeoutError:
            raise RuntimeError("no flour") from None
        return 0

    with pytest.raises(RuntimeError, match="no flour"):
        await bakery.kept.get("key", fail)
    assert await bakery.get() == 1
