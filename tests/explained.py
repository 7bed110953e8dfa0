"""An agent's answer to ``cpumond explain``: job ``steady-low``, lowered to 3.2 of 10 cores."""

import msgspec

from cpumond.agent.control import view_settings
from cpumond.agent.explanation import add_sentences
from cpumond.core.answers import ExplainAnswer
from cpumond.monitor.model import MonitorSettings

JOB: dict[str, object] = {
    "job_id": "steady-low",
    "operation_id": "sort-17",
    "cgroup": "jobs/steady-low",
    "status": "reclaim",
    "mode": "reclaim",
    "refused": "",
    "cpu_limit": 10.0,
    "current_cpu_limit": 3.2,
    "monitor_cpu_limit": 3.2,
    "usage": 1.75,
    "smoothed_cpu_usage": 1.8,
    "votes_sum": -4,
    "throttled_ratio": 0.0,
    "last_result": "applied",
    "last_error": "",
    "override_left_s": None,
    "pinned_cpu_limit": None,
    "fast_restores": 0,
    "write_errors": 0,
}
BOUNDS: dict[str, object] = {
    "floor": 1.0,
    "cap": 10.0,
    "lower_bound": 1.92,
    "upper_bound": 2.88,
    "quota_found": None,
    "ancestor_cap": None,
    "ancestor": "",
}
WINDOW: dict[str, object] = {
    "size": 5,
    "values": [2.0, 1.9, 1.85, 1.82, 1.8],
    "votes": [0, -1, -1, -1, -1],
    "votes_sum": -4,
    "threshold": 3,
}
SHRINK: dict[str, object] = {
    "at": 1795223773.1,
    "kind": "shrink",
    "old_cores": 3.3,
    "new_cores": 3.2,
    "applied_cores": 3.2,
    "usage_cores": 1.75,
    "smoothed_cores": 1.8,
    "throttled_ratio": 0.0,
    "votes_sum": -4,
    "result": "applied",
}
RESTORE = {**SHRINK, "kind": "restore", "old_cores": 3.2, "new_cores": 10.0, "applied_cores": 10.0, "votes_sum": None}


PEAK: dict[str, object] = {
    "peak_cores": 3.05, "target_cores": 3.2, "caution": 3.0, "half_life_s": 40.0, "watched_s": 600.0, "held_count": 9,
    "held_s": 1.9, "held_ratio": 0.0031, "throttle_budget": 0.004,
}  # fmt: skip


def make_explain(
    bounds: dict[str, object] | None = None,
    window: dict[str, object] | None = None,
    section: dict[str, object] | None = None,
    **changes: object,
) -> ExplainAnswer:
    """What the agent answers to ``explain``, with changes to its parts; its sentences follow from them."""
    settings = msgspec.convert(section or {}, MonitorSettings)
    answer = {
        **JOB,
        "job_cpu_monitor": view_settings(settings, "reclaim"),
        "bounds": {**BOUNDS, **(bounds or {})},
        "window": {**WINDOW, **(window or {})},
        "in_force": {"quota_us": 320000, "period_us": 100000, "burst_us": 0, "weight": 100, "cores": 3.2},
        "found": {"quota_us": None, "period_us": 100000, "burst_us": 0, "weight": 100, "cores": None},
        "aggregated": {"smoothed_cpu_s": 20.0, "preemptible_cpu_s": 60.0, "preempted_cpu_s": 60.0, "max_cpu_s": 100.0},
        "decisions": [SHRINK],
        "directory": "/sys/fs/cgroup/jobs/steady-low",
        "source": "jobs/*",
        "cpu_limit_given": 10.0,
        **changes,
    }
    read = msgspec.json.decode(msgspec.json.encode(answer), type=ExplainAnswer)
    return add_sentences(read, settings, "cpumond unpin")
