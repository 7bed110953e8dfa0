"""dry-run, record and demo on real cgroups: what they print is true, they write nothing, they leave nothing."""

from __future__ import annotations

import glob
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from cpumond.cgroup.mounts import Hierarchies
from cpumond.cli.demo import remove_leftovers
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
    assert summary["jobs"]["bursty"]["throttled_s"] > 0.0
    # A check or two when it wakes up at 15 s; more only where the machine lets this process wait.
    assert len(summary["give_back_s"]) == 1
    assert summary["give_back_s"][0] < 2.5
    assert summary["reclaimed_cpu_s"] == pytest.approx(sum(job["reclaimed_cpu_s"] for job in summary["jobs"].values()))
    assert leftovers(hierarchies, process.pid) == []
    assert list(tmp_path.iterdir()) == []


def start_demo(directory: Path, *prefix: str, **options: object) -> subprocess.Popen[str]:
    """A demo in a pipe."""
    return subprocess.Popen(
        [*prefix, *COMMAND, "demo"],
        text=True,
        env={**os.environ, "TMPDIR": str(directory), "PYTHONUNBUFFERED": "1"},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def wait_table(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().startswith("Real cgroups")
    wait_until(lambda: "busy" in process.stdout.readline(), "the demo shows its table")


def list_children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The agent, the receiver and the loads of a demo."""
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 5
    return children


def all_ended(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


@pytest.mark.cgroup
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_demo_cleans_up_after_ctrl_c_and_hang_up(hierarchies: Hierarchies, tmp_path: Path, number: int) -> None:
    process = start_demo(tmp_path, stderr=None)
    assert process.stdout is not None
    wait_table(process)
    process.send_signal(number)
    rest = process.stdout.read()
    assert process.wait(30) == 0
    process.stdout.close()
    assert "all that the demo made is removed" in rest
    assert leftovers(hierarchies, process.pid) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cgroup
def test_demo_cleans_up_when_its_terminal_is_closed(hierarchies: Hierarchies, tmp_path: Path) -> None:
    if shutil.which("setsid") is None:
        pytest.skip("needs setsid of util-linux")
    terminal, inner = pty.openpty()
    process = start_demo(tmp_path, "setsid", "--ctty", stdin=inner, stdout=inner, stderr=inner)
    os.close(inner)
    seen = b""
    while b"busy" not in seen:
        seen += os.read(terminal, 65536)
    children = list_children(process)
    os.close(terminal)
    process.wait(30)
    assert all_ended(children)
    assert leftovers(hierarchies, process.pid) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cgroup
def test_demo_ends_well_when_nobody_reads_on(hierarchies: Hierarchies, tmp_path: Path) -> None:
    with start_demo(tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("Real cgroups")
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == ("", 0)
    assert leftovers(hierarchies, process.pid) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cgroup
def test_what_a_killed_demo_leaves_ends_by_itself_and_its_cgroups_go_with_the_next(
    hierarchies: Hierarchies, tmp_path: Path
) -> None:
    with start_demo(tmp_path) as process:
        wait_table(process)
        children = list_children(process)
        tops = leftovers(hierarchies, process.pid)
        [top] = {os.path.basename(path) for path in tops}
        process.kill()
    wait_until(lambda: all_ended(children), "the agent, the receiver and the loads end")
    assert leftovers(hierarchies, process.pid) == tops
    if hierarchies.cpu_version == 1:
        for name in ("steady-low", "bursty", "busy"):
            with open(os.path.join(hierarchies.cpu_root, top, name, "cpu.cfs_quota_us")) as quota:
                assert quota.read() == "-1\n"
    result = run("demo", "--duration", "1", env={**os.environ, "TMPDIR": str(tmp_path)})
    assert result.returncode == 0, result.stderr
    assert leftovers(hierarchies, process.pid) == []


@pytest.mark.cgroup
def test_only_empty_trees_of_dead_demos_are_removed(cgroups: CgroupTree) -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    with subprocess.Popen(["true"]) as dead_too:
        pass
    gone, used = f"cpumond-demo-{dead.pid}", f"cpumond-demo-{dead_too.pid}"
    kept = [
        used, f"cpumond-demo-{os.getppid()}", f"cpumond-demo-{dead.pid}x", f"cpumond-demo-0{dead.pid}",
        f"cpumond-demo-{dead.pid}-0", f"xcpumond-demo-{dead.pid}",
    ]  # fmt: skip
    for name in (gone, f"{gone}/a", f"{gone}/b", used, f"{used}/empty", f"{used}/used", *kept):
        cgroups.make(name)
    below = f"cpumond-demo-{os.getppid()}/{gone}"
    cgroups.make(below)
    cgroups.start_load(f"{used}/used")
    for root in cgroups.roots:
        remove_leftovers(os.path.join(root, cgroups.top))
    for root in cgroups.roots:
        place = os.path.join(root, cgroups.top)
        assert {name for name in os.listdir(place) if os.path.isdir(os.path.join(place, name))} == set(kept)
        for name in (f"{used}/empty", f"{used}/used", below):
            assert os.path.isdir(os.path.join(place, name))


@pytest.mark.cgroup
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_load_ends_with_whoever_started_it(cgroups: CgroupTree, threads: int) -> None:
    cgroups.make("job")
    program = (
        "import sys\nfrom cpumond.testing import LoadProcess\n"
        "load = LoadProcess(sys.argv[2:], int(sys.argv[1]))\nload.burn(0.3)\nprint(load.pid, flush=True)\ninput()\n"
    )
    files = [os.path.join(root, cgroups.top, "job", "cgroup.procs") for root in cgroups.roots]
    with subprocess.Popen(
        [sys.executable, "-c", program, str(threads), *files], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        load = psutil.Process(int(process.stdout.readline()))
        processes = [load, *load.children()]
        assert len(processes) == threads
        process.kill()
    wait_until(lambda: all_ended(processes), "the load ends")
    wait_until(lambda: cgroups.read("job", "cgroup.procs") == "", "its cgroup is empty")


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
