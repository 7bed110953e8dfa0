"""Runs inside the guest: the Debian package from its first installation to its purge, with a job whose limit the agent
lowers; leaves what it saw in /out/facts.json for ``test_package.py`` to judge. Standard library only.
"""

from __future__ import annotations

import glob
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from guest_tools import live_through, run, show, systemctl, wait, write_file

UNIT = "cpumond"
SCHEDULER = "cpumond-scheduler"
CPU = Path("/sys/fs/cgroup/cpu")
UNIFIED = Path("/sys/fs/cgroup/unified")
JOB = "jobs/one"
UNIT_JOB = "batch.slice/two.service"
"""One job in a cgroup of nobody, and one that is a unit of systemd."""
SETTINGS = {
    "cpu.cfs_period_us": "100000",
    "cpu.cfs_quota_us": "100000",
    "cpu.cfs_burst_us": "40000",
    "cpu.shares": "700",
}
QUOTA_US = int(SETTINGS["cpu.cfs_quota_us"])
CONFIG = "/etc/cpumond/cpumond.toml"
MOUNTS = "/etc/cpumond/mountinfo"
JOBS = f"""
mountinfo = "{MOUNTS}"
managed_roots = ["jobs", "batch.slice"]
[monitor]
check_period = 200
min_cpu_limit = 0.1
[[source]]
kind = "glob"
pattern = "jobs/*"
cpu_limit = 1.0
[[source]]
kind = "systemd"
slices = ["batch.slice"]
"""
RECLAIM = '[monitor]\nmode = "reclaim"\n'
WRONG = "[monitor]\nno_such_option = 1\n"
UNPACKED = "/usr/lib/cpumond/lib/python3.11/site-packages/cpumond/__init__.py"
LIGHT_LOAD = """
import time
while True:
    busy_until = time.thread_time() + 0.002
    while time.thread_time() < busy_until:
        pass
    time.sleep(0.05)
"""
COMPLETE = """
source /usr/share/bash-completion/completions/cpumond
COMP_WORDS=(cpumond po) COMP_CWORD=1
_cpumond_completion cpumond
echo "${COMPREPLY[@]}"
"""


def read_quota_us(job: str) -> int:
    return int((CPU / job / "cpu.cfs_quota_us").read_text())


def read_settings() -> dict[str, str]:
    """What both jobs are limited to, the unit's also as systemd believes it is."""
    return {
        **{name: (CPU / JOB / name).read_text().strip() for name in SETTINGS},
        "unit": str(read_quota_us(UNIT_JOB)),
        "property": show("two.service", "CPUQuotaPerSecUSec"),
    }


def is_lowered() -> bool:
    """Both of them."""
    return max(read_quota_us(JOB), read_quota_us(UNIT_JOB)) < QUOTA_US


def dpkg(*arguments: str) -> dict[str, Any]:
    return run("dpkg", "--force-unsafe-io", *arguments)


def find_deb(folder: str) -> str:
    return glob.glob(f"/in/{folder}/*.deb")[0]


def states() -> dict[str, str]:
    return {unit: f"{show(unit, 'LoadState')} {show(unit, 'ActiveState')}" for unit in (UNIT, SCHEDULER)}


