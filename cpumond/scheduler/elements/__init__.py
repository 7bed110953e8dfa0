"""The live tree: pools and operations with usage and shares, jobs, nodes. Only ``state`` owns and changes it.

Vectors are absolute and in the order of RESOURCES, unless a name says ``_share`` (fractions of the tree's total). Usage
counters are exact on every level: each change of a job's usage is added to its operation, to every pool above and to
its node at once (semantics.md 8)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from cpumond.core.levels import SAFE, Level
from cpumond.core.wire import CPU_COUNTERS, AgentAbout, CpuTimes, JobReport, StopOrder
from cpumond.fairshare import tree as fairshare
from cpumond.fairshare.resources import CPU, MEMORY, UNLIMITED, ZERO, Vector, add, least, ratio, subtract, sum_vectors
from cpumond.scheduler.elements.account import Account
from cpumond.scheduler.elements.failing import Failing
from cpumond.scheduler.elements.fitting import Fitting, Fittings
from cpumond.scheduler.elements.gang_run import GangRun
from cpumond.scheduler.elements.job_numbers import UNKNOWN, EndingJob, TaskNumbers
from cpumond.scheduler.elements.node_sizes import NodeSizes
from cpumond.scheduler.elements.retry_run import Place, RetryRun
from cpumond.scheduler.model import (
    CLASSES,
    Cordon,
    JobClass,
    JobState,
    OperationRecord,
    OperationTreeOptions,
    PoolConfig,
    PoolSettings,
    PreemptionRecord,
    StartRecord,
    Task,
    TreeConfig,
    to_vector,
)
from cpumond.scheduler.model.budget import NOTHING_COUNTED, CorePair
from cpumond.scheduler.settings.preemption_rules import PreemptionRules

SchedulingStatus = Literal["normal", "below_min_share", "below_fair_share"]
StarvationStatus = Literal["non_starving", "starving", "aggressively_starving"]

NON_PREEMPTIBLE: Final = 0
AGGRESSIVELY_PREEMPTIBLE: Final = 1
PREEMPTIBLE: Final = 2
Preemptibility = Literal[0, 1, 2]
"""Index of one of the three lists of section 6.4."""

NOTHING: Final = (0.0,) * 5
"""CPU times of a job that has used no CPU."""

NO_REPORT: Final = JobReport("", "", 0.0, 0.0, mode="")


Arm = Literal["control", "others"]
"""Arms of a trial: jobs that their hosts keep in shadow by ``control_group_ratio``; the other jobs of these hosts."""

CONTROL: Final[Arm] = "control"
OTHERS: Final[Arm] = "others"


class TrialArm:
    """Sums over the jobs of one arm of a tree, with the same counters as an element."""

    __slots__ = CPU_COUNTERS

    def __init__(self) -> None:
        self.cpu_seconds = self.reclaimed_cpu_seconds = self.ordered_cpu_seconds = 0.0
        self.throttled_cpu_seconds = self.late_cpu_seconds = 0.0


class Element:
    """Common part of the pools and operations of a tree."""

    __slots__ = (
        "name", "parent", "tree", "usage", "demand", "waiting", "limits", "fair_share", "demand_share",
        "strong_guarantee_share", "scheduling_status", "starvation_status", "below_since", "rules", "satisfaction",
        "lost_core_seconds", "fitting", *CPU_COUNTERS,
    )  # fmt: skip

    def __init__(self, name: str, parent: PoolElement | None, tree: Tree) -> None:
        self.name = name
        """The pool's name or the operation's id; ``<Root>`` for the root."""
        self.parent = parent
        self.tree = tree
        self.usage: Vector = ZERO
        self.demand: Vector = ZERO
        """Demand at the last update."""
        self.waiting: Vector = ZERO
        """Additional demand of operations that are not admitted in this tree yet, at the last update (5.2)."""
        self.limits: Vector = UNLIMITED
        """Effective limits at the last update: ``resource_limits`` and ``max_share_ratio`` combined (2.10)."""
        self.fair_share: Vector = ZERO
        self.demand_share: Vector = ZERO
        self.strong_guarantee_share: Vector = ZERO
        """Scaled down if the guarantees exceed the cluster. These three shares are those of the last update."""
        self.scheduling_status: SchedulingStatus = "normal"
        self.starvation_status: StarvationStatus = "non_starving"
        self.below_since: float | None = None
        """Scheduler time of the first update that found the element below its share; None if it is not below it."""
        self.rules: PreemptionRules | None = None
        self.satisfaction = 0.0
        self.cpu_seconds = self.reclaimed_cpu_seconds = self.ordered_cpu_seconds = 0.0
        self.throttled_cpu_seconds = self.late_cpu_seconds = 0.0
        """Sums of ``CpuUse`` that nodes have reported of the element's jobs since the start of this scheduler."""
        self.lost_core_seconds = 0.0
        """Core-seconds lost by preemptions since the start of this scheduler (6.9)."""
        self.fitting: Fitting | None = None
        """The nodes on which its jobs may start; None for all nodes (2.13)."""

    def may_use(self, node: Node) -> bool:
        """Whether its jobs may start on a node, by the filters on its path (2.13)."""
        return self.fitting is None or node in self.fitting.nodes

    @property
    def sizes(self) -> NodeSizes:
        """The largest requests that its jobs can have."""
        return self.tree.sizes if self.fitting is None else self.fitting.sizes

    @property
    def bounds(self) -> Vector:
        """Upper bound of its resources: the lower of ``limits`` and the total of nodes on which its jobs may start."""
        return self.limits if self.fitting is None else least(self.limits, self.fitting.total)

    def ancestors(self) -> Iterator[PoolElement]:
        """The pools above, nearest first, the root last."""
        pool = self.parent
        while pool is not None:
            yield pool
            pool = pool.parent


