"""The agent's own files are removed under it, or cannot be written: what it does, and what ``restore`` says then."""

import os
import re
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_process import AgentProcess
from configs import at_floor, lower, make
from real_cgroups import CgroupTree
from waiting import wait_until

pytestmark = pytest.mark.cgroup


@pytest.fixture
def lowered(cgroups: CgroupTree, agent: AgentProcess) -> AgentProcess:
    make(cgroups, "a", "b")
    lower(agent, cgroups, "a", "b")
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


def test_another_agent_that_came_meanwhile_keeps_its_files(cgroups, agent, tmp_path):
    """It began where nothing told of the first; the first one puts its limits back and goes."""
    make(cgroups, "a")
    lower(agent, cgroups, "a", check_period="1s")
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


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "mounted"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "cpumond-test", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("disk", ["read-only", "full", "immutable"])
def test_a_second_restore_undoes_nothing_where_the_file_cannot_be_written(cgroups, agent, mounted, disk):
    """A file is overwritten in place, and the newer copy counts; where neither can be, the exit code is not 0."""
    make(cgroups, *(f"j{number}" for number in range(60)))
    for name in ("state",) if disk == "read-only" else ("state", "run"):
        (mounted / name).mkdir()
        (agent.directory / name).symlink_to(mounted / name)
    lower(agent, cgroups, "j0", "j59")
    kill(agent)
    if disk == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    elif disk == "full":
        subprocess.run(["dd", "if=/dev/zero", f"of={mounted}/fill", "bs=4096"], capture_output=True, check=False)
        assert os.statvfs(mounted).f_bavail == 0
    else:  # whatever is written fails, the lock can be taken
        for name in ("state", "run"):
            (mounted / name / "originals.state.new").mkdir()
            if subprocess.run(["chattr", "+i", str(mounted / name / "originals.state")], check=False).returncode:
                pytest.skip("no file can be made immutable here")
    done = agent.run("restore")
    assert cgroups.quota_cores("j0") == 1.5
    if disk == "immutable":
        assert done.returncode in (73, 77)
        assert "would undo limits that were set meanwhile" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    cgroups.write("j0", "quota_us", 70_000)
    assert agent.run("restore").returncode == 0
    assert cgroups.quota_cores("j0") == 0.7
