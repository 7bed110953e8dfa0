"""The formats of the ``yt`` protocol (yt_protocol.md 5): the parameter that names a format, and the protocol's JSON."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from cpumond.api.yt.values import (
    INT64_MAX,
    INT64_MIN,
    MAX_DEPTH,
    MAX_VALUES,
    UINT64_MAX,
    Attributed,
    FormatError,
    ParseError,
    Uint,
    check_attributed,
    check_key,
    check_written_depth,
    gather,
    is_unsigned,
    quote_text,
    strip_attributes,
    to_bytes,
)
from cpumond.api.yt.yson import read_yson, write_yson
from cpumond.core.decode import is_no_utf8

SPLIT_ITEMS = 32
MAX_SPLIT_DEPTH = 4
"""Down to this depth, maps and lists of more than SPLIT_ITEMS items are written as JSON in parts."""


@dataclass(frozen=True)
class Format:
    """A format of input or output. ``variant``: how YSON is written, and whether JSON is indented."""

    name: Literal["yson", "json"]
    variant: Literal["binary", "text", "pretty"] = "binary"
    encode_utf8: bool = True
    """JSON only: each byte of a string is written as a character, U+0000 to U+00FF (section 5)."""

    @property
    def content_type(self) -> str:
        return "application/json" if self.name == "json" else f"application/x-yt-yson-{self.variant}"


PRETTY = Format("yson", "pretty")
"""Format of responses if the request names none (section 4)."""
BINARY = Format("yson", "binary")
JSON = Format("json", "text")

MIME_FORMATS = {
    "application/json": JSON,
    "application/x-yt-yson-binary": BINARY,
    "application/x-yt-yson-text": Format("yson", "text"),
    "application/x-yt-yson-pretty": PRETTY,
}


def format_of(value: Any, where: str = "format") -> Format:
    """Return the format that a value like ``<format=pretty>"yson"`` or ``"json"`` names, ignoring unknown attributes.
    Raises FormatError for an unknown format, and for an unknown kind of a format."""
    attributes = value.attributes if isinstance(value, Attributed) else {}
    name = strip_attributes(value)
    if name != "yson" and name != "json":
        raise FormatError(f'{where}: unknown format {quote_text(name)}; use "yson" or "json"')
    variant = strip_attributes(attributes.get("format", "binary" if name == "yson" else "text"))
    allowed = ("binary", "text", "pretty") if name == "yson" else ("text", "pretty")
    if variant not in allowed:
        raise FormatError(f"{where}: unknown kind {quote_text(variant)} of {name}; use one of {', '.join(allowed)}")
    encode_utf8 = strip_attributes(attributes.get("encode_utf8", True))
    if not isinstance(encode_utf8, bool):
        raise FormatError(f"{where}: encode_utf8 must be %true or %false, not {quote_text(encode_utf8)}")
    return Format("yson" if name == "yson" else "json", variant, encode_utf8)


def parse_format(text: bytes, where: str = "format") -> Format:
    """Return the format that a header's text, in YSON or JSON, names. Raises ParseError or FormatError."""
    try:
        value = read_json(text) if text.lstrip().startswith(b"{") else read_yson(text)
    except ParseError as error:
        raise error.located(where) from None
    return format_of(value, where)


def read_value(data: bytes, form: Format, max_depth: int = MAX_DEPTH) -> Any:
    """Return the value in ``data``. YSON may mix text and binary, whatever ``form`` says. Raises ParseError."""
    if form.name == "json":
        return read_json(data, form.encode_utf8, max_depth)
    return read_yson(data, max_depth)


def write_value(value: Any, form: Format, give_way: Callable[[], object] | None = None) -> bytes:
    """Return ``value`` in the format ``form``. Raises FormatError for values that the format cannot express.

    ``give_way`` is called about every WRITTEN_BYTES, for threads that write large values."""
    if form.name == "json":
        return write_json(value, form.encode_utf8, pretty=form.variant == "pretty", give_way=give_way)
    return write_yson(value, form.variant, give_way)


