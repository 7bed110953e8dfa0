"""Runs inside the guest: the Debian package from installation to purge, with a job whose limit the agent lowers."""

import contextlib
import glob
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from guest_tools import LIGHT_LOAD, journal_after, live_through, run, show, systemctl, wait, write_file

UNIT = "cpumond"
SCHEDULER = "cpumond-scheduler"
CPU = Path("/sys/fs/cgroup/cpu")
CPUACCT = Path("/sys/fs/cgroup/cpuacct")
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
README = json.loads(Path("/in/readme.json").read_text())
"""Taken from it by the host's test: the ``lines`` of an installation by name, the ``toml``; settings ``mode``,
``weight`` and ``quota`` of a roll-out."""
FAST = f'mountinfo = "{MOUNTS}"\n[monitor]\ncheck_period = 200\nmin_cpu_limit = 0.1\n'
OTHER_JOBS = """
managed_roots = ["jobs", "batch.slice"]
[[source]]
kind = "glob"
pattern = "jobs/*"
cpu_limit = 1.0
"""
CONF_D = Path("/etc/cpumond/conf.d")
WRONG = "[monitor]\nno_such_option = 1\n"
MARKER = "/run/cpumond.not-restored"
STATES = ("/var/lib/cpumond/originals.state", "/run/cpumond/originals.state")
POLICY = "/usr/sbin/policy-rc.d"
JOBS_DIR = Path("/var/lib/cpumond-jobs")
UNPACKED = "/usr/lib/cpumond/lib/python3.11/site-packages/cpumond/__init__.py"
SHELLS = {
    # How each is started, with no configuration but that of packages, and what it does first.
    "bash": (["bash", "--noprofile", "--norc", "-i"], ". /usr/share/bash-completion/bash_completion"),
    "zsh": (["zsh", "-f", "-i"], "autoload -Uz compinit && compinit -u -D"),
    "fish": (["fish", "-i"], "true"),
}
PERSON = "/tmp/person"
"""Whose terminals those are."""
PAGES = ("8 cpumond", "5 cpumond.toml", "5 cpumond-scheduler.toml", "1 cpumond-operation")


def read_quota_us(job: str) -> int:
    return int((CPU / job / "cpu.cfs_quota_us").read_text())


def read_settings() -> dict[str, str]:
    """What both jobs are limited to, the unit's also as systemd believes it is."""
    return {
        **{name: (CPU / JOB / name).read_text().strip() for name in SETTINGS},
        "unit": str(read_quota_us(UNIT_JOB)),
        "property": show("two.service", "CPUQuotaPerSecUSec"),
    }


def read_shares() -> list[int]:
    return [int((CPU / job / "cpu.shares").read_text()) for job in (JOB, UNIT_JOB)]


def is_lowered() -> bool:
    return max(read_quota_us(JOB), read_quota_us(UNIT_JOB)) < QUOTA_US


def type_lines(name: str, folder: str = "/") -> dict[str, Any]:
    """Some of the README's lines, as somebody types them who has nothing to answer."""
    return run("sh", "-c", f"PATH=/root/bin:$PATH; cd {folder}; {README['lines'][name]}")


def dpkg(*arguments: str) -> dict[str, Any]:
    return run("dpkg", "--force-unsafe-io", *arguments)


def find_deb(folder: str) -> str:
    return glob.glob(f"/in/{folder}/dist/*.deb")[0]


def states() -> dict[str, str]:
    return {unit: f"{show(unit, 'LoadState')} {show(unit, 'ActiveState')}" for unit in (UNIT, SCHEDULER)}


