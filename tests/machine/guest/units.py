"""Runs inside the guest, on every layout of cgroups: the agent and units; ``judge_units.py`` judges the facts."""

import http.client
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import guest_tools as guest

AGENT = "cpumond.service"
UNIT = "work.service"
SLICE = "batch.slice"
PROGRAM = Path("/usr/bin/cpumond")
RULES = Path("/usr/share/polkit-1/rules.d/cpumond.rules")
QUOTA_US = 200_000
"""Of the unit: CPUQuota=200%."""
FLOOR_US = 40_000
"""``min_cpu_limit``; far above the light load, also where that is dear."""
SLOW = float(os.environ.get("UNITS_SLOW", "1"))
"""How many times slower than natively this machine is."""
SHORT = bool(os.environ.get("MACHINE_STEPS"))
"""Whether time is short, so that not all steps are done."""
CHECK_PERIOD_S = 0.1 * SLOW
OVERRIDE_TTL_S = 10.0 if SLOW == 1.0 else 6.0 * SLOW
"""Longer than ``cpumond status`` takes to start."""
RELOAD_ATTEMPTS = 3
PATIENCE_S = 20.0 * SLOW

CONFIG = f"""
managed_roots = ["{SLICE}"]

[monitor]
mode = "reclaim"
check_period = "{CHECK_PERIOD_S * 1000:g}ms"
min_cpu_limit = 0.4
smoothing_factor = 0.5
decrease_coefficient = 0.5
# A host that lets this machine wait makes one period of the light load a throttled one now and then.
throttle_restore_ratio = 0.5

[writes]
override_ttl = "{OVERRIDE_TTL_S:g}s"
drift_backoff = "500ms"

[[source]]
kind = "systemd"
slices = ["{SLICE}"]
pattern = "weigh*"
job-cpu-monitor = {{ actuator = "weight", min_cpu_limit = 0.2 }}

[[source]]
kind = "systemd"
slices = ["{SLICE}"]
pattern = "[!w]ork*"
labels = ["Description"]

[[source]]
kind = "systemd"
slices = ["{SLICE}"]
labels = ["User", "Description"]
"""

WORK = """
import os, time
helper = 0 in [os.fork() for _ in range(2)]
while True:
    busy = os.path.exists("/run/load")
    until = time.thread_time() + (0.02 if busy else 0.0 if helper else 0.001)
    while time.thread_time() < until:
        pass
    if not busy:
        time.sleep(PAUSE_S)
"""
"""One process with light load and others that sleep; with /run/load all are busy."""
WORK_UNIT = f"""
[Unit]
Description=Work of the night
[Service]
ExecStart=/usr/bin/python3 /usr/lib/work.py
Slice={SLICE}
CPUQuota=200%
User=nobody
KillMode=control-group
"""


def find_mounts() -> tuple[int, str, list[str]]:
    """Version of the hierarchy with the cpu controller, its mount point, and all where processes count."""
    v1: dict[str, str] = {}
    v2 = ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split()[:3]
        point = left.split()[4]
        if kind == "cgroup2":
            v2 = v2 or point
        elif kind == "cgroup":
            v1.update(dict.fromkeys(options.split(","), point))
    if "cpu" in v1:
        return 1, v1["cpu"], sorted({v1["cpu"], *([v2] if v2 else [])})
    return 2, v2, [v2]


VERSION, CPU_ROOT, ROOTS = find_mounts()


def read_quota(path: str) -> int:
    """The quota of a cgroup in us; -1 without a limit, 0 where it cannot be read just now."""
    try:
        text = Path(CPU_ROOT, path, "cpu.max" if VERSION == 2 else "cpu.cfs_quota_us").read_text()
    except OSError:
        return 0
    return -1 if text.startswith("max") else int(text.split()[0])


def write_quota(path: str, quota_us: int) -> None:
    folder = Path(CPU_ROOT, path)
    (folder / ("cpu.max" if VERSION == 2 else "cpu.cfs_quota_us")).write_text(str(quota_us))


def read_weight(path: str) -> int:
    return int(Path(CPU_ROOT, path, "cpu.weight" if VERSION == 2 else "cpu.shares").read_text())


def quota_us(unit: str = UNIT) -> int:
    return read_quota(f"{SLICE}/{unit}")


def property_us(unit: str = UNIT) -> int:
    """CPUQuotaPerSecUSec of a unit in us; -1 is infinity. systemctl prints it as a time span."""
    text = guest.show(unit, "CPUQuotaPerSecUSec")
    if text == "infinity":
        return -1
    units = {"us": 1.0, "ms": 1e3, "s": 1e6, "min": 60e6}
    total = 0.0
    for word in text.split():
        number = word.rstrip("abcdefghijklmnopqrstuvwxyz")
        total += float(number) * units[word[len(number) :]]
    return round(total)