class PoolElement(Element):
    """A pool, explicit or ephemeral, or the root."""

    __slots__ = (
        "config", "settings", "children", "operations", "operation_count", "running_operation_count",
        "max_operation_count", "max_running_operation_count", "volume", "last_integral_ratio", "entry",
        "idle_cores", "held_cores", "estimated_guarantee_share", "history", "weight_factor", "account", "yields",
    )  # fmt: skip

    def __init__(self, name: str, parent: PoolElement | None, tree: Tree) -> None:
        super().__init__(name, parent, tree)
        self.config: PoolConfig | None = None
        """The pool's configuration; None for an ephemeral pool and the root."""
        self.settings = PoolSettings()
        """The pool's own settings; for an ephemeral pool those of ``ephemeral_subpool_config``."""
        self.children: dict[str, PoolElement] = {}
        self.operations: dict[str, OperationElement] = {}
        self.operation_count = 0
        """Number of running and pending operations in the pool and below it (3.1)."""
        self.running_operation_count = 0
        self.max_operation_count = 0
        self.max_running_operation_count = 0
        """The two effective limits: the pool's own values or, if it has none, those of the tree."""
        self.volume: Vector = ZERO
        """Accumulated volume, in resource*seconds (9)."""
        self.last_integral_ratio = 0.0
        self.estimated_guarantee_share: Vector = ZERO
        """Share that the pool would have if all pools demanded everything; from the last update."""
        self.idle_cores = self.held_cores = 0.0
        """``idle_cores``, only of the root: CPU that no job has. ``held_cores``, of each pool: the part of that CPU
        which the pool's waiting jobs would use. Both are from the last report (``idle_watch``)."""
        self.history: dict[str, float] | None = None
        """Child -> mean of its share of the cluster, in which recent time counts more; None if it is not kept (5.5)."""
        self.weight_factor = 1.0
        """Factor by which its weight is multiplied; follows from the ``history`` of its parent."""
        self.account: Account | None = None
        """Account of the pool's own budget (2.15)."""
        self.yields: Literal["", "guarantee", "weight"] = ""
        """What the pool loses because a budget is spent: it gets only resources that others do not want. A pool with a
        spent budget loses its weight, and the pools below it lose their guarantees."""
        self.entry: fairshare.Pool | None = None
        """The pool's entry in the last snapshot; it stays the same object as long as nothing changes."""

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def owner(self) -> str:
        """The user of an ephemeral pool, who is the user of its oldest operation (2.9); "" if it has no operation."""
        oldest = min(self.operations.values(), key=lambda each: each.operation.record.sequence, default=None)
        return "" if oldest is None else oldest.operation.record.user

    @property
    def is_ephemeral(self) -> bool:
        return self.config is None and self.parent is not None

    @property
    def sharing(self) -> PoolElement:
        """The pool whose share this pool's children divide: itself or, if flattened, the nearest that is not (2.16)."""
        return self.parent.sharing if self.settings.flatten and self.parent is not None else self

    def list_sharing(self) -> Iterator[PoolElement]:
        """Yield the pools that divide this pool's share among themselves."""
        for child in self.children.values():
            if child.settings.flatten:
                yield from child.list_sharing()
            else:
                yield child

    @property
    def mode(self) -> str:
        return self.settings.mode


NO_DEACTIVATIONS: Final[dict[str, int]] = {}
NO_SHUNS: Final[dict[str, tuple[int, float]]] = {}
NO_LATER: Final[Mapping[Place, float]] = {}
NONE_NEEDED: Final[Mapping[str, int]] = {}
"""Value of ``needed`` of operations that need no more jobs. The map is shared and never changed."""


