"""A database engine in memory, with sessions, a lease and a clock of its own: what PostgreSQL is to the schedulers. It
is called in virtual threads: a call is carried out at one moment, and says by ``charge`` how long it took."""

from collections.abc import Callable, Iterator, Sequence

from memory_log import MemoryLog

from cpumond.scheduler.store import Change, Entry, FencedError, Lease, StoreError
from cpumond.scheduler.store.entries import LogEnd, Row, make_rows

TIMEOUT_S = 3.0
"""How long a client waits for an engine that cannot be reached."""
OUTCOME_S = 5.0
"""How long a store tries to find out what became of a write."""


class Session:
    """A connection as the engine sees it; ``owner``: the process that made it."""

    __slots__ = ("is_alive", "number", "owner")

    def __init__(self, number: int, owner: object) -> None:
        self.number = number
        self.owner = owner
        self.is_alive = True


class Database:
    """The engine. ``now``: its wall clock, ``charge`` takes the seconds a call lasts."""

    def __init__(self, now: Callable[[], float] = lambda: 0, charge: Callable[[float], None] = lambda _: None) -> None:
        self.records: dict[tuple[str, str], bytes] = {}
        self.log = MemoryLog()
        self.term = 0
        self.leader = ""
        self.expires_at = 0.0
        self.lock: Session | None = None
        self.sessions: dict[int, Session] = {}
        self.now = now
        self.charge = charge
        self.is_down = self.is_full = False
        self.can_reach: Callable[[object], bool] = lambda _: True
        self.latency: Callable[[], float] = lambda: 0.0
        self.breaks_commit: Callable[[], str] = lambda: ""
        """What happens to a commit: nothing (""), the connection is "lost" and made anew, or it cannot be made anew and
        the commit took effect never ("gone before"), at once ("gone after") or, if nobody ends its session, later."""
        self.later: Callable[[Session | None, Sequence[Change], Sequence[Row], int], None] = lambda *_: None
        self.on_lease: Callable[[int, float], None] = lambda *_: None
        """Told of each lease: its term and its seconds."""
        self.on_write: Callable[[Sequence[Change], Sequence[Row], int], None] = lambda *_: None
        self.checks_fence = True
        self._numbers = 0

    def connect(self, owner: object) -> Session:
        self.reach(owner)
        self._numbers += 1
        session = self.sessions[self._numbers] = Session(self._numbers, owner)
        return session

    def reach(self, owner: object) -> None:
        """A message to the engine and back. Raises StoreError."""
        if self.is_down or not self.can_reach(owner):
            self.charge(TIMEOUT_S)
            raise StoreError("the database does not answer; look whether it runs")
        self.charge(self.latency())

    def end(self, session: Session | None) -> None:
        """The session is over, and the lock it held is free."""
        if session is None:
            return
        session.is_alive = False
        self.sessions.pop(session.number, None)
        if self.lock is session:
            self.lock = None

    def end_all(self, spare: Session | None = None) -> None:
        for session in [each for each in self.sessions.values() if each is not spare]:
            self.end(session)

    def end_of(self, owner: object) -> None:
        """A process was killed: its connections are closed."""
        for session in [each for each in self.sessions.values() if each.owner is owner]:
            self.end(session)

    def commit(self, changes: Sequence[Change], rows: Sequence[Row] = ()) -> None:
        self.log.add(rows)
        for kind, key, value in changes:
            if value is None:
                self.records.pop((kind, key), None)
            else:
                self.records[kind, key] = value


