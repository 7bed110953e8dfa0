"""Counts core-hours against budgets, each exactly once; pure (semantics.md 2.15).

The amount of a job is in its last report while the job lives, and in its ``JobRecord`` once it has ended.
``Job.settled``, stored with the job's start, is the part of the amount that stored sums contain. A sum and its parts
are written together; therefore a killed scheduler loses nothing and counts nothing twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from cpumond.scheduler.decide.admission import find_place
from cpumond.scheduler.elements import Element, Job, Operation, OperationElement, PoolElement, reported_core_seconds
from cpumond.scheduler.elements.account import Account
from cpumond.scheduler.model import Config, JobRecord
from cpumond.scheduler.model.budget import (
    KEPT_DAYS,
    LOW,
    NOTHING_COUNTED,
    SPENT,
    Budget,
    BudgetRecord,
    CorePair,
    Level,
    add_days,
)
from cpumond.scheduler.state import State
from cpumond.scheduler.state.transaction import NOTHING, Transaction

SETTLE_S = 3600.0
"""Seconds between settlements of live jobs. Of a job lost while no scheduler runs, at most this time is not counted."""


def list_budgets(config: Config) -> Iterator[tuple[str, str, BudgetRecord, Budget]]:
    """Yield (name of the tree, name of the pool or user, an empty record, the option) for each budget."""
    for tree in config.trees.values():
        for pool in tree.pools.values():
            if pool.settings.budget.core_hours is not None:
                yield tree.name, pool.name, BudgetRecord(tree.id, "pool", pool.id, 0.0), pool.settings.budget
        users = [each for each in tree.settings.user_budgets.items() if each[1].core_hours is not None]
        for user, budget in users:
            yield tree.name, user, BudgetRecord(tree.id, "user", user, 0.0), budget


def sync(state: State, now: float) -> None:
    """Make the accounts match the configuration's budgets, and put each live operation into its accounts."""
    before, state.budgets = state.budgets, {}
    for tree, name, empty, budget in list_budgets(state.config):
        fresh = msgspec.structs.replace(empty, since=now, day=budget.find_day("", now))
        account = before.get(empty.key) or Account(fresh)
        state.budgets[empty.key] = account
        account.tree, account.name, account.budget = tree, name, budget
    if not before and not state.budgets:
        return
    state.expired.update({("budget", key): None for key in before.keys() - state.budgets.keys()})
    for of_tree in state.trees.values():
        for pool in of_tree.pools.values():
            pool.account = None
            if pool.config is not None:
                pool.account = state.budgets.get(BudgetRecord(of_tree.config.id, "pool", pool.config.id, 0.0).key)
    jobs: dict[Element, list[Job]] = {}
    for job in state.jobs.values():
        jobs.setdefault(job.element, []).append(job)
    for operation in state.operations.values():
        place(state, operation, jobs)
    mark(state)


def restore(state: State, records: Iterable[BudgetRecord]) -> None:
    """Restore stored records before operations are loaded."""
    for record in records:
        if record.key in state.budgets:
            state.budgets[record.key].record = record
        else:
            state.expired["budget", record.key] = None
    mark(state)


def find_accounts(state: State, pool: PoolElement, user: str) -> tuple[Account, ...]:
    """Return the accounts of the budgets against which an operation of ``user`` in ``pool`` is counted."""
    own = state.budgets.get(BudgetRecord(pool.tree.config.id, "user", user, 0.0).key)
    return tuple(each for each in (*(above.account for above in (pool, *pool.ancestors())), own) if each is not None)


def place(state: State, operation: Operation, jobs: Mapping[Element, list[Job]] | None = None) -> None:
    """Move an operation to the accounts of its present pools, with the unsettled amounts of its live jobs.

    ``jobs``: the live jobs of each element, if the caller has them."""
    for element in operation.elements.values():
        assert element.parent is not None
        accounts = find_accounts(state, element.parent, operation.record.user)
        if accounts != element.accounts and operation.next_index:
            known = state.jobs.values() if jobs is None else jobs.get(element, ())
            for job in [each for each in known if each.element is element]:
                _count(element.accounts, job, -1.0)
                _count(accounts, job, 1.0)
        element.accounts = accounts
        _mark_operation(element)


def forget(job: Job) -> None:
    """Subtract from the accounts the unsettled amount of a job that leaves."""
    _count(job.element.accounts, job, -1.0)


def _count(accounts: Iterable[Account], job: Job, sign: float) -> None:
    ordered, used = reported_core_seconds(job, job.report)
    for account in accounts:
        account.count(sign * (ordered - job.settled[0]), sign * (used - job.settled[1]))


def mark(state: State) -> None:
    """Mark the pools and operations that are restricted because a budget is spent."""
    for tree in state.trees.values():
        for pool in tree.pools.values():
            is_left = pool.account is not None and pool.account.holds_back("leftover")
            pool.yields = "weight" if is_left else "guarantee" if pool.parent is not None and pool.parent.yields else ""
        for element in tree.operations.values():
            _mark_operation(element)
            element.entry = None
            tree.changed[element] = None
        state.work[tree.name].forget_order()


def _mark_operation(element: OperationElement) -> None:
    element.spent = next((each for each in element.accounts if each.holds_back("stop")), None)
    element.yields = any(each.record.kind == "user" and each.holds_back("leftover") for each in element.accounts)


