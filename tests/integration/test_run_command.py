"""``run``, ``operation wait``, ``operation log --follow``, and the commands that need an agent, on a cluster."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import test_every_command as every
from commands import run_command
from executor_contract import read_cores
from scheduler_process import terminal_environment

from cpumond.cluster import Cluster
from cpumond.host.cgroup.mounts import Hierarchies

pytestmark = pytest.mark.cgroup
COMMAND = [sys.executable, "-m", "cpumond"]


@pytest.fixture(scope="module")
def cluster(hierarchies: Hierarchies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), 2, cpu=1.0, web=True) as whole:
        whole.create_pool("p")
        yield whole
    assert whole.leftovers() == []


@pytest.fixture(scope="module")
def environment(cluster: Cluster) -> dict[str, str]:
    return {**terminal_environment(cluster.url), "HOME": cluster.directory}


def cpumond(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """In this process; those that get a signal, or whose output is no pipe, have one of their own."""
    return run_command(list(words), environment)


def run(environment: dict[str, str], script: str, *words: str) -> subprocess.CompletedProcess[str]:
    return cpumond(environment, "run", "--pool", "p", "--cpu-limit", "0.1", *words, "--", "sh", "-c", script)


def begin(environment: dict[str, str], script: str, *words: str) -> tuple[subprocess.Popen[str], str]:
    """``run`` with a command that has written "begun", and the id of the operation."""
    process = subprocess.Popen(
        [*COMMAND, "run", "--pool", "p", "--cpu-limit", "0.1", *words, "--", "sh", "-c", script],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    told = process.stderr.readline()
    assert told.startswith("cpumond: operation "), told
    assert process.stdout.readline() == "begun\n"
    return process, told.split()[2]


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """The line with this text; a reason to wait, which a busy machine gives, may come before it."""
    assert process.stderr is not None
    return next(line for line in process.stderr if text in line)


def test_output_and_exit_code_are_those_of_the_command(environment):
    done = run(environment, "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout) == (7, "out\n")
    assert "err\n" in done.stderr
    assert "is failed" in done.stderr
    assert run(environment, "exit 0").returncode == 0


def test_what_no_node_can_hold_ends_at_once_unless_it_shall_wait(environment):
    words = ["run", "--pool", "p", "--cpu-limit", "5", "--title", "large"]
    done = cpumond(environment, *words, "--", "true")
    assert done.returncode == 69, done.stderr
    told = " ".join(done.stderr.split())
    assert "cannot start: 5 cores, largest node 1; it is aborted. Request less, or give --wait" in told
    state = cpumond(environment, "operation", "show", told.partition("operation ")[2].split()[0]).stdout
    assert "aborted" in state
    process = subprocess.Popen(
        [*COMMAND, *words, "--wait", "--", "true"], env=environment, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any("waits: cannot start: 5 cores, largest node 1" in line for line in lines)
    listed = cpumond(environment, "operation", "list").stdout
    assert "cannot start" in listed
    assert "never" in listed
    process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT
    process.stderr.close()


def test_not_a_byte_of_much_output_is_lost(environment):
    done = run(environment, "seq 1 100000; sleep 0.5; seq 100001 100010")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{number}\n" for number in range(1, 100_011))


def test_lines_of_several_jobs_begin_with_the_job(environment):
    done = run(environment, "echo one; echo two", "--job-count", "3")
    assert done.returncode == 0
    lines = [line.partition("| ") for line in done.stdout.splitlines()]
    assert sorted(text for _, _, text in lines) == ["one"] * 3 + ["two"] * 3
    assert len({job for job, _, _ in lines}) == 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_aborts_the_operation(environment, cluster, number, code):
    process, operation = begin(environment, "echo begun; sleep 1000")
    process.send_signal(number)
    _, told = process.communicate(timeout=100)
    assert process.returncode == code, told
    assert cluster.get(f"/api/v1/operations/{operation}")["state"] == "aborted"


def test_an_operation_whose_output_nobody_reads_is_aborted(environment, cluster):
    process, operation = begin(environment, "echo begun; while :; do echo more; sleep 0.1; done")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.wait(timeout=100) == 128 + signal.SIGPIPE
    assert cluster.get(f"/api/v1/operations/{operation}")["state"] == "aborted"


def test_a_second_signal_without_a_scheduler_warns_of_the_operation(environment, cluster):
    process, operation = begin(environment, "echo begun; sleep 1000")
    cluster.scheduler.pause()
    try:
        process.send_signal(signal.SIGTERM)
        read_until(process, f"operation {operation} is aborted")
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=250)
    finally:
        cluster.scheduler.resume()
    assert process.returncode == 143
    assert f"operation {operation} may continue; `cpumond operation abort {operation}` ends it" in told
    assert cpumond(environment, "operation", "abort", operation).returncode in (0, 78)


def test_a_preemption_is_printed_and_the_replacement_is_followed(environment, cluster, tmp_path):
    options = {"max_unpreemptible_running_job_count": (0, 10), "fair_share_starvation_timeout": (100, 30_000)}
    quick, before = ([f"{name}={both[n]}" for name, both in options.items()] for n in (0, 1))
    assert cpumond(environment, "tree", "set", "default", *quick).returncode == 0
    cluster.create_pool("prod", strong_guarantee_resources={"cpu": 2.0})
    gate = tmp_path / "gate"
    script = f"echo begun; until [ -e {gate} ]; do sleep 0.1; done; echo ended; exit 5"
    process, operation = begin(environment, script, "--cpu-limit", "0.9")
    [first] = cluster.jobs(operation, "running")
    urgent = cluster.start_operation("prod", "sleep 1000", 2, cpu_limit=1.0)
    cluster.wait(lambda: len(cluster.jobs(urgent, "running")) == 2, "prod has both nodes")
    assert not cluster.jobs(operation, "running")
    sentence = read_until(process, f"job {first['id']} on node {first['node_id']} is aborted: preempted to start job")
    assert sentence.endswith("; it is started again\n")
    gate.touch()
    cpumond(environment, "operation", "abort", urgent)
    rest, told = process.communicate(timeout=150)
    assert process.returncode == 5, told
    assert rest.endswith("begun\nended\n"), told
    assert cpumond(environment, "tree", "set", "default", *before).returncode == 0


def test_it_outlives_a_scheduler_that_is_killed(environment, cluster, tmp_path):
    gate = tmp_path / "gate"
    script = f"echo begun; until [ -e {gate} ]; do sleep 0.1; done; echo ended"
    process, _ = begin(environment, script)
    cluster.scheduler.kill()
    cluster.scheduler.start()
    gate.touch()
    rest, told = process.communicate(timeout=150)
    assert (process.returncode, rest) == (0, "ended\n"), told


def test_a_wait_ends_by_the_state_or_the_time_out(environment):
    started = cpumond(environment, "operation", "start", "--pool", "p", "--cpu-limit", "0.1", "--", "sleep", "1000")
    operation = started.stdout.strip()
    assert cpumond(environment, "operation", "wait", operation, "--state", "running").returncode == 0
    assert cpumond(environment, "operation", "wait", operation, "--timeout", "0.1").returncode == 75
    cpumond(environment, "operation", "abort", operation)
    assert cpumond(environment, "operation", "wait", operation).returncode == 2
    assert cpumond(environment, "operation", "wait", "none").returncode == 67
    options = ("--pool", "p", "--cpu-limit", "0.1", "--set", "max_failed_job_count=1")
    failing = cpumond(environment, "operation", "start", *options, "--", "false").stdout.strip()
    assert cpumond(environment, "operation", "wait", failing).returncode == 1


def test_a_log_is_followed_to_the_end_of_its_job(environment):
    script = "echo first; sleep 1; echo last"
    started = cpumond(environment, "operation", "start", "--pool", "p", "--cpu-limit", "0.1", "--", "sh", "-c", script)
    done = cpumond(environment, "operation", "log", started.stdout.strip(), "--follow")
    assert (done.returncode, done.stdout) == (0, "first\nlast\n"), done.stderr


@pytest.fixture(scope="module")
def operation(cluster: Cluster) -> str:
    return cluster.start_operation("p", "echo some text; sleep 1000", cpu_limit=0.2, title="long lived")


@pytest.fixture
def names(environment: dict[str, str], cluster: Cluster, operation: str) -> dict[str, str]:
    """Another test kills the scheduler: a job runs again once its node has told of it, another one where it did not."""
    [job] = cluster.wait(lambda: [job for job in cluster.jobs(operation, "running") if job["cgroup"]], "it runs")
    node = next(node for node in cluster.nodes if node.node_id == job["node_id"])
    environment["CPUMOND_SOCKET"] = node.control_socket
    # It runs before the agent looks at it for the first time.
    cluster.wait(lambda: job["id"] in {each["job_id"] for each in node.get("/v1/status")["jobs"]}, "it is followed")
    return {"operation": operation, "job": job["id"], "config": node.config_path, "cgroup": job["cgroup"]}


OF_JOBS = {
    "operation log": every.Case("operation log {operation} {job}"),
    "operation explain": every.Case("operation explain {operation} {job}"),
    "operation pin": every.Case("operation pin {operation} {job} --cpu-limit 0.1"),
    "operation unpin": every.Case("operation unpin {operation} {job}"),
    "run": every.Case("run --pool p --cpu-limit 0.1 -- echo done"),
    "report": every.Case("report"),
    "estimate": every.Case("estimate --duration 1s --root {cgroup}"),
    "record": every.Case("record --cgroup {cgroup} --duration 1s --period 200ms", prints_file=True),
    "dry-run": every.Case("dry-run --cgroup {cgroup} --cpu-limit 1 --duration 1 --set check_period=200"),
}


@pytest.mark.parametrize("name", [*every.OF_AGENT, *OF_JOBS])
def test_a_command_of_the_agent(name, names, environment, cluster):
    case = {**every.OF_AGENT, **OF_JOBS}[name]
    if name == "report":
        cluster.wait(lambda: run_command(["report"], environment).returncode == 0, "the history has a point")
    every.check_terminal(name, case, names, environment)
    every.check_run_command(name, case, names, environment)


def test_top_of_the_agent_fits(names, environment):
    for columns in (80, 40):
        shown, code = every.on_terminal(["top", "--once"], columns, environment)
        assert code == 0
        assert [line for line in every.without_colour(shown).split("\n") if every.width(line) > columns] == []
        assert names["job"] in shown
    every.check_json("top", ["top", "--once"], environment)


def test_a_job_is_explained_and_pinned_at_the_scheduler_as_on_its_node(names, environment, cluster, hierarchies):
    ids = names["operation"], names["job"]
    path = f"/api/v1/operations/{ids[0]}/jobs/{ids[1]}/explain"
    node = next(node for node in cluster.nodes if node.control_socket == environment["CPUMOND_SOCKET"])
    told, own = cluster.get(path), node.get(f"/v1/jobs/{ids[1]}/explain")
    assert told.keys() == own.keys()
    same = ("job_id", "operation_id", "cgroup", "mode", "cpu_limit", "job_cpu_monitor", "directory", "source")
    assert {name: told[name] for name in same} == {name: own[name] for name in same}
    shown = cpumond(environment, "operation", "explain", *ids).stdout
    assert shown.startswith(f"The limit of {ids[1]} is ")
    assert "started by the scheduler: pool p, task main" in shown
    pinned = cpumond(environment, "operation", "pin", *ids, "--cpu-limit", "0.17")
    assert pinned.stdout == f"job {ids[1]} is pinned at 0.17 cores until `cpumond operation unpin`\n", pinned.stderr
    assert read_cores(hierarchies, names["cgroup"]) == pytest.approx(0.17)
    told = cluster.get(path)
    assert (told["status"], told["pinned_cpu_limit"], told["pinned_until"]) == ("pinned", 0.17, None)
    assert f"an operator pinned it until `cpumond operation unpin {ids[0]} {ids[1]}`." in told["why"]
    freed = cpumond(environment, "operation", "unpin", *ids)
    assert (freed.returncode, freed.stdout) == (0, f"job {ids[1]} is managed by the monitor again\n")
    assert cluster.get(path)["pinned_cpu_limit"] is None
