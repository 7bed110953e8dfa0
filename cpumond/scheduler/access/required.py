"""Rights that each command needs, and the check that a user has these rights (semantics.md 12.3). Pure.

``check`` runs before ``prepare``: a command that is refused for missing rights reveals nothing about its effects."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, get_args

from cpumond.core.words import quoted
from cpumond.scheduler.access import Rights, explicit_pool, name_pool, read_access
from cpumond.scheduler.decide import admission
from cpumond.scheduler.model import (
    ACCESS_DENIED,
    NO_POOL_SETTINGS,
    ROOT_POOL,
    CommandError,
    Config,
    OperationRecord,
    PoolConfig,
    PoolSettings,
    TreeConfig,
)
from cpumond.scheduler.rights.entries import Permission, Verdict, list_administrators
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings import commands, operations
from cpumond.scheduler.settings.attributes import CONFIG, Edit, canonical_path, edit, read_pool
from cpumond.scheduler.settings.changes import compare_configs
from cpumond.scheduler.settings.rollout import RolloutCommand
from cpumond.scheduler.settings.tree_file import ApplyTree, make_target
from cpumond.scheduler.settings.undo import Undo, list_reverse_commands, reverse
from cpumond.scheduler.state.node_commands import NodeCommand

if TYPE_CHECKING:
    from cpumond.scheduler.state import State
    from cpumond.scheduler.state.commands import Command

WORDS: Final[Mapping[Permission, str]] = {
    "read": "see",
    "use": "start operations in",
    "modify_children": "make, move or remove pools in",
    "write": "change the options of",
    "administer": "administer",
    "manage": "change",
    "read_secrets": "read the environment and logs of",
}
"""Permission -> what it allows, as words that precede the object."""

GUARANTEES: Final = frozenset({
    "weight", "max_share_ratio", "strong_guarantee_resources", "integral_guarantees", "resource_limits",
    "max_operation_count", "max_running_operation_count", "resource_limits_overcommit_tolerance", "max_retry_memory",
    "budget", "flatten", "lending_limit",
})  # fmt: skip
"""Options that decide what a pool gets from its parent. To give it more needs ``write`` on the parent."""

OF_OWNERS: Final = frozenset({
    "mode", "fifo_sort_parameters", "forbid_immediate_operations", "create_ephemeral_subpools",
    "ephemeral_subpool_config", "allow_children_guarantees", "set_container_cpu_limit", "retry_policy",
    "usage_half_life",
})  # fmt: skip
"""Options that decide how a pool uses what it has. Options in neither set need ``administer``."""

OF_TREE_ADMINISTRATORS: Final = frozenset({"acl", "inherit_acl", "owner", "acl_required"})


@dataclass(frozen=True, slots=True)
class Need:
    """A permission that a command needs on an operation or on a pool (``<Root>``: its tree); without ``tree`` the role
    of an administrator. ``aim``: purpose, if that is not obvious. ``was_open``: version 0.1 gave this permission to
    every user with a token; if a store has no access list, users still have it."""

    permission: Permission
    tree: str = ""
    pool: str = ROOT_POOL
    operation: OperationRecord | None = None
    aim: str = ""
    was_open: bool = False

    def verdict(self, rights: Rights) -> Verdict:
        if self.operation is not None:
            return rights.on_operation(self.operation, self.permission)
        if self.tree:
            return rights.on_pool(self.tree, self.pool, self.permission)
        user = rights.user
        if user.admin:
            return Verdict(True, f"{user.name} is an administrator")
        if self.was_open and not user.needs_entry and rights.is_open:
            return Verdict(True, "no tree has an access list or sets acl_required")
        return Verdict(False, "that is for administrators of the scheduler")

    def describe(self) -> str:
        """Describe what the permission allows and on which object: start operations in pool "nlp"."""
        if self.operation is not None:
            what = f"operation {self.operation.id}"
        else:
            what = name_pool(self.tree, self.pool) if self.tree else "pool trees"
        return f"{WORDS[self.permission]} {what}{self.aim and f' {self.aim}'}"


def decide(state: State, command: Command, user: User) -> list[Verdict]:
    """Return the decision on each right that a user's command needs."""
    rights = Rights(state, user)
    return [need.verdict(rights) for need in list_needs(state, command, rights)]


