"""Answers to "why", and plans: sentences and numbers of small states made by real commands."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from cpumond.fairshare import fair_share_update
from cpumond.fairshare.explain import explain
from cpumond.scheduler import config_commands as commands
from cpumond.scheduler import operations, why
from cpumond.scheduler.attributes import Edit
from cpumond.scheduler.commands import Command, Rules, Transaction
from cpumond.scheduler.model import CommandError, Config
from cpumond.scheduler.state import State
from cpumond.wire import Heartbeat, JobReport, NodeRegistration, NodeResources

TREE = "default"


class Service:
    """A state with a clock, changed as the running service changes it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.ids = itertools.count(1)
        self.sequence = itertools.count()
        self.state = State(Rules(spare=(0.0, 0.01, 0.0, 0.0, 0.0)), Config({}))
        self.run(commands.CreateTree(TREE))
        self.run(commands.SetDefaultTree(TREE))

    def new_id(self) -> str:
        return f"id-{next(self.ids)}"

    def run(self, command: Command, user: str = "tester") -> str:
        change = self.state.prepare(command, user, self.now, self.new_id)
        self.apply(change)
        return change.id

    def apply(self, change: Transaction) -> None:
        while not change.is_empty:
            self.state.apply(change, self.now)
            change = self.state.settle(self.now)

    def pool(self, name: str, parent: str = "<Root>", **attributes: Any) -> None:
        self.run(commands.CreatePool(TREE, name, parent, attributes))

    def start(self, pool: str, job_count: int = 1, cpu_limit: float = 1.0, **spec: Any) -> str:
        task = {"job_count": job_count, "cpu_limit": cpu_limit}
        # A user may make one ephemeral pool only.
        return self.run(operations.StartOperation({"pool": pool, "tasks": {"main": task}, **spec}), f"of-{pool}")

    def node(self, name: str = "n1", cpu: float = 4.0) -> None:
        resources = NodeResources(cpu=cpu, memory=2**34)
        self.apply(self.state.register(NodeRegistration(name, f"{name}-1", resources)))

    def update(self) -> None:
        tree = self.state.trees[TREE]
        snapshot = self.state.make_snapshot(tree)
        result = fair_share_update(snapshot, self.now, None)
        self.last = (snapshot, result)
        self.state.accept_update(tree, result, self.now)

    def beat(self, name: str = "n1") -> None:
        """A heartbeat: all ordered jobs run, and all that were told to stop have."""
        node = self.state.nodes[name]
        jobs = [
            JobReport(job.id, job.element.operation.id, job.limits[1], job.limits[1], from_scheduler=True)
            for job in node.jobs.values()
        ]
        heartbeat = Heartbeat(name, f"{name}-1", next(self.sequence), 0.0, node.capacity[1], jobs)
        receipt = self.state.receive(heartbeat, self.now)
        self.apply(receipt.transaction)
        self.state.schedule(name, self.now, self.new_id)

    def why(self, operation_id: str, *, told: bool = False) -> why.OperationAnswer:
        shares = {}
        if told:
            explanation = explain(*self.last, f"#{operation_id}")
            shares[TREE] = (explanation.rule, why.name_operations(self.state, explanation.lines))
        record = self.state.find_record(operation_id)
        return why.explain_operation(self.state, record, self.now, shares)

    def lines(self, operation_id: str) -> str:
        answer = self.why(operation_id)
        return "\n".join([*answer.lines, *(line for tree in answer.trees for line in tree.lines)])

    def plan(self, command: commands.ConfigCommand, **options: Any) -> why.Plan:
        change = why.try_command(self.state, command, "tester", self.now)
        if isinstance(change, why.Plan):
            return change
        return why.make_plan(why.collect(self.state), change, self.now, {}, **options)

    def set(self, pool: str, **attributes: Any) -> commands.ChangePool:
        return commands.ChangePool(TREE, pool, tuple(Edit((name,), value) for name, value in attributes.items()))


@pytest.fixture
def service() -> Service:
    return Service()


# --- pending


def test_3_2_a_pending_operation_names_the_first_full_pool_and_its_place(service):
    service.pool("top", max_running_operation_count=1, max_operation_count=9)
    service.pool("low", "top")
    service.start("low")
    service.start("low")
    waiting = service.start("low")
    text = service.lines(waiting)
    assert f"operation {waiting} is pending" in text
    assert "it is number 2 of 2 in the queue of tree 'default'; 1 of those before it wait for the same pool" in text
    assert 'pool "top" is full: 1 operation of at most 1 (max_running_operation_count) runs in it' in text
    assert 'pool "top": 1 of at most 1 running, 3 of at most 9 operations' in text
    assert "the root: 1 of at most" in text


