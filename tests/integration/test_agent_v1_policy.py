"""The agent on real cgroups beside others: quotas above, other writers, pause, modes, reload, pins."""

import os
import signal

import pytest
from agent_process import AgentProcess
from configs import FLOOR, at_floor, describe_agent, describe_source, lower, make
from waiting import wait_until

pytestmark = pytest.mark.cgroup


def wait_checks(agent: AgentProcess, number: int = 4) -> None:
    begin = agent.get("/v1/status")["tick"]
    wait_until(lambda: agent.get("/v1/status")["tick"] >= begin + number, f"{number} more ticks")


def test_a_quota_above_a_job_is_its_cap_whenever_it_changes(cgroups, agent):
    cgroups.make("group")
    cgroups.write("group", "quota_us", 90_000)
    make(cgroups, "group/free", quota_us=-1)
    make(cgroups, "group/odd", quota_us=-1)
    cgroups.write("group/odd", "period_us", 33_333)
    make(cgroups, "late", quota_us=-1)
    sources = describe_source(f"{cgroups.top}/group/*", 2) + describe_source(f"{cgroups.top}/late", 2)
    lower(agent, cgroups, "group/free", "group/odd", "late", sources=sources)
    ids = {job["cgroup"].rpartition("/")[2]: job["job_id"] for job in agent.get("/v1/status")["jobs"]}
    bounds = agent.request("GET", f"/v1/jobs/{ids['free']}/explain").json()["bounds"]
    assert (bounds["cap"], bounds["ancestor_cap"], bounds["ancestor"]) == (0.9, 0.9, f"{cgroups.top}/group")

    load = cgroups.start_load("group/free", 2)
    load.burn(2.0)
    wait_until(lambda: cgroups.quota_cores("group/free") == 0.9, "all that the quota above allows is back")
    wait_until(lambda: agent.job(ids["free"])["current_cpu_limit"] == 0.9, "the agent says so")
    assert agent.job(ids["free"])["cpu_limit"] == 0.9

    # The quota above goes up: so does what its job has.
    cgroups.write("group", "quota_us", 130_000)
    wait_until(lambda: cgroups.quota_cores("group/free") == 1.3, "more is allowed now")
    # v1 lets it go down only above its children; a cap that is not on a round number is met to the microsecond.
    load.burn(0.0)
    wait_until(lambda: at_floor(cgroups, "group/free"), "the quota is down again")
    cgroups.write("group", "quota_us", 33_333)
    cgroups.write("", "quota_us", 170_000)
    odd, late = cgroups.start_load("group/odd", 2), cgroups.start_load("late", 2)
    odd.burn(2.0)
    late.burn(2.0)
    wait_until(lambda: cgroups.quota_cores("late") == 1.7, "all that the top allows is back")
    wait_until(lambda: cgroups.read("group/odd", "quota_us") == "11110", "the cap, rounded down, is back")
    assert agent.get("/v1/status")["counters"]["write_errors"] == 0
    assert agent.events("tick_failed") == []
    assert agent.stop() == 0
    assert [cgroups.read(name, "quota_us") for name in ("group/free", "group/odd", "late")] == ["-1"] * 3


def test_a_quota_above_delays_part_of_a_restore(cgroups, agent):
    if cgroups.hierarchies.cpu_version != 1:
        pytest.skip("v2 takes any quota below any other")
    cgroups.make("group")
    make(cgroups, "group/a", quota_us=150_000)
    cgroups.write("group/a", "burst_us", 120_000)
    found = cgroups.read_all("group/a")
    lower(agent, cgroups, "group/a", sources=describe_source(f"{cgroups.top}/group/*"))
    cgroups.write("group", "quota_us", 80_000)
    assert agent.stop() == 69
    assert cgroups.quota_cores("group/a") == 0.8
    [failed] = agent.events("restore_failed")
    assert "group above it is 0.8 cores" in failed["error"]

    again = agent.run("restore")
    assert again.returncode == 69
    assert "group above it is 0.8 cores" in again.stderr
    cgroups.write("group", "quota_us", -1)
    assert agent.run("restore").returncode == 0
    assert cgroups.read_all("group/a") == found


