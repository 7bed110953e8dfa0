"""The path of a pool: the values that its children's sum runs through, in order (fair_share_update.md 9.2 to 9.4)."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import groupby
from operator import itemgetter

from cpumond.fairshare.functions import EXACT, FLAT, NOTHING, Group, ShareFunction, SlopeChange
from cpumond.fairshare.resources import ZERO, Vector, add, greatest, scale, subtract, sum_vectors


class Path:
    """The values that ``A`` of a pool runs through (9.2, 9.3), as vertices, beginning at fit factor 0.

    Vertex ``i`` is at fit factor ``xs[i]`` and has the value ``values[i]``. The step to the next vertex is linear with
    ``slopes[i]`` per fit factor, or a jump (None). For a jump, ``jumps[i]`` lists all children that jump at this fit
    factor, and the number of those that jumped before this step. ``factors[c]`` is child c's suggestion per fit factor
    (fair_share); ``factors`` is None in a FIFO pool. ``functions``: the children's, in the order of the path, as far as
    needed. ``complete``: the last vertex is the end of the domain."""

    __slots__ = ("xs", "values", "slopes", "jumps", "functions", "factors", "complete")

    def __init__(self, functions: list[ShareFunction], factors: list[float] | None, complete: bool) -> None:
        self.xs: list[float] = [0.0]
        self.values: list[Vector] = [sum_vectors([function.at_zero for function in functions])]
        self.slopes: list[Vector | None] = []
        self.jumps: dict[int, tuple[Group, int]] = {}
        self.functions = functions
        self.factors = factors
        self.complete = complete

    def add_step(self, x: float, slope: Vector, value: Vector) -> None:
        self.xs.append(x)
        self.slopes.append(slope)
        self.values.append(value)

    def add_jumps(self, x: float, here: list[tuple[int, int, Vector]], one_by_one: bool) -> None:
        """Append the jumps at ``x`` of the children ``here`` (child, segment, height): one for all, or one for each."""
        group: Group = tuple((child, segment) for child, segment, _ in here)
        value = self.values[-1]
        for done, (_, _, height) in enumerate(here):
            value = add(value, height)
            if one_by_one or done == len(here) - 1:
                self.jumps[len(self.slopes)] = (group, done if one_by_one else 0)
                self.slopes.append(None)
                self.xs.append(x)
                self.values.append(value)

    def places_at(self, x: float, group: Group = (), jumped: int = 0) -> tuple[list[int], list[float]]:
        """Return the places of the children at fit factor ``x``; the first ``jumped`` of ``group`` are after their jump
        (12.1). Returns two lists: the segment of each child's function, and its suggestion."""
        functions = self.functions
        if self.factors is None:
            suggestions = [min(max(x - child, 0.0), 1.0) for child in range(len(functions))]
        else:
            suggestions = [s if (s := x * factor) < 1.0 else 1.0 for factor in self.factors]
        segments = [bisect_left(f.starts, s) - 1 for f, s in zip(functions, suggestions, strict=True)]
        for n, (child, after) in enumerate(group):
            segments[child] = after if n < jumped else after - 1
            suggestions[child] = functions[child].starts[after]
        return segments, suggestions

    def sum_at(self, vertex: int) -> Vector:
        """Return the value at a vertex, computed as the sum of the children's values there in their order."""
        group, jumped = self.jumps.get(vertex, ((), 0))
        if vertex - 1 in self.jumps:
            group, _ = self.jumps[vertex - 1]
            jumped = self.jumps[vertex][1] if vertex in self.jumps else len(group)
        return self._sum(self.xs[vertex], group, jumped)

    def sum_along(self, step: int) -> Vector:
        """The sum in the middle of a linear step: for constant resources, the value without the ends' rounding."""
        return self._sum((self.xs[step] + self.xs[step + 1]) / 2.0, (), 0)

    def sum_at_end(self) -> Vector:
        """Return the sum of the children's values at the last vertex of a complete path."""
        pairs = zip(self.functions, self.factors or [1.0] * len(self.functions), strict=True)
        return sum_vectors([f.at_horizon if factor >= 1.0 else f.value(factor) for f, factor in pairs])

    def _sum(self, x: float, group: Group, jumped: int) -> Vector:
        places = zip(self.functions, *self.places_at(x, group, jumped), strict=True)
        return sum_vectors([function.exact_value(segment, s) for function, segment, s in places])


