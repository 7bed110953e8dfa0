"""What systemd is told of the limits of units, and what it told us; the tick's side of ``cgroup.unit_bus``.

The kernel's file is written first, by ``writer``: that holds at once. Then systemd is brought to want the same, so that
``daemon-reload`` and a restart of the unit keep it. No unit, no thread: the bus is opened when a unit is first set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from cpumond.cgroup.settings import CpuSettings
from cpumond.cgroup.systemd import (
    DEFAULT_WEIGHT,
    NO_LIMIT,
    QUOTA,
    WEIGHT,
    UnitEvent,
    UnitProperties,
    is_booted,
    is_quota,
    list_properties,
    shares_of,
    unit_of,
)
from cpumond.units import MIN_QUOTA_US

if TYPE_CHECKING:
    from cpumond.cgroup.unit_bus import UnitBus

log = structlog.get_logger("cpumond.agent")

LATE_S = 2.0
"""systemd answers before it writes the cgroup's file; longer than this after its answer it is not our value."""
KEPT_ORDERS = 8
MAX_LABEL = 200
"""Characters of a unit's property that is shown."""
PROPERTIES: Final = {"quota": QUOTA, "weight": WEIGHT}
"""What systemd calls the setting that an actuator moves."""
POLKIT_ADVICE: Final = (
    "install polkitd and the rule cpumond.rules, or run the agent as root; limits are set by file alone"
)


def _open_bus() -> UnitBus:
    from cpumond.cgroup.unit_bus import UnitBus  # costs memory that only agents with units pay

    return UnitBus(lambda: None)


class Order:
    """What one unit was told: ``wanted`` is the newest, ``older`` may still be on their way, ``believed`` is the one
    that systemd took last, however long ago."""

    __slots__ = ("believed", "held", "older", "sent", "settled_at_s", "told", "wanted")

    def __init__(self) -> None:
        self.wanted: UnitProperties = ()
        self.believed: UnitProperties = ()
        self.older: list[UnitProperties] = []
        self.settled_at_s: float | None = None
        self.told = False
        """systemd took at least one of them."""
        self.sent = False
        """It may have: the bus was not known to be away."""
        self.held = False
        """The newest was not set, since somebody was faster."""


