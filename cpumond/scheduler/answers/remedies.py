"""The change that removes each obstacle, as a remedy with sufficient values. Pure: reads a living tree."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from cpumond.core.measures import count_cores
from cpumond.core.words import count
from cpumond.core.words import number as format_number
from cpumond.fairshare.resources import (
    CPU,
    MEMORY,
    RESOURCES,
    UNLIMITED,
    ZERO,
    Vector,
    format_amount,
    least,
    positive_part,
)
from cpumond.scheduler.answers import obstacles
from cpumond.scheduler.decide.placement import has_spare
from cpumond.scheduler.decide.snapshot import describe_filters
from cpumond.scheduler.elements import Node, OperationElement, PoolElement, Tree, fit
from cpumond.scheduler.model import ROOT_POOL, OperationRecord, to_vector
from cpumond.scheduler.settings.commands import CreatePool
from cpumond.scheduler.settings.nodes_filter import TAG_FILTER
from cpumond.scheduler.settings.operations import UpdateOperation
from cpumond.scheduler.state import State
from cpumond.scheduler.state.node_commands import UncordonNode
from cpumond.scheduler.state.settling import mark_unsettled
from cpumond.scheduler.trial.remedy import Remedy, command_line, join, set_pool, set_tree
from cpumond.scheduler.trial.rounds import list_takers

COUNT: Final = "max_running_operation_count"
MOST: Final = "max_operation_count"
SUBPOOL: Final = "ephemeral_subpool_config"
NO_LIMIT: Final = 2**31 - 1

LEAST_ORDER: Final = 0.1
"""Smallest request of a job, in cores, that an advice proposes."""
WAIT: Final = "wait until jobs end, or add a node"


class Started(msgspec.Struct, frozen=True):
    """What a trial started. ``usage``: of pools, and of the operations whose jobs were started. ``running``: operations
    running in pools. ``hidden``: the obstacle of most of the work that still waits after that."""

    cores: dict[str, float] = {}
    """Operation -> cores of the jobs that started."""
    jobs: dict[str, int] = {}
    """Node -> number of jobs that started on it."""
    jobs_of: dict[str, int] = {}
    """Operation -> number of its jobs that started."""
    usage: dict[str, Vector] = {}
    running: dict[str, int] = {}
    hidden: obstacles.Obstacle | None = None

    @property
    def all_cores(self) -> float:
        return sum(self.cores.values())


@dataclass(slots=True, eq=False)
class Look:
    """A tree in which nothing more starts by itself, and the operations that wait in this tree."""

    state: State
    tree: Tree
    waiting: Mapping[str, obstacles.Waiting]
    outside: Sequence[Node]
    takers: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.takers = list_takers(self.tree)

    def find(self, name: str) -> PoolElement | None:
        """Return a pool by name."""
        return self.tree.root if name == ROOT_POOL else self.tree.pools.get(name)

    def orders(self, waits: Collection[str]) -> list[Vector]:
        """Return the requests of all jobs of the operations ``waits`` that have yet to start."""
        elements = (self.waiting[each].element for each in waits)
        return [order for element in elements for order, _ in element.operation.needed_orders]


# --- lifted limits


def lift(obstacle: obstacles.Obstacle, look: Look, waits: Collection[str]) -> Remedy:
    """Return a remedy that removes a limit entirely; for an obstacle that is no limit, the change itself."""
    if obstacle.kind in obstacles.COUNTS:
        above = {obstacle, *list_counts_above(look, obstacle, waits)}
        return Remedy("", "", tried=(lambda state: _lift_counts(state.trees[look.tree.name], above, state),))
    if obstacle.kind == "limits":
        return Remedy("", "", tried=(lambda state: _lift_limits(state.trees[look.tree.name], obstacle.name),))
    return make_remedy(look, obstacle, Started(), waits)


def list_counts_above(look: Look, obstacle: obstacles.Obstacle, waits: Collection[str]) -> list[obstacles.Obstacle]:
    """The limits of running operations above ``obstacle``, nearest first, that the operations below it reach next."""
    found: dict[obstacles.Obstacle, None] = {}
    for each in waits:
        limits = [obstacles.count_limit(pool) for pool in look.waiting[each].element.ancestors()]
        if obstacle in limits:
            found.update(dict.fromkeys(limits[limits.index(obstacle) + 1 :]))
    return list(found)


def _lift_counts(tree: Tree, counts: set[obstacles.Obstacle], state: State) -> None:
    for pool in (tree.root, *tree.pools.values()):
        if obstacles.count_limit(pool) in counts:
            pool.max_running_operation_count = NO_LIMIT
    mark_unsettled(state)


def _lift_limits(tree: Tree, name: str) -> None:
    pool = tree.pools.get(name)
    if pool is not None:
        pool.settings = msgspec.structs.replace(pool.settings, resource_limits={}, max_share_ratio=None)
        return
    element = tree.operations[name]
    element.options = msgspec.structs.replace(element.options, resource_limits={}, max_share_ratio=None)
    element.entry = None


# --- the remedy of an obstacle


def make_remedy(look: Look, obstacle: obstacles.Obstacle, started: Started, waits: Collection[str]) -> Remedy:
    """Return the change for an obstacle. ``started``: all work that starts if the obstacle is removed."""
    if obstacle.kind in obstacles.COUNTS:
        return raise_count(look.tree, obstacle, started.running)
    if obstacle.kind == "limits":
        return _raise_limits(look, obstacle.name, started)
    if obstacle == obstacles.FRAGMENTATION:
        return _order_less_cpu(look, waits)
    if obstacle == obstacles.SPARE:
        return _lower_spare(look)
    if obstacle == obstacles.GRACEFUL:
        return _restart(
            started, waits, "preemption_mode", "normal",
            "is graceful, so it starts no job beyond its fair share",
        )  # fmt: skip
    if obstacle == obstacles.REFUSED:
        return _restart(
            started, waits, "allow_reclaimed", True, "is false, and other jobs requested the CPU that is free"
        )
    if obstacle == obstacles.GANG:
        return _fit_gang(look, started, waits)
    if obstacle == obstacles.FILTER:
        return _widen_filters(look, started, waits)
    if obstacle == obstacles.CORDON:
        return _uncordon(look, started)
    if obstacle == obstacles.TAGS:
        return _fit_tags(look, started)
    return _order_less(look, RESOURCES.index(obstacle.kind), started, waits)


def name_obstacle(look: Look, obstacle: obstacles.Obstacle) -> tuple[str, str]:
    """Return the kind of cause and the pool that it belongs to."""
    if obstacle.kind in obstacles.COUNTS:
        return COUNT, obstacle.name
    if obstacle.kind != "limits":
        return obstacle.kind, ""
    pool = look.find(obstacle.name)
    if pool is None:
        parent = look.tree.operations[obstacle.name].parent
        return "resource_limits", "" if parent is None else parent.name
    return ("resource_limits" if _own_binds(pool) else "max_share_ratio"), obstacle.name


def _restart(started: Started, waits: Collection[str], option: str, value: object, why: str) -> Remedy:
    """Return the remedy: start the operations again with a different value of an option."""
    ids = sorted(started.cores or waits)
    shown = value if isinstance(value, str) else str(value).lower()
    them = "it" if len(ids) == 1 else "them"
    return Remedy(
        f"{option} of {count(len(ids), 'waiting operation')} {why}",
        f"start {them} again with {option} = {shown} ({', '.join(ids[:3])})",
        operations=tuple(ids[:3]),
        tried=(_edit_records(waits, lambda record: msgspec.structs.replace(record, **{option: value})),),
    )


def _edit_records(
    waits: Collection[str], edit: Callable[[OperationRecord], OperationRecord]
) -> Callable[[State], None]:
    def apply(state: State) -> None:
        for name in waits:
            operation = state.operations[name]
            operation.record = edit(operation.record)
            for element in operation.elements.values():
                element.entry = None

    return apply


def _edit_orders(waits: Collection[str], r: int, size: float) -> Callable[[State], None]:
    """Lower the waiting jobs' request of a resource to ``size``. For CPU, add jobs: the total work stays the same."""

    def apply(state: State) -> None:
        for name in waits:
            operation = state.operations[name]
            tasks = []
            for task in operation.record.tasks:
                order, needed = task.resources[r], operation.needed.get(task.name, 0)
                if needed and order > size:
                    more = max(math.floor(needed * order / size + 1e-6), 1) - needed if r == CPU else 0
                    operation.needed = {**operation.needed, task.name: needed + more}
                    less = {_OPTIONS[r]: _whole(r, size), "job_count": task.job_count + more}
                    if r == MEMORY:
                        less["memory_reserve"] = 0
                    tasks.append(msgspec.structs.replace(task, **less))
                else:
                    tasks.append(task)
            operation.record = msgspec.structs.replace(operation.record, tasks=tuple(tasks))
            for element in operation.elements.values():
                element.entry = None

    return apply


