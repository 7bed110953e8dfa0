"""The tree options for each option of Slurm, YARN, YuniKorn and Kueue: the lines of ``options.txt``.

The readers use them to put options into pools; the tables of ``docs/coming-from.md`` are generated from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from importlib import resources
from typing import Final, Literal, NamedTuple

Verdict = Literal["expressible", "approximated", "not expressible", "of the daemons"]
""""of the daemons": about processes, logs and so on, not about the division of resources."""
SIGNS: Final[Mapping[str, Verdict]] = {
    "=": "expressible", "~": "approximated", "x": "not expressible", "-": "of the daemons",
}  # fmt: skip
DAEMONS: Final = "of the daemons"


class Option(NamedTuple):
    """The result of one option: ``becomes`` are options of a tree file, ``name=value`` with that value."""

    place: str
    name: str
    verdict: Verdict
    becomes: str
    sentence: str


def _read(lines: Iterable[str]) -> dict[str, tuple[Option, ...]]:
    found: dict[str, tuple[Option, ...]] = {}
    said: dict[str, str] = {}
    table = place = ""
    for line in lines:
        if line.startswith("["):
            table, place = line[1:-1].split(": ")
        elif line[:1] in SIGNS and line[1:2] == " ":
            name, becomes, sentence = (cell.strip() for cell in line[2:].split("|"))
            row = Option(place, name, SIGNS[line[0]], becomes, said.get(sentence, sentence))
            found[table] = (*found.get(table, ()), row)
        elif not line.startswith("#"):
            key, _, sentence = line.partition(": ")
            said[key] = sentence
    return found


TABLES: Final[Mapping[str, tuple[Option, ...]]] = _read(
    (resources.files(__package__) / "options.txt").read_text(encoding="utf-8").splitlines()
)


def find_option(table: str, place: str, name: str, value: object = "") -> Option | None:
    """Return the row of an option with a value, for names in any case; None for an unknown option."""
    names = (name.lower(), f"{name}={value}".lower())
    rows = (row for row in TABLES[table] if row.place == place)
    return next((row for row in rows if any(fnmatchcase(each, row.name.lower()) for each in names)), None)