def check(state: State, command: Command, user: User) -> str:
    """Return a sentence that says what allows a user's command. Raises CommandError with code ACCESS_DENIED."""
    rights = Rights(state, user)
    allowed = []
    for need in list_needs(state, command, rights):
        verdict = need.verdict(rights)
        if not verdict.allowed:
            raise refusal(need, verdict, rights)
        allowed.append(verdict.because)
    return "; ".join(dict.fromkeys(allowed))


def check_operation(rights: Rights, record: OperationRecord, permission: Permission) -> str:
    """Check one permission on an operation, for requests that are no commands."""
    need = Need(permission, operation=record)
    verdict = need.verdict(rights)
    if not verdict.allowed:
        raise refusal(need, verdict, rights)
    return verdict.because


def refusal(need: Need, verdict: Verdict, rights: Rights) -> CommandError:
    """Return the error that refuses a command. It says who may not do what, why, and who can change that."""
    helpers: list[str] = []
    if need.operation is not None:
        helpers = list_administrators(rights.access_to_operation(need.operation))
    elif need.tree:
        helpers = list_administrators(rights.access_to(need.tree, need.pool))
    whom = ", ".join([*helpers[:3], "an administrator"])
    text = f"{rights.user.name} may not {need.describe()} (permission {need.permission}): {verdict.because}; ask {whom}"
    return CommandError(text, ACCESS_DENIED, {"permission": need.permission, "user": rights.user.name})


def list_needs(state: State, command: Command, rights: Rights) -> Iterator[Need]:
    """Yield the rights that a command needs. If an object is missing, none is needed: the command itself is refused."""
    yield from _NEEDS[type(command)](state, command, rights)


def _of_administrators(_: State, __: Command, ___: Rights) -> Iterator[Need]:
    yield Need("administer")


def _change_trees(_: State, __: Command, ___: Rights) -> Iterator[Need]:
    yield Need("administer", was_open=True)


def _change_tree(state: State, command: commands.ChangeTree, _: Rights) -> Iterator[Need]:
    tree = state.config.trees.get(command.tree)
    if tree is None:
        return
    names = set(_edited_names(tree, command.edits))
    if names - OF_TREE_ADMINISTRATORS:
        yield Need("write", tree.name)
    for name in sorted(names & OF_TREE_ADMINISTRATORS):
        yield Need("administer", tree.name, aim=f"({name})")


def _edited_names(tree: TreeConfig, edits: tuple[Edit, ...]) -> Iterator[str]:
    for change in edits:
        path = canonical_path("tree", change.path)
        if path[:1] != (CONFIG,):
            yield from path[:1]
        elif len(path) > 1:
            yield path[1]
        else:
            yield CONFIG
            for names in (change.value, tree.attributes.get(CONFIG)):
                yield from canonical_names("tree", names)


def canonical_names(kind: Any, given: object) -> Iterator[str]:
    """Yield the canonical names of the attributes in a dictionary; no names if it is no dictionary."""
    for name in given if isinstance(given, Mapping) else ():
        yield from canonical_path(kind, (str(name),))


def _administer_option(rights: Rights, tree: str, pool: str, name: str, aim: str) -> Need:
    """Return the need for ``administer``, or for ``write`` if the pool is open and version 0.1 had the option."""
    is_old = name not in OF_TREE_ADMINISTRATORS and rights.access_to(tree, pool).is_open
    return Need("write" if is_old else "administer", tree, pool, aim=aim)


def _create_pool(state: State, command: commands.CreatePool, rights: Rights) -> Iterator[Need]:
    tree = state.config.trees.get(command.tree)
    if tree is None or not _is_pool(tree, command.parent):
        return
    yield Need("modify_children", tree.name, command.parent)
    yield from _take_name(state, tree, command.name, command.parent)
    for name in sorted(set(canonical_names("pool", command.attributes))):
        if name in GUARANTEES:
            yield Need("write", tree.name, command.parent, aim=f"to give a pool {name}")
        elif name not in OF_OWNERS:
            yield _administer_option(rights, tree.name, command.parent, name, f"to give a pool {name}")


