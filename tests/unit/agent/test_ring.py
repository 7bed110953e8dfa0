"""The ring of decisions: what goes in comes out, the oldest goes."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpumond.agent.ring import KINDS, RESULTS, DecisionRecord, DecisionRing
from cpumond.monitor.model import Decision

FLOATS = st.floats(allow_nan=False)
RECORDS = st.builds(
    DecisionRecord,
    at=FLOATS,
    kind=st.sampled_from(KINDS),
    old_cores=FLOATS,
    new_cores=FLOATS,
    applied_cores=FLOATS,
    usage_cores=FLOATS,
    smoothed_cores=FLOATS,
    throttled_ratio=st.floats(0.0, 1.0),
    votes_sum=st.none() | st.integers(-10_000, 10_000),
    result=st.sampled_from(RESULTS),
)
ONE = DecisionRecord(1.0, "grow", 1.0, math.inf, 2.0, 0.5, 0.6, 0.25, 4, "applied")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.lists(RECORDS, max_size=20))
def test_a_ring_is_the_end_of_a_list(size, records):
    ring = DecisionRing(size)
    for number, record in enumerate(records, 1):
        ring.append(record)
        assert ring.records() == records[max(number - size, 0) : number]


def test_an_empty_ring():
    assert DecisionRing().records() == []


def test_a_hundred_are_kept_in_little_memory():
    ring = DecisionRing()
    for number in range(250):
        ring.append(msgspec.structs.replace(ONE, at=float(number)))
    assert [record.at for record in ring.records()] == [float(number) for number in range(150, 250)]
    assert len(ring._data) <= 100 * 64


@pytest.mark.parametrize(("votes", "kept"), [(None, None), (0, 0), (-4, -4), (99_999, 32_767), (-99_999, -32_767)])
def test_votes(votes, kept):
    ring = DecisionRing()
    ring.append(msgspec.structs.replace(ONE, votes_sum=votes))
    assert ring.records()[0].votes_sum == kept


def test_every_kind_of_decision_that_changes_a_limit_has_a_name_in_the_ring():
    kinds = next(field.type for field in msgspec.inspect.type_info(Decision).fields if field.name == "kind")
    assert isinstance(kinds, msgspec.inspect.LiteralType)
    assert set(kinds.values) - {"delay", "base", "hold"} <= set(KINDS)
