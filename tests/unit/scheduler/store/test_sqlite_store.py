"""The SQLite file itself: its rights, its versions, every kind of damage, and that damage is left as it is."""

import contextlib
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cpumond.scheduler.model import UNSTORED_STARTS
from cpumond.scheduler.store import Change, Entry, StoreError
from cpumond.scheduler.store.sqlite import MIGRATIONS, Migration, SqliteStore, open_sqlite_store, set_aside

RECORDS = [Change("operation", f"{number:05}", bytes([number % 256]) * 700) for number in range(400)]
PAGE = 4096


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "state" / "scheduler.db")


@pytest.fixture
def filled(path: str) -> str:
    """A database of many pages, closed."""
    with contextlib.closing(open_sqlite_store(path)) as store:
        store.write(RECORDS)
    return path


def die_after(work: Callable[[], SqliteStore]) -> None:
    """Do the work in a process that is killed then. ``work``: returns the store, which nothing closes."""
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            store = work()  # noqa: F841
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)


@pytest.fixture
def crashed(path: str) -> str:
    """A database whose process was killed: its newest records are in its log."""

    def write() -> SqliteStore:
        store = open_sqlite_store(path)
        store.write([Change("k", "a", b"1")])
        return store

    die_after(write)
    assert os.path.getsize(f"{path}-wal") > 0
    return path


def read_all(path: str, migrations: Sequence[Migration] = MIGRATIONS) -> list[Change]:
    with contextlib.closing(open_sqlite_store(path, migrations)) as store:
        return [Change(*record) for record in store.load()]


def refused(path: str) -> str:
    """The sentence with which a file is refused; it and its log are the same bytes as before."""
    before = files(path)
    with pytest.raises(StoreError) as caught:
        read_all(path)
    assert files(path) == before
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


def files(path: str) -> dict[str, bytes]:
    parts = [Path(path), Path(f"{path}-wal"), Path(f"{path}-journal")]
    return {part.name: part.read_bytes() for part in parts if part.is_file()}


