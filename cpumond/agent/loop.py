"""The agent's loop. Read ``Agent.tick`` first: one check period, six phases, values go one way.

The tick owns the job records and nobody else does. Signals and requests of the control socket are carried out between
two ticks, in this same thread.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import math
import os
import select
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import structlog

from cpumond.agent.assigned import AssignedJobs, Usage
from cpumond.agent.clock import Clock
from cpumond.agent.jobs import Tracked, record
from cpumond.agent.looks import LookSchedule, list_changed
from cpumond.agent.notify import Notifier
from cpumond.agent.peaks import PeakFile
from cpumond.agent.places import Places
from cpumond.agent.registry import RegisteredJobs
from cpumond.agent.restore import find_anew, find_strangers, open_original, restore_all, restore_cgroup
from cpumond.agent.ring import Result
from cpumond.agent.snapshot import TickEnd, TickSnapshot, Totals
from cpumond.agent.state_file import ENDS_FILE, ServiceEnds, read_service_ends, save
from cpumond.agent.table import JobTable
from cpumond.agent.unit_limits import PROPERTIES, UnitLimits, read_labels
from cpumond.agent.watch import Watcher, existing_directories
from cpumond.agent.writer import ASK_AGAIN_S, GONE_S, LimitWriter, read_limit_cores, read_settings_or_none
from cpumond.answers import LinkView
from cpumond.cgroup import Cgroup, open_cgroup
from cpumond.cgroup.files import is_leaf
from cpumond.cgroup.find import CgroupFinder
from cpumond.cgroup.mounts import Hierarchies
from cpumond.cgroup.settings import CpuSettings, classify_change, is_raised_above, take_order
from cpumond.cgroup.systemd import QUOTA, UnitEvent
from cpumond.config import AgentConfig
from cpumond.discovery import concerns, describe_source, list_jobs
from cpumond.errors import ConfigError, CpumondError, RefusedError, UnavailableError
from cpumond.monitor.model import Decision
from cpumond.monitor.peak import forgive, put_off_cut
from cpumond.monitor.policy import rebase, reject, settle
from cpumond.monitor.protect import compute_throttled_ratio
from cpumond.monitor.rules import check, look
from cpumond.reporters import REPORTERS, Reporter
from cpumond.wire import FinishedJob, Heartbeat, HeartbeatAnswer, JobReport

if TYPE_CHECKING:
    from cpumond.reporters.scheduler import SchedulerLink

log = structlog.get_logger("cpumond.agent")

PAUSE_FILE = "pause"
LATE_PERIODS = 3
MAX_STRIDE = 16
LEAF_TURNS = 10
EARLY_BEAT = 0.05
SET_PROPERTY = "systemctl set-property"
RELOAD_S = 10.0
"""So long after systemd has read its units again, what it gives back is its own doing."""
UNITS_FLUSH_S, UNITS_FLUSHES = 5.0, 6
"""At the end, for systemd to take all limits back: it must take some in each part of that time."""
LAST_ANSWERS_S = 2.0
"""At the end, for systemd to say whose the last changes are."""
ANSWER_PATIENCE_S = 3.0
"""So long an increase waits for systemd to say whose a change is."""
CALM_S = 600.0
"""Foreign writes at least this far apart do not add up to a contest."""

Decided = tuple[Tracked, Decision]


class Agent:
    """One agent: its jobs, what it counts, and the loop.

    ``last`` is the end of the newest tick, for any thread; ``read_snapshot`` gives the whole of it, frozen.
    """

    def __init__(
        self,
        config: AgentConfig,
        hierarchies: Hierarchies,
        reporter: Reporter,
        notifier: Notifier | None = None,
        clock: type[Clock] = Clock,
        assigned: AssignedJobs | None = None,
        units: UnitLimits | None = None,
    ) -> None:
        self.config = config
        self.hierarchies = hierarchies
        self.reporter = reporter
        self.link: SchedulerLink | None = None
        """Where the scheduler's heartbeats go; its answers come back through ``take_answer``."""
        self.assigned = assigned
        self.notifier = notifier or Notifier({})
        self.clock = clock
        self.watcher = Watcher()
        self.units = units or UnitLimits(hierarchies.cpu_version, clock.monotonic_s)
        self.writer = LimitWriter(config, self.units)
        self.peaks = PeakFile(config.state_dir, hierarchies.cpu_root, hierarchies.read_root_id(), clock)
        self.table = JobTable(config, hierarchies, self.writer, self.watcher, self.peaks)
        self.registered = RegisteredJobs(config.state_dir)
        self.places = Places(
            self.writer.look_after_files,
            self.registered.look_after_file,
            self._look_after_ends,
            self.peaks.look_after_file,
        )
        if assigned is not None:
            self.places.looks.append(assigned.look_after_files)
        self.totals = Totals()
        self.incarnation = uuid.uuid4().hex
        self.capacity_cores = config.resources.cpu or float(os.cpu_count() or 1)
        self.period_s = config.node_settings().check_period_s
        self.last: TickEnd | None = None
        self._snapshot: TickSnapshot | None = None
        self._thread = threading.get_ident()
        self.reload: Callable[[], AgentConfig] | None = None
        self.stopping = False
        self.reloading = False
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Not in ``close``: another thread may still be about to write, and the number would be somebody else's.
        weakref.finalize(self, _close_all, self._wake_r, self._wake_w).atexit = False
        self._poll = select.poll()
        self._poll.register(self._wake_r, select.POLLIN)
        self._waits_for_executor = False
        self._answers: collections.deque[tuple[HeartbeatAnswer, float]] = collections.deque()
        self._requests: collections.deque[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = (
            collections.deque()
        )
        self._closed = False
        self._service_ends: dict[str, int] = {}
        self._sequence = 0
        self._report_at_s = self._beat_at_s = 0.0
        self._report_due = True
        self._beat_due = False
        """Something that only the scheduler has to know at once."""
        self._sample_at_s = -math.inf
        self._rescan_at_s = 0.0
        self._strays_at_s = math.inf
        self._reloaded_at_s = -math.inf
        self._rescan_due = True
        self._read_all_limits = False
        self._empty_rescans = 0
        self._discovery_problems: list[str] = []
        self._covered: list[str] = []
        """Mount points that do not show their hierarchy to others any more."""
        self._boot_offset_s = clock.boottime_s() - clock.monotonic_s()
        self._stride = 1
        self._looks = LookSchedule()
        self._has_looks = False
        """Whether any job asks for looks between two checks; without one nothing is spent on them."""
        self._looks_closed = 0
        """``JobTable.closed_total`` as of the schedule: of a job that is closed nothing may be read."""
        self._changed_limits: set[str] = set()
        self._last_complaint = ""
        self._pinned = False
        self._stale_pins: set[str] = set()
        """Of jobs that ended, to be forgotten as soon as the disk allows it."""
        self._forget_pins_at_s = -math.inf
        self._followed: set[str] = set()
        """Cgroups of the scheduler's jobs that the monitor was given."""
        self._cost_mark = (clock.monotonic_s(), time.process_time())

    def tick(self, now_s: float, late_s: float = 0.0) -> None:
        """One check period. Never raises for what a single job or file does."""
        started_s = self.clock.monotonic_s()
        self._look_after_places(now_s)
        removed = self._take_unit_news(now_s)
        self._discover(now_s)  # 1. which jobs are there
        self._mind_units(now_s, removed)
        self._take_foreign_changes(now_s)
        if self._lost_time(late_s):
            self._rebaseline()
        self._serve_scheduler(beat=False)
        decided = self._sample_and_step(now_s)  # 2. + 3. counters in, decisions out
        self._apply(decided, now_s)  # 4. decisions to cgroups
        self._plan_looks(now_s)
        self._report(now_s)  # 5. newest state to the scheduler
        self._export(now_s, started_s)  # 6. this tick is what everybody else reads from now on

    def _look_after_places(self, now_s: float) -> None:
        """What was removed of the agent's own files is written anew; where another agent has them, this one ends."""
        self.places.look(now_s)
        if self.places.is_ousted and not self.stopping:
            log.error("another_agent", error=self.places.problem, advice="this one puts its limits back and ends")
            self.writer.is_ousted = self.stopping = True

    def _look_after_ends(self) -> list[str]:
        path = os.path.join(self.config.state_dir, ENDS_FILE)
        if not any(self._service_ends.values()) or os.path.exists(path):
            return []
        save(path, ServiceEnds(self._service_ends))
        return [path]

    # ---- 1. discover

    def _discover(self, now_s: float) -> None:
        paths, owners, lost = self.watcher.drain()
        children = any(self._concerns_a_source(path) for path in paths)
        # Kept until the tick takes them: a request between two ticks comes here too.
        self._changed_limits |= owners
        self._read_all_limits |= lost
        due = self._rescan_due or now_s >= self._rescan_at_s
        if not (children or lost or due or self._gained_children()):
            return
        self._rescan_due = False
        self._rescan_at_s = now_s + self.config.discovery.rescan_period_s
        self._read_all_limits |= self.watcher.short
        known = self.registered.found_jobs() + (self.assigned.found_jobs() if self.assigned is not None else [])
        scan = list_jobs(self.config.source, known, self.hierarchies.cpu_root)
        self._rescan_due = self.watcher.watch_directories(existing_directories(self.hierarchies.cpu_root, scan.watched))
        if self.table.refresh(scan.jobs, now_s):
            self._report_due = True
        self._rescan_due |= self.table.waits_for_half()
        self._discovery_problems = scan.problems
        self._look_at_mounts()
        self.writer.log.check()
        self._empty_rescans = 0 if len(self.table) or not self.config.source else self._empty_rescans + 1
        self._choose_period()

    def _look_at_mounts(self) -> None:
        """See whether others find the hierarchies, too: else nobody could put a limit back after this agent."""
        covered = self.hierarchies.list_covered()
        if covered != self._covered:
            say = log.error if covered else log.warning
            say("mounts_covered" if covered else "mounts_back", mounts=covered or self._covered)
            self._covered, self._report_due = covered, True

    def _choose_period(self) -> None:
        """As often as the job that is looked at most often."""
        self.period_s = min(
            [self.config.node_settings().check_period_s, *(job.settings.check_period_s for job in self.table)]
        )
        self._has_looks = any(job.settings.poll_s > 0.0 for job in self.table)

    def _gained_children(self) -> bool:
        """Whether a cgroup that was changed is no leaf any more; a tenth of them is looked at in each tick."""
        turn = self.totals.ticks % LEAF_TURNS
        return any(
            number % LEAF_TURNS == turn and job.touched and not is_leaf(job.cgroup.place)
            for number, job in enumerate(self.table)
        )

    def _concerns_a_source(self, path: str) -> bool:
        """Whether a change at ``path`` can be one of a job: other cgroups beside a watched path come and go too."""
        relative = os.path.relpath(path, self.hierarchies.cpu_root)
        return any(concerns(source, relative) for source in self.config.source)

    # ---- foreign writes: systemd's reloads, other agents, people

    def _take_foreign_changes(self, now_s: float) -> None:
        jobs = list(self.table) if self._read_all_limits else [
            self.table.jobs[path] for path in self._changed_limits if path in self.table.jobs
        ]  # fmt: skip
        for job in jobs:
            found = read_settings_or_none(job)
            if found is not None:
                self._judge_foreign_change(job, found, now_s)
        self._changed_limits, self._read_all_limits = set(), False
        self._store_orders()

    def _store_orders(self) -> None:
        """What somebody else ordered is on disk before anything is done about it; where that fails it is tried again,
        and nothing of it is lowered until then."""
        if self.writer.unsaved:
            try:
                self.writer.flush()
            except CpumondError as error:
                self._complain(None, error)

    def _judge_foreign_change(self, job: Tracked, found: CpuSettings, now_s: float) -> None:
        actuator = job.settings.actuator
        change = classify_change(job.in_force, found, actuator, exact=not job.unit)
        before = job.in_force
        job.in_force = found
        if not job.touched:
            if found != before:
                job.original = found
                self.table.follow_hard(job, now_s)
            return
        if found.burst_us != before.burst_us and (change == "same" or (found.burst_us or 0) > (before.burst_us or 0)):
            # One that is lowered together with the quota had to be: the kernel takes no quota below it.
            self.writer.follow_burst(job, found)
        if change == "same" or job.contested:
            return
        if job.unit and self._is_for_systemd_to_say(job, found, before, now_s):
            return
        self._take_foreign_write(job, change, found, now_s)

    def _take_foreign_write(
        self,
        job: Tracked,
        change: Literal["raise", "lower"],
        found: CpuSettings,
        now_s: float,
        by_systemd: bool = False,
    ) -> None:
        """Somebody else set the limit: that is what is ordered from now on, and put back in the end.

        Of a unit that is so for a raise above what was found only: its owner is systemd, and what others write to its
        file does not outlive the next reload. ``by_systemd``: it wrote what it was told long ago, which is no order.
        """
        actuator = job.settings.actuator
        self.totals.foreign_writes[change] += 1
        self._report_due = True
        writes, old_cores = self.config.writes, job.state.limit_cores
        if not job.unit or is_raised_above(found, job.original, actuator):
            job.original = take_order(job.original, found, actuator)
            self.writer.keep(job)
            self.table.follow_hard(job, now_s)
        found_cores = read_limit_cores(job, found)
        record(job, self.clock.wall_s(), f"foreign-{change}", old_cores, found_cores, found_cores, "noticed")
        log.warning("foreign_write", job_id=job.found.job_id, kind=change, old_cores=old_cores, new_cores=found.cores)
        # Of a unit a raise is meant, and so is whatever is written after it within its time.
        meant = not job.unit or change == "raise" or job.override_until_s is not None
        if not job.unit or (meant and writes.override_ttl_s > 0 and not by_systemd):
            if writes.override_ttl_s > 0:
                job.override_until_s, job.override_by = now_s + writes.override_ttl_s, ""
            job.reapply_at_s = None
            job.restart(found_cores, now_s)
            return
        calm_s = max(CALM_S, 4 * writes.drift_backoff_s * 2**job.losses)
        job.losses = job.losses + 1 if now_s - job.lost_at_s < calm_s else 1
        job.lost_at_s = now_s
        if job.losses >= writes.drift_max:
            job.contested = True
            job.reapply_at_s = None
            try:
                self.writer.leave(job)
            except CpumondError as error:
                self._complain(job, error)
            log.error("limit_contested", job_id=job.found.job_id, cgroup=job.found.path, losses=job.losses)
        else:
            job.reapply_at_s = now_s + writes.drift_backoff_s * 2 ** (job.losses - 1)

    # ---- units of systemd

    def _take_unit_news(self, now_s: float) -> set[str]:
        """What systemd said since the last tick; the units that it unloaded."""
        events = self.units.poll() if self.units.has_news() else []
        for event in events:
            job = self.table.by_unit.get(event.unit)
            if event.kind == "reloaded":
                # It wrote its own belief to all units, and their properties may be others now.
                self._read_all_limits = True
                self._reloaded_at_s = now_s
                for each in self.table.by_unit.values():
                    self.table.ask_labels(each)
            elif event.kind == "connected":
                self.writer.ask_again(now_s, at_once=True)
            elif event.kind in ("away", "denied"):
                # It is so for all of them.
                for each in self.table.by_unit.values():
                    if event.kind == "away":
                        self._judge_unit(each, {}, now_s)
                    self._take_back(each, event.text, now_s)
            elif event.kind == "replaced":
                self._take_order(event, now_s)
            elif job is not None:
                self._take_news_of(job, event, now_s)
        return {event.unit for event in events if event.kind == "removed"}

    def _take_news_of(self, job: Tracked, event: UnitEvent, now_s: float) -> None:
        if event.kind == "answer" and QUOTA in event.values:
            self._judge_unit(job, event.values, now_s)
        elif event.kind == "answer":
            job.labels = read_labels(event.values)
        elif event.kind in ("refused", "no-unit"):
            self._take_back(job, event.text or "there is no such unit", now_s)
        elif event.kind == "done" and (job.file_missing or not job.watches):
            self.table.watch_again(job)
            self._changed_limits.add(job.found.path)

    def _take_order(self, event: UnitEvent, now_s: float) -> None:
        """Somebody gave a unit another limit just before ours was to be set, which then was not."""
        job = self.table.by_unit.get(event.unit)
        if job is None or not job.touched or job.contested or not os.path.isdir(job.cgroup.directory):
            self._accept_order(event)
            return
        actuator, found = job.settings.actuator, read_settings_or_none(job) or job.in_force
        others = {name: value for name, value in event.values.items() if name != PROPERTIES[actuator]}
        values = {name: value for name, value in event.values.items() if name not in others}
        if others:
            # Of a setting that is not moved any more, and was to go back together with what is.
            job.original = self.units.read_values(others, job.original)
            self.writer.keep(job)
            self.units.leave(job.unit, others)
            log.warning("unit_ordered", job_id=job.found.job_id, unit=job.unit, properties=others)
        self._judge_foreign_change(job, found, now_s)
        job.before_asking = None
        base = msgspec.structs.replace(found, period_us=job.original.period_us)
        ordered = self.units.read_values(event.values, base)
        if not values or not self.units.was_told(job.unit) or self.units.is_told(job.unit, values):
            self.units.want_again(job.unit)
        elif classify_change(job.original, ordered, actuator) == "same" and now_s - self._reloaded_at_s < RELOAD_S:
            job.reapply_at_s = now_s
            self.units.want_again(job.unit)
        else:
            more = read_limit_cores(job, ordered) > job.state.limit_cores
            self._respect_order(job, "raise" if more else "lower", ordered, values, now_s)
        in_force = None if self.is_paused() else self._obey_order(job.cgroup, event.values)
        if in_force is None:
            job.override_until_s, job.reapply_at_s = None, now_s
        job.in_force = in_force or found

    def _accept_order(self, event: UnitEvent) -> None:
        """The same of a unit whose original was on its way back, or whose cgroup is gone: theirs is put back."""
        for path in self.writer.accept(event.unit, event.values):
            cgroup = None
            try:
                cgroup = open_cgroup(self.hierarchies.without_counters(), path)
                if cgroup is not None:
                    self._obey_order(cgroup, event.values)
            except CpumondError as error:
                self._complain(None, error)
            finally:
                if cgroup is not None:
                    cgroup.close()

    def _obey_order(self, cgroup: Cgroup, values: dict[str, object]) -> CpuSettings | None:
        """Have the file say what systemd believes: it may have been written by us since. None: it does not."""
        try:
            return self.writer.obey(cgroup, values)
        except CpumondError as error:
            self._complain(None, error)
            return None

    def _mind_units(self, now_s: float, removed: set[str]) -> None:
        """Units whose time to come again is over, and those that systemd is to have back."""
        if self.writer.gone:
            root = self.hierarchies.cpu_root
            self.writer.mind_gone(now_s, lambda path: os.path.isdir(os.path.join(root, path)), removed)
        if now_s >= self._strays_at_s:
            self._strays_at_s = now_s + GONE_S
            self._mind_strays(now_s)
        if self.writer.returning:
            self.writer.mind_returning()
        self.writer.ask_again(now_s)

    def _mind_strays(self, now_s: float) -> None:
        """Put back what was changed and has no job: its restore failed, or no source names its unit's new cgroup."""
        finder = CgroupFinder(self.hierarchies)
        for path, original in self.writer.list_strays(now_s, self.table.jobs).items():
            cgroup = None
            try:
                cgroup = open_original(self.hierarchies, finder, path, original)
                in_force = cgroup.read_settings() if cgroup is not None else None
                if cgroup is None or in_force is None:
                    if finder.find(path, original.inode) is None and not self._is_there(path, original.unit):
                        self.writer.give_back(path)
                    continue
                known = original if cgroup.inode == original.inode else None
                if known is None:
                    known = self.writer.take_over(cgroup, in_force, trusted=False)
                if known is None:
                    self.writer.forget(path)
                else:
                    written = self.writer.log.records.get(original.inode)
                    self.writer.give_back(path, restore_cgroup(cgroup, known, written, self.writer.note_raise))
                    log.info("stray_restored", cgroup=path)
            except CpumondError as error:
                self._strays_at_s = now_s + ASK_AGAIN_S
                self._complain(None, error)
            finally:
                if cgroup is not None:
                    cgroup.close()

    def _is_there(self, path: str, unit: str) -> bool:
        return bool(unit) and os.path.isdir(os.path.join(self.hierarchies.cpu_root, path))

    def _take_back(self, job: Tracked, why: str, now_s: float) -> None:
        """A unit without a limit file has no limit of ours when systemd made none; it is tried again in a minute."""
        paths = job.cgroup.watch_paths(job.settings.actuator)
        if not job.touched or any(os.path.exists(path) for path in paths):
            return
        found = read_settings_or_none(job)
        if found is not None and found != job.in_force:
            self.units.forget(job.unit)
            job.in_force, job.last_error = found, f"systemd made no limit file for it: {why}"
            job.restart(read_limit_cores(job, found), now_s)
            job.write_after_s = now_s + ASK_AGAIN_S
            self._report_due = True

    def _is_for_systemd_to_say(self, job: Tracked, found: CpuSettings, before: CpuSettings, now_s: float) -> bool:
        """Whether a foreign write to a unit's limit needs no judgement now: systemd came late with an order of ours,
        or is asked whether it is its own."""
        actuator = job.settings.actuator
        if self.units.is_late(job.unit, found, actuator):
            job.reapply_at_s = now_s
            self.units.want_again(job.unit)
            return True
        if job.before_asking is None:
            job.before_asking, job.asked_at_s = before, now_s
        if self.units.can_ask:
            self.units.ask(job.unit)
        else:
            self._judge_unit(job, {}, now_s)
        return True

    def _judge_unit(self, job: Tracked, values: dict[str, object], now_s: float) -> None:
        """A foreign write to a unit's limit, now that systemd has told its own belief; empty: it cannot be asked.

        What it believes in and we did not tell it, is somebody's order. What we told it, or what was found before any
        order of ours, it wrote by itself (daemon-reload). Anything else was written to the file alone.
        """
        before, job.before_asking = job.before_asking, None
        if before is None:
            return
        found, actuator = job.in_force, job.settings.actuator
        change = classify_change(before, found, actuator)
        if change == "same" or job.contested:
            return
        known = any(value is not None for value in values.values())
        believed = not known or self.units.is_answer(values, found, actuator)
        told = known and self.units.was_told(job.unit)
        as_found = believed and classify_change(job.original, found, actuator) == "same"
        raised = is_raised_above(found, job.original, actuator)
        unsure = not known or (not told and self.writer.is_inherited(job.cgroup.path))
        if unsure and not as_found and not raised:
            # Nobody knows whose it is, it may be a limit of ours that systemd was told by the run before: the original,
            # which is for good, is not changed for that.
            self._take_foreign_write(job, change, found, now_s)
            return
        if as_found and told and now_s - self._reloaded_at_s < RELOAD_S:
            # A drop-in whose name sorts after ours, such as override.conf, outranks it at each reload.
            job.reapply_at_s = now_s
            self.units.want_again(job.unit, values)
        elif as_found and not told:
            self._take_foreign_write(job, change, found, now_s, by_systemd=True)
        elif believed and not self.units.is_wanted(job.unit, found, actuator):
            self._respect_order(job, change, found, values, now_s)
        else:
            self._take_foreign_write(job, change, found, now_s)

    def _respect_order(
        self,
        job: Tracked,
        change: Literal["raise", "lower"],
        found: CpuSettings,
        values: dict[str, object],
        now_s: float,
    ) -> None:
        """Somebody used ``systemctl set-property``, or edited the unit: that is what it orders from now on."""
        self.totals.foreign_writes[change] += 1
        self._report_due = True
        old_cores = job.state.limit_cores
        self.units.confirm(job.unit, found, job.settings.actuator, values)
        job.original = take_order(job.original, found, job.settings.actuator)
        self.writer.keep(job)
        self.table.follow_hard(job, now_s)
        found_cores = read_limit_cores(job, found)
        record(job, self.clock.wall_s(), f"foreign-{change}", old_cores, found_cores, found_cores, "noticed")
        log.warning("unit_ordered", job_id=job.found.job_id, unit=job.unit, old_cores=old_cores, new_cores=found.cores)
        if self.config.writes.override_ttl_s > 0:
            job.override_until_s, job.override_by = now_s + self.config.writes.override_ttl_s, SET_PROPERTY
        job.reapply_at_s = None
        job.restart(found_cores, now_s)

    # ---- 2. + 3. sample, smooth, vote, decide

    def _lost_time(self, late_s: float) -> bool:
        """Whether the last interval cannot be trusted: a tick far too late, or a suspend."""
        offset_s = self.clock.boottime_s() - self.clock.monotonic_s()
        suspended_s = offset_s - self._boot_offset_s
        self._boot_offset_s = offset_s
        return late_s > LATE_PERIODS * self.period_s or suspended_s > self.period_s

    def _rebaseline(self) -> None:
        self.totals.rebaselines += 1
        for job in self.table:
            job.state = rebase(job.state, None)

    def _sample_and_step(self, now_s: float) -> list[Decided]:
        decided: list[Decided] = []
        gone: list[Tracked] = []
        clock_s, counts, stride = self.clock.monotonic_s, self.totals.decisions, self._stride
        slack_s = self.period_s / 2
        for number, job in enumerate(self.table, self.totals.ticks):
            if job.mode == "off" or now_s + slack_s < job.next_check_s:
                continue
            if stride > 1 and number % stride:
                self.totals.shed_checks += 1
                continue
            # Fixed rate: a check that came half a tick early or late does not move the next one.
            on_time = job.next_check_s > now_s - slack_s
            job.next_check_s = (job.next_check_s if on_time else now_s) + job.settings.check_period_s
            try:
                at_s = clock_s()
                reading = job.cgroup.read(at_s)
                if reading is None:
                    gone.append(job)
                    continue
                before = job.state
                job.state, decision = check(before, reading, at_s, job.settings)
            except CpumondError as error:
                self._complain(job, error)
                continue
            job.decision = decision
            if job.state.held is not before.held and job.is_held:
                job.state = forgive(job.state, before)
            if job.state.throttled_cpu_s != before.throttled_cpu_s:
                self.totals.throttled_cpu_s += job.state.throttled_cpu_s - before.throttled_cpu_s
                self.totals.late_cpu_s += job.state.late_cpu_s - before.late_cpu_s if job.writes else 0.0
            if decision.throttled_ratio and job.samples is not None:
                job.samples.peak_ratio = max(job.samples.peak_ratio, decision.throttled_ratio)
            counts[decision.kind] += 1
            if decision.new_cores != decision.old_cores:
                decided.append((job, decision))
        for job in gone:
            self._report_due = self._rescan_due = True
            self.table.drop(job)
        return decided

    # ---- looks between two checks

    def _plan_looks(self, now_s: float) -> None:
        if self._has_looks or self._looks.next_s < math.inf:
            self._looks.refill(self.table, now_s)
            self._looks_closed = self.table.closed_total

    def look(self, now_s: float) -> None:
        """Between two ticks, when it is due: what was held back by a lowered limit gets everything back at once.

        Never raises for what a single job or file does. One pread a job where nothing was throttled.
        """
        if now_s < self._looks.next_s:
            return
        if self._looks_closed != self.table.closed_total:
            self._plan_looks(now_s)
        held_back: list[tuple[Tracked, str, Decision]] = []
        for job in list_changed(self._looks.take_due(now_s, self._stride)):
            try:
                decision = self._look_closer(job, now_s)
            except CpumondError as error:
                self._complain(job, error)
                continue
            if decision is not None:
                held_back.append((job, decision.kind, decision))
        if held_back:
            self._write_limits(held_back, now_s)
            self._snapshot = None

    def _look_closer(self, job: Tracked, now_s: float) -> Decision | None:
        """The restore of a job that a limit of ours holds back; None where it does not, or may not be written now: then
        the next check accounts for it."""
        before = job.state
        if before.limit_cores >= before.hard_cores or before.seen is None or now_s < job.write_after_s:
            return None
        if job.settings.actuator == "quota":
            throttled = job.cgroup.read_throttled()
            if throttled is None or throttled <= before.seen.nr_throttled:
                return None
        reading = job.cgroup.read(self.clock.monotonic_s())
        looked = None if reading is None else look(before, reading, job.settings)
        if reading is None or looked is None:
            return None
        after, decision = looked
        if decision.kind != "restore":
            job.state = after
            self.totals.throttled_cpu_s += after.throttled_cpu_s - before.throttled_cpu_s
            return None
        if _find_obstacle(job, decision, self.is_paused(), bool(self._covered), now_s):
            return None
        found = read_settings_or_none(job)
        if found is None:
            return None
        if classify_change(job.in_force, found, job.settings.actuator, exact=not job.unit) != "same":
            # It is not our limit that holds it back; the tick takes theirs over.
            self._changed_limits.add(job.found.path)
            return None
        job.state, job.decision = after, decision
        self.totals.decisions[decision.kind] += 1
        self.totals.looks_restored += 1
        self.totals.throttled_cpu_s += after.throttled_cpu_s - before.throttled_cpu_s
        self.totals.late_cpu_s += after.late_cpu_s - before.late_cpu_s
        if job.samples is not None and before.base is not None:
            ratio = compute_throttled_ratio(before.base, reading)
            job.samples.peak_ratio = max(job.samples.peak_ratio, ratio)
        return decision

    # ---- 4. apply

    def _apply(self, decided: list[Decided], now_s: float) -> None:
        self._end_overrides(now_s)
        self._apply_pins(now_s)
        paused = self.is_paused()
        allowed: list[tuple[Tracked, str, Decision]] = []
        for job, decision in decided:
            obstacle = _find_obstacle(job, decision, paused, bool(self._covered), now_s)
            if obstacle == "shadow":
                # The monitor's own limit moves, nothing is written (semantics.md 1.5).
                old_cores, new_cores = decision.old_cores, decision.new_cores
                record(job, self.clock.wall_s(), decision.kind, old_cores, new_cores, job.state.hard_cores, "shadow")
                continue
            if obstacle:
                job.state, job.result = reject(job.state, decision), obstacle
            else:
                allowed.append((job, decision.kind, decision))
        if not paused:
            allowed += self._find_reapplies(now_s)
        self._write_limits(allowed, now_s)

    def _write_limits(self, allowed: list[tuple[Tracked, str, Decision]], now_s: float) -> None:
        # Decreases first and from the leaves up, then increases from the top down: on v1 the kernel refuses a quota
        # above the parent's, and one below a child's.
        allowed.sort(key=_write_order)
        for job, kind, decision in self._secure(allowed):
            self._apply_one(job, kind, decision, now_s)
        try:
            self.writer.flush()
        except CpumondError as error:
            self._complain(None, error)

    def _secure(self, allowed: list[tuple[Tracked, str, Decision]]) -> list[tuple[Tracked, str, Decision]]:
        """Originals on disk first; where that fails nothing new is changed, what was changed before goes on."""
        if not allowed:
            return allowed
        try:
            self.writer.secure([job for job, _, _ in allowed])
        except CpumondError as error:
            self._complain(None, error)
        else:
            self._last_complaint = ""
        ready = []
        for item in allowed:
            job, kind, decision = item
            shrinks = decision.new_cores < decision.old_cores
            if job.touched and not (shrinks and job.found.path in self.writer.unsaved):
                ready.append(item)
            else:
                job.state, job.result = reject(job.state, decision), "failed"
                job.reapply_at_s = -math.inf if kind == "reapply" else job.reapply_at_s
        return ready

    def _apply_one(self, job: Tracked, kind: str, decision: Decision, now_s: float) -> None:
        found = None if job.unit else self._find_order(job)
        if found is not None:
            job.state, job.result = reject(job.state, decision), "overridden"
            self._judge_foreign_change(job, found, now_s)
            self._store_orders()
            return
        try:
            applied = self.writer.write(job, decision.new_cores)
        except (CpumondError, OSError) as error:
            self.totals.write_errors += 1
            self.totals.failed_restores += kind == "restore"
            job.write_errors += 1
            job.write_after_s = now_s + self.config.writes.drift_backoff_s
            if kind == "reapply":
                job.reapply_at_s = job.write_after_s
            said, job.last_error = job.last_error, str(error)
            job.state, job.result = reject(job.state, decision), "failed"
            record(job, self.clock.wall_s(), kind, decision.old_cores, decision.new_cores, decision.old_cores, "failed")
            if job.last_error != said or not isinstance(error, RefusedError):
                log.error("limit_write_failed", job_id=job.found.job_id, new_cores=decision.new_cores, error=str(error))
            return
        if applied.cores is None:
            job.result = "gone"
            self._rescan_due = True
            return
        if decision.new_cores > decision.old_cores:
            job.before_asking = None  # written over: an answer says nothing about it any more
        moved = applied.cores != decision.old_cores or kind == "pin" or (kind == "reapply" and applied.wrote)
        job.state, job.result, job.notes, job.last_error = (
            settle(job.state, decision, min(applied.cores, job.state.hard_cores)),
            "applied",
            applied.notes,
            "",
        )
        if kind != "reapply":
            job.reapply_at_s = None
        if not moved:
            if kind == "shrink":  # a bound of the kernel or of its threads holds the limit where it is
                job.state = put_off_cut(job.state, now_s)
            return
        self._report_due = True
        if kind == "restore":
            self.totals.restores += 1
            job.restores += 1
        record(job, self.clock.wall_s(), kind, decision.old_cores, decision.new_cores, applied.cores, "applied")
        log.info(
            "limit_changed",
            job_id=job.found.job_id,
            operation_id=job.found.operation_id or None,
            reason=kind,
            old_cores=decision.old_cores,
            new_cores=applied.cores,
            usage_cores=decision.usage_cores,
            smoothed_cores=job.state.smoothed_cores,
            votes_sum=decision.votes_sum,
            throttled_ratio=decision.throttled_ratio,
            pressure_ratio=decision.pressure_ratio,
        )

    def _find_order(self, job: Tracked) -> CpuSettings | None:
        """What somebody else has set since the last look, if anything: that must not be written over."""
        found = read_settings_or_none(job)
        if found is None or classify_change(job.in_force, found, job.settings.actuator, exact=True) == "same":
            return None
        return found

    def is_paused(self) -> bool:
        """Whether an operator's pause file stops all writes."""
        return os.path.exists(os.path.join(self.config.runtime_dir, PAUSE_FILE))

    def _end_overrides(self, now_s: float) -> None:
        for job in self.table:
            if job.override_until_s is not None and now_s >= job.override_until_s:
                job.override_until_s = None
                if job.pinned_cores is not None:
                    job.pinned_cores, self._rescan_due = None, True
                job.restart(read_limit_cores(job, job.in_force), now_s)
                log.info("override_ended", job_id=job.found.job_id, cores=job.state.limit_cores)

    def _find_reapplies(self, now_s: float) -> list[tuple[Tracked, str, Decision]]:
        """Limits that somebody lowered, or that may be higher now, due to be written again."""
        due = []
        for job in self.table:
            if job.reapply_at_s is not None and now_s >= job.reapply_at_s:
                job.reapply_at_s = None
                if job.writes and not job.contested and job.override_until_s is None and job.before_asking is None:
                    limit = job.state.limit_cores
                    due.append((job, "reapply", Decision("hold", limit, limit)))
        return due

    def _apply_pins(self, now_s: float) -> None:
        """Put limits that an operator pinned in force, end the pins that are over."""
        if not (self.registered.content.pins or self._pinned):
            return
        pins = self.registered.current_pins(self.clock.wall_s())
        self._pinned = bool(pins)
        for job in self.table:
            pin = pins.get(job.found.job_id) if job.writes else None
            if pin is None and job.pinned_cores is not None:
                job.pinned_cores = None
                job.restart(read_limit_cores(job, job.in_force), now_s)
            elif pin is not None and not self.is_paused() and job.pinned_cores != pin.cpu_limit:
                job.pinned_cores = pin.cpu_limit
                job.override_until_s, job.contested, job.losses, job.reapply_at_s = None, False, 0, None
                old = job.state.limit_cores
                job.restart(pin.cpu_limit, now_s)
                decision = Decision("hold", old, job.state.limit_cores)
                for item in self._secure([(job, "pin", decision)]):
                    self._apply_one(*item, now_s)

    def give_back(self, job: Tracked) -> None:
        """End a pin, an override or a contest: what is in force is the monitor's again."""
        now_s = self.clock.monotonic_s()
        # Of a contested job the agent's own limit is written again, else it goes on from what is there.
        limit = job.state.limit_cores if job.contested else read_limit_cores(job, job.in_force)
        job.reapply_at_s = now_s if job.contested else None
        job.override_until_s, job.contested, job.losses, job.pinned_cores = None, False, 0, None
        job.restart(limit, now_s)

    # ---- the scheduler's jobs

    def take_answer(self, answer: HeartbeatAnswer, sent_at_s: float) -> None:
        """An answer of the scheduler, from any thread; it is obeyed by the thread of the tick."""
        if self.assigned is not None:
            self._answers.append((answer, sent_at_s))
            self.wake()

    def _look_after_assigned(self, now_s: float) -> None:
        """Obey the scheduler and take in what became of its jobs; also between ticks, so that starts do not wait."""
        if self.assigned is None:
            return
        while self._answers:
            answer, sent_at_s = self._answers.popleft()
            self.assigned.obey(answer, sent_at_s, now_s)
        self._beat_due |= self.assigned.advance(now_s, self._count_cores)
        self._beat_due |= self.assigned.adjust(now_s, self._count_cores)
        self._forget_pins(self.assigned, now_s)
        followed = {job.path for job in self.assigned.found_jobs()}
        for path in self._followed - followed:
            # Its cgroup is removed already, or will be at once.
            if path in self.table.jobs:
                self.table.drop(self.table.jobs[path])
        for found in self.assigned.found_jobs():
            if found.path not in self._followed:
                self.table.add(found, now_s)
        if followed != self._followed:
            self._choose_period()
        self._followed = followed

    def _forget_pins(self, assigned: AssignedJobs, now_s: float) -> None:
        """The scheduler's jobs never come again: the pins of those that ended are of no use."""
        pins = self.registered.content.pins
        if not pins:
            return
        for finished in assigned.finished_jobs():
            if finished.job_id in pins and not self._has_other(finished):
                self._stale_pins.add(finished.job_id)
        for job_id in list(self._stale_pins) if now_s >= self._forget_pins_at_s else ():
            try:
                self.registered.pin(job_id, None)
            except CpumondError as error:
                # The disk refuses the others as well.
                self._forget_pins_at_s = now_s + self.config.discovery.rescan_period_s
                self._complain(None, error)
                return
            self._stale_pins.discard(job_id)

    def _has_other(self, finished: FinishedJob) -> bool:
        """Whether a job of the same id is none of the scheduler's, so that the pin may be for that one."""
        same = (path for path, job in self.table.jobs.items() if job.found.job_id == finished.job_id)
        return finished.job_id in self.registered.content.jobs or any(path != finished.cgroup for path in same)

    def _read_usage(self) -> dict[str, Usage]:
        """What the monitor knows of the scheduler's jobs, by cgroup."""
        return {path: job.usage() for path in self._followed if (job := self.table.jobs.get(path)) is not None}

    def _count_cores(self) -> tuple[dict[str, Usage], float]:
        """``_read_usage``, and the cores that all other jobs may use now."""
        others = [job.current_cores for path, job in self.table.jobs.items() if path not in self._followed]
        return self._read_usage(), math.fsum(others)

    # ---- 5. report

    def _report(self, now_s: float) -> None:
        """The node's full state to the reporter and the scheduler: when something changed, else in their periods."""
        report = self._report_due or now_s >= self._report_at_s
        period_s = self.config.scheduler.heartbeat_period_s
        # A tick shortly before it is due takes it along.
        due = now_s >= self._beat_at_s - EARLY_BEAT * period_s
        beat = self.link is not None and (self._report_due or self._beat_due or due)
        if not (report or beat):
            return
        self._report_due = self._beat_due = False
        self._beat_at_s = now_s + period_s if beat else self._beat_at_s
        self._sequence += 1
        heartbeat = self._make_heartbeat()
        if report:
            self._report_at_s = now_s + self.config.report.report_period_s
            self.reporter.submit(heartbeat)
        # A node that does not know which jobs it has must be silent: "none" would have them started elsewhere.
        if self.link is not None and beat and (self.assigned is None or self.assigned.knows_jobs):
            self.link.submit(heartbeat)

    def _make_heartbeat(self) -> Heartbeat:
        assigned: list[JobReport] = []
        if self.assigned is not None:
            self.assigned.note_usage(self._read_usage())
            assigned = self.assigned.reports()
        others = [job.report() for path, job in self.table.jobs.items() if path not in self._followed]
        return Heartbeat(
            self.config.node_id,
            self.incarnation,
            self._sequence,
            self.clock.wall_s(),
            self.capacity_cores,
            others + assigned,
            finished_jobs=self.assigned.finished_jobs() if self.assigned is not None else [],
        )

    # ---- 6. export

    def _export(self, now_s: float, started_s: float) -> None:
        self._take_samples(now_s)
        duration_s = self.clock.monotonic_s() - started_s
        self.totals.add_tick(duration_s)
        self._mind_the_cost()
        self._snapshot = None
        self.last = TickEnd(self.totals.ticks, self.clock.wall_s(), now_s, duration_s, self.period_s)

    @property
    def keeps_samples(self) -> bool:
        """Whether somebody could look at the jobs' graphs: on the page of this node, or on that of its scheduler."""
        return self.config.web.samples > 0 and bool(self.config.web.listen or self.config.scheduler.url)

    def _take_samples(self, now_s: float) -> None:
        """One point of each job's graphs, each ``[web] period``."""
        if not self.keeps_samples or now_s + self.period_s / 2 < self._sample_at_s:
            return
        period_s, size = self.config.web.period_s, self.config.web.samples
        # Fixed rate, as with the checks.
        on_time = self._sample_at_s > now_s - self.period_s / 2
        self._sample_at_s = (self._sample_at_s if on_time else now_s) + period_s
        at = self.clock.wall_s()
        for job in self.table:
            job.take_sample(at, size)

    def read_snapshot(self) -> TickSnapshot | None:
        """The newest tick, frozen; None before the first one. For any thread.

        It is made when first asked for, by the tick's thread between two ticks: a view of each job at each tick,
        seldom looked at, was a third of the agent's cost. Raises UnavailableError or TimeoutError as ``call`` does.
        """
        last, made = self.last, self._snapshot
        if last is None or (made is not None and made.tick == last.tick):
            return made
        here = threading.get_ident() == self._thread
        snapshot: TickSnapshot = self._publish() if here else self.call(self._publish)
        return snapshot

    def _publish(self) -> TickSnapshot:
        last, totals = self.last, self.totals
        assert last is not None
        problems = [*self._discovery_problems, *(f"{p}: {text}" for p, text in self.table.problems.items() if text)]
        problems += [
            text
            for text in (
                self.writer.damaged,
                self._last_complaint,
                self.units.problem,
                self.places.problem,
                self.peaks.problem,
            )
            if text
        ]
        problems += [
            f"{name}: it was unmounted or something is mounted over it; nothing is lowered until it is back, since "
            "`cpumond restore` could not find the limits there"
            for name in self._covered
        ]
        if self.assigned is not None and self.assigned.problem:
            problems.append(self.assigned.problem)
        link = self._view_link()
        if link is not None and (link.stats.last_error or link.warning):
            problems.append(f"scheduler {link.url}: {link.stats.last_error or link.warning}")
        if self._empty_rescans >= self.config.discovery.empty_rescans:
            patterns = ", ".join(describe_source(source) for source in self.config.source)
            problems.append(f"no cgroup matches any source ({patterns}); see `cpumond doctor`")
        self._snapshot = TickSnapshot(
            last.tick,
            last.at,
            last.at_s,
            last.duration_s,
            self.config.node_id,
            self.hierarchies.layout,
            last.check_period_s,
            tuple([job.view(last.at_s) for job in self.table]),
            dict(totals.decisions),
            dict(totals.foreign_writes),
            {
                "late_ticks": totals.late_ticks,
                "rebaselines": totals.rebaselines,
                "restores": totals.restores,
                "failed_restores": totals.failed_restores,
                "write_errors": totals.write_errors,
                "writes": self.writer.writes_total,
                "errors": totals.errors,
                "jobs_gone": self.table.gone_total,
                "shed_checks": totals.shed_checks,
                "looks_restored": totals.looks_restored,
                "lost_files": self.places.lost_total,
            },
            tuple(totals.tick_buckets),
            totals.tick_seconds,
            tuple(problems),
            self.is_paused(),
            self._stride,
            self._empty_rescans,
            None if self.assigned is None else self.assigned.view(),
            link,
            self._service_ends,
            self.capacity_cores,
            totals.throttled_cpu_s,
            totals.late_cpu_s,
        )
        return self._snapshot

    def _view_link(self) -> LinkView | None:
        if self.link is None:
            return None
        answer, stats = self.link.registered, self.link.stats()
        if answer is None:
            return LinkView(self.config.scheduler.url, False, None, "", stats)
        return LinkView(self.config.scheduler.url, True, answer.tree, answer.warning, stats)

    def _mind_the_cost(self) -> None:
        """Over the budget of ``[cost]``, look at each job less often; back when there is room."""
        now_s, budget = self.clock.monotonic_s(), self.config.cost.cpu_budget_ratio
        since_s, cpu_s = self._cost_mark
        if budget <= 0 or now_s - since_s < 10 * self.period_s:
            return
        used = (time.process_time() - cpu_s) / (now_s - since_s)
        self._cost_mark = (now_s, time.process_time())
        stride = self._stride
        if used > budget:
            self._stride = min(stride * 2, MAX_STRIDE)
        elif used < budget / 3:
            self._stride = max(stride // 2, 1)
        if stride != self._stride:
            log.warning("checks_shed", every=self._stride, used_cores=used, budget_cores=budget)

    def _complain(self, job: Tracked | None, error: CpumondError) -> None:
        """Count an error and log its sentence, once while it stays the same."""
        self.totals.errors += 1
        text = str(error)
        if job is None:
            if text != self._last_complaint:
                log.error("agent_error", error=text)
            self._last_complaint = text
        elif text != job.last_error:
            job.last_error = text
            log.warning("job_error", job_id=job.found.job_id, error=text)

    # ---- life

    def start(self) -> None:
        """Read what earlier runs left, do the first tick, and put back what is a job no more.

        Raises CpumondError when ``state_dir`` cannot be read.
        """
        self.writer.load(self.hierarchies)
        if self.writer.damaged:
            log.error("state_damaged", error=self.writer.damaged)
        self.registered.load()
        self.peaks.load()
        self._service_ends = read_service_ends(self.config.state_dir)
        if self.assigned is not None:
            self.assigned.load(self.clock.monotonic_s())
        self.notifier.busy()
        for path in find_strangers(find_anew(self.hierarchies, self.writer.originals)):
            self.writer.forget(path)
        self.notifier.busy()
        self.tick(self.clock.monotonic_s())
        self.notifier.busy()
        self._restore_leftovers()
        try:
            # From here on a file that is not there was removed: `restore` would not know what was lowered.
            self.writer.flush(tidy=True)
        except CpumondError as error:
            self._complain(None, error)
        self._strays_at_s = self.clock.monotonic_s() + GONE_S

    def _restore_leftovers(self) -> int:
        """Put back what an earlier run changed and no source names now; of how many that could not be done."""
        left = self.writer.list_left(self.table.jobs)
        if not left:
            return 0
        report = restore_all(self.hierarchies, left, written=self.writer.log.records, note=self.writer.note_raise)
        for path in [*report.restored, *report.gone]:
            self.writer.give_back(path, report.settings.get(path))
        failures = [*report.errors, *report.unseen.values()]
        for error in failures:
            log.error("restore_failed", error=error)
        log.info("leftovers_restored", restored=len(report.restored), gone=len(report.gone))
        try:
            self.writer.flush()
        except CpumondError as error:
            self._complain(None, error)
        return len(failures)

    def run(self) -> None:
        """Tick at a fixed rate until ``stopping``; whoever started it puts the limits back with ``close``."""
        next_s = self.clock.monotonic_s() + self.period_s
        while not self.stopping:
            if self.reloading:
                self._reload()
            now_s = self.clock.monotonic_s()
            next_s = min(next_s, now_s + self.period_s)  # a job with a shorter one may have come between two ticks
            if now_s < next_s:
                self._look_if_due(now_s)
                self._wait(min(next_s, self._looks.next_s) - self.clock.monotonic_s())
                continue
            late_s = now_s - next_s
            next_s += self.period_s
            if late_s > self.period_s:
                self.totals.late_ticks += 1
                next_s = now_s + self.period_s
            try:
                self.tick(now_s, late_s)
            except Exception:
                # One bad tick is counted and the loop goes on; the watchdog is only fed by good ones.
                self.totals.errors += 1
                self.notifier.tick_failed()
                log.exception("tick_failed")
            else:
                self.notifier.tick_done(self)

    def _look_if_due(self, now_s: float) -> None:
        try:
            self.look(now_s)
        except Exception:
            # As a bad tick: counted, and the loop goes on.
            self.totals.errors += 1
            log.exception("look_failed")

    def _wait(self, timeout_s: float) -> None:
        """Sleep until the time, a signal or a request; requests are carried out here, between ticks."""
        timeout_s = min(timeout_s, self.notifier.ping_period_s, self.peaks.due_s - self.clock.monotonic_s())
        if self.assigned is not None:
            self._watch_executor(self.assigned)
            timeout_s = min(timeout_s, self.assigned.next_deadline_s() - self.clock.monotonic_s())
        if self.link is not None:
            timeout_s = min(timeout_s, self._beat_at_s - self.clock.monotonic_s())
        if self._poll.poll(math.ceil(max(timeout_s, 0.0) * 1000.0)):
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_r, 4096)
        self.run_requests()
        self._serve_scheduler(beat=True)
        self.store_peaks()
        self.notifier.ping()

    def store_peaks(self) -> None:
        """Have what rule ``peak`` learned about the jobs stored when that is due; between two ticks, by a thread."""
        if not self.writer.is_ousted:
            self.peaks.store(self.table, self.clock.monotonic_s())

    def _watch_executor(self, assigned: AssignedJobs) -> None:
        """Wait for the executor's news while it works; one that is broken may be readable all the time."""
        if assigned.is_ready != self._waits_for_executor:
            self._waits_for_executor = assigned.is_ready
            if assigned.is_ready:
                self._poll.register(assigned.fileno(), select.POLLIN)
            else:
                self._poll.unregister(assigned.fileno())

    def _serve_scheduler(self, beat: bool) -> None:
        """The scheduler's jobs, and, between two ticks, its heartbeat when one is due or one of them has changed."""
        if self.link is None and self.assigned is None:
            return
        now_s = self.clock.monotonic_s()
        try:
            self._look_after_assigned(now_s)
            if beat and (self._beat_due or now_s >= self._beat_at_s):
                self._report(now_s)
        except Exception:
            # As a bad tick: counted, and the monitor goes on.
            self.totals.errors += 1
            self._beat_at_s = now_s + self.config.scheduler.heartbeat_period_s
            log.exception("assigned_jobs_failed")

    def run_requests(self) -> None:
        """Carry out what ``call`` has queued by now; what nobody waits for any more is left out.

        Whatever is queued meanwhile has its turn after the tick, if that is due: those who ask cannot hold it up.
        """
        for _ in range(len(self._requests)):
            work, future = self._requests.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)

    def call(self, work: Callable[[], Any], timeout_s: float = 10.0) -> Any:
        """Run ``work`` in the thread of the tick, from any other thread; its result, or its exception raised here.

        Raises TimeoutError when the tick does not get to it; then it is not carried out later either.
        """
        if self._closed:
            raise UnavailableError("the agent is ending; ask again when it is back")
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._requests.append((work, future))
        self.wake()
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def wake(self) -> None:
        """End the wait between two ticks; safe in a signal handler."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"x")

    def rescan_now(self) -> None:
        """Look at all sources and pins at once (in the thread of the tick)."""
        now_s = self.clock.monotonic_s()
        self._rescan_due = True
        self._discover(now_s)
        self._apply_pins(now_s)
        self._snapshot = None

    def _reload(self) -> None:
        self.reloading = False
        if self.reload is None:
            return
        self.notifier.reloading()
        try:
            config = self.reload()
            self.use_config(config)
        except Exception as error:
            # Whatever is wrong with the files: the configuration that works goes on.
            log.error("reload_refused", error=str(error))
            self.notifier.reload_refused(str(error))
        else:
            log.info("reloaded", config=config.path)
        self.notifier.ready(self)

    def use_config(self, config: AgentConfig) -> None:
        """Go on with another configuration; what cannot change while running is kept and said.

        Raises ConfigError when it names other directories: what `restore` would read then is not what this agent wrote.
        """
        for key in ("state_dir", "runtime_dir", "mountinfo"):
            if getattr(config, key) != getattr(self.config, key):
                raise ConfigError(
                    f"{config.path}: {key}: cannot change from {getattr(self.config, key)!r} while the agent runs; "
                    "put it back, or restart the agent"
                )
        kept = {key: getattr(self.config, key) for key in ("control", "node_id", "scheduler", "resources", "executor")}
        kept["metrics"] = msgspec.structs.replace(config.metrics, listen=self.config.metrics.listen)
        kept["web"] = msgspec.structs.replace(config.web, listen=self.config.web.listen)
        for key, value in kept.items():
            if getattr(config, key) != value:
                log.warning("needs_restart", key=key)
        config = msgspec.structs.replace(config, **kept)
        if config.report != self.config.report:
            reporter = REPORTERS[config.report.kind](config.report)
            self.reporter.close(0.0)
            self.reporter = reporter
        self.config = self.table.config = self.writer.config = config
        self._rescan_due = self._report_due = True
        self._sample_at_s = -math.inf
        for job in self.table:
            if not self.keeps_samples:
                job.samples = None
            elif job.samples is not None:
                job.samples.resize(config.web.samples)

    def close(self) -> int:
        """Put every limit back, send the last report, give everything back; how many limits could not be put back."""
        self.notifier.stopping()
        self._closed = True
        self.run_requests()
        failed = 0
        self._judge_last_changes()
        for job in list(self.table):
            if not job.touched or job.contested:
                continue
            try:
                self.writer.restore(job)
            except Exception as error:
                # Whatever it is, the other jobs still get their limits back.
                failed += 1
                log.error("restore_failed", job_id=job.found.job_id, cgroup=job.found.path, error=str(error))
            else:
                job.end_writes()
                job.mode = "shadow"
            self.notifier.busy()
        failed += self._restore_leftovers()
        failed += self._leave_units()
        try:
            self.writer.flush(tidy=True)
        except CpumondError as error:
            log.error("agent_error", error=str(error))
        if not self.writer.is_ousted:
            self.peaks.close(self.table)
        if self.last is not None:
            # An agent that never began knows nothing about its jobs: no report is better than an empty one.
            self._report_due = True
            self._report(self.clock.monotonic_s())
            log.info("stopped", restore_failures=failed)
        self.notifier.busy()
        self.reporter.close(2.0)
        if self.link is not None:
            self.link.close(2.0)
        if self.assigned is not None:
            self.assigned.close()
        self.units.close()
        self.table.close()
        self.writer.log.close()
        self.watcher.close()
        return failed

    def _judge_last_changes(self) -> None:
        """What somebody ordered since the last tick is not to be undone."""
        now_s = self.clock.monotonic_s()
        try:
            self._read_all_limits = True
            self._take_foreign_changes(now_s)
            if any(job.before_asking is not None for job in self.table):
                self.units.flush(LAST_ANSWERS_S)
                self._take_unit_news(now_s)
        except Exception:
            # Whatever it is, the limits still go back.
            log.exception("last_changes_failed")

    def _leave_units(self) -> int:
        """Wait until systemd believes in the limits that are in force again; how many units it did not take.

        Those stay on disk for ``cpumond restore``.
        """
        left = self.writer.returning
        for _ in range(UNITS_FLUSHES if left else 0):
            before = len(left)
            done = self.units.flush(UNITS_FLUSH_S)
            replaced = [event for event in self.units.poll() if event.kind == "replaced"]
            for event in replaced:
                self._accept_order(event)
            self.writer.mind_returning(final=True)
            self.notifier.busy()
            if not left or (not replaced and (done or len(left) == before)):
                break
        if left:
            log.error("restore_failed", units=len(left), cgroup=next(iter(left)), advice="run `cpumond restore`",
                      error=f"systemd was not told: {self.units.problem or 'no answer'}")  # fmt: skip
        return len(left)


def _close_all(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _write_order(item: tuple[Tracked, str, Decision]) -> tuple[bool, int]:
    job, _, decision = item
    raises, depth = decision.new_cores > decision.old_cores, job.found.path.count("/")
    return raises, depth if raises else -depth


def _find_obstacle(job: Tracked, decision: Decision, paused: bool, covered: bool, now_s: float) -> Result | Literal[""]:
    """Why a decision is not written now, "" when it is."""
    if not job.writes:
        return "shadow"
    shrinks = decision.new_cores < decision.old_cores
    waiting = shrinks and (job.reapply_at_s is not None or now_s < job.write_after_s)
    # More CPU does not wait for PID 1 longer than that.
    asked = job.before_asking is not None and (shrinks or now_s < job.asked_at_s + ANSWER_PATIENCE_S)
    obstacles: tuple[tuple[bool, Result], ...] = (
        (job.contested, "contested"),
        (job.override_until_s is not None or asked, "overridden"),
        (job.pinned_cores is not None, "pinned"),
        (paused or (covered and shrinks), "paused"),
        (job.mode == "up-only" and shrinks, "up-only"),
        (waiting, "failed"),
    )
    return next((word for holds, word in obstacles if holds), "")
