"""Which examples the laws are tried on: a few, the same in each run, or many others where that is asked for.

What decides about a change must not fail because of an example that any change could have met: looking for new ones is
the slow lane's work.
"""

from __future__ import annotations

import os
from typing import Any, Final

from hypothesis import settings

ALL: Final = os.environ.get("CPUMOND_EXAMPLES") == "all"
SHARE: Final = 4
"""Every so many of them otherwise."""


def examples(number: int, **others: Any) -> settings:
    """Settings of Hypothesis for ``number`` examples that are drawn anew in each run, or a fourth of them, always the
    same of a test as it stands."""
    return settings(max_examples=number if ALL else number // SHARE, deadline=None, derandomize=not ALL, **others)
