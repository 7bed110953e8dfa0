"""Share functions: how much an element takes at a suggestion (fair_share_update.md 8 and 9).

An element's ``B`` (9.5) is its path - the values that ``A`` (9.1 to 9.3) runs through, in order - measured by the
suggestion that each point of the path needs: the least ``s`` with ``value <= min(strong + proposed + s, limits)``. So
nothing of ``M`` (9.4) is computed but the resource that binds: along a linear piece of the path the needed suggestion
is a maximum of lines, and one division per piece turns path into function. Where the path moves without needing more
suggestion, ``B`` jumps; where the path itself jumps, ``B`` waits at the lower end until the upper end is affordable.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

from cpumond.fairshare.resources import EPS, ZERO, Vector, add, greatest, scale, subtract, sum_vectors

TIE: Final = 1e-12
"""Sums of shares that are closer to a bound than this are summed again, exactly, before they are compared."""

ROUNDING: Final = 1e-15
"""Levels closer than this are the same level."""

STEEPEST: Final = 2.0**14
"""A function with a slope above this, or one that is positive but below GENTLEST, is delicate."""

GENTLEST: Final = 2.0**-30

GRID: Final = 1.5 * 2.0**12
"""Slopes are rounded to multiples of this number's last bit, 2**-40, so that their sums, up to 2**11, are exact: what
children add and take away again leaves nothing behind, and a resource that nobody takes more of stays as it is."""

EXACT: Final = 2.0**80
"""Unit of the integers that delicate functions are summed in."""

Event = tuple[float, float, float, float, float, float]
"""A place and by how much the slope changes there, in each resource."""

Jump = tuple[float, int, Vector]
"""A place, the index of the segment that begins there, and the height in each resource."""

Group = tuple[tuple[int, int], ...]
"""Children that jump at one place of their parent's path: (index of the child, index of its segment behind it)."""

Position = tuple[float, float, float, Group, int]
"""Where on the path a segment lies: the fit factor at its start, fit factor per suggestion, the fit factor at its end;
the children that jump right here, and how many of them have jumped."""


class ShareFunction:
    """``B`` of one element, left-continuous on [0, 1] (9.5).

    Segment ``i`` covers suggestions above ``starts[i]`` up to ``starts[i + 1]`` (the last one: up to 1); its value is
    ``values[i] + slopes[i] * (s - starts[i])``. ``at_zero`` is B(0), which may lie below ``values[0]``; ``at_one`` is
    B(1). A pool's ``positions[i]`` says where its path is meanwhile (empty for operations), ``zero_position`` where it
    is at 0. ``events`` and ``jumps`` are the same function as its parent's sum needs it; ``steepest`` is its greatest
    slope; ``delicate`` functions are summed in integers. Never changed once made.
    """

    __slots__ = (
        "starts", "values", "slopes", "at_zero", "at_one", "positions", "zero_position", "events", "jumps", "steepest",
        "delicate",
    )  # fmt: skip

    def __init__(
        self,
        starts: list[float],
        values: list[Vector],
        slopes: list[Vector],
        at_zero: Vector,
        jumping: Sequence[int] = (),
        positions: list[Position] | None = None,
        zero_position: Position = (0.0, 0.0, 0.0, (), 0),
        delicate: bool = False,
    ) -> None:
        self.steepest = max(map(max, slopes))
        self.delicate = delicate or self.steepest > STEEPEST
        if not self.delicate:
            slopes = [
                ((a + GRID) - GRID, (b + GRID) - GRID, (c + GRID) - GRID, (d + GRID) - GRID, (e + GRID) - GRID)
                for a, b, c, d, e in slopes
            ]
        self.starts = starts
        self.values = values
        self.slopes = slopes
        self.at_zero = at_zero
        self.positions = positions or []
        self.zero_position = zero_position
        a = b = c = d = e = 0.0
        events: list[Event] = []
        append = events.append
        for start, (f, g, h, i, j) in zip(starts, slopes, strict=True):
            append((start, f - a, g - b, h - c, i - d, j - e))
            a, b, c, d, e = f, g, h, i, j
        self.events = events
        self.jumps: list[Jump] = [(starts[n], n, subtract(values[n], self.end_of(n - 1))) for n in jumping]
        self.at_one = self.end_of(len(starts) - 1)

    def end_of(self, segment: int) -> Vector:
        """The value at the right end of a segment; ``at_zero`` for -1."""
        return self.value_in(segment, self.starts[segment + 1] if segment + 1 < len(self.starts) else 1.0)

    def value_in(self, segment: int, suggestion: float) -> Vector:
        """The value at a suggestion within a segment; ``at_zero`` for segment -1."""
        if segment < 0:
            return self.at_zero
        t = suggestion - self.starts[segment]
        v = self.values[segment]
        m = self.slopes[segment]
        return (v[0] + m[0] * t, v[1] + m[1] * t, v[2] + m[2] * t, v[3] + m[3] * t, v[4] + m[4] * t)

    def segment_at(self, suggestion: float) -> int:
        """The segment that holds a suggestion in [0, 1], -1 for 0."""
        return bisect_left(self.starts, suggestion) - 1

    def value(self, suggestion: float) -> Vector:
        """B(suggestion), suggestion in [0, 1]."""
        return self.value_in(self.segment_at(suggestion), suggestion)


