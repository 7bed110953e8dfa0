"""Parts for tests and for trying things out: fake trees and clocks, real cgroups, real load.

Used by this project's tests, by ``cpumond demo``, and by authors of new parts. Nothing here runs in the agent.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cgroupspy.nodes import Node

from cpumond.cgroup.mounts import Hierarchies
from cpumond.units import DEFAULT_PERIOD_US

Tree = Mapping[str, Any]


def make_tree(root: str | os.PathLike[str], tree: Tree) -> str:
    """Directories and files as a literal: a mapping is a directory, a text a file's content; the root's path."""
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
    """The files of one v2 cgroup for ``make_tree``; further files by keyword, dots written as underscores."""
    stat = f"usage_usec {usage_usec}\nuser_usec 0\nsystem_usec 0\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n"
    return {
        "cpu.stat": stat,
        "cpu.max": f"{quota}\n",
        "cpu.max.burst": "0\n",
        "cpu.weight": "100\n",
        **{name.replace("_", "."): content for name, content in files.items()},
    }


def write_mountinfo(path: str | os.PathLike[str], mounts: Mapping[str, str]) -> str:
    """A mountinfo text: mount point -> "cgroup2", or the comma-separated v1 controllers; the file's path."""
    lines = []
    for number, (point, kind) in enumerate(mounts.items(), 30):
        fs_type, options = ("cgroup2", "rw") if kind == "cgroup2" else ("cgroup", f"rw,{kind}")
        lines.append(f"{number} 1 0:{number} / {point} rw,relatime - {fs_type} {fs_type} {options}\n")
    with open(path, "w", encoding="ascii") as file:
        file.write("".join(lines))
    return os.fspath(path)


def make_v2_host(root: str | os.PathLike[str], tree: Tree) -> str:
    """A fake unified hierarchy under ``root``/cgroup with ``tree`` in it; the path of its mountinfo."""
    place = os.path.join(os.fspath(root), "cgroup")
    make_tree(place, {"cgroup.controllers": "cpuset cpu io memory\n", **tree})
    return write_mountinfo(os.path.join(os.fspath(root), "mountinfo"), {place: "cgroup2"})


