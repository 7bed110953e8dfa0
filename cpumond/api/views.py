"""Operations and jobs in the JSON API: values that msgspec writes, made from live elements. Pure.

Resources are dictionaries of a resource's name to an absolute amount (cores, bytes); a resource that is missing in
``limits`` has no limit. Shares are fractions of the tree's total. Times are seconds since 1970; names
that end in ``_s`` are durations in seconds. Times of starvation follow semantics.md 6.2, places in the queue 3.3."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, Literal, TypeVar

import msgspec

from cpumond.api.cursors import cut_page
from cpumond.api.figures import Amounts, View, choose_figures, make_view
from cpumond.api.permissions import explain_operation_permissions, hide_secrets
from cpumond.core.wire import CPU_COUNTERS, JobFigures, cpu_times
from cpumond.scheduler.access import Rights
from cpumond.scheduler.answers import resulting
from cpumond.scheduler.answers.causes import Causes, ShownState, find_shown_state
from cpumond.scheduler.decide.cost import spared_until
from cpumond.scheduler.decide.placement import list_alerts, satisfaction
from cpumond.scheduler.decide.snapshot import operation_weight
from cpumond.scheduler.decide.starvation import starves_in_s
from cpumond.scheduler.decide.victims import sort_jobs
from cpumond.scheduler.elements import (
    AGGRESSIVELY_PREEMPTIBLE,
    NON_PREEMPTIBLE,
    PREEMPTIBLE,
    Job,
    Operation,
    OperationElement,
    SchedulingStatus,
    StarvationStatus,
    Tree,
    figures,
)
from cpumond.scheduler.model import (
    NO_SUCH_JOB,
    CommandError,
    Incarnation,
    JobClass,
    JobCounts,
    JobRecord,
    JobState,
    OperationRecord,
    OperationState,
    PreemptionRecord,
    Task,
)
from cpumond.scheduler.rights.entries import AccessEntry
from cpumond.scheduler.settings.operations import needed_jobs, unrecognized_warnings
from cpumond.scheduler.settings.retries import describe_note
from cpumond.scheduler.state import State

V = TypeVar("V", bound="OperationView")


class OperationInTree(View, frozen=True):
    """An operation in one of its trees. ``queue_place``: counted from 1, while the operation is pending there. Other
    fields are as in a pool: ``usage`` is what is allocated to the operation's jobs."""

    pool: str
    is_running: bool
    queue_place: int | None
    weight: float
    job_count: int
    fair_share: Amounts
    fair_share_ratio: float
    fair_share_resource: str
    usage: Amounts
    usage_ratio: float
    usage_resource: str
    demand: Amounts
    limits: Amounts
    satisfaction_ratio: float | None
    scheduling_status: SchedulingStatus
    starvation_status: StarvationStatus
    starves_in_s: float | None
    deactivations: dict[str, int]
    """Reason -> how often the operation was skipped for this reason since the last update."""
    cpu_seconds: float
    reclaimed_cpu_seconds: float
    ordered_cpu_seconds: float
    throttled_cpu_seconds: float
    late_cpu_seconds: float
    cause: str = ""
    """The cause for which the operation waits, as in the groups of operations."""
    why: str = ""
    """The cause as a sentence."""
    scheduling_tag_filter: str = ""
    """The operation's own filter in force now."""


class JobTotals(View, frozen=True):
    """Numbers of an operation's jobs: requested, active, still to be started, and ended by each outcome."""

    total: int
    active: int
    pending: int
    completed: int
    failed: int
    aborted: int
    lost: int


class ForecastTimes(View, frozen=True):
    """The times of a ``Forecast``, seconds since 1970; ``start_...`` null for an operation that has started."""

    start_p10: float | None
    start_p50: float | None
    start_p90: float | None
    end_p10: float | None
    end_p50: float | None
    end_p90: float | None
    as_of: float


