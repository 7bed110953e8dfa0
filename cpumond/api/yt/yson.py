"""YSON of the ``yt`` protocol (yt_protocol.md 5): its reader and writer.

Why ``yt.yson`` of ytsaurus-client 0.13.55 is not used, measured with 1000 pools of 40 attributes (1 MB):

- its Python reader takes 650-900 ms/MB (this one 110-200, for small values more: see ``read_yson``), ends in
  RecursionError at some 300 levels, takes a binary string of negative length for an empty one, and unescapes with
  Python's ``unicode_escape``: a UnicodeDecodeError without a position for ``"\\xZZ"``, a DeprecationWarning for
  ``"\\400"``;
- its Python writer takes 130-250 ms/MB (this one 40-80), and writes ``5.0`` and an empty map on two lines, where
  YTsaurus prints ``5.`` and ``{}``;
- the binding of the C++ library does all that right, at 15-25 ms/MB, but exists only for x86_64.

The tests compare this module with the library, and with the binding where it is installed."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal

from cpumond.api.yt.values import (
    INT64_MAX,
    INT64_MIN,
    MAX_DEPTH,
    MAX_VALUES,
    UINT64_MAX,
    Attributed,
    FormatError,
    ParseError,
    T,
    Uint,
    check_attributed,
    check_key,
    check_written_depth,
    gather,
    is_unsigned,
    quote_text,
    to_bytes,
)

MAX_NUMBER_CHARS = 400

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
    """Return the only value in YSON, which may mix text and binary. If a key is given twice, its last value counts.

    Takes 2 to 6 us per value, and up to 0.3 s for a MB of escapes, so long texts are read in a thread. Raises
    ParseError for text that is not YSON, values nested deeper than ``max_depth``, and more than MAX_VALUES values."""
    value, position = _YsonReader(data, max_depth).read(0, 0)
    end = _SPACE.match(data, position)
    assert end is not None
    if end.end() != len(data):
        raise ParseError(f"unexpected {_format_byte(data[end.end()])} after the value", end.end())
    return value


class _YsonReader:
    __slots__ = ("_data", "_left", "_max_depth")

    def __init__(self, data: bytes, max_depth: int) -> None:
        self._data = data
        self._max_depth = max_depth
        self._left = MAX_VALUES

    def read(self, position: int, depth: int, attributed: bool = False) -> tuple[Any, int]:
        """Return the value at ``position``, which is nested in ``depth`` others, and the position of its end."""
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
        """Return a string in text form."""
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
        """Return a value that is neither a container nor a string, and whose first byte shows its type."""
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
        """Skip a semicolon, or the end of the container."""
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
        return ParseError(f"expected {expected}, not {_format_byte(self._data[at])}", at)


def _format_byte(byte: int) -> str:
    return f'"{chr(byte)}"' if 0x20 < byte < 0x7F else f"byte 0x{byte:02X}"


_UNSAFE = re.compile(rb'[^\x20-\x7e]|["\\]')
_ESCAPED = {byte: f"\\x{byte:02X}" for byte in range(256)} | {9: "\\t", 10: "\\n", 13: "\\r", 34: '\\"', 92: "\\\\"}
_FALSE_TRUE = (b"\x04", b"\x05")


def write_yson(
    value: Any, variant: Literal["binary", "text", "pretty"] = "text", give_way: Callable[[], object] | None = None
) -> bytes:
    """Return ``value`` as YSON. ``pretty`` is indented by 4 spaces, with every item on its own line (section 5).

    An integer above int64's range is written as uint64. Raises FormatError for what YSON cannot express. For
    ``give_way`` see ``write_value``."""
    if variant == "binary":
        parts: list[bytes] = []
        _Writer(gather(parts, give_way), _pack_string, _pack_scalar, str.encode).write(value, 0)
        return b"".join(parts)
    texts: list[str] = []
    _Writer(gather(texts, give_way), _quote_yson, _format_scalar, str, variant == "pretty").write(value, 0)
    return "".join(texts).encode("ascii")


class _Writer(Generic[T]):
    """Writes a value in pieces: ``string`` and ``scalar`` make pieces of plain values, ``mark`` makes punctuation."""

    def __init__(
        self, put: Callable[[T], None], string: Callable[[str | bytes], T], scalar: Callable[[Any], T],
        mark: Callable[[str], T], pretty: bool = False,
    ) -> None:  # fmt: skip
        self._put: Callable[[T], None] = put
        self._string: Callable[[str | bytes], T] = string
        self._scalar: Callable[[Any], T] = scalar
        self._pretty = pretty
        self._indent: T = mark("    " if pretty else "")
        self._line: T = mark("\n" if pretty else "")
        self._equals: T = mark(" = " if pretty else "=")
        self._end: T = mark(";") + self._line
        self._space: T = mark(" ")
        self._signs: dict[str, T] = {sign: mark(sign) for sign in "{}[]<>"}
        self._keys: dict[str, T] = {}

    def write(self, value: Any, depth: int) -> None:
        """Write a value that is nested inside ``depth`` other values."""
        kind = type(value)
        if kind is str:
            self._put(self._string(value))
        elif kind is dict:
            self._write_pairs(value, "{", "}", depth)
        elif value is None or isinstance(value, (bool, int, float)):
            self._put(self._scalar(value))
        elif isinstance(value, Attributed):
            check_attributed(value)
            if value.attributes:
                self._write_pairs(value.attributes, "<", ">", depth)
                if self._pretty:
                    self._put(self._space)
            self.write(value.value, depth)
        elif isinstance(value, (list, tuple)):
            self._write_list(value, depth)
        elif isinstance(value, (str, bytes)):
            self._put(self._string(value))
        elif isinstance(value, Mapping):
            self._write_pairs(value, "{", "}", depth)
        else:
            raise FormatError(f"a value of type {kind.__name__} cannot be written as YSON")

    def _write_list(self, items: Sequence[Any], depth: int) -> None:
        check_written_depth(depth)
        put = self._put
        put(self._signs["["] + self._line if items else self._signs["["])
        for item in items:
            if self._pretty:
                put(self._indent * (depth + 1))
            self.write(item, depth + 1)
            put(self._end)
        put(self._indent * (depth if items else 0) + self._signs["]"])

    def _write_pairs(self, pairs: Mapping[str, Any], opening: str, closing: str, depth: int) -> None:
        check_written_depth(depth)
        put, write, end, keys, begin = self._put, self.write, self._end, self._keys, self._indent * (depth + 1)
        put(self._signs[opening] + self._line if pairs else self._signs[opening])
        for key, item in pairs.items():
            name = keys.get(key)
            if name is None:
                check_key(key)
                name = keys[key] = self._string(key) + self._equals
            put(begin + name)
            write(item, depth + 1)
            put(end)
        put(self._indent * (depth if pairs else 0) + self._signs[closing])


def _quote_yson(text: str | bytes) -> str:
    raw = text if isinstance(text, bytes) else to_bytes(text)
    if _UNSAFE.search(raw) is None:
        return f'"{raw.decode("ascii")}"'
    return '"' + _UNSAFE.sub(lambda found: _ESCAPED[found[0][0]].encode(), raw).decode("ascii") + '"'


def _format_scalar(value: bool | float | None) -> str:
    """Return a value that is neither a string nor a container as YSON text."""
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
    return int.__repr__(value) + ("u" if is_unsigned(value) else "")


def _pack_scalar(value: bool | float | None) -> bytes:
    """Return a value that is neither a string nor a container as binary YSON."""
    if value is None:
        return b"#"
    if isinstance(value, bool):
        return _FALSE_TRUE[value]
    if isinstance(value, float):
        return b"\x03" + _DOUBLE.pack(value)
    if is_unsigned(value):
        return b"\x06" + _pack_varint(value)
    return b"\x02" + _pack_varint((value << 1) ^ (value >> 63))


def _pack_string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else to_bytes(text)
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
