"""Responses as bytes: encoded, compressed, and prepared in advance."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
from typing import Any, Final

import msgspec

GZIP_LEVEL: Final = 4
THREAD_BYTES: Final = 65_536
"""Responses of this many bytes or more are compressed in a thread; in the event loop this would delay heartbeats."""

encode = msgspec.json.Encoder().encode


@dataclasses.dataclass(frozen=True, slots=True)
class WithStatus:
    """An answer with an HTTP status other than the endpoint's."""

    value: Any
    status: int


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A successful response encoded in advance, also compressed; ``etag`` is weak and covers both forms."""

    content: bytes
    compressed: bytes
    etag: str


async def compress(content: bytes) -> bytes:
    """Compress content with gzip, in a thread if it is large."""
    if len(content) < THREAD_BYTES:
        return gzip.compress(content, GZIP_LEVEL, mtime=0)
    return await asyncio.to_thread(gzip.compress, content, GZIP_LEVEL, mtime=0)
