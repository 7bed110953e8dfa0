"""Makes events of the state's observations that no stored record implies. Pure; imported by the state."""

from __future__ import annotations

from typing import Final

from cpumond.core.words import count, printable, quoted
from cpumond.scheduler.elements import Job, Node, Operation
from cpumond.scheduler.events import Event

CONTESTED: Final = frozenset({"contested", "overridden"})
"""Values of ``mode`` in a job's reports which mean that another program sets the limit."""


def make_silent_event(node: Node, now: float) -> Event:
    text = f"node {quoted(node.id)} is silent for {now - node.last_seen:.0f} s; its {count(len(node.jobs), 'job')} wait"
    return Event(at=now, kind="node_silent", text=text, node=node.id, tree=node.tree or "")


def make_returned_event(node: Node, now: float) -> Event:
    text = f"node {quoted(node.id)} is back after {now - node.last_seen:.0f} s"
    return Event(at=now, kind="node_returned", text=text, node=node.id, tree=node.tree or "")


def make_failing_event(node: Node, held: int, nodes: int, most: int, now: float) -> Event:
    """Make the event that jobs fail on a node. ``held``: how many of the ``nodes`` in its tree are held off now.
    ``most``: how many may be."""
    assert node.failing is not None
    bound = f"{held} of {count(nodes, 'node')} {'is' if held == 1 else 'are'} held off, at most {most} may be"
    text = f"node {quoted(node.id)}: {node.failing.describe(now)} ({bound})"
    last = node.failing.streak.last_job
    return Event(at=now, kind="node_failing", text=text, node=node.id, tree=node.tree or "", job=last)


def make_works_event(node: Node, why: str, now: float) -> Event:
    text = f"node {quoted(node.id)} is no longer held off: {why}"
    return Event(at=now, kind="node_works", text=text, node=node.id, tree=node.tree or "")


def make_contested_event(job: Job, now: float) -> Event:
    """Make the event that another program sets the limit of a job, as the agent reports."""
    how = "is contested: another program kept changing it back, and the agent gave it up"
    if job.report.mode != "contested":
        how = "is overridden by another program"
    pool = job.element.parent
    return Event(
        at=now, kind="limit_contested",
        text=f"the limit of job {printable(job.id)} on node {quoted(job.node.id)} {how}",
        job=job.id, node=job.node.id, operation=job.element.name, tree=job.element.tree.name,
        pool="" if pool is None else pool.name,
    )  # fmt: skip


def make_stuck_event(operation: Operation, why: str, now: float) -> Event:
    tree, options = next(iter(operation.record.trees.items()))
    title = f" {quoted(operation.record.title)}" if operation.record.title else ""
    text = f"operation {operation.id}{title} is stuck: {why}"
    return Event(at=now, kind="operation_stuck", text=text, operation=operation.id, tree=tree, pool=options.pool)
