"""A tree with its pools as TOML or YAML for people: writing, and reading with the line of each mistake."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Final, Literal

import msgspec

from cpumond.core.decode import LONE_SURROGATE, ContentError, decode_json, decode_toml
from cpumond.core.errors import ConfigError, UsageError
from cpumond.core.toml_text import MAX_CHARACTERS, Path, list_lines
from cpumond.core.words import escape_json, nearest, quoted
from cpumond.scheduler.model import ROOT_POOL, CommandError
from cpumond.scheduler.settings.attributes import CONFIG, Kind, is_option
from cpumond.scheduler.settings.tree_file import PoolTable, Table, TreeTables, read_table
from cpumond.scheduler.settings.values import FIELD, format_value

Form = Literal["toml", "yaml", "json"]
SUFFIXES: Final[Mapping[str, Form]] = {".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}
KEYS: Final = ("tree", "options", "pools")
INSIDE: Final = ("id", "attributes", "pools")
"""Keys of a pool's table that are no options."""

HEAD: Final = """\
Pool tree {tree}, as `cpumond tree export` writes it: only what is set is here.
What the table of a pool, or `options` of the tree, leaves out is not set and has its default. Pools that are not here
stay as they are, with --prune they are removed. `cpumond tree plan FILE` shows what would change.
"""

MAP: Final = "tag:yaml.org,2002:map"

LONE: Final = re.compile("[\ud800-\udfff]")
LONE_ESCAPE: Final = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)

MAX_VALUES: Final = 500_000
"""Maximum values of one YAML file, counting repetitions by aliases again: a few lines may expand to very many."""


@dataclass(frozen=True, slots=True)
class TreeText:
    """The content of a tree file. ``tree``: "" if the file names none; ``warnings``: about the file itself."""

    tree: str
    tables: TreeTables


# --- written


def write_tree(tree: str, tables: TreeTables, form: Form) -> str:
    """The file of a tree; equal trees give equal files. Raises UsageError if PyYAML is missing."""
    head = "".join(f"# {line}\n" for line in HEAD.format(tree=quoted(tree)).splitlines())
    document = _nest(tree, tables)
    if form == "json":
        return escape_json(msgspec.json.format(msgspec.json.encode(document), indent=2)) + "\n"
    return f"{head}\n" + (_write_toml(document) if form == "toml" else _write_yaml(document))


class _Lines(dict[str, Any]):
    """A table whose keys are on separate lines; other dictionaries are values on one line."""


def _nest(tree: str, tables: TreeTables) -> _Lines:
    document = _Lines(tree=tree, options=_list_set("tree", tables.own or Table()), pools=_Lines())
    places = {ROOT_POOL: document}
    for pool in tables.pools or ():
        table = places[pool.name] = _list_set("pool", pool, **({"id": pool.id} if pool.id else {}))
        places[pool.parent].setdefault("pools", _Lines())[pool.name] = table
    return document


def _list_set(kind: Kind, table: Table, **first: str) -> _Lines:
    found = _Lines(first | {name: _short(kind, name, value) for name, value in sorted(table.options.items())})
    if table.attributes:
        found["attributes"] = table.attributes
    return found


def _short(kind: Kind, name: str, value: Any) -> Any:
    """The value of an option without the ".0" of whole numbers, which is added again on reading."""
    if kind == "tree" and name == CONFIG:
        return {key: _short(kind, key, each) if is_option(kind, key) else each for key, each in sorted(value.items())}
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return {key: _short(kind, "", each) for key, each in value.items()} if isinstance(value, dict) else value


def _write_toml(document: Mapping[str, Any]) -> str:
    lines = [f"tree = {_toml(document['tree'])}", "", "[options]"]
    lines += [f"{_toml_key(name)} = {_toml(value, 0)}" for name, value in document["options"].items()]
    # A table without any pool means that the tree shall have no pools.
    lines += _toml_pools(document["pools"], "pools") if document["pools"] else ("", "[pools]")
    return "\n".join(lines) + "\n"


def _toml_pools(pools: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, table in pools.items():
        where = f"{path}.{_toml_key(name)}"
        yield from ("", f"[{where}]")
        yield from (f"{_toml_key(key)} = {_toml(value, 0)}" for key, value in table.items() if key != "pools")
        yield from _toml_pools(table.get("pools", {}), f"{where}.pools")


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any, depth: int = 1) -> str:
    if isinstance(value, str):
        # Strings of JSON are strings of TOML, except for DEL.
        return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_toml_key(key)} = {_toml(each)}" for key, each in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        items = [_toml(each) for each in value]
        if depth == 0 and any(isinstance(each, Mapping) for each in value):
            return "[\n" + "".join(f"  {item},\n" for item in items) + "]"
        return f"[{', '.join(items)}]"
    return repr(value)


