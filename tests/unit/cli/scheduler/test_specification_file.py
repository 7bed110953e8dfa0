"""Specifications in YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpumond.cli.scheduler.spec import read_document
from cpumond.core.errors import ConfigError


def test_a_mistake_is_told(tmp_path: Path) -> None:
    """As that of a tree in YAML, which tests/unit/cli/test_tree_text.py has all of."""
    path = tmp_path / "spec.yaml"
    path.write_text("title: a\ntitle: b\n")
    with pytest.raises(ConfigError, match='line 2: "title" is there twice'):
        read_document(str(path))


def test_what_is_right_is_read(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("title: one\ntasks:\n  main: &main {job_count: 2, command: [sleep, '1']}\n  other: *main\n")
    task = {"job_count": 2, "command": ["sleep", "1"]}
    assert read_document(str(path)) == {"title": "one", "tasks": {"main": task, "other": task}}
