"""Layout of ``--help``: as wide as the terminal, without broken words."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from typing import Final

import click

from cpumond.cli.render.grid import fold, width_of

NARROW: Final = 60
"""On terminals with fewer columns the text of an option is below the option, not beside it."""


class Formatter(click.HelpFormatter):
    """Breaks no long words and no lines at hyphens, and fits terminals below 50 columns, unlike click's formatter."""

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        columns = shutil.get_terminal_size().columns
        super().__init__(indent_increment, width or min(columns, max_width or 80) - (2 if columns >= NARROW else 0))

    def write_text(self, text: str) -> None:
        indent = " " * self.current_indent
        for number, paragraph in enumerate(re.split(r"\n\s*\n", text)):
            kept = paragraph.startswith("\b")
            folded = fold(" ".join(paragraph.split()), self.width - len(indent))
            lines = paragraph.removeprefix("\b\n").split("\n") if kept else folded.split("\n")
            self.write(("\n" if number else "") + "".join(f"{indent}{line}".rstrip() + "\n" for line in lines))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        indent, rows = " " * self.current_indent, list(rows)
        widest = max((width_of(name) for name, _ in rows), default=0)
        column = len(indent) + min(widest, col_max) + col_spacing
        if self.width < NARROW:
            column = len(indent) + 4
        for name, text in rows:
            fits = len(indent) + width_of(name) + col_spacing <= column
            head = f"{indent}{name}"
            first, *others = fold(text, self.width - column).split("\n")
            lines = [head.ljust(column) + first] if fits else [head, " " * column + first]
            self.write("".join(f"{line.rstrip()}\n" for line in [*lines, *(" " * column + line for line in others)]))
