"""Trends of pools, operations grouped by cause, and preemptions, in the JSON API. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from cpumond.api.figures import View
from cpumond.api.node_views import group_of
from cpumond.fairshare.resources import CPU
from cpumond.scheduler.access import Rights
from cpumond.scheduler.answers.causes import Cause, Causes, find_shown_state
from cpumond.scheduler.model import OperationRecord, PreemptionRecord
from cpumond.scheduler.state import State


class PoolTrends(View, frozen=True):
    """Cores that pools were allowed to use: pool -> means over intervals of ``step_s`` seconds from ``since`` on, null
    where unknown. Pools without data are left out."""

    tree: str
    since: float
    step_s: float
    pools: dict[str, list[float | None]]


class OperationGroup(msgspec.Struct):
    """Operations that wait for the same cause, or ended operations with the same state.

    ``pool``: the pool that is the cause, if any. ``jobs``: number of jobs that are still to be started; they request
    ``wanted_cores``. ``limit_cores``: allocated to the running jobs."""

    cause: str
    kind: str
    tree: str
    pool: str
    why: str
    operations: int = 0
    jobs: int = 0
    wanted_cores: float = 0.0
    limit_cores: float = 0.0


class OperationGroups(View, frozen=True):
    """The groups, those with the largest demand first. An operation of several trees counts in each of them.
    ``states``: ``shown_state`` -> number of live operations; each operation counts once."""

    groups: list[OperationGroup]
    states: dict[str, int]


class PreemptionGroup(View, frozen=True):
    """Preemptions of one ``kind`` for the same ``preemptor_pool``, "" if they were for no pool. ``priority``: whether
    they were for a starving pool or operation, and how urgent they were.

    ``freed_cores`` and ``lost_core_seconds`` are sums. ``pools``: the pools that lost jobs, most first; ``operations``:
    number of operations that lost jobs. ``why``: reason of the newest preemption; ``last_at``: its time."""

    group: str
    kind: str
    tree: str
    preemptor_pool: str
    priority: str
    count: int
    operations: int
    pools: list[str]
    freed_cores: float
    lost_core_seconds: float
    last_at: float
    why: str


class PreemptionGroups(View, frozen=True):
    """Groups of the ``kept`` preemptions, which are from ``since`` on; the group with the newest one comes first."""

    groups: list[PreemptionGroup]
    kept: int
    since: float | None


class OperationCounts:
    """Counts the operations of each group. The operations are added in parts."""

    def __init__(self, state: State, causes: Mapping[str, Causes]) -> None:
        self._state = state
        self._causes = causes
        self._groups: dict[tuple[Cause | str, str], OperationGroup] = {}
        self.states: dict[str, int] = {}

    def add(self, records: Iterable[OperationRecord]) -> None:
        living, states = self._state.operations, self.states
        for record in records:
            live = living.get(record.id)
            if live is None:
                if record.is_finished:
                    self._ended(record.state).operations += 1
                continue
            is_never = not live.active_job_count and bool(live.needed and live.elements)
            needed_jobs = live.needed_job_count
            for name, element in live.elements.items():
                causes = self._causes.get(name)
                if causes is None:
                    is_never = is_never and bool(element.explain_unplaceable())
                    continue
                cause, wanted_cores, excess = causes.of(element)
                is_never = is_never and bool(excess)
                group = self._groups.get((cause, name)) or self._group(cause, name)
                group.operations += 1
                group.limit_cores += element.usage[CPU]
                if needed_jobs:
                    group.jobs += needed_jobs
                    group.wanted_cores += wanted_cores
            state = find_shown_state(record, live, "yes" if is_never else "")
            states[state] = states.get(state, 0) + 1

    def finish(self) -> OperationGroups:
        groups = sorted(self._groups.values(), key=lambda each: (-each.wanted_cores, each.tree == "", -each.operations))
        return OperationGroups(groups, dict(self.states))

    def _group(self, cause: Cause, tree: str) -> OperationGroup:
        made = OperationGroup(cause.key, cause.kind, tree, cause.pool, cause.text)
        return self._groups.setdefault((cause, tree), made)

    def _ended(self, state: str) -> OperationGroup:
        return self._groups.setdefault((state, ""), OperationGroup(state, state, "", "", state))


def group_preemptions(records: Iterable[PreemptionRecord], rights: Rights) -> PreemptionGroups:
    """Group preemptions, which must be given the newest first; ``rights`` decide which sentences are shown."""
    by_key: dict[str, list[PreemptionRecord]] = {}
    for record in records:
        by_key.setdefault(group_of(record), []).append(record)
    groups = [_view_group(key, found, rights) for key, found in by_key.items()]
    oldest = min((found[-1].at for found in by_key.values()), default=None)
    return PreemptionGroups(groups, sum(each.count for each in groups), oldest)


def _view_group(key: str, records: list[PreemptionRecord], rights: Rights) -> PreemptionGroup:
    newest, pools = records[0], dict[str, int]()
    seen = rights.see_preemption(newest)
    for record in records:
        pools[record.pool] = pools.get(record.pool, 0) + 1
    return PreemptionGroup(
        group=key, kind=newest.kind, tree=newest.tree, preemptor_pool=newest.preemptor_pool, priority=newest.priority,
        count=len(records), operations=len({record.operation_id for record in records}),
        pools=sorted(pools, key=lambda name: -pools[name]),
        freed_cores=sum(record.freed.get("cpu", 0.0) for record in records),
        lost_core_seconds=sum(record.lost_core_seconds for record in records), last_at=newest.at,
        why="" if seen is None else seen.why,
    )  # fmt: skip
