"""Long work of the event loop in parts, so that heartbeats and updates can run in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final, TypeVar

T = TypeVar("T")

OPERATIONS_AT_ONCE: Final = 1000
"""Number of operations that are counted, added up or prepared for a search in one part."""


async def in_parts(items: Sequence[T], size: int = OPERATIONS_AT_ONCE) -> AsyncIterator[Sequence[T]]:
    """Yield up to ``size`` items at a time. The state may change between two parts: the caller checks rights
    beforehand, and looks up live objects again in each part."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
        await asyncio.sleep(0)
