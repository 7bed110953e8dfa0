"""The one change that would let most of what a hindrance holds back start: as commands, command lines, words. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cpumond.core.measures import count_cores
from cpumond.core.words import count
from cpumond.core.words import number as show_number
from cpumond.fairshare.resources import CPU, RESOURCES, Vector, add, least, show_amount
from cpumond.scheduler.model import ROOT_POOL
from cpumond.scheduler.settings.attributes import Edit
from cpumond.scheduler.settings.commands import ChangePool, ChangeTree, ConfigCommand, CreatePool
from cpumond.scheduler.why.idle_material import Material, NodeRoom, PoolRoom
from cpumond.scheduler.why.idle_search import COUNTS, Found, Search, count_fitting, split_pieces
from cpumond.scheduler.why.packing import (
    CORDON,
    FRAGMENTATION,
    GANG,
    GRACEFUL,
    REFUSED,
    SCARCE,
    SPARE,
    TAGS,
    Hindrance,
    pool_limits,
)

COUNT: Final = "max_running_operation_count"
MOST: Final = "max_operation_count"
SUBPOOL: Final = "ephemeral_subpool_config"

LEAST_ORDER: Final = 0.1
"""Cores; nobody is advised to order less for a job."""
WAIT: Final = "wait until jobs end, or add a node"


@dataclass(frozen=True, slots=True)
class Remedy:
    """``why``: what is in the way; ``text``: what to do, as an order; ``cores``: what would start then. ``pool``: the
    one that is limited, "" for none."""

    kind: str
    pool: str
    cores: float
    why: str
    text: str
    commands: tuple[ConfigCommand, ...] = ()
    shell: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    """Ids that the text names."""
    lead: str = ""
    """How the sentence begins where it is not about idle CPU."""


@dataclass(frozen=True, slots=True)
class Step:
    """One part of a remedy."""

    why: str
    text: str
    commands: tuple[ConfigCommand, ...] = ()
    shell: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()


def find_remedy(result: Search, found: Found) -> Remedy:
    """What to do about hindrances."""
    first = found.hindrances[0]
    in_pieces = GANG in found.hindrances and FRAGMENTATION in found.hindrances
    told = [each for each in found.hindrances if not (in_pieces and each == FRAGMENTATION)]
    steps = [_step(result, found, each) for each in told]
    cores = found.cores
    if in_pieces:
        cores = math.prod(_gang_pieces(result, found))
    elif first == FRAGMENTATION:
        cores = _pieces(result, found)[1]
    elif first.kind in SCARCE:
        cores = _smaller(result, found, RESOURCES.index(first.kind))[1] or cores
    kind, pool = _name(result.material, first)
    return Remedy(
        kind, pool, cores, " and ".join(step.why for step in steps), " and ".join(step.text for step in steps),
        () if found.is_mixed else tuple(command for step in steps for command in step.commands),
        tuple(line for step in steps for line in step.shell),
        tuple(name for step in steps for name in step.operations),
    )  # fmt: skip


def _name(material: Material, hindrance: Hindrance) -> tuple[str, str]:
    if hindrance.kind in COUNTS:
        return COUNT, hindrance.name
    if hindrance.kind != "limits":
        return hindrance.kind, ""
    pool = _find_pool(material, hindrance.name)
    if pool is None:
        operation = next((each for each in material.operations if each.id == hindrance.name), None)
        return "resource_limits", "" if operation is None else material.pools[operation.pool].name
    return ("resource_limits" if _own_binds(material, pool) else "max_share_ratio"), hindrance.name


def _find_pool(material: Material, name: str) -> PoolRoom | None:
    return next((pool for pool in material.pools if pool.name == name), None)


def _step(result: Search, found: Found, hindrance: Hindrance) -> Step:
    material = result.material
    if hindrance.kind in COUNTS:
        return raise_count(material, hindrance, found.values[hindrance])
    if hindrance.kind == "limits":
        return _raise_limits(material, found, hindrance.name)
    if hindrance == FRAGMENTATION:
        return _order_less_cpu(result, found)
    if hindrance == SPARE:
        amounts = ", ".join(f"{show_amount(r, x)} {RESOURCES[r]}" for r, x in enumerate(material.spare) if x)
        return Step(
            f"a node gets jobs only while it has {amounts} free (min_spare_job_resources_on_node)",
            "lower min_spare_job_resources_on_node in the scheduler's configuration to what the smallest job orders",
        )
    if hindrance == GRACEFUL:
        ids = tuple(result.operations[number].id for number in sorted(found.placed)[:3])
        them = "it" if len(found.placed) == 1 else "them"
        return Step(
            f"preemption_mode of {count(len(found.placed), 'waiting operation')} is graceful, and such an operation "
            "starts no job beyond its fair share",
            f"start {them} with preemption_mode = normal ({', '.join(ids)})",
            operations=ids,
        )
    if hindrance == REFUSED:
        ids = tuple(result.operations[number].id for number in sorted(found.placed)[:3])
        return Step(
            f"allow_reclaimed of {count(len(found.placed), 'waiting operation')} is false, and other jobs ordered "
            "the CPU that is free",
            f"start {'it' if len(found.placed) == 1 else 'them'} with allow_reclaimed = true ({', '.join(ids)})",
            operations=ids,
        )
    if hindrance == GANG:
        return _fit_gang(result, found)
    if hindrance == CORDON:
        return _uncordon(result, found)
    if hindrance == TAGS:
        return _fit_tags(result, found)
    return _order_less(result, found, RESOURCES.index(hindrance.kind))


# --- limits of pools


def _of(pool: str, tree: str) -> str:
    return f"tree {tree}" if pool == ROOT_POOL else f"pool {pool}"


def raise_count(material: Material, hindrance: Hindrance, value: float) -> Step:
    """A higher limit of running operations for the pools that a hindrance is of."""
    limit, tree = math.ceil(value), material.tree
    if hindrance.kind == "subpool_count":
        now = max(
            each.max_running for each in material.pools if each.parent >= 0 and _is_of(material, each, hindrance.name)
        )
        return _set_pool(
            tree, hindrance.name, [((SUBPOOL, COUNT), limit)],
            f"{COUNT} of each user's sub-pool of pool {hindrance.name} is {now}", f"raise it to {limit}",
        )  # fmt: skip
    pool = _find_pool(material, hindrance.name)
    assert pool is not None
    return _raise_options(material, pool, {COUNT: limit})


def find_refusals(material: Material) -> Iterator[tuple[Remedy, int]]:
    """For each pool whose ``max_operation_count`` refused starts of late: what to raise, and how many it refused.

    Limits further up that so many more would reach are raised with it, and those of running operations where no more
    could run. ``cores`` counts what may run at once then.
    """
    for pool in material.pools:
        if not pool.refused:
            continue
        path = [material.pools[place] for place in pool.path]
        slots = min(each.max_running - each.running for each in path)
        steps = []
        for each in path:
            known = each.max_operations if each is pool else each.operations
            wanted = {MOST: known + pool.refused, COUNT: each.running + pool.refused if slots <= 0 else 0}
            limits = {MOST: each.max_operations, COUNT: each.max_running}
            raised = {option: value for option, value in wanted.items() if value > limits[option]}
            steps += [_raise_options(material, each, raised)] if raised else []
        starts = count(pool.refused, "start of an operation", "starts of operations")
        why = f"{starts} {'was' if pool.refused == 1 else 'were'} refused in the last hour: "
        remedy = Remedy(
            MOST, pool.name, pool.refused_cores * (min(slots / pool.refused, 1.0) if slots > 0 else 1.0),
            why + " and ".join(step.why for step in steps), " and ".join(step.text for step in steps),
            tuple(command for step in steps for command in step.commands),
            tuple(line for step in steps for line in step.shell),
        )  # fmt: skip
        yield remedy, pool.refused


def _raise_options(material: Material, pool: PoolRoom, limits: Mapping[str, int]) -> Step:
    """Higher limits of the number of operations of a pool, by option."""
    tree, names = material.tree, " and ".join(limits)
    own = {COUNT: (pool.max_running, pool.has_own_count), MOST: (pool.max_operations, pool.has_own_most)}
    now = " and ".join(str(own[option][0]) for option in limits)
    values = " and ".join(map(str, limits.values()))
    why = f"{names} of {_of(pool.name, tree)} {'is' if len(limits) == 1 else 'are'} {now}"
    text = f"raise {'it' if len(limits) == 1 else 'them'} to {values}"
    words = [f"{option}={limit}" for option, limit in limits.items()]
    if pool.parent < 0:
        edits = tuple(Edit((option,), limit) for option, limit in limits.items())
        return Step(why, text, (ChangeTree(tree, edits),), (command_line("tree", "set", tree, *words),))
    if not pool.is_ephemeral:
        by_default = "" if any(own[option][1] for option in limits) else " by default"
        return _set_pool(
            tree, pool.name, [((option,), limit) for option, limit in limits.items()], why + by_default, text
        )
    parent = material.pools[pool.parent]
    if parent.parent >= 0:
        return _set_pool(tree, parent.name, [((SUBPOOL, option), limit) for option, limit in limits.items()], why, text)
    command = CreatePool(tree, pool.name, parent.name, dict(limits))
    line = command_line("pool", "create", pool.name, *words, "--tree", tree)
    return Step(f"{why} by default", f"make it a pool with {values}", (command,), (line,))


def _is_of(material: Material, pool: PoolRoom, parent: str) -> bool:
    return pool.is_ephemeral and material.pools[pool.parent].name == parent


def _set_pool(tree: str, pool: str, edits: Sequence[tuple[tuple[str, ...], Any]], why: str, text: str) -> Step:
    command = ChangePool(tree, pool, tuple(Edit(path, value) for path, value in edits))
    words = [f"{'/'.join(path)}={show_number(value)}" for path, value in edits]
    return Step(why, text, (command,), (command_line("pool", "set", pool, *words, "--tree", tree),))


def command_line(*words: str) -> str:
    """A command of ``cpumond`` as one types it."""
    return shlex.join(["cpumond", *words])


def _own_binds(material: Material, pool: PoolRoom) -> bool:
    """Whether the pool's ``resource_limits`` are what limits it, rather than its ``max_share_ratio``."""
    if pool.ratio is None:
        return True
    above = least(pool_limits(material, {})[pool.parent], material.total)
    return any(own < part * pool.ratio for own, part in zip(pool.own_limits, above, strict=True))