def _change_pool(state: State, command: commands.ChangePool, rights: Rights) -> Iterator[Need]:
    tree = state.config.trees.get(command.tree)
    pool = None if tree is None else tree.pools.get(command.pool)
    if tree is None or pool is None:
        return
    place, edits = {"name": pool.name, "parent_name": pool.parent}, []
    for change in command.edits:
        name = "".join(canonical_path("pool", change.path[:1]))
        if name in place:
            place[name] = str(change.value)
        else:
            edits.append(change)
    yield Need("write", tree.name, pool.name)
    names = {name for change in edits for name in canonical_path("pool", change.path[:1])}
    for name in sorted(names - GUARANTEES - OF_OWNERS):
        yield _administer_option(rights, tree.name, pool.name, name, f"({name})")
    for name in _raised(pool, edits) if names & GUARANTEES else ():
        yield Need("write", tree.name, pool.parent, aim=f"to give {quoted(pool.name)} more ({name})")
    yield from _move(state, tree, pool, place["parent_name"], place["name"])


def _raised(pool: PoolConfig, edits: list[Edit]) -> list[str]:
    """Return the options by which a pool would get more from its parent than it has now."""
    try:
        attributes, _, _ = edit("pool", pool.attributes, pool.spelled, edits)
        new = read_pool(attributes)
    except CommandError:
        return ["a refused value"]  # missing rights are reported before a wrong value
    return [name for name in sorted(GUARANTEES) if _gets_more(name, pool.settings, new)]


def _gets_more(name: str, old: PoolSettings, new: PoolSettings) -> bool:
    before, after = getattr(old, name), getattr(new, name)
    if name == "integral_guarantees":
        return _is_more_integral(before, after)
    if name in ("budget", "flatten", "lending_limit"):
        return bool(before != after)  # whether the new value is lower depends on too much
    if isinstance(before, Mapping):
        # A resource without a guarantee has guarantee 0; without a limit it is unlimited.
        missing = float("inf") if name == "resource_limits" else 0.0
        return any(after.get(key, missing) > before.get(key, missing) for key in {*before, *after})
    if before == after:
        return False
    if name == "max_share_ratio":
        before, after = (1.0 if value is None else value for value in (before, after))
    return before is None or after is None or bool(after > before)


def _is_more_integral(old: Any, new: Any) -> bool:
    amounts = ("resource_flow", "burst_guarantee_resources")
    for name in amounts:
        before, after = getattr(old, name), getattr(new, name)
        if any(after[key] > before.get(key, 0.0) for key in after):
            return True
    return any(getattr(old, name) != getattr(new, name) for name in old.__struct_fields__ if name not in amounts)


def _remove_pool(state: State, command: commands.RemovePool, _: Rights) -> Iterator[Need]:
    tree = state.config.trees.get(command.tree)
    pool = None if tree is None else tree.pools.get(command.pool)
    if tree is None or pool is None:
        return
    yield Need("modify_children", tree.name, pool.parent)
    removed = {pool.name}
    for other in (pool, *(tree.pools.values() if command.recursive else ())):
        if other is not pool and other.parent not in removed:
            continue
        removed.add(other.name)
        yield Need("write", tree.name, other.name)
        if other.settings.acl is not None or not other.settings.inherit_acl:
            yield Need("administer", tree.name, other.name, aim="to remove its access list")


def _move_pool(state: State, command: commands.MovePool, _: Rights) -> Iterator[Need]:
    tree = state.config.trees.get(command.tree)
    pool = None if tree is None else tree.pools.get(command.pool)
    if tree is None or pool is None:
        return
    yield Need("write", tree.name, pool.name)
    yield from _move(state, tree, pool, command.new_parent, command.new_name)


