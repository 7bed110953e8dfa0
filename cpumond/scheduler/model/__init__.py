"""Frozen values of the scheduler: configuration of trees and pools; records of operations, nodes and finished jobs
(semantics.md 2).

Every accepted change of trees or pools replaces ``Config`` as a whole. Resources are dictionaries: name of a resource
(``fairshare.resources.RESOURCES``) -> amount; cpu is in cores, memory in bytes. A missing name means "not set", which
differs from 0. Options have the names and units of YTsaurus: time-outs are milliseconds, shares and ratios fractions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec

from cpumond.core.errors import CpumondError
from cpumond.core.wire import CpuUse
from cpumond.fairshare.resources import RESOURCES, Vector
from cpumond.scheduler.model.budget import NO_BUDGET, NOTHING_COUNTED, Budget, CorePair
from cpumond.scheduler.model.failures import EndError
from cpumond.scheduler.model.node_failures import DEFAULT_NODE_FAILURES, NodeFailures
from cpumond.scheduler.rights.entries import AccessEntry
from cpumond.scheduler.rights.vaults import VaultKeys

ROOT_POOL: Final = "<Root>"
"""Name of a tree's root, as YTsaurus prints it."""

SUBPOOL_DELIMITER: Final = "$"

GENERIC: Final = 1
TIMEOUT: Final = 3
RESOLVE: Final = 500
ALREADY_EXISTS: Final = 501
AUTHENTICATION: Final = 900
ACCESS_DENIED: Final = 901
TOO_MANY_OPERATIONS: Final = 202
NO_SUCH_JOB: Final = 203
POOL_TREES_UNSPECIFIED: Final = 214
TOO_MANY_REQUESTS: Final = 904
NODE_OFFLINE: Final = 1601
NO_SUCH_OPERATION: Final = 1915
GUARANTEES_OVERCOMMIT: Final = 29000
"""Error codes that `yt` knows (yt_protocol.md 7)."""


class CommandError(CpumondError):
    """A command was refused and changed nothing. ``code``: one of the codes above."""

    def __init__(
        self, message: str, code: int = GENERIC, attributes: Mapping[str, Any] | None = None,
        inner: Sequence[CommandError] = (),
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.code = code
        self.attributes: Mapping[str, Any] = attributes or {}
        self.inner = inner


MAX_WHY: Final = 500
Why = Annotated[str, msgspec.Meta(max_length=MAX_WHY)]
"""The user's reason for a command, as a sentence; "" for none."""

Resources = dict[str, float]
Mode = Literal["fair_share", "fifo"]
GuaranteeType = Literal["none", "burst", "relaxed"]
FifoSortParameter = Literal["start_time", "weight", "pending_job_count"]

_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
_Positive = Annotated[int, msgspec.Meta(gt=0, le=2**31)]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**60)]
_Amounts = dict[str, Annotated[float, msgspec.Meta(ge=0.0, le=1e30)]]
_Weight = Annotated[float, msgspec.Meta(ge=0.0, le=2.0**26)]
_Multiplier = Annotated[float, msgspec.Meta(ge=1.0, le=10.0)]
AccessList = tuple[AccessEntry, ...] | None
"""Access list of a pool or tree (12.1); None if there is none, which differs from an empty list."""
DEFAULT_FIFO_SORT: Final[tuple[FifoSortParameter, ...]] = ("weight", "start_time")


