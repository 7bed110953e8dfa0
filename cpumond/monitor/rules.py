"""The rules that move a limit, by their names in ``limit_rule`` (limit_rules.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from cpumond.monitor import peak, policy
from cpumond.monitor.model import CpuReading, JobState, LimitRule, MonitorSettings
from cpumond.monitor.policy import Stepped


class Rule(NamedTuple):
    """A rule. ``step`` decides at a check, like ``policy.step``; ``look`` between two checks, like ``policy.look``."""

    step: Callable[..., Stepped]
    look: Callable[[JobState, CpuReading, MonitorSettings], Stepped | None]


RULES: Final[dict[LimitRule, Rule]] = {"document": Rule(policy.step, policy.look), "peak": Rule(peak.step, peak.look)}
"""Name -> rule. A new rule also needs its name in ``LimitRule`` and a line in ``RULE_DEFAULTS`` (``model.py``)."""


def check(state: JobState, reading: CpuReading | None, now_s: float, s: MonitorSettings) -> Stepped:
    """Check a job by the rule in its settings; see ``policy.check``."""
    return policy.check(state, reading, now_s, s, RULES[s.limit_rule].step)


def look(state: JobState, reading: CpuReading, s: MonitorSettings) -> Stepped | None:
    """Look at a job between two checks by the rule in its settings; return None if the state does not change. To be
    called only if ``s.poll_s`` is > 0."""
    return RULES[s.limit_rule].look(state, reading, s)