class UnitLimits:
    """The units of this host as the agent orders them. For the thread of the tick.

    ``problem`` says why units are set by file alone, "" while they need not be. ``booted``: systemd is PID 1 here.
    """

    def __init__(
        self,
        cpu_version: int,
        monotonic_s: Callable[[], float],
        booted: bool | None = None,
        open_bus: Callable[[], UnitBus] | None = None,
    ) -> None:
        self.problem = ""
        self._cpu_version = cpu_version
        self._monotonic_s = monotonic_s
        self._booted = is_booted() if booted is None else booted
        self._open_bus = open_bus or _open_bus
        self._bus: UnitBus | None = None
        self._missing = False
        self._away = False
        self._denied = False
        self._orders: dict[str, Order] = {}
        self._refusals: dict[str, str] = {}

    def name_unit(self, path: str) -> str:
        """The unit whose cgroup is at ``path``; "" where it is none, or systemd is not PID 1 here."""
        return unit_of(path) if self._booted else ""

    @property
    def can_ask(self) -> bool:
        """Whether systemd can be asked; it answers, or is said to be away."""
        return self._booted and not (self._missing or self._away)

    @property
    def can_set(self) -> bool:
        """Whether systemd takes what it is told, as far as is known."""
        return self._booted and not (self._denied or self._missing)

    def _open(self) -> UnitBus | None:
        if self._bus is None and not self._missing:
            try:
                self._bus = self._open_bus()
            except ImportError as error:
                self._missing = True
                self._say(f"the library for the system bus is missing ({error})", "pip install dbus-fast")
        return self._bus

    def want(self, unit: str, settings: CpuSettings, actuators: tuple[str, ...], urgent: bool = False) -> None:
        """Have systemd want ``settings`` for a unit; ``urgent`` before others, for more CPU."""
        if not self._booted:
            return
        properties = list_properties(settings, actuators, self._cpu_version)
        order = self._orders.get(unit) or Order()
        if order.settled_at_s is None:
            # What systemd was not told yet, of another actuator, is still to be told.
            properties = _complete(properties, order.wanted)
        if (order.wanted == properties and not order.held) or not properties:
            return
        self._orders[unit] = order
        self._forget_older(order)
        if order.wanted and not order.held:
            order.older = [*order.older, order.wanted][-KEPT_ORDERS:]
        order.wanted, order.settled_at_s, order.held = properties, None, False
        order.sent |= not self._away
        bus = self._open()
        if bus is not None:
            bus.set(unit, properties, urgent)

    def want_again(self, unit: str, known: Mapping[str, object] | None = None) -> None:
        """Tell systemd once more: somebody may have told it something else (``known``)."""
        order, bus = self._orders.get(unit), self._open()
        if order is not None and order.wanted and bus is not None:
            order.settled_at_s, order.held = None, False
            bus.set(unit, order.wanted, urgent=True, known=known or {})

    def confirm(self, unit: str, found: CpuSettings, actuator: str, values: Mapping[str, object]) -> None:
        """Have systemd want what somebody else ordered (``found``, in its own ``values`` where they are known).

        An order of ours may still be on its way and land after theirs: this one comes after both.
        """
        order, bus = self._orders.get(unit), self._open()
        if order is None or not order.wanted or bus is None:
            return
        properties = list_properties(found, (actuator,), self._cpu_version)
        told = tuple((name, value) for name, _ in properties if isinstance(value := values.get(name), int))
        # Those before it were carried out before it was sent, and may be somebody's next order.
        order.older = [] if order.held else [order.wanted]
        order.wanted, order.settled_at_s, order.held = told or properties, None, False
        bus.set(unit, order.wanted, urgent=True)

    def leave(self, unit: str, values: Mapping[str, object]) -> None:
        """Want what somebody else ordered (``values``) in the place of what was wanted of the same settings."""
        order = self._orders.get(unit)
        if order is not None:
            theirs = ((name, values.get(name, value)) for name, value in order.wanted)
            order.wanted = tuple((name, value) for name, value in theirs if isinstance(value, int))

    def forget(self, unit: str) -> None:
        """Somebody else decides about this unit from now on, or it is gone."""
        self._orders.pop(unit, None)
        if self._bus is not None:
            self._bus.drop(unit)

    def is_settled(self, unit: str) -> bool:
        """Whether systemd wants what it was last told."""
        order = self._orders.get(unit)
        return order is None or order.settled_at_s is not None

    def was_told(self, unit: str) -> bool:
        """Whether systemd ever took an order of this run for the unit."""
        order = self._orders.get(unit)
        return order is not None and order.told

    def may_be_told(self, unit: str) -> bool:
        """Whether systemd may have taken an order of this run, though its answer is not known."""
        order = self._orders.get(unit)
        return order is not None and (order.told or (order.sent and self.can_set))

    def is_late(self, unit: str, found: CpuSettings, actuator: str) -> bool:
        """Whether ``found`` is an order of ours that was followed by another one: systemd came late with it."""
        order = self._orders.get(unit)
        if order is None:
            return False
        self._forget_older(order)
        believed = [order.believed] if order.believed != order.wanted else []
        return any(self._is_same(each, found, actuator) for each in [*order.older, *believed])

    def _forget_older(self, order: Order) -> None:
        if order.settled_at_s is not None and self._monotonic_s() - order.settled_at_s > LATE_S:
            order.older = []

    def is_ours(self, unit: str, found: CpuSettings, actuator: str) -> bool:
        """Whether ``found`` is any order of ours that systemd may believe in."""
        return self.is_wanted(unit, found, actuator) or self.is_late(unit, found, actuator)

    def is_told(self, unit: str, values: Mapping[str, object]) -> bool:
        """Whether ``values`` are to the last digit what systemd was last told by us."""
        order = self._orders.get(unit)
        wanted = {} if order is None else dict(order.wanted)
        return all(wanted.get(name) == value for name, value in values.items())

    def is_wanted(self, unit: str, found: CpuSettings, actuator: str) -> bool:
        """Whether ``found`` is what systemd was last told by us."""
        order = self._orders.get(unit)
        return order is not None and self._is_same(order.wanted, found, actuator)

    def _is_same(self, properties: UnitProperties, found: CpuSettings, actuator: str) -> bool:
        if actuator == "quota":
            return is_quota(properties, found.cores)
        mine = list_properties(found, ("weight",), self._cpu_version)
        return any(each in properties for each in mine)

    def ask(self, unit: str, names: Iterable[str] = ()) -> None:
        """Ask for a unit's limits, or for ``names``; the answer is one of the events."""
        bus = self._open() if self._booted else None
        if bus is not None:
            bus.ask(unit, tuple(names) or (QUOTA, WEIGHT))

    def is_answer(self, values: dict[str, object], found: CpuSettings, actuator: str) -> bool:
        """Whether a unit's limits, as systemd tells them, are those that were found."""
        if actuator == "quota":
            value = values.get(QUOTA)
            return isinstance(value, int) and is_quota(((QUOTA, value),), found.cores)
        value = values.get(WEIGHT)
        if not isinstance(value, int):
            return False
        weight = DEFAULT_WEIGHT if value == NO_LIMIT else value
        return found.weight == (weight if self._cpu_version == 2 else shares_of(weight))

    def read_values(self, values: Mapping[str, object], found: CpuSettings) -> CpuSettings:
        """``found`` with those limits that systemd tells (``values``)."""
        quota, weight = values.get(QUOTA), values.get(WEIGHT)
        if isinstance(quota, int):
            quota_us = None if quota == NO_LIMIT else max(quota * found.period_us // 1_000_000, MIN_QUOTA_US)
            burst_us = found.burst_us if found.burst_us is None or quota_us is None else min(found.burst_us, quota_us)
            found = msgspec.structs.replace(found, quota_us=quota_us, burst_us=burst_us)
        if isinstance(weight, int):
            weight = DEFAULT_WEIGHT if weight == NO_LIMIT else weight
            found = msgspec.structs.replace(found, weight=weight if self._cpu_version == 2 else shares_of(weight))
        return found

    def has_news(self) -> bool:
        """Whether ``poll`` would give something."""
        return self._bus is not None and self._bus.has_news()

    def poll(self) -> list[UnitEvent]:
        """The news of systemd since the last call; what they mean for orders is taken note of here."""
        events = self._bus.poll() if self._bus is not None else []
        for event in events:
            self._note(event)
        return events

    def _note(self, event: UnitEvent) -> None:
        order = self._orders.get(event.unit)
        if event.kind in ("done", "no-unit"):
            self._refusals.pop(event.unit, None)
            if event.kind == "done":
                self._denied = False
                self._solve()
            if order is not None:
                order.told |= event.kind == "done"
                order.believed = event.properties if event.kind == "done" else ()
                if order.wanted == event.properties:
                    order.settled_at_s = self._monotonic_s()
        elif event.kind == "replaced" and order is not None:
            # What was ours before has landed before: it is what theirs replaced.
            order.believed, order.older, order.held = (), [], order.wanted == event.properties
        elif event.kind == "connected":
            self._away = False
            for each in self._orders.values():
                each.sent = True
            if not self._denied:
                self._solve()
        elif event.kind == "away":
            self._away = True
            self._say(event.text, "limits of units are set by file until the system bus is back")
        elif event.kind == "denied":
            self._denied = True
            self._say(f"systemd lets this user set no properties of units ({event.text})", POLKIT_ADVICE)
        elif event.kind == "refused" and self._refusals.get(event.unit) != event.text:
            self._refusals[event.unit] = event.text
            log.warning("unit_refused", unit=event.unit, error=event.text)

    def _say(self, problem: str, advice: str) -> None:
        text = f"{problem}; {advice}"
        if text != self.problem:
            log.warning("units_by_file", error=problem, advice=advice)
        self.problem = text

    def _solve(self) -> None:
        if self.problem:
            log.info("units_by_bus")
        self.problem = ""

    def flush(self, timeout_s: float) -> bool:
        """Wait until systemd was told everything; what it answered comes with ``poll``. False: it takes longer."""
        if self._bus is None:
            return True
        return self._bus.flush(timeout_s)

    def close(self) -> None:
        """End the connection; limits stay as they are."""
        if self._bus is not None:
            self._bus.close()


def _complete(properties: UnitProperties, older: UnitProperties) -> UnitProperties:
    """``properties``, and of ``older`` the settings that they say nothing about."""
    told = {name.startswith("CPUQuota") for name, _ in properties}
    return properties + tuple(each for each in older if each[0].startswith("CPUQuota") not in told)


def read_labels(values: dict[str, object]) -> dict[str, str]:
    """Properties of a unit as short texts for people; those that systemd did not tell are ""."""
    labels = {}
    for name, value in values.items():
        if isinstance(value, bool):
            text = "yes" if value else "no"
        elif isinstance(value, list):
            text = " ".join(str(each) for each in value)
        else:
            text = "" if value is None or value == NO_LIMIT else str(value)
        labels[name] = "".join(c if c.isprintable() else " " for c in text)[:MAX_LABEL]
    return labels
