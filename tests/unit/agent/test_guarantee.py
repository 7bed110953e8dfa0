"""``actuator = "guarantee"``: limits move and are reported, containers that are not ours stay as they are."""

import msgspec
import pytest
from fake_node import QUICK, FakeNode, source
from test_scheduler_node import PATH, Node, make_order

from cpumond.agent import control
from cpumond.core.wire import JobReport
from cpumond.host.executor.model import Started
from cpumond.testing import make_tree, v2_cgroup

FOUR = v2_cgroup(quota="400000 100000", cpu_weight="300\n")


def config(actuator: str = "guarantee", more: str = "") -> str:
    return QUICK + f'actuator = "{actuator}"\n{more}\n' + source()


def report(node: FakeNode, job: str) -> JobReport:
    return next(each for each in node.reports.heartbeats[-1].jobs if each.job_id.endswith(job))


@pytest.fixture
def node(make_node) -> FakeNode:
    node: FakeNode = make_node({"a": FOUR}, config=config()).start()
    return node


def test_the_guarantee_moves_and_nothing_is_written(node):
    found = node.files("a")
    node.ticks(8)
    assert report(node, "a").current_cpu_limit == node.job("a").current_cores == 0.5
    assert node.files("a") == found
    assert report(node, "a").reclaimed_cpu_seconds > 0.0
    assert not node.agent.writer.originals
    assert node.agent.writer.writes_total == 0
    assert node.end().files("a") == found


def test_no_job_is_refused_for_where_its_cgroup_is(make_node):
    node = make_node({"a": {**FOUR, "child": v2_cgroup()}}, config=config().replace("jobs/*", "**")).start()
    node.managed_roots = '["elsewhere"]'
    node.reload(node.config_text)
    node.ticks(8)
    assert {(job.found.path, job.refused) for job in node.snapshot().jobs} >= {("jobs/a", ""), ("jobs/a/child", "")}
    assert node.job("a").current_cores == 0.5


def test_another_actuator_takes_the_guarantee_over_within_a_check(node):
    """No node is overcommitted by a change of the lever; what is not written any more goes back at once."""
    node.ticks(8)
    for actuator, quota, weight in (("quota", 0.5, 300), ("guarantee", 4.0, 300), ("weight", 4.0, 38)):
        node.reload(config(actuator))
        node.tick(0.4)
        assert report(node, "a").current_cpu_limit == 0.5
        assert (node.cores("a"), int(node.read("a", "cpu.weight"))) == (quota, weight), actuator


def test_a_cgroup_in_the_idle_class_has_no_weight_to_move(make_node, logs):
    """The kernel refuses each weight there; on v2 it shows 0 meanwhile, and its default afterwards."""
    idle = v2_cgroup(cpu_weight="0\n", cpu_idle="1\n")
    node = make_node({"a": {**FOUR, "cpu.idle": "0\n"}, "b": idle}, config=config("weight")).run(8)
    assert (node.read("a", "cpu.weight"), node.read("b", "cpu.weight"), node.job("b").current_cores) == ("38", "0", 4.0)
    assert "in the idle class (cpu.idle = 1)" in node.job("b").refused
    assert "cpu.idle = 1" in control.explain_job(node.agent, "jobs/b").why
    for name, (weight, flag) in {"a": ("0", "1"), "b": ("100", "0")}.items():
        node.write(name, "cpu.weight", weight)
        node.write(name, "cpu.idle", flag)
    node.agent.rescan_now()
    node.ticks(8)
    assert (node.read("a", "cpu.weight"), node.read("b", "cpu.weight")) == ("0", "12")
    node.write("a", "cpu.weight", "100")
    node.write("a", "cpu.idle", "0")
    node.agent.rescan_now()
    node.ticks(8)
    assert node.read("a", "cpu.weight") == "12"
    node.write("a", "cpu.weight", "0")
    node.write("a", "cpu.idle", "1")
    node.agent.close()
    assert (node.read("a", "cpu.weight"), node.read("b", "cpu.weight")) == ("0", "100")
    assert not [each for each in logs if each["log_level"] == "error"]


def test_what_another_program_orders_counts_at_once(node):
    node.ticks(8)
    node.write("a", "cpu.max", "200000 100000\n")
    node.tick()
    assert (node.job("a").state.hard_cores, node.job("a").current_cores) == (2.0, 0.5)


@pytest.mark.parametrize(("actuator", "ceiling", "quota", "weight"), [
    ("guarantee", True, "200000 100000", "50"),
    ("guarantee", False, "max 100000", "50"),
    ("quota", False, "max 100000", "50"),
    ("weight", True, "200000 100000", "50"),
    ("quota", True, "50000 100000", "50"),
])  # fmt: skip
@pytest.mark.parametrize("moves", ["quota", "weight"])
def test_weights_of_our_own_jobs_follow_their_guarantees(tmp_path, actuator, ceiling, quota, weight, moves):
    """Where the tree says ``cpu_monitor_moves = "weight"``, ceilings stay as ordered whatever the actuator."""
    if moves == "weight" and ceiling:
        quota = "200000 100000"
    node = Node(tmp_path)
    node.reload(node.config_text.replace("[monitor]", f'[monitor]\nactuator = "{actuator}"'))
    node.order(start=[msgspec.structs.replace(make_order(), set_container_cpu_limit=ceiling, cpu_monitor_moves=moves)])
    place = node.root / PATH
    files = v2_cgroup(quota="200000 100000" if ceiling else "max 100000", cpu_weight="200\n")
    make_tree(place, files)
    node.executor.events.append(Started("j1", PATH, 100.0))
    node.serve()
    node.ticks(8)
    job = next(job for job in node.snapshot().jobs if job.found.job_id == "j1")
    assert job.current_cores == 0.5
    assert ((place / "cpu.max").read_text().strip(), (place / "cpu.weight").read_text().strip()) == (quota, weight)
    node.agent.close()
    left = {name: (place / name).read_text().strip() for name in ("cpu.max", "cpu.weight")}
    assert left == {name: str(files[name]).strip() for name in left}
