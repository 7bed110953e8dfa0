"""The output of commands: text for people, JSON or CSV for programs.

Tables of text are as wide as the terminal (``render.grid``), and with ``--wide`` or in a pipe as wide as needed. CSV
has a header and a line per row of the JSON; nested values get names with dots."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import shutil
import signal
import sys
import time
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NoReturn, TypeVar

import click
import msgspec

from cpumond.cli.render.grid import Cell, Column, Heading, Item, draw_fields, draw_grid, draw_lines, fold, make_rows
from cpumond.core.errors import UnavailableError, UsageError
from cpumond.core.words import escape, escape_json

Output = Literal["text", "json", "csv"]
OUTPUTS: Final[tuple[Output, ...]] = ("text", "json", "csv")
_OUTPUT: Final = "cpumond.output"
_WIDE: Final = "cpumond.wide"
_BREAKS: Final = "\n\r\v\f\x1c-\x1e\x85\u2028\u2029"
"""All characters that some reader takes for the end of a line."""
_FORMULA: Final = re.compile(rf"\A(?=[=+\-@\t\r\n])|(?<=[{_BREAKS}])(?=[=+\-@\t])")
_BREAK: Final = re.compile(f"[{_BREAKS}]")

Command = TypeVar("Command", bound=Callable[..., Any])


def is_terminal() -> bool:
    """Whether standard output is a terminal; ``sys.stdout`` is None if the caller closed it."""
    return sys.stdout is not None and sys.stdout.isatty()


def can_ask() -> bool:
    """Whether the user can be asked a question: standard input and output are a terminal."""
    return is_terminal() and sys.stdin is not None and sys.stdin.isatty()


def use_colour() -> bool:
    """Whether the output is a terminal whose user did not turn colours off (no-color.org)."""
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def terminal_width() -> int | None:
    """Columns of the terminal; None if the output is a pipe or file, and with ``--wide``."""
    return shutil.get_terminal_size().columns if is_terminal() and not _meta().get(_WIDE) else None


def error_width() -> int | None:
    """Columns of the terminal of standard error; None if it is a pipe or file."""
    return shutil.get_terminal_size().columns if sys.stderr is not None and sys.stderr.isatty() else None


def chosen_output() -> Output:
    output: Output = _meta().get(_OUTPUT, "text")
    return output


def _meta() -> dict[str, Any]:
    context = click.get_current_context(silent=True)
    return {} if context is None else context.meta


def _keep_wide(context: click.Context, _: click.Parameter, value: bool) -> None:
    context.meta[_WIDE] = value


wide_option = click.option(
    "--wide", is_flag=True, expose_value=False, callback=_keep_wide,
    help="Show all columns unshortened, even on a narrow terminal.",
)  # fmt: skip


def combine(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Combine options, in the order of the help, into one decorator."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def output_options(json_help: str) -> Callable[[Command], Command]:
    """Give a command ``-o/--output text|json|csv``, ``--json`` and ``--wide``.

    The command's parameter ``as_json`` is True if the output is for programs; ``print_json`` chooses JSON or CSV."""

    return combine(
        click.option("-o", "--output", "output", type=click.Choice(OUTPUTS), is_eager=True, expose_value=False,
                     callback=_keep_output, help="Form of the output; --json is -o json.  [default: text]"),
        click.option("--json", "as_json", is_flag=True, callback=_join_json, help=json_help),
        wide_option,
    )  # fmt: skip


def _keep_output(context: click.Context, _: click.Parameter, value: Output | None) -> None:
    if value is not None:
        context.meta[_OUTPUT] = value


def _join_json(context: click.Context, _: click.Parameter, value: bool) -> bool:
    chosen = context.meta.setdefault(_OUTPUT, "json" if value else "text")
    if value and chosen != "json":
        raise UsageError(f"--json and --output {chosen} contradict each other; use one")
    return bool(chosen != "text")


# ---- data


def print_json(content: bytes, kind: Any = None, rows: str | None = None) -> None:
    """Print JSON, indented, or as CSV if the user chose that. Raises UnavailableError for invalid JSON.

    ``rows``: the field whose items are the lines of CSV. Default: the only list of ``kind``, if all other fields are
    plain; without a list the whole value is one line."""
    try:
        if chosen_output() != "csv":
            click.echo(escape_json(msgspec.json.format(content, indent=2)))
            return
        value = msgspec.json.decode(content)
    except (ValueError, RecursionError) as error:
        raise UnavailableError(f"the answer is not JSON: {error}; is the server cpumond?") from None
    field = rows or _find_rows(kind)
    listed = value.get(field, []) if field and isinstance(value, dict) else value
    print_csv(listed if isinstance(listed, list) else [listed], _name_fields(kind, field))


def print_json_and_end(content: bytes, kind: Any = None, rows: str | None = None) -> NoReturn:
    """Print JSON like ``print_json``, and end the command with exit code 0."""
    print_json(content, kind, rows)
    click.get_current_context().exit()


