"""The agent's rule ``peak`` and its looks between checks, on real cgroups: what comes back waits for no check."""

import pytest
from agent_process import AgentProcess
from configs import FLOOR, describe_agent, describe_source
from real_cgroups import CgroupTree
from waiting import wait_until

pytestmark = pytest.mark.cgroup

PEAK = {"limit_rule": '"peak"', "peak_memory": '"100ms"', "throttle_poll": '"100ms"', "early_restore": '"off"'}
"""Two checks forget what was used before: the limit is the use of the last one, and 5 %."""
FIRST_CHECKS = "4s"
"""Nothing is lowered in the first 10 s; the third check does it."""
BURST_US = 30_000


def make(cgroups: CgroupTree, *names: str) -> dict[str, dict[str, str]]:
    for name in names:
        cgroups.make(name)
        cgroups.write(name, "quota_us", 200_000)
        cgroups.write(name, "burst_us", BURST_US)
    return {name: cgroups.read_all(name) for name in names}


def is_idle_low(cgroups: CgroupTree, *names: str) -> bool:
    return all(
        cgroups.quota_cores(name) == FLOOR and cgroups.read(name, "burst_us") == str(int(FLOOR * 100_000))
        for name in names
    )


def wait_for_a_check(agent: AgentProcess, cgroups: CgroupTree, name: str) -> None:
    """The next check is far then. A look may have given all of it back meanwhile: use on a busy machine is uneven."""

    def is_low() -> bool:
        tick = agent.get("/v1/status")["tick"]
        wait_until(lambda: agent.get("/v1/status")["tick"] > tick, "the next check")
        return cgroups.quota_cores(name) < 1.0

    wait_until(is_low, f"a check that leaves {name} low")


def test_a_limit_follows_use_closely_and_is_back_between_two_checks(cgroups, agent):
    found = make(cgroups, "a", "idle", "voted")
    load, voted = cgroups.start_load("a", 2), cgroups.start_load("voted", 2)
    load.burn(0.3)
    # One job by the documents' rule, which has looks where they are asked for; one decision takes it to its floor.
    section = '{ limit_rule = "document", burst_ratio = 1.0 }'
    sources = describe_source(f"{cgroups.top}/voted", more=f"job_cpu_monitor = {section}")
    sources += describe_source(f"{cgroups.top}/*")
    monitor = {**PEAK, "decrease_coefficient": "0.05"}
    agent.start(describe_agent(cgroups, check_period=FIRST_CHECKS, monitor=monitor, sources=sources))

    def follows() -> bool:
        job = agent.job("a")
        limit = cgroups.quota_cores("a")
        # Cuts below a twentieth are not written.
        return bool(job["usage"]) and 1.049 * job["usage"] <= limit <= 1.051 * job["usage"] / 0.95 < 1.0

    wait_until(follows, "the limit is 5 % above use")
    assert cgroups.read("a", "burst_us") == cgroups.read("a", "quota_us")
    wait_until(lambda: is_idle_low(cgroups, "idle"), "the idle one is at the floor")

    def count_looks() -> int:
        return int(agent.get("/v1/status")["counters"]["looks_restored"])

    wait_for_a_check(agent, cgroups, "a")
    counters = agent.get("/v1/status")["counters"]
    before, checks = counters["looks_restored"], counters["decisions"]
    load.burn(2.0)
    wait_until(lambda: cgroups.quota_cores("a") == 2.0, "all of it is back")
    wait_until(lambda: count_looks() > before, "by a look")
    # All that it ordered, and no burst but the one it had.
    assert cgroups.read("a", "burst_us") == str(BURST_US)
    assert cgroups.read_all("a") == found["a"]
    assert is_idle_low(cgroups, "idle")
    assert agent.get("/v1/status")["counters"]["decisions"]["restore"] > checks["restore"]
    explained = agent.request("GET", "/v1/jobs/a/explain").json()
    restore = [record for record in explained["decisions"] if record["kind"] == "restore"][-1]
    assert (restore["result"], restore["applied_cores"]) == ("applied", 2.0)
    assert {change["reason"] for change in agent.events("limit_changed") if change["job_id"] == "idle"} == {"shrink"}

    load.burn(0.0)
    wait_until(lambda: cgroups.quota_cores("voted") == FLOOR, "the other rule's job is at the floor")
    wait_for_a_check(agent, cgroups, "voted")
    before = count_looks()
    voted.burn(2.0)
    wait_until(lambda: cgroups.quota_cores("voted") == 2.0, "all of it is back")
    wait_until(lambda: count_looks() > before, "by a look")
    assert agent.stop() == 0
    assert {name: cgroups.read_all(name) for name in found} == found
