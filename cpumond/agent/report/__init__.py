"""Receivers of heartbeats: none, the log, a receiver over HTTP, or the scheduler that orders jobs.

A reporter takes the node's full state and retries until the newest state has arrived. A state superseded before it was
sent is dropped, so memory does not grow. A new kind is one module and one line in ``REPORTERS``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from cpumond.agent.config import Report
from cpumond.agent.report.log import LogReporter, SilentReporter
from cpumond.core.answers import ReporterStats
from cpumond.core.wire import Heartbeat


class Reporter(Protocol):
    """Sends heartbeats. ``submit`` and ``close`` are called by the tick's thread, ``stats`` by any."""

    def submit(self, heartbeat: Heartbeat) -> None:
        """Accept ``heartbeat``. Never blocks on the receiver and never raises."""

    def close(self, timeout_s: float) -> None:
        """Send waiting heartbeats once, and end; returns after at most ``timeout_s`` seconds (>= 0). Never raises."""

    def stats(self) -> ReporterStats:
        """Return the statistics so far."""


def _make_http(report: Report) -> Reporter:
    # The HTTP client costs several MiB and tens of milliseconds, which only this kind should pay.
    from cpumond.agent.report.http import make_http_reporter

    return make_http_reporter(report)


REPORTERS: Final[dict[str, Callable[[Report], Reporter]]] = {
    "none": lambda _: SilentReporter(),
    "log": lambda _: LogReporter(),
    "http": _make_http,
}
"""``report.kind`` -> function that makes the reporter. Raises ConfigError if ``report.url`` is no address."""
