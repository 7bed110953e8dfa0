"""Find operations, jobs, nodes, pools and trees by the beginning of a name, for typing and completion. Pure.

Only objects that the user may read are found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Final, Literal

from cpumond.api.figures import View
from cpumond.api.views import list_jobs, order_of_start
from cpumond.scheduler.access import Rights
from cpumond.scheduler.access.required import check_operation
from cpumond.scheduler.model import OperationRecord

NamedKind = Literal["operation", "job", "node", "pool", "tree"]
NEWEST: Final = "-"
"""Stands for the user's newest operation, or for the newest job of an operation."""


class Match(View, frozen=True):
    """An object that a name may stand for. Operations have ``title``, ``state`` and ``user``; jobs have ``state``."""

    id: str
    title: str = ""
    state: str = ""
    user: str = ""


class Matches(View, frozen=True):
    """All objects that a name may stand for, the newest first; ``total`` also counts objects that are left out."""

    matches: list[Match]
    total: int


def find_matches(
    rights: Rights, kind: NamedKind, name: str, *, operation: str = "", tree: str = "", all_of: bool = False,
    within: bool = False, limit: int = 100,
) -> Matches:  # fmt: skip
    """Return the objects that ``name`` may stand for. Three ways are tried until one finds any: as an exact name; as a
    title, or the beginning of an id; as the beginning of a title or alias.

    ``operation``: the operation whose jobs are searched. ``tree``: that of the searched pools, "" for the default one.
    ``all_of``: use all three ways. ``within``: add pools, nodes and trees that contain ``name`` anywhere, ignoring
    case. Live operations come before finished ones. Raises CommandError for an unknown operation."""
    if kind == "operation":
        found = _find_operations(rights, name, all_of)
    elif kind == "job":
        found = _find_jobs(rights, operation, name)
    else:
        found = [Match(each) for each in _fitting(_names(rights, kind, tree), name, all_of, within)]
    return Matches(found[:limit], len(found))


def _names(rights: Rights, kind: NamedKind, tree: str) -> Iterable[str]:
    state = rights.state
    if kind == "node":
        return sorted({*state.nodes, *state.lost_nodes})
    if kind == "tree":
        return sorted(state.trees)
    return sorted(state.find_tree(tree or state.config.default_tree or "").pools)


def _fitting(names: Iterable[str], name: str, all_of: bool, within: bool) -> list[str]:
    if within:
        low = name.lower()
        return sorted((each for each in names if low in each.lower()), key=lambda each: not each.startswith(name))
    found = [each for each in names if each.startswith(name)]
    return [name] if name in found and not all_of else found


def _find_operations(rights: Rights, name: str, all_of: bool) -> list[Match]:
    state = rights.state
    live = [operation.record for operation in state.operations.values()]
    if name == NEWEST:
        own = (each for records in (live, state.finished.values()) for each in records if each.user == rights.user.name)
        newest = max(own, key=attrgetter("sequence"), default=None)
        return [] if newest is None or not rights.may_read(newest) else [_view(newest)]
    known = None if all_of else state.record_of(name)
    if known is not None:
        return [_view(known)] if rights.may_read(known) else []
    exact, near = _ways(name)
    found: list[OperationRecord] = []
    for fits in (lambda each: exact(each) or near(each),) if all_of else (exact, near):
        for records in ([*live, *state.finished.values()],) if all_of else (live, list(state.finished.values())):
            found = found or rights.readable([each for each in records if fits(each)])
    return [_view(each) for each in sorted(found, key=attrgetter("sequence"), reverse=True)]


def _ways(name: str) -> tuple[Callable[[OperationRecord], bool], Callable[[OperationRecord], bool]]:
    """Return two tests: whether ``name`` is a title, alias or start of an id; whether it begins a title or alias."""
    starred = name if name.startswith("*") else f"*{name}"
    return (
        lambda record: record.id.startswith(name) or record.title == name or record.alias == starred,
        lambda record: record.title.startswith(name) or record.alias.startswith(starred),
    )


def _find_jobs(rights: Rights, operation: str, name: str) -> list[Match]:
    record = rights.state.find_record(operation)
    check_operation(rights, record, "read")
    jobs = sorted(list_jobs(rights.state, record), key=order_of_start, reverse=True)
    if name == NEWEST:
        jobs = [job for job in jobs if job.state != "starting"][:1]
    else:
        jobs = [job for job in jobs if job.id == name] or [job for job in jobs if job.id.startswith(name)]
    return [Match(job.id, state=job.state) for job in jobs]


def _view(record: OperationRecord) -> Match:
    return Match(record.id, record.title, record.state, record.user)
