"""Limits of systemd units: the tick's thread sends values to systemd through ``host.systemd.bus``, and gets answers.

To lower a unit's limit, the agent sends systemd the property, and systemd writes the kernel's file. A raise must have
its effect at once: ``writer`` first writes the file, then sends systemd the same value, so that ``daemon-reload`` and a
restart of the unit keep it. The bus, which has a thread, is opened only when the first unit is set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from cpumond.agent.limits.judge import Observation, UnitTarget, WriteVerdict, judge, merge
from cpumond.core.measures import MIN_QUOTA_US
from cpumond.host.cgroup.settings import DEFAULT_WEIGHT, CpuSettings
from cpumond.host.cgroup.units import unit_of
from cpumond.host.systemd.properties import (
    NO_LIMIT,
    QUOTA,
    WEIGHT,
    UnitEvent,
    UnitProperties,
    is_booted,
    list_properties,
    read_property,
    shares_of,
)

if TYPE_CHECKING:
    from cpumond.host.systemd.bus import UnitBus

log = structlog.get_logger("cpumond.agent")

KEPT_TARGETS = 8
MAX_LABEL = 200
"""Maximum number of characters of a unit's property that are shown."""
PROPERTIES: Final = {"quota": QUOTA, "weight": WEIGHT}
"""Actuator -> systemd's property for the setting that this actuator moves."""
POLKIT_ADVICE: Final = (
    "install polkitd and the rule cpumond.rules, or run the agent as root; limits are only set by file"
)


def _open_bus() -> UnitBus:
    from cpumond.host.systemd.bus import UnitBus  # costs memory that only agents with units need

    return UnitBus(lambda: None)


