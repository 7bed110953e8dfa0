"""Retention of the store's log: once an hour its oldest entries are dropped, a limited number in each period."""

from __future__ import annotations

import asyncio

import structlog

from cpumond.scheduler.store import Store, StoreError

log = structlog.get_logger("cpumond.scheduler")

CUT_PERIOD_S = 3600.0


class LogRetention:
    """Drops entries older than ``keep_s``, and the oldest while the log takes more than ``max_bytes``."""

    def __init__(self, keep_s: float, max_bytes: int) -> None:
        self.keep_s = keep_s
        self.max_bytes = max_bytes
        self._due_at = 0.0
        self._dropped = 0

    async def cut_if_due(self, store: Store, writing: asyncio.Lock, now: float) -> None:
        """Do one step in a thread if it is due. Other writes also take ``writing``, so they wait for one step at most.
        ``now``: scheduler time. If the store refuses a step, it is repeated an hour later."""
        if now < self._due_at:
            return
        try:
            async with writing:
                dropped = await asyncio.to_thread(store.cut_log, now - self.keep_s, self.max_bytes)
        except StoreError as error:
            log.error("log_not_cut", error=str(error))
            dropped = 0
        self._dropped += dropped
        if dropped:
            return  # the next call continues
        if self._dropped:
            log.info("log_cut", dropped_entries=self._dropped)
        self._due_at, self._dropped = now + CUT_PERIOD_S, 0