def _up(r: int, amount: float) -> float:
    """An amount that can be set, not below ``amount``."""
    return math.ceil(amount * 100.0 - 1e-6) / 100.0 if r == CPU else float(math.ceil(amount - 1e-6))


def _raise_limits(material: Material, found: Found, name: str) -> Step:
    pool = _find_pool(material, name)
    if pool is None:
        return _raise_operation(material, found, name)
    need = add(pool.usage, found.packing.grown.get(name, (0.0,) * 5))
    whys, texts, edits = [], [], []
    where = pool.name
    prefix: tuple[str, ...] = ()
    if pool.is_ephemeral:
        where, prefix = material.pools[pool.parent].name, (SUBPOOL,)
    for r, (own, wanted) in enumerate(zip(pool.own_limits, need, strict=True)):
        if wanted > own:
            value = _up(r, wanted + _slack(material, pool, r))
            whys.append(f"resource_limits of pool {name} allow {show_amount(r, own)} {RESOURCES[r]}")
            texts.append(f"raise {RESOURCES[r]} to {show_amount(r, value)}")
            edits.append(((*prefix, "resource_limits", RESOURCES[r]), value))
    if pool.ratio is not None:
        above = least(pool_limits(material, {})[pool.parent], material.total)
        ratio = max(
            (
                (wanted + _slack(material, pool, r)) / part
                for r, (wanted, part) in enumerate(zip(need, above, strict=True))
                if part > 0.0
            ),
            default=0.0,
        )
        if ratio > pool.ratio:
            value = min(math.ceil(ratio * 1e4 - 1e-6) / 1e4, 1.0)
            whys.append(f"max_share_ratio of pool {name} is {pool.ratio:g}")
            texts.append(f"raise {'it' if not edits else 'that'} to {value:g}")
            edits.append((("max_share_ratio",), value))
    return _set_pool(material.tree, where, edits, " and ".join(whys), " and ".join(texts))


