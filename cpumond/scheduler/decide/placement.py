"""Choice of the operations that get jobs on a node's heartbeat: the order of service and the checks (semantics.md 7).

``ServiceOrder`` keeps a heap for each pool: the children that want jobs, the least satisfied first. A change of one
operation moves only the elements on its path. ``place_jobs`` is one regular stage of one heartbeat."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush

from cpumond.fairshare.resources import CPU, ONE, ZERO, Vector, subtract
from cpumond.scheduler.decide.snapshot import fifo_order, name_limit, room_left
from cpumond.scheduler.elements import Element, Job, Node, Operation, OperationElement, PoolElement, Tree
from cpumond.scheduler.elements.fitting import Kind
from cpumond.scheduler.elements.node_sizes import ROUNDING, NodeSizes, fits
from cpumond.scheduler.model import OperationRecord, Task

SHARE_EPS = 1e-9
"""Shares less than this apart count as equal: sums of floats are inexact."""
NEVER = float("inf")
MOST_KINDS = 16
"""Maximum number of kinds of nodes that have their own order of service."""
MAX_NAMED = 10
"""Maximum number of tasks of one operation that are named in warnings."""

ONLY_RECLAIMED = "only_reclaimed_cpu_left"
"""Why an operation with ``allow_reclaimed = false`` gets no job: other jobs have requested the free CPU (1.10)."""
UNMATCHED = "unmatched_scheduling_tag"
"""Why an operation gets no job on a node: a tag filter, its own or that of a pool above, forbids it (2.13)."""
OTHER_NODE = "other_node"
NO_SECRETS = "no_secrets_on_node"
"""Why an operation with secrets gets no job on a node: the agent there cannot pass them to jobs (12.6)."""
NO_KEY = "has secrets that this scheduler cannot read: an administrator must restore their key (secrets_key_file)"
GANG_WAITS = "gang_room"
"""Why a gang gets no jobs: not all of them fit at once."""

NO_ENTRY = 0
"""Version of a child that wants no jobs."""

Key = tuple[float, float]
"""Sort key among siblings; lower comes earlier. The second number decides if the first ones are equal."""

Entry = tuple[float, float, int, int, Element]
"""Key, order among siblings, version, element. Versions differ, so comparisons never reach the element."""


def satisfaction(element: Element) -> float:
    """Return an element's usage divided by its fair share (7.2): 1 is exactly its share, lower is served earlier. Only
    its own usage counts here; a pool's place in the order also depends on its children (``_key_of_pool``)."""
    return satisfaction_of(element.usage, element.fair_share, element.demand_share, element.tree.total)


def satisfaction_of(usage: Vector, fair: Vector, demand: Vector, total: Vector = ONE) -> float:
    """Return the satisfaction by section 7.2. ``usage``: a share or, with the cluster's ``total``, absolute."""
    # Called for every pool above each job that starts, so it is one plain loop.
    over, open_ratio, blocked = 0.0, -1.0, NEVER
    for used, t, f, d in zip(usage, total, fair, demand, strict=True):
        u = used / t if t else 0.0
        if f <= SHARE_EPS:
            if u > f + SHARE_EPS:
                return NEVER
            continue
        ratio = u / f
        if u > f + SHARE_EPS and ratio > over:
            over = ratio
        if ratio > open_ratio and f < d - SHARE_EPS:
            open_ratio = ratio
        if ratio < blocked:
            blocked = ratio
    if over:
        return over
    return blocked if open_ratio < 0.0 else open_ratio


def wants_jobs(element: OperationElement) -> bool:
    """Whether an operation takes part in placement: it runs in the tree, is not held, and has jobs to start."""
    operation = element.operation
    return (
        element.is_running and bool(operation.needed) and not operation.record.suspended and not operation.lacks_secrets
        and element.spent is None
    )  # fmt: skip


