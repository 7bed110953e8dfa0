"""How many examples the laws are tried on: a few others in each run, or many where that is asked for."""

from __future__ import annotations

import os
from typing import Any, Final

from hypothesis import settings

ALL: Final = os.environ.get("CPUMOND_EXAMPLES") == "all"
SHARE: Final = 4
"""Every so many of them otherwise."""


def examples(number: int, **others: Any) -> settings:
    """Settings of Hypothesis for ``number`` examples, or a fourth of them."""
    return settings(max_examples=number if ALL else number // SHARE, deadline=None, **others)
