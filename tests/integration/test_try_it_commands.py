"""dry-run, record and demo on real cgroups: what they print is true, they write nothing, they leave nothing."""

import glob
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import test_every_command as every
from commands import run_command
from real_cgroups import CgroupTree
from waiting import is_over, wait_until

from cpumond.host.cgroup.mounts import Hierarchies, read_mounts

COMMAND = [sys.executable, "-m", "cpumond"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(list(arguments))


@pytest.mark.cgroup
def test_dry_run_prints_a_line_per_check_and_never_writes(cgroups: CgroupTree) -> None:
    path = cgroups.make("job")
    cgroups.start_load("job").burn(0.2)
    before = cgroups.read_all("job")
    result = run(
        "dry-run", "--cgroup", path, "--cpu-limit", "3", "--duration", "4", "--set", "check_period=200", "--json"
    )
    assert result.returncode == 0, result.stderr
    *rows, summary = [json.loads(line) for line in result.stdout.splitlines()]
    # One each 200 ms, but for those that a busy machine made late.
    times = [row["time_s"] for row in rows]
    assert times[-1] > 3.0
    assert median(after - before for before, after in pairwise(times)) == pytest.approx(0.2, abs=0.1)
    assert rows[0]["smoothed_cores"] == 3.0
    assert rows[-1]["decision"] == "shrink"
    assert rows[-1]["cpu_limit_cores"] < 3.0
    assert summary["summary"]["reclaimed_cpu_s"] > 0.0
    assert summary["summary"]["ordered_cpu_s"] == pytest.approx(3.0 * summary["summary"]["seconds"])
    assert 0.2 <= summary["summary"]["steady_limit_cores"] < rows[-1]["cpu_limit_cores"]
    assert cgroups.read_all("job") == before


def start_dry_run(path: str) -> subprocess.Popen[str]:
    """A command that goes on, in a pipe."""
    return subprocess.Popen(
        [*COMMAND, "dry-run", "--cgroup", path, "--set", "check_period=100"], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


@pytest.mark.cgroup
def test_dry_run_takes_absolute_paths_and_ends_with_the_summary_at_ctrl_c(cgroups: CgroupTree) -> None:
    cgroups.make("job")
    process = start_dry_run(cgroups.path("job"))
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(4)]
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    assert "nothing is written" in lines[0]
    assert "would have been reclaimed" in rest


@pytest.mark.cgroup
def test_dry_run_says_when_the_cgroup_goes_away(cgroups: CgroupTree) -> None:
    process = start_dry_run(cgroups.make("job"))
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    cgroups.remove("job")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0
    assert errors == "the cgroup is gone\n"


def test_dry_run_of_a_missing_cgroup_is_one_sentence(hierarchies: Hierarchies) -> None:
    result = run("dry-run", "--cgroup", "no/such-cgroup")
    assert (result.returncode, result.stdout) == (69, "")
    assert result.stderr.startswith("cpumond: there is no cgroup 'no/such-cgroup' (looked for ")
    assert result.stderr.count("\n") == 1


@pytest.mark.cgroup
def test_a_recorded_trace_replays(cgroups: CgroupTree, tmp_path: Path) -> None:
    path = cgroups.make("job")
    cgroups.start_load("job").burn(0.3)
    trace = tmp_path / "trace.csv"
    result = run("record", "--cgroup", path, "--duration", "2", "--period", "100ms", "--output", str(trace))
    assert result.returncode == 0, result.stderr
    header, *rows = trace.read_text().splitlines()
    tried = run("dry-run", "--cgroup", path, "--duration", "0.1", "--set", "pressure_restore_ratio=0.5")
    is_told = header.endswith(",pressure_ratio")
    assert (tried.returncode, tried.stderr.startswith("pressure_restore_ratio cannot act here: ")) == (0, not is_told)
    assert header.removesuffix(",pressure_ratio") == "time_s,total_cpu_s,throttled_ratio,throttled_periods"
    times = [float(row.split(",")[0]) for row in rows]
    assert times[-1] > 1.5
    assert median(after - before for before, after in pairwise(times)) == pytest.approx(0.1, abs=0.1)
    replayed = run("replay", str(trace), "--cpu-limit", "2", "--format", "json")
    checks = [json.loads(line) for line in replayed.stdout.splitlines()]
    assert len(checks) == len(rows) - 1
    assert 0.0 < sum(check["usage_cores"] for check in checks) / len(checks) < 1.0
    by_peak = run("replay", str(trace), "--cpu-limit", "2", "--format", "json", "--set", "limit_rule=peak")
    peaks = [json.loads(line) for line in by_peak.stdout.splitlines()]
    assert [check["usage_cores"] for check in peaks] == [check["usage_cores"] for check in checks]
    assert all(check["peak_cores"] >= check["usage_cores"] for check in peaks)


def test_record_refuses_a_place_it_cannot_write(hierarchies: Hierarchies, tmp_path: Path) -> None:
    result = run("record", "--cgroup", "/", "--duration", "1", "--output", str(tmp_path / "no" / "trace.csv"))
    assert result.returncode == 73
    assert "give another --output" in result.stderr


@pytest.mark.cgroup
@pytest.mark.timeout(500)
@pytest.mark.alone
def test_demo_tells_the_whole_story_and_leaves_nothing(hierarchies: Hierarchies, tmp_path: Path) -> None:
    def start(duration_s: int) -> subprocess.Popen[str]:
        process = start_demo(tmp_path, arguments=("--duration", str(duration_s), "--json"))
        prefer(hierarchies, process)
        return process

    process, summary = run_whole_story(start, 20)
    every.validator("demo").validate(summary)
    assert summary["kernel"] == "real"
    assert (summary["restored"], summary["removed"]) == (True, True)
    assert summary["heartbeats"] > 20
    assert summary["jobs_started"]["simulation"] == 1
    assert summary["started_on_freed_cpu"]["render"] >= 1
    assert summary["started_on_freed_cpu"]["frames"] >= 1
    assert all(0.0 < seconds < 30.0 for seconds in summary["start_s"])
    assert summary["wake_ups"] >= 1
    assert summary["overcommits"] >= 1
    assert summary["actuator"] == "guarantee"
    # A check or two; more only where the machine lets the simulation wait.
    assert 0.0 < summary["give_back_s"][0] < 20.0
    [first, *_] = [stop for stop in summary["stopped"] if stop["job"] == "render-1"]
    assert first["kind"] == "overcommit"
    assert first["reason"].startswith("preempted: node")
    assert summary["reclaimed_cpu_s"] > 1.0
    assert 0.0 < summary["given_cpu_s"] <= summary["pools"]["batch"]["used_cpu_s"]
    used = sum(pool["used_cpu_s"] for pool in summary["pools"].values())
    assert summary["used_cpu_s"] == pytest.approx(used)
    assert summary["used_cpu_s"] < summary["ordered_cpu_s"]
    assert set(summary["not_reached"]) <= {"render was started again"}
    assert leftovers(hierarchies, process.pid) == []
    assert list(tmp_path.iterdir()) == []


def run_whole_story(
    start: Callable[[int], subprocess.Popen[str]], duration_s: int
) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A demo that was long enough for its story; where this machine is too busy for that, a longer one."""
    for seconds in (duration_s, 4 * duration_s):
        process = start(seconds)
        output, errors = process.communicate(timeout=seconds + 120)
        assert process.returncode == 0, errors
        summary = json.loads(output)
        if set(summary["not_reached"]) <= {"render was started again"}:
            break
    return process, summary


def prefer(hierarchies: Hierarchies, process: subprocess.Popen[str]) -> None:
    """Let the jobs of a demo have their CPU whatever else the machine does."""
    top = os.path.join(hierarchies.cpu_root, f"cpumond-demo-{process.pid}")
    if hierarchies.cpu_version == 1:
        wait_until(lambda: os.path.isdir(top) or process.poll() is not None, "the demo has a cgroup")
        with open(os.path.join(top, "cpu.shares"), "w") as shares:
            shares.write("100000")


@pytest.mark.cgroup
def test_a_short_demo_says_what_was_not_seen(hierarchies: Hierarchies, tmp_path: Path) -> None:
    process = start_demo(tmp_path, arguments=("--duration", "2", "--actuator", "quota"))
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert re.search(
        r"Pages to open while it runs:\n  web page  +http://127\.0\.0\.1:\d+/#token=[0-9a-f]{48}\n"
        r"  page of node-1 +http://127\.0\.0\.1:\d+/\n", output
    )  # fmt: skip
    assert "CPU quotas move (cpu.max, cpu.cfs_quota_us)." in output
    assert "Not seen: simulation woke up." in output
    assert "Not seen: render was stopped because the node was overcommitted." in output
    assert "had all its CPU back" not in output.replace("Not seen: simulation had all its CPU back.", "")
    assert "Every limit is back at the request." in output


def start_demo(
    directory: Path, *prefix: str, arguments: tuple[str, ...] = (), **options: object
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, *COMMAND, "demo", *arguments],
        text=True,
        env={**os.environ, "TMPDIR": str(directory), "PYTHONUNBUFFERED": "1"},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def wait_started(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().startswith("Real cgroups")
    wait_until(lambda: "simulation started" in process.stdout.readline(), "the demo has started its first job")


def list_parts(directory: Path) -> list[psutil.Process]:
    """The scheduler, the agent, its keeper and the jobs of the demo whose files are in ``directory``."""
    [place] = directory.glob("cpumond-demo-*")
    pid = int(place.name.split("-")[2])
    parts = psutil.Process(pid).children(recursive=True)
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        # Its last word is where its socket is: below ``directory``, or in a shorter one that has the demo's number.
        keeps = "/keeper/" in " ".join(words) and (words[-1].startswith(str(directory)) or f"-{pid}-" in words[-1])
        if keeps or (str(pid) in words and "pidfd_open" in " ".join(words)):
            parts.append(process)
    assert len(parts) >= 4
    return parts


def all_ended(processes: list[psutil.Process]) -> bool:
    return all(is_over(process) for process in processes)


@pytest.mark.cgroup
def test_demo_cleans_up_after_ctrl_c(hierarchies: Hierarchies, tmp_path: Path) -> None:
    process = start_demo(tmp_path, stderr=None)
    assert process.stdout is not None
    wait_started(process)
    parts = list_parts(tmp_path)
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(100) == 0
    process.stdout.close()
    assert "Everything that the demo made is removed." in rest
    assert all_ended(parts)
    assert leftovers(hierarchies, process.pid) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cgroup
def test_demo_says_which_part_of_it_died_and_cleans_up(hierarchies: Hierarchies, tmp_path: Path) -> None:
    with start_demo(tmp_path) as process:
        assert process.stderr is not None
        wait_started(process)
        [dead] = [child for child in psutil.Process(process.pid).children() if "agent" in child.cmdline()]
        dead.kill()
        assert process.stderr.read().startswith("cpumond: node-1 was killed by SIGKILL; the last line of its log: {")
        assert process.wait(100) == 69
    assert leftovers(hierarchies, process.pid) == []
    assert list(tmp_path.iterdir()) == []


def leftovers(hierarchies: Hierarchies, pid: int) -> list[str]:
    """Cgroups that a demo with this process id left, in any hierarchy, wherever its service has its own."""
    roots = {mount.mount_point for mount in read_mounts("/proc/self/mountinfo")} | {hierarchies.cpu_root}
    return [path for root in roots for path in glob.glob(f"{root}/**/cpumond-demo-{pid}*", recursive=True)]
