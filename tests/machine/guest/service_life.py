"""Runs inside the guest: installs the service and lives its life; ``test_service_life.py`` judges the facts."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import guest_tools as guest

sys.path.append("/in/site")
from asyncinotify import Inotify, Mask

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
check_period = 100
min_cpu_limit = 0.1

[[source]]
kind = "glob"
pattern = "jobs/*"
id_regex = "jobs/(?P<id>.+)"
cpu_limit = 1.0
"""
HIGH_FLOOR_US, STEEP_FLOOR_US = 90_000, 30_000
CHECK_PERIOD_S = 0.1
HIGH = "[monitor]\nmin_cpu_limit = 0.9\n"
STEEP = "[monitor]\ndecrease_coefficient = 0.5\nmin_cpu_limit = 0.3\n"
WRONG = "[monitor]\nno_such_option = 1\n"
DROP_IN = Path("/etc/cpumond/conf.d/50-test.toml")

PAUSE = Path("/run/cpumond/pause")
WATCHDOG_S = 2
"""A shorter watchdog than the unit's, only to wait less; a hang is waited for with the unit's own."""
TEST_DROP_IN = "/usr/lib/systemd/system/cpumond.service.d/test.conf"
STEP_DROP_IN = "/run/systemd/system/cpumond.service.d/step.conf"
SECRETS = (
    "/etc/credstore/token",
    "/etc/credstore.encrypted/token",
    "/etc/krb5.keytab",
    "/etc/shadow",
    "/etc/ssh/ssh_host_key",
    "/etc/ssl/private/key.pem",
    "/var/lib/containers/storage/file",
    "/var/lib/docker/volumes/file",
    "/var/lib/kubelet/pki/key.pem",
    "/var/lib/systemd/credential.secret",
)
"""What the agent's capability alone would let it read."""
BUSY_PORT = 9799
UNITS_CONFIG = """
[[source]]
kind = "systemd"
slices = ["cpumond-jobs.slice"]
"""
MANY = 100
"""Jobs besides the one, whose limits are to be restored."""


def show(name: str) -> str:
    return guest.show(f"{UNIT}.service", name)


def quota_us() -> int:
    return int((CPU / "cpu.cfs_quota_us").read_text())


def read_settings() -> dict[str, str]:
    return {name: (CPU / name).read_text() for name in SETTINGS}


def is_lowered() -> bool:
    return quota_us() < QUOTA_US


def is_original() -> bool:
    """The quota goes up first, the burst after it."""
    return {name: text.strip() for name, text in read_settings().items()} == SETTINGS


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


class LimitFiles:
    """Every file of the guest that holds a CPU setting: what is in it, and whether somebody writes to it."""

    def __init__(self) -> None:
        self.inotify = Inotify()
        self.inotify.sync_timeout = 0
        self.paths = sorted(
            str(path)
            for hierarchy in ("cpu", "unified")
            for path in Path("/sys/fs/cgroup", hierarchy).rglob("cpu.*")
            if path.stat().st_mode & 0o200 and path.name != "cpu.pressure"
        )
        for path in self.paths:
            self.inotify.add_watch(path, Mask.MODIFY)
        self.before = self.read()

    def read(self) -> dict[str, str]:
        return {path: Path(path).read_text() for path in self.paths if os.path.exists(path)}

    def list_written(self) -> list[str]:
        """Which were written since the last look."""
        written = set()
        while (event := self.inotify.sync_get()) is not None:
            written.add(str(event.path))
        return sorted(written)

    def look(self) -> dict[str, Any]:
        """Which were written since the start, and which hold something else now."""
        written, now = self.list_written(), self.read()
        changed = {path: [text, now[path]] for path, text in self.before.items() if now.get(path, text) != text}
        return {"count": len(self.paths), "written": written, "changed": changed}

    def prove(self) -> list[str]:
        """What is seen to be written when one file is, with what it holds already."""
        path = CPU / "cpu.shares"
        path.write_text(path.read_text())
        return self.list_written()