def has_quota(quota: int, unit: str = UNIT) -> bool:
    """Both can say so a moment before, too: what systemd was told first is late in both."""
    return quota_us(unit) == quota and property_us(unit) == 10 * quota


def is_lowered() -> bool:
    return 0 < quota_us() <= QUOTA_US // 2


def is_full() -> bool:
    return quota_us() == QUOTA_US


class ControlSocket(http.client.HTTPConnection):
    """The agent's own; asking it through ``cpumond status`` would cost most of the time here."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(60.0)
        self.sock.connect("/run/cpumond/control.sock")


def ask(method: str, path: str) -> Any:
    """What the agent answers. Raises OSError."""
    connection = ControlSocket("localhost")
    try:
        connection.request(method, path)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def job(name: str = UNIT) -> dict[str, Any]:
    """What ``cpumond status`` says about a unit, and about the agent."""
    try:
        status = ask("GET", "/v1/status")
    except OSError:
        return {"problems": [], "counters": {}}
    found = [each for each in status["jobs"] if each["job_id"] == name]
    return {"problems": status["problems"], "counters": status["counters"], **(found[0] if found else {})}


def look(unit: str = UNIT) -> dict[str, Any]:
    return {"quota_us": quota_us(unit), "property_us": property_us(unit), "job": job(unit)}


def drop_ins(unit: str = UNIT) -> dict[str, str]:
    return {str(path): path.read_text() for path in Path("/run/systemd").rglob(f"{unit}.d/*.conf")}


def set_load(busy: bool) -> None:
    if busy:
        Path("/run/load").touch()
    else:
        Path("/run/load").unlink(missing_ok=True)


def count_throttled() -> int:
    lines = Path(CPU_ROOT, SLICE, UNIT, "cpu.stat").read_text().splitlines()
    return int(dict(line.split() for line in lines)["nr_throttled"])


def wake_up() -> dict[str, Any]:
    """The load begins: how long, and how many checks, from when it is held back until the unit has its quota."""
    before = count_throttled()
    set_load(True)
    guest.wait(lambda: count_throttled() > before, PATIENCE_S)
    tick = ask("GET", "/v1/status")["tick"]
    full_s = guest.wait(is_full, PATIENCE_S)
    return {"full_s": full_s, "checks": ask("GET", "/v1/status")["tick"] - tick}


def settle() -> float | None:
    """Until the unit is at its least limit, and systemd knows."""
    set_load(False)
    return guest.wait(lambda: has_quota(FLOOR_US), PATIENCE_S)


def install() -> dict[str, Any]:
    guest.install_files({
        "systemd/cpumond.service": "/usr/lib/systemd/system/cpumond.service",
        "systemd/cpumond.sysusers.conf": "/usr/lib/sysusers.d/cpumond.conf",
        "systemd/cpumond.tmpfiles.conf": "/usr/lib/tmpfiles.d/cpumond.conf",
        "systemd/cpumond.rules": str(RULES),
    })  # fmt: skip
    guest.write_file(PROGRAM, guest.WRAPPER, 0o755)
    guest.write_file("/usr/lib/work.py", f"PAUSE_S = {0.05 * SLOW}\n{WORK}")
    guest.write_file(f"/etc/systemd/system/{UNIT}", WORK_UNIT)
    guest.write_file(
        "/etc/systemd/system/weighty.service",
        f"[Service]\nExecStart=/bin/sleep 1000\nSlice={SLICE}\nCPUQuota=100%\nCPUWeight=200\n",
    )
    guest.write_file("/etc/systemd/system/plain.service", f"[Service]\nExecStart=/bin/sleep 1000\nSlice={SLICE}\n")
    config = CONFIG
    if VERSION == 1 and len(ROOTS) > 1:
        # Where cpu and cpuacct are mounted apart, systemd puts units into the first only; the CPU time is then taken
        # from the cgroup2 mount. Distributions mount both together.
        lines = Path("/proc/self/mountinfo").read_text().splitlines(keepends=True)
        if not any("cpu,cpuacct" in line for line in lines):
            guest.write_file("/etc/cpumond/mountinfo", "".join(line for line in lines if "cpuacct" not in line))
            config = 'mountinfo = "/etc/cpumond/mountinfo"\n' + CONFIG
    guest.write_file("/etc/cpumond/cpumond.toml", config)
    answers = [guest.run("systemd-sysusers"), guest.run("systemd-tmpfiles", "--create", "cpumond.conf")]
    answers += [guest.systemctl("daemon-reload"), guest.systemctl("start", UNIT)]
    return {
        "answers": answers,
        "systemd": guest.run("systemctl", "--version")["output"].splitlines()[0],
        "verify": guest.run("systemd-analyze", "verify", "--man=no", AGENT),
        "check": guest.run("cpumond", "check-config", "--config", "/etc/cpumond/cpumond.toml"),
        "quota_us": quota_us(),
    }


def lowers() -> dict[str, Any]:
    """A unit with CPUQuota=200% and light load."""
    answer = guest.systemctl("start", AGENT)
    lowered_s = guest.wait(is_lowered, PATIENCE_S)
    settled_s = settle()
    # systemd writes the limit, the agent tells of it after its next look.
    told_s = guest.wait(lambda: job().get("current_cpu_limit") == FLOOR_US / 1e5, PATIENCE_S)
    return {
        "answer": answer, "lowered_s": lowered_s, "settled_s": settled_s, "told_s": told_s, "drop_ins": drop_ins(),
        **look(),
    }  # fmt: skip


def reloads() -> dict[str, Any]:
    """Again where the agent moved the limit: an emulated processor's waits for the host count as its CPU time."""
    for _ in range(RELOAD_ATTEMPTS):
        settle()
        cursor = guest.journal_cursor(AGENT)
        seen = {"before": quota_us()}
        for verb in ("daemon-reload", "daemon-reexec", "daemon-reload"):
            guest.systemctl(verb)
            seen[verb] = quota_us()
            guest.wait(lambda: False, 3 * CHECK_PERIOD_S)
            seen[f"{verb} and three checks"] = quota_us()
        fact = {"seen": seen, **look(), "journal": guest.journal_after(cursor, AGENT)}
        # A limit that was raised before the journal's cursor is still on its way down.
        moved = [line for line in fact["journal"].splitlines() if "limit_changed" in line]
        if all("reason=reapply" in line for line in moved):
            break
    return fact


