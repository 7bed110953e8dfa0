"""Makes events of changes without a command: nodes, preemptions, failed operations, contested limits. Pure.

Events of a transaction are stored in the same write (``make_change_events``). Observations (``noticed``, preemptions)
are put into ``State.happened`` when they are made, and stored in the next period (``make_noticed_events``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from cpumond.core.measures import count_cores
from cpumond.core.wire import NodeRegistration
from cpumond.core.words import count, printable, quoted
from cpumond.scheduler.elements import Tree
from cpumond.scheduler.elements.account import CONSEQUENCES, Account
from cpumond.scheduler.event_log.commands import name_operation
from cpumond.scheduler.events import Event, IndexedEvent, Subjects
from cpumond.scheduler.events.noticed import make_returned_event
from cpumond.scheduler.model import CommandError, NodeRecord, OperationRecord, PreemptionRecord
from cpumond.scheduler.model.budget import HOUR_S, SPENT, BudgetRecord
from cpumond.scheduler.state import State
from cpumond.scheduler.state.transaction import Transaction

MAX_NODES: Final = 100
"""Maximum number of nodes by which an event about preemptions can be found."""


def make_start_event(now: float, version: str, term: int) -> Event:
    """Make the event that the scheduler loaded its state and begins. ``term``: its term as leader, 0 if alone."""
    if term:
        text = f"this scheduler, version {version}, leads in term {term}"
        return Event(at=now, kind="take_over", text=text, term=term)
    return Event(at=now, kind="started", text=f"the scheduler, version {version}, started")


def make_refused_node_event(registration: NodeRegistration, refusal: CommandError, now: float) -> IndexedEvent:
    name, why = registration.node_id, str(refusal)
    text = f"node {quoted(name)} may not register: {why}"
    return Subjects(Event(at=now, kind="refused", text=text, node=name, command="register_node", refused=why)).index()


def make_change_events(state: State, change: Transaction, now: float) -> Iterator[IndexedEvent]:
    """Make the events of those changes of a transaction that no command names. ``state``: the state before it."""
    for node_record in change.nodes:
        event = _make_registration_event(state, node_record, now)
        if event is not None:
            yield Subjects(event).index()
    jobs_of = {name: [job for job in change.jobs if job.node_id == name] for name in change.removed_nodes}
    for name, jobs in jobs_of.items():
        node = state.nodes[name]
        lost = sum(job.state == "lost" for job in jobs)
        silent = f"silent for {now - node.last_seen:.0f} s, with {count(lost, 'job')}"
        text = f"node {quoted(name)} was declared lost, {silent}"
        event = Event(at=now, kind="node_lost", text=text, node=name, tree=node.tree or "")
        yield Subjects(event).add("operation", {job.operation_id for job in jobs}).index()
    for record in change.operations:
        if record.state == "failed" and record.id in state.operations:
            yield _make_failure_event(state.trees, record, now)
    for budget in change.budgets:
        account = state.budgets.get(budget.key)
        if account is not None and (text := _describe_budget(account, budget, now)):
            pool = account.name if budget.kind == "pool" else ""
            event = Event(at=now, kind="budget", text=text, tree=account.tree, pool=pool)
            told = Subjects(event).add_pools(state.trees, [(account.tree, pool)] if pool else ()).index()
            yield told if pool else IndexedEvent(event, (*told.subjects, f"user:{account.name}"))


def _describe_budget(account: Account, record: BudgetRecord, now: float) -> str:
    """Describe a budget's new record; "" if nothing but the spent amount changed."""
    before, budget = account.record, account.budget
    what = f"the budget of {record.kind} {quoted(account.name)} in tree {quoted(account.tree)}"
    if before.period and before.period != record.period and before.budget.period == budget.period != "rolling":
        spent = before.budget.sum_from(before.period, account.grow(*account.live)) / HOUR_S
        limit = before.budget.core_hours or 0.0
        return f"{what} starts again on {record.period}; {spent:.6g} of {limit:.6g} core-hours were spent before"
    amounts = f"{account.spent_s(now) / HOUR_S:.6g} of {budget.core_hours or 0.0:.6g} core-hours {budget.counts}"
    if record.level == before.level:
        return ""
    if record.level == SPENT:
        return f"{what} is spent, {amounts}: {CONSEQUENCES[budget.when_spent]}"
    return f"{what} is {'low' if record.level > before.level else 'enough again'}: {amounts}"


def _make_registration_event(state: State, record: NodeRecord, now: float) -> Event | None:
    known = state.nodes.get(record.id)
    tree = next(iter(state.match_trees(record.all_tags)), "")
    if known is None:
        lost = state.lost_nodes.get(record.id)
        if lost is not None:
            text = f"node {quoted(record.id)} is back, {now - lost.lost_at:.0f} s after it was declared lost"
            return Event(at=now, kind="node_returned", text=text, node=record.id, tree=tree)
        cores = record.capacity.get("cpu", 0.0)
        where = f"tree {quoted(tree)}" if tree else "no tree, none fits its tags"
        text = f"node {quoted(record.id)} registered with {count_cores(cores)} in {where}"
        return Event(at=now, kind="node_registered", text=text, node=record.id, tree=tree)
    return None if known.is_online else make_returned_event(known, now)


def _make_failure_event(trees: Mapping[str, Tree], record: OperationRecord, now: float) -> IndexedEvent:
    places = [(tree, options.pool) for tree, options in record.trees.items()]
    tree, pool = places[0] if places else ("", "")
    text = f"{name_operation(record)} of {printable(record.user)} failed: {record.error}"
    # ``user`` is the sender of a request; therefore the operation's user is only in the subjects.
    event = Event(at=now, kind="operation_failed", text=text, operation=record.id, tree=tree, pool=pool)
    told = Subjects(event).add_pools(trees, places).index()
    return IndexedEvent(event, (*told.subjects, f"user:{record.user}"))


def make_noticed_events(
    trees: Mapping[str, Tree], happened: Iterable[Event | PreemptionRecord]
) -> Iterator[IndexedEvent]:
    """Make the events of observations since the last period. Preemptions with the same preempted operation, beneficiary
    and kind are one event."""
    groups: dict[tuple[str, str, str, str], list[PreemptionRecord]] = {}
    for each in happened:
        if isinstance(each, PreemptionRecord):
            groups.setdefault((each.operation_id, each.tree, each.preemptor_operation_id, each.kind), []).append(each)
        else:
            yield Subjects(each).add_pools(trees, [(each.tree, each.pool)] if each.pool else ()).index()
    for records in groups.values():
        yield _make_preemption_event(trees, records)


def _make_preemption_event(trees: Mapping[str, Tree], records: list[PreemptionRecord]) -> IndexedEvent:
    first, number = records[0], len(records)
    what = f"job {printable(first.job_id)}" if number == 1 else f"{number} jobs"
    nodes = dict.fromkeys(record.node_id for record in records)
    event = Event(
        at=first.at, kind="preemption",
        text=f"{what} of operation {first.operation_id} in pool {quoted(first.pool)}: {first.why}",
        tree=first.tree, pool=first.pool, operation=first.operation_id, count=number,
        job=first.job_id if number == 1 else "", node=first.node_id if len(nodes) == 1 else "", command=first.kind,
    )  # fmt: skip
    pools = [(first.tree, pool) for pool in (first.pool, first.preemptor_pool) if pool]
    subjects = Subjects(event).add_pools(trees, pools).add("node", list(nodes)[:MAX_NODES])
    if first.preemptor_operation_id:
        subjects.add("operation", [first.preemptor_operation_id])
    return subjects.index()
