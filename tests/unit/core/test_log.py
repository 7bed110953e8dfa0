"""Records: which format where, what they hold, and that logging itself never breaks the agent."""

import io
import json
import logging
import math
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import structlog

from cpumond.core.log import choose_format, configure_logging


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    handlers = logging.getLogger().handlers[:]
    yield
    logging.getLogger().handlers[:] = handlers
    structlog.reset_defaults()


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def read_records(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def fail() -> None:
    private = "not for the log"
    raise RuntimeError(f"broken for {len(private)} reasons")


@pytest.mark.parametrize("wanted", ["json", "console", "journald"])
def test_a_format_that_is_asked_for_is_taken(wanted: str, stream: io.StringIO):
    assert choose_format(wanted, {}, stream) == wanted


def test_auto_is_what_can_be_read_where_it_goes(tmp_path: Path, stream: io.StringIO):
    """JOURNAL_STREAM is inherited by children whose stderr is elsewhere: it counts for the journal's own stream."""
    ours, theirs = os.openpty()
    with open(theirs, "w") as terminal, open(tmp_path / "log", "w") as file, open(tmp_path / "own", "w") as own:
        status = os.fstat(own.fileno())
        journal = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        assert choose_format("auto", {}, terminal) == "console"
        assert choose_format("auto", journal, own) == "journald"
        assert [choose_format("auto", given, file) for given in ({}, journal)] == ["json"] * 2
    assert [choose_format("auto", given, stream) for given in ({}, journal)] == ["json"] * 2, "no descriptor behind it"
    os.close(ours)


def test_a_json_record_has_event_level_time_and_fields(stream: io.StringIO):
    configure_logging("info", "json", stream)
    fields = {"job_id": "j", "old_cores": 4.0, "new_cores": 0.1 + 0.2}
    structlog.get_logger("x").info("limit_changed", operation_id=None, **fields)
    (record,) = read_records(stream)
    assert datetime.fromisoformat(str(record.pop("timestamp"))).tzinfo is not None
    assert record == {"event": "limit_changed", "level": "info", **fields}


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_the_level_filters(level: str, stream: io.StringIO):
    levels = ["debug", "info", "warning", "error"]
    configure_logging(level, "json", stream)
    for each in levels:
        getattr(structlog.get_logger("x"), each)(each)
    assert [record["event"] for record in read_records(stream)] == levels[levels.index(level) :]


def test_a_reload_changes_the_level_of_loggers_in_use(stream: io.StringIO):
    log = structlog.get_logger("x")
    configure_logging("error", "json", stream)
    log.info("unheard")
    configure_logging("info", "json", stream)
    log.info("heard")
    assert [record["event"] for record in read_records(stream)] == ["heard"]


def test_an_exception_is_one_record(stream: io.StringIO):
    configure_logging("info", "json", stream)
    try:
        fail()
    except RuntimeError:
        structlog.get_logger("x").exception("tick_failed")
    (record,) = read_records(stream)
    assert (record["event"], record["level"]) == ("tick_failed", "error")
    assert "RuntimeError: broken for 15 reasons" in str(record["exception"])
    assert "not for the log" not in str(record["exception"])


def test_a_console_line_is_readable_and_shows_no_variables(stream: io.StringIO):
    configure_logging("info", "console", stream)
    log = structlog.get_logger("x")
    log.info("limit_changed", job_id="j", new_cores=1.5)
    try:
        fail()
    except RuntimeError:
        log.exception("tick_failed")
    first, *rest = stream.getvalue().splitlines()
    assert [word for word in ("info", "limit_changed", "job_id=j", "new_cores=1.5") if word not in first] == []
    assert "\x1b" not in stream.getvalue(), "colours are for terminals"
    assert rest[-1] == "RuntimeError: broken for 15 reasons"
    assert "not for the log" not in stream.getvalue()


@pytest.mark.parametrize("wanted", ["json", "console"])
def test_no_text_of_others_moves_the_cursor_or_begins_a_line(stream: io.StringIO, wanted: str):
    configure_logging("info", wanted, stream)
    odd = "a\x1b[31m\u202eabc\r\n2026-11-28 [info] fake=line \x9b31m\u2028\u0085end\x0b"
    structlog.get_logger("x").info("event", value=odd, **{"na\x9bme": odd}, several=(odd, {odd: odd}))
    assert stream.getvalue()[-1] == "\n"
    assert stream.getvalue()[:-1].isprintable()


@pytest.mark.parametrize(
    "odd",
    ["two\nlines", 'a "quote"', "задача", "raw\udcff", math.inf, math.nan, b"\xff", ValueError("x"), {1: "\udcff"}],
)
@pytest.mark.parametrize("wanted", ["json", "console", "journald"])
def test_any_value_can_be_logged(odd: object, wanted: str, tmp_path: Path):
    """A record that cannot be written must not break the tick that wrote it."""
    with open(tmp_path / "log", "w", errors="backslashreplace") as file:
        configure_logging("info", wanted, file)
        structlog.get_logger("x").info("event", value=odd)
    lines = (tmp_path / "log").read_text().splitlines()
    if wanted == "json":
        (line,) = lines
        assert json.loads(line)["event"] == "event"


def test_each_record_is_one_write_of_one_line(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch):
    """Two threads log; lines do not mix."""
    pieces: list[str] = []
    monkeypatch.setattr(stream, "write", pieces.append)
    configure_logging("info", "json", stream)
    structlog.get_logger("x").info("a")
    structlog.get_logger("x").info("b")
    assert [(piece.count("\n"), piece[-1]) for piece in pieces] == [(1, "\n")] * 2


def test_a_full_disk_does_not_break_the_agent():
    # Unbuffered, so that nothing is left for the end of the file.
    with io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True) as full:
        configure_logging("info", "json", full)
        structlog.get_logger("x").info("event")


