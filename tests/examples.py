"""How many examples the laws are tried on: a few others in each run, the same few in CI, many where that is asked for.

CI judges a change by what it changes, so an example that nobody has seen before must not decide there.
"""

from __future__ import annotations

import os
from typing import Any, Final

from hypothesis import settings

ALL: Final = os.environ.get("CPUMOND_EXAMPLES") == "all"
REQUIRED: Final = os.environ.get("CPUMOND_REQUIRE") == "all"
SAME: Final = REQUIRED and not ALL
SHARE: Final = 4
"""Every so many of them otherwise."""


def examples(number: int, **others: Any) -> settings:
    """Settings of Hypothesis for ``number`` examples, or a fourth of them."""
    return settings(max_examples=number if ALL else number // SHARE, deadline=None, derandomize=SAME, **others)
