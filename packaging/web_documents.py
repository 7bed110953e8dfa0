"""Writes what the web pages and docs/ share: the runbook as a page, and the glossary of the page as a document.

usage: python packaging/web_documents.py

cpumond/web/static/runbook.html is made of docs/runbook.md: alerts link to its sections where the scheduler serves it.
docs/glossary.md is made of cpumond/web/static/glossary.js.
"""

from __future__ import annotations

import html
import json
import re
import textwrap
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
STATIC: Final = ROOT / "cpumond" / "web" / "static"

HEAD: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="style.css">
</head>
<body>
<main class="document">
"""
FOOT: Final = "</main>\n</body>\n</html>\n"
GLOSSARY_HEAD: Final = """# Glossary

The terms of cpumond, which are tips on the web page: hold the pointer over a dotted word, go to it by Tab, or touch it.
Made of `cpumond/web/static/glossary.js` by `python packaging/web_documents.py`.

"""
GLOSSARY_TAIL: Final = """
## Words of earlier versions

JSON keys, options, metrics and names of events that contain them stay as they are.

| no longer used | now |
|---|---|
| ordered, order (of CPU, memory, slots) | requested, request |
| allotted | allocated |
| room (on a node) | free resources; reserved resources, reservation |
| held back (a job) | throttled |
| held back, hindrance (a pool, an operation) | blocked by, obstacle |
| what is given back, goes up again | raised |
| ended for others | preempted |
| taken over (a job, a limit) | adopted |
| taken over (from another scheduler) | take-over: the standby becomes the leader |
| given up (a job) | declared lost |
| foretold, run ahead | predicted, forecast, simulation |
| cut, cut off (a log, a list, a text) | truncated, shortened |
| made anew | recreated, computed again |
| told, says, tells | reported, logged, published, sent, notified |
| price | cost |
| somebody, nobody, whoever | the user, the administrator, the caller |
"""


def make_page(text: str) -> str:
    """A document of headings, paragraphs and lists as HTML; a heading's id is its text as GitHub makes it."""
    title = text.partition("\n")[0].removeprefix("# ")
    return HEAD.format(title=html.escape(title)) + "".join(map(_block, re.split(r"\n{2,}", text.strip()))) + FOOT


def _block(block: str) -> str:
    heading = re.fullmatch(r"(#+) (.+)", block)
    if heading:
        level, text = len(heading[1]), heading[2]
        anchor = re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-")
        return f'<h{level} id="{anchor}">{_inline(text)}</h{level}>\n'
    if block.startswith("- "):
        items = re.split(r"\n- ", block.removeprefix("- "))
        return "<ul>\n" + "".join(f"<li>{_inline(item)}</li>\n" for item in items) + "</ul>\n"
    if re.search(r"^(?:```|\||>|\d+\. |    |- )", block, re.MULTILINE):
        raise SystemExit(f"not a heading, a paragraph or a list of one level, which is all there may be: {block!r}")
    return f"<p>{_inline(block)}</p>\n"


def _inline(text: str) -> str:
    codes: list[str] = []

    def keep(code: re.Match[str]) -> str:
        codes.append(f"<code>{html.escape(code[1])}</code>")
        return f"\0{len(codes) - 1}\0"

    def link(found: re.Match[str]) -> str:
        # What lies beside the document is not beside the page.
        name, target = found.groups()
        return f'<a href="{target}">{name}</a>' if target.startswith(("#", "https:")) else name

    text = html.escape(re.sub(r"`([^`]+)`", keep, re.sub(r"\s+", " ", text)))
    text = re.sub(r"\[([^\]]+)\]\(([^)]+)\)", link, re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text))
    return re.sub(r"\0(\d+)\0", lambda number: codes[int(number[1])], text)


def read_glossary(source: str) -> list[tuple[list[str], str]]:
    """(names, text) of each entry of glossary.js."""
    entries = json.loads(source[source.index("GLOSSARY = ") + len("GLOSSARY = ") :].strip().removesuffix(";"))
    return [(names.split(", "), text) for names, text in entries]


def make_glossary(source: str) -> str:
    """The glossary as a document."""
    entries = read_glossary(source)
    lines = (f"- **{names[0]}**: {text}" for names, text in entries)
    texts = (textwrap.fill(line, 120, subsequent_indent="  ") + "\n" for line in lines)
    return GLOSSARY_HEAD + "".join(texts) + GLOSSARY_TAIL


def make_all() -> dict[Path, str]:
    """Each file that is made, and what belongs into it."""
    return {
        STATIC / "runbook.html": make_page((ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")),
        ROOT / "docs" / "glossary.md": make_glossary((STATIC / "glossary.js").read_text(encoding="utf-8")),
    }


if __name__ == "__main__":
    for path, text in make_all().items():
        path.write_text(text, encoding="utf-8")
