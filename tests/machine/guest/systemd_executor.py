"""Runs inside the guest: what only the executor of kind "systemd" does; with a NAME it is a process of a step."""

import contextlib
import json
import os
import pwd
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, "/in/site")

import msgspec
from guest_tools import DEADLINE_S, install_files, live_through, run, systemctl, wait, write_file

from cpumond.core.job_cgroups import IDLE_SLICE, JOBS_SLICE
from cpumond.host.cgroup.idle import IdleParent
from cpumond.host.cgroup.job_tree import JobCgroupTree
from cpumond.host.cgroup.mounts import open_hierarchies
from cpumond.host.executor.model import Ended, Event, Launch, NotStarted, Started
from cpumond.host.executor.systemd.executor import SystemdExecutor

FOR_ROOT = "/root/only/for-root"
MiB = 1 << 20
IS_V2 = Path("/sys/fs/cgroup/cgroup.procs").exists()
SERVICE_FILES = {
    "systemd/cpumond.service": "/usr/lib/systemd/system/cpumond.service",
    "systemd/executor.conf": "/etc/systemd/system/cpumond.service.d/executor.conf",
    "systemd/cpumond.sysusers.conf": "/usr/lib/sysusers.d/cpumond.conf",
    "systemd/cpumond.tmpfiles.conf": "/usr/lib/tmpfiles.d/cpumond.conf",
}


def left_over() -> dict[str, Any]:
    units = run("systemctl", "list-units", "--all", "--plain", "--no-legend", "cpumond-job-*")["output"].split("\n")
    found = []
    for hierarchy in ("",) if IS_V2 else ("systemd", "unified", "cpu", "cpuacct", "memory"):
        found += [str(path) for path in Path("/sys/fs/cgroup", hierarchy).rglob("cpumond-job-*")]
    return {"units": [line for line in units if line], "cgroups": found}


def read_quota(cgroup: str) -> dict[str, str]:
    """In the words of version 1, whatever the layout."""
    if IS_V2:
        quota, period = Path("/sys/fs/cgroup", cgroup, "cpu.max").read_text().split()
        return {"cpu.cfs_quota_us": f"{quota}\n", "cpu.cfs_period_us": f"{period}\n"}
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    return {name: Path("/sys/fs/cgroup/cpu", cgroup, name).read_text() for name in names}


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


class Driver:
    """An executor and what it told so far."""

    def __init__(self) -> None:
        self.executor = SystemdExecutor(JobCgroupTree(open_hierarchies(), ""), "/run/cpumond-test")
        self.events: list[Event] = []

    def recover(self, *job_ids: str) -> dict[str, Any]:
        return {name: msgspec.to_builtins(started) for name, started in self.executor.recover(job_ids).items()}

    def start(self, job_id: str, *argv: str, **options: Any) -> None:
        values = {
            "environment": {"PATH": "/usr/bin:/bin"},
            "user": "",
            "working_directory": "/",
            "cpu_limit": 1.0,
            "memory_limit": 0,
            "directory": "/var/lib/cpumond-jobs",
            "max_log_bytes": MiB,
        }
        self.executor.start(Launch(job_id=job_id, argv=list(argv), **{**values, **options}))

    def take(self, job_id: str, *kinds: type, deadline_s: float = DEADLINE_S) -> Any:
        """The first event of these kinds for a job, waited for at the descriptor; None after the deadline."""
        end_s = time.monotonic() + deadline_s
        while True:
            for event in self.events:
                if event.job_id == job_id and isinstance(event, kinds):
                    return event
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return None
            if select.select([self.executor], [], [], left_s)[0]:
                self.events += self.executor.poll()

    def run(self, job_id: str, *argv: str, **options: Any) -> dict[str, Any]:
        self.start(job_id, *argv, **options)
        if isinstance(self.take(job_id, Started, NotStarted), Started):
            self.take(job_id, Ended)
        return {"events": self.events_of(job_id)}

    def events_of(self, job_id: str) -> list[dict[str, Any]]:
        named = [event for event in self.events if event.job_id == job_id]
        return [{"kind": type(event).__name__, **msgspec.to_builtins(event)} for event in named]

    def log(self, job_id: str, stream: Any, tail_bytes: int = 10_000) -> list[Any]:
        try:
            content, total = self.executor.read_log(job_id, "/var/lib/cpumond-jobs", stream, tail_bytes)
        except Exception as error:
            return [f"{type(error).__name__}: {error}", -1]
        return [content.decode(errors="backslashreplace"), total]


