"""Answers to "why", and plans: sentences and numbers of small states (semantics.md 2 to 7)."""

import random
from typing import Any

import pytest
from scheduler_world import TREE, World

from cpumond.core.measures import format_span
from cpumond.fairshare.explain import explain
from cpumond.fairshare.resources import CPU
from cpumond.scheduler.answers.operation import OperationAnswer, explain_operation, name_operations
from cpumond.scheduler.answers.plan import ChangePlan, make_plan, try_command
from cpumond.scheduler.answers.pool import describe_pool
from cpumond.scheduler.answers.standing import find_standing
from cpumond.scheduler.model import CommandError, Rules
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings import commands, operations
from cpumond.scheduler.settings.attributes import Edit
from cpumond.scheduler.trial.fork import ask_at_once


class Service(World):
    def __init__(self) -> None:
        super().__init__(Rules(spare=(0.0, 0.01, 0.0, 0.0, 0.0)))

    def begin(self, pool: str, jobs: int = 1, **spec: Any) -> str:
        """Start an operation of the pool's own user: a user may make one ephemeral pool only."""
        return self.start(pool, f"of-{pool}", jobs, **spec)

    def work(self) -> None:
        self.update()
        self.beat()

    def why(self, operation_id: str, *, told: bool = False) -> OperationAnswer:
        shares = {}
        if told:
            explanation = explain(*self.updates[TREE], f"#{operation_id}")
            shares[TREE] = (explanation.rule, name_operations(self.state, explanation.lines))
        return explain_operation(self.state, self.state.find_record(operation_id), self.now, shares)

    def lines(self, operation_id: str) -> str:
        answer = self.why(operation_id)
        return "\n".join([*answer.lines, *(line for tree in answer.trees for line in tree.lines)])

    def plan(self, command: commands.ConfigCommand, **options: Any) -> ChangePlan:
        change = try_command(self.state, command, User("tester", admin=True), self.now)
        if isinstance(change, ChangePlan):
            return change
        everything = options.get("everything", False)
        return ask_at_once(lambda: make_plan(self.state, change, self.now, {}, everything), ChangePlan)

    def set(self, pool: str, **attributes: Any) -> commands.ChangePool:
        return commands.ChangePool(TREE, pool, tuple(Edit((name,), value) for name, value in attributes.items()))


@pytest.fixture
def service() -> Service:
    return Service()


def test_3_2_a_pending_operation_names_the_first_full_pool_and_its_place(service):
    service.create_pool("top", max_running_operation_count=1, max_operation_count=9)
    service.create_pool("low", "top")
    service.begin("low")
    service.begin("low")
    waiting = service.begin("low")
    text = service.lines(waiting)
    assert f"operation {waiting} is pending" in text
    assert "it is number 2 of 2 in the queue of tree 'default'; 1 of those before it waits for the same pool" in text
    assert 'pool "top" is full: it runs 1 operation of at most 1 (max_running_operation_count)' in text
    assert 'pool "top": 1 of at most 1 running, 3 of at most 9 operations' in text
    assert "the root: 1 of at most" in text


def test_a_running_operation_tells_its_share_usage_and_demand_in_cores(service):
    service.node("n1", cpu=4.0)
    first, second = service.begin("a", 10), service.begin("b", 10)
    service.work()
    answer = service.why(first, told=True)
    lines = answer.trees[0].lines
    assert lines[0] == "its fair share is 2 cores; 2 cores allocated to its 2 jobs; it demands 10 cores"
    assert answer.trees[0].rule == "weight"
    assert any(f"operation {first} gets 50.0 % of the cluster (2 of 4 cpu): limited by" in line for line in lines)
    assert "it still has 8 jobs to start" in lines
    assert not any(f"#{second}" in line for line in lines)


def test_a_title_stands_beside_the_id(service):
    operation_id = service.begin("a", title="training")
    assert name_operations(service.state, [f"#{operation_id} gets"]) == [f'operation {operation_id} "training" gets']


def test_limits_on_the_path_are_named_with_what_is_used(service):
    service.node("n1", cpu=4.0)
    service.create_pool("a", resource_limits={"cpu": 1})
    operation_id = service.begin("a", 3)
    service.work()
    text = service.lines(operation_id)
    assert 'limit of pool "a": 1 cpu, 1 allocated' in text
    assert 'passed over 1 time since the last update: resource_limits of pool "a" leave no room' in text


