"""The simulation's own parts keep the contracts of what they stand for: event loop, store, arbiter."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from arbiter_contract import ArbiterContract
from simulation.database import Database, SimArbiter, SimStore
from simulation.events import Events, Killed, VirtualLoop
from store_contract import Opener, StoreContract

from cpumond.scheduler.store import Arbiter, StoreError


class AloneStore(SimStore):
    """A store that one opens at a time, as a program that is alone on it does."""

    def __init__(self, database: Database) -> None:
        arbiter = SimArbiter(database)
        lease = arbiter.take("", 1e9)
        if lease is None:
            raise StoreError("the store is in use by another program")
        super().__init__(database, lease.term)
        self._arbiter = arbiter

    def close(self) -> None:
        super().close()
        self._arbiter.close()


class TestStore(StoreContract):
    # One thread plays a world: no other one reads while it writes.
    test_the_log_is_read_while_another_thread_writes = None  # type: ignore[assignment]

    @pytest.fixture
    def make_opener(self) -> Callable[[], Opener]:
        def make() -> Opener:
            database = Database()
            return lambda: AloneStore(database)

        return make


class Rig:
    lease_s = 10.0

    def __init__(self) -> None:
        self.now = 0.0
        self.database = Database(now=lambda: self.now)
        self.arbiters: list[SimArbiter] = []

    def make(self) -> Arbiter:
        self.arbiters.append(SimArbiter(self.database, object()))
        return self.arbiters[-1]

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def end_sessions(self, arbiter: Arbiter) -> None:
        assert isinstance(arbiter, SimArbiter)
        self.database.end(arbiter._session)

    def end_store_sessions(self) -> None:
        mine = [arbiter._session for arbiter in self.arbiters]
        for session in [each for each in self.database.sessions.values() if each not in mine]:
            self.database.end(session)


class TestArbiter(ArbiterContract):
    @pytest.fixture
    def rig(self) -> Rig:
        return Rig()


# --- the event loop


class Told:
    def __init__(self) -> None:
        self.events = Events(1)
        self.said: list[tuple[float, Any]] = []

    def say(self, what: Any) -> None:
        self.said.append((round(self.events.now, 3), what))

    def process(self, name: str = "p") -> VirtualLoop:
        return VirtualLoop(self.events, name)


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_stopped_process_does_nothing_until_it_goes_on(told):
    async def main() -> None:
        for _ in range(3):
            await asyncio.sleep(1)
            told.say("tick")

    loop = told.process()
    loop.start(main())
    told.events.run(1.5)
    loop.stop_process()
    told.events.run(10)
    loop.continue_process()
    told.events.run(20)
    assert told.said == [(1.0, "tick"), (10.0, "tick"), (11.0, "tick")]


def test_a_killed_process_cleans_nothing_up(told):
    async def main() -> None:
        try:
            await asyncio.sleep(5)
        finally:
            told.say("cleaned")

    loop = told.process()
    loop.start(main())
    told.events.run(1)
    loop.kill()
    told.events.run(10)
    assert told.said == []


def test_a_process_can_be_killed_where_it_stands(told):
    loop = told.process()

    async def main() -> None:
        told.say("before")
        loop.kill()
        raise Killed

    loop.start(main())
    told.events.run(1)
    assert told.said == [(0.0, "before")]
    assert told.events.problems == []


def test_a_call_in_a_thread_takes_what_it_charges(told):
    async def main() -> None:
        def work() -> str:
            told.events.charge(3.0)
            told.say("work")
            return "done"

        told.say(await asyncio.to_thread(work))
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)

    told.process().start(main())
    told.events.run(10)
    (began, first), (ended, second) = told.said
    assert (first, second) == ("work", "done")
    assert 2.9 < ended - began < 4.0
    assert began < 0.5


def test_an_exception_that_nobody_takes_is_told(told):
    told.process("unlucky").call_later(1.0, lambda: 1 / 0)
    told.events.run(2)
    (problem,) = told.events.problems
    assert problem.startswith("unlucky")
    assert "ZeroDivisionError" in problem
