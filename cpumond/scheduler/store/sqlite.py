"""The store in one SQLite file: write-ahead log, synced at each commit, one writer.

Files beside the database ``PATH``:
- ``PATH-wal`` and ``PATH-shm``: made by SQLite; part of the database while they exist;
- ``PATH.lock``: held by the process that has the database open; contains its pid;
- ``PATH.v<N>``: a copy from before a migration of schema N;
- ``PATH.aside-<n>``: a database that was moved there by ``set_aside``;
- ``PATH-wal.damaged-<n>``: the copy of a log that SQLite did not read to its end.

Files that turn out to be damaged are not changed."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final
from urllib.parse import quote

import structlog

from cpumond.core.errors import describe
from cpumond.scheduler.model import UNSTORED_STARTS
from cpumond.scheduler.store import Change, Entry, StoreError
from cpumond.scheduler.store.entries import LogEnd, make_rows
from cpumond.scheduler.store.sqlite_log import SqliteLogReader, add_rows, create_log, cut_rows, find_end
from cpumond.scheduler.store.sqlite_wal import report_dropped_writes

log = structlog.get_logger("cpumond.scheduler")

APPLICATION_ID: Final = 0x43504D44
"""Bytes 68 to 71 of the file: "CPMD"."""

MAGIC: Final = b"SQLite format 3\0"
HEADER_BYTES: Final = 100
BUSY_TIMEOUT_S: Final = 1.0
"""How long a write waits for another program (a backup, an administrator's shell) that holds the database."""

WAL_KEPT_BYTES: Final = 64 * 2**20
"""The size to which the log file is truncated after a checkpoint."""

LOG_SCHEMA: Final = 3
TABLES: Final = {
    "records": "kind key value crc",
    "log": "number position at subjects value crc",
    "log_subjects": "subject number",
    "log_cut": "number",
}
"""The columns of each table. All tables except the first were added in LOG_SCHEMA."""

COMPANIONS: Final = ("-wal", "-shm", "-journal")
DAMAGE: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT})

Migration = Callable[[sqlite3.Connection], None]
"""Changes a database from schema N to N + 1, inside its caller's transaction."""


def _create_records(connection: sqlite3.Connection) -> None:
    """Migrate from an empty file to schema 1. ``crc``: CRC-32 of kind, key and value, since SQLite has no checksums."""
    connection.execute(
        "CREATE TABLE records (kind TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, crc INTEGER NOT NULL, "
        "PRIMARY KEY (kind, key)) WITHOUT ROWID"
    )


def _note_unstored_starts(connection: sqlite3.Connection) -> None:
    """Migrate to schema 2, which stores starts of jobs: mark that the starts before this are not stored."""
    if connection.execute("SELECT 1 FROM records LIMIT 1").fetchone() is not None:
        row = (*UNSTORED_STARTS, b"{}", _checksum(*UNSTORED_STARTS, b"{}"))
        connection.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", row)


MIGRATIONS: Final[tuple[Migration, ...]] = (_create_records, _note_unstored_starts, create_log)
"""Number N changes schema N to N + 1; schema 0 is an empty file. The newest schema is the number of migrations."""


def open_sqlite_store(path: str, migrations: Sequence[Migration] = MIGRATIONS) -> SqliteStore:
    """Open the database at ``path``. A missing one is created with its directory, accessible to this user only. An
    older schema is copied, then migrated. Raises StoreError if it is in use by another process, damaged, of a newer
    version or another program, or if permissions or space are missing."""
    path = os.path.realpath(path)
    with contextlib.ExitStack() as undo:
        lock = _lock(path)
        undo.callback(os.close, lock)
        if os.path.lexists(path):
            _inspect(path, len(migrations))
        else:
            _create(path, migrations)
        with _explained(path, "open"):
            connection = connect(path)
            undo.callback(connection.close)
            _prepare(connection)
            _migrate(connection, path, migrations)
            _check_tables(connection, path)
        undo.pop_all()
    return SqliteStore(path, connection, lock)


