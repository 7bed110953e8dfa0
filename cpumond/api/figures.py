"""Base of all answers about the scheduler's state, and the figures in them. Pure.

An answer is a ``View``, a struct that msgspec writes; a function ``view_...`` makes it from the living state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec

from cpumond.fairshare.resources import RESOURCES, Vector
from cpumond.scheduler.elements.figures import VECTORS, Read
from cpumond.scheduler.model import to_amounts

Amounts = dict[str, float]
V = TypeVar("V", bound=msgspec.Struct)


class View(msgspec.Struct, frozen=True):
    """Base of answers."""


def make_view(kind: type[V], source: Any, figures: Mapping[str, Read] = {}, /, **given: Any) -> V:
    """Return a view of ``source``. Fields not in ``given`` come from ``figures``, or are attributes of that name."""
    for name, read in figures.items():
        given[name] = read(source)
    for name in _fields_of(source.__class__, kind):
        if name not in given:
            given[name] = getattr(source, name)
    return kind(**given)


@cache
def _fields_of(source: type, kind: type[msgspec.Struct]) -> list[str]:
    return [name for name in kind.__struct_fields__ if hasattr(source, name)]


def choose_figures(kind: type[View], figures: Mapping[str, Read]) -> dict[str, Read]:
    """Return field -> reader, for the fields of a view that are in ``figures`` or are amounts of resources."""
    amounts = {name: _as_amounts(name) for name in VECTORS}
    return {name: read for name, read in {**figures, **amounts}.items() if name in kind.__struct_fields__}


def _as_amounts(name: str) -> Read:
    read, convert = VECTORS[name], limited if name == "limits" else to_amounts
    return lambda element: convert(read(element))


def limited(limits: Vector) -> Amounts:
    """Return the limits, without resources that have no limit."""
    return {name: limit for name, limit in zip(RESOURCES, limits, strict=True) if math.isfinite(limit)}
