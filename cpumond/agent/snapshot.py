"""The published state after one tick. Metrics and status read only this, never the live records."""

from __future__ import annotations

import msgspec

from cpumond.agent.tracked import TrackedView
from cpumond.core.answers import AssignedView, EngineAnswer, LinkView


class TickEnd(msgspec.Struct, frozen=True, gc=False):
    """The end of one tick: its number, end (``at``, since 1970), begin (``at_s``, monotonic) and duration."""

    tick: int
    at: float
    at_s: float
    duration_s: float
    check_period_s: float


class TickSnapshot(msgspec.Struct, frozen=True):
    """The agent after one tick.

    ``at`` is in seconds since 1970, ``at_s`` is monotonic. ``counters``: name -> count since the start. ``problems``:
    sentences about jobs or files that need an operator. ``stride``: number of ticks per check of a job (1 unless the
    agent exceeds its budget). ``service_ends``: systemd's result -> number of ends of the service with this result.
    ``throttled_cpu_s`` and ``late_cpu_s`` (see JobState) are sums over all jobs of this run."""

    tick: int
    at: float
    at_s: float
    duration_s: float
    node_id: str
    layout: str
    check_period_s: float
    jobs: tuple[TrackedView, ...]
    decisions: dict[str, int]
    foreign_writes: dict[str, int]
    counters: dict[str, int]
    tick_buckets: tuple[int, ...]
    tick_seconds: float
    problems: tuple[str, ...]
    paused: bool
    stride: int
    empty_rescans: int
    assigned: AssignedView | None = None
    """The scheduler's jobs on this node; None without an executor."""
    link: LinkView | None = None
    service_ends: dict[str, int] = {}
    capacity_cores: float = 0.0
    throttled_cpu_s: float = 0.0
    late_cpu_s: float = 0.0
    engines: tuple[EngineAnswer, ...] = ()
    empty_cgroups: int = 0
    """Number of cgroups that match a source but are not jobs, because they contain no process."""
