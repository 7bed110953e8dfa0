"""The state as records of a store, which are written with each change and read at the start."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import msgspec

from cpumond.core.decode import ContentError, decode_json
from cpumond.scheduler.model import (
    UNSTORED_STARTS,
    Config,
    JobRecord,
    LostNode,
    NodeRecord,
    OperationRecord,
    Rules,
    StartRecord,
    encode_record,
)
from cpumond.scheduler.model.budget import BudgetRecord
from cpumond.scheduler.rights.token_records import TokenRecord
from cpumond.scheduler.rights.vaults import SealedVault
from cpumond.scheduler.settings.commands import CreateTree, SetDefaultTree, apply
from cpumond.scheduler.settings.records import changed_records, load_config
from cpumond.scheduler.settings.rollout import Stage
from cpumond.scheduler.settings.vault import without_vault
from cpumond.scheduler.state import State, changes, updates
from cpumond.scheduler.state.transaction import Transaction
from cpumond.scheduler.store import TERM, UNFINISHED, Change, Store, StoreError

DEFAULT_TREE = "default"
FIRST_TREE: Final = MappingProxyType(
    {
        "acl_required": True,
        "default_memory_limit": 536_870_912,
        "enable_memory_reserve": True,
        "guarantee_tolerance": 1.0,
        "per_pool_counts_for_leaves_only": True,
        "share_gang_remainders": True,
    }
)
"""Options of the tree of a new store; existing trees keep theirs. The tree is closed until an administrator grants
rights (12.4). Tasks that set no memory get YTsaurus' default (2.4), of which jobs reserve what earlier ones used (8.1).
Counts allow sub-pools (2.4); guarantees are enforced (6.10); what gangs cannot use is shared (semantics.md 4)."""
_VAULT: Final = re.compile(rb'"secure[-_]vault"')
MUTATION = "mutation"
"""Kind of the records that ``Scheduler.execute`` stores for clients that repeat a command."""


def load_state(
    store: Store, rules: Rules, now: float, new_id: Callable[[], str]
) -> tuple[State, dict[str, dict[str, Any]]]:
    """Read the stored state, and the records of kind MUTATION by key, oldest first. If the store is empty, the tree
    ``default`` is created. Raises StoreError."""
    tables: dict[str, dict[str, Any]] = {}
    vaults = []
    for kind, key, value in store.load():
        if kind == "operation" and _VAULT.search(value):
            vaults.append(key)
        try:
            tables.setdefault(kind, {})[key] = decode_json(value, dict[str, Any])
        except ContentError as error:
            raise _unreadable(kind, error) from None
    if UNFINISHED in tables:
        raise StoreError("the store contains an incomplete copy: run `cpumond store copy` into it again")
    if not tables.keys() - {TERM}:
        config = _make_default_tree(new_id)
        store.write(encode(Transaction(config=config), Config({})))
    else:
        config = load_config(
            {(kind, key): value for kind in ("system", "tree", "pool") for key, value in tables.get(kind, {}).items()}
        )
    _take_vaults_out(store, tables.get("operation", {}), vaults)
    state = changes.make_state(rules, config)
    read = partial(_read_all, tables)
    records = sorted(read("operation", OperationRecord), key=lambda record: record.sequence)
    records.sort(key=lambda record: record.finish_time or 0.0)
    kind, key = UNSTORED_STARTS
    changes.load(
        state, now, operations=records, vaults=read("vault", SealedVault),
        jobs=sorted(read("job", JobRecord), key=lambda record: record.finish_time), nodes=read("node", NodeRecord),
        starts=sorted(read("start", StartRecord), key=lambda record: record.sequence),
        has_unstored_starts=key in tables.get(kind, {}),
        tokens=sorted(read("token", TokenRecord), key=lambda record: record.created_at),
        lost_nodes=sorted(read("lost_node", LostNode), key=lambda lost: lost.lost_at), stages=read("stage", Stage),
        of_budgets=read("budget", BudgetRecord),
    )  # fmt: skip
    for name, progress in tables.get("progress", {}).items():
        if name in state.trees:
            updates.restore_progress(state.trees[name], progress)
    return state, dict(sorted(tables.get(MUTATION, {}).items(), key=lambda item: float(item[1].get("at_s", 0.0))))


def _take_vaults_out(store: Store, records: dict[str, dict[str, Any]], named: Sequence[str]) -> None:
    """Move secrets out of records: up to version 0.2 these contained ``secure_vault``, then an unknown option."""
    for key in named:
        for part in (records[key], *records[key].get("tasks", ())):
            if "spec" in part:
                part["spec"] = without_vault(part["spec"])
    if named:
        store.write([Change("operation", key, encode_record(records[key])) for key in named])


def _make_default_tree(new_id: Callable[[], str]) -> Config:
    """Make a configuration with one tree, the default tree, which has an empty filter."""
    config = Config({})
    for command in (CreateTree(DEFAULT_TREE, dict(FIRST_TREE)), SetDefaultTree(DEFAULT_TREE)):
        config = apply(config, command, new_id=new_id, nodes={}).config
    return config


def _read_all(tables: dict[str, dict[str, Any]], kind: str, cls: type[Any]) -> list[Any]:
    try:
        return [msgspec.convert(value, cls, str_keys=True) for value in tables.get(kind, {}).values()]
    except msgspec.ValidationError as error:
        raise _unreadable(kind, error) from None


def _unreadable(kind: str, error: Exception) -> StoreError:
    return StoreError(f"the store contains a {kind} that this version cannot read: {error}")


def encode(change: Transaction, config: Config) -> list[Change]:
    """Return the records of a transaction. ``config``: the configuration before the transaction.

    Raises CommandError for values that cannot be stored."""
    changes: list[Change] = []
    if change.config is not None:
        for kind, key, value in changed_records(config, change.config):
            changes.append(Change(kind, key, None if value is None else encode_record(value)))
        changes += [Change("progress", name, None) for name in config.trees if name not in change.config.trees]
    changes += [Change("operation", record.id, encode_record(record)) for record in change.operations]
    changes += [Change("vault", vault.operation_id, encode_record(vault)) for vault in change.vaults]
    gone = (record.id for record in change.operations if record.vault_bytes and record.is_finished)
    changes += [Change("vault", operation_id, None) for operation_id in gone]
    changes += [Change("job", record.id, encode_record(record)) for record in change.jobs]
    changes += [Change("start", record.id, None) for record in change.jobs]
    changes += [Change("budget", record.key, encode_record(record)) for record in change.budgets]
    changes += [Change("node", record.id, encode_record(record)) for record in (*change.nodes, *change.kept_nodes)]
    changes += [Change("node", node_id, None) for node_id in change.removed_nodes]
    changes += [Change("lost_node", lost.id, encode_record(lost)) for lost in change.lost_nodes]
    changes += [Change("stage", stage.nodes_filter, encode_record(stage)) for stage in change.stages]
    changes += [Change("stage", name, None) for name in change.removed_stages]
    changes += [Change("token", digest, None) for digest in change.forgotten_tokens]
    changes += [Change("token", record.hash, encode_record(record)) for record in change.tokens]
    return changes


def encode_starts(starts: Iterable[StartRecord]) -> list[Change]:
    return [Change("start", record.id, encode_record(record)) for record in starts]