NOTHING: Final = ShareFunction([0.0], [ZERO], [ZERO], ZERO, positions=[(1.0, 0.0, 1.0, (), 0)])
"""Who demands nothing gets nothing."""


# ---- operations


def gang_function(demand: Vector, limits: Vector) -> ShareFunction:
    """``B`` of a gang operation: nothing until all of its demand fits (9.1)."""
    needed = max(demand)
    if needed <= 0.0 or needed >= 1.0 or any(d > limit for d, limit in zip(demand, limits, strict=True)):
        return NOTHING
    return ShareFunction([0.0, needed], [ZERO, demand], [ZERO, ZERO], ZERO, (1,))


def operation_function(usage: Vector, demand: Vector, limits: Vector) -> ShareFunction:
    """``B`` of an operation: its resources grow together to the usage, then from the usage to the demand (9.1, 9.4).

    All three are shares, ``demand`` dominates ``usage``. Up to the greatest usage ``B_r(s) = min(s, usage_r)``; then
    ``usage + g * (demand - usage)`` with the greatest ``g`` in [0, 1] that the suggestion and the limits allow.
    """
    if max(demand) <= 0.0:
        return NOTHING
    starts: list[float] = []
    values: list[Vector] = []
    slopes: list[Vector] = []
    cap = min((limit for limit, u in zip(limits, usage, strict=True) if limit < u), default=1.0)
    top = min(max(usage), cap, 1.0)
    u0, u1, u2, u3, u4 = usage
    s = 0.0
    for end in sorted(usage):
        if s < end and s < top:
            starts.append(s)
            values.append((
                s if u0 > s else u0, s if u1 > s else u1, s if u2 > s else u2, s if u3 > s else u3, s if u4 > s else u4,
            ))  # fmt: skip
            slopes.append((
                1.0 if u0 > s else 0.0, 1.0 if u1 > s else 0.0, 1.0 if u2 > s else 0.0, 1.0 if u3 > s else 0.0,
                1.0 if u4 > s else 0.0,
            ))  # fmt: skip
            s = end if end < top else top
    if max(usage) <= cap and s < 1.0 and demand != usage:
        return _grow_to_demand(starts, values, slopes, usage, demand, limits)
    if s < 1.0:
        starts.append(s)
        values.append((min(s, u0), min(s, u1), min(s, u2), min(s, u3), min(s, u4)))
        slopes.append(ZERO)
    return ShareFunction(starts, values, slopes, ZERO)


