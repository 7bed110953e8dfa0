"""Maps whose values are made on demand, and plain values in YTsaurus' notation. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from cpumond.core.words import nearest
from cpumond.fairshare.resources import Vector

MISSING: Final[Any] = object()
"""Stands for a value that a map does not have."""


class Lazy(Mapping[str, Any]):
    """A map whose values are made on demand; a value may itself be ``Lazy``."""

    __slots__ = ("_names", "_find", "_explain", "_has_all", "hidden", "is_whole")

    def __init__(
        self, names: Callable[[], Iterable[str]], find: Callable[[str], Any],
        explain: Callable[[str], str] | None = None, hidden: frozenset[str] = frozenset(), *, has_all: bool = False,
        is_whole: bool = False,
    ) -> None:  # fmt: skip
        """``find`` returns MISSING if there is no value, even if ``names`` contains the name; ``explain`` says why.

        ``hidden``: names of values too large to be shown with the rest; None replaces them. ``has_all``: each name has
        a value, so no values are made to list the names. ``is_whole``: all values are attributes of one object."""
        self._names = names
        self._find = find
        self._explain = explain
        self.hidden = hidden
        self._has_all = has_all
        self.is_whole = is_whole

    def __getitem__(self, name: str) -> Any:
        value = self._find(name)
        if value is MISSING:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        if self._has_all:
            return iter(list(self._names()))
        return (name for name in self._names() if self._find(name) is not MISSING)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Yield the shown entries one by one: the names of the start, each value as of the moment when it is made."""
        for name in list(self._names()):
            value = None if name in self.hidden else self._find(name)
            if value is not MISSING:
                yield name, value

    def to_dict(self) -> dict[str, Any]:
        """All shown entries, as plain values."""
        return {name: materialise(value) for name, value in self.parts()}

    def explain(self, name: str) -> str:
        """Explain why there is no ``name``, and name the nearest one that exists."""
        near = nearest(name, self)
        hint = f'; did you mean "{near}"?' if near else ""
        return (self._explain(name) if self._explain is not None else f'there is no "{name}"') + hint


def materialise(value: Any) -> Any:
    """Return a value in which all lazy parts are made."""
    return value.to_dict() if isinstance(value, Lazy) else value


def fixed(parts: Mapping[str, Callable[[], Any]], hidden: frozenset[str] = frozenset()) -> Lazy:
    """Return a map of these parts, each of which is made on demand."""
    return Lazy(lambda: parts, lambda name: parts[name]() if name in parts else MISSING, hidden=hidden)


def iso_time(seconds: float) -> str:
    """Seconds since 1970 as ``2026-11-20T23:23:17.000000Z``."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def table(items: Mapping[str, Any], view: Callable[[Any], Any]) -> Lazy:
    """Return a map with the names of ``items`` and, as values, the results of ``view`` for the items."""
    return Lazy(lambda: items, lambda name: view(items[name]) if name in items else MISSING, has_all=True)


def amounts(vector: Vector) -> dict[str, Any]:
    """Return resources as a map. The value of cpu is always a double; others are integers if they are whole."""
    slots, cpu, gpu, memory, network = vector
    return {
        "user_slots": whole(slots), "cpu": cpu, "gpu": whole(gpu), "memory": whole(memory), "network": whole(network),
    }  # fmt: skip


def whole(number: float) -> float:
    """Return a number that is whole, up to rounding errors of sums, as an integer; others unchanged."""
    integer = round(number)
    return integer if abs(integer - number) <= 1e-9 * max(abs(number), 1.0) else number
