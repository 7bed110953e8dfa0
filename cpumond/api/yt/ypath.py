"""Paths of the Cypress tree, ``//sys/pools/a/@weight``: text to steps and back (yt_protocol.md 6)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from cpumond.api.yt.values import YtError, quote_text, strip_attributes


class YPathError(YtError):
    """A path that cannot be parsed; code 1."""

    def __init__(self, text: object, reason: str, offset: int) -> None:
        super().__init__(f"path {quote_text(text)}: {reason} at offset {offset}", attributes={"offset": offset})
        self.offset = offset


@dataclass(frozen=True)
class YPath:
    """A path. ``root`` is "/" or "#<id>"; ``steps`` are the names below it, unescaped.

    ``attribute`` is None for a node, () for all of its attributes, else an attribute's name and the keys inside the
    attribute. ``suppress_link``: the positions in ``steps`` with ``&``, which means a link itself; -1 is the root."""

    root: str
    steps: tuple[str, ...] = ()
    attribute: tuple[str, ...] | None = None
    suppress_link: frozenset[int] = frozenset()

    @property
    def node(self) -> YPath:
        """The path without its attribute."""
        return YPath(self.root, self.steps, None, self.suppress_link)

    def __str__(self) -> str:
        text = self.root + ("&" if -1 in self.suppress_link else "")
        for position, step in enumerate(self.steps):
            text += "/" + escape_literal(step) + ("&" if position in self.suppress_link else "")
        if self.attribute is not None:
            text += "/@" + "/".join(escape_literal(key) for key in self.attribute)
        return text


MAX_CHARS = 32_768
"""Maximum length of a path. The longest names need less; a megabyte would block the event loop for 0.3 s."""

_LITERAL = re.compile(r"(?:[^\\/@&*\[{]|\\(?:x[0-9A-Fa-f]{2}|[\\/@&*\[{]))+")
_ESCAPE = re.compile(rb"\\(?:x([0-9A-Fa-f]{2})|(.))", re.DOTALL)
_ID = re.compile(r"#[0-9A-Fa-f]{1,8}(?:-[0-9A-Fa-f]{1,8}){3}")
_SPECIAL = re.compile(r"[\\/@&*\[{]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

_REFUSED = {
    "[": "ranges of rows are not supported; a literal [ is written \\[",
    "{": "column selectors are not supported; a literal { is written \\{",
    "*": "wildcards are not supported; a literal * is written \\*",
    "\\": "broken escape; use \\/ \\@ \\& \\* \\[ \\{ \\\\ or \\xHH",
    "@": 'an attribute follows "/"; a literal @ is written \\@',
    "&": "misplaced &; it is written once, after the name of a link, and a literal & is written \\&",
}


def escape_literal(name: str) -> str:
    text = _SPECIAL.sub(lambda found: "\\" + found[0], name)
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def parse_ypath(text: Any) -> YPath:
    """Return the path in a string. In a rich path, which is a string with attributes, the attributes are ignored.

    Raises YPathError for everything that cannot be parsed, including ranges and wildcards."""
    path = strip_attributes(text)
    if not isinstance(path, str):
        raise YPathError(path, "not a string", 0)
    if len(path) > MAX_CHARS:
        raise YPathError(path, f"longer than {MAX_CHARS} characters, the limit,", MAX_CHARS)
    root, position = _parse_root(path)
    suppressed: set[int] = set()
    steps: list[str] = []
    if path.startswith("&", position):
        suppressed.add(-1)
        position += 1
    while position < len(path):
        if path[position] != "/":
            raise _refuse(path, position)
        position += 1
        if path.startswith("@", position):
            return YPath(root, tuple(steps), _parse_attribute(path, position + 1), frozenset(suppressed))
        step, position = _parse_literal(path, position)
        if path.startswith("&", position):
            suppressed.add(len(steps))
            position += 1
        steps.append(step)
    return YPath(root, tuple(steps), None, frozenset(suppressed))


def _parse_root(path: str) -> tuple[str, int]:
    if path.startswith("#"):
        found = _ID.match(path)
        if found is None:
            raise YPathError(path, 'after "#" must come an id of four hexadecimal numbers, a-b-c-d,', 1)
        return found[0], found.end()
    if not path.startswith("/"):
        raise YPathError(path, 'a path must begin with "//" or "#"', 0)
    # "/@name" is accepted for "//@name", the attributes of the root.
    return "/", 0 if path.startswith("/@") else 1


def _parse_attribute(path: str, position: int) -> tuple[str, ...]:
    """Return an attribute's name and the keys inside the attribute, up to the end of the path."""
    if position == len(path):
        return ()
    keys: list[str] = []
    while True:
        key, position = _parse_literal(path, position)
        keys.append(key)
        if position == len(path):
            return tuple(keys)
        if path[position] != "/":
            raise _refuse(path, position)
        position += 1


def _parse_literal(path: str, position: int) -> tuple[str, int]:
    found = _LITERAL.match(path, position)
    if found is None:
        raise _refuse(path, position)
    name = found[0]
    if "\\" in name:
        raw = name.encode("utf-8", "surrogateescape")
        raw = _ESCAPE.sub(lambda escape: bytes((int(escape[1], 16),)) if escape[1] else escape[2], raw)
        name = raw.decode("utf-8", "surrogateescape")
    return name, found.end()


def _refuse(path: str, position: int) -> YPathError:
    if position == len(path):
        return YPathError(path, "a name is missing at the end", position)
    character = path[position]
    reason = _REFUSED.get(character, "an empty name" if character == "/" else 'a name follows "/"')
    return YPathError(path, reason, position)
