"""The commands ``tree`` and ``pool``: pool trees and pools of a running scheduler, and what a change would do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import click

from cpumond.api.pool_views import PoolList, PoolView, TreeList, TreeView
from cpumond.cli.imports.command import import_command
from cpumond.cli.options import given, quote_name
from cpumond.cli.output import print_fields, print_items, print_json, warn
from cpumond.cli.render.grid import Cell, Column, column
from cpumond.cli.scheduler import pool_file
from cpumond.cli.scheduler.arguments import read_attributes, read_edits
from cpumond.cli.scheduler.client import scheduler_options, tree_option, unset_option, watched
from cpumond.cli.scheduler.finding import POOL, TREE, pool_argument
from cpumond.cli.scheduler.forecast import print_simulation, simulate_option
from cpumond.cli.scheduler.http_client import SchedulerClient
from cpumond.cli.scheduler.plans import (
    PlanRefusedError,
    confirm,
    format_limits,
    format_value,
    print_plan,
    print_warnings,
)
from cpumond.cli.scheduler.report_rows import describe_budgets
from cpumond.cli.scheduler.tree_text import is_tree_file
from cpumond.core.errors import UsageError
from cpumond.core.measures import format_cores, format_span
from cpumond.core.words import count, escape, format_percent
from cpumond.fairshare.resources import format_resource
from cpumond.scheduler.answers.plan import ChangePlan
from cpumond.scheduler.history.savings import SavingsRow
from cpumond.scheduler.model import ROOT_POOL, PoolIntegralGuarantees, TreeSettings
from cpumond.scheduler.settings.attributes import Kind, find_mistyped, is_option, read_tree

ASSIGNMENTS: Final = "[KEY=VALUE]..."
STARVES: Final = {"starving": "red", "aggressively_starving": "bold red"}
INTEGRAL: Final = "integral_guarantees"


def format_amounts(amounts: dict[str, float], nothing: str = "-") -> str:
    """Format amounts like ``format_limits``, but without amounts of 0."""
    return format_limits({name: amount for name, amount in amounts.items() if amount}, nothing)


def format_share(ratio: float, resource: str) -> str:
    """A share of the cluster in percent, with its resource unless that is CPU: "3.3 % (by job slots)"."""
    return f"{format_percent(ratio)} %{format_resource(resource)}"


def format_cpu_time(cpu_seconds: float, reclaimed_cpu_seconds: float) -> str:
    """The CPU time that jobs used, and the time reclaimed from their requests (semantics.md 1.7)."""
    reclaimed = f", {format_cores(reclaimed_cpu_seconds)} reclaimed" if reclaimed_cpu_seconds else ""
    return f"{format_cores(cpu_seconds)} core-seconds used{reclaimed}"


def format_state(starvation: str, starves_in_s: float | None) -> Cell:
    """Return ``starving``, ``starves in 12 s``, or nothing."""
    if starvation in STARVES:
        return starvation.replace("_", " "), STARVES[starvation]
    return ("", "") if starves_in_s is None else (f"starves in {format_span(starves_in_s)}", "yellow")


@click.group("tree", epilog="Example: cpumond tree list")
def tree_command() -> None:
    """Show, create, change and remove the pool trees of the scheduler, and keep them as files."""


for each in (*pool_file.COMMANDS, import_command):
    tree_command.add_command(each)


TREES: Final[tuple[Column[TreeView], ...]] = (
    column("tree", 0, lambda tree: escape(tree.name) + (" (default)" if tree.is_default else "")),
    column(">nodes", 6, lambda tree: str(tree.node_count)),
    column(">online", 5, lambda tree: str(tree.online_node_count)),
    column(">cores", 1, lambda tree: format_cores(tree.total_resources["cpu"])),
    column(">allocated", 2, lambda tree: format_cores(tree.resource_usage["cpu"])),
    column(">demand", 7, lambda tree: format_cores(tree.resource_demand["cpu"])),
    column(">pools", 8, lambda tree: str(tree.pool_count)),
    column(">running", 3, lambda tree: str(tree.running_operation_count)),
    column(">pending", 4, lambda tree: str(tree.pending_operation_count)),
)


@tree_command.command("list", epilog="Example: cpumond tree list --json")
@scheduler_options
@watched
def tree_list_command(client: SchedulerClient) -> None:
    """Print one line per pool tree. Numbers are cores."""
    answer = client.fetch("/trees", TreeList)
    print_items(TREES, answer.trees, "there is no pool tree; create one with `cpumond tree create NAME`")
    for tree in answer.trees:
        for error in tree.errors:
            warn(f"tree {tree.name}: {error}")


@tree_command.command("show", epilog="Example: cpumond tree show default")
@click.argument("tree", type=TREE)
@scheduler_options
def tree_show_command(client: SchedulerClient, tree: str) -> None:
    """Show one pool tree with its options."""
    answer = client.fetch(f"/trees/{quote_name(tree)}", TreeView)
    print_fields(
        [
            ("tree", escape(answer.name) + (", the default one" if answer.is_default else "")),
            ("nodes", _format_nodes(answer)),
            ("resources", format_amounts(answer.total_resources)),
            ("used", format_amounts(answer.resource_usage)),
            ("demand", format_amounts(answer.resource_demand)),
            ("pools", str(answer.pool_count)),
            ("operations", _operation_counts(answer)),
            ("a pool", describe_counts_of_pools(read_tree(answer.attributes))),
            *(("budgets", line) for line in describe_budgets(answer.budgets)),
            *_option_fields(answer.attributes),
        ]
    )
    for error in answer.errors:
        warn(error)


def describe_counts_of_pools(tree: TreeSettings) -> str:
    """Describe how many operations a pool without its own counts may run and hold, and which pools they cover (2.4)."""
    counts = f"{tree.max_running_operation_count_per_pool} running, {tree.max_operation_count_per_pool} in all"
    if tree.per_pool_counts_for_leaves_only:
        return (
            f"at most {counts}, unless it has sub-pools (per_pool_counts_for_leaves_only) or counts of its own; "
            "in YTsaurus also then"
        )
    return f"at most {counts}, also of all that its sub-pools have, unless it has counts of its own; as in YTsaurus"


def _format_nodes(answer: TreeView) -> str:
    cordoned = f", {answer.cordoned_node_count} cordoned" if answer.cordoned_node_count else ""
    held_off = f", {answer.held_off_node_count} held off" if answer.held_off_node_count else ""
    return f"{answer.online_node_count} of {answer.node_count} online{cordoned}{held_off}"


def _operation_counts(answer: TreeView | PoolView) -> str:
    running = f"{answer.running_operation_count} of at most {answer.max_running_operation_count} running"
    return f"{running}, {answer.operation_count} of at most {answer.max_operation_count} in all"


def _option_fields(attributes: dict[str, Any]) -> list[tuple[str, str]]:
    return [(escape(key), escape(format_value(value))) for key, value in attributes.items()]


force_option = click.option("--force", is_flag=True, help="Keep attributes that are no known options, too.")


def check_names(kind: Kind, assignments: Sequence[str], force: bool) -> None:
    """Refuse keys that are no options, which would be kept without effect (2.5). Raises UsageError."""
    for assignment in () if force else assignments:
        key, _, value = assignment.partition("=")
        name = key.strip().partition("/")[0].partition(".")[0]
        near = find_mistyped(kind, name)
        if near is not None and value.strip():
            hint = f"did you mean {near}? " if near else ""
            raise UsageError(f'"{escape(name)}" is no option of a {kind}; {hint}--force keeps it, without effect')


@tree_command.command("create", epilog="Example: cpumond tree create gpu nodes_filter=gpu")
@click.argument("name")
@click.argument("assignments", metavar=ASSIGNMENTS, nargs=-1)
@force_option
@scheduler_options
def tree_create_command(client: SchedulerClient, name: str, assignments: tuple[str, ...], force: bool) -> None:
    """Create a pool tree. Each node belongs to the one tree whose nodes_filter matches its tags."""
    check_names("tree", assignments, force)
    body = {"name": name, "attributes": read_attributes(assignments, "tree")}
    client.change(f"tree {escape(name)} is created", "POST", "/trees", body)


@tree_command.command("set", epilog="Example: cpumond tree set default fair_share_starvation_timeout=10000")
@click.argument("tree", type=TREE)
@click.argument("assignments", metavar=ASSIGNMENTS, nargs=-1)
@unset_option
@click.option("--default", "is_default", is_flag=True, help="Make it the tree of operations that name none.")
@force_option
@scheduler_options
def tree_set_command(
    client: SchedulerClient, tree: str, assignments: tuple[str, ...], unset: tuple[str, ...], is_default: bool,
    force: bool,
) -> None:  # fmt: skip
    """Change options of a pool tree: all of them, or none if one is refused.

    Values are JSON, TOML or YSON; everything else is text. KEY= removes. Keys may be paths:
    integral_guarantees/smooth_period=30000. Times are milliseconds."""
    check_names("tree", assignments, force)
    content = b""
    if assignments or unset or not is_default:
        edits = read_edits(assignments, unset, "tree")
        content = client.request("PATCH", f"/trees/{quote_name(tree)}", {"edits": edits})
    if is_default:
        chosen = client.request("PUT", "/default_tree", {"tree": tree})
        content = content or chosen
    client.print_done(content, f"tree {escape(tree)} is {'the default one' if is_default else 'changed'}")


yes_option = click.option("--yes", is_flag=True, help="Do not ask, even if guarantees or operations are affected.")


@tree_command.command("remove", epilog="Example: cpumond tree remove gpu --recursive")
@click.argument("tree", type=TREE)
@click.option("--recursive", is_flag=True, help="Include its pools; operations that have no other tree are aborted.")
@yes_option
@scheduler_options
def tree_remove_command(client: SchedulerClient, tree: str, recursive: bool, yes: bool) -> None:
    """Remove a pool tree. If it has operations, the plan is shown and you are asked."""
    path = f"/trees/{quote_name(tree)}"
    if not yes:
        view = client.get(path, TreeView)
        held = count(view.operation_count, "operation") if view.operation_count else ""
        _ask(client, f"tree {escape(tree)}", held, {"type": "RemoveTree", "tree": tree, "recursive": recursive})
    client.change(f"tree {escape(tree)} is removed", "DELETE", path, recursive=recursive)


def _ask(client: SchedulerClient, what: str, held: str, command: dict[str, Any]) -> None:
    """If something is ``held``, show what a removal does and ask with ``confirm``."""
    if held:
        unasked = f"{what} has {held}; nothing is removed: give --yes to remove it anyway"
        confirm(client, command, f"{what} has {held}. Remove it?", unasked, "nothing is removed")


@click.group("pool", epilog="Example: cpumond pool set research weight=2")
def pool_command() -> None:
    """Show, create, change, move and remove pools, and see in advance what a change would do."""


def pool_path(tree: str, pool: str = "") -> str:
    path = f"/trees/{quote_name(tree)}/pools"
    return f"{path}/{quote_name(pool)}" if pool else path


def find_depths(pools: Iterable[PoolView | SavingsRow]) -> dict[str, int]:
    """Return pool -> number of its ancestors among ``pools``, in which parents come first."""
    depths: dict[str, int] = {}
    for pool in pools:
        depths[pool.name] = depths.get(pool.parent or "", -1) + 1
    return depths


def _format_pool(pool: PoolView, indent: str = "") -> Cell:
    return indent + escape(pool.name), "dim" if pool.is_ephemeral else ""


def _format_mode(pool: PoolView) -> str:
    integral = pool.attributes.get(INTEGRAL, {}).get("guarantee_type", "none")
    return pool.mode if integral == "none" else f"{pool.mode} {integral}"


def _format_some(cores: float | None) -> str:
    return format_cores(cores) if cores else "-"


POOLS: Final[tuple[Column[PoolView], ...]] = (
    column("pool", 0, _format_pool),
    column("mode", 10, _format_mode),
    column(">weight", 8, lambda pool: "-" if pool.weight is None else f"{pool.weight:g}"),
    column(">cores", 5, lambda pool: format_cores(pool.fair_share["cpu"])),
    column(">share", 4, lambda pool: format_share(pool.fair_share_ratio, pool.fair_share_resource)),
    column(">allocated", 1, lambda pool: format_cores(pool.usage["cpu"])),
    column(">demand", 2, lambda pool: format_cores(pool.demand["cpu"])),
    column(">waiting", 6, lambda pool: _format_some(pool.waiting["cpu"])),
    column(">guarantee", 6, lambda pool: _format_some(pool.strong_guarantee["cpu"])),
    column(">limit", 9, lambda pool: format_cores(pool.limits["cpu"]) if "cpu" in pool.limits else "-"),
    column(">running", 7, lambda pool: f"{pool.running_operation_count}/{pool.max_running_operation_count}"),
    column(">all", 11, lambda pool: f"{pool.operation_count}/{pool.max_operation_count}"),
    column("state", 3, lambda pool: format_state(pool.starvation_status, pool.starves_in_s)),
)


def _format_budget(pool: PoolView) -> Cell:
    """Return the spent part of a pool's budget in percent, or, without a budget, the core-hours."""
    if pool.budget is None:
        return "", ""
    spent, most = pool.budget.spent_core_hours, pool.budget.core_hours
    shown = f"{format_percent(spent / most)} %" if most else f"{format_cores(spent)} h"
    return shown, {"within": "", "low": "yellow", "spent": "red"}[pool.budget.level]