class OperationView(View, frozen=True):
    """An operation. ``trees``: empty if it is finished. ``pools``: tree -> pool, also of a finished operation."""

    id: str
    type: str
    user: str
    title: str
    alias: str
    state: OperationState
    shown_state: ShownState
    """``state`` as shown to users: a running operation without jobs is shown as waiting or, if no node can hold one of
    its jobs, as unable to start."""
    suspended: bool
    start_time: float
    finish_time: float | None
    error: str
    pools: dict[str, str]
    jobs: JobTotals
    trees: dict[str, OperationInTree]
    forecast: ForecastTimes | None
    """Latest forecast of start and end; null before the first forecast, and if the operation ended or cannot start."""


class OperationDetails(OperationView, frozen=True):
    """An operation with its specification. ``spec``: as given; ``alerts``: sentences about impossible demands and about
    options without effect.

    ``may``: permission -> "" if the user has it, else why not. Without ``read_secrets`` ``environment_hidden`` replaces
    the environment in ``tasks`` and ``spec``. ``acl``: the operation's own access list.

    ``cpu_seconds`` and the counters after it cover all known jobs of the operation, also of earlier runs of the
    scheduler; the counters in ``trees`` begin at the start of this run."""

    tasks: list[Task]
    counts: dict[str, JobCounts]
    preemption_mode: str
    is_gang: bool
    allow_reclaimed: bool
    require_reclaimed: bool
    max_failed_job_count: int
    time_limit: float | None
    job_cpu_monitor: dict[str, Any]
    incarnations: list[Incarnation]
    """With ``gang_options``: the first incarnations and the latest ones, the present one last (7.5)."""
    retried: list[str]
    """Sentences on what the retry policy did about the latest failures, the newest last (3.9)."""
    next_retry: float | None
    """Seconds since 1970 at which the next of the jobs that wait for a retry is started again."""
    spec: dict[str, Any]
    acl: list[AccessEntry]
    may: dict[str, str]
    alerts: list[str]
    cpu_seconds: float
    reclaimed_cpu_seconds: float
    ordered_cpu_seconds: float
    throttled_cpu_seconds: float
    late_cpu_seconds: float
    lost_core_seconds: float
    """Core-seconds of work that the operation's jobs lost by preemption (6.9)."""
    over_reserve_count: int = 0
    """Number of jobs that use more memory than they reserve (8.1)."""


class OperationList(View, frozen=True):
    """Operations, the newest first. ``total`` counts all that match the filters."""

    operations: list[OperationView]
    total: int
    next: str | None = None
    """The cursor of the next page; None on the last page."""


PREEMPTIBILITY: Final = {
    NON_PREEMPTIBLE: "non_preemptible",
    AGGRESSIVELY_PREEMPTIBLE: "aggressively_preemptible",
    PREEMPTIBLE: "preemptible",
}


class JobView(JobFigures, frozen=True):
    """A job, active or ended. ``preemptibility``: "" if the job is not active. ``preemption``: why it was preempted.

    ``class`` is set at the start (1.10): "reclaimed" runs on CPU that other jobs requested, and is preempted first when
    these need it back. ``has_ceiling``: whether the job's cgroup has a quota, at most ``cpu_limit``
    (``set_container_cpu_limit``). ``backfill_until``: expected end of a job that uses resources reserved for a gang,
    null for others. ``spared_until``: until when ``min_run_time`` protects an active job from preemption, null if it
    does not. ``checkpoint_at``: the last checkpoint, by the node's clock. ``cookie``: place in the task (7.4), -1 if a
    version without cookies started the job. ``incarnation`` and ``gang_rank``: only with ``gang_options`` (7.5); the
    rank is -1 if there is none.

    ``node`` equals ``node_id``. ``cgroup`` is relative to the root of the node's cpu hierarchy, "" before the node has
    reported it. CPU times are from the node's last report, and so are the values of its monitor: ``cpu_usage`` of the
    last check, ``min_cpu_limit`` (the floor), ``votes_sum``, ``throttled_ratio``; null if no node has reported them."""

    id: str
    operation_id: str
    task: str
    tree: str
    node_id: str
    state: JobState
    cpu_limit: float
    current_cpu_limit: float
    start_time: float
    finish_time: float | None = None
    smoothed_cpu_usage: float | None = None
    cpu_monitor_mode: str = ""
    preemptibility: str = ""
    exit_code: int | None = None
    reason: str = ""
    max_memory: int | None = None
    memory_reserve: int = 0
    """Bytes that are reserved for the job; 0 means the whole ``memory_limit`` of its task."""
    preemption: PreemptionRecord | None = None
    node: str = ""
    cgroup: str = ""
    spared_until: float | None = None
    checkpoint_at: float | None = None
    cookie: int = -1
    incarnation: str = ""
    gang_rank: int = -1
    job_class: JobClass = msgspec.field(default="ordinary", name="class")
    has_ceiling: bool = True
    backfill_until: float | None = None


