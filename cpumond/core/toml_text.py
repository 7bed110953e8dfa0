"""TOML written by people: the line of each key, and a correction for a line that is not TOML."""

from __future__ import annotations

import re
import tomllib
from typing import Final

MAX_LINE: Final = 120
"""Maximum characters of a line that a sentence shows."""

MAX_CHARACTERS: Final = 8 * 1024 * 1024
"""Maximum length of a file; ten thousand pools with twenty options each take a quarter of it."""

MAX_KEYS: Final = 500_000
MAX_NAMES: Final = 200
"""Maximum number of names in a dotted key; enough for a pool a hundred levels deep."""

MAX_STEPS: Final = 20_000_000
"""Maximum cost of parsing dotted keys: the sum, over all of these keys, of the square of the number of names."""

Path = tuple[str, ...]

NO_KEYS: Final = re.compile(
    "|".join(
        (
            r'"{3}(?:[^"\\]++|\\.|"(?!""))*+"{0,5}',
            r"'{3}.*?(?:'{3,5}|\Z)",
            r'"(?:[^"\\\n]++|\\.)*+"?',
            r"'[^'\n]*+'?",
            r"#[^\n]*+",
        )
    ),
    re.DOTALL,
)
"""Pattern of texts and comments of TOML, which contain no keys."""

DOTTED: Final = re.compile(r"(?<![\w-])[\w-]++(?:[ \t]*+\.[ \t]*+[\w-]++)++")

BARE_PATH: Final = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
SECRET: Final = re.compile(r"token|passw|secret|conninfo", re.IGNORECASE)
"""Keys whose values never appear in a sentence, because sentences may be logged."""

CURLY: Final = dict.fromkeys(map(ord, "“”„‟‘’‚«»"), '"')  # noqa: RUF001 - they are what people paste
UNIT: Final = r"[-+]?[0-9._]+ ?([mun]?s|min|[mhdw]|[kKMGT]i?B?|%)"


def list_lines(text: str) -> dict[Path, int]:
    """Return the line where each key and table is first named. The tables of ``[[source]]`` are also listed under the
    names that sentences use ("source 2")."""
    lines: dict[Path, int] = {}
    place: Path = ()
    counts: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        header = re.match(r"\s*(\[\[?)([^\[\]]+)\]", line)
        key = re.match(r"""\s*((?:"[^"]*"|'[^']*'|[\w.-])+)\s*=""", line)
        if header is not None:
            place = named = _split_path(header[2])
            if header[1] == "[[" and len(place) == 1:
                counts[place[0]] = counts.get(place[0], 0) + 1
        else:
            named = () if key is None else (*place, *_split_path(key[1]))
        counted = (f"{named[0]} {counts[named[0]]}", *named[1:]) if named and named[0] in counts else named
        for path in (named, counted):
            # If a path is known, its parents are known, too: only the new part of a key costs time.
            for depth in range(len(path), 0, -1):
                if lines.setdefault(path[:depth], number) != number:
                    break
    return lines


def _split_path(text: str) -> Path:
    """Split a dotted key into names; () if it is not a key."""
    if BARE_PATH.fullmatch(text.strip()):
        return tuple(text.strip().split("."))
    try:
        table = tomllib.loads(f"{text} = 0")
    except (ValueError, RecursionError):
        return ()
    path = []
    while isinstance(table, dict) and table:
        name, table = next(iter(table.items()))
        path.append(name)
    return tuple(path)


def find_excess(text: str) -> str:
    """Return why the parser would take too long for a text; "" if the text may be parsed."""
    if len(text) > MAX_CHARACTERS:
        return f"it is longer than {MAX_CHARACTERS // 2**20} MiB; split it"
    rest = NO_KEYS.sub(lambda found: "" if found[0][0] == "#" else "_", text)
    if rest.count("=") > MAX_KEYS:
        return f"it has more than {MAX_KEYS} keys; split it"
    steps = 0
    for found in DOTTED.finditer(rest):
        names = found[0].count(".") + 1
        steps += names * names
        if names > MAX_NAMES:
            return f"a key in it has {names} names with dots between them, and at most {MAX_NAMES} are read"
        if steps > MAX_STEPS:
            return "its keys with dots have too many names; write the keys of a table below its [table] header"
    return ""