class UnitLimits:
    """Sets the limits of units on this host. For the tick's thread.

    ``problem`` says why limits are only written to files, "" if systemd is used. ``booted``: systemd is PID 1 here."""

    def __init__(
        self, cpu_version: int, booted: bool | None = None, open_bus: Callable[[], UnitBus] | None = None
    ) -> None:
        self.problem = ""
        self._cpu_version = cpu_version
        self._booted = is_booted() if booted is None else booted
        self._open_bus = open_bus or _open_bus
        self._bus: UnitBus | None = None
        self._missing = False
        self._away = False
        self._denied = False
        self._targets: dict[str, UnitTarget] = {}
        self._refusals: dict[str, str] = {}

    def name_unit(self, path: str) -> str:
        """Return the unit whose cgroup is at ``path``; "" if there is no unit, or systemd is not PID 1 here."""
        return unit_of(path) if self._booted else ""

    @property
    def can_ask(self) -> bool:
        """Whether systemd can be asked; if so, an answer will come, or the event that systemd is down."""
        return self._booted and not (self._missing or self._away)

    @property
    def can_tell(self) -> bool:
        """Whether systemd accepts values, as far as is known."""
        return self._open() is not None and not (self._away or self._denied)

    def can_lower(self, unit: str) -> bool:
        """Whether systemd can lower a unit's limit. If it has refused to, the agent writes the file itself."""
        return self.can_tell and unit not in self._refusals

    def _open(self) -> UnitBus | None:
        if self._bus is None and self._booted and not self._missing:
            try:
                self._bus = self._open_bus()
            except ImportError as error:
                self._missing = True
                self._set_problem(f"the library for the system bus is missing ({error})", "pip install dbus-fast")
        return self._bus

    def want(
        self, unit: str, settings: CpuSettings, actuators: tuple[str, ...], urgent: bool = False, again: bool = False
    ) -> bool:
        """Send systemd ``settings`` for a unit; if ``urgent`` (more CPU), before those of other units. Return False if
        nothing is sent, because the same was sent before; ``again``: send it anyway if systemd has answered to it."""
        if not self._booted:
            return False
        properties = list_properties(settings, actuators, self._cpu_version)
        record = self.read(unit)
        if not record.is_settled:
            # systemd has not answered yet: earlier properties of a different actuator are sent again with these.
            properties += _leave_out(dict(properties), record.target)
        if not properties or (record.target == properties and not (again and record.is_settled)):
            return False
        self._targets[unit] = record
        if record.target:
            record.older = (*record.older, record.target)[-KEPT_TARGETS:]
        self._submit(unit, record, properties, urgent)
        return True

    def _submit(self, unit: str, record: UnitTarget, properties: UnitProperties, urgent: bool = True) -> None:
        record.target, record.is_settled = properties, False
        record.submitted |= not self._away
        bus = self._open()
        if bus is not None:
            names = dict(record.applied)
            values = (each for told in (*record.older, record.applied) for each in told if each[0] in names)
            bus.set(unit, properties, urgent, tuple(values))

    def hold_back(self, unit: str) -> None:
        """Do not send a unit's first value if that still waits: the bus would not compare it with the present value,
        which another program may have set."""
        record = self._targets.get(unit)
        if record is not None and not record.acknowledged and self._bus is not None:
            self._bus.drop(unit)
            record.older, record.target = (*record.older, record.target), ()

    def want_again(self, unit: str, values: Mapping[str, object] | None = None) -> None:
        """Send the target to systemd once more. ``values``: properties that other programs have set meanwhile."""
        record = self._targets.get(unit)
        if record is not None and record.target:
            record.applied = merge(record.applied, _read_numbers(values or {}))
            self._submit(unit, record, record.target)

    def confirm(self, unit: str, found: CpuSettings, actuator: str, values: Mapping[str, object]) -> None:
        """Send systemd the limit that an operator set: ``found``, or systemd's own ``values`` if known.

        A value of the agent may still be in transit and would replace the operator's; the limit sent now comes last."""
        record = self._targets.get(unit)
        if record is None:
            return
        properties = list_properties(found, (actuator,), self._cpu_version)
        told = tuple(each for each in _read_numbers(values) if each[0] in dict(properties))
        # Earlier values were applied before this one was sent: if one is seen again, an operator may have set it.
        record.older = (record.target,)
        self._submit(unit, record, told or properties)

    def forget(self, unit: str) -> None:
        """Forget a unit that is gone, or about whose limit the agent no longer decides."""
        self._targets.pop(unit, None)
        if self._bus is not None:
            self._bus.drop(unit)

    def read(self, unit: str) -> UnitTarget:
        """Return the record of values sent for a unit; an empty record if no value was sent."""
        return self._targets.get(unit) or UnitTarget()

    def has_set(self, unit: str) -> bool:
        """Return whether any value was sent to systemd for a unit."""
        return unit in self._targets

    def takes_limits(self, unit: str) -> bool:
        """Whether systemd accepted a value of this run, or may have accepted one although its answer is unknown."""
        record = self.read(unit)
        return record.acknowledged or (record.submitted and not (self._denied or self._missing))

    def is_ours(self, unit: str, found: CpuSettings, actuators: Iterable[str]) -> bool:
        """Return whether all settings of ``actuators`` have values in ``found`` that the agent sent to systemd."""
        record, names = self.read(unit), [PROPERTIES[actuator] for actuator in actuators]
        return all(record.has(name, read_property(found, name, self._cpu_version)) for name in names)

    def judge(
        self,
        unit: str,
        actuator: str,
        found: CpuSettings,
        original: CpuSettings,
        values: Mapping[str, object] | None = None,
        *,
        is_conflict: bool = False,
        is_reloaded: bool = False,
        is_inherited: bool = False,
    ) -> WriteVerdict:
        """Judge who wrote a unit's limit (``judge.judge``). ``values`` are systemd's, None before systemd was asked."""
        name = PROPERTIES[actuator]
        record, told = self.read(unit), (values or {}).get(name)
        seen = Observation(
            name,
            read_property(found, name, self._cpu_version),
            read_property(original, name, self._cpu_version),
            DEFAULT_WEIGHT if (name, told) == (WEIGHT, NO_LIMIT) else told if isinstance(told, int) else None,
            values is not None,
            is_conflict,
            is_reloaded,
            is_inherited,
        )
        return judge(record, seen)

    def ask(self, unit: str, names: Iterable[str] = ()) -> None:
        """Ask systemd for a unit's limits, or for the properties ``names``; ``poll`` returns the answer as an event."""
        bus = self._open()
        if bus is not None:
            bus.ask(unit, tuple(names) or (QUOTA, WEIGHT))

    def read_values(self, values: Mapping[str, object], found: CpuSettings) -> CpuSettings:
        """Return ``found`` with the limits in systemd's ``values``."""
        quota, weight = values.get(QUOTA), values.get(WEIGHT)
        if isinstance(quota, int):
            quota_us = None if quota == NO_LIMIT else max(quota * found.period_us // 1_000_000, MIN_QUOTA_US)
            burst_us = found.burst_us if found.burst_us is None or quota_us is None else min(found.burst_us, quota_us)
            found = msgspec.structs.replace(found, quota_us=quota_us, burst_us=burst_us)
        if isinstance(weight, int):
            weight = DEFAULT_WEIGHT if weight == NO_LIMIT else weight
            found = msgspec.structs.replace(found, weight=weight if self._cpu_version == 2 else shares_of(weight))
        return found

    def poll(self) -> list[UnitEvent]:
        """Return the events from systemd since the last call, after updating the records of the units with them."""
        events = self._bus.poll() if self._bus is not None else []
        for event in events:
            self._on_event(event)
        return events

    def _on_event(self, event: UnitEvent) -> None:
        record = self.read(event.unit)
        if event.kind in ("done", "no-unit"):
            record.take(event.properties if event.kind == "done" else None)
            if record.target == event.properties:
                record.is_settled, record.older = True, ()
            self._refusals.pop(event.unit, None)
            if event.kind == "done":
                self._denied = False
                self._clear_problem()
        elif event.kind == "replaced":
            # The other program's value replaced the last of the agent's earlier values, so all of these were applied.
            rest = _leave_out(event.values, event.properties)
            if record.target == event.properties:
                record.target, record.is_settled = rest, bool(rest)
            record.applied, record.older = merge(record.applied, _read_numbers(event.values)), ()
        elif event.kind == "connected":
            self._away = False
            for each in self._targets.values():
                each.submitted = True
            if not self._denied:
                self._clear_problem()
        elif event.kind == "away":
            self._away = True
            self._set_problem(event.text, "limits of units are only set by file until the system bus is back")
        elif event.kind == "denied":
            self._denied = True
            self._set_problem(f"systemd does not let this user set properties of units ({event.text})", POLKIT_ADVICE)
        elif event.kind == "refused" and self._refusals.get(event.unit) != event.text:
            self._refusals[event.unit] = event.text
            log.warning("unit_refused", unit=event.unit, error=event.text)

    def _set_problem(self, problem: str, advice: str) -> None:
        text = f"{problem}; {advice}"
        if text != self.problem:
            log.warning("units_by_file", error=problem, advice=advice)
        self.problem = text

    def _clear_problem(self) -> None:
        if self.problem:
            log.info("units_by_bus")
        self.problem = ""

    def flush(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` until all values are sent; return whether they are. ``poll`` returns the answers."""
        return self._bus is None or self._bus.flush(timeout_s)

    def close(self) -> None:
        if self._bus is not None:
            self._bus.close()


def _leave_out(names: Iterable[str], properties: UnitProperties) -> UnitProperties:
    """Return ``properties`` without those that concern the same settings as ``names``."""
    settings = {name.startswith("CPUQuota") for name in names}
    return tuple(each for each in properties if each[0].startswith("CPUQuota") not in settings)


def _read_numbers(values: Mapping[str, object]) -> UnitProperties:
    return tuple((name, value) for name, value in values.items() if isinstance(value, int))


def read_labels(values: dict[str, object]) -> dict[str, str]:
    """Format properties of a unit as short texts for people; "" for each one that is missing in systemd's answer."""
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
