"""The package as a picture: which part imports which, on which level each stands, and what is wrong with that.

``python tests/picture.py`` prints it, for the package and for the scheduler, its largest part. A part is a folder or a
module beside them. Imports count wherever they stand, also under TYPE_CHECKING. Exit code 1: modules that import each
other in a circle, or an arrow up. ``python tests/picture.py lines`` prints the lines of Python of each part and of the
tests, and how many there were at the last release.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import cpumond

ROOT = Path(cpumond.__file__).parent
PLAIN_DATA = re.compile(r"(?:Struct|Protocol|Error|Exception|NamedTuple)$")
"""Bases that are no classes of methods: their names end so."""
MODULES = {
    ".".join(("cpumond", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
"""Dotted name -> its file."""


@dataclass(frozen=True, slots=True)
class Class:
    """A class by its base classes, as they are written, and the names that its body defines."""

    bases: tuple[str, ...]
    defines: frozenset[str]


@dataclass(slots=True)
class Module:
    """Facts of one module; its syntax is not kept, a million objects for the collector to look at."""

    imports: set[str] = field(default_factory=set)
    """Modules that it imports anywhere, as absolute dotted names; ``from package import module`` in full."""
    names: dict[str, str] = field(default_factory=dict)
    """Imported name -> where it is from, in full."""
    called: set[str] = field(default_factory=set)
    """Names that it calls, without those of attributes."""
    typed: set[str] = field(default_factory=set)
    """Names in annotations."""
    classes: dict[str, Class] = field(default_factory=dict)


def list_imports(name: str) -> set[str]:
    return read_module(name).imports


@cache
def read_module(name: str) -> Module:
    found = Module()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.called.add(node.func.id)
        elif isinstance(node, ast.Import):
            found.imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.imports.add(full if full in MODULES else str(node.module))
                found.names[alias.asname or alias.name] = full
        elif isinstance(node, ast.ClassDef):
            found.classes[node.name] = _read_class(node)
        elif isinstance(node, ast.arg | ast.AnnAssign | ast.FunctionDef | ast.AsyncFunctionDef):
            said = node.returns if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else node.annotation
            found.typed.update(each.id for each in ast.walk(said) if isinstance(each, ast.Name)) if said else None
    return found


def _read_class(node: ast.ClassDef) -> Class:
    bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    defines = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    for each in node.body:
        if isinstance(each, ast.Assign | ast.AnnAssign):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            defines.update(target.id for target in targets if isinstance(target, ast.Name))
    return Class(tuple(map(ast.unparse, bases)), frozenset(defines))


def list_classes() -> dict[str, Class]:
    """All classes of the package by their names in full; so are their bases, as far as they are imported by name."""
    found: dict[str, Class] = {}
    for module in MODULES:
        read = read_module(module)
        own = {name: f"{module}.{name}" for name in read.classes}
        for name, each in read.classes.items():
            found[own[name]] = Class(tuple((read.names | own).get(base, base) for base in each.bases), each.defines)
    return found


def find_spread_classes() -> list[str]:
    """``base <- class`` for each class that inherits for methods alone: it and its base are one class in two places.
    Else the base is made itself or several classes derive from it, and either an annotation takes any of them or the
    class has its own version of something that the base has."""
    classes = list_classes()
    uses = [(read_module(module), module) for module in MODULES]

    def is_named(base: str, how: Callable[[Module], Collection[str]]) -> bool:
        plain = base.rpartition(".")[2]
        return any(plain in how(read) and read.names.get(plain, f"{module}.{plain}") == base for read, module in uses)

    def above(name: str) -> list[str]:
        direct = classes[name].bases if name in classes else ()
        return [*direct, *(each for base in direct for each in above(base))]

    spread = []
    derived = Counter(base for each in classes.values() for base in each.bases)
    for name, each in classes.items():
        for base in each.bases:
            if base not in classes or any(PLAIN_DATA.search(one) for one in (base, *above(base))):
                continue
            is_kind = derived[base] > 1 or is_named(base, lambda read: read.called)
            known = frozenset().union(*(classes[one].defines for one in (base, *above(base)) if one in classes))
            has_own = (each.defines & known) - {"__init__", "__slots__"}
            if not is_kind or not (has_own or is_named(base, lambda read: read.typed)):
                spread.append(f"{base.removeprefix('cpumond.')} <- {name.removeprefix('cpumond.')}")
    return sorted(spread)


def top_part(name: str, whole: str = "cpumond") -> str:
    """The first name below ``whole``; its last name for itself."""
    return name.removeprefix(f"{whole}.").partition(".")[0] if name != whole else whole.rpartition(".")[2]


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


def draw(whole: str) -> list[str]:
    """Print the parts of a package with their levels and arrows; the arrows up and the circles, in sentences."""
    inside = [name for name in MODULES if f"{name}.".startswith(f"{whole}.")]
    imports = {name: list_run(name).intersection(inside) for name in inside}
    part_of = {name: top_part(name, whole) for name in inside}
    arrows = Counter((part_of[name], part_of[each]) for name, found in imports.items() for each in found)
    # What is imported in a package runs the package first, which is no arrow to it.
    root = whole.rpartition(".")[2]
    parts = {
        part: {below for above, below in arrows if part == above != below and (below != root or whole == "cpumond")}
        for part in sorted(set(part_of.values()))
    }
    count = sum(map(len, parts.values()))
    wrong = []
    while circle := find_circle(parts):
        # Of a circle the arrow with the fewest imports is the one that runs up.
        up = min(pairwise(circle), key=lambda arrow: arrows[arrow])
        parts[up[0]].discard(up[1])
        users = {name for name, found in imports.items() if up in {(part_of[name], part_of[each]) for each in found}}
        wrong.append(f"arrow up: {up[0]} -> {up[1]} in {', '.join(sorted(users))}")
    while circle := find_circle(imports):
        imports[circle[0]].discard(circle[1])
        wrong.append(f"circle: {' -> '.join(circle)}")
    levels: dict[str, int] = {}
    for part in TopologicalSorter(parts).static_order():
        levels[part] = max((levels[below] + 1 for below in parts[part]), default=0)
    sizes = {name: len(MODULES[name].read_text().splitlines()) for name in inside}
    for part, level in sorted(levels.items(), key=lambda each: (-each[1], each[0])):
        lines = sum(size for name, size in sizes.items() if part_of[name] == part)
        print(f"level {level}  {part}, {lines} lines -> {', '.join(sorted(parts[part])) or 'nothing'}")
    print(
        f"{whole}: {len(parts)} parts, {max(levels.values()) + 1} levels, {count} arrows, {sum(sizes.values())} lines"
    )
    return wrong


def count_lines(commit: str = "") -> Counter[str]:
    """Lines of Python of each part of the package and of the tests: of the files as they are, or of a commit."""
    found = subprocess.run(
        # Every line fits the empty pattern.
        ["git", "grep", "--untracked", "-c", "", "--", "cpumond/*.py", "tests/*.py"]
        if not commit
        else ["git", "grep", "-c", "", commit, "--", "cpumond/*.py", "tests/*.py"],
        cwd=ROOT.parent, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    lines: Counter[str] = Counter()
    for line in found.splitlines():
        *_, path, number = line.split(":")
        top, part, *rest = path.split("/")
        lines["tests" if top == "tests" else part if rest else "cpumond"] += int(number)
    return lines


def find_release() -> str:
    """The commit of the last tag, of the last change of the version where there is no tag."""

    def ask(*command: str) -> str:
        done = subprocess.run(["git", *command], check=False, cwd=ROOT.parent, capture_output=True, text=True)
        return done.stdout.strip()

    return ask("describe", "--tags", "--abbrev=0") or ask(
        "log", "-1", "--format=%h", "-G", "^__version__", "--", "cpumond/__init__.py"
    )


def print_lines() -> None:
    """A line for each part, for the package and for the tests: lines at the last release, now, the difference."""
    release = find_release()
    now, then = count_lines(), count_lines(release) if release else Counter[str]()
    for lines in (now, then):
        lines["all of the package"] = lines.total() - lines["tests"]
    print(f"lines of Python  {release or 'no release':>10}         now")
    for part in [*sorted(now.keys() - {"tests", "all of the package"}), "all of the package", "tests"]:
        print(f"{part:<18}{then[part]:>9}{now[part]:>12}{now[part] - then[part]:>+9}")


def main(arguments: Sequence[str] = ()) -> int:
    """Print the pictures; 1 where something is wrong with one."""
    if [*arguments] == ["lines"]:
        print_lines()
        return 0
    wrong = [each for whole in ("cpumond", "cpumond.scheduler") for each in draw(whole)]
    print("\n".join(wrong) or "no circle, no arrow up")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
