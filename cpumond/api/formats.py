"""YSON and JSON of the ``yt`` protocol (yt_protocol.md 5): readers, writers, and the parameter that names a format.

The values are plain Python: ``None``, ``bool``, ``int`` (``Uint`` for YSON's uint64), ``float``, ``str``, ``list``,
``dict`` with keys of ``str``, and ``Attributed`` for a value with attributes. Strings of the protocol are bytes; those
that are not UTF-8 are kept by ``surrogateescape`` and are written back unchanged.

Why the YSON is not ``yt.yson`` of ytsaurus-client 0.13.55, measured with 1000 pools of 40 attributes (1 MB):

- its Python reader takes 650-900 ms/MB of these (this one 110-200, of small values more: see ``read_yson``), ends in
  RecursionError at some 300 levels, takes a binary string of negative length for an empty one, and unescapes with
  Python's ``unicode_escape``: a UnicodeDecodeError without a position for ``"\\xZZ"``, a DeprecationWarning for
  ``"\\400"``;
- its Python writer takes 130-250 ms/MB (this one 40-80), and writes ``5.0`` and an empty map on two lines, where
  YTsaurus prints ``5.`` and ``{}``;
- the binding of the C++ library does all that right at 15-25 ms/MB, and exists for x86_64 only.

The tests hold this module against the library, and against the binding where it is installed.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

T = TypeVar("T", str, bytes)

MAX_DEPTH = 64
"""Maps, lists and attributes inside each other that a reader takes unless it is told otherwise."""
MAX_WRITTEN_DEPTH = 256
"""The same for the writers; no tree that is served is near it."""
MAX_NUMBER_CHARS = 400
MAX_VALUES = 20_000
"""What one text may hold, maps and lists and what is in them: reading, checking and storing them takes time and memory
by the value, not by the byte."""

GENERIC = 1
INT64_MIN, INT64_MAX, UINT64_MAX = -(2**63), 2**63 - 1, 2**64 - 1

WRITTEN_BYTES = 4096
"""Written in some 0.2 ms."""
SPLIT_ITEMS = 32
MAX_SPLIT_DEPTH = 4
"""Maps and lists of more items are written as JSON in parts, down to this level."""


class YtError(Exception):
    """An error in the form of the protocol (section 7): what is raised to be the client's answer.

    ``code`` is YTsaurus' code of the error, not an HTTP status; ``attributes`` hold plain values; ``inner`` are the
    reasons, which the client shows indented.
    """

    def __init__(
        self,
        message: str,
        code: int = GENERIC,
        attributes: Mapping[str, Any] | None = None,
        inner: Sequence[YtError] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.attributes: dict[str, Any] = dict(attributes or {})
        self.inner: list[YtError] = list(inner)

    def to_value(self) -> dict[str, Any]:
        """The error as a value: ``{code; message; attributes; inner_errors}``."""
        return {
            "code": self.code,
            "message": self.message,
            "attributes": self.attributes,
            "inner_errors": [error.to_value() for error in self.inner],
        }

    @staticmethod
    def from_value(value: Mapping[str, Any]) -> YtError:
        """The other way of ``to_value``; nothing of the first error's traceback is kept."""
        inner = [YtError.from_value(error) for error in value["inner_errors"]]
        return YtError(value["message"], value["code"], value["attributes"], inner)


class ParseError(YtError):
    """What arrived cannot be read. ``offset`` counts bytes from 0; None when only the reason is known."""

    def __init__(self, reason: str, offset: int | None, where: str = "") -> None:
        place = f"{where}: " if where else ""
        at = "" if offset is None else f" at offset {offset}"
        super().__init__(
            f"Error parsing request: {place}{reason}{at}", attributes={} if offset is None else {"offset": offset}
        )
        self.reason = reason
        self.offset = offset

    def located(self, where: str) -> ParseError:
        """The same error with the part of the request that it is about."""
        return ParseError(self.reason, self.offset, where)


