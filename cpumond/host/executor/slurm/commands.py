"""What Slurm's commands are given, and what their answers mean; pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from cpumond.host.executor.model import Launch

PROGRAMS: Final = ("sbatch", "squeue", "scancel", "sinfo")
"""The commands of Slurm that must be there."""

NAME_PREFIX: Final = "cpumond-"
"""Before the id of a job, in the name that Slurm has of it."""

MEBIBYTE: Final = 1 << 20
_FIELDS: Final = (("JobID", 20), ("State", 24), ("exit_code", 12), ("UserID", 16), ("Reason", 120), ("Name", 400))
_TRANSIENT: Final = re.compile(
    r"unable to contact|timed out|connection (refused|failure|reset)|connect failure|zero bytes|try again|standby|"
    r"temporarily|resource (temporarily )?unavailable|munge|authentication|slurm backup controller|not responding",
    re.IGNORECASE,
)
_OWN_FAULT: Final = re.compile(r"too (long|large)", re.IGNORECASE)


_HOPELESS: Final = frozenset(
    {
        "AccountNotAllowed", "BadConstraints", "InvalidAccount", "InvalidQOS", "JobHeldAdmin", "JobHeldUser",
        "PartitionConfig", "PartitionDown", "PartitionInactive", "PartitionNodeLimit", "PartitionTimeLimit",
    }
)  # fmt: skip
"""Why a job waits that will not start before somebody changes it, or Slurm's configuration."""


class SlurmJob(msgspec.Struct, frozen=True):
    """A job as ``squeue`` shows it. ``wait_status``: of its batch script, as ``waitpid`` gives it."""

    slurm_job: int
    state: str
    wait_status: int
    uid: int
    reason: str
    job_id: str

    @property
    def is_waiting(self) -> bool:
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "REQUEUE_FED")

    @property
    def is_hopeless(self) -> bool:
        """Whether it waits for what does not come by itself."""
        return self.is_waiting and self.reason.partition(",")[0] in _HOPELESS

    @property
    def is_over(self) -> bool:
        return self.state in (
            "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
            "REVOKED", "TIMEOUT",
        )  # fmt: skip


class Refusal(msgspec.Struct, frozen=True):
    """Why ``sbatch`` did not take a job. ``is_final``: it would not do so later either; ``node_fault`` as in
    ``NotStarted``."""

    problem: str
    is_final: bool
    node_fault: bool = True


def make_submission(launch: Launch, partition: str, node_name: str) -> list[str]:
    """The command that submits a job; its script is given on standard input.

    Slurm allocates whole CPUs: as many as the limit begins. Nothing of the agent's own limits and environment is handed
    down, and nothing of the job's: its command, environment, directory and output are its step's business.
    """
    memory = [f"--mem={math.ceil(launch.memory_limit / MEBIBYTE)}M"] if launch.memory_limit > 0 else []
    return [
        "sbatch", "--parsable", f"--partition={partition}", f"--nodelist={node_name}",
        f"--job-name={NAME_PREFIX}{launch.job_id}", "--nodes=1", "--ntasks=1",
        f"--cpus-per-task={max(math.ceil(launch.cpu_limit - 1e-9), 1)}", *memory, "--no-requeue", "--propagate=NONE",
        "--chdir=/", "--input=/dev/null", "--output=/dev/null", "--error=/dev/null",
    ]  # fmt: skip


def make_script(interpreter: str, package_dir: str, order: Mapping[str, Any]) -> bytes:
    """The batch script of a job: its step, with what it needs to know. ``package_dir`` is the one above ``cpumond``."""
    return (
        f"#!{interpreter} -IS\n"
        "import sys\n"
        f"sys.path.append({package_dir!a})\n"
        "from cpumond.host.executor.keeper.step import main\n"
        f"sys.exit(main({json.dumps(order, ensure_ascii=False)!a}))\n"
    ).encode("ascii")


def make_look(partition: str) -> list[str]:
    """The command that lists all jobs of a partition, also those that are over and not forgotten yet."""
    fields = ",".join(f"{name}:{width}" for name, width in _FIELDS)
    return ["squeue", "--noheader", "--states=all", f"--partition={partition}", f"--Format={fields}"]


def make_cancels(job_id: str, slurm_job: int | None, partition: str) -> list[list[str]]:
    """The commands that end a job, or have Slurm forget one that waits; without its number by its name."""
    if slurm_job is None:
        return [["scancel", f"--name={NAME_PREFIX}{job_id}", f"--partition={partition}"]]
    return [["scancel", "--signal=KILL", "--full", f"{slurm_job}"], ["scancel", f"{slurm_job}"]]


def parse_look(text: str) -> list[SlurmJob]:
    """The jobs of this executor in the answer to ``make_look``; lines that are none are left out."""
    found = []
    for line in text.splitlines():
        words, start = [], 0
        for _, width in _FIELDS:
            words.append(line[start : start + width].strip())
            start += width
        number, state, status, uid, reason, name = words
        if name.startswith(NAME_PREFIX) and number.isdecimal() and uid.isdecimal():
            found.append(
                SlurmJob(
                    int(number), state, int(status) if status.isdecimal() else 0, int(uid), reason,
                    name.removeprefix(NAME_PREFIX),
                )
            )  # fmt: skip
    return found


def parse_submission(code: int | None, out: str, err: str) -> int | Refusal:
    """What became of ``sbatch``: the number of the job, or why there is none. ``code`` None: it did not end in time."""
    first = out.strip().partition(";")[0]
    if code == 0 and first.isdecimal():
        return int(first)
    problem = summarise(err) or "sbatch said nothing"
    if code is None:
        return Refusal("sbatch did not end in time", is_final=False)
    if code < 0 or is_transient(err):
        return Refusal(problem, is_final=False)
    return Refusal(f"Slurm refuses it: {problem}", is_final=True, node_fault=not _OWN_FAULT.search(err))


def is_transient(err: str) -> bool:
    """Whether what a command of Slurm wrote says that it may go better later."""
    return _TRANSIENT.search(err) is not None


def summarise(err: str) -> str:
    """The last line that a command of Slurm wrote, without its name."""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    return re.sub(r"^\w+: (error: |fatal: )?", "", lines[-1]) if lines else ""
