"""Bodies and queries of requests of the JSON API, with their bounds."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from cpumond.api import finding, views
from cpumond.core.wire import MAX_LOG_BYTES, LogStream
from cpumond.scheduler.events import EventKind
from cpumond.scheduler.model import Why
from cpumond.scheduler.rights.users import MAX_NAME, Role
from cpumond.scheduler.settings.commands import ConfigCommand
from cpumond.scheduler.settings.rollout import Budget, CanaryPeriod, NodesFilterText, Ratio, StageLevel
from cpumond.scheduler.settings.tree_file import ApplyTree, TreeTables
from cpumond.scheduler.state.token_commands import MAX_NOTE, Life

MAX_PAGE: Final = 1000
MAX_TRENDS: Final = 200
MAX_FILTER_CHARS: Final = 2000
"""Maximum length of a user's formula, which is parsed in the event loop. Formulas of stored stages may be longer."""
DEFAULT_TAIL_BYTES: Final = 65_536
TEXT: Final = "text/plain; charset=utf-8"
NDJSON: Final = "application/x-ndjson"
TOTAL_BYTES: Final = "X-Cpumond-Total-Bytes"
"""Header: number of bytes that a job wrote in total."""
FIRST_BYTE: Final = "X-Cpumond-First-Byte"
"""Header: number of bytes that the job wrote before the first byte of the response."""

_Limit = Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
"""Offset of the first item if no cursor is given; items added or removed between two pages shift the later items."""
_Cursor = Annotated[str, msgspec.Meta(max_length=2000)]
"""`next` of the previous page, "" for the first."""
_Text = Annotated[str, msgspec.Meta(max_length=1000)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
_Since = Annotated[float, msgspec.Meta(gt=0.0, le=34_560_000.0)]
_At = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]
"""Seconds since 1970, 0 for "not given"."""
_Key = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


_Spec = Annotated[
    dict[str, Any],
    msgspec.Meta(
        description=(
            "tasks: name -> job_count, command (text for a shell, or a list of arguments), cpu_limit in cores (1), "
            "memory_limit in bytes (default_memory_limit of the tree), user_slots (1), gpu_limit, network, "
            "environment, interruptible, working_directory (absolute; default: a new one for each job), checkpoints "
            "(its jobs touch the file that CPUMOND_CHECKPOINT names), set_container_cpu_limit (whether cpu_limit is a "
            "ceiling, too). Other keys: pool (the user's name), pool_trees, weight, max_share_ratio, resource_limits, "
            "scheduling_tag_filter (a formula of nodes' tags), scheduling_options_per_pool_tree, title, alias, "
            "preemption_mode, is_gang (all jobs start in one step or none), allow_reclaimed (true), require_reclaimed "
            "(false): whether jobs may, and must, run on reclaimed CPU, min_run_time in ms, max_failed_job_count, "
            "job_cpu_monitor."
        ),
        examples=[
            {
                "pool": "research",
                "tasks": {"main": {"job_count": 4, "cpu_limit": 2.0, "command": "sleep 60"}},
                "job_cpu_monitor": {"enable_cpu_reclaim": True, "min_cpu_limit": 0.1},
            }
        ],
    ),
]
_PoolAttributes = Annotated[
    dict[str, Any],
    msgspec.Meta(
        description="Options of a pool by YTsaurus' names; GET .../pools/{pool} shows those in force.",
        examples=[
            {
                "weight": 2.0,
                "strong_guarantee_resources": {"cpu": 50},
                "resource_limits": {"cpu": 200},
                "max_running_operation_count": 20,
                "integral_guarantees": {"guarantee_type": "relaxed", "resource_flow": {"cpu": 10}},
            }
        ],
    ),
]


class RequestBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of bodies of requests."""


class CreateTreeBody(RequestBody, frozen=True):
    """A tree to create; with ``ignore_existing`` an existing tree of this name is left unchanged."""

    name: _Name
    attributes: dict[str, Any] = {}
    ignore_existing: bool = False


class CreatePoolBody(RequestBody, frozen=True):
    """A pool to create under ``parent``; ``<Root>`` is the root."""

    name: _Name
    parent: _Name = "<Root>"
    attributes: _PoolAttributes = {}
    ignore_existing: bool = False


class ApplyBody(RequestBody, frozen=True):
    """A tree in the wanted state; see ``ApplyTree``. ``base``: the revision that the tree must have now, "" for any."""

    tables: TreeTables
    prune: bool = False
    base: Annotated[str, msgspec.Meta(max_length=100)] = ""
    why: Why = ""


class EditBody(RequestBody, frozen=True):
    """A change of one attribute. ``path`` may lead into dictionaries; a ``value`` of null removes the attribute.

    ``recursive``: create missing dictionaries on the way, also inside attributes that are no options."""

    path: Annotated[list[_Key], msgspec.Meta(min_length=1, max_length=32)]
    value: Any = None
    recursive: bool = False


class EditsBody(RequestBody, frozen=True):
    """Changes of one tree or pool: all of them, or none."""

    edits: Annotated[list[EditBody], msgspec.Meta(min_length=1, max_length=1000)]


class DefaultTreeBody(RequestBody, frozen=True):
    """The default tree, for operations that name no tree; null: no default, and such operations are refused."""

    tree: _Name | None


class MoveBody(RequestBody, frozen=True):
    """A new parent, a new name, or both; null keeps the present one."""

    parent: _Name | None = None
    name: _Name | None = None


class TransferBody(RequestBody, frozen=True):
    """Amounts to move from the pool to ``destination``: ``strong_guarantee_resources``, ``resource_flow``,
    ``burst_guarantee_resources``, ``max_operation_count``, ``max_running_operation_count``."""

    destination: _Name
    delta: dict[str, Any]


class StartBody(RequestBody, frozen=True):
    """An operation to start; tasks, pool and all other options are in ``spec``."""

    spec: _Spec
    type: _Text = "vanilla"


class AbortBody(RequestBody, frozen=True):
    """``message`` is stored as the operation's error; "" for the default one."""

    message: _Text = ""


class SuspendBody(RequestBody, frozen=True):
    """Whether running jobs are stopped, too."""

    abort_running_jobs: bool = False


class AbortJobBody(RequestBody, frozen=True):
    """``interrupt_timeout``: milliseconds in which the job may end by itself, null to kill it at once."""

    interrupt_timeout: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] | None = None


class PatchBody(RequestBody, frozen=True):
    """Changes of an operation's specification; all are made, or none. Each is a map of ``path``
    ("/max_failed_job_count", "/tasks/NAME/job_count") and ``value``."""

    patches: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=1000)]


class PinBody(RequestBody, frozen=True):
    """``cpu_limit``: in cores, null for the job's maximum. ``ttl_s``: seconds until the job is unpinned by itself, null
    if never."""

    cpu_limit: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)] | None = None
    ttl_s: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)] | None = None


class TokenBody(RequestBody, frozen=True):
    """A token to create. ``user`` "": the user of the request. ``role``: "user" may do what access lists allow, "admin"
    everything; "node" registers nodes whose node_id matches ``pattern`` ("": any); "proxy" sends requests for users
    whom it names.

    ``groups``: groups of the token's user in addition to the configured ones. ``expires_s``: seconds from now, null for
    never. Users who are not administrators may only create tokens in their own name, with role "user" and groups that
    they are in."""

    user: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    role: Role = "user"
    pattern: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    groups: Annotated[list[Annotated[str, msgspec.Meta(max_length=MAX_NAME)]], msgspec.Meta(max_length=100)] = []
    expires_s: Life | None = None
    note: Annotated[str, msgspec.Meta(max_length=MAX_NOTE)] = ""


class WhyBody(RequestBody, frozen=True):
    """``why``: a reason, shown at the node and in the audit log."""

    why: Why = ""


class TagsBody(WhyBody, frozen=True):
    """``add``: tags to add to a node; ``remove``: tags to remove that were added in this way."""

    add: Annotated[list[_Name], msgspec.Meta(max_length=1000)] = []
    remove: Annotated[list[_Name], msgspec.Meta(max_length=1000)] = []


class DrainBody(WhyBody, frozen=True):
    """``graceful``: the jobs may take the tree's ``job_graceful_preemption_timeout`` to end."""

    graceful: bool = False


