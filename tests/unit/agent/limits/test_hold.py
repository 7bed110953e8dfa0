"""Who decides about a limit: what each event makes of it."""

import math
from dataclasses import replace

import pytest

from cpumond.agent.limits.hold import UNHELD, AskingSystemd, Contested, Hold, Pinned, Respected
from cpumond.host.cgroup.settings import CpuSettings

QUOTA, OTHER = CpuSettings(400_000, 100_000), CpuSettings(100_000, 100_000)
ASKING = AskingSystemd(QUOTA, 5.0)
PINNED = Hold(Pinned(1.0))
OVERRIDDEN_PIN = Hold(Respected(70.0, pin=1.0))
CONTESTED = Hold(Contested(), losses=3, lost_at_s=9.0)

CASES = {
    "a pin": (Hold(write_at_s=3.0, losses=2), lambda hold: hold.pin(1.0), PINNED),
    "a pin ends an override": (OVERRIDDEN_PIN, lambda hold: hold.pin(2.0), Hold(Pinned(2.0))),
    "a pin ends a contest": (CONTESTED, lambda hold: hold.pin(2.0), Hold(Pinned(2.0), lost_at_s=9.0)),
    "a pin does not answer": (Hold(asking=ASKING), lambda hold: hold.pin(1.0), Hold(Pinned(1.0), ASKING)),
    "a pin that is over": (PINNED, lambda hold: hold.unpin(), UNHELD),
    "a pin that is over under an override": (OVERRIDDEN_PIN, lambda hold: hold.unpin(), Hold(Respected(70.0))),
    "no pin": (UNHELD, lambda hold: hold.unpin(), UNHELD),
    "an order": (Hold(write_at_s=3.0), lambda hold: hold.respect(10.0, 60.0, "by"), Hold(Respected(70.0, "by"))),
    "an order over a pin": (PINNED, lambda hold: hold.respect(10.0, 60.0), OVERRIDDEN_PIN),
    "an order after an order": (OVERRIDDEN_PIN, lambda hold: hold.respect(20.0, 60.0), Hold(Respected(80.0, pin=1.0))),
    "an order without a time": (Hold(write_at_s=3.0), lambda hold: hold.respect(10.0, 0.0), UNHELD),
    "an order in a contest": (CONTESTED, lambda hold: hold.respect(10.0, 60.0), CONTESTED),
    "an order that lasts": (OVERRIDDEN_PIN, lambda hold: hold.expire(69.9), OVERRIDDEN_PIN),
    "an order whose time is over": (OVERRIDDEN_PIN, lambda hold: hold.expire(70.0), UNHELD),
    "a pin does not expire": (PINNED, lambda hold: hold.expire(math.inf), PINNED),
    "given back": (OVERRIDDEN_PIN, lambda hold: hold.release(10.0), UNHELD),
    "given back after a contest": (CONTESTED, lambda hold: hold.release(10.0), Hold(write_at_s=10.0, lost_at_s=9.0)),
    "a question": (PINNED, lambda hold: hold.ask(QUOTA, 5.0), Hold(Pinned(1.0), ASKING)),
    "a second question": (Hold(asking=ASKING), lambda hold: hold.ask(OTHER, 6.0), Hold(asking=ASKING)),
    "an answer": (Hold(Pinned(1.0), ASKING), lambda hold: hold.answered(), PINNED),
    "a lost limit": (UNHELD, lambda hold: hold.lose(10.0, 30.0, 3), Hold(write_at_s=40.0, losses=1, lost_at_s=10.0)),
    "lost again": (
        Hold(losses=1, lost_at_s=10.0),
        lambda hold: hold.lose(50.0, 30.0, 3),
        Hold(write_at_s=110.0, losses=2, lost_at_s=50.0),
    ),
    "lost too often": (
        replace(PINNED, losses=2, lost_at_s=10.0),
        lambda hold: hold.lose(50.0, 30.0, 3),
        Hold(Contested(1.0), losses=3, lost_at_s=50.0),
    ),
    "a write that failed": (UNHELD, lambda hold: hold.fail(40.0), Hold(write_after_s=40.0)),
    "to be written": (UNHELD, lambda hold: hold.write(40.0), Hold(write_at_s=40.0)),
    "written": (Hold(write_at_s=40.0), lambda hold: hold.write(None), UNHELD),
}  # fmt: skip


@pytest.mark.parametrize(("before", "event", "after"), CASES.values(), ids=CASES)
def test_what_an_event_makes_of_a_hold(before, event, after):
    assert event(before) == after


@pytest.mark.parametrize(
    ("losses", "backoff_s", "calm_s"), [(1, 30.0, 600.0), (2, 30.0, 600.0), (3, 30.0, 960.0), (1, 300.0, 2400.0)]
)
def test_losses_far_enough_apart_are_no_contest(losses, backoff_s, calm_s):
    """Each waits longer for the next write: the calm it takes to forget them is four times as long as that."""
    before = Hold(losses=losses, lost_at_s=0.0)
    assert before.lose(calm_s - 1.0, backoff_s, 99).losses == losses + 1
    assert before.lose(calm_s, backoff_s, 99).losses == 1


@pytest.mark.parametrize(("hold", "is_free", "is_own", "pinned"), [
    (UNHELD, True, True, None),
    (PINNED, False, True, 1.0),
    (OVERRIDDEN_PIN, False, False, 1.0),
    (CONTESTED, False, False, None),
    (Hold(asking=ASKING), False, False, None),
])  # fmt: skip
def test_who_decides(hold, is_free, is_own, pinned):
    assert (hold.is_free, hold.is_own, hold.pinned_cores) == (is_free, is_own, pinned)
