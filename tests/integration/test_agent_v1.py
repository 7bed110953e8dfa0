"""The agent over real cgroups: it follows use, gives back at once, and leaves every file as it was found."""

import os
import signal
import time
from typing import Any

import pytest
from configs import at_floor, describe_agent, describe_source, lower
from real_cgroups import CgroupTree
from waiting import wait_until

from cpumond.monitor.model import MonitorSettings

pytestmark = pytest.mark.cgroup

Settings = dict[str, str]


def set_limit(cgroups: CgroupTree, name: str, quota_us: int, period_us: int = 100_000, burst_us: int = 0) -> None:
    cgroups.write(name, "period_us", period_us)
    cgroups.write(name, "quota_us", quota_us)
    cgroups.write(name, "burst_us", burst_us)


def test_a_quota_follows_a_light_load_down_and_nothing_else_changes(cgroups, agent):
    for name, quota_us in (("light", 150_000), ("idle", 150_000), ("busy", 30_000)):
        cgroups.make(name)
        set_limit(cgroups, name, quota_us)
    # So little, and with all the weight there is, that it gets it and is throttled whatever else runs on the machine.
    for name in ("", "busy"):
        cgroups.write(name, "shares", 262_144)
    light, busy = cgroups.start_load("light"), cgroups.start_load("busy")
    light.burn(0.02)
    busy.burn(1.0)
    before = cgroups.read_all("light")
    lower(agent, cgroups, "light", "idle")

    def shown() -> dict[str, Any] | None:
        """The job, as long as its limit is the one in the file and not the full one: a host that is busy throttles."""
        job, quota_cores = agent.job("light"), cgroups.quota_cores("light")
        is_there = job["usage"] and job["current_cpu_limit"] == pytest.approx(quota_cores, abs=0.001)
        return job if is_there and quota_cores < 1.5 else None

    assert wait_until(shown, "the light load is seen at its limit")["cpu_limit"] == 1.5
    after = wait_until(lambda: found if (found := cgroups.read_all("light")) != before else None, "it is down")
    assert {file for file in after if after[file] != before[file]} == {cgroups.file("quota_us")}
    # A job that wants more than it has keeps all of it.
    wait_until(
        lambda: cgroups.quota_cores("busy") == agent.job("busy")["current_cpu_limit"] == 0.3, "busy keeps its limit"
    )
    totals = agent.get("/v1/status")["totals"]
    assert totals["cpu_limit"] == pytest.approx(3.3)
    assert totals["reclaimed"] == pytest.approx(totals["cpu_limit"] - totals["current_cpu_limit"])


@pytest.mark.parametrize("namespace", [["-C"], ["-C", "-p", "-f", "--kill-child", "--mount-proc"]])
def test_the_agents_own_cgroup_is_known_in_a_cgroup_namespace(cgroups, agent, namespace):
    """With the host's mounts, as in a privileged container: what the kernel tells it of its cgroup is "/"."""
    for name in ("own", "other"):
        cgroups.make(name)
        set_limit(cgroups, name, 150_000)
    procs = [os.path.join(root, cgroups.top, "own", "cgroup.procs") for root in cgroups.roots]
    enter = "".join(f"echo $$ > {file} && " for file in procs)
    agent.prefix = ["sh", "-c", f'{enter} exec unshare {" ".join(namespace)} "$@"', "sh"]
    lower(agent, cgroups, "other")
    assert agent.job("own")["refused"] == "this program itself runs in it"
    assert cgroups.quota_cores("own") == 1.5


def test_a_container_is_one_job_as_a_whole_down_to_a_quota_inside(cgroups, agent):
    for name in ("lxc", "lxc/init", "lxc/db"):
        cgroups.make(name)
    set_limit(cgroups, "lxc", 150_000)
    set_limit(cgroups, "lxc/db", 40_000)
    source = describe_source(f"{cgroups.top}/*", more="whole = true") + describe_source(f"{cgroups.top}/**")
    agent.start(describe_agent(cgroups, sources=source))
    # Version 1 takes no quota of a parent below that of a child.
    floor = 0.4 if cgroups.hierarchies.cpu_version == 1 else 0.1
    wait_until(lambda: cgroups.quota_cores("lxc") == pytest.approx(floor, abs=0.001), "the container is down")
    jobs = {job["cgroup"]: job["refused"] for job in agent.get("/v1/status")["jobs"] if job["cgroup"] != cgroups.top}
    assert jobs == {f"{cgroups.top}/lxc": ""}
    assert cgroups.quota_cores("lxc/db") == 0.4