class OperationElement(Element):
    """An operation in one tree: its options and its jobs there."""

    __slots__ = (
        "operation", "options", "jobs", "is_running", "lists_are_old", "fifo_index", "deactivations", "entry",
        "accounts", "spent", "yields", "_room",
    )  # fmt: skip

    def __init__(self, operation: Operation, options: OperationTreeOptions, parent: PoolElement, tree: Tree) -> None:
        super().__init__(operation.id, parent, tree)
        self.operation = operation
        self.options = options
        self.jobs: dict[str, Job] = {}
        """Active jobs by id: starting and running ones, which count in usage."""
        self.is_running = False
        """Whether the operation holds a running slot in this tree (3.2)."""
        self.lists_are_old = True
        """Whether the jobs' ``preemptibility`` must be computed again before use (6.4)."""
        self.fifo_index: int | None = None
        self.deactivations = NO_DEACTIVATIONS
        """Reason -> number of heartbeats since the last update that passed the operation over for it (7.1)."""
        self.accounts: tuple[Account, ...] = ()
        """Accounts of the budgets against which its jobs are counted (2.15)."""
        self.spent: Account | None = None
        """A spent account that forbids further starts."""
        self.yields = False
        """Whether it gets only resources that others do not want, because its user's budget is spent."""
        self.entry: fairshare.Operation | None = None
        """The entry in the last snapshot, as for a pool; None if the next snapshot needs a new entry."""
        self._room: tuple[object, NodeSizes] | None = None
        """Its tasks and node sizes for which ``has_room`` found that an empty node can hold a job of each task."""

    def note_passed_over(self, reason: str) -> None:
        self.deactivations = self.deactivations or {}
        self.deactivations[reason] = self.deactivations.get(reason, 0) + 1

    def may_use(self, node: Node) -> bool:
        """Whether its jobs may start on a node by the filters on its path (2.13) and get secrets there (12.6)."""
        gets_secrets = not self.operation.record.vault_bytes or node.takes_secrets
        return gets_secrets and (self.fitting is None or node in self.fitting.nodes)

    def has_room(self) -> bool:
        """Whether an empty node can hold a job of each task. Also returns False if this is expensive to find out."""
        operation = self.operation
        if operation.retries is not None:  # retries may request more than their tasks
            return False
        tasks, sizes, known = operation.record.tasks, self.sizes, self._room
        if known is None or known[0] is not tasks or known[1] is not sizes:
            if operation.record.is_gang or any(sizes.explain_excess(task.resources) for task in tasks):
                return False
            self._room = (tasks, sizes)
        return True

    def explain_unplaceable(self) -> str:
        """Return why the nodes of the tree can hold none of the jobs still to be started or, for a gang, not all of its
        jobs; "" if they can."""
        if self.has_room():
            return ""
        return self.sizes.explain_unplaceable(self.operation.needed_orders, self.operation.record.is_gang)


def share_needed(needed: Mapping[str, int]) -> Mapping[str, int]:
    """Return an equal map. Operations that need the same number of jobs of the same single task share it."""
    return _one_needed(*next(iter(needed.items()))) if len(needed) == 1 else needed or NONE_NEEDED


@lru_cache(maxsize=4096)
def _one_needed(task: str, number: int) -> Mapping[str, int]:
    return {task: number}


@dataclass(slots=True, eq=False)
class Stuck:
    """Why no job of an operation can start, whichever jobs end, and since when this is known (3.7)."""

    why: str
    since: float
    is_reported: bool = False


