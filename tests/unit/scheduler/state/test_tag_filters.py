"""``scheduling_tag_filter``: on which nodes jobs start, and what that does to shares (semantics.md 2.13)."""

import msgspec
import pytest
from scheduler_world import EAGER, World, assert_consistent

from cpumond.scheduler.access.required import decide
from cpumond.scheduler.answers.idle import idle_reasons
from cpumond.scheduler.answers.idle_trials import find_idle
from cpumond.scheduler.answers.operation import explain_operation
from cpumond.scheduler.decide.placement import UNMATCHED, find_stuck_tasks
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings.commands import ChangePool, Edit
from cpumond.scheduler.settings.operations import StartOperation, UpdateOperation
from cpumond.scheduler.state.node_commands import SetNodeTags
from cpumond.scheduler.trial.rounds import start_jobs

FILTER = "scheduling_tag_filter"


def make(first: float = 3.0, second: float = 7.0, **tree: object) -> World:
    world = World(nodes={"n2": second}, max_ephemeral_pools_per_user=9, **tree)
    world.node("n1", cpu=first, tags=("ssd",))
    return world


def places(world: World, operation: str) -> str:
    """The nodes of its jobs: ``n1 n1 n2``."""
    return " ".join(sorted(job.node.id for job in world.jobs_of(operation)))


def test_tag_1_one_that_no_online_node_fits_fails_after_a_minute():
    world = make()
    operation = world.start(scheduling_tag_filter="ssd & gpu")
    other = world.run(scheduling_tag_filter="gpu")
    assert world.record(operation).state == "running"
    world.settle_down(50)
    world.do(SetNodeTags("n2", tags=("gpu",)))
    world.settle_down(10)
    record = world.record(operation)
    told = f'No online node fits scheduling_tag_filter "ssd & gpu" of operation {operation}'
    assert (record.state, record.error) == ("failed", told)
    assert record.failure.message == record.error
    assert places(world, other) == "n2"
    world.restart()
    assert world.record(operation).state == "failed"


def test_it_waits_while_a_node_is_away_shortly_and_for_its_jobs():
    world = make()
    operation = world.run(jobs=5, scheduling_tag_filter="ssd")
    world.do(SetNodeTags("n1", tags=("other",)))
    world.set_operation(operation, scheduling_tag_filter="none")
    world.settle_down(100)
    assert (world.record(operation).state, places(world, operation)) == ("running", "n1 n1 n1")
    world.suspend(operation, abort_running_jobs=True)
    world.settle_down(100)
    world.resume(operation)
    world.settle_down(50)
    world.restart(steps=50)
    assert world.record(operation).state == "running"
    world.settle_down(20)
    assert world.record(operation).state == "failed"


@pytest.mark.parametrize("why", ["no node at all is online", "the filter is a pool's", "it is pending", "never"])
def test_it_does_not_fail_where(why):
    world = make()
    world.create_pool("a", max_running_operation_count=1)
    world.start("a", jobs=100)
    spec = {FILTER: "gpu"}
    if why == "no node at all is online":
        world.nodes.clear()
    if why == "the filter is a pool's":
        world.create_pool("b", scheduling_tag_filter="gpu")
        spec = {}
    if why == "never":
        world.state.rules = type(world.state.rules)(unmatched_scheduling_tag_timeout_s=0.0)
    operation = world.run("a" if why == "it is pending" else "b", **spec, steps=150)
    assert world.record(operation).state in ("running", "pending")


@pytest.mark.parametrize(
    ("pool", "own", "expected"), [("ssd", "!ssd", ""), ("ssd", "", "n1 n1 n1"), ("", "ssd", "n1 n1 n1")]
)
def test_tag_2_the_filters_of_all_pools_above_hold_too(pool, own, expected):
    world = make()
    world.create_pool("top", scheduling_tag_filter=pool)
    world.create_pool("a", "top")
    for place in ("a", "a$b"):
        operation = world.run(place, jobs=9, **{FILTER: own})
        assert places(world, operation) == expected
        world.abort(operation)
        world.settle_down()
        world.set_pool("a", create_ephemeral_subpools=True)


def test_tag_3_a_share_is_bounded_by_the_nodes_that_fit():
    world = make()
    operation = world.run(jobs=10, scheduling_tag_filter="ssd")
    element = world.element(operation)
    assert max(element.fair_share) == pytest.approx(0.3)
    assert (max(element.demand_share), element.demand[1]) == (1.0, 10.0)
    world.settle_down(100)
    assert (len(world.jobs_of(operation)), element.starvation_status, element.below_since) == (3, "non_starving", None)
    world.set_operation(operation, scheduling_tag_filter="")
    world.update()
    assert max(element.fair_share) == 1.0


