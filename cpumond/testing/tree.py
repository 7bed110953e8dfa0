"""Cgroup trees of plain files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

Tree = Mapping[str, Any]


def make_tree(root: str | os.PathLike[str], tree: Tree) -> str:
    """Create directories (mappings) and files (any other value: the content) from a literal; return the path."""
    path = os.fspath(root)
    os.makedirs(path, exist_ok=True)
    for name, content in tree.items():
        place = os.path.join(path, name)
        if isinstance(content, Mapping):
            make_tree(place, content)
        else:
            with open(place, "w", encoding="ascii") as file:
                file.write(str(content))
    return path


def v2_cgroup(usage_usec: int = 0, quota: str = "max 100000", **files: object) -> dict[str, object]:
    """Return the files of one v2 cgroup for ``make_tree``; keywords add files, with underscores for dots."""
    stat = f"usage_usec {usage_usec}\nuser_usec 0\nsystem_usec 0\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n"
    return {
        "cpu.stat": stat,
        "cpu.max": f"{quota}\n",
        "cpu.max.burst": "0\n",
        "cpu.weight": "100\n",
        **{name.replace("_", "."): content for name, content in files.items()},
    }


def write_mountinfo(path: str | os.PathLike[str], mounts: Mapping[str, str]) -> str:
    """Write a mountinfo file (mount point -> "cgroup2" or comma-separated v1 controllers); return its path."""
    lines = []
    for number, (point, kind) in enumerate(mounts.items(), 30):
        fs_type, options = ("cgroup2", "rw") if kind == "cgroup2" else ("cgroup", f"rw,{kind}")
        # Device 0:0 belongs to no file system; for a real mount, the kernel never shows it here.
        lines.append(f"{number} 1 0:0 / {point} rw,relatime - {fs_type} {fs_type} {options}\n")
    with open(path, "w", encoding="ascii") as file:
        file.write("".join(lines))
    return os.fspath(path)


FAKE_CPUS = 128
"""Number of CPUs of a fake host."""


def make_v2_host(root: str | os.PathLike[str], tree: Tree) -> str:
    """Create a fake v2 hierarchy ``root``/cgroup with FAKE_CPUS and ``tree`` in it; return its mountinfo's path."""
    place = os.path.join(os.fspath(root), "cgroup")
    files = {"cgroup.controllers": "cpuset cpu io memory\n", "cpuset.cpus.effective": f"0-{FAKE_CPUS - 1}\n"}
    make_tree(place, {**files, **tree})
    return write_mountinfo(os.path.join(os.fspath(root), "mountinfo"), {place: "cgroup2"})
