"""The store in one SQLite file: write-ahead log, synced at each commit, one writer.

Beside the database ``PATH`` lie ``PATH-wal`` and ``PATH-shm`` (SQLite's own; part of the database while they exist),
``PATH.lock`` (held by the process that has it open, names its pid), ``PATH.v<N>`` (a copy from before a migration of
schema N), ``PATH.aside-<n>`` (what ``set_aside`` moved away) and ``PATH-wal.damaged-<n>`` (a log of which SQLite
did not take all). Nothing that is found damaged is changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Final
from urllib.parse import quote

import structlog

from cpumond.core.errors import describe
from cpumond.scheduler.store import Change, StoreError

log = structlog.get_logger("cpumond.scheduler")

APPLICATION_ID: Final = 0x43504D44
"""Bytes 68 to 71 of the file: "CPMD"."""

MAGIC: Final = b"SQLite format 3\0"
HEADER_BYTES: Final = 100
BUSY_TIMEOUT_S: Final = 1.0
"""How long a write waits for a foreign program (a backup, an operator's shell) that holds the database."""

WAL_HEADER: Final = struct.Struct(">8I")
"""Magic number, version, size of a page, number of the checkpoint, two salts, two checksums."""
WAL_FRAME: Final = struct.Struct(">6I")
"""Page, size of the database in pages after a commit or 0, two salts, two checksums; the page follows."""
WAL_INDEX: Final = struct.Struct("=3I2BHI")
"""The beginning of ``PATH-shm``: its last number is that of the last frame."""
MAX_LOGS: Final = 2**24
"""More are not written before the file is removed, which the end of a scheduler does."""
WAL_KEPT_BYTES: Final = 64 * 2**20
"""To this size the log is cut when it was copied into the database."""

COMPANIONS: Final = ("-wal", "-shm", "-journal")
DAMAGE: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT})

Migration = Callable[[sqlite3.Connection], None]
"""Changes a database of schema N to N + 1 within the transaction it is called in."""


def _create_records(connection: sqlite3.Connection) -> None:
    """From nothing to schema 1. ``crc``: CRC-32 over kind, key and value; SQLite itself has no checksums."""
    connection.execute(
        "CREATE TABLE records (kind TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, crc INTEGER NOT NULL, "
        "PRIMARY KEY (kind, key)) WITHOUT ROWID"
    )


MIGRATIONS: Final[tuple[Migration, ...]] = (_create_records,)
"""The migration at N takes schema N to N + 1; 0 is an empty file. Their number is the newest schema."""


def open_sqlite_store(path: str, migrations: Sequence[Migration] = MIGRATIONS) -> SqliteStore:
    """Open the database at ``path``; a missing one is made, with its directory, for this user only.

    An older schema is migrated, after a copy was made. Raises StoreError: in use by another process, damaged, of a
    newer version or another program, without rights or space.
    """
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
            _check_table(connection, path)
        undo.pop_all()
    return SqliteStore(path, connection, lock)


