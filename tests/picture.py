"""The package as a picture: which part imports which, on which level each stands, and what is wrong with that.

``python tests/picture.py`` prints it. A part is a folder of the package or a module beside them. Imports count wherever
they stand, also under TYPE_CHECKING. Exit code 1: modules that import each other in a circle, or an arrow up.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import cpumond

ROOT = Path(cpumond.__file__).parent
MAX_LINES = 600
MODULES = {
    ".".join(("cpumond", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
"""Dotted name -> its file."""


def list_imports(name: str) -> set[str]:
    """The modules that ``name`` imports anywhere, as absolute dotted names; ``from package import module`` in full."""
    return read_module(name)[0]


def list_called(name: str) -> set[str]:
    """What ``name`` calls by a plain name anywhere."""
    return read_module(name)[1]


@cache
def read_module(name: str) -> tuple[set[str], set[str]]:
    """What a module imports and calls; its syntax is not kept, a million objects for the collector to look at."""
    found: set[str] = set()
    called: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else str(node.module))
    return found, called


def top_part(name: str) -> str:
    """The first name below the package; "cpumond" for the package itself."""
    return name.removeprefix("cpumond.").partition(".")[0]


def list_run(name: str) -> set[str]:
    """The modules that run before ``name`` does, because it imports them or something in them."""
    found = {each for each in list_imports(name) if each in MODULES}
    packages = {each.rpartition(".")[0] for each in found} | {".".join(each.split(".")[:2]) for each in found}
    # What imports something beside it needs nothing of the package that both are in: that runs already.
    return found | {each for each in packages if each in MODULES and not f"{name}.".startswith(f"{each}.")}


def find_circle(graph: Mapping[str, Collection[str]]) -> list[str]:
    """Names of which each imports the next, and the last is the first; empty where there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def main() -> int:
    """Print the picture; 1 where something is wrong with it."""
    imports = {name: list_run(name) for name in MODULES}
    arrows = Counter((top_part(name), top_part(each)) for name, found in imports.items() for each in found)
    parts = {top_part(name): {below for part, below in arrows if part == top_part(name) != below} for name in MODULES}
    count = sum(map(len, parts.values()))
    wrong = []
    while circle := find_circle(parts):
        # Of a circle the arrow with the fewest imports is the one that runs up.
        up = min(pairwise(circle), key=lambda arrow: arrows[arrow])
        parts[up[0]].discard(up[1])
        users = {name for name, found in imports.items() if up in {(top_part(name), top_part(each)) for each in found}}
        wrong.append(f"arrow up: {up[0]} -> {up[1]} in {', '.join(sorted(users))}")
    while circle := find_circle(imports):
        imports[circle[0]].discard(circle[1])
        wrong.append(f"circle: {' -> '.join(circle)}")
    levels: dict[str, int] = {}
    for part in TopologicalSorter(parts).static_order():
        levels[part] = max((levels[below] + 1 for below in parts[part]), default=0)
    sizes = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    for part, level in sorted(levels.items(), key=lambda each: (-each[1], each[0])):
        lines = sum(size for name, size in sizes.items() if top_part(name) == part)
        print(f"level {level}  {part}, {lines} lines -> {', '.join(sorted(parts[part])) or 'nothing'}")
    print(f"{len(parts)} parts, {max(levels.values()) + 1} levels, {count} arrows, {sum(sizes.values())} lines")
    for name in sorted(filter(lambda name: sizes[name] > MAX_LINES, sizes), key=sizes.__getitem__, reverse=True):
        print(f"more than {MAX_LINES} lines: {name}, {sizes[name]}")
    print("\n".join(wrong) or "no circle, no arrow up")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
