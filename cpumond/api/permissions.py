"""Answers about rights, and filters for what a user may see of operations (semantics.md 12). Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from cpumond.api.figures import View
from cpumond.api.yt.ypath import YPath, parse_ypath
from cpumond.core.words import did_you_mean, nearest, quoted
from cpumond.scheduler.access import Rights, explicit_pool, name_pool
from cpumond.scheduler.access.required import Need, list_needs
from cpumond.scheduler.elements import PoolElement, Tree
from cpumond.scheduler.model import (
    ACCESS_DENIED,
    NO_SUCH_OPERATION,
    RESOLVE,
    ROOT_POOL,
    CommandError,
    OperationRecord,
    Task,
)
from cpumond.scheduler.rights.entries import OWNED, PERMISSIONS, AccessEntry, Permission, Verdict
from cpumond.scheduler.settings import commands
from cpumond.scheduler.settings.values import FIELD
from cpumond.scheduler.state import State

POOL_PERMISSIONS: Final[tuple[Permission, ...]] = ("use", "modify_children", "write", "administer")
"""Permissions in answers about pools and trees."""

SECRETS: Final = frozenset({"environment", "secure_vault"})
HIDDEN: Final = "environment_hidden"
"""Replaces parts of a specification that its reader may not see."""


class Can(View, frozen=True):
    """Whether a user may do something, and a sentence with the rule that decides it."""

    allowed: bool
    because: str


class PoolRights(View, frozen=True):
    """Pool (explicit, ephemeral or ``<Root>``) -> the user's rights on it: use, modify_children, write, administer."""

    tree: str
    pools: dict[str, list[Permission]]


class InheritedEntry(View, frozen=True):
    """An access entry that a pool inherits. ``where``: the object whose access list contains it."""

    where: str
    entry: AccessEntry


class RightsTarget(NamedTuple):
    """The object of a question: an operation, an explicit pool, a tree (its ``<Root>``); for others ``tree`` is ""."""

    tree: str = ""
    pool: str = ROOT_POOL
    operation: OperationRecord | None = None

    def describe(self) -> str:
        if self.operation is not None:
            return f"operation {self.operation.id}"
        return name_pool(self.tree, self.pool) if self.tree else "an object without an access list"


def find_target(state: State, name: str, tree: str = "") -> RightsTarget:
    """Return the object that a text names: ``tree:NAME``, a path, an operation's id or ``*alias``, or a pool of
    ``tree`` ("" = the default one). Raises CommandError with code RESOLVE."""
    if name.startswith(("//", "#")):
        return find_path_target(state, parse_ypath(name))
    kind, _, rest = name.partition(":")
    if kind == "tree" and rest in state.trees:
        return RightsTarget(rest)
    try:
        return RightsTarget(operation=state.find_record(name))
    except CommandError as error:
        if name.startswith("*") or error.code != NO_SUCH_OPERATION:
            raise
    if kind == "tree":
        raise CommandError(f"Pool tree {quoted(rest)} does not exist{did_you_mean(rest, state.trees)}", RESOLVE)
    chosen = state.find_tree(tree or state.config.default_tree)
    return RightsTarget(chosen.name, explicit_pool(_find_pool(chosen, name)))


def _find_pool(tree: Tree, name: str) -> PoolElement:
    pool = tree.root if name == ROOT_POOL else tree.pools.get(name)
    if pool is None:
        near = did_you_mean(name, tree.pools)
        raise CommandError(
            f"there is no pool {quoted(name)} in tree {quoted(tree.name)}, and no such operation{near}", RESOLVE
        )
    return pool


def find_path_target(state: State, path: YPath) -> RightsTarget:
    """Return the object whose access list applies to a path of the ``yt`` protocol. Raises CommandError."""
    config = state.config
    if path.root != "/":
        wanted = path.root.removeprefix("#")
        for tree in config.trees.values():
            found = [pool.name for pool in tree.pools.values() if pool.id == wanted]
            if found or tree.id == wanted:
                return RightsTarget(tree.name, found[0] if found else ROOT_POOL)
        raise CommandError(f"No such object {wanted}", RESOLVE)
    steps = path.steps
    if steps[:2] == ("sys", "operations") and len(steps) > 2:
        return RightsTarget(operation=state.find_record(steps[2]))
    if steps[:2] == ("sys", "pools") and config.default_tree:
        steps = ("sys", "pool_trees", config.default_tree, *steps[2:])
    if steps[:2] != ("sys", "pool_trees") or len(steps) < 3:
        return RightsTarget()
    living = state.find_tree(steps[2])
    return RightsTarget(living.name, steps[-1] if len(steps) > 3 and steps[-1] in living.config.pools else ROOT_POOL)


def check_question(rights: Rights, target: RightsTarget, about: str) -> None:
    """Check that the user may ask for another user's rights. Raises CommandError with code ACCESS_DENIED."""
    if target.operation is not None:
        verdict = rights.on_operation(target.operation, "administer")
    else:
        verdict = Need("administer", target.tree, target.pool).verdict(rights)
    if not verdict.allowed:
        raise CommandError(
            f"{rights.user.name} may not ask what {about} may do to {target.describe()}: {verdict.because}; its "
            "administrators may, and all users may ask about their own rights",
            ACCESS_DENIED,
        )


