"""Tables that fit a terminal. Pure.

Text is shortened, and columns are left out by rank. If even the columns of rank 0 do not fit, each row becomes lines of
``heading: value``. Ids, names and numbers are never truncated or broken. Widths are columns of the terminal: a wide
character takes two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

Cell = str | tuple[str, str]
"""A text, or a text and its style."""
Item = TypeVar("Item")

GAPS: Final = (2, 1)
LEAST_TEXT: Final = 12
"""Least width to which a text is shortened; if that does not suffice, a column is left out instead."""
TEXTS: Final = frozenset({"groups", "labels", "note", "tags", "title"})
"""Headings of columns with text, which may be shortened."""
SENTENCES: Final = frozenset({"", "cause", "change", "reason", "text", "what", "why"})
"""Headings of columns with sentences, which are folded if they come last."""
LONGEST_NAME: Final = 64
"""Maximum width of a name: an id of a container is that long, a pod's name may be longer."""
COLOURS: Final = {"red", "yellow", "cyan", "green"}
"""Red: failed, lost, or stopped until an operator acts. Yellow: waits, or is limited for now. Cyan: held by a user.
Green: as it should be. The style "dim": inactive, or ended as intended. Plans mark removals, changes and additions with
red, yellow and green."""


@dataclass(frozen=True, slots=True)
class Column(Generic[Item]):
    """A column of a table. A heading that begins with ">" is aligned right; one with a newline takes two lines.

    ``rank``: rank 0 stays at any width; of the other columns the one with the highest rank is left out first.
    ``least``: width to which the text may be shortened, 0 for never: ids, names and numbers. ``folds``: as the last
    column, it continues below and is not shortened. ``read``: returns an item's cell, for tables of items."""

    heading: str
    rank: int = 0
    least: int = 0
    folds: bool = False
    read: Callable[[Item], Cell] | None = None

    @property
    def name(self) -> str:
        return self.heading.removeprefix(">").replace("\n", " ")

    def list_lines(self, number: int) -> list[str]:
        """The heading in ``number`` lines, blank ones first."""
        lines = self.heading.removeprefix(">").split("\n")
        return [""] * (number - len(lines)) + lines

    @property
    def width(self) -> int:
        return max(map(width_of, self.list_lines(1)))


Heading = str | Column[Any]


def column(heading: str, rank: int = 0, read: Callable[[Item], Cell] | None = None) -> Column[Item]:
    """Make a column; those of TEXTS may be shortened, those of SENTENCES folded."""
    return Column(heading, rank, LEAST_TEXT if heading in TEXTS | SENTENCES else 0, heading in SENTENCES, read)


def pick(columns: Iterable[Column[Item]], ranks: Mapping[str, int]) -> list[Column[Item]]:
    """Return the columns with the headings in ``ranks``, in this order and with these ranks."""
    by_name = {each.name: each for each in columns}
    return [dataclasses.replace(by_name[name], rank=rank) for name, rank in ranks.items()]


def without_names(columns: Iterable[Column[Item]]) -> list[Column[Item]]:
    """The columns without headings, for rows below a table that shows the headings."""
    return [dataclasses.replace(each, heading=">" if each.heading.startswith(">") else "") for each in columns]


def make_rows(columns: Sequence[Column[Item]], items: Iterable[Item]) -> list[list[Cell]]:
    """Return the cells of items; cells of a column without a reader are empty."""
    return [["" if each.read is None else each.read(item) for each in columns] for item in items]


def read_columns(headings: Iterable[Heading]) -> list[Column[Any]]:
    """Make columns of headings; of plain headings the first one stays, the others are left out from the right."""
    return [
        each if isinstance(each, Column) else column(each, number and 100 + number)
        for number, each in enumerate(headings)
    ]


