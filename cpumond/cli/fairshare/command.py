"""``fair-share``: fair-share updates of pool trees from a file or a pipe, as JSON, as a table or in words."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Iterator
from typing import Any, Final, Literal

import click
import msgspec

from cpumond.cli.fairshare.input import UpdateInput, read_updates
from cpumond.cli.options import terminal_width
from cpumond.core.errors import UsageError
from cpumond.core.words import count, show_name
from cpumond.fairshare import RESOURCES, ROOT, ElementShares, FairShareUpdater, Operation, Pool, Snapshot, UpdateResult
from cpumond.fairshare.explain import explain, show_amount, show_percent
from cpumond.fairshare.validate import did_you_mean, quoted

Format = Literal["json", "table"]

FIELDS: Final = tuple(ElementShares.__dataclass_fields__)
FIELDS_OF_POOLS: Final = frozenset({
    "burst_ratio", "total_burst_ratio", "resource_flow_ratio", "total_resource_flow_ratio", "last_share_ratio",
    "accumulated_volume", "volume_overflow", "acceptable_volume", "accepted_free_volume", "children_volume_overflow",
})  # fmt: skip
"""Fields of ElementShares that only pools and the root have; they are not printed for operations."""

BAR_WIDTH: Final = 20
STRONG, INTEGRAL, BY_WEIGHT, MISSING = "█▓▒·"
PARTS: Final = ("strong", "integral", "by weight")
LEGEND: Final = (
    "in percent of the cluster's amount of the resource in the row; guaranteed: strong guarantee after adjustment",
    f"bar: what it gets of its demand, {STRONG} strong, {INTEGRAL} integral, {BY_WEIGHT} by weight, {MISSING} missing",
)


class FileOrSimulate(click.Command):
    """``fair-share FILE``, and ``fair-share simulate FILE``, which is another command in another module."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] != ["simulate"]:
            return super().make_context(info_name, args, parent, **extra)
        command = importlib.import_module("cpumond.cli.fairshare.simulate").simulate_command
        assert isinstance(command, click.Command)
        return command.make_context(f"{info_name} simulate", args[1:], parent, **extra)


@click.command("fair-share", cls=FileOrSimulate)
@click.argument("file")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["json", "table"]),
    help="json: an object per line; table: for people. Default: json, but words for --explain.",
)
@click.option("--explain", "element", metavar="ELEMENT", help="Only say why this pool or operation has its share.")
@click.option("--time", "timed", is_flag=True, help="Seconds each update took, as JSON lines on standard error.")
def fair_share_command(file: str, format_: Format | None, element: str | None, timed: bool) -> None:
    """Compute who gets which share of a cluster: one fair-share update of a tree of pools and operations.

    FILE, or - for standard input, holds one JSON object, or one in each line: then each is an update of the same tree
    a little later, and its result is printed before the next line is read.

    \b
    A tree needs at least:
      {"now": 0, "total_resources": {"cpu": 100, "memory": 1e12},
       "pools": [{"name": "q", "parent": "<root>"}],
       "operations": [{"name": "o", "parent": "q", "demand": {"cpu": 60}}]}
    Object:     id, options, previous_update_time, root, and those above
    Pool:       weight, mode (fair_share, fifo), resource_limits, max_share_ratio (of the cluster),
                strong_guarantee_resources, integral {type (none, burst, relaxed), resource_flow,
                burst_guarantee_resources, accumulated_volume, last_share_ratio, ...}, ...
    Operation:  weight, demand, usage, resource_limits, max_share_ratio, start_time, gang
    Resources:  user_slots, cpu (cores), gpu, memory (bytes), network; absolute amounts
    Times:      now, previous_update_time in seconds

    JSON has a line per update with id, errors ({code, message}) and elements (name -> shares). Vectors are in the
    order of the resources above, shares are fractions of the cluster. accumulated_volume and last_share_ratio of a
    pool are what its "integral" needs in the next update.

    \b
    Example:
      cpumond fair-share tree.json --format table
      cpumond fair-share tree.json --explain o
      cpumond fair-share - --time < updates.jsonl > shares.jsonl

    \b
    With `simulate` as the first word, a tree over time (a file of that name is ./simulate):
      cpumond fair-share simulate --help
    """
    updater = FairShareUpdater()
    for number, update in enumerate(_collecting_between(read_updates(file))):
        if element is not None:
            check_element(element, update.snapshot)
        began_s = time.perf_counter()
        result = updater.update(update.snapshot, update.now, update.previous_update_time)
        update_s = time.perf_counter() - began_s
        output: str | bytes
        if element is not None:
            output = tell(update, result, element, as_json=format_ == "json")
        elif format_ == "table":
            output = "\n" * (number > 0) + draw_table(update, result, terminal_width())
        else:
            output = encode_result(update, result)
        # click.echo flushes, so that a program that feeds the next update can read this result first.
        click.echo(output)
        if timed:
            click.echo(msgspec.json.encode({"id": update.id, "update_s": update_s}), err=True)