@contextlib.contextmanager
def driver(*job_ids: str) -> Iterator[Driver]:
    one = Driver()
    try:
        one.recovered = one.recover(*job_ids)  # type: ignore[attr-defined]
        yield one
    finally:
        one.executor.close()


def sh(script: str, *arguments: str) -> list[str]:
    return ["sh", "-c", script, "sh", *arguments]


def install() -> dict[str, Any]:
    """The slices as a package would install them; the memory controller becomes systemd's, as on a real host."""
    install_files({f"systemd/{name}": f"/usr/lib/systemd/system/{name}" for name in (JOBS_SLICE, IDLE_SLICE)})
    Path("/var/lib/cpumond-jobs").mkdir(mode=0o711)
    closed = () if IS_V2 else ("memory", "pids")
    answers = [run("mount", "-o", "remount,bind,rw", f"/sys/fs/cgroup/{name}") for name in closed]
    answers += [systemctl("daemon-reexec"), systemctl("daemon-reload")]
    return {"answers": answers}


def refusals() -> dict[str, Any]:
    """What cannot be started, and why, besides what the contract tries."""
    os.makedirs("/root/only", mode=0o700, exist_ok=True)
    os.chmod("/root", 0o700)
    write_file(FOR_ROOT, "#!/bin/sh\n", 0o755)
    write_file("/usr/local/bin/bad-interpreter", "#!/no/such/interpreter\n", 0o755)
    with driver() as d:
        result = {
            "path": d.run("no-path", "/no/such/program"),
            "not_for_user": d.run("not-for-user", FOR_ROOT, user="nobody"),
            "closed_directory": d.run("closed-directory", "true", working_directory="/root/only", user="nobody"),
            "odd_user": d.run("odd-user", "true", user="no such:user"),
            "interpreter": d.run("interpreter", "/usr/local/bin/bad-interpreter"),
        }
        result["after"] = d.run("after-all-that", "true")
        return {**result, "left": left_over()}


def read_idle() -> bool:
    return IdleParent(open_hierarchies(), IDLE_SLICE).is_set()


def logs() -> dict[str, Any]:
    with driver() as d:
        d.run("talk", *sh('echo "<3>to stderr" >&2; printf "no end"'))
        d.run("short-lived", *sh("for i in $(seq 1 200); do /bin/echo $i; /bin/echo e$i >&2; done"))
        d.run("long", "python3", "-c", "print('x' * 200_000); print('\\xe9\\x01 end')")
        return {
            "talk": [d.log("talk", "stdout"), d.log("talk", "stderr")],
            "short_lived": [d.log("short-lived", "stdout"), d.log("short-lived", "stderr")],
            "exited": d.run("exited", "/bin/echo", "only line")["events"][-1]["exit_code"],
            "exited_log": d.log("exited", "stdout"),
            "long": [len(d.log("long", "stdout", 1_000_000)[0]), d.log("long", "stdout", 1_000_000)[0][-10:]],
            "unknown": d.log("never-ran", "stdout"),
        }


def own_jobs() -> list[str]:
    return ["lives", "ends", "fails", "dies"]


def owner() -> None:
    """The process that owns an executor and is killed: it starts jobs, and says so."""
    with driver() as d:
        d.start("lives", *sh("while [ -e /tmp/live ]; do sleep 0.02; done; exit 5"))
        d.start("ends", *sh("while [ -e /tmp/hold ]; do sleep 0.02; done; exit 0"))
        d.start("fails", *sh("while [ -e /tmp/hold ]; do sleep 0.02; done; exit 44"))
        d.start("dies", *sh("while [ -e /tmp/hold ]; do sleep 0.02; done; kill -USR1 $$"))
        d.start("unknown-lives", "sleep", "62.5")
        d.start("unknown-ended", *sh("while [ -e /tmp/hold ]; do sleep 0.02; done; exit 1"))
        for name in (*own_jobs(), "unknown-lives", "unknown-ended"):
            d.take(name, Started)
        Path("/tmp/owner-ready").touch()
        signal.pause()


