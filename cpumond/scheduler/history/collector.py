"""Collector of the history's points from the state."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import add, attrgetter
from typing import Final, TypeVar

from cpumond.core.wire import CPU_COUNTERS
from cpumond.scheduler.elements import Element, Job, Node, OperationElement, PoolElement, TrialArm, used_now
from cpumond.scheduler.elements.figures import OPERATION, POOL, Read
from cpumond.scheduler.history import model
from cpumond.scheduler.history.extras import NO_EXTRA, Extra, Extras
from cpumond.scheduler.history.model import (
    ARM,
    COLUMNS,
    COVERED_KEY,
    KINDS,
    NOT_KNOWN,
    RATES,
    USER,
    WIDTHS,
    Amounts,
    Key,
    Series,
    Tick,
    add_up,
)
from cpumond.scheduler.state import State

_FIGURES_OF: Final = {"running_operations": "running_operation_count", "jobs": "job_count"}
"""Columns whose names differ from those of their figures."""


def _read_columns(kind: str, figures: Mapping[str, Read]) -> list[Read]:
    """Return the readers of a kind's columns, except those of rates."""
    names = COLUMNS[kind][:-RATES]
    readers = [figures[_FIGURES_OF.get(name, name)] for name in names]
    return [_known(read) if name in ("volume", "capacity") else read for name, read in zip(names, readers, strict=True)]


def _known(read: Read) -> Read:
    return lambda pool: NOT_KNOWN if (value := read(pool)) is None else value


_OF_POOL: Final = _read_columns("pool", POOL)
_OF_OPERATION: Final = _read_columns("operation", OPERATION)

WATCHED_TICKS: Final = 6
"""Number of ticks for which an ended operation's counters are still read, since its last jobs may still be ending."""


class _Seen:
    """What is known of a pool or an operation from the last tick."""

    __slots__ = ("series", "counters", "lost", "found_at", "was_taken")

    def __init__(self) -> None:
        self.series: Series = ("", "")
        self.counters: _Five = _NOTHING
        self.lost = 0.0
        """Core-seconds of the pool lost by preemptions."""
        self.found_at = -1
        """Number of the last tick that found the element."""
        self.was_taken = False
        """Whether the element ever had a point."""

    def grow(self, element: Element | TrialArm) -> _Five:
        """Return how much the counters have grown since the last call; a counter that was reset has grown from 0."""
        now, before = _counters_of(element), self.counters
        if now == before:
            return _NOTHING
        self.counters = now
        a, b, c, d, e = now
        f, g, h, i, j = before
        return (
            a - f if a >= f else a,
            b - g if b >= g else b,
            c - h if c >= h else c,
            d - i if d >= i else d,
            e - j if e >= j else e,
        )


_Named = TypeVar("_Named", Node, Job)

_Five = tuple[float, float, float, float, float]

_NOTHING: Final = (0.0, 0.0, 0.0, 0.0, 0.0)

_counters_of: Callable[[Element | TrialArm], _Five] = attrgetter(*CPU_COUNTERS)


