"""Trees and pools in the JSON API: values that msgspec writes, made from live elements. Pure.

Units are those of ``views``; starvation follows semantics.md 6.2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from cpumond.api.figures import Amounts, View, choose_figures, make_view
from cpumond.api.permissions import InheritedEntry, explain_pool_permissions, list_inherited
from cpumond.scheduler.access import Rights
from cpumond.scheduler.answers.pool import describe_pool
from cpumond.scheduler.decide.starvation import starves_in_s
from cpumond.scheduler.elements import PoolElement, SchedulingStatus, StarvationStatus, Tree, figures
from cpumond.scheduler.elements.account import BudgetView, view_budget
from cpumond.scheduler.model import RESOLVE, ROOT_POOL, CommandError, Mode, to_amounts
from cpumond.scheduler.settings.tree_file import TreeTables, make_tables, revision_of


class TreeView(View, frozen=True):
    """A pool tree. ``attributes``: as they were set. ``errors``: problems in spite of which the tree was last updated.

    ``resource_usage`` is allocated to the running jobs: for CPU their limits now, not the measured usage. ``may``:
    permission (use, modify_children, write, administer) -> "" if the user has it, else why not."""

    name: str
    id: str
    is_default: bool
    attributes: dict[str, Any]
    total_resources: Amounts
    resource_usage: Amounts
    resource_demand: Amounts
    waiting_demand: Amounts
    pool_count: int
    operation_count: int
    running_operation_count: int
    max_operation_count: int
    max_running_operation_count: int
    pending_operation_count: int
    node_count: int
    online_node_count: int
    cordoned_node_count: int
    held_off_node_count: int
    update_count: int
    errors: list[str]
    may: dict[str, str]
    budgets: list[BudgetView]
    """Budgets of pools and of users; users who are no administrators see only their own."""


class TreeList(View, frozen=True):
    """All trees by name; ``default_tree`` "" when there is none."""

    default_tree: str
    trees: list[TreeView]


class PoolView(View, frozen=True):
    """A pool (explicit, ephemeral or the root), as of the last fair-share update.

    ``attributes``: as they were set. ``weight`` null: not set. ``usage``: allocated to the pool's running jobs: for CPU
    their limits now, not the measured usage. ``fair_share_ratio`` and ``usage_ratio`` are of the dominant resource,
    which ``fair_share_resource`` and ``usage_resource`` name: CPU unless another has a larger share.
    ``strong_guarantee``: scaled down if the cluster is overcommitted. ``volume``: accumulated by an integral pool,
    resource times seconds. ``waiting``: demand of operations that are not admitted, in addition to ``demand``.
    ``starves_in_s``: null while the pool gets its share, 0 while it starves. ``cpu_seconds``: used by its jobs since
    this scheduler started. ``reclaimed_cpu_seconds``: requested, but not available to these jobs.
    ``ordered_cpu_seconds``: what the jobs could have used without their agents (semantics.md 1.7).
    ``throttled_cpu_seconds``: time for which a quota throttled their threads; ``late_cpu_seconds``: the part of this
    time in which an agent kept the limit below the request."""

    name: str
    tree: str
    parent: str | None
    id: str
    is_ephemeral: bool
    mode: Mode
    weight: float | None
    attributes: dict[str, Any]
    children: list[str]
    operation_count: int
    max_operation_count: int
    running_operation_count: int
    max_running_operation_count: int
    fair_share: Amounts
    fair_share_ratio: float
    fair_share_resource: str
    usage: Amounts
    usage_ratio: float
    usage_resource: str
    demand: Amounts
    waiting: Amounts
    limits: Amounts
    strong_guarantee: Amounts
    volume: Amounts
    scheduling_status: SchedulingStatus
    starvation_status: StarvationStatus
    starves_in_s: float | None
    owner: str
    cpu_seconds: float
    reclaimed_cpu_seconds: float
    ordered_cpu_seconds: float
    throttled_cpu_seconds: float
    late_cpu_seconds: float
    may: dict[str, str]
    """Permissions as in a tree; empty in lists, because GET .../rights returns the rights on all pools."""
    state_text: str
    """Whether the pool starves or, if it is below its guarantee, why it does not; "" in lists and for the root."""
    budget: BudgetView | None
    inherited_acl: list[InheritedEntry]
    """Entries that apply in addition to the pool's own ``acl``; empty in lists."""


