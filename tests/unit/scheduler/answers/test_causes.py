"""What operations wait for, in a word: each cause in a small state that real commands made; and the groups of them."""

from typing import Any

import pytest
from scheduler_world import TREE, World

from cpumond.api import views
from cpumond.api.glance_views import OperationCounts, group_preemptions
from cpumond.cli.render.grid import make_rows
from cpumond.cli.scheduler.forecast import describe_forecast
from cpumond.cli.scheduler.operations import OPERATIONS
from cpumond.scheduler.answers.causes import Cause, Causes
from cpumond.scheduler.answers.forecasts import Forecasts
from cpumond.scheduler.elements import Tree
from cpumond.scheduler.model import PreemptionRecord
from cpumond.scheduler.trial.forward import Pace


@pytest.fixture
def world() -> World:
    return World()


def cause(world: World, operation: str) -> str:
    return Causes(world.tree()).of(world.element(operation)).cause.key


def listed_of(world: World, **filters: Any) -> list[views.OperationView]:
    return views.view_operations(world.state, world.now, views.find_operations(world.rights, **filters))


def test_each_cause_and_its_way_to_the_next(world):
    world.create_pool("top", max_running_operation_count=1)
    world.create_pool("low", "top")
    world.create_pool("wide")
    world.create_pool("tight", resource_limits={"cpu": 1.0})
    first, second = world.start("low"), world.start("low", jobs=2)
    assert (cause(world, first), cause(world, second)) == ("no_nodes", "pool_full:top")
    world.node("n1", cpu=4.0)
    many = world.start("wide", jobs=9)
    limited = world.start("tight", jobs=2)
    own = world.start("wide", jobs=3, resource_limits={"cpu": 1.0})
    gang = world.run("wide", jobs=4, is_gang=True)
    found = {name: cause(world, name) for name in (first, many, limited, own, gang)}
    assert found == {first: "working", many: "share", limited: "limit:tight", own: "limit", gang: "gang"}
    world.suspend(many)
    assert cause(world, many) == "suspended"
    world.complete(first)
    world.step()
    assert cause(world, second) == "room"


def test_what_no_node_can_hold_comes_before_all_other_causes(world):
    world.create_pool("p", max_running_operation_count=2)
    world.add_nodes(3, cpu=4.0)
    large = world.start("p", cpu=5.0)
    gang = world.start("p", jobs=20, is_gang=True)
    pending, fits = world.start("p", cpu=6.0), world.start("p", cpu=1.0)
    world.settle_down()
    world.suspend(large)
    listed = {each.id: each for each in listed_of(world)}
    assert {name: (each.state, each.shown_state, each.trees[TREE].why) for name, each in listed.items()} == {
        large: ("running", "cannot start", "cannot start: 5 cores, largest node 4"),
        gang: ("running", "cannot start", "cannot start: 20 jobs of 1 core at once, all nodes together hold 12"),
        pending: ("pending", "cannot start", "cannot start: 6 cores, largest node 4"),
        fits: ("pending", "pending", Cause("pool_full", "p").text),
    }
    counts = OperationCounts(world.state, {TREE: Causes(world.tree())})
    counts.add(views.list_records(world.state))
    groups = counts.finish()
    assert groups.states == {"cannot start": 3, "pending": 1}
    assert (groups.groups[0].cause, groups.groups[0].operations) == ("cannot_start", 3)
    [rows] = make_rows(OPERATIONS, [(listed[large], TREE)])
    shown = ("cannot start, suspended", "red"), "never", ("cannot start: 5 cores, largest node 4", "red")
    assert (rows[1], rows[10], rows[-1]) == shown
    forecasts = Forecasts(world.state, lambda: world.now, lambda: Pace(1.0, 1.0, 0.0, {}), 60.0, 0.1, 100.0)
    assert describe_forecast(forecasts.when(world.record(large)), world.now) == [
        "never, unless something changes: it cannot start: 5 cores, largest node 4"
    ]
    world.node("n9", cpu=5.0)
    assert (cause(world, large), cause(world, pending)) == ("suspended", "cannot_start")


def test_running_without_a_job_is_shown_as_waiting(world):
    world.create_pool("p")
    world.node("n1", cpu=1.0)
    first, second = world.start("p"), world.start("p")
    world.settle_down()
    assert {each.id: (each.state, each.shown_state) for each in listed_of(world)} == {
        first: ("running", "running"), second: ("running", "waiting"),
    }  # fmt: skip


def test_groups_count_each_operation_once_in_each_tree(world):
    world.create_pool("queue", max_running_operation_count=1)
    world.node("n1", cpu=4.0)
    ids = [world.start("queue", jobs=2, cpu=0.5) for _ in range(3)]
    world.settle_down()
    world.abort(ids[2])
    causes = {TREE: Causes(world.tree())}
    # A look that is kept says what it saw, and of what came later what is.
    for each in world.tree().operations.values():
        causes[TREE].of(each)
    ids.append(world.start("queue", jobs=1, cpu=0.25))
    counts = OperationCounts(world.state, causes)
    records = views.list_records(world.state)
    counts.add(records[:2])
    counts.add(records[2:])
    groups = {group.cause: group for group in counts.finish().groups}
    assert list(groups) == ["pool_full:queue", "working", "aborted"]
    full = groups["pool_full:queue"]
    assert (full.operations, full.jobs, full.wanted_cores, full.pool) == (2, 3, 1.25, "queue")
    assert full.why == "pool queue is full: it already runs its max_running_operation_count of operations"
    assert (groups["working"].limit_cores, groups["aborted"].tree) == (1.0, "")
    for key, titles in (("pool_full:queue", {ids[1], ids[3]}), ("working", {ids[0]}), ("aborted", {ids[2]})):
        assert {each.id for each in listed_of(world, cause=key, causes=causes)} == titles
    assert {each.id for each in listed_of(world, operation_state="live")} == {ids[0], ids[1], ids[3]}


def test_operations_that_are_listed_together_cost_one_look_at_the_nodes(world, monkeypatch):
    looks: list[Tree] = []

    def look(tree: Tree) -> Causes:
        looks.append(tree)
        return Causes(tree)

    monkeypatch.setattr(views, "Causes", look)
    world.create_pool("p", max_running_operation_count=9)
    ids = [world.start("p") for _ in range(3)]
    world.update()
    assert {each.id: each.trees[TREE].cause for each in listed_of(world)} == dict.fromkeys(ids, "no_nodes")
    assert looks == [world.tree()]


def test_preemptions_are_grouped_by_kind_and_whom_they_were_for():
    def record(number: int, pool: str, **more: str) -> PreemptionRecord:
        given = {"kind": "preempted", "preemptor_pool": "p", "priority": "normal", **more}
        return PreemptionRecord(
            f"j{number}", f"o{number % 2}", "t", pool, "n", float(number), why=f"why {number}",
            freed={"cpu": 0.5, "memory": 9.0}, lost_core_seconds=2.0, **given,
        )  # fmt: skip

    rights = World().rights
    assert group_preemptions([], rights).since is None
    limited = record(1, "b", kind="limit_violated", preemptor_pool="", priority="")
    found = group_preemptions([record(4, "a"), record(3, "a"), record(2, "b"), limited], rights)
    assert (found.kept, found.since) == (4, 1.0)
    first, second = found.groups
    assert (first.group, first.count, first.operations) == ("preempted/normal/t/p", 3, 2)
    assert (first.pools, first.freed_cores, first.lost_core_seconds, first.why) == (["a", "b"], 1.5, 6.0, "why 4")
    assert (second.kind, second.preemptor_pool, second.last_at) == ("limit_violated", "", 1.0)
