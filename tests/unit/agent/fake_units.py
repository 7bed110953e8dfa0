"""A host with a unit whose limits are moved, and its systemd as a script."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from fake_node import QUICK, FakeNode

from cpumond.agent.control import view_job
from cpumond.agent.limits.units import UnitLimits
from cpumond.agent.service import Agent
from cpumond.agent.snapshot import TickSnapshot
from cpumond.agent.state_file import Originals, load
from cpumond.host.cgroup.mounts import open_hierarchies
from cpumond.host.systemd.bus import family
from cpumond.host.systemd.properties import NO_LIMIT, QUOTA, UnitEvent, UnitProperties
from cpumond.testing import v2_cgroup

UNIT = "work.service"
PATH = f"batch.slice/{UNIT}"
UNITS = QUICK + '\n[[source]]\nkind = "systemd"\nslices = ["batch.slice"]\nlabels = ["User"]\n'


class ScriptedBus:
    """A systemd that is told things, and does them when the test says so; ``write`` writes the file of a unit."""

    def __init__(self, write: Callable[[str], None] = lambda _: None) -> None:
        self.write = write
        self.told: dict[str, UnitProperties] = {}
        self.stored: dict[str, UnitProperties] = {}
        self.expected: dict[str, UnitProperties] = {}
        self.unreported: dict[str, set[str]] = {}
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.news = [UnitEvent("connected")]
        self.reachable = True
        self.denies = False
        self.answers_when_flushed = False
        self.closed = 0

    def set(self, unit: str, properties: UnitProperties, urgent: bool = False, expected: UnitProperties = ()) -> None:
        self.told[unit], self.expected[unit] = properties, expected

    def drop(self, unit: str) -> None:
        self.told.pop(unit, None)
        self.unreported.pop(unit, None)

    def ask(self, unit: str, names: tuple[str, ...]) -> None:
        self.asked.append((unit, names))

    def poll(self) -> list[UnitEvent]:
        news, self.news, self.unreported = self.news, [], {}
        return news

    def flush(self, timeout_s: float) -> bool:
        self.obey()
        if self.answers_when_flushed:
            self.answer()
        return self.reachable

    def close(self, timeout_s: float = 1.0) -> None:
        self.closed += 1

    # ---- for the test

    def obey(self) -> None:
        """Believe in what was told so far, or refuse it."""
        for unit, properties in self.told.items() if self.reachable else ():
            if self.denies:
                self.news.append(UnitEvent("denied", unit, properties, text="not you"))
                continue
            stored, unreported = dict(self.stored.get(unit, ())), self.unreported.get(unit, set())
            replaced = {
                name: stored[name] for name, value in properties
                if name in unreported or (
                    name in dict(self.expected[unit]) and name != "CPUQuotaPeriodUSec"
                    and (name, stored[name]) not in (*self.expected[unit], (name, value))
                )
            }  # fmt: skip
            rest = tuple(each for each in properties if not each[0].startswith(tuple(map(family, replaced))))
            if rest:
                self.stored[unit] = tuple({**stored, **dict(rest)}.items())
                self.write(unit)
                self.news.append(UnitEvent("done", unit, rest))
            if replaced:
                self.unreported.setdefault(unit, set()).update(replaced)
                self.news.append(UnitEvent("replaced", unit, properties, values=dict(replaced)))
        if self.reachable and not self.denies:
            self.told = {}

    def answer(self) -> None:
        """Answer all questions about limits."""
        for unit, names in self.asked:
            if QUOTA in names:
                values: dict[str, object] = {QUOTA: None, "CPUWeight": NO_LIMIT, **dict(self.stored[unit])}
                self.news.append(UnitEvent("answer", unit, values=values))
        self.asked = []

    def quota_cores(self, unit: str = UNIT) -> float:
        return dict(self.stored[unit])[QUOTA] / 1e6


class UnitNode(FakeNode):
    """A host with one unit of four cores, ``work.service``, and its systemd."""

    folder = "batch.slice"
    managed_roots = '["batch.slice"]'

    def __init__(self, directory: Path, quota: str = "400000 100000") -> None:
        self.bus = ScriptedBus(self.systemd_writes)
        self.bus.stored[UNIT] = ((QUOTA, 4_000_000),)
        super().__init__(directory, {UNIT: v2_cgroup(quota=quota)}, UNITS)

    def make_agent(self) -> Agent:
        config = self.read_config()
        os.makedirs(config.state_dir, exist_ok=True)
        os.makedirs(config.runtime_dir, exist_ok=True)
        units = UnitLimits(2, booted=True, open_bus=lambda: self.bus)  # type: ignore[arg-type, return-value]
        return Agent(config, open_hierarchies(config.mountinfo), self.reports, clock=self.clock, units=units)

    @property
    def file(self) -> Path:
        return self.root / PATH / "cpu.max"

    def unmake_limit_files(self) -> None:
        """The unit has no CPU setting yet: on v2 its slice does not give the controller on."""
        self.file.unlink()
        self.file.with_name("cpu.weight").unlink()

    def obey(self, rounds: int = 1) -> None:
        """Let systemd do what it was told, and the agent hear of it."""
        for _ in range(rounds):
            self.bus.obey()
            self.tick()

    def answer(self) -> None:
        """Let systemd answer all questions about limits, and the agent hear of it."""
        self.bus.answer()
        self.tick()

    def hear(self, *event: Any, **more: Any) -> TickSnapshot:
        """Let systemd say this, and the agent hear of it."""
        self.bus.news.append(UnitEvent(*event, **more))
        return self.tick()

    def limit(self) -> float:
        return self.cores(UNIT)

    def limits(self) -> tuple[float, float]:
        """The limit in force, and the one that systemd has."""
        return self.limit(), self.bus.quota_cores()

    def systemd_writes(self, unit: str = UNIT) -> None:
        """What daemon-reload does: the files of a unit that runs become systemd's values."""
        place = self.root / self.folder / unit
        if not place.is_dir():
            return
        stored = dict(self.bus.stored.get(unit, ()))
        quota, weight = stored.get(QUOTA), stored.get("CPUWeight")
        if quota is not None:
            period_us = stored.get("CPUQuotaPeriodUSec", 100_000)
            text = "max" if quota == NO_LIMIT else quota // 10_000 * period_us // 100
            with contextlib.suppress(FileNotFoundError):
                (place / "cpu.max").write_text(f"{text} {period_us}\n")
        if weight is not None:
            (place / "cpu.weight").write_text(f"{100 if weight == NO_LIMIT else weight}\n")

    def order(self, cores: float) -> None:
        self.bus.stored[UNIT] = ((QUOTA, round(cores * 1e6)),)
        self.systemd_writes()

    def lower(self) -> float:
        """Let it idle down to its least limit, which systemd has then, too."""
        self.ticks(8)
        self.obey()
        assert self.limit() == 0.5
        return self.limit()

    def wake(self) -> None:
        """Let it have need of more: it gets all of it in the file, systemd is only told yet."""
        for _ in range(3):
            self.tick(0.3, {UNIT: 1.0})
            if self.limit() == 4.0:
                return
        raise AssertionError(self.limit())

    def status(self) -> dict[str, object]:
        [view] = self.snapshot().jobs
        described: dict[str, object] = msgspec.to_builtins(view_job(view))
        return described

    def originals(self) -> Originals:
        content = load(str(self.directory / "state" / "originals.state"), Originals)
        assert content is not None
        return content

    def restart_unit(self) -> None:
        """Another cgroup of the same unit, with systemd's values."""
        self.remove(UNIT)
        self.tick()
        self.make(UNIT)
        self.systemd_writes()