def settle(state: State, change: Transaction, jobs: Iterable[Job] = ()) -> Transaction:
    """Return ``change`` with new stored sums; they include its ended jobs, ``jobs``, and jobs that change budgets."""
    if change.budgets or change.settled:
        return change
    if not state.budgets and (change.config is None or next(list_budgets(change.config), None) is None):
        return change
    added: dict[Account, CorePair] = {}
    settled: dict[str, CorePair] = {}
    for record in change.jobs:
        accounts, before = _find_settled(state, record)
        _add(added, accounts, counted_of(record, before), before)
    ended = {job.id for job in change.jobs}
    for job in {job.id: job for job in (*jobs, *_find_moved(state, change))}.values():
        told = reported_core_seconds(job, job.report)
        if job.id not in ended and job.is_stored and told != job.settled:
            settled[job.id] = told
            _add(added, job.element.accounts, told, job.settled)
    records = tuple(msgspec.structs.replace(each.record, days=each.grow(*pair)) for each, pair in added.items())
    return msgspec.structs.replace(change, budgets=records, settled=settled)


def _add(added: dict[Account, CorePair], accounts: Iterable[Account], told: CorePair, before: CorePair) -> None:
    for account in accounts:
        ordered, used = added.get(account, NOTHING_COUNTED)
        added[account] = (ordered + told[0] - before[0], used + told[1] - before[1])


def counted_of(record: JobRecord, before: CorePair = NOTHING_COUNTED) -> CorePair:
    """Return the amount of an ended job. ``before``: returned in place of an amount that the record does not have."""
    ordered = record.ordered_cpu_seconds if record.held_core_seconds is None else record.held_core_seconds
    return (before[0] if ordered is None else ordered, before[1] if record.cpu_seconds is None else record.cpu_seconds)


def _find_settled(state: State, record: JobRecord) -> tuple[tuple[Account, ...], CorePair]:
    """Return the accounts of a job that ends, and the part of its amount that stored sums contain."""
    job, node = state.jobs.get(record.id), state.nodes.get(record.node_id)
    if job is not None:
        return job.element.accounts, job.settled
    before = NOTHING_COUNTED
    if (counted := state.finished_jobs.get(record.operation_id, {}).get(record.id)) is not None:
        before = counted_of(counted)
    elif node is not None and (start := node.former_starts.get(record.id)) is not None:
        before = start.counted
    operation, tree = state.record_of(record.operation_id), state.trees.get(record.tree)
    if operation is None or tree is None or record.tree not in operation.trees:
        return (), before
    pool = find_place(tree, operation.trees[record.tree].pool, operation.user)
    return find_accounts(state, pool, operation.user), before


def _find_moved(state: State, change: Transaction) -> Iterator[Job]:
    """Return jobs that may count against different budgets after the change."""
    if change.config is not None and _layout(state, change.config) != _layout(state, state.config):
        yield from state.jobs.values()
    moved = {
        operation.elements[name]
        for record in change.operations
        if (operation := state.operations.get(record.id)) is not None
        for name, options in record.trees.items()
        if name in operation.elements and operation.elements[name].options.pool != options.pool
    }
    yield from (job for job in state.jobs.values() if job.element in moved) if moved else ()


def _layout(state: State, config: Config) -> object:
    """Return a value that differs if operations count against different budgets; only pools with operations matter."""
    pools = [
        (pool.id, pool.name, pool.parent)
        for tree in config.trees.values()
        for pool in tree.pools.values()
        if (living := state.trees[tree.name].pools.get(pool.name) if tree.name in state.trees else None) is not None
        and living.operation_count
    ]
    above = [(tree.id, tree.settings.default_parent_pool) for tree in config.trees.values()]
    return [record.key for _, _, record, _ in list_budgets(config)], pools, above


def take(state: State, change: Transaction) -> None:
    """Apply the stored sums of a change. This comes before all other parts of the change."""
    is_other = False
    for record in change.budgets:
        account = state.budgets[record.key]
        is_other |= account.record.level != record.level
        account.record = record
    for job_id, told in change.settled.items():
        job = state.jobs.get(job_id)
        if job is not None:
            for account in job.element.accounts:
                account.count(job.settled[0] - told[0], job.settled[1] - told[1])
            job.settled = told
    for ended in change.jobs:
        if ended.id in state.jobs:
            forget(state.jobs[ended.id])
    if is_other:
        mark(state)


def look(state: State, now: float) -> Transaction:
    """Process the passage of time: budgets become low or spent, periods begin. Settle live jobs hourly and daily."""
    change = NOTHING
    is_new_day = any(each.record.day != each.day(now) for each in state.budgets.values())
    if is_new_day or now - state.budgets_settled_at >= SETTLE_S:
        state.budgets_settled_at = now
        change = settle(state, NOTHING, [job for job in state.jobs.values() if job.element.accounts])
    records = {record.key: record for record in change.budgets}
    for key, account in state.budgets.items():
        looked = _look_at(account, records.get(key, account.record), now)
        if looked != account.record:
            records[key] = looked
    return msgspec.structs.replace(change, budgets=tuple(records.values()))


def _look_at(account: Account, record: BudgetRecord, now: float) -> BudgetRecord:
    budget, day, spent = account.budget, account.day(now), account.spent_s(now)
    period = budget.first_day(day)
    level: Level = SPENT if spent >= budget.limit_s else LOW if spent >= budget.warn_ratio * budget.limit_s else 0
    if (record.budget, record.period) == (budget, period) and record.level > level:
        level = record.level  # since a restart some jobs were not reported: the sum lacks them
    oldest = min(period, add_days(day, -KEPT_DAYS))
    days = record.days if day == record.day else {name: pair for name, pair in record.days.items() if name >= oldest}
    return msgspec.structs.replace(record, day=day, period=period, level=level, budget=budget, days=days)
