"""Makes events of commands and refused requests. They never contain a secret. Pure.

Events contain only the fields ``KEPT`` and ``KEPT_OF_TASKS`` of a specification: neither the environment, nor commands,
nor anything else that a user may have written there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from cpumond.core.measures import count_cores
from cpumond.core.wire import JobRequest
from cpumond.core.words import count, printable, quoted
from cpumond.scheduler.elements import Job, Tree
from cpumond.scheduler.events import Event, EventChange, EventKind, IndexedEvent, Subjects
from cpumond.scheduler.model import ROOT_POOL, CommandError, OperationRecord
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings import commands, operations
from cpumond.scheduler.settings.changes import ConfigChange, compare_configs, unfold
from cpumond.scheduler.settings.rollout import RolloutCommand, describe_rollout
from cpumond.scheduler.settings.spec_options import canonical
from cpumond.scheduler.settings.spec_patch import list_known
from cpumond.scheduler.settings.tree_file import ApplyTree, describe_applied
from cpumond.scheduler.settings.undo import Undo, UndoChange
from cpumond.scheduler.settings.values import format_setting
from cpumond.scheduler.state import State
from cpumond.scheduler.state.commands import Command
from cpumond.scheduler.state.node_commands import DrainNode, NodeCommand, describe_node_command
from cpumond.scheduler.state.token_commands import CreateToken, TokenCommand
from cpumond.scheduler.state.transaction import Transaction

MAX_SHOWN: Final = 300
"""Maximum number of characters of a value in a request."""
MAX_NAMED: Final = 3
"""Maximum number of changed attributes, or of tasks, that a sentence names."""
MAX_PLAN: Final = 1000
MAX_TASKS: Final = 20

KEPT: Final = frozenset({"pool", "pool_trees", "title", "alias", "weight", "max_share_ratio", "time_limit", "is_gang"})
KEPT_OF_TASKS: Final = frozenset({"job_count", "cpu_limit", "memory_limit", "user_slots", "gpu_limit"})
SECRET: Final = frozenset({"token", "digest", "hash", "secret", "password", "environment", "secure_vault", "command"})
"""Fields that no event contains."""


AnyCommand = Command | TokenCommand | UndoChange


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: its user, the plan that the user saw before, and a sentence on the decision that allowed it."""

    user: User
    plan: str = ""
    allowed_by: str = ""
    term: int = 0


def make_command_event(
    state: State, command: Command | TokenCommand, asked: Asked, change: Transaction, now: float
) -> IndexedEvent:
    """Make the event of a command that is about to be stored with ``change``. ``state``: the state before it."""
    if isinstance(command, TokenCommand):
        return _make_token_event(command, asked, change, now)
    if isinstance(command, operations.OperationCommand):
        record = change.operations[0] if change.operations else None
        if isinstance(command, operations.JobCommand):
            return _make_job_event(state, command, asked, now)
        return _make_operation_event(state, command, asked, record, now)
    if isinstance(command, NodeCommand):
        return _make_node_event(state, command, asked, now)
    if isinstance(command, RolloutCommand):
        return Subjects(_begin(command, asked, now, describe_rollout(command))).index()
    new = state.config if change.config is None else change.config
    changes = compare_configs(state.config, new, exact=True)
    event = msgspec.structs.replace(
        _begin(command, asked, now, _describe(command, changes)),
        tree=getattr(command, "tree", None) or (getattr(command, "name", "") if _is_of_tree(command) else ""),
        pool="" if _is_of_tree(command) else _pool_of(command),
        changes=tuple(EventChange(each.tree, each.pool, each.attribute, each.old, each.new) for each in changes),
        undoes=command.number if isinstance(command, Undo) else 0,
    )
    if isinstance(command, Undo) and changes:
        event = msgspec.structs.replace(event, tree=changes[0].tree, pool=changes[0].pool)
    places = [(event.tree, event.pool)] if event.pool else []
    return Subjects(event).add_pools(state.trees, [*places, *_places_of(changes)]).index()


