"""The parts of ``cpumond demo`` that need no agent: plan, wake-ups, signals, leftovers, the simulated kernel."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from cpumond.cli.demo import host as demo_host
from cpumond.cli.demo import jobs as demo_jobs
from cpumond.cli.demo.kernel import PlainKernel
from cpumond.core.job_cgroups import name_idle_parent
from cpumond.testing import write_mountinfo


@pytest.mark.parametrize("cpu_count", [1, 2, 3, 4, 64])
def test_the_overcommitted_node_fits_on_the_machine(cpu_count):
    plan = demo_jobs.make_plan(float(cpu_count))
    simulation, render, frames = (plan.operations[load] for load in ("simulation", "render", "frames"))
    assert 0.0 < plan.capacity <= 2.0
    assert simulation.cpu_limit == plan.capacity
    assert simulation.cpu_limit + render.cpu_limit + frames.cpu_limit < cpu_count


@pytest.mark.parametrize("cpu_count", [1, 2, 64])
def test_guests_fit_beside_the_sleeping_simulation_not_the_working_one(cpu_count):
    plan = demo_jobs.make_plan(float(cpu_count))
    monitor = demo_jobs.MONITOR
    # The limit ends below the first step under which a tenth is no longer below the lower bound.
    lowest = max(plan.idle_cores / monitor["relative_lower_bound"], monitor["min_limit_ratio"] * plan.capacity)
    guests = plan.operations["render"].cpu_limit + plan.operations["frames"].cpu_limit
    assert lowest + guests <= plan.capacity
    assert plan.capacity + plan.operations["render"].cpu_limit > plan.capacity


def run_program(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-I", "-S", "-c", demo_jobs.JOB_PROGRAM, *arguments], check=False).returncode


def test_a_job_ends_after_its_time_and_one_of_a_dead_owner_does_not_begin():
    with subprocess.Popen(["true"]) as owner:
        pass
    assert run_program(str(os.getpid()), "0.1", "0.3", "") == 0
    assert run_program(str(owner.pid), "0.1", "0", "") == 1


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with demo_host.stop_on_signals() as stopped:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stopped.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_only_names_of_dead_processes_are_left():
    with subprocess.Popen(["true"]) as dead:
        pass
    for entry in (f"x-{dead.pid}", f"x-{dead.pid}-ab_1", f"x-{os.getpid()}"):
        assert demo_host.is_left(entry, "x-")
    for entry in (f"x-{os.getppid()}", f"x-0{dead.pid}", f"x-{dead.pid}x", f"yx-{dead.pid}", "x-", f"x-{dead.pid}-"):
        assert not demo_host.is_left(entry, "x-")


def test_cgroups_of_dead_processes_are_removed(tmp_path):
    """Also the idle classes of nodes, which are not below the others."""
    with subprocess.Popen(["true"]) as dead:
        pass
    idle = [name_idle_parent(f"{path}/node-1") for path in (f"x-{dead.pid}", f"a.scope/x-{dead.pid}")]
    left = [f"a.scope/x-{dead.pid}/node-1", *idle]
    kept = [
        f"a.scope/x-{os.getppid()}/node-1", f"a.scope/x-{dead.pid}-ab/node-1", f"x-{dead.pid}", "cpumond-reclaimed",
        name_idle_parent(f"x-{os.getppid()}/node-1"), name_idle_parent(f"x-{dead.pid}"), idle[0].replace("x-", "y-"),
    ]  # fmt: skip
    for path in (*left, *kept):
        (tmp_path / "cpu" / path).mkdir(parents=True)
    mountinfo = write_mountinfo(tmp_path / "mountinfo", {str(tmp_path / "cpu"): "cpu"})
    demo_host.remove_leftovers("x-", "a.scope", mountinfo)
    assert [path for path in left if (tmp_path / "cpu" / path).exists()] == []
    assert [path for path in kept if not (tmp_path / "cpu" / path).exists()] == []


def test_files_of_dead_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as dead:
        pass
    names = [f"x-{dead.pid}-abc", f"x-{os.getppid()}-abc", f"y-{dead.pid}-abc"]
    for name in names:
        (tmp_path / name / "deep").mkdir(parents=True)
    (tmp_path / f"x-{dead.pid}-link").symlink_to(tmp_path / names[2])
    demo_host.remove_directories("x-")
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:], f"x-{dead.pid}-link"}
    assert (tmp_path / names[2] / "deep").is_dir()


@pytest.fixture
def kernel(tmp_path):
    return PlainKernel(str(tmp_path))


def make_job(kernel, pid=None, quota="max 100000"):
    place = os.path.join(kernel.top, "jobs", "a")
    os.makedirs(place)
    for name, text in {"cpu.max": quota, **({} if pid is None else {"cgroup.procs": str(pid)})}.items():
        with open(os.path.join(place, name), "w") as file:
            file.write(text)
    return place


def read_stat(place):
    with open(os.path.join(place, "cpu.stat")) as file:
        return {key: int(value) for key, value in (line.split() for line in file)}


def burn(seconds):
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        sum(range(1000))


def test_more_than_the_quota_counts_as_throttled(kernel):
    place = make_job(kernel, os.getpid(), "10000 100000")
    kernel.advance(1000.0)
    before = read_stat(place)
    burn(0.2)
    kernel.advance(0.2)
    assert read_stat(place)["nr_throttled"] - before["nr_throttled"] == 2
    assert read_stat(place)["throttled_usec"] > before["throttled_usec"]


def test_who_has_ended_is_taken_out_and_its_time_stays(kernel):
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        place = make_job(kernel, process.pid)
        deadline_s = time.monotonic() + 100.0
        pause = threading.Event()
        while not (os.path.exists(f"{place}/cpu.stat") and read_stat(place)["usage_usec"] > 100_000):
            assert time.monotonic() < deadline_s
            pause.wait(0.05)
            kernel.advance(0.05)
        process.kill()
    used = read_stat(place)["usage_usec"]
    kernel.advance(0.1)
    with open(f"{place}/cgroup.procs") as file:
        assert file.read() == ""
    assert read_stat(place)["usage_usec"] == used