@pytest.mark.parametrize(("jobs", "fits"), [(30, False), (4, False), (3, True)])
def test_a_gang_that_not_even_empty_nodes_would_hold_says_so(service, jobs, fits):
    service.add_nodes(3, cpu=3.0)
    service.step()
    service.nodes["n0"].has(2.0)
    service.step()
    gang = service.run(jobs=jobs, cpu=2.0, is_gang=True)
    assert not service.jobs_of(gang)
    # Four jobs of two cores are less than the nine that there are, but one node holds one of them.
    sentence = f"it cannot start: {jobs} jobs of 2 cores at once, all nodes together hold 3"
    assert (sentence in service.lines(gang)) is not fits


def make_starving(service: Service) -> tuple[str, str]:
    """A cluster full of one operation's jobs, and another operation that came late; both below the same share."""
    service.do(commands.ChangeTree(TREE, (Edit(("max_unpreemptible_running_job_count",), 0),)))
    service.node("n1", cpu=4.0)
    first = service.begin("a", 8)
    service.work()
    second = service.begin("b", 8)
    service.update()
    return first, second


def test_6_2_an_operation_below_its_share_says_when_it_starves(service):
    _, late = make_starving(service)
    service.after(18.0).update()
    assert "it is below its fair share for 18 s; starves in 12 s" in service.lines(late)
    service.after(13.0).update()
    text = service.lines(late)
    assert "it is below its fair share for 31 s and starves" in text
    assert "it may preempt jobs of others with normal priority" in text


def test_6_2_at_its_limit_it_does_not_starve_and_the_limit_is_named_first(service):
    service.node("n1", cpu=8.0)
    service.create_pool("a", resource_limits={"cpu": 3})
    held = service.begin("a", 2, cpu=2.0)
    service.settle_down(3, 60.0)
    element = service.element(held)
    assert (element.usage[CPU], element.starvation_status, element.below_since) == (2.0, "non_starving", None)
    assert service.pool("a").starvation_status == "non_starving"
    answer = service.why(held)
    assert answer.lines[0].endswith("; why it waits: resource limits of pool a leave no room for another job")
    assert 'it is at the limit of pool "a": another job would exceed it; it does not starve' in service.lines(held)
    told = describe_pool(service.pool("a"), service.now)
    assert told == "not starving: it is at its limit: another job would exceed it"
    rival = service.begin("a", 1, cpu=2.0)
    service.settle_down(3, 60.0)
    assert service.element(rival).starvation_status != "non_starving", "another one in its pool has the room"


@pytest.mark.parametrize(
    ("guarantee", "spec", "kind", "text"),
    [
        (0, {"jobs": 1, "cpu": 2.0}, "covered", "is allocated all that it demands, 2 cores"),
        (8, {"jobs": 1, "cpu": 2.0}, "covered", "is allocated all that it demands, 2 cores; it demands less than its "),
        (0, {"jobs": 9, "cpu": 1.0}, "share", "is allocated its fair share, 5 cores, and demands 9 cores"),
        (0, {"jobs": 9, "cpu": 1.0, "is_gang": True}, "gang", "gets none of the 9 cores it demands: "),
        (9, {"jobs": 4, "cpu": 2.5}, "tolerance", "is allocated 83% of its guarantee, and starving begins below "),
    ],
)  # fmt: skip
def test_6_2_what_an_element_has_that_does_not_starve(service, guarantee, spec, kind, text):
    service.node("n1", cpu=10.0)
    service.create_pool("p", strong_guarantee_resources={"cpu": guarantee})
    service.create_pool("q", strong_guarantee_resources={"cpu": 10 - guarantee if guarantee else 0})
    operation_id = service.begin("p", **spec)
    service.begin("q", 20, cpu=0.5)
    service.settle_down()
    of_pool, of_operation = find_standing(service.pool("p")), find_standing(service.element(operation_id))
    assert (of_pool.kind, of_pool.text[: len(text)]) == (kind, text)
    assert of_operation.kind == kind
    assert of_operation.text in service.lines(operation_id)


