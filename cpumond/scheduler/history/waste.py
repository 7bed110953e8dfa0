"""Waste: CPU requested but not used in a week, by user, pool and class of jobs, and requests that would suffice; pure.

Core-hours of users and pools are the history's totals of whole UTC days. Those of classes come from counters of jobs
that are still known. A counter covers a whole run: if a job ran partly outside of the week, its usage is spread evenly.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from cpumond.core.measures import format_cores
from cpumond.core.wire import CpuUse
from cpumond.core.words import count, format_percent, format_utc, quoted
from cpumond.scheduler.elements import Job
from cpumond.scheduler.history.model import HOUR_S, POOL, USER, Amounts, Key, PeriodTotals
from cpumond.scheduler.model import CLASSES, ROOT_POOL, JobClass, JobRecord, OperationRecord

MAX_CLASSES: Final = 20
ENOUGH_FOR, HEADROOM, WORTH_IT = 0.95, 1.25, 0.9
"""A better request is a mean usage times HEADROOM, since a mean says nothing about peaks. Jobs with ENOUGH_FOR of their
class's running time used no more than this mean. It is proposed if it is at most WORTH_IT of the present one."""
MOST_HELD: Final = 0.01
"""If the ratio of throttled time (except what the agent caused) to used time is above this, jobs need their request."""
LEAST_HOURS: Final = 1.0
"""If fewer core-hours of a class are unused, no better request is proposed for it."""