def set_aside(path: str) -> str | None:
    """Move a database, whatever is in it, to the first free ``PATH.aside-<n>``; None when there is none to move.

    Its log goes with it under the new name, so that what was set aside can be opened. Raises StoreError: in use, or
    without rights.
    """
    path = os.path.realpath(path)
    if not any(os.path.lexists(path + suffix) for suffix in ("", *COMPANIONS)):
        return None
    lock = _lock(path)
    try:
        aside = _pick_aside(path)
        # The database goes first: if the move ends here, a lone log is left, which is refused. The other way round a
        # database without its log would be left, which looks sound and lacks the newest records.
        for suffix in ("", *COMPANIONS):
            if os.path.lexists(path + suffix):
                os.rename(path + suffix, aside + suffix)
        _sync_directory(path)
    except OSError as error:
        raise StoreError(f"{path}: cannot be set aside: {describe(error)}; fix the rights of its directory") from error
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
        self._files = identify_files(self.path)

    def load(self) -> Iterator[tuple[str, str, bytes]]:
        """All records, in order, each checked against its checksum. Raises StoreError."""
        self._check_open()
        with (
            _explained(self.path, "read"),
            contextlib.closing(self._connection.cursor()) as cursor,
        ):
            for kind, key, value, crc in cursor.execute("SELECT kind, key, value, crc FROM records ORDER BY kind, key"):
                sound = isinstance(kind, str) and isinstance(key, str) and isinstance(value, bytes)
                if not sound or crc != _checksum(kind, key, value):
                    raise _damaged(self.path, f"the record {kind!r} {key!r} does not match its checksum")
                yield kind, key, value

    def write(self, changes: Sequence[Change]) -> None:
        """Make all changes or none, on disk when this returns. Raises StoreError.

        Files that were removed meanwhile are written anew first, with all that is in them.
        """
        self._check_open()
        self._stay_in_place()
        if not changes:
            return
        last = {(change.kind, change.key): change.value for change in changes}
        try:
            removed = [place for place, value in last.items() if value is None]
            put = [(*place, value, _checksum(*place, value)) for place, value in last.items() if value is not None]
            for kind, key in removed:
                _checksum(kind, key, b"")
        except UnicodeEncodeError as error:
            raise StoreError(
                f"{self.path}: nothing was written: the kind or key {error.object!r} holds a lone surrogate, "
                "which no file can keep; give it another name"
            ) from None
        with _explained(self.path, "write"), transaction(self._connection):
            if removed:
                self._connection.executemany("DELETE FROM records WHERE kind = ? AND key = ?", removed)
            if put:
                self._connection.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", put)
        # Removed while it was written? What cannot be mended now is tried again by the next write, or the look before.
        with contextlib.suppress(StoreError):
            self._stay_in_place()

    def _stay_in_place(self) -> None:
        """What is written must be where the next process looks for it, and no other process may have it.

        The files that are open live on when their names are removed, so they are copied to where they belong. Raises
        StoreError when that cannot be done, or when another database is there.
        """
        assert self._lock is not None
        held = os.fstat(self._lock)
        if _identify(f"{self.path}.lock") != (held.st_dev, held.st_ino):
            lock = _lock(self.path)
            os.close(self._lock)
            self._lock = lock
            log.error("store_lost", path=f"{self.path}.lock", advice="find out who removed it; it was made anew")
        found = identify_files(self.path)
        if found == self._files:
            return
        if found[0] is not None and found[0] != self._files[0]:
            raise StoreError(
                f"{self.path}: was replaced by another file while it was in use: nothing is written any more; put a "
                "backup back while no scheduler runs: move that file away, and this one is written anew"
            )
        with _explained(self.path, "write anew"):
            self._write_anew()
        self.lost_total += 1
        log.error("store_lost", path=self.path, advice="find out who removed it; it was written anew, nothing is lost")

    def _write_anew(self) -> None:
        put_back(self._connection, self.path)
        # Its end removes a log of that name: before there is a new one.
        self._connection.close()
        self._connection = connect(self.path)
        _prepare(self._connection)
        _check_table(self._connection, self.path)
        self._files = identify_files(self.path)

    def _check_open(self) -> None:
        if self._lock is None:
            raise StoreError(f"{self.path}: the store was closed; open it again")

    def close(self) -> None:
        """Copy the log into the database and let another process have it; a second time does nothing."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        try:
            self._connection.close()
        finally:
            os.close(lock)


def _checksum(kind: str, key: str, value: bytes) -> int:
    """CRC-32 over the three, with lengths that tell where one ends. Raises UnicodeEncodeError."""
    head = kind.encode(), key.encode()
    return zlib.crc32(value, zlib.crc32(b"%d %d %b%b" % (len(head[0]), len(head[1]), *head)))


def identify_files(path: str) -> list[tuple[int, int] | None]:
    """Device and inode of a database and of its log; None for one that is not there."""
    return [_identify(f"{path}{suffix}") for suffix in ("", "-wal")]


def put_back(connection: sqlite3.Connection, path: str) -> None:
    """Write what ``connection`` has open, whose file was removed from ``path``, there anew; the connection stays with
    the file that has no name. Raises OSError or sqlite3.Error."""
    with _make_anew(path) as target:
        connection.backup(target)
        target.execute("PRAGMA journal_mode = WAL")


@contextlib.contextmanager
def _make_anew(path: str) -> Iterator[sqlite3.Connection]:
    """An empty database under another name, which is at ``path``, whole and on disk, after all was done inside."""
    new = f"{path}.new"
    unlink_all(new)
    try:
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with contextlib.closing(connect(new)) as target:
            yield target
        _sync_file(new)
        # A log that is left of an earlier database is not the new one's. What is open does not need its name.
        for suffix in COMPANIONS:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + suffix)
        os.rename(new, path)
        _sync_directory(path)
    finally:
        unlink_all(new)


def _lock(path: str) -> int:
    """The descriptor that holds ``PATH.lock``; the kernel lets go of it however the process ends."""
    name, directory = f"{path}.lock", os.path.dirname(path)
    advice = "set `state_dir` to a directory that the scheduler may write"
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{path}: cannot make the directory {directory}: {describe(error)}; {advice}") from error
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
            f"{path}: in use by {by}; one scheduler at a time may have it: stop that one, "
            "or give this one another `state_dir`"
        ) from None
    except OSError as error:
        os.close(lock)
        raise StoreError(
            f"{path}: cannot be locked: {name}: {describe(error)}; free space or fix its rights"
        ) from error
    return lock


def _inspect(path: str, newest: int) -> None:
    """Refuse a file that is no sound database of ours, through a connection that changes nothing in it."""
    try:
        # For writing, as SQLite itself would take a file that may only be read without a word.
        with open(path, "r+b") as file:
            head = file.read(HEADER_BYTES)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read and written: {describe(error)}; fix its rights") from error
    if head[: len(MAGIC)] != MAGIC:
        raise _damaged(path, "it is empty" if not head else "it is not an SQLite database")
    if len(head) < HEADER_BYTES:
        raise _damaged(path, f"it is cut short, to {len(head)} bytes")
    with _explained(path, "read"), contextlib.closing(connect(path, _pick_mode(path))) as connection:
        application = read_number(connection, "application_id")
        if application != APPLICATION_ID:
            raise StoreError(
                f"{path}: belongs to another program (application_id {application:#x}, not {APPLICATION_ID:#x}); "
                "it was left as it is: set `state_dir` to a directory of the scheduler's own"
            )
        version = read_number(connection, "user_version")
        if version > newest:
            raise StoreError(
                f"{path}: was written by a newer cpumond (schema {version}, this one reads up to {newest}); it was "
                f"left as it is: install that version again, or put back the copy {path}.v{newest} if there is one"
            )
        for (verdict,) in connection.execute("PRAGMA quick_check(1)"):
            if verdict != "ok":
                raise _damaged(path, " ".join(str(verdict).split()))
        if version < 1:
            raise _damaged(path, f"it says that it is of schema {version}")
        _tell_of_dropped_writes(path)


def _pick_mode(path: str) -> str:
    """How to look at a database and leave it as it is, SQLite's files beside it included."""
    if os.path.lexists(f"{path}-journal"):
        return "rw"  # a switch to the log was cut off; only a writer can take it back
    return "ro" if os.path.lexists(f"{path}-wal") else "ro&immutable=1"


