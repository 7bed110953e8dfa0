"""Heartbeats by HTTP POST to any receiver, whose answers mean nothing but taken or not."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from contextlib import suppress

import httpx2
import msgspec

from cpumond.answers import ReporterStats
from cpumond.config import Report
from cpumond.errors import ConfigError
from cpumond.reporters import read_token
from cpumond.reporters.mailbox import FIRST_RETRY_S, Failure, Mailbox, backoff_s, make_client
from cpumond.wire import Heartbeat

__all__ = [
    "DEFAULT_PATH", "FIRST_RETRY_S", "MAX_ANSWER_BYTES", "HttpReporter", "backoff_s", "describe_status",
    "heartbeat_url",
]  # fmt: skip

DEFAULT_PATH = "/v1/heartbeat"

MAX_ANSWER_BYTES = 65_536
"""An answer is read to its end to keep the connection; behind a longer one the connection is closed instead."""


class HttpReporter:
    """Posts the newest heartbeat as JSON to ``report.url`` until the receiver takes it.

    ``rng`` draws the waits. Raises ConfigError when ``report.url`` cannot be understood; afterwards problems show only
    in the log and in ``stats``.
    """

    def __init__(self, report: Report, rng: random.Random | None = None) -> None:
        self._url = heartbeat_url(report.url)
        self._shown_url = str(self._url.copy_with(userinfo=b"", query=None, fragment=None))
        self._token_file = report.token_file
        self._client = make_client(report.timeout_s)
        self._mailbox = Mailbox(
            self._send, self._client.close, event="report", shown_url=self._shown_url, timeout_s=report.timeout_s,
            retry_max_s=report.retry_max_s, rng=rng,
        )  # fmt: skip

    def submit(self, heartbeat: Heartbeat) -> None:
        """Leave ``heartbeat`` for the thread in place of one that still waits there."""
        self._mailbox.submit(heartbeat)

    def close(self, timeout_s: float) -> None:
        """Try once more what waits and end. A request under way for longer than ``timeout_s`` is left to its end."""
        self._mailbox.close(timeout_s)

    def stats(self) -> ReporterStats:
        """The figures up to now."""
        return self._mailbox.stats()

    def _send(self, heartbeat: Heartbeat, timeout_s: float) -> Failure | None:
        status = self._post(msgspec.json.encode(heartbeat), self._authorization(), timeout_s)
        return None if 200 <= status < 300 else Failure(str(status), f"{self._shown_url}: {describe_status(status)}")

    def _authorization(self) -> dict[str, str]:
        """The header with the token, read again for each attempt: a token is replaced while the agent runs."""
        path = self._token_file
        return {"Authorization": f"Bearer {read_token(path)}"} if path else {}

    def _post(self, body: bytes, headers: dict[str, str], timeout_s: float) -> int:
        deadline_s = time.monotonic() + timeout_s
        with self._client.stream("POST", self._url, content=body, headers=headers, timeout=timeout_s) as response:
            with suppress(httpx2.HTTPError):  # the status has been received; only the connection is lost
                _read_to_end(response.iter_raw(), deadline_s)
            return response.status_code


def heartbeat_url(url: str) -> httpx2.URL:
    """Where heartbeats go: ``url`` as it is, with ``/v1/heartbeat`` when it has no path. Raises ConfigError."""
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError) as error:
        raise ConfigError(f"report.url: is not an address: {error}") from None
    return parsed.copy_with(path=DEFAULT_PATH) if parsed.path in ("", "/") else parsed


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


def _read_to_end(chunks: Iterable[bytes], deadline_s: float) -> None:
    """Read an answer to its end, at most MAX_ANSWER_BYTES and until ``deadline_s`` (monotonic), and forget it."""
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > MAX_ANSWER_BYTES or time.monotonic() > deadline_s:
            return
