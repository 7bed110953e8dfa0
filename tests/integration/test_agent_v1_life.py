"""The agent on real cgroups that come and go, with jobs of the socket, without rights, without room on the disk."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_process import AgentProcess
from configs import at_floor, describe_agent, describe_source, lower, make
from real_cgroups import CgroupTree
from waiting import wait_until

pytestmark = pytest.mark.cgroup


def list_jobs(agent: AgentProcess) -> list[str]:
    return [job["job_id"] for job in agent.get("/v1/status")["jobs"]]


def no_errors(agent: AgentProcess) -> bool:
    counters = agent.get("/v1/status")["counters"]
    return (counters["errors"], counters["write_errors"], agent.events("tick_failed")) == (0, 0, [])


def test_a_cgroup_that_goes_is_dropped_and_one_made_again_is_another_job(cgroups, agent):
    make(cgroups, "a", "b")
    # Without rescans in the time of the test: the kernel says what comes and goes.
    lower(agent, cgroups, "a", "b", more='[discovery]\nrescan_period = "1h"\n')
    cgroups.remove("a")
    wait_until(lambda: list_jobs(agent) == ["b"], "the job is dropped")
    # Removed and made again between two ticks, with a limit of its own that must not be taken for a lowered one.
    agent.send_signal(signal.SIGSTOP)
    cgroups.remove("b")
    make(cgroups, "b", "a", quota_us=120_000)
    agent.send_signal(signal.SIGCONT)
    wait_until(lambda: sorted(list_jobs(agent)) == ["a", "b"] and agent.job("b")["cpu_limit"] == 1.2, "both are new")
    assert agent.job("a")["cpu_limit"] == 1.2
    wait_until(lambda: at_floor(cgroups, "a", "b"), "both quotas are down at the floor")
    assert no_errors(agent)
    assert agent.get("/v1/status")["counters"]["jobs_gone"] >= 2
    assert agent.stop() == 0
    assert (cgroups.quota_cores("a"), cgroups.quota_cores("b")) == (1.2, 1.2)


def test_a_limit_is_put_back_where_only_the_counters_of_its_cgroup_go(cgroups, agent):
    if len(cgroups.roots) == 1:
        pytest.skip("needs cpu and cpuacct mounted apart")
    make(cgroups, "a")
    lower(agent, cgroups, "a")
    counters = os.path.join(cgroups.hierarchies.cpuacct_root, cgroups.top, "a")
    Path(counters, "../cgroup.procs").write_text(Path(counters, "cgroup.procs").read_text())
    os.rmdir(counters)
    wait_until(lambda: cgroups.quota_cores("a") == 1.5, "the limit is back")
    os.mkdir(counters)
    wait_until(lambda: at_floor(cgroups, "a"), "the job is back")
    assert agent.job("a")["cpu_limit"] == 1.5
    assert agent.stop() == 0
    assert cgroups.quota_cores("a") == 1.5


def test_two_hundred_jobs_come_and_go_without_a_trace(cgroups, agent):
    # Beside the managed root: a cgroup of the same kind that a pattern matches, and one that none matches.
    for name in ("managed", "beside", "beside/job0"):
        cgroups.make(name)
    cgroups.write("beside/job0", "quota_us", 150_000)
    beside = {name: cgroups.read_all(name) for name in ("", "managed", "beside", "beside/job0")}
    sources = describe_source(f"{cgroups.top}/*/job*", more="id_regex = '[^/]+/[^/]+$'")
    agent.start(describe_agent(cgroups, sources=sources, roots=f"{cgroups.top}/managed"))
    wait_until(lambda: list_jobs(agent) == ["beside/job0"], "the job outside is seen")
    assert "outside managed_roots" in agent.job("beside/job0")["refused"]
    descriptors = Path(f"/proc/{agent.process.pid}/fd")

    def count_held() -> int:
        count = 0
        for each in descriptors.iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                count += cgroups.top in os.readlink(each)
        return count

    before = count_held()

    names = [f"managed/job{number}" for number in range(200)]
    for name in names:
        cgroups.make(name)
        cgroups.write(name, "quota_us", 150_000)
    wait_until(lambda: len(list_jobs(agent)) == 201, "all jobs are followed", 60)
    assert count_held() >= before + 200
    wait_until(lambda: at_floor(cgroups, *names[::20]), "the quotas are down at the floor", 60)
    for name in names[:100]:
        cgroups.remove(name)
    # Some are gone for a moment only.
    for name in names[:50]:
        cgroups.make(name)
    for name in names[50:100]:
        cgroups.make(name)
        cgroups.remove(name)
    wait_until(lambda: len(list_jobs(agent)) == 151, "the agent keeps up", 60)
    for name in [*names[:50], *names[100:]]:
        cgroups.remove(name)
    wait_until(lambda: list_jobs(agent) == ["beside/job0"], "all are dropped", 60)
    wait_until(lambda: count_held() == before, "all descriptors are given back")
    assert no_errors(agent)
    assert agent.events("job_error") == []
    assert agent.stop() == 0
    assert {name: cgroups.read_all(name) for name in beside} == beside
    # Nothing is left to put back either.
    assert agent.run("restore").stdout.startswith("nothing to restore")


def in_namespace(agent: AgentProcess, mounts: str) -> None:
    """Start ``agent`` in a mount namespace of its own, after the commands ``mounts`` that nobody else sees."""
    agent.prefix = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{mounts} && exec "$@"', "sh"]
    probe = subprocess.run([*agent.prefix, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"needs a mount namespace of its own: {probe.stderr}")


def test_on_a_full_disk_no_cgroup_is_changed_and_it_is_said(cgroups, agent, tmp_path):
    found = make(cgroups, "a", "b")
    full_disk = tmp_path / "state"
    full_disk.mkdir()
    ballast = f'head -c 4096 /dev/zero > "{full_disk}/ballast"'
    in_namespace(agent, f'mount -t tmpfs -o size=4k none "{full_disk}" && {ballast}')
    agent.start(describe_agent(cgroups))
    wait_until(lambda: agent.job("a")["last_result"] == "failed", "the first change fails")
    tick = agent.get("/v1/status")["tick"]
    wait_until(lambda: agent.get("/v1/status")["tick"] > tick + 5, "some more ticks")
    assert {name: cgroups.read_all(name) for name in found} == found
    assert agent.job("a")["current_cpu_limit"] == 1.5
    [error] = agent.events("agent_error")
    assert "No space left on device" in error["error"]
    assert str(full_disk) in error["error"]
    assert "free space" in error["error"]
    refused = agent.request("POST", "/v1/registered", {"cgroup": f"{cgroups.top}/a", "job_id": "a"})
    assert "No space left on device" in refused.json()["error"]
    # Room again, seen through the agent's own view of the file system.
    os.unlink(f"/proc/{agent.process.pid}/root{full_disk}/ballast")
    wait_until(lambda: at_floor(cgroups, "a", "b"), "both quotas are down at the floor")
    assert agent.stop() == 0
    assert {name: cgroups.read_all(name) for name in found} == found


@pytest.mark.parametrize("damage", ["brackets", "copy only"])
def test_restore_reads_what_it_can_and_says_what_is_wrong(cgroups, agent, tmp_path, damage):
    found = make(cgroups, "a")["a"]
    lower(agent, cgroups, "a")
    agent.stop(signal.SIGKILL)
    if damage == "copy only":
        (tmp_path / "state" / "originals.state").write_bytes(b"")
    else:
        with agent.config_path.open("a") as file:
            file.write(f"\nx = {'[' * 3000}\n")
    done = agent.run("restore")
    assert cgroups.read_all("a") == found
    assert done.stdout == f"restored {cgroups.top}/a\n"
    assert done.returncode == (0 if damage == "copy only" else 78)
    assert done.stderr.count("\n") == 1
    assert ("not a state file" if damage == "copy only" else str(agent.config_path)) in done.stderr
    assert ("nested too deep" in done.stderr) is (damage == "brackets")


# Everything is imported first: nobody may not be allowed to read the interpreter's own directory.
AS_NOBODY = """
import encodings.ascii, encodings.idna, encodings.latin_1, os, sys, tomllib
import cpumond.agent.api, cpumond.agent.main, cpumond.cli.agent.service, cpumond.agent.report.log
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
from cpumond.cli import main
main(sys.argv[1:])
"""


@pytest.fixture
def public(cgroups: CgroupTree) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="cpumond-rights-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


def write_public(public: Path, cgroups: CgroupTree, mode: int = 0o644) -> Path:
    config = public / "cpumond.toml"
    config.write_text(
        f'state_dir = "{public}/state"\nruntime_dir = "{public}/run"\n{describe_agent(cgroups)}[metrics]\nlisten = ""\n'
    )
    config.chmod(mode)
    return config


def run_as_nobody(command: str, config: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", AS_NOBODY, command, "--config", str(config)],
        capture_output=True, text=True, timeout=250, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("missing", "text"),
    [("config", "cannot be read"), ("run", "runtime_dir"), ("lock", "agent.lock"), ("state", "state_dir"),
     ("state file", "originals.state")],
)  # fmt: skip
def test_missing_rights_are_one_sentence_and_code_77(cgroups, public, missing, text):
    found = make(cgroups, "a")["a"]
    config = write_public(public, cgroups, 0o600 if missing == "config" else 0o644)
    nobody = 65534
    if missing in ("state", "state file"):
        (public / "run").mkdir()
        os.chown(public / "run", nobody, nobody)
    if missing == "lock":
        (public / "run").mkdir()
        (public / "run" / "agent.lock").touch(0o600)
    if missing == "state file":
        (public / "state").mkdir(0o700)
    # Without a configuration `restore` looks in the built-in places, without a state_dir there is nothing to restore.
    for command in ("agent",) if missing in ("config", "state") else ("agent", "restore"):
        done = run_as_nobody(command, config)
        assert done.returncode == 77, (command, done.stderr)
        assert text in done.stderr
        assert done.stderr.startswith("cpumond: ")
        assert done.stderr.count("\n") == 1
    assert cgroups.read_all("a") == found


def test_cgroups_that_cannot_be_written_are_reported_as_they_are(cgroups, agent):
    found = make(cgroups, "a")["a"]
    root = cgroups.hierarchies.cpu_root
    in_namespace(agent, f'mount --bind "{root}" "{root}" && mount -o remount,bind,ro "{root}"')
    agent.start(describe_agent(cgroups, more='[writes]\ndrift_backoff = "10m"\n'))
    wait_until(lambda: agent.events("limit_write_failed"), "the write fails")
    tick = agent.get("/v1/status")["tick"]
    wait_until(lambda: agent.get("/v1/status")["tick"] > tick + 20, "twenty more ticks")
    job = agent.job("a")
    assert (job["current_cpu_limit"], job["last_result"]) == (1.5, "failed")
    assert "Read-only file system" in job["last_error"]
    # Not one line for each check: a failed lowering waits for drift_backoff.
    assert len(agent.events("limit_write_failed")) <= 2
    assert agent.stop() == 0
    assert agent.events("restore_failed") == []
    assert cgroups.read_all("a") == found


def test_jobs_leave_the_descriptors_that_limits_are_written_with(cgroups, agent):
    names = [f"j{number}" for number in range(34)]
    make(cgroups, *names)
    agent.prefix = ["prlimit", "--nofile=112:112"]
    agent.start(describe_agent(cgroups))
    followed = list_jobs(agent)
    # Three each of what three quarters of the limit hold.
    assert len(followed) == 28
    assert "raise LimitNOFILE (3 for each job)" in agent.get("/v1/status")["problems"][0]
    wait_until(lambda: at_floor(cgroups, *followed), "those that are followed are down at the floor")
    # A job that ends makes room for another one.
    cgroups.remove(followed[0])
    names.remove(followed[0])
    wait_until(lambda: len(set(list_jobs(agent)) - set(followed)) == 1, "another job is followed")
    assert agent.stop() == 0
    assert {cgroups.quota_cores(name) for name in names} == {1.5}
