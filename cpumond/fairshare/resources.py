"""The resource vector: order, units, quantisation (fair_share_update.md 0 and 17)."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from typing import Final

from cpumond.core.words import GIB

Vector = tuple[float, float, float, float, float]
"""One number per resource in the order of RESOURCES: absolute units, resource*seconds, or fractions of the totals."""

RESOURCES: Final = ("user_slots", "cpu", "gpu", "memory", "network")
"""Layout of every vector, and the order in which ties are resolved. Memory is in bytes, cpu in cores."""

CPU: Final = 1
MEMORY: Final = 3
EPS: Final = 1e-9
"""The specification's epsilon, as a fraction of the cluster."""

ZERO: Final[Vector] = (0.0, 0.0, 0.0, 0.0, 0.0)
ONE: Final[Vector] = (1.0, 1.0, 1.0, 1.0, 1.0)
UNLIMITED: Final[Vector] = (math.inf, math.inf, math.inf, math.inf, math.inf)


# Many thousands of operations keep vectors with zeros: "or 0.0" makes all zeros the same object, which saves memory.


def add(a: Vector, b: Vector) -> Vector:
    return (a[0] + b[0] or 0.0, a[1] + b[1] or 0.0, a[2] + b[2] or 0.0, a[3] + b[3] or 0.0, a[4] + b[4] or 0.0)


def subtract(a: Vector, b: Vector) -> Vector:
    return (a[0] - b[0] or 0.0, a[1] - b[1] or 0.0, a[2] - b[2] or 0.0, a[3] - b[3] or 0.0, a[4] - b[4] or 0.0)


def scale(a: Vector, factor: float) -> Vector:
    return (
        a[0] * factor or 0.0, a[1] * factor or 0.0, a[2] * factor or 0.0, a[3] * factor or 0.0, a[4] * factor or 0.0,
    )  # fmt: skip


def least(a: Vector, b: Vector) -> Vector:
    return (min(a[0], b[0]), min(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]), min(a[4], b[4]))


def greatest(a: Vector, b: Vector) -> Vector:
    return (max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3]), max(a[4], b[4]))


def positive_part(a: Vector) -> Vector:
    return (max(a[0], 0.0), max(a[1], 0.0), max(a[2], 0.0), max(a[3], 0.0), max(a[4], 0.0))


def dominates(a: Vector, b: Vector) -> bool:
    """Whether ``a`` is at least as large as ``b`` in every resource, without tolerance."""
    return a[0] >= b[0] and a[1] >= b[1] and a[2] >= b[2] and a[3] >= b[3] and a[4] >= b[4]


def sum_in_order(values: Iterable[float]) -> float:
    """Return the sum from left to right, rounding each step to a double. ``sum`` would not be the same everywhere: from
    Python 3.12 on it compensates for rounding."""
    total = 0.0
    for each in values:
        total += each
    return total


def sum_vectors(vectors: list[Vector]) -> Vector:
    """Return the sum of any number of vectors, in their order."""
    a = b = c = d = e = 0.0
    for v, w, x, y, z in vectors:
        a += v
        b += w
        c += x
        d += y
        e += z
    return (a, b, c, d, e)


def of_share(x: Vector, total: Vector) -> Vector:
    """Return the amounts whose fractions of ``total`` are ``x``."""
    return (x[0] * total[0], x[1] * total[1], x[2] * total[2], x[3] * total[3], x[4] * total[4])


def share(x: Vector, total: Vector) -> Vector:
    """Return ``x`` as fractions of ``total``; 0 for any resource that the cluster lacks (0)."""
    a, b, c, d, e = x
    f, g, h, i, j = total
    return (
        a / f if a and f else 0.0, b / g if b and g else 0.0, c / h if c and h else 0.0, d / i if d and i else 0.0,
        e / j if e and j else 0.0,
    )  # fmt: skip


def ratio(x: Vector, total: Vector) -> float:
    """Return the greatest fraction of ``total`` among resources that the cluster has; 0 without such a resource (3)."""
    return max((v / t for v, t in zip(x, total, strict=True) if t > 0), default=0.0)


def round_half_away(x: float) -> float:
    """Return the nearest integer, halves away from zero (17)."""
    return math.copysign(math.floor(abs(x) + 0.5), x)


def quantise_cpu(cores: float) -> float:
    """Return ``cores`` rounded to a multiple of 0.01, halves away from zero (17)."""
    return round_half_away(cores * 100.0) / 100.0


def scale_cpu(cores: float, factor: float) -> float:
    """Return ``cores``, a multiple of 0.01, times ``factor``, computed in hundredths and rounded to hundredths (17)."""
    return round_half_away(round(cores * 100.0) * factor) / 100.0


def scale_resources(x: Vector, factor: float) -> Vector:
    """Return amounts times ``factor``, rounded to integers, cpu to multiples of 0.01, halves away from zero (17)."""
    a, _, c, d, e = scale(x, factor)
    return (round_half_away(a), scale_cpu(x[CPU], factor), round_half_away(c), round_half_away(d), round_half_away(e))


def sum_resources(vectors: list[Vector]) -> Vector:
    """Return the sum of amounts or volumes, with cpu summed in hundredths (17)."""
    return exact_cpu(sum_vectors(vectors))


def scale_volume(x: Vector, factor: float) -> Vector:
    """Return resource*seconds times ``factor``; cpu is rounded to a multiple of 0.01, others are not rounded (17)."""
    return (x[0] * factor, scale_cpu(x[CPU], factor), x[2] * factor, x[3] * factor, x[4] * factor)


def exact_cpu(x: Vector) -> Vector:
    """``x`` with its cpu rounded to a multiple of 0.01, which removes rounding errors of sums and differences (17)."""
    return (x[0], quantise_cpu(x[CPU]), x[2], x[3], x[4])


def bisect_max(low: float, high: float, holds: Callable[[float], bool]) -> float:
    """The greatest double in [low, high], both >= 0, for which a monotone predicate holds; it holds for ``low`` (0)."""
    if holds(high):
        return high
    least_bits, bits = _bits(low), _bits(high)
    while bits - least_bits > 1:
        middle = (least_bits + bits) // 2
        if holds(_from_bits(middle)):
            least_bits = middle
        else:
            bits = middle
    return _from_bits(least_bits)


def _bits(x: float) -> int:
    """Return the bit pattern of a double; for non-negative doubles, it sorts like the value."""
    return int.from_bytes(struct.pack(">d", x), "big")


def _from_bits(bits: int) -> float:
    x: float = struct.unpack(">d", bits.to_bytes(8, "big"))[0]
    return x


def find_dominant(shares: Vector) -> str:
    """Return the resource of the largest share; CPU if no other share is larger."""
    largest = max(shares)
    return RESOURCES[CPU if shares[CPU] == largest else shares.index(largest)]


def format_resource(name: str) -> str:
    """Return the text after a share's percentage that names its resource: " (by job slots)"; "" for CPU."""
    return "" if name == "cpu" else f" (by {name.replace('user_slots', 'job slots')})"


def format_dominant(shares: Vector) -> str:
    """Return the largest share in percent, with its resource unless that is CPU: "3.3% (by job slots)"."""
    return f"{max(shares):.1%}{format_resource(find_dominant(shares))}"


def format_amount(resource: int, value: float) -> str:
    """Return an amount as text with up to two decimals; memory is shown in GiB. ``resource``: its index."""
    text, unit = (f"{value / GIB:.2f}", " GiB") if RESOURCES[resource] == "memory" else (f"{value:.2f}", "")
    return text.rstrip("0").rstrip(".") + unit