class ServiceOrder:
    """The order in which the operations of one tree are served, from one fair-share update to the next (7.1). ``kind``:
    if filters forbid nodes (2.13), the kind of nodes served by this order: to save visits, it leaves out operations
    that may not use them. None: it contains all operations. Each change reaches all orders of a tree."""

    def __init__(self, tree: Tree, kind: Kind | None = None) -> None:
        self.tree = tree
        self.kind = kind
        self._heaps: dict[PoolElement, list[Entry]] = {}
        """Pool -> heap of its children that want jobs."""
        self._valid: dict[Element, int] = {}
        """Child -> the version of its valid entry, or NO_ENTRY; contains every child that ever had one."""
        self._ranks: dict[Element, int] = {}
        """Child -> its rank among its siblings; children added after this order was made have no rank."""
        self._version = 0
        self._aside: list[OperationElement] = []
        self._of_kinds: dict[Kind, ServiceOrder] = {}
        tree.changed.clear()
        self._build(tree.root)

    def of(self, node: Node) -> ServiceOrder:
        """Return the order for a node: this one if no filter is in use or there are too many kinds of nodes."""
        if not self.tree.fittings:
            return self
        kind = self.tree.fittings.of(node)
        found = self._of_kinds.get(kind)
        if found is None:
            if len(self._of_kinds) >= MOST_KINDS:
                return self
            self.catch_up()
            found = self._of_kinds[kind] = ServiceOrder(self.tree, kind)
        return found

    def _wants(self, element: OperationElement) -> bool:
        fits_kind = self.kind is None or element.fitting is None or element.fitting.filters in self.kind
        return fits_kind and wants_jobs(element)

    def _build(self, pool: PoolElement) -> Key | None:
        heap = self._heaps[pool] = []
        for rank, child in enumerate(pool.children.values()):
            self._ranks[child] = rank
            self._enter(heap, child, self._build(child), rank)
        running = fifo_order(pool) if pool.mode == "fifo" else [e for e in pool.operations.values() if e.is_running]
        for rank, element in enumerate(running, len(pool.children)):
            self._ranks[element] = rank
            if self._wants(element):
                self._enter(heap, element, self._key_of(element), rank)
            elif self.kind is not None and wants_jobs(element):
                element.note_passed_over(UNMATCHED)
        heapify(heap)
        return self._key_of_pool(pool, heap)

    def _enter(self, heap: list[Entry], child: Element, key: Key | None, rank: int) -> None:
        """Add an entry to a heap that is being built; if ``key`` is None, the child wants no jobs."""
        if key is not None:
            self._version += 1
            self._valid[child] = self._version
            heap.append((*key, rank, self._version, child))

    def _top(self, heap: list[Entry]) -> Entry | None:
        """Return the first valid entry of a heap and drop the entries before it."""
        valid = self._valid
        while heap:
            entry = heap[0]
            if valid[entry[4]] == entry[3]:
                return entry
            heappop(heap)
        return None

    def _key_of(self, element: OperationElement) -> Key:
        parent = element.parent
        assert parent is not None
        element.satisfaction = satisfaction(element)
        if parent.mode == "fifo" and self.tree.config.settings.fifo_pool_scheduling_order == "fifo":
            return (0.0, 0.0)
        return (element.satisfaction, 0.0)

    def _key_of_pool(self, pool: PoolElement, heap: list[Entry]) -> Key | None:
        """Return a pool's key: that of its best child (7.1); its own satisfaction decides between equal keys. None if
        no child wants a job.

        A pool above its own fair share is served by its own satisfaction. Otherwise a pool with more operations than
        jobs could get every slot even far above its share: some child has no job, so the minimum would always be 0.
        """
        top = self._top(heap)
        if top is None:
            return None
        child = top[4]
        least = child.satisfaction if isinstance(child, OperationElement) else top[0]
        own = satisfaction(pool)
        return (max(least, own) if own > 1.0 + SHARE_EPS else least, own)

    def best(self) -> OperationElement | None:
        """Return the operation that is served next; None if no operation wants a job."""
        pool = self.tree.root
        while True:
            top = self._top(self._heaps[pool])
            if top is None:
                return None
            child = top[4]
            if isinstance(child, OperationElement):
                return child
            assert isinstance(child, PoolElement)
            pool = child

    def refresh(self, element: OperationElement) -> None:
        """Move an operation whose usage or needs have changed."""
        self._place(element, self._key_of(element) if self._wants(element) else None)

    def set_aside(self, element: OperationElement) -> None:
        """Skip an operation until ``restore`` is called (7.1, deactivation)."""
        self._aside.append(element)
        self._place(element, None)

    def leave(self, element: OperationElement) -> None:
        """Skip an operation until its needs change or the next order is made: no other node can help it until then."""
        self._place(element, None)

    def restore(self) -> None:
        """End a heartbeat: operations that were set aside take part again."""
        for element in self._aside:
            self.refresh(element)
        self._aside.clear()

    def catch_up(self, but: ServiceOrder | None = None) -> None:
        """Move all operations that changed since the last call (``Tree.changed``), also in the orders of all kinds.
        ``but``: an order in which they were moved already."""
        changed = self.tree.changed
        if not changed:
            return
        for order in (self, *self._of_kinds.values()):
            for element in list(changed) if order is not but else ():
                order.refresh(element)
        changed.clear()

    def rank(self, elements: Sequence[OperationElement]) -> list[OperationElement]:
        """Sort, for preemptive stages (6.6), operations that want jobs: the least satisfied first at every level."""
        inside: dict[PoolElement, list[Element]] = {}
        for element in elements:
            side: Element = element
            for pool in element.ancestors():
                children = inside.setdefault(pool, [])
                children.append(side)
                if len(children) > 1:
                    break
                side = pool

        def key(child: Element) -> tuple[Key, str]:
            if isinstance(child, PoolElement):
                return (self._key_of_pool(child, self._heaps[child]) or (NEVER, NEVER), child.name)
            assert isinstance(child, OperationElement)
            assert child.parent is not None
            is_fifo = child.parent.mode == "fifo" and child.fifo_index is not None
            return ((float(child.fifo_index or 0) if is_fifo else child.satisfaction, 0.0), child.name)

        # Not recursive: a closure that refers to itself would keep this order alive until the next garbage collection.
        ranked: list[OperationElement] = []
        stack: list[Element] = [self.tree.root]
        while stack:
            child = stack.pop()
            if isinstance(child, OperationElement):
                ranked.append(child)
            elif isinstance(child, PoolElement):
                stack += sorted(inside.get(child, ()), key=key, reverse=True)
        return ranked

    def _place(self, element: OperationElement, key: Key | None) -> None:
        child: Element = element
        pool = element.parent
        while pool is not None:
            heap, rank = self._heaps.get(pool), self._ranks.get(child)
            if heap is None or rank is None:
                return  # the child was added or moved after this order was made; the order of the next update has it
            if key is None:
                self._valid[child] = NO_ENTRY
            else:
                self._version += 1
                self._valid[child] = self._version
                heappush(heap, (*key, rank, self._version, child))
            # Even if the operation wants no job, the usage of the pools above it has changed.
            key = None if pool.parent is None else self._key_of_pool(pool, heap)
            child, pool = pool, pool.parent


