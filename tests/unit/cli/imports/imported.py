"""Configurations of other schedulers in a scheduler, and what their own rules give.

Each rule is written down a second time, from the documentation of its system and from the files, without what it tests:
a queue's share where all that is in ``hungry`` wants more than there is.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from scheduler_world import TREE, World

from cpumond.cli.imports.command import find_reader
from cpumond.cli.imports.making import Making
from cpumond.cli.scheduler.tree_text import read_tree_text, write_tree
from cpumond.fairshare.resources import CPU
from cpumond.scheduler.settings.tree_file import ApplyTree

DATA = Path(__file__).resolve().parents[3] / "data" / "imports"


def read(*names: str, total: Mapping[str, float] | None = None, change: Callable[[str], str] = str) -> Making:
    kinds = {".xml": "yarn", ".dump": "slurm", "queues.yaml": "yunikorn", "kueue.yaml": "kueue"}
    kind = next(kind for end, kind in kinds.items() if names[0].endswith(end))
    texts = {name: change((DATA / name).read_text(encoding="utf-8")) for name in names}
    return find_reader(kind)(texts, total or {})


def put(making: Making, cores: float) -> World:
    """A scheduler with what the file of an import says, and one node that any job fits."""
    text = write_tree(TREE, making.finish(TREE), "toml")
    world = World()
    found = read_tree_text(text, "imported.toml", "toml")
    world.do(ApplyTree(found.tree, found.tables))
    world.node("n1", cpu=cores, memory=2**42, user_slots=10**6, tags=("pool:general", "pool:gpu", "accelerator:a100"))
    return world


def share(world: World, hungry: list[str], cores: float) -> dict[str, float]:
    """Cores that are each pool's fair share, where ``hungry`` pools have an operation of more than there is."""
    for pool in hungry:
        # A user may have 24 cores of it.
        for user in ("u",) if pool != "analysts" else "abcdefghij":
            world.start(pool, user, jobs=int(cores) + 1, cpu=1.0)
    world.update()
    return {name: pool.fair_share[CPU] * cores for name, pool in world.tree().pools.items()}


@dataclass
class Queue:
    """A queue as its own system knows it: ``used`` is what a rule gave it."""

    name: str
    weight: float = 1.0
    least: float = 0.0
    most: float = float("inf")
    children: list[Queue] = field(default_factory=list)
    used: float = 0.0

    def list_all(self) -> list[Queue]:
        return [self, *(queue for child in self.children for queue in child.list_all())]

    def keep(self, hungry: set[str]) -> Queue | None:
        """The queue with those alone that want something."""
        below = [kept for child in self.children if (kept := child.keep(hungry))]
        return Queue(self.name, self.weight, self.least, self.most, below) if below or self.name in hungry else None


def used(root: Queue | None) -> dict[str, float]:
    return {} if root is None else {queue.name: queue.used for queue in root.list_all()}


def fill(root: Queue, cores: float, rank: Callable[[Queue], float]) -> dict[str, float]:
    """Hand out cores one by one, from the root down each to the child of the lowest rank that has room."""

    def has_room(queue: Queue) -> bool:
        return queue.used + 1 <= queue.most and (not queue.children or any(map(has_room, queue.children)))

    for _ in range(int(cores)):
        queue = root
        while queue is not None:
            queue.used += 1
            queue = min(filter(has_room, queue.children), key=rank, default=None)  # type: ignore[assignment]
        if not any(map(has_room, root.children)):
            break
    return used(root)


# --- YARN


def read_vcores(text: str, cores: float) -> float:
    found = re.search(r"([\d.]+)(%?) cpu|vcores=([\d.]+)|([\d.]+) vcores", text)
    assert found is not None
    return float(found[1]) / 100 * cores if found[2] else float(found[1] or found[3] or found[4])


def list_fair_queues(cores: float) -> Queue:
    def make(element: ET.Element, above: str) -> Queue:
        name = element.get("name", "")
        queue = Queue(name if name not in ("training", "adhoc") or above == "nlp" else f"{above}:{name}")
        for tag, option in (("weight", "weight"), ("minResources", "least"), ("maxResources", "most")):
            text = element.findtext(tag)
            if text is not None:
                setattr(queue, option, float(text) if tag == "weight" else read_vcores(text, cores))
        queue.children = [make(child, name) for child in element.findall("queue")]
        return queue

    root = ET.parse(DATA / "fair-scheduler.xml").getroot().find("queue")  # noqa: S314 - our own file
    assert root is not None
    return make(root, "")


def share_by_ratio(queue: Queue, cores: float) -> None:
    """YARN's fair scheduler: weight times a ratio, between minimum and maximum, adds up to the parent's."""
    queue.used = cores
    if not queue.children:
        return

    def take(ratio: float) -> list[float]:
        return [min(max(child.weight * ratio, child.least), child.most) for child in queue.children]

    low, high = 0.0, 1e12
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(take(middle)) < cores else (low, middle)
    for child, each in zip(queue.children, take(high), strict=True):
        share_by_ratio(child, each)


def share_by_guarantee(queue: Queue, cores: float) -> None:
    """The rule here, by docs/coming-from.md: the guarantee, and a part of the rest by weight, up to the limit."""
    queue.used = cores
    open_, given = list(queue.children), {id(child): min(child.least, child.most) for child in queue.children}
    rest = cores - sum(given.values())
    while open_ and rest > 1e-9:
        unit = rest / sum(child.weight for child in open_)
        full = [child for child in open_ if given[id(child)] + child.weight * unit >= child.most]
        for child in full or open_:
            given[id(child)] = child.most if full else given[id(child)] + child.weight * unit
        open_ = [child for child in open_ if child not in full] if full else []
        rest = cores - sum(given.values())
    for child in queue.children:
        share_by_guarantee(child, given[id(child)])


