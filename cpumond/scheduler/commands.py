"""Commands on trees, pools and operations: what each changes, decided against the whole state, before it is stored.

``prepare`` is a function from the state and a command to a ``Transaction``; it changes nothing. A refused command is a
CommandError that names the pool, the rule and the value (semantics.md 2.6 to 2.9, 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from cpumond.fairshare.resources import Vector
from cpumond.scheduler import admission, config_commands, operations, starvation
from cpumond.scheduler.attributes import FIELD, name_field
from cpumond.scheduler.config_commands import ConfigCommand
from cpumond.scheduler.elements import PreemptionRules, Tree
from cpumond.scheduler.model import (
    SUBPOOL_DELIMITER,
    TOO_MANY_OPERATIONS,
    CommandError,
    Config,
    JobRecord,
    NodeRecord,
    OperationRecord,
    OperationTreeOptions,
)
from cpumond.scheduler.operations import OperationCommand
from cpumond.scheduler.validation import find_overcommit

if TYPE_CHECKING:
    from cpumond.scheduler.state import State

Command = ConfigCommand | OperationCommand


@dataclass(frozen=True, slots=True)
class Rules:
    """The part of the scheduler's configuration that decisions read; times in seconds."""

    max_operation_count: int = 5000
    pools: admission.PoolRules = admission.PoolRules()  # noqa: RUF009 - frozen
    pool_name_regex: str = "[-_a-z0-9:A-Z]+"
    erase_trees_with_pool_limit_violations: bool = False
    heartbeat_period_s: float = 1.0
    node_heartbeat_timeout_s: float = 60.0
    waiting_job_timeout_s: float = 30.0
    overcommit_duration_s: float = 15.0
    spare: Vector = (1.0, 1.0, 0.0, 268_435_456.0, 0.0)
    finished_operation_retention_count: int = 1000
    read_monitor: Callable[[Any], dict[str, Any]] = dict
    """Checks a section ``job_cpu_monitor``."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """A change that is stored before it is applied. Records replace those of the same key.

    ``id`` and ``warnings`` are for who asked; ``ended`` are the jobs among ``jobs`` that live until it is applied.
    """

    config: Config | None = None
    operations: tuple[OperationRecord, ...] = ()
    jobs: tuple[JobRecord, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    removed_nodes: tuple[str, ...] = ()
    id: str = ""
    warnings: tuple[str, ...] = ()
    abort_jobs_of: str = ""
    """Operation whose running jobs are stopped."""

    @property
    def is_empty(self) -> bool:
        return self.config is None and not (
            self.operations or self.jobs or self.nodes or self.removed_nodes or self.abort_jobs_of
        )


NOTHING = Transaction()


def prepare(state: State, command: Command, user: str, now: float, new_id: Callable[[], str]) -> Transaction:
    """The change that a command makes. Raises CommandError when it is refused; nothing is changed here."""
    if isinstance(command, operations.StartOperation):
        return _prepare_start(state, command, user, now, new_id)
    if not isinstance(command, OperationCommand):
        return _prepare_config(state, command, new_id)
    record = state.find_record(command.operation_id)
    if record.is_finished:
        raise CommandError(f"Operation {record.id} is in state {record.state}; nothing can be changed any more")
    if isinstance(command, operations.AbortOperation):
        message = command.message or f"Operation aborted by user {user}"
        ended = operations.finish(record, "aborted", now, message, state.operations[record.id].active)
        return Transaction(operations=(ended,))
    if isinstance(command, operations.CompleteOperation):
        ended = operations.finish(record, "completed", now, "", state.operations[record.id].active)
        return Transaction(operations=(ended,))
    if isinstance(command, operations.SuspendOperation):
        aborted = record.id if command.abort_running_jobs else ""
        return Transaction(operations=(msgspec.structs.replace(record, suspended=True),), abort_jobs_of=aborted)
    if isinstance(command, operations.ResumeOperation):
        if not record.suspended:
            raise CommandError(f"Operation {record.id} is not suspended")
        return Transaction(operations=(msgspec.structs.replace(record, suspended=False),))
    return _prepare_update(state, record, command.parameters)


def _prepare_config(state: State, command: ConfigCommand, new_id: Callable[[], str]) -> Transaction:
    nodes = {node.id: node.tags for node in state.nodes.values()}
    outcome = config_commands.apply(
        state.config, command, new_id=new_id, nodes=nodes, name_pattern=state.rules.pool_name_regex
    )
    for name, tree in outcome.config.trees.items():
        living = state.trees.get(name)
        if living is not None and tree is not living.config:
            _check_against_living(living, tree.pools)
    renamed = _find_renamed(state, outcome.config) if outcome.changed else ()
    config = outcome.config if outcome.changed else None
    warnings = (*outcome.warnings, *_find_overcommits(state, outcome.config))
    return Transaction(config=config, operations=renamed, id=outcome.id, warnings=warnings)


def _find_overcommits(state: State, config: Config) -> Iterator[str]:
    """Sentences about guarantees that are, by a change, more than the nodes have (2.6.8)."""
    for name, tree in config.trees.items():
        living = state.trees.get(name)
        if living is None or tree is living.config or not any(living.total):
            continue
        text = find_overcommit(tree, living.total)
        if text is not None and find_overcommit(living.config, living.total) is None:
            yield text


def _find_renamed(state: State, config: Config) -> tuple[OperationRecord, ...]:
    """The records of operations in pools that have another name in ``config``."""
    changed: dict[str, OperationRecord] = {}
    for name, tree in state.trees.items():
        after = config.trees.get(name)
        if after is None or after is tree.config:
            continue
        names = {pool.id: pool.name for pool in after.pools.values()}
        renames = {pool.name: names.get(pool.id, pool.name) for pool in tree.config.pools.values()}
        for element in tree.operations.values():
            base, delimiter, child = element.options.pool.partition(SUBPOOL_DELIMITER)
            new = f"{renames.get(base, base)}{delimiter}{child}"
            if new != element.options.pool:
                record = changed.get(element.name, element.operation.record)
                options = msgspec.structs.replace(record.trees[name], pool=new)
                changed[element.name] = msgspec.structs.replace(record, trees={**record.trees, name: options})
    return tuple(changed.values())


def _check_against_living(tree: Tree, pools: Mapping[str, Any]) -> None:
    """2.7: no FIFO mode while ephemeral sub-pools exist; 2.2 is checked with the nodes' tags."""
    for name, config in pools.items():
        pool = tree.pools.get(name)
        if pool is None or config.settings.mode != "fifo" or pool.settings.mode == "fifo":
            continue
        ephemeral = [child.name for child in pool.children.values() if child.is_ephemeral]
        if ephemeral:
            raise CommandError(
                f'Pool "{name}": mode cannot be fifo while ephemeral sub-pools exist: {", ".join(ephemeral[:5])}',
                attributes={FIELD: "mode"},
            )