def test_a_load_that_wakes_up_has_its_limit_back_in_two_checks(cgroups, agent):
    cgroups.make("sleeper")
    set_limit(cgroups, "sleeper", 200_000)
    load = cgroups.start_load("sleeper", 2)
    lower(agent, cgroups, "sleeper", check_period="1s")

    def count_checks() -> int:
        counts = agent.get("/v1/status")["counters"]["decisions"]
        return sum(counts.values())

    rest_s = cgroups.throttled_s("sleeper")
    load.burn(2.0)
    # On a busy machine it may take a while until it has had so much CPU that it is held back.
    wait_until(lambda: cgroups.throttled_s("sleeper") > rest_s, "it is held back")
    throttled_s, began, checks = cgroups.throttled_s("sleeper"), time.time(), count_checks()
    wait_until(lambda: cgroups.quota_cores("sleeper") == 2.0, "the full limit is back")
    checks = count_checks() - checks
    explained = agent.request("GET", "/v1/jobs/sleeper/explain").json()
    restore = next(record for record in explained["decisions"] if record["kind"] == "restore")
    lost_s = cgroups.throttled_s("sleeper") - throttled_s
    # One check each second; the last one is the one that gave it back, unless this process came late to see it.
    waited_s = restore["at"] - began
    assert checks <= 2 or waited_s <= 2.0, f"{checks} checks, {waited_s:.2f} s"
    # Two checks of a second; longer only where the agent had to wait for its CPU.
    assert lost_s <= 2.0 * max(2.0, waited_s), f"lost {lost_s:.2f} core-seconds on 2 cores in {waited_s:.2f} s"
    assert (restore["result"], restore["applied_cores"]) == ("applied", 2.0)
    assert restore["throttled_ratio"] > MonitorSettings().throttle_restore_ratio
    # There may be more of them by now: where others take the CPU, what it uses falls below its limit again.
    [change, *_] = [record for record in agent.events("limit_changed") if record["reason"] == "restore"]
    assert (change["job_id"], change["new_cores"]) == ("sleeper", 2.0)


def test_the_weight_actuator_moves_shares_and_never_the_quota(cgroups, agent):
    for name, quota_us in (("limited", 150_000), ("free", -1)):
        cgroups.make(name)
        set_limit(cgroups, name, quota_us, burst_us=1_000 if quota_us > 0 else 0)
    cgroups.write("free", "shares", 512)
    found = {name: cgroups.read_all(name) for name in ("limited", "free")}
    agent.start(
        describe_agent(cgroups, monitor={"actuator": '"weight"'}, sources=describe_source(f"{cgroups.top}/*", 2))
    )
    weight = cgroups.file("shares")
    floors = {"free": 26, "limited": 68} if weight == "cpu.shares" else {"free": 2, "limited": 7}

    def down() -> bool:
        return all(int(cgroups.read(name, weight)) == floor for name, floor in floors.items())

    wait_until(down, "both weights are down at the floor")
    for name in found:
        now = cgroups.read_all(name)
        # On v2 the same number is shown a second time, as a nice value.
        assert {file for file in now if now[file] != found[name][file]} - {"cpu.weight.nice"} == {weight}
    cgroups.write("free", "quota_us", 120_000)
    load = cgroups.start_load("free", 2)
    load.burn(2.0)
    wait_until(lambda: int(cgroups.read("free", weight)) > floors["free"], "the shares go up again")
    assert cgroups.read("free", "quota_us") == "120000"
    assert agent.stop() == 0
    found["free"][cgroups.file("quota_us")] = "120000\n" if weight == "cpu.shares" else "120000 100000\n"
    assert {name: cgroups.read_all(name) for name in found} == found