def _create(path: str, migrations: Sequence[Migration]) -> None:
    """Make the database under another name, so that a file at ``path`` was whole once, and an empty one is damaged."""
    left = [suffix for suffix in COMPANIONS if os.path.lexists(path + suffix)]
    if left:
        raise _damaged(path, f"the database is gone, but {path}{left[0]} of it is there")
    with _explained(path, "create"), _make_anew(path) as connection:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        _apply(connection, 0, migrations)
        connection.execute("PRAGMA journal_mode = WAL")
    with contextlib.suppress(OSError):  # the directory above may be another user's, and is older then
        _sync_directory(os.path.dirname(path))


def _migrate(connection: sqlite3.Connection, path: str, migrations: Sequence[Migration]) -> None:
    version = read_number(connection, "user_version")
    if version == len(migrations):
        return
    with _make_anew(f"{path}.v{version}") as target:
        connection.backup(target)
    _apply(connection, version, migrations)


def _tell_of_dropped_writes(path: str) -> None:
    """Say in the log, and keep a copy, where SQLite will not take all of its log: it drops without a word what comes
    after the first frame with a wrong checksum.

    A connection that has read something must be open: SQLite has noted in the log's index which is the last frame that
    it takes. It must be closed before the one that writes is opened: with the file that is closed here go all locks of
    this process on the index, and a foreign program would take the index for an unused one.
    """
    wal = f"{path}-wal"
    if not os.path.lexists(wal) or not os.path.getsize(wal):
        return
    with open(f"{path}-shm", "rb") as file:
        index = file.read(WAL_INDEX.size)
    taken = WAL_INDEX.unpack(index)[-1] if len(index) == WAL_INDEX.size else 0
    with open(wal, "rb") as file:
        dropped, is_tail = _count_dropped(file, taken)
    if not dropped:
        return
    aside = next(name for number in itertools.count(1) if not os.path.lexists(name := f"{wal}.damaged-{number}"))
    try:
        shutil.copyfile(wal, aside)
        os.chmod(aside, 0o600)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        aside = f"none: {describe(error)}"
    if is_tail:
        advice = (
            "nothing to do after a kill, a loss of power or a full disk: the last write was cut off, unacknowledged"
        )
        log.warning("store_log_cut", path=wal, taken_frames=taken, dropped_frames=dropped, copy=aside, advice=advice)
    else:
        advice = "the log is damaged in the middle: the newest changes are gone; look at the disk"
        log.error("store_log_damaged", path=wal, taken_frames=taken, dropped_frames=dropped, copy=aside, advice=advice)


