"""The agent's own files are removed under it, or cannot be written: what it does, and what ``restore`` says then."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess

import pytest
from agent_process import AgentProcess
from configs import at_floor, describe_agent, make
from waiting import wait_until

from cpumond.testing import CgroupTree

pytestmark = pytest.mark.cgroup


@pytest.fixture
def lowered(cgroups: CgroupTree, agent: AgentProcess) -> AgentProcess:
    """An agent that holds two limits down."""
    make(cgroups, "a", "b")
    agent.start(describe_agent(cgroups))
    wait_until(lambda: at_floor(cgroups, "a", "b"), "both quotas are down at the floor")
    return agent


def remove(agent: AgentProcess, *names: str) -> None:
    for name in names:
        # Where the agent writes meanwhile what is there already is moved out of its way at once.
        gone = agent.directory / f"{name}.gone"
        (agent.directory / name).rename(gone)
        wait_until(
            lambda gone=gone: not shutil.rmtree(gone, ignore_errors=True) and not gone.exists(), f"{name} is gone"
        )


def kill(agent: AgentProcess) -> None:
    agent.stop(signal.SIGKILL)


def test_directories_that_are_removed_under_it_are_written_anew(cgroups, lowered):
    assert lowered.request("POST", "/v1/registered", {"job_id": "mine", "cgroup": f"{cgroups.top}/a"}).is_success
    remove(lowered, "state", "run")
    files = [lowered.directory / name for name in ("state/originals.state", "state/registered.state", "run/agent.lock")]
    files += [lowered.directory / name for name in ("run/originals.state", "run/control.sock")]
    wait_until(lambda: all(path.exists() for path in files), "all is there again")
    assert stat.S_IMODE(os.stat(lowered.directory / "state").st_mode) == 0o700
    assert stat.S_IMODE(os.stat(files[0]).st_mode) == 0o600
    wait_until(lowered._ready, "the control socket answers")
    # The tick that made them anew is over when they are counted; one that it was about to write is none of them.
    wait_until(lambda: re.search(r"cpumond_lost_files_total [45]\.0", lowered.metrics()), "all five are counted")
    [problem] = lowered.get("/v1/status")["problems"]
    assert "originals.state" in problem
    assert "removed or replaced while the agent ran" in problem
    assert 1 <= len(lowered.events("files_lost")) <= 5
    assert lowered.run("agent").returncode == 69, "a second agent does not start"
    assert lowered.run("status").returncode == 0
    make(cgroups, "c")
    wait_until(lambda: at_floor(cgroups, "a", "b", "c"), "new jobs are lowered, too")
    kill(lowered)
    done = lowered.run("restore")
    assert (done.returncode, cgroups.quota_cores("a"), cgroups.quota_cores("c")) == (0, 1.5, 1.5)


def test_restore_says_that_it_cannot_know(cgroups, lowered):
    """Both directories go, and the agent with them before it can notice."""
    lowered.send_signal(signal.SIGSTOP)
    remove(lowered, "state", "run")
    kill(lowered)
    done = lowered.run("restore")
    assert done.returncode == 75
    assert "the limits that it lowered are unknown" in done.stderr
    assert "Traceback" not in done.stderr
    assert "nothing to restore" not in done.stdout


def test_restore_needs_no_state_where_no_agent_ever_writes(agent):
    agent.write_config("")
    done = agent.run("restore")
    assert (done.returncode, done.stdout) == (0, f"nothing to restore in {agent.directory}/state/originals.state\n")


def test_another_agent_that_came_meanwhile_keeps_its_files(cgroups, agent, tmp_path):
    """It began where nothing told of the first; the first one puts its limits back and goes."""
    make(cgroups, "a")
    agent.start(describe_agent(cgroups, check_period="1s"))
    wait_until(lambda: at_floor(cgroups, "a"), "the quota is down at the floor", 30)
    agent.send_signal(signal.SIGSTOP)
    remove(agent, "run", "state")
    second = AgentProcess(tmp_path)
    second.config_path = agent.config_path
    second.socket_path = agent.socket_path
    text = agent.config_path.read_text().replace('mode = "reclaim"', 'mode = "shadow"')
    agent.config_path.write_text(text.replace(f"127.0.0.1:{agent.port}", ""))
    try:
        second.log_path = tmp_path / "second.log"
        second.start()
        agent.send_signal(signal.SIGCONT)
        assert agent.process.wait(100) == 69
        assert agent.events("another_agent")
        assert cgroups.quota_cores("a") == 1.5
        assert second._ready()
        assert (agent.directory / "run" / "agent.lock").exists()
    finally:
        second.close()


@pytest.mark.parametrize("both", [False, True])
def test_a_second_restore_undoes_nothing_where_the_file_cannot_be_written(cgroups, agent, tmp_path, both):
    """A file system that may only be read: the newer copy counts; without one the exit code is not 0."""
    make(cgroups, "a")
    place = tmp_path / "mounted"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "cpumond-test", str(place)], check=True)
    try:
        for name in ("state", "run") if both else ("state",):
            (place / name).mkdir()
            (agent.directory / name).symlink_to(place / name)
        agent.start(describe_agent(cgroups))
        wait_until(lambda: at_floor(cgroups, "a"), "the quota is down at the floor")
        kill(agent)
        if both:
            # Whatever is written fails, the lock can be taken.
            for name in ("state", "run"):
                (place / name / "originals.state.new").mkdir()
                if subprocess.run(["chattr", "+i", str(place / name / "originals.state")], check=False).returncode:
                    pytest.skip("no file can be made immutable here")
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        done = agent.run("restore")
        assert cgroups.quota_cores("a") == 1.5
        if both:
            assert done.returncode in (73, 77)
            assert "would undo limits that were set meanwhile" in done.stderr
            return
        assert (done.returncode, done.stderr) == (0, "")
        cgroups.write("a", "quota_us", 70_000)
        assert agent.run("restore").returncode == 0
        assert cgroups.quota_cores("a") == 0.7
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_keeps_no_entries_of_limits_that_are_back(cgroups, agent, tmp_path):
    make(cgroups, *(f"j{number}" for number in range(60)))
    place = tmp_path / "mounted"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "cpumond-test", str(place)], check=True)
    try:
        for name in ("state", "run"):
            (place / name).mkdir()
            (agent.directory / name).symlink_to(place / name)
        agent.start(describe_agent(cgroups))
        wait_until(lambda: at_floor(cgroups, "j0", "j59"), "the quotas are down at the floor")
        kill(agent)
        subprocess.run(["dd", "if=/dev/zero", f"of={place}/fill", "bs=4096"], capture_output=True, check=False)
        assert os.statvfs(place).f_bavail == 0
        done = agent.run("restore")
        assert (done.returncode, cgroups.quota_cores("j0")) == (0, 1.5), done.stderr
        cgroups.write("j0", "quota_us", 70_000)
        assert agent.run("restore").returncode == 0
        assert cgroups.quota_cores("j0") == 0.7
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
