"""The store under SIGKILL at any moment, and on a disk that is full, read-only or limited."""

import contextlib
import os
import random
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpumond.scheduler.store import Change
from cpumond.scheduler.store.sqlite import SqliteStore, open_sqlite_store

KILLS = 120
SLOTS = 10
KEPT = 40
"""Batches whose own record is still there; the one before is taken away in the same batch."""

LOG_BYTES = 20_000
"""Of the log, which is cut to that after each tenth batch."""

WRITER = """
import os, random, sys
from cpumond.scheduler.store import Change, Entry
from cpumond.scheduler.store.sqlite import open_sqlite_store

path, slots, kept, log_bytes = sys.argv[1], *map(int, sys.argv[2:])
store = open_sqlite_store(path)
number = max((int(key) for kind, key, _ in store.load() if kind == "batch"), default=0)
os.write(1, b"0\\n")
while True:
    number += 1
    value = b"%d " % number + bytes(random.randrange(20) ** 3)
    changes = [Change("slot", str(slot), value) for slot in range(slots)]
    changes += [Change("batch", str(number), b""), Change("batch", str(number - kept), None)]
    entries = [Entry(float(number), (name, f"{name}:{number % 5}"), b"%d" % number) for name in ("first", "second")]
    store.write(changes, entries)
    os.write(1, b"%d\\n" % number)
    if number % 10 == 0:
        store.cut_log(number - 100.0, log_bytes)
"""


def check(path: str, acknowledged: int, before: int) -> int:
    """The number of the last batch; it is whole, and nothing that was acknowledged is missing."""
    with contextlib.closing(open_sqlite_store(path)) as store:
        records = list(store.load())
        check_log(store)
        log = store.read_log(limit=1)
    slots = [value.split(b" ")[0] for kind, _, value in records if kind == "slot"]
    batches = {int(key) for kind, key, _ in records if kind == "batch"}
    last = max(batches, default=0)
    assert slots == [b"%d" % last] * (SLOTS if last else 0), "a part of a batch"
    assert batches == set(range(max(last - KEPT, 0) + 1, last + 1)), "a batch is missing"
    assert max(acknowledged, before) <= last <= max(acknowledged, before) + 1
    assert [entry.value for _, entry in log] == [b"%d" % last] * bool(last), "the log does not tell of the last batch"
    return last


def check_log(store: SqliteStore) -> None:
    """Each batch has both its entries, up to those that were dropped, and is found by its subjects."""
    log = store.read_log(limit=10_000)
    assert [number for number, _ in log] == list(range(log[0][0], log[-1][0] - 1, -1)) if log else True
    for name in ("first", "second"):
        mine = [(number, entry) for number, entry in log if entry.subjects[0] == name]
        values = [int(entry.value) for _, entry in mine]
        assert values == list(range(max(values, default=0), min(values, default=1) - 1, -1)), "an entry is missing"
        assert store.read_log([name], limit=10_000) == mine
        for rest in range(5):
            expected = [each for each in mine if int(each[1].value) % 5 == rest]
            assert store.read_log([name, f"{name}:{rest}"], limit=10_000) == expected


def test_a_killed_writer_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    path = str(tmp_path / "state" / "scheduler.db")
    rng = random.Random()
    last = unacknowledged = 0
    for round_number in range(KILLS):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, path, str(SLOTS), str(KEPT), str(LOG_BYTES)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            # Every sixth is killed while it starts and opens, the others after some batches: any moment is meant.
            text = b""
            if round_number % 6:
                wanted = rng.randrange(1, 60)
                while text.count(b"\n") < wanted:
                    chunk = os.read(writer.stdout.fileno(), 4096)
                    assert chunk, "the writer ended by itself"
                    text += chunk
                time.sleep(rng.uniform(0.0, 0.002))
            else:
                select.select([writer.stdout], [], [], rng.uniform(0.02, 0.2))
            writer.kill()
            text += writer.stdout.read()
        lines = text.split(b"\n")
        assert lines[-1] == b"", "an acknowledgement is one write"
        acknowledged = int(lines[-2]) if len(lines) > 1 else 0
        before, last = last, check(path, acknowledged, last)
        unacknowledged += last > max(acknowledged, before)
    assert last > KILLS
    print(f"{KILLS} kills, {last} batches, {unacknowledged} written but not acknowledged")


FILL = """
import os, resource, sys
from cpumond.scheduler.store import Change, Entry, StoreError
from cpumond.scheduler.store.sqlite import open_sqlite_store

path, limit = sys.argv[1], int(sys.argv[2])
store = open_sqlite_store(path)
store.write([Change("kept", str(number), b"x" * 1000) for number in range(50)])
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
written = 0
try:
    while written < 100:
        changes = [Change("fill", f"{written}-{number}", os.urandom(1000)) for number in range(50)]
        store.write(changes, [Entry(float(written), ("fill",), bytes(500))])
        written += 1
except StoreError as error:
    print(error)
assert written < 100, "it never became full"
expected = {("kept", str(number)) for number in range(50)}
expected |= {("fill", f"{batch}-{number}") for batch in range(written) for number in range(50)}
assert {(kind, key) for kind, key, _ in store.load()} == expected
assert [entry.at for _, entry in store.read_log(["fill"], limit=200)] == list(range(written - 1, -1, -1))
# What takes nothing more than there is can be written as soon as there is room again.
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
else:
    os.unlink(os.path.join(os.path.dirname(path), "ballast"))
store.write([Change("after", "1", b"x" * 1000)])
expected.add(("after", "1"))
store.close()
store = open_sqlite_store(path)
assert {(kind, key) for kind, key, _ in store.load()} == expected
assert len(store.read_log(["fill"], limit=200)) == written
store.close()
print("whole")
"""


