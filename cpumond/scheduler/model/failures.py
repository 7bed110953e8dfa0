"""Ends of operations and jobs as errors with codes that clients of ``yt`` know (yt_protocol.md 7). Pure."""

from __future__ import annotations

from typing import Final

import msgspec

FAILED_ON_JOB_RESTART: Final = 210
FAILED_JOBS_LIMIT_EXCEEDED: Final = 215
"""Error codes of operations."""
MEMORY_LIMIT_EXCEEDED: Final = 1200
JOB_TIME_LIMIT_EXCEEDED: Final = 1202
USER_JOB_FAILED: Final = 1205
NON_ZERO_EXIT_CODE: Final = 10_000
"""Error codes of jobs. The last one is only inside the error of a failed job."""


class EndError(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A stored error. ``inner``: its causes."""

    message: str
    code: int = 1
    attributes: dict[str, str | int | float] = {}
    inner: tuple[EndError, ...] = ()
