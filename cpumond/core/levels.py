"""How much an agent may do to the limits of its jobs, in one order, which a roll-out follows step by step. Pure."""

from __future__ import annotations

from typing import Final, Literal, get_args

Level = Literal["off", "shadow", "up-only", "guarantee", "weight", "quota"]
"""The last three: mode reclaim by that actuator; the others are modes."""

Actuator = Literal["guarantee", "weight", "quota"]
"""What a moved job guarantee sets in a container that is not ours: nothing, its weight, its quota. The least active
first."""

LEVELS: Final[tuple[Level, ...]] = get_args(Level)
"""The least active first."""

ACTUATORS: Final[tuple[Actuator, ...]] = get_args(Actuator)

SAFE: Final[Level] = "shadow"
"""The level of an agent under a scheduler's roll-out until the scheduler sends one."""


def lowest(a: Level, b: Level) -> Level:
    return min(a, b, key=LEVELS.index)


def highest(a: Level, b: Level) -> Level:
    return max(a, b, key=LEVELS.index)


def is_above(a: Level, b: Level) -> bool:
    return LEVELS.index(a) > LEVELS.index(b)


def read_level(text: str) -> Level:
    """The level that a scheduler sent; ``SAFE`` for none, or one of a later version."""
    return next((each for each in LEVELS if each == text), SAFE)
