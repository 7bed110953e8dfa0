"""Runs inside the guest: the executor of kind "systemd" with a real systemd; leaves what it saw in /out/facts.json.

``test_systemd_executor.py`` on the host judges the facts. A step that fails leaves its traceback as its fact, and the
later steps still run. As ``systemd_executor.py NAME`` it is one of the processes of a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import select
import shutil
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
from guest_tools import (
    DEADLINE_S,
    install_files,
    live_through,
    read_rights,
    run,
    systemctl,
    wait,
    write_file,
)

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
    """Units and cgroups of jobs that exist."""
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


def processes_with(word: str) -> list[str]:
    """Ids of living processes with this word in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and word.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(entry.name)
    return found


class Driver:
    """An executor and what it told so far."""

    def __init__(self) -> None:
        self.executor = SystemdExecutor(JobCgroupTree(open_hierarchies(), ""))
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
        """Start a job and wait for its end: everything about it, and how long it took."""
        begin_s = time.monotonic()
        self.start(job_id, *argv, **options)
        first = self.take(job_id, Started, NotStarted)
        started_s = time.monotonic() - begin_s
        if isinstance(first, Started):
            self.take(job_id, Ended)
        return {"events": self.events_of(job_id), "started_s": started_s, "took_s": time.monotonic() - begin_s}

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


# ---- the steps


def install() -> dict[str, Any]:
    """The slices as a package would install them; the memory controller becomes systemd's, as on a real host."""
    install_files({f"systemd/{name}": f"/usr/lib/systemd/system/{name}" for name in (JOBS_SLICE, IDLE_SLICE)})
    Path("/var/lib/cpumond-jobs").mkdir(mode=0o711)
    closed = () if IS_V2 else ("memory", "pids")
    answers = [run("mount", "-o", "remount,bind,rw", f"/sys/fs/cgroup/{name}") for name in closed]
    answers += [systemctl("daemon-reexec"), systemctl("daemon-reload")]
    return {"answers": answers}


def exits() -> dict[str, Any]:
    """How jobs end, and what is told about it."""
    with driver() as d:
        result = {
            "zero": d.run("exit-0", "true"),
            "three": d.run("exit-3", *sh("exit 3")),
            "like_systemd": d.run("exit-203", *sh("exit 203")),
            "term": d.run("term", *sh("kill -TERM $$")),
            "kill": d.run("kill", *sh("kill -KILL $$")),
            "segv": d.run("segv", *sh("ulimit -c 0; kill -SEGV $$")),
            "busy": d.run("busy", "python3", "-c", "import time\nwhile time.process_time() < 0.3: pass"),
            "memory": d.run("memory", "python3", "-c", f"len(bytearray({64 * MiB}))"),
        }
        return {**result, "left": left_over()}


def refusals() -> dict[str, Any]:
    """What cannot be started, and why."""
    os.makedirs("/root/only", mode=0o700, exist_ok=True)
    os.chmod("/root", 0o700)
    write_file(FOR_ROOT, "#!/bin/sh\n", 0o755)
    write_file("/usr/local/bin/bad-interpreter", "#!/no/such/interpreter\n", 0o755)
    with driver() as d:
        result = {
            "program": d.run("no-program", "no-such-program"),
            "path": d.run("no-path", "/no/such/program"),
            "not_executable": d.run("not-x", "/etc/hostname"),
            "not_for_user": d.run("not-for-user", FOR_ROOT, user="nobody"),
            "directory": d.run("no-directory", "true", working_directory="/no/such/directory"),
            "closed_directory": d.run("closed-directory", "true", working_directory="/root/only", user="nobody"),
            "user": d.run("no-user", "true", user="nosuchuser"),
            "odd_user": d.run("odd-user", "true", user="no such:user"),
            "id": d.run("a/b", "true"),
            "empty": d.run("empty"),
            "zero_byte": d.run("zero-byte", "echo", "a\0b"),
            "environment": d.run("odd-environment", "true", environment={"a-b": "1"}),
            "interpreter": d.run("interpreter", "/usr/local/bin/bad-interpreter"),
        }
        result["after"] = d.run("after-all-that", "true")
        return {**result, "left": left_over()}


