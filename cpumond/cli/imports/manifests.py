"""YuniKorn's queues.yaml, and Kueue's ClusterQueue, Cohort, LocalQueue and ResourceFlavor. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cpumond.cli.imports.making import RESOURCES, Making, clean
from cpumond.cli.imports.tables import Table, read_documents, read_queue, translate_limits
from cpumond.core.errors import ConfigError
from cpumond.core.measures import parse_duration_s
from cpumond.scheduler.model import ROOT_POOL

KINDS: Final = ("ResourceFlavor", "Cohort", "ClusterQueue", "LocalQueue")


# --- YuniKorn


def read_yunikorn(texts: Mapping[str, str], total: Mapping[str, float]) -> Making:
    """Read the pools of the only partition. Raises ConfigError."""
    making = Making("yunikorn", total, read_s=parse_duration_s, defaults={"mode": "fifo"})
    partitions = [each for table in read_documents(texts) for each in table.items("partitions")]
    if len(partitions) != 1:
        raise ConfigError(f"{', '.join(texts)}: expected `partitions` with one entry, not {len(partitions)}")
    partitions[0].translate(making, "partition", "the partition", making.options, "queues", "name", "limits")
    translate_limits(making, partitions[0], "the partition", making.options)
    for queue in partitions[0].items("queues"):
        read_queue(making, queue)
    return making


# --- Kueue


@dataclass(frozen=True, slots=True)
class _Kueue:
    making: Making
    found: Mapping[str, Mapping[str, Table]]

    def make_cohort(self, name: str, below: tuple[str, ...] = ()) -> str:
        """Return the name of a cohort's pool; the pool and those above it are created if they do not exist yet."""
        pool_name = clean(name)
        if name in below:
            raise ConfigError(f"cohort {name} is above itself")
        if name and pool_name not in self.making.pools:
            table = self.found["Cohort"].get(name, Table("", {}, (), {}))
            above = table.text("parentName", "parent")
            pool = self.making.add_pool((name,), self.make_cohort(above, (*below, name)), table.at(f"Cohort {name}"))
            self.making.beside.add(pool.name)
            self.translate_quotas("Cohort", name, table, pool.name, is_root=not above)
        return pool_name or ROOT_POOL

    def translate_quotas(self, kind: str, name: str, table: Table, pool: str, *, is_root: bool) -> list[str]:
        """Convert the options of an object; quotas are summed over flavors, whose names are returned."""
        options, subject = self.making.pools[pool].options, f"{kind} {name}"
        table.translate(self.making, kind, subject, options, "resourceGroups")
        flavors = [each for group in table.items("resourceGroups") for each in group.items("flavors")]
        sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
        times: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for flavor in flavors:
            for quota in flavor.items("resources"):
                one: dict[str, dict[str, float]] = {}
                about = f"{subject} flavor {flavor.text('name')}"
                quota.translate(self.making, kind, about, one, "name", resource=quota.text("name"))
                for option, amounts in one.items():
                    sums[option].update(amounts)
                    times[option].update(amounts.keys())
                if "lending_limit" not in one:  # then everything may be lent
                    sums["lending_limit"].update(one.get("strong_guarantee_resources", {}))
        borrowed = sums.pop("resource_limits", Counter())
        most, of_limits = times["strong_guarantee_resources"], times["resource_limits"]
        options |= {option: dict(by) for option, by in sums.items() if times[option]}
        # A flavor without a borrowingLimit may borrow without limit, too.
        limited: dict[str, float] = {known: borrowed[known] for known in borrowed if of_limits[known] == most[known]}
        self.making.above[pool] = dict.fromkeys((*RESOURCES.values(), "gpu"), 0.0) if is_root else limited
        return [flavor.text("name") for flavor in flavors]


def _sort_objects(making: Making, texts: Mapping[str, str]) -> dict[str, dict[str, Table]]:
    """The contents of the objects of each kind, by their names. Raises ConfigError."""
    found: dict[str, dict[str, Table]] = {kind: {} for kind in KINDS}
    for document in read_documents(texts):
        for each in document.items("items") if "items" in document.value else [document]:
            kind, meta = each.text("kind"), each.go("metadata")
            name = "/".join(filter(None, (meta.text("namespace"), meta.text("name"))))
            if kind not in found:
                if each.value:
                    making.note("not known", kind, "such an object makes no pool", each.at(f"{kind} {name}"))
            elif name in found[kind]:
                raise ConfigError(f"{each.at('').where}: {kind} {name} occurs twice")
            else:
                found[kind][name] = each.go("spec")
    return found


def read_kueue(texts: Mapping[str, str], total: Mapping[str, float]) -> Making:
    """Read pools of cohorts and queues. Raises ConfigError."""
    making = Making("kueue", total)
    found = _sort_objects(making, texts)
    kueue, pools, filters = _Kueue(making, found), {}, {}
    for name, table in found["ResourceFlavor"].items():
        table.translate(making, "ResourceFlavor", f"ResourceFlavor {name}", {})
        filters[name] = " & ".join(f"{key}:{value}" for key, value in sorted(table.go("nodeLabels").value.items()))
    cohorts = {name: table.text("cohort", "cohortName") for name, table in found["ClusterQueue"].items()}
    for name in (*found["Cohort"], *cohorts.values()):
        kueue.make_cohort(name)
    for name, table in found["ClusterQueue"].items():
        cohort, at = cohorts[name], table.at(f"ClusterQueue {name}")
        pool = making.add_pool((cohort, name) if cohort else (name,), kueue.make_cohort(cohort), at)
        flavors = kueue.translate_quotas("ClusterQueue", name, table, pool.name, is_root=not cohort)
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
        table.translate(making, "LocalQueue", at.subject, options)
    return making
