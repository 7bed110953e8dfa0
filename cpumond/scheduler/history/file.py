"""The history's SQLite file: opened, restored if it is removed, kept within its size, set aside if it is damaged.

All failures are counted, the first in a row is logged; ``open``, ``guard`` and ``read`` never raise them. A file that
cannot be read is renamed to ``PATH.aside``, which replaces an earlier one of that name, and a new file is begun. If the
file is removed while in use, it is written again."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

import structlog

from cpumond.core.errors import describe
from cpumond.scheduler.history.chunks import DamageError
from cpumond.scheduler.history.earlier import EARLIER_SCHEMA, sum_up_earlier
from cpumond.scheduler.history.model import Amounts
from cpumond.scheduler.store.sqlite import (
    COMPANIONS,
    DAMAGE,
    connect,
    identify_files,
    put_back,
    read_number,
    transaction,
    unlink_all,
)

T = TypeVar("T")

log = structlog.get_logger("cpumond.scheduler")

APPLICATION_ID: Final = 0x43504D48
"""Bytes 68 to 71 of the file: "CPMH"."""

SCHEMA: Final = 3

PAGE_BYTES: Final = 16_384
"""A row of points takes at most a quarter of a page: SQLite gives a larger row a page of its own."""

WAL_KEPT_BYTES: Final = 4 * 2**20

_TABLES: Final = (
    """CREATE TABLE chunks (
        id INTEGER PRIMARY KEY, first REAL NOT NULL, last REAL NOT NULL, left_out INTEGER NOT NULL, times BLOB NOT NULL
    )""",
    """CREATE TABLE points (
        chunk INTEGER NOT NULL, kind INTEGER NOT NULL, name TEXT NOT NULL, tree TEXT NOT NULL,
        used REAL NOT NULL, reclaimed REAL NOT NULL, ordered REAL NOT NULL, throttled REAL NOT NULL, late REAL NOT NULL,
        limits REAL NOT NULL, peak REAL NOT NULL, count INTEGER NOT NULL, data BLOB NOT NULL,
        PRIMARY KEY (chunk, kind, name, tree)
    ) WITHOUT ROWID""",
    "CREATE TABLE journal (at REAL PRIMARY KEY, data BLOB NOT NULL)",
    f"""CREATE TABLE days (
        day INTEGER NOT NULL, kind INTEGER NOT NULL, tree TEXT NOT NULL, name TEXT NOT NULL,
        {", ".join(f'"{name}" REAL NOT NULL' for name in Amounts._fields)},
        PRIMARY KEY (day, kind, tree, name)
    ) WITHOUT ROWID""",
)


class Owner(Protocol):
    """The object to which the file's rows belong."""

    def load(self, db: sqlite3.Connection) -> None:
        """Load the file into memory; data that is only in memory stays. Called each time a file has been opened."""

    def drop_damaged(self, error: Exception) -> bool:
        """Delete the part of the file that caused ``error``; return False if that part is not known."""