_JSON_ITEM = re.compile(
    rb'[^",\[{]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"?+[^",\[{]*+)*+(?:[\[{]\s*+[\]}]|([,\[{]))?', re.DOTALL
)
"""One match ends with an empty list or map, or with a character that begins one more value (group 1). It includes all
text before, perhaps a million strings. A possessive group with alternatives fails in Python before 3.11.5."""
_JSON_OFFSET = re.compile(r"(.*?) \(byte (\d+)\)$")


def read_json(data: bytes, encode_utf8: bool = True, max_depth: int = MAX_DEPTH) -> Any:
    """Return the only value in ``data``; ``{"$attributes": {...}, "$value": v}`` is a value with attributes.

    With ``encode_utf8`` each character is a byte, but a string with a character above U+00FF is taken literally. Raises
    ParseError, also for more than MAX_VALUES values."""
    if has_too_many_values(data):
        raise ParseError(f"JSON of more values than the limit of {MAX_VALUES}", None)
    try:
        tree = msgspec.json.decode(data)
    except RecursionError:
        raise ParseError(f"JSON nested deeper than the limit of {max_depth} levels", None) from None
    except (msgspec.DecodeError, ValueError) as error:
        if is_no_utf8(error):
            raise ParseError("JSON that is not UTF-8", _find_wrong_byte(data)) from None
        found = _JSON_OFFSET.match(str(error))
        reason, offset = (found[1], int(found[2])) if found is not None else (str(error), len(data))
        raise ParseError(f"JSON: {reason.removeprefix('JSON is malformed: ')}", offset) from None
    return from_json_tree(tree, encode_utf8, max_depth)


def _find_wrong_byte(data: bytes) -> int:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(data)


def has_too_many_values(data: bytes) -> bool:
    """Whether a text in JSON contains more than MAX_VALUES, without parsing it."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") < MAX_VALUES:
        return False
    # Some of these characters may be in strings, so count exactly. In valid JSON there is a separator before each empty
    # list or map, except before the first.
    items = itertools.islice(_JSON_ITEM.finditer(data), 2 * MAX_VALUES)
    return sum(found[1] is not None for found in items) >= MAX_VALUES


def from_json_tree(tree: Any, encode_utf8: bool = True, max_depth: int = MAX_DEPTH) -> Any:
    """Return the value in a JSON library's output; this is the inverse of ``to_json_tree``. Raises ParseError."""
    if isinstance(tree, str):
        return _decode_json_text(tree) if encode_utf8 else tree
    if isinstance(tree, (dict, list)) and max_depth <= 0:
        raise ParseError("JSON nested deeper than the limit of levels", None)
    if isinstance(tree, list):
        return [from_json_tree(item, encode_utf8, max_depth - 1) for item in tree]
    if isinstance(tree, dict):
        return _from_json_map(tree, encode_utf8, max_depth)
    if isinstance(tree, int) and not isinstance(tree, bool) and not INT64_MIN <= tree <= INT64_MAX:
        if not 0 < tree <= UINT64_MAX:
            raise ParseError("JSON: integer out of the range -2^63 to 2^64-1", None)
        return Uint(tree)
    return tree


def _from_json_map(tree: dict[str, Any], encode_utf8: bool, levels: int) -> Any:
    if "$value" in tree:
        if set(tree) - {"$value", "$attributes"}:
            raise ParseError('JSON: a map with "$value" must have no other key than "$attributes"', None)
        attributes = tree.get("$attributes", {})
        if not isinstance(attributes, dict) or "$value" in attributes:
            raise ParseError('JSON: "$attributes" must be a map', None)
        value = from_json_tree(tree["$value"], encode_utf8, levels - 1)
        if isinstance(value, Attributed):
            raise ParseError("JSON: attributes twice before one value", None)
        named = from_json_tree(attributes, encode_utf8, levels - 1)
        return Attributed(value, named) if named else value
    pairs = {}
    for key, item in tree.items():
        if key.startswith("$") and not key.startswith("$$"):
            raise ParseError(f'JSON: key {quote_text(key)}: a leading "$" must be doubled', None)
        name = key.removeprefix("$")
        pairs[_decode_json_text(name) if encode_utf8 else name] = from_json_tree(item, encode_utf8, levels - 1)
    return pairs