def _grow_to_demand(
    starts: list[float], values: list[Vector], slopes: list[Vector], usage: Vector, demand: Vector, limits: Vector
) -> ShareFunction:
    """The second half of ``operation_function``: from the usage, which has been reached, to the demand."""
    growth = subtract(demand, usage)
    room = min((limit - u) / g for limit, u, g in zip((*limits, 1.0), (*usage, 0.0), (*growth, 1.0), strict=True) if g)
    end: Vector = demand
    if room < 1.0:
        end = add(usage, scale(growth, room))
    s = max(usage)
    needed = max(end)
    reached, jumping = 0.0, []
    for low, high, x, x_end in rising_parts(usage, growth, room, s, needed):
        if low >= 1.0:
            break
        if x > reached:
            jumping.append(len(starts))
        starts.append(low)
        values.append(add(usage, scale(growth, x)) if x else usage)
        slopes.append(scale(growth, (x_end - x) / (high - low)))
        s, reached = high, x_end
    if s < 1.0:
        if reached < room:
            jumping.append(len(starts))
        starts.append(s)
        values.append(end)
        slopes.append(ZERO)
    most = max(growth)
    delicate = any(0.0 < g < most * GENTLEST for g in growth)
    return ShareFunction(starts, values, slopes, ZERO, jumping, delicate=delicate)


def rising_parts(
    level: Vector, slope: Vector, length: float, suggestion: float, needed: float
) -> list[tuple[float, float, float, float]]:
    """Where along a linear piece more suggestion is needed, and which resource decides (9.4).

    On the piece ``level + slope * x``, x in [0, length], the needed suggestion is the greatest component, but at least
    ``suggestion``, which is there at its start; at the end it is ``needed``. Returns (suggestion, suggestion at the
    end, x, x at the end) of the parts where it rises, in order; one resource binds in each.
    """
    if needed <= suggestion + suggestion * ROUNDING:
        return []
    lines = [(v, m) for v, m in zip(level, slope, strict=True) if m > 0.0 and v + m * length > suggestion]
    if not lines:  # nothing but rounding
        return []
    x, _, bound, rate = min((max((suggestion - v) / m, 0.0), -m, v, m) for v, m in lines)
    low = suggestion
    parts: list[tuple[float, float, float, float]] = []
    while True:
        x_end, next_bound, next_rate = length, 0.0, 0.0
        for v, m in lines:
            if m > rate:
                crossing = max((bound - v) / (m - rate), x)
                if crossing < x_end or (crossing == x_end and m > next_rate > 0.0):
                    x_end, next_bound, next_rate = crossing, v, m
        high = bound + rate * x_end if next_rate else needed
        if high > low + low * ROUNDING:
            parts.append((low, high, x, x_end))
            low, x = high, x_end
        elif x_end > x:
            x = x_end
        if not next_rate:
            return parts
        bound, rate = next_bound, next_rate


# ---- the path of a pool


class Path:
    """The values that ``A`` of a pool runs through (9.2, 9.3), as vertices.

    Vertex ``i`` is at fit factor ``xs[i]`` with value ``values[i]``; the step to the next vertex is linear with
    ``slopes[i]`` per fit factor, or a jump (None). ``jumps[i]`` says of a jump step who jumps there: all children that
    jump at this fit factor, and how many of them before the step. ``factors[c]`` is child c's suggestion per fit
    factor (fair_share), None in a FIFO pool; ``functions`` are the children's in the order of the path.
    """

    __slots__ = ("xs", "values", "slopes", "jumps", "functions", "factors")

    def __init__(self, functions: list[ShareFunction], factors: list[float] | None) -> None:
        self.xs: list[float] = [0.0]
        self.values: list[Vector] = [sum_vectors([function.at_zero for function in functions])]
        self.slopes: list[Vector | None] = []
        self.jumps: dict[int, tuple[Group, int]] = {}
        self.functions = functions
        self.factors = factors

    def add_jumps(self, x: float, here: list[tuple[int, int, Vector]], one_by_one: bool) -> None:
        """Append what the children ``here`` (child, segment, height) do at ``x``: a joint jump, or one for each."""
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
        """Where the children are at fit factor ``x``, of ``group`` the first ``jumped`` behind their jump (12.1).

        Two lists: the segment of each child's function, and its suggestion.
        """
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
        """The value at a vertex, as the sum of the children's values there in their order."""
        group, jumped = self.jumps.get(vertex, ((), 0))
        if vertex - 1 in self.jumps:
            group, jumped = self.jumps[vertex - 1]
            jumped = self.jumps[vertex][1] if vertex in self.jumps else len(group)
        return self._sum(self.xs[vertex], group, jumped)

    def sum_between(self, x: float, x_end: float) -> Vector:
        """As ``sum_at``, in the middle of a linear step: what nobody takes more of there, free of rounding at its ends."""
        return self._sum((x + x_end) / 2.0, (), 0)

    def _sum(self, x: float, group: Group, jumped: int) -> Vector:
        places = zip(self.functions, *self.places_at(x, group, jumped), strict=True)
        return sum_vectors([function.value_in(segment, s) for function, segment, s in places])