class PoolIntegralGuarantees(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``integral_guarantees`` of a pool (2.5). None: the tree's value or, if it has none, the library's default."""

    guarantee_type: GuaranteeType = "none"
    resource_flow: _Amounts = {}
    burst_guarantee_resources: _Amounts = {}
    relaxed_share_multiplier_limit: _Multiplier | None = None
    can_accept_free_volume: bool | None = None
    should_distribute_free_volume_among_children: bool | None = None


class EphemeralSubpoolConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``ephemeral_subpool_config``: settings of the ephemeral pools below a pool (2.9)."""

    mode: Mode | None = None
    max_running_operation_count: _Count | None = None
    max_operation_count: _Count | None = None
    resource_limits: _Amounts = {}


class PreemptionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Starvation and preemption options of trees and pools (6.2). None: the value is inherited.

    Operations have the first three and the last two of these options."""

    fair_share_starvation_timeout: _Milliseconds | None = None
    fair_share_starvation_tolerance: _Share | None = None
    min_share_preemption_timeout: _Milliseconds | None = None
    fair_share_aggressive_starvation_timeout: _Milliseconds | None = None
    fair_share_preemption_timeout_limit: _Milliseconds | None = None
    min_share_preemption_timeout_limit: _Milliseconds | None = None
    fair_share_starvation_tolerance_limit: _Share | None = None
    enable_aggressive_starvation: bool | None = None
    allow_aggressive_preemption: bool | None = None
    non_preemptible_resource_usage_threshold: _Amounts | None = None
    min_run_time: _Milliseconds | None = None


class PoolSettings(PreemptionSettings, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings that a pool's attributes specify (2.5). None means "not set"."""

    weight: _Weight | None = None
    max_share_ratio: _Share | None = None
    strong_guarantee_resources: _Amounts = {}
    resource_limits: _Amounts = {}
    mode: Mode = "fair_share"
    max_running_operation_count: _Count | None = None
    max_operation_count: _Count | None = None
    fifo_sort_parameters: Annotated[tuple[FifoSortParameter, ...], msgspec.Meta(min_length=1)] = DEFAULT_FIFO_SORT
    forbid_immediate_operations: bool = False
    create_ephemeral_subpools: bool = False
    ephemeral_subpool_config: EphemeralSubpoolConfig = EphemeralSubpoolConfig()
    integral_guarantees: PoolIntegralGuarantees = PoolIntegralGuarantees()
    resource_limits_overcommit_tolerance: _Amounts = {}
    allow_children_guarantees: bool = True
    scheduling_tag_filter: str = ""
    """Formula like ``nodes_filter`` that selects the nodes of the tree on which the pool's jobs start (2.13)."""
    set_container_cpu_limit: bool | None = None
    """Value for tasks that do not set the option (1.10); None if it is inherited."""
    retry_policy: tuple[str, ...] | None = None
    """Policy for tasks that have none (3.9); None if it is inherited."""
    lending_limit: _Amounts = {}
    """Part of its strong guarantee that others may use while this is idle; all of it for omitted resources (2.17)."""
    flatten: bool = False
    """Whether its children share resources as if they were direct children of its parent (2.16)."""
    usage_half_life: _Milliseconds | None = None
    """Half-life of the usage that lowers the weights of its children (5.5). None: inherited; 0: usage has no effect."""
    max_retry_memory: _Bytes | None = None
    """Maximum memory that ``memory_growth`` of a rule may reach. The smallest value on the way to the root applies."""
    budget: Budget = NO_BUDGET
    acl: AccessList = None
    inherit_acl: bool = True
    owner: str = ""


class TreeIntegralGuarantees(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``integral_guarantees`` of a tree: periods in milliseconds (2.4)."""

    smooth_period: Annotated[float, msgspec.Meta(gt=0.0, le=1e15)] = 60_000.0
    pool_capacity_saturation_period: Annotated[float, msgspec.Meta(gt=0.0, le=1e15)] = 86_400_000.0
    relaxed_share_multiplier_limit: _Multiplier = 3.0


class TreeSettings(PreemptionSettings, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings that a tree's options specify (2.4), with their defaults.

    The options of ``PreemptionSettings`` have defaults here: the values of the root, which pools inherit."""

    fair_share_starvation_timeout: _Milliseconds = 30_000.0
    fair_share_starvation_tolerance: _Share = 0.8
    fair_share_aggressive_starvation_timeout: _Milliseconds = 0.0
    """0: an element that starves is aggressive at once (6.8).

    If ``min_share_preemption_timeout`` is not set, it is the fair-share time-out. If a ``..._limit`` is not set, it is
    the tree's own value of the option that it limits (6.2)."""
    enable_aggressive_starvation: bool = False
    allow_aggressive_preemption: bool = True
    non_preemptible_resource_usage_threshold: _Amounts = {}
    min_run_time: _Milliseconds = 0.0

    nodes_filter: str = ""
    max_operation_count: _Positive = 50_000
    max_operation_count_per_pool: _Positive = 50
    max_running_operation_count: _Positive = 2000
    max_running_operation_count_per_pool: _Positive = 8
    per_pool_counts_for_leaves_only: bool = False
    """Whether the two ``..._per_pool`` options do not apply to pools with sub-pools (2.4)."""
    default_parent_pool: str = ROOT_POOL
    enable_pool_starvation: bool = True
    forbid_immediate_operations_in_root: bool = True
    usage_half_life: _Milliseconds | None = None
    """Value for pools that have none themselves or above them."""
    max_ephemeral_pools_per_user: _Positive = 1
    max_running_operation_count_per_user: _Positive | None = None
    """Counts operations in all pools of the tree; None for no limit (3.2)."""
    max_unpreemptible_running_job_count: _Count | None = 10
    strict_unpreemptible_running_job_count: bool = True
    """Whether only operations with fewer jobs than the value are protected, as YTsaurus documents. If not, operations
    with exactly that number are protected, too (6.4)."""
    preemption_satisfaction_threshold: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)] = 1.0
    aggressive_preemption_satisfaction_threshold: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 0.5
    job_count_preemption_timeout_coefficient: Annotated[float, msgspec.Meta(ge=1.0, le=1e9)] = 1.0
    preemptive_scheduling_backoff: _Milliseconds = 5000.0
    job_preemption_timeout: _Milliseconds = 10_000.0
    job_graceful_preemption_timeout: _Milliseconds = 60_000.0
    enable_conditional_preemption: bool = True
    scheduling_preemption_priority_scope: Literal["operation_only", "operation_and_ancestors"] = (
        "operation_and_ancestors"
    )
    guarantee_tolerance: _Share | None = None
    """A pool gets this fraction of its strong guarantee even by preempting otherwise protected jobs of pools that
    exceed their own guarantees. None: as in YTsaurus, a pool starves only below the tolerated part of its fair share
    (6.10)."""
    preemption_check_starvation: bool = True
    preemption_check_satisfaction: bool = True
    preempt_cpu_gap_first: bool = False
    """Whether, of the jobs in the protected lists, those with a lowered limit are preempted first (6.6 step 4)."""
    preempt_cheapest_first: bool = False
    """Whether jobs that lose the least work are preempted first, rather than those that started last (6.6 step 4)."""
    max_min_run_time: _Milliseconds = 600_000.0
    """Upper bound of the time for which ``min_run_time`` protects a job (6.4)."""
    gang_reservation_timeout: _Milliseconds = 60_000.0
    """How long resources may be reserved for one gang; 0 if they are never reserved (7.3)."""
    share_gang_remainders: bool = False
    """Whether the part of its share that a gang cannot use, since only whole gangs start, goes to others (4)."""
    enable_backfill: bool = False
    """Whether jobs that are expected to end before reserved resources are needed may start there (7.3)."""
    backfill_quantile: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 0.9
    """The expected run time is the time that this fraction of similar jobs did not exceed."""
    backfill_margin: Annotated[float, msgspec.Meta(ge=1.0, le=100.0)] = 1.2
    """The expected run time is multiplied by this factor."""
    integral_guarantees: TreeIntegralGuarantees = TreeIntegralGuarantees()
    should_distribute_free_volume_among_children: bool = False
    main_resource: str = "cpu"
    infer_weight_from_guarantees_share_multiplier: Annotated[float, msgspec.Meta(ge=1.0, le=1e9)] | None = None
    node_reconnection_timeout: _Milliseconds = 300_000.0
    max_preemptions_per_minute: _Count | None = None
    """Limit for the whole tree; None for no limit."""
    fifo_pool_scheduling_order: Literal["fifo", "satisfaction"] = "fifo"
    count_unplaceable_jobs_in_demand: bool = False
    """Whether jobs that fit no node of the tree count in demand, as in YTsaurus (5.2)."""
    enable_memory_reserve: bool = False
    """Whether a job reserves as much memory as earlier jobs of its task used, rather than ``memory_limit`` (8.1). If an
    operation is in several trees, all of them must enable this."""
    default_memory_limit: _Bytes = 0
    """``memory_limit`` of tasks that set none (2.5). 0: jobs of such tasks have no limit and reserve no memory."""
    set_container_cpu_limit: bool | None = None
    """Value for tasks and pools that do not set the option; None: the class of the job decides (1.10)."""
    cpu_monitor_moves: Literal["quota", "weight"] = "quota"
    """For jobs with a ceiling. "weight": it stays at the request. "quota": the node's actuator moves it (1.6)."""
    user_budgets: dict[str, Budget] = {}
    """User -> budget of all jobs of the user in the tree (2.15)."""
    acl: AccessList = None
    inherit_acl: bool = True
    """Has no effect, since there is nothing above a tree from which to inherit."""
    owner: str = ""
    acl_required: bool = False
    """Whether objects are closed to all but administrators if neither they nor anything above has an access list."""


