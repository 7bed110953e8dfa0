"""Shared by ``cpumond demo`` and ``cluster``: their cgroup, their signals, and the leftovers of killed runs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import NamedTuple

from cpumond.cli.ending import Ending, ended_by, list_ending_signals
from cpumond.cluster import RUN_PREFIX, SHORT_DIR, remove_cgroups
from cpumond.core.errors import UnavailableError
from cpumond.core.job_cgroups import IDLE_NAME
from cpumond.host.cgroup import mounts

SCOPE_GUARD = "CPUMOND_DEMO_IN_SCOPE"


class CgroupPlace(NamedTuple):
    """A cgroup of this process. ``prefix``: its path in each hierarchy. ``layout``: as in ``Hierarchies.layout``."""

    prefix: str
    layout: str


def stop_on_signals() -> contextlib.AbstractContextManager[Ending]:
    """Return an Ending that SIGINT, SIGTERM and, unless it is ignored, SIGHUP set."""
    return ended_by([signal.SIGINT, *list_ending_signals()])


def make_place(name: str) -> CgroupPlace:
    """Create the cgroup ``name``PID. On v2 this may restart the command in a systemd scope.

    Leftovers of dead processes under that name are removed. Raises UnavailableError if no cgroup can be created."""
    from cgroupspy.nodes import Node

    for prefix in (name, RUN_PREFIX):
        remove_directories(prefix)
    hierarchies = mounts.open_hierarchies()
    scope = _enter_scope(hierarchies) if hierarchies.cpu_version == 2 else ""
    parents = _list_scopes(hierarchies.cpu_root, os.path.dirname(scope)) if scope else [""]
    for parent in parents:
        remove_leftovers(name, parent)
    place = CgroupPlace(os.path.join(scope, f"{name}{os.getpid()}"), hierarchies.layout)
    roots = sorted({hierarchies.cpu_root, hierarchies.cpuacct_root})
    try:
        for root in roots:
            Node(os.path.join(root, scope)).create_cgroup(os.path.basename(place.prefix))
    except OSError as error:
        remove_cgroups(place.prefix)
        raise UnavailableError(f"no permission to create cgroups in {' and '.join(roots)}; run it as root") from error
    return place


def _enter_scope(hierarchies: mounts.Hierarchies) -> str:
    """Return the delegated scope: this process is in a leaf of it, and its other children can have the cpu controller.

    Outside of a scope the command restarts in a transient one, if granted. Raises UnavailableError."""
    from cgroupspy.nodes import Node

    if os.environ.get(SCOPE_GUARD):
        with open("/proc/self/cgroup", encoding="ascii") as file:
            paths = [line.rstrip("\n").split(":", 2)[2].strip("/") for line in file if line.startswith("0::")]
        # OSError: the scope is not delegated, or has no cpu controller.
        with contextlib.suppress(OSError):
            for path in paths:
                directory = os.path.join(hierarchies.cpu_root, path)
                Node(directory).create_cgroup("demo")
                for file_name, text in (("demo/cgroup.procs", "0"), ("cgroup.subtree_control", "+cpu")):
                    with open(os.path.join(directory, file_name), "w", encoding="ascii") as file:
                        file.write(text)
                return path
    elif shutil.which("systemd-run"):
        manager = [] if os.geteuid() == 0 else ["--user"]
        scope = ["systemd-run", *manager, "--scope", "--quiet", "-p", "Delegate=yes", "-p", "CPUWeight=100"]
        probe = subprocess.run([*scope, "true"], capture_output=True, timeout=20, check=False)  # noqa: S603
        if probe.returncode == 0:
            command = [*scope, sys.executable, *sys.orig_argv[1:]]
            os.execvpe(command[0], command, {**os.environ, SCOPE_GUARD: "1"})  # noqa: S606 - our own command line
    raise UnavailableError("no delegated cgroup with the cpu controller; run it as root under systemd")


def _list_scopes(cpu_root: str, parent: str) -> list[str]:
    """The scopes in the slice ``parent``, including those of killed demos."""
    from cpumond.agent.discovery.glob import list_directories

    names = list_directories(os.path.join(cpu_root, parent))
    return sorted(f"{parent}/{name}" for name in names if name.endswith(".scope"))


def is_left(entry: str, name: str) -> bool:
    """Whether ``entry`` is ``name`` plus the id of a dead process, with or without "-" and a suffix."""
    found = re.fullmatch(re.escape(name) + r"([1-9][0-9]*)(?:-\w+)?", entry)
    # This process's own id counts as dead, too, because it has created nothing yet.
    return found is not None and (int(found[1]) == os.getpid() or not os.path.exists(f"/proc/{found[1]}"))


def is_left_idle(entry: str, name: str) -> bool:
    """Whether ``entry`` is the idle class (``name_idle_parent``) of a node of a dead process, below ``name``PID."""
    found = re.fullmatch(rf"{IDLE_NAME}-(?:.+-)?({re.escape(name)}[0-9]+)-.+", entry)
    return found is not None and is_left(found[1], name)


def remove_leftovers(name: str, parent: str, mountinfo: str = "/proc/self/mountinfo") -> None:
    """Kill and remove the cgroups ``parent``/``name``PID of dead processes, and the idle classes of nodes there, in all
    hierarchies."""
    with contextlib.suppress(OSError):
        for mount in mounts.read_mounts(mountinfo):
            above = os.path.join(mount.mount_point, parent)
            left = [
                os.path.join(parent, entry)
                for entry in (os.listdir(above) if os.path.isdir(above) else ())
                if is_left(entry, name) and "-" not in entry.removeprefix(name)
            ]
            left += [entry for entry in os.listdir(mount.mount_point) if is_left_idle(entry, name)]
            for path in left:
                if os.access(os.path.join(mount.mount_point, path), os.W_OK):
                    # The cgroup stays if it is in use again, or belongs to a different user.
                    remove_cgroups(path, mountinfo, timeout_s=2.0)


def make_directory(name: str) -> str:
    """Create a directory for the files of this process; if this process cannot remove it, the next one does."""
    return tempfile.mkdtemp(prefix=f"{name}{os.getpid()}-")


def remove_directories(name: str) -> None:
    """Remove this user's directories that ``make_directory`` made for processes that are dead."""
    for top in {tempfile.gettempdir(), SHORT_DIR}:
        for entry in os.listdir(top) if os.path.isdir(top) else ():
            path = os.path.join(top, entry)
            if is_left(entry, name) and os.path.isdir(path) and os.lstat(path).st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)
