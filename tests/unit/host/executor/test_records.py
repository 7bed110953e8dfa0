"""The records of jobs on disk."""

import os
import stat
from pathlib import Path

import pytest

from cpumond.core.errors import CpumondError
from cpumond.host.executor.records import Record, Records


def make(job_id: str, limit: int = 0) -> Record:
    return Record(job_id, "/jobs", limit, [])


@pytest.fixture
def records(tmp_path: Path) -> Records:
    made = Records(str(tmp_path / "records"))
    made.make()
    return made


def test_what_is_stored_is_loaded_by_the_next_run(records):
    records.store("a", make("a", 1))
    records.store("b", make("b", 2))
    records.store("a", make("a", 3))
    records.remove("b")
    assert Records(records.directory).load() == {"a": make("a", 3)}
    path = os.path.join(records.directory, "a.json")
    assert [stat.S_IMODE(os.stat(each).st_mode) for each in (records.directory, path)] == [0o700, 0o600]


def test_what_is_no_record_is_removed(records):
    for name, text in ("a.json", '{"job_id":'), ("b.json", '{"job_id":"b","directory":1}'), ("c.json.new", "{}"):
        Path(records.directory, name).write_text(text)
    records.store("d", make("d"))
    assert records.load() == {"d": make("d")}
    assert os.listdir(records.directory) == ["d.json"]


def test_the_name_of_the_file_is_the_id(records):
    Path(records.directory, "a.json").write_text('{"job_id":"../b","directory":"/jobs","max_log_bytes":0,"procs":[]}')
    assert records.load() == {"a": make("a")}


def test_a_directory_that_was_removed_is_made_anew_once(records):
    assert not records.make_again()
    os.rmdir(records.directory)
    assert records.make_again()
    assert not records.make_again()


def test_where_there_can_be_no_directory(tmp_path):
    (tmp_path / "file").touch()
    records = Records(str(tmp_path / "file" / "records"))
    with pytest.raises(CpumondError, match="runtime_dir"):
        records.make()
    with pytest.raises(CpumondError, match="runtime_dir"):
        records.load()
    with pytest.raises(OSError, match="Not a directory"):
        records.store("a", make("a"))
    records.store_if_possible("a", make("a"))
    records.remove("a")
    assert not records.make_again()
