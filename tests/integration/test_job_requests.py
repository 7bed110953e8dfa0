"""Explain, pin and unpin of a job on its node, asked for at the scheduler: real processes, real cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from closed_loop import WAIT_S, Loop

from cpumond.host.cgroup.mounts import Hierarchies

pytestmark = pytest.mark.cgroup

MONITOR = "{enable_cpu_reclaim=%true;min_cpu_limit=0.1}"


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory, hierarchies: Hierarchies) -> Iterator[Loop]:
    """A node of 2 cores."""
    with Loop(tmp_path_factory.mktemp("requests"), hierarchies, cpu=2.0, memory=4 * 2**30) as cluster:
        cluster.create_pool("p")
        yield cluster
    assert cluster.leftovers() == []


@pytest.fixture
def job(loop: Loop) -> Iterator[dict[str, Any]]:
    """A job of one core whose limit the monitor moves; ``operation`` besides what the scheduler says of it."""
    operation = loop.start("p", "sleep", "1000", monitor=MONITOR)
    yield await_followed(loop, operation)
    loop.abort(operation)
    loop.await_no_jobs()


def await_followed(loop: Loop, operation: str) -> dict[str, Any]:
    """The one job of an operation, as soon as its agent follows it: it runs before the agent looks at it first."""
    [job] = loop.await_running(operation)

    def is_followed() -> bool:
        followed = (each["job_id"] for node in loop.nodes for each in node.get("/v1/status")["jobs"])
        return job["id"] in followed

    loop.wait(is_followed, "its agent follows it")
    return {**job, "operation": operation}


def path_of(job: dict[str, Any], action: str) -> str:
    return f"/api/v1/operations/{job['operation']}/jobs/{job['id']}/{action}"


def call(loop: Loop, method: str, job: dict[str, Any], action: str, body: object = None, status: int = 200) -> Any:
    """What the scheduler answers to a request about a job."""
    with httpx2.Client(trust_env=False, verify=False, timeout=60.0) as client:
        answer = client.request(method, loop.url + path_of(job, action), json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def explain(loop: Loop, job: dict[str, Any]) -> Any:
    return call(loop, "GET", job, "explain")


def test_a_job_is_explained_as_its_node_does(loop, job):
    told = explain(loop, job)
    own = loop.nodes[0].get(f"/v1/jobs/{job['id']}/explain")
    assert told.keys() == own.keys()
    same = ("job_id", "operation_id", "cgroup", "mode", "cpu_limit", "job_cpu_monitor", "directory", "source")
    assert {name: told[name] for name in same} == {name: own[name] for name in same}
    assert told["job_cpu_monitor"]["min_cpu_limit"] == 0.1
    shown = loop.run("operation", "explain", job["operation"], job["id"])
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"The limit of {job['id']} is ")
    assert "started by the scheduler: pool p, task main" in shown.stdout
    assert "min_cpu_limit = 0.1" in shown.stdout


def test_a_pin_holds_the_limit_until_it_is_taken_back(loop, job):
    pinned = loop.run("operation", "pin", job["operation"], job["id"], "--cpu-limit", "0.7")
    assert pinned.returncode == 0, pinned.stderr
    assert pinned.stdout == f"job {job['id']} is pinned at 0.7 cores until `cpumond operation unpin`\n"
    assert loop.quota_cores(job["cgroup"]) == pytest.approx(0.7)
    told = explain(loop, job)
    assert (told["status"], told["pinned_cpu_limit"], told["pinned_until"]) == ("pinned", 0.7, None)
    shown = loop.run("operation", "explain", job["operation"], job["id"]).stdout
    assert f"an operator pinned it until `cpumond operation unpin {job['operation']} {job['id']}`." in shown
    freed = loop.run("operation", "unpin", job["operation"], job["id"])
    assert (freed.returncode, freed.stdout) == (0, f"job {job['id']} is managed by the monitor again\n")
    assert explain(loop, job)["pinned_cpu_limit"] is None
    loop.wait(lambda: loop.quota_cores(job["cgroup"]) < 0.69, "the monitor lowers the limit again", WAIT_S)
