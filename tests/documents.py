"""README, CONTRIBUTING.md and the pages of docs/, for the tests that check them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
DOCUMENTS: Final = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED: Final = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
NO_METRICS: Final = re.compile(r"cpumond_(?:records(?:_v\d*)?|schema|reclaimed)")
"""Tables of PostgreSQL and a slice of systemd."""


def expand(name: str) -> list[str]:
    """Return the names that ``a_{b,c}_d{label}`` stands for: braces after an underscore are alternatives."""
    found = re.search(r"(?<=_)\{([\w,]+)\}", name)
    if found is None:
        return [name.partition("{")[0]]
    around = name[: found.start()], name[found.end() :]
    return [each for part in found[1].split(",") for each in expand(f"{around[0]}{part}{around[1]}")]


def list_metrics() -> set[str]:
    """Return the metrics that documents name; one that ends with an underscore is the beginning of several."""
    named = {
        name for path in DOCUMENTS for name in re.findall(r"\bcpumond_[a-z{][\w{},]+", path.read_text(encoding="utf-8"))
    }
    return {each for name in named if not NO_METRICS.fullmatch(name) for each in expand(name)}
