"""Send heartbeats by HTTP POST to any receiver. Only the status of a response counts, not its content."""

from __future__ import annotations

import random

import httpx2
import msgspec

from cpumond.agent.config import Report
from cpumond.agent.report.mailbox import Mailbox, SendFailure, make_client, post
from cpumond.agent.report.token import read_token
from cpumond.core.errors import ConfigError
from cpumond.core.wire import Heartbeat

MAX_ANSWER_BYTES = 65_536
"""Maximum length of a response. It is read only to keep the connection, which a longer response closes."""


def make_http_reporter(report: Report, rng: random.Random | None = None) -> Mailbox:
    """Make a reporter that posts the newest heartbeat as JSON to ``report.url`` until the receiver accepts it.

    ``rng`` draws the waits between attempts. Raises ConfigError if ``report.url`` is invalid. Later problems appear
    only in the log and in ``stats``."""
    return Mailbox("report", HttpCarrier(report), report.timeout_s, report.retry_max_s, rng)


class HttpCarrier:
    """Posts heartbeats to ``report.url``."""

    def __init__(self, report: Report) -> None:
        self._url = heartbeat_url(report.url)
        self._token_file = report.token_file
        self.shown_url = str(self._url.copy_with(userinfo=b"", query=None, fragment=None))
        self._client = make_client(report.timeout_s, self.shown_url)
        self.end = self._client.close

    def deliver(self, heartbeat: Heartbeat, timeout_s: float) -> SendFailure | None:
        # The token is read again for each attempt, because the file may be replaced while the agent runs.
        headers = {"Authorization": f"Bearer {read_token(self._token_file)}"} if self._token_file else {}
        reply = post(self._client, self._url, msgspec.json.encode(heartbeat), headers, timeout_s, MAX_ANSWER_BYTES)
        if reply.is_good:
            return None
        return SendFailure(str(reply.status), f"{self.shown_url}: {describe_status(reply.status)}")


def heartbeat_url(url: str) -> httpx2.URL:
    """Return the address for heartbeats: ``url``, with ``/v1/heartbeat`` if it has no path. Raises ConfigError."""
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError) as error:
        raise ConfigError(f"report.url: is not an address: {error}") from None
    return parsed.copy_with(path="/v1/heartbeat") if parsed.path in ("", "/") else parsed


def describe_status(status: int) -> str:
    """Describe, for a report, an HTTP status that is not 2xx; add advice."""
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
