"""The agent on real cgroups that get other names, and under mounts that go away or are covered."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_process import AgentProcess
from commands import run_command
from configs import at_floor, describe_source, lower, make
from real_cgroups import CgroupTree
from waiting import wait_until

pytestmark = pytest.mark.cgroup

NAMESPACE = ["unshare", "-m", "--propagation", "private"]
"""Nothing that is done to mounts in it is seen outside."""


@pytest.fixture(autouse=True)
def _v1(cgroups: CgroupTree) -> None:
    if cgroups.hierarchies.cpu_version != 1:
        pytest.skip("v2 refuses to rename cgroups; its root is not unmounted here")


def rename(cgroups: CgroupTree, old: str, new: str, *roots: str) -> None:
    for root in roots or cgroups.roots:
        os.rename(os.path.join(root, cgroups.top, old), os.path.join(root, cgroups.top, new))


def find_quotas(cgroups: CgroupTree) -> dict[str, str]:
    top = Path(cgroups.path(""))
    return {
        file.parent.name: file.read_text().strip() for file in top.glob("**/cpu.cfs_quota_us") if file.parent != top
    }


def swap(cgroups: CgroupTree) -> None:
    for old, new in (("a", "x"), ("b", "a"), ("x", "b")):
        rename(cgroups, old, new)


RENAMES: dict[str, tuple[Callable[[CgroupTree], None], dict[str, str]]] = {
    "to a name of no source": (lambda tree: rename(tree, "a", "other"), {"other": "150000", "b": "120000"}),
    "to another job's name": (lambda tree: rename(tree, "a", "c"), {"c": "150000", "b": "120000"}),
    "in the hierarchy of cpu alone": (
        lambda tree: rename(tree, "a", "c", tree.hierarchies.cpu_root),
        {"c": "150000", "b": "120000"},
    ),
    "in the hierarchy of cpuacct alone": (
        lambda tree: rename(tree, "a", "c", tree.hierarchies.cpuacct_root),
        {"a": "150000", "b": "120000"},
    ),
    "two swapped": (swap, {"b": "150000", "a": "120000"}),
}


@pytest.fixture
def lowered(cgroups: CgroupTree, agent: AgentProcess) -> AgentProcess:
    """An agent that has lowered ``a`` (1.5 cores) and ``b`` (1.2 cores)."""
    make(cgroups, "a")
    make(cgroups, "b", quota_us=120_000)
    lower(agent, cgroups, "a", "b", sources=describe_source(f"{cgroups.top}/?"))
    return agent


@pytest.mark.parametrize("case", RENAMES)
def test_a_renamed_cgroup_gets_its_own_limit_back_from_the_running_agent(cgroups, lowered, case):
    act, kept = RENAMES[case]
    act(cgroups)
    wait_until(lambda: lowered.events("job_released") or "cpuacct" in case, "the rename is seen")
    assert lowered.stop() == 0
    assert find_quotas(cgroups) == kept
    assert lowered.run("restore").stdout.startswith("nothing to restore")


@pytest.mark.parametrize(
    ("case", "by"),
    [
        ("to another job's name", "the next agent"), ("in the hierarchy of cpu alone", "restore"),
        ("in the hierarchy of cpuacct alone", "the next agent"), ("two swapped", "restore"),
        ("two swapped", "first aid"), ("to a name of no source", "first aid"),
    ],
)  # fmt: skip
def test_a_cgroup_that_is_renamed_after_a_kill_gets_its_own_limit_back(cgroups, lowered, case, by):
    act, kept = RENAMES[case]
    lowered.stop(signal.SIGKILL)
    act(cgroups)
    if by == "the next agent":
        lowered.start()
        assert lowered.stop() == 0
    elif by == "restore":
        restored = lowered.run("restore")
        assert (restored.returncode, restored.stderr) == (0, "")
    else:
        environment = {"SERVICE_RESULT": "signal", "RUNTIME_DIRECTORY": str(lowered.directory / "run")}
        assert run_command(["restore", "--quick"], {**os.environ, **environment}).returncode == 0
    assert find_quotas(cgroups) == kept


COVERS: dict[str, Callable[[CgroupTree], list[str]]] = {
    "unmounted": lambda tree: ["umount", "-l", tree.hierarchies.cpu_root],
    "covered": lambda tree: ["mount", "-t", "tmpfs", "none", tree.hierarchies.cpu_root],
    "all covered": lambda tree: ["mount", "-t", "tmpfs", "none", os.path.dirname(tree.hierarchies.cpu_root)],
    "covered below": lambda tree: ["mount", "-t", "tmpfs", "none", os.path.join(tree.hierarchies.cpu_root, tree.top)],
}


def enter(agent: AgentProcess, *command: str) -> None:
    assert agent.process is not None
    subprocess.run(["nsenter", "-t", str(agent.process.pid), "-m", *command], check=True)


@pytest.mark.parametrize("case", COVERS)
def test_limits_go_back_though_the_agent_cannot_see_the_mount_any_more(cgroups, agent, case):
    make(cgroups, "a", "b")
    agent.prefix = NAMESPACE
    lower(agent, cgroups, "a", "b")
    enter(agent, *COVERS[case](cgroups))
    assert agent.stop() == 0
    assert find_quotas(cgroups) == {"a": "150000", "b": "150000"}
    assert agent.run("restore").stdout.startswith("nothing to restore")


def test_a_covered_mount_is_reported_and_lowers_nothing_until_it_is_back(cgroups, agent):
    make(cgroups, "a", "b")
    agent.prefix = NAMESPACE
    lower(agent, cgroups, "a", "b")
    root = cgroups.hierarchies.cpu_root
    enter(agent, "mount", "-t", "tmpfs", "none", root)
    wait_until(lambda: any(root in text for text in agent.get("/v1/status")["problems"]), "the status says it")
    assert "cpumond_problems 1.0" in agent.metrics()
    load = cgroups.start_load("a", 2)
    load.burn(2.0)
    wait_until(lambda: cgroups.quota_cores("a") == 1.5, "a busy job gets its CPU back all the same")
    load.burn(0.0)
    wait_until(lambda: agent.job("a")["last_result"] == "paused", "its limit does not go down")
    assert cgroups.quota_cores("a") == 1.5
    assert agent.get("/v1/status")["counters"]["jobs_gone"] == 0
    enter(agent, "umount", root)
    wait_until(lambda: at_floor(cgroups, "a", "b"), "it goes on")
    assert agent.get("/v1/status")["problems"] == []
    assert agent.stop() == 0
    assert find_quotas(cgroups) == {"a": "150000", "b": "150000"}


@pytest.mark.parametrize("case", ["unmounted", "covered below"])
def test_restore_says_what_it_cannot_see_keeps_it_and_does_it_later(cgroups, agent, case):
    make(cgroups, "a", "b")
    lower(agent, cgroups, "a", "b")
    agent.stop(signal.SIGKILL)

    def blind(command: str) -> subprocess.CompletedProcess[str]:
        script = f'{" ".join(COVERS[case](cgroups))} && exec "$@"'
        program = [sys.executable, "-m", "cpumond", command, "--config", str(agent.config_path)]
        return subprocess.run(
            [*NAMESPACE, "sh", "-c", script, "sh", *program], capture_output=True, text=True, timeout=250, check=False
        )

    failed = blind("restore")
    assert failed.returncode == 75, failed
    assert "2 limits may still be lowered" in failed.stderr
    if case != "covered below":
        # An agent would take all jobs for gone.
        assert blind("agent").returncode in (69, 75)
    assert at_floor(cgroups, "a", "b")
    restored = agent.run("restore")
    assert (restored.returncode, restored.stderr) == (0, "")
    assert find_quotas(cgroups) == {"a": "150000", "b": "150000"}
