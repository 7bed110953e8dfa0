"""The parameters of a command of the ``yt`` protocol, each of which is read as the required type."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request

from cpumond.api.yt.formats import Format, read_value
from cpumond.api.yt.values import ParseError, YtError, quote_text, strip_attributes
from cpumond.api.yt.ypath import YPath, parse_ypath
from cpumond.api.yt.yson import read_yson
from cpumond.scheduler.rights.tokens import User

MAX_QUERY_FIELDS = 100
MAX_MILLISECONDS = 1e9
MAX_NAMES = 256
"""Maximum number of attributes that a request may name, because it may name them for very many objects."""
_PIECE = re.compile(r"x-yt-parameters-?(\d{1,4})")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")


@dataclass(frozen=True)
class YtRequest:
    """One command. ``parameters`` are as they arrived: a path may be Attributed, and the backend ignores unknown names.
    ``value`` is the body of ``set`` and ``multiset_attributes``."""

    command: str
    parameters: dict[str, Any]
    value: Any
    user: User
    correlation_id: str


def read_map(text: bytes, form: Format, depth: int, where: str) -> dict[str, Any]:
    """Parse a text of parameters. ``where``: its place, for errors. Raises YtError, as the next two functions do."""
    try:
        value = strip_attributes(read_value(text, form, depth))
    except ParseError as error:
        raise error.located(where) from None
    if not isinstance(value, dict):
        raise YtError(f"Error parsing request: {where}: the parameters must be a map")
    return value


def gather_parameters(request: Request) -> bytes:
    """Return the text of ``X-YT-Parameters``, or of its base64 pieces ``X-YT-Parameters0``, ``X-YT-Parameters-1``..."""
    whole = request.headers.get("x-yt-parameters")
    if whole is not None:
        return whole.encode("latin-1")
    pieces: dict[int, str] = {}
    for name, value in request.headers.items():
        found = _PIECE.fullmatch(name)
        if found is not None:
            pieces[int(found[1])] = value.strip()
    if not pieces:
        return b""
    if sorted(pieces) != list(range(min(pieces), max(pieces) + 1)) or min(pieces) > 1:
        raise YtError("Error parsing request: a piece of the header X-YT-Parameters is missing")
    texts = [pieces[number] for number in sorted(pieces)]
    # Either each piece was encoded by itself, or the text was encoded as a whole and then split.
    apart = all(len(text) % 4 == 0 for text in texts)
    try:
        return b"".join(base64.b64decode(text, validate=True) for text in (texts if apart else ["".join(texts)]))
    except (binascii.Error, ValueError):
        raise YtError("Error parsing request: the pieces of the header X-YT-Parameters are not base64") from None


def read_query(request: Request, depth: int) -> dict[str, Any]:
    """Return the parameters in the URL, for example ``?path=//sys&recursive=true&attributes=["weight"]``.

    A text that begins like YSON's maps, lists, attributes, literals or quoted strings is YSON; ``true``, ``false`` and
    integers are values; any other text is a literal string."""
    parameters: dict[str, Any] = {}
    query = request.scope["query_string"].decode("latin-1")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="surrogateescape", max_num_fields=MAX_QUERY_FIELDS)
    except ValueError:
        raise YtError(f"Error parsing request: more than {MAX_QUERY_FIELDS} parameters in the URL") from None
    for name, text in pairs:
        if name in parameters:
            raise YtError(f"Error parsing request: {quote_text(name)} is given twice in the URL")
        if text.startswith(("{", "[", "<", "%", '"')):
            try:
                parameters[name] = read_yson(text.encode("utf-8", "surrogateescape"), depth)
            except ParseError as error:
                raise error.located(f"{quote_text(name)} in the URL") from None
        elif text in ("true", "false"):
            parameters[name] = text == "true"
        else:
            parameters[name] = int(text) if _INTEGER.fullmatch(text) else text
    return parameters


def plain(value: Any) -> Any:
    """Return a value of the protocol without attributes, at any depth."""
    value = strip_attributes(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _wrong(request: YtRequest, name: str, what: str) -> YtError:
    return YtError(f'{request.command}: parameter "{name}" {what}')


def get_path(request: YtRequest, name: str = "path") -> YPath:
    """Parse a path. Like all functions here except ``get_flag``, it raises YtError for a missing or wrong parameter."""
    if name not in request.parameters:
        raise _wrong(request, name, "is missing")
    return parse_ypath(request.parameters[name])


def get_text(request: YtRequest, name: str, otherwise: str | None = None) -> str:
    value = strip_attributes(request.parameters.get(name))
    if value is None and otherwise is not None:
        return otherwise
    if not isinstance(value, str):
        raise _wrong(request, name, "is missing" if value is None else f"must be text, not {quote_text(value)}")
    return value


def get_flag(request: YtRequest, name: str) -> bool:
    return strip_attributes(request.parameters.get(name)) is True


def get_table(request: YtRequest, name: str) -> dict[str, Any]:
    value = plain(request.parameters.get(name, {}))
    if not isinstance(value, dict):
        raise _wrong(request, name, f"must be a map, not {quote_text(value)}")
    return value


def get_list(request: YtRequest, name: str) -> list[Any]:
    value = plain(request.parameters.get(name))
    if not isinstance(value, list):
        raise _wrong(request, name, f"must be a list, not {quote_text(value)}")
    return value


def get_names(request: YtRequest, name: str) -> list[str] | None:
    value = plain(request.parameters.get(name))
    if isinstance(value, dict) and isinstance(value.get("keys"), list):
        value = value["keys"]
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _wrong(request, name, "must be a list of names")
    names = list(dict.fromkeys(value))
    if len(names) > MAX_NAMES:
        what = f"has {len(names)} names, more than the limit of {MAX_NAMES}; ask for some at a time"
        raise _wrong(request, name, what)
    return names


def get_number(request: YtRequest, name: str, otherwise: int, most: int) -> int:
    value = plain(request.parameters.get(name))
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong(request, name, f"must be a whole number, not {quote_text(value)}")
    return min(value, most)


def get_milliseconds(request: YtRequest, name: str) -> float | None:
    value = plain(request.parameters.get(name))
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_MILLISECONDS:
        what = f"must be a number of milliseconds, 0 to {MAX_MILLISECONDS:.0e}, not {quote_text(value)}"
        raise _wrong(request, name, what)
    return float(value)


def get_time(request: YtRequest, name: str) -> float | None:
    """Return seconds since 1970; the parameter is an ISO time, or microseconds since 1970."""
    value = plain(request.parameters.get(name))
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return value / 1e6
    try:
        found = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise _wrong(request, name, f"must be a time like 2026-11-20T23:23:17Z, not {quote_text(value)}") from None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