def fifo_path(functions: list[ShareFunction]) -> Path:
    """The path of a FIFO pool: its children's functions one after the other, in their order (9.3)."""
    path = Path(functions, None)
    for child, function in enumerate(functions):
        _append_child(path, child, path.values[-1], float(child), 1.0)
    return path


def weighted_path(
    functions: list[ShareFunction], weights: Sequence[float], improved: bool, settled: bool = False
) -> Path:
    """The path of a fair_share pool: its children's functions, arguments scaled by weight, summed (9.2).

    Children are in their order, ``weights`` > 0 and at least one above EPS. ``improved``: children that jump at one
    place do so one by one in their order. ``settled``: values at which the path stays are the exact sums of the
    children's, for callers that compare them (a small path only). One sweep over all changes of slope: linear in their number but for sorting.
    """
    least_weight = min(weight for weight in weights if weight > EPS)
    factors = [weight / least_weight for weight in weights]
    path = Path(functions, factors)
    takers = [child for child, function in enumerate(functions) if function is not NOTHING]
    if not takers:
        _go_straight(path)
        return path
    if len(takers) == 1 and factors[takers[0]] >= 1.0:
        _append_child(path, takers[0], ZERO, 0.0, factors[takers[0]])
        if path.xs[-1] < 1.0:
            _go_straight(path)
        return path
    jumps: list[tuple[float, int, int, Vector]] = []
    steepness = 0.0
    delicate = False
    for child in takers:
        function, factor = functions[child], factors[child]
        steepness += function.steepest * factor
        delicate |= function.delicate
        jumps += [(_below(s / factor, factor, s), child, segment, height) for s, segment, height in function.jumps]
    jumps.sort()
    if delicate or steepness > 2.0**20:
        _sum_delicately(path, jumps, improved)
    else:
        _sum(path, jumps, improved, steepness)
        if settled and len(path.xs) <= 128:
            _settle(path)
    return path


def _below(x: float, factor: float, suggestion: float) -> float:
    """The fit factor of a child's jump: near ``x``, and not so great that the child would be taken beyond it."""
    while x * factor > suggestion:
        x = math.nextafter(x, 0.0)
    return x


def _go_straight(path: Path) -> None:
    """Append a step to fit factor 1 along which nothing changes."""
    path.xs.append(1.0)
    path.slopes.append(ZERO)
    path.values.append(path.values[-1])


def _append_child(path: Path, child: int, base: Vector, offset: float, factor: float) -> None:
    """Append the function of a child that moves alone, beginning at ``offset``, on top of ``base``."""
    function = path.functions[child]
    starts, values = function.starts, function.values
    jumps = {segment: height for _, segment, height in function.jumps}
    for segment, slope in enumerate(function.slopes):
        if segment in jumps:
            s = starts[segment]
            x = offset + s / factor
            while (x - offset) * factor > s:  # as _below
                x = math.nextafter(x, 0.0)
            path.xs[-1] = x
            path.add_jumps(x, [(child, segment, jumps[segment])], True)
            path.values[-1] = add(base, values[segment])
        if segment + 1 == len(starts):
            end, value = 1.0, function.at_one
        else:
            end = starts[segment + 1]
            value = function.end_of(segment) if segment + 1 in jumps else values[segment + 1]
        path.xs.append(offset + end / factor)
        path.slopes.append(slope if factor == 1.0 else scale(slope, factor))
        path.values.append(add(base, value))