def test_a_closed_pipe_does_not_break_the_agent():
    read_end, write_end = os.pipe()
    os.close(read_end)
    with io.TextIOWrapper(open(write_end, "wb", buffering=0), write_through=True) as pipe:
        configure_logging("info", "json", pipe)
        structlog.get_logger("x").info("event")
    structlog.get_logger("x").info("the stream itself is closed now")


def test_libraries_log_like_the_agent(stream: io.StringIO):
    configure_logging("info", "json", stream)
    configure_logging("info", "json", stream)  # a reload adds no second record
    library = logging.getLogger("test.library")
    library.info("nobody asked")
    library.warning("something in %s", "the library")
    try:
        fail()
    except RuntimeError:
        library.exception("Exception in application\n")
    warning, error = read_records(stream)
    del warning["timestamp"]
    assert warning == {
        "event": "library_message", "level": "warning", "library": "test.library",
        "text": "something in the library",
    }  # fmt: skip
    assert error["text"] == "Exception in application"
    assert "RuntimeError: broken" in str(error["exception"])


def test_odd_levels_of_libraries_are_rounded_down(stream: io.StringIO):
    configure_logging("info", "json", stream)
    logging.getLogger("test.library").log(35, "notable")
    logging.getLogger("test.library").log(99, "the end")
    assert [record["level"] for record in read_records(stream)] == ["warning", "critical"]


def test_journal_fields(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO):
    """MESSAGE is readable, each field is one of its own; nothing goes to stderr as well."""
    from cysystemd import journal

    entries: list[dict[str, object]] = []
    monkeypatch.setattr(journal, "send", lambda **fields: entries.append(fields))
    configure_logging("info", "journald", stream)
    log = structlog.get_logger("x")
    log.warning("foreign_write", job_id="j 1", new_cores=1.5, **{"odd-name.x": "raw\udcff"})
    try:
        fail()
    except RuntimeError:
        log.exception("tick_failed")
    warning, error = entries
    assert warning == {
        "message": "foreign_write job_id=j 1 new_cores=1.5 odd-name.x=raw\\udcff", "priority": 4,
        "syslog_identifier": "cpumond", "CPUMOND_EVENT": "foreign_write", "CPUMOND_JOB_ID": "j 1",
        "CPUMOND_NEW_CORES": "1.5", "CPUMOND_ODD_NAME_X": "raw\\udcff",
    }  # fmt: skip
    assert error["priority"] == 3
    assert str(error["message"]).startswith("tick_failed\nTraceback")
    assert stream.getvalue() == ""


def test_a_journal_that_is_away_does_not_break_the_agent(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO):
    from cysystemd import journal

    def refuse(**_: object) -> None:
        raise RuntimeError("no journal")

    monkeypatch.setattr(journal, "send", refuse)
    configure_logging("info", "journald", stream)
    structlog.get_logger("x").info("event")
