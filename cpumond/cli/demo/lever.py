"""What moves in ``cpumond demo``: guarantees or quotas, and the words for it."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

Lever = Literal["guarantee", "quota"]


class Words(NamedTuple):
    """``options`` of the monitor, the noun for what moves, the words for all of it, and a sentence about it."""

    options: dict[str, Any]
    noun: str
    whole: str
    sentence: str


WORDS: Final[dict[Lever, Words]] = {
    "guarantee": Words(
        {"actuator": "guarantee", "use_restore_ratio": 1.0},
        "guarantee",
        "its whole guarantee",
        "Guarantees move, no quota does: whoever runs on the freed CPU is in the idle class, behind all others.",
    ),
    "quota": Words({}, "limit", "all its CPU", "CPU quotas move (cpu.max, cpu.cfs_quota_us)."),
}
