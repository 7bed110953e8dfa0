"""Values of the ``yt`` protocol in Python, and its errors.

The values are plain Python: ``None``, ``bool``, ``int`` (``Uint`` for YSON's uint64), ``float``, ``str``, ``list``,
``dict`` with keys of ``str``, and ``Attributed`` for a value with attributes. Strings of the protocol are bytes;
strings that are not UTF-8 are kept by ``surrogateescape``, and are written back unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from cpumond.core.errors import CpumondError
from cpumond.scheduler.model import GENERIC, CommandError

T = TypeVar("T", str, bytes)

MAX_DEPTH = 64
"""Maximum nesting of maps, lists and attributes that a reader accepts by default."""
MAX_WRITTEN_DEPTH = 256
"""Maximum nesting that the writers accept; no served tree comes near this depth."""
MAX_VALUES = 20_000
"""Maximum values of one text, maps and lists included: each value, rather than each byte, costs time and memory."""

INT64_MIN, INT64_MAX, UINT64_MAX = -(2**63), 2**63 - 1, 2**64 - 1

WRITTEN_BYTES = 4096
"""Bytes of text between two calls of ``give_way``; writing them takes about 0.2 ms."""


class YtError(CommandError):
    """A refusal in the words of the protocol; ``code`` is YTsaurus' code of the error, not an HTTP status.

    ``attributes`` hold plain values; ``inner`` are errors that caused this one; the client shows them indented."""

    @property
    def message(self) -> str:
        return str(self)


def error_value(error: CpumondError) -> dict[str, Any]:
    """Return any refusal as a value in the form of the protocol (section 7)."""
    code = getattr(error, "code", GENERIC)
    return {
        "code": code if isinstance(code, int) and not isinstance(code, bool) else GENERIC,
        "message": str(error) or type(error).__name__,
        "attributes": dict(getattr(error, "attributes", {})),
        "inner_errors": [error_value(inner) for inner in getattr(error, "inner", ())],
    }


def error_of(value: Mapping[str, Any]) -> YtError:
    """Return the error for a result of ``error_value``, without the first error's traceback."""
    inner = [error_of(each) for each in value["inner_errors"]]
    return YtError(value["message"], value["code"], value["attributes"], inner)


class ParseError(YtError):
    """Unreadable input. ``offset``: of the wrong byte, counted from 0; None if only the reason is known."""

    def __init__(self, reason: str, offset: int | None, where: str = "") -> None:
        place = f"{where}: " if where else ""
        at = "" if offset is None else f" at offset {offset}"
        super().__init__(
            f"Error parsing request: {place}{reason}{at}", attributes={} if offset is None else {"offset": offset}
        )
        self.reason = reason
        self.offset = offset

    def located(self, where: str) -> ParseError:
        """Return the same error with ``where``, the part of the request that the error is about."""
        return ParseError(self.reason, self.offset, where)


class FormatError(YtError):
    """A format that is not supported, or a value that the format cannot express."""


class Attributed(NamedTuple):
    """A value with YSON attributes; the value itself is never Attributed."""

    value: Any
    attributes: dict[str, Any]


class Uint(int):
    """An integer that is written as uint64, ``5u``."""

    __slots__ = ()


def strip_attributes(value: Any) -> Any:
    """Return a value without its own attributes; attributes of its items stay."""
    return value.value if isinstance(value, Attributed) else value


def quote_text(value: object) -> str:
    """Return a value as a short text in quotes, for messages."""
    text = value if isinstance(value, str) else repr(value)
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return '"' + shown.encode("utf-8", "backslashreplace").decode() + '"'


def gather(pieces: list[T], give_way: Callable[[], object] | None) -> Callable[[T], None]:
    """Return a function that appends to ``pieces`` of a text, and calls ``give_way`` about every WRITTEN_BYTES."""
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


def is_unsigned(value: int) -> bool:
    """Whether an integer is written as uint64. Raises FormatError if the integer fits neither uint64 nor int64."""
    unsigned = isinstance(value, Uint) or value > INT64_MAX
    if value > UINT64_MAX or value < (0 if unsigned else INT64_MIN):
        raise FormatError(f"an integer of {value.bit_length()} bits is out of the range of YSON: -2^63 to 2^64-1")
    return unsigned


def to_bytes(text: str) -> bytes:
    """Return the bytes of a string. Raises FormatError for text that is not Unicode."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise FormatError(f"the string {quote_text(text)} is not Unicode text") from None


def check_key(key: object) -> None:
    """Check the key of a map. Raises FormatError, as the next two functions do."""
    if not isinstance(key, str):
        raise FormatError(f"the key of a map must be a string, not {quote_text(key)}")


def check_attributed(value: Attributed) -> None:
    """Check that a value has attributes only once."""
    if isinstance(value.value, Attributed):
        raise FormatError("a value with attributes cannot have attributes twice")


def check_written_depth(depth: int) -> None:
    """Check that a value is not nested deeper than the writers go."""
    if depth >= MAX_WRITTEN_DEPTH:
        raise FormatError(f"the value is nested deeper than {MAX_WRITTEN_DEPTH} levels")
