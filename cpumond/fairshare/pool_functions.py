"""The share function of a pool, made from its path (fair_share_update.md 9.4 and 9.5).

An element's ``B`` (9.5) is made from its path: the values that ``A`` (9.1 to 9.3) runs through, in order. For each
point of the path the needed suggestion is computed: the least ``s`` with ``value <= min(strong + proposed + s,
limits)``. Therefore ``M`` (9.4) is computed for the binding resource only. Along a linear piece, the needed suggestion
is a maximum of lines: one division per piece turns path into function. If the path moves without needing more
suggestion, ``B`` jumps; if the path itself jumps, ``B`` waits at the lower end until the upper end is affordable.

A pool's path and function are made from 0 as far as needed: each number is as if they were made in full."""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter
from typing import Final

from cpumond.fairshare.functions import ROUNDING, Position, ShareFunction, between, rising_parts
from cpumond.fairshare.paths import Path
from cpumond.fairshare.resources import ZERO, Vector, add, greatest, scale, subtract

TIE: Final = 1e-12
"""A running sum that is closer to a bound than this is computed again, child by child, before the comparison."""

NEARLY_ONE: Final = 1.0 - TIE
BELOW_ONE: Final = 1.0 - 2.0**-53


def stop_within(path: Path, bound: Vector) -> tuple[int, float, Vector]:
    """Return the farthest point of ``path`` up to which all values are within ``bound``, as is the start (9.4). Returns
    (step, fit factor, value): inside this linear step, or at the start of this jump, which does not fit; if the whole
    path fits, (number of steps, last fit factor, last value). A jump counts as made only if the path goes on."""
    values = path.values
    first_beyond = [
        _first_beyond(path, r, limit) if last > limit - TIE and last > 0.0 else len(values)
        for r, (limit, last) in enumerate(zip(bound, values[-1], strict=True))
    ]
    end = min(first_beyond)
    step = end - 1
    x = path.xs[step]
    v = values[step]
    if step == len(path.slopes):
        return step, x, path.sum_at_end() if path.complete else v
    m = path.slopes[step]
    if m is None:
        return step, x, v
    stopping = [r for r in range(5) if first_beyond[r] == end]
    if step and path.slopes[step - 1] is None and any(v[r] > bound[r] - TIE for r in stopping):
        exact = path.sum_at(step)
        if any(exact[r] >= bound[r] for r in stopping):
            return step - 1, x, values[step - 1]
    x_end, v_end = path.xs[end], values[end]
    stop = min(between(bound[r], v[r], v_end[r], x, x_end) if v_end[r] > v[r] else x for r in stopping)
    stop = min(max(stop, x), x_end)
    a, b, c, d, e = (between(stop, x, x_end, v[r], v_end[r]) for r in range(5))
    if stop > x and 0.0 in m:
        exact = path.sum_along(step)
        a, b, c, d, e = (v if rate else at for v, rate, at in zip((a, b, c, d, e), m, exact, strict=True))
    return step, stop, (a, b, c, d, e)


def _first_beyond(path: Path, r: int, limit: float) -> int:
    """Return the first vertex whose value of resource ``r`` exceeds a limit, or the number of vertices if none does;
    the start does not. Near the limit, the sums of the children's own values are compared."""
    values, key = path.values, itemgetter(r)
    beyond = bisect_right(values, limit + TIE, key=key)
    near = max(bisect_right(values, limit - TIE, 0, beyond, key=key), 1)

    def exact(vertex: int) -> float:
        for step in (vertex, vertex - 1):
            slope = path.slopes[step] if step < len(path.slopes) else None
            if slope is not None and slope[r] == 0.0:
                return path.sum_along(step)[r]
        return path.sum_at(vertex)[r]

    return bisect_right(range(beyond), limit, near, beyond, key=exact) if near < beyond else beyond