_OPTIONS: Final = ("user_slots", "cpu_limit", "gpu_limit", "memory_limit", "network")
"""Options of a task, in the order of RESOURCES."""


def _whole(r: int, amount: float) -> float:
    return int(amount) if RESOURCES[r] in ("user_slots", "memory") else amount


# --- limits of pools


def _of(pool: str, tree: str) -> str:
    return f"tree {tree}" if pool == ROOT_POOL else f"pool {pool}"


def list_limited(tree: Tree, obstacle: obstacles.Obstacle) -> list[PoolElement]:
    """Return the pools to which a limit of running operations applies."""
    if obstacle.kind == "count" and obstacle.name in tree.pools:
        return [tree.pools[obstacle.name]]
    return [pool for pool in (tree.root, *tree.pools.values()) if obstacles.count_limit(pool) == obstacle]


def raise_count(tree: Tree, obstacle: obstacles.Obstacle, running: Mapping[str, int]) -> Remedy:
    """Return a remedy that raises a limit of running operations until each of its pools can run ``running`` of them."""
    pools = list_limited(tree, obstacle)
    limit = max(max(running.get(pool.name, 0), pool.max_running_operation_count) for pool in pools)
    if obstacle.kind == "subpool_count":
        now = max(pool.max_running_operation_count for pool in pools)
        return set_pool(
            tree.name, obstacle.name, [((SUBPOOL, COUNT), limit)],
            f"{COUNT} of each user's sub-pool of pool {obstacle.name} is {now}", f"raise it to {limit}",
        )  # fmt: skip
    return _raise_options(pools[0], {COUNT: limit})


