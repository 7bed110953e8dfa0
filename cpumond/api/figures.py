"""How answers are made of what lives: a figure is told once, by its name, its type and how it is derived. Pure.

An answer is a ``View``. Each of its fields is the attribute of that name of the thing it is about; where there is none,
``Of`` in the field's annotation reads it. What depends on more than the thing is given to ``show``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec

from cpumond.fairshare.resources import RESOURCES, Vector
from cpumond.scheduler.elements import usage_share
from cpumond.scheduler.model import to_amounts

Amounts = dict[str, float]
S = TypeVar("S", bound=msgspec.Struct)


class View(msgspec.Struct, frozen=True):
    """Base of answers."""


@dataclass(frozen=True, slots=True)
class Of:
    """How a figure is read from the thing that an answer is about."""

    read: Callable[[Any], Any]


def show(kind: type[S], thing: object, /, **given: Any) -> S:
    """The answer of a kind about a thing; ``given`` are the fields that it does not say itself."""
    readers, holes = _plan(kind, *given)
    values = [read(thing) for read in readers]
    for position, name in holes:
        values[position] = given.pop(name)
    return kind(*values, **given)


@cache
def _plan(kind: type[msgspec.Struct], *given: str) -> tuple[list[Callable[[Any], Any]], list[tuple[int, str]]]:
    """What reads the fields of a kind by their position, and the positions of those that are given.

    Keywords would cost as much again: a list has thousands of answers. What can be nothing else is given.
    """
    # Without names of its own the readers' globals are those of their module.
    hints = get_type_hints(kind, localns={}, include_extras=True)
    readers: list[Callable[[Any], Any]] = []
    for name in kind.__match_args__:
        found = [extra.read for extra in getattr(hints[name], "__metadata__", ()) if isinstance(extra, Of)]
        readers.append(type if name in given else found[0] if found else attrgetter(name))
    return readers, [(position, name) for position, name in enumerate(kind.__match_args__) if name in given]


def absolute(share: Vector, total: Vector) -> Vector:
    """A share as absolute amounts."""
    a, b, c, d, e = share
    f, g, h, i, j = total
    return (a * f, b * g, c * h, d * i, e * j)


def limited(limits: Vector) -> Amounts:
    """The resources that are limited."""
    return {name: limit for name, limit in zip(RESOURCES, limits, strict=True) if math.isfinite(limit)}


# Of pools and operations alike, as of the last fair-share update; ratios are of the dominant resource.
FairShare = Annotated[Amounts, Of(lambda e: to_amounts(absolute(e.fair_share, e.tree.total)))]
FairShareRatio = Annotated[float, Of(lambda e: max(e.fair_share))]
Usage = Annotated[Amounts, Of(lambda e: to_amounts(e.usage))]
UsageRatio = Annotated[float, Of(lambda e: max(usage_share(e)))]
Demand = Annotated[Amounts, Of(lambda e: to_amounts(e.demand))]
Limits = Annotated[Amounts, Of(lambda e: limited(e.limits))]
