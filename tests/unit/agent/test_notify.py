"""What a service manager hears, on a real NOTIFY_SOCKET."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_node import QUICK, CollectedReports, FakeNode, source

from cpumond.agent.notify import Notifier, describe_status
from cpumond.agent.service import Agent
from cpumond.core.answers import ReporterStats
from cpumond.core.wire import Heartbeat, RegistrationAnswer
from cpumond.host.service import read_watchdog_s
from cpumond.testing import FakeClock


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
    assert manager.heard() == [{"READY": "1", "STATUS": "1 job (reclaim), 0.0 of 4.0 cores reclaimed"}]


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
    first, second = manager.heard()
    assert first == {"STOPPING": "1"}
    assert second["STATUS"] == "restoring limits"
    assert int(second["EXTEND_TIMEOUT_USEC"]) >= 20_000_000, "the agent waits for others for that long"


def test_a_long_end_says_at_most_once_a_second_that_it_goes_on(manager: Manager, monkeypatch: pytest.MonkeyPatch):
    at_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: at_s)
    notifier = Notifier(os.environ)
    for _ in range(25):
        notifier.busy()
        at_s += 0.1
    assert [list(message) for message in manager.heard()] == [["EXTEND_TIMEOUT_USEC"]] * 3


def test_each_good_tick_feeds_the_watchdog_and_some_say_the_state(manager: Manager, node: FakeNode):
    notifier = Notifier(os.environ)
    for _ in range(3):
        notifier.tick_done(node.agent)
    first, *rest = manager.heard()
    assert (first["WATCHDOG"], first["STATUS"].split()[0]) == ("1", "1")
    assert rest == [{"WATCHDOG": "1"}] * 2


def test_what_a_reload_changed_is_said_after_the_next_tick(manager: Manager, node: FakeNode):
    notifier = Notifier(os.environ)
    notifier.tick_done(node.agent)
    notifier.reloading()
    notifier.ready(node.agent)
    manager.heard()
    notifier.tick_done(node.agent)
    assert "STATUS" in manager.heard()[0]


def test_a_refused_reload_is_shown_until_one_is_not(manager: Manager, node: FakeNode):
    notifier = Notifier(os.environ)
    notifier.reloading()
    notifier.reload_refused("cpumond.toml: monitor.mode: got 'on'\nexpected one of ...")
    notifier.ready(node.agent)
    notifier.tick_done(node.agent)
    refused = "; the last reload was refused: cpumond.toml: monitor.mode: got 'on' expected one of ..."
    for message in manager.heard()[1:]:
        assert message["STATUS"].endswith(refused)
    notifier.reloading()
    notifier.ready(node.agent)
    assert "refused" not in manager.heard()[1]["STATUS"]


@pytest.mark.parametrize(
    "sentence", ["\U0001f4a5" * 5000, "/etc/\udcff.toml: not valid TOML"], ids=["long", "no Unicode"]
)
def test_any_sentence_reaches_the_manager(manager: Manager, node: FakeNode, sentence: str):
    """systemd drops messages of more than 4096 bytes as a whole, and READY=1 is in this one."""
    notifier = Notifier(os.environ)
    notifier.reload_refused(sentence)
    notifier.ready(node.agent)
    [message] = manager.heard()
    assert message["READY"] == "1"
    assert len(message["STATUS"].encode()) < 4000


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
    assert [message["WATCHDOG"] for message in manager.heard()] == ["1", "1"]
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
    """What cannot be had anyway is not reclaimed: a job that ordered 4 cores and was given 2 counts with those."""
    node.make("b", quota="200000 100000")
    node.agent.rescan_now()
    assert describe_status(node.agent) == "2 jobs (reclaim), 0.0 of 6.0 cores reclaimed"
    node.ticks(3)
    assert describe_status(node.agent) == "2 jobs (reclaim), 4.0 of 6.0 cores reclaimed"
    (node.directory / "run" / "pause").touch()
    node.ticks(1)
    assert describe_status(node.agent) == "2 jobs (reclaim), 4.0 of 6.0 cores reclaimed; writes are paused"
    node.agent.last = node.agent.snapshot = None
    assert describe_status(node.agent) == "starting"


def test_shadow_mode_says_that_nothing_is_written(make_node: Callable[..., FakeNode]):
    """And what it would bring; without any job, why there is none."""
    shadow = QUICK.replace("reclaim", "shadow")
    node = make_node({"a": {}}, config=shadow + source())
    node.make("a", quota="400000 100000")
    node.start().ticks(4)
    expected = "shadow mode: nothing is written; 1 job, 3.5 of 4.0 cores could be reclaimed"
    assert describe_status(node.agent) == expected
    empty = make_node({}, config=shadow).start()
    expected = "shadow mode: nothing is written; no jobs: no [[source]] is configured"
    assert describe_status(empty.agent) == expected


def test_jobs_that_may_not_be_changed_are_not_called_shadow(make_node: Callable[..., FakeNode]):
    node = make_node({"a": {}})
    node.make("a", quota="400000 100000")
    node.agent.config = node.agent.table.config = msgspec.structs.replace(node.agent.config, managed_roots=[])
    node.start()
    assert describe_status(node.agent).startswith("no job may be changed: nothing is written; 1 job, ")


def test_modes_are_counted_when_there_are_several(make_node: Callable[..., FakeNode]):
    node = make_node({"a": {}, "b": {}}, config=QUICK + source("jobs/a") + source("jobs/b", more='mode = "shadow"'))
    for name in ("a", "b"):
        node.make(name, quota="400000 100000")
    node.start()
    assert describe_status(node.agent).startswith("2 jobs (1 reclaim, 1 shadow), ")


class LinkedNode:
    """The scheduler's end of the agent, as far as the line of state reads it."""

    def __init__(
        self, answer: RegistrationAnswer | None, warning: str = "", error: str = "", term: int | None = None
    ) -> None:
        self.registered, self.warning, self.error = answer, warning, error
        self.scheduler = ("http://s:9757", term, 0)

    def stats(self) -> ReporterStats:
        return ReporterStats(last_error=self.error)


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (LinkedNode(None), ": not registered yet"),
        (LinkedNode(RegistrationAnswer("node", "default", 1.0)), ": tree default"),
        (LinkedNode(RegistrationAnswer("node", "default", 1.0), term=7), " (term 7): tree default"),
        (LinkedNode(RegistrationAnswer("node", None, 1.0, warning="no tree fits")), ": no tree fits"),
        (LinkedNode(None, error="connection refused"), ": connection refused"),
    ],
)
def test_the_scheduler_is_in_the_line(node: FakeNode, link: Any, expected: str):
    node.agent.link = link
    node.agent.snapshot = None
    assert describe_status(node.agent).endswith(f"; scheduler http://s:9757{expected}")
    node.agent.link = None


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
    kinds = [kind for message in manager.heard() if (kind := next(iter(message))) != "EXTEND_TIMEOUT_USEC"]
    assert kinds == ["READY", "RELOADING", "READY", "WATCHDOG", "WATCHDOG", "WATCHDOG", "STOPPING"]
    assert [record["event"] for record in logs].count("tick_failed") == 1
    assert agent.totals.ticks == 4
