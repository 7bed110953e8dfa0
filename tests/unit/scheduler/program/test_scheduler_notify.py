"""What a service manager hears from the scheduler, on a real NOTIFY_SOCKET."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpumond.core.wire import NodeRegistration, NodeResources
from cpumond.fairshare.update import FairShareUpdater
from cpumond.host.service import ServiceManager
from cpumond.scheduler.model import Rules
from cpumond.scheduler.program.notify import describe_status, notify_manager, vitals_of
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.settings.commands import CreatePool, CreateTree
from cpumond.scheduler.settings.operations import StartOperation
from cpumond.scheduler.store import StoreError
from cpumond.scheduler.store.sqlite import open_sqlite_store

PERIOD_S = 0.02
WATCHDOG_S = 0.3
Heard = Callable[[], list[dict[str, str]]]
"""Gives the messages since the last look."""


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    """A manager that started us and watches us."""
    ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ear.bind(str(tmp_path / "notify"))
    ear.setblocking(False)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_S * 1e6)))
    monkeypatch.delenv("WATCHDOG_PID", raising=False)

    def look() -> list[dict[str, str]]:
        messages = []
        while True:
            try:
                text = ear.recv(4096).decode()
            except BlockingIOError:
                return messages
            messages.append(dict(line.split("=", 1) for line in text.splitlines()))

    yield look
    ear.close()


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    store = open_sqlite_store(str(tmp_path / "scheduler.db"))
    yield Scheduler(Rules(), store, Clock(), PERIOD_S)
    store.close()


def is_fed(messages: list[dict[str, str]]) -> bool:
    return any("WATCHDOG" in message for message in messages)


class Life:
    """The scheduler's loop and its word to the manager, as tasks of one event loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.stopping = asyncio.Event()

    async def __aenter__(self) -> Life:
        self.running = asyncio.ensure_future(self.scheduler.run(self.stopping))
        await self.scheduler.ready.wait()
        self.telling = asyncio.ensure_future(
            notify_manager(ServiceManager(os.environ), vitals_of(self.scheduler), self.stopping)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stopping.set()
        await asyncio.gather(self.running, self.telling)

    async def wait_updates(self, number: int) -> None:
        """Until so many more updates are done."""
        wanted = self.scheduler.timings.updates + number
        while self.scheduler.timings.updates < wanted:
            await asyncio.sleep(PERIOD_S / 2)

    async def wait_fed(self, heard: Heard) -> None:
        """Until the manager is told that all is well."""
        while not is_fed(heard()):
            await asyncio.sleep(PERIOD_S)

    async def wait_pings(self, number: int = 3) -> None:
        """For as long as so many pings take."""
        await asyncio.sleep(number * WATCHDOG_S / 3)


async def test_a_life_under_a_manager(scheduler: Scheduler, heard: Heard):
    async with Life(scheduler) as life:
        messages = heard()
        while not is_fed(messages):
            await life.wait_pings(1)
            messages += heard()
    messages += heard()
    assert messages[0] == {"READY": "1", "STATUS": "0 operations (0 pending); 0 jobs; 0 nodes (0 online)"}
    assert messages[-1]["STOPPING"] == "1"


async def test_updates_that_all_fail_leave_the_watchdog_hungry(
    scheduler: Scheduler, heard: Heard, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    async with Life(scheduler) as life:
        with monkeypatch.context() as broken:
            broken.setattr(FairShareUpdater, "update", fail)
            await life.wait_updates(2)
            await life.wait_pings(2)  # the last good one may still be seen
            heard()
            await life.wait_pings()
            assert not is_fed(heard())
            assert "an update of fair shares failed" in describe_status(scheduler)
        await life.wait_updates(2)
        await life.wait_fed(heard)


async def test_one_tree_that_fails_does_not_end_the_others(
    scheduler: Scheduler, heard: Heard, monkeypatch: pytest.MonkeyPatch
):
    await scheduler.execute(CreateTree("other", {"nodes_filter": "other"}), "root")
    good = Scheduler._update

    async def fail_one(self: Scheduler, name: str) -> None:
        if name == "default":
            raise ZeroDivisionError("a bug")
        await good(self, name)

    monkeypatch.setattr(Scheduler, "_update", fail_one)
    async with Life(scheduler) as life:
        await life.wait_updates(2)
        heard()
        await life.wait_fed(heard)
    assert scheduler.timings.failed_updates
    assert scheduler.state.trees["other"].update_count


async def test_a_store_that_refuses_is_said_and_does_not_end_the_scheduler(
    scheduler: Scheduler, heard: Heard, monkeypatch: pytest.MonkeyPatch
):
    """A new process would find the same full disk; this one still answers and knows what it knew."""

    def refuse(*_: object) -> None:
        raise StoreError("the disk is full")

    async with Life(scheduler) as life:
        await life.wait_updates(1)
        monkeypatch.setattr(scheduler.store, "write", refuse)
        with pytest.raises(StoreError):
            await scheduler.execute(CreatePool("default", "p", "<Root>", {}), "root")
        await life.wait_updates(2)
        heard()
        await life.wait_fed(heard)
        assert "the store refuses writes" in describe_status(scheduler)
        monkeypatch.undo()


async def test_an_update_that_never_ends_leaves_the_watchdog_hungry(
    scheduler: Scheduler, heard: Heard, monkeypatch: pytest.MonkeyPatch
):
    """Though the event loop goes on and answers."""

    release = asyncio.Event()

    async def stuck(*_: object) -> None:
        await release.wait()

    async with Life(scheduler) as life:
        await life.wait_updates(1)
        monkeypatch.setattr(Scheduler, "_update", stuck)
        await life.wait_pings(2)
        heard()
        await life.wait_pings()
        assert not is_fed(heard())
        release.set()


async def test_updates_may_be_further_apart_than_the_managers_patience(scheduler: Scheduler, heard: Heard):
    scheduler.update_period_s = 1000 * WATCHDOG_S

    async with Life(scheduler) as life:
        await life.wait_pings(1)
        updates = scheduler.timings.updates
        for _ in range(3):
            heard()
            await life.wait_fed(heard)
        assert scheduler.timings.updates == updates


async def test_the_state_in_one_line(scheduler: Scheduler):
    await scheduler.register(NodeRegistration("n1", "i1", NodeResources(cpu=4.0, memory=2**34)))
    spec = {"pool": "p", "tasks": {"t": {"job_count": 1, "command": "true"}}}
    await scheduler.execute(StartOperation(spec), "root")
    assert describe_status(scheduler) == "1 operation (0 pending); 0 jobs; 1 node (1 online)"
