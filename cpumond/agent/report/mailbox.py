"""Reporters over a network: a thread with a mailbox for one heartbeat, and HTTP requests.

A new heartbeat replaces one that still waits, also during the wait after a failure. So memory stays bounded, and a
retry sends the newest state. A wait is drawn at random from [0, bound], and the bound grows with the number of failures
in a row ("full jitter"): the nodes of a cluster do not all reconnect to a restarted scheduler at the same time."""

from __future__ import annotations

import logging
import random
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, Protocol

import httpx2
import msgspec
import structlog

from cpumond import __version__
from cpumond.core.answers import ReporterStats
from cpumond.core.errors import CpumondError
from cpumond.core.route import backoff_s
from cpumond.core.term import LEADER_HEADER, TERM_HEADER, parse_term
from cpumond.core.tls import describe_tls_error
from cpumond.core.wire import Heartbeat

_log = structlog.get_logger()


class SendFailure(msgspec.Struct, frozen=True):
    """Why an attempt failed, in a ``sentence``; if failures of the same ``kind`` follow, only the first one is logged.

    ``retry``: if false, the heartbeat is dropped without a log line, and the next one is sent without a wait.
    ``elsewhere``: a different address may accept the heartbeat. ``pause_s``: seconds before the next attempt; if None,
    the number of failures in a row decides."""

    kind: str
    sentence: str
    retry: bool = True
    elsewhere: bool = False
    pause_s: float | None = None


class Again(msgspec.Struct, frozen=True):
    """An attempt that neither failed nor delivered the heartbeat: the newest heartbeat is sent at once."""


AGAIN: Final = Again()


class HttpReply(msgspec.Struct, frozen=True):
    """The response to a request. ``problem``: why ``content`` is incomplete. ``term`` and ``leader`` are headers."""

    url: str
    status: int
    content: bytes
    problem: Exception | None = None
    term: int | None = None
    leader: str | None = None

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300


class Carrier(Protocol):
    """Sends heartbeats to a receiver. Only the mailbox's thread calls these methods.

    ``shown_url``: the receiver's address, for the log."""

    shown_url: str

    def deliver(self, heartbeat: Heartbeat, timeout_s: float) -> SendFailure | Again | None:
        """Send ``heartbeat`` within ``timeout_s`` seconds; return None if the receiver accepted it."""

    def end(self) -> None:
        """Close the connection; the mailbox sends no more heartbeats."""


class Mailbox:
    """A reporter: a thread that lets ``carrier`` send the newest heartbeat until the receiver accepts one.

    The first failure of each kind is logged as ``<event>_failed``. When a heartbeat is accepted after that,
    ``<event>_recovered`` is logged, and later the first failure of each kind again. ``rng`` draws the waits."""

    def __init__(
        self, event: str, carrier: Carrier, timeout_s: float, retry_max_s: float, rng: random.Random | None = None
    ) -> None:
        self._event = event
        self._carrier = carrier
        self._timeout_s = timeout_s
        self._retry_max_s = retry_max_s
        self._rng = rng or random.SystemRandom()
        self._changed = threading.Condition()
        self._pending: Heartbeat | None = None
        self._stats = ReporterStats()
        self._end_at_s: float | None = None
        self._logged_kinds: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"cpumond-{event}", daemon=True)
        self._thread.start()

    def submit(self, heartbeat: Heartbeat) -> None:
        """Leave ``heartbeat`` for the thread; it replaces a heartbeat that still waits."""
        with self._changed:
            if self._pending is not None or self._end_at_s is not None:
                self._drop()
            if self._end_at_s is None:
                self._pending = heartbeat
                self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Try once more to send a waiting heartbeat, and end. Return after ``timeout_s`` even if a request runs."""
        timeout_s = min(max(0.0, timeout_s), threading.TIMEOUT_MAX)
        with self._changed:
            if self._end_at_s is None:
                self._end_at_s = time.monotonic() + timeout_s
            self._changed.notify()
        self._thread.join(timeout_s)

    def stats(self) -> ReporterStats:
        with self._changed:
            return self._stats

    def has_newer(self) -> bool:
        """Return whether a heartbeat waits that is newer than the one that is being sent."""
        with self._changed:
            return self._pending is not None

    def is_closing(self) -> bool:
        with self._changed:
            return self._ending()

    def _run(self) -> None:
        failures, pause_s = 0, 0.0
        while self._wait(pause_s):
            result = self._attempt(self._timeout_s)
            if isinstance(result, Again):
                pause_s = 0.0
                continue
            failures = failures + 1 if result is not None and result.retry else 0
            asked_s = None if result is None else result.pause_s
            pause_s = backoff_s(failures, self._retry_max_s, self._rng) if asked_s is None else asked_s
        self._attempt_last()
        with suppress(OSError, httpx2.HTTPError):  # a heartbeat that was not sent is counted already
            self._carrier.end()

    def _wait(self, pause_s: float) -> bool:
        """Wait for ``pause_s``, then until there is a heartbeat. Return False as soon as ``close`` is called."""
        with self._changed:
            self._changed.wait_for(self._ending, pause_s)
            self._changed.wait_for(lambda: self._ending() or self._pending is not None)
            return not self._ending()

    def _ending(self) -> bool:
        return self._end_at_s is not None

    def _attempt_last(self) -> None:
        result: SendFailure | Again | None = AGAIN
        while result is AGAIN:
            left_s = (self._end_at_s or 0.0) - time.monotonic()
            if left_s <= 0.0:
                break
            result = self._attempt(min(left_s, self._timeout_s))
        with self._changed:
            if self._pending is not None:
                self._pending = None
                self._drop()

    def _attempt(self, timeout_s: float) -> SendFailure | Again | None:
        """Send the waiting heartbeat. If it was not accepted, and no newer one has come, it waits again."""
        with self._changed:
            heartbeat, self._pending = self._pending, None
        if heartbeat is None:
            return None
        try:
            result = self._carrier.deliver(heartbeat, timeout_s)
        except Exception as error:  # after any error the next heartbeat must be tried
            result = make_failure(error, self._carrier.shown_url, timeout_s)
        with self._changed:
            self._settle(heartbeat, result)
        if result is None or (isinstance(result, SendFailure) and result.retry):
            self._log_change(result)
        return result

    def _settle(self, heartbeat: Heartbeat, result: SendFailure | Again | None) -> None:
        """Count an attempt's result. If no newer heartbeat waits, keep this one. The caller holds the lock."""
        now, replace = self._stats, msgspec.structs.replace
        if result is None:
            self._stats = replace(now, sent_total=now.sent_total + 1, last_success_at_s=time.monotonic(), last_error="")
            return
        if isinstance(result, SendFailure):
            self._stats = replace(now, failed_total=now.failed_total + 1, last_error=result.sentence)
        if self._pending is None and (isinstance(result, Again) or result.retry):
            self._pending = heartbeat
        else:
            self._drop()

    def _log_change(self, failure: SendFailure | None) -> None:
        """Log the first failure of each kind, or the recovery (``failure`` None); not every attempt."""
        with suppress(Exception):  # a failure to write the log must not end the thread
            failed_total = self._stats.failed_total
            if failure is None and self._logged_kinds:
                self._logged_kinds.clear()
                _log.info(f"{self._event}_recovered", url=self._carrier.shown_url, failed_total=failed_total)
            elif failure is not None and failure.kind not in self._logged_kinds:
                self._logged_kinds.add(failure.kind)
                _log.warning(f"{self._event}_failed", error=failure.sentence, failed_total=failed_total)

    def _drop(self) -> None:
        """Count a heartbeat that is dropped. The caller holds the lock."""
        self._stats = msgspec.structs.replace(self._stats, dropped_total=self._stats.dropped_total + 1)


