"""Runs inside the guest: scheduler, hardened agent and jobs as units; leaves what it saw in /out/facts.json.

``test_systemd_jobs.py`` on the host judges the facts. A step that fails leaves its traceback as its fact, and the later
steps still run.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from systemd_executor import is_alive, left_over, run, sh, systemctl, wait, write_program

UNIT = "cpumond"
SCHEDULER = "http://127.0.0.1:9757"
STREAMS = ("stdout", "stderr")
NODE = "guest"
STATE_DIR = Path("/var/lib/cpumond")
JOBS_DIR = Path("/var/lib/cpumond-jobs")
QUOTA_US = 100_000
"""Of a job that ordered one core."""

WRAPPER = '#!/bin/sh\nPYTHONPATH=/in/site exec python3 -m cpumond "$@"\n'
MOUNTINFO = Path("/etc/cpumond/mountinfo")
NODE_CONFIG = f"""
node_id = "{NODE}"
mountinfo = "{MOUNTINFO}"
[scheduler]
url = "{SCHEDULER}"
heartbeat_period = "200ms"
[executor]
kind = "systemd"
user = "nobody"
"""
SCHEDULER_CONFIG = """
state_dir = "/var/lib/cpumond-scheduler"
fair_share_update_period = "50ms"
"""
MONITOR = {
    "enable_cpu_reclaim": True,
    "check_period": 100,
    "min_cpu_limit": 0.1,
    "smoothing_factor": 0.5,
    "vote_window_size": 3,
    "vote_decision_threshold": 2,
    "decrease_coefficient": 0.5,
}

facts: dict[str, Any] = {}
sleeper: dict[str, Any] = {}
"""The job that lives from step to step: its operation, id, unit, cgroup and process."""


def ask(method: str, path: str, body: Any = None) -> bytes:
    """The scheduler's answer, a refusal as well."""
    content = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{SCHEDULER}/api/v1/{path}", content, headers, method=method)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        return error.read()


def get(path: str) -> Any:
    return json.loads(ask("GET", path))


def order(*command: str, count: int = 1, cores: float = 1.0, **spec: Any) -> str:
    """Start an operation; its id."""
    task = {"job_count": count, "cpu_limit": cores, "memory_limit": 64 << 20, "command": list(command)}
    whole = {"pool": "research", "tasks": {"t": task}, "job_cpu_monitor": MONITOR, "max_failed_job_count": 1, **spec}
    return str(json.loads(ask("POST", "operations", {"spec": whole}))["id"])


def jobs_of(operation: str) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = get(f"operations/{operation}/jobs")["jobs"]
    return jobs


def wait_over(operation: str) -> dict[str, Any]:
    """The operation's last state, its jobs, and what each wrote, over the API."""
    over_s = wait(lambda: get(f"operations/{operation}")["state"] in ("completed", "failed", "aborted"))
    # The jobs of an aborted one are told to stop, and it takes a heartbeat until they are known to be gone.
    wait(lambda: not any(job["state"] in ("starting", "running", "stopping") for job in jobs_of(operation)))
    jobs = jobs_of(operation)
    logs = [
        {name: ask("GET", f"operations/{operation}/jobs/{job['id']}/log?stream={name}").decode() for name in STREAMS}
        for job in jobs
    ]
    return {"over_s": over_s, "state": get(f"operations/{operation}")["state"], "jobs": jobs, "logs": logs}


def show(unit: str, *names: str) -> dict[str, str]:
    """Properties of a unit."""
    lines = systemctl("show", "--property", ",".join(names), unit)["output"].splitlines()
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def agent_pid() -> str:
    return show(UNIT, "MainPID")["MainPID"]


def agent_log(*options: str) -> str:
    """What the agent has said; journald may be behind, so it catches up first."""
    run("journalctl", "--sync")
    return str(run("journalctl", "-u", UNIT, "-o", "cat", *options)["output"])


def processes(cgroup: str) -> list[int]:
    """Who lives in a unit's cgroup."""
    try:
        return [int(pid) for pid in Path("/sys/fs/cgroup/unified", cgroup, "cgroup.procs").read_text().split()]
    except OSError:
        return []


