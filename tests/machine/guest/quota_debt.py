"""Runs inside the guest: whether a quota stops a long system call, by counts alone (semantics.md 1.6)."""

import json
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
GROUP = ROOT / "cpumond-debt"
QUOTA_US, MAPPED_BYTES = 10_000, 200 << 20
CHILD = f"""
import mmap, sys
print("begun", flush=True)
sys.stdin.read()
mmap.mmap(-1, {MAPPED_BYTES}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
"""


def read_counts() -> tuple[int, int]:
    """Used microseconds, and periods of the quota."""
    counts = dict(line.split() for line in (GROUP / "cpu.stat").read_text().splitlines())
    return int(counts["usage_usec"]), int(counts["nr_periods"])


def main() -> None:
    (ROOT / "cgroup.subtree_control").write_text("+cpu")
    GROUP.mkdir()
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    (GROUP / "cgroup.procs").write_text(str(child.pid))
    (GROUP / "cpu.max").write_text(f"{QUOTA_US} 100000")
    begun_us, first_period = read_counts()
    child.stdin.close()
    used_us = beyond_us = 0
    while child.poll() is None:
        now_us, period = read_counts()
        used_us = now_us - begun_us
        beyond_us = max(beyond_us, used_us - QUOTA_US * (period - first_period + 1))
    GROUP.rmdir()
    facts = {"release": platform.release(), "code": child.returncode, "used_us": used_us, "beyond_us": beyond_us}
    Path("/out/facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
