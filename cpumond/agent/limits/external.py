"""What other programs write: limits in cgroups, and what systemd says of its units."""

from __future__ import annotations

import math
import os
from typing import Literal

import msgspec
import structlog

from cpumond.agent.context import AgentContext
from cpumond.agent.limits.hold import Respected
from cpumond.agent.limits.judge import RELOAD_S, Verdict
from cpumond.agent.limits.restore import open_original, restore_cgroup
from cpumond.agent.limits.units import PROPERTIES, read_labels
from cpumond.agent.limits.writer import ASK_AGAIN_S, GONE_S, read_limit_cores, read_settings_or_none
from cpumond.agent.tracked import Tracked, is_order, record
from cpumond.core.errors import CpumondError
from cpumond.host.cgroup.files import is_idle
from cpumond.host.cgroup.find import CgroupFinder
from cpumond.host.cgroup.settings import CpuSettings, adopt_limit, classify_change, is_raised_above
from cpumond.host.systemd.properties import QUOTA, UnitEvent

log = structlog.get_logger("cpumond.agent")

ENGINE_ANSWER_S = 5.0
"""So long an engine has to say that it ordered a limit, before the limit counts as another program's."""


class ExternalWrites:
    """Changes of limits that are not the agent's, and what follows from them.

    ``changed`` are cgroups whose limit files were written since the last tick, ``rewritten`` those of them that the
    agent did not write; ``read_all``: those of all jobs may have been. ``strays_at_s``: when changed cgroups without a
    job are looked at, on the monotonic clock.
    """

    def __init__(self, context: AgentContext) -> None:
        self.context = context
        self.table = context.table
        self.writer = context.writer
        self.units = context.units
        self.totals = context.totals
        self.changed: set[str] = set()
        self.rewritten: set[str] = set()
        self.read_all = False
        self.strays_at_s = math.inf
        self._reloaded_at_s = -math.inf
        self._waits_until_s: dict[str, float] = {}
        """Cgroups whose limit was written, and whose engine was asked about that."""
        self._removed: set[str] = set()
        """Units that systemd unloaded."""

    def take_changes(self, now_s: float) -> None:
        """Take over what was written since the last tick."""
        self._waits_until_s = {path: end_s for path, end_s in self._waits_until_s.items() if path in self.table.jobs}
        jobs = list(self.table) if self.read_all else [
            self.table.jobs[path] for path in self.changed if path in self.table.jobs
        ]  # fmt: skip
        rewritten, self.rewritten = self.rewritten, set()
        self.changed, self.read_all = set(), False
        for job in jobs:
            found = read_settings_or_none(job)
            if found is None or self._waits_for_engine(job, found, now_s):
                continue
            if job.found.path in rewritten and self._is_order_of_the_same(job, found):
                self._record_write(job, Verdict.FILE, "lower", {}, now_s)
            else:
                self.handle_write(job, found, now_s)
        self.store_originals()

    def _is_order_of_the_same(self, job: Tracked, found: CpuSettings) -> bool:
        """Whether an engine that does not tell its orders has ordered just the limit in force, by writing it again."""
        engine = job.found.engine
        if engine is None or engine.tells_order or job.unit or not job.touched or job.hold.is_contested:
            return False
        if classify_change(job.in_force, found, job.actuator, exact=True) != "same":
            return False
        return found.cores < job.original.cores and is_order(job, found, self.context.engines.is_up(job.found))

    def take_foreign(self, job: Tracked, found: CpuSettings, now_s: float) -> None:
        """Take over a foreign limit that was found when the agent was about to write its own."""
        if not self._waits_for_engine(job, found, now_s):
            self.handle_write(job, found, now_s)
            self.store_originals()

    def _waits_for_engine(self, job: Tracked, found: CpuSettings, now_s: float) -> bool:
        """Whether a write is taken over later, since the job's engine may be about to say that it ordered it."""
        engine, path = job.found.engine, job.found.path
        end_s = self._waits_until_s.pop(path, None)
        change = classify_change(job.in_force, found, job.actuator, exact=not job.unit)
        if engine is None or not engine.tells_order or change == "same" or is_order(job, found):
            return False
        if (end_s is not None and now_s >= end_s) or not self.context.engines.is_up(job.found):
            return False
        if end_s is None:
            self.context.engines.ask(job.found)
        self._waits_until_s[path] = now_s + ENGINE_ANSWER_S if end_s is None else end_s
        self.changed.add(path)
        return True

    def store_originals(self) -> None:
        """Have a new original on disk before anything else is done; where that fails it is tried again, and the limit
        is not lowered until then."""
        if self.writer.unsaved:
            self.context.flush()

    def handle_write(self, job: Tracked, found: CpuSettings, now_s: float) -> None:
        """Take over what is ``found`` in force now."""
        actuator = job.actuator
        if found.weight != job.in_force.weight and is_idle(job.cgroup.place):
            # It is the kernel's in the idle class, nobody's order; the next look refuses the job.
            found = msgspec.structs.replace(found, weight=job.in_force.weight)
        change = classify_change(job.in_force, found, actuator, exact=not job.unit)
        before = job.in_force
        job.in_force = found
        if not job.touched or self._is_still_unset(job):
            if found != before:
                wrote, job.original = job.writes, found
                self.writer.keep(job)
                self.table.put_back(job, wrote, now_s)
                self.table.update_hard_limit(job, now_s)
                job.follow_writes()
            return
        if found.burst_us != before.burst_us and (change == "same" or (found.burst_us or 0) > (before.burst_us or 0)):
            # One that is lowered together with the quota had to be: the kernel takes no quota below it.
            self.writer.follow_burst(job, found)
        if change == "same" or job.hold.is_contested:
            return
        if job.unit:
            self._handle_unit_write(job, before, None, now_s)
        else:
            self._record_write(job, Verdict.FILE, change, {}, now_s)

    def _is_still_unset(self, job: Tracked) -> bool:
        """Whether no agent told systemd of a unit yet: its first limit may come unseen before that, since on v2 there
        is no file to watch until then."""
        is_told = self.units.has_told(job.unit) or self.writer.is_inherited(job.cgroup.path)
        return bool(job.unit) and not (is_told or job.hold.is_contested)

    def is_foreign(self, job: Tracked, found: CpuSettings, now_s: float) -> bool:
        """Whether another program may have set what is ``found``; a limit of the agent's that systemd has written since
        the last look is taken over."""
        actuator = job.actuator
        if classify_change(job.in_force, found, actuator, exact=not job.unit) == "same":
            if found.burst_us != job.in_force.burst_us:
                self.writer.follow_burst(job, found)  # no event tells of it
            return False
        is_ours = bool(job.unit) and self.units.is_ours(job.unit, found, (actuator,))
        if is_ours:
            self.handle_write(job, found, now_s)
        return not is_ours

    def _record_write(
        self, job: Tracked, verdict: Verdict, change: Literal["raise", "lower"], values: dict[str, object], now_s: float
    ) -> None:
        """Another program set the limit that is in force: that is what is put back in the end, and respected for a
        time.

        For a unit that holds only for what an operator set through systemd (``values``), and for a raise above what was
        found: what is written to its file alone does not outlive the next reload.
        """
        found, actuator, old_cores = job.in_force, job.actuator, job.state.limit_cores
        writes, is_operators = self.context.config.writes, verdict is Verdict.OPERATOR
        is_engines = is_order(job, found, self.context.engines.is_up(job.found)) and verdict is not Verdict.STORED
        self.context.engines.ask(job.found)
        self.totals.foreign_writes[change] += not is_engines
        self.context.report_due = True
        if is_operators:
            self.units.confirm(job.unit, found, actuator, values)
        if is_operators or is_engines or not job.unit or is_raised_above(found, job.original, actuator):
            job.original = adopt_limit(job.original, found, actuator)
            self.writer.keep(job)
            self.table.update_hard_limit(job, now_s)
        found_cores = read_limit_cores(job, found)
        kind = "order" if is_engines else f"foreign-{change}"
        record(job, self.context.clock.wall_s(), kind, old_cores, found_cores, found_cores, "noticed")
        event, more = ("unit_ordered", {"unit": job.unit}) if is_operators else ("foreign_write", {"kind": change})
        if is_engines and job.found.engine is not None:
            event, more = "limit_ordered", {"engine": job.found.engine.kind}
        log.warning(event, job_id=job.found.job_id, **more, old_cores=old_cores, new_cores=found.cores)
        # A raise of a unit's limit is respected, and so is what is written after it within that time.
        respected = change == "raise" or isinstance(job.hold.decider, Respected)
        respected = respected and writes.override_ttl_s > 0 and verdict is not Verdict.STORED
        if is_engines:
            # It is what the job may have from now on; the monitor goes on below it, and a pin is set anew.
            job.hold = job.hold.expire(math.inf).unpin().write(None)
            job.restart(found_cores, now_s)
            return
        if is_operators or not job.unit or respected:
            job.hold = job.hold.respect(now_s, writes.override_ttl_s, "systemctl set-property" if is_operators else "")
            job.restart(found_cores, now_s)
            return
        job.hold = job.hold.lose(now_s, writes.drift_backoff_s, writes.drift_max)
        if job.hold.is_contested:
            try:
                self.writer.abandon(job)
            except CpumondError as error:
                self.context.complain(job, error)
            log.error("limit_contested", job_id=job.found.job_id, cgroup=job.found.path, losses=job.hold.losses)

    def take_unit_news(self, now_s: float) -> None:
        """What systemd said since the last tick."""
        events = self.units.poll()
        for event in events:
            job = self.table.by_unit.get(event.unit)
            if event.kind == "reloaded":
                # It applied its stored values to all units, and their properties may be others now.
                self.read_all = True
                self._reloaded_at_s = now_s
                for each in self.table.by_unit.values():
                    self.table.ask_labels(each)
            elif event.kind == "connected":
                self.writer.ask_again(now_s, at_once=True)
            elif event.kind in ("away", "denied"):
                # That holds for all units.
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
            self._lower_by_file(job, event.text or "there is no such unit", now_s)
        elif event.kind == "done":
            if job.touched:
                job.in_force = self.units.read_values(dict(event.properties), job.in_force)
            self.table.watch_again(job)
            self.changed.add(job.found.path)

    def _on_property_conflict(self, event: UnitEvent, now_s: float) -> None:
        """An operator gave a unit another limit just before the agent's was to be set, which then was not."""
        job = self.table.by_unit.get(event.unit)
        if job is None or not job.touched or job.hold.is_contested or not os.path.isdir(job.cgroup.directory):
            # Its original is on its way back, or its cgroup is gone.
            self.writer.adopt_operator_values(event.unit, event.values)
            return
        others = {name: value for name, value in event.values.items() if name != PROPERTIES[job.actuator]}
        if others:
            # Properties of a setting that is not moved any more, and was to go back together with the one that is.
            job.original = self.units.read_values(others, job.original)
            self.writer.keep(job)
            log.warning("unit_ordered", job_id=job.found.job_id, unit=job.unit, properties=others)
        if len(others) == len(event.values):
            return
        before = job.in_force if job.hold.asking is None else job.hold.asking.before
        found, job.hold = read_settings_or_none(job) or job.in_force, job.hold.answered()
        job.in_force = self.units.read_values(
            event.values, msgspec.structs.replace(found, period_us=job.original.period_us)
        )
        try:
            job.cgroup.write_settings(found, job.in_force)  # the agent may have raised it since
        except CpumondError as error:
            self.context.complain(None, error)
        self._handle_unit_write(job, before, event.values, now_s, is_conflict=True)

    def expire_gone_units(self, now_s: float) -> None:
        """Units whose time to come again is over, and those that systemd is to have back."""
        if self.writer.gone:
            root = self.context.hierarchies.cpu_root
            self.writer.expire_gone(now_s, lambda path: os.path.isdir(os.path.join(root, path)), self._removed)
        if now_s >= self.strays_at_s:
            self.strays_at_s = now_s + GONE_S
            self._restore_strays(now_s)
        if self.writer.returning:
            self.writer.reap_acknowledged()
        self.writer.ask_again(now_s)

    def _restore_strays(self, now_s: float) -> None:
        """Put back what was changed and has no job: its restore failed, or no source names its unit's new cgroup."""
        finder = CgroupFinder(self.context.hierarchies)
        for path, original in self.writer.list_strays(now_s, self.table.jobs).items():
            cgroup = None
            try:
                cgroup = open_original(self.context.hierarchies, finder, path, original)
                in_force = cgroup.read_settings() if cgroup is not None else None
                if cgroup is None or in_force is None:
                    is_there = original.unit and os.path.isdir(os.path.join(self.context.hierarchies.cpu_root, path))
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
                self.context.complain(None, error)
            finally:
                if cgroup is not None:
                    cgroup.close()

    def _lower_by_file(self, job: Tracked, why: str, now_s: float) -> None:
        """systemd may not have taken a lower limit: the agent writes it. A unit without a limit file has no lower limit
        then; that is tried again in a minute."""
        if not (job.touched and job.cgroup.is_there()):
            return
        if any(os.path.exists(path) for path in job.cgroup.watch_paths(job.actuator)):
            job.hold = job.hold.write(now_s)
            return
        record = self.units.read(job.unit)
        if set(record.target) - set(record.applied):
            self.units.forget(job.unit)
            job.last_error = f"systemd made no limit file for it: {why}"
            job.restart(read_limit_cores(job, job.in_force), now_s)
            job.hold = job.hold.fail(now_s + ASK_AGAIN_S)
            self.context.report_due = True

    def _resolve_unit_write(self, job: Tracked, values: dict[str, object], now_s: float) -> None:
        """A write to a unit's limit, now that systemd has told its own value; empty: it cannot be asked."""
        asking, job.hold = job.hold.asking, job.hold.answered()
        if asking is None or job.hold.is_contested:
            return
        job.in_force = read_settings_or_none(job) or job.in_force
        self._handle_unit_write(job, asking.before, values, now_s)

    def _handle_unit_write(
        self,
        job: Tracked,
        before: CpuSettings,
        values: dict[str, object] | None,
        now_s: float,
        is_conflict: bool = False,
    ) -> None:
        """Find out who gave a unit the limit in force, and do what follows. ``before`` was in force until then;
        ``values`` as systemd tells them, None where it was not asked yet."""
        actuator = job.actuator
        change = classify_change(before, job.in_force, actuator)
        if change == "same" and not is_conflict:
            return
        verdict = self.units.judge(
            job.unit,
            actuator,
            job.in_force,
            job.original,
            values,
            is_conflict=is_conflict,
            is_reloaded=now_s - self._reloaded_at_s < RELOAD_S,
            is_inherited=self.writer.is_inherited(job.cgroup.path),
        )
        if verdict is Verdict.OWN:
            less = read_limit_cores(job, job.in_force) < job.state.limit_cores
            if less or not self.units.can_lower(job.unit):
                job.hold = job.hold.write(now_s)
        elif verdict is Verdict.UNKNOWN:
            job.hold = job.hold.ask(before, now_s)
            self.units.hold_back(job.unit)
            if self.units.can_ask:
                self.units.ask(job.unit)
            else:
                self._resolve_unit_write(job, {}, now_s)
        elif verdict is Verdict.OUTRANKED:
            self.units.want_again(job.unit, values)
        else:
            self._record_write(job, verdict, "raise" if change == "raise" else "lower", values or {}, now_s)
