"""Laws of the scheduler's state over random commands, heartbeats, silences and restarts (semantics.md 2 to 9)."""

import contextlib
from typing import Any

import hypothesis.strategies as st
import msgspec
from examples import examples
from hypothesis import HealthCheck
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_world import EASY, PlayedNode, World, assert_consistent, describe

from cpumond.scheduler.elements import PoolElement
from cpumond.scheduler.model import ROOT_POOL, CommandError, Rules
from cpumond.scheduler.settings.commands import CreatePool, CreateTree, MovePool, RemovePool, RemoveTree
from cpumond.scheduler.settings.operations import StartOperation
from cpumond.scheduler.settings.tree_file import ApplyTree, PoolTable, TreeTables
from cpumond.scheduler.state import dispatch, heartbeats, settling
from cpumond.scheduler.state.commands import prepare
from cpumond.scheduler.state.node_commands import CordonNode, DrainNode, NodeCommand, SetNodeTags, UncordonNode

TREES = st.sampled_from(["default", "default", "default", "other"])
EXPLICIT = st.sampled_from(["a", "b", "c", "d"])
PARENTS = st.sampled_from([ROOT_POOL, ROOT_POOL, "a", "b", "c"])
POOLS = st.sampled_from(["", "a", "a", "b", "b", "c", "d", "e", "a$x", "b$u", "f"])
USERS = st.sampled_from(["u", "v"])
COUNTS = st.sampled_from([None, 0, 1, 2, 5])
AMOUNTS = st.sampled_from([{}, {"cpu": 1}, {"cpu": 2.5}, {"cpu": 7}, {"cpu": 4, "user_slots": 2}])
CORES = st.sampled_from([0.1, 0.5, 1.0, 1.0, 2.0, 3.3, 9.0])
FILTERS = st.sampled_from(["", "", "fast", "!fast", "x | n1"])
TAGS = st.sampled_from([(), (), (), ("x",)])
POOL_ATTRIBUTES = st.fixed_dictionaries(
    {},
    optional={
        "mode": st.sampled_from(["fair_share", "fifo"]),
        "weight": st.sampled_from([0.5, 1, 3]),
        "max_running_operation_count": COUNTS,
        "max_operation_count": COUNTS,
        "create_ephemeral_subpools": st.booleans(),
        "forbid_immediate_operations": st.booleans(),
        "resource_limits": AMOUNTS,
        "max_share_ratio": st.sampled_from([None, 0.3, 1.0]),
        "strong_guarantee_resources": st.sampled_from([{}, {"cpu": 1}, {"cpu": 5}]),
        "fair_share_starvation_timeout": st.sampled_from([None, 0, 2000]),
        "scheduling_tag_filter": FILTERS,
        "ephemeral_subpool_config": st.sampled_from([{}, {"max_operation_count": 1}, {"mode": "fifo"}]),
    },
)
TREE_ATTRIBUTES = st.fixed_dictionaries(
    {},
    optional={
        "nodes_filter": st.sampled_from(["!x", "", "x", "!x & n1"]),
        "default_parent_pool": st.sampled_from([ROOT_POOL, "a", "b"]),
        "max_running_operation_count": st.sampled_from([1, 3, 100]),
        "max_operation_count": st.sampled_from([3, 100]),
        "max_ephemeral_pools_per_user": st.sampled_from([1, 3]),
        "max_unpreemptible_running_job_count": st.sampled_from([0, 10]),
        "fair_share_starvation_timeout": st.sampled_from([0, 30_000]),
        "preemptive_scheduling_backoff": st.sampled_from([0, 5000]),
        "node_reconnection_timeout": st.sampled_from([0, 300_000]),
        "fifo_pool_scheduling_order": st.sampled_from(["fifo", "satisfaction"]),
        "count_unplaceable_jobs_in_demand": st.booleans(),
    },
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "weight": st.sampled_from([0.5, 1.0, 4.0]),
        "resource_limits": AMOUNTS,
        "max_share_ratio": st.sampled_from([0.2, 1.0]),
        "scheduling_tag_filter": FILTERS,
        "pool": POOLS,
    },
)