@pool_command.command("list", epilog="Example: cpumond pool list")
@tree_option
@scheduler_options
@watched
def pool_list_command(client: SchedulerClient, tree: str | None) -> None:
    """List the pools of a tree, each below its parent.

    Numbers are cores. "cores" is the CPU of the fair share. "share" is its largest share of a resource, in percent of
    the cluster; the resource is named unless it is CPU."""
    pools = client.fetch(pool_path(client.find_tree(tree)), PoolList).pools
    depths = find_depths(pools)
    name: Column[PoolView] = column("pool", 0, lambda pool: _format_pool(pool, "  " * depths[pool.name]))
    spent = column("budget", 2, _format_budget) if any(pool.budget for pool in pools) else None
    print_items([name, *POOLS[1:], *([spent] if spent else [])], pools)


@pool_command.command("show", epilog="Example: cpumond pool show research")
@pool_argument
@click.option(
    "--all", "show_all", is_flag=True, help="All values that the scheduler computes for it, by YTsaurus' names."
)
@tree_option
@scheduler_options
def pool_show_command(client: SchedulerClient, pool: str, show_all: bool, tree: str | None) -> None:
    """Show one pool with its attributes; "<Root>" is the root."""
    path = pool_path(client.find_tree(tree), pool)
    if show_all:
        print_fields(_option_fields(client.fetch(f"{path}/orchid", dict[str, Any])))
        return
    answer = client.fetch(path, PoolView)
    used = format_cpu_time(answer.cpu_seconds, answer.reclaimed_cpu_seconds)
    share = format_share(answer.fair_share_ratio, answer.fair_share_resource)
    print_fields(
        [
            ("pool", escape(answer.name) + (", ephemeral" if answer.is_ephemeral else "")),
            ("parent", escape(answer.parent or "")),
            ("sub-pools", escape(", ".join(answer.children))),
            ("mode", answer.mode),
            ("fair share", f"{format_amounts(answer.fair_share)}: {share} of the cluster"),
            ("allocated", format_amounts(answer.usage)),
            ("demand", format_amounts(answer.demand)),
            ("waiting", format_amounts(answer.waiting, "")),
            ("guarantee", format_amounts(answer.strong_guarantee, "")),
            ("volume", format_amounts(answer.volume, "")),
            ("cpu time", f"{used}, since the start of the scheduler"),
            ("limits", format_limits(answer.limits)),
            ("operations", _operation_counts(answer)),
            ("state", escape(answer.state_text)),
            *([] if answer.budget is None else [("budget", answer.budget.text)]),
            *_option_fields(answer.attributes),
        ]
    )


