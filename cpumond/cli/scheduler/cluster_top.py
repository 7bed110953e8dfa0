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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import click
import msgspec

from cpumond.api.node_views import NodeList, NodeView
from cpumond.api.pool_views import PoolList, PoolView, TreeList, TreeView
from cpumond.api.views import OperationList, OperationView
from cpumond.cli.output import can_ask, print_json, terminal_width, use_colour
from cpumond.cli.render.grid import Cell, Column, column, draw_grid, fold, paint
from cpumond.cli.scheduler.http_client import SchedulerClient
from cpumond.cli.scheduler.nodes import show_node_state
from cpumond.cli.scheduler.pools import pool_path, show_state
from cpumond.core.errors import NoSuchError, UnavailableError
from cpumond.core.measures import format_span
from cpumond.core.words import show_cores, show_name, show_percent, show_time

MAX_ROWS: Final = 1000
INTERVAL_S: Final = 2.0
VIEWS: Final = {"p": "pools", "o": "operations", "n": "nodes"}
# What is sorted by "used" is the allotted CPU: the word of the option is older than the heading.
SORTS: Final = {"u": "used", "d": "demand", "s": "share", "a": "name"}
KEYS: Final = "p pools, o operations, n nodes; sort: u allotted, d demand, s share, a name; q ends"


class ClusterPicture(msgspec.Struct, frozen=True):
    """What ``top --cluster --json`` prints: a tree with its pools, the operations that hold most, and the nodes."""

    tree: TreeView
    pools: list[PoolView]
    operations: list[OperationView]
    nodes: list[NodeView]


def read_picture(client: SchedulerClient, tree: str) -> ClusterPicture:
    """What is there now. Raises CpumondError."""
    trees = client.get("/trees", TreeList).trees
    found = next((each for each in trees if each.name == tree), None)
    if found is None:
        known = ", ".join(show_name(each.name) for each in trees)
        raise NoSuchError(f"there is no tree {show_name(tree)}; known trees: {known or 'none'}")
    query = {"tree": tree, "limit": MAX_ROWS}
    operations = client.get("/operations", OperationList, sort="usage", **query).operations
    return ClusterPicture(
        found,
        client.get(pool_path(tree), PoolList).pools,
        [each for each in operations if each.trees],
        client.get("/nodes", NodeList, **query).nodes,
    )


def show_cluster(client: SchedulerClient, tree: str | None, interval_s: float | None, sort: str, once: bool) -> None:
    """Print one picture, or show them one after the other on a terminal until q or Ctrl-C."""
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
        _show_live(client, name, interval_s or INTERVAL_S, sort)


def draw_head(picture: ClusterPicture, width: int | None, colour: bool) -> str:
    """The tree in a sentence."""
    tree = picture.tree
    cores = [show_cores(each["cpu"]) for each in (tree.resource_usage, tree.total_resources, tree.resource_demand)]
    text = (
        f"{show_name(tree.name)} {show_time(time.time(), '%H:%M:%S')}: {cores[0]} of {cores[1]} cores allotted, demand "
        f"{cores[2]}; {tree.running_operation_count} operations running, {tree.pending_operation_count} pending; "
        f"{tree.online_node_count} of {tree.node_count} nodes online"
    )
    return "\n".join(paint(line, "bold", colour) for line in fold(text, width).split("\n"))


def draw_view(
    picture: ClusterPicture, view: str, sort: str, width: int | None, colour: bool, height: int | None = None
) -> str:
    """The pools, operations or nodes as a table, of at most ``height`` lines."""
    headings, rows = _TABLES[view](picture, sort)
    lines = draw_grid(headings, rows, width, colour)[0].split("\n")
    if height is not None and len(lines) > height:
        lines = [*lines[: max(height - 1, 1)], paint("... there are more", "dim", colour)]
    return "\n".join(lines) if rows else f"no {view}"


Table = tuple[Sequence[Column], list[list[Cell]]]