NODES = st.sampled_from(["n1", "n2", "n3"])
Spec = dict[str, Any]
TASK = st.fixed_dictionaries({"command": st.just("true"), "job_count": st.integers(1, 6), "cpu_limit": CORES})
SPECS: st.SearchStrategy[Spec] = st.fixed_dictionaries(
    {
        "pool": POOLS,
        "tasks": st.fixed_dictionaries(
            {"t": TASK, "s": st.just({"command": "true", "job_count": 1, "cpu_limit": 0.5})}
        ),
        "preemption_mode": st.sampled_from(["normal", "graceful"]),
        "max_failed_job_count": st.sampled_from([1, 10]),
    }
)


def behave(node: PlayedNode, keeps_stopping: bool, deaf: bool, has_no_room: bool) -> None:
    """Change a node's manners; what it held back until now ends or begins."""
    node.keeps_stopping, node.deaf, node.has_no_room = keeps_stopping, deaf, has_no_room
    for job in [] if keeps_stopping else list(node.stopping):
        node.let_go(job)
    for job in [] if has_no_room else list(node.waiting):
        node.begin(job)


class Life(RuleBasedStateMachine):
    """A small cluster in which anything may happen in any order."""

    @initialize(erase=st.booleans(), retention=st.sampled_from([0, 2, 1000]))
    def begin(self, erase: bool, retention: int) -> None:
        rules = Rules(
            spare=EASY.spare,
            erase_trees_with_pool_limit_violations=erase,
            finished_operation_retention_count=retention,
            overcommit_duration_s=3.0,
        )
        self.world = World(rules, nodes_filter="!x", max_unpreemptible_running_job_count=0)
        self.world.create_tree("other", nodes_filter="x", max_unpreemptible_running_job_count=0)
        self.world.node("n1", cpu=6)
        self.world.create_pool("a")
        self.world.create_pool("b", create_ephemeral_subpools=True)
        self.world.start("a", jobs=3, max_failed_job_count=2)
        self.world.start("b", jobs=2, cpu=2.0, weight=2.0)
        self.world.start("e", user="v", jobs=9, cpu=0.5)
        self.world.settle_down()
        self.classes: dict[str, bool] = {}
        self.used_cpu_s = 0.0
        self.counted_cpu_s: dict[PoolElement, float] = {}

    def try_command(self, command: Any, user: str = "u") -> None:
        """A refused command changes nothing, and preparing changes nothing at all."""
        world = self.world
        before = describe(world.state)
        try:
            change = prepare(world.state, command, user, world.now, world.new_id)
        except CommandError:
            assert describe(world.state) == before
            return
        assert describe(world.state) == before
        world.carry_out(change)

    def pick(self, among: Any, data: st.DataObject) -> Any:
        return data.draw(st.sampled_from(sorted(among)))

    def pick_busy(self, data: st.DataObject) -> PlayedNode:
        return self.world.nodes[self.pick([node.id for node in self.world.nodes.values() if node.jobs], data)]

    # --- trees and pools

    @rule(tree=TREES, name=EXPLICIT, parent=PARENTS, attributes=POOL_ATTRIBUTES)
    def create_pool(self, tree: str, name: str, parent: str, attributes: dict[str, Any]) -> None:
        self.try_command(CreatePool(tree, name, parent, attributes))

    @rule(tree=TREES, name=EXPLICIT, attributes=POOL_ATTRIBUTES)
    def change_pool(self, tree: str, name: str, attributes: dict[str, Any]) -> None:
        with contextlib.suppress(CommandError):
            self.world.set_pool(name, tree=tree, **attributes)

    @rule(tree=TREES, name=EXPLICIT, parent=PARENTS, new_name=EXPLICIT)
    def move_pool(self, tree: str, name: str, parent: str, new_name: str) -> None:
        self.try_command(MovePool(tree, name, parent, new_name))

    @rule(tree=TREES, name=EXPLICIT)
    def remove_pool(self, tree: str, name: str) -> None:
        self.try_command(RemovePool(tree, name, recursive=True))

    @rule(tree=TREES, attributes=TREE_ATTRIBUTES)
    def change_tree(self, tree: str, attributes: dict[str, Any]) -> None:
        with contextlib.suppress(CommandError):
            self.world.set_tree(tree, **attributes)

    @rule()
    def remove_or_create_tree(self) -> None:
        if "other" in self.world.state.trees:
            self.try_command(RemoveTree("other", recursive=True))
        else:
            self.try_command(CreateTree("other", {"nodes_filter": "x"}))

    @rule(tree=TREES, pools=st.lists(st.tuples(EXPLICIT, PARENTS, POOL_ATTRIBUTES), max_size=4), prune=st.booleans())
    def apply_a_file(self, tree: str, pools: list[tuple[str, str, dict[str, Any]]], prune: bool) -> None:
        tables = tuple(PoolTable(name=name, parent=parent, options=options) for name, parent, options in pools)
        self.try_command(ApplyTree(tree, TreeTables(None, tables), prune))

    # --- operations

    @rule(
        user=USERS,
        options=OPTIONS,
        spec=SPECS,
        trees=st.sampled_from([{}, {}, {}, {"pool_trees": ["default", "other"]}, {"pool_trees": ["other"]}]),
        classes=st.sampled_from([{}, {}, {"allow_reclaimed": False}, {"require_reclaimed": True}]),
    )
    def start(self, user: str, options: Spec, spec: Spec, trees: Spec, classes: Spec) -> None:
        self.try_command(StartOperation({**options, **spec, **trees, **classes}), user)

    @precondition(lambda self: self.world.state.operations)
    @rule(data=st.data(), what=st.sampled_from(["abort", "complete", "suspend", "stop", "resume"]))
    def steer(self, data: st.DataObject, what: str) -> None:
        operation = self.pick(self.world.state.operations, data)
        try:
            if what == "stop":
                self.world.suspend(operation, abort_running_jobs=True)
            else:
                getattr(self.world, what)(operation)
        except CommandError:
            pass

    @precondition(lambda self: self.world.state.operations)
    @rule(data=st.data(), options=OPTIONS)
    def change_operation(self, data: st.DataObject, options: dict[str, Any]) -> None:
        with contextlib.suppress(CommandError):
            self.world.set_operation(self.pick(self.world.state.operations, data), **options)

    # --- nodes

    @rule(name=NODES, cpu=st.sampled_from([0.0, 3.3, 6.0]), tags=TAGS)
    def register(self, name: str, cpu: float, tags: tuple[str, ...]) -> None:
        world = self.world
        if name in world.nodes:
            node = world.nodes[name]
            node.cpu, node.tags = cpu, tags
            with contextlib.suppress(CommandError):
                node.register()
        else:
            with contextlib.suppress(CommandError):
                world.node(name, cpu=cpu, tags=tags)

    @rule(name=NODES, kind=st.sampled_from([CordonNode, DrainNode, UncordonNode, UncordonNode]))
    def maintain(self, name: str, kind: type[NodeCommand]) -> None:
        self.try_command(kind(name))

    @rule(name=NODES, tags=st.sampled_from([(), ("fast",), ("fast", "x")]))
    def tag(self, name: str, tags: tuple[str, ...]) -> None:
        self.try_command(SetNodeTags(name, tags=tags))

    @precondition(lambda self: any(node.jobs for node in self.world.nodes.values()))
    @rule(data=st.data(), what=st.sampled_from(["completed", "completed", "failed", "aborted", "lost", "vanished"]))
    def end_a_job(self, data: st.DataObject, what: Any) -> None:
        node = self.pick_busy(data)
        job = self.pick(node.jobs, data)
        if what == "vanished":
            del node.jobs[job]
            node.stopping.pop(job, None)
        else:
            node.finish(job, what)

    @precondition(lambda self: any(node.jobs for node in self.world.nodes.values()))
    @rule(data=st.data(), cores=CORES)
    def change_a_limit(self, data: st.DataObject, cores: float) -> None:
        node = self.pick_busy(data)
        node.limit(self.pick(node.jobs, data), cores)

    @precondition(lambda self: any(node.jobs for node in self.world.nodes.values()))
    @rule(data=st.data(), seconds=st.sampled_from([-3.0, 0.5, 2.0, 100.0]))
    def use_cpu_time(self, data: st.DataObject, seconds: float) -> None:
        node = self.pick_busy(data)
        job = node.jobs[self.pick(node.jobs, data)]
        job.cpu_seconds = max((job.cpu_seconds or 0.0) + seconds, 0.0)
        job.reclaimed_cpu_seconds = job.cpu_seconds / 2
        self.used_cpu_s += max(seconds, 0.0)

    @precondition(lambda self: self.world.nodes)
    @rule(data=st.data(), manners=st.tuples(*[st.booleans()] * 3), foreign=st.sampled_from([0.0, 0.0, 2.0]))
    def change_manners(self, data: st.DataObject, manners: tuple[bool, bool, bool], foreign: float) -> None:
        node = self.world.nodes[self.pick(self.world.nodes, data)]
        behave(node, *manners)
        node.foreign.clear()
        if foreign:
            node.has(foreign)

    @precondition(lambda self: self.world.nodes)
    @rule(data=st.data())
    def restart_an_agent(self, data: st.DataObject) -> None:
        with contextlib.suppress(CommandError):
            self.world.nodes[self.pick(self.world.nodes, data)].restart_agent()

    @precondition(lambda self: self.world.nodes)
    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        node = self.world.nodes[self.pick(self.world.nodes, data)]
        if node.beat().register:
            with contextlib.suppress(CommandError):
                node.register()

    @precondition(lambda self: self.world.nodes)
    @rule(data=st.data(), sequence=st.sampled_from([0, -1]))
    def repeat_or_delay(self, data: st.DataObject, sequence: int) -> None:
        """An old heartbeat with any content is dropped and changes nothing."""
        node = self.world.nodes[self.pick(self.world.nodes, data)]
        known = self.world.state.nodes.get(node.id)
        if known is None or known.sequence < 1:
            return
        old = msgspec.structs.replace(node.heartbeat(), sequence=known.sequence + sequence, jobs=[])
        before = describe(self.world.state)
        assert not self.world.hear(old).accepted
        assert describe(self.world.state) == before

    @precondition(lambda self: self.world.nodes)
    @rule(data=st.data())
    def heartbeats_overtake_the_store(self, data: st.DataObject) -> None:
        """Two heartbeats arrive before what the first one ended is written."""
        world, node = self.world, self.world.nodes[self.pick(self.world.nodes, data)]
        for receipt in [heartbeats.receive(world.state, node.heartbeat(), world.now) for _ in range(2)]:
            world.carry_out(settling.recount(world.state, receipt.transaction, world.now))
        world.store_starts()  # of jobs that were adopted

    @rule(seconds=st.sampled_from([100.0, 400.0]))
    def nodes_come_back_while_they_are_removed(self, seconds: float) -> None:
        world = self.world
        world.now += seconds
        change = settling.expire(world.state, world.now)
        with contextlib.suppress(CommandError):
            world.start("a", jobs=2, cpu=0.1)
        world.update()
        for node in world.nodes.values():
            node.beat()
        world.carry_out(settling.recount(world.state, change, world.now))

    # --- time

    @rule(seconds=st.sampled_from([0.0, 1.0, 1.0, 6.0, 40.0, 400.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.expire()

    @rule()
    def update(self) -> None:
        self.world.update()

    @rule(periods=st.integers(1, 4))
    def periods(self, periods: int) -> None:
        world = self.world
        for _ in range(periods):
            world.now += 1
            world.expire()
            world.update()
            for node in world.nodes.values():
                if node.beat().register:
                    with contextlib.suppress(CommandError):
                        node.register()

    @precondition(lambda self: self.world.nodes)
    @rule(data=st.data(), is_stored=st.booleans())
    def die_in_a_heartbeat(self, data: st.DataObject, is_stored: bool) -> None:
        """Killed before or after the write that stores what this heartbeat starts, and before its answer."""
        world, node = self.world, self.world.nodes[self.pick(self.world.nodes, data)]
        if heartbeats.receive(world.state, node.heartbeat(), world.now).accepted:
            dispatch.schedule(world.state, node.id, world.now, world.new_id)
            if is_stored:
                world.store_starts()
        world.restart()

    @rule()
    def upgrade_from_before_starts_were_stored(self) -> None:
        self.world.forget_starts()
        self.classes.clear()
        self.world.restart()

    @rule()
    def restart_the_scheduler(self) -> None:
        """What is stored gives the same state but for usage and living jobs (2.9 with its ephemeral pools, 3.3)."""
        before = describe(self.world.state, with_jobs=False)
        self.world.restart()
        after = describe(self.world.state, with_jobs=False)
        if any(node.cordoned for node in self.world.state.nodes.values()):
            for seen in (before, after):  # what cordoned nodes count for is as of the last update
                for tree in seen["trees"].values():
                    del tree["total"]
        del before["sequence"]  # the last number may be that of an operation that is not kept
        assert all(record.sequence <= after["sequence"] for record in before["operations"])
        for name in before:
            assert after[name] == before[name], name

    def teardown(self) -> None:
        """When all nodes obey and nothing gets lost any more, scheduler and nodes agree on who runs what."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for node in world.nodes.values():
            behave(node, keeps_stopping=False, deaf=False, has_no_room=False)
        for _ in range(40):
            self.periods(1)
        for node in world.nodes.values():
            if node.answer is None or not node.answer.accepted:
                continue  # its tags fit two trees: it was refused
            known = world.state.nodes[node.id]
            assert set(node.jobs) == set(known.jobs), node.id
            orders = [job.stop for job in known.stopping.values()]
            assert all(stop is not None and stop.since == world.now for stop in orders), "older than this heartbeat"
            assert {job.job_id for job in node.finished.values()} == set(known.stopping)
        assert_consistent(world.state)

    # --- what always holds

    @invariant()
    def counters_are_exact(self) -> None:
        assert_consistent(self.world.state)

    @invariant()
    def an_active_job_is_stored_as_started_and_an_ended_one_is_not(self) -> None:
        world = self.world
        for job in world.state.jobs.values():
            assert not (job.is_active and job.is_stored) or ("start", job.id) in world.stored
        for ended in world.state.finished_jobs.values():
            assert not [job_id for job_id in ended if ("start", job_id) in world.stored]

    @invariant()
    def a_job_keeps_its_class(self) -> None:
        """One that ended after the record of its start was deleted (its operation had ended) counts as ordinary."""
        state = self.world.state
        for job in state.jobs.values():
            assert self.classes.setdefault(job.id, job.reclaimed) is job.reclaimed, job.id
        for job in (job for jobs in state.finished_jobs.values() for job in jobs.values()):
            assert self.classes.setdefault(job.id, job.reclaimed) or not job.reclaimed, job.id

    @invariant()
    def cpu_time_is_counted_once_and_never_less(self) -> None:
        seen: dict[PoolElement, float] = {}
        for tree in self.world.state.trees.values():
            for pool in (tree.root, *tree.pools.values()):
                seen[pool] = pool.cpu_seconds
                assert pool.cpu_seconds >= self.counted_cpu_s.get(pool, 0.0), pool.name
                assert pool.cpu_seconds <= tree.root.cpu_seconds + 1e-6, pool.name
                assert pool.reclaimed_cpu_seconds <= pool.cpu_seconds + 1e-6, pool.name
        self.counted_cpu_s = seen
        assert sum(tree.root.cpu_seconds for tree in self.world.state.trees.values()) <= self.used_cpu_s + 1e-6

    @invariant()
    def nothing_is_ordered_from_a_cordoned_node(self) -> None:
        for node in self.world.state.nodes.values():
            if node.cordon is not None:
                new = [job for job in node.jobs.values() if not job.was_reported and job.start_time > node.cordon.at]
                assert not new, node.id

    @invariant()
    def nothing_is_left_to_settle(self) -> None:
        world = self.world
        assert settling.settle(world.state, world.now).is_empty

    @invariant()
    def nobody_waits_who_could_run(self) -> None:
        for tree in self.world.state.trees.values():
            for element in tree.queue.values():
                assert any(
                    pool.running_operation_count >= pool.max_running_operation_count for pool in element.ancestors()
                ), element.name


Life.TestCase.settings = examples(120, stateful_step_count=50, suppress_health_check=list(HealthCheck))
TestLife = Life.TestCase