def _write_yaml(document: Mapping[str, Any]) -> str:
    yaml = _import_yaml()

    class Dumper(yaml.SafeDumper):  # type: ignore[name-defined,misc]  # the module is imported where it is needed
        def ignore_aliases(self, data: object) -> bool:
            return True

    def write_text(dumper: Any, text: str) -> Any:
        # In other quotes an unprintable character may be read as the end of a line.
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')

    Dumper.add_representer(str, write_text)
    Dumper.add_representer(dict, lambda dumper, value: dumper.represent_mapping(MAP, value, flow_style=True))
    Dumper.add_representer(_Lines, lambda dumper, value: dumper.represent_mapping(MAP, value, flow_style=False))
    text: str = yaml.dump(document, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def _import_yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError:
        raise UsageError("YAML needs PyYAML: pip install pyyaml; or use TOML") from None


# --- read


def is_tree_file(name: str) -> bool:
    """Whether an argument of the command line names a tree file."""
    return PurePath(name).suffix.lower() in SUFFIXES


def form_of(name: str) -> Form:
    """The format of a file by its name. Raises UsageError."""
    form = SUFFIXES.get(PurePath(name).suffix.lower())
    if form is None:
        raise UsageError(f"{name}: expected the name of a file that ends with {', '.join(SUFFIXES)}")
    return form


def read_tree_text(text: str, name: str, form: Form) -> TreeText:
    """Parse a tree file; ``name`` and the line are used in messages. Raises ConfigError, UsageError."""
    lines: dict[Path, int] = {}
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{name}: it is longer than {MAX_CHARACTERS // 2**20} MiB; split it")
    try:
        content = _READERS[form](text, lines)
    except ContentError as error:
        raise ConfigError(f"{name}: {error}") from None
    return _Reader(name, lines).read(content)


def _read_toml(text: str, lines: dict[Path, int]) -> Any:
    content = decode_toml(text)
    lines.update(list_lines(text))
    return content


def read_yaml(text: str, lines: dict[Path, int]) -> Any:
    """The value of a document, {} for an empty one; ``lines`` gets the line of each value in it. Raises ContentError,
    and UsageError if PyYAML is missing."""
    yaml = _import_yaml()
    loader = _make_loader(yaml)(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}
        _find_lines(yaml, node, (), lines, ())
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ContentError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ContentError("it is nested too deeply") from None
    finally:
        loader.dispose()


def _make_loader(yaml: Any) -> Any:
    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # the module is imported where it is needed
        def construct_object(self, node: Any, deep: bool = False) -> Any:
            line = node.start_mark.line + 1
            if node.tag.rpartition(":")[2] in ("int", "float") and ":" in node.value:
                text = f"{format_value(node.value)} is a number with the base 60 in YAML"
                raise ContentError(f"line {line}: {text}; put a text in quotes, write a number without colons")
            try:
                return super().construct_object(node, deep)
            except (ValueError, ArithmeticError, LookupError, AttributeError) as error:
                # PyYAML does not catch errors of a value in its tag, for example the date 2001-99-99.
                if isinstance(error, ContentError):
                    raise
                kind = node.tag.rpartition(":")[2]
                text = f"line {line}: {format_value(node.value)} is no {kind}; put a text in quotes"
                raise ContentError(text) from None

    return Loader


def _find_lines(yaml: Any, node: Any, path: Path, lines: dict[Path, int], above: tuple[int, ...]) -> None:
    """Note the line of each value. Raises ContentError if a key occurs twice or is not a text, if a value contains
    itself, or if there are too many values."""
    number = node.start_mark.line + 1
    if id(node) in above:
        raise ContentError(f"line {number}: a value cannot contain itself")
    if len(lines) > MAX_VALUES:
        raise ContentError(f"it has more than {MAX_VALUES} values, counting repetitions by *aliases")
    if isinstance(node, yaml.ScalarNode) and LONE.search(node.value):
        raise ContentError(f"line {number}: {LONE_SURROGATE}")
    within = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            where = (*path, str(index))
            lines.setdefault(where, value.start_mark.line + 1)
            _find_lines(yaml, value, where, lines, within)
    seen: set[str] = set()
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        number = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ContentError(f"line {number}: a key must be a text, not a list or a table")
        if LONE.search(key.value):
            raise ContentError(f"line {number}: {LONE_SURROGATE}")
        if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
            raise ContentError(f"line {number}: {format_value(key.value)} occurs twice; keep one of them")
        seen.add(key.value)
        where = (*path, key.value)
        lines.setdefault(where, number)
        _find_lines(yaml, value, where, lines, within)


def _read_json(text: str, _: dict[Path, int]) -> Any:
    try:
        return decode_json(text, dict[str, Any])
    except ContentError:
        # The decoder reports a lone surrogate as truncated text.
        found = LONE_ESCAPE.search(text)
        if found is None:
            raise
        raise ContentError(f"line {text.count(chr(10), 0, found.start()) + 1}: {LONE_SURROGATE}") from None


_READERS: Final[Mapping[Form, Callable[[str, dict[Path, int]], Any]]] = {
    "toml": _read_toml,
    "yaml": read_yaml,
    "json": _read_json,
}


@dataclass(frozen=True, slots=True)
class _Reader:
    """Converts nested tables to those of ``TreeTables``."""

    name: str
    lines: Mapping[Path, int]
    found: list[PoolTable] = field(default_factory=list)
    places: dict[str, Path] = field(default_factory=dict)

    def read(self, content: Any) -> TreeText:
        self._check_table(content, ())
        for key in content:
            if key not in KEYS:
                near = nearest(key, KEYS)
                hint = f"did you mean {near}?" if near else f"known: {', '.join(KEYS)}; options belong in `options`"
                raise self._refuse((key,), f"is unknown; {hint}")
        tree = content.get("tree", "")
        if not isinstance(tree, str):
            raise self._refuse(("tree",), f"must be the name of a pool tree, got {format_value(tree)}")
        own = None
        if "options" in content:
            own = Table(**self._read_table("tree", content["options"], ("options",), "the tree"))
        if "pools" in content:
            self._read_pools(content["pools"], ("pools",), ROOT_POOL)
        return TreeText(tree, TreeTables(own, tuple(self.found) if "pools" in content else None))

    def _read_pools(self, pools: Any, path: Path, parent: str) -> None:
        self._check_table(pools, path)
        for name, given in pools.items():
            where, table = (*path, name), {} if given is None else given
            if name in self.places:
                also = "/".join(self.places[name])
                raise self._refuse(where, f"occurs twice, also as {also}; the names of pools must be unique in a tree")
            self.places[name] = where
            own = self._read_table("pool", table, where, f"pool {quoted(name)}")
            pool_id = table.get("id", "")
            if not isinstance(pool_id, str):
                raise self._refuse((*where, "id"), f"must be a text, got {format_value(pool_id)}")
            self.found.append(PoolTable(name=name, parent=parent, id=pool_id, **own))
            self._read_pools(table.get("pools", {}), (*where, "pools"), name)

    def _read_table(self, kind: Kind, table: Any, path: Path, what: str) -> dict[str, Any]:
        self._check_table(table, path)
        attributes = table.get("attributes", {})
        self._check_table(attributes, (*path, "attributes"))
        no_options = INSIDE if kind == "pool" else ("attributes",)
        options = {key: each for key, each in table.items() if key not in no_options}
        given = {"options": options, "attributes": attributes}
        try:
            read_table(kind, Table(**given), what)
        except CommandError as error:
            field_path = (*path, *str(error.attributes.get(FIELD, "")).split("/"))
            raise ConfigError(f"{self._at(field_path)}: {error}") from None
        return given

    def _check_table(self, value: Any, path: Path) -> None:
        if not isinstance(value, dict):
            raise self._refuse(path, f"must be a table, got {format_value(value)}")
        for key in value:
            if not isinstance(key, str):
                raise self._refuse(path, f"its keys must be text, got {format_value(key)}; put it in quotes")

    def _refuse(self, path: Path, what: str) -> ConfigError:
        return ConfigError(f"{self._at(path)}: {'/'.join(path) or 'the whole'} {what}")

    def _at(self, path: Path) -> str:
        """``pools.toml:12``, or the name alone if the line is unknown."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.name}:{self.lines[path]}" if path else self.name
