"""systemd over the system bus, in its own thread: properties of units are set and queried without waiting.

Imported only when a unit's limit is set, because the library costs time and memory."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from cpumond.host.systemd.connection import (
    DENIED,
    LOST,
    MANAGER,
    RECONNECT_FIRST_S,
    RECONNECT_MAX_S,
    RULES,
    SYSTEMD,
    BusAway,
    BusConnection,
    Refused,
)
from cpumond.host.systemd.properties import QUOTA, WEIGHT, UnitEvent, UnitProperties, object_path

AWAY_PATIENCE_S = 2.0
"""Maximum seconds for which ``flush`` waits for an unreachable bus."""
DENIED_PAUSE_S = 60.0
PAUSE_RATIO = 9.0
"""After a call without urgency, pause for its duration times this: the agent takes at most a tenth of PID 1's time."""
PAUSE_MIN_S = 0.005
PAUSE_MAX_S = 1.0

LOOK_FRESH_S, LOOK_PAUSE_S = 0.05, 0.2
"""A unit is looked up before it is set. If the response takes longer than LOOK_FRESH_S, systemd was busy, mostly with a
reload: look again after LOOK_PAUSE_S, in which systemd serves other waiting callers."""
MANAGED = (".service", ".scope")
"""Kinds of units that the polkit rule names. If another kind is denied, these may still be allowed."""
_NO_UNIT = ("NoSuchUnit", "UnknownObject")
_UNIT_RULES = (*RULES, f"sender='{SYSTEMD}',interface='{MANAGER}',member='UnitRemoved'")

Setting = tuple[UnitProperties, UnitProperties]
"""The new properties of a unit, and the properties that it may have before they are set."""


