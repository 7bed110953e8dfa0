"""Apply decisions to cgroups: choose the decisions to write now and their order, and record their results."""

from __future__ import annotations

import math
from typing import Literal

import structlog

from cpumond.agent.limits.external import ExternalWrites
from cpumond.agent.limits.hold import UNHELD, Pinned, Respected
from cpumond.agent.limits.writer import Applied, read_limit_cores, read_settings_or_none
from cpumond.agent.looks import LookSchedule, list_changed
from cpumond.agent.registry import RegisteredJobs
from cpumond.agent.ring import Result
from cpumond.agent.tracked import Tracked, record
from cpumond.core.errors import CpumondError, RefusedError
from cpumond.monitor.model import Decision
from cpumond.monitor.peak import put_off_cut, restore_early
from cpumond.monitor.policy import reject, settle
from cpumond.monitor.protect import compute_throttled_ratio
from cpumond.monitor.rules import look

log = structlog.get_logger("cpumond.agent")

ANSWER_PATIENCE_S = 3.0
"""Maximum time in seconds for which an increase waits until systemd has answered who changed the limit."""

Decided = tuple[Tracked, Decision]


class Applier:
    """Writes the monitor's decisions: in each tick and, for jobs that are throttled by their limit, between two ticks.

    ``has_looks``: whether any job needs looks between two checks; without such a job, looks cost nothing."""

    def __init__(self, external: ExternalWrites, registered: RegisteredJobs) -> None:
        self.external = external
        self.registered = registered
        self.table = external.table
        self.writer = external.writer
        self.totals = external.totals
        self.due = external.due
        self.clock = external.clock
        self.looks = LookSchedule()
        self.has_looks = False
        self._looks_closed = 0
        """``JobTable.closed_total`` when the looks were planned: descriptors of jobs closed later must not be read."""
        self._pinned = False

    def apply(self, decided: list[Decided], now_s: float) -> None:
        """Write the decisions that may be written, and limits that are due to be written again."""
        held = [job for job in self.table if job.hold is not UNHELD]
        self._end_overrides(held, now_s)
        self.apply_pins(now_s)
        paused = self.writer.is_paused()
        allowed: list[tuple[Tracked, str, Decision]] = []
        for job, decision in decided:
            obstacle = _find_obstacle(job, decision, paused, bool(self.writer.covered), now_s)
            if obstacle == "shadow":
                # The monitor's own limit moves, but nothing is written (semantics.md 1.5).
                old_cores, new_cores = decision.old_cores, decision.new_cores
                record(job, self.clock.wall_s(), decision.kind, old_cores, new_cores, job.state.hard_cores, "shadow")
                continue
            if obstacle:
                job.state, job.result = reject(job.state, decision), obstacle
            else:
                allowed.append((job, decision.kind, decision))
        if not paused:
            allowed += self._find_reapplies(held, now_s)
        self._carry_out(allowed, now_s)
        self._plan_looks(now_s)

    def _carry_out(self, allowed: list[tuple[Tracked, str, Decision]], now_s: float) -> None:
        """Settle decisions that only move a guarantee, and write the rest."""
        for job, kind, decision in allowed:
            if not job.writes:
                self._settle(job, kind, decision, Applied(decision.new_cores), now_s)
        self._write_limits([item for item in allowed if item[0].writes], now_s)

    def _write_limits(self, allowed: list[tuple[Tracked, str, Decision]], now_s: float) -> None:
        # Decreases come first, from the leaves up; then increases, from the top down: cgroup v1 refuses a quota that is
        # above the parent's or below a child's.
        allowed.sort(key=_write_order)
        for job, kind, decision in self._secure(allowed):
            self._apply_one(job, kind, decision, now_s)
        self.writer.store()

    def _secure(self, allowed: list[tuple[Tracked, str, Decision]]) -> list[tuple[Tracked, str, Decision]]:
        """Save originals before writing. If that fails, put off the first change of each job, and all decreases of
        jobs whose changed original is not on disk yet. Return the decisions that may be written."""
        if not allowed:
            return allowed
        try:
            self.writer.secure([job for job, _, _ in allowed])
        except CpumondError as error:
            self.totals.complain(None, error)
        else:
            self.totals.last_error = ""
        ready = []
        for item in allowed:
            job, kind, decision = item
            shrinks = decision.new_cores < decision.old_cores
            if job.touched and not (shrinks and job.found.path in self.writer.unsaved):
                ready.append(item)
            else:
                _put_off(job, kind, decision, "failed", -math.inf)
        return ready

    def _apply_one(self, job: Tracked, kind: str, decision: Decision, now_s: float) -> None:
        found = read_settings_or_none(job)
        if found is not None and self.external.is_foreign(job, found):
            # Another program has set the limit since the last look: do not overwrite it.
            _put_off(job, kind, decision, "overridden", now_s)
            self.external.take(job, found, now_s)
            self.external.store_originals()
            return
        if found is not None:
            self.external.take_own(job, found, now_s)
        try:
            applied = self.writer.write(job, decision.new_cores)
        except (CpumondError, OSError) as error:
            self.totals.write_errors += 1
            self.totals.failed_restores += kind == "restore"
            job.write_errors += 1
            again_s = now_s + self.writer.config.writes.drift_backoff_s
            job.hold = job.hold.fail(again_s)
            _put_off(job, kind, decision, "failed", again_s)
            said, job.last_error = job.last_error, str(error)
            record(job, self.clock.wall_s(), kind, decision.old_cores, decision.new_cores, decision.old_cores, "failed")
            if job.last_error != said or not isinstance(error, RefusedError):
                log.error("limit_write_failed", job_id=job.found.job_id, new_cores=decision.new_cores, error=str(error))
            return
        if applied.cores is None:
            job.result = "gone"
            self.due.rescan = True
            return
        self._settle(job, kind, decision, applied, now_s)

    def _settle(self, job: Tracked, kind: str, decision: Decision, applied: Applied, now_s: float) -> None:
        """Record that a decision was carried out, and log the change."""
        assert applied.cores is not None
        if decision.new_cores > decision.old_cores:
            job.hold = job.hold.answered()  # the previous limit is overwritten: its author no longer matters
        moved = applied.cores != decision.old_cores or kind == "pin" or (kind == "reapply" and applied.wrote)
        job.state = settle(job.state, decision, min(applied.cores, job.state.hard_cores))
        job.result, job.notes, job.last_error = "applied", applied.notes, ""
        if kind != "reapply":
            job.hold = job.hold.write(None)
        if not moved:
            if kind == "shrink":  # a bound of the kernel or of the job's threads keeps the limit where it is
                job.state = put_off_cut(job.state, now_s)
            return
        self.due.report = True
        if kind == "restore":
            self.totals.restores += 1
            job.restores += 1
        record(job, self.clock.wall_s(), kind, decision.old_cores, decision.new_cores, applied.cores, "applied")
        log.info("limit_changed", job_id=job.found.job_id, operation_id=job.found.operation_id or None, reason=kind,
                 old_cores=decision.old_cores, new_cores=applied.cores, usage_cores=decision.usage_cores,
                 smoothed_cores=job.state.smoothed_cores, votes_sum=decision.votes_sum,
                 throttled_ratio=decision.throttled_ratio, pressure_ratio=decision.pressure_ratio)  # fmt: skip

    def _end_overrides(self, held: list[Tracked], now_s: float) -> None:
        for job in held:
            before = job.hold
            job.hold = before.expire(now_s)
            if job.hold is not before:
                self.due.rescan |= before.pinned_cores is not None
                job.restart(read_limit_cores(job, job.in_force), now_s)
                log.info("override_ended", job_id=job.found.job_id, cores=job.state.limit_cores)

    def _find_reapplies(self, held: list[Tracked], now_s: float) -> list[tuple[Tracked, str, Decision]]:
        """List limits due to be written again: another program changed them, or a raise has become possible."""
        due = []
        for job in held:
            at_s = job.hold.write_at_s
            if at_s is not None and now_s >= at_s:
                job.hold = job.hold.write(None)
                if job.writes and job.hold.is_own:
                    limit = job.state.limit_cores
                    due.append((job, "reapply", Decision("hold", limit, limit)))
        return due

    def apply_pins(self, now_s: float) -> None:
        """Put pinned limits in force, and end expired pins."""
        if not (self.registered.content.pins or self._pinned):
            return
        pins = self.registered.current_pins(self.clock.wall_s(), self.clock.boottime_s())
        self._pinned = bool(pins)
        for job in self.table:
            pin = pins.get(job.found.job_id) if job.moves else None
            pinned_cores = job.hold.pinned_cores
            if pin is None and pinned_cores is not None:
                job.hold = job.hold.unpin()
                job.restart(read_limit_cores(job, job.in_force), now_s)
            elif pin is not None and not self.writer.is_paused() and pinned_cores != pin.cpu_limit:
                job.hold = job.hold.pin(pin.cpu_limit)
                old = job.state.limit_cores
                job.restart(pin.cpu_limit, now_s)
                self._carry_out([(job, "pin", Decision("hold", old, job.state.limit_cores))], now_s)

    def give_back(self, job: Tracked) -> None:
        """End a pin, an override or a contest of ``job``: the monitor decides about its limit again."""
        now_s = self.clock.monotonic_s()
        # After a contest the agent's own limit is written again; otherwise the monitor continues from the one in force.
        limit = job.state.limit_cores if job.hold.is_contested else read_limit_cores(job, job.in_force)
        job.hold = job.hold.release(now_s)
        job.restart(limit, now_s)

    def _plan_looks(self, now_s: float) -> None:
        if self.has_looks or self.looks.next_s < math.inf:
            self.looks.refill(self.table, now_s)
            self._looks_closed = self.table.closed_total

    def look(self, now_s: float, stride: int = 1) -> None:
        """If a look between two ticks is due, raise the limits of jobs that are throttled or will be soon.

        An error of a single job or file is recorded, not raised. For a job that was not throttled and did not exceed
        its limit, a look costs one pread."""
        if now_s < self.looks.next_s:
            return
        if self._looks_closed != self.table.closed_total:
            self._plan_looks(now_s)
        held_back: list[tuple[Tracked, str, Decision]] = []
        due = self.looks.take_due(now_s, stride)
        changed: list[tuple[Tracked, float | None]] = [(job, None) for job in list_changed(due)]
        changed += self.looks.take_uses(now_s, self.clock.monotonic_s, stride)
        for job, recent_cores in changed:
            try:
                decision = self._look_closer(job, now_s, recent_cores)
            except CpumondError as error:
                self.totals.complain(job, error)
                continue
            if decision is not None:
                held_back.append((job, decision.kind, decision))
        if held_back:
            self._carry_out(held_back, now_s)
            self.due.snapshot = None

    def _look_closer(self, job: Tracked, now_s: float, recent_cores: float | None) -> Decision | None:
        """Return the raise for a job that the agent's limit throttles, or soon will because ``recent_cores`` exceed it.
        Return None if the limit does not throttle the job, or may not be written now: the next check decides then."""
        before = job.state
        if before.limit_cores >= before.hard_cores or before.seen is None or now_s < job.hold.write_after_s:
            return None
        if job.settings.is_ceiling and recent_cores is None:
            throttled = job.cgroup.read_throttled()
            if throttled is None or throttled <= before.seen.nr_throttled:
                return None
        reading = job.cgroup.read(self.clock.monotonic_s())
        looked = None if reading is None else look(before, reading, job.settings)
        if looked is None and reading is not None and recent_cores is not None:
            looked = restore_early(before, reading, recent_cores, job.settings)
        if reading is None or looked is None:
            return None
        after, decision = looked
        if not decision.changes:
            job.state = after
            self.totals.throttled_cpu_s += after.throttled_cpu_s - before.throttled_cpu_s
            return None
        if _find_obstacle(job, decision, self.writer.is_paused(), bool(self.writer.covered), now_s):
            return None
        found = read_settings_or_none(job) if job.writes else job.in_force
        if found is None:
            return None
        if job.writes:
            if self.external.is_foreign(job, found):
                # The limit that throttles the job is another program's, not the agent's; the tick handles it.
                self.external.changed.add(job.found.path)
                return None
            self.external.take_own(job, found, now_s)
        job.state, job.decision = after, decision
        self.totals.decisions[decision.kind] += 1
        self.totals.looks_restored += 1
        self.totals.throttled_cpu_s += after.throttled_cpu_s - before.throttled_cpu_s
        self.totals.late_cpu_s += after.late_cpu_s - before.late_cpu_s
        if job.samples is not None and before.base is not None:
            job.samples.peak_ratio = max(job.samples.peak_ratio, compute_throttled_ratio(before.base, reading))
        return decision


