"""How many examples the laws are tried on: a few others in each run, more with `pytest --all` or where files are named,
many with CPUMOND_EXAMPLES=all; in CI always the same ones, since a new one must not decide there."""

import os
from typing import Any, Final

from hypothesis import settings

ALL: Final = os.environ.get("CPUMOND_EXAMPLES") == "all"
REQUIRED: Final = os.environ.get("CPUMOND_REQUIRE") == "all"
WHOLE: Final = ALL or os.environ.get("CPUMOND_LANE") != "short"
"""Whether this run is more than the short lane. ``conftest`` sets the variable before a test module is imported."""
SAME: Final = REQUIRED and not ALL
SHARE: Final = 1 if ALL else 4 if WHOLE else 12
"""One of so many examples is tried."""


def examples(number: int, **others: Any) -> settings:
    """Settings of Hypothesis for the run's share of ``number`` examples."""
    return settings(max_examples=max(number // SHARE, 1), deadline=None, derandomize=SAME, **others)
