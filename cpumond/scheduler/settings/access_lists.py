"""Reads and edits access lists that are attributes, and refuses invalid ones (semantics.md 12.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from cpumond.core.words import nearest
from cpumond.scheduler.rights.entries import EVERYONE, PERMISSIONS, AccessEntry
from cpumond.scheduler.settings.values import REMOVE, format_value, quote_near, refuse

MAX_ENTRIES: Final = 1000
MAX_SUBJECT_LENGTH: Final = 256
EXPECTED: Final = "{action=allow; subjects=[alice; ml]; permissions=[use]}"

ACTIONS: Final = ("allow", "deny")
MODES: Final = ("object_and_descendants", "object_only", "descendants_only")
_KEYS: Final = AccessEntry.__struct_fields__
_ENDS: Final = ("begin", "end")


def read_acl(value: Any, where: str, permissions: Sequence[str] = PERMISSIONS) -> list[dict[str, Any]]:
    """Check an access list, and return it in the form that is stored. Raises CommandError."""
    if not isinstance(value, (list, tuple)):
        raise refuse(where, f"must be a list of entries such as {EXPECTED}, got {format_value(value)}")
    if len(value) > MAX_ENTRIES:
        raise refuse(where, f"may have at most {MAX_ENTRIES} entries, got {len(value)}; name groups instead of users")
    return [_read_entry(entry, f"{where}/{number}", permissions) for number, entry in enumerate(value)]


def edit_acl(current: Sequence[Any], path: Sequence[str], value: Any, where: str) -> list[dict[str, Any]]:
    """Return the list after a change of one entry: ``end`` and ``begin`` add one; a number replaces or removes it."""
    inner = f"{where}/{path[0]}"
    entries = list(current)
    if len(path) > 1:
        raise refuse(inner, "an entry of an access list must be set as a whole")
    if path[0] in _ENDS and value is not REMOVE:
        entries.insert(len(entries) if path[0] == "end" else 0, value)
    elif path[0].removeprefix("-").isdecimal() and len(path[0]) < 10 and -len(entries) <= int(path[0]) < len(entries):
        entries[int(path[0]) : int(path[0]) + 1 or None] = [] if value is REMOVE else [value]
    else:
        raise refuse(inner, f"the list has {len(entries)} entries, counted from 0; `{where}/end` adds one")
    return read_acl(entries, where)


def _read_entry(value: Any, where: str, permissions: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise refuse(where, f"must be an entry such as {EXPECTED}, got {format_value(value)}")
    given: dict[str, Any] = {}
    for key, inner in value.items():
        name = str(key).replace("-", "_")
        if name not in _KEYS:
            near = quote_near(name, _KEYS)
            hint = f"did you mean {near}?" if near else f"known keys: {', '.join(_KEYS)}"
            raise refuse(f"{where}/{key}", f"unknown key; {hint}")
        given[name] = inner
    entry: dict[str, Any] = {
        "action": _read_word(given.get("action"), ACTIONS, f"{where}/action"),
        "subjects": [
            _read_subject(each, f"{where}/subjects") for each in _read_list(given, "subjects", where, EVERYONE)
        ],
        "permissions": [
            _read_word(each, permissions, f"{where}/permissions")
            for each in _read_list(given, "permissions", where, permissions[0])
        ],
    }
    mode = _read_word(given.get("inheritance_mode", MODES[0]), MODES, f"{where}/inheritance_mode")
    return entry if mode == MODES[0] else {**entry, "inheritance_mode": mode}


def _read_list(given: Mapping[str, Any], name: str, where: str, example: str) -> list[Any]:
    value = given.get(name)
    if not isinstance(value, (list, tuple)) or not value:
        what = "is missing" if value is None else f"must be a list, not empty, got {format_value(value)}"
        raise refuse(f"{where}/{name}", f"{what}; for example {name}=[{example}]")
    return list(value)


def _read_word(value: Any, known: Sequence[str], where: str) -> str:
    word = value.replace("-", "_") if isinstance(value, str) else ""
    if word in known:
        return word
    near = nearest(word, known)
    hint = f'did you mean "{near}"?' if near else f"known: {', '.join(known)}"
    raise refuse(where, f"{'is missing' if value is None else f'{format_value(value)} is unknown'}; {hint}")


def _read_subject(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value or not value.isprintable() or len(value) > MAX_SUBJECT_LENGTH:
        what = f"a subject is the name of a user or group, 1 to {MAX_SUBJECT_LENGTH} printable characters"
        raise refuse(where, f"{what}, got {format_value(value)}")
    return value
