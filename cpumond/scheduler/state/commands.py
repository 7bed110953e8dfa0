"""Commands on trees, pools and operations: each is checked against the whole state before it is stored.

``prepare`` returns the ``Transaction`` of a command and changes nothing. If it refuses the command, it raises a
CommandError that names the pool, the rule and the value (semantics.md 2.6 to 2.9, 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from cpumond.core.errors import CpumondError
from cpumond.core.words import did_you_mean
from cpumond.fairshare.resources import CPU, scale, share, sum_vectors
from cpumond.scheduler.decide import admission, placement
from cpumond.scheduler.elements import PoolElement, Tree
from cpumond.scheduler.elements.node_sizes import NodeSizes
from cpumond.scheduler.model import (
    NO_SUCH_JOB,
    POOL_TREES_UNSPECIFIED,
    SUBPOOL_DELIMITER,
    TOO_MANY_OPERATIONS,
    CommandError,
    Config,
    OperationFacts,
    OperationRecord,
    OperationTreeOptions,
    Task,
    TreeConfig,
)
from cpumond.scheduler.settings import (
    commands,
    incarnations,
    memory_reserve,
    operations,
    preemption_rules,
    tree_file,
    undo,
)
from cpumond.scheduler.settings.changes import find_renamed, rename_pool
from cpumond.scheduler.settings.commands import ConfigCommand
from cpumond.scheduler.settings.failures import count_failures
from cpumond.scheduler.settings.idle_options import find_idle_monitor_options, find_idle_options
from cpumond.scheduler.settings.nodes_filter import TAG_FILTER, parse_tag_filter
from cpumond.scheduler.settings.operations import OperationCommand
from cpumond.scheduler.settings.rollout import RolloutCommand
from cpumond.scheduler.settings.spec_patch import apply_patches
from cpumond.scheduler.settings.tree_file import ApplyTree
from cpumond.scheduler.settings.validation import find_late_guarantees, find_overcommit
from cpumond.scheduler.settings.values import FIELD, name_field
from cpumond.scheduler.settings.vault import SECURE_VAULT, without_vault
from cpumond.scheduler.state import lifecycle
from cpumond.scheduler.state.maintenance import prepare_node
from cpumond.scheduler.state.node_commands import NodeCommand
from cpumond.scheduler.state.reports import job_record
from cpumond.scheduler.state.spec_room import check_config
from cpumond.scheduler.state.stages import prepare_stage
from cpumond.scheduler.state.transaction import Stops, Transaction

if TYPE_CHECKING:
    from cpumond.scheduler.state import State

ConfigChanging = ConfigCommand | ApplyTree | undo.Undo
"""Commands for which a plan can be made."""

Command = ConfigChanging | OperationCommand | NodeCommand | RolloutCommand

CHANGED_COUNT = "job_count_changed_by_user_request"
SUSPENDED = "the operation was suspended with abort_running_jobs"
MAX_MESSAGE = 1000
"""Maximum number of characters that are kept of the message of an abort."""


def prepare(
    state: State, command: Command, user: str, now: float, new_id: Callable[[], str],
    ahead: admission.Ahead = admission.NONE_AHEAD,
) -> Transaction:  # fmt: skip
    """Return the change that a command makes; the state stays as it is. Raises CommandError if it is refused.

    ``ahead``: operations whose starts are stored in the same write, before this command. A start is also refused if
    it may depend on more than the number of these operations."""
    if isinstance(command, operations.StartOperation):
        return _prepare_start(state, command, user, now, new_id, ahead)
    if isinstance(command, NodeCommand):
        return prepare_node(state, command, user, now)
    if isinstance(command, RolloutCommand):
        return prepare_stage(state, command, user, now)
    if not isinstance(command, OperationCommand):
        return _prepare_config(state, command, new_id)
    if isinstance(command, operations.JobCommand):
        return _prepare_job(state, command, user, now)
    record = state.find_record(command.operation_id)
    if record.is_finished:
        raise CommandError(f"Operation {record.id} is in state {record.state}; it can no longer be changed")
    active = state.operations[record.id].active
    if isinstance(command, operations.AbortOperation):
        message = command.message[:MAX_MESSAGE] or f"Operation aborted by user {user}"
        return Transaction(operations=(operations.finish(record, "aborted", now, message, active),))
    if isinstance(command, operations.CompleteOperation):
        return Transaction(operations=(operations.finish(record, "completed", now, "", active),))
    if isinstance(command, operations.SuspendOperation):
        stops = Stops(record.id, SUSPENDED, "operation_suspended") if command.abort_running_jobs else None
        return Transaction(operations=(msgspec.structs.replace(record, suspended=True),), stops=stops)
    if isinstance(command, operations.ResumeOperation):
        if not record.suspended:
            raise CommandError(f"Operation {record.id} is not suspended")
        return Transaction(operations=(msgspec.structs.replace(record, suspended=False, suspended_for=None),))
    if isinstance(command, operations.PatchOperation):
        return _prepare_patch(state, record, command.patches, now)
    return _prepare_update(state, record, command.parameters)


def _prepare_job(state: State, command: operations.JobCommand, user: str, now: float) -> Transaction:
    """Prepare a command on a job. A job that was asked to stop counts as ended: no command on it is possible."""
    job = state.find_live_job(command.job_id, command.operation_id)
    if not job.is_active:
        raise CommandError(f"No such job {job.id}: it was already asked to stop", NO_SUCH_JOB)
    if isinstance(command, operations.AbandonJob):
        ended = job_record(job, "completed", now, reason=f"abandoned by user {user}")
        return Transaction(operations=lifecycle.count_ended(state, [ended], now), jobs=(ended,))
    timeout_ms = command.interrupt_timeout
    if timeout_ms is not None and not job.task.interruptible:
        what = "its task has neither interruptible nor interruption_signal; without interrupt_timeout it is killed"
        raise CommandError(f"Job {job.id} cannot be interrupted: {what}", attributes={FIELD: "interrupt_timeout"})
    why = f"user {user} aborted job {job.id}"
    return Transaction(stops=Stops(job.element.operation.id, why, "user_request", job.id, (timeout_ms or 0.0) / 1e3))


def _prepare_patch(state: State, record: OperationRecord, patches: Sequence[Any], now: float) -> Transaction:
    changed = apply_patches(record, patches)
    active = state.operations[record.id].active
    failed = count_failures(changed)
    if failed and failed >= changed.max_failed_job_count:
        ended = state.finished_jobs.get(record.id, {}).values()
        last = max((job for job in ended if job.state == "failed"), key=lambda job: job.finish_time)
        return Transaction(operations=(operations.fail_by_jobs(changed, last, now, active),))
    if operations.is_complete(changed):
        return Transaction(operations=(operations.finish(changed, "completed", now, "", active),))
    most = {task.name: task.job_count for task in changed.tasks}
    stops = Stops(record.id, "its task now has fewer jobs", CHANGED_COUNT, most=most)
    return Transaction(operations=(changed,), stops=stops if changed.tasks != record.tasks else None)


def _prepare_config(state: State, command: ConfigChanging, new_id: Callable[[], str]) -> Transaction:
    # A node that fits several trees already is left out: it must not block the command that may correct this.
    nodes = {node.id: node.tags for node in state.nodes.values() if not node.matched_trees}
    pattern = state.rules.pool_name_regex
    if isinstance(command, undo.Undo | ApplyTree):
        if isinstance(command, ApplyTree):
            made = tree_file.make_target(state.config, command, new_id)
        else:
            made = commands.Outcome(undo.reverse(state.config, command.changes, new_id), "")
        outcome = commands.check(state.config, made, nodes=nodes, name_pattern=pattern)
    else:
        outcome = commands.apply(state.config, command, new_id=new_id, nodes=nodes, name_pattern=pattern)
    check_config(state.config, outcome.config, state.config_bytes)
    for name, tree in outcome.config.trees.items():
        living = state.trees.get(name)
        if living is not None and tree is not living.config:
            _check_against_living(living, tree.pools)
    moved = _find_moved(state, outcome.config) if outcome.changed else ()
    config = outcome.config if outcome.changed else None
    warnings = (*outcome.warnings, *_find_overcommits(state, outcome.config), *_find_unmatched(state, outcome.config))
    return Transaction(config=config, operations=moved, id=outcome.id, warnings=warnings)


def _find_overcommits(state: State, config: Config) -> Iterator[str]:
    """Describe guarantees that a change raises above the nodes' resources (2.6.8), or above what can be freed (6.4)."""
    for name, tree in config.trees.items():
        living = state.trees.get(name)
        if living is None or tree is living.config or not any(living.total):
            continue
        for find in (find_overcommit, find_late_guarantees):
            text = find(tree, living.total)
            if text is not None and find(living.config, living.total) is None:
                yield text