def make_refusal_event(
    trees: Mapping[str, Tree], command: AnyCommand, asked: Asked, refusal: CommandError, now: float
) -> IndexedEvent:
    event = _begin(command, asked, now, f"was refused {_name_of(command)}: {refusal}", "refused")
    tree, pool = getattr(command, "tree", None) or "", _pool_of(command)
    event = msgspec.structs.replace(
        event, tree=tree, pool=pool, node=getattr(command, "node", ""), refused=str(refusal),
        operation=getattr(command, "operation_id", ""), job=getattr(command, "job_id", ""),
    )  # fmt: skip
    return Subjects(event).add_pools(trees, [(tree, pool)] if pool else ()).index()


def make_request_event(
    name: str, asked: Asked, text: str, now: float, kind: EventKind = "command", **facts: Any
) -> Event:
    """Make the event of a request, which is a command, a pin or a refused query. ``facts``: further fields of Event."""
    user = asked.user
    who = format_user(user)
    return Event(
        at=now, kind=kind, text=f"{who} {text}" if who else text, command=name, user=user.name, acting=user.acting,
        origin=user.origin, plan=asked.plan[:MAX_PLAN], allowed_by=asked.allowed_by, term=asked.term, **facts,
    )  # fmt: skip


def make_pin_event(trees: Mapping[str, Tree], job: Job, request: JobRequest, asked: Asked, now: float) -> IndexedEvent:
    """Make the event that the node of a job has set or ended a pin."""
    limit = "all that it may have" if request.cpu_limit is None else count_cores(request.cpu_limit)
    how = f"pinned job {printable(job.id)} to {limit}" if request.kind == "pin" else f"unpinned job {printable(job.id)}"
    element = job.element
    event = make_request_event(
        request.kind, asked, f"{how} on node {quoted(job.node.id)}", now, job=job.id, node=job.node.id,
        operation=element.name, tree=element.tree.name, pool=element.options.pool,
        request={"cpu_limit": request.cpu_limit, "ttl_s": request.ttl_s} if request.kind == "pin" else {},
    )  # fmt: skip
    return Subjects(event).add_pools(trees, [(event.tree, event.pool)]).index()


def format_user(user: User) -> str:
    """Return ``alice``, or ``root in the name of alice``; "" if there is no user."""
    name = printable(user.name)
    return f"{printable(user.acting)} in the name of {name}" if user.acting else name


def list_fields(command: Any) -> dict[str, Any]:
    """Return the fields of a command, long ones shortened, without secrets; of a specification only public fields."""
    try:
        fields = msgspec.to_builtins(command, str_keys=True)
    except (TypeError, ValueError, RecursionError):
        return {}  # this must not fail the command: its event then has no fields
    fields = {name: value for name, value in fields.items() if name not in ("type", *SECRET)}
    if isinstance(command, operations.StartOperation):
        fields = {"type": command.type, "spec": _list_known(command.spec)}
    elif isinstance(command, ApplyTree):
        del fields["tables"]  # the event's changes show what the tables contain
    elif isinstance(command, operations.PatchOperation):
        fields["patches"] = list_known(command.patches)
    elif isinstance(command, operations.UpdateOperation):
        fields["parameters"] = {key: each for key, each in fields["parameters"].items() if _is_parameter(key)}
    return {name: cut(value) for name, value in fields.items()}


def cut(value: Any) -> Any:
    """Return a value if it is short, else the beginning of its text."""
    if isinstance(value, dict) and len(value) <= MAX_TASKS:
        return {str(key)[:MAX_SHOWN]: cut(each) for key, each in value.items()}
    text = str(value)
    return value if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def _is_parameter(key: str) -> bool:
    name = canonical(key)
    return name in operations.TREE_OPTIONS or name in ("pool", "acl", "scheduling_options_per_pool_tree")


def _list_known(spec: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: each for key, each in spec.items() if canonical(key) in KEPT}
    tasks = spec.get("tasks")
    if isinstance(tasks, Mapping):
        known["tasks"] = {
            str(name): {key: each for key, each in task.items() if canonical(key) in KEPT_OF_TASKS}
            for name, task in list(tasks.items())[:MAX_TASKS]
            if isinstance(task, Mapping)
        }
    return known


def _begin(command: Any, asked: Asked, now: float, text: str, kind: EventKind = "command") -> Event:
    return make_request_event(type(command).__name__, asked, text, now, kind, request=list_fields(command))


def _is_of_tree(command: Command | TokenCommand) -> bool:
    return isinstance(command, commands.CreateTree | commands.ChangeTree | commands.RemoveTree | ApplyTree)