NO_POOL_SETTINGS: Final = PoolSettings()
NO_TREE_SETTINGS: Final = TreeSettings()


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """An explicit pool. ``attributes``: as given, but with canonical names. ``settings``: made of the attributes.

    ``spelled``: canonical option -> the name under which it was set, if that was not the canonical one."""

    id: str
    name: str
    parent: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    settings: PoolSettings = NO_POOL_SETTINGS
    spelled: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """A pool tree: its options as in ``PoolConfig``, and its pools by name; a parent comes before its children."""

    id: str
    name: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    settings: TreeSettings = NO_TREE_SETTINGS
    spelled: Mapping[str, str] = field(default_factory=dict)
    pools: Mapping[str, PoolConfig] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Config:
    """All trees by name, and the default tree ("" if there is none)."""

    trees: Mapping[str, TreeConfig]
    default_tree: str = ""


NAME_REGEX: Final = "[-_a-z0-9:A-Z][-_a-z0-9:A-Z.@]*"
"""Default pattern that the whole name of a pool or tree must match (2.7); names of users match it."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The part of the scheduler's configuration that decisions use. Times are seconds."""

    max_operation_count: int = 5000
    require_specified_pools_existence: bool = False
    ephemeral_pool_name_regex: str = NAME_REGEX
    pool_name_regex: str = NAME_REGEX
    erase_trees_with_pool_limit_violations: bool = False
    heartbeat_period_s: float = 1.0
    node_heartbeat_timeout_s: float = 60.0
    waiting_job_timeout_s: float = 30.0
    unmatched_scheduling_tag_timeout_s: float = 60.0
    """Seconds; 0 if no operation may fail for this reason."""
    operation_hangup_safe_timeout_s: float = 3600.0
    operation_hangup_due_to_limiting_ancestor_safe_timeout_s: float = 300.0
    overcommit_duration_s: float = 15.0
    additional_reclaimed_overcommit_duration_s: float = 0.0
    allowed_node_cpu_overcommit_ratio: float = 0.05
    spare: Vector = (1.0, 0.05, 0.0, 268_435_456.0, 0.0)
    finished_operation_retention_count: int = 1000
    max_specification_memory: int = 67_108_864
    read_monitor: Callable[[Any], dict[str, Any]] = dict
    """Function that checks a ``job_cpu_monitor`` section."""
    node_failures: NodeFailures = DEFAULT_NODE_FAILURES
    vault_keys: VaultKeys | None = None
    """Keys that encrypt secrets (12.6); None if no secrets are kept."""