def watch_while(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do it, and look at the jobs' quotas, whether the agent lives and whether files are being replaced, all the time.

    ``lowered_alone_s`` is the longest time in which a quota was lowered and no agent was there to raise it.
    """
    pid = show(UNIT, "MainPID")
    over = threading.Event()
    seen: dict[str, Any] = {"lowered_alone_s": 0.0, "while_unpacking": [], "looks": 0}

    def look() -> None:
        alone_since_s = None
        while not over.wait(0.002):
            seen["looks"] += 1
            now_s, unpacking = time.monotonic(), os.path.exists(f"{UNPACKED}.dpkg-new")
            quota = min(read_quota_us(JOB), read_quota_us(UNIT_JOB))
            if unpacking and quota not in seen["while_unpacking"]:
                seen["while_unpacking"].append(quota)
            if quota < QUOTA_US and not is_running(pid) and show(UNIT, "MainPID") in ("0", pid):
                alone_since_s = alone_since_s or now_s
                seen["lowered_alone_s"] = max(seen["lowered_alone_s"], now_s - alone_since_s)
            else:
                alone_since_s = None

    thread = threading.Thread(target=look)
    thread.start()
    try:
        answer = action()
    finally:
        over.set()
        thread.join()
    return {"answer": answer, "old_pid": pid, **seen}


def is_running(pid: str) -> bool:
    return pid != "0" and os.path.exists(f"/proc/{pid}")


def jobs() -> dict[str, Any]:
    """Two light loads; the settings of the cgroup are nobody's default."""
    load = subprocess.Popen([sys.executable, "-c", LIGHT_LOAD])
    for hierarchy in (CPU, UNIFIED):
        (hierarchy / JOB).mkdir(parents=True)
        # systemd removes empty v1 cgroups that it does not know at its next daemon-reload: never leave it empty.
        (hierarchy / JOB / "cgroup.procs").write_text(str(load.pid))
    for name, value in SETTINGS.items():
        (CPU / JOB / name).write_text(value)
    start = ["systemd-run", "--quiet", "--unit=two", "--slice=batch.slice", "-pCPUQuota=100%", "-pCPUAccounting=yes"]
    answer = run(*start, sys.executable, "-c", LIGHT_LOAD)
    return {"answer": answer, "settings": read_settings()}


def install() -> dict[str, Any]:
    """The version before, on a host that never saw it."""
    answer = dpkg("--install", find_deb("before"))
    return {
        "answer": answer,
        "states": states(),
        "enabled": [systemctl("is-enabled", unit)["output"].strip() for unit in (UNIT, SCHEDULER)],
        "version": run("cpumond", "--version")["output"],
        "user": run("getent", "passwd", "cpumond")["output"],
        "password": run("getent", "shadow", "cpumond")["output"].partition(":")[2].partition(":")[0],
        "verify": run("systemd-analyze", "verify", "--man=no", "cpumond.service", f"{SCHEDULER}.service"),
        "completion": run("bash", "-c", COMPLETE),
        "bytecode": len(glob.glob(f"{os.path.dirname(UNPACKED)}/**/*.pyc", recursive=True)),
        "settings": read_settings(),
    }


def enable() -> dict[str, Any]:
    """``systemctl enable --now`` with the configuration as shipped."""
    answer = systemctl("enable", "--now", UNIT)
    scheduler = systemctl("start", SCHEDULER)
    return {
        "answer": answer,
        "scheduler": scheduler,
        "states": states(),
        "status_text": show(UNIT, "StatusText"),
        "journal": run("journalctl", "-u", UNIT, "-o", "cat", "--no-pager")["output"],
        "settings": read_settings(),
    }


def shadow() -> dict[str, Any]:
    """Told where jobs are and nothing else, the agent decides and writes nothing."""
    write_file("/etc/cpumond/conf.d/50-jobs.toml", JOBS)
    # cpu and cpuacct are mounted apart here, and systemd puts units into the first alone: CPU time is that of cgroup2.
    lines = Path("/proc/self/mountinfo").read_text().splitlines(keepends=True)
    write_file(MOUNTS, "".join(line for line in lines if "cpuacct" not in line))
    answer = systemctl("restart", UNIT)

    return {
        "answer": answer,
        "decided_s": wait(lambda: read_wanted_cores() < 1.0),
        "status": run("cpumond", "status")["output"],
        "settings": read_settings(),
    }


def read_wanted_cores() -> float:
    """What the agent would set, from its metrics."""
    with urllib.request.urlopen("http://127.0.0.1:9756/metrics", timeout=10) as answer:
        found = re.search(r"^cpumond_job_monitor_cpu_limit_cores\{.*\} (.*)$", answer.read().decode(), re.MULTILINE)
    return float(found[1]) if found else math.inf


def reclaim() -> dict[str, Any]:
    """Then it is allowed to."""
    write_file("/etc/cpumond/conf.d/60-reclaim.toml", RECLAIM)
    answer = systemctl("reload", UNIT)
    return {"answer": answer, "lowered_s": wait(is_lowered)}


def upgrade() -> dict[str, Any]:
    """With the agent running and the job's limit lowered."""
    write_file("/var/lib/cpumond-scheduler/mark", "")
    seen = watch_while(lambda: dpkg("--install", find_deb("now")))
    return {
        **seen,
        "version": run("cpumond", "--version")["output"],
        "states": states(),
        "new_pid": show(UNIT, "MainPID"),
        "lowered_again_s": wait(is_lowered),
        "configuration": Path(CONFIG).read_text(),
        "changed_files": run("dpkg", "--verify", "cpumond")["output"],
        "left_behind": os.path.exists("/run/cpumond.stopped"),
        "scheduler_state": os.path.exists("/var/lib/cpumond-scheduler/mark"),
    }


def upgrade_stopped() -> dict[str, Any]:
    """What the operator stopped stays off; its limits are the original ones before and after."""
    stop = systemctl("stop", UNIT, SCHEDULER)
    return {"stop": stop, "answer": dpkg("--install", find_deb("now")), "states": states(), "settings": read_settings()}


def upgrade_with_wrong_config() -> dict[str, Any]:
    """The new agent refuses its configuration: the installation is complete all the same, with the limits restored."""
    start = systemctl("start", UNIT)
    lowered_s = wait(is_lowered)
    write_file("/etc/cpumond/conf.d/70-wrong.toml", WRONG)
    seen = watch_while(lambda: dpkg("--install", find_deb("now")))
    result = {
        **seen,
        "start": start,
        "lowered_s": lowered_s,
        "installed": run("dpkg-query", "--show", "--showformat=${Status}", "cpumond")["output"],
        "states": states(),
        "settings": read_settings(),
    }
    os.unlink("/etc/cpumond/conf.d/70-wrong.toml")
    systemctl("reset-failed", UNIT)
    return result


def remove() -> dict[str, Any]:
    start = systemctl("start", UNIT)
    lowered_s = wait(is_lowered)
    seen = watch_while(lambda: dpkg("--remove", "cpumond"))
    return {
        **seen,
        "start": start,
        "lowered_s": lowered_s,
        "settings": read_settings(),
        "states": states(),
        "program": [path for path in ("/usr/bin/cpumond", "/usr/lib/cpumond") if os.path.lexists(path)],
        "configuration": sorted(path.name for path in Path("/etc/cpumond").rglob("*.toml")),
        "state": os.path.isdir("/var/lib/cpumond"),
    }


def purge() -> dict[str, Any]:
    """The agent was killed where nothing put the limits back, and nobody noticed.

    Run by root, it may tell systemd about the unit's limit without polkit: that has to come back as well.
    """
    answer = dpkg("--install", find_deb("now"))
    after_install = states()
    systemctl("stop", UNIT)
    with open("/out/agent.log", "w") as log:
        agent = subprocess.Popen(["cpumond", "agent", "--config", CONFIG], stdout=log, stderr=log)
        lowered_s = wait(lambda: is_lowered() and read_settings()["property"] != "1s")
        agent.send_signal(signal.SIGKILL)
        agent.wait()
    still_lowered = read_settings()
    result = dpkg("--purge", "cpumond")
    apart = ("/proc", "/sys", "/in", "/out", "/machine", "/var/log")
    look = ["find", "/", "(", *" -o ".join(f"-path {path}" for path in apart).split(), ")", "-prune"]
    return {
        "install": answer,
        "after_install": after_install,
        "lowered_s": lowered_s,
        "still_lowered": still_lowered,
        "answer": result,
        "settings": read_settings(),
        "left": run(*look, "-o", "-name", "*cpumond*", "-print")["output"].splitlines(),
        "left_configuration": os.path.lexists("/etc/cpumond"),
        "states": states(),
        "known": run("dpkg-query", "--show", "cpumond")["code"],
        "user": run("getent", "passwd", "cpumond")["code"],
    }


live_through(
    (jobs, install, enable, shadow, reclaim, upgrade, upgrade_stopped, upgrade_with_wrong_config, remove, purge)
)
