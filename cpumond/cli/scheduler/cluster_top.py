"""``cpumond top --cluster``: pools, operations and nodes of a scheduler, live."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import click
import msgspec

from cpumond.api.node_views import NodeList, NodeView
from cpumond.api.pool_views import PoolList, PoolView, TreeList, TreeView
from cpumond.api.views import OperationList, OperationView
from cpumond.cli.output import can_ask, print_json, terminal_width, use_colour
from cpumond.cli.render.grid import Column, Item, draw_grid, draw_lines, fold, make_rows, paint, pick
from cpumond.cli.scheduler.finding import shorten_ids
from cpumond.cli.scheduler.http_client import SchedulerClient
from cpumond.cli.scheduler.nodes import NODES
from cpumond.cli.scheduler.operations import OPERATIONS
from cpumond.cli.scheduler.pools import POOLS, pool_path
from cpumond.core.errors import NoSuchError, UnavailableError
from cpumond.core.measures import format_cores
from cpumond.core.words import escape, format_time

MAX_ROWS: Final = 1000
INTERVAL_S: Final = 2.0
VIEWS: Final = {"p": "pools", "o": "operations", "n": "nodes"}
# "used" sorts by allocated CPU: the option's word is older than the heading.
SORTS: Final = {"u": "used", "d": "demand", "s": "share", "a": "name"}
KEYS: Final = "p pools, o operations, n nodes; sort: u allocated, d demand, s share, a name; q ends"


class ClusterPicture(msgspec.Struct, frozen=True):
    """Answer of ``top --cluster --json``: a tree with its pools, the largest operations, and the nodes."""

    tree: TreeView
    pools: list[PoolView]
    operations: list[OperationView]
    nodes: list[NodeView]


def read_picture(client: SchedulerClient, tree: str) -> ClusterPicture:
    """Read the present state of a tree. Raises CpumondError."""
    trees = client.get("/trees", TreeList).trees
    found = next((each for each in trees if each.name == tree), None)
    if found is None:
        known = ", ".join(escape(each.name) for each in trees)
        raise NoSuchError(f"there is no tree {escape(tree)}; known trees: {known or 'none'}")
    query = {"tree": tree, "limit": MAX_ROWS}
    operations = client.get("/operations", OperationList, sort="usage", **query).operations
    return ClusterPicture(
        found,
        client.get(pool_path(tree), PoolList).pools,
        [each for each in operations if each.trees],
        client.get("/nodes", NodeList, **query).nodes,
    )


def print_cluster(client: SchedulerClient, tree: str | None, interval_s: float | None, sort: str, once: bool) -> None:
    """Print one frame, or show frames on a terminal until q or Ctrl-C."""
    name = client.find_tree(tree)
    if client.as_json:
        print_json(msgspec.json.encode(read_picture(client, name)), ClusterPicture)
    elif once or not can_ask():
        width, colour = terminal_width(), use_colour()
        picture = read_picture(client, name)
        parts = [draw_head(picture, width, colour)]
        parts += [draw_view(picture, view, sort, width, colour) for view in VIEWS.values()]
        click.echo("\n\n".join(parts))
    else:
        _draw_live(client, name, interval_s or INTERVAL_S, sort)


def draw_head(picture: ClusterPicture, width: int | None, colour: bool) -> str:
    tree = picture.tree
    cores = [format_cores(each["cpu"]) for each in (tree.resource_usage, tree.total_resources, tree.resource_demand)]
    text = (
        f"{escape(tree.name)} {format_time(time.time(), '%H:%M:%S')}: {cores[0]} of {cores[1]} cores allocated, demand "
        f"{cores[2]}; {tree.running_operation_count} operations running, {tree.pending_operation_count} pending; "
        f"{tree.online_node_count} of {tree.node_count} nodes online"
    )
    return "\n".join(draw_lines([(text, "bold")], width, colour))


def draw_view(
    picture: ClusterPicture, view: str, sort: str, width: int | None, colour: bool, height: int | None = None
) -> str:
    """The pools, operations or nodes as a table of at most ``height`` lines."""
    columns, items = _VIEWS[view](picture, sort)
    columns = shorten_ids(columns, items, width)
    lines = draw_grid(columns, make_rows(columns, items), width, colour)[0].split("\n")
    if height is not None and len(lines) > height:
        lines = [*lines[: max(height - 1, 1)], paint("... there are more", "dim", colour)]
    return "\n".join(lines) if items else f"no {view}"


POOL_RANKS: Final = {"pool": 0, "allocated": 0, "demand": 1, "share": 2, "running": 3, "all": 5, "state": 4}
OPERATION_RANKS: Final = {
    "operation": 0, "state": 4, "user": 7, "pool": 2, "allocated": 0, "demand": 3, "share": 6, "jobs": 5, "age": 8,
    "title": 1,
}  # fmt: skip
NODE_RANKS: Final = {"node": 0, "state": 1, "allocated": 0, "cores": 2, "free": 3, "jobs": 4}
"""Columns of the lists shown here -> their rank: a narrow terminal leaves out the highest first."""

View = tuple[Sequence[Column[Any]], Sequence[Any]]


def _order(items: Iterable[Item], sort: str, name: Callable[[Item], str], **numbers: Callable[[Item], float]) -> (
    list[Item]
):  # fmt: skip
    if sort not in numbers:
        return sorted(items, key=name)
    return sorted(items, key=lambda each: (-numbers[sort](each), name(each)))


def _pools(picture: ClusterPicture, sort: str) -> View:
    pools = _order(
        (pool for pool in picture.pools if pool.parent is not None), sort, lambda pool: pool.name,
        used=lambda pool: pool.usage["cpu"],
        demand=lambda pool: pool.demand["cpu"],
        share=lambda pool: pool.fair_share_ratio,
    )  # fmt: skip
    return pick(POOLS, POOL_RANKS), pools


def _operations(picture: ClusterPicture, sort: str) -> View:
    name = picture.tree.name
    parts = _order(
        ((each, name) for each in picture.operations if name in each.trees),
        sort, lambda part: part[0].title or part[0].id,
        used=lambda part: part[0].trees[name].usage["cpu"],
        demand=lambda part: part[0].trees[name].demand["cpu"],
        share=lambda part: part[0].trees[name].fair_share_ratio,
    )  # fmt: skip
    return pick(OPERATIONS, OPERATION_RANKS), parts


def _nodes(picture: ClusterPicture, sort: str) -> View:
    nodes = _order(picture.nodes, sort, lambda node: node.id, used=lambda node: node.usage["cpu"])
    return pick(NODES, NODE_RANKS), nodes


_VIEWS: Final[dict[str, Callable[[ClusterPicture, str], View]]] = {
    "pools": _pools,
    "operations": _operations,
    "nodes": _nodes,
}


def _draw_live(client: SchedulerClient, tree: str, interval_s: float, sort: str) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    view = "pools"
    with _keys() as read_key, Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            try:
                picture, problem = read_picture(client, tree), ""
            except UnavailableError as error:
                picture, problem = None, f"retrying: {error}"
            end_s = time.monotonic() + interval_s
            while True:
                width, height = shutil.get_terminal_size()
                text = fold(problem, width) if picture is None else _draw_frame(picture, view, sort, width, height)
                live.update(Text.from_ansi(text, no_wrap=True, end=""), refresh=True)
                key = read_key(max(end_s - time.monotonic(), 0.0))
                if not key:
                    break
                if key in "q\x03\x04":
                    return
                view, sort = VIEWS.get(key, view), SORTS.get(key, sort)


def _draw_frame(picture: ClusterPicture, view: str, sort: str, width: int, height: int) -> str:
    colour = use_colour()
    head = draw_head(picture, width, colour)
    by = "allocated" if sort == "used" else sort
    keys = "\n".join(draw_lines([(f"{view} by {by}. {KEYS}", "dim")], width, colour))
    room = height - len(head.split("\n")) - len(keys.split("\n"))
    return "\n".join([head, draw_view(picture, view, sort, width, colour, max(room, 2)), keys])


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits the given number of seconds for a key and returns it, "" for none."""
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def read_key(timeout_s: float) -> str:
        ready, _, _ = select.select([number], [], [], timeout_s)
        return os.read(number, 1).decode("latin-1") or "q" if ready else ""

    try:
        tty.setcbreak(number)
        yield read_key
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