class WasteClass(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of operations whose titles differ only in numbers (``#``). ``task``: "" for operations with one task.

    Amounts are core-hours. ``ordered_cores``, ``used_cores``: means over the running time. ``better_cores``: a request
    that would suffice; null if none is clearly lower. ``memory``, ``max_memory``: highest request and usage, in bytes,
    of jobs that ended; 0 if unknown. ``sentence``: all of this in words."""

    title: str
    task: str
    job_class: JobClass
    jobs: int
    ordered: float
    used: float
    reclaimed: float
    ordered_cores: float
    used_cores: float
    better_cores: float | None
    memory: int
    max_memory: int
    sentence: str


class WasteSummary(msgspec.Struct, frozen=True):
    """A user, or a pool with those below it, in a tree; core-hours. ``known``: the part of ``ordered`` that belongs to
    classes, ``left_out_classes`` included. The classes with the most unused core-hours are shown."""

    tree: str
    name: str
    ordered: float
    used: float
    reclaimed: float
    known: float
    classes: list[WasteClass]
    left_out_classes: int
    sentence: str


class WasteView(msgspec.Struct, frozen=True):
    """Waste from ``since``, a Monday 0:00 UTC, to ``until``; ``covered_s`` of it are known. Most unused first."""

    since: float
    until: float
    covered_s: float
    users: list[WasteSummary]
    pools: list[WasteSummary]


class _Ran(NamedTuple):
    """A job's amounts in the week, in core-seconds. ``held``: throttled although the limit was its request. ``mean``:
    mean cores over its whole run."""

    seconds: float
    order: float
    ordered: float
    used: float
    reclaimed: float
    held: float
    mean: float
    memory: int
    max_memory: int


_Class = tuple[str, str, bool]
"""Title, task, and whether the job runs on reclaimed CPU."""

JobsOf = Sequence[tuple[OperationRecord, Sequence[JobRecord | Job]]]


def make_waste(
    period: PeriodTotals, since: float, until: float, now: float, jobs: JobsOf,
    parents: Mapping[str, Mapping[str, str]], user: str = "", pool: str = "",
) -> WasteView:  # fmt: skip
    """Return the waste of a week. ``parents``: tree -> pool -> its parent. ``user``, ``pool``: if set, only theirs."""
    groups: dict[Key, dict[_Class, list[_Ran]]] = {}
    for record, its in jobs:
        for tree, kind, ran in _list_ran(record, its, since, until, now):
            name = record.trees[tree].pool if tree in record.trees else ROOT_POOL
            keys = [Key(USER, tree, record.user), Key(POOL, tree, name)]
            while name != ROOT_POOL:
                name = parents.get(tree, {}).get(name, ROOT_POOL)
                keys.append(Key(POOL, tree, name))
            for key in keys:
                groups.setdefault(key, {}).setdefault(kind, []).append(ran)

    def summarize(kind: int, wanted: str, other: str) -> list[WasteSummary]:
        found = [
            _summarize(key, its, groups.get(key, {}))
            for key, its in period.totals.items()
            if key.kind == kind and its.ordered and (key.name == wanted or not (wanted or other))
        ]
        return sorted(found, key=lambda each: (each.used - each.ordered, each.tree, each.name))

    return WasteView(since, until, period.covered_s, summarize(USER, user, pool), summarize(POOL, pool, user))


def _list_ran(
    record: OperationRecord, jobs: Iterable[JobRecord | Job], since: float, until: float, now: float
) -> Iterator[tuple[str, _Class, _Ran]]:
    """Yield tree, class and amounts of jobs that ran in the week and whose usage is known."""
    title, memory = re.sub(r"\d+", "#", record.title), {task.name: task.memory_limit for task in record.tasks}
    for job in jobs:
        use: CpuUse
        ended = job if isinstance(job, JobRecord) else None
        if isinstance(job, JobRecord):
            tree, begin, end, use, cores = job.tree, job.start_time, job.finish_time, job, job.cpu_limit
        else:
            tree, begin, end, use, cores = job.element.tree.name, job.began_at or now, now, job.report, job.limits[1]
        seconds, inside = end - begin, min(end, until) - max(begin, since)
        if inside <= 0.0 or use.cpu_seconds is None:
            continue
        part = inside / seconds
        held = max((use.throttled_cpu_seconds or 0.0) - (use.late_cpu_seconds or 0.0), 0.0)
        most = 0 if ended is None else ended.max_memory or 0
        yield tree, (title, job.task_name if len(record.tasks) > 1 else "", job.reclaimed), _Ran(
            inside, cores * inside, part * (use.ordered_cpu_seconds or cores * seconds), part * use.cpu_seconds,
            part * (use.reclaimed_cpu_seconds or 0.0), part * held, use.cpu_seconds / seconds,
            (ended.memory_limit or memory.get(ended.task, 0)) if ended is not None and most else 0, most,
        )  # fmt: skip


def _summarize(key: Key, its: Amounts, groups: Mapping[_Class, list[_Ran]]) -> WasteSummary:
    classes = sorted((_make_class(*each) for each in groups.items()), key=lambda each: each.used - each.ordered)
    name = "All pools" if key.name == ROOT_POOL else ("Pool " if key.kind == POOL else "") + quoted(key.name)
    ordered, used, reclaimed = its.ordered / HOUR_S, its.used / HOUR_S, its.reclaimed / HOUR_S
    text = (
        f"{name} requested {_hours(ordered)} core-hours and used {_hours(used)} ({format_percent(used / ordered)} %); "
        f"limits were lowered by {_hours(reclaimed)}."
    )
    known, left_out = math.fsum(each.ordered for each in classes), max(len(classes) - MAX_CLASSES, 0)
    return WasteSummary(
        key.tree, key.name, ordered, used, reclaimed, known, classes[:MAX_CLASSES], left_out, text
    )  # fmt: skip


def _make_class(kind: _Class, ran: list[_Ran]) -> WasteClass:
    title, task, reclaimed = kind
    seconds, order, *amounts, held = (math.fsum(each[place] for each in ran) for place in range(6))
    ordered_cores, used_cores, is_held = order / seconds, amounts[1] / seconds, held > MOST_HELD * amounts[1]
    is_much = amounts[0] - amounts[1] >= LEAST_HOURS * HOUR_S
    means = ((each.mean, each.seconds) for each in ran)
    better = find_better(means, ordered_cores) if is_much and not is_held else None
    memory, max_memory = max(each.memory for each in ran), max(each.max_memory for each in ran)
    text = quoted(title) if title else "Without a title"
    text += f", task {quoted(task)}" if task else ""
    text += f"{' on reclaimed CPU' if reclaimed else ''}: {count(len(ran), 'job')} requested "
    text += f"{format_cores(ordered_cores)} cores and used {format_cores(used_cores)} on average"
    if better is not None:
        text += f": request {better:g}"
    elif is_held:
        text += "; they were throttled at their request, so no lower one is recommended"
    if memory and max_memory:
        text += f"; memory: at most {max_memory / 2**30:.1f} of {memory / 2**30:.1f} GiB"
    hours = {name: each / HOUR_S for name, each in zip(("ordered", "used", "reclaimed"), amounts, strict=True)}
    return WasteClass(
        title=title, task=task, job_class=CLASSES[reclaimed], jobs=len(ran), ordered_cores=ordered_cores,
        used_cores=used_cores, better_cores=better, memory=memory, max_memory=max_memory, sentence=f"{text}.", **hours,
    )  # fmt: skip


def find_better(means: Iterable[tuple[float, float]], ordered_cores: float) -> float | None:
    """Return the request, in cores, that would have been enough, judging by the jobs' mean usage and running time. It
    is rounded up to halves, or to tenths up to one core. Returns None if it is hardly lower than ``ordered_cores``."""
    by_use = sorted(means)
    reached = list(accumulate(seconds for _, seconds in by_use))
    wanted = max(HEADROOM * by_use[bisect_left(reached, ENOUGH_FOR * reached[-1])][0], 0.1)
    parts = 10 if wanted <= 1.0 else 2
    better = math.ceil(wanted * parts - 1e-9) / parts
    return better if better <= WORTH_IT * ordered_cores else None


def describe_waste(view: WasteView) -> Iterator[str]:
    """Yield the lines of a text: first the time, then each user and pool followed by its classes."""
    known = f"{view.covered_s / HOUR_S:.0f} h are known"
    yield f"From {format_utc(view.since)} to {format_utc(view.until)} ({known}):"
    if not view.users and not view.pools:
        yield "nothing was requested, as far as is known"
    for each in (*view.users, *view.pools):
        yield ""
        yield f"{each.sentence} (tree {quoted(each.tree)})"
        yield from (f"- {kind.sentence}" for kind in each.classes)
        if each.left_out_classes:
            yield f"- and {count(each.left_out_classes, 'class', 'classes')} of jobs with less unused CPU"


def _hours(value: float) -> str:
    return f"{value:.0f}" if value >= 10.0 else f"{value:.1f}"
