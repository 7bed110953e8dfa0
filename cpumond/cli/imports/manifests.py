"""YuniKorn's queues.yaml, and Kueue's ClusterQueue, Cohort, LocalQueue and ResourceFlavor. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cpumond.cli.imports.making import At, Making, clean
from cpumond.cli.scheduler.tree_text import read_yaml
from cpumond.core.decode import ContentError
from cpumond.core.errors import ConfigError, UsageError
from cpumond.core.measures import parse_duration_s
from cpumond.core.toml_text import Path
from cpumond.scheduler.model import ROOT_POOL

KINDS: Final = ("ResourceFlavor", "Cohort", "ClusterQueue", "LocalQueue")


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of a document; ``path`` is its own in it, ``lines`` has the line of each path."""

    file: str
    value: dict[str, Any]
    path: Path
    lines: Mapping[Path, int]

    def at(self, subject: str, *inside: str) -> At:
        path = (*self.path, *inside)
        while path and path not in self.lines:
            path = path[:-1]
        return At(f"{self.file}:{self.lines.get(path, 1)}" if self.file else "", subject)

    def go(self, key: str) -> _Table:
        value = self.value.get(key) or {}
        if not isinstance(value, dict):
            raise ConfigError(f"{self.at('', key).where}: {key} must be a table")
        return _Table(self.file, value, (*self.path, key), self.lines)

    def text(self, *keys: str) -> str:
        """The text of the first of these keys that is there, "" without any. Raises ConfigError."""
        key = next((key for key in keys if self.value.get(key) is not None), "")
        value = self.value.get(key, "")
        if isinstance(value, dict | list):
            raise ConfigError(f"{self.at('', key).where}: {key} must be a text")
        return str(value)

    def items(self, key: str) -> list[_Table]:
        """The tables of a list. Raises ConfigError."""
        found = self.value.get(key) or []
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise ConfigError(f"{self.at('', key).where}: {key} must be a list of tables")
        return [_Table(self.file, each, (*self.path, key, str(at)), self.lines) for at, each in enumerate(found)]

    def leaves(self, *skip: str) -> Iterator[tuple[str, str, Any, Path]]:
        """Each value: its name with dots, the last part of it, the value and the path inside."""
        for key, value in self.value.items():
            if key in skip:
                continue
            if isinstance(value, dict) and value:
                inner = _Table(self.file, value, (*self.path, key), self.lines)
                yield from ((f"{key}.{name}", last, each, (key, *path)) for name, last, each, path in inner.leaves())
            else:
                text = str(value).lower() if isinstance(value, bool) else value
                yield str(key), str(key), text, (str(key),)

    def say(
        self, making: Making, place: str, subject: str, options: dict[str, Any], *skip: str, resource: str = ""
    ) -> None:
        for name, last, value, path in self.leaves(*skip):
            making.say(place, name, value, self.at(subject, *path), options, resource or last)


def _read(texts: Mapping[str, str]) -> Iterator[_Table]:
    for file, text in texts.items():
        before = 0
        for part in re.split(r"^---(?=\s|$)", text, flags=re.MULTILINE):
            lines: dict[Path, int] = {}
            try:
                value = read_yaml(part, lines)
            except ContentError as error:
                raise ConfigError(f"{file}: in what begins in line {before + 1}: {error}") from None
            except UsageError:
                raise UsageError(f"{file}: YAML needs PyYAML: pip install pyyaml") from None
            if not isinstance(value, dict):
                raise ConfigError(f"{file}:{before + 1}: expected a table")
            yield _Table(file, value, (), {path: line + before for path, line in lines.items()})
            before += part.count("\n")


# --- YuniKorn


def read_yunikorn(texts: Mapping[str, str], total: Mapping[str, float]) -> Making:
    """Pools of the one partition. Raises ConfigError."""
    making = Making("yunikorn", total, read_s=parse_duration_s, defaults={"mode": "fifo"})
    partitions = [each for table in _read(texts) for each in table.items("partitions")]
    if len(partitions) != 1:
        raise ConfigError(f"{', '.join(texts)}: expected `partitions` with one of them, not {len(partitions)}")
    partitions[0].say(making, "partition", "the partition", making.options, "queues", "name", "limits")
    _say_limits(making, partitions[0], "the partition", making.options)
    for queue in partitions[0].items("queues"):
        _read_queue(making, queue, (), ROOT_POOL)
    return making


def _read_queue(making: Making, queue: _Table, above: tuple[str, ...], parent: str) -> None:
    path, below = (*above, queue.text("name")), queue.items("queues")
    at = queue.at(f"queue {'.'.join(path)}")
    pool = making.add_queue(path, parent, at)
    queue.say(making, "queue", at.subject, pool.options, "name", "queues", "limits", *["parent"] * bool(below))
    _say_limits(making, queue, at.subject, pool.options)
    for each in below:
        _read_queue(making, each, path, pool.name)


def _say_limits(making: Making, table: _Table, subject: str, options: dict[str, Any]) -> None:
    for limit in table.items("limits"):
        place = "limit of the root" if options is making.options else "limit"
        for_all = limit.value.get("users") == ["*"] and not limit.value.get("groups")
        place = f"{place} for all users" if for_all else "limit"
        limit.say(making, place, subject, options, "limit", "users", "groups")