def _move(state: State, tree: TreeConfig, pool: PoolConfig, parent: str, name: str) -> Iterator[Need]:
    """Yield the permissions, besides ``write`` on the pool, that are needed to change its parent or name."""
    if (parent, name) == (pool.parent, pool.name):
        return
    yield Need("modify_children", tree.name, pool.parent)
    if name != pool.name:
        yield from _take_name(state, tree, name, parent)
    if parent == pool.parent or not _is_pool(tree, parent):
        return
    yield Need("modify_children", tree.name, parent)
    yield from _inherit_anew(tree, pool.parent, parent, pool.name)
    given = sorted(GUARANTEES.intersection(pool.attributes))
    if given:
        yield Need("write", tree.name, parent, aim=f"to give a pool {given[0]}")


def _inherit_anew(tree: TreeConfig, old: str, new: str, name: str) -> Iterator[Need]:
    """Yield what the move of a pool from ``old`` to ``new`` needs, because the pool would inherit a different access
    list, which also decides about its operations and their secrets."""
    pool = tree.pools.get(name)
    inherited = [_inherited(tree, parent, NO_POOL_SETTINGS if pool is None else pool.settings) for parent in (old, new)]
    if inherited[0] != inherited[1]:
        explicit = old if pool is None else name
        yield Need("administer", tree.name, explicit, aim=f"to have {quoted(name)} inherit another access list")


def _inherited(tree: TreeConfig, parent: str, settings: PoolSettings) -> Any:
    """Return everything that a pool inside of ``parent`` inherits and that decides about rights."""
    access = read_access(tree, parent, of_child=True)
    entries = [(each.entry, each.where) for each in access.entries]
    return (entries, access.is_open) if settings.inherit_acl else None, settings.owner or access.owner


def _take_name(state: State, tree: TreeConfig, name: str, parent: str) -> Iterator[Need]:
    """Yield what a new explicit pool needs if it takes the name and the operations of an ephemeral pool (2.9)."""
    living = state.trees[tree.name].pools.get(name)
    if living is None or living.config is not None or not _is_pool(tree, parent):
        return
    above = explicit_pool(living)
    if above != parent:
        yield Need("modify_children", tree.name, above, aim=f"to take the operations of {quoted(name)} from it")
        yield from _inherit_anew(tree, above, parent, name)


def _transfer(state: State, command: commands.TransferPoolResources, _: Rights) -> Iterator[Need]:
    """Yield ``write`` on the parents of the changed pools: of both, and of their ancestors below the common one."""
    tree = state.config.trees.get(command.tree)
    if tree is None or command.source not in tree.pools or command.destination not in tree.pools:
        return
    source, destination = (list(commands.list_path(tree, name)) for name in (command.source, command.destination))
    changed = [name for name in (*source, *destination) if (name in source) != (name in destination)]
    for parent in dict.fromkeys(tree.pools[name].parent for name in changed):
        yield Need("write", tree.name, parent)


def _is_pool(tree: TreeConfig, name: str) -> bool:
    return name == ROOT_POOL or name in tree.pools


def _start(state: State, command: operations.StartOperation, rights: Rights) -> Iterator[Need]:
    try:
        trees, options = operations.read_places(command.spec)
    except CommandError:
        return  # the command itself is refused, without more detail
    for name in (state.config.default_tree,) if trees is None else trees:
        wanted = str(options.get(name, {}).get("pool", options[""].get("pool", "")))
        living = state.trees.get(name)
        if living is not None:
            yield Need("use", name, explicit_pool(admission.find_place(living, wanted, rights.user.name)))


def _manage(state: State, command: Any, _: Rights) -> Iterator[Need]:
    """Yield the need for ``manage`` on the operation. Raises CommandError if the operation does not exist."""
    yield Need("manage", operation=state.find_record(command.operation_id))


def _manage_job(state: State, command: operations.JobCommand, _: Rights) -> Iterator[Need]:
    if command.operation_id:
        record = state.find_record(command.operation_id)
    else:
        record = state.find_live_job(command.job_id).element.operation.record
    yield Need("manage", operation=record)


