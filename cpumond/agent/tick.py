"""The agent's tick. Read ``TickLoop.tick`` first: a tick has six phases, and each passes its results to the next ones.

Only the tick's thread changes the job records. It handles signals and requests of the control socket between ticks."""

from __future__ import annotations

import collections
import math
import os
import time

import msgspec
import structlog

from cpumond.agent.context import AgentContext
from cpumond.agent.discovery import concerns, list_jobs
from cpumond.agent.engines import TELL_NOTHING
from cpumond.agent.jobs.assigned import AssignedJobs
from cpumond.agent.jobs.job import Usage
from cpumond.agent.limits.apply import Applier, Decided
from cpumond.agent.limits.external import ExternalWrites
from cpumond.agent.publish import HeartbeatPublisher
from cpumond.agent.snapshot import TickEnd
from cpumond.agent.tracked import Tracked
from cpumond.agent.watch import existing_directories
from cpumond.core.errors import CpumondError
from cpumond.core.wire import FinishedJob, HeartbeatAnswer
from cpumond.host.cgroup.files import is_leaf
from cpumond.monitor.peak import forgive
from cpumond.monitor.policy import rebase
from cpumond.monitor.rules import check

log = structlog.get_logger("cpumond.agent")

LATE_PERIODS = 3
MAX_STRIDE = 16
LEAF_TURNS = 10