def _find_unmatched(state: State, config: Config) -> Iterator[str]:
    """Describe pools to which a change gives a filter that, on its own, fits no node of their tree."""
    for name, tree in config.trees.items():
        living = state.trees.get(name)
        if living is None or tree is living.config or not living.nodes:
            continue
        old = {pool.id: pool.settings.scheduling_tag_filter for pool in living.config.pools.values()}
        for pool in tree.pools.values():
            text = pool.settings.scheduling_tag_filter
            if text != old.get(pool.id, "") and not _fits_any(living, text):
                yield f'pool "{pool.name}": no node of tree "{name}" fits its {TAG_FILTER} now'


def _fits_any(tree: Tree, text: str) -> bool:
    parsed = parse_tag_filter(text)
    return any(parsed.matches(node.tags) for node in tree.nodes.values())


def _find_moved(state: State, config: Config) -> tuple[OperationRecord, ...]:
    """New records of operations whose pool is renamed in ``config``, or removed there but stays as an ephemeral one."""
    changed: dict[str, OperationRecord] = {}
    for name, tree in state.trees.items():
        after = config.trees.get(name)
        if after is None or after is tree.config:
            continue
        renamed = find_renamed(tree.config, after)
        for element in tree.operations.values():
            new = rename_pool(element.options.pool, renamed)
            record = changed.get(element.name, element.operation.record)
            parents = with_parent(record, name, element.parent, after)
            if new != element.options.pool or parents != record.parents:
                trees = {**record.trees, name: msgspec.structs.replace(record.trees[name], pool=new)}
                changed[element.name] = msgspec.structs.replace(record, trees=trees, parents=parents)
    return tuple(changed.values())