def find_refusals(state: State, tree: Tree, now: float) -> Iterator[tuple[Remedy, int]]:
    """Yield a remedy and the number of refusals for each pool whose ``max_operation_count`` recently refused starts.
    The remedy also raises limits of ancestors that these operations would reach, and limits of running operations if no
    more could run. ``cores``: of the operations that may run at once after the change."""
    for pool in (tree.root, *tree.pools.values()):
        refused, cores = state.refused_starts.count(tree.name, pool.name, pool.max_operation_count, now)
        if not refused:
            continue
        path = [pool, *pool.ancestors()]
        slots = min(each.max_running_operation_count - each.running_operation_count for each in path)
        parts = []
        for each in path:
            known = each.max_operation_count if each is pool else each.operation_count
            wanted = {MOST: known + refused, COUNT: each.running_operation_count + refused if slots <= 0 else 0}
            limits = {MOST: each.max_operation_count, COUNT: each.max_running_operation_count}
            raised = {option: value for option, value in wanted.items() if value > limits[option]}
            parts += [_raise_options(each, raised)] if raised else []
        starts = count(refused, "start of an operation", "starts of operations")
        remedy = join(parts)
        yield replace(
            remedy, kind=MOST, pool=pool.name, cores=cores * (min(slots / refused, 1.0) if slots > 0 else 1.0),
            why=f"{starts} {'was' if refused == 1 else 'were'} refused in the last hour: {remedy.why}",
        ), refused  # fmt: skip


