"""``actuator = "guarantee"``: job guarantees move, containers are not touched, and other jobs run on the rest."""

import os
import signal
from pathlib import Path

import pytest
from agent_process import AgentProcess
from asyncinotify import Inotify, Mask
from closed_loop import WAIT_S, Loop
from commands import AS_NOBODY
from configs import FLOOR, QUICK, describe_agent, describe_source, make
from real_cgroups import CgroupTree
from waiting import wait_until

from cpumond.core.job_cgroups import name_idle_parent

pytestmark = pytest.mark.cgroup

GUARANTEE = {"actuator": '"guarantee"', "use_restore_ratio": "1.0"}
NOBODY = 65534
OWNER_SHARES = 65_536


def is_low(agent: AgentProcess, *names: str) -> bool:
    return all(agent.job(name)["current_cpu_limit"] == pytest.approx(FLOOR) for name in names)


class Writes:
    def __init__(self, tree: CgroupTree, *names: str) -> None:
        self._inotify = Inotify()
        self._inotify.sync_timeout = 0
        for name in names:
            self._inotify.add_watch(Path(tree.path(name, "")), Mask.MODIFY | Mask.ATTRIB | Mask.CREATE | Mask.DELETE)

    def list_seen(self) -> list[str]:
        return [str(event.path) for event in self._inotify]

    def close(self) -> None:
        self._inotify.close()


def test_it_needs_no_right_to_the_cgroups_and_leaves_no_trace(cgroups, tmp_path):
    """The agent runs as an account that may read and nothing else; it is killed, and ends, as it likes."""
    found = make(cgroups, "idle", "busy")
    os.chown(tmp_path, NOBODY, NOBODY)
    agent = AgentProcess(tmp_path)
    agent.prefix = AS_NOBODY
    load = cgroups.start_load("busy", 2)
    try:
        config = describe_agent(cgroups, monitor=GUARANTEE, roots="elsewhere")
        agent.start(config)
        wait_until(lambda: is_low(agent, "idle", "busy"), "both guarantees are down at the floor")
        assert agent.job("idle")["ceiling"] == pytest.approx(1.5)
        load.burn(1.2)
        wait_until(lambda: agent.job("busy")["current_cpu_limit"] == 1.5, "who woke up has all of it")
        explained = agent.request("GET", "/v1/jobs/busy/explain").json()
        assert explained["why"].startswith("The job guarantee of busy is 1.5 of 1.5 requested cores")
        assert agent.get("/v1/status")["counters"]["writes"] == 0
        agent.process.kill()
        agent.process.wait()
        assert {name: cgroups.read_all(name) for name in found} == found
        agent.start()
        assert agent.stop() == 0
    finally:
        agent.close()
    assert {name: cgroups.read_all(name) for name in found} == found


def test_actuators_change_by_reload_and_quotas_return_at_the_next_check(cgroups, agent):
    make(cgroups, "job", quota_us=200_000)
    found = cgroups.read_all("job")
    agent.start(describe_agent(cgroups))
    wait_until(lambda: cgroups.quota_cores("job") == pytest.approx(FLOOR), "the quota is down")
    agent.write_config(describe_agent(cgroups, monitor=GUARANTEE))
    agent.send_signal(signal.SIGHUP)
    wait_until(lambda: cgroups.read_all("job") == found, "the quota is as ordered")
    assert is_low(agent, "job"), "the guarantee stays where it was"
    agent.write_config(describe_agent(cgroups))
    agent.send_signal(signal.SIGHUP)
    wait_until(lambda: cgroups.quota_cores("job") == pytest.approx(FLOOR), "the quota is down again")
    assert agent.stop() == 0
    assert cgroups.read_all("job") == found


def test_a_job_runs_on_an_owners_unused_cpu_and_ends_when_it_wakes_up(cgroups, hierarchies, tmp_path):
    make(cgroups, "owner", quota_us=100_000)  # below no directory of ours
    for name in ("", "owner"):  # it has its core, whatever else runs on the machine
        cgroups.write(name, "shares", OWNER_SHARES)
    load = cgroups.start_load("owner", 1)
    writes = Writes(cgroups, "owner")
    monitor = {name: float(text) if "." in text else int(text) for name, text in QUICK.items()}
    scheduler = 'allowed_node_resources_overcommit_duration = "2s"\n[min_spare_job_resources_on_node]\ncpu = 0\n'
    with Loop(
        tmp_path, hierarchies, is_idle=True, cpu=1.0, memory=4 * 2**30, scheduler_config=scheduler,
        monitor={**monitor, "actuator": "guarantee", "use_restore_ratio": 1.0},
        agent_config=describe_source(f"{cgroups.top}/owner"),
    ) as loop:  # fmt: skip
        loop.create_pool("p")
        operation = loop.start("p", "/bin/sh", "-c", "exec sleep 1000", cpu=0.8)
        [job] = loop.await_running(operation)
        assert job["class"] == "reclaimed"
        place = Path(hierarchies.cpu_root, job["cgroup"])
        assert str(place.parent.relative_to(hierarchies.cpu_root)) == name_idle_parent(loop.nodes[0].cgroup_root)
        assert (place.parent / "cpu.idle").read_text() == "1\n"
        assert loop.quota_cores(job["cgroup"]) == float("inf")
        processes = loop.pids(job["cgroup"])
        for one in (*loop.nodes, loop.scheduler):
            one.kill()
            one.start()
        [kept] = loop.await_running(operation)
        assert (kept["id"], kept["class"], kept["cgroup"]) == (job["id"], "reclaimed", job["cgroup"])
        assert (loop.pids(job["cgroup"]), (place.parent / "cpu.idle").read_text()) == (processes, "1\n")
        load.burn(1.0)
        ended = loop.wait(
            lambda: next((each for each in loop.jobs(operation) if each["state"] == "aborted"), None),
            "the job has ended for its owner",
            WAIT_S,
        )
        assert (ended["id"], ended["preemption"]["kind"]) == (job["id"], "overcommit")
        assert loop.operation(operation)["state"] == "running"
        load.burn(0.0)
        [again] = loop.await_running(operation)
        assert (again["id"] != job["id"], again["class"]) == (True, "reclaimed")
        loop.abort(operation)
        loop.await_no_jobs()
    assert loop.leftovers() == []
    load.stop()
    assert [path for path in writes.list_seen() if not path.endswith(("cgroup.procs", "tasks"))] == []
    writes.close()
