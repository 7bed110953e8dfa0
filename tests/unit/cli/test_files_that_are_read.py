"""Commands that read a file or standard input: what cannot be read, nothing at all, and input without an end."""

import importlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpumond.cli import run

COMMANDS: dict[str, tuple[list[str], str, str]] = {
    "replay": (["--cpu-limit", "10"], "a trace", "# ж\ntime_s,usage_cores\n0,0\n1,1\n"),
    "simulate": (["--cpu-limit", "8", "--json"], "a trace", "# ж\n0,1\n9,2\n"),
    "fair-share": ([], "a JSON file", '{"id": "ж", "now": 1, "total_resources": {}}'),
    "fair-share simulate": (["--until", "1"], "a scenario", "# ж\ntotal_resources = { cpu = 1 }\npools = []\n"),
}
"""Words -> its other words, the kind of file whose path it wants, and one."""
EACH = pytest.mark.parametrize("command", COMMANDS)


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """What Python imports when it first needs it may lie where only root reads."""
    for name in ("agent.trace", "agent.simulate", "fairshare.command", "fairshare.simulate"):
        importlib.import_module(f"cpumond.cli.{name}")


def run_on(command: str, path: str) -> int:
    return run([*command.split(), path, *COMMANDS[command][0]])


@EACH
@pytest.mark.parametrize(("name", "why"), [("missing", "No such file or directory"), ("", "Is a directory")])
def test_a_file_that_cannot_be_read_is_69(
    command: str, name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / name) if name else str(tmp_path)
    assert run_on(command, path) == 69
    kind = COMMANDS[command][1]
    assert capsys.readouterr() == ("", f"cpumond: {path}: cannot be read: {why}; give the path of {kind}\n")


@EACH
def test_missing_rights_are_77(
    command: str, no_rights: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.touch(mode=0)
    with no_rights():
        assert run_on(command, str(path)) == 77
    sentence = f"{path}: cannot be read: Permission denied; run as root or fix its rights"
    assert capsys.readouterr() == ("", f"cpumond: {sentence}\n")


@EACH
def test_a_dash_is_standard_input_be_it_a_file_or_not(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As UTF-8, whatever the locale says."""
    text, file = COMMANDS[command][2], tmp_path / "file"
    file.write_text(text, encoding="utf-8")
    assert run_on(command, str(file)) == 0
    told = capsys.readouterr()
    for standard_input in (io.TextIOWrapper(io.BytesIO(text.encode()), encoding="ascii"), io.StringIO(text)):
        monkeypatch.setattr("sys.stdin", standard_input)
        assert run_on(command, "-") == 0
        assert capsys.readouterr() == told


@EACH
def test_a_closed_standard_input_is_empty(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert run_on(command, "-") == 78
    assert capsys.readouterr().err.startswith("cpumond: standard input: is empty; ")
