"""Tables of YAML and XML that know the line of each value, and the queues in them, as in YARN and YuniKorn. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from xml.parsers import expat

from cpumond.cli.imports.making import At, Making
from cpumond.cli.scheduler.tree_text import read_yaml
from cpumond.core.decode import ContentError
from cpumond.core.errors import ConfigError, UsageError
from cpumond.core.toml_text import Path
from cpumond.scheduler.model import ROOT_POOL

LISTS: Final = {"queue": "queues", "pool": "queues", "user": "users", "property": "properties"}
"""XML elements that may be repeated, and the name of their list."""
MAX_DEPTH: Final = 100


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a document. ``path``: its path in the document; ``lines``: path -> line."""

    file: str
    value: dict[str, Any]
    path: Path
    lines: Mapping[Path, int]

    def at(self, subject: str, *inside: str) -> At:
        path = (*self.path, *inside)
        while path and path not in self.lines:
            path = path[:-1]
        return At(f"{self.file}:{self.lines.get(path, 1)}" if self.file else "", subject)

    def go(self, key: str) -> Table:
        value = self.value.get(key) or {}
        if not isinstance(value, dict):
            raise ConfigError(f"{self.at('', key).where}: {key} must be a table")
        return Table(self.file, value, (*self.path, key), self.lines)

    def text(self, *keys: str) -> str:
        """The text of the first of these keys that exists, "" if none does. Raises ConfigError."""
        key = next((key for key in keys if self.value.get(key) is not None), "")
        value = self.value.get(key, "")
        if isinstance(value, dict | list):
            raise ConfigError(f"{self.at('', key).where}: {key} must be a text")
        return str(value)

    def items(self, key: str) -> list[Table]:
        """The tables of a list. Raises ConfigError."""
        found = self.value.get(key) or []
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise ConfigError(f"{self.at('', key).where}: {key} must be a list of tables")
        return [Table(self.file, each, (*self.path, key, str(at)), self.lines) for at, each in enumerate(found)]

    def leaves(self, *skip: str) -> Iterator[tuple[str, str, Any, Path]]:
        """Yield of each value: its name with dots, the last part of it if it has dots, the value, the path inside."""
        for key, value in self.value.items():
            if key in skip:
                continue
            if isinstance(value, dict) and value:
                for name, last, each, path in Table(self.file, value, (*self.path, key), self.lines).leaves():
                    yield f"{key}.{name}", last or name, each, (key, *path)
            else:
                text = str(value).lower() if isinstance(value, bool) else value
                yield str(key), "", text, (str(key),)

    def translate(
        self, making: Making, place: str, subject: str, options: dict[str, Any], *skip: str, resource: str = ""
    ) -> None:
        for name, last, value, path in self.leaves(*skip):
            making.set_option(place, name, value, self.at(subject, *path), options, resource or last)


def read_xml(text: str, file: str) -> tuple[str, Table]:
    """Return the name of the root, and its content: elements of ``LISTS`` as tables with name and type, all others as
    texts or tables.

    A DOCTYPE is refused, because an entity may expand to gigabytes, or to a file."""
    parser = expat.ParserCreate("utf-8")  # whatever encoding the text declares, because it was decoded already
    top: dict[str, Any] = {}
    lines: dict[Path, int] = {}
    stack: list[tuple[Path, dict[str, Any], list[str]]] = [((), top, [])]

    def refuse(*_: object) -> None:
        raise ConfigError(f"{file}:{parser.CurrentLineNumber}: a DOCTYPE is not accepted: remove it")

    def begin(tag: str, attributes: dict[str, str]) -> None:
        if len(stack) > MAX_DEPTH:
            raise ConfigError(f"{file}:{parser.CurrentLineNumber}: elements are nested deeper than {MAX_DEPTH}")
        path, above, _ = stack[-1]
        inside: dict[str, Any] = {}
        if tag in LISTS:
            inside |= {name: attributes[name] for name in ("name", "type") if name in attributes}
            items = above.setdefault(LISTS[tag], [])
            items.append(inside)
            path = (*path, LISTS[tag], str(len(items) - 1))
        else:
            path = (*path, f"<{tag}>" if tag in LISTS.values() else tag)
        lines[path] = parser.CurrentLineNumber
        stack.append((path, inside, []))

    def end(tag: str) -> None:
        path, inside, texts = stack.pop()
        if tag not in LISTS:
            stack[-1][1][path[-1]] = inside or "".join(texts).strip()

    def add(part: str) -> None:
        stack[-1][2].append(part)

    parser.StartDoctypeDeclHandler, parser.StartElementHandler, parser.EndElementHandler = refuse, begin, end
    parser.CharacterDataHandler = add
    try:
        parser.Parse(text.encode(), True)
    except expat.ExpatError as error:
        raise ConfigError(f"{file}:{error.lineno}: is not XML: {expat.ErrorString(error.code)}") from None
    ((name, value),) = top.items()
    return name, Table(file, value if isinstance(value, dict) else {}, (name,), lines)


def read_documents(texts: Mapping[str, str]) -> Iterator[Table]:
    for file, text in texts.items():
        before = 0
        for part in re.split(r"^---(?=\s|$)", text, flags=re.MULTILINE):
            lines: dict[Path, int] = {}
            try:
                value = read_yaml(part, lines)
            except ContentError as error:
                raise ConfigError(f"{file}: in the document that begins in line {before + 1}: {error}") from None
            except UsageError:
                raise UsageError(f"{file}: YAML needs PyYAML: pip install pyyaml") from None
            if not isinstance(value, dict):
                raise ConfigError(f"{file}:{before + 1}: expected a table")
            yield Table(file, value, (), {path: line + before for path, line in lines.items()})
            before += part.count("\n")


def read_queue(making: Making, queue: Table, above: tuple[str, ...] = (), parent: str = ROOT_POOL) -> None:
    """Add the pool of a queue, and those of the queues in it. Raises ConfigError."""
    path, below = (*above, queue.text("name").removeprefix("root.")), queue.items("queues")
    at = queue.at(f"queue {'.'.join(path)}")
    pool = making.add_queue(path, parent, at)
    skip = ("name", "queues", "limits", *["parent", "type"] * bool(below))
    queue.translate(making, "queue", at.subject, pool.options, *skip)
    translate_limits(making, queue, at.subject, pool.options)
    for each in below:
        read_queue(making, each, path, pool.name)


def translate_limits(making: Making, table: Table, subject: str, options: dict[str, Any]) -> None:
    for limit in table.items("limits"):
        place = "limit of the root" if options is making.options else "limit"
        for_all = limit.value.get("users") == ["*"] and not limit.value.get("groups")
        place = f"{place} for all users" if for_all else "limit"
        limit.translate(making, place, subject, options, "limit", "users", "groups")