def find_unplaceable(jobs: Iterable[tuple[Task, int]], is_gang: bool, trees: Collection[NodeSizes]) -> list[str]:
    """Return sentences about tasks whose jobs fit no node of some trees, not even an empty one, or about a gang that no
    tree could hold at once. ``jobs``: the number of jobs of each task. Trees without nodes do not count."""

    def find_first(told: list[str]) -> str:
        return told[0] if told and all(told) else ""

    needed, found = list(jobs), list[str]()
    for task, _ in needed:
        excess = find_first([sizes.explain_excess(task.resources) for sizes in trees])
        if excess and len(found) == MAX_NAMED:
            return [*found, "and others"]
        found += [f'no job of task "{task.name}" can start: {excess}'] if excess else []
    if is_gang and not found:
        orders = [(task.resources, number) for task, number in needed]
        excess = find_first([sizes.explain_gang_excess(orders) for sizes in trees])
        found += [f"the gang cannot start: {excess}"] if excess else []
    return found


def find_stuck_tasks(live: Operation) -> list[str]:
    """Return ``find_unplaceable`` for those tasks of a live operation that have jobs to start and no live job."""
    if any(each.has_room() for each in live.elements.values()):
        return []
    jobs = [(task, number) for task, number in live.next_jobs() if not live.active.get(task.name)]
    return find_unplaceable(jobs, live.record.is_gang, [each.sizes for each in live.elements.values()])


def list_alerts(live: Operation) -> list[tuple[str, str]]:
    """Return the alerts of a live operation that cannot start any job, each as code and sentence."""
    if live.lacks_secrets:
        return [("secrets_not_readable", f"it {NO_KEY}")]
    if live.stuck is not None and live.stuck.is_reported and not live.active_job_count:
        return [("operation_stuck", f"it is stuck: {live.stuck.why}")]
    return [("job_fits_no_node", sentence) for sentence in find_stuck_tasks(live)]


def fits_orders(unordered_cores: float, cores: float) -> bool:
    """Whether the requests of ordinary jobs still fit into a node's CPU, up to rounding, with another ordinary job of
    ``cores``. ``unordered_cores``: as ``Node.unordered_cores``."""
    return cores <= unordered_cores or cores <= unordered_cores + ROUNDING * max(cores, 1.0)


def may_start_within(record: OperationRecord, unordered_cores: float, cores: float) -> bool:
    """Whether unrequested CPU is enough for a job of the operation. True if it allows reclaimed CPU."""
    return record.allow_reclaimed or fits_orders(unordered_cores, cores)


def is_on_reclaimed(job: Job) -> bool:
    """Whether a job that is about to start will run on reclaimed CPU (1.10): its operation requires it, or its request
    and those of ordinary and foreign jobs on its node exceed the capacity. Jobs that are being stopped do not count."""
    is_required = job.element.operation.record.require_reclaimed
    return is_required or not fits_orders(job.node.unordered_cores, job.limits[CPU])