class JobList(View, frozen=True):
    """Jobs of an operation, the last started first. ``total`` counts all that match the filters."""

    operation_id: str
    jobs: list[JobView]
    total: int
    next: str | None = None
    """The cursor of the next page; None on the last page."""


def view_operation_details(rights: Rights, record: OperationRecord, now: float) -> OperationDetails:
    """An operation with its tasks and specification, for a user who may read it."""
    state, may = rights.state, explain_operation_permissions(rights, record)
    told, live = unrecognized_warnings(record.spec), state.operations.get(record.id)
    if may["read_secrets"]:
        record = hide_secrets(record)
    living, ended = living_jobs(state, record.id), state.finished_jobs.get(record.id, {})
    times = [*(cpu_times(job.report) for job in living), *map(cpu_times, ended.values())]
    stopped = [job.stop.record for job in living if job.stop is not None and job.id not in ended]
    stopped += [job.preemption for job in ended.values() if job.preemption is not None]
    used: dict[str, Any] = {name: sum((known[n] or 0.0 for known in times), 0.0) for n, name in enumerate(CPU_COUNTERS)}
    return _view_record(
        OperationDetails,
        state,
        record,
        now,
        _find_places(state, [record]),
        tasks=list(record.tasks),
        incarnations=list(record.incarnations),
        retried=list(map(describe_note, record.retried.notes)),
        next_retry=None if live is None else min(live.later.values(), default=None),
        acl=list(record.acl),
        may=may,
        alerts=[*([text for _, text in list_alerts(live)] if live is not None else []), *told],
        over_reserve_count=sum(job.report.over_reserve for job in living if job.is_active),
        lost_core_seconds=sum(each.lost_core_seconds for each in stopped if each.kind != "aborted"),
        **used,
    )


def living_jobs(state: State, operation_id: str) -> list[Job]:
    """Return an operation's active jobs, and its stopping ones, which may still run."""
    live = state.operations.get(operation_id)
    active = () if live is None else live.elements.values()
    jobs = [job for element in active for job in element.jobs.values()]
    # Operations no longer list jobs that are stopping.
    stopping = (job for node in state.nodes.values() for job in node.stopping.values())
    return jobs + [job for job in stopping if job.element.operation.id == operation_id]


def _view_record(
    kind: type[V], state: State, record: OperationRecord, now: float, places: Places,
    looks: dict[Tree, Causes] | None = None, **more: Any,
) -> V:  # fmt: skip
    """Return an operation's view. ``looks``: tree -> causes of waiting, shared by operations shown together."""
    live = state.operations.get(record.id)
    looks = {} if looks is None else looks
    trees = {} if live is None else {name: _in_tree(each, now, places, looks) for name, each in live.elements.items()}
    shown_state = find_shown_state(record, live)
    return make_view(
        kind,
        record,
        shown_state=shown_state,
        pools={name: options.pool for name, options in record.trees.items()},
        jobs=count_jobs(record, live),
        trees=trees,
        forecast=None if shown_state == "cannot start" else view_forecast(state, record.id),
        **more,
    )