class FormatError(YtError):
    """A format that is not offered, or a value that it cannot express."""


class Attributed(NamedTuple):
    """A value with YSON attributes; the value itself is never Attributed."""

    value: Any
    attributes: dict[str, Any]


class Uint(int):
    """An integer that is written as uint64, ``5u``."""

    __slots__ = ()


def strip_attributes(value: Any) -> Any:
    """The value without attributes of its own (those of its items stay)."""
    return value.value if isinstance(value, Attributed) else value


# --- the parameter that names a format -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A format of input or output. ``variant`` says how YSON is written, and whether JSON is indented."""

    name: Literal["yson", "json"]
    variant: Literal["binary", "text", "pretty"] = "binary"
    encode_utf8: bool = True
    """JSON only: strings are bytes written as the code points 0-255 (section 5)."""

    @property
    def content_type(self) -> str:
        """The MIME type for ``Content-Type``."""
        return "application/json" if self.name == "json" else f"application/x-yt-yson-{self.variant}"


PRETTY = Format("yson", "pretty")
"""What is answered when nobody asks for a format (section 4)."""
BINARY = Format("yson", "binary")
JSON = Format("json", "text")

MIME_FORMATS = {
    "application/json": JSON,
    "application/x-yt-yson-binary": BINARY,
    "application/x-yt-yson-text": Format("yson", "text"),
    "application/x-yt-yson-pretty": PRETTY,
}


def format_of(value: Any, where: str = "format") -> Format:
    """The format that a value such as ``<format=pretty>"yson"`` or ``"json"`` names; unknown attributes are ignored.

    Raises FormatError for another format, and for another kind of YSON.
    """
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
        raise FormatError(f"{where}: encode_utf8 is %true or %false, not {quote_text(encode_utf8)}")
    return Format("yson" if name == "yson" else "json", variant, encode_utf8)


def parse_format(text: bytes, where: str = "format") -> Format:
    """The format that the text of a header names, as YSON or as JSON. Raises ParseError or FormatError."""
    try:
        value = read_json(text) if text.lstrip().startswith(b"{") else read_yson(text)
    except ParseError as error:
        raise error.located(where) from None
    return format_of(value, where)


def quote_text(value: object) -> str:
    """A value as a short text in quotes, for messages."""
    text = value if isinstance(value, str) else repr(value)
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return '"' + shown.encode("utf-8", "backslashreplace").decode() + '"'


def read_value(data: bytes, form: Format, max_depth: int = MAX_DEPTH) -> Any:
    """The value in ``data``. YSON may be text and binary mixed, whatever the format says. Raises ParseError."""
    if form.name == "json":
        return read_json(data, form.encode_utf8, max_depth)
    return read_yson(data, max_depth)


def write_value(value: Any, form: Format, give_way: Callable[[], object] | None = None) -> bytes:
    """``value`` in the format. Raises FormatError for what the format cannot express.

    ``give_way`` is called after each WRITTEN_BYTES or so: for the thread that writes what may be large.
    """
    if form.name == "json":
        return write_json(value, form.encode_utf8, pretty=form.variant == "pretty", give_way=give_way)
    return write_yson(value, form.variant, give_way)


def _gather(pieces: list[T], give_way: Callable[[], object] | None) -> Callable[[T], None]:
    """What adds a piece of a text that is being written."""
    if give_way is None:
        return pieces.append
    left = WRITTEN_BYTES

    def put(piece: T) -> None:
        nonlocal left
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            left = WRITTEN_BYTES
            give_way()

    return put


