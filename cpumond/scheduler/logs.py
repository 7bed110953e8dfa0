"""Logs of jobs on their way from a node to who asked: requests that wait, and the nodes' answers.

Nodes only connect to the scheduler, never the other way round. A request therefore travels in the answers to the
node's heartbeats, again and again, until the node has sent the log or nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from cpumond.scheduler.model import TIMEOUT, TOO_MANY_REQUESTS, CommandError
from cpumond.wire import JobLog, LogRequest, LogStream

TIMEOUT_S: Final = 10.0
MAX_WAITING: Final = 100
MAX_PER_ANSWER: Final = 4
"""A node reads logs between two heartbeats: not too many at a time."""

_Wanted = tuple[str, str, LogStream, int]
"""Node, job, stream, bytes."""


@dataclass(slots=True, eq=False)
class _Waiting:
    node_id: str
    request: LogRequest
    log: asyncio.Future[JobLog]
    readers: int = field(default=0)


class LogDesk:
    """The requests that wait. Used by the event loop's thread. ``timeout_s`` in real seconds."""

    def __init__(self, new_id: Callable[[], str], timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._new_id = new_id
        self._wanted: dict[_Wanted, _Waiting] = {}
        self._by_id: dict[str, _Wanted] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    async def read(self, node_id: str, job_id: str, stream: LogStream, tail_bytes: int) -> JobLog:
        """The end of a log as its node sends it; who asks for the same at the same time shares the request.

        Raises CommandError when too many requests wait, or when the node has not answered in time.
        """
        wanted: _Wanted = (node_id, job_id, stream, tail_bytes)
        waiting = self._wanted.get(wanted)
        if waiting is None:
            waiting = self._ask(wanted)
        waiting.readers += 1
        try:
            # One who gives up must not take the log away from the others.
            return await asyncio.wait_for(asyncio.shield(waiting.log), self.timeout_s)
        except TimeoutError:
            raise CommandError(f"node {node_id} did not send the log within {self.timeout_s:g} s", TIMEOUT) from None
        finally:
            waiting.readers -= 1
            if not waiting.readers:
                self._forget(wanted, waiting)

    def _ask(self, wanted: _Wanted) -> _Waiting:
        if len(self._wanted) >= MAX_WAITING:
            raise CommandError(
                f"{len(self._wanted)} logs of jobs are being waited for, which is the limit; ask again in a moment",
                TOO_MANY_REQUESTS,
            )
        node_id, job_id, stream, tail_bytes = wanted
        request = LogRequest(self._new_id(), job_id, stream, tail_bytes)
        waiting = self._wanted[wanted] = _Waiting(node_id, request, asyncio.get_running_loop().create_future())
        self._by_id[request.request_id] = wanted
        return waiting

    def _forget(self, wanted: _Wanted, waiting: _Waiting) -> None:
        if self._wanted.get(wanted) is waiting:
            del self._wanted[wanted]
            del self._by_id[waiting.request.request_id]

    def requests_of(self, node_id: str) -> list[LogRequest]:
        """What the answer to a heartbeat of this node asks for, the oldest first."""
        if not self._wanted:
            return []
        mine = (waiting.request for waiting in self._wanted.values() if waiting.node_id == node_id)
        return list(islice(mine, MAX_PER_ANSWER))

    def take(self, log: JobLog) -> bool:
        """A log arrives; False when nobody waits for it any more. Raises CommandError when another node was asked."""
        wanted = self._by_id.get(log.request_id)
        if wanted is None:
            return False
        waiting = self._wanted[wanted]
        if waiting.node_id != log.node_id:
            raise CommandError(f"node {log.node_id} was not asked for the log of job {waiting.request.job_id}")
        self._forget(wanted, waiting)
        waiting.log.set_result(log)
        return True