def is_in_idle_class(job: Job) -> bool:
    """Whether the scheduler asks the node to run the job in its idle class. An agent without that class is not asked:
    the job would run without a ceiling and at an ordinary weight."""
    about = job.node.about
    return job.reclaimed and (about is None or bool(about.idle_class))


def find_ceiling_rule(pool: PoolElement | None, tree: Tree) -> bool | None:
    """``set_container_cpu_limit`` of the nearest pool, from ``pool`` up, that sets it, else that of the tree (1.10)."""
    while pool is not None:
        if pool.settings.set_container_cpu_limit is not None:
            return pool.settings.set_container_cpu_limit
        pool = pool.parent
    return tree.config.settings.set_container_cpu_limit


def has_ceiling(job: Job) -> bool:
    """Whether the request of a job that is about to start is also its ceiling. Its task decides, or else the nearest
    pool or the tree, or else its class."""
    says = job.task.set_container_cpu_limit
    if says is None:
        says = find_ceiling_rule(job.element.parent, job.element.tree)
    return not is_in_idle_class(job) if says is None else says


def find_obstacle(element: OperationElement, task: Task, free: Vector, unordered_cores: float = NEVER) -> str:
    """Return why a job of the task cannot start now with ``free`` on the node; "" if it can (7.1)."""
    wanted = task.resources
    if not fits(free, wanted):
        return "node_resources"
    if not may_start_within(element.operation.record, unordered_cores, task.cpu_limit):
        return ONLY_RECLAIMED
    left, tightest = room_left(element)
    return "" if fits(left, wanted) else name_limit(tightest)


def find_task(element: OperationElement, free: Vector, unordered_cores: float = NEVER) -> tuple[Task | None, str]:
    """Return the first task that may start a job with ``free`` on the node; if none may, None and the last reason."""
    reason = "no_needed_jobs"
    if element.operation.record.preemption_mode == "graceful" and satisfaction(element) >= 1.0:
        return None, "graceful_over_fair_share"
    for task in element.operation.next_tasks():
        reason = find_obstacle(element, task, free, unordered_cores)
        if not reason:
            return task, ""
    return None, reason


def has_spare(node: Node, free: Vector, spare: Vector) -> bool:
    """Whether the node has at least ``spare`` free; resources that it does not have at all do not count (7.1)."""
    for f, s, c in zip(free, spare, node.capacity, strict=True):
        if f < s and c and f < s - ROUNDING * max(s, 1.0):
            return False
    return True


def room_beside(free: Vector, reserved: Vector) -> Vector:
    """Return a node's free resources without ``reserved``; amounts that are negative stay as they are."""
    if reserved is ZERO:
        return free
    a, b, c, d, e = (f if f < 0.0 else max(f - r, 0.0) for f, r in zip(free, reserved, strict=True))
    return (a, b, c, d, e)


def place_jobs(
    order: ServiceOrder, node: Node, spare: Vector, make_job: Callable[[OperationElement, Task, Node], Job],
    start: Callable[[Job], None], place_gang: Callable[[OperationElement], str] = lambda _: GANG_WAITS,
    reserved: Callable[[], Vector] = lambda: ZERO,
    shuns: Callable[[OperationElement, Task], bool] = lambda _, __: False,
) -> list[Job]:  # fmt: skip
    """One regular stage: start jobs on the node, the least satisfied operation first, while resources are free (7.1).

    Each start is counted on the whole path at once, so the next choice takes it into account. A start that is refused
    at any level is counted nowhere. ``place_gang`` starts all jobs of a gang on any nodes, or returns why not (7.3).
    ``reserved``: what this node keeps for a gang. ``shuns``: whether an operation whose jobs failed waits for a
    different node (2.14)."""
    started: list[Job] = []
    order.catch_up()
    own = order.of(node)
    free = room_beside(node.free, reserved())
    while has_spare(node, free, spare):
        element = own.best()
        if element is None:
            break
        if element.operation.record.is_gang:
            reason = place_gang(element)
            if reason:
                element.note_passed_over(reason)
                own.leave(element)
            else:
                own.refresh(element)
            free = room_beside(node.free, reserved())
            continue
        task, reason = None, UNMATCHED
        if element.may_use(node):
            task, reason = find_task(element, free, node.unordered_cores)
            if task is not None and element.operation.shuns and shuns(element, task):
                task, reason = None, OTHER_NODE
        elif element.operation.record.vault_bytes and not node.takes_secrets:
            reason = NO_SECRETS
        if task is None:
            element.note_passed_over(reason)
            own.set_aside(element)
            continue
        job = make_job(element, task, node)
        start(job)
        own.refresh(element)
        started.append(job)
        free = subtract(free, job.limits)
    own.restore()
    order.catch_up(but=own)
    return started
