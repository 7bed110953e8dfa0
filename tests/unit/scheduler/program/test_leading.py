"""One of several schedulers: its reigns, what ends them, and what the door in front of them lets out."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2
import pytest
from simulation.database import Database, SimArbiter
from starlette.responses import PlainTextResponse

from cpumond.api.standby import make_standby_app
from cpumond.core.route import LOST_LEAD, was_not_done
from cpumond.core.term import LEADER_HEADER, TERM_HEADER
from cpumond.scheduler.model import Rules
from cpumond.scheduler.program.door import LeaderDoor
from cpumond.scheduler.program.exporter import LeadMetrics
from cpumond.scheduler.program.leading import App, Leading
from cpumond.scheduler.program.notify import describe_lead
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.settings.commands import CreatePool
from cpumond.scheduler.store import FencedError, Store, StoreError

LEASE_S = 0.6
LONG_LEASE_S = 60.0
STEP_S = 0.005
"""One that does not end by itself before the first answer, however busy the machine is."""
ADDRESS = "here:1"
OTHER = "there:2"


class World:
    """One process on a database, which answers while ``gate`` is open. ``paused_s`` is added to the clock of the
    process, as a stop of it does. Time goes on only while a test waits (``until``): no lease ends because the machine
    is busy."""

    def __init__(self, lease_s: float) -> None:
        self.time_s = 0.0
        self.database = Database(lambda: self.time_s)
        self.database.latency = self.pass_gate
        self.gate = threading.Event()
        self.gate.set()
        self.arbiter = SimArbiter(self.database, self)
        self.paused_s = 0.0
        self.on_request: Callable[[], Awaitable[None]] | None = None
        self.cannot_open: Exception | None = None
        self.leading = Leading(self.arbiter, self.open, ADDRESS, lease_s, self.now)
        standby = make_standby_app(self.leading.view, ADDRESS, LeadMetrics(self.leading).encode)
        self.door = LeaderDoor(self.leading, standby)
        self.stopping = asyncio.Event()

    def now(self) -> float:
        return self.time_s + self.paused_s

    def pass_gate(self) -> float:
        assert self.gate.wait(30)
        return 0.0

    def assert_closed(self) -> None:
        with pytest.raises(StoreError, match="the arbiter is closed"):
            self.arbiter.look()

    def open(self, store: Store) -> tuple[Scheduler, App]:
        if self.cannot_open is not None:
            raise self.cannot_open

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if self.on_request is not None:
                await self.on_request()
            await PlainTextResponse("led")(scope, receive, send)

        return Scheduler(Rules(), store, Clock(), 0.05), app

    async def get(self, path: str = "/api/v1/status") -> httpx2.Response:
        transport = httpx2.ASGITransport(app=self.door)
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.get(path)

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(STEP_S)
            self.time_s += STEP_S

    async def lead(self) -> None:
        await self.until(lambda: self.leading.view().role == "leader")


@contextlib.asynccontextmanager
async def running(lease_s: float = LEASE_S) -> AsyncIterator[World]:
    world = World(lease_s)
    task = asyncio.ensure_future(world.leading.run(world.stopping))
    try:
        yield world
    finally:
        world.gate.set()
        world.stopping.set()
        await task


@contextlib.asynccontextmanager
async def leads(lease_s: float = LEASE_S) -> AsyncIterator[World]:
    async with running(lease_s) as world:
        await world.lead()
        yield world


def take_from_outside(database: Database) -> None:
    database.lock = None
    assert SimArbiter(database, OTHER).take(OTHER, 1000.0)


async def test_it_leads_and_every_answer_has_its_term():
    async with leads(5 * LEASE_S) as world:
        answer = await world.get()
        assert (answer.status_code, answer.text, answer.headers[TERM_HEADER]) == (200, "led", "1")
        assert "leads (term 1)" in describe_lead(world.leading)
        # Renewals keep it.
        first_s = world.database.expires_at
        await world.until(lambda: world.database.expires_at > first_s)
        assert world.leading.reigns_total == 1
    assert world.database.lock is None, "the lead was given up"
    world.assert_closed()


async def test_a_standby_says_who_leads():
    async with leads() as world:
        take_from_outside(world.database)
        await world.until(lambda: world.leading.view().leader == OTHER)
        answer = await world.get()
        assert answer.status_code == 503
        assert answer.json() == {
            "error": f"standby: the scheduler at {OTHER} leads (term 2)", "code": 105, "attributes": {},
        }  # fmt: skip
        assert answer.headers[LEADER_HEADER] == OTHER
        assert TERM_HEADER not in answer.headers
        ready = await world.get("/readyz")
        assert ready.status_code == 200
        assert (ready.json()["role"], ready.json()["leader"], ready.json()["term"]) == ("standby", OTHER, 2)
        assert (await world.get("/healthz")).status_code == 200
        metrics = (await world.get("/metrics")).text
        for name, value in (("leads", 0), ("lead_unknown", 0), ("lost_leads_total", 1)):
            assert f"cpumond_scheduler_{name} {value}.0" in metrics
        assert (await world.get("/")).status_code == 200
        yt = await world.get("/api/v4/get")
        assert (yt.status_code, yt.headers["x-yt-response-code"]) == (503, "105")
        assert describe_lead(world.leading) == f"standby: {OTHER} leads (term 2)"
        assert world.leading.lost_total == 1
        # The other one ends.
        world.database.lock = None
        await world.lead()
        assert (await world.get()).headers[TERM_HEADER] == "3"


async def test_a_fenced_write_ends_the_reign_at_once():
    async with leads() as world:
        scheduler = world.leading.reign.scheduler
        take_from_outside(world.database)
        with pytest.raises(FencedError):
            await scheduler.execute(CreatePool("default", "p", "<Root>", {}), "me")
        assert (await world.get()).status_code == 503
        await world.until(lambda: world.leading.reign is None)
        with pytest.raises(StoreError):
            await scheduler.execute(CreatePool("default", "p", "<Root>", {}), "me")


async def test_after_a_pause_longer_than_the_lease_nothing_is_answered():
    async with leads(LONG_LEASE_S) as world:
        store = world.leading.reign.store
        world.gate.clear()  # no renewal gets through, either
        world.paused_s += LONG_LEASE_S
        assert (await world.get()).status_code == 503
        with pytest.raises(FencedError):
            store.write([])


async def test_an_answer_that_is_ready_after_the_lease_is_none():
    async with leads(LONG_LEASE_S) as world:

        async def pause() -> None:
            world.paused_s += LONG_LEASE_S

        world.on_request = pause
        answer = await world.get()
        assert answer.status_code == 503
        assert answer.json()["error"] == LOST_LEAD
        assert not was_not_done(LOST_LEAD)
        assert TERM_HEADER not in answer.headers


async def test_an_engine_that_hangs_ends_the_reign_and_its_return_begins_one():
    async with leads() as world:
        world.gate.clear()
        await world.until(lambda: world.leading.reign is None)
        assert world.leading.view().role == "standby"
        world.gate.set()
        await world.lead()
        assert (await world.get()).headers[TERM_HEADER] == "2"


async def test_a_standby_that_cannot_ask_is_not_ready():
    async with running() as world:
        world.database.is_down = True
        await world.until(lambda: world.leading.view().error)
        ready = await world.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "refusing")
        told = (await world.get()).json()["error"]
        assert "the store does not respond" in told
        assert "look whether it runs" not in told, "the database's own words may name accounts and hosts"
        world.database.is_down = False
        await world.lead()


async def test_a_state_that_cannot_be_loaded_is_left_to_another_one():
    async with running() as world:
        world.cannot_open = StoreError("too new")
        await world.until(lambda: world.leading.lost_total)
        await world.until(lambda: world.database.lock is None)
        world.cannot_open = None
        await world.lead()


async def test_a_mistake_in_a_reign_ends_the_process():
    world = World(LEASE_S)
    world.cannot_open = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        await world.leading.run(world.stopping)
    world.assert_closed()


async def test_a_mistake_of_the_arbiter_ends_the_process_and_is_not_repeated():
    world = World(LEASE_S)
    calls: list[object] = []

    def take(*arguments: object) -> None:
        calls.append(arguments)
        raise OSError("too many open files")

    world.arbiter.take = take  # type: ignore[method-assign]
    with pytest.raises(OSError, match="too many"):
        await world.leading.run(world.stopping)
    assert len(calls) == 1
    world.assert_closed()