def _collecting_between(updates: Iterator[UpdateInput]) -> Iterator[UpdateInput]:
    """Pass updates on, with cyclic garbage collected between two of them and not during one."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for update in updates:
            gc.collect(1)
            yield update
    finally:
        if was_enabled:
            gc.enable()


def check_element(name: str, snapshot: Snapshot) -> None:
    """Raise UsageError, with the nearest name, if a tree has no such element."""
    names = [ROOT, *(pool.name for pool in snapshot.pools), *(operation.name for operation in snapshot.operations)]
    if name not in names:
        hint = did_you_mean(name, names) or "; give the name of a pool or operation"
        raise UsageError(f"--explain: there is no {quoted(name)} in the tree{hint}")


def encode_result(update: UpdateInput, result: UpdateResult) -> bytes:
    """The line of an update: numbers in full, operations without the fields that only pools have."""
    elements = {name: _list_fields(shares) for name, shares in result.elements.items()}
    return msgspec.json.encode({"id": update.id, "errors": result.errors, "elements": elements})


def _list_fields(shares: ElementShares) -> ElementShares | dict[str, Any]:
    if shares.kind != "operation":
        return shares
    return {field: getattr(shares, field) for field in FIELDS if field not in FIELDS_OF_POOLS}


def tell(update: UpdateInput, result: UpdateResult, name: str, as_json: bool) -> str | bytes:
    """Why an element has its share: lines for people, with the id in front, or one line of JSON."""
    explanation = explain(update.snapshot, result, name)
    if as_json:
        return msgspec.json.encode(
            {"id": update.id, "element": name, "rule": explanation.rule, "lines": explanation.lines}
        )
    return ("" if update.id is None else f"{show_name(update.id)}: ") + "\n".join(explanation.lines)


def draw_table(update: UpdateInput, result: UpdateResult, width: int | None) -> str:
    """The tree, a line per element, errors of the update, and what the columns mean.

    Where ``width`` columns are too few for a line the bar is left out, then PARTS; None (a pipe) leaves out nothing.
    """
    snapshot = update.snapshot
    rows = [_make_row(element, depth, snapshot, result) for element, depth in _walk(snapshot, result)]
    columns = list(rows[0])
    for left_out in (("bar",), PARTS):
        if width is None or sum(_measure(rows, column) + 2 for column in columns) - 2 <= width:
            break
        columns = [column for column in columns if column not in left_out]
    widths = {column: _measure(rows, column) for column in columns}
    lines = [_describe_update(update)]
    for row in ({column: "" if column == "bar" else column for column in columns}, *rows):
        cells = [_align(row[column], column, widths[column]) for column in columns]
        lines.append("  ".join(cells).rstrip())
    lines += [f"error {error.code}: {show_name(error.message)}" for error in result.errors]
    return "\n".join([*lines, *LEGEND[: 2 if "bar" in columns else 1]])


def _measure(rows: list[dict[str, str]], column: str) -> int:
    return max(len(column), *(len(row[column]) for row in rows))


def _align(text: str, column: str, width: int) -> str:
    return text.ljust(width) if column in ("element", "mode", "resource", "bar") else text.rjust(width)


def _describe_update(update: UpdateInput) -> str:
    snapshot = update.snapshot
    amounts = [
        f"{show_amount(r, total)} {RESOURCES[r]}" for r, total in enumerate(snapshot.total_resources) if total > 0.0
    ]
    numbers = f"{count(len(snapshot.pools), 'pool')}, {count(len(snapshot.operations), 'operation')}"
    name = "" if update.id is None else f"{show_name(update.id)}: "
    return f"{name}{numbers}, cluster of {', '.join(amounts) or 'nothing'}"


def _walk(snapshot: Snapshot, result: UpdateResult) -> Iterator[tuple[Pool | Operation, int]]:
    """Each element below its parent, in the order in which it is served, with its depth."""
    children: dict[str, list[Pool | Operation]] = {ROOT: [], **{pool.name: [] for pool in snapshot.pools}}
    elements: tuple[Pool | Operation, ...] = (*snapshot.pools, *snapshot.operations)
    for element in elements:
        children[element.parent].append(element)
    stack: list[tuple[Pool | Operation, int]] = [(snapshot.root, 0)]
    while stack:
        element, depth = stack.pop()
        yield element, depth
        if isinstance(element, Pool):
            below = children[element.name]
            if element.mode == "fifo":
                below.sort(key=lambda child: _fifo_place(result.elements[child.name]))
            stack += [(child, depth + 1) for child in reversed(below)]


def _fifo_place(shares: ElementShares) -> int:
    place = shares.fifo_index if shares.effective_fifo_index is None else shares.effective_fifo_index
    return place or 0


def _make_row(element: Pool | Operation, depth: int, snapshot: Snapshot, result: UpdateResult) -> dict[str, str]:
    shares = result.elements[element.name]
    r, main = RESOURCES.index(shares.dominant_resource), RESOURCES.index(snapshot.options.main_resource)
    parts = shares.fair_share
    total, demand = parts.total[r], shares.demand_share[r]
    sums = (parts.strong_guarantee[r], parts.integral_guarantee[r], parts.weight_proportional[r])
    is_pool = isinstance(element, Pool)
    main_amount = parts.total[main] * snapshot.total_resources[main]
    return {
        "element": "  " * depth + show_name(element.name),
        "mode": _describe_mode(element, shares),
        "weight": "" if depth == 0 else f"{element.weight:g}",
        "resource": shares.dominant_resource,
        "guaranteed": show_percent(shares.strong_guarantee_share[r]) if is_pool else "",
        "demand": show_percent(demand),
        "share": show_percent(total),
        **{name: show_percent(part) if is_pool else "" for name, part in zip(PARTS, sums, strict=True)},
        # A column that is named after the main resource, with its amount.
        RESOURCES[main]: show_amount(main, main_amount),
        "bar": draw_bar(sums, demand),
    }


def _describe_mode(element: Pool | Operation, shares: ElementShares) -> str:
    """``fifo burst`` of a pool; ``#0 gang`` of an operation, the place in which its FIFO pool served it."""
    if isinstance(element, Pool):
        kind = element.integral_guarantees.guarantee_type
        return element.mode if kind == "none" else f"{element.mode} {kind}"
    place = "" if shares.fifo_index is None else f"#{_fifo_place(shares)}"
    return " ".join(word for word in (place, "gang" * element.gang) if word)


def draw_bar(parts: tuple[float, float, float], demand: float) -> str:
    """A share's strong, integral and weight-proportional part, and what is missing to the demand."""
    scale = max(demand, sum(parts))
    if scale <= 0.0:
        return ""
    bar, covered = "", 0.0
    for part, sign in zip(parts, (STRONG, INTEGRAL, BY_WEIGHT), strict=True):
        covered += part
        bar = bar.ljust(round(covered / scale * BAR_WIDTH), sign)
    return bar.ljust(BAR_WIDTH, MISSING)
