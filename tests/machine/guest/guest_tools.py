"""What scripts in the guest share: commands, waiting for events, and facts left step by step. Standard library only."""

import fcntl
import json
import os
import socket
import struct
import subprocess
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0
"""Longer than anything takes on a host that is busy with other work."""
WRAPPER = '#!/bin/sh\nPYTHONPATH=/in/site exec python3 -m cpumond "$@"\n'
"""What stands for the installed program."""

LIGHT_LOAD = """
import time
while True:
    busy_until = time.thread_time() + 0.002
    while time.thread_time() < busy_until:
        pass
    time.sleep(0.05)
"""

SIOCSIFADDR = 0x8916

Step = Callable[[], dict[str, Any]]


def run(*command: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=env, check=False)
    return {"code": done.returncode, "output": done.stdout + done.stderr}


def systemctl(*arguments: str) -> dict[str, Any]:
    return run("systemctl", *arguments)


def show(unit: str, name: str) -> str:
    return str(systemctl("show", "--property", name, "--value", unit)["output"]).strip()


def is_up_again(unit: str, old_pid: str) -> bool:
    """Whether a unit is active with another process than ``old_pid``."""
    return show(unit, "ActiveState") == "active" and show(unit, "MainPID") not in (old_pid, "0")


def ask(method: str, url: str, body: Any = None, token: str = "", timeout_s: float = 60.0) -> tuple[int, bytes]:
    """Status and content of a server's answer, a refusal as well. Raises OSError when there is none."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"OAuth {token}"} if token else {})}
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, headers, method=method)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
            return answer.status, bytes(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def wait(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> float | None:
    """Seconds until the condition held, asked every 10 ms; None when it did not in time."""
    begin_s = time.monotonic()
    while not condition():
        if time.monotonic() - begin_s > deadline_s:
            return None
        time.sleep(0.01)
    return time.monotonic() - begin_s


def write_file(path: str | Path, text: str, mode: int = 0o644) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def install_files(files: dict[str, str]) -> None:
    """Files of /in to their places, as a package would do it."""
    for source, target in files.items():
        write_file(target, Path("/in", source).read_text())


def read_journal(*options: str) -> str:
    """What ``journalctl`` shows. What a service has said before is in it: journald may be behind, so it catches up."""
    run("journalctl", "--sync")
    return str(run("journalctl", "--no-pager", *options)["output"])


def journal_cursor(unit: str) -> str:
    """Of the unit: systemd before 255 leaves out the first entry after a cursor that the filter does not match."""
    return read_journal("-u", unit, "--show-cursor", "-n1", "-q").rpartition("cursor: ")[2].strip()


def journal_after(cursor: str, unit: str) -> str:
    """What the journal has of a unit since then ("": since the boot), its messages alone."""
    since = ("--after-cursor", cursor) if cursor else ()
    return read_journal("-u", unit, "-o", "cat", *since)


def read_rights(pid: str) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {name: words.split() for name, _, words in (line.partition(":\t") for line in lines)}
    names = ("Uid", "Gid", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
    return {name: status[name] for name in names}


def read_mounts(pid: str) -> dict[str, bool]:
    """Mount points as a process sees them: which are read-only."""
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    return {mount[4]: "ro" in mount[5].split(",") for mount in mounts}


def add_address(address: str) -> None:
    """Give this machine one more IPv4 address, on its loopback device, as ``ip address add`` does it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anything:
        place = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))
        fcntl.ioctl(anything, SIOCSIFADDR, struct.pack("16s16s", b"lo:1", place))


def live_through(steps: Sequence[Step], stop_after: Callable[[Step], bool] = lambda _: False) -> None:
    """Facts of each step, a failed one's traceback, and the journal are in /out. MACHINE_STEPS names those to do."""
    facts: dict[str, Any] = {}
    wanted = os.environ.get("MACHINE_STEPS", "")
    for step in steps:
        if wanted and step.__name__ not in wanted.split(","):
            continue
        begin_s = time.monotonic()
        try:
            fact = step()
        except Exception:
            fact = {"error": traceback.format_exc()}
        facts[step.__name__] = {**fact, "took_step_s": time.monotonic() - begin_s}
        Path("/out/facts.json").write_text(json.dumps(facts, indent=1))
        if stop_after(step):
            break  # nothing further can happen; the journal says why
    Path("/out/journal.txt").write_text(read_journal("-o", "short-precise"))