class SimStore:
    """The records for one term; a session of its own, made anew when it is lost."""

    def __init__(self, database: Database, term: int, owner: object = None) -> None:
        self.lost_total = 0
        self.commit_s = 0.0
        self.database = database
        self.term = term
        self._owner = owner
        self._session: Session | None = None
        self._over = ""
        self._end: LogEnd | None = None
        self._is_closed = False
        database.log.reopen()

    def _use(self) -> None:
        if self._is_closed:
            raise StoreError("the store is closed")
        if self._over:
            raise FencedError(self._over)
        if self._session is None or not self._session.is_alive:
            self._session = self.database.connect(self._owner)
        self.database.reach(self._owner)
        if self.database.checks_fence and self.database.term != self.term:
            raise FencedError(f"term {self.database.term} leads, not {self.term}; nothing was written")

    def load(self) -> Iterator[tuple[str, str, bytes]]:
        self._use()
        return iter([(*place, self.database.records[place]) for place in sorted(self.database.records)])

    def write(self, changes: Sequence[Change], entries: Sequence[Entry] = ()) -> None:
        self._use()
        database = self.database
        try:
            rows, end = make_rows(entries, self._find_end())
            for kind, key, _ in changes:
                f"{kind}{key}".encode()
        except UnicodeEncodeError:
            raise StoreError("a name holds a lone surrogate, which cannot be stored") from None
        if (changes or rows) and database.is_full:
            raise StoreError("the database's disk is full; free space")
        fate = database.breaks_commit() if changes or rows else ""
        if fate in ("gone before", "gone late"):
            if fate == "gone late":
                database.later(self._session, changes, rows, self.term)
            self._give_up()
        database.on_write(changes, rows, self.term)
        database.commit(changes, rows)
        if fate == "lost":
            # The connection was lost and made anew, the old session ended, the write repeated.
            database.commit(changes, rows)
            database.end(self._session)
            self._session = None
            database.charge(1.0)
        elif fate == "gone after":
            self._give_up()
        self._end = end

    def read_log(
        self, subjects: Sequence[str] = (), *, before: int | None = None, since: float = 0.0, limit: int = 50
    ) -> list[tuple[int, Entry]]:
        self._use()
        return self.database.log.read(subjects, before=before, since=since, limit=limit)

    def cut_log(self, until: float, max_bytes: int) -> int:
        self._use()
        return self.database.log.cut(until, max_bytes)

    def _find_end(self) -> LogEnd:
        """Nobody else adds to the log in this term."""
        return self._end or self.database.log.end

    def _give_up(self) -> None:
        """What became of the write cannot be found out: the reign is over."""
        self._session = None
        self._over = "it is unknown whether the last changes were written"
        self.database.charge(OUTCOME_S)
        raise FencedError(self._over)

    def close(self) -> None:
        self.database.end(self._session)
        self._session, self._is_closed = None, True


class SimArbiter:
    """One scheduler's arbiter; its session holds the lock while it leads."""

    def __init__(self, database: Database, owner: object = None) -> None:
        self.database = database
        self._owner = owner
        self._session: Session | None = None
        self._is_closed = False

    def _use(self) -> Session:
        if self._is_closed:
            raise StoreError("the arbiter is closed")
        if self._session is None or not self._session.is_alive:
            self._session = self.database.connect(self._owner)
        self.database.reach(self._owner)
        return self._session

    def look(self) -> Lease | None:
        self._use()
        database = self.database
        return Lease(database.term, database.leader, database.expires_at - database.now()) if database.term else None

    def take(self, leader: str, lease_s: float) -> Lease | None:
        session, database = self._use(), self.database
        if database.lock is not None and database.lock is not session and database.expires_at > database.now():
            return None
        database.end_all(spare=session)
        database.lock = session
        database.term += 1
        database.leader, database.expires_at = leader, database.now() + lease_s
        database.on_lease(database.term, lease_s)
        return Lease(database.term, leader, lease_s)

    def renew(self, term: int, lease_s: float) -> bool:
        session, database = self._use(), self.database
        if database.term != term or (database.lock is not None and database.lock is not session):
            return False
        database.lock = session
        database.expires_at = database.now() + lease_s
        database.on_lease(term, lease_s)
        return True

    def give_up(self, term: int) -> None:
        session, database = self._use(), self.database
        if database.term == term and database.lock in (None, session):
            database.lock, database.expires_at, database.leader = None, database.now(), ""

    def open_store(self, term: int) -> SimStore:
        if self._is_closed:
            raise StoreError("the arbiter is closed")
        store = SimStore(self.database, term, self._owner)
        store.write([])
        return store

    def close(self) -> None:
        self.database.end(self._session)
        self._session, self._is_closed = None, True
