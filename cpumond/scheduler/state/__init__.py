"""The scheduler's state: its tables, and lookups in them; pure: time and ids are arguments (semantics.md 2 to 9).

Each module has the functions of one subject: ``install`` and ``pools`` (records become live objects), ``lifecycle``
(jobs start and stop), ``nodes``, ``gangs``, ``heartbeats`` (reports are applied), ``dispatch`` (starts, preemptions,
answers), ``starts`` (stored records of starts), ``changes`` (transactions), ``settling``, ``updates``.

There are two kinds of change. A change that must survive a crash is a ``Transaction``: ``prepare`` (a command),
``receive`` (jobs that ended, by a heartbeat), ``settle`` and ``expire`` compute it and change nothing lasting. The
caller stores its records, then ``apply`` installs it. Starts of jobs depend on each other: they are applied first, and
stored before an answer contains them (``starts``). Usage, the other kind, is changed at once and never stored: after a
restart the nodes' heartbeats report it again. Loading a store applies its records."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from cpumond.scheduler.decide import preemption
from cpumond.scheduler.decide.placement import ServiceOrder
from cpumond.scheduler.decide.snapshot import SnapshotMaker
from cpumond.scheduler.elements import Job, Node, Operation, OperationElement, Tree
from cpumond.scheduler.elements.account import Account
from cpumond.scheduler.events import Event
from cpumond.scheduler.model import (
    NO_SUCH_JOB,
    NO_SUCH_OPERATION,
    RESOLVE,
    CommandError,
    Config,
    JobRecord,
    LostNode,
    OperationRecord,
    PreemptionRecord,
    Rules,
    StartRecord,
)
from cpumond.scheduler.model.forecast import Forecast
from cpumond.scheduler.rights.token_records import TokenTable
from cpumond.scheduler.rights.vaults import SealedVault
from cpumond.scheduler.settings.nodes_filter import NodesFilter
from cpumond.scheduler.state.gang_table import GangTable
from cpumond.scheduler.state.refused import RefusedStarts
from cpumond.scheduler.state.spec_room import SpecRoom
from cpumond.scheduler.state.stage_table import StageTable

KEPT_PREEMPTIONS = 10_000


@dataclass(slots=True)
class TreeWork:
    """Derived data of one tree between updates; removed with the tree."""

    maker: SnapshotMaker
    filter: NodesFilter
    order: ServiceOrder | None = None
    """None if it must be computed again, since shares or the pools above an operation have changed."""
    targets: preemption.Targets | None = None
    """Operations that may preempt: those that starved at the last update. None if ``order`` is None."""
    is_freed: bool = False
    """Whether the whole queue must be checked: a slot became free, or limits changed (3.3)."""
    arrived: dict[str, OperationElement] = field(default_factory=dict)
    """Pending operations that came since the last ``settle``; earlier ones were blocked then and still are."""

    def forget_order(self) -> None:
        self.order = self.targets = None


class State:
    """All tables of the scheduler. Used by one thread; not safe for more."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.config = Config({})
        self.trees: dict[str, Tree] = {}
        self.work: dict[str, TreeWork] = {}
        """By tree."""
        self.operations: dict[str, Operation] = {}
        """Live operations, pending or running, in order of arrival."""
        self.finished: dict[str, OperationRecord] = {}
        """Finished operations, in the order in which they finished."""
        self.finished_jobs: dict[str, dict[str, JobRecord]] = {}
        """Operation -> finished jobs of the operation by id. Kept as long as the operation is known."""
        self.vaults: dict[str, SealedVault] = {}
        """Secrets of live operations, by operation (12.6)."""
        self.spec_room = SpecRoom(rules.max_specification_memory)
        self.config_bytes = 0
        self.tokens = TokenTable()
        self.stages = StageTable()
        self.budgets: dict[str, Account] = {}
        """By ``BudgetRecord.key``."""
        self.budgets_settled_at = 0.0
        """Time of the last settlement of live jobs (2.15)."""
        self.nodes: dict[str, Node] = {}
        self.starts_of: dict[str, dict[str, StartRecord]] = {}
        """Removed node -> jobs that an earlier run started there, by id."""
        self.jobs: dict[str, Job] = {}
        """Active and stopping jobs."""
        self.gangs = GangTable()
        self.refused_nodes: dict[str, tuple[float, tuple[str, ...]]] = {}
        """Node refused because its tags fit several trees -> time of its last attempt to register, and the trees."""
        self.preemptions: deque[PreemptionRecord] = deque(maxlen=KEPT_PREEMPTIONS)
        self.preemption_counts: dict[tuple[str, str, str], int] = {}
        """(tree, pool of the preempted job, kind) -> number of preemptions since the scheduler started."""
        self.happened: deque[Event | PreemptionRecord] = deque(maxlen=0)
        """Events that no stored record implies. An event log replaces this deque by a bounded one, and empties it."""
        self.held: dict[str, None] = {}
        """Nodes held off because jobs fail on them (2.14)."""
        self.lost_nodes: dict[str, LostNode] = {}
        """Nodes declared lost less than LOST_S ago that have not come back, in the order in which they were lost."""
        self.ended_elements: deque[OperationElement] = deque(maxlen=0)
        """Operations that left a tree. A history replaces this deque by a bounded one, which it empties."""
        self.refused_starts = RefusedStarts()
        self.forecasts: Mapping[str, Forecast] = {}
        """Latest forecast by operation. The forecaster replaces the map; some of its operations may have ended."""
        self.sequence = 0
        self.job_sequence = 0
        self.period_s = rules.heartbeat_period_s
        """Heartbeat period that the nodes are told to keep."""
        self.settled_config: Config | None = None
        """Configuration that the last ``settle`` processed."""
        self.deadlines: list[tuple[float, str]] = []
        """A heap of deadlines (``time_limit``) with operations' ids; some of the operations may have ended."""
        self.retries: list[tuple[float, str]] = []
        """A heap of times at which jobs start again, with operations' ids; some entries may be outdated (3.9)."""
        self.cut_short: dict[str, None] = {}
        """Operations that fail because the scheduler restarted before all of their jobs had been started."""
        self.unmatched: dict[str, float] = {}
        """Operation that fits no online node -> time since which this scheduler has observed that (2.13)."""
        self.stuck_at = 0.0
        """Time of the last check for stuck operations."""
        self.expired: dict[tuple[str, str], None] = {}
        """(kind, key) of stored records to delete."""
        self.contested: dict[str, float] = {}
        """Job whose limit another program sets -> time of the last log entry on it."""
        self.unstored: dict[str, Job] = {}
        """Jobs whose start is not stored yet; some of them may have ended."""
        self.unstored_stops: dict[str, Job] = {}
        """Jobs whose start is stored, but not yet their stop. Replacements of these jobs are stored after the stop."""
        self.has_unstored_starts = False
        self.awaited: dict[str, None] = {}
        self.await_until = 0.0
        """``has_unstored_starts``: whether a version that stored no starts may have started jobs. ``awaited``: if so,
        the nodes without a heartbeat so far. ``await_until``: until when no job starts in their trees."""

    def record_of(self, operation_id: str) -> OperationRecord | None:
        """Return the record of an operation that is live or finished and still known."""
        live = self.operations.get(operation_id)
        return self.finished.get(operation_id) if live is None else live.record

    def find_record(self, operation_id: str) -> OperationRecord:
        """Return the record of an operation, by id or ``*alias``. Raises CommandError."""
        record = self.record_of(operation_id)
        if record is None and operation_id.startswith("*"):
            known = [*(each.record for each in self.operations.values()), *reversed(self.finished.values())]
            record = next((each for each in known if each.alias == operation_id), None)
        if record is None:
            raise CommandError(f"No such operation {operation_id}", NO_SUCH_OPERATION)
        return record

    def find_live_job(self, job_id: str, operation_id: str = "") -> Job:
        """Return a job that has not ended, of the given operation (id or ``*alias``) if any. Raises CommandError."""
        job = self.jobs.get(job_id)
        is_its = job is None or not operation_id or self.find_record(operation_id).id == job.element.operation.id
        if job is None or not is_its:
            where = f" in operation {operation_id}" if operation_id else ""
            raise CommandError(f"No such job {job_id}{where}, or it has ended", NO_SUCH_JOB)
        return job

    def find_job_node(self, operation_id: str, job_id: str) -> str:
        """Return the node that a job of an operation (id or ``*alias``) runs or ran on. Raises CommandError."""
        record = self.find_record(operation_id)
        job = self.jobs.get(job_id)
        if job is not None and job.element.operation.id == record.id:
            if not job.was_reported:
                text = f"job {job_id} has not started yet on node {job.node.id}; try again"
                raise CommandError(text, NO_SUCH_JOB, {"try_again": True})
            return job.node.id
        if (ended := self.finished_jobs.get(record.id, {}).get(job_id)) is None:
            raise CommandError(f"No such job {job_id} in operation {record.id}", NO_SUCH_JOB)
        return ended.node_id

    def find_tree(self, name: str) -> Tree:
        """Return a tree by name. Raises CommandError."""
        tree = self.trees.get(name)
        if tree is None:
            raise CommandError(f'Pool tree "{name}" does not exist; known trees: {", ".join(self.trees)}', RESOLVE)
        return tree

    def match_trees(self, tags: frozenset[str]) -> list[str]:
        return [name for name, work in self.work.items() if work.filter.matches(tags)]

    def take_expired(self) -> list[tuple[str, str]]:
        """Return (kind, key) of stored records that are no longer kept; the caller deletes them."""
        expired, self.expired = list(self.expired), {}
        return expired
