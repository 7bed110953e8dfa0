"""How an operation or a job ended, as an error with a code that clients of ``yt`` know (yt_protocol.md 7). Pure."""

from __future__ import annotations

from typing import Final

import msgspec

FAILED_ON_JOB_RESTART: Final = 210
FAILED_JOBS_LIMIT_EXCEEDED: Final = 215
"""Codes of the errors of operations."""
MEMORY_LIMIT_EXCEEDED: Final = 1200
JOB_TIME_LIMIT_EXCEEDED: Final = 1202
USER_JOB_FAILED: Final = 1205
NON_ZERO_EXIT_CODE: Final = 10_000
"""Codes of the errors of jobs; the last one is within that of a job that failed."""


class EndError(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An error as it is stored: ``inner`` are its causes."""

    message: str
    code: int = 1
    attributes: dict[str, str | int | float] = {}
    inner: tuple[EndError, ...] = ()
