"""Limits that other programs write into cgroups, and systemd's events about its units.

Each external write is handled in the same steps: the agent finds the new limit in force, a ``WriteVerdict`` names the
author of the write, and a table maps the verdict to an action."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

import msgspec
import structlog

from cpumond.agent.clock import HostClock
from cpumond.agent.engines import Engines
from cpumond.agent.limits.hold import Respected
from cpumond.agent.limits.judge import RELOAD_S, WriteVerdict
from cpumond.agent.limits.restore import open_original, restore_cgroup
from cpumond.agent.limits.units import PROPERTIES, read_labels
from cpumond.agent.limits.writer import ASK_AGAIN_S, GONE_S, LimitWriter, read_limit_cores, read_settings_or_none
from cpumond.agent.table import JobTable
from cpumond.agent.totals import Due
from cpumond.agent.tracked import Tracked, is_order, record
from cpumond.core.errors import CpumondError
from cpumond.host.cgroup.files import is_idle
from cpumond.host.cgroup.find import CgroupFinder
from cpumond.host.cgroup.settings import CpuSettings, adopt_limit, classify_change, is_raised_above
from cpumond.host.systemd.properties import QUOTA, UnitEvent

log = structlog.get_logger("cpumond.agent")

ENGINE_ANSWER_S = 5.0
"""Seconds to wait until an engine confirms a limit. Without a confirmation, the limit counts as another program's."""
ORDERED: Final = (WriteVerdict.ENGINE, WriteVerdict.OPERATOR, WriteVerdict.PROGRAM)
"""Verdicts after which the limit found becomes the job's original, which is restored in the end."""


class Write(NamedTuple):
    """The author of a change of a limit; ``values`` are systemd's own values, None if systemd was not asked."""

    verdict: WriteVerdict
    before: CpuSettings
    change: Literal["raise", "lower"] = "lower"
    values: dict[str, object] | None = None


