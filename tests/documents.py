"""README, CONTRIBUTING.md and the pages of docs/, for the tests that check them."""

import re
import shlex
from collections.abc import Iterator
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


SHOWN: Final = re.compile(r"(?:[$#] )?(?:\S+=\S+ |\S+ && )*(?:\S*/)?cpumond ")
"""A line of a block without a language, or of one with output, that is typed."""


def list_commands(text: str) -> Iterator[tuple[list[str], bool]]:
    """Words of each `cpumond` command, and whether it stands in a fenced block; not those with an ellipsis. One between
    backquotes may lack arguments."""
    blocks = [(language, re.sub(r"\\\n\s*", " ", block)) for language, block in FENCED.findall(text)]
    lines = [(line, True) for language, block in blocks for line in block.splitlines()
             if language == "sh" or (language in ("console", "") and SHOWN.match(line))]  # fmt: skip
    lines += [(line, False) for line in re.findall(r"`((?:sudo )?cpumond [^`]+)`", FENCED.sub("", text))]
    for line, is_fenced in lines:
        if "cpumond " in line.partition("#")[0].removeprefix("# ") and "..." not in line:
            typed = re.sub(r"^[$#] ", "", " ".join(line.split()))
            yield from ((words, is_fenced) for words in split_commands(typed))


def split_commands(line: str) -> Iterator[list[str]]:
    """Words of each `cpumond` command of a line of shell, without redirections and comments."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&<>()")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set(";|&<>()"):
            if words and (words[0] == "cpumond" or words[0].endswith("/bin/cpumond")):
                yield words[1:]
            words = []
        elif words or not re.match(r"sudo$|\w+=", word):
            words.append(word)