def read_status(pid: int | str) -> dict[str, list[str]]:
    """User and rights of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {name: words.split() for name, _, words in (line.partition(":\t") for line in lines)}
    names = ("Uid", "Gid", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
    return {name: status[name] for name in names}


def quota_us() -> int:
    return int(Path("/sys/fs/cgroup/cpu", sleeper["cgroup"], "cpu.cfs_quota_us").read_text())


def is_lowered() -> bool:
    return quota_us() <= 0.5 * QUOTA_US


def is_settled() -> bool:
    """At the least limit, 0.1 cores, for the kernel and for systemd."""
    return quota_us() == 0.1 * QUOTA_US and show(sleeper["unit"], "CPUQuotaPerSecUSec") == {
        "CPUQuotaPerSecUSec": "100ms"
    }


def is_original() -> bool:
    return quota_us() == QUOTA_US


def look() -> dict[str, Any]:
    """The sleeper as systemd, the kernel and the scheduler have it."""
    pid = sleeper["pid"]
    return {
        "unit": show(sleeper["unit"], "ActiveState", "SubState", "MainPID", "CPUQuotaPerSecUSec", "MemoryMax"),
        "quota_us": quota_us(),
        "period_us": int(Path("/sys/fs/cgroup/cpu", sleeper["cgroup"], "cpu.cfs_period_us").read_text()),
        "processes": processes(sleeper["cgroup"]),
        "alive": is_alive(pid),
        "job": next(job for job in jobs_of(sleeper["operation"]) if job["id"] == sleeper["id"]),
        "jobs": len(jobs_of(sleeper["operation"])),
    }


def wait_node(jobs: int) -> float | None:
    """Until the scheduler has heard of so many jobs from the node that is there now."""

    def is_there() -> bool:
        node = get(f"nodes/{NODE}")
        return bool(node.get("is_online")) and len(node["jobs"]) == jobs

    return wait(is_there)


# ---- the steps


def install() -> dict[str, Any]:
    """As a package would do it; the memory controller becomes systemd's, as on a real host."""
    for source, target in {
        "cpumond.service": "/usr/lib/systemd/system/cpumond.service",
        "cpumond-jobs.slice": "/usr/lib/systemd/system/cpumond-jobs.slice",
        "executor.conf": "/etc/systemd/system/cpumond.service.d/executor.conf",
        "cpumond.sysusers.conf": "/usr/lib/sysusers.d/cpumond.conf",
        "cpumond.tmpfiles.conf": "/usr/lib/tmpfiles.d/cpumond.conf",
    }.items():
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copyfile(f"/in/systemd/{source}", target)
    write_program("/usr/bin/cpumond", WRAPPER)
    answers = [run("mount", "-o", "remount,bind,rw", f"/sys/fs/cgroup/{name}") for name in ("memory", "pids")]
    answers += [run("systemd-sysusers"), run("systemd-tmpfiles", "--create", "cpumond.conf")]
    answers += [systemctl("daemon-reexec"), systemctl("daemon-reload")]
    # Where cpu and cpuacct are mounted apart, as on the host that lends this guest its kernel, systemd puts units into
    # the first only. A mountinfo without the second makes the agent take CPU time from the cgroup2 mount, where every
    # unit has a cgroup. Distributions mount both together; nobody needs this there.
    lines = Path("/proc/self/mountinfo").read_text().splitlines(keepends=True)
    MOUNTINFO.write_text("".join(line for line in lines if "cpuacct" not in line))
    Path("/etc/cpumond/cpumond.toml").write_text("")
    Path("/etc/cpumond/conf.d/node.toml").write_text(NODE_CONFIG)
    Path("/etc/cpumond/scheduler.toml").write_text(SCHEDULER_CONFIG)
    return {
        "answers": answers,
        "check": run("cpumond", "check-config", "--config", "/etc/cpumond/cpumond.toml"),
        "verify": run("systemd-analyze", "verify", "--man=no", "cpumond.service", "cpumond-jobs.slice"),
        "scheduler": run(
            "systemd-run", "--quiet", "--unit=cpumond-scheduler", "--property=StateDirectory=cpumond-scheduler",
            "/usr/bin/cpumond", "scheduler", "--config", "/etc/cpumond/scheduler.toml",
        ),
        "listens_s": wait(is_answering),
    }  # fmt: skip


def is_answering() -> bool:
    try:
        return bool(get("status"))
    except OSError:
        return False


