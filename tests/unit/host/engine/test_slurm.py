"""What ``squeue`` prints of a job."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpumond.agent.discovery.engines import PLACES
from cpumond.host.engine import slurm
from cpumond.host.engine.model import EngineError, EngineReply
from cpumond.host.engine.slurm import SlurmEngine, SlurmJob, find_jobs, parse_job, run_squeue

SLUID = "sEKNKTV3WPV500"


@pytest.mark.parametrize(("text", "job"), [
    ("7|1|2|alice|physics|own|train\n", SlurmJob("7", 1, 2, "alice", "physics", "own", "train")),
    ("7|1|2|alice|(null)|own|a|b c\n", SlurmJob("7", 1, 2, "alice", "", "own", "a|b c")),
    ("7|3|96|u|a|p|\n", SlurmJob("7", 3, 96, "u", "a", "p", "")),
    ("8|1|1|u|a|p|other\n7|1|2|u|a|p|name\n", SlurmJob("7", 1, 2, "u", "a", "p", "name")),
    ("8|1|2|u|a|p|other\n", None),
    ("", None),
    ("7|1|2|u|a|p\n", None),
    ("x|1|2|u|a|p|name\n", None),
    ("7|1|-2|u|a|p|name\n", None),
    ("7|1|0|u|a|p|name\n", None),
    ("7|1|٣|u|a|p|name\n", None),
    ("slurm_load_jobs error: Unable to contact slurm controller\n", None),
])  # fmt: skip
def test_one_job(text, job):
    assert parse_job(text, "7") == job


@pytest.mark.parametrize(("text", "job"), [
    (f"{SLUID}|7|1|2|u|a|p|b|c\n", SlurmJob("7", 1, 2, "u", "a", "p", "b|c")),
    (f"s0000000000000|8|1|2|u|a|p|x\n{SLUID}|7|1|2|u|a|p|y\n", SlurmJob("7", 1, 2, "u", "a", "p", "y")),
    (f"{SLUID}|x|1|2|u|a|p|name\n", None),
    ("7|1|2|u|a|p|name\n", None),
    (f"squeue: error: Invalid job id: {SLUID}\n", None),
])  # fmt: skip
def test_one_job_by_its_sluid(text, job):
    assert parse_job(text, SLUID) == job


def test_jobs_are_found_at_their_places_only(tmp_path):
    for path in ("slurm_n1/uid_0/job_12/step_batch", "slurm_n1/uid_0/job_3", "slurm_n1/uid_0/job_x", "a/b/job_4"):
        (tmp_path / path).mkdir(parents=True)
    found = find_jobs(str(tmp_path), ("slurm*/uid_*/job_*",))
    assert [(job.key, job.path) for job in found] == [("12", "slurm_n1/uid_0/job_12"), ("3", "slurm_n1/uid_0/job_3")]
    assert all(place.inode == (tmp_path / place.path).stat().st_ino for place in found)


def write_squeue(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = directory / "squeue"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")


def watch(root: Path, places: tuple[str, ...], count: int) -> list[EngineReply]:
    """The first answers about jobs in a tree of cgroups."""
    engine = SlurmEngine(SimpleNamespace(cpu_root=str(root), cpuacct_root=str(root)), places)  # type: ignore[arg-type]
    told: list[EngineReply] = []

    async def run() -> None:
        enough = asyncio.Event()

        def publish(answer: EngineReply) -> None:
            told.append(answer)
            if len(told) == count:
                enough.set()

        task = asyncio.create_task(engine.watch(publish, asyncio.Event()))
        await asyncio.wait({task, asyncio.create_task(enough.wait())}, return_when=asyncio.FIRST_COMPLETED)
        task.cancel()

    asyncio.run(run())
    return told[:count]


def test_a_job_whose_cgroup_is_named_by_sluid_is_shown_by_its_number(tmp_path, monkeypatch):
    """As Slurm 26.05 has it, with a CgroupSlice of its own, beside one from before the upgrade."""
    for name in (SLUID, "job_3", "system", "s7"):
        (tmp_path / f"tree/hpc.slice/n1_slurmstepd.scope/{name}/step_0").mkdir(parents=True)
    answers = f'*--jobs={SLUID}*%s*) echo "{SLUID}|7|1|2|u|a|p|x";; *--jobs=3*) echo "3|1|1|u|a|p|y";;'
    write_squeue(tmp_path, monkeypatch, f'case "$*" in --version) echo slurm 26.05.2;; {answers} *) exit 9;; esac')
    [told] = watch(tmp_path / "tree", PLACES["slurm"], 1)
    jobs = {(job.job_id, job.name, job.path.rpartition("/")[2], job.ordered_cores) for job in told.jobs}
    assert jobs == {("7", "job_7", SLUID, 2.0), ("3", "job_3", "job_3", 1.0)}


def test_a_slow_controller_does_not_keep_what_is_known_from_being_told(tmp_path, monkeypatch):
    for number in range(1, 4):
        (tmp_path / f"tree/slurm_n1/uid_0/job_{number}").mkdir(parents=True)
    known = 'n=${2#--jobs=}; echo "$n|1|2|u|a|p|name"'
    write_squeue(tmp_path, monkeypatch, f'case "$1" in --version) echo slurm-wlm 22;; *) {known};; esac')
    monkeypatch.setattr(slurm, "LOOK_S", 0.0)
    told = watch(tmp_path / "tree", ("slurm*/uid_*/job_*",), 4)
    assert [len(answer.jobs) for answer in told] == [1, 2, 3, 3]


@pytest.mark.parametrize(("script", "said"), [
    ("echo Unable to contact >&2; exit 1", "squeue failed with exit code 1: Unable to contact"),
    ("exec yes 77777777", "squeue printed more than 1 MiB"),
    ("exec sleep 1000 >&- 2>&-", r"squeue gave no output within 0\.1 s"),
])  # fmt: skip
def test_what_squeue_says_is_bounded(script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_squeue(tmp_path, monkeypatch, script)
    monkeypatch.setattr(slurm, "ANSWER_TIMEOUT_S", 0.1 if "sleep" in script else 60.0)
    with pytest.raises(EngineError, match=said):
        asyncio.run(run_squeue("--jobs=7"))
