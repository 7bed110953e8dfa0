"""An arbiter in memory for tests of one process: a lease on a clock that they set, and a store that checks the term."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from memory_log import MemoryLog

from cpumond.scheduler.store import Change, Entry, FencedError, Lease, StoreError


class Engine:
    """What the schedulers share. ``now_s`` is its clock; ``is_away``: nobody gets an answer."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.is_away = False
        self.term = 0
        self.leader = ""
        self.until_s = 0.0
        self.session: object = None
        self.records: dict[tuple[str, str], bytes] = {}
        self.log = MemoryLog()
        self.gate = threading.Event()
        """Calls wait for it."""
        self.gate.set()

    def arbiter(self) -> PlayedArbiter:
        return PlayedArbiter(self)

    def ask(self) -> None:
        assert self.gate.wait(30)
        if self.is_away:
            raise StoreError("the engine is away")


class PlayedArbiter:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_closed = False

    def look(self) -> Lease | None:
        self.engine.ask()
        engine = self.engine
        return Lease(engine.term, engine.leader, engine.until_s - engine.now_s) if engine.term else None

    def take(self, leader: str, lease_s: float) -> Lease | None:
        engine = self.engine
        engine.ask()
        if engine.session is not None and engine.now_s < engine.until_s:
            return None
        engine.term += 1
        engine.leader, engine.until_s, engine.session = leader, engine.now_s + lease_s, self
        return Lease(engine.term, leader, lease_s)

    def renew(self, term: int, lease_s: float) -> bool:
        self.engine.ask()
        if self.engine.term != term:
            return False
        self.engine.until_s = self.engine.now_s + lease_s
        return True

    def give_up(self, term: int) -> None:
        self.engine.ask()
        if self.engine.term == term:
            self.engine.session = None

    def open_store(self, term: int) -> PlayedStore:
        return PlayedStore(self.engine, term)

    def close(self) -> None:
        self.is_closed = True
        if self.engine.session is self:
            self.engine.session = None


class PlayedStore:
    lost_total = 0
    commit_s = 0.0

    def __init__(self, engine: Engine, term: int) -> None:
        self.engine = engine
        self.term = term
        self.is_closed = False

    def load(self) -> Iterator[tuple[str, str, bytes]]:
        return iter([(*place, self.engine.records[place]) for place in sorted(self.engine.records)])

    def write(self, changes: Sequence[Change], entries: Sequence[Entry] = ()) -> None:
        if self.is_closed:
            raise StoreError("closed")
        self.engine.ask()
        if self.engine.term != self.term:
            raise FencedError(f"term {self.engine.term} leads")
        self.engine.log.add(self.engine.log.make(entries))
        for kind, key, value in changes:
            if value is None:
                self.engine.records.pop((kind, key), None)
            else:
                self.engine.records[kind, key] = value

    def read_log(self, subjects: Sequence[str] = (), **bounds: Any) -> list[tuple[int, Entry]]:
        return self.engine.log.read(subjects, **bounds)

    def cut_log(self, until: float, max_bytes: int) -> int:
        return self.engine.log.cut(until, max_bytes)

    def close(self) -> None:
        self.is_closed = True
