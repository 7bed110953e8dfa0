"""dry-run, record and demo on real cgroups: what they print is true, they write nothing, they leave nothing."""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from cpumond.cgroup.mounts import Hierarchies
from cpumond.testing import CgroupTree

COMMAND = [sys.executable, "-m", "cpumond"]


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """One command to its end."""
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False, **options)


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
    assert len(rows) >= 15
    assert rows[0]["smoothed_cores"] == 3.0
    assert rows[-1]["decision"] == "shrink"
    assert rows[-1]["cpu_limit_cores"] < 3.0
    assert summary["summary"]["reclaimed_cpu_s"] > 0.0
    assert summary["summary"]["ordered_cpu_s"] == pytest.approx(3.0 * summary["summary"]["seconds"])
    assert cgroups.read_all("job") == before


@pytest.mark.cgroup
def test_dry_run_takes_absolute_paths_and_ends_with_the_summary_at_ctrl_c(cgroups: CgroupTree) -> None:
    cgroups.make("job")
    process = subprocess.Popen(
        [*COMMAND, "dry-run", "--cgroup", cgroups.path("job"), "--set", "check_period=100"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(4)]
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(20) == 0
    assert "nothing is written" in lines[0]
    assert "would have been reclaimed" in rest
    process.stdout.close()


@pytest.mark.cgroup
def test_dry_run_says_when_the_cgroup_goes_away(cgroups: CgroupTree) -> None:
    path = cgroups.make("job")
    process = subprocess.Popen(
        [*COMMAND, "dry-run", "--cgroup", path, "--set", "check_period=100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    cgroups.remove("job")
    _, errors = process.communicate(timeout=20)
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
    assert header == "time_s,total_cpu_s,throttled_ratio"
    assert len(rows) >= 15
    replayed = run("replay", str(trace), "--cpu-limit", "2", "--format", "json")
    checks = [json.loads(line) for line in replayed.stdout.splitlines()]
    assert len(checks) == len(rows) - 1
    assert 0.0 < sum(check["usage_cores"] for check in checks) / len(checks) < 1.0


def test_record_refuses_a_place_it_cannot_write(hierarchies: Hierarchies, tmp_path: Path) -> None:
    result = run("record", "--cgroup", "/", "--duration", "1", "--output", str(tmp_path / "no" / "trace.csv"))
    assert result.returncode == 73
    assert "give --output another place" in result.stderr


@pytest.mark.cgroup
def test_demo_shows_the_whole_way_and_leaves_nothing(hierarchies: Hierarchies, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "demo", "--duration", "21", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    summary = json.loads(output)
    assert summary["kernel"] == "real"
    assert summary["restored"] is True
    assert summary["heartbeats"] > 5
    assert set(summary["jobs"]) == {"steady-low", "bursty", "busy"}
    for job in summary["jobs"].values():
        assert job["ordered_cpu_s"] > 0.0
        assert job["used_cpu_s"] > 0.0
    assert summary["jobs"]["steady-low"]["reclaimed_cpu_s"] > 1.0
    assert summary["reclaimed_cpu_s"] == pytest.approx(sum(job["reclaimed_cpu_s"] for job in summary["jobs"].values()))
    assert leftovers(hierarchies, process.pid) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cgroup
def test_demo_cleans_up_after_ctrl_c(hierarchies: Hierarchies, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "demo"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("Real cgroups")
    wait_until(lambda: "busy" in process.stdout.readline(), "the demo shows its table")  # type: ignore[union-attr]
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(30) == 0
    process.stdout.close()
    assert "all that the demo made is removed" in rest
    assert leftovers(hierarchies, process.pid) == []
    assert list(tmp_path.iterdir()) == []


def test_demo_without_a_hierarchy_says_that_it_simulates(tmp_path: Path) -> None:
    program = (
        "import cpumond.cli.demo as demo, cpumond.errors as errors, cpumond.cli as cli, sys\n"
        "def none(*_): raise errors.UnavailableError('no cgroups here')\n"
        "demo.open_hierarchies = none\n"
        "sys.exit(cli.run(['demo', '--duration', '8']))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("SIMULATED kernel and loads (no cgroups here)")
    assert "simulated kernel" in result.stdout
    assert list(tmp_path.iterdir()) == []


def leftovers(hierarchies: Hierarchies, pid: int) -> list[str]:
    """Cgroups that a demo with this process id left."""
    roots = (hierarchies.cpu_root, hierarchies.cpuacct_root)
    return [path for root in roots for path in glob.glob(f"{root}/cpumond-demo-{pid}*")]