# --- YSON ------------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    rb"""[ \t\n\r\f\v]*+(?:
        ([\x01-\x06{}\[\]<>;=\#])           # 1: punctuation, entity, markers of binary values
      | "((?:[^"\\]++|\\.)*+)"              # 2: a quoted string
      | ([A-Za-z_][A-Za-z0-9_.\-]*+)        # 3: a bare string
      | ([+-]?[0-9][0-9.eEu+\-]*+)          # 4: a number
      | %(true|false|nan|inf|\+inf|-inf)    # 5: a literal
    )""",
    re.VERBOSE | re.DOTALL,
)
_SPACE = re.compile(rb"[ \t\n\r\f\v]*+")
_ESCAPE = re.compile(rb"\\(?:x([0-9A-Fa-f]{1,2})|([0-3][0-7]{0,2}|[4-7][0-7]?)|u([0-9A-Fa-f]{4})|(.))", re.DOTALL)
_SIMPLE_ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}
_LITERALS = {b"true": True, b"false": False, b"nan": math.nan, b"inf": math.inf, b"+inf": math.inf, b"-inf": -math.inf}
_DOUBLE = struct.Struct("<d")
_CLOSING = {0x7B: 0x7D, 0x5B: 0x5D, 0x3C: 0x3E}


def read_yson(data: bytes, max_depth: int = MAX_DEPTH) -> Any:
    """The one value in YSON, text and binary mixed. A key given twice has its last value.

    Takes 2 to 6 us for each value, and up to 0.3 s for a MB of escapes: what may be long is read in a thread. Raises
    ParseError for anything else, for values nested deeper than ``max_depth``, and for more of them than MAX_VALUES.
    """
    value, position = _YsonReader(data, max_depth).read(0, 0)
    end = _SPACE.match(data, position)
    assert end is not None
    if end.end() != len(data):
        raise ParseError(f"unexpected {_show_byte(data[end.end()])} after the value", end.end())
    return value


class _YsonReader:
    __slots__ = ("_data", "_left", "_max_depth")

    def __init__(self, data: bytes, max_depth: int) -> None:
        self._data = data
        self._max_depth = max_depth
        self._left = MAX_VALUES

    def read(self, position: int, depth: int, attributed: bool = False) -> tuple[Any, int]:
        """The value at ``position``, inside ``depth`` others, and where it ends."""
        found = _TOKEN.match(self._data, position)
        if found is None:
            raise self._unexpected(position, "a value")
        self._left -= 1
        if self._left < 0:
            raise ParseError(f"more values than the limit of {MAX_VALUES}", position)
        kind = found.lastindex
        if kind == 1:
            byte = self._data[found.start(1)]
            if byte == 0x01:
                return self._read_binary_string(found.end())
            if byte in (0x7B, 0x5B, 0x3C):
                if depth >= self._max_depth:
                    raise ParseError(f"nested deeper than the limit of {self._max_depth} levels", found.start(1))
                if byte == 0x5B:
                    return self._read_list(found.end(), depth + 1)
                if byte == 0x7B:
                    return self._read_pairs(found.end(), depth + 1, byte)
                if attributed:
                    raise ParseError("attributes twice before one value", found.start(1))
                attributes, position = self._read_pairs(found.end(), depth + 1, byte)
                value, position = self.read(position, depth, attributed=True)
                return Attributed(value, attributes) if attributes else value, position
            return self._read_simple(byte, found.start(1))
        if kind == 4:
            return self._read_number(found[4], found.start(4)), found.end()
        if kind == 5:
            return _LITERALS[found[5]], found.end()
        return self._read_text(found), found.end()

    def _read_text(self, found: re.Match[bytes]) -> str:
        """A string that is not a binary one."""
        text: bytes = found[3] if found.lastindex == 3 else found[2]
        if found.lastindex == 2 and b"\\" in text:
            start = found.start(2)
            text = _ESCAPE.sub(lambda escape: self._unescape(escape, start), text)
        return text.decode("utf-8", "surrogateescape")

    def _unescape(self, escape: re.Match[bytes], start: int) -> bytes:
        if escape[1]:
            return bytes((int(escape[1], 16),))
        if escape[2]:
            return bytes((int(escape[2], 8),))
        if escape[3]:
            code = int(escape[3], 16)
            if 0xD800 <= code < 0xE000:
                raise ParseError("half of a surrogate pair as a character", start + escape.start())
            return chr(code).encode()
        character: bytes = escape[4]
        if character in b"xuU":
            raise ParseError(f"broken escape \\{character.decode()} in a string", start + escape.start())
        return _SIMPLE_ESCAPES.get(character, character)

    def _read_number(self, text: bytes, start: int) -> int | float:
        shown = quote_text(text[:40].decode())
        if len(text) > MAX_NUMBER_CHARS:
            raise ParseError(f"number {shown} of more than {MAX_NUMBER_CHARS} characters", start)
        try:
            if text.endswith(b"u"):
                unsigned = int(text[:-1])
                if not 0 <= unsigned <= UINT64_MAX:
                    raise ParseError(f"uint64 {shown} out of range", start)
                return Uint(unsigned)
            if b"." in text or b"e" in text or b"E" in text:
                double = float(text)
                if math.isinf(double):
                    raise ParseError(f"double {shown} out of range", start)
                return double
            signed = int(text)
        except ValueError:
            raise ParseError(f"broken number {shown}", start) from None
        if not INT64_MIN <= signed <= INT64_MAX:
            raise ParseError(f"int64 {shown} out of range", start)
        return signed

    def _read_simple(self, byte: int, start: int) -> tuple[Any, int]:
        """A value that begins with one byte and is no container and no string."""
        position = start + 1
        if byte == 0x02:
            number, position = self._read_varint(position)
            return (number >> 1) ^ -(number & 1), position
        if byte == 0x03:
            if len(self._data) - position < _DOUBLE.size:
                raise ParseError("the end inside a binary double", len(self._data))
            return _DOUBLE.unpack_from(self._data, position)[0], position + _DOUBLE.size
        if byte in (0x04, 0x05):
            return byte == 0x05, position
        if byte == 0x06:
            number, position = self._read_varint(position)
            return Uint(number), position
        if byte == 0x23:
            return None, position
        raise self._unexpected(start, "a value")

    def _read_varint(self, position: int) -> tuple[int, int]:
        start, number, shift = position, 0, 0
        while position < len(self._data):
            byte = self._data[position]
            position += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                if number > UINT64_MAX:
                    break
                return number, position
            shift += 7
            if shift > 63:
                break
        else:
            raise ParseError("the end inside a binary integer", position)
        raise ParseError("binary integer of more than 64 bits", start)

    def _read_binary_string(self, position: int) -> tuple[str, int]:
        number, begin = self._read_varint(position)
        if number & 1 or number >> 1 > 2**31:
            raise ParseError("binary string of a negative or impossible length", position)
        end = begin + (number >> 1)
        if end > len(self._data):
            raise ParseError(f"the end inside a binary string of {number >> 1} bytes", len(self._data))
        return self._data[begin:end].decode("utf-8", "surrogateescape"), end

    def _read_list(self, position: int, depth: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        while True:
            found = _TOKEN.match(self._data, position)
            if found is not None and found[1] == b"]":
                return items, found.end()
            item, position = self.read(position, depth)
            items.append(item)
            position, ended = self._read_separator(position, 0x5D)
            if ended:
                return items, position

    def _read_pairs(self, position: int, depth: int, opening: int) -> tuple[dict[str, Any], int]:
        """A map, or the attributes before a value."""
        closing = _CLOSING[opening]
        pairs: dict[str, Any] = {}
        while True:
            found = _TOKEN.match(self._data, position)
            if found is None or found.lastindex not in (1, 2, 3):
                raise self._unexpected(position, f'a key or "{chr(closing)}"')
            if found.lastindex == 1:
                byte = self._data[found.start(1)]
                if byte == closing:
                    return pairs, found.end()
                if byte != 0x01:
                    raise self._unexpected(position, f'a key or "{chr(closing)}"')
                key, position = self._read_binary_string(found.end())
            else:
                key, position = self._read_text(found), found.end()
            found = _TOKEN.match(self._data, position)
            if found is None or found[1] != b"=":
                raise self._unexpected(position, '"="')
            pairs[key], position = self.read(found.end(), depth)
            position, ended = self._read_separator(position, closing)
            if ended:
                return pairs, position

    def _read_separator(self, position: int, closing: int) -> tuple[int, bool]:
        """Past a semicolon, or past the end of the container."""
        found = _TOKEN.match(self._data, position)
        if found is not None and found.lastindex == 1:
            byte = self._data[found.start(1)]
            if byte == 0x3B:
                return found.end(), False
            if byte == closing:
                return found.end(), True
        raise self._unexpected(position, f'";" or "{chr(closing)}"')

    def _unexpected(self, position: int, expected: str) -> ParseError:
        space = _SPACE.match(self._data, position)
        assert space is not None
        at = space.end()
        if at == len(self._data):
            return ParseError(f"expected {expected}, but the text ends", at)
        if self._data[at] == 0x22 and _TOKEN.match(self._data, at) is None:
            return ParseError("a string without its closing quote", at)
        return ParseError(f"expected {expected}, not {_show_byte(self._data[at])}", at)


def _show_byte(byte: int) -> str:
    return f'"{chr(byte)}"' if 0x20 < byte < 0x7F else f"byte 0x{byte:02X}"


_UNSAFE = re.compile(rb'[^\x20-\x7e]|["\\]')
_ESCAPED = {byte: f"\\x{byte:02X}" for byte in range(256)} | {9: "\\t", 10: "\\n", 13: "\\r", 34: '\\"', 92: "\\\\"}
_FALSE_TRUE = (b"\x04", b"\x05")


def write_yson(
    value: Any,
    variant: Literal["binary", "text", "pretty"] = "text",
    give_way: Callable[[], object] | None = None,
) -> bytes:
    """``value`` as YSON. ``pretty`` is indented by 4 spaces, with every item on a line of its own (section 5).

    An integer above int64's range is written as uint64. Raises FormatError for what YSON cannot express. ``give_way``
    as in ``write_value``.
    """
    if variant == "binary":
        parts: list[bytes] = []
        _write_binary(value, _gather(parts, give_way), 0)
        return b"".join(parts)
    texts: list[str] = []
    _write_text(value, _gather(texts, give_way), 0, variant == "pretty", {})
    return "".join(texts).encode("ascii")


def _write_text(value: Any, put: Callable[[str], None], depth: int, pretty: bool, keys: dict[str, str]) -> None:
    kind = type(value)
    if kind is str:
        put(_quote_yson(value))
    elif kind is dict:
        _write_text_pairs(value, "{", "}", put, depth, pretty, keys)
    elif value is None or isinstance(value, (bool, int, float)):
        put(_show_scalar(value))
    elif isinstance(value, Attributed):
        _check_attributed(value)
        if value.attributes:
            _write_text_pairs(value.attributes, "<", ">", put, depth, pretty, keys)
            if pretty:
                put(" ")
        _write_text(value.value, put, depth, pretty, keys)
    elif isinstance(value, (list, tuple)):
        _check_written_depth(depth)
        if not value:
            put("[]")
            return
        begin, end = ("    " * (depth + 1), ";\n") if pretty else ("", ";")
        put("[\n" if pretty else "[")
        for item in value:
            put(begin)
            _write_text(item, put, depth + 1, pretty, keys)
            put(end)
        put(begin[4:] + "]")
    elif isinstance(value, (str, bytes)):
        put(_quote_yson(value))
    elif isinstance(value, Mapping):
        _write_text_pairs(value, "{", "}", put, depth, pretty, keys)
    else:
        raise FormatError(f"a value of type {kind.__name__} cannot be written as YSON")


def _write_text_pairs(
    pairs: Mapping[str, Any],
    opening: str,
    closing: str,
    put: Callable[[str], None],
    depth: int,
    pretty: bool,
    keys: dict[str, str],
) -> None:
    _check_written_depth(depth)
    if not pairs:
        put(opening + closing)
        return
    begin, equals, end = ("    " * (depth + 1), " = ", ";\n") if pretty else ("", "=", ";")
    put(opening + "\n" if pretty else opening)
    for key, item in pairs.items():
        quoted = keys.get(key)
        if quoted is None:
            _check_key(key)
            quoted = keys[key] = _quote_yson(key)
        put(begin + quoted + equals)
        _write_text(item, put, depth + 1, pretty, keys)
        put(end)
    put(begin[4:] + closing)


def _quote_yson(text: str | bytes) -> str:
    raw = text if isinstance(text, bytes) else _to_bytes(text)
    if _UNSAFE.search(raw) is None:
        return f'"{raw.decode("ascii")}"'
    return '"' + _UNSAFE.sub(lambda found: _ESCAPED[found[0][0]].encode(), raw).decode("ascii") + '"'


def _show_scalar(value: bool | float | None) -> str:
    """A value that is no string and no container, as text YSON."""
    if value is None:
        return "#"
    if isinstance(value, bool):
        return "%true" if value else "%false"
    if isinstance(value, float):
        if math.isfinite(value):
            text = float.__repr__(value)
            # YTsaurus prints 5. and 1e+22.
            return text[:-1] if text.endswith(".0") else text
        return "%nan" if math.isnan(value) else "%inf" if value > 0 else "%-inf"
    return int.__repr__(value) + ("u" if _is_unsigned(value) else "")


def _is_unsigned(value: int) -> bool:
    """Whether an integer is written as uint64. Raises FormatError when it fits neither that nor int64."""
    unsigned = isinstance(value, Uint) or value > INT64_MAX
    if value > UINT64_MAX or value < (0 if unsigned else INT64_MIN):
        raise FormatError(f"an integer of {value.bit_length()} bits is out of the range of YSON: -2^63 to 2^64-1")
    return unsigned


def _write_binary(value: Any, put: Callable[[bytes], None], depth: int) -> None:
    kind = type(value)
    if kind is str:
        put(_pack_string(_to_bytes(value)))
    elif kind is dict:
        _write_binary_pairs(value, b"{", b"}", put, depth)
    elif value is None:
        put(b"#")
    elif isinstance(value, bool):
        put(_FALSE_TRUE[value])
    elif isinstance(value, int):
        if _is_unsigned(value):
            put(b"\x06" + _pack_varint(value))
        else:
            put(b"\x02" + _pack_varint((value << 1) ^ (value >> 63)))
    elif isinstance(value, float):
        put(b"\x03" + _DOUBLE.pack(value))
    elif isinstance(value, Attributed):
        _check_attributed(value)
        if value.attributes:
            _write_binary_pairs(value.attributes, b"<", b">", put, depth)
        _write_binary(value.value, put, depth)
    elif isinstance(value, (list, tuple)):
        _check_written_depth(depth)
        put(b"[")
        for item in value:
            _write_binary(item, put, depth + 1)
            put(b";")
        put(b"]")
    elif isinstance(value, (str, bytes)):
        put(_pack_string(value if isinstance(value, bytes) else _to_bytes(value)))
    elif isinstance(value, Mapping):
        _write_binary_pairs(value, b"{", b"}", put, depth)
    else:
        raise FormatError(f"a value of type {kind.__name__} cannot be written as YSON")


def _write_binary_pairs(
    pairs: Mapping[str, Any], opening: bytes, closing: bytes, put: Callable[[bytes], None], depth: int
) -> None:
    _check_written_depth(depth)
    put(opening)
    for key, item in pairs.items():
        _check_key(key)
        put(_pack_string(_to_bytes(key)) + b"=")
        _write_binary(item, put, depth + 1)
        put(b";")
    put(closing)


def _pack_string(raw: bytes) -> bytes:
    return b"\x01" + _pack_varint(len(raw) << 1) + raw


def _pack_varint(number: int) -> bytes:
    if number < 0x80:
        return bytes((number,))
    packed = bytearray()
    while number >= 0x80:
        packed.append(0x80 | (number & 0x7F))
        number >>= 7
    packed.append(number)
    return bytes(packed)


def _to_bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise FormatError(f"the string {quote_text(text)} is not Unicode text") from None


def _check_key(key: object) -> None:
    if not isinstance(key, str):
        raise FormatError(f"the key of a map is a string, not {quote_text(key)}")


def _check_attributed(value: Attributed) -> None:
    if isinstance(value.value, Attributed):
        raise FormatError("a value with attributes cannot have attributes twice")


def _check_written_depth(depth: int) -> None:
    if depth >= MAX_WRITTEN_DEPTH:
        raise FormatError(f"the value is nested deeper than {MAX_WRITTEN_DEPTH} levels")


# --- JSON ------------------------------------------------------------------------------------------------------------

_JSON_ITEM = re.compile(rb'(?:[^",\[{]++|"(?:[^"\\]++|\\.)*+"?|[\[{](?=\s*[\]}]))*+([,\[{])?', re.DOTALL)
"""What counts as one more value, and all before it that does not, in one go: there may be a million strings."""
_JSON_OFFSET = re.compile(r"(.*?) \(byte (\d+)\)$")


def read_json(data: bytes, encode_utf8: bool = True, max_depth: int = MAX_DEPTH) -> Any:
    """The one value in JSON; ``{"$attributes": {...}, "$value": v}`` is a value with attributes.

    With ``encode_utf8`` characters are bytes; a string with a character above U+00FF can only be meant as it stands,
    and is taken so. Raises ParseError, also for more than MAX_VALUES values.
    """
    if has_too_many_values(data):
        raise ParseError(f"JSON of more values than the limit of {MAX_VALUES}", None)
    try:
        tree = msgspec.json.decode(data)
    except RecursionError:
        raise ParseError(f"JSON nested deeper than the limit of {max_depth} levels", None) from None
    except UnicodeDecodeError as error:
        raise ParseError("JSON that is not UTF-8", error.start) from None
    except (msgspec.DecodeError, ValueError) as error:
        found = _JSON_OFFSET.match(str(error))
        reason, offset = (found[1], int(found[2])) if found is not None else (str(error), len(data))
        raise ParseError(f"JSON: {reason.removeprefix('JSON is malformed: ')}", offset) from None
    return from_json_tree(tree, encode_utf8, max_depth)


def has_too_many_values(data: bytes) -> bool:
    """Whether a text in JSON holds more than MAX_VALUES, seen without reading it."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") < MAX_VALUES:
        return False
    # Some of these may be in strings.
    items = (found for found in _JSON_ITEM.finditer(data) if found[1])
    return next(itertools.islice(items, MAX_VALUES - 1, None), None) is not None