def sub_state(job_id: str) -> str:
    return str(systemctl("show", "-p", "SubState", "--value", f"cpumond-job-{job_id}.service")["output"]).strip()


def recovery() -> dict[str, Any]:
    """The owner of an executor is killed with SIGKILL while jobs run; some end before the next one looks."""
    for name in ("hold", "live"):
        Path("/tmp", name).touch()
    with subprocess.Popen([sys.executable, __file__, "owner"]) as process:
        ready_s = wait(lambda: os.path.exists("/tmp/owner-ready"))
        process.kill()
    os.unlink("/tmp/hold")
    ended = ("ends", "fails", "dies", "unknown-ended")
    settled_s = wait(lambda: all(sub_state(name) != "running" for name in ended))
    answers = [systemctl("daemon-reload"), systemctl("daemon-reexec")]
    begin_s = time.monotonic()
    with driver(*own_jobs(), "never-heard-of") as d:
        took_s = time.monotonic() - begin_s
        os.unlink("/tmp/live")
        for name in (*own_jobs(), "never-heard-of"):
            d.take(name, Ended)
        result = {
            "ready_s": ready_s,
            "settled_s": settled_s,
            "reload": answers,
            "recovered": d.recovered,  # type: ignore[attr-defined]
            "took_s": took_s,
            "events": {name: d.events_of(name) for name in (*own_jobs(), "never-heard-of")},
            "unknown": {name: sub_state(name) for name in ("unknown-lives", "unknown-ended")},
        }
    with driver("unknown-lives") as d:
        d.executor.kill("unknown-lives")
        d.take("unknown-lives", Ended)
        return {**result, "killed": d.events_of("unknown-lives"), "left": left_over()}


def reloads() -> dict[str, Any]:
    """daemon-reload, daemon-reexec and a new bus while jobs run and are started: none is lost."""
    with driver() as d:
        odd = ["$HOME", "${A} %n", "", '"', "'", "\\", ";", "line\nfeed", "\t", "x" * 100_000]
        script = "while ! [ -e /tmp/enough ]; do sleep 0.02; done; exit 9"
        d.start("through", *sh(script, *odd), cpu_limit=0.7, environment={"PATH": "/usr/bin:/bin", "A": "\n%n$B\"'"})
        started = d.take("through", Started)
        answers = []
        for number, verb in enumerate(("daemon-reload", "daemon-reexec", "daemon-reload", "daemon-reexec")):
            d.start(f"before-{number}", *sh(f"sleep 0.0{number}; exit {number}"))
            answers.append(systemctl(verb))
            d.start(f"after-{number}", *sh(f"exit {number}"))
        names = [f"{when}-{number}" for number in range(4) for when in ("before", "after")]
        for number in range(6):
            names.append(f"twice-{number}")
            d.start(names[-1], *sh(f"exit {number}; true $x"))
            answers += [systemctl("daemon-reload"), systemctl("daemon-reload")]
        ends = {name: msgspec.to_builtins(d.take(name, Ended, NotStarted)) for name in names}
        quota_us = read_quota(started.cgroup)["cpu.cfs_quota_us"]
        unit = "cpumond-job-through.service"
        load_state = systemctl("show", "-p", "LoadState", "--value", unit)["output"].strip()
        Path("/tmp/enough").touch()
        d.take("through", Ended)
        return {
            "ends": ends,
            "quota_us": quota_us,
            "load_state": load_state,
            "through": d.events_of("through"),
            "left": left_over(),
        }


