"""A tree file in the making: pools of a foreign configuration, and notes on options that it cannot express. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, NamedTuple

from cpumond.cli.imports.options import DAEMONS, find_option
from cpumond.core.errors import ConfigError, UsageError
from cpumond.core.words import count, quoted
from cpumond.scheduler.model import ROOT_POOL, CommandError
from cpumond.scheduler.settings.attributes import is_option
from cpumond.scheduler.settings.tree_file import ApplyTree, PoolTable, Table, TreeTables, list_changes
from cpumond.scheduler.settings.values import format_value

CONSTANTS: Final[Mapping[str, Any]] = {"1e15": 1e15, "cpu": {"cpu": 1e15}, "true": True, "0": 0}
"""Texts in ``options`` that stand for values of other types."""
IN_MIB: Final = ("slurm", "fair", "capacity")
"""Tables in which memory without a unit is in MiB."""
BY_GUARANTEE: Final = ("capacity", "yunikorn")
"""Tables in which the queue furthest below its guarantee is served next, and a leaf is a FIFO by default."""
LEAST_WEIGHT: Final = 1e-6
OF_ALL: Final = {
    "guarantee_tolerance": 1,
    "max_operation_count_per_pool": 50_000,
    "max_running_operation_count_per_pool": 2000,
    "per_pool_counts_for_leaves_only": True,
}
"""Options that a tree gets unless it sets them: guarantees apply in full, and a pool without a count has no limit."""

RESOURCES: Final = {
    "cpu": "cpu", "vcore": "cpu", "vcores": "cpu", "memory": "memory", "mem": "memory", "memory-mb": "memory",
    "mb": "memory", "pods": "user_slots", "user_slots": "user_slots", "network": "network",
}  # fmt: skip
SUFFIXES: Final = {"": 1.0, "m": 1e-3, "k": 1e3, "K": 1e3} | {
    unit + end: base**power
    for power, unit in enumerate("KMGTPE", 1)
    for end, base in (("", 1000.0), ("i", 1024.0))
    if unit + end != "K"
}
AMOUNT: Final = re.compile(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([a-zA-Z]*)(%?)")


class Note(NamedTuple):
    """An option that could not be expressed unchanged: ``where`` : file and line, ``subject``: queue or account."""

    verdict: str
    option: str
    sentence: str
    where: str
    subject: str
    value: str


class At(NamedTuple):
    """The place of a value: ``where`` is the file and line."""

    where: str
    subject: str


def split_pairs(text: str) -> list[tuple[str, str]]:
    """Split ``name=amount,name=amount``."""
    return [(name, amount) for name, _, amount in (part.partition("=") for part in text.split(",") if part)]


@dataclass(slots=True)
class Making:
    """Pools, options of the tree and notes, as they are found. ``total``: resources of the cluster, if known.

    ``split``: parses resources and amounts, ``read_s``: parses a duration, both in the foreign notation. ``defaults``:
    options of pools that set none, their ``mode`` only without children. ``beside``: pools whose guarantee is added to
    those of the pools below. ``above``: pool -> resource -> amount that the pool may have above its guarantee."""

    table: str
    total: Mapping[str, float]
    split: Callable[[str], list[tuple[str, str]]] = split_pairs
    read_s: Callable[[str], float] = float
    options: dict[str, Any] = field(default_factory=dict)
    pools: dict[str, PoolTable] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    defaults: dict[str, Any] = field(default_factory=dict)
    beside: set[str] = field(default_factory=set)
    above: dict[str, dict[str, float]] = field(default_factory=dict)

    def add_pool(self, path: tuple[str, ...], parent: str, at: At) -> PoolTable:
        """Add a queue's pool, named by the last part of ``path``, and by parts before it until it is unique."""
        if not path[-1]:
            raise ConfigError(f"{at.where}: {at.subject}: it has no name")
        names = [clean(name) for name in path]
        name = names[-1]
        for above in reversed(names[:-1]):
            if name not in self.pools:
                break
            name = f"{above}:{name}"
        if name in self.pools:
            raise ConfigError(f"{at.where}: {at.subject} occurs twice")
        if name != path[-1]:
            self.note("approximated", "name", "names are unique in a tree, of letters, digits and -_.@", at, name)
        self.pools[name] = PoolTable(name=name, parent=parent, options={})
        return self.pools[name]

    def add_queue(self, path: tuple[str, ...], parent: str, at: At) -> PoolTable:
        """Like ``add_pool``, add a pool for a queue; the options of a topmost queue called root become the tree's."""
        if path == ("root",):
            return PoolTable(name=ROOT_POOL, parent="", options=self.options)
        return self.add_pool(path[path[0] == "root" :], parent, at)

    def note(self, verdict: str, option: str, sentence: str, at: At, value: object = "") -> None:
        text = " ".join(str(value).split())
        self.notes.append(Note(verdict, option, sentence, *at, text if len(text) <= 60 else text[:57] + "..."))

    def set_option(self, place: str, name: str, value: Any, at: At, target: dict[str, Any], resource: str = "") -> None:
        """Put the meaning of an option into ``target``, the options of a pool or tree; note what cannot be expressed.

        ``resource``: the resource of the amount ``value``, if it has only one."""
        row = find_option(self.table, place, name, value)
        if row is None:
            self.note("not known", name, "no option that is known here; it was ignored", at, value)
            return
        self.counts[row.verdict] += 1
        if row.verdict in ("expressible", "approximated"):
            try:
                for option in filter(None, row.becomes.split(", ")):
                    self._put(option, value, resource, target, name, at)
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
                text = f"{at.where}: {at.subject}: {name} cannot be read: {format_value(value)}"
                raise ConfigError(text) from None
        if row.verdict != "expressible":
            nearest = f"; nearest: {row.becomes}" if row.verdict == "not expressible" and row.becomes else ""
            self.note(row.verdict, name, row.sentence + nearest, at, value)

    def _put(self, option: str, value: Any, resource: str, target: dict[str, Any], name: str, at: At) -> None:
        option, _, constant = option.partition("=")
        option, _, permission = option.partition(":")
        last = option.rpartition("/")[2]
        text = str(value).strip()
        given: Any
        if option.startswith("(") or (text in ("-1", "") and not constant and not permission):
            return
        if constant:
            given = CONSTANTS.get(constant, constant)
        elif permission:
            given = _read_access(text, permission)
        elif last.endswith(("resources", "resource_limits", "lending_limit")):
            given = self.read_amounts([(resource, text)] if resource else self.split(text), name, at)
        elif last.endswith(("timeout", "run_time", "half_life")):
            given = self.read_s(text) * 1000
        elif last == "weight":
            given = max(self.read_amounts([("cpu", text.removesuffix("w"))], name, at)["cpu"], LEAST_WEIGHT)
        elif last == "max_share_ratio":
            given = float(text) / 100
        else:
            given = min(float(text), 1.0) if last.endswith("tolerance") else int(text)
        table, _, inner = option.rpartition("/")
        if target is self.options and not is_option("tree", table or option):
            self.note("not expressible", name, f"a tree has no {option} of its own", at, value)
        elif given != {}:
            merge(target, table, {inner: given}) if table else merge(target, option, given)

    def read_amounts(self, pairs: Iterable[tuple[str, str]], option: str, at: At) -> dict[str, float]:
        """Return amounts of resources; each resource that pools do not have is noted. Raises ValueError."""
        found: dict[str, float] = {}
        for name, text in pairs:
            known = RESOURCES.get(name.lower()) or ("gpu" if name.lower().endswith("gpu") else "")
            match = AMOUNT.fullmatch(text.strip())
            suffix = match[2] + "i" * (self.table == "slurm" and match[2] != "") if match else "?"
            if text.strip() == "-1":
                continue  # -1 means none
            if match is None or suffix not in SUFFIXES:
                raise ValueError(text)
            if not known or (match[3] and known not in self.total):
                why = "the total of the cluster is not known: give --total" if known else "pools have no such resource"
                self.note("not expressible", option, why, at, f"{name}={text}")
                continue
            unit = 2.0**20 if known == "memory" and not suffix and self.table in IN_MIB else 1.0
            factor = self.total[known] / 100 if match[3] else unit * SUFFIXES[suffix]
            found[known] = float(match[1]) * factor
        return found

    def finish(self, tree: str) -> TreeTables:
        """The tables of a tree that a scheduler accepts. Raises ConfigError."""
        if not self.pools:
            raise ConfigError("these files contain no queues: a tree without pools would remove the existing ones")
        below: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for pool in reversed(self.pools.values()):
            for option in self.defaults.keys() - pool.options.keys():
                if option != "mode" or pool.name not in below:
                    pool.options[option] = self.defaults[option]
            self._fit(pool, below[pool.name])
            below[pool.parent].append(pool.options)
        tables = TreeTables(Table(options=OF_ALL | self.options), tuple(self.pools.values()))
        try:
            list_changes(None, ApplyTree(tree, tables))
        except CommandError as error:
            raise ConfigError(f"the result would be refused: {error}") from None
        return tables

    def _fit(self, pool: PoolTable, below: list[dict[str, Any]]) -> None:
        """Make a pool valid here: parents get the guarantees of their children, FIFO pools have no children."""
        at, options = At("", f"pool {quoted(pool.name)}"), pool.options
        if options.get("mode") == "fifo" and (below or options.get("create_ephemeral_subpools")):
            del options["mode"]
            self.note("approximated", "mode", "a FIFO pool cannot have pools below it, so it shares fairly", at)
        sums: Counter[str] = Counter()
        for each in below:
            sums.update(each.get("strong_guarantee_resources", {}))
        own = options.get("strong_guarantee_resources", {})
        if self.table in BY_GUARANTEE and "weight" not in options:
            weight = own.get("cpu") or options.get("resource_limits", self.total).get("cpu")
            options |= {"weight": weight} if weight else {}
        if not own and not sums:
            return
        made = {"cpu": 0.0} | {
            name: own.get(name, 0.0) + sums[name] if pool.name in self.beside else max(own.get(name, 0.0), sums[name])
            for name in own | sums
        }
        if pool.name not in self.beside and any(made[name] > own[name] for name in own):
            self.note("approximated", "guarantee", "raised to the sum of those below, which are within it", at, own)
        options["strong_guarantee_resources"] = made
        if above := self.above.get(pool.name):
            merge(options, "resource_limits", {name: made[name] + above[name] for name in made.keys() & above})

    def report(self) -> Iterator[str]:
        """Yield the options that were not expressed unchanged, each once with all its places; the totals come last."""
        notes = sorted(self.notes, key=lambda note: (note.verdict, note.option, note.sentence))
        for (verdict, option, sentence), found in groupby(notes, key=lambda note: note[:3]):
            if verdict != DAEMONS:
                yield f"{verdict}: {option}: {sentence}"
                yield from (f"  {': '.join(filter(None, note[3:]))}" for note in found)
        if left := sorted({note.option for note in notes if note.verdict == DAEMONS}):
            yield f"{DAEMONS}, and left out: {', '.join(left)}"
        counts = ", ".join(f"{number} {verdict}" for verdict, number in sorted(self.counts.items()))
        yield f"{count(len(self.pools), 'pool')}; options: {counts or 'none'}"