def _raise_options(pool: PoolElement, limits: Mapping[str, int]) -> Remedy:
    """Return a remedy that raises limits of the number of operations of a pool. ``limits``: option -> new value."""
    tree, names = pool.tree.name, " and ".join(limits)
    limits_now = {COUNT: pool.max_running_operation_count, MOST: pool.max_operation_count}
    now = " and ".join(str(limits_now[option]) for option in limits)
    values = " and ".join(map(str, limits.values()))
    why = f"{names} of {_of(pool.name, tree)} {'is' if len(limits) == 1 else 'are'} {now}"
    text = f"raise {'it' if len(limits) == 1 else 'them'} to {values}"
    if pool.parent is None:
        return set_tree(tree, list(limits.items()), why, text)
    if not pool.is_ephemeral:
        is_own = any(getattr(pool.settings, option) is not None for option in limits)
        most = pool.settings.max_operation_count
        if most is not None and most < limits.get(COUNT, 0) and MOST not in limits:
            limits = {MOST: limits[COUNT], **limits}  # may not be below COUNT
            text += f" and {MOST} to {limits[COUNT]}"
        edits = [((option,), limit) for option, limit in limits.items()]
        return set_pool(tree, pool.name, edits, why if is_own else f"{why} by default", text)
    parent = pool.parent
    if not parent.is_root:
        return set_pool(tree, parent.name, [((SUBPOOL, option), limit) for option, limit in limits.items()], why, text)
    command = CreatePool(tree, pool.name, parent.name, dict(limits))
    words = [f"{option}={limit}" for option, limit in limits.items()]
    line = command_line("pool", "create", pool.name, *words, "--tree", tree)
    return Remedy(f"{why} by default", f"create it as a pool with {values}", (command,), (line,))


def _own_limits(pool: PoolElement) -> Vector:
    given = pool.settings.resource_limits
    return to_vector(given, math.inf) if given else UNLIMITED


def _above(pool: PoolElement) -> Vector:
    """Return the amounts to which the fraction ``max_share_ratio`` of a pool applies."""
    assert pool.parent is not None
    return least(pool.parent.limits, pool.tree.total)


def _own_binds(pool: PoolElement) -> bool:
    """Whether the pool is limited by its ``resource_limits`` rather than by its ``max_share_ratio``."""
    ratio = pool.settings.max_share_ratio
    return ratio is None or any(own < part * ratio for own, part in zip(_own_limits(pool), _above(pool), strict=True))


def _up(r: int, amount: float) -> float:
    """Round up to an amount that can be set."""
    return math.ceil(amount * 100.0 - 1e-6) / 100.0 if r == CPU else float(math.ceil(amount - 1e-6))


def _raise_limits(look: Look, name: str, started: Started) -> Remedy:
    pool = look.find(name)
    if pool is None:
        return _raise_operation(look.tree.operations[name], started)
    need = started.usage.get(name, pool.usage)
    whys, texts, edits = [], [], list[tuple[tuple[str, ...], object]]()
    where = pool.name
    prefix: tuple[str, ...] = ()
    if pool.is_ephemeral and pool.parent is not None:
        where, prefix = pool.parent.name, (SUBPOOL,)
    for r, (own, wanted) in enumerate(zip(_own_limits(pool), need, strict=True)):
        if wanted > own:
            value = _up(r, wanted + _slack(look, pool, r))
            whys.append(f"resource_limits of pool {name} allow {format_amount(r, own)} {RESOURCES[r]}")
            texts.append(f"raise {RESOURCES[r]} to {format_amount(r, value)}")
            edits.append(((*prefix, "resource_limits", RESOURCES[r]), value))
    if pool.settings.max_share_ratio is not None:
        parts = [
            (wanted + _slack(look, pool, r)) / part
            for r, (wanted, part) in enumerate(zip(need, _above(pool), strict=True))
            if part > 0.0
        ]
        ratio = max(parts, default=0.0)
        if ratio > pool.settings.max_share_ratio:
            value = min(math.ceil(ratio * 1e4 - 1e-6) / 1e4, 1.0)
            whys.append(f"max_share_ratio of pool {name} is {pool.settings.max_share_ratio:g}")
            texts.append(f"raise {'it' if not edits else 'that'} to {value:g}")
            edits.append((("max_share_ratio",), value))
    return set_pool(look.tree.name, where, edits, " and ".join(whys), " and ".join(texts))


def _slack(look: Look, pool: PoolElement, r: int) -> float:
    """Return an allowance for one more job if waiting jobs differ in size: jobs other than those counted may start."""
    inside = [name for name, each in look.waiting.items() if any(above is pool for above in each.element.ancestors())]
    orders = {order[r] for order in look.orders(inside)}
    return max(orders) if len(orders) > 1 else 0.0