def fifo_path(functions: list[ShareFunction], complete: bool) -> Path:
    """Return the path of a FIFO pool: its children's functions, one after another in their order (9.3)."""
    path = Path(functions, None, complete)
    for child in range(len(functions)):
        _append_child(path, child, path.values[-1], float(child), 1.0, 1.0)
    return path


def weighted_path(functions: list[ShareFunction], factors: list[float], reach: float, improved: bool) -> Path:
    """Return the path of a fair_share pool: the sum of its children's functions, with arguments scaled by weight (9.2).

    Children keep their order. ``factors`` are weights divided by the smallest one. ``reach``: a fit factor in (0, 1].
    The path ends at the last change of slope up to ``reach``, or at its real end if that is 1; the functions are known
    that far. ``improved``: children that jump at the same fit factor do so one by one, in their order. The single sweep
    over all changes takes time linear in their number, apart from sorting."""
    path = Path(functions, factors, reach == 1.0)
    takers = [child for child, function in enumerate(functions) if function is not NOTHING]
    if len(takers) == 1 and factors[takers[0]] >= 1.0:
        _append_child(path, takers[0], ZERO, 0.0, factors[takers[0]], reach * factors[takers[0]])
    elif takers:
        _sum(path, takers, reach, improved)
    if path.complete and path.xs[-1] < 1.0:
        path.add_step(1.0, ZERO, path.values[-1])
    return path


def _append_child(path: Path, child: int, base: Vector, offset: float, factor: float, until: float) -> None:
    """Append a child that moves alone, up to suggestion ``until``: from ``offset`` on, added to ``base``."""
    function = path.functions[child]
    starts, values = function.starts, function.values
    jumps = {segment: height for _, segment, height in function.jumps}
    for segment, slope in enumerate(function.slopes):
        if segment in jumps:
            s = starts[segment]
            path.xs[-1] = x = _below(offset + s / factor, offset, factor, s)
            path.add_jumps(x, [(child, segment, jumps[segment])], True)
            path.values[-1] = add(base, values[segment])
        ends = segment + 1 == len(starts)
        end = function.horizon if ends else starts[segment + 1]
        if end > until:
            break
        value = function.end_of(segment) if ends or function.lower_ends else values[segment + 1]
        path.add_step(offset + end / factor, slope if factor == 1.0 else scale(slope, factor), add(base, value))


def _below(x: float, offset: float, factor: float, suggestion: float) -> float:
    """Return the fit factor of a child's jump: near ``x``, but not so high that the child would be beyond the jump."""
    while (x - offset) * factor > suggestion:
        x = math.nextafter(x, 0.0)
    return x


_END, _JUMP, _RAMP = range(3)
"""Events that interrupt a sum of constant slopes, in the order in which they are handled at one fit factor."""

Ramp = tuple[float, float, Vector]
"""A ramp on a path: the fit factors of its start and end, and its rise."""


def _sum(path: Path, takers: list[int], reach: float, improved: bool) -> None:
    """Append the sum of the children ``takers``: a running value and slope, to which jumps and ramps add heights."""
    changes: list[SlopeChange] = []
    breaks: list[tuple[float, int, int, int, Vector]] = []
    ramps: dict[tuple[int, int], Ramp] = {}
    for child in takers:
        function, factor = path.functions[child], path.factors[child] if path.factors else 1.0
        changes += function.slope_changes(factor, reach)
        breaks += [
            (_below(s / factor, 0.0, factor, s), _JUMP, child, segment, height)
            for s, segment, height in function.jumps
            if s <= reach * factor
        ]
        for segment in function.ramps:
            x, x_end, rise = _ramp(function, segment, factor)
            if x_end > x:
                ramps[child, segment] = x, x_end, rise
                breaks += [(x, _RAMP, child, segment, ZERO), (x_end, _END, child, segment, rise)]
            elif segment + 1 < len(function.starts):  # its ends differ by rounding only
                breaks.append((x, _JUMP, child, segment + 1, rise))
    changes.sort()
    breaks.sort(key=itemgetter(0, 1, 2, 3))
    value, slope = path.values[0], FLAT
    active: dict[tuple[int, int], Ramp] = {}
    begin = 0
    for x, here in groupby(breaks, itemgetter(0)):
        if x >= 1.0 or x > reach:
            break
        end = bisect_left(changes, (x,), begin)
        value, slope = _sweep(path, changes[begin:end], value, slope, x, active)
        begin = end
        jumps = []
        for _, kind, child, segment, height in here:
            if kind == _RAMP:
                active[child, segment] = ramps[child, segment]
                continue
            value = add(value, height)
            if kind == _END:
                active.pop((child, segment), None)
            else:
                jumps.append((child, segment, height))
        if jumps:
            path.add_jumps(x, jumps, improved)
    _sweep(path, changes[begin:], value, slope, 1.0 if path.complete else None, active)