def install() -> dict[str, Any]:
    """Files to their places, as a package would do it; a cgroup and a unit, each with a limit and a light load."""
    guest.install_files(
        {
            "systemd/cpumond.service": "/usr/lib/systemd/system/cpumond.service",
            "systemd/cpumond-jobs.slice": "/usr/lib/systemd/system/cpumond-jobs.slice",
            "systemd/cpumond.sysusers.conf": "/usr/lib/sysusers.d/cpumond.conf",
            "systemd/cpumond.tmpfiles.conf": "/usr/lib/tmpfiles.d/cpumond.conf",
            "config/cpumond.toml": "/etc/cpumond/cpumond.toml",
        }
    )
    guest.write_file("/usr/bin/cpumond", guest.WRAPPER, 0o755)
    for path in SECRETS:
        if not os.path.exists(path):
            guest.write_file(path, "a secret\n", 0o600)
    result = {
        "sysusers": guest.run("systemd-sysusers"),
        "tmpfiles": guest.run("systemd-tmpfiles", "--create", "cpumond.conf"),
    }
    load = subprocess.Popen([sys.executable, "-c", guest.LIGHT_LOAD])
    for directory in (CPU, CPUACCT):
        directory.mkdir(parents=True)
        # systemd removes empty v1 cgroups that it does not know at its next daemon-reload: never leave it empty.
        (directory / "cgroup.procs").write_text(str(load.pid))
    for name, value in SETTINGS.items():
        (CPU / name).write_text(value)
    result["reload"] = guest.systemctl("daemon-reload")
    result["verify"] = guest.run("systemd-analyze", "verify", "--man=no", "cpumond.service", "cpumond-jobs.slice")
    guest.run("systemd-run", "--quiet", "--slice=cpumond-jobs.slice", "--property=CPUQuota=50%", "sleep", "infinity")
    result["settings"] = read_settings()
    return result


def fresh() -> dict[str, Any]:
    """As shipped. Enabling a unit makes systemd write its own limits again: writers are seen over a restart."""
    before, cursor = LimitFiles(), guest.journal_cursor(UNIT)
    answer = guest.systemctl("enable", "--now", UNIT)
    files = LimitFiles()
    restart = guest.systemctl("restart", UNIT)
    begin_ticks = read_ticks()
    ticks_s = guest.wait(lambda: read_ticks() >= begin_ticks + 2)
    text, status = show("StatusText"), guest.run("systemctl", "status", "--no-pager", UNIT)["output"]
    guest.write_file(DROP_IN, CONFIG.replace("reclaim", "shadow"))
    reload = guest.systemctl("reload", UNIT)
    return {
        "changed": before.look()["changed"],
        "restart": restart,
        "reload": reload,
        "decided_s": guest.wait(lambda: read_metric(r"cpumond_job_monitor_cpu_limit_cores\{.*\}", 1.0) < 1.0),
        "answer": answer,
        "enabled": guest.systemctl("is-enabled", UNIT)["output"].strip(),
        "ticks_s": ticks_s,
        "files": files.look(),
        "control": files.prove(),
        "status": status,
        "StatusText": text,
        "journal": guest.journal_after(cursor, UNIT),
        **{name: show(name) for name in ("ActiveState", "SubState", "Type", "User")},
    }


def start() -> dict[str, Any]:
    """The last step: limits move. A shorter watchdog than the unit's from here on, only to wait less."""
    guest.write_file(TEST_DROP_IN, f"[Service]\nWatchdogSec={WATCHDOG_S}s\n")
    DROP_IN.unlink()
    guest.write_file("/etc/cpumond/cpumond.toml", CONFIG)
    reload, answer = guest.systemctl("daemon-reload"), guest.systemctl("restart", UNIT)
    return {
        "reload": reload,
        "answer": answer,
        "ActiveState": show("ActiveState"),
        "WatchdogUSec": show("WatchdogUSec"),
    }


