"""The agent and the kernel's pressure (PSI) of real cgroups: the limit comes back without a look at throttling."""

import contextlib
import os
from collections.abc import Iterator

import pytest
from agent_process import AgentProcess
from configs import lower, make
from real_cgroups import CgroupTree, LoadProcess
from waiting import wait_until

from cpumond.host.cgroup.files import read_pressure_s

pytestmark = pytest.mark.cgroup

THREADS = 2


@pytest.fixture
def unified(cgroups: CgroupTree) -> Iterator[str]:
    """Where cgroup2 tells the pressure of ``sleeper``, a cgroup with an order of 1.5 cores."""
    root = cgroups.hierarchies.unified_root
    if root is None or read_pressure_s(os.path.join(root, "cpu.pressure")) is None:
        pytest.skip("needs cgroup2 and a kernel with PSI")
    if cgroups.hierarchies.cpu_version == 1:
        make(cgroups, "sleeper")
    else:
        cgroups.make("sleeper")
        cgroups.write("sleeper", "cpu.max", "150000 100000")
    directory = os.path.join(root, cgroups.top, "sleeper")
    os.makedirs(directory, exist_ok=True)
    yield directory
    if cgroups.hierarchies.cpu_version == 1:
        wait_until(lambda: remove_when_empty(directory), "the cgroup is empty")
        os.rmdir(os.path.dirname(directory))


def remove_when_empty(directory: str) -> bool:
    with contextlib.suppress(OSError):
        os.rmdir(directory)
    return not os.path.exists(directory)


@contextlib.contextmanager
def start_load(cgroups: CgroupTree, unified: str) -> Iterator[LoadProcess]:
    places = {*(os.path.join(root, cgroups.top, "sleeper") for root in cgroups.roots), unified}
    load = LoadProcess([os.path.join(place, "cgroup.procs") for place in sorted(places)], THREADS)
    try:
        yield load
    finally:
        load.stop()


def test_a_job_whose_threads_wait_gets_its_full_limit_back(cgroups: CgroupTree, agent: AgentProcess, unified: str):
    options = {"throttle_restore_ratio": "0.0", "pressure_restore_ratio": "0.5"}
    with start_load(cgroups, unified) as load:
        lower(agent, cgroups, "sleeper", monitor=options)
        load.burn(float(THREADS))
        wait_until(lambda: cgroups.quota_cores("sleeper") == 1.5, "the full limit is back", 20)
        explained = agent.request("GET", "/v1/jobs/sleeper/explain").json()
        restore = next(record for record in explained["decisions"] if record["kind"] == "restore")
        assert restore["pressure_ratio"] > 0.5
        assert (restore["result"], restore["applied_cores"]) == ("applied", 1.5)
        assert "some task waited for CPU" in agent.run("explain", "sleeper").stdout
        [change, *_] = [record for record in agent.events("limit_changed") if record["reason"] == "restore"]
        assert change["pressure_ratio"] > 0.5
        assert agent.events("pressure_unknown") == []
    assert agent.stop() == 0
