"""Rights of a user by the access lists of a state (semantics.md 12). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cpumond.core.words import quoted
from cpumond.scheduler.model import (
    ROOT_POOL,
    SUBPOOL_DELIMITER,
    OperationRecord,
    PoolConfig,
    PreemptionRecord,
    TreeConfig,
)
from cpumond.scheduler.rights.entries import OWNED, Access, AccessEntry, Permission, StandingEntry, Verdict, judge
from cpumond.scheduler.rights.users import User

if TYPE_CHECKING:
    from cpumond.scheduler.elements import PoolElement
    from cpumond.scheduler.state import State

HIDDEN: Final = "hidden"
_WORD: Final = re.compile(r"[0-9A-Za-z-]+")


class Rights:
    """Decisions about the rights of one user. Each decision is made once and kept: use an object of this class for only
    one request, in which the state does not change.

    ``readable``: keeps decisions from one request to the next, as long as the configuration is the same."""

    def __init__(self, state: State, user: User, readable: dict[tuple[Any, ...], bool] | None = None) -> None:
        self.state = state
        self.user = user
        self._accesses: dict[tuple[str, str], Access] = {}
        self._verdicts: dict[tuple[str, str, Permission], Verdict] = {}
        self._denying: set[str] | None = None
        self._readable: dict[tuple[Any, ...], bool] = {} if readable is None else readable
        """Decisions to read. Operations share a decision if they agree in everything that it depends on."""
        self._hidden: dict[str, bool] = {}

    def access_to(self, tree: str, pool: str = ROOT_POOL) -> Access:
        """Return everything that decides about an explicit pool or, for ``<Root>``, the tree; both must exist."""
        key = (tree, pool)
        found = self._accesses.get(key)
        if found is None:
            found = self._accesses[key] = read_access(self.state.config.trees[tree], pool)
        return found

    @property
    def is_open(self) -> bool:
        """Return whether no tree has or requires any access list: rights are those from before access lists existed."""
        return all(
            not tree.settings.acl_required and all(read_access(tree, name).is_open for name in (ROOT_POOL, *tree.pools))
            for tree in self.state.config.trees.values()
        )

    def on_pool(self, tree: str, pool: str, permission: Permission) -> Verdict:
        """Decide about an explicit pool or, for ``<Root>``, the tree. Tree and pool must exist."""
        key = (tree, pool, permission)
        found = self._verdicts.get(key)
        if found is None:
            found = self._verdicts[key] = judge(self.user, permission, self.access_to(tree, pool))
        return found

    def on_operation(self, record: OperationRecord, permission: Permission) -> Verdict:
        """Decide about an operation by its own list and the lists of its pools in all of its trees."""
        return judge(self.user, permission, self.access_to_operation(record))

    def access_to_operation(self, record: OperationRecord) -> Access:
        """Everything that decides about an operation: entries of all its trees. One that allows is enough."""
        what = f"operation {record.id}"
        entries = [StandingEntry(entry, what) for entry in record.acl]
        pools = [self.access_to(*place) for place in self.places_of(record)]
        for pool in pools:
            entries += [each for each in pool.entries if each not in entries]
        is_open = any(pool.is_open for pool in pools)
        closed_by = next((pool.closed_by for pool in pools), "its pool tree is gone")
        return Access(what, tuple(entries), is_open, "" if is_open else closed_by, record.user, OWNED)

    def places_of(self, record: OperationRecord) -> Iterator[tuple[str, str]]:
        """Yield each existing tree of an operation, with the explicit pool whose access lists apply to it."""
        live = self.state.operations.get(record.id)
        for name, options in record.trees.items():
            tree = self.state.config.trees.get(name)
            element = None if live is None else live.elements.get(name)
            if element is not None and element.parent is not None:
                yield name, explicit_pool(element.parent)
            elif tree is not None:
                parent = options.pool.partition(SUBPOOL_DELIMITER)[0]
                yield name, next((each for each in (options.pool, parent) if each in tree.pools), ROOT_POOL)

    def readable(self, records: list[OperationRecord]) -> list[OperationRecord]:
        """Return the operations that the user may read. This is fast if no entry denies reading."""
        if self.user.admin:
            return records
        if not self._find_denying():
            return [each for each in records if not each.acl or self.may_read(each)]
        # This decides as may_read does, but once for each pool: very many operations are listed.
        found, name, known, live = list[OperationRecord](), self.user.name, self._readable, ("pending", "running")
        for record in records:
            trees = record.trees
            if record.acl or record.user == name or record.state not in live or len(trees) != 1:
                verdict: bool | None = self.may_read(record)
            else:
                for tree, options in trees.items():
                    place = (tree, options.pool)
                verdict = known.get(place)
                if verdict is None:
                    verdict = known[place] = self.may_read(record)
            if verdict:
                found.append(record)
        return found

    def may_read(self, record: OperationRecord) -> bool:
        """Return whether the user may know that an operation exists."""
        if self.user.admin or (not record.acl and self._find_denying().isdisjoint(record.trees)):
            return True
        pools = [(name, options.pool) for name, options in record.trees.items()]
        key = (record.user == self.user.name, record.is_finished, record.acl, *pools)
        if key not in self._readable:
            self._readable[key] = self.on_operation(record, "read").allowed
        return self._readable[key]

    def hides(self, operation_id: str) -> bool:
        """Return whether an operation exists but is hidden from the user."""
        if self.user.admin or not operation_id:
            return False
        hidden = self._hidden.get(operation_id)
        if hidden is None:
            record = self.state.record_of(operation_id)
            hidden = self._hidden[operation_id] = record is not None and not self.may_read(record)
        return hidden

    def hide_operations(self, text: str) -> str:
        """Put HIDDEN in place of the ids, in a sentence, of operations that are hidden from the user."""
        return text if self.user.admin else _WORD.sub(lambda each: HIDDEN if self.hides(each[0]) else each[0], text)

    def see_preemption(self, record: PreemptionRecord) -> PreemptionRecord | None:
        """Return a preemption, without the beneficiary if that operation is hidden from the user. Returns None if the
        preempted operation is hidden."""
        if self.hides(record.operation_id):
            return None
        if not self.hides(record.preemptor_operation_id):
            return record
        why = self.hide_operations(record.why)
        if record.preemptor_job_id:
            why = why.replace(record.preemptor_job_id, HIDDEN)
        return msgspec.structs.replace(record, why=why, preemptor_operation_id="", preemptor_job_id="")

    def _find_denying(self) -> set[str]:
        """Return the trees with an entry that denies reading. Usually there are none, so listing stays fast."""
        if self._denying is None:
            self._denying = {name for name, tree in self.state.config.trees.items() if _denies_reading(tree)}
        return self._denying

    def may_read_secrets(self, record: OperationRecord) -> bool:
        """Return whether the user may see the environment and output of an operation's jobs."""
        return self.on_operation(record, "read_secrets").allowed


