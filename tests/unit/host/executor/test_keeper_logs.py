"""What a keeper makes of the bytes in a FIFO, and what is read of it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from cpumond.host.executor.keeper.logs import StreamLog, read_log


@pytest.fixture
def open_log(tmp_path: Path):
    opened: list[StreamLog] = []

    def make(max_bytes: int, name: str = "stdout") -> tuple[StreamLog, Callable[[bytes], None]]:
        log = StreamLog(str(tmp_path), name, max_bytes)
        log.open()
        opened.append(log)
        fd = os.open(log.fifo_path, os.O_RDWR)

        def write(data: bytes) -> None:
            os.write(fd, data)
            while log.pump():
                pass

        return log, write

    yield make
    for log in opened:
        log.close()


def sizes(directory: Path) -> int:
    return sum((directory / name).stat().st_size for name in ("stdout", "stdout.1") if (directory / name).exists())


def test_nothing_written_is_an_empty_log(tmp_path, open_log):
    open_log(4096)
    assert read_log(str(tmp_path), "stdout", 100) == (b"", 0)
    assert read_log(str(tmp_path), "stderr", 100) is None


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=300), max_size=20), cap=st.integers(1, 257), tail=st.integers(0, 400)
)
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_pieces(tmp_path_factory, pieces, cap, tail):
    directory = tmp_path_factory.mktemp("log")
    log = StreamLog(str(directory), "stdout", cap)
    log.open()
    fd = os.open(log.fifo_path, os.O_RDWR)
    written = b""
    try:
        for piece in pieces:
            os.write(fd, piece)
            written += piece
            assert log.pump()
            assert sizes(directory) <= max(cap, 2)
        content, total = read_log(str(directory), "stdout", tail)
        assert total == len(written)
        assert written.endswith(content)
        assert len(content) >= min(tail, cap // 2, len(written))
    finally:
        os.close(fd)
        log.close()
    assert not os.path.exists(log.fifo_path)


def test_another_keeper_goes_on_where_the_first_was_killed(tmp_path, open_log):
    first, write = open_log(64)
    write(b"a" * 100)
    second, write = open_log(64)
    write(b"b" * 20)
    content, total = read_log(str(tmp_path), "stdout", 1000)
    assert (content[-21:], total) == (b"a" + b"b" * 20, 120)
    assert first.fifo != second.fifo


def test_a_count_that_was_lost_is_made_from_what_is_there(tmp_path, open_log):
    _, write = open_log(64)
    write(b"a" * 100)
    (tmp_path / "stdout.total").unlink()
    assert read_log(str(tmp_path), "stdout", 0)[1] == sizes(tmp_path)
    open_log(64)
    assert read_log(str(tmp_path), "stdout", 0)[1] == sizes(tmp_path)


def test_what_is_in_the_fifo_at_the_end_is_taken(tmp_path, open_log):
    log, _ = open_log(4096)
    fd = os.open(log.fifo_path, os.O_RDWR)
    os.write(fd, b"last words\n")
    os.close(fd)
    log.close()
    assert read_log(str(tmp_path), "stdout", 100) == (b"last words\n", 11)
    log.remove()
    assert os.listdir(tmp_path) == []


def test_a_place_without_room_loses_the_data_only(tmp_path, open_log):
    (tmp_path / "stdout").symlink_to("/dev/full")
    _, write = open_log(4096)
    write(b"x" * 5000)
    (tmp_path / "stdout").unlink()
    assert (tmp_path / "stdout.total").read_text().strip().lstrip("0") == "5000"


def test_a_log_that_somebody_removed_is_written_on(tmp_path, open_log):
    _, write = open_log(64)
    write(b"a" * 30)
    (tmp_path / "stdout").unlink()
    write(b"b" * 40)
    write(b"c" * 30)
    content, total = read_log(str(tmp_path), "stdout", 10)
    assert (content, total) == (b"c" * 10, 100)
