"""A job as the executor of kind "slurm" keeps it."""

from __future__ import annotations

import time
from typing import Final

import msgspec

from cpumond.host.executor.keeper_executor import HeldJob, KeptRecord
from cpumond.host.executor.keeper_link import KeptJob
from cpumond.host.executor.model import NotStarted
from cpumond.host.executor.slurm.client import Account
from cpumond.host.executor.slurm.commands import SlurmJob

LOOK_S: Final = 2.0
"""How often Slurm is asked about jobs that say nothing."""


class Record(KeptRecord):
    """``slurm_job``: None until it is known. ``places``: its cgroups, by controller."""

    token: str
    uid: int
    gid: int
    limits: list[list[str]] = msgspec.field(default_factory=list)
    slurm_job: int | None = None
    start_time: float = 0.0
    places: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def account(self) -> Account:
        """Whom ``scancel`` is run as: the job's user, whose step has said which job of Slurm it is, and might have
        named another user's."""
        return Account(self.uid, self.gid)


class Job(HeldJob):
    record: Record

    def __init__(self, record: Record, silent: bool = False) -> None:
        super().__init__(record, silent)
        self.submission: tuple[list[str], bytes, Account] | None = None
        """Command, script and account of ``sbatch``, until Slurm has taken it."""
        self.busy = False
        """``sbatch`` runs."""
        self.is_told = False
        """It was logged that Slurm does not take it."""
        self.is_claimed = False
        """Its step has come: from then on it is known without Slurm what becomes of it."""
        self.look_at_s = time.monotonic() + LOOK_S
        self.waits_since_s: float | None = None
        self.cancel_at_s: float | None = None
        self.leaves_at_s: float | None = None
        """When it is reported at the latest that it has not begun, though Slurm may have it still."""
        self.refusal: NotStarted | None = None
        self.lost: KeptJob | None = None
        """It has ended without a word: Slurm may know how."""


def is_unclear(job: Job) -> bool:
    """Whether only Slurm can say what becomes of it."""
    if job.leaves_at_s is not None:
        return True
    if job.is_over or job.busy or job.refusal is not None:
        return False
    return job.lost is not None or not job.is_claimed


def explain_loss(lost: KeptJob, row: SlurmJob | None) -> KeptJob:
    """The end of a job whose step was killed with it, by what Slurm says of its batch script."""
    if row is None:
        return lost
    if row.state not in ("COMPLETED", "FAILED", "OUT_OF_MEMORY", "CANCELLED"):
        return msgspec.structs.replace(lost, problem=f"Slurm ended it: {row.state} ({row.reason})")
    code, number = row.wait_status >> 8, row.wait_status & 0x7F
    if number:
        found = msgspec.structs.replace(lost, signal=number, problem="")
    elif row.state == "CANCELLED" and not code:
        found = msgspec.structs.replace(lost, problem="it was cancelled in Slurm")
    else:
        found = msgspec.structs.replace(lost, exit_code=code, problem="")
    return msgspec.structs.replace(found, oom_kills=found.oom_kills or int(row.state == "OUT_OF_MEMORY"))