def _sum(path: Path, jumps: list[tuple[float, int, int, Vector]], improved: bool, steepness: float) -> None:
    """Append the sum of children none of which is delicate, with running value and slope."""
    # twice the greatest slope of the sum, so that slopes are rounded alike and their sums are exact
    grid = max(GRID, 1.5 * 2.0 ** (math.frexp(steepness)[1] + 1))
    events: list[Event] = []
    for function, f in zip(path.functions, path.factors or (), strict=True):
        if f == 1.0 and grid == GRID:
            events += function.events
        else:
            events += [
                (
                    s / f,
                    (a * f + grid) - grid,
                    (b * f + grid) - grid,
                    (c * f + grid) - grid,
                    (d * f + grid) - grid,
                    (e * f + grid) - grid,
                )
                for s, a, b, c, d, e in function.events
            ]
    events.sort()
    slope = ZERO
    begin = 0
    for x, here in groupby(jumps, itemgetter(0)):
        if x >= 1.0:
            break
        end = bisect_left(events, (x,), begin)
        slope = _sweep(path, events[begin:end], slope, x)
        path.add_jumps(x, [jump[1:] for jump in here], improved)
        begin = end
    _sweep(path, events[begin:], slope, 1.0)


def _sweep(path: Path, events: list[Event], slope: Vector, until: float) -> Vector:
    """Append the vertices from the end of ``path`` through the changes of slope to ``until``; returns the slope then."""
    at = path.xs[-1]
    v0, v1, v2, v3, v4 = path.values[-1]
    m0, m1, m2, m3, m4 = slope
    add_x, add_value, add_slope = path.xs.append, path.values.append, path.slopes.append
    for x, d0, d1, d2, d3, d4 in events:
        if x > at:
            if x >= until:
                break
            add_slope((m0, m1, m2, m3, m4))
            dx = x - at
            v0 += m0 * dx
            v1 += m1 * dx
            v2 += m2 * dx
            v3 += m3 * dx
            v4 += m4 * dx
            add_value((v0, v1, v2, v3, v4))
            add_x(x)
            at = x
        m0 += d0
        m1 += d1
        m2 += d2
        m3 += d3
        m4 += d4
    if until > at:
        dx = until - at
        add_slope((m0, m1, m2, m3, m4))
        add_value((v0 + m0 * dx, v1 + m1 * dx, v2 + m2 * dx, v3 + m3 * dx, v4 + m4 * dx))
        add_x(until)
    return (m0, m1, m2, m3, m4)


def _settle(path: Path) -> None:
    """Where a resource stays as it is, replace its running sum by the children's own."""
    for r in range(5):
        flat = [m is not None and m[r] == 0.0 for m in path.slopes]
        step = 0
        while True in flat[step:]:
            first = flat.index(True, step)
            step = (flat + [False]).index(False, first)
            exact = path.sum_between(path.xs[first], path.xs[first + 1])[r]
            for vertex in range(first, step + 1):
                v = list(path.values[vertex])
                v[r] = exact
                path.values[vertex] = (v[0], v[1], v[2], v[3], v[4])