def test_a_cgroup_that_enters_the_idle_class_has_no_weight_any_more(cgroups, agent):
    """The kernel takes its weight, and each one that is written is an error, also one that is put back."""
    cgroups.make("idle")
    if not os.path.exists(cgroups.path("idle", "cpu.idle")):
        pytest.skip("this kernel has no cpu.idle (added in Linux 5.15)")
    agent.start(
        describe_agent(cgroups, monitor={"actuator": '"weight"'}, sources=describe_source(f"{cgroups.top}/*", 2))
    )
    wait_until(lambda: agent.job("idle")["current_cpu_limit"] == 0.1, "its weight is down")
    cgroups.write("idle", "cpu.idle", 1)
    refused = wait_until(lambda: agent.job("idle")["refused"], "it is refused")
    assert refused == "its cgroup is in the idle class (cpu.idle = 1), where a weight has no effect"
    assert agent.job("idle")["current_cpu_limit"] == 2.0
    cgroups.write("idle", "cpu.idle", 0)
    wait_until(lambda: agent.job("idle")["current_cpu_limit"] == 0.1, "its weight goes down from what it is now")
    cgroups.write("idle", "cpu.idle", 1)
    assert agent.stop() == 0
    assert cgroups.read("idle", "cpu.idle") == "1"
    assert not [line for line in agent.log().splitlines() if "error" in line.lower()]


def make_odd_jobs(cgroups: CgroupTree) -> dict[str, Settings]:
    """Cgroups with every kind of setting; what all of their files hold."""
    kinds = {
        "free": (-1, 100_000, 0),
        "free-burst": (-1, 50_000, 40_000),
        "quota": (150_000, 100_000, 0),
        "burst": (150_000, 100_000, 150_000),
        "odd": (50_001, 33_333, 12_345),
        "short": (1_900, 1_000, 900),
        "long": (1_500_001, 1_000_000, 1),
    }
    for name, (quota_us, period_us, burst_us) in kinds.items():
        cgroups.make(name)
        set_limit(cgroups, name, quota_us, period_us, burst_us)
        cgroups.write(name, "shares", 100 + len(name))
    return {name: cgroups.read_all(name) for name in kinds}


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "kill and restore", "kill, restart, SIGTERM"])
def test_every_file_is_left_as_it_was_found(cgroups, agent, end):
    found = make_odd_jobs(cgroups)
    text = describe_agent(cgroups, monitor={"burst_ratio": "0.5"} if end in ("SIGINT", "kill and restore") else None)
    agent.start(text)
    wait_until(lambda: at_floor(cgroups, *found), "all quotas are down at the floor")
    assert agent.get("/v1/status")["counters"]["write_errors"] == 0
    # 0.1 cores of 1 ms are less than the kernel takes: the period is longer now.
    assert (cgroups.read("short", "quota_us"), cgroups.read("short", "period_us")) == ("1000", "10000")
    if end.startswith("SIG"):
        assert agent.stop(getattr(signal, end)) == 0
    else:
        agent.stop(signal.SIGKILL)
        assert at_floor(cgroups, *found)
    if end == "kill and restore":
        done = agent.run("restore")
        assert (done.returncode, done.stderr) == (0, "")
        assert sorted(done.stdout.splitlines()) == sorted(f"restored {cgroups.top}/{name}" for name in found)
    elif end == "kill, restart, SIGTERM":
        agent.start()
        cpus = len(os.sched_getaffinity(0))
        ordered = {job["job_id"]: job["cpu_limit"] for job in agent.get("/v1/status")["jobs"]}
        expected = {"free": cpus, "free-burst": cpus, "quota": 1.5, "burst": 1.5, "short": 1.9, "long": 1.500001}
        assert ordered == pytest.approx({**expected, "odd": 50_001 / 33_333})
        assert {record["job_id"] for record in agent.events("limit_adopted")} == set(found)
        assert at_floor(cgroups, *found)
        assert agent.stop() == 0
    assert {name: cgroups.read_all(name) for name in found} == found


def test_restore_is_harmless_and_there_is_one_agent_only(cgroups, agent, tmp_path):
    cgroups.make("a")
    set_limit(cgroups, "a", 150_000)
    found = cgroups.read_all("a")
    agent.start(describe_agent(cgroups))
    pid = str(agent.process.pid)
    wait_until(lambda: at_floor(cgroups, "a"), "the quota is down at the floor")

    for command in ("restore", "agent"):
        refused = agent.run(command)
        assert (refused.returncode, refused.stdout) == (69, "")
        assert f"pid {pid}" in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert at_floor(cgroups, "a")

    agent.stop(signal.SIGKILL)
    for expected in ("restored", "nothing to restore", "nothing to restore"):
        done = agent.run("restore")
        assert (done.returncode, done.stderr) == (0, "")
        assert expected in done.stdout
        assert cgroups.read_all("a") == found