def _count_dropped(file: BinaryIO, taken: int) -> tuple[int, bool]:
    """Frames of a log that come after the ``taken`` ones and are neither of an older log nor of a write that was not
    done, and whether that is only the very last one, as after a loss of power.

    See "Database File Format" of SQLite, 4.
    """
    size = os.fstat(file.fileno()).st_size
    head = file.read(WAL_HEADER.size)
    if len(head) < WAL_HEADER.size:
        return (1 if head else 0), False
    _, _, page_bytes, _, *salts, _, _ = WAL_HEADER.unpack(head)
    if not 512 <= page_bytes <= 65536:
        return 1, False
    frame_bytes = WAL_FRAME.size + page_bytes
    frames, rest = divmod(size - WAL_HEADER.size, frame_bytes)
    dropped = [frames] if rest else []
    for number in range(taken, frames):
        file.seek(WAL_HEADER.size + number * frame_bytes)
        _, pages, *found = WAL_FRAME.unpack(file.read(WAL_FRAME.size))
        # Each log begins where the one before it did, with the first salt one higher; the end of older ones is left.
        is_older = 0 < (salts[0] - found[0]) & 0xFFFFFFFF < MAX_LOGS and any(found)
        if pages if found[:2] == salts else not is_older:
            dropped.append(number)
    return len(dropped), len(dropped) == 1 and dropped[0] >= frames - 1 and taken > 0


def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}")


def _check_table(connection: sqlite3.Connection, path: str) -> None:
    columns = [name for (name,) in connection.execute("SELECT name FROM pragma_table_info('records') ORDER BY cid")]
    if columns != ["kind", "key", "value", "crc"]:
        raise _damaged(path, f"its table of records has the columns {columns}" if columns else "it has no records")


def _apply(connection: sqlite3.Connection, version: int, migrations: Sequence[Migration]) -> None:
    """Each step in one transaction with its version: a crash leaves the one or the other."""
    for number, migration in enumerate(migrations[version:], version + 1):
        with transaction(connection):
            migration(connection)
            connection.execute(f"PRAGMA user_version = {number}")


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All that is done inside, or nothing of it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # After some errors SQLite has rolled back already, and refuses to do it twice.
        with contextlib.suppress(sqlite3.Error):
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        raise


def connect(path: str, mode: str = "rw") -> sqlite3.Connection:
    """A connection to an existing file, in autocommit: transactions are begun and ended by their words."""
    return sqlite3.connect(
        f"file:{quote(os.fsencode(path))}?mode={mode}",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )


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
    """Make the names beside ``path`` survive the loss of power."""
    _sync_file(os.path.dirname(path))


def _damaged(path: str, what: str) -> StoreError:
    return StoreError(
        f"{path}: the database is damaged: {what}; it was left as it is: restore a backup (without {path}-wal and "
        f"{path}-shm of the old one), or start anew with `cpumond scheduler --new-store`, which keeps this one aside"
    )


@contextlib.contextmanager
def _explained(path: str, doing: str) -> Iterator[None]:
    """Errors of SQLite and of the system as a StoreError."""
    try:
        yield
    except sqlite3.Error as error:
        raise _explain(path, doing, error) from error
    except OverflowError as error:
        raise StoreError(f"{path}: cannot {doing}: a value is larger than SQLite can keep: {error}") from error
    except OSError as error:
        raise StoreError(f"{path}: cannot {doing}: {describe(error)}; free space or fix its rights") from error


def _explain(path: str, doing: str, error: sqlite3.Error) -> StoreError:
    # Errors of the module itself have no code; text that cannot be decoded is one of them, and no store writes it.
    code = getattr(error, "sqlite_errorcode", None)
    name = getattr(error, "sqlite_errorname", "no code")
    primary = None if code is None else code & 0xFF
    if primary in DAMAGE or (code is None and "decode" in str(error)):
        return _damaged(path, f"SQLite says {str(error)!r}")
    advice = {
        sqlite3.SQLITE_FULL: "free space on its file system",
        sqlite3.SQLITE_READONLY: "make the file and its directory writable for the scheduler",
        sqlite3.SQLITE_PERM: "fix the rights of the file and its directory",
        sqlite3.SQLITE_AUTH: "fix the rights of the file and its directory",
        sqlite3.SQLITE_CANTOPEN: "fix the rights of the file and its directory",
        sqlite3.SQLITE_IOERR: "look for errors of the disk and for limits of size in the system's log",
        sqlite3.SQLITE_BUSY: "end the other program that has it open",
        sqlite3.SQLITE_LOCKED: "end the other program that has it open",
        sqlite3.SQLITE_TOOBIG: "a value is larger than SQLite can keep",
    }.get(primary if primary is not None else -1, "look into the system's log")
    return StoreError(f"{path}: cannot {doing}: {error} ({name}); {advice}")
