"""The filters of ``list_operations``, and its counters (yt_protocol.md 10)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cpumond.api.yt.parameters import YtRequest, get_text, get_time, plain
from cpumond.api.yt.values import YtError, quote_text
from cpumond.scheduler.model import OperationRecord

Test = Callable[[OperationRecord], bool]


def operation_tests(request: YtRequest) -> dict[str, Test]:
    """Return the tests that the request's filters demand, by dimension."""
    since, until, cursor = (get_time(request, name) for name in ("from_time", "to_time", "cursor_time"))
    direction = get_text(request, "cursor_direction", "past")
    if direction not in ("past", "future"):
        raise YtError(f'list_operations: cursor_direction must be "past" or "future", not {quote_text(direction)}')
    state, user, kind = get_text(request, "state", ""), get_text(request, "user", ""), get_text(request, "type", "")
    pool, tree = get_text(request, "pool", ""), get_text(request, "pool_tree", "")
    text = get_text(request, "filter", "").lower()
    with_failed = plain(request.parameters.get("with_failed_jobs"))

    def is_in_time(record: OperationRecord) -> bool:
        at = record.start_time
        if cursor is not None and not (at < cursor if direction == "past" else at > cursor):
            return False
        return (since is None or at >= since) and (until is None or at <= until)

    def has_text(record: OperationRecord) -> bool:
        texts = (record.id, record.title, record.alias, record.user, record.type, record.state)
        return any(text in part.lower() for part in (*texts, *_pools(record)))

    return {
        "time": is_in_time,
        "filter": lambda record: not text or has_text(record),
        "tree": lambda record: not tree or tree in record.trees,
        "pool": lambda record: not pool or pool in _pools(record, tree),
        "user": lambda record: not user or record.user == user,
        "type": lambda record: not kind or record.type == kind,
        "state": lambda record: not state or record.state == state,
        "failed": lambda record: not isinstance(with_failed, bool) or _has_failed(record) is with_failed,
    }


def _pools(record: OperationRecord, tree: str = "") -> list[str]:
    return [options.pool for name, options in record.trees.items() if not tree or name == tree]


def _has_failed(record: OperationRecord) -> bool:
    return any(counts.failed for counts in record.counts.values())


def count_operations(
    chosen: Sequence[OperationRecord], almost: Mapping[str, Sequence[OperationRecord]]
) -> dict[str, Any]:
    """Count the operations by dimension. For each one, all filters apply except the filter of the dimension itself."""
    return {
        "pool_counts": dict(Counter(pool for record in (*chosen, *almost["pool"]) for pool in set(_pools(record)))),
        "user_counts": dict(Counter(record.user for record in (*chosen, *almost["user"]))),
        "state_counts": dict(Counter(record.state for record in (*chosen, *almost["state"]))),
        "type_counts": dict(Counter(record.type for record in (*chosen, *almost["type"]))),
        "failed_jobs_count": sum(map(_has_failed, (*chosen, *almost["failed"]))),
    }
