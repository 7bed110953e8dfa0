"""A function that is named like a question changes nothing."""

from __future__ import annotations

import ast

import picture

PREDICATES = ("is_", "has_", "can_", "may_", "was_", "needs_", "keeps_", "knows_", "waits_", "looks_", "counts_")
CHANGES = {
    "add", "append", "clear", "close", "discard", "emit", "extend", "insert", "makedirs", "mkdir", "pop", "popleft",
    "put", "remove", "rename", "save", "send", "setdefault", "store", "unlink", "update", "write",
}  # fmt: skip


def list_changes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """What a function changes of the objects that it is given."""
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            found.append(ast.unparse(node.func))
    return found


def test_predicates_change_nothing() -> None:
    functions = [
        (name, each)
        for name, path in picture.MODULES.items()
        if name.startswith(("cpumond.agent", "cpumond.host", "cpumond.monitor"))
        for each in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name.lstrip("_").startswith(PREDICATES)
    ]
    assert len(functions) > 90
    assert {f"{name}.{each.name}": found for name, each in functions if (found := list_changes(each))} == {}
