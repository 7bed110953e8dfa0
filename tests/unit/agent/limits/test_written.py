"""What was written last, on record for the process after this one."""

import os
from pathlib import Path

import pytest

from cpumond.agent.limits import first_aid, written
from cpumond.agent.limits.written import LimitLog, append_written, read_written
from cpumond.core.errors import CpumondError
from cpumond.host.cgroup.settings import CpuSettings, Written

FULL, HALF, LOW = CpuSettings(None, 100_000, None, 1024), CpuSettings(50_000, 100_000), CpuSettings(1000, 500_000)


@pytest.fixture
def log(tmp_path: Path) -> LimitLog:
    return LimitLog(str(tmp_path / written.WRITTEN_FILE))


def test_the_newest_change_of_each_cgroup_is_read_back(log: LimitLog) -> None:
    log.note(7, FULL, HALF)
    log.note(8, FULL, HALF)
    log.note(7, HALF, LOW)
    append_written(log.path, 9, LOW, HALF)
    assert read_written(log.path) == {7: Written(HALF, LOW), 8: Written(FULL, HALF), 9: Written(LOW, HALF)}


def test_first_aid_reads_the_same(log: LimitLog) -> None:
    log.note(7, FULL, LOW)
    assert first_aid.WRITTEN_FILE == written.WRITTEN_FILE
    assert first_aid._read_written(log.path) == {7: [(-1, 100_000), (1000, 500_000)]}


def test_a_change_that_was_not_written_in_full_is_one_that_was_not_made(log: LimitLog) -> None:
    log.note(7, FULL, HALF)
    with open(log.path, "ab") as file:
        file.write(b"7 1 100")
    assert read_written(log.path) == {7: Written(FULL, HALF)}


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\n", b"7 1\n", b"7 a b c d e f\n", b"\n", b"7 1 2 3 4 5 6 7\n", b"\0" * 9 + b"\n"]
)
def test_a_damaged_file_says_nothing_about_any_cgroup(log: LimitLog, content: bytes) -> None:
    log.note(7, FULL, HALF)
    with open(log.path, "ab") as file:
        file.write(content)
    assert read_written(log.path) == {}
    assert first_aid._read_written(log.path) == {}


def test_a_file_that_grows_is_written_anew_with_the_newest(log: LimitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "MAX_BYTES", 1000)
    for _ in range(200):
        log.note(7, FULL, HALF)
        log.note(8, HALF, LOW)
    assert os.path.getsize(log.path) < 2000
    assert read_written(log.path) == {7: Written(FULL, HALF), 8: Written(HALF, LOW)}


def test_a_change_that_is_not_noted_leaves_no_file_to_mislead(log: LimitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log.note(7, FULL, HALF)
    with monkeypatch.context() as broken:
        broken.setattr(written.os, "write", lambda _, data: len(data) - 1)
        with pytest.raises(CpumondError, match="free space"):
            log.note(7, HALF, LOW)
    assert read_written(log.path) == {}
    log.note(8, FULL, HALF)
    assert read_written(log.path) == {7: Written(HALF, LOW), 8: Written(FULL, HALF)}


def test_a_file_that_was_removed_is_written_again(log: LimitLog) -> None:
    log.note(7, FULL, HALF)
    os.unlink(log.path)
    log.check()
    assert read_written(log.path) == {7: Written(FULL, HALF)}


def test_the_next_run_takes_over_what_it_still_needs(log: LimitLog) -> None:
    log.note(7, FULL, HALF)
    log.note(8, FULL, HALF)
    again = LimitLog(log.path)
    again.load({8})
    assert again.records == read_written(log.path) == {8: Written(FULL, HALF)}
