"""What counts as a job, and how much: empty cgroups, orders above the CPUs that there are, a host that changes."""

import pytest
from fake_node import QUICK, FakeNode, source

from cpumond.agent.control import add_job, explain_job, view_agent
from cpumond.agent.main import resolve_resources
from cpumond.cli.render.tables import draw_status
from cpumond.core.errors import UnavailableError
from cpumond.host.cgroup.files import is_populated
from cpumond.host.cgroup.mounts import Hierarchies
from cpumond.testing import make_tree, v2_cgroup

PATIENT = QUICK + source(cpu_limit="from-cgroup") + '[discovery]\nrescan_period = "5s"\n'
TWO = "200000 100000"


def job(populated: int, quota: str = TWO) -> dict[str, object]:
    return v2_cgroup(quota=quota, cgroup_events=f"populated {populated}\nfrozen 0\n")


def test_a_cgroup_is_a_job_while_a_process_is_in_it(make_node):
    node: FakeNode = make_node({"left": job(0), "run": job(1)}, config=PATIENT).start()
    status = view_agent(node.tick())
    assert ([each.job_id for each in status.jobs], status.empty_cgroups, status.totals.cpu_limit) == (["run"], 1, 2.0)
    assert "1 job, 1 empty, cgroups v2" in draw_status(status, None, False)
    node.write("left", "cgroup.events", "populated 1\nfrozen 0\n")
    assert sorted(each.found.job_id for each in node.tick().jobs) == ["left", "run"]
    node.ticks(8)
    assert (node.cores("left"), node.cores("run")) == (0.5, 0.5)
    node.write("left", "cgroup.events", "populated 0\nfrozen 0\n")
    snapshot = node.ticks(8)
    assert ([each.found.job_id for each in snapshot.jobs], snapshot.empty_cgroups) == (["run"], 1)
    assert (node.cores("left"), node.agent.table.closed_total) == (2.0, 1)


def test_who_asks_for_a_job_without_a_process_is_told_that(make_node):
    node: FakeNode = make_node({"left": job(0)}, config=PATIENT).start()
    make_tree(node.root / "jobs" / "added", job(0))
    for ask, about in ((add_job, {"cgroup": "jobs/added"}), (explain_job, "left"), (explain_job, "jobs/left")):
        with pytest.raises(UnavailableError, match="it contains no process, so it is not a job yet"):
            ask(node.agent, about)
    node.write("added", "cgroup.events", "populated 1\nfrozen 0\n")
    node.tick()
    assert explain_job(node.agent, "added").cpu_limit == 2.0, "it was registered"


def test_many_empty_cgroups_take_no_jobs_place_and_are_looked_at_in_turn(make_node):
    jobs = {f"left{n}": job(0) for n in range(300)}
    node: FakeNode = make_node({**jobs, "run": job(1)}, config=PATIENT + "max_jobs = 2\n").start()
    assert ([each.found.job_id for each in node.tick().jobs], node.snapshot().problems) == (["run"], ())
    node.write("left299", "cgroup.events", "populated 1\nfrozen 0\n")
    assert len(node.ticks(4).jobs) == 2
    assert node.snapshot().empty_cgroups == 299


def test_what_uses_cpu_is_not_looked_into(make_node, monkeypatch):
    node: FakeNode = make_node({"run": job(1)}, config=PATIENT).start()
    node.ticks(6, usage=1.0)
    looks = []
    monkeypatch.setattr("cpumond.agent.tracked.files.is_populated", lambda _, path: looks.append(path) or True)
    node.ticks(12, usage=1.0)
    assert looks == []
    node.ticks(12, usage=0.0)
    assert looks


@pytest.mark.parametrize(("tree", "populated"), [
    ({"cgroup.events": "populated 1\nfrozen 0\n"}, True),
    ({"cgroup.events": "populated 0\nfrozen 0\n", "cgroup.procs": ""}, False),
    ({"cgroup.procs": ""}, False),
    ({"cgroup.procs": "0\n"}, True),
    ({"cgroup.procs": "", "below": {"cgroup.procs": "7\n"}}, True),
    ({"cgroup.procs": "", "below": {"cgroup.procs": ""}}, False),
    ({}, True),
], ids=[
    "v2", "v2 empty", "v1 empty", "v1 of another pid namespace", "v1 below", "v1 empty below", "nothing says so",
])  # fmt: skip
def test_a_process_is_seen_in_a_cgroup_or_below(tmp_path, tree, populated, monkeypatch):
    root = make_tree(tmp_path / "cpu", {"job": tree})
    assert is_populated(Hierarchies(2, root, root), "job") is populated
    other = make_tree(tmp_path / "cpuacct", {"job": {"cgroup.procs": "7\n"}})
    for sees, found in ((True, populated), (False, True)):
        monkeypatch.setattr("cpumond.host.cgroup.files.sees_all_processes", lambda sees=sees: sees)
        assert is_populated(Hierarchies(1, root, root), "job") is found
        assert is_populated(Hierarchies(1, root, other), "job")


def test_an_order_counts_as_the_cpus_there_are_and_is_left_as_it_is(make_node):
    node: FakeNode = make_node({"vast": job(1, "12800000 100000")}, config=PATIENT)
    (node.root / "cpuset.cpus.effective").write_text("0-1\n")
    node.kill_and_restart()
    assert (node.job("vast").ordered_cores, node.job("vast").current_cores) == (2.0, 2.0)
    node.ticks(8, usage=2.0)
    assert node.read("vast") == "12800000 100000"
    node.ticks(6)
    assert node.cores("vast") == 0.5
    node.ticks(12, usage=2.0)
    assert (node.job("vast").current_cores, node.read("vast")) == (2.0, "12800000 100000")
    node.ticks(6)
    assert node.end().read("vast") == "12800000 100000"


def test_capacity_and_orders_follow_the_host(make_node, logs):
    node: FakeNode = make_node({"run": job(1, "max 100000"), "one": job(1)}, config=PATIENT)
    config = node.read_config()
    node.agent.context.read_resources = lambda: resolve_resources(config, node.agent.context.hierarchies).resources
    node.start()
    told = []
    node.agent.context.on_offer = lambda: told.append(node.agent.config.resources.cpu)
    assert node.tick().capacity_cores == 128.0
    (node.root / "cpuset.cpus.effective").write_text("0-3\n")
    assert node.ticks(6).capacity_cores == 4.0
    assert (node.job("run").ordered_cores, node.job("one").ordered_cores) == (4.0, 2.0)
    # The root of a container's own hierarchy has a quota.
    (node.root / "cpu.max").write_text("150000 100000\n")
    assert node.ticks(6).capacity_cores == 1.5
    assert (node.job("run").ordered_cores, node.job("one").ordered_cores) == (1.5, 1.5)
    assert node.ticks(6).capacity_cores == 1.5
    assert told == [4.0, 1.5]
    assert [each["new_cores"] for each in logs if each["event"] == "host_changed"] == [128.0, 4.0, 1.5]


def test_a_root_that_cannot_be_read_is_said_and_changes_nothing(make_node):
    node: FakeNode = make_node({"run": job(1)}, config=PATIENT)
    config = node.read_config()
    node.agent.context.read_resources = lambda: resolve_resources(config, node.agent.context.hierarchies).resources
    node.start()
    (node.root / "cpuset.cpus.effective").write_text("nonsense\n")
    assert node.ticks(7).capacity_cores == 128.0
    assert any("cpuset.cpus.effective" in problem for problem in node.snapshot().problems)
    node.ticks(6)
    assert node.cores("run") == 0.5