def _slack(material: Material, pool: PoolRoom, r: int) -> float:
    """Room for one job more, where jobs of several sizes wait: others may start than are counted with."""
    inside = (
        each for each in material.operations if pool in [material.pools[at] for at in material.pools[each.pool].path]
    )
    orders = {order[r] for each in inside for order, _ in each.tasks}
    return max(orders) if len(orders) > 1 else 0.0


def _raise_operation(material: Material, found: Found, operation_id: str) -> Step:
    operation = next(each for each in material.operations if each.id == operation_id)
    need = add(operation.usage, found.packing.grown.get(operation_id, (0.0,) * 5))
    words, whys = [], []
    for r, (own, wanted) in enumerate(zip(operation.own_limits, need, strict=True)):
        if wanted > own:
            value = _up(r, wanted)
            whys.append(f"resource_limits of an operation allow {show_amount(r, own)} {RESOURCES[r]}")
            words.append(f"resource_limits/{RESOURCES[r]}={show_number(value)}")
    if operation.ratio is not None and not words:
        whys.append(f"max_share_ratio of an operation is {operation.ratio:g}")
        words.append("max_share_ratio=1")
    text = f"set {' '.join(words)} of operation {operation_id}"
    return Step(
        " and ".join(whys), text, (), (command_line("operation", "set", operation_id, *words),), (operation_id,)
    )