class Operation:
    """An operation: its record, the jobs that it still needs, and its elements by tree."""

    __slots__ = (
        "record", "needed", "elements", "stuck", "restarted", "next_index", "lacks_secrets", "gang",
        "_numbers", "_further_numbers", "retries", "shuns", "backfilled_count", "overstay_count",
    )  # fmt: skip

    def __init__(self, record: OperationRecord) -> None:
        self.record = record
        self.lacks_secrets = False
        """Whether it has secrets that this scheduler cannot decrypt (12.6); if so, none of its jobs starts."""
        self.needed = NONE_NEEDED
        """Task -> number of jobs still to be started. Operations share equal maps (``share_needed``)."""
        self.elements: dict[str, OperationElement] = {}
        self.stuck: Stuck | None = None
        self.restarted: list[str] | None = None
        """Ids of completed jobs that were started again and whose records are kept, oldest first."""
        self._numbers: TaskNumbers | None = None
        """Numbers of the task that was first to start a job. Most operations have one task and need no dictionary."""
        self._further_numbers: dict[str, TaskNumbers] | None = None
        self.next_index = 0
        """``job_index`` of the next start."""
        self.gang = GangRun() if record.incarnations else None
        """State of the gang; None without ``gang_options`` (7.5)."""
        self.backfilled_count = self.overstay_count = 0
        """Number of its backfilled jobs with a known run time, and number of those that ran beyond ``backfill_until``.
        Both count the jobs that ended under this scheduler (7.3)."""
        self.shuns = NO_SHUNS
        """Node -> number of jobs that failed there and wait for a replacement, and time until which the replacements
        prefer other nodes (2.14)."""

        self.retries: RetryRun | None = None
        """Jobs that a retry policy starts again; None until there is such a job (3.9)."""

    @property
    def active(self) -> dict[str, int]:
        """Task -> number of active jobs in all trees plus number of stopping jobs that keep their place."""
        return {numbers.task: numbers.active_count for numbers in self.list_numbers() if numbers.active_count}

    @property
    def taken(self) -> Mapping[str, int]:
        """Task -> number of places that no new job may take now: those of ``active`` jobs and of jobs to retry."""
        later = self.later
        return Counter(name for name, _ in later) + Counter(self.active) if later else self.active

    @property
    def later(self) -> Mapping[Place, float]:
        """Place of a job that waits for a retry -> time of the retry, in seconds since 1970."""
        return NO_LATER if self.retries is None else self.retries.later

    @property
    def waits_whole(self) -> bool:
        """Whether this is a gang of which a job waits for a retry; if so, all of its jobs wait."""
        return bool(self.later) and self.record.starts_whole

    def touch(self) -> None:
        """Mark its needs as changed for the next snapshot and the next placement."""
        for element in self.elements.values():
            element.entry = None
            element.tree.changed[element] = None

    def numbers_of(self, task: str) -> TaskNumbers:
        first = self._numbers
        if first is None:
            first = self._numbers = TaskNumbers(task)
        if first.task == task:
            return first
        if self._further_numbers is None:
            self._further_numbers = {}
        numbers = self._further_numbers.get(task)
        if numbers is None:
            numbers = self._further_numbers[task] = TaskNumbers(task)
        return numbers

    def list_numbers(self) -> list[TaskNumbers]:
        """Return the ``TaskNumbers`` of tasks of which a job was started."""
        return [] if self._numbers is None else [self._numbers, *(self._further_numbers or {}).values()]

    @property
    def is_held(self) -> bool:
        """Whether none of its jobs may start, however many resources are free."""
        return self.record.suspended or self.lacks_secrets

    @property
    def active_job_count(self) -> int:
        first = self._numbers
        if first is None or self._further_numbers is None:
            return 0 if first is None else first.active_count
        return sum([numbers.active_count for numbers in self.list_numbers()])

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def needed_job_count(self) -> int:
        """Number of jobs still to be started: FIFO's ``pending_job_count`` (4)."""
        needed = self.needed
        return sum(needed.values()) if needed else 0

    @property
    def needed_orders(self) -> list[tuple[Vector, int]]:
        """For each task the request of jobs still to be started, and the number of these jobs."""
        return [(task.resources, number) for task, number in self.next_jobs()]

    def next_jobs(self) -> list[tuple[Task, int]]:
        """Tasks with the requests of their next jobs, each with the number of these jobs."""
        if self.retries is not None:
            return self.retries.split(self.record, self.needed)
        needed = self.needed
        return [(task, number) for task in self.record.tasks if (number := needed.get(task.name, 0)) > 0]

    def next_tasks(self) -> Iterator[Task]:
        """Yield the tasks that need a job, each with the request of its next job, in the specification's order."""
        if self.retries is not None:
            yield from (task for task, _ in self.next_jobs())
            return
        for task in self.record.tasks:
            if self.needed.get(task.name, 0) > 0:
                yield task


@lru_cache(maxsize=1024)
def one_of(vector: Vector) -> Vector:
    """Return one shared object for equal vectors: a vector takes as much memory as the job to which it belongs."""
    return vector


NO_GANG: Final[tuple[str, int]] = ("", -1)
"""Incarnation and rank of most jobs: of those in no gang with ``gang_options`` (7.5). Rank -1: the job has none."""


