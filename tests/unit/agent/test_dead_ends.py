"""What ``check-config`` warns of: files that nobody reads, limits that never move."""

from pathlib import Path

import pytest

from cpumond.agent.config import load_config
from cpumond.agent.dead_ends import find_dead_ends


def find(folder: Path, text: str) -> list[str]:
    path = folder / "cpumond.toml"
    path.write_text(text)
    return [each.replace(f"{folder}/", "") for each in find_dead_ends(load_config(str(path)))]


def unit(name: str, more: str = "") -> str:
    return f"[[source]]\nkind = 'systemd'\nslices = ['{name}']\n{more}\n"


def glob(pattern: str, more: str = "") -> str:
    return f"[[source]]\nkind = 'glob'\npattern = '{pattern}'\n{more}\n"


OUTSIDE = "is outside managed_roots ['a.slice']: the limits of its jobs never move; add"


@pytest.mark.parametrize(("source", "told"), [
    (unit("b.slice"), f"cpumond.toml: source 1.slices: 'b.slice' {OUTSIDE} 'b.slice' there"),
    (unit("b-c.slice"), f"cpumond.toml: source 1.slices: 'b-c.slice' {OUTSIDE} 'b.slice/b-c.slice' there"),
    (glob("b/x*/y"), f"cpumond.toml: source 1.pattern: 'b/x*/y' {OUTSIDE} 'b' there"),
    (unit("a.slice"), ""),
    (unit("a-c.slice"), ""),
    (unit("-.slice"), ""),  # above it: some of its jobs are inside
    (glob("*/x"), ""),
    ("[[source]]\nkind = 'docker'\n", ""),
    (glob("b/x", "job-cpu-monitor.actuator = 'guarantee'"), ""),
    (glob("a.slice/x*", "id_regex = 'job_(?P<jid>.*)'"), "cpumond.toml: source 1.id_regex: no group is named id"),
    (glob("a.slice/x*", "id_regex = 'job_(?P<id>.*)'"), ""),
    (glob("a.slice/x*", "id_regex = 'job_(.*)'"), ""),
])  # fmt: skip
def test_a_source_of_which_nothing_comes_is_warned_of(tmp_path: Path, source: str, told: str) -> None:
    found = find(tmp_path, f"managed_roots = ['a.slice']\n{source}")
    assert [each[: len(told)] for each in found] == ([told] if told else [])
    assert not told or find(tmp_path, source.partition("id_regex")[0]) == [], "without managed_roots nothing is outside"


def test_files_of_conf_d_that_do_not_count_are_named(tmp_path: Path) -> None:
    """But for copies, notes and what is hidden."""
    folder = tmp_path / "conf.d"
    folder.mkdir()
    for name in ("x.conf", "y", "z.toml", "z.toml~", "z.toml.dpkg-old", ".z.toml.swp", "README", "w.toml.disabled"):
        (folder / name).touch()
    (folder / "folder").mkdir()
    told = "is not read: its name must end with .toml"
    assert find(tmp_path, "") == [f"conf.d/x.conf: {told}", f"conf.d/y: {told}"]