class _Segments:
    """A pool's function while it is made, in segments. ``moved``: the path has moved since the last segment's end."""

    __slots__ = ("starts", "values", "slopes", "positions", "lower_ends", "end", "moved")

    def __init__(self, at_zero: Vector) -> None:
        self.starts: list[float] = []
        self.values: list[Vector] = []
        self.slopes: list[Vector] = []
        self.positions: list[Position] = []
        self.lower_ends: dict[int, Vector] = {}
        self.end = at_zero
        """The value at the end of the last segment."""
        self.moved = False

    def add(self, start: float, value: Vector, slope: Vector, position: Position, end: Vector) -> None:
        """Append a segment, which begins with a jump if the path has moved since the last segment's end."""
        if self.moved:
            self.lower_ends[len(self.starts)] = self.end
            self.moved = False
        self.end = end
        self.starts.append(start)
        self.values.append(value)
        self.slopes.append(slope)
        self.positions.append(position)


class _Piece:
    """The piece of a path from where it leaves ``guarantee`` to where it meets ``limits``; the path's start is within
    both (9.4). ``first`` and ``last`` are the steps of the path that contain the piece's ends. ``is_cut``: the piece
    ends before the path does. The vertices before ``exact_until`` are vertices of the path."""

    __slots__ = ("first", "last", "is_cut", "xs", "values", "slopes", "at_zero", "exact_until")

    def __init__(self, path: Path, guarantee: Vector, limits: Vector) -> None:
        first, x, at_zero = stop_within(path, guarantee)
        last, last_x, last_value = stop_within(path, limits)
        if (last, last_x) < (first, x):
            first, x, at_zero = last, last_x, last_value
        self.first, self.last, self.at_zero = first, last, at_zero
        self.is_cut = last < len(path.slopes)
        xs, values, slopes = path.xs[first : last + 1], path.values[first : last + 1], path.slopes[first:last]
        xs[0], values[0] = x, at_zero
        self.exact_until = len(xs)
        if self.is_cut and last_x > xs[-1]:
            xs.append(last_x)
            slopes.append(path.slopes[last])
            values.append(last_value)
        elif path.complete:
            values[-1] = last_value
        self.xs, self.values, self.slopes = xs, values, slopes


def pool_function(path: Path, guarantee: Vector, limits: Vector, asked_from: float = 0.0) -> ShareFunction | None:
    """Return ``B`` of a pool whose children take ``path`` (9.4, 9.5), as far as it is known from an incomplete path;
    None if not even B(0) is.

    ``guarantee`` is the strong plus the proposed share, ``limits`` the limits share, at most 1. B(0) is the last value
    within the guarantee; values beyond the limits are never reached. In between, the suggestion that each step needs is
    computed. Between 0 and ``asked_from`` the function is not made and must not be evaluated."""
    q = greatest(guarantee, path.values[0])
    if not path.complete and _ends_at(path, q, limits):
        return None
    piece = _Piece(path, q, greatest(limits, path.values[0]))
    first, xs, values, slopes = piece.first, piece.xs, piece.values, piece.slopes
    levels = _levels(values, q)
    segments = _Segments(piece.at_zero)
    at_one: Vector | None = None
    s = 0.0
    begin = 0
    if asked_from:
        begin = max(bisect_right(levels, asked_from, key=max) - 1, 0)
        s = max(*levels[begin], 0.0)
        segments.moved = begin > 0
    for n in range(begin, len(slopes)):
        m = slopes[n]
        high = max(levels[n + 1])
        if high > NEARLY_ONE and n + 1 < piece.exact_until:  # shares depend on whether that is exactly 1 (9.4, trim)
            values[n + 1] = _exact_value(path, first + n + 1, m, values[n], values[n + 1], levels[n + 1])
            levels[n + 1] = subtract(values[n + 1], q)
            high = max(levels[n + 1])
        rounding = ROUNDING if s <= NEARLY_ONE else 0.0
        more = high > s + s * rounding
        if not more:  # no more suggestion is needed: B jumps here
            segments.moved = True
        elif m is None:  # B waits below the jump until its upper end is affordable
            segments.add(s, values[n], ZERO, (xs[n], 0.0, xs[n], *path.jumps[first + n]), values[n])
            segments.moved = high < 1.0
        elif levels[n][levels[n + 1].index(high)] >= s - ROUNDING:  # one resource has the highest level throughout
            a, b, c, d, e = m
            rate = (xs[n + 1] - xs[n]) / (high - s)
            slope = (a * rate, b * rate, c * rate, d * rate, e * rate)
            segments.add(s, values[n], slope, (xs[n], rate, xs[n + 1], (), 0), values[n + 1])
        else:
            rising = rising_parts(levels[n], m, xs[n + 1] - xs[n], s, high, rounding)
            _add_rising(segments, rising, (xs[n], xs[n + 1]), values[n], m)
        if more:
            s = high if high < 1.0 else BELOW_ONE
        if high >= 1.0:
            vertex = n if m is None else n + 1
            at_one = values[vertex]
            if segments.moved:
                segments.add(s, at_one, ZERO, _waiting(path, first + vertex, xs[vertex]), at_one)
            break
    if at_one is None and (piece.is_cut or path.complete):
        at_one = values[-1]
        segments.add(s, at_one, ZERO, _waiting(path, piece.last, xs[-1]), at_one)
    if not segments.starts:
        return None
    return ShareFunction(
        segments.starts, segments.values, segments.slopes, piece.at_zero, segments.lower_ends, segments.positions,
        _waiting(path, first, xs[0]), s if at_one is None else 1.0, at_one,
    )  # fmt: skip


