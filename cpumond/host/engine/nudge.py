"""Waiting for the next look at an engine."""

from __future__ import annotations

import asyncio
import contextlib


async def wait_nudged(nudged: asyncio.Event, timeout_s: float) -> bool:
    """Wait until a look is asked for, ``timeout_s`` at most; whether one was."""
    # Not ``wait_for``: before Python 3.12 one that is cancelled just as the event comes goes on as if it were not.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await nudged.wait()
    return nudged.is_set()