class TreeFile(View, frozen=True):
    """A tree as a tree file shows it: options that are set, pools depth first. ``revision`` changes with the tree."""

    tree: str
    revision: str
    tables: TreeTables


class PoolList(View, frozen=True):
    """The root, then the pools of a tree, each before its sub-pools."""

    tree: str
    pools: list[PoolView]


_TREE: Final = choose_figures(TreeView, figures.TREE)
_POOL: Final = choose_figures(PoolView, figures.POOL)


def view_tree(rights: Rights, tree: Tree, now: float) -> TreeView:
    root, state = tree.root, rights.state
    return make_view(
        TreeView, root, name=tree.name, id=tree.config.id, is_default=tree.name == state.config.default_tree,
        attributes=dict(tree.config.attributes), total_resources=to_amounts(tree.total),
        resource_usage=to_amounts(root.usage), resource_demand=to_amounts(root.demand),
        waiting_demand=to_amounts(root.waiting), update_count=tree.update_count, errors=list(tree.errors),
        may=explain_pool_permissions(rights, root), budgets=list_budgets(rights, tree.name, now),
        **{name: read(tree) for name, read in _TREE.items()},
    )  # fmt: skip


def list_budgets(rights: Rights, tree: str, now: float) -> list[BudgetView]:
    """Return a tree's budgets that the user may see, the one with the largest spent fraction first."""
    found = [view_budget(each, now) for each in rights.state.budgets.values() if each.tree == tree]
    mine = [each for each in found if each.kind == "pool" or rights.user.admin or each.name == rights.user.name]
    return sorted(mine, key=lambda each: (-each.spent_core_hours / max(each.core_hours, 1e-9), each.name))


def view_tree_file(tree: Tree) -> TreeFile:
    return TreeFile(tree.name, revision_of(tree.config), make_tables(tree.config))


def view_trees(rights: Rights, now: float) -> TreeList:
    state = rights.state
    return TreeList(state.config.default_tree, [view_tree(rights, tree, now) for tree in state.trees.values()])


def find_pool(tree: Tree, name: str) -> PoolElement:
    """Return the pool of that name, also an ephemeral one or ``<Root>``. Raises CommandError with code RESOLVE."""
    if name == ROOT_POOL:
        return tree.root
    pool = tree.pools.get(name)
    if pool is None:
        raise CommandError(f'Pool "{name}" does not exist in tree "{tree.name}"', RESOLVE)
    return pool


def view_pool(pool: PoolElement, now: float, rights: Rights | None = None) -> PoolView:
    """Return a pool's view; without ``rights`` it contains no permissions."""
    return make_view(
        PoolView,
        pool,
        _POOL,
        tree=pool.tree.name,
        id="" if pool.config is None else pool.config.id,
        attributes={} if pool.config is None else dict(pool.config.attributes),
        children=sorted(pool.children),
        state_text="" if rights is None else rights.hide_operations(describe_pool(pool, now)),
        may={} if rights is None else explain_pool_permissions(rights, pool),
        inherited_acl=[] if rights is None else list_inherited(rights, pool),
        starves_in_s=starves_in_s(pool, now),
        budget=None if pool.account is None else view_budget(pool.account, now),
    )


def view_pools(tree: Tree, now: float) -> PoolList:
    """Return views of the root and all pools of a tree, depth first, siblings by name."""
    return PoolList(tree.name, [view_pool(pool, now) for pool in walk_pools(tree.root)])


def walk_pools(top: PoolElement) -> Iterator[PoolElement]:
    """Yield ``top`` and the pools below it, depth first, siblings by name."""
    stack = [top]
    while stack:
        pool = stack.pop()
        yield pool
        stack += [pool.children[name] for name in sorted(pool.children, reverse=True)]
