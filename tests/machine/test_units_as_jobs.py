"""Units of a real systemd whose limits the hardened agent moves: over D-Bus, and by file where that cannot be.

One boot lives it all (``guest/units.py``, about a minute) and leaves facts; each test judges one of them. The same
script runs on the other layouts of cgroups in the emulated machine.
"""

from collections.abc import Callable

import pytest
from guest_host import Facts, lives
from judge_units import CHECKS

LIMIT_S = 240
pytestmark = [pytest.mark.machine, pytest.mark.timeout(900)]


facts = lives("units.py", LIMIT_S)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_units(facts: Facts, check: Callable[[Facts, float], None]) -> None:
    check(facts, 1.0)
