"""What would make an operation that waits start sooner: changes that are worth a run ahead. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from cpumond.core.words import show_cores
from cpumond.scheduler.decide.admission import find_full
from cpumond.scheduler.decide.snapshot import element_name, operation_weight
from cpumond.scheduler.elements import Operation, OperationElement, PoolElement
from cpumond.scheduler.operations import AbortOperation, StartOperation, UpdateOperation
from cpumond.scheduler.settings.attributes import Edit
from cpumond.scheduler.settings.commands import ChangePool, ChangeTree
from cpumond.scheduler.state.commands import Command

HEAVIER: Final = 4.0
LEAST_CORES: Final = 0.1


class Alternative(NamedTuple):
    """A change, as half a sentence and as the commands that make it."""

    text: str
    commands: tuple[Command, ...]


def list_alternatives(operation: Operation) -> Iterator[Alternative]:
    """Changes of an operation that has not started, or of what is above it, each alone."""
    element = next(iter(operation.elements.values()), None)
    if element is None:
        return
    full = find_full(element) if not element.is_running else None
    if full is not None and (full.is_root or full.config is not None):
        yield _one_more(full)
    weight = operation_weight(element)
    if weight > 0.0:
        more = UpdateOperation(operation.id, {"weight": weight * HEAVIER})
        yield Alternative(f"with weight {weight * HEAVIER:g} (now {weight:g})", (more,))
    yield from _smaller(element)


def _one_more(full: PoolElement) -> Alternative:
    limit = full.max_running_operation_count + 1
    edits = (Edit(("max_running_operation_count",), limit),)
    tree = full.tree.name
    change = ChangeTree(tree, edits) if full.is_root else ChangePool(tree, full.name, edits)
    return Alternative(f"with max_running_operation_count {limit} of {element_name(full)} (now {limit - 1})", (change,))


def _smaller(element: OperationElement) -> Iterator[Alternative]:
    """The same operation with jobs that order half of the cores, started anew."""
    record = element.operation.record
    tasks = record.spec.get("tasks")
    if not isinstance(tasks, dict) or any(task.cpu_limit / 2.0 < LEAST_CORES for task in record.tasks):
        return
    halved: dict[str, Any] = {
        task.name: {**tasks[task.name], "cpu_limit": task.cpu_limit / 2.0}
        for task in record.tasks
        if isinstance(tasks.get(task.name), dict)
    }
    if len(halved) != len(tasks):
        return
    spec = {**record.spec, "tasks": halved}
    cores = ", ".join(show_cores(task.cpu_limit / 2.0) for task in record.tasks)
    again = StartOperation(msgspec.to_builtins(spec), record.type)
    yield Alternative(f"with jobs of {cores} {'core' if cores == '1' else 'cores'}", (AbortOperation(record.id), again))
