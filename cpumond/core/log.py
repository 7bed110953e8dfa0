"""structlog: JSON records, journald fields under systemd, readable lines on a terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import msgspec
import structlog

from cpumond.core.words import escape, escape_json

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}

_NO_FIELD_NAME = re.compile(r"[^A-Z0-9_]")


def choose_format(wanted: str, environment: Mapping[str, str], stream: TextIO) -> str:
    """Resolve ``[log] format``: auto means journald if stderr goes to the journal, console on a terminal, else JSON."""
    if wanted != "auto":
        return wanted
    if environment.get("JOURNAL_STREAM") and _is_journal(environment["JOURNAL_STREAM"], stream):
        return "journald"
    return "console" if stream.isatty() else "json"


def _is_journal(stream_id: str, stream: TextIO) -> bool:
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        # A stream without a descriptor is not the journal.
        return False
    return stream_id == f"{status.st_dev}:{status.st_ino}"


def configure_logging(level: str = "info", wanted: str = "auto", stream: TextIO | None = None) -> None:
    """Set up structlog for this process and route libraries' logs through it; may be called again after a reload."""
    stream = stream or sys.stderr
    style = choose_format(wanted, os.environ, stream)
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        _drop_empty,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    factory: Any = structlog.WriteLoggerFactory(_Unfailing(stream))  # type: ignore[arg-type]
    if style == "console":
        # The default traceback would show the values of all variables.
        plain = structlog.dev.plain_traceback
        processors += [_escape_fields, structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=plain)]
    elif style == "journald":
        processors += [structlog.processors.format_exc_info, _send_to_journal]
        factory = structlog.testing.ReturnLoggerFactory()
    else:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_encode)]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=factory,
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [handler for handler in root.handlers if not isinstance(handler, _LibraryHandler)]
    root.addHandler(_LibraryHandler(logging.WARNING))


class _Unfailing:
    """A log stream whose failures are ignored: a full disk or a closed pipe must not end the program."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        # ValueError: the stream is closed.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


class _LibraryHandler(logging.Handler):
    """Converts records of the standard library's logging into records of structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            structlog.get_logger("cpumond.library").log(
                min(record.levelno // 10 * 10, logging.CRITICAL),
                "library_message",
                library=record.name,
                text=record.getMessage().strip(),
                exc_info=record.exc_info,
            )
        except Exception:
            self.handleError(record)


def _drop_empty(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {key: value for key, value in event.items() if value is not None}


def _escape_fields(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape names and texts, so that no character moves the cursor, ends the line or changes the text's direction."""
    return {escape(key): escape(value) if isinstance(value, str) else value for key, value in event.items()}


def _encode(event: Any, **_: Any) -> str:
    try:
        return escape_json(msgspec.json.encode(event, enc_hook=str))
    except (ValueError, TypeError):
        # The event contains a text that is not valid Unicode (a path, for example), or a key that is not a text.
        return json.dumps({str(key): value for key, value in event.items()}, default=str)


def _send_to_journal(_: Any, __: str, event: MutableMapping[str, Any]) -> str:
    """Send one journal entry: MESSAGE is readable, and each field is also a journal field, in capitals."""
    from cysystemd import journal

    event.pop("timestamp", None)
    level = str(event.pop("level", "info"))
    name = str(event.pop("event", ""))
    words = " ".join(f"{key}={value}" for key, value in event.items() if key != "exception")
    fields = {f"CPUMOND_{_NO_FIELD_NAME.sub('_', str(key).upper())}": _valid(value) for key, value in event.items()}
    message = f"{name} {words}".strip() + (f"\n{event['exception']}" if "exception" in event else "")
    # A journal that is unavailable for a moment must not end the program.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        journal.send(
            message=_valid(message),
            priority=PRIORITIES.get(level, 6),
            syslog_identifier="cpumond",
            CPUMOND_EVENT=name,
            **fields,
        )
    return ""


def _valid(value: object) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()
