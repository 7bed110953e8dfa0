"""structlog: JSON records, journald fields under systemd, readable lines on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import msgspec
import structlog

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def choose_format(wanted: str, environment: Mapping[str, str], stream: TextIO) -> str:
    """What ``[log] format`` means here: auto is journald where stderr is its stream, console on a terminal."""
    if wanted != "auto":
        return wanted
    if environment.get("JOURNAL_STREAM") and _is_journal(environment["JOURNAL_STREAM"], stream):
        return "journald"
    return "console" if stream.isatty() else "json"


def _is_journal(stream_id: str, stream: TextIO) -> bool:
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        # No descriptor behind it: not the journal.
        return False
    return stream_id == f"{status.st_dev}:{status.st_ino}"


def configure_logging(level: str = "info", wanted: str = "auto", stream: TextIO | None = None) -> None:
    """Set structlog up for this process; may be called again after a reload."""
    stream = stream or sys.stderr
    style = choose_format(wanted, os.environ, stream)
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        _drop_empty,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    factory: Any = structlog.PrintLoggerFactory(stream)
    if style == "console":
        processors += [structlog.dev.ConsoleRenderer(colors=stream.isatty())]
    else:
        processors += [structlog.processors.format_exc_info]
        if style == "journald":
            processors += [_send_to_journal]
            factory = structlog.testing.ReturnLoggerFactory()
        else:
            processors += [structlog.processors.JSONRenderer(serializer=_encode)]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=factory,
        cache_logger_on_first_use=False,
    )


def _drop_empty(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Fields that are None say nothing."""
    return {key: value for key, value in event.items() if value is not None}


def _encode(event: Any, **_: Any) -> str:
    return msgspec.json.encode(event, enc_hook=str).decode()


def _send_to_journal(_: Any, __: str, event: MutableMapping[str, Any]) -> str:
    """One journal entry: MESSAGE is readable, each field is a journal field of its own, in capitals."""
    from cysystemd import journal

    event.pop("timestamp", None)
    level = str(event.pop("level", "info"))
    name = str(event.pop("event", ""))
    words = " ".join(f"{key}={value}" for key, value in event.items() if key != "exception")
    fields = {f"CPUMOND_{key}".upper(): str(value) for key, value in event.items()}
    message = f"{name} {words}".strip() + (f"\n{event['exception']}" if "exception" in event else "")
    journal.send(
        message=message,
        priority=PRIORITIES.get(level, 6),
        syslog_identifier="cpumond",
        CPUMOND_EVENT=name,
        **fields,
    )
    return ""