class Job:
    """A job from its start to its end. While it ``is_active``, its node, operation and pools count its ``usage``."""

    __slots__ = (
        "id", "element", "task", "node", "limits", "usage", "state", "start_time", "sequence", "preemptibility",
        "is_active", "stop", "began_at", "first_sent_at", "last_sent_at", "report", "counted",
        "is_stored", "reclaimed", "cookie", "index", "task_index", "after", "has_ceiling",
        "in_gang", "settled", "is_resumed", "backfill_until",
    )  # fmt: skip

    def __init__(
        self, job_id: str, element: OperationElement, task: Task, node: Node, start_time: float, sequence: int
    ) -> None:
        self.id = job_id
        self.element = element
        self.task = task
        self.node = node
        self.limits: Vector = one_of(task.resources)
        """The job's request."""
        self.usage: Vector = self.limits
        """The job's current limits; cpu is ``current_cpu_limit``."""
        self.state: JobState = "starting"
        self.start_time = start_time
        self.sequence = sequence
        """Order of jobs with the same ``start_time``."""
        self.preemptibility: Preemptibility = PREEMPTIBLE
        self.is_active = False
        self.stop: Stop | None = None
        """Set if the job is being stopped; it is then no longer active."""
        self.began_at: float | None = None
        """When it began to run on its node, in this scheduler's time; None if its node has not reported it yet."""
        self.first_sent_at: float | None = None
        self.last_sent_at: float | None = None
        """When heartbeat responses first and last contained its start; None if none did, or the job was adopted. For a
        job of an earlier run, ``first_sent_at`` is the start of this run, then the node's first heartbeat to it."""
        self.is_stored = False
        """Whether the job's start is stored; a heartbeat response must not contain the start before that."""
        self.report = NO_REPORT
        """Its node's last report; a counter that a report omits keeps its last known value."""
        self.counted: CpuTimes = NOTHING
        """The part of its ``cpu_times`` that counters of elements contain, or that it used before this scheduler knew
        it; None for a time that is not known yet."""
        self.reclaimed = False
        """Whether it runs on reclaimed CPU; set at its start and kept until its end (1.10)."""
        self.cookie = self.index = self.task_index = UNKNOWN
        """``cookie``: its place in its task. ``index`` and ``task_index``: number of jobs of the operation, and of the
        task, that were started before it (7.4)."""
        self.after: EndingJob | None = None
        """A job that may still work and that had the same cookie, or is of an earlier incarnation of the same gang. The
        start of this job is not sent before all such jobs have ended."""
        self.has_ceiling = True
        """Whether the job's request is also its ceiling; set at its start (1.10)."""
        self.in_gang = NO_GANG
        self.settled: CorePair = NOTHING_COUNTED
        """The part of its request and usage that the stored sums of budgets contain (2.15)."""
        self.is_resumed = False
        """Whether an earlier run of the scheduler started it; the clock may have been set since then."""
        self.backfill_until: float | None = None
        """Time by which a backfilled job is expected to end (7.3); None for jobs that are not backfilled."""

    @property
    def incarnation(self) -> str:
        return self.in_gang[0]

    @property
    def gang_rank(self) -> int:
        return self.in_gang[1]

    def recall_gang(self, incarnation: str, rank: int) -> None:
        self.in_gang = (incarnation, rank) if incarnation else NO_GANG

    def reserve_memory(self, memory: int) -> None:
        """Set the bytes of memory that the job reserves. Call this before the job is started."""
        slots, cpu, gpu, _, network = self.limits
        self.limits = self.usage = one_of((slots, cpu, gpu, float(memory), network))

    @property
    def interruption_timeout(self) -> float:
        """The time-out in milliseconds as records contain it; 0 if the job was not interrupted."""
        if self.stop is None or self.began_at is None or not self.task.interruptible:
            return 0.0
        return self.stop.timeout_s * 1e3

    @property
    def was_reported(self) -> bool:
        """Whether a heartbeat has reported the job. A node does not report jobs that wait there for free resources."""
        return self.report is not NO_REPORT

    @property
    def job_class(self) -> JobClass:
        return CLASSES[self.reclaimed]

    @property
    def set_container_cpu_limit(self) -> bool | None:
        """The option as records contain it: None if it follows from the job's class."""
        return None if self.has_ceiling is not self.reclaimed else self.has_ceiling

    @property
    def memory_reserve(self) -> int:
        """Bytes that it reserves if the usage of earlier jobs decides that (8.1); 0 if it reserves ``memory_limit``."""
        reserve = int(self.limits[MEMORY])
        return reserve if self.task.memory_reserve or reserve != self.task.memory_limit else 0

    @property
    def grown_memory(self) -> int:
        """``memory_limit`` as records contain it: 0 if no job of the operation is started again by a retry policy."""
        return 0 if self.element.operation.retries is None else self.task.memory_limit

    @property
    def node_id(self) -> str:
        return self.node.id

    @property
    def task_name(self) -> str:
        return self.task.name

    @property
    def must_end(self) -> bool:
        """Whether the job is replaced only after its end was counted: because it must not run twice (3.6), or because
        its end restarts all jobs of its operation (7.5)."""
        return self.task.fail_on_job_restart or (self.gang_rank >= 0 and self.task.gang_options is not None)

    @property
    def keeps_place(self) -> bool:
        """Whether the job is being stopped and will be replaced only after its end, if its operation continues."""
        return self.stop is not None and self.stop.keeps_place

    @property
    def ordinary_cores(self) -> float:
        """Cores of its request that count against ordinary jobs on its node (1.10)."""
        return 0.0 if self.reclaimed else self.limits[CPU]

    @property
    def has_cpu_gap(self) -> bool:
        """Whether its limit is lower than its request (6.6)."""
        return self.usage[1] < self.limits[1]


@dataclass(slots=True, eq=False)
class Stop:
    """The stop of a job, repeated in each heartbeat response until the node no longer reports the job (6.7)."""

    record: PreemptionRecord
    timeout_s: float
    """Seconds from the interruption to the kill."""
    since: float
    fails: bool = False
    """Whether the job counts as failed rather than aborted."""
    keeps_place: bool = False
    """Whether it is replaced only after its end: it counts as failed, must not run twice, or ends with its gang."""


