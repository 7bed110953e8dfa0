"""The rings of decisions and of samples: what goes in comes out, the oldest goes."""

import math
import sys

import msgspec
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from cpumond.agent.ring import KINDS, RESULTS, DecisionRing, SampleRecord, SampleRing
from cpumond.core.answers import DecisionAnswer
from cpumond.monitor.model import Decision

FLOATS = st.floats(allow_nan=False)
CORES = st.floats(allow_nan=False, allow_infinity=False) | st.none()
VOTES = st.none() | st.integers(-10_000, 10_000)
RATIOS = st.integers(0, 65_535).map(lambda steps: steps / 65_535)
RECORDS = st.builds(
    DecisionAnswer, at=FLOATS, kind=st.sampled_from(KINDS), old_cores=CORES, new_cores=CORES, applied_cores=CORES,
    usage_cores=FLOATS, smoothed_cores=FLOATS, throttled_ratio=st.floats(0.0, 1.0), votes_sum=VOTES,
    result=st.sampled_from(RESULTS), pressure_ratio=RATIOS, by_look=st.booleans(),
)  # fmt: skip
ONE = DecisionAnswer(1.0, "grow", 1.0, None, 2.0, 0.5, 0.6, 0.25, 4, "applied")


@examples(60)
@given(st.integers(1, 7), st.lists(RECORDS, max_size=20))
def test_a_ring_is_the_end_of_a_list(size, records):
    ring = DecisionRing(size)
    assert ring.records() == []
    for number, record in enumerate(records, 1):
        ring.append(record)
        assert ring.records() == records[max(number - size, 0) : number]


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


def test_every_decision_that_changes_a_limit_has_a_name_in_the_ring():
    kinds = next(field.type for field in msgspec.inspect.type_info(Decision).fields if field.name == "kind")
    assert isinstance(kinds, msgspec.inspect.LiteralType)
    assert set(kinds.values) - {"delay", "base", "hold"} <= set(KINDS)


SHORT = st.floats(0.0, 1e9, width=32)
SAMPLES = st.builds(
    SampleRecord, at=st.floats(0.0, 1e12), usage_cores=SHORT, smoothed_cores=st.none() | SHORT, limit_cores=SHORT,
    floor_cores=SHORT, votes_sum=VOTES, throttled_ratio=RATIOS, peak_cores=st.none() | SHORT,
)  # fmt: skip


def add(ring: SampleRing, sample: SampleRecord) -> None:
    ring.append(*(getattr(sample, name) for name in SampleRecord.__struct_fields__))


@examples(60)
@given(st.integers(1, 7), st.lists(SAMPLES, max_size=20), st.integers(1, 9), st.lists(SAMPLES, max_size=20))
def test_a_ring_of_another_size_keeps_the_newest(size, first, later_size, later):
    ring = SampleRing(size)
    for number, sample in enumerate(first, 1):
        add(ring, sample)
        assert ring.records() == first[max(number - size, 0) : number]
    ring.resize(later_size)
    kept = first[-size:][-later_size:]
    assert ring.records() == kept
    for sample in later:
        add(ring, sample)
    assert ring.records() == [*kept, *later][-later_size:]


def test_a_peak_takes_four_bytes_more_once_there_is_one():
    ring = SampleRing(180)
    for number in range(100):
        ring.append(float(number), 0.5, 0.4, 1.0, 0.1, 2, 0.25, None)
    assert len(ring._data) == 100 * 28
    assert sys.getsizeof(ring._data) <= 180 * 28 + 64
    for number in range(100, 400):
        ring.append(float(number), 0.5, None, 1.0, 0.1, None, 0.25, 0.75)
    assert len(ring._data) == 180 * 32
    assert sys.getsizeof(ring._data) <= 180 * 32 + 64
    assert {(sample.peak_cores, sample.votes_sum) for sample in ring.records()} == {(0.75, None)}


def test_more_cores_than_a_short_number_holds_do_not_stop_the_agent():
    ring = SampleRing(3)
    ring.append(5.0, 0.5, None, 1e300, math.inf, None, 0.0, 1e300)
    [sample] = ring.records()
    assert (sample.limit_cores > 1e38, sample.peak_cores) == (True, pytest.approx(3.4e38, rel=0.01))