def read_metrics() -> str:
    with urllib.request.urlopen("http://127.0.0.1:9756/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def read_metric(pattern: str, missing: float) -> float:
    found = re.search(rf"(?m)^{pattern} (\S+)", read_metrics())
    return float(found[1]) if found else missing


def read_ticks() -> float:
    return read_metric("cpumond_ticks_total", -1.0)


def lower() -> dict[str, Any]:
    """The limit follows the light load, and the agent answers on both of its sockets."""
    result = {"after_s": guest.wait(is_lowered), "quota_us": quota_us(), "status": guest.run("cpumond", "status")}
    return {**result, "metrics": read_metrics()}


def sandbox() -> dict[str, Any]:
    pid = show("MainPID")
    root = Path(f"/proc/{pid}/root")
    return {
        **guest.read_rights(pid),
        "run": sorted(os.listdir(root / "run")),
        "secrets": {path: [bool(read_secret(path)), bool(read_secret(f"{root}{path}"))] for path in SECRETS},
        "config": bool(read_secret(f"{root}/etc/cpumond/cpumond.toml")),
        "read_only": sorted(path for path, is_ro in guest.read_mounts(pid).items() if is_ro),
    }


def ask_doctor(check: str, *arguments: str) -> list[dict[str, Any]]:
    findings = json.loads(guest.run("cpumond", "doctor", "--json", *arguments)["output"])["findings"]
    return [finding for finding in findings if finding["check"] == check]


def polkit() -> dict[str, Any]:
    """What ``doctor`` says of the right to set limits of units, while polkit is in one state or another."""
    guest.install_files({"systemd/cpumond.rules": "/usr/share/polkit-1/rules.d/cpumond.rules"})
    config = "/run/units.toml"
    guest.write_file(config, UNITS_CONFIG)

    def ask() -> list[dict[str, Any]]:
        return ask_doctor("unit limits", "--config", config)

    guest.systemctl("stop", "polkit.service")
    result: dict[str, Any] = {"idle": ask(), "idle_state": guest.show("polkit.service", "ActiveState")}
    result["start"], result["running"] = guest.systemctl("start", "polkit.service"), ask()
    return result


def read_secret(path: str) -> bytes:
    """What root reads in a file; nothing where that is closed or not there."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def wait_for_ticks(number: int) -> float | None:
    """For so many checks from now on."""
    begin_ticks = read_ticks()
    return guest.wait(lambda: read_ticks() >= begin_ticks + number)


def reload() -> dict[str, Any]:
    """A wrong file changes nothing. Each has another floor: the limit stays while it is there, else it moves."""
    DROP_IN.write_text(HIGH)
    restart, high_s = guest.systemctl("restart", UNIT), guest.wait(lambda: quota_us() == HIGH_FLOOR_US)
    pid = show("MainPID")
    DROP_IN.write_text(STEEP)
    answer = guest.systemctl("reload", UNIT)
    floor_s = guest.wait(lambda: quota_us() == STEEP_FLOOR_US)
    DROP_IN.write_text(WRONG)
    cursor = guest.journal_cursor(UNIT)
    wrong = guest.systemctl("reload", UNIT)
    said_s = guest.wait(lambda: "no_such_option" in guest.journal_after(cursor, UNIT))
    # Past the check of the unit, as a signal by hand is.
    guest.systemctl("kill", "--kill-who", "main", "--signal", "HUP", UNIT)
    status_s = guest.wait(lambda: "no_such_option" in show("StatusText"))
    ticks_s, kept_us = wait_for_ticks(5), quota_us()
    after = {"same_pid": show("MainPID") == pid, "ActiveState": show("ActiveState"), "kept_us": kept_us}
    DROP_IN.unlink()
    last = guest.systemctl("reload", UNIT)
    forgotten_s = guest.wait(lambda: "no_such_option" not in show("StatusText"))
    left_s = guest.wait(lambda: quota_us() < STEEP_FLOOR_US)
    waited = {"high_s": high_s, "floor_s": floor_s, "ticks_s": ticks_s, "left_s": left_s}
    said = {"said_s": said_s, "status_s": status_s, "forgotten_s": forgotten_s}
    return {"restart": restart, "answer": answer, "wrong": wrong, "last": last, **waited, **said, **after}


def listen_to_manager(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do it while systemd itself logs which messages it gets from the agent, and the states it puts the unit into."""
    cursor = guest.journal_cursor(UNIT)
    guest.systemctl("log-level", "debug")
    try:
        result = work()
    finally:
        guest.systemctl("log-level", "info")
    return {**result, "manager": guest.journal_after(cursor, UNIT).splitlines()}


def signalled() -> dict[str, Any]:
    """A reload that systemd learns of from the agent's messages alone: the signal does not come from ``systemctl``."""
    cursor = guest.journal_cursor(UNIT)

    def work() -> dict[str, Any]:
        os.kill(int(show("MainPID")), signal.SIGHUP)
        return {"back_s": guest.wait(lambda: "Changed reload -> running" in guest.journal_after(cursor, UNIT))}

    return listen_to_manager(work)


def reexec() -> dict[str, Any]:
    """PID 1 is replaced, and must hear the agent for longer than the watchdog waits; writes are paused meanwhile."""
    lowered_s = guest.wait(is_lowered)
    PAUSE.touch()
    wait_for_ticks(2)
    pid, before = show("MainPID"), read_settings()
    answers = [guest.systemctl("daemon-reload"), guest.systemctl("daemon-reexec")]
    after = read_settings()
    lived_s = wait_for_ticks(round(1.5 * WATCHDOG_S / CHECK_PERIOD_S))
    PAUSE.unlink()
    return {
        "lowered_s": lowered_s,
        "answers": answers,
        "before": before,
        "after": after,
        "lived_s": lived_s,
        "same_pid": show("MainPID") == pid,
        "ActiveState": show("ActiveState"),
    }


def lose(end: Callable[[str], None]) -> dict[str, Any]:
    """End the agent in a way it cannot answer: the original limit comes back, then the agent, then it lowers again."""
    lowered_s = guest.wait(is_lowered)
    pid, begin_s = show("MainPID"), time.monotonic()
    guest.run("cpumond", "--version")
    command_s = time.monotonic() - begin_s
    end(pid)
    original_s = guest.wait(is_original)
    settings = read_settings()
    up_s = guest.wait(lambda: guest.is_up_again(UNIT, pid))
    return {
        "lowered_s": lowered_s,
        "command_s": command_s,
        "original_s": original_s,
        "settings": settings,
        "up_s": up_s,
        "restarts": show("NRestarts"),
        "lowered_again_s": guest.wait(is_lowered),
    }


def kill() -> dict[str, Any]:
    return lose(lambda _: print(guest.systemctl("kill", "--signal", "KILL", UNIT), flush=True))


def hang() -> dict[str, Any]:
    """With the watchdog of the unit as it is shipped, from here on."""
    os.unlink(TEST_DROP_IN)
    ready = [guest.systemctl("daemon-reload"), guest.systemctl("restart", UNIT)]
    times = {name: show(name) for name in ("WatchdogUSec", "TimeoutAbortUSec")}
    result = {"ready": ready, **times, **lose(lambda pid: os.kill(int(pid), signal.SIGSTOP))}
    journal = guest.read_journal("-u", UNIT, "-o", "cat", "--grep", "Watchdog timeout")
    ends = [line for line in read_metrics().splitlines() if line.startswith("cpumond_service_ends_total")]
    return {**result, "journal": journal, "ends": ends}


def begin_step(drop_in: str = "") -> list[dict[str, Any]]:
    """Off, with no deaths counted, and with some more lines in the unit, or those of the last step gone."""
    answers = [guest.systemctl("stop", UNIT)]
    if drop_in:
        guest.write_file(STEP_DROP_IN, f"[Service]\n{drop_in}")
    else:
        Path(STEP_DROP_IN).unlink(missing_ok=True)
    return [*answers, guest.systemctl("daemon-reload"), guest.systemctl("reset-failed", UNIT)]


def busy_port() -> dict[str, Any]:
    """An error that stays: another program has the port. What is shortened is only the wait between two starts."""
    ready = begin_step("RestartSec=100ms\n")
    guest.write_file(DROP_IN, f'[metrics]\nlisten = "127.0.0.1:{BUSY_PORT}"\n')
    cursor = guest.journal_cursor(UNIT)
    with socket.create_server(("127.0.0.1", BUSY_PORT)):
        answer = guest.systemctl("start", UNIT)
        off_s = guest.wait(lambda: show("ActiveState") == "failed", 120.0)
        journal = guest.journal_after(cursor, UNIT)
    DROP_IN.unlink()
    restarts = show("NRestarts")
    begin_step()
    return {"ready": ready, "answer": answer, "off_s": off_s, "restarts": restarts, "journal": journal}


def stop() -> dict[str, Any]:
    """An orderly end, with many jobs: every setting as it was, nothing left behind."""
    many = {f"{CPU}-{number}": subprocess.Popen(["sleep", "infinity"]) for number in range(MANY)}
    for path, process in many.items():
        for directory in (path, path.replace(str(CPU), str(CPUACCT))):
            os.mkdir(directory)
            Path(directory, "cgroup.procs").write_text(str(process.pid))
        Path(path, "cpu.cfs_quota_us").write_text(str(QUOTA_US))
    guest.systemctl("restart", UNIT)

    def read_quotas() -> list[int]:
        return [quota_us(), *(int(Path(path, "cpu.cfs_quota_us").read_text()) for path in many)]

    lowered_s = guest.wait(lambda: max(read_quotas()) < QUOTA_US)
    begin_s = time.monotonic()
    heard = listen_to_manager(lambda: {"answer": guest.systemctl("stop", UNIT), "took_s": time.monotonic() - begin_s})
    quotas = read_quotas()
    for path, process in many.items():
        process.kill()
        process.wait()
        for directory in (path, path.replace(str(CPU), str(CPUACCT))):
            os.rmdir(directory)
    return {
        "lowered_s": lowered_s,
        "quotas": quotas,
        **heard,
        "settings": read_settings(),
        "Result": show("Result"),
        "processes": agent_processes(),
        "run": sorted(os.listdir("/run/cpumond")),
        "cgroup": os.path.exists("/sys/fs/cgroup/systemd/system.slice/cpumond.service"),
        "restore": guest.run("cpumond", "restore", "--config", "/etc/cpumond/cpumond.toml"),
        "settings_after_restore": read_settings(),
    }


def journal() -> dict[str, Any]:
    lines = guest.read_journal("-u", UNIT, "-o", "json", "--all").splitlines()
    return {"entries": [json.loads(line) for line in lines]}


def leave_lowered() -> dict[str, Any]:
    """The agent dies, and nothing of the unit puts the limit back."""
    ready = begin_step("Restart=no\nExecStopPost=\n")
    result: dict[str, Any] = {"ready": ready, "start": guest.systemctl("start", UNIT)}
    result["lowered_s"] = guest.wait(is_lowered)
    guest.systemctl("kill", "--signal", "KILL", UNIT)
    result["off_s"] = guest.wait(lambda: show("ActiveState") == "failed")
    result["left_us"], result["doctor"] = quota_us(), ask_doctor("leftovers")
    begin_step()
    return result


def wrong_config() -> dict[str, Any]:
    """One try, the reason in the journal, and a limit that was left low is put back all the same."""
    left = leave_lowered()
    DROP_IN.write_text(WRONG)
    answer = guest.systemctl("start", UNIT)
    settled_s = guest.wait(lambda: show("ActiveState") in ("failed", "inactive"))
    DROP_IN.unlink()
    return {
        "left": left,
        "answer": answer,
        "settled_s": settled_s,
        "ActiveState": show("ActiveState"),
        "ExecMainStatus": show("ExecMainStatus"),
        "restarts": show("NRestarts"),
        "settings": read_settings(),
    }


LIFE = (
    install, fresh, start, lower, sandbox, polkit, reload, signalled, reexec, kill, hang, busy_port, stop, journal,
    wrong_config,
)  # fmt: skip
guest.live_through(LIFE, stop_after=lambda step: step in (fresh, start) and show("ActiveState") != "active")
