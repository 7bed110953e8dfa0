"""YARN: fair-scheduler.xml or capacity-scheduler.xml, and yarn-site.xml beside them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from xml.parsers import expat

from cpumond.cli.imports.making import At, Making
from cpumond.core.errors import ConfigError
from cpumond.scheduler.model import ROOT_POOL

PREFIX: Final = "yarn.scheduler.capacity."
QUEUES: Final = ("queue", "pool")
PART: Final = re.compile(r"([\d.]+\s*%?)\s*(mb|memory|vcores?|cpu|)")
NEVER: Final = dict.fromkeys(("fair_share_starvation_timeout", "min_share_preemption_timeout"), 1e15)
MAX_DEPTH: Final = 100


@dataclass(slots=True)
class _Element:
    tag: str
    attributes: dict[str, str]
    line: int
    text: str = ""
    children: list[_Element] = field(default_factory=list)

    def list(self, *tags: str) -> list[_Element]:
        return [child for child in self.children if child.tag in tags]

    def find(self, tag: str) -> str:
        """The text of the first element in it of that name, "" without one."""
        return next((child.text.strip() for child in self.list(tag)), "")


def _read_xml(text: str, file: str) -> _Element:
    """The root, with the line of each element. A DOCTYPE is refused: an entity may stand for gigabytes, or a file."""
    parser = expat.ParserCreate("utf-8")  # whatever its declaration says: it was decoded
    stack = [_Element("", {}, 0)]

    def refuse(*_: object) -> None:
        raise ConfigError(f"{file}:{parser.CurrentLineNumber}: a DOCTYPE is not read: remove it")

    def begin(tag: str, attributes: dict[str, str]) -> None:
        if len(stack) > MAX_DEPTH:
            raise ConfigError(f"{file}:{parser.CurrentLineNumber}: elements are nested deeper than {MAX_DEPTH}")
        stack.append(_Element(tag, attributes, parser.CurrentLineNumber))
        stack[-2].children.append(stack[-1])

    def add(part: str) -> None:
        stack[-1].text += part

    parser.StartDoctypeDeclHandler, parser.StartElementHandler = refuse, begin
    parser.EndElementHandler, parser.CharacterDataHandler, parser.buffer_text = lambda _: stack.pop(), add, True
    try:
        parser.Parse(text.encode(), True)
    except expat.ExpatError as error:
        raise ConfigError(f"{file}:{error.lineno}: is no XML: {expat.ErrorString(error.code)}") from None
    return stack[0].children[0]


def _split(text: str) -> list[tuple[str, str]]:
    """``X mb, Y vcores``, ``X% cpu, Y% memory``, ``X%``, ``memory-mb=X, vcores=Y``, ``[memory=X,vcores=Y]``."""
    found: list[tuple[str, str]] = []
    for part in text.strip(" []").lower().split(","):
        name, equals, amount = (each.strip() for each in part.partition("="))
        match = PART.fullmatch(part.strip())
        if not equals and (match is None or not (match[2] or match[1].endswith("%"))):
            raise ValueError(text)
        if match is not None:
            name, amount = match[2], match[1].replace(" ", "")
        found += [(each, amount) for each in ([name] if name else ("cpu", "memory"))]
    return found


def read(texts: Mapping[str, str], total: Mapping[str, float]) -> Making:
    """Pools of the files of one scheduler. Raises ConfigError."""
    roots = {file: _read_xml(text, file) for file, text in texts.items()}
    is_fair = any(root.tag == "allocations" for root in roots.values())
    making = Making("fair" if is_fair else "capacity", total, _split)
    properties: dict[str, tuple[str, str]] = {}
    for file, root in roots.items():
        if root.tag == "allocations":
            _read_allocations(making, root, file)
        elif root.tag == "configuration":
            for each in root.children:
                where = f"{file}:{each.line}"
                if each.tag != "property":
                    making.note("not known", each.tag, "no property; nothing was made of it", At(where, "the cluster"))
                else:
                    properties[each.find("name")] = (each.find("value"), where)
        else:
            raise ConfigError(f"{file}: is neither <allocations> of a fair scheduler nor a <configuration>")
    if is_fair:
        for name, (value, where) in properties.items():
            making.say("property", name, value, At(where, "the cluster"), making.options)
    else:
        _read_capacity(making, properties)
    return making


def _read_allocations(making: Making, root: _Element, file: str) -> None:
    for each in root.children:
        at, place = At(f"{file}:{each.line}", "the cluster"), "allocations"
        if each.tag == "user":
            for child in each.children:
                who = At(f"{file}:{child.line}", f"user {each.attributes.get('name', '')}")
                making.say("user", child.tag, child.text.strip(), who, making.options)
        elif each.tag not in QUEUES:
            is_default = each.tag in ("queueMaxResourcesDefault", "defaultQueueSchedulingPolicy")
            making.say(place, each.tag, each.text.strip(), at, making.defaults if is_default else making.options)
    for each in root.list(*QUEUES):
        _read_queue(making, each, file, (), ROOT_POOL)
    if not NEVER.keys() & making.options.keys():
        making.options |= NEVER
        making.note("approximated", "preemption", "no default time-out: nothing is preempted, there and here",
                    At(file, "the cluster"))  # fmt: skip


def _read_queue(making: Making, element: _Element, file: str, above: tuple[str, ...], parent: str) -> None:
    path = (*above, element.attributes.get("name", "").strip().removeprefix("root."))
    at = At(f"{file}:{element.line}", f"queue {'.'.join(path)}")
    pool = making.add_queue(path, parent, at)
    for child in element.children:
        if child.tag not in QUEUES:
            who = At(f"{file}:{child.line}", at.subject)
            making.say("queue", child.tag, child.text.strip() or " ", who, pool.options)
    for child in (below := element.list(*QUEUES)):
        _read_queue(making, child, file, path, pool.name)
    if element.attributes.get("type") == "parent" and not below:
        making.say("queue", "type", "parent", at, pool.options)


def _read_capacity(making: Making, properties: Mapping[str, tuple[str, str]]) -> None:
    making.defaults["mode"] = "fifo"
    pools = {"root": (making.add_queue(("root",), "", At("", "")), 1.0)}
    for path in (pending := ["root"]):
        queues, where = properties.get(f"{PREFIX}{path}.queues", ("", ""))
        parent, share = pools[path]
        for below in (f"{path}.{name}" for name in re.split(r"[\s,]+", queues) if name):
            pool = making.add_queue(tuple(below.split(".")), parent.name, At(where, f"queue {below}"))
            text = properties.get(f"{PREFIX}{below}.capacity", ("", ""))[0]
            own = share * float(text) / 100 if re.fullmatch(r"\d+(\.\d*)?", text) else 0.0
            if own and making.total:
                pool.options["strong_guarantee_resources"] = {key: own * each for key, each in making.total.items()}
            pools[below] = (pool, own)
            pending.append(below)
    for name, (value, where) in properties.items():
        rest = path = name.removeprefix(PREFIX)
        while path and path not in pools:
            path = path.rpartition(".")[0]
        if path:
            options = {} if rest == "root.capacity" else pools[path][0].options
            making.say("queue", rest.removeprefix(f"{path}."), value, At(where, f"queue {path}"), options)
        else:
            making.say("property", rest, value, At(where, "the cluster"), making.options)
