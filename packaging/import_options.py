"""Writes the tables of docs/coming-from.md: what becomes of each option of Slurm, YARN, YuniKorn and Kueue.

usage: python packaging/import_options.py

They are made of cpumond/cli/imports/options.py, by which `cpumond tree import` itself reads configurations.
"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from typing import Final

from cpumond.cli.imports.options import DAEMONS, TABLES, Option

DOCUMENT: Final = Path(__file__).resolve().parent.parent / "docs" / "coming-from.md"
MADE: Final = re.compile(r"(?<=<!-- made by packaging/import_options.py: )(\w+) -->\n.*?(?=<!-- end -->\n)", re.DOTALL)


def write_document(text: str) -> str:
    """The document with the tables as the code has them now."""
    found = MADE.findall(text)
    if sorted(found) != sorted(TABLES):
        raise SystemExit(f"{DOCUMENT}: expected a place for each of {', '.join(TABLES)}, found {', '.join(found)}")
    return MADE.sub(lambda match: f"{match[1]} -->\n\n{_write_table(TABLES[match[1]])}\n", text)


def _write_table(options: tuple[Option, ...]) -> str:
    told = [option for option in options if option.verdict != DAEMONS]
    lines = [["in", "option", "is", "here, or nearest", "how, or why not"], ["---"] * 5, *map(_write_row, told)]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    left = [option for option in options if option.verdict == DAEMONS]
    for place, rows in groupby(left, key=lambda option: option.place):
        names = ", ".join("all others" if row.name == "*" else f"`{row.name}`" for row in rows)
        table += f"\nOf the daemons, in {place}: {names}.\n"
    return table


def _write_row(option: Option) -> list[str]:
    becomes = re.sub(r"(?:^|(?<=, ))([^(), ]+)", r"`\1`", option.becomes.replace(":", " "))
    if ":" in option.becomes:
        becomes = f"`{option.becomes.replace(':', '/')}`"
    return [option.place, f"`{option.name}`", option.verdict, becomes, option.sentence.replace("|", "\\|")]


def main() -> None:
    DOCUMENT.write_text(write_document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