class FakeClock:
    """A clock that moves when told to: ``advance`` all, ``suspend`` only boot time and wall time."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._monotonic_s = start_s
        self._asleep_s = 0.0

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def boottime_s(self) -> float:
        return self._monotonic_s + self._asleep_s

    def wall_s(self) -> float:
        return 1.7e9 + self.boottime_s()

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._monotonic_s += seconds

    def suspend(self, seconds: float) -> None:
        """Let the machine sleep."""
        self._asleep_s += seconds


class SimulatedKernel:
    """A fake unified hierarchy whose counters run: each cgroup uses its demand, held to its ``cpu.max``.

    ``demands`` maps a cgroup name to a function of seconds since the start -> cores wanted. For hosts where no real
    cgroup can be had; what it shows is said to be simulated.
    """

    def __init__(self, root: str, demands: Mapping[str, Callable[[float], float]], step_s: float = 0.1) -> None:
        self.root = root
        self.mountinfo = make_v2_host(root, {name: v2_cgroup() for name in demands})
        self._demands = demands
        self._step_s = step_s
        self._totals = {name: [0.0, 0, 0, 0.0] for name in demands}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="simulated-kernel", daemon=True)

    def start(self) -> None:
        """Let the counters run."""
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        begin_s = last_s = time.monotonic()
        while not self._stop.wait(self._step_s):
            now_s = time.monotonic()
            for name, demand in self._demands.items():
                self.advance(name, demand(now_s - begin_s), now_s - last_s)
            last_s = now_s

    def advance(self, name: str, demand_cores: float, seconds: float) -> None:
        """One step of one cgroup."""
        directory = os.path.join(self.root, "cgroup", name)
        with open(os.path.join(directory, "cpu.max"), encoding="ascii") as file:
            quota, _, period = file.read().partition(" ")
        limit = float("inf") if quota in ("max", "") else int(quota) / (int(period or DEFAULT_PERIOD_US))
        total = self._totals[name]
        periods = max(round(seconds * 10), 1)
        total[0] += min(demand_cores, limit) * seconds
        total[1] += periods
        total[2] += periods if demand_cores > limit else 0
        total[3] += max(demand_cores - limit, 0.0) * seconds
        text = (
            f"usage_usec {int(total[0] * 1e6)}\nuser_usec 0\nsystem_usec 0\nnr_periods {total[1]}\n"
            f"nr_throttled {total[2]}\nthrottled_usec {int(total[3] * 1e6)}\n"
        )
        temporary = os.path.join(directory, "cpu.stat")
        with open(temporary, "r+", encoding="ascii") as file:
            # Overwritten in place: readers hold a descriptor, and the text never becomes shorter.
            file.write(text)


class CgroupTree:
    """Real cgroups below one top cgroup of our own, in every hierarchy the agent reads; ``close`` removes them all."""

    def __init__(self, hierarchies: Hierarchies, top: str) -> None:
        self.hierarchies = hierarchies
        self.top = top
        self.roots = sorted({hierarchies.cpu_root, hierarchies.cpuacct_root})
        self._processes: list[LoadProcess] = []
        for root in self.roots:
            place = Node(root)
            for part in top.split("/"):
                place = place.create_cgroup(part)
        if hierarchies.cpu_version == 2:
            self.write("", "cgroup.subtree_control", "+cpu")

    def make(self, name: str) -> str:
        """Make the cgroup ``top``/``name``; its path relative to the hierarchy."""
        for root in self.roots:
            os.makedirs(os.path.join(root, self.top, name), exist_ok=True)
        return f"{self.top}/{name}"

    def remove(self, name: str) -> None:
        """Remove an empty cgroup ``top``/``name``."""
        for root in self.roots:
            os.rmdir(os.path.join(root, self.top, name))

    def path(self, name: str, file: str = "") -> str:
        """Absolute path of a file of ``top``/``name`` in the hierarchy of the cpu controller."""
        return os.path.join(self.hierarchies.cpu_root, self.top, name, file) if name else os.path.join(
            self.hierarchies.cpu_root, self.top, file
        )  # fmt: skip

    def write(self, name: str, file: str, value: object) -> None:
        """Write a file of a cgroup, as somebody other than the agent would."""
        with open(self.path(name, file), "w", encoding="ascii") as target:
            target.write(str(value))

    def read(self, name: str, file: str) -> str:
        """The text of a file of a cgroup."""
        with open(self.path(name, file), encoding="ascii") as source:
            return source.read().strip()

    def read_all(self, name: str) -> dict[str, str]:
        """All CPU settings of a cgroup, file -> text, for a comparison byte for byte."""
        settings = {}
        for file in sorted(os.listdir(self.path(name))):
            if file.startswith("cpu.") and not file.startswith(("cpu.stat", "cpu.pressure")):
                with contextlib.suppress(OSError), open(self.path(name, file), encoding="ascii") as source:
                    settings[file] = source.read()
        return settings

    def quota_cores(self, name: str) -> float:
        """The quota of a cgroup in cores; infinity when there is none."""
        if self.hierarchies.cpu_version == 2:
            quota, period = self.read(name, "cpu.max").split()
        else:
            quota, period = self.read(name, "cpu.cfs_quota_us"), self.read(name, "cpu.cfs_period_us")
        return float("inf") if quota in ("max", "-1") else int(quota) / int(period)

    def start_load(self, name: str, threads: int = 1) -> LoadProcess:
        """A process in the cgroup ``top``/``name`` that burns what it is told to."""
        load = LoadProcess([os.path.join(root, self.top, name, "cgroup.procs") for root in self.roots], threads)
        self._processes.append(load)
        return load

    def close(self) -> None:
        """End the load and remove every cgroup below the top, and the top."""
        for process in self._processes:
            process.stop()
        for root in self.roots:
            for directory, _, _ in os.walk(os.path.join(root, self.top), topdown=False):
                _remove_when_empty(directory)

    def __enter__(self) -> CgroupTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove_when_empty(directory: str) -> None:
    """rmdir, again while the kernel is still taking the last process out."""
    for _ in range(200):
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            return
        except OSError:
            threading.Event().wait(0.01)
        else:
            return


LOAD_PROGRAM = """
import sys, threading, time
paths, threads = sys.argv[2:], int(sys.argv[1])
for path in paths:
    with open(path, "w") as file:
        file.write("0")
import multiprocessing, os, select
children = []
for _ in range(threads - 1):
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(w)
        source = r
        children = []
        break
    os.close(r)
    children.append(w)
else:
    source = 0
    print("ready", flush=True)
duty, pending = 0.0, b""
while True:
    wait = 0.0 if duty >= 1.0 else (None if duty <= 0.0 else 0.05 * (1.0 - duty))
    if select.select([source], [], [], wait)[0]:
        data = os.read(source, 4096)
        if not data:
            break
        for child in children:
            os.write(child, data)
        duty = float(data.split()[-1])
    end = time.monotonic() + 0.05 * duty
    while duty > 0.0 and time.monotonic() < end:
        sum(range(2000))
"""


class LoadProcess:
    """A real process (with ``threads`` - 1 children) in a cgroup that burns a share of a CPU each."""

    def __init__(self, procs_files: list[str], threads: int = 1) -> None:
        self.threads = threads
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", LOAD_PROGRAM, str(threads), *procs_files],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], 30.0)[0] or not self._process.stdout.readline():
            self.stop()
            raise RuntimeError("the load process did not start")

    def burn(self, cores: float) -> None:
        """Use ``cores`` in all from now on (0 = sleep)."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{cores / self.threads}\n".encode())
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def stop(self) -> None:
        """End it and its children."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


@contextlib.contextmanager
def real_cgroups(hierarchies: Hierarchies, top: str) -> Iterator[CgroupTree]:
    """A ``CgroupTree`` that is gone afterwards."""
    tree = CgroupTree(hierarchies, top)
    try:
        yield tree
    finally:
        tree.close()