# --- Kueue


@dataclass(frozen=True, slots=True)
class _Kueue:
    making: Making
    found: Mapping[str, Mapping[str, _Table]]

    def make_cohort(self, name: str, below: tuple[str, ...] = ()) -> str:
        """The name of a cohort's pool, which is made, with those above it, where it is not yet there."""
        pool_name = clean(name)
        if name in below:
            raise ConfigError(f"cohort {name} is above itself")
        if name and pool_name not in self.making.pools:
            table = self.found["Cohort"].get(name, _Table("", {}, (), {}))
            above = table.text("parentName", "parent")
            pool = self.making.add_pool((name,), self.make_cohort(above, (*below, name)), table.at(f"Cohort {name}"))
            self.making.beside.add(pool.name)
            self.say_all("Cohort", name, table, pool.name, is_root=not above)
        return pool_name or ROOT_POOL

    def say_all(self, kind: str, name: str, table: _Table, pool: str, *, is_root: bool) -> list[str]:
        """Say what an object says; quotas are summed over flavors, whose names are given."""
        options, subject = self.making.pools[pool].options, f"{kind} {name}"
        table.say(self.making, kind, subject, options, "resourceGroups")
        flavors = [each for group in table.items("resourceGroups") for each in group.items("flavors")]
        sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
        times: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for flavor in flavors:
            for quota in flavor.items("resources"):
                one: dict[str, dict[str, float]] = {}
                about = f"{subject} flavor {flavor.text('name')}"
                quota.say(self.making, kind, about, one, "name", resource=quota.text("name"))
                for option, amounts in one.items():
                    sums[option].update(amounts)
                    times[option].update(amounts.keys())
                if "lending_limit" not in one:  # it may lend everything
                    sums["lending_limit"].update(one.get("strong_guarantee_resources", {}))
        borrowed = sums.pop("resource_limits", Counter())
        most, of_limits = times["strong_guarantee_resources"], times["resource_limits"]
        options |= {option: dict(by) for option, by in sums.items() if times[option]}
        # So may a flavor without a borrowingLimit borrow.
        limited: dict[str, float] = {known: borrowed[known] for known in borrowed if of_limits[known] == most[known]}
        self.making.above[pool] = None if is_root else limited
        return [flavor.text("name") for flavor in flavors]


def _sort_objects(making: Making, texts: Mapping[str, str]) -> dict[str, dict[str, _Table]]:
    """What objects of each kind say, by their names. Raises ConfigError."""
    found: dict[str, dict[str, _Table]] = {kind: {} for kind in KINDS}
    for document in _read(texts):
        for each in document.items("items") if "items" in document.value else [document]:
            kind, meta = each.text("kind"), each.go("metadata")
            name = "/".join(filter(None, (meta.text("namespace"), meta.text("name"))))
            if kind not in found:
                if each.value:
                    making.note("not known", kind, "such an object makes no pool", each.at(f"{kind} {name}"))
            elif name in found[kind]:
                raise ConfigError(f"{each.at('').where}: {kind} {name} is there twice")
            else:
                found[kind][name] = each.go("spec")
    return found


def read_kueue(texts: Mapping[str, str], total: Mapping[str, float]) -> Making:
    """Pools of cohorts and queues. Raises ConfigError."""
    making = Making("kueue", total)
    found = _sort_objects(making, texts)
    kueue, pools, filters = _Kueue(making, found), {}, {}
    for name, table in found["ResourceFlavor"].items():
        table.say(making, "ResourceFlavor", f"ResourceFlavor {name}", {})
        filters[name] = " & ".join(f"{key}:{value}" for key, value in sorted(table.go("nodeLabels").value.items()))
    cohorts = {name: table.text("cohort", "cohortName") for name, table in found["ClusterQueue"].items()}
    for name in (*found["Cohort"], *cohorts.values()):
        kueue.make_cohort(name)
    for name, table in found["ClusterQueue"].items():
        cohort, at = cohorts[name], table.at(f"ClusterQueue {name}")
        pool = making.add_pool((cohort, name) if cohort else (name,), kueue.make_cohort(cohort), at)
        flavors = kueue.say_all("ClusterQueue", name, table, pool.name, is_root=not cohort)
        fits = [filters.get(each, "") for each in flavors]
        if fits and all(fits):
            pool.options["scheduling_tag_filter"] = " | ".join(f"({each})" for each in dict.fromkeys(fits))
        if "admissionScope" not in table.value:
            pool.options["mode"] = "fifo"
        if not table.go("preemption").value.get("reclaimWithinCohort"):
            pool.options["fair_share_starvation_timeout"] = 1e15
            making.note("approximated", "preemption", "none in the cohort, which is the default there", at)
        pools[name] = pool
    for name, table in found["LocalQueue"].items():
        queue, at = table.text("clusterQueue"), table.at(f"LocalQueue {name}")
        if queue not in pools:
            raise ConfigError(f"{at.where}: {at.subject}: its ClusterQueue {queue} is not among the files")
        options: dict[str, Any] = {}
        if "admissionScope" in found["ClusterQueue"][queue].value:
            options = making.add_pool((queue, *name.split("/")), pools[queue].name, at).options
        table.say(making, "LocalQueue", at.subject, options)
    return making
