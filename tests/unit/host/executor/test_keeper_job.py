"""What the keeper holds of a job: when a guest is gone, and what is left on disk of its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cpumond.host.executor.keeper import RESULT_NAME
from cpumond.host.executor.keeper.job import Guest, Job, is_slurmstepd
from cpumond.host.executor.keeper_link import read_result

ORDER = {"token": "t", "uid": 0, "mounts": {}, "limits": []}


def make_job(directory: Path) -> Job:
    return Job({"id": "j", "directory": str(directory), "max_log_bytes": 4096, "procs": ["/c/a/cgroup.procs"]})


def test_a_guest_is_gone_with_its_step_and_cgroups(tmp_path):
    guest = Guest(ORDER)
    place = tmp_path / "job_5"
    guest.places = [str(place)]
    assert guest.is_gone(0.0), "Slurm has removed it"
    guest.pidfd = 3
    assert not guest.is_gone(0.0), "its step lives"


def test_an_empty_cgroup_that_slurm_leaves_holds_nobody_up_for_long(tmp_path):
    guest = Guest(ORDER)
    guest.places = [str(tmp_path)]
    (tmp_path / "cgroup.procs").touch()
    assert [guest.is_gone(now_s) for now_s in (10.0, 10.5, 11.0)] == [False, False, True]


def test_one_with_a_process_of_the_job_is_not_gone(tmp_path):
    guest = Guest(ORDER)
    guest.places = [str(tmp_path)]
    (tmp_path / "cgroup.procs").write_text("1\n")
    assert [guest.is_gone(now_s) for now_s in (10.0, 20.0)] == [False, False]
    assert not is_slurmstepd(1)


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