def width_of(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def shorten(text: str, width: int) -> str:
    """``text`` shortened to ``width`` columns, with an ellipsis at its end."""
    if width_of(text) <= width:
        return text
    from rich.cells import set_cell_size

    return f"{set_cell_size(text, max(width - 1, 0)).rstrip()}…"


def shorten_name(name: str, width: int) -> str:
    """A name shortened to ``width`` columns in its middle, because names of containers differ at both ends."""
    if width_of(name) <= width:
        return name
    from rich.cells import set_cell_size

    end = set_cell_size(name[::-1], width // 2).strip()[::-1]
    return f"{set_cell_size(name, width - 1 - width // 2).rstrip()}…{end}"


def paint(text: str, style: str, colour: bool) -> str:
    """``text`` in a style like ``bold red`` if ``colour`` is set."""
    if not (style and text and colour):
        return text
    import click

    words = style.split()
    return click.style(
        text, fg=next((word for word in words if word in COLOURS), None), bold="bold" in words or None,
        dim="dim" in words or None,
    )  # fmt: skip


def fold(text: str, width: int | None, indent: str = "") -> str:
    """``text`` in lines of at most ``width``, continuation lines after ``indent``; no word is broken."""
    if width is None or width_of(text) <= width:
        return text
    lines = [""]
    start = text[: len(text) - len(text.lstrip())]
    for word in text.split():
        separator = " " if lines[-1].strip() else ""
        if separator and width_of(lines[-1]) + 1 + width_of(word) > width:
            lines.append("")
            separator = ""
        lines[-1] += separator + ("" if separator else start if len(lines) == 1 else indent) + word
    return "\n".join(lines)


def draw_lines(texts: Iterable[Cell], width: int | None, colour: bool = False, indent: str = "") -> Iterator[str]:
    """Texts one below the other, folded with ``fold``."""
    for text, style in map(_split, texts):
        yield from (paint(line, style, colour) for line in fold(text, width, indent).split("\n"))


def draw_fields(fields: Iterable[tuple[str, Cell]], width: int | None, colour: bool = False) -> Iterator[str]:
    """Lines ``name: value`` with aligned values; fields with an empty value are left out. A value that does not fit
    beside its name goes below it."""
    shown = [(name, *_split(value)) for name, value in fields if _split(value)[0]]
    margin = max((width_of(name) for name, _, _ in shown), default=0) + 2
    for name, value, style in shown:
        head = f"{name + ':':<{margin - 1}} " if name else ""
        longest = max(map(width_of, value.split()), default=0)
        if width is None or width_of(head) + width_of(value) <= width:
            yield head + paint(value, style, colour)
        elif margin + longest <= width:
            first, *others = fold(value, width - margin).split("\n")
            yield head + first
            yield from (" " * margin + line for line in others)
        else:
            yield f"{name}:"
            yield from (
                f"  {line}" if width_of(line) + 2 <= width else line for line in fold(value, width - 2).split("\n")
            )


def draw_grid(
    headings: Sequence[Heading], rows: Iterable[Sequence[Cell]], width: int | None, colour: bool = False
) -> tuple[str, list[str]]:
    """The table as text without a newline at its end, and the headings that were left out.

    ``width`` None: as wide as needed."""
    cells = [[_split(cell) for cell in row] for row in rows]
    columns = [
        dataclasses.replace(
            each, least=max([each.least, *(width_of(word) for row in cells for word in row[n][0].split())])
        )
        if each.folds and n == len(headings) - 1
        else dataclasses.replace(each, folds=False)
        for n, each in enumerate(read_columns(headings))
    ]
    natural = [max([column.width, *(width_of(row[n][0]) for row in cells)]) for n, column in enumerate(columns)]
    kept = [n for n, column in enumerate(columns) if column.name or any(row[n][0] for row in cells)]
    left_out: list[str] = []
    fitting = _fit(columns, natural, kept, width)
    if fitting is None:
        empty = [n for n in kept if columns[n].rank and all(row[n][0] in ("", "-") for row in cells)]
        kept = [n for n in kept if n not in empty]
        fitting = _fit(columns, natural, kept, width)
    for dropped in sorted(kept, key=lambda n: (-columns[n].rank, -n)):
        if fitting is not None or not columns[dropped].rank:
            break
        kept = [n for n in kept if n != dropped]
        left_out.append(columns[dropped].name)
        fitting = _fit(columns, natural, kept, width)
    if fitting is None:
        return "\n".join(_draw_records(columns, cells, width, colour)), []
    gap, widths = fitting
    height = max((column.heading.count("\n") + 1 for column in columns), default=1)
    head = zip(*(each.list_lines(height) for each in columns), strict=True)
    lines = (
        [*([(name, "bold") for name in names] for names in head), *cells]
        if any(columns[n].name for n in kept)
        else cells
    )
    text = "\n".join(_draw_line(columns, line, kept, widths, gap, colour) for line in lines)
    return text, [name for name in left_out if name]


def _fit(columns: Sequence[Column[Any]], natural: Sequence[int], kept: Sequence[int], width: int | None) -> (
    tuple[int, list[int]] | None
):  # fmt: skip
    """The gap between columns and their widths; None if the columns do not fit even when shortened."""
    widths = list(natural)
    if width is None:
        return GAPS[0], widths
    for gap in GAPS:
        surplus = sum(natural[n] for n in kept) + gap * (len(kept) - 1) - width
        if surplus <= 0:
            return gap, widths
        spare = {n: max(natural[n] - max(columns[n].least, columns[n].width), 0) for n in kept if columns[n].least}
        if surplus <= sum(spare.values()):
            # The widest column shrinks first.
            for n in sorted(spare, key=lambda n: spare[n], reverse=True):
                given = min(spare[n], surplus)
                widths[n] -= given
                surplus -= given
            return gap, widths
    return None


def _draw_line(
    columns: Sequence[Column[Any]], row: Sequence[tuple[str, str]], kept: Sequence[int], widths: Sequence[int],
    gap: int, colour: bool,
) -> str:  # fmt: skip
    parts, below = [], []
    for n in kept:
        text, style = row[n]
        if columns[n].folds:
            text, *below = fold(text, widths[n]).split("\n")
        elif columns[n].least:
            text = shorten(text, widths[n])
        blank = " " * (widths[n] - width_of(text))
        painted = paint(text, style, colour)
        parts.append(blank + painted if columns[n].heading.startswith(">") else painted + blank)
    indent = " " * sum(widths[n] + gap for n in kept[:-1])
    further = (indent + paint(line, row[kept[-1]][1], colour) for line in below)
    return "\n".join([(" " * gap).join(parts).rstrip(), *further])


def _draw_records(
    columns: Sequence[Column[Any]], rows: Iterable[Sequence[tuple[str, str]]], width: int | None, colour: bool
) -> Iterator[str]:
    for number, row in enumerate(rows):
        if number:
            yield ""
        fields = [
            (column.name, (_shorten_text(column, text.strip(), width), style))
            for column, (text, style) in zip(columns, row, strict=True)
        ]
        yield from draw_fields(fields, width, colour)


def _shorten_text(column: Column[Any], text: str, width: int | None) -> str:
    """Return a text that has its own line below its heading, shortened if its column is one of TEXTS."""
    return text if width is None or column.name not in TEXTS else shorten(text, max(width - 2, LEAST_TEXT))


def _split(cell: Cell) -> tuple[str, str]:
    return (cell, "") if isinstance(cell, str) else cell
