"""The rules by which a limit moves, by the name that ``limit_rule`` gives them (limit_rules.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from cpumond.monitor import peak, policy
from cpumond.monitor.model import CpuReading, JobState, LimitRule, MonitorSettings
from cpumond.monitor.policy import Stepped


class Rule(NamedTuple):
    """A rule: ``step`` decides at a check, as ``policy.step``; ``look`` between two of them, as ``policy.look``."""

    step: Callable[..., Stepped]
    look: Callable[[JobState, CpuReading, MonitorSettings], Stepped | None]


RULES: Final[dict[LimitRule, Rule]] = {
    "document": Rule(policy.step, policy.look),
    "peak": Rule(peak.step, peak.look),
}
"""A new one needs a name in ``LimitRule`` and a line in ``RULE_DEFAULTS``, too (both in ``model.py``)."""


def check(state: JobState, reading: CpuReading | None, now_s: float, s: MonitorSettings) -> Stepped:
    """One check of a job by its rule; see ``policy.check``."""
    return policy.check(state, reading, now_s, s, RULES[s.limit_rule].step)


def look(state: JobState, reading: CpuReading, s: MonitorSettings) -> Stepped | None:
    """A look at a job between two checks by its rule, None where its state stays; only where ``s.poll_s`` is > 0."""
    return RULES[s.limit_rule].look(state, reading, s)
