"""``key=value`` arguments as edits and attributes of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpumond.core.decode import ContentError, decode_json, decode_toml
from cpumond.core.errors import UsageError


def read_value(text: str) -> Any:
    """A value of the command line: JSON, else a value of TOML such as {cpu = 1}, else text; "" is None."""
    stripped = text.strip()
    if not stripped:
        return None
    try:
        return decode_json(stripped, object)
    except ContentError:
        pass
    if "\n" in stripped:
        return stripped
    try:
        return decode_toml(f"value = {stripped}")["value"]
    except ContentError:
        return stripped


def read_edits(assignments: Sequence[str], unset: Sequence[str] = ()) -> list[dict[str, Any]]:
    """``key=value`` arguments as edits of the API, and removals. Raises UsageError."""
    edits = []
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"expected key=value, for example weight=2, got {assignment!r}")
        edits.append(_edit(key, read_value(text)))
    edits += [_edit(key, None) for key in unset]
    if not edits:
        raise UsageError("nothing to change; give key=value, or --unset KEY")
    return edits


def _edit(key: str, value: Any) -> dict[str, Any]:
    # In a path with slashes dots are a part of names.
    path = key.strip().split("/" if "/" in key else ".")
    if not all(path):
        raise UsageError(
            f"{key}: expected the name of an attribute, or a path such as integral_guarantees/resource_flow"
        )
    return {"path": path, "value": value}


def read_attributes(assignments: Sequence[str]) -> dict[str, Any]:
    """``key=value`` arguments as attributes of something new, nested by their paths. Raises UsageError."""
    attributes: dict[str, Any] = {}
    for edit in read_edits(assignments) if assignments else ():
        target, path = attributes, edit["path"]
        for step in path[:-1]:
            target = target.setdefault(step, {})
            if not isinstance(target, dict):
                raise UsageError(f"{'/'.join(path)}: {step} has another value, too")
        if edit["value"] is not None:
            target[path[-1]] = edit["value"]
    return attributes