class ExternalWrites:
    """Handles limits that other programs have set.

    ``changed``: cgroups whose limit files were written since the last tick. ``rewritten``: the cgroups among
    ``changed`` that the agent did not write. ``read_all``: the file of any job may have changed. ``strays_at_s``:
    monotonic time of the next look at cgroups that the agent changed and that have no job now."""

    def __init__(
        self, table: JobTable, writer: LimitWriter, engines: Engines, due: Due, clock: type[HostClock]
    ) -> None:
        self.table = table
        self.writer = writer
        self.units = writer.units
        self.totals = writer.totals
        self.engines = engines
        self.due = due
        self.clock = clock
        self.changed: set[str] = set()
        self.rewritten: set[str] = set()
        self.read_all = False
        self.strays_at_s = math.inf
        self._reloaded_at_s = -math.inf
        self._waits_until_s: dict[str, float] = {}
        """Cgroups whose limit was written -> time until which to wait for the answer of their engine."""
        self._removed: set[str] = set()
        """Units that systemd unloaded."""
        self._actions: Final[dict[WriteVerdict, Callable[[Tracked, Write, float], None]]] = {
            WriteVerdict.OWN: self._write_again,
            WriteVerdict.UNKNOWN: self._ask_systemd,
            WriteVerdict.OUTRANKED: lambda job, write, _: self.units.want_again(job.unit, write.values),
            WriteVerdict.STORED: self._undo,
            WriteVerdict.FILE: self._respect_or_undo,
            WriteVerdict.OPERATOR: self._respect,
            WriteVerdict.PROGRAM: self._respect,
            WriteVerdict.ENGINE: self._obey,
        }

    def take_changes(self, now_s: float) -> None:
        """Adopt limits written since the last tick."""
        self._waits_until_s = {path: end_s for path, end_s in self._waits_until_s.items() if path in self.table.jobs}
        jobs = list(self.table) if self.read_all else [
            self.table.jobs[path] for path in self.changed if path in self.table.jobs
        ]  # fmt: skip
        rewritten, self.rewritten = self.rewritten, set()
        self.changed, self.read_all = set(), False
        for job in jobs:
            found = read_settings_or_none(job)
            if found is None:
                continue
            if job.found.path in rewritten and self._is_order_of_the_same(job, found):
                self._follow(job, Write(WriteVerdict.PROGRAM, job.in_force), now_s)
            else:
                self.take(job, found, now_s)
        self.store_originals()

    def _is_order_of_the_same(self, job: Tracked, found: CpuSettings) -> bool:
        """Return whether the job's engine, which does not report its requests, has requested the limit in force by
        writing this limit again."""
        engine = job.found.engine
        if engine is None or engine.reports_request or job.unit or not job.touched or job.hold.is_contested:
            return False
        is_lower = found.cores < job.original.cores
        return is_lower and _classify(job, found) == "same" and is_order(job, found, self.engines.is_up(job.found))

    def is_foreign(self, job: Tracked, found: CpuSettings) -> bool:
        """Return whether another program may have set the limit ``found``."""
        is_ours = bool(job.unit) and self.units.is_ours(job.unit, found, (job.actuator,))
        return _classify(job, found) != "same" and not is_ours

    def take_own(self, job: Tracked, found: CpuSettings, now_s: float) -> None:
        """Adopt a limit ``found`` that is not foreign: a limit of the agent that systemd has written since the last
        look, or a changed burst, which no event reports."""
        if _classify(job, found) != "same":
            self._take_now(job, found, now_s)
        elif found.burst_us != job.in_force.burst_us:
            self.writer.follow_burst(job, found)

    def take(self, job: Tracked, found: CpuSettings, now_s: float) -> None:
        """Adopt the limit ``found`` in force, or first ask the job's engine whether it requested this limit."""
        if self._may_be_ordered(job, found, now_s):
            if job.found.path not in self._waits_until_s:
                self.engines.ask(job.found)
                self._waits_until_s[job.found.path] = now_s + ENGINE_ANSWER_S
            self.changed.add(job.found.path)
            return
        self._waits_until_s.pop(job.found.path, None)
        self._take_now(job, found, now_s)

    def _may_be_ordered(self, job: Tracked, found: CpuSettings, now_s: float) -> bool:
        """Return whether the job's engine may still report that it requested the limit ``found``."""
        engine = job.found.engine
        if engine is None or not engine.reports_request or is_order(job, found) or _classify(job, found) == "same":
            return False
        return now_s < self._waits_until_s.get(job.found.path, math.inf) and self.engines.is_up(job.found)

    def store_originals(self) -> None:
        """Save new originals before anything else. A failure is retried; until the originals are saved, the limits of
        their jobs are not lowered."""
        if self.writer.unsaved:
            self.writer.store()

    def _take_now(self, job: Tracked, found: CpuSettings, now_s: float) -> None:
        """Adopt the limit ``found`` in force."""
        if found.weight != job.in_force.weight and is_idle(job.cgroup.place):
            # The kernel set this weight for the idle class; it is no request. At the next look the job is refused.
            found = msgspec.structs.replace(found, weight=job.in_force.weight)
        before, change = job.in_force, _classify(job, found)
        job.in_force = found
        if not job.touched or self._is_still_unset(job):
            if found != before:
                wrote, job.original = job.writes, found
                self.writer.keep(job)
                self.writer.put_back(job, wrote, now_s)
                job.update_hard_limit(self.table.hierarchies, now_s)
                job.follow_writes()
            return
        if found.burst_us != before.burst_us and (change == "same" or (found.burst_us or 0) > (before.burst_us or 0)):
            # The other program had to lower the burst with the quota: the kernel accepts no quota below the burst.
            self.writer.follow_burst(job, found)
        if change == "same" or job.hold.is_contested:
            return
        if job.unit:
            self._take_unit_write(job, before, None, now_s)
        else:
            self._follow(job, Write(WriteVerdict.PROGRAM, before, change), now_s)

    def _is_still_unset(self, job: Tracked) -> bool:
        """Return whether no agent has sent systemd a limit of the job's unit yet. An operator may have set the unit's
        first limit unnoticed: on v2 there is no file to watch until a limit is set."""
        if not job.unit or job.hold.is_contested:
            return False
        return not (self.units.has_set(job.unit) or self.writer.is_inherited(job.cgroup.path))

    def _take_unit_write(
        self,
        job: Tracked,
        before: CpuSettings,
        values: dict[str, object] | None,
        now_s: float,
        is_conflict: bool = False,
    ) -> None:
        """Find out who set the limit that is in force for a unit, and act on that."""
        change = classify_change(before, job.in_force, job.actuator)
        if change == "same" and not is_conflict:
            return
        verdict = self.units.judge(
            job.unit,
            job.actuator,
            job.in_force,
            job.original,
            values,
            is_conflict=is_conflict,
            is_reloaded=now_s - self._reloaded_at_s < RELOAD_S,
            is_inherited=self.writer.is_inherited(job.cgroup.path),
        )
        self._follow(job, Write(verdict, before, "raise" if change == "raise" else "lower", values), now_s)

    def _follow(self, job: Tracked, write: Write, now_s: float) -> None:
        """Do what the table prescribes for the author of ``write``."""
        verdict = write.verdict
        if verdict is WriteVerdict.OPERATOR:
            self.units.confirm(job.unit, job.in_force, job.actuator, write.values or {})
        if job.found.engine is not None and verdict in (*ORDERED, WriteVerdict.FILE, WriteVerdict.STORED):
            if verdict is not WriteVerdict.STORED and is_order(job, job.in_force, self.engines.is_up(job.found)):
                write = write._replace(verdict=WriteVerdict.ENGINE)
            self.engines.ask(job.found)
        self._actions[write.verdict](job, write, now_s)

    def _write_again(self, job: Tracked, write: Write, now_s: float) -> None:
        if read_limit_cores(job, job.in_force) < job.state.limit_cores or not self.units.can_lower(job.unit):
            job.hold = job.hold.write(now_s)

    def _ask_systemd(self, job: Tracked, write: Write, now_s: float) -> None:
        job.hold = job.hold.ask(write.before, now_s)
        self.units.hold_back(job.unit)
        if self.units.can_ask:
            self.units.ask(job.unit)
        else:
            self._resolve_unit_write(job, {}, now_s)

    def _obey(self, job: Tracked, write: Write, now_s: float) -> None:
        """Adopt the limit as the job's new maximum: the monitor continues below it. A pin is applied again."""
        found_cores = self._note(job, write, now_s)
        job.hold = job.hold.expire(math.inf).unpin().write(None)
        job.restart(found_cores, now_s)

    def _respect(self, job: Tracked, write: Write, now_s: float) -> None:
        found_cores = self._note(job, write, now_s)
        by = "systemctl set-property" if write.verdict is WriteVerdict.OPERATOR else ""
        job.hold = job.hold.respect(now_s, self.writer.config.writes.override_ttl_s, by)
        job.restart(found_cores, now_s)

    def _respect_or_undo(self, job: Tracked, write: Write, now_s: float) -> None:
        """Respect raises of a unit's limit, and all writes while a raise is respected. Undo the other writes."""
        is_respected = write.change == "raise" or isinstance(job.hold.decider, Respected)
        is_respected = is_respected and self.writer.config.writes.override_ttl_s > 0
        (self._respect if is_respected else self._undo)(job, write, now_s)

    def _undo(self, job: Tracked, write: Write, now_s: float) -> None:
        self._note(job, write, now_s)
        writes = self.writer.config.writes
        job.hold = job.hold.lose(now_s, writes.drift_backoff_s, writes.drift_max)
        if job.hold.is_contested:
            try:
                self.writer.abandon(job)
            except CpumondError as error:
                self.totals.complain(job, error)
            log.error("limit_contested", job_id=job.found.job_id, cgroup=job.found.path, losses=job.hold.losses)

    def _note(self, job: Tracked, write: Write, now_s: float) -> float:
        """Count, log and record that a limit of another program is in force; return that limit in cores.

        A limit that was written only to a unit's file is lost at the next reload. Therefore the previous original is
        restored in the end, unless the limit found is higher."""
        found, old_cores, verdict = job.in_force, job.state.limit_cores, write.verdict
        kind, event = f"foreign-{write.change}", "foreign_write"
        facts: dict[str, str] = {"kind": write.change}
        if verdict is WriteVerdict.ENGINE and job.found.engine is not None:
            kind, event, facts = "order", "limit_ordered", {"engine": job.found.engine.kind}
        elif verdict is WriteVerdict.OPERATOR:
            event, facts = "unit_ordered", {"unit": job.unit}
        self.totals.foreign_writes[write.change] += verdict is not WriteVerdict.ENGINE
        self.due.report = True
        if verdict in ORDERED or is_raised_above(found, job.original, job.actuator):
            job.original = adopt_limit(job.original, found, job.actuator)
            self.writer.keep(job)
            job.update_hard_limit(self.table.hierarchies, now_s)
        found_cores = read_limit_cores(job, found)
        record(job, self.clock.wall_s(), kind, old_cores, found_cores, found_cores, "noticed")
        log.warning(event, job_id=job.found.job_id, **facts, old_cores=old_cores, new_cores=found.cores)
        return found_cores

    def take_unit_news(self, now_s: float) -> None:
        """Handle the events from systemd since the last tick."""
        events = self.units.poll()
        for event in events:
            job = self.table.by_unit.get(event.unit)
            if event.kind == "reloaded":
                # systemd has applied its stored values to all units, and properties of units may have changed.
                self.read_all = True
                self._reloaded_at_s = now_s
                for each in self.table.by_unit.values():
                    self.table.ask_labels(each)
            elif event.kind == "connected":
                self.writer.ask_again(now_s, at_once=True)
            elif event.kind in ("away", "denied"):
                # The event concerns all units.
                for each in self.table.by_unit.values():
                    if event.kind == "away":
                        self._resolve_unit_write(each, {}, now_s)
                    self._lower_by_file(each, event.text, now_s)
            elif event.kind == "replaced":
                self._on_property_conflict(event, now_s)
            elif job is not None:
                self._take_news_of(job, event, now_s)
        self._removed = {event.unit for event in events if event.kind == "removed"}

    def _take_news_of(self, job: Tracked, event: UnitEvent, now_s: float) -> None:
        if event.kind == "answer" and QUOTA in event.values:
            self._resolve_unit_write(job, event.values, now_s)
        elif event.kind == "answer":
            job.labels = read_labels(event.values)
        elif event.kind in ("refused", "no-unit"):
            self._lower_by_file(job, event.text or "the unit does not exist", now_s)
        elif event.kind == "done":
            if job.touched:
                job.in_force = self.units.read_values(dict(event.properties), job.in_force)
            self.table.watch_again(job)
            self.changed.add(job.found.path)

    def _on_property_conflict(self, event: UnitEvent, now_s: float) -> None:
        """Handle a limit that an operator set for a unit just before the agent's, which was therefore not set."""
        job = self.table.by_unit.get(event.unit)
        if job is None or not job.touched or job.hold.is_contested or not os.path.isdir(job.cgroup.directory):
            # The unit's original is being restored, or its cgroup is gone.
            self.writer.adopt_operator_values(event.unit, event.values)
            return
        others = {name: value for name, value in event.values.items() if name != PROPERTIES[job.actuator]}
        if others:
            # These are properties of a setting that the agent no longer moves, and that was to be restored.
            job.original = self.units.read_values(others, job.original)
            self.writer.keep(job)
            log.warning("unit_ordered", job_id=job.found.job_id, unit=job.unit, properties=others)
        if len(others) == len(event.values):
            return
        before = job.in_force if job.hold.asking is None else job.hold.asking.before
        found, job.hold = read_settings_or_none(job) or job.in_force, job.hold.answered()
        found_anew = msgspec.structs.replace(found, period_us=job.original.period_us)
        job.in_force = self.units.read_values(event.values, found_anew)
        try:
            job.cgroup.write_settings(found, job.in_force)  # the agent may have raised the limit since then
        except CpumondError as error:
            self.totals.complain(None, error)
        self._take_unit_write(job, before, event.values, now_s, is_conflict=True)

    def expire_gone_units(self, now_s: float) -> None:
        """Handle units that have not returned in time, and units whose originals systemd is to store again."""
        if self.writer.gone:
            root = self.table.hierarchies.cpu_root
            self.writer.expire_gone(now_s, lambda path: os.path.isdir(os.path.join(root, path)), self._removed)
        if now_s >= self.strays_at_s:
            self.strays_at_s = now_s + GONE_S
            self._restore_strays(now_s)
        if self.writer.returning:
            self.writer.reap_acknowledged()
        self.writer.ask_again(now_s)

    def _restore_strays(self, now_s: float) -> None:
        """Restore cgroups that the agent changed and that have no job now: an earlier attempt to restore them failed,
        or no source finds the new cgroup of their unit."""
        finder = CgroupFinder(self.table.hierarchies)
        for path, original in self.writer.list_strays(now_s, self.table.jobs).items():
            cgroup = None
            try:
                cgroup = open_original(self.table.hierarchies, finder, path, original)
                in_force = cgroup.read_settings() if cgroup is not None else None
                if cgroup is None or in_force is None:
                    is_there = original.unit and os.path.isdir(os.path.join(self.table.hierarchies.cpu_root, path))
                    if finder.find(path, original.inode) is None and not is_there:
                        self.writer.give_back(path)
                    continue
                known = original if cgroup.inode == original.inode else None
                if known is None:
                    known = self.writer.take_over(cgroup, in_force, assume_own=False)
                if known is None:
                    self.writer.forget(path)
                else:
                    written = self.writer.log.records.get(original.inode)
                    self.writer.give_back(path, restore_cgroup(cgroup, known, written, self.writer.note_raise))
                    log.info("stray_restored", cgroup=path)
            except CpumondError as error:
                self.strays_at_s = now_s + ASK_AGAIN_S
                self.totals.complain(None, error)
            finally:
                if cgroup is not None:
                    cgroup.close()

    def _resolve_unit_write(self, job: Tracked, values: dict[str, object], now_s: float) -> None:
        """Act on a write to a unit's limit, knowing systemd's own ``values`` (empty if systemd cannot be asked)."""
        asking, job.hold = job.hold.asking, job.hold.answered()
        if asking is None or job.hold.is_contested:
            return
        job.in_force = read_settings_or_none(job) or job.in_force
        self._take_unit_write(job, asking.before, values, now_s)

    def _lower_by_file(self, job: Tracked, why: str, now_s: float) -> None:
        """Write the lower limit to the unit's limit file, because systemd may not have accepted it. If there is no such
        file, the limit is not lowered; the next attempt is a minute later."""
        if not (job.touched and job.cgroup.is_there()):
            return
        if any(os.path.exists(path) for path in job.cgroup.watch_paths(job.actuator)):
            job.hold = job.hold.write(now_s)
            return
        record = self.units.read(job.unit)
        if set(record.target) - set(record.applied):
            self.units.forget(job.unit)
            job.last_error = f"systemd created no limit file for it: {why}"
            job.restart(read_limit_cores(job, job.in_force), now_s)
            job.hold = job.hold.fail(now_s + ASK_AGAIN_S)
            self.due.report = True


def _classify(job: Tracked, found: CpuSettings) -> Literal["same", "raise", "lower"]:
    """Classify the change of a job's limit to ``found``; for a unit, ignore differences due to systemd's rounding."""
    return classify_change(job.in_force, found, job.actuator, exact=not job.unit)
