"""What Slurm's word means for a job whose step ended without one."""

from __future__ import annotations

import pytest

from cpumond.host.executor import keeper
from cpumond.host.executor.keeper_link import KeptJob
from cpumond.host.executor.slurm.commands import SlurmJob
from cpumond.host.executor.slurm.job import Job, Record, explain_loss, is_unclear

LOST = KeptJob("j", "ended", finish_time=5.0, problem=keeper.LOST)


@pytest.mark.parametrize(
    ("state", "status", "expected"),
    [
        ("FAILED", 9, (None, 9, "", 0)),
        ("FAILED", 3 << 8, (3, None, "", 0)),
        ("COMPLETED", 0, (0, None, "", 0)),
        ("OUT_OF_MEMORY", 9, (None, 9, "", 1)),
        ("CANCELLED", 15, (None, 15, "", 0)),
        ("CANCELLED", 0, (None, None, "it was cancelled in Slurm", 0)),
        ("NODE_FAIL", 0, (None, None, "Slurm ended it: NODE_FAIL (why)", 0)),
        ("TIMEOUT", 15, (None, None, "Slurm ended it: TIMEOUT (why)", 0)),
    ],
)
def test_how_it_ended(state, status, expected):
    found = explain_loss(LOST, SlurmJob(1, state, status, 0, "why", "j"))
    assert (found.exit_code, found.signal, found.problem, found.oom_kills) == expected
    assert found.finish_time == 5.0


def test_what_slurm_has_forgotten_stays_lost():
    assert explain_loss(LOST, None) == LOST


def test_slurm_is_asked_only_about_jobs_that_say_nothing():
    job = Job(Record("j", "/d", 1, "t", 0, 0))
    assert is_unclear(job)
    job.busy = True
    assert not is_unclear(job)
    job.busy, job.is_claimed = False, True
    assert not is_unclear(job)
    job.lost = LOST
    assert is_unclear(job)
    job.result = LOST
    assert not is_unclear(job)