OperationState = Literal["pending", "running", "completed", "failed", "aborted"]
JobState = Literal["starting", "running", "stopping", "completed", "failed", "aborted", "lost"]
JobClass = Literal["ordinary", "reclaimed"]
CLASSES: Final[tuple[JobClass, JobClass]] = ("ordinary", "reclaimed")
"""Class of a job, indexed by whether the job runs on reclaimed CPU (1.10)."""
FINISHED_OPERATION_STATES: Final = frozenset({"completed", "failed", "aborted"})


class GangOptions(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """``gang_options`` of a task (7.5). ``size``: number of its jobs that have a rank; None for all jobs."""

    size: int | None = None


class Task(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """One task of an operation: ``job_count`` equal jobs, with the request of each job.

    ``command``: a shell command or a list of arguments. ``spec``: the rest of the user's specification, unchanged."""

    name: str
    job_count: int
    cpu_limit: float = 1.0
    memory_limit: int = 0
    user_slots: int = 1
    gpu_limit: float = 0.0
    network: float = 0.0
    command: str | tuple[str, ...] = ""
    environment: dict[str, str] = {}
    interruptible: bool = False
    interruption_signal: str = ""
    """Signal that interrupts a job; "" for SIGTERM. If a signal is named, ``interruptible`` is true."""
    signal_root_process_only: bool = False
    restart_exit_code: int | None = None
    """Exit code of a job that has not failed, but must be started again to do its work."""
    max_stderr_size: int | None = None
    """Maximum bytes of stderr that are kept of a job. The node's own limit also applies, and alone if this is None."""
    redirect_stdout_to_stderr: bool = False
    working_directory: str = ""
    """An absolute path; "" if each job gets a new directory."""
    job_time_limit: float | None = None
    """Milliseconds after which a job is stopped and counts as failed; None for no limit."""
    checkpoints: bool = False
    """Whether its jobs report checkpoints, by touching the file that CPUMOND_CHECKPOINT names."""
    min_run_time: float | None = None
    """Milliseconds after its start in which a job is not preempted; None for the value of the operation."""
    fail_on_job_restart: bool = False
    """Whether the operation fails if a job must be started again; can also be set for all tasks at once."""
    restart_completed_jobs: bool = False
    set_container_cpu_limit: bool | None = None
    """Whether ``cpu_limit`` is also a ceiling of its jobs; None: their pools, tree or class decide (1.10)."""
    user_job_memory_digest_default_value: float | None = None
    user_job_memory_digest_lower_bound: float | None = None
    memory_reserve_factor: float | None = None
    ignore_memory_reserve_factor_less_than_one: bool = False
    user_job_resource_overdraft_memory_multiplier: float | None = None
    """The five options above as given by the user; ``settings.memory_reserve`` defines their meaning (8.1)."""
    retry_policy: tuple[str, ...] | None = None
    """Rules for starting its jobs again (3.9); None if the rules of the pool apply."""
    gang_options: GangOptions | None = None
    """If set, its jobs start and end together (7.5)."""
    spec: dict[str, Any] = {}
    memory_reserve: int = 0
    """Bytes that its next job reserves, computed from earlier jobs; 0 if it reserves ``memory_limit``."""

    @property
    def gang_size(self) -> int:
        """Number of its jobs that have a rank in a gang and must complete."""
        return self.job_count if self.gang_options is None else self.gang_options.size or self.job_count

    @property
    def resources(self) -> Vector:
        """Request of one job in the order of RESOURCES; memory is what the job reserves."""
        memory = float(self.memory_reserve or self.memory_limit)
        return (float(self.user_slots), self.cpu_limit, self.gpu_limit, memory, self.network)


class OperationTreeOptions(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """Options of an operation in one tree (``scheduling_options_per_pool_tree``; section 2.5); None means "not set".

    ``pool``: name of the explicit or ephemeral pool that was chosen for the operation (2.9)."""

    pool: str
    weight: _Weight | None = None
    max_share_ratio: _Share | None = None
    resource_limits: _Amounts = {}
    min_share_resources: _Amounts = {}
    """Strong guarantee of the operation, within that of its pool."""
    fair_share_starvation_timeout: _Milliseconds | None = None
    fair_share_starvation_tolerance: _Share | None = None
    min_share_preemption_timeout: _Milliseconds | None = None
    max_unpreemptible_running_job_count: _Count | None = None
    non_preemptible_resource_usage_threshold: _Amounts | None = None
    min_run_time: _Milliseconds | None = None
    scheduling_tag_filter: str = ""


class JobCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Numbers of finished jobs of one task by how they ended. Aborted and lost jobs are started again."""

    completed: int = 0
    failed: int = 0
    aborted: int = 0
    lost: int = 0


class TaskMemory(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """Memory that jobs of a task used, relative to their ``memory_limit`` (8.1)."""

    samples: dict[int, int] = {}
    """Bucket of the digest -> number of jobs in it."""
    overdrafts: dict[int, float] = {}
    """Cookie of a job that was aborted for lack of memory -> fraction of ``memory_limit`` that the next job with this
    cookie reserves. Kept until a job with the cookie has completed."""


class Retry(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """When and how a retry policy starts a job again (3.9). Kept until a job with the same cookie has completed."""

    used: dict[str, int] = {}
    """Rule -> number of times that the rule started this job again. The rule that was used last is the last key."""
    due: float = 0.0
    """Time before which the job is not started, in seconds since 1970."""
    memory: int = 0
    """Bytes that the job requests; 0 for the value of its task."""


class RetryNote(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """Decision of a retry rule about the end of a job (3.9). ``at``, ``due``: seconds since 1970."""

    job_id: str
    task: str
    cookie: int
    at: float
    rule: str
    kind: str
    """Kind of the failure in words."""
    outcome: Literal["none", "retried", "used_up", "failed"]
    due: float = 0.0
    memory: int = 0
    """As in ``Retry``."""
    left: int = 0
    """Number of retries of the job that the rule still allows."""
    why: str = ""
    """Why the rule allows no more retries, as a sentence."""
    is_counted: bool = True
    """Whether the rule counts this end. It does not if an earlier end of a job in the same run of the gang counts."""
    started: int = 0
    """Number of jobs of the operation that had been started when this job ended."""


class Retried(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """Effects of retry rules on failures of an operation's jobs (3.9)."""

    places: dict[str, dict[int, Retry]] = {}
    """Task -> cookie -> how the job with that cookie is started again."""
    counts: dict[str, int] = {}
    """Rule -> number of jobs that the rule started again."""
    notes: tuple[RetryNote, ...] = ()
    """Notes on the latest failures, oldest first."""


NOT_RETRIED: Final = Retried()


class OperationFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Settings in a specification that concern the operation as a whole."""

    title: str = ""
    alias: str = ""
    preemption_mode: Literal["normal", "graceful"] = "normal"
    is_gang: bool = False
    max_failed_job_count: int = 10
    suspend_on_job_failure: bool = False
    time_limit: float | None = None
    """Milliseconds after ``start_time`` when the operation fails; None for no limit."""
    allow_reclaimed: bool = True
    """Whether its jobs may start on reclaimed CPU (1.10)."""
    require_reclaimed: bool = False
    """Whether all of its jobs run on reclaimed CPU."""
    enable_limiting_ancestor_check: bool = True
    """Whether the operation counts as stuck if limits above it are smaller than its smallest job (3.7)."""
    job_cpu_monitor: dict[str, Any] = {}


SwitchReason = Literal["", "job_failed", "job_aborted", "job_interrupted", "job_lack_after_revival"]


class Incarnation(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """One run of all jobs of an operation with ``gang_options`` (7.5), started ``at`` (seconds since 1970).

    ``reason``: why the previous run ended; "" for the first run. Either job ``job_id`` ended with ``error`` (and with
    ``abort_reason`` if it was aborted), or after a restart the scheduler found ``actual`` instead of ``expected``
    ranked jobs of ``task``."""

    id: str
    at: float
    reason: SwitchReason = ""
    job_id: str = ""
    error: EndError | None = None
    abort_reason: str = ""
    task: str = ""
    expected: int = 0
    actual: int = 0


class OperationRecord(OperationFacts, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """Stored record of an operation. Times are seconds since 1970; ``sequence`` is the order of arrival.

    ``running_in``: trees in which it holds a running slot (3.2). ``state`` is "running" if there is such a tree."""

    id: str
    sequence: int
    user: str
    start_time: float
    tasks: tuple[Task, ...]
    trees: dict[str, OperationTreeOptions]
    type: str = "vanilla"
    state: OperationState = "pending"
    running_in: tuple[str, ...] = ()
    suspended: bool = False
    finish_time: float | None = None
    counts: dict[str, JobCounts] = {}
    uncounted_failures: int = 0
    """Number of failed jobs that do not count towards ``max_failed_job_count``."""
    blamed_failures: int = 0
    """Number of further failed jobs that do not count while all failures are on one node that is blamed (2.14)."""
    aborted_for: dict[str, int] = {}
    """Reason of ``yt`` -> number of jobs aborted for it; without jobs of version 0.2, whose reason is unknown."""
    memory: dict[str, TaskMemory] = {}
    """Memory of jobs by task."""
    error: str = ""
    """Why it failed or was aborted, as a sentence."""
    failure: EndError | None = None
    """``error`` for clients of ``yt``, if its code is not the default one."""
    suspended_for: EndError | None = None
    """Error of the job whose failure suspended the operation."""
    spec: dict[str, Any] = {}
    """Specification as the user gave it."""
    cumulative_spec_patch: dict[str, int] = {}
    """Path -> value of each change that was made to the specification after the start."""
    annotations: dict[str, Any] | None = None
    """Annotations that were set after the start; None if those of ``spec`` apply."""
    parents: dict[str, str] = {}
    """Tree -> removed pool that still contains the operation's ephemeral pool, if their names differ (2.9)."""
    acl: tuple[AccessEntry, ...] = ()
    """Its own access list, in addition to those of its pools (12.3)."""
    vault_bytes: int = 0
    """Size of its secrets, which are stored in a record of their own until it ends (12.6); 0 if it has none."""
    retried: Retried = NOT_RETRIED
    incarnations: tuple[Incarnation, ...] = ()
    """With ``gang_options``: the first run and the latest ones; the present run is last (7.5)."""
    reserved_done: dict[str, int] = {}
    """Task -> number of jobs without a rank that completed in the present incarnation."""
    failed_on: dict[str, int] = {}
    """Node -> number of jobs that failed or could not be started there; only for the first few nodes (3.6)."""

    @property
    def incarnation(self) -> str:
        """Id of the present incarnation; "" if the operation has no ``gang_options``."""
        return self.incarnations[-1].id if self.incarnations else ""

    @property
    def starts_whole(self) -> bool:
        """Whether it is a gang of either kind: if one of its jobs starts again, all do (7.3, 7.5)."""
        return self.is_gang or bool(self.incarnations)

    @property
    def is_finished(self) -> bool:
        return self.state in FINISHED_OPERATION_STATES


class PreemptionRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One preemption: job, beneficiary, reason and freed resources (``why_preempted``). ``at``: seconds since 1970."""

    job_id: str
    operation_id: str
    tree: str
    pool: str
    node_id: str
    at: float
    kind: Literal["preempted", "limit_violated", "overcommit", "graceful", "aborted"]
    why: str
    """The reason as a sentence."""
    freed: dict[str, float]
    preemptor_job_id: str = ""
    preemptor_operation_id: str = ""
    preemptor_pool: str = ""
    priority: Literal["", "normal", "aggressive", "guarantee"] = ""
    lost_core_seconds: float = 0.0
    """Core-seconds of work that the job has to repeat (6.9)."""
    cause: str = ""
    """Reason of ``yt`` for the abort, if ``kind`` does not imply it."""


class Cordon(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Why a node gets no new jobs: ``user`` cordoned it ``at`` (seconds since 1970). ``drain``: whether its jobs are
    also stopped; "graceful" gives them the longer time-out."""

    user: str
    at: float
    why: str = ""
    drain: Literal["", "usual", "graceful"] = ""


class NodeRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A node as it registered. ``key_hash``: hash of its agent's key, "" without a key. ``tree``: that of its jobs, if
    its tags fit several trees. ``tags`` are set by its agent, ``user_tags`` by an administrator. ``user_tags`` and
    ``cordon`` stay when the node registers again."""

    id: str
    incarnation: str
    address: str
    tags: tuple[str, ...]
    capacity: dict[str, float]
    key_hash: str = ""
    tree: str = ""
    cordon: Cordon | None = None
    user_tags: tuple[str, ...] = ()

    @property
    def all_tags(self) -> frozenset[str]:
        """All tags of the node that formulas can match (2.1)."""
        return frozenset([*self.tags, *self.user_tags, self.address])


UNSTORED_STARTS: Final = ("system", "untold_starts")
"""Kind and key of a record of an older version, which did not store the starts of jobs: such jobs may still run."""


class StartRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A started job that has not ended, stored before a heartbeat response contains the start. ``id``: of the job.

    ``stopped``: kind of the preemption record if the job was stopped and a different job may do its work."""

    id: str
    operation_id: str
    task: str
    tree: str
    node_id: str
    start_time: float
    sequence: int
    stopped: Literal["", "preempted", "limit_violated", "overcommit", "graceful", "aborted"] = ""
    why: str = ""
    cause: str = ""
    fails: bool = False
    reclaimed: bool = False
    cookie: int = -1
    job_index: int = -1
    task_job_index: int = -1
    """-1 if an older version started it, which did not number jobs (7.4)."""
    set_container_cpu_limit: bool | None = None
    """Whether the job has a ceiling (1.10); None if that follows from the job's class."""
    memory_reserve: int = 0
    """As ``Job.memory_reserve``."""
    memory_limit: int = 0
    """Bytes that it requested, if a retry policy starts jobs of its operation again; 0 for the value of its task."""
    incarnation: str = ""
    gang_rank: int = -1
    """-1: it has no rank. ``incarnation`` "": it is in no gang (7.5)."""
    counted: CorePair = NOTHING_COUNTED
    """Part of its requested and used core-seconds that stored sums of budgets contain (2.15)."""
    backfill_until: float | None = None
    """As ``Job.backfill_until``."""


class JobRecord(CpuUse, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Stored record of a finished job. CPU times are those that its node reported last; None if it reported none."""

    id: str
    operation_id: str
    task: str
    tree: str
    node_id: str
    state: JobState
    start_time: float
    finish_time: float
    cpu_limit: float
    current_cpu_limit: float
    exit_code: int | None = None
    reason: str = ""
    max_memory: int | None = None
    memory_reserve: int = 0
    """Bytes that it reserved; 0 if it reserved its whole request."""
    memory_limit: int = 0
    """As in ``StartRecord``."""
    preemption: PreemptionRecord | None = None
    cgroup: str = ""
    sequence: int = 0
    """Order of jobs with the same ``start_time``."""
    reclaimed: bool = False
    failure: EndError | None = None
    """Why it failed, if the exit code does not imply that."""
    has_run: bool = True
    """Whether it may have had a process before it ended."""
    not_started: bool = False
    """Whether its node reported that it could not be started, for lack of a directory, user or cgroup."""
    stderr_size: int | None = None
    """Bytes that it wrote to stderr; None if its node did not report the number."""
    cookie: int = -1
    job_index: int = -1
    task_job_index: int = -1
    """-1 if no record with this number was stored when the job started (7.4)."""
    set_container_cpu_limit: bool | None = None
    """As in ``StartRecord``."""

    incarnation: str = ""
    gang_rank: int = -1
    """The job's rank in its gang, -1 if it has none; with ``incarnation`` "" the job is in no gang (7.5)."""
    held_core_seconds: float | None = None
    """Its request times its run time; None if no budget can count that (2.15)."""
    backfill_until: float | None = None
    """As ``Job.backfill_until``."""

    interruption_timeout: float = 0.0
    """Milliseconds that it had to end after it was interrupted; 0 if it was not interrupted."""

    @property
    def has_ceiling(self) -> bool:
        return not self.reclaimed if self.set_container_cpu_limit is None else self.set_container_cpu_limit

    @property
    def job_class(self) -> JobClass:
        return CLASSES[self.reclaimed]

    @property
    def task_name(self) -> str:
        return self.task


class LostNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A node that was declared lost, kept for a while with the ``jobs`` that it had. Times are in seconds since 1970.

    ``cordon`` and ``user_tags`` apply again when the node comes back. A node that has either is kept for longer."""

    id: str
    address: str
    tags: tuple[str, ...]
    capacity: dict[str, float]
    tree: str
    last_seen: float
    lost_at: float
    jobs: tuple[JobRecord, ...] = ()
    cordon: Cordon | None = None
    user_tags: tuple[str, ...] = ()


def to_vector(amounts: Mapping[str, float], missing: float) -> Vector:
    """Return a dictionary of resources as a vector. ``missing``: amount of resources that it does not contain."""
    a, b, c, d, e = (float(amounts.get(name, missing)) for name in RESOURCES)
    return (a, b, c, d, e)


def to_amounts(vector: Vector) -> Resources:
    """Return a vector as a dictionary of all resources."""
    slots, cpu, gpu, memory, network = vector
    return {"user_slots": slots, "cpu": cpu, "gpu": gpu, "memory": memory, "network": network}


def encode_record(record: Any) -> bytes:
    """Encode a record for the store. Raises CommandError for values that cannot be stored."""
    try:
        return msgspec.json.encode(record)
    except (UnicodeEncodeError, TypeError, RecursionError):
        raise CommandError(
            "the command contains text that is not valid UTF-8, or a value that cannot be stored; nothing was changed"
        ) from None