def read_total(text: str) -> dict[str, float]:
    """Parse resources such as ``cpu=1000,memory=4Ti``. Raises UsageError."""
    making = Making("kueue", {})
    try:
        found = making.read_amounts(split_pairs(text), "--total", At("", ""))
    except ValueError:
        raise UsageError(f"--total: expected amounts like cpu=1000,memory=4Ti, got {text}") from None
    if making.notes:
        raise UsageError("--total: expected only the resources cpu, memory, gpu, user_slots, network")
    return found


def clean(name: str) -> str:
    """Return a name with only characters that names of pools may have, without colons: these stand between names."""
    return re.sub(r"^[.@]|[^-_a-z0-9A-Z.@]", "-", name)


def merge(target: dict[str, Any], key: str, value: Any) -> None:
    """Set an option; tables and lists absorb the new value."""
    if isinstance(value, dict):
        inside = target.setdefault(key, {})
        for name, each in value.items():
            merge(inside, name, each)
    else:
        target[key] = [*target.get(key, ()), *value] if isinstance(value, list) else value


def _read_access(text: str, permission: str) -> list[dict[str, Any]]:
    """Return entries for ``user,user group,group``, ``*`` for everyone, a blank for no user."""
    subjects = ["everyone"] if "*" in text else re.findall(r"[^\s,]+", text)
    return [{"action": "allow", "subjects": subjects, "permissions": [permission]}] if subjects else []
