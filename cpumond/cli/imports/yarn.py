"""YARN: fair-scheduler.xml or capacity-scheduler.xml, and yarn-site.xml beside them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from cpumond.cli.imports.making import At, Making
from cpumond.cli.imports.tables import Table, read_queue, read_xml
from cpumond.core.errors import ConfigError

PREFIX: Final = "yarn.scheduler.capacity."
OF_QUEUES: Final = ("queueMaxResourcesDefault", "defaultQueueSchedulingPolicy")
PART: Final = re.compile(r"([\d.]+\s*%?)\s*(mb|memory|vcores?|cpu|)")
NOWHERE: Final = At("", "")
NEVER: Final = dict.fromkeys(("fair_share_starvation_timeout", "min_share_preemption_timeout"), 1e15)


def _split(text: str) -> list[tuple[str, str]]:
    """Split ``X mb, Y vcores``, ``X% cpu, Y% memory``, ``X%``, ``memory-mb=X, vcores=Y``, ``[memory=X,vcores=Y]``."""
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
    """Read the pools from the files of one scheduler. Raises ConfigError."""
    roots = {file: read_xml(text, file) for file, text in texts.items()}
    is_fair = any(name == "allocations" for name, _ in roots.values())
    making = Making("fair" if is_fair else "capacity", total, _split)
    properties: dict[str, tuple[str, At]] = {}
    for file, (name, root) in roots.items():
        if name == "allocations":
            _read_allocations(making, root)
        elif name == "configuration":
            for other, _, value, path in root.leaves("properties"):
                making.note("not known", other, "no property; it was ignored", root.at("the cluster", *path), value)
            for each in root.items("properties"):
                properties[each.text("name")] = (each.text("value"), each.at("the cluster"))
        else:
            raise ConfigError(f"{file}: is neither <allocations> of a fair scheduler nor a <configuration>")
    if is_fair:
        for name, (value, at) in properties.items():
            making.set_option("property", name, value, at, making.options)
    else:
        _read_capacity(making, properties)
    return making


def _read_allocations(making: Making, root: Table) -> None:
    for user in root.items("users"):
        user.translate(making, "user", f"user {user.text('name')}", making.options, "name")
    for name, _, value, path in root.leaves("queues", "users"):
        target = making.defaults if name in OF_QUEUES else making.options
        making.set_option("allocations", name, value, root.at("the cluster", *path), target)
    for queue in root.items("queues"):
        read_queue(making, queue)
    if not NEVER.keys() & making.options.keys():
        making.options |= NEVER
        why = "no default time-out: nothing is preempted, neither there nor here"
        making.note("approximated", "preemption", why, At(root.file, "the cluster"))


def _read_capacity(making: Making, properties: Mapping[str, tuple[str, At]]) -> None:
    making.defaults["mode"] = "fifo"
    pools = {"root": (making.add_queue(("root",), "", NOWHERE), 1.0)}
    for path in (pending := ["root"]):
        queues, at = properties.get(f"{PREFIX}{path}.queues", ("", NOWHERE))
        parent, share = pools[path]
        for below in (f"{path}.{name}" for name in re.split(r"[\s,]+", queues) if name):
            pool = making.add_queue(tuple(below.split(".")), parent.name, at._replace(subject=f"queue {below}"))
            text = properties.get(f"{PREFIX}{below}.capacity", ("", NOWHERE))[0]
            own = share * float(text) / 100 if re.fullmatch(r"\d+(\.\d*)?", text) else 0.0
            if own and making.total:
                pool.options["strong_guarantee_resources"] = {key: own * each for key, each in making.total.items()}
            pools[below] = (pool, own)
            pending.append(below)
    for name, (value, at) in properties.items():
        rest = path = name.removeprefix(PREFIX)
        while path and path not in pools:
            path = path.rpartition(".")[0]
        if path:
            options = {} if rest == "root.capacity" else pools[path][0].options
            of_queue = at._replace(subject=f"queue {path}")
            making.set_option("queue", rest.removeprefix(f"{path}."), value, of_queue, options)
        else:
            making.set_option("property", rest, value, at, making.options)