def _pool_of(command: Any) -> str:
    for name in ("pool", "source"):
        if isinstance(found := getattr(command, name, None), str):
            return found
    return command.name if isinstance(command, commands.CreatePool) else ""


def _name_of(command: Any) -> str:
    """Return the kind of a command in words, and its object: ``change pool "a"``."""
    words = "".join(f" {sign.lower()}" if sign.isupper() else sign for sign in type(command).__name__).strip()
    name = _pool_of(command) or getattr(command, "job_id", "") or getattr(command, "operation_id", "")
    name = name or getattr(command, "name", "")
    name = name or getattr(command, "node", "")
    name = name or (getattr(command, "tree", "") if _is_of_tree(command) else "")
    return f"{words} {quoted(name)}" if isinstance(name, str) and name else words


def _places_of(changes: Iterable[ConfigChange]) -> Iterator[tuple[str, str]]:
    """Yield the pools that changes concern, by their names before and after the change, and their parents."""
    for each in changes:
        yield each.tree, each.pool or ROOT_POOL
        for value in (each.old, each.new):
            if each.attribute in ("name", "parent_name"):
                yield each.tree, value
            elif not each.attribute and each.pool and value is not None:
                yield each.tree, value["parent_name"]


def _make_token_event(command: TokenCommand, asked: Asked, change: Transaction, now: float) -> IndexedEvent:
    """Make the event of a token command. The token is named by its id, which is the first digits of its hash."""
    users = [record.user for record in change.tokens]
    of_user = f" of {printable(users[0])}" if users else ""
    if isinstance(command, CreateToken):
        text = f'made the token {change.id}{of_user} with role "{command.role}"'
    else:
        text = f"revoked the token {change.id}{of_user}"
    told = Subjects(_begin(command, asked, now, text)).index()
    return IndexedEvent(told.event, tuple(dict.fromkeys((*told.subjects, *(f"user:{name}" for name in users)))))


def _make_node_event(state: State, command: NodeCommand, asked: Asked, now: float) -> IndexedEvent:
    node = state.nodes.get(command.node)
    event = msgspec.structs.replace(_begin(command, asked, now, describe_node_command(command)), node=command.node)
    if node is None:
        return Subjects(event).index()
    event = msgspec.structs.replace(event, tree=node.tree or "")
    stopped = {job.element.name for job in node.jobs.values()} if isinstance(command, DrainNode) else set()
    return Subjects(event).add("operation", stopped).index()


# --- sentences about configurations


def _describe(command: Any, changes: list[ConfigChange]) -> str:
    if isinstance(command, Undo):
        return f"took back change {command.number}: {_describe_changes(changes)}"
    if isinstance(command, ApplyTree):
        return f"{describe_applied(command)}: {_describe_changes(changes)}"
    if type(command) not in _DESCRIPTIONS:
        return f"carried out {_name_of(command)}"
    return _DESCRIPTIONS[type(command)](command, changes) + ("" if changes else ", which changed nothing")


def _describe_changes(changes: list[ConfigChange]) -> str:
    return _list_changes(changes, _describe_change) or "nothing"


def _list_changes(changes: list[ConfigChange], describe: Callable[[ConfigChange], str]) -> str:
    unfolded = [inner for each in changes for inner in unfold(each)]
    sentences = [describe(each) for each in unfolded[:MAX_NAMED]]
    if len(unfolded) > MAX_NAMED:
        sentences.append(f"{len(unfolded) - MAX_NAMED} more")
    return ", ".join(sentences)


def _describe_change(change: ConfigChange) -> str:
    where = f"pool {quoted(change.pool)}" if change.pool else f"tree {quoted(change.tree)}"
    if not change.attribute:
        return f"{where} {'is gone' if change.new is None else 'is there'}"
    text = _describe_value(change)
    return f"{where} {text}" if change.tree else text


def _describe_value(change: ConfigChange) -> str:
    return f"{change.attribute} {format_setting(change.old)} -> {format_setting(change.new)}"


def _describe_attributes(changes: list[ConfigChange]) -> str:
    sentences = _list_changes(changes, _describe_value)
    return f": {sentences}" if sentences else ""


def _describe_move(command: commands.MovePool, changes: list[ConfigChange]) -> str:
    own = [each for each in changes if each.pool == command.new_name]
    return f"moved pool {quoted(command.pool)}{_describe_attributes(own)}"


