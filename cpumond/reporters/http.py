"""Heartbeats to a scheduler by HTTP POST, from one thread with a mailbox for one heartbeat.

The newest heartbeat wins: one that waits is replaced by the next, also while a failed attempt is waited out, so memory
stays bounded and a retry carries the newest state. Waits grow with the failures in a row and are drawn from
[0, bound] ("full jitter"), so that the nodes of a cluster do not come back to a restarted scheduler in step.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

import httpx2
import msgspec
import structlog

from cpumond import __version__
from cpumond.config import Report
from cpumond.errors import ConfigError, CpumondError
from cpumond.reporters import ReporterStats, read_token
from cpumond.wire import Heartbeat

DEFAULT_PATH = "/v1/heartbeat"
FIRST_RETRY_S = 1.0
"""Upper bound of the wait after the first failure in a row; it doubles with each further one."""

MAX_ANSWER_BYTES = 65_536
"""An answer is read to its end to keep the connection; behind a longer one the connection is closed instead."""

_log = structlog.get_logger()


class Failure(msgspec.Struct, frozen=True):
    """Why an attempt failed: ``kind`` is the same for what an operator needs to read once, ``sentence`` says it."""

    kind: str
    sentence: str


class HttpReporter:
    """Posts the newest heartbeat as JSON to ``report.url`` until the receiver takes it.

    ``rng`` draws the waits. Raises ConfigError when ``report.url`` cannot be understood; afterwards problems show only
    in the log and in ``stats``.
    """

    def __init__(self, report: Report, rng: random.Random | None = None) -> None:
        self._url = heartbeat_url(report.url)
        self._shown_url = str(self._url.copy_with(userinfo=b"", query=None, fragment=None))
        self._report = report
        self._rng = rng or random.SystemRandom()
        self._client = _make_client(report)
        self._changed = threading.Condition()
        self._pending: Heartbeat | None = None
        self._stats = ReporterStats()
        self._end_at_s: float | None = None
        self._logged_kinds: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="cpumond-report", daemon=True)
        self._thread.start()

    def submit(self, heartbeat: Heartbeat) -> None:
        """Leave ``heartbeat`` for the thread in place of one that still waits there."""
        with self._changed:
            if self._pending is not None or self._end_at_s is not None:
                self._drop()
            if self._end_at_s is None:
                self._pending = heartbeat
                self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Try once more what waits and end. A request under way for longer than ``timeout_s`` is left to its end."""
        timeout_s = min(max(0.0, timeout_s), threading.TIMEOUT_MAX)
        with self._changed:
            if self._end_at_s is None:
                self._end_at_s = time.monotonic() + timeout_s
            self._changed.notify()
        self._thread.join(timeout_s)

    def stats(self) -> ReporterStats:
        """The figures up to now."""
        with self._changed:
            return self._stats

    def _run(self) -> None:
        failures = 0
        while self._wait(backoff_s(failures, self._report.retry_max_s, self._rng)):
            failures = 0 if self._attempt(self._report.timeout_s) else failures + 1
        self._attempt_last()
        with suppress(Exception):  # nothing is left to tell it to
            self._client.close()

    def _wait(self, pause_s: float) -> bool:
        """Wait ``pause_s``, which only ``close`` cuts short, then for a heartbeat; False when the end has come."""
        with self._changed:
            self._changed.wait_for(self._ending, pause_s)
            self._changed.wait_for(lambda: self._ending() or self._pending is not None)
            return not self._ending()

    def _ending(self) -> bool:
        return self._end_at_s is not None

    def _attempt_last(self) -> None:
        left_s = (self._end_at_s or 0.0) - time.monotonic()
        if left_s > 0.0:
            self._attempt(min(left_s, self._report.timeout_s))
        with self._changed:
            if self._pending is not None:
                self._pending = None
                self._drop()

    def _attempt(self, timeout_s: float) -> bool:
        """Send what waits; on failure it waits again unless a newer one came. True when nothing is left to retry."""
        with self._changed:
            heartbeat, self._pending = self._pending, None
        if heartbeat is None:
            return True
        failure = self._send(heartbeat, timeout_s)
        with self._changed:
            self._settle(heartbeat, failure)
        self._log_change(failure)
        return failure is None

    def _settle(self, heartbeat: Heartbeat, failure: Failure | None) -> None:
        """Count the outcome and keep ``heartbeat`` for a retry where no newer one waits; the caller holds the lock."""
        now, replace = self._stats, msgspec.structs.replace
        if failure is None:
            self._stats = replace(now, sent_total=now.sent_total + 1, last_success_at_s=time.monotonic(), last_error="")
            return
        self._stats = replace(now, failed_total=now.failed_total + 1, last_error=failure.sentence)
        if self._pending is None:
            self._pending = heartbeat
        else:
            self._drop()

    def _send(self, heartbeat: Heartbeat, timeout_s: float) -> Failure | None:
        try:
            status = self._post(msgspec.json.encode(heartbeat), self._authorization(), timeout_s)
        except CpumondError as error:
            return Failure("token", str(error))
        except httpx2.TimeoutException:
            return Failure("timeout", f"{self._shown_url}: no answer within {timeout_s:g} s")
        except Exception as error:  # whatever it was, the next heartbeat must be tried
            kind = type(error).__name__
            return Failure(kind, f"{self._shown_url}: {str(error) or kind}")
        return None if 200 <= status < 300 else Failure(str(status), f"{self._shown_url}: {describe_status(status)}")

    def _authorization(self) -> dict[str, str]:
        """The header with the token, read again for each attempt: a token is replaced while the agent runs."""
        path = self._report.token_file
        return {"Authorization": f"Bearer {read_token(path)}"} if path else {}

    def _post(self, body: bytes, headers: dict[str, str], timeout_s: float) -> int:
        deadline_s = time.monotonic() + timeout_s
        with self._client.stream("POST", self._url, content=body, headers=headers, timeout=timeout_s) as response:
            with suppress(httpx2.HTTPError):  # the status has been received; only the connection is lost
                _read_to_end(response.iter_raw(), deadline_s)
            return response.status_code

    def _log_change(self, failure: Failure | None) -> None:
        """One line for each kind of failure and one when it is over, not one for each attempt."""
        with suppress(Exception):  # a log that cannot be written must not end the thread
            if failure is None and self._logged_kinds:
                self._logged_kinds.clear()
                _log.info("report_recovered", url=self._shown_url, failed_total=self._stats.failed_total)
            elif failure is not None and failure.kind not in self._logged_kinds:
                self._logged_kinds.add(failure.kind)
                _log.warning("report_failed", error=failure.sentence, failed_total=self._stats.failed_total)

    def _drop(self) -> None:
        """Count a heartbeat that will never be sent; the caller holds the lock."""
        self._stats = msgspec.structs.replace(self._stats, dropped_total=self._stats.dropped_total + 1)