def view_forecast(state: State, operation_id: str) -> ForecastTimes | None:
    """Latest forecast of a live operation."""
    live, found = state.operations.get(operation_id), state.forecasts.get(operation_id)
    if live is None or found is None:
        return None
    # The operation may have started its first job since the forecast.
    has_started = live.active_job_count or state.finished_jobs.get(operation_id)
    times = {"start_p10": None, "start_p50": None, "start_p90": None} if has_started else {}
    return make_view(ForecastTimes, found, **times)


def count_jobs(record: OperationRecord, live: Operation | None) -> JobTotals:
    counts = record.counts.values()
    return JobTotals(
        total=sum(task.job_count for task in record.tasks),
        active=0 if live is None else live.active_job_count,
        pending=0 if live is None else sum(needed_jobs(live.record, live.active).values()),
        **{name: sum(getattr(each, name) for each in counts) for name in JobCounts.__struct_fields__},
    )


def _in_tree(element: OperationElement, now: float, places: Places, looks: dict[Tree, Causes]) -> OperationInTree:
    assert element.parent is not None
    satisfied = satisfaction(element)
    look = looks.get(element.tree)
    if look is None:
        look = looks[element.tree] = Causes(element.tree)
    waiting = look.of(element)
    return make_view(
        OperationInTree,
        element,
        _IN_TREE,
        pool=element.parent.name,
        queue_place=None if element.is_running else places.get(element.tree.name, {}).get(element.name),
        weight=operation_weight(element),
        satisfaction_ratio=satisfied if math.isfinite(satisfied) else None,
        deactivations=dict(element.deactivations),
        cause=waiting.cause.key,
        why=waiting.text,
        starves_in_s=starves_in_s(element, now),
        scheduling_tag_filter=element.options.scheduling_tag_filter,
    )


_IN_TREE: Final = choose_figures(OperationInTree, figures.OPERATION)


OperationOrder = Literal["start_time", "state", "user", "title", "jobs", "usage", "fair_share"]


def find_operations(
    rights: Rights, *, sort: OperationOrder = "start_time", descending: bool = True, cause: str = "",
    causes: Mapping[str, Causes] = {}, **filters: Any,
) -> list[OperationRecord]:  # fmt: skip
    """Return the operations that ``choose_records`` finds by ``filters``, sorted; of equal ones the last started first.

    ``cause``: only operations that wait for this cause (a key in ``causes``) in some tree, or ended in this state."""
    state, chosen = rights.state, choose_records(rights, **filters)
    if cause:
        chosen = [record for record in chosen if cause in causes_of(state, record, causes)]
    chosen.sort(key=lambda record: record.sequence, reverse=True)
    if (sort, descending) != ("start_time", True):
        chosen.sort(key=_order_of(state, sort), reverse=descending)
    return chosen


def cut_operations(
    state: State, found: Sequence[OperationRecord], limit: int, cursor: str, sort: OperationOrder, descending: bool,
    offset: int = 0,
) -> tuple[Sequence[OperationRecord], str | None]:  # fmt: skip
    """Return a page of the operations that ``find_operations`` returned in this order; see ``cut_page``."""
    order = _order_of(state, sort)

    def precedes(one: Any, other: Any) -> bool:
        (value, sequence), (then, number) = one, other
        if value == then:
            return bool(sequence > number)
        return bool(value > then if descending else value < then)

    name = f"{sort} {descending}"
    return cut_page(found, limit, cursor, lambda each: (order(each), each.sequence), precedes, name, offset)


def view_operations(state: State, now: float, records: Iterable[OperationRecord]) -> list[OperationView]:
    shown = [state.record_of(each.id) or each for each in records]
    places = _find_places(state, shown)
    looks: dict[Tree, Causes] = {}
    return [_view_record(OperationView, state, each, now, places, looks) for each in shown]