def from_json_tree(tree: Any, encode_utf8: bool = True, max_depth: int = MAX_DEPTH) -> Any:
    """The value behind what a JSON library reads; the other way of ``to_json_tree``. Raises ParseError."""
    return _from_json(tree, encode_utf8, max_depth)


def _from_json(tree: Any, encode_utf8: bool, levels: int) -> Any:
    if isinstance(tree, str):
        return _decode_json_text(tree) if encode_utf8 else tree
    if isinstance(tree, (dict, list)) and levels <= 0:
        raise ParseError("JSON nested deeper than the limit of levels", None)
    if isinstance(tree, list):
        return [_from_json(item, encode_utf8, levels - 1) for item in tree]
    if isinstance(tree, dict):
        return _from_json_map(tree, encode_utf8, levels)
    if isinstance(tree, int) and not isinstance(tree, bool) and not INT64_MIN <= tree <= INT64_MAX:
        if not 0 < tree <= UINT64_MAX:
            raise ParseError("JSON: integer out of the range -2^63 to 2^64-1", None)
        return Uint(tree)
    return tree


def _from_json_map(tree: dict[str, Any], encode_utf8: bool, levels: int) -> Any:
    if "$value" in tree:
        if set(tree) - {"$value", "$attributes"}:
            raise ParseError('JSON: a map with "$value" has no other keys than "$attributes"', None)
        attributes = tree.get("$attributes", {})
        if not isinstance(attributes, dict) or "$value" in attributes:
            raise ParseError('JSON: "$attributes" is a map', None)
        value = _from_json(tree["$value"], encode_utf8, levels - 1)
        if isinstance(value, Attributed):
            raise ParseError("JSON: attributes twice before one value", None)
        named = _from_json(attributes, encode_utf8, levels - 1)
        return Attributed(value, named) if named else value
    pairs = {}
    for key, item in tree.items():
        if key.startswith("$"):
            if not key.startswith("$$"):
                raise ParseError(f'JSON: key {quote_text(key)}: a leading "$" is doubled', None)
            name = key[1:]
        else:
            name = key
        pairs[_decode_json_text(name) if encode_utf8 else name] = _from_json(item, encode_utf8, levels - 1)
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
    """``value`` as JSON. Raises FormatError for what JSON cannot express. ``give_way`` as in ``write_value``."""
    pieces: list[bytes] = []
    _put_json(value, encode_utf8, 0, _gather(pieces, give_way))
    data = b"".join(pieces)
    return msgspec.json.format(data, indent=4) if pretty else data


