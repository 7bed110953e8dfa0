"""Runs inside the guest: installs the service, lives its life once, and leaves what it saw in /out/facts.json.

``test_service_life.py`` on the host judges the facts. Standard library only; every wait is for an event, by polling,
with a deadline. A step that fails leaves its traceback as its fact, and the later steps still run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

UNIT = "cpumond"
JOB = "jobs/one"
CPU = Path("/sys/fs/cgroup/cpu") / JOB
CPUACCT = Path("/sys/fs/cgroup/cpuacct") / JOB
SETTINGS = {
    "cpu.cfs_period_us": "100000",
    "cpu.cfs_quota_us": "100000",
    "cpu.cfs_burst_us": "40000",
    "cpu.shares": "700",
}
"""What the job's cgroup is set to at first: one core, with a burst and shares that are nobody's default."""
QUOTA_US = int(SETTINGS["cpu.cfs_quota_us"])

CONFIG = """
managed_roots = ["jobs"]

[monitor]
mode = "reclaim"
check_period = 200
min_cpu_limit = 0.1

[[source]]
kind = "glob"
pattern = "jobs/*"
id_regex = "jobs/(?P<id>.+)"
cpu_limit = 1.0
"""
STEEP = "[monitor]\ndecrease_coefficient = 0.5\n"
WRONG = "[monitor]\nno_such_option = 1\n"
DROP_IN = Path("/etc/cpumond/conf.d/50-test.toml")

WRAPPER = '#!/bin/sh\nPYTHONPATH=/in/site exec python3 -m cpumond "$@"\n'
WATCHDOG_S = 2
"""A shorter watchdog than the unit's, only to wait less."""
DEADLINE_S = 20.0

LIGHT_LOAD = """
import time
while True:
    busy_until = time.thread_time() + 0.002
    while time.thread_time() < busy_until:
        pass
    time.sleep(0.05)
"""

facts: dict[str, Any] = {}


def run(*command: str) -> dict[str, Any]:
    """The command's exit code and output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    return {"code": done.returncode, "output": done.stdout + done.stderr}


def systemctl(*arguments: str) -> dict[str, Any]:
    return run("systemctl", *arguments)


def show(name: str) -> str:
    """A property of the unit."""
    return str(systemctl("show", "--property", name, "--value", UNIT)["output"]).strip()


def wait(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> float | None:
    """Seconds until the condition held, asked every 10 ms; None when it did not in time."""
    begin_s = time.monotonic()
    while not condition():
        if time.monotonic() - begin_s > deadline_s:
            return None
        time.sleep(0.01)
    return time.monotonic() - begin_s


def quota_us() -> int:
    return int((CPU / "cpu.cfs_quota_us").read_text())


def read_settings() -> dict[str, str]:
    return {name: (CPU / name).read_text() for name in SETTINGS}


def is_lowered() -> bool:
    return quota_us() < QUOTA_US


def is_original() -> bool:
    return quota_us() == QUOTA_US


def is_up_again(old_pid: str) -> bool:
    return show("ActiveState") == "active" and show("MainPID") not in (old_pid, "0")


def agent_processes() -> list[str]:
    """Command lines of living processes of the service's user or program."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue  # it ended while we looked
        if b"cpumond" in words:
            found.append(b" ".join(words).decode())
    return found


