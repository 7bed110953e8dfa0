"""Leadership among several schedulers on one store: acquire the lead, renew it, run one term after another.

A reign is a term of this process: a ``Scheduler``, whose state was loaded from the store when the term began, and its
application. Both are dropped when it ends; the process stays as a standby until its next term. The module ``lead``
decides, from the clock and the arbiter's responses, what to do next. Calls of the arbiter run in a separate thread, one
at a time: the loop stays punctual even if the store's engine does not respond."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.store import Arbiter, Change, Entry, FencedError, Store, StoreError
from cpumond.scheduler.store.lead import Lead, LeadStep, LeadView

T = TypeVar("T")
log = structlog.get_logger("cpumond.scheduler")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application."""

Opener = Callable[[Store], tuple[Scheduler, App]]
"""Loads the state of a reign from its store and makes its application; is called in a thread. Raises StoreError."""


def read_boot_s() -> float:
    """Return seconds since the host started, including the time in which it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class FencedStore:
    """The store of one reign. It refuses writes after the reign, and reports if another scheduler has ended it."""

    def __init__(self, store: Store, may_write: Callable[[], bool], lost: Callable[[FencedError], None]) -> None:
        self._store = store
        self.load, self.read_log = store.load, store.read_log
        self._may_write = may_write
        self._lost = lost
        self.lost_total = 0
        self.commit_s = 0.0

    def write(self, changes: Sequence[Change], entries: Sequence[Entry] = ()) -> None:
        """Write like ``Store``; also raises FencedError if the lease has ended by this host's own clock."""
        with self._fenced():
            self._store.write(changes, entries)
        self.lost_total, self.commit_s = self._store.lost_total, self._store.commit_s

    def cut_log(self, until: float, max_bytes: int) -> int:
        with self._fenced():
            return self._store.cut_log(until, max_bytes)

    @contextlib.contextmanager
    def _fenced(self) -> Iterator[None]:
        if not self._may_write():
            raise FencedError("this scheduler no longer leads: nothing was written; send the request to the leader")
        try:
            yield
        except FencedError as error:
            self._lost(error)
            raise

    def close(self) -> None:
        self._store.close()


@dataclass(eq=False)
class Reign:
    """One term of this process. ``scheduler``, ``app`` and ``running`` are set once its state is loaded."""

    term: int
    stopping: asyncio.Event
    store: FencedStore | None = None
    scheduler: Scheduler | None = None
    app: App | None = None
    running: asyncio.Task[None] | None = None
    opening: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        return self.scheduler is not None and self.scheduler.ready.is_set()