def _put_json(value: Any, encode_utf8: bool, depth: int, put: Callable[[bytes], None]) -> None:
    """Large maps and lists are encoded item by item: no other thread runs while the encoder does."""
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
            part = _to_json(value[start : start + SPLIT_ITEMS], encode_utf8, depth)
            put(before + msgspec.json.encode(part)[1:-1])
            before = b","
        put(b"]")
    else:
        put(msgspec.json.encode(_to_json(value, encode_utf8, depth)))


def to_json_tree(value: Any, encode_utf8: bool = True) -> Any:
    """``value`` in what every JSON library writes; nan, inf and -inf are strings. Raises FormatError."""
    return _to_json(value, encode_utf8, 0)


def _to_json(value: Any, encode_utf8: bool, depth: int) -> Any:
    if isinstance(value, str):
        return _encode_json_text(value, encode_utf8)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        # JSON has no word for these.
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, int):
        _is_unsigned(value)
        return int(value)
    _check_written_depth(depth)
    if isinstance(value, Attributed):
        _check_attributed(value)
        plain = _to_json(value.value, encode_utf8, depth)
        if not value.attributes:
            return plain
        return {"$attributes": _to_json(value.attributes, encode_utf8, depth + 1), "$value": plain}
    if isinstance(value, Mapping):
        pairs = {}
        for key, item in value.items():
            pairs[_encode_json_key(key, encode_utf8)] = _to_json(item, encode_utf8, depth + 1)
        return pairs
    if isinstance(value, (list, tuple)):
        return [_to_json(item, encode_utf8, depth + 1) for item in value]
    if isinstance(value, bytes):
        return _encode_json_text(value.decode("utf-8", "surrogateescape"), encode_utf8)
    raise FormatError(f"a value of type {type(value).__name__} cannot be written as JSON")


def _encode_json_key(key: object, encode_utf8: bool) -> str:
    _check_key(key)
    name = _encode_json_text(str(key), encode_utf8)
    return f"${name}" if name.startswith("$") else name


def _encode_json_text(text: str, encode_utf8: bool) -> str:
    if text.isascii():
        return str(text)
    if encode_utf8:
        return _to_bytes(text).decode("latin-1")
    if any("\ud800" <= character < "\ue000" for character in text):
        raise FormatError(f"the string {quote_text(text)} is not UTF-8: it needs JSON with encode_utf8=%true, or YSON")
    return str(text)
