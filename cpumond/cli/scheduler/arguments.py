"""``key=value`` arguments as edits and attributes of the API."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from cpumond.api.yt.formats import to_json_tree
from cpumond.api.yt.values import YtError
from cpumond.api.yt.yson import read_yson
from cpumond.core.decode import ContentError, decode_json, decode_toml
from cpumond.core.errors import UsageError
from cpumond.core.words import escape
from cpumond.scheduler.settings.attributes import Kind, find_shape

EXAMPLES: Final = {"a dictionary": '{cpu=2} or {"cpu": 2}', "a list": '[weight; start_time] or ["weight"]'}
"""Type of an option -> an example in YSON and one in JSON."""
_COMMA: Final = re.compile(r'("(?:[^"\\]|\\.)*")|,')


def read_value(text: str) -> Any:
    """Parse a value of the command line: JSON, else TOML like {cpu = 1}, else a dictionary or list in YSON, else text.

    "" is None. In YSON commas may replace semicolons."""
    stripped = text.strip()
    if not stripped:
        return None
    for read in _READERS:
        try:
            value = read(stripped)
            # JSON has no NaN and infinity; the API would get null, which removes the attribute.
            json.dumps(value, allow_nan=False, default=str)
        except (ContentError, YtError, ValueError):
            continue
        return value
    return stripped


def _read_toml(text: str) -> Any:
    if "\n" in text:
        raise ContentError("a value must be on one line")
    return decode_toml(f"value = {text}")["value"]


def _read_nested_yson(text: str) -> Any:
    if text[0] not in "{[":
        raise ContentError("no dictionary, no list")
    return read_yson_text(_COMMA.sub(lambda found: found[1] or ";", text))


def read_yson_text(text: str) -> Any:
    """Convert a value from YSON to JSON. Raises YtError."""
    return to_json_tree(read_yson(text.encode("utf-8", "surrogateescape")), encode_utf8=False)


_READERS: Final[tuple[Callable[[str], Any], ...]] = (
    lambda text: decode_json(text, object),
    _read_toml,
    _read_nested_yson,
)


def read_edits(assignments: Sequence[str], unset: Sequence[str] = (), kind: Kind | None = None) -> list[dict[str, Any]]:
    """Return ``key=value`` arguments and keys to ``unset`` as edits of the API, for a ``kind``. Raises UsageError."""
    edits = []
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"expected key=value, for example weight=2, got {assignment!r}")
        edits.append(_edit(key, read_value(text)))
        _check_shape(kind, **edits[-1])
    edits += [_edit(key, None) for key in unset]
    if not edits:
        raise UsageError("nothing to change; give key=value, or --unset KEY")
    return edits


def _check_shape(kind: Kind | None, path: Sequence[str], value: Any) -> None:
    """Refuse a text if an option takes a dictionary or list."""
    shape = find_shape(kind, path) if kind is not None and isinstance(value, str) else None
    if shape is not None:
        where = escape("/".join(path))
        expected = f"expected {shape} in YSON or JSON, for example {EXAMPLES[shape]}"
        raise UsageError(f'{where}: {expected}, got "{escape(value)}"; put it in single quotes for the shell')


def _edit(key: str, value: Any) -> dict[str, Any]:
    # In a path with slashes dots are part of names.
    path = key.strip().split("/" if "/" in key else ".")
    if not all(path):
        raise UsageError(f"{key}: expected the name of an attribute, or a path like integral_guarantees/resource_flow")
    return {"path": path, "value": value}


def read_attributes(assignments: Sequence[str], kind: Kind | None = None) -> dict[str, Any]:
    """``key=value`` arguments as attributes of a new object, nested by their paths. Raises UsageError."""
    attributes: dict[str, Any] = {}
    for edit in read_edits(assignments, kind=kind) if assignments else ():
        target, path = attributes, edit["path"]
        for step in path[:-1]:
            target = target.setdefault(step, {})
            if not isinstance(target, dict):
                raise UsageError(f"{'/'.join(path)}: {step} has two values")
        if edit["value"] is not None:
            target[path[-1]] = edit["value"]
    return attributes