def start() -> dict[str, Any]:
    """The agent is ready, and a node of the scheduler."""
    answer = systemctl("start", UNIT)
    online_s = wait_node(0)
    return {"answer": answer, "online_s": online_s, "node": get(f"nodes/{NODE}"), **show(UNIT, "ActiveState", "User")}


def completes() -> dict[str, Any]:
    """Two jobs at once, as another user, in directories of their own."""
    script = 'id -un; pwd; touch made; echo "$CPUMOND_JOB_ID"; echo complaint >&2'
    return {**wait_over(order(*sh(script), count=2, cores=0.5)), "left": left_over()}


def fails() -> dict[str, Any]:
    """A job's own fault, and a job that is killed by a signal."""
    by_code = wait_over(order(*sh("echo out; echo first >&2; echo the reason >&2; exit 7")))
    by_signal = wait_over(order(*sh("kill -SEGV $$")))
    no_program = wait_over(order("no-such-program"))
    return {"by_code": by_code, "by_signal": by_signal, "no_program": no_program, "left": left_over()}


def shrinks() -> dict[str, Any]:
    """A job that orders a core and sleeps: its limit in the kernel follows, and systemd's own note of it."""
    operation = order(*sh("echo begun; trap 'echo told; exit 5' TERM; while :; do sleep 0.2; done"))
    running_s = wait(lambda: any(job["state"] == "running" and job["cgroup"] for job in jobs_of(operation)))
    job = jobs_of(operation)[0]
    unit = job["cgroup"].rpartition("/")[2]
    pid = int(show(unit, "MainPID")["MainPID"])
    sleeper.update(operation=operation, id=job["id"], unit=unit, cgroup=job["cgroup"], pid=pid)
    lowered_s = wait(is_lowered)
    known_s = wait(lambda: jobs_of(operation)[0]["current_cpu_limit"] <= 0.5)
    agreed_s = wait(is_settled)
    return {
        "running_s": running_s,
        "lowered_s": lowered_s,
        "known_s": known_s,
        "agreed_s": agreed_s,
        "unit_name": unit,
        "status": read_status(pid),
        **look(),
    }


def sandbox() -> dict[str, Any]:
    """What the agent may, while it runs a job."""
    pid = agent_pid()
    root = Path(f"/proc/{pid}/root")
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    lines = run("systemd-analyze", "security", "--no-pager", UNIT)["output"].strip().splitlines()
    return {
        "status": read_status(pid),
        "run": sorted(os.listdir(root / "run")),
        "shadow": (root / "etc/shadow").read_text(),
        "writable": sorted({m[4] for m in mounts if "rw" in m[5].split(",")}),
        "exposure": lines[-1],
        "modes": {str(path): oct(path.stat().st_mode & 0o777) for path in (STATE_DIR, JOBS_DIR)},
    }


def reload() -> dict[str, Any]:
    """Another job beside the one whose limit was moved; then systemd reads its units again."""
    wait(is_settled)
    quotas = {"before": quota_us()}
    beside = wait_over(order(*sh("sleep 0.3"), cores=0.5))
    quotas["sibling"] = quota_us()
    pid = agent_pid()
    answers = []
    for verb in ("daemon-reload", "daemon-reexec"):
        answers.append(systemctl(verb))
        quotas[verb] = quota_us()
    after = wait_over(order(*sh("sleep 0.3"), cores=0.5))
    quotas["after"] = quota_us()
    return {
        "answers": answers,
        "quotas": quotas,
        "others": [beside, after],
        "same_agent": agent_pid() == pid,
        "foreign": any(word in agent_log() for word in ("foreign_write", "unit_ordered")),
        **look(),
    }


def kill() -> dict[str, Any]:
    """kill -9 of the agent: its job goes on with all it ordered, the next agent takes it over."""
    wait(is_lowered)
    old = agent_pid()
    began_s = time.monotonic()
    answer = systemctl("kill", "--signal", "KILL", UNIT)
    original_s = wait(is_original)
    meanwhile = show(sleeper["unit"], "ActiveState", "SubState", "MainPID")
    up_s = wait(lambda: show(UNIT, "ActiveState")["ActiveState"] == "active" and agent_pid() not in (old, "0"))
    lowered_s = wait(is_lowered)
    took_s = time.monotonic() - began_s
    return {
        "answer": answer,
        "original_s": original_s,
        "meanwhile": meanwhile,
        "up_s": up_s,
        "lowered_again_s": lowered_s,
        "took_s": took_s,
        "node_s": wait_node(1),
        "restarts": show(UNIT, "NRestarts")["NRestarts"],
        "journal": agent_log("--grep", "jobs_adopted"),
        **look(),
    }