def _prepare_start(
    state: State, command: operations.StartOperation, user: str, now: float, new_id: Callable[[], str]
) -> Transaction:
    if command.type != "vanilla":
        text = f'Operation type "{command.type}" is not supported; start a "vanilla" operation'
        raise CommandError(text, attributes={FIELD: "type"})
    wish = operations.read_spec(command.spec, state.rules.read_monitor)
    if len(state.operations) >= state.rules.max_operation_count:
        raise CommandError(
            f"Limit for the number of concurrent operations {state.rules.max_operation_count} of the scheduler has "
            "been reached",
            TOO_MANY_OPERATIONS,
        )
    if wish.alias and any(each.record.alias == wish.alias for each in state.operations.values()):
        text = f'Operation alias "{wish.alias}" is already used by a live operation'
        raise CommandError(text, attributes={FIELD: "alias"})
    names = wish.trees
    if names is None:
        if not state.config.default_tree:
            raise CommandError(
                "Pool trees are unspecified: the operation names no pool_trees and there is no default tree",
                attributes={FIELD: "pool_trees"},
            )
        names = (state.config.default_tree,)
    chosen: dict[str, OperationTreeOptions] = {}
    refused: list[CommandError] = []
    running: list[str] = []
    told: list[str] = []
    for name in names:
        try:
            tree = state.find_tree(name)
        except CommandError as error:
            raise name_field(error, "pool_trees") from None
        wanted = wish.options.get(name, {}).get("pool", wish.options[""].get("pool", ""))
        try:
            choice = admission.choose_pool(tree, wanted, user, state.rules.pools)
            admission.check_start(tree, choice)
        except CommandError as error:
            if error.code != TOO_MANY_OPERATIONS or not state.rules.erase_trees_with_pool_limit_violations:
                raise name_field(error, "pool") from None
            refused.append(error)
            continue
        chosen[name] = operations.tree_options(wish.options, name, choice.name)
        told += starvation.find_cut_options(_rules_of(choice), chosen[name])
        if admission.may_run(tree, choice):
            running.append(name)
    if not chosen:
        raise refused[0] if refused else CommandError("The list of pool trees is empty")
    record = OperationRecord(
        id=new_id(),
        sequence=state.sequence + 1,
        user=user,
        start_time=now,
        tasks=wish.tasks,
        trees=chosen,
        type=command.type,
        state="running" if running else "pending",
        running_in=tuple(running),
        title=wish.title,
        alias=wish.alias,
        preemption_mode=wish.preemption_mode,
        is_gang=wish.is_gang,
        max_failed_job_count=wish.max_failed_job_count,
        job_cpu_monitor=wish.job_cpu_monitor,
        spec=command.spec,
    )
    warnings = tuple(f'spec option "{name}" is not recognized' for name in wish.unrecognized)
    warnings += (*(str(error) for error in refused), *told)
    return Transaction(operations=(record,), id=record.id, warnings=warnings)


def _prepare_update(state: State, record: OperationRecord, parameters: Mapping[str, Any]) -> Transaction:
    given = operations.read_parameters(parameters)
    stray = [tree for tree in given if tree and tree not in record.trees]
    if stray:
        raise CommandError(f'Operation {record.id} does not run in tree "{stray[0]}"')
    trees = dict(record.trees)
    told: list[str] = []
    for name, options in record.trees.items():
        changes = {**given[""], **given.get(name, {})}
        wanted = changes.pop("pool", None)
        tree, element = state.trees[name], state.operations[record.id].elements[name]
        rules = element.parent.rules if element.parent is not None else None
        if wanted:
            try:
                choice = admission.choose_pool(tree, wanted, record.user, state.rules.pools, element)
                admission.check_move(tree, element, choice)
            except CommandError as error:
                raise name_field(error, "pool") from None
            changes["pool"] = choice.name
            rules = _rules_of(choice)
        trees[name] = msgspec.structs.replace(options, **changes)
        if rules is not None:
            told += starvation.find_cut_options(rules, trees[name])
    return Transaction(operations=(msgspec.structs.replace(record, trees=trees),), warnings=tuple(told))


def _rules_of(choice: admission.PoolChoice) -> PreemptionRules:
    """The rules of the pool that an operation would go to."""
    if choice.pool is not None and choice.pool.rules is not None:
        return choice.pool.rules
    assert choice.parent.rules is not None
    return starvation.pool_rules(choice.parent.rules, admission.ephemeral_settings(choice.parent))
