"""Find the cgroup of a job from a process that its engine names."""

from __future__ import annotations

CRUN_CHILD = "container"
"""Name of a child of a container's scope, into which crun puts the processes and the limit."""


def find_engine_cgroup(pid: int, job_id: str, cpu_version: int) -> str | None:
    """Find a whole container's cgroup, relative to the cpu hierarchy, by the container's first process.

    The cgroup must have ``job_id`` in its name: an engine may name the process of a different job, by mistake or
    because the PID was reused. Returns None if there is no such cgroup."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            return parse_engine_cgroup(file.read(), job_id, cpu_version)
    except OSError:
        return None


def parse_engine_cgroup(text: str, job_id: str, cpu_version: int) -> str | None:
    """Return the cgroup from the text of ``/proc/PID/cgroup``."""
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (cpu_version == 2 and controllers) or (cpu_version == 1 and "cpu" not in controllers.split(",")):
            continue
        parts = path.strip("/").split("/")
        if ".." in parts or not path.isprintable():
            return None
        level = next((number for number, part in enumerate(parts, 1) if job_id in part), None)
        if level is None:
            return None
        if parts[level : level + 1] == [CRUN_CHILD]:
            level += 1
        return "/".join(parts[:level])
    return None