def test_foreign_raises_above_what_was_found_outlive_the_agent(cgroups, agent):
    kept = {"a": 400_000, "b": -1}
    make(cgroups, *kept)
    for name in kept:
        cgroups.write(name, "burst_us", 100_000)
    lower(agent, cgroups, *kept, more='[writes]\noverride_ttl = "1s"\n')
    for name, quota_us in kept.items():
        cgroups.write(name, "quota_us", quota_us)
    wait_until(lambda: len(agent.events("foreign_write")) == len(kept), "they are noticed")
    # Also after they were taken over and lowered again.
    wait_until(lambda: at_floor(cgroups, *kept), "they are the agent's again")
    agent.stop(signal.SIGKILL)
    agent.start()
    assert agent.stop() == 0
    assert {name: cgroups.read(name, "quota_us") for name in kept} == {"a": "400000", "b": "-1"}
    assert {cgroups.read(name, "burst_us") for name in kept} == {"100000"}


def test_limits_within_an_engines_order_are_restored_in_the_end(cgroups, agent):
    """What ``docker update --cpus`` does on v1: period and quota, in two writes."""
    make(cgroups, "a")
    load = cgroups.start_load("a", 2)
    agent.start(describe_agent(cgroups))
    load.burn(2.0)
    wait_until(lambda: (agent.job("a")["usage"] or 0.0) > 0.1, "the load is seen")
    load.burn(0.0)
    wait_until(lambda: at_floor(cgroups, "a"), "the quota is down at the floor")
    load.burn(2.0)
    for cores in (0.5, 1.2, 0.05, 0.8):
        cgroups.write("a", "period_us", 50_000)
        cgroups.write("a", "quota_us", round(cores * 50_000))
        wait_until(lambda c=cores: agent.job("a")["cpu_limit"] == c, f"{cores} cores are the order")
        wait_checks(agent, 2)
        assert cgroups.quota_cores("a") == cores
        assert agent.job("a")["status"] == "overridden"
    explained = agent.request("GET", "/v1/jobs/a/explain").json()
    assert (explained["found"]["quota_us"], explained["bounds"]["cap"]) == (40_000, 0.8)
    load.burn(0.0)
    assert agent.request("DELETE", "/v1/jobs/a/pin").status_code == 200
    wait_until(lambda: at_floor(cgroups, "a"), "it is lowered again when the order is the monitor's")
    load.burn(2.0)
    wait_until(lambda: cgroups.quota_cores("a") == 0.8, "all that was ordered last is back")
    load.burn(0.0)
    wait_until(lambda: at_floor(cgroups, "a"), "it is lowered once more")
    assert agent.stop() == 0
    assert (cgroups.read("a", "quota_us"), cgroups.read("a", "period_us")) == ("40000", "50000")


@pytest.mark.parametrize("then", ["restore", "agent", "first aid"])
def test_orders_that_no_agent_saw_before_it_was_killed_are_kept(cgroups, agent, then):
    orders = {"a": 3_000, "b": 60_000, "c": 149_000}
    make(cgroups, *orders, "unordered")
    lower(agent, cgroups, *orders, "unordered")
    agent.stop(signal.SIGKILL)
    for name, quota_us in orders.items():
        cgroups.write(name, "quota_us", quota_us)
    if then == "agent":
        agent.start()
        assert {name: agent.job(name)["cpu_limit"] for name in orders} == {
            name: quota_us / 1e5 for name, quota_us in orders.items()
        }
        assert agent.stop() == 0
    elif then == "restore":
        assert agent.run("restore").returncode == 0
    else:
        os.environ.update(SERVICE_RESULT="signal", RUNTIME_DIRECTORY=str(agent.directory / "run"))
        try:
            assert agent.run("restore", "--quick").returncode == 0
        finally:
            del os.environ["SERVICE_RESULT"], os.environ["RUNTIME_DIRECTORY"]
    assert {name: cgroups.read(name, "quota_us") for name in orders} == {
        name: str(quota_us) for name, quota_us in orders.items()
    }
    assert cgroups.quota_cores("unordered") == 1.5