def list_capacity_queues(cores: float) -> Queue:
    root = ET.parse(DATA / "capacity-scheduler.xml").getroot()  # noqa: S314 - our own file
    prefix = "yarn.scheduler.capacity."
    said = {each.findtext("name", "").removeprefix(prefix): each.findtext("value", "") for each in root}

    def make(path: str, least: float, most: float) -> Queue:
        queue = Queue(path.rpartition(".")[2], least, least, most)
        for name in filter(None, said.get(f"{path}.queues", "").split(",")):
            part = float(said[f"{path}.{name}.capacity"]) / 100
            top = float(said.get(f"{path}.{name}.maximum-capacity", "100")) / 100
            queue.children.append(make(f"{path}.{name}", least * part, most * top))
        return queue

    return make("root", cores, cores)


# --- YuniKorn, Kueue


def list_yunikorn_queues(cores: float) -> Queue:
    def make(found: dict[str, Any], taken: set[str], above: str) -> Queue:
        resources = found.get("resources", {})
        most = str(resources.get("max", {}).get("vcore", cores))
        limit = float(most[:-1]) / 1000 if most.endswith("m") else float(most)
        weight = float(resources.get("guaranteed", {}).get("vcore", limit))
        # All operations are one user's.
        of_one = [each["maxresources"]["vcore"] for each in found.get("limits", []) if "users" in each]
        name = found["name"] if found["name"] not in taken else f"{above}:{found['name']}"
        taken.add(name)
        queue = Queue(name, weight, most=min([limit, *of_one]))
        queue.children = [make(child, taken, name) for child in found.get("queues", [])]
        return queue

    found = yaml.safe_load((DATA / "queues.yaml").read_text(encoding="utf-8"))
    return make(found["partitions"][0]["queues"][0], set(), "")


def list_kueue_queues() -> Queue:
    objects = list(yaml.safe_load_all((DATA / "kueue.yaml").read_text(encoding="utf-8")))
    queues: dict[str, Queue] = {}
    parents: dict[str, str] = {}
    for each in objects:
        if each["kind"] in ("Cohort", "ClusterQueue"):
            name, spec = each["metadata"]["name"], each["spec"]
            quotas = [
                quota
                for group in spec.get("resourceGroups", [])
                for flavor in group["flavors"]
                for quota in flavor["resources"]
                if quota["name"] == "cpu"
            ]
            least = sum(float(quota["nominalQuota"]) for quota in quotas)
            borrowed = [float(quota["borrowingLimit"]) for quota in quotas if "borrowingLimit" in quota]
            parents[name] = spec.get("cohort") or spec.get("parentName") or ""
            queues[name] = Queue(
                name,
                float(spec.get("fairSharing", {}).get("weight", 1)),
                least,
                least + sum(borrowed) if borrowed or not parents[name] else float("inf"),
            )
    root = Queue("root", children=[queues[name] for name in queues if not parents[name]])
    for name, parent in parents.items():
        if parent:
            queues[parent].children.append(queues[name])

    def add_up(queue: Queue) -> float:
        queue.least += sum(add_up(child) for child in queue.children)
        return queue.least

    add_up(root)
    queues["company"].most = queues["company"].least
    return root


def rank_by_borrowing(queue: Queue) -> float:
    """Kueue's weighted share: what is used above the quota, by weight; who is within the quota comes first."""
    return max(queue.used + 1 - queue.least, 0.0) / (queue.weight or 1e-9)


# --- Slurm


def list_slurm_accounts(*, flat: bool = True) -> Queue:
    """Accounts and users; the children of one with Fairshare=parent as their grandparent's own."""
    root = Queue("root")
    accounts, parent = {"root": root}, "root"
    for line in (DATA / "slurm.dump").read_text(encoding="utf-8").splitlines():
        found = re.match(r"(Parent|Account|User) - '(\w+)'", line)
        share = re.search(r"FairShare=(\w+)", line)
        if found is None or (found[2] == "root" and found[1] == "User"):
            continue
        if found[1] == "Parent":
            parent = found[2]
        elif found[1] == "Account":
            is_flat = share is not None and share[1] == "parent" and flat
            queue = accounts[parent] if is_flat else Queue(found[2], float(share[1]) if share else 1.0)
            accounts[found[2]] = queue
            if not is_flat:
                accounts[parent].children.append(queue)
        else:
            accounts[parent].children.append(Queue(f"{parent}${found[2]}", float(share[1]) if share else 1.0))
    return root


class FairTree:
    """Slurm's fair tree: a core goes to who used least for its shares; usage is halved in time."""

    def __init__(self, root: Queue, half_life: float) -> None:
        self.root, self.factor = root, 0.5 ** (1 / half_life)
        self.usage = {queue.name: 0.0 for queue in root.list_all()}

    def tick(self, cores: int, idle: set[str] = frozenset()) -> dict[str, float]:  # type: ignore[assignment]
        """Hand out cores for one period; what each got in it."""
        given = dict.fromkeys(self.usage, 0.0)
        for _ in range(cores):
            queue = self.root
            while queue.children:
                queue = min(
                    (child for child in queue.children if self._wants(child, idle)),
                    key=lambda child: self.usage[child.name] / child.weight,
                )
                self.usage[queue.name] += 1
                given[queue.name] += 1
        self.usage = {name: each * self.factor for name, each in self.usage.items()}
        return given

    def _wants(self, queue: Queue, idle: set[str]) -> bool:
        if queue.children:
            return any(self._wants(child, idle) for child in queue.children)
        return queue.name not in idle
