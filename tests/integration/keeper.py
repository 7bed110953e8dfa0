"""A process that starts others, inherits what they leave behind, and at the end of its input ends them all.

``python keeper.py [--private] DIRECTORY CGROUP...``. It reads a command per line (a JSON list of words; the first is
the log, to which stdout and stderr go) and answers each with a line: the process's id. At the end of the input, so also
when who started it was killed, it ends every process below it, removes the cgroups with all below them from each
hierarchy, and DIRECTORY with what is mounted in it. Its last line is "" or what is left.
``--private``: it is in a mount namespace of its own, where /run and /etc/docker become empty. Standard library only.
"""

import contextlib
import ctypes
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

PR_SET_CHILD_SUBREAPER = 36
PATIENCE_S = 20.0
EMPTY = ("/run", "/etc/docker")
"""What engines write into, wherever they are told to have their files."""


def reap(number: int = 0, frame: object = None) -> None:
    """Ask for the exit code of all that ended: PID 1 of a container may let them wait, and then they seem to live."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def children(pid: int) -> list[int]:
    """Processes whose parent a process is, in any of its threads."""
    found = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with open(path, encoding="ascii") as file:
            found += [int(word) for word in file.read().split()]
    return found


def kill_all() -> bool:
    pause, deadline_s = threading.Event(), time.monotonic() + PATIENCE_S
    while found := children(os.getpid()):
        for pid in found:  # theirs come to this process when they are gone
            os.kill(pid, signal.SIGKILL)
        pause.wait(0.01)
        reap()
        if time.monotonic() > deadline_s:
            return False
    return True


def remove_cgroups(name: str) -> list[str]:
    """Remove a cgroup and those below it; what could not be removed."""
    left = []
    for top in glob.glob(f"/sys/fs/cgroup/*/{name}") + glob.glob(f"/sys/fs/cgroup/{name}"):
        for place, _, _ in os.walk(top, topdown=False):
            try:
                os.rmdir(place)
            except FileNotFoundError:
                pass
            except OSError as error:
                left.append(f"{place}: {error}")
    return left


def remove_directory(directory: str) -> list[str]:
    """Remove a directory after what engines have mounted in it; what could not be removed."""
    with open("/proc/self/mounts", encoding="utf-8") as file:
        places = [line.split()[1] for line in file]
    for place in reversed(places):
        if place.startswith(f"{directory}/"):
            subprocess.run(["umount", "--lazy", place], check=False)
    shutil.rmtree(directory, ignore_errors=True)
    return [directory] if os.path.exists(directory) else []


def start(log: str, command: list[str]) -> int:
    with open(log, "ab") as output:
        # Only `reap` asks for its exit code.
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output).pid


def main() -> None:
    *options, directory = sys.argv[1:3] if sys.argv[1] == "--private" else sys.argv[1:2]
    cgroups = sys.argv[2 + len(options) :]
    if options:
        for place in EMPTY:
            os.makedirs(place, exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, reap)
    print("ready", flush=True)
    for line in sys.stdin:
        log, *command = json.loads(line)
        print(start(log, command), flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    left = [] if kill_all() else [f"processes {children(os.getpid())}"]
    for name in cgroups:
        left += remove_cgroups(name)
    left += remove_directory(directory)
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more
        print("; ".join(left), flush=True)
        sys.stdout.close()


if __name__ == "__main__":
    main()
