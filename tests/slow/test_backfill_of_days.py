"""Three days of the backfill week: half of what was idle is used, gangs start no later (tests/bench/backfill.py)."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))  # last: modules of tests have names that are there, too

from backfill import compare, find_faults
from played_backfill import HOUR_S

pytestmark = pytest.mark.timeout(1200)


def test_three_days_halve_idle_core_hours_and_gangs_start_no_later():
    assert find_faults(*compare(1, 72 * HOUR_S)) == []