def test_preemptions_are_told_to_both_sides(service):
    early, late = make_starving(service)
    service.now += 31.0
    service.work()
    service.now += 5.0
    lost, got = service.why(early), service.why(late)
    assert [record.operation_id for record in lost.preempted] == [early]
    assert [record.preemptor_operation_id for record in got.preempted_for_it] == [late]
    job_id = lost.preempted[0].job_id
    assert any(line.startswith(f"5 s ago its job {job_id} on n1 was stopped (preempted): ") for line in lost.lines)
    assert any(line.endswith("; it lost 0.0086 core-hours") for line in lost.lines)
    assert any(f"replaced job {job_id} of operation {early} on n1" in line for line in got.lines)


def test_a_finished_operation_says_how_and_why(service):
    operation_id = service.begin("a", 3)
    service.after(60.0).do(operations.AbortOperation(operation_id, "wrong input"))
    service.now += 7200.0
    lines = service.why(operation_id).lines
    assert lines[0] == f"operation {operation_id} is aborted: it ended 2 h ago, 1 min after its start: wrong input"
    assert lines[1] == 'task "t": none of 3 jobs ended'


def test_spans():
    seconds = (-1.0, 0.04, 0.4, 9.96, 59.4, 60.0, 185.0, 7260.0, 273_600.0)
    told = ["0 s", "0 s", "0.4 s", "10 s", "59 s", "1 min", "3 min 5 s", "2 h 1 min", "3 d 4 h"]
    assert [format_span(each) for each in seconds] == told


def shares(plan: ChangePlan) -> dict[str, tuple[float | None, ...]]:
    return {
        effect.name: tuple(each.fair_share["cpu"] if each else None for each in (effect.before, effect.after))
        for effect in plan.effects
    }


def test_a_plan_shows_both_sides_and_leaves_everything_as_it_is(service):
    service.node("n1", cpu=6.0)
    service.create_pools("a", "b", "idle")
    first, second = service.begin("a", 9), service.begin("b", 9)
    service.work()
    config, usage = service.state.config, service.tree().root.usage
    plan = service.plan(service.set("a", weight=2))
    more, less = pytest.approx((3.0, 4.0)), pytest.approx((3.0, 2.0))
    assert shares(plan) == {"a": more, "b": less, first: more, second: less}
    assert service.state.config is config
    assert service.tree().root.usage == usage
    everything = service.plan(service.set("a", weight=2), everything=True)
    assert {effect.name for effect in everything.effects} == {"a", "b", "idle", first, second}


ATTRIBUTES = (
    {}, {"weight": 0}, {"weight": 3}, {"mode": "fifo"}, {"mode": "fair_share"},
    {"max_running_operation_count": 1}, {"max_running_operation_count": 3}, {"max_share_ratio": 0.3},
    {"resource_limits": {"cpu": 1}}, {"resource_limits": None}, {"strong_guarantee_resources": {"cpu": 2}},
    {"create_ephemeral_subpools": True}, {"create_ephemeral_subpools": False},
)  # fmt: skip


def draw_command(choose: random.Random, service: Service) -> commands.ConfigCommand:
    pools = list(service.state.config.trees[TREE].pools) or ["p0"]
    kind, pool = choose.randrange(6), choose.choice(pools)
    parent = choose.choice(["<Root>", *pools])
    if kind < 2:
        attributes = {key: value for key, value in choose.choice(ATTRIBUTES).items() if value is not None}
        return commands.CreatePool(TREE, f"p{choose.randrange(8)}", parent, attributes)
    if kind == 2:
        return commands.RemovePool(TREE, pool, recursive=choose.random() < 0.5)
    if kind == 3:
        return commands.MovePool(TREE, pool, parent, choose.choice([pool, f"renamed-{choose.randrange(1000)}"]))
    return service.set(pool, **choose.choice(ATTRIBUTES))


@pytest.mark.parametrize("seed", range(3))
def test_plans_of_random_changes_come_true(service, seed):
    choose = random.Random(seed)
    service.node("n1", cpu=8.0)
    tree = service.tree()
    for _ in range(40):
        service.now += choose.choice([0.0, 1.0, 40.0])
        try:
            if choose.random() < 0.4:
                service.begin(f"p{choose.randrange(8)}", choose.randrange(1, 5), is_gang=choose.random() < 0.2)
        except CommandError:
            pass
        service.update()
        service.beat()
        command = draw_command(choose, service)
        plan = service.plan(command, everything=True)
        if not plan.accepted:
            with pytest.raises(CommandError):
                service.do(command)
            continue
        service.do(command)
        service.update()
        planned = {effect.name: effect.after for effect in plan.effects if effect.after is not None}
        assert set(planned) == {*tree.pools, *tree.operations}
        for name, element in {**tree.pools, **tree.operations}.items():
            assert planned[name].pool == element.parent.name
            assert planned[name].fair_share["cpu"] == pytest.approx(element.fair_share[1] * tree.total[1])


