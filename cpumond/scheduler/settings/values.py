"""Values of options: reads each type, and refuses invalid values (semantics.md 2.4, 2.5)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from msgspec import inspect

from cpumond.core.measures import parse_duration_s
from cpumond.core.words import nearest
from cpumond.fairshare.resources import RESOURCES
from cpumond.scheduler.model import CommandError

REMOVE: Final = None
"""As the value of an edit, or as a value inside of it: removes the attribute or key."""

MAX_AMOUNT: Final = 2.0**63
"""Maximum amount of a resource, as in the fair-share update."""

MAX_VALUE_BYTES: Final = 65_536
"""Maximum bytes of one attribute as JSON."""

MAX_DEPTH: Final = 32
"""Maximum number of levels of a value, or of a path inside of an attribute."""

FIELD: Final = "field"
"""Attribute of an error for clients that show a form: the refused option as a path of YTsaurus' names (weight,
integral_guarantees/resource_flow/cpu). Missing if the error concerns no single option."""

SHOWN: Final = 80
"""Maximum number of characters of a value or name that a message shows."""

WORDS: Final[Mapping[str, str]] = {"pending_allocation_count": "pending_job_count"}
"""Word that is also accepted as a value -> word used here."""

MAX_MILLISECONDS: Final = 1e15
"""Upper bound of all options that are times. It also distinguishes times from other numbers."""

TIME_WORDS: Final = 'milliseconds, or text with a unit such as "30s" or "1h",'

WHOLE_RESOURCES: Final = frozenset({"user_slots", "gpu", "memory", "network"})

Type = inspect.Type


def fields_of(struct: type[msgspec.Struct]) -> dict[str, Type]:
    """Return name of a field -> its type, in the form that ``normalise_value`` requires."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: field.type for field in info.fields}


def normalise_value(value: Any, kind: Type, where: str) -> Any:
    """Return ``value`` converted to the type of an option. Raises CommandError."""
    kind = _without_none(kind)
    members = members_of(kind)
    if members is not None:
        return _normalise_members(value, members, where)
    if isinstance(kind, inspect.FloatType):
        result: Any = to_milliseconds(value) if is_time(kind) else _to_float(value)
    elif isinstance(kind, inspect.IntType):
        result = _to_int(value)
    elif isinstance(kind, inspect.BoolType):
        result = value if isinstance(value, bool) else None
    elif isinstance(kind, inspect.LiteralType):
        result = _to_word(value, kind)
    elif isinstance(kind, inspect.VarTupleType):
        result = _to_words(value, kind, where)
    else:
        assert isinstance(kind, inspect.StrType)
        is_text = isinstance(value, str) and value.isprintable() and len(value) <= MAX_VALUE_BYTES
        result = str(value) if is_text else None
    if result is None or not _is_in_range(result, kind):
        raise refuse(where, f"must be {allowed_words(kind)}, got {format_value(value)}")
    return result


def to_milliseconds(value: object) -> float | int | None:
    """Return a duration in milliseconds from a number or text with units ("30s", "1h30m"); None for anything else.

    Text that consists of digits is no duration: in YTsaurus such text means seconds, but a number means milliseconds.
    """
    if not isinstance(value, str):
        number = _to_float(value)
    elif value.strip()[-1:].isalpha():
        try:
            number = _to_float(round(parse_duration_s(value) * 1000, 6))
        except ValueError:
            return None
    else:
        return None
    return None if number is None else _whole(number)


def is_time(kind: Type) -> bool:
    """Return whether an option of this type is a duration in milliseconds."""
    return isinstance(kind, inspect.FloatType) and kind.le == MAX_MILLISECONDS


def _normalise_members(value: Any, members: Mapping[str, Type], where: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    given: dict[str, str] = {}
    for raw, inner in items_of(value, where):
        key = known_key(raw, members, where)
        if key in given:
            raise refuse(f"{where}/{raw}", f'given twice, also as "{given[key]}"; keep one of them')
        given[key] = raw
        if inner is not REMOVE:
            amount = normalise_value(inner, members[key], f"{where}/{raw}")
            result[key] = _whole(amount) if key in WHOLE_RESOURCES else amount
    return result


class AnyNames(dict[str, Type]):
    """Keys of a dictionary in which users choose the names: contains any key, each with the type at the key ``""``."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> Type:
        return self[""]


def fold_key(raw: str, members: Mapping[str, Type]) -> str:
    """Return a key in the spelling of options. Names that users choose are returned unchanged."""
    return raw if isinstance(members, AnyNames) else raw.replace("-", "_")


def known_key(raw: str, members: Mapping[str, Type], where: str) -> str:
    key = fold_key(raw, members)
    if key not in members:
        near = quote_near(key, members)
        hint = f"did you mean {near}?" if near else f"known keys: {', '.join(sorted(members))}"
        raise refuse(f"{where}/{raw}", f"unknown key; {hint}")
    return key


def items_of(value: Any, where: str) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        raise refuse(where, f"must be a dictionary, got {format_value(value)}")
    for key in value:
        if not isinstance(key, str):
            raise refuse(where, f"the keys of a dictionary must be text, got {format_value(key)}")
    return value.items()


def _whole(value: Any) -> Any:
    """Return a float that is a whole number as an int: milliseconds and slots are then shown as they were given."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _to_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def _to_int(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if isinstance(value, int) or value.is_integer() else None


def _to_word(value: Any, kind: inspect.LiteralType) -> str | None:
    if not isinstance(value, str):
        return None
    word = value.replace("-", "_")
    word = WORDS.get(word, word)
    return word if word in kind.values else None


def _to_words(value: Any, kind: inspect.VarTupleType, where: str) -> list[str] | None:
    if not isinstance(value, (list, tuple)) or len(value) < (kind.min_length or 0):
        return None
    if not isinstance(kind.item_type, inspect.LiteralType):
        return list(value) if all(isinstance(item, str) for item in value) else None
    words = [word for item in value if (word := _to_word(item, kind.item_type)) is not None]
    if len(words) < len(value):
        return None
    if len(set(words)) < len(words):
        raise refuse(where, f"contains one of its values twice, got {format_value(value)}")
    return words


def _is_in_range(value: Any, kind: Type) -> bool:
    if not isinstance(kind, (inspect.FloatType, inspect.IntType)):
        return True
    if (kind.ge is not None and value < kind.ge) or (kind.gt is not None and value <= kind.gt):
        return False
    return bool(value <= (MAX_AMOUNT if kind.le is None else min(kind.le, MAX_AMOUNT)))


def copy_plain(value: Any, where: str, depth: int) -> Any:
    """Return a copy of any nested value in the built-in types of JSON, without None inside of it."""
    if depth < 0:
        raise refuse(where, f"has more than {MAX_DEPTH} levels")
    if isinstance(value, bool):
        return bool(value)
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (list, tuple)):
        inner = ((n, each) for n, each in enumerate(value) if each is not REMOVE)
        return [copy_plain(each, f"{where}/{n}", depth - 1) for n, each in inner]
    if isinstance(value, Mapping):
        items = items_of(value, cut(where))
        return {str(key): copy_plain(item, f"{where}/{key}", depth - 1) for key, item in items if item is not REMOVE}
    raise refuse(
        where,
        "must be a text, a finite number of at most 64 bits, true or false, a list or a dictionary, got "
        + format_value(value),
    )