def run(program: str, *arguments: str, prefix: tuple[str, ...] = ()) -> list[str]:
    done = subprocess.run(
        [*prefix, sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_file_at_its_limit_of_size(tmp_path: Path) -> None:
    path = str(tmp_path / "scheduler.db")
    sentence, whole = run(FILL, path, str(1_000_000))
    assert sentence.startswith(f"{path}: cannot write: ")
    assert "look for disk errors and size limits" in sentence or "free space" in sentence
    assert whole == "whole"


@pytest.fixture
def own_mounts() -> tuple[str, ...]:
    """What starts a command whose mounts nobody else sees."""
    prefix = ("unshare", "--mount", "--propagation", "private")
    probe = [*prefix, "mount", "-t", "tmpfs", "none", "/mnt"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a mount namespace with a tmpfs in it (run as root)")
    return prefix


def in_tmpfs(own_mounts: tuple[str, ...], directory: Path, *more: str) -> tuple[str, ...]:
    """A prefix: ``directory`` is a file system of 2 MB, in which ``more`` was done."""
    steps = [f'mount -t tmpfs -o size=2m none "{directory}"', *more, 'exec "$@"']
    return (*own_mounts, "sh", "-ec", "\n".join(steps), "sh")


def test_a_full_disk(tmp_path: Path, own_mounts: tuple[str, ...]) -> None:
    path = str(tmp_path / "scheduler.db")
    prefix = in_tmpfs(own_mounts, tmp_path, f'head -c 500000 /dev/zero > "{tmp_path}/ballast"')
    sentence, *told, whole = run(FILL, path, "0", prefix=prefix)
    # A write that found no room may have left its beginning in the log.
    assert all("store_log_cut" in line for line in told)
    assert sentence == f"{path}: cannot write: database or disk is full (SQLITE_FULL); free space on its file system"
    assert whole == "whole"


ACT = """
import sys
from cpumond.scheduler.store import StoreError
from cpumond.scheduler.store import sqlite
try:
    getattr(sqlite, sys.argv[2])(sys.argv[1])
except StoreError as error:
    print(error)
else:
    print("done")
"""
ACTIONS = ("open_sqlite_store", "set_aside")


def test_no_room_for_a_new_database(tmp_path: Path, own_mounts: tuple[str, ...]) -> None:
    path = str(tmp_path / "scheduler.db")
    fill = f'head -c 3000000 /dev/zero > "{tmp_path}/ballast" 2>/dev/null || true'
    (sentence,) = run(ACT, path, "open_sqlite_store", prefix=in_tmpfs(own_mounts, tmp_path, fill))
    assert sentence.startswith(f"{path}: cannot ")
    assert "No space left on device; free space" in sentence


@pytest.mark.parametrize("action", ACTIONS)
def test_a_read_only_file_system(tmp_path: Path, own_mounts: tuple[str, ...], action: str) -> None:
    path = str(tmp_path / "scheduler.db")
    steps = (f'touch "{path}"', f'mount -o remount,ro "{tmp_path}"')
    (sentence,) = run(ACT, path, action, prefix=in_tmpfs(own_mounts, tmp_path, *steps))
    assert sentence.startswith(f"{path}: cannot be opened: ")
    assert "Read-only file system; set `state_dir`" in sentence


@pytest.fixture
def without_rights() -> tuple[str, ...]:
    """What starts a command that file rights hold for, also when the tests run as root."""
    if os.geteuid() != 0:
        return ()
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv of util-linux, or to run as another user than root")
    return ("setpriv", "--bounding-set", "-all", "--inh-caps", "-all", "--securebits", "+noroot")


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    path = tmp_path / "state" / "scheduler.db"
    with contextlib.closing(open_sqlite_store(str(path))) as store:
        store.write([Change("k", "a", b"1")])
    return path


@pytest.mark.parametrize("action", ACTIONS)
def test_a_directory_without_rights(filled: Path, without_rights: tuple[str, ...], action: str) -> None:
    os.unlink(f"{filled}.lock")
    os.chmod(filled.parent, 0o500)
    try:
        (sentence,) = run(ACT, str(filled), action, prefix=without_rights)
    finally:
        os.chmod(filled.parent, 0o700)
    assert sentence.startswith(f"{filled}: cannot be opened: {filled}.lock: Permission denied; set `state_dir`")


@pytest.mark.parametrize("mode", [0o000, 0o400], ids=oct)
def test_a_database_without_rights(filled: Path, without_rights: tuple[str, ...], mode: int) -> None:
    os.chmod(filled, mode)
    (sentence,) = run(ACT, str(filled), "open_sqlite_store", prefix=without_rights)
    assert sentence == f"{filled}: cannot be read and written: Permission denied; fix its permissions"
    os.chmod(filled, 0o600)
    with contextlib.closing(open_sqlite_store(str(filled))) as store:
        assert list(store.load()) == [("k", "a", b"1")]
