"""The executor of kind "slurm" with a cluster of Slurm on this host, for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

from engines import SlurmCluster
from executor_contract import Rig
from test_cgroup_executor import find_keepers
from waiting import is_over, wait_until

from cpumond.host.cgroup.mounts import Hierarchies, read_mounts
from cpumond.host.cgroup_processes import list_processes, send_signal
from cpumond.host.executor.slurm.commands import NAME_PREFIX, SlurmJob, make_look, parse_look
from cpumond.host.executor.slurm.executor import SlurmExecutor

RECLAIMED = "reclaimed"
DRAINED = re.compile(r"drain|down|fail|inval|not_resp|unk", re.IGNORECASE)


class SlurmCgroups:
    """The cgroups that Slurm made of the jobs of one node, by the names of the jobs; what the contract asks of them."""

    def __init__(self, cluster: SlurmCluster, hierarchies: Hierarchies) -> None:
        self._cluster = cluster
        self._before = 0
        self._before = max((job.slurm_job for job in self.list_jobs()), default=0)
        mounts = {mount.mount_point: mount for mount in read_mounts("/proc/self/mountinfo")}
        self._roots = list(mounts)
        self._is_v2 = hierarchies.cpu_version == 2
        self._has_quotas = hierarchies.cpu_root == hierarchies.cpuacct_root

    def list_jobs(self) -> list[SlurmJob]:
        """What Slurm knows of them, without those of earlier rigs, whose jobs had the same names."""
        jobs = parse_look(self._cluster.command(*make_look(RECLAIMED)))
        return [job for job in jobs if job.slurm_job > self._before]

    def _list_places(self) -> dict[int, list[str]]:
        """Slurm's number of a job -> its cgroups."""
        found: dict[int, list[str]] = {}
        node = self._cluster.reclaimed_node
        for root in self._roots:
            tops = [f"{root}/slurm_{node}", f"{root}/system.slice/{node}_slurmstepd.scope"]
            for top in tops:
                for place, names, _ in os.walk(top):
                    for name in names:
                        if re.fullmatch(r"job_\d+", name):
                            found.setdefault(int(name[4:]), []).append(os.path.join(place, name))
        return found

    def places(self, job_id: str) -> list[str]:
        """The cgroups of a job, in all hierarchies."""
        places = self._list_places()
        return [place for job in self.list_jobs() if job.job_id == job_id for place in places.get(job.slurm_job, [])]

    def path(self, job_id: str) -> str:
        """Relative to the cpu hierarchy; "" where Slurm makes none there."""
        for job in self.list_jobs():
            if job.job_id == job_id and self._has_quotas:
                node = self._cluster.reclaimed_node
                top = f"system.slice/{node}_slurmstepd.scope" if self._is_v2 else f"slurm_{node}/uid_{job.uid}"
                return f"{top}/job_{job.slurm_job}"
        return ""

    def list_processes(self, job_id: str) -> list[int]:
        """Without Slurm's own, and the step."""
        return [pid for pid in sorted(list_processes(self.places(job_id))) if not _is_slurms(pid)]

    def list_job_ids(self) -> list[str]:
        """Those that Slurm has not ended yet, and those that have a process.

        On v1 a cgroup may stay without one: Slurm tries once to remove it, and a process that is just killed is in it.
        """
        places = self._list_places()
        return sorted(
            {job.job_id for job in self.list_jobs() if not job.is_over or list_processes(places.get(job.slurm_job, []))}
        )

    def describe(self) -> str:
        """The jobs with the processes in their cgroups."""
        places = self._list_places()
        jobs = [(job, places.get(job.slurm_job, [])) for job in self.list_jobs()]
        return str([(job, {place: list_processes([place]) for place in its}) for job, its in jobs])

    def kill(self, job_id: str) -> None:
        """As somebody else would."""
        send_signal(self.places(job_id), signal.SIGKILL, self.list_processes(job_id))


def _is_slurms(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read()
    except OSError:
        return True
    return b"slurmstepd" in words or b"slurm_script" in words


class SlurmRig(Rig):
    """A rig with its cluster."""

    def __init__(self, cluster: SlurmCluster, hierarchies: Hierarchies, directory: Path) -> None:
        self.cluster = cluster
        self.runtime_dir = directory / "run"
        os.environ.update(cluster.environment)
        found: Any = SlurmCgroups(cluster, hierarchies)
        super().__init__(
            lambda: SlurmExecutor(str(self.runtime_dir), RECLAIMED, cluster.reclaimed_node),
            found,
            hierarchies,
            directory / "jobs",
        )

    def wait_idle(self) -> None:
        """Until Slurm has cleaned up; the node was never taken out of service."""
        node = self.cluster.reclaimed_node
        states = []

        def look() -> bool:
            states.append(self.cluster.node_state(node))
            return states[-1] == "idle" or bool(DRAINED.search(states[-1]))

        wait_until(look, "Slurm has cleaned up", 60)
        assert states[-1] == "idle", states

    def assert_nothing_left(self, *job_ids: str) -> None:
        """The same, when Slurm has ended the jobs: it does so after they have."""
        cgroups: Any = self.cgroups
        try:
            wait_until(lambda: not set(job_ids) & set(cgroups.list_job_ids()), "Slurm has ended the jobs", 60)
        except AssertionError as error:
            raise AssertionError(cgroups.describe()) from error
        super().assert_nothing_left(*job_ids)

    def has_quotas(self) -> bool:
        """Whether Slurm makes jobs a cgroup in the cpu hierarchy: on v2, and where cpuacct is mounted with it."""
        return self.hierarchies.cpu_root == self.hierarchies.cpuacct_root

    def number(self, job_id: str) -> int:
        """Slurm's number of a job, once it has one."""
        return wait_until(lambda: max((job.slurm_job for job in self.list_slurm(job_id)), default=0), "Slurm has it")

    def list_slurm(self, job_id: str) -> list[SlurmJob]:
        """What Slurm knows of a job: one line, unless it was submitted twice."""
        cgroups: Any = self.cgroups
        return [job for job in cgroups.list_jobs() if job.job_id == job_id]

    def forget_jobs(self) -> None:
        """End what a test has left in Slurm."""
        if is_over(self.cluster.processes["slurmctld"]):
            self.cluster.start("slurmctld")  # a test that failed has left it so
        for job in self.cgroups.list_jobs():  # type: ignore[attr-defined]
            if not job.is_over:
                subprocess.run(["scancel", "--signal=KILL", "--full", str(job.slurm_job)], check=False)
                subprocess.run(["scancel", f"--name={NAME_PREFIX}{job.job_id}"], check=False)

    def end_keepers(self) -> None:
        """The keepers of this rig."""
        for pid in find_keepers(self.runtime_dir):
            os.kill(pid, signal.SIGKILL)