def heartbeat_url(url: str) -> httpx2.URL:
    """Where heartbeats go: ``url`` as it is, with ``/v1/heartbeat`` when it has no path. Raises ConfigError."""
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError) as error:
        raise ConfigError(f"report.url: is not an address: {error}") from None
    return parsed.copy_with(path=DEFAULT_PATH) if parsed.path in ("", "/") else parsed


def backoff_s(failures: int, retry_max_s: float, rng: random.Random) -> float:
    """Seconds to wait after ``failures`` (>= 0) failures in a row, in [0, retry_max_s]; 0 after none."""
    if failures == 0:
        return 0.0
    return rng.uniform(0.0, min(retry_max_s, FIRST_RETRY_S * 2.0 ** min(failures - 1, 30)))


def describe_status(status: int) -> str:
    """What an HTTP status other than 2xx means for a report, with what to do about it."""
    if 300 <= status < 400:
        return f"answered {status}; redirects are not followed, set report.url to the final address"
    advice = {
        401: "; check report.token_file",
        403: "; check report.token_file",
        404: "; check the path of report.url",
        405: "; check the path of report.url",
        413: "; the heartbeat is larger than the receiver allows",
        422: "; the receiver does not understand the heartbeat, check that both have the same version",
    }
    return f"answered {status}{advice.get(status, '')}"


def _make_client(report: Report) -> httpx2.Client:
    # The library logs each request at INFO, which would bury the agent's own lines.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    return httpx2.Client(
        headers={
            "User-Agent": f"cpumond/{__version__}",
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        },
        timeout=report.timeout_s,
        # Without an expiry: with the default of 5 s each report of the usual 10 s would open a new connection.
        limits=httpx2.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=None),
        trust_env=False,
        follow_redirects=False,
    )


def _read_to_end(chunks: Iterable[bytes], deadline_s: float) -> None:
    """Read an answer to its end, at most MAX_ANSWER_BYTES and until ``deadline_s`` (monotonic), and forget it."""
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > MAX_ANSWER_BYTES or time.monotonic() > deadline_s:
            return