def set_aside(path: str) -> str | None:
    """Rename a database, whatever its content, to the first free ``PATH.aside-<n>``; return None if there is no
    database. Its write-ahead log is renamed as well, so that the database can still be opened. Raises StoreError if it
    is in use or permissions are missing."""
    path = os.path.realpath(path)
    if not any(os.path.lexists(path + suffix) for suffix in ("", *COMPANIONS)):
        return None
    lock = _lock(path)
    try:
        aside = _pick_aside(path)
        # The database is renamed first: a crash after that leaves a log without a database, which is refused. The other
        # order would leave a database without its log, which looks sound but lacks the newest records.
        for suffix in ("", *COMPANIONS):
            if os.path.lexists(path + suffix):
                os.rename(path + suffix, aside + suffix)
        _sync_directory(path)
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be set aside: {describe(error)}; fix the permissions of its directory"
        ) from error
    finally:
        os.close(lock)
    return aside


class SqliteStore:
    """The ``Store`` in a SQLite file. Made by ``open_sqlite_store``."""

    def __init__(self, path: str, connection: sqlite3.Connection, lock: int) -> None:
        self.path = path
        self._connection = connection
        self._lock: int | None = lock
        self.lost_total = 0
        self.commit_s = 0.0
        self._files = identify_files(self.path)
        self._end: LogEnd | None = None
        """The end of the log of entries; None until it is first needed."""
        self._reader: SqliteLogReader | None = None
        self._reading = threading.Lock()

    def load(self) -> Iterator[tuple[str, str, bytes]]:
        """Yield all records in order; each is compared with its checksum. Raises StoreError."""
        self._check_open()
        with _explained(self.path, "read"), contextlib.closing(self._connection.cursor()) as cursor:
            for kind, key, value, crc in cursor.execute("SELECT kind, key, value, crc FROM records ORDER BY kind, key"):
                sound = isinstance(kind, str) and isinstance(key, str) and isinstance(value, bytes)
                if not sound or crc != _checksum(kind, key, value):
                    raise _damaged(self.path, f"the record {kind!r} {key!r} does not match its checksum")
                yield kind, key, value

    def write(self, changes: Sequence[Change], entries: Sequence[Entry] = ()) -> None:
        """Make all changes and append all entries, or do nothing; they are on disk when this returns. Raises
        StoreError. If the files have been removed, they are first written again with all records."""
        self._check_open()
        self._stay_in_place()
        if not (changes or entries):
            return
        end = self._find_end() if entries else LogEnd()
        last = {(change.kind, change.key): change.value for change in changes}
        try:
            removed = [place for place, value in last.items() if value is None]
            put = [(*place, value, _checksum(*place, value)) for place, value in last.items() if value is not None]
            for kind, key in removed:
                _checksum(kind, key, b"")
            rows, end = make_rows(entries, end)
        except UnicodeEncodeError as error:
            raise StoreError(
                f"{self.path}: nothing was written: the name {error.object!r} holds a lone surrogate, "
                "which no file can store; choose another name"
            ) from None
        with _explained(self.path, "write"), transaction(self._connection):
            if removed:
                self._connection.executemany("DELETE FROM records WHERE kind = ? AND key = ?", removed)
            if put:
                self._connection.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", put)
            if rows:
                add_rows(self._connection, rows)
            begun = time.perf_counter()
        self.commit_s = time.perf_counter() - begun
        if rows:
            self._end = end
        # The file may have been removed during the write. If it cannot be restored now, the next write tries again.
        with contextlib.suppress(StoreError):
            self._stay_in_place()

    def _find_end(self) -> LogEnd:
        if self._end is None:
            with _explained(self.path, "read the log"):
                self._end = find_end(self._connection)
        return self._end

    def read_log(
        self, subjects: Sequence[str] = (), *, before: int | None = None, since: float = 0.0, limit: int = 50
    ) -> list[tuple[int, Entry]]:
        """Return the newest entries, through a separate connection. Raises StoreError."""
        with self._reading:
            self._check_open()
            with _explained(self.path, "read the log"):
                if self._reader is None:
                    self._reader = SqliteLogReader(connect(self.path, "ro"), self.path)
                return self._reader.read(subjects, before, since, limit)

    def cut_log(self, until: float, max_bytes: int) -> int:
        self._check_open()
        end = self._find_end()
        with _explained(self.path, "cut the log"), transaction(self._connection):
            return cut_rows(self._connection, end, until, max_bytes)

    def _stop_reading(self) -> None:
        with self._reading:
            if self._reader is not None:
                self._reader.connection.close()
                self._reader = None

    def _stay_in_place(self) -> None:
        """Restore database and lock if they are not where the next process looks for them. Open files continue to exist
        without their names, so they are copied back. Raises StoreError if that fails or another database is there."""
        assert self._lock is not None
        held = os.fstat(self._lock)
        if _identify(f"{self.path}.lock") != (held.st_dev, held.st_ino):
            lock = _lock(self.path)
            os.close(self._lock)
            self._lock = lock
            log.error("store_lost", path=f"{self.path}.lock", advice="find out what removed it; it was recreated")
        found = identify_files(self.path)
        if found == self._files:
            return
        if found[0] is not None and found[0] != self._files[0]:
            raise StoreError(
                f"{self.path}: was replaced by another file while in use, so nothing is written any more; move that "
                "file away, and this database is rewritten; restore a backup only while no scheduler runs"
            )
        with _explained(self.path, "rewrite"):
            self._write_anew()
        self.lost_total += 1
        log.error("store_lost", path=self.path, advice="find out what removed it; it was rewritten, nothing is lost")

    def _write_anew(self) -> None:
        self._stop_reading()
        put_back(self._connection, self.path)
        # Closing removes the log by its name, so close before a new log has this name.
        self._connection.close()
        self._connection = connect(self.path)
        _prepare(self._connection)
        _check_tables(self._connection, self.path)
        self._files = identify_files(self.path)

    def _check_open(self) -> None:
        if self._lock is None:
            raise StoreError(f"{self.path}: the store was closed; open it again")

    def close(self) -> None:
        """Copy the log into the database and release the lock; a second call does nothing."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        try:
            # The writing connection closes last, since that copies the log into the database.
            self._stop_reading()
            self._connection.close()
        finally:
            os.close(lock)


def _checksum(kind: str, key: str, value: bytes) -> int:
    """Return the CRC-32 of kind, key and value, and of the lengths of kind and key. Raises UnicodeEncodeError if kind
    or key cannot be encoded."""
    head = kind.encode(), key.encode()
    return zlib.crc32(value, zlib.crc32(b"%d %d %b%b" % (len(head[0]), len(head[1]), *head)))


def identify_files(path: str) -> list[tuple[int, int] | None]:
    """Return device and inode of a database and of its log; None for each file that is missing."""
    return [_identify(f"{path}{suffix}") for suffix in ("", "-wal")]


def put_back(connection: sqlite3.Connection, path: str) -> None:
    """Copy the database that ``connection`` has open to ``path``, from which it was removed. The connection continues
    to use the removed file. Raises OSError or sqlite3.Error."""
    with _make_anew(path) as target:
        connection.backup(target)
        target.execute("PRAGMA journal_mode = WAL")


@contextlib.contextmanager
def _make_anew(path: str) -> Iterator[sqlite3.Connection]:
    """Yield an empty database with a temporary name; at the end of the block it is synced and renamed to ``path``."""
    new = f"{path}.new"
    unlink_all(new)
    try:
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with contextlib.closing(connect(new)) as target:
            yield target
        _sync_file(new)
        # A log of the earlier database does not belong to the new one. A process that has it open can go on using it.
        for suffix in COMPANIONS:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + suffix)
        os.rename(new, path)
        _sync_directory(path)
    finally:
        unlink_all(new)


def _lock(path: str) -> int:
    """Return the descriptor that holds ``PATH.lock``; the kernel releases it in whichever way the process ends."""
    name, directory = f"{path}.lock", os.path.dirname(path)
    advice = "set `state_dir` to a directory that the scheduler can write to"
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{path}: cannot create the directory {directory}: {describe(error)}; {advice}") from error
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened: {name}: {describe(error)}; {advice}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).strip().decode("ascii", "replace")
        os.close(lock)
        by = f"process {holder}" if holder.isdigit() else "another process"
        raise StoreError(
            f"{path}: in use by {by}; only one scheduler at a time may use it: stop that one, "
            "or give this one another `state_dir`"
        ) from None
    except OSError as error:
        os.close(lock)
        raise StoreError(
            f"{path}: cannot be locked: {name}: {describe(error)}; free space or fix its permissions"
        ) from error
    return lock


def _inspect(path: str, newest: int) -> None:
    """Refuse a file that is not a sound database of ours; the connection used for this changes nothing in it."""
    try:
        # The file is opened for writing, too: SQLite itself would open a read-only file without an error.
        with open(path, "r+b") as file:
            head = file.read(HEADER_BYTES)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read and written: {describe(error)}; fix its permissions") from error
    if head[: len(MAGIC)] != MAGIC:
        raise _damaged(path, "it is empty" if not head else "it is not an SQLite database")
    if len(head) < HEADER_BYTES:
        raise _damaged(path, f"it is truncated to {len(head)} bytes")
    with _explained(path, "read"), contextlib.closing(connect(path, _pick_mode(path))) as connection:
        application = read_number(connection, "application_id")
        if application != APPLICATION_ID:
            raise StoreError(
                f"{path}: belongs to another program (application_id {application:#x}, not {APPLICATION_ID:#x}); "
                "it was not changed: set `state_dir` to a directory of the scheduler's own"
            )
        version = read_number(connection, "user_version")
        if version > newest:
            raise StoreError(
                f"{path}: was written by a newer cpumond (schema {version}, this one reads up to {newest}); it was "
                f"not changed: install that version again, or restore the copy {path}.v{newest} if there is one"
            )
        _check_tables(connection, path)
        # Entries of the log are checked when they are read: it would take seconds to check all of them here.
        for (verdict,) in connection.execute("PRAGMA quick_check(records)"):
            if verdict != "ok":
                raise _damaged(path, " ".join(str(verdict).split()))
        if version < 1:
            raise _damaged(path, f"it claims to have schema {version}")
        report_dropped_writes(path)


def _pick_mode(path: str) -> str:
    """Return the mode in which a database can be read without changes to it or to SQLite's files beside it."""
    if os.path.lexists(f"{path}-journal"):
        return "rw"  # the switch to the write-ahead log was interrupted; only a connection that can write rolls it back
    return "ro" if os.path.lexists(f"{path}-wal") else "ro&immutable=1"


