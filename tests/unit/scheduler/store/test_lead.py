"""When a scheduler looks, renews, answers and steps down: the state machine alone, on a clock that the tests set."""

from __future__ import annotations

import math

import pytest

from cpumond.scheduler.store import Lease
from cpumond.scheduler.store.lead import Lead, LeadStep

LEASE_S = 10.0


def test_it_looks_at_once():
    lead = Lead(LEASE_S)
    assert lead.find_step(0.0) is LeadStep.TAKE
    assert not lead.may_answer(0, 0.0)


def test_a_standby_looks_again_each_second_and_knows_the_leader():
    lead = Lead(LEASE_S).seen(Lease(3, "a:1", 5.0), 100.0)
    assert (lead.term, lead.leader, lead.is_own) == (3, "a:1", False)
    assert lead.find_step(100.9) is LeadStep.WAIT
    assert lead.wait_s(100.9, False) == pytest.approx(0.1)
    assert lead.find_step(101.0) is LeadStep.TAKE
    assert lead.wait_s(101.0, True) is None
    assert not lead.may_answer(3, 100.0)


def test_a_leader_whose_lease_is_over_is_none():
    assert Lead(LEASE_S).seen(Lease(3, "a:1", 0.0), 0.0).leader == ""
    assert Lead(LEASE_S).seen(None, 0.0).term == 0


def test_a_short_lease_is_looked_at_more_often():
    assert Lead(0.6).seen(None, 0.0).next_s == pytest.approx(0.2)


def test_a_leader_renews_each_third_and_answers_in_its_term_alone():
    lead = Lead(LEASE_S).taken(Lease(4, "b:1", LEASE_S), 100.0, 100.5)
    assert lead.is_own
    assert lead.may_answer(4, 100.5)
    assert not lead.may_answer(3, 100.5)
    assert lead.find_step(103.3) is LeadStep.WAIT
    assert lead.find_step(103.4) is LeadStep.RENEW
    renewed = lead.renewed(103.4, 103.6)
    assert renewed.until_s == pytest.approx(112.9)
    assert renewed.find_step(106.7) is LeadStep.WAIT


def test_it_stops_answering_before_the_lease_is_over_counted_from_when_it_asked():
    lead = Lead(LEASE_S).taken(Lease(4, "b:1", LEASE_S), 100.0, 104.0)
    assert lead.may_answer(4, 109.4)
    assert not lead.may_answer(4, 109.6)
    assert lead.find_step(109.6) is LeadStep.END
    assert lead.wait_s(104.0, True) == pytest.approx(5.5)


def test_an_answer_that_came_after_a_long_pause_gives_no_lease():
    assert Lead(LEASE_S).taken(Lease(4, "b:1", LEASE_S), 100.0, 120.0).find_step(120.0) is LeadStep.END


def test_a_renewal_does_not_bring_back_what_is_over():
    lead = Lead(LEASE_S).taken(Lease(4, "b:1", LEASE_S), 100.0, 100.0)
    assert lead.renewed(109.0, 110.0).find_step(110.0) is LeadStep.END
    assert not lead.ended(105.0).renewed(104.0, 105.0).is_own


def test_a_failed_renewal_is_tried_again_soon_and_the_lease_goes_on():
    lead = Lead(LEASE_S).taken(Lease(4, "b:1", LEASE_S), 100.0, 100.0).failed("no answer", 104.0)
    assert lead.may_answer(4, 104.0)
    assert lead.error == "no answer"
    assert lead.find_step(104.4) is LeadStep.WAIT
    assert lead.find_step(104.5) is LeadStep.RENEW
    assert lead.renewed(104.5, 104.6).error == ""


def test_a_standby_that_is_not_answered_keeps_what_it_knew():
    lead = Lead(LEASE_S).seen(Lease(3, "a:1", 5.0), 100.0).failed("no answer", 101.0)
    assert (lead.term, lead.find_leader(109.9), lead.error) == (3, "a:1", "no answer")
    assert lead.find_leader(110.0) == ""
    assert lead.find_step(102.0) is LeadStep.TAKE


def test_after_its_end_it_is_a_standby_at_once_or_after_a_rest():
    lead = Lead(LEASE_S).taken(Lease(4, "b:1", LEASE_S), 100.0, 100.0)
    assert lead.ended(105.0).find_step(105.0) is LeadStep.TAKE
    rested = lead.ended(105.0, 10.0)
    assert rested.until_s == -math.inf
    assert rested.find_step(114.9) is LeadStep.WAIT
    assert rested.find_step(115.0) is LeadStep.TAKE
