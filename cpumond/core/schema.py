"""Check TOML tables against structs: normalise keys, convert durations to seconds, explain errors in sentences."""

from __future__ import annotations

import functools
import math
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import inspect

from cpumond.core.errors import ConfigError, Mistakes
from cpumond.core.measures import DURATION, format_duration, parse_duration_s
from cpumond.core.words import nearest

SPELLINGS: Final = {"votes_decision_threshold": "vote_decision_threshold", "job_cpu_monitor": "job_cpu_monitor"}
"""Other accepted names of options -> the name used here; hyphens have already become underscores."""

ABOVE: Final = "above the first [table]"
"""Where keys outside of any table belong."""

Shape = type[msgspec.Struct]
"""A struct that describes a table."""

MAX_QUOTED: Final = 200
"""Maximum number of characters of a value quoted in an error message."""


def normalise_table(
    raw: object, struct: Shape, file: str, path: str, hidden: frozenset[str] = frozenset(), whole: Shape | None = None
) -> dict[str, Any]:
    """Return ``raw`` with normalised keys and durations in seconds, each value checked against the field of ``struct``.

    ``whole`` is the struct that describes the whole file (default: ``struct``). The error about an unknown key names
    the table of ``whole`` where the key belongs, or the nearest known name. The error about a wrong value names file,
    key and allowed range. Raises ConfigError with one sentence for each wrong key."""
    whole = whole or struct
    prefix = f"{file}: {path}." if path else f"{file}: "
    if not isinstance(raw, dict):
        raise ConfigError(f"{prefix.rstrip('.: ')}: must be a table, got {_kind_of(raw)}")
    fields = {name: field for name, field in _list_fields(struct).items() if name not in hidden}
    table: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    with Mistakes() as mistakes:
        for key, value in raw.items():
            name = str(key).replace("-", "_")
            name = SPELLINGS.get(name, name)
            with mistakes.apart():
                if name not in fields:
                    homes = [] if name in hidden else _find_homes(whole, name)
                    if homes:
                        where = ABOVE if homes == [ABOVE] else f"into {' or '.join(homes)}"
                        raise ConfigError(f"{prefix}{key}: unknown here; {key} belongs {where}")
                    near = nearest(name[:MAX_QUOTED], fields, cutoff=0.5)
                    hint = f"did you mean {near!r}?" if near else f"known keys: {', '.join(sorted(fields))}"
                    raise ConfigError(f"{prefix}{key}: unknown key; {hint}")
                if name in spelled:
                    raise ConfigError(f"{prefix}{key}: given twice, also as {spelled[name]!r}; keep one of them")
                spelled[name] = key
                table[name] = _normalise_value(value, fields[name], file, f"{path}.{key}" if path else str(key), whole)
        missing = [name for name, field in fields.items() if field.is_required and name not in spelled]
        if missing:
            raise ConfigError(f"{prefix.rstrip('. ')}: {missing[0]!r} is missing; it has no default")
    return table


@functools.cache
def _find_homes(struct: Shape, name: str, path: str = "") -> list[str]:
    """Return the tables where a key belongs in a file that ``struct`` describes; only those of the least depth."""
    fields = _list_fields(struct)
    if name in fields:
        return [path or ABOVE]
    deeper: list[str] = []
    for key, field in fields.items():
        kind = field.kind
        inner = kind.type if isinstance(kind, inspect.Metadata) else kind
        place = f"{path.strip('[]')}.{key}" if path else key
        if isinstance(inner, inspect.StructType):
            deeper += _find_homes(inner.cls, name, f"[{place}]")
        elif isinstance(inner, inspect.ListType) and isinstance(inner.item_type, inspect.StructType):
            deeper += _find_homes(inner.item_type.cls, name, f"[[{place}]]")
        elif isinstance(inner, inspect.DictType) and isinstance(inner.value_type, inspect.StructType):
            deeper += _find_homes(inner.value_type.cls, name, f"[{place}.NAME]")
        elif isinstance(kind, inspect.Metadata) and (kind.extra or {}).get("table"):
            deeper += _find_homes(kind.extra["table"], name, f"[{place}]")  # type: ignore[index]  # is there
    least = min((home.replace(".NAME", "").count(".") for home in deeper), default=0)
    return [home for home in deeper if home.replace(".NAME", "").count(".") == least]


class _Field(NamedTuple):
    annotation: Any
    kind: inspect.Type
    is_required: bool


@functools.cache
def _list_fields(struct: Shape) -> dict[str, _Field]:
    """Return the fields of a struct, keyed by their names in files."""
    fields = msgspec.structs.fields(struct)
    return {each.encode_name: _Field(each.type, inspect.type_info(each.type), each.required) for each in fields}


