"""``cpumond node cordon``, ``uncordon`` and ``drain``, by hand and by ``yt``, against real schedulers."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from scheduler_process import PlayedNode, SchedulerProcess, clean_environment

from cpumond.cluster import Cluster
from cpumond.core.errors import EXIT_TRY_AGAIN
from cpumond.host.cgroup.mounts import Hierarchies


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[SchedulerProcess]:
    made = SchedulerProcess(tmp_path)
    made.write_config("min_spare_job_resources_on_node = {user_slots = 0, cpu = 0.0, memory = 0}")
    try:
        yield made.start()
    finally:
        made.close()


def cpumond(url: str, *words: str, code: int = 0) -> tuple[str, str]:
    done = run_command([*words, "--scheduler", url])
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def two_nodes(scheduler: SchedulerProcess) -> tuple[PlayedNode, PlayedNode]:
    nodes = PlayedNode(scheduler, "n1", 4.0), PlayedNode(scheduler, "n2", 4.0)
    for node in nodes:
        node.register()
    return nodes


def events(scheduler: SchedulerProcess, **query: Any) -> list[dict[str, Any]]:
    text = "&".join(f"{name}={value}" for name, value in query.items())
    found: list[dict[str, Any]] = scheduler.get(f"events?{text}")["events"]
    return found


def test_a_cordoned_node_gets_no_job_before_and_after_a_restart(scheduler: SchedulerProcess) -> None:
    first, second = two_nodes(scheduler)
    told, _ = cpumond(scheduler.url, "node", "cordon", "n1", "--why", "bad fan")
    assert told == "node n1 gets no new jobs\n"
    operation = scheduler.start_operation("p", job_count=8)
    second.beat_until(lambda: len(second.jobs) == 4, "the other node is full")
    first.beat()
    scheduler.kill()
    scheduler.start()
    scheduler.wait_updates()
    first.incarnation = "another run"
    first.register()
    first.sequence = 0
    first.beat()
    scheduler.wait_updates()
    first.beat()
    assert not first.jobs
    shown = scheduler.get("nodes/n1")["cordon"]
    assert (shown["why"], shown["drain"]) == ("bad fan", "")
    listed, _ = cpumond(scheduler.url, "node", "list")
    assert [line.split()[2] for line in listed.splitlines()[1:]] == ["cordoned", "online"]
    page, _ = cpumond(scheduler.url, "node", "show", "n1")
    assert "cordoned by" in page
    assert "ago: bad fan" in page
    assert scheduler.get("trees/default")["cordoned_node_count"] == 1
    assert scheduler.get("trees/default")["total_resources"]["cpu"] == 4.0
    assert 'cpumond_tree_cordoned_nodes{tree="default"} 1.0' in scheduler.request("GET", "/metrics").text
    _, warned = cpumond(scheduler.url, "node", "cordon", "n1", "--why", "bad fan")
    assert "is already cordoned; nothing changed" in warned
    cpumond(scheduler.url, "node", "uncordon", "n1")
    first.beat_until(lambda: len(first.jobs) == 4, "it gets jobs again")
    assert set(first.jobs) == set(first.jobs_of(operation))
    cpumond(scheduler.url, "node", "tag", "n1", "ssd", "old")
    cpumond(scheduler.url, "node", "tag", "n1", "--remove", "old", "--why", "new disks")
    listed, _ = cpumond(scheduler.url, "node", "list")
    assert [line.endswith("ssd") for line in listed.splitlines()[1:]] == [True, False]
    page, _ = cpumond(scheduler.url, "node", "show", "n1")
    assert re.search(r"set by a user:\s+ssd\n", page)
    told_of = {each["command"]: each["text"].partition(" ")[2] for each in events(scheduler, node="n1", kind="command")}
    assert told_of == {
        "CordonNode": 'cordoned node "n1": bad fan', "UncordonNode": 'uncordoned node "n1"',
        "ChangeNodeTags": 'changed the tags of node "n1": +ssd +old',
    }  # fmt: skip
    audit, _ = cpumond(scheduler.url, "audit", "--node", "n1")
    assert "bad fan" in audit


def test_a_drain_shows_its_plan_then_empties_the_node(scheduler: SchedulerProcess) -> None:
    first, second = two_nodes(scheduler)
    operation = scheduler.start_operation("p", job_count=2, cpu=1.5)
    first.beat_until(lambda: len(first.jobs) == 2, "they run")
    first.beat()
    scheduler.start_operation("p", job_count=1, cpu=2.0)
    second.beat_until(lambda: len(second.jobs) == 1, "the other node is half full")
    plan, _ = cpumond(scheduler.url, "node", "drain", "n1", "--plan")
    table = plan.split("\n\n")[0]  # the simulation is below it
    rows = [line for line in table.splitlines() if operation in line]
    assert sorted(("n2" in row, "waits for free resources" in row) for row in rows) == [(False, True), (True, False)]
    assert "2 jobs would be stopped, of which 1 would wait for free resources" in plan
    assert scheduler.get("nodes/n1")["cordon"] is None
    told, _ = first.beat_until_done(lambda: cpumond(scheduler.url, "node", "drain", "n1", "--why", "new disks"))
    assert told.splitlines()[-1] == "node n1 is empty"
    second.beat_until(lambda: second.jobs_of(operation), "one starts again")
    found = scheduler.get(f"operations/{operation}")
    assert found["jobs"]["aborted"] == 2
    ended = scheduler.get(f"operations/{operation}/jobs?state=aborted")["jobs"]
    user = scheduler.get("me")["user"]
    assert {job["reason"] for job in ended} == {f'aborted: node "n1" drained by {user}: new disks'}
    (event,) = events(scheduler, operation=operation, kind="command", limit=1)
    assert event["text"] == f'{user} drained node "n1": new disks'
    assert "has no job that would be stopped" in cpumond(scheduler.url, "node", "drain", "n1", "--plan")[0]


def test_a_drain_that_takes_too_long_says_so_and_goes_on(scheduler: SchedulerProcess) -> None:
    node, _ = two_nodes(scheduler)
    scheduler.start_operation("p")
    node.beat_until(lambda: node.jobs, "it runs")
    node.beat()
    _, told = cpumond(scheduler.url, "node", "drain", "n1", "--timeout", "0.1s", code=EXIT_TRY_AGAIN)
    assert "node n1 has 1 job left after 0.1 s; the drain continues" in told
    _, refused = cpumond(scheduler.url, "node", "drain", "n1", "--plan", "--graceful", code=64)
    assert "--plan changes nothing" in refused
    _, refused = cpumond(scheduler.url, "node", "drain", "n1", "--no-wait", "--timeout", "1s", code=64)
    assert "--timeout has no effect with --no-wait" in refused
    node.beat_until(lambda: not node.jobs, "the job ends")
    told, _ = node.beat_until_done(lambda: cpumond(scheduler.url, "node", "drain", "n1"))
    assert told.splitlines()[-1] == "node n1 is empty"


def test_ctrl_c_leaves_the_node_drained_and_says_so(scheduler: SchedulerProcess) -> None:
    node, _ = two_nodes(scheduler)
    scheduler.start_operation("p")
    node.beat_until(lambda: node.jobs, "it runs")
    node.beat()
    with subprocess.Popen(
        [sys.executable, "-m", "cpumond", "node", "drain", "n1", "--scheduler", scheduler.url], text=True,
        env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as draining:  # fmt: skip
        assert draining.stdout is not None
        assert draining.stderr is not None
        assert "is drained" in draining.stdout.readline()
        draining.send_signal(signal.SIGINT)
        told = draining.stderr.read()
        assert draining.wait(100) == 130
    assert "node n1 stays drained" in told
    assert scheduler.get("nodes/n1")["cordon"]["drain"] == "usual"


def test_by_the_command_line_of_yt(scheduler: SchedulerProcess) -> None:
    two_nodes(scheduler)
    where = "//sys/cluster_nodes/n1/@disable_scheduler_jobs"
    assert scheduler.yt("set", where, "%true", bindings=False).returncode == 0
    assert scheduler.get("nodes/n1")["cordon"]["drain"] == "usual"
    assert scheduler.yt("get", where, bindings=False).stdout.strip() == "%true"
    assert scheduler.yt("set", where, "%false", bindings=False).returncode == 0
    assert scheduler.get("nodes/n1")["cordon"] is None
    refused = scheduler.yt("set", "//sys/cluster_nodes/n1/@tags", "[a]", bindings=False)
    assert "has attributes that can be changed, one at a time: disable_scheduler_jobs, user_tags" in refused.stderr
    refused = scheduler.yt("set", where, "yes", bindings=False)
    assert "must be %true or %false" in refused.stderr


@pytest.mark.cgroup
def test_real_jobs_of_a_drained_node_end_and_start_on_another(hierarchies: Hierarchies, tmp_path: Path) -> None:
    with Cluster(tmp_path, 2, cpu=0.5, check_period="100ms") as cluster:
        operation = cluster.start_operation("p", ["sleep", "1000"], cpu_limit=0.2)
        [job] = cluster.wait(lambda: cluster.jobs(operation, "running"), "it runs")
        told, _ = cpumond(cluster.url, "node", "drain", job["node_id"], "--why", "new kernel")
        assert told.splitlines()[-1] == f"node {job['node_id']} is empty"
        [moved] = cluster.wait(lambda: cluster.jobs(operation, "running"), "it runs again")
        assert moved["node_id"] != job["node_id"]
        [ended] = cluster.jobs(operation, "aborted")
        assert (ended["id"], "drained by" in ended["reason"]) == (job["id"], True)