@pool_command.command("create", epilog="Example: cpumond pool create nightly --parent research weight=0.5")
@click.argument("name")
@click.argument("assignments", metavar=ASSIGNMENTS, nargs=-1)
@click.option("--parent", metavar="POOL", type=POOL, default=ROOT_POOL, show_default=True)
@force_option
@tree_option
@scheduler_options
def pool_create_command(
    client: SchedulerClient, name: str, assignments: tuple[str, ...], parent: str, force: bool, tree: str | None
) -> None:
    """Create a pool; attributes as in `cpumond pool set`."""
    expanded = [expand_key(each) for each in assignments]
    check_names("pool", expanded, force)
    body = {"name": name, "parent": parent, "attributes": read_attributes(expanded, "pool")}
    client.change(f"pool {escape(name)} is created", "POST", pool_path(client.find_tree(tree)), body)


@pool_command.command(
    "set", epilog="Example: cpumond pool set research weight=2 strong_guarantee_resources={cpu=100} resource_limits="
)
@pool_argument
@click.argument("assignments", metavar=ASSIGNMENTS, nargs=-1)
@unset_option
@force_option
@tree_option
@scheduler_options
def pool_set_command(
    client: SchedulerClient, pool: str, assignments: tuple[str, ...], unset: tuple[str, ...], force: bool,
    tree: str | None,
) -> None:  # fmt: skip
    """Change attributes of a pool: all of them, or none if one is refused.

    Values are JSON, TOML or YSON, for example {cpu=100} or [weight]; everything else is text. KEY= removes. Keys may be
    paths: strong_guarantee_resources/cpu=100, or with dots. For options of integral_guarantees, such as resource_flow,
    that name may be left out. Times are milliseconds, memory bytes."""
    check_names("pool", [expand_key(each) for each in assignments], force)
    body = {"edits": read_pool_edits(assignments, unset)}
    client.change(f"pool {escape(pool)} is changed", "PATCH", pool_path(client.find_tree(tree), pool), body)