def _update_operation(state: State, command: operations.UpdateOperation, rights: Rights) -> Iterator[Need]:
    record = state.find_record(command.operation_id)
    yield Need("manage", operation=record)
    try:
        given, acl = operations.read_parameters(command.parameters), operations.read_changed_acl(command.parameters)
    except CommandError:
        return
    if acl is not None:
        yield Need("administer", operation=record, aim="(acl)")
    places = dict(rights.places_of(record))
    for name in record.trees:
        wanted = str({**given[""], **given.get(name, {})}.get("pool", ""))
        if not wanted or name not in places:
            continue
        new = explicit_pool(admission.find_place(state.trees[name], wanted, record.user))
        if new == places[name]:
            continue
        yield Need("use", name, new)
        if _counting(rights, name, new) != _counting(rights, name, places[name]):
            yield Need("read_secrets", operation=record, aim="to have it inherit another access list")


def _maintain(state: State, command: NodeCommand, _: Rights) -> Iterator[Need]:
    node = state.nodes.get(command.node)
    lost = state.lost_nodes.get(command.node)
    tree = (node.tree if node is not None else lost.tree if lost is not None else "") or ""
    yield Need("administer", tree if tree in state.trees else "", aim=f"(node {quoted(command.node)})")


def _undo(state: State, command: Undo, rights: Rights) -> Iterator[Need]:
    for each in list_reverse_commands(command.changes):
        yield from list_needs(state, each, rights)
    try:
        target = reverse(state.config, command.changes, _planned_ids())
    except CommandError:
        return  # the command itself is refused, too
    yield from _inherit_at_once(state.config, target)


def _apply_tree(state: State, command: ApplyTree, rights: Rights) -> Iterator[Need]:
    target = make_target(state.config, command, _planned_ids()).config
    # These commands reverse the changes from the target to the present, so they call pools by their present names.
    for each in list_reverse_commands(compare_configs(target, state.config, exact=True)):
        yield from list_needs(state, each, rights)
    yield from _inherit_at_once(state.config, target)


def _planned_ids() -> Callable[[], str]:
    numbers = itertools.count(1)
    return lambda: f"planned-{next(numbers)}"


def _inherit_at_once(config: Config, target: Config) -> Iterator[Need]:
    """Yield what ``_inherit_anew`` yields, for pools moved by many changes at once: their parents may be new."""
    for name, tree in target.trees.items():
        old = config.trees.get(name)
        if old is None or old is tree:
            continue
        before = {pool.id: pool for pool in old.pools.values()}
        for pool in tree.pools.values():
            was = before.get(pool.id)
            if was is None or _id_of(old, was.parent) == _id_of(tree, pool.parent):
                continue
            if _inherited(old, was.parent, was.settings) != _inherited(tree, pool.parent, was.settings):
                yield Need("administer", name, was.name, aim="to have it inherit another access list")


def _id_of(tree: TreeConfig, pool: str) -> str:
    return tree.id if pool == ROOT_POOL else tree.pools[pool].id


def _counting(rights: Rights, tree: str, pool: str) -> Any:
    access = rights.access_to(tree, pool)
    return [(each.entry, each.where) for each in access.entries], access.is_open


_NEEDS: Final[Mapping[type, Callable[[State, Any, Rights], Iterator[Need]]]] = {
    commands.CreateTree: _change_trees,
    commands.ChangeTree: _change_tree,
    commands.RemoveTree: _change_trees,
    commands.SetDefaultTree: _change_trees,
    commands.CreatePool: _create_pool,
    commands.ChangePool: _change_pool,
    commands.RemovePool: _remove_pool,
    commands.MovePool: _move_pool,
    commands.TransferPoolResources: _transfer,
    ApplyTree: _apply_tree,
    Undo: _undo,
    **dict.fromkeys(get_args(NodeCommand), _maintain),
    **dict.fromkeys(get_args(RolloutCommand), _of_administrators),
    operations.StartOperation: _start,
    operations.AbortOperation: _manage,
    operations.CompleteOperation: _manage,
    operations.SuspendOperation: _manage,
    operations.ResumeOperation: _manage,
    operations.UpdateOperation: _update_operation,
    operations.PatchOperation: _manage,
    operations.AbortJob: _manage_job,
    operations.AbandonJob: _manage_job,
}
"""Command -> function that yields what it needs. A command that is missing here cannot be executed."""