def wakes() -> dict[str, Any]:
    settle()
    fact = wake_up()
    agreed_s = guest.wait(lambda: has_quota(QUOTA_US), PATIENCE_S)
    return {**fact, "agreed_s": agreed_s, **look()}


def restarts() -> dict[str, Any]:
    """The unit is restarted while its limit is lowered: that is not what it ordered."""
    settle()
    inode = os.stat(Path(CPU_ROOT, SLICE, UNIT)).st_ino
    answer = guest.systemctl("restart", UNIT)
    after = {"quota_us": quota_us(), "other": os.stat(Path(CPU_ROOT, SLICE, UNIT)).st_ino != inode}
    followed_s = guest.wait(lambda: job().get("status") == "reclaim", PATIENCE_S)
    fact = {"answer": answer, "after": after, "followed_s": followed_s, **look()}
    set_load(True)
    fact["full_s"] = guest.wait(is_full, PATIENCE_S)
    return fact


def stops() -> dict[str, Any]:
    """The unit is stopped while its limit is lowered: its next start has all it ordered."""
    settle()
    answer = guest.systemctl("stop", UNIT)
    back_s = guest.wait(lambda: property_us() == 10 * QUOTA_US, PATIENCE_S)
    start = guest.systemctl("start", UNIT)
    return {"answer": answer, "back_s": back_s, "start": start, "quota_us": quota_us()}


def orders() -> dict[str, Any]:
    fact: dict[str, Any] = {}
    for name, percent in (("up", 150), ("down", 50)):
        settle()
        wanted = percent * 1000
        cursor = guest.journal_cursor(AGENT)
        answer = guest.systemctl("set-property", "--runtime", UNIT, f"CPUQuota={percent}%")
        seen_s = guest.wait(lambda: job().get("override_by"), OVERRIDE_TTL_S)
        held, held_us = job(), quota_us()
        table = guest.run("cpumond", "status")["output"]
        if name == "down" or SHORT:
            ask("DELETE", f"/v1/jobs/{UNIT}/pin")  # cpumond unpin: its time need not be waited for twice
        broken_s = guest.wait(lambda wanted=wanted: quota_us() != wanted, OVERRIDE_TTL_S + 5)  # type: ignore[misc]
        fact[name] = {
            "answer": answer, "seen_s": seen_s, "held": held, "held_us": held_us, "table": table, "held_s": broken_s,
            "journal": guest.journal_after(cursor, AGENT), **look(),
        }  # fmt: skip
    settle()
    answer = guest.systemctl("stop", AGENT)
    return {**fact, "stopped": answer, "left_us": quota_us(), "left_property_us": property_us()}


def back_to_normal() -> dict[str, Any]:
    return {
        "answers": [
            guest.systemctl("set-property", "--runtime", UNIT, "CPUQuota=200%"),
            guest.systemctl("start", AGENT),
        ],
        "settled_s": settle(),
    }