def _describe_removal(what: str, changes: list[ConfigChange], is_tree: bool) -> str:
    below = sum(bool(each.pool) and not each.attribute for each in changes) - (not is_tree)
    return f"removed {what}" + (f" and {count(below, 'pool')} below it" if below > 0 else "")


_DESCRIPTIONS: Final[Mapping[type[Any], Callable[[Any, list[ConfigChange]], str]]] = {
    commands.CreateTree: lambda c, _: f"made pool tree {quoted(c.name)}",
    commands.ChangeTree: lambda c, found: f"changed pool tree {quoted(c.tree)}{_describe_attributes(found)}",
    commands.RemoveTree: lambda c, found: _describe_removal(f"pool tree {quoted(c.tree)}", found, True),
    commands.SetDefaultTree: lambda c, _: (
        "unset the default tree" if c.tree is None else f"made pool tree {quoted(c.tree)} the default one"
    ),
    commands.CreatePool: lambda c, _: f"made pool {quoted(c.name)} under {quoted(c.parent)}",
    commands.ChangePool: lambda c, found: f"changed pool {quoted(c.pool)}{_describe_attributes(found)}",
    commands.RemovePool: lambda c, found: _describe_removal(f"pool {quoted(c.pool)}", found, False),
    commands.MovePool: _describe_move,
    commands.TransferPoolResources: lambda c, _: (
        f"gave resources of pool {quoted(c.source)} to pool {quoted(c.destination)}"
    ),
}


# --- sentences about operations


def _make_operation_event(
    state: State, command: Any, asked: Asked, record: OperationRecord | None, now: float
) -> IndexedEvent:
    event = _begin(command, asked, now, _describe_operation(command, record))
    if record is None:
        return Subjects(event).index()
    places = [(tree, options.pool) for tree, options in record.trees.items()]
    before = state.operations.get(record.id)
    if before is not None:
        places += [(tree, options.pool) for tree, options in before.record.trees.items()]
    tree, pool = places[0] if places else ("", "")
    event = msgspec.structs.replace(event, operation=record.id, tree=tree, pool=pool)
    return Subjects(event).add_pools(state.trees, places).index()


def _make_job_event(state: State, command: operations.JobCommand, asked: Asked, now: float) -> IndexedEvent:
    job = state.find_live_job(command.job_id)
    record, pool = job.element.operation.record, (job.element.tree.name, job.element.options.pool)
    verb = "aborted" if isinstance(command, operations.AbortJob) else "abandoned"
    event = msgspec.structs.replace(
        _begin(command, asked, now, f"{verb} job {printable(job.id)} of {name_operation(record)}"),
        operation=record.id, job=job.id, node=job.node.id, tree=pool[0], pool=pool[1],
    )  # fmt: skip
    return Subjects(event).add_pools(state.trees, [pool]).index()


def _describe_operation(command: Any, record: OperationRecord | None) -> str:
    name = "an operation" if record is None else name_operation(record)
    if isinstance(command, operations.StartOperation) and record is not None:
        pools = " and ".join(quoted(options.pool) for options in record.trees.values())
        return f"started {name} in pool {pools}"
    if isinstance(command, operations.AbortOperation):
        return f"aborted {name}" + (f": {printable(command.message)}" if command.message else "")
    if isinstance(command, operations.SuspendOperation):
        return f"suspended {name}" + (" and aborted its running jobs" if command.abort_running_jobs else "")
    if isinstance(command, operations.UpdateOperation):
        names = sorted(key for key in command.parameters if _is_parameter(key) or key == operations.ANNOTATIONS)
        return f"changed {name}: {', '.join(names[:MAX_NAMED])}" + (" ..." if len(names) > MAX_NAMED else "")
    if isinstance(command, operations.PatchOperation):
        known = [f"{path} = {value}" for path, value in list_known(command.patches).items()]
        return f"patched {name}: {', '.join(known[:MAX_NAMED])}" + (" ..." if len(known) > MAX_NAMED else "")
    verb = {operations.CompleteOperation: "completed", operations.ResumeOperation: "resumed"}.get(type(command))
    return f"{verb or 'changed'} {name}"


def name_operation(record: OperationRecord) -> str:
    """Return an operation's name: ``operation 1-2-3-4 "title"``."""
    return f"operation {record.id}" + (f" {quoted(record.title)}" if record.title else "")
