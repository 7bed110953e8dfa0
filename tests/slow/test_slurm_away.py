"""The executor of kind "slurm", and jobs that it hands to a slurmctld that is away or dies, with a real Slurm."""

from __future__ import annotations

import time

import pytest
import test_slurm_executor
from test_slurm_executor import count_runs, read_runs, save_state
from waiting import wait_until

from cpumond.host.executor.model import Ended, NotStarted

cluster, rig = test_slurm_executor.cluster, test_slurm_executor.rig

pytestmark = pytest.mark.cgroup


def test_a_job_waits_for_slurmctld_and_starts_once(rig):
    path, note = count_runs(rig)
    save_state(rig.cluster)
    rig.cluster.kill("slurmctld")
    job_id = rig.shell(note + "exit 3")
    deadline_s = time.monotonic() + 12.0  # so long sbatch itself tries
    while time.monotonic() < deadline_s:
        rig.poll()
        assert rig.events == []
    rig.cluster.start("slurmctld")
    assert rig.wait(Ended, job_id).exit_code == 3
    assert (read_runs(path), len(rig.list_slurm(job_id))) == (1, 1)


def test_a_job_that_is_killed_before_slurmctld_comes_back_never_runs(rig):
    path, note = count_runs(rig)
    save_state(rig.cluster)
    rig.cluster.kill("slurmctld")
    job_id = rig.shell(note)
    rig.executor.kill(job_id)
    event = rig.wait(NotStarted, job_id)
    assert not event.node_fault
    rig.cluster.start("slurmctld")
    after = rig.shell("exit 5")
    assert rig.wait(Ended, after).exit_code == 5
    rig.wait_idle()
    assert read_runs(path) == 0


def test_slurmctld_is_killed_just_when_it_has_taken_a_job(rig):
    path, note = count_runs(rig)
    save_state(rig.cluster)
    job_ids = [rig.shell(note + "exit 3") for _ in range(5)]
    wait_until(lambda: rig.poll(0.0) or any(rig.list_slurm(job_id) for job_id in job_ids), "Slurm has one")
    rig.cluster.kill("slurmctld")
    rig.cluster.start("slurmctld")
    # It may have forgotten some: those have not run, and the scheduler hears of it.
    events = [rig.wait_over(job_id) for job_id in job_ids]
    ended = [event for event in events if isinstance(event, Ended)]
    assert {event.exit_code for event in ended} <= {3}
    assert all(event.node_fault for event in events if isinstance(event, NotStarted))
    rig.wait_idle()
    assert read_runs(path) == len(ended)
