"""The engines that other tests use: they start, say where a container is, live through their daemon's death and end."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from engines import HAS_SYSTEMD, Dockerd, Engine, Podman, SlurmCluster, cgroup_of, name_of, read_cgroups
from waiting import is_over, wait_until

from cpumond.host.cgroup.mounts import Hierarchies

pytestmark = [pytest.mark.cgroup, pytest.mark.timeout(300)]
LIVE_RESTORE = ("--live-restore",)


def read_quota(hierarchies: Hierarchies, path: str) -> str:
    """The quota of a cgroup in µs, "max" or "-1" for none."""
    name = "cpu.max" if hierarchies.cpu_version == 2 else "cpu.cfs_quota_us"
    return Path(f"{hierarchies.cpu_root}{path}/{name}").read_text(encoding="ascii").split()[0]


@pytest.mark.parametrize("engine_started", ["docker", "podman"], indirect=True)
def test_where_a_container_is(engine: Engine, hierarchies: Hierarchies) -> None:
    engine.run("web", "--cpus=1.5", "--label=com.docker.compose.project=shop")
    path, number = engine.cgroup("web"), engine.inspect("web")["Id"]
    if not HAS_SYSTEMD:
        assert path.startswith(f"/{engine.top}/")
        assert path.endswith(number)
    elif engine.name == "podman":
        assert path == f"/machine.slice/libpod-{number}.scope/container"
    else:
        assert path == f"/system.slice/docker-{number}.scope"
    assert read_quota(hierarchies, path) == "150000"
    engine.update("web", "--cpus=0.5")
    assert read_quota(hierarchies, path) == "50000"


def test_where_the_steps_of_a_job_are(slurm: SlurmCluster, hierarchies: Hierarchies) -> None:
    job = slurm.sbatch("srun sleep 1000 & srun --overlap sleep 1000 & wait", "--cpus-per-task=2", "--account=shop")
    wait_until(lambda: len(sleepers(slurm, job)) == 2, "two steps run")
    path = slurm.cgroup(job)
    if hierarchies.cpu_version == 2:
        assert path == f"/system.slice/{slurm.node}_slurmstepd.scope/job_{job}"
        assert read_quota(hierarchies, path) == "max"
    else:
        assert path == f"/slurm_{slurm.node}/uid_0/job_{job}"
    assert {cgroup_of(pid, "cpuacct").removeprefix(path).split("/")[1] for pid in sleepers(slurm, job)} == {
        "step_0",
        "step_1",
    }
    (found,) = [known for known in slurm.squeue() if known["job_id"] == job]
    assert (found["account"], found["partition"], found["nodes"]) == ("shop", "main", slurm.node)
    slurm.scancel(job)
    wait_until(lambda: slurm.pids(job) == [], "the job ends")


def sleepers(slurm: SlurmCluster, job: int) -> list[int]:
    """The processes that the steps of a job are there for."""
    return [pid for pid in slurm.pids(job) if name_of(pid) == "sleep"]


@pytest.mark.parametrize(
    ("make", "quota_after_restart"),
    [
        pytest.param(lambda: Dockerd(options=LIVE_RESTORE), "50000", id="docker"),
        pytest.param(Podman, "150000", id="podman"),  # before 5.0 it does not keep what `update` set
    ],
)
def test_containers_outlive_their_engine_and_end_with_its_keeper(
    make: Callable[[], Engine], quota_after_restart: str, hierarchies: Hierarchies
) -> None:
    engine = make()
    try:
        engine.start()
        engine.run("web", "--cpus=1.5", "--label=com.docker.compose.project=shop")
        pid = engine.pid("web")
        engine.update("web", "--cpus=0.5")
        engine.kill()
        assert psutil.pid_exists(pid)
        engine.start()
        assert engine.pid("web") == pid
        assert engine.inspect("web")["Config"]["Labels"]["com.docker.compose.project"] == "shop"
        assert engine.execute("web", "echo", "in it") == "in it"

        engine.restart("web")
        again = engine.pid("web")
        assert again not in (0, pid)
        assert read_quota(hierarchies, engine.cgroup("web")) == quota_after_restart
        engine.stop("web")
        assert engine.pid("web") == 0
        engine.remove("web")
        engine.run("left")
        below = [*engine.keeper.processes(), psutil.Process(engine.pid("left"))]
        path = engine.cgroup("left")
    finally:
        engine.close()
    assert [process for process in below if not is_over(process)] == []
    assert not os.path.exists(f"{hierarchies.cpu_root}{path}")
    assert glob.glob(f"/sys/fs/cgroup/*/{engine.top}") == []
    assert not engine.directory.exists()
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
    assert str(engine.directory) not in mounts


def test_an_engine_ends_with_who_started_it() -> None:
    """Also when that was killed with all processes of its group, and could tidy up nothing."""
    lines = [
        "from engines import Podman",
        "engine = Podman()",
        "engine.start()",
        'engine.run("left")',
        'print(engine.pid("left"), engine.top, engine.directory, flush=True)',
        "input()",
    ]
    with subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as starter:
        assert starter.stdout is not None
        pid, top, directory = starter.stdout.readline().split()
        container = psutil.Process(int(pid))
        os.killpg(starter.pid, signal.SIGKILL)
    wait_until(lambda: is_over(container), "the container ends")
    wait_until(lambda: glob.glob(f"/sys/fs/cgroup/*/{top}") == [], "its cgroups are removed")
    wait_until(lambda: not os.path.exists(directory), "its files are removed")


def test_jobs_outlive_the_daemons_of_slurm_and_end_with_their_keeper(hierarchies: Hierarchies) -> None:
    slurm = SlurmCluster(reclaimed_cpus=64)
    try:
        slurm.start()
        assert slurm.node_state(slurm.node) == slurm.node_state(slurm.reclaimed_node) == "idle"
        steps = slurm.sbatch("srun sleep 1000")
        mine = slurm.sbatch("id -un; exec sleep 1000", "--partition=reclaimed", user="games")
        wait_until(lambda: sleepers(slurm, steps), "a step runs")
        wait_until(lambda: slurm.output(mine) == "games\n", "the job of a user runs")
        (pid,) = slurm.pids(mine)
        assert slurm.reclaimed_node in read_cgroups(pid)

        slurm.terminate("slurmctld")
        slurm.start("slurmctld")
        assert slurm.state(mine) == "RUNNING"
        slurm.kill("reclaimed")
        slurm.start("reclaimed")
        assert name_of(pid) == "sleep"
        slurm.scancel(mine)
        wait_until(lambda: slurm.pids(mine) == [], "the job of a user ends")
        wait_until(lambda: slurm.state(mine) == "CANCELLED", "the controller knows it")
        assert slurm.state(steps) == "RUNNING"
        below = slurm.keeper.processes()
        assert {"slurmctld", "slurmd", "munged", "sleep"} <= {process.name() for process in below}
    finally:
        slurm.close()
    assert [process for process in below if not is_over(process)] == []
    assert glob.glob(f"/sys/fs/cgroup/**/*{slurm.node}*", recursive=True) == []
    assert not slurm.directory.exists()