def test_guarantees_limits_and_counts_are_compared(service):
    service.node("n1", cpu=6.0)
    service.create_pool("a", max_running_operation_count=1, max_operation_count=5)
    running, waiting = service.begin("a", 9), service.begin("a", 9)
    change = service.set(
        "a", strong_guarantee_resources={"cpu": 3}, resource_limits={"cpu": 4}, max_running_operation_count=2
    )
    effects = {effect.name: effect for effect in service.plan(change).effects}
    pool = effects["a"]
    assert pool.after.limits == {"cpu": 4.0}
    assert pool.after.strong_guarantee["cpu"] == pytest.approx(3.0)
    assert set(pool.changed) >= {
        "fair_share", "strong_guarantee", "limits", "running_operation_count", "max_running_operation_count"
    }  # fmt: skip
    assert "is_running" in effects[waiting].changed
    assert "is_running" not in effects[running].changed


def test_a_tree_that_goes_takes_operations_along(service):
    service.node("n1", cpu=4.0)
    operation_id = service.begin("a")
    plan = service.plan(commands.RemoveTree(TREE, recursive=True))
    told = f"1 operation would be aborted because no tree is left for it: {operation_id}"
    assert any(told in note for note in plan.notes)
    assert any("1 node matches the nodes_filter of no tree" in note for note in plan.notes)


def test_what_becomes_of_inner_pools_without_counts_of_their_own_is_a_note(service):
    service.set_tree(per_pool_counts_for_leaves_only=True, max_running_operation_count=100, max_operation_count=200)
    service.create_pool("top")
    service.create_pool("low", "top")
    off = commands.ChangeTree(TREE, (Edit(("per_pool_counts_for_leaves_only",), False),))
    (note,) = service.plan(off).notes
    assert (
        "per_pool_counts_for_leaves_only becomes false, so that max_running_operation_count_per_pool (8) limits all "
        "operations below an inner pool without a count of its own, as in YTsaurus; now "
    ) in note
    assert '"top" runs 8 (100 before) and holds 50 (200); a tree file without the option sets it to' in note
    assert '"low"' not in note
    assert service.plan(service.set("top", weight=2)).notes == []
    service.do(commands.RemovePool(TREE, "low"))
    (note,) = service.plan(off).notes
    assert "becomes false" in note, "also where no pool is an inner one yet"


def test_a_guarantee_that_one_small_operation_can_hold_up_has_a_warning(service):
    service.node("n1", cpu=10.0)
    service.create_pool("a")
    small, large = (service.set("a", strong_guarantee_resources={"cpu": cores}) for cores in (1, 2))
    assert service.plan(small).warnings == []
    (warning,) = service.plan(large).warnings
    told = 'the guarantee of pool "a" may have to wait for jobs of others to end: an operation of at most 9 jobs'
    assert told in warning
    service.do(large)
    assert service.plan(service.set("a", weight=2)).warnings == []
    service.set_tree(max_unpreemptible_running_job_count=8)
    assert service.plan(service.set("a", strong_guarantee_resources={"cpu": 3})).warnings == []


BURST = {"guarantee_type": "burst", "resource_flow": {"cpu": 2}, "burst_guarantee_resources": {"cpu": 4}}


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"strong_guarantee_resources": {"cpu": 11}}, "guaranteed more than the nodes have (11 cpu of 10)"),
        ({"integral_guarantees": BURST}, "as volume is saved"),
    ],
)
def test_a_note_comes_with_the_change_that_it_is_about(service, attributes, words):
    service.node("n1", cpu=10.0)
    service.create_pool("a")
    assert any(words in note for note in service.plan(service.set("a", **attributes)).notes)
    service.do(service.set("a", **attributes))
    assert service.plan(service.set("a", weight=2)).notes == []