# --- what nodes lack


def _waiting_orders(result: Search, found: Found) -> list[Vector]:
    numbers = found.waits or frozenset(found.placed)
    return [order for number in numbers for order, _ in result.operations[number].tasks]


def _pieces(result: Search, found: Found) -> tuple[float, float]:
    orders = _waiting_orders(result, found)
    size, cores = split_pieces(result, min(order[CPU] for order in orders)) if orders else (0.0, 0.0)
    waiting = sum(result.base.left.get(number, 0.0) for number in found.waits)
    return size, min(cores, waiting)


def _order_less_cpu(result: Search, found: Found) -> Step:
    orders = _waiting_orders(result, found)
    smallest = min(order[CPU] for order in orders)
    size, _ = _pieces(result, found)
    largest = max((node.free[CPU] for node in result.base.free), default=0.0)
    why = (
        f"they are in pieces of at most {count_cores(largest)}, and each waiting job orders {count_cores(smallest)}"
        f"{' or more' if any(order[CPU] > smallest for order in orders) else ''}"
    )
    return Step(why, WAIT if size < LEAST_ORDER else f"order at most {count_cores(size)} for a job")


def _smaller(result: Search, found: Found, r: int) -> tuple[float, float]:
    """The largest order of a resource with which jobs would use most of the free CPU; the cores that would start."""
    orders = [order for order in _waiting_orders(result, found) if order[r] > 0.0]
    if not orders:
        return 0.0, 0.0
    wanted = min(orders, key=lambda order: order[r])
    others = [s for s in range(len(RESOURCES)) if s != r and wanted[s] > 0.0]
    nodes = [(node.free[r], int(min(node.free[s] / wanted[s] for s in others))) for node in result.base.free if others]
    nodes = [(free, jobs) for free, jobs in nodes if jobs > 0 and free > 0.0]
    waiting = sum(result.base.left.get(number, 0.0) for number in found.waits)
    best = (0.0, 0.0)
    spare = result.material.spare[r]
    sizes = {math.floor(free / k + 1e-6) for free, jobs in nodes for k in range(1, min(jobs, 16) + 1)}
    for size in sorted(sizes, reverse=True):
        if 0 < size < wanted[r]:
            started = sum(min(jobs, count_fitting(free, size, spare)) for free, jobs in nodes)
            cores = min(started * wanted[CPU], waiting)
            if cores > best[1] * 1.02:
                best = (float(size), cores)
    return best


def _order_less(result: Search, found: Found, r: int) -> Step:
    orders = [order for order in _waiting_orders(result, found) if order[r] > 0.0]
    name, wanted = RESOURCES[r], min((order[r] for order in orders), default=0.0)
    size, cores = _smaller(result, found, r)
    nodes = [node for node in result.base.free if node.free[r] < wanted]
    why = f"the nodes where CPU is free lack {name}: a waiting job orders {show_amount(r, wanted)}"
    if r != 0 and cores > 0.0:
        return Step(f"{why} {name}", f"order at most {show_amount(r, size)} {name} for a job")
    if r == 0:
        jobs = found.packing.jobs - result.base.jobs
        more = f"let {count(len(nodes), 'node')} offer {count(jobs, 'more user_slot')} in all"
        return Step(f"the nodes where CPU is free have no {name} left", more)
    most = max((node.free[r] for node in nodes), default=0.0)
    return Step(f"{why} {name}, {show_amount(r, most)} is the most that is left", f"add a node with {name}")