def _add_rising(
    segments: _Segments, rising: list[tuple[float, float, float, float]], span: tuple[float, float], v: Vector,
    m: Vector,
) -> None:  # fmt: skip
    """Add the parts of ``rising_parts`` for a linear step of the path, each as a segment (9.4)."""
    x, x_end = span
    reached = 0.0
    for low, high, dx, dx_end in rising:
        segments.moved |= dx > reached
        rate = (dx_end - dx) / (high - low)
        position = (x + dx, rate, x + dx_end, (), 0)
        segments.add(low, add(v, scale(m, dx)), scale(m, rate), position, add(v, scale(m, dx_end)))
        reached = dx_end
    segments.moved |= reached < x_end - x


def _levels(values: list[Vector], guarantee: Vector) -> list[Vector]:
    if not any(guarantee):
        return values
    q0, q1, q2, q3, q4 = guarantee
    return [(a - q0, b - q1, c - q2, d - q3, e - q4) for a, b, c, d, e in values]


def _ends_at(path: Path, *bounds: Vector) -> bool:
    """Whether an incomplete path ends so near a bound that only more of the path shows whether it exceeds it (9.4)."""
    end = path.values[-1]
    return any(v > 0.0 and abs(v - limit) <= TIE for bound in bounds for v, limit in zip(end, bound, strict=True))


def _waiting(path: Path, step: int, x: float) -> Position:
    """Return the position at ``x`` in a step; for a jump, the position at its lower end."""
    group, done = path.jumps.get(step, ((), 0))
    return (x, 0.0, x, group, done)


def _exact_value(path: Path, vertex: int, m: Vector | None, before: Vector, running: Vector, level: Vector) -> Vector:
    """Return the value at a vertex that needs a suggestion of nearly 1: the sum of the children's own values.

    ``before``: the value at the previous vertex; ``m``: the slope from there; ``running``, ``level``: at this one."""
    if m is None or any(rate > 0.0 and x > NEARLY_ONE for rate, x in zip(m, level, strict=True)):
        ends = path.complete and vertex == len(path.slopes)
        return path.sum_at_end() if ends else path.sum_at(vertex)
    a, b, c, d, e = (x if rate else same for rate, x, same in zip(m, running, before, strict=True))
    return (a, b, c, d, e)