def overwrite(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def run_sql(path: str, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


# ---- rights and names


def test_files_and_directory_are_for_their_owner_only(path: str) -> None:
    before = os.umask(0)
    try:
        with contextlib.closing(open_sqlite_store(path)) as store:
            store.write(RECORDS[:1])
            names = os.listdir(os.path.dirname(path))
            modes = {name: stat.S_IMODE(os.stat(f"{os.path.dirname(path)}/{name}").st_mode) for name in names}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(["scheduler.db", "scheduler.db-wal", "scheduler.db-shm", "scheduler.db.lock"], 0o600)
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700


def test_a_closed_database_is_one_file_and_its_lock(filled: str) -> None:
    assert sorted(os.listdir(os.path.dirname(filled))) == ["scheduler.db", "scheduler.db.lock"]


def test_a_path_with_any_characters(tmp_path: Path) -> None:
    path = os.path.join(str(tmp_path), "a b?c#d%41&mode=memory", "ü\udcff.db")
    with contextlib.closing(open_sqlite_store(path)) as store:
        store.write(RECORDS[:1])
    assert read_all(path) == RECORDS[:1]
    assert os.path.exists(path)


def test_a_link_is_followed_to_the_database(filled: str, tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(filled)
    assert read_all(str(link)) == RECORDS
    assert sorted(os.listdir(tmp_path)) == ["link.db", "state"]


def test_each_commit_is_synced(path: str) -> None:
    # No test here can take the power away; this is the setting that counts then.
    with contextlib.closing(open_sqlite_store(path)) as store:
        assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "scheduler.db")
    with pytest.raises(StoreError, match=r"cannot create the directory .*/file: File exists; set `state_dir`"):
        open_sqlite_store(path)


# ---- one writer


def test_a_second_process_is_told_the_pid_of_the_first(filled: str) -> None:
    program = (
        "import sys; from cpumond.scheduler.store.sqlite import open_sqlite_store;"
        "store = open_sqlite_store(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, filled], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        assert f"in use by process {other.pid};" in refused(filled)
        with pytest.raises(StoreError, match=f"in use by process {other.pid};"):
            set_aside(filled)
        other.stdin.close()
    assert read_all(filled) == RECORDS


def test_a_foreign_program_sees_that_the_index_is_in_use(crashed: str) -> None:
    """Else it cuts it short under us. To close a file is to give up all locks of the process on it."""
    with contextlib.closing(open_sqlite_store(crashed)):
        index = f":{os.stat(f'{crashed}-shm').st_ino} "
        held = [line for line in Path("/proc/locks").read_text().splitlines() if index in line]
    assert any(f" {os.getpid()} " in line for line in held), held


def test_a_foreign_program_may_read_and_a_write_does_not_wait_for_a_writer(filled: str) -> None:
    with contextlib.closing(open_sqlite_store(filled)) as store:
        with contextlib.closing(sqlite3.connect(filled, isolation_level=None)) as other:
            assert other.execute("SELECT count(*) FROM records").fetchone() == (400,)
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match=r"cannot write: database is locked .*; end the other program"):
                store.write(RECORDS[:1])
        store.write([Change("k", "a", b"1")])


# ---- damage


def test_an_empty_file(filled: str) -> None:
    os.truncate(filled, 0)
    message = refused(filled)
    assert "the database is damaged: it is empty; it was not changed: restore a backup" in message
    assert "`cpumond scheduler --new-store`, which keeps this one aside" in message


def test_what_is_no_database_of_ours(path: str) -> None:
    os.makedirs(path)
    assert "Is a directory" in refused(path)
    os.rmdir(path)
    run_sql(path, "CREATE TABLE records (kind, key, value)", "PRAGMA user_version = 1")
    assert "belongs to another program (application_id 0x0, not 0x43504d44)" in refused(path)
    Path(path).write_text("[scheduler]\n" * 1000)
    assert "damaged: it is not an SQLite database" in refused(path)


@pytest.mark.parametrize("size", [50, 99, 100, 512, PAGE, 2 * PAGE, 10 * PAGE + 1, -1])
def test_a_file_cut_short(filled: str, size: int) -> None:
    os.truncate(filled, size % os.path.getsize(filled))
    assert "damaged" in refused(filled)


@pytest.mark.parametrize("fill", [b"\0", b"\xff", b"\x5a"])
@pytest.mark.parametrize("part", ["whole", "first half", "second half", "one sector"])
def test_a_torn_page(filled: str, part: str, fill: bytes) -> None:
    start, length = {"whole": (0, PAGE), "first half": (0, PAGE // 2), "second half": (PAGE // 2, PAGE // 2)}.get(
        part, (3584, 512)
    )
    overwrite(filled, 10 * PAGE + start, fill * length)
    assert "damaged" in refused(filled)


def test_a_single_wrong_byte_of_a_value(filled: str) -> None:
    overwrite(filled, Path(filled).read_bytes().index(RECORDS[77].value or b"") + 100, b"?")
    assert "the record 'operation' '00077' does not match its checksum" in refused(filled)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE records SET value = x'00' WHERE key = '00007'",
        "UPDATE records SET key = '00007a' WHERE key = '00007'",
        "UPDATE records SET value = 'text' WHERE key = '00007'",
        "UPDATE records SET value = 7 WHERE key = '00007'",
        "UPDATE records SET key = CAST(7 AS BLOB) WHERE key = '00007'",
        "UPDATE records SET key = CAST(x'ff' AS TEXT) WHERE key = '00007'",
        "DROP TABLE records",
        "ALTER TABLE records RENAME TO others",
        "ALTER TABLE records DROP COLUMN crc",
        "DROP TABLE log_subjects",
        "ALTER TABLE log ADD COLUMN colour TEXT",
        "PRAGMA user_version = 0",
    ],
)
def test_what_somebody_else_wrote_into_it(filled: str, change: str) -> None:
    run_sql(filled, change)
    assert "damaged" in refused(filled)


def test_damage_that_comes_up_while_it_is_open(path: str) -> None:
    many = [Change("k", f"{number:05}", os.urandom(3000)) for number in range(3000)]
    with contextlib.closing(open_sqlite_store(path)) as store:
        store.write(many)
    with contextlib.closing(open_sqlite_store(path)) as store:
        damage = os.open(path, os.O_RDWR)
        try:
            for page in range(10, os.path.getsize(path) // PAGE):
                os.pwrite(damage, b"\xff" * PAGE, page * PAGE)
            with pytest.raises(StoreError, match=r"the database is damaged: .*restore a backup"):
                list(store.load())
            with pytest.raises(StoreError, match=r"the database is damaged: .*restore a backup"):
                store.write([Change(change.kind, change.key, b"new") for change in many])
        finally:
            os.close(damage)


def test_a_log_without_its_database(crashed: str) -> None:
    os.unlink(crashed)
    assert f"the database is gone, but its {crashed}-wal is there" in refused(crashed)
    assert not os.path.exists(crashed)
    assert set_aside(crashed) == f"{crashed}.aside-1"
    assert os.path.exists(f"{crashed}.aside-1-wal")
    assert read_all(crashed) == []


def test_a_damaged_database_keeps_its_log(crashed: str) -> None:
    overwrite(crashed, 0, b"\0" * 16)
    assert "not an SQLite database" in refused(crashed)


def test_a_creation_that_was_cut_off_is_done_again(path: str) -> None:
    os.makedirs(os.path.dirname(path))
    Path(f"{path}.new").write_bytes(b"half")
    Path(f"{path}.new-journal").write_bytes(b"half")
    assert read_all(path) == []
    assert not os.path.exists(f"{path}.new")


# ---- the log


ENTRIES = [Entry(float(number), ("a", f"s{number}"), b"entry %d" % number) for number in range(1, 6)]


@pytest.fixture
def told(path: str) -> str:
    """A database with five entries in its log, closed."""
    with contextlib.closing(open_sqlite_store(path)) as store:
        store.write(RECORDS[:1], ENTRIES)
    return path


@pytest.mark.parametrize("change", ["at = 7", "subjects = x'00'", "value = x'00'", "number = 7"])
def test_an_entry_is_not_changed(told: str, change: str) -> None:
    with pytest.raises(sqlite3.IntegrityError, match="entries of the log are not changed"):
        run_sql(told, f"UPDATE log SET {change} WHERE number = 2")  # noqa: S608
    with contextlib.closing(open_sqlite_store(told)) as store:
        assert [entry for _, entry in store.read_log()] == ENTRIES[::-1]


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE log SET value = x'00' WHERE number = {}",
        "UPDATE log SET value = 'text' WHERE number = {}",
        "UPDATE log SET subjects = x'00' WHERE number = {}",
        "UPDATE log SET subjects = 1 WHERE number = {}",
        "UPDATE log SET at = 'text' WHERE number = {}",
        "UPDATE log SET at = 7 WHERE number = {}",
        "DELETE FROM log WHERE number = {}",
    ],
)
@pytest.mark.parametrize("number", [3, 5])
def test_a_damaged_entry_is_named_and_the_others_are_read(
    told: str, change: str, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run_sql(told, "DROP TRIGGER log_is_only_added_to", change.format(number))
    expected = [entry for entry in reversed(ENTRIES) if entry.at != number]
    with contextlib.closing(open_sqlite_store(told)) as store:
        capsys.readouterr()
        for _ in range(2):
            assert [entry for _, entry in store.read_log(["a"], limit=4)] == expected
        said = capsys.readouterr().out
        assert said.count("store_entry_damaged") == 1
        assert f"entry {number} of the log" in said
        store.write(RECORDS[1:2], [Entry(9.0, ("a",), b"more")])
        assert [entry.value for _, entry in store.read_log(["a"], limit=1)] == [b"more"]
        assert store.cut_log(100.0, 0) in (5, 6)
        assert store.read_log() == []
    assert read_all(told) == RECORDS[:2]


def test_a_torn_page_of_the_log_keeps_nobody_from_starting(path: str) -> None:
    entries = [Entry(float(number), ("a",), b"%d" % number * 500) for number in range(200)]
    with contextlib.closing(open_sqlite_store(path)) as store:
        store.write(RECORDS, entries)
    overwrite(path, Path(path).read_bytes().index(b"77" * 500) // PAGE * PAGE, b"\xff" * PAGE)
    with contextlib.closing(open_sqlite_store(path)) as store:
        assert [Change(*record) for record in store.load()] == RECORDS
        assert [entry for _, entry in store.read_log(limit=50)] == entries[:-51:-1]
        with pytest.raises(StoreError, match=r"the database is damaged: .*restore a backup"):
            store.read_log(limit=200)


# ---- whose it is, and of which version


def test_a_backup_that_was_put_back(filled: str, tmp_path: Path) -> None:
    # What the shell's VACUUM INTO and .backup leave is not in the mode of the log.
    backup = str(tmp_path / "backup.db")
    run_sql(filled, f"VACUUM INTO '{backup}'")
    assert read_all(backup) == RECORDS


def test_an_empty_database_of_before_holds_no_job(path: str) -> None:
    open_sqlite_store(path, MIGRATIONS[:1]).close()
    assert read_all(path) == []


@pytest.mark.parametrize("schema", [1, 2])
def test_a_database_of_before_there_was_a_log_gets_one_and_keeps_all(path: str, schema: int) -> None:
    with contextlib.closing(open_sqlite_store(path, MIGRATIONS[:schema])) as store:
        store.write(RECORDS)
    noted = [Change(*UNSTORED_STARTS, b"{}")] if schema == 1 else []
    for number in (1, 2):
        with contextlib.closing(open_sqlite_store(path)) as store:
            assert [Change(*record) for record in store.load()] == RECORDS + noted
            store.write([], [Entry(1.0, ("a",), b"%d" % number)])
            assert [number for number, _ in store.read_log(["a"])] == list(range(number, 0, -1))
    assert read_all(f"{path}.v{schema}", MIGRATIONS[:schema]) == RECORDS
    with pytest.raises(StoreError, match=rf"newer cpumond \(schema 3, .* restore the copy .*\.v{schema}"):
        read_all(path, MIGRATIONS[:schema])


def add_note(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE note (text TEXT)")


def break_half_way(connection: sqlite3.Connection) -> None:
    connection.execute("DELETE FROM records")
    connection.execute("INSERT INTO nowhere VALUES (1)")


def test_the_copy_holds_what_was_in_the_log(crashed: str) -> None:
    open_sqlite_store(crashed, (*MIGRATIONS, add_note)).close()
    assert stat.S_IMODE(os.stat(f"{crashed}.v3").st_mode) == 0o600
    assert read_all(f"{crashed}.v3") == [Change("k", "a", b"1")]


def test_a_migration_that_fails_changes_nothing(filled: str) -> None:
    with pytest.raises(StoreError, match="no such table: nowhere"):
        open_sqlite_store(filled, (*MIGRATIONS, add_note, break_half_way))
    # The step before it is a whole one: it stays, and the next attempt goes on from there.
    with contextlib.closing(open_sqlite_store(filled, (*MIGRATIONS, add_note))) as store:
        assert [Change(*record) for record in store.load()] == RECORDS
    assert read_all(f"{filled}.v3") == RECORDS


# ---- set aside


def test_nothing_to_set_aside(path: str) -> None:
    assert set_aside(path) is None
    assert not os.path.exists(os.path.dirname(path))


def test_it_takes_the_first_free_number_and_never_overwrites(filled: str) -> None:
    taken = {f"{filled}.aside-1": b"one", f"{filled}.aside-3": b"three", f"{filled}.aside-2-wal": b"log"}
    for name, text in taken.items():
        Path(name).write_bytes(text)
    assert set_aside(filled) == f"{filled}.aside-4"
    assert {name: Path(name).read_bytes() for name in taken} == taken
    assert set_aside(filled) is None
    assert read_all(f"{filled}.aside-4") == RECORDS
    assert read_all(filled) == []


def test_what_was_set_aside_keeps_its_log(crashed: str) -> None:
    assert set_aside(crashed) == f"{crashed}.aside-1"
    assert read_all(f"{crashed}.aside-1") == [Change("k", "a", b"1")]
    assert read_all(crashed) == []


@pytest.mark.parametrize("fail", [KeyboardInterrupt, MemoryError])
def test_a_write_that_is_broken_off_leaves_nothing(filled: str, fail: type[BaseException]) -> None:
    def interrupt(*_: object) -> int:
        raise fail

    with contextlib.closing(open_sqlite_store(filled)) as store:
        with _broken(store, interrupt), pytest.raises((fail, StoreError)):
            store.write([Change("k", "a", b"1"), Change("operation", "00001", None)])
        assert [Change(*record) for record in store.load()] == RECORDS
        store.write([Change("operation", "00001", None)])
        assert len(list(store.load())) == 399


@contextlib.contextmanager
def _broken(store: SqliteStore, function: Callable[..., int]) -> Iterator[None]:
    """Each statement of the connection calls ``function``, which raises, from a trigger within it."""
    store._connection.create_function("break_off", 0, function)
    store._connection.execute("CREATE TEMP TRIGGER broken AFTER INSERT ON records BEGIN SELECT break_off(); END")
    yield
    store._connection.execute("DROP TRIGGER broken")


# ---- what is removed while it is open


@pytest.mark.parametrize(
    "suffixes", [("",), ("-wal",), ("", "-wal", "-shm"), (".lock",), ("", "-wal", "-shm", ".lock")], ids=str
)
def test_what_is_acknowledged_survives_the_removal_of_its_files(told: str, suffixes: tuple[str, ...]) -> None:
    """The process is killed right after the write that came after the removal."""
    reached, done = os.pipe()

    def write() -> SqliteStore:
        store = open_sqlite_store(told)
        for number in range(3):
            assert len(store.read_log()) == 5 + number
            for suffix in suffixes:
                os.unlink(told + suffix)
            store.write([Change("k", str(number), b"1")], [Entry(9.0, ("b",), b"%d" % number)])
        os.write(done, b"%d" % store.lost_total)
        return store

    die_after(write)
    os.close(done)
    with open(reached, "rb") as lost:
        assert lost.read() == (b"0" if suffixes == (".lock",) else b"3")
    assert read_all(told) == [*(Change("k", str(number), b"1") for number in range(3)), *RECORDS[:1]]
    assert not os.path.exists(f"{told}.new")
    with contextlib.closing(open_sqlite_store(told)) as store:
        assert [entry.value for _, entry in store.read_log(["b"])] == [b"2", b"1", b"0"]
        assert len(store.read_log()) == 8


def test_a_directory_that_is_removed_is_made_anew_for_its_owner_only(path: str) -> None:
    with contextlib.closing(open_sqlite_store(path)) as store:
        store.write(RECORDS)
        shutil.rmtree(os.path.dirname(path))
        store.write([])
        assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
            open_sqlite_store(path)
    assert read_all(path) == RECORDS


def test_another_file_in_its_place_is_left_alone(filled: str) -> None:
    with contextlib.closing(open_sqlite_store(filled)) as store:
        os.rename(filled, f"{filled}.mine")
        Path(filled).write_bytes(b"a backup")
        for _ in range(2):
            with pytest.raises(StoreError, match="was replaced by another file"):
                store.write([Change("k", "a", b"1")])
        assert Path(filled).read_bytes() == b"a backup"
        os.unlink(filled)
        store.write([Change("k", "b", b"1")])
    assert read_all(filled) == [Change("k", "b", b"1"), *RECORDS]


def test_where_it_cannot_be_written_anew_nothing_is_acknowledged(path: str) -> None:
    with contextlib.closing(open_sqlite_store(path)) as store:
        store.write(RECORDS)
        shutil.rmtree(os.path.dirname(path))
        Path(os.path.dirname(path)).touch()
        with pytest.raises(StoreError, match="cannot"):
            store.write([Change("k", "a", b"1")])
        os.unlink(os.path.dirname(path))
        store.write([Change("k", "b", b"1")])
    assert read_all(path) == [Change("k", "b", b"1"), *RECORDS]


def test_another_scheduler_that_began_there_meanwhile_keeps_its_files(path: str) -> None:
    with contextlib.closing(open_sqlite_store(path)) as store:
        store.write(RECORDS)
        shutil.rmtree(os.path.dirname(path))
        with contextlib.closing(open_sqlite_store(path)), pytest.raises(StoreError, match="in use by"):
            store.write([Change("k", "a", b"1")])
        with pytest.raises(StoreError, match="was replaced"):
            store.write([Change("k", "a", b"1")])


# ---- a log that SQLite does not take as a whole


@pytest.fixture
def logged(path: str) -> str:
    """A database whose process was killed after forty writes, which are in its log alone."""

    def write() -> SqliteStore:
        store = open_sqlite_store(path)
        for number in range(40):
            store.write([Change("k", f"{number:02}", b"v" * 500)])
        return store

    die_after(write)
    os.unlink(f"{path}-shm")
    return path


@pytest.mark.parametrize(
    ("place", "data", "event", "left"),
    [
        (0.5, b"\xaa" * 30, "store_log_damaged", range(1, 40)),
        (0.5, b"\0" * 10**6, "store_log_damaged", range(1, 40)),
        (100, b"\xaa", "store_log_damaged", range(1)),
        (0, b"\xaa", "store_log_damaged", range(1)),
        (8, b"\xaa", "store_log_damaged", range(1)),
        (20, b"\xaa\xbb", "store_log_damaged", range(1)),  # the second one: with another first it may be an older log
        (-10, b"\xaa", "store_log_cut", range(39, 40)),
        (0.5, None, "store_log_cut", range(1, 40)),
        (-2000, None, "store_log_cut", range(1, 40)),
    ],
    ids=["middle", "zeros", "first frame", "magic", "page size", "salt", "last frame", "half", "cut short"],
)
def test_a_damaged_log_is_said_and_kept(
    logged: str, place: float, data: bytes | None, event: str, left: range, capsys: pytest.CaptureFixture[str]
) -> None:
    wal = Path(f"{logged}-wal")
    content = wal.read_bytes()
    at = int(place * len(content)) if 0 < place < 1 else int(place) % len(content)
    damaged = content[:at] if data is None else (content[:at] + data + content[at + len(data) :])[: len(content)]
    wal.write_bytes(damaged)
    capsys.readouterr()
    found = read_all(logged)
    assert len(found) in left
    assert found == [Change("k", f"{number:02}", b"v" * 500) for number in range(len(found))]
    said = capsys.readouterr().out
    assert said.count("store_log_") == said.count(event) == 1
    assert Path(f"{wal}.damaged-1").read_bytes() == damaged
    assert stat.S_IMODE(os.stat(f"{wal}.damaged-1").st_mode) == 0o600


def begin_log_anew(path: str, *statements: str) -> dict[str, bytearray]:
    """The database and its log, which begins anew with ``statements`` in front of what is left of the older one."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in ("PRAGMA wal_checkpoint(RESTART)", *statements):
            connection.execute(statement)
        return {suffix: bytearray(Path(path + suffix).read_bytes()) for suffix in ("", "-wal")}


def put_back(path: str, kept: dict[str, bytearray]) -> None:
    for suffix, content in kept.items():
        Path(path + suffix).write_bytes(content)


def test_a_sound_log_is_no_news(logged: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also not the end of a write that was never done, and what is left of an older log behind a newer one."""
    statements = "INSERT INTO records VALUES ('x', 'x', x'00', 0)", "DELETE FROM records WHERE kind = 'x'"
    put_back(logged, begin_log_anew(logged, *statements))
    capsys.readouterr()
    assert len(read_all(logged)) == 40
    assert "store_log" not in capsys.readouterr().out


def test_a_write_that_was_cut_off_in_a_log_that_began_anew_is_no_damage(
    logged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The frames of the older log are behind it, not those of a later write."""
    kept = begin_log_anew(logged, *(f"DELETE FROM records WHERE key = '{key}'" for key in ("05", "06")))  # noqa: S608
    wal = kept["-wal"]
    salts, frame_bytes = bytes(wal[16:24]), 24 + int.from_bytes(wal[8:12], "big")
    present = [at for at in range(32, len(wal), frame_bytes) if wal[at + 8 : at + 16] == salts]
    assert len(wal) > present[-1] + frame_bytes, "older frames are left behind"
    wal[present[-1] + 100 : present[-1] + 1100] = b"\xaa" * 1000
    put_back(logged, kept)
    capsys.readouterr()
    assert {f"{number:02}" for number in range(40)} - {change.key for change in read_all(logged)} == {"05"}
    said = capsys.readouterr().out
    assert ("store_log_cut" in said, "store_log_damaged" in said) == (True, False)


def test_a_damaged_log_that_cannot_be_copied_keeps_nobody_from_starting(
    logged: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is what leaves such logs."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    os.truncate(f"{logged}-wal", os.path.getsize(f"{logged}-wal") - 2000)
    monkeypatch.setattr(shutil, "copyfile", refuse)
    assert len(read_all(logged)) == 39
    assert "none: No space left on device" in capsys.readouterr().out
    assert not os.path.exists(f"{logged}-wal.damaged-1")