def _decode_json_text(text: str) -> str:
    if text.isascii():
        return text
    try:
        return text.encode("latin-1").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text


def write_json(
    value: Any, encode_utf8: bool = True, pretty: bool = False, give_way: Callable[[], object] | None = None
) -> bytes:
    """Write ``value`` as JSON. Raises FormatError for values that JSON lacks. For ``give_way`` see ``write_value``."""
    pieces: list[bytes] = []
    _put_json(value, encode_utf8, 0, gather(pieces, give_way))
    data = b"".join(pieces)
    return msgspec.json.format(data, indent=4) if pretty else data


def _put_json(value: Any, encode_utf8: bool, depth: int, put: Callable[[bytes], None]) -> None:
    """Encode large maps and lists item by item, because no other thread runs while the encoder runs."""
    if depth < MAX_SPLIT_DEPTH and isinstance(value, Mapping) and (depth < 2 or len(value) > SPLIT_ITEMS):
        before = b"{"
        for key, item in value.items():
            put(before + msgspec.json.encode(_encode_json_key(key, encode_utf8)) + b":")
            _put_json(item, encode_utf8, depth + 1, put)
            before = b","
        put(b"}" if value else b"{}")
    elif depth < MAX_SPLIT_DEPTH and isinstance(value, list) and len(value) > SPLIT_ITEMS:
        before = b"["
        for start in range(0, len(value), SPLIT_ITEMS):
            part = to_json_tree(value[start : start + SPLIT_ITEMS], encode_utf8, depth)
            put(before + msgspec.json.encode(part)[1:-1])
            before = b","
        put(b"]")
    else:
        put(msgspec.json.encode(to_json_tree(value, encode_utf8, depth)))


def to_json_tree(value: Any, encode_utf8: bool = True, depth: int = 0) -> Any:
    """Return ``value`` so that any JSON library can write it; nan, inf and -inf become strings. ``depth``: its nesting.

    Raises FormatError."""
    if isinstance(value, str):
        return _encode_json_text(value, encode_utf8)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        # JSON has no literals for nan and the infinities.
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, int):
        is_unsigned(value)
        return int(value)
    check_written_depth(depth)
    if isinstance(value, Attributed):
        check_attributed(value)
        plain = to_json_tree(value.value, encode_utf8, depth)
        if not value.attributes:
            return plain
        return {"$attributes": to_json_tree(value.attributes, encode_utf8, depth + 1), "$value": plain}
    if isinstance(value, Mapping):
        pairs = {}
        for key, item in value.items():
            pairs[_encode_json_key(key, encode_utf8)] = to_json_tree(item, encode_utf8, depth + 1)
        return pairs
    if isinstance(value, (list, tuple)):
        return [to_json_tree(item, encode_utf8, depth + 1) for item in value]
    if isinstance(value, bytes):
        return _encode_json_text(value.decode("utf-8", "surrogateescape"), encode_utf8)
    raise FormatError(f"a value of type {type(value).__name__} cannot be written as JSON")


def _encode_json_key(key: object, encode_utf8: bool) -> str:
    check_key(key)
    name = _encode_json_text(str(key), encode_utf8)
    return f"${name}" if name.startswith("$") else name


def _encode_json_text(text: str, encode_utf8: bool) -> str:
    if text.isascii():
        return str(text)
    if encode_utf8:
        return to_bytes(text).decode("latin-1")
    if any("\ud800" <= character < "\ue000" for character in text):
        raise FormatError(f"the string {quote_text(text)} is not UTF-8: it needs JSON with encode_utf8=%true, or YSON")
    return str(text)
