"""Who wrote a unit's limit: each case that a host with systemd has shown."""

from dataclasses import replace

import pytest

from cpumond.agent.limits.judge import Observation, UnitTarget, WriteVerdict, judge
from cpumond.host.systemd.properties import NO_LIMIT, QUOTA, WEIGHT


def quota(cores: float) -> tuple[tuple[str, int], ...]:
    return ((QUOTA, round(cores * 1e6)),)


UNASKED = UnitTarget()
LOWERED = UnitTarget(quota(0.5), (), quota(0.5), acknowledged=True)
"""From 4 cores to a half; systemd has taken it."""
ON_ITS_WAY = UnitTarget(quota(4.0), (quota(0.5),), quota(1.0), acknowledged=True)
"""Back to 4 cores; systemd took the step before the last one."""
BY_FILE = UnitTarget(quota(0.5), submitted=True)
"""systemd did not take it."""


def seen(cores: float, told: float | None = None, **more: object) -> Observation:
    """``cores`` in the file of a unit that was found with 4; ``told``: systemd's own value, None where it is away."""
    return Observation(QUOTA, round(cores * 1e6), 4_000_000, None if told is None else round(told * 1e6), **more)  # type: ignore[arg-type]


CASES = {
    "before systemd was asked": (LOWERED, seen(2.0, is_asked=False), WriteVerdict.UNKNOWN),
    "the newest limit of ours": (LOWERED, seen(0.5, is_asked=False), WriteVerdict.OWN),
    "an older one": (ON_ITS_WAY, seen(0.5, is_asked=False), WriteVerdict.OWN),
    "the one it took last": (ON_ITS_WAY, seen(1.0, is_asked=False), WriteVerdict.OWN),
    "one that it has rounded": (ON_ITS_WAY, seen(0.505, is_asked=False), WriteVerdict.OWN),
    "one that it has written meanwhile": (ON_ITS_WAY, seen(0.5, 4.0), WriteVerdict.OWN),
    "nothing was told": (UNASKED, seen(4.0, is_asked=False), WriteVerdict.UNKNOWN),
    "set-property up": (LOWERED, seen(2.0, 2.0), WriteVerdict.OPERATOR),
    "set-property down": (LOWERED, seen(0.2, 0.2), WriteVerdict.OPERATOR),
    "set-property above what was found": (LOWERED, seen(8.0, 8.0), WriteVerdict.OPERATOR),
    "set-property to what was found": (LOWERED, seen(4.0, 4.0), WriteVerdict.OPERATOR),
    "the same at a reload": (LOWERED, seen(4.0, 4.0, is_reloaded=True), WriteVerdict.OUTRANKED),
    "another at a reload": (LOWERED, seen(2.0, 2.0, is_reloaded=True), WriteVerdict.OPERATOR),
    "the file alone, up": (LOWERED, seen(3.0, 0.5), WriteVerdict.FILE),
    "the file alone, down": (LOWERED, seen(0.1, 0.5), WriteVerdict.FILE),
    "the file alone, to what was found": (LOWERED, seen(4.0, 0.5), WriteVerdict.FILE),
    "a reload of what it was never told": (BY_FILE, seen(4.0, 4.0, is_reloaded=True), WriteVerdict.STORED),
    "the same without a word of a reload": (UNASKED, seen(4.0, 4.0), WriteVerdict.STORED),
    "set-property where nothing was taken": (BY_FILE, seen(2.0, 2.0), WriteVerdict.OPERATOR),
    "systemd away, less than found": (LOWERED, seen(2.0), WriteVerdict.FILE),
    "systemd away, as found": (LOWERED, seen(4.0), WriteVerdict.STORED),
    "systemd away, more than found": (LOWERED, seen(8.0), WriteVerdict.OPERATOR),
    "perhaps the run before": (UNASKED, seen(2.0, 2.0, is_inherited=True), WriteVerdict.FILE),
    "more than the run before would": (UNASKED, seen(8.0, 8.0, is_inherited=True), WriteVerdict.OPERATOR),
    "a run before that this one followed": (LOWERED, seen(2.0, 2.0, is_inherited=True), WriteVerdict.OPERATOR),
    "a conflict": (LOWERED, seen(2.0, 2.0, is_conflict=True), WriteVerdict.OPERATOR),
    "a conflict over nearly ours": (LOWERED, seen(0.505, 0.505, is_conflict=True), WriteVerdict.OPERATOR),
    "no conflict": (LOWERED, seen(0.5, 0.5, is_conflict=True), WriteVerdict.OWN),
    "a conflict after a reload": (LOWERED, seen(4.0, 4.0, is_conflict=True, is_reloaded=True), WriteVerdict.OUTRANKED),
}


@pytest.mark.parametrize(("record", "observed", "verdict"), CASES.values(), ids=CASES)
def test_who_wrote_a_limit(record, observed, verdict):
    assert judge(record, observed) is verdict


def test_no_quota_is_no_rounding_of_one():
    observed = replace(seen(1.0), found=NO_LIMIT, told=NO_LIMIT)
    assert judge(LOWERED, observed) is WriteVerdict.OPERATOR
    assert judge(LOWERED, replace(observed, original=NO_LIMIT)) is WriteVerdict.OPERATOR
    assert judge(LOWERED, replace(observed, original=NO_LIMIT, is_reloaded=True)) is WriteVerdict.OUTRANKED


def test_weights_are_not_rounded():
    record = UnitTarget(((WEIGHT, 40),), acknowledged=True)
    assert judge(record, Observation(WEIGHT, 41, 100, 41)) is WriteVerdict.OPERATOR
    assert judge(record, Observation(WEIGHT, 41, 100, 40)) is WriteVerdict.FILE
