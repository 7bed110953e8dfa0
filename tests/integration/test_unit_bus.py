"""The connection to systemd, for which a small manager answers on a real bus; ``tests/machine`` has the real one."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dbus_fast import DBusError
from dbus_fast.aio import MessageBus
from dbus_fast.constants import PropertyAccess
from dbus_fast.service import ServiceInterface, dbus_method, dbus_property, dbus_signal
from waiting import wait_until

from cpumond.host.systemd import bus as unit_bus
from cpumond.host.systemd.bus import UnitBus
from cpumond.host.systemd.properties import QUOTA, UnitEvent, object_path

CONFIG = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>session</type>
  <listen>unix:path={path}</listen>
  <policy context="default"><allow own="*"/><allow send_destination="*"/><allow eavesdrop="true"/></policy>
</busconfig>
"""

# The library reads D-Bus types from annotations, which therefore are no types of Python.
# mypy: disable-error-code="valid-type, name-defined, no-untyped-def"
# ruff: noqa: F821, UP037


class Manager(ServiceInterface):
    """Answers as systemd would; ``calls`` are the units that were set, and to what."""

    def __init__(self) -> None:
        super().__init__("org.freedesktop.systemd1.Manager")
        self.calls: list[tuple[str, bool, dict[str, int]]] = []
        self.refusal = self.refused = ""
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.subscribers = self.asked = 0

    @dbus_method()
    async def SetUnitProperties(self, unit: "s", runtime: "b", properties: "a(sv)"):  # type: ignore[no-untyped-def]
        self.asked += 1
        while not self.may_answer.is_set():
            await asyncio.sleep(0.005)
        self.calls.append((unit, runtime, {name: variant.value for name, variant in properties}))
        if self.refusal and unit.startswith(self.refused):
            raise DBusError(self.refusal, "no")

    @dbus_method()
    def Subscribe(self):  # type: ignore[no-untyped-def]
        self.subscribers += 1

    @dbus_method()
    def LoadUnit(self, unit: "s") -> "o":
        return object_path(unit)

    @dbus_signal()
    def Reloading(self, active: bool) -> "b":
        return active

    @dbus_signal()
    def UnitRemoved(self, unit: str) -> "so":
        return [unit, object_path(unit)]


class Unit(ServiceInterface):
    def __init__(self) -> None:
        super().__init__("org.freedesktop.systemd1.Service")
        self.quota = 1_500_000
        self.looks = 0
        self.look_slowly = 0.0

    @dbus_property(access=PropertyAccess.READ)
    async def CPUQuotaPerSecUSec(self) -> "t":
        self.looks += 1
        await asyncio.sleep(self.look_slowly)
        return self.quota