def _ramp(function: ShareFunction, segment: int, factor: float) -> Ramp:
    """Return where on the path a steep segment of a child begins and ends, and how much it rises."""
    end = function.horizon if segment + 1 == len(function.starts) else function.starts[segment + 1]
    rise = subtract(function.end_of(segment), function.values[segment])
    return function.starts[segment] / factor, end / factor, rise


def _sweep(
    path: Path, changes: list[SlopeChange], value: Vector, slope: tuple[int, int, int, int, int], until: float | None,
    active: dict[tuple[int, int], Ramp],
) -> tuple[Vector, tuple[int, int, int, int, int]]:  # fmt: skip
    """Append steps from the end of ``path`` through ``changes`` and then to ``until``. ``value`` and ``slope`` are the
    sums so far, without the ramps ``active``. Returns these sums at ``until``."""
    if active:
        return _sweep_with_ramps(path, changes, value, slope, until, active)
    at = path.xs[-1]
    v0, v1, v2, v3, v4 = value
    m0, m1, m2, m3, m4 = slope
    add_x, add_value, add_slope = path.xs.append, path.values.append, path.slopes.append
    unit = 1.0 / EXACT
    r0, r1, r2, r3, r4 = m0 * unit, m1 * unit, m2 * unit, m3 * unit, m4 * unit
    for x, d0, d1, d2, d3, d4 in changes:
        if x > at:
            if x >= 1.0:
                break
            dx = x - at
            add_slope((r0, r1, r2, r3, r4))
            v0 += r0 * dx
            v1 += r1 * dx
            v2 += r2 * dx
            v3 += r3 * dx
            v4 += r4 * dx
            add_value((v0, v1, v2, v3, v4))
            add_x(x)
            at = x
        if d0:  # many changes concern only one resource
            m0 += d0
            r0 = m0 * unit
        if d1:
            m1 += d1
            r1 = m1 * unit
        if d2:
            m2 += d2
            r2 = m2 * unit
        if d3:
            m3 += d3
            r3 = m3 * unit
        if d4:
            m4 += d4
            r4 = m4 * unit
    value, slope = (v0, v1, v2, v3, v4), (m0, m1, m2, m3, m4)
    if until is not None and until > at:
        rates: Vector = (r0, r1, r2, r3, r4)
        value = add(value, scale(rates, until - at))
        path.add_step(until, rates, value)
    return value, slope


def _sweep_with_ramps(
    path: Path, changes: list[SlopeChange], value: Vector, slope: tuple[int, int, int, int, int], until: float | None,
    active: dict[tuple[int, int], Ramp],
) -> tuple[Vector, tuple[int, int, int, int, int]]:  # fmt: skip
    """Sweep like ``_sweep``, and add the rise of ramps: each one is exact at its ends, however steep it is."""
    for x, *change in [*changes, *([(until, *FLAT)] if until is not None else [])]:
        at = path.xs[-1]
        if x > at:
            a, b, c, d, e = slope
            value = add(value, scale((a / EXACT, b / EXACT, c / EXACT, d / EXACT, e / EXACT), x - at))
            on_top = [scale(rise, (x - start) / (end - start)) for start, end, rise in active.values()]
            reached = greatest(sum_vectors([value, *on_top]), path.values[-1])
            path.add_step(x, scale(subtract(reached, path.values[-1]), 1.0 / (x - at)), reached)
        a, b, c, d, e = change
        slope = (slope[0] + a, slope[1] + b, slope[2] + c, slope[3] + d, slope[4] + e)
    return value, slope


def settle(path: Path) -> None:
    """Where a resource is constant, replace the running sum by the sum of the children's own values: callers compare
    such values with each other. This pays off for small paths only."""
    for r in range(5):
        flat = [slope is not None and slope[r] == 0.0 for slope in path.slopes]
        flat.append(False)
        step = 0
        while True in flat[step:]:
            first = flat.index(True, step)
            step = flat.index(False, first)
            longest = max(range(first, step), key=lambda n: path.xs[n + 1] - path.xs[n])
            exact = path.sum_along(longest)[r]
            for vertex in range(first, step + 1):
                v = list(path.values[vertex])
                v[r] = exact
                path.values[vertex] = (v[0], v[1], v[2], v[3], v[4])
