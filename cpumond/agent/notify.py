"""Messages to the service manager: READY, RELOADING, STATUS, WATCHDOG, STOPPING (sd_notify)."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Mapping
from typing import Protocol

from cpumond.agent.config import AgentConfig
from cpumond.agent.snapshot import TickSnapshot
from cpumond.core.answers import LinkView
from cpumond.core.words import count
from cpumond.host.service import ServiceManager
from cpumond.monitor.model import compute_mode

STATUS_PERIOD_S = 10.0
WRITING_MODES = ("reclaim", "up-only")


class Described(Protocol):
    """The parts of the agent that its status describes."""

    @property
    def config(self) -> AgentConfig:
        """The configuration in force."""

    def read_snapshot(self) -> TickSnapshot | None:
        """Return the state after the newest tick; None before the first tick."""


class Notifier:
    """Notifies systemd if ``environment`` says that systemd started this process; does nothing otherwise.

    ``tick_done`` pings the watchdog. Between ticks, the watchdog is pinged only if the last tick succeeded."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._manager = ServiceManager(environment)
        self.ping_period_s = self._manager.watchdog_s / 3
        self._good: bool | None = None
        self._status_at_s = -math.inf
        self._pinged_at_s = -math.inf
        self._refused = ""

    def busy(self) -> None:
        """Notify systemd that a start or stop continues, which takes long with many jobs. To be called after each part
        of it, even a short one."""
        self._manager.extend()

    def ready(self, agent: Described) -> None:
        """Send READY, because the first tick is done and the sockets respond, or because a reload is over."""
        if self._good is None:
            # The watchdog's time begins at READY, and the next tick may come later than the watchdog allows.
            self._good, self._pinged_at_s = True, time.monotonic()
        # The status is due again: what a reload changed is visible after the next tick.
        self._status_at_s = -math.inf
        self._manager.notify("READY=1", status=self._describe(agent))

    def reloading(self) -> None:
        self._refused = ""
        self._manager.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def reload_refused(self, error: str) -> None:
        """Record the ``error`` for which a reload was refused; the status contains it until the next reload."""
        self._refused = error

    def stopping(self) -> None:
        """Send STOPPING. The watchdog continues, but does not fire as long as ``busy`` is called."""
        self._good = False
        self._manager.notify("STOPPING=1")
        self._manager.extend("restoring limits")

    def tick_done(self, agent: Described) -> None:
        """After a tick that succeeded, ping the watchdog; every STATUS_PERIOD_S, send the status too."""
        self._good = True
        if not self._manager.listens:
            return
        now_s = self._pinged_at_s = time.monotonic()
        is_due = now_s - self._status_at_s >= STATUS_PERIOD_S
        self._status_at_s = now_s if is_due else self._status_at_s
        self._manager.notify("WATCHDOG=1", status=self._describe(agent) if is_due else "")

    def tick_failed(self) -> None:
        """After a tick that failed, do not ping the watchdog until a tick succeeds."""
        self._good = False

    def ping(self) -> None:
        """Ping the watchdog between two ticks, if they are far apart and the last one succeeded."""
        if self._good and time.monotonic() - self._pinged_at_s >= self.ping_period_s:
            self._pinged_at_s = time.monotonic()
            self._manager.notify("WATCHDOG=1")

    def _describe(self, agent: Described) -> str:
        if not self._manager.listens:
            return ""
        text = describe_status(agent)
        return f"{text}; the last reload was refused: {self._refused}" if self._refused else text


def describe_status(agent: Described) -> str:
    """Return one line for ``systemctl status``: reclaimed CPU, why it is not more, and the scheduler."""
    snapshot = agent.read_snapshot()
    if snapshot is None:
        return "starting"
    parts = [*_describe_limits(agent, snapshot), *_describe_link(snapshot.link)]
    if snapshot.assigned is not None:
        parts.append(f"{count(snapshot.assigned.states.get('running', 0), 'job')} of the scheduler running")
    told = 0 if snapshot.link is None or not _describe_trouble(snapshot.link) else 1
    if len(snapshot.problems) > told:
        parts.append(f"problems: {len(snapshot.problems)}, see `cpumond status`")
    return "; ".join(parts)


def _describe_limits(agent: Described, snapshot: TickSnapshot) -> list[str]:
    jobs = snapshot.jobs
    if not jobs:
        mode = compute_mode(agent.config.node_settings())
        no_jobs = "no jobs yet" if agent.config.source or snapshot.link else "no jobs: no [[source]] is configured"
        return [f"{mode} mode{'' if mode in WRITING_MODES else ': nothing is written'}", no_jobs]
    total = count(len(jobs), "job")
    whole = sum(job.state.hard_cores for job in jobs if not job.unlimited)
    writing = [job for job in jobs if job.mode in WRITING_MODES and not job.refused and not job.unlimited]
    if not writing:
        found = sum(max(job.state.hard_cores - job.state.limit_cores, 0.0) for job in jobs if not job.unlimited)
        why = "shadow mode" if all(job.mode not in WRITING_MODES for job in jobs) else "no job's limit may be changed"
        return [f"{why}: nothing is written", f"{total}, {found:.1f} of {whole:.1f} cores could be reclaimed"]
    reclaimed = sum(max(job.state.hard_cores - job.current_cores, 0.0) for job in writing)
    modes = collections.Counter(job.status for job in jobs)
    shown = ", ".join(f"{number} {mode}" if len(modes) > 1 else mode for mode, number in sorted(modes.items()))
    paused = ["writes are paused"] if snapshot.paused else []
    return [f"{total} ({shown}), {reclaimed:.1f} of {whole:.1f} cores reclaimed", *paused]


def _describe_link(link: LinkView | None) -> list[str]:
    if link is None:
        return []
    trouble = _describe_trouble(link)
    where = f"scheduler {link.url}" if link.term is None else f"scheduler {link.url} (term {link.term})"
    if trouble or not link.registered:
        return [f"{where}: {trouble or 'not registered yet'}"]
    return [f"{where}: tree {link.tree}" + (f", allows at most {link.level}" if link.level else "")]


def _describe_trouble(link: LinkView) -> str:
    return link.stats.last_error or link.warning
