"""What is made at the start to run the scheduler's jobs."""

import contextlib
import getpass

import pytest

from cpumond.agent.config import finish_config
from cpumond.agent.main import _make_assigned
from cpumond.host.cgroup.mounts import Hierarchies


@pytest.mark.parametrize("kind", ["none", "cgroup"])
def test_an_agent_that_runs_jobs_removes_what_it_had_of_those_of_slurm(tmp_path, kind):
    (tmp_path / "run/slurm-jobs").mkdir(parents=True)
    executor = {"kind": kind, "user": getpass.getuser()}
    config = finish_config({"runtime_dir": str(tmp_path / "run"), "executor": executor}, "")
    assigned = _make_assigned(config, Hierarchies(2, str(tmp_path), str(tmp_path), None, str(tmp_path)))
    with contextlib.closing(assigned.executor) if assigned else contextlib.nullcontext():
        assert (tmp_path / "run/slurm-jobs").exists() == (assigned is None) == (kind == "none")
