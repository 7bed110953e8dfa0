"""Real cgroups with real load in them, for tests of the parts that read and write the kernel's files."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading

from cgroupspy.nodes import Node

from cpumond.host.cgroup.files import is_leaf
from cpumond.host.cgroup.mounts import Hierarchies

V1_FILES = {"shares": "cpu.shares", **{name: f"cpu.cfs_{name}" for name in ("quota_us", "period_us", "burst_us")}}
V2_FILES = {"quota_us": "cpu.max", "period_us": "cpu.max", "burst_us": "cpu.max.burst", "shares": "cpu.weight"}


class CgroupTree:
    """Real cgroups below one cgroup ``top``, in every hierarchy the agent reads; ``close`` removes them all. Files are
    named as in the kernel or, in every layout, by their setting: ``quota_us`` (-1 for none), ``period_us``,
    ``burst_us`` and ``shares``: 1024 by default, on v2 written as the nearest ``cpu.weight`` and read back from it."""

    def __init__(self, hierarchies: Hierarchies, top: str) -> None:
        self.hierarchies = hierarchies
        self.top = top
        self.roots = sorted({hierarchies.cpu_root, hierarchies.cpuacct_root})
        self._processes: list[LoadProcess] = []
        self._keepers: dict[str, subprocess.Popen[bytes]] = {}
        # The sleeping processes of this tree end with this process.
        self._pipe = list(os.pipe())
        for root in self.roots:
            place = Node(root)
            for part in top.split("/"):
                place = place.create_cgroup(part)
        self._enable(self.path(""))

    def _enable(self, directory: str) -> None:
        """Enable cpu for the children of a v2 cgroup; without this they lack the files of cpu."""
        if self.hierarchies.cpu_version == 2:
            with open(os.path.join(directory, "cgroup.subtree_control"), "w", encoding="ascii") as file:
                file.write("+cpu")

    def make(self, name: str, *, is_empty: bool = False) -> str:
        """Create ``top``/``name``, with a sleeping process in it unless ``is_empty``; its path in the hierarchy."""
        above = name
        while "/" in above:
            # On v2 only leaves may contain processes.
            above = above.rpartition("/")[0]
            self.empty(above)
        for root in self.roots:
            place = os.path.join(root, self.top)
            for part in name.split("/"):
                if root == self.hierarchies.cpu_root:
                    self._enable(place)
                place = os.path.join(place, part)
                os.makedirs(place, exist_ok=True)
        if not is_empty and name not in self._keepers and all(map(is_leaf, self._places(name))):
            self._keepers[name] = keeper = subprocess.Popen(["/bin/cat"], stdin=self._pipe[0])
            for place in self._places(name):
                with open(os.path.join(place, "cgroup.procs"), "w", encoding="ascii") as file:
                    file.write(str(keeper.pid))
        return f"{self.top}/{name}"

    def _places(self, name: str) -> list[str]:
        return [os.path.join(root, self.top, name) for root in self.roots]

    def empty(self, name: str) -> None:
        """End the process that ``make`` put into ``top``/``name``."""
        if keeper := self._keepers.pop(name, None):
            keeper.kill()
            keeper.wait()

    def remove(self, name: str) -> None:
        """Remove the cgroup ``top``/``name``, which may contain only the process of ``make``."""
        self.empty(name)
        for place in self._places(name):
            _remove_when_empty(place)

    def path(self, name: str, file: str = "") -> str:
        return os.path.join(self.hierarchies.cpu_root, self.top, name, file)

    def write(self, name: str, file: str, value: object) -> None:
        """Write a file of a cgroup, like a program other than the agent."""
        if self.hierarchies.cpu_version == 2:
            if file == "quota_us":
                value = "max" if str(value) == "-1" else value
            elif file == "period_us":
                value = f"{self.read(name, 'cpu.max').split()[0]} {value}"
            elif file == "shares":
                value = min(max(round(int(str(value)) * 100 / 1024), 1), 10_000)
        with open(self.path(name, self.file(file)), "w", encoding="ascii") as target:
            target.write(str(value))

    def read(self, name: str, file: str) -> str:
        with open(self.path(name, self.file(file)), encoding="ascii") as source:
            text = source.read().strip()
        if self.hierarchies.cpu_version == 2:
            if file == "quota_us":
                return "-1" if text.startswith("max") else text.split()[0]
            if file == "period_us":
                return text.split()[1]
            if file == "shares":
                return str(round(int(text) * 1024 / 100))
        return text

    def file(self, setting: str) -> str:
        """Return the kernel's file name for ``setting`` in this layout; other names are returned unchanged."""
        return (V2_FILES if self.hierarchies.cpu_version == 2 else V1_FILES).get(setting, setting)

    def read_all(self, name: str) -> dict[str, str]:
        """Return the text of each CPU settings file of a cgroup, for a comparison byte by byte."""
        settings = {}
        for file in sorted(os.listdir(self.path(name))):
            if file.startswith("cpu.") and not file.startswith(("cpu.stat", "cpu.pressure")):
                with contextlib.suppress(OSError), open(self.path(name, file), encoding="ascii") as source:
                    settings[file] = source.read()
        return settings

    def quota_cores(self, name: str) -> float:
        """Return the quota of a cgroup in cores; infinity if there is none."""
        quota_us, period_us = int(self.read(name, "quota_us")), int(self.read(name, "period_us"))
        return float("inf") if quota_us < 0 else quota_us / period_us

    def throttled_s(self, name: str) -> float:
        stat = dict(line.split() for line in self.read(name, "cpu.stat").splitlines())
        return int(stat["throttled_usec"]) / 1e6 if "throttled_usec" in stat else int(stat["throttled_time"]) / 1e9

    def start_load(self, name: str, threads: int = 1) -> LoadProcess:
        """Start a process in the cgroup ``top``/``name``; it sleeps until ``burn`` is called."""
        load = LoadProcess([os.path.join(root, self.top, name, "cgroup.procs") for root in self.roots], threads)
        self._processes.append(load)
        return load

    def close(self) -> None:
        for process in self._processes:
            process.stop()
        for name in list(self._keepers):
            self.empty(name)
        while self._pipe:
            os.close(self._pipe.pop())
        for root in self.roots:
            for directory, _, _ in os.walk(os.path.join(root, self.top), topdown=False):
                _remove_when_empty(directory)

    def __enter__(self) -> CgroupTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove_when_empty(directory: str) -> None:
    """Call rmdir until the last process has exited, for at most 2 s."""
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
import sys, time
paths, threads = sys.argv[2:], int(sys.argv[1])
for path in paths:
    with open(path, "w") as file:
        file.write("0")
import os, select
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
    """A real process in a cgroup, with ``threads`` - 1 children; each uses an equal part of what ``burn`` asks for."""

    def __init__(self, procs_files: list[str], threads: int = 1) -> None:
        self.threads = threads
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", LOAD_PROGRAM, str(threads), *procs_files],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        ready = select.poll()  # select() accepts no descriptors from 1024 on
        ready.register(self._process.stdout, select.POLLIN)
        if not ready.poll(30_000) or not self._process.stdout.readline():
            self.stop()
            raise RuntimeError("the load process did not start")

    def burn(self, cores: float) -> None:
        """Use ``cores`` in total from now on (0: sleep)."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{cores / self.threads}\n".encode())
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