def _create(path: str, migrations: Sequence[Migration]) -> None:
    """Create the database under a temporary name: at ``path`` it is always complete; an empty file is damaged."""
    if left := [suffix for suffix in COMPANIONS if os.path.lexists(path + suffix)]:
        raise _damaged(path, f"the database is gone, but its {path}{left[0]} is there")
    with _explained(path, "create"), _make_anew(path) as connection:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        _apply(connection, 0, migrations)
        connection.execute("PRAGMA journal_mode = WAL")
    with contextlib.suppress(OSError):  # a parent directory of another user existed before
        _sync_directory(os.path.dirname(path))


def _migrate(connection: sqlite3.Connection, path: str, migrations: Sequence[Migration]) -> None:
    version = read_number(connection, "user_version")
    if version == len(migrations):
        return
    with _make_anew(f"{path}.v{version}") as target:
        connection.backup(target)
    _apply(connection, version, migrations)


def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}")


def _check_tables(connection: sqlite3.Connection, path: str) -> None:
    is_older = read_number(connection, "user_version") < LOG_SCHEMA
    for table, expected in itertools.islice(TABLES.items(), 1 if is_older else None):
        found = [name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?) ORDER BY cid", (table,))]
        if found != expected.split():
            what = f"its table of {table} has the columns {found}" if found else f"it has no table {table}"
            raise _damaged(path, what)