def judge_action(state: State, rights: Rights, action: str, target: RightsTarget) -> Verdict:
    """Decide whether a user may do what a permission or a word of the command line names. Raises CommandError."""
    verdicts = [need.verdict(rights) for need in _needs_of(state, rights, action.replace("-", "_"), target)]
    refused = next((verdict for verdict in verdicts if not verdict.allowed), None)
    reasons = dict.fromkeys(verdict.because for verdict in verdicts)
    return refused or Verdict(True, "; ".join(reasons) or f"every user may read {target.describe()}")


def _needs_of(state: State, rights: Rights, action: str, target: RightsTarget) -> list[Need]:
    if target.operation is not None:
        wanted = OPERATION_WORDS.get(action, action)
        if wanted in OWNED:
            return [Need(wanted, operation=target.operation)]
        raise _unknown(action, target, (*OWNED, *OPERATION_WORDS))
    if action in PERMISSIONS:
        return [Need(action, target.tree, target.pool)] if target.tree or action != "read" else []
    command = _COMMANDS.get(action)
    if command is None or not target.tree:
        raise _unknown(action, target, (*PERMISSIONS, *(_COMMANDS if target.tree else ())))
    made = command(state, target)
    return [made] if isinstance(made, Need) else list(list_needs(state, made, rights))


def _unknown(action: str, target: RightsTarget, known: tuple[str, ...]) -> CommandError:
    near = nearest(action, known)
    hint = f'did you mean "{near}"?' if near else f"known: {', '.join(dict.fromkeys(known))}"
    return CommandError(
        f"action {quoted(action)} is unknown for {target.describe()}; {hint}", attributes={FIELD: "action"}
    )


OPERATION_WORDS: Final[Mapping[str, Permission]] = {
    **dict.fromkeys(("abort", "complete", "suspend", "resume", "update", "set", "pin", "unpin"), "manage"),
    **dict.fromkeys(("log", "specification", "environment"), "read_secrets"),
    **dict.fromkeys(("show", "list", "jobs", "why", "explain"), "read"),
}
"""Words of the command line for operations, and the permission that each needs."""


def _remove(_: State, target: RightsTarget) -> Any:
    if target.pool == ROOT_POOL:
        return commands.RemoveTree(target.tree)
    return commands.RemovePool(target.tree, target.pool, recursive=True)


def _move(state: State, target: RightsTarget) -> Any:
    """Return the command that moves a pool, because the destination, too, decides whether it is allowed."""
    if target.pool == ROOT_POOL:
        return Need("administer")
    parent = state.config.trees[target.tree].pools[target.pool].parent
    return commands.MovePool(target.tree, target.pool, parent, f"{target.pool}.new")


_COMMANDS: Final[Mapping[str, Callable[[State, RightsTarget], Any]]] = {
    "start": lambda _, target: Need("use", target.tree, target.pool),
    "create": lambda _, target: Need("modify_children", target.tree, target.pool),
    "set": lambda _, target: Need("write", target.tree, target.pool),
    "remove": _remove,
    "move": _move,
    "show": lambda _, target: Need("read", target.tree, target.pool),
}
"""Words of the command line for pools and trees -> the right that each needs, or the command that it sends."""


def explain_pool_permissions(rights: Rights, pool: PoolElement) -> dict[str, str]:
    """Return permission -> "" if the user has it on a pool (the root: on the tree), else the reason why not."""
    name = explicit_pool(pool)
    return _reasons((wanted, rights.on_pool(pool.tree.name, name, wanted)) for wanted in POOL_PERMISSIONS)


def explain_operation_permissions(rights: Rights, record: OperationRecord) -> dict[str, str]:
    """Return permission -> "" or the reason why not, for an operation; ``administer``: of its own access list."""
    return _reasons((wanted, rights.on_operation(record, wanted)) for wanted in PERMISSIONS if wanted in OWNED)


def _reasons(verdicts: Iterator[tuple[Permission, Verdict]]) -> dict[str, str]:
    return {str(wanted): "" if verdict.allowed else verdict.because for wanted, verdict in verdicts}


def list_inherited(rights: Rights, pool: PoolElement) -> list[InheritedEntry]:
    """Return the entries that a pool inherits from the access lists of the pools above it and of the tree."""
    entries = rights.access_to(pool.tree.name, explicit_pool(pool)).entries
    return [InheritedEntry(each.where, each.entry) for each in entries if each.heir]


def list_permissions(rights: Rights, pool: PoolElement) -> list[Permission]:
    name = explicit_pool(pool)
    return [each for each in POOL_PERMISSIONS if rights.on_pool(pool.tree.name, name, each).allowed]


def encode_acl(entries: Iterable[AccessEntry] | None) -> list[dict[str, Any]]:
    return msgspec.json.decode(msgspec.json.encode(list(entries or ())), type=list[dict[str, Any]])


def hide_secrets(record: OperationRecord) -> OperationRecord:
    """Return the record for a reader who may not see its secrets: HIDDEN replaces the environment."""
    tasks = tuple(_without_secrets(task) for task in record.tasks)
    return msgspec.structs.replace(record, tasks=tasks, spec=without_secrets(record.spec))


def _without_secrets(task: Task) -> Task:
    mark = {HIDDEN: True} if task.environment else {}
    return msgspec.structs.replace(task, environment={}, spec={**without_secrets(task.spec), **mark})


def without_secrets(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a dictionary where HIDDEN replaces SECRETS, at any depth and in any spelling."""
    shown: dict[str, Any] = {}
    for key, value in table.items():
        if str(key).replace("-", "_") in SECRETS:
            shown[HIDDEN] = True
        else:
            shown[key] = without_secrets(value) if isinstance(value, Mapping) else value
    return shown
