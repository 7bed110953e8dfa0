"""The page of a running agent: off unless asked for, this host only, read only, and graphs of real load."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from agent_process import AgentProcess, free_port
from configs import describe_agent, make
from real_cgroups import CgroupTree
from test_agent_api import Host
from waiting import wait_until

from cpumond.host.cgroup.mounts import Hierarchies


def page(port: int) -> str:
    return f'[web]\nlisten = "127.0.0.1:{port}"\nperiod = "200ms"\n'


def ask(port: int, path: str, method: str = "GET", **headers: str) -> httpx2.Response:
    return httpx2.request(
        method, f"http://127.0.0.1:{port}{path}", headers=headers, trust_env=False, verify=False, timeout=250
    )


def count_listeners(agent: AgentProcess) -> int:
    assert agent.process is not None
    connections = psutil.Process(agent.process.pid).net_connections("tcp")
    return len({each.laddr for each in connections if each.status == psutil.CONN_LISTEN})


@pytest.fixture
def fake(tmp_path: Path) -> str:
    return Host(tmp_path / "host", 2).config


def test_it_has_an_address_of_its_own(agent: AgentProcess, fake: str) -> None:
    """And only where one is asked for."""
    agent.start(fake)
    assert (count_listeners(agent), ask(agent.port, "/").status_code) == (1, 404)  # the metrics
    assert agent.stop() == 0
    port = free_port()
    agent.log_path.unlink()
    agent.start(fake + page(port))
    assert count_listeners(agent) == 2
    assert agent.events("started")[0]["web"] == f"127.0.0.1:{port}"
    explained = ask(port, "/api/v1/jobs/jobs%2Fjob0/explain").json()
    assert (explained["job_id"], explained["samples"]["period_s"]) == ("job0", 0.2)
    for path in ("/metrics", "/v1/status", "/api/v1/jobs/job0/pin", "/api/v1/registered", "/web/absent.js", "/api"):
        assert ask(port, path).status_code == 404, path
    assert ask(agent.port, "/api/v1/status").status_code == 404


@pytest.mark.cgroup
def test_graphs_follow_a_real_load(agent: AgentProcess, cgroups: CgroupTree, hierarchies: Hierarchies) -> None:
    port = free_port()
    make(cgroups, "job", quota_us=60_000)
    load = cgroups.start_load("job")
    load.burn(1.0)
    agent.start(describe_agent(cgroups, monitor={"throttle_restore_ratio": "0.0"}, more=page(port)))

    def explain() -> dict[str, Any]:
        told: dict[str, Any] = ask(port, "/api/v1/jobs/job/explain").json()
        return told

    def samples() -> dict[str, Any]:
        told: dict[str, Any] = explain()["samples"]
        return told

    # More than its quota: it uses all it may, and is throttled, which the graph and the sums show.
    wait_until(lambda: max(samples()["usage"], default=0.0) > 0.2, "the load is seen")
    wait_until(lambda: max(samples()["throttled_ratio"]) > 0.5, "it is throttled")
    wait_until(lambda: explain()["aggregated"]["throttled_cpu_s"] > 0.0, "the time is summed up")
    sums = explain()["aggregated"]
    assert 0.0 <= sums["late_cpu_s"] <= sums["throttled_cpu_s"]
    load.burn(0.0)
    # On a busy machine the load may have had so little that its limit is low already.
    wait_until(lambda: samples()["usage"][-1] < 0.1, "the job is idle")
    wait_until(lambda: samples()["limit"][-1] < 0.2, "the idle job's limit goes down")
    told = samples()
    assert all(low < high for low, high in zip(told["lower_bound"], told["upper_bound"], strict=True))
    steps = [later - before for before, later in pairwise(told["at"])]
    assert all(step > 0.0 for step in steps), steps
    wait_until(lambda: samples()["at"][-1] > told["at"][-1], "it goes on")  # where it is full the oldest go
    # It wants more than it was left: what it waits for now is late, and its limit grows.
    late_s = explain()["aggregated"]["late_cpu_s"]
    load.burn(1.0)
    wait_until(lambda: explain()["aggregated"]["late_cpu_s"] > late_s, "it waits for CPU that it had given up")
    wait_until(lambda: samples()["limit"][-1] > 0.3, "its limit goes up")
