"""The parameters of a command of the ``yt`` protocol, each read as the kind that it must be."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from cpumond.api.values import YtError, quote_text, strip_attributes
from cpumond.api.ypath import YPath, parse_ypath
from cpumond.api.yt import YtRequest


def plain(value: Any) -> Any:
    """A value of the protocol without attributes on any level."""
    value = strip_attributes(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def get_path(request: YtRequest, name: str = "path") -> YPath:
    """Raises YtError, as all of these do, for what is missing or is of another kind."""
    if name not in request.parameters:
        raise YtError(f'{request.command}: parameter "{name}" is missing')
    return parse_ypath(request.parameters[name])


def get_text(request: YtRequest, name: str, otherwise: str | None = None) -> str:
    value = strip_attributes(request.parameters.get(name))
    if value is None and otherwise is not None:
        return otherwise
    if not isinstance(value, str):
        what = "is missing" if value is None else f"must be text, not {quote_text(value)}"
        raise YtError(f'{request.command}: parameter "{name}" {what}')
    return value


def get_flag(request: YtRequest, name: str) -> bool:
    return strip_attributes(request.parameters.get(name)) is True


def get_table(request: YtRequest, name: str) -> dict[str, Any]:
    value = plain(request.parameters.get(name, {}))
    if not isinstance(value, dict):
        raise YtError(f'{request.command}: parameter "{name}" must be a map, not {quote_text(value)}')
    return value


def get_names(request: YtRequest, name: str) -> list[str] | None:
    value = plain(request.parameters.get(name))
    if isinstance(value, dict) and isinstance(value.get("keys"), list):
        value = value["keys"]
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise YtError(f'{request.command}: parameter "{name}" must be a list of names')
    return value


def get_number(request: YtRequest, name: str, otherwise: int, most: int) -> int:
    value = plain(request.parameters.get(name))
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise YtError(f'{request.command}: parameter "{name}" must be a whole number, not {quote_text(value)}')
    return min(value, most)


def get_time(request: YtRequest, name: str) -> float | None:
    """Seconds since 1970 of an ISO time or of microseconds since 1970."""
    value = plain(request.parameters.get(name))
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return value / 1e6
    try:
        found = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise YtError(
            f'{request.command}: parameter "{name}" must be a time such as 2026-11-20T23:23:17Z, not '
            f"{quote_text(value)}"
        ) from None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