class Systemd:
    """The message bus, and the manager on it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.address = f"unix:path={directory / 'bus'}"
        self.manager = Manager()
        self.unit = Unit()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.start()

    def start(self) -> None:
        (self.directory / "bus.conf").write_text(CONFIG.format(path=self.directory / "bus"))
        self.daemon = subprocess.Popen(
            ["dbus-daemon", f"--config-file={self.directory / 'bus.conf'}", "--nofork", "--print-address"],
            stdout=subprocess.PIPE,
        )
        assert self.daemon.stdout is not None
        self.daemon.stdout.readline()
        asyncio.run_coroutine_threadsafe(self._serve(), self.loop).result(100)

    async def _serve(self) -> None:
        self.bus = await MessageBus(bus_address=self.address).connect()
        self.bus.export("/org/freedesktop/systemd1", self.manager)
        self.bus.export(object_path("a.service"), self.unit)
        while not self.unit.looks:
            await asyncio.sleep(0.001)  # the library looks at what it exports, a moment later
        self.unit.looks = 0
        await self.bus.request_name("org.freedesktop.systemd1")

    def call_manager(self, name: str, argument: Any) -> None:
        self.loop.call_soon_threadsafe(getattr(self.manager, name), argument)

    def stop(self) -> None:
        if self.daemon.poll() is not None:
            return
        self.daemon.kill()
        self.daemon.communicate()
        (self.directory / "bus").unlink(missing_ok=True)
        with contextlib.suppress(EOFError, OSError):  # at its end, or reset with something unread
            asyncio.run_coroutine_threadsafe(self.bus.wait_for_disconnect(), self.loop).result(100)

    def close(self) -> None:
        self.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(100)
        self.loop.close()


class Client:
    """The connection under test, and all its events so far."""

    def __init__(self, address: str) -> None:
        self.bus = UnitBus(lambda: None, address)
        self.events: list[UnitEvent] = []

    def kinds(self) -> list[str]:
        self.events += self.bus.poll()
        return [event.kind for event in self.events]

    def wait_for(self, kind: str, count: int = 1) -> list[UnitEvent]:
        wait_until(lambda: self.kinds().count(kind) >= count, f"{count} x {kind}")
        return [event for event in self.events if event.kind == kind]


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    if shutil.which("dbus-daemon") is None:
        pytest.skip("dbus-daemon is missing; apt-get install dbus-daemon")
    made = Systemd(tmp_path)
    yield made
    made.close()


@pytest.fixture
def client(systemd: Systemd) -> Iterator[Client]:
    made = Client(systemd.address)
    yield made
    made.bus.close()
    assert not made.bus._thread.is_alive()


def limit(value: int) -> tuple[tuple[str, int], ...]:
    return ((QUOTA, value),)


def test_a_unit_is_set_until_the_next_boot(systemd: Systemd, client: Client) -> None:
    client.bus.set("a.service", (*limit(500_000), ("CPUQuotaPeriodUSec", 50_000)))
    [done] = client.wait_for("done")
    assert (done.unit, done.properties) == ("a.service", (*limit(500_000), ("CPUQuotaPeriodUSec", 50_000)))
    assert systemd.manager.calls == [("a.service", True, {QUOTA: 500_000, "CPUQuotaPeriodUSec": 50_000})]
    assert client.kinds()[0] == "connected"


def test_of_a_unit_the_newest_value_counts_and_raises_go_first(systemd: Systemd, client: Client) -> None:
    client.wait_for("connected")
    systemd.manager.may_answer.clear()
    client.bus.set("first.service", limit(1))
    wait_until(lambda: not client.bus._others, "the first one is on its way")
    for value in range(2, 50):
        client.bus.set("a.service", limit(value))
    client.bus.set("b.service", limit(7), urgent=True)
    client.bus.set("dropped.service", limit(8))
    client.bus.drop("dropped.service")
    systemd.manager.may_answer.set()
    assert client.bus.flush(60.0)
    assert [(unit, *values.values()) for unit, _, values in systemd.manager.calls] == [
        ("first.service", 1), ("b.service", 7), ("a.service", 49),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("org.freedesktop.systemd1.NoSuchUnit", "no-unit"),
        ("org.freedesktop.DBus.Error.InvalidArgs", "refused"),
        ("org.freedesktop.DBus.Error.InteractiveAuthorizationRequired", "denied"),
        ("org.freedesktop.DBus.Error.AccessDenied", "denied"),
    ],
)
def test_refusals_are_told(systemd: Systemd, client: Client, error: str, kind: str) -> None:
    systemd.manager.refusal = error
    client.bus.set("a.service", limit(1))
    [event] = client.wait_for(kind)
    assert event.unit == "a.service"


def test_who_may_set_none_asks_seldom_and_can_still_ask_for_values(systemd: Systemd, client: Client) -> None:
    systemd.manager.refusal = "org.freedesktop.DBus.Error.AccessDenied"
    client.bus.set("a.service", limit(1))
    client.wait_for("denied")
    client.bus.set("a.service", limit(2))
    client.bus.ask("a.service", (QUOTA,))
    client.wait_for("answer")
    assert len(systemd.manager.calls) == 1


def test_another_kind_of_unit_that_is_denied_keeps_nobody_waiting(systemd: Systemd, client: Client) -> None:
    """The rule for polkit is about services and scopes; a glob may name a mount, too."""
    systemd.manager.refusal, systemd.manager.refused = "org.freedesktop.DBus.Error.AccessDenied", "home"
    client.bus.set("home.mount", limit(1))
    client.wait_for("refused")
    client.bus.set("a.service", limit(2))
    client.wait_for("done")


def test_in_the_end_one_that_is_denied_keeps_nobody_waiting(systemd: Systemd, client: Client) -> None:
    systemd.manager.refusal, systemd.manager.refused = "org.freedesktop.DBus.Error.AccessDenied", "home"
    client.bus.set("home.service", limit(1))
    client.wait_for("denied")
    client.bus.set("a.service", limit(2))
    assert client.bus.flush(60.0)
    client.wait_for("done")


def test_whatever_the_bus_says_it_is_asked_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply that makes no sense must not leave the limits waiting for an answer for ever."""
    monkeypatch.setattr(unit_bus, "RECONNECT_MAX_S", 0.05)
    client.wait_for("connected")
    real = client.bus._answer

    async def stumble(*_: object) -> None:
        monkeypatch.setattr(client.bus, "_answer", real)
        raise IndexError("list index out of range")

    monkeypatch.setattr(client.bus, "_answer", stumble)
    client.bus.ask("a.service", (QUOTA,))
    assert "IndexError" in client.wait_for("away")[0].text
    client.bus.ask("a.service", (QUOTA,))
    client.wait_for("answer")


LAST = limit(500_000)
"""What the unit was given last."""