def _sum_delicately(path: Path, jumps: list[tuple[float, int, int, Vector]], improved: bool) -> None:
    """As ``_sum`` for any slopes: lines are summed as integers, anchored where their segments begin.

    The sum of the lines is ``constants + rates * x`` with integers in units of 1 / EXACT**2 and 1 / EXACT: a line that
    is taken away leaves nothing behind, however steep it was.
    """
    unit = int(EXACT)
    events: list[tuple[float, list[int], list[int]]] = []
    place_of = {(child, segment): x for x, child, segment, _ in jumps}
    for child, (function, factor) in enumerate(zip(path.functions, path.factors or (), strict=True)):
        before_constants = before_rates = [0, 0, 0, 0, 0]
        for n, (start, value, slope) in enumerate(zip(function.starts, function.values, function.slopes, strict=True)):
            x = place_of.get((child, n), start / factor)
            at = int(x * EXACT)
            rates = [int(m * factor * EXACT) for m in slope]
            constants = [int(v * EXACT) * unit - m * at for v, m in zip(value, rates, strict=True)]
            change = [a - b for a, b in zip(constants, before_constants, strict=True)]
            events.append((x, change, [a - b for a, b in zip(rates, before_rates, strict=True)]))
            before_constants, before_rates = constants, rates
    events.sort(key=itemgetter(0))
    jumping = {x: [jump[1:] for jump in here] for x, here in groupby(jumps, itemgetter(0))}
    constants, rates = [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]
    for x, changes in groupby([*events, (1.0, constants, rates)], itemgetter(0)):
        if x > 1.0:
            break
        at = int(x * EXACT)
        if x < 1.0:
            for _, constant, rate in changes:
                constants = list(map(int.__add__, constants, constant))
                rates = list(map(int.__add__, rates, rate))
        a, b, c, d, e = (
            (constant + rate * at) / (unit * unit) for constant, rate in zip(constants, rates, strict=True)
        )
        before = path.values[-1]
        value = below = greatest((a, b, c, d, e), before)
        for _, _, height in jumping.get(x, ()):
            below = greatest(subtract(below, height), before)
        dx = x - path.xs[-1]
        if dx > 0.0:
            path.slopes.append(scale(subtract(below, before), 1.0 / dx))
            path.xs.append(x)
            path.values.append(below)
        if x in jumping and x < 1.0:
            path.add_jumps(x, jumping[x], improved)
            path.values[-1] = value


# ---- from path to function


def stop_within(path: Path, bound: Vector) -> tuple[int, float, Vector]:
    """The farthest that ``path`` gets with all values within ``bound``, which holds its start (9.4).

    Returns (step, fit factor, value): within this linear step, at the start of this jump step that does not fit, or
    (number of steps, fit factor of the end, last value). A jump counts as made only if the path gets beyond it.
    """
    values = path.values
    first_beyond = [
        _first_beyond(path, r, limit) if last > limit - TIE else len(values)
        for r, (limit, last) in enumerate(zip(bound, values[-1], strict=True))
    ]
    end = min(first_beyond)
    step = end - 1
    x = path.xs[step]
    v = values[step]
    if step == len(path.slopes):
        return step, x, sum_vectors([function.at_one for function in path.functions])
    m = path.slopes[step]
    if m is None:
        return step, x, v
    stopping = [r for r in range(5) if first_beyond[r] == end]
    if step and path.slopes[step - 1] is None and any(v[r] > bound[r] - TIE for r in stopping):
        exact = path.sum_at(step)
        if any(exact[r] >= bound[r] for r in stopping):
            return step - 1, x, values[step - 1]
    room = min((bound[r] - v[r]) / m[r] if m[r] else 0.0 for r in stopping)
    room = min(max(room, 0.0), path.xs[end] - x)
    value = add(v, scale(m, room))
    if room and 0.0 in m:
        exact = path.sum_between(x, x + room)
        a, b, c, d, e = (value[r] if m[r] else exact[r] for r in range(5))
        value = (a, b, c, d, e)
    return step, x + room, value


def _first_beyond(path: Path, r: int, limit: float) -> int:
    """The first vertex whose value of resource ``r`` exceeds a limit that the start keeps; their number if none does.

    Where the path stays level with the limit, or jumps to it, the children's own sum decides.
    """
    values, key = path.values, itemgetter(r)
    beyond = bisect_right(values, limit + TIE, key=key)
    near = bisect_right(values, limit - TIE, 0, beyond, key=key)
    if 0 < near < beyond:
        m = path.slopes[beyond - 2]
        if m is None:
            exact = path.sum_at(beyond - 1)[r]
        elif m[r] == 0.0:
            exact = path.sum_between(path.xs[beyond - 2], path.xs[beyond - 1])[r]
        else:
            return beyond
        if exact > limit:
            return near
    return beyond