def _raise_operation(element: OperationElement, started: Started) -> Remedy:
    need = started.usage.get(element.name, element.usage)
    own_limits = to_vector(element.options.resource_limits, math.inf) if element.options.resource_limits else UNLIMITED
    whys, limits = [], dict[str, float]()
    for r, (own, wanted) in enumerate(zip(own_limits, need, strict=True)):
        if wanted > own:
            limits[RESOURCES[r]] = _up(r, wanted)
            whys.append(f"resource_limits of an operation allow {format_amount(r, own)} {RESOURCES[r]}")
    words = [f"resource_limits/{name}={format_number(value)}" for name, value in limits.items()]
    parameters: dict[str, object] = {"resource_limits": {**element.options.resource_limits, **limits}}
    if not limits and element.options.max_share_ratio is not None:
        whys.append(f"max_share_ratio of an operation is {element.options.max_share_ratio:g}")
        words, parameters = ["max_share_ratio=1"], {"max_share_ratio": 1.0}
    return Remedy(
        " and ".join(whys),
        f"set {' '.join(words)} of operation {element.name}",
        lines=(command_line("operation", "set", element.name, *words),),
        operations=(element.name,),
        tried=(UpdateOperation(element.name, parameters),),
    )


# --- resources that nodes lack


def _lower_spare(look: Look) -> Remedy:
    def apply(state: State) -> None:
        state.rules = replace(state.rules, spare=ZERO)

    amounts = ", ".join(f"{format_amount(r, x)} {RESOURCES[r]}" for r, x in enumerate(look.state.rules.spare) if x)
    return Remedy(
        f"a node gets jobs only while it has {amounts} free (min_spare_job_resources_on_node)",
        "lower min_spare_job_resources_on_node in the scheduler's configuration to the smallest job's request",
        tried=(apply,),
    )


def count_fitting(free: float, order: float, spare: float) -> int:
    """Return how many jobs start on a node with ``free`` if ``spare`` must be free before each start."""
    smallest = max(order, spare)
    return int((free - smallest) / order + 1e-9) + 1 if free >= smallest - 1e-9 else 0


def find_size(look: Look, order: float) -> float:
    """Return the largest CPU request with which jobs would use nearly as much of the free pieces as possible, if there
    is one of at least ``LEAST_ORDER``; 0 if none helps. ``order``: the present request of a job."""
    spare = look.state.rules.spare
    rooms = [(node, positive_part(node.free)) for node in look.takers]
    pieces = [free[CPU] for node, free in rooms if has_spare(node, free, spare)]
    sizes = {math.floor(piece / k * 100.0 + 1e-6) / 100.0 for piece in pieces for k in (1, 2, 3)}
    sizes = {size for size in sizes if size >= LEAST_ORDER} or sizes
    best, most = 0.0, 0.0
    for size in sorted(sizes, reverse=True):
        if 0.0 < size < order:
            cores = size * sum(count_fitting(piece, size, spare[CPU]) for piece in pieces)
            if cores > most * 1.02:
                best, most = size, cores
    return best


def _order_less_cpu(look: Look, waits: Collection[str]) -> Remedy:
    orders = look.orders(waits)
    smallest = min(order[CPU] for order in orders)
    size = find_size(look, smallest)
    why = (
        f"they are in pieces of at most {count_cores(_largest_piece(look))}, and each waiting job requests "
        f"{count_cores(smallest)}{' or more' if any(order[CPU] > smallest for order in orders) else ''}"
    )
    text = WAIT if size < LEAST_ORDER else f"request at most {count_cores(size)} for a job"
    return Remedy(why, text, tried=(_edit_orders(waits, CPU, size),) if size else ())


def _largest_piece(look: Look) -> float:
    return max((max(node.free[CPU], 0.0) for node in look.takers), default=0.0)


