"""What every answer about the scheduler's state begins with, and the figures that pools and operations share. Pure.

An answer is a ``View``, a struct that msgspec writes; a function ``show_...`` makes it of what lives.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from cpumond.fairshare.resources import RESOURCES, Vector
from cpumond.scheduler.elements import Element, usage_share
from cpumond.scheduler.model import to_amounts
from cpumond.scheduler.starvation import starves_in_s

Amounts = dict[str, float]


class View(msgspec.Struct, frozen=True):
    """Base of answers."""


def show_shares(element: Element, now: float) -> dict[str, Any]:
    """What a pool and an operation in a tree have alike, as of the last fair-share update; CPU counters as of now."""
    return {
        "fair_share": to_amounts(absolute(element.fair_share, element.tree.total)),
        "fair_share_ratio": max(element.fair_share),
        "usage": to_amounts(element.usage),
        "usage_ratio": max(usage_share(element)),
        "demand": to_amounts(element.demand),
        "limits": limited(element.limits),
        "scheduling_status": element.scheduling_status,
        "starvation_status": element.starvation_status,
        "starves_in_s": None if element.rules is None else starves_in_s(element, now),
        "cpu_seconds": element.cpu_seconds,
        "reclaimed_cpu_seconds": element.reclaimed_cpu_seconds,
        "ordered_cpu_seconds": element.ordered_cpu_seconds,
        "throttled_cpu_seconds": element.throttled_cpu_seconds,
        "late_cpu_seconds": element.late_cpu_seconds,
    }


def absolute(share: Vector, total: Vector) -> Vector:
    """A share as absolute amounts."""
    a, b, c, d, e = share
    f, g, h, i, j = total
    return (a * f, b * g, c * h, d * i, e * j)


def limited(limits: Vector) -> Amounts:
    """The resources that are limited."""
    return {name: limit for name, limit in zip(RESOURCES, limits, strict=True) if math.isfinite(limit)}