class Collector:
    """Takes ticks of the state. All counters begin at 0 with the state, at ``started_at``; those of an element that is
    added later begin at 0 as well."""

    def __init__(self, started_at: float, max_series: int) -> None:
        self.previous_at = started_at
        self.max_series = max_series
        self.left_out = 0
        """Number of elements beyond the limit of series in the last tick."""
        self.series = 0
        self._tick = 0
        self._seen: dict[Element, _Seen] = {}
        self._gone: dict[Element, _Seen] = {}
        self._trials: dict[TrialArm, _Seen] = {}
        self._extras = Extras()
        self._totals: dict[Key, Amounts] = {}
        self._users: dict[tuple[str, str], list[float]] = {}
        """(tree, user) -> core-seconds in the order of CPU_COUNTERS, then the cores of limits, of the present tick."""
        self._names: tuple[list[Series], ...] = ([],) * len(KINDS)

    def collect(self, state: State, now: float) -> Tick | None:
        """Return the tick at ``now``; None if no time has passed since the last tick."""
        interval_s = now - self.previous_at
        if interval_s <= 0.0:
            return None

        self._tick += 1
        self._users = {}
        self._totals = {COVERED_KEY: Amounts(seconds=interval_s, points=1)}
        room = _Room(self.max_series)
        all_rows = pools, nodes, operations, jobs = tuple(_Rows(kind) for kind in range(len(KINDS)))
        self._take_pools(state, now, room, pools, self._extras.look(state, self.previous_at))
        self._take_named(nodes, room, state.nodes.values(), _node_values)
        before = room.left_out
        self._take_operations(state, now, room, operations)
        self._take_gone(state, now, room, pools, operations)
        left_out_operations = room.left_out - before
        self._add_users_and_arms(state, interval_s)
        self._take_named(jobs, room, (job for job in state.jobs.values() if job.is_active), _job_values)
        self.previous_at = now
        self.left_out = room.left_out
        self.series = room.size - room.left
        all_names = [list(rows.places) for rows in all_rows]
        # Most ticks have the same series as the previous one, so both share one copy of the names.
        self._names = tuple(old if old == names else names for old, names in zip(self._names, all_names, strict=True))
        return Tick(
            now, interval_s, self._names, tuple(rows.values for rows in all_rows), left_out_operations, self._totals
        )

    def _look(self, element: Element) -> _Seen:
        seen = self._seen.get(element)
        if seen is None:
            gone = self._gone.pop(element, None)
            seen = self._seen[element] = _Seen() if gone is None else gone
        seen.found_at = self._tick
        return seen

    def _take_pools(
        self, state: State, now: float, room: _Room, rows: _Rows, extras: Mapping[PoolElement, Extra]
    ) -> None:
        for tree in state.trees.values():
            pools = [tree.root, *tree.pools.values()]
            columns = [[read(pool) for pool in pools] for read in _OF_POOL]
            for pool, found in zip(pools, zip(*columns, strict=True), strict=True):
                seen = self._look(pool)
                grown = seen.grow(pool)
                self._add_pool(pool, seen, grown, pool.usage[1], extras.get(pool, NO_EXTRA), now - self.previous_at)
                if not room.take():
                    continue
                self._put(rows, pool, seen, found, grown, now - self.previous_at)

    def _take_operations(self, state: State, now: float, room: _Room, rows: _Rows) -> None:
        all_seen = self._seen
        taken = []
        for tree in state.trees.values():
            for element in tree.operations.values():
                is_active = element.is_running or element.jobs or element.demand[1] > 0.0
                seen = all_seen.get(element)
                if seen is None:
                    if not is_active:
                        continue
                    seen = self._look(element)
                else:
                    seen.found_at = self._tick
                grown = seen.grow(element)
                if not is_active and grown is _NOTHING:
                    continue
                self._add_user(element, grown, element.usage[1])
                if room.take():
                    taken.append((element, seen, grown))
        columns = [[read(element) for element, _, _ in taken] for read in _OF_OPERATION]
        for (element, seen, grown), found in zip(taken, zip(*columns, strict=True), strict=True):
            self._put(rows, element, seen, found, grown, now - self.previous_at)

    def _take_named(
        self, rows: _Rows, room: _Room, found: Iterable[_Named], values_of: Callable[[_Named], tuple[float, ...]]
    ) -> None:
        before = self._names[rows.kind]
        for each in found:
            if room.take():
                place = len(rows.places)
                # Most rows are at the same index as in the previous tick. Both ticks then share the name, which takes
                # as much memory as the values beside it.
                same = place < len(before) and before[place][1] == each.id
                rows.places[before[place] if same else ("", each.id)] = place
                rows.values.extend(values_of(each))

    def _take_gone(self, state: State, now: float, room: _Room, pools: _Rows, operations: _Rows) -> None:
        """Add the last points of elements that are gone, with the growth of their counters since the last read."""
        for element in [element for element, seen in self._seen.items() if seen.found_at != self._tick]:
            self._gone[element] = self._seen.pop(element)
        while state.ended_elements:
            ended = state.ended_elements.popleft()
            if ended not in self._seen and ended not in self._gone:
                seen = self._gone[ended] = _Seen()
                seen.found_at = self._tick - 1
        for element, seen in list(self._gone.items()):
            grown = seen.grow(element)
            was_there = seen.found_at == self._tick - 1 and seen.was_taken
            if self._tick - seen.found_at >= WATCHED_TICKS:
                del self._gone[element]
            if isinstance(element, PoolElement):
                self._add_pool(element, seen, grown, 0.0, NO_EXTRA, now - self.previous_at)
            elif isinstance(element, OperationElement) and grown is not _NOTHING:
                self._add_user(element, grown, 0.0)
            if (was_there or grown is not _NOTHING) and room.take():
                rows = pools if isinstance(element, PoolElement) else operations
                gauges = (0.0,) * (WIDTHS[rows.kind] - RATES)
                self._put(rows, element, seen, gauges, grown, now - self.previous_at)

    def _add_pool(
        self, pool: PoolElement, seen: _Seen, grown: _Five, limit_cores: float, extra: Extra, interval_s: float
    ) -> None:
        """Add a pool to the totals if it has anything to add; the root is always added."""
        lost, seen.lost = pool.lost_core_seconds - seen.lost, pool.lost_core_seconds
        if grown is _NOTHING and not (limit_cores or lost or pool.is_root) and extra is NO_EXTRA:
            return
        amounts = Amounts(*grown, limit_cores * interval_s, lost, *extra, interval_s, 1, limit_cores)
        add_up([(Key(model.POOL, pool.tree.name, pool.name), amounts)], self._totals)

    def _add_user(self, element: OperationElement, grown: _Five, limit_cores: float) -> None:
        key = (element.tree.name, element.operation.record.user)
        sums = self._users.get(key)
        if sums is None:
            self._users[key] = [*grown, limit_cores]
        elif grown is _NOTHING:
            sums[-1] += limit_cores
        else:
            sums[:] = map(add, sums, (*grown, limit_cores))

    def _add_users_and_arms(self, state: State, interval_s: float) -> None:
        """Add to the totals: users, the control group, and the jobs with which it is compared."""
        for (tree, user), (a, b, c, d, e, limit_cores) in self._users.items():
            amounts = Amounts(a, b, c, d, e, limit_cores * interval_s, seconds=interval_s, points=1, peak=limit_cores)
            self._totals[Key(USER, tree, user)] = amounts
        # Drop the arms of trees that no longer exist.
        self._trials = {
            arm: self._trials.get(arm) or _Seen() for each in state.trees.values() for arm in each.trial.values()
        }
        for each in state.trees.values():
            for name, arm in each.trial.items():
                if (grown := self._trials[arm].grow(arm)) is not _NOTHING:
                    self._totals[Key(ARM, each.name, name)] = Amounts(*grown)._replace(seconds=interval_s, points=1)

    def _put(
        self, rows: _Rows, element: Element, seen: _Seen, gauges: Iterable[float], grown: _Five, interval_s: float
    ) -> None:
        if seen.series[1] != element.name:
            seen.series = (element.tree.name, element.name)
        seen.was_taken = True
        rates = grown if grown is _NOTHING else [each / interval_s for each in grown]
        place = rows.places.setdefault(seen.series, len(rows.places))
        width = WIDTHS[rows.kind]
        if place * width == len(rows.values):
            rows.values.extend(gauges)
            rows.values.extend(rates)
            return
        # An element that is gone and a present one have the same name: their rates are added.
        for number, rate in enumerate(rates, (place + 1) * width - RATES):
            rows.values[number] += rate


@dataclass(slots=True, eq=False)
class _Rows:
    """The rows of one kind while they are collected. ``places``: series -> index of its row."""

    kind: int
    places: dict[Series, int] = field(default_factory=dict)
    values: array[float] = field(default_factory=lambda: array("f"))


class _Room:
    """The number of series that may still be added."""

    __slots__ = ("size", "left", "left_out")

    def __init__(self, size: int) -> None:
        self.size = self.left = size
        self.left_out = 0

    def take(self) -> bool:
        if self.left:
            self.left -= 1
            return True
        self.left_out += 1
        return False


def _node_values(node: Node) -> tuple[float, ...]:
    ordered = used = 0.0
    for job in node.jobs.values():
        ordered += job.limits[1]
        used += used_now(job)
    return (node.capacity[1], ordered, node.used[1], used, float(len(node.jobs)))


def _job_values(job: Job) -> tuple[float, ...]:
    said = job.report
    figures = (said.cpu_usage, said.smoothed_cpu_usage, said.min_cpu_limit, said.votes_sum, said.throttled_ratio)
    return (job.limits[1], job.usage[1], *[NOT_KNOWN if value is None else float(value) for value in figures])