def test_tag_4_a_live_change_holds_for_starts_from_then_on():
    world = make()
    operation = world.run(jobs=9, scheduling_tag_filter="!ssd")
    assert places(world, operation) == "n2 n2 n2 n2 n2 n2 n2"
    world.set_operation(operation, scheduling_tag_filter="ssd")
    world.beat()
    world.settle_down()
    assert places(world, operation) == "n1 n1 n2 n2 n2 n2 n2 n2 n2"
    world.create_pool("a")
    second = world.start("a", jobs=30)
    world.set_pool("a", scheduling_tag_filter="ssd")
    world.nodes["n2"].finish(next(iter(world.nodes["n2"].jobs)), steps=3)
    assert places(world, second) == "n1"
    world.do(SetNodeTags("n2", tags=("ssd",)))
    world.settle_down()
    assert places(world, second) == "n1 n2"
    world.restart(steps=3)
    assert (places(world, second), world.element(second).fitting is not None) == ("n1 n2", True)
    assert_consistent(world.state)


def test_victims_are_looked_for_on_nodes_that_fit():
    """A starving operation whose nodes are all taken by protected jobs stays starving."""
    world = make(4.0, 4.0, **{**EAGER, "fair_share_starvation_timeout": 1000})
    first = world.start("a", jobs=8)
    for name in ("n2", "n1"):  # what started last goes first
        world.step(1.0, world.nodes[name])
    second = world.run("b", jobs=8, scheduling_tag_filter="ssd", steps=20)
    assert (places(world, first), places(world, second)) == ("n2 n2 n2 n2", "n1 n1 n1 n1")
    third = world.run("c", jobs=8, scheduling_tag_filter="!ssd", steps=20)
    assert (places(world, third), world.element(third).starvation_status) == ("n2", "starving")
    assert {each.node_id for each in world.state.preemptions if each.preemptor_operation_id == third} == {"n2"}


def test_a_gang_has_fitting_nodes_alone():
    world = make(4.0, 8.0, **{**EAGER, "fair_share_starvation_timeout": 1000})
    world.node("n3", cpu=4.0, tags=("ssd",))
    world.run("a", jobs=16)
    gang = world.start("b", jobs=4, is_gang=True, scheduling_tag_filter="ssd")
    large = world.run("c", jobs=9, is_gang=True, scheduling_tag_filter="ssd", steps=30)
    assert len(world.jobs_of(gang)) == 4
    assert "n2" not in places(world, gang)
    assert world.element(large).explain_unplaceable() == (
        '9 jobs of 1 core at once, all nodes matching scheduling_tag_filter "ssd" together hold 8'
    )
    assert not world.jobs_of(large)


def test_why_nothing_starts_is_noted_and_unplaceable_jobs_demand_nothing():
    world = make()
    operation = world.run(jobs=2, cpu=5.0, scheduling_tag_filter="ssd")
    element = world.element(operation)
    assert element.explain_unplaceable() == '5 cores, largest node matching scheduling_tag_filter "ssd" 3'
    assert element.demand[1] == 0.0
    world.set_tree(count_unplaceable_jobs_in_demand=True)
    world.settle_down()
    assert (element.demand[1], element.deactivations[UNMATCHED]) == (10.0, 1)
    world.do(SetNodeTags("n2", tags=("ssd",)))
    world.settle_down()
    assert (places(world, operation), element.deactivations) == ("n2", {"node_resources": 2})


@pytest.mark.parametrize("text", ["a&&b", "a b", "a=b", "(a", " | ".join(["a"] * 51)])
def test_tag_5_a_wrong_filter_is_refused_with_the_column(text):
    world = make()
    world.create_pool("p")
    operation = world.start()
    what = "101 tokens .*, at most 100 are allowed" if len(text) > 9 else r"column \d"
    for refused in (
        lambda: world.start(scheduling_tag_filter=text),
        lambda: world.start(scheduling_options_per_pool_tree={"default": {"scheduling_tag": text}}),
        lambda: world.set_operation(operation, scheduling_tag_filter=text),
        lambda: world.set_pool("p", scheduling_tag_filter=text),
        lambda: world.create_pool("q", scheduling_tag=text),
    ):
        with pytest.raises(CommandError, match=what) as caught:
            refused()
        assert caught.value.attributes["field"].split("/")[-1] in (FILTER, "scheduling_tag")
    with pytest.raises(CommandError, match="must be a printable text, got 5"):
        world.start(scheduling_tag_filter=5)
    world.start(scheduling_tag_filter=" | ".join(["a"] * 50))
    assert world.tree().config.pools["p"].settings.scheduling_tag_filter == ""


def test_a_filter_that_no_node_fits_is_told_of():
    world = make()
    world.create_pool("p")
    change = world.do(ChangePool("default", "p", (Edit((FILTER,), "gpu"),)))
    assert change.warnings == ('pool "p": no node of tree "default" fits its scheduling_tag_filter now',)
    assert not world.do(ChangePool("default", "p", (Edit(("weight",), 2),))).warnings
    changed = world.do(UpdateOperation(world.start(), {FILTER: "gpu"}))
    assert changed.warnings == ('no node of tree "default" fits scheduling_tag_filter now',)
    spec = {"tasks": {"t": {"command": "true", "job_count": 1}}, FILTER: "ssd & gpu"}
    told = 'no job of task "t" can start: no node matches scheduling_tag_filter "ssd & gpu"'
    assert world.do(StartOperation(spec)).warnings == (told,)


