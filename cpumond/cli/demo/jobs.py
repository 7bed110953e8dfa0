"""The plan of ``cpumond demo``: the node's size, the operations and their program, and when the load changes."""

from __future__ import annotations

import os
import sys
from typing import Any, Final, Literal, NamedTuple

import msgspec

MAX_CAPACITY = 2.0
MACHINE_SHARE = 0.5
"""The node's fraction of the machine's CPUs: even an overcommitted node must leave CPU to the scheduler, the agent and
everything else."""

CHECK_PERIOD_S = 0.5
OVERCOMMIT_S = 4.0
MONITOR = {"smoothing_factor": 0.3, "decrease_coefficient": 0.8, "relative_lower_bound": 0.3, "min_limit_ratio": 0.2}
QUICKER = (
    f"Faster than the defaults: check_period {CHECK_PERIOD_S:g}s, smoothing_factor {MONITOR['smoothing_factor']}, "
    f"decrease_coefficient {MONITOR['decrease_coefficient']}, relative_lower_bound {MONITOR['relative_lower_bound']}, "
    f"min_limit_ratio {MONITOR['min_limit_ratio']}, heartbeat_period 200ms, "
    f"allowed_node_resources_overcommit_duration {OVERCOMMIT_S:g}s."
)
WEIGHTS = {"research": 3.0, "batch": 1.0}

GUEST_S = 4.0
"""Seconds for which the guest (render, on freed CPU) runs before the simulation wakes up."""
ALONE_S = 2.0
"""Seconds for which the simulation stays awake after the guest has gone, within the bounds below."""
MIN_AWAKE_S = 5.0
MAX_AWAKE_S = 15.0
MAX_ASLEEP_S = 20.0

JOB_PROGRAM = """
import hashlib, os, select, sys, threading, time
owner, cores, seconds, path = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
try:
    lifeline = os.pidfd_open(owner)
except OSError:
    sys.exit(1)
threads = max(int(-(-cores // 1)), 1)
wanted, block = [cores], bytes(65536)
def burn():
    while True:
        begun = time.monotonic()
        duty = min(wanted[0] / threads, 1.0)
        while time.monotonic() < begun + 0.05 * duty:
            hashlib.sha256(block)
        if duty < 1.0:
            time.sleep(max(begun + 0.05 - time.monotonic(), 0.001))
for _ in range(threads):
    threading.Thread(target=burn, daemon=True).start()
start = time.monotonic()
while not select.select([lifeline], [], [], 0.05)[0] and not 0.0 < seconds < time.monotonic() - start:
    if path:
        with open(path) as file:
            wanted[0] = float(file.read() or wanted[0])
os._exit(0)
"""
"""Program with the arguments ``OWNER CORES SECONDS FILE``. It uses CORES, or as many cores as FILE says at the moment,
and ends with the process OWNER, or after SECONDS. It has threads in one process: hashing releases Python's lock."""

Load = Literal["simulation", "render", "frames"]
Lever = Literal["guarantee", "quota"]


class LeverWords(NamedTuple):
    """Words about an actuator: ``options`` of the monitor, a noun for what it sets, words for the full amount, and a
    sentence."""

    options: dict[str, Any]
    noun: str
    whole: str
    sentence: str


WORDS: Final[dict[Lever, LeverWords]] = {
    "guarantee": LeverWords(
        {"actuator": "guarantee", "use_restore_ratio": 1.0},
        "guarantee",
        "its whole guarantee",
        "Guarantees move, no quota does: jobs on the freed CPU are in the idle class, behind all others.",
    ),
    "quota": LeverWords({}, "limit", "all its CPU", "CPU quotas move (cpu.max, cpu.cfs_quota_us)."),
}


class PlannedOperation(msgspec.Struct, frozen=True):
    """One operation: ``cpu_limit`` and ``uses`` in cores; ``seconds``: lifetime of a job, 0 if it runs until stopped.

    ``at_once``: number of jobs that run at the same time, 0 for all. ``monitor``: the operation's ``job_cpu_monitor``.
    """

    pool: str
    cpu_limit: float
    uses: float
    job_count: int = 1
    seconds: float = 0.0
    at_once: int = 0
    monitor: dict[str, Any] = {}


class DemoPlan(msgspec.Struct, frozen=True):
    """The operations of the demo, on a node of ``capacity`` cores."""

    capacity: float
    operations: dict[Load, PlannedOperation]
    idle_cores: float

    def describe(self) -> str:
        simulation, render, frames = (self.operations[load] for load in ("simulation", "render", "frames"))
        return (
            f"The node offers {self.capacity:g} of this machine's cores. In pool {simulation.pool} (weight "
            f"{WEIGHTS[simulation.pool]:g}) simulation requests {simulation.cpu_limit:g} and mostly sleeps; in pool "
            f"{render.pool} (weight {WEIGHTS[render.pool]:g}) render requests {render.cpu_limit:g} and uses all it "
            f"gets, and short frames request {frames.cpu_limit:g} each."
        )


def make_plan(cpu_count: float) -> DemoPlan:
    capacity = min(cpu_count * MACHINE_SHARE, MAX_CAPACITY)
    return DemoPlan(
        capacity,
        {
            "simulation": PlannedOperation("research", capacity, capacity),
            # On a busy machine render gets less CPU than it wants; its limit should not follow this low usage.
            "render": PlannedOperation("batch", capacity / 2, capacity / 2, monitor={"mode": "up-only"}),
            "frames": PlannedOperation("batch", capacity / 10, capacity / 20, 10_000, 3.0, at_once=1),
        },
        idle_cores=capacity / 10,
    )


def make_command(operation: PlannedOperation, wanted_path: str = "") -> list[str]:
    """The command of a job; the job ends with this process."""
    arguments = [str(os.getpid()), str(operation.uses), str(operation.seconds), wanted_path]
    return [sys.executable, "-I", "-S", "-c", JOB_PROGRAM, *arguments]


class Sleeper:
    """Decides when the simulation sleeps and when it is awake. Times are seconds since the start of the demo."""

    def __init__(self) -> None:
        self.is_awake = False
        self._since_s = 0.0
        self._guest_runs = False
        self._guest_since_s = 0.0
        """When the guest started or ended, and when the simulation last woke up or fell asleep."""

    def look(self, now_s: float, guest_runs: bool, left_s: float) -> bool:
        """Note whether the guest runs; return True when the simulation has just woken up or fallen asleep."""
        if guest_runs != self._guest_runs:
            self._guest_runs, self._guest_since_s = guest_runs, now_s
        for_s, guest_s = now_s - self._since_s, now_s - self._guest_since_s
        if self.is_awake:
            is_alone = not guest_runs and guest_s >= ALONE_S
            changes = (for_s >= MIN_AWAKE_S and is_alone) or for_s >= MAX_AWAKE_S
        else:
            has_run = guest_runs and guest_s >= GUEST_S
            # There is no change if the demo would end before the effect can be seen.
            changes = left_s > CHECK_PERIOD_S * 4 and (has_run or for_s >= MAX_ASLEEP_S)
        if changes:
            self.is_awake = not self.is_awake
            self._since_s = self._guest_since_s = now_s
        return changes