def setting() -> dict[str, Any]:
    """Environment, arguments, user, directory."""
    script = 'printf "%s\\n" "$@"; echo "A=$A B=$B"; id -un; pwd; grep SigIgn /proc/self/status'
    environment = {"PATH": "/opt/mine:/usr/bin:/bin", "A": "x y $HOME %n", "B": 'quo"te\\'}
    write_file("/opt/mine/my-program", "#!/bin/sh\necho mine\n", 0o755)
    with driver() as d:
        arguments = ["$HOME", "${A}", "%n", "a b", "", '"', "'", "\\", ";", "line\nfeed"]
        result = d.run(
            "setting", *sh(script, *arguments), environment=environment, user="nobody", working_directory="/usr/lib"
        )
        mine = d.run("mine", "my-program", environment=environment)
        return {**result, "stdout": d.log("setting", "stdout"), "mine": mine, "mine_log": d.log("mine", "stdout")}


def quota() -> dict[str, Any]:
    """The limits of a running job, in systemd and in the kernel."""
    with driver() as d:
        d.start("quota", "sleep", "60", cpu_limit=0.5, memory_limit=64 * MiB)
        started = d.take("quota", Started)
        names = ("CPUQuotaPerSecUSec", "CPUQuotaPeriodUSec", "MemoryMax", "Slice", "ControlGroup", "MainPID")
        unit = "cpumond-job-quota.service"
        shown = {name: systemctl("show", "-p", name, "--value", unit)["output"].strip() for name in names}
        files = read_quota(started.cgroup)
        files["cgroup.procs"] = Path(
            "/sys/fs/cgroup", "" if IS_V2 else "cpu", started.cgroup, "cgroup.procs"
        ).read_text()
        name = "memory.max" if IS_V2 else "memory.limit_in_bytes"
        limit = Path("/sys/fs/cgroup", "" if IS_V2 else "memory", started.cgroup, name)
        files["memory"] = limit.read_text() if limit.exists() else "none"
        age_s = time.time() - started.start_time
        d.executor.kill("quota")
        d.take("quota", Ended)
        return {"show": shown, "files": files, "age_s": age_s, "events": d.events_of("quota"), "left": left_over()}


def read_idle() -> bool:
    """Whether the slice of jobs on reclaimed CPU is in the idle class."""
    return IdleParent(open_hierarchies(), IDLE_SLICE).is_set()


def show(unit: str, *names: str) -> dict[str, str]:
    """Properties of a unit, in systemd's words."""
    return {name: systemctl("show", "-p", name, "--value", unit)["output"].strip() for name in names}


def reclaimed() -> dict[str, Any]:
    """Jobs on reclaimed CPU: where they are, what systemd knows of it, over reloads, by an agent that comes back."""
    kinds = {
        "ordinary": {"reclaimed": False},
        "plain": {"reclaimed": True, "has_ceiling": False},
        "capped": {"reclaimed": True},
    }
    unit_names = ("Slice", "CPUWeight", "CPUQuotaPerSecUSec", "OOMScoreAdjust")
    cpu = Path("/sys/fs/cgroup", "" if IS_V2 else "cpu")
    weight_name = "cpu.weight" if IS_V2 else "cpu.shares"
    started = {}

    def look() -> dict[str, Any]:
        return {
            "idle": read_idle(),
            "weights": {name: (cpu / cgroup / weight_name).read_text() for name, cgroup in started.items()},
            "quotas": {name: read_quota(cgroup)["cpu.cfs_quota_us"] for name, cgroup in started.items()},
            "slice": show(IDLE_SLICE, "ActiveState", "CPUWeight", "ControlGroup"),
        }

    result: dict[str, Any] = {"before": read_idle()}
    with driver() as d:
        for name, options in kinds.items():
            d.start(name, "sleep", "65.5", cpu_limit=0.5, **options)
            started[name] = d.take(name, Started).cgroup
        result["started"] = started
        result["units"] = {name: show(f"cpumond-job-{name}.service", *unit_names) for name in kinds}
        pids = {name: show(f"cpumond-job-{name}.service", "MainPID")["MainPID"] for name in kinds}
        result["scores"] = {name: int(Path("/proc", pid, "oom_score_adj").read_text()) for name, pid in pids.items()}
        result["looks"] = {"first": look()}
        for verb in ("daemon-reload", "daemon-reexec"):
            answer = systemctl(verb)
            d.run(f"after-{verb}", "true")
            result["looks"][verb] = {**look(), "answer": answer}
        (cpu / IDLE_SLICE / "cpu.idle").write_text("0\n")
        result["cleared"] = read_idle()
    with driver(*kinds) as d:
        result["recovered"] = d.recovered  # type: ignore[attr-defined]
        d.run("another", "true", reclaimed=True)
        result["looks"]["repaired"] = look()
        for name in kinds:
            d.executor.kill(name)
            d.take(name, Ended)
        result["ends"] = {name: d.events_of(name) for name in (*kinds, "another")}
    told = run("journalctl", "--no-pager", "-o", "cat", "_PID=1", "-g", r"Failed to set 'cpu\.")["output"]
    result["complaints"] = sorted(set(told.splitlines()))
    return {**result, "left": left_over()}


