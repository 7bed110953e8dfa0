"""Where heartbeats go: nowhere, into the log, to a receiver over HTTP, or to the scheduler that orders jobs.

A reporter takes the node's full state and sees to it by itself that the newest state arrives; what was superseded
before it was sent is dropped, so its memory does not grow. A new kind is one module and one line in ``REPORTERS``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, Protocol

from cpumond.agent.config import Report
from cpumond.agent.report.log import LogReporter, SilentReporter
from cpumond.core.answers import ReporterStats
from cpumond.core.errors import AccessError, ConfigError, describe
from cpumond.core.settings import find_rights_of_others
from cpumond.core.wire import Heartbeat

MAX_TOKEN_BYTES = 4096


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
    from cpumond.agent.report.http import HttpReporter

    return HttpReporter(report)


REPORTERS: Final[dict[str, Callable[[Report], Reporter]]] = {
    "none": lambda _: SilentReporter(),
    "log": lambda _: LogReporter(),
    "http": _make_http,
}
"""``report.kind`` -> function that makes the reporter. Raises ConfigError when ``report.url`` is no address."""


def read_token(path: str) -> str:
    """The bearer token in the file ``path``: one line of visible ASCII, at most 4096 bytes; space around it is cut.

    Raises AccessError without the right to read it, else ConfigError, also for a file that others can read; neither
    message shows the content.
    """
    try:
        with open(path, "rb") as file:
            problem = find_rights_of_others(path, os.fstat(file.fileno()))
            raw = file.read(MAX_TOKEN_BYTES + 1)
    except PermissionError as error:
        raise AccessError(f"token file {path}: {describe(error)}; make it readable for this user") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"token file {path}: {describe(error)}") from None
    if problem:
        raise ConfigError(f"token file {path}: {problem}")
    return check_token(raw, f"token file {path}")


def check_token(raw: bytes, where: str) -> str:
    """The token in ``raw``, as ``read_token`` takes it. Raises ConfigError, which names ``where``, not the token."""
    token = raw.strip()
    if not token:
        raise ConfigError(f"{where}: is empty; it must hold the token on one line")
    if len(raw) > MAX_TOKEN_BYTES or not all(0x21 <= byte <= 0x7E for byte in token):
        raise ConfigError(
            f"{where}: must hold one line of visible ASCII characters without spaces, at most {MAX_TOKEN_BYTES} bytes"
        )
    return token.decode("ascii")
