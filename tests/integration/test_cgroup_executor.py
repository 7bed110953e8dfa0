"""The executor of kind "cgroup" with this machine's cgroups, its keeper, and real jobs."""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from executor_contract import ExecutorContract, Rig, read_cores
from waiting import wait_until

from cpumond.core.errors import CpumondError, CreateError
from cpumond.core.job_cgroups import IDLE_NAME, name_idle_parent
from cpumond.host.cgroup.job_tree import JobCgroupTree
from cpumond.host.cgroup.mounts import Hierarchies, open_hierarchies
from cpumond.host.executor import keeper
from cpumond.host.executor.cgroup import INDEX_NAME, CgroupExecutor
from cpumond.host.executor.model import Ended, NotStarted, Started
from cpumond.testing import make_v2_host

pytestmark = pytest.mark.cgroup

_numbers = itertools.count()
PARENT = os.environ.get("CPUMOND_TEST_CGROUP_PARENT", "")
"""The cgroup, relative to the cpu hierarchy, below which these tests make theirs; "" = its root."""


def make_root_name(kind: str) -> str:
    return os.path.join(PARENT, f"cpumond-test-{os.getpid()}-{kind}-{next(_numbers)}")


def find_keepers(runtime_dir: Path) -> list[int]:
    """The keepers of a directory, by their command lines; nothing else is ever touched."""
    words = {keeper.PROGRAM, str(runtime_dir)}
    return [each.pid for each in psutil.process_iter(["cmdline"]) if words <= {*(each.info["cmdline"] or ())}]


def remove_root(hierarchies: Hierarchies, root: str) -> None:
    """The cgroups above the jobs, which executors leave where they are."""
    mounts = {hierarchies.cpu_root, hierarchies.cpuacct_root, hierarchies.unified_root or "", *_list_v1_mounts()}
    for mount in mounts - {""}:
        for place in (os.path.join(root, IDLE_NAME), root, name_idle_parent(root)):
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(mount, place))


def _list_v1_mounts() -> set[str]:
    with open("/proc/self/mountinfo") as file:
        return {line.split()[4] for line in file if " - cgroup " in line}


@pytest.fixture
def rig(hierarchies: Hierarchies, tmp_path: Path) -> Iterator[Rig]:
    root = make_root_name("jobs")
    cgroups = JobCgroupTree(hierarchies, root)
    runtime_dir = tmp_path / "run"
    try:
        rig = Rig(lambda: CgroupExecutor(cgroups, str(runtime_dir)), cgroups, hierarchies, tmp_path / "jobs")
        yield rig
        rig.close()
        assert os.listdir(runtime_dir / INDEX_NAME) == []
    finally:
        for pid in find_keepers(runtime_dir):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        remove_root(hierarchies, root)


class TestCgroupExecutor(ExecutorContract):
    """The contract."""


def the_keeper(rig: Rig) -> int:
    (pid,) = wait_until(lambda: _find_one(rig), "there is one keeper")
    return pid


def _find_one(rig: Rig) -> list[int]:
    """Its keeper; the first process of a new one ends at once and does not count."""
    found = find_keepers(rig.directory.parent / "run")
    return found if len(found) == 1 else []


def kill_keeper(rig: Rig) -> None:
    """As somebody else would, and wait until it is gone."""
    pid = the_keeper(rig)
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in find_keepers(rig.directory.parent / "run"), "the keeper is gone")
    os.close(pidfd)


def test_less_of_stderr_is_kept_than_of_stdout_where_so_ordered(rig):
    job_id = rig.shell("seq 2000; seq 2000 >&2", max_stderr_bytes=1000)
    rig.wait(Ended, job_id)
    assert rig.read(job_id).startswith(b"1\n2\n")
    kept = rig.read(job_id, "stderr")
    assert 500 <= len(kept) <= 1000
    assert kept.endswith(b"\n2000\n")


def test_how_a_job_finds_itself(rig):
    script = (
        "umask; ulimit -n; ulimit -c; grep -E '^(SigBlk|SigIgn)' /proc/self/status; cat /proc/self/oom_score_adj;"
        "ls /proc/self/fd | wc -l; [ $(cut -d' ' -f6 /proc/$$/stat) = $$ ] && echo leads"
    )
    job_id = rig.shell(script)
    assert rig.wait(Ended, job_id).exit_code == 0
    umask, descriptors, core, blocked, ignored, score, opened, leads = rig.read(job_id).decode().splitlines()
    assert (umask, descriptors, core, leads) == ("0022", "1024", "0", "leads")
    library = 0b11 << 31  # 32 and 33, which the C library keeps to itself
    assert (int(blocked.split()[1], 16), int(ignored.split()[1], 16) & ~library, score) == (0, 0, "0")
    assert opened == "4"  # 0, 1, 2 and the directory that ls reads