class HistoryFile:
    """The file and the handling of its errors. ``path`` None: there is no file."""

    def __init__(self, path: str | None, max_size: int, owner: Owner) -> None:
        self.path, self.max_size = path, max_size
        self.errors = 0
        self.is_failing = False
        self._owner = owner
        self._db: sqlite3.Connection | None = None
        self._files: list[tuple[int, int] | None] = []

    @property
    def is_open(self) -> bool:
        return self._db is not None

    @property
    def db(self) -> sqlite3.Connection:
        """The connection. Raises sqlite3.OperationalError if the file is not open."""
        if self._db is None:
            raise sqlite3.OperationalError("the file is not open")
        return self._db

    @property
    def bytes(self) -> int:
        return self.read_number("page_count") * self.read_number("page_size")

    def read_number(self, pragma: str) -> int:
        return read_number(self.db, pragma)

    def open(self) -> None:
        """Open the file and let its owner load it. A file that is not a history is set aside."""
        if self.path is None:
            return
        try:
            try:
                self._load(self.path)
            except Exception as error:
                if isinstance(error, sqlite3.Error | OSError | MemoryError) and not _is_damage(error):
                    raise
                self._begin_again(error)
        except Exception as error:
            self._note_failure("open", error)
            self.close()

    def _load(self, path: str) -> None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._db = db = connect(path)
        version = self.read_number("user_version")
        is_ours = self.read_number("application_id") == APPLICATION_ID
        if version == 0 and self.read_number("page_count") <= 1:
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL")
            with transaction(db):
                self._create_tables()
        elif is_ours and version == EARLIER_SCHEMA:
            self._take_over_earlier()
        elif not is_ours or version != SCHEMA:
            raise DamageError(f"it is not a history of schema {SCHEMA}")
        db.execute("PRAGMA journal_mode = WAL")
        # A crash of the host may lose the newest points, which does no harm: the file stays consistent.
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA cell_size_check = ON")
        db.execute(f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}")
        db.execute(f"PRAGMA wal_autocheckpoint = {WAL_KEPT_BYTES // PAGE_BYTES}")
        self._owner.load(db)
        self._files = identify_files(path)

    def _create_tables(self) -> None:
        for statement in _TABLES:
            self.db.execute(statement)
        self.db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        self.db.execute(f"PRAGMA user_version = {SCHEMA}")

    def _take_over_earlier(self) -> None:
        with transaction(self.db):
            days = sum_up_earlier(self.db, self._create_tables)
        self.give_back()
        effect = "summed up by day; its points are dropped"
        log.info("history_of_earlier_version", path=self.path, days=days, effect=effect)

    def stay_in_place(self) -> None:
        """Write a removed file again and open the new one in its place. Raises OSError or sqlite3.Error."""
        assert self.path is not None
        if identify_files(self.path) == self._files:
            return
        log.error("history_lost", path=self.path, advice="find out what removed it; the open file is rewritten")
        if not os.path.lexists(self.path):
            put_back(self.db, self.path)
        self.close()
        self.open()

    def _begin_again(self, error: Exception) -> None:
        """Set the file aside and begin an empty one."""
        assert self.path is not None
        self.close()
        # Only one file is kept aside: a disk that damages one file after the other would be filled with them.
        aside = f"{self.path}.aside"
        unlink_all(aside)
        for suffix in ("", *COMPANIONS):
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.path + suffix, aside + suffix)
        log.warning("history_set_aside", path=self.path, aside=aside, error=_words(error))
        self._load(self.path)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None

    def guard(self, doing: str, work: Callable[[], object]) -> bool:
        """Run ``work`` on the file. A failure is counted and logged, and damage repaired. Return False if it failed."""
        try:
            work()
        except Exception as error:
            self._note_failure(doing, error)
            if _is_damage(error):
                self._mend(error)
            return False
        return True

    def read(self, work: Callable[[], T]) -> T | None:
        """Return the result of ``work``, which is repeated after a damaged part was dropped; None: unreadable now."""
        while self._db is not None:
            try:
                return work()
            except Exception as error:
                self._note_failure("read", error)
                if not _is_damage(error) or not self._mend(error):
                    break
        return None

    def _mend(self, error: Exception) -> bool:
        """Drop the damaged part, or else set the whole file aside. Return whether there is a file to read now."""
        with contextlib.suppress(Exception):
            if self._owner.drop_damaged(error):
                return True
        try:
            self._begin_again(error)
        except Exception as next_error:
            self._note_failure("begin anew", next_error)
            self.close()
        return False

    def _note_failure(self, doing: str, error: Exception) -> None:
        self.errors += 1
        if not self.is_failing:
            self.is_failing = True
            log.warning(
                "history_failed", path=self.path, doing=doing, error=_words(error), effect="the newest points are kept "
                "in memory only; the scheduler continues",
            )  # fmt: skip

    def note_success(self) -> None:
        """After failures, log that everything has been written."""
        if self.is_failing:
            self.is_failing = False
            log.info("history_is_written_again", path=self.path)

    def make_room(self, wanted_bytes: int, drop_oldest: Callable[[], bool]) -> None:
        """Call ``drop_oldest`` until ``wanted_bytes`` more fit into ``max_size`` or nothing is left to drop."""
        allowed = self.max_size // PAGE_BYTES
        wanted = wanted_bytes * 5 // (4 * PAGE_BYTES) + 4
        while self.read_number("page_count") - self.read_number("freelist_count") + wanted > allowed:
            if not drop_oldest():
                break
        # SQLite itself enforces the limit: a write that would exceed it fails.
        self.db.execute(f"PRAGMA max_page_count = {max(allowed, 1)}")

    def give_back(self) -> None:
        """Return free pages of the file to the file system."""
        self.db.executescript("PRAGMA incremental_vacuum")  # execute would free only one page
        self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _is_damage(error: Exception) -> bool:
    if isinstance(error, DamageError):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None and code & 0xFF in DAMAGE:
        return True
    # The code for a missing table is the unspecific SQLITE_ERROR; there is none for a text that is not UTF-8.
    return isinstance(error, sqlite3.OperationalError) and str(error).startswith(("no such ", "Could not decode "))


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        return describe(error)
    return str(error) if isinstance(error, sqlite3.Error | DamageError) else f"{type(error).__name__}: {error}"
