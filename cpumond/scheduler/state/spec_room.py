"""Bounds the memory of specifications, in total and by user, and the memory of all trees and pools; pure.

The contents of specifications and attributes are kept, stored and shown unchanged; only their size is bounded, here."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from cpumond.scheduler.elements import Tree
from cpumond.scheduler.model import (
    TOO_MANY_OPERATIONS,
    TOO_MANY_REQUESTS,
    CommandError,
    Config,
    OperationRecord,
    OperationTreeOptions,
    PoolConfig,
    Task,
    TreeConfig,
)

SCALAR_BYTES: Final = 64
CONTAINER_BYTES: Final = 200
"""Bytes of memory of a scalar without its text, and of a container without its items."""
MAX_CONFIG_BYTES: Final = 64 * 2**20
POOL_BYTES: Final = 4096
"""Maximum bytes of all trees and pools with their attributes, and bytes of one tree or pool without attributes."""


def weigh(value: Any) -> int:
    """Return roughly how many bytes of memory a value made of lists, maps and scalars takes."""
    total = 0
    values = [value]
    while values:
        each = values.pop()
        if isinstance(each, dict):
            total += CONTAINER_BYTES + SCALAR_BYTES * len(each) + sum(map(sys.getsizeof, each))
            values += each.values()
        elif isinstance(each, list | tuple):
            total += CONTAINER_BYTES
            values += each
        else:
            # One character outside of ASCII can make all characters of its text take four bytes.
            total += sys.getsizeof(each) if isinstance(each, str) else SCALAR_BYTES
    return total


def share_parts(record: OperationRecord, trees: Mapping[str, Tree]) -> OperationRecord:
    """Return the record of a new operation. Parts that equal those of the previous operation of its pool, and empty
    maps, are replaced by shared objects: most records differ little and leave most options out."""
    for name, options in list(record.trees.items())[:1]:
        pool = trees[name].pools.get(options.pool) if name in trees else None
        before = None if pool is None else next(reversed(pool.operations.values()), None)
        if before is not None:
            for part in _PARTS:
                _share(record, part, getattr(before.operation.record, part))
    parts: list[msgspec.Struct] = [record, *record.tasks, *record.trees.values()]
    for each in parts:
        for name in _MAPS[type(each)]:
            if not getattr(each, name):
                msgspec.structs.force_setattr(each, name, EMPTY)
    return record


def _share(record: Any, name: str, known: Any) -> None:
    own = getattr(record, name)
    # 1, 1.0 and true are equal in Python, but differ in JSON.
    if own == known and own is not known and msgspec.json.encode(own) == msgspec.json.encode(known):
        msgspec.structs.force_setattr(record, name, known)


EMPTY: Final[dict[str, Any]] = {}
"""Never changed, like all values in records."""
_PARTS: Final = ("user", "tasks", "trees", "running_in", "spec", "job_cpu_monitor")
_MAPS: Final[dict[type[msgspec.Struct], list[str]]] = {
    kind: [field.name for field in msgspec.structs.fields(kind) if field.default_factory is dict]
    for kind in (OperationRecord, Task, OperationTreeOptions)
}


def weigh_change(old: Config, new: Config) -> int:
    """Return by how many bytes the trees and pools of ``new`` exceed those of ``old``. Shared objects are skipped."""
    before, after = _list_config(old, new), _list_config(new, old)
    return sum(map(_weigh_attributes, after)) - sum(map(_weigh_attributes, before))


def check_config(old: Config, new: Config, old_bytes: int) -> None:
    """Check that the additions of ``new`` to ``old`` fit. Raises CommandError."""
    more = weigh_change(old, new)
    if more > 0 and old_bytes + more > MAX_CONFIG_BYTES:
        raise CommandError(
            f"trees and pools would take {old_bytes + more} bytes of memory, at most {MAX_CONFIG_BYTES} are allowed: "
            f"{POOL_BYTES} of each one, and what its attributes take; remove unused pools or attributes",
            TOO_MANY_REQUESTS,
        )


def _list_config(config: Config, other: Config) -> list[TreeConfig | PoolConfig]:
    """Return the trees and pools of ``config`` that are not in ``other``."""
    found: list[TreeConfig | PoolConfig] = []
    for name, tree in config.trees.items():
        same = other.trees.get(name)
        if same is not tree:
            pools = {} if same is None else same.pools
            found += [tree, *(pool for pool in tree.pools.values() if pools.get(pool.name) is not pool)]
    return found


def _weigh_attributes(element: TreeConfig | PoolConfig) -> int:
    return POOL_BYTES + weigh(dict(element.attributes))


class SpecRoom:
    """Limits the specifications that are kept: ``max_bytes`` for those of live operations, half of it for one user.
    Ended operations have ``max_bytes`` of their own."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.live_bytes = 0
        self.ended_bytes = 0
        self._of_user: Counter[str] = Counter()
        self._live: dict[str, int] = {}
        self._ended: dict[str, int] = {}
        self._checked: dict[int, tuple[object, int]] = {}
        """Id of a specification -> the specification and its size; those checked since the last ``has_ahead=False``."""

    def check(self, spec: Any, user: str, has_ahead: bool = False) -> None:
        """Check that one more live operation fits. Raises CommandError.

        ``has_ahead``: whether operations that were checked, but are not added yet, will be added before this operation.
        """
        weight = weigh(spec)
        if not has_ahead:
            self._checked = {}
        ahead = sum(each for _, each in self._checked.values())
        self._checked[id(spec)] = (spec, weight)
        for taken, most, whose in (
            (self._of_user[user], self.max_bytes // 2, f"the operations of user {user!r}"),
            (self.live_bytes, self.max_bytes, "all operations"),
        ):
            if taken + ahead + weight > most:
                raise CommandError(
                    f"spec: takes {weight} bytes of memory, and those of {whose} take {taken} of at most {most} "
                    "(max_specification_memory); put long texts into files that jobs read, or wait until operations "
                    "have ended",
                    TOO_MANY_OPERATIONS,
                )

    def add(self, record: OperationRecord) -> None:
        """Count a kept operation, live or ended. If it has ended, it is no longer counted as live."""
        if record.is_finished:
            live = self._forget_live(record)
            weight = live - record.vault_bytes if live else weigh(record.spec)
            self._ended[record.id] = weight
            self.ended_bytes += weight
        else:
            spec, weight = self._checked.pop(id(record.spec), (None, 0))
            weight = weight if spec is record.spec else weigh(record.spec)
            weight = self._live[record.id] = weight + record.vault_bytes
            self.live_bytes += weight
            self._of_user[record.user] += weight

    def weight_of(self, record: OperationRecord) -> int:
        """Return the size of the specification of a kept operation, in bytes."""
        return self._live.get(record.id) or self._ended.get(record.id, 0)

    def remove_ended(self, operation_id: str) -> None:
        self.ended_bytes -= self._ended.pop(operation_id, 0)

    @property
    def is_full_of_ended(self) -> bool:
        return self.ended_bytes > self.max_bytes

    def _forget_live(self, record: OperationRecord) -> int:
        weight = self._live.pop(record.id, 0)
        self.live_bytes -= weight
        self._of_user[record.user] -= weight
        if self._of_user[record.user] <= 0:
            del self._of_user[record.user]
        return weight