def test_modes_of_node_source_operation_and_cgroup(cgroups, agent):
    names = ("node", "off", "shadow", "section", "operation", "up-only", "xattr-off", "xattr-bad", "xattr-late")
    found = make(cgroups, *names)
    os.setxattr(cgroups.path("xattr-off"), "user.cpumond.mode", b"off")
    os.setxattr(cgroups.path("xattr-bad"), "user.cpumond.mode", b"everything")
    sources = (
        describe_source(f"{cgroups.top}/off", more='mode = "off"')
        + describe_source(f"{cgroups.top}/shadow", more='mode = "shadow"')
        + describe_source(f"{cgroups.top}/section", more="job_cpu_monitor = { enable-cpu-reclaim = false }")
        + describe_source(f"{cgroups.top}/operation", more='operation = "careful"')
        + describe_source(f"{cgroups.top}/up-only", more='mode = "up-only"')
        + describe_source(f"{cgroups.top}/*")
        + '[operation.careful]\nmode = "shadow"\n'
    )
    agent.start(describe_agent(cgroups, sources=sources))
    lowered = ("node", "xattr-bad", "xattr-late")
    wait_until(lambda: at_floor(cgroups, *lowered), "the others are down at the floor")
    modes = {job["job_id"]: job["mode"] for job in agent.get("/v1/status")["jobs"]}
    assert modes == {
        "node": "reclaim", "off": "off", "shadow": "shadow", "section": "shadow", "operation": "shadow",
        "up-only": "up-only", "xattr-off": "off", "xattr-bad": "reclaim", "xattr-late": "reclaim",
    }  # fmt: skip
    wait_until(lambda: agent.job("shadow")["monitor_cpu_limit"] == FLOOR, "the monitor's own limit moves in shadow")
    assert agent.job("shadow")["current_cpu_limit"] == 1.5
    assert {name: cgroups.read_all(name) for name in names if name not in lowered} == {
        name: found[name] for name in names if name not in lowered
    }
    os.setxattr(cgroups.path("xattr-late"), "user.cpumond.mode", b"shadow")
    wait_until(lambda: cgroups.read_all("xattr-late") == found["xattr-late"], "its limit is back")
    os.removexattr(cgroups.path("xattr-late"), "user.cpumond.mode")
    wait_until(lambda: at_floor(cgroups, "xattr-late"), "it is down again")
    assert agent.stop() == 0
    assert {name: cgroups.read_all(name) for name in names} == found


def test_a_reload_takes_a_good_file_at_once_and_a_bad_one_never(cgroups, agent):
    found = make(cgroups, "a", "b")["a"]
    lower(agent, cgroups, "a", "b")

    def reload(text: str, event: str) -> None:
        before = len(agent.events(event))
        agent.write_config(text)
        agent.send_signal(signal.SIGHUP)
        wait_until(lambda: len(agent.events(event)) > before, f"the agent logs {event}")

    good = describe_agent(cgroups, sources=describe_source(f"{cgroups.top}/a", more='mode = "shadow"')
                          + describe_source(f"{cgroups.top}/*"))  # fmt: skip
    for bad, match in (
        ("[monitor]\nvote_window_size = 0\n", "vote_window_size"),
        ("[[[", "not valid TOML"),
        ('managed_roots = [".."]\n', "managed_roots"),
        ('[report]\nkind = "http"\nurl = "nowhere"\n', "report.url"),
    ):
        reload(bad, "reload_refused")
        assert match in agent.events("reload_refused")[-1]["error"]
        wait_checks(agent)
        assert at_floor(cgroups, "a", "b")
    assert agent.events("mode_changed") == []

    reload(good, "reloaded")
    wait_until(lambda: cgroups.read_all("a") == found, "the shadow job has its limit back")
    wait_until(lambda: agent.job("a")["status"] == "shadow", "a is in shadow mode")
    assert at_floor(cgroups, "b")
    reload(describe_agent(cgroups, sources=describe_source(f"{cgroups.top}/a")), "reloaded")
    wait_until(lambda: cgroups.quota_cores("b") == 1.5, "a job that no source names has its limit back")
    wait_until(lambda: at_floor(cgroups, "a"), "the other one is down again")
    assert agent.stop() == 0
    assert cgroups.read_all("a") == found