def bus_restart() -> dict[str, Any]:
    """The bus goes away and comes back: a job that ended meanwhile is told, new ones start."""
    with driver() as d:
        for name in ("over-bus", "after-bus"):
            d.start(name, *sh(f"while ! [ -e /tmp/{name} ]; do sleep 0.02; done; exit 11"))
            d.take(name, Started)
        answer = systemctl("stop", "dbus.socket", "dbus.service")
        Path("/tmp/over-bus").touch()
        d.start("without-bus", *sh("exit 12"))
        silent = d.take("over-bus", Ended, deadline_s=0.5)
        begin_s = time.monotonic()
        back = systemctl("start", "dbus.socket", "dbus.service")
        d.take("over-bus", Ended)
        back_s = time.monotonic() - begin_s
        Path("/tmp/after-bus").touch()
        for name in ("after-bus", "without-bus"):
            d.take(name, Ended, NotStarted)
        return {
            "answers": [answer, back],
            "silent": silent is None,
            "back_s": back_s,
            **{name: d.events_of(name) for name in ("over-bus", "after-bus", "without-bus")},
            "left": left_over(),
        }


def by_hand() -> dict[str, Any]:
    with driver() as d:
        d.start("by-hand", *sh("trap 'exit 6' TERM; echo ready; while :; do sleep 0.02; done"))
        d.take("by-hand", Started)
        wait(lambda: "ready" in d.log("by-hand", "stdout")[0])
        systemctl("stop", "cpumond-job-by-hand.service")
        d.take("by-hand", Ended)
        return {"events": d.events_of("by-hand"), "left": left_over()}


def no_rights() -> None:
    user = pwd.getpwnam("nobody")
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    one = Driver()
    try:
        one.recover()
    except Exception as error:
        print(json.dumps({"type": type(error).__name__, "text": str(error)}))
    one.executor.close()


def rights() -> dict[str, Any]:
    return run(sys.executable, __file__, "no_rights")


SERVICE_TEST_CONF = """[Service]
ExecStart=
ExecStart=/usr/bin/python3 /in/systemd_executor.py in_service
ExecStopPost=
WatchdogSec=0
Restart=no
"""


def in_service() -> None:
    """What ``systemd_jobs.py`` does not ask of an agent in its sandbox: the idle class, and a job of what is hidden."""
    result: dict[str, Any] = {}
    try:
        with driver() as d:
            result["home"] = d.run("at-home", "/home/somebody/program", user="nobody", working_directory="/tmp")
            result["reclaimed"] = d.run("behind", "true", user="nobody", working_directory="/tmp", reclaimed=True)
            result["idle"] = read_idle()
    except Exception:
        result["error"] = traceback.format_exc()
    Path("/var/lib/cpumond-jobs/result.json").write_text(json.dumps(result))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.connect(os.environ["NOTIFY_SOCKET"])
        notify.send(b"READY=1")
    signal.pause()


def service() -> dict[str, Any]:
    """The shipped service with the drop-in, and the executor in it."""
    install_files(SERVICE_FILES)
    write_file("/etc/systemd/system/cpumond.service.d/test.conf", SERVICE_TEST_CONF)
    # What ProtectHome= hides from the agent, its jobs can run all the same.
    write_file("/home/somebody/program", "#!/bin/sh\nexit 21\n", 0o755)
    answers = [run("systemd-sysusers"), run("systemd-tmpfiles", "--create", "cpumond.conf"), systemctl("daemon-reload")]
    Path("/usr/bin/cpumond").symlink_to("/bin/true")
    verify = run("systemd-analyze", "verify", "--man=no", "cpumond.service", IDLE_SLICE)
    answers.append(systemctl("stop", IDLE_SLICE))
    start = systemctl("start", "cpumond")
    result = json.loads(Path("/var/lib/cpumond-jobs/result.json").read_text())
    stop = systemctl("stop", "cpumond")
    return {**result, "answers": answers, "verify": verify, "start": start, "stop": stop, "left": left_over()}


STEPS = (
    install, refusals, logs, recovery, reloads, by_hand, rights, service, bus_restart,
)  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 1:
        globals()[sys.argv[1]]()
    else:
        live_through(STEPS)
