"""The command ``node``: the nodes of a running scheduler."""

from __future__ import annotations

import time

import click

from cpumond.api.node_views import NodeDetails, NodeList, NodeView
from cpumond.cli.options import given, quote_name
from cpumond.cli.output import print_fields, print_table, print_text, warn
from cpumond.cli.render.grid import Cell, column
from cpumond.cli.scheduler.client import SchedulerClient, scheduler_options
from cpumond.cli.scheduler.finding import TREE, node_argument
from cpumond.cli.scheduler.jobs import STYLES
from cpumond.cli.scheduler.maintenance import COMMANDS
from cpumond.cli.scheduler.pools import show_amounts
from cpumond.core.measures import count_cores, format_span
from cpumond.core.words import show_cores, show_name, show_number


@click.group("node", epilog="Example: cpumond node list --tree default")
def node_command() -> None:
    """Show the nodes that give room to jobs, which register themselves; cordon and drain them for maintenance."""


for each in COMMANDS:
    node_command.add_command(each)


@node_command.command("list", epilog="Example: cpumond node list --tag gpu --offline")
@click.option("--tree", metavar="TREE", type=TREE)
@click.option("--tag", metavar="TAG")
@click.option("--online/--offline", "online", default=None, help="Only those that send heartbeats, or do not.")
@click.option("--limit", type=click.IntRange(1, 1000), default=1000, show_default=True)
@scheduler_options
def node_list_command(
    client: SchedulerClient, tree: str | None, tag: str | None, online: bool | None, limit: int
) -> None:
    """One line per node. Numbers are cores; "others" is what jobs take that are of no operation."""
    state = None if online is None else str(online).lower()
    query = given({"tree": tree, "tag": tag, "online": state, "limit": limit})
    answer = client.show("/nodes", NodeList, query)
    if not answer.nodes:
        print_text("no node fits; nodes register themselves when their agent runs")
        return
    headings = (
        column("node"), column("tree", 5), column("state", 1), column(">cores", 3), column(">allotted", 2),
        column(">others", 8), column(">free", 4), column(">memory free", 7), column(">jobs", 6), column("tags", 9),
    )  # fmt: skip
    print_table(headings, [_node_row(node) for node in answer.nodes])
    if answer.total > len(answer.nodes):
        warn(f"{answer.total - len(answer.nodes)} nodes are not shown; filter them")


def _node_row(node: NodeView) -> list[Cell]:
    return [
        show_name(node.id),
        _show_tree(node),
        show_node_state(node),
        show_cores(node.capacity["cpu"]),
        show_cores(node.usage["cpu"]),
        show_cores(node.foreign_usage["cpu"]),
        show_cores(node.free["cpu"]),
        show_amounts({"memory": node.free["memory"]}).removesuffix(" memory"),
        str(node.job_count) + (f" + {node.stopping_job_count} ending" if node.stopping_job_count else ""),
        show_name(", ".join(tag for tag in node.tags if tag != node.address)),
    ]


def _show_tree(node: NodeView) -> Cell:
    if node.matched_trees:
        return f"{len(node.matched_trees)} fit", "red"
    return ("none", "yellow") if node.tree is None else show_name(node.tree)


def show_node_state(node: NodeView) -> tuple[str, str]:
    """Whether a node is online, cordoned or overcommitted, with a style."""
    if node.lost_at is not None:
        return f"lost {format_span(time.time() - node.lost_at)} ago", "dim"
    if not node.is_online:
        return f"silent for {format_span(node.silent_s)}", "red"
    if node.cordon is not None:
        return "draining" if node.cordon.drain and node.job_count + node.stopping_job_count else "cordoned", "yellow"
    if node.overcommitted_s is not None:
        return f"overcommitted for {format_span(node.overcommitted_s)}", "yellow"
    return "online", ""


def _tell_cordon(node: NodeView) -> str:
    cordon = node.cordon
    if cordon is None:
        return ""
    how = "drained" if cordon.drain else "cordoned"
    ago = format_span(time.time() - cordon.at)
    return f"{how} by {show_name(cordon.user)} {ago} ago" + (f": {show_name(cordon.why)}" if cordon.why else "")


def _tell_reclaimed(node: NodeView) -> str:
    if not node.on_reclaimed_cores and not node.idle_class:
        return ""
    how = f"idle class: {node.idle_class}" if node.idle_class else "its agent has no idle class for them"
    return f"{count_cores(node.on_reclaimed_cores)} of jobs on reclaimed CPU ({how})"


@node_command.command("show", epilog="Example: cpumond node show host-17")
@node_argument
@scheduler_options
def node_show_command(client: SchedulerClient, node: str) -> None:
    """One node with its jobs."""
    answer = client.show(f"/nodes/{quote_name(node)}", NodeDetails)
    tree = "none: no tree's nodes_filter fits its tags, it gets no work" if answer.tree is None else answer.tree
    if answer.matched_trees:
        fitting = " and ".join(answer.matched_trees)
        tree = f"{answer.tree or 'none'}: its tags fit {fitting}; its jobs run on, none is started"
    print_fields(
        [
            ("node", show_name(answer.id)),
            ("address", show_name(answer.address)),
            ("tags", show_name(", ".join(answer.tags))),
            ("tree", show_name(tree)),
            ("state", show_node_state(answer)[0]),
            ("cordon", _tell_cordon(answer)),
            ("last heard of", f"{format_span(answer.silent_s)} ago"),
            ("capacity", show_amounts(answer.capacity)),
            ("allotted", show_amounts(answer.usage)),
            ("used", f"{show_cores(answer.used_cores)} cores of CPU"),
            ("reclaimed", _tell_reclaimed(answer)),
            ("allotted to others", show_amounts(answer.foreign_usage, "")),
            ("free", show_amounts(answer.free)),
            ("overcommitted", f"{answer.overcommit_count} times" if answer.overcommit_count else ""),
        ]
    )
    if not answer.jobs:
        return
    now = time.time()
    rows: list[list[Cell]] = [
        [
            show_name(job.id),
            show_name(job.operation_id),
            (job.state, STYLES.get(job.state, "")),
            job.job_class,
            show_cores(job.cpu_limit),
            show_cores(job.current_cpu_limit),
            show_number(job.smoothed_cpu_usage, ".2f"),
            format_span(now - job.start_time),
            job.preemptibility.replace("_", " "),
            show_name(job.reason),
        ]
        for job in answer.jobs
    ]
    headings = (
        column("job"), column("operation", 1), column("state", 2), column("class", 9), column(">ordered", 6),
        column(">limit", 5), column(">used", 4), column(">time", 3), column("preemptibility", 8), column("", 7),
    )  # fmt: skip
    print_table(headings, rows)
