"""Units whose limits the hardened agent moves, over D-Bus or by file: facts of ``guest/units.py``, of one boot."""

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