def _order(items: Sequence[Any], sort: str, name: Callable[[Any], str], numbers: dict[str, Callable[[Any], float]]) -> (
    list[Any]
):  # fmt: skip
    if sort not in numbers:
        return sorted(items, key=name)
    return sorted(items, key=lambda each: (-numbers[sort](each), name(each)))


def _pools(picture: ClusterPicture, sort: str) -> Table:
    numbers: dict[str, Callable[[PoolView], float]] = {
        "used": lambda pool: pool.usage["cpu"],
        "demand": lambda pool: pool.demand["cpu"],
        "share": lambda pool: pool.fair_share_ratio,
    }
    pools = [pool for pool in picture.pools if pool.parent is not None]
    rows: list[list[Cell]] = [
        [
            show_name(pool.name), show_cores(pool.usage["cpu"]), show_cores(pool.demand["cpu"]),
            f"{show_percent(pool.fair_share_ratio)} %", str(pool.running_operation_count), str(pool.operation_count),
            show_state(pool.starvation_status, pool.starves_in_s),
        ]
        for pool in _order(pools, sort, lambda pool: pool.name, numbers)
    ]  # fmt: skip
    headings = (
        column("pool"), column(">allotted"), column(">demand", 1), column(">share", 2), column(">running", 3),
        column(">all", 5), column("state", 4),
    )  # fmt: skip
    return headings, rows


def _operations(picture: ClusterPicture, sort: str) -> Table:
    name = picture.tree.name
    numbers: dict[str, Callable[[OperationView], float]] = {
        "used": lambda each: each.trees[name].usage["cpu"],
        "demand": lambda each: each.trees[name].demand["cpu"],
        "share": lambda each: each.trees[name].fair_share_ratio,
    }
    shown = [each for each in picture.operations if name in each.trees]
    rows: list[list[Cell]] = [
        [
            each.id, each.state, show_name(each.user), show_name(each.pools[name]),
            show_cores(each.trees[name].usage["cpu"]), show_cores(each.trees[name].demand["cpu"]),
            f"{show_percent(each.trees[name].fair_share_ratio)} %", str(each.trees[name].job_count),
            format_span(max(time.time() - each.start_time, 0.0)), show_name(each.title),
        ]
        for each in _order(shown, sort, lambda each: each.title or each.id, numbers)
    ]  # fmt: skip
    headings = (
        column("operation"), column("state", 4), column("user", 7), column("pool", 2), column(">allotted"),
        column(">demand", 3), column(">share", 6), column(">jobs", 5), column(">age", 8), column("title", 1),
    )  # fmt: skip
    return headings, rows


def _nodes(picture: ClusterPicture, sort: str) -> Table:
    numbers: dict[str, Callable[[NodeView], float]] = {"used": lambda node: node.usage["cpu"]}
    rows: list[list[Cell]] = [
        [
            show_name(node.id), show_node_state(node), show_cores(node.usage["cpu"]), show_cores(node.capacity["cpu"]),
            show_cores(node.free["cpu"]), str(node.job_count),
        ]
        for node in _order(picture.nodes, sort, lambda node: node.id, numbers)
    ]  # fmt: skip
    headings = (
        column("node"), column("state", 1), column(">allotted"), column(">cores", 2), column(">free", 3),
        column(">jobs", 4),
    )  # fmt: skip
    return headings, rows


_TABLES: Final[dict[str, Callable[[ClusterPicture, str], Table]]] = {
    "pools": _pools,
    "operations": _operations,
    "nodes": _nodes,
}


def _show_live(client: SchedulerClient, tree: str, interval_s: float, sort: str) -> None:
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
                picture, problem = None, f"trying again: {error}"
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
    by = "allotted" if sort == "used" else sort
    keys = "\n".join(paint(line, "dim", colour) for line in fold(f"{view} by {by}. {KEYS}", width).split("\n"))
    room = height - len(head.split("\n")) - len(keys.split("\n"))
    return "\n".join([head, draw_view(picture, view, sort, width, colour, max(room, 2)), keys])


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key and gives it, "" for none."""
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