def test_its_output_can_be_opened_again(rig):
    job_id = rig.shell("echo out > /dev/stdout; echo err > /dev/stderr", user="nobody" if os.geteuid() == 0 else "")
    assert rig.wait(Ended, job_id).exit_code == 0
    assert (rig.read(job_id), rig.read(job_id, "stderr")) == (b"out\n", b"err\n")


def test_cgroups_that_the_job_made_go_with_it(rig):
    if os.geteuid() != 0:
        pytest.skip("needs root to make cgroups as a job")
    root = os.path.join(rig.hierarchies.cpu_root, rig.cgroups.path("job-with-children"))
    job_id = rig.shell(
        f"mkdir -p {root}/a/b; (echo 0 > {root}/a/b/cgroup.procs; setsid sleep 1000 & echo ready) & wait; exit 2",
        job_id="job-with-children",
    )
    assert rig.wait(Ended, job_id).exit_code == 2
    rig.assert_nothing_left(job_id)


def test_what_is_no_fault_of_the_job(rig):
    without_place, without_cgroup = rig.describe(["true"]), rig.describe(["true"], job_id="x" * 250)
    os.rmdir(without_place.directory)
    for launch, words in ((without_place, without_place.directory), (without_cgroup, "cgroup")):
        rig.executor.start(launch)
        event = rig.wait(NotStarted, launch.job_id)
        assert (event.node_fault, words in event.problem) == (True, True)
        assert launch.job_id not in rig.cgroups.list_job_ids()
    launch = rig.describe(["sleep", "1000"])
    rig.executor.start(launch)
    with pytest.raises(CpumondError, match="already"):
        rig.executor.start(launch)


def test_the_keeper_is_killed_while_jobs_run(rig):
    job_id, quick = rig.gated("echo one", "echo two; while :; do sleep 0.02; done"), rig.gated(":", ":")
    rig.wait_all(Started, (job_id, quick))
    rig.wait_written(job_id, b"one\n")
    kill_keeper(rig)
    rig.open_gate()
    rig.wait_written(job_id, b"two\n")
    ended = rig.wait(Ended, quick)
    assert (ended.exit_code, ended.signal, ended.problem) == (None, None, keeper.LOST)
    assert ended.cpu_seconds is not None
    assert rig.find(Ended, job_id) is None
    after = rig.shell("exit 3")
    assert rig.wait(Ended, after).exit_code == 3
    rig.executor.kill(job_id)
    assert rig.wait(Ended, job_id).problem == keeper.LOST
    assert rig.read(job_id) == b"one\ntwo\n"
    rig.assert_nothing_left(job_id, quick, after)


def test_a_job_whose_record_is_damaged_goes_on_and_its_end_is_told(rig):
    damage = (b'{"job_id":"\xff"}', b"{", b"", b"[" * 5000)
    job_ids = [rig.gated(":", "exit 3") for _ in damage]
    rig.wait_all(Started, job_ids)
    rig.executor.close()
    for job_id, content in zip(job_ids, damage, strict=True):
        (rig.directory.parent / "run" / INDEX_NAME / f"{job_id}.json").write_bytes(content)
    assert set(rig.come_back(*job_ids)) == set(job_ids)
    rig.open_gate()
    assert [ended.exit_code for ended in rig.wait_all(Ended, job_ids)] == [3] * 4
    rig.assert_nothing_left(*job_ids)


def test_a_removed_runtime_directory_is_created_again_for_the_next_agent(rig):
    job_id = rig.gated(":", "exit 3")
    rig.wait(Started, job_id)
    pid = the_keeper(rig)
    run = rig.directory.parent / "run"
    shutil.rmtree(run)
    assert rig.wait(Ended, rig.start("true")).exit_code == 0, "jobs are started all the same"
    wait_until((run / keeper.SOCKET_NAME).exists, "the keeper listens there")
    assert set(rig.restart(job_id)) == {job_id}
    assert the_keeper(rig) == pid
    rig.open_gate()
    assert rig.wait(Ended, job_id).exit_code == 3, "the exit code is not lost"


