"""State of the ``yt`` protocol between requests: replies for repeats of requests (section 8), and each user's rate."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cpumond.api.yt.formats import from_json_tree, to_json_tree
from cpumond.api.yt.values import MAX_DEPTH, YtError, error_of, error_value, quote_text
from cpumond.core.errors import CpumondError
from cpumond.scheduler.model import NODE_OFFLINE, TIMEOUT, TOO_MANY_REQUESTS

TRY_AGAIN_CODES = frozenset({TIMEOUT, 100, 105, 108, 202, 904, NODE_OFFLINE, 2100})
"""Errors after which the client tries again with the same mutation id; so they are not kept as replies."""


@dataclass(frozen=True)
class YtLimits:
    """Limits of one request, and of one user. ``now`` is a monotonic clock in seconds."""

    max_body_bytes: int = 1024 * 1024
    """Maximum bytes of a body, also after decompression."""
    max_depth: int = MAX_DEPTH
    """Maximum nesting of maps, lists and attributes in requests. It is at most 200, so that readers stay within
    Python's stack, and answers that contain parts of requests within MAX_WRITTEN_DEPTH."""
    max_batch_requests: int = 1000
    requests_per_s: float = 200.0
    """Requests per second that one user may send in the long run; each request in a batch counts."""
    burst_requests: float = 400.0
    max_users: int = 10_000
    """Maximum number of users whose rate is remembered at the same time."""
    now: Callable[[], float] = time.monotonic


@dataclass(eq=False)
class _Reply:
    command: str
    at_s: float
    value: Any = None
    error: dict[str, Any] | None = None
    running: asyncio.Task[Any] | None = None


class ReplyCache:
    """Replies to changes, by user and mutation id: a repeated change is answered, but not run again (section 8).

    ``now`` is wall-clock time in seconds, so that replies can outlive the process."""

    def __init__(self, now: Callable[[], float], max_replies: int = 20_000, max_age_s: float = 900.0) -> None:
        self._now = now
        self._max_replies = max_replies
        self._max_age_s = max_age_s
        self._replies: OrderedDict[tuple[str, str], _Reply] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replies)

    async def run(self, user: str, mutation_id: str, command: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """Return the reply of ``work``. It is run once per id; a repeat waits for it, and gets the same reply or error.

        An error is not kept if it asks for another try, or is not the command's own. The work continues if the caller
        is cancelled. Raises YtError if the id was used for another command."""
        key = (user, mutation_id)
        self._forget_old()
        reply = self._replies.get(key)
        if reply is None:
            self._forget_old(room_for=1)
            reply = self._replies[key] = _Reply(command, self._now())
            reply.running = asyncio.ensure_future(self._work(key, reply, work))
            # The caller may be gone: mark the exception as retrieved.
            reply.running.add_done_callback(lambda task: task.cancelled() or task.exception())
        elif reply.command != command:
            raise YtError(
                f"mutation id {mutation_id} was used for {reply.command} before; make a new one for {command}"
            )
        if reply.running is not None:
            return await asyncio.shield(reply.running)
        if reply.error is not None:
            raise error_of(reply.error)
        return reply.value

    async def _work(self, key: tuple[str, str], reply: _Reply, work: Callable[[], Awaitable[Any]]) -> Any:
        try:
            reply.value = await work()
        except CpumondError as error:
            if _asks_for_another_try(error):
                self._replies.pop(key, None)
            reply.error = error_value(error)
            raise
        except BaseException:
            self._replies.pop(key, None)
            raise
        finally:
            reply.running = None
            reply.at_s = self._now()
            if key in self._replies:
                self._replies.move_to_end(key)
        return reply.value

    def is_of_another(self, user: str, mutation_id: str, command: str) -> bool:
        """Whether the mutation id was used for a different command."""
        reply = self._replies.get((user, mutation_id))
        return reply is not None and reply.command != command

    def _forget_old(self, room_for: int = 0) -> None:
        """Drop replies that are too old, and the oldest ones if there are too many; replies of running work stay."""
        oldest_s = self._now() - self._max_age_s
        excess = len(self._replies) + room_for - self._max_replies
        dropped: list[tuple[str, str]] = []
        for key, reply in self._replies.items():
            if reply.running is not None:
                continue
            if len(dropped) >= excess and reply.at_s >= oldest_s:
                break
            dropped.append(key)
        for key in dropped:
            del self._replies[key]

    def restore(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Restore what ``export_reply`` returned in an earlier run. Raises KeyError or ParseError for a wrong form."""
        for entry in entries:
            key = (str(entry["user"]), str(entry["mutation_id"]))
            value = from_json_tree(entry["reply"])
            self._replies[key] = _Reply(str(entry["command"]), float(entry["at_s"]), value)
            self._replies.move_to_end(key)
        self._forget_old()


def export_reply(user: str, mutation_id: str, command: str, at_s: float, reply: Any) -> dict[str, Any]:
    """Return a successful reply in the form that ``ReplyCache.restore`` reads."""
    return {"user": user, "mutation_id": mutation_id, "command": command, "at_s": at_s, "reply": to_json_tree(reply)}


def _asks_for_another_try(error: CpumondError) -> bool:
    told = getattr(error, "code", None) in TRY_AGAIN_CODES
    return told or any(_asks_for_another_try(inner) for inner in getattr(error, "inner", ()))


class Rates:
    """A token bucket for each user. One request may overdraw the bucket; the user then waits until it is above zero."""

    def __init__(self, limits: YtLimits) -> None:
        self._limits = limits
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, user: str, requests: float = 1.0) -> None:
        """Count requests of a user. Raises YtError 904 if there were too many."""
        left = self._left(user)
        if left <= 0.0:
            raise YtError(
                f"too many requests of user {quote_text(user)}: {self._limits.requests_per_s:g} per second is the "
                "limit; wait, or send one execute_batch",
                TOO_MANY_REQUESTS,
            )
        self.charge(user, requests, left)

    def charge(self, user: str, requests: float, left: float | None = None) -> None:
        """Count requests of a user without refusing them."""
        left = self._left(user) if left is None else left
        self._buckets[user] = (left - requests, self._limits.now())
        self._buckets.move_to_end(user)
        while len(self._buckets) > self._limits.max_users:
            self._buckets.popitem(last=False)

    def _left(self, user: str) -> float:
        burst = self._limits.burst_requests
        left, at_s = self._buckets.get(user, (burst, 0.0))
        return min(burst, left + max(0.0, self._limits.now() - at_s) * self._limits.requests_per_s)