class SimulateBody(RequestBody, frozen=True):
    """An action to simulate; exactly one of these: ``spec``: start an operation. ``command``: change trees or pools, as
    in a plan. ``node``: cordon a node or, with ``drain``, drain it."""

    spec: _Spec | None = None
    command: ConfigCommand | ApplyTree | None = None
    node: _Text | None = None
    drain: bool = False


class ParametersBody(RequestBody, frozen=True):
    """``pool``, ``weight``, ``resource_limits`` and others, for all trees of an operation together or for each tree."""

    parameters: dict[str, Any]


class StageBody(RequestBody, frozen=True):
    """The nodes of a stage: those whose tags match a formula, as in ``nodes_filter`` of a tree; "" for all."""

    nodes_filter: NodesFilterText
    why: Why = ""


class SetStageBody(StageBody, frozen=True, kw_only=True):
    """The highest level that the nodes may use, see ``SetStage``. ``canary_ratio``: the fraction of nodes that uses it
    first, 1 for all at once. ``canary_period_s``: once the first nodes stayed within the budget for this time, all
    others follow automatically; null: they follow only manually."""

    nodes_filter: Annotated[str, msgspec.Meta(max_length=MAX_FILTER_CHARS)]
    level: StageLevel
    canary_ratio: Ratio = 0.1
    canary_period_s: CanaryPeriod | None = None
    budget: Budget = Budget()


class Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of queries, the part of a URL after the question mark."""


class RemoveQuery(Query, frozen=True):
    """``recursive``: include all pools below."""

    recursive: bool = False


class PlanQuery(Query, frozen=True):
    """``everything``: list also objects that do not change."""

    everything: bool = False


class IdleQuery(Query, frozen=True):
    """``pool``: only causes that concern this pool; "" for causes of the whole tree."""

    pool: _Text = ""


class OperationsQuery(Query, frozen=True):
    """Filters; those not given match everything. ``search``: any part of id, title, alias, user or pool; ``cause``: as
    in the groups of operations."""

    limit: _Limit = 100
    offset: _Offset = 0
    cursor: _Cursor = ""
    state: Literal["", "live", "pending", "running", "completed", "failed", "aborted"] = ""
    user: _Text = ""
    tree: _Text = ""
    pool: _Text = ""
    search: _Text = ""
    cause: _Text = ""
    sort: views.OperationOrder = "start_time"
    descending: Literal["true", "false"] = "true"


class JobsQuery(Query, frozen=True):
    """Filters; those not given match everything."""

    limit: _Limit = 100
    offset: _Offset = 0
    cursor: _Cursor = ""
    state: Literal["", "starting", "running", "stopping", "completed", "failed", "aborted", "lost"] = ""
    node: _Text = ""


class LogQuery(Query, frozen=True):
    """A part of one of a job's two logs: the last ``tail`` bytes, or the bytes from ``offset`` of the log on."""

    stream: LogStream = "stdout"
    offset: Annotated[int, msgspec.Meta(ge=0, le=2**62)] | None = None
    tail: Annotated[int, msgspec.Meta(ge=1, le=MAX_LOG_BYTES)] = DEFAULT_TAIL_BYTES


class NodesQuery(Query, frozen=True):
    """Filters; those not given match everything."""

    limit: _Limit = 1000
    offset: _Offset = 0
    cursor: _Cursor = ""
    tree: _Text = ""
    tag: _Text = ""
    online: Literal["", "true", "false"] = ""


class HistoryQuery(Query, frozen=True):
    """A series and a time range. ``tree``: of the pool or operation, "" for the default tree of a pool. There are
    points for the last day; if the range for a pool begins earlier, there is one point per UTC day instead.

    The range is the last ``since_s`` seconds, or from ``since`` to ``until``, both in seconds since 1970."""

    kind: Literal["pool", "operation", "node", "job"]
    name: _Name
    tree: _Text = ""
    since_s: _Since = 3600.0
    since: _At = 0.0
    until: _At = 0.0
    max_points: Annotated[int, msgspec.Meta(ge=1, le=20_000)] = 1500


class ReportQuery(Query, frozen=True):
    """``tree``: "" for all. ``top``: maximum number of operations of each tree, those with the largest requests first.
    A report on more than a day covers whole UTC days, and lists users instead of operations."""

    since_s: _Since = 86_400.0
    tree: _Text = ""
    top: Annotated[int, msgspec.Meta(ge=0, le=MAX_PAGE)] = 100