def test_a_unit_with_a_foreign_limit_is_not_set_until_that_is_known(systemd: Systemd, client: Client) -> None:
    for value in (4_000_000, 3_000_000):
        client.bus.set("a.service", limit(value), urgent=True, expected=LAST)
        assert client.bus.flush(60.0)
    assert systemd.manager.calls == []
    replaced = client.wait_for("replaced", 2)
    assert [event.properties for event in replaced] == [limit(4_000_000), limit(3_000_000)]
    assert [(event.unit, event.values) for event in replaced] == 2 * [("a.service", {QUOTA: 1_500_000})]
    client.bus.set("a.service", limit(2_000_000), expected=limit(1_500_000))
    client.wait_for("done")
    assert systemd.manager.calls[-1][2] == {QUOTA: 2_000_000}


def test_nothing_is_set_while_somebody_s_order_is_not_known_yet(systemd: Systemd, client: Client) -> None:
    client.wait_for("connected")
    client.bus.set("a.service", limit(400_000), expected=LAST)
    wait_until(lambda: client.bus._events, "theirs is told")
    systemd.unit.quota = 500_000
    client.bus.set("a.service", limit(900_000), urgent=True, expected=LAST)
    assert client.bus.flush(60.0)
    assert systemd.manager.calls == []
    client.wait_for("replaced", 2)
    client.bus.set("a.service", limit(900_000), expected=LAST)
    client.wait_for("done")


def test_a_setting_that_nobody_else_gave_is_set_all_the_same(systemd: Systemd, client: Client) -> None:
    last = (*LAST, ("CPUQuotaPeriodUSec", 50_000), ("CPUWeight", 50))
    client.bus.set("a.service", (*limit(4_000_000), ("CPUQuotaPeriodUSec", 70_000), ("CPUWeight", 100)), expected=last)
    [replaced] = client.wait_for("replaced")
    assert replaced.values == {QUOTA: 1_500_000}
    assert systemd.manager.calls[-1][2] == {"CPUWeight": 100}
    assert client.kinds()[-2:] == ["done", "replaced"]


@pytest.mark.parametrize("quota", [500_000, 600_000, 700_000], ids=["the last one", "a late one", "the next one"])
def test_a_unit_that_has_what_it_was_given_is_set(systemd: Systemd, client: Client, quota: int) -> None:
    systemd.unit.quota = quota
    client.bus.set("a.service", (*limit(700_000), ("CPUQuotaPeriodUSec", 70_000)), expected=(*LAST, *limit(600_000)))
    client.wait_for("done")
    assert "replaced" not in client.kinds()


def test_a_unit_of_which_nothing_is_known_is_not_looked_at(systemd: Systemd, client: Client) -> None:
    client.bus.set("a.service", limit(400_000))
    client.bus.set("b.service", limit(400_000), expected=LAST)
    client.wait_for("done", 2)
    assert systemd.unit.looks == 0


def test_an_old_answer_is_no_reason_to_set(systemd: Systemd, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd was busy, and somebody's order may have waited beside the question."""
    monkeypatch.setattr(unit_bus, "LOOK_FRESH_S", 0.02)
    systemd.unit.look_slowly = 0.05
    client.bus.set("a.service", limit(400_000), expected=limit(1_500_000))
    client.wait_for("done")
    assert systemd.unit.looks == 2


def test_properties_are_asked_for(client: Client) -> None:
    client.bus.ask("a.service", (QUOTA, "NoSuchThing"))
    [answer] = client.wait_for("answer")
    assert (answer.unit, answer.values) == ("a.service", {QUOTA: 1_500_000, "NoSuchThing": None})


def test_signals_of_the_manager(systemd: Systemd, client: Client) -> None:
    wait_until(lambda: systemd.manager.subscribers == 1, "it has subscribed")
    systemd.call_manager("Reloading", True)
    systemd.call_manager("Reloading", False)
    systemd.call_manager("UnitRemoved", "a.service")
    [removed] = client.wait_for("removed")
    assert removed.unit == "a.service"
    assert client.kinds().count("reloaded") == 1


def test_a_bus_that_comes_back_is_told_what_it_missed(systemd: Systemd, client: Client) -> None:
    client.wait_for("connected")
    systemd.stop()
    assert "system bus" in client.wait_for("away")[0].text
    client.bus.set("a.service", limit(3))
    assert not client.bus.flush(0.2)
    systemd.start()
    client.wait_for("done")
    assert systemd.manager.calls[-1] == ("a.service", True, {QUOTA: 3})
    said = [event.text for event in client.events if event.kind == "away"]
    assert len(said) == len(set(said)), "each reason is said once"


def test_no_bus_at_all(tmp_path: Path) -> None:
    client = Client(f"unix:path={tmp_path / 'none'}")
    client.bus.set("a.service", limit(1))
    client.wait_for("away")
    assert not client.bus.flush(30.0), "it does not wait for long"
    client.bus.close()
    assert not client.bus._thread.is_alive()
