"""The service manager's side of life: READY, RELOADING, STATUS, WATCHDOG, STOPPING (sd_notify)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cpumond.process import connect_to_manager, read_watchdog_s

if TYPE_CHECKING:
    from cpumond.agent.loop import Agent

STATUS_PERIOD_S = 10.0


class Notifier:
    """Talks to systemd when ``environment`` says that it started us, else does nothing.

    The watchdog is fed by ``tick_done``, and between ticks only while the last tick was a good one.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._send = connect_to_manager(environment)
        self.ping_period_s = math.inf if self._send is None else read_watchdog_s(environment) / 3
        self._good: bool | None = None
        self._status_at_s = -math.inf
        self._pinged_at_s = -math.inf

    def notify(self, text: str) -> None:
        """Send one message; a manager that does not listen must not stop the agent."""
        if self._send is not None:
            try:
                self._send(text)
            except (OSError, RuntimeError, ValueError):
                # Nothing to tell and nobody to tell it to: the watchdog decides.
                return

    def ready(self, agent: Agent) -> None:
        """The first tick is done and the sockets answer, or a reload is over."""
        if self._good is None:
            # The manager counts from READY, and the next tick may be further away than its patience.
            self._good, self._pinged_at_s = True, time.monotonic()
        self.notify(f"READY=1\nSTATUS={describe_status(agent)}")

    def reloading(self) -> None:
        """A reload begins."""
        self.notify(f"RELOADING=1\nMONOTONIC_USEC={int(time.monotonic() * 1e6)}")

    def stopping(self) -> None:
        """The end begins."""
        self._good = False
        self.notify("STOPPING=1\nSTATUS=restoring limits")

    def tick_done(self, agent: Agent) -> None:
        """A good tick: feed the watchdog, now and then say the state."""
        self._good = True
        if self._send is None:
            return
        now_s = time.monotonic()
        self._pinged_at_s = now_s
        if now_s - self._status_at_s >= STATUS_PERIOD_S:
            self._status_at_s = now_s
            self.notify(f"WATCHDOG=1\nSTATUS={describe_status(agent)}")
        else:
            self.notify("WATCHDOG=1")

    def tick_failed(self) -> None:
        """A bad tick: the watchdog goes hungry until a good one."""
        self._good = False

    def ping(self) -> None:
        """Feed the watchdog while a long period lasts."""
        if self._good and time.monotonic() - self._pinged_at_s >= self.ping_period_s:
            self._pinged_at_s = time.monotonic()
            self.notify("WATCHDOG=1")


def describe_status(agent: Agent) -> str:
    """One line for ``systemctl status``."""
    snapshot = agent.read_snapshot()
    if snapshot is None:
        return "starting"
    ordered = sum(job.ordered_cores for job in snapshot.jobs)
    current = sum(job.current_cores for job in snapshot.jobs)
    modes = sorted({job.status for job in snapshot.jobs})
    text = f"{len(snapshot.jobs)} jobs ({', '.join(modes) or 'none'}), {ordered:.1f} cores ordered, {current:.1f} limit"
    return text + (", writes paused" if snapshot.paused else "")