def choose_records(
    rights: Rights, *, operation_state: str = "", user: str = "", tree: str = "", pool: str = "", search: str = "",
    texts: SearchTexts | None = None,
) -> list[OperationRecord]:  # fmt: skip
    """Return operations that the user may read and that match all filters ("" matches all), live ones first.

    ``operation_state`` "live" is pending or running. ``search`` is looked for in id, title, alias, user and names of
    pools, ignoring case; ``texts`` caches the texts to search."""
    readable = rights.readable(list_records(rights.state))
    if not (operation_state or user or tree or pool or search):
        return readable
    wanted = search.lower()
    texts = SearchTexts() if texts is None else texts
    states = ("pending", "running") if operation_state == "live" else (operation_state,)
    return [
        record
        for record in readable
        if (not operation_state or record.state in states)
        and (not user or record.user == user)
        and (not tree or tree in record.trees)
        and (not pool or _is_in(record, tree, pool))
        and (not wanted or wanted in texts.of(record))
    ]


def causes_of(state: State, record: OperationRecord, causes: Mapping[str, Causes]) -> list[str]:
    """Return the keys of the causes for which an operation waits in its trees, or the state of a finished one."""
    live = state.operations.get(record.id)
    if live is None:
        return [record.state]
    return [causes[name].of(each).cause.key for name, each in live.elements.items() if name in causes]


def _is_in(record: OperationRecord, tree: str, pool: str) -> bool:
    for name, options in record.trees.items():  # noqa: SIM110 - a generator costs twice as much, for each operation
        if options.pool == pool and (not tree or name == tree):
            return True
    return False


def list_records(state: State) -> list[OperationRecord]:
    """Return the records of all operations, live ones first."""
    return [operation.record for operation in state.operations.values()] + list(state.finished.values())


class SearchTexts:
    """Texts for the search of operations: their names in lower case, each on its own line.

    Texts are kept per record, because there may be very many records and an open page searches them every few seconds.
    If a record is replaced, its text is made again."""

    def __init__(self) -> None:
        self._texts: dict[str, tuple[OperationRecord, str]] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def of(self, record: OperationRecord) -> str:
        known = self._texts.get(record.id)
        if known is None or known[0] is not record:
            pools = "\n".join([options.pool for options in record.trees.values()])
            text = f"{record.id}\n{record.title}\n{record.alias}\n{record.user}\n{pools}".lower()
            known = self._texts[record.id] = (record, text)
        return known[1]

    def forget_gone(self, state: State) -> None:
        """Drop the texts of operations that are no longer kept, once there are many."""
        if len(self) > 1.2 * (len(state.operations) + len(state.finished)) + 100:
            self._texts = {
                key: kept for key, kept in self._texts.items() if key in state.operations or key in state.finished
            }


def _order_of(state: State, sort: OperationOrder) -> Callable[[OperationRecord], Any]:
    """Return a function from a record to its sort key; finished operations count as without jobs and share."""
    living = state.operations
    if sort == "jobs":
        return lambda record: living[record.id].active_job_count if record.id in living else 0
    if sort in ("usage", "fair_share"):
        read = figures.OPERATION[f"{sort}_ratio"]
        return lambda record: max(map(read, _elements(living.get(record.id))), default=0.0)
    if sort == "title":
        return lambda record: record.title.lower()[:100]  # short, because a cursor contains it
    return attrgetter("sequence" if sort == "start_time" else sort)


def _elements(live: Operation | None) -> Iterable[OperationElement]:
    return () if live is None else live.elements.values()


Places = Mapping[str, Mapping[str, int]]


def _find_places(state: State, records: Iterable[OperationRecord]) -> Places:
    """Return tree -> operation -> place in the queue from 1 (3.3), for trees in which one of ``records`` is pending."""
    live = (state.operations.get(record.id) for record in records)
    trees = {each.tree.name: each.tree for operation in live for each in _elements(operation) if not each.is_running}
    return {name: {waiting: place for place, waiting in enumerate(tree.queue, 1)} for name, tree in trees.items()}


def list_jobs(state: State, record: OperationRecord) -> list[Job | JobRecord]:
    """Return an operation's jobs, active, stopping and ended."""
    living = living_jobs(state, record.id)
    known = {job.id for job in living}
    return living + [job for job in state.finished_jobs.get(record.id, {}).values() if job.id not in known]


