"""What the keeper holds of a job: what is left on disk of its end."""

import json
from pathlib import Path

import pytest

from cpumond.host.executor.keeper import RESULT_NAME
from cpumond.host.executor.keeper.job import KeeperJob
from cpumond.host.executor.keeper_link import read_result


def make_job(directory: Path) -> KeeperJob:
    return KeeperJob({"id": "j", "directory": str(directory), "max_log_bytes": 4096, "procs": ["/c/a/cgroup.procs"]})


@pytest.mark.parametrize(
    ("problem", "own", "state"), [("", True, "ended"), ("why", True, "failed"), ("lost", False, "ended")]
)
def test_the_end_of_a_job_is_found_on_disk(tmp_path, problem, own, state):
    job = make_job(tmp_path)
    job.problem, job.own, job.exit_code, job.finish_time = problem, own, 3, 5.0
    job.write_result()
    found = read_result(str(tmp_path))
    assert found is not None
    assert (found.id, found.state, found.problem, found.exit_code, found.finish_time) == ("j", state, problem, 3, 5.0)
    assert json.loads((tmp_path / RESULT_NAME).read_text())["state"] == state
    assert [path.name for path in tmp_path.iterdir()] == [RESULT_NAME]


def test_without_a_place_on_disk_the_keeper_goes_on(tmp_path):
    make_job(tmp_path / "removed").write_result()
    assert not (tmp_path / "removed").exists()