def with_parent(
    record: OperationRecord | None, tree: str, pool: PoolElement | None, config: TreeConfig
) -> dict[str, str]:
    """Return ``parents`` of a record in ``pool`` under ``config``. They name the parent of an ephemeral ``pool`` if
    ``config`` does not have this parent any more: it may remain as an ephemeral pool, too (2.9)."""
    parents = {} if record is None else {name: parent for name, parent in record.parents.items() if name != tree}
    is_plain = pool is not None and pool.is_ephemeral and not pool.children and SUBPOOL_DELIMITER not in pool.name
    above = pool.parent if pool is not None and is_plain else None
    if above is not None and not above.is_root and above.name not in config.pools:
        is_renamed = above.config is not None and any(each.id == above.config.id for each in config.pools.values())
        if not is_renamed:
            parents[tree] = above.name
    return parents


def _check_against_living(tree: Tree, pools: Mapping[str, Any]) -> None:
    """Check 2.7: no FIFO mode while ephemeral sub-pools exist. ``commands.apply`` checked 2.2 with the nodes' tags."""
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
    state: State, command: operations.StartOperation, user: str, now: float, new_id: Callable[[], str],
    ahead: admission.Ahead,
) -> Transaction:  # fmt: skip
    if command.type != "vanilla":
        text = f'Operation type "{command.type}" is not supported; start a "vanilla" operation'
        raise CommandError(text, attributes={FIELD: "type"})
    spec = without_vault(command.spec)
    asked = operations.read_spec(command.spec, state.rules.read_monitor, partial(_find_memory_limit, state))
    if asked.secrets and state.rules.vault_keys is None:
        what = "this scheduler stores no secrets; an administrator can set secrets_key_file in its configuration"
        raise CommandError(f"spec/{SECURE_VAULT}: {what}", attributes={FIELD: SECURE_VAULT})
    _check_room(state, asked, spec, user, ahead)
    names = asked.trees
    if names is None:
        if not state.config.default_tree:
            raise CommandError(
                "Pool trees are unspecified: the operation names no pool_trees and there is no default tree; name "
                "some, or have //sys/pool_trees/@default_tree set",
                POOL_TREES_UNSPECIFIED,
                {FIELD: "pool_trees"},
            )
        names = (state.config.default_tree,)
    choices: dict[str, _Choice] = {}
    chosen: dict[str, OperationTreeOptions] = {}
    parents: dict[str, str] = {}
    refused: list[CommandError] = []
    running: list[str] = []
    sizes: list[NodeSizes] = []
    told: list[str] = []
    for name in names:
        try:
            tree = state.find_tree(name)
        except CommandError as error:
            raise name_field(error, "pool_trees") from None
        wanted = asked.options.get(name, {}).get("pool", asked.options[""].get("pool", ""))
        try:
            choice = admission.choose_pool(tree, wanted, user, state.rules)
            admission.check_start(tree, choice, ahead)
        except CommandError as error:
            if error.code != TOO_MANY_OPERATIONS or not state.rules.erase_trees_with_pool_limit_violations:
                raise name_field(error, "pool") from None
            refused.append(error)
            continue
        choices[name] = tree, choice, wanted
    for name, (tree, choice, wanted) in _keep_best(choices, asked, user).items():
        chosen[name] = operations.tree_options(asked.options, name, choice.name)
        parents |= with_parent(None, name, choice.pool, tree.config)
        told += _note_new_pool(tree, choice, wanted)
        told += _check_options(tree, choice, chosen[name])
        sizes.append(_find_sizes(tree, choice, chosen[name]))
        if admission.may_run(tree, choice, user, ahead):
            running.append(name)
    if not chosen:
        raise refused[0] if refused else CommandError("The list of pool trees is empty")
    if ahead.count and (
        asked.alias or asked.schedule_in_single_tree or any(not each.pool for _, each, _ in choices.values())
    ):
        raise CommandError("it will be decided when the earlier starts are stored")
    operation_id, keys = new_id(), state.rules.vault_keys
    vaults = (keys.seal(operation_id, asked.secrets),) if keys is not None and asked.secrets else ()
    record = OperationRecord(
        id=operation_id, sequence=state.sequence + 1 + ahead.count, user=user, start_time=now, tasks=asked.tasks,
        trees=chosen, type=command.type, state="running" if running else "pending", running_in=tuple(running),
        **{name: getattr(asked, name) for name in OperationFacts.__struct_fields__}, spec=spec, parents=parents,
        acl=asked.acl, vault_bytes=sum(vault.size for vault in vaults),
    )  # fmt: skip
    is_reserving = all(state.trees[name].config.settings.enable_memory_reserve for name in chosen)
    record = memory_reserve.set_reserves(record, is_reserving)
    record = incarnations.begin_first(record)
    told += find_idle_monitor_options(asked.job_cpu_monitor)
    told += _find_shorter_logs(asked.tasks, [state.trees[name] for name in chosen])
    told += placement.find_unplaceable([(task, task.job_count) for task in record.tasks], asked.is_gang, sizes)
    warnings = (*operations.unrecognized_warnings(spec), *map(str, refused), *told)
    return Transaction(operations=(record,), vaults=vaults, id=record.id, warnings=warnings)