def _apply(connection: sqlite3.Connection, version: int, migrations: Sequence[Migration]) -> None:
    """Run each step and set its version in one transaction: after a crash the schema is the old one or the new one."""
    for number, migration in enumerate(migrations[version:], version + 1):
        with transaction(connection):
            migration(connection)
            connection.execute(f"PRAGMA user_version = {number}")


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit all that is done inside the block, or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # After some errors SQLite has already rolled back, and a second rollback would be an error.
        with contextlib.suppress(sqlite3.Error):
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        raise


def connect(path: str, mode: str = "rw") -> sqlite3.Connection:
    """Connect to an existing file in autocommit mode; only ``transaction`` begins and ends transactions."""
    return sqlite3.connect(
        f"file:{quote(os.fsencode(path))}?mode={mode}", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None,
        check_same_thread=False,
    )  # fmt: skip


def read_number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


def _pick_aside(path: str) -> str:
    return next(
        aside
        for aside in (f"{path}.aside-{number}" for number in itertools.count(1))
        if not any(os.path.lexists(aside + suffix) for suffix in ("", *COMPANIONS))
    )


def unlink_all(path: str) -> None:
    for suffix in ("", *COMPANIONS):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + suffix)


def _identify(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _sync_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_directory(path: str) -> None:
    """Make the names of files beside ``path`` survive a loss of power."""
    _sync_file(os.path.dirname(path))


def _damaged(path: str, what: str) -> StoreError:
    return StoreError(
        f"{path}: the database is damaged: {what}; it was not changed: restore a backup (without {path}-wal and "
        f"{path}-shm of the old one), or start empty with `cpumond scheduler --new-store`, which keeps this one aside"
    )


@contextlib.contextmanager
def _explained(path: str, doing: str) -> Iterator[None]:
    """Convert errors of SQLite and of the system to StoreError."""
    try:
        yield
    except sqlite3.Error as error:
        raise _explain(path, doing, error) from error
    except OverflowError as error:
        raise StoreError(f"{path}: cannot {doing}: a value is larger than SQLite can keep: {error}") from error
    except OSError as error:
        raise StoreError(f"{path}: cannot {doing}: {describe(error)}; free space or fix its permissions") from error


def _explain(path: str, doing: str, error: sqlite3.Error) -> StoreError:
    # Errors of Python's module have no code; one reports text that cannot be decoded, which no store ever writes.
    code = getattr(error, "sqlite_errorcode", None)
    name = getattr(error, "sqlite_errorname", "no code")
    primary = None if code is None else code & 0xFF
    if primary in DAMAGE or (code is None and "decode" in str(error)):
        return _damaged(path, f"SQLite says {str(error)!r}")
    advice = {
        sqlite3.SQLITE_FULL: "free space on its file system",
        sqlite3.SQLITE_READONLY: "make the file and its directory writable for the scheduler",
        **dict.fromkeys(
            (sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_CANTOPEN),
            "fix the permissions of the file and its directory",
        ),
        sqlite3.SQLITE_IOERR: "look for disk errors and size limits in the system's log",
        **dict.fromkeys((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED), "end the other program that has it open"),
        sqlite3.SQLITE_TOOBIG: "a value is larger than SQLite can keep",
    }.get(primary if primary is not None else -1, "check the system's log")
    return StoreError(f"{path}: cannot {doing}: {error} ({name}); {advice}")