def view_jobs(
    state: State, record: OperationRecord, *, limit: int, offset: int = 0, cursor: str = "", job_state: str = "",
    node_id: str = "",
) -> JobList:  # fmt: skip
    """The jobs of an operation, active and ended, the last started first."""
    chosen = [
        job
        for job in list_jobs(state, record)
        if (not job_state or job.state == job_state) and (not node_id or node_id == job.node_id)
    ]
    chosen.sort(key=order_of_start, reverse=True)
    shown, then = cut_page(chosen, limit, cursor, lambda job: list(order_of_start(job)), operator.gt, offset=offset)
    return JobList(record.id, [view_job(job) for job in shown], len(chosen), then)


def order_of_start(job: Job | JobRecord) -> tuple[float, int, str]:
    """Return a job's sort key in lists; jobs of one heartbeat keep the order in which they were chosen."""
    return job.start_time, job.sequence, job.id


def find_job(state: State, record: OperationRecord, job_id: str) -> JobView:
    """Return a job of an operation, active or ended. Raises CommandError."""
    job = state.jobs.get(job_id)
    if job is not None and job.element.operation.id == record.id:
        return view_job(job)
    ended = state.finished_jobs.get(record.id, {}).get(job_id)
    if ended is None:
        raise CommandError(f"No such job {job_id} in operation {record.id}", NO_SUCH_JOB)
    return view_job(ended)


class BothSpecifications(View, frozen=True):
    """The specification of an operation as given (``provided``) and with all values in force (``resulting``), by
    YTsaurus' names.

    ``resulting`` has ``job_cpu_monitor`` with all of its options, durations in milliseconds, and
    ``job_cpu_monitor_sources``: option -> "default" or "specification". ``note``: values not known here."""

    id: str
    provided: dict[str, Any]
    resulting: dict[str, Any]
    note: str


def view_specification(state: State, record: OperationRecord) -> BothSpecifications:
    """Return the data of the tabs Specification and Resulting specification on an operation's page."""
    found = resulting.resulting_specification(record, state.operations.get(record.id))
    found["job_cpu_monitor_sources"] = resulting.monitor_sources(record.job_cpu_monitor)
    return BothSpecifications(record.id, record.spec, found, resulting.NOTE)


def view_job(job: Job | JobRecord) -> JobView:
    return make_view(JobView, job, node=job.node_id) if isinstance(job, JobRecord) else view_live_job(job)


def view_live_job(job: Job) -> JobView:
    """A job as of its node's last report."""
    if job.is_active:
        sort_jobs(job.element)
    report, stop = job.report, job.stop
    return make_view(
        JobView,
        report,
        operation_id=job.element.name,
        task=job.task.name,
        tree=job.element.tree.name,
        node_id=job.node.id,
        node=job.node.id,
        cpu_limit=job.limits[1],
        current_cpu_limit=job.usage[1],
        cpu_monitor_mode=report.mode,
        preemptibility=PREEMPTIBILITY[job.preemptibility] if job.is_active else "",
        reason="" if stop is None else stop.record.why,
        preemption=None if stop is None else stop.record,
        spared_until=until if job.is_active and math.isfinite(until := spared_until(job)) else None,
        **{name: getattr(job, name) for name in _OF_JOB},
    )


_OF_JOB: Final = (
    "id", "state", "start_time", "memory_reserve", "cookie", "incarnation", "gang_rank", "backfill_until", "job_class",
    "has_ceiling",
)  # fmt: skip
"""Fields of a view that a live job's report does not have, but the job itself."""


class Done(View, frozen=True):
    """A command was carried out. ``id``: the object that the command created or changed."""

    id: str
    warnings: list[str]


class Taken(View, frozen=True):
    """A node's message has arrived; ``is_wanted``: false if no request waits for the message any more."""

    is_wanted: bool


class Failure(View, frozen=True):
    """A request that was refused; nothing was changed. ``code``: as in YTsaurus."""

    error: str
    code: int
    attributes: dict[str, Any]
