"""Attributes of pools and trees: names, values, and edits (semantics.md 0.2, 2.3-2.5).

Attributes are kept as dictionaries with canonical names and values of the attribute's type; therefore a stored
dictionary is the same after it is read. Attributes that are no options are also kept, exactly as given.

A tree's options may be attributes of the tree or entries of its ``config`` dictionary. Both places are kept as
written. ``read_tree`` merges them: an option in ``config`` takes precedence.

In ``spelled`` the key of an option is its name, prefixed with ``config/`` if it is in a tree's ``config``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from cpumond.scheduler.model import RESOLVE, CommandError, PoolConfig, PoolSettings, TreeConfig, TreeSettings
from cpumond.scheduler.settings.access_lists import edit_acl, read_acl
from cpumond.scheduler.settings.nodes_filter import TAG_FILTER
from cpumond.scheduler.settings.spec_options import find_option
from cpumond.scheduler.settings.values import (
    FIELD,
    MAX_DEPTH,
    MAX_VALUE_BYTES,
    REMOVE,
    Type,
    allowed_words,
    copy_plain,
    cut,
    fields_of,
    fold_key,
    format_value,
    is_list,
    items_of,
    known_key,
    members_of,
    name_field,
    normalise_value,
    quote_near,
    refuse,
)

Kind = Literal["pool", "tree"]

MIN_WEIGHT: Final = 2.0**-26
"""The minimum weight. It replaces smaller weights, including 0 (0.3 no. 4)."""

CONFIG: Final = "config"
ACL: Final = "acl"
MAX_NAME_LENGTH: Final = 256

MAX_CUSTOM_ATTRIBUTES: Final = 200
MAX_HINTS: Final = 20
"""Maximum number of unknown attributes for which a warning names a similar option; each look-up takes 0.2 ms."""

FREE_PAIR: Final = "strong_guarantee_resources"
"""The only option that may be set under either of its names, whichever name it was set under before (0.2)."""

_PREEMPTION_ALIASES: Final = {
    "fair_share_preemption_timeout": "fair_share_starvation_timeout",
    "allow_aggressive_starvation_preemption": "allow_aggressive_preemption",
    "aggressive_starvation_enabled": "enable_aggressive_starvation",
}

ALIASES: Final[Mapping[Kind, Mapping[str, str]]] = {
    "pool": {**_PREEMPTION_ALIASES, "min_share_resources": "strong_guarantee_resources", "scheduling_tag": TAG_FILTER},
    "tree": {
        **_PREEMPTION_ALIASES,
        "max_operations_per_pool": "max_operation_count_per_pool",
        "max_running_operations_per_pool": "max_running_operation_count_per_pool",
        "max_ephemeral_pool_per_user": "max_ephemeral_pools_per_user",
        "max_unpreemptable_running_job_count": "max_unpreemptible_running_job_count",
        "max_unpreemptable_running_allocation_count": "max_unpreemptible_running_job_count",
        "max_unpreemptible_running_allocation_count": "max_unpreemptible_running_job_count",
        "allocation_count_preemption_timeout_coefficient": "job_count_preemption_timeout_coefficient",
        "allocation_preemption_timeout": "job_preemption_timeout",
        "job_interrupt_timeout": "job_preemption_timeout",
        "allocation_graceful_preemption_timeout": "job_graceful_preemption_timeout",
        "job_graceful_interrupt_timeout": "job_graceful_preemption_timeout",
        "total_resource_limits_consider_delay": "node_reconnection_timeout",
    },
}
"""Accepted name of an option -> its canonical name; hyphens have been replaced before (2.4, 2.5)."""

RESERVED: Final = frozenset({
    "id", "type", "name", "parent_name", "parent_id", "key", "path", "full_path", "count", "pool_tree", "tree",
    "effective_acl", "is_root", "builtin", "ephemeral", "account", "resource_usage", "ref_counter", "life_stage",
    "revision", "attribute_revision", "content_revision", "creation_time", "modification_time", "access_time",
})  # fmt: skip
"""Names of attributes that every pool and tree has although they were not set."""

_STRUCTS: Final[Mapping[Kind, type[msgspec.Struct]]] = {"pool": PoolSettings, "tree": TreeSettings}

_FIELDS: Final[Mapping[Kind, Mapping[str, Type]]] = {kind: fields_of(struct) for kind, struct in _STRUCTS.items()}


class Edit(msgspec.Struct, frozen=True, omit_defaults=True):
    """One change: a path (the attribute's name, then keys inside of it) and the new value; REMOVE (None) removes it.

    ``recursive``: create missing dictionaries on the path; only for attributes that are not options."""

    path: tuple[str, ...]
    value: Any = REMOVE
    recursive: bool = False


def canonical_name(kind: Kind, name: str) -> str:
    """Return the canonical name of an option; a name that is no option is returned unchanged."""
    folded = name.replace("-", "_")
    folded = ALIASES[kind].get(folded, folded)
    return folded if folded in _FIELDS[kind] or folded in RESERVED else name


def canonical_path(kind: Kind, path: Sequence[str]) -> tuple[str, ...]:
    """Return a path with canonical names on every known level."""
    if not path:
        return ()
    if kind == "tree" and path[0] == CONFIG:
        return (CONFIG, *canonical_path("tree", path[1:])) if len(path) > 1 else (CONFIG,)
    name = canonical_name(kind, path[0])
    result = [name]
    inside = members_of(_FIELDS[kind][name]) if name in _FIELDS[kind] else None
    for key in path[1:]:
        folded = key if inside is None else fold_key(key, inside)
        is_known = inside is not None and folded in inside
        result.append(folded if is_known else key)
        inside = members_of(inside[folded]) if is_known and inside is not None else None
    return tuple(result)


def find_shape(kind: Kind, path: Sequence[str]) -> str | None:
    """Return "a dictionary" or "a list" if the option of this path, in any spelling, takes such a value; else None."""
    names = [name for name in canonical_path(kind, path) if name != CONFIG]
    inside: Mapping[str, Type] | None = _FIELDS[kind]
    found: Type | None = None
    for name in names:
        found = inside.get(name) if inside is not None else None
        inside = members_of(found) if found is not None else None
    if inside is not None and names:
        return "a dictionary"
    return "a list" if found is not None and is_list(found) else None


def is_option(kind: Kind, name: str) -> bool:
    """Return whether ``name``, in any spelling, is an option of pools or trees rather than any other attribute."""
    return canonical_name(kind, name) in _FIELDS[kind]


def find_mistyped(kind: Kind, name: str) -> str | None:
    """Return the option most similar to ``name``, quoted; "" if none is similar; None if ``name`` is an option."""
    known = canonical_name(kind, name)
    if known in _FIELDS[kind] or known in RESERVED or (kind == "tree" and known == CONFIG):
        return None
    return quote_near(name.replace("-", "_"), _FIELDS[kind])


def read_pool(attributes: Mapping[str, Any]) -> PoolSettings:
    """Return the settings that a pool's attributes, in any spelling, specify (2.5). Raises CommandError."""
    known, _, _ = normalise("pool", _options("pool", attributes))
    if "weight" in known:
        known["weight"] = max(known["weight"], MIN_WEIGHT)
    return msgspec.convert(known, PoolSettings)


def read_tree(attributes: Mapping[str, Any]) -> TreeSettings:
    """Return the settings that a tree's attributes, in any spelling, specify (2.4). Raises CommandError."""
    known = _options("tree", attributes)
    inside = attributes.get(CONFIG)
    if inside is not None:
        known[CONFIG] = _options("tree", inside, CONFIG)
    plain, _, _ = normalise("tree", known)
    config = plain.pop(CONFIG, {})
    return msgspec.convert({**plain, **config}, TreeSettings)


def _options(kind: Kind, attributes: Mapping[str, Any], where: str = "attributes") -> dict[str, Any]:
    return {name: value for name, value in items_of(attributes, where) if is_option(kind, name)}


def normalise(kind: Kind, attributes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    """Return what ``edit`` returns, for all attributes of a new pool or tree. Raises CommandError."""
    if not isinstance(attributes, Mapping):
        raise CommandError(f"attributes: must be a dictionary, got {format_value(attributes)}")
    return edit(kind, {}, {}, [Edit((name,), value) for name, value in attributes.items()])


def read_attribute(kind: Kind, item: PoolConfig | TreeConfig, path: Sequence[str]) -> Any:
    """Return the value for ``get @path``. Any accepted spelling is found; the empty path returns all attributes.

    An option of a tree that is only in its ``config`` is also found as an attribute. Raises CommandError with code
    RESOLVE if the attribute is not set."""
    value: Any = item.attributes
    names = canonical_path(kind, path)
    if kind == "tree" and names and names[0] not in value and names[0] in value.get(CONFIG, {}):
        value = value[CONFIG]
    for depth, name in enumerate(names):
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, list) and _index(name, value) is not None:
            value = value[int(name)]
        else:
            where = "/".join(path[: depth + 1])
            near = quote_near(name, value) if isinstance(value, Mapping) else ""
            raise CommandError(f'Attribute "{cut(where)}" is not found{near and f"; did you mean {near}?"}', RESOLVE)
    return value


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values of attributes are equal and of the same type: 1, 1.0 and true all differ."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _index(text: str, values: Sequence[Any]) -> int | None:
    if not re.fullmatch("-?[0-9]{1,9}", text):
        return None
    return int(text) if -len(values) <= int(text) < len(values) else None


def edit(
    kind: Kind, attributes: Mapping[str, Any], spelled: Mapping[str, str], edits: Iterable[Edit]
) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    """Return attributes, spellings and warnings after ``edits``; the arguments are not changed.

    A path into a missing dictionary of an option creates that dictionary. A dictionary that becomes empty is kept.
    Removing a missing attribute is no error. Raises CommandError with the path, the value and the allowed values; its
    code is RESOLVE for a path into a missing attribute that is no option."""
    editor = _Editor(kind, attributes, spelled)
    for change in edits:
        try:
            editor.apply(change)
        except CommandError as error:
            given = error.attributes.get(FIELD)
            if given is None:
                raise
            raise name_field(error, "/".join(canonical_path(kind, given.split("/")))) from None
    editor.check_size()
    return editor.attributes, editor.spelled, tuple(dict.fromkeys(editor.warnings))


class _Editor:
    """Attributes that are being edited. Values inside of ``attributes`` are shared and therefore never changed."""

    __slots__ = ("attributes", "given", "kind", "spelled", "unknown", "warnings")

    def __init__(self, kind: Kind, attributes: Mapping[str, Any], spelled: Mapping[str, str]) -> None:
        self.kind = kind
        self.attributes = dict(attributes)
        self.spelled = dict(spelled)
        self.warnings: list[str] = []
        self.unknown: set[str] = set()
        """Attributes that are no options and of which a warning exists already."""
        self.given: dict[str, str] = {}
        """Option that these edits have set as a whole -> the spelling that they used."""

    def apply(self, change: Edit) -> None:
        path, value = change.path, change.value
        if not path:
            raise CommandError("the path of an attribute is empty; name the attribute after the @")
        for name in path:
            _check_name(name)
        if len(path) > MAX_DEPTH:
            raise refuse("/".join(path), f"a path may have at most {MAX_DEPTH} names, this has {len(path)}")
        if self.kind != "tree" or path[0] != CONFIG:
            self.attributes = self._changed("", self.attributes, path, value, change.recursive)
        elif len(path) > 1:
            config = self._changed(f"{CONFIG}/", self.attributes.get(CONFIG, {}), path[1:], value, change.recursive)
            if config or CONFIG in self.attributes:
                self.attributes[CONFIG] = config
        else:
            self._replace_config(value)

    def check_size(self) -> None:
        """Raise CommandError if too many attributes are no options."""
        known = _FIELDS[self.kind]
        names = list(self.attributes)
        if self.kind == "tree" and CONFIG in names:
            names.remove(CONFIG)
            names += self.attributes[CONFIG]
        count = sum(name not in known for name in names)
        if count > MAX_CUSTOM_ATTRIBUTES:
            raise self._too_many(str(count))

    def _too_many(self, count: str) -> CommandError:
        return CommandError(
            f"a {self.kind} can have at most {MAX_CUSTOM_ATTRIBUTES} attributes that are no options, this would make "
            f"{count}; remove some"
        )

    def _replace_config(self, value: Any) -> None:
        self.attributes.pop(CONFIG, None)
        self.spelled = {key: name for key, name in self.spelled.items() if not key.startswith(f"{CONFIG}/")}
        if value is REMOVE:
            return
        config: dict[str, Any] = {}
        for name, inner in items_of(value, CONFIG):
            _check_name(name)
            config = self._changed(f"{CONFIG}/", config, (name,), inner)
        self.attributes[CONFIG] = config

    def _changed(
        self, place: str, container: Mapping[str, Any], path: tuple[str, ...], value: Any, recursive: bool = False
    ) -> dict[str, Any]:
        """Return ``container`` after one edit. ``place``: "" for the attributes, "config/" for a tree's ``config``."""
        result = dict(container)
        name, where = canonical_name(self.kind, path[0]), place + path[0]
        key = place + name
        if name in RESERVED:
            raise refuse(where, f"this attribute of a {self.kind} cannot be set or removed")
        field = _FIELDS[self.kind].get(name)
        if value is REMOVE and len(path) == 1:
            result.pop(name, None)
            self.spelled.pop(key, None)
            self.given.pop(key, None)
            return result
        if value is REMOVE and name not in result:
            if field is not None and name != ACL:
                _edited({}, field, path[1:], REMOVE, where)
            return result
        if field is None:
            result[name] = _edit_custom(result.get(name), path[1:], value, where, recursive)
            if len(result) > 2 * MAX_CUSTOM_ATTRIBUTES + len(_FIELDS[self.kind]):
                # This is checked here already, since each further edit copies all attributes.
                raise self._too_many("more than twice as many")
            if value is not REMOVE:
                self._warn_unknown(name, where)
            return result
        if value is not REMOVE:
            self._note_spelling(key, name, path, where, is_set=name in result)
        if len(path) == 1:
            result[name] = read_acl(value, where) if name == ACL else normalise_value(value, field, where)
        elif name == ACL:
            result[name] = edit_acl(result.get(name, ()), path[1:], value, where)
        else:
            result[name] = _edited(result.get(name, {}), field, path[1:], value, where)
        self._warn_about_value(place, name, where, result[name])
        return result

    def _note_spelling(self, key: str, name: str, path: tuple[str, ...], where: str, is_set: bool) -> None:
        folded = path[0].replace("-", "_")
        if len(path) == 1 and self.given.get(key, path[0]) != path[0]:
            raise refuse(where, f'given twice, also as "{self.given[key]}"; keep one of them')
        before = self.spelled.get(key, name)
        if is_set and before != folded and name != FREE_PAIR:
            raise refuse(where, f'this option is already set as "{before}"; use that name, or remove it first')
        if len(path) == 1:
            self.given[key] = path[0]
        if folded == name:
            self.spelled.pop(key, None)
        else:
            self.spelled[key] = folded

    def _warn_unknown(self, name: str, where: str) -> None:
        if where in self.unknown or (self.kind == "pool" and find_option("pool", name) is not None):
            return  # the validation of pools warns of options of YTsaurus
        self.unknown.add(where)
        near = quote_near(name, _FIELDS[self.kind]) if len(self.unknown) <= MAX_HINTS else ""
        self.warnings.append(
            f'"{cut(where)}" is no option of a {self.kind}: it is kept and has no effect'
            + (f"; did you mean {near}?" if near else "")
        )

    def _warn_about_value(self, place: str, name: str, where: str, value: Any) -> None:
        if self.kind == "pool" and name == "weight" and value < MIN_WEIGHT:
            self.warnings.append(
                f"{where}: {format_value(value)} is below the least weight and taken as {MIN_WEIGHT:g}"
            )
        if self.kind == "tree" and not place and name in self.attributes.get(CONFIG, {}):
            self.warnings.append(f"{where}: has no effect while {CONFIG}/{name} is set; set that, or remove it")


def _edited(current: Mapping[str, Any], kind: Type, path: Sequence[str], value: Any, where: str) -> dict[str, Any]:
    """Return the dictionary of an option after one key inside of it is changed."""
    members = members_of(kind)
    if members is None:
        raise refuse(where, f"is {allowed_words(kind)} and has no keys; set it as a whole")
    result = dict(current)
    key = known_key(path[0], members, where)
    inner = f"{where}/{path[0]}"
    if len(path) > 1:
        below = _edited(current.get(key, {}), members[key], path[1:], value, inner)
        if value is not REMOVE or key in current:
            result[key] = below
    elif value is REMOVE:
        result.pop(key, None)
    else:
        result[key] = normalise_value(value, members[key], inner)
    return result


def _edit_custom(current: Any, path: Sequence[str], value: Any, where: str, recursive: bool) -> Any:
    """Return an attribute that is no option after ``path`` inside of it is changed; an empty path changes the whole."""
    if path and current is None and not recursive:
        raise _missing(where)
    if not path:
        result = copy_plain(value, where, MAX_DEPTH)
    else:
        root: dict[str, Any] = {}
        target, source = root, {} if current is None else current
        for name in path[:-1]:
            target.update(_dictionary(source, where))
            source = target.get(name, {})
            where = f"{where}/{name}"
            if value is REMOVE and name not in target:
                return current
            if name not in target and not recursive:
                raise _missing(where)
            target[name] = {}
            target = target[name]
        target.update(_dictionary(source, where))
        if value is REMOVE:
            target.pop(path[-1], None)
        else:
            target[path[-1]] = copy_plain(value, f"{where}/{path[-1]}", MAX_DEPTH - len(path))
        result = root
    try:
        size = len(msgspec.json.encode(result))
    except UnicodeEncodeError:
        raise refuse(where, "holds text that is not valid Unicode") from None
    if size > MAX_VALUE_BYTES:
        raise refuse(where, f"takes {size} bytes as JSON, at most {MAX_VALUE_BYTES} are allowed")
    return result


def _missing(where: str) -> CommandError:
    """Return the error for a path into a missing attribute or dictionary."""
    what = "is not found and is no option; check the name; to create it, set it as a whole ({...}) or use recursive"
    return CommandError(f'Attribute "{cut(where)}" {what}', RESOLVE, {FIELD: cut(where)})


def _dictionary(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise refuse(where, f"is {format_value(value)} and has no keys; set it as a whole")
    return value


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise CommandError(
            f"the name of an attribute must be a printable text that is not empty, got {format_value(name)}"
        )
    if len(name) > MAX_NAME_LENGTH:
        raise CommandError(
            f"the name of an attribute may have at most {MAX_NAME_LENGTH} characters, {cut(name)} has {len(name)}"
        )