class Leading:
    """Leads if no other scheduler does, as long as the lease is renewed. ``address``: where this scheduler takes
    requests. ``lease_s``: seconds. ``now``: a clock as in ``lead``. ``ready`` is set after the first call of the
    arbiter, even if it failed."""

    def __init__(
        self, arbiter: Arbiter, open_reign: Opener, address: str, lease_s: float, now: Callable[[], float] = read_boot_s
    ) -> None:
        self.address = address
        self.lead = Lead(lease_s)
        self.reign: Reign | None = None
        self.ready = asyncio.Event()
        self.reigns_total = 0
        self.lost_total = 0
        """Number of reigns that ended while the process went on."""
        self.errors_total = 0
        """Number of failed calls of the arbiter."""
        self._arbiter = arbiter
        self._open_reign = open_reign
        self._now = now
        self._woken = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "arbiter")
        self._asking: asyncio.Task[None] | None = None
        self._lost_because = ""
        self._rounds = 0

    # --- queries

    def find_reign(self) -> Reign | None:
        """Return the reign in which a request may be answered now; None if this is a standby."""
        reign = self.reign
        return reign if reign is not None and reign.is_ready and self.may_answer(reign) else None

    def may_answer(self, reign: Reign) -> bool:
        """Whether an answer of this reign may be sent now, by this host's clock."""
        return self.lead.may_answer(reign.term, self._now())

    def view(self) -> LeadView:
        lead = self.lead
        if self.find_reign() is not None:
            return LeadView("leader", lead.term, self.address, lead.error)
        return LeadView("standby", lead.term, lead.find_leader(self._now()), lead.error)

    def left_s(self) -> float:
        """Return for how many seconds this process may answer without another renewal; 0 if this is a standby."""
        return max(self.lead.until_s - self._now(), 0.0) if self.lead.is_own else 0.0

    def pulse(self) -> object:
        """Return a value that changes with each success: of a leader's update, or of a standby's query."""
        scheduler = None if self.reign is None else self.reign.scheduler
        return self._rounds if scheduler is None else (self.lead.term, scheduler.timings.good_updates)

    # --- life

    async def run(self, stopping: asyncio.Event) -> None:
        """Lead when no other scheduler does, until ``stopping`` is set; then give up the lead and close the arbiter."""
        waking = asyncio.ensure_future(self._wake_at(stopping))
        try:
            while not stopping.is_set():
                self._woken.clear()
                await self._do_next()
        finally:
            waking.cancel()
            if self._asking is not None:
                await asyncio.wait({self._asking})
            await self._end_reign()
            with contextlib.suppress(StoreError):
                await self._call(self._arbiter.close)
            self._thread.shutdown(wait=False)

    async def _wake_at(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._woken.set()

    def _wake(self, _: object) -> None:
        self._woken.set()

    async def _do_next(self) -> None:
        reign, now_s = self.reign, self._now()
        step = self.lead.find_step(now_s)
        if step is LeadStep.END:
            self._lose(self.lead.error or "the lease was not renewed in time")
        if reign is not None:
            for task in (reign.opening, reign.running):
                if task is not None and task.done():
                    task.result()  # raises unexpected errors: this process ends, and another scheduler leads
            if not self.lead.is_own:
                log.warning("lost_lead", term=reign.term, reason=self._lost_because)
                self.lost_total += 1
                await self._end_reign()
                return
        if self._asking is not None and self._asking.done():
            asked, self._asking = self._asking, None
            asked.result()  # also raises unexpected errors
        if step in (LeadStep.TAKE, LeadStep.RENEW) and self._asking is None:
            self._asking = asyncio.ensure_future(self._take() if step is LeadStep.TAKE else self._renew())
            self._asking.add_done_callback(self._wake)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), self.lead.wait_s(now_s, self._asking is not None))

    async def _take(self) -> None:
        before, sent_s = self.lead, self._now()
        try:
            lease = await self._call(self._arbiter.take, self.address, before.lease_s)
            if lease is None:
                self.lead = self.lead.seen(await self._call(self._arbiter.look), self._now())
            else:
                self.lead = self.lead.taken(lease, sent_s, self._now())
                self._begin_reign(lease.term)
        except StoreError as error:
            self._note_failure(error)
        self._rounds += 1
        self.ready.set()
        now = self.lead
        if not now.is_own and not now.error and (now.term, now.leader) != (before.term, before.leader):
            log.info("standby", leader=now.leader or None, term=now.term)

    async def _renew(self) -> None:
        term, sent_s = self.lead.term, self._now()
        try:
            is_renewed = await self._call(self._arbiter.renew, term, self.lead.lease_s)
        except StoreError as error:
            self._note_failure(error)
            return
        self._rounds += 1
        if not self.lead.is_own:
            return  # the reign has ended during the call; its end gives up the renewed lease as well
        if is_renewed:
            self.lead = self.lead.renewed(sent_s, self._now())
        else:
            self._lose("another scheduler took the lead")

    def _note_failure(self, error: StoreError) -> None:
        self.errors_total += 1
        if not self.lead.error:
            log.warning("arbiter_failed", error=str(error), leads=self.lead.is_own, term=self.lead.term or None)
        self.lead = self.lead.failed(str(error), self._now())

    def _lose(self, reason: str, rest_s: float = 0.0) -> None:
        """Stop leading from this moment on; ``run`` then ends the reign."""
        self._lost_because = reason
        self.lead = self.lead.ended(self._now(), rest_s)
        self._woken.set()

    def _begin_reign(self, term: int) -> None:
        reign = self.reign = Reign(term, asyncio.Event())
        reign.opening = asyncio.ensure_future(self._open(reign))
        reign.opening.add_done_callback(self._wake)
        self.reigns_total += 1

    async def _open(self, reign: Reign) -> None:
        """Load the state and start updates; meanwhile ``run`` renews the lease."""
        loop = asyncio.get_running_loop()

        def lose(error: FencedError) -> None:
            loop.call_soon_threadsafe(self._lose_reign, reign, str(error))

        log.info("takes_over", term=reign.term)
        try:
            store = await asyncio.to_thread(self._arbiter.open_store, reign.term)
            reign.store = fenced = FencedStore(store, lambda: self.may_answer(reign), lose)
            reign.scheduler, reign.app = scheduler, _ = await asyncio.to_thread(self._open_reign, fenced)
        except FencedError as error:
            self._lose_reign(reign, str(error))
            return
        except StoreError as error:
            log.error("cannot_lead", term=reign.term, error=str(error))
            # A different scheduler, perhaps of a different version, may be able to open the store.
            self._lose_reign(reign, str(error), self.lead.lease_s)
            return
        if reign.stopping.is_set() or not self.may_answer(reign):
            return
        reign.running = asyncio.ensure_future(scheduler.run(reign.stopping))
        reign.running.add_done_callback(self._wake)
        ready = asyncio.ensure_future(scheduler.ready.wait())
        await asyncio.wait({ready, reign.running}, return_when="FIRST_COMPLETED")
        ready.cancel()
        if reign.is_ready:
            log.info("leads", term=reign.term, address=self.address or None)

    def _lose_reign(self, reign: Reign, reason: str, rest_s: float = 0.0) -> None:
        if self.reign is reign and self.lead.is_own:
            self._lose(reason, rest_s)

    async def _end_reign(self) -> None:
        """Give up the lead and drop the state; the store is closed as soon as no write is in progress."""
        reign, self.reign = self.reign, None
        if reign is None:
            return
        reign.stopping.set()
        tasks = {task for task in (reign.opening, reign.running) if task is not None}
        if self.lead.is_own:
            # The process is ending: the results of its last update are still written in this term.
            await asyncio.wait(tasks)
            self.lead = self.lead.ended(self._now())
        with contextlib.suppress(StoreError):
            await self._call(self._arbiter.give_up, reign.term)
        await asyncio.wait(tasks)
        if reign.scheduler is not None:
            await reign.scheduler.close()
        elif reign.store is not None:
            await asyncio.to_thread(reign.store.close)
        reign.scheduler = reign.app = reign.store = None
        # The state takes much memory and is full of reference cycles.
        gc.collect()

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
