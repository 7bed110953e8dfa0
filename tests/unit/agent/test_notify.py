"""What a service manager hears, on a real NOTIFY_SOCKET."""

import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_node import QUICK, CollectedReports, FakeClock, FakeNode, source

from cpumond.agent.notify import Notifier, describe_status
from cpumond.agent.service import Agent
from cpumond.core.answers import ReporterStats
from cpumond.core.wire import Heartbeat, RegistrationAnswer
from cpumond.host.service import ServiceManager, read_watchdog_s
from cpumond.testing import v2_cgroup


class Manager:
    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._socket.setblocking(False)

    def heard(self) -> list[dict[str, str]]:
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


def test_ready_the_ticks_and_the_end(manager: Manager, node: FakeNode):
    """The first tick after READY, at the start and after a reload, says the state."""
    notifier = Notifier(os.environ)
    state = "1 job (reclaim), 0.0 of 4.0 cores reclaimed"
    for _ in range(2):
        notifier.ready(node.agent)
        for _ in range(3):
            notifier.tick_done(node.agent)
        assert manager.heard() == [
            {"READY": "1", "STATUS": state}, {"WATCHDOG": "1", "STATUS": state}, {"WATCHDOG": "1"}, {"WATCHDOG": "1"},
        ]  # fmt: skip
        before_us = time.monotonic_ns() // 1000
        notifier.reloading()
        [message] = manager.heard()
        assert message["RELOADING"] == "1"
        assert before_us <= int(message["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000, "notify-reload needs it"
    notifier.stopping()
    first, second = manager.heard()
    assert (first, second["STATUS"]) == ({"STOPPING": "1"}, "restoring limits")
    assert int(second["EXTEND_TIMEOUT_USEC"]) >= 20_000_000, "the agent waits for others for that long"


def test_a_long_end_says_at_most_once_a_second_that_it_goes_on(manager: Manager, monkeypatch: pytest.MonkeyPatch):
    at_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: at_s)
    notifier = Notifier(os.environ)
    for _ in range(25):
        notifier.busy()
        at_s += 0.1
    assert [list(message) for message in manager.heard()] == [["EXTEND_TIMEOUT_USEC"]] * 3


@pytest.mark.parametrize(
    ("environment", "sent"), [({}, r"unit a\x2db.service"), ({"SYSTEMD_EXEC_PID": "1"}, r"unit a\\x2db.service")]
)
def test_backslashes_are_doubled_where_systemd_takes_them_off(manager: Manager, environment: dict[str, str], sent: str):
    """Since 246 it shows a doubled one as one, and a single one not at all."""
    ServiceManager({"NOTIFY_SOCKET": manager.path, **environment}).notify(status=r"unit a\x2db.service")
    assert manager.heard() == [{"STATUS": sent}]


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


def test_the_watchdog_is_fed_after_a_good_tick(manager: Manager, node: FakeNode, monkeypatch: pytest.MonkeyPatch):
    """READY, after the first tick and after a reload, makes no bad tick good."""
    monkeypatch.setenv("WATCHDOG_USEC", "3")  # a ping is due at once
    notifier = Notifier(os.environ)
    events = {
        "ready": lambda: notifier.ready(node.agent), "good": lambda: notifier.tick_done(node.agent),
        "bad": notifier.tick_failed, "end": notifier.stopping, "": lambda: None,
    }  # fmt: skip
    fed = []
    for event in ("", "ready", "good", "bad", "ready", "good", "end"):
        events[event]()
        manager.heard()
        notifier.ping()
        fed.append(manager.heard() == [{"WATCHDOG": "1"}])
    assert fed == [False, True, True, False, False, True, False]
    monkeypatch.setenv("WATCHDOG_USEC", str(3600 * 10**6))
    patient = Notifier(os.environ)
    assert patient.ping_period_s == 1200.0
    patient.tick_done(node.agent)
    manager.heard()
    patient.ping()
    assert manager.heard() == [], "a third of the time has not passed"


@pytest.mark.parametrize(("environment", "seconds"), [
    ({}, math.inf),
    ({"WATCHDOG_USEC": "10000000"}, 10.0),
    ({"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": str(os.getpid())}, 10.0),
    ({"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": "1"}, math.inf),
    ({"WATCHDOG_USEC": "0"}, math.inf),
    ({"WATCHDOG_USEC": "soon"}, math.inf),
])  # fmt: skip
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
    node.agent.context.last = node.agent.context.due.snapshot = None
    assert describe_status(node.agent) == "starting"


SHADOW = QUICK.replace("reclaim", "shadow")
MIXED = QUICK + source("jobs/a") + source("jobs/b", more='mode = "shadow"')


@pytest.mark.parametrize(("config", "managed_roots", "status"), [
    (SHADOW + source("jobs/a"), ["jobs"],
     "shadow mode: nothing is written; 1 job, 3.5 of 4.0 cores could be reclaimed"),
    (SHADOW, ["jobs"], "shadow mode: nothing is written; no jobs: no [[source]] is configured"),
    (QUICK + source("jobs/a"), [], "no job's limit may be changed: nothing is written; 1 job, "),
    (MIXED, ["jobs"], "2 jobs (1 reclaim, 1 shadow), "),
])  # fmt: skip
def test_why_less_is_written_is_in_the_line(
    make_node: Callable[..., FakeNode], config: str, managed_roots: list[str], status: str
):
    node = make_node({name: v2_cgroup(quota="400000 100000") for name in ("a", "b")}, config=config)
    agent = node.agent
    agent.context.use_config(msgspec.structs.replace(agent.config, managed_roots=managed_roots))
    node.start().ticks(4)
    assert describe_status(agent).startswith(status)


class LinkedNode:
    """The scheduler's end of the agent, as far as the line of state reads it."""

    def __init__(
        self, answer: RegistrationAnswer | None, warning: str = "", error: str = "", term: int | None = None
    ) -> None:
        self.registered, self.warning, self.error = answer, warning, error
        self.scheduler = ("http://s:9757", term, 0)

    def stats(self) -> ReporterStats:
        return ReporterStats(last_error=self.error)


@pytest.mark.parametrize(("link", "expected"), [
    (LinkedNode(None), ": not registered yet"),
    (LinkedNode(RegistrationAnswer("node", "default", 1.0)), ": tree default"),
    (LinkedNode(RegistrationAnswer("node", "default", 1.0), term=7), " (term 7): tree default"),
    (LinkedNode(RegistrationAnswer("node", None, 1.0, warning="no tree fits")), ": no tree fits"),
    (LinkedNode(None, error="connection refused"), ": connection refused"),
])  # fmt: skip
def test_the_scheduler_is_in_the_line(node: FakeNode, link: Any, expected: str):
    node.agent.context.link = link
    node.agent.context.due.snapshot = None
    assert describe_status(node.agent).endswith(f"; scheduler http://s:9757{expected}")
    node.agent.context.link = None


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
        self._agent.context.stopping |= len(self.heartbeats) == 5


def test_a_life_under_a_manager(manager: Manager, make_node: Callable[..., FakeNode], logs: list[dict[str, Any]]):
    """Fed after good ticks only; a reload is RELOADING, then READY again; STOPPING at the end."""
    node = make_node({"a": {}}, config=QUICK + source() + "[report]\nreport_period = 1\n")
    agent = node.agent
    agent.clock = clock = HurryingClock()  # type: ignore[assignment]
    clock.agent = agent
    node.reports = agent.context.reporter = TroubledReports(agent)
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
    assert agent.context.totals.ticks == 4