class Node:
    """A compute host as its registration and its last heartbeat describe it."""

    __slots__ = (
        "id", "address", "tags", "capacity", "tree", "incarnation", "sequence", "is_online", "last_seen",
        "lost_since", "jobs", "stopping", "used", "foreign_usage", "last_preemptive_attempt", "overcommitted_since",
        "overcommit_count", "unwanted", "replaced", "skipped_searches", "key_hash", "matched_trees", "strangers",
        "cordon", "failing", "about", "level", "ordered_cores", "ordinary_cores",
        "foreign_ordered_cores", "former_starts", "agent_tags", "user_tags",
    )  # fmt: skip

    def __init__(self, node_id: str) -> None:
        self.id = node_id
        self.address = node_id
        self.tags: frozenset[str] = frozenset()
        """All tags: its agent's, those set by an administrator, its address."""
        self.agent_tags: tuple[str, ...] = ()
        self.user_tags: tuple[str, ...] = ()
        self.capacity: Vector = ZERO
        self.tree: str | None = None
        self.incarnation = ""
        """Incarnation of the agent's present run. It is a secret that authorizes heartbeats; views show ``run``."""
        self.key_hash = ""
        """Hash of the key that the node's agent keeps from run to run; "" if the agent has no key."""
        self.sequence = -1
        self.is_online = False
        self.last_seen = 0.0
        self.lost_since: float | None = None
        self.jobs: dict[str, Job] = {}
        """Active jobs by id."""
        self.stopping: dict[str, Job] = {}
        """Jobs being stopped that the node may still have."""
        self.used: Vector = ZERO
        """Usage of the active jobs."""
        self.ordered_cores = self.ordinary_cores = self.foreign_ordered_cores = 0.0
        """CPU that is requested by the active jobs, by the ordinary active jobs, and by the jobs in ``strangers``."""
        self.foreign_usage: Vector = ZERO
        """Usage reported of foreign jobs: those not of the scheduler, and those that it stops instead of adopting."""
        self.strangers: dict[str, JobReport] = {}
        """The last reports of foreign jobs, by job id."""
        self.former_starts: dict[str, StartRecord] = {}
        """Known starts of jobs that an earlier run of the scheduler started and that are not active now, by job id."""
        self.last_preemptive_attempt: float | None = None
        self.skipped_searches = 0
        """Number of searches that the next preemptive attempt skips because the last attempt made them (6.6)."""
        self.overcommitted_since: float | None = None
        self.overcommit_count = 0
        self.unwanted: dict[str, StopOrder] = {}
        """Jobs of its last heartbeat that no operation needs and that are not stopping yet, by job id."""
        self.replaced: dict[str, str] = {}
        """Incarnation of an earlier run of its agent that was replaced -> address; the latest is last."""
        self.matched_trees: tuple[str, ...] = ()
        """The trees that its tags match, if several. Its jobs in ``tree`` then continue, and no job starts (2.2)."""
        self.cordon: Cordon | None = None
        self.failing: Failing | None = None
        """Failures of its jobs since the last job that completed there; None if there were none (2.14)."""
        self.about: AgentAbout | None = None
        """Its agent's self-description; None if it was not sent yet. Older agents never send it."""
        self.level: Level = SAFE
        """Its level: the stages of a roll-out determine it, and it is sent to the node."""

    @property
    def takes_secrets(self) -> bool:
        """Whether its agent passes secrets to jobs (12.6)."""
        return self.about is not None and self.about.knows_secrets

    @property
    def cordoned(self) -> bool:
        """Whether it gets no new jobs because an administrator cordoned it (2.11) or jobs fail on it (2.14)."""
        return self.cordon is not None or (self.failing is not None and self.failing.until is not None)

    @property
    def is_held_off(self) -> bool:
        """Whether it gets no new jobs for a while because jobs fail on it (2.14)."""
        return self.failing is not None and self.failing.until is not None

    @property
    def takes_jobs(self) -> bool:
        """Whether the node gets jobs while it has free resources."""
        return self.is_online and not self.cordoned and not self.matched_trees

    @property
    def counted_capacity(self) -> Vector:
        """The part of its capacity that counts in the tree's total. If its tags match several trees (2.2) or it is
        cordoned (2.11), no job may start on it, and this part is the request of its jobs, up to its capacity."""
        if not self.cordoned and not self.matched_trees:
            return self.capacity
        return least(self.capacity, sum_vectors([job.limits for job in self.jobs.values()]))

    def all_jobs(self) -> list[Job]:
        return [*self.jobs.values(), *self.stopping.values()]

    @property
    def run(self) -> str:
        """The beginning of ``incarnation``; this beginning is no secret."""
        return self.incarnation[:16]

    @property
    def free(self) -> Vector:
        """Capacity minus the usage of all jobs including foreign ones. If negative, the node is overcommitted."""
        return subtract(subtract(self.capacity, self.used), self.foreign_usage)

    @property
    def unordered_cores(self) -> float:
        """CPU that no ordinary or foreign job has requested; negative if they requested more than there is."""
        return self.capacity[CPU] - self.ordinary_cores - self.foreign_ordered_cores