def stop() -> dict[str, Any]:
    """The agent is away for a while: one job goes on with all it ordered, another ends meanwhile."""
    wait(is_lowered)
    away = order(*sh("while [ ! -e /run/go-on ]; do sleep 0.05; done; echo done; exit 0"), cores=0.5)
    wait(lambda: any(job["state"] == "running" and job["cgroup"] for job in jobs_of(away)))
    began_s = time.monotonic()
    answer = systemctl("stop", UNIT)
    took_s = time.monotonic() - began_s
    quota = quota_us()
    units = show(sleeper["unit"], "ActiveState", "SubState", "MainPID")
    Path("/run/go-on").touch()
    unit = jobs_of(away)[0]["cgroup"].rpartition("/")[2]
    ended_s = wait(lambda: show(unit, "SubState")["SubState"] == "exited")
    stopped = show(UNIT, "ActiveState", "Result")
    start = systemctl("start", UNIT)
    return {
        "answer": answer,
        "took_s": took_s,
        "original_us": quota,
        "meanwhile": units,
        "ended_s": ended_s,
        "stopped": stopped,
        "start": start,
        "away": wait_over(away),
        "lowered_again_s": wait(is_lowered),
        "node_s": wait_node(1),
        **look(),
    }


def restart() -> dict[str, Any]:
    """``systemctl restart`` while one job runs, another is just being started and a third is being stopped by hand."""
    wait(is_lowered)
    obstinate = order(*sh("trap '' TERM; echo deaf; while :; do sleep 0.1; done"), cores=0.5)
    wait(lambda: any(job["state"] == "running" and job["cgroup"] for job in jobs_of(obstinate)))
    job = jobs_of(obstinate)[0]
    unit = job["cgroup"].rpartition("/")[2]
    wait(lambda: ask("GET", f"operations/{obstinate}/jobs/{job['id']}/log?stream=stdout") == b"deaf\n")
    starting = order(*sh("sleep 0.3; exit 0"), cores=0.5)
    by_hand = systemctl("stop", "--no-block", unit)
    began_s = time.monotonic()
    answer = systemctl("restart", UNIT)
    took_s = time.monotonic() - began_s
    return {
        "answer": answer,
        "by_hand": by_hand,
        "took_s": took_s,
        "other": wait_over(starting),
        "stopped": wait_over(obstinate),
        "lowered_again_s": wait(is_lowered),
        **look(),
    }


def abort() -> dict[str, Any]:
    """The operation is aborted: its job's processes, unit and cgroup go, its log stays."""
    answer = json.loads(ask("POST", f"operations/{sleeper['operation']}/abort", {}) or b"null")
    gone_s = wait(lambda: left_over() == {"units": [], "cgroups": []})
    over = wait_over(sleeper["operation"])
    return {
        "answer": answer,
        "gone_s": gone_s,
        "over": over,
        "alive": is_alive(sleeper["pid"]),
        "left": left_over(),
        "node_s": wait_node(0),
        "sandboxes": sorted(str(path) for path in JOBS_DIR.glob("*/sandbox")),
        "status": json.loads(run("cpumond", "status", "--json")["output"]),
        "last_stop": systemctl("stop", UNIT),
        **show(UNIT, "Result", "NRestarts"),
    }


STEPS: tuple[Callable[[], dict[str, Any]], ...] = (
    install, start, completes, fails, shrinks, sandbox, reload, kill, stop, restart, abort,
)  # fmt: skip


def main() -> None:
    for step in STEPS:
        begin_s = time.monotonic()
        try:
            fact = step()
        except Exception:
            fact = {"error": traceback.format_exc()}
        facts[step.__name__] = {**fact, "took_step_s": time.monotonic() - begin_s}
        Path("/out/facts.json").write_text(json.dumps(facts, indent=1))
        if step is start and show(UNIT, "ActiveState")["ActiveState"] != "active":
            break  # nothing further can happen; the journal says why
    Path("/out/journal.txt").write_text(run("journalctl", "--no-pager", "-o", "short-precise")["output"])


main()