def explicit_pool(pool: PoolElement) -> str:
    """Return the explicit pool whose access list applies to ``pool``: itself or the nearest above; else ``<Root>``."""
    return next((each.name for each in (pool, *pool.ancestors()) if each.config is not None), ROOT_POOL)


def name_pool(tree: str, pool: str) -> str:
    """Return the name of a pool or, for ``<Root>``, of the tree, for a message."""
    return f"pool tree {quoted(tree)}" if pool == ROOT_POOL else f"pool {quoted(pool)}"


def read_access(tree: TreeConfig, pool: str, *, of_child: bool = False) -> Access:
    """Return everything that decides about an explicit pool of a tree or, for ``<Root>``, about the tree (12.2).

    ``of_child``: return only the part that a pool inside of this pool inherits."""
    entries: list[StandingEntry] = []
    owner, listed, inherits = "", "", True
    for depth, item in enumerate(_way_up(tree, pool), int(of_child)):
        settings = item.settings
        owner = owner or settings.owner
        if not inherits:
            continue
        where = name_pool(tree.name, item.name if isinstance(item, PoolConfig) else ROOT_POOL)
        skipped = "object_only" if depth else "descendants_only"
        heir = name_pool(tree.name, pool) if depth else ""
        own: tuple[AccessEntry, ...] = settings.acl or ()
        entries += [StandingEntry(entry, where, heir) for entry in own if entry.inheritance_mode != skipped]
        inherits = settings.inherit_acl
        if settings.acl is not None or not inherits:
            listed = listed or where
    closed_by = f"{listed} has one" if listed else ""
    if not closed_by and tree.settings.acl_required:
        closed_by = f"pool tree {quoted(tree.name)} says acl_required"
    return Access(name_pool(tree.name, pool), tuple(entries), not closed_by, closed_by, owner)


def _way_up(tree: TreeConfig, pool: str) -> Iterator[PoolConfig | TreeConfig]:
    while pool != ROOT_POOL:
        item = tree.pools[pool]
        yield item
        pool = item.parent
    yield tree


def _denies_reading(tree: TreeConfig) -> bool:
    lists = (tree.settings.acl, *(pool.settings.acl for pool in tree.pools.values()))
    return any(entry.action == "deny" and "read" in entry.permissions for acl in lists for entry in acl or ())
