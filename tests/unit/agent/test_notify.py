"""What a service manager hears, on a real NOTIFY_SOCKET."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_node import QUICK, CollectedReports, FakeNode, source

from cpumond.agent.loop import Agent
from cpumond.agent.notify import Notifier, describe_status
from cpumond.process import read_watchdog_s
from cpumond.testing import FakeClock
from cpumond.wire import Heartbeat


class Manager:
    """The manager's end of the socket."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._socket.setblocking(False)

    def heard(self) -> list[dict[str, str]]:
        """The messages since the last look; a message has arrived when its sender goes on."""
        messages = []
        while True:
            try:
                text = self._socket.recv(4096).decode()
            except BlockingIOError:
                return messages
            messages.append(dict(line.split("=", 1) for line in text.splitlines()))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    """A manager that started us, without a watchdog."""
    manager = Manager(tmp_path / "notify")
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NOTIFY_SOCKET", manager.path)
    yield manager
    manager.close()


@pytest.fixture
def node(make_node: Callable[..., FakeNode]) -> FakeNode:
    node = make_node({"a": {}})
    node.make("a", quota="400000 100000")
    return node.start()


def test_ready_says_the_state(manager: Manager, node: FakeNode):
    Notifier(os.environ).ready(node.agent)
    assert manager.heard() == [{"READY": "1", "STATUS": "1 jobs (reclaim), 4.0 cores ordered, 4.0 limit"}]


def test_reloading_carries_the_monotonic_time(manager: Manager):
    """Type=notify-reload takes only a RELOADING=1 with the time at which the reload began."""
    before_us = time.monotonic_ns() // 1000
    Notifier(os.environ).reloading()
    after_us = time.monotonic_ns() // 1000
    message = manager.heard()[0]
    assert message["RELOADING"] == "1"
    assert before_us <= int(message["MONOTONIC_USEC"]) <= after_us


def test_stopping(manager: Manager):
    Notifier(os.environ).stopping()
    assert manager.heard() == [{"STOPPING": "1", "STATUS": "restoring limits"}]


def test_each_good_tick_feeds_the_watchdog_and_some_say_the_state(manager: Manager, node: FakeNode):
    notifier = Notifier(os.environ)
    for _ in range(3):
        notifier.tick_done(node.agent)
    first, *rest = manager.heard()
    assert (first["WATCHDOG"], first["STATUS"].split()[0]) == ("1", "1")
    assert rest == [{"WATCHDOG": "1"}] * 2


def test_the_watchdog_goes_hungry_after_a_bad_tick(manager: Manager, node: FakeNode, monkeypatch: pytest.MonkeyPatch):
    """WATCHDOG=1 only after a good tick; between two ticks only while the last one was good."""
    monkeypatch.setenv("WATCHDOG_USEC", "3")  # a ping is due at once
    notifier = Notifier(os.environ)
    notifier.ping()
    assert manager.heard() == [], "before the first tick"
    notifier.tick_done(node.agent)
    manager.heard()
    notifier.ping()
    assert manager.heard() == [{"WATCHDOG": "1"}]
    notifier.tick_failed()
    notifier.ping()
    assert manager.heard() == []
    notifier.ready(node.agent)  # a reload says READY again, which makes no bad tick good
    manager.heard()
    notifier.ping()
    assert manager.heard() == []
    notifier.tick_done(node.agent)
    notifier.ping()
    assert manager.heard() == [{"WATCHDOG": "1"}] * 2
    notifier.stopping()
    manager.heard()
    notifier.ping()
    assert manager.heard() == []


def test_a_long_first_period_does_not_starve_the_watchdog(
    manager: Manager, node: FakeNode, monkeypatch: pytest.MonkeyPatch
):
    """The first tick comes before READY; the second may be further away than the manager's patience."""
    monkeypatch.setenv("WATCHDOG_USEC", "3")
    notifier = Notifier(os.environ)
    notifier.ready(node.agent)
    manager.heard()
    notifier.ping()
    assert manager.heard() == [{"WATCHDOG": "1"}]