def watch_while(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do it and watch; ``lowered_alone_s``: how long a quota was lowered at most with no agent there to raise it."""
    pid = show(UNIT, "MainPID")
    over = threading.Event()
    seen: dict[str, Any] = {"lowered_alone_s": 0.0, "while_unpacking": [], "looks": 0, "unpacking_looks": 0}

    def look() -> None:
        alone_since_s = None
        while not over.wait(0.002):
            seen["looks"] += 1
            now_s, unpacking = time.monotonic(), os.path.exists(f"{UNPACKED}.dpkg-new")
            seen["unpacking_looks"] += unpacking
            lowest_us = min(read_quota_us(JOB), read_quota_us(UNIT_JOB))
            if unpacking and lowest_us not in seen["while_unpacking"]:
                seen["while_unpacking"].append(lowest_us)
            if lowest_us < QUOTA_US and not is_running(pid) and show(UNIT, "MainPID") in ("0", pid):
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
    for hierarchy in (CPU, CPUACCT, UNIFIED):
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
    answer = type_lines("install", "/in/before")
    return {
        "answer": answer,
        "states": states(),
        "enabled": [systemctl("is-enabled", unit)["output"].strip() for unit in (UNIT, SCHEDULER)],
        "version": run("cpumond", "--version")["output"],
        "user": run("getent", "passwd", "cpumond")["output"],
        "password": run("getent", "shadow", "cpumond")["output"].partition(":")[2].partition(":")[0],
        "verify": run("systemd-analyze", "verify", "--man=no", "cpumond.service", f"{SCHEDULER}.service"),
        "modes": {path: oct(os.stat(path).st_mode & 0o777) for path in ("/etc/cpumond", str(CONF_D))},
        "conffiles": {name: Path("/etc/cpumond", name).read_text() for name in ("cpumond.toml", "scheduler.toml")},
        "check": run("cpumond", "check-config"),
        "bytecode": len(glob.glob(f"{os.path.dirname(UNPACKED)}/**/*.pyc", recursive=True)),
        "settings": read_settings(),
    }


def shells() -> dict[str, Any]:
    """What a person has of the package in a terminal."""
    os.mkdir(PERSON)
    return {
        "completed": {shell: press_tab(shell, "cpumond ope") for shell in SHELLS},
        "pages": {page: run("man", "--pager=cat", *page.split())["output"] for page in PAGES},
    }


def press_tab(shell: str, typed: str) -> str:
    """What an interactive shell makes of ``typed`` and the Tab key: the words, each in angle brackets."""
    command, prepare = SHELLS[shell]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="vt100", HOME=PERSON)
        os.execvp(command[0], command)  # noqa: S606
    seen = ""

    def expect(pattern: str, deadline_s: float = 30.0) -> str:
        nonlocal seen
        end_s = time.monotonic() + deadline_s
        while not (found := re.search(pattern, seen)) and time.monotonic() < end_s:
            if select.select([terminal], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # the shell's end
                    seen += os.read(terminal, 65536).decode(errors="replace")
        return found[0] if found else f"not seen in {seen!r}"

    try:
        # What a command prints must not look like the line that asks for it.
        os.write(terminal, f"{prepare}; echo rea''dy\n".encode())
        expect("ready")
        # To the beginning of the line, in front of what the shell completed.
        os.write(terminal, f"{typed}\t\x01printf '<%s>' \n".encode())
        return expect(r"<cpumond><[^%>]*>")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def set_pace() -> None:
    """Short periods, and CPU time of cgroup2: cpu and cpuacct are apart here, and systemd knows only the first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines(keepends=True)
    write_file(MOUNTS, "".join(line for line in lines if "cpuacct" not in line))
    write_file(CONF_D / "05-pace.toml", FAST)


def edit() -> dict[str, Any]:
    write_file("/root/jobs.toml", README["toml"])
    write_file("/root/bin/editor", '#!/bin/sh\nexec cp /root/jobs.toml "$1"\n', 0o755)
    return type_lines("editor")


def roll_out(name: str) -> None:
    """A step of the README's: ``weight`` or ``quota``, for the other job as well."""
    write_file(CONF_D / "other-jobs.toml", OTHER_JOBS)
    write_file(CONF_D / "rollout.toml", "\n".join(["[monitor]", README["mode"], README[name]]))


def enable() -> dict[str, Any]:
    """``systemctl enable --now`` with the configuration as shipped."""
    answer = type_lines("enable")
    scheduler = systemctl("start", SCHEDULER)
    facts = {
        "answer": answer,
        "scheduler": scheduler,
        "states": states(),
        "status_text": show(UNIT, "StatusText"),
        "journal": journal_after("", UNIT),
        "settings": read_settings(),
    }
    return {**facts, "disable": systemctl("disable", "--now", UNIT)["code"]}


def shadow() -> dict[str, Any]:
    """Told where jobs are, by the README's lines and nothing else, the agent decides and writes nothing."""
    set_pace()
    CONF_D.chmod(0o700)  # somebody's token may be in there
    return {
        "answers": [edit(), type_lines("enable")],
        "decided_s": wait(lambda: read_wanted_cores() < 1.0),
        "status": run("cpumond", "status")["output"],
        "status_text": show(UNIT, "StatusText"),
        "settings": read_settings(),
    }


def read_wanted_cores() -> float:
    with urllib.request.urlopen("http://127.0.0.1:9756/metrics", timeout=60) as answer:
        found = re.search(r"^cpumond_job_monitor_cpu_limit_cores\{.*\} (.*)$", answer.read().decode(), re.MULTILINE)
    return float(found[1]) if found else math.inf


def weight() -> dict[str, Any]:
    """The first step of a roll-out: idle jobs lose their precedence and nothing else."""
    roll_out("weight")
    before = read_shares()
    answer = systemctl("reload", UNIT)
    lowered_s = wait(lambda: all(now < then for now, then in zip(read_shares(), before, strict=True)))
    settings = read_settings()
    return {"answer": answer, "before": before, "shares": read_shares(), "lowered_s": lowered_s, "settings": settings}


def quota() -> dict[str, Any]:
    """The second: limits move, weights are back, and systemd knows (polkit lets the agent tell it)."""
    roll_out("quota")
    answer = systemctl("reload", UNIT)
    lowered_s = wait(is_lowered)
    return {
        "answer": answer,
        "lowered_s": lowered_s,
        "told_s": wait(lambda: show("two.service", "CPUQuotaPerSecUSec") != "1s"),
        "shares": read_shares(),
    }


def broken_upgrade() -> dict[str, Any]:
    """The new version's preinst fails: what was stopped for it runs again, and is the old one."""
    old_pid = show(UNIT, "MainPID")
    return {
        "answer": dpkg("--install", find_deb("broken")),
        "old_pid": old_pid,
        "new_pid": show(UNIT, "MainPID"),
        "states": states(),
        "version": run("cpumond", "--version")["output"],
        "lowered_again_s": wait(is_lowered),
        "left_behind": os.path.exists("/run/cpumond.stopped"),
    }


@contextlib.contextmanager
def drop_in(text: str) -> Iterator[None]:
    path = Path(f"/run/systemd/system/{UNIT}.service.d/test.conf")
    write_file(path, text)
    systemctl("daemon-reload")
    try:
        yield
    finally:
        path.unlink()
        path.parent.rmdir()
        systemctl("daemon-reload")


def upgrade_while_ending() -> dict[str, Any]:
    """An agent that is about to end, and takes its time for it, is waited for; one that died comes back."""
    facts: dict[str, Any] = {}
    with drop_in("[Service]\nExecStopPost=/bin/sleep 2\n"):
        for name, end in (("died", ("kill", "--signal=KILL", UNIT)), ("stopped", ("stop", "--no-block", UNIT))):
            systemctl(*end)
            is_ending = wait(lambda: show(UNIT, "ActiveState") == "deactivating") is not None
            answer = dpkg("--install", find_deb("broken"))
            facts[name] = {"is_ending": is_ending, "answer": answer, "states": states()}
    return {**facts, "start": systemctl("start", UNIT), "lowered_s": wait(is_lowered)}


def upgrade() -> dict[str, Any]:
    """With the agent running and the job's limit lowered, where nobody may start or stop services: prerm has to."""
    write_file(POLICY, "#!/bin/sh\nexit 101\n", 0o755)
    write_file("/var/lib/cpumond-scheduler/mark", "")
    seen = watch_while(lambda: dpkg("--install", find_deb("now")))
    return {
        **seen,
        "version": run("cpumond", "--version")["output"],
        "states": states(),
        "new_pid": show(UNIT, "MainPID"),
        "lowered_again_s": wait(is_lowered),
        "configuration": Path(CONFIG).read_text(),
        "mode": oct(CONF_D.stat().st_mode & 0o777),
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


def remove_refused() -> dict[str, Any]:
    """The agent does not stop: it keeps its program."""
    start = systemctl("start", UNIT)
    pid = show(UNIT, "MainPID")
    with drop_in("[Unit]\nRefuseManualStop=yes\n"):
        answer = dpkg("--remove", "cpumond")
    return {
        "start": start,
        "answer": answer,
        "installed": run("dpkg-query", "--show", "--showformat=${Status}", "cpumond")["output"],
        "version": run("cpumond", "--version")["output"],
        "old_pid": pid,
        "new_pid": show(UNIT, "MainPID"),
    }


def remove() -> dict[str, Any]:
    lowered_s = wait(is_lowered)
    seen = watch_while(lambda: dpkg("--remove", "cpumond"))
    os.unlink(POLICY)
    return {
        **seen,
        "lowered_s": lowered_s,
        "settings": read_settings(),
        "states": states(),
        "program": [path for path in ("/usr/bin/cpumond", "/usr/lib/cpumond") if os.path.lexists(path)],
        "configuration": sorted(path.name for path in Path("/etc/cpumond").rglob("*.toml")),
        "state": os.path.isdir("/var/lib/cpumond"),
    }


def kill_agent() -> float | None:
    """How long an agent took to lower limits that was killed where nothing restores them; root needs no polkit."""
    with open("/out/agent.log", "w") as log:
        agent = subprocess.Popen(["cpumond", "agent", "--config", CONFIG], stdout=log, stderr=log)
        lowered_s = wait(lambda: is_lowered() and read_settings()["property"] != "1s")
        agent.send_signal(signal.SIGKILL)
        agent.wait()
    return lowered_s


def purge_unfinished() -> dict[str, Any]:
    """A limit that cannot go back, a configuration that is wrong, and a job of the executor that runs on."""
    install = dpkg("--install", find_deb("now"))
    after_install = states()
    lowered_s = kill_agent()
    # A quota above that leaves the job what it has now, and no more.
    parent = (CPU / JOB).parent / "cpu.cfs_quota_us"
    parent.write_text(str(read_quota_us(JOB)))
    write_file(CONF_D / "70-wrong.toml", WRONG)
    (JOBS_DIR / "one").mkdir(parents=True)
    job = run("systemd-run", "--quiet", "--unit=cpumond-job-one", f"-pWorkingDirectory={JOBS_DIR}/one", "sleep", "600")
    answer = dpkg("--purge", "cpumond")
    facts = {
        "install": install,
        "after_install": after_install,
        "job": job,
        "lowered_s": lowered_s,
        "answer": answer,
        "settings": read_settings(),
        "states": [os.path.exists(path) for path in STATES],
        "marker": os.path.exists(MARKER),
        "job_files": os.path.isdir(JOBS_DIR / "one"),
        "left_configuration": os.path.lexists("/etc/cpumond"),
    }
    # What the message says one can do.
    systemctl("stop", "cpumond-job-one")
    parent.write_text("-1")
    again = dpkg("--install", find_deb("now"))
    return {
        **facts,
        "again": again,
        "marker_again": os.path.exists(MARKER),
        "restore": run("cpumond", "restore"),
        "settings_again": read_settings(),
    }


def purge() -> dict[str, Any]:
    """The agent was killed where nothing put the limits back; jobs of the executor have ended."""
    set_pace()
    edit()
    roll_out("quota")
    jobs_dir = JOBS_DIR.is_dir()
    lowered_s = kill_agent()
    still_lowered = read_settings()
    result = dpkg("--purge", "cpumond")
    apart = ("/proc", "/sys", "/in", "/out", "/machine", "/var/log", "/var/cache/man", PERSON)
    look = ["find", "/", "(", *" -o ".join(f"-path {path}" for path in apart).split(), ")", "-prune"]
    return {
        "jobs_dir": jobs_dir,
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
    (
        jobs,
        install,
        shells,
        enable,
        shadow,
        weight,
        quota,
        broken_upgrade,
        upgrade_while_ending,
        upgrade,
        upgrade_stopped,
        upgrade_with_wrong_config,
        remove_refused,
        remove,
        purge_unfinished,
        purge,
    )
)