class TickLoop:
    """Runs single ticks. ``service.Agent`` decides when to run a tick, and what to do between two ticks."""

    def __init__(self, context: AgentContext) -> None:
        self.context = context
        self.table = context.table
        self.writer = context.writer
        self.engines = context.engines
        self.registered = context.registered
        self.totals = context.totals
        self.due = context.due
        self.clock = context.clock
        self.external = ExternalWrites(self.table, self.writer, self.engines, self.due, self.clock)
        self.limits = Applier(self.external, self.registered)
        self.publisher = HeartbeatPublisher(context)
        self.answers: collections.deque[tuple[HeartbeatAnswer, float]] = collections.deque()
        """The scheduler's responses, each with the monotonic time of its heartbeat. Any thread may add a response."""
        self.told_level = context.config.ceiling
        """Highest level that the scheduler allows, by its latest response. It is kept while the scheduler is away."""
        self._stale_pins: set[str] = set()
        """Ids of ended jobs whose pins are to be removed from the registry as soon as the disk allows it."""
        self._forget_pins_at_s = -math.inf
        self._rescan_at_s = 0.0
        self._boot_offset_s = self.clock.boottime_s() - self.clock.monotonic_s()
        self._cost_mark = (self.clock.monotonic_s(), time.thread_time())

    def tick(self, now_s: float, late_s: float = 0.0) -> None:
        """Run one tick. An error of a single job or file is recorded, not raised."""
        started_s = self.clock.monotonic_s()
        self._look_around(now_s)  # 1. find files, units and jobs
        self._take_over(now_s)  # 2. adopt writes of other programs and orders of the scheduler
        decided = self._sample_and_decide(now_s, late_s)  # 3. read counters, make decisions
        self.limits.apply(decided, now_s)  # 4. write decisions to cgroups
        self.publisher.report(now_s)  # 5. send the newest state to the scheduler
        self._export(now_s, started_s)  # 6. publish this tick for all readers

    def _look_around(self, now_s: float) -> None:
        if self.told_level != self.context.config.ceiling:
            self._obey_level()
        self._look_after_places(now_s)
        self.external.take_unit_news(now_s)
        self.discover(now_s)

    def _obey_level(self) -> None:
        """Apply the level that the scheduler sent. As after a reload, a rescan gives jobs their new settings."""
        before, level = self.context.config.ceiling, self.told_level
        log.info("level_told", told=level, before=before)
        self.context.use_config(msgspec.structs.replace(self.context.config, ceiling=level))
        self.due.rescan = True

    def _look_after_places(self, now_s: float) -> None:
        """Rewrite the agent's own files if they were removed. If another agent owns them, stop this one."""
        places = self.context.places
        places.look(now_s)
        if places.is_ousted and not self.context.stopping:
            log.error("another_agent", error=places.problem, advice="this one restores its limits and stops")
            self.writer.is_ousted = self.context.stopping = True

    def discover(self, now_s: float) -> None:
        """Look at all sources if cgroups have come or gone, or a rescan is due. Also called between two ticks."""
        context = self.context
        paths, owners, lost = context.watcher.drain()
        children = any(self._concerns_a_source(path) for path in paths)
        # The changes are kept until a tick processes them, because this also runs for requests between two ticks.
        self.external.changed |= owners
        self.external.rewritten |= owners - self.writer.written
        self.writer.written.clear()
        self.external.read_all |= lost
        due = self.due.rescan or self.engines.take_news() or now_s >= self._rescan_at_s
        if not (children or lost or due or self.table.find_filled() or self._gained_children()):
            return
        self.due.rescan = False
        self._rescan_at_s = now_s + context.config.discovery.rescan_period_s
        self.external.read_all |= bool(context.watcher.problem)
        known = self.registered.found_jobs() + (context.assigned.found_jobs() if context.assigned is not None else [])
        self.engines.follow(context.config.source)
        scan = list_jobs(context.config.source, known, context.hierarchies.cpu_root, self.engines.views)
        self.engines.ask_for_names(scan.unnamed | TELL_NOTHING if children else scan.unnamed)
        directories = existing_directories(context.hierarchies.cpu_root, scan.watched)
        self.due.rescan = context.watcher.watch_directories(directories)
        self.due.report |= self.table.refresh(scan.jobs, now_s)
        self.due.rescan |= self.table.waits_for_half()
        context.discovery_problems = [*scan.problems, *self.engines.list_problems()]
        self._look_at_mounts()
        self._look_at_host()
        self.writer.log.check()
        has_found = bool(self.table.jobs or self.table.empty)
        context.empty_rescans = 0 if has_found or not context.config.source else context.empty_rescans + 1
        self._choose_period()

    def _look_at_mounts(self) -> None:
        """Check that other processes can see the hierarchies. If they cannot, `restore` could not restore limits."""
        covered = self.context.hierarchies.list_covered()
        if covered != self.writer.covered:
            say = log.error if covered else log.warning
            say("mounts_covered" if covered else "mounts_back", mounts=covered or self.writer.covered)
            self.writer.covered, self.due.report = covered, True

    def _look_at_host(self) -> None:
        """Adopt a change of the host's CPUs or memory since the last rescan."""
        before = now = self.context.config.resources
        try:
            now = self.context.read_resources()
        except CpumondError as error:
            self.totals.complain(None, error)
        if now != before:
            log.warning("host_changed", old_cores=before.cpu, new_cores=now.cpu,
                        old_memory=before.memory, new_memory=now.memory)  # fmt: skip
            self.context.use_resources(now)

    def _choose_period(self) -> None:
        """Set the period of ticks to the shortest ``check_period`` of the node and its jobs."""
        periods_s = (job.settings.check_period_s for job in self.table)
        self.context.period_s = min([self.context.config.node_settings().check_period_s, *periods_s])
        self.limits.has_looks = any(job.settings.poll_s > 0.0 for job in self.table)

    def _gained_children(self) -> bool:
        """Return whether a changed cgroup is no longer a leaf. Each tick looks at a tenth of the cgroups."""
        turn = self.totals.ticks % LEAF_TURNS
        return any(
            number % LEAF_TURNS == turn and job.touched and not job.found.is_whole and not is_leaf(job.cgroup.place)
            for number, job in enumerate(self.table)
        )

    def _concerns_a_source(self, path: str) -> bool:
        """Return whether a change at ``path`` can concern a job. Some children of a watched directory cannot."""
        relative = os.path.relpath(path, self.context.hierarchies.cpu_root)
        return any(concerns(source, relative) for source in self.context.config.source)

    def _take_over(self, now_s: float) -> None:
        self.external.expire_gone_units(now_s)
        self.external.take_changes(now_s)
        self.serve_scheduler(beat=False)

    def serve_scheduler(self, beat: bool) -> None:
        """Serve the scheduler's jobs. If ``beat`` (between ticks), send a heartbeat if one is due or a job changed."""
        if self.context.link is None and self.context.assigned is None:
            return
        now_s = self.clock.monotonic_s()
        try:
            if self.context.assigned is not None:
                self._update_assigned(self.context.assigned, now_s)
            if beat and (self.due.beat or now_s >= self.publisher.beat_at_s):
                self.publisher.report(now_s)
        except Exception:
            # This is counted like a failed tick, and the monitor continues.
            self.totals.errors += 1
            self.publisher.beat_at_s = now_s + self.publisher.beat_period_s
            log.exception("assigned_jobs_failed")

    def _update_assigned(self, assigned: AssignedJobs, now_s: float) -> None:
        """Process the scheduler's orders and the events of its jobs, and follow the running jobs."""
        while self.answers:
            answer, sent_at_s = self.answers.popleft()
            assigned.apply_answer(answer, sent_at_s, now_s)
        self.due.beat |= assigned.advance(now_s, self._count_cores)
        self.due.beat |= assigned.adjust(now_s, self._count_cores)
        self._forget_pins(assigned, now_s)
        paths = {job.path for job in assigned.found_jobs()}
        for path in self.context.followed - paths:
            # The job's cgroup is removed already, or will be removed at once.
            if path in self.table.jobs:
                self.table.drop(self.table.jobs[path])
        for found in assigned.found_jobs():
            if found.path not in self.context.followed:
                self.table.add(found, now_s)
        if paths != self.context.followed:
            self._choose_period()
        self.context.followed = paths

    def _forget_pins(self, assigned: AssignedJobs, now_s: float) -> None:
        """Forget the pins of the scheduler's jobs that have ended: these jobs never return."""
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
                # The disk would refuse the changes of the other pins as well.
                self._forget_pins_at_s = now_s + self.context.config.discovery.rescan_period_s
                self.totals.complain(None, error)
                return
            self._stale_pins.discard(job_id)

    def _has_other(self, finished: FinishedJob) -> bool:
        """Return whether a job that is not the scheduler's has the same id; if so, the pin may be for that job."""
        same = (path for path, job in self.table.jobs.items() if job.found.job_id == finished.job_id)
        return finished.job_id in self.registered.content.jobs or any(path != finished.cgroup for path in same)

    def _count_cores(self) -> tuple[dict[str, Usage], float]:
        """Return ``read_usage``, and the sum of ``counted_cores`` of all jobs that are not the scheduler's."""
        others = [job.counted_cores for path, job in self.table.jobs.items() if path not in self.context.followed]
        return self.context.read_usage(), math.fsum(others)

    def _notice_lost_time(self, late_s: float) -> bool:
        """Return whether measurements over the last interval are unreliable: the tick is far too late, or the host was
        suspended since the last call."""
        offset_s = self.clock.boottime_s() - self.clock.monotonic_s()
        suspended_s, self._boot_offset_s = offset_s - self._boot_offset_s, offset_s
        return late_s > LATE_PERIODS * self.context.period_s or suspended_s > self.context.period_s

    def _sample_and_decide(self, now_s: float, late_s: float) -> list[Decided]:
        if self._notice_lost_time(late_s):
            self.totals.rebaselines += 1
            for job in self.table:
                job.state = rebase(job.state, None)
        decided: list[Decided] = []
        gone: list[Tracked] = []
        clock_s, counts, stride = self.clock.monotonic_s, self.totals.decisions, self.context.stride
        slack_s = self.context.period_s / 2
        for number, job in enumerate(self.table, self.totals.ticks):
            if job.mode == "off" or now_s + slack_s < job.next_check_s:
                continue
            if stride > 1 and number % stride:
                self.totals.shed_checks += 1
                continue
            # Checks have a fixed rate: a check less than half a tick early or late does not move the next one.
            on_time = job.next_check_s > now_s - slack_s
            job.next_check_s = (job.next_check_s if on_time else now_s) + job.settings.check_period_s
            try:
                at_s = clock_s()
                reading = job.cgroup.read(at_s)
                if reading is None:
                    gone.append(job)
                    continue
                before, settings = job.state, job.settings
                if before.smoothed_cores is None and job.counts_use:
                    # Only the usage of this job counts, so smoothing must not start at its limit (all CPUs).
                    settings = msgspec.structs.replace(settings, smoothing_seed="first_value")
                job.state, decision = check(before, reading, at_s, settings)
            except CpumondError as error:
                self.totals.complain(job, error)
                continue
            job.decision = decision
            if job.state.held is not before.held and not job.hold.is_free:
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
            self.due.report = self.due.rescan = True
            self.table.drop(job)
        return decided

    def _export(self, now_s: float, started_s: float) -> None:
        self.publisher.take_samples(now_s)
        duration_s = self.clock.monotonic_s() - started_s
        self.totals.add_tick(duration_s)
        self._adjust_check_stride()
        self.due.snapshot = None
        self.context.last = TickEnd(self.totals.ticks, self.clock.wall_s(), now_s, duration_s, self.context.period_s)

    def _adjust_check_stride(self) -> None:
        """Check jobs less often if this costs more than the budget of ``[cost]``, and more often if it costs far less.

        Only the CPU time of this thread counts: if metrics requests are expensive, jobs are not checked less often."""
        now_s, budget = self.clock.monotonic_s(), self.context.config.cost.cpu_budget_ratio
        since_s, cpu_s = self._cost_mark
        if budget <= 0 or now_s - since_s < 10 * self.context.period_s:
            return
        used = (time.thread_time() - cpu_s) / (now_s - since_s)
        self._cost_mark = (now_s, time.thread_time())
        stride, self.context.stride = self.context.stride, choose_stride(self.context.stride, used, budget)
        if stride != self.context.stride:
            log.warning("checks_shed", every=self.context.stride, used_cores=used, budget_cores=budget)


def choose_stride(stride: int, used: float, budget: float) -> int:
    """Return the number of ticks per check of a job, 1 to MAX_STRIDE; ``used`` and ``budget`` are in cores.

    If ``used`` exceeds the budget, the result is twice ``stride``; if it is below a third of the budget, half of
    ``stride``. In between the result is ``stride``, because a change would be undone at once."""
    if used > budget:
        return min(stride * 2, MAX_STRIDE)
    return max(stride // 2, 1) if used < budget / 3 else stride
