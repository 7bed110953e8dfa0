"""Each section of docs/specification that a docstring, a comment or the name of a test cites is there."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPECIFICATION = ROOT / "docs" / "specification"

NUMBER = r"\d{1,2}(?:\.\d{1,2})?(?![\d.]*\d)"
NUMBERS = rf"{NUMBER}(?:(?:,? and |[,;] | to |-){NUMBER})*"
NAMED = re.compile(rf"\b(\w+\.md) ({NUMBERS})")
NAME = re.compile(rf"\b(?:{'|'.join(path.name for path in SPECIFICATION.glob('*.md'))})")
BARE = re.compile(
    rf"\b[Ss]ections? ({NUMBERS})"
    # (6.4), (6.4, old count rule), (1.3 point 1), (6.5 a and b)
    rf"|(?<![\w)\]])\(({NUMBERS})(?:[,:;] [^()]*| (?:no\.|points?|steps?|[a-z] and [a-z]\b)[^()]*)?\)"
    # at the beginning: "10.5: ...", "1.3 point 7: ...", "--- 6.2, states"
    rf"|^(?:-+ )?({NUMBERS})(?: points? [^:]*)?(?:[:,] | -+$)"
)
"""Citations that leave it to the file, or to its folder's ``__init__.py``, to say whose sections they are."""
TEXT = re.compile(
    r'^ *r?"""(?P<docstring>.*?)"""|""".*?"""|(?P<comment>(?:^ *#[^\n]*\n)+|  # [^\n]*)', re.MULTILINE | re.DOTALL
)
"""Docstrings; other long strings, which are passed over; comments."""
TEST = re.compile(r"(?<=def )test_(\d+)_(\d+)_(?:(\d+)_)?(?=[a-z])")
"""A test named after the section, or the point of one, that it is about."""


def list_texts(path: Path) -> list[tuple[int, str]]:
    """Line and text, without line breaks, of a file's docstrings and comments; of a Markdown file all of it."""
    source = path.read_text()
    if path.suffix == ".md":
        return [(1, " ".join(source.split()))]
    texts = []
    for found in TEXT.finditer(source):
        if found["docstring"] or found["comment"]:
            text = found["docstring"] or re.sub(r"(?m)^ *#+ ?", "", found["comment"])
            texts.append((source.count("\n", 0, found.start()) + 1, " ".join(text.split())))
    return texts


def list_citations(text: str) -> Iterator[tuple[str, str]]:
    """Name of the file, "" where the text does not say it, and number of each section that a text cites."""
    rest = list(text)
    for found in NAMED.finditer(text):
        rest[found.start() : found.end()] = " " * len(found[0])
        yield from ((found[1], number) for number in re.findall(NUMBER, found[2]))
    for found in BARE.finditer("".join(rest)):
        yield from (("", number) for number in re.findall(NUMBER, next(filter(None, found.groups()))))


def find_name(texts: list[tuple[int, str]]) -> str:
    """The first file of the specification that a file's texts name, "" for none."""
    return next((found[0] for _, text in texts if (found := NAME.search(text))), "")


def list_sections(path: Path) -> set[str]:
    """Numbers of a file's headings, and of the points below them as "10.5" and "2.6.1"."""
    sections, heading = set(), ""
    for line in path.read_text().splitlines():
        if found := re.match(r"#+ ([\d.]*\d)\.? ", line):
            heading = found[1]
            sections.add(heading)
        elif found := re.match(r"(\d+)\. ", line):
            sections.add(f"{heading}.{found[1]}")
    return sections


def test_each_section_that_is_cited_is_there():
    known = {path.name: list_sections(path) for path in SPECIFICATION.glob("*.md")}
    missing, count = [], 0
    for path in sorted([*ROOT.glob("cpumond/**/*"), *ROOT.glob("tests/**/*.py")]):
        if path.suffix not in (".py", ".md") or path == Path(__file__):
            continue
        texts, folder = list_texts(path), path.with_name("__init__.py")
        default = find_name(texts) or (find_name(list_texts(folder)) if folder.exists() else "")
        cited = [(line, *citation) for line, text in texts for citation in list_citations(text)]
        for found in TEST.finditer(path.read_text()):
            cited += [(found[0], default or "says not whose", ".".join(filter(None, found.groups())))]
        for place, name, number in cited:
            if name or default:
                count += 1
                if number not in known.get(name or default, ()):
                    missing.append(f"{path.relative_to(ROOT)}: {place}: {name or default} {number}")
    assert not missing
    assert count > 900, "the forms of citations have changed"