def _write_order(item: tuple[Tracked, str, Decision]) -> tuple[bool, int]:
    job, _, decision = item
    raises, depth = decision.new_cores > decision.old_cores, job.found.path.count("/")
    return raises, depth if raises else -depth


def _put_off(job: Tracked, kind: str, decision: Decision, result: Result, again_s: float) -> None:
    """Record that a decision is not written now. The monitor decides again at the next check. A pin, or a limit that
    another program has overwritten, is due again at ``again_s``."""
    job.result = result
    if kind in ("pin", "reapply"):
        job.hold = job.hold.write(again_s)
    else:
        job.state = reject(job.state, decision)


def _find_obstacle(job: Tracked, decision: Decision, paused: bool, covered: bool, now_s: float) -> Result | Literal[""]:
    """Return why a decision must not be written now; "" if it may be written."""
    if not job.moves:
        return "shadow"
    shrinks = decision.new_cores < decision.old_cores
    hold, decider = job.hold, job.hold.decider
    waiting = shrinks and (hold.write_at_s is not None or now_s < hold.write_after_s)
    # An increase waits at most ANSWER_PATIENCE_S for systemd's answer.
    asked = hold.asking is not None and (shrinks or now_s < hold.asking.since_s + ANSWER_PATIENCE_S)
    obstacles: tuple[tuple[bool, Result], ...] = (
        (hold.is_contested, "contested"),
        (isinstance(decider, Respected) or asked, "overridden"),
        (isinstance(decider, Pinned), "pinned"),
        (paused or (covered and shrinks and job.writes), "paused"),
        (job.mode == "up-only" and shrinks, "up-only"),
        (waiting, "failed"),
    )
    return next((word for holds, word in obstacles if holds), "")
