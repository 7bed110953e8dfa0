"""Reporters send heartbeats: to the log, to a receiver over HTTP, to the scheduler, or nowhere.

A reporter takes the node's full state and retries until the newest state has arrived. A state is dropped if a newer one
comes before it was sent, so memory does not grow. A new kind needs one module and one line in ``REPORTERS``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from cpumond.agent.config import Report
from cpumond.agent.report.log import LogReporter, SilentReporter
from cpumond.core.answers import ReporterStats
from cpumond.core.wire import Heartbeat


class Reporter(Protocol):
    """Sends heartbeats. Only the tick's thread calls ``submit`` and ``close``; any thread may call ``stats``."""

    def submit(self, heartbeat: Heartbeat) -> None:
        """Accept ``heartbeat``. Never waits for the receiver, and never raises."""

    def close(self, timeout_s: float) -> None:
        """Try once to send a waiting heartbeat, and end. Takes at most ``timeout_s`` seconds (>= 0). Never raises."""

    def stats(self) -> ReporterStats:
        """Return the statistics so far."""


def _make_http(report: Report) -> Reporter:
    # The HTTP client costs several MiB and tens of milliseconds, so it is imported only for this kind.
    from cpumond.agent.report.http import make_http_reporter

    return make_http_reporter(report)


REPORTERS: Final[dict[str, Callable[[Report], Reporter]]] = {
    "none": lambda _: SilentReporter(),
    "log": lambda _: LogReporter(),
    "http": _make_http,
}
"""``report.kind`` -> function that makes the reporter, and raises ConfigError if ``report.url`` is no address."""