def print_csv(rows: Sequence[Any], names: Iterable[str] = (), with_header: bool = True) -> list[str]:
    """Print values as CSV with a header: dictionaries with dots in names, lists as JSON. Return the header.

    ``names``: the header to print if there are no rows, or the one that was printed before."""
    flat = [dict(_flatten(row)) for row in rows]
    header = list(names) if names and not with_header else list(dict.fromkeys(name for row in flat for name in row))
    header = header or list(names)
    heading = [[guard_cell(name) for name in header]] if with_header and header else []
    click.echo(format_csv([*heading, *([row.get(name, "") for name in header] for row in flat)]), nl=False)
    return header


def format_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Format rows of cells as CSV, with quotes where needed (RFC 4180)."""
    output = io.StringIO(newline="")
    plain, quoted = (csv.writer(output, quoting=quoting) for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL))
    for cells in rows:
        # The csv module only quotes line breaks of its own kind.
        has_break = any(isinstance(cell, str) and _BREAK.search(cell) for cell in cells)
        (quoted if has_break else plain).writerow(cells)
    return output.getvalue()


def print_line(value: dict[str, Any], header: list[str] | None = None) -> list[str]:
    """Print a value as a line of JSON, or of CSV with a header unless ``header`` was printed. Return the header."""
    if chosen_output() == "csv":
        return print_csv([value], header or (), with_header=not header)
    click.echo(escape_json(msgspec.json.encode(value)))
    return []


def guard_cell(text: str) -> str:
    """A user's text as a cell; in each line an apostrophe precedes text that a spreadsheet would read as a formula."""
    return _FORMULA.sub("'", text)


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and (value or not name):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, str):
        yield name or "value", guard_cell(value)
    else:
        # An empty dictionary has no columns of its own.
        yield name or "value", "" if value is None or value == {} else msgspec.json.encode(value).decode()


def _find_rows(kind: Any) -> str | None:
    """The list field of a type of answer, see ``print_json``."""
    lists = []
    for field in _fields(kind):
        origin = typing.get_origin(field.type)
        if origin is list and isinstance((typing.get_args(field.type) or (None,))[0], type):
            lists.append(field.name)
        elif origin not in (None, Literal, typing.Union, types.UnionType):
            return None
    return lists[0] if len(lists) == 1 else None


def _name_fields(kind: Any, field: str | None) -> list[str]:
    """The header of an empty list of rows."""
    for each in _fields(kind):
        if each.name == field:
            return [inner.encode_name for inner in _fields((typing.get_args(each.type) or (None,))[0])]
    return []


def _fields(kind: Any) -> Sequence[msgspec.structs.FieldInfo]:
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return msgspec.structs.fields(kind) if is_struct else ()


# ---- text


def print_table(headings: Sequence[Heading], rows: Iterable[Sequence[Cell]]) -> None:
    click.echo(draw_table(headings, rows, terminal_width(), use_colour()))


def draw_table(headings: Sequence[Heading], rows: Iterable[Sequence[Cell]], width: int | None, colour: bool) -> str:
    """A table, and a line about the columns that do not fit the terminal."""
    text, left_out = draw_grid(headings, rows, width, colour)
    return "\n".join([text, *([describe_left_out(left_out, width, colour)] if left_out else [])])


def print_items(columns: Sequence[Column[Item]], items: Sequence[Item], nothing: str = "") -> None:
    """Print a table with a row for each item, or the sentence ``nothing`` if there is none."""
    if items or not nothing:
        print_table(columns, make_rows(columns, items))
    else:
        print_text(nothing)


class _Frame(io.StringIO):
    """Output of one frame, in the form that it has on the terminal."""

    def isatty(self) -> bool:
        return True


def draw_frames(read: Callable[[], str], interval_s: float) -> NoReturn:
    """Show frames on the whole terminal, a new one every ``interval_s``, until KeyboardInterrupt."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            live.update(Text.from_ansi(read(), no_wrap=True, end=""), refresh=True)
            time.sleep(interval_s)


def repeat(output: Callable[[], None], interval_s: float) -> None:
    """Call ``output``, which prints, until Ctrl-C or SIGTERM; on a terminal each output replaces the last one.

    A service that does not answer is tried again."""

    def print_or_retry() -> None:
        try:
            output()
        except UnavailableError as error:
            print_text(f"retrying: {error}")

    def read() -> str:
        with _Frame() as frame, contextlib.redirect_stdout(frame), contextlib.redirect_stderr(frame):
            print_or_retry()
            return frame.getvalue()

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        if is_terminal():
            draw_frames(read, interval_s)
        while True:
            print_or_retry()
            click.echo()
            time.sleep(interval_s)


def describe_left_out(names: Sequence[str], width: int | None, colour: bool) -> str:
    text = f"left out at this width: {', '.join(names)} (--wide shows them)"
    return "\n".join(draw_lines([(text, "dim")], width, colour))


def print_fields(fields: Iterable[tuple[str, Cell]]) -> None:
    """Print lines ``name: value`` with aligned values; fields with an empty value are left out."""
    for line in draw_fields(fields, terminal_width(), use_colour()):
        click.echo(line)


def print_text(text: str, indent: str = "", style: str = "") -> None:
    """Print sentences, wrapped to the terminal; ``indent`` precedes all but the first line of each."""
    for sentence in text.split("\n"):
        click.echo("\n".join(draw_lines([(sentence, style)], terminal_width(), use_colour(), indent)))


def warn(sentence: str) -> None:
    click.echo(fold(f"warning: {escape(sentence)}", error_width()), err=True)
