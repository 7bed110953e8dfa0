"""What a service manager hears from the scheduler; ``ServiceManager`` itself is tested in host/test_service.py."""

import asyncio
from typing import cast

import pytest
from watched_store import Watched, start

from cpumond.core.wire import NodeRegistration, NodeResources
from cpumond.host.service import ServiceManager
from cpumond.scheduler.program.notify import Vitals, describe_status, notify_manager, vitals_of
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.settings.commands import CreateTree


class Manager:
    listens, watchdog_s = True, 0.003

    def __init__(self) -> None:
        self.heard: list[tuple[str, ...]] = []

    def notify(self, *lines: str, status: str = "") -> None:
        self.heard.append((*lines, status))


@pytest.mark.parametrize(
    ("pulses", "period_s", "pings"),
    [("1234", 0.0, 4), ("1223", 0.0, 3), ("1111", 0.0, 1), ("1111", 1e9, 4)],
    ids=["all is well", "one update took long", "no update ends", "updates further apart than the manager's patience"],
)
async def test_the_watchdog_is_fed_while_the_pulse_changes_within_its_period(pulses, period_s, pings):
    manager, stopping, beats = Manager(), asyncio.Event(), [*pulses]

    def pulse() -> str:
        if len(beats) == 1:
            stopping.set()
        return beats.pop(0)

    await notify_manager(cast("ServiceManager", manager), Vitals(lambda: "well", pulse, period_s), stopping)
    first, *between, last = manager.heard
    assert (first, last) == (("READY=1", "well"), ("STOPPING=1", "answering the last requests"))
    assert between == [("WATCHDOG=1", "")] * pings


FAILED = "; an update of fair shares failed, see the journal"
REFUSED = "; the store refuses writes, so commands fail, see"


@pytest.mark.parametrize(
    ("fails", "is_good", "words"),
    [("nothing", True, ""), ("one tree", True, FAILED), ("all trees", False, FAILED), ("the store", True, REFUSED)],
)
async def test_the_pulse_changes_with_an_update_unless_it_fails_in_all_trees(
    scheduler: Scheduler, store: Watched, monkeypatch: pytest.MonkeyPatch, fails: str, is_good: bool, words: str
):
    """Where the store refuses, a new process would find the same full disk; this one still answers."""
    await scheduler.execute(CreateTree("other", {"nodes_filter": "other"}), "root")
    vitals, update = vitals_of(scheduler), Scheduler._update
    before = vitals.pulse()

    async def fail_some(self: Scheduler, name: str) -> None:
        assert vitals.pulse() == before, "not before its end"
        if fails == "all trees" or (fails, name) == ("one tree", "default"):
            raise ZeroDivisionError("a bug")
        await update(self, name)

    monkeypatch.setattr(Scheduler, "_update", fail_some)
    store.refusing = fails == "the store"
    await scheduler.update_all()
    assert (vitals.pulse() != before) == is_good
    assert bool(scheduler.state.trees["other"].update_count) == is_good
    told = vitals.describe().removeprefix("0 operations (0 pending); 0 jobs; 0 nodes (0 online)")
    assert words in told if words else told == ""


async def test_the_state_in_one_line(scheduler: Scheduler):
    await scheduler.register(NodeRegistration("n1", "i1", NodeResources(cpu=4.0, memory=2**34)))
    await scheduler.execute(start(jobs=1), "root")
    assert describe_status(scheduler) == "1 operation (0 pending); 0 jobs; 1 node (1 online)"
    assert vitals_of(scheduler).period_s == scheduler.update_period_s
