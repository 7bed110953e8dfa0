"""Where heartbeats go: nowhere, into the log, to a receiver over HTTP, or to the scheduler that orders jobs.

A reporter takes the node's full state and tries by itself until the newest state has arrived; what was superseded
before it was sent is dropped, so its memory does not grow. A new kind is one module and one line in ``REPORTERS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from cpumond.agent.config import Report
from cpumond.agent.report.log import LogReporter, SilentReporter
from cpumond.core.answers import ReporterStats
from cpumond.core.wire import Heartbeat


class Reporter(Protocol):
    """Sends heartbeats somewhere. ``submit`` and ``close`` are called by the tick's thread, ``stats`` by any."""

    def submit(self, heartbeat: Heartbeat) -> None:
        """Take over ``heartbeat``. Never blocks on the receiver and never raises."""

    def close(self, timeout_s: float) -> None:
        """Send what still waits, once, and end; returns after at most ``timeout_s`` seconds (>= 0). Never raises."""

    def stats(self) -> ReporterStats:
        """The figures up to now."""


def _make_http(report: Report) -> Reporter:
    # The HTTP client costs several MiB and tens of milliseconds, which only this kind should pay.
    from cpumond.agent.report.http import make_http_reporter

    return make_http_reporter(report)


REPORTERS: Final[dict[str, Callable[[Report], Reporter]]] = {
    "none": lambda _: SilentReporter(),
    "log": lambda _: LogReporter(),
    "http": _make_http,
}
"""``report.kind`` -> function that makes the reporter. Raises ConfigError when ``report.url`` is no address."""
