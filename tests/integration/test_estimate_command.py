"""``cpumond estimate`` on real cgroups with real load: names, sums as the kernel counts them, and what it writes."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import wait_until

from cpumond.cgroup import open_cgroup
from cpumond.testing import CgroupTree, remove_cgroups

pytestmark = pytest.mark.cgroup

COMMAND = [sys.executable, "-m", "cpumond"]
WEB = "3f9ab1c2d4e5" + "0" * 52
DATABASE = "0a1b2c3d4e5f" + "1" * 52
WORKLOADS = {
    f"docker/{WEB}": ("docker", WEB[:12]),
    f"docker/{DATABASE}": ("docker", DATABASE[:12]),
    "slurm/uid_1000/job_17": ("slurm", "job 17"),
}


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "estimate", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, "estimate", *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def host(cgroups: CgroupTree) -> CgroupTree:
    """Two containers, one with a quota, and a job of Slurm with two steps, whose quota is on the job; all with load."""
    for path, quota, load in (
        (f"docker/{WEB}", 1.5, 0.3),
        (f"docker/{DATABASE}", None, 0.1),
        ("slurm/uid_1000/job_17/step_0/task_0", None, 0.2),
        ("slurm/uid_1000/job_17/step_extern/task_0", None, 0.05),
    ):
        cgroups.make(path)
        if quota is not None:
            cgroups.write(path, "quota_us", int(quota * 100_000))
        cgroups.start_load(path).burn(load)
    cgroups.write("slurm/uid_1000/job_17", "quota_us", 200_000)
    return cgroups


def read_counters(host: CgroupTree) -> dict[str, float]:
    """CPU seconds by the kernel's own counter, read anew."""
    found = {}
    for name in WORKLOADS:
        cgroup = open_cgroup(host.hierarchies, f"{host.top}/{name}")
        assert cgroup is not None
        reading = cgroup.read(0.0)
        assert reading is not None
        found[name] = reading.total_cpu_s
        cgroup.close()
    return found


def rest(host: CgroupTree) -> None:
    """All loads sleep, and what they used is counted."""
    for load in host._processes:
        load.burn(0.0)
    pause = threading.Event()

    def is_still() -> bool:
        before = read_counters(host)
        pause.wait(0.1)
        return read_counters(host) == before

    wait_until(is_still, "nothing is used any more")


def read_all_files(host: CgroupTree) -> dict[str, dict[str, str]]:
    return {name: host.read_all(name) for name in WORKLOADS}


def test_names_and_sums_are_those_of_the_kernel(host: CgroupTree) -> None:
    """Nothing is used when it begins and when it is stopped, so both have seen the same."""
    files = read_all_files(host)
    rest(host)
    process = start("--root", host.top, "--duration", "1h", "--json")
    try:
        followed = [f"{host.hierarchies.cpuacct_root}/{host.top}/{path}" for path in WORKLOADS]

        def has_looked() -> bool:
            opened = " ".join(list_open(process.pid))
            is_asleep = psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING
            return is_asleep and all(path in opened for path in followed)

        wait_until(has_looked, "the first sample")
        before = read_counters(host)
        for load, share in zip(host._processes, (0.3, 0.1, 0.2, 0.05), strict=True):
            load.burn(share)
        wait_until(lambda: sum(read_counters(host).values()) > sum(before.values()) + 4.0, "it has seen some use", 100)
        rest(host)
        after = read_counters(host)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (0, "")
    found = json.loads(output)
    rows = {row["cgroup"].removeprefix(f"{host.top}/"): row for row in found["workloads"]}
    assert {path: (row["kind"], row["name"]) for path, row in rows.items()} == WORKLOADS
    assert rows["slurm/uid_1000/job_17"]["detail"] == "uid 1000"
    used = {path: after[path] - before[path] for path in before}
    assert {path: row["used_cpu_s"] for path, row in rows.items()} == pytest.approx(used, rel=0.05, abs=0.03)
    assert found["total"]["used_cpu_s"] == pytest.approx(sum(used.values()), rel=0.05)
    assert found["total"]["used_cores"] == pytest.approx(found["total"]["used_cpu_s"] / found["watched_s"], rel=0.02)
    orders = {path: (row["ordered_cores"], row["is_limited"]) for path, row in rows.items()}
    assert orders == {
        f"docker/{WEB}": (pytest.approx(1.5), True),
        f"docker/{DATABASE}": (found["host_cores"], False),
        "slurm/uid_1000/job_17": (pytest.approx(2.0), True),
    }
    assert found["total_limited"]["ordered_cores"] == pytest.approx(3.5, rel=0.02)
    assert found["confidence"] == "low"
    assert any(note.startswith("stopped after") for note in found["notes"])
    for row in rows.values():
        for rule in row["rules"].values():
            assert 0.0 <= rule["reclaimable_cores"] <= row["ordered_cores"]
            assert rule["held_back_ratio"] <= rule["held_back_most_ratio"]
    assert read_all_files(host) == files