class SavingsQuery(Query, frozen=True):
    """Savings of the last ``since_s`` seconds, counted in whole UTC days, shown by week. ``tree``: "" for all."""

    since_s: _Since = 2_419_200.0
    tree: _Text = ""


class WasteQuery(Query, frozen=True):
    """``weeks_ago``: 1 for the last whole week (Monday to Monday, UTC), 0 for the present week so far. ``tree``,
    ``user`` and ``pool``: show only their waste, "" for all."""

    weeks_ago: Annotated[int, msgspec.Meta(ge=0, le=57)] = 1
    tree: _Text = ""
    user: _Text = ""
    pool: _Text = ""


class EventsQuery(Query, frozen=True):
    """Filters; those not given match everything. ``pool`` (of the default tree without ``tree``) includes the pools
    below. ``before``: only events with lower numbers, 0 for all. ``since_s``: only events of the last ``since_s``
    seconds, 0 for all. ``since`` and ``until``: only events between these times, in seconds since 1970. ``changes``:
    only changes of trees or pools."""

    limit: _Limit = 50
    before: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0
    since_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] = 0.0
    since: _At = 0.0
    until: _At = 0.0
    kind: EventKind | Literal[""] = ""
    user: _Text = ""
    tree: _Text = ""
    pool: _Text = ""
    node: _Text = ""
    operation: _Text = ""
    changes: Literal["", "true"] = ""


class CanQuery(Query, frozen=True):
    """``object``: a pool of ``tree`` ("" for the default tree), tree:NAME, an operation's id or *alias, or a path.

    ``action``: a permission, or a word of the command line. ``user``: "" for the user of the request. ``groups``:
    groups of a user who does not send this request, separated by commas."""

    action: _Name
    object: _Name
    user: _Text = ""
    tree: _Text = ""
    groups: _Text = ""


class FindQuery(Query, frozen=True):
    """``name``: the beginning of an id, title or alias; "-" for the newest one. ``operation``: the operation whose jobs
    are searched. ``tree``: the tree whose pools are searched ("" for the default tree). ``all_of``: return all matches,
    not only the closest ones. ``within``: include pools, nodes and trees whose names contain ``name`` anywhere."""

    kind: finding.NamedKind
    name: _Text = ""
    operation: _Text = ""
    tree: _Text = ""
    all_of: bool = False
    within: bool = False
    limit: _Limit = 100


class PreemptionsQuery(Query, frozen=True):
    """``operation`` and ``pool``: either of the stopped job, or of the job for which it was stopped. ``group``: the key
    of a group of preemptions."""

    limit: _Limit = 100
    operation: _Text = ""
    pool: _Text = ""
    group: _Text = ""


class TrendsQuery(Query, frozen=True):
    """``pools``: at most 200 names, one per line. The trends cover the last ``since_s`` seconds (a day at most),
    divided into ``count`` intervals."""

    pools: Annotated[str, msgspec.Meta(min_length=1, max_length=5000)]
    since_s: Annotated[float, msgspec.Meta(gt=0.0, le=31_536_000.0)] = 3600.0
    count: Annotated[int, msgspec.Meta(ge=1, le=120)] = 30


class NodeMapQuery(Query, frozen=True):
    """``measure``: what is returned as a fraction of the capacity. ``count``: maximum number of moments, at equal
    distances over the last ``since_s`` seconds."""

    tree: _Text = ""
    measure: Literal["used", "ordered", "reclaimed"] = "used"
    since_s: Annotated[float, msgspec.Meta(gt=0.0, le=86_400.0)] = 86_400.0
    count: Annotated[int, msgspec.Meta(ge=1, le=288)] = 96


class GroupsQuery(Query, frozen=True):
    """Filters, as in the list of operations."""

    user: _Text = ""
    tree: _Text = ""
    pool: _Text = ""
    search: _Text = ""


class PreemptionGroupsQuery(Query, frozen=True):
    """Filters, as in the list of preemptions."""

    operation: _Text = ""
    pool: _Text = ""


class TargetsQuery(Query, frozen=True):
    """``loopback=true``: include agents that listen only for their own host, if Prometheus runs on that host."""

    loopback: Literal["", "true", "false"] = ""