def post(
    client: httpx2.Client, url: httpx2.URL, body: bytes, headers: dict[str, str], timeout_s: float, max_bytes: int
) -> HttpReply:
    """Make one request and return the response. If that has more than ``max_bytes``, the rest is not read, and the
    connection is closed. If there is no status, raises an exception that ``make_failure`` can describe."""
    deadline_s = time.monotonic() + timeout_s
    content = bytearray()
    problem: Exception | None = None
    with client.stream(
        "POST", url, content=_cut(body, deadline_s), headers={"Content-Length": str(len(body)), **headers},
        timeout=timeout_s,
    ) as response:  # fmt: skip
        try:
            for chunk in response.iter_raw():
                content += chunk
                if len(content) > max_bytes:
                    problem = ValueError(f"the response is larger than {max_bytes} bytes")
                elif time.monotonic() > deadline_s:
                    problem = TimeoutError()
                if problem is not None:
                    break
        except httpx2.HTTPError as error:
            problem = error
    term, leader = parse_term(response.headers.get(TERM_HEADER)), response.headers.get(LEADER_HEADER)
    return HttpReply(str(url), response.status_code, bytes(content), problem, term, leader)


def make_failure(error: Exception, shown_url: str, timeout_s: float) -> SendFailure:
    """Describe why a request could not be made, or why it got no complete response."""
    if isinstance(error, CpumondError):
        return SendFailure("token", str(error))
    if isinstance(error, httpx2.TimeoutException | TimeoutError):
        return SendFailure("timeout", f"{shown_url}: no response within {timeout_s:g} s", elsewhere=True)
    kind = type(error).__name__
    told = describe_tls_error(error, "[scheduler] ca_file names the authority of a scheduler's certificate")
    return SendFailure(kind, f"{shown_url}: {told or str(error) or kind}", elsewhere=True)


def _cut(body: bytes, deadline_s: float) -> Iterator[bytes]:
    """Yield ``body`` in pieces until ``deadline_s``. The client's own timeout is for one piece, so it cannot limit the
    time for all of them."""
    for start in range(0, len(body), 65_536):
        if time.monotonic() > deadline_s:
            raise TimeoutError
        yield body[start : start + 65_536]


def make_client(
    timeout_s: float, base_url: str, context: ssl.SSLContext | None = None, path: str | None = None
) -> httpx2.Client:
    """Make a client that sends JSON over one persistent connection, directly to ``base_url``.

    ``context``: the trusted authorities, None for those of the system. ``path``: the server's unix socket, if any."""
    # The library logs each request at INFO: the agent's own lines would be hard to find among these.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    # The connection must not expire: with the default of 5 s, reports every 10 s would each open a new one.
    limits = httpx2.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=None)
    # Loading all certificate authorities takes long. An http address does not need any, so none is loaded.
    trusted: bool | ssl.SSLContext = context or base_url.startswith("https:") or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return httpx2.Client(
        headers={
            "User-Agent": f"cpumond/{__version__}",
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        },
        timeout=timeout_s,
        transport=httpx2.HTTPTransport(verify=trusted, limits=limits, trust_env=False, uds=path),
        trust_env=False,
        follow_redirects=False,
    )
