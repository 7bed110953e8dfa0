"""The executor of kind "slurm" with a real Slurm on this host, its keeper, and real jobs.

Where cpu and cpuacct are mounted apart Slurm makes a job no cgroup with a quota: what needs one is in
``tests/machine``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import SlurmCluster
from executor_contract import ExecutorContract
from slurm_rig import SlurmRig
from waiting import wait_until

from cpumond.core.errors import CpumondError
from cpumond.host.cgroup.mounts import Hierarchies
from cpumond.host.executor.model import Ended, NotStarted, Started
from cpumond.host.executor.slurm.executor import INDEX_NAME, SlurmExecutor

SETTINGS = "SchedulerParameters=batch_sched_delay=1\n"
"""Else a job waits for up to 3 s where another one has just ended."""

pytestmark = pytest.mark.cgroup


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with contextlib.closing(SlurmCluster(reclaimed_cpus=64, settings=SETTINGS)) as made:
        made.start()
        yield made


@contextlib.contextmanager
def open_rig(cluster: SlurmCluster, hierarchies: Hierarchies, directory: Path) -> Iterator[SlurmRig]:
    rig = SlurmRig(cluster, hierarchies, directory)
    try:
        yield rig
        rig.close()
        assert os.listdir(rig.runtime_dir / INDEX_NAME) == []
        rig.wait_idle()
    finally:
        rig.executor.close()
        rig.end_keepers()
        rig.forget_jobs()


@pytest.fixture
def rig(
    cluster: SlurmCluster, hierarchies: Hierarchies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmRig]:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    with open_rig(cluster, hierarchies, tmp_path) as opened:
        yield opened


class TestSlurmExecutor(ExecutorContract):
    """The contract. Slurm begins a job a second after another one has ended."""

    many = 10
    many_in_turn = 3

    # Slurm gives its jobs their place, weight and quota: the class of an order changes nothing there.
    test_its_weight_follows_its_order_and_a_quota_is_for_a_ceiling_alone = None  # type: ignore[assignment]
    test_a_job_on_reclaimed_cpu_is_in_the_idle_class = None  # type: ignore[assignment]
    test_jobs_of_both_classes_are_found_where_they_are = None  # type: ignore[assignment]
    test_a_job_on_reclaimed_cpu_yields_to_ordinary_ones = None  # type: ignore[assignment]
    test_jobs_on_reclaimed_cpu_share_it_by_their_orders = None  # type: ignore[assignment]

    def test_its_quota_is_in_force(self, rig: SlurmRig) -> None:
        if rig.has_quotas():
            super().test_its_quota_is_in_force(rig)
            return
        # Slurm makes a job no cgroup in the hierarchy of cpu here, and none is told.
        job_id = rig.start("sleep", "1000", cpu_limit=0.5)
        assert rig.wait(Started, job_id).cgroup == ""
        rig.executor.kill(job_id)
        assert rig.wait(Ended, job_id).signal == 9

    def test_it_has_so_many_processes_at_most(self, rig: SlurmRig) -> None:
        if rig.hierarchies.cpu_version == 2:
            super().test_it_has_so_many_processes_at_most(rig)
            return
        # Nor one in the hierarchy of pids on v1.
        job_id = rig.shell("for i in 1 2 3 4; do sleep 1000 & done; echo all", max_tasks=2)
        assert rig.wait(Ended, job_id).exit_code == 0
        assert rig.read(job_id) == b"all\n"


def count_runs(rig: SlurmRig) -> tuple[str, str]:
    """A file that has a line for each time that a job begins, and the script for that."""
    path = str(rig.directory / "runs")
    return path, f"echo run >> {path}; "


def read_runs(path: str) -> int:
    return len(Path(path).read_text().splitlines()) if os.path.exists(path) else 0


def test_slurm_knows_whose_job_it_is_and_what_it_has_ordered(rig):
    job_id = rig.start("sleep", "1000", user="nobody", cpu_limit=1.2, memory_limit=300 << 20)
    rig.wait(Started, job_id)
    shown = rig.cluster.command("scontrol", "show", "job", str(rig.number(job_id)))
    for text in ("UserId=nobody(", "GroupId=nogroup(", "NumCPUs=2 ", "MinMemoryNode=300M", "Requeue=0",
                 f"ReqNodeList={rig.cluster.reclaimed_node}", f"JobName=cpumond-{job_id}"):  # fmt: skip
        assert text in shown
    rig.executor.kill(job_id)
    rig.wait(Ended, job_id)


def test_what_slurm_sends_to_the_job_goes_to_all_of_it(rig):
    job_id = rig.shell(
        "setsid sh -c 'trap \"echo child; exit 0\" USR1; echo ready; while :; do sleep 0.05; done' &"
        " trap 'wait; exit 7' USR1; while :; do sleep 0.05; done"
    )
    rig.wait_written(job_id, b"ready")
    rig.cluster.command("scancel", "--signal=USR1", "--batch", str(rig.number(job_id)))
    assert rig.wait(Ended, job_id).exit_code == 7
    assert rig.read(job_id) == b"ready\nchild\n"


def test_slurms_accounting_has_the_end_of_the_job(rig):
    failed, stopped = rig.shell("exit 3"), rig.shell("kill -15 $$")
    rig.wait_all(Ended, (failed, stopped))
    for job_id, status in ((failed, 3 << 8), (stopped, 15)):
        wait_until(lambda job_id=job_id: rig.list_slurm(job_id)[0].is_over, "Slurm knows that it is over")
        assert rig.list_slurm(job_id)[0].wait_status == status


def test_a_job_that_kills_its_step_is_told_by_slurm(rig):
    job_id = rig.shell("kill -9 $PPID; sleep 1000")
    ended = rig.wait(Ended, job_id)
    assert (ended.exit_code, ended.signal, ended.problem) == (None, 9, "")
    rig.assert_nothing_left(job_id)


def test_a_step_that_names_the_job_of_another_user_does_not_have_it_cancelled(rig):
    others = rig.cluster.sbatch("sleep 1000", "--partition=reclaimed")
    wait_until(lambda: rig.cluster.state(others) == "RUNNING", "the other job runs")
    job_id = rig.shell(
        "trap 'kill -STOP $PPID; echo ready' USR1; echo set; while :; do sleep 0.05; done", user="nobody"
    )
    rig.wait(Started, job_id)  # by the step, which is stopped after that
    rig.wait_written(job_id, b"set")
    rig.cluster.command("scancel", "--signal=USR1", "--batch", str(rig.number(job_id)))
    rig.wait_written(job_id, b"ready")
    # What the keeper reports where a user's step says so: only a step itself knows which job of Slurm it is.
    rig.executor._jobs[job_id].record.slurm_job = others
    rig.executor.kill(job_id)
    assert rig.wait(Ended, job_id).signal == 9
    assert rig.cluster.state(others) == "RUNNING"
    rig.cluster.scancel(others)


def test_a_job_that_stops_its_step_is_killed_all_the_same(rig):
    job_id = rig.shell("kill -STOP $PPID; echo ready; sleep 1000")
    rig.wait_written(job_id, b"ready")
    rig.executor.kill(job_id)
    assert rig.wait(Ended, job_id).signal == 9
    rig.assert_nothing_left(job_id)


def test_the_keeper_is_killed_while_jobs_run(rig):
    job_id, quick = rig.gated("echo one", "echo two; exit 3"), rig.gated(":", "exit 4", "other")
    rig.wait_all(Started, (job_id, quick))
    rig.wait_written(job_id, b"one\n")
    rig.executor.close()
    rig.end_keepers()
    rig.open_gate("other")
    rig.events.clear()
    found = rig.come_back(job_id, quick)
    assert job_id in found
    rig.open_gate()
    assert (rig.wait(Ended, job_id).exit_code, rig.wait(Ended, quick).exit_code) == (3, 4)
    assert rig.read(job_id) == b"one\ntwo\n"
    rig.assert_nothing_left(job_id, quick)


def test_the_agent_ends_before_it_knows_that_slurm_has_the_job(rig):
    path, note = count_runs(rig)
    job_id = rig.gated(note.rstrip("; "), "exit 4")
    rig.number(job_id)
    assert '"slurm_job":null' in (rig.runtime_dir / INDEX_NAME / f"{job_id}.json").read_text()
    rig.restart(job_id)
    wait_until(lambda: rig.poll(0.0) or read_runs(path), "it runs")
    rig.open_gate()
    assert rig.wait(Ended, job_id).exit_code == 4
    assert (read_runs(path), len(rig.list_slurm(job_id))) == (1, 1)


def test_the_agent_ends_before_slurm_has_the_job(rig):
    path, note = count_runs(rig)
    save_state(rig.cluster)
    rig.cluster.kill("slurmctld")
    job_id = rig.shell(note)
    rig.executor.close()
    rig.cluster.start("slurmctld")
    assert rig.come_back(job_id) == {}
    event = rig.wait(NotStarted, job_id)
    assert event.node_fault
    rig.wait_idle()
    assert (read_runs(path), rig.list_slurm(job_id)) == (0, [])


def test_a_job_that_slurm_has_twice_runs_once(rig):
    path, note = count_runs(rig)
    job_id = rig.gated(note.rstrip("; "), "exit 4")
    rig.wait(Started, job_id)
    script = rig.cluster.command("scontrol", "write", "batch_script", str(rig.number(job_id)), "-")
    again = rig.directory / "again"
    again.write_text(script.rstrip("\n") + "\n")
    number = int(rig.cluster.command("sbatch", "--parsable", "--partition=reclaimed", "--output=/dev/null", str(again)))
    wait_until(lambda: rig.poll(0.0) or rig.cluster.state(number) == "COMPLETED", "the other one is sent away")
    assert rig.find(Ended, job_id) is None
    rig.open_gate()
    assert rig.wait(Ended, job_id).exit_code == 4
    assert read_runs(path) == 1


def test_what_slurm_refuses_is_the_nodes_fault(rig):
    for changes, words in ({"memory_limit": 1 << 50}, "Slurm refuses it"), ({"cpu_limit": 1000.0}, "PartitionConfig"):
        event = rig.wait(NotStarted, rig.start("true", **changes))
        assert event.node_fault
        assert words in event.problem


def test_a_job_that_waits_in_slurm_and_is_cancelled_there(rig):
    first = rig.start("sleep", "1000", cpu_limit=64.0)
    rig.wait(Started, first)
    second = rig.start("sleep", "1000", cpu_limit=64.0)
    rig.cluster.scancel(rig.number(second))
    event = rig.wait(NotStarted, second)
    assert event.node_fault
    assert "CANCELLED" in event.problem
    rig.executor.kill(first)
    rig.wait(Ended, first)


def test_a_node_that_slurm_does_not_have(rig, tmp_path):
    executor = SlurmExecutor(str(tmp_path / "other"), "reclaimed", rig.cluster.node)
    with contextlib.closing(executor), pytest.raises(CpumondError, match="Slurm has no node"):
        executor.recover([])


def save_state(cluster: SlurmCluster) -> None:
    """Have the controller know after it was killed that all earlier jobs have ended: else it holds CPUs for them until
    the node registers again."""
    cluster.terminate("slurmctld")
    cluster.start("slurmctld")
