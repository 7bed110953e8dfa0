"""Specifications in YAML: what is wrong with one is a sentence, and a few aliases are no billion values."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpumond.cli.scheduler.spec import read_document
from cpumond.core.errors import ConfigError

BOMB = "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(30))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("title: !!bool x\n", 'line 1: "x" is no bool'),
        ("title: !!timestamp x\n", 'line 1: "x" is no timestamp'),
        ("? [a]\n: 1\n", "line 1: a key must be a text"),
        ("title: a\ntitle: b\n", 'line 2: "title" is there twice'),
        ("title: " + "[" * 100_000, "nested too deep"),
        ("a: &a [*a]\n", "line 1: a value cannot be inside of itself"),
        (BOMB, "it has more than 500000 values"),
    ],
)
def test_a_mistake_is_told(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_document(str(path))


def test_what_is_right_is_read(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("title: one\ntasks:\n  main: &main {job_count: 2, command: [sleep, '1']}\n  other: *main\n")
    task = {"job_count": 2, "command": ["sleep", "1"]}
    assert read_document(str(path)) == {"title": "one", "tasks": {"main": task, "other": task}}