def read_pool_edits(assignments: Sequence[str], unset: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Edits of a pool; keys that only ``integral_guarantees`` has are put there."""
    return read_edits([expand_key(each) for each in assignments], [expand_key(each) for each in unset], "pool")


def expand_key(assignment: str) -> str:
    """Return ``resource_flow=...`` as ``integral_guarantees/resource_flow=...``."""
    first = assignment.partition("=")[0].replace(".", "/").partition("/")[0].strip().replace("-", "_")
    if first not in PoolIntegralGuarantees.__struct_fields__ or is_option("pool", first):
        return assignment
    key, equals, value = assignment.partition("=")
    return f"{INTEGRAL}/{key.strip().replace('.', '/')}{equals}{value}"


@pool_command.command("remove", epilog="Example: cpumond pool remove nightly")
@pool_argument
@click.option("--recursive", is_flag=True, help="Include its sub-pools.")
@yes_option
@tree_option
@scheduler_options
def pool_remove_command(client: SchedulerClient, pool: str, recursive: bool, yes: bool, tree: str | None) -> None:
    """Remove a pool. Its operations continue in an ephemeral pool of that name.

    If it has guarantees or operations, the plan is shown and you are asked; without a terminal it needs --yes."""
    name = client.find_tree(tree)
    path = pool_path(name, pool)
    if not yes:
        command = {"type": "RemovePool", "tree": name, "pool": pool, "recursive": recursive}
        _ask(client, f"pool {escape(pool)}", _held_by(client.get(path, PoolView)), command)
    client.change(f"pool {escape(pool)} is removed", "DELETE", path, recursive=recursive)


def _held_by(pool: PoolView) -> str:
    """What is lost or moved with a pool: ``guarantees``, ``3 operations``, both, or nothing.

    Sub-pools need no check: their guarantees are covered by those of the pool (semantics.md 2.6)."""
    integral = pool.attributes.get(INTEGRAL, {})
    given = (
        pool.attributes.get("strong_guarantee_resources", {}),
        *(integral.get(name, {}) for name in ("resource_flow", "burst_guarantee_resources")),
    )
    held = ["guarantees"] if any(any(amounts.values()) for amounts in given) else []
    if pool.operation_count:
        held.append(count(pool.operation_count, "operation"))
    return " and ".join(held)


@pool_command.command("move", epilog="Example: cpumond pool move nightly --parent research")
@pool_argument
@click.option("--parent", metavar="POOL", help="The new parent; <Root> is the root.")
@click.option("--name", metavar="NAME", help="The new name.")
@tree_option
@scheduler_options
def pool_move_command(
    client: SchedulerClient, pool: str, parent: str | None, name: str | None, tree: str | None
) -> None:
    """Move a pool, with all pools below it, to another parent, or rename it."""
    if parent is None and name is None:
        raise UsageError("nothing to change; give --parent or --name")
    body = given({"parent": parent, "name": name})
    done = f"pool {escape(pool)} is {'renamed' if parent is None else 'moved'}"
    client.change(done, "POST", f"{pool_path(client.find_tree(tree), pool)}/move", body)


def _read_change(pool: str, assignments: Sequence[str], unset: Sequence[str], parent: str | None) -> dict[str, Any]:
    """The command that moves or changes a pool, or both."""
    if parent and not assignments and not unset:
        return {"type": "MovePool", "new_parent": parent, "new_name": pool}
    edits = read_pool_edits(assignments, unset)
    if parent:
        edits.append({"path": ["parent_name"], "value": parent})
    return {"type": "ChangePool", "edits": edits}


@pool_command.command("plan", epilog="Example: cpumond pool plan research weight=2")
@pool_argument
@click.argument("assignments", metavar=ASSIGNMENTS, nargs=-1)
@unset_option
@click.option("--create", "is_new", is_flag=True, help="Plan `cpumond pool create`.")
@click.option("--parent", metavar="POOL", help="The parent: of a new pool, or to plan `cpumond pool move`.")
@click.option("--remove", "is_removed", is_flag=True, help="Plan `cpumond pool remove`.")
@click.option("--recursive", is_flag=True, help="With --remove: sub-pools, too.")
@click.option("--all", "show_all", is_flag=True, help="Include pools and operations that do not change.")
@simulate_option
@tree_option
@scheduler_options
def pool_plan_command(
    client: SchedulerClient, pool: str, assignments: tuple[str, ...], unset: tuple[str, ...], is_new: bool,
    parent: str | None, is_removed: bool, recursive: bool, show_all: bool, simulates: bool, tree: str | None,
) -> None:  # fmt: skip
    """Show what a change of a pool would do to every fair share; nothing is changed.

    Takes the same KEY=VALUE as `cpumond pool set`. Numbers are cores, before -> after; only changes are shown. If the
    change would be refused, this command ends with its exit code: 78, 77 without the rights, 67 for an unknown pool.
    POOL may also be a file with several pools, as for `cpumond tree plan`: options that it does not set are unset."""
    if simulates and show_all:
        raise UsageError("--simulate shows no plan: --all has no effect; leave it out")
    if is_tree_file(pool):
        if assignments or unset or is_new or parent or is_removed or recursive:
            raise UsageError(f"{pool}: the file describes the changes; leave the other arguments out")
        if simulates:
            pool_file.simulate_file(client, pool, tree, False)
        else:
            pool_file.print_file_plan(client, pool, tree, False, show_all)
        return
    if is_new and is_removed:
        raise UsageError("--create and --remove: give one of them")
    if recursive and not is_removed:
        raise UsageError("--recursive goes with --remove")
    if is_removed:
        if assignments or unset or parent:
            raise UsageError("--remove: nothing else can be changed with it")
        told: dict[str, Any] = {"type": "RemovePool", "pool": pool, "recursive": recursive}
    elif is_new:
        attributes = read_attributes([expand_key(each) for each in assignments], "pool")
        told = {"type": "CreatePool", "name": pool, "parent": parent or ROOT_POOL, "attributes": attributes}
    else:
        told = {"pool": pool, **_read_change(pool, assignments, unset, parent)}
    command = {"tree": client.find_tree(tree), **told}
    if simulates:
        print_simulation(client, {"command": command})
        return
    content = client.request("POST", "/plan", command, {"everything": show_all})
    plan = client.decode(content, ChangePlan)
    if client.as_json:
        print_json(content, ChangePlan, "effects")
        print_warnings(plan)
    elif plan.accepted:
        print_plan(plan)
    if not plan.accepted:
        raise PlanRefusedError(f"the change would be refused: {plan.refusal}", plan.code)