def _fit_gang(result: Search, found: Found) -> Step:
    """Of the gang that would use most: as many jobs as there is room for at once."""
    gangs = [each for each in found.placed if result.operations[each].is_gang] or list(found.placed)
    number = max(gangs, key=lambda each: found.placed[each])
    operation = result.operations[number]
    needed = sum(jobs for _, jobs in operation.tasks)
    if FRAGMENTATION in found.hindrances:
        room, size = _gang_pieces(result, found)
        pieces = f"{count(room, 'job')} of at most {count_cores(size)}"
        largest = max((node.free[CPU] for node in result.base.free), default=0.0)
        return Step(
            f"a gang needs room for all of its {needed} jobs at once, and CPU is free in pieces of at most "
            f"{count_cores(largest)}, less than they order",
            WAIT if size < LEAST_ORDER else f"start operation {operation.id} with at most {pieces} each",
            operations=(operation.id,),
        )
    room = round(found.placed[number] / (operation.waiting_cores / needed))
    return Step(
        f"a gang needs room for all of its {needed} jobs at once, and there is room for {room}",
        f"start operation {operation.id} with at most {count(room, 'job')}",
        operations=(operation.id,),
    )


def _gang_pieces(result: Search, found: Found) -> tuple[int, float]:
    """Of a gang whose jobs are larger than any free piece: how many there is room for, with what they may order."""
    size, _ = _pieces(result, found)
    spare = result.material.spare[CPU]
    return sum(count_fitting(node.free[CPU], size, spare) for node in result.base.free) if size else 0, size


def _used(nodes: Sequence[NodeRoom], found: Found) -> list[NodeRoom]:
    """Those of the nodes that jobs would start on."""
    after = {node.id: node.free for node in found.packing.free}
    return [each for each in nodes if after.get(each.id, each.free) != each.free]


def _names(nodes: Sequence[NodeRoom]) -> str:
    names = ", ".join(each.id for each in nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
    return f"{'node' if len(nodes) == 1 else 'nodes'} {names}"


def _uncordon(result: Search, found: Found) -> Step:
    nodes = _used(result.material.cordoned, found)
    verb = "is" if len(nodes) == 1 else "are"
    lines = tuple(command_line("node", "uncordon", each.id) for each in nodes)
    return Step(f"{_names(nodes)} {verb} cordoned", f"uncordon {_names(nodes)}", shell=lines)


# --- nodes of other trees


def _fit_tags(result: Search, found: Found) -> Step:
    material = result.material
    nodes = _used(material.outside, found)
    they = _names(nodes)
    several = [each for each in nodes if each.why]
    if several:
        why = f"the tags of {they} fit the nodes_filter of trees {several[0].why}, so that no job starts there"
        return Step(why, f"change the tags of {they}, or the filters, so that only one fits")
    theirs = sorted({each.tree for each in nodes if each.tree})
    where = f"trees {', '.join(theirs)}" if len(theirs) > 1 else f"tree {theirs[0]}" if theirs else "no tree"
    why = (
        f"nodes_filter of tree {material.tree} ({material.nodes_filter or 'every node'}) leaves out {they}, of {where}"
    )
    if theirs:
        return Step(why, f"let the operations run in {where}, too (pool_trees)")
    own, other = {tag for each in nodes for tag in each.tags}, set[str]()
    common = frozenset.intersection(*(each.tags for each in nodes))
    tag = min(common or own - other, key=lambda each: (each in {node.id for node in nodes}, each))
    wider = f"({material.nodes_filter}) | {tag}" if common else " | ".join([f"({material.nodes_filter})", *sorted(own)])
    command = ChangeTree(material.tree, (Edit(("nodes_filter",), wider),))
    line = command_line("tree", "set", material.tree, f"nodes_filter={wider}")
    return Step(why, f"set nodes_filter to {wider}", (command,), (line,))