def test_a_ping_waits_for_a_third_of_the_watchdogs_time(
    manager: Manager, node: FakeNode, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WATCHDOG_USEC", str(3600 * 10**6))
    notifier = Notifier(os.environ)
    assert notifier.ping_period_s == 1200.0
    notifier.tick_done(node.agent)
    manager.heard()
    notifier.ping()
    assert manager.heard() == []


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, math.inf),
        ({"WATCHDOG_USEC": "10000000"}, 10.0),
        ({"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": str(os.getpid())}, 10.0),
        ({"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": "1"}, math.inf),
        ({"WATCHDOG_USEC": "0"}, math.inf),
        ({"WATCHDOG_USEC": "soon"}, math.inf),
    ],
)
def test_the_watchdog_of_another_process_is_not_ours(environment, seconds):
    assert read_watchdog_s(environment) == seconds


def test_without_a_manager_nothing_is_sent(manager: Manager, node: FakeNode):
    """What counts is the environment that is given, not that of the process."""
    notifier = Notifier({"WATCHDOG_USEC": "1"})
    notifier.ready(node.agent)
    notifier.reloading()
    notifier.tick_done(node.agent)
    notifier.ping()
    notifier.stopping()
    assert manager.heard() == []
    assert notifier.ping_period_s == math.inf


def test_a_manager_that_is_gone_does_not_stop_the_agent(manager: Manager, node: FakeNode):
    notifier = Notifier(os.environ)
    manager.close()
    os.unlink(manager.path)
    notifier.ready(node.agent)
    notifier.tick_done(node.agent)
    notifier.stopping()


def test_the_state_in_one_line(node: FakeNode):
    (node.directory / "run" / "pause").touch()
    node.make("b", quota="200000 100000")
    node.ticks(2)
    assert describe_status(node.agent) == "2 jobs (reclaim), 8.0 cores ordered, 6.0 limit, writes paused"
    node.agent.last = node.agent._snapshot = None
    assert describe_status(node.agent) == "starting"


class HurryingClock(FakeClock):
    """A clock on which a quarter of a second passes at each look; it also ends the agent's wait."""

    def __init__(self) -> None:
        super().__init__()
        self.agent: Agent | None = None

    def monotonic_s(self) -> float:
        self.advance(0.25)
        if self.agent is not None:
            self.agent.wake()
        return super().monotonic_s()


class TroubledReports(CollectedReports):
    """The third heartbeat breaks the tick it belongs to, the fifth ends the agent."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent

    def submit(self, heartbeat: Heartbeat) -> None:
        super().submit(heartbeat)
        if len(self.heartbeats) == 3:
            raise RuntimeError("a tick that fails")
        self._agent.stopping |= len(self.heartbeats) == 5


def test_a_life_under_a_manager(manager: Manager, make_node: Callable[..., FakeNode], logs: list[dict[str, Any]]):
    """Fed after good ticks only; a reload is RELOADING, then READY again; STOPPING at the end."""
    node = make_node({"a": {}}, config=QUICK + source() + "[report]\nreport_period = 1\n")
    agent = node.agent
    agent.clock = clock = HurryingClock()  # type: ignore[assignment]
    clock.agent = agent
    node.reports = agent.reporter = TroubledReports(agent)
    agent.notifier = Notifier(os.environ)
    agent.start()
    agent.notifier.ready(agent)
    agent.reload = lambda: agent.config
    agent.reloading = True
    agent.run()
    agent.close()
    kinds = [next(iter(message)) for message in manager.heard()]
    assert kinds == ["READY", "RELOADING", "READY", "WATCHDOG", "WATCHDOG", "WATCHDOG", "STOPPING"]
    assert [record["event"] for record in logs].count("tick_failed") == 1
    assert agent.totals.ticks == 4
