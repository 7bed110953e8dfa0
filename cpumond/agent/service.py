"""Run the agent around its ticks: start, wait, carry out requests of other threads, reload, end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from cpumond.agent.clock import HostClock
from cpumond.agent.config import AgentConfig
from cpumond.agent.context import AgentContext
from cpumond.agent.jobs.assigned import AssignedJobs
from cpumond.agent.limits.restore import find_anew, find_namesakes, restore_all
from cpumond.agent.limits.units import UnitLimits
from cpumond.agent.limits.writer import GONE_S
from cpumond.agent.notify import Notifier
from cpumond.agent.publish import make_snapshot
from cpumond.agent.report import REPORTERS, Reporter
from cpumond.agent.snapshot import TickSnapshot
from cpumond.agent.state_file import ENDS_FILE, ServiceEnds, read_service_ends, save
from cpumond.agent.tick import TickLoop
from cpumond.core.errors import ConfigError, CpumondError, UnavailableError
from cpumond.core.levels import read_level
from cpumond.core.wire import HeartbeatAnswer
from cpumond.host.cgroup.mounts import Hierarchies

log = structlog.get_logger("cpumond.agent")

UNITS_FLUSH_S, UNITS_FLUSHES = 5.0, 6
"""Seconds per attempt, and number of attempts, for systemd to accept the original limits at the agent's end. A further
attempt is only made after progress."""
ENGINE_PATIENCE_S = 2.0
"""Seconds for which the first look at jobs waits for answers of the engines."""
LAST_ORDERS_S = 0.5
"""Seconds for which the agent, at its end, waits for the engines of jobs whose limits were written since the last tick:
only the engine knows whether it requested exactly the limit in force."""
LAST_ANSWERS_S = 2.0
"""Seconds for which the agent, at its end, waits until systemd has answered who made the last changes."""


class Agent:
    """One agent. ``read_snapshot``, ``call``, ``take_answer`` and ``wake`` are for any thread."""

    def __init__(
        self,
        config: AgentConfig,
        hierarchies: Hierarchies,
        reporter: Reporter,
        notifier: Notifier | None = None,
        clock: type[HostClock] = HostClock,
        assigned: AssignedJobs | None = None,
        units: UnitLimits | None = None,
    ) -> None:
        self.context = AgentContext(config, hierarchies, reporter, clock, assigned, units)
        self.loop = TickLoop(self.context)
        self.clock = clock
        self.table = self.context.table
        self.writer = self.context.writer
        self.context.places.looks.append(self._look_after_ends)
        self.notifier = notifier or Notifier({})
        self.reload: Callable[[], AgentConfig] | None = None
        self.reloading = False
        self._thread = threading.get_ident()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # ``close`` must not close the pipe: a thread may be about to write, and a new file may get its number.
        for end in (self._wake_r, self._wake_w):
            weakref.finalize(self, os.close, end).atexit = False
        self._poll = select.poll()
        self._poll.register(self._wake_r, select.POLLIN)
        self._waits_for_executor = False
        self._requests: deque[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = deque()
        self._closed = False

    @property
    def config(self) -> AgentConfig:
        return self.context.config

    def start(self) -> None:
        """Read the state of earlier runs, do the first tick, and restore cgroups that are no longer jobs.

        Raises CpumondError if ``state_dir`` cannot be read."""
        self.writer.load(self.context.hierarchies)
        if self.writer.damaged:
            log.error("state_damaged", error=self.writer.damaged)
        self.context.registered.load()
        self.context.peaks.load()
        self.context.service_ends = read_service_ends(self.config.state_dir)
        if self.context.assigned is not None:
            self.context.assigned.load(self.clock.monotonic_s())
        self.notifier.busy()
        for path in find_namesakes(find_anew(self.context.hierarchies, self.writer.originals)):
            self.writer.forget(path)
        self.notifier.busy()
        # If the jobs of engines had no names yet, their limits would be restored, and lowered again a moment later.
        self.context.engines.follow(self.config.source)
        self.context.engines.wait(ENGINE_PATIENCE_S)
        self.loop.tick(self.clock.monotonic_s())
        self.notifier.busy()
        self._restore_leftovers()
        # From here on the state file exists: if `restore` does not find it, it was removed.
        self.writer.store(tidy=True)
        self.loop.external.strays_at_s = self.clock.monotonic_s() + GONE_S

    def _restore_leftovers(self) -> int:
        """Restore cgroups that this or an earlier run changed and that have no job now; return how many failed."""
        left = self.writer.list_left(self.table.jobs)
        if not left:
            return 0
        written, note = self.writer.log.records, self.writer.note_raise
        report = restore_all(self.context.hierarchies, left, written=written, note=note)
        for path in [*report.restored, *report.gone]:
            self.writer.give_back(path, report.settings.get(path))
        failures = [*report.errors, *report.unseen.values()]
        for error in failures:
            log.error("restore_failed", error=error)
        log.info("leftovers_restored", restored=len(report.restored), gone=len(report.gone))
        self.writer.store()
        return len(failures)

    def _look_after_ends(self) -> list[str]:
        path = os.path.join(self.config.state_dir, ENDS_FILE)
        if not any(self.context.service_ends.values()) or os.path.exists(path):
            return []
        save(path, ServiceEnds(self.context.service_ends))
        return [path]

    def run(self) -> None:
        """Tick at a fixed rate until ``stopping``. After that, the caller must restore the limits with ``close``."""
        next_s = self.clock.monotonic_s() + self.context.period_s
        while not self.context.stopping:
            if self.reloading:
                self._reload()
            now_s = self.clock.monotonic_s()
            # A job with a shorter period may have come between two ticks.
            next_s = min(next_s, now_s + self.context.period_s)
            if now_s < next_s:
                self._look_if_due(now_s)
                self._wait(min(next_s, self.loop.limits.looks.next_s) - self.clock.monotonic_s())
                continue
            late_s = now_s - next_s
            next_s += self.context.period_s
            if late_s > self.context.period_s:
                self.context.totals.late_ticks += 1
                next_s = now_s + self.context.period_s
            try:
                self.loop.tick(now_s, late_s)
            except Exception:
                # A failed tick is counted, and the loop continues. Only ticks that succeed ping the watchdog.
                self.context.totals.errors += 1
                self.notifier.tick_failed()
                log.exception("tick_failed")
            else:
                self.notifier.tick_done(self)

    def _look_if_due(self, now_s: float) -> None:
        try:
            self.loop.limits.look(now_s, self.context.stride)
        except Exception:
            # A failed look is counted like a failed tick, and the loop continues.
            self.context.totals.errors += 1
            log.exception("look_failed")

    def _wait(self, timeout_s: float) -> None:
        """Sleep for ``timeout_s``, or until a signal, a request or a due task. Carry out requests and due tasks."""
        timeout_s = min(timeout_s, self.notifier.ping_period_s, self.context.peaks.due_s - self.clock.monotonic_s())
        if self.context.assigned is not None:
            self._watch_executor(self.context.assigned)
            timeout_s = min(timeout_s, self.context.assigned.next_deadline_s() - self.clock.monotonic_s())
        if self.context.link is not None:
            timeout_s = min(timeout_s, self.loop.publisher.beat_at_s - self.clock.monotonic_s())
        if self._poll.poll(math.ceil(max(timeout_s, 0.0) * 1000.0)):
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_r, 4096)
        self.run_requests()
        self.loop.serve_scheduler(beat=True)
        self.store_peaks()
        self.notifier.ping()

    def store_peaks(self) -> None:
        """Let a thread store the memory of rule ``peak`` if that is due. To be called between two ticks."""
        if not self.writer.is_ousted:
            self.context.peaks.store(self.table, self.clock.monotonic_s())

    def _watch_executor(self, assigned: AssignedJobs) -> None:
        """While the executor works, let its events end the wait. The descriptor of a broken executor is not used: it
        may be readable all the time."""
        if assigned.is_ready != self._waits_for_executor:
            self._waits_for_executor = assigned.is_ready
            if assigned.is_ready:
                self._poll.register(assigned.executor.fileno(), select.POLLIN)
            else:
                self._poll.unregister(assigned.executor.fileno())

    def run_requests(self) -> None:
        """Carry out the work that ``call`` has queued so far, except for work that was cancelled.

        Work that is queued during this method waits for the next call, so requests cannot delay a tick that is due."""
        for _ in range(len(self._requests)):
            work, future = self._requests.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)

    def call(self, work: Callable[[], Any], timeout_s: float = 10.0) -> Any:
        """Let the tick's thread run ``work``; return the result of ``work``, or raise its exception. For other threads.

        Raises TimeoutError if the tick's thread does not start ``work`` in time; then it is never run."""
        if self._closed:
            raise UnavailableError("the agent is stopping; try again when it is back")
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._requests.append((work, future))
        self.wake()
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def wake(self) -> None:
        """End the wait between two ticks. May be called by a signal handler."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"x")

    def rescan_now(self) -> None:
        """Look at all sources and pins at once. For the tick's thread."""
        now_s = self.clock.monotonic_s()
        self.context.due.rescan = True
        self.loop.discover(now_s)
        self.loop.limits.apply_pins(now_s)
        self.context.due.snapshot = None

    def take_answer(self, answer: HeartbeatAnswer, sent_at_s: float) -> None:
        """Accept a response of the scheduler, which the tick's thread then processes. For any thread."""
        if self.context.assigned is not None:
            self.loop.answers.append((answer, sent_at_s))
            self.wake()
        if self.config.scheduler.may_set_mode:
            self.loop.told_level = read_level(answer.level)

    def read_snapshot(self) -> TickSnapshot | None:
        """Return a frozen snapshot of the state after the newest tick; None before the first tick. For any thread.

        The tick's thread makes the snapshot between two ticks, only on demand: a view of each job at each tick
        took a third of the agent's CPU time, mostly in vain. Raises UnavailableError or TimeoutError like ``call``."""
        made = self.context.due.snapshot
        if made is not None or self.context.last is None:
            return made
        here = threading.get_ident() == self._thread
        snapshot: TickSnapshot = self._publish() if here else self.call(self._publish)
        return snapshot

    def _publish(self) -> TickSnapshot:
        self.context.due.snapshot = made = make_snapshot(self.context)
        return made

    def _reload(self) -> None:
        self.reloading = False
        if self.reload is None:
            return
        self.notifier.reloading()
        try:
            config = self.reload()
            self.use_config(config)
        except Exception as error:
            # If anything is wrong with the files, the previous configuration stays in force.
            self.context.refused_config = str(error)
            log.error("reload_refused", error=str(error))
            self.notifier.reload_refused(str(error))
        else:
            self.context.refused_config = ""
            log.info("reloaded", config=config.path)
        self.notifier.ready(self)

    def use_config(self, config: AgentConfig) -> None:
        """Switch to a new configuration. Settings that cannot change while the agent runs are kept, with a warning.

        Raises ConfigError if the directories differ: `restore` would not find the files that this agent wrote."""
        for key in ("state_dir", "runtime_dir", "mountinfo"):
            if (before := getattr(self.config, key)) != getattr(config, key):
                raise ConfigError(
                    f"{config.path}: {key}: cannot change from {before!r} while the agent runs; "
                    "restore the old value, or restart the agent"
                )
        kept = {key: getattr(self.config, key) for key in ("control", "node_id", "scheduler", "resources", "executor")}
        kept["metrics"] = msgspec.structs.replace(config.metrics, listen=self.config.metrics.listen)
        kept["web"] = msgspec.structs.replace(config.web, listen=self.config.web.listen)
        kept["ceiling"] = self.config.ceiling
        for key, value in kept.items():
            if key != "ceiling" and getattr(config, key) != value:
                log.warning("needs_restart", key=key)
        config = msgspec.structs.replace(config, **kept)
        if config.report != self.config.report:
            reporter = REPORTERS[config.report.kind](config.report)
            self.context.reporter.close(0.0)
            self.context.reporter = reporter
        self.context.use_config(config)
        self.context.due.rescan = True
        self.loop.publisher.sample_at_s = -math.inf
        for job in self.table:
            if not self.context.keeps_samples:
                job.samples = None
            elif job.samples is not None:
                job.samples.resize(config.web.samples)

    def close(self) -> int:
        """Restore all limits, send the last report, release all resources; return how many limits were not restored."""
        self.notifier.stopping()
        self._closed = True
        self.run_requests()
        failed = 0
        self._take_last_changes()
        for job in list(self.table):
            if not job.touched or job.hold.is_contested:
                continue
            try:
                self.writer.restore(job)
            except Exception as error:
                # After any error, the limits of the other jobs are still restored.
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
            self.context.peaks.close(self.table)
        if self.context.last is not None:
            # Before the first tick the agent does not know its jobs: no report is better than an empty one.
            self.context.due.report = True
            self.loop.publisher.report(self.clock.monotonic_s())
            log.info("stopped", restore_failures=failed)
        self.notifier.busy()
        self.context.reporter.close(2.0)
        if self.context.link is not None:
            self.context.link.close(2.0)
        if self.context.assigned is not None:
            self.context.assigned.close()
        self.context.units.close()
        self.context.engines.close()
        self.table.close()
        self.writer.log.close()
        self.context.watcher.close()
        return failed

    def _take_last_changes(self) -> None:
        """Adopt limits that other programs wrote since the last tick, so that ``close`` does not undo them."""
        now_s = self.clock.monotonic_s()
        try:
            if self.context.engines.views:
                self._take_last_orders(now_s)
            self.loop.external.read_all = True
            self.loop.external.take_changes(now_s)
            if any(job.hold.asking is not None for job in self.table):
                self.context.units.flush(LAST_ANSWERS_S)
                self.loop.external.take_unit_news(now_s)
        except Exception:
            # After any error, the limits are still restored.
            log.exception("last_changes_failed")

    def _take_last_orders(self, now_s: float) -> None:
        """Adopt limits that engines have requested since the last tick."""
        self.loop.discover(now_s)
        written = [self.table.jobs[path] for path in self.loop.external.changed if path in self.table.jobs]
        if self.context.engines.wait_for_orders([job.found for job in written if job.touched], LAST_ORDERS_S):
            self.context.due.rescan = True
            self.loop.discover(now_s)

    def _leave_units(self) -> int:
        """Wait until systemd has stored the original limits; return the number of units for which it did not.

        The originals of these units stay on disk for ``cpumond restore``."""
        left = self.writer.returning
        for _ in range(UNITS_FLUSHES if left else 0):
            before = len(left)
            done = self.context.units.flush(UNITS_FLUSH_S)
            replaced = [event for event in self.context.units.poll() if event.kind == "replaced"]
            for event in replaced:
                self.writer.adopt_operator_values(event.unit, event.values)
            self.writer.reap_acknowledged(final=True)
            self.notifier.busy()
            if not left or (not replaced and (done or len(left) == before)):
                break
        if left:
            log.error("restore_failed", units=len(left), cgroup=next(iter(left)), advice="run `cpumond restore`",
                      error=f"systemd did not store them: {self.context.units.problem or 'no answer'}")  # fmt: skip
        return len(left)
