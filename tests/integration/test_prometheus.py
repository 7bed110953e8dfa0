"""A real Prometheus server scrapes a running agent, and its own linter reads the metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from agent_process import AgentProcess
from prometheus_server import Prometheus, find_program
from waiting import wait_until

from cpumond.host.cgroup.mounts import Hierarchies
from cpumond.testing import CgroupTree

pytestmark = pytest.mark.prometheus

ORDERED = {"steady": 2.0, "busy": 1.0, "other": 0.5}
ODD_ID = 'odd "id" \\ {x="1"}, задача'

SCRAPE = """
global:
  scrape_interval: 1s
  scrape_timeout: 1s
scrape_configs:
  - job_name: cpumond
    static_configs:
      - targets: ["127.0.0.1:{port}"]
"""


def answers(agent: AgentProcess) -> bool:
    assert agent.process is not None
    assert agent.process.poll() is None, agent.log()
    try:
        return (
            httpx2.get(f"http://127.0.0.1:{agent.port}/readyz", trust_env=False, verify=False, timeout=60.0).status_code
            == 200
        )
    except httpx2.TransportError:
        return False


@pytest.fixture(scope="module")
def tree(hierarchies: Hierarchies) -> Iterator[CgroupTree]:
    """Three jobs: a light load, a full one, and one that sleeps, whose name is odd."""
    with CgroupTree(hierarchies, f"cpumond-test-prometheus-{os.getpid()}") as tree:
        for name in ORDERED:
            tree.make(name)
        yield tree


@pytest.fixture(scope="module")
def agent(tree: CgroupTree, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """The agent over these jobs; the monitor decides quickly."""
    agent = AgentProcess(tmp_path_factory.mktemp("agent"))
    sources = "".join(
        f'[[source]]\nkind = "static"\npattern = "{tree.top}/{name}"\ncpu_limit = {ORDERED[name]}\noperation = "{op}"\n'
        for name, op in (("steady", "night"), ("busy", "night"))
    )
    agent.start(
        f'managed_roots = ["{tree.top}"]\n[monitor]\nmode = "reclaim"\ncheck_period = 200\nvote_window_size = 2\n'
        'vote_decision_threshold = 1\nsmoothing_factor = 1.0\nsmoothing_seed = "first_value"\nmin_cpu_limit = 0.2\n'
        + sources,
        wait=False,
    )
    try:
        wait_until(lambda: answers(agent), "the agent is ready")
        other = {"cgroup": f"{tree.top}/other", "cpu_limit": ORDERED["other"], "job_id": ODD_ID, "operation_id": "day"}
        assert agent.request("POST", "/v1/registered", other).status_code == 200
        tree.start_load("steady").burn(0.1)
        yield agent
    finally:
        agent.close()


@pytest.fixture(scope="module")
def prometheus(agent: AgentProcess) -> Iterator[Prometheus]:
    """A Prometheus server that has scraped the agent a few times."""
    with tempfile.TemporaryDirectory(prefix="cpumond-prometheus-") as directory:
        server = Prometheus(Path(directory), SCRAPE.format(port=agent.port))
        try:
            # Targets are discovered some seconds after the start; rates need two samples.
            wait_until(lambda: server.query("count_over_time(up[1m]) >= 3"), "Prometheus scrapes", 60)
            yield server
        finally:
            server.stop()


def test_the_target_is_up_and_nothing_was_refused(prometheus: Prometheus):
    """No duplicate, out of order or unreadable sample: Prometheus took all it was given."""
    # A scrape that took longer than a second on a busy machine counts as one of a target that is down.
    wait_until(lambda: prometheus.query('up{job="cpumond"} == 1'), "the target is up")
    assert prometheus.wait_for("scrape_samples_scraped == scrape_samples_post_metric_relabeling > 0") > 50
    assert prometheus.log() == ""


def test_totals_of_the_node(prometheus: Prometheus):
    assert prometheus.wait_for("cpumond_node_jobs") == 3
    assert prometheus.wait_for("cpumond_node_cpu_limit_cores") == sum(ORDERED.values())
    assert prometheus.wait_for("sum(cpumond_node_cpu_limit_cores) == sum(cpumond_job_cpu_limit_cores)") > 0
    wait_until(lambda: prometheus.query("cpumond_node_reclaimed_cores > 1"), "the light load's CPU is reclaimed")
    assert prometheus.wait_for("sum(cpumond_jobs_by_status)") == 3
    assert prometheus.wait_for("cpumond_node_throttled_jobs") >= 0


def test_sums_of_operations(prometheus: Prometheus):
    # Nothing is there for a moment after a scrape that took longer than a second.
    found = wait_until(lambda: prometheus.query("cpumond_operation_cpu_limit_cores"), "operations are scraped")
    rows = {labels["operation_id"]: value for labels, value in found}
    assert rows == {"night": 3.0, "day": 0.5}
    assert prometheus.wait_for("sum(cpumond_node_jobs) == sum(cpumond_operation_jobs)") == 3


def test_estimate_reads_the_history_of_the_agent(prometheus: Prometheus, agent: AgentProcess) -> None:
    """``cpumond estimate`` over the metrics of the agent itself: orders, use, and that limits were moved meanwhile."""
    wait_until(lambda: prometheus.query("count_over_time(cpumond_job_cpu_seconds_total[1m]) >= 5"), "some samples")
    url = f"http://127.0.0.1:{prometheus.port}"
    command = [sys.executable, "-m", "cpumond", "estimate", "--prometheus", url, "--since", "1m", "--step", "1s"]
    result = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    rows = {row["name"]: row for row in found["workloads"]}
    assert {name: row["ordered_cores"] for name, row in rows.items()} == pytest.approx(
        {"steady": 2.0, "busy": 1.0, ODD_ID: 0.5}
    )
    assert rows["steady"]["detail"] == "operation night"
    assert 0.005 < rows["steady"]["used_cores"] < 0.3
    assert any("had a limit that cpumond moved" in note for note in found["notes"])
    assert any("Prometheus has only" in note for note in found["notes"])


def test_the_limit_of_a_job_follows_its_load(prometheus: Prometheus, tree: CgroupTree):
    steady = '{job_id="steady"}'
    assert prometheus.wait_for(f"cpumond_job_cpu_limit_cores{steady}") == 2.0
    wait_until(lambda: prometheus.query(f"cpumond_job_current_cpu_limit_cores{steady} < 1"), "the limit follows")
    assert tree.quota_cores("steady") < 2.0
    wait_until(lambda: prometheus.query(f"rate(cpumond_job_cpu_seconds_total{steady}[5s]) > 0.02"), "the load is seen")


def test_what_a_job_is_joins_with_its_values(prometheus: Prometheus, tree: CgroupTree):
    joined = "cpumond_job_cpu_limit_cores * on (job_id) group_left (operation_id, cgroup) cpumond_job_info"
    found = wait_until(lambda: prometheus.query(joined), "jobs are scraped")
    rows = {labels["job_id"]: (labels, value) for labels, value in found}
    assert set(rows) == {"steady", "busy", ODD_ID}
    labels, value = rows[ODD_ID]
    assert (labels["operation_id"], labels["cgroup"], value) == ("day", f"{tree.top}/other", 0.5)


def test_the_cost_of_the_agent(prometheus: Prometheus):
    assert prometheus.wait_for("cpumond_ticks_total == cpumond_tick_duration_seconds_count") > 0
    assert 2**23 < prometheus.wait_for("cpumond_process_resident_memory_bytes") < 2**27
    assert prometheus.wait_for("cpumond_process_cpu_seconds_total") > 0
    wait_until(lambda: prometheus.query("time() - cpumond_last_tick_timestamp_seconds < 5"), "the last tick is new")
    assert prometheus.wait_for("cpumond_errors_total + cpumond_write_errors_total") == 0
    assert prometheus.wait_for("cpumond_build_info") == 1
    for name in ("fast_restores", "late_ticks", "cgroup_writes", "shed_checks"):
        assert prometheus.wait_for(f"cpumond_{name}_total") >= 0
    assert prometheus.wait_for("count(cpumond_foreign_writes_total)") == 2
    wait_until(lambda: prometheus.query('cpumond_decisions_total{kind="shrink"} > 0'), "decisions are counted")


def test_promtool_finds_nothing_to_say(agent: AgentProcess):
    """Names, types and help texts are as Prometheus wants them."""
    program = find_program("promtool")
    result = subprocess.run(
        [program, "check", "metrics"], input=agent.metrics(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