def kill() -> dict[str, Any]:
    """kill -9 of the agent: how long until the unit has its quota again."""
    settle()
    pid = guest.show(AGENT, "MainPID")
    guest.run("systemctl", "kill", "--signal", "KILL", AGENT)
    full_s = guest.wait(is_full, PATIENCE_S)
    property_s = guest.wait(lambda: property_us() == 10 * QUOTA_US, PATIENCE_S)
    up_s = guest.wait(lambda: guest.is_up_again(AGENT, pid), 2 * PATIENCE_S)
    return {
        "full_s": full_s,
        "property_s": property_s,
        "up_s": up_s,
        "lowered_s": guest.wait(is_lowered, PATIENCE_S),
        **look(),
    }


def weighs() -> dict[str, Any]:
    """The weight actuator: CPUWeight, and the kernel's file."""
    path = f"{SLICE}/weighty.service"
    answer = guest.systemctl("start", "weighty.service")
    before = read_weight(path)
    lowered_s = guest.wait(lambda: read_weight(path) < before / 4, PATIENCE_S)

    def same() -> bool:
        weight, found = int(guest.show("weighty.service", "CPUWeight")), read_weight(path)
        return found < before / 4 and found == (weight if VERSION == 2 else weight * 1024 // 100)

    agreed_s = guest.wait(same, PATIENCE_S)
    seen = [read_weight(path)]
    guest.systemctl("daemon-reload")
    seen.append(read_weight(path))
    fact = {"answer": answer, "before": before, "lowered_s": lowered_s, "agreed_s": agreed_s, "seen": seen}
    return {**fact, "quota_us": quota_us("weighty.service"), "job": job("weighty.service")}


def unlimited() -> dict[str, Any]:
    """A unit that orders no CPU: on v2 it has no limit file before it is lowered for the first time."""
    answer = guest.systemctl("start", "plain.service")
    before = {"quota_us": quota_us("plain.service"), "property_us": property_us("plain.service")}
    lowered_s = guest.wait(lambda: has_quota(FLOOR_US, "plain.service"), PATIENCE_S)
    guest.systemctl("daemon-reload")
    fact = {"answer": answer, "before": before, "lowered_s": lowered_s, **look("plain.service")}
    write_quota(f"{SLICE}/plain.service", 15_000)
    return {**fact, "by_hand_s": guest.wait(lambda: quota_us("plain.service") == FLOOR_US, PATIENCE_S)}


def leaves() -> dict[str, Any]:
    """An orderly stop: files and systemd's beliefs are as they were."""
    settle()
    cursor = guest.journal_cursor(AGENT)
    answer = guest.systemctl("stop", AGENT)
    return {
        "answer": answer,
        "journal": guest.journal_after(cursor, AGENT),
        "quota_us": quota_us(),
        "property_us": property_us(),
        "plain_us": quota_us("plain.service"),
        "plain_property_us": property_us("plain.service"),
        "weight": read_weight(f"{SLICE}/weighty.service"),
        "CPUWeight": guest.show("weighty.service", "CPUWeight"),
        "state": Path("/var/lib/cpumond/originals.state").read_text(),
        "result": guest.show(AGENT, "Result"),
    }


def without_polkit() -> dict[str, Any]:
    """No rule: limits by file alone; what systemd puts back at a reload is written over, not taken for an order."""
    guest.systemctl("stop", AGENT)
    guest.systemctl("set-property", "--runtime", UNIT, "CPUQuota=200%")
    RULES.unlink()
    guest.systemctl("restart", "polkit.service")
    cursor = guest.journal_cursor(AGENT)
    start = guest.systemctl("start", AGENT)
    set_load(False)
    lowered_s = guest.wait(lambda: quota_us() == FLOOR_US, PATIENCE_S)
    denied = job()
    guest.systemctl("daemon-reload")
    reloaded_us = quota_us()
    again_s = guest.wait(lambda: quota_us() == FLOOR_US, PATIENCE_S)
    after = job()
    stop = guest.systemctl("stop", AGENT)
    return {
        "start": start, "lowered_s": lowered_s, "denied": denied, "property_us": property_us(),
        "reloaded_us": reloaded_us, "again_s": again_s, "after": after, "stop": stop, "left_us": quota_us(),
        "result": guest.show(AGENT, "Result"), "journal": guest.journal_after(cursor, AGENT),
    }  # fmt: skip


STEPS: tuple[Callable[[], dict[str, Any]], ...] = (
    install, lowers, reloads, wakes, restarts, stops, orders, back_to_normal, kill, weighs, unlimited,
    leaves, without_polkit,
)  # fmt: skip

if __name__ == "__main__":
    guest.live_through(STEPS)
