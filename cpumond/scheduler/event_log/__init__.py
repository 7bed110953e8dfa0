"""The scheduler's side of the store's log: entries that wait to be written, refusals, and changes to undo.

The events of a change are stored in the write of that change. Refusals and pins are written at once: users find them in
the audit log as soon as they have the response. All other events wait for the next period (``take``)."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import structlog

from cpumond.core.decode import ContentError, decode_json
from cpumond.scheduler.event_log.happenings import make_noticed_events
from cpumond.scheduler.events import AUDIT, AUDITED, Event, IndexedEvent, Subjects
from cpumond.scheduler.model import ACCESS_DENIED, AUTHENTICATION, RESOLVE, CommandError, encode_record
from cpumond.scheduler.settings.changes import ConfigChange
from cpumond.scheduler.settings.undo import ChangedSinceError, Undo, UndoChange
from cpumond.scheduler.state import State
from cpumond.scheduler.store import Entry, Store, StoreError

log = structlog.get_logger("cpumond.scheduler")

MAX_WAITING: Final = 10_000
"""Maximum number of entries kept while the store refuses writes; the oldest are dropped. Also the maximum number of
observations in one period."""
MAX_SEARCHED: Final = 1000
"""Maximum number of entries that are searched for a later change of the same object."""
PAGE: Final = 100

BURST: Final = 100.0
PER_S: Final = 1.0
"""Refusals of one user that get entries of their own: first BURST, then PER_S per second."""
REPEAT_S: Final = 60.0
"""Seconds in which a repeated refusal is only counted."""
MAX_USERS: Final = 10_000

MAX_LOGGED: Final = 20
"""Maximum number of changed attributes in a line of the program's log."""


@dataclass(slots=True)
class _Refused:
    left: float = BURST
    at: float = 0.0
    last: Event | None = None
    """The last refusal that was written, without its time."""
    last_at: float = 0.0
    waiting: IndexedEvent | None = None
    """The last refusal that was only counted."""
    count: int = 0