def out_of_memory() -> dict[str, Any]:
    with driver() as d:
        result = d.run("hungry", "python3", "-c", f"len(bytearray({256 * MiB}))", memory_limit=32 * MiB)
        return {**result, "left": left_over()}


def stubborn() -> dict[str, Any]:
    """A job that ignores SIGTERM: interrupt is heard by all of its processes, kill ends them."""
    script = 'trap "echo heard >&2" TERM; (trap "echo child heard >&2" TERM; echo one; while :; do sleep 0.1; done) & '
    script += "echo other; while :; do sleep 0.1; done"
    with driver() as d:
        d.start("stubborn", *sh(script))
        d.take("stubborn", Started)
        ready_s = wait(lambda: sorted(d.log("stubborn", "stdout")[0].split()) == ["one", "other"])
        d.executor.interrupt("stubborn")
        heard_s = wait(lambda: len(d.log("stubborn", "stderr")[0].splitlines()) >= 2)
        still = d.take("stubborn", Ended, deadline_s=0.5)
        begin_s = time.monotonic()
        d.executor.kill("stubborn")
        d.executor.kill("stubborn")
        d.executor.kill("nobody-knows-this")
        d.executor.interrupt("nobody-knows-this")
        d.take("stubborn", Ended)
        return {
            "ready_s": ready_s,
            "heard_s": heard_s,
            "stderr": d.log("stubborn", "stderr"),
            "ended_early": still is not None,
            "killed_s": time.monotonic() - begin_s,
            "events": d.events_of("stubborn"),
            "left": left_over(),
        }


def obedient() -> dict[str, Any]:
    with driver() as d:
        d.start("obedient", "sleep", "60")
        d.executor.interrupt("obedient")  # while it is being started
        d.take("obedient", Ended)
        return {"events": d.events_of("obedient"), "left": left_over()}


def killed_at_start() -> dict[str, Any]:
    """Kill right after start, at once and a little later each time: always one end, and nothing stays."""
    with driver() as d:
        for number in range(20):
            d.start(f"early-{number}", "sleep", "61.5")
            time.sleep(0.001 * number)
            d.executor.kill(f"early-{number}")
        ends = [d.take(f"early-{number}", Ended, NotStarted) for number in range(20)]
        return {
            "kinds": [[event["kind"] for event in d.events_of(f"early-{number}")] for number in range(20)],
            "ended": [end is not None for end in ends],
            "sleeping": processes_with("61.5"),
            "left": left_over(),
        }


def forks_away() -> dict[str, Any]:
    """The main process ends; what it left running, in another session and deaf to SIGTERM, must go too."""
    script = "setsid sh -c 'trap \"\" TERM; echo $$ >/tmp/left-pid; while :; do sleep 0.05; done' & "
    script += "while ! [ -s /tmp/left-pid ]; do sleep 0.01; done; exit 7"
    with driver() as d:
        result = d.run("forks", *sh(script))
        pid = int(Path("/tmp/left-pid").read_text())
        return {**result, "alive": is_alive(pid), "left": left_over()}


