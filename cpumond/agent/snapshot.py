"""The published state of one tick; metrics and status read only this, never the live records."""

from __future__ import annotations

import msgspec

from cpumond.agent.tracked import TrackedView
from cpumond.core.answers import AssignedView, EngineAnswer, LinkView


class TickEnd(msgspec.Struct, frozen=True, gc=False):
    """The end of one tick: number, end (``at``, since 1970), begin (``at_s``, monotonic), how long it took."""

    tick: int
    at: float
    at_s: float
    duration_s: float
    check_period_s: float


class TickSnapshot(msgspec.Struct, frozen=True):
    """The agent after one tick.

    ``at`` seconds since 1970, ``at_s`` monotonic; ``counters`` name -> count since the start; ``problems`` sentences
    about jobs or files that need an operator; ``stride``: every so many ticks a job is checked (1 unless the agent is
    over its budget); ``service_ends``: systemd's word -> how often the service ended so. ``throttled_cpu_s`` and
    ``late_cpu_s``: sums over all jobs of this run, as in JobState.
    """

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
    """The jobs of the scheduler; None where no executor runs any."""
    link: LinkView | None = None
    service_ends: dict[str, int] = {}
    capacity_cores: float = 0.0
    throttled_cpu_s: float = 0.0
    late_cpu_s: float = 0.0
    engines: tuple[EngineAnswer, ...] = ()
    empty_cgroups: int = 0
    """Cgroups that a source names and that are no jobs, since no process is in them."""
