"""Source ``slurm``: a real agent beside a real Slurm. Needs root, and Debian's packages slurm-wlm and munge.

With cpu and cpuacct apart, unlike in ``tests/machine``, Slurm makes no cgroup of the cpu controller: the test does.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_process import AgentProcess
from engines import SlurmCluster, Work, waits_or_burns
from waiting import wait_until

pytestmark = [pytest.mark.cgroup, pytest.mark.timeout(300)]

ROOT = Path("/sys/fs/cgroup")
IS_V2 = (ROOT / "cgroup.controllers").exists()
IS_APART = not IS_V2 and (ROOT / "cpu").resolve() != (ROOT / "cpuacct").resolve()
"""Whether the test makes cgroups in Slurm's place."""
CPU = ROOT if IS_V2 else ROOT / "cpu"
CONTROLLERS = (CPU, ROOT / "cpuacct")
CONFIG = """
{roots}
[monitor]
mode = "reclaim"
check_period = "100ms"
decrease_coefficient = 0.5
[[source]]
kind = "slurm"
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def in_environment(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    yield
    print(describe(slurm))  # pytest shows it when the test fails
    remove_cgroups(slurm)


def describe(slurm: SlurmCluster) -> str:
    """The ends of the daemons' logs, and nodes and jobs as the controller knows them."""
    told = [f"{name}: {slurm.log(name)[-5000:]}" for name in ("slurmd", "slurmctld")]
    with contextlib.suppress(AssertionError):  # the controller may be away
        told += [slurm.command("scontrol", "show", what) for what in ("node", "job")]
    return "\n".join(told)


def remove_cgroups(slurm: SlurmCluster) -> None:
    """End all jobs and remove what the test has made for them."""
    numbers = [each["job_id"] for each in slurm.squeue() if each["job_state"] in ("RUNNING", "PENDING")]
    if numbers:
        slurm.scancel(*numbers)
    wait_until(lambda: not any(slurm.pids(number) for number in numbers), "the jobs are gone")
    for controller in CONTROLLERS if IS_APART else ():
        place = controller / f"slurm_{slurm.node}"
        wait_until(lambda: remove(place), f"{place} is removed")  # noqa: B023


def remove(top: Path) -> bool:
    """Whether nothing is left; Slurm may be making or removing cgroups there itself."""
    for place, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(place)
    return not top.exists()


def run_job(slurm: SlurmCluster, *options: str, script: str = "sleep 10000", controllers: int = 2) -> tuple[int, Path]:
    """Start a job; its number and the cgroup that it was put into."""
    number = slurm.sbatch(script, *options)
    return number, put_in(slurm, number, controllers)


def put_in(slurm: SlurmCluster, number: int, controllers: int = 2) -> Path:
    """Wait for a job to run; the cgroup that it was put into."""
    wait_until(lambda: slurm.pids(number), "the job runs")
    if not IS_APART:
        return find_place(number)
    for controller in CONTROLLERS[2 - controllers :]:
        place = controller / f"slurm_{slurm.node}/uid_0/job_{number}/step_batch/task_0"
        place.mkdir(parents=True, exist_ok=True)
        for pid in slurm.pids(number):
            with contextlib.suppress(ProcessLookupError):
                (place / "cgroup.procs").write_text(str(pid))
        if controller == CPU:
            # A busy job is to reach its limit on a busy host, too.
            place.parents[3].joinpath("cpu.shares").write_text("262144")
    return CPU / f"slurm_{slurm.node}/uid_0/job_{number}"


def find_place(number: int) -> Path:
    return next(CPU.glob(f"**/job_{number}"))


def read(place: Path, *below: str) -> int:
    """Microseconds of each 100 ms; -1 for no limit."""
    quota, *period = place.joinpath(*below, "cpu.max" if IS_V2 else "cpu.cfs_quota_us").read_text().split()
    return -1 if quota in ("max", "-1") else int(quota) * 100_000 // int(period[0]) if period else int(quota)


def jobs(agent: AgentProcess) -> dict[str, dict[str, Any]]:
    """Those of the test's cluster; other tests may have one beside it."""
    return {job["job_id"]: job for job in agent.get("/v1/status")["jobs"] if not job["refused"]}


@pytest.fixture
def config(slurm: SlurmCluster) -> str:
    return CONFIG.format(roots=f'managed_roots = ["slurm_{slurm.node}"]' if IS_APART else "")


def problems(agent: AgentProcess) -> list[str]:
    found: list[str] = agent.get("/v1/status")["problems"]
    return found


def test_one_row_for_a_job_with_the_limit_on_the_whole(slurm, agent, config, tmp_path):
    number, place = run_job(
        slurm,
        "--cpus-per-task=2",
        "--job-name=train|all of it",
        "--account=physics",
        f"--chdir={tmp_path}",
        script=f"srun --overlap sleep 10000 & {waits_or_burns(str(tmp_path))}",
    )
    if IS_APART:
        (place / "step_0" / "task_0").mkdir(parents=True)  # a second step
    work = Work(tmp_path)
    agent.start(config)
    wait_until(lambda: jobs(agent).get(f"job_{number}", {}).get("labels"), "it is known")
    job = agent.job(f"job_{number}")
    assert (job["engine"], job["cpu_limit"]) == ("slurm", 2.0)
    assert job["labels"] == {"name": "train|all of it", "user": "root", "account": "physics", "partition": "main"}
    assert len(jobs(agent)) == 1
    wait_until(lambda: 0 < read(place) <= 20_000, "the idle job has little")
    steps = [Path(below) for below, _, _ in os.walk(place) if Path(below) != place]
    assert len(steps) >= 4, "two steps and what is in them"
    assert {read(step) for step in steps} == {-1}

    work.begin()
    wait_until(lambda: read(place) == 200_000, "it has all that it ordered")
    if IS_APART:
        (place / "step_1" / "task_0").mkdir(parents=True)
    else:
        slurm.command("srun", f"--jobid={number}", "--overlap", "true")
    work.end()
    wait_until(lambda: read(place) <= 20_000, "it has little again")
    assert list(jobs(agent)) == [f"job_{number}"], "a new step changes nothing"
    assert agent.get("/v1/status")["totals"]["reclaimed"] <= 2.0
    assert agent.stop() == 0
    assert read(place) == -1


def test_a_job_that_ends_is_gone(slurm, agent, config):
    _, place = run_job(slurm, "--cpus-per-task=1")
    agent.start(config)
    wait_until(lambda: 0 < read(place) <= 20_000, "the idle job has little")
    remove_cgroups(slurm)
    wait_until(lambda: not jobs(agent), "it is gone")


@pytest.mark.skipif(not IS_APART, reason="Slurm makes cgroups of the cpu controller here")
def test_a_job_that_has_no_cgroup_of_the_cpu_controller_is_told_of(slurm, agent, config):
    number, _ = run_job(slurm, "--cpus-per-task=1", "--job-name=train", "--account=physics", controllers=1)
    agent.start(config)
    said = f"slurm: job_{number} ('train' of root, account physics) has a cgroup only in cpuacct"
    wait_until(lambda: any(text.startswith(said) for text in problems(agent)), "status says so")
