"""Levels: how far an agent may change the limits of its jobs, in the order of a roll-out. Pure."""

from __future__ import annotations

from typing import Final, Literal, get_args

Level = Literal["off", "shadow", "up-only", "guarantee", "weight", "quota"]
"""The last three mean mode reclaim with the actuator of that name; the first three are modes."""

Actuator = Literal["guarantee", "weight", "quota"]
"""The setting of a foreign container that follows the container's guarantee: none, its weight, or its quota. Ordered
from the least to the most active."""

LEVELS: Final[tuple[Level, ...]] = get_args(Level)
"""All levels, ordered from the least to the most active."""

ACTUATORS: Final[tuple[Actuator, ...]] = get_args(Actuator)

SAFE: Final[Level] = "shadow"
"""The level of an agent under a scheduler's roll-out until the scheduler sends it a level."""


def lowest(a: Level, b: Level) -> Level:
    return min(a, b, key=LEVELS.index)


def highest(a: Level, b: Level) -> Level:
    return max(a, b, key=LEVELS.index)


def is_above(a: Level, b: Level) -> bool:
    return LEVELS.index(a) > LEVELS.index(b)


def read_level(text: str) -> Level:
    """Return the level that a scheduler sent; ``SAFE`` if it sent none, or a level of a later version."""
    return next((each for each in LEVELS if each == text), SAFE)
