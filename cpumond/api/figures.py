"""What every answer about the scheduler's state begins with, and the figures that pools and operations share. Pure.

An answer is a ``View``, a struct that msgspec writes; a function ``show_...`` makes it from the living state.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec

from cpumond.fairshare.resources import RESOURCES, Vector
from cpumond.scheduler.decide.starvation import starves_in_s
from cpumond.scheduler.elements import Element, usage_share
from cpumond.scheduler.model import to_amounts

Amounts = dict[str, float]
V = TypeVar("V", bound=msgspec.Struct)


class View(msgspec.Struct, frozen=True):
    """Base of answers."""


def make_view(kind: type[V], source: object, **others: Any) -> V:
    """A view of ``source``: each field that ``others`` does not give is its attribute of that name, if it has one."""
    names = (name for name in kind.__struct_fields__ if name not in others and hasattr(source, name))
    return kind(**{name: getattr(source, name) for name in names}, **others)


def show_shares(element: Element, now: float) -> dict[str, Any]:
    """The figures that a pool and an operation in a tree have in common, as of the last fair-share update."""
    return {
        "fair_share": to_amounts(absolute(element.fair_share, element.tree.total)),
        "fair_share_ratio": max(element.fair_share),
        "usage": to_amounts(element.usage),
        "usage_ratio": max(usage_share(element)),
        "demand": to_amounts(element.demand),
        "limits": limited(element.limits),
        "starves_in_s": None if element.rules is None else starves_in_s(element, now),
    }


def absolute(share: Vector, total: Vector) -> Vector:
    """A share as absolute amounts."""
    a, b, c, d, e = share
    f, g, h, i, j = total
    return (a * f, b * g, c * h, d * i, e * j)


def limited(limits: Vector) -> Amounts:
    """The resources that are limited."""
    return {name: limit for name, limit in zip(RESOURCES, limits, strict=True) if math.isfinite(limit)}