def logs() -> dict[str, Any]:
    with driver() as d:
        script = 'for i in $(seq 1 500); do echo "line $i"; done; echo "<3>to stderr" >&2; printf "no end"'
        d.run("talk", *sh(script))
        d.run("silent", "true")
        d.run("short-lived", *sh("for i in $(seq 1 200); do /bin/echo $i; /bin/echo e$i >&2; done"))
        d.run("long", "python3", "-c", "print('x' * 200_000); print('\\xe9\\x01 end')")
        return {
            "all": d.log("talk", "stdout", 100_000),
            "tail": d.log("talk", "stdout", 20),
            "none": d.log("talk", "stdout", 0),
            "stderr": d.log("talk", "stderr"),
            "silent": d.log("silent", "stdout"),
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
    states = {name: sub_state(name) for name in (*own_jobs(), "unknown-lives", "unknown-ended")}
    answers = [systemctl("daemon-reload"), systemctl("daemon-reexec")]
    begin_s = time.monotonic()
    with driver(*own_jobs(), "never-heard-of") as d:
        took_s = time.monotonic() - begin_s
        os.unlink("/tmp/live")
        for name in (*own_jobs(), "never-heard-of"):
            d.take(name, Ended)
        log = d.log("unknown-lives", "stdout")
        result = {
            "ready_s": ready_s,
            "settled_s": settled_s,
            "states": states,
            "reload": answers,
            "recovered": d.recovered,  # type: ignore[attr-defined]
            "took_s": took_s,
            "events": {name: d.events_of(name) for name in (*own_jobs(), "never-heard-of")},
            "unknown": {name: sub_state(name) for name in ("unknown-lives", "unknown-ended")},
            "unknown_processes": len(processes_with("62.5")),
            "log_of_unknown": log,
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
    """An operator stops the unit of a job."""
    with driver() as d:
        d.start("by-hand", *sh("trap 'exit 6' TERM; echo ready; while :; do sleep 0.02; done"))
        d.take("by-hand", Started)
        wait(lambda: "ready" in d.log("by-hand", "stdout")[0])
        systemctl("stop", "cpumond-job-by-hand.service")
        d.take("by-hand", Ended)
        return {"events": d.events_of("by-hand"), "left": left_over()}


def read_delay_s() -> float:
    """How long this thread was ready to run and did not: the host is busy with other work, too."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def many() -> dict[str, Any]:
    """Twenty in a row, then twenty at once."""
    with driver() as d:
        row = [d.run(f"row-{number}", *sh(f"exit {number}")) for number in range(20)]
        begin_s = time.monotonic()
        calls_s = []
        for number in range(20):
            call_s, delay_s = time.monotonic(), read_delay_s()
            d.start(f"once-{number}", *sh(f"exit {number}"))
            calls_s.append(time.monotonic() - call_s - (read_delay_s() - delay_s))
        codes = [getattr(d.take(f"once-{number}", Ended, NotStarted), "exit_code", None) for number in range(20)]
        return {
            "row": [one["events"][-1].get("exit_code") for one in row],
            "started_s": [one["started_s"] for one in row],
            "took_s": [one["took_s"] for one in row],
            "once": codes,
            "once_s": time.monotonic() - begin_s,
            "longest_call_s": max(calls_s),
            "left": left_over(),
            "threads": len(os.listdir("/proc/self/task")),
        }


def close_with_jobs() -> dict[str, Any]:
    """The agent ends in order: its jobs go on, and a later one finds them."""
    with driver() as d:
        d.start("goes-on", "sleep", "63.5")
        d.take("goes-on", Started)
        begin_s = time.monotonic()
    closed_s = time.monotonic() - begin_s
    alive = processes_with("63.5")
    with driver("goes-on") as d:
        recovered = d.recovered  # type: ignore[attr-defined]
        d.executor.kill("goes-on")
        d.take("goes-on", Ended)
        return {
            "closed_s": closed_s,
            "alive": len(alive),
            "recovered": recovered,
            "events": d.events_of("goes-on"),
            "descriptors": len(os.listdir("/proc/self/fd")),
        }


def no_rights() -> None:
    """As another user than root: what recover says."""
    user = pwd.getpwnam("nobody")
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    say_problem()


def say_problem() -> None:
    one = Driver()
    try:
        one.recover()
    except Exception as error:
        print(json.dumps({"type": type(error).__name__, "text": str(error)}))
    one.executor.close()


def problems() -> dict[str, Any]:
    """No rights, no bus, no library."""
    result = {"rights": run(sys.executable, __file__, "no_rights")}
    no_bus = {**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": "unix:path=/run/no-such-socket"}
    result["bus"] = run(sys.executable, __file__, "say_problem", env=no_bus)
    hidden = "import sys; sys.modules['dbus_fast'] = None; sys.path[:0] = ['/in', '/in/site']; "
    hidden += "import importlib.util as u; s = u.spec_from_file_location('guest', sys.argv[1]); "
    hidden += "m = u.module_from_spec(s); s.loader.exec_module(m); m.say_problem()"
    return {**result, "library": run(sys.executable, "-c", hidden, __file__)}


# ---- in the hardened service


SERVICE_TEST_CONF = """[Service]
ExecStart=
ExecStart=/usr/bin/python3 /in/systemd_executor.py in_service
ExecStopPost=
WatchdogSec=0
Restart=no
"""


def in_service() -> None:
    """What the agent does with jobs, in its sandbox: a directory for the job's user, jobs, their logs."""
    result: dict[str, Any] = {}
    try:
        user = pwd.getpwnam("nobody")
        folder = "/var/lib/cpumond-jobs/sandboxed"
        os.mkdir(folder)
        os.chmod(folder, 0o711)  # noqa: S103 - as the agent makes it
        os.mkdir(f"{folder}/work")
        os.chown(f"{folder}/work", user.pw_uid, user.pw_gid)
        os.chmod(f"{folder}/work", 0o700)
        with driver() as d:
            script = "id -un; pwd; touch /var/lib/cpumond-jobs/sandboxed/work/made; echo oops >&2; exit 4"
            result["job"] = d.run("sandboxed", *sh(script), user="nobody", working_directory=f"{folder}/work")
            result["stdout"] = d.log("sandboxed", "stdout")
            result["stderr"] = d.log("sandboxed", "stderr")
            result["home"] = d.run("at-home", "/home/somebody/program", user="nobody", working_directory="/tmp")
            result["reclaimed"] = d.run("behind", "true", user="nobody", working_directory="/tmp", reclaimed=True)
            result["idle"] = read_idle()
            d.start("stays", "sleep", "64.5")
            result["stays"] = msgspec.to_builtins(d.take("stays", Started))
        result["made"] = os.listdir(f"{folder}/work")
        shutil.rmtree(folder)
        result["removed"] = not os.path.exists(folder)
        result["status"] = read_rights("self")
        result["run"] = sorted(os.listdir("/run"))
        for path in ("/etc/made", "/usr/made", "/var/made", "/var/lib/cpumond-jobs/made", "/var/lib/cpumond/made"):
            try:
                Path(path).touch()
            except OSError as error:
                result[path] = error.strerror
            else:
                result[path] = "written"
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
    exposure = run("systemd-analyze", "security", "--no-pager", "cpumond")["output"].strip().splitlines()[-1]
    modes = {path: oct(os.stat(path).st_mode & 0o777) for path in ("/var/lib/cpumond", "/var/lib/cpumond-jobs")}
    stop = systemctl("stop", "cpumond")
    alive = len(processes_with("64.5"))
    with driver("stays") as d:
        recovered = d.recovered  # type: ignore[attr-defined]
        d.executor.kill("stays")
        d.take("stays", Ended)
    return {
        **result,
        "answers": answers,
        "verify": verify,
        "start": start,
        "stop": stop,
        "exposure": exposure,
        "modes": modes,
        "alive_after_stop": alive,
        "recovered": recovered,
        "left": left_over(),
    }


STEPS = (
    install, exits, refusals, setting, quota, reclaimed, out_of_memory, stubborn, obedient, killed_at_start, forks_away,
    logs, recovery, reloads, by_hand, many, close_with_jobs, problems, service, bus_restart,
)  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 1:
        globals()[sys.argv[1]]()
    else:
        live_through(STEPS)