def _normalise_value(value: Any, field: _Field, file: str, path: str, whole: Shape) -> Any:
    kind = field.kind
    inner = kind.type if isinstance(kind, inspect.Metadata) else kind
    if isinstance(inner, inspect.StructType):
        return normalise_table(value, inner.cls, file, path, whole=whole)
    if isinstance(inner, inspect.ListType) and isinstance(inner.item_type, inspect.StructType):
        if not isinstance(value, list):
            raise ConfigError(f"{file}: {path}: must be a list of tables ([[{path}]]), got {_kind_of(value)}")
        cls = inner.item_type.cls
        with Mistakes() as mistakes:
            items = []
            for number, item in enumerate(value, 1):
                with mistakes.apart():
                    items.append(normalise_table(item, cls, file, f"{path} {number}", whole=whole))
        return items
    if isinstance(inner, inspect.DictType):
        shape = (kind.extra or {}).get("table") if isinstance(kind, inspect.Metadata) else None
        return _normalise_dict(value, inner, shape, file, path, whole)
    texts = value if isinstance(value, list) else [value]
    if any(isinstance(text, str) and not text.isprintable() for text in texts):
        raise ConfigError(f"{file}: {path}: must be printable text without control characters, got {value!r}")
    if isinstance(value, str):
        spellings = (value.replace("_", "-"), value.replace("-", "_"))
        value = next((word for word in spellings if word in _literals(inner)), value)
    if isinstance(kind, inspect.Metadata) and kind.extra == DURATION:
        try:
            value = parse_duration_s(value)
        except ValueError as error:
            raise ConfigError(f"{file}: {path}: {error}; allowed: {describe_type(kind)}") from None
    try:
        converted = msgspec.convert(value, field.annotation)
    except msgspec.ValidationError:
        near = nearest(str(value)[:MAX_QUOTED], _literals(inner), cutoff=0.5)
        hint = f'; did you mean "{near}"?' if near else ""
        raise ConfigError(f"{file}: {path}: must be {describe_type(kind)}, got {_format(value, kind)}{hint}") from None
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ConfigError(f"{file}: {path}: must be finite, {describe_type(kind)}, got {converted}")
    return converted


def _normalise_dict(
    value: Any, kind: inspect.DictType, shape: Shape | None, file: str, path: str, whole: Shape
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: {path}: must be a table, got {_kind_of(value)}")
    if isinstance(kind.value_type, inspect.StructType):
        cls = kind.value_type.cls
        with Mistakes() as mistakes:
            table = {}
            for key, item in value.items():
                with mistakes.apart():
                    table[key] = normalise_table(item, cls, file, f"{path}.{key}", whole=whole)
        return table
    return value if shape is None else normalise_table(value, shape, file, path, whole=whole)


def _literals(kind: inspect.Type) -> tuple[str, ...]:
    """Return the words that a field accepts, in no particular order; empty for other kinds."""
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return tuple(str(v) for m in members if isinstance(m, inspect.LiteralType) for v in m.values)


def describe_type(kind: inspect.Type) -> str:
    """Describe a field's values and range in words: "a number in [0, 1]"."""
    duration = isinstance(kind, inspect.Metadata) and kind.extra == DURATION
    inner = kind.type if isinstance(kind, inspect.Metadata) else kind
    if isinstance(inner, inspect.UnionType):
        members = [member for member in inner.types if not isinstance(member, inspect.NoneType)]
        marked = [inspect.Metadata(member, extra=DURATION) if duration else member for member in members]
        return " or ".join(map(describe_type, marked))
    if isinstance(inner, inspect.LiteralType):
        return "one of " + ", ".join(f'"{value}"' for value in sorted(map(str, inner.values)))
    if isinstance(inner, (inspect.FloatType, inspect.IntType)):
        word = "a duration" if duration else "a whole number" if isinstance(inner, inspect.IntType) else "a number"
        return f"{word} {_range_text(inner, duration)}"
    if isinstance(inner, inspect.BoolType):
        return "true or false"
    if isinstance(inner, inspect.StrType):
        most = f" of at most {inner.max_length} characters" if inner.max_length else ""
        return ("a text that is not empty" if inner.min_length else "a text") + most
    return "a list of texts"


def _range_text(kind: Any, duration: bool) -> str:
    def format_bound(bound: float) -> str:
        return format_duration(bound) if duration else f"{bound:g}"

    low = kind.ge if kind.ge is not None else kind.gt
    high = kind.le if kind.le is not None else kind.lt
    if high is None:
        return f"{'>=' if kind.ge is not None else '>'} {format_bound(low)}" if low is not None else ""
    first, last = "[" if kind.ge is not None else "(", "]" if kind.le is not None else ")"
    return f"in {first}{format_bound(low)}, {format_bound(high)}{last}"


def _format(value: Any, kind: inspect.Type) -> str:
    if isinstance(kind, inspect.Metadata) and kind.extra == DURATION and isinstance(value, float):
        return format_duration(value)
    return _quote(value) if isinstance(value, (str, bool, int, float)) else _kind_of(value)


def _kind_of(value: object) -> str:
    names = {dict: "a table", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    kind = names.get(type(value), type(value).__name__)
    return kind if isinstance(value, dict) else f"{kind} ({_quote(value)})"


def _quote(value: object) -> str:
    """Format a value for a sentence. Numbers of thousands of digits and deep lists become "..."."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "..."
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."
