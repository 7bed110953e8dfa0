"""Names on the command line: unique beginnings of ids and titles, ``-`` for the newest, and completion in a shell.

A parameter of a ``Named`` type is resolved before the command begins; an ambiguous one ends it with the candidates."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from cpumond.api.finding import NEWEST, Match, Matches, NamedKind
from cpumond.cli.options import given, quote_name
from cpumond.cli.output import error_width
from cpumond.cli.render.grid import Cell, Column, Item, column, draw_grid, make_rows
from cpumond.cli.scheduler.http_client import SchedulerClient, make_client
from cpumond.core.errors import CpumondError, NoSuchError, NotYetError, UsageError
from cpumond.core.words import count, escape

COMPLETION_S: Final = 1.0
"""Seconds that a shell waits for the scheduler at Tab."""
PLAIN: Final = re.compile(r"[\w@%+=:./][\w@%+=:./-]*")
"""Names without special meaning in any shell. Others are not offered: bash inserts them unquoted, and a node may be
named $(reboot)."""
MIN_ID_CHARS: Final = 8
"""Minimum length of a shortened id; few other ids begin with the same characters."""
MAX_ID_CHARS: Final = 35
"""Length of an id of four hexadecimal numbers; a name of that length is no beginning of another id."""
MAX_SHOWN: Final = 20


class Named(click.ParamType):  # type: ignore[type-arg]  # generic only in newer click
    """The name of an object of the scheduler. With ``finds`` the beginning of a name may be given."""

    def __init__(self, kind: NamedKind, finds: bool = True) -> None:
        self.name = kind
        self.kind = kind
        self.finds = finds

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        # "" is mostly an unset variable of a script. Every name begins with it, and the request's path would change.
        if value == "" and isinstance(param, click.Argument):
            article = "an" if self.kind == "operation" else "a"
            self.fail(f"expected the name of {article} {self.kind}, got an empty one.", param, ctx)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Names of the scheduler that begin with ``incomplete``; none if it does not answer at once."""
        with contextlib.suppress(CpumondError, click.ClickException):
            client = make_client(ctx.params, timeout_s=COMPLETION_S, patience_s=0.0)
            query = {"name": incomplete, "all_of": "true", "operation": ctx.params.get("operation")}
            trees = ctx.params.get("tree")
            query["tree"] = trees if isinstance(trees, str) else None
            found = client.get("/find", Matches, kind=self.kind, **query)
            return [
                CompletionItem(each.id, help=escape(each.title or each.state))
                for each in found.matches
                if PLAIN.fullmatch(each.id)
            ]
        return []


OPERATION: Final = Named("operation")
JOB: Final = Named("job")
NODE: Final = Named("node")
POOL: Final = Named("pool", finds=False)
TREE: Final = Named("tree", finds=False)

operation_argument = click.argument("operation", type=OPERATION)
job_argument = click.argument("job", type=JOB)
node_argument = click.argument("node", type=NODE)
pool_argument = click.argument("pool", type=POOL)


def operation_path(operation: str, action: str = "") -> str:
    path = f"/operations/{quote_name(operation)}"
    return f"{path}/{action}" if action else path


def shorten_ids(
    columns: Sequence[Column[Item]], items: Sequence[Item], width: int | None, is_full: bool = False
) -> list[Column[Item]]:
    """Columns whose ids of operations and jobs are unique beginnings of MIN_ID_CHARS characters or more, which commands
    accept as names. They stay whole in a pipe (``width`` None) and if ``is_full``."""
    return [
        replace(each, read=_shorten_cells(each.read, items))
        if each.read is not None and each.name in ("operation", "job") and width is not None and not is_full
        else each
        for each in columns
    ]


def _shorten_cells(read: Callable[[Item], Cell], items: Sequence[Item]) -> Callable[[Item], Cell]:
    ids = sorted({str(read(each)) for each in items})
    alike = [0, *(len(os.path.commonprefix(pair)) for pair in pairwise(ids)), 0]  # noqa: RUF071  # no paths
    lengths = {each: max(*alike[n : n + 2], MIN_ID_CHARS - 1) + 1 for n, each in enumerate(ids)}

    def read_short(item: Item) -> str:
        name = str(read(item))
        short = name[: lengths[name]]
        return name[: lengths[name] + 1] if short.endswith("-") else short

    return read_short


def find_parameters(client: SchedulerClient, command: click.Command, values: dict[str, Any]) -> None:
    """Replace shortened names in the values of a command's parameters by full names."""
    for param in command.params:
        kind = param.type
        typed = values.get(param.name or "")
        if not isinstance(kind, Named) or not kind.finds or not typed or isinstance(param, click.Option):
            continue
        operation = values.get("operation") if kind.kind == "job" else None
        if isinstance(typed, tuple):
            values[param.name or ""] = tuple(find_name(client, kind.kind, each, operation) for each in typed)
        else:
            values[param.name or ""] = find_name(client, kind.kind, typed, operation)


def find_name(client: SchedulerClient, kind: NamedKind, typed: str, operation: str | None = None) -> str:
    """The id that ``typed`` stands for. Raises NoSuchError, and UsageError if it is ambiguous."""
    if kind in ("operation", "job") and len(typed) >= MAX_ID_CHARS and typed.count("-") == 3:
        return typed
    query = {"kind": kind, "name": typed, "operation": operation, "limit": MAX_SHOWN}
    found = client.get("/find", Matches, **given(query))
    if found.total == 1:
        return found.matches[0].id
    if not found.total and (kind == "node" or typed.count("-") == 3):
        return typed  # in its answer the scheduler says why it is not found, or which node is meant
    if not found.total and operation and typed == NEWEST:
        text = f"operation {operation} has no job that has started; see `cpumond operation why {operation}`"
        raise NotYetError(text)
    if not found.total:
        raise NoSuchError(_describe_missing(kind, typed, operation))
    raise UsageError(f"{escape(typed)} matches {count(found.total, kind)}; give more of the id", _draw(found))


def _describe_missing(kind: NamedKind, typed: str, operation: str | None) -> str:
    if typed == NEWEST and kind == "operation":
        return "you have started no operation"
    where = f" in operation {operation}" if operation else ""
    known = "`cpumond operation jobs ID`" if operation else f"`cpumond {kind} list`"
    return f"No such {kind} {escape(typed)}{where}; see {known}"


MATCHES: Final[tuple[Column[Match], ...]] = (
    column("id", 0, lambda match: match.id),
    column("state", 1, lambda match: match.state),
    column("user", 2, lambda match: escape(match.user)),
    column("title", 3, lambda match: escape(match.title)),
)


def _draw(found: Matches) -> str:
    text, _ = draw_grid(MATCHES, make_rows(MATCHES, found.matches), error_width())
    left_out = found.total - len(found.matches)
    return text + (f"\n... and {left_out} more" if left_out else "")
