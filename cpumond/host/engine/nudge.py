"""Waiting for the next look at an engine."""

from __future__ import annotations

import asyncio
import contextlib


async def wait_nudged(nudged: asyncio.Event, timeout_s: float) -> bool:
    """Wait until a look is requested, at most ``timeout_s``; return whether a look was requested."""
    # Not ``wait_for``: before Python 3.12 it ignores a cancellation that coincides with the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await nudged.wait()
    return nudged.is_set()
