"""``cpumond estimate`` on real cgroups with real load: names, sums as the kernel counts them, and what it writes."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import run_command
from real_cgroups import CgroupTree
from waiting import wait_until

from cpumond.host.cgroup import open_cgroup

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
        [*COMMAND, "estimate", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(["estimate", *arguments])


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
        output, errors = process.communicate(timeout=250)
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
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    return found


def test_the_agent_finds_the_jobs_with_the_configuration(host: CgroupTree, agent: Any, tmp_path: Path) -> None:
    config, page = tmp_path / "jobs.toml", tmp_path / "estimate.html"
    words = ("--root", host.top, "--duration", "3", "--write", str(config))
    result = run(*words, "--set", "min_cpu_limit=0.1", "--html", str(page))
    assert result.returncode == 0, result.stderr
    for said in ("3 workloads of this host", "(no limit)", "Confidence: low"):
        assert said in result.stdout
    assert WEB[:12] in page.read_text()
    checked = run_command(["check-config", "--config", str(config)])
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "min_cpu_limit = 0.1" in checked.stdout
    again = run(*words)
    told = f"cpumond: {config}: already exists; give --write another file, or replace it with --force\n"
    assert (again.returncode, again.stderr) == (73, told)
    agent.start(config.read_text())
    jobs = {job["cgroup"].removeprefix(f"{host.top}/"): job for job in agent.get("/v1/status")["jobs"]}
    assert {(path, job["job_id"], job["operation_id"]) for path, job in jobs.items()} == {
        (f"docker/{WEB}", WEB[:12], ""),
        (f"docker/{DATABASE}", DATABASE[:12], ""),
        ("slurm/uid_1000/job_17/step_0/task_0", "job_17/step_0/task_0", "17"),
        ("slurm/uid_1000/job_17/step_extern/task_0", "job_17/step_extern/task_0", "17"),
    }
    assert {(job["mode"], job["refused"]) for job in jobs.values()} == {("shadow", "")}