# --- running


def test_a_running_operation_tells_its_share_usage_and_demand_in_cores(service):
    service.node(cpu=4.0)
    first, second = service.start("a", 10), service.start("b", 10)
    service.update()
    service.beat()
    answer = service.why(first, told=True)
    lines = answer.trees[0].lines
    assert lines[0] == "its fair share is 2 cores, it uses 2 cores in 2 jobs and demands 10 cores"
    assert answer.trees[0].rule == "weight"
    assert any(f"operation {first} gets 50.0 % of the cluster (2 of 4 cpu): limited by" in line for line in lines)
    assert "8 jobs of it are still to be started" in lines
    assert not any(f"#{second}" in line for line in lines)


def test_a_title_stands_beside_the_id(service):
    operation_id = service.start("a", title="training")
    assert why.name_operations(service.state, [f"#{operation_id} gets"]) == [
        f'operation {operation_id} "training" gets'
    ]


def test_limits_on_the_path_are_named_with_what_is_used(service):
    service.node(cpu=4.0)
    service.pool("a", resource_limits={"cpu": 1})
    operation_id = service.start("a", 3)
    service.update()
    service.beat()
    text = service.lines(operation_id)
    assert 'limit of pool "a": 1 cpu, 1 used' in text
    assert 'passed over 1 time since the last update: resource_limits of pool "a" leave no room' in text


def test_a_job_that_no_node_can_hold(service):
    service.node(cpu=2.0)
    operation_id = service.start("a", cpu_limit=3.0)
    service.update()
    text = service.lines(operation_id)
    assert 'no node that is online can hold a job of task "main", which orders 1 user_slots, 3 cpu' in text


def test_a_job_that_must_wait_for_room(service):
    service.node(cpu=2.0)
    operation_id = service.start("a", 5)
    service.update()
    service.beat()
    text = service.lines(operation_id)
    assert 'no node has room now for a job of task "main", which orders 1 user_slots, 1 cpu' in text


def test_without_nodes(service):
    operation_id = service.start("a")
    service.update()
    assert "tree 'default' has no node that is online" in service.lines(operation_id)


def test_a_suspended_operation_says_so_and_does_not_complain(service):
    operation_id = service.start("a")
    service.run(operations.SuspendOperation(operation_id))
    service.update()
    text = service.lines(operation_id)
    assert "it is suspended: no job of it is started until it is resumed" in text
    assert "still to be started" not in text


def make_starving(service: Service) -> tuple[str, str]:
    """A cluster full of one operation's jobs, and another operation that came late; both below the same share."""
    service.run(commands.ChangeTree(TREE, (Edit(("max_unpreemptible_running_job_count",), 0),)))
    service.node(cpu=4.0)
    first = service.start("a", 8)
    service.update()
    service.beat()
    second = service.start("b", 8)
    service.update()
    return first, second


def test_6_2_an_operation_below_its_share_says_when_it_starves(service):
    _, late = make_starving(service)
    service.now += 18.0
    service.update()
    assert "it is below its fair share for 18 s; starves in 12 s" in service.lines(late)
    service.now += 13.0
    service.update()
    text = service.lines(late)
    assert "it is below its fair share for 31 s and starves" in text
    assert "it may take jobs from others, with normal priority" in text


def test_preemptions_are_told_to_both_sides(service):
    early, late = make_starving(service)
    service.now += 31.0
    service.update()
    service.beat()
    service.now += 5.0
    lost, got = service.why(early), service.why(late)
    assert [record.operation_id for record in lost.preempted] == [early]
    assert [record.preemptor_operation_id for record in got.preempted_for_it] == [late]
    job_id = lost.preempted[0].job_id
    assert any(line.startswith(f"5 s ago its job {job_id} on n1 was stopped (preempted): ") for line in lost.lines)
    assert any(f"got the place of job {job_id} of operation {early} on n1" in line for line in got.lines)


# --- finished


