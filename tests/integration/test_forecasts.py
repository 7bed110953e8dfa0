"""Forecasts and simulations by the command line, compared with what then happens to real jobs on a real agent."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
from commands import run_command
from waiting import wait_until

from cpumond.cluster.processes import Cluster

pytestmark = [pytest.mark.cgroup, pytest.mark.timeout(300)]

RUN_S = 3


class Site:
    """A cluster of one node with two cores, where jobs that sleep for RUN_S are known."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.words = [sys.executable, "-m", "cpumond"]
        self.env = {"CPUMOND_SCHEDULER": cluster.url}
        self.round_s = 0.0
        """Of the jobs that are known."""

    def run(self, *words: str, code: int = 0) -> str:
        done = run_command(list(words), {**os.environ, **self.env})
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def ask(self, *words: str, code: int = 0) -> Any:
        return json.loads(self.run(*words[:2], "--json", *words[2:], code=code))

    def start(self, job_count: int = 1) -> str:
        """By a request: jobs run on while a command begins, on a loaded host for as long as they take."""
        return self.cluster.start_operation("p", ["sleep", str(RUN_S)], job_count, title="nap")

    def show(self, operation: str) -> Any:
        return self.ask("operation", "show", operation)

    def wait_for(self, *operations: str) -> None:
        self.run("operation", "wait", *operations)

    def list_jobs(self, *operations: str) -> list[dict[str, Any]]:
        return [job for each in operations for job in self.cluster.jobs(each)]

    def list_starts(self, *operations: str) -> list[float]:
        return sorted(float(job["start_time"]) for job in self.list_jobs(*operations))

    def first_start(self, operation: str) -> float:
        jobs = self.ask("operation", "jobs", operation)["jobs"]
        return float(min(job["start_time"] for job in jobs))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    config = '[forecast]\nperiod = "1s"\nmax_load = 1.0\n[min_spare_job_resources_on_node]\ncpu = 0\n'
    with Cluster(tmp_path_factory.mktemp("foretold"), cpu=2.0, scheduler_config=config) as cluster:
        made = Site(cluster)
        made.run("pool", "create", "p")
        known = [made.start() for _ in range(5)]
        made.wait_for(*known)
        made.round_s = measure_round(made.list_starts(*known))
        yield made


def measure_round(starts: list[float]) -> float:
    """The usual time from one job to the next in its place, where two run at a time: how long this host takes."""
    return median(later - before for before, later in zip(starts, starts[2:], strict=False))


def test_an_operation_starts_when_it_was_foretold(site: Site) -> None:
    ahead = [site.start(2) for _ in range(10)]  # more than it takes to ask, beside any load
    waiting = site.start()
    wait_until(lambda: site.show(waiting)["forecast"] is not None)
    text = site.run("operation", "when", waiting)
    told = site.ask("operation", "when", waiting)
    assert told["start_p10"] is not None
    assert "starts in" in text
    assert "as of" in text
    rows = site.run("operation", "list", "--state", "running", "--wide")
    assert "starts in" in rows
    site.wait_for(*ahead, waiting)
    began = site.first_start(waiting)
    # Counted in rounds of jobs: the host may be slower now than it was when these became known, or quicker.
    rounds = (began - told["as_of"]) / measure_round(site.list_starts(*ahead, waiting))
    earliest, latest = ((told[name] - told["as_of"]) / site.round_s for name in ("start_p10", "start_p90"))
    assert earliest - 1.0 <= rounds <= latest + 2.0
    assert rounds > 0.3
    done = site.run("operation", "when", waiting, code=78)
    assert done == ""


def test_a_simulation_foretells_what_then_happens_and_changes_nothing(site: Site) -> None:
    ahead = [site.start(2) for _ in range(2)]
    before = site.ask("operation", "list")["total"]
    told = site.ask("operation", "simulate", "--pool", "p", "--title", "nap", "--", "sleep", str(RUN_S))
    assert site.ask("operation", "list")["total"] == before
    (asked,) = [each for each in told["starts"] if each["operation_id"] == told["operation_id"]]
    began = site.start()
    site.wait_for(*ahead, began)
    # It may be asked for only after that moment, and what runs ahead may take longer than what was known did.
    foretold = max(asked["start_after"], site.cluster.get(f"/api/v1/operations/{began}")["start_time"])
    longest_s = max(job["finish_time"] - job["start_time"] for job in site.list_jobs(*ahead))
    assert abs(site.first_start(began) - foretold) < 1.25 * max(site.round_s, longest_s)
    assert any(line.startswith("its first job starts after") for line in told["lines"])


def test_a_change_of_pools_is_simulated_and_what_is_refused_is_refused(site: Site, tmp_path: Path) -> None:
    assert site.run("pool", "plan", "p", "max_running_operation_count=1", "--simulate")
    file = tmp_path / "tree.toml"
    file.write_text(site.run("tree", "export", "default"))
    assert "nothing would change" in site.run("tree", "plan", str(file), "--simulate")
    site.run("operation", "simulate", "--pool", "p", "--weight", "-1", "--", "true", code=78)
    site.run("operation", "when", "ffffffff-1-1-1", code=67)


def is_first_to_go(process: psutil.Process) -> bool:
    try:
        return Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip() == "1000"
    except OSError:
        return False


def test_processes_that_run_ahead_end_with_the_scheduler(tmp_path: Path) -> None:
    config = '[forecast]\nperiod = "1s"\nmax_load = 1.0\n'
    with Cluster(tmp_path, cpu=1.0, scheduler_config=config) as cluster:
        scheduler = psutil.Process(cluster.scheduler.pid)
        children = wait_until(lambda: scheduler.children(recursive=True), "a run ahead")
        wait_until(lambda: any(is_first_to_go(each) for each in scheduler.children(recursive=True)), "a marked one")
        cluster.scheduler.kill()
        gone, alive = psutil.wait_procs(children, timeout=250)
        assert len(gone) == len(children)
        assert not alive
        cluster.scheduler.start()