def test_whatever_is_killed_each_job_ends_once(rig):
    chance = random.Random(1)
    kinds = [["true"], ["sleep", "1000"], ["no-such-program"], ["sh", "-c", "yes | head -c 99999; setsid sleep 1000 &"]]
    living: set[str] = set()
    over: Counter[str] = Counter()

    def note() -> None:
        for event in rig.events:
            if not isinstance(event, Started):
                over[event.job_id] += 1
                living.discard(event.job_id)
        rig.events.clear()

    for _ in range(150):
        dice = chance.random()
        if dice < 0.5:
            living.add(rig.start(*chance.choice(kinds)))
        elif dice < 0.7 and living:
            rig.executor.kill(chance.choice(sorted(living)))
        elif dice < 0.74:
            for pid in find_keepers(rig.directory.parent / "run"):
                with contextlib.suppress(ProcessLookupError):  # one that was killed before ends just now
                    os.kill(pid, signal.SIGKILL)
        elif dice < 0.78:
            rig.poll(0.0)
            note()
            assert set(rig.restart(*living)) <= living
        else:
            rig.poll(chance.choice([0.0, 0.01, 0.05]))
        note()
    for job_id in living:
        rig.executor.kill(job_id)
    wait_until(lambda: rig.poll(0.05) or note() or not living, "all jobs are over")
    assert set(over.values()) == {1}
    rig.assert_nothing_left(*over)


def test_what_a_job_leaves_is_killed_without_an_agent(rig):
    job_id = rig.gated("setsid sleep 1000 & echo ready", "exit 9")
    rig.wait_written(job_id, b"ready")
    rig.executor.close()
    rig.open_gate()
    wait_until(lambda: not rig.list_marked(), "nothing of it lives")
    wait_until(lambda: not find_keepers(rig.directory.parent / "run"), "the keeper ends")
    rig.events.clear()
    assert rig.come_back(job_id) == {}
    ended = rig.wait(Ended, job_id)
    assert (ended.exit_code, ended.problem) == (9, "")
    assert ended.cpu_seconds is not None


def test_one_directory_has_one_keeper(rig):
    first, run = the_keeper(rig), str(rig.directory.parent / "run")
    program = [sys.executable, "-I", "-S", keeper.PROGRAM, run]
    subprocess.run(program, stdout=subprocess.PIPE, timeout=250, check=True)
    assert find_keepers(rig.directory.parent / "run") == [first]


def test_the_keepers_socket_is_for_its_user_only(rig):
    path = rig.directory.parent / "run" / keeper.SOCKET_NAME
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_the_keeper_holds_nothing_of_jobs_that_are_over(rig):
    def count() -> int:
        return len(os.listdir(f"/proc/{the_keeper(rig)}/fd"))

    rig.wait(Ended, rig.start("true"))
    before = count()
    for job_id in [rig.shell("echo a; exit 1") for _ in range(20)] + [rig.start("no-such-program") for _ in range(5)]:
        rig.wait_over(job_id)
    # There may be less of them: those of the first job may not have been closed when they were counted.
    wait_until(lambda: count() <= before, "its descriptors are closed")


def run_as_ordinary_user(hierarchies: Hierarchies, root: str, directory: Path) -> list[object]:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    if not os.access(sys.executable, os.X_OK):
        sys.executable = "/usr/bin/python3"  # ours may lie in a directory of root's
    cgroups = JobCgroupTree(hierarchies, root)
    user = Rig(lambda: CgroupExecutor(cgroups, str(directory / "run")), cgroups, hierarchies, directory / "jobs")
    job_id = user.shell("id -u; exit 3")
    ended = user.wait(Ended, job_id)
    refused = user.wait(NotStarted, user.start("true", user="root"))
    behind = user.start("sleep", "1000", reclaimed=True)
    place = os.path.relpath(user.wait(Started, behind).cgroup, root)
    is_idle = user.is_idle()
    user.close()
    found = user.cgroups.find_idle_class()
    return [ended.exit_code, user.read(job_id).decode(), refused.problem, os.path.dirname(place), is_idle, found.name]


def delegate(directory: str, version: int) -> None:
    """Give a cgroup to the user nobody, as systemd does; on v2 with one below it, because its own has no processes."""
    os.chown(directory, 65534, 65534)
    if version == 2:
        os.mkdir(os.path.join(directory, "agent"))
        for name in ("cgroup.procs", "cgroup.subtree_control", "agent", "agent/cgroup.procs"):
            os.chown(os.path.join(directory, name), 65534, 65534)


