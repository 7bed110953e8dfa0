"""``fair-share``: fair-share updates of pool trees from a file or a pipe, as JSON or in words."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Iterator
from typing import Any, Final

import click
import msgspec

from cpumond.cli.fairshare.input import DEFAULT_OPTIONS, UpdateInput, read_updates
from cpumond.cli.options import ChoiceType
from cpumond.core.errors import UsageError
from cpumond.core.words import did_you_mean, escape, quoted
from cpumond.fairshare import ROOT, SCHEDULER_OPTIONS, ElementShares, FairShareUpdater, Snapshot, UpdateResult
from cpumond.fairshare.explain import explain

FIELDS: Final = tuple(ElementShares.__dataclass_fields__)
FIELDS_OF_POOLS: Final = frozenset({
    "burst_ratio", "total_burst_ratio", "resource_flow_ratio", "total_resource_flow_ratio", "last_share_ratio",
    "accumulated_volume", "volume_overflow", "acceptable_volume", "accepted_free_volume", "children_volume_overflow",
})  # fmt: skip
"""Fields of ElementShares that only pools and the root have; they are not printed for operations."""


class FileOrSimulate(click.Command):
    """``fair-share FILE``, and ``fair-share simulate FILE``, which is a separate command in a different module."""

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
@click.option("--format", "format_",
              type=ChoiceType(["json"], {"table": "JSON has the numbers, --explain ELEMENT the reasons in words"}),
              help="json: one object per line. Default: json; with --explain: words.")  # fmt: skip
@click.option("--explain", "element", metavar="ELEMENT", help="Only explain why this pool or operation has its share.")
@click.option(
    "--as-scheduler",
    is_flag=True,
    help="Use the scheduler's defaults for options that FILE leaves out: a gang gets all or nothing.",
)
@click.option("--time", "timed", is_flag=True, help="Print the seconds of each update as JSON lines on standard error.")
def fair_share_command(file: str, format_: str | None, element: str | None, as_scheduler: bool, timed: bool) -> None:
    """Compute the shares of a cluster: one fair-share update of a tree of pools and operations.

    FILE, or - for standard input, contains one JSON object, or one per line: then each is a later update of the same
    tree, and its result is printed before the next line is read.

    \b
    A tree needs at least:
      {"now": 0, "total_resources": {"cpu": 100, "memory": 1e12},
       "pools": [{"name": "q", "parent": "<root>"}],
       "operations": [{"name": "o", "parent": "q", "demand": {"cpu": 60}}]}
    Object:     id, options, previous_update_time, root, and the keys above
    Pool:       weight, mode (fair_share, fifo), resource_limits, max_share_ratio (of the cluster),
                strong_guarantee_resources, integral {type (none, burst, relaxed), resource_flow,
                burst_guarantee_resources, accumulated_volume, last_share_ratio, ...}, ...
    Operation:  weight, demand, usage, resource_limits, max_share_ratio, start_time, gang
    Resources:  user_slots, cpu (cores), gpu, memory (bytes), network; absolute amounts
    Times:      now, previous_update_time in seconds

    The JSON output has a line per update with id, errors ({code, message}) and elements (name -> shares). Vectors are
    in the order of the resources above, shares are fractions of the cluster. A pool's accumulated_volume and
    last_share_ratio are input for its "integral" in the next update.

    \b
    Example:
      cpumond fair-share tree.json
      cpumond fair-share tree.json --explain o
      cpumond fair-share - --time < updates.jsonl > shares.jsonl

    \b
    With `simulate` as the first argument, a tree over time (a file of that name is ./simulate):
      cpumond fair-share simulate --help"""
    updater = FairShareUpdater()
    for update in _collecting_between(read_updates(file, SCHEDULER_OPTIONS if as_scheduler else DEFAULT_OPTIONS)):
        if element is not None:
            check_element(element, update.snapshot)
        began_s = time.perf_counter()
        result = updater.update(update.snapshot, update.now, update.previous_update_time)
        update_s = time.perf_counter() - began_s
        output: str | bytes
        if element is not None:
            output = format_explanation(update, result, element, as_json=format_ == "json")
        else:
            output = encode_result(update, result)
        # click.echo flushes, so that a program that writes the updates can read this result before it writes the next
        # one.
        click.echo(output)
        if timed:
            click.echo(msgspec.json.encode({"id": update.id, "update_s": update_s}), err=True)


def _collecting_between(updates: Iterator[UpdateInput]) -> Iterator[UpdateInput]:
    """Pass updates on; collect cyclic garbage between two updates and not during one."""
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
    """Raise UsageError, with the nearest name, if the tree has no such element."""
    names = [ROOT, *(pool.name for pool in snapshot.pools), *(operation.name for operation in snapshot.operations)]
    if name not in names:
        hint = did_you_mean(name, names) or "; give the name of a pool or operation"
        raise UsageError(f"--explain: there is no {quoted(name)} in the tree{hint}")


def encode_result(update: UpdateInput, result: UpdateResult) -> bytes:
    """The output line of an update: numbers in full, operations without the fields that only pools have."""
    elements = {name: _list_fields(shares) for name, shares in result.elements.items()}
    return msgspec.json.encode({"id": update.id, "errors": result.errors, "elements": elements})


def _list_fields(shares: ElementShares) -> ElementShares | dict[str, Any]:
    if shares.kind != "operation":
        return shares
    return {field: getattr(shares, field) for field in FIELDS if field not in FIELDS_OF_POOLS}


def format_explanation(update: UpdateInput, result: UpdateResult, name: str, as_json: bool) -> str | bytes:
    """Explain why an element has its share: lines for people, with the id in front, or one line of JSON."""
    explanation = explain(update.snapshot, result, name)
    if as_json:
        told = {"id": update.id, "element": name, "rule": explanation.rule, "lines": explanation.lines}
        return msgspec.json.encode(told)
    return ("" if update.id is None else f"{escape(update.id)}: ") + "\n".join(explanation.lines)