def test_who_may_set_that_of_a_pool_administers_it():
    world = make(acl_required=True)
    world.create_pool("p", acl=[{"action": "allow", "subjects": ["bob"], "permissions": ["write"]}])
    command = ChangePool("default", "p", (Edit((FILTER,), "ssd"),))
    assert [each.allowed for each in decide(world.state, command, User("bob"))] == [True, False]


def test_why_says_what_is_left_out_and_idle_cpu_names_the_filter():
    world = make()
    world.create_pool("p", scheduling_tag_filter="ssd | fast")
    operation = world.run("p", jobs=5, scheduling_tag_filter="!fast")
    answer = explain_operation(world.state, world.record(operation), world.now, {})
    filters = f'scheduling_tag_filter "!fast" of operation {operation} and "ssd | fast" of pool "p"'
    lines = answer.trees[0].lines
    assert f"{filters} leaves out 1 of 2 nodes online" in lines
    assert "no node has enough free resources now for" in "".join(lines)
    assert answer.lines[0].endswith(
        "waits for free resources on the nodes that match its scheduling_tag_filter and those of the pools above it"
    )
    report = find_idle(world.state, world.tree(), world.now)
    assert report.sentence == (
        '2 cores stand idle while 1 operation waits: scheduling_tag_filter "ssd | fast" of pool "p" and '
        "scheduling_tag_filter of 1 waiting operation leave out node n2; give node n2 matching tags, or widen the "
        "filter and 2 cores start work"
    )
    (cause,) = report.causes
    assert (cause.kind, cause.idle_cores, cause.change.operations) == (FILTER, 2.0, [operation])
    assert idle_reasons(report)[FILTER] == 2.0
    world.do(SetNodeTags("n1", tags=("fast",)))
    never = world.run("p", scheduling_tag_filter="gpu")
    for name, told in ((operation, "the rest of it"), (never, "it")):
        (part,) = explain_operation(world.state, world.record(name), world.now, {}).trees
        assert part.lines[0].startswith(f"{told} cannot start: no node matches scheduling_tag_filter ")
        assert part.lines[0].endswith("; change the filter, or give nodes matching tags")
    assert find_stuck_tasks(world.operation(never)) == [
        'no job of task "t" can start: no node matches scheduling_tag_filter "ssd | fast" and "gpu"'
    ]


def test_what_starts_is_what_runs_ahead_foretell():
    """The trials and runs ahead are the state itself; nodes of another kind do not hide that one has room."""
    world = make(0.0, 7.0)
    operations = [world.start(jobs=2, scheduling_tag_filter=text) for text in ("ssd", "!ssd", "")]
    world.settle_down()
    assert [len(world.jobs_of(each)) for each in operations] == [0, 2, 2]
    world.node("n3", cpu=2.0, tags=("ssd",))
    world.node("n4", cpu=2.0)
    started = start_jobs(world.state, world.tree(), world.now)
    assert sorted((job.element.name, job.node.id) for job in started) == [(operations[0], "n3")] * 2


def test_an_attribute_of_before_filters_were_options_is_read_or_left_out():
    world = make()
    world.create_pool("p", weight=2)
    key = next(key for key in world.stored if key[0] == "pool")
    record = msgspec.json.decode(world.stored[key])
    for kept, text in (({FILTER: 5}, ""), ({FILTER: "a b"}, ""), ({"scheduling_tag": "a"}, "a"),
                       ({FILTER: "a", "scheduling_tag": "b"}, "a")):  # fmt: skip
        world.stored[key] = msgspec.json.encode({**record, "attributes": {"weight": 2, **kept}})
        world.restart()
        settings = world.pool("p").settings
        assert (settings.scheduling_tag_filter, settings.weight) == (text, 2)


def test_a_job_that_a_node_may_not_hold_is_not_tried_on_each_heartbeat():
    """Each kind of nodes has an order of service of its own; all of them follow what changes."""
    world = make()
    waiting = [world.start(jobs=4, scheduling_tag_filter="ssd") for _ in range(3)]
    world.settle_down()
    order = world.state.work["default"].order
    assert order is not None
    first, second = (order.of(world.state.nodes[name]) for name in ("n1", "n2"))
    assert order.best() is not None
    assert second.best() is None
    assert [world.element(each).deactivations[UNMATCHED] for each in waiting] == [1, 1, 1]
    for each in waiting:
        world.suspend(each)
    order.catch_up()
    assert order.best() is first.best() is second.best() is None
    assert places(world, world.run(jobs=9, scheduling_tag_filter="!ssd")) == "n2 n2 n2 n2 n2 n2 n2"