def install() -> dict[str, Any]:
    """Files to their places, as a package would do it, and the job's cgroup with a light load in it."""
    for source, target in {
        "cpumond.service": "/usr/lib/systemd/system/cpumond.service",
        "cpumond-jobs.slice": "/usr/lib/systemd/system/cpumond-jobs.slice",
        "cpumond.sysusers.conf": "/usr/lib/sysusers.d/cpumond.conf",
        "cpumond.tmpfiles.conf": "/usr/lib/tmpfiles.d/cpumond.conf",
    }.items():
        shutil.copyfile(f"/in/systemd/{source}", target)
    for path, text, mode in (
        ("/usr/bin/cpumond", WRAPPER, 0o755),
        ("/usr/lib/systemd/system/cpumond.service.d/test.conf", f"[Service]\nWatchdogSec={WATCHDOG_S}s\n", 0o644),
    ):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(path).write_text(text)
        os.chmod(path, mode)
    result = {"sysusers": run("systemd-sysusers"), "tmpfiles": run("systemd-tmpfiles", "--create", "cpumond.conf")}
    Path("/etc/cpumond/cpumond.toml").write_text(CONFIG)
    load = subprocess.Popen([sys.executable, "-c", LIGHT_LOAD])
    for directory in (CPU, CPUACCT):
        directory.mkdir(parents=True)
        # systemd removes empty v1 cgroups that it does not know at its next daemon-reload: never leave it empty.
        (directory / "cgroup.procs").write_text(str(load.pid))
    for name, value in SETTINGS.items():
        (CPU / name).write_text(value)
    result["reload"] = systemctl("daemon-reload")
    result["verify"] = run("systemd-analyze", "verify", "--man=no", "cpumond.service", "cpumond-jobs.slice")
    result["settings"] = read_settings()
    return result


def start() -> dict[str, Any]:
    """``systemctl start`` comes back when the agent has said READY=1."""
    answer = systemctl("start", UNIT)
    names = ("ActiveState", "SubState", "Type", "StatusText", "WatchdogUSec", "User")
    return {"answer": answer, **{name: show(name) for name in names}}