def test_a_finished_operation_says_how_and_why(service):
    operation_id = service.start("a", 3)
    service.now += 60.0
    service.run(operations.AbortOperation(operation_id, "wrong input"))
    service.now += 7200.0
    lines = service.why(operation_id).lines
    assert lines[0] == f"operation {operation_id} is aborted: it ended 2 h ago, 1 min after its start: wrong input"
    assert lines[1] == 'task "main": none of 3 jobs ended'


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0 s"),
        (0.04, "0 s"),
        (0.4, "0.4 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (60.0, "1 min"),
        (185.0, "3 min 5 s"),
        (7260.0, "2 h 1 min"),
        (273_600.0, "3 d 4 h"),
    ],
)
def test_spans(seconds, text):
    assert why.show_span(seconds) == text


# --- plans


def shares(plan: why.Plan) -> dict[str, tuple[float | None, float | None]]:
    return {
        effect.name: (
            effect.before.fair_share["cpu"] if effect.before else None,
            effect.after.fair_share["cpu"] if effect.after else None,
        )
        for effect in plan.effects
    }


def test_a_plan_shows_both_sides_and_leaves_everything_as_it_is(service):
    service.node(cpu=6.0)
    service.pool("a")
    service.pool("b")
    service.pool("idle")
    first, second = service.start("a", 9), service.start("b", 9)
    service.update()
    service.beat()
    config, usage = service.state.config, service.state.trees[TREE].root.usage
    plan = service.plan(service.set("a", weight=2))
    assert shares(plan) == {
        "a": (pytest.approx(3.0), pytest.approx(4.0)),
        "b": (pytest.approx(3.0), pytest.approx(2.0)),
        first: (pytest.approx(3.0), pytest.approx(4.0)),
        second: (pytest.approx(3.0), pytest.approx(2.0)),
    }
    assert service.state.config is config
    assert service.state.trees[TREE].root.usage == usage
    everything = service.plan(service.set("a", weight=2), everything=True)
    assert {effect.name for effect in everything.effects} == {"a", "b", "idle", first, second}


def test_a_plan_equals_what_the_change_then_does(service):
    service.node(cpu=8.0)
    for name in ("a", "b", "c"):
        service.pool(name)
        service.start(name, 9)
    service.update()
    service.beat()
    change = commands.MovePool(TREE, "c", "a", "c")
    planned = {effect.name: effect.after for effect in service.plan(change, everything=True).effects}
    service.run(change)
    service.update()
    tree = service.state.trees[TREE]
    for name, pool in tree.pools.items():
        after = planned[name]
        assert after is not None
        assert after.fair_share["cpu"] == pytest.approx(pool.fair_share[1] * tree.total[1])


ATTRIBUTES = (
    {},
    {"weight": 0},
    {"weight": 3},
    {"mode": "fifo"},
    {"mode": "fair_share"},
    {"max_running_operation_count": 1},
    {"max_running_operation_count": 3},
    {"resource_limits": {"cpu": 1}},
    {"resource_limits": None},
    {"max_share_ratio": 0.3},
    {"strong_guarantee_resources": {"cpu": 2}},
    {"create_ephemeral_subpools": True},
    {"create_ephemeral_subpools": False},
)


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


@pytest.mark.parametrize("seed", range(10))
def test_plans_of_random_changes_come_true(service, seed):
    choose = random.Random(seed)
    service.node(cpu=8.0)
    tree = service.state.trees[TREE]
    for _ in range(40):
        service.now += choose.choice([0.0, 1.0, 40.0])
        try:
            if choose.random() < 0.4:
                service.start(f"p{choose.randrange(8)}", choose.randrange(1, 5), is_gang=choose.random() < 0.2)
        except CommandError:
            pass
        service.update()
        service.beat()
        command = draw_command(choose, service)
        plan = service.plan(command, everything=True)
        if not plan.accepted:
            with pytest.raises(CommandError):
                service.run(command)
            continue
        service.run(command)
        service.update()
        planned = {effect.name: effect.after for effect in plan.effects if effect.after is not None}
        assert set(planned) == {*tree.pools, *tree.operations}
        for name, element in {**tree.pools, **tree.operations}.items():
            assert element.parent is not None
            assert planned[name].pool == element.parent.name
            assert planned[name].fair_share["cpu"] == pytest.approx(element.fair_share[1] * tree.total[1])


