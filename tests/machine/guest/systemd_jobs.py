"""Runs inside the guest: scheduler, hardened agent and jobs as units; ``test_systemd_jobs.py`` judges the facts."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import guest_tools as guest
from systemd_executor import SERVICE_FILES, is_alive, left_over, sh

UNIT = "cpumond"
SCHEDULER = "http://127.0.0.1:9757"
STREAMS = ("stdout", "stderr")
NODE = "guest"
STATE_DIR = Path("/var/lib/cpumond")
JOBS_DIR = Path("/var/lib/cpumond-jobs")
QUOTA_US = 100_000
"""Of a job that ordered one core."""

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

sleeper: dict[str, Any] = {}
"""The job that lives from step to step: its operation, id, unit, cgroup and process."""


def ask(method: str, path: str, body: Any = None) -> bytes:
    """The scheduler's answer, a refusal as well."""
    return guest.ask(method, f"{SCHEDULER}/api/v1/{path}", body)[1]


def get(path: str) -> Any:
    return json.loads(ask("GET", path))


def order(*command: str, count: int = 1, cores: float = 1.0, **spec: Any) -> str:
    task = {"job_count": count, "cpu_limit": cores, "memory_limit": 64 << 20, "command": list(command)}
    whole = {"pool": "research", "tasks": {"t": task}, "job_cpu_monitor": MONITOR, "max_failed_job_count": 1, **spec}
    return str(json.loads(ask("POST", "operations", {"spec": whole}))["id"])


def jobs_of(operation: str) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = get(f"operations/{operation}/jobs")["jobs"]
    return jobs


def wait_over(operation: str) -> dict[str, Any]:
    """The operation's last state, its jobs, and what each wrote, over the API."""
    over_s = guest.wait(lambda: get(f"operations/{operation}")["state"] in ("completed", "failed", "aborted"))
    # The jobs of an aborted one are told to stop, and it takes a heartbeat until they are known to be gone.
    guest.wait(lambda: not any(job["state"] in ("starting", "running", "stopping") for job in jobs_of(operation)))
    jobs = jobs_of(operation)
    logs = [
        {name: ask("GET", f"operations/{operation}/jobs/{job['id']}/log?stream={name}").decode() for name in STREAMS}
        for job in jobs
    ]
    return {"over_s": over_s, "state": get(f"operations/{operation}")["state"], "jobs": jobs, "logs": logs}


def show(unit: str, *names: str) -> dict[str, str]:
    lines = guest.systemctl("show", "--property", ",".join(names), unit)["output"].splitlines()
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def agent_pid() -> str:
    return show(UNIT, "MainPID")["MainPID"]


def agent_log(*options: str) -> str:
    return guest.read_journal("-u", UNIT, "-o", "cat", *options)


def processes(cgroup: str) -> list[int]:
    try:
        return [int(pid) for pid in Path("/sys/fs/cgroup/unified", cgroup, "cgroup.procs").read_text().split()]
    except OSError:
        return []


def quota_us() -> int:
    return int(Path("/sys/fs/cgroup/cpu", sleeper["cgroup"], "cpu.cfs_quota_us").read_text())


def is_lowered() -> bool:
    return quota_us() <= 0.5 * QUOTA_US


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

    return guest.wait(is_there)


def install() -> dict[str, Any]:
    """As a package would do it; the memory controller becomes systemd's, as on a real host."""
    guest.install_files({**SERVICE_FILES, "systemd/cpumond-jobs.slice": "/usr/lib/systemd/system/cpumond-jobs.slice"})
    guest.write_file("/usr/bin/cpumond", guest.WRAPPER, 0o755)
    answers = [guest.run("mount", "-o", "remount,bind,rw", f"/sys/fs/cgroup/{name}") for name in ("memory", "pids")]
    answers += [guest.run("systemd-sysusers"), guest.run("systemd-tmpfiles", "--create", "cpumond.conf")]
    answers += [guest.systemctl("daemon-reexec"), guest.systemctl("daemon-reload")]
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
        "check": guest.run("cpumond", "check-config", "--config", "/etc/cpumond/cpumond.toml"),
        "verify": guest.run("systemd-analyze", "verify", "--man=no", "cpumond.service", "cpumond-jobs.slice"),
        "scheduler": guest.run(
            "systemd-run", "--quiet", "--unit=cpumond-scheduler", "--property=StateDirectory=cpumond-scheduler",
            "/usr/bin/cpumond", "scheduler", "--config", "/etc/cpumond/scheduler.toml",
        ),
        "listens_s": guest.wait(is_answering),
    }  # fmt: skip


def is_answering() -> bool:
    try:
        return bool(get("status"))
    except OSError:
        return False


def start() -> dict[str, Any]:
    """The agent is ready, and a node of the scheduler."""
    answer = guest.systemctl("start", UNIT)
    online_s = wait_node(0)
    return {"answer": answer, "online_s": online_s, "node": get(f"nodes/{NODE}"), **show(UNIT, "ActiveState", "User")}


