"""Decode JSON and TOML from a disk or a peer; any content yields a value or a ContentError.

The decoders raise not only their own errors, but also UnicodeDecodeError for bytes that are not UTF-8, RecursionError
for brackets nested by thousands, and plain ValueError for numbers of thousands of digits. Code that reads a file that
may be damaged calls these functions."""

from __future__ import annotations

import re
import threading
from typing import Any, Final, TypeVar

import msgspec

Kind = TypeVar("Kind")

LONE_SURROGATE: Final = "half a character (one of U+D800 to U+DFFF); write the whole character, or leave it out"

_DECODERS: Final[dict[Any, msgspec.json.Decoder[Any]]] = {}
_LOCK: Final = threading.Lock()


class ContentError(ValueError):
    """The content is not as expected. The message says what is wrong, not where the content came from."""


def find_decoder(kind: type[Kind]) -> msgspec.json.Decoder[Kind]:
    """Return the decoder of a type; it is created once, by one thread.

    msgspec inspects a type's fields when it first decodes the type. If a second thread decodes that type meanwhile, the
    second thread uses incomplete data, and the process ends with SIGSEGV (seen with 0.22)."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        with _LOCK:
            decoder = _DECODERS.setdefault(kind, msgspec.json.Decoder(kind))
    return decoder


def decode_json(data: bytes | bytearray | str, kind: type[Kind]) -> Kind:
    """Decode JSON to a value of type ``kind``. Raises ContentError."""
    try:
        return find_decoder(kind).decode(data)
    except Exception as error:  # every error of the decoder is about the content, and its kinds are not documented
        raise _explain(error) from None


def decode_text(data: bytes) -> str:
    """Decode a text file written by people: UTF-8, with or without a byte order mark. Raises ContentError."""
    try:
        text = data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError:
        if re.search(rb"\xed[\xa0-\xbf][\x80-\xbf]", data):
            raise ContentError(f"it is not UTF-8: {LONE_SURROGATE}") from None
        kind = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "perhaps Latin-1"
        raise ContentError(f"it is not UTF-8 but {kind}; save it as UTF-8") from None
    if "\0" in text:
        raise ContentError("it has zero bytes, as UTF-16 has; save it as UTF-8")
    # Convert line ends as open() does, because files may come from other systems.
    return text.replace("\r\n", "\n").replace("\r", "\n")


def decode_toml(text: str) -> dict[str, Any]:
    """Decode TOML to a table. Raises ContentError."""
    import tomllib  # not every program reads TOML

    from cpumond.core.toml_text import explain_toml, find_excess

    if excess := find_excess(text):
        raise ContentError(excess)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ContentError(explain_toml(text, str(error))) from None
    except Exception as error:  # every error of the decoder is about the content, and its kinds are not documented
        raise _explain(error) from None


def is_no_utf8(error: Exception) -> bool:
    """Return whether a decoder's error is about bytes that are not UTF-8 (msgspec has its own error since 0.23)."""
    return isinstance(error, UnicodeDecodeError) or "UTF-8" in str(error)


def _explain(error: Exception) -> ContentError:
    if is_no_utf8(error):
        return ContentError("a text in it is not UTF-8")
    if isinstance(error, RecursionError):
        return ContentError("it is nested too deep")
    if "set_int_max_str_digits" in str(error):
        return ContentError("a number in it has thousands of digits")
    return ContentError(str(error) or type(error).__name__)
