"""How answers are made of what lives: a figure is told once, by its name, its type and how it is derived. Pure.

An answer is a ``View``. Each of its fields is the attribute of that name of the thing it is about; where there is none,
``Of`` in the field's annotation reads it. What depends on more than the thing is given to ``show``. Fields by keyword
alone are of a base; ``BASE_AT`` of the kind names the part of the thing that has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
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
    """How a figure is read from the thing that an answer is about: what stands there at a path, such as
    ``element.tree.name`` or ``limits[1]``, or what a function makes of it, which costs more; None: it has no such."""

    read: Callable[[Any], Any] | str | None


def show(kind: type[S], thing: object, /, **given: Any) -> S:
    """The answer of a kind about a thing; ``given`` are the fields that it does not say itself."""
    answer: S = _maker(kind, *given)(thing, *given.values())
    return answer


@cache
def _maker(kind: type[msgspec.Struct], *given: str) -> Callable[..., Any]:
    """What calls the constructor of a kind, made as ``dataclasses`` makes one: a list has thousands of answers, and a
    loop over their fields took three times as long."""
    # Without names of its own the readers' globals are those of their module.
    hints = get_type_hints(kind, localns={}, include_extras=True)
    base = f"{kind.BASE_AT}." if hasattr(kind, "BASE_AT") else ""
    known: dict[str, Any] = {}
    values = []
    for name in kind.__struct_fields__:
        by_position = name in kind.__match_args__
        read: Any = name if by_position else base + name
        for extra in getattr(hints[name], "__metadata__", ()):
            read = extra.read if isinstance(extra, Of) else read
        if name in given:
            value = name
        elif read is None or isinstance(read, str):
            value = f"thing.{read}" if read else "None"
        else:
            known[f"read_{name}"], value = read, f"read_{name}(thing)"
        values.append(value if by_position else f"{name}={value}")
    return _compile(kind, given, values, known)


def copier(kind: type[S], source: type[msgspec.Struct], *given: str) -> Callable[..., S]:
    """What makes an answer of a thing that has figures under their names there, and no others but those ``given``."""
    names = [name for name in kind.__struct_fields__ if name in source.__struct_fields__]
    values = [f"{name}={name}" for name in given] + [f"{name}=thing.{name}" for name in names]
    return _compile(kind, given, values, {})


def _compile(kind: type, given: tuple[str, ...], values: list[str], known: dict[str, Any]) -> Callable[..., Any]:
    source = f"lambda {', '.join(('thing', *given))}: kind({', '.join(values)})"
    maker: Callable[..., Any] = eval(source, {**known, "kind": kind})  # noqa: S307 - names that stand in this package
    return maker


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