def _smaller(look: Look, waits: Collection[str], r: int) -> float:
    """Return the largest request of a resource with which jobs would use most of the free CPU; 0 if there is none."""
    orders = [order for order in look.orders(waits) if order[r] > 0.0]
    if not orders:
        return 0.0
    wanted = min(orders, key=lambda order: order[r])
    others = [s for s in range(len(RESOURCES)) if s != r and wanted[s] > 0.0]
    rooms = [positive_part(node.free) for node in look.takers]
    pieces = [(free[r], int(min(free[s] / wanted[s] for s in others))) for free in rooms if others]
    pieces = [(free, jobs) for free, jobs in pieces if jobs > 0 and free > 0.0]
    waiting = sum(look.waiting[each].cores for each in waits)
    spare, best, most = look.state.rules.spare[r], 0.0, 0.0
    sizes = {math.floor(free / k + 1e-6) for free, jobs in pieces for k in range(1, min(jobs, 16) + 1)}
    for size in sorted(sizes, reverse=True):
        if 0 < size < wanted[r]:
            started = sum(min(jobs, count_fitting(free, size, spare)) for free, jobs in pieces)
            cores = min(started * wanted[CPU], waiting)
            if cores > most * 1.02:
                best, most = float(size), cores
    return best


def _order_less(look: Look, r: int, started: Started, waits: Collection[str]) -> Remedy:
    orders = [order for order in look.orders(waits) if order[r] > 0.0]
    name, wanted = RESOURCES[r], min((order[r] for order in orders), default=0.0)
    nodes = [node for node in look.takers if node.free[r] < wanted]
    tasks = (task for each in waits for task in look.waiting[each].element.operation.record.tasks)
    verb = "reserves" if r == MEMORY and any(task.memory_reserve for task in tasks) else "requests"
    why = f"the nodes where CPU is free lack {name}: a waiting job {verb} {format_amount(r, wanted)}"
    if name == obstacles.SCARCE[0]:
        more = f"let {count(len(nodes), 'node')} offer {count(sum(started.jobs.values()), 'more user_slot')} in all"
        why = "the nodes where CPU is free have no user_slots left"
        return Remedy(why, more, tried=(_offer_slots(look.tree.name),))
    size = _smaller(look, waits, r)
    tried = (_edit_orders(waits, r, size),)
    if size:
        return Remedy(f"{why} {name}", f"request at most {format_amount(r, size)} {name} for a job", tried=tried)
    most = format_amount(r, max((max(node.free[r], 0.0) for node in nodes), default=0.0))
    return Remedy(f"{why} {name}, at most {most} is left on a node", f"add a node with {name}", tried=tried)


def _offer_slots(name: str) -> Callable[[State], None]:
    def apply(state: State) -> None:
        tree = state.trees[name]
        for node in tree.nodes.values():
            node.capacity = (1e6, *node.capacity[1:])
        tree.sum_total()

    return apply


def _fit_gang(look: Look, started: Started, waits: Collection[str]) -> Remedy:
    """Return the remedy for the gang that would use most cores: start it with the number of jobs that fit at once."""
    gangs = [each for each in waits if look.waiting[each].element.operation.record.is_gang]
    name = max(gangs, key=lambda each: started.cores.get(each, 0.0))
    operation = look.waiting[name].element.operation
    needed, smallest = operation.needed_job_count, min(order[CPU] for order, _ in operation.needed_orders)
    single = _edit_records(waits, lambda record: msgspec.structs.replace(record, is_gang=False))
    why = f"a gang starts only when all of its {needed} jobs fit at once"
    room, largest = started.jobs_of.get(name, 0), _largest_piece(look)
    if largest < smallest - 1e-9:
        size = find_size(look, smallest)
        pieces = f"{count(room, 'job')} of at most {count_cores(size)}"
        return Remedy(
            f"{why}, and CPU is free in pieces of at most {count_cores(largest)}, less than a job requests",
            WAIT if size < LEAST_ORDER else f"start operation {name} again with at most {pieces} each",
            operations=(name,),
            tried=(single, _edit_orders(waits, CPU, size)) if size else (single,),
        )
    return Remedy(
        f"{why}, and only {room} {'fits' if room == 1 else 'fit'}",
        f"start operation {name} again with at most {count(room, 'job')}",
        operations=(name,),
        tried=(single,),
    )


