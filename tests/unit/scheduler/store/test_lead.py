"""When a scheduler looks, renews, answers and steps down: the state machine alone, on a clock that the tests set."""

import math

import pytest

from cpumond.scheduler.store import Lease
from cpumond.scheduler.store.lead import Lead, LeadStep

LEASE_S = 10.0
STANDBY = Lead(LEASE_S).seen(Lease(3, "a:1", 5.0), 100.0)
LEADER = Lead(LEASE_S).taken(Lease(4, "b:1", LEASE_S), 100.0, 100.0)


@pytest.mark.parametrize(
    ("lead", "at", "before"),
    [
        pytest.param(Lead(LEASE_S), 0.0, None, id="at once"),
        pytest.param(STANDBY, 101.0, LeadStep.WAIT, id="a standby each second"),
        pytest.param(Lead(0.6).seen(None, 0.0), 0.2, LeadStep.WAIT, id="more often where the lease is short"),
        pytest.param(STANDBY.failed("no answer", 101.0), 102.0, LeadStep.WAIT, id="again where nobody answered"),
        pytest.param(LEADER.ended(105.0), 105.0, None, id="at once after its end"),
        pytest.param(LEADER.ended(105.0, 10.0), 115.0, LeadStep.WAIT, id="after a rest"),
    ],
)
def test_when_it_looks(lead: Lead, at: float, before: LeadStep | None) -> None:
    assert lead.find_step(at) is LeadStep.TAKE
    assert before is None or lead.find_step(at - 0.1) is before
    assert not lead.may_answer(lead.term, at)


@pytest.mark.parametrize(
    ("lead", "at"),
    [
        pytest.param(LEADER, 103.4, id="each third"),
        pytest.param(LEADER.renewed(103.4, 103.6), 106.8, id="counted from when it asked"),
        pytest.param(LEADER.failed("no answer", 104.0), 104.5, id="soon where it failed"),
    ],
)
def test_when_a_leader_renews(lead: Lead, at: float) -> None:
    assert (lead.find_step(at - 0.1), lead.find_step(at)) == (LeadStep.WAIT, LeadStep.RENEW)
    assert (lead.may_answer(4, at), lead.may_answer(3, at)) == (True, False), "in its term alone"


@pytest.mark.parametrize(
    ("lead", "end", "has_answered"),
    [
        pytest.param(LEADER, 109.5, True, id="before its lease is over"),
        pytest.param(LEADER.renewed(103.4, 103.6), 112.9, True, id="after a renewal"),
        pytest.param(Lead(LEASE_S).taken(Lease(4, "b:1", LEASE_S), 100.0, 120.0), 120.0, False, id="a long pause"),
        pytest.param(LEADER.renewed(109.0, 110.0), 110.0, False, id="a renewal that came too late"),
    ],
)
def test_when_a_leader_steps_down(lead: Lead, end: float, has_answered: bool) -> None:
    assert lead.find_step(end + 0.1) is LeadStep.END
    assert (lead.may_answer(4, end - 0.1), lead.may_answer(4, end + 0.1)) == (has_answered, False)


def test_who_leads_and_what_went_wrong_is_known() -> None:
    assert (STANDBY.term, STANDBY.leader, STANDBY.is_own) == (3, "a:1", False)
    assert Lead(LEASE_S).seen(Lease(3, "a:1", 0.0), 0.0).leader == "", "its lease is over"
    assert Lead(LEASE_S).seen(None, 0.0).term == 0
    failed = STANDBY.failed("no answer", 101.0)
    assert (failed.term, failed.find_leader(109.9), failed.find_leader(110.0)) == (3, "a:1", "")
    assert (failed.error, LEADER.failed("no answer", 104.0).renewed(104.5, 104.6).error) == ("no answer", "")
    assert not LEADER.ended(105.0).renewed(104.0, 105.0).is_own
    assert LEADER.ended(105.0, 10.0).until_s == -math.inf


def test_how_long_it_waits() -> None:
    assert STANDBY.wait_s(100.9, False) == pytest.approx(0.1)
    assert STANDBY.wait_s(101.0, True) is None
    assert LEADER.wait_s(104.0, True) == pytest.approx(5.5)