class EventLog:
    """The event log of one ``Scheduler``. ``write``: stores entries in a write of their own; may raise StoreError."""

    def __init__(
        self, state: State, store: Store, now: Callable[[], float], write: Callable[[Sequence[Entry]], Awaitable[None]]
    ) -> None:
        self._state = state
        self._store = store
        self._now = now
        self._write = write
        self._waiting: deque[Entry] = deque(maxlen=MAX_WAITING)
        self._refused: dict[str, _Refused] = {}
        self.totals: Counter[str] = Counter()
        """Kind -> number of events since the scheduler started."""
        state.happened = deque(maxlen=MAX_WAITING)

    # --- writing

    def note(self, event: Event) -> None:
        self._waiting.append(self.encode(Subjects(event).index()))

    def encode(self, told: IndexedEvent) -> Entry:
        """Encode the entry of an event. Raises CommandError for text that cannot be stored."""
        self.totals[told.event.kind] += 1
        return Entry(told.event.at, told.subjects, encode_record(told.event))

    def take(self) -> list[Entry]:
        """Return all waiting entries, oldest first. The caller writes them, or calls ``give_back``."""
        entries = [*self._waiting, *map(self.encode, self._take_counted())]
        self._waiting.clear()
        if self._state.happened:
            happened = list(self._state.happened)
            self._state.happened.clear()
            entries += map(self.encode, make_noticed_events(self._state.trees, happened))
        return entries

    def give_back(self, entries: Iterable[Entry]) -> None:
        """Take back entries that could not be written; ``take`` returns them again in the next period."""
        self._waiting.extendleft(reversed([*entries]))

    async def record(self, told: IndexedEvent) -> None:
        """Write an event at once. If the store refuses the write, the event is written later."""
        log_event(told.event)
        entries = [self.encode(told)]
        try:
            await self._write(entries)
        except StoreError:  # logged
            self.give_back(entries)

    async def record_refusal(self, told: IndexedEvent) -> None:
        """Write a refusal at once. If there are too many, or it repeats the last one, count it and write it later."""
        event, now = told.event, self._now()
        same = msgspec.structs.replace(event, at=0.0)
        user = event.user or (f"node {event.node}" if event.node else "")
        user = user if user in self._refused or len(self._refused) < MAX_USERS else ""
        known = self._refused.setdefault(user, _Refused())
        known.left, known.at = min(known.left + (now - known.at) * PER_S, BURST), now
        if known.left < 1.0 or (same == known.last and now - known.last_at < REPEAT_S):
            known.waiting, known.count = told, known.count + 1
            return
        known.left, known.last, known.last_at = known.left - 1.0, same, now
        await self.record(told)

    def _take_counted(self) -> list[IndexedEvent]:
        """Return counted refusals that are due to be written, and forget users without refusals."""
        now, found = self._now(), []
        for user, known in list(self._refused.items()):
            if now - known.last_at < REPEAT_S:
                continue
            if known.waiting is None:
                del self._refused[user]
                continue
            event = msgspec.structs.replace(known.waiting.event, count=known.count)
            found.append(IndexedEvent(event, known.waiting.subjects))
            known.last_at, known.waiting, known.count = now, None, 0
        return found

    # --- reading

    async def read(
        self, subjects: Sequence[str], *, before: int | None = None, since: float = 0.0, limit: int = PAGE
    ) -> list[tuple[int, Event]]:
        """Return the newest events that have all of ``subjects``, each with its number. Raises StoreError."""
        found = await asyncio.to_thread(self._store.read_log, subjects, before=before, since=since, limit=limit)
        return await asyncio.to_thread(_decode_all, found)

    async def resolve(self, command: UndoChange) -> Undo:
        """Return the changes of an event that an undo shall reverse. Raises CommandError if there are none."""
        found = await self.read((), before=command.number + 1, limit=1)
        number, event = found[0] if found else (0, None)
        if event is None or number != command.number or event.kind not in AUDITED:
            raise CommandError(f"there is no change {command.number}; `cpumond events` lists them", RESOLVE)
        if not event.changes:
            # The rights of the user have not been checked yet; therefore the error does not reveal the event.
            raise CommandError(f"change {number} changed no tree or pool; only such changes can be undone")
        changes = (ConfigChange(each.tree, each.pool, each.attribute, each.old, each.new) for each in event.changes)
        return Undo(number, tuple(changes))

    async def explain(self, undo: Undo, refusal: ChangedSinceError) -> CommandError:
        """Return the error that refuses an undo, with the later change that prevents it. Raises StoreError."""
        place = f"pool:{refusal.tree}/{refusal.pool}" if refusal.pool else f"tree:{refusal.tree}"
        subjects = ["kind:command", *([place] if refusal.tree else [])]
        before, searched, to_blame = None, 0, ""
        while not to_blame and searched < MAX_SEARCHED:
            page = await self.read(subjects, before=before)
            later = [(number, event) for number, event in page if number > undo.number]
            for number, event in later:
                of_tree = [each for each in event.changes if each.tree == refusal.tree]
                renamed = {name for each in of_tree if each.attribute == "name" for name in (each.old, each.new)}
                if refusal.pool in {*renamed, *(each.pool for each in of_tree)}:
                    to_blame = f"; since then {event.text} (change {number})"
                    break
            if len(later) < PAGE:
                break
            before, searched = later[-1][0], searched + PAGE
        return CommandError(f"change {undo.number} cannot be undone: {refusal}{to_blame}")


def is_denied(error: BaseException) -> bool:
    return getattr(error, "code", None) in (ACCESS_DENIED, AUTHENTICATION)


def _decode_all(found: Iterable[tuple[int, Entry]]) -> list[tuple[int, Event]]:
    """Decode entries. Entries that a newer version wrote in a different format are skipped."""
    events = []
    for number, entry in found:
        try:
            events.append((number, decode_json(entry.value, Event)))
        except ContentError as error:
            log.warning("event_unreadable", number=number, error=str(error))
    return events


def log_event(event: Event, **more: Any) -> None:
    """Write an audited event to the program's log, for journald. ``more``: further fields."""
    told = msgspec.to_builtins(event, str_keys=True)
    changes = told.pop("changes", [])
    request = told.pop("request", {})
    fields = {
        **{f"about_{key}" if key in ("id", "event", "user", "text") else key: value for key, value in request.items()},
        **{name: value for name, value in told.items() if name not in ("at", "kind")},
        **({"changes": changes[:MAX_LOGGED]} if changes else {}),
        **more,
    }
    log.info(AUDIT if event.kind not in AUDITED else event.kind, **fields)
