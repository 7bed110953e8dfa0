"""Writes the tables of docs/from-ytsaurus.md: what becomes of each option of a specification.

usage: python packaging/ytsaurus_options.py

They are made of cpumond/scheduler/settings/spec_options.py, by which the scheduler itself reads specifications.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from cpumond.scheduler.settings.spec_options import OPTIONS, Option, Verdict

DOCUMENT: Final = Path(__file__).resolve().parent.parent / "docs" / "from-ytsaurus.md"
BEGIN: Final = "<!-- made by packaging/ytsaurus_options.py -->\n"
END: Final = "<!-- end -->\n"
PLACES: Final = {"root": "root", "task": "task", "tree": "per tree", "pool": "pool"}
TITLES: Final[dict[Verdict, tuple[str, str]]] = {
    "honoured": ("Honoured", "note"),
    "refused": ("Refused", "what would go wrong; what to write instead"),
    "warned": ("Warned of", "why it has no effect"),
    "ignored": ("Ignored", ""),
}


def write_document(text: str) -> str:
    """The document with the tables as the code has them now."""
    tables = "\n".join(_write_table(verdict) for verdict in TITLES)
    found = re.sub(f"(?<={re.escape(BEGIN)}).*(?={re.escape(END)})", lambda _: f"\n{tables}\n", text, flags=re.DOTALL)
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{DOCUMENT}: the lines {BEGIN.strip()} and {END.strip()} are missing")
    return found


def _write_table(verdict: Verdict) -> str:
    title, column = TITLES[verdict]
    rows = [option for option in OPTIONS if option.verdict == verdict]
    columns = ["option", "place", "YTsaurus' default", *[column] * bool(column)]
    lines = [columns, ["---"] * len(columns), *(_write_row(option)[: len(columns)] for option in rows)]
    return f"### {title}\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _write_row(option: Option) -> list[str]:
    names = ", ".join(f"`{name}`" for name in (option.name, *option.aliases))
    condition = "with several trees: " if option.several_trees else ""
    places = ", ".join(PLACES[place] for place in option.places)
    return [names, places, option.default or "(not there)", condition + option.sentence]


def main() -> None:
    DOCUMENT.write_text(write_document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