def test_an_ordinary_user_with_cgroups_of_its_own(hierarchies):
    if os.geteuid() != 0:
        pytest.skip("needs root to become an ordinary user")
    root = make_root_name("user")
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, 65534, 65534)
        first = JobCgroupTree(hierarchies, root)  # makes the root, on v2 with the cpu controller
        first.create("first", 1.0, 0)
        assert first.remove("first")
        for mount in {hierarchies.cpu_root, hierarchies.cpuacct_root}:
            delegate(os.path.join(mount, root), hierarchies.cpu_version)
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                if hierarchies.cpu_version == 2:
                    # A user moves processes only between cgroups that are below one of its own.
                    Path(hierarchies.cpu_root, root, "agent", "cgroup.procs").write_text("0")
                told = json.dumps(run_as_ordinary_user(hierarchies, root, Path(name)))
            except BaseException as error:
                told = json.dumps(repr(error))
            os.write(write_end, told.encode())
            os._exit(0)
        os.close(write_end)
        with open(read_end, "rb") as pipe:
            answer = json.loads(pipe.read())
        os.waitpid(pid, 0)
        for keeper_pid in find_keepers(Path(name) / "run"):
            os.kill(keeper_pid, signal.SIGKILL)
        wait_until(lambda: not find_keepers(Path(name) / "run"), "the keeper is gone")
        remove_root(hierarchies, f"{root}/agent")
        remove_root(hierarchies, root)
    # Behind its other jobs only, which is no class of the host.
    refusal = "cannot become the user 'root': Operation not permitted"
    assert answer == [3, "65534\n", refusal, IDLE_NAME, True, ""]


@pytest.fixture
def real_tree(hierarchies: Hierarchies) -> Iterator[JobCgroupTree]:
    """Cgroups of jobs below a root of their own, which is removed with them."""
    root = make_root_name("tree")
    tree = JobCgroupTree(hierarchies, root)
    yield tree
    for job_id in tree.list_job_ids():
        wait_until(lambda job_id=job_id: tree.kill(job_id) or tree.remove(job_id), "it can be removed")
    remove_root(hierarchies, root)


@pytest.mark.parametrize(("above", "wanted", "found"), [(0.5, 2.0, 0.5), (0.5, 0.2, 0.2), (0.3333, 5.0, 0.3333)])
def test_a_quota_above_holds_the_jobs(hierarchies, real_tree, above, wanted, found):
    if hierarchies.cpu_version == 2:
        pytest.skip("v2 takes any quota below any other")
    root = os.path.join(hierarchies.cpu_root, os.path.dirname(real_tree.path("a")))
    os.mkdir(root)
    Path(root, "cpu.cfs_quota_us").write_text(str(round(above * 100_000)))
    real_tree.create("a", wanted, 0)
    assert read_cores(hierarchies, real_tree.path("a")) == pytest.approx(found, abs=0.001)


@pytest.mark.parametrize("cores", [0.0, 0.001, 0.0101, 0.5, 7.77, 512.0])
def test_every_limit_is_taken_by_the_kernel(hierarchies, real_tree, cores):
    real_tree.create("a", cores, 1 << 26)
    assert read_cores(hierarchies, real_tree.path("a")) == pytest.approx(max(cores, 0.001), rel=0.01)


def test_the_cpu_controller_is_handed_down_from_the_mount_on(tmp_path):
    mountinfo = make_v2_host(tmp_path, {"cgroup.subtree_control": "memory pids\n"})
    hierarchies = open_hierarchies(mountinfo)
    JobCgroupTree(hierarchies, "a/jobs", mountinfo).create("x", 1.0, 0)
    assert (tmp_path / "cgroup" / "cgroup.subtree_control").read_text() == "+cpu"


def test_processes_in_the_root_of_jobs_are_told_before_anything_is_changed(tmp_path):
    busy = {"cgroup.type": "domain\n", "cgroup.controllers": "cpu\n", "cgroup.procs": f"{os.getpid()}\n"}
    mountinfo = make_v2_host(tmp_path, {"cgroup.subtree_control": "cpu\n", "busy": busy})
    hierarchies = open_hierarchies(mountinfo)
    for root in ("busy", "busy/jobs"):
        with pytest.raises(CreateError, match="/busy: it contains processes"):
            JobCgroupTree(hierarchies, root, mountinfo).create("x", 1.0, 0)
    assert sorted(os.listdir(tmp_path / "cgroup" / "busy")) == sorted(busy)


def test_more_jobs_than_a_job_may_have_descriptors(rig):
    """The keeper holds some descriptors for each job; what a child inherits of them must not be in its way."""
    user = "nobody" if os.geteuid() == 0 else ""
    job_ids = [rig.start("sleep", "1000", user=user, cpu_limit=0.05, working_directory="/") for _ in range(200)]
    rig.wait_all(Started, job_ids)
    for job_id in job_ids:
        rig.executor.kill(job_id)
    rig.wait_all(Ended, job_ids)
    rig.assert_nothing_left(*job_ids)


def test_a_word_that_is_too_long_does_not_end_the_keeper_of_the_others(rig):
    good = rig.start("sleep", "1000")
    rig.wait(Started, good)
    for word in ("x" * 5000, "\u20ac" * 60_000):
        refused = rig.wait(NotStarted, rig.start(word))
        assert not refused.node_fault
        assert refused.problem.startswith(f"cannot run {word[:100]!r}"[:100])
    rig.executor.kill(good)
    assert rig.wait(Ended, good).signal == 9
