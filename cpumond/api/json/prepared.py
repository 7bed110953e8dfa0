"""Answers as bytes: encoded, compressed, prepared before they are asked for."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
from typing import Any, Final

import msgspec

GZIP_LEVEL: Final = 4
THREAD_BYTES: Final = 65_536
"""Answers from this size on are compressed in a thread: in the event loop they would hold up heartbeats."""

encode = msgspec.json.Encoder().encode


@dataclasses.dataclass(frozen=True, slots=True)
class WithStatus:
    """An answer with a status of its own."""

    value: Any
    status: int


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A good answer that was encoded before, and compressed; ``etag`` is weak and names both."""

    content: bytes
    compressed: bytes
    etag: str


async def compress(content: bytes) -> bytes:
    """By gzip; large content in a thread."""
    if len(content) < THREAD_BYTES:
        return gzip.compress(content, GZIP_LEVEL, mtime=0)
    return await asyncio.to_thread(gzip.compress, content, GZIP_LEVEL, mtime=0)