def list_open(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    return found


BURN = """
#include <stdlib.h>
#include <time.h>
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
int main(int count, char **words)
{
    double share = atof(words[count - 1]);
    struct timespec rest = {0, (long)(0.05 * (1 - share) * 1e9)};
    for (;;) {
        for (double end = now() + 0.05 * share; now() < end;) {}
        nanosleep(&rest, 0);
    }
}
"""


@pytest.fixture
def podman(cgroups: CgroupTree, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """podman with storage of its own; its containers have a file system with one program, ``/burn SHARE``.

    It makes cgroups in all hierarchies, which are removed before ``cgroups`` goes.
    """
    if shutil.which("podman") is None or shutil.which("runc") is None or shutil.which("cc") is None:
        pytest.skip("needs podman, runc and a C compiler")
    root, source = tmp_path / "rootfs", tmp_path / "burn.c"
    for name in ("proc", "sys", "dev", "etc", "run", "tmp"):
        (root / name).mkdir(parents=True)
    source.write_text(BURN)
    subprocess.run(["cc", "-O1", "-static", "-o", root / "burn", source], check=True, capture_output=True, timeout=60)
    # podman takes no longer path for its sockets than 50 characters.
    run_root = tempfile.mkdtemp(prefix="cpumond-podman-")
    command = [
        "podman", "--root", f"{run_root}/storage", "--runroot", f"{run_root}/run", "--runtime", "runc",
        "--cgroup-manager=cgroupfs", "--storage-driver", "vfs", "--events-backend=file",
    ]  # fmt: skip

    def run_podman(*arguments: str) -> str:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    try:
        yield run_podman
    finally:
        run_podman("rm", "--force", "--all", "--time", "0")
        # Its monitors may still be on their way out.
        assert remove_cgroups(cgroups.top)
        wait_until(lambda: remove_folder(run_root), "nothing is written there any more")


def remove_folder(path: str) -> bool:
    shutil.rmtree(path, ignore_errors=True)
    return not os.path.exists(path)


def test_containers_of_podman(podman: Callable[..., str], cgroups: CgroupTree, tmp_path: Path) -> None:
    common = ["--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000"]
    common += ["--cgroup-parent", f"/{cgroups.top}"]
    started = [
        podman("run", "--detach", *common, "--cpus", cpus, "--rootfs", str(tmp_path / "rootfs"), "/burn", share)
        for cpus, share in (("1.5", "0.3"), ("1.25", "0.1"))
    ]
    result = run("--root", cgroups.top, "--duration", "3", "--json")
    assert result.returncode == 0, result.stderr
    rows = {row["name"]: row for row in json.loads(result.stdout)["workloads"]}
    assert {(row["kind"], row["name"]) for row in rows.values()} == {("podman", each[:12]) for each in started}
    assert [rows[each[:12]]["ordered_cores"] for each in started] == [1.5, 1.25]
    assert all(row["used_cpu_s"] > 0.0 for row in rows.values())


def test_the_table_the_configuration_and_the_report(host: CgroupTree, tmp_path: Path) -> None:
    config, page = tmp_path / "jobs.toml", tmp_path / "estimate.html"
    result = run(
        "--root", host.top, "--duration", "3", "--set", "min_cpu_limit=0.1", "--write", str(config), "--html", str(page)
    )
    assert result.returncode == 0, result.stderr
    assert "3 workloads of this host" in result.stdout
    assert "(no limit)" in result.stdout
    assert "How sure that is: low" in result.stdout
    assert WEB[:12] in page.read_text()
    checked = subprocess.run(
        [*COMMAND, "check-config", "--config", str(config)], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "mode = shadow" in checked.stdout
    assert "min_cpu_limit = 0.1" in checked.stdout
    again = run("--root", host.top, "--duration", "1", "--write", str(config))
    assert again.returncode == 73
    assert again.stderr == (
        f"cpumond: {config}: is there already; give --write another file, or replace it with --force\n"
    )


def test_the_agent_finds_the_jobs_with_the_configuration(host: CgroupTree, agent: Any, tmp_path: Path) -> None:
    config = tmp_path / "jobs.toml"
    result = run("--root", host.top, "--duration", "2", "--write", str(config))
    assert result.returncode == 0, result.stderr
    agent.start(config.read_text())
    jobs = {job["cgroup"].removeprefix(f"{host.top}/"): job for job in agent.get("/v1/status")["jobs"]}
    assert {(path, job["job_id"], job["operation_id"]) for path, job in jobs.items()} == {
        (f"docker/{WEB}", WEB[:12], ""),
        (f"docker/{DATABASE}", DATABASE[:12], ""),
        ("slurm/uid_1000/job_17/step_0/task_0", "job_17/step_0/task_0", "17"),
        ("slurm/uid_1000/job_17/step_extern/task_0", "job_17/step_extern/task_0", "17"),
    }
    assert {(job["mode"], job["refused"]) for job in jobs.values()} == {("shadow", "")}


def test_anonymous_says_no_name(host: CgroupTree, tmp_path: Path) -> None:
    page = tmp_path / "estimate.html"
    for arguments in (["--json"], []):
        result = run("--root", host.top, "--duration", "2", "--anonymous", "--html", str(page), *arguments)
        assert result.returncode == 0, result.stderr
        for text in (result.stdout, page.read_text()):
            for word in (WEB[:6], DATABASE[:6], "job_17", "job 17", host.top, "uid"):
                assert word not in text
            assert "workload 1" in text


def test_workloads_that_begin_and_end_meanwhile_are_counted(cgroups: CgroupTree) -> None:
    cgroups.make(f"docker/{WEB}")
    load = cgroups.start_load(f"docker/{WEB}")
    load.burn(0.3)
    process = start("--root", cgroups.top, "--duration", "1h", "--json")
    try:
        wait_until(lambda: any(WEB in name for name in list_open(process.pid)), "the first sample")
        cgroups.make("slurm/uid_0/job_3")
        cgroups.start_load("slurm/uid_0/job_3").burn(0.2)
        wait_until(lambda: any("job_3" in name for name in list_open(process.pid)), "the new job is seen", 60)
        load.stop()
        wait_until(lambda: remove(cgroups, f"docker/{WEB}"), "the container is gone")
        wait_until(lambda: not any(WEB in name for name in list_open(process.pid)), "its end is seen")
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (0, "")
    found = json.loads(output)
    assert {(row["name"], row["is_gone"]) for row in found["workloads"]} == {(WEB[:12], True), ("job 3", False)}
    assert found["total"]["used_cpu_s"] == pytest.approx(sum(row["used_cpu_s"] for row in found["workloads"]))


def remove(cgroups: CgroupTree, name: str) -> bool:
    try:
        cgroups.remove(name)
    except OSError:
        return False
    return True


def test_a_job_that_is_in_cpuacct_alone_is_counted(cgroups: CgroupTree, tmp_path: Path) -> None:
    """Slurm's jobs are where cpu and cpuacct are mounted apart."""
    roots = cgroups.hierarchies
    if roots.cpuacct_root in (roots.cpu_root, roots.unified_root):
        pytest.skip("needs cpu and cpuacct mounted apart (v1)")
    cgroups.make(f"docker/{WEB}")
    cgroups.make("slurm/uid_5/job_9")
    cgroups.start_load("slurm/uid_5/job_9").burn(0.3)
    for path in ("slurm/uid_5/job_9", "slurm/uid_5", "slurm"):
        wait_until(lambda path=path: leave_cpu(cgroups, path), "the job leaves the hierarchy of cpu")
    config = tmp_path / "jobs.toml"
    result = run("--root", cgroups.top, "--duration", "2", "--json", "--write", str(config))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    rows = {row["name"]: row for row in found["workloads"]}
    assert set(rows) == {"job 9", WEB[:12]}
    assert (rows["job 9"]["ordered_cores"], rows["job 9"]["is_limited"]) == (found["host_cores"], False)
    assert rows["job 9"]["used_cpu_s"] > 0.05
    assert any(note.startswith("1 workload is in the hierarchy of cpuacct alone") for note in found["notes"])
    assert "slurm" not in config.read_text()


def leave_cpu(cgroups: CgroupTree, path: str) -> bool:
    """Its processes go to the root of the cpu hierarchy, and the cgroup there goes."""
    root = cgroups.hierarchies.cpu_root
    for pid in Path(root, cgroups.top, path, "cgroup.procs").read_text().split():
        Path(root, cgroups.top, "cgroup.procs").write_text(pid)
    try:
        os.rmdir(os.path.join(root, cgroups.top, path))
    except OSError:
        return False
    return True


def test_progress_on_a_terminal_and_ctrl_c(host: CgroupTree) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "estimate", "--root", host.top],
        stdin=follower,
        stdout=subprocess.PIPE,
        stderr=follower,
        text=True,
        env={**os.environ, "COLUMNS": "120"},
    )
    os.close(follower)
    try:
        seen = b""

        def has_moved() -> bool:
            nonlocal seen
            seen += os.read(leader, 4096)
            return seen.count(b"3 workloads") >= 3

        wait_until(has_moved, "the line has moved")
        assert b" of 5m: 3 workloads, " in seen
        assert b"Ctrl-C for what is known so far" in seen
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    assert process.returncode == 0
    assert "Note: stopped after" in output


def test_a_terminal_that_goes_away_ends_it_with_what_is_known(host: CgroupTree) -> None:
    process = start("--root", host.top, "--json")
    try:
        wait_until(lambda: any(WEB in name for name in list_open(process.pid)), "the first sample")
        before = read_counters(host)
        wait_until(lambda: sum(read_counters(host).values()) > sum(before.values()) + 1.0, "it has seen some use", 100)
        process.send_signal(signal.SIGHUP)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (0, "")
    assert len(json.loads(output)["workloads"]) == 3


def test_nothing_to_watch_is_one_sentence(cgroups: CgroupTree) -> None:
    for path, said in ((cgroups.top, "looks like a workload"), (f"{cgroups.top}/none", "there is no cgroup")):
        result = run("--root", path, "--duration", "1")
        assert (result.returncode, result.stdout) == (69, "")
        assert said in result.stderr
        assert result.stderr.count("\n") == 1