def _check_room(
    state: State, asked: operations.ParsedSpecification, spec: Mapping[str, Any], user: str, ahead: admission.Ahead
) -> None:
    state.spec_room.check([spec, asked.secrets] if asked.secrets else spec, user, ahead.count > 0)
    if len(state.operations) + ahead.count >= state.rules.max_operation_count:
        raise CommandError(
            f"Limit for the number of concurrent operations {state.rules.max_operation_count} of the scheduler has "
            "been reached",
            TOO_MANY_OPERATIONS,
        )
    if asked.alias and any(each.record.alias == asked.alias for each in state.operations.values()):
        text = f'Operation alias "{asked.alias}" is already used by a live operation'
        raise CommandError(text, attributes={FIELD: "alias"})


_Choice = tuple[Tree, admission.PoolChoice, str]
"""A tree, the pool there, and the requested pool."""


def _keep_best(choices: dict[str, _Choice], asked: operations.ParsedSpecification, user: str) -> dict[str, _Choice]:
    """With ``schedule_in_single_tree``, keep one tree: the one whose pool would have most of its guarantee left after
    the operation got its whole request. Trees in which the operation would run at once take precedence."""
    if not asked.schedule_in_single_tree or not choices:
        return choices
    running = {
        name: each for name, each in choices.items() if admission.may_run(*each[:2], user, admission.NONE_AHEAD)
    } or choices
    wanted = sum_vectors([scale(task.resources, float(task.job_count)) for task in asked.tasks])

    def reserve(name: str) -> float:
        tree, choice, _ = running[name]
        pool, total = choice.pool or choice.parent, tree.total
        if any(amount and not total[k] for k, amount in enumerate(wanted)):
            return -math.inf
        own, guaranteed, demanded = share(wanted, total), pool.estimated_guarantee_share, pool.demand_share
        return min(guaranteed[k] - demanded[k] - own[k] for k in range(len(total)) if total[k])

    best = max(running, key=reserve)
    return {best: choices[best]}


def _find_memory_limit(state: State, trees: tuple[str, ...] | None) -> int:
    """Return ``memory_limit`` of tasks that set none, in bytes: the largest default of the operation's trees."""
    names = trees or (state.config.default_tree,)
    named = [state.trees[name].config.settings for name in names if name in state.trees]
    return max((settings.default_memory_limit for settings in named), default=0)