def _without_none(kind: Type) -> Type:
    if isinstance(kind, inspect.UnionType):
        return next(member for member in kind.types if not isinstance(member, inspect.NoneType))
    return kind


def members_of(kind: Type) -> Mapping[str, Type] | None:
    """Return the keys that a value of this type may have, with their types; None if it is no dictionary."""
    kind = _without_none(kind)
    if isinstance(kind, inspect.StructType):
        return {field.encode_name: field.type for field in kind.fields}
    if isinstance(kind, inspect.DictType) and isinstance(kind.value_type, inspect.StructType):
        return AnyNames({"": kind.value_type})
    return dict.fromkeys(RESOURCES, kind.value_type) if isinstance(kind, inspect.DictType) else None


def is_list(kind: Type) -> bool:
    return isinstance(_without_none(kind), inspect.VarTupleType)


def allowed_words(kind: Type) -> str:
    """Return in words what values a type accepts, with the range."""
    kind = _without_none(kind)
    if isinstance(kind, (inspect.FloatType, inspect.IntType)):
        if is_time(kind):
            return f"{TIME_WORDS} {_range_text(kind)}"
        word = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
        return f"{word} {_range_text(kind)}"
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.LiteralType):
        return "one of " + ", ".join(f'"{word}"' for word in sorted(map(str, kind.values)))
    if isinstance(kind, inspect.VarTupleType):
        return f"a list{', not empty' * bool(kind.min_length)}, each of it {allowed_words(kind.item_type)}"
    return "a printable text"


def _range_text(kind: inspect.FloatType | inspect.IntType) -> str:
    low = kind.ge if kind.ge is not None else kind.gt
    assert low is not None
    assert kind.le is not None
    high = min(kind.le, MAX_AMOUNT)
    shown_high = f"{high:g}" if high >= 1e15 else str(high).removesuffix(".0")
    return f"in {'[' if kind.ge is not None else '('}{low:g}, {shown_high}]"


def refuse(where: str, what: str) -> CommandError:
    """Return the error that refuses an option's value. Its attribute ``field`` names the option for clients."""
    return CommandError(f"{cut(where)}: {what}", attributes={FIELD: cut(where)})


def name_field(error: CommandError, field: str) -> CommandError:
    """Return the error with ``field`` as the option that it concerns."""
    return CommandError(str(error), error.code, {**error.attributes, FIELD: field}, error.inner)


def quote_near(name: str, known: Iterable[str]) -> str:
    """Return the most similar known name in quotes; "" if no name is similar."""
    near = nearest(name, known, 0.7)
    return f'"{near}"' if near else ""


def format_value(value: object) -> str:
    """Return a value for a message: text in quotes; true, false and null in lower case; at most SHOWN characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 64:
        return "an integer of more than 64 bits"
    if isinstance(value, str):
        return f'"{cut(value)}"'
    if isinstance(value, Mapping):
        return "a dictionary"
    if isinstance(value, (list, tuple)) and any(isinstance(item, (list, tuple, Mapping)) for item in value):
        return "a list"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(format_value(item) for item in value[:SHOWN])
        return f"[{cut(inside)}]"
    return cut(repr(value))


def format_setting(value: object) -> str:
    """Return a value as ``format_value`` does, but a nested value as the beginning of its JSON, and None as "unset"."""
    if value is None:
        return "unset"
    if isinstance(value, Mapping) or (isinstance(value, (list, tuple)) and format_value(value) == "a list"):
        return cut(msgspec.json.encode(value).decode())
    return format_value(value)


def cut(text: str) -> str:
    """Return a text for messages: unprintable characters are escaped, and it is truncated to SHOWN characters."""
    cut = text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
    return cut if cut.isprintable() else ascii(cut)[1:-1]