class Tree:
    """One pool tree with all of its elements."""

    __slots__ = (
        "config", "root", "pools", "operations", "nodes", "total", "queue", "changed", "errors", "update_count",
        "updated_at", "trial", "fittings", "lenders", "_sizes",
    )  # fmt: skip

    def __init__(self, config: TreeConfig) -> None:
        self.config = config
        self.root = PoolElement("<Root>", None, self)
        self.pools: dict[str, PoolElement] = {}
        """All pools except the root, by name; a parent comes before its children."""
        self.operations: dict[str, OperationElement] = {}
        self.nodes: dict[str, Node] = {}
        self.total: Vector = ZERO
        """Capacity of all nodes that count, even if offline for less than ``node_reconnection_timeout`` (2.4)."""
        self.queue: dict[str, OperationElement] = {}
        """Pending operations in order of arrival (3.3)."""
        self.changed: dict[OperationElement, None] = {}
        """Operations whose usage or needs changed since ``placement`` last processed this map."""
        self.errors: tuple[str, ...] = ()
        self.update_count = 0
        self.updated_at = 0.0
        """Scheduler time when starvation was last computed, after an update."""
        self.trial: dict[Arm, TrialArm] = {}
        """Sums by arm; empty if no host has a control group."""
        self.fittings = Fittings()
        self.lenders: dict[PoolElement, Vector] = {}
        """Pool with a ``lending_limit`` -> resources that it does not lend, by the last snapshot (2.17)."""
        self._sizes: NodeSizes | None = None

    @property
    def name(self) -> str:
        return self.config.name

    def sum_total(self, are_nodes_same: bool = False) -> None:
        """Set ``total`` from the nodes; an equal total stays the same object. ``are_nodes_same``: whether only their
        jobs have changed since the last call."""
        total = sum_vectors([node.counted_capacity for node in self.nodes.values()])
        if total != self.total:
            self.total = total
        if not are_nodes_same:
            self._sizes = None
        self.fittings.renew(self.nodes, are_nodes_same)

    @property
    def sizes(self) -> NodeSizes:
        """The largest requests that jobs can have, by the nodes of the last ``sum_total``."""
        if self._sizes is None:
            self._sizes = NodeSizes(Counter(node.capacity for node in self.nodes.values()))
        return self._sizes


def fit(element: PoolElement | OperationElement) -> None:
    """Find the nodes on which jobs of an element may start, by its own filter and the filters above it (2.13)."""
    options = element.settings if isinstance(element, PoolElement) else element.options
    tree, above = element.tree, None if element.parent is None else element.parent.fitting
    if above is None and not options.scheduling_tag_filter:
        element.fitting = None
        return
    element.fitting = tree.fittings.narrow(above, options.scheduling_tag_filter, tree.nodes)


def start_job(job: Job) -> None:
    """Add a job to all counters: operation, pools, node (8)."""
    assert not job.is_active
    job.is_active = True
    element, node = job.element, job.node
    element.jobs[job.id] = job
    element.operation.numbers_of(job.task.name).active_count += 1
    node.jobs[job.id] = job
    node.used = add(node.used, job.usage)
    node.ordered_cores += job.limits[CPU]
    node.ordinary_cores += job.ordinary_cores
    _change(element, job.usage)


def end_job(job: Job) -> None:
    """Remove a job from all counters at once (6.7)."""
    assert job.is_active
    job.is_active = False
    element, node = job.element, job.node
    del element.jobs[job.id], node.jobs[job.id]
    element.operation.numbers_of(job.task.name).active_count -= 1
    # Sums of floats drift; therefore the sums of a node or an element without jobs are set to zero.
    node.used = subtract(node.used, job.usage) if node.jobs else ZERO
    node.ordered_cores = node.ordered_cores - job.limits[CPU] if node.jobs else 0.0
    node.ordinary_cores = node.ordinary_cores - job.ordinary_cores if node.jobs else 0.0
    _change(element, subtract(ZERO, job.usage))


def change_usage(job: Job, usage: Vector) -> None:
    """Change a job's usage in all counters; a rise is never refused (1.9, 8)."""
    if usage == job.usage:
        return
    delta = subtract(usage, job.usage)
    job.usage = usage
    if job.is_active:
        job.node.used = add(job.node.used, delta)
        _change(job.element, delta)