def pool_function(path: Path, guarantee: Vector, limits: Vector) -> ShareFunction:
    """``B`` of a pool whose children take ``path`` (9.4, 9.5).

    ``guarantee`` is strong + proposed share, ``limits`` the limits share. What lies within the guarantee is B(0); what
    lies beyond the limits is never reached; in between each step of the path is measured by the suggestion it needs.
    """
    q = greatest(guarantee, path.values[0])
    first, x, value = stop_within(path, q)
    last, last_x, last_value = stop_within(path, greatest(limits, path.values[0]))
    if (last, last_x) < (first, x):
        first, x, value = last, last_x, last_value
    xs, values, slopes = path.xs[first : last + 1], path.values[first : last + 1], path.slopes[first:last]
    xs[0], values[0] = x, value
    if last_x > xs[-1]:
        xs.append(last_x)
        slopes.append(path.slopes[last])
        values.append(last_value)
    else:
        values[-1] = last_value
    levels = values
    if any(q):
        q0, q1, q2, q3, q4 = q
        levels = [(a - q0, b - q1, c - q2, d - q3, e - q4) for a, b, c, d, e in values]

    starts: list[float] = []
    segment_values: list[Vector] = []
    segment_slopes: list[Vector] = []
    positions: list[Position] = []
    jumping: list[int] = []
    moved = False
    s = same = 0.0
    for n, m in enumerate(slopes):
        level = levels[n + 1]
        high = max(level)
        if high <= same:  # more for no more suggestion: B jumps here
            moved = True
            continue
        x, v = xs[n], values[n]
        if m is None:  # waits below the jump until its upper end is affordable
            if moved:
                jumping.append(len(starts))
            starts.append(s)
            segment_values.append(v)
            segment_slopes.append(ZERO)
            positions.append((x, 0.0, x, *path.jumps[first + n]))
            moved = True
        else:
            reached, length = 0.0, xs[n + 1] - x
            if levels[n][level.index(high)] >= s - ROUNDING:  # one resource binds from end to end
                parts = [(s, high, 0.0, length)]
            else:
                parts = rising_parts(levels[n], m, length, s, high)
            for low, part_high, dx, dx_end in parts:
                if moved or dx > reached:
                    jumping.append(len(starts))
                    moved = False
                rate = (dx_end - dx) / (part_high - low)
                starts.append(low)
                segment_values.append(
                    (v[0] + m[0] * dx, v[1] + m[1] * dx, v[2] + m[2] * dx, v[3] + m[3] * dx, v[4] + m[4] * dx)
                    if dx
                    else v
                )
                segment_slopes.append((m[0] * rate, m[1] * rate, m[2] * rate, m[3] * rate, m[4] * rate))
                positions.append((x + dx, rate, x + dx_end, (), 0))
                reached = dx_end
            moved |= reached < length
        s = high
        same = s + s * ROUNDING
        if s > 1.0 - TIE:
            if s > 1.0 + TIE or _needs_all(path, first + n + 1, q, s):
                break
            s = min(s, 1.0 - 2.0**-53)
    else:
        if moved:
            jumping.append(len(starts))
        starts.append(s)
        segment_values.append(values[-1])
        segment_slopes.append(ZERO)
        positions.append(_waiting(path, last, xs[-1]))
    return ShareFunction(
        starts,
        segment_values,
        segment_slopes,
        value,
        jumping,
        positions,
        _waiting(path, first, xs[0]),
        any(function.delicate for function in path.functions),
    )


def _waiting(path: Path, step: int, x: float) -> Position:
    """The position at ``x`` in a step, or at the lower end of a jump step."""
    group, done = path.jumps.get(step, ((), 0))
    return (x, 0.0, x, group, done)


def _needs_all(path: Path, vertex: int, guarantee: Vector, level: float) -> bool:
    """Whether a vertex whose needed suggestion is 1 but for rounding needs 1, where functions end (8, 9.4)."""
    if vertex >= len(path.slopes):
        return level >= 1.0
    levels = subtract(path.values[vertex], guarantee)
    r = levels.index(max(levels))
    m = path.slopes[vertex]
    if m is None:
        return path.sum_at(vertex)[r] - guarantee[r] >= 1.0
    return m[r] > 0.0 or path.sum_between(path.xs[vertex], path.xs[vertex + 1])[r] - guarantee[r] >= 1.0
