"""The records of jobs on disk."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from cpumond.core.errors import CpumondError
from cpumond.host.executor.records import Records


class Kept(msgspec.Struct):
    job_id: str
    number: int = 0


@pytest.fixture
def records(tmp_path: Path) -> Records[Kept]:
    made = Records(str(tmp_path / "records"), Kept)
    made.make()
    return made


def test_what_is_stored_is_loaded_by_the_next_run(records):
    records.store("a", Kept("a", 1))
    records.store("b", Kept("b", 2))
    records.store("a", Kept("a", 3))
    records.remove("b")
    assert Records(records.directory, Kept).load() == {"a": Kept("a", 3)}
    path = os.path.join(records.directory, "a.json")
    assert [stat.S_IMODE(os.stat(each).st_mode) for each in (records.directory, path)] == [0o700, 0o600]


def test_what_is_no_record_is_removed(records):
    for name, text in ("a.json", '{"job_id":'), ("b.json", '{"job_id":"b","number":"x"}'), ("c.json.new", "{}"):
        Path(records.directory, name).write_text(text)
    records.store("d", Kept("d"))
    assert records.load() == {"d": Kept("d")}
    assert os.listdir(records.directory) == ["d.json"]


def test_the_name_of_the_file_is_the_id(records):
    Path(records.directory, "a.json").write_text('{"job_id":"../b"}')
    assert records.load() == {"a": Kept("a")}


def test_a_directory_that_was_removed_is_made_anew_once(records):
    assert not records.make_again()
    os.rmdir(records.directory)
    assert records.make_again()
    assert not records.make_again()


def test_where_there_can_be_no_directory(tmp_path):
    (tmp_path / "file").touch()
    records = Records(str(tmp_path / "file" / "records"), Kept)
    with pytest.raises(CpumondError, match="runtime_dir"):
        records.make()
    with pytest.raises(CpumondError, match="runtime_dir"):
        records.load()
    with pytest.raises(OSError, match="Not a directory"):
        records.store("a", Kept("a"))
    records.store_if_possible("a", Kept("a"))
    records.remove("a")
    assert not records.make_again()
