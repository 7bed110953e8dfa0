"""``run``, ``operation wait``, ``operation log --follow``, and the commands that need an agent, on a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import test_every_command as every

from cpumond.host.cgroup.mounts import Hierarchies
from cpumond.testing import Cluster

pytestmark = pytest.mark.cgroup
COMMAND = [sys.executable, "-m", "cpumond"]


@pytest.fixture(scope="module")
def cluster(hierarchies: Hierarchies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), 2, cpu=1.0, web=True) as whole:
        yield whole
    assert whole.leftovers() == []


@pytest.fixture(scope="module")
def environment(cluster: Cluster) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CPUMOND", "COLUMNS", "LINES"))}
    return {**kept, "CPUMOND_SCHEDULER": cluster.url, "HOME": cluster.directory, "TERM": "xterm-256color"}


def cpumond(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], env=environment, capture_output=True, text=True, timeout=200, check=False)


def run(environment: dict[str, str], script: str, *words: str) -> subprocess.CompletedProcess[str]:
    return cpumond(environment, "run", "--pool", "p", "--cpu-limit", "0.1", *words, "--", "sh", "-c", script)


def test_output_and_exit_code_are_those_of_the_command(environment):
    done = run(environment, "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout) == (7, "out\n")
    assert "err\n" in done.stderr
    assert "is failed" in done.stderr
    assert run(environment, "exit 0").returncode == 0


def test_not_a_byte_of_much_output_is_lost(environment):
    done = run(environment, "seq 1 400000; sleep 1; seq 400001 400010")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{number}\n" for number in range(1, 400_011))


def test_lines_of_several_jobs_begin_with_the_job(environment):
    done = run(environment, "echo one; echo two", "--job-count", "3")
    assert done.returncode == 0
    lines = [line.partition("| ") for line in done.stdout.splitlines()]
    assert sorted(text for _, _, text in lines) == ["one"] * 3 + ["two"] * 3
    assert len({job for job, _, _ in lines}) == 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_aborts_the_operation(environment, cluster, number, code):
    process = subprocess.Popen(
        [*COMMAND, "run", "--pool", "p", "--cpu-limit", "0.1", "--", "sh", "-c", "echo begun; sleep 1000"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    _, told = process.communicate(timeout=100)
    assert process.returncode == code, told
    operation = told.partition("cpumond: operation ")[2].split()[0]
    assert cluster.get(f"/api/v1/operations/{operation}")["state"] == "aborted"


def test_it_outlives_a_scheduler_that_is_killed(environment, cluster, tmp_path):
    gate = tmp_path / "gate"
    script = f"echo begun; until [ -e {gate} ]; do sleep 0.1; done; echo ended"
    process = subprocess.Popen(
        [*COMMAND, "run", "--pool", "p", "--cpu-limit", "0.1", "--", "sh", "-c", script],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    cluster.scheduler.kill()
    cluster.scheduler.start()
    gate.touch()
    rest, told = process.communicate(timeout=150)
    assert (process.returncode, rest) == (0, "ended\n"), told


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("spec.toml", 'pool = "p"\n[tasks.main]\njob_count = 1\ncpu_limit = 0.1\ncommand = "exit 3"\n'),
        ("spec.yaml", "pool: p\ntasks:\n  main: {job_count: 1, cpu_limit: 0.1, command: exit 3}\n"),
        ("spec.json", '{"pool": "p", "tasks": {"main": {"job_count": 1, "cpu_limit": 0.1, "command": "exit 3"}}}'),
        ("spec.yson", '{pool=p;tasks={main={job_count=1;cpu_limit=0.1;command="exit 3"}}}'),
    ],
)
def test_a_specification_in_a_file_and_options_over_it(environment, tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    more = ("--set", "max_failed_job_count=1")
    started = cpumond(environment, "operation", "start", "-f", str(path), "--title", "from a file", *more)
    assert started.returncode == 0, started.stderr
    operation = started.stdout.strip()
    waited = cpumond(environment, "operation", "wait", operation)
    assert waited.returncode == 1, waited.stderr
    assert f"operation {operation} is failed" in waited.stdout
    assert "from a file" in cpumond(environment, "operation", "show", operation).stdout


def test_a_wait_ends_by_the_state_or_the_time_out(environment):
    started = cpumond(environment, "operation", "start", "--pool", "p", "--cpu-limit", "0.1", "--", "sleep", "1000")
    operation = started.stdout.strip()
    assert cpumond(environment, "operation", "wait", operation, "--state", "running").returncode == 0
    assert cpumond(environment, "operation", "wait", operation, "--timeout", "0.1").returncode == 75
    cpumond(environment, "operation", "abort", operation)
    assert cpumond(environment, "operation", "wait", operation).returncode == 2
    assert cpumond(environment, "operation", "wait", "none").returncode == 67


def test_a_log_is_followed_to_the_end_of_its_job(environment):
    script = "echo first; sleep 2; echo last"
    started = cpumond(environment, "operation", "start", "--pool", "p", "--cpu-limit", "0.1", "--", "sh", "-c", script)
    done = cpumond(environment, "operation", "log", started.stdout.strip(), "--follow")
    assert (done.returncode, done.stdout) == (0, "first\nlast\n"), done.stderr


# ---- commands that need an agent, at 80 and 40 columns, in a pipe, as JSON and CSV


@pytest.fixture(scope="module")
def names(environment: dict[str, str], cluster: Cluster) -> dict[str, str]:
    operation = cluster.start_operation("p", "echo some text; sleep 1000", cpu_limit=0.2, title="long lived")
    [job] = cluster.wait(lambda: cluster.jobs(operation, "running"), "it runs")
    node = next(node for node in cluster.nodes if node.node_id == job["node_id"])
    environment["CPUMOND_SOCKET"] = node.control_socket
    return {"operation": operation, "job": job["id"], "config": node.config_path, "cgroup": job["cgroup"]}


OF_JOBS = {
    "operation log": every.Case("operation log {operation} {job}"),
    "operation explain": every.Case("operation explain {operation} {job}"),
    "operation pin": every.Case("operation pin {operation} {job} --cpu-limit 0.1"),
    "operation unpin": every.Case("operation unpin {operation} {job}"),
    "dry-run": every.Case("dry-run --cgroup {cgroup} --cpu-limit 1 --duration 1 --set check_period=200"),
}


@pytest.mark.parametrize("name", [*every.OF_AGENT, *OF_JOBS])
def test_a_command_of_the_agent(name, names, environment, cluster):
    # Another test kills the scheduler, after which a job runs again once its node has told of it.
    cluster.wait(lambda: cluster.jobs(names["operation"], "running"), "it is known to run")
    case = {**every.OF_AGENT, **OF_JOBS}[name]
    every.check_terminal(name, case, names, environment)
    every.check_piped(name, case, names, environment)


def test_top_of_the_agent_fits(names, environment):
    for columns in (80, 40):
        shown, code = every.on_terminal(["top", "--once"], columns, environment)
        assert code == 0
        assert [line for line in every.without_colour(shown).split("\n") if every.width(line) > columns] == []
        assert names["job"] in shown
    every.check_json("top", ["top", "--once"], environment)
