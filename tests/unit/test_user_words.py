"""What users read says whose documentation it means: they do not know which documents "the documents" are."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cpumond.api.endpoints import ENDPOINTS
from cpumond.api.json.document import make_document

ROOT = Path(__file__).resolve().parents[2]
VAGUE = re.compile(r"\bthe\s+documents(?:'|\\\(aq|\b)", re.IGNORECASE)


def list_texts() -> Iterator[tuple[str, str]]:
    """(where, text) of files that users read and of the program's own sentences; comments in Python are not theirs."""
    for pattern in ("docs/**/*.md", "config/**/*", "cpumond/web/static/*", "packaging/man/*"):
        for path in ROOT.glob(pattern):
            if path.is_file() and "specification" not in path.parts:
                yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    for path in ROOT.glob("cpumond/**/*.py"):
        source = path.read_text(encoding="utf-8")
        if "documents" not in source.lower():
            continue  # the rest takes time
        tree = ast.parse(source)
        told_elsewhere = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told_elsewhere:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value
    yield "the OpenAPI document", msgspec.json.encode(make_document(ENDPOINTS, "0")).decode()


def test_nothing_that_users_read_speaks_of_the_documents() -> None:
    texts = list(list_texts())
    assert len(texts) > 500
    assert [where for where, text in texts if VAGUE.search(text)] == []
    for text in ("by the documents' names", "By the\ndocuments", r"The documents\(aq section"):
        assert VAGUE.search(text)
