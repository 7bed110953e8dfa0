"""Small living trees for tests of the scheduler: pools, operations, nodes and jobs made in one line each, which order
CPU and memory only. Unlike in the product no operation is protected by its number of jobs unless a test asks for it."""

from collections.abc import Iterator
from typing import Any, Literal, TypeVar

from cpumond.fairshare import fair_share_update
from cpumond.fairshare.resources import Vector, add
from cpumond.scheduler import model
from cpumond.scheduler.decide import placement
from cpumond.scheduler.decide.preemption import PreemptionPlan
from cpumond.scheduler.decide.snapshot import SnapshotMaker
from cpumond.scheduler.decide.starvation import update_starvation
from cpumond.scheduler.elements import (
    Element,
    Job,
    Node,
    Operation,
    OperationElement,
    PoolElement,
    StarvationStatus,
    Tree,
    end_job,
    start_job,
)
from cpumond.scheduler.settings.preemption_rules import operation_rules, pool_rules, root_rules
from cpumond.scheduler.settings.records import SYSTEM, RecordKey, changed_records


def amount(cpu: float = 0.0, memory: float = 0.0) -> Vector:
    return (0.0, cpu, 0.0, memory, 0.0)


class World:
    def __init__(self, **settings: Any) -> None:
        options = model.TreeSettings(**{"max_unpreemptible_running_job_count": None, **settings})
        self.tree = Tree(model.TreeConfig(id="t0", name="default", settings=options))
        self.tree.root.rules = root_rules(options)
        self.maker = SnapshotMaker()
        self.started = 0
        self.arrived = 0

    # --- what there is

    def node(self, name: str = "n0", cpu: float = 10.0, memory: float = 0.0) -> Node:
        node = Node(name)
        node.capacity = amount(cpu, memory)
        node.tree = self.tree.name
        node.is_online = True
        self.tree.nodes[name] = node
        self.tree.total = add(self.tree.total, node.capacity)
        return node

    def pool(self, name: str, parent: str = model.ROOT_POOL, **settings: Any) -> PoolElement:
        above = self.find_pool(parent)
        pool = PoolElement(name, above, self.tree)
        pool.settings = model.PoolSettings(**settings)
        pool.config = model.PoolConfig(id=name, name=name, parent=parent, settings=pool.settings)
        assert above.rules is not None
        pool.rules = pool_rules(above.rules, pool.settings)
        above.children[name] = pool
        self.tree.pools[name] = pool
        return pool

    def find_pool(self, name: str) -> PoolElement:
        return self.tree.root if name == model.ROOT_POOL else self.tree.pools[name]

    def operation(
        self,
        name: str,
        pool: str = model.ROOT_POOL,
        *,
        needs: int = 0,
        cpu: float = 1.0,
        memory: int = 0,
        tasks: tuple[model.Task, ...] | None = None,
        preemption_mode: Literal["normal", "graceful"] = "normal",
        suspended: bool = False,
        **options: Any,
    ) -> OperationElement:
        """A running operation that needs ``needs`` jobs of its task "main", or of each of ``tasks`` its job count."""
        above = self.find_pool(pool)
        if tasks is None:
            tasks = (model.Task("main", 1000, cpu_limit=cpu, memory_limit=memory, user_slots=0),)
            needed = {"main": needs} if needs else {}
        else:
            needed = {task.name: task.job_count for task in tasks}
        choices = model.OperationTreeOptions(pool=above.name, **options)
        self.arrived += 1
        record = model.OperationRecord(
            id=name, sequence=self.arrived, user="u", start_time=float(self.arrived), tasks=tasks,
            trees={self.tree.name: choices}, state="running", running_in=(self.tree.name,), suspended=suspended,
            preemption_mode=preemption_mode,
        )  # fmt: skip
        operation = Operation(record)
        operation.needed = needed
        element = OperationElement(operation, choices, above, self.tree)
        element.is_running = True
        assert above.rules is not None
        element.rules = operation_rules(above.rules, choices)
        operation.elements[self.tree.name] = element
        above.operations[name] = element
        self.tree.operations[name] = element
        return element

    def job(self, element: OperationElement, node: Node, cpu: float | None = None, memory: float | None = None) -> Job:
        """Start a job of the first task; ``cpu`` and ``memory`` are what it orders where that differs."""
        job = self.make_job(element, element.operation.record.tasks[0], node)
        _, task_cpu, _, task_memory, _ = job.limits
        job.limits = job.usage = amount(task_cpu if cpu is None else cpu, task_memory if memory is None else memory)
        start_job(job)
        element.entry = None
        return job

    def jobs(self, element: OperationElement, node: Node, count: int, cpu: float | None = None) -> list[Job]:
        return [self.job(element, node, cpu) for _ in range(count)]

    def make_job(self, element: OperationElement, task: model.Task, node: Node) -> Job:
        self.started += 1
        job = Job(f"j{self.started}", element, task, node, float(self.started), self.started)
        job.state, job.began_at = "running", job.start_time
        return job

    # --- what happens

    def update(self, now: float) -> None:
        """A real fair-share update, and the states of starvation after it."""
        self.maker.accept(self.tree, fair_share_update(self.maker.make(self.tree), now, None))
        update_starvation(self.tree, now)

    def start(self, job: Job) -> None:
        start_job(job)
        operation = job.element.operation
        left = operation.needed[job.task.name] - 1
        if left:
            operation.needed[job.task.name] = left
        else:
            del operation.needed[job.task.name]
        job.element.entry = None

    def stop(self, job: Job) -> None:
        """End a job whose work has to be done again."""
        end_job(job)
        needed = job.element.operation.needed
        needed[job.task.name] = needed.get(job.task.name, 0) + 1
        job.element.entry = None

    def place(self, node: Node) -> list[Job]:
        """A regular stage."""
        return placement.place_jobs(placement.ServiceOrder(self.tree), node, amount(0.01), self.make_job, self.start)

    def apply(self, plan: PreemptionPlan, node: Node) -> Job:
        for victim, _ in plan.victims:
            self.stop(victim)
        job = self.make_job(plan.element, plan.task, node)
        self.start(job)
        return job

    def elements(self) -> Iterator[Element]:
        yield self.tree.root
        yield from self.tree.pools.values()
        yield from self.tree.operations.values()


def make_world(cpu: float = 10.0, memory: float = 0.0, **settings: Any) -> tuple[World, Node]:
    """With one node."""
    world = World(**settings)
    return world, world.node(cpu=cpu, memory=memory)


E = TypeVar("E", bound=Element)


def give(element: E, fair: float, demand: float = 1.0, guarantee: float = 0.0) -> E:
    """Set shares of CPU by hand, as if by an update; the lists are old then."""
    element.fair_share, element.demand_share = amount(fair), amount(demand)
    element.strong_guarantee_share = amount(guarantee)
    if isinstance(element, OperationElement):
        element.lists_are_old = True
    return element


def starve(element: Element, status: StarvationStatus = "starving", since: float = 0.0) -> None:
    """Make an element starve by hand."""
    element.starvation_status = status
    element.scheduling_status = "below_fair_share"
    element.below_since = since


def records_of(config: model.Config) -> dict[RecordKey, dict[str, Any] | None]:
    records = {(kind, key): record for kind, key, record in changed_records(model.Config({}), config)}
    return {SYSTEM: {"default_tree": config.default_tree}, **records}