def test_guarantees_limits_and_counts_are_compared(service):
    service.node(cpu=6.0)
    service.pool("a", max_running_operation_count=1, max_operation_count=5)
    running, waiting = service.start("a", 9), service.start("a", 9)
    change = service.set(
        "a", strong_guarantee_resources={"cpu": 3}, resource_limits={"cpu": 4}, max_running_operation_count=2
    )
    effects = {effect.name: effect for effect in service.plan(change).effects}
    pool = effects["a"]
    assert pool.after is not None
    assert pool.after.limits == {"cpu": 4.0}
    assert pool.after.strong_guarantee["cpu"] == pytest.approx(3.0)
    assert set(pool.changed) >= {
        "fair_share", "strong_guarantee", "limits", "running_operation_count", "max_running_operation_count"
    }  # fmt: skip
    assert "is_running" in effects[waiting].changed
    assert "is_running" not in effects[running].changed


def test_a_refused_change_is_a_plan_with_the_sentence(service):
    service.pool("a", strong_guarantee_resources={"cpu": 1})
    service.pool("b", "a")
    plan = service.plan(service.set("b", strong_guarantee_resources={"cpu": 2}))
    assert not plan.accepted
    assert "more than its 1" in plan.refusal
    assert plan.effects == []


def test_pools_that_come_and_go(service):
    service.pool("a")
    came = service.plan(commands.CreatePool(TREE, "b", "a"))
    assert [(effect.name, effect.before) for effect in came.effects] == [("b", None)]
    went = service.plan(commands.RemovePool(TREE, "a"))
    assert [(effect.name, effect.after) for effect in went.effects] == [("a", None)]


def test_a_renamed_pool_is_the_same_and_keeps_its_operations(service):
    service.node()
    service.pool("a")
    operation_id = service.start("a", 9)
    effects = {effect.name: effect for effect in service.plan(commands.MovePool(TREE, "a", "<Root>", "b")).effects}
    assert effects["b"].changed == ["name"]
    after = effects[operation_id].after
    assert after is not None
    assert after.pool == "b"


def test_a_tree_that_goes_takes_operations_along(service):
    service.node()
    operation_id = service.start("a")
    plan = service.plan(commands.RemoveTree(TREE, recursive=True))
    assert any(f"1 operation would be aborted, no tree is left for it: {operation_id}" in note for note in plan.notes)
    assert any("1 node fits the nodes_filter of no tree" in note for note in plan.notes)


def test_guarantees_beyond_the_cluster_come_with_a_note(service):
    service.node(cpu=4.0)
    service.pool("a")
    plan = service.plan(service.set("a", strong_guarantee_resources={"cpu": 5}))
    assert any("guaranteed more than the nodes have (5 cpu of 4)" in note for note in plan.notes)
    service.run(service.set("a", strong_guarantee_resources={"cpu": 5}))
    assert service.plan(service.set("a", weight=2)).notes == []


def test_integral_guarantees_come_with_a_note(service):
    service.node(cpu=10.0)
    service.pool("a")
    integral = {
        "guarantee_type": "burst", "resource_flow": {"cpu": 1}, "burst_guarantee_resources": {"cpu": 2}
    }  # fmt: skip
    plan = service.plan(service.set("a", integral_guarantees=integral))
    assert any("as volume is gathered" in note for note in plan.notes)
    assert service.plan(service.set("a", weight=2)).notes == []


def test_volumes_of_integral_pools_are_kept_in_both_pictures(service):
    integral = {
        "guarantee_type": "burst", "resource_flow": {"cpu": 2}, "burst_guarantee_resources": {"cpu": 4}
    }  # fmt: skip
    service.node(cpu=8.0)
    service.pool("a", integral_guarantees=integral)
    service.pool("b")
    pool = service.state.trees[TREE].pools["a"]
    pool.volume = (0.0, 5000.0, 0.0, 0.0, 0.0)
    material = why.collect(service.state)
    rebuilt = why.rebuild(material, service.state.config, service.now)
    assert rebuilt.trees[TREE].pools["a"].volume == pool.volume


def test_a_rebuilt_state_computes_the_same_shares(service):
    service.node(cpu=6.0)
    service.pool("fifo", mode="fifo")
    for pool in ("fifo", "fifo", "x"):
        service.start(pool, 4, weight=2.0)
    service.update()
    service.beat()
    service.update()
    tree = service.state.trees[TREE]
    rebuilt = why.rebuild(why.collect(service.state), service.state.config, service.now)
    snapshot = rebuilt.make_snapshot(rebuilt.trees[TREE])
    assert snapshot == service.state.make_snapshot(tree)