def shrinks() -> dict[str, Any]:
    """A job that orders a core and sleeps: its limit in the kernel follows, and systemd's own note of it."""
    operation = order(*sh("echo begun; trap 'echo told; exit 5' TERM; while :; do sleep 0.2; done"))
    guest.wait(lambda: any(job["state"] == "running" and job["cgroup"] for job in jobs_of(operation)))
    job = jobs_of(operation)[0]
    unit = job["cgroup"].rpartition("/")[2]
    pid = int(show(unit, "MainPID")["MainPID"])
    sleeper.update(operation=operation, id=job["id"], unit=unit, cgroup=job["cgroup"], pid=pid)
    lowered_s = guest.wait(is_lowered)
    known_s = guest.wait(lambda: jobs_of(operation)[0]["current_cpu_limit"] <= 0.5)
    # At the least limit, 0.1 cores, for the kernel and for systemd.
    agreed_s = guest.wait(
        lambda: (quota_us(), show(unit, "CPUQuotaPerSecUSec")) == (0.1 * QUOTA_US, {"CPUQuotaPerSecUSec": "100ms"})
    )
    return {
        "lowered_s": lowered_s,
        "known_s": known_s,
        "agreed_s": agreed_s,
        "unit_name": unit,
        "status": guest.read_rights(str(pid)),
        **look(),
    }


def sandbox() -> dict[str, Any]:
    pid = agent_pid()
    root = Path(f"/proc/{pid}/root")
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    return {
        "status": guest.read_rights(pid),
        "run": sorted(os.listdir(root / "run")),
        "shadow": (root / "etc/shadow").read_text(),
        "writable": sorted({m[4] for m in mounts if "rw" in m[5].split(",")}),
        "modes": {str(path): oct(path.stat().st_mode & 0o777) for path in (STATE_DIR, JOBS_DIR)},
    }


def kill() -> dict[str, Any]:
    """kill -9 of the agent: its job goes on with all it ordered, the next agent takes it over."""
    guest.wait(is_lowered)
    old = agent_pid()
    began_s = time.monotonic()
    answer = guest.systemctl("kill", "--signal", "KILL", UNIT)
    original_s = guest.wait(is_original)
    meanwhile = show(sleeper["unit"], "ActiveState", "SubState", "MainPID")
    up_s = guest.wait(lambda: show(UNIT, "ActiveState")["ActiveState"] == "active" and agent_pid() not in (old, "0"))
    lowered_s = guest.wait(is_lowered)
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
    guest.wait(is_lowered)
    away = order(*sh("while [ ! -e /run/go-on ]; do sleep 0.05; done; echo done; exit 0"), cores=0.5)
    guest.wait(lambda: any(job["state"] == "running" and job["cgroup"] for job in jobs_of(away)))
    began_s = time.monotonic()
    answer = guest.systemctl("stop", UNIT)
    took_s = time.monotonic() - began_s
    quota = quota_us()
    units = show(sleeper["unit"], "ActiveState", "SubState", "MainPID")
    Path("/run/go-on").touch()
    unit = jobs_of(away)[0]["cgroup"].rpartition("/")[2]
    ended_s = guest.wait(lambda: show(unit, "SubState")["SubState"] == "exited")
    stopped = show(UNIT, "ActiveState", "Result")
    start = guest.systemctl("start", UNIT)
    return {
        "answer": answer,
        "took_s": took_s,
        "original_us": quota,
        "meanwhile": units,
        "ended_s": ended_s,
        "stopped": stopped,
        "start": start,
        "away": wait_over(away),
        "lowered_again_s": guest.wait(is_lowered),
        "node_s": wait_node(1),
        **look(),
    }


def abort() -> dict[str, Any]:
    """The operation is aborted: its job's processes, unit and cgroup go, its log stays."""
    answer = json.loads(ask("POST", f"operations/{sleeper['operation']}/abort", {}) or b"null")
    gone_s = guest.wait(lambda: left_over() == {"units": [], "cgroups": []})
    over = wait_over(sleeper["operation"])
    return {
        "answer": answer,
        "gone_s": gone_s,
        "over": over,
        "alive": is_alive(sleeper["pid"]),
        "left": left_over(),
        "node_s": wait_node(0),
        "sandboxes": sorted(str(path) for path in JOBS_DIR.glob("*/sandbox")),
        "status": json.loads(guest.run("cpumond", "status", "--json")["output"]),
        "last_stop": guest.systemctl("stop", UNIT),
        **show(UNIT, "Result", "NRestarts"),
    }


STEPS: tuple[Callable[[], dict[str, Any]], ...] = (
    install, start, shrinks, sandbox, kill, stop, abort,
)  # fmt: skip


guest.live_through(
    STEPS, stop_after=lambda step: step is start and show(UNIT, "ActiveState")["ActiveState"] != "active"
)
