"""What the executor of kind "slurm" makes of Slurm's word; neither Slurm nor a keeper runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from cpumond.host.executor.keeper_link import KeptJob
from cpumond.host.executor.slurm.client import Account, Answer
from cpumond.host.executor.slurm.commands import SlurmJob
from cpumond.host.executor.slurm.executor import FORGOTTEN, NEVER_STARTED, START_S, SlurmExecutor
from cpumond.host.executor.slurm.job import Job, Record

AWAY = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n"
NO_SUCH = "sbatch: error: Batch job submission failed: Invalid partition name specified\n"


def row(state: str, reason: str = "None", slurm_job: int = 5) -> SlurmJob:
    return SlurmJob(slurm_job, state, 0, 0, reason, "j")


@pytest.fixture
def executor(tmp_path) -> Iterator[SlurmExecutor]:
    with contextlib.closing(SlurmExecutor(str(tmp_path), "p", "n")) as made:
        made._records.make()
        yield made


def add(executor: SlurmExecutor, slurm_job: int | None = 5) -> Job:
    job = executor._jobs["j"] = Job(Record("j", "/nowhere", 4096, "t", 0, 0, slurm_job=slurm_job))
    return job


@pytest.mark.parametrize(
    ("slurm_job", "rows", "words"),
    [
        (5, [], FORGOTTEN),
        (5, [row("RUNNING", slurm_job=6)], FORGOTTEN),
        (5, [row("CANCELLED")], "Slurm ended it before it ran: CANCELLED (None), its job 5"),
        (5, [row("PENDING", "PartitionConfig")], "Slurm does not start it: PartitionConfig, its job 5"),
        (None, [], NEVER_STARTED),
        *((5, [row(state, "Resources")], "") for state in ("PENDING", "RUNNING", "CONFIGURING")),
    ],
)
def test_what_slurm_does_not_run_is_given_back(executor, slurm_job, rows, words):
    job = add(executor, slurm_job)
    executor._judge(job, rows, 100.0)
    assert (job.refusal is not None) == bool(words)
    if job.refusal is not None:
        assert (job.refusal.problem, job.refusal.node_fault) == (words, True)


@pytest.mark.parametrize(
    ("looks", "is_refused"),
    [
        ([(100.0, "PENDING"), (100.0 + START_S, "PENDING")], False),
        ([(100.0, "PENDING"), (101.0 + START_S, "PENDING")], True),
        ([(100.0, "PENDING"), (150.0, "RUNNING"), (170.0, "PENDING"), (200.0, "PENDING")], False),
    ],
    ids=["not yet", "too long", "the time begins anew where it has begun"],
)
def test_a_job_that_waits_for_too_long_is_given_back(executor, looks, is_refused):
    job = add(executor)
    for now_s, state in looks:
        executor._judge(job, [row(state, "Resources")], now_s)
    assert (job.refusal is not None) == is_refused
    if job.refusal is not None:
        assert "Slurm has not started it within 60 s: Resources" in job.refusal.problem


def test_a_job_that_slurm_has_though_nobody_said_so_is_not_submitted_again(executor):
    job = add(executor, slurm_job=None)
    executor._judge(job, [row("FAILED", slurm_job=4), row("RUNNING", slurm_job=6)], 100.0)
    assert (job.record.slurm_job, job.busy, job.refusal) == (6, False, None)
    assert executor._records.load()["j"].slurm_job == 6


def test_how_a_job_without_a_word_ended_is_known_when_slurm_has_ended_it(executor):
    job = add(executor)
    job.lost = KeptJob("j", "ended", problem="lost")
    executor._judge(job, [row("RUNNING")], 100.0)
    assert not job.is_over
    executor._judge(job, [SlurmJob(5, "FAILED", 3 << 8, 0, "", "j")], 101.0)
    assert job.result is not None
    assert (job.result.exit_code, job.result.problem) == (3, "")


@pytest.mark.parametrize(
    ("answer", "slurm_job", "is_refused", "is_kept"),
    [
        (Answer(0, "17\n", ""), 17, False, False),
        (Answer(1, "", AWAY), None, False, True),
        (Answer(None, "", ""), None, False, True),
        (Answer(1, "", NO_SUCH), None, True, False),
    ],
)
def test_what_sbatch_says(executor, answer, slurm_job, is_refused, is_kept):
    job = add(executor, slurm_job=None)
    job.submission, job.busy = (["sbatch"], b"", Account(0, 0)), True
    executor._take_submission(job, answer)
    assert (job.record.slurm_job, job.refusal is not None, job.submission is not None, job.busy) == (
        slurm_job, is_refused, is_kept, False,
    )  # fmt: skip
    assert job.look_at_s > time.monotonic()


def test_what_sbatch_says_too_late_changes_nothing(executor):
    job = add(executor, slurm_job=None)
    job.submission, job.is_claimed = (["sbatch"], b"", Account(0, 0)), True
    executor._take_submission(job, Answer(1, "", NO_SUCH))
    assert job.refusal is None