def explain_toml(text: str, said: str) -> str:
    """Explain the parser's error ``said`` about ``text``: the line, its text, and the correction."""
    what, _, at = said.rpartition(" (at ")
    found = re.match(r"line (\d+), column (\d+)\)", at)
    lines = text.split("\n")
    if found is None and "end of document" not in at:
        return said
    number = int(found[1]) if found else len(text.rstrip().split("\n"))
    line = lines[number - 1].strip()
    remedy = _find_unclosed(lines[:number], what) or _find_double(lines, number, what)
    if not remedy and len(line) <= 10 * MAX_LINE:
        remedy = _find_remedy(line, what)
    place = "" if remedy or not found else f" (column {found[2]})"
    key = re.match(r"[^=:]*", line)[0]  # type: ignore[index]  # matches always
    shown = f"{key.strip()} ..." if SECRET.search(key) else line
    shown = "".join(sign if sign.isprintable() else "?" for sign in shown)
    return f"line {number}: `{shown[:MAX_LINE]}{'...' * (len(shown) > MAX_LINE)}`: {remedy or what}{place}"


def _find_unclosed(lines: list[str], what: str) -> str:
    """Return a clause about an unclosed bracket, from the parser's message; "" if there is none."""
    sign = "]" if "array" in what else "}" if "inline table" in what else ""
    if not what.startswith("Unclosed") or not sign:
        return ""
    opening = "[" if sign == "]" else "{"
    for number in range(len(lines), 0, -1):
        _, equals, value = lines[number - 1].partition("=")
        if equals and value.count(opening) > value.count(sign):
            kind = "list" if sign == "]" else "table"
            return f"the {kind} that begins in line {number} is not closed, or a comma is missing; end it with {sign}"
    return ""


def _find_double(lines: list[str], number: int, what: str) -> str:
    line = lines[number - 1].strip()
    if "twice" in what or "Cannot mutate" in what:
        name = re.match(r"\[+\s*([^\]]*?)\s*\]", line)
        if name is None:
            return ""
        pattern = rf"\s*\[+\s*{re.escape(name[1])}\s*\]"
        first = next((place for place in range(1, number) if re.match(pattern, lines[place - 1])), 0)
        where = f", first in line {first}" if first else ""
        return f"the table [{name[1]}] appears twice{where}; put all of its keys below one of them"
    if "overwrite" not in what:
        return ""
    key = line.partition("=")[0].strip()
    for place in range(number - 1, 0, -1):
        if lines[place - 1].partition("=")[0].strip() == key:
            return f"{key} appears twice, first in line {place}; keep one of them"
        if lines[place - 1].lstrip().startswith("["):
            break
    return f"{key} appears twice; keep one of them"


def _find_remedy(line: str, what: str) -> str:
    """Explain what is wrong with a single line and give the correction; "" if that is unclear."""
    if any(ord(sign) in CURLY for sign in line) and "overwrite" not in what:
        return _advise("quotes must be straight", line.translate(CURLY))
    key, equals, value = (part.strip() for part in line.partition("="))
    if not equals or ":" in key:
        pair = re.match(r"""(["']?[\w.-]+["']?)\s*:\s*(.*)""", line)
        return _advise("= separates key and value, not :", _pair(pair[1], pair[2])) if pair else ""
    if not value:
        return f"{key} has no value: write one, or leave the line out"
    if value[0] in "\"'":
        if value.count(value[0]) == 1:
            return _advise("the quote is not closed", f"{key} = {value}{value[0]}")
        if value[0] == '"' and "\\" in value and "scalar" not in what:
            return _advise('a backslash in "..." needs a second one, or single quotes', f"{key} = '{value[1:-1]}'")
        return ""
    if value[0] not in "[{":
        value = re.sub(r"\s+#.*", "", value)
    if re.fullmatch(r"[-+]?[0-9]+,[0-9]+", value):
        return _advise("a decimal number has a point, not a comma", f"{key} = {value.replace(',', '.')}")
    if value.lower() in ("yes", "no", "on", "off", "true", "false"):
        right = "true" if value.lower() in ("yes", "on", "true") else "false"
        return _advise("the values are true and false, in lower case", f"{key} = {right}")
    if re.fullmatch(UNIT, value):
        return _advise("a value with a unit needs quotes", f'{key} = "{value}"')
    return _advise("a text needs quotes", _pair(key, value)) if re.fullmatch(r"""[^]["'{}=,]+""", value) else ""


def _pair(key: str, value: str) -> str:
    """Return ``key = value``, with the value in quotes if it is not valid TOML without them."""
    line = f"{key} = {value}"
    return line if _is_toml(line) else f'{key} = "{value}"'


def _advise(what: str, line: str) -> str:
    """Return a remedy, with the corrected line if that is valid and holds no secret."""
    is_good = len(line) <= MAX_LINE and not SECRET.search(line.partition("=")[0]) and _is_toml(line)
    return f"{what}; write {line}" if is_good else what


def _is_toml(line: str) -> bool:
    try:
        return bool(tomllib.loads(line))
    except (ValueError, RecursionError):
        return False