def _find_shorter_logs(tasks: Iterable[Task], trees: Iterable[Tree]) -> Iterator[str]:
    """Describe tasks that request more stderr of their jobs than some nodes keep."""
    wanting = [(task.name, task.max_stderr_size) for task in tasks if task.max_stderr_size is not None]
    abouts = [node.about for tree in trees for node in tree.nodes.values()] if wanting else []
    least = min((about.max_log_bytes for about in abouts if about is not None and about.max_log_bytes), default=None)
    for name, size in wanting:
        if least is not None and size > least:
            yield (
                f'spec option "tasks/{name}/max_stderr_size": of {size} bytes the last {least} are kept on some nodes, '
                "by max_log_bytes of their agents"
            )


def _find_sizes(tree: Tree, choice: admission.PoolChoice, options: OperationTreeOptions) -> NodeSizes:
    """Return the largest requests that jobs of an operation with these options may have in a pool."""
    fitting = tree.fittings.narrow((choice.pool or choice.parent).fitting, options.scheduling_tag_filter, tree.nodes)
    return tree.sizes if fitting is None else fitting.sizes


def note_refused(state: State, command: object, error: CpumondError, now: float) -> None:
    """Count the refusal of a command, if it is a start and a pool's ``max_operation_count`` refuses it."""
    if not isinstance(command, operations.StartOperation) or not isinstance(error, CommandError):
        return
    told = error.attributes
    if error.code == TOO_MANY_OPERATIONS and "pool_tree" in told:
        tasks = operations.read_spec(command.spec, state.rules.read_monitor).tasks
        cores = sum(task.job_count * task.resources[CPU] for task in tasks)
        state.refused_starts.note(told["pool_tree"], told["pool"], told["limit"], cores, now)


def _prepare_update(state: State, record: OperationRecord, parameters: Mapping[str, Any]) -> Transaction:
    given, acl = operations.read_parameters(parameters), operations.read_changed_acl(parameters)
    stray = [tree for tree in given if tree and tree not in record.trees]
    if stray:
        raise CommandError(f'Operation {record.id} does not run in tree "{stray[0]}"')
    trees, parents = dict(record.trees), record.parents
    told: list[str] = []
    for name, options in record.trees.items():
        changes = {**given[""], **given.get(name, {})}
        wanted = changes.pop("pool", None)
        tree, element = state.trees[name], state.operations[record.id].elements[name]
        assert element.parent is not None
        choice = admission.PoolChoice(element.parent.name, element.parent, element.parent)
        if wanted:
            try:
                choice = admission.choose_pool(tree, wanted, record.user, state.rules, element)
                admission.check_move(tree, element, choice)
            except CommandError as error:
                raise name_field(error, "pool") from None
            changes["pool"] = choice.name
            told += _note_new_pool(tree, choice, wanted)
            parents = with_parent(msgspec.structs.replace(record, parents=parents), name, choice.pool, tree.config)
        trees[name] = msgspec.structs.replace(options, **changes)
        told += _check_options(tree, choice, trees[name])
        if changes.get(TAG_FILTER) and tree.nodes and not _fits_any(tree, changes[TAG_FILTER]):
            told.append(f'no node of tree "{name}" fits {TAG_FILTER} now')
    noted = operations.read_changed_annotations(parameters)
    changed = msgspec.structs.replace(
        record, trees=trees, parents=parents, acl=record.acl if acl is None else acl,
        annotations=record.annotations if noted is None else noted,
    )  # fmt: skip
    return Transaction(operations=(changed,), warnings=tuple(told))


def _note_new_pool(tree: Tree, choice: admission.PoolChoice, wanted: str) -> Iterator[str]:
    """Describe a pool that the operation named and that did not exist: its name may be misspelt (2.9)."""
    if wanted and choice.pool is None and SUBPOOL_DELIMITER not in choice.name:
        near = did_you_mean(wanted, tree.config.pools)
        yield (
            f'pool "{wanted}" did not exist in pool tree "{tree.name}": an ephemeral one was made under '
            f"{choice.parent.name}{near}"
        )


def _check_options(tree: Tree, choice: admission.PoolChoice, options: OperationTreeOptions) -> list[str]:
    """Describe options that have no effect in the pool that an operation would join.

    Raises CommandError for a guarantee without the main resource (2.6)."""
    main = tree.config.settings.main_resource
    if options.min_share_resources and main not in options.min_share_resources:
        text = f'min_share_resources must include "{main}", the main resource of tree "{tree.name}"'
        raise CommandError(text, attributes={FIELD: "min_share_resources"})
    rules = (choice.pool or choice.parent).rules
    assert rules is not None
    if choice.pool is None:
        rules = preemption_rules.pool_rules(rules, choice.settings)
    return find_idle_options(choice.name, choice.settings, rules, tree.config.settings, options)