class UnitBus:
    """Sets properties of units. If values for a unit come faster than systemd sets them, the newest counts.

    A unit is looked up before it is set: if a property has an unexpected value, another program set it. Then there is
    an event ``replaced``, and the property is not set until ``poll`` has returned this event.

    All methods are called by a single thread, not the bus thread, and return at once, except ``flush`` and ``close``.
    The bus thread calls ``wake`` after it added an event. ``address`` "" is the system bus."""

    def __init__(self, wake: Callable[[], None], address: str = "") -> None:
        self._wake = wake
        self._bus = BusConnection(self._on_signal, address)
        self._events: collections.deque[UnitEvent] = collections.deque()
        self._lock = threading.Lock()
        self._raises: dict[str, Setting] = {}
        self._others: dict[str, Setting] = {}
        self._questions: dict[tuple[str, tuple[str, ...]], None] = {}
        self._unreported: dict[str, set[str]] = {}
        """Unit -> properties that another program has set, in events that ``poll`` has not returned yet."""
        self._busy = False
        self._hurry = False
        self._closing = False
        self._idle = threading.Condition(self._lock)
        # The following attributes are used only by the bus thread.
        self._away_since_s = math.inf
        self._denied_until_s = 0.0
        self._subscribed = False
        self._set_s = 0.0
        """Duration of the newest call to set, in seconds."""
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="unit-bus", daemon=True)
        self._thread.start()

    def set(self, unit: str, properties: UnitProperties, urgent: bool = False, expected: UnitProperties = ()) -> None:
        """Make systemd set a unit's properties (SetUnitProperties, runtime); ``urgent`` ones before others.

        ``expected``: values that the unit may have now, if needed several per property; others are not checked."""
        with self._lock:
            self._others.pop(unit, None)
            self._raises.pop(unit, None)
            (self._raises if urgent else self._others)[unit] = properties, expected
        self._kick()

    def drop(self, unit: str) -> None:
        """Cancel what ``set`` requested for a unit, unless it was sent to systemd already."""
        with self._lock:
            self._unreported.pop(unit, None)
            self._others.pop(unit, None)
            self._raises.pop(unit, None)

    def ask(self, unit: str, names: tuple[str, ...]) -> None:
        """Ask for properties of a unit, which may be general ones or those of the unit's kind."""
        with self._lock:
            self._questions[unit, names] = None
        self._kick()

    def poll(self) -> list[UnitEvent]:
        with self._lock:
            events = [self._events.popleft() for _ in range(len(self._events))]
            self._unreported.clear()
        return events

    def flush(self, timeout_s: float) -> bool:
        """Wait until systemd has responded to everything; return False on timeout, or if systemd is unreachable."""
        end_s = time.monotonic() + timeout_s
        with self._lock:
            self._hurry = True
        self._kick()
        with self._lock:
            while self._raises or self._others or self._questions or self._busy:
                now_s = time.monotonic()
                if now_s >= end_s or now_s - self._away_since_s > AWAY_PATIENCE_S:
                    return False
                self._idle.wait(min(end_s - now_s, AWAY_PATIENCE_S / 4))
        return True

    def close(self, timeout_s: float = 1.0) -> None:
        with self._lock:
            self._closing = True
        self._kick()
        self._thread.join(timeout_s)

    def _kick(self) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(self._news.set)

    def _emit(self, event: UnitEvent) -> None:
        self._events.append(event)
        self._wake()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()

    async def _live(self) -> None:
        pause_s = RECONNECT_FIRST_S
        said = ""
        while not self._closing:
            try:
                await self._bus.connect(_UNIT_RULES)
            except BusAway as error:
                self._away_since_s = min(self._away_since_s, time.monotonic())
                if str(error) != said:
                    said = str(error)
                    self._emit(UnitEvent("away", text=said))
                await self._wait_for_news(pause_s)
                pause_s = min(2 * pause_s, RECONNECT_MAX_S)
                continue
            said, pause_s, self._away_since_s = "", RECONNECT_FIRST_S, math.inf
            self._denied_until_s = 0.0
            self._subscribed = False
            self._emit(UnitEvent("connected"))
            try:
                await self._serve()
            except BusAway as error:
                said = str(error)
                self._emit(UnitEvent("away", text=said))
            except Exception as error:
                # The thread must go on, or the tick would wait for responses forever.
                said = f"the connection to the system bus failed: {type(error).__name__}: {error}"
                self._emit(UnitEvent("away", text=said))
                await self._wait_for_news(RECONNECT_MAX_S)
            finally:
                self._bus.disconnect()

    async def _wait_for_news(self, timeout_s: float) -> None:
        """Sleep until the timeout or ``close``; not until ``set``, or a lost bus would be tried all the time."""
        end_s = time.monotonic() + timeout_s
        while not self._closing and (left_s := end_s - time.monotonic()) > 0.0:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._news.wait()

    def _on_signal(self, member: str, path: str, body: list[Any]) -> None:
        if member == "Reloading" and not body[0]:
            self._emit(UnitEvent("reloaded"))
        elif member == "UnitRemoved":
            self._emit(UnitEvent("removed", str(body[0])))
        elif member == "NameOwnerChanged" and body[2]:
            # systemd executed itself again (daemon-reexec): it needs a new subscription, and has reloaded its units.
            self._subscribed = False
            self._emit(UnitEvent("reloaded"))
            self._news.set()

    async def _serve(self) -> None:
        """Process the queue until the end. Raises BusAway."""
        lost = self._bus.wait_for_loss()
        lost.add_done_callback(self._on_lost)
        while not self._closing:
            if lost.done():
                raise BusAway(LOST)
            self._news.clear()
            if not self._subscribed:
                self._subscribed = True
                await self._bus.subscribe()
            began_s = time.monotonic()
            waits = 0.0 if self._hurry else self._denied_until_s - began_s
            if await self._do_one(denied=waits > 0.0):
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(waits if waits > 0.0 else None):
                    await self._news.wait()
        lost.cancel()

    def _on_lost(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled():
            done.exception()  # retrieves the exception, which asyncio would log
        self._news.set()

    async def _do_one(self, denied: bool) -> bool:
        """Process the next item of the queue; return False if there is none. Raises BusAway."""
        with self._lock:
            self._busy = False
            urgent = bool(self._raises) and not denied
            question = None if urgent else next(iter(self._questions), None)
            queue = self._raises or self._others
            unit = next(iter(queue), None) if not denied else None
            if question is not None:
                del self._questions[question]
            elif unit is not None:
                setting = queue.pop(unit)
            else:
                self._idle.notify_all()
                return False
            self._busy = True
        if question is not None:
            await self._answer(*question)
            return True
        assert unit is not None
        self._set_s = 0.0
        try:
            await self._set(unit, *setting)
        except BusAway:
            with self._lock:
                if unit not in self._raises and unit not in self._others:
                    (self._raises if urgent else self._others)[unit] = setting
                self._busy = False
            raise
        if not (urgent or self._hurry):
            await asyncio.sleep(min(max(PAUSE_RATIO * self._set_s, PAUSE_MIN_S), PAUSE_MAX_S))
        return True

    async def _set(self, unit: str, properties: UnitProperties, expected: UnitProperties) -> None:
        """Set those properties of a unit that no other program has set. Raises BusAway."""
        replaced = await self._find_replaced(unit, properties, expected)
        rest = tuple(each for each in properties if not each[0].startswith(tuple(map(family, replaced))))
        if rest:
            await self._set_now(unit, rest)
        if replaced:
            with self._lock:
                self._unreported.setdefault(unit, set()).update(replaced)
                self._events.append(UnitEvent("replaced", unit, properties, values=replaced))
            self._wake()

    async def _set_now(self, unit: str, properties: UnitProperties) -> None:
        """Set properties of a unit. Raises BusAway."""
        began_s = time.monotonic()
        kind, text = "done", ""
        try:
            await self._bus.set_properties(unit, [(name, "t", value) for name, value in properties])
            self._set_s = time.monotonic() - began_s
        except Refused as refused:
            kind, text = ("no-unit", "") if refused.name in _NO_UNIT else ("refused", refused.text)
            if refused.name in DENIED and unit.endswith(MANAGED):
                # Other units would be refused, too. But a polkit rule may appear, so one unit is tried every minute.
                self._denied_until_s = time.monotonic() + DENIED_PAUSE_S
                kind = "denied"
        self._emit(UnitEvent(kind, unit, properties, text=text))

    async def _find_replaced(
        self, unit: str, properties: UnitProperties, expected: UnitProperties
    ) -> dict[str, object]:
        """Return name -> value of properties that another program has set. Raises BusAway.

        The bus has no compare-and-set, so a value that is set between this check and the call is overwritten."""
        with self._lock:
            unreported = frozenset(self._unreported.get(unit, ()))
        names = unreported | (dict(expected).keys() & {QUOTA, WEIGHT})
        wanted = [name for name, _ in properties if name in names]
        replaced: dict[str, object] = {}
        if not wanted:
            return replaced
        for pause_s in (0.0,) if self._hurry else (0.0, LOOK_PAUSE_S):
            await asyncio.sleep(pause_s)
            began_s = time.monotonic()
            for name in wanted:
                with contextlib.suppress(Refused):
                    value = await self._bus.get(_interface(unit), name, object_path(unit))
                    if name in unreported or (name, value) not in (*expected, *properties):
                        replaced[name] = value
            if replaced or time.monotonic() - began_s < LOOK_FRESH_S:
                break
        return replaced

    async def _answer(self, unit: str, names: tuple[str, ...]) -> None:
        """Query properties of a unit and add an event with their values. Raises BusAway."""
        values: dict[str, object] = dict.fromkeys(names)
        with contextlib.suppress(Refused):
            path = (await self._bus.call("LoadUnit", "s", unit))[0]
            for name in names:
                for interface in (_interface(unit), f"{SYSTEMD}.Unit"):
                    with contextlib.suppress(Refused):
                        values[name] = await self._bus.get(interface, name, path)
                        break
        self._emit(UnitEvent("answer", unit, values=values))


def _interface(unit: str) -> str:
    return f"{SYSTEMD}.{unit.rpartition('.')[2].capitalize()}"


def family(name: str) -> str:
    """Return the common prefix of the names of all properties of one setting."""
    return "CPUQuota" if name.startswith("CPUQuota") else name
