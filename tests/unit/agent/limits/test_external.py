"""The way of a write by another program through the agent: few files, never back up; predicates change nothing."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import picture
import pytest
from fake_node import FakeNode
from fake_units import UnitNode

from cpumond.testing import v2_cgroup

RECORDS = {"tracked", "ring", "state_file"}
"""The job's own record, and the file of the originals: values, and how they are kept."""
PREDICATES = ("is_", "has_", "can_", "may_", "was_", "needs_", "keeps_", "knows_", "waits_", "looks_", "counts_")
CHANGES = {
    "add", "append", "clear", "close", "discard", "emit", "extend", "insert", "makedirs", "mkdir", "pop", "popleft",
    "put", "remove", "rename", "save", "send", "setdefault", "store", "unlink", "update", "write",
}  # fmt: skip


def trace(work: Callable[[], object]) -> tuple[set[str], list[str]]:
    """The agent's files that ``work`` goes through, without those of values; calls into a file that waits for them."""
    files: set[str] = set()
    back: list[str] = []
    stack: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        _, part, name = frame.f_code.co_filename.removesuffix(".py").rpartition("/cpumond/agent/")
        if part and event == "call":
            if name in stack and stack[-1] != name:
                back.append(f"{stack[-1]} -> {name}.{frame.f_code.co_name}")
            stack.append(name)
            files.add(name)
        elif part and event == "return" and stack:
            stack.pop()

    gc.disable()  # the end of an agent of another test is none of this way
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return files - RECORDS, back


@pytest.mark.parametrize("quota", ["150000 100000", "600000 100000"])
def test_the_way_of_a_write_to_a_cgroup(make_node: Callable[..., FakeNode], quota: str) -> None:
    node = make_node({"a": v2_cgroup(quota="400000 100000")}).start()
    node.ticks(8)
    node.write("a", "cpu.max", quota)
    node.agent.loop.external.changed.add("jobs/a")
    files, back = trace(lambda: node.agent.loop.external.take_changes(node.clock.monotonic_s()))
    assert sum(node.agent.context.totals.foreign_writes.values()) == 1
    assert (files, back) == ({"limits/external", "limits/writer", "limits/hold"}, [])


@pytest.mark.parametrize("is_ordered", [True, False])
def test_the_way_of_a_write_to_a_unit(node: UnitNode, is_ordered: bool) -> None:
    """Systemd is asked first who made it."""
    node.lower()
    if is_ordered:
        node.order(3.0)
    else:
        node.file.write_text("20000 100000\n")
    external = node.agent.loop.external
    external.changed.add(node.agent.table.by_unit["work.service"].found.path)
    way, back = trace(lambda: external.take_changes(node.clock.monotonic_s()))
    node.bus.answer()
    files, more = trace(lambda: external.take_unit_news(node.clock.monotonic_s()))
    assert node.agent.context.totals.foreign_writes == {"raise": int(is_ordered), "lower": int(not is_ordered)}
    assert (back, more) == ([], [])
    assert way | files <= {f"limits/{name}" for name in ("external", "units", "judge", "hold", "writer")}


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