def _names(nodes: Sequence[Node]) -> str:
    names = ", ".join(each.id for each in nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
    return f"{'node' if len(nodes) == 1 else 'nodes'} {names}"


def _used(nodes: Iterable[Node], started: Started) -> list[Node]:
    """Return the nodes on which jobs started; all nodes if there was no trial yet."""
    return [each for each in nodes if not started.jobs or each.id in started.jobs]


def _widen_filters(look: Look, started: Started, waits: Collection[str]) -> Remedy:
    """Return the remedy for nodes that filters leave out. It says which these are and proposes no value, since the
    filter is deliberate."""
    elements = [look.waiting[each].element for each in sorted(started.cores or waits)]
    told = list(
        dict.fromkeys(describe_filters(each.parent) for each in elements if each.parent and each.parent.fitting)
    )
    own = [each.name for each in elements if each.options.scheduling_tag_filter.strip()]
    told += [f"{TAG_FILTER} of {count(len(own), 'waiting operation')}"] if own else []
    nodes = _used((node for node in look.takers if not all(each.may_use(node) for each in elements)), started)
    return Remedy(
        f"{' and '.join(told[:3])} leave{'s' if len(told) == 1 else ''} out {_names(nodes)}",
        f"give {_names(nodes)} matching tags, or widen the filter",
        operations=tuple(own[:3]),
        tried=(_lift_filters(look.tree.name, waits),),
    )


def _lift_filters(tree_name: str, waits: Collection[str]) -> Callable[[State], None]:
    def apply(state: State) -> None:
        tree = state.trees[tree_name]
        for element in [tree.operations[name] for name in waits]:
            element.options = msgspec.structs.replace(element.options, scheduling_tag_filter="")
            for pool in element.ancestors():
                pool.settings = msgspec.structs.replace(pool.settings, scheduling_tag_filter="")
        for pool in tree.pools.values():
            fit(pool)
        for element in tree.operations.values():
            fit(element)
            element.entry = None

    return apply


def _uncordon(look: Look, started: Started) -> Remedy:
    nodes = _used((each for each in look.tree.nodes.values() if each.cordoned and each.is_online), started)
    how = "held off because jobs fail there" if all(each.is_held_off for each in nodes) else "cordoned"
    return Remedy(
        f"{_names(nodes)} {'is' if len(nodes) == 1 else 'are'} {how}",
        f"uncordon {_names(nodes)}",
        lines=tuple(command_line("node", "uncordon", each.id) for each in nodes),
        tried=tuple(UncordonNode(each.id) for each in nodes),
    )


# --- nodes of other trees


def _fit_tags(look: Look, started: Started) -> Remedy:
    tree, nodes = look.tree.name, _used(look.outside, started)
    nodes_filter, they = look.tree.config.settings.nodes_filter, _names(nodes)
    tried = (_move_nodes(tree, [each.id for each in nodes]),)
    if several := [each for each in nodes if each.matched_trees]:
        trees = " and ".join(several[0].matched_trees)
        return Remedy(
            f"the tags of {they} match the nodes_filter of trees {trees}, so no job starts there",
            f"change the tags of {they}, or the filters, so that only one matches",
            tried=tried,
        )
    theirs = sorted({each.tree for each in nodes if each.tree})
    where = f"trees {', '.join(theirs)}" if len(theirs) > 1 else f"tree {theirs[0]}" if theirs else "no tree"
    why = f"nodes_filter of tree {tree} ({nodes_filter or 'every node'}) leaves out {they}, of {where}"
    if theirs:
        return Remedy(why, f"let the operations run in {where}, too (pool_trees)", tried=tried)
    own, other = {tag for each in nodes for tag in each.tags}, set[str]()
    common = frozenset.intersection(*(each.tags for each in nodes))
    tag = min(common or own - other, key=lambda each: (each in {node.id for node in nodes}, each))
    wider = f"({nodes_filter}) | {tag}" if common else " | ".join([f"({nodes_filter})", *sorted(own)])
    return set_tree(tree, [("nodes_filter", wider)], why, f"set nodes_filter to {wider}")


def _move_nodes(name: str, node_ids: Collection[str]) -> Callable[[State], None]:
    def apply(state: State) -> None:
        tree = state.trees[name]
        for node_id in node_ids:
            node = state.nodes[node_id]
            if node.tree in state.trees:
                state.trees[node.tree].nodes.pop(node_id, None)
            node.tree, node.matched_trees = name, ()
            tree.nodes[node_id] = node
        tree.sum_total()

    return apply