def read_metrics() -> str:
    with urllib.request.urlopen("http://127.0.0.1:9756/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def lower() -> dict[str, Any]:
    """The limit follows the light load, and the agent answers on both of its sockets."""
    result = {"after_s": wait(is_lowered), "quota_us": quota_us(), "status": run("cpumond", "status")}
    return {**result, "metrics": read_metrics()}


def sandbox() -> dict[str, Any]:
    """What the agent's process may and what it sees."""
    pid = show("MainPID")
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {name: words for name, _, words in (line.partition(":\t") for line in lines)}
    names = ("Uid", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
    root = Path(f"/proc/{pid}/root")
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    return {
        **{name: status[name].split() for name in names},
        "run": sorted(os.listdir(root / "run")),
        "shadow": (root / "etc/shadow").read_text(),
        "read_only": sorted({m[4] for m in mounts if "ro" in m[5].split(",")}),
        "exposure": run("systemd-analyze", "security", "--no-pager", UNIT)["output"].strip().splitlines()[-1],
    }


def reload() -> dict[str, Any]:
    """New settings come into force in the same process; a wrong file changes nothing."""
    pid = show("MainPID")
    DROP_IN.write_text(STEEP)
    answer = systemctl("reload", UNIT)
    halved_s = wait(lambda: quota_us() <= 0.6 * QUOTA_US)
    DROP_IN.write_text(WRONG)
    cursor = run("journalctl", "--show-cursor", "-n1", "-q")["output"].rpartition("cursor: ")[2].strip()
    wrong = systemctl("reload", UNIT)
    said_s = wait(
        lambda: "no_such_option" in run("journalctl", "-u", UNIT, "-o", "json", "--after-cursor", cursor)["output"]
    )
    after = {"same_pid": show("MainPID") == pid, "ActiveState": show("ActiveState")}
    DROP_IN.unlink()
    last = systemctl("reload", UNIT)
    return {"answer": answer, "halved_s": halved_s, "wrong": wrong, "said_s": said_s, "last": last, **after}


def lose(end: Callable[[str], None]) -> dict[str, Any]:
    """End the agent in a way it cannot answer: the original limit comes back, then the agent, then it lowers again."""
    lowered_s = wait(is_lowered)
    pid = show("MainPID")
    end(pid)
    original_s = wait(is_original)
    settings = read_settings()
    up_s = wait(lambda: is_up_again(pid))
    return {
        "lowered_s": lowered_s,
        "original_s": original_s,
        "settings": settings,
        "up_s": up_s,
        "restarts": show("NRestarts"),
        "lowered_again_s": wait(is_lowered),
    }


def kill() -> dict[str, Any]:
    return lose(lambda _: print(systemctl("kill", "--signal", "KILL", UNIT), flush=True))


def hang() -> dict[str, Any]:
    result = lose(lambda pid: os.kill(int(pid), signal.SIGSTOP))
    journal = run("journalctl", "-u", UNIT, "-o", "cat", "--grep", "Watchdog timeout")["output"]
    ends = [line for line in read_metrics().splitlines() if line.startswith("cpumond_service_ends_total")]
    return {**result, "journal": journal, "ends": ends}


def pause() -> dict[str, Any]:
    """A pause laid down by the operator is there after a restart, and after stop and start."""
    Path("/run/cpumond/pause").touch()
    result: dict[str, Any] = {"restart": systemctl("restart", UNIT)}
    result["after_restart"] = os.path.exists("/run/cpumond/pause")
    systemctl("stop", UNIT)
    result["after_stop"] = os.path.exists("/run/cpumond/pause")
    result["settings"] = read_settings()
    os.unlink("/run/cpumond/pause")
    result["start"] = systemctl("start", UNIT)
    return {**result, "lowered_s": wait(is_lowered)}


def stop() -> dict[str, Any]:
    """An orderly end: every setting as it was, nothing left behind."""
    lowered_s = wait(is_lowered)
    begin_s = time.monotonic()
    answer = systemctl("stop", UNIT)
    return {
        "lowered_s": lowered_s,
        "answer": answer,
        "took_s": time.monotonic() - begin_s,
        "settings": read_settings(),
        "Result": show("Result"),
        "processes": agent_processes(),
        "run": sorted(os.listdir("/run/cpumond")),
        "cgroup": os.path.exists("/sys/fs/cgroup/systemd/system.slice/cpumond.service"),
        "restore": run("cpumond", "restore", "--config", "/etc/cpumond/cpumond.toml"),
        "settings_after_restore": read_settings(),
    }


def journal() -> dict[str, Any]:
    """All entries of the service, as journald has them."""
    lines = run("journalctl", "-u", UNIT, "-o", "json", "--all")["output"].splitlines()
    return {"entries": [json.loads(line) for line in lines]}


def wrong_config() -> dict[str, Any]:
    """A configuration that is wrong at the start: one try, the reason in the journal."""
    systemctl("reset-failed", UNIT)
    DROP_IN.write_text(WRONG)
    answer = systemctl("start", UNIT)
    settled_s = wait(lambda: show("ActiveState") in ("failed", "inactive"))
    return {
        "answer": answer,
        "settled_s": settled_s,
        "ActiveState": show("ActiveState"),
        "ExecMainStatus": show("ExecMainStatus"),
        "restarts": show("NRestarts"),
        "settings": read_settings(),
    }


def crash_with_wrong_config() -> dict[str, Any]:
    """The agent dies while its configuration on disk is wrong: it cannot come back, so the limit must."""
    DROP_IN.unlink(missing_ok=True)
    systemctl("reset-failed", UNIT)
    result: dict[str, Any] = {"start": systemctl("start", UNIT), "lowered_s": wait(is_lowered)}
    DROP_IN.write_text(WRONG)
    systemctl("kill", "--signal", "KILL", UNIT)
    result["settled_s"] = wait(lambda: show("ActiveState") == "failed")
    result["settings"] = read_settings()
    DROP_IN.unlink()
    return result


def main() -> None:
    life = (lower, sandbox, reload, kill, hang, pause, stop, journal, wrong_config, crash_with_wrong_config)
    for step in (install, start, *life):
        begin_s = time.monotonic()
        try:
            fact = step()
        except Exception:
            fact = {"error": traceback.format_exc()}
        facts[step.__name__] = {**fact, "took_step_s": time.monotonic() - begin_s}
        Path("/out/facts.json").write_text(json.dumps(facts, indent=1))
        if step is start and show("ActiveState") != "active":
            break  # nothing further can happen; the journal says why
    Path("/out/journal.txt").write_text(run("journalctl", "--no-pager", "-o", "short-precise")["output"])


main()