def _change(element: OperationElement, delta: Vector) -> None:
    element.usage = add(element.usage, delta) if element.jobs else ZERO
    element.lists_are_old = True
    element.entry = None
    element.tree.changed[element] = None
    pool = element.parent
    while pool is not None:
        pool.usage = add(pool.usage, delta)
        pool = pool.parent


def count_cpu_time(job: Job, told: CpuTimes) -> None:
    """Add a job's CPU times, such as used and reclaimed time, to its operation and the pools above (1.7).

    ``cpu_seconds`` comes from the cgroup. A value below the last one adds nothing, and the last one stays the base,
    since the final value of an ended job may be a little lower. The other counters are sums of the agent, which loses
    their newest part in a crash. A value below the last one adds nothing, but becomes the base for later growth. If the
    operation moves, time that was counted before stays with the pools above it at that moment."""
    if told.count(None) == len(told):
        return
    counted, grown = list(job.counted), list(NOTHING)
    for number, value in enumerate(told):
        if value is None:
            continue
        before = counted[number]
        if before is None or value > before:
            counted[number] = value
            if before is not None:
                grown[number] = value - before
        elif number > 0:
            counted[number] = value
    a, b, c, d, e = counted
    job.counted = (a, b, c, d, e)
    if any(grown):
        add_cpu_time(job.element, grown)
        about = job.node.about
        if about is not None and about.control_group_ratio:
            _count_in_trial(job, grown)


def _count_in_trial(job: Job, grown: Sequence[float]) -> None:
    """Add to the sums of the job's arm. A job is in neither arm if its agent, for a reason other than the trial, does
    not reclaim its CPU, or if no heartbeat reported the job while it ran."""
    mode = job.report.mode
    if mode in ("", "off", "shadow"):
        return
    tree, name = job.element.tree, CONTROL if mode == CONTROL else OTHERS
    arm = tree.trial.get(name)
    if arm is None:
        arm = tree.trial[name] = TrialArm()
    used, reclaimed, ordered, throttled, late = grown
    arm.cpu_seconds += used
    arm.reclaimed_cpu_seconds += reclaimed
    arm.ordered_cpu_seconds += ordered
    arm.throttled_cpu_seconds += throttled
    arm.late_cpu_seconds += late


def add_cpu_time(element: OperationElement, grown: Sequence[float]) -> None:
    """Add core-seconds, in the order of CPU_COUNTERS, to an operation and the pools above."""
    used, reclaimed, ordered, throttled, late = grown
    above: Element | None = element
    while above is not None:
        above.cpu_seconds += used
        above.reclaimed_cpu_seconds += reclaimed
        above.ordered_cpu_seconds += ordered
        above.throttled_cpu_seconds += throttled
        above.late_cpu_seconds += late
        above = above.parent


def count_loss(element: OperationElement, core_seconds: float) -> None:
    """Add the work lost in a preemption to an operation and the pools above."""
    above: Element | None = element
    while above is not None:
        above.lost_core_seconds += core_seconds
        above = above.parent


def reported_core_seconds(job: Job, report: JobReport) -> CorePair:
    """Return the requested and the used core-seconds of a job according to a report."""
    ordered, used = job.settled
    return (
        ordered if report.ordered_cpu_seconds is None else report.ordered_cpu_seconds,
        used if report.cpu_seconds is None else report.cpu_seconds,
    )


def used_now(job: Job) -> float:
    """Return the cores that a job uses by its last report: those in the last check, else the smoothed ones, else 0."""
    report = job.report
    return report.smoothed_cpu_usage or 0.0 if report.cpu_usage is None else report.cpu_usage


def usage_share(element: Element) -> Vector:
    """Return ``usage`` as fractions of the tree's total; 0 for a resource that the cluster does not have."""
    a, b, c, d, e = element.usage
    f, g, h, i, j = element.tree.total
    return (a / f if f else 0.0, b / g if g else 0.0, c / h if h else 0.0, d / i if i else 0.0, e / j if j else 0.0)


def is_integral(pool: PoolElement) -> bool:
    """Whether the pool has an integral guarantee, which accumulates volume (9)."""
    return pool.settings.integral_guarantees.guarantee_type != "none"


def flow_ratio(pool: PoolElement) -> float:
    """Return the largest component of ``resource_flow`` as a fraction of the tree (2.6)."""
    return ratio(to_vector(pool.settings.integral_guarantees.resource_flow, 0.0), pool.tree.total)


def volume_ratio(pool: PoolElement) -> float:
    """Return the accumulated volume in share-seconds: the minimum over the resources of the tree (9)."""
    return min((v / t for v, t in zip(pool.volume, pool.tree.total, strict=True) if t > 0.0), default=0.0)


def volume_capacity(pool: PoolElement) -> float:
    """Return the maximum that ``volume_ratio`` can reach (9)."""
    period_s = pool.tree.config.settings.integral_guarantees.pool_capacity_saturation_period / 1e3
    return flow_ratio(pool) * period_s
